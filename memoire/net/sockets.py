"""Every ZeroMQ socket of memoire, made with one profile for each role; nothing else in the package sets a socket
option. The ZeroMQ context of this process, and what ZeroMQ tells about the connections of a socket.

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
    """pyzmq's, with a `send` that is compiled: what it has around that is for kinds of sockets that nobody has here."""

    send = zmq.backend.Socket.send  # type: ignore[assignment]


class _Context(zmq.Context[zmq.Socket[bytes]]):
    _socket_class = _Socket


_io_threads = 1  # of contexts that are made from now on
_contexts: dict[int, Context] = {}  # by process id: one at most that is ours
_context_lock = threading.Lock()


def _after_fork() -> None:
    global _context_lock  # noqa: PLW0603
    _context_lock = threading.Lock()  # another thread may have held it, which is not there any more


os.register_at_fork(after_in_child=_after_fork)


def shared_context() -> Context:
    """The one context of this process; a forked child gets a new one, since sockets do not survive a fork."""
    with _core.Held(_context_lock):
        context = _contexts.get(os.getpid())
        if context is None or context.closed:
            context = _contexts[os.getpid()] = _Context(_io_threads)
            context.set(zmq.MAX_SOCKETS, SOCKETS_PER_CONTEXT)
        return context


def use_io_threads(count: int) -> None:
    """Have the context of this process, which is not made yet, move and encrypt bytes on so many threads of ZeroMQ's.

    A connection belongs to one of them: more threads than connections bring nothing.
    """
    global _io_threads  # noqa: PLW0603
    if not 1 <= count <= MAX_IO_THREADS:
        raise ParameterError("--io-threads", count, f"a number from 1 to {MAX_IO_THREADS}")
    _io_threads = count


def library_version() -> str:
    """Version of libzmq."""
    return zmq.zmq_version()


READABLE = int(zmq.POLLIN)
"""A flag of `Poller.wait`: pyzmq's own is an enum, which costs a microsecond each time it is compared."""
DATA_MESSAGES = 2
"""High-water mark of sockets that carry caches, and least one: bytes bound memory, and ZeroMQ counts messages for each
connection and hop.
"""
DATA_BYTES = 2 << 20
MAX_DATA_MESSAGES = 64
"""What may queue where caches are small: each that finds nobody at work on the one before costs both ends a wake-up."""
REQUEST_MESSAGES = 256
"""High-water mark of request sockets; a proxy is one connection for all of its clients."""
NOTICE_MESSAGES = 256
"""High-water mark of notices, each at most a small model; a subscriber that is slower skips."""
SUBSCRIPTION_BYTES = 1024
"""Longest message to a publisher: a subscription, which is a topic."""
COPY_BELOW = 65536
"""Payloads up to this many bytes are copied when sent; from here on ZeroMQ reads them where they are."""
VANISHED_TIMEOUT = 15_000
"""Milliseconds without an acknowledgement after which a peer is gone."""
STALLED_TIMEOUT = 60_000
"""The same for data: a receiver that has no room acknowledges nothing either, and what is on the way to it is lost with
the connection."""
ENVELOPE = 10
"""Most frames of a request: addresses of the proxies it passed, an empty frame, header and payload."""
HANDSHAKE_TIMEOUT = 5.0
"""Seconds that somebody who has connected may take to say who he is."""
PATIENCE = 0.5
"""Seconds for which an address that is taken is tried again."""
RECEIVE_TIMEOUT = 0.05
"""Seconds that a thread with one socket waits inside of a receive: cheaper for each message than asking a poller
first.
"""
ANSWER_TIMEOUT = 0.002
"""The same of a thread that waits for an answer alone. Other threads that want its socket wait as long."""
DRAIN_TIMEOUT = 1.0
"""Seconds for which a socket for caches that is made anew, with new keys perhaps, goes on sending what it has."""
READ_AT_A_TIME, READ_AT_A_TIME_ENCRYPTED = 7, 40
"""Bytes that ZeroMQ reads into its buffer at a time, where it can be told: as many as the shortest PING has, so that
none lies there behind the end of a message that finds a queue full. Longer frames are read at once all the same.
"""


def request_server(context: Context, message_bytes: int) -> Socket:
    """ROUTER that takes requests and routes replies by the envelope in front of them; it refuses (EAGAIN) one whose
    connection has no room, where it would drop it in silence otherwise: see `lanes`.
    """
    made = _make(context, zmq.ROUTER, message_bytes, send=REQUEST_MESSAGES, receive=REQUEST_MESSAGES)
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return made


def request_client(context: Context, message_bytes: int) -> Socket:
    """DEALER that sends numbered requests; it refuses (EAGAIN) instead of queueing for a peer that is not there.
    `receive(wait=True)` gives up after `ANSWER_TIMEOUT` seconds.
    """
    made = _make(context, zmq.DEALER, message_bytes, send=REQUEST_MESSAGES, receive=REQUEST_MESSAGES, immediate=True)
    made.setsockopt(zmq.RCVTIMEO, int(ANSWER_TIMEOUT * 1000))
    return made


