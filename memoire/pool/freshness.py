"""Figures that are read by whoever watches, and cost little to keep: durations in buckets, how fresh drawn samples are,
what the newest episodes returned. Pure.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.replay.batch import Gathered
from memoire.wire.messages import Ended

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds: upper ends of the buckets of a duration; one more has no end."""
LOOK_EVERY = 0.5
"""Seconds between two looks at how fresh a batch is."""
PARTS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Parts of a batch whose greatest age and weight are kept."""
NEWEST = 100
"""Episodes that `recent` speaks of."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one kind."""

    seconds: float
    """In all."""
    counts: tuple[int, ...]
    """In each bucket: up to each of `bounds`, and beyond."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper ends of the buckets, in seconds."""
        return BOUNDS

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)


class Timings:
    """Durations by kind. One thread adds; any thread reads."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._seconds = dict.fromkeys(kinds, 0.0)
        self._counts = {kind: [0] * (len(BOUNDS) + 1) for kind in self._seconds}

    def saw(self, kind: str, seconds: float) -> None:
        """Count a duration."""
        self._seconds[kind] += seconds
        self._counts[kind][bisect.bisect_left(BOUNDS, seconds)] += 1

    def now(self) -> dict[str, Timing]:
        """What was counted so far."""
        return {kind: Timing(seconds, tuple(self._counts[kind])) for kind, seconds in self._seconds.items()}


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


class Looks:
    """Looks at a batch now and then: at most one in `LOOK_EVERY` seconds, so that drawing is not slowed down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = float("-inf")
        self.newest: Freshness | None = None
        """Of the newest batch that was looked at."""

    def is_due(self, now: float) -> bool:
        """Whether to look at this batch; the caller does, then."""
        if now < self._next or not self._lock.acquire(blocking=False):
            return False
        try:
            self._next = now + LOOK_EVERY
            return True
        finally:
            self._lock.release()

    def saw(self, drawn: Gathered, importance: NDArray[Any], left_out: float, newest: int) -> None:
        """Keep what this batch shows; `newest` is the newest version of a model."""
        if not (len(drawn.age) and np.isfinite(drawn.age).all()):
            return
        lags = newest - drawn.model_version[drawn.model_version > 0]
        has_lag = newest > 0 and len(lags) > 0
        weights, ages = importance.astype(np.float64), _quantiles(drawn.age)
        self.newest = Freshness(
            age_median=ages[PARTS.index(0.5)],
            age_p90=ages[PARTS.index(0.9)],
            age_max=ages[-1],
            lag_mean=float(lags.mean()) if has_lag else None,
            lag_max=float(lags.max()) if has_lag else None,
            left_out=float(left_out),
            effective=float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())) if weights.any() else 0.0,
            ages=ages,
            weights=_quantiles(drawn.weight),
        )


def _quantiles(values: NDArray[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.quantile(values, PARTS))


@dataclass(frozen=True, slots=True)
class Recent:
    """The newest closed episodes: at most `NEWEST`."""

    count: int = 0
    return_mean: float | None = None
    return_min: float | None = None
    return_max: float | None = None
    length_mean: float | None = None


def recent(ended: Iterable[Ended]) -> Recent:
    """What these episodes show."""
    newest = list(ended)[-NEWEST:]
    if not newest:
        return Recent()
    returns, lengths = [each.returned for each in newest], [each.length for each in newest]
    mean = math.fsum(returns) / len(newest)
    return Recent(len(newest), mean, min(returns), max(returns), sum(lengths) / len(newest))


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure as many clients report it."""

    count: int
    mean: float
    least: float
    greatest: float


def spread(reports: Iterable[Mapping[str, float]], most: int) -> dict[str, Spread]:
    """Each name's values over all reports; of more than `most` names the first ones in their order."""
    found: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.items():
            found.setdefault(name, []).append(value)
    return {
        name: Spread(len(values), math.fsum(values) / len(values), min(values), max(values))
        for name, values in sorted(found.items())[:most]
    }
