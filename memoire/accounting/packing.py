"""Packed accounts: conversion to about seventy bytes for each client, and back. Pure.

    own account        key  client (16)               body  counts (`_bytes.pack_counts`), codes of rejection, TD errors
    another server's   key  client (16) + word (4)    body  counts

Texts and long numbers that many accounts share (owner, table and `since`; the homes of other servers) are words: a body
has only a word's number. Counts that are usually equal are stored as differences, which are 0 and take one bit.

Stores of packed accounts that are not in a ledger, for lookups by client and for pages; the stores access no file.

KeptAccounts    base class: unpacks accounts and rows
MemoryAccounts  dictionaries of packed accounts, for a server without a state folder
StoredAccounts  accounts in the state folder, and inherited rows that are still to be saved
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire.wire import _bytes
from memoire.wire.messages import Update
from memoire.wire.rows import ACCOUNT, MAX_RETURNS, unpack_accounts

from .account import FEEDBACK_OUTCOMES, REPORT_SUMS, Account, AccountStore, FoldedSums
from .merge import GONE, Rows, exact_sum, merge, page, row_of

CLIENT_BYTES: Final = 16
_WORD_BYTES: Final = 4
_DIFFERENCES: Final = (
    ("episodes", ""),
    ("steps", ""),
    ("generated_bytes", ""),
    ("skipped", ""),
    ("dropped_lines", ""),
    ("lines_through", ""),
    ("ended_through", ""),
    ("applied", ""),
    ("stale", ""),
    ("lost_feedback", ""),
    ("pushed_caches", ""),
    ("pushed_bytes", ""),
    ("received_caches", "pushed_caches"),
    ("received_bytes", "pushed_bytes"),
    ("accepted_caches", "received_caches"),
    ("accepted_bytes", "received_bytes"),
    ("accepted_samples", ""),
    ("rejected_caches", ""),
    ("lost_caches", ""),
    ("lost_bytes", ""),
    ("returns_count", "ended_through"),
)
"""Counts of a packed account in order, and the count that is subtracted from each."""
_COUNTS: Final = len(_DIFFERENCES) + 7
"""Numbers of a packed row: counts, flags, label, first_seen, last_seen - first_seen, returns_sum, word, sequence."""
_REST_TYPE: Final = dict[str, int] | tuple[dict[str, int], tuple[int, int, int, int, int]]
_WORD: Final = _COUNTS - 2
_MASK_64_BITS: Final = (1 << 64) - 1
_FLOAT: Final = struct.Struct("<d")
_MAX_SECONDS: Final = 9e12  # seconds; a float has the milliseconds exactly
_TOTALS: Final = {"skipped_caches": "skipped"} | {
    name: name for name, _ in _DIFFERENCES if name not in ("skipped", "lines_through", "ended_through")
}
"""Fields of a row by the names of the integers in `Totals`."""
_OF_ACCOUNT: Final = tuple(name for name in (ACCOUNT.names or ())[3:] if name in Account.__slots__)
"""Fields of a row that are attributes of an `Account` by the same names."""
_PLACE: Final = {name: place for place, name in enumerate(ACCOUNT.names or ())}


class NumberedTexts:
    """Numbering of texts from 1; numbers never change. One thread adds; any thread may read."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._texts = [*known]
        self._numbers = {text: place + 1 for place, text in enumerate(self._texts)}

    def __len__(self) -> int:
        return len(self._texts)

    def number_of(self, text: str) -> int:
        """Return the number of a text; add the text if it is new."""
        if text not in self._numbers:
            self._texts.append(text)
            self._numbers[text] = len(self._texts)
        return self._numbers[text]

    def text(self, number: int) -> str:
        """Return the text of a number. Raises ValueError if no text has the number."""
        if not 0 < number <= len(self._texts):
            raise ValueError(f"word {number} does not exist; there are {len(self._texts)} words")
        return self._texts[number - 1]

    def texts_after(self, number: int) -> list[str]:
        """Return the texts with higher numbers than `number`, in order."""
        return self._texts[number:]


