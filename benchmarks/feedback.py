"""Do TD errors reach their entries while these are held, within a second?

Actors, servers and learners are processes of their own and share this machine's cores. Actors record as fast as they
may, and push 8 samples for each entry as caches of 256, or whole episodes. The learner draws batches of 256 as fast as
it may and gives TD errors for each.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from farlearner import server_of
from learner import play
from measure import Child, Report, Result, Spread, amount, arguments, cells, head
from peers.tasks import BATCH, ERRORS, Task

import memoire
from memoire.errors import NotEnoughSamples

TIMEOUT = 60.0
ENTRIES = {"W1": 500_000, "W2": 40_000}
"""That all actors together hold: about ten seconds of steps."""
PER_INSERT = 8
WARM = 0.7
"""Seconds of each turn before batches are counted."""
LIMIT = 1.0
"""Seconds within which TD errors are to arrive; so long a turn goes on after the last one was given."""
LOOK_INTERVAL = 0.01
OUTCOMES = ("applied", "superseded", "gone", "stale", "lost", "waiting")


@dataclass(frozen=True)
class Cell:
    """A cluster to measure."""

    task: str
    actors: int
    place: str
    """Where the server is: "near", in the learner's process, or "far"."""
    storage: Literal["caches", "episodes"] = "caches"
    servers: int = 1

    def __str__(self) -> str:
        servers = [f"{self.servers} servers"] * (self.servers > 1)
        return ", ".join([self.place, self.task, f"{self.actors} actors", *servers, self.storage])


def clusters() -> Iterator[Cell]:
    """Those that matter."""
    for task in ENTRIES:
        for place in ("near", "far"):
            for actors in (1, 4):
                yield Cell(task, actors, place)
        yield Cell(task, 4, "far", "episodes")
        yield Cell(task, 4, "far", servers=2)


# The processes of a cluster. None over its pipe ends each.


def act(pipe: Connection, endpoint: str, cell: Cell, rank: int) -> None:
    """An actor: steps, one at a time, while a turn lasts. Its memory is full before the first."""
    task, ring = Task(cell.task, ENTRIES[cell.task]), ENTRIES[cell.task] // cell.actors
    with memoire.connect(endpoint, seed=rank, capacity=ring, on_full="block", timeout=TIMEOUT) as client:
        play(pipe, client, task, ring, 64)


def serve(pipe: Connection, cell: Cell) -> None:
    """A server alone: it answers what `Watch` is asked."""
    with server_of(Task(cell.task, ENTRIES[cell.task]), cell.storage, samples_per_insert=PER_INSERT) as server:
        pipe.send(server.endpoint)
        watch = Watch(server)
        while (asked := pipe.recv()) is not None:
            pipe.send(watch.ask(asked))


def learn(pipe: Connection, endpoints: list[str], cell: Cell) -> None:
    """A learner with a reader; or with a server in its process, which actors connect to, if there are no endpoints."""
    if endpoints:
        with memoire.Reader(endpoints, timeout=TIMEOUT) as reader:
            pipe.send("ready")
            draw_in_turns(pipe, reader.get_batch, lambda what: None)
    else:
        with server_of(Task(cell.task, ENTRIES[cell.task]), cell.storage, samples_per_insert=PER_INSERT) as server:
            pipe.send(server.endpoint)
            draw_in_turns(pipe, server.get_batch, Watch(server).ask)


def draw_in_turns(pipe: Connection, draw: Callable[..., Any], ask: Callable[[str], Any]) -> None:
    """In each turn draw batches and give TD errors for them, then draw on without giving any, until told to end it.

    Answers with the number of batches and their seconds, the number of all TD errors that were given, and, where they
    are to be looked at, the ids of each batch and when it was drawn.
    """
    while (turn := pipe.recv()) is not None:
        seconds, is_looked_at = turn
        before, (batches, given), drawn = ask("sums"), (0, 0), []
        if is_looked_at:
            ask("look")
        began = now = time.monotonic()
        while now < began + WARM + seconds:
            batch = draw(BATCH, timeout=TIMEOUT)
            at, now = now, time.monotonic()
            if is_looked_at:
                drawn.append((now, batch.ids))
            batch.update_priorities(ERRORS[given % len(ERRORS)])
            given, batches = given + 1, batches + (at >= began + WARM)
        spent, over = now - began - WARM, now + LIMIT
        while now < over:
            draw(BATCH, timeout=TIMEOUT)
            now = time.monotonic()
        pipe.send((batches, spent, given * BATCH, before, ask("sums"), drawn, ask("seen") if is_looked_at else None))
        while not pipe.poll():  # actors may wait for room
            with suppress(NotEnoughSamples):
                draw(BATCH, timeout=0.1)
        pipe.recv()
        pipe.send(None)


