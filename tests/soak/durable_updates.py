"""How many durable updates does a server answer, and what does gathering them into one commit bring?

300 clients send UPDATE to one server with a state folder, each the next one as soon as the last is answered; an answer
means that the totals are on disk. The same with one commit for each request, and without a state folder. Server and
clients are a process each.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import zmq
from _kit import ROOT, TESTS, end, folder, say, table

from memoire.accounting.runs import SavedGroup
from memoire.disk.state_folder import Store
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from memoire.server import build
from memoire.server.server import Server
from memoire.wire import messages
from memoire.wire.frames import encode, parse

SCHEMA = Schema({"obs": Column(np.float32, (4,), "state"), "reward": Column(np.float32, (), "reward")})
MODES = {"one commit for many": "group", "one commit for each": "single", "no state folder": "none"}


class OneByOne(Store):
    """Commits each account by itself and answers whoever waits for it, before the next."""

    def _save(self, group: SavedGroup) -> bool:
        rest = SavedGroup(lines=group.lines, runs=group.runs, models=group.models, settings=group.settings)
        saved = super()._save(rest)
        tickets = list(group.tickets)
        for entry in group.accounts:
            saved = super()._save(SavedGroup(accounts=[entry])) and saved
            if tickets:
                self._done(SavedGroup(tickets=[tickets.pop(0)]))
        group.tickets = tickets
        return saved


def serve(mode: str, place: str) -> None:
    """The server's process, until its input ends."""
    if mode == "single":

        def opened(path: str, name: str | None, default_name: str, limits: object, clock: object) -> Store:
            return OneByOne(path, name, default_name=default_name)

        build.open_store = opened
    state = None if mode == "none" else Path(place) / mode
    with Server("tcp://127.0.0.1:0", SCHEMA, name="home", state_dir=state) as server:
        print(server.endpoint, flush=True)
        sys.stdin.read()
        print(server.total_episodes, flush=True)


def ask(endpoint: str, clients: int, seconds: float) -> tuple[int, list[float]]:
    """Answers that came, and how long each took."""
    context = zmq.Context()
    poller, sockets, begun, counts = zmq.Poller(), {}, {}, {}

    def send(made: zmq.Socket, number: int) -> None:
        counts[made] = number
        begun[made] = time.perf_counter()
        update = messages.Update(episodes=number, steps=10 * number)
        frames = encode(update, client=sockets[made], sequence=number)
        made.send_multipart([b"", *frames])

    for _ in range(clients):
        made = context.socket(zmq.DEALER)
        made.linger = 0
        made.connect(endpoint)
        sockets[made] = os.urandom(16)
        poller.register(made, zmq.POLLIN)
        send(made, 1)
    times, answers, ends = [], 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        for made, _ in poller.poll(200):
            reply = parse(made.recv_multipart()[1:])
            assert isinstance(reply.body, messages.Updated), reply.body
            assert reply.body.episodes == counts[made], "something else was acknowledged"
            times.append(time.perf_counter() - begun[made])
            answers += 1
            send(made, counts[made] + 1)
    context.destroy(0)
    return answers, times


def measure(mode: str, place: Path, clients: int, seconds: float) -> tuple[float, float, float]:
    """Updates a second, median and 99th percentile of their milliseconds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", mode, "--place", str(place)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    endpoint = process.stdout.readline().strip()
    ask(endpoint, clients, min(1.0, seconds))  # warms up
    answers, times = ask(endpoint, clients, seconds)
    process.stdin.close()
    process.wait(30)
    return answers / seconds, *(1e3 * np.quantile(times, (0.5, 0.99)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.place)
        return 0
    figures = {}
    with folder() as place:
        for name, mode in MODES.items():
            figures[name] = measure(mode, place, given.clients, given.seconds)
            say(name, figures[name])
    slow = figures["one commit for each"][0]
    rows = [
        (name, f"{rate:,.0f}", f"{rate / slow:.1f}", f"{median:.1f} ms", f"{late:.1f} ms")
        for name, (rate, median, late) in figures.items()
    ]
    print(table([f"{given.clients} clients", "updates a second", "ratio", "median", "99 of 100 within"], rows))
    ratio = figures["one commit for many"][0] / slow
    return end([] if ratio > 2.0 else [f"gathering brings only {ratio:.1f} times as many updates"])


if __name__ == "__main__":
    sys.exit(main())
