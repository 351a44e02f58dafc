"""What peers take in one reply: HELLO says it, and replies are made in pages, or refused, by it. Pure.

fits into half of it       a page: rows until then, and where the next page begins
one row is more than that  it goes alone, if it fits
else                       REFUSED too_large, before anything has changed. It is final: no client asks that again
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
"""Peers that are known to take something else than others do."""
IDLE_TIMEOUT: Final = 600.0
"""Seconds without a reply after which such a peer may be forgotten."""
ROW_PART: Final = 0.75
"""Part of a tail that one row may take: the rest is for the tail's other fields."""
MAX_ROWS: Final = 1 << 16
"""Rows of one page: no list of rows in a tail may be longer."""
CHECKED_TAIL: Final = 128
"""Bytes of a tail from which on the lengths of its lists are compared with their bounds: what is shorter cannot be
beyond one that counts.
"""
_SUMS: Final = frozenset({types.SUMMED, types.DRAWN})  # their rows are one field, which the tail's bytes bound
_DEFAULTS: Final = Limits()


class Receiver(NamedTuple):
    """Bytes that a peer takes of a reply: those of `Limits` that it was made with."""

    message_bytes: int = _DEFAULTS.message_bytes
    request_bytes: int = _DEFAULTS.tuning.request_bytes
    tail_bytes: int = _DEFAULTS.tuning.tail_bytes

    @classmethod
    def of(cls, said: Mapping[str, int]) -> Receiver:
        """What a HELLO said of its sender; a field that it does not name is the default."""
        return cls(**{name: said[name] for name in cls._fields if name in said})

    @classmethod
    def with_limits(cls, limits: Limits) -> Receiver:
        """A peer that was made with these limits."""
        return cls(int(limits.message_bytes), limits.tuning.request_bytes, limits.tuning.tail_bytes)

    def within(self, limits: Limits) -> Receiver:
        """A peer that is reached through a proxy with these limits: the lower ones of both."""
        return Receiver(*map(min, self, Receiver.with_limits(limits)))

    @property
    def takes(self) -> dict[str, int]:
        """HELLO's field: what differs from the default."""
        return {
            name: value for name, value, default in zip(self._fields, self, Receiver(), strict=True) if value != default
        }

    def payload_bytes(self, kind: Type) -> tuple[int, str]:
        """Bytes of the payload of such a message, and the limit's name."""
        if kind.large:
            return self.message_bytes, "message_bytes"
        return self.request_bytes, "request_bytes"

    def check(self, client: bytes, body: Body, sent: Sequence[Any]) -> None:
        """Raise ProtocolError (code "too_large") if the frames of a reply are not taken there."""
        tail = len(sent[0]) - frames.HEADER_BYTES
        if tail > self.tail_bytes:
            raise too_large(f"{body.type.name}, whose tail", tail, self.tail_bytes, "tail_bytes", client)
        most, limit = self.payload_bytes(body.type)
        if len(sent) > 1 and (size := memoryview(sent[1]).nbytes) > most:
            raise too_large(f"{body.type.name}, whose payload", size, most, limit, client)
        if tail > CHECKED_TAIL and body.type not in _SUMS:
            frames.check_bounds(body.type, sent[0])


class Receivers:
    """What the clients of a node take. Those that take the default are not kept.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._default = clock, Receiver()
        self._others: PeerTable[bytes, Receiver] = PeerTable(
            "clients that take other sizes than the default", MAX_RECEIVERS, IDLE_TIMEOUT
        )

    def met(self, client: bytes, said: Hello) -> None:
        """A client said HELLO. Raises ProtocolError, as `register`."""
        self.register(client, Receiver.of(said.takes))

    def register(self, client: bytes, receiver: Receiver) -> None:
        """Know from now on what a client takes.

        Raises:
            ProtocolError: (code "busy") too many others are known.
        """
        if receiver == self._default:
            self._others.pop(client)
        else:
            self._others.put(client, receiver, self._clock())

    def of(self, client: bytes) -> Receiver:
        """What a client takes."""
        if not len(self._others):
            return self._default
        return self._others.hear(client, self._clock()) or self._default


class Page:
    """Rows of one reply, as long as they fit into half of what its receiver takes.

    Args:
        client: Id of the receiver, for the refusal.
        payload_bytes: Most bytes of payload, if half of what the receiver takes is more.
    """

    def __init__(self, receiver: Receiver, kind: Type, client: bytes, *, payload_bytes: int | None = None) -> None:
        self._client, self._kind = client, kind
        self._most_tail, (self._most_payload, self._limit) = receiver.tail_bytes, receiver.payload_bytes(kind)
        half = self._most_payload // 2
        self.tail_room = self._most_tail // 2
        """Bytes of the tail that are left."""
        self._payload_bytes = half if payload_bytes is None else min(half, payload_bytes)
        self._payload_room = self._payload_bytes
        self._rows = 0

    @property
    def is_empty(self) -> bool:
        """Whether it has no row yet: the first one may take all of the payload's limit."""
        return not self._rows

    @property
    def most_payload(self) -> int:
        """Bytes of payload that its receiver takes."""
        return self._most_payload

    @property
    def payload_room(self) -> int:
        """Bytes of payload that are left."""
        return max(0, self._payload_room)

    def takes(self, what: str, row: Any = None, payload: int = 0) -> bool:
        """Whether a further row fits, with its part of the payload; it is in the reply then.

        Args:
            what: What it is, if it is to be refused.
            row: What stands of it in the tail; None: nothing does.

        Raises:
            ProtocolError: (code "too_large") it fits into no reply to this receiver.
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
        """Whether the receiver has room for these compressed blocks of a container beside what it makes of them.

        Args:
            packed: Number of each block -> (codec, bytes).
            size: Bytes of the container without compression.
        """
        return size + sum(len(data) for _, data in packed.values()) <= self._most_payload

    def refused(self, what: str, payload: int) -> ProtocolError:
        """Why a reply without pages is refused whose payload would have so many bytes beside those that it has."""
        half = self._payload_bytes - self._payload_room + payload
        text = f"{self._kind.name} of {what}, which without pages"
        return too_large(text, half, self._payload_bytes, self._limit, self._client)


def too_large(what: str, size: int, most: int, limit: str, client: bytes) -> ProtocolError:
    """Why a reply is refused, and what to do: who asked takes no more."""
    text = (
        f"a reply of {what} takes {size} bytes; client {client.hex()[:8]} has room for {most} ({limit}). Ask for less "
        f"at once, or make the client, and proxies before it, with a larger Limits({limit}=...)"
    )
    return ProtocolError("too_large", text)


def introduced(hello: Hello, limits: Limits) -> Hello:
    """A HELLO that says what its sender takes, which was made with these limits."""
    return _saying(hello, Receiver.with_limits(limits))


def passed_on(hello: Hello, limits: Limits) -> Hello:
    """A HELLO as a proxy with these limits hands it on: replies come back through the proxy."""
    return _saying(hello, Receiver.of(hello.takes).within(limits))


def _saying(hello: Hello, receiver: Receiver) -> Hello:
    takes = receiver.takes
    return msgspec.structs.replace(hello, takes=takes) if takes != hello.takes else hello
