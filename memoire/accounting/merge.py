"""Accounts as they travel, and the totals of a whole cluster that they merge to. Pure.

    server a   client 7 at a   50 steps, 3 caches ┐           of one account the later row: it only grows
    server b   client 7 at b   80 steps, 2 caches ├▶ client 7   80 steps   steps are cumulative: the greater
               client 7 at a   40 steps, 2 caches ┘              5 caches   caches are per account: they add up

Server b has inherited what a had counted when a was drained. Merging is a maximum: rows may come from any number of
servers, old ones and the same ones again, and the totals are the same. An account is named by its client, its home and
`since`, the epoch of the home in which it was opened: a home that forgot a client opens another account for it.
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

from .account import Account, Totals, of_account

Rows: TypeAlias = NDArray[np.void]
"""Rows of `rows.ACCOUNT`."""

GONE = 1
PAGE_ROWS = 1024
"""Rows of one page, within what a tail may hold."""


@dataclass(frozen=True, slots=True)
class ClusterTotals:
    """What all servers of a cluster have counted for one run, each client once."""

    run: str
    totals: Totals
    finished: bool
    """Whether every server that answered says so."""
    durable: bool
    """Whether every server that answered keeps it on disk."""
    runs: tuple[str, ...]
    """All runs that these servers know, the newest last."""
    servers: tuple[str, ...]
    """Names of those that answered."""
    missing: tuple[str, ...]
    """Names of those that did not: what they alone have counted is not in the totals."""

    @property
    def is_complete(self) -> bool:
        """Whether every server answered."""
        return not self.missing


@dataclass(frozen=True, slots=True)
class ServerAccounts:
    """What one server has counted for a run."""

    run: str
    rows: Rows
    """Its accounts, and those that it inherited."""
    finished: bool
    durable: bool
    runs: tuple[str, ...]
    """All that it knows, the newest last."""
    epoch: int
    time: float
    """Seconds since 1970 by its clock when it said so."""
    applied: int = 0
    """Priorities that the server has set of entries that it stores itself, since it began."""
    stale: int = 0
    """And of entries that had made room."""
    inherited: int = 0
    """How often accounts of other servers came here, as far as this is known."""
    guests: int = 0
    """Clients that were heard lately and have counted nothing. If the server is being drained, only those that it has
    not told to go elsewhere.
    """
    unfinished: int = 0
    """What users of its tables have yet to answer, draw, commit or clear: prompts, or rows by key."""


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
"""What clients' rows are added up of, in whole numbers."""
_LATER = ("received_caches", "pushed_caches", "returns_count", "last_seen")
"""The fields that order two rows of one account: none of them ever shrinks."""


COUNTS = (ACCOUNT.names or ())[3:-4]
"""What a row says that its account counts; before it, what names the account, and then times, label and flags."""
_counted = attrgetter(*map(of_account, COUNTS))


def row_of(account: Account, home: int) -> tuple[Any, ...]:
    """The row of an account that the server of this home keeps: its values in the order of `rows.ACCOUNT`."""
    return (
        np.frombuffer(account.client, "<u8"),
        home,
        account.since,
        *_counted(account),  # caches may come before the UPDATE that tells of them
        round(account.first_seen, 3),  # as exactly as accounts are kept
        round(account.last_seen, 3),
        account.label,
        GONE if account.report.leaving else 0,
    )


def rows_of(rows: Iterable[tuple[Any, ...]]) -> Rows:
    """Rows as an array."""
    return np.array(list(rows), ACCOUNT)


def merge(*tables: Rows) -> Rows:
    """One row for each account, in the order of their keys (client, home, since): of several the later, by maximum."""
    rows = np.concatenate([np.empty(0, ACCOUNT), *tables])
    rows = rows[np.lexsort([rows[field] for field in reversed(_LATER)] + _names(rows)[::-1])]  # the last key leads
    first = _first_of_each(_names(rows))
    last = np.append(first[1:], len(rows)) - 1 if len(first) else first
    return _with_greatest(rows[last].copy(), rows, first)


