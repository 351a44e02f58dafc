"""What an address of memoire's looks like, and what somebody meant who wrote another one. Nothing is looked up here.

tcp://HOST:PORT between machines, ipc://PATH on one machine, inproc://NAME inside of one process.

Addresses of host names, looked up on threads of their own.

ZeroMQ resolves a name inside of the thread that moves all of a context's messages: while a name server is silent, every
socket stops for ten seconds at a time. So sockets are only ever given addresses, and only who asked for a name waits
for it.

`why_unreachable` says why nothing answers at an address, as a sentence for people: this asks the network.

TCP connections with one deadline for everything that is done on them (`connect_before`). A socket's own timeout begins
again with each byte, so a peer that sends one byte a second is never too late. On a `TimedSocket` each step has what is
left until the deadline.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memoire.errors import EndpointError

TRANSPORTS = ("tcp", "ipc", "inproc")
USUAL_PORT = 5560
LISTENER = "'tcp://127.0.0.1:5560', or 'tcp://*:5560' for other machines"
PEER = "the address of a memoire server, proxy or relay, such as 'tcp://proxy:5560' or 'ipc:///run/memoire/relay'"
ANYWHERE = ("*", "0.0.0.0", "::", "[::]")  # noqa: S104  (compared, not bound)
"""Hosts that mean every address of a machine: somebody may listen there, and nobody can connect there."""
_HOST = re.compile(r"\[[^\[\]]+\]|[^\s:/]+")


def check(endpoint: Any, action: str) -> str:
    """An address that may be one, as it was given.

    Args:
        action: What is to be done with it: "bind" or "connect to".

    Raises:
        EndpointError: it is none; says what is wrong, and which one was probably meant.
    """
    if not isinstance(endpoint, str):
        shown = f"{endpoint!r}"[:80]
        raise _wrong(shown, action, f"an address is text, not of type {type(endpoint).__name__}")
    if not endpoint.isprintable():
        raise _wrong(ascii(endpoint)[1:81], action, "it has characters that cannot be printed")
    transport, separator, place = endpoint.partition("://")
    if not separator:
        raise _wrong(endpoint, action, "the transport in front is missing", _with_transport(endpoint, action))
    if transport not in TRANSPORTS:
        instead = _with_transport(place.partition("/")[0], action) if place else ""
        raise _wrong(endpoint, action, "the transport must be tcp://, ipc:// or inproc://", instead)
    if not place:
        raise _wrong(endpoint, action, "there is nothing behind the transport")
    if transport == "tcp":
        _check_tcp(endpoint, place, action)
    return endpoint


def _check_tcp(endpoint: str, place: str, action: str) -> None:
    """Refuse what has no host or port, or one that cannot be used so."""
    host, separator, port = place.rpartition(":")
    if not separator or host.count("[") != host.count("]"):
        raise _wrong(endpoint, action, "it has no port", f"'tcp://{place.strip('/')}:{USUAL_PORT}'")
    if port.partition("/")[0] != port:
        number, _, rest = port.partition("/")
        raise _wrong(
            endpoint, action, f"nothing may come behind the port, not even {'/' + rest!r}", f"'tcp://{host}:{number}'"
        )
    if not host:
        raise _wrong(endpoint, action, "it names no host", f"'tcp://{_host_of(action)}:{port}'")
    if action == "bind":
        if port not in ("*", "!") and not (port.isdigit() and int(port) < 65536):
            raise _wrong(endpoint, action, "the port must be a number from 1 to 65535, or 0 for a free one")
    elif not (port.isdigit() and 0 < int(port) < 65536):
        raise _wrong(endpoint, action, "the port must be a number from 1 to 65535")
    elif host in ANYWHERE:
        reason = f"the host {host!r} is only for those who listen"
        raise _wrong(
            endpoint, action, reason, f"the name of the machine that listens, such as 'tcp://localhost:{port}'"
        )


def _with_transport(place: str, action: str) -> str:
    """What somebody meant who left the transport out; "" where nobody can tell."""
    if place.startswith(("/", "./", "../")):
        return repr(f"ipc://{place}")
    host, separator, port = place.rpartition(":")
    if not separator:
        host, port = place, str(USUAL_PORT)
    if not _HOST.fullmatch(host) or (not port.isdigit() and port != "*"):
        return ""
    return repr(f"tcp://{_host_of(action) if action != 'bind' and host in ANYWHERE else host}:{port}")


def _host_of(action: str) -> str:
    return "127.0.0.1" if action == "bind" else "localhost"


def _wrong(endpoint: str, action: str, reason: str, instead: str = "") -> EndpointError:
    return EndpointError(endpoint, action, reason, instead or (LISTENER if action == "bind" else PEER))


def beside(endpoint: str) -> tuple[str, str]:
    """The data and notice addresses that belong to a request address: the next two ports, or .push and .pub.

    "tcp://*:5560" gives "tcp://*:5561" and "tcp://*:5562"; a free port gives free ports; ipc and inproc get suffixes.
    """
    check(endpoint, "bind")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.push", f"{endpoint}.pub"
    host, _, port = endpoint.rpartition(":")
    if port in ("0", "*", "!"):
        return f"{host}:0", f"{host}:0"
    if int(port) > 65533:
        raise EndpointError(endpoint, "bind", "the port must be 65533 at most: the next two are used, too")
    return f"{host}:{int(port) + 1}", f"{host}:{int(port) + 2}"


_ANY_HOST = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::):")


def page_seen_from(dialled: str, page: str) -> str:
    """The same of a node's pages, "http://HOST:PORT"."""
    scheme, _, place = page.partition("://")
    return f"{scheme}://{seen_from(dialled, f'tcp://{place}').partition('://')[2]}"


