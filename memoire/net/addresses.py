"""Addresses: syntax checks with corrections, name look-ups, diagnosis of unreachable addresses, and timed TCP sockets.

tcp://HOST:PORT between machines, ipc://PATH on one machine, inproc://NAME inside of one process.

`check` checks the syntax alone, without a look-up.

`NameResolver` looks names up on separate threads. ZeroMQ resolves a name in the thread that moves all messages of a
context: while a name server is silent, every socket stops for ten seconds at a time. Sockets therefore get numeric
addresses only, and a silent name server delays only the sockets that need the name.

`why_unreachable` explains in words why an address does not answer; it asks the network.

`connect_before` makes TCP connections with one deadline for all operations. A socket's own timeout begins again with
each byte, so a peer that sends one byte a second is never too late. Each operation on a `TimedSocket` has the time that
remains until the deadline.
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
"""Wildcard hosts, which mean every address of a machine: valid to bind, not to connect to."""
_HOST = re.compile(r"\[[^\[\]]+\]|[^\s:/]+")


def check(endpoint: Any, action: str) -> str:
    """Return the address unchanged if its syntax is valid.

    Args:
        action: Use of the address: "bind" or "connect to".

    Raises:
        EndpointError: the address is malformed; the message has the reason and the probably intended address.
    """
    if not isinstance(endpoint, str):
        shown = f"{endpoint!r}"[:80]
        raise _wrong(shown, action, f"an address must be of type str, not {type(endpoint).__name__}")
    if not endpoint.isprintable():
        raise _wrong(ascii(endpoint)[1:81], action, "it contains characters that cannot be printed")
    transport, separator, place = endpoint.partition("://")
    if not separator:
        raise _wrong(endpoint, action, "the transport is missing", _with_transport(endpoint, action))
    if transport not in TRANSPORTS:
        instead = _with_transport(place.partition("/")[0], action) if place else ""
        raise _wrong(endpoint, action, "the transport must be tcp://, ipc:// or inproc://", instead)
    if not place:
        raise _wrong(endpoint, action, "nothing follows the transport")
    if transport == "tcp":
        _check_tcp(endpoint, place, action)
    return endpoint


def _check_tcp(endpoint: str, place: str, action: str) -> None:
    """Raise EndpointError if host or port is missing, or not valid for the action."""
    host, separator, port = place.rpartition(":")
    if not separator or host.count("[") != host.count("]"):
        raise _wrong(endpoint, action, "it has no port", f"'tcp://{place.strip('/')}:{USUAL_PORT}'")
    if port.partition("/")[0] != port:
        number, _, rest = port.partition("/")
        raise _wrong(
            endpoint, action, f"nothing may follow the port, but {'/' + rest!r} does", f"'tcp://{host}:{number}'"
        )
    if not host:
        raise _wrong(endpoint, action, "it names no host", f"'tcp://{_host_of(action)}:{port}'")
    if action == "bind":
        if port not in ("*", "!") and not (port.isdigit() and int(port) < 65536):
            raise _wrong(endpoint, action, "the port must be a number from 1 to 65535, or 0 for a free one")
    elif not (port.isdigit() and 0 < int(port) < 65536):
        raise _wrong(endpoint, action, "the port must be a number from 1 to 65535")
    elif host in ANYWHERE:
        reason = f"the host {host!r} is valid only for binding"
        raise _wrong(
            endpoint, action, reason, f"the name of the machine that listens, such as 'tcp://localhost:{port}'"
        )


def _with_transport(place: str, action: str) -> str:
    """Return the probably intended address if the transport is missing; "" if it cannot be guessed."""
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


def derived_addresses(endpoint: str) -> tuple[str, str]:
    """Return the data and notice addresses that belong to a request address: the next two ports, or .push and .pub.

    "tcp://*:5560" gives "tcp://*:5561" and "tcp://*:5562"; a free port gives free ports; ipc and inproc get suffixes.
    """
    check(endpoint, "bind")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.push", f"{endpoint}.pub"
    host, _, port = endpoint.rpartition(":")
    if port in ("0", "*", "!"):
        return f"{host}:0", f"{host}:0"
    if int(port) > 65533:
        raise EndpointError(endpoint, "bind", "the port must be 65533 at most, since the next two ports are used, too")
    return f"{host}:{int(port) + 1}", f"{host}:{int(port) + 2}"


_ANY_HOST = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::):")


def page_seen_from(dialled: str, page: str) -> str:
    """Return the reachable address of a node's pages, "http://HOST:PORT", as `seen_from` does for endpoints."""
    scheme, _, place = page.partition("://")
    return f"{scheme}://{seen_from(dialled, f'tcp://{place}').partition('://')[2]}"


