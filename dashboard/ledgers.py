"""What all servers have counted, kept also when a server is gone: totals that are exact and never go down. Pure.

    client 7 at a, account opened in a's life 1     3 caches  ┐
    a is killed, has forgotten everything, life 2             ├▶ 3 + 2 caches, the greater number of steps
    client 7 at a, account opened in life 2         2 caches  ┘

`memoire.accounts.merge` takes rows of one client and home as the same account. Here an account is also told from the
one that the same home had opened in a former life: that one is kept under another name of the home.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from memoire import wire
from memoire.accounts import Rows, by_client, merge, totals_of
from memoire.ledger import Totals

NOTHING: Rows = np.empty(0, wire.ACCOUNT)


class Kept:
    """The accounts of one run, as far as anybody ever said."""

    def __init__(self, rows: Rows = NOTHING) -> None:
        self.rows = merge(rows)
        """One for each account."""
        self.version = 0
        """Grows with each change."""
        self._since: dict[bytes, int] = {}  # client and home -> the life in which the newest account was opened

    def take(self, rows: Rows, since: NDArray[np.int64]) -> None:
        """Add what a server says: its rows, and the life of the server in which each was opened (0: not known)."""
        if not len(rows):
            return
        rows = rows.copy()
        former: list[tuple[bytes, int]] = []
        for place, (key, opened) in enumerate(zip(_keys_of(rows), since.tolist(), strict=True)):
            known = self._since.get(key, 0)
            if opened and known and opened < known:
                rows["home"][place] = _former_home(key, opened)  # an answer that was long on its way
            elif opened and opened != known:
                if known:
                    former.append((key, known))
                self._since[key] = opened
        if former:
            self._rename(former)
        merged = merge(self.rows, rows)
        if merged.tobytes() != self.rows.tobytes():
            self.rows = merged
            self.version += 1

    def _rename(self, former: list[tuple[bytes, int]]) -> None:
        """These accounts were opened anew: what is kept of them is of a former life of their home."""
        places = {key: place for place, key in enumerate(_keys_of(self.rows))}
        for key, opened in former:
            if key in places:
                self.rows["home"][places[key]] = _former_home(key, opened)
        self.rows = merge(self.rows)

    def totals(self) -> Totals:
        """Each client once, wherever it was at home."""
        return totals_of(self.rows)

    def clients(self) -> Rows:
        """One row for each client (home 0)."""
        return by_client(self.rows)

    def since(self) -> bytes:
        """What `restore` needs beside the rows."""
        return b"".join(key + opened.to_bytes(8, "little") for key, opened in self._since.items())

    @classmethod
    def restore(cls, rows: bytes, since: bytes) -> Kept:
        """As it was when `rows` and `since()` were saved."""
        kept = cls(np.frombuffer(rows, wire.ACCOUNT))
        for place in range(0, len(since), 32):
            kept._since[since[place : place + 24]] = int.from_bytes(since[place + 24 : place + 32], "little")
        return kept


def ids_of(rows: Rows) -> list[bytes]:
    """The client of each row."""
    return [key[:16] for key in _keys_of(rows)]


def _keys_of(rows: Rows) -> list[bytes]:
    """Client and home of each row."""
    data, size = rows.tobytes(), rows.itemsize
    return [data[begin : begin + 24] for begin in range(0, len(data), size)]


def _former_home(key: bytes, opened: int) -> int:
    name = hashlib.blake2b(key + opened.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(name, "little") or 1
