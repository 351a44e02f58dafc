"""Tests one step on each side of internal bounds: requests at once, accepted peers, kept episodes."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from memoire import Buffer, Schema
from memoire.errors import ProtocolError
from memoire.models import fetching as fetcher
from memoire.net import process
from memoire.tables.episodes import saving as episode_records
from netkit import FakeSystem
from statekit import STATES, episodes_of, memory_of
from topickit import LIMITS, following


def test_a_window_is_open_at_once_where_few_ask():
    node = following(LIMITS.replace(model_window=4))
    node.publish(200)
    node.answer()
    assert len(node.asked) == 4


def test_a_window_grows_by_one_with_each_quick_answer_and_a_slow_one_makes_it_one():
    node = following(LIMITS.replace(model_window=4))
    body, at_once = node.publish(200), []
    for place in range(6):
        node.now += 1.1 * fetcher.ALONE_TIME if place < 3 else 0.0
        node.answer()
        at_once.append(len(node.asked))
    node.now += 2 * fetcher.QUICK_TIME
    for place in range(5):
        node.now += 1.1 * fetcher.ALONE_TIME if place == 4 else 0.0
        node.answer()  # earlier requests are slow
        at_once.append(len(node.asked))
    node.answer_all()
    assert at_once == [2, 3, 4, 4, 4, 4, 3, 2, 1, 1, 2] and node.newest.body == body


def test_addresses_are_closed_to_newcomers_near_the_limit_and_open_when_three_times_the_reserve_is_free():
    allowed, watched = 1024, SimpleNamespace(closed=False)
    system = FakeSystem(allowed, 4096)
    guard = process.DescriptorGuard(system)
    guard.add(5, watched)
    reserved = guard.reserve()
    assert guard.reserved == reserved == allowed - system.soft > 0 and not guard.is_full

    def turned(free):
        system.open = allowed - free
        guard.tick(guard.due_at)
        return guard.is_full

    begin, end = reserved + process.MIN_RESERVED // 2, 3 * reserved
    assert [turned(free) for free in (begin + 1, begin, end, end + 1)] == [False, True, True, False]
    assert (system.filters, guard.times, guard.reserved) == ([(5, True), (5, False)], 1, reserved)
    assert turned(begin)
    guard.add(6, watched)  # the address begins to listen meanwhile
    assert system.filters[2:] == [(5, True), (6, True)] and turned(end + 1) is False
    watched.closed = True
    assert not turned(begin) and guard.due_at == float("inf") and system.soft == allowed


def test_an_episode_of_one_entry_and_of_no_weight_is_kept():
    (kept,) = episodes_of(memory_of([1])).walk()
    body, payload = episode_records.pack(kept, STATES)
    weightless = msgspec.structs.replace(body, multiplier=0.0)
    episode = episode_records.unpack(weightless, payload, STATES).episode
    assert episode.columns["obs"].shape == (1, 3) and episode.multiplier == 0.0
    with pytest.raises(ProtocolError):
        episode_records.unpack(msgspec.structs.replace(body, multiplier=-1.0), payload, STATES)


def test_a_reset_of_some_environments_says_nothing_of_where_the_others_are():
    """States from `reset` are not those after the last step: without a next step, the last entry has no end."""
    schema = Schema({"obs": (np.float32, (1,)), "action": np.int64, "reward": np.float32})
    buffer = Buffer(schema, 100, seed=0)
    writer = buffer.writer(num_envs=2, autoreset="disabled")
    for step in range(3):
        obs = np.full((2, 1), step, np.float32)
        writer.step(obs, np.zeros(2, np.int64), np.ones(2), np.zeros(2, bool), np.zeros(2, bool), obs + 1)
    writer.reset(np.full((2, 1), 99, np.float32), mask=np.array([True, False]))
    writer.close()
    assert not (buffer.sample(200).next_obs == 99).any()
