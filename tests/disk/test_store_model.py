"""A store against slow models of it: what a search finds, and what is there after any order of saving and restarting."""

import itertools
import sqlite3

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memoire.accounting.logbook import LineFilter, LogEntry, escape
from memoire.accounting.runs import RunFacts, SavedGroup
from memoire.disk import database
from memoire.disk.state_file import StateFile
from memoire.disk.state_folder import Store
from memoire.limits import Limits
from memoire.models.model import make
from memoire.wire.messages import Line
from statekit import CLIENTS, account, folder_in_memory, inherited, own_accounts, rows, text_of_log

LETTERS = "aAbB%_\\\n\0é€."
texts = st.text(LETTERS, max_size=6)


def upper(text):
    """As SQLite's LIKE sees letters: A to Z in either case, no others."""
    return "".join(letter.upper() if letter.isascii() else letter for letter in text)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A store with 300 lines of two runs; times go back now and then, as clocks do."""
    store = Store(tmp_path_factory.mktemp("state"), "home")
    entries = {}
    lines = []
    for run in ("one", "two"):
        entries[run] = [
            LogEntry(
                n,
                CLIENTS[n * n % 5],
                float(n // 3 if n % 7 else n // 4),
                Line(n, 0.0, n % 4, "".join(LETTERS[(n * k) % len(LETTERS)] for k in range(1, 2 + n % 9))),
            )
            for n in range(1, 151)
        ]
        lines += [(run, entry) for entry in entries[run]]
    store.save(SavedGroup(runs=[RunFacts("one"), RunFacts("two")], lines=lines))
    yield Logged(store, entries)
    store.close()


class Logged:
    """A store and what is in it; not a pair, which hypothesis would print whole."""

    def __init__(self, store, entries):
        self.store, self.entries = store, entries


def slow_search(entries, wanted):
    return [
        LogEntry(e.index, e.client, e.received, Line(e.line.number, e.line.time, e.line.label, escape(e.line.text)))
        for e in entries
        if upper(escape(wanted.text)) in upper(escape(e.line.text))
        and (wanted.client is None or e.client == wanted.client)
        and (wanted.label is None or e.line.label == wanted.label)
        and (wanted.since is None or e.received >= wanted.since)
        and (wanted.until is None or e.received < wanted.until)
        and e.index > wanted.after
        and (wanted.before is None or e.index < wanted.before)
    ]


def maybe(values):
    return st.none() | values


@settings(max_examples=60, deadline=None)
@given(
    run=st.sampled_from(["one", "two", "three"]),
    text=texts,
    client=maybe(st.sampled_from(CLIENTS)),
    label=maybe(st.integers(0, 5)),
    since=maybe(st.floats(-5, 60)),
    until=maybe(st.floats(-5, 60)),
    after=st.integers(-3, 200),
    before=maybe(st.integers(-3, 200)),
    most=st.integers(1, 200),
    newest_first=st.booleans(),
)
@example("two", "", None, None, None, None, 0, None, 1000, True)
@example("one", "\\", None, None, None, None, 0, 0, 10, False)
@example("one", "\\" * 4000, None, 1 << 70, None, None, 0, None, 10, False)
@example("one", "\ud800" * 4096, None, -1, None, None, 0, None, 10, False)
@example("one", "a" * 100_000, None, None, None, None, 0, None, 10, False)
@example("one", "", None, None, None, None, 1 << 50, None, 10, False)
@pytest.mark.slow
def test_search_finds_what_a_slow_model_finds(
    logged, run, text, client, label, since, until, after, before, most, newest_first
):
    wanted = LineFilter(text=text, client=client, label=label, since=since, until=until, after=after, before=before)
    expected = slow_search(logged.entries.get(run, []), wanted)
    found = logged.store.search(run, wanted, most=most, newest_first=newest_first)
    assert found == (expected[::-1] if newest_first else expected)[:most]


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
    """What must be there, in dictionaries."""

    def __init__(self):
        self.runs, self.accounts, self.lines, self.models = {}, {}, {}, {}
        self.inherited, self.settings, self.through, self.versions = {}, {}, {}, {}
        self.brought, self.steps = {}, 0

    def group(self, operation):
        """Do it here, and as a group to be saved."""
        kind, which, value = operation
        self.steps += 1
        run = f"run {self.steps % 2}"
        group = SavedGroup(runs=[] if run in self.runs else [RunFacts(run)])
        self.runs.setdefault(run, RunFacts(run))
        if kind == "account":
            made = account(CLIENTS[which], self.steps, value, rejected={"a": value} if value else {})
            made.received_caches, made.lines_through = value, self.through.get((run, CLIENTS[which]), 0)
            made.report = msgspec.structs.replace(made.report, caches=value)
            made.seen_caches = value
            group.accounts = [(run, made)]
            self.accounts[run, CLIENTS[which]] = made
        elif kind == "lines":
            for _ in range(value):
                client = CLIENTS[which]
                number = self.through[run, client] = self.through.get((run, client), 0) + 1
                index = len(self.lines.setdefault(run, [])) + 1
                entry = LogEntry(index, client, float(self.steps), Line(number, 0.0, which, f"line {index}"))
                self.lines[run].append(entry)
                group.lines.append((run, entry))
            made = self.accounts.get((run, client), account(client)).copy()
            made.lines_through = number
            self.accounts[run, client] = made
            group.accounts = [(run, made)]
        elif kind == "model":
            self.versions[which] = self.versions.get(which, 0) + 1
            made = make(which, bytes([self.steps % 256]) * value, self.versions[which])
            group.models = [(run, made)]
            self.models[run, which] = made
        elif kind == "inherit":
            group.inherited = [(run, rows(which, episodes=value))]
            value = max(value, self.brought.get((run, which), 0))  # of one account the later row counts
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
            topic: max(made.version for (_, other), made in self.models.items() if other == topic)
            for topic in {topic for _, topic in self.models}
        }
        for run in self.runs:
            assert {one.client: one for one in own_accounts(store, run)} == {
                client: made for (owner, client), made in self.accounts.items() if owner == run
            }
            assert store.search(run, most=10_000) == self.lines.get(run, [])
            assert store.line_count(run) == len(self.lines.get(run, []))
            assert store.models(run) == [made for (owner, _), made in sorted(self.models.items()) if owner == run]
            assert inherited(store, run) == b"".join(
                packed for (owner, _), packed in sorted(self.inherited.items()) if owner == run
            )
        assert text_of_log(folder).count(b"\n") == sum(map(len, self.lines.values()))


def killed(store):
    """Let go of a store as the end of its process would."""
    store._opened.close()
    store._closed = True


@settings(max_examples=10, deadline=None)
@given(st.lists(operations, max_size=25))
def test_any_order_of_saving_and_restarting_keeps_everything(history):
    model, limits = Model(), Limits(log_bytes=100_000)
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
    """Put, replaced and taken out; also after a transaction that failed, and one that is tried again."""
    failing = []

    def at(point):
        if failing and point == "before commit":
            raise sqlite3.OperationalError(failing.pop())

    there = {"accounts": {}, "prompts": {}}
    with folder_in_memory() as folder:
        path = folder / "state.db"
        database.create(path, "home", lambda point: None)
        file = StateFile(path, 0, at=at, recent=recent)
        file.go_live(1)
        for accounts, prompts, fails in history:
            if fails:
                failing.append("database or disk is full")
                with pytest.raises(sqlite3.OperationalError):
                    file.save([], [], prompts, accounts)  # the other way round: nothing of it may be remembered
            was = there["prompts"]
            gone = [was[name] for name in prompts if name in was]
            assert sorted(file.save([], [], accounts, prompts)) == sorted(body for body in gone if len(body) <= 64)
            for table, changes in (("accounts", accounts), ("prompts", prompts)):
                kept = there[table] | changes
                there[table] = {name: body for name, body in kept.items() if body is not None}
        file.close()
        file = StateFile(path, 0)
        kinds = itertools.chain.from_iterable([(kind, *row) for row in file.prompts(kind)] for kind in range(4))
        assert {(kind, key): body for kind, key, body in kinds} == there["prompts"]
        assert all(file.account(*name) == body for name, body in there["accounts"].items())
        assert (file.seal.accounts, file.seal.prompts) == (len(there["accounts"]), len(there["prompts"]))
        file.close()
