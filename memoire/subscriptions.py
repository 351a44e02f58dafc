"""What a client or proxy knows of the models of each topic: announced, on the way, here, and who waits for them.

Bodies are fetched one at a time for each topic, in chunks, and are seen by nobody before their hash is right. No
socket: it is told of notices and answers, and asks through the functions it was made with.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from . import wire
from .calls import Answer
from .errors import Closed, MemoireError, MemoireTimeout, ProtocolError
from .limits import Limits
from .models import MOST_TOPICS, Assembly, Model

KEPT = 64
"""Models that wait for one subscription; the oldest are skipped beyond."""
KEPT_BYTES = 1 << 28
MOST_MISSED = 64
"""Versions that are fetched after a gap in what was heard."""

Fetch = Callable[[str, int, int, Callable[[Answer], None]], None]


class Subscription:
    """Models of a topic that one receiver has not taken yet; belongs to its `Topics`."""

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
        while len(self.models) > KEPT or (
            len(self.models) > 1 and sum(model.size for model in self.models) > KEPT_BYTES
        ):
            self.models.popleft()
            self.skipped += 1


class _Topic:
    """One topic; under the lock of `Topics`."""

    def __init__(self) -> None:
        self.newest: Model | None = None
        self.epoch = 0  # newest one of a notice
        self.heard = 0  # newest version that was announced, fetched or not
        self.subscriptions: list[Subscription] = []
        self.is_heard = False  # the socket is subscribed
        self.queue: deque[Model | int] = deque()  # in order: a body that is here, or a version to fetch
        self.assembly: Assembly | None = None
        self.is_fetching = False
        self.asked_newest = False
        self.is_renewed = False  # the server began anew: a version that we know may name another model


class Topics:
    """All topics of one client.

    `want`, `subscribe`, `newest`, `wait` and `receive` are called from any thread; the others inside of the client's
    thread.

    Args:
        fetch: Asks for a stretch of a body (topic, version or 0 for the newest, offset, what to do with the answer).
        hear: Subscribes the socket to a topic, or ends that; False while there is none.
        post: Has the client's thread call a function soon.
        on_model: Told of each model that is complete, inside of the thread; whether its publisher began anew, so that
        the
            version may be lower than before; and the newest epoch that a notice of this topic had.
    """

    def __init__(
        self,
        limits: Limits,
        fetch: Fetch,
        hear: Callable[[str, bool], bool],
        post: Callable[[Callable[[], None]], None],
        on_model: Callable[[Model, bool, int], None] = lambda model, is_renewed, epoch: None,
    ) -> None:
        self._limits, self._fetch, self._hear, self._post, self._on_model = limits, fetch, hear, post, on_model
        self._topics: dict[str, _Topic] = {}
        self._changed = threading.Condition()  # guards everything here
        self.refused: dict[str, int] = {}
        """Bodies that were refused, by code."""

    # From any thread

    def want(self, name: str) -> None:
        """Keep the newest model of this topic here from now on."""
        with self._changed:
            if name in self._topics:
                return
            if len(self._topics) >= MOST_TOPICS:
                raise ValueError(f"topic {name!r} is one too many: a client follows {MOST_TOPICS}")
            self._topics[name] = _Topic()
        self._post(lambda: self._begin(name))

    def subscribe(self, name: str) -> Subscription:
        """A new receiver of this topic; begins with the newest model, if there is one."""
        self.want(name)
        subscription = Subscription(name)
        with self._changed:
            topic = self._topics[name]
            topic.subscriptions.append(subscription)
            if topic.newest is not None:
                subscription.put(topic.newest)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a receiver."""
        with self._changed:
            topic = self._topics.get(subscription.topic)
            if topic is not None and subscription in topic.subscriptions:
                topic.subscriptions.remove(subscription)

    def newest(self, name: str) -> Model | None:
        """The newest model that is here."""
        with self._changed:
            topic = self._topics.get(name)
            return topic.newest if topic else None

    def version(self, name: str) -> int:
        """Its version, or 0."""
        model = self.newest(name)
        return model.version if model else 0

    def versions(self) -> dict[str, int]:
        """Version of the newest model of each topic that has one."""
        with self._changed:
            return {name: topic.newest.version for name, topic in self._topics.items() if topic.newest}

    def wait(self, name: str, after: int, seconds: float, check: Callable[[], None], endpoint: str) -> Model:
        """The newest model as soon as its version is above `after`."""

        def found() -> Model | None:
            newest = self._topics[name].newest
            return newest if newest is not None and newest.version > after else None

        what = f"model of topic {name!r}" + (f" newer than version {after}" if after else "")
        return self._wait_for(found, seconds, check, what, endpoint)

    def receive(
        self, subscription: Subscription, seconds: float | None, check: Callable[[], None], endpoint: str
    ) -> Model:
        """The next model of a receiver."""

        def found() -> Model | None:
            return subscription.models.popleft() if subscription.models else None

        return self._wait_for(found, seconds, check, f"message on topic {subscription.topic!r}", endpoint)

    def _wait_for(
        self,
        found: Callable[[], Model | None],
        seconds: float | None,
        check: Callable[[], None],
        what: str,
        endpoint: str,
    ) -> Model:
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                check()
                model = found()
                if model is not None:
                    return model
                left = deadline - time.monotonic()
                if left <= 0:
                    advice = "Nobody published there yet, or the server cannot be reached: see client.stats().silent."
                    raise MemoireTimeout(what, endpoint, seconds or 0.0, advice)
                self._changed.wait(min(left, 3600.0))

    def close(self) -> None:
        """Wake up whoever waits."""
        with self._changed:
            self._changed.notify_all()

    # Inside of the thread

    def opened(self) -> None:
        """There is a socket to hear with now, the first or one made anew."""
        for name, topic in list(self._topics.items()):
            topic.is_heard = False
            self._begin(name)

    def _begin(self, name: str) -> None:
        with self._changed:
            topic = self._topics[name]
        # Heard first and asked for afterwards, so that nothing is published in between.
        if not topic.is_heard:
            topic.is_heard = self._hear(name, True)
        if not topic.asked_newest:
            topic.asked_newest = True
            topic.queue.append(0)
            self._advance(name, topic)

    def announced(self, versions: Mapping[str, int]) -> None:
        """The server says what its newest versions are: a notice may have been missed."""
        for name, version in versions.items():
            topic = self._topics.get(name)
            if topic is not None and version > topic.heard:
                self._queue_missed(topic, version)
                topic.heard = version
                topic.queue.append(version)
                self._advance(name, topic)

    def noticed(self, notice: wire.Notice, payload: Any) -> None:
        """A model was published; its body may be here already.

        Raises:
            ProtocolError: the body is not the one that was announced.
        """
        topic = self._topics.get(notice.topic)
        if topic is None:
            return
        self._look_at_epoch(topic, notice)
        if notice.version <= topic.heard:
            return
        self._queue_missed(topic, notice.version)
        if payload is None and notice.size:
            topic.queue.append(notice.version)
        else:
            topic.queue.append(model_of(notice, b"" if payload is None else bytes(payload)))
        topic.heard = notice.version
        self._advance(notice.topic, topic)

    def _queue_missed(self, topic: _Topic, version: int) -> None:
        """Fetch what was published between the newest that was heard of and this: the node may have it still."""
        if topic.subscriptions and topic.heard:
            topic.queue.extend(range(max(topic.heard + 1, version - MOST_MISSED), version))

    def _look_at_epoch(self, topic: _Topic, notice: wire.Notice) -> None:
        """A publisher that began anew counts from 1: its epoch is newer, and its versions name other models."""
        if notice.epoch > topic.epoch:
            is_known = topic.newest is not None and topic.newest.digest == notice.sha256
            if topic.epoch and notice.version <= topic.heard and not is_known:
                topic.heard = 0
                topic.is_renewed = True
            topic.epoch = notice.epoch

    def restarted(self) -> None:
        """The server began anew: its versions may be lower than those we know, and count from here on."""
        for topic in self._topics.values():
            topic.heard = 0
            topic.is_renewed = True

    def _advance(self, name: str, topic: _Topic) -> None:
        """Deliver what is next in the queue, or fetch it."""
        while topic.queue and not topic.is_fetching:
            if not topic.subscriptions and len(topic.queue) > 1:
                topic.queue.popleft()  # only the newest counts
                continue
            item = topic.queue.popleft()
            if topic.newest is not None and item in (0, topic.newest.version) and not topic.is_renewed:
                continue  # it is here; what came after it is announced
            if isinstance(item, Model):
                self._deliver(topic, item)
            else:
                topic.is_fetching = True
                topic.assembly = None
                self._fetch(name, item, 0, lambda answer: self._fetched(name, topic, answer))

    def _fetched(self, name: str, topic: _Topic, answer: Answer) -> None:
        if isinstance(answer, Closed):
            return
        try:
            model = self._assemble(topic, answer)
        except ProtocolError as error:
            self.refused[error.code] = self.refused.get(error.code, 0) + 1
            model = None
            topic.assembly = None
        if model is None and topic.assembly is not None:
            assembly = topic.assembly
            self._fetch(name, assembly.version, assembly.offset, lambda answer: self._fetched(name, topic, answer))
            return
        topic.is_fetching = False
        topic.assembly = None
        if model is not None and model.version > topic.heard:
            self._queue_missed(topic, model.version)  # the newest was asked for, and it is newer than expected
            topic.heard = model.version
            topic.queue.append(model)
        elif model is not None:
            self._deliver(topic, model)
        self._advance(name, topic)

    def _assemble(self, topic: _Topic, answer: Answer) -> Model | None:
        if isinstance(answer, MemoireError):
            topic.assembly = None
            return None  # it is not there (any more): the next announcement brings a newer one
        chunk = answer.body
        if not isinstance(chunk, wire.Chunk):
            raise ProtocolError("unexpected", f"FETCH was answered by {answer.type.name}")
        if topic.assembly is None:
            newest = topic.newest
            if newest and not topic.is_renewed and (newest.version, newest.digest) == (chunk.version, chunk.sha256):
                return None  # the newest was asked for, and it is here: not again, however large
            topic.assembly = Assembly(
                chunk.topic, chunk.version, chunk.size, chunk.sha256, chunk.text, byte_limit=self._limits.model_bytes
            )
        if (chunk.version, chunk.sha256) != (topic.assembly.version, topic.assembly.digest):
            raise ProtocolError("unexpected", "a chunk of another model")
        payload = b"" if answer.payload is None else memoryview(answer.payload)
        return topic.assembly.add(chunk.offset, payload)

    def _deliver(self, topic: _Topic, model: Model) -> None:
        with self._changed:
            newest = topic.newest
            if newest is not None and not topic.is_renewed and model.version <= newest.version:
                return
            is_renewed, topic.is_renewed = topic.is_renewed, False
            topic.newest = model
            for subscription in topic.subscriptions:
                if model.version != subscription.newest:
                    subscription.put(model)
            self._changed.notify_all()
        self._on_model(model, is_renewed, topic.epoch)


def model_of(notice: wire.Notice, body: bytes) -> Model:
    """The model of a notice that carries its body.

    Raises:
        ProtocolError: it has another size or hash than the notice says.
    """
    if len(body) != notice.size or hashlib.sha256(body).digest() != notice.sha256:
        raise ProtocolError(
            "payload", f"the body of {notice.topic!r} version {notice.version} is not the announced one"
        )
    if notice.text:
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("value", f"model {notice.topic!r} says it is text and is not UTF-8") from error
    return Model(notice.topic, notice.version, body, notice.text, notice.sha256)
