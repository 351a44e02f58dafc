"""Helpers for tests of a state folder: a small part of a server that saves into it, and contents to save."""

import os
import sqlite3
import tempfile
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from memoire.accounting.account import Account
from memoire.accounting.runs import LogEntry, RunFacts, UnsavedChanges
from memoire.disk.state_folder import Store
from memoire.models.model import make
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.episodes.memory import NamedMemory
from memoire.tables.episodes.pool import EpisodePool
from memoire.wire.messages import Line, Update
from memoire.wire.rows import ACCOUNT
from netkit import until

RUN = "ant/7"
CLIENTS = [bytes([n]) * 16 for n in range(1, 9)]


@contextmanager
def folder_in_memory():
    """Yield a temporary folder, in memory if the system has one, because hundreds of syncs cost nothing there."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as name:
        yield Path(name)


def fork():
    """Fork without the warning of newer Pythons about processes with threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def account(client, episodes=0, steps=0, **facts):
    return Account(client, 1.0, 2.0, report=Update(episodes=episodes, steps=steps), **facts)


class Keeper:
    """Small dispatcher over a store: acknowledges each request when its changes are saved."""

    def __init__(self, folder, name="home", *, run=RUN, begin=True, **options):
        self.store = Store(folder, name, **options)
        self.journal, self.lock = UnsavedChanges(), threading.Lock()
        self.acknowledged, self.failures = [], []
        self.run, self.rows = run, {}
        self.known = {account.client: account for account in own_accounts(self.store, run)}
        self.count = self.store.line_count(run)
        self.hold = threading.Event()
        self.hold.set()
        self.store.start(self.collect, self.done, self.failures.append)
        if begin and run not in [facts.name for facts in self.store.runs()]:
            self.save(runs=[RunFacts(run, began=1.0)])

    def collect(self):
        self.hold.wait()
        with self.lock:
            group = self.journal.take()
            if group is not None:
                group.rows, self.rows = self.rows, {}
            return group

    def done(self, group):
        with self.lock:
            self.journal.confirm_saved()
        self.acknowledged.extend(group.tickets)

    def post(self, accounts=(), lines=(), runs=(), models=(), inherited=(), settings=None, rows=None):
        """Hand over changes to be saved; return their ticket. Lines are (client, number, text)."""
        run = self.run
        with self.lock:
            self.rows |= rows or {}
            for facts in runs:
                self.journal.add_run(facts)
            for changed in accounts:
                changed.lines_through = self.through(changed.client)
                self.known[changed.client] = changed
                self.journal.mark_changed(run, changed)
            self.journal.add_lines(run, [*self.entries(lines)])
            for client in {client for client, _, _ in lines}:
                self.journal.mark_changed(run, self.known[client])
            for model in models:
                self.journal.add_model(run, model)
            for rows in inherited:
                self.journal.add_inherited(run, np.frombuffer(rows, ACCOUNT))
            for key, text in (settings or {}).items():
                self.journal.add_setting(key, text)
            ticket = object()
            self.journal.wait(ticket, ticket)
        self.store.wake()
        return ticket

    def entries(self, lines):
        """Number the lines that were not taken before, and yield them as log entries."""
        for client, number, text in lines:
            if number > self.through(client):
                self.known.setdefault(client, account(client)).lines_through = number
                self.count += 1
                yield LogEntry(self.count, client, float(self.count), Line(number, 0.5, client[0], text))

    def through(self, client):
        return self.known[client].lines_through if client in self.known else 0

    def save(self, *arguments, **options):
        """Post changes, and wait until they are acknowledged."""
        ticket = self.post(*arguments, **options)
        until(lambda: ticket in self.acknowledged or self.failures)
        assert not self.failures, self.failures
        return ticket

    def close(self, timeout=100.0):
        return self.store.close(timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def rows(*homes, episodes=1):
    packed = np.zeros(len(homes), ACCOUNT)
    packed["home"], packed["episodes"] = homes, episodes
    packed["client"] = np.frombuffer(CLIENTS[0], "<u8")
    return packed.tobytes()


def own_accounts(store, run=RUN):
    """Return a server's own accounts of a run, as they are on disk."""
    kept = store.accounts(run)
    return [kept.find(key) for key, _ in store.packed_accounts(run) if len(key) == 16]


def lines_through(store):
    """Return the number of the newest line of each client that wrote any."""
    return {one.client: one.lines_through for one in own_accounts(store) if one.lines_through}


def inherited(store, run=RUN):
    """Return the rows of other servers' accounts, packed."""
    kept = store.accounts(run)
    return b"".join(kept.other_accounts(client).tobytes() for client in CLIENTS)


def failing(code, name):
    error = sqlite3.OperationalError("made for this test")
    error.sqlite_errorcode, error.sqlite_errorname = code, name
    return error


class Faulty:
    """Fault at one point of a store's work: raises `error` while one is set."""

    def __init__(self, point):
        self.point, self.error, self.raised = point, None, 0

    def __call__(self, point):
        if point == self.point and self.error is not None:
            self.raised += 1
            raise self.error

    def open_store(self, folder, name, default_name, limits, clock):
        """Open a state folder with this fault, as a server does."""
        return Store(folder, name, default_name=default_name, limits=limits, clock=clock, at=self)


def keeper_of_all(folder, **options):
    keeper = Keeper(folder, **options)
    keeper.save(
        accounts=[account(client, n, 10 * n, rejected={"schema": n}, label=n) for n, client in enumerate(CLIENTS)],
        lines=[(client, n, f"line {n} of {client[0]}") for n in range(1, 4) for client in CLIENTS],
        models=[make("policy", b"\x01" * 100_000, 7), make("note", "hello", 3)],
        inherited=[rows(5, 6)],
        settings={"parameters": "{}"},
    )
    return keeper


def contents(store, run=RUN):
    return {
        "runs": store.runs(),
        "accounts": own_accounts(store, run),
        "count": store.line_count(run),
        "lines": store.search(run, most=10_000),
        "models": store.models(run),
        "inherited": inherited(store, run),
        "settings": store.settings(),
    }


def text_of_log(folder):
    """Return the text of the log, of all segments."""
    return b"".join(path.read_bytes() for path in sorted((folder / "log").iterdir(), key=lambda path: path.name[-12:]))


STATES = Schema({"obs": Column(np.float32, (3,), "state"), "reward": Column(np.float32, (), "reward")})


def episodes_of(memory):
    pool = EpisodePool(memory.schema, memory.parameters, capacity=memory.capacity)
    pool.now = NamedMemory(memory, pool.owner)
    return pool


def memory_of(lengths, capacity=1000, **parameters):
    """Return a memory of closed episodes: every other one terminates, every third has a learner's priorities."""
    rng = np.random.default_rng(0)
    memory = Memory(STATES, capacity, Parameters(**parameters), seed=0)
    for i, length in enumerate(lengths):
        memory.set_clock(1e9 + 60 * i)
        memory.open()
        values = [rng.random((length, 3), np.float32), rng.random(length, np.float32)]
        numbers = memory.extend(0, values, rng.random(length, np.float32), model_version=i)
        final = None if i % 3 == 2 else rng.random(3, np.float32)
        memory.close(multiplier=1.0 + i % 2, final_state=final, terminated=i % 2 == 0 or None)
        if i % 3 == 0:
            memory.update_priorities(numbers, rng.random(length))
    return memory
