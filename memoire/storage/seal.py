"""The row that seals a state file: how many rows there are, and all their checksums together.

    two facts of checksums 3 and 4           RowsChecksum(facts=2, facts_sum=7)
    the one of checksum 3 becomes one of 9   .next(([3], [9]))             RowsChecksum(1, facts=2, facts_sum=13)

A row that is missing, stale or changed leaves another sum. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Final, NamedTuple, TypeAlias

SUMS: Final = (1 << 64) - 1
"""Sums of facts and of lines keep 64 bits; those of other rows, whose checksums have 31, never have more."""
Change: TypeAlias = tuple[Collection[int], Collection[int]]
"""Checksums of rows that have gone, and of those that have come."""
NONE: Final[Change] = (), ()
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

    def next(self, *changes: Change) -> RowsChecksum:
        """Of one more transaction, in which rows have gone and others have come: facts, lines, accounts and prompts, in
        this order.
        """
        sums = [*self]
        sums[0] += 1
        for place, (former, new) in enumerate(changes):
            if former or new:
                sums[2 * place + 1] += len(new) - len(former)
                sums[2 * place + 2] = sums[2 * place + 2] - sum(former) + sum(new) & SUMS
        return RowsChecksum(*sums)

    def without_lines(self) -> RowsChecksum:
        """Of a copy that has no lines."""
        return self._replace(lines=0, lines_sum=0)
