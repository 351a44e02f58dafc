"""Every ZeroMQ socket of memoire, made with one profile for each role; nothing else in the package sets a socket
option.

An option that is missing here is a fault that shows up weeks later: without LINGER a close hangs, without MAXMSGSIZE
a stranger fills the memory, without keepalives a peer that vanished is never noticed. So a socket is asked for by
what it is for.

A peer that vanished is noticed by TCP (keepalives, and a bound on unacknowledged data), never by ZMTP's heartbeats:
in libzmq 4.3.5 one that is due, or waits in the buffer, on a connection that broke while it was full of unread messages
ends the process ("Assertion failed: !_io_error", its issues 4364 and 4841), and one that is not answered because the
peer's application is slow cuts the connection and loses what is on it.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import socket as _socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import zmq

from memoire import _core
from memoire.errors import EndpointError, ParameterError

from . import addresses, descriptors, resolver

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

DATA_MESSAGES = 2
"""High-water mark of sockets that carry caches, and least one: bytes bound memory, and ZeroMQ counts messages for each
connection and hop.
"""
DATA_BYTES = 2 << 20
MOST_DATA_MESSAGES = 64
"""What may queue where caches are small: each that finds nobody at work on the one before costs both ends a wake-up."""
REQUEST_MESSAGES = 256
"""High-water mark of request sockets; a proxy is one connection for all of its clients."""
NOTICE_MESSAGES = 256
"""High-water mark of notices, each at most a small model; a subscriber that is slower skips."""
SUBSCRIPTION_BYTES = 1024
"""Longest message to a publisher: a subscription, which is a topic."""
COPY_BELOW = 65536
"""Payloads up to this many bytes are copied when sent; from here on ZeroMQ reads them where they are."""
VANISHED = 15_000
"""Milliseconds without an acknowledgement after which a peer is gone."""
STALLED = 60_000
"""The same for data: a receiver that has no room acknowledges nothing either, and what is on the way to it is lost with
the connection."""
ENVELOPE = 10
"""Most frames of a request: addresses of the proxies it passed, an empty frame, header and payload."""
HANDSHAKE = 5_000
"""Milliseconds that somebody who has connected may take to say who he is."""
PATIENCE = 0.5
PROBE = 0.2
"""Seconds that an explanation of a fault may wait for the network."""
LULL = 0.05
"""Seconds that a thread with one socket waits inside of a receive: cheaper for each message than asking a poller
first.
"""
PARTING = 1.0
"""Seconds for which a socket for caches that is made anew, with new keys perhaps, goes on sending what it has."""
SOCKETS_PER_CONTEXT = 8192
READ_AT_A_TIME, READ_AT_A_TIME_ENCRYPTED = 7, 40
"""Bytes that ZeroMQ reads into its buffer at a time, where it can be told: as many as the shortest PING has, so that
none lies there behind the end of a message that finds a queue full. Longer frames are read at once all the same.
"""

MOST_IO_THREADS = 64

_io_threads = 1  # of contexts that are made from now on
_contexts: dict[int, Context] = {}  # by process id: one at most that is ours
_context_lock = threading.Lock()


def _after_fork() -> None:
    global _context_lock  # noqa: PLW0603
    _context_lock = threading.Lock()  # another thread may have held it, which is not there any more


os.register_at_fork(after_in_child=_after_fork)


def shared_context() -> Context:
    """The one context of this process; a forked child gets a new one, since sockets do not survive a fork."""
    with _context_lock:
        context = _contexts.get(os.getpid())
        if context is None or context.closed:
            _core.keep_freed_memory()
            context = _contexts[os.getpid()] = zmq.Context(_io_threads)
            context.set(zmq.MAX_SOCKETS, SOCKETS_PER_CONTEXT)
        return context


def use_io_threads(count: int) -> None:
    """Have the context of this process, which is not made yet, move and encrypt bytes on so many threads of ZeroMQ's.

    A connection belongs to one of them: more threads than connections bring nothing.
    """
    global _io_threads  # noqa: PLW0603
    if not 1 <= count <= MOST_IO_THREADS:
        raise ParameterError("--io-threads", count, f"a number from 1 to {MOST_IO_THREADS}")
    _io_threads = count


def library_version() -> str:
    """Version of libzmq."""
    return zmq.zmq_version()


def request_server(context: Context, message_bytes: int) -> Socket:
    """ROUTER that takes requests and routes replies by the envelope in front of them; it refuses (EAGAIN) one whose
    connection has no room, where it would drop it in silence otherwise: see `lanes`.
    """
    made = _make(context, zmq.ROUTER, message_bytes, send=REQUEST_MESSAGES, receive=REQUEST_MESSAGES)
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return made


def request_client(context: Context, message_bytes: int) -> Socket:
    """DEALER that sends numbered requests; it refuses (EAGAIN) instead of queueing for a peer that is not there."""
    return _make(context, zmq.DEALER, message_bytes, send=REQUEST_MESSAGES, receive=REQUEST_MESSAGES, immediate=True)


def data_mark(usual: int) -> int:
    """How many caches of about so many bytes may queue on each side of a connection; 0 bytes: it is not known."""
    messages = min(MOST_DATA_MESSAGES, DATA_BYTES // usual) if usual else 0
    return max(DATA_MESSAGES, messages)


def data_receiver(context: Context, message_bytes: int, usual: int = 0) -> Socket:
    """PULL that takes caches and episodes, of `usual` bytes; `receive(wait=True)` gives up after `LULL` seconds.

    The mark stays as it is: where it is raised while a connection is full, ZeroMQ 4.3.5 may never tell the sender that
    there is room again.
    """
    made = _make(context, zmq.PULL, message_bytes, receive=data_mark(usual))
    made.setsockopt(zmq.RCVTIMEO, int(LULL * 1000))
    return made


def data_sender(context: Context, usual: int = 0) -> Socket:
    """PUSH that sends caches and episodes, of `usual` bytes, to a peer that is there; one that has no room for a while
    stays connected.
    """
    made = _make(context, zmq.PUSH, SUBSCRIPTION_BYTES, send=data_mark(usual), immediate=True)
    made.setsockopt(zmq.TCP_MAXRT, STALLED)
    return made


def publisher(context: Context) -> Socket:
    """XPUB for notices of models; it receives every subscription (see `subscribed`), also repeated ones."""
    made = _make(context, zmq.XPUB, SUBSCRIPTION_BYTES, send=NOTICE_MESSAGES, receive=REQUEST_MESSAGES)
    made.setsockopt(zmq.XPUB_VERBOSE, 1)
    return made


def subscriber(context: Context, message_bytes: int) -> Socket:
    """SUB for notices; topics are subscribed to afterwards, as many as `models.MOST_TOPICS`.

    A subscription is a message of its own: without room for it ZeroMQ drops it, and the topic stays silent. So there is
    no high-water mark for sending.
    """
    return _make(context, zmq.SUB, message_bytes, send=0, receive=NOTICE_MESSAGES)


def plain_dealer(context: Context, message_bytes: int) -> Socket:
    """DEALER of a plain request proxy, which shares requests out among the workers behind it."""
    return _make(context, zmq.DEALER, message_bytes, send=REQUEST_MESSAGES, receive=REQUEST_MESSAGES, immediate=True)


OTHER_MECHANISM: int = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
WRONG_KEY: int = zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
"""What a monitor says of a handshake that failed: one of the two uses no keys; a listener was dialled with another
listener's key.
"""
OTHER_KIND: int = zmq.PROTOCOL_ERROR_ZMTP_INVALID_METADATA
"""The same: the peer's socket is of a kind that this one cannot talk to."""


