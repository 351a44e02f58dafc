"""What the tests of held samples share: a schema, a clock that stands still, and clients' ids."""

from typing import Any

import numpy as np

import containers
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.wire.layout import layout_of
from memoire.wire.pack import Head
from memoire.wire.parts import Part

SCHEMA = Schema({"obs": (np.float32, (3,)), "action": np.int32, "reward": np.float32})
PLAIN = Parameters(importance_exponent=1.0)


class Clock:
    """Stands still until somebody changes `now`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def cache_of(
    samples: int, first: int = 0, *, parameters: Parameters = PLAIN, total: float = 10.0, seed: int = 0
) -> Any:
    """A checked cache of samples that are numbered from `first`, of a memory with this total weight."""
    replace = {Part.NUMBER: np.arange(first, first + samples), Part.WEIGHT: np.ones(samples)}
    head = Head(parameters.multi_step, total, 50, 0.5)
    layout = layout_of(SCHEMA, parameters)
    return containers.make(layout, samples, seed=seed, head=head, replace=replace).held()


def name(i: int) -> bytes:
    """The id of client i."""
    return i.to_bytes(16, "little")
