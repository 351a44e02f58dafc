"""The database of a server's state folder: what it has counted and taken, in rows that are checked one by one.

SQLite keeps transactions whole, but it believes what it reads: a flipped bit in a page is served as good. So each row
carries a checksum, and one row seals all: how many rows there are, and all checksums together. A row that is missing,
stale or changed is found when the file is opened, and the file is refused.

    facts      kind, key, body, sum     runs, models, settings, ...: one row for each thing, replaced when it changes
    accounts   run, key, body, sum      what each client has counted, packed (`packed_accounts`): there may be millions
    lines      run << 40 | index, ...   log lines as the log file has them, oldest first

Not thread-safe, but for `Reader`: the store's writer thread owns the file.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from memoire.accounting.journal import Group, RunFacts
from memoire.accounting.kept_accounts import Packed
from memoire.accounting.logbook import Entry, escape
from memoire.accounting.merge import merge
from memoire.accounting.packing import Packing, Words
from memoire.errors import StateCorrupt, StateError, StateForeign, StateUnusable
from memoire.wire import _bytes
from memoire.wire.messages import Line
from memoire.wire.rows import ACCOUNT

from . import private_files

LIVE: Final = 0x6D656D6F  # "memo", SQLite's application_id of a state file
BACKUP: Final = 0x6D656D62  # "memb": a copy that becomes live when somebody puts it back
VERSION: Final = 2
"""Of the tables, as SQLite's user_version."""
BUSY: Final = 5.0
"""Seconds to wait for another program that has the file open, such as a shell of SQLite."""
INDEX_BITS: Final = 40
LAST: Final = b"\xff" * 32
"""Above every key of an account."""
KEPT_READERS: Final = 4
"""Connections that are kept for the next one who reads."""
MOST_TRIMMED: Final = 5_000
"""Old lines that leave with one transaction: more would hold up those who wait for theirs."""

SEAL, META, SETTING, RUN, WORD, MODEL, SEGMENT = range(7)

_TABLES: Final = """
CREATE TABLE facts (kind INTEGER NOT NULL, key BLOB NOT NULL, body BLOB NOT NULL, sum INTEGER NOT NULL,
                    PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE accounts (run INTEGER NOT NULL, key BLOB NOT NULL, body BLOB NOT NULL, sum INTEGER NOT NULL,
                       PRIMARY KEY (run, key)) WITHOUT ROWID;
CREATE TABLE lines (id INTEGER PRIMARY KEY, client BLOB NOT NULL, number INTEGER NOT NULL, received REAL NOT NULL,
                    label INTEGER NOT NULL, said REAL NOT NULL, text TEXT NOT NULL, sum INTEGER NOT NULL);
"""
_LINE: Final = "id, client, number, received, label, said, text, sum"
_SEAL: Final = struct.Struct(">QQQQQQQ")
_COUNT: Final = struct.Struct(">Q")
_SUMS: Final = (1 << 64) - 1
_HEADER: Final = b"SQLite format 3\x00"

RESTORE: Final = (
    "Put a backup back (the newest is state.db.backup-1): stop the server, move state.db away, remove state.db-wal and "
    "state.db-shm, copy the backup to state.db, and start; clients that are still running bring their totals up to "
    "date by themselves. Or give the server an empty folder: it then counts only what its running clients report, and "
    "former runs, models and log lines are not there"
)

_T = TypeVar("_T")
_LOG_NAME: Final = re.compile(r"[A-Za-z0-9_-]{0,80}\.[0-9]{8,12}\.log")


def add_up(kind: int, key: bytes, body: bytes) -> int:
    """Checksum of a row of facts, in 63 bits: SQLite's integers have a sign."""
    return _bytes.checksum(b"%c%c%b%b" % (kind, len(key) & 255, key, body)) >> 1


def account_sum(run: int, key: bytes, body: bytes) -> int:
    """Checksum of a row of accounts, in 31 bits: there are many of them."""
    return _bytes.checksum(b"%d %b%b" % (run, key, body)) >> 33


def run_key(run: int, rest: bytes = b"") -> bytes:
    """Key of what belongs to a run."""
    return struct.pack(">I", run) + rest


