"""Which keys and tokens a cluster on Kubernetes lacks, and what its Secrets become: what is there is kept.

A cluster's keys are one web: servers and proxies let every role's key in, and everybody dials theirs. So one Secret
that is missing is made with a new key, and the others learn of that key *before* the Secret is there:

    found      server  proxy  actor  learner  -         (somebody deleted the reader's)
    first      authorized-reader.pub of server and proxy gets the new key below the ones that it has
    then       the reader's Secret is created

A Job that ends between two of these steps leaves a key that nobody has, which harms nobody, and begins again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from memoire.errors import KeyFileError, ParameterError

from .key_writer import ADMITTED, secret_files
from .keypairs import Key, make, read_blocks
from .permissions import ROLES
from .tokens import EXPECTED, read_lines

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
    public = {role: key.text() for role, key in (own | new).items()}
    told = [
        SecretChange(role, added, is_new=False)
        for role, files in found.items()
        if files is not None and (added := _additions(role, files, new))
    ]
    return told + [SecretChange(role, _files(key, public), is_new=True) for role, key in new.items()]


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
    return {name: secrets.token_hex(TOKEN_BYTES) for name in TOKENS if name not in (found or {})}


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


def _files(key: Key, public: Files) -> Files:
    """The files of a new Secret, when `public` has the public half of every role's key."""
    files = {"own.key": key.text(secret=True), "own.pub": key.text()}
    # first those that it is likely to dial
    dialled = ("server", "proxy", "inference") if key.role == "proxy" else ("proxy", "server", "inference")
    files["server.pub"] = "".join(public[role] for role in dialled)
    files |= {f"authorized/{role}/own.pub": public[role] for role in ADMITTED.get(key.role, ())}
    return secret_files(key.role, files)
