"""The proxy's thread, and its sockets: it carries what the other files decide from the front to the addresses behind,
and back.

Front ────┬─ Requests     where each request goes, or its answer ─┬─ BackendLink, one for each address
          ├─ ModelCache   models on their way, and handed out ────┤
          └─ Replies      what becomes of a reply ────────────────┘

The sockets of one address behind a proxy:

channel   HELLO, FETCH      ◀──▶ answers       for the proxy itself
dealer    requests          ◀──▶ replies       of clients
push      caches            ──▶
feed      notices           ◀──                opened, like push, where WELCOME says

Messages from the front pass one of two methods, `take_requests` and `take_caches`.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import zmq

from memoire.errors import Closed, MemoireError, ProtocolError
from memoire.limits import Limits
from memoire.models.io import Feed
from memoire.models.model import Model, Notices
from memoire.models.topics import Topics
from memoire.net import link, sockets
from memoire.net.addresses import beside, page_seen_from, seen_from
from memoire.net.channel import Channel
from memoire.net.curve_server import Admission, Gate
from memoire.net.poller import CONNECTION_BYTES, Poller, Sender, SendQueue, SendQueues
from memoire.net.sockets import Context, Socket
from memoire.net.thread import Worker
from memoire.security import access
from memoire.security.roles import EnvelopedRequest, Peer
from memoire.wire import messages
from memoire.wire.frames import NEWS_FRAME, Answer, Buffer, Message, MessageHeader, encode, welcome_of
from memoire.wire.receivers import MAX_RECEIVERS

from .requests import AnswerRequest, ForwardRequest, ModelCache, Replies, Requests
from .router import Backend, BackendChange, BackStats, ProxyCounts, Router

MESSAGES_PER_TURN = 200
WAITING_REQUESTS = 64
"""Requests of the largest size that wait for each address at most."""


class QueueSizes(NamedTuple):
    """Bytes that may wait in a proxy."""

    caches: int
    """For each server."""
    requests: int
    """For each server."""
    replies: int

    def of(self, servers: int) -> int:
        """All of them, for so many servers."""
        return servers * (self.caches + self.requests) + self.replies


class Front:
    """Three sockets that others connect to.

    Args:
        given: Addresses for requests, caches and notices; the latter two are beside the first one if they are None.
        name: Of the proxy.

    Raises:
        EndpointError: an address is in use or malformed.
    """

    def __init__(
        self,
        doors: Poller,
        gate: Gate,
        given: tuple[str, str | None, str | None],
        *,
        name: str,
        context: Context,
        limits: Limits,
        counts: ProxyCounts,
        queues: QueueSizes,
    ) -> None:
        self._doors, self._gate = doors, gate
        self.admission = Admission(gate, limits, count=lambda error: counts.refuse(error.code))
        self.lanes = SendQueues(min(CONNECTION_BYTES, queues.replies), queues.replies)
        """Replies that wait until their connection has room."""
        request, push, publish = given
        near = beside(request)
        self._pull = doors.add(sockets.data_receiver(context, limits.message_bytes + (1 << 16)))
        self._pub = doors.add(sockets.publisher(context))
        self._router = doors.add(sockets.request_server(context, limits.tuning.request_bytes))
        self.endpoints = messages.Endpoints(
            publish=self._bind(self._pub, publish or near[1]),
            push=self._bind(self._pull, push or near[0]),
            request=self._bind(self._router, request),
        )
        """The addresses, as bound."""
        if gate.keys is None:
            bound = [self.endpoints.request, self.endpoints.push, self.endpoints.publish]
            access.warn(f"proxy {name!r}", bound, guard="keys (keys=)")

    def _bind(self, made: Socket, endpoint: str) -> str:
        bound, way = self._gate.bind(made, endpoint)
        if way is not None:
            self._doors.follow(made, way)
        return bound

    # Requests

    def take_requests(self, ready: dict[object, int], take: Callable[[EnvelopedRequest], None]) -> None:
        """Hand over the requests that came and may come in; the rest of a flood waits for the next turn."""
        if self._router not in ready:
            return
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self._router, most=sockets.ENVELOPE)
            if frames is None:
                return
            request = self.admission.receive_request(self._router, frames)
            if request is None:
                continue
            if len(request.frames) >= sockets.ENVELOPE:  # this proxy puts one more address in front
                self.admission.refuse(ProtocolError("frames", "a request came through too many proxies"))
            else:
                take(request)

    def refuse(self, request: EnvelopedRequest, error: ProtocolError) -> None:
        """Count a request that is refused, and tell its sender why."""
        refusal = self.admission.refuse_request(request, error)
        if refusal is not None:
            self.reply(refusal)

    def reply(self, frames: Sequence[Buffer]) -> None:
        """Send a reply to a client, or to the proxy in front, now or when there is room for it."""
        self.lanes.send(self._router, frames, time.monotonic())

    # Caches

    def take_caches(
        self, ready: dict[object, int], take: Callable[[MessageHeader, Peer, Sequence[Buffer]], None]
    ) -> None:
        """Hand over the caches and episodes that came and may come in."""
        if self._pull not in ready:
            return
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self._pull, most=3)
            if frames is None:
                return
            pushed = self.admission.receive_push_header(self._pull, frames)
            if pushed is not None:
                take(*pushed)

    # Notices

    def subscribed(self, ready: dict[object, int]) -> list[bytes]:
        """What peers have subscribed to since the last call: the bytes that a notice has to begin with."""
        return sockets.subscribed(self._pub, self._gate.admits) if self._pub in ready else []

    def publish(self, frames: Sequence[Any]) -> None:
        """Tell all that have subscribed to it."""
        sockets.send(self._pub, frames)


_log = logging.getLogger(__name__)

HELLO_INTERVAL = 2.0
"""Seconds between two HELLO messages to each server: is it there, is it the same one, what does it publish."""
AWAY_TIMEOUT = 7.0
"""Seconds without a reply after which new clients are given to other servers."""


class _Introduced(list[Buffer]):
    """A request of a client that takes less than others do, and the HELLO that says so."""

    def __init__(self, frames: Sequence[Buffer], introduction: Sequence[Buffer], client: bytes) -> None:
        super().__init__(frames)
        self.introduction, self.client = introduction, client


class BackendLink(Backend):
    """One address behind a proxy, with its sockets."""

    def __init__(self, owner: ProxyThread, endpoint: str) -> None:
        super().__init__(endpoint)
        self._owner = owner
        limits, doors, keys = owner.limits, owner.worker.doors, owner.gate.keys
        self.requests, self.caches = SendQueue(owner.queues.requests), SendQueue(owner.queues.caches)
        """Messages of clients on their way there."""
        self.channel = Channel(
            doors, owner.context, endpoint, client=owner.client, limits=limits, rng=owner.rng, keys=keys
        )
        self._renewals = 0  # of the channel, that the other sockets have followed
        self._told: set[bytes] = (
            set()
        )  # clients of which this connection has told what they take; beyond, it is told again
        self._endings = 0  # of the dealer's connections, before this one
        self._dealer = Sender(doors, is_reading=True)
        self._open_dealer()
        self._push = Sender(doors, is_reading=False)
        self._feed = Feed(doors, self.channel, context=owner.context, limits=limits, keys=keys)
        self._is_hearing = False
        self.topics = Topics(limits, self._feed.fetch, self._hear, owner.worker.post, self._published, owner.cache.find)

    def _open_dealer(self) -> None:
        made = sockets.request_client(self._owner.context, self._owner.limits.reply_bytes)
        self._dealer.use(self.channel.link.join(made, watch=True))
        self._endings = 0
        self._told.clear()

    @property
    def is_away(self) -> bool:
        """Whether it has not answered for a while. From any thread."""
        return self.channel.link.is_down or time.monotonic() - self.channel.heard_at > AWAY_TIMEOUT

    @property
    def denied(self) -> str:
        """Why this proxy is not let in there, or the one that is there further on; "" while nobody says so."""
        return str(self.channel.denied_for_good or self.refusal)

    def stats(self) -> BackStats:
        """All figures at this moment. From any thread."""
        return BackStats(
            endpoint=self.endpoint,
            servers=self.names,
            leaving=self.leaving,
            is_away=self.is_away,
            queued_bytes=self.requests.bytes + self.caches.bytes,
            lost_requests=self.requests.lost,
            lost_caches=self.caches.lost,
            lost_bytes=self.caches.lost_bytes,
        )

    # Turns

    def next_time(self) -> float:
        """When `turn` has something to do."""
        return min(self.channel.next_time(), self.topics.next_time(), self.hello.next_time())

    def turn(self, ready: dict[object, int]) -> None:
        """Take what came, send what is due."""
        self.channel.turn(ready)
        if self.channel.renewals != self._renewals:
            self._renew()
        self._say_hello(time.monotonic())
        self._take_replies(ready)
        self._feed.turn(ready, self._take_notice, self._owner.counts.refuse)
        self.topics.turn()
        self._dealer.turn(self._send_requests)
        self._push.turn(self.caches.send)

    def _renew(self) -> None:
        """Make every socket anew: the channel found that this address has been silent for too long."""
        self._renewals = self.channel.renewals
        self._dealer.drop(linger=0.0)
        self._open_dealer()
        self._close_data()

    def _close_data(self) -> None:
        self._push.drop(sockets.DRAIN_TIMEOUT)
        self._feed.close()

    def leave(self) -> None:
        """Close everything: the proxy goes on without this address, and what waits in its lanes has no home."""
        self.close(Closed("this address"))
        self.channel.leave()
        self._dealer.drop(linger=0.0)
        self._close_data()

    def close(self, error: Closed) -> None:
        """End every open request of the proxy itself with this error."""
        self.channel.close(error)

    # Messages of clients

    def forward_request(
        self, frames: Sequence[Buffer], introduction: Sequence[Buffer] = (), client: bytes = b""
    ) -> None:
        """Send a request there, as soon as there is room for it.

        Args:
            introduction: What comes before it if this connection has told nothing of the client yet: the server may
                have begun again since it was told what the client takes, and sends what is too large. Empty: nothing.
        """
        size = sum(len(frame) for frame in (*introduction, *frames))
        self.requests.put(_Introduced(frames, introduction, client) if introduction else frames, size)

    def _send_requests(self, made: Socket) -> bool:
        return self.requests.send(made, self._send_request)

    def _send_request(self, made: Socket, frames: Sequence[Buffer]) -> bool:
        if isinstance(frames, _Introduced):
            if (endings := self.channel.link.endings(made)) != self._endings or len(self._told) >= MAX_RECEIVERS:
                self._endings = endings
                self._told.clear()
            if frames.client not in self._told:
                if not sockets.send(made, frames.introduction):
                    return False
                self._told.add(frames.client)
        return sockets.send(made, frames)

    def forward_cache(self, frames: Sequence[Buffer], size: int) -> None:
        """Queue a cache or an episode for this server; it leaves when there is room. `size` is its payload in bytes."""
        self.caches.put(frames, size)
        # At once: a turn may bring more than the lane holds, while the server has room for all of it.
        self.caches.send(self._push.socket)

    def _take_replies(self, ready: dict[object, int]) -> None:
        dealer = self._dealer.socket
        if dealer is None or not ready.get(dealer, 0) & sockets.READABLE:
            return
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(dealer, most=sockets.ENVELOPE)
            if frames is None:
                return
            self._owner.replied(self, frames)

    # HELLO

    def _say_hello(self, now: float) -> None:
        if self.hello.is_due(now):
            self.hello.begin(now + HELLO_INTERVAL)
            self.channel.ask(messages.Hello(role="proxy", name=self._owner.name), self._welcomed)

    def _welcomed(self, answer: Answer) -> None:
        self.answered(answer)
        try:
            header, told = welcome_of(answer, self.endpoint)
        except MemoireError as error:
            if not isinstance(error, Closed):
                _log.warning("proxy %s: %s", self._owner.name, error)
            return
        change = self.learn(header, told)
        self.pages = tuple(page_seen_from(self.channel.link.address, page) for page in told.pages)
        self.inference = tuple(seen_from(self.channel.link.address, address) for address in told.inference)
        if change.has_moved or self._push.socket is None:
            self._close_data()
            self._open_data(told.endpoints)
        if change.has_restarted:
            self.topics.restarted()
        self._owner.welcomed(self, change)
        for topic in told.models:
            self._want(topic)
        self.topics.announced(told.models)

    def _open_data(self, endpoints: messages.Endpoints) -> None:
        """Connect the sockets whose addresses the other side has just said."""
        push, address = sockets.data_sender(self._owner.context), self.channel.link.address
        link.dial(self._owner.worker.doors, push, seen_from(address, endpoints.push), keys=self._owner.gate.keys)
        self._push.use(push)
        if endpoints.publish:
            self._feed.open(seen_from(address, endpoints.publish))
            self._is_hearing = False
            self._hear("", True)

    # Notices and models

    def _hear(self, _: str, wanted: bool) -> bool:
        """Subscribe to all topics at once, or end that."""
        if wanted != self._is_hearing and self._feed.subscribe(b"", wanted):
            self._is_hearing = wanted
        return self._is_hearing

    def _want(self, topic: str) -> None:
        try:
            self.topics.want(topic)
        except ValueError as error:
            _log.warning("proxy %s: %s", self._owner.name, error)

    def _take_notice(self, message: Message, frames: Sequence[Buffer]) -> None:
        if isinstance(message.body, messages.News):
            self.heard_news()
            self._owner.front.publish(frames)
            return
        assert isinstance(message.body, messages.Notice)
        if self.hears(message.header):
            self._want(message.body.topic)
            self.topics.noticed(message.body, message.payload, message.header.home)

    def _published(self, model: Model, is_renewed: bool, noticed: tuple[int, int]) -> None:
        self._owner.published(self, model, is_renewed, noticed)


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
        self.name, self.gate, self.queues, self.client, self.rng = name, gate, queues, client, rng
        self.limits, self.context = limits, context
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
            self.router.backs += [self._open(endpoint) for endpoint in servers]
        except BaseException:
            self.worker.stop(0.0)
            raise

    def _open(self, endpoint: str) -> BackendLink:
        return BackendLink(self, endpoint)

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
        _log.info("proxy %s: forwards to %s", self.name, ", ".join(wanted))
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
        self.front.publish([NEWS_FRAME, *encode(messages.News())])

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
            passport, introduction = self.gate.passport(step.request.peer), step.introduction
            before = [*passport, *introduction] if introduction else ()
            step.back.forward_request([*passport, *step.request.frames], before, step.client)

    def _take_cache(self, header: MessageHeader, peer: Peer, frames: Sequence[Buffer]) -> None:
        back = self.router.homes.get(header.home)
        if back is None:
            self.counts.homeless += 1
            return
        self.counts.caches += 1
        self.counts.cache_bytes += header.payload_bytes
        back.forward_cache([*self.gate.passport(peer), *frames], header.payload_bytes)

    def replied(self, back: BackendLink, frames: list[zmq.Frame]) -> None:
        """A server has answered a client."""
        reply = self._replies.take(back, frames)
        if reply is not None:
            self.front.reply(reply)

    # Models

    def published(self, back: BackendLink, model: Model, is_renewed: bool, noticed: tuple[int, int]) -> None:
        """A model is complete: keep it and tell the clients, unless it is older than the one kept."""
        if self.cache.put(back, model, is_renewed=is_renewed, noticed=noticed):
            self.front.publish(self.cache.notice(model))
        self._release(self.cache.arrived(model))
