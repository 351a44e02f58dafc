"""The front door of a node, message by message: whose it is, whether it may be sent, and what a refusal counts."""

from collections import Counter

import pytest
import zmq

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.net.admission import PUSH_PLACE, REQUEST_PLACE, Admission
from memoire.net.curve_server import Gate
from memoire.security.roles import OPEN, PASSPORT_MAGIC, Peer, passport
from memoire.wire import messages, types
from memoire.wire.frames import encode, parse

CLIENT, OTHER = bytes([1] * 16), bytes([2] * 16)
ACTOR = Peer("actor", "left")
READER = Peer("reader", "wall")
MADE = object()  # the gate has no keys: it asks no socket anything
CACHE = messages.Cache(number=1)


class Door:
    """An admission without sockets, and what it was told."""

    def __init__(self, **limits):
        self.refused, self.owners = Counter(), []
        context = zmq.Context()
        self.gate = Gate(context, None)
        context.term()
        self.admission = Admission(self.gate, Limits(**limits), count=self.count, own=self.own)

    def count(self, error):
        self.refused[error.code] += 1

    def own(self, client, principal):
        if principal == "actor/thief":
            raise ProtocolError("owner", "it belongs to another key")
        self.owners.append((client, principal))

    def request(self, *frames):
        return self.admission.receive_request(MADE, [zmq.Frame(frame) for frame in frames])

    def push(self, *frames, whole=True):
        receive = self.admission.receive_push if whole else self.admission.receive_push_header
        return receive(MADE, [zmq.Frame(frame) for frame in frames])


@pytest.fixture
def door():
    return Door()


def said(body, client=CLIENT, **header):
    return [bytes(frame) for frame in encode(body, client=client, sequence=1, **header)]


def test_a_request_has_an_envelope_and_a_message(door):
    header = said(messages.Hello(role="actor"))
    request = door.request(b"way", b"", *header)
    assert [bytes(frame) for frame in request.envelope] == [b"way", b""]
    assert [bytes(frame) for frame in request.message] == header
    assert request.peer is OPEN and request.is_first and not door.refused


@pytest.mark.parametrize(
    ("frames", "is_first"),
    [
        ([b"way", b""], True),
        ([b"way", b"proxy's way", b""], False),  # nobody has keys: a proxy shows by its own address
        ([b"way", passport(ACTOR), b""], False),
    ],
)
def test_only_a_request_that_no_proxy_let_in_is_the_first_of_its_way(door, frames, is_first):
    assert door.request(*frames, *said(messages.Hello(role="actor"))).is_first is is_first


def test_a_request_without_an_empty_frame_is_counted_and_gets_no_answer(door):
    assert door.request(b"way", b"header") is None
    assert door.refused == {"frames": 1}


def test_a_request_that_the_gate_refuses_is_counted_there_and_here(door):
    assert door.request(b"way", PASSPORT_MAGIC, b"", b"x") is None
    assert door.refused == {"passport": 1} and door.gate.refused == {"passport": 1}


@pytest.mark.parametrize(
    ("peer", "body", "code"),
    [
        (READER, messages.Publish(topic="x", size=1, checksum=0), "role"),  # a type that it may not send
        (ACTOR, messages.Hello(role="reader"), "role"),  # another role than its key's
        (Peer("actor", "thief"), messages.Hello(role="actor"), "owner"),
    ],
)
def test_a_peer_is_refused_for_its_role_and_for_another_ones_client(door, peer, body, code):
    payload = b"x" if isinstance(body, messages.Publish) else None
    request = door.request(b"way", passport(peer), b"", *said(body, payload=payload))
    with pytest.raises(ProtocolError) as refused:
        door.admission.parse(request, 0.0)
    assert refused.value.code == code


def test_a_proxy_asks_for_the_role_by_the_header_alone(door):
    asked = said(messages.Hello(role="reader"))
    header = door.admission.parse_header(door.request(b"way", passport(ACTOR), b"", *asked), 0.0)
    assert header.type is types.HELLO and door.owners == []  # the server behind looks at the rest
    asked = said(messages.Control(finish=True))
    with pytest.raises(ProtocolError, match="may not send CONTROL"):
        door.admission.parse_header(door.request(b"way", passport(ACTOR), b"", *asked), 0.0)


@pytest.mark.parametrize("read", ["parse", "parse_header"])
def test_a_connection_brings_so_many_clients_and_more_after_a_while(read):
    door = Door(connection_clients=1, connection_clients_rate=0.5)
    check = getattr(door.admission, read)

    def ask(client, now, *ways):
        check(door.request(*ways, b"", *said(messages.Hello(role="actor"), client)), now)

    ask(CLIENT, 0.0, b"way")
    ask(CLIENT, 0.0, b"way")  # no new one
    with pytest.raises(ProtocolError, match="has brought 1 clients"):
        ask(OTHER, 0.0, b"way")
    ask(OTHER, 0.0, b"another way")
    ask(OTHER, 0.0, b"way", b"proxy's way")  # the proxy has counted it
    ask(OTHER, 2.0, b"way")


def test_what_is_pushed_is_parsed_and_owned(door):
    message = door.push(passport(ACTOR), *said(CACHE, payload=b"0123"))
    assert message.body.number == 1 and bytes(message.payload) == b"0123"
    assert door.owners == [(CLIENT, "actor/left")] and not door.refused


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([passport(READER), *said(CACHE, payload=b"0123")], "role"),
        (said(messages.Hello(role="actor")), "unexpected"),
        ([b"nothing of ours"], "short"),
        ([PASSPORT_MAGIC, *said(CACHE, payload=b"0123")], "passport"),
    ],
)
def test_what_may_not_be_pushed_is_counted(door, whole, frames, code):
    assert door.push(*frames, whole=whole) is None
    assert door.refused == {code: 1}


@pytest.mark.parametrize(("place", "before"), [(REQUEST_PLACE, [b"way"]), (PUSH_PLACE, [])])
def test_a_plain_proxy_passes_on_a_message_with_whose_it_is(door, place, before):
    frames = [*before, passport(ACTOR), b"rest"]
    door.gate.passport = lambda peer: [b"passport of " + peer.name.encode()]
    passed = door.admission.pass_on(MADE, place, [zmq.Frame(frame) for frame in frames])
    assert [bytes(frame) for frame in passed] == [b"passport of left", *before, b"rest"]


def test_a_plain_proxy_drops_and_counts_what_is_refused(door):
    assert door.admission.pass_on(MADE, PUSH_PLACE, [zmq.Frame(PASSPORT_MAGIC)]) == []
    assert door.refused == {"passport": 1} and door.gate.refused == {"passport": 1}


def test_a_refusal_goes_the_way_that_the_request_came(door):
    request = door.request(b"way", b"", *said(messages.Hello(role="actor")))
    frames = [bytes(frame) for frame in door.admission.refuse_request(request, ProtocolError("busy", "x" * 2000))]
    answer = parse(frames[2:])
    assert frames[:2] == [b"way", b""] and answer.body == messages.Refused(code="busy", text="x" * 1000)
    assert answer.header.client == CLIENT and door.refused == {"busy": 1}
