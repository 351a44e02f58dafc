"""Share of its time that a learner waits for batches of 256 Atari stacks, with 4 actors and steps of 10 ms."""

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from measure import TCP, Child, Report, Result, Spread, close, serve
from peers.tasks import BATCH
from workloads import Workload, w2

import memoire

ACTORS = 4
STEP = 0.010
"""Seconds of a training step, in which the learner's processor is idle: the learner waits for an accelerator."""
PACE = 0.9 * ACTORS * STEP
"""Seconds between two caches of an actor: all actors together push slightly more than the learner draws."""
BYTES = 1 << 30
FACTS = f"""{w2(10_000).described}. A step is a sleep of {STEP * 1000:.0f} ms, for an accelerator that computes.
Each of {ACTORS} actors, a process of its own, draws a cache of {BATCH} samples and pushes it over TCP every
{PACE * 1000:.0f} ms, so that drawn samples are new. The ratio is the share of time that the learner waited in
`next(batches)`, over stretches of steps: smaller is better. *embedded*: the server is in the learner's
process. *remote*: it is a process of its own, and batches come over TCP. A remote learner asks for about as
many samples a second as one [far from its server](farlearner.md) can get on two cores."""


def actor(pipe: Connection, endpoint: str, workload: Workload, rank: int) -> None:
    """Run an actor, which pushes a cache every `PACE` seconds until the pipe has an order."""
    with memoire.connect(endpoint, seed=rank, capacity=workload.ring, on_full="skip", timeout=60) as client:
        workload.fill(client.memory, rank)
        client.update(timeout=60)
        pipe.send("ready")
        due = time.monotonic()
        while not pipe.poll(max(0.0, due - time.monotonic())):
            client.push_cache(timeout=0.0)
            due = max(due + PACE, time.monotonic() - PACE)


def server_of(workload: Workload) -> memoire.Server:
    return memoire.Server(TCP, workload.schema, parameters=workload.parameters, byte_limit=BYTES, seed=0)


def alone(pipe: Connection, workload: Workload) -> None:
    """Run a server in a process of its own."""
    serve(pipe, server_of(workload))


def waits(batches: Iterator[Any], steps: int, stretches: int) -> tuple[list[float], list[float]]:
    """Return the mean seconds of a step that were waited, and of the whole step, for each stretch but the first."""
    waited: list[float] = []
    whole: list[float] = []
    for stretch in range(stretches + 1):
        lost, began = 0.0, time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            next(batches)
            lost += time.perf_counter() - asked
            time.sleep(STEP)
        if stretch:
            waited.append(lost / steps)
            whole.append((time.perf_counter() - began) / steps)
    return waited, whole


def row(what: str, waited: list[float], whole: list[float], aim: str = "") -> Result:
    shares = [max(1e-4, one / other) for one, other in zip(waited, whole, strict=True)]
    spreads = Spread.of(waited), Spread.of(whole), Spread.of(shares)
    return Result(f"{what}: share of its time", " s", *spreads, "its whole time, a step", aim)


def with_actors(endpoint: str, workload: Workload) -> list[Child]:
    return [Child(actor, endpoint, workload, rank) for rank in range(ACTORS)]


def main() -> None:
    report = Report.begin(__doc__, FACTS)
    workload = w2(10_000)
    steps, stretches = (20, 2) if report.quick else (200, 7)
    with server_of(workload) as embedded:
        children = with_actors(embedded.endpoint, workload)
        for ahead in (0, 2):
            what = f"embedded, {ahead or 'none'} ahead"
            if report.wants(what):
                batches = embedded.batches(BATCH, timeout=60, ahead=ahead)
                report.add(row(what, *waits(batches, steps, stretches), "learner-waits" if ahead else ""))
        close(*children)
    if report.wants("remote, prefetched"):
        server = Child(alone, workload)
        children = with_actors(server.first_answer, workload)
        with memoire.Reader([server.first_answer], timeout=60) as reader:
            report.add(row("remote, prefetched", *waits(reader.batches(BATCH, 60), steps, stretches)))
        close(*children, server)
    report.finish("waiting")


if __name__ == "__main__":
    main()
