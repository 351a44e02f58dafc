"""What a state folder needs of its file system: private files, locks that can be trusted, and what errors of it mean.

Files that hold what others may not read are made for their owner alone, and never through a link that somebody left.

The umask of most systems lets everybody read what a program makes, and a folder that was there before may let everybody
in. So each file of a state folder is made here, with a mode of its own:

    the folder                                         a file in it
    any                                                0600  the owner reads and writes
    setgid and writable for its group (2770, 2775)     0660  its group does, too

The second one is how people say that a folder belongs to a group, and what Kubernetes makes of a volume with an
`fsGroup`: a Pod that has another user and the same group goes on with its state. SQLite makes its other files with the
mode of the database.

The lock of a folder that one process at a time may write, such as a state folder; its file says which.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Final

from memoire.errors import StateCorrupt, StateForeign, StateLocked, StateUnusable
from memoire.replay.files import FileLock

RESTORE: Final = (
    "Put a backup back (the newest is state.db.backup-1): stop the server, move state.db away, remove state.db-wal and "
    "state.db-shm, copy the backup to state.db, and start; clients that are still running bring their totals up to "
    "date by themselves. Or give the server an empty folder: it then counts only what its running clients report, and "
    "former runs, models and log lines are not there"
)


def corrupt(path: Path, damage: str) -> StateCorrupt:
    """The error that says what is damaged and how to put a backup back."""
    return StateCorrupt(str(path), damage, f"{RESTORE}.")


HEALING: Final = {
    errno.ENOSPC: ("disk is full", "Make room there"),
    errno.EDQUOT: ("disk quota is used up", "Make room there, or raise the quota"),
    errno.EROFS: ("file system is read-only", "Mount it writable"),
}
"""Errors that end when somebody acts: what is wrong, and what to do."""


def unusable(folder: Path, error: OSError) -> StateUnusable:
    """The state error of a folder that cannot be read or written."""
    advice = {
        errno.EACCES: f"User {os.getuid()} may not write it: change its owner or mode.",
        errno.EPERM: f"User {os.getuid()} may not write it: change its owner or mode.",
        errno.ENOENT: "Make its parent folder first.",
        errno.ENOTDIR: "Name a folder, not a file.",
    }
    if (trouble := HEALING.get(error.errno or 0)) is not None:
        return hindered(folder, trouble)
    return StateUnusable(str(folder), error.strerror or str(error), advice.get(error.errno or 0, "Check the disk."))


def hindered(folder: Path, trouble: tuple[str, str]) -> StateUnusable:
    """The state error of a folder that has this trouble."""
    what, advice = trouble
    return StateUnusable(str(folder), f"its {what}", f"{advice}, and start again: nothing is lost.")


OWNER, GROUP = 0o600, 0o660
_SHARED = stat.S_ISGID | stat.S_IWGRP
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def mode_in(folder: Path) -> int:
    """Mode of a file in this folder."""
    return GROUP if folder.stat().st_mode & _SHARED == _SHARED else OWNER


def create(path: Path) -> int:
    """Make a file and open it to be read and written. Raises FileExistsError: something is there, a link even."""
    mode = mode_in(path.parent)
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, mode)
    with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(opened, mode)  # the umask has taken some away
    return opened


def append(path: Path) -> int:
    """Open a file to be written to at its end, made where it is not there. Raises OSError: it is a link."""
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | _FLAGS)
    except FileNotFoundError:
        os.close(create(path))
        return os.open(path, os.O_RDWR | os.O_APPEND | _FLAGS)


def make_folder(folder: Path) -> None:
    """Make a folder for such files; one inside of a group's is the group's, too. One that is there stays as it is."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    if folder.absolute().parent.stat().st_mode & _SHARED == _SHARED:
        with contextlib.suppress(OSError):
            folder.chmod(0o770 | stat.S_ISGID)


def tighten(path: Path) -> None:
    """Take from others what a file that was made before lets them do. Links and other people's files stay."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        mode = stat.S_IMODE(facts.st_mode)
        wanted = mode & mode_in(path.parent)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and wanted != mode:
            path.chmod(wanted)


_REMOTE: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gfs2", "ocfs2", "glusterfs"}
_LOCAL_FUSE: Final = {"fuseblk", "fuse.fuse-overlayfs"}


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
        return append(path)
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
