"""A pipeline's processes on this machine: server, trainer and workers, started again when they die, until the goal.

server ◀── trainer        workers say what their test episodes returned; this process ends the run when the goal is
   ▲────── workers        reached, the trainer's epochs are over, or time is up
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from memoire.building import Keys
from memoire.launching import Child, Launcher, LocalRun, Nodes, say, with_keys

from .pipeline import Goal, Pipeline, read_pipeline

TURN: Final = 0.25
"""Seconds between two looks at the run."""
PRINT_INTERVAL: Final = 10.0
FINISH_TIMEOUT: Final = 30.0
"""Seconds that the trainer and the workers have to end in order."""
PROGRAM: Final = "memoire.rl"


@dataclass(frozen=True)
class Accident:
    """A process that is killed on purpose, after so many training steps."""

    name: str
    updates: int


ACCIDENTS: Final = (Accident("worker-0", 3000), Accident("trainer", 4500))
"""Of `--accidents`: half way, about, of a run that takes ten thousand training steps."""


@dataclass
class Progress:
    """How a run stands, by what its processes report."""

    goal: Goal | None
    tests: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, return) of test episodes of all workers, in order."""
    _seen: dict[str, int] = field(default_factory=dict)

    def take(self, workers: list[Child], now: float) -> None:
        """Take in what workers report: the returns of their newest test episodes, and how many there were."""
        for child in workers:
            said = child.reports
            count, returns = int(said.get("tests", 0)), list(said.get("test_returns", ()))
            life = f"{child.name}:{said.get('pid')}"
            new = count - self._seen.get(life, 0)
            if new > 0:
                self.tests += [(now, float(each)) for each in returns[-new:]]
            self._seen[life] = count

    @property
    def returns(self) -> list[float]:
        """Of test episodes, oldest first."""
        return [each for _, each in self.tests]

    @property
    def is_won(self) -> bool:
        """Whether the goal is reached."""
        return self.goal is not None and self.goal.is_reached(self.returns)

    def mean(self) -> str:
        """The mean of the newest test episodes, as text."""
        count = self.goal.episodes if self.goal else 5
        newest = self.returns[-count:]
        return f"{np.mean(newest):.1f} over {len(newest)}" if newest else "none yet"


@dataclass(frozen=True, kw_only=True)
class PipelineNodes(Nodes):
    """The server of a pipeline."""

    file: str
    """That makes the pipeline."""

    def server(self, number: int) -> tuple[str, ...]:
        """Module and arguments of the server."""
        return (PROGRAM, "serve", self.file)


