"""All that a server does outside of its callers' threads: how it begins, and in which order it ends.

Requests      one thread: answers, notices, log file      Pullers       one thread for each address
Archive       a timer's thread, and one for each order    PlainProxies  in their callers' threads

A plain proxy stands between one address and the workers behind another, and hands whole messages on without a copy. It
keeps one message at most on its way to the workers. While they have no room it stops reading, so that ZeroMQ's own
high-water marks hold the senders back. Replies wait in `lanes`: one client without room keeps no other from its own.
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
from memoire.net.addresses import beside
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
    """What a server has bound, and what it says of that.

    Args:
        name: The server's.
        gate: Decides who may come in.
    """

    def __init__(self, name: str, gate: Gate) -> None:
        self._name, self._gate = name, gate
        self._bound: list[str] = []
        self._warned = 0  # of these, how many it was said of whether they are open
        self.endpoints = messages.Endpoints()
        """What clients connect to, as WELCOME says it."""

    def bind(self, made: Socket, endpoint: str) -> tuple[str, ConnectionWatcher | None]:
        """Bind a socket; returns the address with its port, and what its owner has to follow."""
        bound, way = self._gate.bind(made, endpoint)
        self._bound.append(bound)
        return bound, way

    def warn_open(self, *plain: str) -> None:
        """Warn of addresses bound since the last call, and of `plain` ones, if everybody may come in there."""
        if self._gate.keys is None:
            new, self._warned = self._bound[self._warned :], len(self._bound)
            access.warn(f"server {self._name!r}", [*new, *plain], guard="keys (keys=)")

    def wait_unbound(self, deadline: float) -> None:
        """Wait until others can bind these addresses."""
        sockets.wait_unbound(self._bound, deadline - time.monotonic())


MAX_FRAMES = 16
MESSAGES_PER_TURN = 100
POLL_INTERVAL = 0.1
"""Seconds between two looks at whether it is to end."""


Change = Callable[[list[zmq.Frame]], Sequence[Any]]
"""A message as it goes on; nothing where it does not."""


class _Direction:
    """Messages from one socket to another."""

    def __init__(self, source: Socket, sink: Socket, change: Change, lanes: SendQueues | None = None) -> None:
        self.source, self.sink, self.change, self._lanes = source, sink, change, lanes
        self.kept: Sequence[Any] | None = None

    def move(self) -> None:
        """Hand on what is there; keep what does not fit."""
        if self.kept is not None:
            if not self._send(self.kept):
                return
            self.kept = None
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self.source, most=MAX_FRAMES)
            if frames is None:
                return
            # One frame more than any message of ours: not handed on, since its end was thrown away.
            sent = self.change(frames) if len(frames) <= MAX_FRAMES else []
            if sent and not self._send(sent):
                self.kept = sent
                return

    def _send(self, frames: Sequence[Any]) -> bool:
        if self._lanes is None:
            return sockets.send(self.sink, frames)
        self._lanes.send(self.sink, frames, time.monotonic())
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
    """Hand messages on until the event is set; both sockets belong to the caller's thread, and are closed at the
    end.

    Args:
        pass_on: What becomes of a message on its way from front to back.
        replies: Where messages from back to front wait for room; None where there are none.
        ways: What the sockets' addresses need to be looked after.
    """
    doors = Poller()
    directions = [_Direction(front, back, pass_on)]
    if replies is not None:
        directions.append(_Direction(back, front, list, replies))
    try:
        for made in (front, back):
            doors.add(made, way=ways.get(made))
        while not until.is_set():
            for made in (front, back):
                reading = any(way.source is made and way.kept is None for way in directions)
                writing = any(way.sink is made and way.kept is not None for way in directions)
                doors.watch(made, reading=reading, writing=writing)
            now = time.monotonic()
            doors.wait(min(now + POLL_INTERVAL, float("inf") if replies is None else replies.next_time()))
            for way in directions:
                way.move()
            if replies is not None:
                replies.turn(time.monotonic())
    finally:
        doors.close()


CACHES_PER_TURN = 100
HEADER_BYTES = 1 << 16
"""What a message may have beyond its payload's `limits.message_bytes`."""


