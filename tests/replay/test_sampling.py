"""Samplers as settings, and importance by its formula."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memoire.errors import ParameterError
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Prioritized, Uniform, importance

chances = arrays(np.float64, st.integers(1, 20), elements=st.floats(1e-9, 1.0))


def test_samplers_become_parameters():
    made = Parameters().replace(**Prioritized(0.7, beta=0.5, normalize="global").fields())
    assert (made.priority_exponent, made.importance_exponent, made.normalize) == (0.7, 0.5, "global")
    made = made.replace(**Uniform().fields())
    assert (made.priority_exponent, made.importance_exponent, made.normalize) == (0.0, 0.0, "batch")


@pytest.mark.parametrize("wrong", [{"exponent": -1}, {"beta": 2}, {"normalize": "max"}])
def test_a_sampler_refuses_a_field_outside_its_range(wrong):
    with pytest.raises(ParameterError):
        Prioritized(**wrong)


@given(chances, st.floats(1, 1e9), st.floats(0, 1))
def test_importance_is_the_formula_over_the_largest_of_the_batch(probability, population, beta):
    got, divisor = importance(probability, population, beta)
    truth = (population * probability) ** -beta
    assert got.dtype == np.float32 and got.max() == 1.0 and (got > 0).all()
    np.testing.assert_allclose(got * divisor, truth, rtol=1e-6)


@given(chances, st.floats(0.1, 1))
def test_global_importance_is_divided_by_what_the_least_chance_would_have(probability, beta):
    smallest = probability.min() / 2
    got, divisor = importance(probability, 100, beta, "global", smallest)
    assert divisor == pytest.approx((100 * smallest) ** -beta)
    assert (got <= 1.0).all()


def test_full_correction_gives_the_uniform_mean():
    rng = np.random.default_rng(1)
    weights, values = rng.random(50) + 0.1, rng.normal(size=50)
    chance = weights / weights.sum()
    drawn = rng.choice(50, 400_000, p=chance)
    undivided, divisor = importance(chance[drawn], 50, 1.0)
    assert (undivided * divisor * values[drawn]).mean() == pytest.approx(values.mean(), abs=0.01)


@pytest.mark.parametrize("wrong", [[0.0], [-0.1], [np.nan], [np.inf], [0.5, 0.0]])
def test_a_chance_that_is_none_is_refused(wrong):
    with pytest.raises(ParameterError, match="probability must be above 0"):
        importance(wrong, 10, 0.5)


def test_what_is_missing_or_wrong_is_named():
    for population in (0, -1, np.inf, np.nan):
        with pytest.raises(ParameterError, match="population"):
            importance([0.5], population, 0.5)
    with pytest.raises(ParameterError, match="smallest"):
        importance([0.5], 10, 0.5, "global")
    with pytest.raises(ParameterError, match="normalize"):
        importance([0.5], 10, 0.5, "largest")


def test_an_empty_batch_has_an_empty_importance():
    got, divisor = importance([], 10, 0.5)
    assert got.shape == (0,) and divisor == 1.0
