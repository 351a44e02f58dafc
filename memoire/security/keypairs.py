"""One key: its two halves, and its text in a file. Nothing is read or written here."""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.utils.z85 import decode, encode

from .permissions import NAME, ROLES, Peer

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
