"""Locks, conditions, events and threads that are tasks of a world; with the names and manners of `threading`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from .world import Task, World


class Threads:
    """The names that `threading` has, in one world."""

    def __init__(self, world: World) -> None:
        def bound(kind: type) -> type:
            return type(kind.__name__, (kind,), {"world": world})

        self.Lock, self.RLock = bound(Lock), bound(RLock)
        self.Event, self.Thread = bound(Event), bound(Thread)
        self.SimpleQueue = bound(SimpleQueue)
        rlock = self.RLock

        class Condition(_Condition):
            """A condition, with a lock of its own unless one is given."""

            def __init__(self, lock: Any = None) -> None:
                super().__init__(world, rlock() if lock is None else lock)

        self.Condition = Condition
        self._world = world

    def current_thread(self) -> Any:
        """The thread whose turn it is."""
        task = self._world.task
        return _MAIN if task is None or task.thread is None else task.thread

    def get_ident(self) -> int:
        """A number of the thread whose turn it is."""
        task = self._world.task
        return 0 if task is None else task.number


class _Main:
    name, ident, daemon = "MainThread", 1, False

    def is_alive(self) -> bool:
        """It is."""
        return True


_MAIN = _Main()


class Lock:
    """Held by one task at a time; those that wait get it in the order in which they came."""

    world: World

    def __init__(self) -> None:
        self._owner: object = None
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As threading's."""
        world = self.world
        if world.is_ending:
            return True
        world.give_way()
        if self._owner is None:
            self._owner = world.task or world
            return True
        if not blocking or world.task is None:
            return False
        until = None if timeout is None or timeout < 0 else world.now + timeout
        task = world.task
        self._waiting.append(task)
        while True:
            left = None if until is None else until - world.now
            woken = (left is None or left > 0) and world.park(left)
            if self._owner is None or self._owner is task:
                self._owner = task
                if task in self._waiting:
                    self._waiting.remove(task)
                return True
            if not woken:
                self._waiting.remove(task)
                return False

    def release(self) -> None:
        """As threading's."""
        if self._owner is None and not self.world.is_ending:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        while self._waiting:
            task = self._waiting.popleft()
            if task.process.is_alive and task.is_waiting:
                self._owner = task  # handed over: whoever comes by meanwhile waits
                self.world.wake(task)
                return

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return self._owner is not None

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """One that its holder may take again."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As threading's."""
        if self._owner is (self.world.task or self.world):
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._depth = 1
        return True

    __enter__ = acquire

    def release(self) -> None:
        """As threading's."""
        self._depth -= 1
        if self._depth <= 0:
            super().release()

    def _is_owned(self) -> bool:
        return self._owner is (self.world.task or self.world)

    def _release_save(self) -> int:
        depth, self._depth = self._depth, 0
        super().release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        super().acquire()
        self._depth = depth


class _Condition:
    def __init__(self, world: World, lock: Any) -> None:
        self._world, self._lock = world, lock
        self._waiting: list[Task] = []
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def wait(self, timeout: float | None = None) -> bool:
        """As threading's."""
        task = self._world.task
        assert task is not None
        self._waiting.append(task)
        save = getattr(self._lock, "_release_save", self._lock.release)
        depth = save()
        try:
            return self._world.park(timeout)
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
            if hasattr(self._lock, "_acquire_restore"):
                self._lock._acquire_restore(depth)
            else:
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """As threading's."""
        until = None if timeout is None else self._world.now + timeout
        while not (found := predicate()):
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        """As threading's."""
        for task in self._waiting[:n]:
            self._waiting.remove(task)
            self._world.wake(task)

    def notify_all(self) -> None:
        """As threading's."""
        self.notify(len(self._waiting))


class Event:
    """Set once, or again after `clear`."""

    world: World

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        """As threading's."""
        return self._is_set

    def set(self) -> None:
        """As threading's."""
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self.world.wake(task)

    def clear(self) -> None:
        """As threading's."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """As threading's."""
        if not self._is_set:
            task = self.world.task
            assert task is not None
            self._waiting.append(task)
            self.world.park(timeout)
            if task in self._waiting:
                self._waiting.remove(task)
        return self._is_set


class Thread:
    """A task of the process that starts it."""

    world: World

    def __init__(
        self,
        group: None = None,
        target: Any = None,
        name: str = "",
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: Any = None,
    ) -> None:
        self.name, self.daemon, self.ident = name or "thread", daemon, None
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self._task: Task | None = None
        self._ended = type("Event", (Event,), {"world": self.world})()

    def start(self) -> None:
        """As threading's."""
        self._task = self.world.spawn(self.world.process, self.name, self._run)
        self._task.thread, self.ident = self, self._task.number  # type: ignore[assignment]

    def _run(self) -> None:
        try:
            self.run()
        finally:
            self._ended.set()

    def run(self) -> None:
        """As threading's."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        """As threading's."""
        return self._task is not None and not self._task.is_over and self._task.process.is_alive

    def join(self, timeout: float | None = None) -> None:
        """As threading's."""
        if self._task is not None:
            self._ended.wait(timeout)


class SimpleQueue:
    """First in, first out, between threads."""

    world: World

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: list[Task] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """As queue's."""
        self._items.append(item)
        if self._waiting:
            self.world.wake(self._waiting.pop(0))

    def empty(self) -> bool:
        """As queue's."""
        return not self._items

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """As queue's, without an end to the wait."""
        while not self._items:
            task = self.world.task
            assert task is not None and block and timeout is None
            self._waiting.append(task)
            self.world.park()
        return self._items.popleft()
