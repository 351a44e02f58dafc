"""What a node publishes: the socket that notices come by, and the requests for bodies of models.

    node ──PUB──▶ SUB ──▶ Feed: whole and right? ──▶ its owner: NEWS, or a notice of a model ──▶ Topics
         ◀─ROUTER── channel ◀── Feed: FETCH ◀───────────────────────────────────────────────────────┘

Belongs to the worker that owns its sockets; every method is called inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import zmq

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.models.notices import MAX_INLINE
from memoire.models.topics import fetch_patience
from memoire.security.keyfolder import Keys
from memoire.wire import messages
from memoire.wire.frames import Answer, Buffer, Message, parse_notice
from memoire.wire.identity import NEWS_FRAME

from . import link, sockets
from .channel import Channel
from .context import Context, Socket
from .poller import Poller

NOTICES_PER_TURN = 100

Take = Callable[[Message, Sequence[Buffer]], None]
"""Takes NEWS or a notice, with the frames that it came in. Raises ProtocolError where it is not what it says."""


class Feed:
    """The notices and models of one node; hears nothing before `open`.

    Args:
        channel: Requests to the same node.
    """

    def __init__(self, doors: Poller, channel: Channel, *, context: Context, limits: Limits, keys: Keys | None) -> None:
        self._doors, self._channel, self._context, self._limits, self._keys = doors, channel, context, limits, keys
        self._socket: Socket | None = None

    def open(self, endpoint: str) -> None:
        """Hear what is published at this address: NEWS from now on, notices of topics once these are subscribed to."""
        self.close()
        made = sockets.subscriber(self._context, max(self._limits.request_bytes, MAX_INLINE))
        link.dial(self._doors, made, endpoint, keys=self._keys)
        made.setsockopt(zmq.SUBSCRIBE, NEWS_FRAME)
        self._socket = self._doors.add(made)

    def close(self) -> None:
        """Hear nothing any more."""
        if self._socket is not None:
            self._doors.drop(self._socket)
        self._socket = None

    @property
    def is_open(self) -> bool:
        """Whether NEWS are heard."""
        return self._socket is not None

    def subscribe(self, prefix: bytes, is_wanted: bool) -> bool:
        """Start or stop hearing of topics whose frame begins with this; False while there is no socket. As often as
        one was started it has to be stopped.
        """
        if self._socket is None:
            return False
        self._socket.setsockopt(zmq.SUBSCRIBE if is_wanted else zmq.UNSUBSCRIBE, prefix)
        return True

    def turn(self, ready: dict[object, int], take: Take, refuse: Callable[[str], None]) -> None:
        """Hand over what came, and the codes of what is refused; the rest of a flood waits for the next turn."""
        if self._socket is None or self._socket not in ready:
            return
        for _ in range(NOTICES_PER_TURN):
            frames = sockets.receive(self._socket, most=3)
            if frames is None:
                return
            try:
                take(parse_notice(frames, self._limits), frames)
            except ProtocolError as error:
                refuse(error.code)
            if not sockets.has_message(self._socket):  # most notices come alone
                return

    def fetch(self, topic: str, version: int, offset: int, size: int, finish: Callable[[Answer], Any]) -> None:
        """Ask for a stretch of a body; see `Topics`."""
        most = self._limits.request_bytes
        asked = messages.Fetch(topic=topic, version=version, offset=offset, size=min(size or most, most))
        self._channel.ask(asked, finish, patience=fetch_patience(self._limits))
