"""The keys folder of a process: its own key, whom it dials, and who may come in.

    keys/actor/own.key                      the secret key of this process
               server.pub                   public keys of what it dials: servers and proxies, old and new ones
    keys/server/own.key
                authorized/actor/*.pub      public keys of who may come, by role; or authorized-actor.pub, in one file
                authorized/learner/*.pub

A folder is read again while the process runs. No socket is opened here; `net.curve_server` lets in whom it knows.

The files of a keys folder as they are read: which there are, who may read them, and the keys in them.

One key: its two halves, and its text in a file. Nothing is read or written here.
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
"""Keys in one file."""
_BEGIN: Final = re.compile(r"-----BEGIN MEMOIRE (PUBLIC|SECRET) KEY-----")
_HEADER: Final = re.compile(r"([A-Za-z-]{1,32}): ([ -~]{1,256})")


@dataclass(frozen=True)
class Key:
    """One key. The secret half never appears in a repr."""

    public: bytes
    name: str
    role: str
    created: str = ""
    secret: bytes | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits by which people tell keys apart."""
        return hashlib.blake2b(self.public, digest_size=8).hexdigest()

    @property
    def peer(self) -> Peer:
        """Whoever has it."""
        return Peer(self.role, self.name)

    def text(self, *, secret: bool = False) -> str:
        """The key as it stands in a file: its public half, or with `secret` the other one."""
        kind, half = ("SECRET", self.secret) if secret else ("PUBLIC", self.public)
        assert half is not None
        created = f"Created: {self.created}\n" if self.created else ""
        body = base64.b64encode(half).decode()
        return (
            f"-----BEGIN MEMOIRE {kind} KEY-----\nName: {self.name}\nRole: {self.role}\n{created}\n{body}\n"
            f"-----END MEMOIRE {kind} KEY-----\n"
        )


def make(role: str, name: str = "") -> Key:
    """A new key. Raises ValueError where role or name cannot be."""
    name = name or plural(role)
    _check(role, name)
    _, secret = zmq.curve_keypair()
    created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _from_secret(decode(secret), name, role, created)


def plural(role: str) -> str:
    """What keys of a role are called unless they have a name of their own."""
    return {"proxy": "proxies", "inference": "inference-nodes"}.get(role, f"{role}s")


def _from_secret(secret: bytes, name: str, role: str, created: str) -> Key:
    return Key(decode(zmq.curve_public(z85(secret))), name, role, created, secret)


def z85(key: bytes) -> bytes:
    """32 bytes as ZeroMQ's options take them: 40 characters."""
    return bytes(encode(key))


def _check(role: str, name: str) -> None:
    if role not in ROLES:
        raise ValueError(f"the role {role!r} is none of {', '.join(ROLES)}")
    if not NAME.fullmatch(name):
        raise ValueError(f"the name {name[:80]!r} is not 1 to 63 letters, digits, dots, dashes and underscores")


def read_blocks(text: bytes) -> list[Key]:
    """All keys in a file's text, in order.

    Raises:
        ValueError: and nothing else, whatever the bytes: says what is wrong, and never repeats what may be a secret.
    """
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"it has {len(text)} bytes, and keys are short")
    try:
        lines = iter(text.decode("ascii").splitlines())
    except UnicodeDecodeError:
        raise ValueError("it is not ASCII text") from None
    found: list[Key] = []
    for line in lines:
        begins = _BEGIN.fullmatch(line.strip())
        if begins is not None:
            found.append(_read_block(begins[1], lines))
        elif line.strip() and not line.startswith("#"):
            raise ValueError("there is text outside of keys that does not begin with #")
        if len(found) > MAX_BLOCKS:
            raise ValueError(f"it has more than {MAX_BLOCKS} keys")
    return found


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
    except ValueError:  # which says what it found: in a file where lines have run together that may be a secret
        name = "1 to 63 letters, digits, dots, dashes and underscores"
        raise ValueError(f"a key's role is none of {', '.join(ROLES)}, or its name is not {name}") from None
    try:
        half = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"the key {name!r} is not base64") from None
    if len(half) != KEY_BYTES or not any(half):
        raise ValueError(f"the key {name!r} is not {KEY_BYTES} bytes in base64, or all of them are 0")
    return _from_secret(half, name, role, created) if kind == "SECRET" else Key(half, name, role, created)


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
    check_status(path, path.stat())
    if len(keys) != 1 or keys[0].secret is None:
        raise KeyFileError(str(path), "does not hold one secret key", "Take own.key as `memoire keys new` wrote it.")
    return keys[0]


def check_status(path: Path, found: os.stat_result) -> None:
    """Refuse a secret that other users can read. What root owns may be readable for its group: so a Kubernetes Secret
    is mounted for a process that is not root (fsGroup).
    """
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


_log = logging.getLogger(__name__)

ENVIRONMENT: Final = "MEMOIRE_KEYS"
"""Environment variable with the keys folder of whoever is given none."""
REREAD_INTERVAL: Final = 1.0
"""Seconds between two looks whether a folder has changed."""

