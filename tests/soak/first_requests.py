"""Are 3000 first requests of 1000 clients all answered within 6 seconds, though nobody asks twice?

A thousand clients are connected to one proxy, with keys, and each sends three requests in the same instant; then the
same requests go over one direct connection to a server. Nobody sends a request again, so each reply that is lost is
seen. With every number of clients that is tried, all replies have to come.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
from _callers import Callers
from _cluster import nodes
from _kit import end, say, table

from memoire.net import process as descriptors
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from memoire.wire import messages

SCHEMA = Schema({"obs": Column(np.float32, (16,), "state"), "reward": Column(np.float32, (), "reward")})
REQUESTS = 3
WITHIN = 6.0
"""Seconds."""


def hello(client: bytes) -> Iterator[tuple[int, messages.Body]]:
    for number in range(1, REQUESTS + 1):
        yield number, messages.Hello(role="actor")


def ask(endpoint: str, connections: int, keys: str | None, clients: int) -> tuple[int, list[float], int]:
    """Requests that were sent, when replies came, and how many of these were refusals."""
    callers = Callers(endpoint, connections, keys, clients)
    try:
        say(f"{connections} are connected after {callers.connect(60.0):.1f} s")
        count = callers.send(hello)
        came = callers.hear(count, WITHIN)
        return count, came, sum(isinstance(each.body, messages.Refused) for each in callers.told.values())
    finally:
        callers.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="*", default=[100, 250, 500, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    descriptors.raise_limit()
    violated, rows = [], []
    with tempfile.TemporaryDirectory(prefix="memoire-soak-keys-") as folder:
        keys = f"{folder}/keys"
        subprocess.run([sys.executable, "-m", "memoire", "keys", "new", keys], check=True, stdout=sys.stderr)
        with nodes(SCHEMA, keys=keys) as (_, (proxy,)), nodes(SCHEMA, proxies=0) as (server, _):
            for clients in given.clients:
                for name, endpoint, connections, shown in (
                    ("through a proxy, with keys", proxy.endpoint, clients, keys),
                    ("over one direct connection", server.endpoint, 1, None),
                ):
                    sent, came, slowest, refused = 0, 0, 0.0, 0
                    for _ in range(given.repeats):
                        asked, heard, said_no = ask(endpoint, connections, shown, clients)
                        sent, came, refused = sent + asked, came + len(heard), refused + said_no
                        slowest = max(slowest, *heard)
                    rows.append((f"{clients} clients, {name}", sent, sent - came, refused, f"{slowest:.2f} s"))
                    say(*rows[-1])
                    if came < sent:
                        violated.append(f"{clients} clients {name}: {sent - came} of {sent} were not answered")
    print(table(["", "requests", "without a reply", "refused", "slowest reply"], rows))
    return end(violated)


if __name__ == "__main__":
    sys.exit(main())
