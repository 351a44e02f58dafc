"""What answers requests for a table, and what it may know of the server that it answers for.

request ──▶ the server's dispatcher ──▶ Handler(now, header, body, payload) ──▶ Reply
└ Desk: which table, how large a reply, which life of the server
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from memoire.limits import Limits
from memoire.wire import messages, types
from memoire.wire.byte_budget import ByteHolder
from memoire.wire.frames import MessageHeader
from memoire.wire.receivers import Page

from .table import OpenTable


class Reply(NamedTuple):
    """Body and payload of an answer, and the header's fields that differ from the request's."""

    body: messages.Body
    payload: Any = None
    changed: Mapping[str, int] = {}
    until_saved: bool = False
    """Whether it must not leave before what it says is on disk, if the server saves anything."""


Handler = Callable[[float, MessageHeader, Any, Any], Reply]
"""Called with the time in seconds since 1970, header, body and payload of a request. It may raise ProtocolError."""


class Desk(Protocol):
    """What an answer may know of its server. Nothing here changes what the lock of the server's dispatcher guards."""

    epoch: int
    """Number of this start of the server."""
    limits: Limits
    requests: ByteHolder
    """What a request takes while it is answered."""

    @property
    def finished(self) -> bool:
        """Whether the run is over."""

    def table(self, header: MessageHeader) -> OpenTable:
        """The table that a header names. Raises ProtocolError if there is none, or it has another schema."""

    def page(self, client: bytes, kind: types.Type) -> Page:
        """An empty reply of this type to a client: a part of what a message may have, the rest is for the next one."""
