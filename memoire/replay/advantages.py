"""What on-policy learners compute of rollouts: generalized advantages and V-trace targets. Pure NumPy.

    lengths [3, 2]     entries  0 1 2 | 3 4          one fragment after the other, without padding
    bootstrap [2]      value of the state behind entry 2, and of the one behind entry 4

A loop runs over the steps of the longest fragment, backwards; each step is done for all fragments at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire.errors import ParameterError

Float32s = NDArray[np.float32]


def gae(
    rewards: ArrayLike, values: ArrayLike, bootstrap: ArrayLike, lengths: ArrayLike, discount: float, lam: float
) -> tuple[Float32s, Float32s]:
    """Advantages and returns of N entries in F fragments, one after the other.

    delta_t = r_t + discount * V(s_t+1) - V(s_t) and A_t = delta_t + discount * lam * A_t+1 within a fragment; the
    return is A_t + V(s_t). Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage
    Estimation, ICLR 2016, equation 16.

    Args:
        rewards: [N], or [N, *R] of a reward with several dimensions.
        values: Of each entry's state, in the shape of `rewards`.
        bootstrap: [F], or [F, *R]: value of the state behind each fragment's last entry; 0 where it terminated.
        lengths: [F] entries of each fragment; they add up to N.
        discount: gamma, in [0, 1].
        lam: lambda, in [0, 1]: 0 looks one step ahead, 1 sums all rewards.

    Returns:
        Advantages and returns, both float32 in the shape of `rewards`.
    """
    r, v, last, counts = _checked(rewards, values, bootstrap, lengths)
    _fraction("discount", discount)
    _fraction("lam", lam)
    deltas = r + discount * _after(v, last, counts) - v
    advantages = _backwards(deltas, np.full(r.shape, discount * lam), counts)
    return advantages.astype(np.float32), (advantages + v).astype(np.float32)


def vtrace(
    rewards: ArrayLike,
    values: ArrayLike,
    bootstrap: ArrayLike,
    lengths: ArrayLike,
    log_ratios: ArrayLike,
    discount: float,
    *,
    lam: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
) -> tuple[Float32s, Float32s]:
    """V-trace targets and advantages of policy gradients of N entries in F fragments.

    Espeholt et al., IMPALA, ICML 2018, equation 1: v_s = V(s) + sum of (discount^t prod c) rho delta; the advantage is
    rho (r + discount * v_s+1 - V(s)). With equal policies targets are those of `gae` with the same `lam`.

    Args:
        rewards, values, bootstrap, lengths, discount: As of `gae`.
        log_ratios: [N] log of the learner's probability of each action over that of the policy that acted.
        lam: Factor of the trace coefficients c, in [0, 1].
        rho_max, c_max: Largest importance ratios, above 0.

    Returns:
        Targets and advantages, both float32 in the shape of `rewards`.
    """
    r, v, last, counts = _checked(rewards, values, bootstrap, lengths)
    _fraction("discount", discount)
    _fraction("lam", lam)
    logs = np.asarray(log_ratios, np.float64)
    if logs.shape != r.shape[:1] or np.isnan(logs).any():
        raise ParameterError("log_ratios", f"shape {logs.shape}", f"a number for each entry, shape {r.shape[:1]}")
    ratio = np.exp(np.minimum(logs, 50.0)).reshape(-1, *([1] * (r.ndim - 1)))
    rho, c = np.minimum(ratio, rho_max), np.minimum(ratio, c_max)
    deltas = rho * (r + discount * _after(v, last, counts) - v)
    targets = v + _backwards(deltas, np.broadcast_to(discount * lam * c, r.shape), counts)
    advantages = rho * (r + discount * _after(targets, last, counts) - v)
    return targets.astype(np.float32), advantages.astype(np.float32)


def _checked(
    rewards: ArrayLike, values: ArrayLike, bootstrap: ArrayLike, lengths: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    last, counts = np.asarray(bootstrap, np.float64), np.asarray(lengths, np.int64)
    if counts.ndim != 1 or (counts < 1).any() or r.ndim < 1 or int(counts.sum()) != len(r):
        found = f"{counts.size} lengths that add up to {int(counts.sum())}, for {np.shape(rewards)}"
        raise ParameterError(
            "lengths", found, "one for each fragment, at least 1, that add up to the entries there are"
        )
    shapes: tuple[tuple[str, NDArray[Any], tuple[int, ...]], ...] = (
        ("values", v, r.shape),
        ("bootstrap", last, (len(counts), *r.shape[1:])),
    )
    for name, array, shape in shapes:
        if array.shape != shape:
            raise ParameterError(name, f"shape {array.shape}", f"shape {shape}")
        if not np.isfinite(array).all():
            raise ParameterError(name, "a value that is not finite", "finite values: the value network's")
    return r, v, last, counts


def _fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ParameterError(name, value, "a number in [0, 1]")


def _after(values: NDArray[np.float64], last: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """The value behind each entry: that of the next one, or its fragment's last one."""
    following = np.empty_like(values)
    following[:-1] = values[1:]
    following[np.cumsum(lengths) - 1] = last
    return following


def _backwards(
    deltas: NDArray[np.float64], factors: NDArray[np.float64], lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """x_t = delta_t + factor_t * x_t+1 within each fragment, 0 behind its end."""
    order = np.argsort(-lengths, kind="stable")
    sizes, ends = lengths[order], np.cumsum(lengths)[order]
    found = np.zeros_like(deltas)
    longest = int(sizes[0]) if len(sizes) else 0
    alive = np.searchsorted(-sizes, -np.arange(1, longest + 1), side="right")  # fragments of so many entries, or more
    for back, count in enumerate(alive.tolist(), 1):
        rows = ends[:count] - back
        found[rows] = deltas[rows] + (factors[rows] * found[rows + 1] if back > 1 else 0.0)
    return found
