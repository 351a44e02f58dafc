"""The newest models of each topic, and how a body comes together from chunks. Pure: no socket.

A model is what a learner publishes: bytes (or text) under a topic, with a version that never goes back. Nodes keep
the newest few of each topic; who comes late asks for the newest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import MemoireError, ProtocolError

TOPIC_BYTES = 255
MOST_TOPICS = 256
MOST_VERSIONS = 256
SMALL_BYTES = 1 << 22
"""Bytes of a topic's versions that are kept beyond the newest few: short messages can be fetched by who missed them."""


@dataclass(frozen=True, slots=True)
class Model:
    """One version of a topic: immutable, so that it may be shared between threads and sent without a copy."""

    topic: str
    version: int
    body: bytes = field(repr=False)
    is_text: bool
    digest: bytes = field(repr=False)
    """SHA-256 of the body."""

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
            f"versions never go back. Leave version out to get the next one."
        )


def check_topic(topic: str) -> str:
    """`topic` itself when it may be one: text of 1 to 255 bytes without control characters."""
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a str, got {type(topic).__name__}")
    if not 0 < len(topic.encode("utf-8", "replace")) <= TOPIC_BYTES or not topic.isprintable():
        raise ValueError(f"topic must be printable text of 1 to {TOPIC_BYTES} bytes, got {topic[:80]!r}")
    return topic


def make(topic: str, content: bytes | bytearray | memoryview | str, version: int) -> Model:
    """A model of this content; bytes-like content is copied unless it is `bytes`."""
    is_text = isinstance(content, str)
    if not isinstance(content, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"a model must be bytes or str, got {type(content).__name__}; serialize it first")
    body = content.encode() if isinstance(content, str) else bytes(content)
    return Model(check_topic(topic), version, body, is_text, hashlib.sha256(body).digest())


class ModelStore:
    """The newest few models of each topic, within a number of bytes; more of them while they are small.

    Not thread-safe: the owner locks.
    """

    def __init__(self, byte_limit: int, *, keep: int = 4) -> None:
        self._topics: dict[str, dict[int, Model]] = {}  # versions ascend
        self._byte_limit = byte_limit
        self._keep = keep
        self.bytes = 0

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, version: int = 0) -> Model:
        """Store a new version (0: the next one); returns it.

        Raises:
            StaleVersion: the topic has this version or a newer one.
            ValueError: the topic is malformed, or one too many.
        """
        newest = self.version(check_topic(topic))
        if version and version <= newest:
            raise StaleVersion(topic, version, newest)
        model = make(topic, content, version or newest + 1)
        if not self.put(model):
            raise ValueError(f"topic {topic!r} is one too many: a node keeps {MOST_TOPICS} topics")
        return model

    def put(self, model: Model) -> bool:
        """Store a model that somebody else made; False (and nothing stored) unless it is the newest of its topic."""
        versions = self._topics.get(model.topic)
        if versions is None:
            if len(self._topics) >= MOST_TOPICS:
                return False
            versions = self._topics[model.topic] = {}
        elif model.version <= next(reversed(versions)):
            return False
        versions[model.version] = model
        self.bytes += model.size
        while len(versions) > self._keep and (
            len(versions) > MOST_VERSIONS or sum(kept.size for kept in versions.values()) > SMALL_BYTES
        ):
            self._drop_oldest(versions)
        self._shrink()
        return True

    def _drop_oldest(self, versions: dict[int, Model]) -> None:
        self.bytes -= versions.pop(next(iter(versions))).size

    def _shrink(self) -> None:
        while self.bytes > self._byte_limit:
            shrinkable = [versions for versions in self._topics.values() if len(versions) > 1]
            if not shrinkable:
                return  # the newest of each topic stays, whatever it weighs
            self._drop_oldest(max(shrinkable, key=lambda versions: sum(model.size for model in versions.values())))

    def newest(self, topic: str) -> Model | None:
        """The topic's newest model, when it has one."""
        versions = self._topics.get(topic)
        return versions[next(reversed(versions))] if versions else None

    def get(self, topic: str, version: int) -> Model | None:
        """The version asked for, or the newest where `version` is 0; None when it is not (or no longer) here."""
        return self._topics.get(topic, {}).get(version) if version else self.newest(topic)

    def version(self, topic: str) -> int:
        """Newest version of the topic, 0 when there is none."""
        versions = self._topics.get(topic)
        return next(reversed(versions)) if versions else 0

    def versions(self) -> dict[str, int]:
        """Newest version of each topic."""
        return {topic: next(reversed(versions)) for topic, versions in self._topics.items()}

    def forget(self, topic: str) -> None:
        """Drop a topic with all its versions: its publisher began anew and counts from 1."""
        for model in self._topics.pop(topic, {}).values():
            self.bytes -= model.size

    def __iter__(self) -> Iterator[Model]:
        return (model for versions in self._topics.values() for model in versions.values())

    def check_invariants(self) -> None:
        """Raise AssertionError where the count of bytes or the order of versions is wrong."""
        assert self.bytes == sum(model.size for model in self)
        for topic, versions in self._topics.items():
            assert versions and list(versions) == sorted(versions)
            size = sum(model.size for model in versions.values())
            assert len(versions) <= self._keep or (len(versions) <= MOST_VERSIONS and size <= SMALL_BYTES)
            assert all(model.topic == topic and model.version == v for v, model in versions.items())
        if self.bytes > self._byte_limit:
            assert all(len(versions) == 1 for versions in self._topics.values())


class Assembly:
    """A body on its way, chunk by chunk, in order; checked against its size and SHA-256 before anybody sees it."""

    def __init__(self, topic: str, version: int, size: int, digest: bytes, is_text: bool, *, byte_limit: int) -> None:
        if not 0 <= size <= byte_limit:
            raise ProtocolError(
                "too_large", f"model {topic!r} version {version} has {size} bytes, allowed are {byte_limit}"
            )
        self.topic, self.version, self.size = topic, version, size
        self.digest, self._is_text = digest, is_text
        # Grown as chunks come, never reserved by what a notice claims.
        self._body = bytearray()

    @property
    def offset(self) -> int:
        """Where the next chunk begins."""
        return len(self._body)

    def add(self, offset: int, chunk: bytes | memoryview) -> Model | None:
        """Append a chunk; a repeated one is ignored. Returns the model when it is whole.

        Raises:
            ProtocolError: the chunk leaves a gap or goes beyond the end, or the whole has another hash.
        """
        if offset < len(self._body):
            return None
        if offset > len(self._body) or offset + len(chunk) > self.size:
            detail = f"chunk {offset}+{len(chunk)} does not follow {len(self._body)} of {self.size} bytes"
            raise ProtocolError("index", detail)
        if not len(chunk) and self.size:
            raise ProtocolError("index", f"an empty chunk at {offset} of {self.size} bytes")
        self._body += chunk
        return self._finish() if len(self._body) == self.size else None

    def _finish(self) -> Model:
        body = bytes(self._body)
        if hashlib.sha256(body).digest() != self.digest:
            detail = f"model {self.topic!r} version {self.version} has another SHA-256 than announced"
            raise ProtocolError("payload", detail)
        if self._is_text:
            _check_text(body, self.topic)
        return Model(self.topic, self.version, body, self._is_text, self.digest)


def _check_text(body: bytes, topic: str) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("value", f"model {topic!r} says it is text and is not UTF-8") from error
