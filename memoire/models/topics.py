"""Models of all topics that a client or proxy follows, and the threads that wait for them.

    notices, answers ──▶ Topics ──▶ TopicFetcher of the topic    which version is fetched, in which chunks
                           │            SubscriptionWatch        whether notices still come
                           └ is a ReceivedModels                 newest models, and waiting receivers

No socket: the owner passes notices and answers in, and `Topics` sends requests through functions that the owner gave.
`ReceivedModels` alone waits; what to fetch is decided elsewhere. If a reply names a version that no notice named,
notices of the topic are lost (`SubscriptionWatch`).
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from memoire import _core
from memoire.arguments import hint
from memoire.errors import MemoireTimeout, ParameterError
from memoire.limits import Limits
from memoire.wire import messages
from memoire.wire.frames import Answer

from .fetching import ChunkRequest, CompleteModel, Step, TopicFetcher
from .model import MAX_TOPICS, Model

MAX_WAITING_MODELS = 64
"""Models that wait for one subscription; beyond, the oldest are skipped."""
MAX_WAITING_BYTES = 1 << 28


class Subscription:
    """Models of a topic that one receiver has not taken yet. Belongs to its `ReceivedModels`."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.models: deque[Model] = deque()
        self.skipped = 0
        self.newest = 0  # version of the newest model that was added or skipped

    def put(self, model: Model) -> None:
        """Add a model. Versions since the one before count as skipped."""
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
    """Newest model of each followed topic, and models that receivers have not taken yet. Thread-safe."""

    def __init__(self) -> None:
        self._changed = _core.Condition()
        """Lock of all attributes, and the condition that waiting threads wait for."""
        self._newest: dict[str, Model] = {}
        self._subscriptions: dict[str, list[Subscription]] = {}  # subscriptions by followed topic
        self.named: tuple[str, ...] = ()
        """Topics in the server's newest reply, for errors."""

    def follow(self, name: str) -> bool:
        """Follow a topic. Return False if it was followed before.

        Raises:
            ParameterError: too many topics are followed.
        """
        with self._changed.held():
            if name in self._subscriptions:
                return False
            if len(self._subscriptions) >= MAX_TOPICS:
                raise ParameterError.with_text(
                    f"A client follows at most {MAX_TOPICS} topics: it cannot follow {name!r}."
                )
            self._subscriptions[name] = []
            return True

    def subscribe(self, name: str) -> Subscription:
        """Return a new receiver of a followed topic, which begins with the newest model if there is one."""
        subscription = Subscription(name)
        with self._changed.held():
            self._subscriptions[name].append(subscription)
            if name in self._newest:
                subscription.put(self._newest[name])
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a receiver of a topic."""
        with self._changed.held():
            subscriptions = self._subscriptions.get(subscription.topic, [])
            if subscription in subscriptions:
                subscriptions.remove(subscription)

    def has_receivers(self, name: str) -> bool:
        """Return True if a receiver wants every model of this topic, not only the newest."""
        return bool(self._subscriptions.get(name))

    def newest(self, name: str) -> Model | None:
        """Return the newest model of a topic; None before the first."""
        with self._changed.held():
            return self._newest.get(name)

    def versions(self) -> dict[str, int]:
        """Return the version of the newest model of each topic that has one."""
        with self._changed.held():
            return {name: self._newest[name].version for name in self._subscriptions if name in self._newest}

    def put(self, name: str, model: Model, *, is_renewed: bool) -> None:
        """Store the newest model of a topic, and wake waiting threads.

        Args:
            is_renewed: True if the publisher restarted its numbering, so that a former version may name another model.
        """
        with self._changed.held():
            self._newest[name] = model
            for subscription in self._subscriptions[name]:
                if model.version != subscription.newest or is_renewed:
                    subscription.put(model)
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all models, because another run began."""
        with self._changed.held():
            self._newest.clear()
            for subscriptions in self._subscriptions.values():
                for subscription in subscriptions:
                    subscription.models.clear()

    def close(self) -> None:
        """Wake all threads that wait for a model."""
        with self._changed.held():
            self._changed.notify_all()

    # Waiting

    def wait(self, name: str, after: int, seconds: float, check: Callable[[], None], endpoint: str) -> Model:
        """Return the newest model as soon as its version is above `after`.

        Args:
            check: Function that is called before each wait, and raises to end the wait.
            endpoint: Address of the server, for errors.

        Raises:
            MemoireTimeout: no newer model came in time.
        """

        def find() -> Model | None:
            newest = self._newest.get(name)
            return newest if newest is not None and newest.version > after else None

        what = f"model of topic {name!r}" + (f" newer than version {after}" if after else "")
        return self._wait_for(find, seconds, check, what, endpoint, name)

    def receive(
        self, subscription: Subscription, seconds: float | None, check: Callable[[], None], endpoint: str
    ) -> Model:
        """Return the next model of a receiver; `seconds` None waits without a limit. See `wait`."""

        def find() -> Model | None:
            return subscription.models.popleft() if subscription.models else None

        topic = subscription.topic
        return self._wait_for(find, seconds, check, f"message on topic {topic!r}", endpoint, topic)

    def _wait_for(
        self,
        find: Callable[[], Model | None],
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
                model = find()
                if model is not None:
                    return model
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise MemoireTimeout(what, endpoint, seconds or 0.0, self._advice(name))
                self._changed.wait(min(remaining, 3600.0))

    def _advice(self, name: str) -> str:
        """Return the possible reasons why a topic has no newer model."""
        if name in self.named:
            return "The server has published no newer model, or cannot be reached: see client.stats().silent."
        guess = hint(name, self.named)
        others = f" It has models of {', '.join(map(repr, self.named))}{guess}." if self.named else ""
        return f"The server has no model of this topic, or cannot be reached: see client.stats().silent.{others}"


Fetch: TypeAlias = Callable[[str, int, int, int, Callable[[Answer], None]], None]


UNHEARD_TIMEOUT = 12.0
"""Seconds after a reply named a version that no notice named, until the subscription counts as lost. Notices are
repeated more often.
"""


class SubscriptionWatch:
    """Detector of a lost subscription to one topic's notices."""

    def __init__(self) -> None:
        self._noticed = 0  # newest version in a notice
        self._named: tuple[int, float] | None = None  # time and version of a reply without notice

    def receive_reply_version(self, version: int, now: float) -> None:
        """Record the newest version in a reply."""
        if self._named is None and version > self._noticed:
            self._named = (version, now)

    def receive_notice(self, version: int) -> None:
        """Record the version in a notice."""
        self._noticed = max(self._noticed, version)
        if self._named is not None and self._named[0] <= self._noticed:
            self._named = None

    def reset(self) -> None:
        """Forget all versions, because they count from the beginning again."""
        self._noticed, self._named = 0, None

    @property
    def next_time(self) -> float:
        """Time at which the subscription is lost unless a notice comes."""
        return float("inf") if self._named is None else self._named[1] + UNHEARD_TIMEOUT

    def is_lost(self, now: float) -> bool:
        """Return True, once, if the subscription is lost and has to be renewed."""
        if now < self.next_time:
            return False
        self._named = None
        return True


class _Topic:
    """State of one topic. Belongs to the thread."""

    def __init__(self, name: str, fetcher: TopicFetcher) -> None:
        self.name, self.fetcher = name, fetcher
        self.watch = SubscriptionWatch()
        self.is_heard = False  # True if the socket is subscribed


class Topics(ReceivedModels):
    """All topics of one client, or of one server behind a proxy.

    The methods from `follow_topic` to `published`, and those of `ReceivedModels`, may be called by any thread. The
    other methods belong to the thread that owns the sockets, which calls `tick` at `next_time`.

    Args:
        fetch: Function that requests a part of a body (topic, version or 0 for the newest, offset, bytes or 0 for the
            node's choice, function that takes the answer).
        hear: Function that subscribes the socket to a topic, or ends that; returns False without a socket.
        post: Function that has the thread call a function soon.
        on_model: Function that gets each complete model, inside of the thread. The function's second argument is True
            if the publisher restarted, so that the version may be lower than before. The third is the origin of the
            topic's newest notice: server (hash of its name) and epoch, zeros before any notice.
        find: Function that returns a model that another server sent already, by topic, version and checksum.
        rng: Random numbers of the pauses.
        clock: Function that returns the seconds of the thread that calls `tick`.
    """

    def __init__(
        self,
        limits: Limits,
        fetch: Fetch,
        hear: Callable[[str, bool], bool],
        post: Callable[[Callable[[], None]], None],
        on_model: Callable[[Model, bool, tuple[int, int]], None] = lambda model, is_renewed, source: None,
        find: Callable[[str, int, int], Model | None] = lambda topic, version, checksum: None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._limits, self._fetch, self._hear, self._post, self._on_model = limits, fetch, hear, post, on_model
        self._find = find
        self._rng = rng or random.Random()
        self._clock = clock
        self._topics: dict[str, _Topic] = {}
        self.is_kept = False
        """True if the server keeps its models on disk, and so goes on counting after a restart. Models here that
        are newer than its models were then published while the server was away.
        """
        self.skipped = 0
        """Number of published versions that were passed over because newer ones came."""
        self.resubscribed = 0
        """Number of renewed subscriptions to topics whose notices did not come."""

    @property
    def rejected_bodies(self) -> Counter[str]:
        """Number of rejected bodies, by code."""
        return sum((topic.fetcher.refused for topic in list(self._topics.values())), Counter[str]())

    @property
    def fetched_bytes(self) -> int:
        """Number of bytes in all received chunks."""
        return sum(topic.fetcher.fetched_bytes for topic in list(self._topics.values()))

    # Calls from any thread

    def follow_topic(self, name: str) -> None:
        """Follow a topic, and keep its newest model.

        Raises:
            ParameterError: too many topics are followed.
        """
        if not self.follow(name):
            return
        fetcher = TopicFetcher(
            self._limits,
            lambda: self.has_receivers(name),
            lambda version, checksum: self._find(name, version, checksum),
            self._rng,
        )
        topic = self._topics[name] = _Topic(name, fetcher)
        self._post(lambda: self._begin(topic))

    def subscribe(self, name: str) -> Subscription:
        """Follow a topic, and return a new receiver of it, which begins with the newest model if there is one."""
        self.follow_topic(name)
        return super().subscribe(name)

    def version(self, name: str) -> int:
        """Return the version of a topic's newest model, or 0."""
        model = self.newest(name)
        return model.version if model else 0

    def published(self, name: str) -> int:
        """Return the newest version that the server announced, or 0; its body may be on its way."""
        topic = self._topics.get(name)
        return 0 if topic is None else topic.fetcher.newest_announced

    # Calls inside of the thread

    def subscribe_all(self) -> None:
        """Subscribe to all topics with a new socket."""
        for topic in list(self._topics.values()):
            topic.is_heard = False
            self._begin(topic)

    def _begin(self, topic: _Topic) -> None:
        # Subscribe before the first fetch, so that nothing is published in between.
        if not topic.is_heard:
            topic.is_heard = self._hear(topic.name, True)
        self._perform(topic, topic.fetcher.begin(self._clock()))

    def receive_versions(self, versions: Mapping[str, int]) -> None:
        """Record the newest versions in a server's reply, in case notices were lost."""
        self.named = tuple(versions)
        for name, version in versions.items():
            topic = self._topics.get(name)
            if topic is None:
                continue
            if topic.is_heard:
                topic.watch.receive_reply_version(version, self._clock())
            self._perform(topic, topic.fetcher.receive_versions(version, self._clock()))

    def receive_notice(self, notice: messages.Notice, payload: Any, home: int = 0) -> None:
        """Record a notice of a model that was published at `home` (the hash of that server's name), with a small body.

        Raises:
            ProtocolError: the body differs from the notice.
        """
        topic = self._topics.get(notice.topic)
        if topic is None:
            return
        if topic.fetcher.is_publisher_restart(notice, home, is_kept=self.is_kept):
            topic.watch.reset()
        topic.watch.receive_notice(notice.version)
        self._perform(topic, topic.fetcher.receive_notice(notice, payload, self._clock()))

    def accept_lower_versions(self) -> None:
        """Accept lower versions of all topics, because the server restarted."""
        for topic in list(self._topics.values()):
            topic.watch.reset()
            topic.fetcher.renew()

    def begin_run(self) -> None:
        """Forget all models, because another run began. Versions go on counting over runs."""
        self.clear()
        for topic in list(self._topics.values()):
            topic.watch.reset()
            topic.fetcher.forget()

    def is_coming(self, name: str, version: int) -> bool:
        """Return True if this version (0: any) is queued or being fetched."""
        topic = self._topics.get(name)
        return topic is not None and topic.fetcher.is_coming(version)

    def next_time(self) -> float:
        """Return the time at which `tick` has something to do."""
        if not self._topics:
            return float("inf")
        return min([min(topic.watch.next_time, topic.fetcher.next_time) for topic in list(self._topics.values())])

    def tick(self) -> None:
        """Continue fetches after their pauses, give up those that stall, and renew lost subscriptions."""
        now = self._clock()
        for topic in list(self._topics.values()):
            self._perform(topic, topic.fetcher.tick(now))
            if topic.watch.is_lost(now):
                self.resubscribed += 1
                self._hear(topic.name, False)
                topic.is_heard = self._hear(topic.name, True)

    def _perform(self, topic: _Topic, steps: Iterable[Step]) -> None:
        """Send the requests of steps, and deliver complete models."""
        for step in steps:
            if isinstance(step, CompleteModel):
                self.skipped += step.skipped
                self.put(topic.name, step.model, is_renewed=step.is_renewed)
                self._on_model(step.model, step.is_renewed, step.source)
            else:
                self._fetch(topic.name, step.version, step.offset, step.size, self._answered(topic, step))

    def _answered(self, topic: _Topic, request: ChunkRequest) -> Callable[[Answer], None]:
        return lambda answer: self._perform(topic, topic.fetcher.receive_answer(request, answer, self._clock()))


def fetch_patience(limits: Limits) -> float:
    """Return the seconds before a chunk is requested again. Chunks take long if many clients fetch at once, and each
    repeated chunk adds to that.
    """
    return 5.0 * limits.tuning.resend_after
