"""How a log line gets into the outbox: at once while there is room, or after a wait that is not made twice."""

from __future__ import annotations

from collections.abc import Callable

from .io_waiting import Waiting
from .session import Session

WARN_INTERVAL = 60.0
"""Seconds between two warnings that lines are dropped."""


class LogLines:
    """Takes log lines of any thread.

    Args:
        timeout: Seconds to wait for room, unless a caller says otherwise.
        clock: Seconds since 1970.
        is_inside: Whether the caller is the client's own thread, which must not wait for itself.
    """

    def __init__(
        self,
        session: Session,
        waiting: Waiting,
        timeout: float,
        clock: Callable[[], float],
        is_inside: Callable[[], bool],
    ) -> None:
        self.timeout = timeout
        self._session, self._waiting, self._clock, self._is_inside = session, waiting, clock, is_inside
        self._vain_line = 0.0  # oldest line that waited at the last wait in vain: while it is there, nobody waits
        self._warned_at = float("-inf")

    def take(self, line: str, timeout: float | None) -> bool:
        """Take a line, or count it as dropped. Under the lock.

        Args:
            timeout: Seconds to wait for room; None waits for `self.timeout`, and not again until some lines left.

        Raises:
            Closed: the client was closed, also while waiting.
        """
        if self._add(line) or self._wait_for_room(line, timeout):
            self._session.schedule.is_dirty = True
            return True
        self._session.counts.dropped_lines += 1
        return False

    def warns(self) -> bool:
        """Whether to warn that a line was dropped: once in a while. Under the lock."""
        now = self._waiting.now()
        if now < self._warned_at + WARN_INTERVAL:
            return False
        self._warned_at = now
        return True

    def _add(self, line: str) -> bool:
        return self._session.outbox.add(line, self._session.label, self._clock()) > 0

    def _wait_for_room(self, line: str, timeout: float | None) -> bool:
        outbox = self._session.outbox
        # Whoever logs each step would be as slow as one line a second while the server is away.
        if self._is_inside() or (timeout is None and outbox.oldest == self._vain_line):
            return False
        deadline = self._waiting.now() + (self.timeout if timeout is None else timeout)
        if self._waiting.until(lambda: self._add(line), deadline, self._waiting.check_open, self._ask):
            return True
        if timeout is None:
            self._vain_line = outbox.oldest
        return False

    def _ask(self) -> None:
        schedule = self._session.schedule
        schedule.asked_line = max(schedule.asked_line, self._session.outbox.newest)
        self._waiting.wake()
