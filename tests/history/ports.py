"""Ports that are a test's own: for a killed server until it is back, or for an address where nobody is to answer."""

import os
import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

_held: list[socket.socket] = []


def block(count: int = 3) -> int:
    """The first of `count` ports in a row, on all addresses of this machine, for a server's requests, caches and notices.

    They lie below those that the kernel hands out to everyone, and are this process' until it ends: it keeps a socket on
    each of them that does not listen. Whoever asks for a port with SO_REUSEADDR, as ZeroMQ and all servers of Python's
    do, can listen there; another test's `block` does not set it, and finds them taken.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    rng = random.Random(os.urandom(16))
    for _ in range(200):
        base = rng.randrange(10_000, max(10_100, first_given - count))
        with ExitStack() as stack, suppress(OSError):
            held = [stack.enter_context(_hold(port)) for port in range(base, base + count)]
            stack.pop_all()
            _held.extend(held)
            return base
    raise OSError(f"no {count} free ports in a row between 10000 and {first_given}")


def address(count: int = 1) -> str:
    """tcp://127.0.0.1:PORT of a `block`."""
    return f"tcp://127.0.0.1:{block(count)}"


def _hold(port: int) -> socket.socket:
    """A socket that keeps a port, and lets others of this machine listen at it from now on."""
    with ExitStack() as stack:
        made = stack.enter_context(socket.socket())
        made.bind(("0.0.0.0", port))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stack.pop_all()
        return made
