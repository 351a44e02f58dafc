"""Tests of back pressure: memory stays bounded, each cache is accounted for, and slow lines carry packed data."""

import threading
import time

import numpy as np
import pytest
import zmq

import memoire
from history.ports import block
from memoire.client.client import Client
from memoire.limits import Limits
from memoire.wire.compression import TRIAL
from netkit import DEADLINE, QUICK, WIDE, in_thread, record, until
from tcpkit import CutWay, place

pytestmark = pytest.mark.slow

CACHE = 4_106_240  # 256 samples of WIDE, which share every other frame
SIZE = CACHE // 16


class Gate:
    """Switch that blocks a server's pull thread, as if the machine had stopped the thread."""

    def __init__(self, server):
        self.open = threading.Event()
        self.open.set()
        self.server, arrived = server, server._dispatcher.accept_push

        def gated(header, body, payload):
            self.open.wait(DEADLINE)
            return arrived(header, body, payload)

        server._dispatcher.accept_push = gated


class Books:
    """Thread that keeps checking the sums and windows of clients."""

    def __init__(self, clients, most):
        self.clients, self.most, self.error, self.looks = clients, most, None, 0
        self.stopped = threading.Event()
        self.thread, self.box = in_thread(self.run)

    def run(self):
        while not self.stopped.wait(0.001):
            for client in self.clients:
                check_books(client.stats())
                assert client.stats().in_flight_bytes <= self.most
            self.looks += 1

    def end(self):
        until(lambda: self.looks > 10 or "error" in self.box)
        self.stopped.set()
        self.thread.join(DEADLINE)
        assert "error" not in self.box, self.box


def check_books(stats):
    came = stats.accepted_caches + sum(stats.rejected.values())
    assert stats.pushed_caches == came + stats.lost_caches + stats.in_flight_caches, stats
    assert stats.pushed_bytes == stats.received_bytes + stats.lost_bytes + stats.in_flight_bytes, stats


def fill(client, caches=None, seconds=0.0):
    """Push `caches` times, or for `seconds` and until no room is left, without waiting for room; return the count."""
    pushed, had_room, until_then = 0, True, time.monotonic() + seconds
    while pushed < caches if caches else (had_room or time.monotonic() < until_then):
        had_room = client.push_cache(0.0)
        pushed += had_room
        time.sleep(0.002)  # the pace of an actor
    return pushed


def settle(clients, server):
    """Push one more cache each, which reveals lost ones, and wait until no cache is in flight."""
    for client in clients:
        assert client.push_cache(100.0)
    until(lambda: all(client.stats().in_flight_caches == 0 for client in clients), 20.0)
    for client in clients:
        check_books(client.stats())
    assert sum(client.stats().accepted_caches for client in clients) == server.total_caches


def actors(cluster, node, count, **options):
    clients = [cluster.client(node, **{"limits": QUICK} | options) for _ in range(count)]
    for client in clients:
        client.memory  # noqa: B018 - creates the memory before threads use the memory
        record(client, length=60)
    return clients


def small(cluster, **options):
    """Return a server whose caches hold sixteen samples of WIDE."""
    return cluster.server(schema=WIDE, cache_size=16, **options)


