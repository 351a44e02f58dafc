"""How many newcomers are let in: so many at once, and after that so many a second. Pure: time is passed in.

    left   1024 ──take──▶ 1023 ... 0 refused      one second later: `rate` more are left, up to `burst`

There is no lifetime total: whoever waits gets in. Not thread-safe: the owner locks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable

from memoire.errors import ProtocolError
from memoire.wire.byte_budget import PeerTable

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
