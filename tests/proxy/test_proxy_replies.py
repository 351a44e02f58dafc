"""What a server's reply is when its client gets it through a proxy."""

import pytest

from memoire.models.model import ModelStore
from memoire.proxy.backend import ProxyCounts
from memoire.proxy.requests import Replies
from memoire.wire import messages, types
from memoire.wire.frames import encode, parse
from memoire.wire.receivers import Receiver, Receivers
from proxykit import ADDRESS, HOME, LIMITS, Back, router, welcome

pytestmark = pytest.mark.usefixtures("without_io")

OWN = messages.Endpoints(request="tcp://me")


class World:
    """A proxy between servers a and b and their clients, as far as replies go."""

    def __init__(self):
        self.first, self.second = Back("a", endpoint="tcp://a"), Back("b", endpoint="tcp://b")
        self.router, self.counts, self.store = router(self.first, self.second), ProxyCounts(), ModelStore(1 << 20)
        self.receivers = Receivers()
        self.replies = Replies(self.router, OWN, self.store, LIMITS, self.counts, self.receivers)

    def retire_first(self):
        self.router.relist(["tcp://b"], Back, 100.0)

    def take(self, frames, back=None):
        return self.replies.take(back or self.first, frames)


def reply(body, home="a", payload=None):
    return [*ADDRESS, *encode(body, client=b"c" * 16, home=HOME(home), sequence=4, payload=payload)]


def read(frames):
    assert frames[:2] == ADDRESS
    return parse(frames[2:])


def test_most_replies_are_handed_on_as_they_are():
    world = World()
    for body in (messages.Updated(), messages.Refused(code="busy", text="not now")):
        frames = reply(body)
        assert world.take(frames) is frames
    assert world.take([*ADDRESS, b"what is this"]) == [*ADDRESS, b"what is this"]  # its client says so
    assert world.counts.replies == 3 and not world.counts.refused


def test_a_welcome_gets_the_proxys_own_addresses_list_and_models():
    world = World()
    world.store.publish("policy", b"weights", 7)
    said = read(world.take(reply(welcome("a", models={"policy": 5}))))
    assert (said.body.endpoints, said.body.servers, said.body.models) == (OWN, ["a", "b"], {"policy": 7})
    assert (said.header.sequence, said.header.home) == (4, HOME("a"))


def test_a_server_that_answers_before_it_was_listed_is_reached_by_that_way():
    world = World()
    world.take(reply(welcome("new"), home="new"), world.second)
    assert world.router.homes[HOME("new")] is world.second


def test_clients_of_a_server_that_was_taken_off_the_list_are_told_to_leave_it():
    world = World()
    frames = reply(messages.Updated(caches=3), payload=b"feedback")
    assert world.take(frames) is frames
    world.retire_first()
    said = read(world.take(frames))
    assert (said.body.leaving, said.body.caches, bytes(said.payload)) == (True, 3, b"feedback")
    assert world.take(reply(messages.Updated()), world.second) == reply(messages.Updated())
    refused = reply(messages.Refused(code="busy", text="not now"))
    assert world.take(refused) is refused


def test_a_damaged_reply_is_refused_if_it_is_looked_into():
    world = World()
    frames = reply(welcome("a"))
    frames[2] = bytes(frames[2][:-1]) + bytes([frames[2][-1] ^ 1])
    assert world.take(frames) is None and world.take([b"no", b"envelope"]) is None
    assert world.counts.refused == {"checksum": 1, "frames": 1} and world.counts.replies == 2


def test_a_welcome_that_grew_beyond_what_its_client_takes_is_refused():
    world = World()
    world.receivers.register(b"c" * 16, Receiver(tail_bytes=2000))
    assert read(world.take(reply(welcome("a")))).type is types.WELCOME
    refused = read(
        world.take(reply(welcome("a", software="s" * 250, models={f"{i} {'t' * 100}": 1 for i in range(20)})))
    )
    assert refused.body.code == "too_large" and "WELCOME, whose tail takes" in refused.body.text
    assert world.counts.refused == {"too_large": 1}
