"""Whole episodes, alone or in groups: padding to the longest, chances of each, and priorities by entry."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire import Buffer, Greedy, Prioritized, RankBased, Schema, Uniform
from memoire.errors import Closed, EmptyMemory, NotEnoughSamples, ParameterError
from memoire.replay.columns import Column
from memory_checks import check_memory
from netkit import in_thread, pool_in, until

SCHEMA = Schema(
    {
        "obs": Column(np.float32, (2,), "state"),
        "action": np.int64,
        "prompt": (np.int32, (2,)),
        "reward": np.float32,
        "value": np.float32,
    }
)


def record(buffer, length, begin, prompt=0, terminated=True, weight=1.0, lane=0):
    """Record an episode with the actions begin, begin + 1, ...; its last reward is its prompt."""
    memory = buffer.memory
    memory.open(lane)
    for t in range(begin, begin + length):
        reward = np.float32(prompt if t == begin + length - 1 else 0)
        entry = (np.full(2, t, np.float32), np.int64(t), np.full(2, prompt, np.int32), reward, np.float32(t % 5))
        memory.add(lane, entry, weight)
    memory.close(lane, final_state=np.full(2, begin + length, np.float32), terminated=terminated)


def buffer_of(lengths, **options):
    """Return a buffer with episodes of these lengths; episode e begins with action 100 * e."""
    buffer = Buffer(SCHEMA, 2000, **{"seed": 3, "discount": 0.5} | options)
    for e, length in enumerate(lengths):
        record(buffer, length, 100 * e, prompt=e, terminated=e % 2 == 0)
    return buffer


def test_whole_episodes_are_padded_to_the_longest():
    batch = buffer_of([3, 7, 1], sampler=Uniform(), frame_stack=2).sample_episodes(3)
    assert sorted(batch.steps) == [1, 3, 7] and batch.obs.shape == (3, 8, 2, 2)
    assert batch.action.shape == batch.mask.shape == batch.ids.shape == batch.reward.shape == (3, 7)
    np.testing.assert_array_equal(batch.mask, np.arange(7) < batch.steps[:, None])
    for i, length in enumerate(batch.steps):
        begin = batch.action[i, 0]
        own = begin + np.arange(length)
        np.testing.assert_array_equal(batch.action[i], np.pad(own, (0, 7 - length)))
        np.testing.assert_array_equal(batch.obs[i, : length + 1, 1, 0], begin + np.arange(length + 1))
        np.testing.assert_array_equal(
            batch.obs[i, : length + 1, 0, 0], np.maximum(begin, begin + np.arange(length + 1) - 1)
        )
        assert not batch.obs[i, length + 2 :].any() and not batch.reward[i, length:].any()
        discount = np.where(np.arange(7) < length, 0.5, 0.0)
        discount[length - 1] = 0.0 if begin // 100 % 2 == 0 else 0.5
        np.testing.assert_array_equal(batch.discount[i], discount)
    np.testing.assert_array_equal(batch.importance, 1.0)
    np.testing.assert_array_equal(batch.group, [0, 1, 2])
    assert (batch.ids[~batch.mask] == -1).all()
    assert "advantage" not in batch and batch.advantage.shape == (3, 7)


def test_with_uniform_weights_each_episode_is_there_alike_and_none_twice():
    buffer = buffer_of([1, 2, 30, 4, 5, 6, 70, 8], sampler=Uniform())
    counts, together = Counter(), 0
    for _ in range(400):
        firsts = buffer.sample_episodes(4).action[:, 0] // 100
        assert len(set(firsts)) == 4
        counts.update(firsts.tolist())
        together += {0, 1} <= set(firsts)
    chances = np.array([counts[e] for e in range(8)]) / 400
    assert np.abs(chances - 0.5).max() < 4 * 0.5 / np.sqrt(400)
    assert abs(together / 400 - 4 * 3 / (8 * 7)) < 0.1  # neighbours are together as often as any two


@pytest.mark.parametrize("sampler", [Prioritized(1.0, beta=1.0), RankBased(0.8, beta=1.0)])
def test_the_weighted_mean_over_episodes_is_the_plain_one(sampler):
    buffer = buffer_of([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], sampler=sampler)
    rng = np.random.default_rng(1)
    everything = buffer.sample_episodes(400)
    np.testing.assert_array_less(0, everything.importance)
    buffer.update_priorities(everything.ids[everything.mask], rng.exponential(size=everything.mask.sum()))
    means, chances = [], Counter()
    for _ in range(300):
        batch = buffer.sample_episodes(10)
        means.append((batch.importance.astype(float) * batch.divisor * batch.action[:, 0]).mean())
        chances.update((batch.action[:, 0] // 100).tolist())
    truth = np.mean(100 * np.arange(15))
    assert abs(np.mean(means) - truth) < 4 * np.std(means) / np.sqrt(300)
    one = {}
    for row, number in enumerate(everything.action[:, 0] // 100):
        one[int(number)] = buffer.memory.weights(everything.ids[row][everything.mask[row]]).mean()
    weights = np.array([one[e] for e in range(15)])
    expected = 3000 * weights / weights.sum()
    seen = np.array([chances[e] for e in range(15)])
    assert (np.abs(seen - expected) < 5 * np.sqrt(expected) + 1).all()


def test_errors_by_entry_reach_the_entries_of_the_mask_only():
    buffer = buffer_of([3, 7, 1], sampler=Prioritized(1.0))
    batch = buffer.sample_episodes(12)
    errors = np.where(batch.mask, batch.action % 50 + 1.0, np.nan)
    assert batch.update_priorities(errors).applied == batch.mask.sum()
    for i in range(12):
        own = batch.ids[i][batch.mask[i]]
        np.testing.assert_allclose(buffer.memory.weights(own), errors[i][batch.mask[i]] + 1e-6, rtol=1e-6)
    batch.update_priorities(np.full(12, 4.0))
    np.testing.assert_allclose(buffer.memory.weights(batch.ids[0][batch.mask[0]]), 4.0 + 1e-6, rtol=1e-6)
    with pytest.raises(ParameterError, match="as the mask has"):
        batch.update_priorities(np.ones((12, 3)))
    with pytest.raises(ParameterError, match="finite"):
        batch.update_priorities(np.full((12, 7), np.nan))


def test_groups_are_drawn_whole_and_stand_together():
    buffer = Buffer(SCHEMA, 2000, sampler=Uniform(), seed=3)
    for e, prompt in enumerate([5, 2, 5, 9, 2, 5]):
        record(buffer, 2 + e, 100 * e, prompt)
    batch = buffer.sample_episodes(3, group="prompt")
    assert len(batch.ids) == 6 and sorted(Counter(batch.group.tolist()).values()) == [1, 2, 3]
    for group in range(3):
        own = batch.group == group
        prompts = batch.prompt[own][:, 0, 0]
        assert len(set(prompts)) == 1
        assert list(batch.action[own][:, 0]) == {5: [0, 200, 500], 2: [100, 400], 9: [300]}[prompts[0]]
    with pytest.raises(EmptyMemory, match="no group by 'prompt' has 4 episodes; the largest has 3"):
        buffer.sample_episodes(1, group="prompt", group_size=4)
    pairs = [buffer.sample_episodes(2, group="prompt", group_size=2) for _ in range(5)]
    for batch in pairs:
        returns = (batch.reward * batch.mask).sum(axis=1).reshape(2, 2)  # a row for each group
        np.testing.assert_array_equal(returns[:, 0], returns[:, 1])
        assert sorted(returns[:, 0]) == [2.0, 5.0]
        assert set(batch.action[:, 0]) == {100, 200, 400, 500}  # the newest two of three


def test_a_group_weighs_what_its_episodes_do():
    buffer = Buffer(SCHEMA, 2000, sampler=Prioritized(1.0, beta=1.0, normalize="global"), seed=3)
    for e, prompt in enumerate([1, 2, 1, 1]):
        record(buffer, 4, 100 * e, prompt)
    everything = buffer.sample_episodes(100)
    buffer.update_priorities(
        everything.ids.reshape(-1), np.where(everything.prompt[:, :, 0] == 1, 3.0, 1.0).reshape(-1)
    )
    counts = Counter()
    for _ in range(200):
        batch = buffer.sample_episodes(4, group="prompt")
        drawn = batch.prompt[:, 0, 0][np.flatnonzero(np.diff(batch.group, prepend=-1))]
        assert Counter(drawn.tolist()) == {1: 3, 2: 1}
        counts.update(drawn.tolist())
        np.testing.assert_allclose(batch.importance, np.where(batch.prompt[:, 0, 0] == 1, 1 / 3, 1.0), rtol=1e-5)


def test_the_greedy_draw_takes_the_heaviest_first():
    buffer = buffer_of([3, 3, 3, 3], sampler=Greedy())
    everything = buffer.sample_episodes(4)
    buffer.update_priorities(everything.ids.reshape(-1), (everything.action // 100).reshape(-1) + 1.0)
    assert list(buffer.sample_episodes(2).action[:, 0]) == [300, 200]
    assert len(buffer.sample_episodes(6).ids) == 6


def test_open_episodes_and_those_without_weight_are_not_drawn():
    buffer = Buffer(SCHEMA, 100, sampler=Uniform(), seed=3)
    with pytest.raises(EmptyMemory, match="no episode has ended"):
        buffer.sample_episodes(1)
    buffer.memory.open(1)
    buffer.memory.add(1, (np.ones(2, np.float32), 1, np.ones(2, np.int32), 1.0, 1.0))
    record(buffer, 3, 0, weight=0.0)
    with pytest.raises(EmptyMemory, match="of 1 ended episodes, no entry has a positive weight"):
        buffer.sample_episodes(1)
    record(buffer, 3, 100)
    assert set(buffer.sample_episodes(5).action[:, 0]) == {100}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"count": 0}, "count must be a whole number from 1"),
        ({"count": True}, "count must be a whole number from 1"),
        (
            {"count": 1, "group": "obs"},
            r"group must be None or a plain column of fixed shape of the schema \(action, prompt\)",
        ),
        ({"count": 1, "group": ["prompt"]}, "group must be None or a plain column"),
        ({"count": 1, "group_size": 2}, "group_size=2 needs group="),
        ({"count": 1, "group": "prompt", "group_size": 0}, "group_size must be a whole number from 1"),
        ({"count": 1, "group": "action"}, "its value changes within an episode, from 0 to 1 at step 1"),
    ],
)
def test_wrong_arguments_say_what_is_right(arguments, text):
    with pytest.raises(ParameterError, match=text):
        buffer_of([3]).sample_episodes(**arguments)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_groups_agree_with_a_slow_model_while_episodes_come_and_go(data):
    length, first = data.draw(st.sampled_from([(0, ()), (3, ()), (3, ("prompt",))]))
    buffer = Buffer(SCHEMA, 60, sampler=Uniform(), seed=3, sequence_length=length, sequence_first=first)
    stored = []  # (first action, prompt, length), oldest first
    for e in range(data.draw(st.integers(1, 25))):
        length, prompt = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 3))
        record(buffer, length, 100 * e, prompt, lane=data.draw(st.integers(0, 2)))
        stored.append((100 * e, prompt, length))
    check_memory(buffer.memory)
    stored = stored[len(stored) - buffer.num_episodes :]
    size = data.draw(st.integers(1, 3))
    groups = {}
    for first, prompt, length in stored:
        groups.setdefault(prompt, []).append((first, length))
    complete = {prompt: episodes[-size:] for prompt, episodes in groups.items() if len(episodes) >= size}
    if not complete:
        with pytest.raises(EmptyMemory):
            buffer.sample_episodes(1, group="prompt", group_size=size)
        return
    count = len(complete)
    batch = buffer.sample_episodes(count, group="prompt", group_size=size)
    assert len(batch.ids) == count * size
    firsts, lengths = batch.action[:, 0].reshape(count, size), batch.steps.reshape(count, size)
    for prompt, own, long in zip(batch.prompt[::size, 0, 0], firsts, lengths, strict=True):
        assert list(zip(own, long, strict=True)) == complete.pop(prompt)


def test_what_may_be_drawn_once_is_in_one_batch_once_and_groups_wait_for_fresh_episodes():
    buffer = Buffer(SCHEMA, 2000, sampler=Prioritized(1.0, beta=0.5), seed=3, max_times_sampled=1)
    for e, prompt in enumerate([1, 2, 1, 2, 3]):
        record(buffer, 4, 100 * e, prompt)
    with pytest.raises(EmptyMemory, match="6 were requested, but 5 can be drawn, each once"):
        buffer.sample_episodes(6)
    batch = buffer.sample_episodes(2, group="prompt", group_size=2)
    assert sorted(batch.action[:, 0]) == [0, 100, 200, 300]
    assert buffer.memory.draws_left == buffer.memory.num_positive > 0
    with pytest.raises(EmptyMemory, match="no group by 'prompt' has 2 episodes; the largest has 1"):
        buffer.sample_episodes(1, group="prompt", group_size=2)
    record(buffer, 4, 500, 2)
    with pytest.raises(EmptyMemory, match="no group by 'prompt' has 2 episodes"):
        buffer.sample_episodes(1, group="prompt", group_size=2)
    record(buffer, 4, 600, 2)
    assert list(buffer.sample_episodes(1, group="prompt", group_size=2).action[:, 0]) == [500, 600]
    assert list(buffer.sample_episodes(1).action[:, 0]) == [400]
    check_memory(buffer.memory)
    with pytest.raises(EmptyMemory, match="of 7 ended episodes"):
        buffer.sample_episodes(1)


def ship(client, length, begin, prompt):
    """Push the same episode as `record`, through a client."""
    t = np.arange(begin, begin + length)
    prompts = np.full((length, 2), prompt, np.int32)
    columns = {"obs": np.stack([t, t], 1).astype(np.float32), "action": t, "prompt": prompts}
    columns |= {"reward": np.where(t == t[-1], prompt, 0).astype(np.float32), "value": (t % 5).astype(np.float32)}
    final = {"obs": np.full(2, begin + length, np.float32)}
    assert client.push_episode(columns, final_state=final, terminated=True, timeout=100.0)


def test_a_server_draws_groups_of_the_episodes_that_actors_ship_and_takes_errors_by_entry(cluster):
    server = cluster.server(schema=SCHEMA, storage="episodes", capacity=500, sampler=Prioritized(1.0))
    clients = [cluster.client(server, capacity=None) for _ in range(2)]
    with pytest.raises(NotEnoughSamples, match=r"a batch of 2 has to wait: no episode has ended.*Wait for actors"):
        server.sample_episodes(2)
    _, drawn = in_thread(lambda: server.sample_episodes(1, 20.0, group="prompt", group_size=2))
    for number, prompt in enumerate([4, 6, 6, 4]):
        ship(clients[number % 2], 3 + number, 100 * number, prompt)
    assert list(until(lambda: drawn.get("value")).prompt[:, 0, 0]) in ([4, 4], [6, 6])
    until(lambda: server.stats().tables["default"].held_caches == 4)
    server.configure(priority_exponent=0.0)  # the two groups weigh the same, and each is drawn once
    batch = server.sample_episodes(2, group="prompt", group_size=2)
    assert sorted(batch.action[:, 0]) == [0, 100, 200, 300] and list(batch.group) == [0, 0, 1, 1]
    np.testing.assert_array_equal((batch.reward * batch.mask).sum(axis=1), batch.prompt[:, 0, 0])
    assert batch.update_priorities(np.where(batch.mask, batch.action + 1.0, np.nan)).lost == 0
    pool = pool_in(server)
    own = batch.ids[batch.mask]
    server.configure(priority_exponent=1.0)
    np.testing.assert_allclose(pool.memory.weights(own["number"]), batch.action[batch.mask] + 1.0, rtol=1e-5)
    assert server.stats().tables["default"].samples > batch.mask.sum()
    caches = cluster.server(schema=SCHEMA)
    with pytest.raises(ParameterError, match="storage must be 'episodes' to draw whole episodes, got 'caches'"):
        caches.sample_episodes(1)
    _, waiting = in_thread(server.sample_episodes, 1, 20.0)
    server.close(0.2)
    with pytest.raises(Closed):
        server.sample_episodes(1)