@pytest.mark.parametrize("shared", ["held_bytes", "on_way_bytes"])
def test_the_bytes_that_a_server_has_room_for_are_shared_and_one_cache_may_always_go(cluster, shared):
    server = small(cluster, limits=Limits(**{shared: 4 * SIZE // 2, "credit": 10 * SIZE}))
    stalled = cluster.context.socket(zmq.PULL)
    stalled.rcvhwm = 1
    port = stalled.bind_to_random_port("tcp://127.0.0.1")
    facts = {"push": f"tcp://127.0.0.1:{port}", "context": cluster.context, "capacity": 100, "limits": QUICK}
    clients = [cluster.keep(Client(server.endpoint, **facts)) for _ in range(4)]
    for client in clients:
        record(client, length=60)
        client.update(100.0)
    until(lambda: all(client.stats().credit == SIZE // 2 for client in clients))
    for client in clients:
        assert client.push_cache(0.0)
        assert not client.push_cache(0.0) and client.push_reason == "window full"


def test_a_server_holds_no_more_than_it_may_however_much_comes(cluster):
    server = small(cluster, byte_limit=3 * SIZE)
    clients = actors(cluster, server, 2)
    held, books = [], Books(clients, 64 << 20)
    threads = [in_thread(fill, client, 40) for client in clients]
    while any(thread.is_alive() for thread, _ in threads):
        held.append(server.stats().held_bytes)
        time.sleep(0.002)  # a sampling rate
    settle(clients, server)
    books.end()
    assert 0 < max(held) <= 3 * SIZE * 1.01
    stats = server.stats()
    assert server.total_caches == 82 and stats.overwritten_caches == 82 - stats.held_caches


@pytest.mark.parametrize("behind_a_proxy", [False, True], ids=["directly", "behind a proxy"])
def test_while_a_server_is_stopped_nobody_grows_and_no_cache_is_forgotten(cluster, behind_a_proxy):
    server = small(cluster, limits=Limits(credit=30 * SIZE))
    gate = Gate(server)
    proxy = cluster.proxy([server], queue_bytes=5 * SIZE) if behind_a_proxy else None
    clients = actors(cluster, proxy or server, 3)
    books = Books(clients, 30 * SIZE * 1.01)
    for _ in range(2):
        gate.open.clear()
        threads = [in_thread(fill, client, None, 0.7) for client in clients]
        queued = []
        while any(thread.is_alive() for thread, _ in threads):
            queued += [proxy.stats().backs[0].queued_bytes] if proxy else []
            time.sleep(0.002)  # a sampling rate
        assert all(client.stats().skipped_caches for client in clients)
        assert max(queued, default=0) <= 5 * SIZE * 1.01
        gate.open.set()
        settle(clients, server)
    books.end()
    lost = proxy.stats().backs[0].lost_caches if proxy else 0
    assert sum(client.stats().lost_caches for client in clients) == lost
    if behind_a_proxy:
        assert lost  # three windows of thirty caches exceed a send queue of five and the kernel's buffers


def test_while_a_proxy_is_stopped_nobody_grows_and_no_cache_is_forgotten(cluster):
    server = small(cluster, limits=Limits(credit=4 * SIZE))
    proxy = cluster.proxy([server])
    clients = actors(cluster, proxy, 3)
    books = Books(clients, 4 * SIZE * 1.01)
    front, take = proxy._thread.front, proxy._thread.front.take_caches
    front.take_caches = lambda ready, take: time.sleep(0.01)
    for thread, _ in [in_thread(fill, client, None, 0.5) for client in clients]:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert all(client.stats().in_flight_bytes > 0 for client in clients)
    front.take_caches = take
    settle(clients, server)
    books.end()
    assert sum(client.stats().lost_caches for client in clients) == 0


def test_books_balance_while_servers_and_proxies_begin_anew(cluster):
    server = small(cluster, endpoint=f"tcp://127.0.0.1:{block(3)}", limits=Limits(credit=8 * SIZE))
    front = f"tcp://127.0.0.1:{block(3)}"
    proxy = cluster.proxy([server], front=front)
    clients = actors(cluster, proxy, 2)
    books = Books(clients, 8 * SIZE * 1.01)
    stopped = threading.Event()

    def push(client):
        while not stopped.is_set():
            client.push_cache(0.05)

    threads = [in_thread(push, client) for client in clients]
    for number in range(4):
        before = server.total_caches
        until(lambda before=before, server=server: server.total_caches > before + 5)
        if number % 2:
            proxy.close(0.1)
            proxy = cluster.proxy([server], front=front)
        else:
            server = cluster.restart(server, limits=Limits(credit=8 * SIZE))
            server.configure(cache_size=16)
    before = server.total_caches
    until(lambda: server.total_caches > before + 5)
    stopped.set()
    for thread, box in threads:
        thread.join(100.0)
        assert "error" not in box, box
    for client in clients:
        assert client.push_cache(100.0)
    until(lambda: all(client.stats().in_flight_caches == 0 for client in clients), 20.0)
    books.end()
    for client in clients:
        check_books(client.stats())


# --- `compression="auto"` on real sockets: slow lines get packed caches, fast lines plain ones, with equal samples

FRAMES = memoire.Schema(
    {"obs": memoire.Column(np.uint8, (4000,), "state"), "reward": memoire.Column(np.float32, (), "reward")}
)
CREDIT = 1 << 18
"""Bytes of two or three caches, so that a slow line makes its client wait."""


def record_frames(client):
    client.memory.open(0)
    client.memory.extend(0, (np.tile(np.arange(100, dtype=np.uint8)[:, None], 4000), np.ones(100, np.float32)))
    client.memory.close(0, final_state=np.zeros(4000, np.uint8))


def pushing(cluster, rate, credit=CREDIT):
    """Return a client whose caches pass a line of this rate, and its server."""
    server = cluster.server(schema=FRAMES, compression="auto", cache_size=16, limits=Limits(credit=credit))
    way = cluster.keep(CutWay(place(server.push_endpoint), rate=rate))
    options = {"push": way.endpoint, "context": cluster.context, "capacity": 200}
    client = cluster.keep(Client(server.endpoint, **options))
    record_frames(client)
    client.update(DEADLINE)
    return client, server


def push(client, caches):
    for _ in range(caches):
        assert client.push_cache(DEADLINE)


def test_caches_that_wait_for_a_slow_line_are_packed_and_arrive_as_they_were(cluster):
    client, server = pushing(cluster, rate=4_000_000)
    push(client, 4 * TRIAL)
    assert client.stats().compression == "lz4"
    before = client.stats().pushed_bytes
    push(client, TRIAL)
    assert client.stats().pushed_bytes - before < TRIAL * 16 * 4000 // 4, "of a frame's bytes, lz4 leaves few"
    until(lambda: server.total_caches == 5 * TRIAL)
    batch = server.get_batch(5 * TRIAL * 16, timeout=DEADLINE)
    assert (batch.obs == batch.obs[:, :1]).all()


def test_a_reader_that_waits_for_a_slow_line_has_its_batches_packed(cluster):
    server = cluster.server(schema=FRAMES, compression="auto", cache_size=16, reuse_cache=True)
    writer = cluster.client(server, capacity=200)
    record_frames(writer)
    push(writer, 4)
    until(lambda: server.total_caches == 4)
    way = cluster.keep(CutWay(place(server.endpoint), rate=4_000_000))
    reader = cluster.keep(memoire.Reader([way.endpoint], timeout=DEADLINE, ahead=1))

    def carried(batches):
        before = way.carried
        for _ in range(batches):
            batch = reader.get_batch(32)
            assert (batch.obs == batch.obs[:, :1]).all()
        return way.carried - before

    plain = carried(TRIAL // 2)
    carried(3 * TRIAL)
    assert carried(TRIAL // 2) < plain / 4
