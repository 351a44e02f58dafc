"""How one thread waits: for its sockets, for other threads that wake it, and for what is due on its connections.

Replies that wait until their connection has room for them.

A ROUTER drops a reply in silence when its connection has none: beyond the high-water mark, or while ZeroMQ's own thread
has not yet said that there is room again. A proxy is one connection for all its clients, so the first requests of a
thousand clients need more than a mark of 256. With ROUTER_MANDATORY the socket refuses such a reply, and it waits here:

    send(reply of c7) ──▶ ROUTER has room ──▶ gone
                     └──▶ c7: [reply, reply, reply]   tried again soon; beyond the bounds the oldest are dropped

What the ROUTER has taken is in memory until the peer has read it. Large payloads count as long, and a connection that
has some on their way is given further ones only while there is room.

One socket of those that a node sends by, made again whenever its address changes. It belongs to the node's thread.

what waits ──▶ send(socket) ──▶ all went: nothing to wait for
└─▶ no room:  the thread takes a turn when there is some
"""

from __future__ import annotations

import errno
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from memoire import _core
from memoire.errors import ProtocolError
from memoire.limits import MiB
from memoire.wire.byte_budget import ByteHolder

from . import process, sockets
from .sockets import Socket

_LISTENING = (zmq.ROUTER, zmq.PULL, zmq.XPUB)


class ConnectionWatcher:
    """What looks after one socket's connections inside of a `Poller`. Belongs to the socket's thread."""

    monitor: Socket | None = None
    """What ZeroMQ tells about them through; None for inproc, which has no events, and where nobody wants to know."""

    def __init__(self, made: Socket) -> None:
        self._made = made

    def watch(self, wanted: int) -> None:
        """Hear of these events from now on."""
        self.monitor = sockets.monitor(self._made, wanted)

    @property
    def look_at(self) -> float:
        """When `turn` has something to do."""
        return float("inf")

    def turn(self, now: float) -> None:
        """Do what is due."""

    def heard(self) -> None:
        """Take what the monitor has."""
        assert self.monitor is not None
        for event, value, address in sockets.events(self.monitor):
            self.happened(event, value, address)

    def happened(self, event: int, value: int, address: str) -> None:
        """Take one event, with its value and the address that it is about."""

    def leave(self, made: Socket) -> None:
        """Forget another socket, which is about to be closed."""

    def close(self) -> None:
        """Give the monitor back; the socket is closed afterwards, by its owner."""
        if self.monitor is not None:
            sockets.end_monitor(self._made, self.monitor)
            self.monitor = None


