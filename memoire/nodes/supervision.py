"""The child's end of the line between a launched process and its launcher: readiness, reports, orders, and both ends'
death.

    launcher  ◀── {"ready": {...}}, {"report": {...}}  one JSON object a line ──  child
              ──  {"order": "finish"}  ─────────────────────────────────────▶

The line is one socket pair. The kernel ends it when either side dies, however it dies: a child notices and leaves, so
that no process is left behind even by a launcher that was killed. Whatever goes wrong on the line is its end, too: a
Unix stream is reset, not ended, where something lies unread. And in case a copy of the launcher holds its end of the
line, Linux sends SIGHUP when the launcher itself dies, which ends the line from this side. A process that nobody
launched has no line; its `LauncherLine` only turns SIGINT and SIGTERM into `stopping`.

A program that knows nothing of launchers has a `guard` in its place: it ends with its launcher, too.

The signals that ask a process to end: taken over for a while, heard by whoever waits, and given back.

One thread waits in `select` or on a selector for `SignalWatch.fileno`; a signal makes it readable at once, whichever
thread the interpreter happens to run. Handlers only set flags: one that took a lock could wait for the thread that it
interrupts.

What a process of long life and those that it has launched print: on a terminal, and in a file for each of them.
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
"""Environment variable with the launcher's `sys.path`, as JSON; taken out, so that children of this process do not see
it."""
PROGRAM = "--program"
"""What stands before a program that knows nothing of launchers."""
BEGIN = (
    f"import json, os, sys; first = json.loads(os.environ.pop({PATH!r})); "
    "sys.path[:] = first + [folder for folder in sys.path if folder not in first]; "
    "from memoire.nodes.supervision import run_child; run_child()"
)
"""`python -P -c` of a launched process, before the words of its command: it looks for modules where the launcher found
them. `python -m` looks in the working directory first of all, which may hold a folder of memoire's name: a checkout.
"""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a write to a file that takes no more, such as on a full disk."""
COLOURS = (36, 33, 32, 35, 34, 31)
"""ANSI colours of the names, one process after the other."""


def accept_all_text() -> None:
    """Have standard output and error write characters that their encoding lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(line: str, file: IO[str] | None = None) -> None:
    """Print a line at once, on standard output if no file is given.

    A line that cannot be written, such as on a full disk, is lost, and the process goes on. Standard error says so once
    for each file.

    Raises:
        BrokenPipeError: what reads the output has ended.
    """
    stream = sys.stdout if file is None else file
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        if stream is not sys.stderr and stream not in _LOST:
            _LOST.add(stream)
            note(f"output to {getattr(stream, 'name', 'a file')} cannot be written, and is lost: {error.strerror}")


def note(line: str) -> None:
    """Say something on standard error, beside what a command or its processes print."""
    say(f"memoire: {line}", sys.stderr)


_LOST: weakref.WeakSet[IO[str]] = weakref.WeakSet()
"""Files of which that was said."""


def discard() -> None:
    """Write nothing more to standard output, also not what is still in its buffer when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProcessOutput(ClosingContext):
    """Takes the lines of all processes.

    Args:
        names: Of the processes; the longest decides how far lines are moved in.
        folder: Where each process has a file NAME.log, to which lines are added; None writes no files.
        terminal: Where lines are shown; None shows none.

    Raises:
        ParameterError: the folder is none, and cannot be made.
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
            raise ParameterError(
                "--logs", folder, f"a folder that is there or can be made: {error.strerror}"
            ) from error

    def __call__(self, name: str, line: str) -> None:
        """Take a line that a process printed."""
        if self._terminal is not None:
            say(f"{self._shown(name)} {line}", self._terminal)
        if self._folder is not None:
            say(line, self._file(name))

    def close(self) -> None:
        """Close the files."""
        with contextlib.ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def _shown(self, name: str) -> str:
        text = f"{name:<{self._width}} |"
        return f"\x1b[{self._colours.get(name, 37)}m{text}\x1b[0m" if self._is_coloured else text

    def _file(self, name: str) -> IO[str]:
        assert self._folder is not None
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.log").open("a", encoding="utf-8")
        return self._files[name]


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


LINE = "MEMOIRE_TETHER"
"""Environment variable in which a launched process finds the number of the line's file descriptor."""
ORPHAN_GRACE = 4.0
"""Seconds that a child has to end by itself once its launcher is gone."""
DEATH_TIMEOUT = 0.5
"""Seconds that a program which ends waits for the end of a launcher that may be dying."""
ABANDONED = 70
"""Exit status of a child that did not."""
PR_SET_PDEATHSIG = 1
"""Number under which Linux' prctl takes the signal that a process gets at its parent's death."""