def authenticator(context: Context) -> Socket:
    """ROUTER, bound where ZeroMQ asks who may come in; its questions are bounded by the handshakes that wait.

    Raises:
        EndpointError: somebody else answers in this context.
    """
    made = context.socket(zmq.ROUTER)
    for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
        made.setsockopt(option, 0)
    return _bound(made, "inproc://zeromq.zap.01")


def _bound(made: Socket, endpoint: str) -> Socket:
    bind(made, endpoint)
    return made


def ask_for_keys(made: Socket, secret: bytes, domain: str) -> None:
    """Let in only who has a key that the authenticator knows; nobody while there is none. Before `bind`."""
    made.setsockopt(zmq.CURVE_SERVER, 1)
    made.setsockopt(zmq.CURVE_SECRETKEY, secret)
    made.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
    made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    _read_little(made, READ_AT_A_TIME_ENCRYPTED)


def use_keys(made: Socket, public: bytes, secret: bytes, server: bytes) -> None:
    """Show a key, and accept only who has the key `server`. Before `connect`; connections that are there stay."""
    made.setsockopt(zmq.CURVE_PUBLICKEY, public)
    made.setsockopt(zmq.CURVE_SECRETKEY, secret)
    made.setsockopt(zmq.CURVE_SERVERKEY, server)


