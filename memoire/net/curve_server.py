"""Who is let in at the addresses of a process, and whose message each one is.

    peer ──CURVE──▶ ZeroMQ ──"may this key come in?"──▶ one thread for each context ──▶ Gate of the node it comes to
                       │
                       ▼ message, marked with the key ──▶ Gate.admit: still authorized? behind a proxy: whose is it?

ZeroMQ asks by its authentication protocol (rfc.zeromq.org/spec/27), inside of the process. Without an answer nobody
gets in. It marks each message with the connection and the key that it came by, on the first hop alone: so what a key
may do is decided there, and a proxy says whose message it passes on (`roles.passport`).

    frames ──▶ Gate: by whose key? ──▶ parse: what? ──▶ may this key send that, for this client? ──▶ Message
                   └──────────────────────┴────────────────┴── ProtocolError ──▶ counted, logged, answered

A server parses whole messages and binds client ids to keys (`Admission`). A proxy reads headers alone, and passes the
rest on.
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
from memoire.security.roles import OPEN, ConnectionClients, EnvelopedRequest, Peer, opened
from memoire.wire import messages, types
from memoire.wire.frames import Message, MessageHeader, parse, parse_header, refusal

from . import process, sockets
from .poller import ConnectionWatcher
from .sockets import Context, Socket
from .thread import Worker

_log = logging.getLogger(__name__)

KEYS_INTERVAL: Final = 1.0
"""Seconds between two looks at what keys there are."""
WARNING_INTERVAL: Final = 30.0
"""Seconds between two log lines about peers that are refused for the same reason."""
LISTENING_ROLES: Final = frozenset({"proxy", "server", "inference"})
"""Roles of the keys that a node may listen with."""
VOUCHING_ROLES: Final = frozenset({"proxy", "server"})
"""Roles that may say for whom they pass a message on, and to which others may come."""
REASONS: Final = {
    "unknown": "a key that is not authorized here",
    "revoked": "a key that is not authorized here any more",
    "server_key": "dialled with another key than this process' own, and with no other one afterwards",
    "plain": "no keys at all",
    "protocol": "no ZeroMQ, or one that is too old for keys",
    "silent": "said nothing for so long that its time to show a key was over",
    "role": "a message that its role may not send",
    "owner": "in the name of a client that belongs to another key",
    "passport": "in the name of somebody else, without a proxy's key",
}
"""Why a peer was refused, by the word that counts it."""
SECOND_KEY: Final = 5.0
"""Seconds in which a process that knows several keys of those it dials may try the next one."""


class Gate:
    """Who may come in at one node: made with it, closed with it. `admit` may be called from any of its threads.

    Args:
        context: Where its sockets are.
        keys: Of this process; None lets everybody in.

    """

    def __init__(self, context: Context, keys: Keys | None) -> None:
        self.keys = keys
        self.refused: Counter[str] = Counter()
        """Connections and messages that were refused, by one of `REASONS`."""
        self.hung_up = 0
        """Connections that ended by themselves before they had shown a key."""
        self._lock = threading.Lock()  # of what is counted and said, which any thread does
        self._said: dict[str, float] = {}
        self._open: list[str] = []  # addresses at which nobody is asked
        self._guarded: set[Socket] = set()
        self._peers: Mapping[str, Peer] = {}  # by public key in hex, as ZeroMQ marks messages
        self._former: set[str] = set()  # keys that were authorized once
        self._changes = -1  # of the keys, that `_peers` has
        self.came: dict[int, str] = {}
        """Whose key a connection has, by its descriptor, once it has sent a message."""
        self._ports: set[int] = set()
        self._local = OPEN
        self._context = context
        self._authenticator: _Authenticator | None = None  # since something was bound
        self.on_hang_up: Callable[[int], None] = lambda descriptor: None
        """Told of each connection of a guarded address that has ended, in the thread of its socket."""
        self.domain = ""
        """By which the authenticator knows this node."""
        if keys is not None:
            self._learn(keys)
            if keys.own.role == "proxy":
                self._local = Peer("actor", "local")  # a proxy's own key may do next to nothing

    def bind(self, made: Socket, endpoint: str, *, only: str = "") -> tuple[str, ConnectionWatcher | None]:
        """Bind a socket. If the node has keys and the address is TCP, peers have to show theirs.

        Args:
            only: The only role that may connect there; "" allows all.

        Returns:
            The address with its port, and the watcher that the owner of the socket has to follow, if there is one.

        Raises:
            EndpointError: the address is in use or malformed, or something else authenticates peers in this context.
                The socket is closed.
            KeyFileError: this node's key is not one of a server, proxy or inference node, so it may not listen. The
                socket is closed.
        """
        if self.keys is None or not str(endpoint).startswith("tcp://"):
            self._open.append(sockets.bind(made, endpoint))
            return self._open[-1], None
        own = self.keys.own
        if own.role not in LISTENING_ROLES:
            made.close(0)
            advice = "Listen with a key that was made for a server, proxy or inference node."
            raise KeyFileError(str(self.keys.folder), f"has the key of one who dials ({own.peer.principal})", advice)
        assert own.secret is not None
        try:
            with _core.Held(self._lock):
                if self._authenticator is None:
                    self._authenticator = _authenticator_of(self._context)
                    self.domain = self._authenticator.enter(self)
        except EndpointError:
            made.close(0)
            raise
        sockets.ask_for_keys(made, own.secret, f"{self.domain}:{only}")
        bound = sockets.bind(made, endpoint)
        self._guarded.add(made)
        self._ports.add(int(bound.rpartition(":")[2]))
        return bound, _GuardedAddress(self, made)

    def admit(self, made: Socket, frames: list[zmq.Frame], place: int) -> tuple[Peer, list[zmq.Frame]]:
        """Who sent a message, and the message without its passport.

        Args:
            frames: As received from `made`.
            place: Where a passport stands, if there is one.

        Raises:
            ProtocolError: (codes "revoked", "passport") it is not to be taken.
        """
        peer, may_vouch = self._sender(made, frames[-1])
        if len(frames) > place and roles.is_passport(frames[place]):
            if not may_vouch:
                raise ProtocolError("passport", f"the key {peer.name!r} may speak for nobody else")
            return roles.read_passport(frames[place]), frames[:place] + frames[place + 1 :]
        return peer, frames

    def passport(self, peer: Peer) -> list[bytes]:
        """The frame that goes in front of what this process passes on for `peer`: none where it has no such say."""
        if self.keys is None or self.keys.own.role not in VOUCHING_ROLES:
            return []
        peer = peer if peer.role else self._local
        return [roles.passport(peer)] if peer.role else []

    def _sender(self, made: Socket, frame: zmq.Frame) -> tuple[Peer, bool]:
        if made not in self._guarded:
            return OPEN, True
        key, descriptor = sockets.origin(frame)
        self.came[descriptor] = key
        peer = self._peers.get(key)
        if peer is None:
            self._cut(descriptor)
            raise ProtocolError("revoked", "its key is not authorized here any more")
        return peer, peer.role in VOUCHING_ROLES

    def admits(self, made: Socket, frame: zmq.Frame) -> bool:
        """Whether a subscription comes from who may be here; who may not is cut off and counted."""
        try:
            self._sender(made, frame)
        except ProtocolError as error:
            self.refuse(error.code, error.detail)
            return False
        return True

    def refuse(self, reason: str, detail: str = "", count: int = 1) -> None:
        """Count somebody who was refused, and say so now and then. Codes beyond `REASONS` are not about who it is."""
        if reason not in REASONS or not count:
            return
        now = time.monotonic()
        with _core.Held(self._lock):
            self.refused[reason] += count
            is_due = now - self._said.get(reason, float("-inf")) > WARNING_INTERVAL
            if is_due:
                self._said[reason] = now
        if is_due:
            more = f": {detail}" if detail else ""
            _log.warning("refused (%s, %d so far): %s%s", reason, self.refused[reason], REASONS[reason], more)

    def count_hang_up(self) -> None:
        """Count a connection that ended before it had shown a key."""
        with _core.Held(self._lock):
            self.hung_up += 1

    def security(self) -> Security:
        """How it stands now."""
        places = tuple(access.reachable(self._open))
        return Security(self.keys is not None, places, dict(self.refused), self.hung_up)

    def trouble(self) -> list[str]:
        """Why nobody new may get in, a sentence each."""
        return [] if self._authenticator is None else self._authenticator.worker.trouble()

    def look(self) -> None:
        """Take up what has changed in the keys folder, and cut off whose key is gone."""
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
        """How ZeroMQ is to mark messages of who shows this key; None sends him away."""
        key = public.hex()
        peer = self._peers.get(key)
        if peer is not None and only in ("", peer.role):
            return key
        self.refuse("role" if peer is not None else "revoked" if key in self._former else "unknown")
        return None

    def _cut(self, descriptor: int) -> None:
        """End a connection.

        Its descriptor may be somebody else's by now. So a copy is looked at, which stays what it is, and only a
        connection to one of our ports is ended: a listening socket that is shut down makes ZeroMQ abort.
        """
        self.came.pop(descriptor, None)
        try:
            copy = os.dup(descriptor)
        except OSError:
            return
        try:
            with _socket.socket(fileno=copy) as connection:
                copy = -1  # closed with it
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
        """Nobody comes in any more. After the sockets were closed; may be called again."""
        authenticator, self._authenticator = self._authenticator, None
        if authenticator is not None:
            authenticator.leave(self.domain)


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
    """One guarded address: counts peers that failed to get in, and follows its own key."""

    def __init__(self, gate: Gate, made: Socket) -> None:
        super().__init__(made)
        assert gate.keys is not None
        self.watch(_WANTED)
        self._look_at = time.monotonic() + KEYS_INTERVAL
        self._gate, self._endpoint = gate, sockets.listened_at(made)
        self._keys, self._own = gate.keys, gate.keys.own
        # ZeroMQ tells of no reason where a peer is too old for keys, or none at all: of what was accepted, the rest.
        self._accepted = self._settled = self._silently = 0
        self._shaking: dict[int, float] = {}  # connections by descriptor, and since when they are there
        self._strays: deque[float] = deque()  # when somebody dialled with another key, and may try his next one

    @property
    def look_at(self) -> float:
        return self._look_at

    def turn(self, now: float) -> None:
        self._look_at = now + KEYS_INTERVAL
        self._gate.look()
        if self._keys.own != self._own:
            self._rebind()
        window = 3.0 * sockets.HANDSHAKE_TIMEOUT + KEYS_INTERVAL
        known = self._gate.came
        recent = sum(now - since < window and fd not in known for fd, since in list(self._shaking.items()))
        unexplained = self._accepted - self._settled - recent - self._silently
        if unexplained > 0:
            self._silently += unexplained
            self._gate.refuse("protocol", count=unexplained)
        while self._strays and now - self._strays[0] > SECOND_KEY:
            self._strays.popleft()
            self._gate.refuse("server_key")

    def happened(self, event: int, value: int, address: str) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._accepted += 1
            self._shaking[value] = time.monotonic()
        elif event == zmq.EVENT_DISCONNECTED:
            self._shaking.pop(value, None)
            self._gate.on_hang_up(value)
        elif event == zmq.EVENT_LISTENING:
            process.guard_listener(value, self._made)
        else:
            self._settled += 1
            self._greeted(event, value)

    def _greeted(self, event: int, value: int) -> None:
        """A handshake is over. Peers that are not authorized were counted where that was decided."""
        if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
            # ZeroMQ does not say who it is: one of those who dialled with another key, as far as anybody can tell.
            if self._strays:
                self._strays.popleft()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value != errno.EAGAIN:
            self._gate.count_hang_up()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._gate.refuse("silent")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == sockets.WRONG_KEY:
            self._strays.append(time.monotonic())
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._gate.refuse("plain" if value == sockets.OTHER_MECHANISM else "protocol")

    def _rebind(self) -> None:
        """Listen with a new key. ZeroMQ ends the connections that came by the old one: they come again."""
        own = self._keys.own
        assert own.secret is not None
        try:
            sockets.rebind(self._made, self._endpoint, own.secret)
        except EndpointError as error:
            _log.error("%s; trying again", error)
            return
        self._own = own
        _log.info("%s is listened at with the key %s", self._endpoint, own.fingerprint)


# --------------------------------------------------------------------------------------------- ZeroMQ's questions


class _Authenticator:
    """Answers for all nodes of a context, in a thread of its own, for as long as there is one."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._gates: dict[bytes, Gate] = {}
        self._entered = 0
        self.worker = self._start()

    def _start(self) -> Worker:
        worker = Worker("memoire-authenticator", self._turn)
        try:
            self._socket = worker.doors.add(sockets.authenticator(self.context))
        except BaseException:
            worker.stop(0.0)
            raise
        worker.start()
        return worker

    def enter(self, gate: Gate) -> str:
        """Answer for this node from now on; the domain that its sockets have to name."""
        self._entered += 1
        domain = f"memoire-{self._entered}"
        self._gates[domain.encode()] = gate
        return domain

    def leave(self, domain: str) -> None:
        """Answer for this node no more."""
        with _core.Held(_lock):
            self._gates.pop(domain.encode(), None)
            if not self._gates:
                _authenticators.pop(self.context.underlying, None)
                self.worker.stop(2.0)

    def revive(self) -> None:
        """Start the thread again if it has died; until then no new peer gets in."""
        with _core.Held(_lock):
            if not self.worker.is_alive and self._gates:
                _log.error("the thread that decides who is let in has died; it is started again")
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
        """The reply to a question, whatever it is: a question without one keeps its peer waiting for ever."""
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
            _log.exception("a question of who may come in could not be answered: nobody is let in")
            status, text = b"500", b"failed"
        return [*envelope, b"1.0", number, status, text, mark.encode(), b""]


