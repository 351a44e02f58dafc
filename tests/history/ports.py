"""Ports that are a test's own: for a killed server until it is back, or for an address where nobody is to answer."""

import atexit
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


def block(count: int = 3) -> int:
    """The first of `count` ports in a row, on all addresses of this machine, which are this process' until it ends."""
    base, held = _hold(count)
    atexit.register(held.close)
    return base


@contextmanager
def held(count: int = 3) -> Iterator[int]:
    """The same while the context lasts."""
    base, stack = _hold(count)
    with stack:
        yield base


def address(count: int = 1) -> str:
    """tcp://127.0.0.1:PORT of a `block`."""
    return f"tcp://127.0.0.1:{block(count)}"


def _hold(count: int) -> tuple[int, ExitStack]:
    """Ports below those that the kernel hands out to everyone, and a socket on each of them that does not listen.

    Whoever asks for a port with SO_REUSEADDR, as ZeroMQ and all servers of Python's do, can listen there; who looks for
    ports here does not set it at first, and finds them taken.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    rng = random.Random(os.urandom(16))
    for _ in range(200):
        base = rng.randrange(10_000, max(10_100, first_given - count))
        with ExitStack() as stack, suppress(OSError):
            for port in range(base, base + count):
                made = stack.enter_context(socket.socket())
                made.bind(("0.0.0.0", port))
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return base, stack.pop_all()
    raise OSError(f"no {count} free ports in a row between 10000 and {first_given}")
