"""A memory of episodes, looked at without taking anything: how its entries are spread, and a copy of a sample. Pure."""

from __future__ import annotations

import math
import random
import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.errors import StaleEntry
from memoire.replay.memory import Memory

from .episode_draw import ids_of
from .episode_memory import NamedMemory
from .inspection import Distribution, EntryPlace, Histogram, PeekedSample
from .interface import MAX_INSPECTED


class _SeenEntries(NamedTuple):
    """Entries of a memory that is held, every n-th row."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    ages: NDArray[np.float32]

    @classmethod
    def of(cls, memory: Memory, rng: random.Random, most: int = MAX_INSPECTED) -> _SeenEntries:
        every = -(-memory.capacity // most)
        rows = np.arange(rng.randrange(every), memory.capacity, every)
        rows = rows[memory.contents()["meta"]["episode"][rows] >= 0]
        ages, weights = np.empty(len(rows), np.float32), np.empty(len(rows), np.float64)
        memory._facts(rows, ages, None, weights)
        return cls(rows, weights, ages)


def distribution_of(memory: Memory, rng: random.Random, most: int = MAX_INSPECTED) -> Distribution:
    """How entries are spread: all of them, or at most so many that are evenly spaced."""
    with memory.held():
        seen = _SeenEntries.of(memory, rng, most)
        total, positives, _ = memory.sums()
        entries = memory.num_entries
    is_known = len(seen.rows) > 0 and 0.0 < total < math.inf
    squares = float(np.square(seen.weights / total).mean()) * entries if is_known else 0.0
    return Distribution(
        looked=len(seen.rows),
        held=entries,
        population=float(positives),
        total_weight=min(total, sys.float_info.max),
        effective=1.0 / squares if squares > 0.0 else None,
        weights=Histogram.of(seen.weights),
        ages=Histogram.of(seen.ages),
    )


def copied(named: NamedMemory, beta: float, rng: random.Random, number: int | None = None) -> PeekedSample | None:
    """A copy of the sample of an entry: of this number, or a random one, by weight among evenly spaced ones. None where
    there is none of that number, or it has no weight.
    """
    memory = named.memory
    with memory.held():
        chosen = _drawn(memory, rng) if number is None else number
        weight = 0.0 if chosen is None else _weight_of(memory, chosen)
        if chosen is None or not weight > 0.0:
            return None
        total, positives, _ = memory.sums()
        place = _place_of(memory, chosen)
        gathered = memory.gather([chosen])
    gathered.ids = ids_of(named, [chosen])
    return PeekedSample(gathered, weight / total, float(positives), beta, place)


def _drawn(memory: Memory, rng: random.Random) -> int | None:
    """Number of a random entry of a memory that is held; None where none has a weight."""
    seen = _SeenEntries.of(memory, rng)
    most = float(seen.weights.max(initial=0.0))
    if not most > 0.0:
        return None
    at = rng.choices(range(len(seen.rows)), (seen.weights / most).tolist())[0]
    return int(memory.contents()["meta"]["number"][seen.rows[at]])


def _weight_of(memory: Memory, number: int) -> float:
    try:
        return float(memory.weights([number])[0])
    except StaleEntry:
        return 0.0


def _place_of(memory: Memory, number: int) -> EntryPlace:
    """Where an entry of a memory that is held stands in its episode, and what a learner said of it."""
    inside = memory.contents()
    meta = inside["meta"]
    one = meta[number % memory.capacity]
    rows = np.flatnonzero(meta["episode"] == one["episode"])
    weights = np.empty(len(rows), np.float64)
    memory._facts(rows, None, None, weights)
    numbers = np.sort(meta["number"][rows])
    able = np.sort(meta["number"][rows[weights > 0.0]])
    at = int(np.searchsorted(able, number))
    error = max(0.0, float(one["priority"]) - memory.parameters.priority_epsilon) if one["learned"] else None
    return EntryPlace(
        earlier=int(able[at - 1]) if at else None,
        later=int(able[at + 1]) if at + 1 < len(able) else None,
        step=1 + int(np.searchsorted(numbers, number)),
        episode=int(inside["episodes"]["length"][one["episode"]]),
        td_error=error,
    )
