"""Counts the Python opcodes that a call executes: work for each sample would show as more of them for more samples."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Opcodes:
    """Counts in the calling thread, or in every thread that starts while this is entered.

    A thread traces the frames that it enters after it was started; `only` leaves out all frames but those named and what
    they call, so that the waiting loop around them, which turns as often as the clock wants, does not count. `without`
    leaves out one function and what it calls.
    """

    def __init__(self, only: str | None = None, without: str | None = None) -> None:
        self.only, self.without = only, without
        self.executed = 0
        self.each: list[int] = []
        """What each call of the function named `only` executed."""

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
        if frame.f_code.co_qualname == self.only:
            self.each.append(0)
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self.executed += 1
            if self.each:
                self.each[-1] += 1
        return self._step

    def _counts(self, frame: FrameType) -> bool:
        names = set()
        at: FrameType | None = frame
        while at is not None:
            names.add(at.f_code.co_qualname)
            at = at.f_back
        return (self.only is None or self.only in names) and self.without not in names
