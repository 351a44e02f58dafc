"""Rules of a memory one by one, and any order of calls compared with a model."""

import math
import random
import sys
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memoire import Buffer, Prioritized, _core
from memoire.errors import EntryError, EpisodeClosedError, EpisodeTooLong, NotFinite, ParameterError, StaleEntry
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memory_checks import check_memory, filled
from memory_walk import Walk
from netkit import in_thread
from sequencekit import SCHEMA, record

SEVEN = Schema(
    {
        "state": (np.float32, (3,)),
        "action": np.int64,
        "reward": np.float32,
        "prob": np.float64,
        "value": np.float32,
        "info": (np.uint8, (2,)),
    }
)


def entry(t=0.0, reward=1.0, value=0.0):
    return np.full(3, t, np.float32), int(t), reward, 0.5, value, np.zeros(2, np.uint8)


def memory_of(capacity=100, length=20, episodes=1, parameters=None, **kwargs):
    memory = Memory(SEVEN, capacity, parameters, seed=0, **kwargs)
    return filled(memory, entry, episodes=episodes, length=length)


def test_without_update_weight_weights_are_init_w_and_without_update_value_returns_are_zero():
    memory = Memory(SEVEN, 20, Parameters(priority_exponent=1.0))
    memory.open()
    for t in range(4):
        memory.add(0, entry(t, value=3.0), init_w=0.5 + t)
    memory.close(update_weight=False, update_value=False, multiplier=2.0, terminated=True)
    np.testing.assert_allclose(memory.weights(np.arange(4)), [1.0, 3.0, 5.0, 7.0])
    memory.configure(priority_exponent=0.3, reward_coeff=7.0)
    np.testing.assert_allclose(memory.weights(np.arange(4)), [1.0, 3.0, 5.0, 7.0])
    np.testing.assert_array_equal(memory.gather(np.arange(4)).prev["qvest"], 0.0)
    memory.open()
    memory.add(0, entry(0, value=3.0))
    memory.close(update_value=False, terminated=True)  # qvest is 0: the priority is |0 - 3|
    assert memory.weights([4])[0] == pytest.approx(7.0**0.3 * 3.0**0.3)


@pytest.mark.parametrize(
    ("column", "value", "received"),
    [
        (0, np.zeros(4, np.float32), r"float32\[4\]"),
        (0, np.zeros((1, 3), np.float32), r"float32\[1, 3\]"),
        (0, np.zeros(3, np.complex64), "complex64"),
        (0, ["a", "b", "c"], "<U1"),
        (0, [[1], [2, 3]], "not an array"),
        (0, np.full(3, 1e300), r"float64\[3\] with 1e\+300 at \[0\]"),
        (1, 0.5, "0.5"),
        (1, 2**63, "9223372036854775808"),
        (1, None, "None"),
        (2, np.zeros(1, np.float32), r"float32\[1\]"),
        (2, math.nan, "nan"),
        (2, np.float32(np.inf), "inf"),
        (2, 1e300, r"1e\+300"),
        (4, np.array(np.nan, np.float32), "nan"),
        (5, [1, 256], r"with 256 at \[1\]"),
        (5, [1, -1], r"with -1 at \[1\]"),
        (5, np.zeros(2, np.float32), "float32"),
    ],
)
def test_a_value_that_does_not_fit_is_named_and_nothing_is_added(column, value, received):
    memory = Memory(SEVEN, 20)
    memory.open()
    values = [*entry()]
    values[column] = value
    name = SEVEN.entry_names[column]
    with pytest.raises(EntryError, match=f"column '{name}' stores .*, but got .*{received}"):
        memory.add(0, tuple(values))
    assert memory.generated == memory.num_entries == 0


