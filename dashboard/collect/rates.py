"""What was there at some times, and how fast it grows. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW = 10.0
"""Seconds over which rates are taken."""
LONG_WINDOW = 60.0


class RateWindow:
    """What was there at some times, for rates: the newest `seconds`, at most one entry in `every`."""

    def __init__(self, seconds: float, every: float = 0.0) -> None:
        self._seconds, self._every = seconds, every
        self._entries: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, time: float, values: Mapping[str, float]) -> None:
        """These are there now."""
        if self._entries and time < self._entries[-1][0] + self._every:
            return
        self._entries.append((time, dict(values)))
        while len(self._entries) > 2 and self._entries[1][0] <= time - self._seconds:
            self._entries.popleft()

    def clear(self) -> None:
        """Begin anew."""
        self._entries.clear()

    def gained(self, name: str, window: float) -> tuple[float, float]:
        """How much more there is than `window` seconds ago, or than when it was seen first, and over how many seconds
        that is; zeros at first.
        """
        known = [entry for entry in self._entries if name in entry[1]]
        if len(known) < 2 or name not in self._entries[-1][1]:
            return 0.0, 0.0
        now, newest = known[-1]
        then, oldest = next((entry for entry in reversed(known) if entry[0] <= now - window), known[0])
        return newest[name] - oldest[name], now - then

    def is_record(self, name: str, since: float) -> bool:
        """Whether there is more than there ever was up to `since` seconds ago: what goes up and down is not rising."""
        known = [(time, values[name]) for time, values in self._entries if name in values]
        return bool(known) and all(value < known[-1][1] for time, value in known if time <= known[-1][0] - since)

    def rate(self, name: str, window: float = WINDOW) -> float:
        """How much more there is each second."""
        gained, seconds = self.gained(name, window)
        return gained / seconds if seconds > 0.0 else 0.0
