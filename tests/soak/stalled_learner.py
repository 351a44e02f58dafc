"""Does any process grow while a learner, a server or a proxy is stopped, and does work go on when it goes on?

Fifty actors push caches of 1 MB through a proxy to a server, from which a learner draws. One of the three is stopped
(SIGSTOP) for a while, then goes on. `Most` is the most resident memory of a process in this time beyond what it had
before anybody was stopped, and its budget what it is allowed by its limits; for actors, of a process with several of
them. `Back after` is when caches arrived as fast again as before (at 90 %). Every client counts at each moment: pushed
= accepted + rejected + lost + in flight.
"""

import argparse
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from _cluster import Command, Peak, Peers, nodes, wait_for
from _kit import end, say, table

from memoire.client.client import connect
from memoire.limits import MiB
from memoire.net.sockets import DATA_MESSAGES
from memoire.reader.reader import Reader
from memoire.replay.columns import Column
from memoire.replay.schema import Schema

SCHEMA = Schema({"obs": Column(np.float32, (1000,), "state"), "reward": Column(np.float32, (), "reward")})
SAMPLES = 256
CACHE = SAMPLES * 4100
HELD = 512 * MiB
QUEUE = 256 * MiB
EACH = 10
"""Actors in a process."""
TOLERANCE = 1.2
BACK_WITHIN = 5.0


def actors(first: int, count: int, pipe: Any, endpoint: str, every: float) -> None:
    """Clients that push a cache every so often, and skip what does not fit their windows."""
    clients = [connect(endpoint, timeout=60.0, capacity=400, seed=first + place) for place in range(count)]
    for client in clients:
        memory = client.memory
        memory.open()
        rng = np.random.default_rng(first)
        for _ in range(300):
            memory.add(0, (rng.random(1000, np.float32), np.float32(1.0)))
        memory.close(terminated=True)
        client.on_entries(300)
        client.on_episode(0, 300, 300.0)
    pipe.send("here")
    wrong: list[str] = []
    credit = 0
    due = [time.monotonic() + every * place / count for place in range(count)]
    while True:
        for place, client in enumerate(clients):
            now = time.monotonic()
            if now >= due[place]:
                client.push_cache(0.0)
                due[place] = max(due[place] + every, now)
            stats = client.stats()
            credit = stats.credit
            came = stats.accepted_caches + sum(stats.rejected.values())
            if stats.pushed_caches != came + stats.lost_caches + stats.in_flight_caches:
                wrong.append(f"{stats}")
            if stats.pushed_bytes != stats.received_bytes + stats.lost_bytes + stats.in_flight_bytes:
                wrong.append(f"{stats}")
        if pipe.poll(0.005):
            pipe.recv()
            every_stats = [client.stats() for client in clients]
            pipe.send(
                {
                    "accepted": sum(stats.accepted_caches for stats in every_stats),
                    "lost": sum(stats.lost_caches for stats in every_stats),
                    "pushed": sum(stats.pushed_caches for stats in every_stats),
                    "skipped": sum(stats.skipped_caches for stats in every_stats),
                    "credit": credit,
                    "wrong": wrong[:3],
                }
            )


def learner(first: int, count: int, pipe: Any, endpoint: str) -> None:
    """Draws batches as fast as it is given them, a little slower than they come."""
    with Reader([endpoint], timeout=60.0) as reader:
        pipe.send("here")
        while True:
            try:
                reader.get_batch(SAMPLES, 1.0)
            except Exception:
                time.sleep(0.1)
            if pipe.poll(0.02):
                pipe.recv()
                pipe.send(reader.stats().batches)


class Load:
    """Who is there, and what they did so far."""

    def __init__(self, server: Command, proxy: Command, crowd: Peers, reader: Peers) -> None:
        self.server, self.proxy, self.crowd, self.reader = server, proxy, crowd, reader
        self.pids = [server.pid, proxy.pid, *crowd.pids]

    def sums(self) -> dict[str, Any]:
        said = self.crowd.ask("stats", 60.0)
        sums: dict[str, Any] = {
            name: sum(each[name] for each in said) for name in ("accepted", "lost", "pushed", "skipped")
        }
        return sums | {
            "credit": max(each["credit"] for each in said),
            "wrong": [w for each in said for w in each["wrong"]],
        }

    def rate(self, seconds: float) -> float:
        began, before = time.monotonic(), self.sums()["accepted"]
        time.sleep(seconds)
        after = self.sums()["accepted"]
        return float((after - before) / (time.monotonic() - began))


