"""Sockets with ZeroMQ's semantics, and their connections, in one world.

    PUSH ──queue──▶ way (delay, cut, lost with the connection) ──▶ queue ──▶ PULL

The model has high-water marks of both ends, IMMEDIATE, envelopes of ROUTER and EHOSTUNREACH, subscriptions that travel,
monitors' events, reconnecting with growing pauses, and losses at the end of a connection.
"""

from __future__ import annotations

import errno
import itertools
import struct
import zlib
from collections import deque
from typing import Any, Final

import zmq

from .world import Process, World

LATENCY: Final = 2e-4
"""Least seconds of a message's way."""
CONNECT_TIMEOUT: Final = 5.0
"""Seconds until an attempt to connect through a cut ends."""
SPINNING: Final = 1000
"""Consecutive polls that find unread input: a task that polls so often wastes a core."""
SILENCE: Final = 20.0
"""Seconds after which a connection through a cut ends (keepalives)."""
POLLIN, POLLOUT, NOBLOCK, SNDMORE, ROUTER, XPUB, PAIR = map(
    int, (zmq.POLLIN, zmq.POLLOUT, zmq.NOBLOCK, zmq.SNDMORE, zmq.ROUTER, zmq.XPUB, zmq.PAIR)
)
EVENT: Final = struct.Struct("=HI")
AGAIN: Final = zmq.Again()
"""One shared instance, because the exception is frequent."""


class Frame(bytes):
    """One frame of a received message, with the attributes of `zmq.Frame` that the product uses."""

    more = False

    @property
    def bytes(self) -> bytes:
        return self

    def get(self, name: Any) -> Any:
        """Raise the error of a frame without ZeroMQ's properties."""
        raise zmq.ZMQError(errno.EINVAL)


class Network:
    """Listeners, cuts and all connections."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[tuple[str, int], Socket] = {}
        self.cut: set[tuple[str, str]] = set()
        """Pairs of hosts without a way: (from, to)."""
        self.sockets: dict[Process, list[Socket]] = {}
        self.connections: dict[int, Connection] = {}
        self.ports = itertools.count(40_000)
        self.slow = 0.0
        """Probability that a message takes much longer than usual."""

    def latency(self) -> float:
        """Return the seconds that one message takes."""
        rng = self.world.rng
        if self.slow and rng.random() < self.slow:
            return rng.uniform(0.01, 0.3)
        return LATENCY * (1.0 + rng.random())

    def reaches(self, here: str, there: str) -> bool:
        return (here, there) not in self.cut

    def joins(self, one: str, other: str) -> bool:
        """Return True if messages get through in both directions."""
        return self.reaches(one, other) and self.reaches(other, one)

    def isolate(self, host: str, hosts: list[str], way: str = "both") -> None:
        """Cut a host off: "out" for its outgoing messages, "in" for its incoming ones, or both."""
        self.cut |= {(host, other) for other in hosts if way != "in"}
        self.cut |= {(other, host) for other in hosts if way != "out"}
        self._look()

    def heal(self, host: str) -> None:
        """Remove all cuts of a host."""
        self.cut = {pair for pair in self.cut if host not in pair}
        self._look()

    def _look(self) -> None:
        for connection in list(self.connections.values()):
            connection.look()

    def reset(self, host: str) -> None:
        """End all connections of a host at once, like a network device that restarts."""
        for connection in list(self.connections.values()):
            if host in (connection.dialer.host, connection.listener.host):
                connection.end(graceful=False)

    def killed(self, process: Process) -> None:
        """Close the sockets of a killed process."""
        for socket in self.sockets.pop(process, []):
            socket.close()


class Context:
    """Replacement for `zmq.Context` in one process."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self.closed = False
        self.monitored: dict[str, Socket] = {}

    def socket(self, kind: int) -> Socket:
        socket = Socket(self, kind)
        self.network.sockets.setdefault(self.process, []).append(socket)
        return socket