def limit_pushes(tables: Tables, message_bytes: int) -> None:
    """Have tables say the largest push that the addresses take."""
    for table in tables:
        table.push_bytes = sockets.largest_push(tables.usual_bytes, message_bytes)


class WorkerProxies:
    """Those that run now. From any thread.

    Args:
        room: Of replies that wait for room in their connection.
        is_closing: Ends all of them.
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
        self._changed = Condition()  # guards the one below
        self._running = 0
        self.lanes: list[SendQueues] = []
        """Replies that wait for room, of each that there ever was; they belong to the callers' threads."""

    @property
    def running(self) -> int:
        """How many there are now."""
        return self._running

    def run_requests(self, front: str, back: str) -> None:
        """Hand requests and their replies on; blocks until the server closes."""
        frontend = sockets.request_server(self._context, self._limits.tuning.request_bytes)
        lanes = SendQueues(room=self._room)
        self.lanes.append(lanes)
        backend = sockets.plain_dealer(self._context, self._limits.reply_bytes)
        self._run(frontend, front, backend, back, place=REQUEST_PLACE, replies=lanes)

    def run_pushes(self, front: str, back: str) -> None:
        """Hand caches or episodes on; blocks until the server closes."""
        frontend = sockets.data_receiver(self._context, self._limits.message_bytes + HEADER_BYTES)
        self._run(frontend, front, sockets.data_sender(self._context), back, place=PUSH_PLACE)

    def _run(
        self, frontend: Socket, front: str, backend: Socket, back: str, *, place: int, replies: SendQueues | None = None
    ) -> None:
        ways = {}
        try:
            bound, ways[frontend] = self._gate.bind(frontend, front)
            self._addresses.warn_open(bound, back)
            _, ways[backend] = self._gate.bind(backend, back, only="server")
        except MemoireError:
            frontend.close(0)
            backend.close(0)
            raise
        self._count(1)
        try:
            pass_on = functools.partial(self._admission.pass_on, frontend, place)
            forward(frontend, backend, pass_on, replies=replies, until=self._is_closing, ways=ways)
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
"""Seconds for which closed sockets go on sending replies at most."""
MIN_LINGER = 0.2
LAST_REPLY_DELAY = 0.3
"""Seconds between the last replies of a server that saves or is finished and its end: a client's socket forgets what
its thread has not read when the connection ends.
"""
MIN_SAVING = 0.1
"""Seconds that a state folder has to save what is left, also if there is no time."""
MEMORY_SHARE = 0.75
"""Of the time that is left, for saving what the tables hold; the rest is for the state folder."""


