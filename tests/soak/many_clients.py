"""Do a thousand clients work through one proxy, and is each of them counted exactly?

Clients in processes of their own connect to one proxy in front of one server, record, log and push caches at a steady
pace, and tell. One round trip is an UPDATE that somebody waits for, of a few clients in each process, while all of them
work. All the time nobody may be refused, and at the end the totals are what the clients counted.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
from _cluster import Peers, nodes
from _kit import descriptors, end, memory, say, table, threads

from memoire.client.client import connect
from memoire.net import process as limits
from memoire.reader.reader import Reader
from memoire.replay.columns import Column
from memoire.replay.schema import Schema

SCHEMA = Schema({"obs": Column(np.float32, (16,), "state"), "reward": Column(np.float32, (), "reward")})
PACE = 1.0
"""Seconds between two episodes of a client."""
LENGTH = 10
ASKED = 5
"""Clients of each process whose round trips are measured."""


def actors(first: int, count: int, pipe: Any, endpoint: str, seconds: float) -> None:
    """Clients of one process: connect, work for some time, say what they counted."""
    limits.raise_limit()
    pipe.recv()
    began = time.monotonic()
    clients = [connect(endpoint, timeout=120.0, capacity=1000, seed=first + k) for k in range(count)]
    pipe.send(time.monotonic() - began)
    pipe.recv()
    trips, episodes, until = [], [0] * count, time.monotonic() + seconds
    row = np.zeros(16, np.float32), np.float32(1.0)
    while time.monotonic() < until:
        round_began = time.monotonic()
        for place, client in enumerate(clients):
            memory = client.memory
            memory.open()
            for _ in range(LENGTH):
                memory.add(0, row)
            memory.close(terminated=True)
            client.on_entries(LENGTH)
            client.on_episode(0, LENGTH, float(LENGTH))
            episodes[place] += 1
            client.push_cache(0.0)
            if place < ASKED:
                asked = time.monotonic()
                client.update(60.0)
                trips.append(time.monotonic() - asked)
        time.sleep(max(0.0, round_began + PACE - time.monotonic()))
    for place, client in enumerate(clients):
        client.log(f"client {first + place} did {episodes[place]}")
    for client in clients:
        client.update(60.0)
    stats = [client.stats() for client in clients]
    wrong = [
        f"client {each.client}: pushed {each.pushed_caches}, accepted {each.accepted_caches}, lost {each.lost_caches}, "
        f"in flight {each.in_flight_caches}"
        for each in stats
        if each.pushed_caches
        != each.accepted_caches + sum(each.rejected.values()) + each.lost_caches + each.in_flight_caches
    ]
    refused = sum(sum(each.refused.values()) + each.faults for each in stats)
    pipe.send((sum(episodes), sum(each.accepted_caches for each in stats), trips, refused, wrong))
    pipe.recv()
    for client in clients:
        client.close(10.0)
    pipe.send("gone")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=5)
    given = parser.parse_args()
    violated = []
    each = -(-given.clients // given.processes)
    with (
        nodes(SCHEMA, "--set", "cache_size=32") as (server, (proxy,)),
        Reader([proxy.endpoint], timeout=30.0) as reader,
    ):
        before = memory(proxy.pid)
        peers = Peers(actors, given.clients, each, proxy.endpoint, given.seconds)
        try:
            connecting = max(peers.ask("begin"))
            say(f"{given.clients} are connected after {connecting:.1f} s")
            said = peers.ask("work")
            used, most, at_proxy = descriptors(proxy.pid), threads(proxy.pid), memory(proxy.pid)
            at_server = memory(server.pid)
            totals = reader.totals(timeout=60.0)
            peers.ask("end")
        finally:
            peers.end()
    episodes = sum(answer[0] for answer in said)
    trips = sorted(trip for answer in said for trip in answer[2])
    violated += [text for answer in said for text in answer[4]]
    if refused := sum(answer[3] for answer in said):
        violated.append(f"{refused} messages were refused, or turns failed")
    if (totals.totals.episodes, totals.totals.steps) != (episodes, LENGTH * episodes):
        violated.append(f"the servers counted {totals.totals}, the clients {episodes} episodes")
    if totals.totals.clients != given.clients:
        violated.append(f"{totals.totals.clients} clients are known")
    rows = [
        ("clients", given.clients),
        ("all connected after", f"{connecting:.1f} s"),
        ("episodes told, and counted", f"{episodes}, {totals.totals.episodes}"),
        ("caches accepted", sum(answer[1] for answer in said)),
        ("round trip of an UPDATE, median", f"{1e3 * statistics.median(trips):.0f} ms"),
        ("the slowest of a hundred", f"{1e3 * trips[int(0.99 * len(trips))]:.0f} ms"),
        ("descriptors of the proxy", used),
        ("threads of the proxy", most),
        ("memory of the proxy, grown by", f"{(at_proxy - before) >> 20} MiB"),
        ("memory of the server", f"{at_server >> 20} MiB"),
    ]
    print(table(["", "measured"], rows))
    return end(violated)


if __name__ == "__main__":
    sys.exit(main())
