"""Counts the Python opcodes that a call executes: work for each sample would show as more of them for more samples."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Opcodes:
    """Counts in the calling thread, or in every thread that starts while this is entered.

    A thread traces the frames that it enters after it was started; `only` leaves out all frames but those named and what
    they call, so that the waiting loop around them, which turns as often as the clock wants, does not count.
    """

    def __init__(self, only: str | None = None) -> None:
        self.only = only
        self.executed = 0
        self.calls = 0
        """How often the function named `only` was entered."""

    def __enter__(self) -> "Opcodes":
        threading.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        threading.settrace(None)  # type: ignore[arg-type]

    def of(self, call: Callable[[], Any]) -> int:
        """Opcodes that `call` executes in this thread."""
        before = self.executed
        previous = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(previous)
        return self.executed - before

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._counts(frame):
            return None
        if frame.f_code.co_name == self.only:
            self.calls += 1
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self.executed += 1
        return self._step

    def _counts(self, frame: FrameType) -> bool:
        at: FrameType | None = frame
        while self.only is not None and at is not None and at.f_code.co_name != self.only:
            at = at.f_back
        return at is not None
