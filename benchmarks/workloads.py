"""The workloads that every benchmark shares, as DESIGN.md's table names them.

W1: state float32[64], action float32[8], reward float32[1], n-step 1: many small samples.
W2: state uint8[84, 84], stack 4, action int32[1], n-step 3: few large ones, 56 kB each with both stacks.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from peers.tasks import BATCH, EPISODE, distinct

import memoire
from memoire.replay.memory import Memory
from memoire.tables.caches.pool import Pool
from memoire.wire import containers


@dataclass(frozen=True, eq=False)
class Workload:
    """A schema, how it is sampled, and how many entries are stored; the same object is the same workload."""

    name: str
    schema: memoire.Schema
    parameters: memoire.Parameters
    entries: int
    """Entries of the memory that is drawn from: more than fit into a processor's caches."""
    ring: int
    """Entries of the ring that is written to, a few episodes: writing is compared while memory is warm."""
    held: int
    """Caches held by a pool that is drawn from."""

    @property
    def described(self) -> str:
        columns = ", ".join(f"{name} {column.dtype}{list(column.shape)}" for name, column in self.schema.items())
        p = self.parameters
        return f"{self.name}: {columns}; stack {p.frame_stack}, n-step {p.multi_step}, {self.entries} entries"

    def episode(self, random: np.random.Generator, length: int = EPISODE) -> tuple[np.ndarray, ...]:
        """Distinct values for every column: [length, *shape] each."""
        given = [column for column in self.schema.values() if column.role != "return"]
        return tuple(distinct(random, (length, *column.shape), str(column.dtype)) for column in given)

    def fill(self, memory: Memory, seed: int) -> None:
        """Closed episodes with varied priorities, until a memory is full."""
        random = np.random.default_rng(seed)
        values = self.episode(random)
        for _ in range(memory.capacity // EPISODE):
            memory.open(0)
            memory.extend(0, values, random.uniform(0.1, 2.0, EPISODE).astype(np.float32))
            memory.close(0)

    @cache  # noqa: B019, a workload lives as long as its benchmark
    def filled(self) -> Memory:
        """The memory that is drawn from, full: one for all rows, since it takes its time to write."""
        memory = Memory(self.schema, self.entries, self.parameters, seed=0)
        self.fill(memory, 0)
        return memory


def w1(entries: int = 1_000_000) -> Workload:
    schema = memoire.Schema(
        {
            "state": memoire.Column("float32", (64,), "state"),
            "action": memoire.Column("float32", (8,)),
            "reward": memoire.Column("float32", (1,), "reward"),
        }
    )
    return Workload("W1", schema, memoire.Parameters(), entries, ring=100_000, held=256)


def w2(entries: int = 50_000) -> Workload:
    schema = memoire.Schema(
        {
            "state": memoire.Column("uint8", (84, 84), "state"),
            "action": memoire.Column("int32", (1,)),
            "reward": memoire.Column("float32", (1,), "reward"),
        }
    )
    parameters = memoire.Parameters(frame_stack=4, multi_step=3)
    return Workload("W2", schema, parameters, entries, ring=10_000, held=32)


@cache
def received(workload: Workload, count: int = 0) -> list[np.ndarray]:
    """Cache payloads as they come off the wire: so many, or more bytes than a processor's caches hold."""
    return [containers.build(workload.filled(), BATCH, now=0.0) for _ in range(count or workload.held)]


def pool_of(workload: Workload, *, reuse: bool, count: int = 0) -> Pool:
    """A pool that holds those caches, of four clients."""
    parameters = workload.parameters.replace(reuse_cache=reuse)
    pool = Pool(workload.schema, parameters, byte_limit=1 << 40, seed=0)
    for sequence, payload in enumerate(received(workload, count)):
        pool.add(bytes([sequence % 4 + 1]) * 16, sequence, containers.check(payload, pool.layout))
    return pool


class NumpyGather:
    """The limit that a draw is compared with: NumPy fancy indexing of as many rows of as many bytes.

    It is given the row numbers, so that it draws nothing, looks nothing up and computes nothing.
    """

    def __init__(self, workload: Workload, *, seed: int = 1) -> None:
        self.random = random = np.random.default_rng(seed)
        self.entries = workload.entries
        self.stack = workload.parameters.frame_stack
        self.step = workload.parameters.multi_step
        shapes = [((workload.entries, *column.shape), column.dtype) for column in workload.schema.values()]
        self.columns = [np.zeros(*each) for each in shapes]
        for column, values in zip(self.columns, workload.episode(random), strict=True):
            for begin in range(0, workload.entries - EPISODE + 1, EPISODE):  # touch every page
                column[begin : begin + EPISODE] = values
        self.turns = [self.rows() for _ in range(64)]
        self.turn = 0
        self.out: list[np.ndarray] | None = None

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of the entries, of their stacks and of the stacks after them."""
        last = self.random.integers(self.stack, self.entries - self.step, BATCH)
        frames = last[:, None] - np.arange(self.stack)[::-1]
        if self.stack == 1:
            return last, last, last + self.step
        return last, frames, frames + self.step

    def fresh(self) -> list[np.ndarray]:
        """Gather one batch into new arrays."""
        self.turn = (self.turn + 1) % len(self.turns)
        last, prev, following = self.turns[self.turn]
        state, action, reward = self.columns
        return [state[prev], state[following], action[last], reward[last]]

    def over(self) -> None:
        """Gather one batch over the one before: no memory is asked for."""
        self.turn = (self.turn + 1) % len(self.turns)
        last, *rows = self.turns[self.turn]
        state, *columns = self.columns
        if self.out is None:
            self.out = self.fresh()
        for column, places, out in zip((state, state, *columns), (*rows, last, last), self.out, strict=True):
            np.take(column, places, axis=0, out=out, mode="clip")  # any other mode goes through a copy
