"""Where an inference node's weights come from: the models of one topic, of a server or proxy.

What a node publishes: the socket that notices come by, and the requests for bodies of models.

    node ──PUB──▶ SUB ──▶ Feed: whole and right? ──▶ its owner: NEWS, or a notice of a model ──▶ Topics
         ◀─ROUTER── channel ◀── Feed: FETCH ◀───────────────────────────────────────────────────────┘

Belongs to the worker that owns its sockets; every method is called inside of it.
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
        made = sockets.subscriber(self._context, max(self._limits.tuning.request_bytes, MAX_INLINE))
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
        most = self._limits.tuning.request_bytes
        asked = messages.Fetch(topic=topic, version=version, offset=offset, size=min(size or most, most))
        self._channel.ask(asked, finish, patience=fetch_patience(self._limits))


_log = logging.getLogger(__name__)

HELLO_INTERVAL = 2.0
"""Seconds between two HELLO messages: is it there, is it the same one, what is its newest version."""


class ModelLink:
    """The channel and the notices of one address. Belongs to the node's thread.

    Args:
        on_model: Gets each model that is complete.
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
            worker.doors, context, endpoint, client=client, limits=limits, rng=random.Random(client), keys=keys
        )
        self._feed = Feed(worker.doors, self.channel, context=context, limits=limits, keys=keys)
        self.topics = Topics(limits, self._feed.fetch, self._hear, worker.post, lambda model, _, __: on_model(model))
        self._hello = HelloSchedule()
        self._renewals = self._epoch = 0
        self._publish = ""
        self.topics.want(topic)

    @property
    def trouble(self) -> str:
        """Why there may be no model, for people. From any thread; tries to connect, which takes 0.2 s at most."""
        denied = self.channel.denied_for_good
        return str(denied) if denied else f"{self._endpoint} has not answered. {self.channel.link.explain()}"

    @property
    def is_met(self) -> bool:
        """Whether the address has answered since it was dialled."""
        return self.channel.heard_at > 0.0

    def next_time(self) -> float:
        """When `turn` has something to do."""
        return min(self.channel.next_time(), self.topics.next_time(), self._hello.next_time())

    def turn(self, ready: dict[object, int]) -> None:
        """Take what came, ask for what is due."""
        now = time.monotonic()
        self.channel.turn(ready)
        if self.channel.renewals != self._renewals:
            self._renewals = self.channel.renewals
            self._feed.close()
        if self._hello.is_due(now):
            self._hello.begin(now + HELLO_INTERVAL)
            self.channel.ask(messages.Hello(role="inference", name=self._name), self._welcomed)
        self._feed.turn(ready, self._take_notice, lambda code: None)
        self.topics.turn()

    def close(self) -> None:
        """End every open request."""
        self.channel.close(Closed("this inference node"))
        self.topics.close()

    def _hear(self, topic: str, is_wanted: bool) -> bool:
        return self._feed.subscribe(topic_frame(topic), is_wanted)

    def _welcomed(self, answer: Answer) -> None:
        self._hello.answered()
        try:
            header, told = welcome_of(answer, self._endpoint)
        except MemoireError as error:
            if not isinstance(error, Closed):
                _log.warning("inference node %s: %s", self._name, error)
            return
        self.channel.learned(header, told)
        publish = seen_from(self.channel.link.address, told.endpoints.publish) if told.endpoints.publish else ""
        if publish and (not self._feed.is_open or publish != self._publish):
            self._publish = publish
            self._feed.open(publish)
            self.topics.opened()
        if self._epoch and told.epoch != self._epoch:
            self.topics.restarted()
        self._epoch = told.epoch
        self.topics.announced(told.models)

    def _take_notice(self, message: Message, _: Sequence[Buffer]) -> None:
        if isinstance(message.body, messages.Notice):
            self.topics.noticed(message.body, message.payload, message.header.home)
        else:
            self._hello.hurry()
