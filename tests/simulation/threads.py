"""Locks and threads made of tasks, with the names and semantics of `threading`.

Conditions, events and queues are Python's own, made of these locks.
"""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit

from .world import Task, World


class Threads:
    """Replacements for the names of `threading` in one world."""

    def __init__(self, world: World) -> None:
        self.Lock, self.RLock, self.Thread = (
            type(kind.__name__, (kind,), {"world": world}) for kind in (Lock, RLock, Thread)
        )
        self._world = world

    def current_thread(self) -> Any:
        task = self._world.task
        return _MAIN if task is None or task.thread is None else task.thread

    def get_ident(self) -> int:
        """Return the number of the current thread, or 0 outside of tasks."""
        return 0 if self._world.task is None else self._world.task.number


_MAIN = SimpleNamespace(name="MainThread", ident=1, daemon=False, is_alive=lambda: True)


class Lock:
    """Lock of one task at a time. Waiting tasks receive the lock in the order of their arrival."""

    world: World

    def __init__(self) -> None:
        self._owner: object = None
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self.world
        if world.is_ending:  # tasks that held the lock or would notify a condition no longer run
            if self._owner is world.task:
                raise GreenletExit
            self._owner = world.task
            return True
        world.give_way()
        if self._owner is None:
            self._owner = world.task or world
            return True
        if not blocking or world.task is None:
            return False
        task = world.task
        self._waiting.append(task)
        world.park(None if timeout is None or timeout < 0 else timeout)
        if task in self._waiting:  # no task handed the lock over in time
            self._waiting.remove(task)
            if self._owner is not None:
                return False
            self._owner = task
        return True

    def release(self) -> None:
        if self._owner is None and not self.world.is_ending:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        for task in self._waiting:
            if task.process.is_alive and task.is_waiting:
                self._waiting.remove(task)
                self._owner = task  # handed over: a task that asks meanwhile waits
                self.world.wake(task)
                return

    def locked(self) -> bool:
        return self._owner is not None

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """Lock that its holder may acquire again."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is (self.world.task or self.world):
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._depth = 1
        return True

    __enter__ = acquire

    def release(self) -> None:
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
        self._ended = threading.Event()

    def start(self) -> None:
        self._task = self.world.spawn(self.world.process, self.name, self._run)
        self._task.thread, self.ident = self, self._task.number  # type: ignore[assignment]

    def _run(self) -> None:
        try:
            self.run()
        finally:
            self._ended.set()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over and self._task.process.is_alive

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            self._ended.wait(timeout)
