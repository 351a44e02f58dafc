"""Do 8192 clients behind one proxy, with one key, all start within a minute?

They come at once, each with a connection of its own, and show the same key; the server has a state folder, and all limits
are the default ones. A client has started when its HELLO was answered and its first report, of one step, acknowledged.
None asks twice. At the end the server has to have counted one step of each.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from _callers import Callers
from _cluster import Peers, nodes
from _kit import descriptors, end, memory, say, table

from memoire.net import process as limits
from memoire.reader.reader import Reader
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from memoire.wire import messages

SCHEMA = Schema({"obs": Column(np.float32, (16,), "state"), "reward": Column(np.float32, (), "reward")})
WITHIN = 60.0
"""Seconds."""


def newcomers(first: int, count: int, pipe: Any, endpoint: str, keys: str) -> None:
    """Clients of one process; says when all were connected, how many were welcomed and acknowledged, and when."""
    limits.raise_limit()
    callers = Callers(endpoint, count, keys)
    pipe.recv()
    began = time.monotonic()
    left = lambda: max(0.0, began + WITHIN - time.monotonic())  # noqa: E731
    connected = callers.connect(WITHIN)
    callers.send(lambda client: [(1, messages.Hello(role="actor"))])
    callers.hear(count, left())
    homes = {
        client: said.header for (client, _), said in callers.told.items() if isinstance(said.body, messages.Welcome)
    }
    welcomed = time.monotonic() - began
    for client, header in homes.items():
        callers.send_one(client, 2, messages.Update(steps=1), home=header.home, run=header.run)
    callers.hear(len(homes), left())
    known = sum(isinstance(said.body, messages.Updated) for said in callers.told.values())
    pipe.send((connected, len(homes), welcomed, known, time.monotonic() - began))
    pipe.recv()
    callers.close()
    pipe.send("gone")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=8192)
    parser.add_argument("--processes", type=int, default=4)
    given = parser.parse_args()
    violated = []
    with tempfile.TemporaryDirectory(prefix="memoire-soak-") as folder:
        keys = f"{folder}/keys"
        subprocess.run([sys.executable, "-m", "memoire", "keys", "new", keys], check=True, stdout=sys.stderr)
        with nodes(SCHEMA, "--state-dir", f"{folder}/state", keys=keys) as (server, (proxy,)):
            with Reader([proxy.endpoint], timeout=30.0, keys=keys) as reader:
                peers = Peers(newcomers, given.clients, -(-given.clients // given.processes), proxy.endpoint, keys)
                try:
                    said = peers.ask("begin")
                    say(*said)
                    totals = reader.totals(timeout=60.0).totals
                    used, grown = descriptors(proxy.pid), (memory(proxy.pid), memory(server.pid))
                    peers.ask("end")
                finally:
                    peers.end()
    slowest = max(answer[4] for answer in said)
    welcomed, known = sum(answer[1] for answer in said), sum(answer[3] for answer in said)
    if known != given.clients or slowest > WITHIN:
        violated.append(f"{welcomed} were welcomed and {known} acknowledged of {given.clients} after {slowest:.1f} s")
    if (totals.clients, totals.steps) != (given.clients, given.clients):
        violated.append(f"the server counted {totals.clients} clients and {totals.steps} steps")
    rows = [
        ("clients", given.clients),
        ("all connected after", f"{max(answer[0] for answer in said):.1f} s"),
        ("all welcomed after", f"{max(answer[2] for answer in said):.1f} s"),
        ("all first reports acknowledged after", f"{slowest:.1f} s"),
        ("clients and steps that the server counted", f"{totals.clients}, {totals.steps}"),
        ("descriptors of the proxy", used),
        ("memory of proxy and server", " and ".join(f"{each >> 20} MiB" for each in grown)),
    ]
    print(table(["", "measured"], rows))
    return end(violated)


if __name__ == "__main__":
    sys.exit(main())
