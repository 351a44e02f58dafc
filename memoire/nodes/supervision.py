"""Child's end of the socket to its launcher, and signals and output of launched processes.

    launcher  ◀── {"ready": {...}}, {"report": {...}}  one JSON object a line ──  child
              ──  {"order": "finish"}  ─────────────────────────────────────▶

The line is one socket pair. The kernel ends the line when either side dies, for whatever reason: the child notices and
ends, so that even a killed launcher leaves no process behind. Every error on the line counts as its end: a Unix stream
is reset, not ended, if data lies unread. A copy of the launcher may hold the launcher's end of the line open. For that
case Linux sends SIGHUP to the child when the launcher itself dies, and the child ends the line from its side. A process
without a launcher has no line; its `LauncherLine` only turns SIGINT and SIGTERM into `stopping`.

A program that does not use a `LauncherLine` calls `end_with_launcher` instead, which also ends it with its launcher.

`SignalWatch` takes over the signals that ask a process to end, and restores the former handlers at its end. One thread
waits in `select` or on a selector for `SignalWatch.fileno`; a signal makes the descriptor readable at once, whichever
thread the interpreter runs. Handlers only set flags: a handler that took a lock could wait for the thread that it
interrupts.

`ProcessOutput` shows what launched processes print on a terminal, and writes a file for each process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from memoire.arguments import ClosingContext
from memoire.errors import ParameterError

PATH = "MEMOIRE_PATH"
"""Environment variable with the launcher's `sys.path` as JSON; removed at the child's start, before its own children.
"""
PROGRAM = "--program"
"""Word before the name of a program, which does not report to its launcher."""
BEGIN = (
    f"import json, os, sys; first = json.loads(os.environ.pop({PATH!r})); "
    "sys.path[:] = first + [folder for folder in sys.path if folder not in first]; "
    "from memoire.nodes.supervision import run_child; run_child()"
)
"""Code for `python -P -c` of a launched process, before the words of its command. The child searches the launcher's
`sys.path`. `python -m` would search the working directory first, which may be a checkout with a folder memoire.
"""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a write to a file that cannot grow, such as on a full disk."""
COLOURS = (36, 33, 32, 35, 34, 31)
"""ANSI colours of the processes' names, used in turn."""


def accept_all_text() -> None:
    """Make standard output and error write characters outside of their encoding as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_line(line: str, file: IO[str] | None = None) -> None:
    """Print a line and flush it, to standard output if no file is given.

    A line that cannot be written, such as on a full disk, is lost without an error. Standard error reports the loss
    once for each file.

    Raises:
        BrokenPipeError: the process that reads the output has ended.
    """
    stream = sys.stdout if file is None else file
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        if stream is not sys.stderr and stream not in _LOST:
            _LOST.add(stream)
            print_note(
                f"output to {getattr(stream, 'name', 'a file')} cannot be written, and is lost: {error.strerror}"
            )


def print_note(line: str) -> None:
    """Print a line to standard error, apart from the output of a command and its processes."""
    print_line(f"memoire: {line}", sys.stderr)


_LOST: weakref.WeakSet[IO[str]] = weakref.WeakSet()
"""Files whose losses were reported."""


def discard_output() -> None:
    """Discard standard output from now on, including the buffer that Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProcessOutput(ClosingContext):
    """Output of all processes of a run, on a terminal and in files.

    Args:
        names: Names of the processes; the longest sets the width of the name column.
        folder: Folder in which each process has a file NAME.log that grows; None writes no files.
        terminal: Stream on which lines are shown; None shows none.

    Raises:
        ParameterError: the folder does not exist and cannot be made, or is not a folder.
    """

    def __init__(self, names: list[str], folder: str | None = None, terminal: IO[str] | None = None) -> None:
        self._width = max(map(len, names), default=0)
        self._colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
        self._terminal = terminal
        self._is_coloured = terminal is not None and terminal.isatty() and not os.environ.get("NO_COLOR")
        self._folder = None if folder is None else Path(folder).absolute()
        self._files: dict[str, IO[str]] = {}
        try:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ParameterError.with_text(
                f"--logs: the folder {str(folder)!r} cannot be created: {error.strerror}."
            ) from error

    def __call__(self, name: str, line: str) -> None:
        """Show and write a line that a process printed."""
        if self._terminal is not None:
            print_line(f"{self._label(name)} {line}", self._terminal)
        if self._folder is not None:
            print_line(line, self._file(name))

    def close(self) -> None:
        """Close the files of all processes."""
        with contextlib.ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def _label(self, name: str) -> str:
        text = f"{name:<{self._width}} |"
        return f"\x1b[{self._colours.get(name, 37)}m{text}\x1b[0m" if self._is_coloured else text

    def _file(self, name: str) -> IO[str]:
        assert self._folder is not None
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.log").open("a", encoding="utf-8")
        return self._files[name]


