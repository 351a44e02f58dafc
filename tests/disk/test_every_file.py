"""Tests of damage to each kind of checked file in FILES: values survive, or the file is refused by name and stays."""

import errno
import functools
import itertools
import json
import logging
import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from faultkit import FailAt, KillAt, in_child
from memoire.accounting.runs import LogEntry, RunFacts, SavedGroup
from memoire.client import reports as former_clients
from memoire.disk import opening, record_file, snapshot_file, snapshots
from memoire.disk import table_rows as stored_prompts
from memoire.disk.files import lock_folder
from memoire.disk.record_file import CheckedFile, FileKind
from memoire.disk.record_log import RecordLog
from memoire.disk.state_folder import Store
from memoire.errors import DataError, MemoireError, StateCorrupt, StateLocked, StateUnusable
from memoire.limits import Limits
from memoire.models.model import make as make_model
from memoire.prompts.columns import PAYLOAD, packed, packed_key
from memoire.prompts.pool import restore as restore_prompts
from memoire.prompts.pool import take_changes
from memoire.prompts.rows import PromptRules, PromptState
from memoire.prompts.table import PromptTable
from memoire.replay import saving as dataset_writing
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema, row_schema_from
from memoire.rl import weights
from memoire.rl.samples import SampleJournal
from memoire.tables.caches.pool import Pool
from memoire.tables.table import OpenTable, Table
from memoire.wire import messages
from memoire.wire.frames import tail_of, update_of
from memoire.wire.rows import ACCOUNT
from netkit import until
from statekit import CLIENTS, RUN, account, folder_in_memory, own_accounts

KIND = FileKind(b"memotest", 3, "a file of a test")
REFUSALS = (DataError, StateCorrupt)
READ_LATER = "found when it was read"


@dataclass
class File:
    """Kind of file, or of folder of files, with functions that write and read its values."""

    write: Callable[..., Any]
    """write(folder, number, at): store and acknowledge value `number`, in place of the former value or after it."""
    read: Callable[..., Any]
    """read(folder): return the number of the newest value, after checking that all earlier ones are present."""
    hold: Callable[..., Any] | None = None
    """hold(folder): open the folder for one writer; None if several may write, and the last one stays."""
    is_checked_all: bool = True
    """True if each changed bit is refused; else a change that leaves the value right may pass."""
    is_database: bool = False
    """True if SQLite writes the file: opening changes the file, and only a sample of its bits is flipped."""
    is_killed: bool = False
    """True if the writer is killed before the damage."""
    stride: int = 1
    """Step between the tried bits and sizes of large files."""


def whole_file(folder, number, at):
    record_file.write(folder / "a", KIND, [(number, b"hello"), (0, b""), (9, bytes(range(40)))], at=at)


def read_whole_file(folder):
    with CheckedFile(folder / "a", KIND) as file:
        (number, _), *others = file.records()
        assert [tuple(each) for each in others] == [(0, b""), (9, bytes(range(40)))]
    return number


def open_log(folder, at=lambda step: None):
    return RecordLog(folder, KIND, ".rec", at=at)


def log(folder, number, at):
    """Append a value, two to a file; from the fifth value on, the oldest file goes."""
    with open_log(folder, at) as opened:
        if number % 2 == 0:
            opened.begin_file()
        opened.append([(number, b"%d" % number)])
        opened.remove(len(opened.files) - 2)


def read_log(folder):
    with open_log(folder) as opened:
        values = [(record.tag, record.payload) for record in opened.records()]
    first, last = values[0][0], values[-1][0]
    assert values == [(n, b"%d" % n) for n in range(first, last + 1)]
    assert first <= max(0, last - 2)
    return last


def journal(folder, number, at):
    with SampleJournal(folder, 64, at=at) as opened:
        opened.keep(SimpleNamespace(memory=[(number, float(number), False, {})]))
        opened.commit()


def read_journal(folder):
    with SampleJournal(folder, 64) as opened:
        samples = [sample for kept in opened.buffers() for sample in kept.memory]
    assert samples == [(n, float(n), False, {}) for n in range(samples[-1][0] + 1)]
    return samples[-1][0]


