"""Signals that end a loop in order: the first one lets the present step end, the second one does not wait."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopSignals:
    """SIGINT and SIGTERM of a loop in the main thread; in other threads they are left alone.

    Attributes:
        number: Of the first one that came; None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Within this the first signal is only noted; afterwards it has its usual effect.

        Raises:
            KeyboardInterrupt: SIGINT came.
            SystemExit: SIGTERM came, with status 143.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        self._end()

    def _end(self) -> None:
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number is not None:
            raise SystemExit(128 + self.number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:  # the environment may never return
            raise KeyboardInterrupt
        self.number = number
