"""A worker whose turns are also taken by callers that wait for what they bring.

Otherwise a caller would wake the thread for its request, and be woken by it for the answer, which costs more than most
turns do.

    thread   turn turn │ stands aside ..................... │ turn turn
    caller             │ turn turn │ (RETURN_INTERVAL) ...  │

A ZeroMQ socket may go from one thread to another if they pass a lock on with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .thread import Worker

RETURN_INTERVAL = 0.05
"""Seconds after a caller's newest turn until the thread takes turns again: most callers are back before."""
TURN_INTERVAL = 0.1
"""Seconds after the newest turn for which callers may only look whether their answer is there."""
LOOK_INTERVAL = 0.01
"""Seconds for which one does so before it takes turns: most answers are there by then."""


def _never(deadline: float) -> bool:
    return False


class LentWorker(Worker):
    """A worker that lends its turns. Its functions never run at the same time.

    Args:
        soon: Waits for what callers mostly wait for, a moment and not beyond the deadline that it gets, and takes it
            in; returns whether to call it again. It costs less than a turn, which does everything else.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[dict[object, int]], None],
        next_time: Callable[[], float],
        at_end: Callable[[], None],
        soon: Callable[[float], bool] = _never,
    ) -> None:
        super().__init__(name, turn, next_time, at_end)
        self._soon = soon
        self._taking = threading.Lock()  # held by whoever takes a turn
        self._given_back = float("-inf")  # when a caller took the newest turn
        self._is_needed = threading.Event()  # the thread has something to do that no caller waits for
        self._lending = threading.Lock()  # the condition's
        self._turned_over = threading.Condition(self._lending)  # notified after turns, if callers wait for others'
        self._is_lent = False  # a caller takes turns, or is about to; guarded by the condition
        self._waiting = 0  # callers that wait for others' turns; likewise

    # From any thread but the worker's

    def wake(self) -> None:
        """Have somebody take a turn now."""
        super().wake()
        self._is_needed.set()

    def run(self, function: Callable[..., None], *given: object) -> None:
        """Call this now, if nobody takes a turn at this moment; as `post` does, otherwise."""
        if not self._taking.acquire(False):
            self.post(lambda: function(*given))
            return
        try:
            if not self._stopping:
                function(*given)
        finally:
            self._give_back()

    def run_and_look(
        self, function: Callable[[Any], None], given: Any, is_done: Callable[[], bool], deadline: float
    ) -> None:
        """As `run`, and wait a moment for what this brings about, before anybody else takes turns: for a caller that
        goes on with `wait_for`, to which mostly nothing is left.
        """
        if not self._taking.acquire(False):
            self.post(lambda: function(given))
            return
        try:
            if not self._stopping:
                function(given)
                self._look(lambda: is_done() or self._is_lent or self._waiting > 0, deadline)
        finally:
            self._give_back()

    def run_alone(self, function: Callable[..., Any], *given: object) -> Any:
        """Call this, which waits a moment at most, and return what it returns. None, without a call, if anybody else
        takes a turn or waits for one, or if a turn is due.
        """
        if self._posted or self._waiting or self._is_lent or time.monotonic() >= self._turned + TURN_INTERVAL:
            return None
        if not self._taking.acquire(False):
            return None
        try:
            return None if self._stopping else function(*given)
        finally:
            self._give_back()

    def wait_for(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Wait until turns have brought something about; False if they have not at `deadline`, by time.monotonic().

        The caller's thread takes the turns. If several wait, then the worker's thread does. KeyboardInterrupt may end a
        turn half way: what it would have sent or received is sent again then.
        """
        if is_done():
            return True
        with self._lending:  # by far quicker than the condition, of which it is the lock
            is_lent = not self._is_lent and not self._waiting
            self._is_lent = self._is_lent or is_lent
            self._waiting += not is_lent
        if is_lent:
            self._take_turns(is_done, deadline)
        else:
            self._wait(is_done, deadline)
        return is_done()

    def _take_turns(self, is_done: Callable[[], bool], deadline: float) -> None:
        try:
            if self._borrow(deadline):
                try:
                    self._look(is_done, deadline)
                    while not (is_done() or self._stopping):
                        super()._step(deadline)
                        if self._waiting:
                            self._tell()
                        if time.monotonic() >= deadline:
                            break
                finally:
                    self._give_back()
        finally:
            self._is_lent = False
        if self._stopping:  # the thread ends what is open
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Wait a moment for what most callers wait for, unless a turn is due that does the rest."""
        try:
            last = min(self._turned + TURN_INTERVAL, time.monotonic() + LOOK_INTERVAL)
            while not (is_done() or self._posted) and time.monotonic() < last:
                if not self._soon(deadline):
                    break
        except Exception:
            self._failed()
        if self._waiting:
            self._tell()

    def _wait(self, is_done: Callable[[], bool], deadline: float) -> None:
        self._is_needed.set()
        with self._turned_over:
            try:
                self._turned_over.wait_for(is_done, max(0.0, deadline - time.monotonic()))
            finally:
                self._waiting -= 1

    def _borrow(self, deadline: float) -> bool:
        if self._taking.acquire(False):
            return True
        self.doors.waker.wake()
        return self._taking.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _give_back(self) -> None:
        self._given_back = time.monotonic()
        self._taking.release()

    def _tell(self) -> None:
        with self._turned_over:
            self._turned_over.notify_all()

    # The thread's own turns

    def _step(self, until: float = float("inf")) -> None:
        while self._is_lent or time.monotonic() - self._given_back < RETURN_INTERVAL:
            if self._waiting or self._is_needed.wait(RETURN_INTERVAL):
                break
        self._is_needed.clear()
        with self._taking:
            if not self._stopping:
                super()._step(until)
        if self._waiting:
            self._tell()

    def _finish(self) -> None:
        with self._taking:
            super()._finish()
        self._tell()
