"""Does any process grow over hours of steady work, in which everything is used and nothing is stopped?

Eight actors step, end episodes and log through a proxy to a server that saves its state; a learner far away draws,
corrects priorities, tells scalars and publishes models, which actors adopt; somebody scrapes metrics and status.
Memory, descriptors and threads of each process are looked at all the time. `Early` and `late` are the medians of the
second and of the last quarter of the time: what grows with the work is seen between them. In the end the server has
counted each step.
"""

import argparse
import contextlib
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from _cluster import Peers, nodes
from _kit import descriptors, end, folder, memory, table, threads

import memoire
from memoire.errors import MemoireTimeout
from memoire.limits import MiB

SCHEMA = memoire.Schema(
    {"obs": memoire.Column(np.float32, (16,), "state"), "reward": memoire.Column(np.float32, (), "reward")}
)
ACTORS, EACH = 8, 4
BATCH = 128
LENGTH = 100
"""Steps of an episode."""
MODEL = bytes(1 << 16)
FLAT = 4 * MiB
"""What anything may be larger by, late than early: allocators breathe, and totals of an hour are points of a curve."""

STEPS = 50.0
"""Steps a second of each actor."""
TURN = 0.5
"""Seconds between two turns of the learner, and of whoever watches."""

Usage = tuple[int, int, int]
"""Bytes of memory, descriptors and threads of a process."""


def actors(first: int, number: int, pipe: Any, endpoint: str) -> None:
    """Clients with an episode a turn each, until they are asked what they counted; then they leave."""
    clients = [memoire.connect(endpoint, timeout=60.0, capacity=4096, seed=first + k) for k in range(number)]
    models = [client.model("policy") for client in clients]
    rng = np.random.default_rng(first)
    pipe.send("here")
    due = time.monotonic()
    while not pipe.poll(max(0.0, due - time.monotonic())):
        due += LENGTH / STEPS
        for client, model in zip(clients, models, strict=True):
            play(client, rng.random((LENGTH, 16), np.float32))
            client.log(f"an episode of {LENGTH} steps by model {model.version}")
            client.scalars({"model": float(model.version)})
    pipe.recv()
    for client in clients:
        client.update(60.0)
    pipe.send([(client.stats().steps, client.stats().lost_caches, model.version)
               for client, model in zip(clients, models, strict=True)])  # fmt: skip
    for client in clients:
        client.close(60.0)


def play(client: memoire.Client, states: Any) -> None:
    """An episode into a client's memory, told, and a cache of it if there is room."""
    memory = client.memory
    memory.open()
    for state in states:
        memory.add(0, (state, state[0]))
    memory.close(terminated=True)
    client.on_entries(len(states))
    client.on_episode(0, len(states), float(states[:, 0].sum()))
    client.push_cache(0.0)


def learner(first: int, number: int, pipe: Any, endpoint: str) -> None:
    """Draws, corrects, tells and publishes, until it is asked how much."""
    rng = np.random.default_rng(first)
    with memoire.Reader([endpoint], timeout=60.0) as reader:
        pipe.send("here")
        for turn in count(1):
            batch = reader.get_batch(BATCH, timeout=300.0)
            reader.update_priorities(batch.ids, rng.random(BATCH))
            reader.scalars({"loss": 1.0 / turn})
            if turn % 10 == 0:
                with contextlib.suppress(MemoireTimeout):  # the machine is busy: it goes on being sent
                    reader.publish("policy", MODEL)
            if pipe.poll(TURN):
                break
        pipe.recv()
        pipe.send((turn, turn // 10))


def usage(pid: int) -> Usage:
    return memory(pid), descriptors(pid), threads(pid)


def watch(pids: Sequence[int], urls: Sequence[str], seconds: float) -> Iterator[list[Usage]]:
    """What each process uses, again and again, while somebody reads the pages of the nodes."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for url in urls:
            for page in ("/metrics", "/status"):
                with contextlib.suppress(OSError), urllib.request.urlopen(url + page, timeout=30.0) as answer:
                    answer.read()
        yield [usage(pid) for pid in pids]
        time.sleep(4 * TURN)


def medians(seen: Sequence[list[Usage]], place: int) -> tuple[list[int], list[int]]:
    """Medians of what a process used in the second quarter of the time, and in the last."""
    quarter = len(seen) // 4
    parts = (seen[quarter : 2 * quarter], seen[3 * quarter :])
    early, late = ([int(statistics.median(look[place][k] for look in part)) for k in range(3)] for part in parts)
    return early, late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5400.0)
    given = parser.parse_args()
    pages = ["--http", "127.0.0.1:0"]
    with (
        folder() as state,
        nodes(SCHEMA, "--state-dir", str(state), "--set=cache_size=128", *pages) as (server, (proxy,)),
    ):
        assert server.process.stdout is not None
        url = server.process.stdout.readline().split()[-1].removesuffix("/status")
        crowd = Peers(actors, ACTORS, EACH, proxy.endpoint)
        reader = Peers(learner, 1, 1, proxy.endpoint)
        try:
            crowd.answers()
            reader.answers()
            pids = [server.pid, proxy.pid, reader.pids[0], *crowd.pids]
            seen = list(watch(pids, [url], given.seconds))
            counted = [each for said in crowd.ask("counts") for each in said]
            ((batches, models),) = reader.ask("counts")
            with memoire.Reader([server.endpoint], timeout=60.0) as last:
                totals = last.totals(timeout=60.0).totals
        finally:
            crowd.end()
            reader.end()
    names = [
        "server",
        "proxy",
        "learner",
        *(f"actors {k * EACH + 1} to {(k + 1) * EACH}" for k in range(ACTORS // EACH)),
    ]
    return report(given.seconds, names, seen, counted, batches, models, totals)


def report(
    spent: float, names: list[str], seen: list[list[Usage]], counted: list[Any], batches: int, models: int, totals: Any
) -> int:
    """The table; what is wrong with it."""
    wrong, rows = [], []
    for place, name in enumerate(names):
        early, late = medians(seen, place)
        shown = [
            f"{early[0] / MiB:.1f} MiB",
            f"{late[0] / MiB:.1f} MiB",
            *(f"{a}, {b}" for a, b in list(zip(early, late, strict=True))[1:]),
        ]
        rows.append([name, *shown])
        if late[0] - early[0] > FLAT or late[1] > early[1] + 2 or late[2] > early[2]:
            wrong.append(f"{name}: bytes, descriptors and threads were {early} and are {late}")
    steps = sum(each for each, _, _ in counted)
    if totals.steps != steps:
        wrong.append(f"the server counted {totals.steps} steps, the actors {steps}")
    if min(version for _, _, version in counted) < models - 1:
        wrong.append(f"{models} models were published, and actors have {[version for *_, version in counted]}")
    print(f"{spent / 3600:.2f} h: {steps:,} steps in episodes of {LENGTH}, {steps // LENGTH:,} log lines, {batches:,} batches "
          f"of {BATCH} drawn and corrected, {models:,} models of {len(MODEL) >> 10} KiB; {len(seen):,} looks.\n")  # fmt: skip
    print(table(["process", "memory early", "late", "descriptors", "threads"], rows))
    return end(wrong)


if __name__ == "__main__":
    sys.exit(main())