def test_the_number_of_values_must_be_right():
    memory = Memory(SEVEN, 20)
    memory.open()
    with pytest.raises(
        EntryError, match=r"a tuple of 6 values \(state, action, reward, prob, value, info\), but got 5"
    ):
        memory.add(0, entry()[:5])
    with pytest.raises(EntryError, match="a dict"):
        memory.add(0, {})
    with pytest.raises(ParameterError, match="values"):
        memory.extend(0, ())
    with pytest.raises(EntryError, match="column 'state'"):
        memory.extend(0, entry())
    with pytest.raises(EntryError, match="column 'action'"):
        memory.extend(0, (np.zeros((2, 3)), 1, 2, 3, 4, 5))


def test_a_subclass_that_forgets_to_set_up_is_told_so():
    class Forgetful(Memory):
        def __init__(self):
            pass

    for use in (lambda m: m.open(), lambda m: m.add(0, ()), lambda m: m.total_weight, lambda m: m._draw(1, None)):
        with pytest.raises(RuntimeError, match="never set up"):
            use(Forgetful())


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])
def test_every_dtype_and_size_comes_back_as_it_was(dtype):
    shapes = [(), (1,), (2,), (3,), (5,), (7,), (9,), (15,), (17,), (33,), (100,), (300,), (2, 3, 4), (0, 3)]
    schema = Schema({"state": (dtype, (3,)), **{f"c{i}": (dtype, shape) for i, shape in enumerate(shapes)}})
    memory = Memory(schema, 17)
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, 2, (40, *schema[n].shape)).astype(dtype) for n in schema.names]
    memory.open()
    for t in range(20):
        if t == 10:
            memory.close(terminated=True)
            memory.open()
        memory.add(0, tuple(column[t] for column in columns))  # numpy scalars for the shape ()
    memory.close(terminated=True)
    got = memory.gather(np.arange(10, 20))
    for name, column in zip(schema.names, columns, strict=True):
        assert got.prev[name].dtype == np.dtype(dtype)
        stored = got.prev[name][:, 0] if name == "state" else got.prev[name]
        np.testing.assert_array_equal(stored, column[10:20])


def test_what_was_overwritten_is_stale():
    memory = memory_of(capacity=10, length=5, episodes=3)
    with pytest.raises(StaleEntry, match=r"entry 4 \(position 1 of the request\) is not in this memory"):
        memory.gather([10, 4])
    for wrong in ([-1], [15], [10**15]):
        with pytest.raises(StaleEntry):
            memory.weights(wrong)
    with pytest.raises(ParameterError, match="numbers"):
        memory.gather([0.5])
    assert memory.gather([]).steps.shape == (0,)


def test_a_memory_of_one_entry_holds_the_newest():
    memory = filled(Memory(SEVEN, 1), entry, episodes=3, length=1, terminated=True)
    memory.update_priorities([2], [7.0])
    assert memory.sample(4).gathered.ids.tolist() == [2] * 4 and memory.num_positive == 1


def test_entries_count_as_replaced_for_longer_than_the_time_that_has_passed():
    memory = Memory(SEVEN, 10)
    memory.set_clock(108.0)
    filled(memory, entry, episodes=3, length=5)
    memory.set_clock(112.0)
    counts = [memory.count_replaced([-1, 3, 4, 13], seconds) for seconds in (3.0, 4.0, 5.0)]
    assert counts == [3, 1, 1], "more than so many seconds ago; an entry of another memory counts always"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_td_error_that_is_not_finite_is_named_and_nothing_applied(bad):
    memory = memory_of()
    before = memory.weights([0, 1, 2])
    with pytest.raises(ParameterError, match=r"td_errors\[1\] must be finite"):
        memory.update_priorities([0, 1, 2], [5.0, bad, bad])
    with pytest.raises(ParameterError, match="as many as the ids"):
        memory.update_priorities([0, 1, 2], [5.0])
    np.testing.assert_array_equal(memory.weights([0, 1, 2]), before)