def report(folder, number, at):
    part = former_clients.ReportPart(0, tail_of(messages.Update(epoch=5, steps=number)))
    facts = {"label": 9, "table": "default", "home": "home", "episodes": 2, "lines": 1}
    content = former_clients.FinalCounts(client=b"\x07" * 16, steps=number, parts=[part], **facts)
    former_clients.save(folder, content, at=at)


def read_report(folder):
    logger, warnings = logging.getLogger(former_clients.__name__), []
    logger.addFilter(lambda record: warnings.append(record.getMessage()))
    try:
        files = former_clients.read_reports(folder)
    finally:
        logger.filters.clear()
    if not files:
        raise DataError(*warnings, "") if warnings else DataError(str(folder), "has no report")
    ((_, content),) = files
    assert update_of(content.parts[0].update).steps == content.steps
    return content.steps


def model_file(folder, number, at):
    weights.save(folder / "policy.pth", {"layer": np.full((2, 3), number, np.float32), "b": np.zeros(1)}, at=at)


def read_model_file(folder):
    try:
        arrays = weights.load(folder / "policy.pth")
    except FileNotFoundError as error:
        raise DataError(str(folder), str(error)) from error
    assert arrays.keys() == {"layer", "b"}
    assert (arrays["layer"] == arrays["layer"][0, 0]).all() and arrays["layer"].shape == (2, 3)
    return int(arrays["layer"][0, 0])


@functools.cache
def table():
    schema = Schema({"obs": Column(np.uint8, (2,), "state")})
    return OpenTable("default", Table(schema), Pool(schema, Parameters(), seed=0, byte_limit=1 << 20))


def server_snapshot(folder, number, at):
    rows = np.zeros(1, ACCOUNT)
    rows["client"], rows["steps"] = [[1, 2]], number
    about = snapshots.read_header([table()], server="home", run="run")
    records = [snapshot_file.SnapshotRecord(snapshot_file.AccountsRecord(run="run"), 0, rows.tobytes())]
    snapshot_file.write(folder / "memory.snapshot", about, records, at=at)


def read_snapshot(folder):
    restored = []
    snapshots.restore(
        [folder / "memory.snapshot"], [table()], limits=Limits(), inherit=lambda *facts: restored.append(facts)
    )
    ((run, _, rows),) = restored
    assert run == "run"
    return int(rows["steps"][0])


class Rows:
    """A server's rows as `memoire.tq` asks for them: one for each number, each in a partition of its own."""

    def __init__(self, number=None):
        self.held = {} if number is None else {f"p{n}": n for n in range(number + 1)}

    def rows(self, _):
        from memoire.keyed.messages import RowFacts
        from memoire.tq import client as values

        return {p: [RowFacts(p, "k", 1, {"n": values.encode(n)}, ["x"])] for p, n in self.held.items()}

    def values(self, partition, keys):
        from memoire.keyed.messages import RowValues
        from memoire.tq import client as values

        return [RowValues(True, ["x"], {"x": values.encode(b"value %d" % self.held[partition])})]

    def reset(self):
        self.held = {}

    def put(self, partition, rows):
        from memoire.tq import client as values

        (row,) = rows
        self.held[partition] = values.decode(row.tags["n"])
        assert values.decode(row.fields["x"]) == b"value %d" % self.held[partition]


def tq_checkpoint(folder, number, at):
    pytest.importorskip("tensordict", reason="tensordict is not installed: memoire.tq gives TensorDicts")
    from memoire.tq import interface

    interface.save(Rows(number), folder, {"step": number}, at=at)


def read_tq_checkpoint(folder):
    pytest.importorskip("tensordict", reason="tensordict is not installed: memoire.tq gives TensorDicts")
    from memoire.tq import interface

    client = Rows(1000)
    try:
        interface.load(client, folder)
    except (DataError, FileNotFoundError) as error:
        assert client.held == Rows(1000).held, "a refusal takes nothing away"
        raise DataError(str(folder), str(error)) from error
    number = json.loads((folder / "metadata.json").read_text())["user_metadata"]["step"]
    assert client.held == Rows(number).held
    return number


def in_store(folder, at, group_of):
    """Save the group that `group_of` builds from a store in a state folder, and close the store."""
    try:
        with Store(folder, "home", at=at) as store:
            store.save(group_of(store))
            at("saved")
    except StateUnusable as error:
        raise OSError(errno.ENOSPC, "No space left on device") from error
    if isinstance(at, FailAt) and len(at.steps) >= at.number > 0:
        raise at.error  # the close failed after everything was saved


