"""The front door of a node: whose a message is, whether its sender may send it, and what is counted if not.

    frames ──▶ Gate: by whose key? ──▶ parse: what? ──▶ may this key send that, for this client? ──▶ Message
                   └──────────────────────┴────────────────┴── ProtocolError ──▶ counted, logged, answered

A server parses whole messages and binds client ids to keys. A proxy reads headers alone, and passes the rest on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.security.roles import OPEN, ConnectionClients, EnvelopedRequest, Peer, opened
from memoire.wire import messages, types
from memoire.wire.frames import Message, MessageHeader, parse, parse_header, refusal

from .context import Socket
from .curve_server import Gate

REQUEST_PLACE = 1
"""Where a request has its passport: behind the address of the connection that it came by."""
PUSH_PLACE = 0
"""Where a pushed message has it."""
_MAX_TEXT = 1000  # characters that tell a peer why it was refused


class Admission:
    """Lets messages in at one node. Requests belong to one thread; `receive_push`, `pass_on` and `refuse` to any.

    Args:
        gate: Knows the keys.
        count: Counts a refusal by its code; from any thread.
        own: Binds a client's id to the key that uses it first. Raises ProtocolError (code "owner") if it belongs to
            another one. From any thread.
    """

    def __init__(
        self,
        gate: Gate,
        limits: Limits,
        *,
        count: Callable[[ProtocolError], object],
        own: Callable[[bytes, str], None] = lambda client, principal: None,
    ) -> None:
        self._gate, self._limits, self._count, self._own = gate, limits, count, own
        self._connections = ConnectionClients(limits.connection_clients, limits.tuning.connection_clients_rate)

    # Requests

    def receive_request(self, made: Socket, frames: list[zmq.Frame]) -> EnvelopedRequest | None:
        """Whose request came in by this socket; None if it was refused and nobody could be told."""
        received = len(frames)
        try:
            peer, frames = self._gate.admit(made, frames, REQUEST_PLACE)
            parts = opened(frames)
            if parts is None:
                raise ProtocolError("frames", "a request has an empty frame before its header")
        except ProtocolError as error:
            self.refuse(error)
            return None
        # A proxy that has let it in shows its passport, or its own address where nobody has keys.
        is_first = len(frames) == received and (len(parts.envelope) == 2 or peer is not OPEN)
        return EnvelopedRequest(peer, *parts, is_first)

    def parse(self, request: EnvelopedRequest, now: float) -> Message:
        """What a server was asked.

        Args:
            now: Seconds, by a clock that only goes on.

        Raises:
            ProtocolError: it cannot be read, its sender may not send it, or too many clients came by its connection.
        """
        message = parse(request.message, self._limits)
        if request.peer is not OPEN:
            self._check_sender(request.peer, message)
        self._check_connection(request, message.header.client, now)
        return message

    def parse_header(self, request: EnvelopedRequest, now: float) -> MessageHeader:
        """What a proxy was asked; as `parse`, for those that leave body and client's owner to the server behind."""
        header, _ = parse_header(request.message, self._limits)
        request.peer.check(header.type, header.table)
        self._check_connection(request, header.client, now)
        return header

    def _check_sender(self, peer: Peer, message: Message) -> None:
        """Raise ProtocolError if this peer may not send this, by its role or in the name of this client."""
        peer.check(message.type, message.header.table)
        if isinstance(message.body, messages.Hello):
            peer.check_hello(message.body)
        self._own(message.header.client, peer.principal)

    def _check_connection(self, request: EnvelopedRequest, client: bytes, now: float) -> None:
        if request.is_first:
            self._connections.check(bytes(request.envelope[0]), client, now)

    # Pushed messages

    def receive_push(self, made: Socket, frames: list[zmq.Frame]) -> Message | None:
        """The cache or episode that came in by this socket, its payload not yet verified; None if it was refused."""
        try:
            peer, frames = self._gate.admit(made, frames, PUSH_PLACE)
            message = parse(frames, self._limits, verify_payload=False)
            if peer is not OPEN:
                self._check_sender(peer, message)
            if not message.header.type.pushed:
                raise _not_pushed(message.header.type)
        except ProtocolError as error:
            self.refuse(error)
            return None
        return message

    def receive_push_header(
        self, made: Socket, frames: list[zmq.Frame]
    ) -> tuple[MessageHeader, Peer, list[zmq.Frame]] | None:
        """As `receive_push`, for proxies: what the message says of itself, whose it is, and all of its frames."""
        try:
            peer, frames = self._gate.admit(made, frames, PUSH_PLACE)
            header, _ = parse_header(frames, self._limits)
            peer.check(header.type)
            if not header.type.pushed:
                raise _not_pushed(header.type)
        except ProtocolError as error:
            self.refuse(error)
            return None
        return header, peer, frames

    # Whatever came in

    def pass_on(self, made: Socket, place: int, frames: list[zmq.Frame]) -> list[Any]:
        """A message as a plain proxy hands it on, with whose it is where there are keys; empty if it was refused.

        Args:
            place: Where it has its passport if it comes from a proxy: `REQUEST_PLACE` or `PUSH_PLACE`.
        """
        try:
            peer, frames = self._gate.admit(made, frames, place)
        except ProtocolError as error:
            self.refuse(error)
            return []
        return [*self._gate.passport(peer), *frames]

    def refuse(self, error: ProtocolError) -> None:
        """Count a refusal. Those that are about who sent a message are logged now and then."""
        self._gate.refuse(error.code, error.detail)
        self._count(error)

    def refuse_request(self, request: EnvelopedRequest, error: ProtocolError) -> list[Any] | None:
        """Count a refusal; returns the frames that say it, or None if whoever asked could not read them."""
        self.refuse(error)
        answer = refusal(request.message, messages.Refused(code=error.code, text=error.detail[:_MAX_TEXT]))
        return None if answer is None else [*request.envelope, *answer]


def _not_pushed(kind: types.Type) -> ProtocolError:
    return ProtocolError("unexpected", f"{kind.name} was pushed; caches and episodes are taken here")