def test_extreme_numbers_keep_the_sums_finite():
    memory = Memory(SEVEN, 20, Parameters(priority_exponent=50.0))
    memory.open()
    for t in range(6):
        memory.add(0, entry(t, reward=3e38, value=-3e38), init_w=1e38)
    memory.close(terminated=True)
    memory.update_priorities([0, 1], [1e308, 1e-300])
    total, positive, least = memory.sums()
    assert math.isfinite(total) and positive == 6 and least > 0
    assert np.isfinite(memory.gather(np.arange(6)).reward).all()
    assert np.isfinite(memory.gather(np.arange(6)).prev["qvest"]).all()


def test_a_parameter_that_does_not_fit_changes_nothing():
    memory = memory_of()
    before = memory.parameters
    for wrong in ({"multi_step": 0}, {"discount": (0.9, 0.9)}, {"prev": ("nothing",)}, {"gamma": 0.9}):
        with pytest.raises(ParameterError):
            memory.configure(priority_exponent=0.1, **wrong)
    assert memory.parameters is before
    for capacity in (0, -1, 1.5, True, 2**31):
        with pytest.raises(ParameterError, match="capacity"):
            Memory(SEVEN, capacity)
    with pytest.raises(ParameterError, match="page_rows"):
        Memory(SEVEN, 10, page_rows=3)
    for lane in (-1, True, 2**30, "0"):
        with pytest.raises(ParameterError, match="lane"):
            memory.open(lane)
    for count in (0, -1, 2.0, True):
        with pytest.raises(ParameterError, match="count"):
            memory.draw(count)


def test_fractions_say_where_to_draw():
    memory = memory_of(length=5, parameters=Parameters(priority_exponent=0.0))
    np.testing.assert_array_equal(memory.draw(4, [0.0, 0.25, 0.5, 0.999]), [0, 1, 2, 3])
    for wrong in ([0.5], [0, 0, 0, 1.0], [0, 0, 0, -0.1], [0, 0, 0, math.nan]):
        with pytest.raises(ParameterError, match="fractions"):
            memory.draw(4, wrong)


@pytest.mark.parametrize(
    ("end", "error", "words"),
    [
        ({"final_state": np.zeros(4)}, EntryError, r"column 'state' stores float32\[3\], but got float64\[4\]"),
        ({"final_state": {"position": 1}}, EntryError, "final_state lacks .state.: it needs a state of each of state"),
        ({"final_state": (np.zeros(3), np.zeros(3))}, EntryError, "final_state has 2 values; it needs 1 .state."),
        ({"final_state": np.full(3, np.nan)}, NotFinite, "column 'state' stores finite float32"),
        *(({"multiplier": wrong}, ParameterError, "multiplier must be") for wrong in (-1.0, math.nan, math.inf, True)),
        ({"terminated": 1}, ParameterError, "terminated must be True, False or None"),
        *(
            ({"bootstrap_value": x}, ParameterError, "bootstrap_value must be")
            for x in (math.nan, [1.0, 2.0], "1", 1e300)
        ),
        ({"bootstrap_value": 1.0, "terminated": True}, ParameterError, "0 or None if the episode terminated"),
    ],
)
def test_an_end_that_does_not_fit_is_refused_and_the_episode_stays_open(end, error, words):
    memory = Memory(SEVEN, 20)
    memory.open()
    memory.add(0, entry())
    with pytest.raises(error, match=words):
        memory.close(**end)
    assert memory.open_length() == 1 and memory.num_episodes == 0
    check_memory(memory)


