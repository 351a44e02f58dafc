"""Does a model of 10 MB reach 100 actors, and 300 more that join at once, without a peak of memory anywhere?

A learner far away publishes to a server; actors take it through one proxy. Memory is what each process had at most, above
what it had before. The body crosses to each actor in chunks that it asks for: `bytes for each` is what was sent to one
at most (chunks that came, and every request that was sent again counted as one more), over the size of the body.
"""

import argparse
import hashlib
import sys
import time
from typing import Any

import numpy as np
from _cluster import Peak, Peers, nodes
from _kit import end, say, table

from memoire.client.client import connect
from memoire.limits import Limits, MiB
from memoire.reader.reader import Reader
from memoire.replay.columns import Column
from memoire.replay.schema import Schema

SCHEMA = Schema({"obs": Column(np.float32, (4,), "state"), "reward": Column(np.float32, (), "reward")})
SLACK = 64 * MiB
"""What a node may need above the models that it keeps, and above what each actor may have asked for."""


def actors(first: int, count: int, pipe: Any, endpoint: str) -> None:
    """Clients that follow one topic; asked for a version, they say when they had it and what it cost."""
    pipe.recv()
    clients = [connect(endpoint, timeout=60.0, capacity=1000) for _ in range(count)]
    models = [client.model("policy") for client in clients]
    pipe.send("here")
    while True:
        version, digest = pipe.recv()
        took, sent = 0.0, []
        for client, model in zip(clients, models, strict=True):
            got = model.wait(300.0, after=version - 1)
            assert hashlib.sha256(got.body).digest() == digest, "a wrong body"
            took = time.monotonic()  # one clock for all processes of this machine
            stats = client.stats()
            sent.append(stats.fetched_bytes + stats.resends * Limits().model_chunk)
        pipe.send((took, sent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="within which every actor has to have it")
    parser.add_argument("--actors", type=int, default=100)
    parser.add_argument("--joiners", type=int, default=300)
    parser.add_argument("--size", type=int, default=10 * MiB)
    parser.add_argument("--versions", type=int, default=5)
    given = parser.parse_args()
    rows, wrong = [], []
    with nodes(SCHEMA) as (server, (proxy,)), Reader([server.endpoint], timeout=30.0) as learner:
        early = Peers(actors, given.actors, 10, proxy.endpoint)
        late = Peers(actors, given.joiners, 20, proxy.endpoint)
        try:
            early.ask("begin")
            say(given.actors, "actors are connected")
            before = [0] * given.actors
            for version in range(1, given.versions + 1):
                body = np.random.default_rng(version).bytes(given.size)
                digest = hashlib.sha256(body).digest()
                with Peak([server.pid, proxy.pid]) as peak:
                    began = time.monotonic()
                    assert learner.publish("policy", body, 60.0) == version
                    said = early.ask((version, digest))
                sent = [each for _, some in said for each in some]
                rows.append(
                    row(f"version {version} to {given.actors}", given, began, said, sent, before, peak, server, proxy)
                )
                before = sent
            with Peak([server.pid, proxy.pid]) as peak:
                began = time.monotonic()
                late.ask("begin")
                said = late.ask((given.versions, digest))
            sent = [each for _, some in said for each in some]
            zero = [0] * given.joiners
            rows.append(row(f"{given.joiners} that join at once", given, began, said, sent, zero, peak, server, proxy))
        finally:
            early.end()
            late.end()
    for name, seconds, ratio, at_server, at_proxy in rows:
        kept = 4 * given.size + given.size  # the newest few, and the one that is coming
        if seconds > given.seconds:
            wrong.append(f"{name}: the last one had it after {seconds:.1f} s")
        if ratio > 1.2:
            wrong.append(f"{name}: {ratio:.2f} times the body was sent to one")
        if max(at_server, at_proxy) > kept + SLACK:
            wrong.append(f"{name}: server grew by {at_server >> 20} MiB, proxy by {at_proxy >> 20} MiB")
    print(f"{given.size / MiB:g} MiB a body; all actors in processes of this machine.\n")
    head = ["", "until the last has it", "bytes for each", "server grew by", "proxy grew by"]
    print(table(head, [[n, f"{s:.2f} s", f"{r:.2f}", f"{a >> 20} MiB", f"{b >> 20} MiB"] for n, s, r, a, b in rows]))
    return end(wrong)


def row(
    name: str,
    given: argparse.Namespace,
    began: float,
    said: list[Any],
    sent: list[int],
    before: list[int],
    peak: Peak,
    server: Any,
    proxy: Any,
) -> tuple[str, float, float, int, int]:
    most = max(now - then for now, then in zip(sent, before, strict=True))
    say(name, f"{max(took for took, _ in said) - began:.2f} s, {most} bytes for each at most")
    latest = max(took for took, _ in said) - began
    return name, latest, most / given.size, peak.grown(server.pid), peak.grown(proxy.pid)


if __name__ == "__main__":
    sys.exit(main())
