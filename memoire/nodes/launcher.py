"""Launcher of child processes, which report readiness, are restarted after a death, and end with the launcher.

Each child has a socket to this process (see `supervision`). Through the socket the child reports its readiness and
its figures, and each side notices the other's death. Nothing waits for a fixed time, and no child is left behind when
this process is interrupted, terminated or killed.

    with Launcher() as launcher:
        child = launcher.start("server-0", "memoire", "server", "--endpoint", "tcp://127.0.0.1:0")
        launcher.await_ready([child])          # raises ChildDied with the child's last lines of output
        while launcher.pump(1.0):              # False once this process is asked to end
            print(child.reports)               # reports arrive

A *node* is a module of memoire, or another module that uses a `LauncherLine` to report when it is ready (see
`supervision`). A *program* is any Python file or module: the launcher counts it as ready after some seconds of running.

`Restarts` decides when a process that died is restarted: after pauses that grow, and not if it cannot start at all.
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
"""Seconds between a death and the next start; each further death in a row doubles the pause."""
MAX_PAUSE = 30.0
MIN_UPTIME = 60.0
"""Seconds of work after which former deaths are forgotten."""
MAX_FAILED_STARTS = 5
"""Failed starts in a row after which a process that has worked before is given up."""


class Restarts:
    """Restart policy of one process: its deaths, and the time of the next start. Starts nothing itself.

    Args:
        most: Deaths in a row that are followed by another start; None sets no limit. A death ends the row if the
            process had worked for `MIN_UPTIME` seconds.

    Attributes:
        due: Time of the next start; None while the process runs, or once it is given up.
        count: Restarts that were decided.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.due: float | None = None
        self.count = 0
        self._has_worked = False
        self._ready_since: float | None = None
        self._deaths = 0  # deaths in a row
        self._failed_starts = 0  # failed starts in a row

    def started(self) -> None:
        """Record that the process was started."""
        self.due = None

    def ready(self, now: float) -> None:
        """Record that the process works."""
        if self._ready_since is None:
            self._has_worked, self._ready_since, self._failed_starts = True, now, 0

    def died(self, now: float, *, is_killed: bool = False) -> float | None:
        """Record a death. Return the seconds until the next start, or None if the process is given up.

        Args:
            is_killed: True if a signal ended the process, which does not show that it cannot start.
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
        """True if the process should be started now."""
        return self.due is not None and now >= self.due


LAST_LINES = 40
"""Lines of each child's output that are kept."""
LONGEST_LINE = 1 << 16
"""Bytes of output without a line break after which a line is cut."""
POLL_INTERVAL = 0.005
"""Seconds between two checks of a process that has closed its files but has not ended yet."""
PROGRAM_READY = 5.0
"""Seconds of running after which a program counts as ready."""
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables set to 1 for each of many processes on a machine, whose thread pools would compete for its
cores."""


class Child:
    """Launched process under one name, with the processes that replaced it after deaths.

    Attributes:
        name: Name of the child in messages.
        command: Module or file, and arguments.
        environment: Environment variables that the launcher adds.
        facts: Facts that the child sent when it became ready; None before.
        reports: Newest value of each fact that the child reported.
        tail: Last lines of the child's standard output and error.
        may_die: True if the other children go on after a failure of this child.
        restarts: Restart policy; None if a death of this child ends the whole run.
        again: Function from the child's facts to the arguments that a restart adds to the command.
        ready_after: Seconds of running after which a program counts as ready; None for a node, which reports its
            readiness.
    """

    process: subprocess.Popen[bytes]
    line: socket.socket
    """The launcher's end of the socket pair."""

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
        self._known: dict[str, Any] = {}  # facts of the newest process that sent any
        self._partial = {"line": b"", "output": b""}

    def begin(self, now: float) -> None:
        """Start a process under this child's name."""
        self._known = self.facts or self._known
        self.line, child_end = socket.socketpair()
        with child_end:
            self.process = subprocess.Popen(
                self._interpreter(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[child_end.fileno()],
                # The pipe is read as UTF-8, whatever the terminal's encoding is.
                env={**os.environ, "PYTHONIOENCODING": "utf-8", **self.environment, **_inherited(child_end)},
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
        """True if the child is a program that does not report to its launcher."""
        return self.ready_after is not None

    @property
    def ready_at(self) -> float | None:
        """Time at which a running program counts as ready; None for a node, and for a child that is ready or dead."""
        if self.ready_after is None or self.facts is not None or self.status is not None:
            return None
        return self.started_at + self.ready_after

    @property
    def output(self) -> IO[bytes]:
        """Pipe with the child's standard output and error."""
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def next_command(self) -> tuple[str, ...]:
        """Command of the next process: with the arguments of a restart once the child was ready."""
        facts = self.facts or self._known
        return (*self.command, *(self.again(facts) if facts else ()))

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while the child runs. A read after its end kills its group."""
        if self.process.returncode is None and _has_ended(self.process.pid):
            self._kill_group()  # killed before the process is reaped and its id can be reused
        return self.process.poll()

    def await_end(self, timeout: float) -> None:
        """Wait until the child has ended, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.status is None and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)

    def kill(self) -> None:
        """Kill the child and all processes that it has started; return when the child has ended."""
        if self.status is None:
            self._kill_group()
        self.process.kill()
        self.process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses if the whole group has ended
            os.killpg(self.process.pid, signal.SIGKILL)

    def send_order(self, order: str) -> None:
        """Send an order to the child; do nothing if the child has ended."""
        with contextlib.suppress(OSError):
            self.line.sendall(json.dumps({"order": order}).encode() + b"\n")

    def lines(self, source: str, data: bytes) -> list[bytes]:
        """Return the whole lines of "line" or "output" after adding `data`; keep a part of a line for later.

        A carriage return restarts a line of output, as on a terminal: of a progress bar the last state is kept.
        """
        *whole, rest = (self._partial[source] + data).split(b"\n")
        if source == "output":
            *whole, rest = (text[text.rstrip(b"\r").rfind(b"\r") + 1 :] for text in (*whole, rest))
            if len(rest) > LONGEST_LINE:
                whole, rest = [*whole, rest], b""
        self._partial[source] = rest
        return whole


def _has_ended(pid: int) -> bool:
    """Return True if a child of this process has ended and was not reaped yet."""
    if not hasattr(os, "waitid"):  # macOS
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _inherited(line: socket.socket) -> dict[str, str]:
    """Return the environment variables with the child's end of the socket pair and the module search path."""
    return {LINE: str(line.fileno()), PATH: json.dumps(sys.path)}


READY_TIMEOUT = 90.0
"""Seconds that children have to become ready."""
STOP_GRACE = 10.0
"""Seconds that each group of children has to end before it is killed."""


class Launcher(ClosingContext):
    """Parent of child processes: starts them, reads their output and reports, restarts them, and ends them.

    While the launcher is open, SIGINT and SIGTERM make `pump` and `await_ready` return False. For the main thread only.

    Args:
        on_output: Called with (child's name, line) for each line that a child prints; None only keeps the last lines.
        say: Called with a message about each child that died and is restarted or given up.
        clock: Function that returns monotonic seconds.
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
        """Signal that asked this process to end; None before."""
        return self._signals.first

    def forget_signal(self) -> None:
        """Continue after a request to end; the next signal counts as the first."""
        self._signals.forget()

    # ---------------------------------------------------------------------------------------------- starting

    def start(self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """Start `python -m module arguments` as a child with this process' interpreter. Return at once.

        The child searches this process' module path, whatever the working directory holds. The child's standard input
        is empty; its output and error are one stream, which the launcher reads. The child gets a process group of its
        own, so that Ctrl-C on the terminal reaches only this process, which ends the children in order.
        """
        variables = {"MEMOIRE_NAME": name} | dict.fromkeys(ONE_THREAD, "1")
        child = Child(name, (module, *arguments), variables | dict(environment or {}))
        return self._add(child)

    def start_program(
        self, name: str, words: Iterable[str], environment: Mapping[str, str], ready_after: float = PROGRAM_READY
    ) -> Child:
        """Start a Python file, or a module by its dotted name, with its arguments, as `python` would. Return at once.

        The program need not report to its launcher: it counts as ready after `ready_after` seconds. When it ends, all
        processes that it has started end too. Other processes behave as with `start`.
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
        """Restart `children` after a death, in `pump`. Call it before the children are ready.

        Args:
            again: Function from the child's facts to arguments that a restart adds, such as the child's former address.
            most: Deaths in a row that are followed by another start, see `Restarts`.
        """
        for child in children:
            child.restarts, child.again = Restarts(most), again or child.again

    def abandon(self, children: Iterable[Child]) -> None:
        """Stop restarting the launcher's children. A child that waits for its restart counts as ended."""
        for child in children:
            child.is_stopping |= child.restarts is not None and child.restarts.due is not None
            child.restarts = None

    def await_ready(self, children: Iterable[Child], timeout: float = READY_TIMEOUT) -> bool:
        """Wait until all of `children` are ready. Return False if this process is asked to end meanwhile.

        Raises:
            ChildDied: a child ended instead; its last lines of output are in the message.
            MemoireTimeout: a child was not ready after `timeout` seconds.
        """
        deadline = self._clock() + timeout
        while waiting := [child for child in children if child.facts is None]:
            remaining = deadline - self._clock()
            if remaining <= 0:
                late = waiting[0]
                advice = f"Its last output: {' | '.join(late.tail) or '(none)'}. Is the machine overloaded?"
                raise MemoireTimeout("readiness", late.name, timeout, advice)
            if not self.pump(remaining):
                return False
        return True

    # ----------------------------------------------------------------------------------------------- running

    def pump(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for events of the children, and process them. Return False once asked to end.

        Raises:
            ChildDied: a child failed that was not stopped, and that is not supervised or cannot start. A child may end
                with status 0.
        """
        if self.stop_signal is None:
            self._read_events(
                min([timeout, *(at - self._clock() for child in self.children for at in _check_times(child))])
            )
        for child in self.children:
            if self.stop_signal is None and child.restarts and child.restarts.due is not None:
                self._start_again(child, child.restarts)
            elif not child.is_stopping:
                self._check(child)
        return self.stop_signal is None

    def wait_for(self, children: Iterable[Child], timeout: float) -> bool:
        """Wait until all `children` have ended by themselves. Return False if one runs after `timeout` seconds."""
        deadline = self._clock() + timeout
        while any(child.status is None for child in children):
            if self._clock() >= deadline or not self.pump(min(0.5, deadline - self._clock())):
                return False
        for child in children:
            self._read_rest(child)
        return True

    # ------------------------------------------------------------------------------------------------ ending

    def stop(self, children: Iterable[Child], grace: float = STOP_GRACE) -> None:
        """End `children` together with SIGTERM. Kill those that still run after `grace` seconds, or after another
        signal to this process.
        """
        group = list(children)
        for child in group:
            child.is_stopping = True
            child.process.terminate()
        deadline = self._clock() + grace
        while any(child.status is None for child in group) and self._clock() < deadline:
            if self._signals.is_urgent:
                break
            self._read_events(min(0.2, deadline - self._clock()))
        for child in group:
            child.kill()
            self._read_rest(child)

    def close(self, grace: float = STOP_GRACE) -> None:
        """End all children, the newest kind first: actors can still unregister at proxies, and proxies at servers."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for group in _by_kind(self.children):
                self.stop(group, grace)
        finally:
            for child in self.children:  # an interrupt may have ended the loop above
                child.kill()
                child.line.close()
                child.output.close()
            self._selector.close()
            self._signals.close()

    # ------------------------------------------------------------------------------------------------ private

    def _begin(self, child: Child) -> None:
        """Start a process for a child, and read its socket and output."""
        child.begin(self._clock())
        self._selector.register(child.line, selectors.EVENT_READ, (child, "line"))
        self._selector.register(child.output, selectors.EVENT_READ, (child, "output"))

    def _check(self, child: Child) -> None:
        """Check whether a child works; act on its death."""
        if child.status is None:
            self._check_readiness(child)
        elif child.status != 0 and not (child.may_die and child.restarts is None):
            self._read_rest(child)
            self._handle_death(child)

    def _check_readiness(self, child: Child) -> None:
        now, restarts = self._clock(), child.restarts
        if child.ready_at is not None and now >= child.ready_at:
            child.facts = {}
        if restarts is None:
            return
        if child.facts is not None:
            restarts.ready(now)
        elif restarts.count and now - child.started_at > READY_TIMEOUT:
            child.kill()  # the restart failed

    def _handle_death(self, child: Child) -> None:
        """Schedule a restart. Raise ChildDied if the child is given up and the run needs it."""
        now, restarts = self._clock(), child.restarts
        if restarts is not None and child.facts is not None:
            restarts.ready(now)  # the child was ready for a moment
        pause = None if restarts is None else restarts.died(now, is_killed=child.process.returncode < 0)
        died = ChildDied(child.name, child.process.returncode, tuple(child.tail))
        if pause is not None:
            self._say(f"{child.name} {died.end_text}; it restarts in {pause:g} s{_last(child.tail)}")
        elif child.may_die:
            child.restarts = None
            self._say(f"{child.name} {died.end_text}, and is not restarted{_last(child.tail)}")
        else:
            raise died

    def _start_again(self, child: Child, restarts: Restarts) -> None:
        if restarts.is_due(self._clock()):
            self._forget(child)
            self._begin(child)
            restarts.started()

    def _forget(self, child: Child) -> None:
        """Close the files of a dead process."""
        for end in (child.line, child.output):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            end.close()

    def _reap_orphans(self) -> None:
        """Reap ended processes that children have left behind, as process 1 in a container must."""
        child_pids = {child.process.pid for child in self.children}
        while os.getpid() == 1:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in child_pids:  # `status` reaps children
                return
            os.waitpid(ended.si_pid, os.WNOHANG)

    def _read_events(self, timeout: float) -> None:
        """Wait for the first readable file, then read all that are readable."""
        self._reap_orphans()
        for key, _ in self._selector.select(max(0.0, timeout)):
            if key.data is None:
                self._signals.drain()
            else:
                self._read(*key.data)

    def _read(self, child: Child, source: str) -> bool:
        """Read what a child sent on its "line" or printed. Return True if more may come."""
        end: socket.socket | IO[bytes] = child.line if source == "line" else child.output
        try:
            data = os.read(end.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        except ConnectionResetError:  # the child died with an order unread
            data = b""
        may_continue = bool(data)
        if not data and source == "output":
            data = b"\n"  # a last line without its end
        for text in child.lines(source, data):
            if source == "output":
                self._keep_line(child, text.decode(errors="replace").rstrip())
            else:
                _record(child, json.loads(text))
        if not may_continue:
            self._selector.unregister(end)
            child.await_end(1.0)  # the child closed its files: wait until `status` reports its end
        return may_continue

    def _keep_line(self, child: Child, line: str) -> None:
        if line:
            child.tail.append(line)
            if self._on_output is not None:
                self._on_output(child.name, line)

    def _read_rest(self, child: Child) -> None:
        """Read all that a dead child has left in its pipes."""
        for source, end in (("line", child.line), ("output", child.output)):
            while end in self._selector.get_map() and _has_data(end):
                self._read(child, source)


def _has_data(end: socket.socket | IO[bytes]) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(end, selectors.EVENT_READ)
        return bool(selector.select(0))


def _by_kind(children: Iterable[Child]) -> list[list[Child]]:
    """Return children grouped by the kind in their name ("server-0"), the newest kind first."""
    kinds: dict[str, list[Child]] = {}
    for child in children:
        kinds.setdefault(child.name.rpartition("-")[0] or child.name, []).append(child)
    return list(reversed(kinds.values()))


def _check_times(child: Child) -> Iterable[float]:
    """Yield the time at which a child needs a check even if it sends nothing."""
    if child.restarts is not None and child.restarts.due is not None:
        yield child.restarts.due
    elif child.ready_at is not None:
        yield child.ready_at


def _last(tail: Iterable[str]) -> str:
    """Return the last line of a child's output as the end of a sentence, or "" without output."""
    lines = [line.strip() for line in tail]
    return f" (its last output: {lines[-1]})" if lines else ""


def _record(child: Child, message: dict[str, Any]) -> None:
    if "ready" in message:
        child.facts = message["ready"]
    child.reports.update(message.get("report", {}))