def test_adding_to_many_lanes_is_all_or_none():
    memory = Memory(SEVEN, 8, page_rows=1)
    for lane in range(4):
        memory.open(lane)
    columns = [np.zeros((4, *SEVEN[n].shape), SEVEN[n].dtype) for n in SEVEN.entry_names]
    for _ in range(2):
        memory.add_many(np.arange(4), columns)
    with pytest.raises(EpisodeTooLong, match="episode 0 has 2 entries"):
        memory.add_many(np.arange(4), columns)
    assert (memory.num_entries, memory.generated) == (8, 8)
    memory.close(1)
    with pytest.raises(EpisodeClosedError, match="episode 1 is not open"):
        memory.add_many(np.arange(4), columns)
    with pytest.raises(ParameterError, match="lanes must be each at most once in a call, got 0"):
        memory.add_many([0, 0, 2, 3], columns)
    with pytest.raises(EntryError, match=r"column 'state' stores float32\[3, 3\]"):
        memory.add_many([0, 2, 3], columns)
    assert memory.generated == 8
    memory = Memory(SEVEN, 8)
    columns[4][2] = np.nan
    for lane in range(4):
        memory.open(lane)
    for add in (lambda: memory.add_many(np.arange(4), columns), lambda: memory.extend(0, columns)):
        with pytest.raises(EntryError, match="column 'value' stores finite float32, but got nan"):
            add()
    assert memory.generated == 0


def test_windows_and_copies_say_the_same_as_gather():
    memory = memory_of(
        capacity=60, length=14, episodes=5, parameters=Parameters(frame_stack=3, multi_step=4, start="zero")
    )
    memory.set_clock(time.time() + 100.0)
    memory.open()
    values = [np.full((9, *SEVEN[n].shape), 3, SEVEN[n].dtype) for n in SEVEN.entry_names]
    memory.extend(0, values, model_version=2**40)
    memory.close(final_state=np.full(3, 77, np.float32), bootstrap_value=4.0)
    memory.configure(next=SEVEN.names)
    windows = memory.draw_windows(64)
    got = memory.gather(windows.numbers)
    assert memory.gather([memory.generated - 1]).next["value"].item() == 4.0, "the final state's value"
    sums = (windows.total_weight, windows.num_positive, windows.min_weight)
    assert sums == memory.sums()
    np.testing.assert_allclose(windows.weights, memory.weights(windows.numbers))
    reward, discount, steps = (np.empty(64, dtype) for dtype in (np.float32, np.float32, np.int32))
    memory.returns(windows.rows, reward, discount, steps)
    ages, versions = np.empty(64, np.float32), np.empty(64, np.int64)
    memory.fill_ages(windows.rows, ages)
    memory.model_versions(windows.rows, versions)
    same = (
        (reward, got.reward),
        (discount, got.discount),
        (steps, got.steps),
        (ages, got.age),
        (versions, got.model_version),
    )
    for mine, theirs in same:
        np.testing.assert_array_equal(mine, theirs)
    assert set(versions.tolist()) == {0, 2**40}
    for ordered in (False, True):
        sources, prev, next_ = memory.unique_frames(windows.prev_codes, windows.next_codes, ordered)
        assert len(set(sources.tolist())) == len(sources) and (not ordered or (np.diff(sources) > 0).all())
        frames = np.empty((len(sources), 3), np.float32)
        memory.copy_frames("state", sources, frames)
        padded = np.concatenate([frames, np.zeros((1, 3), np.float32)])
        for index, side in ((prev, got.prev), (next_, got.next)):
            place = np.where(index == 0xFFFFFFFF, len(sources), index.astype(np.int64))
            np.testing.assert_array_equal(padded[place], side["state"])
    for name in ("action", "value", "info", "qvest"):
        for rows, side in ((windows.rows, got.prev), (windows.next_rows, got.next)):
            out = np.empty((64, *SEVEN[name].shape), SEVEN[name].dtype)
            memory.copy_rows(name, rows, out)
            np.testing.assert_array_equal(out, side[name])