class AccountPacker:
    """Packing and unpacking of accounts at the server of one home.

    Args:
        home: `frames.name_hash` of the server's name.
        words: Texts whose numbers are in the bodies.
    """

    def __init__(self, home: int, words: NumberedTexts) -> None:
        self.home, self.words = home, words

    def pack(self, account: Account) -> bytes:
        """Return the body of an own account; its key is the client's id. Waiting feedback is counted as lost."""
        row = list(row_of(account, self.home))
        row[_PLACE["lost_feedback"]] += account.waiting_feedback
        word = self.words.number_of(f"{account.since} {account.table} {account.owner}")
        feedback = [getattr(account, f"{name}_feedback") for name in FEEDBACK_OUTCOMES]
        if any(feedback):
            rest = msgspec.msgpack.encode((account.rejected, feedback))
        else:
            rest = msgspec.msgpack.encode(account.rejected) if account.rejected else b""
        return _pack(row, word, account.sequence + 1) + rest

    def unpack(self, client: bytes, body: bytes) -> Account:
        """Return the account whose body `pack` packed.

        Raises:
            ValueError: `pack` cannot have packed the body.
        """
        counts, used = _bytes.unpack_counts(body, _COUNTS)
        row = dict(zip(_PLACE, _as_rows(np.array([counts], np.uint64))[0].item(), strict=True))
        since, table, owner = self._parse_opening(counts[_WORD])
        codes, feedback = _unpack_rest(body[used:], row["lost_feedback"])
        _check(row, codes)
        sums = {name: row[name] for name in REPORT_SUMS if name in row}
        outcomes: dict[str, Any] = {f"{name}_feedback": count for name, count in feedback.items()}
        pushed = {"caches": row["pushed_caches"], "cache_bytes": row["pushed_bytes"]}
        return Account(
            client=client,
            since=since,
            report=Update(**sums, **pushed, leaving=bool(row["flags"] & GONE)),
            sequence=counts[_WORD + 1] - 1,
            seen_caches=row["received_caches"] + row["lost_caches"],
            seen_bytes=row["received_bytes"] + row["lost_bytes"],
            rejected=codes,
            table=table,
            owner=owner,
            **{name: row[name] for name in _OF_ACCOUNT},
            **outcomes,
        )

    def pack_row(self, row: np.void) -> tuple[bytes, bytes]:
        """Return key and body of an account of another server, or of a former life of this server."""
        word = self.words.number_of(f"{int(row['home'])} {int(row['since'])}")
        return row["client"].tobytes() + word.to_bytes(_WORD_BYTES, "big"), _pack(row.item(), 0, 0)

    def rows(self, packed: Sequence[tuple[bytes, bytes]]) -> Rows:
        """Return the rows of packed accounts (key, body) of this and other servers, in the order of `merge`.

        Raises:
            ValueError: `pack` and `pack_row` cannot have packed them.
        """
        if not packed:
            return merge()
        table = np.array([_bytes.unpack_counts(body, _COUNTS)[0] for _, body in packed], np.uint64)
        rows = _as_rows(table)
        rows["client"] = np.frombuffer(b"".join(key[:CLIENT_BYTES] for key, _ in packed), "<u8").reshape(-1, 2)
        homes = [self._find_home(key, word) for (key, _), word in zip(packed, table[:, _WORD].tolist(), strict=True)]
        rows["home"], rows["since"] = np.array(homes, np.uint64).T
        return merge(unpack_accounts(rows.tobytes()))

    def add_up(self, sums: FoldedSums, bodies: Sequence[bytes]) -> None:
        """Add the bodies of own accounts to `sums`.

        Raises:
            ValueError: `pack` cannot have packed the bodies.
        """
        if not bodies:
            return
        unpacked = [_bytes.unpack_counts(body, _COUNTS) for body in bodies]
        table = np.array([counts for counts, _ in unpacked], np.uint64)
        rows = _as_rows(table)
        for body, (_, used), lost in zip(bodies, unpacked, rows["lost_feedback"].tolist(), strict=True):
            if used < len(body) or lost:
                sums.feedback.update(_unpack_rest(body[used:], lost)[1] | {"lost": lost})
        for word in np.unique(table[:, _WORD]).tolist():
            mine, number = rows[table[:, _WORD] == word], self._parse_opening(word)[1]
            counts = {name: exact_sum(mine[field]) for name, field in _TOTALS.items()}
            sums.counts.update(counts | {"clients": len(mine), "gone": int((mine["flags"] & GONE).sum())})
            for name, of_tables in sums.tables.items():
                of_tables[number] += counts[name]
        for returned in rows["returns_sum"].tolist():
            sums.returns.add(returned)

    def _find_home(self, key: bytes, word: int) -> tuple[int, int]:
        """Return home and since of the account with this key, whose body has this word."""
        if len(key) == CLIENT_BYTES:
            return self.home, self._parse_opening(word)[0]
        home, since = map(int, self.words.text(int.from_bytes(key[CLIENT_BYTES:], "big")).split(" "))
        return home, since

    def _parse_opening(self, word: int) -> tuple[int, int, str]:
        since, table, owner = self.words.text(word).split(" ", 2)
        return int(since), int(table), owner


