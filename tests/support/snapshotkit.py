"""Memories and pools for the tests of snapshots."""

import numpy as np

from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.episodes.memory import NamedMemory
from memoire.tables.episodes.pool import EpisodePool

STATES = Schema({"obs": Column(np.float32, (3,), "state"), "reward": Column(np.float32, (), "reward")})


def episodes_of(memory):
    """A pool around a memory."""
    pool = EpisodePool(memory.schema, memory.parameters, capacity=memory.capacity)
    pool._stored.now = NamedMemory(memory, pool.owner)
    return pool


def memory_of(lengths, capacity=1000, seed=0, **parameters):
    """A memory of closed episodes, of which every other one ends for good and a third has priorities of a learner's."""
    rng = np.random.default_rng(seed)
    memory = Memory(STATES, capacity, Parameters(**parameters), seed=seed)
    for i, length in enumerate(lengths):
        memory.set_clock(1e9 + 60 * i + 1000 * seed)
        memory.open()
        values = [rng.random((length, 3), np.float32), rng.random(length, np.float32)]
        numbers = memory.extend(0, values, rng.random(length, np.float32), model_version=i)
        final = None if i % 3 == 2 else rng.random(3, np.float32)
        memory.close(multiplier=1.0 + i % 2, final_state=final, terminated=i % 2 == 0 or None)
        if i % 3 == 0:
            memory.update_priorities(numbers, rng.random(length))
    return memory
