"""Access control of listening sockets: authentication of peers by CURVE keys, and the sender of each message.

    peer ──CURVE──▶ ZeroMQ ──"is this key allowed?"──▶ one thread for each context ──▶ Gate of the node that listens
                       │
                       ▼ message, marked with the key ──▶ Gate.admit: still authorized? behind a proxy: for which peer?

ZeroMQ asks by its authentication protocol (rfc.zeromq.org/spec/27), inside of the process. Without an answer no peer
connects. ZeroMQ marks each message with its connection and key, on the first hop alone. The rights of a key are checked
at the first hop, and a proxy names the peer whose message it forwards (`roles.passport_frame`).

    frames ──▶ Gate: which key? ──▶ parse: which message? ──▶ may this key send it, for this client? ──▶ Message
                   └─────────────────────┴───────────────────────┴── ProtocolError ──▶ counted, logged, answered

A server parses messages and binds client ids to keys (`Admission`). A proxy only parses headers and forwards them.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as _socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import zmq

from memoire import _core
from memoire.errors import EndpointError, KeyFileError, ProtocolError
from memoire.limits import Limits
from memoire.security import access, roles
from memoire.security.access import Security
from memoire.security.keys import Keys
from memoire.security.roles import OPEN, ConnectionClients, EnvelopedRequest, Peer, split_envelope
from memoire.wire import messages, types
from memoire.wire.frames import Message, MessageHeader, parse, parse_header, refusal

from . import process, sockets
from .poller import ConnectionWatcher
from .sockets import Context, Socket
from .thread import Worker

_log = logging.getLogger(__name__)

KEYS_INTERVAL: Final = 1.0
"""Seconds between two checks of the keys folder for changes."""
WARNING_INTERVAL: Final = 30.0
"""Seconds between two log lines about peers that are refused for the same reason."""
LISTENING_ROLES: Final = frozenset({"proxy", "server", "inference"})
"""Roles of the keys that a node may listen with."""
VOUCHING_ROLES: Final = frozenset({"proxy", "server"})
"""Roles that may forward messages of other peers with a passport that names the sender."""
REASONS: Final = {
    "unknown": "the peer's key is not authorized here",
    "revoked": "the peer's key is no longer authorized here",
    "server_key": "the peer expects another key of this process",
    "plain": "the peer uses no keys",
    "protocol": "the peer does not speak ZeroMQ, or a version that is too old for keys",
    "silent": "the peer sent nothing until the handshake timed out",
    "role": "the role of the peer's key may not connect there, or not send this message",
    "owner": "the message is for a client id that belongs to another key",
    "passport": "the message names another sender, without a proxy's key",
}
"""Reason of a refusal, for log lines, by the code that counts it."""
SECOND_KEY: Final = 5.0
"""Seconds in which a peer that knows several server keys may try the next one before it counts as refused."""


class Gate:
    """Access control of one node's sockets: made and closed with the node. `admit` may be called from any thread.

    Args:
        context: Context of the node's sockets.
        keys: Keys of this process; None lets every peer in.
    """

    def __init__(self, context: Context, keys: Keys | None) -> None:
        self.keys = keys
        self.refused: Counter[str] = Counter()
        """Number of refused connections and messages, by the codes of `REASONS`."""
        self.hung_up = 0
        """Number of connections that the peer ended before it had shown a key."""
        self._lock = threading.Lock()  # guards the counts and times of log lines, which any thread changes
        self._logged_at: dict[str, float] = {}  # time of the newest log line, by code
        self._open: list[str] = []  # addresses without authentication
        self._guarded: set[Socket] = set()  # sockets with authentication
        self._peers: Mapping[str, Peer] = {}  # peers by public key in hex, as in messages
        self._former: set[str] = set()  # keys that were authorized earlier
        self._changes = -1  # value of `keys.changes` that `_peers` reflects
        self.came: dict[int, str] = {}
        """Key of each connection that has sent a message, by the connection's descriptor."""
        self._ports: set[int] = set()
        self._local = OPEN
        self._context = context
        self._authenticator: _Authenticator | None = None  # set by the first `bind` with keys
        self.on_hang_up: Callable[[int], None] = lambda descriptor: None
        """Callback for each ended connection of a guarded address, with its descriptor; runs in the socket's thread."""
        self.domain = ""
        """Name under which the authenticator knows this node."""
        if keys is not None:
            self._learn(keys)
            if keys.own.role == "proxy":
                self._local = Peer("actor", "local")  # a proxy's own key has almost no rights

    def bind(self, socket: Socket, endpoint: str, *, only: str = "") -> tuple[str, ConnectionWatcher | None]:
        """Bind a socket. If the node has keys and the address is TCP, peers must show an authorized key.

        Args:
            only: Role that a peer must have to connect; "" allows all roles.

        Returns:
            The address with its port, and the connection watcher that the socket's poller has to follow, or None.

        Raises:
            EndpointError: the address is in use or malformed, or something else authenticates peers in this context.
                The socket is closed.
            KeyFileError: this node's key is not one of a server, proxy or inference node, so it may not listen. The
                socket is closed.
        """
        if self.keys is None or not str(endpoint).startswith("tcp://"):
            self._open.append(sockets.bind(socket, endpoint))
            return self._open[-1], None
        key = self.keys.own
        if key.role not in LISTENING_ROLES:
            socket.close(0)
            advice = "A node that listens needs the key of a server, proxy or inference node."
            raise KeyFileError(str(self.keys.folder), f"has the key {key.peer.principal}, which may not listen", advice)
        assert key.secret is not None
        try:
            with _core.Held(self._lock):
                if self._authenticator is None:
                    self._authenticator = _authenticator_of(self._context)
                    self.domain = self._authenticator.register(self)
        except EndpointError:
            socket.close(0)
            raise
        sockets.ask_for_keys(socket, key.secret, f"{self.domain}:{only}")
        bound = sockets.bind(socket, endpoint)
        self._guarded.add(socket)
        self._ports.add(int(bound.rpartition(":")[2]))
        return bound, _GuardedAddress(self, socket)

    def admit(self, socket: Socket, frames: list[zmq.Frame], place: int) -> tuple[Peer, list[zmq.Frame]]:
        """Return the sender of a message, and the message without its passport.

        Args:
            frames: The message as received from the socket.
            place: Index of the passport's frame, if the message has one.

        Raises:
            ProtocolError: the message must not be accepted (codes "revoked", "passport").
        """
        peer, may_vouch = self._sender(socket, frames[-1])
        if len(frames) > place and roles.is_passport(frames[place]):
            if not may_vouch:
                raise ProtocolError("passport", f"the key {peer.name!r} may not send messages of other peers")
            return roles.read_passport(frames[place]), frames[:place] + frames[place + 1 :]
        return peer, frames

    def passport_frame(self, peer: Peer) -> list[bytes]:
        """Return the passport frame for a message that this process forwards for `peer`; [] if its role has none."""
        if self.keys is None or self.keys.own.role not in VOUCHING_ROLES:
            return []
        peer = peer if peer.role else self._local
        return [roles.passport_frame(peer)] if peer.role else []

    def _sender(self, socket: Socket, frame: zmq.Frame) -> tuple[Peer, bool]:
        if socket not in self._guarded:
            return OPEN, True
        key, descriptor = sockets.peer_address(frame)
        self.came[descriptor] = key
        peer = self._peers.get(key)
        if peer is None:
            self._cut(descriptor)
            raise ProtocolError("revoked", "its key is no longer authorized here")
        return peer, peer.role in VOUCHING_ROLES

    def admits(self, socket: Socket, frame: zmq.Frame) -> bool:
        """Return True if the sender of a subscription is authorized; else count a refusal and end its connection."""
        try:
            self._sender(socket, frame)
        except ProtocolError as error:
            self.refuse(error.code, error.detail)
            return False
        return True

    def refuse(self, reason: str, detail: str = "", count: int = 1) -> None:
        """Count a refusal, and log it every `WARNING_INTERVAL` seconds at most. Codes that `REASONS` lacks are ignored,
        since they are not about the sender.
        """
        if reason not in REASONS or not count:
            return
        now = time.monotonic()
        with _core.Held(self._lock):
            self.refused[reason] += count
            is_due = now - self._logged_at.get(reason, float("-inf")) > WARNING_INTERVAL
            if is_due:
                self._logged_at[reason] = now
        if is_due:
            suffix = f": {detail}" if detail else ""
            _log.warning("refused (%s, %d so far): %s%s", reason, self.refused[reason], REASONS[reason], suffix)

    def count_hang_up(self) -> None:
        """Count a connection that ended before it had shown a key."""
        with _core.Held(self._lock):
            self.hung_up += 1

    def security(self) -> Security:
        """Return the node's security status: open addresses reachable from other machines, and refusals so far."""
        open_addresses = tuple(access.reachable(self._open))
        return Security(self.keys is not None, open_addresses, dict(self.refused), self.hung_up)

    def problem(self) -> list[str]:
        """Return problems of the authenticator's thread, which keep new peers out, a sentence each; [] if none."""
        return [] if self._authenticator is None else self._authenticator.worker.problem()

    def reload_keys(self) -> None:
        """Reload changed keys from the folder, and end connections whose key is no longer authorized."""
        assert self.keys is not None
        if self._authenticator is not None:
            self._authenticator.revive()
        self.keys.refresh()
        if self.keys.changes == self._changes:
            return
        self._learn(self.keys)
        for descriptor, key in list(self.came.items()):
            if key not in self._peers:
                self.refuse("revoked", "its connection was cut")
                self._cut(descriptor)

    def _learn(self, keys: Keys) -> None:
        self._changes = keys.changes
        self._former |= set(self._peers)
        self._peers = {public.hex(): key.peer for public, key in keys.authorized.items()}

    def decide(self, public: bytes, only: str) -> str | None:
        """Return the mark for messages of a peer with this public key; None if the peer must be refused."""
        key = public.hex()
        peer = self._peers.get(key)
        if peer is not None and only in ("", peer.role):
            return key
        self.refuse("role" if peer is not None else "revoked" if key in self._former else "unknown")
        return None

    def _cut(self, descriptor: int) -> None:
        """End the connection of a descriptor.

        The descriptor may have been closed and reused. The gate checks a duplicate, which cannot change, and ends only
        connections to the node's ports: a listening socket that is shut down makes ZeroMQ abort.
        """
        self.came.pop(descriptor, None)
        try:
            copy = os.dup(descriptor)
        except OSError:
            return
        try:
            with _socket.socket(fileno=copy) as connection:
                copy = -1  # closed with the connection object
                name = connection.getsockname()
                listens = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_ACCEPTCONN)
                if isinstance(name, tuple) and name[1] in self._ports and not listens:
                    connection.shutdown(_socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.ENOTSOCK):
                _log.debug("a connection could not be cut: %s", error)
        finally:
            if copy >= 0:
                os.close(copy)

    def close(self) -> None:
        """Unregister the node from the authenticator. Call after its sockets were closed; may be called again."""
        authenticator, self._authenticator = self._authenticator, None
        if authenticator is not None:
            authenticator.unregister(self.domain)


