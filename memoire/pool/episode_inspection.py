"""A memory of episodes, looked at without taking anything: how its entries are spread, and a copy of a sample. Pure."""

from __future__ import annotations

import math
import random
import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.replay.memory import Memory

from .episode_draw import ids_of
from .episode_memory import NamedMemory
from .inspection import MAX_INSPECTED, Distribution, Histogram, Peeked


class _Seen(NamedTuple):
    """Entries of a memory that is held, every n-th row."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    ages: NDArray[np.float32]

    @classmethod
    def of(cls, memory: Memory, rng: random.Random, most: int = MAX_INSPECTED) -> _Seen:
        every = -(-memory.capacity // most)
        rows = np.arange(rng.randrange(every), memory.capacity, every)
        rows = rows[memory.contents()["meta"]["episode"][rows] >= 0]
        ages, weights = np.empty(len(rows), np.float32), np.empty(len(rows), np.float64)
        memory._facts(rows, ages, None, weights)
        return cls(rows, weights, ages)


def distribution_of(memory: Memory, rng: random.Random, most: int = MAX_INSPECTED) -> Distribution:
    """How entries are spread: all of them, or at most so many that are evenly spaced."""
    with memory.held():
        seen = _Seen.of(memory, rng, most)
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


def copied(named: NamedMemory, beta: float, rng: random.Random) -> Peeked | None:
    """A copy of a random entry's sample, by weight among evenly spaced ones; None where none has a weight."""
    memory = named.memory
    with memory.held():
        seen = _Seen.of(memory, rng)
        total, positives, _ = memory.sums()
        most = float(seen.weights.max(initial=0.0))
        if not most > 0.0:
            return None
        at = rng.choices(range(len(seen.rows)), (seen.weights / most).tolist())[0]
        inside, row = memory.contents(), seen.rows[at]
        number = int(inside["meta"]["number"][row])
        length = int(inside["episodes"]["length"][inside["meta"]["episode"][row]])
        gathered = memory.gather([number])
        del inside
    gathered.ids = ids_of(named, [number])
    return Peeked(gathered, float(seen.weights[at]) / total, float(positives), beta, length)
