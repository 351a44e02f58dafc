"""Ports that stay a killed server's own until it is back: below those that the kernel hands out to everyone."""

import os
import random
import socket
from pathlib import Path

_taken: set[int] = set()


def block(count: int = 3) -> int:
    """The first of `count` free ports in a row, for a server's requests, caches and notices."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    rng = random.Random(f"{os.getpid()} {len(_taken)} {os.urandom(8).hex()}")
    for _ in range(200):
        base = rng.randrange(10_000, max(10_100, first_given - count))
        ports = range(base, base + count)
        if not _taken.intersection(ports) and all(_is_free(port) for port in ports):
            _taken.update(ports)
            return base
    raise OSError(f"no {count} free ports in a row between 10000 and {first_given}")


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