def _unpack_rest(packed: bytes, lost: int) -> tuple[dict[str, int], dict[str, int]]:
    """Unpack codes of rejection, and TD errors by `FEEDBACK_OUTCOMES`. Former versions stored the lost ones alone."""
    former: dict[str, int] = {}
    parts = msgspec.msgpack.decode(packed, type=_REST_TYPE) if packed else former
    codes, counts = parts if isinstance(parts, tuple) else (parts, (lost, 0, 0, 0, 0))
    if min(counts) < 0 or counts[0] != sum(counts[1:]) + lost:
        raise ValueError(f"the counts of TD errors {[*counts, lost]} do not add up")
    return codes, dict(zip(FEEDBACK_OUTCOMES, counts, strict=True))


def _check(row: dict[str, Any], codes: dict[str, int]) -> None:
    """Raise ValueError if an account has counts or times out of range, or rejections that do not add up."""
    counts = [*(row[name] for name, _ in _DIFFERENCES), *codes.values()]
    moments = row["first_seen"], row["last_seen"], row["returns_sum"]
    if (
        any(not 0 <= count < 1 << 53 for count in counts)
        or any(not abs(moment) <= MAX_RETURNS for moment in moments)
        or sum(codes.values()) != row["rejected_caches"]
    ):
        raise ValueError("an account has counts or times out of range, or rejections that do not add up")


def _pack(row: Sequence[Any], word: int, sequence: int) -> bytes:
    counts = [(row[_PLACE[name]] - (row[_PLACE[less]] if less else 0)) & _MASK_64_BITS for name, less in _DIFFERENCES]
    first, last = (_milliseconds(row[_PLACE[name]]) for name in ("first_seen", "last_seen"))
    # The bytes of a float of few digits begin with zeros: in reverse order the bytes are a small number.
    returns = int.from_bytes(_FLOAT.pack(row[_PLACE["returns_sum"]]), "big")
    flags, label = row[_PLACE["flags"]], row[_PLACE["label"]]
    return _bytes.pack_counts([*counts, flags, label, first, (last - first) & _MASK_64_BITS, returns, word, sequence])


def _milliseconds(seconds: float) -> int:
    return round(min(max(0.0, seconds), _MAX_SECONDS) * 1000.0)


def _as_rows(table: NDArray[np.uint64]) -> Rows:
    """Return rows of `rows.ACCOUNT`, without keys, from counts [n, _COUNTS]."""
    rows = np.zeros(len(table), ACCOUNT)
    for place, (name, less) in enumerate(_DIFFERENCES):
        rows[name] = table[:, place] + (rows[less] if less else np.uint64(0))  # wraps around, as the subtraction did
    flags, label, first, longer, returns = (table[:, len(_DIFFERENCES) + place] for place in range(5))
    rows["flags"], rows["label"] = flags, label
    rows["first_seen"], rows["last_seen"] = first / 1000.0, (first + longer) / 1000.0
    rows["returns_sum"] = returns.byteswap().view("<f8")
    return rows


_ACCOUNTS_AT_ONCE = 4096
"""Accounts that are read and summed at a time."""
_EXTRA_ACCOUNTS = 64
"""Accounts that are read beyond a page, since its last client may have accounts of several servers."""

Packed = tuple[bytes, bytes]
"""Key and body of an account, by `AccountPacker`."""


