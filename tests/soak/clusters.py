"""Trials of clusters of real processes: kills, many clients, hours of work; and of simulated ones."""

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import zmq
from _cluster import Peers, nodes
from _kit import descriptors, end, folder, memory, run_named, say, table, threads

import memoire
from history import trial
from memoire.client.client import connect
from memoire.errors import MemoireTimeout
from memoire.limits import Limits, MiB
from memoire.net import process as limits
from memoire.net import sockets
from memoire.net.context import Socket, shared_context
from memoire.reader.reader import Reader
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from memoire.security.keys import Keys
from memoire.wire import messages
from memoire.wire.frames import Message, encode, parse

LIMITS = Limits()
Told = dict[tuple[bytes, int], Message]
"""Replies by client and by the number of the request."""


class Callers:
    """Connected clients of one thread.

    Args:
        keys: A cluster's folder, whose actor's key all of them show.
        clients: How many ids they have between them, where they are fewer connections.
    """

    def __init__(self, endpoint: str, connections: int, keys: str | None = None, clients: int = 0) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, connections + 10)
        own = Keys(keys, "actor") if keys else None
        self._sockets = [self._dial(endpoint, own) for _ in range(connections)]
        self._poller = zmq.Poller()
        self.ids = [os.urandom(16) for _ in range(clients or connections)]
        self._by_id = {client: self._sockets[place % connections] for place, client in enumerate(self.ids)}
        self.told: Told = {}

    def _dial(self, endpoint: str, keys: Keys | None) -> Socket:
        made = sockets.request_client(self._context, LIMITS.reply_bytes)
        made.setsockopt(zmq.SNDHWM, 0)
        if keys is not None:
            sockets.use_keys(made, keys.own.public, keys.own.secret, keys.servers[0].public)
        made.connect(endpoint)
        return made

    def connect(self, seconds: float) -> float:
        """Seconds until everybody was connected."""
        began = time.monotonic()
        for made in self._sockets:
            if not made.poll(int(1000 * max(0.0, began + seconds - time.monotonic())), zmq.POLLOUT):
                raise TimeoutError("not everybody was connected")
        for made in self._sockets:
            self._poller.register(made, zmq.POLLIN)
        return time.monotonic() - began

    def send(self, bodies: Callable[[bytes], Iterable[tuple[int, messages.Body]]]) -> int:
        """Send the numbered requests of every client, all at once; how many these are."""
        asked = [(client, number, body) for client in self.ids for number, body in bodies(client)]
        for client, number, body in asked:
            self.send_one(client, number, body)
        return len(asked)

    def send_one(self, client: bytes, number: int, body: messages.Body, **header: Any) -> None:
        """Send one request."""
        message = encode(body, client=client, sequence=number, **header)
        self._by_id[client].send_multipart([b"", *message])

    def hear(self, count: int, seconds: float) -> list[float]:
        """When replies came, in seconds from now, until there are so many or the time is over."""
        began, came = time.monotonic(), []
        while len(came) < count and (left := began + seconds - time.monotonic()) > 0:
            for made, _ in self._poller.poll(int(1000 * left) + 1):
                while (frames := sockets.receive(made)) is not None:
                    said = parse(frames[1:], LIMITS)
                    self.told[said.header.client, said.header.sequence] = said
                    came.append(time.monotonic() - began)
        return came

    def close(self) -> None:
        self._context.destroy(0)


