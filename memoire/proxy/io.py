"""The proxy's thread: it carries what the other files decide from the front to the addresses behind, and back.

io_front ─┬─ requests     where each request goes, or its answer ─┬─ io_backend, one for each address
          ├─ model_cache  models on their way, and handed out ────┤
          └─ replies      what becomes of a reply ────────────────┘
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Sequence

import zmq

from memoire.errors import Closed, ProtocolError
from memoire.limits import Limits
from memoire.models.model import Model, Notices
from memoire.net.context import Context
from memoire.net.curve_server import Gate
from memoire.net.thread import Worker
from memoire.security.roles import EnvelopedRequest, Peer
from memoire.wire import messages
from memoire.wire.frames import NEWS_FRAME, Buffer, MessageHeader, encode

from .io_sockets import BackendLink, BackendSettings, Front, QueueSizes
from .requests import AnswerRequest, ForwardRequest, ModelCache, Replies, Requests
from .router import BackendChange, ProxyCounts, Router

_log = logging.getLogger(__name__)


class ProxyThread:
    """Owns the thread and the parts that decide. Other threads read these parts as they are.

    Args:
        given: See `Front`.
        servers: Addresses to forward to.
        client: Id of the proxy, 16 bytes.
        owner: Lives as long as the thread: somebody may have dropped the proxy, while clients use it.

    Raises:
        EndpointError: an address is in use or malformed.
        KeyFileError: the keys cannot be used.
    """

    def __init__(
        self,
        given: tuple[str, str | None, str | None],
        servers: Sequence[str],
        *,
        gate: Gate,
        client: bytes,
        name: str,
        queues: QueueSizes,
        rng: random.Random,
        limits: Limits,
        context: Context,
        owner: object,
    ) -> None:
        self._owner = owner
        self._name, self._gate = name, gate
        self.started = time.monotonic()
        self.counts = ProxyCounts()
        self.router: Router[BackendLink] = Router(self.started)
        self.cache = ModelCache(self.router, limits)
        self.requests = Requests(self.router, self.cache, limits, self.counts)
        self._notices = Notices(self.started)
        self.worker = Worker("memoire-proxy", self._turn, self._next_time, self._at_end)
        try:
            self.front = Front(
                self.worker.doors,
                gate,
                given,
                name=name,
                context=context,
                limits=limits,
                counts=self.counts,
                queues=queues,
            )
            parts = self.front.endpoints, self.cache.store, limits, self.counts, self.requests.receivers
            self._replies = Replies(self.router, *parts)
            self._common = BackendSettings(self.worker, context, limits, gate.keys, rng, client, name, queues)
            self.router.backs += [self._open(endpoint) for endpoint in servers]
        except BaseException:
            self.worker.stop(0.0)
            raise

    def _open(self, endpoint: str) -> BackendLink:
        return BackendLink(self, endpoint, self._common)

    # From any thread

    def forward_to(self, servers: Sequence[str]) -> None:
        """Forward to these addresses from now on."""
        self.worker.post(functools.partial(self._relist, servers))

    # ----------------------------------------------------------------- from here on: inside of the thread alone

    def _next_time(self) -> float:
        return min(
            self.requests.next_time(),
            self.cache.next_time(),
            self.front.lanes.next_time(),
            self._notices.next_time(),
            *self.router.retiring.values(),
            *[back.next_time() for back in self.router.all],
        )

    def _turn(self, ready: dict[object, int]) -> None:
        self.front.take_requests(ready, self._take_request)
        self.front.take_caches(ready, self._take_cache)
        now = time.monotonic()
        if subscriptions := self.front.subscribed(ready):
            self._notices.subscribed(subscriptions, self.cache.store, now)
        for model in self._notices.due(self.cache.store, now):
            self.front.publish(self.cache.notice(model, again=True))
        for back in self.router.all:
            back.turn(ready)
        if self.router.retiring:
            self._retire(now)
        self._release(self.cache.overdue(now))
        for request in self.requests.assignable(time.monotonic()):
            self._take_request(request)
        self.front.lanes.turn(time.monotonic())

    def _at_end(self) -> None:
        for back in self.router.all:
            back.close(Closed("this proxy"))

    # Which servers there are

    def _relist(self, wanted: Sequence[str]) -> None:
        if not self.router.relist(wanted, self._open, time.monotonic()):
            return
        _log.info("proxy %s: forwards to %s", self._name, ", ".join(wanted))
        self._retire(self.router.listed_at)
        self._send_news()  # clients of servers that were taken off ask at once, and are told to go elsewhere

    def _retire(self, now: float) -> None:
        """Close addresses that were taken off the list, once their clients had time to hear of it."""
        gone = self.router.retire(now)
        for back in gone:
            back.leave()
            self.counts.homeless += len(back.requests) + len(back.caches)
        if gone:
            self._send_news()

    def welcomed(self, back: BackendLink, change: BackendChange) -> None:
        """An address has said who is there."""
        if change.has_restarted:
            self._send_news()  # its clients tell it at once what it may have forgotten
        if change.is_new_run:
            self.cache.begin_run(back)
        self.router.learn(back)

    def _send_news(self) -> None:
        self.heard_news([NEWS_FRAME, *encode(messages.News())])

    def heard_news(self, frames: Sequence[Buffer]) -> None:
        """Something has changed behind this proxy: clients ask what."""
        self.front.publish(frames)

    def refused(self, code: str) -> None:
        """A notice was refused."""
        self.counts.refuse(code)

    # Messages of clients

    def _take_request(self, request: EnvelopedRequest) -> None:
        try:
            now = time.monotonic()
            self._carry_out(self.requests.take(request, self.front.admission.parse_header(request, now), now))
        except ProtocolError as error:
            self.front.refuse(request, error)

    def _release(self, requests: Sequence[EnvelopedRequest]) -> None:
        for request in requests:
            try:
                self._carry_out(self.requests.release(request, time.monotonic()))
            except ProtocolError as error:
                self.front.refuse(request, error)

    def _carry_out(self, step: ForwardRequest[BackendLink] | AnswerRequest | None) -> None:
        if isinstance(step, AnswerRequest):
            self.front.reply(step.frames)
        elif step is not None:
            passport, introduction = self._gate.passport(step.request.peer), step.introduction
            before = [*passport, *introduction] if introduction else ()
            step.back.forward_request([*passport, *step.request.frames], before, step.client)

    def _take_cache(self, header: MessageHeader, peer: Peer, frames: Sequence[Buffer]) -> None:
        back = self.router.homes.get(header.home)
        if back is None:
            self.counts.homeless += 1
            return
        self.counts.caches += 1
        self.counts.cache_bytes += header.payload_bytes
        back.forward_cache([*self._gate.passport(peer), *frames], header.payload_bytes)

    def replied(self, back: BackendLink, frames: list[zmq.Frame]) -> None:
        """A server has answered a client."""
        reply = self._replies.take(back, frames)
        if reply is not None:
            self.front.reply(reply)

    # Models

    def find(self, topic: str, version: int, checksum: int) -> Model | None:
        """A model that came from another address already."""
        return self.cache.find(topic, version, checksum)

    def published(self, back: BackendLink, model: Model, is_renewed: bool, noticed: tuple[int, int]) -> None:
        """A model is complete: keep it and tell the clients, unless it is older than the one kept."""
        if self.cache.put(back, model, is_renewed=is_renewed, noticed=noticed):
            self.front.publish(self.cache.notice(model))
        self._release(self.cache.arrived(model))
