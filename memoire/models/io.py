"""Sockets for a node's models: the subscription to its notices, and requests for bodies of models.

    node ──PUB──▶ SUB ──▶ Feed: whole and right? ──▶ its owner: NEWS, or a notice of a model ──▶ Topics
         ◀─ROUTER── channel ◀── Feed: FETCH ◀───────────────────────────────────────────────────────┘

`ModelLink` gets an inference node's weights: the models of one topic of a server or proxy. All objects belong to the
worker that owns their sockets, and all methods are called inside of it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from memoire.errors import Closed, MemoireError, ProtocolError
from memoire.limits import Limits
from memoire.net import link, sockets
from memoire.net.addresses import seen_from
from memoire.net.channel import Channel
from memoire.net.poller import Poller
from memoire.net.sockets import Context, Socket
from memoire.net.thread import Worker
from memoire.security.keys import Keys
from memoire.wire import messages
from memoire.wire.frames import (
    NEWS_FRAME,
    Answer,
    Buffer,
    HelloSchedule,
    Message,
    parse_notice,
    topic_frame,
    welcome_of,
)

from .model import MAX_INLINE, Model
from .topics import Topics, fetch_patience

NOTICES_PER_TURN = 100

Take = Callable[[Message, Sequence[Buffer]], None]
"""Function that takes NEWS or a notice with its frames. Raises ProtocolError if a body differs from its notice."""


class Feed:
    """Notices and models of one node; receives nothing before `subscribe_to`.

    Args:
        channel: Channel for requests to the same node.
    """

    def __init__(self, poller: Poller, channel: Channel, context: Context, limits: Limits, keys: Keys | None) -> None:
        self._poller, self._channel, self._context, self._limits, self._keys = poller, channel, context, limits, keys
        self._socket: Socket | None = None

    def subscribe_to(self, endpoint: str) -> None:
        """Subscribe to an address: to NEWS at once, to notices of topics by `subscribe`."""
        self.close()
        socket = sockets.subscriber(self._context, max(self._limits.tuning.request_bytes, MAX_INLINE))
        link.dial(self._poller, socket, endpoint, keys=self._keys)
        socket.setsockopt(zmq.SUBSCRIBE, NEWS_FRAME)
        self._socket = self._poller.add(socket)

    def close(self) -> None:
        """Close the socket of the subscription."""
        if self._socket is not None:
            self._poller.drop(self._socket)
        self._socket = None

    @property
    def is_open(self) -> bool:
        """True if the feed is subscribed to NEWS."""
        return self._socket is not None

    def subscribe(self, prefix: bytes, is_wanted: bool) -> bool:
        """Subscribe to topics whose frame begins with a prefix, or unsubscribe. Return False without a socket.

        Each subscription needs an unsubscription of its own.
        """
        if self._socket is None:
            return False
        self._socket.setsockopt(zmq.SUBSCRIBE if is_wanted else zmq.UNSUBSCRIBE, prefix)
        return True

    def tick(self, ready: dict[object, int], take: Take, refuse: Callable[[str], None]) -> None:
        """Pass received messages to `take`, and codes of rejected ones to `refuse`; `NOTICES_PER_TURN` at most."""
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
        """Request a part of a body; see `Topics`."""
        most = self._limits.tuning.request_bytes
        request = messages.Fetch(topic=topic, version=version, offset=offset, size=min(size or most, most))
        self._channel.ask(request, finish, patience=fetch_patience(self._limits))


_log = logging.getLogger(__name__)

HELLO_INTERVAL = 2.0
"""Seconds between two HELLO messages, which check that the node is the same and what its newest version is."""


class ModelLink:
    """Channel and feed of one address. Belongs to the node's thread.

    Args:
        on_model: Function that gets each complete model.
    """

    def __init__(
        self,
        worker: Worker,
        endpoint: str,
        topic: str,
        on_model: Callable[[Model], None],
        *,
        client: bytes,
        name: str,
        limits: Limits,
        keys: Keys | None,
        context: Context,
    ) -> None:
        self._endpoint, self._topic, self._name = endpoint, topic, name
        self.channel = Channel(
            worker.poller, context, endpoint, client=client, limits=limits, rng=random.Random(client), keys=keys
        )
        self._feed = Feed(worker.poller, self.channel, context=context, limits=limits, keys=keys)
        self.topics = Topics(
            limits, self._feed.fetch, self._subscribe, worker.post, lambda model, _, __: on_model(model)
        )
        self._hello = HelloSchedule()
        self._renewals = self._epoch = 0
        self._publish = ""
        self.topics.follow_topic(topic)

    @property
    def problem(self) -> str:
        """Reason why there may be no model, as text. From any thread; a connection attempt takes up to 0.2 s."""
        denied = self.channel.denied_for_good
        return str(denied) if denied else f"{self._endpoint} has not answered. {self.channel.link.explain()}"

    @property
    def is_met(self) -> bool:
        """True if the address has answered since the link was opened."""
        return self.channel.heard_at > 0.0

    def next_time(self) -> float:
        """Return the time at which `tick` has something to do."""
        return min(self.channel.next_time(), self.topics.next_time(), self._hello.next_time())

    def tick(self, ready: dict[object, int]) -> None:
        """Process received messages, and send due requests."""
        now = time.monotonic()
        self.channel.tick(ready)
        if self.channel.renewals != self._renewals:
            self._renewals = self.channel.renewals
            self._feed.close()
        if self._hello.is_due(now):
            self._hello.begin(now + HELLO_INTERVAL)
            self.channel.ask(messages.Hello(role="inference", name=self._name), self._welcomed)
        self._feed.tick(ready, self._take_notice, lambda code: None)
        self.topics.tick()

    def close(self) -> None:
        """Close the channel and the topics; open requests fail with Closed."""
        self.channel.close(Closed("this inference node"))
        self.topics.close()

    def _subscribe(self, topic: str, is_wanted: bool) -> bool:
        return self._feed.subscribe(topic_frame(topic), is_wanted)

    def _welcomed(self, answer: Answer) -> None:
        self._hello.receive_answer()
        try:
            header, welcome = welcome_of(answer, self._endpoint)
        except MemoireError as error:
            if not isinstance(error, Closed):
                _log.warning("inference node %s: %s", self._name, error)
            return
        self.channel.apply_welcome(header, welcome)
        publish = seen_from(self.channel.link.address, welcome.endpoints.publish) if welcome.endpoints.publish else ""
        if publish and (not self._feed.is_open or publish != self._publish):
            self._publish = publish
            self._feed.subscribe_to(publish)
            self.topics.subscribe_all()
        if self._epoch and welcome.epoch != self._epoch:
            self.topics.accept_lower_versions()
        self._epoch = welcome.epoch
        self.topics.receive_versions(welcome.models)

    def _take_notice(self, message: Message, _: Sequence[Buffer]) -> None:
        if isinstance(message.body, messages.Notice):
            self.topics.receive_notice(message.body, message.payload, message.header.home)
        else:
            self._hello.make_due()
