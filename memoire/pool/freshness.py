"""How fresh drawn samples are: their ages and weights, and how many models ago they were recorded. A batch is looked at
now and then, so that it costs little.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.replay.batch import GatheredSamples

SAMPLE_INTERVAL = 0.5
"""Seconds between two looks at how fresh a batch is."""
PARTS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Parts of a batch whose greatest age and weight are kept."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """How fresh the samples of one recent batch were."""

    age_median: float
    """Seconds since the entries were added."""
    age_p90: float
    age_max: float
    lag_mean: float | None
    """Model versions between acting and learning; None where no model was published."""
    lag_max: float | None
    left_out: float
    """Share of all clients' weight that could not be drawn from."""
    effective: float
    """Effective sample size of the batch as a share of it: (sum w)**2 / (B sum w**2), w its importance. Kish, 1965."""
    ages: tuple[float, ...]
    """Ages that `PARTS` of the samples stay below, in seconds."""
    weights: tuple[float, ...]
    """Weights that `PARTS` of the samples stay below: what they were drawn in proportion to."""


class FreshnessMonitor:
    """Looks at a batch now and then: at most one in `SAMPLE_INTERVAL` seconds, so that drawing is not slowed down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = float("-inf")
        self.newest: Freshness | None = None
        """Of the newest batch that was looked at."""

    def is_due(self, now: float) -> bool:
        """Whether to look at this batch; the caller does, then."""
        if now < self._next:
            return False
        with _core.Held.within(self._lock, 0.0) as is_mine:
            if is_mine:
                self._next = now + SAMPLE_INTERVAL
            return is_mine

    def saw(self, drawn: GatheredSamples, importance: NDArray[Any], left_out: float, newest: int) -> None:
        """Keep what this batch shows: its importance is [B]; `newest` is the newest version of a model."""
        self._keep(drawn.age, drawn.model_version, drawn.weight, importance, left_out, newest)

    def took(self, age: NDArray[Any], model_version: NDArray[Any], newest: int) -> None:
        """Keep what a take of rollouts shows: ages and versions of its entries [N], each of which counts alike."""
        alike = np.ones(len(age), np.float32)
        self._keep(age, model_version, alike, alike, 0.0, newest)

    def _keep(
        self,
        age: NDArray[Any],
        model_version: NDArray[Any],
        weight: NDArray[Any],
        importance: NDArray[Any],
        left_out: float,
        newest: int,
    ) -> None:
        if not (len(age) and np.isfinite(age).all()):
            return
        lags = newest - model_version[model_version > 0]
        has_lag = newest > 0 and len(lags) > 0
        weights, ages = importance.astype(np.float64), _quantiles(age)
        self.newest = Freshness(
            age_median=ages[PARTS.index(0.5)],
            age_p90=ages[PARTS.index(0.9)],
            age_max=ages[-1],
            lag_mean=float(lags.mean()) if has_lag else None,
            lag_max=float(lags.max()) if has_lag else None,
            left_out=float(left_out),
            effective=float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())) if weights.any() else 0.0,
            ages=ages,
            weights=_quantiles(weight),
        )


def _quantiles(values: NDArray[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.quantile(values, PARTS))
