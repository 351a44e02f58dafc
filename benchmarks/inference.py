"""How fast do processes get actions of a small network from a node, beside Ray Serve, TorchRL and plain ZeroMQ?"""

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from measure import Report, Result, arguments, clock, in_turns, results
from peers import Company
from peers.network import INPUTS, OUTPUTS, computed

import memoire

CLIENTS, WINDOW = 8, 2000
"""Processes that ask, and rows that all of them ask for in a turn."""
FACTS = f"""The network has {INPUTS} inputs, two layers of 64, and {OUTPUTS} outputs. All compute it in NumPy,
TorchRL in torch. {CLIENTS} processes ask for one row each, again and again, as actors with one
environment do. *Rows* counts those that all of them got, *latency* is the median time of one of them.
The *round trip* has one client, and an empty node beside plain sockets: a DEALER and a ROUTER that echo
as many bytes."""
COLUMNS: tuple[dict[str, Any], dict[str, Any]] = (
    {"obs": (np.float32, (INPUTS,))},
    {"logits": (np.float32, (OUTPUTS,))},
)


def node(pipe: Connection) -> None:
    """memoire's: a process of its own."""
    with memoire.Inference("tcp://127.0.0.1:*", *COLUMNS, lambda rows: {"logits": computed(rows["obs"])}) as serving:
        pipe.send(serving.endpoint)
        pipe.recv()


def client(pipe: Connection, endpoint: str) -> None:
    """Asks as often as it is told, and says how long each answer took."""
    with memoire.RemotePolicy(endpoint, *COLUMNS, 30.0) as policy:
        row = {"obs": np.ones((1, INPUTS), np.float32)}
        policy.act(row)
        answer_orders(pipe, lambda: policy.act(row))


def echo(pipe: Connection) -> None:
    """Plain: what comes goes back."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        pipe.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        while not pipe.poll():
            while router.poll(100):
                router.send_multipart(router.recv_multipart())


def plain(pipe: Connection, endpoint: str) -> None:
    """Sends about what a request of memoire has: a header, and a container with one row."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        frames = [bytes(96), bytes(160)]

        def ask() -> None:
            dealer.send_multipart(frames)
            dealer.recv_multipart()

        answer_orders(pipe, ask)


def answer_orders(pipe: Connection, ask: Any) -> None:
    """Ask so many times as each order says; send the seconds of each."""
    pipe.send("ready")
    while (count := pipe.recv()) is not None:
        took = []
        for _ in range(count):
            began = time.perf_counter()
            ask()
            took.append(time.perf_counter() - began)
        pipe.send(took)


class Asking:
    """A node and its clients, as processes; a call asks for one row."""

    def __init__(self, serve: Any, ask: Any, clients: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._processes, self._pipes = [], []

        def start(target: Any, *given: object) -> Connection:
            here, there = spawn.Pipe()
            process = spawn.Process(target=target, args=(there, *given), daemon=True)
            process.start()
            self._processes.append(process)
            return here

        self._node = start(serve)
        endpoint = self._node.recv()
        self._pipes = [start(ask, endpoint) for _ in range(clients)]
        for pipe in self._pipes:
            pipe.recv()
        self.latencies: list[float] = []

    def __call__(self) -> None:
        self.clock(len(self._pipes))

    def clock(self, count: int) -> float:
        """Seconds until all clients together got so many rows."""
        began = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(max(1, count // len(self._pipes)))
        self.latencies = [each for pipe in self._pipes for each in pipe.recv()]
        return time.perf_counter() - began

    def close(self) -> None:
        """End all."""
        for pipe in self._pipes:
            pipe.send(None)
        self._node.send(None)
        for process in self._processes:
            process.join(10.0)
            process.kill()


def rates_of(asking: Any) -> tuple[float, float]:
    """Rows a second, and answers a second at the median latency, of one turn."""
    seconds = asking.clock(WINDOW)
    return WINDOW / seconds, 1.0 / float(np.median(asking.latencies))


def peer_rates_of(rows: Any, latency: Any) -> tuple[float, float]:
    return WINDOW / clock(rows, WINDOW), 1.0 / clock(latency, 1)


def eight(company: Company, rounds: int) -> list[Result]:
    """The rows with eight processes."""
    ours = Asking(node, client, CLIENTS)
    peers = ("ray", "torchrl")
    rows = company.sides(dict.fromkeys(peers, ("inference_rows", CLIENTS)))
    latency = company.sides(dict.fromkeys(peers, ("inference_latency", CLIENTS)))
    takes = [lambda: rates_of(ours), *(lambda name=name: peer_rates_of(rows[name], latency[name]) for name in rows)]
    for take in takes:
        take()  # connections are there, and what is compiled at first is compiled
    pairs = in_turns(takes, rounds)  # type: ignore[arg-type]
    ours.close()
    names = list(rows)
    found: list[Result] = []
    for place, (what, unit) in enumerate((("rows", " rows/s"), ("latency", " answers/s of one"))):
        keys = {name: f"inference-{what}-{name.split()[0].lower()}" for name in names}
        rates = [[pair[place] for pair in each] for each in pairs]
        found += results(f"{what}, {CLIENTS} processes, 1 row", rates, names, unit=unit, aims=keys)
    return found


def idle(rounds: int) -> list[Result]:
    """The row with one client."""
    ours, theirs = Asking(node, client, 1), Asking(echo, plain, 1)

    def take(asking: Asking) -> float:
        asking.clock(300)
        return float(np.median(asking.latencies))

    for asking in (ours, theirs):
        take(asking)
    spent = in_turns([lambda: take(ours), lambda: take(theirs)], rounds)
    ours.close(), theirs.close()
    name = "plain DEALER and ROUTER, echo"
    return results("round trip, idle, 1 client: its time", spent, [name], unit="s", aims={name: "inference-roundtrip"})


def main() -> None:
    chosen = arguments(__doc__, peers=True)
    report = Report(__doc__, [FACTS])
    report.heading()
    company, rounds = Company(chosen.peers), 3 if chosen.quick else 9
    report.add(*idle(rounds))
    report.add(*eight(company, rounds))
    company.part()
    report.facts += company.facts()
    report.finish(chosen.write, "inference")


if __name__ == "__main__":
    main()
