"""What a state folder needs of its file system: locks that can be trusted, and writes that reach the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from memoire.errors import StateUnusable
from memoire.replay.replacement import sync

from . import private_files
from .disk_errors import unusable

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
