"""Roles of keys, and what each may do; how a proxy says whose message it passes on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from memoire.errors import ProtocolError
from memoire.wire import messages, types
from memoire.wire.frames import Buffer
from memoire.wire.identity import ROUNDTRIP, table_number
from memoire.wire.types import Type

ROLES: Final = ("actor", "server", "learner", "reader", "proxy", "inference")
"""What a key may be for; the place in this list is the number in a passport."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What a key may be called."""

_TRY: Final = frozenset({types.SUMS, types.DRAW})
_ROUNDTRIP: Final = table_number(ROUNDTRIP)
"""The table in which an actor may find what it pushed: for `memoire doctor`."""
_CALLS_ITSELF: Final = {
    "actor": {"actor", "prompts"},
    "reader": {"reader", "prompts"},
    "proxy": set[str](),
    "inference": {"inference"},
}
"""What a role may call itself in HELLO. Learners and servers may be anything, and everybody a doctor, or the relay of
those behind it: these two are nobody to a server."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who sent a message, as its key says."""

    role: str
    """One of `ROLES`; "" where the message came in without keys: then everything is allowed."""
    name: str

    @property
    def principal(self) -> str:
        """Role and name: what a client id is bound to. Keys with the same ones are the same to a server."""
        return f"{self.role}/{self.name}" if self.role else ""

    def check(self, kind: Type, table: int = 0) -> None:
        """Raise ProtocolError (code "role") where this peer may not send messages of this type about this table."""
        is_try = table == _ROUNDTRIP and self.role == "actor" and kind in _TRY
        if self.role and self.role not in kind.sent_by and not is_try:
            raise ProtocolError(
                "role", f"the key {self.name!r} is {article(self.role)}'s, which may not send {kind.name}"
            )

    def check_hello(self, hello: messages.Hello) -> None:
        """Raise ProtocolError (code "role") where this peer may not call itself what it does."""
        allowed = _CALLS_ITSELF.get(self.role)
        is_try = hello.table == ROUNDTRIP and self.role == "actor"
        if allowed is not None and not is_try and hello.role not in {"client", "doctor", "pages", "proxy", *allowed}:
            raise ProtocolError(
                "role", f"the key {self.name!r} is {article(self.role)}'s, and was used by {article(hello.role)}"
            )


OPEN: Final = Peer("", "")
"""Whoever comes in where no keys are asked for."""

PASSPORT_MAGIC: Final = b"MEMP"
_PASSPORT: Final = PASSPORT_MAGIC + b"\x01"


def passport(peer: Peer) -> bytes:
    """The frame in which a proxy says whose message it passes on."""
    return _PASSPORT + bytes([ROLES.index(peer.role)]) + peer.name.encode("ascii")


def is_passport(frame: Buffer) -> bool:
    """Whether a frame is meant to be one."""
    return len(frame) >= 4 and bytes(memoryview(frame)[:4]) == PASSPORT_MAGIC


def read_passport(frame: Buffer) -> Peer:
    """Who sent a message that a proxy passed on. Raises ProtocolError (code "passport") and nothing else."""
    said = bytes(memoryview(frame)[:128])
    name = said[6:].decode("ascii", "replace")
    if said[:5] != _PASSPORT or len(said) < 7 or said[5] >= len(ROLES) or not NAME.fullmatch(name):
        raise ProtocolError("passport", "a proxy passed a message on without saying whose it is")
    return Peer(ROLES[said[5]], name)


def article(role: str) -> str:
    """The role with its article, for sentences."""
    return f"an {role}" if role[:1] in "aeiou" else f"a {role}"