class Waker:
    """Ends another thread's wait in `poll`: a socket pair, since ZeroMQ sockets belong to one thread.

    `wake` may be called from any thread, also after `close`; the waiting thread registers `fd` and calls `drain`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()  # guards `_closed` against a wake into a closed (or reused) descriptor
        self._closed = False
        self._pending = False  # a byte is on its way: another would only cost a system call

    @property
    def fd(self) -> int:
        """What a poller waits on."""
        return self._reader.fileno()

    def wake(self) -> None:
        """End the present wait, or the next one."""
        if self._pending:
            return
        with _core.Held(self._lock):
            if self._closed or self._pending:
                return
            try:
                self._writer.send(b"\0")
            except OSError:  # full: the reader has bytes enough to wake up
                pass
            self._pending = True  # last: after an interrupt a byte may be too many, and is never missing

    def drain(self) -> None:
        """Forget the wake-ups so far. Look at what was asked for after this call, never before it."""
        with _core.Held(self._lock):
            self._pending = False
            try:
                while self._reader.recv(64):
                    pass
            except OSError:
                pass

    def close(self) -> None:
        """Give the descriptors back; a later `wake` does nothing."""
        with _core.Held(self._lock):
            if not self._closed:
                self._closed = True
                self._reader.close()
                self._writer.close()


class Poller:
    """The sockets that one thread waits on, with the thread's waker: `wait` returns those that are ready.

    Only the owner calls anything here; other threads call `post` and `waker.wake`.
    """

    def __init__(self) -> None:
        self.waker = Waker()
        self._poller = zmq.Poller()
        self._sockets: list[Socket] = []
        self._ways: dict[Socket, ConnectionWatcher] = {}  # by the socket that is connected
        self._monitors: dict[object, ConnectionWatcher] = {}  # by their monitors
        self.posted: deque[Callable[[], None]] = deque()
        """What the owner calls in its next wait; any thread appends."""
        self._is_guarding = False  # one of the sockets may listen: look whether there are descriptors for who comes
        self._poller.register(self.waker.fd, zmq.POLLIN)

    def post(self, function: Callable[[], None]) -> None:
        """Have the owner call this in its next wait. From any thread."""
        self.posted.append(function)
        self.waker.wake()

    def follow(self, made: Socket, way: ConnectionWatcher) -> None:
        """Keep a socket's way to its peer up to date, for as long as the socket is here."""
        self._ways[made] = way
        if way.monitor is not None:
            self._monitors[way.monitor] = way
            self._poller.register(way.monitor, zmq.POLLIN)

    def add(self, made: Socket, *, reading: bool = True, way: ConnectionWatcher | None = None) -> Socket:
        """Own a socket from here on, and wait for what it receives."""
        self._sockets.append(made)
        self._is_guarding = self._is_guarding or made.getsockopt(zmq.TYPE) in _LISTENING
        if way is not None:
            self.follow(made, way)
        if reading:
            self._poller.register(made, zmq.POLLIN)
        return made

    def watch(self, made: Socket, *, reading: bool, writing: bool) -> None:
        """Wait for this socket to have something, to have room, both or neither."""
        events = (zmq.POLLIN if reading else 0) | (zmq.POLLOUT if writing else 0)
        if events:
            self._poller.register(made, events)
        elif made in self._poller:
            self._poller.unregister(made)

    def drop(self, made: Socket, linger: float = 0.0) -> None:
        """Close one socket; what it still holds is sent for `linger` seconds more, in the background."""
        if made in self._poller:
            self._poller.unregister(made)
        if made in self._sockets:
            self._sockets.remove(made)
        process.shared_guard().forget(made)
        for way in self._ways.values():
            way.leave(made)
        if made in self._ways:
            way = self._ways.pop(made)
            if way.monitor is not None:
                self._poller.unregister(way.monitor)
                del self._monitors[way.monitor]
            way.close()
        made.close(int(linger * 1000))

    def wait(self, until: float) -> dict[object, int]:
        """Sockets that are ready, with their events; empty when the waker was called or time.monotonic() reached
        `until`.
        """
        if self._is_guarding:
            guard = process.shared_guard()
            guard.turn(time.monotonic())
            until = min(until, guard.look_at)
        look_at = min([way.look_at for way in self._ways.values()], default=until)
        until = min(until, look_at)
        # Milliseconds are rounded up, or a wait that ends early spins until its time has come.
        milliseconds = max(0, int((until - time.monotonic()) * 1000) + 1)
        try:
            ready: dict[object, int] = dict(self._poller.poll(min(milliseconds, 60_000)))
        except zmq.ZMQError as error:
            if error.errno == errno.EINTR:
                return {}
            raise
        if ready.pop(self.waker.fd, None):
            self.waker.drain()
        self.run_posted()
        if self._ways:
            self._attend(ready, look_at)
        return ready

    def run_posted(self) -> None:
        """Call what other threads have posted."""
        while self.posted:
            self.posted.popleft()()

    def _attend(self, ready: dict[object, int], look_at: float) -> None:
        """Let the ways do what is theirs."""
        if ready:
            for monitor in [made for made in ready if made in self._monitors]:
                del ready[monitor]
                self._monitors[monitor].heard()
        now = time.monotonic()
        if now >= look_at:
            for way in self._ways.values():
                if now >= way.look_at:
                    way.turn(now)

    def close(self, linger: float = 0.0) -> None:
        """Close all sockets and the waker."""
        for made in list(self._sockets):
            self.drop(made, linger)
        if self.waker.fd in self._poller:
            self._poller.unregister(self.waker.fd)
        self.waker.close()


