"""Does a probe get its answer while a thousand connections say nothing, drip, or never take their answer?

A `memoire server` is asked for /readyz, as fast as one prober can, first by itself and then while another process holds
its HTTP port: with connections that send half a request, that send a byte now and then, and, fifty a second, that ask
for a large page and never read it. Every probe must be answered within a second, and the server must not grow.
"""

import argparse
import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import numpy as np
from _kit import end, memory, say, table

import memoire

SCHEMA = memoire.Schema({"obs": memoire.Column(np.float32, (64,), "state")})
HELD = 1000
"""Connections that a nuisance keeps, as far as it is let."""
CASES = {
    "nobody else": None,
    "half a request, and silence": ("GET /rea", "", 0.001),
    "a byte now and then": ("G", "x", 0.001),
    "a large page, never read": ("GET /status?most=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n", "", 0.02),
}


def ask(url: urllib.parse.SplitResult) -> float:
    """Seconds that one probe took."""
    began = time.monotonic()
    with contextlib.closing(http.client.HTTPConnection(str(url.hostname), url.port, timeout=10.0)) as connection:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
    return time.monotonic() - began


def be_a_nuisance(port: int, name: str) -> int:
    """Open connections and do something unpleasant with each, until told to end; prints how many there were."""
    case = CASES[name]
    assert case is not None
    first, more, pause = case[0].encode(), case[1].encode(), case[2]
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    held: list[socket.socket] = []
    opened = 0
    print("begun", flush=True)
    while not stopping.wait(pause):
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=5.0))
            held[-1].sendall(first)
            opened += 1
        if more and held:
            with contextlib.suppress(OSError):
                held[opened * 7 % len(held)].sendall(more)
        if len(held) > HELD:
            held.pop(0).close()
    print(opened)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--nuisance", nargs=2, metavar=("PORT", "CASE"), help="be one, of this process' own")
    given = parser.parse_args()
    if given.nuisance:
        return be_a_nuisance(int(given.nuisance[0]), given.nuisance[1])
    rows, violations = [], []
    command = [sys.executable, "-m", "memoire", "server", "--endpoint", "tcp://127.0.0.1:0"]
    server = subprocess.Popen([*command, "--schema", SCHEMA.to_json()], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = urllib.parse.urlsplit([server.stdout.readline(), server.stdout.readline()][-1].split()[-1])
        ask(url)
        before = memory(server.pid)
        for name, case in CASES.items():
            say(name)
            own = [sys.executable, __file__, "--nuisance", str(url.port), name]
            nuisance = subprocess.Popen(own, stdout=subprocess.PIPE, text=True) if case else None
            if nuisance is not None:
                assert nuisance.stdout is not None
                nuisance.stdout.readline()
            took, until = [], time.monotonic() + given.seconds / len(CASES)
            while time.monotonic() < until:
                took.append(ask(url))
            opened = 0
            if nuisance is not None:
                nuisance.terminate()
                opened = int(nuisance.communicate(timeout=30.0)[0])
            grown = memory(server.pid) - before
            rows.append([name, opened, len(took), f"{1e3 * np.median(took):.1f} ms", f"{1e3 * max(took):.0f} ms"])
            if max(took) > 1.0:
                violations.append(f"{name}: a probe took {max(took):.2f} s")
            if grown > 64 << 20:
                violations.append(f"{name}: the server grew by {grown >> 20} MiB")
    finally:
        server.terminate()
        server.communicate(timeout=20.0)
    print(table(["meanwhile", "connections", "probes", "median", "slowest"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
