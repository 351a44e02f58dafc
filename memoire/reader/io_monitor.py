"""The lock of a reader, and waiting at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memoire.errors import Closed, MemoireError

WAIT_INTERVAL = 0.1
"""Seconds after which a call that waits looks again, should nobody have told it: some conditions are times."""


class Monitor:
    """One lock for what calls and the reader's thread both use; every wait ends when the reader is closed or fails."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """The lock; notified at each batch, answer, failure and at close."""
        self.is_closing = False
        self.failed: MemoireError | None = None
        """Why the reader cannot be used at all."""

    def now(self) -> float:
        """The clock of all times of a reader, in seconds."""
        return time.monotonic()

    def check_open(self) -> None:
        """Raise if the reader is closed, or cannot be used."""
        if self.is_closing:
            raise Closed("this reader")
        if self.failed is not None:
            raise self.failed

    def wait(self, is_done: Callable[[], bool], patience: float, interval: float = WAIT_INTERVAL) -> bool:
        """Wait for a condition, which is asked under the lock; False when it has not come true after these seconds.

        Args:
            interval: Seconds after which it is asked again although nobody has told of a change.
        """
        deadline = self.now() + patience
        with self.changed:
            while True:
                self.check_open()
                if is_done():
                    return True
                left = deadline - self.now()
                if left <= 0:
                    return False
                self.changed.wait(min(left, interval))

    def pause(self, seconds: float) -> None:
        """Give the lock up for this long at most, or until something changes."""
        with self.changed:
            self.check_open()
            self.changed.wait(seconds)