def data_mark(usual: int, message_bytes: int = 2 * DATA_BYTES) -> int:
    """How many caches of about so many bytes may queue on each side of a connection; 0 bytes: it is not known.

    Args:
        message_bytes: That a push may have at most.
    """
    messages = min(MAX_DATA_MESSAGES, min(DATA_BYTES, message_bytes // 2) // usual) if usual else 0
    return max(DATA_MESSAGES, messages)


def largest_push(usual: int, message_bytes: int) -> int:
    """Bytes of the largest push if a usual one has `usual`, at least four times as many: all that may queue for a
    connection, which ZeroMQ counts in messages, takes at most `DATA_MESSAGES` of `message_bytes`.
    """
    return DATA_MESSAGES * message_bytes // data_mark(usual, message_bytes)


def data_receiver(context: Context, message_bytes: int, queued: int = DATA_MESSAGES) -> Socket:
    """PULL for caches and episodes, so many for each connection; `receive(wait=True)` gives up after `RECEIVE_TIMEOUT`
    seconds.

    The mark stays as it is: where it is raised while a connection is full, ZeroMQ 4.3.5 may never tell the sender that
    there is room again.
    """
    made = _make(context, zmq.PULL, message_bytes, receive=queued)
    made.setsockopt(zmq.RCVTIMEO, int(RECEIVE_TIMEOUT * 1000))
    return made


def data_sender(context: Context, usual: int = 0) -> Socket:
    """PUSH that sends caches and episodes, of `usual` bytes, to a peer that is there; one that has no room for a while
    stays connected.
    """
    made = _make(context, zmq.PUSH, SUBSCRIPTION_BYTES, send=data_mark(usual), immediate=True)
    made.setsockopt(zmq.TCP_MAXRT, STALLED_TIMEOUT)
    return made


def publisher(context: Context) -> Socket:
    """XPUB for notices of models; it receives every subscription (see `subscribed`), also repeated ones."""
    made = _make(context, zmq.XPUB, SUBSCRIPTION_BYTES, send=NOTICE_MESSAGES, receive=REQUEST_MESSAGES)
    made.setsockopt(zmq.XPUB_VERBOSE, 1)
    return made


def subscriber(context: Context, message_bytes: int) -> Socket:
    """SUB for notices; topics are subscribed to afterwards, as many as `models.MAX_TOPICS`.

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
    bind(made, "inproc://zeromq.zap.01")
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
        return str(frame.get("User-Id")), descriptor_of(frame)
    except (zmq.ZMQError, ValueError):
        return "", -1


def descriptor_of(frame: zmq.Frame) -> int:
    """The descriptor of the connection that a message came by; -1 where ZeroMQ does not say."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


def listened_at(made: Socket) -> str:
    """The address that a socket was bound to last, as ZeroMQ spells it."""
    return made.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def rebind(made: Socket, endpoint: str, secret: bytes) -> None:
    """Listen at the same address with another key. This ends all present connections.

    Raises:
        EndpointError: the address could not be bound again. The socket stays open, but nobody can connect to it.
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
        zmq.HANDSHAKE_IVL: int(1000 * HANDSHAKE_TIMEOUT),
        zmq.CONNECT_TIMEOUT: 5000,
        # Spread in time, or all actors of a cluster dial a proxy that restarts in the same millisecond.
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
        for _, fd, _ in events(heard):
            process.guard_listener(fd, made)
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
        if named is not None and not addresses.is_numeric(named["host"]):
            raise ValueError("a name has to be looked up first")
        made.connect(address)

    return _attach(made, endpoint, "connect to", attach)


USED = "a free address, or close what listens there, such as the server of a notebook's cell that ran before"
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
        instead = USED if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise EndpointError(str(endpoint), action, reason, instead) from error


def _plain(endpoint: str) -> str:
    """An address as people write it: ZeroMQ reports IPv4 ones of a dual-stack socket as IPv6."""
    return re.sub(r"^tcp://\[::ffff:([0-9.]+)\]:", r"tcp://\1:", endpoint).replace("tcp://[::]:", "tcp://*:")


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


def has_message(made: Socket) -> bool:
    """Whether `receive` has something: cheaper than one that has nothing."""
    return bool(int(made.getsockopt(zmq.EVENTS)) & READABLE)


def receive(made: Socket, most: int = 8, *, wait: bool = False) -> list[zmq.Frame] | None:
    """The next whole message, frames as they arrived; None when there is none (`wait`: within the socket's RCVTIMEO).

    A peer decides how many frames there are, not how many we keep: beyond one more than `most` they are thrown away,
    so that a parser still sees one too many.
    """
    try:
        return _multipart.receive(made, most, wait)
    except zmq.Again:
        return None


class SharedFrame:
    """The frame of a large payload that goes to many peers, one after the other: made once, since ZeroMQ tells Python
    by a thread of its own when it has let go of each. For one thread.
    """

    def __init__(self) -> None:
        self._body: bytes = b""
        self._frame: zmq.Frame | None = None

    def of(self, payload: Any) -> Any:
        """What to send for a payload: a frame if it is a view of all of a large `bytes`, else the payload itself."""
        if not isinstance(payload, memoryview) or payload.nbytes < COPY_BELOW:
            return payload
        body = payload.obj
        if not isinstance(body, bytes) or len(body) != payload.nbytes:
            return payload
        if self._frame is None or body is not self._body:
            self._body, self._frame = body, zmq.Frame(payload, copy=False)
        return self._frame


def send(made: Socket, frames: Sequence[Any]) -> bool:
    """Send a whole message without waiting, large frames without copying them; False when there is no room for it."""
    try:
        _multipart.send(made, frames, COPY_BELOW)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        # A ROUTER whose peer has gone; nobody is left to tell.
        if error.errno == zmq.EHOSTUNREACH:
            return True
        raise
    return True
