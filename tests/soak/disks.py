"""What is on disks: power failures, damage, accounts of clients that are gone, memory for snapshots."""

import argparse
import itertools
import json
import logging
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from _kit import CANNOT, TESTS, end, folder, memory, run_named, say, table

# isort: split

import numpy as np
import pytest
import test_every_file as every

import mutations
import powerkit
from faultkit import in_child
from memoire.accounting.merge import merge, totals_of, totals_of_pages
from memoire.disk.state_folder import Store
from memoire.errors import StateLocked
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.server.dispatch import Dispatcher
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table, Tables
from memoire.wire import messages
from memoire.wire.frames import encode, name_hash, parse
from powerkit import check_state
from statekit import folder_in_memory


def power_failure() -> int:
    """Does a power failure lose anything that was acknowledged?

    Everything that a store writes, renames and syncs is recorded by a library that is loaded before all others. Then the
    power fails at a thousand random moments: what was synced is there, of the rest each write is there, not there, or there
    up to a sector, in any order, and names only as far as their folder was synced. What was acknowledged before has to be
    there, each step whole, with the log's text completed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0, help="at most")
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not (shutil.which("gcc") or shutil.which("cc")):
        print("It takes a C compiler to record what is written.")
        return CANNOT
    ends, violations, cuts, steps = time.monotonic() + given.seconds, [], 0, 0
    with folder_in_memory() as place:
        root = place / "recorded"
        root.mkdir()
        recorded = powerkit.record(root, place, TESTS / "support" / "store_child.py", "steps", root, 20)
        for moment, acknowledged in powerkit.failures(recorded, root, place / "after", given.cuts, given.seed):
            try:
                steps = check_state(place / "after" / "state", acknowledged)
            except Exception as error:
                violations.append(f"seed {given.seed}, moment {moment}, {acknowledged} acknowledged: {error!r}")
            cuts += 1
            if cuts % 100 == 0:
                say(f"{cuts} cuts, {len(violations)} violations")
            if time.monotonic() > ends:
                break
    rows = [("writes, renames and syncs recorded", f"{len(recorded):,}"), ("steps acknowledged", steps)]
    rows += [("power failures", f"{cuts:,}"), ("that lost something acknowledged", len(violations))]
    print(table(["", ""], rows))
    return end(violations)


sys.path.insert(1, str(TESTS / "storage"))
SORTS = ("flips", "cuts", "removals", "tails")
VERDICTS = ("refused", "named", "unchanged", "silent")
COLUMNS = (*SORTS, "full disks", "double writers", "kills", *VERDICTS)
STEPS = "each step of a write"


def state_damage() -> int:
    """Is a damaged file of a server, a trainer or a client ever believed?

    Copies of two state folders (one as a killed server leaves it, one that was closed) get bits flipped, files cut, sectors
    zeroed, pages swapped, files removed or put back as they were some transactions ago. Each copy then has to open with
    exactly what was in it, or to be refused without being touched.

    Then every kind of file is tried alone (`tests/disk/test_every_file.py`), and the table has a row for each of its
    files. Each bit of a file below 2 kB is flipped, and it is cut at each size. Of a larger file every so many bits and sizes
    are tried; if it lies in a state folder, 2,000 bits by a seed, the boundaries of all pages and a hundred other sizes. The
    file is removed; its last 512 and 4,096 bytes are zeros or gone. At each step of a write the disk is full (once, or from
    then on), another process writes too, or the process is killed. Undamaged files open before and after.

    Whatever is damaged is refused and stays as it was, or has all that was acknowledged ("unchanged": the damage is in free
    space or in a backup, for example). "Named" is right, too: answers of prompts are missing, these prompts wait again, and
    the log names the file; or a log's text differs, which acknowledges nothing. Anything else is silent.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0, help="for copies of whole folders, at most")
    parser.add_argument("--rounds", type=int, default=1000, help="damaged copies of each folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=list(every.FILES), help="of files that are tried alone")
    given = parser.parse_args()
    ends = time.monotonic() + given.seconds
    rows, violations = [], []
    with folder_in_memory() as place:
        killed, older, closed, truth = mutations.make_folders(place)
        work = place / "work"
        work.mkdir()
        for name, source in (("of a killed server", killed), ("that was closed", closed)):
            verdicts = mutations.Counter()
            for start in range(0, given.rounds, 100):
                if time.monotonic() > ends:
                    break
                try:
                    verdicts += mutations.run(
                        source, older, truth, work, min(100, given.rounds - start), given.seed + start
                    )
                except AssertionError as error:
                    violations.append(f"folder {name}: {error}")
                say(f"folder {name}: {dict(verdicts)}")
            rows.append((name, sum(verdicts.values()), *(verdicts[verdict] for verdict in mutations.VERDICTS)))
    print(table(["folder", "damaged copies", *mutations.VERDICTS], rows), end="\n\n")
    logging.getLogger("memoire").addHandler(Losses())
    logging.getLogger("memoire").propagate = False  # thousands of warnings are expected
    whole = []
    for name in given.kinds:
        with folder_in_memory() as place:
            trial = Trial(every.FILES[name], place, violations)
            try:
                whole += [(f"{name}: {file}", *row) for file, row in trial.rows()]
            except pytest.skip.Exception as reason:
                say(f"{name} is left out: {reason}")
        say(*whole[-1:])
    for name, kind in every.SPARSE.items():
        with folder_in_memory() as place:
            whole.append((f"{name}: {STEPS}", *in_columns(Trial(kind, place, violations).interrupted())))
    whole.append(("sum", *(sum(row[column] for row in whole) for column in range(1, len(whole[0])))))
    print(table(["file", *COLUMNS], whole))
    return end(violations)


def in_columns(row: Counter[str]) -> tuple[int, ...]:
    """The counts of a row of the table."""
    return tuple(row[column] for column in COLUMNS)


class Losses(logging.Handler):
    """Counts files that the log names as missing or damaged."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        Losses.count += record.levelno >= logging.WARNING


class Trial:
    """Everything that can happen to the files of one kind, in a folder of their own."""

    def __init__(self, kind: every.File, place: Path, violations: list[str]) -> None:
        self.kind, self.place, self.violations = kind, place, violations
        self.folder = place / "files"
        self.folder.mkdir()
        every.fill(kind, self.folder)

    def rows(self) -> list[tuple[str, tuple[int, ...]]]:
        """A row for each file: how often what was done, and what came of it; the last one is of all files."""
        good = every.contents(self.folder)
        every.is_control(self.kind, self.folder)
        counts: dict[str, Counter[str]] = {}
        for name, content in good.items():
            row = counts.setdefault(re.sub(r"[0-9a-f]{16,}|\d{6,}", "\\*", name), Counter())
            for sort, why, damaged in every.damages(self.kind, name, content, 1):
                row[sort] += 1
                row[self.verdict_of(every.changed(good, name, damaged), f"{name}, {why}")] += 1
        every.put(self.folder, good)
        every.is_control(self.kind, self.folder)
        counts[STEPS] = self.interrupted()
        return [(name, in_columns(row)) for name, row in counts.items()]

    def verdict_of(self, files: dict[str, bytes], why: str) -> str:
        named = Losses.count
        try:
            verdict = every.assert_refused(self.kind, self.folder, files, why)
        except Exception as error:
            self.violations.append(f"{why}: {error!r}")
            return "silent"
        if verdict == "refused":
            return "refused"
        return "unchanged" if Losses.count == named else "named"

    def interrupted(self) -> Counter[str]:
        """The disk is full, another process writes, or the process is killed, at each step of a write."""
        kind, folder, place, row = self.kind, self.folder, self.place, Counter[str]()
        steps = every.steps_of(kind, folder, place)
        trials = [("full disks", every.fail_at, number, stays) for number in steps for stays in (False, True)]
        trials += [("double writers", write_twice_at, number) for number in steps]
        trials += [("kills", every.kill_at, number) for number in steps]
        for (sort, what, *arguments), number in zip(trials, itertools.count()):
            row[sort] += 1
            copy = place / str(number)
            try:
                what(kind, folder, copy, *arguments)
                row["unchanged"] += 1
            except Exception as error:
                self.violations.append(f"{sort} {arguments}: {error!r}")
                row["silent"] += 1
            shutil.rmtree(copy)
        return row


def write_twice_at(kind: every.File, folder: Path, place: Path, number: int) -> None:
    """A second process writes at a step of the first one's write: it is refused, or the last one of them stays."""
    shutil.copytree(folder, place)
    steps = itertools.count(1)

    def second() -> None:
        try:
            every.write(kind, place, every.VALUES + 1)
        except StateLocked:
            assert kind.hold is not None
        else:
            assert kind.hold is None

    def at(step: str) -> None:
        if next(steps) == number:
            assert in_child(second) == 0, f"at {step}"

    every.write(kind, place, every.VALUES, at)
    found = kind.read(place)
    assert found == every.VALUES or (kind.hold is None and found == every.VALUES + 1)
    assert not [name for name in every.contents(place) if "draft" in name]


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


def gone_clients() -> int:
    """What does a server keep of clients that are gone, and how soon is it there again after a restart?

    A hundred thousand clients, as preemptible actors come and go, each counted by a server with a state folder: life spans,
    counts and returns are drawn at random, half of the clients say goodbye. Then all of them are folded, the server starts
    again, a thousand clients speak again after a month, and everything goes to another server as a drain brings it. A
    promise: at most 100 bytes of the folder for each client, and every step counted once.
    """
    parser = argparse.ArgumentParser()
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


MIB = 1 << 20
MOST = 64
"""MiB that saving or restoring may take beside what is held."""


class Watched:
    """The greatest growth of this process' memory meanwhile, in MiB, and the seconds that it took."""

    def __enter__(self):
        self._done, self.before = threading.Event(), memory()
        self.peak, self._began = 0, time.monotonic()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self):
        while not self._done.wait(0.01):
            self.peak = max(self.peak, memory())

    def __exit__(self, *_):
        self.seconds = time.monotonic() - self._began
        self._done.set()
        self._thread.join()
        self.growth = (max(self.peak, memory()) - self.before) / MIB
        self.stays = (memory() - self.before) / MIB


