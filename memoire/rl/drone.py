"""A simulated drone behind a slow radio: commands and positions arrive late, each by a random delay."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from memoire.building import ForkedGenerator, Held
from memoire.errors import ParameterError

SPEED_LIMIT: Final = 2.0
"""Units per second, in each direction."""
BORDER: Final = 1.0
"""Both coordinates stay in [-1, 1]."""


class DummyDrone:
    """Moves in a square by the velocities that it is sent, without a thread, a window or a device.

    Safe to call from several threads. Positions are computed at each call from the commands and their times.

    Args:
        delays: Seconds that a command takes to the drone, and a position back: at least and at most. A later command
            never arrives before a former one.
        seed: Of the delays; None takes entropy from the system.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        delays: tuple[float, float] = (0.02, 0.05),
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        low, high = delays
        if not 0.0 <= low <= high:
            raise ParameterError("delays", delays, "seconds (at least, at most), neither below 0")
        self._delays, self._clock, self._random = delays, clock, ForkedGenerator(seed)
        self._lock = threading.Lock()  # guards all below
        # Velocities by the time from which they hold; the first one holds already, at the position of that time.
        self._legs: deque[tuple[float, float, float]] = deque([(clock(), 0.0, 0.0)])
        self._start = (0.0, 0.0)

    def send_control(self, vel_x: Any, vel_y: Any) -> None:
        """Have it move with this velocity, from when the command arrives; returns at once."""
        velocity = [min(max(float(each), -SPEED_LIMIT), SPEED_LIMIT) for each in (vel_x, vel_y)]
        with Held(self._lock):
            arrives = self._clock() + self._delay()
            self._legs.append((max(arrives, self._legs[-1][0]), velocity[0], velocity[1]))

    def get_observation(self) -> tuple[float, float]:
        """(x, y): where it was a random delay ago."""
        with Held(self._lock):
            now = self._clock()
            self._forget(now - self._delays[1])
            return self._position(now - self._delay())

    def _delay(self) -> float:
        return float(self._random.uniform(*self._delays))

    def _forget(self, before: float) -> None:
        """Let go of velocities that held before a time which nobody asks for any more."""
        while len(self._legs) > 1 and self._legs[1][0] <= before:
            (begin, *velocity), end = self._legs[0], self._legs[1][0]
            self._start = _moved(self._start, velocity, end - begin)
            self._legs.popleft()

    def _position(self, at: float) -> tuple[float, float]:
        place, legs = self._start, list(self._legs)
        for (begin, *velocity), end in zip(legs, [*(leg[0] for leg in legs[1:]), at], strict=True):
            place = _moved(place, velocity, max(0.0, min(end, at) - begin))
        return place


def _moved(place: tuple[float, float], velocity: list[float], seconds: float) -> tuple[float, float]:
    """Where it is after so many seconds; it stops at the border."""
    x, y = (min(max(p + v * seconds, -BORDER), BORDER) for p, v in zip(place, velocity, strict=True))
    return x, y