REPEAT_AFTER = 0.5
"""Seconds after which a second signal counts as another request. A sender that signals both a process group and its
leader sends the first request twice."""


class SignalWatch:
    """Watch for signals that ask this process to end, with a file descriptor to wait on. Make it in the main thread.

    Args:
        numbers: Signals that ask for an end.
        on_repeat: Called in the handler with the signal number, for each later request.
        wakes: Signals that only make the descriptor readable.
        repeat_after: Seconds after the first signal after which another one counts as a new request.

    Attributes:
        first: The first signal; None before.
        is_urgent: True once another request came after the first.
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
        self._receiver, self._wake = socket.socketpair()
        for end in (self._receiver, self._wake):
            end.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._on_signal) for number in numbers}
        self._former |= {number: signal.signal(number, _ignore) for number in wakes}

    def fileno(self) -> int:
        """Return the descriptor, which is readable after a signal or `wake` until the next `drain`."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Make the descriptor readable, from any thread; do nothing after `close`."""
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # closed, or full and readable

    def drain(self) -> None:
        """Make the descriptor unreadable until the next signal or `wake`."""
        try:
            while self._receiver.recv(4096):
                pass
        except BlockingIOError:
            pass

    def forget(self) -> None:
        """Forget the requests so far: the next signal counts as the first."""
        self.first, self.is_urgent = None, False

    def close(self) -> None:
        """Restore the former signal handlers."""
        signal.set_wakeup_fd(self._former_wakeup)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._receiver.close()
        self._wake.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = number, now
        elif now - self._first_at > self._repeat_after:
            self.is_urgent = True
            self._on_repeat(number)
        # The handler writes a byte: another thread may have drained the interpreter's byte before the flag was set.
        self.wake()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has written to the wake-up descriptor already."""


LINE = "MEMOIRE_TETHER"
"""Environment variable with the number of the line's file descriptor."""
ORPHAN_GRACE = 4.0
"""Seconds that a child has to end by itself after its launcher's death."""
DEATH_TIMEOUT = 0.5
"""Seconds that a program waits at its end to see whether its launcher is dying."""
ABANDONED = 70
"""Exit status of a child that did not end within its grace."""
PR_SET_PDEATHSIG = 1
"""Option of Linux' prctl that sets the signal which a process gets at its parent's death."""


class LauncherLine(ClosingContext):
    """Connection of a process to its launcher, together with the signals that ask it to end.

    Make it in the main thread, before anything else. `stopping` is set by SIGTERM or SIGINT, and by the launcher's
    death. A second signal ends the process at once.

    Args:
        grace: Seconds that the process has to end by itself after its launcher's death.

    Attributes:
        finishing: True once the launcher ordered an orderly end ("finish"); never becomes False again, like `stopping`.

    Example:
        with LauncherLine() as line:
            line.ready(endpoint="tcp://127.0.0.1:5560")
            while line.wait(1.0):
                line.report(steps=100)
    """

    def __init__(self, grace: float = ORPHAN_GRACE) -> None:
        self.finishing = False
        self._grace = grace
        self._is_cut = False  # the line has ended
        self._line = _inherited_line()
        self._signals = SignalWatch((signal.SIGTERM, signal.SIGINT), on_repeat=_end_at_once)
        if self._line is not None:
            signal.signal(signal.SIGHUP, self._on_orphaned)  # never restored: the line lives as long as the process
            if not _signal_with_parent(signal.SIGHUP):
                self._end_line()
            threading.Thread(target=self._listen, args=(self._line,), name="memoire-tether", daemon=True).start()

    @property
    def stopping(self) -> bool:
        """True if the process has to end now."""
        return self._is_cut or self._signals.first is not None

    @property
    def is_launched(self) -> bool:
        """True if a launcher started this process."""
        return self._line is not None

    def ready(self, **facts: Any) -> None:
        """Report to the launcher that this process works, with facts such as its address."""
        self._send({"ready": facts})

    def report(self, **facts: Any) -> None:
        """Report figures to the launcher, which keeps the newest value of each. JSON values only."""
        self._send({"report": facts})

    def wait(self, timeout: float) -> bool:
        """Wait for a signal or an order, at most `timeout` seconds. Return False if the process should end.

        In any thread, but only in one at a time.
        """
        if not (self.stopping or self.finishing):
            select.select([self._signals], [], [], timeout)
        self._signals.drain()
        return not (self.stopping or self.finishing)

    def close(self) -> None:
        """Restore the former signal handlers. The line stays open as long as the process lives."""
        self._signals.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self._line is None:
            return
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the launcher is gone; _listen ends the process
            self._cut()

    def _listen(self, line: socket.socket) -> None:
        """Thread: take orders until the line ends; then end the process after its grace."""
        with contextlib.suppress(Exception):  # any error on the line counts as the line's end
            self._take_orders(line)
        self._cut()
        threading.Event().wait(self._grace)
        try:
            sys.stderr.write(f"memoire: the launcher is gone; killing this process after {self._grace:g} s\n")
        finally:  # the launcher may have held the other end of stderr
            os._exit(ABANDONED)

    def _take_orders(self, line: socket.socket) -> None:
        with line.makefile("rb") as orders:
            for order in orders:
                if json.loads(order).get("order") == "finish":
                    self.finishing = True
                    self._signals.wake()

    def _on_orphaned(self, number: int, frame: FrameType | None) -> None:
        self._end_line()  # `_listen` ends the process

    def _end_line(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):  # the line has ended already
                self._line.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        self._is_cut = True
        self._signals.wake()


