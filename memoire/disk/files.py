"""File system access of a state folder: private files, folder locks, and advice for errors of the file system.

Private files are made for their owner alone, and never through a symbolic link.

The umask of most systems lets all users read new files, and an existing folder may be open to all users. Each file of a
state folder therefore gets an explicit mode:

    the folder                                         a file in it
    any                                                0600  the owner reads and writes
    setgid and writable for its group (2770, 2775)     0660  its group does, too

A folder with setgid belongs to a group, such as a volume of Kubernetes with an `fsGroup`: a Pod with another user and
the same group can use the state. SQLite makes its other files with the mode of the database.

The lock of a folder allows one process at a time to write it; the lock file names that process.
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
    """Return the error for a damaged file, with advice how to restore a backup."""
    return StateCorrupt(str(path), damage, f"{RESTORE}.")


RECOVERABLE_ERRORS: Final = {
    errno.ENOSPC: ("disk is full", "Make room there"),
    errno.EDQUOT: ("disk quota is used up", "Make room there, or raise the quota"),
    errno.EROFS: ("file system is read-only", "Mount it writable"),
}
"""Problem and advice for errors after which saving can go on once a person has solved the problem."""


def unusable(folder: Path, error: OSError) -> StateUnusable:
    """Return the state error for a folder that cannot be read or written."""
    advice = {
        errno.EACCES: f"User {os.getuid()} may not write it: change its owner or mode.",
        errno.EPERM: f"User {os.getuid()} may not write it: change its owner or mode.",
        errno.ENOENT: "Make its parent folder first.",
        errno.ENOTDIR: "Name a folder, not a file.",
    }
    if (trouble := RECOVERABLE_ERRORS.get(error.errno or 0)) is not None:
        return folder_error(folder, trouble)
    return StateUnusable(str(folder), error.strerror or str(error), advice.get(error.errno or 0, "Check the disk."))


def folder_error(folder: Path, trouble: tuple[str, str]) -> StateUnusable:
    """Return the state error for a folder with a problem of `RECOVERABLE_ERRORS`."""
    problem, advice = trouble
    return StateUnusable(str(folder), f"its {problem}", f"{advice}, and start again: nothing is lost.")


OWNER, GROUP = 0o600, 0o660
_SHARED = stat.S_ISGID | stat.S_IWGRP
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def mode_in(folder: Path) -> int:
    """Return the mode for a new file in a folder."""
    return GROUP if folder.stat().st_mode & _SHARED == _SHARED else OWNER


def create(path: Path) -> int:
    """Make a file and open it for reading and writing; returns the descriptor. Raises FileExistsError."""
    mode = mode_in(path.parent)
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, mode)
    with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(opened, mode)  # the umask may have removed bits
    return opened


def append(path: Path) -> int:
    """Open a file for appending, made if missing; returns the descriptor. Raises OSError if the path is a link."""
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | _FLAGS)
    except FileNotFoundError:
        os.close(create(path))
        return os.open(path, os.O_RDWR | os.O_APPEND | _FLAGS)


def make_folder(folder: Path) -> None:
    """Make a folder for private files; inside a group's folder it belongs to the group, too. Keeps an existing one."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    if folder.absolute().parent.stat().st_mode & _SHARED == _SHARED:
        with contextlib.suppress(OSError):
            folder.chmod(0o770 | stat.S_ISGID)


def restrict_permissions(path: Path) -> None:
    """Remove permissions of other users from an existing file. Links and other users' files stay as they are."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        mode = stat.S_IMODE(facts.st_mode)
        wanted = mode & mode_in(path.parent)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and wanted != mode:
            path.chmod(wanted)


_REMOTE: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gfs2", "ocfs2", "glusterfs"}
_LOCAL_FUSE: Final = {"fuseblk", "fuse.fuse-overlayfs"}


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder, with those of folders in it."""
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except OSError:
            pass  # the file was removed in the meantime
    return size


def check_file_system(folder: Path, mounts: str | None = None) -> None:
    """Raise StateUnusable if the folder is on a file system on which SQLite's write-ahead log is not safe.

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
    kind, mount_point = _mounted_at(folder.resolve(), mounts)
    if kind in _REMOTE or (kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        raise StateUnusable(
            str(folder),
            f"{mount_point} is a network or user-space file system ({kind}), on which locks and shared memory between "
            f"processes cannot be trusted",
            "Use a local disk or a block volume (in Kubernetes: a ReadWriteOncePod volume).",
        )


def _mounted_at(path: Path, mounts: str) -> tuple[str, str]:
    """Return kind and mount point of a path's file system; the newest one mounted there counts."""
    kind, mount_point = "", ""
    for line in mounts.splitlines():
        mount, _, facts = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 5 or not facts:
            continue
        point = fields[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= len(mount_point):
            kind, mount_point = facts.split()[0], point
    return kind, mount_point


def lock_folder(folder: Path, what: str = "the state folder", user: str = "server", *, name: str = "lock") -> FileLock:
    """Lock a folder by a file in it, until the lock is released or this process ends.

    Args:
        folder: An existing folder.
        what: Name of the folder in errors.
        user: Name in errors of the processes of which only one may write the folder.
        name: Name of the lock file; several lock files lock different parts of a folder.

    Raises:
        StateLocked: another process holds the lock.
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


def _no_lock(path: Path, description: str) -> StateForeign:
    return StateForeign(
        str(path),
        f"is {description}, not the lock of a folder of memoire",
        "Name another folder, or remove the file if it is not needed.",
    )