@dataclass(frozen=True, slots=True)
class StoredModel:
    """What the database knows of a topic's newest model; the body is in it when it is small, else in a file."""

    version: int
    size: int
    sha256: bytes
    text: bool
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A text file of log lines: which lines of which run are in it."""

    number: int
    run: int
    name: str
    """Of the file."""
    first: int
    """Index of its first line within the run."""
    last: int
    bytes: int


def segment_key(segment: Segment) -> bytes:
    """Key of a segment's row."""
    return struct.pack(">I", segment.number)


@dataclass(frozen=True, slots=True)
class Seal:
    """What all rows together must come to."""

    generation: int = 0
    """Transactions so far."""
    facts: int = 0
    facts_sum: int = 0
    lines: int = 0
    lines_sum: int = 0
    accounts: int = 0
    accounts_sum: int = 0


class StateFile:
    """An open state file, of which only this process knows the contents: the folder's lock says so.

    Args:
        path: Of the file, which must be there: see `create`. Nothing is written before `go_live`.
        witnessed: Transactions that it must have had; None where nobody knows any more.
        at: Called at named points, so that a test may end the process there.
    """

    def __init__(self, path: Path, witnessed: int | None, *, at: Callable[[str], None] = lambda point: None) -> None:
        self.path = path
        self._at = at
        self.seal = Seal()
        self._sums: dict[tuple[int, bytes], int] = {}
        self.runs: dict[str, int] = {}
        self.facts_of: dict[str, RunFacts] = {}
        self.counts: dict[int, int] = {}
        """Index of the newest line of each run."""
        self.segments: dict[int, Segment] = {}
        self.words = Words()
        """What packed accounts refer to."""
        self._saved_words = 0
        self.was_backup = _read_head(path)
        if self.was_backup:
            _set_aside(path)
        # Read-only at first: whoever closes a damaged file that is open for writing would empty its log for good.
        has_journal = path.with_name(path.name + "-journal").exists()
        self._connection = _connect(path, "rw" if self.was_backup or has_journal else "ro")
        try:
            self._load()
            self._check_witness(witnessed)
        except BaseException as error:
            self._connection.close()
            if is_damage(error):
                raise self.corrupt(f"SQLite says {error}") from error
            raise

    def _check_witness(self, witnessed: int | None) -> None:
        if self.was_backup:
            return
        if witnessed is None and not self.number(META, b"clean"):
            raise StateCorrupt(
                str(self.path.with_name("committed")),
                f"it says how many transactions {self.path.name} must have, and cannot be read",
                f"Remove it to go on with what {self.path.name} has. Or: {RESTORE}.",
            )
        missing = (witnessed or 0) - self.seal.generation
        if missing > 0:
            raise self.corrupt(
                f"its last {missing} transactions are missing (its write-ahead log state.db-wal was removed, cut or "
                f"damaged)"
            )

    @staticmethod
    def create(path: Path, name: str, at: Callable[[str], None]) -> None:
        """Make an empty state file: it appears whole or not at all."""
        made = path.with_name(path.name + ".new")
        os.close(private_files.replace(made))
        connection = sqlite3.connect(made, isolation_level=None)
        try:
            connection.executescript(_TABLES)
            _stamp(connection, LIVE)
            rows = [(META, b"name", name.encode())]
            _write(connection, [(kind, key, body, add_up(kind, key, body)) for kind, key, body in rows])
            _write_seal(connection, Seal(0, len(rows), sum(add_up(*row) for row in rows) & _SUMS))
        finally:
            connection.close()
        sync(made)
        at("before create")
        made.rename(path)
        sync(path.parent)
        at("after create")

    # ------------------------------------------------------------------------------------------------ opening

    def _load(self) -> None:
        damage = [row[0] for row in self._connection.execute("PRAGMA quick_check(3)")]
        if damage != ["ok"]:
            raise self.corrupt("; ".join(damage))
        count = total = 0
        seal: Seal | None = None
        before = (-1, b"")
        for kind, key, body, check in self._connection.execute("SELECT kind, key, body, sum FROM facts"):
            if before >= (kind, key):
                raise self.corrupt("rows are out of order")  # whoever looks for them would not find them
            before = (kind, key)
            if add_up(kind, key, body) != check:
                raise self.corrupt(f"a row of kind {kind} has a wrong checksum")
            if kind == SEAL:
                seal = Seal(*_SEAL.unpack(body))
                continue
            count, total = count + 1, total + check & _SUMS
            self._sums[kind, key] = check
            self._remember(kind, key, body)
        # Of lines only what they add up to: there may be a million, and each is checked when it is read.
        lines, low, high = self._connection.execute(
            "SELECT count(*), coalesce(sum(sum & 4294967295), 0), coalesce(sum(sum >> 32), 0) FROM lines"
        ).fetchone()
        lines_sum = (high << 32) + low & _SUMS
        # A key of another type would be out of the order in which accounts are looked for.
        accounts = self._connection.execute(
            "SELECT count(*), coalesce(sum(sum), 0) FROM accounts "
            "WHERE typeof(run) = 'integer' AND typeof(key) = 'blob' AND typeof(body) = 'blob'"
        ).fetchone()
        if seal is None or seal != Seal(seal.generation, count, total, lines, lines_sum, *accounts):
            raise self.corrupt("rows are missing, or older than others")
        self.seal = seal
        self._saved_words = len(self.words)

    def _remember(self, kind: int, key: bytes, body: bytes) -> None:
        """Keep what is asked for often."""
        if kind == RUN:
            facts = msgspec.msgpack.decode(body, type=RunFacts)
            self.runs[facts.name], self.facts_of[facts.name] = struct.unpack(">I", key)[0], facts
        elif kind == SEGMENT:
            segment = msgspec.msgpack.decode(body, type=Segment)
            if not _LOG_NAME.fullmatch(segment.name):  # whoever wrote it would have another file written, or removed
                raise self.corrupt(f"a file of log lines cannot be called {segment.name[:80]!r}")
            self.segments[segment.number] = segment
        elif kind == WORD:
            if self.words.number(body.decode()) != int.from_bytes(key, "big"):
                raise self.corrupt("a word is missing")
        elif kind == META and key.startswith(b"count"):
            self.counts[struct.unpack(">I", key[5:])[0]] = count_of(body)

    def corrupt(self, damage: str) -> StateCorrupt:
        """The error that says so."""
        return StateCorrupt(str(self.path), damage, f"{RESTORE}.")

    def go_live(self, generation: int) -> None:
        """Write from now on through a write-ahead log, each transaction synced.

        A backup becomes the state itself: its transactions are counted on from `generation`, which is that of the file
        whose place it takes.
        """
        self._connection.close()
        self._connection = _connect(self.path)
        if self.was_backup:
            times = (self.number(META, b"restored") + 1).to_bytes(8, "big")
            self.seal = replace(self.seal, generation=max(generation, self.seal.generation))
            self.save([(META, b"restored", times)], [], application=LIVE)
        mode = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StateUnusable(
                str(self.path.parent), f"its file system allows SQLite no write-ahead log ({mode})", "Use a local disk."
            )
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA journal_size_limit = 67108864")

    # ------------------------------------------------------------------------------------------------ reading

    def rows(self, kind: int, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and bodies of a kind whose key begins so."""
        return read_facts(self._connection, self.path, kind, prefix)

    def find(self, kind: int, key: bytes) -> bytes | None:
        """One fact."""
        return next((body for found, body in self.rows(kind, key) if found == key), None)

    def number(self, kind: int, key: bytes) -> int:
        """One fact that is a number; 0 where there is none."""
        return int.from_bytes(self.find(kind, key) or b"", "big")

    def lines_of(self, segment: Segment) -> Iterator[Entry]:
        """The lines of a segment in their order."""
        first, last = (segment.run << INDEX_BITS | index for index in (segment.first, segment.last))
        query = f"SELECT {_LINE} FROM lines WHERE id BETWEEN ? AND ? ORDER BY id"  # noqa: S608
        try:
            for row in self._connection.execute(query, (first, last)):
                yield _entry(row, self.path)
        except (sqlite3.DatabaseError, TypeError) as error:
            if is_damage(error):
                raise self.corrupt(f"SQLite says {error}") from error
            raise

    # ------------------------------------------------------------------------------------------------ writing

    def save(
        self,
        facts: Iterable[tuple[int, bytes, bytes | None]],
        lines: list[tuple[int, Entry]],
        accounts: Mapping[tuple[int, bytes], bytes] = MappingProxyType({}),
        *,
        application: int = 0,
    ) -> None:
        """One transaction: facts (kind, key, body; None takes it out), new lines (number of the run, entry) and bodies
        of accounts (by number of the run and key).

        On disk when it returns. Raises `sqlite3.Error`, and nothing was saved.
        """
        words = enumerate(self.words.after(self._saved_words), self._saved_words + 1)
        facts = [*facts, *((WORD, number.to_bytes(4, "big"), text.encode()) for number, text in words)]
        changed: dict[tuple[int, bytes], int | None] = {}
        rows: list[tuple[int, bytes, bytes, int]] = []
        gone: list[tuple[int, bytes]] = []
        seal = self.seal
        count, total = seal.facts, seal.facts_sum
        for kind, key, body in _last_of_each(facts):
            before = self._sums.get((kind, key))
            if before is not None:
                count, total = count - 1, total - before & _SUMS
            if body is None:
                gone.append((kind, key))
                changed[kind, key] = None
                continue
            check = changed[kind, key] = add_up(kind, key, body)
            count, total = count + 1, total + check & _SUMS
            rows.append((kind, key, body, check))
        new = [_line_row(run, entry) for run, entry in lines]
        lines_sum = seal.lines_sum + sum(row[-1] for row in new) & _SUMS
        seal = replace(
            seal,
            generation=seal.generation + 1,
            facts=count,
            facts_sum=total,
            lines=seal.lines + len(new),
            lines_sum=lines_sum,
        )

        def write() -> None:
            nonlocal seal
            if application:
                self._connection.execute(f"PRAGMA application_id = {application}")
            seal = self._write_accounts(accounts, seal)
            self._write_all(rows, gone, new, seal)

        self._transact(write)
        self._keep(changed, rows)
        self.seal = seal
        self._saved_words = len(self.words)

    def _write_accounts(self, accounts: Mapping[tuple[int, bytes], bytes], seal: Seal) -> Seal:
        """Replace these accounts; returns what the seal comes to."""
        count, total = seal.accounts, seal.accounts_sum
        former = "SELECT sum FROM accounts WHERE run = ? AND key = ?"
        for name in accounts:
            known = self._connection.execute(former, name).fetchone()
            count, total = count + (known is None), total - (0 if known is None else known[0])
        rows = [(run, key, body, account_sum(run, key, body)) for (run, key), body in accounts.items()]
        self._connection.executemany("INSERT OR REPLACE INTO accounts VALUES (?, ?, ?, ?)", rows)
        return replace(seal, accounts=count, accounts_sum=total + sum(row[-1] for row in rows))

    def account(self, run: int, key: bytes) -> bytes | None:
        """The body of an account, as its writer has it."""
        return next((body for _, body in read_accounts(self._connection, self.path, run, key, 1, key + b"\0")), None)

    def _write_all(
        self, rows: list[tuple[int, bytes, bytes, int]], gone: list[tuple[int, bytes]], new: list[Any], seal: Seal
    ) -> None:
        _write(self._connection, rows)
        if gone:
            self._connection.executemany("DELETE FROM facts WHERE kind = ? AND key = ?", gone)
        if new:
            self._connection.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?, ?)", new)
        _write_seal(self._connection, seal)

    def _keep(self, changed: dict[tuple[int, bytes], int | None], rows: list[tuple[int, bytes, bytes, int]]) -> None:
        for which, check in changed.items():
            if check is None:
                self._sums.pop(which, None)
            else:
                self._sums[which] = check
        for kind, key, body, _ in rows:
            self._remember(kind, key, body)
        for kind, key in changed:
            if kind == SEGMENT and changed[kind, key] is None:
                self.segments.pop(struct.unpack(">I", key)[0], None)

    def _transact(self, write: Callable[[], None]) -> None:
        connection = self._connection
        self._at("before begin")
        connection.execute("BEGIN IMMEDIATE")
        try:
            write()
            self._at("before commit")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                try:
                    connection.execute("ROLLBACK")
                except sqlite3.Error:
                    pass  # the first error says more
            raise
        self._at("after commit")

    def trim(self, segment: Segment) -> bool:
        """Take the oldest lines of a segment out, some of them at a time; True when it was the last of it.

        The segment's own row goes with its last lines.
        """
        first, last = (segment.run << INDEX_BITS | index for index in (segment.first, segment.last))
        sums = self._connection.execute(
            "SELECT id, sum FROM lines WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?", (first, last, MOST_TRIMMED)
        ).fetchall()
        is_over = len(sums) < MOST_TRIMMED
        key = segment_key(segment)
        seal = self.seal
        lines_sum, facts_sum, facts = seal.lines_sum, seal.facts_sum, seal.facts
        lines_sum = lines_sum - sum(check for _, check in sums) & _SUMS
        if is_over:
            facts, facts_sum = facts - 1, facts_sum - self._sums[SEGMENT, key] & _SUMS
        seal = replace(
            seal,
            generation=seal.generation + 1,
            facts=facts,
            facts_sum=facts_sum,
            lines=seal.lines - len(sums),
            lines_sum=lines_sum,
        )

        def write() -> None:
            if sums:
                self._connection.execute("DELETE FROM lines WHERE id BETWEEN ? AND ?", (sums[0][0], sums[-1][0]))
            if is_over:
                self._connection.execute("DELETE FROM facts WHERE kind = ? AND key = ?", (SEGMENT, key))
            _write_seal(self._connection, seal)

        self._transact(write)
        self.seal = seal
        if is_over:
            self._keep({(SEGMENT, key): None}, [])
        return is_over

    def checkpoint(self) -> None:
        """Bring everything into the file itself and empty the write-ahead log."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


class Reader:
    """Reads a state file beside its writer. Thread-safe; who reads long holds nobody up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle = [_connect(path, "ro")]
        self._closed = False

    def close(self) -> None:
        """Let go of the file, once those who read now have done so."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def _read(self, read: Callable[[sqlite3.Connection], _T]) -> _T:
        with self._lock:
            if self._closed:
                raise ValueError("the state file is closed")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _connect(self._path, "ro")
        try:
            return read(connection)
        except Exception as error:
            if is_damage(error):
                raise StateCorrupt(str(self._path), f"SQLite says {error}", f"{RESTORE}.") from error
            raise
        finally:
            self._give_back(connection)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if self._closed or len(self._idle) >= KEPT_READERS:
                connection.close()
            else:
                self._idle.append(connection)

    def facts(self, kind: int, prefix: bytes = b"") -> list[tuple[bytes, bytes]]:
        """Keys and bodies of a kind, in the order of their keys."""
        return self._read(lambda connection: list(read_facts(connection, self._path, kind, prefix)))

    def accounts(self, run: int, begin: bytes, most: int, before: bytes = LAST) -> list[Packed]:
        """At most so many accounts of a run, ascending, from this key on and below `before`."""
        return self._read(lambda connection: list(read_accounts(connection, self._path, run, begin, most, before)))

    def lines(self, where: str, values: list[Any], order: str, most: int) -> list[Entry]:
        """Log lines that fulfil a condition."""
        query = f"SELECT {_LINE} FROM lines WHERE {where} ORDER BY id {order} LIMIT ?"  # noqa: S608
        return self._read(
            lambda connection: [_entry(row, self._path) for row in connection.execute(query, [*values, most])]
        )

    def copy_to(self, path: Path) -> None:
        """Write a backup to this path: all facts and accounts, no lines.

        Raises:
            StateCorrupt: a row has a wrong checksum, so that this copy must not take the place of a good one.
        """
        os.close(private_files.replace(path))
        self._read(lambda connection: self._copy(connection, path))
        sync(path)

    def _copy(self, source: sqlite3.Connection, path: Path) -> None:
        copy = sqlite3.connect(path, isolation_level=None)
        try:
            source.execute("BEGIN")  # all of it of one moment
            copy.executescript(_TABLES)
            copy.execute("BEGIN")
            seal, facts = None, 0
            for kind, key, body, check in source.execute("SELECT kind, key, body, sum FROM facts"):
                if add_up(kind, key, body) != check:
                    raise StateCorrupt(str(self._path), f"a row of kind {kind} has a wrong checksum", f"{RESTORE}.")
                if kind == SEAL:
                    seal = Seal(*_SEAL.unpack(body))
                else:
                    _write(copy, [(kind, key, body, check)])
                    facts += 1
            rows = _checked_accounts(source.execute("SELECT run, key, body, sum FROM accounts"), self._path)
            written = copy.executemany("INSERT INTO accounts VALUES (?, ?, ?, ?)", rows)
            if seal is None or (seal.facts, seal.accounts) != (facts, written.rowcount):
                raise StateCorrupt(str(self._path), "rows are missing", f"{RESTORE}.")
            _write_seal(copy, replace(seal, lines=0, lines_sum=0))
            copy.execute("COMMIT")
            _stamp(copy, BACKUP)
        finally:
            copy.close()
            if source.in_transaction:
                source.execute("COMMIT")


# ------------------------------------------------------------------------------------------------ what a row is


def pack_group(group: Group, runs: dict[str, int]) -> list[tuple[int, bytes, bytes | None]]:
    """The facts of a group, but for its models and segments; new runs get the next number in `runs`."""
    facts: list[tuple[int, bytes, bytes | None]] = []
    for run in group.runs:
        number = runs.setdefault(run.name, max(runs.values(), default=0) + 1)
        facts.append((RUN, run_key(number), msgspec.msgpack.encode(run)))
    counts: dict[int, int] = {}
    for name, entry in group.lines:
        number = runs[name]
        counts[number] = entry.index
    for number, count in counts.items():
        facts.append((META, b"count" + run_key(number), _COUNT.pack(count)))
    facts += [(SETTING, name.encode(), text.encode()) for name, text in group.settings.items()]
    return facts


def count_of(body: bytes) -> int:
    """A number of lines, as a row has it. Raises ValueError, struct.error."""
    (count,) = _COUNT.unpack(body)
    if count >> 53:
        raise ValueError(f"{count} lines")
    return int(count)


def pack_accounts(
    group: Group, runs: Mapping[str, int], packing: Packing, stored: Callable[[int, bytes], bytes | None]
) -> dict[tuple[int, bytes], bytes]:
    """The bodies of a group's accounts, by number of the run and key; those of other servers merged with what is
    `stored` of them.
    """
    bodies = {(runs[name], account.client): packing.pack(account) for name, account in group.accounts}
    for name, packed in group.inherited:
        run = runs[name]
        rows = np.frombuffer(packed, ACCOUNT)
        keys = [packing.pack_row(row)[0] for row in rows]
        former = [(key, bodies.get((run, key)) or stored(run, key)) for key in keys]
        known = packing.rows([(key, body) for key, body in former if body is not None])
        bodies |= {(run, key): body for key, body in map(packing.pack_row, merge(known, rows))}
    return bodies


@contextmanager
def as_saved(path: Path) -> Iterator[None]:
    """Within it, what cannot have been saved by memoire is damage: StateCorrupt."""
    try:
        yield
    except Exception as error:
        if is_damage(error) or isinstance(error, RecursionError):
            raise StateCorrupt(str(path), f"a row says what none can: {error}", f"{RESTORE}.") from error
        raise


def _last_of_each(facts: Iterable[tuple[int, bytes, bytes | None]]) -> list[tuple[int, bytes, bytes | None]]:
    last = {(kind, key): body for kind, key, body in facts}
    return [(kind, key, body) for (kind, key), body in last.items()]


def _line_row(run: int, entry: Entry) -> tuple[Any, ...]:
    line = entry.line
    row = (
        run << INDEX_BITS | entry.index,
        entry.client,
        line.number,
        entry.received,
        line.label,
        line.time,
        escape(line.text),
    )
    return (*row, _line_sum(row))


def _line_sum(row: tuple[Any, ...]) -> int:
    number, client, count, received, label, said, text = row[:7]
    return _bytes.checksum(struct.pack(">qqdqd", number, count, received, label, said) + client + text.encode()) >> 1


def _entry(row: tuple[Any, ...], path: Path) -> Entry:
    number, client, count, received, label, said, text, check = row
    index = number & (1 << INDEX_BITS) - 1
    if _line_sum(row) != check:
        raise StateCorrupt(str(path), f"log line {index} has a wrong checksum", f"{RESTORE}.")
    return Entry(index, client, received, Line(count, said, label, text))


def read_facts(
    connection: sqlite3.Connection, path: Path, kind: int, prefix: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """Keys and bodies of a kind whose key begins so, checked."""
    query = "SELECT key, body, sum FROM facts WHERE kind = ? AND key >= ? AND key < ?"
    for key, body, check in connection.execute(query, (kind, prefix, prefix + b"\xff" * 260)):
        if add_up(kind, key, body) != check:
            raise StateCorrupt(str(path), f"a row of kind {kind} has a wrong checksum", f"{RESTORE}.")
        yield key, body


def read_accounts(
    connection: sqlite3.Connection, path: Path, run: int, begin: bytes, most: int, before: bytes
) -> Iterator[Packed]:
    """At most so many accounts of a run, checked, in the order of their keys: from `begin` on, and below `before`."""
    query = "SELECT run, key, body, sum FROM accounts WHERE run = ? AND key >= ? AND key < ? ORDER BY key LIMIT ?"
    for _, key, body, _ in _checked_accounts(connection.execute(query, (run, begin, before, most)), path):
        yield key, body


def _checked_accounts(rows: Iterable[Any], path: Path) -> Iterator[tuple[int, bytes, bytes, int]]:
    for run, key, body, check in rows:
        if account_sum(run, key, body) != check:
            raise StateCorrupt(str(path), "an account has a wrong checksum", f"{RESTORE}.")
        yield run, key, body, check


def _write(connection: sqlite3.Connection, rows: list[tuple[int, bytes, bytes, int]]) -> None:
    if rows:
        connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?)", rows)


def _write_seal(connection: sqlite3.Connection, seal: Seal) -> None:
    body = _SEAL.pack(*astuple(seal))
    _write(connection, [(SEAL, b"", body, add_up(SEAL, b"", body))])


def _stamp(connection: sqlite3.Connection, application: int) -> None:
    connection.execute(f"PRAGMA application_id = {application}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


# ---------------------------------------------------------------------------------------------------- files


def _connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?mode={mode}",
        uri=True,
        timeout=BUSY,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _read_head(path: Path) -> bool:
    """Whether the file is a backup that was put back.

    Raises:
        StateCorrupt, StateForeign: it is no file of this version of memoire.
    """
    with path.open("rb") as file:
        head = file.read(100)
    if len(head) < 100 or not head.startswith(_HEADER):
        raise StateCorrupt(
            str(path), f"it does not begin as an SQLite file does ({len(head)} bytes read)", f"{RESTORE}."
        )
    version, application = struct.unpack(">I", head[60:64])[0], struct.unpack(">I", head[68:72])[0]
    if application not in (LIVE, BACKUP):
        raise StateForeign(
            str(path),
            f"is a database of another program (application id {application:#010x})",
            f"Give the server a folder of its own. If it was a state file and is damaged: {RESTORE}.",
        )
    if version != VERSION:
        raise StateForeign(
            str(path),
            f"was written in form {version}, this version of memoire reads and writes form {VERSION}",
            "Use the version of memoire that wrote it, or give the server an empty folder.",
        )
    return bool(application == BACKUP)


def _set_aside(path: Path) -> None:
    """A write-ahead log beside a backup that was put back belongs to the file that was there before: SQLite would
    write its pages into the backup.
    """
    for ending in ("-wal", "-shm"):
        beside = path.with_name(path.name + ending)
        if beside.exists():
            beside.replace(path.with_name(path.name + ending + ".set-aside"))


def sync(path: Path) -> None:
    """Have a file or folder on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def is_full(error: Exception) -> bool:
    """Whether the disk (or a quota) is full: it heals when somebody makes room."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 255 == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_damage(error: BaseException) -> bool:
    """Whether something was read that nobody can have written: a value of another type, a page that is none."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 255
        return code in (0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
    wrong = TypeError | ValueError | OverflowError | struct.error | msgspec.MsgspecError
    return isinstance(error, wrong) and not isinstance(error, StateError)


def is_busy(error: Exception) -> bool:
    """Whether another program holds the file just now."""
    return getattr(error, "sqlite_errorcode", 0) & 255 in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
