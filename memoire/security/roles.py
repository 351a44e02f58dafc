"""Roles of keys and their permissions, limits on new clients, and routing envelopes of requests. Pure.

`TokenBuckets` limits the rate of new clients: so many at once, and then so many a second. Time is passed in:

    left   1024 ──take──▶ 1023 ... 0 refused      one second later: `rate` more are left, up to `burst`

The buckets have no lifetime total, so every client gets in after some time. Not thread-safe: the owner locks.

`RoutedMessage` parts a request or reply from the addresses of the connections that it came by:

at the server    [proxy's, relay's, client's, empty, message, payload]
at the proxy             [relay's, client's, empty, message, payload]     each hop adds an address in front

A *passport* is the frame in which a proxy names the sender of a message that it forwards.
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
"""Buckets that are remembered. The longest unused one is forgotten, and is full again: that harms no peer."""
MAX_CONNECTIONS = 1 << 14
"""Connections whose clients are remembered. A client of a forgotten one takes a token again, or is refused ("busy")."""
MAX_OWNERS = 1 << 16
"""Client ids whose keys are remembered; one key may have half of these ids."""
OWNER_TIMEOUT = 600.0
"""Seconds without a message after which the key of an id may be forgotten."""


class TokenBuckets:
    """Bucket of tokens for each key, which fills up over time.

    Args:
        burst: Tokens in a full bucket.
        rate: Tokens that are added per second.
    """

    def __init__(self, burst: int, rate: float, *, most: int = MAX_BUCKETS) -> None:
        self.burst, self.rate, self._most = burst, rate, most
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # (tokens, time of the count)

    def take(self, key: Hashable, now: float) -> bool:
        """Take a token. Return False if the bucket is empty."""
        tokens = self.available(key, now)
        is_taken = tokens >= 1.0
        self._buckets[key] = tokens - is_taken, now
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return is_taken

    def available(self, key: Hashable, now: float) -> float:
        """Return the number of tokens in a bucket. A clock that goes back adds none."""
        tokens, then = self._buckets.get(key, (float(self.burst), now))
        return min(float(self.burst), tokens + max(0.0, now - then) * self.rate)

    def fewest_tokens(self, now: float) -> float:
        """Return the number of tokens in the emptiest bucket."""
        return min((self.available(key, now) for key in self._buckets), default=float(self.burst))


class ConnectionClients:
    """Clients of each connection: a connection may bring `burst` clients at once, and `rate` more a second.

    An actor's connection brings one client. A connection with made-up ids is stopped before anything is stored.
    """

    def __init__(self, burst: int, rate: float, *, most: int = MAX_CONNECTIONS) -> None:
        self._tokens = TokenBuckets(burst, rate, most=most)
        self._known: OrderedDict[bytes, OrderedDict[bytes, None]] = OrderedDict()
        self._most = most

    def check(self, connection: bytes, client: bytes, now: float) -> None:
        """Admit a client on a connection.

        Raises:
            ProtocolError: (code "busy") the connection has brought too many clients at once.
        """
        if not self._admits(connection, client, now):
            burst, rate = self._tokens.burst, self._tokens.rate
            text = f"this connection brought {burst} clients (connection_clients); {rate:g} more may come per second"
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
    """Keys of client ids: no other key may send messages of these clients."""

    def __init__(self) -> None:
        self._ids: Counter[str] = Counter()  # number of client ids by key
        self._owners: PeerTable[bytes, str] = PeerTable("client ids", MAX_OWNERS, OWNER_TIMEOUT, self._forget)

    def check(self, client: bytes, principal: str, now: float) -> None:
        """Bind a client id to the first key that uses it.

        Raises:
            ProtocolError: the id belongs to another key (code "owner"), or too many ids are known (code "busy").
        """
        owner = self._owners.look_up(client, now)
        if owner is not None:
            check_owner(client, owner, principal)
            return
        if self._ids[principal] >= MAX_OWNERS // 2:
            self._owners.expire(now)
            if self._ids[principal] >= MAX_OWNERS // 2:
                text = f"the key {principal} has {MAX_OWNERS // 2} client ids here, the limit of one key. Try "
                raise ProtocolError("busy", f"{text}again: an id without messages for {OWNER_TIMEOUT:g} s leaves")
        self._owners.put(client, principal, now)
        self._ids[principal] += 1

    def pop(self, client: bytes) -> str:
        """Forget a client id. Return its key, or "" if the id is unknown."""
        owner = self._owners.pop(client)
        if owner is not None:
            self._forget(client, owner)
        return owner or ""

    def _forget(self, _: bytes, owner: str) -> None:
        self._ids[owner] -= 1
        if not self._ids[owner]:
            del self._ids[owner]


def check_owner(client: bytes, owner: str, principal: str) -> None:
    """Raise ProtocolError (code "owner") if a client id belongs to another key than `principal`."""
    if owner != principal:
        raise ProtocolError("owner", f"client {client.hex()[:8]} belongs to the key {owner}, not to {principal}")


ROLES: Final = ("actor", "server", "learner", "reader", "proxy", "inference")
"""Roles of keys; the place in this tuple is the number in a passport."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Pattern of a key's name."""

