"""`compression="auto"` over real sockets: packed through a slow line, plain through a fast one, the same samples either way."""

import numpy as np
import pytest

import memoire
from memoire.client.client import Client
from memoire.limits import Limits
from memoire.wire.compression import TRIAL
from netkit import DEADLINE, until
from tcpkit import CutWay, place

pytestmark = pytest.mark.slow
FRAMES = memoire.Schema(
    {"obs": memoire.Column(np.uint8, (4000,), "state"), "reward": memoire.Column(np.float32, (), "reward")}
)
CREDIT = 1 << 18
"""Bytes of two or three caches: a line that is slow makes their client wait."""


def pushing(cluster, rate, credit=CREDIT):
    """A client whose caches go through a line of this speed, and the server behind it."""
    server = cluster.server(schema=FRAMES, compression="auto", cache_size=16, limits=Limits(credit=credit))
    way = cluster.keep(CutWay(place(server.push_endpoint), rate=rate))
    options = {"push": way.endpoint, "context": cluster.context, "capacity": 200}
    client = cluster.keep(Client(server.endpoint, **options))
    client.memory.open(0)
    client.memory.extend(0, (np.tile(np.arange(100, dtype=np.uint8)[:, None], 4000), np.ones(100, np.float32)))
    client.memory.close(0, final_state=np.zeros(4000, np.uint8))
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


def test_a_line_that_carries_all_of_it_is_given_plain_caches(cluster):
    client, server = pushing(cluster, rate=None, credit=1 << 26)
    push(client, 4 * TRIAL)
    until(lambda: client.stats().in_flight_caches == 0)
    assert client.stats().compression == "none"
    assert client.stats().pushed_bytes > 4 * TRIAL * 16 * 4000 // 2
    assert server.total_caches == 4 * TRIAL


def test_a_reader_that_waits_for_a_slow_line_has_its_batches_packed(cluster):
    server = cluster.server(schema=FRAMES, compression="auto", cache_size=16, reuse_cache=True)
    writer = cluster.client(server, capacity=200)
    writer.memory.open(0)
    writer.memory.extend(0, (np.tile(np.arange(100, dtype=np.uint8)[:, None], 4000), np.ones(100, np.float32)))
    writer.memory.close(0, final_state=np.zeros(4000, np.uint8))
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
