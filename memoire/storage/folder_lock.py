"""The lock of a state folder: one process at a time has it, and the file says which."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from pathlib import Path

from memoire.errors import StateForeign, StateLocked, StateUnusable

from . import private_files
from .disk_errors import unusable

_BEGIN = b'{"pid": '
"""How what a lock says begins."""


class FolderLock:
    """A lock on a folder, held by its lock file. No other process gets it while this one runs.

    Raises:
        StateLocked: another process has it.
        StateUnusable: the file cannot be written or locked.
        StateForeign: the path of the lock file holds something else, such as another program's file.
    """

    def __init__(self, folder: Path) -> None:
        self.opened = _lock(folder)
        """File descriptor; -1 when it was let go."""

    def release(self) -> None:
        """Let others have it, at once: a child forked this moment has not yet closed its own descriptor."""
        fcntl.flock(self.opened, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the descriptor. In a forked child: the parent keeps the lock."""
        if self.opened >= 0:
            os.close(self.opened)
        self.opened = -1


def _lock(folder: Path) -> int:
    try:
        opened = private_files.append(folder / "lock")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _no_lock(folder, "a symbolic link") from error
        raise unusable(folder, error) from error
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StateLocked(str(folder), *_holder(opened)) from error
    except OSError as error:
        raise StateUnusable(str(folder), f"it cannot be locked ({error.strerror})", "Use a local disk.") from error
    _check_lock(folder, opened)
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    try:
        os.ftruncate(opened, 0)
        os.write(opened, holder)
    except OSError as error:
        os.close(opened)
        raise unusable(folder, error) from error
    return opened


def _check_lock(folder: Path, opened: int) -> None:
    """Refuse a file that is no lock of a former life: what is in it would be overwritten."""
    facts = os.fstat(opened)
    if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and _is_ours(os.pread(opened, 4096, 0)):
        return
    os.close(opened)
    raise _no_lock(folder, "another program's file")


def _is_ours(content: bytes) -> bool:
    """Whether a lock says this, whole or as a power failure leaves it: it is not synced, so cut off or with zeros."""
    said = content.rstrip(b"\0")[: len(_BEGIN)]
    return _BEGIN.startswith(said)


def _no_lock(folder: Path, what: str) -> StateForeign:
    return StateForeign(
        str(folder / "lock"),
        f"is {what}, not the lock of a state folder",
        "Give the server a folder of its own, or remove that if nobody needs it.",
    )


def _holder(opened: int) -> tuple[int, str]:
    """Who holds the lock; closes it."""
    try:
        return _held_by(opened)
    finally:
        os.close(opened)


def _held_by(opened: int) -> tuple[int, str]:
    try:
        facts = json.loads(os.pread(opened, 4096, 0))
        return int(facts["pid"]), str(facts["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""