_TRY: Final = frozenset({types.SUMS, types.DRAW})
_ROUNDTRIP: Final = table_number(ROUNDTRIP)
"""Number of the table of `memoire doctor`, from which an actor may draw what it pushed."""
_CALLS_ITSELF: Final = {
    "actor": {"actor", "prompts", "keyed"},
    "reader": {"reader", "prompts", "keyed"},
    "proxy": set[str](),
    "inference": {"inference"},
}
"""Roles that the holder of a key may name in HELLO. Learners and servers may name any role. Every key may name doctor
and proxy (a relay), which have no state at a server."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Sender of a message, as its key names it."""

    role: str
    """Role of the key, one of `ROLES`; "" for a message without keys, which may do everything."""
    name: str

    @property
    def principal(self) -> str:
        """Role and name, to which client ids are bound. Keys with equal role and name are the same to a server."""
        return f"{self.role}/{self.name}" if self.role else ""

    def check(self, kind: Type, table: int = 0) -> None:
        """Raise ProtocolError (code "role") if this peer may not send messages of this type about this table."""
        is_try = table == _ROUNDTRIP and self.role == "actor" and kind in _TRY
        if self.role and self.role not in kind.sent_by and not is_try:
            raise ProtocolError(
                "role", f"the key {self.name!r} is for {article(self.role)}, which may not send {kind.name}"
            )

    def check_hello(self, hello: messages.Hello) -> None:
        """Raise ProtocolError (code "role") if this peer may not name the role in its HELLO."""
        allowed = _CALLS_ITSELF.get(self.role)
        is_try = hello.table == ROUNDTRIP and self.role == "actor"
        if allowed is not None and not is_try and hello.role not in {"client", "doctor", "pages", "proxy", *allowed}:
            raise ProtocolError(
                "role", f"the key {self.name!r} is for {article(self.role)}, but {article(hello.role)} used it"
            )


OPEN: Final = Peer("", "")
"""Peer of every message at a node without keys."""

PASSPORT_MAGIC: Final = b"MEMP"
_PASSPORT: Final = PASSPORT_MAGIC + b"\x01"


def passport_frame(peer: Peer) -> bytes:
    """Return the frame in which a proxy names the sender of a message that it forwards."""
    return _PASSPORT + bytes([ROLES.index(peer.role)]) + peer.name.encode("ascii")


def is_passport(frame: Buffer) -> bool:
    """Return True if a frame begins like a passport."""
    return len(frame) >= 4 and bytes(memoryview(frame)[:4]) == PASSPORT_MAGIC


def read_passport(frame: Buffer) -> Peer:
    """Return the sender of a forwarded message. Raise ProtocolError (code "passport") and no other error."""
    data = bytes(memoryview(frame)[:128])
    name = data[6:].decode("ascii", "replace")
    if data[:5] != _PASSPORT or len(data) < 7 or data[5] >= len(ROLES) or not NAME.fullmatch(name):
        raise ProtocolError("passport", "a proxy forwarded a message without a valid passport of its sender")
    return Peer(ROLES[data[5]], name)


def article(role: str) -> str:
    """Return the role with its article, for sentences."""
    return f"an {role}" if role[:1] in "aeiou" else f"a {role}"


class RoutedMessage(NamedTuple):
    """Request or reply, split into envelope and message."""

    envelope: list[Buffer]
    """Addresses of the receivers of the answer, and an empty frame."""
    message: list[Buffer]
    """Frames of the message itself."""


def split_envelope(frames: Sequence[Buffer]) -> RoutedMessage | None:
    """Split frames at the first empty frame. Return None if there is no empty frame.

    Addresses become `bytes`: sending those, as often as needed, costs less than sending ZeroMQ's frames.
    """
    for place, frame in enumerate(frames):
        if not len(frame):
            return RoutedMessage([bytes(each) for each in frames[: place + 1]], list(frames[place + 1 :]))
    return None


class EnvelopedRequest(NamedTuple):
    """Received request with its sender."""

    peer: Peer
    envelope: list[Buffer]
    message: list[Buffer]
    is_first: bool
    """True if no proxy has admitted the request before."""

    @property
    def frames(self) -> list[Buffer]:
        """Envelope and message together, to forward them."""
        return [*self.envelope, *self.message]
