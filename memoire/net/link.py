"""The way from a socket to its peer: a name looked up, its addresses tried in turn, and what the connection does.

    dial ──▶ name ──names.py──▶ addresses ──▶ socket.connect(the first)      attempt failed: the next address; after the
                ▲                                   │                        last one the name is looked up anew
                └────── lost, or all failed ◀── monitor ──▶ connected        lost: look the name up, go where it is now

ZeroMQ tells through a monitor, itself a socket, when a connection comes about, ends, or fails. Everything here belongs
to the thread that owns the socket, except where it says otherwise.

`Shown` is the keys that one socket shows to whom it dials: which of the other side's keys it expects, and what a
refusal means.

    dial with the key expected ──refused──▶ 400             this process' key is not authorized there: again, later
                                           hung up         the other side has another key: the next of server.pub
                                           no such greeting  one side uses keys, the other none: again, later

ZeroMQ gives up after the first and the last, so the socket is dialled anew, with the keys as they are then.
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
"""Seconds before a name is looked up again after all its addresses failed: the first time, and at most."""

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
"""Seconds before an address is dialled again that did not let this process in: the first time, and at most."""
ANYWHERE = ""
"""Where `Keys.met` has the key that was found last: the next address is often another server of the same cluster."""


class Shown:
    """Belongs to the thread that owns the socket.

    Args:
        keys: Of this process.
        made: The socket; ended together with this.
        endpoint: For messages.

    Raises:
        KeyFileError: nobody has said which keys the other side may have.
    """

    def __init__(self, keys: Keys, made: Socket, endpoint: str) -> None:
        if not keys.servers:
            made.close(0)
            advice = "Put own.pub of the servers or proxies that this process dials there, as server.pub."
            raise KeyFileError(str(keys.folder), f"has no server.pub to know {endpoint} by", advice)
        self.keys = keys
        self._made, self._endpoint = made, endpoint
        self._own, self._servers = keys.own, keys.servers
        self.expected = b""
        """The key that the other side has to show."""
        self._address = ""
        self._wrong: set[bytes] = set()  # keys that the other side does not have
        self._refusals = 0  # since it was let in last
        self._is_in_doubt = False  # whether the key that was found there before has failed once
        self._dial_at = float("inf")
        self._refresh_at = time.monotonic() + REREAD_INTERVAL

    @property
    def look_at(self) -> float:
        """When `is_due` may become true, or the keys may have changed."""
        return min(self._dial_at, self._refresh_at)

    @property
    def is_outdated(self) -> bool:
        """Whether this process has other keys now than it showed."""
        return (self._own, self._servers) != (self.keys.own, self.keys.servers)

    def is_due(self, now: float) -> bool:
        """Whether to dial anew now."""
        if now >= self._refresh_at:
            self.keys.refresh()
            self._refresh_at = now + REREAD_INTERVAL
        return now >= self._dial_at

    def apply(self, address: str) -> None:
        """Have the socket show this process' key at the address, and expect one of those that the other side may have:
        the one that was found there the last time, or else the one that was found anywhere last, or the first.
        """
        self._dial_at = float("inf")
        self._own, self._servers, self._address = self.keys.own, self.keys.servers, address
        known = [key.public for key in self._servers]
        met = [self.keys.met.get(place) for place in (address, _host(address), ANYWHERE)]
        order = [public for public in (*met, *known) if public in known and public not in self._wrong]
        self.expected = order[0] if order else known[0]
        assert self._own.secret is not None
        sockets.use_keys(self._made, self._own.public, self._own.secret, self.expected)

    def succeeded(self) -> None:
        """The other side let this process in."""
        self._found()
        self._wrong.clear()
        self._is_in_doubt = False
        self._refusals = 0
        self._dial_at = float("inf")

    def failed(self, event: int, value: int, now: float) -> AuthError | None:
        """A handshake failed; why this process is not let in, where that is known by now."""
        own = self._own
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._found()  # it could read what was said to this key
            self._pause(now)
            reason = f"it does not know the key {own.peer.principal} {own.fingerprint} of this process (any more)"
            return AuthError(self._endpoint, reason, "There: `memoire keys authorize FOLDER own.pub`.")
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == sockets.OTHER_MECHANISM:
            self._pause(now)
            advice = "Give the process there keys, or this one none."
            return AuthError(self._endpoint, "it asks for no key, so nobody knows who it is", advice)
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or value == errno.EAGAIN:
            return None
        if self.expected == self.keys.met.get(self._address) and not self._is_in_doubt:
            self._is_in_doubt = True  # a process that begins or ends hangs up, too: ZeroMQ dials it again
            return None
        self._wrong.add(self.expected)
        if any(key.public not in self._wrong for key in self.keys.servers):
            self._dial_at = now
            return None
        self._wrong.clear()
        self._pause(now)
        shown = ", ".join(key.fingerprint for key in self._servers)
        advice = "Put its own.pub there, if it is who it should be; or see in its log why it lets nobody in."
        return AuthError(
            self._endpoint, f"it ends the connection: it has none of the keys in server.pub ({shown})", advice
        )

    def _found(self) -> None:
        """The other side has the key that is expected of it."""
        self.keys.met |= dict.fromkeys((self._address, _host(self._address), ANYWHERE), self.expected)

    def _pause(self, now: float) -> None:
        seconds = min(MAX_REFUSED_PAUSE, REFUSED_PAUSE * 2.0 ** min(self._refusals, 30))
        self._refusals += 1
        self._dial_at = now + seconds * random.uniform(0.5, 1.0)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


class Link(ConnectionWatcher):
    """One socket's connection, made by `dial`. Plain attributes may be read from any thread."""

    def __init__(
        self, doors: Poller, made: Socket, endpoint: str, known: NameResolver, keys: Keys | None = None
    ) -> None:
        super().__init__(made)
        self.endpoint = endpoint
        self.address = ""
        """Where it is connected to, or tries to: `endpoint` with an address for its name; "" until that is known."""
        self.is_connected = False
        """Whether a peer that speaks ZeroMQ is there; always False where nobody listens to the monitor."""
        self.connections = 0
        """How often a connection came about."""
        self.lost_at = float("-inf")
        """When the newest one of them ended, by time.monotonic()."""
        self.failures = 0
        """Attempts that failed since the last connection."""
        self.stirred_at = time.monotonic()
        """When anything was heard of it last: an attempt, a connection, an answer about its name."""
        self.has_given_up = False
        """Whether ZeroMQ tries no more: a connection ended before both had greeted each other, and none was tried
        since. So it is where the address was for a moment somebody else's, of a kind of socket that does not fit.
        """
        self.denied: AuthError | None = None
        """Why this process is not let in there; None while it is, or while nobody knows."""
        self._shown = Shown(keys, made, endpoint) if keys is not None and endpoint.startswith("tcp://") else None
        self._name_at = float("inf")  # when the name is to be looked up again
        self._refusal = ""  # why the newest handshake failed
        self._doors, self._names = doors, known
        self._followers: dict[Socket, _FollowingSocket | None] = {}
        named = _NAMED.fullmatch(endpoint)
        self._host, self._port = ("", "") if named is None or addresses.is_numeric(named["host"]) else named.groups()
        self._addresses: tuple[str, ...] = ()  # of the name, best first, as `address` is written
        self._tried: set[str] = set()  # those that failed since the name was looked up
        self._rounds = 0  # times that all of them did
        self._is_asking = False

    @property
    def is_named(self) -> bool:
        """Whether there is a name to look up."""
        return bool(self._host)

    @property
    def is_down(self) -> bool:
        """Whether there is surely no connection now. False where that cannot be known."""
        return self.monitor is not None and not self.is_connected

    def join(self, made: Socket, *, watch: bool = False) -> Socket:
        """Connect another socket to wherever this link leads, from now on.

        Args:
            watch: Whether somebody wants to know of its `endings`.
        """
        is_watched = self._shown is not None or (watch and not self.endpoint.startswith("inproc://"))
        follower = self._followers[made] = _FollowingSocket(self._shown, made, self) if is_watched else None
        if follower is not None:
            self._doors.follow(made, follower)
        if self.address:
            self._attach(made, self.address)
        return made

    def endings(self, made: Socket) -> int:
        """How many connections of a socket that was joined, and is watched, have ended until now. Whatever it sends
        after that comes to a connection that ends later.
        """
        follower = self._followers.get(made)
        if follower is None:
            return 0
        follower.heard()
        return follower.endings

    @property
    def look_at(self) -> float:
        """When `turn` has something to do."""
        return self._name_at if self._shown is None else min(self._name_at, self._shown.look_at)

    @property
    def is_outdated(self) -> bool:
        """Whether the keys have changed since it was dialled: a socket that is made anew shows the new ones."""
        return self._shown is not None and self._shown.is_outdated

    def leave(self, made: Socket) -> None:
        """Forget a socket that is closed."""
        self._followers.pop(made, None)

    def explain(self, probe: bool = True) -> str:
        """What a person can do while there is no answer: a sentence or two. From any thread.

        Args:
            probe: Try to connect, to say why that is not possible; waits 0.2 s at most.
        """
        if self.is_connected:
            return (
                f"It is connected to {self.address}, so the process there hangs, was stopped, is overloaded, or is "
                f"a proxy whose servers are away. Try `memoire doctor {self.endpoint}`."
            )
        if self.denied is not None:
            return str(self.denied)
        if self._refusal and self.address:
            advice = f"Try `memoire doctor {self.endpoint}`."
            return f"Something accepts connections at {self.address}, but {self._refusal} {advice}"
        return addresses.why_unreachable(self.endpoint, self.address, known=self._names, probe=probe)

    # What the doors call

    def open(self, watch: bool) -> None:
        """Begin: connect, or look the name up first."""
        if (watch or self._host or self._shown is not None) and not self.endpoint.startswith("inproc://"):
            self.watch(_WANTED)
        if self._host:
            self._look()
        else:
            self._attach(self._made, self.endpoint)
            self.address = self.endpoint

    def turn(self, now: float) -> None:
        """Look the name up again, or dial anew with keys that may fit now, should it be time."""
        if now >= self._name_at:
            self._look()
        if self._shown is not None and self._shown.is_due(now) and self.address:
            self.dial_again(self._made)

    def close(self) -> None:
        """Give the monitor back, and look up no more."""
        self._name_at = float("inf")
        super().close()

    def happened(self, event: int, value: int, address: str) -> None:
        """Take one event of the monitor."""
        if self._host and _place(address) != _place(self.address):
            return  # an address that was given up may still have something to say
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
            if self._shown is not None:
                self._shown.succeeded()
        elif event in _REFUSED:
            self._refused(event, value)
            self._refusal = _refusal(event, value)
            self._failed()
        elif event == zmq.EVENT_CLOSED:
            self._refusal = ""
            self._failed()
        elif self.has_given_up:
            # A peer of a kind that does not fit may be first to notice. What was said of a handshake says more.
            self._refusal = self._refusal or f"hangs up at once. {_OTHER_SERVICE}"
        elif event == zmq.EVENT_DISCONNECTED:
            self.is_connected, self.lost_at = False, self.stirred_at
            if self._host:
                self._look()

    def _refused(self, event: int, value: int) -> None:
        """A handshake failed: perhaps since one side wants keys that the other does not have."""
        if self._shown is not None:
            self.denied = self._shown.failed(event, value, time.monotonic()) or self.denied
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == sockets.OTHER_MECHANISM:
            advice = "Give this process a keys folder: keys=, --keys or $MEMOIRE_KEYS."
            self.denied = AuthError(self.endpoint, "it asks for a key, and this process has none", advice)

    def _failed(self) -> None:
        """An attempt came to nothing. ZeroMQ tries the same address again by itself."""
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

    def _look(self) -> None:
        self._name_at = float("inf")
        if not self._is_asking:
            self._is_asking = True
            self._names.ask(self._host, lambda found: self._doors.post(lambda: self._found(found)))

    def _found(self, found: LookupResult) -> None:
        self._is_asking = False
        if self._made.closed:
            return
        self.stirred_at = time.monotonic()
        if not found.addresses:
            self._pause()
            return
        former, self._addresses = self.address, tuple(self._full(address) for address in found.addresses)
        self._tried &= set(self._addresses)
        has_failed = former in self._tried
        self._tried.clear()
        if former not in self._addresses:
            self._move(self._addresses[0])
        elif has_failed and len(self._addresses) > 1:
            self._tried.add(former)
            place = self._addresses.index(former) + 1
            self._move((self._addresses[place:] + self._addresses)[0])

    def _full(self, address: str) -> str:
        return f"tcp://[{address}]:{self._port}" if ":" in address else f"tcp://{address}:{self._port}"

    def _move(self, address: str) -> None:
        former, self.address = self.address, address
        if self.is_connected:
            self.is_connected, self.lost_at = False, time.monotonic()
        for made in (self._made, *self._followers):
            if former:
                self._leave_address(made, former)
            self._attach(made, address)

    def _attach(self, made: Socket, address: str) -> None:
        shown = self._shown if made is self._made else getattr(self._followers.get(made), "shown", None)
        if shown is not None:
            shown.apply(address)
        sockets.connect(made, address)

    @staticmethod
    def _leave_address(made: Socket, address: str) -> None:
        try:
            made.disconnect(address)
        except zmq.ZMQError:
            pass  # ZeroMQ has given it up by itself

    def dial_again(self, made: Socket) -> None:
        """Dial again with a socket: its keys may fit now."""
        if self.address:
            self._leave_address(made, self.address)
            self._attach(made, self.address)


