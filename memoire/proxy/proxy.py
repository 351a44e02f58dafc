"""The proxy: one stable address between many clients and several servers. A relay is the same, on a Unix socket.

    clients ──requests──▶ ROUTER ┐                   ┌ DEALER ──▶ server a
            ──caches────▶ PULL   ├─ by header.home ──┤ PUSH                      one queue for each back, in bytes:
            ◀──notices─── PUB    ┘                   ├ DEALER ──▶ server b       the oldest are lost (and counted)
                                                     └ PUSH

Every message names its home, so the proxy keeps nothing about clients. It never waits for a server: while one is
away, its queue fills and overflows, clients send their requests again, and everybody else goes on. Models are kept
here and handed out from here. Behind a proxy may be another one: its WELCOME names all servers that it reaches.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import zmq

from memoire.arguments import seconds
from memoire.errors import Closed, EndpointError, MemoireError, ProtocolError, Refused
from memoire.limits import Limits, MiB
from memoire.models.model import Model, ModelStore, chunk_of
from memoire.models.notices import Notices, notice_of
from memoire.models.topics import Topics
from memoire.net import addresses, descriptors, link, sockets
from memoire.net.channel import Channel
from memoire.net.curve_server import Gate, Security
from memoire.net.feed import Feed
from memoire.net.lanes import Lane, Lanes
from memoire.net.thread import ENDING, Node, Worker, close_at_exit
from memoire.security import exposure
from memoire.security.exposure import Security
from memoire.security.keyfolder import Given, Keys
from memoire.security.permissions import OPEN, Peer
from memoire.security.throttle import ConnectionClients
from memoire.suggestions import checked_names
from memoire.wire import messages
from memoire.wire.frames import Answer, Header, encode, parse, parse_header, parse_notice, peek, reply
from memoire.wire.identity import NEWS_FRAME, name_hash

from .router import Router

_log = logging.getLogger(__name__)

LOOK = 2.0
"""Seconds between two HELLO messages to each server: is it there, is it the same one, what does it publish."""
AWAY_AFTER = 7.0
"""Seconds without a reply after which new clients are given to other servers."""
PENDING = 1024
"""HELLO messages kept until the first server is known."""
MESSAGES_PER_TURN = 200
HOLD = 5.0
"""Seconds for which a request for a chunk waits for a model that is on its way here, before its server is asked."""
MOST_HELD = 4096


@dataclass(frozen=True, slots=True)
class BackStats:
    """One address behind a proxy."""

    endpoint: str
    servers: tuple[str, ...]
    """Names of the servers reached there; empty until it has answered."""
    leaving: tuple[str, ...]
    """Those of them that are being drained."""
    is_away: bool
    queued_bytes: int
    lost_requests: int
    lost_caches: int
    lost_bytes: int


@dataclass(frozen=True, slots=True)
class ProxyStats:
    """A proxy at one moment; for whoever watches."""

    name: str
    endpoint: str
    uptime: float
    backs: tuple[BackStats, ...]
    requests: int
    """Forwarded to servers, or answered here."""
    replies: int
    caches: int
    cache_bytes: int
    homeless: int
    """Messages for a server that is not known here."""
    dropped_replies: int
    """Replies that were dropped: their connection had no room for them for too long. Clients ask again."""
    refused: dict[str, int]
    """Messages that were refused, by code."""
    models: dict[str, int]
    model_bytes: int
    descriptors: int
    """File descriptors that the process has open."""
    most_descriptors: int
    """How many it may have."""
    security: Security
    """Who may come, and who was sent away."""
    faults: int


class _Source(NamedTuple):
    """Where the newest model of a topic came from."""

    back: _Back
    home: int
    epoch: int
    run: int


class _Request(NamedTuple):
    """A request as it came in, and whose it is."""

    peer: Peer
    frames: list[zmq.Frame]
    is_first: bool
    """Whether no proxy has let it in before."""

    @property
    def empty(self) -> int | None:
        """Where the empty frame is, after the addresses of who is to get the answer."""
        return next((place for place, frame in enumerate(self.frames) if not len(frame)), None)

    @property
    def envelope(self) -> list[zmq.Frame]:
        """Those addresses, and the empty frame."""
        return self.frames[: (self.empty or 0) + 1]

    @property
    def request(self) -> list[zmq.Frame]:
        """The message."""
        return self.frames[(self.empty or 0) + 1 :]


class _Held(NamedTuple):
    """A request for a chunk of a model that is on its way here."""

    until: float
    topic: str
    version: int
    asking: _Request


class _Back:
    """One address behind the proxy. Everything here belongs to the proxy's thread."""

    def __init__(self, proxy: Proxy, endpoint: str) -> None:
        self._proxy, self.endpoint = proxy, endpoint
        limits, context = proxy._limits, proxy._context
        self.doors = proxy._worker.doors
        self.names: tuple[str, ...] = ()
        self.leaving: tuple[str, ...] = ()  # those that take no new clients; a proxy's list may be without them already
        self.unmet: tuple[str, ...] = ()  # addresses behind it, where that is a proxy, at which nobody has answered yet
        self.welcome: messages.Welcome | None = None
        self.epochs: dict[str, int] = {}
        self.channel = Channel(
            self.doors, context, endpoint, client=proxy._id, limits=limits, rng=proxy._rng, keys=proxy.keys
        )
        self.dealer = self._open_dealer()
        self.push: Socket | None = None
        self.feed = Feed(self.doors, self.channel, context=context, limits=limits, keys=proxy.keys)
        self._renewals = 0  # of the channel, that the other sockets have followed
        self._denied_there = ""  # why the proxy that is there is not let in itself
        self.requests, self.caches = Lane(limits.request_bytes * 64), Lane(proxy._queue_bytes)
        self.run = 0  # hash of the run that is counted there
        self._is_hearing = False
        self.topics = Topics(
            limits,
            self.feed.fetch,
            self._hear,
            proxy._worker.post,
            functools.partial(proxy._published, self),
            proxy._find,
        )
        self.look_at = 0.0
        self._looking = False
        self._writing: dict[Socket, bool] = {}

    def _open_dealer(self) -> Socket:
        made = sockets.request_client(self._proxy._context, self._proxy._limits.reply_bytes)
        return self.doors.add(self.channel.join(made))

    @property
    def is_away(self) -> bool:
        return self.channel.is_down or time.monotonic() - self.channel.heard_at > AWAY_AFTER

    @property
    def denied(self) -> str:
        """Why this proxy is not let in there, or the one that is there further on; "" while nobody says so."""
        return str(self.channel.denied_for_good or self._denied_there)

    def turn(self, ready: dict[object, int]) -> None:
        self.channel.turn(ready)
        if self.channel.renewals != self._renewals:
            self._renew()
        if not self._looking and time.monotonic() >= self.look_at:
            self._looking = True
            self.look_at = time.monotonic() + LOOK
            self.channel.ask(messages.Hello(role="proxy", host=self._proxy.name[:256]), self._welcomed)
        if ready.get(self.dealer, 0) & zmq.POLLIN:
            for _ in range(MESSAGES_PER_TURN):
                frames = sockets.receive(self.dealer, most=sockets.ENVELOPE)
                if frames is None:
                    break
                self._proxy._reply(self, frames)
        self.feed.turn(ready, self._take_notice, self._refuse_notice)
        self.topics.turn()
        self._send(self.dealer, self.requests, reading=True)
        if self.push is not None:
            self._send(self.push, self.caches, reading=False)

    def _renew(self) -> None:
        """Begin anew with every socket: the channel found that this address has been silent for too long."""
        self._renewals = self.channel.renewals
        self._drop(self.dealer)
        self.dealer = self._open_dealer()
        self._close_data()

    def _close_data(self) -> None:
        if self.push is not None:
            self._drop(self.push, sockets.PARTING)
        self.push = None
        self.feed.close()

    def _drop(self, made: Socket, linger: float = 0.0) -> None:
        self.doors.drop(made, linger)
        self._writing.pop(made, None)

    def next_time(self) -> float:
        return min(self.channel.next_time(), self.topics.next_time(), float("inf") if self._looking else self.look_at)

    def _send(self, made: Socket, lane: Lane, *, reading: bool) -> None:
        blocked = not lane.send(made)
        if blocked != self._writing.get(made, False):
            self._writing[made] = blocked
            self.doors.watch(made, reading=reading, writing=blocked)

    def _welcomed(self, answer: Answer) -> None:
        self._looking = False
        self._denied_there = answer.text if isinstance(answer, Refused) and answer.code == "denied" else ""
        if isinstance(answer, MemoireError):
            if not isinstance(answer, Closed):
                _log.warning("proxy %s: %s", self._proxy.name, answer)
            return
        told = answer.body
        if not isinstance(told, messages.Welcome):
            return
        if self.push is None or self.welcome is None or told.endpoints != self.welcome.endpoints:
            self._close_data()
            self._open(told)
        # Behind another proxy a different server may answer each time: only the same one can have begun anew.
        if self.epochs.get(told.home_name, told.epoch) != told.epoch:
            self.topics.restarted()
            self._proxy._send_news()  # its clients tell it at once what it may have forgotten
        self.epochs[told.home_name] = told.epoch
        if self.run not in (0, answer.header.run):
            self._proxy._begin_run(self)
        self.run = answer.header.run
        self.welcome = told
        self.names = tuple(told.servers or [told.home_name])
        self.leaving = tuple(told.leaving)
        self.unmet = tuple(told.unmet)
        self._proxy._routes.learn(self)
        for topic in told.models:
            self._want(topic)
        self.topics.announced(told.models)

    def _open(self, told: messages.Welcome) -> None:
        """Connect the sockets whose addresses the other side has just said."""
        push = sockets.data_sender(self._proxy._context)
        link.dial(self.doors, push, sockets.seen_from(self.channel.address, told.endpoints.push), keys=self._proxy.keys)
        self.push = self.doors.add(push, reading=False)
        if told.endpoints.publish:
            self.feed.open(sockets.seen_from(self.channel.address, told.endpoints.publish))
            self._is_hearing = False
            self._hear("", True)

    def _hear(self, _: str, wanted: bool) -> bool:
        """Subscribe to all topics at once, or end that."""
        if wanted != self._is_hearing and self.feed.subscribe(b"", wanted):
            self._is_hearing = wanted
        return self._is_hearing

    def _want(self, topic: str) -> None:
        try:
            self.topics.want(topic)
        except ValueError as error:
            _log.warning("proxy %s: %s", self._proxy.name, error)

    def _take_notice(self, message: messages.Message, frames: Sequence[Any]) -> None:
        if isinstance(message.body, messages.News):
            self.look_at = 0.0  # it may be about more than clients: another run, or a server that leaves
            self._proxy._pass_news(frames)
            return
        assert isinstance(message.body, messages.Notice)
        if message.header.run not in (0, self.run):
            self.look_at = 0.0  # another run than its server counted when it was asked last
            return
        self._want(message.body.topic)
        self.topics.noticed(message.body, message.payload, message.header.home)

    def _refuse_notice(self, code: str) -> None:
        self._proxy._refused[code] += 1

    def leave(self) -> None:
        """Close everything: the proxy goes on without this address, and what waits in its queues has no home."""
        self.channel.close(Closed("this address"))
        self.channel.leave()
        self._drop(self.dealer)
        self._close_data()