def test_a_row_or_code_that_cannot_be_is_refused():
    memory = memory_of(capacity=30, length=10)
    out = np.empty((1, 3), np.float32)
    for code in (30, -3, 2**40, -(2**40)):
        with pytest.raises(IndexError, match=f"frame code {code} at position 0 of column 'state'"):
            memory.copy_frames("state", np.array([code]), out)
    with pytest.raises(ValueError, match="12 bytes for 1 rows"):
        memory.copy_frames("state", np.array([1]), np.empty((2, 3), np.float32))
    with pytest.raises(IndexError, match="row 11 at position 1 holds no entry"):
        memory.returns(np.array([1, 11]), *(np.empty(2, t) for t in (np.float32, np.float32, np.int32)))
    with pytest.raises(ParameterError, match="a contiguous float32 array of 1 numbers"):
        memory.fill_ages(np.array([1]), np.empty(2, np.float32))
    with pytest.raises(IndexError):
        memory.model_versions(np.array([30]), np.empty(1, np.int64))


def test_a_held_moment_keeps_other_threads_out():
    memory = memory_of(length=10)
    memory.open()
    with memory.held():
        thread, box = in_thread(memory.add, 0, entry())
        thread.join(0.2)
        assert not box
        memory.gather(memory.draw(5))  # the thread that holds the memory is not blocked
        memory.add(0, entry())
    thread.join(100.0)
    assert "value" in box and memory.num_entries == 12


def test_python_does_the_same_work_for_one_sample_as_for_a_thousand():
    memory = memory_of(capacity=1000, length=100, episodes=5)

    def calls(count):
        seen = 0

        def trace(frame, event, arg):
            nonlocal seen
            frame.f_trace_opcodes = True
            seen += event == "opcode"
            return trace

        sys.settrace(trace)
        try:
            gathered = memory.sample(count).gathered
            memory.update_priorities(gathered.ids, gathered.reward)
            memory.draw_windows(count)
        finally:
            sys.settrace(None)
        return seen

    calls(2)
    assert calls(2) == calls(1000)


