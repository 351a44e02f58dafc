"""Sides of Stable-Baselines3: its uniform buffer on the CPU, with n-step sums made when drawing, without priorities.

The two stacks of a W2 step are stored, as its documentation does by default.
"""

from functools import cache, partial

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from tasks import BATCH, EPISODE, TASK, Task

torch.set_num_threads(1)


def buffer_of(task: Task, entries: int) -> ReplayBuffer:
    shape = task.shape if task.stack == 1 else (task.stack, *task.shape)
    high = 255 if task.dtype == "uint8" else np.inf
    observed = spaces.Box(0 if task.dtype == "uint8" else -np.inf, high, shape, np.dtype(task.dtype).type)
    acted = spaces.Discrete(18) if task.name == "W2" else spaces.Box(-np.inf, np.inf, task.action_shape, np.float32)
    if task.multi_step == 1:
        return ReplayBuffer(entries, observed, acted, device="cpu")
    return NStepReplayBuffer(entries, observed, acted, device="cpu", n_steps=task.multi_step, gamma=0.99)


def rows_of(task: Task) -> list:
    """Return steps as its algorithms insert them: with an axis for the environments, and a list of infos."""
    before, after = task.observations(0, frames_last=False), task.observations(1, frames_last=False)
    infos = [{}]
    return [
        (before[i : i + 1], after[i : i + 1], task.actions[i : i + 1], task.rewards[i : i + 1], task.is_end[i : i + 1])
        + (infos,)
        for i in range(EPISODE)
    ]


def steps(name: str, entries: int):
    """Return a call that inserts an episode step by step."""
    task = TASK(name, entries)
    replay, rows = buffer_of(task, task.ring), rows_of(task)

    def insert() -> None:
        for row in rows:
            replay.add(*row)

    return insert


@cache
def filled(name: str, entries: int) -> ReplayBuffer:
    task = TASK(name, entries)
    replay, rows = buffer_of(task, entries), rows_of(task)
    for _ in range(entries // EPISODE):
        for row in rows:
            replay.add(*row)
    return replay


def draws(name: str, entries: int):
    return partial(filled(name, entries).sample, BATCH)
