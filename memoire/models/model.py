"""Published models: newest versions by topic, assembly from chunks, and notices. Pure: time is passed in, no socket.

A model is bytes (or text) that a learner publishes under a topic, with a version that never goes back. Nodes keep the
newest few models of each topic; a late client asks for the newest.

A model is announced once when it is published, with its body if that is small. Repeated notices, without body, reach
clients that connected later, or that lost a notice or their subscription. Clients that have the version ignore them.
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
"""Bytes of a topic's versions that are kept beyond the newest few, so that short messages can be fetched later."""
LEASE = 10.0
"""Seconds for which a version is kept after a client fetched a chunk of it, however many newer ones come. Without a
lease, a slow client could never complete a model where models are published faster than it fetches.
"""


@dataclass(frozen=True, slots=True)
class Model:
    """One version of a topic: immutable, so that threads may share it and sockets send it without a copy."""

    topic: str
    version: int
    body: bytes = field(repr=False)
    is_text: bool
    checksum: int = field(repr=False)
    """XXH3 of the body, computed by the publisher and compared by each receiver."""

    @property
    def value(self) -> bytes | str:
        """Published content in its type, bytes or str."""
        return self.body.decode() if self.is_text else self.body

    @property
    def size(self) -> int:
        """Number of bytes in the body."""
        return len(self.body)


class StaleVersion(MemoireError, ValueError):
    """Model version that is not newer than the topic's newest one."""

    def __init__(self, topic: str, version: int, newest: int) -> None:
        super().__init__(topic, version, newest)
        self.topic, self.version, self.newest = topic, version, newest

    def __str__(self) -> str:
        return (
            f"version {self.version} of topic {self.topic!r} cannot be published: version {self.newest} is published "
            f"already, and versions never go back. Publish without a version to get the next one."
        )


def check_topic(topic: str) -> str:
    """Return a valid topic: text of 1 to 255 bytes without control characters. Raise WrongType or ParameterError."""
    if not isinstance(topic, str):
        raise WrongType("topic", "a str", type(topic).__name__)
    if not 0 < len(topic.encode("utf-8", "replace")) <= TOPIC_BYTES or not is_name(topic, TOPIC_BYTES):
        raise ParameterError("topic", topic[:80], f"printable text of 1 to {TOPIC_BYTES} bytes")
    return topic


def make(topic: str, content: bytes | bytearray | memoryview | str, version: int) -> Model:
    """Return a model with this content; bytes-like content is copied unless it is `bytes`."""
    is_text = isinstance(content, str)
    if not isinstance(content, (str, bytes, bytearray, memoryview)):
        raise WrongType("a model", "bytes or str", type(content).__name__, "Serialize it first.")
    body = text("content", content).encode() if isinstance(content, str) else bytes(content)
    return Model(check_topic(topic), version, body, is_text, _bytes.checksum(body))


def model_of(notice: messages.Notice, body: bytes) -> Model:
    """Return the model of a notice that carries its body.

    Raises:
        ProtocolError: size or checksum of the body differ from the notice.
    """
    if len(body) != notice.size or _bytes.checksum(body) != notice.checksum:
        raise ProtocolError("payload", f"the body of {notice.topic!r} version {notice.version} differs from its notice")
    if notice.text:
        check_text(body, notice.topic, notice.version)
    return Model(notice.topic, notice.version, body, notice.text, notice.checksum)


