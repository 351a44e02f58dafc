"""Provision of keys and tokens: missing ones of a cluster on Kubernetes, and the files of keys folders.

Existing keys and tokens are kept. A cluster's keys depend on each other: servers and proxies admit the keys of every
role, and every process dials theirs. A missing Secret is made with a new key, and the other Secrets get that key
*before* the new Secret exists:

    found      server  proxy  actor  learner  -         (the reader's Secret was deleted)
    first      authorized-reader.pub of server and proxy gets the new key below the present ones
    then       the reader's Secret is created

A Job that ends between two of these steps leaves a key without a holder, which is harmless, and begins again.

The other functions make and change keys folders: of a new cluster, of one key, and of admitted clients.
"""

from __future__ import annotations

import os
import re
import secrets as random_secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memoire.errors import KeyFileError, ParameterError
from memoire.replay.files import replace_file, sync

from .access import EXPECTED, read_lines
from .keys import Key, authorized_files, load, make, only_public, read_blocks, read_own, read_public
from .roles import ROLES

ADMITTED: Final = {
    "server": ("actor", "learner", "reader", "proxy", "server", "inference"),
    "proxy": ("actor", "learner", "reader", "proxy", "server", "inference"),
    "inference": ("actor", "learner", "reader", "server"),
}
"""Roles whose keys the listening nodes of a new cluster admit."""


