"""Durations by kind, in buckets: cheap to count, and enough for quantiles of many servers together. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds: upper ends of the buckets of a duration; one more has no end."""


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

    def saw_all(self, kind: str, seconds: NDArray[np.float64]) -> None:
        """Count many durations, [N]."""
        self._seconds[kind] += float(seconds.sum())
        found = np.bincount(np.searchsorted(BOUNDS, seconds), minlength=len(BOUNDS) + 1)
        self._counts[kind] = [mine + new for mine, new in zip(self._counts[kind], found.tolist(), strict=True)]

    def now(self) -> dict[str, Timing]:
        """What was counted so far."""
        return {kind: Timing(seconds, tuple(self._counts[kind])) for kind, seconds in self._seconds.items()}
