"""Samples a second that reach a learner far from its servers, beside a server in the learner's process.

Actors, servers, proxies and readers are processes of their own, as in a cluster, and share this machine's cores. Actors
record step by step, as fast as they may, and push caches of 256 or episodes of 1000; readers draw batches of 256. Each
turn lasts some seconds. Between turns the actors rest, and the learner draws the remaining samples. The memories of
actors are full before the first turn.

* near: the server is in the learner's process, and everything else is the same.
* one of each: one server and one reader instead of several; as many actors.
* plain ZeroMQ: PUSH to a process that forwards to PULL, messages of as many distinct bytes as a cache has; no draws, no
  checks.
* Reverb: a server in a process of its own, actors that write step by step, a data set in the learner's process; each
  item is drawn once.
* TorchRL over Ray: its prioritized buffer as an actor of Ray, other actors that extend it by blocks of 256 steps, a
  learner that samples; a turn lasts until as many batches are drawn as blocks are inserted.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import zmq
from aims import read
from measure import TCP, Child, Report, ask, cells, close, measure_rounds, results, serve, spent_by, tell
from peers import PeerUnavailable, RemoteSide
from peers.tasks import BATCH, Task
from workloads import buffer_of, extend, play, server_of

import memoire
from memoire.errors import NotEnoughSamples
from memoire.net import sockets
from memoire.security import provision
from memoire.wire import containers
from wire import raw_receiver, raw_sender

TIMEOUT = 60.0
WARMUP = 0.7
"""Seconds of each turn before anything is counted."""
ENTRIES = {"W1": 50_000, "W2": 10_000}
BATCHES_PER_SECOND = {"W1": 40, "W2": 20}
"""Approximate rate of a peer by task: sets the batches of its turns, so that they last as long as memoire's."""
NEAR = "the server in the learner's process"
ONE = "one server and one reader"
RAW = "plain ZeroMQ, as many bytes through one process"


@dataclass(frozen=True)
class Cell:
    """Cluster to measure: its task and the number of processes of each role."""

    task: str
    actors: int = 4
    servers: int = 1
    readers: int = 1
    proxy: bool = False
    keys: str | None = None
    """Folder with the keys of all processes; None for no encryption."""

    def __str__(self) -> str:
        parts = [self.task, f"{self.actors} actors", f"{self.servers} servers", f"{self.readers} readers", "caches"]
        return ", ".join(parts + ["proxy"] * self.proxy + ["keys"] * bool(self.keys))

    @property
    def is_plain(self) -> bool:
        """True if the cluster has one server, one reader, no proxy and no keys."""
        return self == Cell(self.task, self.actors)

    def aims(self, baselines: Iterable[str]) -> dict[str, str]:
        """Map each baseline to the key of its row of aims.toml; baselines without a row are left out."""
        ends = {name: "near" if name == NEAR else name.partition(" ")[0].lower() for name in baselines}
        keys = {name: f"far-{self.task}-{self.actors}-{end}" for name, end in ends.items() if self.is_plain}
        keys |= {ONE: f"far-{self.task}-{self.servers}x{self.readers}"} if ONE in baselines else {}
        return {name: key for name, key in keys.items() if key in read()}


def clusters(keys: str) -> Iterator[Cell]:
    """Yield the clusters that are measured."""
    for task in ENTRIES:
        yield from (Cell(task, 1), Cell(task, 4), Cell(task, 16, servers=4, readers=4))
        if task == "W1":
            yield from (Cell(task, proxy=True), Cell(task, keys=keys))


# Processes of the sides. An order over a process' pipe begins or ends a turn; None ends the process.


def act(pipe: Connection, endpoint: str, cell: Cell, rank: int) -> None:
    """Run an actor, which records step by step while a turn lasts."""
    task = Task(cell.task, ENTRIES[cell.task])
    settings = {"seed": rank, "capacity": task.ring, "on_full": "block", "timeout": TIMEOUT, "keys": cell.keys}
    with memoire.connect(endpoint, **settings) as client:
        play(pipe, client, task, task.ring)


def serve_alone(pipe: Connection, cell: Cell) -> None:
    """Run a server in a process of its own."""
    serve(pipe, server_of(Task(cell.task, ENTRIES[cell.task]), keys=cell.keys))


def forward(pipe: Connection, servers: list[str], cell: Cell) -> None:
    """Run a proxy, which is ready when it has all servers."""
    proxy = memoire.Proxy(TCP, servers, keys=cell.keys)
    while len(proxy.servers) < len(servers):
        time.sleep(0.01)
    serve(pipe, proxy)


