"""Accounts that are not in a ledger's memory: found again by their client, and read in pages. No file is touched here.

KeptAccounts    what both share: packed accounts become accounts and rows again
MemoryAccounts  packed, in dictionaries: of a server without a state folder
StoredAccounts  read from the state folder, beside what is still on its way there
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from .account import Account
from .folded_sums import FoldedSums
from .merge import Rows, merge, page
from .packing import CLIENT_BYTES, AccountPacker, NumberedTexts

_PART = 4096
"""Accounts that are added up at a time."""
_MARGIN = 64
"""Accounts that are read beyond a page: those of its last client may be on several servers."""

Packed = tuple[bytes, bytes]
"""Key and body of an account, as `AccountPacker` makes them."""


class KeptAccounts(ABC):
    """The accounts of one run that are kept. Not thread-safe: the owner locks."""

    def __init__(self, packing: AccountPacker) -> None:
        self._packing = packing

    @abstractmethod
    def _own(self, client: bytes) -> bytes | None:
        """Body of the client's own account."""

    @abstractmethod
    def _others(self, client: bytes) -> Sequence[Packed]:
        """The client's accounts of other servers, or of a life that this one has forgotten."""

    @abstractmethod
    def _from(self, key: bytes, most: int) -> Sequence[Packed]:
        """At most so many accounts whose key is this one or follows it, ascending."""

    @abstractmethod
    def _bodies(self) -> Iterator[Sequence[bytes]]:
        """The bodies of all own accounts, in parts."""

    @abstractmethod
    def keep(self, account: Account) -> None:
        """Keep an account that leaves memory; it is not changed any more."""

    @abstractmethod
    def inherit(self, rows: Rows) -> None:
        """Keep accounts of other servers, as `accounts.merge` gives them: of each the later one."""

    @property
    @abstractmethod
    def has_others(self) -> bool:
        """Whether there may be accounts of other servers."""

    @abstractmethod
    def taken(self) -> None:
        """The accounts that were inherited until now are part of a group that is being saved."""

    @abstractmethod
    def saved(self) -> None:
        """What was being saved is on disk."""

    def find(self, client: bytes) -> Account | None:
        """The client's own account as it was kept last."""
        body = self._own(client)
        return None if body is None else self._packing.unpack(client, body)

    def elsewhere(self, client: bytes) -> Rows:
        """What other servers have counted of a client, or this one in a life that it has forgotten."""
        return self._packing.rows(self._others(client))

    def numbers_elsewhere(self, client: bytes) -> tuple[int, int]:
        """Numbers of the newest line and closed episode that were taken there."""
        rows = self.elsewhere(client)
        return int(rows["lines_through"].max(initial=0)), int(rows["ended_through"].max(initial=0))

    def sums(self) -> FoldedSums:
        """What all own accounts that are kept add up to."""
        sums = FoldedSums()
        for bodies in self._bodies():
            self._packing.add_up(sums, bodies)
        return sums

    def rows(self, after: bytes, most: int) -> Rows:
        """The first rows, own ones and others, that follow a key of `accounts.key_of`: so many, or all there are."""
        wanted = most + _MARGIN
        while True:
            packed = self._from(after[:CLIENT_BYTES], wanted)
            is_end = len(packed) < wanted
            if not is_end:  # the last client may have more accounts than were read
                packed = [each for each in packed if each[0][:CLIENT_BYTES] != packed[-1][0][:CLIENT_BYTES]]
            found, _ = page(self._packing.rows(packed), after, most)
            if is_end or len(found) == most:
                return found
            wanted *= 2


