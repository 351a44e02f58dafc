"""Client lock, and the handles with which a client's caller gets models: the newest of a topic, or all in order.

The lock adds two rules to that of every node: a forked process may not use the client, and writers may still push
while the client is being closed.
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
    """Lock of the state that the callers' threads and the client's thread share.

    Args:
        request_timeout: Seconds that a call waits at most if its caller sets no timeout.
    """

    def __init__(self, request_timeout: float) -> None:
        super().__init__("this client")
        self.is_parting = False
        """True during close(), if open episodes of writers are still pushed."""
        self.closed_by = float("inf")
        """Deadline of close(), until which writers may push; on the lock's clock."""
        self._request_timeout, self._pid = request_timeout, os.getpid()

    def seconds(self, timeout: float | None) -> float:
        """Return the caller's timeout in seconds; None takes `request_timeout`."""
        return seconds(timeout, self._request_timeout)

    @property
    def is_forked(self) -> bool:
        """True if this process was forked from the client's: a thread of the parent may hold the lock, and never
        release it in this process.
        """
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ForkedError in a process forked from the client's. Called before each use of the lock by writers and
        model handles, which do not pass through the client.
        """
        if (pid := os.getpid()) != self._pid:
            raise ForkedError("this client", self._pid, pid)

    def check_open(self) -> None:
        """Raise Closed, ForkedError, or the error that ended the client."""
        self.check_process()
        super().check_open()

    def check_can_push(self) -> None:
        """Do as `check_open`, but let writers push their open episodes while the client is being closed."""
        if not self.is_parting:
            self.check_open()


class HandedModels:
    """Newest versions that a client's caller received, by topic: the models that act. Thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._versions: dict[str, int] = {}

    def add_topic(self, topic: str) -> None:
        """Register a topic whose models the caller uses."""
        self._versions.setdefault(topic, 0)

    def set_acting_model(self, model: Model) -> Model:
        """Record the model as the one that acts; returns it."""
        self._versions[model.topic] = model.version
        return model

    def version_or_acting(self, model_version: Any) -> int:
        """Return `model_version`, or for 0 the version of the model that acts.

        Raises:
            ParameterError: `model_version` is not a version.
            ModelUnknown: the caller has models of several topics, and the table sets no `model_topic`.
        """
        is_unknown = type(model_version) is int and model_version == 0  # the usual case, without a call
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
    """Newest model of one topic, kept up to date in the background.

    Args:
        endpoint: Address that models come from, for errors.
        handed: Records each model that the caller receives.

    Example:
        policy = client.model("policy")
        model = policy.wait(timeout=60.0)
        print(model.version, len(model.body))
    """

    def __init__(self, topic: str, topics: Topics, waiting: ClientLock, endpoint: str, handed: HandedModels) -> None:
        self.topic = topic
        self._topics, self._waiting, self._endpoint, self._handed = topics, waiting, endpoint, handed

    @property
    def version(self) -> int:
        """Version of the newest model that has arrived; 0 if no model has."""
        self._waiting.check_process()
        return self._topics.version(self.topic)

    @property
    def published(self) -> int:
        """Version of the newest model that the server has announced; the model is still on its way if `version` is
        lower. A step that waited for a learner returns after the server has announced the learner's new model.
        """
        self._waiting.check_process()
        return self._topics.published(self.topic)

    def newest(self) -> Model | None:
        """Return the newest model that has arrived, or None: .version, .body (bytes), .value (as published)."""
        self._waiting.check_open()
        model = self._topics.newest(self.topic)
        return None if model is None else self._handed.set_acting_model(model)

    def wait(self, timeout: float | None = None, *, after: int = 0) -> Model:
        """Return the newest model as soon as its version is above `after`.

        Raises:
            MemoireTimeout: no such model came in `timeout` seconds (None: request_timeout).
            Closed: the client was closed.
        """
        waiting = self._waiting
        waiting.check_process()
        model = self._topics.wait(self.topic, after, waiting.seconds(timeout), waiting.check_open, self._endpoint)
        return self._handed.set_acting_model(model)


class Receiver:
    """Receiver of everything published on one topic, in order; `Client.subscribe` makes it.

    Args:
        endpoint: Address that models come from, for errors.
    """

    def __init__(self, subscription: Subscription, topics: Topics, waiting: ClientLock, endpoint: str) -> None:
        self.topic = subscription.topic
        self._subscription, self._topics, self._waiting, self._endpoint = subscription, topics, waiting, endpoint

    @property
    def skipped(self) -> int:
        """Number of versions that were published and not received: the receiver, or the network, was too slow."""
        return self._subscription.skipped

    def receive(self, timeout: float | None = None) -> bytes | str:
        """Return the next value of the topic, in the type in which it was published; the first call returns the newest.

        Raises:
            MemoireTimeout: no value came in `timeout` seconds; None sets no limit.
            Closed: the client was closed.
        """
        return self.receive_model(timeout).value

    def receive_model(self, timeout: float | None = None) -> Model:
        """Return the next model as `receive` does, with its version and topic."""
        self._waiting.check_process()
        patience = None if timeout is None else seconds(timeout)
        return self._topics.receive(self._subscription, patience, self._waiting.check_open, self._endpoint)

    def close(self) -> None:
        """Unsubscribe from the topic; does nothing if the client is closed or in a forked process."""
        if not (self._waiting.is_closing or self._waiting.is_forked):
            self._topics.unsubscribe(self._subscription)