def killed_cluster() -> int:
    """Is everything counted exactly once after two minutes of kills?

    50 clients in 10 processes count episodes, log, push caches and follow a model at three servers with state folders,
    behind two proxies. Servers, proxies and actors are killed with SIGKILL and stopped with SIGSTOP by a seeded schedule.
    In the end each client's episodes, steps and log lines are compared with what it was told and what it did.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="trials, with seeds one after the other")
    parser.add_argument("--kills", type=int, default=28)
    parser.add_argument("--stops", type=int, default=8)
    given = parser.parse_args()
    outcomes = []
    for seed in range(given.seed, given.seed + given.seeds):
        settings = trial.Settings(
            seed=seed,
            seconds=given.seconds,
            servers=3,
            proxies=2,
            actors=10,
            clients=5,
            rate=6.0,
            kills=given.kills,
            stops=given.stops,
            runs=2,
        )
        with folder() as place:
            outcomes.append(trial.run(settings, place))
        say(outcomes[-1])
    names = list(outcomes[0].figures)
    print(table(["", *(f"seed {given.seed + k}" for k in range(given.seeds))], rows(names, outcomes)))
    return end([violation for outcome in outcomes for violation in outcome.violations])


def rows(names: list[str], outcomes: list[trial.Outcome]) -> list[list[str]]:
    shown = [[name.replace("_", " "), *(text(outcome.figures[name]) for outcome in outcomes)] for name in names[1:]]
    return [*shown, ["violations", *(str(len(outcome.violations)) for outcome in outcomes)]]


def text(value: object) -> str:
    """{"server": 9, "actor": 8} -> "9 server, 8 actor"."""
    return ", ".join(f"{count} {kind}" for kind, count in value.items()) if isinstance(value, dict) else str(value)


SCHEMA = Schema({"obs": Column(np.float32, (16,), "state"), "reward": Column(np.float32, (), "reward")})
PACE = 1.0
"""Seconds between two episodes of a client."""
LENGTH = 10
ASKED = 5
"""Clients of each process whose round trips are measured."""


def actors(first: int, count: int, pipe: Any, endpoint: str, seconds: float) -> None:
    """Clients of one process: connect, work for some time, say what they counted."""
    limits.raise_limit()
    pipe.recv()
    began = time.monotonic()
    clients = [connect(endpoint, timeout=120.0, capacity=1000, seed=first + k) for k in range(count)]
    pipe.send(time.monotonic() - began)
    pipe.recv()
    trips, episodes, until = [], [0] * count, time.monotonic() + seconds
    row = np.zeros(16, np.float32), np.float32(1.0)
    while time.monotonic() < until:
        round_began = time.monotonic()
        for place, client in enumerate(clients):
            memory = client.memory
            memory.open()
            for _ in range(LENGTH):
                memory.add(0, row)
            memory.close(terminated=True)
            client.on_entries(LENGTH)
            client.on_episode(0, LENGTH, float(LENGTH))
            episodes[place] += 1
            client.push_cache(0.0)
            if place < ASKED:
                asked = time.monotonic()
                client.update(60.0)
                trips.append(time.monotonic() - asked)
        time.sleep(max(0.0, round_began + PACE - time.monotonic()))
    for place, client in enumerate(clients):
        client.log(f"client {first + place} did {episodes[place]}")
    for client in clients:
        client.update(60.0)
    stats = [client.stats() for client in clients]
    wrong = [
        f"client {each.client}: pushed {each.pushed_caches}, accepted {each.accepted_caches}, lost {each.lost_caches}, "
        f"in flight {each.in_flight_caches}"
        for each in stats
        if each.pushed_caches
        != each.accepted_caches + sum(each.rejected.values()) + each.lost_caches + each.in_flight_caches
    ]
    refused = sum(sum(each.refused.values()) + each.faults for each in stats)
    pipe.send((sum(episodes), sum(each.accepted_caches for each in stats), trips, refused, wrong))
    pipe.recv()
    for client in clients:
        client.close(10.0)
    pipe.send("gone")


def many_clients() -> int:
    """Do a thousand clients work through one proxy, and is each of them counted exactly?

    Clients in processes of their own connect to one proxy in front of one server, record, log and push caches at a steady
    pace, and tell. One round trip is an UPDATE that somebody waits for, of a few clients in each process, while all of them
    work. All the time nobody may be refused, and at the end the totals are what the clients counted.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=5)
    given = parser.parse_args()
    violated = []
    each = -(-given.clients // given.processes)
    with (
        nodes(SCHEMA, "--set", "cache_size=32") as (server, (proxy,)),
        Reader([proxy.endpoint], timeout=30.0) as reader,
    ):
        before = memory(proxy.pid)
        peers = Peers(actors, given.clients, each, proxy.endpoint, given.seconds)
        try:
            connecting = max(peers.ask("begin"))
            say(f"{given.clients} are connected after {connecting:.1f} s")
            said = peers.ask("work")
            used, most, at_proxy = descriptors(proxy.pid), threads(proxy.pid), memory(proxy.pid)
            at_server = memory(server.pid)
            totals = reader.totals(timeout=60.0)
            peers.ask("end")
        finally:
            peers.end()
    episodes = sum(answer[0] for answer in said)
    trips = sorted(trip for answer in said for trip in answer[2])
    violated += [text for answer in said for text in answer[4]]
    if refused := sum(answer[3] for answer in said):
        violated.append(f"{refused} messages were refused, or turns failed")
    if (totals.totals.episodes, totals.totals.steps) != (episodes, LENGTH * episodes):
        violated.append(f"the servers counted {totals.totals}, the clients {episodes} episodes")
    if totals.totals.clients != given.clients:
        violated.append(f"{totals.totals.clients} clients are known")
    rows = [
        ("clients", given.clients),
        ("all connected after", f"{connecting:.1f} s"),
        ("episodes told, and counted", f"{episodes}, {totals.totals.episodes}"),
        ("caches accepted", sum(answer[1] for answer in said)),
        ("round trip of an UPDATE, median", f"{1e3 * statistics.median(trips):.0f} ms"),
        ("the slowest of a hundred", f"{1e3 * trips[int(0.99 * len(trips))]:.0f} ms"),
        ("descriptors of the proxy", used),
        ("threads of the proxy", most),
        ("memory of the proxy, grown by", f"{(at_proxy - before) >> 20} MiB"),
        ("memory of the server", f"{at_server >> 20} MiB"),
    ]
    print(table(["", "measured"], rows))
    return end(violated)


WITHIN = 60.0
"""Seconds."""


def joiners(first: int, count: int, pipe: Any, endpoint: str, keys: str) -> None:
    """Callers of one process: each is answered, and reports one step."""
    limits.raise_limit()
    callers = Callers(endpoint, count, keys)
    pipe.recv()
    began = time.monotonic()
    left = lambda: max(0.0, began + WITHIN - time.monotonic())  # noqa: E731
    connected = callers.connect(WITHIN)
    callers.send(lambda client: [(1, messages.Hello(role="actor"))])
    callers.hear(count, left())
    homes = {
        client: said.header for (client, _), said in callers.told.items() if isinstance(said.body, messages.Welcome)
    }
    welcomed = time.monotonic() - began
    for client, header in homes.items():
        callers.send_one(client, 2, messages.Update(steps=1), home=header.home, run=header.run)
    callers.hear(len(homes), left())
    known = sum(isinstance(said.body, messages.Updated) for said in callers.told.values())
    pipe.send((connected, len(homes), welcomed, known, time.monotonic() - began))
    pipe.recv()
    callers.close()
    pipe.send("gone")


def newcomers() -> int:
    """Do 8192 clients behind one proxy, with one key, all start within a minute?

    They come at once, each with a connection of its own, and show the same key; the server has a state folder, and all limits
    are the default ones. A client has started when its HELLO was answered and its first report, of one step, acknowledged.
    None asks twice. At the end the server has to have counted one step of each.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=8192)
    parser.add_argument("--processes", type=int, default=4)
    given = parser.parse_args()
    violated = []
    with tempfile.TemporaryDirectory(prefix="memoire-soak-") as folder:
        keys = f"{folder}/keys"
        subprocess.run([sys.executable, "-m", "memoire", "keys", "new", keys], check=True, stdout=sys.stderr)
        with nodes(SCHEMA, "--state-dir", f"{folder}/state", keys=keys) as (server, (proxy,)):
            with Reader([proxy.endpoint], timeout=30.0, keys=keys) as reader:
                peers = Peers(joiners, given.clients, -(-given.clients // given.processes), proxy.endpoint, keys)
                try:
                    said = peers.ask("begin")
                    say(*said)
                    totals = reader.totals(timeout=60.0).totals
                    used, grown = descriptors(proxy.pid), (memory(proxy.pid), memory(server.pid))
                    peers.ask("end")
                finally:
                    peers.end()
    slowest = max(answer[4] for answer in said)
    welcomed, known = sum(answer[1] for answer in said), sum(answer[3] for answer in said)
    if known != given.clients or slowest > WITHIN:
        violated.append(f"{welcomed} were welcomed and {known} acknowledged of {given.clients} after {slowest:.1f} s")
    if (totals.clients, totals.steps) != (given.clients, given.clients):
        violated.append(f"the server counted {totals.clients} clients and {totals.steps} steps")
    rows = [
        ("clients", given.clients),
        ("all connected after", f"{max(answer[0] for answer in said):.1f} s"),
        ("all welcomed after", f"{max(answer[2] for answer in said):.1f} s"),
        ("all first reports acknowledged after", f"{slowest:.1f} s"),
        ("clients and steps that the server counted", f"{totals.clients}, {totals.steps}"),
        ("descriptors of the proxy", used),
        ("memory of proxy and server", " and ".join(f"{each >> 20} MiB" for each in grown)),
    ]
    print(table(["", "measured"], rows))
    return end(violated)


CONNECT_CLOSE_SCHEMA = Schema({"obs": Column(np.float32, (4,), "state")})
PROCESSES = 2
ACCOUNT = 4096
"""Bytes that a server may keep of each client that ever was."""
FLAT = 8 << 20
"""Bytes that anything else may grow by: allocators keep what they had once."""


def come_and_go(endpoint: str, count: int) -> None:
    """Whole clients."""
    for _ in range(count):
        with connect(endpoint, timeout=60.0, capacity=10) as client:
            client.on_entries(1)
            client.update(60.0)


def say_hello(endpoint: str, count: int) -> None:
    """Requests that open no account."""
    context = shared_context()
    for number in range(count):
        made = sockets.request_client(context, 1 << 20)
        sockets.connect(made, endpoint)
        made.poll(10_000, zmq.POLLOUT)
        sockets.send(made, [b"", *encode(messages.Hello(role="doctor"), client=os.urandom(16), sequence=number + 1)])
        assert made.poll(10_000), "no WELCOME"
        made.close(0)


def say_nonsense(endpoint: str, count: int) -> None:
    """Connections that are not ZeroMQ's, or end in the middle of its greeting."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    for number in range(count):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5.0) as made:
            made.sendall((b"", b"\xff\x00", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64))[number % 4])


