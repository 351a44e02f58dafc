"""The sockets in front of a proxy, where clients and the proxies in front of it come: requests, caches, notices.

Who comes in passes one of two doors, `take_requests` and `take_caches`. Belongs to the proxy's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.net import sockets
from memoire.net.addresses import beside
from memoire.net.admission import Admission
from memoire.net.context import Context, Socket
from memoire.net.curve_server import Gate
from memoire.net.poller import Poller
from memoire.net.send_queues import CONNECTION_BYTES, SendQueues
from memoire.security import exposure
from memoire.security.envelope import EnvelopedRequest
from memoire.security.permissions import Peer
from memoire.wire import messages
from memoire.wire.frames import Buffer, MessageHeader

from .stats import ProxyCounts

MESSAGES_PER_TURN = 200
WAITING_REQUESTS = 64
"""Requests of the largest size that wait for each address at most."""


class QueueSizes(NamedTuple):
    """Bytes that may wait in a proxy."""

    caches: int
    """For each server."""
    requests: int
    """For each server."""
    replies: int

    def of(self, servers: int) -> int:
        """All of them, for so many servers."""
        return servers * (self.caches + self.requests) + self.replies


class Front:
    """Three sockets that others connect to.

    Args:
        given: Addresses for requests, caches and notices; the latter two are beside the first one if they are None.
        name: Of the proxy.

    Raises:
        EndpointError: an address is in use or malformed.
    """

    def __init__(
        self,
        doors: Poller,
        gate: Gate,
        given: tuple[str, str | None, str | None],
        *,
        name: str,
        context: Context,
        limits: Limits,
        counts: ProxyCounts,
        queues: QueueSizes,
    ) -> None:
        self._doors, self._gate = doors, gate
        self.admission = Admission(gate, limits, count=lambda error: counts.refuse(error.code))
        self.lanes = SendQueues(min(CONNECTION_BYTES, queues.replies), queues.replies)
        """Replies that wait until their connection has room."""
        request, push, publish = given
        near = beside(request)
        self._pull = doors.add(sockets.data_receiver(context, limits.message_bytes + (1 << 16)))
        self._pub = doors.add(sockets.publisher(context))
        self._router = doors.add(sockets.request_server(context, limits.request_bytes))
        self.endpoints = messages.Endpoints(
            publish=self._bind(self._pub, publish or near[1]),
            push=self._bind(self._pull, push or near[0]),
            request=self._bind(self._router, request),
        )
        """The addresses, as bound."""
        if gate.keys is None:
            bound = [self.endpoints.request, self.endpoints.push, self.endpoints.publish]
            exposure.warn(f"proxy {name!r}", bound, guard="keys (keys=)")

    def _bind(self, made: Socket, endpoint: str) -> str:
        bound, way = self._gate.bind(made, endpoint)
        if way is not None:
            self._doors.follow(made, way)
        return bound

    # Requests

    def take_requests(self, ready: dict[object, int], take: Callable[[EnvelopedRequest], None]) -> None:
        """Hand over the requests that came and may come in; the rest of a flood waits for the next turn."""
        if self._router not in ready:
            return
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self._router, most=sockets.ENVELOPE)
            if frames is None:
                return
            request = self.admission.receive_request(self._router, frames)
            if request is None:
                continue
            if len(request.frames) >= sockets.ENVELOPE:  # this proxy puts one more address in front
                self.admission.refuse(ProtocolError("frames", "a request came through too many proxies"))
            else:
                take(request)

    def refuse(self, request: EnvelopedRequest, error: ProtocolError) -> None:
        """Count a request that is refused, and tell its sender why."""
        refusal = self.admission.refuse_request(request, error)
        if refusal is not None:
            self.reply(refusal)

    def reply(self, frames: Sequence[Buffer]) -> None:
        """Send a reply to a client, or to the proxy in front, now or when there is room for it."""
        self.lanes.send(self._router, frames, time.monotonic())

    # Caches

    def take_caches(
        self, ready: dict[object, int], take: Callable[[MessageHeader, Peer, Sequence[Buffer]], None]
    ) -> None:
        """Hand over the caches and episodes that came and may come in."""
        if self._pull not in ready:
            return
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self._pull, most=3)
            if frames is None:
                return
            pushed = self.admission.receive_push_header(self._pull, frames)
            if pushed is not None:
                take(*pushed)

    # Notices

    def subscribed(self, ready: dict[object, int]) -> list[bytes]:
        """What peers have subscribed to since the last call: the bytes that a notice has to begin with."""
        return sockets.subscribed(self._pub, self._gate.admits) if self._pub in ready else []

    def publish(self, frames: Sequence[Any]) -> None:
        """Tell all that have subscribed to it."""
        sockets.send(self._pub, frames)
