"""Prompts of a server on disk, in a database of their own beside state.db: answers are large, and come and go.

    prompts.db    rows   owner, kind, key, body, sum     a row for each prompt, payload, answer and step of each table
                  seal   rows, sum                       how many rows there are and what their checksums add up to

`Store.save` writes the changes of one group in one transaction, synced, before the replies of the group may leave. A
row that is missing, stale or changed is found when the file is opened, and the file is refused.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from memoire.errors import StateCorrupt, StateForeign
from memoire.wire import _bytes

from . import private_files
from .database import connect
from .disk_errors import is_damage, translated
from .file_system import sync

NAME: Final = "prompts.db"
_APPLICATION: Final = 0x6D656D70  # "memp"
_VERSION: Final = 1
_PART: Final = (1 << 31) - 1  # bits of a checksum that the seal adds up
_SUMS: Final = (1 << 62) - 1
_TABLES: Final = """
CREATE TABLE rows (owner TEXT NOT NULL, kind INTEGER NOT NULL, key BLOB NOT NULL, body BLOB NOT NULL,
                   sum INTEGER NOT NULL, PRIMARY KEY (owner, kind, key)) WITHOUT ROWID;
CREATE TABLE seal (id INTEGER PRIMARY KEY CHECK (id = 1), rows INTEGER NOT NULL, sum INTEGER NOT NULL);
INSERT INTO seal VALUES (1, 0, 0);
"""
_ADVICE: Final = (
    "Move prompts.db, prompts.db-wal and prompts.db-shm away and start again: the table is empty then. Add its prompts "
    "again, or restore a snapshot"
)
Change = tuple[int, bytes, bytes | None]


class PromptFile:
    """The database of prompts of one state folder, which is locked. It is made when the first prompt is saved.

    Args:
        folder: The state folder.

    Raises:
        StateForeign, StateCorrupt: the file is of another program or version, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._connection: sqlite3.Connection | None = None
        if self.path.exists():
            try:
                self._open()
            except sqlite3.Error as error:
                self.close()
                if is_damage(error):
                    raise self._corrupt(f"SQLite says {error}") from error
                raise translated(error, folder, self.path) from error
            except BaseException:
                self.close()
                raise

    def _create(self) -> None:
        made = self.path.with_name(f"{NAME}.new")
        os.close(private_files.replace(made))
        connection = sqlite3.connect(made, isolation_level=None)
        try:
            connection.executescript(_TABLES)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        finally:
            connection.close()
        sync(made)
        made.rename(self.path)
        sync(self.path.parent)
        self._open()

    def _open(self) -> None:
        self._connection = connection = connect(self.path)
        application, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if application != _APPLICATION or version != _VERSION:
            reason = f"is of another program or version (application {application:#x}, form {version})"
            raise StateForeign(str(self.path), reason, "Use the version of memoire that wrote it.")
        damage = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
        if damage != ["ok"]:
            raise self._corrupt("; ".join(damage))
        found = connection.execute("SELECT count(*), coalesce(sum(sum & 2147483647), 0) FROM rows").fetchone()
        sealed = connection.execute("SELECT rows, sum FROM seal").fetchone()
        if sealed is None or (found[0], int(found[1]) & _SUMS) != tuple(sealed):
            raise self._corrupt("rows are missing, or older than others")
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 67108864")

    def _corrupt(self, damage: str) -> StateCorrupt:
        return StateCorrupt(str(self.path), damage, f"{_ADVICE}.")

    def rows(self, owner: str) -> Iterator[tuple[int, bytes, bytes]]:
        """Kind, key and body of all that is saved of a table.

        Raises:
            StateCorrupt: a row is damaged.
        """
        if self._connection is None:
            return
        for kind, key, body, check in self._connection.execute(
            "SELECT kind, key, body, sum FROM rows WHERE owner = ? ORDER BY kind, key", (owner,)
        ):
            if not isinstance(key, bytes) or not isinstance(body, bytes) or check != _sum(owner, kind, key, body):
                raise self._corrupt(f"a row of table {owner!r} has a wrong checksum")
            yield kind, key, body

    def save(self, changes: Mapping[str, Sequence[Change]]) -> None:
        """Have changes of tables on disk, in one transaction, when this returns.

        Raises:
            sqlite3.Error, OSError: nothing of it was saved.
        """
        if self._connection is None:
            self._create()
        connection = self._connection
        assert connection is not None
        connection.execute("BEGIN IMMEDIATE")
        try:
            rows, total = connection.execute("SELECT rows, sum FROM seal").fetchone()
            for owner, each in changes.items():
                for kind, key, body in each:
                    added, summed = self._put(connection, owner, kind, key, body)
                    rows, total = rows + added, (total + summed) & _SUMS
            connection.execute("UPDATE seal SET rows = ?, sum = ?", (rows, total))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _put(
        self, connection: sqlite3.Connection, owner: str, kind: int, key: bytes, body: bytes | None
    ) -> tuple[int, int]:
        """Write a row, or take it out; what that adds to the rows and to their sum."""
        name = owner, kind, key
        former = connection.execute("SELECT sum FROM rows WHERE owner = ? AND kind = ? AND key = ?", name).fetchone()
        less = 0 if former is None else former[0] & _PART
        if body is None:
            connection.execute("DELETE FROM rows WHERE owner = ? AND kind = ? AND key = ?", name)
            return -(former is not None), -less
        check = _sum(owner, kind, key, body)
        connection.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?)", (*name, body, check))
        return int(former is None), (check & _PART) - less

    def close(self) -> None:
        """Let go of the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _sum(owner: str, kind: int, key: bytes, body: bytes) -> int:
    """Checksum of a row, in 62 bits."""
    return _bytes.checksum(b"%b %d %d %b%b" % (owner.encode(), kind, len(key), key, body)) >> 2
