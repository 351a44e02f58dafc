"""Rows of accounts in messages, and their merge into the totals of a cluster. Pure.

    server a   client 7 at a   50 steps, 3 caches ┐           of one account the later row: counts only grow
    server b   client 7 at b   80 steps, 2 caches ├▶ client 7   80 steps   steps are cumulative: the greater
               client 7 at a   40 steps, 2 caches ┘              5 caches   caches are per account: they add up

Server b has inherited the account from a when a was drained. Merging is a maximum: old or repeated rows, from any
number of servers, do not change the totals. The key of an account is its client, its home and `since`, an epoch of the
home. A home that has lost the account of a client opens another account, with another `since`.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from memoire.wire.rows import ACCOUNT, ACCOUNT_KEY_BYTES

from .account import Account, Totals, attribute_path

Rows: TypeAlias = NDArray[np.void]
"""Array of `rows.ACCOUNT` records, one for each account."""

GONE = 1
PAGE_ROWS = 1024
"""Rows of one page, which fit into the tail of a message."""


@dataclass(frozen=True, slots=True)
class ClusterTotals:
    """Totals of one run over all servers of a cluster, with each client counted once."""

    run: str
    totals: Totals
    finished: bool
    """True if the run is finished at every server that answered."""
    durable: bool
    """True if every server that answered keeps its accounts on disk."""
    runs: tuple[str, ...]
    """All runs that these servers know, the newest last."""
    servers: tuple[str, ...]
    """Names of the servers that answered."""
    missing: tuple[str, ...]
    """Names of the servers that did not answer: counts that they alone have are not in the totals."""

    @property
    def is_complete(self) -> bool:
        """True if every server of the cluster answered."""
        return not self.missing


@dataclass(frozen=True, slots=True)
class ServerAccounts:
    """Accounts and counts of one server for a run."""

    run: str
    rows: Rows
    """The server's accounts, and the accounts that it inherited."""
    finished: bool
    durable: bool
    runs: tuple[str, ...]
    """All runs that the server knows, the newest last."""
    epoch: int
    time: float
    """Unix seconds of the answer, by the server's clock."""
    applied: int = 0
    """Priorities that the server has set for entries that it stores itself, since its start."""
    stale: int = 0
    """TD errors that came too late, for overwritten entries of the server."""
    inherited: int = 0
    """Number of times that accounts of other servers arrived, as far as it is known."""
    guests: int = 0
    """Clients that were heard lately and have no counts. If the server is being drained, without the clients that it
    has sent to other servers.
    """
    unfinished: int = 0
    """Prompts or keyed rows that users of the server's tables have yet to answer, draw, commit or clear."""


_CUMULATIVE = (
    "episodes", "steps", "generated_bytes", "skipped", "dropped_lines", "lines_through", "ended_through", "applied",
    "stale",
)  # fmt: skip
_PER_ACCOUNT = (
    "lost_feedback", "pushed_caches", "pushed_bytes", "received_caches", "received_bytes", "accepted_caches",
    "accepted_bytes", "accepted_samples", "rejected_caches", "lost_caches", "lost_bytes", "returns_count",
    "returns_sum",
)  # fmt: skip
_SUMMED = tuple(
    field for field in (*_CUMULATIVE, *_PER_ACCOUNT) if field not in ("lines_through", "ended_through", "returns_sum")
)
"""Integer fields that are summed over clients."""
_ORDERING_FIELDS = ("received_caches", "pushed_caches", "returns_count", "last_seen")
"""Fields that order two rows of one account: no such field ever decreases."""


COUNTS = (ACCOUNT.names or ())[3:-4]
"""Fields of a row that count, between the account's key and its times, label and flags."""
_counted = attrgetter(*map(attribute_path, COUNTS))


def row_of(account: Account, home: int) -> tuple[Any, ...]:
    """Return the row of an account at the server of this home: values in the order of `rows.ACCOUNT`."""
    return (
        np.frombuffer(account.client, "<u8"),
        home,
        account.since,
        *_counted(account),  # caches may arrive before the UPDATE that counts the caches
        round(account.first_seen, 3),  # packed accounts have milliseconds
        round(account.last_seen, 3),
        account.label,
        GONE if account.report.leaving else 0,
    )


def rows_of(rows: Iterable[tuple[Any, ...]]) -> Rows:
    """Return rows of `row_of` as one array."""
    return np.array(list(rows), ACCOUNT)


def merge(*tables: Rows) -> Rows:
    """Return one row for each account, ordered by key (client, home, since): the latest row, merged by maximum."""
    rows = np.concatenate([np.empty(0, ACCOUNT), *tables])
    rows = rows[np.lexsort([rows[field] for field in reversed(_ORDERING_FIELDS)] + _keys(rows)[::-1])]  # last key leads
    first = _first_rows(_keys(rows))
    last = np.append(first[1:], len(rows)) - 1 if len(first) else first
    return _merge_growing(rows[last].copy(), rows, first)


