"""Poller of one thread: waits for sockets, wake-ups and timers of connections; and queues of messages to send.

`SendQueues` holds replies until their connection has room.

A ROUTER drops a reply in silence if its connection has no room: beyond the high-water mark, or while ZeroMQ's own
thread has not yet reported room again. A proxy is one connection for all its clients, so the first requests of a
thousand clients need more than a mark of 256. With ROUTER_MANDATORY the socket refuses the reply, which is queued:

    send(reply of c7) ──▶ ROUTER has room ──▶ sent
                     └──▶ c7: [reply, reply, reply]   tried again soon; beyond the bounds the oldest are dropped

A message that the ROUTER has taken stays in memory until the peer has read it. Large payloads are counted until then,
and a connection with large payloads in flight gets further ones only while the memory budget has room.

`Sender` is one socket that a node sends by, replaced if its address changes. The `Sender` belongs to the node's thread.

    queued messages ──▶ send(socket) ──▶ all sent: the poller does not wait for room
                                    └──▶ no room: the thread takes a turn as soon as the socket has room
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
    """Watcher of one socket's connections, called by a `Poller`. Belongs to the socket's thread."""

    monitor: Socket | None = None
    """Socket that receives ZeroMQ's connection events; None for inproc, which has none, or if they are not needed."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    def watch(self, wanted: int) -> None:
        """Open a monitor for these events."""
        self.monitor = sockets.monitor(self._socket, wanted)

    @property
    def due_at(self) -> float:
        """Time when `tick` has something to do, by time.monotonic()."""
        return float("inf")

    def tick(self, now: float) -> None:
        """Do periodic work; called when `due_at` has come."""

    def read_events(self) -> None:
        """Take the events that the monitor has received."""
        assert self.monitor is not None
        for event, value, address in sockets.events(self.monitor):
            self.handle_event(event, value, address)

    def handle_event(self, event: int, value: int, address: str) -> None:
        """Handle one event, with its value and address."""

    def remove_socket(self, socket: Socket) -> None:
        """Forget another socket, which is about to be closed."""

    def close(self) -> None:
        """Close the monitor; the owner of the socket closes the socket afterwards."""
        if self.monitor is not None:
            sockets.end_monitor(self._socket, self.monitor)
            self.monitor = None