def seen_from(dialled: str, endpoint: str) -> str:
    """Return `endpoint` as a client that dialled `dialled` reaches it: a wildcard host becomes the dialled host."""
    if not _ANY_HOST.match(endpoint) or not dialled.startswith("tcp://"):
        return endpoint
    host = dialled.rpartition(":")[0]
    port = endpoint.rpartition(":")[2]
    return f"{host}:{port}"


Lookup = Callable[[str], list[str]]
"""Function that returns the numeric addresses of a name, best first; may block, and raises OSError if it finds none."""

LOOKUP_LIFETIME = 1.0
"""Seconds for which an answer is reused: the sockets of one client ask for the same name at the same time."""
MAX_KNOWN = 1024
"""Most names whose newest answers are kept; other names are looked up again."""


PROBE = 0.2
"""Seconds that a diagnosis may wait for a name server, and for a connection."""


def why_unreachable(endpoint: str, address: str = "", *, known: NameResolver | None = None, probe: bool = True) -> str:
    """Return advice about an address that did not answer, in a sentence or two.

    Waits at most `PROBE` seconds for a name server, and as long for a connection.

    Args:
        address: Numeric address that the endpoint's name resolved to; "" if it did not.
        known: Resolver of names; the process's own by default.
        probe: Try to connect.
    """
    if endpoint.startswith("tcp://"):
        host = endpoint[len("tcp://") :].rpartition(":")[0].strip("[]")
        trouble = "" if address else (known or shared_names()).problem(host, PROBE if probe else 0.0)
        if trouble:
            return f"The name {host!r} {trouble}: correct it, or wait for the service."
        finding = _probe(address or endpoint) if probe else ""
        unknown = "Is a memoire server or proxy running there, and can this machine reach the port?"
        return f"{finding or unknown} Try `memoire doctor {endpoint}`."
    path = endpoint[len("ipc://") :]
    if endpoint.startswith("ipc://") and not os.path.exists(path):
        return f"There is no socket file {path!r}: start the relay or server first, and share its folder."
    return "Is a server running there? An inproc:// address works only inside one process and one context."