class Watch:
    """Says what became of TD errors at a server."""

    def __init__(self, server: memoire.Server) -> None:
        self._server, self._is_over = server, threading.Event()
        self._seen: list[tuple[float, dict[str, int]]] = []
        """Moments, and how many TD errors of each client were settled then."""

    def ask(self, what: str) -> Any:
        """Sums; or begin to look, which takes time; or what was seen since."""
        if what == "sums":
            return sums_of(self._server.stats())
        if what == "look":
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
            return None
        self._is_over.set()
        self._thread.join()
        return self._seen

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_INTERVAL):
            told = {each.client: each.feedback.given - each.feedback.waiting for each in self._server.clients()}
            self._seen.append((time.monotonic(), told))


def sums_of(stats: Any) -> dict[str, int]:
    """What a server says of TD errors. `in_time`: those that were acknowledged within `LIMIT`, or applied at once."""
    own, delay = stats.feedback_owners["server"], stats.feedback_delay
    timely = sum(count for bound, count in zip(delay.bounds, delay.counts, strict=False) if bound <= LIMIT)
    return asdict(stats.feedback) | {"in_time": own.applied + own.gone + timely}


class Cluster:
    """Actors, and a learner that is near its server or far from it."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.servers: list[Child] = []
        if cell.place == "far":
            self.servers = [Child(serve, cell) for _ in range(cell.servers)]
        endpoints = [str(server.first_answer) for server in self.servers]
        self.learner = Child(learn, endpoints, cell)
        fronts = endpoints or [self.learner.first_answer]
        self.actors = [Child(act, fronts[rank % len(fronts)], cell, rank) for rank in range(cell.actors)]

    def take(self, seconds: float, *, is_looked_at: bool = False) -> dict[str, float]:
        """Have a turn; returns its rate in batches a second, and what became of TD errors."""
        before = self._ask_servers("sums")
        if is_looked_at:
            self._ask_servers("look")
        for actor in self.actors:
            actor.tell(1)
        self.learner.tell((seconds, is_looked_at))
        batches, spent, given, mine, now, drawn, progress = self.learner.answer()
        after = self._ask_servers("sums")
        for actor in self.actors:
            actor.tell(0)
        for actor in self.actors:
            actor.answer()
        self.learner.tell(0)
        self.learner.answer()
        found: Counter[str] = Counter()
        for sums, sign in ((before, -1), (after, 1), ([mine] if mine else [], -1), ([now] if now else [], 1)):
            for each in sums:
                found.update({name: sign * value for name, value in each.items()})
        found["lost"] += given - found["given"]  # no server knew these owners
        found["given"] = given
        figures = {**found, "rate": batches / spent}
        if is_looked_at:
            seen = [progress] if progress else self._ask_servers("seen")
            figures |= {"drawn": len(drawn) * BATCH, "drawn_waiting": drawn_while_waiting(drawn, seen)}
        return figures

    def _ask_servers(self, what: str) -> list[Any]:
        for server in self.servers:
            server.tell(what)
        return [server.answer() for server in self.servers]

    def close(self) -> None:
        for child in (*self.actors, self.learner, *self.servers):
            child.close()


def drawn_while_waiting(drawn: list[tuple[float, Any]], seen: list[list[tuple[float, dict[str, int]]]]) -> int:
    """Draws of an entry that was drawn before, while the TD error that was given then had not reached it.

    Args:
        drawn: Moments and ids of batches, in order; TD errors were given for all of them.
        seen: Of each server moments, and how many TD errors of each client were settled then, which are so in order.
    """
    moments = np.concatenate([np.full(len(ids), at) for at, ids in drawn])
    ids = np.concatenate([ids for _, ids in drawn])
    count = 0
    for client in np.unique(ids["client"], axis=0):
        name = client.astype("<u8").tobytes().hex()
        mine = np.flatnonzero((ids["client"] == client).all(axis=1))
        numbers, at = ids["number"][mine], moments[mine]
        told = [(moment, settled[name]) for each in seen for moment, settled in each if name in settled]
        if not told:
            continue
        when, settled = map(np.array, zip(*told, strict=True))
        begin = np.searchsorted(when, at[0], "right") - 1
        place = np.searchsorted(settled, settled[max(begin, 0)] + 1 + np.arange(len(mine)))
        ends = np.append(when, np.inf)[place]  # when each was settled
        order = np.lexsort([at, numbers])
        again = numbers[order[1:]] == numbers[order[:-1]]
        count += int((again & (at[order[1:]] < ends[order[:-1]])).sum())
    return count


# Comparisons


@dataclass(frozen=True)
class Shares:
    """Of the TD errors of a cell, over all of its turns."""

    usable: float
    """Applied or superseded, of those whose entry was held when they were given."""
    timely: float
    """Acknowledged within `LIMIT`, of all."""
    lost: float

    @classmethod
    def of(cls, turns: list[dict[str, float]]) -> "Shares":
        sums = sums_over(turns)
        held = sums["given"] - sums["gone"]
        return cls(
            (sums["applied"] + sums["superseded"]) / held, sums["in_time"] / sums["given"], sums["lost"] / sums["given"]
        )


def sums_over(turns: list[dict[str, float]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for turn in turns:
        sums.update(turn)
    return sums


WORDS = f"""What became of TD errors, in percent of those that were given: what a learner gives, a server settles or
keeps. *batches*: of the learner, a second. *held*: applied or superseded, of those whose entry was held when they were
given. *in time*: of all that were given, those that were acknowledged within {LIMIT:g} s of their arrival; superseded,
lost and waiting ones are not. *again*: of all draws, those of an entry whose TD error was waiting.