class Side:
    """One direction of a connection, with the messages that were sent and not yet received."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.on_way: deque[list[bytes]] = deque()
        self.here: deque[list[bytes]] = deque()
        self.last = 0.0
        """Arrival time of the newest message. No message overtakes another one."""

    @property
    def has_room(self) -> bool:
        return not self.most or len(self.on_way) + len(self.here) < self.most


class Connection:
    """A connection of two sockets."""

    def __init__(self, dialer: Socket, listener: Socket, address: str) -> None:
        self.dialer, self.listener, self.address = dialer, listener, address
        self.world, self.network = dialer.world, dialer.network
        self.number = self.world.next_number()
        self.identity = b"\0" + self.number.to_bytes(4, "big")
        self.is_open = True
        self.subscriptions: dict[bytes, int] = {}
        self._silent: int = 0
        self.ways = {dialer: Side(_room(dialer, listener)), listener: Side(_room(listener, dialer))}
        """The two directions of the connection, by their sender."""

    def other(self, one: Socket) -> Socket:
        """Return the socket at the far end."""
        return self.listener if one is self.dialer else self.dialer

    def has_room(self, sender: Socket) -> bool:
        return self.is_open and self.ways[sender].has_room

    def send(self, sender: Socket, frames: list[bytes]) -> None:
        way = self.ways[sender]
        way.on_way.append(frames)
        way.last = max(way.last, self.world.now + self.network.latency())
        self.world.at(way.last, lambda: self._arrive(sender))

    def _arrive(self, sender: Socket) -> None:
        way, receiver = self.ways[sender], self.other(sender)
        if not way.on_way:
            return
        if not self.network.reaches(sender.host, receiver.host):
            self._stall()
            return
        frames = way.on_way.popleft()
        if self.is_open or receiver is self.listener:
            way.here.append(frames)
            if self in receiver.connections:
                receiver.ready[self] = None
            if receiver.kind == XPUB:
                self.count_subscription(frames[0])
            self.world.note(
                "message", sender.process.name, receiver.process.name, receiver.kind, zlib.crc32(b"".join(frames))
            )
            receiver.changed()

    def count_subscription(self, message: bytes) -> None:
        """Update the far end's subscription of a topic."""
        topic, by = message[1:], 1 if message[:1] == b"\x01" else -1
        self.subscriptions[topic] = max(0, self.subscriptions.get(topic, 0) + by)

    def _stall(self) -> None:
        """Start the keepalive timeout, after which the connection ends."""
        if self._silent:
            return
        self._silent = number = self.world.next_number()

        def end() -> None:
            if self._silent == number and self.is_open:
                self.end(graceful=False)

        self.world.after(SILENCE * self.world.rng.uniform(0.75, 1.25), end)

    def look(self) -> None:
        """Adapt to a change of the cuts: waiting messages go on, or the timeout starts."""
        if not self.is_open:
            return
        if self.network.joins(self.dialer.host, self.listener.host):
            self._silent = 0
        else:
            self._stall()
        for sender, way in self.ways.items():
            if self.network.reaches(sender.host, self.other(sender).host):
                for _ in range(len(way.on_way)):
                    way.last = max(way.last, self.world.now + self.network.latency())
                    self.world.at(way.last, lambda sender=sender: self._arrive(sender))

    def received(self, receiver: Socket) -> list[bytes]:
        way = self.ways[self.other(receiver)]
        frames = way.here.popleft()
        if not way.here:
            del receiver.ready[self]
        sender = self.other(receiver)
        if self.is_open and len(way.here) + len(way.on_way) == way.most - 1:
            sender.changed()  # the sender has room again
        return frames

    def end(self, *, graceful: bool, by: Socket | None = None) -> None:
        """End the connection. Gracefully, messages on the way still arrive; else the newest ones are lost."""
        if not self.is_open:
            return
        self.is_open = False
        self.network.connections.pop(self.number, None)
        for sender, way in self.ways.items():
            if not graceful or sender is not by:
                kept = self.world.rng.randrange(len(way.on_way) + 1) if way.on_way and sender is by else 0
                while len(way.on_way) > kept:
                    way.on_way.pop()
            if self.other(sender) is self.dialer:
                way.here.clear()  # a dialer's socket drops unread messages
                self.dialer.ready.pop(self, None)
        for one in (self.dialer, self.listener):
            if one is by:
                one.lost(self, tell=False)
            else:
                delay = self.network.latency()
                self.world.after(delay, lambda one=one: one.lost(self, tell=True))


