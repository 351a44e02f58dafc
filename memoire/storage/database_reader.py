"""Reads of a state file beside its writer, from any thread: each on a connection of its own."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeVar

from memoire._core import Held
from memoire.accounting.kept_accounts import Packed
from memoire.accounting.logbook import LogEntry

from .database import LINE_COLUMNS, connect, copy_into, read_facts, read_parts
from .disk_errors import corrupt, is_damage
from .records import LAST, entry_of

MAX_IDLE_READERS: Final = 4
"""Connections that are kept for the next one who reads."""

_T = TypeVar("_T")


class DatabaseReader:
    """Reads a state file beside its writer. Thread-safe; a long read holds nobody up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards what follows
        self._idle = [connect(path, "ro")]
        self._closed = self._has_checked_lines = False

    def close(self) -> None:
        """Let go of the file; connections that read now are closed when they have done so."""
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
        """Keys and bodies of a kind, in the order of their keys."""
        return self._read(lambda connection: list(read_facts(connection, self._path, kind, prefix)))

    def accounts(self, run: int, begin: bytes, most: int, before: bytes = LAST) -> list[Packed]:
        """At most so many accounts of a run, ascending, from this key on and below `before`."""
        return self._read(
            lambda connection: list(read_parts(connection, self._path, "accounts", run, begin, most, before))
        )

    def lines(self, where: str, values: list[Any], order: str, most: int) -> list[LogEntry]:
        """Log lines that fulfil a condition; see `search.condition`."""
        query = f"SELECT {LINE_COLUMNS} FROM lines WHERE {where} ORDER BY id {order} LIMIT ?"  # noqa: S608

        def read(connection: sqlite3.Connection) -> list[LogEntry]:
            with closing(connection.execute(query, [*values, most])) as rows:
                return [entry_of(row, self._path) for row in rows]

        return self._read(read)

    def check_lines(self) -> None:
        """Check each log line, the first time: a search for what a damaged line has no more would leave it out.

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
        """Write a backup to this empty file: all rows but the lines.

        Raises:
            StateCorrupt: a row has a wrong checksum, so that this copy must not take the place of a good one.
        """
        self._read(lambda connection: copy_into(connection, self._path, path))