class KeptAccounts(AccountStore, ABC):
    """Store of packed accounts of one run. Not thread-safe: the owner locks."""

    def __init__(self, packing: AccountPacker) -> None:
        self._packing = packing

    @abstractmethod
    def _read_own(self, client: bytes) -> bytes | None:
        """Return the body of the client's own account, or None."""

    @abstractmethod
    def _read_others(self, client: bytes) -> Sequence[Packed]:
        """Return the client's accounts of other servers, and of former lives of this server."""

    @abstractmethod
    def _read_from(self, key: bytes, most: int) -> Sequence[Packed]:
        """Return at most `most` accounts from this key on, ascending."""

    @abstractmethod
    def _read_bodies(self) -> Iterator[Sequence[bytes]]:
        """Yield the bodies of all own accounts, in parts."""

    @abstractmethod
    def store_inherited(self, rows: Rows) -> None:
        """Store accounts of other servers, rows of `merge`; of each account the latest row is kept."""

    @property
    @abstractmethod
    def has_others(self) -> bool:
        """True if the store may have accounts of other servers."""

    @abstractmethod
    def mark_saving(self) -> None:
        """Record that all accounts inherited until now are part of a group that is being saved."""

    @abstractmethod
    def mark_saved(self) -> None:
        """Record that the group that was being saved is on disk."""

    def find(self, client: bytes) -> Account | None:
        """Return the newest stored version of the client's own account, or None."""
        body = self._read_own(client)
        return None if body is None else self._packing.unpack(client, body)

    def other_accounts(self, client: bytes) -> Rows:
        """Return a client's accounts of other servers, and of former lives of this server."""
        return self._packing.rows(self._read_others(client))

    def numbers_elsewhere(self, client: bytes) -> tuple[int, int]:
        """Return the numbers of the newest line and closed episode in the client's accounts from other servers."""
        rows = self.other_accounts(client)
        return int(rows["lines_through"].max(initial=0)), int(rows["ended_through"].max(initial=0))

    def sums(self) -> FoldedSums:
        """Return the sums over all own accounts in the store."""
        sums = FoldedSums()
        for bodies in self._read_bodies():
            self._packing.add_up(sums, bodies)
        return sums

    def rows(self, after: bytes, most: int) -> Rows:
        """Return at most `most` rows of this and other servers that follow the key `after` (see `key_of`)."""
        wanted = most + _EXTRA_ACCOUNTS
        while True:
            packed = self._read_from(after[:CLIENT_BYTES], wanted)
            is_end = len(packed) < wanted
            if not is_end:  # the last client may have more accounts than were read
                packed = [each for each in packed if each[0][:CLIENT_BYTES] != packed[-1][0][:CLIENT_BYTES]]
            rows, _ = page(self._packing.rows(packed), after, most)
            if is_end or len(rows) == most:
                return rows
            wanted *= 2


class MemoryAccounts(KeptAccounts):
    """Store of packed accounts in memory, with about 250 bytes for each client.

    Args:
        home: `frames.name_hash` of the server's name.
    """

    def __init__(self, home: int) -> None:
        super().__init__(AccountPacker(home, NumberedTexts()))
        self._packed: dict[bytes, bytes] = {}
        self._other_keys: dict[bytes, list[bytes]] = {}  # keys, by client
        self._order: list[bytes] | None = None  # sorted keys; a new key sets None

    @property
    def has_others(self) -> bool:
        """True if the store has accounts of other servers."""
        return bool(self._other_keys)

    def _read_own(self, client: bytes) -> bytes | None:
        return self._packed.get(client)

    def _read_others(self, client: bytes) -> list[Packed]:
        return [(key, self._packed[key]) for key in self._other_keys.get(client, ())]

    def _read_from(self, key: bytes, most: int) -> list[Packed]:
        if self._order is None:
            self._order = sorted(self._packed)
        begin = bisect_left(self._order, key)
        return [(each, self._packed[each]) for each in self._order[begin : begin + most]]

    def _read_bodies(self) -> Iterator[list[bytes]]:
        yield [body for key, body in self._packed.items() if len(key) == CLIENT_BYTES]

    def store(self, account: Account) -> None:
        """Pack and store an account that leaves the ledger."""
        self._put(account.client, self._packing.pack(account))

    def store_inherited(self, rows: Rows) -> None:
        """Pack and store accounts of other servers, merged with the stored ones."""
        for row in rows:
            client = row["client"].tobytes()
            key, _ = self._packing.pack_row(row)
            known = [self._packing.rows([(key, self._packed[key])])] if key in self._packed else []
            self._put(*self._packing.pack_row(merge(*known, row.reshape(1))[0]))
            keys = self._other_keys.setdefault(client, [])
            if key not in keys:
                keys.append(key)

    def mark_saving(self) -> None:
        """Do nothing, since there is no disk."""

    def mark_saved(self) -> None:
        """Do nothing, since there is no disk."""

    def _put(self, key: bytes, body: bytes) -> None:
        if key not in self._packed:
            self._order = None
        self._packed[key] = body


