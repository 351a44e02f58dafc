"""Are totals and log lines exact while the lists of servers change and servers are killed, restarted and drained?

Four durable servers and two proxies that follow a file each, clients that record, push and log without a pause. By a
seed: lists change (each proxy's at another time), servers and proxies are killed with SIGKILL and started again, a server
is drained and comes back, another run begins. No server is taken off a list while it is away: that is the one case in
which a line may be logged twice (docs/homes.md).
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time

from _kit import end, folder, say, table

from history import ports
from memoire.accounting.logbook import LineFilter, format_line
from memoire.cli.drain import drain
from memoire.client.client import connect
from memoire.disk.state_folder import Store
from memoire.limits import Limits
from memoire.reader.reader import Reader
from netkit import SCHEMA, record

LIMITS = Limits(resend_after=0.1, resend_most=0.5, update_every=0.1, request_timeout=60.0)
RUNS = ("first", "second", "third")


class Node:
    """A command of ours that can be killed and started again at the same address."""

    def __init__(self, name, *arguments, port):
        self.name, self.endpoint = name, f"tcp://127.0.0.1:{port}"
        self.arguments = [*arguments, "--endpoint", self.endpoint, "--http", "off"]
        self.start()

    def start(self):
        command = [sys.executable, "-u", "-m", "memoire", *self.arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout.readline(), f"{self.name} did not start"

    def stop(self, number):
        self.process.send_signal(number)
        status = self.process.wait(20.0)
        self.process.stdout.close()
        return status


class Clients:
    """Clients that work without a pause, and know what they did."""

    def __init__(self, endpoints, count):
        self.clients = [
            connect(endpoints[number % len(endpoints)], seed=number, capacity=2000, limits=LIMITS, timeout=30.0)
            for number in range(count)
        ]
        self.stopped = threading.Event()
        self.logged = [0] * count
        self.errors = []
        self.threads = [threading.Thread(target=self._work, args=(number,)) for number in range(count)]
        for thread in self.threads:
            thread.start()

    def _work(self, number):
        client = self.clients[number]
        try:
            while not self.stopped.wait(0.02):
                record(client, length=4)
                client.push_cache(0.0)
                if client.log(f"{number} {self.logged[number]}"):
                    self.logged[number] += 1
            client.update(90.0)
        except BaseException as error:
            self.errors.append(f"client {number}: {error!r}")

    def stop(self):
        self.stopped.set()
        for thread in self.threads:
            thread.join(120.0)


class Nemesis:
    """Changes what can be changed, by a seed."""

    def __init__(self, seed, servers, proxies, lists):
        self.rng, self.servers, self.proxies, self.lists = random.Random(seed), servers, proxies, lists
        self.done = dict.fromkeys(("list changes", "server kills", "proxy kills", "drains", "runs"), 0)
        self.listed = {path: list(servers) for path in lists}
        self.runs = 0

    def strike(self):
        getattr(
            self, self.rng.choice(("change", "change", "change", "kill_server", "kill_server", "kill_proxy", "drain"))
        )()

    def change(self):
        path = self.rng.choice(self.lists)
        self.give(path, self.rng.sample(self.servers, self.rng.randint(1, len(self.servers))))
        self.done["list changes"] += 1

    def give(self, path, servers):
        text = "\n".join(server.endpoint for server in servers) + "\n"
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)
        self.listed[path] = servers

    def kill_server(self):
        server = self.rng.choice(self.servers)
        server.stop(signal.SIGKILL)
        time.sleep(self.rng.uniform(0.0, 1.0))
        server.start()
        self.settle()
        self.done["server kills"] += 1

    def kill_proxy(self):
        proxy = self.rng.choice(self.proxies)
        proxy.stop(signal.SIGKILL)
        time.sleep(self.rng.uniform(0.0, 0.5))
        proxy.start()
        self.done["proxy kills"] += 1

    def drain(self):
        """Drain a server that clients can leave, and let it come back."""
        server = self.rng.choice(self.servers)
        others = [other for other in self.servers if other is not server]
        for path, servers in self.listed.items():
            if set(servers) <= {server}:
                self.give(path, others)
        drain(server.endpoint, [other.endpoint for other in others], timeout=60.0, say=lambda line: None)
        assert server.stop(signal.SIGTERM) == 0
        server.start()
        self.settle()
        self.done["drains"] += 1

    def begin_run(self):
        self.runs += 1
        with Reader([server.endpoint for server in self.servers], timeout=20.0) as reader:
            reader.begin_run(RUNS[self.runs % len(RUNS)])
        self.done["runs"] += 1

    def settle(self):
        """Until a server that was away answers again: nobody takes one off that is away."""
        with Reader([server.endpoint for server in self.servers], timeout=20.0) as reader:
            assert len(reader.totals(timeout=20.0).servers) == len(self.servers)


def settled(totals):
    """Caches of which somebody knows what became of them."""
    return totals.accepted_caches + totals.rejected_caches + totals.lost_caches


def lines_in(place, names):
    """Every line that is in the servers' folders: label and text."""
    for name in names:
        with Store(place / name) as store:
            for run in store.runs():
                after = 0
                while entries := store.search(run.name, LineFilter(after=after), most=1000):
                    after = entries[-1].index
                    yield from (
                        format_line(0.0, entry.line.label, entry.line.text).split(",", 1)[1] for entry in entries
                    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "little"))
    parser.add_argument("--clients", type=int, default=12)
    given = parser.parse_args()
    say(f"seed {given.seed}")
    violations = []
    with folder() as place:
        schema = ["--schema", SCHEMA.to_json(), "--set", "cache_size=16"]
        names = ("a", "b", "c", "d")
        servers = [
            Node(
                name,
                "server",
                *schema,
                "--name",
                name,
                "--run",
                "first",
                "--state-dir",
                str(place / name),
                port=ports.block(),
            )
            for name in names
        ]
        lists = [place / f"list-{number}" for number in range(2)]
        nemesis = Nemesis(given.seed, servers, [], lists)
        for path in lists:
            nemesis.give(path, servers)
        nemesis.proxies = [Node(path.name, "proxy", "--servers-file", str(path), port=ports.block()) for path in lists]
        clients = Clients([proxy.endpoint for proxy in nemesis.proxies], given.clients)
        moves = [client.home for client in clients.clients]
        moved = 0
        deadline = time.monotonic() + given.seconds
        run_at = [deadline - given.seconds * share for share in (0.3, 0.6)]
        while time.monotonic() < deadline:
            nemesis.strike()
            if run_at and time.monotonic() > run_at[-1]:
                run_at.pop()
                nemesis.begin_run()
            time.sleep(nemesis.rng.uniform(0.2, 1.5))
            homes = [client.home for client in clients.clients]
            moved += sum(before != after for before, after in zip(moves, homes, strict=True))
            moves = homes
        say(nemesis.done)
        clients.stop()
        violations += clients.errors
        stats = [client.stats() for client in clients.clients]
        for client in clients.clients:
            client.close(20.0)
        with Reader([server.endpoint for server in servers], timeout=20.0) as reader:
            found = reader.totals()
            totals = [reader.totals(run).totals for run in found.runs]
        for node in (*nemesis.proxies, *servers):
            if node.stop(signal.SIGTERM):
                violations.append(f"{node.name} did not end with status 0")
        lines = list(lines_in(place, names))
    counted = {
        "episodes": (sum(one.episodes for one in totals), sum(one.episodes for one in stats)),
        "steps": (sum(one.steps for one in totals), sum(one.steps for one in stats)),
        "log lines": (len(lines), sum(clients.logged)),
        "different ones": (len(set(lines)), sum(clients.logged)),
        "caches pushed": (sum(one.pushed_caches for one in totals), sum(one.pushed_caches for one in stats)),
        "received or lost": (sum(map(settled, totals)), sum(one.pushed_caches for one in stats)),
    }
    violations += [f"{name}: {ours} counted, {true} done" for name, (ours, true) in counted.items() if ours != true]
    if found.missing:
        violations.append(f"{found.missing} did not answer")
    for one in stats:
        received = one.accepted_caches + sum(one.rejected.values())
        if one.pushed_caches != received + one.lost_caches + one.in_flight_caches:
            violations.append(f"caches of {one.client} do not add up: {one}")
    rows = [(name, f"{ours:,}", f"{true:,}") for name, (ours, true) in counted.items()]
    rows += [(name, f"{count:,}", "") for name, count in (nemesis.done | {"moves seen": moved}).items()]
    print(table([f"seed {given.seed}", "servers say", "clients did"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
