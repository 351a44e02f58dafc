"""Addresses of host names, looked up on threads of their own.

ZeroMQ resolves a name inside of the thread that moves all of a context's messages: while a name server is silent, every
socket stops for ten seconds at a time. So sockets are only ever given addresses, and only who asked for a name waits
for it.

`why_unreachable` says why nothing answers at an address, as a sentence for people: this asks the network.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

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
