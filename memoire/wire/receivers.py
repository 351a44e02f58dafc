"""Size limits of replies for each receiver, which HELLO declares, and pages of rows within the limits. Pure.

rows up to half of the limit     one page, and the key after which the next page begins
one row beyond half of it        a page of this row alone, if the limit allows it
else                             REFUSED too_large, before anything has changed; no client repeats the request
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from memoire.errors import ProtocolError
from memoire.limits import Limits

from . import frames, types
from .byte_budget import PeerTable
from .messages import Body, Hello
from .types import Type

MAX_RECEIVERS: Final = 1 << 16
"""Peers with limits other than the default that a node keeps."""
IDLE_TIMEOUT: Final = 600.0
"""Seconds without a reply after which the limits of a peer may be evicted."""
ROW_PART: Final = 0.75
"""Fraction of a tail that one row may take; the tail's other fields share the remaining bytes."""
MAX_ROWS: Final = 1 << 16
"""Most rows of one page: no list of rows in a tail may be longer."""
CHECKED_TAIL: Final = 128
"""Tails of more bytes than this have the lengths of their lists compared with the bounds; shorter tails cannot exceed
a bound that counts.
"""
_SUMS: Final = frozenset({types.SUMMED, types.DRAWN})  # one field holds all rows; the tail's bytes bound it
_DEFAULTS: Final = Limits()


class ReplyLimits(NamedTuple):
    """Size limits of replies to one peer, in bytes: the sizes of the `Limits` that the peer was created with."""

    message_bytes: int = _DEFAULTS.message_bytes
    request_bytes: int = _DEFAULTS.tuning.request_bytes
    tail_bytes: int = _DEFAULTS.tuning.tail_bytes

    @classmethod
    def from_hello(cls, takes: Mapping[str, int]) -> ReplyLimits:
        """Return the limits in a HELLO's field `takes`; a limit that is missing has its default."""
        return cls(**{name: takes[name] for name in cls._fields if name in takes})

    @classmethod
    def with_limits(cls, limits: Limits) -> ReplyLimits:
        """Return the limits of a peer that was created with this `Limits`."""
        return cls(int(limits.message_bytes), limits.tuning.request_bytes, limits.tuning.tail_bytes)

    def within(self, limits: Limits) -> ReplyLimits:
        """Return the limits of a peer behind a proxy with this `Limits`: of each limit the lower value."""
        return ReplyLimits(*map(min, self, ReplyLimits.with_limits(limits)))

    @property
    def declared_limits(self) -> dict[str, int]:
        """Limits that differ from the default, for the field `takes` of HELLO."""
        return {
            name: value
            for name, value, default in zip(self._fields, self, ReplyLimits(), strict=True)
            if value != default
        }

    def payload_bytes(self, kind: Type) -> tuple[int, str]:
        """Return the most payload bytes of a message of this type, and the name of the limit."""
        if kind.large:
            return self.message_bytes, "message_bytes"
        return self.request_bytes, "request_bytes"

    def check(self, client: bytes, body: Body, sent: Sequence[Any]) -> None:
        """Raise ProtocolError (code "too_large") if the frames `sent` of a reply to `client` exceed these limits."""
        tail = len(sent[0]) - frames.HEADER_BYTES
        if tail > self.tail_bytes:
            raise too_large(f"{body.type.name}, whose tail", tail, self.tail_bytes, "tail_bytes", client)
        most, limit = self.payload_bytes(body.type)
        if len(sent) > 1 and (size := memoryview(sent[1]).nbytes) > most:
            raise too_large(f"{body.type.name}, whose payload", size, most, limit, client)
        if tail > CHECKED_TAIL and body.type not in _SUMS:
            frames.check_bounds(body.type, sent[0])


class Receivers:
    """Reply limits of a node's clients. Clients with the default limits are not kept.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._default = clock, ReplyLimits()
        self._others: PeerTable[bytes, ReplyLimits] = PeerTable(
            "clients that take other sizes than the default", MAX_RECEIVERS, IDLE_TIMEOUT
        )

    def register_hello(self, client: bytes, hello: Hello) -> None:
        """Register the limits in a client's HELLO. Raises ProtocolError, as `register`."""
        self.register(client, ReplyLimits.from_hello(hello.takes))

    def register(self, client: bytes, receiver: ReplyLimits) -> None:
        """Keep the limits of a client from now on.

        Raises:
            ProtocolError: (code "busy") the table is full of other clients.
        """
        if receiver == self._default:
            self._others.pop(client)
        else:
            self._others.put(client, receiver, self._clock())

    def limits_of(self, client: bytes) -> ReplyLimits:
        """Return the limits of a client: the default if none are registered."""
        if not len(self._others):
            return self._default
        return self._others.look_up(client, self._clock()) or self._default


