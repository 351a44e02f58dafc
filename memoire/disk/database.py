"""Database of a state folder, in SQLite: tables, header, checksummed rows, concurrent readers, backups, error types.

SQLite keeps transactions whole, but does not check the pages that it reads: a flipped bit is served as good. Each row
therefore carries a checksum (`records`), and one row, the seal, has the number of all rows and the sum of their
checksums (`RowsChecksum`). Opening the file finds a missing, stale or changed row, and refuses the file.

    two facts of checksums 3 and 4           RowsChecksum(facts=2, facts_sum=7)
    the one of checksum 3 becomes one of 9   .next(([3], [9]))             RowsChecksum(1, facts=2, facts_sum=13)

`DatabaseReader` reads beside the writer, from any thread, on separate connections. `DatabaseBackups` keeps two copies
of the database without log lines, the newest and the one before.

Errors of SQLite and of the disk are sorted into three classes by type and code, never by text: temporary ones, damage,
and those that need a person.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from memoire._core import Held
from memoire.accounting.packing import Packed
from memoire.accounting.runs import LogEntry
from memoire.errors import StateError, StateForeign, StateUnusable
from memoire.replay.files import draft_file

from .files import RECOVERABLE_ERRORS, RESTORE, corrupt, folder_error, mode_in
from .records import LAST, META, SEAL, FactRow, PartRow, checked_fact, checked_parts, entry_of, fact_checksum


@contextmanager
def corrupt_on_bad_values(path: Path) -> Iterator[None]:
    """Raise StateCorrupt for errors in the block that show a value which memoire cannot have saved."""
    try:
        yield
    except Exception as error:
        if is_damage(error) or isinstance(error, RecursionError):
            raise corrupt(path, f"a row holds an impossible value: {error}") from error
        raise


def is_damage(error: BaseException) -> bool:
    """Return True if an error shows damaged data: a value of another type, or a page that is not SQLite's."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 255
        return code in (0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
    wrong = TypeError | ValueError | OverflowError | struct.error | msgspec.MsgspecError
    return isinstance(error, wrong) and not isinstance(error, StateError)


def is_busy(error: Exception) -> bool:
    """Return True if an error means that another program holds the file now."""
    return getattr(error, "sqlite_errorcode", 0) & 255 in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


_VAGUE: Final = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in ("FULL", "IOERR_WRITE", "IOERR_TRUNCATE", "IOERR_SHMOPEN", "IOERR_SHMSIZE", "IOERR_SHMMAP", "CANTOPEN")
)


def recoverable_problem(folder: Path, error: Exception) -> tuple[str, str] | None:
    """Return the disk's problem and advice if saving may go on after it is solved; None for any other error.

    SQLite hides the system's error code, so a test file is written to learn it. An error of a sync is never temporary.
    """
    if isinstance(error, OSError):
        return RECOVERABLE_ERRORS.get(error.errno or 0)
    code = getattr(error, "sqlite_errorcode", 0)
    if code not in _VAGUE and code & 255 != sqlite3.SQLITE_READONLY:
        return None
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as cause:
        return RECOVERABLE_ERRORS.get(cause.errno or 0)
    return RECOVERABLE_ERRORS[errno.ENOSPC] if code == sqlite3.SQLITE_FULL else None


def error_text(error: BaseException) -> str:
    """Return an error's text, with SQLite's name of the error."""
    name = getattr(error, "sqlite_errorname", "")
    return f"{error} ({name})" if name else str(error)


def database_open_error(error: sqlite3.Error, folder: Path, path: Path) -> StateError:
    """Return the state error for a database that cannot be opened."""
    code = getattr(error, "sqlite_errorcode", 0) & 255
    if (trouble := recoverable_problem(folder, error)) is not None:
        return folder_error(folder, trouble)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StateUnusable(str(folder), error_text(error), "Make it writable for this user.")
    if is_busy(error):
        return StateUnusable(str(folder), "another program has state.db open", "Close it, and start again.")
    if code == sqlite3.SQLITE_IOERR:
        return StateUnusable(str(folder), error_text(error), "Check the disk.")
    return corrupt(path, f"SQLite says {error_text(error)}")


