"""How many bytes does an environment step cost on the wire, with caches from actors and with episodes at the server?"""

import socket
import threading
import time

import numpy as np
from measure import TCP, arguments, cells, head, machine, write_page
from peers.tasks import BATCH, EPISODE
from workloads import Workload, w1, w2

import memoire
from memoire.client.client import Client
from memoire.limits import Limits

QUESTION = str(__doc__)
RATES = (1 / 8, 1.0, 8.0, 256.0)
"""Samples that a learner trains on for each environment step."""
CACHES = 16
"""Pushed for each figure."""
LEAST_STEPS = 4 * EPISODE
"""Recorded for each figure of episodes: a few whole ones."""


class Meter:
    """A TCP port in front of another one that counts the bytes of both directions."""

    def __init__(self, behind: str) -> None:
        self.behind = int(behind.rpartition(":")[2])
        self.bytes = 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.open = [self.listening]
        self.lock = threading.Lock()
        self.start(self.accept)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.listening.getsockname()[1]}"

    def start(self, work: object, *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def accept(self) -> None:
        while True:
            try:
                here, _ = self.listening.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self.behind))
            self.open += [here, there]
            self.start(self.carry, here, there)
            self.start(self.carry, there, here)

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 20):
                with self.lock:
                    self.bytes += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for each in self.open:
            each.close()


class Metered:
    """A server and an actor whose bytes are counted."""

    def __init__(self, schema: memoire.Schema, parameters: memoire.Parameters, storage: str, capacity: int) -> None:
        limits = Limits(held_bytes=2 << 30, credit=256 << 20)
        self.server = memoire.Server(TCP, schema, parameters=parameters, storage=storage, limits=limits, seed=1)
        ends = (self.server.endpoint, self.server.push_endpoint, self.server.pub_endpoint)
        self.meters = [Meter(end) for end in ends]
        request, push, subscribe = (meter.endpoint for meter in self.meters)
        self.client = Client(
            request, push=push, subscribe=subscribe, capacity=capacity, on_full="block", limits=limits, seed=2
        )

    @property
    def bytes(self) -> int:
        return sum(meter.bytes for meter in self.meters)

    def settle(self) -> None:
        """Wait until everything has arrived."""
        deadline = time.monotonic() + 120.0
        while self.client.stats().in_flight_caches:
            self.client.update(timeout=120.0)
            if time.monotonic() > deadline:
                raise TimeoutError("caches are on the way for two minutes")

    def close(self) -> None:
        self.client.close()
        self.server.close()
        for meter in self.meters:
            meter.close()


class Cluster(Metered):
    """An actor that records distinct values."""

    def __init__(self, workload: Workload, storage: str, rate: float) -> None:
        self.workload, random = workload, np.random.default_rng(0)
        parameters = workload.parameters.replace(samples_per_insert=rate, cache_size=BATCH)
        super().__init__(workload.schema, parameters, storage, workload.ring)
        self.values = [*workload.episode(random)]
        if storage == "caches":
            for _ in range(workload.ring // EPISODE - 1):  # an actor that has acted for a while
                self.client.memory.open(0)
                self.client.memory.extend(0, self.values, random.uniform(0.1, 2.0, EPISODE).astype(np.float32))
                self.client.memory.close(0)

    def act(self, steps: int) -> None:
        state, action, reward = self.values
        with self.client.writer(autoreset="disabled") as writer:
            for step in range(steps):
                at = step % EPISODE
                ends = at == EPISODE - 1
                following = state[(at + 1) % EPISODE]
                writer.step(state[at], action[at], reward[at], False, ends, following.copy() if ends else following)
                if ends:
                    writer.reset(state[0])
        self.settle()


def per_step(workload: Workload, storage: str, rate: float, caches: int, least: int) -> float:
    """Bytes that crossed between actor and server, whatever they were, over the steps that were recorded."""
    steps = max(1, round(caches * BATCH / rate))
    cluster = Cluster(workload, storage, rate)
    try:
        cluster.settle()
        before = cluster.bytes
        cluster.act(max(steps, least) if storage == "episodes" else steps)
        return (cluster.bytes - before) / cluster.client.stats().steps
    finally:
        cluster.close()


def per_sample(workload: Workload, storage: str, batches: int) -> float:
    """Bytes that a learner far away receives and sends for each sample."""
    cluster = Cluster(workload, storage, 1.0)
    try:
        cluster.act(4 * EPISODE)
        return far_away(cluster, batches)
    finally:
        cluster.close()


def far_away(cluster: Metered, batches: int) -> float:
    """Bytes for each sample of a learner far away that draws batches, and some ahead."""
    meter = Meter(cluster.server.endpoint)
    try:
        with memoire.Reader([meter.endpoint], seed=3) as reader:
            for _ in range(batches):
                reader.get_batch(BATCH, 60.0)
            drawn = -1
            while drawn != cluster.server.stats().samples:  # what it draws ahead has come as well
                drawn = cluster.server.stats().samples
                time.sleep(0.5)
            return meter.bytes / drawn
    finally:
        meter.close()


HEAD = head("workload", "samples per insert", "caches, bytes per step", "episodes, bytes per step", "fewer bytes")
FAR_HEAD = head("workload", "caches, bytes per sample", "episodes, bytes per sample")
COUNTED = """\
Counted on TCP between one actor and its server, both directions, requests and replies included; frames are random, so
that nothing could have been compressed. Episodes have 1000 steps; the actor's memory was full before counting began.
[choose.md](../choose.md) says what follows."""
FAR = "A learner far away (`Reader`) moves these bytes for each sample on top, in both ways:"


def row(workload: str, rate: float, caches: float, episodes: float) -> str:
    """What one rate costs in both ways."""
    shown = f"1/{round(1 / rate)}" if rate < 1 else f"{rate:g}"
    better = "caches" if caches < episodes else "episodes"
    factor = max(caches, episodes) / min(caches, episodes)
    return cells(workload, shown, f"{caches:,.0f}", f"{episodes:,.0f}", f"{better}, by {factor:.1f}")


def main() -> None:
    """Print the tables."""
    given = arguments(QUESTION)
    caches, least = (2, EPISODE) if given.quick else (CACHES, LEAST_STEPS)
    print(f"{QUESTION}\n{machine()}\n\n{HEAD}", flush=True)
    lines, far = [HEAD], [FAR_HEAD]
    workloads = [each for each in (w1(), w2()) if given.only in each.name]
    for workload in workloads:
        for rate in RATES:
            costs = [per_step(workload, storage, rate, caches, least) for storage in ("caches", "episodes")]
            lines.append(row(workload.name, rate, *costs))
            print(lines[-1], flush=True)
    for workload in workloads:
        sample = [per_sample(workload, storage, 4 if given.quick else 12) for storage in ("caches", "episodes")]
        far.append(cells(workload.name, *(f"{each:,.0f}" for each in sample)))
        print(far[-1], flush=True)
    if given.write:
        described = "\n".join(f"* {workload.described}" for workload in workloads)
        write_page(given.write, "storage", QUESTION, described, COUNTED, "\n".join(lines), FAR, "\n".join(far))


if __name__ == "__main__":
    main()
