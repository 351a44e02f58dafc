"""Does a probe get its answer while a thousand connections say nothing, drip, or never take their answer?

A server with fifty clients is asked for /readyz, as fast as one prober can, first by itself and then while others hold
the HTTP port: connections that send half a request, that send a byte now and then, and, fifty a second, that ask for a
large page and never read it. Every probe must be answered within a second, and the server must not grow.
"""

import argparse
import contextlib
import http.client
import socket
import sys
import threading
import time
import urllib.parse

import numpy as np
from _kit import end, memory, say, table

import memoire
from memoire.cluster.node import NodePages

SCHEMA = memoire.Schema({"obs": memoire.Column(np.float32, (64,), "state")})
HELD = 1000
"""Connections that a nuisance keeps, as far as it is let."""


def ask(url: urllib.parse.SplitResult) -> float:
    """Seconds that one probe took."""
    began = time.monotonic()
    with contextlib.closing(http.client.HTTPConnection(str(url.hostname), url.port, timeout=10.0)) as connection:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
    return time.monotonic() - began


class Nuisance:
    """A thread that opens connections and does something unpleasant with each."""

    def __init__(self, url: urllib.parse.SplitResult, first: bytes, more: bytes, pause: float) -> None:
        self.address = (str(url.hostname), int(url.port or 0))
        self.first, self.more, self.pause = first, more, pause
        self.opened = 0
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        held: list[socket.socket] = []
        while not self.stopping.wait(self.pause):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(self.address, timeout=5.0))
                held[-1].sendall(self.first)
                self.opened += 1
            if self.more and held:
                with contextlib.suppress(OSError):
                    held[self.opened * 7 % len(held)].sendall(self.more)
            if len(held) > HELD:
                held.pop(0).close()
        for made in held:
            made.close()

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(10.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    cases = {
        "nobody else": None,
        "half a request, and silence": (b"GET /rea", b"", 0.0),
        "a byte now and then": (b"G", b"x", 0.0),
        "a large page, never read": (b"GET /status?most=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"", 0.02),
    }
    rows, violations = [], []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(memoire.Server("tcp://127.0.0.1:0", SCHEMA))
        clients = [stack.enter_context(memoire.connect(server.endpoint, seed=n)) for n in range(50)]
        pages = stack.enter_context(NodePages("127.0.0.1:0", server))
        url = urllib.parse.urlsplit(str(pages.url))
        before = memory()
        for name, bytes_of in cases.items():
            say(name)
            nuisance = None if bytes_of is None else Nuisance(url, *bytes_of)
            took, until = [], time.monotonic() + given.seconds / len(cases)
            while time.monotonic() < until:
                took.append(ask(url))
            opened = 0 if nuisance is None else nuisance.opened
            if nuisance is not None:
                nuisance.stop()
            median, worst = np.median(took), max(took)
            grown = memory() - before
            rows.append([name, opened, len(took), f"{1e3 * median:.1f} ms", f"{1e3 * worst:.0f} ms"])
            if worst > 1.0:
                violations.append(f"{name}: a probe took {worst:.2f} s")
            if grown > 64 << 20:
                violations.append(f"{name}: the process grew by {grown >> 20} MiB")
        clients[0].update(10.0)
    print(table(["meanwhile", "connections", "probes", "median", "slowest"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
