"""What pools of tables are made of: a lock and the wait of those who draw, and clients that were heard lately.

    with waiter.lock:                                     with waiter.lock:
        drawn = draw(now)                                     add(cache)
        while drawn is None and waiter.wait(deadline):        waiter.tell()
            drawn = draw(clock())

What decides about caches, readers or episodes is called under the lock and knows nothing of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from memoire import _core
from memoire.errors import Closed
from memoire.replay.parameters import Parameters
from memoire.wire.byte_budget import PeerTable

from .base import MAX_INSPECTED, TablePool
from .inspection import Distribution, Histogram


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


EXPIRY_INTERVAL: Final = 1.0
"""Seconds between two looks for silent clients and readers of caches."""


class LastingPool(TablePool):
    """Clients count while they are heard. Thread-safe.

    Args:
        client_timeout: Seconds of silence after which a client is not counted any more. What it sent stays.
        clock: Seconds that only grow.
    """

    def __init__(self, client_timeout: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiter = PoolLock()
        self._clients: PeerTable[bytes, None] = PeerTable("clients", 1 << 62, client_timeout)  # under the waiter's lock

    def check_parameters(self, parameters: Parameters) -> None:
        """Any fit: what is held is as it was recorded."""

    def saw_model(self, version: int) -> None:
        """What is held knows of no model."""

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """Nothing is looked at."""
        nothing = Histogram.of(np.empty(0))
        return Distribution(0, self.entries(), 0.0, 0.0, None, nothing, nothing)

    def state(self) -> dict[str, Any]:
        """Return nothing: what is held says all."""
        return {}

    def go_on_from(self, state: Any, *, is_same: bool) -> None:
        """Nothing goes on beside what is put back."""

    def close(self) -> None:
        """Wake everyone who waits (they raise Closed). Closing again does nothing."""
        with self._waiter.lock:
            self._waiter.close()

    def heard(self, client_id: bytes) -> None:
        """A sign of life."""
        with self._waiter.lock:
            self._hear(client_id)

    def _hear(self, client_id: bytes) -> None:
        now = self._clock()
        self._clients.put(client_id, None, now)
        self._clients.expire(now)

    def goodbye(self, client_id: bytes) -> None:
        """A client has ended; what it sent stays."""
        with self._waiter.lock:
            self._clients.pop(client_id)

    def expire(self) -> int:
        """Stop counting clients that were silent for `client_timeout`; returns how many. What they sent stays."""
        with self._waiter.lock:
            before = len(self._clients)
            self._clients.expire(self._clock())
            return before - len(self._clients)