def cluster_files(names: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """Return the files of a new cluster's keys folders: texts by role and by path in the role's folder.

    Args:
        names: Names of the keys by role; the default is the role's plural.
    """
    keys = {role: make(role, (names or {}).get(role, "")) for role in ROLES}
    return {role: _files(key, keys) for role, key in keys.items()}


def write_cluster(folder: Path) -> list[Path]:
    """Make a cluster's folder with new keys. Return the keys folders in it.

    Raises:
        KeyFileError: the folder is not empty; nothing was changed.
    """
    if folder.exists() and any(folder.iterdir()):
        advice = "Name a folder that does not exist yet, or give --role to make one more key."
        raise KeyFileError(str(folder), "is not empty: its keys stay as they are", advice)
    folders = []
    for role, files in cluster_files().items():
        folders.append(folder / role)
        for path, text in files.items():
            write_new(folder / role / path, text)
    return folders


def write_one(folder: Path, key: Key, servers: str = "") -> None:
    """Make a keys folder with one new key, and the public keys of servers to dial.

    Raises:
        KeyFileError: the folder has a key already; nothing was changed.
    """
    write_new(folder / "own.key", key.text(secret=True))
    write_new(folder / "own.pub", key.text())
    if servers:
        write_new(folder / "server.pub", servers)


def write_new(path: Path, text: str) -> None:
    """Write a new file, a secret readable only for its owner from the start. Raise KeyFileError if it exists."""
    mode = 0o600 if path.name == "own.key" else 0o644
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        sync(path.parent)
    except FileExistsError as error:
        advice = "Name another folder, or remove the old key first."
        raise KeyFileError(str(path), "exists already, and was not changed", advice) from error
    except OSError as error:
        raise KeyFileError(str(path), f"cannot be written: {error.strerror}", "Name a writable folder.") from error


def authorize(folder: Path, key: Key) -> Path:
    """Admit a key at the process of a keys folder, beside other keys of its role and name. Return the key's file."""
    path = folder / "authorized" / key.role / f"{key.name}.pub"
    present = read_public(path, key.role) if path.exists() else ()
    if all(key.public != other.public for other in present):
        _replace(path, [*present, key])
    return path


def revoke(folder: Path, which: str) -> list[Key]:
    """Remove the authorized keys with this fingerprint or this "role/name". Return the removed keys."""
    removed: list[Key] = []
    for role, path in authorized_files(folder):
        keys = read_public(path, role)
        kept = [key for key in keys if which not in (key.fingerprint, key.peer.principal)]
        if len(kept) != len(keys):
            removed += [key for key in keys if key not in kept]
            _replace(path, kept)
    return removed


def _replace(path: Path, keys: Iterable[Key]) -> None:
    """Replace a file of public keys, whole or not at all; without keys delete the file."""
    text = "".join(key.text() for key in keys)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if text:
            replace_file(path, text.encode("ascii"), mode=0o644)
        else:
            path.unlink()
            sync(path.parent)
    except OSError as error:
        raise KeyFileError(str(path), f"cannot be changed: {error.strerror}", "Change the original folder.") from error


def public_keys(path: Path) -> list[Key]:
    """Return the public halves of all keys in a file, or in the own.pub of a keys folder. Raise KeyFileError."""
    keys = load(path / "own.pub" if path.is_dir() else path)
    return [Key(key.public, key.name, key.role, key.created) for key in keys]


def files_in(folder: Path) -> dict[str, str]:
    """Return the files of a keys folder, texts by path. Copies of the files make the same folder elsewhere.

    Raises:
        KeyFileError: one of the files is not a file of keys.
    """
    paths = [path for name in ("own.pub", "server.pub") if (path := folder / name).exists()]
    files = {"own.key": read_own(folder / "own.key").text(secret=True)}
    for path in [*paths, *(path for _, path in authorized_files(folder))]:
        files[str(path.relative_to(folder))] = "".join(only_public(path, key).text() for key in load(path))
    return files


def secrets(name: str, keys: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Return keys as Kubernetes Secrets in YAML, one for each role; each Secret is mounted as a keys folder.

    Args:
        name: Prefix of the Secrets' names, NAME-ROLE.
        keys: Files of each role's keys folder; None makes those of a new cluster.
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
    """Return the files of a role's keys folder under their names in a Secret, which has no folders."""
    flat: dict[str, str] = {}
    for path, text in files.items():
        key = re.sub(r"^authorized/([a-z]+)/.*", r"authorized-\1.pub", path)
        flat[key] = flat.get(key, "") + text
    for other in ROLES if role in ADMITTED else ():
        # `kubectl apply` keeps a key of a Secret that stringData does not name, even a revoked key.
        flat.setdefault(f"authorized-{other}.pub", "# no keys\n")
    return flat


TOKENS = ("dashboard", "nodes")
"""Entries of a Secret with tokens: the dashboard's token, and the token of the nodes' pages."""
TOKEN_BYTES = 24
"""Random bytes of a new token, which has twice as many characters."""
LISTENING = tuple(ADMITTED)
"""Roles that other roles dial: the server.pub of every role has their keys."""

Files = Mapping[str, str]


@dataclass(frozen=True)
class SecretChange:
    """Change of a Secret: all files of a new one, or the changed files of an existing one."""

    name: str
    files: Files
    is_new: bool

    def __repr__(self) -> str:
        return f"Change({self.name!r}, {sorted(self.files)}, is_new={self.is_new})"  # the text shows no content


def missing_keys(found_files: Mapping[str, Files | None], prefix: str = "") -> list[SecretChange]:
    """Return the changes that complete the keys, in the order in which they must be written; none if no key is missing.

    Args:
        found_files: Files of each role's Secret; None for a missing Secret.
        prefix: Text before the role in the names of Secrets, for errors.

    Raises:
        KeyFileError: an existing Secret holds no keys of its role.
    """
    present = {role: own_key(role, files, prefix + role) for role, files in found_files.items() if files is not None}
    new = {role: make(role) for role in ROLES if role not in present}
    updates = [
        SecretChange(role, added, is_new=False)
        for role, files in found_files.items()
        if files is not None and (added := _additions(role, files, new))
    ]
    return updates + [
        SecretChange(role, secret_files(role, _files(key, present | new)), is_new=True) for role, key in new.items()
    ]


def own_key(role: str, files: Files, where: str, file: str = "own.key") -> Key:
    """Return the public half of a Secret's own key, from the file with both halves, or from `own.pub`.

    Raises:
        KeyFileError: the file has no key, or a key of another role.
    """
    try:
        keys = read_blocks(files.get(file, "").encode())
    except ValueError as error:
        raise KeyFileError(where, f"has an {file} that is not a file of keys: {error}", _ADVICE) from None
    if len(keys) != 1 or keys[0].role != role or (keys[0].secret is None) == (file == "own.key"):
        raise KeyFileError(where, f"has no {file} with one key of the role {role}", _ADVICE)
    return Key(keys[0].public, keys[0].name, keys[0].role, keys[0].created)


def missing_tokens(tokens: Files | None, where: str = "the Secret of tokens") -> Files:
    """Return new tokens for those that a Secret of tokens lacks; none if it has both.

    Raises:
        KeyFileError: a present token is malformed; `where` names the Secret.
    """
    for name, text in (tokens or {}).items():
        if name in TOKENS:
            check_tokens(text, f"{where} ({name})")
    return {name: random_secrets.token_hex(TOKEN_BYTES) for name in TOKENS if name not in (tokens or {})}


def check_tokens(text: str, where: str) -> None:
    """Raise KeyFileError for tokens that the nodes' pages would not accept.

    Raises:
        KeyFileError: there is no token, or one has a wrong length or wrong characters. The message does not repeat it.
    """
    try:
        read_lines(text, where)
    except ParameterError:
        advice = "Write a longer token there, such as the output of `openssl rand -hex 24`."
        raise KeyFileError(where, f"is not {EXPECTED}", advice) from None


_ADVICE = "Restore the Secret's content, or delete the Secret and install again: the chart then makes a new one."


def _additions(role: str, files: Files, new: Mapping[str, Key]) -> Files:
    """Return the files of an existing Secret with the new keys below the present ones."""
    return {
        name: text if not (former := files.get(name, "").rstrip("\n")) else f"{former}\n{text}"
        for name, text in _mentions(role, new.values())
    }


def _mentions(role: str, keys: Iterable[Key]) -> Iterator[tuple[str, str]]:
    """Yield each file of a role that names some of these keys, with their public halves."""
    dialled = "".join(key.text() for key in keys if key.role in LISTENING)
    if dialled:
        yield "server.pub", dialled
    for key in keys:
        if key.role in ADMITTED.get(role, ()):
            yield f"authorized-{key.role}.pub", key.text()


def _files(key: Key, keys: Mapping[str, Key]) -> dict[str, str]:
    """Return the files of the keys folder of one key, from the keys of all roles."""
    # keys that the process is likely to dial come first
    dialled = ("server", "proxy", "inference") if key.role == "proxy" else ("proxy", "server", "inference")
    files = {"own.key": key.text(secret=True), "own.pub": key.text()}
    files["server.pub"] = "".join(keys[role].text() for role in dialled)
    return files | {
        f"authorized/{role}/{keys[role].name}.pub": keys[role].text() for role in ADMITTED.get(key.role, ())
    }