def origin(frame: zmq.Frame) -> tuple[str, int]:
    """Which key a message came by, as the authenticator has marked it, and the descriptor of its connection; ("", -1)
    where it was not marked.
    """
    try:
        return str(frame.get("User-Id")), int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return "", -1


def listened_at(made: Socket) -> str:
    """The address that a socket was bound to last, as ZeroMQ spells it."""
    return made.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def rebind(made: Socket, endpoint: str, secret: bytes) -> None:
    """Listen at the same address with another key. Connections that are there end.

    Raises:
        EndpointError: the address could not be had again; the socket is open, and nobody can come.
    """
    try:
        made.unbind(endpoint)
    except zmq.ZMQError as error:
        if error.errno != errno.ENOENT:  # it was tried before, and came as far as this
            raise EndpointError(endpoint, "give back", error.strerror or str(error)) from error
    made.setsockopt(zmq.CURVE_SECRETKEY, secret)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            made.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if time.monotonic() >= deadline:
                raise EndpointError(endpoint, "bind", error.strerror or str(error)) from error
            time.sleep(0.01)


def _make(
    context: Context, kind: int, message_bytes: int, *, send: int = 1, receive: int = 1, immediate: bool = False
) -> Socket:
    try:
        made = context.socket(kind)
    except zmq.ZMQError as error:
        raise EndpointError("(no address)", "open a socket for", error.strerror or str(error)) from error
    options = {
        zmq.LINGER: 0,
        zmq.IPV6: 1,
        zmq.IMMEDIATE: int(immediate),
        zmq.SNDHWM: send,
        zmq.RCVHWM: receive,
        zmq.MAXMSGSIZE: message_bytes,
        zmq.HEARTBEAT_IVL: 0,
        zmq.HANDSHAKE_IVL: HANDSHAKE,
        zmq.CONNECT_TIMEOUT: 5000,
        # Spread in time, or all actors of a cluster dial a proxy that restarts in the same millisecond.
        zmq.RECONNECT_IVL: 100 + random.randrange(100),
        zmq.RECONNECT_IVL_MAX: 5000,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 5,
        zmq.TCP_KEEPALIVE_INTVL: 5,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: VANISHED,
        zmq.BACKLOG: descriptors.backlog(),
    }
    for option, value in options.items():
        made.setsockopt(option, value)
    made.copy_threshold = COPY_BELOW
    _read_little(made, READ_AT_A_TIME)
    return made


def _read_little(made: Socket, bytes_: int) -> None:
    """Close the way by which a peer with PINGs ends the process (docs/security.md), where libzmq has an option for it:
    in builds with drafts.
    """
    if zmq.has("draft"):
        made.setsockopt(zmq.IN_BATCH_SIZE, bytes_)


def bind(made: Socket, endpoint: str) -> str:
    """Bind and return the address with its real port; ":0" and ":*" take a free one.

    A taken address is tried again for `PATIENCE` seconds: ZeroMQ gives the address of a socket that was closed back
    in the background.

    Raises:
        EndpointError: the address is taken or is not one; the socket is closed.
    """
    deadline = time.monotonic() + PATIENCE

    def attach(address: str) -> None:
        while True:
            try:
                _bind(made, address)
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    return _attach(made, endpoint, "bind", attach)


def _bind(made: Socket, address: str) -> None:
    """Bind, and have what listens there guarded against a want of descriptors."""
    if not address.startswith("tcp://"):
        if address.startswith("ipc://"):
            _look_at(address.removeprefix("ipc://"))
        made.bind(address)
        return
    heard = monitor(made, zmq.EVENT_LISTENING)
    try:
        made.bind(address)
        while heard.poll(0):
            _, fd = EVENT.unpack(heard.recv_multipart()[0])
            descriptors.shared_guard().add(fd, made)
    finally:
        end_monitor(made, heard)


