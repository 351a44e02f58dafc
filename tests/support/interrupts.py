"""Interrupts a call before each line, or every few opcodes, of everything that it runs in this thread, as Ctrl+C may."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

TESTS = str(Path(__file__).parent.parent)
"""The tests themselves are not interrupted."""
EVERY = int(os.environ.get("INTERRUPTED_OPCODES", "11"))
"""Of so many opcodes one is interrupted, to be done in time; INTERRUPTED_OPCODES=1 tries each of them."""
MOST = 100_000
"""Places in a call, at most: a call that never ends is an error."""


class _Interrupt:
    """Raises KeyboardInterrupt before the line or opcode number `at` that is run, once."""

    def __init__(self, at: int, opcodes: bool) -> None:
        self.at, self.opcodes, self.seen = at, opcodes, 0
        self.place = ""

    def enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename.startswith(TESTS):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = not self.opcodes, self.opcodes
        return self.pass_by

    def pass_by(self, frame: FrameType, event: str, argument: object) -> Any:
        if event in ("line", "opcode"):
            self.seen += 1
            if self.seen == self.at:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
                raise KeyboardInterrupt(self.place)
        return self.pass_by


def interrupt(call: Callable[[], Any], at: int, *, opcodes: bool = False) -> str:
    """Where the call was interrupted, at the place number `at`, from 1 on; "" once it has no such place."""
    interrupts, former = _Interrupt(at, opcodes), sys.gettrace()
    gc.disable()  # callbacks of a collection swallow what is raised in them
    sys.settrace(interrupts.enter)
    try:
        call()
    except KeyboardInterrupt:
        assert interrupts.place
    finally:
        sys.settrace(former)
        gc.enable()
    return interrupts.place


def everywhere(opcodes: bool = False) -> Iterator[Callable[[Callable[[], Any]], str]]:
    """Ways to call: each interrupts at another place, until a call ends without. They return where."""
    for at in range(1, MOST, EVERY if opcodes else 1):
        place = ""

        def way(call: Callable[[], Any], at: int = at) -> str:
            nonlocal place
            place = interrupt(call, at, opcodes=opcodes)
            return place

        yield way
        if not place:
            return
    raise AssertionError("a call without an end")
