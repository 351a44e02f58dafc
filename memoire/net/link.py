"""Link from a socket to its peer: name look-up, connection attempts to each address, connection state and CURVE keys.

    dial ──▶ name ──NameResolver──▶ addresses ──▶ socket.connect(the first)  attempt failed: the next address; after the
                ▲                                   │                        last one the name is looked up again
                └────── lost, or all failed ◀── monitor ──▶ connected        lost: the name is looked up again, too

ZeroMQ reports through a monitor, itself a socket, when a connection is established, ends, or fails. A link belongs to
the thread that owns the socket; methods for any thread say so.

`DialKeys` chooses the keys of a socket that dials: its own, and the key that it expects of the peer. The class
interprets refusals:

    dial with the key expected ──refused──▶ 400             this process' key is not authorized there: again, later
                                           hung up         the peer has another key: the next of server.pub
                                           no such greeting  one side uses keys, the other does not: again, later

ZeroMQ gives up after the first and the last, so the socket dials again later, with the keys of that time.
"""

from __future__ import annotations

import errno
import ipaddress
import random
import re
import time

import zmq

from memoire.errors import AuthError, EndpointError, KeyFileError
from memoire.security.keys import REREAD_INTERVAL, Keys

from . import addresses, sockets
from .addresses import LookupResult, NameResolver
from .poller import ConnectionWatcher, Poller
from .sockets import Socket

PAUSE, MAX_PAUSE = 0.2, 5.0
"""First and longest pause, in seconds, before a name is looked up again after all its addresses failed."""

_NAMED = re.compile(r"tcp://(?P<host>[^\s\[\]*;:/@]+):(?P<port>\d+)")
_WANTED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


REFUSED_PAUSE, MAX_REFUSED_PAUSE = 0.5, 8.0
"""First and longest pause, in seconds, before an address that refused this process is dialled again."""
ANYWHERE = ""
"""Newest key's place in `Keys.server_keys_by_address`: the next address is often another server of the same cluster."""