_Read = TypeVar("_Read")


class Keys:
    """The keys folder of one process, as it is now: `refresh` reads it again where it has changed. Thread-safe.

    Args:
        folder: A keys folder. Or a cluster's folder, with a keys folder for each role in it: then that of `role`.
        role: Which one to take there.

    Raises:
        KeyFileError: there is no such folder, a file is not as it has to be, or others may read the secret key.
    """

    def __init__(self, folder: str | os.PathLike[str], role: str = "") -> None:
        self.folder = folder_for(Path(folder).absolute(), role)
        self.changes = 0
        """How often something in it has changed."""
        self.own: Key
        """The key of this process, with its secret half."""
        self.servers: tuple[Key, ...] = ()
        """Public keys of what it dials."""
        self.met: dict[str, bytes] = {}
        """Which key was found at an address that was dialled, at a host, and (by "") last."""
        self.authorized: Mapping[bytes, Key] = {}
        """Who may come in, by public key."""
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._faults: dict[str, str] = {}  # files that could not be read again, and why: what they held holds
        self._seen: tuple[object, ...] = ()
        self._files: dict[str, tuple[Key, ...]] = {}  # of authorized keys, as they were read last
        self._read(is_first=True)

    @classmethod
    def of(cls, given: Given, role: str = "") -> Keys | None:
        """The keys that somebody gave; where nobody did, those of $MEMOIRE_KEYS; None without either.

        Args:
            role: Which ones to take of a cluster's folder.
        """
        if isinstance(given, Keys):
            return given
        if given is None:
            given = os.environ.get(ENVIRONMENT) or None
        return None if given is None else cls(given, role)

    @property
    def trouble(self) -> str:
        """What could not be read when the folder changed, as a sentence; "" where all is well."""
        return next((f"keys: {path} {why}; what it held before holds on" for path, why in self._faults.items()), "")

    def peer(self, public: bytes) -> Peer | None:
        """Whose key this is; None where it is nobody's who may come in."""
        key = self.authorized.get(public)
        return None if key is None else key.peer

    def refresh(self) -> bool:
        """Look whether the folder has changed, once a second at most, and read it then; whether it had."""
        now = time.monotonic()
        if now - self._looked < REREAD_INTERVAL or not self._lock.acquire(blocking=False):
            return False
        try:
            self._looked = now
            return self._read(is_first=False)
        finally:
            self._lock.release()

    def _read(self, *, is_first: bool) -> bool:
        paths = {"own.key": self.folder / "own.key", "server.pub": self.folder / "server.pub"}
        try:
            listed = authorized_files(self.folder)
        except KeyFileError as error:
            if is_first:
                raise
            if self._faults.get(str(self.folder)) != error.problem:
                _log.error("%s", error)
            self._faults, self._seen = {str(self.folder): error.problem}, ()
            return False
        seen = tuple(mark(path) for path in (*paths.values(), *(path for _, path in listed)))
        if seen == self._seen:
            return False
        self._seen = seen
        faults: dict[str, str] = {}
        former = None if is_first else (self.own, self.servers, self.authorized)
        own, servers = (None, None) if former is None else former[:2]
        self.own = self._or_former(faults, paths["own.key"], read_own, own)
        self.servers = self._or_former(faults, paths["server.pub"], read_servers, servers)
        files: dict[str, tuple[Key, ...]] = {}
        for role, path in listed:
            kept = None if is_first else self._files.get(str(path), ())
            files[str(path)] = self._or_former(faults, path, functools.partial(read_public, role=role), kept)
        self._files, self._faults = files, faults
        self.authorized = MappingProxyType({key.public: key for keys in files.values() for key in keys})
        if former is None or former == (self.own, self.servers, self.authorized):
            return False
        self.changes += 1
        _log.info("the keys in %s have changed: %d may come in", self.folder, len(self.authorized))
        return True

    def _or_former(
        self, faults: dict[str, str], path: Path, read: Callable[[Path], _Read], former: _Read | None
    ) -> _Read:
        """What a file says; what it said before where it cannot be read now, which may be in the middle of a change."""
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


Given: TypeAlias = Keys | str | os.PathLike[str] | None
"""How a process' keys are named; None is $MEMOIRE_KEYS, if that is set."""


def folder_for(folder: Path, role: str) -> Path:
    """The keys folder itself, or that of a role in a cluster's folder. Raises KeyFileError."""
    if (folder / "own.key").exists():
        return folder
    if role and (folder / role / "own.key").exists():
        return folder / role
    advice = "Make one with `memoire keys new`, or name a folder with an own.key in it."
    if not folder.is_dir():
        raise KeyFileError(str(folder), "is no folder", advice)
    raise KeyFileError(str(folder), f"has no own.key{f', nor {role}/own.key' if role else ''}", advice)


def folders_in(folder: Path) -> list[Path]:
    """The keys folder itself, or those of a cluster's folder. Raises KeyFileError."""
    found = [folder / role for role in ROLES if (folder / role / "own.key").exists()]
    return [folder_for(folder, "")] if (folder / "own.key").exists() or not found else found
