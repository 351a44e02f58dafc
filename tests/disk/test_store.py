"""Tests of a server's files: acknowledged data returns however the process ended; also against slow models."""

import gc
import itertools
import os
import socket
import sqlite3
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.accounting.runs import LineFilter, LogEntry, RunFacts, SavedGroup
from memoire.disk import database, records
from memoire.disk.records import MAX_TEXT, META, condition
from memoire.disk.state_file import StateFile
from memoire.disk.state_folder import Store
from memoire.errors import Closed, StateForeign, StateLocked, StateUnusable
from memoire.limits import Limits
from memoire.models.model import make
from memoire.wire.messages import Line
from netkit import until
from statekit import (
    CLIENTS,
    RUN,
    Keeper,
    account,
    folder_in_memory,
    fork,
    inherited,
    keeper_of_all,
    lines_through,
    own_accounts,
    rows,
    text_of_log,
)


def test_a_folder_knows_since_when_it_has_forgotten_nothing(tmp_path):
    lives = []
    for _ in range(3):
        with Store(tmp_path) as store:
            lives.append((store.epoch, store.complete_since))
    assert [since for _, since in lives] == [lives[0][0]] * 3


def test_a_life_of_a_program_that_does_not_know_since_when_is_the_one_since_when(tmp_path):
    with Store(tmp_path) as store:
        epoch = store.epoch + 5
    file = StateFile(tmp_path / "state.db", None)
    file.open_for_writing(file.seal.generation + 1)
    file.save([(META, b"epoch", epoch.to_bytes(8, "big"))], [])
    file.close()
    for _ in range(2):
        with Store(tmp_path) as store:
            assert store.epoch > epoch == store.complete_since


def test_epochs_grow_whatever_the_clock_does(tmp_path):
    """The clock steps back after a wrong setting, stands still, and jumps ahead after its host slept."""
    clocks, epochs = [2000.0, 1000.0, 1000.0, 1999.0, 900_000.0, 0.0], []
    for now in clocks:
        with Store(tmp_path / "state", clock=lambda now=now: now) as store:
            epochs.append(store.epoch)
    assert all(former < epoch for former, epoch in pairwise(epochs))
    # Epochs are not before the clock: a folder that replaces a lost folder continues above the lost epochs.
    assert all(epoch >= now * 1e9 for epoch, now in zip(epochs, clocks, strict=True))


def test_a_second_server_is_refused_and_told_by_whom(tmp_path):
    with Store(tmp_path, "a"):
        with pytest.raises(StateLocked) as caught:
            Store(tmp_path, "a")
        assert (caught.value.pid, caught.value.host) == (os.getpid(), socket.gethostname())
        assert "only one server may write it" in str(caught.value)
    Store(tmp_path, "a").close()


def test_the_folder_knows_its_servers_name(tmp_path):
    Store(tmp_path, default_name="first").close()
    with Store(tmp_path, default_name="second") as store:
        assert store.name == "first"
    with pytest.raises(StateForeign, match="is the state of server 'first', not of 'other'"):
        Store(tmp_path, "other")


def test_a_closed_store_says_so(tmp_path):
    store = Store(tmp_path, "a")
    assert store.close() and store.close()
    with pytest.raises(Closed):
        store.settings()
    with pytest.raises(Closed):
        store.search(RUN)
    assert not store.is_healthy


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnusable, match="not a folder"):
        Store(tmp_path / "file", "a")
    with pytest.raises(StateUnusable, match="Make its parent folder first"):
        Store(tmp_path / "nowhere" / "state", "a")
    with pytest.raises(StateUnusable):
        Store(tmp_path / "file" / "state", "a")


def test_old_text_goes_when_there_is_too_much_and_leaves_the_search_with_it(tmp_path):
    with Keeper(tmp_path, limits=Limits.of(log_bytes=16_000)) as keeper:
        for n in range(1, 41):
            keeper.save(lines=[(CLIENTS[0], n, f"{n:03d} " + "x" * 950)])

        def is_small():
            try:
                return sum(path.stat().st_size for path in (tmp_path / "log").iterdir()) <= 17_100
            except FileNotFoundError:  # the file was removed meanwhile
                return False

        until(is_small)
        entries = keeper.store.search(RUN, most=100)
        assert keeper.store.line_count(RUN) == 40 and lines_through(keeper.store) == {CLIENTS[0]: 40}
    assert all(path.name.startswith("ant_7.") for path in (tmp_path / "log").iterdir())
    assert [entry.line.number for entry in entries] == list(range(41 - len(entries), 41)) and 10 <= len(entries) <= 17
    assert [line.split(b",")[2][:3] for line in text_of_log(tmp_path).splitlines()] == [
        b"%03d" % entry.line.number for entry in entries
    ]


