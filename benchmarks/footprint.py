"""How much memory does a sample take while it is held: in a process of one's own, and at a server?

Everybody fills a replay memory in a process of its own, with values that nothing can compress; what that process has
grown by, as the system counts it, is divided by what can be drawn afterwards. The limit is a sample alone: both states
(for W2 both stacks), action and reward, as a batch has them. Peers keep their steps as learner.py says.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import learner
from measure import TCP, Child, Report, Result, Spread, resident
from measure import arguments as flags
from peers import NAMES, Peer, PeerUnavailable
from peers.tasks import BATCH, EPISODE, Task
from workloads import Workload, w1, w2

import memoire
import wire

LIMIT = "the sample's own bytes"
SERVER_BYTES = 2 << 30
MOST = {"reverb": 20_000}
"""Samples that a peer holds at most in these comparisons."""
Grown = tuple[int, int]
"""Bytes, and the samples that they are for."""


def of_peer(name: str, task: str, entries: int) -> Grown:
    peer, entries = Peer(name), min(entries, MOST.get(name, entries))
    try:
        peer.ask("make", "TASK", [task, entries])
        peer.ask("make", "filled", [task, EPISODE])  # a first small one: what it loads and starts is not counted
        before = resident(peer.process.pid)
        peer.ask("make", "filled", [task, entries])
        return resident(peer.process.pid) - before, entries
    finally:
        peer.close()


def alone(pipe: Connection, task: str, entries: int) -> None:
    """A buffer of this process, filled when told to."""
    steps = Task(task, entries)
    learner.filled(Task(task, EPISODE))
    pipe.send(None)
    while pipe.recv() is not None:
        held = learner.filled(steps)
        pipe.send(held.memory.num_entries)


def of_buffer(task: str, entries: int) -> Grown:
    child = Child(alone, task, entries)
    before = resident(child.pid)
    child.tell(1)
    samples = int(child.answer())
    grown = resident(child.pid) - before
    child.close()
    return grown, samples


def serving(pipe: Connection, workload: Workload, storage: str) -> None:
    """A server alone; told how many caches or episodes to wait for, it says how many samples it holds then."""
    settings: dict[str, Any] = {"parameters": workload.parameters, "byte_limit": SERVER_BYTES, "storage": storage}
    with memoire.Server(TCP, workload.schema, **settings) as server:
        pipe.send(server.push_endpoint)
        while (count := pipe.recv()) is not None:
            while server.total_caches < count:
                time.sleep(0.01)
            pipe.send(server.totals().accepted_samples)


def of_server(workload: Workload, storage: str, count: int) -> Grown:
    """One that has taken in so many caches, or episodes."""
    server = Child(serving, workload, storage)
    sender = Child(wire.sender, server.first_answer, workload, storage)
    before = resident(server.pid)
    sender.tell(count)
    server.tell(count)
    samples = int(server.answer())
    grown = resident(server.pid) - before
    sender.close()
    server.close()
    return grown, samples


def rows(entries: dict[str, int], peers: list[str], leave_out: Callable[[str], object], only: str) -> Iterator[Result]:
    """A row for everybody with whom memoire is compared: the ratio is how many times as much they take."""
    for name, count in entries.items():
        workload = {"W1": w1, "W2": w2}[name](count)
        ours = {
            f"a sample in a process, {name}": partial(of_buffer, name, count),
            f"a sample at a server, caches, {name}": partial(of_server, workload, "caches", count // BATCH),
            f"a sample at a server, episodes, {name}": partial(of_server, workload, "episodes", count // EPISODE),
        }
        ours = {what: measured for what, measured in ours.items() if only in what}
        if not ours:
            continue
        theirs = {LIMIT: (wire.batch_bytes(workload), BATCH)}
        for peer in peers:
            try:
                theirs[NAMES[peer]] = of_peer(peer, name, count)
            except PeerUnavailable as error:
                leave_out(f"Left out: {error}")
        for what, measured in ours.items():
            grown, samples = measured()
            for baseline, (others, of_them) in theirs.items():
                mine, taken = grown / samples, others / of_them
                yield Result(what, "B", *map(Spread.one, (mine, taken, taken / mine)), baseline)


def main() -> None:
    chosen = flags(__doc__, peers=True)
    report = Report(__doc__, better="smaller")
    report.heading()
    entries = {"W2": 1_000} if chosen.quick else {"W1": 100_000, "W2": 10_000}
    peers = [] if chosen.peers == "none" else chosen.peers.split(",")
    for row in rows(entries, peers, report.facts.append, chosen.only):
        report.add(row)
    report.finish(chosen.write, "footprint")


if __name__ == "__main__":
    main()