class ServerThreads:
    """The threads of a server, with their sockets. Nothing is bound, and none has begun, before `open` and `start`.
    Methods may be called from any thread.

    Args:
        is_closing: Set when the server begins to close.
        owner: Kept alive as long as the threads run.

    Raises:
        KeyFileError, ParameterError, StateError: an option cannot be had.
    """

    def __init__(self, options: ServerOptions, is_closing: threading.Event, owner: object) -> None:
        self._options, self._limits, self._is_closing = options, options.limits, is_closing
        self._context: Context = options.process.context
        self.gate = gate = Gate(self._context, Keys.of(options.keys, "server"))
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
            epoch=time.time_ns(),  # whatever clock is given: no two lives have the same number
            endpoints=lambda: self.addresses.endpoints,
            on_lines=self.lines.write,
            on_model=self._announcer.add_model,
            on_news=self._announcer.add_news,
        )
        self._admission = admission = Admission(gate, options.limits, count=dispatcher.refuse, own=dispatcher.own)
        self.requests = RequestThread(dispatcher, admission, store, self._announcer, self.lines, owner)
        self._announcer.wake = self.requests.worker.wake
        self.pullers: list[Worker] = []
        """Take what is pushed, each at its address."""
        limit_pushes(tables, options.limits.message_bytes)
        self.proxies = WorkerProxies(gate, admission, self.addresses, dispatcher.replies, options, is_closing)
        self.archive = Archive(dispatcher, store, options, is_closing)
        self._saves_memory = options.state is not None and options.state.saves_memory
        dispatcher.answer_with(messages.TakeSnapshot, self.archive.order)

    # Its begin

    def open(self) -> None:
        """Bind the addresses. What was bound before one that fails stays open until `close`."""
        at = self._options.endpoint
        endpoint, push, pub = at.request, at.push, at.publish
        if endpoint is not None:
            near = beside(endpoint)
            push, pub = push or near[0], pub or near[1]
        # First the address that errors should name.
        requested = "" if endpoint is None else self.add_request_worker(endpoint, True)
        pushed = "" if push is None else self.add_pull_worker(push, True)
        published = "" if pub is None else self._open_pub(pub)
        self.addresses.endpoints = messages.Endpoints(request=requested, push=pushed, publish=published)
        self.addresses.warn_open()
        if endpoint is not None and (trouble := process.too_few(self._limits.tuning.expected_clients)):
            _log.warning("server %s: %s", self.name, trouble)

    def _open_pub(self, endpoint: str) -> str:
        made = sockets.publisher(self._context)
        bound, way = self.addresses.bind(made, endpoint)
        self._announcer.open(self.requests.worker.doors.add(made, way=way), self.gate.admits)
        return bound

    def add_request_worker(self, endpoint: str, bind: bool) -> str:
        """Answer requests at one more address; see `Server.add_request_worker`."""
        made = sockets.request_server(self._context, self._limits.tuning.request_bytes)
        way: ConnectionWatcher | None
        if bind:
            bound, way = self.addresses.bind(made, endpoint)
        else:
            doors = self.requests.worker.doors
            bound, way = endpoint, link.dial(doors, made, endpoint, follow=False, keys=self.gate.keys)
        self.requests.add(made, way)
        return bound

    def add_pull_worker(self, endpoint: str, bind: bool) -> str:
        """Take what comes in at one more address, on a thread of its own; see `Server.add_pull_worker`."""
        usual, most = self.dispatcher.tables.usual_bytes, self._limits.message_bytes
        largest = sockets.largest_push(usual, most) + HEADER_BYTES
        made = sockets.data_receiver(self._context, largest, sockets.data_mark(usual, most))
        bound, way = self.addresses.bind(made, endpoint) if bind else (endpoint, None)
        worker = Worker(f"memoire-pull-{len(self.pullers)}", functools.partial(self._pull, made))
        worker.doors.add(made, way=way)
        try:
            if not bind:
                link.dial(worker.doors, made, endpoint, keys=self.gate.keys)
        except BaseException:
            worker.stop(0.0)
            raise
        self.pullers.append(worker)
        worker.start()
        return bound

    def _pull(self, made: Socket, ready: dict[object, int]) -> None:
        # Waits inside of the receive while messages come: with a poll before each one, polls would be half of the work.
        # Yet a turn ends some time, so that the thread is seen to be alive.
        for _ in range(CACHES_PER_TURN):
            frames = None if self._is_closing.is_set() else sockets.receive(made, most=3, wait=True)
            if frames is None:
                return
            message = self._admission.receive_push(made, frames)
            if message is not None:
                assert isinstance(message.body, messages.PushedBody)
                try:
                    self.dispatcher.arrived(message.header, message.body, message.payload)
                except ProtocolError:
                    pass  # counted where it was found

    def load(self) -> None:
        """Hold again what the former life held. Raises SnapshotMismatch or DataError; then nothing is saved."""
        if self.store is None:
            return
        saves, self._saves_memory = self._saves_memory, False  # a file that is refused stays
        self.archive.load()
        self._saves_memory = saves

    def start(self) -> None:
        """Begin to answer and to save."""
        self.requests.worker.start()
        self.archive.start()
        self.requests.saving.start()
        self.archive.wait_noted()

    # What is seen of it

    @property
    def lost(self) -> Exception | None:
        """Why nothing can be saved any more; None while all is well."""
        return self.requests.saving.lost

    @property
    def lanes(self) -> Iterator[SendQueues]:
        """Replies that wait for room, by thread."""
        yield self.requests.lanes
        yield from self.proxies.lanes

    def _workers(self) -> list[Worker]:
        return [self.requests.worker, *self.pullers]

    def trouble(self) -> list[str]:
        """What is wrong with threads and disk that only a restart can mend, a sentence each."""
        stuck = [trouble for worker in self._workers() for trouble in worker.trouble()]
        return stuck if self.lost is None else [f"state: {self.lost}", *stuck]

    def unready(self) -> list[str]:
        """Why no new clients should come just now, a sentence each; see `Server.readiness`."""
        if self._is_closing.is_set():
            return ["closing: this server is about to end"]
        if self.store is not None and not self.store.is_healthy:
            return [f"state: {self.store.trouble}"]
        if self.dispatcher.leaving:
            return ["leaving: this server is being drained; others count its clients from now on"]
        trouble = [process.shared_guard().trouble(), self.dispatcher.trouble()]
        return [*self.gate.trouble(), *filter(None, trouble)]

    def figures(self) -> dict[str, Any]:
        """Its part of `ServerStats`."""
        return {
            "restored": 0 if self.store is None else self.store.restored,
            "missing": (*(() if self.store is None else self.store.missing), *self.archive.missing),
            "dropped_replies": sum(lanes.dropped for lanes in self.lanes),
            "requests": self.requests.timings.now(),
            "snapshots": self.archive.taken,
            "snapshot_trouble": self.archive.trouble,
            "folder": None if self.store is None else self.store.space(),
            "descriptors": process.used(),
            "most_descriptors": process.limit(),
            "security": self.gate.security(),
            "faults": sum(worker.errors for worker in self._workers()),
        }

    # Its end

    def begin_close(self) -> None:
        """Have waiting calls raise `Closed`, at once unless what the tables hold has to be saved first."""
        self._is_closing.set()
        if not self._saves_memory:
            self._close_pools()

    def close(self, deadline: float) -> None:
        """End everything: what comes in first, then what is saved, then what answers. By one caller at a time."""
        self._stop(self.pullers, deadline)
        self.requests.tell_finished(deadline - LAST_REPLY_DELAY)
        if self.store is not None:
            self.requests.drain(deadline)
            self._save_memory(deadline)
            self.requests.saving.close(max(MIN_SAVING, deadline - time.monotonic()))
        if self.store is not None or self.dispatcher.finished:
            until = min(self.requests.replied_at(deadline) + LAST_REPLY_DELAY, deadline)
            time.sleep(max(0.0, until - time.monotonic()))
        self._stop([self.requests.worker], deadline)
        self.proxies.wait_ended(deadline)
        self.lines.close()
        self.gate.close()
        self.addresses.wait_unbound(deadline)

    def _save_memory(self, deadline: float) -> None:
        if self._saves_memory:
            left = max(0.0, deadline - time.monotonic())
            self.archive.save(deadline - (1.0 - MEMORY_SHARE) * left)
            self._close_pools()
            self._saves_memory = False  # closed again, it would write over what a later life has saved

    def _close_pools(self) -> None:
        for table in self.dispatcher.tables:
            table.pool.close()

    def _stop(self, workers: Sequence[Worker], deadline: float) -> None:
        for worker in workers:
            left = deadline - time.monotonic()
            # A moment also where there is no time: a thread that waits for a cache notices the end only then.
            if not worker.stop(max(END_TIMEOUT, left), linger=max(MIN_LINGER, min(LINGER_TIMEOUT, left))):
                _log.warning("%s: a thread did not end in time", self.name)


def default_name(endpoint: str | None) -> str:
    """What a server is called that was given no name: its host, and its port or what else tells it from others."""
    port = (endpoint or "").rpartition(":")[2]
    if endpoint and endpoint.startswith("tcp://") and port.isdigit() and port != "0":
        return f"{socket.gethostname()}:{port}"
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
