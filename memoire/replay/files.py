"""Safe replacement of files through drafts, and lock files.

    with replacing("agent.npz") as file:
        file.write(content)

A draft beside the file replaces it once the draft is complete and on disk. The path names the former file until the
block ends without an error, and the complete new file from then on. The path is safe after a power failure, with a full
disk, and for several processes that replace the same file at the same time: the last one stays.

A lock has one holder at a time, a process or a part of one, and its file names the holder.

The lock is on an open file (`flock`), so that two parts of a process exclude each other too. The lock is free as soon
as its process has ended, for whatever reason. A forked process closes its copy of the open file at once, so that it
neither holds the lock nor keeps that of a parent that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import secrets
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

from memoire.errors import ForkedError, ParameterError

Fault = Callable[[str], None]
"""Function called before each step with its name: "write", "sync", "replace" or "sync folder". In tests, exceptions of
this function act like errors of the disk."""
_DRAFT_END: Final = re.compile(r"\.[0-9a-f]{32}\.draft$")
_STEM_BYTES: Final = 200  # names have at most 255 bytes, and a draft's has a suffix
_BUFFER_BYTES: Final = 1 << 20


def no_fault(step: str) -> None:
    """Fault injection that never fails."""


@contextlib.contextmanager
def replacing(path: str | Path, *, mode: int | None = None, at: Fault = no_fault) -> Iterator[BinaryIO]:
    """Open a draft for writing bytes; it replaces `path` when the block ends, and is then on disk.

    After an error the former file is unchanged and the draft is removed. The next replacement of the file removes
    drafts of killed processes. If the path is a link, its target is replaced.

    Args:
        path: The file, in an existing folder.
        mode: Mode of a new file, such as 0o600; None follows the umask. An existing file keeps its mode.
        at: Function called before each step, so that a test can make it fail.

    Raises:
        OSError: the file cannot be written.
        ParameterError: the path is a folder, or otherwise not a regular file.
        ForkedError: a child that was forked within the block has written to the draft; its data are not written.
    """
    target = Path(os.path.realpath(path))
    mode = _mode_of(target, mode)
    remove_abandoned(target)
    opened, draft = _make_draft(target, mode)
    raw = OwnedFile(opened, f"the draft of {target}", at)
    raw.path = draft
    file = io.BufferedWriter(raw, _BUFFER_BYTES)
    try:
        yield cast("BinaryIO", file)
        file.flush()
        raw.step("sync")
        os.fsync(opened)
        raw.step("replace")
        draft.replace(target)
    except BaseException:
        if raw.owner == os.getpid():
            draft.unlink(missing_ok=True)
        raise
    finally:
        with contextlib.suppress(OSError, ForkedError):  # data that failed to be written would fail again
            file.close()
        raw.close()
    at("sync folder")
    sync(target.parent)


@contextlib.contextmanager
def draft_file(path: str | Path, *, mode: int | None = None, at: Fault = no_fault) -> Iterator[Path]:
    """Yield the path of an empty draft, for libraries that open files by path, such as SQLite; else as `replacing`."""
    with replacing(path, mode=mode, at=at) as file:
        yield cast("OwnedFile", cast("io.BufferedWriter", file).raw).path


def replace_file(path: str | Path, content: Any, *, mode: int | None = None, at: Fault = no_fault) -> None:
    """Replace a file's content by these bytes. Arguments and errors are those of `replacing`."""
    with replacing(path, mode=mode, at=at) as file:
        file.write(content)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove_abandoned(target: Path) -> None:
    """Remove drafts of a file whose processes have ended. Drafts that are being written are locked, and stay."""
    stem = _stem(target)
    with os.scandir(target.parent) as entries:
        drafts = [each.name for each in entries if each.name.startswith(stem)]
    for name in drafts:
        if _DRAFT_END.fullmatch(name, len(stem)):
            _remove_unlocked(target.parent / name)


def remove_abandoned_in(folder: Path, suffix: str) -> None:
    """Remove abandoned drafts of all files in a folder with this suffix, as `remove_abandoned` does."""
    for name in [name for name in os.listdir(folder) if _DRAFT_END.search(name)]:
        target = _DRAFT_END.sub("", name)[1:]
        if target.endswith(suffix):
            remove_abandoned(folder / target)


def _remove_unlocked(draft: Path) -> None:
    with contextlib.suppress(OSError):
        opened = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(opened).st_mode):
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()
        finally:
            os.close(opened)


