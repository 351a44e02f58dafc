"""Base classes of table pools: a lock with a condition for waiting draws, and a registry of live clients.

    with waiter.lock:                                     with waiter.lock:
        drawn = draw(now)                                     add(cache)
        while drawn is None and waiter.wait(deadline):        waiter.tell()
            drawn = draw(clock())

Code that decides about caches, readers or episodes runs under the lock and does not use the lock itself.
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
    """Lock of a pool, with a condition on which draws wait for changes."""

    def __init__(self) -> None:
        self.changed = _core.Condition()
        """Condition that owns the lock. Hot paths pass the condition to `_core.Held` themselves."""
        # Everything below belongs to the lock.
        self.waiting = 0
        """Number of threads that wait now."""
        self.changes = 0
        """Number of calls of `wake_waiters`."""
        self.is_closed = False

    @property
    def lock(self) -> _core.Held:
        """Context manager that holds the lock, and releases the lock even if a signal interrupts the thread."""
        return self.changed.held()

    def wake_waiters(self) -> None:
        """Wake the waiting threads, because a draw may now have another result. Call under the lock."""
        self.changes += 1
        if self.waiting:
            self.changed.notify_all()

    def wait(self, deadline: float, at_most: float = math.inf) -> bool:
        """Release the lock until `wake_waiters` is called, `at_most` seconds have passed or the deadline is reached.

        Return False at once if the deadline has passed, else True: the caller then tries the draw again.

        Args:
            deadline: On the clock of `time.monotonic`.
        """
        remaining = deadline - time.monotonic()
        if remaining <= 0.0:
            return False
        self.waiting += 1
        try:
            self.changed.wait(min(remaining, at_most))
        finally:
            self.waiting -= 1
        return True

    def check_open(self) -> None:
        """Raise Closed after `close` was called."""
        if self.is_closed:
            raise Closed("the pool")

    def close(self) -> None:
        """Wake all waiting threads; later calls raise Closed. Call under the lock."""
        self.is_closed = True
        self.wake_waiters()


EXPIRY_INTERVAL: Final = 1.0
"""Minimum seconds between two searches for silent clients and readers of caches."""


class LastingPool(TablePool):
    """Pool whose content stays after its clients leave; clients are counted while they send messages. Thread-safe.

    Args:
        client_timeout: Seconds of silence after which a client is no longer counted. The client's data stays.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, client_timeout: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiter = PoolLock()
        self._clients: PeerTable[bytes, None] = PeerTable("clients", 1 << 62, client_timeout)  # under the waiter's lock

    def check_parameters(self, parameters: Parameters) -> None:
        """Accept any parameters, because content is held as recorded."""

    def saw_model(self, version: int) -> None:
        """Ignore model versions, because the content refers to no model."""

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """Return an empty distribution with the number of entries; no sample is examined."""
        nothing = Histogram.from_values(np.empty(0))
        return Distribution(0, self.entries(), 0.0, 0.0, None, nothing, nothing)

    def state(self) -> dict[str, Any]:
        """Return an empty state, because the records contain everything."""
        return {}

    def restore_state(self, state: Any, *, is_same: bool) -> None:
        """Ignore the state, because the records contain everything."""

    def close(self) -> None:
        """Wake all waiting threads, which raise Closed. Closing again does nothing."""
        with self._waiter.lock:
            self._waiter.close()

    def record_contact(self, client_id: bytes) -> None:
        """Record a sign of life of a client."""
        with self._waiter.lock:
            self._hear(client_id)

    def _hear(self, client_id: bytes) -> None:
        now = self._clock()
        self._clients.put(client_id, None, now)
        self._clients.expire(now)

    def unregister(self, client_id: bytes) -> None:
        """Unregister a client that has ended; the client's data stays."""
        with self._waiter.lock:
            self._clients.pop(client_id)

    def expire(self) -> int:
        """Expire clients that were silent for `client_timeout` and return their number; their data stays."""
        with self._waiter.lock:
            before = len(self._clients)
            self._clients.expire(self._clock())
            return before - len(self._clients)