def learn(pipe: Connection, fronts: list[str], cell: Cell, place: int) -> None:
    """Run a learner with a reader of `fronts`, or with a server in its own process if `fronts` is empty."""
    if not fronts:
        with server_of(Task(cell.task, ENTRIES[cell.task]), keys=cell.keys) as server:
            pipe.send(server.endpoint)
            draw_in_turns(pipe, server.get_batch)
        return
    part = (place, cell.readers) if cell.readers > 1 else None
    with memoire.Reader(fronts, timeout=TIMEOUT, partition=part, keys=cell.keys) as reader:
        pipe.send("ready")
        draw_in_turns(pipe, reader.get_batch)


def draw_in_turns(pipe: Connection, draw: Callable[..., Any]) -> None:
    """Draw batches while a turn lasts; answer with their number, the seconds of all, and the seconds of each."""
    while (seconds := pipe.recv()) is not None:
        began = now = time.perf_counter()
        begin, end = began + WARMUP, began + WARMUP + seconds
        times: list[float] = []
        while now < end or not times:
            draw(BATCH, timeout=TIMEOUT)
            last, now = now, time.perf_counter()
            if now >= begin:
                times.append(now - last)
        pipe.send((len(times), now - begin, times))
        pipe.recv()
        with suppress(NotEnoughSamples):
            while True:
                draw(BATCH, timeout=0.3)
        pipe.send(None)


def relay(pipe: Connection, back: str, size: int) -> None:
    """Forward messages from PULL to PUSH unread, in place of a server."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.set(zmq.RCVHWM, sockets.data_mark(size))
        push.set(zmq.SNDHWM, sockets.data_mark(size))
        pull.bind(TCP)
        push.connect(back)
        pipe.send(pull.last_endpoint.decode())
        while pipe.recv() is not None:
            while not (pipe.poll() and not pull.poll(200)):
                if pull.poll(200):
                    push.send(pull.recv(copy=False), copy=False)
            pipe.recv()
        push.close(0)


# Sides of a comparison, and figures of each side's turns.


class Turn(NamedTuple):
    """Turn of a side: samples per second, CPU seconds per million samples by role, and the seconds of each batch."""

    rate: float
    costs: dict[str, float]
    times: list[float]


class Cluster:
    """Cluster of actors and a learner, which is near its server or far from it."""

    def __init__(self, cell: Cell, *, near: bool = False) -> None:
        self.roles: dict[str, list[Child]] = {}
        if near:
            fronts = [self.start("reader", learn, [], cell, 0)]
        else:
            fronts = [self.start("server", serve_alone, cell) for _ in range(cell.servers)]
            if cell.proxy:
                fronts = [self.start("proxy", forward, fronts, cell)]
            for place in range(cell.readers):
                self.start("reader", learn, fronts, cell, place)
        for rank in range(cell.actors):
            self.start("actors", act, fronts[rank % len(fronts)], cell, rank)

    def start(self, role: str, work: Callable[..., None], *args: Any) -> str:
        """Start a process and return its first answer: its address, if it has an address."""
        child = Child(work, *args)
        self.roles.setdefault(role, []).append(child)
        return str(child.first_answer)

    def take(self, seconds: float) -> Turn:
        tell(self.roles["actors"], 1)
        tell(self.roles["reader"], seconds)
        time.sleep(WARMUP)
        before = spent_in(self.roles)
        answers = [child.answer() for child in self.roles["reader"]]
        spent = {role: used - before[role] for role, used in spent_in(self.roles).items()}
        ask(self.roles["actors"], 0)
        ask(self.roles["reader"], 0)
        million = sum(count for count, _, _ in answers) * BATCH / 1e6
        rate = sum(count * BATCH / time for count, time, _ in answers)
        times = [each for *_, times in answers for each in times]
        return Turn(rate, {role: used / million for role, used in spent.items()}, times)

    def close(self) -> None:
        for role in ("actors", "reader", "proxy", "server"):
            close(*self.roles.get(role, ()))


class Raw:
    """Plain ZeroMQ, the upper limit: messages are neither recorded nor drawn nor checked."""

    def __init__(self, cell: Cell, size: int) -> None:
        self.end = Child(raw_receiver, TCP, size)
        self.middle = Child(relay, self.end.first_answer, size)
        self.senders = [Child(raw_sender, self.middle.first_answer, size) for _ in range(min(cell.actors, 4))]
        self.count = max(64, (1 << 29) // size) // len(self.senders) * len(self.senders)
        self.roles = {"actors": self.senders, "server": [self.middle], "reader": [self.end]}
        """Processes by role; the relay has the role of a server."""

    def take(self, seconds: float) -> Turn:
        before = spent_in(self.roles)
        self.middle.tell(1)
        self.end.tell(self.count)
        tell(self.senders, self.count // len(self.senders))
        taken, _ = self.end.answer()
        self.middle.tell(0)
        million = self.count * BATCH / 1e6
        costs = {role: (used - before[role]) / million for role, used in spent_in(self.roles).items()}
        return Turn(self.count * BATCH / taken, costs, [])

    def close(self) -> None:
        close(*self.senders, self.middle, self.end)


@dataclass
class Remote:
    """Side of a peer, whose turns last for a number of batches instead of seconds."""

    side: RemoteSide
    count: int

    def take(self, seconds: float) -> Turn:
        taken = self.side.clock(self.count)
        return Turn(self.count * BATCH / taken, {}, self.side.times())

    def close(self) -> None:
        """Do nothing: `PeerGroup.stop` ends the process of the peer."""


def spent_in(roles: dict[str, list[Child]]) -> dict[str, float]:
    """Return the CPU seconds that the processes of each role have used until now."""
    return {role: spent_by(child.pid for child in children) for role, children in roles.items()}


def cache_bytes(task: Task) -> int:
    """Return the bytes of a cache of 256 samples on the wire."""
    memory = buffer_of(task, task.ring).memory
    extend(memory, task)
    return containers.build(memory, BATCH, now=time.time()).nbytes


# Comparisons

COSTS = f"""CPU seconds for a million samples by role, which depend on what else runs less than rates do, and
milliseconds that a learner waited for a batch of {BATCH}:

