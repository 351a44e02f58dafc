"""Tests of PrioritizedReplayBuffer against the notebook: its names, numbers, explanations and open cases."""

import math
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import memoire
from interrupts import everywhere
from memoire import Buffer, Prioritized, PrioritizedReplayBuffer, RankBased, Schema, Transition, Uniform
from memoire.errors import EmptyMemory, ParameterError
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memory_checks import with_episode
from netkit import in_thread


class Slow:
    """Slow model in plain Python: a list of priorities, and sums by addition."""

    def __init__(self, capacity, alpha):
        self.capacity, self.alpha, self.max_priority = capacity, alpha, 1.0
        self.leaves, self.data, self.added = [0.0] * capacity, [None] * capacity, 0

    def add(self, transition):
        slot = self.added % self.capacity
        self.data[slot], self.leaves[slot] = transition, self.max_priority**self.alpha
        self.added += 1

    def update(self, slots, priorities):
        for slot, priority in zip(slots, priorities, strict=True):
            self.max_priority = max(self.max_priority, priority)
            self.leaves[slot] = priority**self.alpha

    def find(self, prefix):
        best, total = 0, 0.0
        for slot, leaf in enumerate(self.leaves):
            if leaf > 0.0 and total <= prefix:
                best = slot
            total += leaf
        return best


whole = st.integers(0, 6).map(float)  # whole numbers to the power of 0 or 1 add without rounding: compare exactly


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 13),
    st.sampled_from([0.0, 1.0]),
    st.lists(st.one_of(st.none(), st.lists(st.tuples(st.integers(0, 12), whole), min_size=1, max_size=9)), max_size=40),
    st.floats(0, 60),
)
def test_sums_minima_and_prefixes_are_the_notebooks(capacity, alpha, steps, prefix):
    buffer, slow = PrioritizedReplayBuffer(capacity, alpha), Slow(capacity, alpha)
    assert (buffer.priority_sum(), buffer.priority_min()) == (0.0, math.inf)
    for i, step in enumerate(steps):
        if step is None or max(step)[0] >= buffer.size:
            assert buffer.add(i) == slow.added
            slow.add(i)
        else:  # the last priority of a repeated slot counts
            slots, priorities = zip(*step, strict=True)
            buffer.update_priorities(slots, priorities)
            slow.update(slots, priorities)
        assert buffer.data == slow.data and buffer.max_priority == slow.max_priority
        assert (buffer.next_idx, buffer.size) == (slow.added % capacity, min(slow.added, capacity))
        assert buffer.is_full() == (slow.added >= capacity)
        assert buffer.priority_sum() == sum(slow.leaves)
        assert buffer.priority_min() == min((leaf for leaf in slow.leaves if leaf > 0.0), default=math.inf)
        if buffer.priority_sum():
            assert buffer.find_prefix_sum_idx(prefix) == slow.find(prefix)


@pytest.mark.parametrize("stratified", [False, True])
def test_samples_follow_the_priorities_and_carry_the_notebooks_weights(stratified):
    buffer = PrioritizedReplayBuffer(10, 0.6, seed=1, stratified=stratified)
    buffer.extend(Transition(action=i) for i in range(7))
    priorities = np.array([0.5, 1.0, 2.0, 4.0, 0.1, 3.0, 1.5])
    buffer.update_priorities(np.arange(7), priorities)
    samples = buffer.sample(70_000, beta=0.5)
    chances = priorities**0.6 / (priorities**0.6).sum()
    counts = np.bincount(samples["indexes"], minlength=7)
    if stratified:
        assert np.abs(counts - 70_000 * chances).max() <= 1.0
    else:
        assert chisquare(counts, 70_000 * chances).pvalue > 1e-3
    weights = (chances * 7) ** -0.5 / ((chances.min() * 7) ** -0.5)
    np.testing.assert_allclose(samples["weights"], weights[samples["indexes"]], rtol=1e-6)
    assert samples["weights"].dtype == np.float32 and samples["indexes"].dtype == np.int64
    assert [t.action for t in samples["transitions"][:50]] == list(samples["indexes"][:50])


def test_stratified_samples_exist_also_for_the_largest_random_numbers():
    buffer = PrioritizedReplayBuffer(4, 1.0, stratified=True)
    buffer.extend("abcd")
    largest = SimpleNamespace(random=lambda size: np.full(size, np.nextafter(1.0, 0.0)), shuffle=lambda values: None)
    buffer.__setstate__(buffer.__getstate__() | {"_rng": largest})
    assert buffer.sample(4, 0.5)["transitions"][-1] == "d"


