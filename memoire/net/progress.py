"""Whether a thread that takes turns is stuck, or only slow because the machine has too much to do.

    turns       | | | |                                          the last one began at 4
    time        1 2 3 4 ─── 15 s ───▶ 19: late. First look, at 20: the process has waited 3 s for a core in all
                                          Second look, at 30: 3.1 s     ─▶ it could run for 9.9 s of 10: stuck
                                                              12.5 s    ─▶ it could run for 0.5 s: slow

A restart helps the first one. It harms the second: a server that starts again has lost what it held.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

STUCK_TIMEOUT = 15.0
"""Seconds without a turn after which a thread that takes one a second is late."""
RUNNABLE_TIMEOUT = 5.0
"""Seconds for which the process could run while a late thread took no turn: then it is stuck."""
SLOW_TIMEOUT = 300.0
"""Seconds without a turn after which it is stuck however busy the machine is."""


class _LateThread(NamedTuple):
    """The first look at a thread that is late."""

    turned: float
    """When its last turn began: another one has begun since then if this has changed."""
    at: float
    waited: float


TASKS = "/proc/self/task"
"""Folder in which Linux says of each thread of this process how long it waited for a core."""


def waited_for_cores(tasks: str = TASKS) -> float:
    """Seconds for which threads of this process were ready to run and no core was free, all together.

    0 where the system does not say it: then the time on the clock alone counts.
    """
    total = 0
    try:
        for thread in os.listdir(tasks):
            with open(f"{tasks}/{thread}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[1])  # time on a core, time ready for one, turns
    except (OSError, ValueError, IndexError):
        return 0.0
    return total / 1e9


class ProgressMonitor:
    """Judges one thread by its turns, at two looks at least. From any thread.

    Args:
        timeout: Seconds without a turn after which the thread is late.
        clock: What turns are timed by.
        waited: Seconds that the process has waited for cores so far.
    """

    def __init__(
        self,
        timeout: float = STUCK_TIMEOUT,
        *,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] = waited_for_cores,
    ) -> None:
        self._timeout, self._clock, self._waited = timeout, clock, waited
        self._first: _LateThread | None = None  # replaced as a whole: several threads may look

    def silence(self, turned: float) -> float:
        """Seconds since the thread's last turn began, at `turned`, if it is stuck; else 0."""
        now = self._clock()
        if now - turned <= self._timeout:
            return 0.0
        first = self._first
        if first is None or first.turned != turned:
            first = self._first = _LateThread(turned, now, self._waited())
        could_run = now - first.at - max(0.0, self._waited() - first.waited)
        is_stuck = could_run >= RUNNABLE_TIMEOUT or now - turned > SLOW_TIMEOUT
        return now - turned if is_stuck else 0.0
