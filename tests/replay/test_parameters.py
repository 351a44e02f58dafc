"""Parameters: what is accepted, what is refused, how the refusal reads, and what the engine is set up with."""

import json
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from memoire.errors import ParameterError, UnknownName
from memoire.replay.columns import Column
from memoire.replay.conversion import checked_page_rows, cutting_of, limits_of, storage_of
from memoire.replay.parameters import ADDED, NAMES, Parameters, reward_size

# --- Parameters: what is accepted, what is refused and how the refusal reads


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


# --- Parameters and columns become what the engine is set up with


def test_pages_are_small_beside_the_memory_and_a_power_of_two() -> None:
    assert [checked_page_rows(None, capacity) for capacity in (1, 4096, 8192, 3 * 4096, 10**9)] == [1, 1, 2, 2, 256]
    assert checked_page_rows(64, 10) == 64
    for wrong in (0, -4, 3):
        with pytest.raises(ParameterError, match="page_rows must be a power of two"):
            checked_page_rows(wrong, 10)


@pytest.mark.parametrize("shape", [(), (3,), (None, 3)])
def test_the_room_of_a_column_begins_with_a_cache_line(shape: tuple[int | None, ...]) -> None:
    column = Column(np.float32, shape, "state")
    data, dtype, told, role, is_finite = storage_of(column, 7)
    assert data.shape == (7, 8 if column.is_ragged else column.nbytes) and data.dtype == np.uint8
    assert data.ctypes.data % 64 == 0 and not data.any()
    assert (dtype, told, role, is_finite) == (np.float32, shape, "state", True)


def test_one_number_of_a_vector_reward_is_that_of_all_dimensions() -> None:
    settings = cutting_of(Parameters(discount=0.5, reward_coeff=(1.0, 2.0)), 2)
    assert (settings["gamma"], settings["coeff"]) == ([0.5, 0.5], [1.0, 2.0])


def test_sequences_are_as_long_as_their_window_and_begin_where_the_overlap_does() -> None:
    steps = cutting_of(Parameters(multi_step=3), 1)
    assert (steps["multi_step"], steps["stride"]) == (3, 0)
    sequences = cutting_of(Parameters(sequence_length=8, sequence_overlap=3, burn_in=2), 1)
    assert (sequences["multi_step"], sequences["stride"], sequences["burn_in"]) == (8, 5, 2)


def test_the_engine_knows_every_setting_by_its_name() -> None:
    names = ["alpha", "lambda_", "frame_stack", "multi_step", "start", "most_episodes", "gamma", "coeff"]
    names += ["prioritization", "stratified", "stride", "burn_in", "max_share"]
    assert list(cutting_of(Parameters(), 1)) == names
    choices = cutting_of(Parameters(start="zero", prioritization="rank", stratified=True), 1)
    assert (choices["start"], choices["prioritization"], choices["stratified"]) == (2, 1, True)


def test_a_lag_of_no_models_is_a_limit_and_no_lag_is_none() -> None:
    assert limits_of(Parameters()) == (0, 0.0, -1)
    assert limits_of(Parameters(max_times_sampled=3, max_age=2.5, max_model_lag=0)) == (3, 2.5, 0)
