"""Interrupts of a call before each line, or every few opcodes, that runs in this thread, as by Ctrl+C."""

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

Call = Callable[[Any], Any]

TESTS = str(Path(__file__).parent.parent)
"""Folder whose code is not interrupted."""
EVERY = int(os.environ.get("INTERRUPTED_OPCODES", "127"))
"""Distance between interrupted opcodes, to limit the time; INTERRUPTED_OPCODES=1 interrupts at each opcode."""
MOST = 100_000
"""Largest number of places in a call; more mean that the call never ends."""


class _Interrupt:
    """Trace function that raises KeyboardInterrupt once, before the line or opcode number `at`."""

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
    """Interrupt a call at place number `at`, from 1 on; return the place, or "" if the call ended before."""
    interrupts, former = _Interrupt(at, opcodes), sys.gettrace()
    gc.disable()  # callbacks of the garbage collector swallow exceptions
    sys.settrace(interrupts.enter)
    try:
        call()
    except KeyboardInterrupt:
        assert interrupts.place
    finally:
        sys.settrace(former)
        gc.enable()
    return interrupts.place


def everywhere(opcodes: bool = False, every: int = 1) -> Iterator[Callable[[Callable[[], Any]], str]]:
    """Yield functions that run a call and interrupt it, each at a later place, until a call ends uninterrupted.

    Each function returns the place. `every` is the distance between interrupted lines.
    """
    for at in range(1, MOST, EVERY if opcodes else every):
        place = ""

        def way(call: Callable[[], Any], at: int = at) -> str:
            nonlocal place
            place = interrupt(call, at, opcodes=opcodes)
            return place

        yield way
        if not place:
            return
    raise AssertionError("a call without an end")


def check_whole(make, call, ways, *, opcodes: bool, waits: tuple[str, ...] = (), every: int = 1) -> None:
    """Interrupt a call at each place; assert that its outcome is as if the call had been made, or had not.

    Args:
        make: Returns an object with a `writer`, which the call gets. The object's `go_on(calls)` makes further calls,
            keeps errors of memoire, and returns the object; `outcome()` maps names to all that can be told apart.
            Another thread has to be able to take its `locks()`.
        ways: Lists of calls made after the interrupted one; each place of an interrupt takes the next list in turn.
        waits: Names in the outcome that tell of waiting, which an interrupt may end: each may be of either outcome.
        every: See `everywhere`.
    """
    known = [(then, make().go_on(then).outcome(), make().go_on((call, *then)).outcome()) for then in ways]
    left: dict[str, Any] = {}
    for number, interrupted in enumerate(everywhere(opcodes, every)):
        tried = make()
        place = interrupted(lambda tried=tried: call(tried.writer))
        left[place] = tried
        then, *both = known[number % len(known)]
        outcome = tried.go_on(then).outcome()
        names = outcome.keys() | both[0].keys() | both[1].keys()
        wrong = {name: [each.get(name) for each in (outcome, *both)] for name in names}
        wrong = {name: values for name, values in wrong.items() if values[0] not in values[1:]}
        is_whole = any(all(outcome.get(name) == each.get(name) for name in names - {*waits}) for each in both)
        assert is_whole and not wrong, f"interrupted at {place}, neither as before nor as after: {wrong or 'mixed'}"
    taken = _taken(left.values())
    assert taken == len(left), f"stays locked, interrupted at {list(left)[taken]}"


def _taken(tried: Iterable[Any]) -> int:
    """Return the number of objects whose locks another thread can take."""
    done: list[Any] = []

    def take() -> None:
        for each in tried:
            with ExitStack() as stack:
                for lock in each.locks():
                    stack.enter_context(lock)
                done.append(each)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(10.0)
    return len(done)
