"""The lock of a folder that one process at a time may write, such as a state folder; its file says which."""

from __future__ import annotations

import errno
from pathlib import Path

from memoire.errors import StateForeign, StateLocked, StateUnusable
from memoire.replay.file_lock import FileLock

from . import private_files
from .disk_errors import unusable


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
