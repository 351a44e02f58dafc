"""Models as a client's caller sees them: the newest one of a topic, or every one in order.

How calls wait for a client's thread. Beside what every node has: processes that were forked, and what still leaves
while the client is closed.
"""

from __future__ import annotations

import os
from typing import Any

from memoire import arguments
from memoire.arguments import seconds
from memoire.errors import ForkedError, ModelUnknown
from memoire.models.model import Model
from memoire.models.topics import Subscription, Topics
from memoire.net.thread import NodeLock

from .session import Session


class ClientLock(NodeLock):
    """The lock of everything that calls and the client's thread share.

    Args:
        request_timeout: Seconds that a call takes at most unless it says otherwise.
    """

    def __init__(self, request_timeout: float) -> None:
        super().__init__("this client")
        self.is_parting = False
        """While close() lasts, if episodes that are open in writers still leave."""
        self.closed_by = float("inf")
        """Until then."""
        self._request_timeout, self._pid = request_timeout, os.getpid()

    def seconds(self, timeout: float | None) -> float:
        """How long a call may take, as its caller says."""
        return seconds(timeout, self._request_timeout)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the client's: the lock may be held for ever, by a thread that is not
        here.
        """
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ForkedError in a process forked from the client's. Before each use of the lock that does not come
        through the client itself.
        """
        if (pid := os.getpid()) != self._pid:
            raise ForkedError("this client", self._pid, pid)

    def check_open(self) -> None:
        """Raise Closed, or what the client failed of."""
        self.check_process()
        super().check_open()

    def check_shipping(self) -> None:
        """`check_open`, but what writers hold when the client is closed leaves before it ends."""
        if not self.is_parting:
            self.check_open()


class HandedModels:
    """Versions of the models that a client's caller was handed last, by topic: the models that act. For any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._versions: dict[str, int] = {}

    def follow(self, topic: str) -> None:
        """The caller wants models of this topic."""
        self._versions.setdefault(topic, 0)

    def hand(self, model: Model) -> Model:
        """The model that the caller gets now."""
        self._versions[model.topic] = model.version
        return model

    def stamp(self, model_version: Any) -> int:
        """The version for entries whose writer was told this one: the same, or the handed one if it is 0.

        Raises:
            ParameterError: it is no version. ModelUnknown, one of these: any of several topics may have acted.
        """
        is_unknown = type(model_version) is int and model_version == 0  # most often, and then nothing is called
        if not is_unknown and (version := arguments.model_version(model_version)):
            return version
        if not self._versions:
            return 0
        topic = self._session.parameters.model_topic
        if topic is not None:
            return self._versions.get(topic, 0)
        if len(self._versions) > 1:
            topics = ", ".join(map(repr, list(self._versions)))
            raise ModelUnknown(f"this client has models of the topics {topics}, and the table sets no model_topic")
        return next(iter(self._versions.values()), 0)


class ModelHandle:
    """The newest model of one topic, kept up to date in the background.

    Args:
        endpoint: Where models come from, for errors.
        handed: Told of each model that is handed out.
    """

    def __init__(self, topic: str, topics: Topics, waiting: ClientLock, endpoint: str, handed: HandedModels) -> None:
        self.topic = topic
        self._topics, self._waiting, self._endpoint, self._handed = topics, waiting, endpoint, handed

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
        model = self._topics.newest(self.topic)
        return None if model is None else self._handed.hand(model)

    def wait(self, timeout: float | None = None, *, after: int = 0) -> Model:
        """The newest model as soon as its version is above `after`.

        Raises:
            MemoireTimeout: none came in `timeout` seconds (None: request_timeout).
            Closed: the client was closed.
        """
        waiting = self._waiting
        waiting.check_process()
        model = self._topics.wait(self.topic, after, waiting.seconds(timeout), waiting.check_open, self._endpoint)
        return self._handed.hand(model)


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
            MemoireTimeout: nothing came in `timeout` seconds; None sets no limit.
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
