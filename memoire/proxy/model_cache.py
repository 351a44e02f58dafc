"""The models that a proxy hands out, and the requests for those that are on their way here. Pure: no socket, no lock.

    FETCH v7 ──▶ here            ──▶ CHUNK
             ──▶ on its way here ──▶ held ──▶ v7 is here, or 5 s are over ──▶ looked at again
             ──▶ neither         ──▶ the client's server is asked

A model crosses the way behind a proxy once, not once for each client.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from memoire.errors import ParameterError
from memoire.limits import MODEL_BYTES, Limits
from memoire.models.model import Model, ModelStore, chunk_of, known_checksum, stretch_of
from memoire.models.notices import notice_of
from memoire.security.envelope import EnvelopedRequest
from memoire.wire import frames, messages
from memoire.wire.frames import Buffer, MessageHeader

from .backend import Backend
from .router import Router

HELD_FETCH_TIMEOUT = 5.0
"""Seconds for which a request for a chunk waits for a model that is on its way here, before its server is asked."""
MAX_HELD = 4096


class ModelSource(NamedTuple):
    """Where the newest model of a topic came from."""

    back: Backend
    home: int
    """Hash of the name of the server that it was published at."""
    epoch: int
    """Of that server."""
    run: int
    """Hash of the run that was counted there."""


class HeldRequest(NamedTuple):
    """A request for a chunk of a model that is on its way here."""

    until: float
    topic: str
    version: int
    request: EnvelopedRequest


class ModelCache:
    """The newest models of all servers behind a proxy. Belongs to its thread; other threads may read `store`.

    Args:
        router: The addresses behind the proxy: models on their way come from one of them.
    """

    def __init__(self, router: Router[Any], limits: Limits) -> None:
        self.store = ModelStore(limits.model_bytes or MODEL_BYTES)
        self._router, self._limits = router, limits
        self._sources: dict[str, ModelSource] = {}  # of the newest model of each topic
        self._held: dict[tuple[bytes, int], HeldRequest] = {}  # by client and number

    def next_time(self) -> float:
        """When `overdue` has something."""
        return min((held.until for held in self._held.values()), default=float("inf"))

    # Requests for chunks

    def has_run(self, topic: str, run: int) -> bool:
        """Whether the topic's models here are those of this run (0: of any), as far as there are some."""
        source = self._sources.get(topic)
        return source is None or run in (0, source.run)

    def reply(self, header: MessageHeader, asked: messages.Fetch) -> list[Buffer] | None:
        """The stretch that was asked for, as a message; None if the model is not here.

        Raises:
            ProtocolError: the model has no such stretch.
        """
        model = self.store.serve(asked.topic, asked.version, stretch_of(asked, self._limits))
        if model is None:
            return None
        source = self._sources.get(asked.topic)
        home, epoch = (0, 0) if source is None else (source.home, source.epoch)
        chunk, payload = chunk_of(model, asked, self._limits, home=home, epoch=epoch)
        return frames.reply(header, chunk, payload=payload, **known_checksum(chunk, payload))

    def hold(self, request: EnvelopedRequest, header: MessageHeader, asked: messages.Fetch, now: float) -> bool:
        """Keep the request if the model is on its way here. A client may have heard of it before this proxy has."""
        home = self._router.homes.get(header.home)
        if home is not None and (not asked.version or asked.version > self.store.version(asked.topic)):
            with contextlib.suppress(ParameterError):  # too many topics: those who ask get theirs from the server
                home.topics.want(asked.topic)
            if asked.version:
                home.topics.announced({asked.topic: asked.version})
        key = (header.client, header.sequence)
        if key in self._held:
            return True  # sent again: it is answered once
        if len(self._held) >= MAX_HELD or not self._is_coming(asked.topic, asked.version):
            return False
        self._held[key] = HeldRequest(now + HELD_FETCH_TIMEOUT, asked.topic, asked.version, request)
        return True

    def _is_coming(self, topic: str, version: int) -> bool:
        return any(back.topics.is_coming(topic, version) for back in self._router.backs)

    def overdue(self, now: float) -> list[EnvelopedRequest]:
        """Requests that were held for long enough; they are held no longer."""
        return self._release([key for key, held in self._held.items() if now >= held.until])

    def _release(self, keys: list[tuple[bytes, int]]) -> list[EnvelopedRequest]:
        return [self._held.pop(key).request for key in keys]

    # Models

    def find(self, topic: str, version: int, checksum: int) -> Model | None:
        """A model that came from another server already."""
        model = self.store.get(topic, version)
        return model if model is not None and model.checksum == checksum else None

    def put(self, back: Backend, model: Model, *, is_renewed: bool, noticed: tuple[int, int]) -> bool:
        """Keep a model that is complete; False if the one here is as new.

        Args:
            is_renewed: Whether its publisher began again, and counts from 1.
            noticed: See `Backend.publisher`.
        """
        source = self._sources.get(model.topic)
        if is_renewed and (source is None or source.back is back):
            self.store.forget(model.topic)
        is_new = self.store.put(model)
        if is_new:
            self._sources[model.topic] = ModelSource(back, *back.publisher(noticed), back.run)
        return is_new

    def arrived(self, model: Model) -> list[EnvelopedRequest]:
        """Requests that a model that is complete was awaited by; they are held no longer."""
        mine = [(key, held.version) for key, held in self._held.items() if held.topic == model.topic]
        here = model.version
        return self._release([key for key, v in mine if v <= here or not self._is_coming(model.topic, v)])

    def notice(self, model: Model, *, again: bool = False) -> list[Buffer]:
        """Frames that tell subscribers of the newest model of a topic."""
        source = self._sources[model.topic]
        return notice_of(model, self._limits, home=source.home, epoch=source.epoch, run=source.run, again=again)

    def begin_run(self, back: Backend) -> None:
        """The servers there count another run: the models of the former one are no longer handed out."""
        back.topics.begin_run()
        for topic in [topic for topic, source in self._sources.items() if source.back is back]:
            self.store.forget(topic)
            del self._sources[topic]
