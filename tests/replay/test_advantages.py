"""Advantages and V-trace targets agree with their definitions, written as sums over all later entries."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.errors import ParameterError
from memoire.replay.rollouts import gae, vtrace

Parts = list[tuple[Any, Any, Any, Any]]


def parts_of(arrays: Any, lengths: Any) -> list[Any]:
    return np.split(arrays, np.cumsum(lengths)[:-1])


def slow_gae(rewards: Any, values: Any, last: Any, discount: float, lam: float) -> Any:
    """Equation 16 for one fragment, as it is printed: O(T^2)."""
    following = np.append(values[1:], last)
    deltas = rewards + discount * following - values
    count = len(rewards)
    return np.array([sum((discount * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)])


def slow_vtrace(
    rewards: Any, values: Any, last: Any, logs: Any, discount: float, lam: float, rho_max: float, c_max: float
) -> Any:
    """Equation 1 for one fragment, with a product for each pair: O(T^3)."""
    following, ratio = np.append(values[1:], last), np.exp(logs)
    rho, c = np.minimum(ratio, rho_max), lam * np.minimum(ratio, c_max)
    deltas = rho * (rewards + discount * following - values)
    count = len(rewards)
    sums = [sum(discount ** (k - t) * np.prod(c[t:k]) * deltas[k] for k in range(t, count)) for t in range(count)]
    return values + np.array(sums)


@st.composite
def fragments(draw: st.DrawFn) -> tuple[Any, Any, Any, Any, Any]:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    count = sum(lengths)
    return (
        rng.normal(size=count),
        rng.normal(size=count),
        rng.normal(size=len(lengths)),
        lengths,
        rng.normal(size=count),
    )


fractions = st.floats(0, 1)


@given(fragments(), fractions, fractions)
def test_gae_is_the_sum_that_defines_it(case: Any, discount: float, lam: float) -> None:
    rewards, values, last, lengths, _ = case
    advantages, returns = gae(rewards, values, last, lengths, discount, lam)
    each = zip(parts_of(rewards, lengths), parts_of(values, lengths), last, strict=True)
    expected = np.concatenate([slow_gae(*one, discount, lam) for one in each])
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns, expected + values, rtol=1e-4, atol=1e-5)


@given(fragments(), fractions, fractions, st.floats(0.1, 3), st.floats(0.1, 3))
def test_vtrace_is_the_sum_that_defines_it(case: Any, discount: float, lam: float, rho: float, c: float) -> None:
    rewards, values, last, lengths, logs = case
    targets, advantages = vtrace(rewards, values, last, lengths, logs, discount, lam=lam, rho_max=rho, c_max=c)
    cut = (parts_of(each, lengths) for each in (rewards, values, logs))
    each = list(zip(*cut, last, strict=True))
    expected = [slow_vtrace(r, v, end, log, discount, lam, rho, c) for r, v, log, end in each]
    np.testing.assert_allclose(targets, np.concatenate(expected), rtol=1e-4, atol=1e-5)
    steps = [
        np.minimum(np.exp(log), rho) * (r + discount * np.append(found[1:], end) - v)
        for (r, v, log, end), found in zip(each, expected, strict=True)
    ]
    np.testing.assert_allclose(advantages, np.concatenate(steps), rtol=1e-4, atol=1e-5)


@given(fragments(), fractions, fractions)
def test_with_equal_policies_vtrace_targets_are_the_returns_of_gae(case: Any, discount: float, lam: float) -> None:
    rewards, values, last, lengths, logs = case
    targets, _ = vtrace(rewards, values, last, lengths, np.zeros_like(logs), discount, lam=lam)
    _, returns = gae(rewards, values, last, lengths, discount, lam)
    np.testing.assert_allclose(targets, returns, rtol=1e-4, atol=1e-5)


def test_each_dimension_of_a_reward_is_a_reward() -> None:
    rng = np.random.default_rng(1)
    rewards, values, last = rng.normal(size=(5, 2)), rng.normal(size=(5, 2)), rng.normal(size=(2, 2))
    both = gae(rewards, values, last, [2, 3], 0.9, 0.8)[0]
    for j in range(2):
        np.testing.assert_array_equal(both[:, j], gae(rewards[:, j], values[:, j], last[:, j], [2, 3], 0.9, 0.8)[0])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"values": np.zeros(3)}, "values"),
        ({"bootstrap": np.zeros(1)}, "bootstrap"),
        ({"lengths": [5]}, "lengths"),
        ({"lengths": [4, 0]}, "lengths"),
        ({"values": np.array([0.0, np.nan, 0.0, 0.0])}, "values"),
        ({"discount": 1.5}, "discount"),
        ({"lam": -0.1}, "lam"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    given: dict[str, Any] = {"rewards": np.zeros(4), "values": np.zeros(4), "bootstrap": np.zeros(2)}
    given |= {"lengths": [3, 1], "discount": 0.9, "lam": 0.9}
    with pytest.raises(ParameterError, match=name):
        gae(**given | changes)
    with pytest.raises(ParameterError, match="log_ratios"):
        vtrace(**given, log_ratios=np.zeros(3))