def _look_at(path: str) -> None:
    """Refuse a path that is taken: ZeroMQ removes whatever lies there, also the socket of somebody who lives.

    Raises:
        ZMQError: EADDRINUSE where somebody listens.
        ValueError: something else than a socket lies there, or one that cannot be asked.
    """
    if path[:1] in ("@", "*"):  # an abstract name, which cannot be taken away; any free path
        return
    try:
        kind = os.lstat(path).st_mode
    except OSError:
        return  # nothing is there; what else is wrong ZeroMQ says
    if not stat.S_ISSOCK(kind):
        raise ValueError(f"there is something else than a socket at {path}, and it was left there")
    with _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        answer = probe.connect_ex(path)
    if answer in (0, errno.EAGAIN):  # EAGAIN: it listens, and many wait
        raise zmq.ZMQError(errno.EADDRINUSE)
    if answer not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ValueError(f"the socket at {path} cannot be asked whether somebody listens: {os.strerror(answer)}")


EVENT = struct.Struct("=HI")
"""What a monitor's message begins with: the event and its value; the address is its last frame."""
_monitors = itertools.count(1)


def monitor(made: Socket, events: int) -> Socket:
    """Where ZeroMQ tells what happens to the connections of a socket; ended by `end_monitor`, before the socket is."""
    address = f"inproc://memoire-monitor-{next(_monitors)}"
    made.monitor(address, events)
    heard: Socket = made.context.socket(zmq.PAIR)
    heard.setsockopt(zmq.LINGER, 0)
    # Without a bound: ZeroMQ's own thread would wait for room, and with it every socket of the context.
    heard.setsockopt(zmq.RCVHWM, 0)
    heard.connect(address)
    return heard


def events(heard: Socket) -> Iterator[tuple[int, int, str]]:
    """What a monitor has told since the last call: event, value, and the address that it is about."""
    while True:
        try:
            frames = heard.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        event, value = EVENT.unpack(frames[0])
        yield event, value, frames[-1].decode("utf-8", "replace")


def end_monitor(made: Socket, heard: Socket) -> None:
    """Listen no more."""
    # In this order: an event for a monitor that nobody holds would stop ZeroMQ's own thread for ever.
    if not made.closed:
        made.disable_monitor()
    heard.close(0)


def wait_unbound(endpoints: Iterable[str], seconds: float) -> None:
    """Wait until the socket files of closed ipc:// addresses are gone: ZeroMQ removes them in the background, and would
    remove the file of whoever binds the address meanwhile.
    """
    deadline = time.monotonic() + min(seconds, PATIENCE)
    for endpoint in endpoints:
        while endpoint.startswith("ipc://") and os.path.exists(endpoint[6:]) and time.monotonic() < deadline:
            time.sleep(0.002)


def connect(made: Socket, endpoint: str) -> str:
    """Connect to an address, not to a name (`links.dial` takes both); returns at once, whether anybody is there or not.

    Raises:
        EndpointError: this is no address; the socket is closed.
    """

    def attach(address: str) -> None:
        named = _CONNECTABLE.fullmatch(address)
        if named is not None and not resolver.is_numeric(named["host"]):
            raise ValueError("a name has to be looked up first")
        made.connect(address)

    return _attach(made, endpoint, "connect to", attach)


_CONNECTABLE = re.compile(r"tcp://(?:.*;)?(?P<host>[^\s\[\]*;:/@]+):\d+")


def _attach(made: Socket, endpoint: str, action: str, attach: Callable[[str], object]) -> str:
    try:
        addresses.check(endpoint, action)
        attach(re.sub(r":0$", ":*", endpoint) if action == "bind" else endpoint)
        return _plain(listened_at(made)) if action == "bind" else endpoint
    except EndpointError:
        made.close(0)
        raise
    except (zmq.ZMQError, TypeError, UnicodeError, ValueError) as error:
        made.close(0)
        if isinstance(error, zmq.ZMQError):
            reason = zmq.strerror(error.errno or 0)
            if error.errno == errno.ENAMETOOLONG:
                reason = "the path is longer than the 107 bytes of a Unix socket's address"
        else:
            reason = str(error)
        raise EndpointError(str(endpoint), action, reason) from error