_authenticators: dict[int, _Authenticator] = {}  # by address of the context
_lock = threading.RLock()


def _authenticator_of(context: Context) -> _Authenticator:
    with _core.Held(_lock):
        found = _authenticators.get(context.underlying)
        if found is None:
            found = _authenticators[context.underlying] = _Authenticator(context)
        return found


def _forget() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _authenticators.clear()


os.register_at_fork(after_in_child=_forget)


REQUEST_PLACE = 1
"""Where a request has its passport: behind the address of the connection that it came by."""
PUSH_PLACE = 0
"""Where a pushed message has it."""
_MAX_TEXT = 1000  # characters that tell a peer why it was refused


class Admission:
    """Lets messages in at one node. Requests belong to one thread; `receive_push`, `pass_on` and `refuse` to any.

    Args:
        gate: Knows the keys.
        count: Counts a refusal by its code; from any thread.
        own: Binds a client's id to the key that uses it first. Raises ProtocolError (code "owner") if it belongs to
            another one. From any thread.
    """

    def __init__(
        self,
        gate: Gate,
        limits: Limits,
        *,
        count: Callable[[ProtocolError], object],
        own: Callable[[bytes, str], None] = lambda client, principal: None,
    ) -> None:
        self._gate, self._limits, self._count, self._own = gate, limits, count, own
        self._connections = ConnectionClients(limits.connection_clients, limits.tuning.connection_clients_rate)

    # Requests

    def receive_request(self, made: Socket, frames: list[zmq.Frame]) -> EnvelopedRequest | None:
        """Whose request came in by this socket; None if it was refused and nobody could be told."""
        received = len(frames)
        try:
            peer, frames = self._gate.admit(made, frames, REQUEST_PLACE)
            parts = opened(frames)
            if parts is None:
                raise ProtocolError("frames", "a request has an empty frame before its header")
        except ProtocolError as error:
            self.refuse(error)
            return None
        # A proxy that has let it in shows its passport, or its own address where nobody has keys.
        is_first = len(frames) == received and (len(parts.envelope) == 2 or peer is not OPEN)
        return EnvelopedRequest(peer, *parts, is_first)

    def parse(self, request: EnvelopedRequest, now: float) -> Message:
        """What a server was asked.

        Args:
            now: Seconds, by a clock that only goes on.

        Raises:
            ProtocolError: it cannot be read, its sender may not send it, or too many clients came by its connection.
        """
        message = parse(request.message, self._limits)
        if request.peer is not OPEN:
            self._check_sender(request.peer, message)
        self._check_connection(request, message.header.client, now)
        return message

    def parse_header(self, request: EnvelopedRequest, now: float) -> MessageHeader:
        """The header of a request to a proxy; the server behind it checks the body, and whose client it is."""
        header, _ = parse_header(request.message, self._limits)
        request.peer.check(header.type, header.table)
        self._check_connection(request, header.client, now)
        return header

    def _check_sender(self, peer: Peer, message: Message) -> None:
        """Raise ProtocolError if this peer may not send this, by its role or in the name of this client."""
        peer.check(message.type, message.header.table)
        if isinstance(message.body, messages.Hello):
            peer.check_hello(message.body)
        self._own(message.header.client, peer.principal)

    def _check_connection(self, request: EnvelopedRequest, client: bytes, now: float) -> None:
        if request.is_first:
            self._connections.check(bytes(request.envelope[0]), client, now)

    # Pushed messages

    def receive_push(self, made: Socket, frames: list[zmq.Frame]) -> Message | None:
        """The cache or episode that came in by this socket, its payload not yet verified; None if it was refused."""
        try:
            peer, frames = self._gate.admit(made, frames, PUSH_PLACE)
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
        self, made: Socket, frames: list[zmq.Frame]
    ) -> tuple[MessageHeader, Peer, list[zmq.Frame]] | None:
        """As `receive_push`, for proxies: what the message says of itself, whose it is, and all of its frames."""
        try:
            peer, frames = self._gate.admit(made, frames, PUSH_PLACE)
            header, _ = parse_header(frames, self._limits)
            peer.check(header.type)
            if not header.type.pushed:
                raise _not_pushed(header.type)
        except ProtocolError as error:
            self.refuse(error)
            return None
        return header, peer, frames

    # Whatever came in

    def pass_on(self, made: Socket, place: int, frames: list[zmq.Frame]) -> list[Any]:
        """A message as a plain proxy hands it on, with whose it is where there are keys; empty if it was refused.

        Args:
            place: Where it has its passport if it comes from a proxy: `REQUEST_PLACE` or `PUSH_PLACE`.
        """
        try:
            peer, frames = self._gate.admit(made, frames, place)
        except ProtocolError as error:
            self.refuse(error)
            return []
        return [*self._gate.passport(peer), *frames]

    def refuse(self, error: ProtocolError) -> None:
        """Count a refusal. Those that are about who sent a message are logged now and then."""
        self._gate.refuse(error.code, error.detail)
        self._count(error)

    def refuse_request(self, request: EnvelopedRequest, error: ProtocolError) -> list[Any] | None:
        """Count a refusal; returns the frames that say it, or None if whoever asked could not read them."""
        self.refuse(error)
        answer = refusal(request.message, messages.Refused(code=error.code, text=error.detail[:_MAX_TEXT]))
        return None if answer is None else [*request.envelope, *answer]


def _not_pushed(kind: types.Type) -> ProtocolError:
    return ProtocolError("unexpected", f"{kind.name} was pushed; caches and episodes are taken here")
