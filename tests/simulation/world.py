"""Scheduler of a simulated world: tasks that take turns, a virtual clock and one random generator.

    ready tasks ──chance──▶ the next one runs until it waits
    no ready task ────────▶ time goes on to the next due event: a message, a timeout, a fault

A task is a thread of the product, as a greenlet. One seed gives one order of events; `digest` identifies it.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from greenlet import GreenletExit, getcurrent, greenlet

START: Final = 1_000.0
"""Seconds on the monotonic clock at the beginning of a world."""
SINCE_1970: Final = 1_780_000_000.0 - START
TICK: Final = 1e-7
"""Seconds that each reading of the clock takes, so that a loop that polls the clock ends."""
MAX_TURNS: Final = 400_000
"""Greatest number of turns of a world. A trial of two minutes has about fifteen thousand."""
MAX_LINES: Final = 1000
"""Lines of the trace that are hashed together."""
TURN: Final = 2e-5
"""Least seconds of a task's turn."""


class Stuck(Exception):
    """Deadlock of the world, or a world that has used up its time."""


@dataclass(eq=False)
class Process:
    """A process, the unit of kills and stops."""

    name: str
    host: str
    life: int = 1
    is_alive: bool = True
    is_stopped: bool = False
    disk: Literal["", "full", "eio", "power"] = ""
    """Fault of the disk. "power": the power fails at the next write to disk."""
    on_failure: Callable[[], None] | None = None
    """Callback after a power failure; the callback kills the process."""
    at_turn: list[Callable[[float], object]] = field(default_factory=list)
    """Callbacks before each turn of the process's tasks, with the seconds since 1970: clocks that are not Python's."""
    at_kill: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks after a kill: the operating system's cleanup."""


class Task:
    """One thread of a process."""

    def __init__(self, world: World, process: Process, name: str, run: Callable[[], None]) -> None:
        self.process, self.name, self.number = process, name, world.next_number()
        self.is_over = False
        self.turn = 0
        """Number of waits, so that an old timeout wakes no later wait."""
        self.is_waiting = self.is_woken = False
        self.thread: Any = None
        """The task's `threads.Thread`; None for tasks of the trial itself."""
        self._world, self._run = world, run
        self.greenlet = greenlet(self._begin, parent=world.hub)

    def _begin(self) -> None:
        try:
            self._run()
        except GreenletExit:
            pass
        finally:
            self.is_over = True


