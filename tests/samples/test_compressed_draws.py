"""Draws for distant learners: with lz4 as a parameter, they travel compressed and yield the same batches."""

import numpy as np
import pytest

from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.caches.pool import Pool
from memoire.wire import containers
from memory_checks import with_episode
from poolkit import assert_same_samples, far_away

SCHEMA = Schema(
    {
        "picture": Column("uint8", (12, 12), "state"),
        "words": Column("uint8", (None,), "state"),
        "action": Column("int32"),
        "reward": Column("float32", (), "reward"),
    }
)
PLAIN = Parameters(compression="lz4")
EVERY = {
    "plain": PLAIN,
    "stacks": PLAIN.replace(frame_stack=3, multi_step=2, start="zero"),
    "one side": PLAIN.replace(next=()),
    "no states": PLAIN.replace(prev=("action",), next=()),
    "sequences": PLAIN.replace(sequence_length=4),
}
STEPS = 60


def pool_of(parameters: Parameters) -> Pool:
    """Return a pool with one cache of similar frames, as frames of a game are."""
    pictures = np.zeros((STEPS, 12, 12), np.uint8)
    pictures[np.arange(STEPS), np.arange(STEPS) % 12, 3] = 1 + np.arange(STEPS)
    words = [np.full(step % 7, step, np.uint8) for step in range(STEPS)]
    memory = Memory(SCHEMA, STEPS, parameters, seed=1)
    with_episode(memory, (pictures, words, np.arange(STEPS, dtype=np.int32), np.ones(STEPS, np.float32)))
    pool = Pool(SCHEMA, parameters, seed=2)
    pool.add(b"c" * 16, 0, containers.check(containers.build(memory, 50, now=0.0), pool.layout))
    return pool


@pytest.mark.parametrize("name", EVERY)
def test_samples_of_caches_are_the_same_however_they_travel(name: str) -> None:
    (plain, whole), (packed, fewer) = (far_away(pool_of(EVERY[name]), 40, compression=way) for way in ("none", "lz4"))
    assert_same_samples(plain.gathered, packed.gathered)
    np.testing.assert_array_equal(plain.gathered.ids, packed.gathered.ids)
    has_states = name != "no states"
    assert (fewer.nbytes < whole.nbytes) is has_states
