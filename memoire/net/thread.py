"""A thread that owns sockets: it waits, takes its turn, and runs what other threads post to it, until it is stopped.

ZeroMQ sockets belong to one thread (three threads on one socket mix messages up without any error), so every node of
memoire gives its sockets to a worker and asks it.

What the calls of a node and its thread share: one lock, one clock, and whether the node is open.

Whether a thread that takes turns is stuck, or only slow because the machine has too much to do.

    turns       | | | |                                          the last one began at 4
    time        1 2 3 4 ─── 15 s ───▶ 19: late. First look, at 20: the process has waited 3 s for a core in all
                                          Second look, at 30: 3.1 s     ─▶ it could run for 9.9 s of 10: stuck
                                                              12.5 s    ─▶ it could run for 0.5 s: slow

A restart helps the first one. It harms the second: a server that starts again has lost what it held.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from memoire import _core
from memoire.arguments import ClosingContext
from memoire.errors import Closed, ForkedError, MemoireError
from memoire.replay.parameters import StrictAttributes

from . import process
from .poller import Poller

WAIT_INTERVAL = 0.1
"""Seconds after which a call that waits looks again, should nobody have told it: some conditions are times."""


class NodeLock:
    """The lock of a node, and waiting at it: every wait ends when the node is closed or fails.

    Args:
        called: What errors call the node.
    """

    def __init__(self, called: str) -> None:
        self._changed = _core.Condition()
        self.wake: Callable[[], None] = lambda: None
        """Has the thread take a turn; the thread may set it."""
        self.is_closing = False
        """close() was called: calls raise Closed."""
        self.failed: MemoireError | None = None
        """Why the node cannot be used at all; for good."""
        self._called = called

    @property
    def changed(self) -> _core.Held:
        """The lock; notified at each answer, when something fails, and at close."""
        return _core.Held(self._changed)

    def now(self) -> float:
        """The clock of all times of the node, in seconds."""
        return time.monotonic()

    def left(self, deadline: float) -> float:
        """Seconds until a deadline; 0 after it."""
        return max(0.0, deadline - time.monotonic())

    def check_open(self) -> None:
        """Raise Closed, or what the node failed of."""
        if self.is_closing:
            raise Closed(self._called)
        if self.failed is not None:
            raise self.failed

    def until(
        self,
        is_done: Callable[[], bool],
        deadline: float,
        check: Callable[[], None] | None = None,
        before: Callable[[], None] | None = None,
        interval: float = float("inf"),
    ) -> bool:
        """Wait for something that the thread brings about; False at the deadline. Under the lock.

        Args:
            check: Called after each wait: raises if it is in vain. None is `check_open`.
            before: Called before each wait; None has the thread take a turn.
            interval: Seconds after which it is asked again although nobody has told of a change.
        """
        while not is_done():
            left = self.left(deadline)
            if left <= 0.0:
                return False
            (before or self.wake)()
            self.changed.wait(min(left, interval))
            (check or self.check_open)()
        return True

    def wait(self, is_done: Callable[[], bool], patience: float, interval: float = WAIT_INTERVAL) -> bool:
        """Wait for a condition, which is asked under the lock; False when it has not come true after these seconds.

        Args:
            interval: Seconds after which it is asked again although nobody has told of a change.
        """
        deadline = self.now() + patience
        with self.changed:
            self.check_open()
            return self.until(is_done, deadline, interval=interval)

    def pause(self, seconds: float) -> None:
        """Give the lock up for this long at most, or until something changes."""
        with self.changed:
            self.check_open()
            self.changed.wait(seconds)


STUCK_TIMEOUT = 15.0
"""Seconds without a turn after which a thread that takes one a second is late."""
RUNNABLE_TIMEOUT = 5.0
"""Seconds for which the process could run while a late thread took no turn: then it is stuck."""
SLOW_TIMEOUT = 300.0
"""Seconds without a turn after which it is stuck however busy the machine is."""


class _LateThread(NamedTuple):
    """The first look at a thread that is late."""

    turned: float
    """When its last turn began: another one has begun since then if this has changed."""
    at: float
    waited: float


TASKS = "/proc/self/task"
"""Folder in which Linux says of each thread of this process how long it waited for a core."""


def waited_for_cores(tasks: str = TASKS) -> float:
    """Seconds for which threads of this process were ready to run and no core was free, all together.

    0 where the system does not say it: then the time on the clock alone counts.
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
    """Judges one thread by its turns, at two looks at least. From any thread.

    Args:
        timeout: Seconds without a turn after which the thread is late.
        clock: What turns are timed by.
        waited: Seconds that the process has waited for cores so far.
    """

    def __init__(
        self,
        timeout: float = STUCK_TIMEOUT,
        *,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] = waited_for_cores,
    ) -> None:
        self._timeout, self._clock, self._waited = timeout, clock, waited
        self._first: _LateThread | None = None  # replaced as a whole: several threads may look

    def silence(self, turned: float) -> float:
        """Seconds since the thread's last turn began, at `turned`, if it is stuck; else 0."""
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
"""Seconds that a node whose making failed waits for its threads: one that went on would use sockets of a context that
its owner is about to end.
"""
IDLE_INTERVAL = 1.0
"""Seconds after which a worker takes its turn although nothing happened."""