def test_backups_are_made_now_and_then_while_something_changes(tmp_path):
    with Keeper(tmp_path, limits=Limits.of(backup_every=0.01)) as keeper:
        keeper.save(settings={"n": "1"})
        until(lambda: (tmp_path / "state.db.backup-1").exists())
        keeper.save(settings={"n": "2"})
        until(lambda: (tmp_path / "state.db.backup-2").exists())


def test_a_forked_child_neither_holds_the_folder_nor_writes_it(tmp_path):
    """A child must not close files that SQLite has open; the child outlives its parent's store."""
    keeper = keeper_of_all(tmp_path)
    reading, writing = os.pipe()
    child = fork()
    if not child:
        os.close(writing)
        try:
            keeper.store.settings()
        except Closed:
            os.read(reading, 1)  # wait until the parent is done
            del keeper
            gc.collect()
            os._exit(7)
        os._exit(1)
    os.close(reading)
    keeper.save(settings={"n": "2"})
    keeper.close()
    with Store(tmp_path) as store:
        assert store.settings()["n"] == "2"
        os.close(writing)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert store.settings()["n"] == "2"
    with Store(tmp_path) as store:
        assert store.settings()["n"] == "2"


# --- A store against slow models: the store's content after any order of saves and restarts

LETTERS = "aAbB%_\\\n\0é€."
texts = st.text(LETTERS, max_size=6)


