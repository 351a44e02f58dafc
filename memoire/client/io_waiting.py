"""How calls wait for a client's thread: one lock, one condition, the clock, and whether the client is open."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from memoire.arguments import seconds
from memoire.errors import Closed, ForkedError

from .session import Session


class Waiting:
    """The lock of everything that calls and the thread share, and its condition: notified at each answer, at close and
    when something fails.

    Args:
        request_timeout: Seconds that a call takes at most unless it says otherwise.
    """

    def __init__(self, session: Session, request_timeout: float) -> None:
        self.changed = threading.Condition()
        self.wake: Callable[[], None] = lambda: None
        """Has the thread take a turn; the thread sets it."""
        self.is_closing = False
        """close() was called: calls raise Closed."""
        self.is_parting = False
        """But episodes that are open in writers still leave."""
        self.closed_by = float("inf")
        """Until then."""
        self._session, self._request_timeout, self._pid = session, request_timeout, os.getpid()

    def now(self) -> float:
        """Seconds, as deadlines count them."""
        return time.monotonic()

    def seconds(self, timeout: float | None) -> float:
        """How long a call may take, as its caller says."""
        return seconds(timeout, self._request_timeout)

    def left(self, deadline: float) -> float:
        """Seconds until a deadline; 0 after it."""
        return max(0.0, deadline - time.monotonic())

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the client's: the lock may be held for ever, by a thread that is not
        here.
        """
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ForkedError in a process forked from the client's. Before each use of the lock that does not come
        through the client itself.
        """
        if self.is_forked:
            raise ForkedError("this client", self._pid, os.getpid())

    def check_open(self) -> None:
        """Raise Closed, or what the client failed of."""
        self.check_process()
        if self.is_closing:
            raise Closed("this client")
        if self._session.failed is not None:
            raise self._session.failed

    def check_shipping(self) -> None:
        """`check_open`, but what writers hold when the client is closed leaves before it ends."""
        if not self.is_parting:
            self.check_open()

    def until(
        self,
        is_done: Callable[[], bool],
        deadline: float,
        check: Callable[[], None],
        before: Callable[[], None] | None = None,
    ) -> bool:
        """Wait for something that the thread brings about; False at the deadline. Under the lock.

        Args:
            check: Called after each wait: raises where it is in vain.
            before: Called before each wait; None has the thread take a turn.
        """
        while not is_done():
            left = deadline - time.monotonic()
            if left <= 0.0:
                return False
            (before or self.wake)()
            self.changed.wait(left)
            check()
        return True