class Node(ClosingContext, StrictAttributes, ABC):
    """Whatever has sockets (a server, client, reader or proxy): a `with` statement closes it.

    A process forked from its own finds a `Forked` in its place.
    """

    _COPY = "Make one in each process: it has threads and sockets of its own."
    CALLED: ClassVar[str] = "this node"
    """What errors call it."""
    ROLE: ClassVar[str] = ""
    """server, proxy, actor, learner or inference, as pages and metrics call it; "" of a node that has no pages."""
    CLOSED_AT_EXIT: ClassVar[int] = 1
    """When the interpreter ends, lower numbers are closed first: a client has things to tell a server."""
    _pid: int
    """The process it belongs to."""

    _close_lock: threading.Lock
    """Held by who closes it."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> object:
        """End within `timeout` seconds."""

    @contextmanager
    def _closer(self, deadline: float) -> Iterator[bool]:
        """Be the one who closes it; False where another thread is, and has not done it by the deadline."""
        with _core.Held.within(self._close_lock, max(0.0, deadline - time.monotonic())) as is_mine:
            yield is_mine


class Forked:
    """What a node is in a process forked from its own: nothing but the news that it is one.

    Sockets do not survive a fork, and any of the node's locks may be held for ever, by a thread that is not there. So
    no method is entered: whatever is asked of the node raises ForkedError, and closing it does nothing.
    """

    ANSWERS = frozenset({"close", "closed", "__class__", "__enter__", "__exit__", "__repr__", "__hash__", "__eq__"})

    def __getattribute__(self, name: str) -> Any:
        if name in Forked.ANSWERS:
            return object.__getattribute__(self, name)
        own = object.__getattribute__
        raise ForkedError(own(self, "CALLED"), own(self, "_pid"), os.getpid())

    @property
    def closed(self) -> bool:
        """True: there is nothing here that could be closed."""
        return True

    def close(self, timeout: float | None = None) -> bool:
        """Do nothing: it is the other process's to close."""
        return False

    def __repr__(self) -> str:
        own = object.__getattribute__
        return f"<{own(self, 'CALLED')}, forked from process {own(self, '_pid')}>"


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()
END_TIMEOUT = 1.0
"""Seconds that a thread has at least to end, also where there is no time left: it takes none, unless it waits for a
processor.
"""
EXIT_TIMEOUT = 0.5
"""Seconds that each node has to close when the interpreter ends."""
TOTAL_EXIT_TIMEOUT = 2.0
"""Seconds that all of them have together: a program with a hundred clients of a dead server ends as well."""


