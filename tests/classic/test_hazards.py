"""Tests of earlier replay memories' faults, one each; docs/development/contract.md names the row of each test."""

import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from classic_help import DEADLINE, Cluster, check_content, in_thread, play, tcp, templates
from memoire import ReplayMemoryClient, ReplayMemoryServer
from memoire.errors import EndpointError, MemoireTimeout, NotEnoughSamples
from netkit import until

pytestmark = pytest.mark.slow


def test_one_cache_of_many_slots_is_enough_for_a_batch():
    with Cluster(n_caches=1000, cache_size=32) as cluster:
        client = cluster.client()
        play(client, 1)
        assert client.push_cache() == 0
        check_content(cluster.server.get_batch(32, timeout=DEADLINE))


def test_samples_are_whole_while_their_caches_are_overwritten():
    """H3: each sample holds the fields of one entry, with more pull workers than caches and with readers beside them."""
    with Cluster(n_caches=2, cache_size=256, workers=3, reuse_cache=True) as cluster:
        clients = [cluster.client() for _ in range(3)]
        for owner, client in enumerate(clients, 1):
            play(client, owner, length=100)
            assert client.push_cache() == 0
        cluster.held(3)
        stop = threading.Event()

        def push(client):
            while not stop.is_set():
                client.push_cache(timeout=0.1)

        def read():
            for _ in range(150):
                check_content(cluster.server.get_batch(200, timeout=DEADLINE))

        pushers = [threading.Thread(target=push, args=(client,), daemon=True) for client in clients]
        for each in pushers:
            each.start()
        with in_thread(read) as first, in_thread(read) as second:
            pass
        stop.set()
        for each in pushers:
            each.join(DEADLINE)
        assert first == second == {"result": None}
        assert cluster.server.total_caches > 10


def test_topics_are_matched_exactly_and_messages_between_calls_wait():
    with Cluster() as cluster:
        client = cluster.client()
        for topic in ("a", "ab"):
            cluster.server.pub_bytes(topic, f"first of {topic}")
            assert client.sub_bytes(topic, timeout=DEADLINE) == f"first of {topic}"
        for k in range(3):
            cluster.server.pub_bytes("a", f"a{k}")
            cluster.server.pub_bytes("ab", f"ab{k}")
        # the client gets all messages of "a" while it also receives "ab", and gets no message of "ab" as "a"
        assert [client.sub_bytes("ab", timeout=DEADLINE) for _ in range(3)] == [f"ab{k}" for k in range(3)]
        assert [client.sub_bytes("a", timeout=DEADLINE) for _ in range(3)] == [f"a{k}" for k in range(3)]
        with pytest.raises(MemoireTimeout):
            client.sub_bytes("a", timeout=0.1)


def test_a_worker_added_while_the_server_closes_leaves_no_address_taken():
    server, address, gate = ReplayMemoryServer(*templates(), 10, tcp(), 1), tcp(), threading.Event()
    server.server._io.requests.worker.post(gate.wait)  # the busy thread ends before it polls the new socket
    server.server.add_request_worker(address)
    with in_thread(server.close):
        assert server.server.wait_closed(DEADLINE)
        gate.set()

    def is_free():
        try:
            ReplayMemoryServer(*templates(), 10, address, 1).close()
        except EndpointError:
            return False
        return True

    until(is_free)


def test_a_long_episode_closes_at_once_and_makes_no_larger_caches():
    n = 100_000
    ones = np.ones(n, np.float32)
    columns = (np.zeros((n, 4), np.float32), np.arange(n), ones, ones, ones, np.zeros((n, 2), np.int32))
    with Cluster(max_step=n, cache_size=64) as cluster:
        client = cluster.client()
        client.rem.new_episode()
        client.rem.add_entries(*columns)
        started = time.monotonic()
        client.rem.close_episode()
        assert time.monotonic() - started < DEADLINE
        assert client.push_cache() == 0
        batch = cluster.server.get_batch(64, timeout=DEADLINE)
        assert client.client.stats().pushed_bytes < 64 * 4 * client.rem.entry_size + 4096
        assert cluster.server.server.stats().totals.accepted_samples == 64
        left = (n - batch.prev.action).astype(float)  # the actor's return covers the rewards of all remaining steps
        np.testing.assert_allclose(batch.prev.qvest, (1 - 0.99**left) / (1 - 0.99), rtol=1e-4)


