"""The files of a keys folder as they are read: which there are, who may read them, and the keys in them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from memoire.errors import KeyFileError

from .keypairs import MAX_FILE_BYTES, Key, read_blocks
from .permissions import ROLES, article

MAX_FILES: Final = 4096
"""Files with authorized keys in one folder."""
_FLAT: Final = re.compile(r"authorized-([a-z]+)[A-Za-z0-9._-]*\.pub")


def mark(path: Path) -> object:
    """Something that is different when a file is: links are followed, since a kubelet swaps them."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return (str(path), found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode)


def authorized_files(folder: Path) -> list[tuple[str, Path]]:
    """Files with keys of who may come in, with the role that they come in as. Raises KeyFileError for too many."""
    found: list[tuple[str, Path]] = []
    for role in ROLES:
        found += [(role, path) for path in _listed(folder / "authorized" / role) if path.suffix == ".pub"]
    for path in _listed(folder):
        flat = _FLAT.fullmatch(path.name)
        if flat is not None and flat[1] in ROLES:
            found.append((flat[1], path))
    if len(found) > MAX_FILES:
        advice = "Put the keys of a role into fewer files: a file may hold many."
        raise KeyFileError(str(folder), f"has {len(found)} files of authorized keys, more than {MAX_FILES}", advice)
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def load(path: Path) -> list[Key]:
    """All keys in a file. Raises KeyFileError."""
    try:
        with path.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        advice = "Let this process' user read it, or make one with `memoire keys new`."
        raise KeyFileError(str(path), f"cannot be read: {error.strerror}", advice) from error
    try:
        return read_blocks(text)
    except ValueError as error:
        advice = "Take the file as `memoire keys new` wrote it."
        raise KeyFileError(str(path), f"is no file of keys: {error}", advice) from None


def read_own(path: Path) -> Key:
    """The one secret key in an own.key, which others may not read. Raises KeyFileError."""
    keys = load(path)
    check_mode(path)
    if len(keys) != 1 or keys[0].secret is None:
        raise KeyFileError(str(path), "does not hold one secret key", "Take own.key as `memoire keys new` wrote it.")
    return keys[0]


def check_mode(path: Path) -> None:
    """Refuse a secret that other users can read. What root owns may be readable for its group: so a Kubernetes Secret
    is mounted for a process that is not root (fsGroup).
    """
    check_status(path, path.stat())


def check_status(path: Path, found: os.stat_result) -> None:
    """`check_mode` of a file whose status is known."""
    mode = stat.S_IMODE(found.st_mode)
    allowed = 0o740 if found.st_uid == 0 else 0o700
    if mode & ~allowed:
        advice = f"chmod 600 {path}, and make a new key if others may have seen it."
        raise KeyFileError(str(path), f"is a secret that others may read (mode {mode:04o})", advice)


def read_servers(path: Path) -> tuple[Key, ...]:
    """The public keys in a server.pub; none if it is not there. Raises KeyFileError."""
    if not path.exists():
        return ()
    return tuple(only_public(path, key) for key in load(path))


def read_public(path: Path, role: str) -> tuple[Key, ...]:
    """The public keys in a file of those that come in as this role. Raises KeyFileError."""
    keys = tuple(only_public(path, key) for key in load(path))
    for key in keys:
        if key.role != role:
            advice = f"Move it to authorized/{key.role}, or make a key for {article(role)}."
            problem = f"holds the key {key.name!r} of {article(key.role)}, and would let it in as {article(role)}"
            raise KeyFileError(str(path), problem, advice)
    return keys


def only_public(path: Path, key: Key) -> Key:
    """The key as it is. Raises KeyFileError: its secret half is there."""
    if key.secret is not None:
        advice = "Put its own.pub there instead, and make a new key: this one may have been seen."
        raise KeyFileError(str(path), f"holds the secret key {key.name!r}", advice)
    return key
