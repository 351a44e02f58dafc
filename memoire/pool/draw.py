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
from memoire.replay.batch import Batch, GatheredSamples
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.wire._container import HeldCache
from memoire.wire.layout import ContainerLayout
from memoire.wire.parts import Part
from memoire.wire.rows import CLIENT_COUNTS, CLIENT_SUMS

from . import picked
from ._draw import Picks, assemble, shares, systematic_counts

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
            rows = slice(begin, begin + batch_size)
            importance, most = self.importance[rows], 1.0
            if not is_global:
                most = float(importance.max())
                importance = importance / np.float32(most)
            yield PooledBatch(self.gathered.rows(rows), importance, self.divisor * most, self.left_out)

    def batch(self, schema: Schema, update: Callable[[NDArray[Any], Any], Any]) -> Batch:
        """What a learner gets; `update` is its `update_priorities`, given ids (`batch.ID`) and TD errors, both [B]."""
        return Batch(schema, self.gathered, self.importance, update, divisor=self.divisor, left_out=self.left_out)


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


@dataclass(frozen=True)
class Plan:
    """What a reader asks each server for, and what it needs to know when the samples are there."""

    counts: list[NDArray[np.void]]
    """For each server rows of `rows.CLIENT_COUNTS`; no row where nothing is wanted."""
    share: dict[bytes, float]
    """pi_c of each client."""
    newest: dict[bytes, float]
    """N_c of each client."""
    population: float
    left_out: float
    rarest: float
    """Smallest N P(i) that an entry of the serving clients can have; inf where no minimum is known."""


def plan(tables: Sequence[NDArray[np.void]], samples: int, fraction: float) -> Plan | None:
    """How many samples to ask of which client of which server, by the pool's own rule: None where there are too few.

    Args:
        tables: Rows of `rows.CLIENT_SUMS` of each server, as they are now. A client of two servers counts once,
            with the sums that are newest.
        samples: At least 1.
        fraction: A random number in [0, 1), the offset of systematic sampling.
    """
    merged = _merged(tables)
    if merged is None or not merged.unused.sum() >= samples:
        return None
    newest, unused = merged.newest, merged.unused
    weight = newest["total_weight"] / newest["total_weight"].max()  # sums of what clients say could overflow
    share = shares(weight, unused, merged.between, float(samples))
    counts = systematic_counts(share, unused, samples, fraction)
    serving = unused > 0.0
    population = float(newest["positives"][serving].sum())
    chance = share * newest["minimum"] / np.maximum(newest["total_weight"], np.finfo(np.float64).tiny)
    known = serving & (newest["minimum"] > 0.0)
    names = newest["client"].tobytes()
    keys = [names[16 * i : 16 * i + 16] for i in range(len(newest))]
    return Plan(
        counts=_split(merged, counts, len(tables)),
        share=dict(zip(keys, share.tolist(), strict=True)),
        newest=dict(zip(keys, newest["positives"].astype(np.float64).tolist(), strict=True)),
        population=population,
        left_out=1.0 - float(weight[serving].sum() / weight.sum()),
        rarest=population * float(chance[known].min()) if known.any() else np.inf,
    )


@dataclass(frozen=True)
class _MergedClients:
    """The clients of all servers: C of them, in R rows."""

    rows: NDArray[np.void]
    """[R] of `rows.CLIENT_SUMS`."""
    server: NDArray[np.int64]
    """[R] whose row it is."""
    client: NDArray[np.int64]
    """[R] which client's."""
    able: NDArray[np.float64]
    """[R] samples that the server can give of the client; inf: any number."""
    newest: NDArray[np.void]
    """[C] the row with the client's newest sums."""
    unused: NDArray[np.float64]
    """[C] u_c over all servers; 0 for clients that nothing can be drawn from."""
    between: NDArray[np.float64]
    """[C] D_c over all servers."""


def _merged(tables: Sequence[NDArray[np.void]]) -> _MergedClients | None:
    """Each client once; None where there are no rows."""
    rows = np.concatenate([np.asarray(table) for table in tables]) if len(tables) else np.empty(0, CLIENT_SUMS)
    server = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    if not len(rows):
        return None
    _, first, client = np.unique(_names(rows), return_index=True, return_inverse=True)
    newest_first = np.lexsort((~rows["sequence"], client))
    chosen = rows[newest_first[np.searchsorted(client[newest_first], np.arange(len(first)))]]
    able = np.where(rows["flags"] & 1, np.where(rows["reserved"] > 0, np.inf, 0.0), rows["reserved"].astype(np.float64))
    unused = np.zeros(len(first))
    np.add.at(unused, client, able)
    between = np.zeros(len(first))
    np.add.at(between, client, rows["drawn_between"])
    unused[~((chosen["total_weight"] > 0.0) & (chosen["positives"] > 0))] = 0.0
    return _MergedClients(rows, server, client, able, chosen, unused, between)


def _names(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Client ids as values that compare."""
    return np.ascontiguousarray(rows["client"]).view([("low", "<u8"), ("high", "<u8")]).reshape(-1)


def _split(merged: _MergedClients, counts: NDArray[np.int64], servers: int) -> list[NDArray[np.void]]:
    """Each client's count [C] over the servers that hold some of it, first come first served: a table for each."""
    left, asked = counts.copy(), np.zeros(len(merged.rows), np.int64)
    for i in range(servers):
        here = np.flatnonzero(merged.server == i)
        client = merged.client[here]
        asked[here] = np.minimum(left[client], merged.able[here]).astype(np.int64)
        left[client] -= asked[here]
    return [_wanted(merged.rows, asked, np.flatnonzero((merged.server == i) & (asked > 0))) for i in range(servers)]


def _wanted(rows: NDArray[np.void], asked: NDArray[np.int64], here: NDArray[np.int64]) -> NDArray[np.void]:
    wanted = np.zeros(len(here), CLIENT_COUNTS)
    wanted["client"], wanted["count"] = rows["client"][here], asked[here]
    return wanted


def finish(
    made: Plan,
    drawn: Sequence[HeldCache],
    layout: ContainerLayout,
    parameters: Parameters,
    seed: int,
    beta: float,
) -> PooledBatch:
    """The batch out of what the servers sent: checked DRAWN containers of `layout` (kind DRAWN), shuffled by `seed`,
    its importance made with exponent `beta`.

    A server that had less than it was asked for makes the batch smaller; every sample that is there is weighed right.

    Raises:
        ProtocolError: a sample of a client that was not asked for.
    """
    shares, newest = [], []
    for held in drawn:
        ids = held.part(Part.OWNERS)
        owners = [ids[i : i + 16] for i in range(0, len(ids), 16)]
        if not all(made.share.get(owner, 0.0) > 0.0 for owner in owners):
            raise ProtocolError("client", "a drawn container has samples of a client that was not asked for")
        shares.append(np.array([made.share[owner] for owner in owners]))
        newest.append(np.array([made.newest[owner] for owner in owners]))
    picks = assemble(
        layout.core, list(drawn), shares, newest, made.population, made.left_out, made.rarest, seed & (2**64 - 1)
    )
    return gathered_from(picks, layout, parameters, beta, layout.allocate(picks.size))
