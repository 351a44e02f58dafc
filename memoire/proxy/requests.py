"""What becomes of a request that was let in: an answer from here, a way to a server, or a wait. Pure.

FETCH of a model ──▶ model_cache ──▶ answered here, or held
HELLO for nobody ──▶ pending, until the servers are known ──▶ assigned to one of them
anything else    ──▶ the server that it names
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.security.envelope import EnvelopedRequest
from memoire.wire import messages, types
from memoire.wire.frames import Buffer, MessageHeader, parse, parse_header, reply
from memoire.wire.receivers import Receivers, passed_on
from memoire.wire.refusals import FOR_INFERENCE, no_inference

from .backend import Backend
from .model_cache import ModelCache
from .router import Router
from .stats import ProxyCounts

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
