"""Threads and sockets of a server: start, and order of the shutdown.

Requests      one thread: replies, notices, log file      Pullers       one thread for each address
Archive       a timer's thread, and one for each order    PlainProxies  in their callers' threads

A plain proxy forwards whole messages from an address to workers behind another address, without a copy. The proxy
holds at most one message for the workers. While the workers have no room it stops reading, so that ZeroMQ's high-water
marks hold the senders back. Replies wait in `send_queues`: a client without room does not delay replies to others.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import zmq

from memoire._core import Condition
from memoire.disk.logs import LineFile
from memoire.errors import MemoireError, ProtocolError
from memoire.net import link, process, sockets
from memoire.net.addresses import derived_addresses
from memoire.net.curve_server import PUSH_PLACE, REQUEST_PLACE, Admission, Gate
from memoire.net.poller import ConnectionWatcher, Poller, SendQueues
from memoire.net.sockets import Context, Socket
from memoire.net.thread import END_TIMEOUT, Worker
from memoire.security import access
from memoire.security.keys import Keys
from memoire.tables.table import Tables
from memoire.wire import messages
from memoire.wire.byte_budget import ByteHolder

from . import build
from .build import ServerOptions
from .io_requests import Announcer, RequestThread
from .io_snapshots import Archive


class BoundAddresses:
    """Addresses that a server has bound and advertises.

    Args:
        name: Name of the server.
        gate: Decides which connections are accepted.
    """

    def __init__(self, name: str, gate: Gate) -> None:
        self._name, self._gate = name, gate
        self._bound: list[str] = []
        self._warned = 0  # number of addresses in `_bound` that were checked for a warning
        self.endpoints = messages.NodeEndpoints()
        """Bound addresses that WELCOME advertises to clients."""

    def bind(self, socket: Socket, endpoint: str) -> tuple[str, ConnectionWatcher | None]:
        """Bind a socket; return the address with its port, and the watcher of its connections."""
        bound, watcher = self._gate.bind(socket, endpoint)
        self._bound.append(bound)
        return bound, watcher

    def warn_open(self, *plain: str) -> None:
        """Log a warning if addresses bound since the last call, or the `plain` ones, accept clients without keys."""
        if self._gate.keys is None:
            new, self._warned = self._bound[self._warned :], len(self._bound)
            access.warn(f"server {self._name!r}", [*new, *plain], guard="keys (keys=)")

    def wait_unbound(self, deadline: float) -> None:
        """Wait until the operating system has freed the bound addresses."""
        sockets.wait_unbound(self._bound, deadline - time.monotonic())


MAX_FRAMES = 16
MESSAGES_PER_TURN = 100
POLL_INTERVAL = 0.1
"""Seconds between two checks of the stop event."""


Change = Callable[[list[zmq.Frame]], Sequence[Any]]
"""Function that returns the frames to forward; an empty sequence drops the message."""


class _Direction:
    """Forwarder of messages from one socket to another, which keeps one message that does not fit."""

    def __init__(self, source: Socket, sink: Socket, change: Change, queues: SendQueues | None = None) -> None:
        self.source, self.sink, self.change, self._queues = source, sink, change, queues
        self.kept: Sequence[Any] | None = None

    def move(self) -> None:
        """Forward received messages; keep a message that does not fit and stop reading."""
        if self.kept is not None:
            if not self._send(self.kept):
                return
            self.kept = None
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self.source, most=MAX_FRAMES)
            if frames is None:
                return
            # More than `MAX_FRAMES`: dropped, since `receive` has truncated the message.
            sent = self.change(frames) if len(frames) <= MAX_FRAMES else []
            if sent and not self._send(sent):
                self.kept = sent
                return

    def _send(self, frames: Sequence[Any]) -> bool:
        if self._queues is None:
            return sockets.send(self.sink, frames)
        self._queues.send(self.sink, frames, time.monotonic())
        return True


def forward(
    front: Socket,
    back: Socket,
    pass_on: Change,
    *,
    replies: SendQueues | None,
    until: threading.Event,
    ways: Mapping[Socket, ConnectionWatcher | None],
) -> None:
    """Forward messages until the event is set, then close both sockets, which belong to the caller's thread.

    Args:
        pass_on: Returns the frames to forward from front to back.
        replies: Send queues of messages from back to front; None if there are no replies.
        ways: Watchers of the sockets' connections.
    """
    poller = Poller()
    directions = [_Direction(front, back, pass_on)]
    if replies is not None:
        directions.append(_Direction(back, front, list, replies))
    try:
        for socket in (front, back):
            poller.add(socket, way=ways.get(socket))
        while not until.is_set():
            for socket in (front, back):
                reading = any(each.source is socket and each.kept is None for each in directions)
                writing = any(each.sink is socket and each.kept is not None for each in directions)
                poller.watch(socket, reading=reading, writing=writing)
            now = time.monotonic()
            poller.wait(min(now + POLL_INTERVAL, float("inf") if replies is None else replies.next_time()))
            for direction in directions:
                direction.move()
            if replies is not None:
                replies.tick(time.monotonic())
    finally:
        poller.close()


CACHES_PER_TURN = 100
HEADER_BYTES = 1 << 16
"""Maximum bytes of a message in addition to its payload (`limits.message_bytes`)."""


def limit_pushes(tables: Tables, message_bytes: int) -> None:
    """Set the largest push that the addresses accept, in each table."""
    for table in tables:
        table.push_bytes = sockets.largest_push(tables.usual_bytes, message_bytes)


class WorkerProxies:
    """Plain proxies that run in their callers' threads. Methods may be called from any thread.

    Args:
        room: Holder of bytes of replies that wait for room in their connection.
        is_closing: Event that ends all proxies.
    """

    def __init__(
        self,
        gate: Gate,
        admission: Admission,
        addresses: BoundAddresses,
        room: ByteHolder,
        options: ServerOptions,
        is_closing: threading.Event,
    ) -> None:
        self._gate, self._admission, self._addresses, self._room = gate, admission, addresses, room
        self._context, self._limits, self._is_closing = options.process.context, options.limits, is_closing
        self._changed = Condition()  # guards `_running`
        self._running = 0
        self.send_queues: list[SendQueues] = []
        """Send queues of all proxies, also of ended ones; each belongs to the thread that runs the proxy."""

    @property
    def running(self) -> int:
        """Number of proxies that run now."""
        return self._running

    def run_requests(self, front: str, back: str) -> None:
        """Forward requests and replies; blocks until the server closes."""
        frontend = sockets.request_server(self._context, self._limits.tuning.request_bytes)
        queues = SendQueues(room=self._room)
        self.send_queues.append(queues)
        backend = sockets.plain_dealer(self._context, self._limits.reply_bytes)
        self._run(frontend, front, backend, back, place=REQUEST_PLACE, replies=queues)

    def run_pushes(self, front: str, back: str) -> None:
        """Forward caches or episodes; blocks until the server closes."""
        frontend = sockets.data_receiver(self._context, self._limits.message_bytes + HEADER_BYTES)
        self._run(frontend, front, sockets.data_sender(self._context), back, place=PUSH_PLACE)

    def _run(
        self, frontend: Socket, front: str, backend: Socket, back: str, *, place: int, replies: SendQueues | None = None
    ) -> None:
        watchers = {}
        try:
            bound, watchers[frontend] = self._gate.bind(frontend, front)
            self._addresses.warn_open(bound, back)
            _, watchers[backend] = self._gate.bind(backend, back, only="server")
        except MemoireError:
            frontend.close(0)
            backend.close(0)
            raise
        self._count(1)
        try:
            pass_on = functools.partial(self._admission.forwarded_frames, frontend, place)
            forward(frontend, backend, pass_on, replies=replies, until=self._is_closing, ways=watchers)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed.held():
            self._running += change
            self._changed.notify_all()

    def wait_ended(self, deadline: float) -> None:
        """Wait until the callers have closed their sockets."""
        with self._changed.held():
            self._changed.wait_for(lambda: not self._running, max(0.0, deadline - time.monotonic()))


_log = logging.getLogger(__name__)

LINGER_TIMEOUT = 2.0
"""Maximum seconds in which closed sockets still send replies."""
MIN_LINGER = 0.2
LAST_REPLY_DELAY = 0.3
"""Seconds between the last reply and the end of a server that saves or is finished: when the connection ends, a
client's socket discards replies that its thread has not read.
"""
MIN_SAVING = 0.1
"""Minimum seconds for the state folder's last save, even after the deadline."""
MEMORY_SHARE = 0.75
"""Fraction of the remaining time for saving the tables' content; the state folder gets the last part."""


