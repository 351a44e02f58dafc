"""Parameters: what is accepted, what is refused, how the refusal reads, and what the engine is set up with."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from memoire.errors import ParameterError, UnknownName
from memoire.replay.conversion import checked_page_rows, cutting_of
from memoire.replay.parameters import ADDED, NAMES, Parameters

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


@pytest.mark.parametrize("name", ["frame_stack", "multi_step", "cache_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", 2**40])
def test_a_count_refuses_what_is_no_whole_number_of_at_least_one(name, value):
    with pytest.raises(ParameterError, match=f"{name} must be a whole number from 1"):
        Parameters(**{name: value})


def test_no_limit_of_episodes_is_zero_and_less_is_refused():
    assert Parameters(max_episode=0).max_episode == 0
    with pytest.raises(ParameterError, match="max_episode must be a whole number from 0"):
        Parameters(max_episode=-1)


@pytest.mark.parametrize("value", [0.5, [0.5], (0.5,), np.array(0.5), np.array([0.5])])
def test_a_vector_parameter_takes_a_number_a_sequence_or_an_array(value):
    assert Parameters(discount=value).discount == (0.5,)


@pytest.mark.parametrize("name", ["discount", "reward_coeff"])
@pytest.mark.parametrize("value", [[], -0.1, [0.5, float("nan")], "0.5", [0.5, None]])
def test_a_vector_parameter_refuses_what_is_no_number(name, value):
    with pytest.raises(ParameterError, match=name):
        Parameters(**{name: value})


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


# --- Parameters and columns become what the engine is set up with


def test_pages_are_small_beside_the_memory_and_a_power_of_two() -> None:
    assert [checked_page_rows(None, capacity) for capacity in (1, 4096, 8192, 3 * 4096, 10**9)] == [1, 1, 2, 2, 256]
    assert checked_page_rows(64, 10) == 64
    for wrong in (0, -4, 3):
        with pytest.raises(ParameterError, match="page_rows must be a power of two"):
            checked_page_rows(wrong, 10)


def test_the_engine_knows_every_setting_by_its_name() -> None:
    names = ["alpha", "lambda_", "frame_stack", "multi_step", "start", "most_episodes", "gamma", "coeff"]
    names += ["prioritization", "stratified", "stride", "burn_in", "max_share"]
    assert list(cutting_of(Parameters(), 1)) == names
    choices = cutting_of(Parameters(start="zero", prioritization="rank", stratified=True), 1)
    assert (choices["start"], choices["prioritization"], choices["stratified"]) == (2, 1, True)
