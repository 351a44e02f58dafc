"""Rollouts through sockets: each step is taken once, in order and with its cuts, and actors wait for room."""

import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from memoire.errors import Closed, NotEnoughSamples, ParameterError
from memoire.replay.schema import Schema
from memoire.tables.table import Table
from netkit import QUICK, until

SCHEMA = Schema({"obs": np.int64, "action": np.int32, "reward": np.float32})


def step(writer, number, *, ends=False, stops=False, version=0):
    writer.step(np.int64(number), np.int32(number), 1.0, ends, stops, np.int64(number + 1), {}, model_version=version)


class Actor:
    """Actor in a thread, which steps as fast as permitted with the newest version that the server announced."""

    def __init__(self, client, first=0, episode=10**9):
        self.client, self.number, self.episode = client, first, episode
        self.versions = []  # the version of each step
        self.stop, self.policy = threading.Event(), client.model("policy")
        self.writer = client.writer(check=False)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        with suppress(Closed):
            while not self.stop.is_set():
                version = self.policy.version
                if self.policy.published > version:
                    version = self.policy.wait(20.0, after=version).version
                self.versions.append(version)
                step(self.writer, self.number, ends=(self.number + 1) % self.episode == 0, version=version)
                self.number += 1

    def end(self):
        self.stop.set()


@pytest.fixture
def ends():
    """Yield a list of actors that stop before the cluster is taken down."""
    actors = []
    yield actors
    for actor in actors:
        actor.end()


def begin(cluster, limits=QUICK, **options):
    """Return a server with a table of rollouts, and the table."""
    tables = {"rollouts": Table(SCHEMA, storage="rollouts", **options)}
    server = cluster.server(schema=None, tables=tables, limits=limits)
    return server, server.table("rollouts")


def test_a_writer_cuts_at_the_length_and_where_it_is_told(cluster):
    server, table = begin(cluster, rollout_length=4, capacity=100)
    writer = cluster.client(server, limits=QUICK).writer(check=False)
    for number in range(10):
        step(writer, number, ends=number == 9)
    for number in range(20, 23):
        step(writer, number)
    assert writer.cut() == 3
    step(writer, 23, stops=True)
    rollouts = table.take(14, timeout=20.0)
    assert rollouts["obs"].tolist() == [*range(10), *range(20, 24)]
    assert rollouts.lengths.tolist() == [4, 4, 2, 3, 1], "the fourth entry's fragment left at its own step"
    assert rollouts.terminated.tolist() == [False, False, True, False, False]
    assert rollouts.truncated.tolist() == [False, False, False, False, True], "a cut is no end"
    assert rollouts.final["obs"].tolist() == [4, 8, 10, 23, 24]
    until(lambda: server.stats().totals.episodes == 2)  # whole episodes only
    assert server.stats().totals.steps == 14