def run_child() -> None:
    """Run the module or program named by the arguments as `__main__`. A user's program finds the modules that `python
    FILE.py` or `python -m MODULE` would find, and ends with its launcher.
    """
    is_program = sys.argv[1] == PROGRAM
    del sys.argv[: 2 if is_program else 1]
    if is_program:
        end_with_launcher()
    if is_program and is_file(sys.argv[0]):
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    if is_program:
        sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def is_file(program: str) -> bool:
    """Return True if a program is named by its file, not as a module."""
    return program.endswith(".py") or os.path.isfile(program)


def end_with_launcher(grace: float = ORPHAN_GRACE) -> None:
    """End this process with its launcher, whatever code runs. Call it in the main thread, before that code begins.

    SIGTERM ends the process like Ctrl-C, through every `with` and `finally`, with status 143; a program may handle
    SIGTERM in another way. When the launcher dies, the process gets SIGTERM, and `grace` seconds later SIGKILL together
    with all processes that it has started.
    """
    signal.signal(signal.SIGTERM, _exit)
    line = _inherited_line()
    if line is None:
        return
    atexit.register(_end_group_of_orphan, line)  # atexit calls the first registered function last
    if not _signal_with_parent(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=_end_with, args=(line, grace), name="memoire-guard", daemon=True).start()


def _end_with(line: socket.socket, grace: float) -> NoReturn:
    """Thread: wait until the line ends; then end the process and its group."""
    with contextlib.suppress(OSError):
        while line.recv(4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace)
    _end_group_of_orphan(line)
    os._exit(ABANDONED)


def _end_group_of_orphan(line: socket.socket) -> None:
    """Kill this process and all that it has started if its launcher is dead."""
    # A launcher that is killed dies thread by thread: the signal of the first may come before the line ends.
    line.settimeout(DEATH_TIMEOUT)
    with contextlib.suppress(OSError):  # timeout without data: the launcher lives
        if not line.recv(1, socket.MSG_PEEK) and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM would interrupt the handlers of the first
    raise SystemExit(128 + number)


def _end_at_once(number: int) -> NoReturn:
    os.write(2, b"memoire: second signal: ending at once\n")
    os._exit(128 + number)


def _inherited_line() -> socket.socket | None:
    """Return the line that the launcher passed in the environment; remove the variable, which children must not see."""
    number = os.environ.pop(LINE, "")
    if not number:
        return None
    os.set_inheritable(int(number), False)
    line = socket.socket(fileno=int(number))
    line.setblocking(True)
    return line


def _signal_with_parent(number: int) -> bool:
    """Have the kernel send a signal when the thread that started this process ends. Return False if it has ended.

    Only Linux does so. A `Launcher` lives in its process' main thread, which ends with the process.
    """
    if sys.platform != "linux":
        return True
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent
