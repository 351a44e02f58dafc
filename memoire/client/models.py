"""Models as a client's caller sees them: the newest one of a topic, or every one in order."""

from __future__ import annotations

from memoire.arguments import seconds
from memoire.models.model import Model
from memoire.models.received import Subscription
from memoire.models.topics import Topics

from .io_client_lock import ClientLock


class ModelHandle:
    """The newest model of one topic, kept up to date in the background.

    Args:
        endpoint: Where models come from, for errors.
    """

    def __init__(self, topic: str, topics: Topics, waiting: ClientLock, endpoint: str) -> None:
        self.topic = topic
        self._topics, self._waiting, self._endpoint = topics, waiting, endpoint

    @property
    def version(self) -> int:
        """Version of the newest model that is here; 0 when there is none."""
        self._waiting.check_process()
        return self._topics.version(self.topic)

    @property
    def published(self) -> int:
        """Version of the newest model that the server has told of; it is on its way where `version` is lower. A step
        that waited for a learner returns when the server has told of the learner's new model.
        """
        self._waiting.check_process()
        return self._topics.published(self.topic)

    def newest(self) -> Model | None:
        """The newest model that is here, without waiting: .version, .body (bytes), .value (as published)."""
        self._waiting.check_open()
        return self._topics.newest(self.topic)

    def wait(self, timeout: float | None = None, *, after: int = 0) -> Model:
        """The newest model as soon as its version is above `after`.

        Raises:
            MemoireTimeout: none came in `timeout` seconds (None: request_timeout).
            Closed: the client was closed.
        """
        waiting = self._waiting
        waiting.check_process()
        return self._topics.wait(self.topic, after, waiting.seconds(timeout), waiting.check_open, self._endpoint)


class Receiver:
    """What is published on one topic, in order.

    Args:
        endpoint: Where models come from, for errors.
    """

    def __init__(self, subscription: Subscription, topics: Topics, waiting: ClientLock, endpoint: str) -> None:
        self.topic = subscription.topic
        self._subscription, self._topics, self._waiting, self._endpoint = subscription, topics, waiting, endpoint

    @property
    def skipped(self) -> int:
        """Versions that were published and not received: this receiver, or the way to it, was too slow."""
        return self._subscription.skipped

    def receive(self, timeout: float | None = None) -> bytes | str:
        """The next content of the topic, in the type in which it was published; the newest one at first.

        Raises:
            MemoireTimeout: nothing came in `timeout` seconds; None waits for ever.
            Closed: the client was closed.
        """
        return self.receive_model(timeout).value

    def receive_model(self, timeout: float | None = None) -> Model:
        """`receive`, with version and topic."""
        self._waiting.check_process()
        patience = None if timeout is None else seconds(timeout)
        return self._topics.receive(self._subscription, patience, self._waiting.check_open, self._endpoint)

    def close(self) -> None:
        """Receive no more."""
        if not (self._waiting.is_closing or self._waiting.is_forked):
            self._topics.unsubscribe(self._subscription)
