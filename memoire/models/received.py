"""The models that are here, and the threads that wait for them. Only this waits; what to fetch is decided elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from memoire import _core
from memoire.errors import MemoireTimeout, ParameterError
from memoire.limits import hint

from .model import MAX_TOPICS, Model

MAX_WAITING_MODELS = 64
"""Models that wait for one subscription; the oldest are skipped beyond."""
MAX_WAITING_BYTES = 1 << 28


class Subscription:
    """Models of a topic that one receiver has not taken yet; belongs to its `ReceivedModels`."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.models: deque[Model] = deque()
        self.skipped = 0
        self.newest = 0  # version of the newest model that was put in or skipped

    def put(self, model: Model) -> None:
        """Add a model; what was published in between and did not come is counted as skipped."""
        if self.newest > 0 and model.version > self.newest + 1:
            self.skipped += model.version - self.newest - 1
        self.newest = model.version
        self.models.append(model)
        while len(self.models) > MAX_WAITING_MODELS or (
            len(self.models) > 1 and sum(model.size for model in self.models) > MAX_WAITING_BYTES
        ):
            self.models.popleft()
            self.skipped += 1


class ReceivedModels:
    """The newest model of each followed topic, and models that receivers have not yet taken. Thread-safe."""

    def __init__(self) -> None:
        self._changed = _core.Condition()
        """Guards everything here, and tells who waits."""
        self._newest: dict[str, Model] = {}
        self._subscriptions: dict[str, list[Subscription]] = {}  # of each topic that is followed
        self.published: tuple[str, ...] = ()
        """Topics that the server has named last, for errors."""

    def follow(self, name: str) -> bool:
        """Follow a topic from now on; False if it was followed before.

        Raises:
            ParameterError: too many are followed.
        """
        with self._changed.held():
            if name in self._subscriptions:
                return False
            if len(self._subscriptions) >= MAX_TOPICS:
                raise ParameterError(
                    "topic", name, f"none but the {MAX_TOPICS} that a client follows: it is one too many"
                )
            self._subscriptions[name] = []
            return True

    def subscribe(self, name: str) -> Subscription:
        """A new receiver of a topic that is followed; begins with the newest model, if there is one."""
        subscription = Subscription(name)
        with self._changed.held():
            self._subscriptions[name].append(subscription)
            if name in self._newest:
                subscription.put(self._newest[name])
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a receiver."""
        with self._changed.held():
            subscriptions = self._subscriptions.get(subscription.topic, [])
            if subscription in subscriptions:
                subscriptions.remove(subscription)

    def has_receivers(self, name: str) -> bool:
        """Whether anybody wants every model of this topic, and not only the newest."""
        return bool(self._subscriptions.get(name))

    def newest(self, name: str) -> Model | None:
        """The newest model that is here."""
        with self._changed.held():
            return self._newest.get(name)

    def versions(self) -> dict[str, int]:
        """Version of the newest model of each topic that has one."""
        with self._changed.held():
            return {name: self._newest[name].version for name in self._subscriptions if name in self._newest}

    def put(self, name: str, model: Model, *, is_renewed: bool) -> None:
        """A model has come, and is the newest one; wakes who waits.

        Args:
            is_renewed: Its publisher began anew: a version that was put before may name another model.
        """
        with self._changed.held():
            self._newest[name] = model
            for subscription in self._subscriptions[name]:
                if model.version != subscription.newest or is_renewed:
                    subscription.put(model)
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all models: another run is counted."""
        with self._changed.held():
            self._newest.clear()
            for subscriptions in self._subscriptions.values():
                for subscription in subscriptions:
                    subscription.models.clear()

    def close(self) -> None:
        """Wake up whoever waits."""
        with self._changed.held():
            self._changed.notify_all()

    # Waiting

    def wait(self, name: str, after: int, seconds: float, check: Callable[[], None], endpoint: str) -> Model:
        """The newest model as soon as its version is above `after`; see `Topics.wait`."""

        def found() -> Model | None:
            newest = self._newest.get(name)
            return newest if newest is not None and newest.version > after else None

        what = f"model of topic {name!r}" + (f" newer than version {after}" if after else "")
        return self._wait_for(found, seconds, check, what, endpoint, name)

    def receive(
        self, subscription: Subscription, seconds: float | None, check: Callable[[], None], endpoint: str
    ) -> Model:
        """The next model of a receiver; see `Topics.receive`."""

        def found() -> Model | None:
            return subscription.models.popleft() if subscription.models else None

        topic = subscription.topic
        return self._wait_for(found, seconds, check, f"message on topic {topic!r}", endpoint, topic)

    def _wait_for(
        self,
        found: Callable[[], Model | None],
        seconds: float | None,
        check: Callable[[], None],
        what: str,
        endpoint: str,
        name: str,
    ) -> Model:
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        with self._changed.held():
            while True:
                check()
                model = found()
                if model is not None:
                    return model
                left = deadline - time.monotonic()
                if left <= 0:
                    raise MemoireTimeout(what, endpoint, seconds or 0.0, self._advice(name))
                self._changed.wait(min(left, 3600.0))

    def _advice(self, name: str) -> str:
        """Why nothing of a topic may have come."""
        if name in self.published:
            return "The server has published no newer one, or cannot be reached: see client.stats().silent."
        guess = hint(name, self.published)
        there = f"It has models of {', '.join(map(repr, self.published))}{guess}, or" if self.published else "Or"
        return f"Nobody published this topic there yet. {there} it cannot be reached: see client.stats().silent."