operations = st.one_of(
    st.tuples(st.just("account"), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("lines"), st.integers(0, 3), st.integers(1, 5)),
    st.tuples(st.just("model"), st.sampled_from(["a", "b"]), st.sampled_from([0, 10, 20_000])),
    st.tuples(st.just("inherit"), st.integers(0, 3), st.integers(1, 9)),
    st.tuples(st.just("setting"), st.sampled_from(["x", "y"]), texts),
    st.tuples(st.just("run"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("restart"), st.booleans(), st.just(None)),
    st.tuples(st.just("backup"), st.none(), st.none()),
)


class Model:
    """Expected content of a store, in dictionaries."""

    def __init__(self):
        self.runs, self.accounts, self.lines, self.models = {}, {}, {}, {}
        self.inherited, self.settings, self.through, self.versions = {}, {}, {}, {}
        self.brought, self.steps = {}, 0

    def group(self, operation):
        """Apply an operation to the model, and return the operation as a group to save."""
        kind, which, value = operation
        self.steps += 1
        run = f"run {self.steps % 2}"
        group = SavedGroup(runs=[] if run in self.runs else [RunFacts(run)])
        self.runs.setdefault(run, RunFacts(run))
        if kind == "account":
            changed = account(CLIENTS[which], self.steps, value, rejected={"a": value} if value else {})
            changed.received_caches, changed.lines_through = value, self.through.get((run, CLIENTS[which]), 0)
            changed.report = msgspec.structs.replace(changed.report, caches=value)
            changed.seen_caches = value
            group.accounts = [(run, changed)]
            self.accounts[run, CLIENTS[which]] = changed
        elif kind == "lines":
            for _ in range(value):
                client = CLIENTS[which]
                number = self.through[run, client] = self.through.get((run, client), 0) + 1
                index = len(self.lines.setdefault(run, [])) + 1
                entry = LogEntry(index, client, float(self.steps), Line(number, 0.0, which, f"line {index}"))
                self.lines[run].append(entry)
                group.lines.append((run, entry))
            changed = self.accounts.get((run, client), account(client)).copy()
            changed.lines_through = number
            self.accounts[run, client] = changed
            group.accounts = [(run, changed)]
        elif kind == "model":
            self.versions[which] = self.versions.get(which, 0) + 1
            model = make(which, bytes([self.steps % 256]) * value, self.versions[which])
            group.models = [(run, model)]
            self.models[run, which] = model
        elif kind == "inherit":
            group.inherited = [(run, rows(which, episodes=value))]
            value = max(value, self.brought.get((run, which), 0))  # the later row of an account counts
            self.brought[run, which] = value
            self.inherited[run, which] = rows(which, episodes=value)
        elif kind == "setting":
            group.settings = {which: value}
            self.settings[which] = value
        elif kind == "run":
            facts = RunFacts(f"run {which}", value, 1.0, float(self.steps))
            group.runs.append(facts)
            self.runs[facts.name] = facts
        return group

    def check(self, store, folder):
        assert store.runs() == list(self.runs.values())
        assert store.settings() == self.settings
        assert store.versions() == {
            topic: max(model.version for (_, other), model in self.models.items() if other == topic)
            for topic in {topic for _, topic in self.models}
        }
        for run in self.runs:
            assert {one.client: one for one in own_accounts(store, run)} == {
                client: stored for (owner, client), stored in self.accounts.items() if owner == run
            }
            assert store.search(run, most=10_000) == self.lines.get(run, [])
            assert store.line_count(run) == len(self.lines.get(run, []))
            assert store.models(run) == [model for (owner, _), model in sorted(self.models.items()) if owner == run]
            assert inherited(store, run) == b"".join(
                packed for (owner, _), packed in sorted(self.inherited.items()) if owner == run
            )
        assert text_of_log(folder).count(b"\n") == sum(map(len, self.lines.values()))


def killed(store):
    """Release a store as the end of its process does."""
    store._opened.close()
    store._closed = True


@settings(max_examples=10, deadline=None)
@given(st.lists(operations, max_size=25))
def test_any_order_of_saving_and_restarting_keeps_everything(history):
    model, limits = Model(), Limits.of(log_bytes=100_000)
    with folder_in_memory() as folder:
        store = Store(folder, "home", limits=limits)
        for operation in history:
            if operation[0] == "restart":
                store.close() if operation[1] else killed(store)
                store = Store(folder, "home", limits=limits)
                model.check(store, folder)
            elif operation[0] == "backup":
                store.back_up()
            else:
                store.save(model.group(operation))
        model.check(store, folder)
        store.close()


keys = st.tuples(st.integers(1, 3), st.sampled_from([b"a", b"b", b"long" * 20]))
bodies = st.none() | st.sampled_from([b"", b"short", b"x" * 64, b"y" * 65])
saves = st.tuples(st.dictionaries(keys, bodies, max_size=5), st.dictionaries(keys, bodies, max_size=5), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(saves, max_size=8), st.integers(0, 4))
def test_rows_are_sealed_right_whatever_is_remembered_of_former_ones(history, recent):
    """Rows are inserted, replaced and removed, also after a failed transaction and in one that is tried again."""
    failing = []

    def at(point):
        if failing and point == "before commit":
            raise sqlite3.OperationalError(failing.pop())

    there = {"accounts": {}, "table_rows": {}}
    with folder_in_memory() as folder:
        path = folder / "state.db"
        database.create(path, "home", lambda point: None)
        file = StateFile(path, 0, at=at, recent=recent)
        file.open_for_writing(1)
        for accounts, prompts, fails in history:
            if fails:
                failing.append("database or disk is full")
                with pytest.raises(sqlite3.OperationalError):
                    file.save([], [], prompts, accounts)  # swapped arguments: the store forgets rows of a failed save
            was = there["table_rows"]
            gone = [was[name] for name in prompts if name in was]
            assert sorted(file.save([], [], accounts, prompts)) == sorted(body for body in gone if len(body) <= 64)
            for table, changes in (("accounts", accounts), ("table_rows", prompts)):
                kept = there[table] | changes
                there[table] = {name: body for name, body in kept.items() if body is not None}
        file.close()
        file = StateFile(path, 0)
        kinds = itertools.chain.from_iterable([(kind, *row) for row in file.table_rows(kind)] for kind in range(4))
        assert {(kind, key): body for kind, key, body in kinds} == there["table_rows"]
        assert all(file.account(*name) == body for name, body in there["accounts"].items())
        assert (file.seal.accounts, file.seal.table_rows) == (len(there["accounts"]), len(there["table_rows"]))
        file.close()


# --- The condition of a search; `tests/nodes/test_search.py` compares results with a slow model


def test_a_search_is_a_condition_of_all_that_is_wanted():
    base, last = 3 << records.INDEX_BITS, (1 << records.INDEX_BITS) - 1
    assert condition(3, LineFilter()) == ("id BETWEEN ? AND ?", [base | 1, base + last])
    assert condition(3, LineFilter(after=5, before=9))[1] == [base | 6, base + 8]
    assert condition(3, LineFilter(before=-7))[1] == [base | 1, base - 1], "below every line of the run"
    assert condition(3, LineFilter(after=1 << 50))[1] == [base + last] * 2, "no line of the next run"
    where, values = condition(3, LineFilter(client=b"c", label=0, since=1.0, until=2.0, text="50%_\\"))
    assert where.split(" AND ")[2:] == [
        "client = ?", "label = ?", "received >= ?", "received < ?", "text LIKE ? ESCAPE '\\'",
    ]  # fmt: skip
    assert values[2:6] == [b"c", 0, 1.0, 2.0] and values[6].startswith("%50\\%\\_\\\\")
    condition(3, LineFilter(text="\ud800" * MAX_TEXT))[1][2].encode()  # UTF-8 cannot encode this letter
    for never in (LineFilter(text="x" * (MAX_TEXT + 1)), LineFilter(label=1 << 32), LineFilter(label=-1)):
        assert condition(3, never) is None
    assert condition(3, LineFilter(text="x" * MAX_TEXT, label=(1 << 32) - 1)) is not None
