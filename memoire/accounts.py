"""Accounts as they travel, and the totals of a whole cluster that they merge to. Pure.

    server a   client 7 at a   50 steps, 3 caches ┐           of one client and home, the later row: it grows
    server b   client 7 at b   80 steps, 2 caches ├▶ client 7   80 steps   steps are cumulative: the greater
               client 7 at a   40 steps, 2 caches ┘              5 caches   caches are per home: they add up

Server b has inherited what a had counted when a was drained. Merging is a maximum: rows may come from any number of
servers, old ones and the same ones again, and the totals are the same.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import wire
from .ledger import Account, Totals

Rows: TypeAlias = NDArray[np.void]
"""Rows of `wire.ACCOUNT`."""

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
    since: NDArray[np.int64] | None = None
    """In which epoch of the server each account was opened, 0 where it was inherited; None: it did not say."""


_CUMULATIVE = ("episodes", "steps", "generated_bytes", "skipped", "dropped_lines", "lines_through")
_PER_HOME = (
    "pushed_caches", "pushed_bytes", "received_caches", "received_bytes", "accepted_caches", "accepted_bytes",
    "accepted_samples", "rejected_caches", "lost_caches", "lost_bytes", "returns_count", "returns_sum",
)  # fmt: skip
_LATER = ("received_caches", "pushed_caches", "returns_count", "last_seen")
"""What tells the later one of two rows of one client and home: none of them ever shrinks."""


def row_of(account: Account, home: int, lines_through: int) -> tuple[Any, ...]:
    """The row of one account, which a server of this home has counted."""
    report = account.report
    return (
        np.frombuffer(account.client, "<u8"),
        home,
        report.episodes,
        report.steps,
        report.generated_bytes,
        report.skipped,
        report.dropped_lines,
        lines_through,
        # Caches may come before the UPDATE that tells of them.
        max(report.caches, account.seen_caches, account.received_caches),
        max(report.cache_bytes, account.seen_bytes, account.received_bytes),
        account.received_caches,
        account.received_bytes,
        account.accepted_caches,
        account.accepted_bytes,
        account.accepted_samples,
        sum(account.rejected.values()),
        account.lost_caches,
        account.lost_bytes,
        account.returns_count,
        account.returns_sum,
        account.first_seen,
        account.last_seen,
        account.label,
        GONE if report.leaving else 0,
    )


def rows_of(rows: Iterable[tuple[Any, ...]]) -> Rows:
    """Rows as an array."""
    return np.array(list(rows), wire.ACCOUNT)


def merge(*tables: Rows) -> Rows:
    """One row for each client and home, in the order of their bytes: of several the later one, by maximum."""
    rows = np.concatenate([np.empty(0, wire.ACCOUNT), *tables])
    rows = rows[np.lexsort([rows[field] for field in reversed(_LATER)] + _names(rows)[::-1])]  # the last key leads
    first = _first_of_each(_names(rows))
    last = np.append(first[1:], len(rows)) - 1 if len(first) else first
    return _with_greatest(rows[last].copy(), rows, first)


def by_client(rows: Rows) -> Rows:
    """One row for each client (home 0) of rows that `merge` made: what it has done, wherever it was counted."""
    first = _first_of_each(_names(rows)[:2])
    merged = _with_greatest(rows[first].copy(), rows, first)
    merged["home"] = 0
    for field in _PER_HOME if len(first) else ():
        merged[field] = np.add.reduceat(rows[field], first)
    return merged


def totals_of(rows: Rows) -> Totals:
    """The totals of a cluster, from the rows that its servers have, doubled or not."""
    clients = by_client(merge(rows))
    sums = {field: sum(clients[field].tolist()) for field in (*_CUMULATIVE, *_PER_HOME) if field != "lines_through"}
    return Totals(
        clients=len(clients),
        gone=int((clients["flags"] & GONE).sum()),
        skipped_caches=sums.pop("skipped"),
        **sums | {"returns_sum": math.fsum(clients["returns_sum"].tolist())},
    )


def page(rows: Rows, after: bytes) -> tuple[Rows, bool]:
    """Of the rows of `merge` those that follow the client and home `after`, as many as fit one message, and whether
    there are more.
    """
    begin = bisect.bisect_right(range(len(rows)), after, key=lambda at: key_of(rows[at : at + 1])) if after else 0
    return rows[begin : begin + PAGE_ROWS], len(rows) > begin + PAGE_ROWS


def key_of(row: Rows | np.void) -> bytes:
    """Client and home of a row: what rows are ordered by."""
    return row.tobytes()[:24]


def _names(rows: Rows) -> list[NDArray[np.uint64]]:
    """Client (twice) and home of each row as numbers that sort as their bytes do."""
    columns = (rows["client"][:, 0], rows["client"][:, 1], rows["home"])
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
