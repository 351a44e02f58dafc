"""What errors of SQLite and of the disk mean to a state folder: they heal, they are damage, or somebody has to act.

Nothing is decided by the text of an error, only by its type and code.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from memoire.errors import StateCorrupt, StateError, StateUnusable

RESTORE: Final = (
    "Put a backup back (the newest is state.db.backup-1): stop the server, move state.db away, remove state.db-wal and "
    "state.db-shm, copy the backup to state.db, and start; clients that are still running bring their totals up to "
    "date by themselves. Or give the server an empty folder: it then counts only what its running clients report, and "
    "former runs, models and log lines are not there"
)


def corrupt(path: Path, damage: str) -> StateCorrupt:
    """The error that says what is damaged and how to put a backup back."""
    return StateCorrupt(str(path), damage, f"{RESTORE}.")


@contextmanager
def as_saved(path: Path) -> Iterator[None]:
    """Within it, a value that memoire cannot have saved is damage: StateCorrupt."""
    try:
        yield
    except Exception as error:
        if is_damage(error) or isinstance(error, RecursionError):
            raise corrupt(path, f"a row says what none can: {error}") from error
        raise


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


HEALING: Final = {
    errno.ENOSPC: ("disk is full", "Make room there"),
    errno.EDQUOT: ("disk quota is used up", "Make room there, or raise the quota"),
    errno.EROFS: ("file system is read-only", "Mount it writable"),
}
"""Errors that end when somebody acts: what is wrong, and what to do."""
_VAGUE: Final = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in ("FULL", "IOERR_WRITE", "IOERR_TRUNCATE", "IOERR_SHMOPEN", "IOERR_SHMSIZE", "IOERR_SHMMAP", "CANTOPEN")
)


def healing(folder: Path, error: Exception) -> tuple[str, str] | None:
    """What is wrong with the disk and what to do, if saving may go on after that; None for any other error.

    SQLite does not say what the system said. A file is written to find that out. An error of a sync is never forgiven.
    """
    if isinstance(error, OSError):
        return HEALING.get(error.errno or 0)
    code = getattr(error, "sqlite_errorcode", 0)
    if code not in _VAGUE and code & 255 != sqlite3.SQLITE_READONLY:
        return None
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as found:
        return HEALING.get(found.errno or 0)
    return HEALING[errno.ENOSPC] if code == sqlite3.SQLITE_FULL else None


def words(error: BaseException) -> str:
    """The error's text, with SQLite's name for it."""
    name = getattr(error, "sqlite_errorname", "")
    return f"{error} ({name})" if name else str(error)


def translated(error: sqlite3.Error, folder: Path, path: Path) -> StateError:
    """The state error of a database that cannot be opened."""
    code = getattr(error, "sqlite_errorcode", 0) & 255
    if (trouble := healing(folder, error)) is not None:
        return _hindered(folder, trouble)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StateUnusable(str(folder), words(error), "Make it writable for this user.")
    if is_busy(error):
        return StateUnusable(str(folder), "another program has state.db open", "Close it, and start again.")
    if code == sqlite3.SQLITE_IOERR:
        return StateUnusable(str(folder), words(error), "Check the disk.")
    return corrupt(path, f"SQLite says {words(error)}")


def unusable(folder: Path, error: OSError) -> StateUnusable:
    """The state error of a folder that cannot be read or written."""
    advice = {
        errno.EACCES: f"User {os.getuid()} may not write it: change its owner or mode.",
        errno.EPERM: f"User {os.getuid()} may not write it: change its owner or mode.",
        errno.ENOENT: "Make its parent folder first.",
        errno.ENOTDIR: "Name a folder, not a file.",
    }
    if (trouble := healing(folder, error)) is not None:
        return _hindered(folder, trouble)
    return StateUnusable(str(folder), error.strerror or str(error), advice.get(error.errno or 0, "Check the disk."))


def _hindered(folder: Path, trouble: tuple[str, str]) -> StateUnusable:
    what, advice = trouble
    return StateUnusable(str(folder), f"its {what}", f"{advice}, and start again: nothing is lost.")