CONNECTION_BYTES = 64 * MiB
"""Bytes of replies that wait for one connection."""
ALL_BYTES = 256 * MiB
"""Bytes of replies that wait for all of them."""
VIEWS = memoryview, zmq.Frame
"""Payloads that are views of what is held anyway, such as a stretch of a model: these take no memory of their own."""
MIN_RETRY_INTERVAL = 0.002
"""Seconds until a reply is tried again; doubles up to `MAX_RETRY_INTERVAL` while no connection takes one."""
MAX_RETRY_INTERVAL = 0.1


def size_of(frames: Sequence[Any]) -> int:
    """Bytes of a message."""
    return sum(memoryview(frame).nbytes for frame in frames)


class SendQueue:
    """Messages on their way to one socket or connection, bounded in bytes; the oldest are lost beyond. Belongs to one
    thread.
    """

    def __init__(self, byte_limit: int) -> None:
        self._messages: deque[tuple[int, Sequence[Any]]] = deque()
        self._byte_limit = byte_limit
        self.bytes = self.lost = self.lost_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, frames: Sequence[Any], size: int) -> None:
        """Add a message. One that is larger than the whole lane may be in it alone."""
        while self._messages and self.bytes + size > self._byte_limit:
            self.drop()
        self._messages.append((size, frames))
        self.bytes += size

    def drop(self) -> None:
        """Lose the oldest message."""
        gone, _ = self._messages.popleft()
        self.bytes -= gone
        self.lost += 1
        self.lost_bytes += gone

    def send(self, made: Socket | None, send: Callable[[Socket, Sequence[Any]], bool] = sockets.send) -> bool:
        """Send what there is room for; returns whether everything went."""
        while self._messages:
            if made is None or not send(made, self._messages[0][1]):
                return False
            size, _ = self._messages.popleft()
            self.bytes -= size
        return True


class _Payload(weakref.ref):  # type: ignore[type-arg]
    """A large payload that ZeroMQ has, as long as it has it."""

    __slots__ = ("connection", "size")
    connection: tuple[Socket, bytes]
    size: int


