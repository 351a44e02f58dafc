"""The notebook's buffer: its names, its numbers, and every case that it leaves open."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from interrupts import everywhere
from memoire import PrioritizedReplayBuffer, Transition
from memoire.errors import EmptyMemory, ParameterError
from netkit import in_thread


class Slow:
    """The truth in plain Python: priorities in a list, sums by adding up."""

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
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 12), whole)), max_size=40),
    st.floats(0, 60),
)
def test_sums_minima_and_prefixes_are_the_notebooks(capacity, alpha, steps, prefix):
    buffer, slow = PrioritizedReplayBuffer(capacity, alpha), Slow(capacity, alpha)
    assert (buffer.priority_sum(), buffer.priority_min()) == (0.0, math.inf)
    for i, step in enumerate(steps):
        if step is None or step[0] >= buffer.size:
            assert buffer.add(i) == slow.added
            slow.add(i)
        else:
            buffer.update_priorities([step[0]], [step[1]])
            slow.update([step[0]], [step[1]])
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
        with pytest.raises(ParameterError, match="indexes"):
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
    del state["_rng"]  # numbers that an interrupted draw has drawn are not drawn again
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in state.items()}


@pytest.mark.parametrize("opcodes", [False, True], ids=["line", "opcode"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_has_happened_or_has_not_and_others_go_on(name, opcodes):
    def made():
        buffer = PrioritizedReplayBuffer(5, 0.6, seed=1)
        buffer.extend(range(6))
        return buffer

    before, after = made(), made()
    CALLS[name](after)
    for interrupted in everywhere(opcodes):
        buffer = made()
        place = interrupted(lambda buffer=buffer: CALLS[name](buffer))
        thread, box = in_thread(state_of, buffer)
        thread.join(20.0)
        assert box.get("value") in (state_of(before), state_of(after)), f"interrupted at {place}: {box}"
