"""What a step is given becomes the values of columns without a writer and without a memory."""

import math
from typing import Any

import numpy as np
import pytest

from memoire.errors import EntryError, FinalObservationMissing, NotFinite, SchemaError
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from memoire.replay.steps import StepConverter, final_observation

SCHEMA = Schema(
    {
        "obs": Column(np.float32, (2,), "state"),
        "action": np.int64,
        "reward": Column(np.float32, (), "reward"),
        "value": Column(np.float32, (), "value"),
        "logp": np.float32,
    }
)
NESTED = Schema({"obs": {"a": Column(np.float32, (2,), "state"), "b": Column(np.uint8, (None,), "state")}})
ONE, THREE = StepConverter(SCHEMA, None), StepConverter(SCHEMA, 3)


def given(**changes: Any) -> dict[str, Any]:
    usual = {"obs": np.zeros((3, 2)), "action": [1, 2, 3], "value": np.zeros((3, 1)), "logp": [0.0] * 3}
    return usual | changes


def test_extras_are_the_columns_that_a_step_has_no_argument_for() -> None:
    assert (ONE.root, ONE.extras, ONE.nested) == ("obs", {"value", "logp"}, ())
    assert StepConverter(NESTED, 2).nested == ("obs",)
    ONE.check_extras({"value": 0.0, "logp": 0.0})
    with pytest.raises(EntryError, match="logp.*and 'logpp' is no column"):
        ONE.check_extras({"value": 0.0, "logpp": 0.0})
    with pytest.raises(EntryError, match="Leave it out, or declare it"):
        ONE.check_extras({"value": 0.0, "logp": 0.0, "more": 1})


def test_a_schema_that_a_step_cannot_fill_is_refused() -> None:
    state = Column(np.float32, (), "state")
    with pytest.raises(SchemaError, match="has the states a, b"):
        StepConverter(Schema({"a": state, "b": state}), None)
    with pytest.raises(SchemaError, match="Writer.step has a parameter of this name"):
        StepConverter(Schema({"obs": state, "info": np.int64}), None)


def test_values_of_several_environments_take_their_columns_form() -> None:
    values = THREE.values(given(), np.ones((3, 1)))
    forms = [(value.dtype, value.shape) for value in values]
    assert forms == [(np.float32, (3, 2)), (np.int64, (3,)), (np.float32, (3,)), (np.float32, (3,)), (np.float32, (3,))]
    exact = np.zeros((3, 2), np.float32)
    assert THREE.values(given(obs=exact), [0.0] * 3)[0] is exact


def test_values_of_one_environment_are_left_to_the_memory() -> None:
    obs, _, reward, *_ = ONE.values({"obs": [1, 2], "action": 3, "value": 0, "logp": 0}, [2])
    assert (obs, reward) == ([1, 2], [2])
    exact = ONE.exact_entry([[1, 2], 3, np.ones(1), np.zeros((1, 1)), 0])
    assert [value.shape for value in exact] == [(2,), (), (), (), ()]


def test_nested_observations_fall_apart_and_ragged_ones_are_compared_by_value() -> None:
    two = StepConverter(NESTED, 2)
    obs = {"a": np.zeros((2, 2)), "b": [[1, 2], [3]]}
    leaves = two.values({"obs": obs}, None)
    assert leaves[0].shape == (2, 2) and leaves[1].lengths.tolist() == [2, 1]
    assert two.differ(obs, obs | {"b": [[1, 2], [3, 4]]}).tolist() == [False, True]
    assert two.first(obs) is obs["a"] and ONE.first(obs) is obs
    assert [part.tolist() for part in two.member_state(obs, 1)] == [[0.0, 0.0], [3]]
    with pytest.raises(EntryError, match="should have 'b'"):
        two.values({"obs": {"a": 1}}, None)


def test_rewards_keep_their_precision_and_take_the_returns_form() -> None:
    assert ONE.rewards(0.1, (1,)) == 0.1
    assert THREE.rewards([[1], [2], [3]], (3,)).tolist() == [1.0, 2.0, 3.0]
    for wrong in ([1, 2], "x", None):
        with pytest.raises(EntryError, match="for each of 3 environments"):
            THREE.rewards(wrong, (3,))


@pytest.mark.parametrize("value", [True, [1, 0, 1], np.array([1.0, 0.0, 1.0]), [[True], [False], [True]]])
def test_flags_are_one_for_each_environment(value: Any) -> None:
    values = ONE if value is True else THREE
    assert values.flags("truncated", value).tolist() == [True] if value is True else [True, False, True]


@pytest.mark.parametrize("value", [[1, 2, 0], [True], ["a", "b", "c"], None, [[1], [2, 3]]])
def test_what_is_no_flag_is_refused(value: Any) -> None:
    with pytest.raises(EntryError, match="True or False for each of 3 environments"):
        THREE.flags("terminated", value)


def test_critics_estimates_are_there_for_a_value_column_alone() -> None:
    assert THREE.bootstrap(None) == [None] * 3 and StepConverter(NESTED, 2).bootstrap(5) == [None] * 2
    assert THREE.bootstrap(np.array([[1], [2], [3]])).tolist() == [1.0, 2.0, 3.0]
    assert ONE.bootstrap(1.5).tolist() == [1.5]


def test_a_state_is_finite_and_picked_out_of_its_batch() -> None:
    obs = np.array([[1, 2], [3, 4], [5, math.nan]])
    assert THREE.member_state(obs, 1)[0].tolist() == [3.0, 4.0]
    assert ONE.member_state(obs[0], 0)[0].tolist() == [1.0, 2.0]
    with pytest.raises(NotFinite):
        THREE.member_state(obs, 2)


def test_two_nan_are_no_difference() -> None:
    one, two = np.full((3, 2), math.nan), np.full((3, 2), math.nan)
    two[1, 0] = 0.0
    assert THREE.differ(one, two).tolist() == [False, True, False]


def test_a_step_of_another_number_of_environments_gets_advice() -> None:
    flags = np.zeros(3, bool)
    assert "num_envs=3" in ONE.advice(np.zeros((3, 2)), 0.0, False, False, np.zeros((3, 2)))
    assert "obs is of one" in THREE.advice(np.zeros(2), flags, flags, flags, np.zeros(2))
    assert "at another argument's place" in THREE.advice(np.zeros((3, 2)), np.zeros((3, 2)), flags, flags, flags)
    assert THREE.advice(np.zeros((3, 2)), flags, flags, flags, np.zeros((3, 2))) == ""
    assert THREE.advice(np.zeros(7), flags, flags, flags, np.zeros(7)) == ""
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
