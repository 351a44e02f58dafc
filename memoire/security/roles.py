"""How many newcomers are let in: so many at once, and after that so many a second. Pure: time is passed in.

    left   1024 ──take──▶ 1023 ... 0 refused      one second later: `rate` more are left, up to `burst`

There is no lifetime total: whoever waits gets in. Not thread-safe: the owner locks.

Requests and replies on their way, with the addresses of the connections that they came by. Pure.

at the server    [proxy's, relay's, client's, empty, message, payload]
at the proxy             [relay's, client's, empty, message, payload]     each hop puts one in front

Roles of keys, and what each may do; how a proxy says whose message it passes on.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from memoire.errors import ProtocolError
from memoire.wire import messages, types
from memoire.wire.byte_budget import PeerTable
from memoire.wire.frames import ROUNDTRIP, Buffer, table_number
from memoire.wire.types import Type

MAX_BUCKETS = 1 << 16
"""Keys that are remembered. The one that took nothing for longest gets a full bucket again: that harms no peer."""
MAX_CONNECTIONS = 1 << 14
"""Connections whose clients are remembered. A client of a forgotten one takes a token again, or is refused ("busy")."""
MAX_OWNERS = 1 << 16
"""Client ids that are known to belong to a key; one key may have half of them."""
OWNER_TIMEOUT = 600.0
"""Seconds without a message after which the owner of an id may be forgotten."""


class TokenBuckets:
    """A bucket of tokens for each key, which fills up by itself.

    Args:
        burst: Tokens in a full bucket.
        rate: Tokens that come back a second.
    """

    def __init__(self, burst: int, rate: float, *, most: int = MAX_BUCKETS) -> None:
        self.burst, self.rate, self._most = burst, rate, most
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # tokens, and when there were so many

    def take(self, key: Hashable, now: float) -> bool:
        """Take a token; False where none is left."""
        tokens = self.left(key, now)
        is_taken = tokens >= 1.0
        self._buckets[key] = tokens - is_taken, now
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return is_taken

    def left(self, key: Hashable, now: float) -> float:
        """Tokens that are left. A clock that goes back brings none."""
        tokens, then = self._buckets.get(key, (float(self.burst), now))
        return min(float(self.burst), tokens + max(0.0, now - then) * self.rate)

    def least(self, now: float) -> float:
        """Tokens in the bucket with the fewest."""
        return min((self.left(key, now) for key in self._buckets), default=float(self.burst))


class ConnectionClients:
    """Which clients speak over which connection: a connection may bring `burst` of them, and `rate` more a second.

    An actor's connection brings one client. One that makes up ids is stopped here, before anything is kept for them.
    """

    def __init__(self, burst: int, rate: float, *, most: int = MAX_CONNECTIONS) -> None:
        self._tokens = TokenBuckets(burst, rate, most=most)
        self._known: OrderedDict[bytes, OrderedDict[bytes, None]] = OrderedDict()
        self._most = most

    def check(self, connection: bytes, client: bytes, now: float) -> None:
        """Let a client speak over this connection.

        Raises:
            ProtocolError: (code "busy") the connection has brought too many clients at once.
        """
        if not self._admits(connection, client, now):
            burst, rate = self._tokens.burst, self._tokens.rate
            text = f"this connection has brought {burst} clients (connection_clients); {rate:g} more may come a second"
            raise ProtocolError("busy", text)

    def _admits(self, connection: bytes, client: bytes, now: float) -> bool:
        known = self._known.setdefault(connection, OrderedDict())
        self._known.move_to_end(connection)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        if client not in known:
            if not self._tokens.take(connection, now):
                return False
            known[client] = None
            if len(known) > self._tokens.burst:
                known.popitem(last=False)
        return True


class IdOwners:
    """Keys that client ids belong to: nobody else may speak for them."""

    def __init__(self) -> None:
        self._ids: Counter[str] = Counter()  # of each key
        self._owners: PeerTable[bytes, str] = PeerTable("client ids", MAX_OWNERS, OWNER_TIMEOUT, self._forget)

    def check(self, client: bytes, principal: str, now: float) -> None:
        """Bind a client id to the key that uses it first.

        Raises:
            ProtocolError: it belongs to another key (code "owner"), or too many ids are known (code "busy").
        """
        owner = self._owners.hear(client, now)
        if owner is not None:
            check_owner(client, owner, principal)
            return
        if self._ids[principal] >= MAX_OWNERS // 2:
            self._owners.expire(now)
            if self._ids[principal] >= MAX_OWNERS // 2:
                text = f"{MAX_OWNERS // 2} client ids of the key {principal} are known here, the most of one key. Ask "
                raise ProtocolError("busy", f"{text}again: one that is not heard for {OWNER_TIMEOUT:g} s leaves")
        self._owners.put(client, principal, now)
        self._ids[principal] += 1

    def pop(self, client: bytes) -> str:
        """Forget an id; returns the key that it belongs to, "" if that is not known."""
        owner = self._owners.pop(client)
        if owner is not None:
            self._forget(client, owner)
        return owner or ""

    def _forget(self, _: bytes, owner: str) -> None:
        self._ids[owner] -= 1
        if not self._ids[owner]:
            del self._ids[owner]


def check_owner(client: bytes, owner: str, principal: str) -> None:
    """Raise ProtocolError (code "owner") if a client id belongs to another key than this one."""
    if owner != principal:
        raise ProtocolError("owner", f"client {client.hex()[:8]} belongs to the key {owner}, not {principal}")


ROLES: Final = ("actor", "server", "learner", "reader", "proxy", "inference")
"""What a key may be for; the place in this list is the number in a passport."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What a key may be called."""

_TRY: Final = frozenset({types.SUMS, types.DRAW})
_ROUNDTRIP: Final = table_number(ROUNDTRIP)
"""The table in which an actor may find what it pushed: for `memoire doctor`."""
_CALLS_ITSELF: Final = {
    "actor": {"actor", "prompts", "keyed"},
    "reader": {"reader", "prompts", "keyed"},
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


class RoutedMessage(NamedTuple):
    """A request or reply whose parts were told apart."""

    envelope: list[Buffer]
    """Addresses of those who are to get the answer, and an empty frame."""
    message: list[Buffer]
    """The message itself."""


def opened(frames: Sequence[Buffer]) -> RoutedMessage | None:
    """Envelope and message, which the first empty frame parts; None where there is none.

    Addresses are `bytes` from here on: to send those, as often as needed, costs less than frames of ZeroMQ's.
    """
    for place, frame in enumerate(frames):
        if not len(frame):
            return RoutedMessage([bytes(each) for each in frames[: place + 1]], list(frames[place + 1 :]))
    return None


class EnvelopedRequest(NamedTuple):
    """A request as it came in, and whose it is."""

    peer: Peer
    envelope: list[Buffer]
    message: list[Buffer]
    is_first: bool
    """Whether no proxy has let it in before."""

    @property
    def frames(self) -> list[Buffer]:
        """Envelope and message, to be handed on."""
        return [*self.envelope, *self.message]