def _room(sender: Socket, receiver: Socket) -> int:
    """Return the number of messages that both ends and the system between them hold; 0 for no limit."""
    here, there = sender.options.get(zmq.SNDHWM, 1000), receiver.options.get(zmq.RCVHWM, 1000)
    return here + there + 2 if here and there else 0


class Dial:
    """An address that a socket connects to."""

    def __init__(self, socket: Socket, address: str) -> None:
        self.socket, self.address = socket, address
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.place = host, int(port)
        self.connection: Connection | None = None
        self.is_wanted = True
        self._pause = self._usual = socket.options.get(zmq.RECONNECT_IVL, 100) / 1000.0
        self._attempt()

    def _attempt(self) -> None:
        socket, network = self.socket, self.socket.network
        if not self.is_wanted or socket.closed or not socket.process.is_alive:
            return
        is_cut = not network.joins(socket.host, self.place[0])
        socket.world.after(CONNECT_TIMEOUT if is_cut else 2.0 * network.latency(), lambda: self._settle(is_cut=is_cut))

    def _settle(self, *, is_cut: bool) -> None:
        socket = self.socket
        if not self.is_wanted or socket.closed or not socket.process.is_alive:
            return
        listener = None if is_cut else socket.network.listeners.get(self.place)
        if listener is None or listener.closed:
            socket.tell(zmq.EVENT_CLOSED, self.address)
            self.again()
            return
        self._pause = self._usual
        self.connection = connection = Connection(socket, listener, self.address)
        socket.network.connections[connection.number] = connection
        socket.connections.append(connection)
        listener.connections.append(connection)
        socket.world.note("connected", socket.process.name, listener.process.name, socket.kind)
        socket.tell(zmq.EVENT_CONNECTED, self.address)
        socket.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED, self.address)
        for topic, count in socket.topics.items():
            for _ in range(count):
                connection.send(socket, [b"\x01" + topic])
        socket.changed()
        listener.changed()

    def again(self) -> None:
        """Try again after a growing pause."""
        socket = self.socket
        socket.tell(zmq.EVENT_CONNECT_RETRIED, self.address)
        most = socket.options.get(zmq.RECONNECT_IVL_MAX, 5000) / 1000.0
        socket.world.after(self._pause * socket.world.rng.uniform(0.5, 1.0), self._attempt)
        self._pause = min(most, self._pause * 2.0)

    def stop(self) -> None:
        self.is_wanted = False
        if self.connection is not None:
            self.connection.end(graceful=True, by=self.socket)


