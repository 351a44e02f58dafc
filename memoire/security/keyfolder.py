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
        self.folder = folder_for(Path(folder), role)
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
        listed = authorized_files(self.folder)
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


def _mark(path: Path) -> object:
    """Something that is different when a file is: links are followed, since a kubelet swaps them."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return (str(path), found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode)


def _authorized_files(folder: Path) -> list[tuple[str, Path]]:
    """Files with keys of who may come in, with the role that they come in as."""
    found: list[tuple[str, Path]] = []
    for role in ROLES:
        found += [(role, path) for path in _listed(folder / "authorized" / role) if path.suffix == ".pub"]
    for path in _listed(folder):
        flat = _FLAT.fullmatch(path.name)
        if flat is not None and flat[1] in ROLES:
            found.append((flat[1], path))
    return found[:MOST_FILES]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _load(path: Path) -> list[Key]:
    try:
        with path.open("rb") as opened:
            text = opened.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        advice = "Let this process' user read it, or make one with `memoire keys new`."
        raise KeyFileError(str(path), f"cannot be read: {error.strerror}", advice) from error
    try:
        return read_blocks(text)
    except ValueError as error:
        advice = "Take the file as `memoire keys new` wrote it."
        raise KeyFileError(str(path), f"is no file of keys: {error}", advice) from None


def _read_own(path: Path) -> Key:
    keys = _load(path)
    _check_mode(path)
    if len(keys) != 1 or keys[0].secret is None:
        raise KeyFileError(str(path), "does not hold one secret key", "Take own.key as `memoire keys new` wrote it.")
    return keys[0]


def _check_mode(path: Path) -> None:
    """Refuse a secret that other users can read. What root owns may be readable for its group: so a Kubernetes Secret
    is mounted for a process that is not root (fsGroup).
    """
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    allowed = 0o740 if found.st_uid == 0 else 0o700
    if mode & ~allowed:
        advice = f"chmod 600 {path}, and make a new key if others may have seen it."
        raise KeyFileError(str(path), f"is a secret that others may read (mode {mode:04o})", advice)


def _read_servers(path: Path) -> tuple[Key, ...]:
    if not path.exists():
        return ()
    return tuple(_only_public(path, key) for key in _load(path))


def _read_public(path: Path, role: str) -> tuple[Key, ...]:
    keys = tuple(_only_public(path, key) for key in _load(path))
    for key in keys:
        if key.role != role:
            advice = f"Move it to authorized/{key.role}, or make a key for {_article(role)}."
            problem = f"holds the key {key.name!r} of {_article(key.role)}, and would let it in as {_article(role)}"
            raise KeyFileError(str(path), problem, advice)
    return keys


def _only_public(path: Path, key: Key) -> Key:
    if key.secret is not None:
        advice = "Put its own.pub there instead, and make a new key: this one may have been seen."
        raise KeyFileError(str(path), f"holds the secret key {key.name!r}", advice)
    return key


# ------------------------------------------------------------------------------------------- making and changing


ADMITTED: Final = {
    "server": ("actor", "learner", "reader", "proxy", "server"),
    "proxy": ("actor", "learner", "reader", "proxy", "server"),
}
"""Roles whose keys a new cluster's listening nodes let in."""


def cluster_files(names: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """The files of a new cluster's keys folders: by role, by path in its folder, their text.

    Args:
        names: Of keys, by role; by default the role's plural.
    """
    keys = {role: make(role, (names or {}).get(role, "")) for role in ROLES}
    files = {}
    for role, key in keys.items():
        first, second = ("server", "proxy") if role == "proxy" else ("proxy", "server")  # whom it is likely to dial
        dialled = keys[first].text() + keys[second].text()
        files[role] = {"own.key": key.text(secret=True), "own.pub": key.text(), "server.pub": dialled}
        for other in ADMITTED.get(role, ()):
            files[role][f"authorized/{other}/{keys[other].name}.pub"] = keys[other].text()
    return files


def write_cluster(folder: Path) -> list[Path]:
    """Make a cluster's folder with new keys; the keys folders in it.

    Raises:
        KeyFileError: something is there already; nothing was changed.
    """
    if folder.exists() and any(folder.iterdir()):
        advice = "Name a folder that is not there yet, or give --role to make one more key."
        raise KeyFileError(str(folder), "is not empty: its keys stay as they are", advice)
    made = []
    for role, files in cluster_files().items():
        made.append(folder / role)
        for path, text in files.items():
            write_new(folder / role / path, text)
    return made


def write_one(folder: Path, key: Key, servers: str = "") -> None:
    """Make a keys folder of one new key, and of what it dials.

    Raises:
        KeyFileError: there is a key already; nothing was changed.
    """
    write_new(folder / "own.key", key.text(secret=True))
    write_new(folder / "own.pub", key.text())
    if servers:
        write_new(folder / "server.pub", servers)


def write_new(path: Path, text: str) -> None:
    """Write a file that must not be there: for its owner alone where it is a secret, from the first moment on."""
    mode = 0o600 if path.name == "own.key" else 0o644
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "w", encoding="ascii"
        ) as to:
            to.write(text)
    except FileExistsError as error:
        advice = "Name another folder, or take the old key away first."
        raise KeyFileError(str(path), "is there already, and stays as it is", advice) from error
    except OSError as error:
        raise KeyFileError(str(path), f"cannot be written: {error.strerror}", "Name a folder that can.") from error


