"""Conversion of entries and steps to exact arrays, and refusals by name, without a memory."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import memoire
from memoire import _core
from memoire.errors import EntryError, FinalObservationMissing, ParameterError, WrongType
from memoire.replay.columns import Column
from memoire.replay.conversion import ID, init_weights, refuse, td_errors_for
from memoire.replay.memory import Memory
from memoire.replay.schema import Schema
from memoire.replay.steps import StepConverter, final_observation
from memory_checks import with_episode

NESTED = Schema({"obs": {"a": Column(np.float32, (2,), "state"), "b": Column(np.uint8, (None,), "state")}})


@pytest.mark.parametrize("weights", [-1.0, math.nan, math.inf, 3.5e38, [1.0], [1.0, -1.0], [math.nan, 0.0]])
def test_weights_are_finite_and_not_negative(weights: Any) -> None:
    with pytest.raises(ParameterError, match="init_w"), np.errstate(over="ignore"):
        init_weights(weights, 2)


def test_an_engine_without_memory_for_ragged_values_says_whose() -> None:
    with pytest.raises(MemoryError, match="not enough memory for the values of obs.b"):
        refuse(Memory(NESTED, 2), NESTED, 0, _core.NO_MEMORY, [], 0)


class NeedsGradient:
    """Stub of a torch tensor that requires grad, and so refuses its conversion to an array."""

    def __init__(self, values):
        self.values, self.ndim = values, values.ndim

    def __len__(self):
        return len(self.values)

    def __array__(self, *_, **__):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")

    def detach(self):
        return self.values


def calls_with_td_errors():
    """Yield each call that takes TD errors, with their shape: of a buffer, a batch, sequences, episodes and a mix."""
    schema = {"obs": np.float32, "action": np.int32, "reward": np.float32}
    plain, long = memoire.Buffer(schema, 100), memoire.Buffer(schema, 100, sequence_length=4)
    for buffer in (plain, long):
        with buffer.writer() as writer:
            for t in range(20):
                writer.step(np.float32(t), 0, 0.0, t == 19, False, np.float32(t + 1))
    batch, sequences, whole = plain.sample(4), long.sample(4), plain.sample_episodes(2)
    yield lambda errors: plain.update_priorities(batch.ids, errors), (4,)
    yield batch.update_priorities, (4,)
    yield sequences.update_priorities, sequences.mask.shape
    yield whole.update_priorities, whole.mask.shape
    yield lambda errors: td_errors_for(np.zeros(4, ID), errors), (4,)


def test_td_errors_are_real_numbers_and_tensors_that_require_grad_are_taken():
    for give, shape in calls_with_td_errors():
        with pytest.raises(ParameterError, match=r"^td_errors must be real numbers, such as abs\(td_errors\)"):
            give(np.ones(shape, complex))
        for wrong in (np.full(shape, "1"), np.full(shape, None)):
            with pytest.raises(WrongType, match="^td_errors must be numbers, got array"):
                give(wrong)
        give(NeedsGradient(np.ones(shape)))


def test_an_episode_is_put_with_exactly_the_columns_of_its_memory():
    memory = memoire.Buffer({"obs": np.float32, "reward": np.float32}, 100).memory
    with_episode(memory, [np.zeros(3, np.float32)] * 2)
    (episode,) = memoire.dataset.episodes(memory)
    unknown = dataclasses.replace(episode, columns={**episode.columns, "extra": np.zeros(3)})
    missing = dataclasses.replace(episode, columns={"obs": np.zeros(3, np.float32)})
    for wrong, text in ((unknown, "'extra'.*the columns are obs, reward"), (missing, "'reward'.*obs, reward")):
        with pytest.raises(EntryError, match=text):
            memoire.dataset.put(memory, wrong)
    assert memory.num_entries == 3


# --- Values of a step, without a writer and without a memory

PLAIN = Schema({"obs": Column(np.float32, (2,), "state"), "action": np.int64, "reward": np.float32})
ONE, THREE = StepConverter(PLAIN, None), StepConverter(PLAIN, 3)


def test_nested_observations_fall_apart_and_ragged_ones_are_compared_by_value() -> None:
    two = StepConverter(NESTED, 2)
    obs = {"a": np.zeros((2, 2)), "b": [[1, 2], [3]]}
    leaves = two.values({"obs": obs}, None)
    assert leaves[0].shape == (2, 2) and leaves[1].lengths.tolist() == [2, 1]
    assert two.differing_rows(obs, obs | {"b": [[1, 2], [3, 4]]}).tolist() == [False, True]
    assert two.first(obs) is obs["a"] and ONE.first(obs) is obs
    assert [part.tolist() for part in two.member_state(obs, 1)] == [[0.0, 0.0], [3]]
    with pytest.raises(EntryError, match="needs 'b'"):
        two.values({"obs": {"a": 1}}, None)


def test_a_step_of_another_number_of_environments_gets_advice() -> None:
    flags = np.zeros(3, bool)
    assert "num_envs=3" in ONE.advice(np.zeros((3, 2)), 0.0, False, False, np.zeros((3, 2)))
    assert "but obs has one" in THREE.advice(np.zeros(2), flags, flags, flags, np.zeros(2))
    assert "an observation is passed as another argument" in THREE.advice(
        np.zeros((3, 2)), np.zeros((3, 2)), flags, flags, flags
    )
    assert THREE.advice(np.zeros((3, 2)), flags, flags, flags, np.zeros((3, 2))) == ""
    assert THREE.advice(np.zeros(7), flags, flags, flags, np.zeros(7)) == ""
    for other in (np.zeros(3), np.zeros((3, 3)), np.zeros((1, 3, 2))):  # not the observations of several environments
        assert ONE.advice(other, 0.0, False, False, other) == ""
    assert ONE.advice(object(), 0, 0, 0, object()) == ""
    assert StepConverter(NESTED, 2).advice({}, 0, 0, 0, {}) == ""


def test_the_final_observation_is_found_in_any_gymnasium_s_info() -> None:
    each = np.array([None, "last"], object)
    assert final_observation({"final_obs": each, "_final_obs": [False, True]}, 1, False) == ("last", None)
    assert final_observation({"final_observation": each}, 1, False) == ("last", None)
    assert final_observation({"final_obs": [4, 5]}, 1, False) == ([4, 5], 1)
    assert final_observation({"final_obs": "last"}, 0, True) == ("last", None)
    for info in (None, {}, {"final_obs": None}, {"final_obs": each, "_final_obs": [True, False]}):
        with pytest.raises(FinalObservationMissing):
            final_observation(info, 1, False)
    with pytest.raises(FinalObservationMissing):
        final_observation({"final_obs": each}, 0, False)
