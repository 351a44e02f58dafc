"""A lock that one holder has at a time: a process, or a part of one. Its file says which.

A lock is on an open file (`flock`), so that two parts of a process exclude each other too, and it is free as soon as
its process has ended, however that was. A forked process has a copy of the open file, which it closes at once: it holds
nothing, and cannot keep the lock of a parent that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

_LONGEST: Final = 4096
_BEGIN: Final = b'{"pid": '
"""How what a lock says begins."""


class Holder(NamedTuple):
    """Process that has a lock."""

    pid: int
    """0 if the file does not say."""
    host: str
    role: str

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        is_here = (self.pid, self.host) == (os.getpid(), os.uname().nodename)
        return "this process" if is_here else f"process {self.pid} on host {self.host!r}"


class FileLock:
    """The lock of a file, which stays where it is.

    Args:
        path: Of the lock file.
        held: Makes the error to raise if another one has it.
        foreign: Makes the error to raise if something else is there, of what that is.
        unusable: Makes the error to raise if the file cannot be locked or written.
        opening: Opens the file to read and write, and makes it where it is not there.
        role: What the holder is, for others to read.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        held: Callable[[Holder], Exception],
        foreign: Callable[[str], Exception],
        unusable: Callable[[OSError], Exception] = lambda error: error,
        opening: Callable[[Path], int] | None = None,
        role: str = "",
    ) -> None:
        self.path = path
        self.opened = (_open if opening is None else opening)(path)
        """File descriptor; -1 when it was let go."""
        try:
            self._take(held, foreign, unusable, role)
        except BaseException:
            self.close()
            raise
        _locks.add(self)

    def _take(
        self,
        held: Callable[[Holder], Exception],
        foreign: Callable[[str], Exception],
        unusable: Callable[[OSError], Exception],
        role: str,
    ) -> None:
        try:
            _lock(self.opened)
        except BlockingIOError as error:
            raise held(_holder(self.opened)) from error
        except OSError as error:
            raise unusable(error) from error
        if not _is_lock(self.opened):
            raise foreign("another program's file")
        facts = {"pid": os.getpid(), "host": os.uname().nodename} | ({"role": role} if role else {})
        try:
            os.ftruncate(self.opened, 0)
            os.pwrite(self.opened, json.dumps(facts).encode(), 0)
        except OSError as error:
            raise unusable(error) from error

    def release(self) -> None:
        """Let others have it, at once: a child forked this moment has not yet closed its own descriptor."""
        if self.opened >= 0:
            fcntl.flock(self.opened, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the descriptor. In a forked child: the parent keeps the lock."""
        if self.opened >= 0:
            os.close(self.opened)
        self.opened = -1


def _lock(opened: int) -> None:
    """Lock it. Raises BlockingIOError if another one has it, and not if one only looks whether it is locked."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)


def holder(path: Path) -> Holder | None:
    """The holder of the lock of this file, which is left as it is; None if it is free."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(opened)
    finally:
        os.close(opened)
    return None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _is_lock(opened: int) -> bool:
    """Whether this is a lock file, of this or a former process: the content of any other file would be overwritten."""
    facts = os.fstat(opened)
    return stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and _is_ours(os.pread(opened, _LONGEST, 0))


def _is_ours(content: bytes) -> bool:
    """Whether a lock says this, whole or as a power failure leaves it: it is not synced, so cut off or with zeros."""
    said = content.rstrip(b"\0")[: len(_BEGIN)]
    return _BEGIN.startswith(said)


def _holder(opened: int) -> Holder:
    facts: Any = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads(os.pread(opened, _LONGEST, 0))
        return Holder(int(facts["pid"]), str(facts["host"]), str(facts.get("role", "")))
    return Holder(0, "", "")


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _after_in_child() -> None:
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_after_in_child)
