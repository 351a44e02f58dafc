"""Throughput of a cluster by the number of actors, servers and readers, and by the size of caches and frames.

Nodes are processes of their own (`memoire server`, `memoire proxy`). Actors are real clients, several in a process,
that draw caches from their memories and push them as fast as they may. All share this machine's cores, so that
throughput stops growing when all cores are busy. The cost of a node is its own processor time, which another machine
would need, too.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from measure import Child, amount, arguments, ask, cells, close, head, machine, plot, resident, spent_by, write_page
from peers.tasks import BATCH, distinct

import memoire
from memoire.cli import plan
from memoire.nodes import local
from memoire.nodes.launcher import Launcher

PROCESSES = 3
"""Maximum number of processes that the clients of one point share."""
STEPS = 1000
"""Steps in the memory of each client."""
TIMEOUT = 300.0


# Processes with several clients: each takes orders over a pipe, and answers when an order is done.


def actors(pipe: Connection, endpoint: str, count: int, state: tuple[int, ...], dtype: str) -> None:
    """Run clients with full memories, which push as many caches as each order says."""
    random = np.random.default_rng(os.getpid())
    values = distinct(random, (STEPS, *state), dtype), distinct(random, (STEPS, 8), "float32"), np.ones(STEPS, "f4")
    weights = random.uniform(0.1, 2.0, STEPS).astype(np.float32)
    with ExitStack() as stack:
        settings = {"capacity": STEPS, "on_full": "block", "timeout": TIMEOUT}
        clients = [stack.enter_context(memoire.connect(endpoint, **settings)) for _ in range(count)]
        for client in clients:
            client.memory.open(0)
            client.memory.extend(0, values, weights)
            client.memory.close(0)
            client.update(timeout=TIMEOUT)
        pipe.send(None)
        while (orders := pipe.recv()) is not None:
            caches, seconds = orders
            for _ in range(caches):
                for client in clients:
                    while not client.push_cache(timeout=TIMEOUT):
                        pass
            until = time.monotonic() + seconds
            while time.monotonic() < until:  # a client reports new figures about twice a second
                for client in clients:
                    client.scalars({"return": random.random()})
                time.sleep(0.4)
            while any(client.stats().in_flight_caches for client in clients):
                time.sleep(0.005)
            pipe.send(None)


def readers(pipe: Connection, endpoint: str, count: int) -> None:
    """Run remote learners, each of which draws as many batches as each order says."""
    with ExitStack() as stack:
        remotes = [stack.enter_context(memoire.Reader([endpoint], timeout=TIMEOUT)) for _ in range(count)]
        for reader in remotes:
            reader.get_batch(BATCH, TIMEOUT)
        pipe.send(None)
        while (orders := pipe.recv()) is not None:
            for _ in range(orders[0]):
                for reader in remotes:
                    reader.get_batch(BATCH, TIMEOUT)
            pipe.send(None)


class Group:
    """Processes that run the same work: together they are `count` clients of an endpoint."""

    def __init__(self, work: Callable[..., None], count: int, endpoint: str, *args: Any) -> None:
        shares = [count // PROCESSES + (place < count % PROCESSES) for place in range(min(PROCESSES, count))]
        self.children = [Child(work, endpoint, share, *args) for share in shares]

    def ask(self, count: int, seconds: float = 0.0) -> float:
        """Send an order to all processes, and return the seconds until all have answered."""
        began = time.perf_counter()
        ask(self.children, (count, seconds), TIMEOUT)
        return time.perf_counter() - began

    def close(self) -> None:
        close(*self.children)


@dataclass(frozen=True)
class Setup:
    """Cluster to measure: columns of its entries, parameters, and number of nodes."""

    state: tuple[int, ...] = (64,)
    dtype: str = "float32"
    parameters: dict[str, Any] = field(default_factory=dict)
    servers: int = 1
    proxies: int = 0

    @property
    def schema(self) -> memoire.Schema:
        state, action = memoire.Column(self.dtype, self.state, "state"), memoire.Column("float32", (8,))
        return memoire.Schema({"state": state, "action": action, "reward": memoire.Column("float32", (), "reward")})

    @contextmanager
    def running(self) -> Iterator[local.LocalCluster]:
        """Start the cluster, which runs until the end of the block."""
        settings = [f"{name}={json.dumps(value)}" for name, value in self.parameters.items()]
        nodes = local.Nodes(schema=self.schema, settings=settings, servers=self.servers, proxies=self.proxies)
        with Launcher() as starting:
            cluster = local.start(starting, nodes)
            if cluster is None:
                raise KeyboardInterrupt
            yield cluster

    def actors(self, cluster: local.LocalCluster, count: int) -> closing[Group]:
        return closing(Group(actors, count, cluster.endpoints[0], self.state, self.dtype))

    @property
    def sample_bytes(self) -> float:
        """Bytes of a sample on the wire, as `memoire plan` calculates them."""
        return plan.sample_bytes(self.schema, memoire.Parameters(**self.parameters))


def spent_in(cluster: local.LocalCluster) -> np.ndarray:
    """Return the processor seconds that all servers and all proxies have used: [2]."""
    return np.array([spent_by(node.process.pid for node in nodes) for nodes in (cluster.servers, cluster.proxies)])


def memory_of(cluster: local.LocalCluster) -> int:
    """Return the resident memory of all servers in bytes."""
    return sum(resident(node.process.pid) for node in cluster.servers)


@dataclass(frozen=True)
class Point:
    """Measured work of a setup: messages, samples, bytes, time, and the costs of its nodes."""

    name: str
    messages: int
    samples: int
    bytes: float
    seconds: float
    server: float
    """Processor seconds of all servers."""
    proxy: float
    """Processor seconds of all proxies."""
    resident: tuple[int, int] = (0, 0)
    """Resident memory of all servers in bytes, before and after."""

    def __str__(self) -> str:
        million = 1e6 / self.samples
        return cells(
            self.name,
            f"{amount(self.samples / self.seconds)}/s",
            f"{amount(self.bytes / self.seconds)}B/s",
            f"{self.server * million:.2f}",
            f"{self.proxy * million:.2f}" if self.proxy else "",
            f"{1e3 * self.server / self.messages:.3f}",
            f"{(self.server + self.proxy) / self.seconds:.2f}",
        )


COLUMNS = "server, CPU s per M samples", "proxies", "server, ms per message", "cores of the nodes"
HEAD = head("", "samples", "bytes", *COLUMNS)


def pushed(name: str, setup: Setup, clients: int, caches: int) -> Point:
    """Measure clients that together push `caches` caches."""
    each = max(1, caches // clients)
    with setup.running() as cluster, setup.actors(cluster, clients) as group:
        group.ask(max(1, each // 8))
        before = spent_in(cluster)
        seconds = group.ask(each)
        used = spent_in(cluster) - before
    samples = each * clients * int(setup.parameters.get("cache_size", BATCH))
    return Point(name, each * clients, samples, samples * setup.sample_bytes, seconds, *used)


def drawn(name: str, setup: Setup, count: int, batches: int) -> Point:
    """Measure readers that together draw `batches` batches, from caches that are drawn repeatedly."""
    each = max(1, batches // count)
    with setup.running() as cluster, setup.actors(cluster, 3) as pushers:
        pushers.ask(6)
        with closing(Group(readers, count, cluster.endpoints[0])) as group:
            memory, before = memory_of(cluster), spent_in(cluster)
            seconds = group.ask(each)
            used, memory_after = spent_in(cluster) - before, memory_of(cluster)
    samples = each * count * BATCH
    return Point(name, each * count, samples, samples * setup.sample_bytes, seconds, *used, (memory, memory_after))


def news_costs(clients: int, seconds: float) -> tuple[float, float, float]:
    """Return the costs of each client that reports figures: processor seconds per second of a server and of a proxy,
    and bytes of memory of the server.
    """
    setup = Setup(proxies=1)
    with setup.running() as cluster:
        empty = memory_of(cluster)
        with setup.actors(cluster, clients) as group:
            group.ask(0, 1.0)
            before = spent_in(cluster)
            taken = group.ask(0, seconds)
            server, proxy = (spent_in(cluster) - before) / taken / clients
            memory = memory_of(cluster) - empty
    return server, proxy, memory / clients


def line_through(points: list[Point], seconds: Callable[[Point], float]) -> tuple[float, float]:
    """Fit a line through the points, with no negative coefficient: processor seconds for each message and each byte."""
    sizes = np.array([point.bytes / point.messages for point in points])
    costs = np.array([seconds(point) / point.messages for point in points])
    # Relative distances are minimized: small messages show the cost of a message, large messages the cost of a byte.
    rows = np.column_stack([np.ones(len(points)), sizes]) / costs[:, None]
    message, byte = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    return max(float(message), 0.0), max(float(byte), 0.0)


SWEEPS = {
    "actors": "Clients that push caches of 256, W1",
    "caches": "Samples of a cache, W1, 4 clients through a proxy",
    "frames": "Bytes of a state, 4 clients, caches of 64",
    "servers": "Servers behind a proxy, 16 clients, W1",
    "readers": "Readers that draw batches of 256, W1",
    "stacks": "Readers that draw batches of 256, W2",
}


def sweep(name: str, scale: int, some: Callable[[list[Any]], list[Any]]) -> Iterator[Point]:
    """Yield the measured points of a sweep; `some` selects from its values."""
    if name == "actors":
        for clients in some([1, 2, 4, 8, 16, 32, 64]):
            yield pushed(str(clients), Setup(), clients, 2048 // scale)
    elif name == "caches":
        for size in some([16, 64, 256, 1024, 4096]):
            setup = Setup(parameters={"cache_size": size}, proxies=1)
            yield pushed(str(size), setup, 4, min(4096, 256 * 2048 // size) // scale)
    elif name == "frames":
        pictures = [((84, 84), "uint8"), ((84, 84, 4), "uint8"), ((224, 224, 3), "uint8")]
        for shape, dtype in some([((64,), "float32"), *pictures]):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            caches = max(8, min(2048, (1 << 31) // (128 * size)) // scale)
            yield pushed(f"{size:,}", Setup(shape, dtype, {"cache_size": 64}), 4, caches)
    elif name == "servers":
        for servers in some([1, 2, 4]):
            yield pushed(str(servers), Setup(servers=servers, proxies=1), 16, 2048 // scale)
    else:
        again, stacks = {"reuse_cache": True}, {"reuse_cache": True, "frame_stack": 4, "multi_step": 3}
        small, large = (Setup(parameters=again), 1500), (Setup((84, 84), "uint8", stacks), 120)
        setup, batches = small if name == "readers" else large
        for count in some([1, 2, 5, 10]):
            yield drawn(str(count), setup, count, batches // scale)


Sweeps = dict[str, list[Point]]


def costs_of(sweeps: Sweeps, clients: int, seconds: float) -> plan.NodeCosts:
    """Return the measured costs of nodes, in the form that `memoire plan` calculates with."""
    cache, cache_byte = line_through(sweeps["caches"] + sweeps["frames"], lambda point: point.server)
    relayed, relayed_byte = line_through(sweeps["caches"], lambda point: point.proxy)
    draw, draw_byte = line_through(sweeps["readers"] + sweeps["stacks"], lambda point: point.server)
    server, proxy, memory = news_costs(clients, seconds)
    return plan.NodeCosts(
        server_cache=cache, server_byte=cache_byte, proxy_cache=relayed, proxy_byte=relayed_byte, draw=draw,
        draw_byte=draw_byte, server_client=server, proxy_client=proxy, client_memory=memory,
    )  # fmt: skip


def draw(sweeps: Sweeps, path: Path) -> None:
    """Draw the throughput and the servers' processor time of each sweep."""
    with plot(path, 11, 6, nrows=2, ncols=3) as axes:
        for axis, (name, points) in zip(axes.flat, sweeps.items(), strict=True):
            names, other = [point.name for point in points], axis.twinx()
            axis.plot(names, [point.samples / point.seconds / 1e3 for point in points], "o-", color="C0")
            axis.set_ylabel("thousand samples/s", color="C0")
            other.plot(names, [1e6 * point.server / point.samples for point in points], "s--", color="C1")
            other.set_ylabel("server, CPU s per M samples", color="C1")
            for each in (axis, other):
                each.set_ylim(bottom=0)
            axis.set_title(SWEEPS[name], fontsize="small")


