"""The database of a state folder, in SQLite: its tables, its head, and its rows as they are read and written.

SQLite keeps transactions whole, but it believes what it reads: a flipped bit in a page is served as good. So each row
carries a checksum (`records`), and one row seals all (`seal`). A row that is missing, stale or changed is found when
the file is opened, and the file is refused.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

from memoire.accounting.kept_accounts import Packed
from memoire.errors import StateForeign
from memoire.replay.replacement import drafting

from . import private_files
from .disk_errors import RESTORE, corrupt
from .records import META, SEAL, FactRow, PartRow, add_up, checked_fact, checked_parts
from .seal import RowsChecksum

LIVE: Final = 0x6D656D6F  # "memo", SQLite's application_id of a state file
BACKUP: Final = 0x6D656D62  # "memb": a copy that becomes live when somebody puts it back
VERSION: Final = 4
"""Of the tables, as SQLite's user_version."""
BUSY_TIMEOUT: Final = 5.0
"""Seconds to wait for another program that has the file open, such as a shell of SQLite."""
PARTS: Final = ("accounts", "prompts")
"""Tables whose rows are many and alike: number of the run, or kind; key, body, checksum."""
PART_COLUMNS: Final = "part, key, body, sum"
LINE_COLUMNS: Final = "id, client, number, received, label, said, text, sum"

_TABLES: Final = """
CREATE TABLE facts (kind INTEGER NOT NULL, key BLOB NOT NULL, body BLOB NOT NULL, sum INTEGER NOT NULL,
                    PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE accounts (part INTEGER NOT NULL, key BLOB NOT NULL, sum INTEGER NOT NULL, body BLOB NOT NULL,
                       PRIMARY KEY (part, key)) WITHOUT ROWID;
CREATE TABLE prompts (part INTEGER NOT NULL, key BLOB NOT NULL, sum INTEGER NOT NULL, body BLOB NOT NULL,
                      PRIMARY KEY (part, key)) WITHOUT ROWID;
CREATE TABLE lines (id INTEGER PRIMARY KEY, client BLOB NOT NULL, number INTEGER NOT NULL, received REAL NOT NULL,
                    label INTEGER NOT NULL, said REAL NOT NULL, text TEXT NOT NULL, sum INTEGER NOT NULL);
"""
TABLES: Final = frozenset(filter(None, map(str.strip, _TABLES.split(";"))))
"""The tables as SQLite describes them: a name of a column there may be damaged, too."""
_PUT_FACT: Final = "INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?)"
_HEADER: Final = b"SQLite format 3\x00"


def connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    """A connection to a file that is there; `mode` is SQLite's."""
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
    """Make an empty state file of the server of this name: it appears whole or not at all."""
    with drafting(path, mode=private_files.mode_in(path.parent)) as draft:
        connection = sqlite3.connect(draft, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = MEMORY")  # no file beside a draft that may be abandoned
            connection.executescript(_TABLES)
            _stamp(connection, LIVE)
            row = (META, b"name", name.encode())
            check = add_up(*row)
            write_facts(connection, [(*row, check)])
            write_seal(connection, RowsChecksum(facts=1, facts_sum=check))
        finally:
            connection.close()
        at("before create")
    at("after create")


def _stamp(connection: sqlite3.Connection, application: int) -> None:
    connection.execute(f"PRAGMA application_id = {application}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


# ---------------------------------------------------------------------------------------------------- the head


def read_head(path: Path) -> bool:
    """Whether the file is a backup that was put back.

    Raises:
        StateCorrupt, StateForeign: it is no file of this version of memoire.
    """
    with path.open("rb") as file:
        head = file.read(100)
    if len(head) < 100 or not head.startswith(_HEADER):
        raise corrupt(path, f"it does not begin as an SQLite file does ({len(head)} bytes read)")
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


def set_aside(path: Path) -> None:
    """A write-ahead log beside a backup that was put back belongs to the file that was there before: SQLite would
    write its pages into the backup.
    """
    for ending in ("-wal", "-shm"):
        beside = path.with_name(path.name + ending)
        if beside.exists():
            beside.replace(path.with_name(path.name + ending + ".set-aside"))


# ---------------------------------------------------------------------------------------------------- rows


@contextmanager
def _read(rows: sqlite3.Cursor) -> Iterator[sqlite3.Cursor]:
    """Rows that are closed also after damage: what is still being read holds up the emptying of the write-ahead log."""
    try:
        yield rows
    finally:
        with suppress(sqlite3.ProgrammingError):  # the whole database was closed
            rows.close()


def read_facts(
    connection: sqlite3.Connection, path: Path, kind: int, prefix: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """Keys and bodies of a kind whose key begins so, checked."""
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
    """Keys and bodies of at most so many rows of `accounts` or `prompts`, checked, in the order of their keys or
    bodies: those whose key is `begin` or above it, and below `before`.
    """
    query = f"SELECT {PART_COLUMNS} FROM {table} WHERE part = ? AND key >= ? AND key < ? ORDER BY {order} LIMIT ?"  # noqa: S608
    with _read(connection.execute(query, (part, begin, before, most))) as rows:
        for _, key, body, _ in checked_parts(rows, path, table):
            yield key, body


def _all_parts(connection: sqlite3.Connection, path: Path, table: str) -> Iterator[PartRow]:
    with _read(connection.execute(f"SELECT {PART_COLUMNS} FROM {table}")) as rows:  # noqa: S608
        yield from checked_parts(rows, path, table)


def write_facts(connection: sqlite3.Connection, rows: Sequence[FactRow]) -> None:
    """Put these rows in, in the place of those with their kinds and keys."""
    if rows:
        connection.executemany(_PUT_FACT, rows)


def write_seal(connection: sqlite3.Connection, seal: RowsChecksum) -> None:
    """Put this seal in the place of the former one."""
    body = seal.pack()
    connection.execute(_PUT_FACT, (SEAL, b"", body, add_up(SEAL, b"", body)))


def copy_into(source: sqlite3.Connection, path: Path, target: Path) -> None:
    """Write a backup of the file at `path` to the empty file `target`: all rows of one moment but the lines.

    Raises:
        StateCorrupt: a row is missing or has a wrong checksum.
    """
    copy = sqlite3.connect(target, isolation_level=None)
    try:
        copy.execute("PRAGMA journal_mode = MEMORY")  # no file beside a draft that may be abandoned
        source.execute("BEGIN")  # all of it of one moment
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
        if seal is None or [seal.facts, seal.accounts, seal.prompts] != [facts, *written]:
            raise corrupt(path, "rows are missing")
        write_seal(copy, seal.without_lines())
        copy.execute("COMMIT")
        _stamp(copy, BACKUP)
    finally:
        copy.close()
        if source.in_transaction:
            source.execute("COMMIT")
