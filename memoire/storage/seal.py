"""The row that seals a state file: how many rows there are, and all their checksums together.

    two facts of checksums 3 and 4           RowsChecksum(facts=2, facts_sum=7)
    the one of checksum 3 becomes one of 9   .with_facts([3], [9])         RowsChecksum(facts=2, facts_sum=13)

A row that is missing, stale or changed leaves another sum. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Final, NamedTuple

SUMS: Final = (1 << 64) - 1
"""Sums of facts and of lines keep 64 bits; those of other rows, whose checksums have 31, need no bound."""
_FORM: Final = struct.Struct(">9Q")


class RowsChecksum(NamedTuple):
    """What all rows together must come to."""

    generation: int = 0
    """Transactions so far."""
    facts: int = 0
    facts_sum: int = 0
    lines: int = 0
    lines_sum: int = 0
    accounts: int = 0
    accounts_sum: int = 0
    prompts: int = 0
    prompts_sum: int = 0

    @staticmethod
    def unpack(body: bytes) -> RowsChecksum:
        """The seal of a row's body. Raises struct.error."""
        return RowsChecksum(*_FORM.unpack(body))

    def pack(self) -> bytes:
        """The body of its row."""
        return _FORM.pack(*self)

    def next(self) -> RowsChecksum:
        """Of one more transaction, which has changed nothing yet."""
        return self._replace(generation=self.generation + 1)

    def without_lines(self) -> RowsChecksum:
        """Of a copy that has no lines."""
        return self._replace(lines=0, lines_sum=0)

    def with_facts(self, former: Collection[int], new: Collection[int]) -> RowsChecksum:
        """Facts of these checksums have gone, and others have come."""
        if not (former or new):
            return self
        total = self.facts_sum - sum(former) + sum(new) & SUMS
        return self._replace(facts=self.facts - len(former) + len(new), facts_sum=total)

    def with_lines(self, former: Collection[int], new: Collection[int]) -> RowsChecksum:
        """Lines of these checksums have gone, and others have come."""
        if not (former or new):
            return self
        total = self.lines_sum - sum(former) + sum(new) & SUMS
        return self._replace(lines=self.lines - len(former) + len(new), lines_sum=total)

    def with_accounts(self, former: Collection[int], new: Collection[int]) -> RowsChecksum:
        """Accounts of these checksums have gone, and others have come."""
        if not (former or new):
            return self
        total = self.accounts_sum - sum(former) + sum(new)
        return self._replace(accounts=self.accounts - len(former) + len(new), accounts_sum=total)

    def with_prompts(self, former: Collection[int], new: Collection[int]) -> RowsChecksum:
        """Rows of prompts of these checksums have gone, and others have come."""
        total = self.prompts_sum - sum(former) + sum(new)
        return self._replace(prompts=self.prompts - len(former) + len(new), prompts_sum=total)
