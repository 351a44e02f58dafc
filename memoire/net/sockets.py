"""ZeroMQ context, sockets and monitors: one constructor for each role of a socket, with fixed options. No other module
sets socket options.

A missing option is a fault that shows up weeks later: without LINGER a close hangs, without MAXMSGSIZE a stranger fills
the memory, without keepalives a vanished peer is never noticed. Callers therefore ask for a socket by its role.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import zmq

from memoire import _core
from memoire.errors import EndpointError, ParameterError

from . import _multipart, addresses, process

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

SOCKETS_PER_CONTEXT = 8192
MAX_IO_THREADS = 64


class _Socket(zmq.Socket[bytes]):
    """pyzmq's socket with its compiled `send`: the Python wrapper around that serves kinds of sockets not used here."""

    send = zmq.backend.Socket.send  # type: ignore[assignment]


class _Context(zmq.Context[zmq.Socket[bytes]]):
    _socket_class = _Socket


_io_threads = 1  # threads of ZeroMQ's for contexts that are made from now on
_contexts: dict[int, Context] = {}  # contexts by process id: at most one per process
_context_lock = threading.Lock()


def _after_fork() -> None:
    global _context_lock  # noqa: PLW0603
    _context_lock = threading.Lock()  # a parent's thread may hold the former lock


os.register_at_fork(after_in_child=_after_fork)


def shared_context() -> Context:
    """Return the one context of this process; a forked child gets a new one, since sockets do not survive a fork."""
    with _core.Held(_context_lock):
        context = _contexts.get(os.getpid())
        if context is None or context.closed:
            context = _contexts[os.getpid()] = _Context(_io_threads)
            context.set(zmq.MAX_SOCKETS, SOCKETS_PER_CONTEXT)
        return context


def use_io_threads(count: int) -> None:
    """Set the number of ZeroMQ's threads that move and encrypt bytes; call before the process' context is made.

    A connection belongs to one thread: more threads than connections bring nothing.
    """
    global _io_threads  # noqa: PLW0603
    if not 1 <= count <= MAX_IO_THREADS:
        raise ParameterError("--io-threads", count, f"a number from 1 to {MAX_IO_THREADS}")
    _io_threads = count


def library_version() -> str:
    """Return the version of libzmq, such as "4.3.5"."""
    return zmq.zmq_version()


READABLE = int(zmq.POLLIN)
"""Flag of `Poller.wait` for a socket with a message: a comparison of pyzmq's enum would cost a microsecond."""
DATA_MESSAGES = 2
"""Least high-water mark of sockets for caches: bytes bound memory, but ZeroMQ counts messages of each connection."""
DATA_BYTES = 2 << 20
MAX_DATA_MESSAGES = 64
"""Largest high-water mark, for small caches: each that arrives at an idle thread costs both ends a wake-up."""
REQUEST_MESSAGES = 256
"""High-water mark of request sockets; a proxy is one connection for all of its clients."""
NOTICE_MESSAGES = 256
"""High-water mark of notices, each at most a small model; a slower subscriber skips notices."""
SUBSCRIPTION_BYTES = 1024
"""Most bytes of a message to a publisher: a subscription, which holds a topic."""
COPY_BELOW = 65536
"""Bytes from which on a frame is sent without a copy; ZeroMQ copies smaller ones."""
VANISHED_TIMEOUT = 15_000
"""Milliseconds of unacknowledged data after which TCP ends a connection."""
STALLED_TIMEOUT = 60_000
"""Milliseconds of unacknowledged data after which TCP ends a connection for caches: a receiver without room does not
acknowledge either, and messages in flight are lost with the connection."""
ENVELOPE = 10
"""Most frames of a request: addresses of the proxies it passed, an empty frame, header and payload."""
HANDSHAKE_TIMEOUT = 5.0
"""Most seconds of a handshake, in which a new peer shows its key."""
PATIENCE = 0.5
"""Seconds for which binding an address in use is tried again."""
RECEIVE_TIMEOUT = 0.05
"""Seconds that a thread with one socket waits in a receive, which is cheaper for each message than a poller."""
ANSWER_TIMEOUT = 0.002
"""Seconds that a thread waits in a receive for one answer. Threads that need the same socket wait as long."""
DRAIN_TIMEOUT = 1.0
"""Seconds for which a replaced socket for caches goes on sending its queued messages."""
READ_AT_A_TIME, READ_AT_A_TIME_ENCRYPTED = 7, 40
"""Bytes that ZeroMQ reads into its buffer at a time, if libzmq has the option: as many as the shortest PING, so that no
PING is in the buffer after the end of a message that finds a queue full. Longer frames are read at once all the same.
"""