class PackedReader(Protocol):
    """Reader of one run's accounts on disk. May be used from any thread."""

    def body(self, key: bytes) -> bytes | None:
        """Return the body of the account with this key, or None."""

    def accounts_after(self, key: bytes, most: int, before: bytes = ...) -> Sequence[Packed]:
        """Return at most `most` accounts from this key on, ascending, whose keys are below `before`."""

    def add_file_to_errors(self) -> AbstractContextManager[None]:
        """Return a context in which bytes that cannot be unpacked raise an error that names the file."""


class StoredAccounts(KeptAccounts):
    """Store of accounts in a state folder. Inherited accounts can be read at once, also before they are saved.

    Args:
        packing: Packer with the words of the folder.
        reader: Reader of the accounts on disk.
    """

    def __init__(self, packing: AccountPacker, reader: PackedReader) -> None:
        super().__init__(packing)
        self._reader = reader
        self._arriving = self._saving = merge()  # rows of other servers that are not on disk yet
        self._has_others = False

    @property
    def has_others(self) -> bool:
        """True if `sums` has read accounts of other servers, or some were inherited since."""
        return self._has_others

    def _read_own(self, client: bytes) -> bytes | None:
        return self._reader.body(client)

    def _read_others(self, client: bytes) -> Sequence[Packed]:
        return self._reader.accounts_after(client + b"\0", 1 << 16, client + b"\xff" * 8)

    def _read_from(self, key: bytes, most: int) -> Sequence[Packed]:
        return self._reader.accounts_after(key, most)

    def _read_bodies(self) -> Iterator[list[bytes]]:
        key, packed = b"", self._reader.accounts_after(b"", _ACCOUNTS_AT_ONCE)
        while packed:
            own = [body for key, body in packed if len(key) == CLIENT_BYTES]
            self._has_others = self._has_others or len(own) < len(packed)
            yield own
            key = packed[-1][0] + b"\0"
            packed = self._reader.accounts_after(key, _ACCOUNTS_AT_ONCE)

    def store(self, account: Account) -> None:
        """Do nothing, since an account leaves the ledger only after it is on disk."""

    def store_inherited(self, rows: Rows) -> None:
        """Store accounts of other servers in memory until they are on disk."""
        self._arriving = merge(self._arriving, rows)
        self._has_others = True

    def mark_saving(self) -> None:
        """Record that all accounts inherited until now are part of a group that is being saved."""
        if len(self._arriving):  # rows seldom arrive; this runs for each group
            self._saving, self._arriving = merge(self._saving, self._arriving), merge()

    def mark_saved(self) -> None:
        """Record that the group that was being saved is on disk."""
        if len(self._saving):
            self._saving = merge()

    def find(self, client: bytes) -> Account | None:
        """Return the client's own account from disk, or None."""
        with self._reader.add_file_to_errors():
            return super().find(client)

    def other_accounts(self, client: bytes) -> Rows:
        """Return a client's accounts of other servers, saved or not."""
        mine = [rows[(rows["client"] == np.frombuffer(client, "<u8")).all(axis=1)] for rows in self._unsaved]
        with self._reader.add_file_to_errors():
            return merge(super().other_accounts(client), *mine)

    def sums(self) -> FoldedSums:
        """Return the sums over all own accounts on disk."""
        with self._reader.add_file_to_errors():
            return super().sums()

    def rows(self, after: bytes, most: int) -> Rows:
        """Return at most `most` rows, saved or not, that follow the key `after`."""
        unsaved = [page(rows, after, most)[0] for rows in self._unsaved]
        with self._reader.add_file_to_errors():
            return merge(super().rows(after, most), *unsaved)[:most]

    @property
    def _unsaved(self) -> tuple[Rows, Rows]:
        return self._saving, self._arriving
