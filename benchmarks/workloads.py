"""Workloads that the benchmarks share, with their memories, pools and servers.

W1: state float32[64], action float32[8], reward float32[1], n-step 1: many small samples.
W2: state uint8[84, 84], stack 4, action int32[1], n-step 3: few large samples, 56 kB each with both stacks.
"""

from dataclasses import dataclass
from functools import cache
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from measure import TCP
from peers.tasks import ALPHA, BATCH, BETA, EPISODE, Task, distinct

import memoire
from memoire.replay.memory import Memory
from memoire.tables.caches.pool import Pool
from memoire.wire import containers


@dataclass(frozen=True, eq=False)
class Workload:
    """Schema, parameters of its sampling, and sizes of its stores; workloads are equal if they are the same object."""

    name: str
    schema: memoire.Schema
    parameters: memoire.Parameters
    entries: int
    """Entries of the memory for draws: more than fit into a processor's caches."""
    ring: int
    """Entries of the ring for writes, a few episodes: writes are compared while memory is warm."""
    held: int
    """Caches that a pool for draws holds."""

    @property
    def described(self) -> str:
        columns = ", ".join(f"{name} {column.dtype}{list(column.shape)}" for name, column in self.schema.items())
        p = self.parameters
        return f"{self.name}: {columns}; stack {p.frame_stack}, n-step {p.multi_step}, {self.entries} entries"

    def episode(self, random: np.random.Generator, length: int = EPISODE) -> tuple[np.ndarray, ...]:
        """Return distinct values of every column but the return: [length, *shape] each."""
        columns = [column for column in self.schema.values() if column.role != "return"]
        return tuple(distinct(random, (length, *column.shape), str(column.dtype)) for column in columns)

    def fill(self, memory: Memory, seed: int) -> None:
        """Write closed episodes with varied priorities until a memory is full."""
        random = np.random.default_rng(seed)
        values = self.episode(random)
        for _ in range(memory.capacity // EPISODE):
            memory.open(0)
            memory.extend(0, values, random.uniform(0.1, 2.0, EPISODE).astype(np.float32))
            memory.close(0)

    @cache  # noqa: B019, a workload lives as long as its benchmark
    def filled(self) -> Memory:
        """Return the full memory for draws, which all rows share, since filling is slow."""
        memory = Memory(self.schema, self.entries, self.parameters, seed=0)
        self.fill(memory, 0)
        return memory


def w1(entries: int = 1_000_000) -> Workload:
    schema = steps_of("float32", (64,), memoire.Column("float32", (8,)))
    return Workload("W1", schema, memoire.Parameters(), entries, ring=100_000, held=256)


def w2(entries: int = 50_000) -> Workload:
    schema = steps_of("uint8", (84, 84), memoire.Column("int32", (1,)))
    parameters = memoire.Parameters(frame_stack=4, multi_step=3)
    return Workload("W2", schema, parameters, entries, ring=10_000, held=32)


def steps_of(dtype: str, shape: tuple[int, ...], action: memoire.Column) -> memoire.Schema:
    """Return the schema of steps with states of this dtype and shape."""
    reward = memoire.Column("float32", (1,), "reward")
    return memoire.Schema({"state": memoire.Column(dtype, shape, "state"), "action": action, "reward": reward})


@cache
def received(workload: Workload, count: int = 0) -> list[np.ndarray]:
    """Return `count` cache payloads as they arrive from the wire; by default `held` of the workload."""
    return [containers.build(workload.filled(), BATCH, now=0.0) for _ in range(count or workload.held)]


def pool_of(workload: Workload, *, reuse: bool, count: int = 0) -> Pool:
    """Return a pool that holds the received caches, from four clients."""
    parameters = workload.parameters.replace(reuse_cache=reuse)
    pool = Pool(workload.schema, parameters, byte_limit=1 << 40, seed=0)
    for sequence, payload in enumerate(received(workload, count)):
        pool.add(bytes([sequence % 4 + 1]) * 16, sequence, containers.check(payload, pool.layout))
    return pool


# The workloads as tasks, which peers receive


def schema_of(task: Task) -> memoire.Schema:
    return memoire.Schema(
        {
            "obs": memoire.Column(task.dtype, task.shape, "state"),
            "action": memoire.Column(task.action_dtype, task.action_shape),
            "reward": np.float32,
        }
    )


def play(pipe: Connection, client: memoire.Client, task: Task, ring: int) -> None:
    """Run an actor: fill its memory of `ring` entries, then in each turn record steps until the pipe has an order."""
    rows = list(zip(task.frames[:EPISODE], task.actions, task.rewards, task.frames[1 : EPISODE + 1], strict=True))
    place, info, writer = 0, {}, client.writer(check=False)  # type: int, dict[str, Any], Any

    def record(steps: int) -> None:
        nonlocal place
        for _ in range(steps):
            obs, action, reward, following = rows[place]
            place = (place + 1) % EPISODE
            writer.step(obs, action, reward, place == 0, False, following, info)

    record(ring)
    pipe.send("ready")
    while pipe.recv() is not None:
        while not pipe.poll():
            record(64)
        pipe.recv()
        pipe.send(None)


def settings_of(task: Task) -> dict[str, Any]:
    """Return the settings of sampling, for a memory or for a server."""
    sampler = memoire.Prioritized(ALPHA, beta=BETA)
    return {"sampler": sampler, "discount": 0.99, "multi_step": task.multi_step, "frame_stack": task.stack, "seed": 0}


def buffer_of(task: Task, entries: int) -> memoire.Buffer:
    return memoire.Buffer(schema_of(task), entries, start="repeat", **settings_of(task))


def server_of(task: Task, storage: str = "caches", **settings: Any) -> memoire.Server:
    """Return a server for a task; `settings` are further arguments of `memoire.Server`."""
    capacity = task.entries if storage == "episodes" else 0
    return memoire.Server(TCP, schema_of(task), storage=storage, capacity=capacity, **settings_of(task), **settings)


def extend(memory: Memory, task: Task) -> None:
    """Write a whole episode of a task into a memory, and close it."""
    memory.open()
    memory.extend(0, (task.frames[:EPISODE], task.actions, task.rewards))
    memory.close(terminated=True, final_state=task.frames[EPISODE])


class NumpyRing:
    """Ring of NumPy arrays, the lower limit of the work: the row numbers are fixed beforehand.

    The ring therefore draws no rows, looks up no indexes and computes nothing.

    Args:
        values: An episode's states, actions and rewards.
        entries: Capacity of the ring, which is full.
        stack, step: States of a stack, and entries from one stack to the next.
    """

    def __init__(self, values: tuple[np.ndarray, ...], entries: int, stack: int, step: int) -> None:
        self.values, self.entries, self.row = values, entries, 0
        self.columns = [np.zeros((entries, *each.shape[1:]), each.dtype) for each in values]
        self.rows = list(zip(*values, strict=True))
        last = np.random.default_rng(1).integers(stack, entries - step, (64, BATCH))
        frames = last if stack == 1 else last[:, :, None] - np.arange(stack)[::-1]
        self.turns = cycle(zip(last, frames, frames + step, strict=True))
        for _ in range(entries // EPISODE):
            self.extend()
        self.out = self.gather()

    def add(self) -> None:
        """Write an episode, entry by entry."""
        for values in self.rows:
            row = self.row
            for column, value in zip(self.columns, values, strict=True):
                column[row] = value
            self.row = (row + 1) % self.entries

    def extend(self) -> None:
        """Write an episode at once."""
        begin = self.row if self.row + EPISODE <= self.entries else 0
        for column, block in zip(self.columns, self.values, strict=True):
            column[begin : begin + EPISODE] = block
        self.row = (begin + EPISODE) % self.entries

    def gather(self) -> list[np.ndarray]:
        """Return a batch in new arrays."""
        last, before, after = next(self.turns)
        states, actions, rewards = self.columns
        return [states[before], states[after], actions[last], rewards[last]]

    def over(self) -> None:
        """Write a batch over the first batch, without allocating memory."""
        last, *frames = next(self.turns)
        states, *columns = self.columns
        for column, places, out in zip((states, states, *columns), (*frames, last, last), self.out, strict=True):
            np.take(column, places, axis=0, out=out, mode="clip")  # any other mode makes a copy
