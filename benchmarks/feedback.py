"""TD errors from learners: the share that reaches its entries while these are held, and within a second.

Actors, servers and learners are processes of their own and share this machine's cores. Actors record as fast as they
may, and push 8 samples for each entry as caches of 256, or whole episodes. The learner draws batches of 256 as fast as
it may and sends TD errors for each.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from measure import Child, Report, Result, Spread, amount, ask, cells, close, head, tell
from peers.tasks import BATCH, ERRORS, Task
from workloads import play, server_of

import memoire
from memoire.errors import NotEnoughSamples

TIMEOUT = 60.0
ENTRIES = {"W1": 500_000, "W2": 40_000}
"""Entries that all actors together hold: about ten seconds of steps."""
PER_INSERT = 8
WARMUP = 0.7
"""Seconds of each turn before batches are counted."""
LIMIT = 1.0
"""Seconds within which TD errors have to arrive; a turn lasts so much longer after its last TD error."""
OUTCOMES = ("applied", "superseded", "gone", "stale", "lost", "waiting")


@dataclass(frozen=True)
class Cell:
    """Cluster to measure: its task, its actors, the place of its server, and its storage."""

    task: str
    actors: int
    place: str
    """Place of the server: "near", in the learner's process, or "far"."""
    storage: Literal["caches", "episodes"] = "caches"
    servers: int = 1

    def __str__(self) -> str:
        servers = [f"{self.servers} servers"] * (self.servers > 1)
        return ", ".join([self.place, self.task, f"{self.actors} actors", *servers, self.storage])


def clusters() -> Iterator[Cell]:
    """Yield the clusters that are measured."""
    for task in ENTRIES:
        yield from (Cell(task, actors, place) for place in ("near", "far") for actors in (1, 4))
        yield from (Cell(task, 4, "far", "episodes"), Cell(task, 4, "far", servers=2))


# Processes of a cluster. None over a process' pipe ends the process.


def act(pipe: Connection, endpoint: str, cell: Cell, rank: int) -> None:
    """Run an actor, which records step by step while a turn lasts. The actor's memory is full before the first turn."""
    task, ring = Task(cell.task, ENTRIES[cell.task]), ENTRIES[cell.task] // cell.actors
    with memoire.connect(endpoint, seed=rank, capacity=ring, on_full="block", timeout=TIMEOUT) as client:
        play(pipe, client, task, ring)


def serving(cell: Cell) -> memoire.Server:
    return server_of(Task(cell.task, ENTRIES[cell.task]), cell.storage, samples_per_insert=PER_INSERT)


def serve(pipe: Connection, cell: Cell) -> None:
    """Run a server in a process of its own, which answers each order with its counts of TD errors."""
    with serving(cell) as server:
        pipe.send(server.endpoint)
        while pipe.recv() is not None:
            pipe.send(sums_of(server))


def learn(pipe: Connection, endpoints: list[str], cell: Cell) -> None:
    """Run a learner with a reader of `endpoints`, or with a server in its own process if there are no endpoints."""
    if endpoints:
        with memoire.Reader(endpoints, timeout=TIMEOUT) as reader:
            pipe.send("ready")
            draw_in_turns(pipe, reader.get_batch, Counter)
    else:
        with serving(cell) as server:
            pipe.send(server.endpoint)
            draw_in_turns(pipe, server.get_batch, partial(sums_of, server))


def draw_in_turns(pipe: Connection, draw: Callable[..., Any], sums: Callable[[], Counter[str]]) -> None:
    """In each turn draw batches and send TD errors for them, then draw without TD errors until the turn is ended.

    Answer with batches a second, the number of TD errors that were sent, and the growth of `sums`.
    """
    while (seconds := pipe.recv()) is not None:
        before, batches, updates = sums(), 0, 0
        began = now = time.monotonic()
        while now < began + WARMUP + seconds:
            batch = draw(BATCH, timeout=TIMEOUT)
            at, now = now, time.monotonic()
            batch.update_priorities(ERRORS[updates % len(ERRORS)])
            updates, batches = updates + 1, batches + (at >= began + WARMUP)
        spent, over = now - began - WARMUP, now + LIMIT
        while now < over:
            draw(BATCH, timeout=TIMEOUT)
            now = time.monotonic()
        counts = sums()
        counts.subtract(before)
        pipe.send((batches / spent, updates * BATCH, counts))
        while not pipe.poll():  # actors may wait for room, so the learner still draws
            with suppress(NotEnoughSamples):
                draw(BATCH, timeout=0.1)
        pipe.send(pipe.recv())


