"""When memory or a disk will be full, and a goal reached, if it goes on like this. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from memoire.accounting.account import Totals
from memoire.dashboard.settings import Settings

from .answers import Forecast, TableRow
from .node_state import NodeState
from .rates import LONG_WINDOW, RateWindow

FORECAST_INTERVAL = 10.0
"""Seconds between two looks at what forecasts are made of."""
FORECAST_WINDOW = 1_200.0
FULL = 0.98
"""Share of a table's room from which on it is full: what comes in takes the place of the oldest."""


class Forecasts:
    """What there was in the newest twenty minutes, and what follows from it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ring = RateWindow(FORECAST_WINDOW, FORECAST_INTERVAL)

    def remember(self, now: float, totals: Totals, up: list[NodeState]) -> None:
        """Keep what there is now. `up`: the servers that answer."""
        values = {"steps": float(totals.steps), "episodes": float(totals.episodes)}
        values["held"] = sum(float(node.stats.get("held_bytes", 0)) for node in up)
        values |= {
            f"free {node.url}": float(node.stats["folder"]["free_bytes"]) for node in up if node.stats.get("folder")
        }
        self._ring.add(now, values)

    def clear(self) -> None:
        """Another run is counted."""
        self._ring.clear()

    def forecast(self, totals: Totals, tables: list[TableRow], up: Iterable[NodeState]) -> Forecast:
        """When something is full or done. `up`: the servers that answer."""
        rate = self._ring.rate
        disks = [
            until(node.stats["folder"]["free_bytes"], -rate(f"free {node.url}", FORECAST_WINDOW))
            for node in up
            if node.stats.get("folder")
        ]
        settings, goals = self._settings, []
        if settings.goal_steps:
            goals.append(until(settings.goal_steps - totals.steps, rate("steps", FORECAST_WINDOW)))
        if settings.goal_episodes:
            goals.append(until(settings.goal_episodes - totals.episodes, rate("episodes", FORECAST_WINDOW)))
        return Forecast(
            memory_full=self._memory_full(tables),
            disk_full=min((each for each in disks if each is not None), default=None),
            goal=min((each for each in goals if each is not None), default=None),
        )

    def _memory_full(self, tables: list[TableRow]) -> float | None:
        if any(table.full is not None and table.full >= FULL for table in tables):
            return 0.0
        by_bytes = [t for t in tables if t.byte_limit and t.full == t.held_bytes / t.byte_limit]
        if not by_bytes or not self._ring.is_record("held", LONG_WINDOW):
            return None
        left = sum(table.byte_limit - table.held_bytes for table in by_bytes)
        return until(left, self._ring.rate("held", FORECAST_WINDOW))


def until(left: float, rate: float) -> float | None:
    """Seconds until this much is gone; None where that is more than a year, or never."""
    if left <= 0.0:
        return 0.0
    seconds = left / rate if rate > 0.0 else math.inf
    return seconds if seconds < 365 * 86_400 else None