class Proxy(Node):
    """Forwards between clients and servers; see the module.

    Args:
        front: Address for requests; caches and notices are beside it, as a server's are. "ipc:///run/relay" makes a
        relay. servers: Addresses of servers or of other proxies; resolved and connected to in the background, up or
        not. push_front, pub_front: Addresses for caches and notices, where they are not beside `front`.
        queue_bytes: Bytes of caches that wait for each server.
        name: For whoever watches.
        keys: This process' keys folder (or a cluster's), for both sides: see docs/operations.md. None takes
            $MEMOIRE_KEYS, and without it lets everybody in.
        tune_process: Let this process be tuned for nodes, the first time that one asks for it: see docs/operations.md.

    Raises:
        EndpointError: an address is taken, or none.
        KeyFileError: the keys cannot be used.
    """

    CALLED = "this proxy"
    _PARAMETERS = "Parameters are the server's: write configure(NAME=...) of a server or reader."
    CLOSED_AT_EXIT = 1

    @checked_names()
    def __init__(
        self,
        front: str,
        servers: Sequence[str],
        *,
        push_front: str | None = None,
        pub_front: str | None = None,
        queue_bytes: int = 256 * MiB,
        name: str | None = None,
        context: Context | None = None,
        limits: Limits | None = None,
        keys: Given = None,
        tune_process: bool = True,
    ) -> None:
        servers = _checked(servers)
        self._limits = limits or Limits()
        if tune_process:
            process.tune()
        self._context = context or shared_context()
        self._gate = Gate(self._context, Keys.of(keys, "proxy"))
        self._queue_bytes = queue_bytes
        self._pid = os.getpid()
        self._id = secrets.token_bytes(16)
        self._rng = random.Random(secrets.randbits(64))
        self._started = time.monotonic()
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self.name = name or f"proxy-{self._id.hex()[:8]}"
        # From here on everything belongs to the thread; stats() reads it as it is.
        self._refused: Counter[str] = Counter()
        self._requests = self._replies = self._caches = self._cache_bytes = self._homeless = 0
        self._lanes = Lanes()
        self._routes: Router[_Back] = Router(self._started)
        self._pending: deque[_Request] = deque(maxlen=PENDING)
        self._connections = ConnectionClients(self._limits.connection_clients, self._limits.connection_clients_rate)
        self._models = ModelStore(self._limits.model_bytes)
        self._sources: dict[str, _Source] = {}  # of the newest model of each topic
        self._notices = Notices(time.monotonic())
        # Requests for chunks of models that are on their way here, by client and number, and when to ask the server.
        self._held: dict[tuple[bytes, int], _Held] = {}
        beside = addresses.beside(front)
        self._worker = Worker("memoire-proxy", self._turn, self._next_time, self._at_end)
        try:
            doors = self._worker.doors
            self._pull = doors.add(sockets.data_receiver(self._context, self._limits.message_bytes + (1 << 16)))
            self._pub = doors.add(sockets.publisher(self._context))
            self._router = doors.add(sockets.request_server(self._context, self._limits.request_bytes))
            self._endpoints = messages.Endpoints(
                publish=self._bind(self._pub, pub_front or beside[1]),
                push=self._bind(self._pull, push_front or beside[0]),
                request=self._bind(self._router, front),
            )
            if self.keys is None:
                bound = self._endpoints
                listening = [bound.request, bound.push, bound.publish]
                exposure.warn(f"proxy {self.name!r}", listening, guard="keys (keys=)")
            self._routes.backs += [_Back(self, endpoint) for endpoint in servers]
        except BaseException:
            self._worker.stop(0.0)
            self._gate.close()
            raise
        if trouble := descriptors.too_few(self._limits.expected_clients):
            _log.warning("proxy %s: %s", self.name, trouble)
        self._worker.start()
        close_at_exit(self)

    def _bind(self, made: Socket, endpoint: str) -> str:
        bound, way = self._gate.bind(made, endpoint)
        if way is not None:
            self._worker.doors.follow(made, way)
        return bound

    @property
    def keys(self) -> Keys | None:
        """Of this process; None where everybody is let in."""
        return self._gate.keys

    @property
    def endpoint(self) -> str:
        """Address for requests, as bound: what clients connect to."""
        return self._endpoints.request

    @property
    def push_endpoint(self) -> str:
        """Address for caches, as bound."""
        return self._endpoints.push

    @property
    def pub_endpoint(self) -> str:
        """Address for notices, as bound."""
        return self._endpoints.publish

    def set_servers(self, servers: Sequence[str]) -> None:
        """From now on forward to these addresses. Those that are new are connected to; the clients of those that are
        not in the list any more are told to ask for another home, where they tell everything anew. From any thread.

        A server that is taken off keeps what it has counted: read the totals with it, or drain it before (`memoire
        drain`). One that does not answer when it is taken off may have log lines of which its clients never heard:
        these are then logged elsewhere again.

        Raises:
            EndpointError: an address is none, or there is none in the list; nothing was changed.
        """
        if self._closing.is_set():
            raise Closed("this proxy")
        wanted = _checked(servers)
        self._worker.post(lambda: self._take_servers(wanted))

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that answered so far."""
        return self._routes.servers

    def stats(self) -> ProxyStats:
        """All figures at this moment."""
        return ProxyStats(
            name=self.name,
            endpoint=self.endpoint,
            uptime=time.monotonic() - self._started,
            backs=tuple(_back_stats(back) for back in self._routes.backs),
            requests=self._requests,
            replies=self._replies,
            caches=self._caches,
            cache_bytes=self._cache_bytes,
            homeless=self._homeless,
            dropped_replies=self._lanes.dropped,
            refused=dict(self._refused),
            models=self._models.versions(),
            model_bytes=self._models.bytes,
            descriptors=descriptors.used(),
            most_descriptors=descriptors.limit(),
            security=self._gate.security(),
            faults=self._worker.errors,
        )

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each: its thread died or is stuck. Empty while all is well."""
        return self._worker.trouble()

    def readiness(self) -> list[str]:
        """Why this proxy should get no new clients just now, a sentence each; empty when it should.

        One server of several that is away is no reason: the others' clients would be turned away with its own.
        """
        if self._closing.is_set():
            return ["closing: this proxy is about to end"]
        backs = list(self._routes.backs)
        whys = [f"denied: {why}" for why in dict.fromkeys(back.denied for back in backs) if why]
        if not any(back.names for back in backs):
            return [f"starting: none of {', '.join(back.endpoint for back in backs)} has answered yet", *whys]
        if all(back.is_away for back in backs):
            return [f"away: none of {', '.join(back.endpoint for back in backs)} answers", *whys]
        trouble = descriptors.shared_guard().trouble()
        return [*self._gate.trouble(), *([trouble] if trouble else [])]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until somebody closes the proxy; False when `timeout` seconds passed first."""
        return self._closing.wait(seconds(timeout))

    def close(self, timeout: float | None = None) -> None:
        """End the thread and close every socket within `timeout` seconds. May be called again, and from any thread."""
        patience = seconds(timeout, self._limits.close_timeout)
        self._closing.set()
        with self._closer(time.monotonic() + patience) as is_mine:
            if not is_mine:
                return
            if not self._worker.stop(max(ENDING, patience), linger=min(patience, 1.0)):
                _log.warning("proxy %s: its thread did not end in time", self.name)
            self._gate.close()
            sockets.wait_unbound((self.endpoint, self.push_endpoint, self.pub_endpoint), patience)

    def __repr__(self) -> str:
        return f"<memoire.Proxy {self.name!r} at {self.endpoint}>"

    # --------------------------------------------------------------------------------- inside of the thread alone

    def _take_servers(self, wanted: list[str]) -> None:
        if not self._routes.relist(wanted, functools.partial(_Back, self), time.monotonic()):
            return
        _log.info("proxy %s: forwards to %s", self.name, ", ".join(wanted))
        self._leave(self._routes.listed_at)
        self._send_news()  # clients of servers that were taken off ask at once, and are told to go elsewhere

    def _leave(self, now: float) -> None:
        """Close addresses that were taken off the list, once their clients had time to hear of it."""
        gone = self._routes.retire(now)
        for back in gone:
            back.leave()
            self._homeless += len(back.requests) + len(back.caches)
        if gone:
            self._send_news()

    def _send_news(self) -> None:
        self._pass_news([NEWS_FRAME, *encode(messages.News())])

    def _pass_news(self, frames: Sequence[Any]) -> None:
        sockets.send(self._pub, frames)

    def _next_time(self) -> float:
        pending = self._routes.ready_at() if self._pending else float("inf")
        held = min((each.until for each in self._held.values()), default=float("inf"))
        return min(
            pending,
            held,
            self._lanes.next_time(),
            self._notices.next_time(),
            *self._routes.retiring.values(),
            *(back.next_time() for back in self._routes.all),
        )

    def _turn(self, ready: dict[object, int]) -> None:
        if self._router in ready:
            self._take_requests()
        if self._pull in ready:
            self._take_caches()
        now = time.monotonic()
        if self._pub in ready:
            self._notices.subscribed(sockets.subscribed(self._pub, self._gate.admits), self._models, now)
        for model in self._notices.due(self._models, now):
            self._notice(model, again=True)
        for back in self._routes.all:
            back.turn(ready)
        if self._routes.retiring:
            self._leave(now)
        if self._held:
            self._release([key for key, held in self._held.items() if now >= held.until])
        while self._pending and self._routes.is_ready(time.monotonic()):
            self._request(self._pending.popleft())
        self._lanes.turn(time.monotonic())

    def _send_reply(self, frames: Sequence[Any]) -> None:
        """Send a reply to a client, or to the proxy in front."""
        self._lanes.send(self._router, frames, time.monotonic())

    def _take_requests(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self._router, most=sockets.ENVELOPE)
            if frames is None:
                return
            received = len(frames)
            try:
                peer, frames = self._gate.admit(self._router, frames, 1)
            except ProtocolError as error:
                self._count(error)
                continue
            is_passed_on = len(frames) < received or (peer is OPEN and len(frames) > 1 and len(frames[1]) > 0)
            self._request(_Request(peer, frames, not is_passed_on))

    def _count(self, error: ProtocolError) -> None:
        self._refused[error.code] += 1
        self._gate.refuse(error.code, error.detail)

    def _request(self, asked: _Request) -> None:
        most = sockets.ENVELOPE - 1  # this proxy puts one more address in front
        if asked.empty is None or len(asked.frames) > most:
            self._refused["frames"] += 1
            return
        try:
            header, _ = parse_header(asked.request, self._limits)
            asked.peer.check(header.type, header.table)
            if asked.is_first:
                self._connections.check(asked.frames[0].bytes, header.client, time.monotonic())
            if header.type is messages.Type.FETCH and self._answer_fetch(asked):
                return
            self._route(header, asked)
        except ProtocolError as error:
            self._refuse(asked, error)

    def _route(self, header: Header, asked: _Request) -> None:
        back = self._routes.homes.get(header.home)
        if back is None and header.type is messages.Type.HELLO:
            if not self._routes.is_ready(time.monotonic()):
                if why := self._routes.denied:
                    raise ProtocolError("denied", why)
                self._homeless += len(self._pending) == PENDING  # the oldest goes; its client asks again
                self._pending.append(asked)
                return
            back = self._routes.assign(header.client)
        if back is None:
            self._homeless += 1
            if self._routes.is_unknown(header.home, time.monotonic()):
                raise ProtocolError("client", "your server is not behind this proxy (any more); say HELLO again")
            return  # its server may answer soon, and the request comes again
        self._requests += 1
        frames: list[Any] = [*self._gate.passport(asked.peer), *asked.frames]
        back.requests.put(frames, sum(len(frame) for frame in frames))

    def _refuse(self, asked: _Request, error: ProtocolError) -> None:
        self._count(error)
        header = peek(asked.request)
        if header is not None:
            body = messages.Refused(code=error.code, text=error.detail[:1000])
            self._send_reply([*asked.envelope, *reply(header, body)])

    def _answer_fetch(self, asking: _Request) -> bool:
        """Hand out a model that is kept here, or soon; False where the server has to be asked."""
        message = parse(asking.request, self._limits)
        asked, header = message.body, message.header
        assert isinstance(asked, messages.Fetch)
        source = self._sources.get(asked.topic)
        if source is not None and header.run not in (0, source.run):
            return False
        model = self._models.serve(asked.topic, asked.version)
        if model is None:
            return self._hold(asking, header, asked)
        told = (0, 0) if source is None else (source.home, source.epoch)
        chunk, payload = chunk_of(model, asked, self._limits, home=told[0], epoch=told[1])
        self._requests += 1
        self._send_reply([*asking.envelope, *reply(header, chunk, payload=payload)])
        return True

    def _hold(self, asking: _Request, header: Header, asked: messages.Fetch) -> bool:
        """Keep the request while the model is on its way here: it crosses the way behind this proxy once, not once for
        each client. A client may have heard of it before this proxy has.
        """
        home = self._routes.homes.get(header.home)
        if home is not None and asked.version > self._models.version(asked.topic):
            home.topics.announced({asked.topic: asked.version})
        key = (header.client, header.sequence)
        if key in self._held:
            return True  # sent again: it is answered once
        if len(self._held) >= MOST_HELD or not self._is_coming(asked.topic, asked.version):
            return False
        self._held[key] = _Held(time.monotonic() + HOLD, asked.topic, asked.version, asking)
        return True

    def _is_coming(self, topic: str, version: int) -> bool:
        return any(back.topics.is_coming(topic, version) for back in self._routes.backs)

    def _release(self, keys: list[tuple[bytes, int]]) -> None:
        """Answer what was held, from here or by the server."""
        for key in keys:
            asking = self._held.pop(key).asking
            message = parse(asking.request, self._limits)
            assert isinstance(message.body, messages.Fetch)
            try:
                if self._models.get(message.body.topic, message.body.version) is None:
                    self._route(message.header, asking)
                else:
                    self._answer_fetch(asking)
            except ProtocolError as error:
                self._refuse(asking, error)

    def _reply(self, back: _Back, frames: list[zmq.Frame]) -> None:
        """A server's reply to a client: handed on. WELCOME gets this proxy's own addresses, and UPDATED the word to
        leave a server that was taken off the list: the client has then nothing open there.
        """
        self._replies += 1
        empty = next((place for place, frame in enumerate(frames) if not len(frame)), None)
        if empty is None:
            self._refused["frames"] += 1
            return
        header = peek(frames[empty + 1 :])
        kind = 0 if header is None else int.from_bytes(frames[empty + 1].buffer[6:8], "little")
        if kind != messages.Type.WELCOME and not (kind == messages.Type.UPDATED and back in self._routes.retiring):
            self._send_reply(frames)
            return
        try:
            message = parse(frames[empty + 1 :], self._limits)
        except ProtocolError as error:
            self._refused[error.code] += 1
            return
        if isinstance(message.body, messages.Updated):
            said = reply(message.header, msgspec.structs.replace(message.body, leaving=True), payload=message.payload)
            self._send_reply([*frames[: empty + 1], *said])
            return
        self._routes.answered(message.header.home, back)
        assert isinstance(message.body, messages.Welcome)
        told = self._routes.welcome(message.body, self._endpoints, self._models.versions(), self._limits)
        self._send_reply([*frames[: empty + 1], *reply(message.header, told)])

    def _take_caches(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self._pull, most=3)
            if frames is None:
                return
            try:
                peer, frames = self._gate.admit(self._pull, frames, 0)
                header, _ = parse_header(frames, self._limits)
                peer.check(header.type)
                if header.type not in (messages.Type.CACHE, messages.Type.EPISODE):
                    raise ProtocolError("unexpected", f"{header.type.name} was pushed")
            except ProtocolError as error:
                self._count(error)
                continue
            back = self._routes.homes.get(header.home)
            if back is None:
                self._homeless += 1
                continue
            self._caches += 1
            self._cache_bytes += header.payload_bytes
            back.caches.put([*self._gate.passport(peer), *frames], header.payload_bytes)
            # At once: a turn may bring more than the queue holds, while the server has room for all of it.
            back.caches.send(back.push)

    def _find(self, topic: str, version: int, digest: bytes) -> Model | None:
        """A model that came from another server already."""
        model = self._models.get(topic, version)
        return model if model is not None and model.digest == digest else None

    def _published(self, back: _Back, model: Model, is_renewed: bool, noticed: tuple[int, int]) -> None:
        """A model is complete: keep it and tell the clients, unless it is older than the one kept."""
        if back.welcome is not None and len(back.names) == 1:
            noticed = name_hash(back.names[0]), max(noticed[1], back.welcome.epoch)
        source = self._sources.get(model.topic)
        if is_renewed and (source is None or source.back is back):
            self._models.forget(model.topic)  # its publisher began anew and counts from 1
        if self._models.put(model):
            self._sources[model.topic] = _Source(back, *noticed, back.run)
            self._notice(model)
        mine = [(key, held) for key, held in self._held.items() if held.topic == model.topic]
        self._release([key for key, held in mine if held.version <= model.version or not self._is_coming(*held[1:3])])

    def _notice(self, model: Model, *, again: bool = False) -> None:
        source = self._sources[model.topic]
        facts = {"home": source.home, "epoch": source.epoch, "run": source.run}
        sockets.send(self._pub, notice_of(model, self._limits, **facts, again=again))

    def _begin_run(self, back: _Back) -> None:
        """The servers there count another run: the models of the former one are no longer handed out."""
        back.topics.begin_run()
        for topic in [topic for topic, source in self._sources.items() if source.back is back]:
            self._models.forget(topic)
            del self._sources[topic]

    def _at_end(self) -> None:
        for back in self._routes.all:
            back.channel.close(Closed("this proxy"))


def _checked(servers: Sequence[str]) -> list[str]:
    """The addresses of a list, each once."""
    if isinstance(servers, str) or not servers:
        given = repr([servers] if isinstance(servers, str) else ["tcp://server-0:5560"])
        raise EndpointError(str(servers), "connect to", "a proxy needs a list of at least one server", given)
    for endpoint in servers:
        addresses.check(endpoint, "connect to")
    return list(dict.fromkeys(servers))


def _back_stats(back: _Back) -> BackStats:
    return BackStats(
        endpoint=back.endpoint,
        servers=back.names,
        leaving=back.leaving,
        is_away=back.is_away,
        queued_bytes=back.requests.bytes + back.caches.bytes,
        lost_requests=back.requests.lost,
        lost_caches=back.caches.lost,
        lost_bytes=back.caches.lost_bytes,
    )