def frames():
    import numpy as np

    from memoire.replay.columns import Column
    from memoire.replay.schema import Schema

    return Schema({"obs": Column(np.uint8, (84, 84), "state"), "reward": Column(np.float32, (), "reward")})


def caches_of(schema, size):
    """Caches with contents of their own, of about 1 MiB each."""
    import containers
    from memoire.replay.parameters import Parameters
    from memoire.wire.layout import layout_of

    layout = layout_of(schema, Parameters())
    return [containers.make(layout, 70, seed=number) for number in range(size)]


def server_of(schema, mib):
    from memoire import Server
    from memoire.limits import Limits

    return Server(None, schema, limits=Limits(held_bytes=mib * MIB))


def save_caches(path, mib):
    import numpy as np

    from memoire.wire import containers as unpack

    schema = frames()
    made = caches_of(schema, 64)
    with server_of(schema, mib) as server:
        pool = server._tables.first.pool
        done = threading.Event()

        def push(number):  # a payload of its own each, as from the network
            payload = np.array(made[number % len(made)].payload)
            payload[48:56] = np.array([1e9 + number]).view(np.uint8)  # made at another time
            held = unpack.check(payload, pool.layout)
            return pool.add((number % 50).to_bytes(16, "little"), number, held)

        number = 0
        while not push(number):
            number += 1
        pushed = SimpleNamespace(caches=0)

        def load():
            while not done.is_set():
                push(number + pushed.caches)
                pushed.caches += 1
                if pushed.caches % 8 == 0:
                    server.get_batch(64)

        held = server.stats().held_bytes
        thread = threading.Thread(target=load)
        thread.start()
        while pushed.caches < 2 * number:  # until the load takes no more memory than it will
            time.sleep(0.05)
        before = pushed.caches
        with Watched() as watched:
            told = server.snapshot(path)
        meanwhile = pushed.caches - before
        done.set()
        thread.join()
        return {"held": held / MIB, "growth": watched.growth, "seconds": watched.seconds, "items": told.caches,
                "bytes": told.bytes / MIB, "meanwhile": meanwhile}  # fmt: skip


