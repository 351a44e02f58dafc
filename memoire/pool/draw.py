"""A draw over the caches of several servers: `plan` shares a batch out over their clients, `finish` makes one batch of
what they sent.

`caches` derives the rule, and follows it over the caches of one server.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ProtocolError
from memoire.replay import mixing
from memoire.replay.batch import Batch, GatheredSamples
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.wire._container import HeldCache
from memoire.wire.layout import ContainerLayout
from memoire.wire.parts import Part
from memoire.wire.rows import CLIENT_COUNTS

from . import picked
from ._draw import Clients, Picks, assemble

MAX_BATCH: Final = (1 << 31) - 1
"""Samples of one batch."""


@dataclass(frozen=True, slots=True)
class PooledBatch:
    """A batch out of held caches."""

    gathered: GatheredSamples
    importance: NDArray[np.float32]
    """[B] in (0, 1]: (N P(i) N_k / N_c) ** -beta over `divisor`."""
    divisor: float
    left_out: float
    """Share of all clients' weight that belongs to those which could not serve."""

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        values = vars(self.gathered).values()
        columns = (column for value in values if isinstance(value, dict) for column in value.values())
        return sum(array.nbytes for array in (*values, *columns) if isinstance(array, np.ndarray))

    def parted(self, batch_size: int, is_global: bool) -> "Iterator[PooledBatch]":
        """Cut this batch into batches of `batch_size` samples, which share its arrays. Samples that are left over, too
        few for a batch, are left out.

        Args:
            is_global: True: importance weights are divided by the largest one that any entry can have. False: by the
                largest one in each batch.
        """
        for begin in range(0, len(self.importance) - batch_size + 1, batch_size):
            yield self.rows(slice(begin, begin + batch_size), is_global)

    def rows(self, rows: slice, is_global: bool) -> "PooledBatch":
        """Some of the samples, in the same arrays; `is_global` as in `parted`."""
        importance, divisor = _divided(self.importance[rows], self.divisor, is_global)
        return PooledBatch(self.gathered.rows(rows), importance, divisor, self.left_out)

    def joined(self, newer: "PooledBatch", is_global: bool) -> "PooledBatch":
        """These samples and newer ones of the same table behind them, in new arrays; `is_global` as in `parted`."""
        divisor = max(self.divisor, newer.divisor)
        parts = [each.importance * np.float32(each.divisor / divisor) for each in (self, newer)]
        importance, divisor = _divided(np.concatenate(parts), divisor, is_global)
        gathered = mixing.joined([self.gathered, newer.gathered])
        return PooledBatch(gathered, importance, divisor, newer.left_out)

    def batch(self, schema: Schema, update: Callable[[NDArray[Any], Any], Any]) -> Batch:
        """What a learner gets; `update` is its `update_priorities`, given ids (`batch.ID`) and TD errors, both [B]."""
        return Batch(schema, self.gathered, self.importance, update, divisor=self.divisor, left_out=self.left_out)


def _divided(importance: NDArray[np.float32], divisor: float, is_global: bool) -> tuple[NDArray[np.float32], float]:
    """Importance by the largest one in the batch, unless it is global, and what it is divided by."""
    if is_global:
        return importance, divisor
    most = float(importance.max())
    return importance / np.float32(most), divisor * most


def gathered_from(
    picks: Picks,
    layout: ContainerLayout,
    parameters: Parameters,
    beta: float,
    gathered: GatheredSamples,
    clock: float | None = None,
) -> PooledBatch:
    """The batch of these samples, copied into the arrays of `gathered` without the GIL, with importance by `beta`.

    Args:
        clock: The pool's now, so that ages are those of now; None: as they came.
    """
    layout.gather(picks, gathered)
    if clock is not None:
        gathered.age += picked.waits_of(picks, clock)
    if gathered.mask is not None:
        gathered.max_share = parameters.sequence_max_share
    importance = np.empty(picks.size, np.float32)
    divisor = picks.importance(beta, parameters.normalize == "global", importance)
    return PooledBatch(gathered, importance, divisor, picks.left_out)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a reader asks each server for, and what it needs to know when the samples are there."""

    counts: list[NDArray[np.void]]
    """For each server rows of `rows.CLIENT_COUNTS`; no row where nothing is wanted."""
    asked: dict[bytes, tuple[float, float]]
    """Of each client that samples are asked of: pi_c and N_c."""
    population: float
    left_out: float
    rarest: float
    """Smallest N P(i) that an entry of the serving clients can have; inf where no minimum is known."""

    def checked(self, drawn: HeldCache) -> HeldCache:
        """What a server sent. Raises ProtocolError (code "client"): a sample is of a client that was not asked for."""
        if not self.asked.keys() >= set(_owners_of(drawn)):
            raise ProtocolError("client", "a drawn container has samples of a client that was not asked for")
        return drawn


def _owners_of(drawn: HeldCache) -> list[bytes]:
    ids = drawn.part(Part.OWNERS)
    return [ids[i : i + 16] for i in range(0, len(ids), 16)]


def plan(tables: Sequence[NDArray[np.void]], samples: int, fraction: float) -> Plan | None:
    """How many samples to ask of which client of which server, by the pool's own rule: None where there are too few.

    Args:
        tables: Rows of `rows.CLIENT_SUMS` of each server, as they are now. A client of two servers counts once,
            with the sums that are newest.
        samples: At least 1.
        fraction: A random number in [0, 1), the offset of systematic sampling.
    """
    clients = Clients(list(tables), int(fraction * (1 << 53)))
    if not clients.plan(samples, fraction):
        return None
    asked = clients.asked()
    counts = [np.frombuffer(packed, CLIENT_COUNTS) for packed in clients.counts()]
    return Plan(counts, asked, clients.population, clients.left_out, clients.rarest)


def finish(
    made: Plan,
    drawn: Sequence[HeldCache],
    layout: ContainerLayout,
    parameters: Parameters,
    seed: int,
    beta: float,
) -> PooledBatch:
    """The batch out of what the servers sent: DRAWN containers of `layout` (kind DRAWN), checked by `Plan.checked`,
    shuffled by `seed`, its importance made with exponent `beta`.

    A server that had less than it was asked for makes the batch smaller; every sample that is there is weighed right.
    """
    shares, newest = [], []
    for held in drawn:
        known = np.array([made.asked[owner] for owner in _owners_of(held)])
        shares.append(np.ascontiguousarray(known[:, 0]))
        newest.append(np.ascontiguousarray(known[:, 1]))
    picks = assemble(
        layout.core, list(drawn), shares, newest, made.population, made.left_out, made.rarest, seed & (2**64 - 1)
    )
    return gathered_from(picks, layout, parameters, beta, layout.allocate(picks.size))
