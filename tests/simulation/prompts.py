"""Trial with a table of prompts: a giver, workers that lease and answer, and a trainer that draws, saves and commits.

The checks are the promises of docs/language-models.md: the trainer's checkpoints hold each prompt once in spite of
kills, and the states of the prompts always add up.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import memoire
from memoire.errors import EpochOver, MemoireError, MemoireTimeout, ParameterError, Refused
from memoire.limits import Limits
from memoire.prompts.calls import Prompts

if TYPE_CHECKING:
    from .trial import Trial
    from .world import Process

COLUMNS: Final = {"tokens": (np.int32, (None,)), "reward": np.float32}
EPOCHS: Final = 2
PROMPTS: Final = 28  # prompts in each epoch
GROUP: Final = 2
STEP: Final = 3  # groups in a step; the last step of an epoch has fewer
TIMEOUT: Final = 5.0
PASSING: Final = ("busy", "closed", "client", "unexpected", "disk")
"""Codes of refusals by servers that start or end."""


def table() -> memoire.Table:
    """Return the servers' table: leases end within a trial, and drawn groups return at a rewind."""
    return memoire.Table(COLUMNS, storage="prompts", group=GROUP, lease=10.0, attempts=1000, keep=2)


def tokens_of(epoch: int, index: int, answer: int) -> np.ndarray:
    """Return tokens that differ between answers, and are the same in each life of a worker."""
    return np.arange(1 + (index * 7 + answer * 3) % 5, dtype=np.int32) + 100 * index + 10 * epoch + answer