class DialKeys:
    """Keys of one socket that dials: its own key, and the key that it expects of the peer. For the socket's thread.

    Args:
        keys: Keys of this process.
        socket: The socket.
        endpoint: Address that is dialled, for errors.

    Raises:
        KeyFileError: the keys folder has no server.pub; the socket is closed.
    """

    def __init__(self, keys: Keys, socket: Socket, endpoint: str) -> None:
        if not keys.servers:
            socket.close(0)
            advice = "Copy own.pub of the servers or proxies that this process dials there, as server.pub."
            raise KeyFileError(str(keys.folder), f"has no server.pub to verify {endpoint}", advice)
        self.keys = keys
        self._socket, self._endpoint = socket, endpoint
        self._own_key, self._servers = keys.own, keys.servers
        self.expected = b""
        """Public key that the peer has to show."""
        self._address = ""
        self._wrong_keys: set[bytes] = set()  # keys that the peer does not have
        self._refusals = 0  # refusals since the newest successful handshake
        self._is_in_doubt = False  # the former key of this address has failed once
        self._dial_at = float("inf")
        self._refresh_at = time.monotonic() + REREAD_INTERVAL

    @property
    def due_at(self) -> float:
        """Time when `is_due` may become true, or changed keys are read."""
        return min(self._dial_at, self._refresh_at)

    @property
    def is_outdated(self) -> bool:
        """True if the process' keys have changed since the socket was given them."""
        return (self._own_key, self._servers) != (self.keys.own, self.keys.servers)

    def is_due(self, now: float) -> bool:
        """Return True if the socket has to dial again now; reads changed keys from time to time."""
        if now >= self._refresh_at:
            self.keys.refresh()
            self._refresh_at = now + REREAD_INTERVAL
        return now >= self._dial_at

    def apply(self, address: str) -> None:
        """Set the socket's own key and the peer's expected key, before it dials `address`. The expected key is that of
        the last connection to the address, its host or any address, or else the first of server.pub.
        """
        self._dial_at = float("inf")
        self._own_key, self._servers, self._address = self.keys.own, self.keys.servers, address
        known = [key.public for key in self._servers]
        recent = [self.keys.server_keys_by_address.get(place) for place in (address, _host(address), ANYWHERE)]
        order = [public for public in (*recent, *known) if public in known and public not in self._wrong_keys]
        self.expected = order[0] if order else known[0]
        assert self._own_key.secret is not None
        sockets.use_keys(self._socket, self._own_key.public, self._own_key.secret, self.expected)

    def record_success(self) -> None:
        """Record a successful handshake: the expected key is that of the address."""
        self._record_key()
        self._wrong_keys.clear()
        self._is_in_doubt = False
        self._refusals = 0
        self._dial_at = float("inf")

    def record_failure(self, event: int, value: int, now: float) -> AuthError | None:
        """Take a failed handshake; returns the error that explains the refusal, or None if the cause is unclear yet."""
        key = self._own_key
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._record_key()  # the peer could decrypt, so it has the expected key
            self._pause(now)
            reason = f"the key {key.peer.principal} {key.fingerprint} of this process is not authorized there"
            advice = "Authorize the key there with `memoire keys authorize FOLDER own.pub`."
            return AuthError(self._endpoint, reason, advice)
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == sockets.OTHER_MECHANISM:
            self._pause(now)
            advice = "Run the node there with keys, or this process without keys."
            return AuthError(self._endpoint, "the node uses no keys, so its identity cannot be verified", advice)
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or value == errno.EAGAIN:
            return None
        if self.expected == self.keys.server_keys_by_address.get(self._address) and not self._is_in_doubt:
            self._is_in_doubt = True  # a peer that starts or ends hangs up: ZeroMQ dials again
            return None
        self._wrong_keys.add(self.expected)
        if any(server.public not in self._wrong_keys for server in self.keys.servers):
            self._dial_at = now
            return None
        self._wrong_keys.clear()
        self._pause(now)
        shown = ", ".join(server.fingerprint for server in self._servers)
        advice = (
            "If the address is right, add the node's own.pub to server.pub; the node's log has the reason of a refusal."
        )
        return AuthError(
            self._endpoint, f"the node closed the connection, and has none of the keys in server.pub ({shown})", advice
        )

    def _record_key(self) -> None:
        """Remember the expected key as that of the address and its host."""
        for place in (self._address, _host(self._address), ANYWHERE):
            self.keys.server_keys_by_address[place] = self.expected

    def _pause(self, now: float) -> None:
        seconds = min(MAX_REFUSED_PAUSE, REFUSED_PAUSE * 2.0 ** min(self._refusals, 30))
        self._refusals += 1
        self._dial_at = now + seconds * random.uniform(0.5, 1.0)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