def _plain(endpoint: str) -> str:
    """An address as people write it: ZeroMQ reports IPv4 ones of a dual-stack socket as IPv6."""
    return re.sub(r"^tcp://\[::ffff:([0-9.]+)\]:", r"tcp://\1:", endpoint).replace("tcp://[::]:", "tcp://*:")


def beside(endpoint: str) -> tuple[str, str]:
    """The data and notice addresses that belong to a request address: the next two ports, or .push and .pub.

    "tcp://*:5560" gives "tcp://*:5561" and "tcp://*:5562"; a free port gives free ports; ipc and inproc get suffixes.
    """
    addresses.check(endpoint, "bind")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.push", f"{endpoint}.pub"
    host, _, port = endpoint.rpartition(":")
    if port in ("0", "*", "!"):
        return f"{host}:0", f"{host}:0"
    if int(port) > 65533:
        raise EndpointError(endpoint, "bind", "the port must be 65533 at most: the next two are used, too")
    return f"{host}:{int(port) + 1}", f"{host}:{int(port) + 2}"


_ANY_HOST = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::):")


def seen_from(dialled: str, endpoint: str) -> str:
    """`endpoint` as whoever dialled `dialled` reaches it: a wildcard host is the host that answered the request."""
    if not _ANY_HOST.match(endpoint) or not dialled.startswith("tcp://"):
        return endpoint
    host = dialled.rpartition(":")[0]
    port = endpoint.rpartition(":")[2]
    return f"{host}:{port}"


def why_unreachable(
    endpoint: str, address: str = "", *, known: resolver.Names | None = None, probe: bool = True
) -> str:
    """What a person can do about an address that did not answer.

    Waits at most `PROBE` seconds for a name server, and as long for a connection.

    Args:
        address: Where the endpoint's name led, if it led anywhere.
        known: Look-ups of names; the process's own by default.
        probe: Try to connect.
    """
    if endpoint.startswith("tcp://"):
        host = endpoint[len("tcp://") :].rpartition(":")[0].strip("[]")
        trouble = "" if address else (known or resolver.shared_names()).trouble(host, PROBE if probe else 0.0)
        if trouble:
            return f"The name {host!r} {trouble}: correct it, or wait for the service."
        found = _probe(address or endpoint) if probe else ""
        unknown = "Is a memoire server or proxy running there, and is the port open to here?"
        return f"{found or unknown} Try `memoire doctor {endpoint}`."
    path = endpoint[len("ipc://") :]
    if endpoint.startswith("ipc://") and not os.path.exists(path):
        return f"There is no socket file {path!r}: start the relay or server first, and share its folder."
    return "Is a server running there? An inproc:// address works only inside one process and one context."


def _probe(address: str) -> str:
    """What a connection attempt to a numeric address says, as a sentence; "" where that is nothing new."""
    host, _, port = address[len("tcp://") :].rpartition(":")
    host = host.strip("[]")
    if not resolver.is_numeric(host) or not port.isdigit():
        return ""
    try:
        _socket.create_connection((host, int(port)), PROBE).close()
    except ConnectionRefusedError:
        return f"The machine is there, but nothing listens at {address}: start memoire's server or proxy there."
    except TimeoutError:
        return f"Nothing comes back from {address}: it is gone, or a firewall or NetworkPolicy drops it."
    except OSError as error:
        return f"There is no way to {address}: {error.strerror or error}."
    return f"Something accepts connections at {address}. Is it a memoire server or proxy?"


class Waker:
    """Ends another thread's wait in `poll`: a socket pair, since ZeroMQ sockets belong to one thread.

    `wake` may be called from any thread, also after `close`; the waiting thread registers `fd` and calls `drain`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = _socket.socketpair()
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
        with self._lock:
            if self._closed or self._pending:
                return
            self._pending = True
            try:
                self._writer.send(b"\0")
            except OSError:  # full: the reader has bytes enough to wake up
                pass

    def drain(self) -> None:
        """Forget the wake-ups so far. Look at what was asked for after this call, never before it."""
        with self._lock:
            self._pending = False
            try:
                while self._reader.recv(64):
                    pass
            except OSError:
                pass

    def close(self) -> None:
        """Give the descriptors back; a later `wake` does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._reader.close()
                self._writer.close()


