"""What the calls of a node and its thread share: one lock, one clock, and whether the node is open."""

from __future__ import annotations

import time
from collections.abc import Callable

from memoire import _core
from memoire.errors import Closed, MemoireError

WAIT_INTERVAL = 0.1
"""Seconds after which a call that waits looks again, should nobody have told it: some conditions are times."""


class NodeLock:
    """The lock of a node, and waiting at it: every wait ends when the node is closed or fails.

    Args:
        called: What errors call the node.
    """

    def __init__(self, called: str) -> None:
        self._changed = _core.Condition()
        self.wake: Callable[[], None] = lambda: None
        """Has the thread take a turn; the thread may set it."""
        self.is_closing = False
        """close() was called: calls raise Closed."""
        self.failed: MemoireError | None = None
        """Why the node cannot be used at all; for good."""
        self._called = called

    @property
    def changed(self) -> _core.Held:
        """The lock; notified at each answer, when something fails, and at close."""
        return _core.Held(self._changed)

    def now(self) -> float:
        """The clock of all times of the node, in seconds."""
        return time.monotonic()

    def left(self, deadline: float) -> float:
        """Seconds until a deadline; 0 after it."""
        return max(0.0, deadline - time.monotonic())

    def check_open(self) -> None:
        """Raise Closed, or what the node failed of."""
        if self.is_closing:
            raise Closed(self._called)
        if self.failed is not None:
            raise self.failed

    def until(
        self,
        is_done: Callable[[], bool],
        deadline: float,
        check: Callable[[], None] | None = None,
        before: Callable[[], None] | None = None,
        interval: float = float("inf"),
    ) -> bool:
        """Wait for something that the thread brings about; False at the deadline. Under the lock.

        Args:
            check: Called after each wait: raises if it is in vain. None is `check_open`.
            before: Called before each wait; None has the thread take a turn.
            interval: Seconds after which it is asked again although nobody has told of a change.
        """
        while not is_done():
            left = self.left(deadline)
            if left <= 0.0:
                return False
            (before or self.wake)()
            self.changed.wait(min(left, interval))
            (check or self.check_open)()
        return True

    def wait(self, is_done: Callable[[], bool], patience: float, interval: float = WAIT_INTERVAL) -> bool:
        """Wait for a condition, which is asked under the lock; False when it has not come true after these seconds.

        Args:
            interval: Seconds after which it is asked again although nobody has told of a change.
        """
        deadline = self.now() + patience
        with self.changed:
            self.check_open()
            return self.until(is_done, deadline, interval=interval)

    def pause(self, seconds: float) -> None:
        """Give the lock up for this long at most, or until something changes."""
        with self.changed:
            self.check_open()
            self.changed.wait(seconds)
