"""Replies that wait until their connection has room for them.

A ROUTER drops a reply in silence when its connection has none: beyond the high-water mark, or while ZeroMQ's own thread
has not yet said that there is room again. A proxy is one connection for all its clients, so the first requests of a
thousand clients need more than a mark of 256. With ROUTER_MANDATORY the socket refuses such a reply, and it waits here:

    send(reply of c7) ──▶ ROUTER has room ──▶ gone
                     └──▶ c7: [reply, reply, reply]   tried again soon; beyond the bounds the oldest are dropped

What the ROUTER has taken is in memory until the peer has read it. Large payloads count as long, and a connection that
has some on their way is given further ones only while there is room.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from memoire.errors import ProtocolError
from memoire.limits import MiB
from memoire.wire.byte_budget import ByteHolder

from . import sockets
from .context import Socket

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

    def __len__(self) -> int:
        """Messages that wait."""
        return sum(len(lane) for lane in self._lanes.values())

    def send(self, made: Socket, frames: Sequence[Any], now: float) -> None:
        """Send a message whose first frame names its connection, now or when there is room for it."""
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
        self._pause = MIN_RETRY_INTERVAL if self._bytes < before else min(MAX_RETRY_INTERVAL, 2.0 * self._pause)
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
