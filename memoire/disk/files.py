"""What errors of SQLite and of the disk mean to a state folder: they heal, they are damage, or somebody has to act.

Nothing is decided by the text of an error, only by its type and code.

What a state folder needs of its file system: locks that can be trusted, and writes that reach the disk.

The lock of a folder that one process at a time may write, such as a state folder; its file says which.
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

from memoire.errors import StateCorrupt, StateError, StateForeign, StateLocked, StateUnusable
from memoire.replay.files import FileLock, sync

from . import private_files

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


_REMOTE: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gfs2", "ocfs2", "glusterfs"}
_LOCAL_FUSE: Final = {"fuseblk", "fuse.fuse-overlayfs"}
_OURS: Final = (
    "state.db*",
    "committed",
    "lock",
    "*.snapshot",
    "log/*.log",
    "models/*.model",
    "prompts/*.bodies",
    "snapshots/*",
)


def make_folder(folder: Path) -> None:
    """Make a state folder that is not there, and have it on disk.

    Raises:
        StateUnusable: it cannot be made, or something else is there.
    """
    try:
        if not folder.exists():
            private_files.make_folder(folder)
            sync(folder.absolute().parent)
    except OSError as error:
        raise unusable(folder, error) from error
    if not folder.is_dir():
        raise StateUnusable(str(folder), "it is not a folder", "Name a folder, not a file.")


def tighten(folder: Path) -> None:
    """Give files of a former version, which everybody could read, the mode that they are made with today."""
    for pattern in _OURS:
        for path in folder.glob(pattern):
            private_files.tighten(path)


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder and the folders in it."""
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except OSError:
            pass  # it has just gone
    return size


def check_file_system(folder: Path, mounts: str | None = None) -> None:
    """Refuse file systems on which SQLite's write-ahead log is not safe.

    Args:
        folder: The state folder.
        mounts: Content of /proc/self/mountinfo; None reads it (a system without that file allows everything).

    Raises:
        StateUnusable: the folder is on a network or user-space file system.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
    kind, where = _mounted_at(folder.resolve(), mounts)
    if kind in _REMOTE or (kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        raise StateUnusable(
            str(folder),
            f"{where} is a network or user-space file system ({kind}), on which locks and shared memory between "
            f"processes cannot be trusted",
            "Use a local disk or a block volume (in Kubernetes: a ReadWriteOncePod volume).",
        )


def _mounted_at(path: Path, mounts: str) -> tuple[str, str]:
    """Kind and mount point of the file system that a path is on; the last one mounted there counts."""
    kind, where = "", ""
    for line in mounts.splitlines():
        mount, _, facts = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 5 or not facts:
            continue
        point = fields[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= len(where):
            kind, where = facts.split()[0], point
    return kind, where


def lock_folder(folder: Path, what: str = "the state folder", user: str = "server", *, name: str = "lock") -> FileLock:
    """Lock a folder by a file in it. No other process gets it while this one runs.

    Args:
        folder: It is there.
        what: What errors call the folder.
        user: What they call those of which only one may write it.
        name: Of the file; several of a folder lock a part of it each.

    Raises:
        StateLocked: another process has it.
        StateUnusable: the file cannot be written or locked.
        StateForeign: the path of the lock file holds something else, such as another program's file.
    """
    return FileLock(
        folder / name,
        held=lambda holder: StateLocked(str(folder), holder.pid, holder.host, what, user),
        foreign=lambda what: _no_lock(folder / name, what),
        unusable=lambda error: _unusable(folder, error),
        opening=lambda path: _opened(folder, path),
    )


def _opened(folder: Path, path: Path) -> int:
    try:
        return private_files.append(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _no_lock(path, "a symbolic link") from error
        raise unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> StateUnusable:
    if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        return StateUnusable(str(folder), f"it cannot be locked ({error.strerror})", "Use a local disk.")
    return unusable(folder, error)


def _no_lock(path: Path, what: str) -> StateForeign:
    return StateForeign(
        str(path),
        f"is {what}, not the lock of a folder of memoire",
        "Name a folder of its own, or remove that if nobody needs it.",
    )
