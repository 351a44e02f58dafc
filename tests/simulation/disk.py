"""Disks of hosts, with faults: full or broken disks, kills and power failures.

A killed process leaves everything that it wrote. A power failure leaves the synced bytes and any part of the rest. The
transaction of that moment is on disk, not on disk, or torn: SQLite has synced its log when COMMIT returns.
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
    """A database on the disk of a process. At the end of a transaction the disk may be full, break or lose power."""

    process: Process
    disk: Disk
    path: Path

    def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
        """Execute a statement; a COMMIT on a faulty disk fails."""
        if statement == "COMMIT" and self.process.disk:
            if self.process.disk == "power" and self.process.is_alive:
                self.disk.fail(self)
            raise failed(self.process.disk)
        return super().execute(statement, *args)

    def commit_anyway(self) -> None:
        """End the transaction in spite of the disk's fault."""
        super().execute("COMMIT")


def failed(disk: str) -> sqlite3.OperationalError:
    """Return SQLite's error for a full disk or for a failed sync."""
    error = sqlite3.OperationalError("database or disk is full" if disk == "full" else "disk I/O error")
    name = "SQLITE_FULL" if disk == "full" else "SQLITE_IOERR_FSYNC"
    error.sqlite_errorname, error.sqlite_errorcode = name, getattr(sqlite3, name)
    return error


class Disk:
    """Open databases of every process, and the synced bytes of each file."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[Process, list[Database]] = {}
        self._synced: dict[tuple[int, int], int] = {}  # bytes of a file, by device and inode
        self._torn: dict[Path, bytes] = {}
        """SQLite's log after a failure in the middle of a transaction."""
        self._connect, self._lock = sqlite3.connect, fcntl.flock

    def connect(self, *args: Any, **named: Any) -> Database:
        database: Database = self._connect(*args, **{**named, "check_same_thread": False, "factory": Database})
        database.process, database.disk, process = self._world.process, self, self._world.process
        database.path = Path(os.path.relpath(database.execute("PRAGMA database_list").fetchone()[2] or "."))
        if process not in self._open:
            self._open[process] = []
            process.at_kill.append(lambda: self._killed(process))
        self._open[process].append(database)
        return database

    def lock(self, opened: int, how: int) -> None:
        self._lock(opened, how)
        if how & fcntl.LOCK_EX:
            status = os.fstat(opened)
            self._world.process.at_kill.append(lambda: _forget(opened, status))

    def sync(self, opened: int) -> None:
        """Record the file's size as synced; os.fsync without its time."""
        status = os.fstat(opened)
        self._synced[status.st_dev, status.st_ino] = status.st_size

    def fail(self, database: Database) -> None:
        """Fail the power while a transaction is written: a part of it is on disk. Never returns."""
        log = _log_of(database.path)
        before = log.read_bytes() if log.exists() else b""
        database.commit_anyway()
        after = log.read_bytes() if log.exists() else b""
        begin = len(before) if after.startswith(before) else 0  # a log that restarts is overwritten
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
        for file, content in held.items():  # closing removes files, which a killed process does not do
            file.write_bytes(content)
        if process.disk == "power":
            for folder in sorted({path.parent for path in paths}):
                self._lose(folder, held.keys())

    def _lose(self, folder: Path, databases: Any) -> None:
        """Remove some of the unsynced bytes, and perhaps zero the last sector of the rest."""
        rng = self._world.rng
        for file in sorted(folder.rglob("*")):
            if file in databases or not file.is_file() or file.name.endswith("-shm"):
                continue
            status = file.stat()
            synced = self._synced.get((status.st_dev, status.st_ino), 0)
            if status.st_size > synced:
                left = rng.randrange(synced, status.st_size + 1)
                os.truncate(file, left)
                if rng.random() < 0.3:
                    with open(file, "r+b") as opened:
                        opened.seek(max(synced, left - 512))
                        opened.write(bytes(left - opened.tell()))


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _forget(opened: int, locked: os.stat_result) -> None:
    """Release a lock, but keep the file descriptor's number valid for a later close. The number may belong to another
    file by now.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(opened), locked):
            os.dup2(nothing, opened)
    os.close(nothing)
