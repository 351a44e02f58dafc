"""A client's sockets for caches and notices. They lead wherever the home says, and belong to the client's thread."""

from __future__ import annotations

from collections import deque
from typing import Any

from memoire.limits import Limits
from memoire.net import link, sockets
from memoire.net.addresses import seen_from
from memoire.net.channel import Channel
from memoire.net.context import Context, Socket
from memoire.net.feed import Feed
from memoire.net.poller import Poller
from memoire.net.sender import Sender
from memoire.security.keyfolder import Keys
from memoire.wire import messages
from memoire.wire.identity import topic_frame


class DataSockets:
    """One socket that sends pushes, and one that receives notices; none before `open`.

    Args:
        channel: Requests to the same home.
        given: Addresses for caches and notices if they are not those that the home names; None or "".
    """

    def __init__(
        self,
        doors: Poller,
        channel: Channel,
        given: tuple[str | None, str | None],
        *,
        context: Context,
        limits: Limits,
        keys: Keys | None,
    ) -> None:
        self._doors, self._channel, self._given, self._context, self._keys = doors, channel, given, context, keys
        self.feed = Feed(doors, channel, context=context, limits=limits, keys=keys)
        """Notices and models of the home."""
        self._push = Sender(doors, is_reading=False)

    def open(self, endpoints: messages.Endpoints, usual_bytes: int) -> bool:
        """Connect anew; returns whether notices are heard from now on.

        Args:
            usual_bytes: Of a push.
        """
        self._drop()
        address = self._channel.address  # for endpoints without a host
        push = self._given[0] or seen_from(address, endpoints.push)
        subscribe = self._given[1] or seen_from(address, endpoints.publish)
        if push:
            made = sockets.data_sender(self._context, usual_bytes)
            link.dial(self._doors, made, push, keys=self._keys)
            self._push.use(made)
        if subscribe:
            self.feed.open(subscribe)
        return self.feed.is_open

    def _drop(self) -> None:
        self._push.drop(sockets.DRAIN_TIMEOUT)
        self.feed.close()

    def send(self, queue: deque[list[Any]]) -> bool:
        """Send from the left as many messages as there is room for; returns whether all of them went."""

        def send(made: Socket) -> bool:
            while queue and sockets.send(made, queue[0]):
                queue.popleft()
            return not queue

        return self._push.turn(send)

    def subscribe(self, topic: str, wanted: bool) -> bool:
        """Start or stop hearing of a topic; False while there is no socket yet."""
        return self.feed.subscribe(topic_frame(topic), wanted)