_WANTED: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_LISTENING
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _GuardedAddress(ConnectionWatcher):
    """Watcher of one guarded address: counts peers that were refused, and binds again after a change of the own key."""

    def __init__(self, gate: Gate, socket: Socket) -> None:
        super().__init__(socket)
        assert gate.keys is not None
        self.watch(_WANTED)
        self._look_at = time.monotonic() + KEYS_INTERVAL
        self._gate, self._endpoint = gate, sockets.listened_at(socket)
        self._keys, self._own_key = gate.keys, gate.keys.own
        # ZeroMQ accepts a peer that is too old for keys, or has another protocol, and reports no outcome.
        self._accepted = self._settled = self._unexplained = 0
        self._handshakes: dict[int, float] = {}  # time of acceptance of connections in handshake, by descriptor
        self._wrong_keys: deque[float] = deque()  # times of handshakes with a wrong key: the peer may try another

    @property
    def due_at(self) -> float:
        return self._look_at

    def tick(self, now: float) -> None:
        self._look_at = now + KEYS_INTERVAL
        self._gate.reload_keys()
        if self._keys.own != self._own_key:
            self._rebind()
        window = 3.0 * sockets.HANDSHAKE_TIMEOUT + KEYS_INTERVAL
        known = self._gate.came
        recent = sum(now - since < window and fd not in known for fd, since in list(self._handshakes.items()))
        unexplained = self._accepted - self._settled - recent - self._unexplained
        if unexplained > 0:
            self._unexplained += unexplained
            self._gate.refuse("protocol", count=unexplained)
        while self._wrong_keys and now - self._wrong_keys[0] > SECOND_KEY:
            self._wrong_keys.popleft()
            self._gate.refuse("server_key")

    def handle_event(self, event: int, value: int, address: str) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._accepted += 1
            self._handshakes[value] = time.monotonic()
        elif event == zmq.EVENT_DISCONNECTED:
            self._handshakes.pop(value, None)
            self._gate.on_hang_up(value)
        elif event == zmq.EVENT_LISTENING:
            process.guard_listener(value, self._socket)
        else:
            self._settled += 1
            self._greeted(event, value)

    def _greeted(self, event: int, value: int) -> None:
        """Count the outcome of a handshake. Peers that are not authorized were counted in `Gate.decide`."""
        if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
            # ZeroMQ does not identify the peer: the peer may have dialled with a wrong key before.
            if self._wrong_keys:
                self._wrong_keys.popleft()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value != errno.EAGAIN:
            self._gate.count_hang_up()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._gate.refuse("silent")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == sockets.WRONG_KEY:
            self._wrong_keys.append(time.monotonic())
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._gate.refuse("plain" if value == sockets.OTHER_MECHANISM else "protocol")

    def _rebind(self) -> None:
        """Bind again with a new key. ZeroMQ ends the connections made with the old key; peers reconnect."""
        own_key = self._keys.own
        assert own_key.secret is not None
        try:
            sockets.rebind(self._socket, self._endpoint, own_key.secret)
        except EndpointError as error:
            _log.error("%s Trying again in %.0f s", error, KEYS_INTERVAL)
            return
        self._own_key = own_key
        _log.info("listening at %s with the key %s", self._endpoint, own_key.fingerprint)


