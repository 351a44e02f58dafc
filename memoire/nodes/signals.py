"""The signals that ask a process to end: taken over for a while, heard by whoever waits, and given back.

One thread waits in `select` or on a selector for `SignalWatch.fileno`; a signal makes it readable at once, whichever
thread the interpreter happens to run. Handlers only set flags: one that took a lock could wait for the thread that it
interrupts.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable
from types import FrameType

REPEAT_AFTER = 0.5
"""Seconds after which a second signal means another one: whoever signals a group and its leader sends the first twice.
"""


class SignalWatch:
    """Which signal asked this process to end, and a descriptor that says so. Make it in the main thread.

    Args:
        numbers: Signals that ask for an end.
        on_repeat: Called in the handler, with the signal, when one comes again later.
        wakes: Signals that only wake whoever waits.
        repeat_after: Seconds after which a second signal means another one.

    Attributes:
        first: The signal that came first; None before.
        is_urgent: Another one came after it.
    """

    def __init__(
        self,
        numbers: Iterable[int],
        *,
        on_repeat: Callable[[int], object] = lambda number: None,
        wakes: Iterable[int] = (),
        repeat_after: float = REPEAT_AFTER,
    ) -> None:
        self.first: int | None = None
        self.is_urgent = False
        self._first_at = 0.0
        self._repeat_after = repeat_after
        self._on_repeat = on_repeat
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._on_signal) for number in numbers}
        self._former |= {number: signal.signal(number, _only_wakes) for number in wakes}

    def fileno(self) -> int:
        """What is readable once a signal came, or `wake` was called, since the last `drain`."""
        return self._woken.fileno()

    def wake(self) -> None:
        """Make it readable; from any thread, and also when it is closed."""
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # closed, or full: then nobody waits, or is woken anyway

    def drain(self) -> None:
        """Make it unreadable until something comes again."""
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass

    def forget(self) -> None:
        """Take the next signal as the first."""
        self.first, self.is_urgent = None, False

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        signal.set_wakeup_fd(self._former_wakeup)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._woken.close()
        self._wake.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = number, now
        elif now - self._first_at > self._repeat_after:
            self.is_urgent = True
            self._on_repeat(number)
        # A byte of its own: another thread may have drained the interpreter's before the flag was set.
        self.wake()


def _only_wakes(number: int, frame: FrameType | None) -> None:
    """The interpreter has written to the wake-up descriptor already."""
