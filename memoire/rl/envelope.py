"""Samples of any pipeline in one table of rollouts: what workers of `memoire.tmrl` send, and its trainers take.

    sample    (act, obs, rew, terminated, truncated, info)     plain values and arrays, as a compressor left them
    entry     obs: its bytes, ragged | reward | is_reset | episode, step

A server needs no schema of the environment for that. Pure: no socket, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from memoire.arguments import whole
from memoire.errors import DataError
from memoire.replay.columns import Column, Ragged
from memoire.replay.rollouts import Rollouts
from memoire.replay.schema import Schema
from memoire.tables.table import Table
from memoire.wire.values import pack, unpack

TABLE: Final = "samples"
"""Name of the table."""
CAPACITY: Final = 100_000
"""Samples that the table holds unless told otherwise; the oldest leave."""
SCHEMA: Final = Schema(
    {
        "obs": Column(np.uint8, (None,), "state"),
        "reward": np.float32,
        "is_reset": np.bool_,
        "episode": np.int64,
        "step": np.int64,
        "test_length": np.int64,
        "test_return": np.float64,
    }
)


def samples_table(capacity: int = CAPACITY, least: int = 1) -> Table:
    """A table that holds so many samples of any pipeline; the oldest leave, and no worker ever waits.

    Args:
        least: Samples that a trainer should wait for before it takes some: it reads that off `cache_size`.
    """
    return Table(SCHEMA, storage="rollouts", capacity=capacity, on_full="oldest", cache_size=whole("least", least, 1))


class Sample(NamedTuple):
    """What a step gave, as the compressor left it."""

    act: Any
    obs: Any
    rew: Any
    terminated: Any
    truncated: bool
    info: Any
    is_reset: bool = False
    """Whether it is what `reset` gave: no step, and the first sample of an episode."""
    episode: int = 0
    step: int = 0
    """Which episode of its worker, and which step of that; 0 is the reset."""
    reward: float = 0.0
    """As the environment gave it, whatever the compressor made of it."""
    test_length: int = 0
    test_return: float = 0.0
    """Of a reset: of the test episode that the worker ran before it. Length 0 is none."""
    client: bytes = b""
    """Who sent it; b"" before it is sent."""


def columns_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Columns [T, ...] of an episode for `Client.push_episode`.

    Raises:
        ParameterError: a sample holds a value that does not travel; says where.
    """
    _, _, _, _, _, _, is_reset, episode, step, reward, test_length, test_return, _ = zip(*samples, strict=True)
    bodies = [pack(each[:6]) for each in samples]
    return {
        "obs": Ragged(np.frombuffer(b"".join(bodies), np.uint8), list(map(len, bodies))),
        "reward": np.nan_to_num(np.array(reward, np.float32)),
        "is_reset": np.array(is_reset),
        "episode": np.array(episode, np.int64),
        "step": np.array(step, np.int64),
        "test_length": np.array(test_length, np.int64),
        "test_return": np.array(test_return, np.float64),
    }


def samples_of(rollouts: Rollouts) -> list[Sample]:
    """The samples that a learner took, in order.

    Raises:
        DataError: an entry is none.
    """
    packed: Ragged = rollouts["obs"]
    names = "is_reset", "episode", "step", "reward", "test_length", "test_return"
    facts = [rollouts[name].tolist() for name in names]
    clients = [bytes(each) for each in rollouts.client]
    facts.append(
        [client for client, count in zip(clients, rollouts.lengths.tolist(), strict=True) for _ in range(count)]
    )
    body, ends, found = memoryview(packed.values.tobytes()), np.cumsum(packed.lengths).tolist(), []
    for begin, end, more in zip([0, *ends], ends, zip(*facts, strict=True), strict=False):
        parts = unpack(body[begin:end])
        if not isinstance(parts, tuple) or len(parts) != 6:
            raise DataError("a sample", "holds something else than act, obs, rew, terminated, truncated and info")
        found.append(Sample._make(parts + more))
    return found


def episodes_of(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Samples by episode, in order: each begins with a reset, or in the middle of what was sent in parts."""
    found: list[list[Sample]] = []
    for sample in samples:
        if sample.is_reset or not found:
            found.append([])
        found[-1].append(sample)
    return found