def sums_of(server: memoire.Server) -> Counter[str]:
    """Return a server's counts of TD errors. `in_time` counts those acknowledged within `LIMIT`, or applied at once."""
    stats = server.stats()
    owner, delay = stats.feedback_owners["server"], stats.feedback_delay
    timely = sum(count for bound, count in zip(delay.bounds, delay.counts, strict=False) if bound <= LIMIT)
    return Counter(asdict(stats.feedback) | {"in_time": owner.applied + owner.gone + timely})


class Cluster:
    """Cluster of actors and a learner, which is near its server or far from it."""

    def __init__(self, cell: Cell) -> None:
        self.servers = [Child(serve, cell) for _ in range(cell.servers if cell.place == "far" else 0)]
        endpoints = [str(server.first_answer) for server in self.servers]
        self.learner = Child(learn, endpoints, cell)
        fronts = endpoints or [self.learner.first_answer]
        self.actors = [Child(act, fronts[rank % len(fronts)], cell, rank) for rank in range(cell.actors)]

    def take(self, seconds: float) -> Counter[str]:
        """Run a turn; return the counts of TD errors by outcome, and the rate in batches a second."""
        before = self.sums()
        tell(self.actors, 1)
        self.learner.tell(seconds)
        rate, error_count, counts = self.learner.answer()
        counts.update(self.sums())
        counts.subtract(before)
        ask(self.actors, 0)
        ask([self.learner], 0)
        counts["lost"] += error_count - counts["given"]  # no server knew these owners
        counts["given"], counts["rate"] = error_count, rate
        return counts

    def sums(self) -> Counter[str]:
        """Return the summed counts of all servers that are processes of their own."""
        counts: Counter[str] = Counter()
        for each in ask(self.servers, "sums"):
            counts.update(each)
        return counts

    def close(self) -> None:
        close(*self.actors, self.learner, *self.servers)


# Comparisons

WORDS = f"""Outcomes of TD errors, in percent of all that the learner gave. *batches*: rate of the learner. *held*:
share of applied or superseded TD errors, of those whose entry was held when they were given. *in time*: share of all TD
errors that were acknowledged within {LIMIT:g} s of their arrival; superseded, lost and waiting TD errors do not count.
Of all draws, 3 to 18 % were of an entry whose TD error was waiting; with episodes, 0 %. `benchmarks/feedback.py` of
commit 294c2516 measured these shares.

The cost of accounting for TD errors was measured in turns of one run beside commit 080c453e, which has none. Batches
a second in the worst cluster (far, W2, 1 actor) were 0.93 of that commit's (0.90 to 0.95; wanted: 0.95), in
the eleven others 0.94 to 1.34. That commit loses 92 % or more of the TD errors of one actor of W1.
`benchmarks/feedback.py` of commit d3390ce1 printed these figures.
"""
HEAD = head("cluster", "batches", "given", *OUTCOMES, "held", "in time")


def shares_of(sums: Counter[str]) -> tuple[float, float, float]:
    """Return three shares of a cluster's TD errors: applied or superseded, of those whose entry was held when sent;
    acknowledged within `LIMIT`, of all; lost, of all.
    """
    total, usable = sums["given"], sums["applied"] + sums["superseded"]
    return usable / (total - sums["gone"]), sums["in_time"] / total, sums["lost"] / total


def account(cell: Cell, turns: list[Counter[str]], sums: Counter[str]) -> str:
    """Print and return the cluster's row of the table of outcomes."""
    parts = [*(sums[name] / sums["given"] for name in OUTCOMES), *shares_of(sums)[:2]]
    rate = amount(median(turn["rate"] for turn in turns))
    row = cells(cell, f"{rate}/s", f"{sums['given']:,}", *(f"{part:.2%}" for part in parts))
    print(row, flush=True)
    return row


def main() -> None:
    report = Report.begin(__doc__)
    seconds, rounds = (0.5, 1) if report.quick else (2.0, 3)
    shares, rows = [], [HEAD]
    for cell in clusters():
        if report.wants(str(cell)):
            cluster = Cluster(cell)
            cluster.take(0.3)
            turns = [cluster.take(seconds) for _ in range(rounds)]
            sums = sum(turns, Counter())
            rows.append(account(cell, turns, sums))
            shares.append(shares_of(sums))
            cluster.close()
    usable, timely, lost = zip(*shares, strict=True)
    for key, what, worst in (
        ("feedback-usable", "held when given: applied or superseded", min(usable)),
        ("feedback-timely", f"acknowledged within {LIMIT:g} s", min(timely)),
        ("feedback-lost", "lost", max(1e-6, *lost)),
    ):
        one, share = Spread.one(1.0), Spread.one(worst)
        report.add(Result(f"the worst of these clusters, {what}", "", share, one, share, "all TD errors", key))
    report.facts += [Task(name, entries).described for name, entries in ENTRIES.items()]
    report.facts.append("\n".join([WORDS, *rows]))
    report.finish("feedback")


if __name__ == "__main__":
    main()