def stall(load: Load, who: str, pid: int, seconds: float, usual: float, before: dict[int, int]) -> dict[str, Any]:
    """Stop one process, then see when caches arrive as before."""
    peak = Peak(load.pids, every=0.05)
    peak.before = before
    with peak:
        say(f"stopping the {who}")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        stopped = load.sums()
        os.kill(pid, signal.SIGCONT)
        began, back = time.monotonic(), float("inf")
        while time.monotonic() - began < 4 * BACK_WITHIN and back == float("inf"):
            moment = time.monotonic() - began
            if load.rate(1.0) >= 0.9 * usual:
                back = moment
        time.sleep(2.0)
    sums = load.sums()
    return {
        "who": who,
        "server": peak.grown(load.server.pid),
        "proxy": peak.grown(load.proxy.pid),
        "actors": max(peak.grown(pid) for pid in load.crowd.pids),
        "back": back,
        "skipped": stopped["skipped"],
        "lost": sums["lost"],
        "wrong": sums["wrong"],
        "credit": sums["credit"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for which each of them is stopped")
    parser.add_argument("--actors", type=int, default=50)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two caches of an actor")
    given = parser.parse_args()
    settings = [f"--set=cache_size={SAMPLES}", f"--byte-limit={HELD}"]
    with nodes(SCHEMA, *settings) as (server, (proxy,)):
        crowd = Peers(actors, given.actors, EACH, proxy.endpoint, given.every)
        reader = Peers(learner, 1, 1, server.endpoint)
        try:
            crowd.answers()
            reader.answers()
            load = Load(server, proxy, crowd, reader)
            wait_for(lambda: load.sums()["accepted"] * CACHE > 1.1 * HELD, 300.0, "as much as the server holds")
            usual = load.rate(5.0)
            before = {pid: Peak([pid]).before[pid] for pid in load.pids}
            say(f"{usual:.0f} caches a second")
            found = [
                stall(load, who, pid, given.seconds, usual, before)
                for who, pid in (("learner", reader.pids[0]), ("server", server.pid), ("proxy", proxy.pid))
            ]
        finally:
            crowd.end()
            reader.end()
    credit = found[-1]["credit"]
    budgets = {
        "server": (DATA_MESSAGES + 1) * CACHE + 32 * MiB,  # what it holds, it held before
        "proxy": QUEUE + given.actors * (DATA_MESSAGES + 1) * CACHE,
        "actors": EACH * (credit + 2 * CACHE),
    }
    wrong = [f"while the {each['who']} was stopped: {what}" for each in found for what in each["wrong"]]
    for each in found:
        for name, budget in budgets.items():
            if each[name] > TOLERANCE * budget:
                wrong.append(f"{each['who']} stopped: {name} grew by {each[name] >> 20} MiB of {budget >> 20} MiB")
        if each["back"] > BACK_WITHIN:
            wrong.append(f"{each['who']} stopped: throughput was back after {each['back']:.1f} s")
    print(
        f"{given.actors} actors, {EACH} in a process, {usual:.0f} caches of {CACHE / 1e6:.2f} MB arrive in a second; each of the three "
        f"was stopped for {given.seconds:g} s. A client may have {credit / MiB:.1f} MiB on the way.\n"
    )
    head = ["stopped", "server: most", "proxy: most", "actors: most", "back after", "caches skipped", "lost"]
    rows = [
        [e["who"], *(f"{e[n] >> 20} MiB" for n in budgets), f"{e['back']:.1f} s", e["skipped"], e["lost"]]
        for e in found
    ]
    rows.append(["budget", *(f"{budget >> 20} MiB" for budget in budgets.values()), f"{BACK_WITHIN:g} s", "", ""])
    print(table(head, rows))
    return end(wrong)


if __name__ == "__main__":
    sys.exit(main())
