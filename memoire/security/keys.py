"""Keys folder of a process: its own key, the servers that it dials, and the clients that it admits.

    keys/actor/own.key                      the secret key of this process
               server.pub                   public keys of servers and proxies that it dials, old and new ones
    keys/server/own.key
                authorized/actor/*.pub      public keys of admitted clients, by role; or authorized-actor.pub, in one
                file authorized/learner/*.pub

A folder is read again while the process runs. The module opens no socket; `net.curve_server` admits the clients.

`Key` is one key with its two halves and its text in a file. `read_blocks` parses such text, `load` and the functions
after it read files and check their permissions, and `Keys` holds a whole folder.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import functools
import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

import zmq
from zmq.utils.z85 import decode, encode

from memoire.errors import KeyFileError

from .roles import NAME, ROLES, Peer, article

KEY_BYTES: Final = 32
MAX_FILE_BYTES: Final = 1_000_000
MAX_BLOCKS: Final = 4096
"""Largest number of keys in one file."""
_BEGIN: Final = re.compile(r"-----BEGIN MEMOIRE (PUBLIC|SECRET) KEY-----")
_HEADER: Final = re.compile(r"([A-Za-z-]{1,32}): ([ -~]{1,256})")


@dataclass(frozen=True)
class Key:
    """One key, with its role and name. The secret half never appears in a repr."""

    public: bytes
    name: str
    role: str
    created: str = ""
    secret: bytes | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits by which people distinguish keys."""
        return hashlib.blake2b(self.public, digest_size=8).hexdigest()

    @property
    def peer(self) -> Peer:
        """Peer that holds the key, with the key's role and name."""
        return Peer(self.role, self.name)

    def text(self, *, secret: bool = False) -> str:
        """Return the key's text in a file: its public half, or with `secret` the secret one."""
        kind, half = ("SECRET", self.secret) if secret else ("PUBLIC", self.public)
        assert half is not None
        created = f"Created: {self.created}\n" if self.created else ""
        body = base64.b64encode(half).decode()
        return (
            f"-----BEGIN MEMOIRE {kind} KEY-----\nName: {self.name}\nRole: {self.role}\n{created}\n{body}\n"
            f"-----END MEMOIRE {kind} KEY-----\n"
        )


def make(role: str, name: str = "") -> Key:
    """Return a new key. Raise ValueError if role or name are invalid."""
    name = name or default_key_name(role)
    _check(role, name)
    _, secret = zmq.curve_keypair()
    created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _from_secret(decode(secret), name, role, created)


def default_key_name(role: str) -> str:
    """Return the default name of a role's keys."""
    return {"proxy": "proxies", "inference": "inference-nodes"}.get(role, f"{role}s")


def _from_secret(secret: bytes, name: str, role: str, created: str) -> Key:
    return Key(decode(zmq.curve_public(z85(secret))), name, role, created, secret)


def z85(key: bytes) -> bytes:
    """Return 32 bytes in the form of ZeroMQ's options: 40 characters."""
    return bytes(encode(key))


def _check(role: str, name: str) -> None:
    if role not in ROLES:
        raise ValueError(f"the role {role!r} is not one of {', '.join(ROLES)}")
    if not NAME.fullmatch(name):
        raise ValueError(f"the name {name[:80]!r} is not 1 to 63 letters, digits, dots, dashes and underscores")


def read_blocks(text: bytes) -> list[Key]:
    """Return all keys in a file's text, in order.

    Raises:
        ValueError: the text is malformed; no other error for any bytes. The message repeats no text that may be secret.
    """
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"it has {len(text)} bytes; the limit is {MAX_FILE_BYTES}")
    try:
        lines = iter(text.decode("ascii").splitlines())
    except UnicodeDecodeError:
        raise ValueError("it is not ASCII text") from None
    keys: list[Key] = []
    for line in lines:
        begins = _BEGIN.fullmatch(line.strip())
        if begins is not None:
            keys.append(_read_block(begins[1], lines))
        elif line.strip() and not line.startswith("#"):
            raise ValueError("a line outside of keys does not begin with #")
        if len(keys) > MAX_BLOCKS:
            raise ValueError(f"it has more than {MAX_BLOCKS} keys")
    return keys


def _read_block(kind: str, lines: Iterator[str]) -> Key:
    headers: dict[str, str] = {}
    for line in lines:
        if not line.strip():
            break
        header = _HEADER.fullmatch(line.strip())
        if header is None or header[1] in headers:
            raise ValueError("a key's header is not 'Name: ...', 'Role: ...', each once, with an empty line after them")
        headers[header[1]] = header[2]
    body = next(lines, "").strip()
    if next(lines, "").strip() != f"-----END MEMOIRE {kind} KEY-----":
        raise ValueError(f"a key has no line '-----END MEMOIRE {kind} KEY-----' after its one line of base64")
    name, role, created = headers.get("Name", ""), headers.get("Role", ""), headers.get("Created", "")
    try:
        _check(role, name)
    except ValueError:  # the error's message may repeat a secret, if lines have run together
        name = "1 to 63 letters, digits, dots, dashes and underscores"
        raise ValueError(f"a key's role is not one of {', '.join(ROLES)}, or its name is not {name}") from None
    try:
        half = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"the key {name!r} is not base64") from None
    if len(half) != KEY_BYTES or not any(half):
        raise ValueError(f"the key {name!r} is not {KEY_BYTES} bytes in base64, or all bytes are 0")
    return _from_secret(half, name, role, created) if kind == "SECRET" else Key(half, name, role, created)