class Prompting:
    """The work of this trial's processes, and their disks."""

    others = ("giver-0",)  # processes beside actors and learner

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._line, self._world = trial.line, trial.world
        self._rng = random.Random(f"prompts {trial.settings.seed}")
        self.checkpoints: dict[int, list[tuple[str, int, int]]] = {}
        """Step -> keys of the trained prompts, on the trainer's disk."""
        self.is_trained = False
        self.seen: list[str] = []  # violations
        self.figures: Counter[str] = Counter()

    def _prompts(self, number: int) -> Prompts:
        fronts = self._trial.fronts
        return Prompts(fronts[number % len(fronts)], "t", timeout=60.0, limits=Limits(), tune_process=False)

    def _again(self, process: Process, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call until it succeeds, since servers come and go. Each failed call must end within its timeout."""
        while True:
            began = time.monotonic()
            try:
                return call(*args, timeout=TIMEOUT, **named)
            except (MemoireTimeout, ParameterError):
                pass
            except Refused as error:
                if error.code not in PASSING:
                    raise
            finally:
                facts = {"call": call.__name__, "took": time.monotonic() - began, "timeout": TIMEOUT}
                self._trial.record(process.name, process)("called", **facts)

    def give(self, name: str, process: Process) -> None:
        """Add all prompts, an epoch at a time, and check the counts until the trainer has finished."""
        with self._prompts(0) as prompts:
            for epoch in range(EPOCHS):
                names = {index: f"prompt {index}" for index in range(PROMPTS)}
                self._again(process, prompts.add, names, "d", epoch)
                self._again(process, prompts.finish, "d", epoch)
            while not self.is_trained:
                self.look(prompts)
                time.sleep(3.0)
            self._again(process, lambda timeout: self._is_committed(prompts, timeout))
        self._trial.over.add(name)

    def look(self, prompts: Prompts) -> dict[str, int]:
        """Return the number of prompts in each state, which must add up to the number of added prompts."""
        try:
            counts = prompts.counts(timeout=TIMEOUT)
        except MemoireError:
            return {}
        self.figures["looks"] += 1
        if sum(counts.values()) != EPOCHS * PROMPTS:
            self.seen.append(f"prompts: states add up to {sum(counts.values())}: {counts}")
        return counts

    def _is_committed(self, prompts: Prompts, timeout: float) -> None:
        counts = prompts.counts(timeout=timeout)
        if counts["committed"] != EPOCHS * PROMPTS:
            self.seen.append(f"prompts: everything was trained on, and the states are {counts}")

    def work(self, name: str, number: int, process: Process) -> None:
        """Lease and answer prompts until the trainer has finished."""
        rng = random.Random(f"{self._trial.settings.seed}/{name}/{process.life}/{number}")
        with self._prompts(number + process.life) as prompts:
            while not self.is_trained:
                try:
                    leases = prompts.lease(1, timeout=TIMEOUT)
                except (MemoireTimeout, ParameterError, Refused):
                    continue
                for lease in leases:
                    try:
                        self._answer(process, prompts, lease, rng)
                    except (Refused, MemoireError):  # the lease has ended, or the server has lost a piece
                        self.figures["leases that ended"] += 1

    def _answer(self, process: Process, prompts: Prompts, lease: Any, rng: random.Random) -> None:
        for index in lease.missing:
            time.sleep(rng.expovariate(self._trial.settings.rate))
            _, epoch, place = lease.key
            tokens, reward = tokens_of(epoch, place, index), np.float32(index)
            if len(tokens) > 1 and rng.random() < 0.3:  # the answer has two pieces
                self._again(process, prompts.answer, lease, index, {"tokens": tokens[:1]}, last=False, piece=0)
                self._again(process, prompts.answer, lease, index, {"tokens": tokens[1:], "reward": reward}, piece=1)
            else:
                self._again(process, prompts.answer, lease, index, {"tokens": tokens, "reward": reward})

    def lead(self, name: str, process: Process) -> None:
        """Run one life of the trainer, from its newest checkpoint or from an earlier one."""
        if self.is_trained:  # a finished trainer does not train again
            self._trial.over.add(name)
            return
        back = self._rng.randrange(3) if process.life > 1 and self._rng.random() < 0.5 else 0
        for step in sorted(self.checkpoints, reverse=True)[:back]:
            del self.checkpoints[step]
        newest = max(self.checkpoints, default=-1)
        with self._prompts(1) as prompts:
            self._again(process, prompts.resume, newest)
            step = newest + 1
            while True:
                try:
                    drawn = self._again(process, prompts.draw, step, STEP)
                except EpochOver:
                    break
                self.seen += [f"prompts: torn: {each}" for each in _torn(drawn)]
                self.checkpoints[step] = list(drawn.keys)
                self._trial.record(name, process)("saved", step=step)
                self._world.give_way()
                self._again(process, prompts.commit, step)
                step += 1
                time.sleep(self._trial.settings.pause)
        self.is_trained = True
        self._trial.over.add(name)

    def figures_of(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        done = Counter(event["do"] for event in events)
        lives = sum(event["do"] == "started" and event["target"] == "learner-0" for event in events)
        saved = [event["t"] for event in events if event["do"] == "saved"]
        return {
            "killed": done["killed"], "stopped": done["stopped"], "cut": done["cut"], "ended": done["ended"],
            "steps drawn": done["saved"], "lives of the trainer": lives, "calls": done["called"],
            "seconds until all is trained": round(max(saved, default=0.0) - 1000.0), **self.figures,
        }  # fmt: skip

    def violations(self) -> Iterator[str]:
        yield from self.seen[:10]
        trained = Counter(key for keys in self.checkpoints.values() for key in keys)
        expected = {("d", epoch, index) for epoch in range(EPOCHS) for index in range(PROMPTS)}
        missing, twice = expected - trained.keys(), sorted(key for key, count in trained.items() if count > 1)
        if missing:
            yield f"prompts: {len(missing)} were never trained on, such as {min(missing)}"
        if twice:
            yield f"prompts: {len(twice)} were trained on more than once, such as {twice[0]}"


def _torn(drawn: Any) -> Iterator[str]:
    tokens = drawn["tokens"]
    for row, (group, answer) in enumerate(zip(drawn.group, drawn.answer, strict=True)):
        _, epoch, index = drawn.keys[group]
        if tokens[row].tolist() != tokens_of(epoch, index, int(answer)).tolist():
            yield f"answer {answer} of {drawn.keys[group]} is {tokens[row]}"