def compared(costs: plan.NodeCosts) -> str:
    """Return a table of the measured costs, beside the costs with which `memoire plan` calculates."""
    rows = [head("", "measured now", "in `memoire plan`")]
    of_each = zip(plan.NodeCosts.UNITS.values(), costs.values(), plan.COSTS.values(), strict=True)
    for (what, unit, scale), measured, planned in of_each:
        rows.append(cells(what, f"{measured * scale:.3g} {unit}", f"{planned * scale:.3g} {unit}"))
    return "\n".join(rows)


def flat(points: list[Point]) -> str:
    """Return the memory of the server before and after the draws of each number of readers, as text."""
    return ", ".join(f"{p.name}: {p.resident[0] >> 20} to {p.resident[1] >> 20} MiB" for p in points)


def main() -> None:
    args = arguments(__doc__)
    print(f"{__doc__}\n{machine()}", flush=True)
    some: Callable[[list[Any]], list[Any]] = (lambda each: each[:: max(1, len(each) - 1)]) if args.quick else list
    sweeps: Sweeps = {}
    for name, title in SWEEPS.items():
        if args.only in name:
            print(f"\n{title}\n\n{HEAD}", flush=True)
            for point in sweep(name, 16 if args.quick else 1, some):
                print(point, flush=True)
                sweeps.setdefault(name, []).append(point)
    if args.only:
        return
    far = flat(sweeps["readers"]), flat(sweeps["stacks"])
    memory = f"Memory of the server, before and after, by readers: {far[0]}; W2: {far[1]}."
    costs = compared(costs_of(sweeps, 20 if args.quick else 300, 1.0 if args.quick else 10.0))
    print(f"\n{memory}\n\n{costs}")
    if args.write:
        tables = [f"## {SWEEPS[name]}\n\n{HEAD}\n" + "\n".join(map(str, points)) for name, points in sweeps.items()]
        parts = [FOLLOWS, "![throughput and cost](scaling.svg)", *tables, memory]
        write_page(args.write, "scaling", __doc__, *parts, COSTS, costs)
        draw(sweeps, Path(args.write, "scaling.svg"))


FOLLOWS = """\
[operations.md](../../operations.md#the-arithmetic-of-a-plan) has the conclusions. *cores of the nodes* is the processor
time of servers and proxies divided by the elapsed time; actors and readers used the rest of the machine's cores."""
COSTS = "## Costs\n\nThe costs of a message and of a byte are the coefficients of a line through the points above."


if __name__ == "__main__":
    main()
