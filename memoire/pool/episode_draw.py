"""Draws out of a memory of episodes: a batch for a learner here, or sums and samples for a reader far away.

sampled        a batch, with ids that name the memory ──▶ `pooled` adds importance
sums_of        what a reader may draw: the memory as if it were one client
drawn_for      the samples that it asks for
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import EmptyMemory, UsedUp
from memoire.replay.batch import ID, GatheredSamples
from memoire.replay.parameters import Parameters
from memoire.wire import pack
from memoire.wire.parts import Payload
from memoire.wire.receivers import Page
from memoire.wire.rows import CLIENT_SUMS

from .draw import PooledBatch
from .episode_memory import NamedMemory
from .readers import check_count

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
            made = pack.build_drawn(memory, named.owner, wanted, now=now, compression=compression, page=page)
            return made, wanted
        except EmptyMemory:  # entries have become too old since
            return None, 0
