"""The child's end of the line between a launched process and its launcher: readiness, reports, orders, and both ends'
death.

    launcher  ◀── {"ready": {...}}, {"report": {...}}  one JSON object a line ──  child
              ──  {"order": "finish"}  ─────────────────────────────────────▶

The line is one socket pair. The kernel ends it when either side dies, however it dies: a child notices and leaves, so
that no process is left behind even by a launcher that was killed. Whatever goes wrong on the line is its end, too: a
Unix stream is reset, not ended, where something lies unread. And in case a copy of the launcher holds its end of the
line, Linux sends SIGHUP when the launcher itself dies, which ends the line from this side. A process that nobody
launched has no line; its `LauncherLine` only turns SIGINT and SIGTERM into `stopping`.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

LINE = "MEMOIRE_TETHER"
"""Environment variable in which a launched process finds the number of the line's file descriptor."""
ORPHAN_GRACE = 4.0
"""Seconds that a child has to end by itself once its launcher is gone."""
TWICE = 0.5
"""Seconds after which a second signal means another one: whoever signals a group and its leader sends the first twice.
"""
ABANDONED = 70
"""Exit status of a child that did not."""
PR_SET_PDEATHSIG = 1
"""Number under which Linux' prctl takes the signal that a process gets at its parent's death."""


class LauncherLine:
    """What a process hears from its launcher and from signals, and what it tells. Make it in the main thread, first
    thing.

    Args:
        grace: Seconds that the process has to end by itself once its launcher is gone.

    Attributes:
        stopping: The process has to end now: SIGTERM, SIGINT, or its launcher is gone. Another signal ends it at once.
        finishing: The launcher ordered an orderly end ("finish"). Both only ever become true.
    """

    def __init__(self, grace: float = ORPHAN_GRACE) -> None:
        self.stopping = False
        self._grace = grace
        self.finishing = False
        self._asked_at = 0.0  # when the first signal came
        self._line = _inherited_line()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        if self._line is not None:
            signal.signal(signal.SIGHUP, self._on_orphaned)  # for good, as the line
            if not _hang_up_with_parent():
                self._end_line()
            threading.Thread(target=self._listen, args=(self._line,), name="memoire-tether", daemon=True).start()

    @property
    def is_launched(self) -> bool:
        """Whether there is a launcher at the other end."""
        return self._line is not None

    def ready(self, **facts: Any) -> None:
        """Tell the launcher that this process does its work, and where."""
        self._tell({"ready": facts})

    def report(self, **facts: Any) -> None:
        """Tell the launcher how things stand; it keeps the newest value of each fact. JSON values only."""
        self._tell({"report": facts})

    def wait(self, timeout: float) -> bool:
        """Wait until something is heard, at most `timeout` seconds; whether the process should go on.

        In any thread, but in one at a time.
        """
        if not (self.stopping or self.finishing):
            select.select([self._woken], [], [], timeout)
        try:
            while self._woken.recv(64):
                pass
        except BlockingIOError:
            pass
        return not (self.stopping or self.finishing)

    def close(self) -> None:
        """Give signals back to whoever had them. The line stays open, as long as the process lives."""
        signal.set_wakeup_fd(self._former_wakeup)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._woken.close()
        self._wake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only a flag: a handler that takes a lock could wait for the thread that it interrupts. And a byte of its own,
        # since another thread's `wait` may have taken the interpreter's before the flag was set.
        now = time.monotonic()
        if self._asked_at and now - self._asked_at > TWICE:
            os.write(2, b"memoire: told to end a second time: ending at once\n")
            os._exit(128 + number)
        self._asked_at = self._asked_at or now
        self.stopping = True
        self._rouse()

    def _tell(self, message: dict[str, Any]) -> None:
        if self._line is None:
            return
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # nobody is there; _listen ends the process if this does not
            self.stopping = True
            self._rouse()

    def _listen(self, line: socket.socket) -> None:
        """Thread: take orders until the line ends; then see to it that the process does, too."""
        with contextlib.suppress(Exception):  # whatever is wrong with the line, nobody gives orders on it any more
            self._take_orders(line)
        self.stopping = True
        self._rouse()
        threading.Event().wait(self._grace)
        try:
            sys.stderr.write(f"the launcher is gone, and this process did not end within {self._grace:g} s\n")
        finally:  # the launcher may have held the other end of stderr, too
            os._exit(ABANDONED)

    def _take_orders(self, line: socket.socket) -> None:
        with line.makefile("rb") as orders:
            for order in orders:
                if json.loads(order).get("order") == "finish":
                    self.finishing = True
                    self._rouse()

    def _on_orphaned(self, number: int, frame: FrameType | None) -> None:
        self._end_line()  # `_listen` does the rest

    def _end_line(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._line.shutdown(socket.SHUT_RDWR)

    def _rouse(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # closed, or full: then nobody waits, or is woken anyway


def _inherited_line() -> socket.socket | None:
    """The line that the launcher left in the environment; taken out, so that children of this process do not see it."""
    number = os.environ.pop(LINE, "")
    if not number:
        return None
    os.set_inheritable(int(number), False)
    line = socket.socket(fileno=int(number))
    line.setblocking(True)
    return line


def _hang_up_with_parent() -> bool:
    """Have the kernel send SIGHUP when the thread that started this process ends; False where it has ended already.

    Only Linux does. A `Launcher` lives in its process' main thread, which ends with the process.
    """
    if sys.platform != "linux":
        return True
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    return os.getppid() == parent
