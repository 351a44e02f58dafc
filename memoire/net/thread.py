"""Worker threads that own a node's sockets, the node's lock, detection of stuck threads, and closing at exit.

ZeroMQ sockets belong to one thread (three threads on one socket mix messages up without any error). Every node gives
its sockets to a `Worker`, which waits, takes its turn, and runs functions that other threads post to it.

`NodeLock` is shared by the calls of a node and its thread: one lock, one clock, and the state of the node.

`ProgressMonitor` decides if a thread is stuck, or only slow because the machine has too much to do.

    turns       | | | |                                          the last one began at 4
    time        1 2 3 4 ─── 15 s ───▶ 19: late. First check, at 20: the process has waited 3 s for a core in all
                                          Second check, at 30: 3.1 s    ─▶ it could run for 9.9 s of 10: stuck
                                                               12.5 s   ─▶ it could run for 0.5 s: slow

A restart helps a stuck thread, and harms a slow one: a restarted server has lost what it held.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from memoire import _core
from memoire.arguments import ClosingContext
from memoire.errors import Closed, ForkedError, MemoireError
from memoire.replay.parameters import StrictAttributes

from . import process
from .poller import Poller

WAIT_INTERVAL = 0.1
"""Seconds after which a waiting call checks its condition without a notification: some depend on the time."""


class NodeLock:
    """Lock of a node, on which its calls wait: every wait ends when the node is closed or fails.

    Args:
        called: Name of the node in errors.
    """

    def __init__(self, called: str) -> None:
        self._changed = _core.Condition()
        self.wake: Callable[[], None] = lambda: None
        """Function that makes the node's thread take a turn; set by the owner of the thread."""
        self.is_closing = False
        """True after a call of close(): calls raise Closed."""
        self.failed: MemoireError | None = None
        """Error that makes the node unusable for good; None if it works."""
        self._called = called

    @property
    def condition(self) -> _core.Held:
        """The lock as a condition variable, notified at each answer, at a failure, and at close."""
        return _core.Held(self._changed)

    def now(self) -> float:
        """Return the time in seconds, by the monotonic clock of all times of the node."""
        return time.monotonic()

    def remaining(self, deadline: float) -> float:
        """Return the seconds until a deadline; 0 after it."""
        return max(0.0, deadline - time.monotonic())

    def check_open(self) -> None:
        """Raise Closed, or the error that made the node unusable."""
        if self.is_closing:
            raise Closed(self._called)
        if self.failed is not None:
            raise self.failed

    def wait_until(
        self,
        is_done: Callable[[], bool],
        deadline: float,
        check: Callable[[], None] | None = None,
        before: Callable[[], None] | None = None,
        interval: float = float("inf"),
    ) -> bool:
        """Wait until `is_done` returns True; False at the deadline. Called under the lock.

        Args:
            check: Called after each wait; raises if a further wait is useless. None is `check_open`.
            before: Called before each wait; None wakes the node's thread.
            interval: Seconds after which `is_done` is called again without a notification.
        """
        while not is_done():
            remaining = self.remaining(deadline)
            if remaining <= 0.0:
                return False
            (before or self.wake)()
            self.condition.wait(min(remaining, interval))
            (check or self.check_open)()
        return True

    def wait(self, is_done: Callable[[], bool], patience: float, interval: float = WAIT_INTERVAL) -> bool:
        """Wait until `is_done`, called under the lock, returns True; False after `patience` seconds.

        Args:
            interval: Seconds after which `is_done` is called again without a notification.
        """
        deadline = self.now() + patience
        with self.condition:
            self.check_open()
            return self.wait_until(is_done, deadline, interval=interval)

    def pause(self, seconds: float) -> None:
        """Wait for `seconds` seconds, or until a notification. Raises Closed, or the error of the node, before."""
        with self.condition:
            self.check_open()
            self.condition.wait(seconds)


STUCK_TIMEOUT = 15.0
"""Seconds without a turn after which a thread, which takes a turn each second, is late."""
RUNNABLE_TIMEOUT = 5.0
"""Seconds for which the process could run since the first check of a late thread, after which the thread is stuck."""
SLOW_TIMEOUT = 300.0
"""Seconds without a turn after which a thread is stuck however busy the machine is."""


class _LateThread(NamedTuple):
    """First check of a late thread."""

    turned: float
    """Time at which the thread's last turn began; it changes with the next turn."""
    at: float
    waited: float


TASKS = "/proc/self/task"
"""Folder of Linux with the time that each thread of this process waited for a core."""