def by_client(rows: Rows) -> Rows:
    """One row for each client (home and since 0) of rows that `merge` made: what it did, wherever it was counted."""
    first = _first_of_each(_names(rows)[:2])
    merged = _with_greatest(rows[first].copy(), rows, first)
    merged["home"] = merged["since"] = 0
    for field in _PER_ACCOUNT if len(first) else ():
        merged[field] = np.add.reduceat(rows[field], first)
    return merged


def totals_of(rows: Rows) -> Totals:
    """The totals of a cluster, from the rows that its servers have, doubled or not."""
    return totals_of_pages([merge(rows)])


def totals_of_pages(pages: Iterable[Rows]) -> Totals:
    """As `totals_of`, from consecutive pages of rows that `merge` made. Only one page at a time is in memory."""
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
        begins = _first_of_each(_names(rows)[:2])
        newest = begins[-1] if len(begins) else 0
        add(by_client(rows[:newest]))
        rest = rows[newest:]  # the next page may have more rows of this client
    add(by_client(rest))
    return Totals(skipped_caches=sums.pop("skipped"), returns_sum=math.fsum(returns), **sums)


def exact_sum(counts: NDArray[np.uint64]) -> int:
    """The sum of whole numbers, uint64 [N], which may be more than 64 bits have room for."""
    low = counts & np.uint64(0xFFFFFFFF)
    return int(low.sum(dtype=np.uint64)) + (int((counts >> np.uint64(32)).sum(dtype=np.uint64)) << 32)


def page(rows: Rows, after: bytes, most: int = PAGE_ROWS) -> tuple[Rows, bool]:
    """Of the rows of `merge` at most so many that follow the key `after`, and whether there are more."""
    begin = bisect.bisect_right(range(len(rows)), after, key=lambda at: key_of(rows[at : at + 1])) if after else 0
    return rows[begin : begin + most], len(rows) > begin + most


def key_of(row: Rows | np.void) -> bytes:
    """Client, home and since of a row: what rows are ordered by."""
    return row.tobytes()[:ACCOUNT_KEY_BYTES]


def _names(rows: Rows) -> list[NDArray[np.uint64]]:
    """Client (twice), home and since of each row as numbers that sort as their bytes do."""
    columns = (rows["client"][:, 0], rows["client"][:, 1], rows["home"], rows["since"])
    return [np.ascontiguousarray(column).view(">u8").astype(np.uint64) for column in columns]


def _first_of_each(names: list[NDArray[np.uint64]]) -> NDArray[np.intp]:
    """Where a new name begins in sorted rows."""
    is_new = np.ones(len(names[0]), bool)
    if len(is_new):
        is_new[1:] = np.any([name[1:] != name[:-1] for name in names], axis=0)
    return np.flatnonzero(is_new)


def _with_greatest(chosen: Rows, rows: Rows, first: NDArray[np.intp]) -> Rows:
    """`chosen`, one row of each group that begins at `first`, with what only grows from the whole group."""
    if len(first):
        for field in (*_CUMULATIVE, "last_seen", "label", "flags"):
            chosen[field] = np.maximum.reduceat(rows[field], first)
        chosen["first_seen"] = np.minimum.reduceat(rows["first_seen"], first)
    return chosen


@dataclass(frozen=True, slots=True)
class LearnerStats:
    """A reader, as a server knows it. Times are seconds since 1970."""

    learner: str
    """Its id in hex."""
    table: str
    """Name of the table that it draws from."""
    name: str
    """That a person or Kubernetes gave it; "" for none."""
    host: str
    pid: int
    software: str
    first_seen: float
    last_seen: float
    scalars: dict[str, float]
    """What `Reader.scalars` set."""
    figures: dict[str, float]
    """What it counts by itself: batches, samples, waited, age_median, ..."""


def merged_scalars(learners: tuple[LearnerStats, ...], own: Mapping[str, float]) -> dict[str, float]:
    """Scalars of all learners by name; of several with the same name whoever was heard last counts, and `own` first."""
    found: dict[str, float] = {}
    for learner in learners:
        found |= learner.scalars
    return found | dict(own)
