"""Minari episodes with unusual values: taken as they are, or an error that names the episode and the fault.

The bytes are decisions (see `choices`): values of an episode in place of arrays of the right length and type.
"""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np

from fuzz.choices import Choices
from memoire import minari
from memoire.errors import DataError, EntryError, EpisodeError, SchemaError
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.schema import Schema
from memory_checks import check_memory

REACHED = {"taken", "DataError", "EntryError", "SchemaError"}
SCHEMA = Schema(
    {
        "obs": {"image": (np.uint8, (2, 2)), "speed": np.float32},
        "action": np.int64,
        "reward": np.float32,
        "words": Column(np.uint8, (None,)),
    }
)
SHAPES = ((), (3,), (4,), (4, 2, 2), (3, 2, 2), (0,), (4, 0, 2), (4, 1), (3, 1), (1, 4))
DTYPES = ("u1", "f4", "f8", "i8", "?", "U3", "O", "M8[s]", "c16", ">i2", "V4")


def seeds() -> list[bytes]:
    """Return rows of decisions; a row of zeros is a good episode."""
    rng = random.Random(2)
    return [bytes(200), *(rng.randbytes(200) for _ in range(24)), *(rng.randbytes(3) + bytes(200) for _ in range(8))]


def _odd(choices: Choices) -> Any:
    plain = (None, 1, "text", b"\xff" * 4, [], {}, (), [[1], [2, 3]], object(), float("nan"), 10**400)
    kinds = (
        lambda: np.zeros(choices.pick(SHAPES), choices.pick(DTYPES)),
        lambda: choices.pick(plain),
        lambda: np.full(choices.pick(SHAPES), choices.real()),
        lambda: [_odd(choices) for _ in range(choices.below(5))],
        lambda: {choices.pick(("image", "speed", "extra")): _odd(choices) for _ in range(choices.below(4))},
        lambda: np.full(choices.pick(SHAPES), choices.integer(0, 2**63 - 1)),
    )
    return choices.pick(kinds)()


def _episode(choices: Choices) -> Any:
    """Return an episode in which any value may be replaced."""

    def some(good: Any) -> Any:
        return good if choices.below(8) != 7 else _odd(choices)

    length = choices.pick((3, 3, 3, 1, 0, 30))
    return SimpleNamespace(
        id=0,
        observations=some({"image": some(np.zeros((length + 1, 2, 2), np.uint8)), "speed": some(np.zeros(length + 1))}),
        actions=some(np.zeros(length, np.int64)),
        rewards=some(np.zeros(length)),
        terminations=some(np.zeros(length, np.bool_)),
        truncations=some(np.ones(length, np.bool_)),
        infos=some({"words": some([b"ab"] * length)}),
    )


def one(data: bytes) -> str:
    """Take two odd episodes, and after them a good one without an error."""
    choices = Choices(data)
    memory = Memory(SCHEMA, 20)
    verdict = "taken"
    for _ in range(2):
        try:
            minari.fill(memory, [_episode(choices)])
        except (DataError, EntryError, EpisodeError, SchemaError) as error:
            str(error)
            verdict = type(error).__name__
    minari.fill(memory, [_episode(Choices(b""))])
    check_memory(memory)
    return verdict