class ReplyPage:
    """Room for the rows of one reply: half of the receiver's limits on tail and payload.

    Args:
        client: Id of the receiver, for the refusal.
        payload_bytes: Most bytes of payload, if half of the receiver's limit is more.
    """

    def __init__(self, receiver: ReplyLimits, kind: Type, client: bytes, *, payload_bytes: int | None = None) -> None:
        self._client, self._kind = client, kind
        self._most_tail, (self._most_payload, self._limit) = receiver.tail_bytes, receiver.payload_bytes(kind)
        half = self._most_payload // 2
        self.tail_room = self._most_tail // 2
        """Bytes of the tail that further rows may take."""
        self._payload_bytes = half if payload_bytes is None else min(half, payload_bytes)
        self._payload_room = self._payload_bytes
        self._rows = 0

    @property
    def is_empty(self) -> bool:
        """True if the page has no row yet: the first row may take all of the payload's limit."""
        return not self._rows

    @property
    def most_payload(self) -> int:
        """Receiver's limit on the payload, in bytes."""
        return self._most_payload

    @property
    def payload_room(self) -> int:
        """Bytes of payload that further rows may take."""
        return max(0, self._payload_room)

    def count_row(self, what: str, row: Any = None, payload: int = 0) -> bool:
        """Count a row and its part of the payload if row and part fit into the page; return True if they do.

        Args:
            what: Name of the row in a refusal.
            row: Fields of the row in the tail; None if the tail has none.
            payload: Bytes of the row in the payload.

        Raises:
            ProtocolError: (code "too_large") the row fits into no reply to this receiver.
        """
        tail = 0 if row is None else frames.encoded_bytes(row)
        if tail > self.tail_room or payload > self._payload_room or self._rows == MAX_ROWS:
            if self._rows:
                return False
            if tail > self._most_tail * ROW_PART:
                text = f"{self._kind.name} with {what}, whose row"
                raise too_large(text, tail, int(self._most_tail * ROW_PART), "tail_bytes", self._client)
            if payload > self._most_payload:
                text = f"{self._kind.name} with {what}, whose payload"
                raise too_large(text, payload, self._most_payload, self._limit, self._client)
        self._rows += 1
        self.tail_room -= tail
        self._payload_room -= payload
        return True

    def may_expand(self, packed: Mapping[int, tuple[int, bytes]], size: int) -> bool:
        """Return True if the receiver has room for these compressed blocks of a container and their raw bytes.

        Args:
            packed: Number of each block -> (codec, bytes).
            size: Bytes of the container without compression.
        """
        return size + sum(len(data) for _, data in packed.values()) <= self._most_payload

    def too_large_refusal(self, what: str, payload: int) -> ProtocolError:
        """Return the refusal of a reply without pages, whose payload would need `payload` further bytes."""
        half = self._payload_bytes - self._payload_room + payload
        text = f"{self._kind.name} of {what}, which without pages"
        return too_large(text, half, self._payload_bytes, self._limit, self._client)


def too_large(what: str, size: int, most: int, limit: str, client: bytes) -> ProtocolError:
    """Return the refusal of a reply whose size exceeds the client's limit; the text says what to do."""
    text = (
        f"a reply of {what} takes {size} bytes; client {client.hex()[:8]} has room for {most} ({limit}). Request less "
        f"at once, or create the client, and the proxies before it, with a larger Limits({limit}=...)"
    )
    return ProtocolError("too_large", text)


def hello_with_limits(hello: Hello, limits: Limits) -> Hello:
    """Return a HELLO that declares its sender's limits."""
    return _with_takes(hello, ReplyLimits.with_limits(limits))


def proxied_hello(hello: Hello, limits: Limits) -> Hello:
    """Return a HELLO as a proxy forwards it, with the lower limits of client and proxy: replies pass the proxy."""
    return _with_takes(hello, ReplyLimits.from_hello(hello.takes).within(limits))


def _with_takes(hello: Hello, receiver: ReplyLimits) -> Hello:
    takes = receiver.declared_limits
    return msgspec.structs.replace(hello, takes=takes) if takes != hello.takes else hello