_LISTENING = (zmq.ROUTER, zmq.PULL, zmq.XPUB)


class Way(Protocol):
    """What `Doors` need of a `links.Link`."""

    @property
    def look_at(self) -> float:
        """When `turn` has something to do."""

    @property
    def monitor(self) -> Socket | None:
        """What ZeroMQ tells about the connection through."""

    def turn(self, now: float) -> None:
        """Do what is due."""

    def heard(self) -> None:
        """Take what the monitor has."""

    def leave(self, made: Socket) -> None:
        """Forget a socket that is about to be closed."""

    def close(self) -> None:
        """Give the monitor back."""


class Doors:
    """The sockets that one thread waits on, with the thread's waker: `wait` returns those that are ready.

    Only the owner calls anything here; other threads call `post` and `waker.wake`.
    """

    def __init__(self) -> None:
        self.waker = Waker()
        self._poller = zmq.Poller()
        self._sockets: list[Socket] = []
        self._ways: dict[Socket, Way] = {}  # by the socket that is connected
        self._monitors: dict[object, Way] = {}  # by their monitors
        self._posted: deque[Callable[[], None]] = deque()
        self._is_guarding = False  # one of the sockets may listen: look whether there are descriptors for who comes
        self._poller.register(self.waker.fd, zmq.POLLIN)

    def post(self, function: Callable[[], None]) -> None:
        """Have the owner call this in its next wait. From any thread."""
        self._posted.append(function)
        self.waker.wake()

    def follow(self, made: Socket, way: Way) -> None:
        """Keep a socket's way to its peer up to date, for as long as the socket is here."""
        self._ways[made] = way
        if way.monitor is not None:
            self._monitors[way.monitor] = way
            self._poller.register(way.monitor, zmq.POLLIN)

    def add(self, made: Socket, *, reading: bool = True, way: Way | None = None) -> Socket:
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
        descriptors.shared_guard().forget(made)
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
            guard = descriptors.shared_guard()
            guard.turn(time.monotonic())
            until = min(until, guard.look_at)
        for way in self._ways.values():
            until = min(until, way.look_at)
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
        if self._ways:
            self._attend(ready)
        return ready

    def _attend(self, ready: dict[object, int]) -> None:
        """Let the ways do what is theirs."""
        while self._posted:
            self._posted.popleft()()
        for monitor in [made for made in ready if made in self._monitors]:
            del ready[monitor]
            self._monitors[monitor].heard()
        now = time.monotonic()
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


def subscribed(made: Socket, admits: Callable[[Socket, zmq.Frame], bool] = lambda made, frame: True) -> list[bytes]:
    """What peers subscribed to since the last call: the bytes that a message has to begin with.

    Args:
        admits: Whether to mind what this message says.
    """
    topics = []
    for _ in range(REQUEST_MESSAGES):
        frames = receive(made, most=1)
        if frames is None:
            break
        data = frames[0].bytes
        # Of a peer that has gone ZeroMQ itself says that it has unsubscribed; nobody has sent that.
        if len(frames) == 1 and data[:1] == b"\x01" and admits(made, frames[0]):
            topics.append(data[1:])
    return topics


def receive(made: Socket, most: int = 8, *, wait: bool = False) -> list[zmq.Frame] | None:
    """The next whole message, frames as they arrived; None when there is none (`wait`: within the socket's RCVTIMEO).

    A peer decides how many frames there are, not how many we keep: beyond one more than `most` they are thrown away,
    so that a parser still sees one too many.
    """
    try:
        frame = made.recv(0 if wait else zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = made.recv(zmq.NOBLOCK, copy=False)
        if len(frames) <= most:
            frames.append(frame)
    return frames


def send(made: Socket, frames: Sequence[Any]) -> bool:
    """Send a whole message without waiting, large frames without copying them; False when there is no room for it."""
    try:
        made.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        # A ROUTER whose peer has gone; nobody is left to tell.
        if error.errno == zmq.EHOSTUNREACH:
            return True
        raise
    return True