# --------------------------------------------------------------------------------------------- ZeroMQ's questions


class _Authenticator:
    """Thread that answers ZeroMQ's authentication requests for all nodes of a context; it ends with the last node."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._gates: dict[bytes, Gate] = {}
        self._entered = 0
        self.worker = self._start()

    def _start(self) -> Worker:
        worker = Worker("memoire-authenticator", self._turn)
        try:
            self._socket = worker.poller.add(sockets.authenticator(self.context))
        except BaseException:
            worker.stop(0.0)
            raise
        worker.start()
        return worker

    def register(self, gate: Gate) -> str:
        """Register a node; returns the domain that the node's sockets have to name."""
        self._entered += 1
        domain = f"memoire-{self._entered}"
        self._gates[domain.encode()] = gate
        return domain

    def unregister(self, domain: str) -> None:
        """Unregister a node; the thread ends with the last one."""
        with _core.Held(_lock):
            self._gates.pop(domain.encode(), None)
            if not self._gates:
                _authenticators.pop(self.context.underlying, None)
                self.worker.stop(2.0)

    def revive(self) -> None:
        """Start the thread again if it has died; without it no new peer can connect."""
        with _core.Held(_lock):
            if not self.worker.is_alive and self._gates:
                _log.error("the authenticator's thread has died; starting it again")
                self.worker = self._start()

    def _turn(self, ready: dict[object, int]) -> None:
        while self._socket in ready:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            answer = self.answer(frames)
            if answer:
                self._socket.send_multipart(answer, zmq.NOBLOCK)

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """Return the reply to an authentication request, even a malformed one: without it the peer never connects."""
        if len(frames) < 4 or frames[1]:
            return []
        envelope, number = frames[:2], frames[3]
        mark, status, text = "", b"400", b"not authorized"
        try:
            _, _, domain, _, _, mechanism, *credentials = frames[2:]
            node, _, only = domain.partition(b":")
            gate = self._gates.get(node)
            if gate is not None and mechanism == b"CURVE" and len(credentials) == 1:
                mark = gate.decide(credentials[0], only.decode()) or ""
                if mark:
                    status, text = b"200", b"OK"
        except Exception:
            _log.exception("an authentication request could not be answered: the peer is refused")
            status, text = b"500", b"failed"
        return [*envelope, b"1.0", number, status, text, mark.encode(), b""]


