"""Where a request goes at a proxy: to its server, to one that is chosen, to the models that are here, or nowhere yet."""

import pytest

from memoire.errors import ProtocolError, Refused
from memoire.models import model
from memoire.proxy.backend import ProxyCounts
from memoire.proxy.requests import (
    HELD_FETCH_TIMEOUT,
    MAX_HELD,
    MAX_PENDING,
    AnswerRequest,
    ForwardRequest,
    ModelCache,
    Requests,
)
from memoire.proxy.router import SETTLE_INTERVAL, START_GRACE
from memoire.wire import messages
from memoire.wire.frames import name_hash, parse, parse_notice
from memoire.wire.receivers import Receiver
from proxykit import ADDRESS, HOME, LIMITS, Back, header_of, request, router

pytestmark = pytest.mark.usefixtures("without_io")

NOW = 100.0
HELLO = messages.Hello(role="actor")
OTHER = name_hash("two")


def fetch(version=0, topic="policy", offset=0, size=0):
    return messages.Fetch(topic=topic, version=version, offset=offset, size=size)


class World:
    """A proxy that decides, and nothing else."""

    def __init__(self, *backs, now=NOW):
        self.router, self.counts = router(*backs, now=now), ProxyCounts()
        self.cache = ModelCache(self.router, LIMITS)
        self.requests = Requests(self.router, self.cache, LIMITS, self.counts)

    def take(self, asked, now=NOW):
        return self.requests.take(asked, header_of(asked), now)

    def put(self, back, version, body=b"weights", topic="policy", is_renewed=False, noticed=(0, 0)):
        made = model.Model(topic, version, body, False, model.make(topic, body, version).checksum)
        return self.cache.put(back, made, is_renewed=is_renewed, noticed=noticed), made


def chunk_of(step):
    """The chunk of a reply, whose envelope is the request's."""
    assert isinstance(step, AnswerRequest) and step.frames[:2] == ADDRESS
    return parse(step.frames[2:])


# --------------------------------------------------------------------------------------------------------- servers


def test_a_request_goes_to_the_server_that_it_names():
    first, second = Back("a"), Back("b")
    world = World(first, second)
    for name, back in (("a", first), ("b", second)):
        asked = request(messages.Update(), home=name)
        assert world.take(asked) == ForwardRequest(back, asked)
    assert world.counts.requests == 2 and world.counts.homeless == 0


def test_a_hello_for_nobody_goes_to_one_of_the_servers():
    world = World(Back("a"), Back("b"))
    backs = {world.take(request(HELLO, client=bytes([number]) * 16)).back for number in range(40)}
    assert backs == set(world.router.backs)


def test_a_hello_says_what_client_and_proxy_both_take_of_replies():
    world = World(Back("a"))
    for takes, passed_on in (
        ({}, {}),
        ({"message_bytes": 1 << 40, "tail_bytes": 4096}, {"tail_bytes": 4096}),
        ({"message_bytes": 5, "request_bytes": 6}, {"message_bytes": 5, "request_bytes": 6}),
    ):
        step = world.take(request(messages.Hello(role="actor", name="me", takes=takes)))
        said = parse(step.request.message).body
        assert (said.takes, said.role, said.name) == (passed_on, "actor", "me")
        assert world.requests.receivers.of(b"c" * 16) == Receiver.of(passed_on)


def test_a_hello_for_a_server_that_has_gone_goes_to_another_one():
    world = World(Back("a"))
    asked = request(HELLO, home="gone")
    assert world.take(asked) == ForwardRequest(world.router.backs[0], asked)


def test_a_request_for_a_server_that_is_not_here_is_refused_once_that_is_sure():
    world = World(Back("a"), Back())
    asked = request(messages.Update(), home="x")
    assert world.take(asked) is None and world.counts.homeless == 1
    with pytest.raises(ProtocolError, match="your server is not behind this proxy") as raised:
        world.take(asked, NOW + START_GRACE + 0.1)
    assert raised.value.code == "client" and world.counts.homeless == 2 and world.counts.requests == 0


def test_a_hello_for_a_server_that_may_still_come_is_given_to_no_other_one():
    late = Back()
    world = World(Back("a"), late)
    asked = request(HELLO, home="x")
    for seconds in (0.0, SETTLE_INTERVAL + 0.1, START_GRACE):
        assert world.take(asked, NOW + seconds) is None
    assert not world.requests.pending  # its client asks again
    assert world.take(asked, NOW + START_GRACE + 0.1) == ForwardRequest(world.router.backs[0], asked)
    late.names = ("x",)
    world.router.learn(late)
    assert world.take(asked, NOW) == ForwardRequest(late, asked)


# -------------------------------------------------------------------------------------------------- before servers