class Waker:
    """Waker that ends another thread's wait in `poll`: a socket pair, since ZeroMQ sockets belong to one thread.

    `wake` may be called from any thread, also after `close`; the waiting thread registers `fd` and calls `drain`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()  # guards `_closed` against a wake into a closed (or reused) descriptor
        self._closed = False
        self._pending = False  # a byte was sent and not read: another would only cost a system call

    @property
    def fd(self) -> int:
        """File descriptor for a poller to wait on."""
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
            except OSError:  # full: the reader has enough bytes to wake up
                pass
            self._pending = True  # set last: an interrupt may add a byte, but loses none

    def drain(self) -> None:
        """Discard the wake-ups so far. Callers look for work after this call, never before."""
        with _core.Held(self._lock):
            self._pending = False
            try:
                while self._reader.recv(64):
                    pass
            except OSError:
                pass

    def close(self) -> None:
        """Close the descriptors; a later `wake` does nothing."""
        with _core.Held(self._lock):
            if not self._closed:
                self._closed = True
                self._reader.close()
                self._writer.close()


class Poller:
    """Poller of one thread's sockets, with the thread's waker: `wait` returns the sockets that are ready.

    Only the owning thread calls its methods; other threads call `post` and `waker.wake`.
    """

    def __init__(self) -> None:
        self.waker = Waker()
        self._poller = zmq.Poller()
        self._sockets: list[Socket] = []
        self._watchers: dict[Socket, ConnectionWatcher] = {}  # watchers by the connected socket
        self._monitors: dict[object, ConnectionWatcher] = {}  # watchers by the monitor
        self.posted: deque[Callable[[], None]] = deque()
        """Functions that the owner calls in its next wait; any thread appends."""
        self._is_guarding = False  # a socket may listen: `wait` calls the descriptor guard
        self._poller.register(self.waker.fd, zmq.POLLIN)

    def post(self, function: Callable[[], None]) -> None:
        """Let the owner call a function in its next wait. Thread-safe."""
        self.posted.append(function)
        self.waker.wake()

    def follow(self, socket: Socket, watcher: ConnectionWatcher) -> None:
        """Call a watcher of a socket's connections for its events and timers, until the socket is dropped."""
        self._watchers[socket] = watcher
        if watcher.monitor is not None:
            self._monitors[watcher.monitor] = watcher
            self._poller.register(watcher.monitor, zmq.POLLIN)

    def add(self, socket: Socket, *, reading: bool = True, way: ConnectionWatcher | None = None) -> Socket:
        """Take ownership of a socket, and wait for its messages if `reading`; returns the socket."""
        self._sockets.append(socket)
        self._is_guarding = self._is_guarding or socket.getsockopt(zmq.TYPE) in _LISTENING
        if way is not None:
            self.follow(socket, way)
        if reading:
            self._poller.register(socket, zmq.POLLIN)
        return socket

    def watch(self, socket: Socket, *, reading: bool, writing: bool) -> None:
        """Set which events of a socket `wait` waits for: a message to read, room to send, both or neither."""
        events = (zmq.POLLIN if reading else 0) | (zmq.POLLOUT if writing else 0)
        if events:
            self._poller.register(socket, events)
        elif socket in self._poller:
            self._poller.unregister(socket)

    def drop(self, socket: Socket, linger: float = 0.0) -> None:
        """Close one socket; its unsent messages are sent for `linger` seconds more, in the background."""
        if socket in self._poller:
            self._poller.unregister(socket)
        if socket in self._sockets:
            self._sockets.remove(socket)
        process.shared_guard().forget(socket)
        for watcher in self._watchers.values():
            watcher.remove_socket(socket)
        if socket in self._watchers:
            watcher = self._watchers.pop(socket)
            if watcher.monitor is not None:
                self._poller.unregister(watcher.monitor)
                del self._monitors[watcher.monitor]
            watcher.close()
        socket.close(int(linger * 1000))

    def wait(self, until: float) -> dict[object, int]:
        """Wait for sockets, and call posted functions and watchers. Returns the ready sockets with their events; {} if
        only the waker was called, or time.monotonic() has reached `until`.
        """
        if self._is_guarding:
            guard = process.shared_guard()
            guard.tick(time.monotonic())
            until = min(until, guard.due_at)
        due_at = min([watcher.due_at for watcher in self._watchers.values()], default=until)
        until = min(until, due_at)
        # The wait rounds milliseconds up: after a wait that ends early, the loop would spin until the time has come.
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
        if self._watchers:
            self._attend(ready, due_at)
        return ready

    def run_posted(self) -> None:
        """Call what other threads have posted."""
        while self.posted:
            self.posted.popleft()()

    def _attend(self, ready: dict[object, int], due_at: float) -> None:
        """Give the watchers their events, and their turns if due; removes monitors from `ready`."""
        if ready:
            for monitor in [socket for socket in ready if socket in self._monitors]:
                del ready[monitor]
                self._monitors[monitor].read_events()
        now = time.monotonic()
        if now >= due_at:
            for watcher in self._watchers.values():
                if now >= watcher.due_at:
                    watcher.tick(now)

    def close(self, linger: float = 0.0) -> None:
        """Close all sockets and the waker."""
        for owned in list(self._sockets):
            self.drop(owned, linger)
        if self.waker.fd in self._poller:
            self._poller.unregister(self.waker.fd)
        self.waker.close()


CONNECTION_BYTES = 64 * MiB
"""Most bytes of queued replies for one connection."""
ALL_BYTES = 256 * MiB
"""Most bytes of queued replies for all connections of a thread."""
VIEWS = memoryview, zmq.Frame
"""Types of payloads that are views of data that is held anyway, such as a part of a model: no extra memory."""
MIN_RETRY_INTERVAL = 0.002
"""Seconds until a reply is tried again; doubles up to `MAX_RETRY_INTERVAL` while no connection takes a reply."""
MAX_RETRY_INTERVAL = 0.1