_authenticators: dict[int, _Authenticator] = {}  # authenticators by the context's address
_lock = threading.RLock()


def _authenticator_of(context: Context) -> _Authenticator:
    with _core.Held(_lock):
        authenticator = _authenticators.get(context.underlying)
        if authenticator is None:
            authenticator = _authenticators[context.underlying] = _Authenticator(context)
        return authenticator


def _forget() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _authenticators.clear()


os.register_at_fork(after_in_child=_forget)


REQUEST_PLACE = 1
"""Index of the passport's frame in a request: after the address of the connection."""
PUSH_PLACE = 0
"""Index of the passport's frame in a pushed message."""
_MAX_TEXT = 1000  # characters of a refusal's reason that a peer is sent


class Admission:
    """Check of messages received at one node. One thread handles requests; any may call `receive_push`,
    `forwarded_frames` and `refuse`.

    Args:
        gate: Access control of the node's sockets.
        count: Counts a refusal by its code; called from any thread.
        own: Binds a client id to the key that uses it first. Raises ProtocolError (code "owner") if the id belongs to
            another key. Called from any thread.
    """

    def __init__(
        self,
        gate: Gate,
        limits: Limits,
        *,
        count: Callable[[ProtocolError], object],
        own: Callable[[bytes, str], None] = lambda client, principal: None,
    ) -> None:
        self._gate, self._limits, self._count, self._bind_client = gate, limits, count, own
        self._connections = ConnectionClients(limits.connection_clients, limits.tuning.connection_clients_rate)

    # Requests

    def receive_request(self, socket: Socket, frames: list[zmq.Frame]) -> EnvelopedRequest | None:
        """Return a received request with its sender; None if it was refused, without an answer to the peer."""
        received = len(frames)
        try:
            peer, frames = self._gate.admit(socket, frames, REQUEST_PLACE)
            parts = split_envelope(frames)
            if parts is None:
                raise ProtocolError("frames", "a request has an empty frame before its header")
        except ProtocolError as error:
            self.refuse(error)
            return None
        # A proxy adds a passport to a forwarded request, or without keys the address of its own connection.
        is_first = len(frames) == received and (len(parts.envelope) == 2 or peer is not OPEN)
        return EnvelopedRequest(peer, *parts, is_first)

    def parse(self, request: EnvelopedRequest, now: float) -> Message:
        """Parse and check a request to a server.

        Args:
            now: Seconds of a monotonic clock.

        Raises:
            ProtocolError: the request is malformed, its sender may not send it, or its connection has too many clients.
        """
        message = parse(request.message, self._limits)
        if request.peer is not OPEN:
            self._check_sender(request.peer, message)
        self._check_connection(request, message.header.client, now)
        return message

    def parse_header(self, request: EnvelopedRequest, now: float) -> MessageHeader:
        """Parse and check the header of a request to a proxy; the server behind it checks the body and client id."""
        header, _ = parse_header(request.message, self._limits)
        request.peer.check(header.type, header.table)
        self._check_connection(request, header.client, now)
        return header

    def _check_sender(self, peer: Peer, message: Message) -> None:
        """Raise ProtocolError if the peer's role may not send the message, or the client id belongs to another key."""
        peer.check(message.type, message.header.table)
        if isinstance(message.body, messages.Hello):
            peer.check_hello(message.body)
        self._bind_client(message.header.client, peer.principal)

    def _check_connection(self, request: EnvelopedRequest, client: bytes, now: float) -> None:
        if request.is_first:
            self._connections.check(bytes(request.envelope[0]), client, now)

    # Pushed messages

    def receive_push(self, socket: Socket, frames: list[zmq.Frame]) -> Message | None:
        """Return a pushed cache or episode, its payload not yet verified; None if it was refused."""
        try:
            peer, frames = self._gate.admit(socket, frames, PUSH_PLACE)
            message = parse(frames, self._limits, verify_payload=False)
            if peer is not OPEN:
                self._check_sender(peer, message)
            if not message.header.type.pushed:
                raise _not_pushed(message.header.type)
        except ProtocolError as error:
            self.refuse(error)
            return None
        return message

    def receive_push_header(
        self, socket: Socket, frames: list[zmq.Frame]
    ) -> tuple[MessageHeader, Peer, list[zmq.Frame]] | None:
        """Return header, sender and frames of a pushed message, as `receive_push` does, for proxies."""
        try:
            peer, frames = self._gate.admit(socket, frames, PUSH_PLACE)
            header, _ = parse_header(frames, self._limits)
            peer.check(header.type)
            if not header.type.pushed:
                raise _not_pushed(header.type)
        except ProtocolError as error:
            self.refuse(error)
            return None
        return header, peer, frames

    # Requests and pushed messages

    def forwarded_frames(self, socket: Socket, place: int, frames: list[zmq.Frame]) -> list[Any]:
        """Return the message as a plain proxy forwards it, with a passport if the node has keys; [] if it was refused.

        Args:
            place: Index of the passport's frame if the message comes from a proxy: `REQUEST_PLACE` or `PUSH_PLACE`.
        """
        try:
            peer, frames = self._gate.admit(socket, frames, place)
        except ProtocolError as error:
            self.refuse(error)
            return []
        return [*self._gate.passport_frame(peer), *frames]

    def refuse(self, error: ProtocolError) -> None:
        """Count a refusal; one that concerns the sender is logged every `WARNING_INTERVAL` seconds at most."""
        self._gate.refuse(error.code, error.detail)
        self._count(error)

    def refuse_request(self, request: EnvelopedRequest, error: ProtocolError) -> list[Any] | None:
        """Count a refusal; returns the frames of its answer, or None if the peer could not read them."""
        self.refuse(error)
        answer = refusal(request.message, messages.Refusal(code=error.code, text=error.detail[:_MAX_TEXT]))
        return None if answer is None else [*request.envelope, *answer]


def _not_pushed(kind: types.Type) -> ProtocolError:
    return ProtocolError("unexpected", f"{kind.name} was pushed; only caches and episodes may be pushed")
