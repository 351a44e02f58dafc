"""What becomes of a request that was let in: an answer from here, a way to a server, or a wait. Pure.

FETCH of a model ──▶ model_cache ──▶ answered here, or held
HELLO for nobody ──▶ pending, until the servers are known ──▶ assigned to one of them
anything else    ──▶ the server that it names

The models that a proxy hands out, and the requests for those that are on their way here. Pure: no socket, no lock.

    FETCH v7 ──▶ here            ──▶ CHUNK
             ──▶ on its way here ──▶ held ──▶ v7 is here, or 5 s are over ──▶ looked at again
             ──▶ neither         ──▶ the client's server is asked

A model crosses the way behind a proxy once, not once for each client.

What becomes of a server's reply on its way to a client. Pure.

Most are handed on as they are. WELCOME gets this proxy's own addresses. UPDATED of a server that was taken off the list
gets the word to leave it: the client has then nothing open there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from memoire.errors import ParameterError, ProtocolError
from memoire.limits import MODEL_BYTES, Limits
from memoire.models.model import Model, ModelStore, chunk_of, known_checksum, notice_of, stretch_of
from memoire.security.roles import EnvelopedRequest, RoutedMessage, opened
from memoire.wire import frames, messages, types
from memoire.wire.frames import FOR_INFERENCE, Buffer, MessageHeader, no_inference, parse, parse_header, peek, reply
from memoire.wire.frames import reply as encode_reply
from memoire.wire.receivers import Receivers, passed_on

from .router import Backend, ProxyCounts, Router

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


MAX_PENDING = 1024
"""HELLO messages kept until the first server is known; beyond, the client of the oldest asks again."""

B = TypeVar("B", bound=Backend)


class ForwardRequest(NamedTuple, Generic[B]):
    """Send a request to a server."""

    back: B
    """The way to it."""
    request: EnvelopedRequest
    introduction: Sequence[Buffer] = ()
    """What a server that does not know the client has to hear before: what it takes. Empty: as much as most."""
    client: bytes = b""


class AnswerRequest(NamedTuple):
    """Answer a request."""

    frames: list[Buffer]
    """With the envelope."""


class Requests(Generic[B]):
    """Decides about requests. Belongs to the proxy's thread.

    Methods that get a request return what is to be done with it; None: nothing, since it waits here, or its client is
    to ask again. They raise ProtocolError if it is to be refused.
    """

    def __init__(self, router: Router[B], cache: ModelCache, limits: Limits, counts: ProxyCounts) -> None:
        self.pending: deque[EnvelopedRequest] = deque(maxlen=MAX_PENDING)
        """HELLO messages that wait until servers are known."""
        self.receivers = Receivers()
        """What its clients take of a reply that is made here."""
        self._router, self._cache, self._limits, self._counts = router, cache, limits, counts

    def next_time(self) -> float:
        """When `assignable` may have something without an answer of a server."""
        return self._router.ready_at() if self.pending else float("inf")

    def assignable(self, now: float) -> Iterator[EnvelopedRequest]:
        """Requests that waited for servers to be known, as far as these are; they are to be taken in again."""
        while self.pending and self._router.is_ready(now):
            yield self.pending.popleft()

    def take(
        self, request: EnvelopedRequest, header: MessageHeader, now: float
    ) -> ForwardRequest[B] | AnswerRequest | None:
        """A request came in, or waited for servers."""
        if header.type in FOR_INFERENCE:
            raise no_inference(header.type)
        if header.type is types.FETCH:
            asked = self._fetch_of(request)
            if self._cache.has_run(asked.topic, header.run):
                reply = self._cache.reply(header, asked)
                if reply is not None:
                    return self._answer(request, reply)
                if self._cache.hold(request, header, asked, now):
                    return None
        return self._route(request, header, now)

    def release(self, request: EnvelopedRequest, now: float) -> ForwardRequest[B] | AnswerRequest | None:
        """A request for a model was held for long enough, or the model is here: it is held no longer."""
        header, asked = parse_header(request.message, self._limits)[0], self._fetch_of(request)
        reply = self._cache.reply(header, asked) if self._cache.has_run(asked.topic, header.run) else None
        return self._route(request, header, now) if reply is None else self._answer(request, reply)

    def _fetch_of(self, request: EnvelopedRequest) -> messages.Fetch:
        body = parse(request.message, self._limits).body
        assert isinstance(body, messages.Fetch)
        return body

    def _answer(self, request: EnvelopedRequest, reply: list[Buffer]) -> AnswerRequest:
        self._counts.requests += 1
        return AnswerRequest([*request.envelope, *reply])

    def _route(self, request: EnvelopedRequest, header: MessageHeader, now: float) -> ForwardRequest[B] | None:
        back = self._router.homes.get(header.home)
        is_unknown = self._router.is_unknown(header.home, now)
        if back is None and header.type is types.HELLO:
            self._check_let_in()
            if is_unknown or not header.home:  # else its home may only be away
                if not self._router.is_ready(now):
                    self._keep(request)
                    return None
                back = self._router.assign(header.client)
        if back is None:
            self._counts.homeless += 1
            if is_unknown:
                raise ProtocolError("client", "your server is not behind this proxy (any more); say HELLO again")
            return None  # its server may answer soon, and the request comes again
        self._counts.requests += 1
        if header.type is types.HELLO:
            request = self._introduced(request)
        introduction = self._introduction(request, header)
        return ForwardRequest(back, request, introduction, header.client if introduction else b"")

    def _introduction(self, request: EnvelopedRequest, header: MessageHeader) -> Sequence[Buffer]:
        """The HELLO, with its envelope, of a client that takes less than most, or has its replies through this proxy,
        which does. Nobody waits for the answer: no request has its number.
        """
        takes = self.receivers.of(header.client).within(self._limits).takes
        if not takes:
            return ()
        hello = messages.Hello(role="client", takes=takes)
        return [*request.envelope, *reply(msgspec.structs.replace(header, sequence=0), hello)]

    def _introduced(self, request: EnvelopedRequest) -> EnvelopedRequest:
        """A HELLO that says what this proxy takes of replies, too, if that is less than what its client takes."""
        said = parse(request.message, self._limits)
        assert isinstance(said.body, messages.Hello)
        hello = passed_on(said.body, self._limits)
        self.receivers.met(said.header.client, hello)
        return request if hello is said.body else request._replace(message=reply(said.header, hello))

    def _check_let_in(self) -> None:
        if why := self._router.denied:
            if self._router.is_too_small:
                raise ProtocolError("too_large", f"this proxy's own limits are too low: {why}")
            raise ProtocolError("denied", why)

    def _keep(self, request: EnvelopedRequest) -> None:
        self._counts.homeless += len(self.pending) == MAX_PENDING  # the oldest goes; its client asks again
        self.pending.append(request)


class Replies(Generic[B]):
    """Hands replies on. Belongs to the proxy's thread.

    Args:
        endpoints: The proxy's own.
        models: Those that it hands out.
        receivers: What its clients take.
    """

    def __init__(
        self,
        router: Router[B],
        endpoints: messages.Endpoints,
        models: ModelStore,
        limits: Limits,
        counts: ProxyCounts,
        receivers: Receivers,
    ) -> None:
        self._router, self._endpoints, self._models = router, endpoints, models
        self._limits, self._counts, self._receivers = limits, counts, receivers

    def take(self, back: B, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """The reply as its client gets it, with its envelope; None if it is damaged, and refused."""
        self._counts.replies += 1
        reply = opened(frames)
        if reply is None:
            self._counts.refuse("frames")
            return None
        kind = _type_of(reply.message)
        if kind is not types.WELCOME and not (kind is types.UPDATED and back in self._router.retiring):
            return frames
        try:
            return [*reply.envelope, *self._changed(back, reply)]
        except ProtocolError as error:
            self._counts.refuse(error.code)
            return None

    def _changed(self, back: B, reply: RoutedMessage) -> list[Buffer]:
        message = parse(reply.message, self._limits)
        if isinstance(message.body, messages.Updated):
            told = msgspec.structs.replace(message.body, leaving=True)
            return encode_reply(message.header, told, payload=message.payload)
        assert isinstance(message.body, messages.Welcome)
        self._router.answered(message.header.home, back)
        welcome = self._router.welcome(message.body, self._endpoints, self._models.versions(), self._limits)
        frames = encode_reply(message.header, welcome)
        try:
            self._receivers.of(message.header.client).check(message.header.client, welcome, frames)
        except ProtocolError as error:
            self._counts.refuse(error.code)
            return encode_reply(message.header, messages.Refused(code=error.code, text=error.detail))
        return frames


def _type_of(message: Sequence[Buffer]) -> types.Type | None:
    """What a message says it is, unchecked; None if it says nothing that is known."""
    return None if peek(message) is None else types.TYPES.get(int.from_bytes(memoryview(message[0])[6:8], "little"))