def seen_from(dialled: str, endpoint: str) -> str:
    """`endpoint` as whoever dialled `dialled` reaches it: a wildcard host is the host that answered the request."""
    if not _ANY_HOST.match(endpoint) or not dialled.startswith("tcp://"):
        return endpoint
    host = dialled.rpartition(":")[0]
    port = endpoint.rpartition(":")[2]
    return f"{host}:{port}"


Lookup = Callable[[str], list[str]]
"""Numeric addresses of a name, best first; may block, and raises OSError where there are none."""

LOOKUP_LIFETIME = 1.0
"""Seconds for which an answer is used again: sockets of one client ask for the same name at the same time."""
MAX_KNOWN = 1024
"""Names whose newest answers are kept; others are looked up again."""


PROBE = 0.2
"""Seconds that an explanation of a fault may wait for the network."""


def why_unreachable(endpoint: str, address: str = "", *, known: NameResolver | None = None, probe: bool = True) -> str:
    """What a person can do about an address that did not answer.

    Waits at most `PROBE` seconds for a name server, and as long for a connection.

    Args:
        address: Where the endpoint's name led, if it led anywhere.
        known: Look-ups of names; the process's own by default.
        probe: Try to connect.
    """
    if endpoint.startswith("tcp://"):
        host = endpoint[len("tcp://") :].rpartition(":")[0].strip("[]")
        trouble = "" if address else (known or shared_names()).trouble(host, PROBE if probe else 0.0)
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
    if not is_numeric(host) or not port.isdigit():
        return ""
    try:
        socket.create_connection((host, int(port)), PROBE).close()
    except ConnectionRefusedError:
        return f"The machine is there, but nothing listens at {address}: start memoire's server or proxy there."
    except TimeoutError:
        return f"Nothing comes back from {address}: it is gone, or a firewall or NetworkPolicy drops it."
    except OSError as error:
        return f"There is no way to {address}: {error.strerror or error}."
    return f"Something accepts connections at {address}. Is it a memoire server or proxy?"


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What a look-up brought."""

    addresses: tuple[str, ...]
    """Numeric, best first; empty where there are none."""
    trouble: str
    """Why there are none; "" where there are."""
    at: float
    """When it ended, by time.monotonic()."""


def is_numeric(host: str) -> bool:
    """Whether this is an IPv4 or IPv6 address (a scope, as in fe80::1%eth0, is part of it) and no name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def look_up(host: str) -> list[str]:
    """Addresses of a name as this system finds them, in the order of RFC 6724."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


class NameResolver:
    """Look-ups of one process: one thread for each name that is asked for now, none in between.

    All methods may be called from any thread, and none waits for a name server.
    """

    def __init__(
        self, lookup: Lookup | None = None, fresh: float = LOOKUP_LIFETIME, max_known: int = MAX_KNOWN
    ) -> None:
        self._lookup = lookup or look_up
        self._fresh, self._max_known = fresh, max_known
        self._lock = threading.Lock()  # guards the two below
        self._known: dict[str, LookupResult] = {}  # newest answers, oldest asked first
        self._asked: dict[str, tuple[float, list[Callable[[LookupResult], None]]]] = {}  # since when, and who waits

    def ask(self, host: str, done: Callable[[LookupResult], None]) -> None:
        """Have `done` called with what the name is: at once where that is known, else soon, in another thread."""
        with self._lock:
            known = self._known.get(host)
            if known is None or time.monotonic() - known.at >= self._fresh:
                is_first = host not in self._asked
                self._asked.setdefault(host, (time.monotonic(), []))[1].append(done)
                if is_first:
                    threading.Thread(target=self._find, args=(host,), name="memoire-names", daemon=True).start()
                return
        done(known)

    def trouble(self, host: str, seconds: float = 0.0) -> str:
        """What is wrong with a name, as a clause; "" where nothing is. Waits `seconds` for a first answer."""
        if not host or is_numeric(host):
            return ""
        answered = threading.Event()
        self.ask(host, lambda found: answered.set())
        answered.wait(seconds)
        with self._lock:
            known, asked = self._known.get(host), self._asked.get(host)
        if known is not None:
            return f"could not be resolved ({known.trouble})" if known.trouble else ""
        if asked is None:
            return ""
        return f"could not be resolved (no answer from the name server for {time.monotonic() - asked[0]:.1f} s)"

    def _find(self, host: str) -> None:
        try:
            addresses, trouble = tuple(self._lookup(host)), ""
        except (OSError, UnicodeError) as error:  # the latter: it cannot be a name at all
            addresses, trouble = (), str(getattr(error, "strerror", None) or error)
        found = LookupResult(addresses, trouble or ("" if addresses else "it has no address"), time.monotonic())
        with self._lock:
            self._known.pop(host, None)
            self._known[host] = found
            while len(self._known) > self._max_known:
                del self._known[next(iter(self._known))]
            _, waiting = self._asked.pop(host)
        for done in waiting:
            done(found)

    def forget(self) -> None:
        """Begin anew, in a forked child: the threads did not survive, and one of them may have held the lock."""
        self._lock = threading.Lock()
        self._known, self._asked = {}, {}


_names = NameResolver()
os.register_at_fork(after_in_child=_names.forget)


def shared_names() -> NameResolver:
    """The one of this process."""
    return _names


class TimedSocket(socket.socket):
    """A connection whose steps raise TimeoutError after `deadline`, by time.monotonic()."""

    deadline = float("inf")

    @classmethod
    def of(cls, made: socket.socket, deadline: float) -> TimedSocket:
        """The same connection with a deadline; it takes the place of the one that was given."""
        timed = cls(fileno=made.detach())
        timed.deadline = deadline
        return timed

    def recv(self, *arguments: Any) -> bytes:
        """What came, b"" at the end."""
        self.settimeout(_left(self.deadline))
        return super().recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        """The same into a buffer: what a file made of this socket reads with."""
        self.settimeout(_left(self.deadline))
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        """Send all of it."""
        self.settimeout(_left(self.deadline))
        super().sendall(*arguments)


def connect_before(host: str, port: int, deadline: float) -> TimedSocket:
    """A connection to the first address of a host that takes one; each gets its share of the time that is left.

    Raises:
        OSError: there is none; TimeoutError when the time was over.
    """
    addresses = _addresses(host, deadline)
    for place, address in enumerate(addresses, 1):
        try:
            seconds = _left(deadline) / (len(addresses) + 1 - place)
            return TimedSocket.of(socket.create_connection((address, port), seconds), deadline)
        except OSError:
            if place == len(addresses):
                raise
    raise OSError(f"{host!r} has no address")


def _addresses(host: str, deadline: float) -> tuple[str, ...]:
    if is_numeric(host):
        return (host,)
    told: queue.SimpleQueue[LookupResult] = queue.SimpleQueue()
    shared_names().ask(host, told.put)
    try:
        found = told.get(timeout=_left(deadline))
    except queue.Empty:
        raise TimeoutError from None
    if found.trouble:
        raise OSError(found.trouble)
    return found.addresses


def _left(deadline: float) -> float:
    """Seconds until then. Raises TimeoutError where there are none: a socket takes 0 for "do not wait"."""
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise TimeoutError
    return left
