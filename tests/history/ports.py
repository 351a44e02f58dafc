"""Ports reserved for a test: for a killed server until it returns, or for an address without a server."""

import atexit
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


def block(count: int = 3) -> int:
    """Reserve `count` ports in a row, on all addresses, until the end of this process. Return the first one."""
    base, held = _hold(count)
    atexit.register(held.close)
    return base


@contextmanager
def held(count: int = 3) -> Iterator[int]:
    """Reserve ports like `block`, while the context lasts."""
    base, stack = _hold(count)
    with stack:
        yield base


def address(count: int = 1) -> str:
    """Return the address of the first port of a new `block`."""
    return f"tcp://127.0.0.1:{block(count)}"


def _hold(count: int) -> tuple[int, ExitStack]:
    """Return the first of `count` reserved ports below the kernel's ephemeral range, and the sockets that reserve them.

    The sockets do not listen, so a server that sets SO_REUSEADDR, as ZeroMQ and Python's servers do, can listen there.
    The function binds before it sets the option, so it cannot take ports of other tests.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    rng = random.Random(os.urandom(16))
    for _ in range(200):
        base = rng.randrange(10_000, max(10_100, first_ephemeral - count))
        with ExitStack() as stack, suppress(OSError):
            for port in range(base, base + count):
                reserved = stack.enter_context(socket.socket())
                reserved.bind(("0.0.0.0", port))
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return base, stack.pop_all()
    raise OSError(f"no {count} free ports in a row between 10000 and {first_ephemeral}")
