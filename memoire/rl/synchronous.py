"""A worker that waits for its trainer, and one that only measures its environment."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from .trainer.worker import EpisodeResult, RolloutWorker

WAIT_INTERVAL = 0.1
"""Seconds after which a worker that waits for a model sees whether it is to end."""


@dataclass
class StepAllowance:
    """How many steps one model may make.

    Args:
        initial: Before there is a model.
        most: By one model.
    """

    initial: float
    most: float
    made: int = 0
    version: int = 0
    """Of the model that makes them; 0 is none."""

    @property
    def is_used_up(self) -> bool:
        """Whether to wait for the next model."""
        return self.made >= (self.most if self.version else max(self.initial, self.most))

    def follow(self, version: int) -> None:
        """Count for the model that acts now."""
        if version != self.version:
            self.version, self.made = version, 0


def run_synchronous(
    worker: RolloutWorker,
    test_episode_interval: int = 0,
    nb_steps: float = np.inf,
    initial_steps: int = 1,
    max_steps_per_update: float = np.inf,
    end_episodes: bool = True,
) -> None:
    """Training steps that wait for the trainer: after `initial_steps`, at most `max_steps_per_update` by one model.

    Args:
        test_episode_interval: As of `RolloutWorker.run`.
        nb_steps: Steps to make.
        end_episodes: Wait only between episodes; else within them, too.
    """
    allowance, began = StepAllowance(initial_steps, max_steps_per_update), worker.steps
    with worker.until_stopped():
        while worker.steps - began < nb_steps and not worker.is_stopping:
            if test_episode_interval and worker.episodes % test_episode_interval == 0:
                worker.run_episode(train=False)
            _episode(worker, allowance, began + nb_steps, end_episodes)


def _episode(worker: RolloutWorker, allowance: StepAllowance, last: float, end_episodes: bool) -> None:
    obs, _ = worker.reset(True)
    length, returned, is_over = 0, 0.0, False
    while not (is_over or worker.is_stopping):
        if allowance.is_used_up and not (end_episodes and length):
            _await_model(worker)
        worker.follow()
        allowance.follow(worker.version)
        is_last = length + 1 >= worker.limit or worker.steps + 1 >= last
        obs, reward, terminated, truncated, _ = worker.step(obs, False, True, is_last)
        allowance.made += 1
        length, returned, is_over = length + 1, returned + float(reward), terminated or truncated
    worker.ended(EpisodeResult(length, returned, worker.version, is_over), "train")


def _await_model(worker: RolloutWorker) -> None:
    """Send what is recorded, and wait for a model above the present one."""
    worker.flush(is_end=False)
    while not worker.is_stopping and not worker.await_model(WAIT_INTERVAL):
        pass


def step_seconds(worker: RolloutWorker, nb_steps: int, test: bool = False) -> dict[str, float]:
    """Steps by a worker's policy, without samples: how many ("steps"), and seconds of each ("mean", "max")."""
    took: list[float] = []
    with worker.until_stopped():
        obs, _ = worker.reset(False)
        while len(took) < nb_steps and not worker.is_stopping:
            began = time.perf_counter()
            obs, _, terminated, truncated, _ = worker.step(obs, test, False)
            took.append(time.perf_counter() - began)
            if terminated or truncated:
                obs, _ = worker.reset(False)
    return {"steps": float(len(took)), "mean": float(np.mean(took or [np.nan])), "max": max(took, default=np.nan)}
