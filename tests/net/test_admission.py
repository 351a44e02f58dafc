"""Tests of a node's admission, message by message, and of replies that wait until their connection has room."""

import itertools
from collections import Counter

import pytest
import zmq

from history.ports import held
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.net import sockets
from memoire.net.curve_server import PUSH_PLACE, Admission, Gate
from memoire.net.poller import SendQueues
from memoire.proxy.proxy import Proxy
from memoire.security.roles import OPEN, PASSPORT_MAGIC, Peer, passport_frame
from memoire.server.server import Server
from memoire.wire import messages, types
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.frames import encode, parse
from netkit import DEADLINE, in_thread, until

CLIENT, OTHER = bytes([1] * 16), bytes([2] * 16)
ACTOR = Peer("actor", "left")
READER = Peer("reader", "wall")
SOCKET = object()  # the gate has no keys, and uses no socket
CACHE = messages.Cache(number=1)


class Probe:
    """An admission without sockets that records refusals and owners."""

    def __init__(self):
        self.refused, self.owners = Counter(), []
        context = zmq.Context()
        self.gate = Gate(context, None)
        context.term()
        self.admission = Admission(self.gate, Limits(), count=self.count, own=self.own)

    def count(self, error):
        self.refused[error.code] += 1

    def own(self, client, principal):
        if principal == "actor/thief":
            raise ProtocolError("owner", "it belongs to another key")
        self.owners.append((client, principal))

    def request(self, *frames):
        return self.admission.receive_request(SOCKET, [zmq.Frame(frame) for frame in frames])

    def push(self, *frames, whole=True):
        receive = self.admission.receive_push if whole else self.admission.receive_push_header
        return receive(SOCKET, [zmq.Frame(frame) for frame in frames])


@pytest.fixture
def probe():
    return Probe()


def frames_of(body, client=CLIENT, **header):
    return [bytes(frame) for frame in encode(body, client=client, sequence=1, **header)]


def test_a_request_has_an_envelope_and_a_message(probe):
    header = frames_of(messages.Hello(role="actor"))
    request = probe.request(b"way", b"", *header)
    assert [bytes(frame) for frame in request.envelope] == [b"way", b""]
    assert [bytes(frame) for frame in request.message] == header
    assert request.peer is OPEN and request.is_first and not probe.refused


@pytest.mark.parametrize(
    ("frames", "is_first"),
    [
        ([b"way", b""], True),
        ([b"way", b"proxy's way", b""], False),  # without keys, a proxy shows its own address
        ([b"way", passport_frame(ACTOR), b""], False),
    ],
)
def test_only_a_request_that_no_proxy_let_in_is_the_first_of_its_way(probe, frames, is_first):
    assert probe.request(*frames, *frames_of(messages.Hello(role="actor"))).is_first is is_first


def test_a_request_without_an_empty_frame_is_counted_and_gets_no_answer(probe):
    assert probe.request(b"way", b"header") is None
    assert probe.refused == {"frames": 1}


def test_a_request_that_the_gate_refuses_is_counted_there_and_here(probe):
    assert probe.request(b"way", PASSPORT_MAGIC, b"", b"x") is None
    assert probe.refused == {"passport": 1} and probe.gate.refused == {"passport": 1}


def test_of_many_refusals_each_is_counted_and_one_is_logged(probe, caplog):
    for _ in range(3):
        probe.gate.refuse("silent", "a detail")
    assert probe.gate.refused == {"silent": 3} and "refused (silent, 1 so far)" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("peer", "body", "code"),
    [
        (READER, messages.Publish(topic="x", size=1, checksum=0), "role"),  # a type that a reader may not send
        (ACTOR, messages.Hello(role="reader"), "role"),  # another role than the role of the key
        (Peer("actor", "thief"), messages.Hello(role="actor"), "owner"),
    ],
)
def test_a_peer_is_refused_for_its_role_and_for_another_ones_client(probe, peer, body, code):
    payload = b"x" if isinstance(body, messages.Publish) else None
    request = probe.request(b"way", passport_frame(peer), b"", *frames_of(body, payload=payload))
    with pytest.raises(ProtocolError) as refused:
        probe.admission.parse(request, 0.0)
    assert refused.value.code == code