def authorize(folder: Path, key: Key) -> Path:
    """Let a key in at the process of this keys folder, beside others of the same role and name; the file it is in."""
    path = folder / "authorized" / key.role / f"{key.name}.pub"
    present = _read_public(path, key.role) if path.exists() else ()
    if all(key.public != other.public for other in present):
        _replace(path, [*present, key])
    return path


def revoke(folder: Path, which: str) -> list[Key]:
    """Let keys in no more: those of this fingerprint, or of this "role/name"; the keys that were taken away."""
    gone: list[Key] = []
    for role, path in _authorized_files(folder):
        keys = _read_public(path, role)
        staying = [key for key in keys if which not in (key.fingerprint, key.peer.principal)]
        if len(staying) != len(keys):
            gone += [key for key in keys if key not in staying]
            _replace(path, staying)
    return gone


def _replace(path: Path, keys: Iterable[Key]) -> None:
    """Write a file of public keys anew, whole or not at all; without any it goes."""
    text = "".join(key.text() for key in keys)
    try:
        if not text:
            path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.new")
        draft.unlink(missing_ok=True)
        write_new(draft, text)
        draft.replace(path)
    except OSError as error:
        raise KeyFileError(str(path), f"cannot be changed: {error.strerror}", "Change it where it is made.") from error


def public_keys(path: Path) -> list[Key]:
    """The public halves of all keys in a file, or in the own.pub of a keys folder. Raises KeyFileError."""
    keys = _load(path / "own.pub" if path.is_dir() else path)
    return [Key(key.public, key.name, key.role, key.created) for key in keys]


def files_in(folder: Path) -> dict[str, str]:
    """The files of a keys folder by their path in it, as text: written elsewhere they are the same folder.

    Raises:
        KeyFileError: one of them is no file of keys.
    """
    paths = [path for name in ("own.pub", "server.pub") if (path := folder / name).exists()]
    files = {"own.key": _read_own(folder / "own.key").text(secret=True)}
    for path in [*paths, *(path for _, path in _authorized_files(folder))]:
        files[str(path.relative_to(folder))] = "".join(_only_public(path, key).text() for key in _load(path))
    return files


def secrets(name: str, keys: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Keys as Kubernetes Secrets in YAML, one for each role: each is mounted whole as a keys folder.

    Args:
        name: Of the Secrets, which are called NAME-ROLE.
        keys: Files of each role's keys folder; by default those of a new cluster.
    """
    documents = []
    for role, files in (cluster_files() if keys is None else keys).items():
        lines = [
            "apiVersion: v1", "kind: Secret", "metadata:", f"  name: {name}-{role}", "  labels:",
            "    app.kubernetes.io/part-of: memoire", "type: Opaque", "stringData:",
        ]  # fmt: skip
        for key, text in secret_files(role, files).items():
            lines += [f"  {key}: |", *(f"    {line}".rstrip() for line in text.splitlines())]
        documents.append("\n".join(lines) + "\n")
    return "---\n".join(documents)


def secret_files(role: str, files: Mapping[str, str]) -> dict[str, str]:
    """The files of a role's keys folder under the names that they have in a Secret, which has no folders."""
    flat: dict[str, str] = {}
    for path, text in files.items():
        key = re.sub(r"^authorized/([a-z]+)/.*", r"authorized-\1.pub", path)
        flat[key] = flat.get(key, "") + text
    for other in ROLES if role in ADMITTED else ():
        # What `kubectl apply` no longer finds in stringData stays in the Secret, and a revoked key with it.
        flat.setdefault(f"authorized-{other}.pub", "# nobody\n")
    return flat
