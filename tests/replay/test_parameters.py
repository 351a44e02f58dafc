"""Parameters: what is accepted, what is refused and how the refusal reads."""

import json
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from memoire.errors import ParameterError, UnknownName
from memoire.replay.parameters import ADDED, NAMES, Parameters, reward_size


class Columns(dict):
    reward: str | None = "reward"

    @property
    def names(self):
        return tuple(self)


def columns(shape=(), reward="reward"):
    made = Columns(state=SimpleNamespace(shape=(4,)), reward=SimpleNamespace(shape=shape))
    made.reward = reward
    return made


def test_the_defaults_are_those_of_the_design():
    made = Parameters()
    assert (made.priority_exponent, made.importance_exponent, made.mix_lambda) == (0.6, 0.4, 1.0)
    assert (made.frame_stack, made.multi_step, made.cache_size, made.max_episode) == (1, 1, 256, 0)
    assert made.reuse_cache is False
    assert made.discount == (0.99,) and made.reward_coeff == (1.0,)
    assert (made.start, made.prev, made.next, made.normalize) == ("skip", None, None, "batch")


@pytest.mark.parametrize("name", ["priority_exponent", "importance_exponent", "mix_lambda", "samples_per_insert"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), True, "1", None, [0.5]])
def test_a_real_parameter_refuses_what_is_no_finite_number_in_range(name, value):
    with pytest.raises(ParameterError, match=name) as caught:
        Parameters(**{name: value})
    assert repr(value) in str(caught.value) and "Nothing was changed" in str(caught.value)


@pytest.mark.parametrize("name", ["importance_exponent", "mix_lambda"])
def test_a_share_above_one_is_refused(name):
    with pytest.raises(ParameterError, match=r"\[0, 1\]"):
        Parameters(**{name: 1.01})


@pytest.mark.parametrize("name", ["frame_stack", "multi_step", "cache_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", 2**40])
def test_a_count_refuses_what_is_no_whole_number_of_at_least_one(name, value):
    with pytest.raises(ParameterError, match=f"{name} must be a whole number from 1"):
        Parameters(**{name: value})


def test_no_limit_of_episodes_is_zero_and_less_is_refused():
    assert Parameters(max_episode=0).max_episode == 0
    with pytest.raises(ParameterError, match="max_episode must be a whole number from 0"):
        Parameters(max_episode=-1)


def test_numpy_numbers_become_plain_ones():
    made = Parameters(frame_stack=np.int64(3), priority_exponent=np.float32(0.5), reuse_cache=np.bool_(True))
    assert type(made.frame_stack) is int and type(made.priority_exponent) is float and made.reuse_cache is True


@pytest.mark.parametrize("value", [0.5, [0.5], (0.5,), np.array(0.5), np.array([0.5])])
def test_a_vector_parameter_takes_a_number_a_sequence_or_an_array(value):
    assert Parameters(discount=value).discount == (0.5,)


@pytest.mark.parametrize("name", ["discount", "reward_coeff"])
@pytest.mark.parametrize("value", [[], -0.1, [0.5, float("nan")], "0.5", [0.5, None]])
def test_a_vector_parameter_refuses_what_is_no_number(name, value):
    with pytest.raises(ParameterError, match=name):
        Parameters(**{name: value})


def test_a_discount_above_one_is_refused():
    with pytest.raises(ParameterError, match="discount"):
        Parameters(discount=1.5)


def test_a_vector_of_another_length_than_the_reward_is_refused():
    Parameters(discount=0.9).check_for(columns((3,)))
    Parameters(discount=(0.9, 0.8, 0.7), reward_coeff=(1, 2, 3)).check_for(columns((3,)))
    with pytest.raises(ParameterError, match="discount must be 1 or 3 numbers, as the reward has 3"):
        Parameters(discount=(0.9, 0.8)).check_for(columns((3,)))
    with pytest.raises(ParameterError, match="reward_coeff must be 1 number"):
        Parameters(reward_coeff=(0.9, 0.8)).check_for(columns())


def test_a_column_that_the_schema_lacks_is_refused():
    with pytest.raises(ParameterError, match=r"columns of the schema \(state, reward\)"):
        Parameters(next=("action",)).check_for(columns())


@pytest.mark.parametrize("value", ["state", 3, ["a", "a"], [1]])
def test_columns_are_a_sequence_of_different_names(value):
    with pytest.raises(ParameterError, match="prev"):
        Parameters(prev=value)


@pytest.mark.parametrize("name", ["start", "normalize", "compression"])
def test_a_choice_refuses_other_words(name):
    with pytest.raises(ParameterError, match=f"{name} must be one of"):
        Parameters(**{name: "other"})


def test_replace_checks_and_refuses_unknown_names():
    assert Parameters().replace(multi_step=3).multi_step == 3
    with pytest.raises(ParameterError, match="multi_step"):
        Parameters().replace(multi_step=0)
    with pytest.raises(ParameterError, match="Parameters takes no .gamma.. Did you mean .discount"):
        Parameters().replace(gamma=0.9)


def test_the_wire_form_survives_json():
    made = Parameters(discount=(0.9, 0.8), prev=("state",), start="zero", reuse_cache=True)
    assert Parameters.from_wire(json.loads(json.dumps(made.to_wire()))) == made


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_setting_under_another_name_is_refused_by_name_and_does_not_fall_back_to_its_default(name):
    fields = Parameters().to_wire()
    fields[f"{name}_x"] = value = fields.pop(name)
    with pytest.raises(UnknownName, match=f"takes no '{name}_x'.*saved or sent it, as .*'{name}'") as found:
        Parameters.from_wire(fields)
    assert repr(value) in str(found.value)
    del fields[f"{name}_x"]
    with pytest.raises(ParameterError, match=f"{name} must be among the settings"):
        Parameters.from_wire(fields)


@dataclass(frozen=True)
class Newer(Parameters):
    """Parameters of a later version, which has one more."""

    horizon: int = field(default=0, metadata=ADDED)


def test_versions_work_together_until_a_setting_is_used_that_one_of_them_does_not_know():
    assert Parameters.from_wire(Newer(multi_step=3).to_wire()) == Parameters(multi_step=3)
    assert Newer.from_wire(Parameters(multi_step=3).to_wire()) == Newer(multi_step=3)
    with pytest.raises(UnknownName, match="horizon.*as 5"):
        Parameters.from_wire(Newer(horizon=5).to_wire())
    assert Newer.from_wire(Newer(horizon=5).to_wire()) == Newer(horizon=5)


def test_the_error_survives_pickling():
    with pytest.raises(ParameterError) as caught:
        Parameters(multi_step=0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_reward_size_is_one_where_there_is_no_reward():
    assert reward_size(columns((2, 3))) == 6
    assert reward_size(columns((2, 3), reward=None)) == 1