def size_of(frames: Sequence[Any]) -> int:
    """Return the size of a message in bytes, over all frames."""
    return sum(memoryview(frame).nbytes for frame in frames)


class SendQueue:
    """Queue of messages to one socket or connection, bounded in bytes: the oldest are dropped. For one thread."""

    def __init__(self, byte_limit: int) -> None:
        self._messages: deque[tuple[int, Sequence[Any]]] = deque()
        self._byte_limit = byte_limit
        self.bytes = self.lost = self.lost_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, frames: Sequence[Any], size: int) -> None:
        """Add a message, and drop the oldest beyond the limit. A message larger than the limit may be queued alone."""
        while self._messages and self.bytes + size > self._byte_limit:
            self.drop()
        self._messages.append((size, frames))
        self.bytes += size

    def drop(self) -> None:
        """Drop the oldest message, and count it as lost."""
        size, _ = self._messages.popleft()
        self.bytes -= size
        self.lost += 1
        self.lost_bytes += size

    def send(self, socket: Socket | None, send: Callable[[Socket, Sequence[Any]], bool] = sockets.send) -> bool:
        """Send queued messages until the socket has no room; returns True if the queue is empty."""
        while self._messages:
            if socket is None or not send(socket, self._messages[0][1]):
                return False
            size, _ = self._messages.popleft()
            self.bytes -= size
        return True


