"""Decisions about requests and replies, and the cache of models. Pure: no socket, no lock.

FETCH of a model       ──▶ ModelCache ──▶ answered here, or held
HELLO without a home   ──▶ pending, until the servers are known ──▶ assigned to one of them
any other request      ──▶ the server that its header names

The cache answers requests for models that it has, and holds requests for models that are being fetched:

    FETCH v7 ──▶ in the cache    ──▶ CHUNK
             ──▶ being fetched   ──▶ held ──▶ v7 arrives, or 5 s pass ──▶ answered or forwarded
             ──▶ neither         ──▶ forwarded to the client's server

A model crosses the network behind a proxy once, not once per client.

Most replies are forwarded unchanged. A WELCOME gets this proxy's own addresses. An UPDATED of a server that was removed
from the list tells the client to leave the server; the client has then no open request there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from memoire.errors import ParameterError, ProtocolError
from memoire.limits import MODEL_BYTES, Limits
from memoire.models.model import Model, ModelStore, chunk_of, known_checksum, max_chunk_bytes, notice_of
from memoire.security.roles import EnvelopedRequest, RoutedMessage, split_envelope
from memoire.wire import frames, messages, types
from memoire.wire.frames import FOR_INFERENCE, Buffer, MessageHeader, no_inference, parse, parse_header, peek, reply
from memoire.wire.frames import reply as encode_reply
from memoire.wire.receivers import Receivers, proxied_hello

from .router import Backend, ProxyCounts, Router

HELD_FETCH_TIMEOUT = 5.0
"""Seconds for which a request waits for a model that is being fetched, before it is forwarded to its server."""
MAX_HELD = 4096


class ModelSource(NamedTuple):
    """Origin of the newest model of a topic."""

    back: Backend
    home: int
    """Hash of the name of the server at which the model was published."""
    epoch: int
    """Epoch of that server, the number of its start."""
    run: int
    """Hash of the run that the server counted."""


class HeldRequest(NamedTuple):
    """Request for a chunk of a model that is being fetched."""

    until: float
    topic: str
    version: int
    request: EnvelopedRequest


class ModelCache:
    """Cache of the newest models of all servers behind a proxy, in the proxy's thread. All threads may read `store`.

    Args:
        router: Addresses behind the proxy, from which models are fetched.
    """

    def __init__(self, router: Router[Any], limits: Limits) -> None:
        self.store = ModelStore(limits.model_bytes or MODEL_BYTES)
        self._router, self._limits = router, limits
        self._sources: dict[str, ModelSource] = {}  # source of each topic's newest model
        self._held: dict[tuple[bytes, int], HeldRequest] = {}  # requests by client and number

    def next_time(self) -> float:
        """Return the time at which `overdue` has a request."""
        return min((held.until for held in self._held.values()), default=float("inf"))

    # Requests for chunks

    def has_run(self, topic: str, run: int) -> bool:
        """Return True if no model of the topic is cached, or the cached ones are of this run; 0 matches any run."""
        source = self._sources.get(topic)
        return source is None or run in (0, source.run)

    def reply(self, header: MessageHeader, fetch: messages.Fetch) -> list[Buffer] | None:
        """Return the requested part of a model as a message; None if the model is not in the cache.

        Raises:
            ProtocolError: the model has no part at this offset.
        """
        model = self.store.serve(fetch.topic, fetch.version, max_chunk_bytes(fetch, self._limits))
        if model is None:
            return None
        source = self._sources[fetch.topic]
        chunk, payload = chunk_of(model, fetch, self._limits, home=source.home, epoch=source.epoch)
        return frames.reply(header, chunk, payload=payload, **known_checksum(chunk, payload))

    def hold(self, request: EnvelopedRequest, header: MessageHeader, fetch: messages.Fetch, now: float) -> bool:
        """Hold the request and return True if the model is being fetched. A client may hear of a model first."""
        home = self._router.homes.get(header.home)
        if home is not None and (not fetch.version or fetch.version > self.store.version(fetch.topic)):
            with contextlib.suppress(ParameterError):  # with too many topics, a request goes on to
                home.topics.follow_topic(fetch.topic)
            if fetch.version:
                home.topics.receive_versions({fetch.topic: fetch.version})
        key = (header.client, header.sequence)
        if key in self._held:
            return True  # a resend: answered once
        if len(self._held) >= MAX_HELD or not self._is_coming(fetch.topic, fetch.version):
            return False
        self._held[key] = HeldRequest(now + HELD_FETCH_TIMEOUT, fetch.topic, fetch.version, request)
        return True

    def _is_coming(self, topic: str, version: int) -> bool:
        return any(back.topics.is_coming(topic, version) for back in self._router.backs)

    def overdue(self, now: float) -> list[EnvelopedRequest]:
        """Remove and return requests that were held for `HELD_FETCH_TIMEOUT`."""
        return self._release([key for key, held in self._held.items() if now >= held.until])

    def _release(self, keys: list[tuple[bytes, int]]) -> list[EnvelopedRequest]:
        return [self._held.pop(key).request for key in keys]

    # Models

    def find(self, topic: str, version: int, checksum: int) -> Model | None:
        """Return a cached model with this checksum, which another server may have sent; else None."""
        model = self.store.get(topic, version)
        return model if model is not None and model.checksum == checksum else None

    def put(self, back: Backend, model: Model, *, is_renewed: bool, noticed: tuple[int, int]) -> bool:
        """Store a complete model. Return False if the cached one is as new.

        Args:
            is_renewed: True if the publisher restarted, and counts versions from 1.
            noticed: See `Backend.publisher`.
        """
        source = self._sources.get(model.topic)
        if is_renewed and (source is None or source.back is back):
            self.store.forget(model.topic)
        is_new = self.store.put(model)
        if is_new:
            self._sources[model.topic] = ModelSource(back, *back.publisher(noticed), back.run)
        return is_new

    def release_for_model(self, model: Model) -> list[EnvelopedRequest]:
        """Remove and return requests that waited for a model, after the model was stored."""
        mine = [(key, held.version) for key, held in self._held.items() if held.topic == model.topic]
        newest = model.version
        return self._release([key for key, v in mine if v <= newest or not self._is_coming(model.topic, v)])

    def notice_frames(self, model: Model, *, again: bool = False) -> list[Buffer]:
        """Return the frames of a notice of the newest model of a topic."""
        source = self._sources[model.topic]
        return notice_of(model, self._limits, home=source.home, epoch=source.epoch, run=source.run, again=again)

    def begin_run(self, back: Backend) -> None:
        """Discard the models of the former run, because the servers at this address count another run."""
        back.topics.begin_run()
        for topic in [topic for topic, source in self._sources.items() if source.back is back]:
            self.store.forget(topic)
            del self._sources[topic]


MAX_PENDING = 1024
"""Maximum number of HELLO messages that wait for a server; beyond, the oldest is dropped and its client retries."""

B = TypeVar("B", bound=Backend)


class ForwardRequest(NamedTuple, Generic[B]):
    """Decision to send a request to a server."""

    back: B
    request: EnvelopedRequest
    introduction: Sequence[Buffer] = ()
    """HELLO with the client's receive limits, for a server that does not know them; empty for default limits."""
    client: bytes = b""


