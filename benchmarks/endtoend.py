"""Samples a second that reach a learner, end to end, beside Reverb over TCP and cpprb in shared memory.

Actors, in processes of their own, insert steps as fast as they may; the learner draws a batch of 256 for each 256
steps: a step is drawn once on average. The server of each side is in the learner's process; all share the machine.

* memoire: actors insert episodes of 256 steps and push a cache for each over TCP; the learner calls `get_batch`.
* Reverb: a structured writer over gRPC, a queue that limits undrawn items; a data set draws each item once.
* cpprb: its Ape-X form for several processes on one machine; actors insert blocks of 256 steps into shared memory.
* plain ZeroMQ: PUSH and PULL over TCP, messages of as many distinct bytes; no draws, no checks.
"""

import os
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from aims import read
from measure import Embedded, Report, Side, cells, close, family_of, spent_by
from peers import RemoteSide
from peers.tasks import BATCH, Task
from workloads import server_of

import memoire
import wire
from memoire.wire import containers

RAW = "plain ZeroMQ, PULL of as many bytes"


def act(pipe: Connection, endpoint: str, task: Task, rank: int) -> None:
    """Run an actor: for each count from the pipe, record so many episodes of 256 steps and push a cache for each."""
    block = task.frames[:BATCH], task.actions[:BATCH], task.rewards[:BATCH]
    with memoire.connect(endpoint, seed=rank, capacity=task.ring, on_full="block", timeout=60) as client:
        memory = client.memory

        def episode() -> None:
            memory.open()
            memory.extend(0, block)
            memory.close(terminated=True, final_state=task.frames[BATCH])

        for _ in range(4):
            episode()
        client.update(timeout=60)
        pipe.send(containers.build(memory, BATCH, now=time.time()).nbytes)
        while (count := pipe.recv()) is not None:
            for _ in range(count):
                episode()
                while not client.push_cache(timeout=10):
                    pass


def cost(what: str, side: Any) -> str:
    """Return a row: the CPU time of a batch in the learner's process and in the actors."""
    parent = side.peer.process.pid if isinstance(side, RemoteSide) else os.getpid()
    process = side.receiver.pid if isinstance(side, wire.Raw) else parent

    def spent() -> np.ndarray:
        return np.array([spent_by([process]), spent_by({*family_of(parent)[1:]} - {process})])

    before = spent()
    side.clock(side.most)
    learner, actors = 1e6 * (spent() - before) / side.most
    print(f"    {what}: {actors:,.0f} us of the actors, {learner:,.0f} us of the learner's process a batch", flush=True)
    return cells(what, f"{actors:,.0f}", f"{learner:,.0f}")


COSTS: list[str] = []
COST = """CPU time of 256 samples in microseconds, which other processes hardly disturb. With enough cores the larger of
the two bounds the rate:

| who | all actors | the learner's process, with the server |
| --- | ---: | ---: |"""


def compare(report: Report, task: Task, actors: int, *, count: int, rounds: int) -> None:
    """Add the rows of a task with so many actors."""
    server = server_of(task, "caches", byte_limit=wire.UNDRAWN_BYTES)
    ours = Embedded(server, partial(server.get_batch, BATCH, timeout=60), count, act, actors, task)
    raw = wire.Raw(int(ours.children[0].first_answer), count, actors)
    make = "EndToEnd", task.name, min(task.entries, 10_000), actors
    slow = max(2 * actors, count // 8 // actors * actors)
    theirs: dict[str, Side] = {
        RAW: raw,
        **report.peer_group.sides({"reverb": make}, most=slow),  # longer turns of Reverb would take most of the time
        **report.peer_group.sides({"cpprb": make}, most=count),
    }
    aims = {each: f"end-{task.name}-{actors}-{each.split()[0].lower()}" for each in theirs}
    aims = {each: key for each, key in aims.items() if key in read()}
    what = f"end to end, {task.name}, {actors} actors"
    theirs = report.compare(what, ours, theirs, unit=" samples/s", per_call=BATCH, rounds=rounds, aims=aims)
    for name, side in {"memoire": ours, **theirs}.items():
        COSTS.append(cost(f"{what}: {name}", side))
    report.peer_group.stop()
    close(raw, ours)


def main() -> None:
    report = Report.begin(__doc__, peers=True)
    for name, entries, count in (("W1", 50_000, 1200), ("W2", 10_000, 120)):
        task = Task(name, entries // 5 if report.quick else entries)
        report.facts.append(task.described)
        for actors in (1, 4):
            if report.wants(f"{name}, {actors} actors"):
                turn = count // 30 if report.quick else count
                compare(report, task, actors, count=turn, rounds=2 if report.quick else 7)
    report.facts.append("\n".join([COST, *COSTS]))
    report.finish("endtoend")


if __name__ == "__main__":
    main()