class Link(ConnectionWatcher):
    """Link of one socket to its peer, made by `dial`. The link's plain attributes may be read by any thread."""

    def __init__(
        self, poller: Poller, socket: Socket, endpoint: str, known: NameResolver, keys: Keys | None = None
    ) -> None:
        super().__init__(socket)
        self.endpoint = endpoint
        self.address = ""
        """Numeric address that the socket is connected to, or tries: `endpoint` with its name resolved; "" before."""
        self.is_connected = False
        """True if the socket is connected to a ZeroMQ peer; always False without a monitor."""
        self.connections = 0
        """Number of connections established so far."""
        self.lost_at = float("-inf")
        """Time at which the newest connection ended, by time.monotonic()."""
        self.failures = 0
        """Number of failed attempts since the newest connection."""
        self.stirred_at = time.monotonic()
        """Time of the newest event: an attempt, a connection, or the answer of a look-up."""
        self.has_given_up = False
        """True if ZeroMQ has stopped trying: a connection ended before the handshake, and no attempt followed. ZeroMQ
        stops if another service, with a socket of a kind that does not fit, had the address for a moment.
        """
        self.denied: AuthError | None = None
        """Error if the peer refuses this process' keys; None if it does not, or that is not known yet."""
        self._keys = DialKeys(keys, socket, endpoint) if keys is not None and endpoint.startswith("tcp://") else None
        self._name_at = float("inf")  # time of the next look-up of the name
        self._refusal = ""  # reason of the newest failed handshake, for advice
        self._poller, self._names = poller, known
        self._followers: dict[Socket, _FollowingSocket | None] = {}
        named = _NAMED.fullmatch(endpoint)
        self._host, self._port = ("", "") if named is None or addresses.is_numeric(named["host"]) else named.groups()
        self._addresses: tuple[str, ...] = ()  # addresses of the name, best first, in the form of `address`
        self._tried: set[str] = set()  # addresses that failed since the name was looked up
        self._rounds = 0  # number of look-ups of which all addresses failed
        self._is_asking = False

    @property
    def is_named(self) -> bool:
        """True if the endpoint has a host name that has to be looked up."""
        return bool(self._host)

    @property
    def is_down(self) -> bool:
        """True if the socket is known to have no connection now; False without a monitor."""
        return self.monitor is not None and not self.is_connected

    def add_socket(self, socket: Socket, *, watch: bool = False) -> Socket:
        """Connect another socket to this link's address, and to each later one; returns the socket.

        Args:
            watch: True if the caller uses `endings`.
        """
        is_watched = self._keys is not None or (watch and not self.endpoint.startswith("inproc://"))
        follower = self._followers[socket] = _FollowingSocket(self._keys, socket, self) if is_watched else None
        if follower is not None:
            self._poller.follow(socket, follower)
        if self.address:
            self._attach(socket, self.address)
        return socket

    def ended_connections(self, socket: Socket) -> int:
        """Return the number of ended connections of a joined and watched socket. Messages sent after this call reach a
        connection that ends later.
        """
        follower = self._followers.get(socket)
        if follower is None:
            return 0
        follower.read_events()
        return follower.endings

    @property
    def due_at(self) -> float:
        """Time when `tick` has something to do."""
        return self._name_at if self._keys is None else min(self._name_at, self._keys.due_at)

    @property
    def is_outdated(self) -> bool:
        """True if the keys have changed since the socket was dialled, so that it has to be replaced."""
        return self._keys is not None and self._keys.is_outdated

    def remove_socket(self, socket: Socket) -> None:
        """Forget a joined socket that is closed."""
        self._followers.pop(socket, None)

    def explain(self, probe: bool = True) -> str:
        """Return advice while no answer comes, in a sentence or two. Thread-safe.

        Args:
            probe: Try to connect, to find the reason if that fails; waits 0.2 s at most.
        """
        if self.is_connected:
            return (
                f"{self.address} is connected, but the process there hangs, was stopped, is overloaded, or is "
                f"a proxy whose servers are away. Try `memoire doctor {self.endpoint}`."
            )
        if self.denied is not None:
            return str(self.denied)
        if self._refusal and self.address:
            advice = f"Try `memoire doctor {self.endpoint}`."
            return f"Something accepts connections at {self.address}, but {self._refusal} {advice}"
        return addresses.why_unreachable(self.endpoint, self.address, known=self._names, probe=probe)

    # Methods that the poller calls

    def open(self, watch: bool) -> None:
        """Start to connect, or to look the name up first; with a monitor if `watch`, or if name or keys need one."""
        if (watch or self._host or self._keys is not None) and not self.endpoint.startswith("inproc://"):
            self.watch(_WANTED)
        if self._host:
            self._look_up()
        else:
            self._attach(self._socket, self.endpoint)
            self.address = self.endpoint

    def tick(self, now: float) -> None:
        """Look the name up again, or dial again with new keys, if either is due."""
        if now >= self._name_at:
            self._look_up()
        if self._keys is not None and self._keys.is_due(now) and self.address:
            self.dial_again(self._socket)

    def close(self) -> None:
        """Close the monitor, and stop look-ups."""
        self._name_at = float("inf")
        super().close()

    def handle_event(self, event: int, value: int, address: str) -> None:
        """Apply one event of the monitor."""
        if self._host and _normalized(address) != _normalized(self.address):
            return  # the event is of a former address
        self.stirred_at = time.monotonic()
        self.has_given_up = event == zmq.EVENT_DISCONNECTED and not self.is_connected
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_connected = True
            self.connections += 1
            self.failures = self._rounds = 0
            self._refusal = ""
            self._tried.clear()
            self._name_at = float("inf")
            self.denied = None
            if self._keys is not None:
                self._keys.record_success()
        elif event in _REFUSED:
            self._refused(event, value)
            self._refusal = _refusal(event, value)
            self._failed()
        elif event == zmq.EVENT_CLOSED:
            self._refusal = ""
            self._failed()
        elif self.has_given_up:
            # A peer of an unsuitable kind may hang up first. The failure of a former handshake is more precise.
            self._refusal = self._refusal or f"hangs up at once. {_OTHER_SERVICE}"
        elif event == zmq.EVENT_DISCONNECTED:
            self.is_connected, self.lost_at = False, self.stirred_at
            if self._host:
                self._look_up()

    def _refused(self, event: int, value: int) -> None:
        """Set `denied` if the failed handshake shows that the keys of both sides do not fit."""
        if self._keys is not None:
            self.denied = self._keys.record_failure(event, value, time.monotonic()) or self.denied
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == sockets.OTHER_MECHANISM:
            advice = "Give this process a keys folder: keys=, --keys or $MEMOIRE_KEYS."
            self.denied = AuthError(self.endpoint, "the node requires a key, and this process has none", advice)

    def _failed(self) -> None:
        """Count a failed attempt, and try the next address or pause; ZeroMQ retries the same address by itself."""
        self.is_connected = False
        self.failures += 1
        if not self._host or self._is_asking:
            return
        self._tried.add(self.address)
        untried = [address for address in self._addresses if address not in self._tried]
        if untried:
            self._move(untried[0])
        elif self._name_at == float("inf"):
            self._pause()

    def _pause(self) -> None:
        seconds = min(MAX_PAUSE, PAUSE * 2.0 ** min(self._rounds, 30))
        self._rounds += 1
        self._name_at = time.monotonic() + seconds * random.uniform(0.5, 1.0)

    def _look_up(self) -> None:
        self._name_at = float("inf")
        if not self._is_asking:
            self._is_asking = True
            self._names.ask(self._host, lambda result: self._poller.post(lambda: self._apply_lookup(result)))

    def _apply_lookup(self, result: LookupResult) -> None:
        self._is_asking = False
        if self._socket.closed:
            return
        self.stirred_at = time.monotonic()
        if not result.addresses:
            self._pause()
            return
        former, self._addresses = self.address, tuple(self._with_port(address) for address in result.addresses)
        self._tried &= set(self._addresses)
        has_failed = former in self._tried
        self._tried.clear()
        if former not in self._addresses:
            self._move(self._addresses[0])
        elif has_failed and len(self._addresses) > 1:
            self._tried.add(former)
            place = self._addresses.index(former) + 1
            self._move((self._addresses[place:] + self._addresses)[0])

    def _with_port(self, address: str) -> str:
        return f"tcp://[{address}]:{self._port}" if ":" in address else f"tcp://{address}:{self._port}"

    def _move(self, address: str) -> None:
        former, self.address = self.address, address
        if self.is_connected:
            self.is_connected, self.lost_at = False, time.monotonic()
        for socket in (self._socket, *self._followers):
            if former:
                self._leave_address(socket, former)
            self._attach(socket, address)

    def _attach(self, socket: Socket, address: str) -> None:
        keys = self._keys if socket is self._socket else getattr(self._followers.get(socket), "keys", None)
        if keys is not None:
            keys.apply(address)
        sockets.connect(socket, address)

    @staticmethod
    def _leave_address(socket: Socket, address: str) -> None:
        try:
            socket.disconnect(address)
        except zmq.ZMQError:
            pass  # ZeroMQ has disconnected by itself

    def dial_again(self, socket: Socket) -> None:
        """Disconnect and dial again with the link's socket or a joined one, since its keys may fit now."""
        if self.address:
            self._leave_address(socket, self.address)
            self._attach(socket, self.address)