_log = logging.getLogger(__name__)

SUMS: Final = (1 << 64) - 1
"""Mask of sums: those of facts and lines keep 64 bits; those of other rows, with checksums of 31 bits, stay below."""
Change: TypeAlias = tuple[Collection[int], Collection[int]]
"""Checksums of removed rows, and of added rows."""
NONE: Final[Change] = (), ()
_FORM: Final = struct.Struct(">9Q")


class RowsChecksum(NamedTuple):
    """Seal of a state file: number of transactions, and number and checksum of the rows of each table."""

    generation: int = 0
    """Number of transactions so far."""
    facts: int = 0
    facts_sum: int = 0
    lines: int = 0
    lines_sum: int = 0
    accounts: int = 0
    accounts_sum: int = 0
    table_rows: int = 0
    table_rows_sum: int = 0

    @staticmethod
    def unpack(body: bytes) -> RowsChecksum:
        """Return the seal in a row's body. Raises struct.error."""
        return RowsChecksum(*_FORM.unpack(body))

    def pack(self) -> bytes:
        """Return the body of the seal's row."""
        return _FORM.pack(*self)

    def next(self, *changes: Change) -> RowsChecksum:
        """Return the seal after one more transaction with these changes: facts, lines, accounts, rows of tables."""
        sums = [*self]
        sums[0] += 1
        for place, (former, new) in enumerate(changes):
            if former or new:
                sums[2 * place + 1] += len(new) - len(former)
                sums[2 * place + 2] = sums[2 * place + 2] - sum(former) + sum(new) & SUMS
        return RowsChecksum(*sums)


LIVE: Final = 0x6D656D6F  # "memo", SQLite's application_id of a state file
BACKUP: Final = 0x6D656D62  # "memb": a copy that goes live after a restore
VERSION: Final = 5
"""Version of the tables' layout, SQLite's user_version."""
BUSY_TIMEOUT: Final = 5.0
"""Seconds to wait for another program that has the file open, such as a shell of SQLite."""
PARTS: Final = ("accounts", "table_rows")
"""Tables with many rows of the same columns: part (number of the run, or kind), key, body, checksum."""
PART_COLUMNS: Final = "part, key, body, sum"
LINE_COLUMNS: Final = "id, client, number, received, label, said, text, sum"

_TABLES: Final = """
CREATE TABLE facts (kind INTEGER NOT NULL, key BLOB NOT NULL, body BLOB NOT NULL, sum INTEGER NOT NULL,
                    PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE accounts (part INTEGER NOT NULL, key BLOB NOT NULL, sum INTEGER NOT NULL, body BLOB NOT NULL,
                       PRIMARY KEY (part, key)) WITHOUT ROWID;
CREATE TABLE table_rows (part INTEGER NOT NULL, key BLOB NOT NULL, sum INTEGER NOT NULL, body BLOB NOT NULL,
                      PRIMARY KEY (part, key)) WITHOUT ROWID;
CREATE TABLE lines (id INTEGER PRIMARY KEY, client BLOB NOT NULL, number INTEGER NOT NULL, received REAL NOT NULL,
                    label INTEGER NOT NULL, said REAL NOT NULL, text TEXT NOT NULL, sum INTEGER NOT NULL);
"""
TABLES: Final = frozenset(filter(None, map(str.strip, _TABLES.split(";"))))
"""SQL of the tables as SQLite stores it, to be compared: names of columns may be damaged, too."""
_PUT_FACT: Final = "INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?)"
_HEADER: Final = b"SQLite format 3\x00"


def connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    """Open a connection to an existing database; `mode` is that of SQLite's URI, such as "ro"."""
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def create(path: Path, name: str, at: Callable[[str], None]) -> None:
    """Make an empty state file for the server `name`. Atomic: the file appears whole, or not at all."""
    with draft_file(path, mode=mode_in(path.parent)) as draft:
        connection = sqlite3.connect(draft, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = MEMORY")  # no journal file beside a draft that may be left over
            connection.executescript(_TABLES)
            _stamp(connection, LIVE)
            row = (META, b"name", name.encode())
            check = fact_checksum(*row)
            write_facts(connection, [(*row, check)])
            write_seal(connection, RowsChecksum(facts=1, facts_sum=check))
        finally:
            connection.close()
        at("before create")
    at("after create")


def _stamp(connection: sqlite3.Connection, application: int) -> None:
    connection.execute(f"PRAGMA application_id = {application}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


# ---------------------------------------------------------------------------------------------------- header


def read_head(path: Path) -> bool:
    """Check a state file's header; returns True if the file is a restored backup.

    Raises:
        StateCorrupt: the file has no SQLite header.
        StateForeign: the file is of another program, or of another version of memoire.
    """
    with path.open("rb") as file:
        head = file.read(100)
    if len(head) < 100 or not head.startswith(_HEADER):
        raise corrupt(path, f"it has no SQLite header ({len(head)} bytes read)")
    version, application = struct.unpack(">I", head[60:64])[0], struct.unpack(">I", head[68:72])[0]
    if application not in (LIVE, BACKUP):
        raise StateForeign(
            str(path),
            f"is a database of another program (application id {application:#010x})",
            f"Give the server another folder. If it was a state file and is damaged: {RESTORE}.",
        )
    if version != VERSION:
        raise StateForeign(
            str(path),
            f"was written in form {version}, this version of memoire reads and writes form {VERSION}",
            "Use the version of memoire that wrote it, or give the server an empty folder.",
        )
    return bool(application == BACKUP)


def rename_stale_log(path: Path) -> None:
    """Rename the write-ahead log beside a restored backup: it belongs to the former file, and SQLite would write its
    pages into the backup.
    """
    for ending in ("-wal", "-shm"):
        log = path.with_name(path.name + ending)
        if log.exists():
            log.replace(path.with_name(path.name + ending + ".set-aside"))


# ---------------------------------------------------------------------------------------------------- rows


@contextmanager
def _read(rows: sqlite3.Cursor) -> Iterator[sqlite3.Cursor]:
    """Close the cursor at the end, also after damage: an open one keeps the write-ahead log from being emptied."""
    try:
        yield rows
    finally:
        with suppress(sqlite3.ProgrammingError):  # the whole database was closed
            rows.close()


def read_facts(
    connection: sqlite3.Connection, path: Path, kind: int, prefix: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and bodies of the facts of a kind whose keys begin with `prefix`, checked."""
    query = "SELECT kind, key, body, sum FROM facts WHERE kind = ? AND key >= ? AND key < ?"
    with _read(connection.execute(query, (kind, prefix, prefix + b"\xff" * 260))) as rows:
        for row in rows:
            _, key, body, _ = checked_fact(row, path)
            yield key, body


def read_parts(
    connection: sqlite3.Connection,
    path: Path,
    table: str,
    part: int,
    begin: bytes,
    most: int,
    before: bytes,
    order: str = "key",
) -> Iterator[Packed]:
    """Yield keys and bodies of at most `most` rows of `accounts` or `table_rows`, checked, in the order of keys or
    bodies. The keys are from `begin` on and below `before`; `most` -1 sets no limit.
    """
    query = f"SELECT {PART_COLUMNS} FROM {table} WHERE part = ? AND key >= ? AND key < ? ORDER BY {order} LIMIT ?"  # noqa: S608
    with _read(connection.execute(query, (part, begin, before, most))) as rows:
        for _, key, body, _ in checked_parts(rows, path, table):
            yield key, body


def _all_parts(connection: sqlite3.Connection, path: Path, table: str) -> Iterator[PartRow]:
    with _read(connection.execute(f"SELECT {PART_COLUMNS} FROM {table}")) as rows:  # noqa: S608
        yield from checked_parts(rows, path, table)


def write_facts(connection: sqlite3.Connection, rows: Sequence[FactRow]) -> None:
    """Insert facts, which replace those with the same kinds and keys."""
    if rows:
        connection.executemany(_PUT_FACT, rows)


def write_seal(connection: sqlite3.Connection, seal: RowsChecksum) -> None:
    """Replace the row that holds the seal."""
    body = seal.pack()
    connection.execute(_PUT_FACT, (SEAL, b"", body, fact_checksum(SEAL, b"", body)))


def copy_into(source: sqlite3.Connection, path: Path, target: Path) -> None:
    """Write a backup of the file at `path` to the empty file `target`: all rows of one moment, without log lines.

    Raises:
        StateCorrupt: a row is missing or has a wrong checksum.
    """
    copy = sqlite3.connect(target, isolation_level=None)
    try:
        copy.execute("PRAGMA journal_mode = MEMORY")  # no journal file beside a draft that may be left over
        source.execute("BEGIN")  # a consistent view of all tables
        copy.executescript(_TABLES)
        copy.execute("BEGIN")
        seal, facts = None, 0
        with closing(source.execute("SELECT kind, key, body, sum FROM facts")) as rows:
            for row in rows:
                kind, _, body, _ = checked_fact(row, path)
                if kind == SEAL:
                    seal = RowsChecksum.unpack(body)
                else:
                    write_facts(copy, [row])
                    facts += 1
        written = [
            copy.executemany(
                f"INSERT INTO {table} ({PART_COLUMNS}) VALUES (?, ?, ?, ?)",  # noqa: S608
                _all_parts(source, path, table),
            ).rowcount
            for table in PARTS
        ]
        if seal is None or [seal.facts, seal.accounts, seal.table_rows] != [facts, *written]:
            raise corrupt(path, "rows are missing")
        write_seal(copy, seal._replace(lines=0, lines_sum=0))
        copy.execute("COMMIT")
        _stamp(copy, BACKUP)
    finally:
        copy.close()
        if source.in_transaction:
            source.execute("COMMIT")


MAX_IDLE_READERS: Final = 4
"""Most idle connections that are kept for later reads."""

_T = TypeVar("_T")


class DatabaseReader:
    """Reader of a state file beside its writer. Thread-safe; a long read delays neither the writer nor other reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards the attributes below
        self._idle = [connect(path, "ro")]
        self._closed = self._has_checked_lines = False

    def close(self) -> None:
        """Close the idle connections; those in use are closed at the end of their read."""
        with Held(self._lock):
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def _read(self, read: Callable[[sqlite3.Connection], _T]) -> _T:
        with Held(self._lock):
            if self._closed:
                raise ValueError("the state file is closed")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = connect(self._path, "ro")
        try:
            return read(connection)
        except Exception as error:
            if is_damage(error):
                raise corrupt(self._path, f"SQLite says {error}") from error
            raise
        finally:
            self._give_back(connection)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with Held(self._lock):
            if self._closed or len(self._idle) >= MAX_IDLE_READERS:
                connection.close()
            else:
                self._idle.append(connection)

    def facts(self, kind: int, prefix: bytes = b"") -> list[tuple[bytes, bytes]]:
        """Return keys and bodies of the facts of a kind whose keys begin with `prefix`, in the order of keys."""
        return self._read(lambda connection: list(read_facts(connection, self._path, kind, prefix)))

    def accounts(self, run: int, begin: bytes, most: int, before: bytes = LAST) -> list[Packed]:
        """Return at most `most` accounts of a run, in the order of keys, from `begin` on and below `before`."""
        return self._read(
            lambda connection: list(read_parts(connection, self._path, "accounts", run, begin, most, before))
        )

    def lines(self, where: str, values: list[Any], order: str, most: int) -> list[LogEntry]:
        """Return log lines that fulfil an SQL condition; see `records.condition`."""
        query = f"SELECT {LINE_COLUMNS} FROM lines WHERE {where} ORDER BY id {order} LIMIT ?"  # noqa: S608

        def read(connection: sqlite3.Connection) -> list[LogEntry]:
            with closing(connection.execute(query, [*values, most])) as rows:
                return [entry_of(row, self._path) for row in rows]

        return self._read(read)

    def check_lines(self) -> None:
        """Check the checksum of each log line, at the first call only: else a search might miss a damaged line.

        Raises:
            StateCorrupt: a line is damaged.
        """

        def check(connection: sqlite3.Connection) -> None:
            with closing(connection.execute(f"SELECT {LINE_COLUMNS} FROM lines")) as rows:  # noqa: S608
                for row in rows:
                    entry_of(row, self._path)

        if not self._has_checked_lines:
            self._read(check)
            self._has_checked_lines = True

    def copy_to(self, path: Path) -> None:
        """Write a backup to an empty file: all rows but the log lines.

        Raises:
            StateCorrupt: a row has a wrong checksum; the copy must not replace a good backup.
        """
        self._read(lambda connection: copy_into(connection, self._path, path))


class DatabaseBackups:
    """Backups of a state folder, `state.db.backup-1` and `-2`. Thread-safe: one backup is made at a time.

    Args:
        folder: State folder, which holds the backups.
        reader: Reader of the database.
        generation: Returns the number of transactions so far; a backup is due only after further transactions.
        every: Seconds between two backups.
        at: Called at named points, so that a test may end the process there.
    """

    def __init__(
        self,
        folder: Path,
        reader: DatabaseReader,
        generation: Callable[[], int],
        *,
        every: float,
        at: Callable[[str], None],
    ) -> None:
        self._folder, self._reader, self._generation = folder, reader, generation
        self._every, self._at = every, at
        self._making = threading.Lock()
        self._due = time.monotonic() + every
        self._backed_up = generation()  # transactions at the newest backup, or when the folder was opened
        self.trouble = ""
        """Reason why the newest backup failed; "" if it succeeded."""

    @property
    def is_behind(self) -> bool:
        """True if rows were saved since the newest backup."""
        return self._backed_up != self._generation()

    def begin_due(self) -> None:
        """Start a backup in a separate thread, if it is due and rows were saved since the newest one."""
        now = time.monotonic()
        if not self.is_behind or now < self._due or self._making.locked():
            return
        self._due = now + self._every
        threading.Thread(target=self.attempt, name="memoire-backup", daemon=True).start()

    def attempt(self) -> None:
        """Make a backup; a failure is logged, and kept in `trouble`."""
        try:
            self.make()
        except StateError as error:
            self.trouble = str(error)
            _log.error("%s: no backup was made, the former ones stay: %s", self._folder, error)
        except (OSError, sqlite3.Error, ValueError) as error:
            self.trouble = f"no backup could be made: {error_text(error)}"
            _log.warning("%s: %s", self._folder, self.trouble)

    def make(self) -> Path:
        """Make a backup, `state.db.backup-1`, and return its path; the one before becomes `-2`.

        Raises:
            StateCorrupt: the database has become damaged while it was open: the former backups stay.
        """
        with Held(self._making):
            generation = self._generation()
            first, second = (self._folder / f"state.db.backup-{number}" for number in (1, 2))
            with draft_file(first, mode=mode_in(self._folder)) as draft:
                self._reader.copy_to(draft)
                self._at("before backups")
                if first.exists():
                    first.replace(second)
                self._at("between backups")
            self._at("after backups")
            self._backed_up, self.trouble = generation, ""
            return first