KINDS = {"whole clients": come_and_go, "HELLO and goodbye": say_hello, "nothing, or nonsense": say_nonsense}


def actors_of_connect_close(first: int, count: int, pipe: Any, endpoint: str) -> None:
    """One process; asked for a kind and a number, it does it, and says how it grew."""
    while True:
        kind, number = pipe.recv()
        KINDS[kind](endpoint, 50)  # what is made once has been made
        before = memory(), settled("self", 0, 1.0), threads()
        KINDS[kind](endpoint, number)
        settled("self", before[1])
        pipe.send([now - then for now, then in zip((memory(), descriptors(), threads()), before, strict=True)])


def settled(pid: int | str, most: int, seconds: float = 15.0) -> int:
    """Descriptors of a process, as soon as they are down to this number or that time has passed: ZeroMQ closes in the
    background.
    """
    until = time.monotonic() + seconds
    while (found := descriptors(pid)) > most and time.monotonic() < until:
        time.sleep(0.1)
    return found


def connect_close() -> int:
    """Do memory, descriptors and threads stay flat while clients come and go twenty thousand times?

    Whole clients (connect, count, tell, close) come and go through a proxy, one after the other in a few processes. What a
    server keeps of each is its account, for exact totals: that is its growth for each client. Then as many connections that
    only say HELLO, and as many that say nothing or nonsense, of which nothing may stay.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, help="not used: it takes as long as it takes")
    parser.add_argument("--cycles", type=int, default=20_000)
    given = parser.parse_args()
    rows, violated = [], []
    with nodes(CONNECT_CLOSE_SCHEMA) as (server, (proxy,)), Reader([proxy.endpoint], timeout=30.0) as reader:
        peers = Peers(actors_of_connect_close, PROCESSES, 1, proxy.endpoint)
        try:
            for kind in KINDS:
                peers.ask((kind, 200))
                before = {pid: (memory(pid), descriptors(pid)) for pid in (server.pid, proxy.pid)}
                began = time.monotonic()
                grown = peers.ask((kind, given.cycles // PROCESSES), 3000.0)
                seconds = time.monotonic() - began
                say(f"{given.cycles} times {kind}: {seconds:.0f} s")
                left = [settled(pid, then[1]) - then[1] for pid, then in before.items()]
                more = [memory(pid) - then[0] for pid, then in before.items()]
                there = [max(row[k] for row in grown) for k in range(3)]
                rows.append(
                    [
                        kind,
                        f"{given.cycles / seconds:.0f} /s",
                        *(f"{bytes_ / 2**20:.1f} MiB, {fds}" for bytes_, fds in zip(more, left, strict=True)),
                        f"{there[0] / 2**20:.1f} MiB, {there[1]}",
                    ]
                )
                allowed = FLAT + (ACCOUNT * given.cycles if kind == "whole clients" else 0)
                if more[0] > allowed or more[1] > FLAT or there[0] > FLAT:
                    violated.append(f"{kind}: server, proxy and client grew by {more[0]}, {more[1]}, {there[0]} bytes")
                if max(*left, there[1], there[2]) > 2:
                    violated.append(f"{kind}: descriptors {left}, {there[1]} or threads {there[2]} were left")
            steps = reader.totals(timeout=60.0).totals.steps
        finally:
            peers.end()
    wanted = PROCESSES * (2 * 50 + 200 + given.cycles // PROCESSES)
    if steps != wanted:
        violated.append(f"{steps} steps were counted of {wanted}")
    print(f"{given.cycles} times each; memory and descriptors that were there afterwards and not before.\n")
    print(table(["what comes and goes", "", "server", "proxy", "each client's process"], rows))
    return end(violated)


STEADY_HOURS_SCHEMA = memoire.Schema(
    {"obs": memoire.Column(np.float32, (16,), "state"), "reward": memoire.Column(np.float32, (), "reward")}
)
ACTORS, EACH = 8, 4
BATCH = 128
STEADY_HOURS_LENGTH = 100
"""Steps of an episode."""
MODEL = bytes(1 << 16)
STEADY_HOURS_FLAT = 4 * MiB
"""What anything may be larger by, late than early: allocators breathe, and totals of an hour are points of a curve."""
STEPS = 50.0
"""Steps a second of each actor."""
TURN = 0.5
"""Seconds between two turns of the learner, and of whoever watches."""
Usage = tuple[int, int, int]
"""Bytes of memory, descriptors and threads of a process."""


def actors_of_steady_hours(first: int, number: int, pipe: Any, endpoint: str) -> None:
    """Clients with an episode a turn each, until they are asked what they counted; then they leave."""
    clients = [memoire.connect(endpoint, timeout=60.0, capacity=4096, seed=first + k) for k in range(number)]
    models = [client.model("policy") for client in clients]
    rng = np.random.default_rng(first)
    pipe.send("here")
    due = time.monotonic()
    while not pipe.poll(max(0.0, due - time.monotonic())):
        due += STEADY_HOURS_LENGTH / STEPS
        for client, model in zip(clients, models, strict=True):
            play(client, rng.random((STEADY_HOURS_LENGTH, 16), np.float32))
            client.log(f"an episode of {LENGTH} steps by model {model.version}")
            client.scalars({"model": float(model.version)})
    pipe.recv()
    for client in clients:
        client.update(60.0)
    pipe.send([(client.stats().steps, client.stats().lost_caches, model.version)
               for client, model in zip(clients, models, strict=True)])  # fmt: skip
    for client in clients:
        client.close(60.0)


def play(client: memoire.Client, states: Any) -> None:
    """An episode into a client's memory, told, and a cache of it if there is room."""
    memory = client.memory
    memory.open()
    for state in states:
        memory.add(0, (state, state[0]))
    memory.close(terminated=True)
    client.on_entries(len(states))
    client.on_episode(0, len(states), float(states[:, 0].sum()))
    client.push_cache(0.0)


