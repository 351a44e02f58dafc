"""Do memory, descriptors and threads stay flat while clients come and go twenty thousand times?

Whole clients (connect, count, tell, close) come and go through a proxy, one after the other in a few processes. What a
server keeps of each is its account, for exact totals: that is its growth for each client. Then as many connections that
only say HELLO, and as many that say nothing or nonsense, of which nothing may stay.
"""

import argparse
import contextlib
import os
import socket
import sys
import time
from typing import Any

import numpy as np
import zmq
from _cluster import Peers, nodes
from _kit import descriptors, end, memory, say, table, threads

from memoire.client.client import connect
from memoire.net import sockets
from memoire.net.context import shared_context
from memoire.reader.reader import Reader
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from memoire.wire import messages
from memoire.wire.frames import encode

SCHEMA = Schema({"obs": Column(np.float32, (4,), "state")})
PROCESSES = 2
ACCOUNT = 4096
"""Bytes that a server may keep of each client that ever was."""
FLAT = 8 << 20
"""Bytes that anything else may grow by: allocators keep what they had once."""


def come_and_go(endpoint: str, count: int) -> None:
    """Whole clients."""
    for _ in range(count):
        with connect(endpoint, timeout=60.0, capacity=10) as client:
            client.on_entries(1)
            client.update(60.0)


def say_hello(endpoint: str, count: int) -> None:
    """Requests that open no account."""
    context = shared_context()
    for number in range(count):
        made = sockets.request_client(context, 1 << 20)
        sockets.connect(made, endpoint)
        made.poll(10_000, zmq.POLLOUT)
        sockets.send(made, [b"", *encode(messages.Hello(role="doctor"), client=os.urandom(16), sequence=number + 1)])
        assert made.poll(10_000), "no WELCOME"
        made.close(0)


def say_nonsense(endpoint: str, count: int) -> None:
    """Connections that are not ZeroMQ's, or end in the middle of its greeting."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    for number in range(count):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5.0) as made:
            made.sendall((b"", b"\xff\x00", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64))[number % 4])


KINDS = {"whole clients": come_and_go, "HELLO and goodbye": say_hello, "nothing, or nonsense": say_nonsense}


def actors(first: int, count: int, pipe: Any, endpoint: str) -> None:
    """One process; asked for a kind and a number, it does it, and says how it grew."""
    while True:
        kind, number = pipe.recv()
        KINDS[kind](endpoint, 50)  # what is made once has been made
        before = memory(), settled("self", 0, 1.0), threads()
        KINDS[kind](endpoint, number)
        settled("self", before[1])
        pipe.send([now - then for now, then in zip((memory(), descriptors(), threads()), before, strict=True)])


def settled(pid: int | str, most: int, seconds: float = 15.0) -> int:
    """Descriptors of a process, as soon as they are down to this number or that time has passed: ZeroMQ closes in the
    background.
    """
    until = time.monotonic() + seconds
    while (found := descriptors(pid)) > most and time.monotonic() < until:
        time.sleep(0.1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, help="not used: it takes as long as it takes")
    parser.add_argument("--cycles", type=int, default=20_000)
    given = parser.parse_args()
    rows, violated = [], []
    with nodes(SCHEMA) as (server, (proxy,)), Reader([proxy.endpoint], timeout=30.0) as reader:
        peers = Peers(actors, PROCESSES, 1, proxy.endpoint)
        try:
            for kind in KINDS:
                peers.ask((kind, 200))
                before = {pid: (memory(pid), descriptors(pid)) for pid in (server.pid, proxy.pid)}
                began = time.monotonic()
                grown = peers.ask((kind, given.cycles // PROCESSES), 3000.0)
                seconds = time.monotonic() - began
                say(f"{given.cycles} times {kind}: {seconds:.0f} s")
                left = [settled(pid, then[1]) - then[1] for pid, then in before.items()]
                more = [memory(pid) - then[0] for pid, then in before.items()]
                there = [max(row[k] for row in grown) for k in range(3)]
                rows.append(
                    [
                        kind,
                        f"{given.cycles / seconds:.0f} /s",
                        *(f"{bytes_ / 2**20:.1f} MiB, {fds}" for bytes_, fds in zip(more, left, strict=True)),
                        f"{there[0] / 2**20:.1f} MiB, {there[1]}",
                    ]
                )
                allowed = FLAT + (ACCOUNT * given.cycles if kind == "whole clients" else 0)
                if more[0] > allowed or more[1] > FLAT or there[0] > FLAT:
                    violated.append(f"{kind}: server, proxy and client grew by {more[0]}, {more[1]}, {there[0]} bytes")
                if max(*left, there[1], there[2]) > 2:
                    violated.append(f"{kind}: descriptors {left}, {there[1]} or threads {there[2]} were left")
            steps = reader.totals(timeout=60.0).totals.steps
        finally:
            peers.end()
    wanted = PROCESSES * (2 * 50 + 200 + given.cycles // PROCESSES)
    if steps != wanted:
        violated.append(f"{steps} steps were counted of {wanted}")
    print(f"{given.cycles} times each; memory and descriptors that were there afterwards and not before.\n")
    print(table(["what comes and goes", "", "server", "proxy", "each client's process"], rows))
    return end(violated)


if __name__ == "__main__":
    sys.exit(main())
