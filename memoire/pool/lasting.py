"""What a pool does about its clients if their entries stay when they are gone."""

from __future__ import annotations

from collections.abc import Callable

from memoire.replay.parameters import Parameters

from .interface import TablePool
from .pool_lock import PoolLock
from .presence import Presence


class LastingPool(TablePool):
    """Clients count while they are heard. Thread-safe.

    Args:
        client_timeout: Seconds of silence after which a client is not counted any more. What it sent stays.
        clock: Seconds that only grow.
    """

    def __init__(self, client_timeout: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiter = PoolLock()
        self._clients = Presence(client_timeout, clock())  # under the waiter's lock

    def check_parameters(self, parameters: Parameters) -> None:
        """Any fit: what is held is as it was recorded."""

    def heard(self, client_id: bytes) -> None:
        """A sign of life."""
        with self._waiter.lock:
            self._hear(client_id)

    def _hear(self, client_id: bytes) -> None:
        now = self._clock()
        self._clients.heard(client_id, now)
        if self._clients.is_due(now):
            self._clients.expire(now)

    def goodbye(self, client_id: bytes) -> None:
        """A client has ended; what it sent stays."""
        self.forget(client_id)

    def forget(self, client_id: bytes) -> int:
        """Do not count a client any more; what it sent stays. Returns 0: no sample is lost."""
        with self._waiter.lock:
            self._clients.forget(client_id)
        return 0

    def expire(self) -> int:
        """Stop counting clients that were silent for `client_timeout`; returns how many. What they sent stays."""
        with self._waiter.lock:
            return len(self._clients.expire(self._clock()))
