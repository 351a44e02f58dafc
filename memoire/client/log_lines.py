"""How a log line gets into the outbox: at once while there is room, or after a wait that is not made twice."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .io_client_lock import ClientLock
from .session import Session

_log = logging.getLogger(__name__)

WARN_INTERVAL = 60.0
"""Seconds between two warnings that lines are dropped."""


class LogLines:
    """Takes log lines of any thread.

    Args:
        timeout: Seconds to wait for room, unless a caller says otherwise.
        clock: Seconds since 1970.
        is_inside: Whether the caller is the client's own thread, which must not wait for itself.
        silent: Seconds since the home was heard.
    """

    def __init__(
        self,
        session: Session,
        waiting: ClientLock,
        timeout: float,
        clock: Callable[[], float],
        is_inside: Callable[[], bool],
        silent: Callable[[], float],
    ) -> None:
        self.timeout = timeout
        self._session, self._waiting, self._clock = session, waiting, clock
        self._is_inside, self._silent = is_inside, silent
        self._vain_line = 0.0  # oldest line that waited at the last wait in vain: while it is there, nobody waits
        self._warn_at = float("-inf")  # when a warning may come again

    def log(self, line: str, timeout: float | None) -> bool:
        """Take a line; False, and once in a while a warning, if there is no room for it.

        Args:
            timeout: Seconds to wait for room; None waits for `self.timeout`, and not again until some lines left.

        Raises:
            Closed: the client was closed while this call waited.
        """
        with self._waiting.changed:
            if self._add(line) or self._wait_for_room(line, timeout):
                self._session.schedule.is_dirty = True
                return True
            self._session.counts.dropped_lines += 1
            dropped, now = self._session.counts.dropped_lines, self._waiting.now()
            if now < self._warn_at:
                return False
            self._warn_at = now + WARN_INTERVAL
        self._warn(dropped)  # never under the lock: a handler of the log may wait for somebody who waits for that
        return False

    def _warn(self, dropped: int) -> None:
        session = self._session
        _log.warning(
            "client %s: %d lines in all were not taken by log(): %d wait for server %r at %s, last heard %.1f s ago",
            session.shown,
            dropped,
            len(session.outbox),
            session.told.home_name,
            session.endpoint,
            self._silent(),
        )

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