def test_a_hello_waits_until_servers_are_known_and_is_then_taken_again():
    late = Back()
    world = World(late)
    asked = [request(HELLO, client=bytes([number]) * 16) for number in range(3)]
    assert world.requests.next_time() == float("inf")
    assert [world.take(each) for each in asked] == [None] * 3
    assert world.requests.next_time() == float("inf")  # no time makes a server known
    assert list(world.requests.assignable(NOW + 99.0)) == []
    late.names = ("a",)
    world.router.learn(late)
    assert list(world.requests.assignable(NOW)) == asked and not world.requests.pending
    assert world.take(asked[0]) == ForwardRequest(late, asked[0])


def test_a_hello_that_waits_for_the_other_servers_does_so_for_a_while():
    world = World(Back("a"), Back())
    assert world.take(request(HELLO)) is None
    assert world.requests.next_time() == NOW + SETTLE_INTERVAL
    assert list(world.requests.assignable(NOW + SETTLE_INTERVAL)) == []
    assert len(list(world.requests.assignable(NOW + SETTLE_INTERVAL + 0.1))) == 1


def test_of_too_many_that_wait_the_oldest_goes():
    world = World(Back())
    asked = [request(HELLO, sequence=number) for number in range(1, MAX_PENDING + 2)]
    for each in asked:
        world.take(each)
    assert list(world.requests.pending) == asked[1:] and world.counts.homeless == 1


def test_a_hello_is_refused_while_no_server_lets_this_proxy_in():
    back = Back()
    back.denied = "No key."
    with pytest.raises(ProtocolError, match=r"No key\.") as raised:
        World(back).take(request(HELLO))
    assert raised.value.code == "denied"


def test_clients_hear_if_a_welcome_is_longer_than_their_proxy_takes():
    back = Back()
    back.answered(Refused("tcp://a", "too_large", "WELCOME takes 7340 bytes"))
    back.denied = back.refusal
    with pytest.raises(ProtocolError, match="this proxy's own limits are too low: WELCOME takes 7340 bytes") as raised:
        World(back).take(request(HELLO))
    assert raised.value.code == "too_large"


# ---------------------------------------------------------------------------------------------------------- models


def test_a_model_that_is_here_is_handed_out_from_here():
    back = Back("a")
    world = World(back)
    assert world.put(back, 3, b"0123456789", noticed=(0, 5))[0]
    said = chunk_of(world.take(request(fetch(3, offset=4, size=3), home="a", sequence=9)))
    assert (said.body.version, said.body.size, said.body.offset, bytes(said.payload)) == (3, 10, 4, b"456")
    assert (said.body.home, said.body.epoch, said.header.sequence) == (HOME("a"), 5, 9)
    assert bytes(chunk_of(world.take(request(fetch(0), home="a"))).payload) == b"0123456789"
    assert world.counts.requests == 2


def test_a_stretch_that_a_model_does_not_have_is_refused():
    back = Back("a")
    world = World(back)
    world.put(back, 3)
    with pytest.raises(ProtocolError, match="offset 99 is beyond"):
        world.take(request(fetch(3, offset=99), home="a"))


def test_a_model_that_is_neither_here_nor_on_its_way_is_asked_of_the_server():
    back = Back("a")
    world = World(back)
    asked = request(fetch(3), home="a")
    assert world.take(asked) == ForwardRequest(back, asked)
    assert back.topics.announcements == [{"policy": 3}]  # the client has heard of it before this proxy has
    assert back.topics.wanted == {"policy"}  # and of the topic
    world.put(back, 3)
    older = request(fetch(2), home="a")
    assert world.take(older) == ForwardRequest(back, older) and len(back.topics.announcements) == 1


def test_a_topic_beyond_those_that_a_proxy_follows_is_asked_of_the_server():
    back = Back("a")
    back.topics.most = 0
    asked = request(fetch(3), home="a")
    assert World(back).take(asked) == ForwardRequest(back, asked) and not back.topics.wanted


def test_a_client_that_asks_for_any_version_has_heard_of_none():
    back = Back("a")
    world = World(back)
    asked = request(fetch(0), home="a")
    assert world.take(asked) == ForwardRequest(back, asked) and not back.topics.announcements
    assert back.topics.wanted == {"policy"}  # but of the topic


def test_a_model_of_a_run_that_another_server_counts_is_asked_of_the_server():
    first, second = Back("a"), Back("b", run=OTHER)
    world = World(first, second)
    world.put(first, 3)
    asked = request(fetch(3), home="b", run=OTHER)
    assert world.take(asked) == ForwardRequest(second, asked) and not second.topics.announcements
    assert isinstance(world.take(request(fetch(3), home="b", run=0)), AnswerRequest)  # any run will do


def test_a_request_for_a_model_on_its_way_is_answered_once_it_is_here():
    back = Back("a")
    world = World(back)
    back.topics.coming = {("policy", 3), ("policy", 4)}
    asked = request(fetch(3), home="a")
    assert world.take(asked) is None and world.take(asked) is None  # sent again
    later = request(fetch(4), home="a", sequence=2)
    assert world.take(later) is None
    assert world.cache.next_time() == NOW + HELD_FETCH_TIMEOUT and world.counts.requests == 0
    _, made = world.put(back, 3)
    assert world.cache.arrived(made) == [asked]
    assert bytes(chunk_of(world.requests.release(asked, NOW)).payload) == b"weights"
    assert world.cache.overdue(NOW + HELD_FETCH_TIMEOUT) == [later] and world.cache.next_time() == float("inf")
    assert world.requests.release(later, NOW + HELD_FETCH_TIMEOUT) == ForwardRequest(back, later)


