"""The disk of every host: it may be full or broken, and what is on it after a kill or a power failure.

A killed process leaves all that it has written. A power failure leaves what was synced, and any part of the rest. A
transaction that was about to be on disk is there, not there, or torn: SQLite has synced its log when COMMIT returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Any

from .world import Process, World


class Database(sqlite3.Connection):
    """A database on the disk of a process, which may be full, break or lose its power when a transaction ends."""

    process: Process
    disk: Disk
    path: Path

    def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
        """As the real one, unless it is about to be on disk."""
        if statement == "COMMIT" and self.process.disk:
            if self.process.disk == "power" and self.process.is_alive:
                self.disk.fail(self)
            raise failed(self.process.disk)
        return super().execute(statement, *given)

    def commit_anyway(self) -> None:
        """End the transaction, whatever the disk is like."""
        super().execute("COMMIT")


def failed(disk: str) -> sqlite3.OperationalError:
    """SQLite's error of a disk that is full, or fails in the middle of a sync."""
    error = sqlite3.OperationalError("database or disk is full" if disk == "full" else "disk I/O error")
    name = "SQLITE_FULL" if disk == "full" else "SQLITE_IOERR_FSYNC"
    error.sqlite_errorname, error.sqlite_errorcode = name, getattr(sqlite3, name)
    return error


class Disk:
    """What every process has open, and how much of each file was synced."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[Process, list[Database]] = {}
        self._synced: dict[tuple[int, int], int] = {}
        """Bytes of a file, by device and number."""
        self._torn: dict[Path, bytes] = {}
        """What a failure in the middle of a transaction leaves of SQLite's log."""
        self._connect, self._lock = sqlite3.connect, fcntl.flock

    # In the place of the system's calls

    def connect(self, *given: Any, **named: Any) -> Database:
        made: Database = self._connect(*given, **{**named, "check_same_thread": False, "factory": Database})
        made.process, made.disk, process = self._world.process, self, self._world.process
        made.path = Path(os.path.relpath(made.execute("PRAGMA database_list").fetchone()[2] or "."))
        if process not in self._open:
            self._open[process] = []
            process.at_kill.append(lambda: self._killed(process))
        self._open[process].append(made)
        return made

    def lock(self, opened: int, how: int) -> None:
        self._lock(opened, how)
        if how & fcntl.LOCK_EX:
            found = os.fstat(opened)
            self._world.process.at_kill.append(lambda: _forget(opened, found))

    def sync(self, opened: int) -> None:
        """As os.fsync, in no time."""
        found = os.fstat(opened)
        self._synced[found.st_dev, found.st_ino] = found.st_size

    # Ends

    def fail(self, database: Database) -> None:
        """The power fails while a transaction is written: some of it is on disk, and nobody hears of it. Never returns."""
        log = _log_of(database.path)
        before = log.read_bytes() if log.exists() else b""
        database.commit_anyway()
        after = log.read_bytes() if log.exists() else b""
        begin = len(before) if after.startswith(before) else 0  # begun again from its beginning, it is written over
        cut = self._world.rng.randrange(begin, len(after) + 1)
        self._torn[log] = after[:cut] + before[cut:]
        assert database.process.on_failure is not None
        database.process.on_failure()
        while True:
            self._world.leave()

    def _killed(self, process: Process) -> None:
        databases = self._open.pop(process)
        paths = sorted({each.path for each in databases})
        files = [file for path in paths for file in (path, _log_of(path)) if file.is_file()]
        held = {file: file.read_bytes() for file in files} | self._torn
        self._torn = {}
        for each in databases:
            each.close()
        for file, content in held.items():  # whoever closes in order tidies up, which a killed process does not
            file.write_bytes(content)
        if process.disk == "power":
            for folder in sorted({path.parent for path in paths}):
                self._lose(folder, held.keys())

    def _lose(self, folder: Path, databases: Any) -> None:
        """Of what was not synced, some is lost; and the last sector of the rest may be empty."""
        rng = self._world.rng
        for file in sorted(folder.rglob("*")):
            if file in databases or not file.is_file() or file.name.endswith("-shm"):
                continue
            found = file.stat()
            synced = self._synced.get((found.st_dev, found.st_ino), 0)
            if found.st_size > synced:
                left = rng.randrange(synced, found.st_size + 1)
                os.truncate(file, left)
                if rng.random() < 0.3:
                    with open(file, "r+b") as opened:
                        opened.seek(max(synced, left - 512))
                        opened.write(bytes(left - opened.tell()))


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _forget(opened: int, locked: os.stat_result) -> None:
    """Let go of a lock, and keep the number: whoever has it may still close it. It may be another file's by now."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(opened), locked):
            os.dup2(nothing, opened)
    os.close(nothing)