class ModelStore:
    """Newest few models of each topic, within a number of bytes; more while they are small or being fetched.

    Not thread-safe: the owner locks.

    Args:
        byte_limit: Bytes over all topics; the newest model of each topic is kept whatever its size.
        keep: Versions of a topic that are kept at least, within the bytes.
        clock: Function that returns monotonic seconds.
    """

    def __init__(self, byte_limit: int, *, keep: int = 4, clock: Callable[[], float] = time.monotonic) -> None:
        self._topics: dict[str, dict[int, Model]] = {}  # versions ascend
        self._passed: dict[str, int] = {}  # newest versions of former runs
        self._numbered: dict[str, Model] = {}  # newest models that have a version and are not stored yet
        self._leases: dict[tuple[str, int], float] = {}  # ends of the leases of versions that clients fetch
        self._byte_limit = byte_limit
        self._keep = keep
        self._clock = clock
        self.bytes = 0

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, version: int = 0) -> Model:
        """Store a new version (0: the next one), and return its model.

        Raises:
            StaleVersion: the topic has this version or a newer one.
            ParameterError: the topic is malformed, or there are too many topics.
        """
        return self.add(make(topic, content, 0), version)

    def add(self, model: Model, version: int = 0) -> Model:
        """Store a model that `make` returned, perhaps outside of the owner's lock. Like `publish`."""
        numbered = self.assign_version(model, version)
        self.put(numbered)
        return numbered

    def assign_version(self, model: Model, version: int = 0) -> Model:
        """Return the model with its version, which is reserved from now on; `put` stores the model.

        Raises:
            StaleVersion, ParameterError: as `publish`.
        """
        newest = max(self.version(check_topic(model.topic)), self._passed.get(model.topic, 0))
        if model.topic in self._numbered:
            newest = max(newest, self._numbered[model.topic].version)
        if version and version <= newest:
            raise StaleVersion(model.topic, version, newest)
        known = self._topics.keys() | self._numbered.keys()
        if model.topic not in known and len(known) >= MAX_TOPICS:
            raise ParameterError.with_text(
                f"A node keeps at most {MAX_TOPICS} topics: {model.topic!r} cannot be published."
            )
        numbered = self._numbered[model.topic] = replace(model, version=version or newest + 1)
        return numbered

    @property
    def numbered_bytes(self) -> int:
        """Bytes of models that have a version and are not stored yet. From any thread."""
        return sum(model.size for model in list(self._numbered.values()))

    def bytes_beside(self, topic: str) -> int:
        """Return the bytes of the newest models of all other topics, which are kept whatever is published."""
        newest = {known: next(reversed(versions.values())) for known, versions in self._topics.items()}
        return sum(model.size for known, model in (newest | self._numbered).items() if known != topic)

    def is_numbered(self, topic: str, version: int, checksum: int) -> bool:
        """Return True if exactly this version is stored, or has its version and is not stored yet."""
        known = (self.get(topic, version), self._numbered.get(topic))
        return any(model is not None and (model.version, model.checksum) == (version, checksum) for model in known)

    def put(self, model: Model) -> bool:
        """Store a model. Return False, and store nothing, if the topic has this version or a newer one, or if there are
        too many topics.
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
        """Drop versions of the topic beyond the kept ones, except those that clients fetch."""
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
        """Keep to the byte limit: drop old versions of the largest topic first, and leased ones last."""
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
        """Return the topic's newest model; None if it has no models."""
        versions = self._topics.get(topic)
        return versions[next(reversed(versions))] if versions else None

    def get(self, topic: str, version: int) -> Model | None:
        """Return this version, or the newest if `version` is 0; None if the store does not hold it."""
        return self._topics.get(topic, {}).get(version) if version else self.newest(topic)

    def serve(self, topic: str, version: int, chunk: int = 0) -> Model | None:
        """Return a model as `get` does, to a client that fetches it in chunks. The version is kept for `LEASE` seconds.

        Args:
            chunk: Bytes of one chunk: a body that fits is sent at once, and needs no lease.
        """
        model = self.get(topic, version)
        if model is not None and model.size > chunk:
            self._leases[topic, model.version] = self._clock() + LEASE
        return model

    def version(self, topic: str) -> int:
        """Return the topic's newest version; without models in this run that of a former run; 0 if there is none."""
        versions = self._topics.get(topic)
        return next(reversed(versions)) if versions else self._passed.get(topic, 0)

    def versions(self) -> dict[str, int]:
        """Return the newest version of each topic."""
        return {topic: next(reversed(versions)) for topic, versions in self._topics.items()}

    def forget(self, topic: str) -> None:
        """Drop a topic with all its versions, because its publisher restarted and counts from 1."""
        self._passed.pop(topic, None)
        self._numbered.pop(topic, None)
        for version in list(self._topics.get(topic, {})):
            self._drop(topic, version)
        self._topics.pop(topic, None)

    def renew(self) -> None:
        """Begin a new run: drop all models; versions go on counting, so that no client sees them go back."""
        newest = self.versions() | {topic: model.version for topic, model in self._numbered.items()}
        if len(self._passed) >= MAX_TOPICS:
            self._passed = {topic: self._passed.get(topic, 0) for topic in newest}
        for topic, version in newest.items():
            self._passed[topic] = max(version, self._passed.get(topic, 0))
        self._topics.clear()
        self._numbered.clear()
        self._leases.clear()
        self.bytes = 0

    def skip_versions(self, versions: Mapping[str, int]) -> None:
        """Number further models above these versions: clients may hold those models, and stored entries may be made by
        them.
        """
        for topic, version in versions.items():
            if topic in self._passed or len(self._passed) < MAX_TOPICS:
                self._passed[topic] = max(version, self._passed.get(topic, 0))

    def __iter__(self) -> Iterator[Model]:
        return (model for versions in self._topics.values() for model in versions.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if the count of bytes or the order of versions is wrong."""
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
    """Assembly of a body from chunks, checked against its size and its XXH3 before it is handed out.

    The body is handed out without another copy. A body in a single chunk is read once: copied and summed in the same
    pass.

    Args:
        checksum: XXH3 of the body.
        early: Largest number of chunks that are kept before the chunk that precedes them.
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
                "too_large", f"model {topic!r} version {version} has {size} bytes; the limit is {byte_limit}"
            )
        self.topic, self.version, self.size = topic, version, size
        self.checksum, self._is_text = checksum, is_text
        # The buffer grows as chunks come, never by the size in a notice. A BytesIO returns its bytes without a copy.
        self._body = io.BytesIO()
        self._most_early = early
        self._early: dict[int, bytes] = {}
        self.offset = 0
        """Start of the next chunk: all bytes before it were received."""

    def add(self, offset: int, chunk: bytes | memoryview, checksum: int | None = None) -> Model | None:
        """Add a chunk. Return the model once it is whole; ignore a repeated chunk.

        Args:
            checksum: XXH3 of the chunk in its message; None if it was compared before.

        Raises:
            ProtocolError: the chunk changed on its way, leaves a gap or exceeds the end, or the body has another
                checksum.
        """
        if offset < self.offset:
            return None
        if offset + len(chunk) > self.size or (offset > self.offset and len(self._early) >= self._most_early):
            detail = f"chunk {offset}+{len(chunk)} does not follow the first {self.offset} of {self.size} bytes"
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
        """Return the model of a body in one chunk."""
        body, computed = _bytes.copied(chunk)
        if checksum is not None:
            compare_checksum(computed, checksum)
        self.offset = self.size
        return self._finish(body, computed)

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
    """Raise ProtocolError (code "value") if the body of a text model is not UTF-8."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("value", f"text of model {topic!r} version {version} is not UTF-8") from error


def max_chunk_bytes(request: messages.Fetch, limits: Limits) -> int:
    """Return the largest number of bytes in the answer to a request for a chunk."""
    return min(request.size or limits.tuning.model_chunk, limits.tuning.model_chunk)


def chunk_of(
    model: Model | None, body: messages.Fetch, limits: Limits, *, home: int = 0, epoch: int = 0
) -> tuple[messages.Chunk, memoryview | None]:
    """Return the part of a model that `body` requests, and its bytes; `home` and `epoch` are those of its notice.

    Raises:
        ProtocolError: (code "missing") there is no such model, or the offset is beyond its end.
    """
    if model is None:
        what = f"version {body.version}" if body.version else "model"
        raise ProtocolError("missing", f"this node has no {what} of topic {body.topic!r}")
    if body.offset > model.size:
        raise ProtocolError("missing", f"offset {body.offset} is beyond the {model.size} bytes of {body.topic!r}")
    end = body.offset + max_chunk_bytes(body, limits)
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
    """Return the header's field with the checksum of a whole body, which needs no second pass; {} for a part."""
    is_whole = payload is not None and len(payload) == chunk.size
    return {"payload_checksum": chunk.checksum} if is_whole else {}


