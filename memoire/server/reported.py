"""What clients report of their newest episodes and of figures of their own, over all of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memoire.wire.messages import TRAIN, Ended

NEWEST = 100
"""Episodes that `recent` speaks of."""


@dataclass(frozen=True, slots=True)
class RecentEpisodes:
    """The newest closed episodes: at most `NEWEST`."""

    count: int = 0
    return_mean: float | None = None
    return_min: float | None = None
    return_max: float | None = None
    length_mean: float | None = None


def recent(ended: Iterable[Ended], kind: int = TRAIN) -> RecentEpisodes:
    """What the episodes of a kind show."""
    newest = [each for each in ended if each.kind == kind][-NEWEST:]
    if not newest:
        return RecentEpisodes()
    returns, lengths = [each.returned for each in newest], [each.length for each in newest]
    mean = math.fsum(returns) / len(newest)
    return RecentEpisodes(len(newest), mean, min(returns), max(returns), sum(lengths) / len(newest))


@dataclass(frozen=True, slots=True)
class FigureSpread:
    """One figure as many clients report it."""

    count: int
    mean: float
    least: float
    greatest: float


def spread(reports: Iterable[Mapping[str, float]], most: int) -> dict[str, FigureSpread]:
    """Each name's values over all reports; of more than `most` names the first ones in their order."""
    found: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.items():
            found.setdefault(name, []).append(value)
    return {
        name: FigureSpread(len(values), math.fsum(values) / len(values), min(values), max(values))
        for name, values in sorted(found.items())[:most]
    }
