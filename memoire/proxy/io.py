"""Thread and sockets of a proxy, which carry out the decisions of the other modules.

Front ────┬─ Requests     decides about each request ─────────────┬─ BackendLink, one for each address
          ├─ ModelCache   fetches and hands out models ───────────┤
          └─ Replies      changes and forwards replies ───────────┘

Sockets of one address behind a proxy:

channel   HELLO, FETCH      ◀──▶ replies       of the proxy itself
dealer    requests          ◀──▶ replies       of clients
push      caches            ──▶
feed      notices           ◀──                opened, like push, at the addresses in a WELCOME

Messages from clients enter by `take_requests` or `take_caches`.
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
from memoire.net.addresses import derived_addresses, page_seen_from, seen_from
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
"""Maximum number of waiting requests of the largest size for each address."""


class QueueSizes(NamedTuple):
    """Limits of a proxy's queues in bytes."""

    caches: int
    """Bytes of caches for each server."""
    requests: int
    """Bytes of requests for each server."""
    replies: int

    def for_servers(self, servers: int) -> int:
        """Return the total for this many servers."""
        return servers * (self.caches + self.requests) + self.replies


class Front:
    """Three bound sockets for clients, and for proxies in front.

    Args:
        endpoints: Addresses for requests, caches and notices. If the latter two are None, they follow the first.
        name: Name of the proxy.

    Raises:
        EndpointError: an address is in use or malformed.
    """

    def __init__(
        self,
        poller: Poller,
        gate: Gate,
        endpoints: tuple[str, str | None, str | None],
        *,
        name: str,
        context: Context,
        limits: Limits,
        counts: ProxyCounts,
        queues: QueueSizes,
    ) -> None:
        self._poller, self._gate = poller, gate
        self.admission = Admission(gate, limits, count=lambda error: counts.refuse(error.code))
        self.reply_queues = SendQueues(min(CONNECTION_BYTES, queues.replies), queues.replies)
        """Replies that wait until their connection has room."""
        request, push, publish = endpoints
        near = derived_addresses(request)
        self._pull = poller.add(sockets.data_receiver(context, limits.message_bytes + (1 << 16)))
        self._pub = poller.add(sockets.publisher(context))
        self._router = poller.add(sockets.request_server(context, limits.tuning.request_bytes))
        self.endpoints = messages.NodeEndpoints(
            publish=self._bind(self._pub, publish or near[1]),
            push=self._bind(self._pull, push or near[0]),
            request=self._bind(self._router, request),
        )
        """Bound addresses of the three sockets."""
        if gate.keys is None:
            bound = [self.endpoints.request, self.endpoints.push, self.endpoints.publish]
            access.warn(f"proxy {name!r}", bound, guard="keys (keys=)")

    def _bind(self, socket: Socket, endpoint: str) -> str:
        bound, way = self._gate.bind(socket, endpoint)
        if way is not None:
            self._poller.follow(socket, way)
        return bound

    # Requests

    def take_requests(self, ready: dict[object, int], take: Callable[[EnvelopedRequest], None]) -> None:
        """Pass admitted requests to `take`, at most `MESSAGES_PER_TURN` in a turn."""
        if self._router not in ready:
            return
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self._router, most=sockets.ENVELOPE)
            if frames is None:
                return
            request = self.admission.receive_request(self._router, frames)
            if request is None:
                continue
            if len(request.frames) >= sockets.ENVELOPE:  # this proxy adds one more address
                self.admission.refuse(ProtocolError("frames", "the request passed through too many proxies"))
            else:
                take(request)

    def refuse(self, request: EnvelopedRequest, error: ProtocolError) -> None:
        """Count a refused request, and send the reason to its sender."""
        refusal = self.admission.refuse_request(request, error)
        if refusal is not None:
            self.reply(refusal)

    def reply(self, frames: Sequence[Buffer]) -> None:
        """Send a reply to a client or a proxy in front, or queue it until there is room."""
        self.reply_queues.send(self._router, frames, time.monotonic())

    # Caches

    def take_caches(
        self, ready: dict[object, int], take: Callable[[MessageHeader, Peer, Sequence[Buffer]], None]
    ) -> None:
        """Pass admitted caches and episodes to `take`."""
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
        """Return the prefixes that peers have subscribed to since the last call."""
        return sockets.subscribed(self._pub, self._gate.admits) if self._pub in ready else []

    def publish(self, frames: Sequence[Any]) -> None:
        """Send a notice to its subscribers."""
        sockets.send(self._pub, frames)


