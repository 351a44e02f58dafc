"""Safe replacement of a file: a draft beside it takes its place when it is whole and on disk.

    with replacing("agent.npz") as file:
        file.write(content)

The path names the former file until the block ends without an error, and the whole new one from then on. Also after a
power failure, with a full disk, and if several processes replace the same file at the same time: the last one stays.

A lock that one holder has at a time: a process, or a part of one. Its file says which.

A lock is on an open file (`flock`), so that two parts of a process exclude each other too, and it is free as soon as
its process has ended, however that was. A forked process has a copy of the open file, which it closes at once: it holds
nothing, and cannot keep the lock of a parent that has ended.
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
"""Called with the name of each step before it: "write", "sync", "replace" and "sync folder". What it raises is as if
the disk had raised it."""
_DRAFT_END: Final = re.compile(r"\.[0-9a-f]{32}\.draft$")
_STEM_BYTES: Final = 200  # a name has at most 255
_BUFFER_BYTES: Final = 1 << 20


def no_fault(step: str) -> None:
    """Let every step happen."""


@contextlib.contextmanager
def replacing(path: str | Path, *, mode: int | None = None, at: Fault = no_fault) -> Iterator[BinaryIO]:
    """Open a draft to write bytes to; it takes the place of `path` when the block ends, and is on disk then.

    After an error the former file is as it was, and there is no draft. A draft of a process that was killed goes with
    the next replacement of its file. Where the path is a link, the file that it leads to is replaced.

    Args:
        path: The file; its folder is there.
        mode: Of a file that is new, such as 0o600; by default what the umask leaves. A file that was there before keeps
            its own.
        at: Called before each step, so that a test may let it fail.

    Raises:
        OSError: it cannot be written.
        ParameterError: the path is a folder, or something else that is no file.
        ForkedError: a child that was forked within the block has written to the draft; nothing of that is written.
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
        with contextlib.suppress(OSError, ForkedError):  # what could not be written cannot be written now
            file.close()
        raw.close()
    at("sync folder")
    sync(target.parent)


@contextlib.contextmanager
def drafting(path: str | Path, *, mode: int | None = None, at: Fault = no_fault) -> Iterator[Path]:
    """Make an empty draft for something that opens files by their paths, such as SQLite; else as `replacing`."""
    with replacing(path, mode=mode, at=at) as file:
        yield cast("OwnedFile", cast("io.BufferedWriter", file).raw).path


def replace_file(path: str | Path, content: Any, *, mode: int | None = None, at: Fault = no_fault) -> None:
    """Replace a file by these bytes. Arguments and errors are those of `replacing`."""
    with replacing(path, mode=mode, at=at) as file:
        file.write(content)


def sync(path: Path) -> None:
    """Have a file on disk, or the names in a folder."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove_abandoned(target: Path) -> None:
    """Remove drafts of a file whose processes have ended. The drafts that are being written are locked, and stay."""
    stem = _stem(target)
    with os.scandir(target.parent) as found:
        drafts = [each.name for each in found if each.name.startswith(stem)]
    for name in drafts:
        if _DRAFT_END.fullmatch(name, len(stem)):
            _remove_unlocked(target.parent / name)


def remove_abandoned_in(folder: Path, suffix: str) -> None:
    """Remove drafts of all files of a folder whose names end so, as `remove_abandoned` does."""
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
        what = "a folder" if stat.S_ISDIR(facts.st_mode) else "no regular file"
        raise ParameterError("path", str(target), f"the path of a file; this is {what}, and stays as it is")
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
        os.close(opened)  # another process took it for abandoned before it was locked


class OwnedFile(io.RawIOBase):
    """A descriptor to write to, closed with this object. It belongs to one process: a fork would write all twice.

    Args:
        opened: The descriptor.
        what: What errors call the file.
        at: Called with the name of each step before it.
    """

    def __init__(self, opened: int, what: str, at: Fault = no_fault) -> None:
        self._opened, self._what, self._at = opened, what, at
        self.path = Path(what)
        """Of the draft; else what errors call the file."""
        self.owner = os.getpid()

    def check_owner(self) -> None:
        """Raises ForkedError: this is another process."""
        if self.owner != os.getpid():
            raise ForkedError(self._what, self.owner, os.getpid())

    def step(self, name: str) -> None:
        """Begin a step. Raises ForkedError: this is another process."""
        self.check_owner()
        self._at(name)

    def write(self, data: Any) -> int:
        """Write all of it."""
        self.step("write")
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):  # a disk that is almost full takes a part
            written += os.write(self._opened, view[written:])
        return written

    def writable(self) -> bool:
        """Whether it can be written to."""
        return True

    def seekable(self) -> bool:
        """Whether `seek` moves in it."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go on writing at another place."""
        return os.lseek(self._opened, offset, whence)

    def fileno(self) -> int:
        """The descriptor."""
        return self._opened

    def close(self) -> None:
        """Close the descriptor; once is enough."""
        if not self.closed:
            super().close()
            os.close(self._opened)


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