def restore_caches(path, mib):
    with server_of(frames(), 2 * mib) as server:
        with Watched() as watched:
            done = server.restore([path])
        held = server.stats().held_bytes / MIB
        return {"held": held, "growth": watched.growth - held, "seconds": watched.seconds, "items": done.caches}


def fill_up(memory):
    import numpy as np

    from memories import with_episode

    rng = np.random.default_rng(1)
    frame = rng.integers(0, 255, (200, 84, 84), np.uint8)
    while memory.num_entries + 200 <= memory.capacity:
        with_episode(memory, [frame, np.ones(200, np.float32)], terminated=True)


def tables(mib):
    import memoire

    capacity = mib * MIB // (84 * 84 + 4)
    return {"whole": memoire.Table(frames(), storage="episodes", capacity=capacity, byte_limit=2 * mib * MIB)}


def save_episodes(path, mib):
    from memoire import Server

    with Server(None, tables=tables(mib)) as server:
        pool = server._tables.first.pool
        fill_up(pool.memory)
        with Watched() as watched:
            told = server.snapshot(path)
        held = pool.memory.num_entries * (84 * 84 + 4) / MIB
        return {"held": held, "growth": watched.growth, "seconds": watched.seconds, "items": told.episodes,
                "bytes": told.bytes / MIB}  # fmt: skip


def restore_episodes(path, mib):
    import gc

    from memoire import Server

    with Server(None, tables=tables(mib)) as server:
        gc.collect()
        with Watched() as watched:
            done = server.restore([path])
        held = done.entries * (84 * 84 + 4) / MIB
        return {"held": held, "growth": watched.growth - held, "seconds": watched.seconds, "items": done.episodes}


def save_buffer(path, mib):
    from memoire import Buffer

    buffer = Buffer(frames(), mib * MIB // (84 * 84 + 4))
    fill_up(buffer.memory)
    with Watched() as watched:
        items = buffer.save(path)
    return {"held": len(buffer) * (84 * 84 + 4) / MIB, "growth": watched.growth, "seconds": watched.seconds,
            "items": items, "bytes": Path(path).stat().st_size / MIB}  # fmt: skip


def load_buffer(path, mib):
    from memoire import Buffer

    with Watched() as watched:
        buffer = Buffer.load(path)
    held = len(buffer) * (84 * 84 + 4) / MIB
    return {"held": held, "growth": watched.growth - held, "seconds": watched.seconds, "items": buffer.num_episodes}


WORK = {
    work.__name__: work
    for work in (save_caches, restore_caches, save_episodes, restore_episodes, save_buffer, load_buffer)
}


def snapshot_memory() -> int:
    """How much memory does it take to save and restore what a server holds, and a buffer, of 1 GiB?

    Each in a process of its own; its resident memory is looked at a hundred times a second while it works. A server is
    saved while caches come in and batches are drawn, so that most of what it held is overwritten meanwhile. What was restored
    is counted, and is what is in the memory at the end; the growth beyond that is what it took.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024, help="what is held")
    parser.add_argument("--do", nargs=2, help="in a child: what, and with which file")
    given = parser.parse_args()
    if given.do:
        print(json.dumps(WORK[given.do[0]](given.do[1], given.mib)))
        return 0
    rows, violations = [], []
    with folder() as place:
        for number, name in enumerate(WORK):
            file = place / f"{number // 2}"
            command = [sys.executable, __file__, "snapshot_memory", "--mib", str(given.mib), "--do", name, str(file)]
            said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            say(name, said)
            words = name.replace("_", " ") + (f", {said['meanwhile']} came meanwhile" if "meanwhile" in said else "")
            cells = (said["items"], f"{said['held']:.0f}", f"{said['growth']:.1f}", f"{said['seconds']:.1f}")
            rows.append((words, *cells))
            if said["growth"] > MOST:
                violations.append(f"{name} took {said['growth']:.0f} MiB beside what is held, {MOST} are allowed")
    print(table(["", "caches or episodes", "held, MiB", "growth beside it, MiB", "seconds"], rows))
    return end(violations)


if __name__ == "__main__":
    run_named(globals())