class ServerThreads:
    """Threads of a server, with their sockets. `bind_addresses` binds the addresses; `start` begins the threads.
    Methods may be called from any thread.

    Args:
        is_closing: Event that is set when the server begins to close.
        owner: Object that the threads keep alive.

    Raises:
        KeyFileError, ParameterError, StateError: an option is invalid or cannot be used.
    """

    def __init__(self, options: ServerOptions, is_closing: threading.Event, owner: object) -> None:
        self._options, self._limits, self._is_closing = options, options.limits, is_closing
        self._context: Context = options.process.context
        self.gate = gate = Gate(self._context, Keys.from_setting(options.keys, "server"))
        tables = build.make_tables(options)
        name = options.name or default_name(options.endpoint.request)
        self.store = store = build.make_store(options, name)
        self.name = name if store is None else store.name
        self.addresses, self.lines, self._announcer = BoundAddresses(self.name, gate), LineFile(), Announcer()
        self.dispatcher = dispatcher = build.make_dispatcher(
            options,
            tables,
            store,
            name=self.name,
            epoch=time.time_ns(),  # no two starts may have one number
            endpoints=lambda: self.addresses.endpoints,
            on_lines=self.lines.write,
            on_model=self._announcer.add_model,
            on_news=self._announcer.add_news,
        )
        self._admission = admission = Admission(
            gate, options.limits, count=dispatcher.refuse, own=dispatcher.bind_client_id
        )
        self.requests = RequestThread(dispatcher, admission, store, self._announcer, self.lines, owner)
        self._announcer.wake = self.requests.worker.wake
        self.pullers: list[Worker] = []
        """Workers that receive pushes, one for each address."""
        limit_pushes(tables, options.limits.message_bytes)
        self.proxies = WorkerProxies(gate, admission, self.addresses, dispatcher.replies, options, is_closing)
        self.archive = Archive(dispatcher, store, options, is_closing)
        self._saves_memory = options.state is not None and options.state.saves_memory
        dispatcher.answer_with(messages.TakeSnapshot, self.archive.order_snapshot)

    # Start

    def bind_addresses(self) -> None:
        """Bind the addresses. If one fails, the addresses bound before stay open until `close`."""
        at = self._options.endpoint
        endpoint, push, pub = at.request, at.push, at.publish
        if endpoint is not None:
            neighbors = derived_addresses(endpoint)
            push, pub = push or neighbors[0], pub or neighbors[1]
        # The request address comes first: an error should name it.
        requested = "" if endpoint is None else self.add_request_worker(endpoint, True)
        pushed = "" if push is None else self.add_pull_worker(push, True)
        published = "" if pub is None else self._open_pub(pub)
        self.addresses.endpoints = messages.NodeEndpoints(request=requested, push=pushed, publish=published)
        self.addresses.warn_open()
        if endpoint is not None and (trouble := process.limit_advice(self._limits.tuning.expected_clients)):
            _log.warning("server %s: %s", self.name, trouble)

    def _open_pub(self, endpoint: str) -> str:
        publisher = sockets.publisher(self._context)
        bound, watcher = self.addresses.bind(publisher, endpoint)
        self._announcer.set_socket(self.requests.worker.poller.add(publisher, way=watcher), self.gate.admits)
        return bound

    def add_request_worker(self, endpoint: str, bind: bool) -> str:
        """Answer requests at a further address; see `Server.add_request_worker`."""
        router = sockets.request_server(self._context, self._limits.tuning.request_bytes)
        watcher: ConnectionWatcher | None
        if bind:
            bound, watcher = self.addresses.bind(router, endpoint)
        else:
            poller = self.requests.worker.poller
            bound, watcher = endpoint, link.dial(poller, router, endpoint, follow=False, keys=self.gate.keys)
        self.requests.add(router, watcher)
        return bound

    def add_pull_worker(self, endpoint: str, bind: bool) -> str:
        """Receive pushes at a further address, on a thread of its own; see `Server.add_pull_worker`."""
        usual_bytes, most = self.dispatcher.tables.usual_bytes, self._limits.message_bytes
        largest = sockets.largest_push(usual_bytes, most) + HEADER_BYTES
        receiver = sockets.data_receiver(self._context, largest, sockets.data_mark(usual_bytes, most))
        bound, watcher = self.addresses.bind(receiver, endpoint) if bind else (endpoint, None)
        worker = Worker(f"memoire-pull-{len(self.pullers)}", functools.partial(self._pull, receiver))
        worker.poller.add(receiver, way=watcher)
        try:
            if not bind:
                link.dial(worker.poller, receiver, endpoint, keys=self.gate.keys)
        except BaseException:
            worker.stop(0.0)
            raise
        self.pullers.append(worker)
        worker.start()
        return bound

    def _pull(self, receiver: Socket, ready: dict[object, int]) -> None:
        # The receive call waits while messages come: a poll before each message would double the work. One turn of the
        # loop ends after `CACHES_PER_TURN`, so that the thread shows a sign of life.
        for _ in range(CACHES_PER_TURN):
            frames = None if self._is_closing.is_set() else sockets.receive(receiver, most=3, wait=True)
            if frames is None:
                return
            message = self._admission.receive_push(receiver, frames)
            if message is not None:
                assert isinstance(message.body, messages.PushedBody)
                try:
                    self.dispatcher.accept_push(message.header, message.body, message.payload)
                except ProtocolError:
                    pass  # counted by the dispatcher

    def load(self) -> None:
        """Restore the tables' content of the last start. If it raises an error, nothing is saved."""
        if self.store is None:
            return
        saves, self._saves_memory = self._saves_memory, False  # a refused file stays unchanged
        self.archive.load()
        self._saves_memory = saves

    def start(self) -> None:
        """Start the threads that answer and save."""
        self.requests.worker.start()
        self.archive.start()
        self.requests.saving.start()
        self.archive.wait_noted()

    # Inspection

    @property
    def fatal_error(self) -> Exception | None:
        """Error after which nothing can be saved any more; None if there was none."""
        return self.requests.saving.lost

    @property
    def send_queues(self) -> Iterator[SendQueues]:
        """Queues of replies that wait for room, by thread."""
        yield self.requests.send_queues
        yield from self.proxies.send_queues

    def _workers(self) -> list[Worker]:
        return [self.requests.worker, *self.pullers]

    def problem(self) -> list[str]:
        """Return faults of threads and disk that only a restart can repair, a sentence each."""
        stuck = [trouble for worker in self._workers() for trouble in worker.problem()]
        return stuck if self.fatal_error is None else [f"state: {self.fatal_error}", *stuck]

    def unready_reasons(self) -> list[str]:
        """Return reasons why no new clients should come now, a sentence each; see `Server.readiness`."""
        if self._is_closing.is_set():
            return ["closing: this server is closing"]
        if self.store is not None and not self.store.is_healthy:
            return [f"state: {self.store.problem}"]
        if self.dispatcher.is_draining:
            return ["leaving: this server is being drained; other servers take over its clients"]
        trouble = [process.shared_guard().problem(), self.dispatcher.problem()]
        return [*self.gate.problem(), *filter(None, trouble)]

    def figures(self) -> dict[str, Any]:
        """Return the figures of `ServerStats` that threads and sockets count."""
        return {
            "restored": 0 if self.store is None else self.store.restored,
            "missing": (*(() if self.store is None else self.store.missing), *self.archive.missing),
            "dropped_replies": sum(queues.dropped for queues in self.send_queues),
            "requests": self.requests.timings.durations(),
            "snapshots": self.archive.taken,
            "snapshot_trouble": self.archive.trouble,
            "folder": None if self.store is None else self.store.disk_space(),
            "descriptors": process.open_descriptors(),
            "most_descriptors": process.max_descriptors(),
            "security": self.gate.security(),
            "faults": sum(worker.errors for worker in self._workers()),
        }

    # Shutdown

    def begin_close(self) -> None:
        """Make waiting calls raise `Closed`: at once, or after the tables' content is saved."""
        self._is_closing.set()
        if not self._saves_memory:
            self._close_pools()

    def close(self, deadline: float) -> None:
        """Close everything: first the pullers, then the store, then the request thread. By one caller at a time."""
        self._stop(self.pullers, deadline)
        self.requests.wait_end_confirmed(deadline - LAST_REPLY_DELAY)
        if self.store is not None:
            self.requests.drain(deadline)
            self._save_memory(deadline)
            self.requests.saving.close(max(MIN_SAVING, deadline - time.monotonic()))
        if self.store is not None or self.dispatcher.finished:
            until = min(self.requests.last_reply_time(deadline) + LAST_REPLY_DELAY, deadline)
            time.sleep(max(0.0, until - time.monotonic()))
        self._stop([self.requests.worker], deadline)
        self.proxies.wait_ended(deadline)
        self.lines.close()
        self.gate.close()
        self.addresses.wait_unbound(deadline)

    def _save_memory(self, deadline: float) -> None:
        if self._saves_memory:
            remaining = max(0.0, deadline - time.monotonic())
            self.archive.save(deadline - (1.0 - MEMORY_SHARE) * remaining)
            self._close_pools()
            self._saves_memory = False  # a second close would overwrite the snapshot of a later start

    def _close_pools(self) -> None:
        for table in self.dispatcher.tables:
            table.pool.close()

    def _stop(self, workers: Sequence[Worker], deadline: float) -> None:
        for worker in workers:
            remaining = deadline - time.monotonic()
            # The thread gets a moment, even after the deadline: a thread that waits for a cache notices the end late.
            if not worker.stop(max(END_TIMEOUT, remaining), linger=max(MIN_LINGER, min(LINGER_TIMEOUT, remaining))):
                _log.warning("%s: a thread did not end before the deadline", self.name)


def default_name(endpoint: str | None) -> str:
    """Return the default name of a server: its host and port, or host, process id and a random suffix."""
    port = (endpoint or "").rpartition(":")[2]
    if endpoint and endpoint.startswith("tcp://") and port.isdigit() and port != "0":
        return f"{socket.gethostname()}:{port}"
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