class Run:
    """A pipeline that runs on this machine.

    Args:
        path: Of the file that makes the pipeline.
        seconds: After so many the run is given up; None never.
        accidents: Processes to kill on purpose, in this order.
    """

    def __init__(
        self,
        path: str,
        *,
        seconds: float | None = None,
        accidents: Sequence[Accident] = (),
        dashboard: bool = True,
        say: Callable[[str], object] = say,
    ) -> None:
        self.path = os.path.abspath(path)
        self._limit = np.inf if seconds is None else seconds
        self._accidents = list(accidents)
        self._wants_dashboard, self._say = dashboard, say
        self._workers: list[Child] = []

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """What the file makes."""
        return read_pipeline(self.path)

    @functools.cached_property
    def _progress(self) -> Progress:
        return Progress(self.pipeline.goal)

    def run(self) -> int:
        """Run it; 0 if the goal was reached (or all epochs are over, without one), 1 if not, 128 + n after signal n."""
        with Launcher(lambda name, line: self._say(f"{name}: {line}"), say=self._say) as launcher:
            began = time.monotonic()
            run = LocalRun(launcher, PipelineNodes(proxies=0, file=self.path), dashboard=self._wants_dashboard)
            # The pipeline is read while the server reads it, too: each of them imports torch for it, perhaps.
            if not run.begin(lambda: self.pipeline) or run.cluster is None:
                return 128 + (launcher.stop_signal or signal.SIGTERM)
            (url,) = run.cluster.endpoints
            self._say(f"server at {url}")
            run.show()
            trainer = self._start(launcher, "trainer", "train", url)
            self._workers = [
                self._start(launcher, f"worker-{number}", "work", url, "--rank", str(number))
                for number in range(self.pipeline.work.workers)
            ]
            launcher.supervise([trainer, *self._workers])
            is_over = self._watch(run, launcher, trainer, began)
            status = self._sum_up(time.monotonic() - began, is_over, launcher.stop_signal)
            run.finish([trainer, *self._workers], FINISH_TIMEOUT)  # the trainer saves, and workers end by that
        return status

    def _start(self, launcher: Launcher, name: str, verb: str, url: str, *more: str) -> Child:
        role = {"train": "learner", "work": "actor"}[verb]
        return launcher.start(name, PROGRAM, verb, url, self.path, *more, *with_keys(self.pipeline.keys, role))

    def _watch(self, run: LocalRun, launcher: Launcher, trainer: Child, began: float) -> bool:
        """Look on until it is over; whether it ended by itself."""
        printed, is_over = began, False

        def goes_on() -> bool:
            nonlocal printed, is_over
            now = time.monotonic()
            self._progress.take(self._workers, now - began)
            self._have_accidents(launcher, trainer)
            if now - printed >= PRINT_INTERVAL:
                printed = now
                self._say(self._line(trainer, now - began))
            is_whole = all(child.process.poll() is None for child in launcher.children)  # whoever died is started first
            if self._progress.is_won and not self._accidents and is_whole:
                is_over = True
            elif trainer.status == 0:
                is_over = self.pipeline.goal is None
            else:
                return now - began < self._limit
            return False

        run.watch(goes_on, TURN)
        return is_over

    def _have_accidents(self, launcher: Launcher, trainer: Child) -> None:
        while self._accidents and int(trainer.reports.get("updates", 0)) >= self._accidents[0].updates:
            accident = self._accidents.pop(0)
            child = next(each for each in launcher.children if each.name == accident.name)
            self._say(f"killing {accident.name} on purpose, after {trainer.reports['updates']} training steps")
            child.process.kill()
            child.process.wait()

    def _line(self, trainer: Child, seconds: float) -> str:
        said = trainer.reports
        return (
            f"{seconds:5.0f} s: {said.get('samples', 0)} samples, {said.get('updates', 0)} training steps, "
            f"test return {self._progress.mean()} episodes, {len(self._progress.tests)} test episodes in all"
            + (f"; the trainer is {said['waits']}" if said.get("waits") else "")
        )

    def _sum_up(self, seconds: float, is_over: bool, signalled: int | None) -> int:
        goal, mean = self.pipeline.goal, self._progress.mean()
        if signalled:
            return 128 + signalled
        if goal is None:
            self._say(f"over after {seconds:.1f} s; test return {mean} episodes")
            return 0 if is_over else 1
        word = "reached" if is_over else "not reached"
        left = "" if not self._accidents else f"; {len(self._accidents)} accidents did not happen in that time"
        if not is_over and not self._progress.tests:
            left += f". If {self.pipeline.run!r} was finished before, --fresh begins anew"
        self._say(
            f"goal {word} after {seconds:.1f} s: test return {mean} episodes, wanted {goal.test_return:g} over "
            f"{goal.episodes}{left}. Models: {self.pipeline.path / 'model.safetensors'}"
        )
        return 0 if is_over else 1


def keys_of(given: str | None, pipeline: Pipeline, role: str) -> Any:
    """Keys of a process: those it was told, or its role's in the pipeline's folder."""
    return given if given is not None else Keys.of(pipeline.keys, role)


def folder_of(pipeline: Pipeline) -> Path:
    """The folder of a run's files, which is made."""
    pipeline.path.mkdir(parents=True, exist_ok=True)
    return pipeline.path