| cluster | side | actors | server | proxy | reader, or learner with server | median | 99 % |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def cost(cell: Cell, side: str, turns: list[Turn]) -> str:
    """Print and return the side's row of the table of costs."""
    medians = {role: np.median([turn.costs[role] for turn in turns]) for role in turns[0].costs}
    figures = [f"{medians[role]:.2f}" if role in medians else "" for role in ("actors", "server", "proxy", "reader")]
    times = 1e3 * np.array([each for turn in turns for each in turn.times])
    figures += [f"{np.median(times):.2f}", f"{np.percentile(times, 99):.2f}"] if len(times) else ["", ""]
    row = cells(cell, side, *figures)
    print(row, flush=True)
    return row


def compare(report: Report, cell: Cell, *, seconds: float, rounds: int) -> list[str]:
    """Add the rows of a cell to the report; return its rows of the table of costs."""
    sides: dict[str, Any] = {"far": Cluster(cell)}
    try:
        if cell.servers > 1 and cell.readers > 1:
            sides[ONE] = Cluster(replace(cell, servers=1, readers=1))
        sides[NEAR] = Cluster(replace(cell, readers=1), near=True)
        sides[RAW] = Raw(cell, cache_bytes(Task(cell.task, ENTRIES[cell.task])))
        if cell.is_plain:
            sides |= remotes(report, cell, seconds)
        turns = measure_rounds([partial(side.take, seconds) for side in sides.values()], rounds)
        rates, baselines = [[turn.rate for turn in each] for each in turns], list(sides)[1:]
        report.add(*results(f"far, {cell}", rates, baselines, " samples/s", cell.aims(baselines)))
        return [cost(cell, name, each) for name, each in zip(sides, turns, strict=True)]
    finally:
        close(*sides.values())
        report.peer_group.stop()


def remotes(report: Report, cell: Cell, seconds: float) -> dict[str, Remote]:
    """Return the sides of Reverb and TorchRL that are available and finish a first turn."""
    count = max(4, int(seconds * BATCHES_PER_SECOND[cell.task])) // 4 * 4
    make = "RemoteEndToEnd", cell.task, ENTRIES[cell.task], cell.actors
    sides = {}
    for name, side in report.peer_group.sides({"reverb": make, "torchrl_ray": make}, most=count).items():
        try:
            side.clock(count)
            sides[name] = Remote(side, count)
        except PeerUnavailable as error:
            report.peer_group.leave_out(error)
    return sides


def main() -> None:
    report = Report.begin(__doc__, peers=True)
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        keys = str(Path(folder, "keys"))
        provision.write_cluster(Path(keys))
        for cell in clusters(keys):
            if re.search(report.only, str(cell)):
                seconds, rounds = (0.3, 1) if report.quick else (1.5, 4)
                costs += compare(report, cell, seconds=seconds, rounds=rounds)
    report.facts += [Task(name, ENTRIES[name]).described for name in ENTRIES]
    report.facts.append("\n".join([COSTS, *costs]))
    report.finish("farlearner")


if __name__ == "__main__":
    main()
