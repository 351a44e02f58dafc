"""A cluster on one machine: nodes and actors as child processes that are ready when they say so, are started again when
they die, and never outlive us.

Each child has a line to this process (see `supervision`): through it the child says that it is ready, and reports;
through its end either side notices that the other has died. So nothing here sleeps and hopes, and no process is left
behind when this one is interrupted, terminated, or killed.

    with Launcher() as launcher:
        child = launcher.start("server-0", "memoire", "server", "--endpoint", "tcp://127.0.0.1:0")
        launcher.await_ready([child])          # raises ChildDied with the child's last words
        while launcher.pump(1.0):              # False once this process is asked to end
            print(child.reports)               # reports arrive

One launched process, as its launcher knows it, and how it is begun.

A *node* is a module of memoire, or one that knows what a launcher is: it says when it is ready (see `supervision`). A
*program* is any Python file or module: it counts as ready once it has run for a few seconds.

When a process that died is started again: after longer and longer pauses, and not if it cannot start at all.

Decides only; `launch` starts and ends processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from memoire.arguments import ClosingContext
from memoire.errors import ChildDied, MemoireTimeout

from .supervision import BEGIN, LINE, PATH, PROGRAM, SignalWatch

MIN_PAUSE = 0.5
"""Seconds between a death and the next start; each further death in a row doubles them."""
MAX_PAUSE = 30.0
MIN_UPTIME = 60.0
"""Seconds of work after which former deaths are forgotten."""
MAX_FAILED_STARTS = 5
"""Starts in a row that come to nothing before a process that has worked is given up."""


class Restarts:
    """The deaths of one process, and when it is to be started next.

    Args:
        most: Deaths in a row, each less than `MIN_UPTIME` seconds after it began to work, that are followed by another
            start; None sets no limit.

    Attributes:
        due: When it is to be started again; None while it runs, or is given up.
        count: How often that was decided.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.due: float | None = None
        self.count = 0
        self._has_worked = False
        self._ready_since: float | None = None
        self._deaths = 0  # in a row
        self._failed_starts = 0  # in a row

    def started(self) -> None:
        """It was started."""
        self.due = None

    def ready(self, now: float) -> None:
        """It does its work."""
        if self._ready_since is None:
            self._has_worked, self._ready_since, self._failed_starts = True, now, 0

    def died(self, now: float, *, is_killed: bool = False) -> float | None:
        """Take in a death; seconds until it is to be started again, None where that is of no use.

        Args:
            is_killed: A signal ended it: that says nothing about whether it can start.
        """
        if self._ready_since is None:
            self._failed_starts += 1
        elif now - self._ready_since >= MIN_UPTIME:
            self._deaths = 0
        self._ready_since = None
        cannot_start = not (self._has_worked or is_killed) or self._failed_starts >= MAX_FAILED_STARTS
        if cannot_start or (self._most is not None and self._deaths >= self._most):
            return None
        pause = min(MAX_PAUSE, MIN_PAUSE * 2.0**self._deaths)
        self._deaths += 1
        self.count += 1
        self.due = now + pause
        return pause

    def is_due(self, now: float) -> bool:
        """Whether to start it now."""
        return self.due is not None and now >= self.due


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

    process: subprocess.Popen[bytes]
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
        kind = (PROGRAM,) if self.is_program else ()
        return [sys.executable, "-u", "-P", "-c", BEGIN, *kind, *self.next_command]

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
    return {LINE: str(line.fileno()), PATH: json.dumps(sys.path)}


READY_TIMEOUT = 90.0
"""Seconds that children have to become ready."""
STOP_GRACE = 10.0
"""Seconds that each group of children has to end before it is killed."""