MAX_INLINE = Limits().tuning.request_bytes // 2
"""Largest body in a notice, in bytes: a publisher does not know the limits of its subscribers, and all accept this."""
REPEAT_INTERVAL = 5.0
"""Seconds between two notices of the newest model of each topic."""
GATHER_INTERVAL = 0.05
"""Seconds for which subscriptions are gathered before their topics are announced again. A notice goes to every client,
so that a notice for each of a thousand joining actors would make a million messages.
"""


class Notices:
    """Schedule of repeated notices. Belongs to the thread that publishes.

    Args:
        now: Present time of time.monotonic().
    """

    def __init__(self, now: float) -> None:
        self._all_at = now + REPEAT_INTERVAL
        self._asked: set[bytes] = set()
        self._asked_at = float("inf")

    def subscribed(self, subscriptions: Iterable[bytes], models: ModelStore, now: float) -> None:
        """Record subscriptions of peers; an empty subscription is for all topics."""
        known = {b"", *(topic_frame(topic) for topic in models.versions())}
        self._asked.update(known.intersection(subscriptions))  # unknown topics are not kept
        if self._asked:
            self._asked_at = min(self._asked_at, now + GATHER_INTERVAL)

    def next_time(self) -> float:
        """Return the time at which `due_models` returns something."""
        return min(self._all_at, self._asked_at)

    def due_models(self, models: ModelStore, now: float) -> list[Model]:
        """Return the models to announce again now."""
        if now >= self._all_at:
            self._all_at, topics = now + REPEAT_INTERVAL, {b""}
        elif now >= self._asked_at:
            topics = self._asked
        else:
            return []
        self._asked, self._asked_at = set(), float("inf")
        return newest_of(models, topics)


def notice_of(model: Model, limits: Limits, *, home: int = 0, epoch: int, run: int, again: bool = False) -> list[Any]:
    """Return the frames of a model's notice; a small body is in them, unless the notice is repeated.

    Args:
        home, epoch: Server of the publication: hash of its name, and its epoch.
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
    """Return the newest model of each subscribed topic; an empty subscription is for all topics."""
    topics = set(subscriptions)
    return [
        model
        for topic in models.versions()
        if (b"" in topics or topic_frame(topic) in topics) and (model := models.newest(topic)) is not None
    ]