def by_client(rows: Rows) -> Rows:
    """Return one row for each client (home and since 0) from rows of `merge`: its counts over all its accounts."""
    first = _first_rows(_keys(rows)[:2])
    merged = _merge_growing(rows[first].copy(), rows, first)
    merged["home"] = merged["since"] = 0
    for field in _PER_ACCOUNT if len(first) else ():
        merged[field] = np.add.reduceat(rows[field], first)
    return merged


def totals_of(rows: Rows) -> Totals:
    """Return the totals of a cluster from the rows of its servers, which may repeat each other."""
    return totals_of_pages([merge(rows)])


def totals_of_pages(pages: Iterable[Rows]) -> Totals:
    """Return the totals of a cluster from consecutive pages of rows of `merge`. Holds one page at a time in memory."""
    sums: Counter[str] = Counter()
    returns: list[float] = []

    def add(clients: Rows) -> None:
        sums["clients"] += len(clients)
        sums["gone"] += int((clients["flags"] & GONE).sum())
        for field in _SUMMED:
            sums[field] += exact_sum(clients[field])
        returns.append(math.fsum(clients["returns_sum"].tolist()))

    rest = merge()
    for rows in pages:
        rows = np.concatenate([rest, rows])
        begins = _first_rows(_keys(rows)[:2])
        newest = begins[-1] if len(begins) else 0
        add(by_client(rows[:newest]))
        rest = rows[newest:]  # the next page may have more rows of the last client
    add(by_client(rest))
    return Totals(skipped_caches=sums.pop("skipped"), returns_sum=math.fsum(returns), **sums)


def exact_sum(counts: NDArray[np.uint64]) -> int:
    """Return the exact sum of whole numbers, uint64 [N], also beyond 64 bits."""
    low = counts & np.uint64(0xFFFFFFFF)
    return int(low.sum(dtype=np.uint64)) + (int((counts >> np.uint64(32)).sum(dtype=np.uint64)) << 32)


def page(rows: Rows, after: bytes, most: int = PAGE_ROWS) -> tuple[Rows, bool]:
    """Return at most `most` rows of `merge` that follow the key `after`, and True if more rows follow."""
    begin = bisect.bisect_right(range(len(rows)), after, key=lambda at: key_of(rows[at : at + 1])) if after else 0
    return rows[begin : begin + most], len(rows) > begin + most


def key_of(row: Rows | np.void) -> bytes:
    """Return the key of a row, which orders rows: the bytes of client, home and since."""
    return row.tobytes()[:ACCOUNT_KEY_BYTES]


def _keys(rows: Rows) -> list[NDArray[np.uint64]]:
    """Return client (two words), home and since of each row as numbers that sort like their bytes."""
    columns = (rows["client"][:, 0], rows["client"][:, 1], rows["home"], rows["since"])
    return [np.ascontiguousarray(column).view(">u8").astype(np.uint64) for column in columns]


def _first_rows(names: list[NDArray[np.uint64]]) -> NDArray[np.intp]:
    """Return the index of the first row of each name in sorted rows."""
    is_new = np.ones(len(names[0]), bool)
    if len(is_new):
        is_new[1:] = np.any([name[1:] != name[:-1] for name in names], axis=0)
    return np.flatnonzero(is_new)


def _merge_growing(chosen: Rows, rows: Rows, first: NDArray[np.intp]) -> Rows:
    """Return `chosen`, one row of each group that begins at `first`, with the group's maximum in fields that grow."""
    if len(first):
        for field in (*_CUMULATIVE, "last_seen", "label", "flags"):
            chosen[field] = np.maximum.reduceat(rows[field], first)
        chosen["first_seen"] = np.minimum.reduceat(rows["first_seen"], first)
    return chosen


@dataclass(frozen=True, slots=True)
class LearnerStats:
    """Facts of a reader at a server. Times are seconds since 1970."""

    learner: str
    """Id of the reader in hex."""
    table: str
    """Name of the table that the reader draws from."""
    name: str
    """Name of the process from a person or Kubernetes; "" if it has none."""
    host: str
    pid: int
    software: str
    first_seen: float
    last_seen: float
    scalars: dict[str, float]
    """Scalars that the learner has set with `Reader.scalars`."""
    figures: dict[str, float]
    """Counters of the reader: batches, samples, waited, age_median, ..."""


def merged_scalars(learners: tuple[LearnerStats, ...], own: Mapping[str, float]) -> dict[str, float]:
    """Return the scalars of all learners by name; a later learner overrides earlier ones, and `own` overrides all."""
    scalars: dict[str, float] = {}
    for learner in learners:
        scalars |= learner.scalars
    return scalars | dict(own)