class SendQueues:
    """What one thread sends over its ROUTERs: a message that its connection has no room for waits until it has.

    Args:
        connection_bytes: Bytes that wait for one connection at most.
        all_bytes: The same for all of them; beyond, the connection that has been without room for longest loses its
            oldest.
        room: What the messages take of; the oldest are lost, too, if it has no more. None: they are not counted.
    """

    def __init__(
        self, connection_bytes: int = CONNECTION_BYTES, all_bytes: int = ALL_BYTES, room: ByteHolder | None = None
    ) -> None:
        self._connection_bytes, self._all_bytes, self._room = connection_bytes, all_bytes, room
        self._counted = 0  # bytes that were taken of the room for what waits here
        self._on_way: Counter[tuple[Socket, bytes]] = Counter()  # bytes of large payloads that ZeroMQ has
        self._payloads: dict[int, _Payload] = {}  # by id
        self._read: deque[_Payload] = deque()  # those that it has no more; any thread appends
        self._lanes: dict[tuple[Socket, bytes], SendQueue] = {}  # by socket and connection, in the order they got stuck
        self._bytes = 0
        self._pause = MIN_RETRY_INTERVAL
        self._retry_at = float("inf")
        self.dropped = 0
        """Messages that were dropped for want of room. Any thread may read it."""
        self.sent_at = float("-inf")
        """When the last message was handed over, or left after it had waited. Any thread may read it."""

    def __len__(self) -> int:
        """Messages that wait."""
        return sum(len(lane) for lane in self._lanes.values())

    def send(self, made: Socket, frames: Sequence[Any], now: float) -> None:
        """Send a message whose first frame names its connection, now or when there is room for it."""
        self.sent_at = now
        if (self._lanes and (made, bytes(frames[0])) in self._lanes) or not self._send(made, frames):
            self._keep((made, bytes(frames[0])), frames, now)

    def _send(self, made: Socket, frames: Sequence[Any]) -> bool:
        """Send a message now; False if its connection has no room, or has a large payload on its way and there is no
        room for a further one.
        """
        self._forget_read()
        payload = frames[-1]
        size = 0 if isinstance(payload, VIEWS) or self._room is None else memoryview(payload).nbytes
        if size < sockets.COPY_BELOW:
            return sockets.send(made, frames)
        assert self._room is not None
        connection = made, bytes(frames[0])
        if self._on_way[connection] and self._room.room < size:
            return False
        tracked = np.frombuffer(payload, np.uint8)  # an object of its own, that may be referred to weakly
        if not sockets.send(made, [*frames[:-1], tracked]):
            return False
        sent = _Payload(tracked, self._read.append)
        sent.connection, sent.size = connection, size
        self._payloads[id(sent)] = sent
        self._on_way[connection] += size
        self._room.add(size)
        return True

    def _forget_read(self) -> None:
        """Count payloads no more that ZeroMQ has let go of."""
        while self._read:
            sent = self._read.popleft()
            del self._payloads[id(sent)]
            self._on_way[sent.connection] -= sent.size
            if not self._on_way[sent.connection]:
                del self._on_way[sent.connection]
            if self._room is not None:
                self._room.add(-sent.size)

    def next_time(self) -> float:
        """When `turn` has something to do."""
        return self._retry_at

    def turn(self, now: float) -> None:
        """Send what has room by now."""
        self._forget_read()
        if now < self._retry_at:
            return
        before = self._bytes
        for connection, lane in list(self._lanes.items()):
            self._bytes -= lane.bytes
            if lane.send(connection[0], self._send):
                del self._lanes[connection]
            self._bytes += lane.bytes
        self._count()
        if self._bytes < before:
            self.sent_at, self._pause = now, MIN_RETRY_INTERVAL
        else:
            self._pause = min(MAX_RETRY_INTERVAL, 2.0 * self._pause)
        self._retry_at = now + self._pause if self._lanes else float("inf")

    def _keep(self, connection: tuple[Socket, bytes], frames: Sequence[Any], now: float) -> None:
        lane = self._lanes.get(connection)
        if lane is None:
            lane = self._lanes[connection] = SendQueue(self._connection_bytes)
            self._pause = MIN_RETRY_INTERVAL
            self._retry_at = min(self._retry_at, now + MIN_RETRY_INTERVAL)
        bytes_, lost = lane.bytes, lane.lost
        lane.put(frames, size_of(frames))
        self._bytes += lane.bytes - bytes_
        self.dropped += lane.lost - lost
        while self._bytes > self._all_bytes and len(self) > 1:
            self._drop_oldest()
        self._count()

    def _count(self) -> None:
        """Take room for what waits, or give it back; the oldest are lost if there is too little for all but one."""
        if self._room is None:
            return
        while self._bytes > self._counted:
            try:
                self._room.take(self._bytes - self._counted)
            except ProtocolError:
                if len(self) > 1:
                    self._drop_oldest()
                    continue
                self._room.add(self._bytes - self._counted)
            self._counted = self._bytes
        self._room.add(self._bytes - self._counted)
        self._counted = self._bytes

    def _drop_oldest(self) -> None:
        connection, lane = next(iter(self._lanes.items()))
        self._bytes -= lane.bytes
        lane.drop()
        self._bytes += lane.bytes
        self.dropped += 1
        if not lane:
            del self._lanes[connection]


class Sender:
    """A socket that is watched for room only while something waits; none before `use`.

    Args:
        is_reading: Whether answers come by it.
    """

    def __init__(self, doors: Poller, *, is_reading: bool) -> None:
        self.socket: Socket | None = None
        """None while nobody is known who would take anything."""
        self._doors, self._is_reading, self._is_blocked = doors, is_reading, False

    def use(self, made: Socket) -> None:
        """Send by this socket from now on; the former one was dropped."""
        self.socket = self._doors.add(made, reading=self._is_reading)

    def drop(self, linger: float) -> None:
        """Close the socket; it goes on sending for `linger` seconds."""
        if self.socket is not None:
            self._doors.drop(self.socket, linger)
        self.socket, self._is_blocked = None, False

    def turn(self, send: Callable[[Socket], bool]) -> bool:
        """Send what there is room for; returns whether everything went.

        Args:
            send: Sends by a socket, and says the same.
        """
        if self.socket is None:
            return False
        is_blocked = not send(self.socket)
        if is_blocked != self._is_blocked:
            self._is_blocked = is_blocked
            self._doors.watch(self.socket, reading=self._is_reading, writing=is_blocked)
        return not is_blocked
