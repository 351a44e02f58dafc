"""Replies wait until their connection has room: none is dropped in silence, and those that are dropped are counted."""

import itertools

import pytest
import zmq

from history.ports import held
from memoire.limits import Limits
from memoire.net import sockets
from memoire.net.poller import SendQueue, SendQueues
from memoire.proxy.proxy import Proxy
from memoire.server.server import Server
from memoire.wire import messages
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.frames import encode, parse
from netkit import DEADLINE, in_thread, until

REPLIES = 60


class Crowded:
    """A ROUTER whose connections have room for two messages each, and peers that read when they are asked to."""

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
        self.lanes = SendQueues(**bounds)
        self.clock = itertools.count(1.0)

    def send(self, peer, *numbers):
        for number in numbers:
            self.lanes.send(self.router, [b"peer%d" % peer, b"%8d" % number], 0.0)

    def turn(self):
        sockets.receive(self.router)  # as each owner does: ZeroMQ looks at nothing else meanwhile
        self.lanes.turn(next(self.clock))

    def hear(self, peer, count):
        heard = []
        while len(heard) < count:
            until(lambda: self.turn() or self.peers[peer].poll(0))
            heard.append(int(self.peers[peer].recv()))
        return heard


def test_a_large_payload_counts_until_its_peer_has_read_it(cluster):
    size = 1 << 20
    room = ByteBudget(size).holder("replies", own=size // 2)
    crowded = Crowded(cluster, 2, room=room)

    def send(peer):
        crowded.lanes.send(crowded.router, [b"peer%d" % peer, bytes(size)], 0.0)

    send(0)
    assert (room.bytes, len(crowded.lanes)) == (size, 0)
    send(0)
    assert len(crowded.lanes) == 1, "its connection has room for two messages, but the budget has not"
    send(1)
    assert len(crowded.lanes) == 1, "each connection may have one on its way"
    for peer in (0, 1, 0):
        until(lambda peer=peer: crowded.turn() or crowded.peers[peer].poll(0))
        assert len(crowded.peers[peer].recv()) == size
    until(lambda: crowded.turn() or not room.bytes)
    assert (len(crowded.lanes), crowded.lanes.dropped) == (0, 0)


def test_what_has_no_room_waits_and_goes_out_in_order(cluster):
    crowded = Crowded(cluster, 2)
    crowded.send(0, *range(10))
    assert len(crowded.lanes) == 8, "a ROUTER of its own would have dropped them"
    crowded.send(1, 100)
    assert crowded.hear(1, 1) == [100], "nobody waits for somebody else's connection"
    crowded.send(0, 10)
    assert crowded.hear(0, 11) == list(range(11))
    assert (len(crowded.lanes), crowded.lanes.dropped, crowded.lanes.next_time()) == (0, 0, float("inf"))


def test_beyond_all_bytes_the_connection_that_is_stuck_for_longest_loses_its_oldest(cluster):
    crowded = Crowded(cluster, 2, all_bytes=39)
    crowded.send(0, *range(4))
    crowded.send(1, *range(4))
    assert (len(crowded.lanes), crowded.lanes.dropped) == (3, 1)
    assert (crowded.hear(0, 3), crowded.hear(1, 4)) == ([0, 1, 3], [0, 1, 2, 3])


def test_a_message_larger_than_a_lane_may_be_in_it_alone():
    lane = SendQueue(10)
    lane.put([bytes(100)], 100)
    assert (len(lane), lane.lost) == (1, 0)
    lane.put([bytes(1)], 1)
    assert (len(lane), lane.lost, lane.lost_bytes, lane.bytes) == (1, 1, 100, 1)


def way_to(cluster, server, through):
    if through == "proxy":
        return cluster.proxy([server]).endpoint
    if through == "plain proxy":
        front, back = f"tcp://127.0.0.1:{cluster.ports.enter_context(held(1))}", "inproc://plain-back"
        in_thread(server.run_request_proxy, front, back)
        server.add_request_worker(back, bind=False)
        return front
    return server.endpoint


def lanes_of(node):
    """What waits in a server or a proxy."""
    return [node._thread.front.lanes] if isinstance(node, Proxy) else [*node._io.lanes]


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
    until(lambda: any(lanes for node in nodes for lanes in lanes_of(node)))
    came = [parse(late.recv_multipart()[1:], Limits()).header.sequence for _ in range(REPLIES)]
    assert sorted(came) == list(range(2, 2 + REPLIES))
    assert [node.stats().dropped_replies for node in nodes] == [0] * len(nodes)
