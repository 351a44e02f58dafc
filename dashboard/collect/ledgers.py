"""What all servers have counted, kept also when a server is gone: totals that are exact and never go down. Pure.

client 7 at a, account opened in a's life 1     3 caches  ┐
a is killed, has forgotten everything, life 2             ├▶ 3 + 2 caches, the greater number of steps
client 7 at a, account opened in life 2         2 caches  ┘
"""

from __future__ import annotations

import numpy as np

from memoire.accounting.ledger import Totals
from memoire.accounting.merge import Rows, by_client, key_of, merge, totals_of
from memoire.wire.rows import ACCOUNT

NOTHING: Rows = np.empty(0, ACCOUNT)


class Kept:
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


def ids_of(rows: Rows) -> list[bytes]:
    """The client of each row."""
    return [key_of(row)[:16] for row in rows]
