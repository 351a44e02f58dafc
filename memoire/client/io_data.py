"""A client's sockets for caches and notices. They lead wherever the home says, and belong to the client's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.net import addresses, link, sockets
from memoire.net.context import Context, Socket
from memoire.net.poller import Poller
from memoire.security.keyfolder import Keys
from memoire.wire import messages
from memoire.wire.frames import Message, parse_notice
from memoire.wire.identity import NEWS_FRAME, topic_frame

NOTICES_PER_TURN = 100


class DataSockets:
    """One socket that sends pushes, and one that receives notices; none before `open`.

    Args:
        given: Addresses for caches and notices if they are not those that the home names; None or "".
    """

    def __init__(
        self,
        doors: Poller,
        given: tuple[str | None, str | None],
        *,
        context: Context,
        limits: Limits,
        keys: Keys | None,
    ) -> None:
        self._doors, self._given, self._context, self._limits, self._keys = doors, given, context, limits, keys
        self._push: Socket | None = None
        self._sub: Socket | None = None
        self._is_blocked = False

    def open(self, address: str, endpoints: messages.Endpoints, usual_bytes: int) -> bool:
        """Connect anew; returns whether notices are heard from now on.

        Args:
            address: Where requests go, for endpoints without a host.
            usual_bytes: Of a push.
        """
        self._drop()
        push = self._given[0] or addresses.seen_from(address, endpoints.push)
        subscribe = self._given[1] or addresses.seen_from(address, endpoints.publish)
        if push:
            made = sockets.data_sender(self._context, usual_bytes)
            link.dial(self._doors, made, push, keys=self._keys)
            self._push = self._doors.add(made, reading=False)
        if subscribe:
            made = sockets.subscriber(self._context, self._limits.request_bytes)
            link.dial(self._doors, made, subscribe, keys=self._keys)
            made.setsockopt(zmq.SUBSCRIBE, NEWS_FRAME)
            self._sub = self._doors.add(made)
        return self._sub is not None

    def _drop(self) -> None:
        if self._push is not None:
            self._doors.drop(self._push, sockets.PARTING)
        if self._sub is not None:
            self._doors.drop(self._sub)
        self._push, self._sub, self._is_blocked = None, None, False

    def send(self, queue: deque[list[Any]]) -> bool:
        """Send from the left as many messages as there is room for; returns whether all of them went."""
        if self._push is None:
            return False
        while queue and sockets.send(self._push, queue[0]):
            queue.popleft()
        is_blocked = bool(queue)
        if is_blocked != self._is_blocked:
            self._is_blocked = is_blocked
            self._doors.watch(self._push, reading=False, writing=is_blocked)
        return not is_blocked

    def subscribe(self, topic: str, wanted: bool) -> bool:
        """Start or stop hearing of a topic; False while there is no socket yet."""
        if self._sub is None:
            return False
        self._sub.setsockopt(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, topic_frame(topic))
        return True

    def has_notices(self, ready: dict[object, int]) -> bool:
        """Whether notices have come."""
        return self._sub is not None and self._sub in ready

    def take_notices(self, take: Callable[[Message], None], refuse: Callable[[str], None]) -> None:
        """Hand over those that came, and the codes of those that are refused; the rest of a flood waits."""
        assert self._sub is not None
        for _ in range(NOTICES_PER_TURN):
            frames = sockets.receive(self._sub, most=3)
            if frames is None:
                return
            try:
                take(parse_notice(frames, self._limits))
            except ProtocolError as error:
                refuse(error.code)