class _Payload(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a large payload that ZeroMQ holds; its callback runs when ZeroMQ has released the payload."""

    __slots__ = ("connection", "size")
    connection: tuple[Socket, bytes]
    size: int


class SendQueues:
    """Send queues of one thread's ROUTERs: a message is queued while its connection has no room.

    Args:
        connection_bytes: Most queued bytes for one connection.
        all_bytes: Most queued bytes for all connections; beyond, the connection that has been without room for longest
            loses its oldest message.
        room: Memory budget of the messages; if it is used up, the oldest messages are dropped, too. None: no budget.
    """

    def __init__(
        self, connection_bytes: int = CONNECTION_BYTES, all_bytes: int = ALL_BYTES, room: ByteHolder | None = None
    ) -> None:
        self._connection_bytes, self._all_bytes, self._room = connection_bytes, all_bytes, room
        self._counted = 0  # bytes of queued messages that were taken from the budget
        self._in_flight: Counter[tuple[Socket, bytes]] = Counter()  # bytes of large payloads that ZeroMQ holds
        self._payloads: dict[int, _Payload] = {}  # by id
        self._released: deque[_Payload] = deque()  # payloads that ZeroMQ has released; any thread appends
        self._queues: dict[tuple[Socket, bytes], SendQueue] = {}  # queues by socket and connection
        self._bytes = 0
        self._pause = MIN_RETRY_INTERVAL
        self._retry_at = float("inf")
        self.dropped = 0
        """Number of messages that were dropped for lack of room. The number may be read by any thread."""
        self.sent_at = float("-inf")
        """Time at which a message was last given to `send`, or left its queue. The time may be read by any thread."""

    def __len__(self) -> int:
        """Return the number of queued messages."""
        return sum(len(queue) for queue in self._queues.values())

    def send(self, socket: Socket, frames: Sequence[Any], now: float) -> None:
        """Send a message now, or queue it until its connection, which the first frame names, has room."""
        self.sent_at = now
        if (self._queues and (socket, bytes(frames[0])) in self._queues) or not self._send(socket, frames):
            self._keep((socket, bytes(frames[0])), frames, now)

    def _send(self, socket: Socket, frames: Sequence[Any]) -> bool:
        """Send a message now; False if its connection has no room, or the budget has none for a next large payload."""
        self._forget_released()
        payload = frames[-1]
        size = 0 if isinstance(payload, VIEWS) or self._room is None else memoryview(payload).nbytes
        if size < sockets.COPY_BELOW:
            return sockets.send(socket, frames)
        assert self._room is not None
        connection = socket, bytes(frames[0])
        if self._in_flight[connection] and self._room.room < size:
            return False
        tracked = np.frombuffer(payload, np.uint8)  # a separate object, which allows weak references
        if not sockets.send(socket, [*frames[:-1], tracked]):
            return False
        sent = _Payload(tracked, self._released.append)
        sent.connection, sent.size = connection, size
        self._payloads[id(sent)] = sent
        self._in_flight[connection] += size
        self._room.add(size)
        return True

    def _forget_released(self) -> None:
        """Give the budget back for payloads that ZeroMQ has released."""
        while self._released:
            sent = self._released.popleft()
            del self._payloads[id(sent)]
            self._in_flight[sent.connection] -= sent.size
            if not self._in_flight[sent.connection]:
                del self._in_flight[sent.connection]
            if self._room is not None:
                self._room.add(-sent.size)

    def next_time(self) -> float:
        """Return the time when `tick` has something to do."""
        return self._retry_at

    def tick(self, now: float) -> None:
        """Send queued messages whose connection has room by now."""
        self._forget_released()
        if now < self._retry_at:
            return
        before = self._bytes
        for connection, queue in list(self._queues.items()):
            self._bytes -= queue.bytes
            if queue.send(connection[0], self._send):
                del self._queues[connection]
            self._bytes += queue.bytes
        self._count()
        if self._bytes < before:
            self.sent_at, self._pause = now, MIN_RETRY_INTERVAL
        else:
            self._pause = min(MAX_RETRY_INTERVAL, 2.0 * self._pause)
        self._retry_at = now + self._pause if self._queues else float("inf")

    def _keep(self, connection: tuple[Socket, bytes], frames: Sequence[Any], now: float) -> None:
        queue = self._queues.get(connection)
        if queue is None:
            queue = self._queues[connection] = SendQueue(self._connection_bytes)
            self._pause = MIN_RETRY_INTERVAL
            self._retry_at = min(self._retry_at, now + MIN_RETRY_INTERVAL)
        bytes_, lost = queue.bytes, queue.lost
        queue.put(frames, size_of(frames))
        self._bytes += queue.bytes - bytes_
        self.dropped += queue.lost - lost
        while self._bytes > self._all_bytes and len(self) > 1:
            self._drop_oldest()
        self._count()

    def _count(self) -> None:
        """Take budget for the queued bytes, or give it back; drops the oldest messages if the budget is too small."""
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
        connection, queue = next(iter(self._queues.items()))
        self._bytes -= queue.bytes
        queue.drop()
        self._bytes += queue.bytes
        self.dropped += 1
        if not queue:
            del self._queues[connection]


class Sender:
    """Sending socket that is watched for room only while messages wait.

    Args:
        is_reading: True if the socket also receives answers.
    """

    def __init__(self, poller: Poller, *, is_reading: bool) -> None:
        self.socket: Socket | None = None
        """Socket in use; None before `use`, and after `drop`."""
        self._poller, self._is_reading, self._is_blocked = poller, is_reading, False

    def use(self, socket: Socket) -> None:
        """Send by this socket from now on; the former socket must have been dropped."""
        self.socket = self._poller.add(socket, reading=self._is_reading)

    def drop(self, linger: float) -> None:
        """Close the socket, which goes on sending for `linger` seconds."""
        if self.socket is not None:
            self._poller.drop(self.socket, linger)
        self.socket, self._is_blocked = None, False

    def tick(self, send: Callable[[Socket], bool]) -> bool:
        """Send messages until the socket has no room; returns True if none is left.

        Args:
            send: Sends messages by a socket, until none is left (True) or the socket has no room (False).
        """
        if self.socket is None:
            return False
        is_blocked = not send(self.socket)
        if is_blocked != self._is_blocked:
            self._is_blocked = is_blocked
            self._poller.watch(self.socket, reading=self._is_reading, writing=is_blocked)
        return not is_blocked
