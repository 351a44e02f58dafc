"""Where a server listens, and whether anybody is told that those addresses are open to all.

A plain proxy between one address and the workers behind another: whole messages, handed on without a copy.

It keeps one message at most on its way to the workers. While they have no room it stops reading, so that ZeroMQ's own
high-water marks hold the senders back. Replies wait in `lanes`: one client without room keeps no other from its own.

The threads that take what clients push, caches or episodes: one for each address.

Plain proxies that a server runs in its callers' threads: one address shared out among the workers behind another.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from memoire._core import Condition
from memoire.errors import MemoireError, ProtocolError
from memoire.limits import Limits
from memoire.net import link, sockets
from memoire.net.admission import PUSH_PLACE, REQUEST_PLACE, Admission
from memoire.net.context import ConnectionWatcher, Context, Socket
from memoire.net.curve_server import Gate
from memoire.net.poller import Poller, SendQueues
from memoire.net.thread import Worker
from memoire.security import access as exposure
from memoire.security.keys import Keys
from memoire.tables.table import Tables
from memoire.wire import messages
from memoire.wire.byte_budget import ByteHolder

from .dispatch import Dispatcher


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
            exposure.warn(f"server {self._name!r}", [*new, *plain], guard="keys (keys=)")

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


class IntakeThreads:
    """Takes what is pushed.

    Args:
        is_closing: Ends the threads' turns.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: Admission,
        addresses: BoundAddresses,
        *,
        context: Context,
        limits: Limits,
        keys: Keys | None,
        is_closing: threading.Event,
    ) -> None:
        self._dispatcher, self._admission, self._addresses = dispatcher, admission, addresses
        self._context, self._limits, self._keys, self._is_closing = context, limits, keys, is_closing
        self.workers: list[Worker] = []
        limit_pushes(dispatcher.tables, limits.message_bytes)

    def add(self, endpoint: str, bind: bool) -> str:
        """Take what comes in at one more address, on a thread of its own; returns the address as it is bound.

        Args:
            bind: False connects to a plain proxy's back instead.
        """
        usual, most = self._dispatcher.tables.usual_bytes, self._limits.message_bytes
        largest = sockets.largest_push(usual, most) + HEADER_BYTES
        made = sockets.data_receiver(self._context, largest, sockets.data_mark(usual, most))
        bound, way = self._addresses.bind(made, endpoint) if bind else (endpoint, None)
        worker = Worker(f"memoire-pull-{len(self.workers)}", functools.partial(self._pull, made))
        worker.doors.add(made, way=way)
        try:
            if not bind:
                link.dial(worker.doors, made, endpoint, keys=self._keys)
        except BaseException:
            worker.stop(0.0)
            raise
        self.workers.append(worker)
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
                    self._dispatcher.arrived(message.header, message.body, message.payload)
                except ProtocolError:
                    pass  # counted where it was found


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
        *,
        context: Context,
        limits: Limits,
        is_closing: threading.Event,
    ) -> None:
        self._gate, self._admission, self._addresses, self._room = gate, admission, addresses, room
        self._context, self._limits, self._is_closing = context, limits, is_closing
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
