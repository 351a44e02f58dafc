"""What all servers have counted, kept also when a server is gone: totals that are exact and never go down. Pure.

client 7 at a, account opened in a's life 1     3 caches  ┐
a is killed, has forgotten everything, life 2             ├▶ 3 + 2 caches, the greater number of steps
client 7 at a, account opened in life 2         2 caches  ┘
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memoire.accounting.account import Totals
from memoire.accounting.merge import Rows, by_client, key_of, merge, totals_of
from memoire.wire.rows import ACCOUNT

MAX_RUNS = 8
"""Runs whose ledgers are at hand; others are read from the history."""
NOTHING: Rows = np.empty(0, ACCOUNT)


class KeptRun:
    """The accounts of one run, as far as anybody ever said."""

    def __init__(self, rows: Rows = NOTHING) -> None:
        self.rows = merge(rows)
        """One for each account."""
        self.version = 0
        """Grows with each change."""

    def take(self, rows: Rows) -> None:
        """Add what a server says."""
        merged = merge(self.rows, rows)
        if merged.tobytes() != self.rows.tobytes():
            self.rows = merged
            self.version += 1

    def totals(self) -> Totals:
        """Each client once, wherever it was at home."""
        return totals_of(self.rows)

    def clients(self) -> Rows:
        """One row for each client (home and since 0)."""
        return by_client(self.rows)


class RunLedgers:
    """The ledgers of the newest runs that were asked for.

    Args:
        restore: The ledger of a run that was seen before: its rows, packed.
    """

    def __init__(self, restore: Callable[[str], bytes]) -> None:
        self._restore = restore
        self._kept: dict[str, KeptRun] = {}
        self._totals: tuple[str, int, Totals] = ("", -1, Totals())  # run, version of its ledger

    def of(self, run: str, counted: str) -> KeptRun:
        """The ledger of a run. That of the run that is counted now always stays."""
        if run not in self._kept:
            self._kept[run] = KeptRun(np.frombuffer(self._restore(run), ACCOUNT))
            while len(self._kept) > MAX_RUNS:
                del self._kept[next(name for name in self._kept if name not in (run, counted))]
        return self._kept[run]

    def totals(self, counted: str) -> Totals:
        """Of the run that is counted now, each client once."""
        kept = self.of(counted, counted)
        if self._totals[:2] != (counted, kept.version):
            self._totals = counted, kept.version, kept.totals()
        return self._totals[2]


def ids_of(rows: Rows) -> list[bytes]:
    """The client of each row."""
    return [key_of(row)[:16] for row in rows]
