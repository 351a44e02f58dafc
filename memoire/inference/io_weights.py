"""Where an inference node's weights come from: the models of one topic, of a server or proxy."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from memoire.errors import Closed, MemoireError
from memoire.limits import Limits
from memoire.models.model import Model
from memoire.models.topics import Topics
from memoire.net.addresses import seen_from
from memoire.net.channel import Channel
from memoire.net.context import Context
from memoire.net.feed import Feed
from memoire.net.thread import Worker
from memoire.security.keyfolder import Keys
from memoire.wire import messages
from memoire.wire.frames import Answer, Buffer, Message
from memoire.wire.hello import HelloSchedule, welcome_of
from memoire.wire.identity import topic_frame

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
        return str(denied) if denied else f"{self._endpoint} has not answered. {self.channel.trouble()}"

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
        publish = seen_from(self.channel.address, told.endpoints.publish) if told.endpoints.publish else ""
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