def body_of(number):
    """Return a model's body that is too large for the database, so that it becomes a file."""
    return b"%d" % number * (opening.INLINE_BYTES + 1)


def state(folder, number, at):
    def group(_):
        line = LogEntry(number + 1, CLIENTS[0], 1.0, messages.Line(number + 1, 0.5, 3, f"line {number}"))
        changed = account(CLIENTS[0], number, lines_through=number + 1)
        runs = [RunFacts(RUN, began=1.0)] if number == 0 else []
        models = [(RUN, make_model("policy", body_of(number), number + 1))]
        return SavedGroup(
            accounts=[(RUN, changed)], lines=[(RUN, line)], models=models, runs=runs, settings={"n": str(number)}
        )

    in_store(folder, at, group)


def read_state(folder):
    """Read a state folder; damage to log lines, accounts and models shows when they are read, not at opening."""
    with Store(folder, "home") as store:
        try:
            number = int(store.settings()["n"])
            (kept,) = own_accounts(store)
            lines = store.search(RUN, most=1000)
            models = [(model.version, bytes(model.body)) for model in store.models(RUN)]
            if not models:
                raise StateCorrupt(str(folder), "the model is gone", "it waits for the next one")
        except StateCorrupt as error:
            error.add_note(READ_LATER)
            raise
        assert models == [(number + 1, body_of(number))]
        assert kept.report.episodes == number and store.line_count(RUN) == number + 1
        assert [entry.line.text for entry in lines] == [f"line {n}" for n in range(number + 1)]
    return number


TOKENS = row_schema_from("schema", {"tokens": (np.int32, (None,))})


def prompt_table(store):
    table = PromptTable(TOKENS, PromptRules(group=1, at_least=1))
    table.store.unsaved_changes = {}
    return table, restore_prompts(table, store.rows("t"), 0.0)


def payload(number):
    """Return a payload; every second one is too large for the database."""
    return b"payload %d" % number * (8_000 if number % 2 else 1)


def tokens(number):
    return np.full(20_000 if number % 3 == 1 else 3, number, np.int32)


def prompts(folder, number, at):
    """Add and answer prompt `number`; draw the one before, and commit the one before that."""

    def group(store):
        table, incomplete = prompt_table(store)
        assert not incomplete
        table.add([("d", 0, number)], [payload(number)])
        ((row,), _) = table.lease(b"w", 0.0)
        table.answer(row, row.lease, 0, packed(table.schema, {0: tokens(number).tobytes()}))
        if number > 0:
            assert table.draw(number - 1, 1, "trainer").keys == [("d", 0, number - 1)]
        if number > 1:
            table.commit(number - 2, "trainer")
        table.update_state(row)
        return SavedGroup(rows={"t": take_changes(table)})

    in_store(folder, at, group)


def read_prompts(folder):
    """Read the prompts; a prompt whose answer is damaged may wait again, and then the log names the file."""
    logger, warnings = logging.getLogger("memoire.disk.table_rows"), []
    logger.addFilter(lambda record: warnings.append(record.getMessage()) or True)
    try:
        with Store(folder, "home") as store:
            table, incomplete = prompt_table(store)
    finally:
        logger.filters.clear()
    table.check_invariants()
    number = len(table.book.rows) - 1
    assert bool(incomplete) == bool(warnings) and all(str(folder / "rows") in each for each in warnings)
    for n in range(number + 1):
        row = table.book.rows["d", 0, n]
        assert table.store.payload(row.key) == payload(n)
        if row in incomplete:
            assert row.state is (PromptState.COMMITTED if n < number - 1 else PromptState.WAITING)
            continue
        states = [PromptState.READY, PromptState.DRAWN]
        assert row.state is (states[number - n] if number - n < 2 else PromptState.COMMITTED)
        columns = table.store.columns(row.key, 0)
        assert row.has_columns == bool(columns) and (row.has_columns or n < number - 3)
        assert not columns or columns[0] == tokens(n).tobytes()
    return number


def sparse_prompts(folder, number, at):
    """Save a file of five payloads, and remove four payloads of the file before."""
    in_store(folder, at, lambda _: SavedGroup(rows={"t": sparse_rows(number)}))