@pytest.mark.parametrize("learner", ["server", "reader"])
def test_actors_wait_in_step_until_entries_are_taken_each_once(cluster, ends, learner):
    """The learner is the server itself, or a distant reader behind a proxy."""
    node, table = server, source = begin(cluster, capacity=40)
    if learner == "reader":
        node = cluster.proxy([server])
        source = cluster.reader([node], table="rollouts", limits=QUICK)
    client = cluster.client(node, limits=QUICK)
    actor = Actor(client)
    ends.append(actor)
    reason = until(lambda: client.stats().held_back)
    assert "waiting until a learner takes entries" in reason
    assert actor.number in (39, 40), "the last step waits inside"
    expected = 0
    for _ in range(10):
        rollouts = source.take(25, timeout=20.0)
        assert rollouts["obs"].tolist() == list(range(expected, expected + 25))
        expected += 25
        assert actor.number <= expected + 40
    assert table.stats().rate.forgiven == 0.0 and table.stats().samples == 250
    assert client.stats().passed_steps == 0
    if learner == "reader":
        stats = source.stats()
        assert (stats.rollouts_taken, stats.rollouts_kept, stats.batches, stats.faults) == (250, 0, 10, 0)
        with pytest.raises(ParameterError, match="at most the capacity of all servers, 40 entries"):
            source.take(41)
        with pytest.raises(ParameterError, match=r"use take\(steps\)"):
            source.get_batch(4, 20.0)


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_without_room_is_not_kept_also_if_its_episode_ends(cluster, ends):
    limits = replace(QUICK, block_timeout=0.05)
    server, table = begin(cluster, limits, capacity=4)
    client = cluster.client(server, limits=limits)
    with client.writer(check=False) as writer:
        for number in range(4):
            step(writer, number)
        step(writer, 4, ends=ends)
        step(writer, 5, stops=True)
    client.update(timeout=20.0)
    assert client.stats().passed_steps == 2
    assert table.take(4, timeout=20.0)["obs"].tolist() == [0, 1, 2, 3]
    until(lambda: server.stats().totals.episodes == 1 + ends)
    assert client.stats().pushed_caches == 1, "a whole episode is counted, and not sent"


def test_no_step_is_made_by_a_model_whose_share_is_there(cluster, ends):
    server, table = begin(cluster, capacity=64, rollout_length=16, max_model_lag=0)
    server.publish("policy", b"1")
    clients = [cluster.client(server, limits=QUICK) for _ in range(2)]
    for client in clients:
        client.model("policy").wait(20.0)
    actors = [Actor(client, 10**6 * i, episode=7) for i, client in enumerate(clients)]
    ends += actors
    for version in range(1, 6):
        rollouts = table.take(64, timeout=30.0, release="publish")
        assert set(rollouts.model_version.tolist()) == {version}
        assert table.stats().held_samples == 0, "no actor goes on before the next model is published"
        server.publish("policy", b"%d" % (version + 1))
    assert table.stats().passed_over_samples == 0
    for actor in actors:
        actor.end()
        counts = [actor.versions.count(version) for version in range(1, 6)]
        assert sum(counts) > 0


def test_old_entries_leave_a_full_table_that_nobody_waits_for(cluster):
    server, table = begin(cluster, capacity=20, rollout_length=5, on_full="drop_oldest")
    client = cluster.client(server, limits=QUICK)
    writer = client.writer(check=False)
    for number in range(50):
        step(writer, number)
    until(lambda: table.stats().overwritten_caches == 6)
    assert table.take(20, timeout=20.0)["obs"].tolist() == list(range(30, 50))
    assert not client.stats().held_back


def test_a_length_that_is_changed_reaches_writers_that_are_there(cluster):
    server, table = begin(cluster, rollout_length=4, capacity=100)
    client = cluster.client(server, limits=QUICK)
    writer = client.writer(check=False)
    table.configure(rollout_length=2)
    client.update(timeout=20.0)
    for number in range(8):
        step(writer, number)
    assert table.take(8, timeout=20.0).lengths.tolist() == [2, 2, 2, 2]
    with pytest.raises(ParameterError, match="handed out once"):
        table.configure(max_times_sampled=1)


def test_what_takes_no_rollouts_says_so(cluster):
    server, table = begin(cluster, capacity=10)
    with pytest.raises(ParameterError, match="take"):
        table.get_batch(4)
    with pytest.raises(NotEnoughSamples, match="waiting for 4 more entries"):
        table.take(4, timeout=0.2)
    client = cluster.client(server, limits=QUICK)
    with pytest.raises(ParameterError, match="push_cache"):
        client.push_cache()
    assert client.push_episode({"obs": np.arange(4), "action": np.zeros(4, np.int32), "reward": np.ones(4)})
    assert len(table.take(4, timeout=20.0)) == 4
    plain = cluster.server(limits=QUICK)
    with pytest.raises(ParameterError, match="rollouts"):
        plain.table("default").take(1)
