"""How many samples a second reach a learner, all included, beside Reverb over TCP and cpprb in shared memory?

Actors, in processes of their own, insert steps as fast as they may; the learner draws a batch of 256 for each 256
steps: a step is drawn once on average. Everybody's server is in the learner's process; all share the machine.

* memoire: actors insert episodes of 256 steps and push a cache for each over TCP; the learner calls `get_batch`.
* Reverb: a structured writer over gRPC, a queue that limits what is ahead, each item drawn once by a data set.
* cpprb: its Ape-X form for several processes on one machine; actors insert blocks of 256 steps, nothing is sent.
* plain ZeroMQ: PUSH and PULL over TCP, messages of as many distinct bytes; nobody draws and nobody looks.
"""

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from aims import read
from learner import schema_of
from measure import TCP, Child, Report, Side, cells, contest, family_of, spent_by
from measure import arguments as flags
from peers import NAMES, Company, PeerUnavailable, RemoteSide
from peers.tasks import ALPHA, BATCH, BETA, Task, from_the_first

import memoire
import wire
from memoire.wire import containers

RAW = "plain ZeroMQ, PULL of as many bytes"


def act(pipe: Connection, endpoint: str, name: str, entries: int, rank: int) -> None:
    """An actor: an episode of 256 steps, a cache; as often as it is told."""
    task = Task(name, entries)
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


class Ours:
    """A server in this process, its actors in others."""

    def __init__(self, task: Task, actors: int, count: int) -> None:
        self.most = count
        self.server = memoire.Server(
            TCP, schema_of(task), sampler=memoire.Prioritized(ALPHA, beta=BETA), multi_step=task.multi_step,
            frame_stack=task.stack, discount=0.99, byte_limit=wire.UNDRAWN_BYTES, seed=0,
        )  # fmt: skip
        endpoint = self.server.endpoint
        self.children = [Child(act, endpoint, task.name, task.entries, rank) for rank in range(actors)]
        self.message_bytes = int(self.children[0].first_answer)

    def __call__(self) -> None:
        self.clock(len(self.children))

    def clock(self, count: int) -> float:
        """Seconds for `count` batches, from the first on."""
        for child in self.children:
            child.tell(count // len(self.children))
        return from_the_first(lambda: self.server.get_batch(BATCH, timeout=60), count)

    def close(self) -> None:
        for child in self.children:
            child.close()
        self.server.close()


class Raw(wire.Raw):
    """The limit, as a side."""

    def __init__(self, size: int, actors: int, count: int) -> None:
        super().__init__(size, actors)
        self.most = count

    def __call__(self) -> None:
        self.clock(self.most)

    def clock(self, count: int) -> float:
        return self.take(count) * count / (count - 1)


def seconds_of(process: int, parent: int) -> tuple[float, float]:
    """CPU seconds that a process, and the others that descend from `parent`, have used so far."""
    return spent_by([process]), spent_by(each for each in family_of(parent)[1:] if each != process)


def cost(what: str, side: Any, count: int) -> str:
    """A row: what a batch costs the learner's process and the actors, in CPU time, which no other process disturbs."""
    parent = side.peer.process.pid if isinstance(side, RemoteSide) else os.getpid()
    process = side.receiver.pid if isinstance(side, Raw) else parent
    before = seconds_of(process, parent)
    side.clock(count)
    learner, actors = (1e6 * (b - a) / count for a, b in zip(before, seconds_of(process, parent), strict=True))
    print(f"    {what}: {actors:,.0f} us of the actors, {learner:,.0f} us of the learner's process a batch", flush=True)
    return cells(what, f"{actors:,.0f}", f"{learner:,.0f}")


COSTS: list[str] = []
COST = """What 256 samples cost, in microseconds of CPU time, which other processes hardly disturb; with cores
enough the dearer of the two bounds the rate:

| who | all actors | the learner's process, with the server |
| --- | ---: | ---: |"""


def compare(report: Report, company: Company, task: Task, actors: int, *, count: int, rounds: int) -> None:
    """The row of a task and so many actors."""
    ours = Ours(task, actors, count)
    raw = Raw(ours.message_bytes, actors, count)
    make = "end_to_end", task.name, min(task.entries, 10_000), actors
    slow = max(2 * actors, count // 8 // actors * actors)
    theirs: dict[str, Side] = {
        RAW: raw,
        **company.sides({"reverb": make}, most=slow),  # whose turns would take most of the time
        **company.sides({"cpprb": make}, most=count),
    }
    settings: dict[str, Any] = {"unit": " samples/s", "per_call": BATCH, "rounds": rounds}
    while True:
        aims = {each: f"end-{task.name}-{actors}-{each.split()[0].lower()}" for each in theirs if each != RAW}
        settings["aims"] = {each: key for each, key in aims.items() if key in read()}
        try:
            for side in (ours, *theirs.values()):
                side.clock(slow)  # type: ignore[attr-defined]  # warm
            what = f"end to end, {task.name}, {actors} actors"
            report.add(*contest(what, ours, theirs, **settings))
            for name, side in {"memoire": ours, **theirs}.items():
                COSTS.append(cost(f"{what}: {name}", side, getattr(side, "most", count)))
            break
        except PeerUnavailable as error:
            company.leave_out(error)
            theirs = {each: side for each, side in theirs.items() if NAMES[error.name] not in each}
    company.part()
    raw.close()
    ours.close()


def main() -> None:
    chosen = flags(__doc__, peers=True)
    company, report = Company(chosen.peers), Report(__doc__)
    report.heading()
    for name, entries, count in (("W1", 50_000, 1200), ("W2", 10_000, 120)):
        task = Task(name, entries // 5 if chosen.quick else entries)
        report.facts.append(task.described)
        for actors in (1, 4):
            if chosen.only in f"{name}, {actors} actors":
                turn = count // 30 if chosen.quick else count
                compare(report, company, task, actors, count=turn, rounds=2 if chosen.quick else 7)
    report.facts += ["\n".join([COST, *COSTS]), *company.facts()]
    report.finish(chosen.write, "endtoend")


if __name__ == "__main__":
    main()
