"""Which keys and tokens a cluster on Kubernetes lacks, and what its Secrets become: what is there is kept.

A cluster's keys are one web: servers and proxies let every role's key in, and everybody dials theirs. So one Secret
that is missing is made with a new key, and the others learn of that key *before* the Secret is there:

    found      server  proxy  actor  learner  -         (somebody deleted the reader's)
    first      authorized-reader.pub of server and proxy gets the new key below the ones that it has
    then       the reader's Secret is created

A Job that ends between two of these steps leaves a key that nobody has, which harms nobody, and begins again.

Keys folders as they are made and changed: of a new cluster, of one key, and who may come in.
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
"""Roles whose keys a new cluster's listening nodes let in."""


def cluster_files(names: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """The files of a new cluster's keys folders: by role, by path in its folder, their text.

    Args:
        names: Of keys, by role; by default the role's plural.
    """
    keys = {role: make(role, (names or {}).get(role, "")) for role in ROLES}
    return {role: _files(key, keys) for role, key in keys.items()}


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


TOKENS = ("dashboard", "nodes")
"""What a Secret with tokens has: the dashboard's, and the one that the nodes' pages ask for."""
TOKEN_BYTES = 24
"""Random bytes of a new token, which are twice as many characters."""
LISTENING = tuple(ADMITTED)
"""Roles that others dial: everybody's server.pub has their keys."""

Files = Mapping[str, str]


@dataclass(frozen=True)
class SecretChange:
    """A Secret that has to be written: with all of its files, or with those that are other than they were."""

    name: str
    files: Files
    is_new: bool

    def __repr__(self) -> str:
        return f"Change({self.name!r}, {sorted(self.files)}, is_new={self.is_new})"  # never what is in them


def missing_keys(found: Mapping[str, Files | None], prefix: str = "") -> list[SecretChange]:
    """What makes the keys whole, in the order in which it has to be written; nothing where none is missing.

    Args:
        found: The files of each role's Secret, None where there is no such Secret.
        prefix: What stands before the role in the names of Secrets, in errors.

    Raises:
        KeyFileError: a Secret that is there holds no keys of its role.
    """
    own = {role: own_key(role, files, prefix + role) for role, files in found.items() if files is not None}
    new = {role: make(role) for role in ROLES if role not in own}
    told = [
        SecretChange(role, added, is_new=False)
        for role, files in found.items()
        if files is not None and (added := _additions(role, files, new))
    ]
    return told + [
        SecretChange(role, secret_files(role, _files(key, own | new)), is_new=True) for role, key in new.items()
    ]


def own_key(role: str, files: Files, where: str, file: str = "own.key") -> Key:
    """The public half of a Secret's own key, from the file that has both halves, or from `own.pub`.

    Raises:
        KeyFileError: there is none, or it is of another role.
    """
    try:
        keys = read_blocks(files.get(file, "").encode())
    except ValueError as error:
        raise KeyFileError(where, f"has an {file} that is no file of keys: {error}", _ADVICE) from None
    if len(keys) != 1 or keys[0].role != role or (keys[0].secret is None) == (file == "own.key"):
        raise KeyFileError(where, f"has no {file} with one key of the role {role}", _ADVICE)
    return Key(keys[0].public, keys[0].name, keys[0].role, keys[0].created)


def missing_tokens(found: Files | None, where: str = "the Secret of tokens") -> Files:
    """New tokens for what a Secret of tokens lacks; nothing where it has both.

    Raises:
        KeyFileError: a token that is there is none; `where` names the Secret.
    """
    for name, text in (found or {}).items():
        if name in TOKENS:
            check_tokens(text, f"{where} ({name})")
    return {name: random_secrets.token_hex(TOKEN_BYTES) for name in TOKENS if name not in (found or {})}


def check_tokens(text: str, where: str) -> None:
    """Refuse tokens that the pages would not take.

    Raises:
        KeyFileError: one is too short or too long, or there is none; it is not repeated.
    """
    try:
        read_lines(text, where)
    except ParameterError:
        advice = "Write longer ones there, such as of `openssl rand -hex 24`."
        raise KeyFileError(where, f"is not {EXPECTED}", advice) from None


_ADVICE = "Put back what was there, or delete it and install again: what the chart makes, it makes again."


def _additions(role: str, files: Files, new: Mapping[str, Key]) -> Files:
    """Files of a Secret that is there, with the new keys below those that it has."""
    return {
        name: text if not (former := files.get(name, "").rstrip("\n")) else f"{former}\n{text}"
        for name, text in _mentions(role, new.values())
    }


def _mentions(role: str, keys: Iterable[Key]) -> Iterator[tuple[str, str]]:
    """Each file of a role that names some of these keys, with their public halves."""
    dialled = "".join(key.text() for key in keys if key.role in LISTENING)
    if dialled:
        yield "server.pub", dialled
    for key in keys:
        if key.role in ADMITTED.get(role, ()):
            yield f"authorized-{key.role}.pub", key.text()


def _files(key: Key, keys: Mapping[str, Key]) -> dict[str, str]:
    """The files of the keys folder of one of these keys, which are those of each role."""
    # first those that it is likely to dial
    dialled = ("server", "proxy", "inference") if key.role == "proxy" else ("proxy", "server", "inference")
    files = {"own.key": key.text(secret=True), "own.pub": key.text()}
    files["server.pub"] = "".join(keys[role].text() for role in dialled)
    return files | {
        f"authorized/{role}/{keys[role].name}.pub": keys[role].text() for role in ADMITTED.get(key.role, ())
    }
