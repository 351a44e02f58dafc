"""Trials of clusters of real processes: kills, many clients, hours of work."""

import argparse
import contextlib
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from _cluster import Peers, nodes
from _kit import descriptors, end, folder, memory, run_named, say, table, threads

import memoire
from history import trial
from memoire.client.client import connect
from memoire.errors import MemoireTimeout
from memoire.limits import MiB
from memoire.net import process
from memoire.reader.reader import Reader
from memoire.replay.columns import Column
from memoire.replay.schema import Schema


def killed_cluster() -> int:
    """Is everything counted exactly once after two minutes of kills?

    50 clients in 10 processes count episodes, log, push caches and follow a model at three servers with state folders,
    behind two proxies. Servers, proxies and actors are killed with SIGKILL and stopped with SIGSTOP by a seeded schedule.
    In the end each client's episodes, steps and log lines are compared with its own counts and replies.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="trials, with seeds one after the other")
    parser.add_argument("--kills", type=int, default=28)
    parser.add_argument("--stops", type=int, default=8)
    args = parser.parse_args()
    outcomes = []
    for seed in range(args.seed, args.seed + args.seeds):
        faults = {"kills": args.kills, "stops": args.stops}
        settings = trial.Settings(
            seed, args.seconds, servers=3, proxies=2, actors=10, clients=5, rate=6.0, runs=2, **faults
        )
        with folder() as place:
            outcomes.append(trial.run(settings, place))
        say(outcomes[-1])
    rows = [[name.replace("_", " "), *(text(each.figures[name]) for each in outcomes)] for name in outcomes[0].figures]
    violations = [violation for outcome in outcomes for violation in outcome.violations]
    print(table(["", *(f"trial {number}" for number in range(1, args.seeds + 1))], rows))
    return end(violations)


def text(value: object) -> str:
    """{"server": 9, "actor": 8} -> "9 server, 8 actor"."""
    return ", ".join(f"{count} {kind}" for kind, count in value.items()) if isinstance(value, dict) else str(value)


SCHEMA = Schema({"obs": Column(np.float32, (16,), "state"), "reward": Column(np.float32, (), "reward")})
PACE = 1.0
"""Seconds between two episodes of a client."""
LENGTH = 10
STATES = np.ones((LENGTH, 16), np.float32)
ASKED = 5
"""Clients of each process whose round trips are measured."""


def actors(first: int, count: int, pipe: Any, endpoint: str, seconds: float) -> None:
    """Run the clients of one process: connect, work for some time, report the counts."""
    process.raise_limit()
    pipe.recv()
    began = time.monotonic()
    clients = [connect(endpoint, timeout=120.0, capacity=1000, seed=first + k) for k in range(count)]
    pipe.send(time.monotonic() - began)
    pipe.recv()
    trips, episodes, until = [], [0] * count, time.monotonic() + seconds
    while time.monotonic() < until:
        round_began = time.monotonic()
        for place, client in enumerate(clients):
            play(client, STATES)
            episodes[place] += 1
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
    wrong = [f"client {each.client}: {each}" for each in stats if not adds_up(each)]
    refused = sum(sum(each.refused.values()) + each.faults for each in stats)
    pipe.send((sum(episodes), sum(each.accepted_caches for each in stats), trips, refused, wrong))
    pipe.recv()
    for client in clients:
        client.close(10.0)
    pipe.send("gone")


def adds_up(stats: Any) -> bool:
    """Return True if each pushed cache was accepted or rejected, is lost, or is on its way."""
    answered = stats.accepted_caches + sum(stats.rejected.values())
    return bool(stats.pushed_caches == answered + stats.lost_caches + stats.in_flight_caches)


def many_clients() -> int:
    """Do a thousand clients work through one proxy, and is each client counted exactly?

    Clients in separate processes connect to one proxy in front of one server, record, log and push caches at a steady
    pace, and report. A round trip is an UPDATE with its reply, of a few clients in each process, while all clients
    work. No message may be refused at any time, and the final totals are equal to the clients' counts.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=5)
    args = parser.parse_args()
    violated = []
    each = -(-args.clients // args.processes)
    with nodes(SCHEMA, "--set", "cache_size=32") as (server, proxy), Reader([proxy.endpoint], timeout=30.0) as reader:
        before = memory(proxy.pid)
        peers = Peers(actors, args.clients, each, proxy.endpoint, args.seconds)
        try:
            connecting = max(peers.ask("begin"))
            say(f"{args.clients} are connected after {connecting:.1f} s")
            replies = peers.ask("work")
            used, most, at_proxy = descriptors(proxy.pid), threads(proxy.pid), memory(proxy.pid)
            at_server = memory(server.pid)
            totals = reader.totals(timeout=60.0)
            peers.ask("end")
        finally:
            peers.end()
    episodes = sum(answer[0] for answer in replies)
    trips = sorted(trip for answer in replies for trip in answer[2])
    violated += [text for answer in replies for text in answer[4]]
    if refused := sum(answer[3] for answer in replies):
        violated.append(f"{refused} messages were refused, or turns failed")
    if (totals.totals.episodes, totals.totals.steps) != (episodes, LENGTH * episodes):
        violated.append(f"the servers counted {totals.totals}, the clients {episodes} episodes")
    if totals.totals.clients != args.clients:
        violated.append(f"{totals.totals.clients} clients are known")
    rows = [
        ("clients", args.clients),
        ("all connected after", f"{connecting:.1f} s"),
        ("episodes told, and counted", f"{episodes}, {totals.totals.episodes}"),
        ("caches accepted", sum(answer[1] for answer in replies)),
        ("round trip of an UPDATE, median", f"{1e3 * statistics.median(trips):.0f} ms"),
        ("the slowest of a hundred", f"{1e3 * trips[int(0.99 * len(trips))]:.0f} ms"),
        ("descriptors of the proxy", used),
        ("threads of the proxy", most),
        ("memory of the proxy, grown by", f"{(at_proxy - before) >> 20} MiB"),
        ("memory of the server", f"{at_server >> 20} MiB"),
    ]
    print(table(["", "measured"], rows))
    return end(violated)


ACTORS, EACH = 8, 4
BATCH = 128
EPISODE = 100
"""Number of steps in an episode."""
MODEL = bytes(1 << 16)
FLAT = 4 * MiB
"""Bytes that memory may grow from early to late: allocators fluctuate, and totals of an hour are points of a curve."""
STEPS = 50.0
"""Steps a second of each actor."""
TURN = 0.5
"""Seconds between two turns of the learner; the nodes' pages are read every four turns."""
Usage = tuple[int, int, int]
"""Bytes of memory, descriptors and threads of a process."""


def actors_of_steady_hours(first: int, number: int, pipe: Any, endpoint: str) -> None:
    """Run clients with an episode a turn each, until a question for their counts; then close the clients."""
    clients = [memoire.connect(endpoint, timeout=60.0, capacity=4096, seed=first + k) for k in range(number)]
    models = [client.model("policy") for client in clients]
    rng = np.random.default_rng(first)
    pipe.send("here")
    due = time.monotonic()
    while not pipe.poll(max(0.0, due - time.monotonic())):
        due += EPISODE / STEPS
        for client, model in zip(clients, models, strict=True):
            play(client, rng.random((EPISODE, 16), np.float32))
            client.log(f"an episode of {EPISODE} steps by model {model.version}")
            client.scalars({"model": float(model.version)})
    pipe.recv()
    for client in clients:
        client.update(60.0)
    pipe.send([(client.stats().steps, client.stats().lost_caches, model.version)
               for client, model in zip(clients, models, strict=True)])  # fmt: skip
    for client in clients:
        client.close(60.0)


def play(client: memoire.Client, states: Any) -> None:
    """Record an episode into a client's memory, report it, and push a cache if there is room."""
    memory = client.memory
    memory.open()
    for state in states:
        memory.add(0, (state, state[0]))
    memory.close(terminated=True)
    client.on_entries(len(states))
    client.on_episode(0, len(states), float(states[:, 0].sum()))
    client.push_cache(0.0)


def learner(first: int, number: int, pipe: Any, endpoint: str) -> None:
    """Draw, correct priorities, report and publish, until a question for the counts."""
    rng = np.random.default_rng(first)
    with memoire.Reader([endpoint], timeout=60.0) as reader:
        pipe.send("here")
        for turn in count(1):
            batch = reader.get_batch(BATCH, timeout=300.0)
            reader.update_priorities(batch.ids, rng.random(BATCH))
            reader.scalars({"loss": 1.0 / turn})
            if turn % 10 == 0:
                with contextlib.suppress(MemoireTimeout):  # on a busy machine the model is still being sent
                    reader.publish("policy", MODEL)
            if pipe.poll(TURN):
                break
        pipe.recv()
        pipe.send((turn, turn // 10))


def usage(pid: int) -> Usage:
    return memory(pid), descriptors(pid), threads(pid)


def watch(pids: Sequence[int], urls: Sequence[str], seconds: float) -> Iterator[list[Usage]]:
    """Yield the usage of each process, again and again, while the nodes' pages are read."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for url in urls:
            for page in ("/metrics", "/status"):
                with contextlib.suppress(OSError), urllib.request.urlopen(url + page, timeout=30.0) as answer:
                    answer.read()
        yield [usage(pid) for pid in pids]
        time.sleep(4 * TURN)


def medians(seen: Sequence[list[Usage]], place: int) -> tuple[list[int], list[int]]:
    """Return the medians of a process' usage in the second and in the last quarter of the time."""
    quarter = len(seen) // 4
    parts = (seen[quarter : 2 * quarter], seen[3 * quarter :])
    early, late = ([int(statistics.median(look[place][k] for look in part)) for k in range(3)] for part in parts)
    return early, late


def steady_hours() -> int:
    """Does any process grow over hours of steady work, in which everything is used and nothing is stopped?

    Eight actors step, end episodes and log through a proxy to a server that saves its state. A remote learner draws,
    corrects priorities, reports scalars and publishes models, which actors adopt. Metrics and status are scraped.
    Memory, descriptors and threads of each process are measured all the time. `Early` and `late` are the medians of the
    second and of the last quarter of the time, between which growth with the work shows. In the end the server has
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5400.0)
    args = parser.parse_args()
    pages = ["--http", "127.0.0.1:0"]
    with folder() as state, nodes(SCHEMA, "--state-dir", str(state), "--set=cache_size=128", *pages) as (server, proxy):
        assert server.process.stdout is not None
        url = server.process.stdout.readline().split()[-1].removesuffix("/status")
        crowd = Peers(actors_of_steady_hours, ACTORS, EACH, proxy.endpoint)
        reader = Peers(learner, 1, 1, proxy.endpoint)
        try:
            crowd.answers()
            reader.answers()
            pids = [server.pid, proxy.pid, reader.pids[0], *crowd.pids]
            seen = list(watch(pids, [url], args.seconds))
            counted = [each for counts in crowd.ask("counts") for each in counts]
            ((batches, models),) = reader.ask("counts")
            with memoire.Reader([server.endpoint], timeout=60.0) as last:
                totals = last.totals(timeout=60.0).totals
        finally:
            crowd.end()
            reader.end()
    crowds = [f"actors {k * EACH + 1} to {(k + 1) * EACH}" for k in range(ACTORS // EACH)]
    return report(args.seconds, ["server", "proxy", "learner", *crowds], seen, counted, batches, models, totals)


def report(
    spent: float, names: list[str], seen: list[list[Usage]], counted: list[Any], batches: int, models: int, totals: Any
) -> int:
    wrong, rows = [], []
    for place, name in enumerate(names):
        early, late = medians(seen, place)
        others = [f"{early[k]}, {late[k]}" for k in (1, 2)]
        rows.append([name, f"{early[0] / MiB:.1f} MiB", f"{late[0] / MiB:.1f} MiB", *others])
        if late[0] - early[0] > FLAT or late[1] > early[1] + 2 or late[2] > early[2]:
            wrong.append(f"{name}: bytes, descriptors and threads were {early} and are {late}")
    steps = sum(each for each, _, _ in counted)
    if totals.steps != steps:
        wrong.append(f"the server counted {totals.steps} steps, the actors {steps}")
    if min(version for _, _, version in counted) < models - 1:
        wrong.append(f"{models} models were published, and actors have {[version for *_, version in counted]}")
    print(f"{spent / 3600:.2f} h: {steps:,} steps in episodes of {EPISODE}, {steps // EPISODE:,} log lines, {batches:,} batches "
          f"of {BATCH} drawn and corrected, {models:,} models of {len(MODEL) >> 10} KiB; {len(seen):,} looks.\n")  # fmt: skip
    print(table(["process", "memory early", "late", "descriptors", "threads"], rows))
    return end(wrong)


if __name__ == "__main__":
    run_named(globals())