class AnswerRequest(NamedTuple):
    """Decision to answer a request with a reply made by the proxy."""

    frames: list[Buffer]
    """Frames of the reply, with the envelope."""


class Requests(Generic[B]):
    """Decisions about requests. Belongs to the proxy's thread.

    Methods that get a request return the decision. None: nothing is sent, because the request waits, or its client must
    retry. The methods raise ProtocolError to refuse the request.
    """

    def __init__(self, router: Router[B], cache: ModelCache, limits: Limits, counts: ProxyCounts) -> None:
        self.pending: deque[EnvelopedRequest] = deque(maxlen=MAX_PENDING)
        """HELLO messages that wait until servers are known."""
        self.receivers = Receivers()
        """Receive limits of clients, for replies that the proxy makes."""
        self._router, self._cache, self._limits, self._counts = router, cache, limits, counts

    def next_time(self) -> float:
        """Return the time at which `assignable` may have requests without a server's reply."""
        return self._router.ready_at() if self.pending else float("inf")

    def assignable(self, now: float) -> Iterator[EnvelopedRequest]:
        """Yield pending requests once servers are known; pass each to `take` again."""
        while self.pending and self._router.is_ready(now):
            yield self.pending.popleft()

    def take(
        self, request: EnvelopedRequest, header: MessageHeader, now: float
    ) -> ForwardRequest[B] | AnswerRequest | None:
        """Decide about a received or pending request."""
        if header.type in FOR_INFERENCE:
            raise no_inference(header.type)
        if header.type is types.FETCH:
            fetch = self._fetch_of(request)
            if self._cache.has_run(fetch.topic, header.run):
                reply = self._cache.reply(header, fetch)
                if reply is not None:
                    return self._answer(request, reply)
                if self._cache.hold(request, header, fetch, now):
                    return None
        return self._route(request, header, now)

    def release(self, request: EnvelopedRequest, now: float) -> ForwardRequest[B] | AnswerRequest | None:
        """Decide about a held request after its model arrived or its time was over."""
        header, fetch = parse_header(request.message, self._limits)[0], self._fetch_of(request)
        reply = self._cache.reply(header, fetch) if self._cache.has_run(fetch.topic, header.run) else None
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
        is_unknown = self._router.is_server_absent(header.home, now)
        if back is None and header.type is types.HELLO:
            self._check_access()
            if is_unknown or not header.home:  # a known home server may be away for a while
                if not self._router.is_ready(now):
                    self._keep(request)
                    return None
                back = self._router.assign(header.client)
        if back is None:
            self._counts.homeless += 1
            if is_unknown:
                raise ProtocolError("client", "your server is not behind this proxy (any more); say HELLO again")
            return None  # the server may answer soon, and the client retries
        self._counts.requests += 1
        if header.type is types.HELLO:
            request = self._with_limits(request)
        introduction = self._introduction(request, header)
        return ForwardRequest(back, request, introduction, header.client if introduction else b"")

    def _introduction(self, request: EnvelopedRequest, header: MessageHeader) -> Sequence[Buffer]:
        """Return a HELLO with the client's receive limits, if they or this proxy's are below the defaults. The HELLO
        has sequence number 0, so that its reply belongs to no request.
        """
        takes = self.receivers.limits_of(header.client).within(self._limits).declared_limits
        if not takes:
            return ()
        hello = messages.Hello(role="client", takes=takes)
        return [*request.envelope, *reply(msgspec.structs.replace(header, sequence=0), hello)]

    def _with_limits(self, request: EnvelopedRequest) -> EnvelopedRequest:
        """Return a HELLO whose receive limits are the lower ones of the client and this proxy."""
        message = parse(request.message, self._limits)
        assert isinstance(message.body, messages.Hello)
        hello = proxied_hello(message.body, self._limits)
        self.receivers.register_hello(message.header.client, hello)
        return request if hello is message.body else request._replace(message=reply(message.header, hello))

    def _check_access(self) -> None:
        if why := self._router.denial_reasons:
            if self._router.is_too_small:
                raise ProtocolError("too_large", f"this proxy's own limits are too low: {why}")
            raise ProtocolError("denied", why)

    def _keep(self, request: EnvelopedRequest) -> None:
        self._counts.homeless += len(self.pending) == MAX_PENDING  # the oldest is dropped; its client retries
        self.pending.append(request)


