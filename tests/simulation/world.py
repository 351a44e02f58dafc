"""What decides what happens next: tasks that take turns, a clock that only this file moves, and one source of chance.

    ready tasks ──chance──▶ the next one runs until it waits
    nobody ready ─────────▶ time goes on to what is due next: a message, a timeout, a fault

A task is a thread of the product, as a greenlet. One seed gives one order of events; `digest` names it.
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
"""Seconds on the clock that only goes on when a world begins."""
SINCE_1970: Final = 1_780_000_000.0 - START
TICK: Final = 1e-7
"""Seconds that each look at the clock takes, so that whoever waits by looking comes to an end."""
MAX_TURNS: Final = 400_000
"""Turns of a world at most; a trial of two minutes has some fifteen thousand."""
MAX_LINES: Final = 1000
"""Of the trace, that are hashed together."""
TURN: Final = 2e-5
"""Seconds that a task's turn takes at least."""


class Stuck(Exception):
    """Nobody can go on, and nothing is due; or a world has used up its time."""


@dataclass(eq=False)
class Process:
    """What is killed or stopped as one."""

    name: str
    host: str
    life: int = 1
    is_alive: bool = True
    is_stopped: bool = False
    disk: Literal["", "full", "eio", "power"] = ""
    """What is wrong with it; "power": it fails as soon as something is to be on disk."""
    on_failure: Callable[[], None] | None = None
    """Called when the power has failed: it kills the process."""
    at_turn: list[Callable[[float], object]] = field(default_factory=list)
    """Called before each turn of its tasks with the seconds since 1970: clocks that are not Python's."""
    at_kill: list[Callable[[], None]] = field(default_factory=list)
    """Called when it is killed: what a system does with what a process leaves."""


class Task:
    """One thread of a process."""

    def __init__(self, world: World, process: Process, name: str, run: Callable[[], None]) -> None:
        self.process, self.name, self.number = process, name, world.next_number()
        self.is_over = False
        self.turn = 0
        """Grows with each wait, so that an old timeout wakes nobody."""
        self.is_waiting = self.is_woken = False
        self.thread: Any = None
        """The `threads.Thread` that it is; None of a trial's own."""
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
    """One run of everything, from a seed.

    Args:
        preempt: How likely a task gives way to another one where threads could change places.
    """

    def __init__(self, seed: int, *, preempt: float = 0.02) -> None:
        self.rng = random.Random(f"world {seed}")
        self._chance = self.rng.random
        self.seed, self.preempt = seed, preempt
        self.now = START
        self.hub = getcurrent()
        self.task: Task | None = None
        """Whose turn it is; None while the world itself does something."""
        self.turns = 0
        self.log: Callable[[str], object] | None = None
        """Gets each line of the trace."""
        self.is_ending = False
        self._ready: list[Task] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._trace = hashlib.sha256()
        self._lines: list[str] = []  # of the trace, that are not part of its hash yet
        self._tasks: list[Task] = []
        self.outside = Process("outside", "10.0.255.1")
        """Whose the tasks of a trial are that are no part of the cluster."""
        self.on_error: Callable[[Task, BaseException], None] | None = None
        self.spinning: set[str] = set()
        """Tasks that were seen to poll again and again for what they do not take."""

    # Facts

    def next_number(self) -> int:
        """A number that nothing else in this world has."""
        self._numbers += 1
        return self._numbers

    @property
    def digest(self) -> str:
        """SHA-256 of everything that has happened so far."""
        self._hash()
        return self._trace.hexdigest()

    def note(self, *facts: object) -> None:
        """Something has happened: part of the trace."""
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
        """Seconds; each look takes a moment."""
        self.now += TICK
        return self.now

    def wall(self) -> float:
        return SINCE_1970 + self.monotonic()

    @property
    def process(self) -> Process:
        return self.outside if self.task is None else self.task.process

    def spins(self) -> None:
        """The task whose turn it is polls for something that it never takes."""
        if self.task is not None:
            self.spinning.add(f"{self.task.process.name}/{self.task.name}")

    # Tasks

    def spawn(self, process: Process, name: str, run: Callable[[], None]) -> Task:
        """A task that begins soon."""
        task = Task(self, process, name, run)
        self._tasks.append(task)
        self._ready.append(task)
        return task

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call this then, between two turns."""
        heapq.heappush(self._due, (when, self.next_number(), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def park(self, timeout: float | None = None) -> bool:
        """Wait until somebody calls `wake`; False when so many seconds have passed instead. Inside of a task."""
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
        """End a task's wait."""
        if task.is_waiting:
            task.is_waiting = False
            task.is_woken = True
            self._ready.append(task)

    def give_way(self) -> None:
        """Perhaps let others go first: here threads could change places."""
        if self._chance() < self.preempt and self.task is not None and not self.is_ending:
            self._ready.append(self.task)
            self.leave()

    def leave(self) -> None:
        """Give the turn back; whoever is not woken never gets another one."""
        self.hub.switch()
        if self.is_ending:
            raise GreenletExit

    # Processes

    def kill(self, process: Process) -> None:
        """End a process at once: none of its tasks gets another turn, not even to tidy up."""
        process.is_alive = False
        self.note("killed", process.name)
        for task in self._tasks:
            if task.process is process:
                task.is_waiting = False
        self._ready = [task for task in self._ready if task.process is not process]
        calls, process.at_kill = process.at_kill, []  # it may be killed again, before another one has its name
        for call in calls:
            call()

    # The way of time

    def run(self, until: Callable[[], bool], *, most: float) -> None:
        """Let everything happen until `until` is true, which is asked between two turns.

        Raises:
            Stuck: it did not become true within `most` seconds of this world's time.
        """
        limit, due, pop = self.now + most, self._due, heapq.heappop
        while not until():
            if due and due[0][0] <= self.now:
                pop(due)[2]()
            elif self._runs_one():
                if self.turns > MAX_TURNS:
                    raise Stuck(f"more than {MAX_TURNS} turns: somebody works without an end")
            elif due:
                self.now = max(self.now, due[0][0])
            else:
                raise Stuck("nobody can go on")
            if self.now > limit:
                raise Stuck(f"more than {most:g} s of the world's time: {self.waiting()}")

    def _runs_one(self) -> bool:
        """Give one of those that are ready a turn; False if there is nobody."""
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
        """Whose tasks are left, for people."""
        return ", ".join(f"{task.process.name}/{task.name}" for task in self._tasks if task.process.is_alive)[:2000]

    def end(self) -> None:
        """Let go of everything: what still waits is unwound, and nothing that it does counts any more."""
        self.is_ending = True
        for task in list(self._tasks):
            self.task = task
            try:
                while not task.greenlet.dead:
                    task.greenlet.throw(GreenletExit)
            except BaseException:  # noqa: BLE001, S110  what a killed process does while it is taken apart is no fault
                pass
        self.task = None
        self._tasks.clear()
        self._ready.clear()
        self._due.clear()