def test_a_proxy_asks_for_the_role_by_the_header_alone(probe):
    asked = frames_of(messages.Hello(role="reader"))
    header = probe.admission.parse_header(probe.request(b"way", passport_frame(ACTOR), b"", *asked), 0.0)
    assert header.type is types.HELLO and probe.owners == []  # the server behind checks the other parts
    asked = frames_of(messages.Control(finish=True))
    with pytest.raises(ProtocolError, match="may not send CONTROL"):
        probe.admission.parse_header(probe.request(b"way", passport_frame(ACTOR), b"", *asked), 0.0)


def test_what_is_pushed_is_parsed_and_owned(probe):
    message = probe.push(passport_frame(ACTOR), *frames_of(CACHE, payload=b"0123"))
    assert message.body.number == 1 and bytes(message.payload) == b"0123"
    assert probe.owners == [(CLIENT, "actor/left")] and not probe.refused


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([passport_frame(READER), *frames_of(CACHE, payload=b"0123")], "role"),
        (frames_of(messages.Hello(role="actor")), "unexpected"),
        ([b"nothing of ours"], "short"),
        ([PASSPORT_MAGIC, *frames_of(CACHE, payload=b"0123")], "passport"),
    ],
)
def test_what_may_not_be_pushed_is_counted(probe, whole, frames, code):
    assert probe.push(*frames, whole=whole) is None
    assert probe.refused == {code: 1}


def test_a_plain_proxy_drops_and_counts_what_is_refused(probe):
    assert probe.admission.forwarded_frames(SOCKET, PUSH_PLACE, [zmq.Frame(PASSPORT_MAGIC)]) == []
    assert probe.refused == {"passport": 1} and probe.gate.refused == {"passport": 1}


# --- Replies wait until a connection has room, and the queue counts dropped replies

REPLIES = 60


class Crowded:
    """ROUTER whose connections have room for two messages each, with peers that read on request."""

    def __init__(self, cluster, peers, **bounds):
        self.router = sockets.request_server(cluster.context, 1 << 20)
        self.router.sndhwm = 1
        self.router.bind("inproc://crowded")
        self.peers = [cluster.context.socket(zmq.DEALER) for _ in range(peers)]
        for number, peer in enumerate(self.peers):
            peer.rcvhwm, peer.routing_id = 1, b"peer%d" % number
            peer.connect("inproc://crowded")
            peer.send(b"here")
            self.router.recv_multipart()
        self.queues = SendQueues(**bounds)
        self.clock = itertools.count(1.0)

    def send(self, peer, *numbers):
        for number in numbers:
            self.queues.send(self.router, [b"peer%d" % peer, b"%8d" % number], 0.0)

    def turn(self):
        sockets.receive(self.router)  # owners receive, too: ZeroMQ looks at nothing else meanwhile
        self.queues.tick(next(self.clock))

    def hear(self, peer, count):
        heard = []
        while len(heard) < count:
            until(lambda: self.turn() or self.peers[peer].poll(0))
            heard.append(int(self.peers[peer].recv()))
        return heard


