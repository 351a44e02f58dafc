"""One launched process, as its launcher knows it, and how it is begun.

A *node* is a module of memoire, or one that knows what a launcher is: it says when it is ready (see `supervision`). A
*program* is any Python file or module: it counts as ready once it has run for a few seconds.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from . import bootstrap
from .restarts import Restarts
from .supervision import LINE

LAST_LINES = 40
"""Lines of each child's output that are kept."""
LONGEST_LINE = 1 << 16
"""Bytes of output without a line's end after which a line ends there."""
POLL_INTERVAL = 0.005
"""Seconds between two looks whether a process has ended that has closed its files."""
PROGRAM_READY = 5.0
"""Seconds after which a program that runs is taken to work."""
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables of a process that is one of many on the machine: thread pools of their own would fight each other for its
cores."""


class Child:
    """One launched process, and those that took its place when it died, as their launcher knows them.

    Attributes:
        name: What it is called in messages.
        command: What it was started with: module, arguments.
        environment: Variables of its own.
        facts: What it said when it became ready; None before.
        reports: The newest value of each fact that it reported.
        tail: The last lines of its standard output and error.
        may_die: The others go on without it, whatever it ends with.
        restarts: When it is started again; None where its death is everybody's.
        again: What the command has in addition then, by what it said when it was ready.
        ready_after: Of a program, which knows nothing of its launcher: seconds of its run after which it is taken to
            work; None for one that says so.
    """

    process: "subprocess.Popen[bytes]"
    line: socket.socket
    """Its launcher's end."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self.command, self.environment = name, tuple(command), environment
        self.restarts: Restarts | None = None
        self.again: Callable[[dict[str, Any]], tuple[str, ...]] = lambda facts: ()
        self.facts: dict[str, Any] | None = None
        self.reports: dict[str, Any] = {}
        self.tail: deque[str] = deque(maxlen=LAST_LINES)
        self.is_stopping = False
        self.may_die = False
        self.ready_after: float | None = None
        self.started_at = 0.0
        self._known: dict[str, Any] = {}  # facts of the newest life that had any
        self._partial = {"line": b"", "output": b""}

    def begin(self, now: float) -> None:
        """Start a process, which is this child from now on."""
        self._known = self.facts or self._known
        self.line, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                self._interpreter(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # The pipe is read as UTF-8, whatever the terminal's encoding is.
                env={**os.environ, "PYTHONIOENCODING": "utf-8", **self.environment, **_inherited(theirs)},
                process_group=0,
            )
        os.set_blocking(self.output.fileno(), False)
        self.facts, self.started_at = None, now
        self.tail.clear()
        self._partial = {"line": b"", "output": b""}

    def _interpreter(self) -> list[str]:
        kind = (bootstrap.PROGRAM,) if self.is_program else ()
        return [sys.executable, "-u", "-P", bootstrap.__file__, *kind, *self.next_command]

    @property
    def is_program(self) -> bool:
        """Whether it knows nothing of its launcher."""
        return self.ready_after is not None

    @property
    def ready_at(self) -> float | None:
        """When it is to be taken to work, if it runs then; None if it did or says so itself."""
        if self.ready_after is None or self.facts is not None or self.status is not None:
            return None
        return self.started_at + self.ready_after

    @property
    def output(self) -> IO[bytes]:
        """What it prints: standard output and error."""
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def next_command(self) -> tuple[str, ...]:
        """What its next process is started with."""
        facts = self.facts or self._known
        return (*self.command, *(self.again(facts) if facts else ()))

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs. What it has left running ends when it does."""
        if self.process.returncode is None and _has_ended(self.process.pid):
            self._kill_group()  # while its number is still its own
        return self.process.poll()

    def await_end(self, timeout: float) -> None:
        """Wait until it has ended, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.status is None and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)

    def kill(self) -> None:
        """End it and all that it has started, now; returns when it is gone."""
        if self.status is None:
            self._kill_group()
        self.process.kill()
        self.process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group of the dead
            os.killpg(self.process.pid, signal.SIGKILL)

    def order(self, order: str) -> None:
        """Send an order; a child that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self.line.sendall(json.dumps({"order": order}).encode() + b"\n")

    def lines(self, source: str, data: bytes) -> list[bytes]:
        """Whole lines of "line" or "output", `data` added; the rest is kept for the next call.

        A carriage return begins a line of output again, as on a terminal: of a progress bar the last state is kept.
        """
        *whole, rest = (self._partial[source] + data).split(b"\n")
        if source == "output":
            *whole, rest = (text[text.rstrip(b"\r").rfind(b"\r") + 1 :] for text in (*whole, rest))
            if len(rest) > LONGEST_LINE:
                whole, rest = [*whole, rest], b""
        self._partial[source] = rest
        return whole


def _has_ended(pid: int) -> bool:
    """Whether a child of this process has ended and was not waited for yet."""
    if not hasattr(os, "waitid"):  # macOS
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _inherited(line: socket.socket) -> dict[str, str]:
    """What a child takes out of its environment at its beginning: its end of the line, and where to find modules."""
    return {LINE: str(line.fileno()), bootstrap.PATH: json.dumps(sys.path)}
