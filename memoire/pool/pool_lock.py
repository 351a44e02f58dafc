"""The lock of a pool, and the wait of those who draw from it.

    with waiter.lock:                                     with waiter.lock:
        drawn = draw(now)                                     add(cache)
        while drawn is None and waiter.wait(deadline):        waiter.tell()
            drawn = draw(clock())

What decides about caches, readers or episodes is called under the lock and knows nothing of it.
"""

from __future__ import annotations

import math
import time

from memoire import _core
from memoire.errors import Closed


class PoolLock:
    """One lock, and what happens under it that others wait for."""

    def __init__(self) -> None:
        self.told = _core.Condition()
        """Of this it is the lock; where each call counts, for `_core.Held`."""
        # Everything below belongs to the lock.
        self.waiting = 0
        """Threads that wait now."""
        self.changes = 0
        """How often something was told."""
        self.is_closed = False

    @property
    def lock(self) -> _core.Held:
        """The lock, let go of wherever an interrupt comes."""
        return self.told.held()

    def tell(self) -> None:
        """Have those who wait look again: something else may be drawn than before. Call it under the lock."""
        self.changes += 1
        if self.waiting:
            self.told.notify_all()

    def wait(self, deadline: float, at_most: float = math.inf) -> bool:
        """Give the lock up until something is told, `at_most` seconds have passed or the deadline is there; then the
        caller looks again. False, at once, where the deadline has passed.

        Args:
            deadline: On the clock of `time.monotonic`.
        """
        left = deadline - time.monotonic()
        if left <= 0.0:
            return False
        self.waiting += 1
        try:
            self.told.wait(min(left, at_most))
        finally:
            self.waiting -= 1
        return True

    def check_open(self) -> None:
        """Raises Closed after `close`."""
        if self.is_closed:
            raise Closed("the pool")

    def close(self) -> None:
        """Wake everyone; what they ask for from now on raises Closed. Call it under the lock."""
        self.is_closed = True
        self.tell()
