"""A cluster on one machine: nodes and actors as child processes that are ready when they say so, are started again when
they die, and never outlive us.

Each child has a line to this process (see `supervision`): through it the child says that it is ready, and reports;
through its end either side notices that the other has died. So nothing here sleeps and hopes, and no process is left
behind when this one is interrupted, terminated, or killed.

    with Launcher() as launcher:
        child = launcher.start("server-0", "memoire", "server", "--endpoint", "tcp://127.0.0.1:0")
        launcher.await_ready([child])          # raises ChildDied with the child's last words
        while launcher.pump(1.0): ...          # reports arrive; False once this process is asked to end
"""

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
from types import FrameType, TracebackType
from typing import IO, Any, Self

from memoire.errors import ChildDied, MemoireTimeout

from . import bootstrap
from .restarts import Restarts
from .supervision import LINE

LAST_LINES = 40
"""Lines of each child's output that are kept."""
READY_TIMEOUT = 90.0
"""Seconds that children have to become ready."""
STOP_GRACE = 10.0
"""Seconds that each group of children has to end before it is killed."""
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Every child is one of many on the machine: thread pools of their own would fight each other for its cores."""


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
    """

    process: "subprocess.Popen[bytes]"
    line: socket.socket

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self.command, self.environment = name, tuple(command), environment
        self.restarts: Restarts | None = None
        self.again: Callable[[dict[str, Any]], tuple[str, ...]] = lambda facts: ()
        self.facts: dict[str, Any] | None = None
        self.reports: dict[str, Any] = {}
        self.tail: deque[str] = deque(maxlen=LAST_LINES)
        self.is_stopping = False
        self.may_die = False
        self.started_at = 0.0
        self._known: dict[str, Any] = {}  # facts of the newest life that had any
        self._partial = {"line": b"", "output": b""}

    def begin(self, process: "subprocess.Popen[bytes]", line: socket.socket, now: float) -> None:
        """A new process is this child from now on."""
        self._known = self.facts or self._known
        self.process, self.line, self.facts, self.started_at = process, line, None, now
        self.tail.clear()
        self._partial = {"line": b"", "output": b""}

    @property
    def next_command(self) -> tuple[str, ...]:
        """What its next process is started with."""
        facts = self.facts or self._known
        return (*self.command, *(self.again(facts) if facts else ()))

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    def order(self, order: str) -> None:
        """Send an order; a child that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self.line.sendall(json.dumps({"order": order}).encode() + b"\n")

    def lines(self, source: str, data: bytes) -> list[bytes]:
        """Whole lines of "line" or "output", `data` added; the rest is kept for the next call."""
        *whole, self._partial[source] = (self._partial[source] + data).split(b"\n")
        return whole


class Launcher:
    """Starts children, hears them, and ends them all: together with itself at the latest.

    Takes over SIGINT and SIGTERM while it is open: they end `pump` and `await_ready` orderly. For the main thread only.

    Args:
        on_output: Called with (child's name, line) for each line that a child prints; None only keeps the last ones.
        say: Called with a line about each child that is started again.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        on_output: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.children: list[Child] = []
        self.stop_signal: int | None = None
        """The signal that asked this process to end."""
        self._on_output, self._clock, self._say = on_output, clock, say
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._former_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._former = {number: signal.signal(number, self._on_signal) for number in numbers}
        self._is_closed = False

    # ---------------------------------------------------------------------------------------------- starting

    def start(self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """Start `python -m module arguments` as a child with this process' interpreter; returns at once.

        The child finds the modules that this process finds, whatever the working directory holds. Its standard input is
        empty; its output and error are one stream, kept here. A group of its own keeps Ctrl-C on the terminal away from
        it: this process hears it, and ends the children in order.
        """
        child = Child(name, (module, *arguments), environment or {})
        self._begin(child)
        self.children.append(child)
        return child

    def supervise(
        self, children: Iterable[Child], again: Callable[[dict[str, Any]], tuple[str, ...]] | None = None
    ) -> None:
        """Start `children` again when they die, once they have been ready (`pump` does); say so before they are.

        Args:
            again: Arguments that are added then, by what the child said when it was ready: an address, so that others
                find it where it was.
        """
        for child in children:
            child.restarts, child.again = Restarts(), again or child.again

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
            due = [child.restarts.due for child in self.children if child.restarts and child.restarts.due is not None]
            self._take(min([timeout, *(at - self._clock() for at in due)]))
        for child in self.children:
            if self.stop_signal is None and child.restarts and child.restarts.due is not None:
                self._start_again(child, child.restarts)
            elif not child.is_stopping and not child.may_die:
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
        """End `children` together: SIGTERM, and SIGKILL for those that still run after `grace` seconds."""
        group = list(children)
        for child in group:
            child.is_stopping = True
            child.process.terminate()
        deadline = self._clock() + grace
        while any(child.status is None for child in group) and self._clock() < deadline:
            self._take(min(0.2, deadline - self._clock()))
        for child in group:
            child.process.kill()
            child.process.wait()
            self._listen_out(child)

    def close(self, grace: float = STOP_GRACE) -> None:
        """End all children, the newest first: actors can still say goodbye to proxies, and these to servers."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for group in self._groups():
                self.stop(group, grace)
        finally:
            for child in self.children:  # also when somebody interrupted the orderly end
                child.process.kill()
                child.process.wait()
                child.line.close()
                _stdout(child).close()
            self._selector.close()
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

    # ----------------------------------------------------------------------------------------------- its parts

    def _begin(self, child: Child) -> None:
        """Start a process for a child."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", "-P", bootstrap.__file__, *child.next_command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **dict.fromkeys(ONE_THREAD, "1"), **child.environment, **_inherited(theirs)},
                process_group=0,
            )
        child.begin(process, ours, self._clock())
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(ours, selectors.EVENT_READ, (child, "line"))
        self._selector.register(process.stdout, selectors.EVENT_READ, (child, "output"))

    def _look_after(self, child: Child) -> None:
        """See whether a child works, and what to do if it has died."""
        now, restarts = self._clock(), child.restarts
        if child.status is None and restarts is not None:
            if child.facts is not None:
                restarts.ready(now)
            elif restarts.count and now - child.started_at > READY_TIMEOUT:
                child.process.kill()  # its start came to nothing
        if child.status in (None, 0):
            return
        self._listen_out(child)
        if restarts is not None and child.facts is not None:
            restarts.ready(now)  # it was, for a moment
        pause = None if restarts is None else restarts.died(now)
        died = ChildDied(child.name, child.process.returncode, tuple(child.tail))
        if pause is None:
            raise died
        self._say(f"{child.name} {died.how}; it is started again in {pause:g} s{_last(child.tail)}")

    def _start_again(self, child: Child, restarts: Restarts) -> None:
        if restarts.is_due(self._clock()):
            self._forget(child)
            self._begin(child)
            restarts.started()

    def _forget(self, child: Child) -> None:
        """Close what is left of a dead process."""
        for end in (child.line, _stdout(child)):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            end.close()

    def _groups(self) -> list[list[Child]]:
        """Children by the kind in their name ("server-0"), the newest kind first."""
        groups: dict[str, list[Child]] = {}
        for child in self.children:
            groups.setdefault(child.name.rpartition("-")[0] or child.name, []).append(child)
        return list(reversed(groups.values()))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_signal = number

    def _take(self, timeout: float) -> None:
        """Read what there is to read, waiting for the first of it."""
        for key, _ in self._selector.select(max(0.0, timeout)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._read(*key.data)

    def _read(self, child: Child, source: str) -> bool:
        """Take in what a child said on its "line" or printed; whether more may come."""
        end: socket.socket | IO[bytes] = child.line if source == "line" else _stdout(child)
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(1.0)  # its files are closed, so it is as good as gone: let `status` say so
        return more

    def _heard(self, child: Child, line: str) -> None:
        if line:
            child.tail.append(line)
            if self._on_output is not None:
                self._on_output(child.name, line)

    def _listen_out(self, child: Child) -> None:
        """Take in all that a dead child has left in its pipes."""
        for source, end in (("line", child.line), ("output", _stdout(child))):
            while end in self._selector.get_map() and self._has_data(end):
                self._read(child, source)

    def _has_data(self, end: socket.socket | IO[bytes]) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_READ)
            return bool(selector.select(0))


def _inherited(line: socket.socket) -> dict[str, str]:
    """What a child takes out of its environment at its beginning: its end of the line, and where to find modules."""
    return {LINE: str(line.fileno()), bootstrap.PATH: json.dumps(sys.path)}


def _last(tail: Iterable[str]) -> str:
    """The last line of a child's output, as the end of a sentence about it."""
    said = [line.strip() for line in tail]
    return f" (its last words: {said[-1]})" if said else ""


def _stdout(child: Child) -> IO[bytes]:
    assert child.process.stdout is not None
    return child.process.stdout


def _told(child: Child, message: dict[str, Any]) -> None:
    if "ready" in message:
        child.facts = message["ready"]
    child.reports.update(message.get("report", {}))
