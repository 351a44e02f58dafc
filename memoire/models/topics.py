"""What a client or proxy knows of the models of each topic: announced, on the way, here, and who waits for them.

    notice v7 ─┐                                  ┌─ is it here already, or at a neighbour? then nothing is fetched
    UPDATED v7 ┴▶ queue of the topic ─▶ fetching ─┼─ first chunk: says size and hash
                                                  └─ a random pause, then a few chunks at a time ─▶ hash ─▶ delivered

Bodies are fetched one at a time for each topic, in chunks, and are seen by nobody before their hash is right. What
fails is forgotten, and asked for again when its version is announced the next time: that happens every few seconds. No
socket: it is told of notices and answers, and asks through the functions it was made with.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memoire.errors import Closed, MemoireError, MemoireTimeout, ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.suggestions import hint
from memoire.wire import messages
from memoire.wire.frames import Answer

from .model import MOST_TOPICS, Assembly, Model, check_text

KEPT = 64
"""Models that wait for one subscription; the oldest are skipped beyond."""
KEPT_BYTES = 1 << 28
MOST_MISSED = 64
"""Versions that are fetched after a gap in what was heard."""

MOST_QUEUED = 256
"""Versions of one topic that wait until the one that is being fetched is here; the oldest are skipped beyond."""
STALL = 10.0
"""Seconds without a chunk after which a newer version is fetched instead, where there is one."""
QUICK = 0.2
"""Seconds within which a chunk comes where the way has room for more of them at a time."""
UNHEARD = 12.0
"""Seconds after which a version that a reply named, and no notice did, shows that the subscription was lost: notices
are repeated more often.
"""
MOST_HOMES = 256
"""Servers whose newest epoch is kept for each topic."""
LARGE = 16 << 20
"""Bytes of a body from which on the whole of `limits.model_spread` is used."""

Fetch = Callable[[str, int, int, int, Callable[[Answer], None]], None]


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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A version that was announced, 0 for the newest; its hash where a notice said it."""

    version: int
    digest: bytes = b""


class _Fetching:
    """A body on its way."""

    def __init__(self, version: int, now: float) -> None:
        self.version = version
        self.heard_at = now  # when the newest chunk came
        self.assembly: Assembly | None = None
        self.asked = 0  # everything before this offset was asked for
        self.open = 0  # chunks that were asked for and have not come
        self.stride = 0  # bytes of a chunk, as the first one came
        self.resume_at = 0.0  # when the random pause is over
        self.window = 1  # chunks that may be on their way: more while they come quickly, fewer where many clients fetch


