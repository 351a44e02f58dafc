"""Sides of cpprb. A frame is stored once (`next_of`, `stack_compress`), n-step sums are made at insertion (`Nstep`)."""

import multiprocessing
from functools import cache, partial

import cpprb
import numpy as np
from tasks import ALPHA, BATCH, BETA, EPISODE, ERRORS, TASK, Acting, Task, in_rotation, leaf_updates, leaf_weights


def columns_of(task: Task) -> dict:
    shape = task.shape + (() if task.stack == 1 else (task.stack,))
    return {
        "obs": {"shape": shape, "dtype": np.dtype(task.dtype)},
        "act": {"shape": task.action_shape, "dtype": np.dtype(task.action_dtype)},
        "rew": {},
        "done": {},
    }


def buffer_of(task: Task, entries: int) -> cpprb.PrioritizedReplayBuffer:
    columns = columns_of(task)
    form = {"next_of": "obs"}
    if task.multi_step > 1:  # `next_of` excludes n-step windows
        columns["next_obs"] = columns["obs"]
        several = {"size": task.multi_step, "gamma": 0.99, "rew": "rew", "next": "next_obs"}
        form = {"Nstep": several, "stack_compress": ["obs", "next_obs"]}
    return cpprb.PrioritizedReplayBuffer(entries, columns, alpha=ALPHA, **form)


def block_of(task: Task) -> dict:
    """Return an episode in the form that one call inserts."""
    return {
        "obs": task.observations(0),
        "act": task.actions,
        "rew": task.rewards,
        "next_obs": task.observations(1),
        "done": task.is_end,
    }


@cache
def filled(name: str, entries: int) -> cpprb.PrioritizedReplayBuffer:
    task = TASK(name, entries)
    replay, block = buffer_of(task, entries), block_of(task)
    for _ in range(entries // EPISODE):
        replay.add(**block)
        replay.on_episode_end()
    replay.update_priorities(np.arange(entries), task.priorities(entries))
    return replay


def steps(name: str, entries: int):
    """Return a call that inserts an episode step by step."""
    task = TASK(name, entries)
    replay, block = buffer_of(task, task.ring), block_of(task)
    rows = [{column: values[step] for column, values in block.items()} for step in range(EPISODE)]

    def insert() -> None:
        for row in rows:
            replay.add(**row)
        replay.on_episode_end()

    return insert


def episodes(name: str, entries: int):
    """Return a call that inserts an episode at once."""
    task = TASK(name, entries)
    replay, block = buffer_of(task, task.ring), block_of(task)

    def insert() -> None:
        replay.add(**block)
        replay.on_episode_end()

    return insert


def draws(name: str, entries: int):
    return partial(filled(name, entries).sample, BATCH, beta=BETA)


def updates(name: str, entries: int):
    replay = filled(name, entries)
    places = [replay.sample(BATCH, beta=BETA)["indexes"] for _ in range(64)]
    return in_rotation(replay.update_priorities, places, ERRORS)


@cache
def tree(leaves: int) -> cpprb.PrioritizedReplayBuffer:
    """Return a buffer with one int8 column, since cpprb has no public interface to its trees."""
    replay = cpprb.PrioritizedReplayBuffer(leaves, {"a": {"dtype": np.int8}}, alpha=1.0)
    replay.add(a=np.zeros(leaves, np.int8), priorities=leaf_weights(leaves))
    return replay


def tree_draws(leaves: int):
    return partial(tree(leaves).sample, BATCH, beta=0.0)


def tree_updates(leaves: int):
    return in_rotation(tree(leaves).update_priorities, *leaf_updates(leaves))


AHEAD = 8
"""Blocks that actors may insert before the learner draws a batch for each."""


class EndToEnd(Acting):
    """cpprb's buffer for several processes, Ape-X with shared memory: actors insert blocks of steps, a learner draws.

    The buffer has neither n-step sums nor shared frames: actors insert both stacks. As on the other sides, each step
    is drawn once on average: a batch is drawn for each block.
    """

    def __init__(self, name: str, entries: int, actors: int) -> None:
        task, context = TASK(name, entries), multiprocessing.get_context("fork")
        columns = columns_of(task) | {"next_obs": columns_of(task)["obs"]}
        self.replay = cpprb.MPPrioritizedReplayBuffer(entries, columns, alpha=ALPHA, ctx=context)
        self.room, self.ready = context.Semaphore(AHEAD), context.Semaphore(0)
        self.start(context, actors, self.act, task)

    def act(self, pipe, task: Task) -> None:
        block = {column: values[:BATCH] for column, values in block_of(task).items()}
        pipe.send("ready")
        while (count := pipe.recv()) is not None:
            for _ in range(count):
                self.room.acquire()
                self.replay.add(**block)
                self.ready.release()

    def draw(self) -> None:
        self.ready.acquire()
        self.room.release()
        self.replay.sample(BATCH, beta=BETA)