def test_a_sample_has_the_least_weight_only_where_importance_needs_it():
    memory = memory_of(parameters=Parameters(normalize="global"))
    sample = memory.sample(4)
    assert sample[2:] == memory.sums()
    np.testing.assert_array_equal(sample.weights, memory.weights(sample.gathered.ids))
    assert memory.sums()[2] == memory.weights(np.arange(19)).min() > 0
    memory.update_priorities([3], [0.0])
    assert memory.sums()[2] == memory.weights([3])[0] == memory.min_weight
    memory.configure(normalize="batch")
    assert memory.sample(4)[2:] == (*memory.sums()[:2], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("prioritization", ["proportional", "rank", "greedy"])
@pytest.mark.parametrize("multi_step", [1, 3])
@pytest.mark.parametrize("frame_stack", [1, 2])
def test_an_open_episode_that_is_cut_for_now_is_drawn_as_one_that_is_cut_and_goes_on(
    prioritization, multi_step, frame_stack
):
    schema = Schema({"obs": (np.float32, (2,)), "action": np.int64, "reward": np.float32})
    parameters = Parameters(
        prioritization=prioritization, multi_step=multi_step, frame_stack=frame_stack, start="repeat"
    )

    def walked(memory, first, last):
        for t in range(first, last):
            memory.add(0, (np.full(2, t, np.float32), t, float(t)))
            if t % 7 == 6:
                memory.close(final_state=np.full(2, t + 0.5, np.float32), terminated=t % 2 == 0)
                memory.open()
        return memory

    def begun(last):
        memory = Memory(schema, 16, parameters, live=True, seed=0)
        memory.open()
        return walked(memory, 0, last)

    for last in (each for each in range(1, 40) if each % 7):
        for_now, cut, plain = (begun(last) for _ in range(3))
        end = np.full(2, 100.0, np.float32)
        with for_now.cut_for_now({0: end}):
            drawn = for_now.sample(32)
            for_now.update_priorities(drawn.gathered.ids, np.ones(32))
        _core.at_once(cut.closing_changes(0, final_state=end, is_cut=True))
        wanted = cut.sample(32)
        for name in ("ids", "steps", "reward", "discount", "weight"):
            np.testing.assert_array_equal(getattr(drawn.gathered, name), getattr(wanted.gathered, name))
        np.testing.assert_array_equal(drawn.gathered.next["obs"], wanted.gathered.next["obs"])
        assert last - 1 in for_now.contents()["meta"]["number"][drawn.gathered.ids % 16]
        check_memory(for_now)
        plain.update_priorities(drawn.gathered.ids, np.ones(32))
        for more in (0, 9):
            for each in (for_now, plain):
                walked(each, last, last + more)
                check_memory(each)
            np.testing.assert_array_equal(for_now.contents()["weights"], plain.contents()["weights"])
            assert for_now.info() == plain.info()
            inside = for_now.contents(), plain.contents()
            used = [each["final_rows"] - each["free_final_count"] for each in inside]
            assert used[0] == used[1], "no final state is kept"


# --- Sequences for recurrent networks: ends of episodes, masks, burn-in and priorities


def starts(length, parameters, ending):
    """Return the positions at which a sequence of an episode begins."""
    m, overlap = parameters.sequence_length, parameters.sequence_overlap
    positions = []
    for t in range(0, length, m - overlap):
        is_whole = t + m < length  # the state after the sequence is stored as well
        if (ending == "unknown" and not is_whole) or (t > 0 and t + overlap >= length):
            continue
        if parameters.start == "skip" and t < parameters.frame_stack - 1:
            continue
        positions.append(t)
    return positions


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sequences_are_what_the_slow_model_cuts_out(data):
    draw = data.draw
    m = draw(st.integers(1, 6))
    parameters = Parameters(
        sequence_length=m, sequence_overlap=draw(st.integers(0, m - 1)), burn_in=draw(st.integers(0, m - 1)), start=draw(st.sampled_from(["skip", "repeat", "zero"])),
        frame_stack=draw(st.integers(1, 3)), discount=0.5, priority_exponent=0.0, prev=("obs", "hidden", "reward", "words"),
        sequence_first=draw(st.sampled_from([(), ("hidden",)])),
    )  # fmt: skip
    memory = Memory(SCHEMA, 64, parameters, seed=1)
    expected = {}
    begin = 0
    for _ in range(draw(st.integers(1, 4))):
        length, ending = draw(st.integers(1, 15)), draw(st.sampled_from(["terminated", "truncated", "unknown"]))
        numbers = record(memory, length, begin, ending)
        for t in starts(length, parameters, ending):
            expected[numbers[t]] = (begin, t, length, ending)
        begin += length
    check_memory(memory)
    assert memory.num_positive == len(expected)
    if not expected:
        return
    chosen = np.array(sorted(expected))
    got = memory.gather(chosen)
    for i, number in enumerate(chosen):
        begin, t, length, ending = expected[number]
        compare(got, i, parameters, begin, t, length, ending)


def compare(got, i, parameters, begin, t, length, ending):
    m, k = parameters.sequence_length, parameters.frame_stack
    if parameters.sequence_first:
        np.testing.assert_array_equal(got.prev["hidden"][i], [begin + t, -(begin + t)])
    steps = min(m, length - t)
    assert got.steps[i] == steps
    for j in range(m + 1):
        for back in range(k):
            at = t + j - back
            frame = got.prev["obs"][i, j, k - 1 - back, 0]
            if j > steps and at > length:
                assert frame == 0.0
            elif at < 0:
                assert frame == (0.0 if parameters.start == "zero" else begin)
            elif j <= steps:
                assert frame == begin + at
    for j in range(m):
        there = j < steps
        if not parameters.sequence_first:
            hidden = [begin + t + j, -(begin + t + j)] if there else [0, 0]
            np.testing.assert_array_equal(got.prev["hidden"][i, j], hidden)
        number = begin + t + j
        words = np.arange(number, number + there * (number % 4))
        padded = np.pad(words, (0, got.prev["words"].shape[2] - len(words)))
        np.testing.assert_array_equal(got.prev["words"][i, j], padded)
        assert got.prev_lengths["words"][i, j] == len(words)
        assert got.reward[i, j] == (number / 8 if there else 0.0)
        terminal = ending == "terminated" and t + j == length - 1
        assert got.discount[i, j] == (0.5 if there and not terminal else 0.0)
        assert got.mask[i, j] == (there and (t == 0 or j >= parameters.burn_in))


def test_a_batch_of_sequences_has_a_time_axis_a_mask_and_takes_errors_by_entry():
    buffer = Buffer(
        Schema({"obs": Column(np.float32, (3,), "state"), "action": np.int64, "reward": np.float32}), 200,
        sampler=Prioritized(1.0, beta=1.0, normalize="global"), sequence_length=5, sequence_overlap=1, burn_in=2, sequence_max_share=0.5, seed=4,
    )  # fmt: skip
    writer = buffer.writer(num_envs=1, autoreset="disabled")
    for step in range(23):
        obs = np.full((1, 3), step, np.float32)
        done = np.array([step == 22])
        writer.step(obs, np.array([step]), np.ones(1), done, np.zeros(1, bool), obs + 1)
    batch = buffer.sample(64)
    assert batch.obs.shape == (64, 6, 3) and batch.action.shape == (64, 5) and batch.mask.shape == (64, 5)
    assert not [name for name in batch if name.startswith("next_")]
    assert set(batch.action[:, 0]) == {0, 4, 8, 12, 16, 20}
    last = batch.action[:, 0] == 20
    np.testing.assert_array_equal(batch.mask[last][0], [False, False, True, False, False])
    np.testing.assert_array_equal(batch.steps[last], 3)
    errors = np.where(batch.mask, batch.action % 7 + 1.0, np.nan)
    assert batch.update_priorities(errors) == (64, 0, 0, 0)
    for i in range(64):
        own = errors[i][batch.mask[i]]
        expected = 0.5 * own.max() + 0.5 * own.mean() + 1e-6
        assert buffer.memory.weights([batch.ids[i]])[0] == pytest.approx(expected, rel=1e-6)
    again = buffer.sample(64, out=batch)
    assert again.obs is batch.obs and again.mask is batch.mask
    with pytest.raises(ParameterError, match="as the mask has"):
        batch.update_priorities(errors[:, :3])


def test_the_advantage_is_the_generalized_advantage_estimate():
    gamma, lam = 0.9, 0.7
    parameters = Parameters(discount=gamma, mix_lambda=lam, priority_exponent=0.0, sequence_length=8)
    memory = Memory(SCHEMA, 64, parameters, seed=1)
    numbers = record(memory, 8, 5, "terminated")
    from memoire.replay.batch import Batch

    gathered = memory.gather(numbers[:1])
    batch = Batch(SCHEMA, gathered, np.ones(1, np.float32), lambda ids, errors: None)
    reward, value = gathered.reward[0], np.append(gathered.prev["value"][0], 0.0)
    delta = reward + gamma * value[1:] - value[:-1]
    expected = [sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, 8)) for t in range(8)]
    np.testing.assert_allclose(batch.advantage[0], expected, rtol=1e-5, atol=1e-6)


# --- A memory compared with its model after each call, for any schema, size, lanes and order of calls


class MemoryMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def begin(self, data):
        self.data = data
        self.walk = Walk(lambda options: self.data.draw(st.sampled_from(options)))

    @invariant()
    def memory_and_model_agree(self):
        self.walk.check()


def _rule(name: str):
    @rule(data=st.data())
    def step(self, data):
        self.data = data
        getattr(self.walk, name)()

    step.__name__ = name
    return step


for _name in sorted(set(Walk.STEPS)):
    setattr(MemoryMachine, f"do_{_name}", _rule(_name))

TestMemoryMachine = pytest.mark.slow(MemoryMachine.TestCase)
TestMemoryMachine.settings = settings(
    max_examples=8,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_long_walk_ends_where_the_model_does(seed, is_ragged):
    walk = Walk(random.Random(seed).choice, is_ragged=is_ragged)
    for _ in range(60):
        walk.step()
