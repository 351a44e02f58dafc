"""The keys folder of a process: its own key, whom it dials, and who may come in.

    keys/actor/own.key                      the secret key of this process
               server.pub                   public keys of what it dials: servers and proxies, old and new ones
    keys/server/own.key
                authorized/actor/*.pub      public keys of who may come, by role; or authorized-actor.pub, in one file
                authorized/learner/*.pub

A folder is read again while the process runs. No socket is opened here; `net.curve_server` lets in whom it knows.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

from memoire.errors import KeyFileError

from .key_files import authorized_files, mark, read_own, read_public, read_servers
from .keypairs import Key
from .permissions import ROLES, Peer

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