class MemoryAccounts(KeptAccounts):
    """Accounts that are kept in memory: some 250 bytes for each client.

    Args:
        home: `identity.name_hash` of the server's name.
    """

    def __init__(self, home: int) -> None:
        super().__init__(AccountPacker(home, NumberedTexts()))
        self._packed: dict[bytes, bytes] = {}
        self._others_of: dict[bytes, list[bytes]] = {}  # keys, by client
        self._order: list[bytes] | None = None  # of all keys, while none is new

    @property
    def has_others(self) -> bool:
        """Whether there are accounts of other servers."""
        return bool(self._others_of)

    def _own(self, client: bytes) -> bytes | None:
        return self._packed.get(client)

    def _others(self, client: bytes) -> list[Packed]:
        return [(key, self._packed[key]) for key in self._others_of.get(client, ())]

    def _from(self, key: bytes, most: int) -> list[Packed]:
        if self._order is None:
            self._order = sorted(self._packed)
        begin = bisect_left(self._order, key)
        return [(each, self._packed[each]) for each in self._order[begin : begin + most]]

    def _bodies(self) -> Iterator[list[bytes]]:
        yield [body for key, body in self._packed.items() if len(key) == CLIENT_BYTES]

    def keep(self, account: Account) -> None:
        """Keep an account that leaves memory."""
        self._put(account.client, self._packing.pack(account))

    def inherit(self, rows: Rows) -> None:
        """Keep accounts of other servers."""
        for row in rows:
            client = row["client"].tobytes()
            key, _ = self._packing.pack_row(row)
            known = [self._packing.rows([(key, self._packed[key])])] if key in self._packed else []
            self._put(*self._packing.pack_row(merge(*known, row.reshape(1))[0]))
            keys = self._others_of.setdefault(client, [])
            if key not in keys:
                keys.append(key)

    def taken(self) -> None:
        """Nothing to do: there is no disk."""

    def saved(self) -> None:
        """Nothing to do."""

    def _put(self, key: bytes, body: bytes) -> None:
        if key not in self._packed:
            self._order = None
        self._packed[key] = body


class PackedReader(Protocol):
    """What is on disk of one run's accounts: see `store`. May be used from any thread."""

    def body(self, key: bytes) -> bytes | None:
        """Body of the account with this key."""

    def after(self, key: bytes, most: int, before: bytes = ...) -> Sequence[Packed]:
        """At most so many accounts from this key on, ascending, whose keys are below `before`."""

    def reading(self) -> AbstractContextManager[None]:
        """Within it, bytes that `AccountPacker` cannot have packed are an error that names the file."""


class StoredAccounts(KeptAccounts):
    """Accounts in a state folder. Those of other servers are here from the moment on in which they came.

    Args:
        packing: That of the folder.
        reader: What is on disk.
    """

    def __init__(self, packing: AccountPacker, reader: PackedReader) -> None:
        super().__init__(packing)
        self._reader = reader
        self._arriving = self._saving = merge()  # rows of other servers that are not on disk yet
        self._has_others = False

    @property
    def has_others(self) -> bool:
        """Whether any were found when the accounts were added up, or came since."""
        return self._has_others

    def _own(self, client: bytes) -> bytes | None:
        return self._reader.body(client)

    def _others(self, client: bytes) -> Sequence[Packed]:
        return self._reader.after(client + b"\0", 1 << 16, client + b"\xff" * 8)

    def _from(self, key: bytes, most: int) -> Sequence[Packed]:
        return self._reader.after(key, most)

    def _bodies(self) -> Iterator[list[bytes]]:
        key, packed = b"", self._reader.after(b"", _PART)
        while packed:
            own = [body for key, body in packed if len(key) == CLIENT_BYTES]
            self._has_others = self._has_others or len(own) < len(packed)
            yield own
            key = packed[-1][0] + b"\0"
            packed = self._reader.after(key, _PART)

    def keep(self, account: Account) -> None:
        """Nothing to do: an account leaves memory when it is on disk."""

    def inherit(self, rows: Rows) -> None:
        """Keep accounts of other servers, also before they are on disk."""
        self._arriving = merge(self._arriving, rows)
        self._has_others = True

    def taken(self) -> None:
        """The accounts that were inherited until now are part of a group that is being saved."""
        if len(self._arriving):  # seldom: this is called for each group
            self._saving, self._arriving = merge(self._saving, self._arriving), merge()

    def saved(self) -> None:
        """What was being saved is on disk."""
        if len(self._saving):
            self._saving = merge()

    def find(self, client: bytes) -> Account | None:
        """The client's own account as it is on disk."""
        with self._reader.reading():
            return super().find(client)

    def elsewhere(self, client: bytes) -> Rows:
        """What others have counted of a client."""
        mine = [rows[(rows["client"] == np.frombuffer(client, "<u8")).all(axis=1)] for rows in self._on_their_way]
        with self._reader.reading():
            return merge(super().elsewhere(client), *mine)

    def sums(self) -> FoldedSums:
        """What all own accounts on disk add up to."""
        with self._reader.reading():
            return super().sums()

    def rows(self, after: bytes, most: int) -> Rows:
        """The first rows that follow a key."""
        coming = [page(rows, after, most)[0] for rows in self._on_their_way]
        with self._reader.reading():
            return merge(super().rows(after, most), *coming)[:most]

    @property
    def _on_their_way(self) -> tuple[Rows, Rows]:
        return self._saving, self._arriving