def sparse_rows(number):
    come = [(PAYLOAD, packed_key("d", number, n), large(number, n)) for n in range(5)]
    return come + [(PAYLOAD, packed_key("d", number - 1, n), None) for n in range(1, 5) if number > 0]


def large(number, n):
    return b"%d %d " % (number, n) * 70_000


def read_sparse_prompts(folder):
    with Store(folder, "home") as store:
        bodies = {key: body for _, key, body in store.rows("t")}
    number = len(bodies) - 5
    keys = [(each, 0) for each in range(number)] + [(number, n) for n in range(5)]
    assert bodies == {packed_key("d", *key): large(*key) for key in keys}
    return number


def open_state(folder):
    return Store(folder, "home")


DATABASE = {"hold": open_state, "is_checked_all": False, "is_database": True}


@functools.cache
def entries():
    return Schema({"obs": Column(np.uint8, (2,), "state")})


def buffer_file(folder, number, at):
    memory = Memory(entries(), 16, seed=0)
    memory.open()
    memory.extend(0, [np.full((5, 2), number, np.uint8)])
    memory.close(terminated=True)
    dataset_writing.write_file(memory, folder / "buffer.npz", dict, at=at)


def read_buffer_file(folder):
    try:
        buffer = Buffer.load(folder / "buffer.npz")
    except FileNotFoundError as error:
        raise DataError(str(folder), str(error)) from error
    values = buffer.sample(20)["obs"]
    assert buffer.num_episodes == 1 and (values == values[0, 0]).all()
    return int(values[0, 0])


FILES = {
    "a file of records": File(whole_file, read_whole_file),
    "a log of records": File(log, read_log, open_log),
    "a trainer's journal": File(journal, read_journal, lambda folder: SampleJournal(folder, 64)),
    "a client's kept report": File(report, read_report),
    "a server's snapshot": File(server_snapshot, read_snapshot),
    "a buffer's file": File(buffer_file, read_buffer_file, is_checked_all=False, stride=61),
    "a model's file": File(model_file, read_model_file, is_checked_all=False),
    "a checkpoint of memoire.tq": File(tq_checkpoint, read_tq_checkpoint, lock_folder),
    "a server's state": File(state, read_state, **DATABASE),
    "a server's prompts": File(prompts, read_prompts, **DATABASE),
    "a killed server's state": File(state, read_state, **DATABASE, is_killed=True),
    "a killed server's prompts": File(prompts, read_prompts, **DATABASE, is_killed=True),
}
VALUES = 4
"""Number of values written before the damage."""
SMALL_BYTES, FLIPS = 2048, 2000
"""Size in bytes above which only FLIPS random bits of a database file are flipped."""
SPARSE = {"a server's sparse prompts": File(sparse_prompts, read_sparse_prompts, **DATABASE)}
"""Prompts whose leftover payloads the next write gathers in one file; too large for every way of damage."""
NEEDS_TORCH = ["a checkpoint of memoire.tq"]


def every(kinds):
    marks = {name: [pytest.mark.torch] for name in NEEDS_TORCH}
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, id=name, marks=marks.get(name, [])) for name, kind in kinds.items()]
    )


every_kind = every(FILES)
every_small_kind = every({name: kind for name, kind in FILES.items() if not kind.is_database})
"""Kinds other than databases, which the soak test `state_damage` covers at length."""


def write(kind, folder, number, at=lambda step: None):
    kind.write(folder, number, at)


@pytest.fixture
def place(kind, tmp_path):
    """Yield a parent for test folders, in memory for databases, which sync often."""
    with folder_in_memory() as path:
        yield path if kind.is_database else tmp_path


@pytest.fixture
def folder(kind, place):
    path = place / "files"
    path.mkdir()
    fill(kind, path)
    return path


def fill(kind, folder):
    for number in range(VALUES - 1 if kind.is_killed else VALUES):
        write(kind, folder, number)
    if kind.is_killed:
        kill = KillAt("saved")
        assert in_child(functools.partial(write, kind, folder, VALUES - 1, kill)) == -signal.SIGKILL
        assert (folder / "state.db-wal").stat().st_size > 4096


