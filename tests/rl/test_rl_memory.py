"""Memory of samples in rings, compared with a slow list: no transition crosses an end, and the oldest samples leave."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.errors import EntryError, NotEnoughSamples, ParameterError
from memoire.rl.codec import ActionHistory, Codec
from memoire.rl.memory import GenericMemory


def sample(number, done=False, truncated=None, info=None):
    parts = (np.float32([number]), (np.float32([number]), {"n": np.int64(number)}), float(number), done)
    return (*parts, *(() if truncated is None else (truncated,)), info or {})


class Slow:
    """Slow model: all samples in a list, and transitions by a look at each pair."""

    def __init__(self, capacity, history, start):
        self.capacity, self.history, self.start = capacity, history, start
        self.rows, self.is_open = [], False  # (sample, number in the episode, True if a reset began the episode)

    def append(self, samples, starts, continues):
        for place, each in enumerate(samples):
            is_reset = starts[place] if starts is not None else place > 0 and self.is_over(samples[place - 1])
            if place == 0 and starts is None:
                is_reset = not (continues and self.rows and not self.is_over(self.rows[-1][0]))
            is_new = is_reset or (place == 0 and not (continues and self.rows))
            known = self.rows[-1] if self.rows and not is_new else None
            self.rows.append((each, 0 if known is None else known[1] + 1, is_reset if known is None else known[2]))

    @staticmethod
    def is_over(sample):
        return bool(sample[3]) or "__no_done" in sample[-1]

    def transitions(self):
        transitions, oldest = [], max(0, len(self.rows) - self.capacity)
        reach = max(1, self.history)
        for place, (each, step, began_by_reset) in enumerate(self.rows):
            need = 1 if began_by_reset and self.start == "repeat" else reach
            if step >= need and (place - reach >= oldest or not oldest):
                places = [max(place - back, place - step) for back in range(self.history, -1, -1)]
                window = [float(self.rows[each][0][0][0]) for each in places]
                transitions.append(
                    (float(self.rows[place - 1][0][1][0][0]), float(each[1][0][0]), window[:-1], window[1:])
                )
        return transitions


pieces = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from(["open", "done", "given_up", "inside"]), st.booleans(), st.booleans()),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=200)
@given(pieces, st.integers(2, 25), st.integers(0, 3), st.sampled_from(["repeat", "skip"]))
def test_a_memory_agrees_with_a_slow_list(pieces, capacity, history, start):
    codec = Codec(history=ActionHistory(history, start)) if history else None
    memory, slow, number = GenericMemory(capacity, codec=codec), Slow(capacity, history, start), 0
    for size, kind, continues, says_starts in pieces:
        samples = []
        for place in range(size):
            is_end = (kind == "done" and place == size - 1) or (kind == "inside" and place == size // 2)
            info = {"__no_done": True} if kind == "given_up" and place == size - 1 else {}
            samples.append(sample(number, is_end, info=info))
            number += 1
        starts = [not continues, *(Slow.is_over(each) for each in samples[:-1])] if says_starts else None
        marked = [
            (*each[:4], codec.marked(each[4])) if codec and is_reset else each
            for each, is_reset in zip(samples, starts or [False] * size, strict=True)
        ]
        memory.append(marked, starts, continues=continues)
        slow.append(samples, starts, continues)
        expected = slow.transitions()
        assert len(memory) == len(expected) >= 0
        assert memory.held == min(number, capacity) and memory.appended == number
    if expected:
        transitions = memory.transitions(np.arange(len(expected)))
        last, new = transitions.last_obs, transitions.new_obs
        assert last[0][:, 0].tolist() == [each[0] for each in expected] == last[1]["n"].tolist()
        assert new[0][:, 0].tolist() == [each[1] for each in expected] == transitions.rew.tolist()
        assert [[float(part[row, 0]) for part in last[2:]] for row in range(len(expected))] == [e[2] for e in expected]
        assert [[float(part[row, 0]) for part in new[2:]] for row in range(len(expected))] == [e[3] for e in expected]


def test_a_batch_has_the_nesting_dtypes_and_shapes_of_samples():
    memory = GenericMemory(100, seed=0)
    memory.append([sample(number, number % 5 == 4) for number in range(50)])
    batch = memory.sample(32)
    assert (batch.last_obs[0].shape, batch.last_obs[1]["n"].dtype, batch.act.shape) == ((32, 1), np.int64, (32, 1))
    assert (batch.new_obs[0] - batch.last_obs[0] == 1).all()
    assert (batch.rew.dtype, batch.terminated.dtype, batch.truncated.any()) == (np.float32, np.bool_, False)
    assert (batch.terminated == (batch.rew % 5 == 4)).all()
    assert len(memory) == 40


def test_six_parts_say_how_an_episode_ended():
    memory = GenericMemory(100, keeps_info=True)
    ends = [(False, False), (False, True), (False, False), (True, False, {"x": 1})]
    memory.append([sample(number, *end) for number, end in enumerate(ends)])
    assert len(memory) == 2
    assert memory.transition(0)[4:] == (False, True, {})
    assert memory.transition(1)[4:] == (True, False, {"x": 1})


def test_an_episode_that_was_given_up_is_truncated():
    memory = GenericMemory(100)
    memory.append([sample(0), sample(1, info={"__no_done": True})])
    assert memory.transition(0)[4:6] == (False, True)


def test_columns_may_be_files(tmp_path):
    memory = GenericMemory(100, folder=tmp_path / "columns")
    memory.append([sample(number) for number in range(10)])
    assert len(list((tmp_path / "columns").glob("*.npy"))) == 3
    assert memory.transition(8)[3][0] == 9.0


def test_what_comes_out_belongs_to_the_caller():
    memory = GenericMemory(10)
    memory.append([sample(0), sample(1)])
    for part in (memory.transitions([0]).new_obs[0], memory.transition(0)[3][0]):
        part[:] = 99.0
    assert memory.transition(0)[3][0] == 1.0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ((np.float32([1]), (np.float32([1]),), 0.0, False, {}), "nested as those of the first one"),
        ((np.float32([1]), (np.float32([1, 2]), {"n": np.int64(1)}), 0.0, False, {}), r"'obs\[0\]' stores float32\[1\].*float32\[2\]"),
        ((np.float32([1]), (np.float32([1]), {"n": np.float32(1)}), 0.0, False, {}), r"obs\[1\]\['n'\]. stores int64, but got float32"),
        ((1, 2, 3), "3 parts"),
    ],
)  # fmt: skip
def test_a_sample_that_does_not_fit_is_named_and_none_is_taken(wrong, text):
    memory = GenericMemory(10)
    memory.append([sample(0), sample(1)])
    with pytest.raises(EntryError, match=text):
        memory.append([sample(2), wrong])
    assert (memory.held, len(memory)) == (2, 1)


def test_objects_are_refused():
    with pytest.raises(EntryError, match="'act' stores numbers or arrays"):
        GenericMemory(10).append([(object(), np.zeros(1), 0.0, False, {})])


def test_numbers_and_draws_are_checked():
    memory = GenericMemory(10)
    memory.append([])
    with pytest.raises(NotEnoughSamples, match="the memory has no transition yet"):
        memory.sample(4)
    memory.append([sample(0), sample(1)])
    with pytest.raises(ParameterError, match="items must be whole numbers from 0 to 0"):
        memory.transition(1)
    with pytest.raises(ParameterError, match="starts must be one for each of 2 samples"):
        memory.append([sample(0), sample(1)], [True])
    with pytest.raises(ParameterError, match="capacity must be a whole number from 2"):
        GenericMemory(1)