def test_a_large_payload_counts_until_its_peer_has_read_it(cluster):
    size = 1 << 20
    room = ByteBudget(size).add_holder("replies", own=size // 2)
    crowded = Crowded(cluster, 2, room=room)

    def send(peer):
        crowded.queues.send(crowded.router, [b"peer%d" % peer, bytes(size)], 0.0)

    send(0)
    assert (room.bytes, len(crowded.queues)) == (size, 0)
    send(0)
    assert len(crowded.queues) == 1, "its connection has room for two messages, but the budget has not"
    send(1)
    assert len(crowded.queues) == 1, "each connection may have one on its way"
    for peer in (0, 1, 0):
        until(lambda peer=peer: crowded.turn() or crowded.peers[peer].poll(0))
        assert len(crowded.peers[peer].recv()) == size
    until(lambda: crowded.turn() or not room.bytes)
    assert (len(crowded.queues), crowded.queues.dropped) == (0, 0)


def test_what_has_no_room_waits_and_goes_out_in_order(cluster):
    crowded = Crowded(cluster, 2)
    crowded.send(0, *range(10))
    assert len(crowded.queues) == 8, "a ROUTER of its own would have dropped them"
    crowded.send(1, 100)
    assert crowded.hear(1, 1) == [100], "other connections do not wait"
    crowded.send(0, 10)
    assert crowded.hear(0, 11) == list(range(11))
    assert (len(crowded.queues), crowded.queues.dropped, crowded.queues.next_time()) == (0, 0, float("inf"))


def test_beyond_all_bytes_the_connection_that_is_stuck_for_longest_loses_its_oldest(cluster):
    crowded = Crowded(cluster, 2, all_bytes=39)
    crowded.send(0, *range(5))
    crowded.send(1, *range(4))
    assert (len(crowded.queues), crowded.queues.dropped) == (3, 2)
    assert (crowded.hear(0, 3), crowded.hear(1, 4)) == ([0, 1, 4], [0, 1, 2, 3])


def test_a_message_that_alone_is_beyond_all_bytes_waits(cluster):
    crowded = Crowded(cluster, 1, all_bytes=12)
    crowded.send(0, *range(3))
    assert (len(crowded.queues), crowded.queues.dropped) == (1, 0)
    assert crowded.hear(0, 3) == [0, 1, 2]


def way_to(cluster, server, through):
    if through == "proxy":
        return cluster.proxy([server]).endpoint
    if through == "plain proxy":
        front, back = f"tcp://127.0.0.1:{cluster.ports.enter_context(held(1))}", "inproc://plain-back"
        in_thread(server.run_request_proxy, front, back)
        server.add_request_worker(back, bind=False)
        return front
    return server.endpoint


def send_queues_of(node):
    """Return the reply queues of a server or a proxy."""
    return [node._thread.front.reply_queues] if isinstance(node, Proxy) else [*node._io.send_queues]


@pytest.mark.parametrize("through", ["server", "proxy", "plain proxy"])
def test_one_connection_that_reads_late_gets_every_reply(cluster, monkeypatch, through):
    monkeypatch.setattr(sockets, "REQUEST_MESSAGES", 4)
    server = cluster.server()
    assert server.publish("policy", bytes(256 << 10))
    endpoint = way_to(cluster, server, through)
    late = cluster.context.socket(zmq.DEALER)
    late.rcvhwm, late.rcvbuf, late.rcvtimeo = 1, 4096, int(1000 * DEADLINE)
    late.connect(endpoint)
    asked = messages.Fetch(topic="policy", version=1, offset=0, size=256 << 10)
    late.send_multipart([b"", *encode(messages.Hello(role="actor"), client=bytes(15) + b"1", sequence=1)])
    home = parse(late.recv_multipart()[1:]).header.home
    for number in range(2, 2 + REPLIES):
        late.send_multipart([b"", *encode(asked, client=bytes(15) + b"1", sequence=number, home=home)])
    nodes = [node for node in cluster.made if isinstance(node, (Server, Proxy))]
    until(lambda: any(queues for node in nodes for queues in send_queues_of(node)))
    came = [parse(late.recv_multipart()[1:], Limits()).header.sequence for _ in range(REPLIES)]
    assert sorted(came) == list(range(2, 2 + REPLIES))
    assert [node.stats().dropped_replies for node in nodes] == [0] * len(nodes)