def contents(folder):
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def put(folder, files):
    for name in contents(folder).keys() - files.keys():
        (folder / name).unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def some(kind, each, most=6):
    """Return all items, or a few of a database's in the same order."""
    each = list(each)
    return each[:: max(1, len(each) // most)] if kind.is_database else each


def assert_refused(kind, folder, files, why):
    """Check that the files are refused by name and unchanged, or accepted if the kind allows; return the outcome."""
    put(folder, files)
    try:
        newest = kind.read(folder)
    except REFUSALS as error:
        assert str(folder) in str(error)
        if READ_LATER in getattr(error, "__notes__", ()):
            return "refused"
    else:
        assert newest == VALUES - 1 and not kind.is_checked_all, f"{why}: taken in silence as {newest}"
        if kind.is_database:
            return "taken"
    assert contents(folder) == files, why
    return "refused"


def damages(kind, name, content, step):
    """Yield the sort, description and resulting content of each damage to a file; content None removes the file."""
    step *= kind.stride if len(content) > SMALL_BYTES else 1
    bits, sizes = range(0, 8 * len(content), step), range(0, len(content), step)
    if kind.is_database and len(content) > SMALL_BYTES:
        rng = random.Random(name)
        trials = FLIPS if step == 1 else 2
        bits = [rng.randrange(8 * len(content)) for _ in range(trials)]
        ends = {*range(0, len(content), 4096), *range(32, len(content), 24 + 4096)}  # pages of the file and of its log
        ends = sorted(ends | {rng.randrange(len(content)) for _ in range(trials // 20)})
        sizes = ends if step == 1 else rng.sample(ends, trials)
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield "flips", f"bit {bit}", bytes(damaged)
    for size in sizes:
        yield "cuts", f"cut to {size} bytes", content[:size]
    yield "removals", "removed", None
    for size in {min(512, len(content)), min(4096, len(content))}:
        yield "tails", f"the last {size} bytes are zeros", content[: len(content) - size] + bytes(size)
        yield "tails", f"the last {size} bytes are gone", content[: len(content) - size]


def is_control(kind, folder):
    assert kind.read(folder) == VALUES - 1
    assert kind.read(folder) == VALUES - 1


def try_all_damage(kind, folder, step):
    good, tried = contents(folder), 0
    is_control(kind, folder)
    for name, content in good.items():
        for _, why, damaged in damages(kind, name, content, step):
            assert_refused(kind, folder, changed(good, name, damaged), f"{name}, {why}")
            tried += 1
    put(folder, good)
    is_control(kind, folder)
    return tried


def changed(files, name, content):
    return {each: files[each] for each in files if each != name} | ({} if content is None else {name: content})


@pytest.mark.slow
@every_kind
def test_some_flipped_bits_and_truncations_of_each_file_are_refused(kind, folder):
    assert try_all_damage(kind, folder, 37) > 20


@pytest.mark.slow
@every_small_kind
def test_each_flipped_bit_and_each_truncation_of_each_file_is_refused(kind, folder):
    assert try_all_damage(kind, folder, 1) > 1000


@every_kind
def test_each_file_that_is_removed_or_exchanged_is_missed(kind, folder):
    good = contents(folder)
    for name in good:
        assert_refused(kind, folder, changed(good, name, None), f"{name} is missing")
        assert_refused(kind, folder, good | {name: b"the user's own file\n" * 100}, f"{name} is another one")
    for one, other in some(kind, itertools.permutations(good, 2)):
        assert_refused(kind, folder, good | {one: good[other]}, f"{one} has the content of {other}")


@every_kind
def test_bytes_behind_what_was_acknowledged_are_refused_or_cut_off(kind, folder):
    good = contents(folder)
    pieces = (b"\0", b"\0" * 512, b"\0" * 4096, b"more", *good.values())
    for name, more in some(kind, itertools.product(good, pieces), 12):
        put(folder, good | {name: good[name] + more})
        with suppress(*REFUSALS):
            is_control(kind, folder)
        if kind.is_checked_all and "committed" in good and name == max(good.keys() - {"committed"}):
            is_control(kind, folder)  # the newest file of a log: an unfinished append


@pytest.mark.slow
@every(FILES | SPARSE)
def test_a_disk_that_is_full_at_any_step_loses_nothing_and_the_next_try_goes_on(kind, folder, place):
    for number, stays in some(kind, itertools.product(steps_of(kind, folder, place), (False, True))):
        fail_at(kind, folder, place / f"{number}-{stays}", number, stays)


def steps_of(kind, folder, place):
    counter = FailAt()
    shutil.copytree(folder, place / "steps")
    write(kind, place / "steps", VALUES, counter)
    return range(1, len(counter.steps) + 1)


def fail_at(kind, folder, place, number, stays):
    shutil.copytree(folder, place)
    with pytest.raises(OSError, match="No space left"):
        write(kind, place, VALUES, FailAt(number, stays=stays))
    assert not [name for name in contents(place) if "draft" in name]
    newest = kind.read(place)
    assert newest in (VALUES - 1, VALUES)
    write(kind, place, newest + 1)
    assert kind.read(place) == newest + 1


@pytest.mark.slow
@every(FILES | SPARSE)
def test_a_process_that_is_killed_at_any_step_loses_nothing_and_leaves_nothing(kind, folder, place):
    for number in some(kind, steps_of(kind, folder, place)):
        kill_at(kind, folder, place / str(number), number)


def kill_at(kind, folder, place, number):
    kill = KillAt(number)
    shutil.copytree(folder, place)
    assert in_child(functools.partial(write, kind, place, VALUES, kill)) == -signal.SIGKILL
    newest = kind.read(place)
    assert newest in (VALUES - 1, VALUES)
    write(kind, place, newest + 1)
    assert kind.read(place) == newest + 1
    assert not [name for name in contents(place) if "draft" in name]


def size_of_bodies(folder):
    return sum(path.stat().st_size for path in (folder / "rows").iterdir())


@every(SPARSE)
def test_files_of_prompts_take_at_most_twice_what_is_needed_and_some(kind, folder):
    for number in range(VALUES, 13):
        write(kind, folder, number)
        needed = sum(len(large(*key)) for key in [(number, n) for n in range(5)] + [(n, 0) for n in range(number)])
        assert size_of_bodies(folder) < 2 * needed + stored_prompts.SPARSE_BYTES
    assert kind.read(folder) == 12


@every(SPARSE)
def test_files_of_prompts_become_smaller_while_nothing_comes(kind, folder):
    before = size_of_bodies(folder)
    with open_state(folder) as store:
        store.start(lambda: None, lambda group: None, lambda error: None)
        assert until(lambda: size_of_bodies(folder) < before - 3_000_000)
    assert kind.read(folder) == VALUES - 1


@every(SPARSE)
@pytest.mark.parametrize("damaged", [120, 1_000], ids=["keys", "payload"])
def test_a_file_of_prompts_that_is_damaged_stays_and_is_named(kind, folder, damaged, caplog):
    with open_state(folder) as store:
        path = min((folder / "rows").iterdir(), key=lambda path: path.stat().st_ctime_ns)  # five files hold rows
        content = bytearray(path.read_bytes())
        content[damaged] ^= 1
        path.write_bytes(content)
        store.save(SavedGroup(rows={"t": sparse_rows(VALUES)}))
    assert path.read_bytes() == content and size_of_bodies(folder) < 6_000_000
    assert f"{path} is missing or damaged, and stays as it is" in caplog.text
    if damaged == 1_000:
        with pytest.raises(StateCorrupt, match="has 1 rows that the tables need"):
            kind.read(folder)
    else:
        assert kind.read(folder) == VALUES


@every_kind
def test_two_processes_at_once_damage_nothing(kind, folder):
    if kind.hold is None:
        children = [os.fork() for _ in range(2)]
        if 0 in children:
            for _ in range(20):
                write(kind, folder, VALUES + len(children))
            os._exit(0)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        assert kind.read(folder) in (VALUES + 1, VALUES + 2)
        return
    holder = kind.hold(folder)
    good = contents(folder)
    with pytest.raises(StateLocked, match=f"in use by process {os.getpid()} on host"):
        write(kind, folder, VALUES)
    with suppress(StateLocked):
        is_control(kind, folder)
    assert contents(folder) == good
    holder.close()
    write(kind, folder, VALUES)
    assert kind.read(folder) == VALUES


@every_kind
def test_a_folder_that_cannot_be_read_is_refused_by_name(kind, tmp_path):
    (tmp_path / "files").write_bytes(b"")
    with pytest.raises((MemoireError, OSError), match="files"):
        kind.read(tmp_path / "files")
