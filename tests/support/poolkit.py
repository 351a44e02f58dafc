"""What the tests of held samples share: a schema, a clock that stands still, and clients' ids."""

from typing import Any

import numpy as np

import containers
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.caches.pool import Pool
from memoire.wire import containers as unpack
from memoire.wire.containers import ContainerHead
from memoire.wire.layout import layout_of
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
    head = ContainerHead(parameters.multi_step, total, 50, 0.5)
    layout = layout_of(SCHEMA, parameters)
    return containers.make(layout, samples, seed=seed, head=head, replace=replace).held()


def name(i: int) -> bytes:
    """The id of client i."""
    return i.to_bytes(16, "little")


def made(
    samples: int = 8,
    *,
    weight: Any = 1.0,
    total: float = 100.0,
    positives: int = 50,
    minimum: float = 0.5,
    first: int = 0,
    action: Any = None,
    parameters: Parameters = PLAIN,
    seed: int = 0,
) -> Any:
    """A held cache of numbered samples."""
    replace = {Part.NUMBER: np.arange(first, first + samples), Part.WEIGHT: np.broadcast_to(weight, samples)}
    layout = layout_of(SCHEMA, parameters)
    head = ContainerHead(parameters.multi_step, total, positives, minimum)
    one = containers.make(layout, samples, seed=seed, head=head, replace=replace)
    if action is not None:
        place = layout.place(Part.PREV, "action")
        row = unpack.table(one.payload)[place]
        one.payload[row.offset : row.offset + row.stored] = np.asarray(action, "<i4").view(np.uint8)
    return one.held()


def pool_of(unused: list[int], parameters: Parameters = PLAIN, **options: Any) -> Pool:
    """A pool in which client i holds `unused[i]` samples, in caches of 5 at most, numbered through."""
    pool = Pool(SCHEMA, parameters, seed=1, **options)
    for i, count in enumerate(unused):
        for first in range(0, count, 5):
            held = made(min(5, count - first), first=first, total=10.0 * (i + 1), parameters=parameters)
            pool.add(name(i), first, held)
    return pool


def held(ages: Any, models: Any, parameters: Parameters, *, first: int = 0, weight: Any = 1.0, **head: Any) -> Any:
    count = len(ages)
    layout = layout_of(SCHEMA, parameters)
    replace = {
        Part.NUMBER: np.arange(first, first + count),
        Part.WEIGHT: np.broadcast_to(np.asarray(weight, np.float64), count),
        Part.AGE: np.asarray(ages, np.float32),
        Part.MODEL: np.asarray(models, np.int64),
    }
    facts = ContainerHead(1, head.get("total", 100.0), head.get("positives", 50), head.get("minimum", 0.5))
    return containers.make(layout, count, head=facts, replace=replace).held()


def held_of(pool: Pool) -> list[Any]:
    """What a pool of caches holds of each client."""
    return list(pool._queues.held)