_log = logging.getLogger(__name__)

HELLO_INTERVAL = 2.0
"""Seconds between two HELLO messages to each server, which check presence, identity and published models."""
AWAY_TIMEOUT = 7.0
"""Seconds without a reply after which new clients are assigned to other servers."""


class _Introduced(list[Buffer]):
    """Request of a client with receive limits below the defaults, and the HELLO with these limits."""

    def __init__(self, frames: Sequence[Buffer], introduction: Sequence[Buffer], client: bytes) -> None:
        super().__init__(frames)
        self.introduction, self.client = introduction, client


class BackendLink(Backend):
    """Sockets and queues of one address behind a proxy."""

    def __init__(self, owner: ProxyThread, endpoint: str) -> None:
        super().__init__(endpoint)
        self._owner = owner
        limits, poller, keys = owner.limits, owner.worker.poller, owner.gate.keys
        self.requests, self.caches = SendQueue(owner.queues.requests), SendQueue(owner.queues.caches)
        """Queues of client messages to the address."""
        self.channel = Channel(
            poller, owner.context, endpoint, client=owner.client, limits=limits, rng=owner.rng, keys=keys
        )
        self._renewals = 0  # renewals of the channel that the other sockets have followed
        self._known: set[bytes] = set()  # clients whose limits this connection has sent; beyond, it is told again
        self._endings = 0  # number of ended connections of the dealer
        self._dealer = Sender(poller, is_reading=True)
        self._open_dealer()
        self._push = Sender(poller, is_reading=False)
        self._feed = Feed(poller, self.channel, context=owner.context, limits=limits, keys=keys)
        self._is_hearing = False
        self.topics = Topics(limits, self._feed.fetch, self._hear, owner.worker.post, self._published, owner.cache.find)

    def _open_dealer(self) -> None:
        socket = sockets.request_client(self._owner.context, self._owner.limits.reply_bytes)
        self._dealer.use(self.channel.link.add_socket(socket, watch=True))
        self._endings = 0
        self._known.clear()

    @property
    def is_away(self) -> bool:
        """True if the address has not answered for `AWAY_TIMEOUT`. Callable from any thread."""
        return self.channel.link.is_down or time.monotonic() - self.channel.heard_at > AWAY_TIMEOUT

    @property
    def denial_reason(self) -> str:
        """Reason why this proxy, or a proxy further on, is denied access; "" if it is not."""
        return str(self.channel.denied_for_good or self.refusal)

    def stats(self) -> BackStats:
        """Return the current figures. Callable from any thread."""
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
        """Return the time at which `tick` has work."""
        return min(self.channel.next_time(), self.topics.next_time(), self.hello.next_time())

    def tick(self, ready: dict[object, int]) -> None:
        """Receive messages and send what is due."""
        self.channel.tick(ready)
        if self.channel.renewals != self._renewals:
            self._renew()
        self._say_hello(time.monotonic())
        self._take_replies(ready)
        self._feed.tick(ready, self._take_notice, self._owner.counts.refuse)
        self.topics.tick()
        self._dealer.tick(self._send_requests)
        self._push.tick(self.caches.send)

    def _renew(self) -> None:
        """Replace every socket, because the channel found the address silent for too long."""
        self._renewals = self.channel.renewals
        self._dealer.drop(linger=0.0)
        self._open_dealer()
        self._close_data()

    def _close_data(self) -> None:
        self._push.drop(sockets.DRAIN_TIMEOUT)
        self._feed.close()

    def leave(self) -> None:
        """Close everything after the address was removed; its queued messages have no home."""
        self.close(Closed("this address"))
        self.channel.close_socket()
        self._dealer.drop(linger=0.0)
        self._close_data()

    def close(self, error: Closed) -> None:
        """End every open request of the proxy itself with this error."""
        self.channel.close(error)

    # Messages of clients

    def forward_request(
        self, frames: Sequence[Buffer], introduction: Sequence[Buffer] = (), client: bytes = b""
    ) -> None:
        """Send a request to the address as soon as there is room.

        Args:
            introduction: HELLO to send first if this connection has not sent the client's limits, because a restarted
                server would exceed them. Empty for default limits.
        """
        size = sum(len(frame) for frame in (*introduction, *frames))
        self.requests.put(_Introduced(frames, introduction, client) if introduction else frames, size)

    def _send_requests(self, socket: Socket) -> bool:
        return self.requests.send(socket, self._send_request)

    def _send_request(self, socket: Socket, frames: Sequence[Buffer]) -> bool:
        if isinstance(frames, _Introduced):
            if (endings := self.channel.link.ended_connections(socket)) != self._endings or len(
                self._known
            ) >= MAX_RECEIVERS:
                self._endings = endings
                self._known.clear()
            if frames.client not in self._known:
                if not sockets.send(socket, frames.introduction):
                    return False
                self._known.add(frames.client)
        return sockets.send(socket, frames)

    def forward_cache(self, frames: Sequence[Buffer], size: int) -> None:
        """Queue a cache or an episode until there is room; `size` is the payload's size in bytes."""
        self.caches.put(frames, size)
        # Caches are sent at once: a turn of the loop may bring more than the queue holds, while the server has room.
        self.caches.send(self._push.socket)

    def _take_replies(self, ready: dict[object, int]) -> None:
        dealer = self._dealer.socket
        if dealer is None or not ready.get(dealer, 0) & sockets.READABLE:
            return
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(dealer, most=sockets.ENVELOPE)
            if frames is None:
                return
            self._owner.forward_reply(self, frames)

    # HELLO

    def _say_hello(self, now: float) -> None:
        if self.hello.is_due(now):
            self.hello.begin(now + HELLO_INTERVAL)
            self.channel.ask(messages.Hello(role="proxy", name=self._owner.name), self._welcomed)

    def _welcomed(self, answer: Answer) -> None:
        self.receive_answer(answer)
        try:
            header, welcome = welcome_of(answer, self.endpoint)
        except MemoireError as error:
            if not isinstance(error, Closed):
                _log.warning("proxy %s: %s", self._owner.name, error)
            return
        change = self.apply_welcome(header, welcome)
        self.pages = tuple(page_seen_from(self.channel.link.address, page) for page in welcome.pages)
        self.inference = tuple(seen_from(self.channel.link.address, address) for address in welcome.inference)
        if change.has_moved or self._push.socket is None:
            self._close_data()
            self._open_data(welcome.endpoints)
        if change.has_restarted:
            self.topics.accept_lower_versions()
        self._owner.process_welcome(self, change)
        for topic in welcome.models:
            self._want(topic)
        self.topics.receive_versions(welcome.models)

    def _open_data(self, endpoints: messages.NodeEndpoints) -> None:
        """Connect the sockets for caches and notices to the addresses in a WELCOME."""
        push, address = sockets.data_sender(self._owner.context), self.channel.link.address
        link.dial(self._owner.worker.poller, push, seen_from(address, endpoints.push), keys=self._owner.gate.keys)
        self._push.use(push)
        if endpoints.publish:
            self._feed.subscribe_to(seen_from(address, endpoints.publish))
            self._is_hearing = False
            self._hear("", True)

    # Notices and models

    def _hear(self, _: str, wanted: bool) -> bool:
        """Subscribe to all topics, or unsubscribe; return True while subscribed."""
        if wanted != self._is_hearing and self._feed.subscribe(b"", wanted):
            self._is_hearing = wanted
        return self._is_hearing

    def _want(self, topic: str) -> None:
        try:
            self.topics.follow_topic(topic)
        except ValueError as error:
            _log.warning("proxy %s: %s", self._owner.name, error)

    def _take_notice(self, message: Message, frames: Sequence[Buffer]) -> None:
        if isinstance(message.body, messages.News):
            self.schedule_hello()
            self._owner.front.publish(frames)
            return
        assert isinstance(message.body, messages.Notice)
        if self.is_notice_current(message.header):
            self._want(message.body.topic)
            self.topics.receive_notice(message.body, message.payload, message.header.home)

    def _published(self, model: Model, is_renewed: bool, noticed: tuple[int, int]) -> None:
        self._owner.cache_and_announce(self, model, is_renewed, noticed)