def learner(first: int, number: int, pipe: Any, endpoint: str) -> None:
    """Draws, corrects, tells and publishes, until it is asked how much."""
    rng = np.random.default_rng(first)
    with memoire.Reader([endpoint], timeout=60.0) as reader:
        pipe.send("here")
        for turn in count(1):
            batch = reader.get_batch(BATCH, timeout=300.0)
            reader.update_priorities(batch.ids, rng.random(BATCH))
            reader.scalars({"loss": 1.0 / turn})
            if turn % 10 == 0:
                with contextlib.suppress(MemoireTimeout):  # the machine is busy: it goes on being sent
                    reader.publish("policy", MODEL)
            if pipe.poll(TURN):
                break
        pipe.recv()
        pipe.send((turn, turn // 10))


def usage(pid: int) -> Usage:
    return memory(pid), descriptors(pid), threads(pid)


def watch(pids: Sequence[int], urls: Sequence[str], seconds: float) -> Iterator[list[Usage]]:
    """What each process uses, again and again, while somebody reads the pages of the nodes."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for url in urls:
            for page in ("/metrics", "/status"):
                with contextlib.suppress(OSError), urllib.request.urlopen(url + page, timeout=30.0) as answer:
                    answer.read()
        yield [usage(pid) for pid in pids]
        time.sleep(4 * TURN)


def medians(seen: Sequence[list[Usage]], place: int) -> tuple[list[int], list[int]]:
    """Medians of what a process used in the second quarter of the time, and in the last."""
    quarter = len(seen) // 4
    parts = (seen[quarter : 2 * quarter], seen[3 * quarter :])
    early, late = ([int(statistics.median(look[place][k] for look in part)) for k in range(3)] for part in parts)
    return early, late


def steady_hours() -> int:
    """Does any process grow over hours of steady work, in which everything is used and nothing is stopped?

    Eight actors step, end episodes and log through a proxy to a server that saves its state; a learner far away draws,
    corrects priorities, tells scalars and publishes models, which actors adopt; somebody scrapes metrics and status.
    Memory, descriptors and threads of each process are looked at all the time. `Early` and `late` are the medians of the
    second and of the last quarter of the time: what grows with the work is seen between them. In the end the server has
    counted each step.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5400.0)
    given = parser.parse_args()
    pages = ["--http", "127.0.0.1:0"]
    with (
        folder() as state,
        nodes(STEADY_HOURS_SCHEMA, "--state-dir", str(state), "--set=cache_size=128", *pages) as (server, (proxy,)),
    ):
        assert server.process.stdout is not None
        url = server.process.stdout.readline().split()[-1].removesuffix("/status")
        crowd = Peers(actors_of_steady_hours, ACTORS, EACH, proxy.endpoint)
        reader = Peers(learner, 1, 1, proxy.endpoint)
        try:
            crowd.answers()
            reader.answers()
            pids = [server.pid, proxy.pid, reader.pids[0], *crowd.pids]
            seen = list(watch(pids, [url], given.seconds))
            counted = [each for said in crowd.ask("counts") for each in said]
            ((batches, models),) = reader.ask("counts")
            with memoire.Reader([server.endpoint], timeout=60.0) as last:
                totals = last.totals(timeout=60.0).totals
        finally:
            crowd.end()
            reader.end()
    names = [
        "server",
        "proxy",
        "learner",
        *(f"actors {k * EACH + 1} to {(k + 1) * EACH}" for k in range(ACTORS // EACH)),
    ]
    return report(given.seconds, names, seen, counted, batches, models, totals)


def report(
    spent: float, names: list[str], seen: list[list[Usage]], counted: list[Any], batches: int, models: int, totals: Any
) -> int:
    """The table; what is wrong with it."""
    wrong, rows = [], []
    for place, name in enumerate(names):
        early, late = medians(seen, place)
        shown = [
            f"{early[0] / MiB:.1f} MiB",
            f"{late[0] / MiB:.1f} MiB",
            *(f"{a}, {b}" for a, b in list(zip(early, late, strict=True))[1:]),
        ]
        rows.append([name, *shown])
        if late[0] - early[0] > STEADY_HOURS_FLAT or late[1] > early[1] + 2 or late[2] > early[2]:
            wrong.append(f"{name}: bytes, descriptors and threads were {early} and are {late}")
    steps = sum(each for each, _, _ in counted)
    if totals.steps != steps:
        wrong.append(f"the server counted {totals.steps} steps, the actors {steps}")
    if min(version for _, _, version in counted) < models - 1:
        wrong.append(f"{models} models were published, and actors have {[version for *_, version in counted]}")
    print(f"{spent / 3600:.2f} h: {steps:,} steps in episodes of {LENGTH}, {steps // LENGTH:,} log lines, {batches:,} batches "
          f"of {BATCH} drawn and corrected, {models:,} models of {len(MODEL) >> 10} KiB; {len(seen):,} looks.\n")  # fmt: skip
    print(table(["process", "memory early", "late", "descriptors", "threads"], rows))
    return end(wrong)


STORAGES = {"caches": 1.0, "rollouts": 0.1, "prompts": 0.2, "jobs": 0.2}
"""What trials are about, and how many seeds there are of each for one of caches."""
ALONE = 100
"""Trials that one process runs first, with nothing beside it, to say how fast that is."""


def simulated_clusters() -> int:
    """Does a simulated cluster lose or count anything twice, over a thousand seeds and more?

    Each trial is two minutes of a cluster in one thread: kills, cuts, a slow network, disks that are full, broken or without
    power, and a few rare things made frequent. The seed decides all of it, and the digest of a trace is the same on every
    machine with the same versions.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    os.environ["PYTHONHASHSEED"] = "0"
    from simulation.run import outcomes
    from simulation.trial import Settings

    alone = [
        outcome for _, outcome in outcomes([Settings(seed) for seed in range(given.first, given.first + ALONE)], 1)
    ]
    virtual, seconds = sum(each.virtual for each in alone), sum(each.seconds for each in alone)
    say(f"alone: {virtual:.0f} s in {seconds:.0f} s of a core")
    speed = f"One process alone: {ALONE} trials of {virtual / ALONE:.0f} s, {seconds / ALONE:.2f} s each"
    speed += f" ({virtual / seconds:.0f} times real time)."
    rows, violations, began = [], [], time.monotonic()
    for storage, share in STORAGES.items():
        seeds = range(given.first, given.first + max(1, round(given.seeds * share)))
        virtual, seconds, failed, digest = 0.0, 0.0, 0, ""
        for settings, outcome in outcomes([Settings(seed, storage=storage) for seed in seeds], given.workers):
            virtual, seconds = virtual + outcome.virtual, seconds + outcome.seconds
            digest = outcome.digest[:16] if settings.seed == given.first else digest
            if outcome.violations:
                failed += 1
                violations.append(f"seed {settings.seed} storage={storage}: {outcome.violations[0]}")
        say(storage, f"{virtual:.0f} s in {seconds:.0f} s of a core")
        hours, times = f"{virtual / 3600:.1f}", f"{virtual / seconds:.0f}"
        rows.append([f"`storage={storage}`", f"{len(seeds):,}", hours, times, failed, f"`{digest}`"])
    head = ["trials", "seeds", "hours of trials", "times real time on a core", "that violated something"]
    print(table([*head, f"digest of seed {given.first}"], rows))
    print(f"\n{speed} The others took {(time.monotonic() - began) / 60:.1f} minutes with {given.workers} processes.")
    return end(violations)


if __name__ == "__main__":
    run_named(globals())
