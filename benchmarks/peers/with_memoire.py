"""memoire's own first batch, for startup.py: a program that imports what its user would import."""

import sys
from multiprocessing import get_context

import numpy as np
from tasks import BATCH, EPISODE, Task

import memoire


def schema_of(task: Task) -> memoire.Schema:
    columns = {
        "obs": memoire.Column(task.dtype, task.shape, "state"),
        "action": memoire.Column(task.action_dtype, task.action_shape),
        "reward": np.float32,
    }
    return memoire.Schema(columns)


def fill(memory, task: Task) -> None:
    memory.open()
    memory.extend(0, (task.frames[:EPISODE], task.actions, task.rewards))
    memory.close(terminated=True, final_state=task.frames[EPISODE])


def alone() -> None:
    """A memory in this process."""
    task = Task("W1", EPISODE)
    buffer = memoire.Buffer(schema_of(task), EPISODE, sampler=memoire.Prioritized(0.6, beta=0.4), seed=0)
    fill(buffer.memory, task)
    buffer.sample(BATCH)


def act(endpoint: str) -> None:
    with memoire.connect(endpoint, capacity=EPISODE, on_full="block", timeout=60) as client:
        fill(client.memory, Task("W1", EPISODE))
        client.update(timeout=60)
        client.push_cache(timeout=60)


def cluster() -> None:
    """A server here, an actor in another process."""
    task = Task("W1", EPISODE)
    with memoire.Server("tcp://127.0.0.1:0", schema_of(task), sampler=memoire.Prioritized(0.6, beta=0.4)) as server:
        actor = get_context("spawn").Process(target=act, args=(server.endpoint,))
        actor.start()
        server.get_batch(BATCH, timeout=60)
        actor.join()


if __name__ == "__main__":
    {"alone": alone, "cluster": cluster}[sys.argv[1]]()
