"""Feedback of a learner: priorities reach the right entries, identified by content, in spite of evictions."""

import numpy as np
import pytest

from memoire.limits import Limits
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Prioritized, RankBased
from memoire.replay.schema import Schema
from netkit import until

SCHEMA = Schema(
    {
        "obs": Column(np.float32, (1,), "state"),
        "serial": Column(np.int64),
        "reward": Column(np.float32, (), "reward"),
    }
)
"""`serial` identifies an entry in the whole test, independent of its row and number."""
EPSILON = Parameters().priority_epsilon
OF_EACH = 1 << 18  # serials of each actor


class ExpectedPriorities:
    """Priority that each entry must have: its first priority, or its newest TD error."""

    def __init__(self, seed, actors=1):
        self.rng = np.random.default_rng(seed)
        self.priorities = np.zeros(actors * OF_EACH)
        self.next = [number * OF_EACH for number in range(actors)]
        self.samples = 0

    def record(self, memory, length, actor=0, lane=0):
        """Record an episode whose entries have new serials and the largest priority so far."""
        serials = np.arange(self.next[actor], self.next[actor] + length)
        self.next[actor] += length
        self.priorities[serials] = memory.max_priority
        memory.open(lane)
        memory.extend(lane, (np.zeros((length, 1), np.float32), serials, np.zeros(length, np.float32)))
        memory.close(lane, terminated=True, final_state=np.zeros(1, np.float32))

    def about(self, batch):
        """Return random TD errors for a batch that was drawn some time ago, and expect their priorities."""
        errors = self.rng.uniform(0.2, 2.0, len(batch.ids)).astype(np.float32)
        self.priorities[batch.serial] = errors.astype(float) + EPSILON  # the last duplicate counts
        self.samples += len(errors)
        return errors

    def holds(self, memory):
        """Check the weight of each entry in a memory; return the number of different weights."""
        inside = memory.contents()
        rows = np.flatnonzero(inside["meta"]["episode"] >= 0)
        serials = memory.gather(inside["meta"]["number"][rows]).prev["serial"]
        weights = inside["weights"][rows]
        np.testing.assert_allclose(weights, self.priorities[serials], rtol=1e-6)
        return len(np.unique(weights))


@pytest.mark.parametrize("sampler", [Prioritized(1.0), RankBased(0.3)])
def test_after_thousands_of_rounds_with_evictions_no_priority_is_on_another_entry(sampler):
    buffer = Buffer(SCHEMA, 211, sampler=sampler, seed=1)
    memory, expected, late = buffer.memory, ExpectedPriorities(2), []
    applied = stale = 0
    for turn in range(4000):
        if turn % 3 == 0:
            expected.record(memory, 5 + turn % 17, lane=turn % 4)
        late.append(buffer.sample(24))
        if len(late) > 30:  # updates come 30 rounds late on average
            batch = late.pop(expected.rng.integers(len(late)))
            counts = batch.update_priorities(expected.about(batch))
            applied, stale = applied + counts[0], stale + counts[1]
        if turn % 100 == 99:
            assert expected.holds(memory) > 50
    assert applied + stale == expected.samples
    assert min(applied, stale) > expected.samples // 10


QUICK = Limits.of(resend_after=0.1, resend_most=0.3, update_every=0.02)


@pytest.mark.parametrize("learner", ["server", "reader"])
def test_in_a_cluster_no_priority_lands_on_another_actors_or_another_entry(cluster, learner):
    """A reader draws from two servers behind a proxy, and sends feedback to each owner's home; a server draws alone."""
    parameters = Parameters(priority_exponent=1.0, cache_size=128)
    servers = [
        cluster.server(schema=SCHEMA, parameters=parameters, name=f"s{number}", limits=QUICK)
        for number in range(2 if learner == "reader" else 1)
    ]
    proxy = cluster.proxy(servers)
    until(lambda: len(proxy.servers) == len(servers))
    actors = [cluster.client(proxy, capacity=150, limits=QUICK) for _ in range(4)]
    source = cluster.reader([proxy], ahead=1) if learner == "reader" else servers[0]
    expected, late = ExpectedPriorities(3, actors=4), []

    def is_all_counted():
        """Return True if the owners have counted each error as applied or stale."""
        for actor in actors:
            actor.update(100.0)
        stats = [actor.stats() for actor in actors]
        return sum(each.applied + each.stale for each in stats) == expected.samples

    for turn in range(60):
        for number, actor in enumerate(actors):
            for _ in range(2):
                expected.record(actor.memory, 10 + (turn + number) % 7, number)
            assert actor.push_cache(100.0)
        for _ in range(6):
            late.append(source.get_batch(64, 100.0))
        while len(late) > 12:
            batch = late.pop(expected.rng.integers(len(late)))
            batch.update_priorities(expected.about(batch))
        until(is_all_counted)
        for actor in actors:
            expected.holds(actor.memory)
    stats = [actor.stats() for actor in actors]
    assert min(sum(each.applied for each in stats), sum(each.stale for each in stats)) > 1000
    assert not source.stats().feedback_lost and not sum(server.stats().feedback_lost for server in servers)