_OTHER_PORT = "Is it the port for caches or notices? Requests go to the port below, or two below."
_OTHER_SERVICE = (
    "Is it another service, or the port for caches or notices? Requests go to the port below, or two below."
)


def _refusal(event: int, value: int) -> str:
    """Return a phrase on a failed handshake, from the monitor's event: what the peer did, and what it may be."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
        return "says nothing: it hangs, or is another service."
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == sockets.OTHER_KIND:
        return f"takes no requests. {_OTHER_PORT}"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # a socket of another kind may notice first
        return f"hangs up at once. {_OTHER_SERVICE}"
    return "does not speak ZeroMQ. Is it the address of a memoire node?"


class _FollowingSocket(ConnectionWatcher):
    """Watcher of a socket that joined a link; the peer may refuse it separately.

    Args:
        keys: Keys of the link's own socket; None connects without keys.
    """

    def __init__(self, keys: DialKeys | None, socket: Socket, link: Link) -> None:
        super().__init__(socket)
        self.keys = None if keys is None else DialKeys(keys.keys, socket, link.endpoint)
        self.endings = 0
        """Number of ended connections, as of the newest call of `read_events`."""
        self._link = link
        self.watch(_WANTED)

    @property
    def due_at(self) -> float:
        return float("inf") if self.keys is None else self.keys.due_at

    def tick(self, now: float) -> None:
        if self.keys is not None and self.keys.is_due(now):
            self._link.dial_again(self._socket)

    def handle_event(self, event: int, value: int, address: str) -> None:
        self.endings += event == zmq.EVENT_DISCONNECTED
        if self.keys is not None and event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.keys.record_success()
        elif self.keys is not None and event in _REFUSED:
            self.keys.record_failure(event, value, time.monotonic())


def _normalized(address: str) -> str:
    """Return an address in one spelling: ZeroMQ reports "10.0.0.7" as "[::ffff:10.0.0.7]"."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    number, _, scope = host.strip("[]").partition("%")
    try:
        ip = ipaddress.ip_address(number)
    except ValueError:
        return address
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return f"{mapped or ip}%{scope}:{port}"


def dial(
    poller: Poller,
    socket: Socket,
    endpoint: str,
    *,
    watch: bool = False,
    follow: bool = True,
    known: NameResolver | None = None,
    keys: Keys | None = None,
) -> Link:
    """Connect a socket of a poller to an address or name; returns its link at once, without a wait for the peer.

    Args:
        poller: Poller that owns the socket.
        watch: True if the caller needs the state of the connection; with a name or keys it is watched anyway.
        follow: False if the socket is added to the poller later, with `add(socket, way=link)`.
        known: Resolver of names; the process's own by default.
        keys: Keys of this process, for tcp:// addresses; None connects without keys.

    Raises:
        EndpointError: the address is malformed; the socket is closed.
        KeyFileError: the keys folder has no server.pub; the socket is closed.
    """
    try:
        addresses.check(endpoint, "connect to")
    except EndpointError:
        socket.close(0)
        raise
    link = Link(poller, socket, endpoint, known or addresses.shared_names(), keys)
    try:
        link.open(watch)
    except BaseException:
        link.close()
        raise
    if follow:
        poller.follow(socket, link)
    return link