MAX_FILES: Final = 4096
"""Largest number of files with authorized keys in one folder."""
_FLAT: Final = re.compile(r"authorized-([a-z]+)[A-Za-z0-9._-]*\.pub")


def file_state(path: Path) -> object:
    """Return a value that changes when the file does. Links are followed, because a kubelet swaps them."""
    try:
        status = path.stat()
    except OSError as error:
        return error.errno
    return (str(path), status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)


def authorized_files(folder: Path) -> list[tuple[str, Path]]:
    """Return role and path of each file with keys of admitted clients. Raise KeyFileError above `MAX_FILES` files."""
    files: list[tuple[str, Path]] = []
    for role in ROLES:
        files += [(role, path) for path in _files_in(folder / "authorized" / role) if path.suffix == ".pub"]
    for path in _files_in(folder):
        flat = _FLAT.fullmatch(path.name)
        if flat is not None and flat[1] in ROLES:
            files.append((flat[1], path))
    if len(files) > MAX_FILES:
        advice = "Put the keys of a role into fewer files: a file may hold many."
        raise KeyFileError(str(folder), f"has {len(files)} files of authorized keys, more than {MAX_FILES}", advice)
    return files


def _files_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def load(path: Path) -> list[Key]:
    """Return all keys in a file. Raise KeyFileError if it cannot be read or parsed."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        advice = "Let this process' user read the file, or make one with `memoire keys new`."
        raise KeyFileError(str(path), f"cannot be read: {error.strerror}", advice) from error
    try:
        return read_blocks(text)
    except ValueError as error:
        advice = "Replace the file with one that `memoire keys new` wrote."
        raise KeyFileError(str(path), f"is not a file of keys: {error}", advice) from None


def read_own(path: Path) -> Key:
    """Return the only key in an own.key, which other users may not read. Raise KeyFileError."""
    keys = load(path)
    check_status(path, path.stat())
    if len(keys) != 1 or keys[0].secret is None:
        raise KeyFileError(str(path), "does not hold one secret key", "Restore the file of `memoire keys new`.")
    return keys[0]


def check_status(path: Path, status: os.stat_result) -> None:
    """Raise KeyFileError for a secret that other users can read. A file of root may be readable for its group:
    Kubernetes mounts Secrets like that for a process that does not run as root (fsGroup).
    """
    mode = stat.S_IMODE(status.st_mode)
    allowed = 0o740 if status.st_uid == 0 else 0o700
    if mode & ~allowed:
        advice = f"chmod 600 {path}, and make a new key if other users may have read it."
        raise KeyFileError(str(path), f"is a secret that other users may read (mode {mode:04o})", advice)


def read_servers(path: Path) -> tuple[Key, ...]:
    """Return the public keys in a server.pub; none if the file does not exist. Raise KeyFileError."""
    if not path.exists():
        return ()
    return tuple(only_public(path, key) for key in load(path))


def read_public(path: Path, role: str) -> tuple[Key, ...]:
    """Return the public keys in a file of clients that are admitted in this role. Raise KeyFileError."""
    keys = tuple(only_public(path, key) for key in load(path))
    for key in keys:
        if key.role != role:
            advice = f"Move it to authorized/{key.role}, or make a key for {article(role)}."
            problem = f"holds the key {key.name!r} of {article(key.role)}, but admits clients as {article(role)}"
            raise KeyFileError(str(path), problem, advice)
    return keys


def only_public(path: Path, key: Key) -> Key:
    """Return the key itself. Raise KeyFileError if it has its secret half."""
    if key.secret is not None:
        advice = "Put the own.pub of that key there instead, and make a new key: this one may have been read."
        raise KeyFileError(str(path), f"holds the secret key {key.name!r}", advice)
    return key


_log = logging.getLogger(__name__)

ENVIRONMENT: Final = "MEMOIRE_KEYS"
"""Environment variable with the default keys folder of a process."""
REREAD_INTERVAL: Final = 1.0
"""Seconds between two checks whether a folder has changed."""

_Read = TypeVar("_Read")


class Keys:
    """Keys folder of one process; `refresh` reads it again after a change. Thread-safe.

    Args:
        folder: A keys folder. Or a cluster's folder, with a keys folder for each role; then that of `role`.
        role: Role of this process in a cluster's folder.

    Raises:
        KeyFileError: the folder does not exist, a file is malformed, or other users may read the secret key.
    """

    def __init__(self, folder: str | os.PathLike[str], role: str = "") -> None:
        self.folder = folder_for(Path(folder).absolute(), role)
        self.changes = 0
        """Number of changes so far."""
        self.own: Key
        """Key of this process, with its secret half."""
        self.servers: tuple[Key, ...] = ()
        """Public keys of the servers that this process dials."""
        self.server_keys_by_address: dict[str, bytes] = {}
        """Key that was used at an address, at a host, and (by "") last."""
        self.authorized: Mapping[bytes, Key] = {}
        """Keys of admitted clients, by public key."""
        self._lock = threading.Lock()
        self._checked_at = time.monotonic()
        self._faults: dict[str, str] = {}  # faults of changed files; the former content holds
        self._seen: tuple[object, ...] = ()
        self._files: dict[str, tuple[Key, ...]] = {}  # authorized keys by file, as read last
        self._read(is_first=True)

    @classmethod
    def from_setting(cls, keys: KeysLike, role: str = "") -> Keys | None:
        """Return the given keys, or those of $MEMOIRE_KEYS if `keys` is None; None without either.

        Args:
            role: Role of this process in a cluster's folder.
        """
        if isinstance(keys, Keys):
            return keys
        if keys is None:
            keys = os.environ.get(ENVIRONMENT) or None
        return None if keys is None else cls(keys, role)

    @property
    def problem(self) -> str:
        """Sentence about a changed file that cannot be read; "" if there is none."""
        return next((f"keys: {path} {why}; its former content stays in use" for path, why in self._faults.items()), "")

    def peer(self, public: bytes) -> Peer | None:
        """Return the peer with this public key; None if it is not admitted."""
        key = self.authorized.get(public)
        return None if key is None else key.peer

    def refresh(self) -> bool:
        """Read the folder again if it has changed; checks once a second at most. Return True if the keys changed."""
        now = time.monotonic()
        if now - self._checked_at < REREAD_INTERVAL or not self._lock.acquire(blocking=False):
            return False
        try:
            self._checked_at = now
            return self._read(is_first=False)
        finally:
            self._lock.release()

    def _read(self, *, is_first: bool) -> bool:
        paths = {"own.key": self.folder / "own.key", "server.pub": self.folder / "server.pub"}
        try:
            files_by_role = authorized_files(self.folder)
        except KeyFileError as error:
            if is_first:
                raise
            if self._faults.get(str(self.folder)) != error.problem:
                _log.error("%s", error)
            self._faults, self._seen = {str(self.folder): error.problem}, ()
            return False
        seen = tuple(file_state(path) for path in (*paths.values(), *(path for _, path in files_by_role)))
        if seen == self._seen:
            return False
        self._seen = seen
        faults: dict[str, str] = {}
        former = None if is_first else (self.own, self.servers, self.authorized)
        own_key, servers = (None, None) if former is None else former[:2]
        self.own = self._read_or_keep(faults, paths["own.key"], read_own, own_key)
        self.servers = self._read_or_keep(faults, paths["server.pub"], read_servers, servers)
        files: dict[str, tuple[Key, ...]] = {}
        for role, path in files_by_role:
            kept = None if is_first else self._files.get(str(path), ())
            files[str(path)] = self._read_or_keep(faults, path, functools.partial(read_public, role=role), kept)
        self._files, self._faults = files, faults
        self.authorized = MappingProxyType({key.public: key for keys in files.values() for key in keys})
        if former is None or former == (self.own, self.servers, self.authorized):
            return False
        self.changes += 1
        _log.info("the keys in %s have changed: %d clients are admitted", self.folder, len(self.authorized))
        return True

    def _read_or_keep(
        self, faults: dict[str, str], path: Path, read: Callable[[Path], _Read], former: _Read | None
    ) -> _Read:
        """Return the content of a file, or its former content if it cannot be read, such as during a change."""
        try:
            return read(path)
        except KeyFileError as error:
            if former is None:
                raise
            faults[str(path)] = error.problem
            _log.error("%s", error)
            return former

    def __repr__(self) -> str:
        return f"<memoire.Keys {str(self.folder)!r}: {self.own.peer.principal} {self.own.fingerprint}>"


KeysLike: TypeAlias = Keys | str | os.PathLike[str] | None
"""Keys of a process, or the path of their folder; None is the folder in $MEMOIRE_KEYS, if that is set."""


def folder_for(folder: Path, role: str) -> Path:
    """Return the keys folder itself, or that of a role in a cluster's folder. Raise KeyFileError."""
    if (folder / "own.key").exists():
        return folder
    if role and (folder / role / "own.key").exists():
        return folder / role
    advice = "Make one with `memoire keys new`, or name a folder that has an own.key."
    if not folder.is_dir():
        raise KeyFileError(str(folder), "does not exist or is not a folder", advice)
    raise KeyFileError(str(folder), f"has no own.key{f', nor {role}/own.key' if role else ''}", advice)


def folders_in(folder: Path) -> list[Path]:
    """Return the keys folder itself in a list, or those of a cluster's folder. Raise KeyFileError."""
    folders = [folder / role for role in ROLES if (folder / role / "own.key").exists()]
    return [folder_for(folder, "")] if (folder / "own.key").exists() or not folders else folders