def test_a_request_for_a_version_that_is_no_longer_on_its_way_is_released_by_another_model():
    back = Back("a")
    world = World(back)
    back.topics.coming = {("policy", 7), ("other", 7)}
    asked = request(fetch(7), home="a")
    elsewhere = request(fetch(7, topic="other"), home="a", sequence=2)
    assert world.take(asked) is None and world.take(elsewhere) is None
    back.topics.coming = set()
    assert world.cache.arrived(world.put(back, 3)[1]) == [asked]


def test_a_request_is_held_no_longer_than_the_first_one_of_it():
    back = Back("a")
    world = World(back)
    back.topics.coming = {("policy", 3)}
    asked = request(fetch(3), home="a")
    world.take(asked)
    world.take(asked, NOW + 3.0)
    assert world.cache.overdue(NOW + HELD_FETCH_TIMEOUT - 0.1) == [] and world.cache.overdue(
        NOW + HELD_FETCH_TIMEOUT
    ) == [asked]


def test_so_many_requests_are_held_and_no_more():
    back = Back("a")
    world = World(back)
    back.topics.coming = {("policy", 3)}
    *held, last = [world.take(request(fetch(3), home="a", sequence=number)) for number in range(1, MAX_HELD + 2)]
    assert held == [None] * MAX_HELD and isinstance(last, ForwardRequest)


def test_a_request_whose_client_has_no_home_here_is_held_too():
    back = Back("a")
    world = World(back)
    back.topics.coming = {("policy", 3)}
    assert world.take(request(fetch(3), home="x")) is None and not back.topics.announcements


def test_a_request_that_was_held_while_the_run_changed_is_asked_of_the_server():
    back = Back("a")
    world = World(back)
    back.topics.coming = {("policy", 3)}
    asked = request(fetch(3), home="a")
    assert world.take(asked) is None
    back.run = OTHER
    _, made = world.put(back, 3)
    assert world.cache.arrived(made) == [asked]
    assert world.requests.release(asked, NOW) == ForwardRequest(back, asked)


def test_a_request_that_is_released_and_has_no_home_any_more_is_refused():
    back = Back("a")
    world = World(back)
    back.topics.coming = {("policy", 3)}
    asked = request(fetch(3), home="x")
    assert world.take(asked) is None
    with pytest.raises(ProtocolError, match="not behind this proxy"):
        world.requests.release(asked, NOW + HELD_FETCH_TIMEOUT)


# ------------------------------------------------------------------------------------------------- what is kept


def test_an_older_model_is_not_kept_and_the_notice_says_where_the_newest_came_from():
    first, second = Back("a"), Back("b", run=OTHER)
    world = World(first, second)
    assert world.put(first, 3, noticed=(1, 5))[0]
    assert not world.put(second, 3)[0] and not world.put(second, 2)[0]
    told = parse_notice(world.cache.notice(world.cache.store.newest("policy")))
    assert (told.header.home, told.body.epoch, told.body.version) == (HOME("a"), 5, 3)
    is_new, made = world.put(second, 4, noticed=(1, 6))
    told = parse_notice(world.cache.notice(made, again=True))
    assert is_new and (told.header.home, told.header.run, told.body.epoch) == (HOME("b"), OTHER, 6)
    assert told.payload is None and parse_notice(world.cache.notice(made)).payload is not None


def test_a_publisher_that_began_again_counts_from_1_unless_the_newest_is_another_servers():
    first, second = Back("a"), Back("b")
    world = World(first, second)
    world.put(first, 3, b"old")
    assert not world.put(second, 1, b"new", is_renewed=True)[0]
    assert world.put(first, 1, b"new", is_renewed=True)[0]
    assert world.cache.store.newest("policy").body == b"new"
    assert world.put(second, 1, topic="fresh", is_renewed=True)[0]


def test_a_model_is_found_by_version_and_checksum():
    back = Back("a")
    world = World(back)
    _, made = world.put(back, 3)
    assert world.cache.find("policy", 3, made.checksum) == made
    assert (
        world.cache.find("policy", 3, made.checksum ^ 1) is None
        and world.cache.find("policy", 2, made.checksum) is None
    )


def test_another_run_at_an_address_takes_its_models_away_and_no_others():
    first, second = Back("a"), Back("b")
    world = World(first, second)
    world.put(first, 3)
    world.put(second, 3, topic="other")
    world.cache.begin_run(first)
    assert world.cache.store.versions() == {"other": 3} and (first.topics.runs, second.topics.runs) == (1, 0)
    assert world.cache.has_run("policy", OTHER)  # nothing is here of any run
    assert world.put(first, 1)[0]