What accounting for TD errors costs was measured beside commit 080c453e, which does not, in turns of one run: batches a
second in the worst cluster (far, W2, 1 actor) 0.93 of its (0.90 to 0.95; wanted: 0.95), in the eleven others 0.94 to
1.34. That commit loses 92 % or more of the TD errors of one actor of W1. `benchmarks/feedback.py` of
commit d3390ce1 printed these.
"""
HEAD = head("cluster", "batches", "given", *OUTCOMES, "held", "in time", "again")


def account(cell: Cell, turns: list[dict[str, float]], look: dict[str, float]) -> str:
    """A row of that table."""
    sums, shares, rate = sums_over(turns), Shares.of(turns), median(turn["rate"] for turn in turns)
    parts = [*(sums[name] / sums["given"] for name in OUTCOMES), shares.usable, shares.timely]
    parts.append(look["drawn_waiting"] / look["drawn"])
    row = cells(cell, f"{amount(rate)}/s", f"{sums['given']:,}", *(f"{part:.2%}" for part in parts))
    print(row, flush=True)
    return row


def worst(report: Report, shares: list[Shares]) -> None:
    """The rows of the clusters that are worst."""
    for key, what, values, pick in (
        ("feedback-usable", "held when given: applied or superseded", [each.usable for each in shares], min),
        ("feedback-timely", f"acknowledged within {LIMIT:g} s", [each.timely for each in shares], min),
        ("feedback-lost", "lost", [max(1e-6, each.lost) for each in shares], max),
    ):
        one, share = Spread.one(1.0), Spread.one(pick(values))
        report.add(Result(f"the worst of these clusters, {what}", "", share, one, share, "all TD errors", None, key))


def main() -> None:
    chosen = arguments(__doc__)
    report = Report(__doc__)
    report.heading()
    seconds, rounds = (0.5, 1) if chosen.quick else (2.0, 3)
    shares, rows = [], [HEAD]
    for cell in clusters():
        if chosen.only in str(cell):
            cluster = Cluster(cell)
            cluster.take(0.3)
            turns = [cluster.take(seconds) for _ in range(rounds)]
            rows.append(account(cell, turns, cluster.take(seconds, is_looked_at=True)))
            shares.append(Shares.of(turns))
            cluster.close()
    worst(report, shares)
    report.facts += [Task(name, entries).described for name, entries in ENTRIES.items()]
    report.facts.append("\n".join([WORDS, *rows]))
    report.finish(chosen.write, "feedback")


if __name__ == "__main__":
    main()
