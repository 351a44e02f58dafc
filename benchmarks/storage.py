"""Bytes of an environment step on the wire, with caches from actors and with episodes at the server."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress

import numpy as np
from measure import TCP, arguments, cells, close, head, machine, write_page
from peers.tasks import BATCH, EPISODE
from workloads import Workload, w1, w2

import memoire
from memoire.client.client import Client
from memoire.limits import Limits

RATES = (1 / 8, 1.0, 8.0, 256.0)
"""Samples that a learner trains on for each environment step."""
CACHES = 16
"""Caches that are pushed for each figure."""
MIN_STEPS = 4 * EPISODE
"""Minimum of steps that are recorded for each figure of episodes: a few whole episodes."""


class Meter:
    """TCP forwarder in front of a port, which counts the bytes of both directions."""

    def __init__(self, behind: str) -> None:
        self.behind = int(behind.rpartition(":")[2])
        self.bytes, self.lock = 0, threading.Lock()
        self.open = [socket.create_server(("127.0.0.1", 0))]
        self.endpoint = f"tcp://127.0.0.1:{self.open[0].getsockname()[1]}"
        self.start(self.accept)

    def start(self, work: Callable[..., None], *args: socket.socket) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.open[0].accept()
                server = socket.create_connection(("127.0.0.1", self.behind))
                self.open += [client, server]
                self.start(self.carry, client, server)
                self.start(self.carry, server, client)

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                with self.lock:
                    self.bytes += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        close(*self.open)


class Metered:
    """Server and actor whose bytes on the wire are counted."""

    def __init__(self, schema: memoire.Schema, parameters: memoire.Parameters, storage: str, capacity: int) -> None:
        limits = Limits(held_bytes=2 << 30, credit=256 << 20)
        self.server = memoire.Server(TCP, schema, parameters=parameters, storage=storage, limits=limits, seed=1)
        ends = {"push": self.server.push_endpoint, "subscribe": self.server.pub_endpoint}
        self.meters = [Meter(end) for end in (self.server.endpoint, *ends.values())]
        request, *others = (meter.endpoint for meter in self.meters)
        settings = dict(zip(ends, others, strict=True))
        self.client = Client(request, **settings, capacity=capacity, on_full="block", limits=limits, seed=2)

    @property
    def bytes(self) -> int:
        return sum(meter.bytes for meter in self.meters)

    def settle(self) -> None:
        """Wait until all caches in flight have arrived."""
        deadline = time.monotonic() + 120.0
        while self.client.stats().in_flight_caches:
            assert time.monotonic() < deadline, "caches are still in flight after two minutes"
            self.client.update(timeout=120.0)

    def close(self) -> None:
        close(self.client, self.server, *self.meters)


def cluster_of(workload: Workload, storage: str, rate: float) -> Metered:
    """Return a server and an actor; with storage in caches, the memory of the actor is full."""
    parameters = workload.parameters.replace(samples_per_insert=rate, cache_size=BATCH)
    cluster = Metered(workload.schema, parameters, storage, workload.ring)
    if storage == "caches":
        workload.fill(cluster.client.memory, 0)
    return cluster


def act(cluster: Metered, workload: Workload, steps: int) -> None:
    """Record steps of distinct values, and wait until they have arrived."""
    state, action, reward = workload.episode(np.random.default_rng(0))
    with cluster.client.writer(autoreset="disabled") as writer:
        for step in range(steps):
            at = step % EPISODE
            ends = at == EPISODE - 1
            following = state[(at + 1) % EPISODE]
            writer.step(state[at], action[at], reward[at], False, ends, following.copy() if ends else following)
            if ends:
                writer.reset(state[0])
    cluster.settle()


def per_step(workload: Workload, storage: str, rate: float, caches: int, least: int) -> float:
    """Return all bytes between actor and server, divided by the recorded steps."""
    steps = max(1, round(caches * BATCH / rate))
    with closing(cluster_of(workload, storage, rate)) as cluster:
        cluster.settle()
        before = cluster.bytes
        act(cluster, workload, max(steps, least) if storage == "episodes" else steps)
        return (cluster.bytes - before) / cluster.client.stats().steps


def per_sample(workload: Workload, storage: str, batches: int) -> float:
    """Return the bytes that a remote learner receives and sends for each sample."""
    with closing(cluster_of(workload, storage, 1.0)) as cluster:
        act(cluster, workload, 4 * EPISODE)
        return far_away(cluster, batches)


def far_away(cluster: Metered, batches: int) -> float:
    """Return the bytes for each sample of a remote learner that draws batches and prefetches."""
    with closing(Meter(cluster.server.endpoint)) as meter, memoire.Reader([meter.endpoint], seed=3) as reader:
        for _ in range(batches):
            reader.get_batch(BATCH, 60.0)
        drawn = -1
        while drawn != cluster.server.stats().samples:  # wait for the prefetched samples
            drawn = cluster.server.stats().samples
            time.sleep(0.5)
        return meter.bytes / drawn


HEAD = head("workload", "samples per insert", "caches, bytes per step", "episodes, bytes per step", "fewer bytes")
FAR_HEAD = head("workload", "caches, bytes per sample", "episodes, bytes per sample")
COUNTED = """\
Counted on TCP between one actor and its server, both directions, requests and replies included; frames are random, so
that compression cannot help. Episodes have 1000 steps; the actor's memory was full before counting began.
[tables.md](../../tables.md) has the conclusions."""
FAR = "A remote learner (`Reader`) adds these bytes for each sample, with either storage:"


def row(workload: str, rate: float, caches: float, episodes: float) -> str:
    """Return the row of a rate: the bytes per step of both storages."""
    shown = f"1/{round(1 / rate)}" if rate < 1 else f"{rate:g}"
    better = f"caches, by {episodes / caches:.1f}" if caches < episodes else f"episodes, by {caches / episodes:.1f}"
    return cells(workload, shown, f"{caches:,.0f}", f"{episodes:,.0f}", better)


def main() -> None:
    """Print the tables; with --write, also write the page."""
    args = arguments(__doc__)
    caches, least = (2, EPISODE) if args.quick else (CACHES, MIN_STEPS)
    print(f"{__doc__}\n{machine()}\n\n{HEAD}", flush=True)
    lines, far = [HEAD], [FAR_HEAD]
    workloads = [each for each in (w1(), w2()) if args.only in each.name]
    for workload in workloads:
        for rate in RATES:
            costs = [per_step(workload, storage, rate, caches, least) for storage in ("caches", "episodes")]
            lines.append(row(workload.name, rate, *costs))
            print(lines[-1], flush=True)
    for workload in workloads:
        sample = [per_sample(workload, storage, 4 if args.quick else 12) for storage in ("caches", "episodes")]
        far.append(cells(workload.name, *(f"{each:,.0f}" for each in sample)))
        print(far[-1], flush=True)
    if args.write:
        described = "\n".join(f"* {workload.described}" for workload in workloads)
        write_page(args.write, "storage", __doc__, described, COUNTED, "\n".join(lines), FAR, "\n".join(far))


if __name__ == "__main__":
    main()
