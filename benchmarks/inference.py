"""Rates and latencies of actions from an inference node, beside Ray Serve, TorchRL and plain ZeroMQ."""

import os
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from measure import TCP, Child, Report, Result, ask, close, measure_rounds, results, serve
from peers import RemoteSide
from peers.tasks import INPUTS, OUTPUTS, answer_orders, computed

import memoire

CLIENTS = 8
"""Number of processes that request actions."""
WINDOWS = {"memoire": 4000, "ray": 400, "torchrl": 2000}
"""Rows that all processes together request in a turn, by side: about a second of each."""
PLAIN = "plain DEALER and ROUTER, echo"
PEER_TIMEOUT = 90.0
"""Seconds in which a peer has to start, or to take a turn; a slower peer is left out."""
FACTS = f"""The network has {INPUTS} inputs, two layers of 64, and {OUTPUTS} outputs. All compute it in NumPy,
TorchRL in torch. {CLIENTS} processes ask for one row each, again and again, as actors with one
environment do. *Rows* counts the rows that all processes received, *latency* is the median time of a row.
The *round trip* has one client and an idle node, beside plain sockets: a DEALER and a ROUTER that echo
as many bytes. Client and node have a core each, as on two machines. In the row *wherever the system
puts them*, plain sockets take a half of the time or all of it: all four threads may share a core.
The rows of plain sockets with {CLIENTS} processes are the upper bound of transport: plain sockets compute
and check nothing. TorchRL's clients write a row to shared memory on the same machine, so that no
thread has to send or receive. Eight processes share the cores' caches, so that the code of
a request takes many times longer than in a loop. Smaller batches
(`max_batch`), Unix sockets (ipc) and no wait for further requests (`max_wait=0`) made little
difference."""
COLUMNS: tuple[dict[str, Any], dict[str, Any]] = (
    {"obs": (np.float32, (INPUTS,))},
    {"logits": (np.float32, (OUTPUTS,))},
)


def node(pipe: Connection) -> None:
    """Run memoire's inference node in a process of its own."""
    serve(pipe, memoire.Inference(TCP, *COLUMNS, lambda rows: {"logits": computed(rows["obs"])}))


def client(pipe: Connection, endpoint: str) -> None:
    """Run a client of memoire's node: request as many rows as each order says, and send the seconds of each answer."""
    with memoire.RemotePolicy(endpoint, *COLUMNS, 30.0) as policy:
        row = {"obs": np.ones((1, INPUTS), np.float32)}
        policy.act(row)
        answer_orders(pipe, lambda: policy.act(row))


def echo(pipe: Connection) -> None:
    """Run a plain ROUTER, which sends each message back."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        pipe.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        while not pipe.poll():
            while router.poll(100):
                router.send_multipart(router.recv_multipart())


def plain(pipe: Connection, endpoint: str) -> None:
    """Run a plain DEALER, whose messages are as large as a request of memoire: a header and one row."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        frames = [bytes(96), bytes(160)]

        def ask() -> None:
            dealer.send_multipart(frames)
            dealer.recv_multipart()

        answer_orders(pipe, ask)


def on_cores(pipe: Connection, cores: set[int], target: Any, *args: object) -> None:
    """Call `target` on these cores of the machine only."""
    os.sched_setaffinity(0, cores)
    target(pipe, *args)


class Asking:
    """Node and its clients, as processes; a call requests one row."""

    def __init__(self, serve: Any, ask: Any, clients: int, *, is_pinned: bool = False) -> None:
        cores = sorted(os.sched_getaffinity(0))

        def start(core: int, target: Any, *args: object) -> Child:
            return Child(on_cores, {cores[core % len(cores)]} if is_pinned else set(cores), target, *args)

        self.node = start(0, serve)
        self.clients = [start(1, ask, self.node.first_answer) for _ in range(clients)]
        self.latencies: list[float] = []

    def clock(self, count: int) -> float:
        """Return the seconds until all clients together have received so many rows."""
        began = time.perf_counter()
        answers = ask(self.clients, max(1, count // len(self.clients)))
        self.latencies = [each for took in answers for each in took]
        return time.perf_counter() - began

    def close(self) -> None:
        close(*self.clients, self.node)


def rates_of(asking: Asking) -> tuple[float, float]:
    """Run a turn; return rows a second, and answers a second at the median latency."""
    seconds = asking.clock(WINDOWS["memoire"])
    return WINDOWS["memoire"] / seconds, 1.0 / float(np.median(asking.latencies))


def peer_rates_of(rows: RemoteSide) -> tuple[float, float]:
    window = WINDOWS[rows.peer.name]
    return window / rows.clock(window), 1.0 / float(np.median(rows.times()))


def eight(report: Report, rounds: int) -> None:
    """Add the rows with eight processes."""
    ours, sockets = Asking(node, client, CLIENTS), Asking(echo, plain, CLIENTS)
    rows = report.peer_group.sides(dict.fromkeys(("ray", "torchrl"), ("Rows", CLIENTS)))
    peers = [partial(peer_rates_of, side) for side in rows.values()]
    pairs = measure_rounds([partial(rates_of, ours), *peers, partial(rates_of, sockets)], rounds)
    close(ours, sockets)
    report.peer_group.stop()
    for place, (what, unit) in enumerate((("rows", " rows/s"), ("latency", " answers/s of one"))):
        keys = {name: f"inference-{what}-{name.split()[0].lower()}" for name in rows}
        rates = [[pair[place] for pair in each] for each in pairs]
        report.add(*results(f"{what}, {CLIENTS} processes, 1 row", rates, [*rows, PLAIN], unit, keys))


def round_trip(where: str, rounds: int, *, is_pinned: bool = False) -> list[Result]:
    """Return the row of round trips with one client."""
    sides = [Asking(node, client, 1, is_pinned=is_pinned), Asking(echo, plain, 1, is_pinned=is_pinned)]

    def take(asking: Asking) -> float:
        asking.clock(300)
        return float(np.median(asking.latencies))

    spent = measure_rounds([partial(take, side) for side in sides], rounds)
    close(*sides)
    aims = {PLAIN: "inference-roundtrip"} if is_pinned else {}
    return results(f"round trip, idle, 1 client, {where}: its time", spent, [PLAIN], "s", aims)


def main() -> None:
    report = Report.begin(__doc__, FACTS, peers=True, patience=PEER_TIMEOUT)
    rounds = 3 if report.quick else 9
    report.add(*round_trip("a core each", rounds, is_pinned=True))
    report.add(*round_trip("wherever the system puts them", rounds))
    eight(report, rounds)
    report.finish("inference")


if __name__ == "__main__":
    main()