def _mode_of(target: Path, mode: int | None) -> int | None:
    try:
        facts = target.lstat()
    except FileNotFoundError:
        return mode
    if not stat.S_ISREG(facts.st_mode):
        what = "a folder" if stat.S_ISDIR(facts.st_mode) else "not a regular file"
        raise ParameterError.with_text(f"{target} is {what}, and was not changed. Give the path of a file.")
    return stat.S_IMODE(facts.st_mode)


def _stem(target: Path) -> str:
    name = target.name
    while len(os.fsencode(name)) > _STEM_BYTES:
        name = name[:-1]
    return f".{name}"


def _make_draft(target: Path, mode: int | None) -> tuple[int, Path]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        draft = target.with_name(f"{_stem(target)}.{secrets.token_hex(16)}.draft")
        opened = os.open(draft, flags, 0o666 if mode is None else mode & 0o777)
        try:
            with contextlib.suppress(OSError):  # a file system without locks or modes
                if mode is not None:
                    os.fchmod(opened, mode)
                fcntl.flock(opened, fcntl.LOCK_EX)
            if os.fstat(opened).st_nlink:
                return opened, draft
        except BaseException:
            draft.unlink(missing_ok=True)
            os.close(opened)
            raise
        os.close(opened)  # another process removed the draft before the draft was locked


class OwnedFile(io.RawIOBase):
    """Raw file that owns a descriptor. Only one process may use it: a fork would write buffered data twice.

    Args:
        opened: The descriptor.
        what: Name of the file in errors.
        at: Function called before each step with its name.
    """

    def __init__(self, opened: int, what: str, at: Fault = no_fault) -> None:
        self._opened, self._what, self._at = opened, what, at
        self.path = Path(what)
        """Path of the draft; else the file's name in errors."""
        self.owner = os.getpid()

    def check_owner(self) -> None:
        """Raise ForkedError in another process than the one that opened the file."""
        if self.owner != os.getpid():
            raise ForkedError(self._what, self.owner, os.getpid())

    def step(self, name: str) -> None:
        """Begin a step. Raises ForkedError in another process."""
        self.check_owner()
        self._at(name)

    def write(self, data: Any) -> int:
        """Write all of `data`, also if the disk takes it in parts."""
        self.step("write")
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):  # an almost full disk accepts a part
            written += os.write(self._opened, view[written:])
        return written

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position of the next write; return it."""
        return os.lseek(self._opened, offset, whence)

    def fileno(self) -> int:
        """Return the descriptor of the open file."""
        return self._opened

    def close(self) -> None:
        """Close the descriptor; further calls do nothing."""
        if not self.closed:
            super().close()
            os.close(self._opened)


_LONGEST: Final = 4096
_BEGIN: Final = b'{"pid": '
"""First bytes of a lock file's content."""


class Holder(NamedTuple):
    """Process that holds a lock."""

    pid: int
    """Process id; 0 if the lock file does not contain it."""
    host: str
    role: str

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        is_here = (self.pid, self.host) == (os.getpid(), os.uname().nodename)
        return "this process" if is_here else f"process {self.pid} on host {self.host!r}"


class FileLock:
    """Exclusive lock on a file, which is never removed.

    Args:
        path: Path of the lock file.
        held: Function that makes the error to raise if another holder has the lock.
        foreign: Function that makes the error to raise if the path is another kind of file, from its description.
        unusable: Function that makes the error to raise if the file cannot be locked or written.
        opening: Function that opens the file for reading and writing, and creates it if missing.
        role: Role of the holder, written to the file.

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
        """File descriptor; -1 after release."""
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
        """Release the lock at once, even if a child forked at this moment has not closed its descriptor yet."""
        if self.opened >= 0:
            fcntl.flock(self.opened, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the descriptor. After a fork, the child closes its copy and the parent keeps the lock."""
        if self.opened >= 0:
            os.close(self.opened)
        self.opened = -1


def _lock(opened: int) -> None:
    """Lock the file. Raises BlockingIOError if another holder has the lock, but not for a mere check by `holder`."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)


def holder(path: Path) -> Holder | None:
    """Return the holder of a file's lock, without changing the lock; None if it is free."""
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
    """Return True for a lock file of this program; the content of any other file would be overwritten."""
    facts = os.fstat(opened)
    return stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and _is_ours(os.pread(opened, _LONGEST, 0))


def _is_ours(content: bytes) -> bool:
    """Return True for a lock's content, complete or, as it is not synced, cut off or with zeros."""
    start = content.rstrip(b"\0")[: len(_BEGIN)]
    return _BEGIN.startswith(start)


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
