"""Draws out of a memory of episodes: a batch for a learner here, or sums and samples for a reader far away.

sampled        a batch, with ids that name the memory ──▶ `pooled` adds importance
sums_of        what a reader may draw: the memory as if it were one client
drawn_for      the samples that it asks for

A memory of episodes, looked at without taking anything: how its entries are spread, and a copy of a sample. Pure.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import EmptyMemory, StaleEntry, UsedUp
from memoire.replay.batch import ID, GatheredSamples
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.tables.base import MAX_INSPECTED
from memoire.tables.caches.queues import check_count
from memoire.tables.draws import PooledBatch
from memoire.tables.inspection import Distribution, EntryPlace, Histogram, PeekedSample
from memoire.wire import containers
from memoire.wire.parts import Payload
from memoire.wire.receivers import Page
from memoire.wire.rows import CLIENT_SUMS

from .memory import NamedMemory

ANY_NUMBER: Final = 1
"""Flag of a row of `rows.CLIENT_SUMS`: any number of samples can be drawn."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples of a memory, and its sums at that moment."""

    gathered: GatheredSamples
    weights: NDArray[np.float64]
    """[B]"""
    total_weight: float
    population: int
    smallest: float
    parameters: Parameters

    def pooled(self, beta: float) -> PooledBatch:
        """The batch, with importance by this exponent."""
        importance, divisor = _core.importance(
            self.weights,
            self.total_weight,
            self.population,
            self.smallest,
            beta,
            self.parameters.normalize == "global",
        )
        return PooledBatch(self.gathered, importance, divisor, 0.0)


def sampled(named: NamedMemory, samples: int, places: Mapping[str, NDArray[Any]] | None) -> Sampled:
    """Draw so many samples with replacement, without the GIL while they are copied.

    Args:
        places: Arrays [B, ...] to copy into, B = `samples`, by their names in a batch.

    Raises:
        EmptyMemory: nothing can be drawn.
    """
    memory = named.memory
    with memory.held():
        gathered, weights, total, population, smallest = memory.sample(samples, places)
        parameters = memory.parameters
    gathered.ids = ids_of(named, gathered.ids)
    return Sampled(gathered, weights, total, population, smallest, parameters)


def ids_of(named: NamedMemory, numbers: Any) -> NDArray[Any]:
    """Ids [B] of entries by their numbers [B]."""
    ids = np.empty(len(numbers), ID)
    ids["client"], ids["number"] = np.frombuffer(named.owner, "<u8"), numbers
    return ids


def why_nothing(error: EmptyMemory, episodes: int, clients: int) -> str:
    """Why a draw has to wait, in words."""
    if isinstance(error, UsedUp):
        return f"entries are drawn {error.times} times at most (max_times_sampled), and {error.left} times yet in all"
    if error.reason:
        return f"{error.reason}. Wait for actors to ship more"
    return f"of {error.entries} entries in {episodes} episodes of {clients} clients none can be drawn"


def sums_of(named: NamedMemory, sequence: int) -> NDArray[np.void]:
    """A row of `rows.CLIENT_SUMS` for all episodes, [1]; none, [0], while nothing can be drawn.

    Args:
        sequence: Higher than that of all rows before: of two rows the one with the higher sequence is newer.
    """
    memory = named.memory
    total, positives, minimum = memory.sums()
    rows = np.zeros(1 if positives and total > 0.0 and math.isfinite(total) else 0, CLIENT_SUMS)
    for row in rows:
        row["client"], row["sequence"] = np.frombuffer(named.owner, "<u8"), sequence
        row["total_weight"], row["positives"], row["minimum"] = total, positives, minimum
        row["reserved"], row["flags"] = min(positives, (1 << 32) - 1), ANY_NUMBER
        if memory.parameters.max_times_sampled:
            row["reserved"], row["flags"] = min(memory.draws_left, (1 << 32) - 1), 0
    return rows


def drawn_for(
    named: NamedMemory, counts: NDArray[np.void], *, now: float, compression: str, page: Page | None = None
) -> tuple[Payload | None, int]:
    """The payload of a DRAWN message for rows [C] of `rows.CLIENT_COUNTS`, C clients, and how many samples it has.

    The payload is None where there is nothing, or nothing of this memory was asked for.

    Raises:
        ProtocolError: more than `MAX_DRAWN` samples were asked for, or than the page has room for; none counts as
            drawn.
    """
    memory = named.memory
    mine = (counts["client"] == np.frombuffer(named.owner, "<u8")).all(axis=1)
    wanted = int(counts["count"][mine].sum())
    check_count(wanted)
    with memory.held():
        if memory.parameters.max_times_sampled:
            wanted = min(wanted, memory.draws_left)
        if not (wanted and memory.num_positive):
            return None, 0
        try:
            made = containers.build_drawn(memory, named.owner, wanted, now=now, compression=compression, page=page)
            return made, wanted
        except EmptyMemory:  # entries have become too old since
            return None, 0


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
