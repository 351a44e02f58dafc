"""Keys folders as they are made and changed: of a new cluster, of one key, and who may come in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from memoire.errors import KeyFileError
from memoire.replay.replacement import replace_file, sync

from .key_files import authorized_files, load, only_public, read_own, read_public
from .keypairs import Key, make
from .permissions import ROLES

ADMITTED: Final = {
    "server": ("actor", "learner", "reader", "proxy", "server", "inference"),
    "proxy": ("actor", "learner", "reader", "proxy", "server", "inference"),
    "inference": ("actor", "learner", "reader", "server"),
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
        dialled = "".join(keys[each].text() for each in (first, second, "inference"))
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
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            with open(opened, "w", encoding="ascii") as to:
                to.write(text)
                to.flush()
                os.fsync(opened)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        sync(path.parent)
    except FileExistsError as error:
        advice = "Name another folder, or take the old key away first."
        raise KeyFileError(str(path), "is there already, and stays as it is", advice) from error
    except OSError as error:
        raise KeyFileError(str(path), f"cannot be written: {error.strerror}", "Name a folder that can.") from error


def authorize(folder: Path, key: Key) -> Path:
    """Let a key in at the process of this keys folder, beside others of the same role and name; the file it is in."""
    path = folder / "authorized" / key.role / f"{key.name}.pub"
    present = read_public(path, key.role) if path.exists() else ()
    if all(key.public != other.public for other in present):
        _replace(path, [*present, key])
    return path


def revoke(folder: Path, which: str) -> list[Key]:
    """Remove the authorized keys with this fingerprint or this "role/name". Returns the removed keys."""
    gone: list[Key] = []
    for role, path in authorized_files(folder):
        keys = read_public(path, role)
        staying = [key for key in keys if which not in (key.fingerprint, key.peer.principal)]
        if len(staying) != len(keys):
            gone += [key for key in keys if key not in staying]
            _replace(path, staying)
    return gone


def _replace(path: Path, keys: Iterable[Key]) -> None:
    """Write a file of public keys anew, whole or not at all; without any it goes."""
    text = "".join(key.text() for key in keys)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if text:
            replace_file(path, text.encode("ascii"), mode=0o644)
        else:
            path.unlink()
            sync(path.parent)
    except OSError as error:
        raise KeyFileError(str(path), f"cannot be changed: {error.strerror}", "Change it where it is made.") from error


def public_keys(path: Path) -> list[Key]:
    """The public halves of all keys in a file, or in the own.pub of a keys folder. Raises KeyFileError."""
    keys = load(path / "own.pub" if path.is_dir() else path)
    return [Key(key.public, key.name, key.role, key.created) for key in keys]


def files_in(folder: Path) -> dict[str, str]:
    """The files of a keys folder by their path in it, as text: written elsewhere they are the same folder.

    Raises:
        KeyFileError: one of them is no file of keys.
    """
    paths = [path for name in ("own.pub", "server.pub") if (path := folder / name).exists()]
    files = {"own.key": read_own(folder / "own.key").text(secret=True)}
    for path in [*paths, *(path for _, path in authorized_files(folder))]:
        files[str(path.relative_to(folder))] = "".join(only_public(path, key).text() for key in load(path))
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
