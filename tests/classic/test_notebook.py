"""What the notebook explains, shown of the engine: chances, corrections, costs, and the cases that it warns of."""

import random
import time

import numpy as np
import pytest
from scipy.stats import chisquare

import memoire
from memoire import Buffer, Prioritized, PrioritizedReplayBuffer, RankBased, Schema, Transition, Uniform
from memoire.errors import EmptyMemory
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters

SCHEMA = Schema({"obs": (np.float32, (1,)), "reward": np.float32})
ERRORS = np.array([0.1, 4.0, 1.0, 0.5, 2.0, 8.0, 0.25, 3.0])


def buffer_of(errors, sampler, *, ends=False, **options):
    """Entry i has the error errors[i]; without `ends` there is one more entry, whose window is not complete."""
    buffer = Buffer(SCHEMA, 64, sampler=sampler, seed=5, priority_epsilon=0.0, **options)
    writer = buffer.writer(num_envs=1, autoreset="disabled")
    for step in range(len(errors)):
        obs, last = np.full((1, 1), step, np.float32), np.array([ends and step + 1 == len(errors)])
        writer.step(obs, None, np.ones(1), last, np.zeros(1, bool), obs + 1)
    known = np.arange(len(errors) - (not ends))
    assert buffer.update_priorities(known, np.asarray(errors)[known]).applied == len(known)
    return buffer


def shares(buffer, draws=40_000):
    return np.bincount(buffer.sample(draws).obs[:, 0].astype(int), minlength=len(ERRORS))


# ------------------------------------------------------------------------------------- the buffer, as it is called there


def test_the_notebooks_script_runs_as_it_is_written():
    """Names, arguments and keys of the notebook; `np.float` of its Transition is gone from NumPy."""
    assert memoire.PriorityExperienceReplayBuffer is PrioritizedReplayBuffer
    buffer = memoire.PriorityExperienceReplayBuffer(capacity=8, alpha=0.6)
    assert (buffer.capacity, buffer.alpha, buffer.max_priority, buffer.next_idx, buffer.size) == (8, 0.6, 1.0, 0, 0)
    for step in range(11):
        transition = Transition()
        transition.current_state, transition.action, transition.reward = np.full((1, 10), step), step, 1.0
        transition.next_state, transition.done = transition.current_state + 1, 0
        assert buffer.is_full() == (step >= 8)
        buffer.add(transition)
    assert (buffer.next_idx, buffer.size, len(buffer.data)) == (3, 8, 8) and buffer.is_full()
    for _ in range(20):
        samples = buffer.sample(batch_size=4, beta=0.4)
        assert samples["weights"].shape == samples["indexes"].shape == (4,) and len(samples["transitions"]) == 4
        actions = [each.action for each in samples["transitions"]]
        assert [index + 8 * (index < 3) for index in samples["indexes"]] == actions
        buffer.update_priorities(samples["indexes"], [random.random() * 10 for _ in range(4)])
    assert buffer._sum() == buffer.priority_sum() and buffer._min() == buffer.priority_min()
    assert 0 <= buffer.find_prefix_sum_idx(random.random() * buffer.priority_sum()) < 8


def test_a_priority_of_zero_is_not_the_least_and_makes_no_weight_infinite():
    """The notebook's minimum is 0 then, and what it divides by is 0 ** -beta."""
    buffer = PrioritizedReplayBuffer(4, 1.0, seed=1)
    buffer.extend("abcd")
    buffer.update_priorities([0, 1, 2, 3], [0.0, 2.0, 4.0, 8.0])
    assert (buffer.priority_sum(), buffer.priority_min()) == (14.0, 2.0)
    samples = buffer.sample(400, 0.5)
    assert set(samples["transitions"]) == {"b", "c", "d"}
    np.testing.assert_allclose(samples["weights"], np.array([0.0, 1.0, 0.5**0.5, 0.5])[samples["indexes"]])
    buffer.update_priorities([0, 1], [1.0, 0.0])  # the least goes, and another one comes
    assert (buffer.priority_sum(), buffer.priority_min()) == (13.0, 1.0)
    buffer.update_priorities([0, 1, 2, 3], np.zeros(4))
    assert (buffer.priority_sum(), buffer.priority_min()) == (0.0, float("inf"))
    with pytest.raises(EmptyMemory):
        buffer.sample(1, 0.5)
    alike = PrioritizedReplayBuffer(2, 0.0)  # 0 ** 0 is 1: without prioritization nothing is out of reach
    alike.extend("ab")
    alike.update_priorities([0], [0.0])
    assert (alike.priority_sum(), alike.priority_min()) == (2.0, 1.0)


def slot_at(leaves, prefix):
    """The largest slot with a priority such that the slots before it sum to at most `prefix`."""
    before = np.cumsum(leaves) - leaves
    return int(np.flatnonzero((leaves > 0.0) & (before <= prefix))[-1])


@pytest.mark.parametrize("capacity", [1, 7, 64, 100])
def test_sums_and_minima_are_right_after_a_batch_with_the_same_slots_again_and_again(capacity):
    rng = np.random.default_rng(capacity)
    buffer, leaves = PrioritizedReplayBuffer(capacity, 1.0), np.ones(capacity)
    buffer.extend(range(capacity))
    for _ in range(30):
        slots = rng.integers(0, capacity, 3 * capacity)
        priorities = rng.integers(0, 9, len(slots)).astype(float)
        buffer.update_priorities(slots, priorities)
        for slot, priority in zip(slots, priorities, strict=True):
            leaves[slot] = priority  # the last of a slot counts
        assert buffer.priority_sum() == leaves.sum()
        assert buffer.priority_min() == leaves[leaves > 0.0].min(initial=np.inf)
        ends = np.cumsum(leaves)[:-1]  # where each slot but the first begins
        drawn = [buffer.find_prefix_sum_idx(end) for end in ends] if leaves.any() else []
        assert drawn == [slot_at(leaves, end) for end in ends[: len(drawn)]]


# ------------------------------------------------------------------------------------------------- chances and corrections


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_chances_are_powers_of_the_errors_and_grow_with_them(alpha):
    counts = shares(buffer_of(ERRORS, Prioritized(alpha), ends=True))
    chances = ERRORS**alpha / (ERRORS**alpha).sum()
    assert chisquare(counts, counts.sum() * chances).pvalue > 1e-4
    if alpha >= 1.0:
        assert (np.diff(counts[np.argsort(ERRORS)]) > 0).all()


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(0.0), RankBased(0.0)], ids=["uniform", "alpha 0", "rank 0"])
def test_without_prioritization_all_are_drawn_alike_whatever_their_errors(sampler):
    counts = shares(buffer_of(ERRORS, sampler, ends=True))
    assert chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("beta", [0.25, 1.0])
@pytest.mark.parametrize("normalize", ["batch", "global"])
def test_the_population_of_a_correction_is_what_can_be_drawn_now(beta, normalize):
    """N is not the number of entries: one of error 0, and the newest ones without their windows, are not in it."""
    errors = np.where(np.arange(8) == 2, 0.0, ERRORS)
    buffer = buffer_of(errors, Prioritized(1.0, beta=beta, normalize=normalize), multi_step=2)
    drawable = np.array([1, 1, 0, 1, 1, 1, 0, 0])
    weights = errors * drawable
    batch = buffer.sample(500)
    rows = batch.obs[:, 0].astype(int)
    assert set(rows) == set(np.flatnonzero(drawable))
    truth = (drawable.sum() * weights / weights.sum())[rows] ** -beta
    np.testing.assert_allclose(batch.importance * batch.divisor, truth, rtol=1e-5)
    least = weights[weights > 0].min()
    largest = (drawable.sum() * least / weights.sum()) ** -beta if normalize == "global" else truth.max()
    assert batch.divisor == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("sampler", [Prioritized(0.7, beta=1.0), Prioritized(2.0, beta=1.0), RankBased(0.7, beta=1.0)])
def test_at_beta_one_the_corrected_mean_of_batches_is_the_plain_mean_over_what_has_a_weight(sampler):
    errors = np.where(np.arange(8) == 2, 0.0, ERRORS)
    buffer = buffer_of(errors, sampler, ends=True)
    values = np.array([3.0, -1.0, 100.0, 2.0, 5.0, 7.0, -4.0, 1.0])
    has_weight = errors > 0.0 if sampler.fields()["prioritization"] == "proportional" else np.ones(8, bool)
    means = []
    for _ in range(400):
        batch = buffer.sample(64)
        undivided = batch.importance.astype(float) * batch.divisor
        means.append((undivided * values[batch.obs[:, 0].astype(int)]).mean())
    truth = values[has_weight].mean()
    assert abs(np.mean(means) - truth) < 4.5 * np.std(means) / len(means) ** 0.5
    if sampler.fields()["prioritization"] == "proportional":
        assert abs(np.mean(values[buffer.sample(20_000).obs[:, 0].astype(int)]) - truth) > 0.5  # there was a bias


# ------------------------------------------------------------------------------------------------------------ warnings


def test_an_error_that_stays_large_for_no_reason_can_be_held_down():
    """An entry of noise: its error is large whatever is learned of it."""
    noisy = np.ones(8)
    noisy[3] = 100.0
    plain = shares(buffer_of(noisy, Prioritized(1.0), ends=True))[3] / 40_000
    lower = shares(buffer_of(noisy, Prioritized(0.4), ends=True))[3] / 40_000
    ranked = shares(buffer_of(noisy, RankBased(0.7), ends=True))[3] / 40_000
    assert plain > 0.9 and lower < 0.55 and ranked < 0.35
    buffer = buffer_of(noisy, Prioritized(1.0), ends=True, max_times_sampled=5)
    seen = np.zeros(8, int)
    for _ in range(40):
        rows = buffer.sample(1).obs[:, 0].astype(int)
        seen[rows] += 1
        buffer.update_priorities(rows, noisy[rows])
    assert (seen == 5).all()
    aged = buffer_of(noisy, Prioritized(1.0), ends=True, max_age=1000.0)
    aged.memory.set_clock(time.time() + 2000.0)
    with pytest.raises(EmptyMemory):
        aged.sample(1)


def test_what_is_not_replayed_keeps_the_priority_that_it_had():
    buffer = buffer_of(ERRORS, memoire.Greedy(), ends=True)
    for _ in range(20):
        batch = buffer.sample(2)
        assert set(batch.obs[:, 0]) == {5.0, 1.0}  # the largest two: 8 and 4
        buffer.update_priorities(batch.ids, np.where(batch.obs[:, 0] == 5.0, 8.0, 4.0))
    buffer.update_priorities(buffer.sample(2).ids, np.zeros(2))
    assert set(buffer.sample(2).obs[:, 0]) == {7.0, 4.0}  # the next ones have theirs from before


def test_what_a_change_of_the_order_costs_hardly_grows_with_the_entries():
    """Greedy and by rank: a change moves a block, not all that is behind. In processor time, so that others do not count."""
    costs = []
    for entries in (2_000, 400_000):
        made = Memory(SCHEMA, entries, Parameters(prioritization="greedy", priority_epsilon=0.0), seed=3)
        made.open()
        made.extend(0, (np.zeros((entries, 1), np.float32), np.ones(entries, np.float32)))
        made.close(terminated=True)
        rng = np.random.default_rng(1)
        made.update_priorities(np.arange(entries), rng.random(entries))
        changes = [(rng.integers(0, entries, 256), rng.random(256)) for _ in range(12)]
        spent = []
        for numbers, errors in changes:
            began = time.thread_time()
            made.update_priorities(numbers, errors)
            made.draw(1)
            spent.append(time.thread_time() - began)
        costs.append(min(spent))
    assert costs[1] < 40.0 * costs[0]  # 200 times the entries
