"""Batches for learners far away travel packed where the parameters say lz4, and are the same batches."""

from typing import Any

import numpy as np
import pytest

from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables import draws
from memoire.tables.caches.pool import Pool
from memoire.wire import containers
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind

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
READER, CLIENT = b"r" * 16, b"c" * 16
STEPS = 60


def episode() -> tuple[Any, ...]:
    """Frames that are much like each other, as those of a game are."""
    pictures = np.zeros((STEPS, 12, 12), np.uint8)
    pictures[np.arange(STEPS), np.arange(STEPS) % 12, 3] = 1 + np.arange(STEPS)
    words = [np.full(step % 7, step, np.uint8) for step in range(STEPS)]
    return pictures, words, np.arange(STEPS, dtype=np.int32), np.ones(STEPS, np.float32)


def pool_of(parameters: Parameters) -> Pool:
    memory = Memory(SCHEMA, STEPS, parameters, seed=1)
    memory.open(0)
    for row in zip(*episode(), strict=True):
        memory.add(0, row)
    memory.close(0)
    made = Pool(SCHEMA, parameters, seed=2)
    held = containers.check(containers.build(memory, 50, now=0.0), made.layout)
    made.add(CLIENT, 0, held)
    return made


def far_away(made: Pool, compression: str) -> tuple[Any, Any]:
    """A batch as a reader puts it together, and the bytes that crossed."""
    chosen = draws.plan([made.reserve(READER, 40)], 40, 0.5)
    layout = layout_of(SCHEMA, made.parameters, ContainerKind.DRAWN)
    payload = made.draw_counts(READER, chosen.counts[0], compression=compression)
    held = containers.check(payload, layout)
    return draws.finish(chosen, [held], layout, made.parameters, seed=3, beta=0.4).gathered, payload


@pytest.mark.parametrize("name", EVERY)
def test_samples_of_caches_are_the_same_however_they_travel(name: str) -> None:
    (plain, whole), (packed, fewer) = (far_away(pool_of(EVERY[name]), way) for way in ("none", "lz4"))
    for side in ("prev", "next"):
        assert list(getattr(plain, side)) == list(getattr(packed, side))
        for column, array in getattr(plain, side).items():
            np.testing.assert_array_equal(array, getattr(packed, side)[column])
    np.testing.assert_array_equal(plain.ids, packed.ids)
    np.testing.assert_array_equal(plain.reward, packed.reward)
    has_states = name != "no states"
    assert (fewer.nbytes < whole.nbytes) is has_states