def test_of_duplicates_the_last_counts_and_handles_of_what_was_overwritten_are_dropped():
    buffer = PrioritizedReplayBuffer(3, 1.0, seed=0)
    buffer.extend("abc")
    assert buffer.update_priorities([1, 1], [5.0, 0.25]) == (2, 0)
    assert (buffer.priority_sum(), buffer.max_priority) == (2.25, 5.0)
    samples = buffer.sample(30, 0.4)
    buffer.extend("d")
    assert buffer.data == ["d", "b", "c"] and buffer.priority_sum() == 6.25
    old = samples["indexes"] == 0
    applied, stale = buffer.update_priorities(samples["indexes"], np.where(old, 100.0, 0.5), samples["handles"])
    assert (applied, stale) == ((~old).sum(), old.sum()) and stale > 0
    assert buffer._tree.get([0]) == [5.0]
    assert buffer.max_priority == 5.0, "what is told of a transition that has left is no priority that was ever given"


def test_what_does_not_fit_is_refused_and_changes_nothing():
    buffer = PrioritizedReplayBuffer(4, 0.5)
    for draw in (lambda: buffer.sample(1, 0.5), lambda: buffer.find_prefix_sum_idx(0.0)):
        with pytest.raises(EmptyMemory):
            draw()
    buffer.extend([1, 2])
    for priorities in ([1.0, math.nan], [1.0, -1.0], [1.0, math.inf], [1.0]):
        with pytest.raises(ParameterError, match="priorities"):
            buffer.update_priorities([0, 1], priorities)
    for slots in ([0, 2], [-1, 0], [0.5, 1.0]):
        with pytest.raises(ParameterError, match="^indexes must be"):
            buffer.update_priorities(slots, [3.0, 3.0])
    assert (buffer.priority_sum(), buffer.max_priority) == (2.0, 1.0)
    for size, beta in ((0, 0.5), (True, 0.5), (1, -0.1), (1, 1.1), (1, math.nan)):
        with pytest.raises(ParameterError):
            buffer.sample(size, beta)
    for capacity, alpha in ((0, 1.0), (2.0, 1.0), (True, 1.0), (3, -1.0), (3, math.nan)):
        with pytest.raises(ParameterError):
            PrioritizedReplayBuffer(capacity, alpha)


def test_transitions_have_arrays_of_their_own_and_a_schema():
    first, second = Transition(), Transition()
    first.current_state[0, 0] = 5.0
    assert second.current_state[0, 0] == 0.0
    schema = Transition.schema(np.zeros(3, np.float32))
    assert schema.states == ("current_state",) and schema["current_state"].shape == (3,)


CALLS = {
    "add": lambda buffer: buffer.add("new"),
    "extend": lambda buffer: buffer.extend(range(9)),
    "update_priorities": lambda buffer: buffer.update_priorities([0, 2, 0], [3.0, 2.0, 5.0], [5, 2, 5]),
    "sample": lambda buffer: buffer.sample(4, 0.5),
}


def state_of(buffer):
    state = buffer.__getstate__()
    del state["_rng"]  # an interrupted draw uses up random numbers
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in state.items()}