class LauncherLine(ClosingContext):
    """What a process hears from its launcher and from signals, and what it tells. Make it in the main thread, first
    thing.

    Args:
        grace: Seconds that the process has to end by itself once its launcher is gone.

    It has to end now (`stopping`) at SIGTERM or SIGINT, or when its launcher is gone. Another signal ends it at once.

    Attributes:
        finishing: The launcher ordered an orderly end ("finish"). This and `stopping` only ever become true.
    """

    def __init__(self, grace: float = ORPHAN_GRACE) -> None:
        self.finishing = False
        self._grace = grace
        self._is_cut = False  # nobody is at the other end any more
        self._line = _inherited_line()
        self._signals = SignalWatch((signal.SIGTERM, signal.SIGINT), on_repeat=_end_at_once)
        if self._line is not None:
            signal.signal(signal.SIGHUP, self._on_orphaned)  # for good, as the line
            if not _signal_with_parent(signal.SIGHUP):
                self._end_line()
            threading.Thread(target=self._listen, args=(self._line,), name="memoire-tether", daemon=True).start()

    @property
    def stopping(self) -> bool:
        """Whether the process has to end now."""
        return self._is_cut or self._signals.first is not None

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
            select.select([self._signals], [], [], timeout)
        self._signals.drain()
        return not (self.stopping or self.finishing)

    def close(self) -> None:
        """Give signals back to whoever had them. The line stays open, as long as the process lives."""
        self._signals.close()

    def _tell(self, message: dict[str, Any]) -> None:
        if self._line is None:
            return
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # nobody is there; _listen ends the process if this does not
            self._cut()

    def _listen(self, line: socket.socket) -> None:
        """Thread: take orders until the line ends; then see to it that the process does, too."""
        with contextlib.suppress(Exception):  # whatever is wrong with the line, nobody gives orders on it any more
            self._take_orders(line)
        self._cut()
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
                    self._signals.wake()

    def _on_orphaned(self, number: int, frame: FrameType | None) -> None:
        self._end_line()  # `_listen` does the rest

    def _end_line(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._line.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        self._is_cut = True
        self._signals.wake()


def run_child() -> None:
    """Run the module or program that the arguments name as the program. A program of a user's finds what `python
    FILE.py` and `python -m MODULE` find, and ends with its launcher.
    """
    is_program = sys.argv[1] == PROGRAM
    del sys.argv[: 2 if is_program else 1]
    if is_program:
        guard()
    if is_program and is_file(sys.argv[0]):
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    if is_program:
        sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def is_file(program: str) -> bool:
    """Whether a program is named by its file, and not as a module."""
    return program.endswith(".py") or os.path.isfile(program)


def guard(grace: float = ORPHAN_GRACE) -> None:
    """Have this process end with its launcher, whatever runs in it. Call it in the main thread, before that begins.

    SIGTERM ends it as Ctrl-C would, through every `with` and `finally`, with status 143; a program may handle SIGTERM
    in another way. When the launcher dies, the process gets SIGTERM, and `grace` seconds later it is killed, with all
    processes that it has started.
    """
    signal.signal(signal.SIGTERM, _leave)
    line = _inherited_line()
    if line is None:
        return
    atexit.register(_end_group_of_orphan, line)  # the first one is called last
    if not _signal_with_parent(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=_end_with, args=(line, grace), name="memoire-guard", daemon=True).start()


def _end_with(line: socket.socket, grace: float) -> NoReturn:
    """Thread: wait until the line ends; then end the process, and its group."""
    with contextlib.suppress(OSError):
        while line.recv(4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace)
    _end_group_of_orphan(line)
    os._exit(ABANDONED)


def _end_group_of_orphan(line: socket.socket) -> None:
    """End this process and all that it has started, if nobody is there any more who would."""
    # A launcher that is killed dies thread by thread: the signal of the first may come before the line ends.
    line.settimeout(DEATH_TIMEOUT)
    with contextlib.suppress(OSError):  # nothing to read: the launcher lives
        if not line.recv(1, socket.MSG_PEEK) and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would cut short what this one has begun
    raise SystemExit(128 + number)


def _end_at_once(number: int) -> NoReturn:
    os.write(2, b"memoire: told to end a second time: ending at once\n")
    os._exit(128 + number)


def _inherited_line() -> socket.socket | None:
    """The line that the launcher left in the environment; taken out, so that children of this process do not see it."""
    number = os.environ.pop(LINE, "")
    if not number:
        return None
    os.set_inheritable(int(number), False)
    line = socket.socket(fileno=int(number))
    line.setblocking(True)
    return line


def _signal_with_parent(number: int) -> bool:
    """Have the kernel send a signal when the thread that started this process ends; False where it has ended already.

    Only Linux does. A `Launcher` lives in its process' main thread, which ends with the process.
    """
    if sys.platform != "linux":
        return True
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent
