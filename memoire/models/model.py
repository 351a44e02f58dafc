"""The newest models of each topic, and how a body comes together from chunks. Pure: no socket.

A model is what a learner publishes: bytes (or text) under a topic, with a version that never goes back. Nodes keep
the newest few of each topic; who comes late asks for the newest.

Notices of models: what they say, and to whom and when each is said again.

A model is announced once when it is published, with its body where that is small. Who was not there yet, or whose
notice or subscription was lost on the way, hears of it from the repetitions, which carry no body: whoever has the
version already ignores them. Pure: time is passed in.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memoire.arguments import is_name, text
from memoire.errors import MemoireError, ParameterError, ProtocolError, WrongType
from memoire.limits import Limits
from memoire.wire import _bytes, messages
from memoire.wire.frames import check_payload, compare_checksum, encode, topic_frame

TOPIC_BYTES = 255
MAX_TOPICS = 256
MAX_VERSIONS = 256
SMALL_BYTES = 1 << 22
"""Bytes of a topic's versions that are kept beyond the newest few: short messages can be fetched by who missed them."""
LEASE = 10.0
"""Seconds for which a version that somebody fetches is kept, however many newer ones come: where models are published
faster than a slow client can fetch one, it would never hold a whole one otherwise.
"""


@dataclass(frozen=True, slots=True)
class Model:
    """One version of a topic: immutable, so that it may be shared between threads and sent without a copy."""

    topic: str
    version: int
    body: bytes = field(repr=False)
    is_text: bool
    checksum: int = field(repr=False)
    """XXH3 of the body, computed where it is published and compared wherever it is taken in."""

    @property
    def value(self) -> bytes | str:
        """What was published, in the type in which it was."""
        return self.body.decode() if self.is_text else self.body

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.body)


class StaleVersion(MemoireError, ValueError):
    """A model was published under a version that its topic has passed."""

    def __init__(self, topic: str, version: int, newest: int) -> None:
        super().__init__(topic, version, newest)
        self.topic, self.version, self.newest = topic, version, newest

    def __str__(self) -> str:
        return (
            f"version {self.version} of topic {self.topic!r} cannot be published: {self.newest} is out already, and "
            f"versions never go back. Publish it again without a version: it gets the next one."
        )


def check_topic(topic: str) -> str:
    """`topic` itself when it may be one: text of 1 to 255 bytes without control characters."""
    if not isinstance(topic, str):
        raise WrongType("topic", "a str", type(topic).__name__)
    if not 0 < len(topic.encode("utf-8", "replace")) <= TOPIC_BYTES or not is_name(topic, TOPIC_BYTES):
        raise ParameterError("topic", topic[:80], f"printable text of 1 to {TOPIC_BYTES} bytes")
    return topic


def make(topic: str, content: bytes | bytearray | memoryview | str, version: int) -> Model:
    """A model of this content; bytes-like content is copied unless it is `bytes`."""
    is_text = isinstance(content, str)
    if not isinstance(content, (str, bytes, bytearray, memoryview)):
        raise WrongType("a model", "bytes or str", type(content).__name__, "serialize it first.")
    body = text("content", content).encode() if isinstance(content, str) else bytes(content)
    return Model(check_topic(topic), version, body, is_text, _bytes.checksum(body))


def model_of(notice: messages.Notice, body: bytes) -> Model:
    """The model of a notice that carries its body.

    Raises:
        ProtocolError: it has another size or checksum than the notice says.
    """
    if len(body) != notice.size or _bytes.checksum(body) != notice.checksum:
        raise ProtocolError(
            "payload", f"the body of {notice.topic!r} version {notice.version} is not the announced one"
        )
    if notice.text:
        check_text(body, notice.topic, notice.version)
    return Model(notice.topic, notice.version, body, notice.text, notice.checksum)


class ModelStore:
    """The newest few models of each topic, within a number of bytes; more while they are small or being fetched.

    Not thread-safe: the owner locks.

    Args:
        byte_limit: Bytes over all topics; the newest of each stays, whatever it weighs.
        keep: Versions of a topic that are kept at least, within the bytes.
        clock: Seconds, of any beginning.
    """

    def __init__(self, byte_limit: int, *, keep: int = 4, clock: Callable[[], float] = time.monotonic) -> None:
        self._topics: dict[str, dict[int, Model]] = {}  # versions ascend
        self._passed: dict[str, int] = {}  # newest versions that former runs had
        self._numbered: dict[str, Model] = {}  # newest that got a version and is not put in yet
        self._leases: dict[tuple[str, int], float] = {}  # until when somebody fetches this version
        self._byte_limit = byte_limit
        self._keep = keep
        self._clock = clock
        self.bytes = 0

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, version: int = 0) -> Model:
        """Store a new version (0: the next one); returns it.

        Raises:
            StaleVersion: the topic has this version or a newer one.
            ParameterError: the topic is malformed, or one too many.
        """
        return self.add(make(topic, content, 0), version)

    def add(self, made: Model, version: int = 0) -> Model:
        """`publish` of a model that was made (and summed up) before, perhaps outside of the owner's lock."""
        model = self.number(made, version)
        self.put(model)
        return model

    def number(self, made: Model, version: int = 0) -> Model:
        """The model with its version, which is nobody else's from now on; it is here once it is `put` in.

        Raises:
            StaleVersion, ParameterError: as `publish`.
        """
        newest = max(self.version(check_topic(made.topic)), self._passed.get(made.topic, 0))
        if made.topic in self._numbered:
            newest = max(newest, self._numbered[made.topic].version)
        if version and version <= newest:
            raise StaleVersion(made.topic, version, newest)
        known = self._topics.keys() | self._numbered.keys()
        if made.topic not in known and len(known) >= MAX_TOPICS:
            raise ParameterError(
                "topic", made.topic, f"none but the {MAX_TOPICS} that a node keeps: it is one too many"
            )
        model = self._numbered[made.topic] = replace(made, version=version or newest + 1)
        return model

    @property
    def numbered_bytes(self) -> int:
        """Bytes of models that have a version and are not put in yet. From any thread."""
        return sum(model.size for model in list(self._numbered.values()))

    def bytes_beside(self, topic: str) -> int:
        """Bytes of the newest models of all other topics, which stay whatever is published."""
        newest = {known: next(reversed(versions.values())) for known, versions in self._topics.items()}
        return sum(model.size for known, model in (newest | self._numbered).items() if known != topic)

    def is_numbered(self, topic: str, version: int, checksum: int) -> bool:
        """Whether exactly this version is here, or about to be."""
        known = (self.get(topic, version), self._numbered.get(topic))
        return any(model is not None and (model.version, model.checksum) == (version, checksum) for model in known)

    def put(self, model: Model) -> bool:
        """Store a model that was published elsewhere; returns True. If there is one of its topic here that is as new
        or newer, nothing is stored, and False is returned.
        """
        if self._numbered.get(model.topic) is model:
            del self._numbered[model.topic]
        if model.version <= self.version(model.topic):
            return False
        versions = self._topics.get(model.topic)
        if versions is None:
            if len(self._topics) >= MAX_TOPICS:
                return False
            versions = self._topics[model.topic] = {}
        versions[model.version] = model
        self.bytes += model.size
        self._thin(model.topic, versions)
        self._shrink()
        return True

    def _thin(self, topic: str, versions: dict[int, Model]) -> None:
        """Drop the topic's versions beyond those that are kept, but for those that somebody fetches now."""
        size = self._topic_bytes(topic)
        for version in list(versions)[:-1]:
            if len(versions) <= self._keep or (size <= SMALL_BYTES and len(versions) <= MAX_VERSIONS):
                return
            if not self._is_leased(topic, version):
                size -= versions[version].size
                self._drop(topic, version)

    def _drop(self, topic: str, version: int) -> None:
        self.bytes -= self._topics[topic].pop(version).size
        self._leases.pop((topic, version), None)

    def _is_leased(self, topic: str, version: int) -> bool:
        return self._leases.get((topic, version), 0.0) > self._clock()

    def _shrink(self) -> None:
        """Keep to the bytes: the oldest of the largest topic goes first, one that is being fetched only at the end."""
        while self.bytes > self._byte_limit:
            older = [(topic, version) for topic, versions in self._topics.items() for version in list(versions)[:-1]]
            if not older:
                return
            free = [place for place in older if not self._is_leased(*place)] or older
            largest = max({topic for topic, _ in free}, key=self._topic_bytes)
            self._drop(*next(place for place in free if place[0] == largest))

    def _topic_bytes(self, topic: str) -> int:
        return sum(model.size for model in self._topics[topic].values())

    def newest(self, topic: str) -> Model | None:
        """The topic's newest model, when it has one."""
        versions = self._topics.get(topic)
        return versions[next(reversed(versions))] if versions else None

    def get(self, topic: str, version: int) -> Model | None:
        """The version asked for, or the newest where `version` is 0; None when it is not (or no longer) here."""
        return self._topics.get(topic, {}).get(version) if version else self.newest(topic)

    def serve(self, topic: str, version: int, chunk: int = 0) -> Model | None:
        """`get` for somebody who fetches it chunk by chunk: it stays until nobody asked for `LEASE` seconds.

        Args:
            chunk: Bytes of one chunk: a body that fits is given as a whole, and need not stay.
        """
        model = self.get(topic, version)
        if model is not None and model.size > chunk:
            self._leases[topic, model.version] = self._clock() + LEASE
        return model

    def version(self, topic: str) -> int:
        """Newest version of the topic, or where this run has none, of a former one; 0 when there is none."""
        versions = self._topics.get(topic)
        return next(reversed(versions)) if versions else self._passed.get(topic, 0)

    def versions(self) -> dict[str, int]:
        """Newest version of each topic."""
        return {topic: next(reversed(versions)) for topic, versions in self._topics.items()}

    def forget(self, topic: str) -> None:
        """Drop a topic with all its versions: its publisher began anew and counts from 1."""
        self._passed.pop(topic, None)
        self._numbered.pop(topic, None)
        for version in list(self._topics.get(topic, {})):
            self._drop(topic, version)
        self._topics.pop(topic, None)

    def renew(self) -> None:
        """Begin a new run: nothing is here, and versions go on counting, so that they go back for nobody."""
        newest = self.versions() | {topic: model.version for topic, model in self._numbered.items()}
        if len(self._passed) >= MAX_TOPICS:
            self._passed = {topic: self._passed.get(topic, 0) for topic in newest}
        for topic, version in newest.items():
            self._passed[topic] = max(version, self._passed.get(topic, 0))
        self._topics.clear()
        self._numbered.clear()
        self._leases.clear()
        self.bytes = 0

    def go_on_from(self, versions: Mapping[str, int]) -> None:
        """Number what is published from here on above these versions: entries that were made by those models may be
        here, and clients may hold them.
        """
        for topic, version in versions.items():
            if topic in self._passed or len(self._passed) < MAX_TOPICS:
                self._passed[topic] = max(version, self._passed.get(topic, 0))

    def __iter__(self) -> Iterator[Model]:
        return (model for versions in self._topics.values() for model in versions.values())

    def check_invariants(self) -> None:
        """Raise AssertionError where the count of bytes or the order of versions is wrong."""
        assert self.bytes == sum(model.size for model in self)
        for topic, versions in self._topics.items():
            assert versions and list(versions) == sorted(versions)
            size = self._topic_bytes(topic)
            free = [version for version in list(versions)[:-1] if not self._is_leased(topic, version)]
            assert len(versions) <= self._keep or not free or (len(versions) <= MAX_VERSIONS and size <= SMALL_BYTES)
            assert all(model.topic == topic and model.version == v for v, model in versions.items())
        assert all(version in self._topics.get(topic, {}) for topic, version in self._leases)
        if self.bytes > self._byte_limit:
            assert all(len(versions) == 1 for versions in self._topics.values())


class ModelAssembly:
    """A body on its way, chunk by chunk; checked against its size and its XXH3 before anybody sees it.

    A body is handed out without another copy: it is in memory once. One that came in a single chunk is read once:
    copied and summed in the same pass.

    Args:
        checksum: XXH3 of the body.
        early: Chunks that are kept at most until the one before them has come.
    """

    def __init__(
        self,
        topic: str,
        version: int,
        size: int,
        checksum: int,
        is_text: bool,
        *,
        byte_limit: int,
        early: int = 0,
    ) -> None:
        if not 0 <= size <= byte_limit:
            raise ProtocolError(
                "too_large", f"model {topic!r} version {version} has {size} bytes, allowed are {byte_limit}"
            )
        self.topic, self.version, self.size = topic, version, size
        self.checksum, self._is_text = checksum, is_text
        # Grown as chunks come, never reserved by what a notice claims. A BytesIO gives its bytes away uncopied.
        self._body = io.BytesIO()
        self._most_early = early
        self._early: dict[int, bytes] = {}
        self.offset = 0
        """Where the next chunk begins: all before it is here."""

    def add(self, offset: int, chunk: bytes | memoryview, checksum: int | None = None) -> Model | None:
        """Take a chunk; a repeated one is ignored. Returns the model when it is whole.

        Args:
            checksum: XXH3 of the chunk, as its message says; None: it was compared before.

        Raises:
            ProtocolError: the chunk changed on its way, leaves a gap or goes beyond the end, or the whole has another
                checksum.
        """
        if offset < self.offset:
            return None
        if offset + len(chunk) > self.size or (offset > self.offset and len(self._early) >= self._most_early):
            detail = f"chunk {offset}+{len(chunk)} does not follow {self.offset} of {self.size} bytes"
            raise ProtocolError("index", detail)
        if not len(chunk) and self.size:
            raise ProtocolError("index", f"an empty chunk at {offset} of {self.size} bytes")
        if len(chunk) == self.size:
            return self._take_whole(chunk, checksum)
        if checksum is not None:
            check_payload(chunk, checksum)
        if offset > self.offset:
            self._early[offset] = bytes(chunk)
            return None
        self._append(chunk)
        while (kept := self._early.pop(self.offset, None)) is not None:
            self._append(kept)
        for passed in [place for place in self._early if place < self.offset]:
            del self._early[passed]
        if self.offset < self.size:
            return None
        body = self._body.getvalue()
        return self._finish(body, _bytes.checksum(body))

    def _take_whole(self, chunk: bytes | memoryview, checksum: int | None) -> Model:
        """The body in one chunk."""
        body, found = _bytes.copied(chunk)
        if checksum is not None:
            compare_checksum(found, checksum)
        self.offset = self.size
        return self._finish(body, found)

    def _append(self, chunk: bytes | memoryview) -> None:
        self._body.write(chunk)
        self.offset += len(chunk)

    def _finish(self, body: bytes, checksum: int) -> Model:
        self._early.clear()
        if checksum != self.checksum:
            detail = f"model {self.topic!r} version {self.version} has another XXH3 than announced"
            raise ProtocolError("payload", detail)
        if self._is_text:
            check_text(body, self.topic, self.version)
        return Model(self.topic, self.version, body, self._is_text, checksum)


def check_text(body: bytes, topic: str, version: int) -> None:
    """Raise ProtocolError (code "value") unless a body that says it is text is UTF-8."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("value", f"model {topic!r} version {version} says it is text and is not UTF-8") from error


def stretch_of(asked: messages.Fetch, limits: Limits) -> int:
    """Bytes of a body that are handed out at most to who asks so."""
    return min(asked.size or limits.tuning.model_chunk, limits.tuning.model_chunk)


def chunk_of(
    model: Model | None, body: messages.Fetch, limits: Limits, *, home: int = 0, epoch: int = 0
) -> tuple[messages.Chunk, memoryview | None]:
    """The stretch of a model that was asked for, with its bytes; `home` and `epoch` are those of its notice.

    Raises:
        ProtocolError: (code "missing") there is no such model here, or no such stretch in it.
    """
    if model is None:
        what = f"version {body.version}" if body.version else "model"
        raise ProtocolError("missing", f"no {what} of topic {body.topic!r} is here")
    if body.offset > model.size:
        raise ProtocolError("missing", f"offset {body.offset} is beyond the {model.size} bytes of {body.topic!r}")
    end = body.offset + stretch_of(body, limits)
    chunk = messages.Chunk(
        topic=model.topic,
        version=model.version,
        size=model.size,
        checksum=model.checksum,
        offset=body.offset,
        text=model.is_text,
        home=home,
        epoch=epoch,
    )
    return chunk, memoryview(model.body)[body.offset : end] if model.size > body.offset else None


def known_checksum(chunk: messages.Chunk, payload: memoryview | None) -> dict[str, int]:
    """The header's field that says the checksum of a chunk, if it is known without reading the payload once more."""
    is_whole = payload is not None and len(payload) == chunk.size
    return {"payload_checksum": chunk.checksum} if is_whole else {}


MAX_INLINE = Limits().tuning.request_bytes // 2
"""Bytes of a body that a notice may have: a publisher cannot know what its subscribers take, and all take this."""
REPEAT_INTERVAL = 5.0
"""Seconds between two notices of the newest model of each topic."""
GATHER_INTERVAL = 0.05
"""Seconds for which subscriptions are gathered before their topics are announced again: a notice goes to everybody, so
one for each of a thousand actors that join would be a million.
"""


class Notices:
    """Which models are to be announced again, and when. Belongs to the thread that publishes.

    Args:
        now: time.monotonic().
    """

    def __init__(self, now: float) -> None:
        self._all_at = now + REPEAT_INTERVAL
        self._asked: set[bytes] = set()
        self._asked_at = float("inf")

    def subscribed(self, subscriptions: Iterable[bytes], models: ModelStore, now: float) -> None:
        """Peers subscribed to this; an empty subscription is to everything."""
        known = {b"", *(topic_frame(topic) for topic in models.versions())}
        self._asked.update(known.intersection(subscriptions))  # a stranger's topics are not kept
        if self._asked:
            self._asked_at = min(self._asked_at, now + GATHER_INTERVAL)

    def next_time(self) -> float:
        """When `due` has something."""
        return min(self._all_at, self._asked_at)

    def due(self, models: ModelStore, now: float) -> list[Model]:
        """The models to announce again now."""
        if now >= self._all_at:
            self._all_at, asked = now + REPEAT_INTERVAL, {b""}
        elif now >= self._asked_at:
            asked = self._asked
        else:
            return []
        self._asked, self._asked_at = set(), float("inf")
        return newest_of(models, asked)


def notice_of(model: Model, limits: Limits, *, home: int = 0, epoch: int, run: int, again: bool = False) -> list[Any]:
    """Frames that tell subscribers of a model; a small body is in them, unless the notice is repeated.

    Args:
        home, epoch: Hash of the name of the server that it was published at, and its epoch.
        run: Hash of the run's name: clients of another run ignore the notice.
    """
    body = messages.Notice(
        topic=model.topic,
        version=model.version,
        size=model.size,
        checksum=model.checksum,
        text=model.is_text,
        epoch=epoch,
    )
    inline = model.body if 0 < model.size <= min(limits.tuning.inline_model, MAX_INLINE) and not again else None
    return [topic_frame(model.topic), *encode(body, home=home, run=run, payload=inline)]


def newest_of(models: ModelStore, subscriptions: Iterable[bytes]) -> list[Model]:
    """The newest model of each topic that was subscribed to; an empty subscription is to all of them."""
    asked = set(subscriptions)
    return [
        model
        for topic in models.versions()
        if (b"" in asked or topic_frame(topic) in asked) and (model := models.newest(topic)) is not None
    ]
