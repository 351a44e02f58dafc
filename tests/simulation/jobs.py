"""Trial of an agent that gives episodes to observers, with leases and late, repeated or missing results.

The check: each episode that the agent receives is complete, is a requested one, and arrives once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memoire.errors import JobFailed, MemoireError, ObserverLost
from memoire.limits import Limits
from memoire.rl.agent import Agent
from memoire.rl.observer import Observer

if TYPE_CHECKING:
    from .trial import Trial
    from .world import Process

INPUTS: Final = {"obs": (np.float32, (2,))}
OUTPUTS: Final = {"action": np.int64, "value": np.float32}
ENTRIES: Final = {"obs": (np.float32, (2,)), "action": np.int64, "reward": np.float32}
AHEAD: Final = 4
"""Episodes that are requested at a time."""
LEASE: Final = 8.0
PATIENCE: Final = 90.0
"""Seconds until an episode must return or count as lost, also after kills."""


def act(columns: dict[str, Any]) -> dict[str, Any]:
    return {"action": columns["obs"][:, 1].astype(np.int64), "value": columns["obs"].sum(1)}


class Playing:
    """The work of this trial's processes."""

    others = ()  # processes beside actors and learner

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.is_over = False
        self.seen: list[str] = []  # violations
        self.figures: Counter[str] = Counter()

    def work(self, name: str, number: int, process: Process) -> None:
        """Run episodes until the trial is over, with a new connection after each failure."""
        pause = 1.0 / self._trial.settings.rate

        def episode(start: Any, ask: Any, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
            for step in range(options["steps"]):
                obs = np.float32([step, options["mark"]])
                decision = ask({"obs": obs})
                yield {"obs": obs, "action": decision["action"], "reward": decision["value"]}
                time.sleep(pause / 4)

        with Observer(self._trial.endpoint("learner-0"), episode, timeout=5.0, limits=Limits()) as observer:
            while not self.is_over:
                observer.run(timeout=2.0)

    def lead(self, name: str, process: Process) -> None:
        """Run one life of the agent: request and receive episodes until the trial is over."""
        wanted: dict[Future[Any], tuple[int, int, float]] = {}
        mark = process.life * 10_000
        got: set[int] = set()
        with Agent(self._trial.endpoint(name), INPUTS, OUTPUTS, act, ENTRIES, lease=LEASE, attempts=3) as agent:
            while wanted or not self._trial.line.is_over:
                while len(wanted) < AHEAD and not self._trial.line.is_over:
                    mark += 1
                    steps = 1 + mark % 5
                    wanted[agent.run_episode(steps=steps, mark=mark)] = steps, mark, time.monotonic()
                wait(wanted, 0.5, "FIRST_COMPLETED")
                for done in [each for each in wanted if each.done()]:
                    self._take(done, *wanted.pop(done)[:2], got)
                late = [facts for facts in wanted.values() if time.monotonic() - facts[2] > PATIENCE]
                if late:
                    self.seen.append(f"jobs: episode {late[0][1]} was wanted {PATIENCE:g} s ago, and nothing came")
                    break
        self.is_over = True
        self._trial.over.add(name)

    def _take(self, done: Future[Any], steps: int, mark: int, got: set[int]) -> None:
        try:
            episode = done.result()
        except (ObserverLost, JobFailed) as error:  # a request without an answer, or a lost observer
            self.figures[type(error).__name__] += 1
            return
        except MemoireError as error:
            self.seen.append(f"jobs: episode {mark} ended in {error!r}")
            return
        self.figures["episodes"] += 1
        obs = np.asarray(episode.columns["obs"])
        if episode.job in got:
            self.seen.append(f"jobs: job {episode.job} came back twice")
        got.add(episode.job)
        expected = [[step, mark] for step in range(steps)]
        if obs.astype(int).tolist() != expected or episode.columns["action"].tolist() != [mark] * steps:
            self.seen.append(f"jobs: episode {mark} of {steps} steps came back as {obs.astype(int).tolist()}")

    def figures_of(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        done = Counter(event["do"] for event in events)
        return {name: done[name] for name in ("killed", "stopped", "cut")} | dict(self.figures)

    def violations(self) -> Iterator[str]:
        yield from self.seen[:10]
        if not self.figures["episodes"]:
            yield "jobs: no episode came back"
