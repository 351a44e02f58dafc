"""What does a server keep of clients that are gone, and how soon is it there again after a restart?

A hundred thousand clients, as preemptible actors come and go, each counted by a server with a state folder: life spans,
counts and returns are drawn at random, half of the clients say goodbye. Then all of them are folded, the server starts
again, a thousand clients speak again after a month, and everything goes to another server as a drain brings it. A
promise: at most 100 bytes of the folder for each client, and every step counted once.
"""

import argparse
import random
import sqlite3
import sys
import time

import numpy as np
from _kit import CANNOT, end, folder, memory, table

from memoire.accounting.merge import merge, totals_of, totals_of_pages
from memoire.disk.state_folder import Store
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.server.dispatch import Dispatcher
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table, Tables
from memoire.wire import messages
from memoire.wire.frames import encode, name_hash, parse

SCHEMA = Schema({"obs": (np.float32, (64,)), "action": np.int32, "reward": np.float32})
MAX_BYTES = 100
MONTH = 30 * 86_400.0
LIMITS = Limits(new_clients=1 << 30)


class Server:
    """A server's dispatcher over a real state folder, under a clock of its own; no sockets."""

    def __init__(self, path, name, clock):
        self.clock, self.store = clock, Store(path, name, limits=LIMITS)
        tables = {"default": Table(SCHEMA, parameters=Parameters())}
        self.dispatcher = Dispatcher(
            tables=Tables(
                tables, lambda name, settings: Pool(settings.schema, settings.parameters, clock=lambda: clock[0])
            ),
            run="run",
            name=name,
            limits=LIMITS,
            store=self.store,
            clock=lambda: clock[0],
            epoch=0,
        )

    def tell(self, client, number, body):
        frames = encode(body, client=client, sequence=number, run=name_hash("run"))
        return self.dispatcher.answer(parse(frames)).body

    def save(self):
        while (group := self.dispatcher.collect()) is not None:
            self.store.save(group)
            self.dispatcher.saved()

    def pages(self):
        return self.dispatcher.pages(self.dispatcher.runs.current)


def lives(count, seed):
    """Each client's id and what it says last."""
    rng = random.Random(seed)
    for _ in range(count):
        steps = int(10 ** rng.uniform(2.0, 6.5))
        episodes, caches = steps // rng.randrange(10, 1000) + 1, steps // 256 + 1
        applied = int(0.3 * rng.random() * steps)
        returned = rng.choice([float(steps), rng.uniform(-1e4, 1e4)])
        yield (
            rng.randbytes(16),
            messages.Update(
                episodes=episodes,
                steps=steps,
                generated_bytes=264 * steps,
                caches=caches,
                cache_bytes=157_000 * caches,
                skipped=rng.choice([0, 0, 0, rng.randrange(100)]),
                applied=applied,
                stale=applied // 20,
                lines=[messages.Line(rng.randrange(1, episodes + 1), 0.0, 7, "a line")] if rng.random() < 0.5 else [],
                ended=[messages.Ended(episodes, 0.0, steps // episodes, returned)],
                leaving=rng.random() < 0.5,
            ),
        )


def timed(work):
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def size_of_accounts(path):
    """Bytes of the pages that accounts take in a database, half-empty ones whole; None where SQLite cannot tell."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        try:
            return connection.execute("SELECT sum(pgsize) FROM dbstat WHERE name = 'accounts'").fetchone()[0]
        except sqlite3.OperationalError:
            return None


def fill(server, everybody):
    """Every client lives and goes; accounts are saved and folded as they come."""
    for number, (client, update) in enumerate(everybody):
        server.clock[0] += 23.0
        server.tell(client, 1, update)
        if number % 200 == 199:
            server.save()
            server.dispatcher.fold()
    server.save()
    server.clock[0] += MONTH
    server.dispatcher.fold()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.0, help="ignored: the number of clients decides")
    parser.add_argument("--clients", type=int, default=100_000)
    given = parser.parse_args()
    everybody = list(lives(given.clients, seed=1))
    steps, count = sum(update.steps for _, update in everybody), given.clients
    rows, violations = [], []

    def check(what, found, expected):
        if found != expected:
            violations.append(f"{what}: {found}, expected {expected}")

    with folder() as place:
        server = Server(place / "a", "a", [1.79e9])
        before = memory()
        seconds, _ = timed(lambda: fill(server, everybody))
        ledger = server.dispatcher.ledger
        check("accounts folded", (len(ledger), ledger.folded), (0, count))
        check("steps", ledger.steps, steps)
        rows.append((f"{count:,} clients come and go", f"{1e6 * seconds / count:.0f} us each"))
        rows.append(("memory that they leave behind", f"{(memory() - before) / count:.0f} bytes each"))
        server.store.close()
        taken = size_of_accounts(place / "a" / "state.db")
        if taken is None:
            print("SQLite was built here without dbstat, which says what a table takes.")
            return CANNOT
        rows.append((f"the state folder (at most {MAX_BYTES})", f"{taken / count:.1f} bytes each"))
        if taken > MAX_BYTES * count:
            violations.append(f"{taken / count:.1f} bytes of disk for each client")
        seconds, server = timed(lambda: Server(place / "a", "a", server.clock))
        check("steps after a restart", server.dispatcher.ledger.steps, steps)
        rows.append(("start, all of them added up", f"{seconds:.2f} s"))
        back = random.Random(2).sample(everybody, 1000)
        seconds, _ = timed(lambda: [server.tell(client, 2, update) for client, update in back])
        check("steps after a thousand said it again", server.dispatcher.ledger.steps, steps)
        rows.append(("one speaks again after a month", f"{1e3 * seconds:.0f} us each"))
        strangers = [random.Random(3).randbytes(16) for _ in range(1000)]
        seconds, _ = timed(lambda: [server.tell(client, 1, messages.Hello()) for client in strangers])
        rows.append(("one that nobody knows says hello", f"{1e3 * seconds:.0f} us each"))
        heir = Server(place / "b", "b", server.clock)
        seconds, _ = timed(lambda: bring(server, heir))
        rows.append(("everything goes to another server", f"{seconds:.1f} s"))
        check("steps at the other one", totals_of_pages(heir.pages()).steps, steps)
        check("steps of both together", totals_of(merge(*server.pages(), *heir.pages())).steps, steps)
        server.store.close()
        heir.store.close()
    print(table(["", f"{count:,} clients"], rows))
    return end(violations)


def bring(server, heir):
    """As `memoire drain` does."""
    for rows in server.pages():
        heir.dispatcher.inherit("run", False, rows)
        heir.save()


if __name__ == "__main__":
    sys.exit(main())
