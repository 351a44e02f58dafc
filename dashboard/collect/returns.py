"""The newest returns of each actor, and how they are spread over the actors. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from .answers import EpisodeRow
from .history import HistoryPoint

RECENT_EPISODES = 20
"""Newest episodes of an actor whose mean return says how it plays now."""
RECENT_SECONDS = 600.0
"""An actor without an episode for so long is not counted among the others."""
QUANTILES = (10, 25, 50, 75, 90)


class RecentReturns:
    """What each actor's newest episodes returned."""

    def __init__(self) -> None:
        self._returns: dict[str, deque[float]] = {}  # of each actor
        self._ended: dict[str, float] = {}  # when its newest episode ended

    def add(self, episodes: Iterable[EpisodeRow]) -> None:
        """These episodes ended; of one actor the oldest first."""
        for row in episodes:
            if math.isfinite(row.returned):
                self._returns.setdefault(row.client, deque(maxlen=RECENT_EPISODES)).append(row.returned)
                self._ended[row.client] = max(row.time, self._ended.get(row.client, 0.0))

    def clear(self) -> None:
        """Another run is counted."""
        self._returns.clear()
        self._ended.clear()

    def mean_of(self, client: str) -> float | None:
        """Mean return of an actor's newest episodes; None where none has ended since somebody looks."""
        found = self._returns.get(client)
        return math.fsum(found) / len(found) if found else None

    def figures(self) -> dict[str, HistoryPoint]:
        """Quantiles over the actors of their mean returns, as the history keeps them: return_p10 to return_p90. None
        for a single actor.
        """
        newest = max(self._ended.values(), default=0.0)
        means = [
            math.fsum(returns) / len(returns)
            for client, returns in self._returns.items()
            if self._ended[client] >= newest - RECENT_SECONDS
        ]
        if len(means) < 2:
            return {}
        found = np.percentile(means, QUANTILES).tolist()
        return {
            f"return_p{part}": HistoryPoint(value, value, value) for part, value in zip(QUANTILES, found, strict=True)
        }