@pytest.mark.parametrize("opcodes", [False, True], ids=["line", "opcode"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_has_happened_or_has_not_and_others_go_on(name, opcodes):
    def new_buffer():
        buffer = PrioritizedReplayBuffer(5, 0.6, seed=1)
        buffer.extend(range(6))
        return buffer

    before, after = new_buffer(), new_buffer()
    CALLS[name](after)
    for interrupted in everywhere(opcodes):
        buffer = new_buffer()
        place = interrupted(lambda buffer=buffer: CALLS[name](buffer))
        thread, box = in_thread(state_of, buffer)
        thread.join(20.0)
        assert box.get("value") in (state_of(before), state_of(after)), f"interrupted at {place}: {box}"


# --- The notebook's explanations, shown on the engine: probabilities, corrections, costs and warnings

SCHEMA = Schema({"obs": (np.float32, (1,)), "reward": np.float32})
ERRORS = np.array([0.1, 4.0, 1.0, 0.5, 2.0, 8.0, 0.25, 3.0])


def buffer_of(errors, sampler, *, ends=False, **options):
    """Return a buffer whose entry i has the error errors[i]; without `ends` the last entry has no complete window."""
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


def test_the_notebooks_script_runs_as_it_is_written():
    """The notebook's script runs with its names, arguments and keys, but for `np.float`, which NumPy removed."""
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
    """In the notebook a priority of 0 becomes the minimum, and weights are divided by 0 ** -beta."""
    buffer = PrioritizedReplayBuffer(4, 1.0, seed=1)
    buffer.extend("abcd")
    buffer.update_priorities([0, 1, 2, 3], [0.0, 2.0, 4.0, 8.0])
    assert (buffer.priority_sum(), buffer.priority_min()) == (14.0, 2.0)
    samples = buffer.sample(400, 0.5)
    assert set(samples["transitions"]) == {"b", "c", "d"}
    np.testing.assert_allclose(samples["weights"], np.array([0.0, 1.0, 0.5**0.5, 0.5])[samples["indexes"]])
    buffer.update_priorities([0, 1], [1.0, 0.0])  # another slot becomes the least
    assert (buffer.priority_sum(), buffer.priority_min()) == (13.0, 1.0)
    buffer.update_priorities([0, 1, 2, 3], np.zeros(4))
    assert (buffer.priority_sum(), buffer.priority_min()) == (0.0, float("inf"))
    with pytest.raises(EmptyMemory):
        buffer.sample(1, 0.5)
    alike = PrioritizedReplayBuffer(2, 0.0)  # 0 ** 0 is 1: without prioritization each slot can be drawn
    alike.extend("ab")
    alike.update_priorities([0], [0.0])
    assert (alike.priority_sum(), alike.priority_min()) == (2.0, 1.0)


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
    """The population N leaves out an entry of error 0 and the newest entries, whose windows are incomplete."""
    errors = np.where(np.arange(8) == 2, 0.0, ERRORS)
    buffer = buffer_of(errors, Prioritized(0.5, beta=beta, normalize=normalize), multi_step=2)
    drawable = np.array([1, 1, 0, 1, 1, 1, 0, 0])
    weights = (errors * drawable) ** 0.5
    batch = buffer.sample(500)
    rows = batch.obs[:, 0].astype(int)
    assert set(rows) == set(np.flatnonzero(drawable))
    truth = (drawable.sum() * weights / weights.sum())[rows] ** -beta
    np.testing.assert_allclose(batch.importance * batch.divisor, truth, rtol=1e-5)
    least = weights[weights > 0].min()
    largest = (drawable.sum() * least / weights.sum()) ** -beta if normalize == "global" else truth.max()
    assert batch.divisor == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize(
    "sampler",
    [
        Prioritized(0.7, beta=1.0),
        Prioritized(2.0, beta=1.0, stratified=True),
        RankBased(0.7, beta=1.0),
        RankBased(1.2, beta=1.0, stratified=False),
    ],
)
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
        assert abs(np.mean(values[buffer.sample(20_000).obs[:, 0].astype(int)]) - truth) > 0.5  # biased draws


def test_an_error_that_stays_large_for_no_reason_can_be_held_down():
    """One entry is noise: its error stays large, whatever the learner does."""
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
        assert set(batch.obs[:, 0]) == {5.0, 1.0}  # priorities 8 and 4 are the largest two
        buffer.update_priorities(batch.ids, np.where(batch.obs[:, 0] == 5.0, 8.0, 4.0))
    buffer.update_priorities(buffer.sample(2).ids, np.zeros(2))
    assert set(buffer.sample(2).obs[:, 0]) == {7.0, 4.0}  # the next entries kept their priorities


def test_what_a_change_of_the_order_costs_hardly_grows_with_the_entries():
    """A changed priority moves one block of the order, not all entries behind; processor time leaves out other load."""
    costs = []
    for entries in (2_000, 400_000):
        memory = Memory(SCHEMA, entries, Parameters(prioritization="greedy", priority_epsilon=0.0), seed=3)
        with_episode(memory, (np.zeros((entries, 1), np.float32), np.ones(entries, np.float32)), terminated=True)
        rng = np.random.default_rng(1)
        memory.update_priorities(np.arange(entries), rng.random(entries))
        changes = [(rng.integers(0, entries, 256), rng.random(256)) for _ in range(12)]
        spent = []
        for numbers, errors in changes:
            began = time.thread_time()
            memory.update_priorities(numbers, errors)
            memory.draw(1)
            spent.append(time.thread_time() - began)
        costs.append(min(spent))
    assert costs[1] < 40.0 * costs[0]  # 200 times the entries