def _probe(address: str) -> str:
    """Return the outcome of a connection attempt to a numeric address, as a sentence; "" if none was possible."""
    host, _, port = address[len("tcp://") :].rpartition(":")
    host = host.strip("[]")
    if not is_numeric(host) or not port.isdigit():
        return ""
    try:
        socket.create_connection((host, int(port)), PROBE).close()
    except ConnectionRefusedError:
        return f"The machine is there, but nothing listens at {address}: start memoire's server or proxy there."
    except TimeoutError:
        return f"{address} does not answer: the machine is gone, or a firewall or NetworkPolicy drops the connection."
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}."
    return f"Something accepts connections at {address}. Is it a memoire server or proxy?"


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Result of a name look-up."""

    addresses: tuple[str, ...]
    """Numeric addresses, best first; empty if the look-up failed."""
    trouble: str
    """Reason why there are no addresses; "" if there are some."""
    at: float
    """Time at which the look-up ended, by time.monotonic()."""


def is_numeric(host: str) -> bool:
    """Return True if the host is an IPv4 or IPv6 address (with or without a scope, as in fe80::1%eth0), not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def look_up(host: str) -> list[str]:
    """Return the system's addresses of a name, in the order of RFC 6724. Blocks; raises OSError."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


class NameResolver:
    """Resolver of names for one process: one thread for each look-up in progress, no thread otherwise.

    All methods may be called from any thread, and none waits for a name server.
    """

    def __init__(
        self, lookup: Lookup | None = None, fresh: float = LOOKUP_LIFETIME, max_known: int = MAX_KNOWN
    ) -> None:
        self._lookup = lookup or look_up
        self._fresh, self._max_known = fresh, max_known
        self._lock = threading.Lock()  # guards `_known` and `_asked`
        self._known: dict[str, LookupResult] = {}  # newest answers, oldest asked first
        self._asked: dict[str, tuple[float, list[Callable[[LookupResult], None]]]] = {}  # start and callbacks by name

    def ask(self, host: str, done: Callable[[LookupResult], None]) -> None:
        """Call `done` with the result of a look-up: at once if it is known, else later, in another thread."""
        with self._lock:
            known = self._known.get(host)
            if known is None or time.monotonic() - known.at >= self._fresh:
                is_first = host not in self._asked
                self._asked.setdefault(host, (time.monotonic(), []))[1].append(done)
                if is_first:
                    threading.Thread(target=self._find, args=(host,), name="memoire-names", daemon=True).start()
                return
        done(known)

    def problem(self, host: str, seconds: float = 0.0) -> str:
        """Return why a name cannot be resolved, as a clause; "" if it can. Waits `seconds` for a first answer."""
        if not host or is_numeric(host):
            return ""
        answered = threading.Event()
        self.ask(host, lambda result: answered.set())
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
        except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a name
            addresses, trouble = (), str(getattr(error, "strerror", None) or error)
        result = LookupResult(addresses, trouble or ("" if addresses else "it has no address"), time.monotonic())
        with self._lock:
            self._known.pop(host, None)
            self._known[host] = result
            while len(self._known) > self._max_known:
                del self._known[next(iter(self._known))]
            _, waiting = self._asked.pop(host)
        for done in waiting:
            done(result)

    def forget(self) -> None:
        """Reset the resolver in a forked child: threads do not survive the fork, and one may have held the lock."""
        self._lock = threading.Lock()
        self._known, self._asked = {}, {}


_names = NameResolver()
os.register_at_fork(after_in_child=_names.forget)


def shared_names() -> NameResolver:
    """Return the name resolver of this process."""
    return _names


class TimedSocket(socket.socket):
    """TCP socket whose operations raise TimeoutError after `deadline`, by time.monotonic()."""

    deadline = float("inf")

    @classmethod
    def wrap(cls, connection: socket.socket, deadline: float) -> TimedSocket:
        """Return a timed socket for an existing connection, whose own socket object can no longer be used."""
        timed = cls(fileno=connection.detach())
        timed.deadline = deadline
        return timed

    def recv(self, *arguments: Any) -> bytes:
        """Receive bytes as `socket.recv`; b"" at the end of the connection."""
        self.settimeout(_remaining(self.deadline))
        return super().recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        """Receive bytes into a buffer; a file made from this socket reads with it."""
        self.settimeout(_remaining(self.deadline))
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        """Send all bytes as `socket.sendall`, with the time until the deadline."""
        self.settimeout(_remaining(self.deadline))
        super().sendall(*arguments)


def connect_before(host: str, port: int, deadline: float) -> TimedSocket:
    """Connect to the first address of a host that accepts; each attempt has an equal share of the remaining time.

    Raises:
        OSError: no address accepted; TimeoutError if the deadline passed.
    """
    addresses = _addresses(host, deadline)
    for place, address in enumerate(addresses, 1):
        try:
            seconds = _remaining(deadline) / (len(addresses) + 1 - place)
            return TimedSocket.wrap(socket.create_connection((address, port), seconds), deadline)
        except OSError:
            if place == len(addresses):
                raise
    raise OSError(f"{host!r} has no address")


def _addresses(host: str, deadline: float) -> tuple[str, ...]:
    if is_numeric(host):
        return (host,)
    results: queue.SimpleQueue[LookupResult] = queue.SimpleQueue()
    shared_names().ask(host, results.put)
    try:
        result = results.get(timeout=_remaining(deadline))
    except queue.Empty:
        raise TimeoutError from None
    if result.trouble:
        raise OSError(result.trouble)
    return result.addresses


def _remaining(deadline: float) -> float:
    """Return the seconds until the deadline. Raises TimeoutError after it: a socket takes 0 for "do not wait"."""
    remaining = deadline - time.monotonic()
    if remaining <= 0.0:
        raise TimeoutError
    return remaining