def waited_for_cores(tasks: str = TASKS) -> float:
    """Return the seconds for which threads of this process were ready to run but no core was free, added up.

    Returns 0 if the system does not provide it: then the time on the clock alone counts.
    """
    total = 0
    try:
        for thread in os.listdir(tasks):
            with open(f"{tasks}/{thread}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[1])  # time on a core, time ready for one, turns
    except (OSError, ValueError, IndexError):
        return 0.0
    return total / 1e9


class ProgressMonitor:
    """Detector of a stuck thread, by the times of its turns, with two checks at least. Thread-safe.

    Args:
        timeout: Seconds without a turn after which the thread is late.
        clock: Clock of the turns' times.
        waited: Returns the seconds that the process has waited for cores so far.
    """

    def __init__(
        self,
        timeout: float = STUCK_TIMEOUT,
        *,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] = waited_for_cores,
    ) -> None:
        self._timeout, self._clock, self._waited = timeout, clock, waited
        self._first: _LateThread | None = None  # replaced as a whole: several threads may check

    def silence(self, turned: float) -> float:
        """Return the seconds since the thread's last turn began, at `turned`, if the thread is stuck; else 0."""
        now = self._clock()
        if now - turned <= self._timeout:
            return 0.0
        first = self._first
        if first is None or first.turned != turned:
            first = self._first = _LateThread(turned, now, self._waited())
        could_run = now - first.at - max(0.0, self._waited() - first.waited)
        is_stuck = could_run >= RUNNABLE_TIMEOUT or now - turned > SLOW_TIMEOUT
        return now - turned if is_stuck else 0.0


_log = logging.getLogger(__name__)

UNDO_TIMEOUT = 1.0
"""Seconds that a node whose constructor failed waits for its threads: a running thread would use sockets of a context
that its owner is about to end.
"""
IDLE_INTERVAL = 1.0
"""Seconds after which a worker takes a turn without any event."""


class Node(ClosingContext, StrictAttributes, ABC):
    """Base class of objects with sockets (server, client, reader, proxy): a `with` statement closes the node.

    In a process forked from the node's, the node's class is replaced by a subclass of `Forked`.
    """

    _COPY = "Make one in each process: it has threads and sockets of its own."
    CALLED: ClassVar[str] = "this node"
    """Name of the node in errors."""
    ROLE: ClassVar[str] = ""
    """Role of the node on pages and in metrics: server, proxy, actor, learner or inference; "" if it has no pages."""
    CLOSED_AT_EXIT: ClassVar[int] = 1
    """Order of closing when the interpreter ends, lowest first: a client closes before a server, to report to it."""
    _pid: int
    """Id of the process that the node belongs to."""

    _close_lock: threading.Lock
    """Lock held by the thread that closes the node."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> object:
        """Close the node within `timeout` seconds; None takes the node's default."""

    @contextmanager
    def _closer(self, deadline: float) -> Iterator[bool]:
        """Hold the close lock; yields False if another thread still holds it at the deadline."""
        with _core.Held.within(self._close_lock, max(0.0, deadline - time.monotonic())) as is_mine:
            yield is_mine


class Forked:
    """Behaviour of a node in a process forked from its own: every access raises ForkedError, and `close` does nothing.

    Sockets do not survive a fork, and a thread of the parent may hold any of the node's locks, which stay locked in the
    child. In the child, no method of the node's own class runs.
    """

    ANSWERS = frozenset({"close", "closed", "__class__", "__enter__", "__exit__", "__repr__", "__hash__", "__eq__"})

    def __getattribute__(self, name: str) -> Any:
        if name in Forked.ANSWERS:
            return object.__getattribute__(self, name)
        read = object.__getattribute__
        raise ForkedError(read(self, "CALLED"), read(self, "_pid"), os.getpid())

    @property
    def closed(self) -> bool:
        """True, since the child has nothing to close."""
        return True

    def close(self, timeout: float | None = None) -> bool:
        """Do nothing and return False: only the parent process can close the node."""
        return False

    def __repr__(self) -> str:
        read = object.__getattribute__
        return f"<{read(self, 'CALLED')}, forked from process {read(self, '_pid')}>"


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()
END_TIMEOUT = 1.0
"""Least seconds that a thread gets to end, even after the deadline: on a busy machine it may need them."""
EXIT_TIMEOUT = 0.5
"""Seconds that each node has to close when the interpreter ends."""
TOTAL_EXIT_TIMEOUT = 2.0
"""Seconds that all nodes together have to close, so that a program with a hundred clients of a dead server ends."""