def _dies(sub, req, push, ready):
    """Push caches as an actor until killed."""
    client = ReplayMemoryClient(sub, req, push)
    play(client, 9)
    client.update_counter()
    client.push_cache()
    ready.set()
    while True:
        client.push_cache(timeout=1.0)


def test_a_killed_actor_leaves_nobody_waiting():
    with Cluster(cache_size=16, n_caches=4) as cluster:
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Event()
        actor = spawn.Process(target=_dies, args=(cluster.sub, cluster.req, cluster.push, ready), daemon=True)
        actor.start()
        assert ready.wait(DEADLINE)
        cluster.held(1)
        os.kill(actor.pid, signal.SIGKILL)
        actor.join(DEADLINE)
        survivor = cluster.client()
        play(survivor, 1)
        survivor.update_counter()
        assert cluster.server.total_episodes == 2
        assert survivor.push_cache() == 0

        def drawn():
            batch = cluster.server.get_batch(16, timeout=DEADLINE)
            check_content(batch)
            return 1 in batch.prev.info[:, 0]

        until(drawn)
        started = time.monotonic()
        with pytest.raises(NotEnoughSamples):
            cluster.server.get_batch(10_000, timeout=0.2)
        assert time.monotonic() - started < DEADLINE


def test_pull_workers_may_start_together_and_under_load():
    server = ReplayMemoryServer(*templates(), 100, tcp(), 64)
    sub = server.server.pub_endpoint
    req, push = tcp(), tcp()
    loops = [threading.Thread(target=server.rep_worker_main, args=(req, "Bind"), daemon=True)]
    loops += [threading.Thread(target=server.pull_proxy_main, args=(push, "inproc://together"), daemon=True)]
    with server:
        for each in loops:
            each.start()
        with ReplayMemoryClient(sub, req, push) as client:
            client.rem.cache_size = 4
            play(client, 1)
            barrier = threading.Barrier(8)

            def work():
                barrier.wait(DEADLINE)
                server.pull_worker_main("inproc://together", "Conn")

            loops += [threading.Thread(target=work, daemon=True) for _ in range(8)]
            for each in loops[2:]:
                each.start()
            for _ in range(40):
                assert client.push_cache() == 0
            until(lambda: server.total_caches == 40)
            check_content(server.get_batch(160))
            with pytest.raises(NotEnoughSamples):
                server.get_batch(1)
        server.close()
        for each in loops:
            each.join(DEADLINE)
            assert not each.is_alive()


def test_shares_follow_total_weights_and_not_how_many_caches_were_pushed():
    """H12: two actors push equally many caches, one with three times the weight; early and late batches show 3 : 1."""
    with Cluster(cache_size=500, priority_exponent=0.0) as cluster:
        heavy, light = cluster.client(seed=1), cluster.client(seed=2)
        play(heavy, 1, length=101, episodic_weight_multiplier=3.0)
        play(light, 2, length=101)
        for _ in range(8):
            assert heavy.push_cache() == 0
            assert light.push_cache() == 0
        cluster.held(16)
        shares = []
        for _ in range(40):
            prev, _, _ = cluster.server.get_batch(100)
            shares.append((prev.info[:, 0] == 1).mean())
        assert np.mean(shares[:20]) == pytest.approx(0.75, abs=0.03)
        assert np.mean(shares[20:]) == pytest.approx(0.75, abs=0.03)