class ProxyThread:
    """Thread of a proxy, with its sockets and decisions. The parts may be read by other threads.

    Args:
        endpoints: See `Front`.
        servers: Addresses to forward to.
        client: Id of the proxy, 16 bytes.
        owner: Object kept alive as long as the thread, because clients may use a proxy that the program has dropped.

    Raises:
        EndpointError: an address is in use or malformed.
        KeyFileError: the keys cannot be used.
    """

    def __init__(
        self,
        endpoints: tuple[str, str | None, str | None],
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
                self.worker.poller,
                gate,
                endpoints,
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

    # Calls from any thread

    def forward_to(self, servers: Sequence[str]) -> None:
        """Replace the list of addresses to forward to."""
        self.worker.post(functools.partial(self._relist, servers))

    # ----------------------------------------------------------------- from here on: only inside the thread

    def _next_time(self) -> float:
        return min(
            self.requests.next_time(),
            self.cache.next_time(),
            self.front.reply_queues.next_time(),
            self._notices.next_time(),
            *self.router.retiring.values(),
            *[back.next_time() for back in self.router.all_addresses],
        )

    def _turn(self, ready: dict[object, int]) -> None:
        self.front.take_requests(ready, self._take_request)
        self.front.take_caches(ready, self._take_cache)
        now = time.monotonic()
        if subscriptions := self.front.subscribed(ready):
            self._notices.subscribed(subscriptions, self.cache.store, now)
        for model in self._notices.due_models(self.cache.store, now):
            self.front.publish(self.cache.notice_frames(model, again=True))
        for back in self.router.all_addresses:
            back.tick(ready)
        if self.router.retiring:
            self._retire(now)
        self._release(self.cache.overdue(now))
        for request in self.requests.assignable(time.monotonic()):
            self._take_request(request)
        self.front.reply_queues.tick(time.monotonic())

    def _at_end(self) -> None:
        for back in self.router.all_addresses:
            back.close(Closed("this proxy"))

    # Servers

    def _relist(self, wanted: Sequence[str]) -> None:
        if not self.router.relist(wanted, self._open, time.monotonic()):
            return
        _log.info("proxy %s: forwards to %s", self.name, ", ".join(wanted))
        self._retire(self.router.listed_at)
        self._send_news()  # clients of removed servers ask at once, and are told to leave

    def _retire(self, now: float) -> None:
        """Close removed addresses, once their clients had time to leave."""
        closing = self.router.retire(now)
        for back in closing:
            back.leave()
            self.counts.homeless += len(back.requests) + len(back.caches)
        if closing:
            self._send_news()

    def process_welcome(self, back: BackendLink, change: BackendChange) -> None:
        """Process a WELCOME from an address."""
        if change.has_restarted:
            self._send_news()  # clients report at once the state that the server may have lost
        if change.is_new_run:
            self.cache.begin_run(back)
        self.router.update_homes(back)

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
            passport, introduction = self.gate.passport_frame(step.request.peer), step.introduction
            before = [*passport, *introduction] if introduction else ()
            step.back.forward_request([*passport, *step.request.frames], before, step.client)

    def _take_cache(self, header: MessageHeader, peer: Peer, frames: Sequence[Buffer]) -> None:
        back = self.router.homes.get(header.home)
        if back is None:
            self.counts.homeless += 1
            return
        self.counts.caches += 1
        self.counts.cache_bytes += header.payload_bytes
        back.forward_cache([*self.gate.passport_frame(peer), *frames], header.payload_bytes)

    def forward_reply(self, back: BackendLink, frames: list[zmq.Frame]) -> None:
        """Forward a server's reply to its client."""
        reply = self._replies.take(back, frames)
        if reply is not None:
            self.front.reply(reply)

    # Models

    def cache_and_announce(self, back: BackendLink, model: Model, is_renewed: bool, noticed: tuple[int, int]) -> None:
        """Cache a complete model and notify clients, unless the cached model is as new."""
        if self.cache.put(back, model, is_renewed=is_renewed, noticed=noticed):
            self.front.publish(self.cache.notice_frames(model))
        self._release(self.cache.release_for_model(model))
