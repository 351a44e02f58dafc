"""How much a client may have on the way, in bytes and in entries: its part of what all together may have. Pure."""

from __future__ import annotations

import math
from collections import Counter

from memoire.accounting.ledger import Ledger
from memoire.limits import NO_LIMIT
from memoire.pool.tables import OpenTable

from .state import ServerState

STOCK_PART = 4
"""A client may hold this part of its credit undrawn while learners draw."""
UNDRAWN = "waits until more is drawn: enough of this client's samples are at its server, and none of them was drawn yet"
"""Why a client may record no more where learners draw less than actors bring."""
COUNT_INTERVAL = 1.0
"""Seconds between two counts of the clients that are silent."""


class Credits:
    """Shares of the clients that may push: those that are neither gone nor silent for `limits.client_timeout`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limit = state.limits.credit
        self._silent: Counter[int] = Counter()  # clients of each table that are silent for too long
        self._counted_at = 0.0
        self._counted_ledger: Ledger | None = None  # of which run

    def limit(self, credit: int | None) -> None:
        """Let each client have at most this many bytes on the way from now on; None leaves that as it is."""
        self._limit = self._limit if credit is None else credit

    def of(self, table: OpenTable, now: float) -> int:
        """Bytes that each client of a table may have on the way: its limit, or if that is less its share of what the
        table holds, or of what all together may have on the way.
        """
        sharers = self._sharers(now)
        together = self._state.limits.on_way_bytes // max(1, sum(sharers.values()))
        return max(1, min(self._limit, together, table.pool.byte_limit // max(1, sharers[table.number])))

    def grant(self, table: OpenTable, client: bytes, inserted: int, now: float) -> tuple[int, str]:
        """How many entries a client may have recorded before it has to ask again, and why not more.

        Args:
            inserted: That it has recorded by now.
        """
        granted, why = NO_LIMIT, ""
        if table.limiter.is_active:
            granted, why = table.limiter.grant(client, self._sharers(now)[table.number])
        wanted = self._wanted(table, client, now)
        if wanted is None or inserted + wanted >= granted:
            return granted, why
        return inserted + wanted, "" if wanted else UNDRAWN

    def _wanted(self, table: OpenTable, client: bytes, now: float) -> int | None:
        """Entries whose samples learners want of a client; None where they want all."""
        ratio = table.parameters.samples_per_insert
        if table.sums is None or not ratio:
            return None
        room = table.sums.room(client, self.of(table, now) // STOCK_PART)
        return None if room is None else min(math.ceil(room / ratio), NO_LIMIT)

    def _sharers(self, now: float) -> Counter[int]:
        """Clients of each table that may push; those that are silent are counted once a second."""
        ledger = self._state.ledger
        is_fresh = self._counted_at <= now < self._counted_at + COUNT_INTERVAL
        if ledger is not self._counted_ledger or not is_fresh:
            self._counted_ledger, self._counted_at = ledger, now
            since = now - self._state.limits.client_timeout
            everybody = (*ledger, *ledger.guests)
            silent = (each.table for each in everybody if each.last_seen < since and not each.report.leaving)
            self._silent = Counter(silent)
        return ledger.present - self._silent if self._silent else ledger.present