def close_at_exit(node: Node) -> None:
    """Register a node to be closed when the interpreter ends, since a daemon thread in ZeroMQ must not outlive it, and
    to be replaced in forked processes. Call as soon as the node has a thread, and all its public attributes.
    """
    node._guard()
    _nodes.add(node)


def close_nodes(nodes: Iterable[Node], clock: Callable[[], float]) -> None:
    """Close nodes in the order of their `CLOSED_AT_EXIT`, within `TOTAL_EXIT_TIMEOUT` in all. Errors are logged."""
    deadline = clock() + TOTAL_EXIT_TIMEOUT
    for node in sorted(nodes, key=lambda node: node.CLOSED_AT_EXIT):
        try:
            node.close(max(0.0, min(EXIT_TIMEOUT, deadline - clock())))
        except Exception:
            _log.exception("%r could not be closed at exit", node)


def _close_all() -> None:
    process.pass_over_in_threads(Closed)
    close_nodes(_nodes, lambda: time.monotonic())  # noqa: PLW0108 - a simulation replaces the function


def _leave_to_parent() -> None:
    process.disable_in_child(list(_nodes), Forked)
    _nodes.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_to_parent)


class Worker:
    """Thread that owns sockets: it waits for them and for posted functions, and takes turns until it is stopped.

    Args:
        name: Name of the thread.
        turn: Called in the thread after each wait, with the sockets that are ready and their events.
        next_time: Returns the latest time of the next turn, by time.monotonic().
        at_end: Called in the thread once at the end, before the sockets are closed.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[dict[object, int]], None],
        next_time: Callable[[], float] = lambda: float("inf"),
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.poller = Poller()
        self.errors = 0
        """Number of turns that raised an exception: bugs, logged, after which the thread went on."""
        self._turn, self._next_time, self._at_end = turn, next_time, at_end
        self._turned = time.monotonic()  # time of the newest turn of the loop; `IDLE_INTERVAL` limits waits
        self._progress = ProgressMonitor()
        self._stopping = False
        self._starting = threading.Lock()  # guards against a stop during a start
        self._linger = 0.0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which owns the sockets in `poller` from now on."""
        with _core.Held(self._starting):
            if not self._stopping:
                self._thread.start()

    def post(self, function: Callable[[], None]) -> None:
        """Let the thread call a function soon. Thread-safe; does nothing if the worker has ended."""
        self.poller.posted.append(function)
        self.wake()

    def wake(self) -> None:
        """Make the thread take a turn now. Thread-safe."""
        self.poller.waker.wake()

    @property
    def is_alive(self) -> bool:
        """True if the thread runs, in this process."""
        return self._thread.is_alive() and self._pid == os.getpid()

    def problem(self) -> list[str]:
        """Return problems of the thread, in words: it died, or is stuck in one turn. [] if it works, or is only slow:
        see `ProgressMonitor`.
        """
        if self._pid != os.getpid() or self._stopping or self._thread.ident is None:
            return []
        if not self._thread.is_alive():
            return [f"thread {self._thread.name} has died: its log says why"]
        silence = self._progress.silence(self._turned)
        return [f"thread {self._thread.name} is stuck: no turn for {silence:.0f} s"] if silence else []

    @property
    def is_here(self) -> bool:
        """True if the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float, linger: float = 0.0) -> bool:
        """End the thread and close its sockets, which go on sending for `linger` seconds. Returns False if the thread
        has not ended after `timeout` seconds.
        """
        if self._pid != os.getpid():
            return True
        with _core.Held(self._starting):
            is_first, self._stopping = not self._stopping, True
            if self._thread.ident is None:  # the thread will never start: the caller owns the sockets
                if is_first:
                    self._finish()
                return True
            self._linger = linger
        self.wake()
        if not self.is_here:
            self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
        finally:
            self._finish()

    def _step(self, until: float = float("inf")) -> None:
        self._turned = time.monotonic()
        try:
            ready = self.poller.wait(min(until, self._next_time(), time.monotonic() + IDLE_INTERVAL))
            if not self._stopping:
                self._turn(ready)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        """Log and count a turn that raised: a bug with one message must not end the service for all other peers."""
        self.errors += 1
        _log.exception("%s: a turn failed", self._thread.name)
        if self.errors > 100:
            time.sleep(0.01)  # waiting must not take a whole core

    def _finish(self) -> None:
        try:
            self.poller.run_posted()  # posted sockets must be closed
            self._at_end()
        except Exception:
            _log.exception("%s: did not end cleanly", self._thread.name)
        finally:
            self.poller.close(self._linger)