def close_at_exit(node: Node) -> None:
    """Close this node when the interpreter ends, if nobody did before: a daemon thread inside ZeroMQ must not outlive
    it. Call it as soon as the node has a thread: a fork finds it from then on. It has all its public attributes then.
    """
    node._guard()
    _nodes.add(node)


def _close_all() -> None:
    process.pass_over_in_threads(Closed)
    deadline = time.monotonic() + TOTAL_EXIT_TIMEOUT
    for node in sorted(_nodes, key=lambda node: node.CLOSED_AT_EXIT):
        try:
            node.close(max(0.0, min(EXIT_TIMEOUT, deadline - time.monotonic())))
        except Exception:
            _log.exception("%r could not be closed at exit", node)


def _leave_to_parent() -> None:
    process.leave_to_parent(list(_nodes), Forked)
    _nodes.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_to_parent)


class Worker:
    """The thread. Its functions run inside of it, never at the same time.

    Args:
        name: Of the thread.
        turn: Called after each wait, with the sockets that are ready and their events.
        next_time: When the next turn is due at the latest, as time.monotonic() counts.
        at_end: Called once at the end, before the sockets are closed.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[dict[object, int]], None],
        next_time: Callable[[], float] = lambda: float("inf"),
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.doors = Poller()
        self.errors = 0
        """Turns that raised: faults of ours, logged, after which the thread went on."""
        self._turn, self._next_time, self._at_end = turn, next_time, at_end
        self._turned = time.monotonic()  # when it came by last; it waits no longer than `IDLE_INTERVAL` at a time
        self._progress = ProgressMonitor()
        self._stopping = False
        self._starting = threading.Lock()  # against a stop in the middle of a start
        self._linger = 0.0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin. What was put into `doors` before belongs to the thread from now on."""
        with _core.Held(self._starting):
            if not self._stopping:
                self._thread.start()

    def post(self, function: Callable[[], None]) -> None:
        """Have the thread call this soon. From any thread; nothing happens when the worker has ended."""
        self.doors.posted.append(function)
        self.wake()

    def wake(self) -> None:
        """Have the thread take a turn now. From any thread."""
        self.doors.waker.wake()

    @property
    def is_alive(self) -> bool:
        """Whether it takes turns."""
        return self._thread.is_alive() and self._pid == os.getpid()

    def trouble(self) -> list[str]:
        """What is wrong with the thread, in words: it died, or it is stuck inside of one turn. Empty while it works or
        is only slow, see `ProgressMonitor`.
        """
        if self._pid != os.getpid() or self._stopping or self._thread.ident is None:
            return []
        if not self._thread.is_alive():
            return [f"thread {self._thread.name} has died: its log says why"]
        silence = self._progress.silence(self._turned)
        return [f"thread {self._thread.name} is stuck: no turn for {silence:.0f} s"] if silence else []

    @property
    def is_here(self) -> bool:
        """Whether the caller runs inside of this thread."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float, linger: float = 0.0) -> bool:
        """End the thread and close its sockets, which go on sending for `linger` seconds; False when it has not by
        then.
        """
        if self._pid != os.getpid():
            return True
        with _core.Held(self._starting):
            is_first, self._stopping = not self._stopping, True
            if self._thread.ident is None:  # never started, and will not be: nobody else has the sockets
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
            ready = self.doors.wait(min(until, self._next_time(), time.monotonic() + IDLE_INTERVAL))
            if not self._stopping:
                self._turn(ready)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        """A turn raised: a fault of ours in one message must not end the service for everybody else."""
        self.errors += 1
        _log.exception("%s: a turn failed", self._thread.name)
        if self.errors > 100:
            time.sleep(0.01)  # and must not spin for ever either

    def _finish(self) -> None:
        try:
            self.doors.run_posted()  # sockets that were handed over have to be closed too
            self._at_end()
        except Exception:
            _log.exception("%s: did not end cleanly", self._thread.name)
        finally:
            self.doors.close(self._linger)
