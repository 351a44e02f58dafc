"""The models of all topics that a client or proxy follows.

    notices, answers ──▶ Topics ──▶ TopicFetcher of the topic    which version is fetched, in which chunks
                           │            SubscriptionWatch        whether notices still come
                           └ is a ReceivedModels                 the newest ones, and who waits for them

No socket: it is told of notices and answers, and asks through the functions it was made with.

A version that a reply named, and that no notice did, shows that notices of a topic do not come (`SubscriptionWatch`).

The models that are here, and the threads that wait for them. Only this waits; what to fetch is decided elsewhere.
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
        self.named: tuple[str, ...] = ()
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
        """The newest model as soon as its version is above `after`.

        Args:
            check: Called before each wait; raises when waiting is over.
            endpoint: Whose models these are, for errors.

        Raises:
            MemoireTimeout: none came in time.
        """

        def found() -> Model | None:
            newest = self._newest.get(name)
            return newest if newest is not None and newest.version > after else None

        what = f"model of topic {name!r}" + (f" newer than version {after}" if after else "")
        return self._wait_for(found, seconds, check, what, endpoint, name)

    def receive(
        self, subscription: Subscription, seconds: float | None, check: Callable[[], None], endpoint: str
    ) -> Model:
        """The next model of a receiver; None waits without an end. See `wait`."""

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
        if name in self.named:
            return "The server has published no newer one, or cannot be reached: see client.stats().silent."
        guess = hint(name, self.named)
        there = f"It has models of {', '.join(map(repr, self.named))}{guess}, or" if self.named else "Or"
        return f"Nobody published this topic there yet. {there} it cannot be reached: see client.stats().silent."


Fetch: TypeAlias = Callable[[str, int, int, int, Callable[[Answer], None]], None]


UNHEARD_TIMEOUT = 12.0
"""Seconds after which a version that a reply named, and no notice did, shows that the subscription was lost: notices
are repeated more often.
"""


class SubscriptionWatch:
    """Watches over the subscription of one topic."""

    def __init__(self) -> None:
        self._noticed = 0  # newest version that a notice named
        self._named: tuple[int, float] | None = None  # a version that a reply named before any notice, and when

    def named(self, version: int, now: float) -> None:
        """A reply has named the newest version."""
        if self._named is None and version > self._noticed:
            self._named = (version, now)

    def noticed(self, version: int) -> None:
        """A notice has named a version."""
        self._noticed = max(self._noticed, version)
        if self._named is not None and self._named[0] <= self._noticed:
            self._named = None

    def reset(self) -> None:
        """Versions count from the beginning again."""
        self._noticed, self._named = 0, None

    @property
    def next_time(self) -> float:
        """When the subscription is lost unless a notice comes."""
        return float("inf") if self._named is None else self._named[1] + UNHEARD_TIMEOUT

    def is_lost(self, now: float) -> bool:
        """Whether to subscribe again. It is said once."""
        if now < self.next_time:
            return False
        self._named = None
        return True


class _Topic:
    """One topic; belongs to the thread."""

    def __init__(self, name: str, fetcher: TopicFetcher) -> None:
        self.name, self.fetcher = name, fetcher
        self.watch = SubscriptionWatch()
        self.is_heard = False  # the socket is subscribed


class Topics(ReceivedModels):
    """All topics of one client, or of one server behind a proxy.

    Methods from `want` to `published`, and those of `ReceivedModels`, are called from any thread; the others inside of
    the thread that owns the sockets, which calls `turn` when `next_time` has come.

    Args:
        fetch: Asks for a stretch of a body (topic, version or 0 for the newest, offset, bytes or 0 for as many as the
            node likes, what to do with the answer).
        hear: Subscribes the socket to a topic, or ends that; False while there is none.
        post: Has the thread call a function soon.
        on_model: Told of each model that is complete, inside of the thread; whether its publisher began anew, so that
            the version may be lower than before; and of the topic's newest notice the server (the hash of its name)
            and its epoch, zeros where there was none.
        find: A model that is here already, from another server, by topic, version and checksum.
        rng: Of the random pauses.
        clock: Seconds, as the thread that calls `turn` counts them.
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
        """Whether the server keeps its models on disk: one that began anew goes on counting, and what it has that is
        older than what is here was published while it was away."""
        self.skipped = 0
        """Versions between two that came: published, and passed over because newer ones were there."""
        self.resubscribed = 0
        """Topics that were subscribed to again, because notices of them did not come."""

    @property
    def refused(self) -> Counter[str]:
        """Bodies that were refused, by code."""
        return sum((topic.fetcher.refused for topic in list(self._topics.values())), Counter[str]())

    @property
    def fetched_bytes(self) -> int:
        """Of all chunks that came."""
        return sum(topic.fetcher.fetched_bytes for topic in list(self._topics.values()))

    # From any thread

    def want(self, name: str) -> None:
        """Keep the newest model of this topic here from now on.

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
        """A new receiver of this topic; begins with the newest model, if there is one."""
        self.want(name)
        return super().subscribe(name)

    def version(self, name: str) -> int:
        """Its version, or 0."""
        model = self.newest(name)
        return model.version if model else 0

    def published(self, name: str) -> int:
        """The newest version of it that the server has told of, or 0; its body may be on its way."""
        topic = self._topics.get(name)
        return 0 if topic is None else topic.fetcher.heard

    # Inside of the thread

    def opened(self) -> None:
        """There is a socket to hear with now, the first or one made anew."""
        for topic in list(self._topics.values()):
            topic.is_heard = False
            self._begin(topic)

    def _begin(self, topic: _Topic) -> None:
        # Heard first and asked for afterwards, so that nothing is published in between.
        if not topic.is_heard:
            topic.is_heard = self._hear(topic.name, True)
        self._perform(topic, topic.fetcher.begin(self._clock()))

    def announced(self, versions: Mapping[str, int]) -> None:
        """The server says what its newest versions are: a notice may have been missed."""
        self.named = tuple(versions)
        for name, version in versions.items():
            topic = self._topics.get(name)
            if topic is None:
                continue
            if topic.is_heard:
                topic.watch.named(version, self._clock())
            self._perform(topic, topic.fetcher.announced(version, self._clock()))

    def noticed(self, notice: messages.Notice, payload: Any, home: int = 0) -> None:
        """A model was published at `home` (the hash of that server's name); its body may be here already.

        Raises:
            ProtocolError: the body is not the one that was announced.
        """
        topic = self._topics.get(notice.topic)
        if topic is None:
            return
        if topic.fetcher.is_anew(notice, home, is_kept=self.is_kept):
            topic.watch.reset()
        topic.watch.noticed(notice.version)
        self._perform(topic, topic.fetcher.noticed(notice, payload, self._clock()))

    def restarted(self) -> None:
        """The server began anew: its versions may be lower than those we know, and count from here on."""
        for topic in list(self._topics.values()):
            topic.watch.reset()
            topic.fetcher.renew()

    def begin_run(self) -> None:
        """Another run is counted: its models are others, and those that are here belong to the former one.

        Versions go on counting over runs.
        """
        self.clear()
        for topic in list(self._topics.values()):
            topic.watch.reset()
            topic.fetcher.forget()

    def is_coming(self, name: str, version: int) -> bool:
        """Whether this version (0: any) is being fetched now, or waits for it."""
        topic = self._topics.get(name)
        return topic is not None and topic.fetcher.is_coming(version)

    def next_time(self) -> float:
        """When `turn` has something to do."""
        if not self._topics:
            return float("inf")
        return min([min(topic.watch.next_time, topic.fetcher.next_time) for topic in list(self._topics.values())])

    def turn(self) -> None:
        """Go on with the bodies whose pause is over, give up those that stall, and look after subscriptions."""
        now = self._clock()
        for topic in list(self._topics.values()):
            self._perform(topic, topic.fetcher.turn(now))
            if topic.watch.is_lost(now):
                self.resubscribed += 1
                self._hear(topic.name, False)
                topic.is_heard = self._hear(topic.name, True)

    def _perform(self, topic: _Topic, steps: Iterable[Step]) -> None:
        """Ask for what is to be fetched, and hand out what is complete."""
        for step in steps:
            if isinstance(step, CompleteModel):
                self.skipped += step.skipped
                self.put(topic.name, step.model, is_renewed=step.is_renewed)
                self._on_model(step.model, step.is_renewed, step.source)
            else:
                self._fetch(topic.name, step.version, step.offset, step.size, self._answered(topic, step))

    def _answered(self, topic: _Topic, request: ChunkRequest) -> Callable[[Answer], None]:
        return lambda answer: self._perform(topic, topic.fetcher.answered(request, answer, self._clock()))


def fetch_patience(limits: Limits) -> float:
    """Seconds before a chunk is asked for again: where many clients fetch at once it takes its time, and each chunk
    that is sent twice makes it worse.
    """
    return 5.0 * limits.tuning.resend_after