class Socket(int):
    """Replacement for `zmq.Socket`. As an int, its hash is the same in every process, and is computed in C."""

    def __new__(cls, context: Context, kind: int) -> Socket:
        return super().__new__(cls, context.network.world.next_number())

    def __init__(self, context: Context, kind: int) -> None:
        self.context, self.kind = context, int(kind)
        self.network, self.process = context.network, context.process
        self.world, self.host = context.network.world, context.process.host
        self.options: dict[int, Any] = {}
        self.closed = False
        self.copy_threshold = 0
        self.connections: list[Connection] = []
        self.ready: dict[Connection, None] = {}
        """Connections with received messages that were not taken."""
        self.topics: dict[bytes, int] = {}
        self.poller: Poller | None = None
        self._dials: dict[str, Dial] = {}
        self._bound: dict[str, tuple[str, int]] = {}
        self._last = ""
        self.heard: Socket | None = None  # the monitor's other end
        self._events = 0
        self.inbox: deque[list[bytes]] = deque()  # messages of a monitor's own end
        self._turn = 0
        self._rest: deque[bytes] = deque()  # remaining frames of a message that was taken in part
        self._unsent: list[Any] = []  # frames of an incomplete message
        self._waiting: Any = None  # the task inside of a receive

    def setsockopt(self, option: int, value: Any) -> None:
        if option in (zmq.SUBSCRIBE, zmq.UNSUBSCRIBE):
            self._subscribe(bytes(value), option == zmq.SUBSCRIBE)
        else:
            self.options[option] = value

    set = setsockopt

    def _subscribe(self, topic: bytes, is_wanted: bool) -> None:
        count = self.topics.get(topic, 0) + (1 if is_wanted else -1)
        self.topics[topic] = max(0, count)
        for connection in self.connections:
            connection.send(self, [(b"\x01" if is_wanted else b"\x00") + topic])

    def getsockopt(self, option: int) -> Any:
        return self.kind if option == zmq.TYPE else self.options.get(option, 0)

    def get_string(self, option: int) -> str:
        assert option == zmq.LAST_ENDPOINT
        return self._last

    def bind(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        number = next(self.network.ports) if port in ("*", "0", "!") else int(port)
        place = (self.host if host in ("*", "0.0.0.0") else host), number
        if place in self.network.listeners:
            raise zmq.ZMQError(errno.EADDRINUSE)
        self.network.listeners[place] = self
        self._last = f"tcp://{host if host != '*' else '0.0.0.0'}:{number}"
        self._bound[self._last] = place

    def unbind(self, address: str) -> None:
        self.network.listeners.pop(self._bound.pop(address), None)

    def connect(self, address: str) -> None:
        if address.startswith("inproc://"):
            watched = self.context.monitored.pop(address)
            watched.heard = self
            return
        self._last = address
        self._dials[address] = Dial(self, address)

    def disconnect(self, address: str) -> None:
        dial = self._dials.pop(address, None)
        if dial is None:
            raise zmq.ZMQError(errno.ENOENT)
        dial.stop()

    def monitor(self, address: str, events: int) -> None:
        self.context.monitored[address] = self
        self._events = int(events)

    def disable_monitor(self) -> None:
        self.heard = None

    def tell(self, event: int, address: str) -> None:
        if self.heard is not None and int(event) & self._events:
            self.heard.inbox.append([EVENT.pack(event, 0), address.encode()])
            self.heard.changed()

    def readable(self) -> bool:
        return bool(self.ready or self.inbox)

    def writable(self) -> bool:
        return any(each.has_room(self) for each in self.connections)

    def changed(self) -> None:
        """Wake the poller and the waiting receiver after a message or new room."""
        if self.poller is not None:
            self.poller.kick()
        if self._waiting is not None:
            self.world.wake(self._waiting)

    def recv(self, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        """Receive a frame as ZeroMQ does; the other frames of the message follow."""
        if not self._rest:
            self._rest.extend(self._next(int(flags)))
        data = self._rest.popleft()
        if copy:
            return data
        frame = Frame(data)
        frame.more = bool(self._rest)
        return frame

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> list[Any]:
        return list(self._next(int(flags)))

    def poll(self, timeout: int | None = None, flags: int = zmq.POLLIN) -> int:
        return zmq.POLLIN if self.readable() else 0

    def _next(self, flags: int) -> list[bytes]:
        if self.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        if not flags & NOBLOCK and not self.readable():
            self._waiting = self.world.task
            self.world.park(self.options.get(zmq.RCVTIMEO, 0) / 1000.0)
            self._waiting = None
        if self.kind == PAIR:
            if not self.inbox:
                raise AGAIN.with_traceback(None)
            if self.poller is not None:
                self.poller.idle = 0
            return self.inbox.popleft()
        if not self.ready:
            raise AGAIN.with_traceback(None)
        self._turn += 1
        waiting = list(self.ready)
        connection = waiting[self._turn % len(waiting)]
        frames = connection.received(self)
        if self.poller is not None:
            self.poller.idle = 0
        if not connection.is_open and connection not in self.ready:
            self.connections.remove(connection)
        if self.kind == ROUTER:
            return [connection.identity, *frames]
        return frames

    def send(self, frame: Any, flags: int = 0, copy: bool = True, track: bool = False) -> None:
        """Send a frame as ZeroMQ does, without waiting; the last frame checks the room."""
        self._unsent.append(frame)
        if not flags & SNDMORE:
            frames, self._unsent = self._unsent, []
            self.send_multipart(frames, flags, copy, track)

    def send_multipart(self, frames: Any, flags: int = 0, copy: bool = True, track: bool = False) -> None:
        if self.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        parts = [bytes(memoryview(frame)) for frame in frames]
        if self.kind == ROUTER:
            self._route(parts)
        elif self.kind == XPUB:
            self._publish(parts)
        else:
            able = [each for each in self.connections if each.has_room(self)]
            if not able:
                raise zmq.Again
            self._turn += 1
            able[self._turn % len(able)].send(self, parts)

    def _route(self, parts: list[bytes]) -> None:
        for connection in self.connections:
            if connection.identity == parts[0] and connection.is_open:
                if not connection.has_room(self):
                    raise zmq.Again
                connection.send(self, parts[1:])
                return
        raise zmq.ZMQError(zmq.EHOSTUNREACH)

    def _publish(self, parts: list[bytes]) -> None:
        for connection in self.connections:
            wanted = any(count and parts[0].startswith(topic) for topic, count in connection.subscriptions.items())
            if wanted and connection.has_room(self):
                connection.send(self, parts)

    def lost(self, connection: Connection, *, tell: bool) -> None:
        if connection in self.connections and connection not in self.ready:
            self.connections.remove(connection)
        if self.closed or not self.process.is_alive:
            return
        dial = self._dials.get(connection.address)
        if connection.dialer is self and dial is not None and dial.connection is connection:
            dial.connection = None
            if tell:
                self.tell(zmq.EVENT_DISCONNECTED, connection.address)
                dial.again()
        self.changed()

    def close(self, linger: int | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        for place in self._bound.values():
            self.network.listeners.pop(place, None)
        for dial in self._dials.values():
            dial.is_wanted = False
        for connection in list(self.connections):
            connection.end(graceful=bool(linger), by=self)
        mine = self.network.sockets.get(self.process)
        if mine is not None and self in mine:
            mine.remove(self)


class Poller:
    """Replacement for `zmq.Poller`, which also counts useless polls."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._watched: dict[Any, int] = {}
        self._task: Any = None
        self._rushed = 0  # consecutive polls without a wait that found nothing
        self.idle = 0
        """Consecutive polls that found input at once, of which the task took nothing."""

    def register(self, what: Any, events: int) -> None:
        self._watched[what] = int(events)
        what.poller = self

    def unregister(self, what: Any) -> None:
        del self._watched[what]
        what.poller = None

    def __contains__(self, what: Any) -> bool:
        return what in self._watched

    def kick(self) -> None:
        """Wake the polling task after a change of a socket."""
        if self._task is not None:
            self.world.wake(self._task)

    def _ready(self) -> list[tuple[Any, int]]:
        events = []
        for what, wanted in self._watched.items():
            is_here = wanted & POLLIN and (what.ready or what.inbox)
            if wanted & POLLOUT and what.writable():
                events.append((what, POLLOUT | (POLLIN if is_here else 0)))
            elif is_here:
                events.append((what, POLLIN))
        return events

    def poll(self, timeout: int) -> list[tuple[Any, int]]:
        until, has_waited = self.world.now + timeout / 1000.0, False
        while not (events := self._ready()):
            left = until - self.world.now
            if left <= 0:
                self._rushed = 0 if has_waited else self._rushed + 1
                if self._rushed >= SPINNING:
                    self.world.spins()
                    self.world.park(0.01)
                return []
            has_waited = True
            self._task = self.world.task
            self.idle = 0
            self.world.park(left)
            self._task = None
        self.idle += 1
        if self.idle == SPINNING:
            self.world.spins()
        self.world.give_way()
        return events


class Waker(int):
    """Replacement for `memoire.net.poller.Waker`, without a descriptor."""

    def __new__(cls, world: World) -> Waker:
        return super().__new__(cls, world.next_number())

    def __init__(self, world: World) -> None:
        self.ready, self.inbox = False, ()
        """True after a call; and messages, as sockets have them."""
        self.poller: Poller | None = None

    @property
    def fd(self) -> Waker:
        """The object that a poller registers."""
        return self

    def writable(self) -> bool:
        """Return False: a waker is never writable."""
        return False

    def wake(self) -> None:
        """End the present wait, or the next one."""
        self.ready = True
        if self.poller is not None:
            self.poller.kick()

    def drain(self) -> None:
        """Forget the calls so far."""
        self.ready = False
        if self.poller is not None:
            self.poller.idle = 0

    def close(self) -> None:
        """Do nothing: a waker has no descriptor."""
