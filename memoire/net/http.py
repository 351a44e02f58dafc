"""TCP connections with one deadline for everything that is done on them.

A socket's own timeout begins again with each byte, so a peer that sends one byte a second is never too late. On a
`TimedSocket` each step has what is left until the deadline.
"""

from __future__ import annotations

import queue
import socket
import time
from typing import Any

from .addresses import LookupResult, is_numeric, shared_names


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