def request_server(context: Context, message_bytes: int) -> Socket:
    """Make a ROUTER that receives requests and routes replies by their envelopes. The ROUTER refuses (EAGAIN) a reply
    whose connection has no room, instead of a silent drop: see `poller.SendQueues`.
    """
    socket = _make(context, zmq.ROUTER, message_bytes, send=REQUEST_MESSAGES, receive=REQUEST_MESSAGES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def request_client(context: Context, message_bytes: int) -> Socket:
    """Make a DEALER that sends numbered requests. The DEALER refuses (EAGAIN) instead of queueing for a peer that is
    not connected. `receive(wait=True)` gives up after `ANSWER_TIMEOUT` seconds.
    """
    socket = _make(context, zmq.DEALER, message_bytes, send=REQUEST_MESSAGES, receive=REQUEST_MESSAGES, immediate=True)
    socket.setsockopt(zmq.RCVTIMEO, int(ANSWER_TIMEOUT * 1000))
    return socket


def data_mark(usual: int, message_bytes: int = 2 * DATA_BYTES) -> int:
    """Return the high-water mark of each side of a connection for caches.

    Args:
        usual: Usual bytes of a cache; 0 if not known.
        message_bytes: Most bytes of a push.
    """
    messages = min(MAX_DATA_MESSAGES, min(DATA_BYTES, message_bytes // 2) // usual) if usual else 0
    return max(DATA_MESSAGES, messages)


def largest_push(usual: int, message_bytes: int) -> int:
    """Return the most bytes of a push if a usual one has `usual`; at least four times as many. The queue of a
    connection, which ZeroMQ bounds in messages, takes at most `DATA_MESSAGES` times `message_bytes`.
    """
    return DATA_MESSAGES * message_bytes // data_mark(usual, message_bytes)


def data_receiver(context: Context, message_bytes: int, queued: int = DATA_MESSAGES) -> Socket:
    """Make a PULL for caches and episodes, which queues `queued` messages for each connection. `receive(wait=True)`
    gives up after `RECEIVE_TIMEOUT` seconds.

    The mark must not change: if it is raised while a connection is full, ZeroMQ 4.3.5 may never report room to the
    sender again.
    """
    socket = _make(context, zmq.PULL, message_bytes, receive=queued)
    socket.setsockopt(zmq.RCVTIMEO, int(RECEIVE_TIMEOUT * 1000))
    return socket


def data_sender(context: Context, usual: int = 0) -> Socket:
    """Make a PUSH that sends caches and episodes, usually of `usual` bytes, to connected peers. A peer without room
    stays connected for `STALLED_TIMEOUT` at most.
    """
    socket = _make(context, zmq.PUSH, SUBSCRIPTION_BYTES, send=data_mark(usual), immediate=True)
    socket.setsockopt(zmq.TCP_MAXRT, STALLED_TIMEOUT)
    return socket


def publisher(context: Context) -> Socket:
    """Make an XPUB for notices of models; it receives every subscription (see `subscribed`), also repeated ones."""
    socket = _make(context, zmq.XPUB, SUBSCRIPTION_BYTES, send=NOTICE_MESSAGES, receive=REQUEST_MESSAGES)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)
    return socket


def subscriber(context: Context, message_bytes: int) -> Socket:
    """Make a SUB for notices; the caller subscribes to topics afterwards, at most `models.MAX_TOPICS`.

    A subscription is a message: without room ZeroMQ drops it, and the topic stays silent. A SUB therefore has no
    high-water mark for sending.
    """
    return _make(context, zmq.SUB, message_bytes, send=0, receive=NOTICE_MESSAGES)


def plain_dealer(context: Context, message_bytes: int) -> Socket:
    """Make a DEALER for a plain request proxy, which distributes requests among the workers behind it."""
    return _make(context, zmq.DEALER, message_bytes, send=REQUEST_MESSAGES, receive=REQUEST_MESSAGES, immediate=True)


OTHER_MECHANISM: int = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
WRONG_KEY: int = zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
"""Values of events of failed handshakes: one side uses no keys; the peer expects another key of the listener."""
OTHER_KIND: int = zmq.PROTOCOL_ERROR_ZMTP_INVALID_METADATA
"""Value of a monitor's event of a failed handshake: the kinds of both sockets do not fit."""


def authenticator(context: Context) -> Socket:
    """Make and bind the ROUTER that receives ZeroMQ's authentication requests; open handshakes bound their number.

    Raises:
        EndpointError: another authenticator is bound in this context.
    """
    socket = context.socket(zmq.ROUTER)
    for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    bind(socket, "inproc://zeromq.zap.01")
    return socket


def ask_for_keys(socket: Socket, secret: bytes, domain: str) -> None:
    """Require an authorized key of each peer; without an authenticator no peer connects. Call before `bind`."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    _read_little(socket, READ_AT_A_TIME_ENCRYPTED)


def use_keys(socket: Socket, public: bytes, secret: bytes, server: bytes) -> None:
    """Set the socket's own key, and the peer's key `server`. Call before `connect`; existing connections stay."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)


def peer_address(frame: zmq.Frame) -> tuple[str, int]:
    """Return the key of a message's sender in hex, as the authenticator has marked it, and the descriptor of its
    connection; ("", -1) if the message has no mark.
    """
    try:
        return str(frame.get("User-Id")), descriptor_of(frame)
    except (zmq.ZMQError, ValueError):
        return "", -1


def descriptor_of(frame: zmq.Frame) -> int:
    """Return the descriptor of a message's connection; -1 if ZeroMQ does not know it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


def listened_at(socket: Socket) -> str:
    """Return the address that a socket was bound to last, as ZeroMQ spells it."""
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def rebind(socket: Socket, endpoint: str, secret: bytes) -> None:
    """Bind a socket to the same address again with another key. Rebinding ends all present connections.

    Raises:
        EndpointError: the address could not be bound again. The socket stays open, but no peer can connect to it.
    """
    try:
        socket.unbind(endpoint)
    except zmq.ZMQError as error:
        if error.errno != errno.ENOENT:  # ENOENT: a former call unbound the path
            raise EndpointError(endpoint, "give back", error.strerror or str(error)) from error
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if time.monotonic() >= deadline:
                raise EndpointError(endpoint, "bind", error.strerror or str(error)) from error
            time.sleep(0.01)


def _make(
    context: Context, kind: int, message_bytes: int, *, send: int = 1, receive: int = 1, immediate: bool = False
) -> Socket:
    try:
        socket = context.socket(kind)
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
        zmq.HANDSHAKE_IVL: int(1000 * HANDSHAKE_TIMEOUT),
        zmq.CONNECT_TIMEOUT: 5000,
        # Sockets reconnect at random times, or all actors of a cluster dial a restarted proxy in one millisecond.
        zmq.RECONNECT_IVL: 100 + random.randrange(100),
        zmq.RECONNECT_IVL_MAX: 5000,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 5,
        zmq.TCP_KEEPALIVE_INTVL: 5,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: VANISHED_TIMEOUT,
        zmq.BACKLOG: process.backlog(),
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    socket.copy_threshold = COPY_BELOW
    _read_little(socket, READ_AT_A_TIME)
    return socket


def _read_little(socket: Socket, bytes_: int) -> None:
    """Bound the bytes of a read, if libzmq is built with drafts: else PINGs can end the process; docs/security.md."""
    if zmq.has("draft"):
        socket.setsockopt(zmq.IN_BATCH_SIZE, bytes_)


def bind(socket: Socket, endpoint: str) -> str:
    """Bind and return the address with its real port; ":0" and ":*" take a free one.

    An address in use is tried again for `PATIENCE` seconds, since ZeroMQ releases the address of a closed socket in the
    background.

    Raises:
        EndpointError: the address is in use or malformed; the socket is closed.
    """
    deadline = time.monotonic() + PATIENCE

    def attach(address: str) -> None:
        while True:
            try:
                _bind(socket, address)
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    return _attach(socket, endpoint, "bind", attach)


def _bind(socket: Socket, address: str) -> None:
    """Bind a socket, and register a TCP listener with the descriptor guard."""
    if not address.startswith("tcp://"):
        if address.startswith("ipc://"):
            _check_path(address.removeprefix("ipc://"))
        socket.bind(address)
        return
    monitor_socket = monitor(socket, zmq.EVENT_LISTENING)
    try:
        socket.bind(address)
        for _, fd, _ in events(monitor_socket):
            process.guard_listener(fd, socket)
    finally:
        end_monitor(socket, monitor_socket)


def _check_path(path: str) -> None:
    """Check that a path is free: ZeroMQ would remove any file at the path, also the socket of a running process.

    Raises:
        ZMQError: EADDRINUSE if a process listens there.
        ValueError: the path holds a file that is not a socket, or a socket that cannot be probed.
    """
    if path[:1] in ("@", "*"):  # an abstract name, which has no file; any free path
        return
    try:
        kind = os.lstat(path).st_mode
    except OSError:
        return  # the path is free, or ZeroMQ reports the error
    if not stat.S_ISSOCK(kind):
        raise ValueError(f"the file {path} exists and is not a socket; it was left unchanged")
    with _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        answer = probe.connect_ex(path)
    if answer in (0, errno.EAGAIN):  # EAGAIN: a process listens, and its backlog is full
        raise zmq.ZMQError(errno.EADDRINUSE)
    if answer not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ValueError(f"the socket at {path} cannot be probed for a process that listens: {os.strerror(answer)}")


def wait_unbound(endpoints: Iterable[str], seconds: float) -> None:
    """Wait until the socket files of closed ipc:// addresses are gone. ZeroMQ removes them in the background, and would
    remove the file of a process that binds the address in the meantime.
    """
    deadline = time.monotonic() + min(seconds, PATIENCE)
    for endpoint in endpoints:
        while endpoint.startswith("ipc://") and os.path.exists(endpoint[6:]) and time.monotonic() < deadline:
            time.sleep(0.002)


def connect(socket: Socket, endpoint: str) -> str:
    """Connect to a numeric address (`link.dial` takes names, too); returns at once, without a wait for the peer.

    Raises:
        EndpointError: the address is malformed; the socket is closed.
    """

    def attach(address: str) -> None:
        named = _CONNECTABLE.fullmatch(address)
        if named is not None and not addresses.is_numeric(named["host"]):
            raise ValueError("the host is a name, which has to be looked up first")
        socket.connect(address)

    return _attach(socket, endpoint, "connect to", attach)


USED = "a free address, or close what listens there, such as the server of a notebook's cell that ran before"
_CONNECTABLE = re.compile(r"tcp://(?:.*;)?(?P<host>[^\s\[\]*;:/@]+):\d+")


def _attach(socket: Socket, endpoint: str, action: str, attach: Callable[[str], object]) -> str:
    try:
        addresses.check(endpoint, action)
        attach(re.sub(r":0$", ":*", endpoint) if action == "bind" else endpoint)
        return _plain(listened_at(socket)) if action == "bind" else endpoint
    except EndpointError:
        socket.close(0)
        raise
    except (zmq.ZMQError, TypeError, UnicodeError, ValueError) as error:
        socket.close(0)
        if isinstance(error, zmq.ZMQError):
            reason = zmq.strerror(error.errno or 0)
            if error.errno == errno.ENAMETOOLONG:
                reason = "the path is longer than the 107 bytes of a Unix socket's address"
        else:
            reason = str(error)
        instead = USED if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise EndpointError(str(endpoint), action, reason, instead) from error


def _plain(endpoint: str) -> str:
    """Return an address as people write it: ZeroMQ reports IPv4 addresses of a dual-stack socket as IPv6."""
    return re.sub(r"^tcp://\[::ffff:([0-9.]+)\]:", r"tcp://\1:", endpoint).replace("tcp://[::]:", "tcp://*:")


EVENT = struct.Struct("=HI")
"""Layout of the first frame of a monitor's message: event and value. The last frame is the address."""
_monitors = itertools.count(1)


def monitor(socket: Socket, events: int) -> Socket:
    """Open a monitor: a socket that receives connection events of another. `end_monitor` closes it before the other."""
    address = f"inproc://memoire-monitor-{next(_monitors)}"
    socket.monitor(address, events)
    monitor_socket: Socket = socket.context.socket(zmq.PAIR)
    monitor_socket.setsockopt(zmq.LINGER, 0)
    # Without a high-water mark: at a mark, ZeroMQ's thread and each socket of the context would wait for room.
    monitor_socket.setsockopt(zmq.RCVHWM, 0)
    monitor_socket.connect(address)
    return monitor_socket


def events(monitor_socket: Socket) -> Iterator[tuple[int, int, str]]:
    """Yield the events that a monitor has received since the last call: event, value and address."""
    while True:
        try:
            frames = monitor_socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        event, value = EVENT.unpack(frames[0])
        yield event, value, frames[-1].decode("utf-8", "replace")


def end_monitor(socket: Socket, monitor_socket: Socket) -> None:
    """Stop and close a monitor of a socket."""
    # The monitor stops first: an event for a monitor whose socket is closed would stop ZeroMQ's own thread.
    if not socket.closed:
        socket.disable_monitor()
    monitor_socket.close(0)


def subscribed(socket: Socket, admits: Callable[[Socket, zmq.Frame], bool] = lambda socket, frame: True) -> list[bytes]:
    """Return the topics that peers have subscribed to since the last call, as the first bytes of their messages.

    Args:
        admits: Called with each subscription; False ignores it.
    """
    topics = []
    for _ in range(REQUEST_MESSAGES):
        frames = receive(socket, most=1)
        if frames is None:
            break
        data = frames[0].bytes
        # ZeroMQ itself reports a peer that has gone as unsubscribed, in a message that no peer has sent.
        if len(frames) == 1 and data[:1] == b"\x01" and admits(socket, frames[0]):
            topics.append(data[1:])
    return topics


def has_message(socket: Socket) -> bool:
    """Return True if a message has arrived: cheaper than a `receive` that returns None."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & READABLE)


def receive(socket: Socket, most: int = 8, *, wait: bool = False) -> list[zmq.Frame] | None:
    """Return the next whole message, a list of frames; None if no message came (`wait`: within the socket's RCVTIMEO).

    A message has at most `most` + 1 frames here: further ones are dropped, so that a parser sees that there are too
    many, but a peer cannot fill the memory with frames.
    """
    try:
        return _multipart.receive(socket, most, wait)
    except zmq.Again:
        return None


class SharedFrame:
    """Frame of a large payload that is sent to many peers, one after the other. The frame is made once, since ZeroMQ's
    thread reports the release of each frame to Python. For one thread.
    """

    def __init__(self) -> None:
        self._body: bytes = b""
        self._frame: zmq.Frame | None = None

    def share(self, payload: Any) -> Any:
        """Return the shared frame if the payload is a view of all of a large `bytes`, else the payload itself."""
        if not isinstance(payload, memoryview) or payload.nbytes < COPY_BELOW:
            return payload
        body = payload.obj
        if not isinstance(body, bytes) or len(body) != payload.nbytes:
            return payload
        if self._frame is None or body is not self._body:
            self._body, self._frame = body, zmq.Frame(payload, copy=False)
        return self._frame


def send(socket: Socket, frames: Sequence[Any]) -> bool:
    """Send a whole message without waiting, large frames without copying them; False if the socket has no room."""
    try:
        _multipart.send(socket, frames, COPY_BELOW)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        # A ROUTER's peer has gone: the message has no receiver.
        if error.errno == zmq.EHOSTUNREACH:
            return True
        raise
    return True