_OTHER_PORT = "Is it the port for caches or notices? Requests go to the port below, or two below."
_OTHER_SERVICE = (
    "Is it another service, or the port for caches or notices? Requests go to the port below, or two below."
)


def _refusal(event: int, value: int) -> str:
    """What a peer does that cannot be greeted, as the monitor says it, and what it may be."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
        return "says nothing: it hangs, or is another service."
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == sockets.OTHER_KIND:
        return f"takes no requests. {_OTHER_PORT}"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # a socket of another kind does so, too, if it is first to notice
        return f"hangs up at once. {_OTHER_SERVICE}"
    return "does not speak ZeroMQ. Is it memoire's address?"


class _FollowingSocket(ConnectionWatcher):
    """A socket beside a link's own, which may be denied by itself.

    Args:
        shown: The keys that the link's own socket shows; None: none.
    """

    def __init__(self, shown: Shown | None, made: Socket, link: Link) -> None:
        super().__init__(made)
        self.shown = None if shown is None else Shown(shown.keys, made, link.endpoint)
        self.endings = 0
        """Connections that have ended, as far as was `heard`."""
        self._link = link
        self.watch(_WANTED)

    @property
    def look_at(self) -> float:
        return float("inf") if self.shown is None else self.shown.look_at

    def turn(self, now: float) -> None:
        if self.shown is not None and self.shown.is_due(now):
            self._link.dial_again(self._made)

    def happened(self, event: int, value: int, address: str) -> None:
        self.endings += event == zmq.EVENT_DISCONNECTED
        if self.shown is not None and event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.shown.succeeded()
        elif self.shown is not None and event in _REFUSED:
            self.shown.failed(event, value, time.monotonic())


def _place(address: str) -> str:
    """An address in one spelling: ZeroMQ reports a connection by its own, "[::ffff:10.0.0.7]" for "10.0.0.7"."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    number, _, scope = host.strip("[]").partition("%")
    try:
        found = ipaddress.ip_address(number)
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return f"{mapped or found}%{scope}:{port}"


def dial(
    doors: Poller,
    made: Socket,
    endpoint: str,
    *,
    watch: bool = False,
    follow: bool = True,
    known: NameResolver | None = None,
    keys: Keys | None = None,
) -> Link:
    """Connect a socket that these doors are to own; returns at once, whether anybody is there or not.

    Args:
        watch: Whether somebody wants to know about the connection; a name has it known anyway.
        follow: False where the socket is still to be handed over: with `doors.add(made, way=link)`.
        known: Look-ups; the process's own by default.
        keys: Those of this process, for tcp:// addresses.

    Raises:
        EndpointError: this is no address; the socket is closed.
        KeyFileError: the keys folder has no server.pub.
    """
    try:
        addresses.check(endpoint, "connect to")
    except EndpointError:
        made.close(0)
        raise
    link = Link(doors, made, endpoint, known or addresses.shared_names(), keys)
    try:
        link.open(watch)
    except BaseException:
        link.close()
        raise
    if follow:
        doors.follow(made, link)
    return link
