"""Accounts that are not in memory: where they are kept, and what they add up to."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Protocol

from .account import TABLE_SUMS, Account, counts_of


class ExactSum:
    """A sum of floats that knows no rounding: what was added and taken off again leaves nothing behind."""

    def __init__(self) -> None:
        self._units = 0  # of 2**-1074, of which every float is a whole number

    def add(self, value: float, sign: int = 1) -> None:
        """Add a finite number, or take it off."""
        numerator, denominator = value.as_integer_ratio()
        self._units += sign * (numerator << (1075 - denominator.bit_length()))

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        return self._units / (1 << 1074)


class FoldedSums:
    """What the accounts add up to that are not in memory."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """By the names of `Totals`, all but returns_sum."""
        self.returns = ExactSum()
        self.tables: dict[str, Counter[int]] = {name: Counter() for name in TABLE_SUMS}
        """`TABLE_SUMS` of each table, by its number."""
        self.feedback: Counter[str] = Counter()
        """By the names of `FeedbackCounts`."""

    def add(self, account: Account, sign: int = 1) -> None:
        """Add an account, or take it off."""
        counts = counts_of(account)
        for name, value in counts.items():
            self.counts[name] += sign * value
        for name, value in asdict(account.feedback).items():
            self.feedback[name] += sign * value
        self.returns.add(account.returns_sum, sign)
        for name, sums in self.tables.items():
            sums[account.table] += sign * counts[name]


class AccountStore(Protocol):
    """Where the accounts of one run are that are not in memory; see `account_store` and `store`."""

    def find(self, client: bytes) -> Account | None:
        """The client's own account as it was kept last."""

    def numbers_elsewhere(self, client: bytes) -> tuple[int, int]:
        """Numbers of the newest line and closed episode that other accounts of this client have, those of servers that
        were drained among them; 0 where there are none.
        """

    def keep(self, account: Account) -> None:
        """Keep an account that leaves memory; it is not changed any more."""

    def sums(self) -> FoldedSums:
        """What all accounts that are kept add up to, without those of other servers."""


class EmptyAccountStore:
    """An `AccountStore` that has nothing and keeps nothing: of a ledger that never folds."""

    def find(self, client: bytes) -> Account | None:
        """None."""

    def numbers_elsewhere(self, client: bytes) -> tuple[int, int]:
        """Zeros."""
        return 0, 0

    def keep(self, account: Account) -> None:
        """A mistake of ours: nobody would find it again."""
        assert account is None, "a ledger that folds needs a store"

    def sums(self) -> FoldedSums:
        """Nothing."""
        return FoldedSums()


class SumsOnlyStore(EmptyAccountStore):
    """An `AccountStore` that forgets accounts: of their ledger's totals only the sums are left."""

    def keep(self, account: Account) -> None:
        """Do nothing: the ledger has added the account to its sums."""
