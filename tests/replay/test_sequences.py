"""Sequences for recurrent networks: never across an episode's end, with masks, burn-in and priorities of their own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire import Buffer, Parameters, Prioritized, Schema, Uniform
from memoire.errors import ParameterError
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from sequencekit import SCHEMA, record


def starts(length, parameters, ending):
    """Positions at which a sequence of an episode begins."""
    m, overlap = parameters.sequence_length, parameters.sequence_overlap
    found = []
    for t in range(0, length, m - overlap):
        is_whole = t + m < length  # and the state behind it is there
        if (ending == "unknown" and not is_whole) or (t > 0 and t + overlap >= length):
            continue
        if parameters.start == "skip" and t < parameters.frame_stack - 1:
            continue
        found.append(t)
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sequences_are_what_the_slow_model_cuts_out(data):
    draw = data.draw
    m = draw(st.integers(1, 6))
    parameters = Parameters(
        sequence_length=m, sequence_overlap=draw(st.integers(0, m - 1)), burn_in=draw(st.integers(0, m - 1)), start=draw(st.sampled_from(["skip", "repeat", "zero"])),
        frame_stack=draw(st.integers(1, 3)), discount=0.5, priority_exponent=0.0, prev=("obs", "hidden", "reward"),
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
    memory.check_invariants()
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
        assert got.reward[i, j] == ((begin + t + j) / 8 if there else 0.0)
        terminal = ending == "terminated" and t + j == length - 1
        assert got.discount[i, j] == (0.5 if there and not terminal else 0.0)
        assert got.mask[i, j] == (there and (t == 0 or j >= parameters.burn_in))


@pytest.mark.parametrize("burn_in", [0, 2])
def test_a_sequences_priority_mixes_the_largest_and_the_mean_of_its_entries(burn_in):
    parameters = Parameters(
        sequence_length=4, sequence_overlap=2, burn_in=burn_in, sequence_max_share=0.75, priority_exponent=1.0,
        discount=0.9, mix_lambda=0.8,
    )  # fmt: skip
    memory = Memory(SCHEMA, 64, parameters, seed=1)
    numbers = record(memory, 11, 3, "terminated")
    plain = Memory(SCHEMA, 64, parameters.replace(sequence_length=0, sequence_overlap=0, burn_in=0), seed=1)
    record(plain, 11, 3, "terminated")
    errors = plain.weights(np.arange(11))
    for t in starts(11, parameters, "terminated"):
        own = errors[t if t == 0 else t + burn_in : t + 4]
        assert memory.weights([numbers[t]])[0] == pytest.approx(0.75 * own.max() + 0.25 * own.mean(), rel=1e-5)


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


def test_open_episodes_give_sequences_as_soon_as_the_state_behind_them_is_there():
    buffer = Buffer(
        Schema({"obs": (np.float32, (1,)), "reward": np.float32}), 50, sampler=Uniform(), sequence_length=3, seed=1
    )
    writer = buffer.writer(num_envs=1, autoreset="disabled")
    for step in range(7):
        assert buffer.memory.num_positive == max(0, step - 1) // 3
        obs = np.full((1, 1), step, np.float32)
        writer.step(obs, None, np.ones(1), np.zeros(1, bool), np.zeros(1, bool), obs + 1)
    assert sorted(set(buffer.sample(50).obs[:, 0, 0])) == [0.0, 3.0]


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


@pytest.mark.parametrize(
    "wrong",
    [{"multi_step": 2}, {"sequence_overlap": 4}, {"burn_in": 4}, {"sequence_length": -1}, {"sequence_max_share": 1.5}],
)
def test_settings_that_no_sequence_can_have_are_refused(wrong):
    with pytest.raises(ParameterError):
        Parameters(**{"sequence_length": 4} | wrong)
