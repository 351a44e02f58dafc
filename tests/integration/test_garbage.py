"""Tests of garbage at every address of a cluster: server, proxy and relay refuse it and count it by code.

Garbage is golden messages of another run, whole, cut, flipped, multiplied or with absurd lengths, other protocols, and
endless messages. Meanwhile a client behind all nodes keeps exact counts.
"""

import contextlib
import gc
import os
import socket
import struct

import numpy as np
import pytest
import zmq

from memoire.net import sockets
from memoire.wire.frames import CODES
from netkit import ports_of, record, until
from tcpkit import GREETING, connect, place
from wirekit import MESSAGES


def garbage(rng, messages):
    while True:
        message = list(messages[rng.integers(len(messages))])
        place = int(rng.integers(len(message)))
        frame = bytearray(message[place])
        kind = rng.integers(8)
        if kind == 0:  # cut
            message[place] = bytes(frame[: rng.integers(len(frame))])
        elif kind == 1:  # flipped
            frame[rng.integers(len(frame))] ^= 1 << int(rng.integers(8))
            message[place] = bytes(frame)
        elif kind == 2:  # impossible lengths of payload or tail
            message[0] = message[0][:64] + rng.bytes(8) + message[0][72:80] + rng.bytes(4) + message[0][84:]
        elif kind == 3:
            message *= int(rng.integers(2, 40))
        elif kind == 4:
            message = [*message, b"more"]
        elif kind == 5:
            message = [rng.bytes(int(rng.integers(1, 500)))]
        elif kind == 6:
            message = message[1:] or [b""]
        yield message


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Attack:
    """Sender of the same garbage to the request and data addresses of nodes, and of odd subscriptions to their notices."""

    def __init__(self, cluster, nodes):
        self.rng = np.random.default_rng(1)
        self.stream = garbage(self.rng, MESSAGES)
        self.targets = []
        for node in nodes:
            for kind, at in zip((zmq.DEALER, zmq.PUSH, zmq.SUB), ports_of(node), strict=True):
                connection = cluster.context.socket(kind)
                connection.linger = 0
                sockets.connect(connection, at)
                self.targets.append((kind, connection))

    def send(self, count):
        for number, frames in zip(range(count), self.stream, strict=False):
            for kind, connection in self.targets:
                if kind == zmq.SUB:
                    if number % 50 == 0:
                        connection.setsockopt(zmq.SUBSCRIBE, self.rng.bytes(12))
                    continue
                connection.send_multipart(([b""] if kind == zmq.DEALER and number % 8 else []) + frames)
                while kind == zmq.DEALER and connection.poll(0):
                    connection.recv_multipart()


@pytest.fixture
def chain(cluster, tmp_path):
    server = cluster.server()
    proxy = cluster.proxy([server])
    relay = cluster.proxy([proxy], front=f"ipc://{tmp_path}/relay")
    return [server, proxy, relay], cluster.client(relay)


def goes_on(nodes, client, turn):
    """Check that the client is still served and counted exactly."""
    record(client, episodes=2)
    client.log(f"turn {turn}")
    client.update(100.0)
    assert client.push_cache(100.0)
    server = nodes[0]
    until(lambda: server.stats().totals.accepted_caches == turn)
    assert (server.total_episodes, server.total_steps) == (2 * turn, 40 * turn)
    assert [entry.line.text for entry in server.lines()] == [f"turn {number + 1}" for number in range(turn)]
    assert server.get_batch(16, 100.0)["obs"].shape == (16, 4)
    assert not any(node.stats().faults for node in nodes) and not client.stats().faults


def refused(nodes):
    return [sum(node.stats().refused.values()) for node in nodes]


def test_garbage_everywhere_is_counted_by_code_and_nobody_else_notices(cluster, chain):
    nodes, client = chain
    goes_on(nodes, client, 1)
    attack = Attack(cluster, nodes)
    attack.send(300)
    until(lambda: min(refused(nodes)) > 300)
    goes_on(nodes, client, 2)
    gc.collect()
    before, counted = resident(), refused(nodes)
    attack.send(1000)
    until(lambda: all(now > then + 1000 for now, then in zip(refused(nodes), counted, strict=True)))
    gc.collect()
    assert resident() - before < 30_000_000
    for node in nodes:
        assert {"short", "magic", "frames", "checksum", "unexpected"} <= set(node.stats().refused) <= {*CODES, "other"}
    assert nodes[0].stats().refused["run"] > 0  # the unchanged golden messages
    goes_on(nodes, client, 3)


def test_other_protocols_and_half_connections_are_closed_or_left_alone(chain):
    nodes, client = chain
    web, tls = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 20
    lines = [web, tls, b"\xff" * 500, GREETING[:20], b""]
    with contextlib.ExitStack() as held:
        for at in (each for node in nodes for each in ports_of(node) if each.startswith("tcp://")):
            for line in lines:
                held.enter_context(socket.create_connection(place(at), 5.0)).sendall(line)
        goes_on(nodes, client, 1)
    goes_on(nodes, client, 2)


def never_ending(nodes):
    """Open connections to the request and data addresses, each with 12 MB of a message without an end."""
    frame = b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)  # a long frame, and more to come
    held = [
        connect(place(at), kind)
        for node in nodes
        for kind, at in zip((b"DEALER", b"PUSH"), ports_of(node), strict=False)
    ]
    for connection in held:
        for _ in range(200):
            connection.sendall(frame)
    return held


def test_a_message_that_never_ends_reaches_nobody_and_is_given_back(chain):
    """ZeroMQ keeps the received part of a message until the rest arrives or the connection ends."""
    nodes, client = chain
    goes_on(nodes, client, 1)
    sizes = []
    for turn in range(2, 7):
        held = never_ending(nodes[:2])
        goes_on(nodes, client, turn)
        for connection in held:
            connection.close()
        sizes.append(resident())
    assert not sum(refused(nodes))
    assert sizes[-1] - sizes[1] < 48_000_000  # bytes of one round; three rounds came