class Launcher(ClosingContext):
    """Starts children, hears them, and ends them all: together with itself at the latest.

    Takes over SIGINT and SIGTERM while it is open: they end `pump` and `await_ready` orderly. For the main thread only.

    Args:
        on_output: Called with (child's name, line) for each line that a child prints; None only keeps the last ones.
        say: Called with a line about each child that is started again.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        on_output: Callable[[str, str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.children: list[Child] = []
        self._on_output, self._clock, self._say = on_output, clock, say
        self._selector = selectors.DefaultSelector()
        self._signals = SignalWatch((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), wakes=(signal.SIGCHLD,))
        self._selector.register(self._signals, selectors.EVENT_READ, None)
        self._is_closed = False

    @property
    def stop_signal(self) -> int | None:
        """The signal that asked this process to end."""
        return self._signals.first

    def forget_signal(self) -> None:
        """Go on although this process was asked to end; the next signal counts."""
        self._signals.forget()

    # ---------------------------------------------------------------------------------------------- starting

    def start(self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """Start `python -m module arguments` as a child with this process' interpreter; returns at once.

        The child finds the modules that this process finds, whatever the working directory holds. Its standard input is
        empty; its output and error are one stream, kept here. A group of its own keeps Ctrl-C on the terminal away from
        it: this process hears it, and ends the children in order.
        """
        usual = {"MEMOIRE_NAME": name} | dict.fromkeys(ONE_THREAD, "1")
        child = Child(name, (module, *arguments), usual | dict(environment or {}))
        return self._add(child)

    def start_program(
        self, name: str, words: Iterable[str], environment: Mapping[str, str], ready_after: float = PROGRAM_READY
    ) -> Child:
        """Start a Python file, or a module by its dotted name, with its arguments, as `python` would; returns at once.

        It need not know that it is launched: it is ready when it has run for `ready_after` seconds. When it ends, all
        processes end that it has started. The rest is as with `start`.
        """
        child = Child(name, tuple(words), {"MEMOIRE_NAME": name} | dict(environment))
        child.ready_after = ready_after
        return self._add(child)

    def _add(self, child: Child) -> Child:
        self._begin(child)
        self.children.append(child)
        return child

    def supervise(
        self,
        children: Iterable[Child],
        again: Callable[[dict[str, Any]], tuple[str, ...]] | None = None,
        most: int | None = None,
    ) -> None:
        """Start `children` again when they die, once they have been ready (`pump` does); say so before they are.

        Args:
            again: Arguments that are added then, by what the child said when it was ready: an address, so that others
                find it where it was.
            most: Deaths in a row that are followed by another start, see `Restarts`.
        """
        for child in children:
            child.restarts, child.again = Restarts(most), again or child.again

    def abandon(self, children: Iterable[Child]) -> None:
        """Start these never again: what they have done counts."""
        for child in children:
            child.is_stopping |= child.restarts is not None and child.restarts.due is not None
            child.restarts = None

    def await_ready(self, children: Iterable[Child], timeout: float = READY_TIMEOUT) -> bool:
        """Wait until all of `children` said that they are ready; False when this process is asked to end meanwhile.

        Raises:
            ChildDied: one of them ended instead; its last words are in the message.
            MemoireTimeout: one of them said nothing for `timeout` seconds.
        """
        deadline = self._clock() + timeout
        while waiting := [child for child in children if child.facts is None]:
            left = deadline - self._clock()
            if left <= 0:
                late = waiting[0]
                advice = "Its last words: " + (" | ".join(late.tail) or "(none)") + ". Is the machine overloaded?"
                raise MemoireTimeout("readiness", late.name, timeout, advice)
            if not self.pump(left):
                return False
        return True

    # ----------------------------------------------------------------------------------------------- running

    def pump(self, timeout: float) -> bool:
        """Wait for news of the children, at most `timeout` seconds, and take it in; False once we are asked to end.

        Raises:
            ChildDied: a child ended that was not told to, and is not supervised, or cannot start. One that ends with
                status 0 is fine.
        """
        if self.stop_signal is None:
            self._take(min([timeout, *(at - self._clock() for child in self.children for at in _due(child))]))
        for child in self.children:
            if self.stop_signal is None and child.restarts and child.restarts.due is not None:
                self._start_again(child, child.restarts)
            elif not child.is_stopping:
                self._look_after(child)
        return self.stop_signal is None

    def wait_for(self, children: Iterable[Child], timeout: float) -> bool:
        """Wait until all of `children` have ended by themselves; False when one still runs after `timeout` seconds."""
        deadline = self._clock() + timeout
        while any(child.status is None for child in children):
            if self._clock() >= deadline or not self.pump(min(0.5, deadline - self._clock())):
                return False
        for child in children:
            self._listen_out(child)
        return True

    # ------------------------------------------------------------------------------------------------ ending

    def stop(self, children: Iterable[Child], grace: float = STOP_GRACE) -> None:
        """End `children` together: SIGTERM, and SIGKILL for those that still run after `grace` seconds, or when this
        process is asked to end once more.
        """
        group = list(children)
        for child in group:
            child.is_stopping = True
            child.process.terminate()
        deadline = self._clock() + grace
        while any(child.status is None for child in group) and self._clock() < deadline:
            if self._signals.is_urgent:
                break
            self._take(min(0.2, deadline - self._clock()))
        for child in group:
            child.kill()
            self._listen_out(child)

    def close(self, grace: float = STOP_GRACE) -> None:
        """End all children, the newest first: actors can still say goodbye to proxies, and these to servers."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for group in _by_kind(self.children):
                self.stop(group, grace)
        finally:
            for child in self.children:  # also when somebody interrupted the orderly end
                child.kill()
                child.line.close()
                child.output.close()
            self._selector.close()
            self._signals.close()

    # ----------------------------------------------------------------------------------------------- its parts

    def _begin(self, child: Child) -> None:
        """Start a process for a child, and listen to it."""
        child.begin(self._clock())
        self._selector.register(child.line, selectors.EVENT_READ, (child, "line"))
        self._selector.register(child.output, selectors.EVENT_READ, (child, "output"))

    def _look_after(self, child: Child) -> None:
        """See whether a child works, and what to do if it has died."""
        if child.status is None:
            self._see_work(child)
        elif child.status != 0 and not (child.may_die and child.restarts is None):
            self._listen_out(child)
            self._see_death(child)

    def _see_work(self, child: Child) -> None:
        now, restarts = self._clock(), child.restarts
        if child.ready_at is not None and now >= child.ready_at:
            child.facts = {}
        if restarts is None:
            return
        if child.facts is not None:
            restarts.ready(now)
        elif restarts.count and now - child.started_at > READY_TIMEOUT:
            child.kill()  # its start came to nothing

    def _see_death(self, child: Child) -> None:
        """Decide when it is started again. Raises ChildDied where it is not, and the others need it."""
        now, restarts = self._clock(), child.restarts
        if restarts is not None and child.facts is not None:
            restarts.ready(now)  # it was, for a moment
        pause = None if restarts is None else restarts.died(now, is_killed=child.process.returncode < 0)
        died = ChildDied(child.name, child.process.returncode, tuple(child.tail))
        if pause is not None:
            self._say(f"{child.name} {died.how}; it is started again in {pause:g} s{_last(child.tail)}")
        elif child.may_die:
            child.restarts = None
            self._say(f"{child.name} {died.how}, and is not started again{_last(child.tail)}")
        else:
            raise died

    def _start_again(self, child: Child, restarts: Restarts) -> None:
        if restarts.is_due(self._clock()):
            self._forget(child)
            self._begin(child)
            restarts.started()

    def _forget(self, child: Child) -> None:
        """Close what is left of a dead process."""
        for end in (child.line, child.output):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            end.close()

    def _reap_orphans(self) -> None:
        """As process 1, as in a container, wait for processes that children have left behind and that have ended."""
        own = {child.process.pid for child in self.children}
        while os.getpid() == 1:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in own:  # the launcher waits for its own
                return
            os.waitpid(ended.si_pid, os.WNOHANG)

    def _take(self, timeout: float) -> None:
        """Read what there is to read, waiting for the first of it."""
        self._reap_orphans()
        for key, _ in self._selector.select(max(0.0, timeout)):
            if key.data is None:
                self._signals.drain()
            else:
                self._read(*key.data)

    def _read(self, child: Child, source: str) -> bool:
        """Take in what a child said on its "line" or printed; whether more may come."""
        end: socket.socket | IO[bytes] = child.line if source == "line" else child.output
        try:
            data = os.read(end.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        except ConnectionResetError:  # it died with an order unread
            data = b""
        more = bool(data)
        if not data and source == "output":
            data = b"\n"  # the last line may lack its end
        for text in child.lines(source, data):
            if source == "output":
                self._heard(child, text.decode(errors="replace").rstrip())
            else:
                _told(child, json.loads(text))
        if not more:
            self._selector.unregister(end)
            child.await_end(1.0)  # its files are closed, so it is as good as gone: let `status` say so
        return more

    def _heard(self, child: Child, line: str) -> None:
        if line:
            child.tail.append(line)
            if self._on_output is not None:
                self._on_output(child.name, line)

    def _listen_out(self, child: Child) -> None:
        """Take in all that a dead child has left in its pipes."""
        for source, end in (("line", child.line), ("output", child.output)):
            while end in self._selector.get_map() and _has_data(end):
                self._read(child, source)


def _has_data(end: socket.socket | IO[bytes]) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(end, selectors.EVENT_READ)
        return bool(selector.select(0))


def _by_kind(children: Iterable[Child]) -> list[list[Child]]:
    """Children by the kind in their name ("server-0"), the newest kind first."""
    kinds: dict[str, list[Child]] = {}
    for child in children:
        kinds.setdefault(child.name.rpartition("-")[0] or child.name, []).append(child)
    return list(reversed(kinds.values()))


def _due(child: Child) -> Iterable[float]:
    """When this child wants to be looked at, though nothing is heard of it."""
    if child.restarts is not None and child.restarts.due is not None:
        yield child.restarts.due
    elif child.ready_at is not None:
        yield child.ready_at


def _last(tail: Iterable[str]) -> str:
    """The last line of a child's output, as the end of a sentence about it."""
    said = [line.strip() for line in tail]
    return f" (its last words: {said[-1]})" if said else ""


def _told(child: Child, message: dict[str, Any]) -> None:
    if "ready" in message:
        child.facts = message["ready"]
    child.reports.update(message.get("report", {}))