class _Topic:
    """One topic; belongs to the thread, but for `newest` and `subscriptions`, under the lock of `Topics`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.newest: Model | None = None
        self.subscriptions: list[Subscription] = []
        self.epochs: OrderedDict[int, int] = OrderedDict()  # newest one of a notice, by the hash of its server's name
        self.source = (0, 0)  # of the newest notice: hash of the server's name, epoch
        self.heard = 0  # newest version that was announced, fetched or not
        self.noticed = 0  # the same, by notices alone
        self.told: tuple[int, float] | None = None  # a version that a reply named before any notice, and when
        self.is_heard = False  # the socket is subscribed
        self.queue: deque[Model | _Wanted] = deque()  # in order: a body that is here, or a version to fetch
        self.fetching: _Fetching | None = None
        self.asked_newest = False
        self.is_renewed = False  # the server began anew: a version that we know may name another model


class Topics:
    """All topics of one client, or of one server behind a proxy.

    `want`, `subscribe`, `newest`, `wait` and `receive` are called from any thread; the others inside of the thread that
    owns the sockets, which calls `turn` when `next_time` has come.

    Args:
        fetch: Asks for a stretch of a body (topic, version or 0 for the newest, offset, bytes or 0 for as many as the
            node likes, what to do with the answer).
        hear: Subscribes the socket to a topic, or ends that; False while there is none.
        post: Has the thread call a function soon.
        on_model: Told of each model that is complete, inside of the thread; whether its publisher began anew, so that
            the version may be lower than before; and of the topic's newest notice the server (the hash of its name)
            and its epoch, zeros where there was none.
        find: A model that is here already, from another server, by topic, version and SHA-256.
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
        find: Callable[[str, int, bytes], Model | None] = lambda topic, version, digest: None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._fetch, self._hear, self._post, self._on_model = limits, fetch, hear, post, on_model
        self._find = find
        self._rng = rng or random.Random()
        self._clock = clock
        self._topics: dict[str, _Topic] = {}
        self._published: tuple[str, ...] = ()  # topics that the server has named last
        self._changed = threading.Condition()  # guards everything here
        self.refused: Counter[str] = Counter()
        """Bodies that were refused, by code."""
        self.is_kept = False
        """Whether the server keeps its models on disk: one that began anew goes on counting, and what it has that is
        older than what is here was published while it was away."""
        self.skipped = 0
        """Versions between two that came: published, and passed over because newer ones were there."""
        self.fetched_bytes = 0
        """Of all chunks that came."""
        self.resubscribed = 0
        """Topics that were subscribed to again, because notices of them did not come."""

    # From any thread

    def want(self, name: str) -> None:
        """Keep the newest model of this topic here from now on."""
        with self._changed:
            if name in self._topics:
                return
            if len(self._topics) >= MOST_TOPICS:
                raise ParameterError(
                    "topic", name, f"none but the {MOST_TOPICS} that a client follows: it is one too many"
                )
            topic = self._topics[name] = _Topic(name)
        self._post(lambda: self._begin(topic))

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
        return self._wait_for(found, seconds, check, what, endpoint, name)

    def receive(
        self, subscription: Subscription, seconds: float | None, check: Callable[[], None], endpoint: str
    ) -> Model:
        """The next model of a receiver."""

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
        with self._changed:
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
        if name in self._published:
            return "The server has published no newer one, or cannot be reached: see client.stats().silent."
        guess = hint(name, self._published)
        there = f"It has models of {', '.join(map(repr, self._published))}{guess}, or" if self._published else "Or"
        return f"Nobody published this topic there yet. {there} it cannot be reached: see client.stats().silent."

    def close(self) -> None:
        """Wake up whoever waits."""
        with self._changed:
            self._changed.notify_all()

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
        if not topic.asked_newest:
            topic.asked_newest = True
            topic.queue.append(_Wanted(0))
            self._advance(topic)

    def announced(self, versions: Mapping[str, int]) -> None:
        """The server says what its newest versions are: a notice may have been missed."""
        self._published = tuple(versions)
        for name, version in versions.items():
            topic = self._topics.get(name)
            if topic is None:
                continue
            if topic.told is None and version > topic.noticed and topic.is_heard:
                topic.told = (version, self._clock())
            if version > topic.heard:
                self._queue(topic, _Wanted(version), version)
                self._advance(topic)

    def noticed(self, notice: messages.Notice, payload: Any, home: int = 0) -> None:
        """A model was published at `home` (the hash of that server's name); its body may be here already.

        Raises:
            ProtocolError: the body is not the one that was announced.
        """
        topic = self._topics.get(notice.topic)
        if topic is None:
            return
        self._look_at_epoch(topic, notice, home)
        topic.noticed = max(topic.noticed, notice.version)
        if topic.told is not None and topic.told[0] <= topic.noticed:
            topic.told = None
        if notice.version <= topic.heard:
            return
        if payload is None and notice.size:
            item: Model | _Wanted = _Wanted(notice.version, notice.sha256)
        else:
            item = model_of(notice, b"" if payload is None else bytes(payload))
        self._queue(topic, item, notice.version)
        self._advance(topic)

    def _queue(self, topic: _Topic, item: Model | _Wanted, version: int) -> None:
        """Put a version behind those that were heard of; who receives every one gets those in between too, as far as
        the node still has them.
        """
        if topic.subscriptions and topic.heard:
            between = range(max(topic.heard + 1, version - MOST_MISSED), version)
            topic.queue.extend(_Wanted(missed) for missed in between)
        topic.queue.append(item)
        topic.heard = version
        while len(topic.queue) > MOST_QUEUED:
            topic.queue.popleft()

    def _look_at_epoch(self, topic: _Topic, notice: messages.Notice, home: int) -> None:
        """A publisher that began anew counts from 1: the epoch of its server is newer, and its versions name other
        models. That another server has a newer epoch says nothing: it may only be younger.
        """
        topic.source = (home, notice.epoch)
        former, newest = topic.epochs.get(home, 0), topic.newest
        if notice.epoch > former:
            goes_back = newest is not None and notice.version <= newest.version and notice.sha256 != newest.digest
            if former and goes_back and not self.is_kept:
                self._renew(topic)
            topic.epochs[home] = notice.epoch
            while len(topic.epochs) > MOST_HOMES:
                topic.epochs.popitem(last=False)

    def restarted(self) -> None:
        """The server began anew: its versions may be lower than those we know, and count from here on."""
        for topic in list(self._topics.values()):
            self._renew(topic)

    def _renew(self, topic: _Topic) -> None:
        topic.heard = topic.noticed = 0
        topic.told = None
        topic.is_renewed = True
        topic.fetching = None  # its chunks belong to a version of before
        topic.queue.clear()

    def begin_run(self) -> None:
        """Another run is counted: its models are others, and those that are here belong to the former one.

        Versions go on counting over runs.
        """
        with self._changed:
            for topic in self._topics.values():
                topic.newest = None
                topic.heard = topic.noticed = 0
                topic.told = topic.fetching = None
                topic.queue.clear()
                for subscription in topic.subscriptions:
                    subscription.models.clear()

    def is_coming(self, name: str, version: int) -> bool:
        """Whether this version (0: any) is being fetched now, or waits for it."""
        topic = self._topics.get(name)
        if topic is None:
            return False
        there = [*([topic.fetching] if topic.fetching else []), *topic.queue]
        return any(version in (0, item.version) or item.version == 0 for item in there)

    def next_time(self) -> float:
        """When `turn` has something to do."""
        times = [float("inf")]
        for topic in list(self._topics.values()):
            if topic.told is not None:
                times.append(topic.told[1] + UNHEARD)
            if topic.fetching is not None:
                if not topic.fetching.open:
                    times.append(topic.fetching.resume_at)
                elif topic.queue:
                    times.append(topic.fetching.heard_at + STALL)
        return min(times)

    def turn(self) -> None:
        """Go on with the bodies whose pause is over, give up those that stall, and look after subscriptions."""
        now = self._clock()
        for topic in list(self._topics.values()):
            fetching = topic.fetching
            if fetching is not None and fetching.open and topic.queue and now >= fetching.heard_at + STALL:
                topic.fetching = None  # its server is away, perhaps; another one may have what came after it
                self._advance(topic)
            elif fetching is not None and not fetching.open and now >= fetching.resume_at:
                self._ask(topic, fetching)
            if topic.told is not None and now >= topic.told[1] + UNHEARD:
                topic.told = None
                self.resubscribed += 1
                self._hear(topic.name, False)
                topic.is_heard = self._hear(topic.name, True)

    def _advance(self, topic: _Topic) -> None:
        """Deliver what is next in the queue, or fetch it."""
        while topic.queue and topic.fetching is None:
            if not topic.subscriptions and len(topic.queue) > 1:
                topic.queue.popleft()  # only the newest counts
                continue
            item = topic.queue.popleft()
            if isinstance(item, Model):
                self._deliver(topic, item)
            elif not self._is_here(topic, item.version, item.digest):
                topic.fetching = _Fetching(item.version, self._clock())
                self._ask(topic, topic.fetching)

    def _is_here(self, topic: _Topic, version: int, digest: bytes) -> bool:
        """Whether this version need not be fetched: it is the newest one here, or a neighbour has it."""
        newest = topic.newest
        if newest is not None and not topic.is_renewed and version <= newest.version:
            return True  # what came after it is announced, also where the newest was asked for
        if newest is not None and digest and (version, digest) == (newest.version, newest.digest):
            topic.is_renewed = False  # published again, by a server that began anew
            return True
        found = self._find(topic.name, version, digest) if digest else None
        if found is not None:
            self._deliver(topic, found)
        return found is not None

    def _ask(self, topic: _Topic, fetching: _Fetching) -> None:
        """Ask for the first chunk, or for as many as may be on their way at once."""
        asked_at = self._clock()

        def answered(answer: Answer) -> None:
            is_quick = self._clock() - asked_at < QUICK
            fetching.window = min(self._limits.model_window, fetching.window + 1) if is_quick else 1
            self._answered(topic, fetching, answer)

        assembly = fetching.assembly
        if assembly is None:
            fetching.open += 1
            self._fetch(topic.name, fetching.version, 0, self._limits.model_chunk, answered)
            return
        if not fetching.open:
            fetching.asked = assembly.offset  # again from here, should a node have sent less than it was asked for
        end = min(assembly.size, assembly.offset + self._limits.model_window * fetching.stride)
        while fetching.open < fetching.window and fetching.asked < end:
            offset, fetching.asked = fetching.asked, fetching.asked + fetching.stride
            fetching.open += 1
            self._fetch(topic.name, assembly.version, offset, fetching.stride, answered)

    def _answered(self, topic: _Topic, fetching: _Fetching, answer: Answer) -> None:
        if isinstance(answer, Closed) or topic.fetching is not fetching:
            return  # or it was given up meanwhile
        fetching.open -= 1
        fetching.heard_at = self._clock()
        try:
            model = self._assemble(topic, fetching, answer)
        except MemoireError as error:
            if isinstance(error, ProtocolError):
                self.refused[error.code] += 1
            self._give_up(topic, fetching.version)
        else:
            self._go_on(topic, fetching, model)
        self._advance(topic)

    def _give_up(self, topic: _Topic, version: int) -> None:
        """It is not there (any more), or damaged. The newest one is tried once instead; then the next announcement of
        this version, or a newer one, fetches it.
        """
        topic.fetching = None
        known = topic.newest.version if topic.newest and not topic.is_renewed else 0
        topic.heard = max([known, *(item.version for item in topic.queue)])
        if version and not topic.queue:
            topic.fetching = _Fetching(0, self._clock())
            self._ask(topic, topic.fetching)

    def _go_on(self, topic: _Topic, fetching: _Fetching, model: Model | None) -> None:
        if model is None and fetching.assembly is not None:
            if fetching.heard_at >= fetching.resume_at:
                self._ask(topic, fetching)
            return
        topic.fetching = None
        if model is not None:
            self._deliver(topic, model)

    def _assemble(self, topic: _Topic, fetching: _Fetching, answer: Answer) -> Model | None:
        """Take a chunk; returns the model when it is whole, or here already (then there is no assembly)."""
        if isinstance(answer, MemoireError):
            raise answer
        chunk = answer.body
        if not isinstance(chunk, messages.Chunk):
            raise ProtocolError("unexpected", f"FETCH was answered by {answer.type.name}")
        payload = b"" if answer.payload is None else memoryview(answer.payload)
        self.fetched_bytes += len(payload)
        if fetching.assembly is None:
            topic.heard = max(topic.heard, chunk.version)  # the newest was asked for, and it is newer than expected
            if chunk.epoch:  # its notice may come later, or never: its publisher may begin anew before
                topic.source = (chunk.home, max(chunk.epoch, topic.epochs.get(chunk.home, 0)))
                topic.epochs.setdefault(*topic.source)
            if self._is_here(topic, chunk.version, chunk.sha256):
                return None  # not again, however large
            self._start(fetching, chunk, len(payload))
        assembly = fetching.assembly
        assert assembly is not None
        if (chunk.version, chunk.sha256) != (assembly.version, assembly.digest):
            raise ProtocolError("unexpected", "a chunk of another model")
        return assembly.add(chunk.offset, payload)

    def _start(self, fetching: _Fetching, chunk: messages.Chunk, stride: int) -> None:
        """The first chunk says what is coming. Many clients hear of a model at once: each takes the rest a little
        later, at random.
        """
        fetching.assembly = Assembly(
            chunk.topic,
            chunk.version,
            chunk.size,
            chunk.sha256,
            chunk.text,
            byte_limit=self._limits.model_bytes,
            early=4 * self._limits.model_window,
        )
        fetching.stride = fetching.asked = stride
        spread = self._limits.model_spread * min(1.0, chunk.size / LARGE)
        fetching.resume_at = fetching.heard_at + self._rng.uniform(0.0, spread)

    def _deliver(self, topic: _Topic, model: Model) -> None:
        with self._changed:
            newest = topic.newest
            if newest is not None and not topic.is_renewed and model.version <= newest.version:
                return
            is_renewed, topic.is_renewed = topic.is_renewed, False
            if newest is not None and model.version > newest.version + 1:
                self.skipped += model.version - newest.version - 1
            topic.newest = model
            for subscription in topic.subscriptions:
                if model.version != subscription.newest or is_renewed:
                    subscription.put(model)
            self._changed.notify_all()
        self._on_model(model, is_renewed, topic.source)


def fetch_patience(limits: Limits) -> float:
    """Seconds before a chunk is asked for again: where many clients fetch at once it takes its time, and each chunk
    that is sent twice makes it worse.
    """
    return 5.0 * limits.resend_after


def model_of(notice: messages.Notice, body: bytes) -> Model:
    """The model of a notice that carries its body.

    Raises:
        ProtocolError: it has another size or hash than the notice says.
    """
    if len(body) != notice.size or hashlib.sha256(body).digest() != notice.sha256:
        raise ProtocolError(
            "payload", f"the body of {notice.topic!r} version {notice.version} is not the announced one"
        )
    if notice.text:
        check_text(body, notice.topic, notice.version)
    return Model(notice.topic, notice.version, body, notice.text, notice.sha256)