class Replies(Generic[B]):
    """Forwarding of replies. Belongs to the proxy's thread.

    Args:
        endpoints: Addresses of the proxy.
        models: Models that the proxy hands out.
        receivers: Receive limits of the clients.
    """

    def __init__(
        self,
        router: Router[B],
        endpoints: messages.NodeEndpoints,
        models: ModelStore,
        limits: Limits,
        counts: ProxyCounts,
        receivers: Receivers,
    ) -> None:
        self._router, self._endpoints, self._models = router, endpoints, models
        self._limits, self._counts, self._receivers = limits, counts, receivers

    def take(self, back: B, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Return the frames for the client, with the envelope; None for a damaged reply, counted as refused."""
        self._counts.replies += 1
        reply = split_envelope(frames)
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
            updated = msgspec.structs.replace(message.body, leaving=True)
            return encode_reply(message.header, updated, payload=message.payload)
        assert isinstance(message.body, messages.Welcome)
        self._router.receive_answer(message.header.home, back)
        welcome = self._router.welcome(message.body, self._endpoints, self._models.versions(), self._limits)
        frames = encode_reply(message.header, welcome)
        try:
            self._receivers.limits_of(message.header.client).check(message.header.client, welcome, frames)
        except ProtocolError as error:
            self._counts.refuse(error.code)
            return encode_reply(message.header, messages.Refusal(code=error.code, text=error.detail))
        return frames


def _type_of(message: Sequence[Buffer]) -> types.Type | None:
    """Return the type in a message's header, without validation, or None if it is unknown."""
    return None if peek(message) is None else types.TYPES.get(int.from_bytes(memoryview(message[0])[6:8], "little"))