class World:
    """One simulated run, from a seed.

    Args:
        preempt: Probability that a task gives way to another one at places where threads could change.
    """

    def __init__(self, seed: int, *, preempt: float = 0.02) -> None:
        self.rng = random.Random(f"world {seed}")
        self._chance = self.rng.random
        self.seed, self.preempt = seed, preempt
        self.now = START
        self.hub = getcurrent()
        self.task: Task | None = None
        """The running task; None while the world itself runs."""
        self.turns = 0
        self.log: Callable[[str], object] | None = None  # receives each line of the trace
        self.is_ending = False
        self._ready: list[Task] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._trace = hashlib.sha256()
        self._lines: list[str] = []  # lines of the trace, not yet hashed
        self._tasks: list[Task] = []
        self.outside = Process("outside", "10.0.255.1")
        """The process of tasks that belong to the trial, not to the cluster."""
        self.on_error: Callable[[Task, BaseException], None] | None = None
        self.spinning: set[str] = set()
        """Tasks that polled repeatedly for input that they do not take."""

    def next_number(self) -> int:
        """Return a number that is unique in this world."""
        self._numbers += 1
        return self._numbers

    @property
    def digest(self) -> str:
        """SHA-256 of all events so far."""
        self._hash()
        return self._trace.hexdigest()

    def note(self, *facts: object) -> None:
        """Add an event to the trace."""
        self._write(f"{self.now:.9f} {facts}")

    def _hash(self) -> None:
        self._trace.update("".join(self._lines).encode())
        self._lines.clear()

    def _write(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) > MAX_LINES:
            self._hash()
        if self.log is not None:
            self.log(line)

    def monotonic(self) -> float:
        """Return the seconds; each reading takes a moment."""
        self.now += TICK
        return self.now

    def wall(self) -> float:
        return SINCE_1970 + self.monotonic()

    @property
    def process(self) -> Process:
        return self.outside if self.task is None else self.task.process

    def spins(self) -> None:
        """Record that the running task polls for input that it never takes."""
        if self.task is not None:
            self.spinning.add(f"{self.task.process.name}/{self.task.name}")

    def spawn(self, process: Process, name: str, run: Callable[[], None]) -> Task:
        task = Task(self, process, name, run)
        self._tasks.append(task)
        self._ready.append(task)
        return task

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule a call between two turns."""
        heapq.heappush(self._due, (when, self.next_number(), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def park(self, timeout: float | None = None) -> bool:
        """Wait until `wake` is called. Return False after a timeout of so many seconds. Only for tasks."""
        task = self.task
        assert task is not None, "only a task can wait"
        if self.is_ending:
            raise GreenletExit
        task.turn += 1
        task.is_waiting, task.is_woken = True, False
        if timeout is not None:
            self.at(self.now + max(0.0, timeout), partial(self._expire, task, task.turn))
        self.hub.switch()
        if self.is_ending:
            raise GreenletExit
        return task.is_woken

    def _expire(self, task: Task, turn: int) -> None:
        if task.is_waiting and task.turn == turn:
            task.is_waiting = False
            self._ready.append(task)

    def wake(self, task: Task) -> None:
        if task.is_waiting:
            task.is_waiting = False
            task.is_woken = True
            self._ready.append(task)

    def give_way(self) -> None:
        """Perhaps let other tasks run first, as threads could change here."""
        if self._chance() < self.preempt and self.task is not None and not self.is_ending:
            self._ready.append(self.task)
            self.leave()

    def leave(self) -> None:
        """Return the turn to the scheduler. A task that is never woken does not run again."""
        self.hub.switch()
        if self.is_ending:
            raise GreenletExit

    def kill(self, process: Process) -> None:
        """End a process at once: its tasks get no other turn, not even for cleanup."""
        process.is_alive = False
        self.note("killed", process.name)
        for task in self._tasks:
            if task.process is process:
                task.is_waiting = False
        self._ready = [task for task in self._ready if task.process is not process]
        calls, process.at_kill = process.at_kill, []  # a process may be killed before its successor has the name
        for call in calls:
            call()

    def run(self, until: Callable[[], bool], *, most: float) -> None:
        """Run until `until` returns True, which is called between two turns.

        Raises:
            Stuck: `until` did not return True within `most` seconds of this world's time.
        """
        limit, due, pop = self.now + most, self._due, heapq.heappop
        while not until():
            if due and due[0][0] <= self.now:
                pop(due)[2]()
            elif self._runs_one():
                if self.turns > MAX_TURNS:
                    raise Stuck(f"more than {MAX_TURNS} turns: a task runs without an end")
            elif due:
                self.now = max(self.now, due[0][0])
            else:
                raise Stuck("no task can go on")
            if self.now > limit:
                raise Stuck(f"more than {most:g} s of the world's time: {self.waiting()}")

    def _runs_one(self) -> bool:
        """Run one of the ready tasks; return False if no task is ready."""
        ready = self._ready
        if not ready:
            return False
        for task in ready:
            if task.process.is_stopped:
                ready = [task for task in ready if not task.process.is_stopped]
                break
        if not ready:
            return False
        task = ready[int(self._chance() * len(ready))] if len(ready) > 1 else ready[0]
        self._ready.remove(task)
        self.turns += 1
        self.now += TURN
        self._write(f"{int(self.now * 1e9)} {task.number} {task.process.name}/{task.name}")
        self.task = task
        for call in task.process.at_turn:
            call(SINCE_1970 + self.now)
        try:
            task.greenlet.switch()
        except BaseException as error:
            task.is_over = True
            if self.on_error is None:
                raise
            self.on_error(task, error)
        finally:
            self.task = None
        if task.is_over:
            self._tasks.remove(task)
        return True

    def waiting(self) -> str:
        """Return the names of tasks that are left, for messages."""
        return ", ".join(f"{task.process.name}/{task.name}" for task in self._tasks if task.process.is_alive)[:2000]

    def end(self) -> None:
        """Unwind all waiting tasks; ignore their errors."""
        self.is_ending = True
        for task in list(self._tasks):
            self.task = task
            try:
                while not task.greenlet.dead:
                    task.greenlet.throw(GreenletExit)
            except BaseException:  # errors while a killed process is unwound are no faults
                pass
        self.task = None
        self._tasks.clear()
        self._ready.clear()
        self._due.clear()
