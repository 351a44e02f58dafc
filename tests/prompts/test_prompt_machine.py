"""Rule-based test of the prompt table: random calls and restarts, compared with a simple Python model."""

import copy
import random
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memoire.errors import ProtocolError
from memoire.prompts import pool as snapshot
from memoire.prompts.columns import COLUMNS, PAYLOAD, packed, packed_key, raw_columns
from memoire.prompts.pool import NO_PAYLOAD, restore, take_changes
from memoire.prompts.rows import PromptRules, PromptState
from memoire.prompts.table import PromptTable, counts_of
from memoire.replay.schema import RowSchema

LEASE, ATTEMPTS, KEEP, LAG = 10.0, 2, 1, 2


@dataclass
class ModelPrompt:
    """Expected prompt: `answers` maps an index to [version, reward or None], `failed` an index to a reason."""

    key: tuple
    order: int
    priority: float
    is_evaluation: bool
    state: str = "waiting"
    reason: str = ""
    step: int = -1
    place: int = -1
    attempts: int = 0
    lease: int = 0
    worker: bytes = b""
    until: float = float("inf")
    answers: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    given_up: set = field(default_factory=set)
    has_columns: bool = True


class ModelTable:
    """Simple Python model of `PromptTable`."""

    def __init__(self, group, at_least, on_stale):
        self.group, self.at_least, self.on_stale = group, at_least, on_stale
        self.prompts, self.forgotten = {}, {}
        self.next_order, self.front = 0, 0
        self.session, self.former, self.committed, self.newest = "", [], -1, 0
        self.finished = set()

    def order(self):
        self.next_order += 1
        return self.next_order

    def of(self, *states):
        return [each for each in self.prompts.values() if each.state in states]

    def in_order(self, state):
        return sorted(self.of(state), key=lambda each: (-each.priority, each.order))

    def add(self, key, priority, is_evaluation):
        if key in self.prompts or key[:2] in self.forgotten:
            return False
        self.prompts[key] = ModelPrompt(key, self.order(), priority, is_evaluation)
        return True

    def lease(self, worker, now, number, having=()):
        forgotten = [each for each in self.of("leased") if each.worker == worker and each.lease not in having]
        if forgotten:
            each = min(forgotten, key=lambda each: each.lease)
            each.until = now + LEASE
            return each
        waiting = self.in_order("waiting")
        if waiting:
            each = waiting[0]
            each.state, each.worker, each.lease, each.until = "leased", worker, number, now + LEASE
            each.attempts, each.given_up = each.attempts + 1, set()
            return each
        return None

    def end(self, each):
        each.lease, each.worker, each.until, each.given_up = 0, b"", float("inf"), set()

    def missing(self, each):
        return [i for i in range(self.group) if i not in each.answers and i not in each.failed]

    def answer(self, each, index, version, reward):
        if each.state in ("waiting", "leased") and index in self.missing(each):
            each.answers[index] = [version, reward]
            self.settle(each)
            return True
        return False

    def amend(self, each, index, reward):
        if each.state in ("waiting", "leased", "answered") and index in each.answers:
            each.answers[index][1] = reward
            self.settle(each)

    def fail(self, each, lease, index, is_again):
        if (
            each.state not in ("waiting", "leased")
            or index not in self.missing(each)
            or (is_again and lease != each.lease)
        ):
            return
        if is_again:
            each.given_up.add(index)
        else:
            each.failed[index] = "failed"
        self.settle(each)

    def settle(self, each):
        if missing := self.missing(each):
            if each.lease and set(missing) <= each.given_up:
                self.give_back(each)
            return
        self.end(each)
        if any(reward is None for _, reward in each.answers.values()):
            each.state = "answered"
        elif len(each.answers) < self.at_least:
            reasons = [each.failed[i] for i in sorted(each.failed)]
            self.drop(each, "attempts" if reasons[0] == "attempts" else "failed")
        else:
            each.order, each.state = self.order(), "ready"

    def give_back(self, each):
        self.end(each)
        each.state = "waiting"
        if each.attempts >= ATTEMPTS:
            each.failed.update(dict.fromkeys(self.missing(each), "attempts"))
            self.settle(each)

    def drop(self, each, reason):
        self.end(each)
        each.state, each.reason, each.has_columns = "dropped", reason, False

    def expire(self, now):
        for each in sorted(self.of("leased"), key=lambda each: (each.until, each.lease)):
            if each.until <= now:
                self.give_back(each)

    def version(self, each):
        return min((version for version, _ in each.answers.values()), default=0)

    def reset(self, each):
        each.answers, each.failed, each.attempts, each.has_columns, each.given_up = {}, {}, 0, True, set()

    def is_stale(self, each):
        return self.newest > 0 and self.version(each) < self.newest - LAG

    def draw(self, step, count):
        """Return the keys of the step's prompts, or None while too few groups are ready."""
        fixed = sorted((each for each in self.prompts.values() if each.step == step), key=lambda each: each.place)
        if fixed:
            return [each.key for each in fixed]
        ready = [each for each in self.in_order("ready") if not each.is_evaluation]
        taken, passed = [], []
        for each in ready:
            if len(ready) < count:
                passed += [each] if self.is_stale(each) else []
            elif len(taken) < count:
                (passed if self.is_stale(each) else taken).append(each)
        for each in passed:
            if self.on_stale == "wait":
                self.front -= 1
                self.reset(each)
                each.order, each.state = self.front, "waiting"
            else:
                self.drop(each, "stale")
        if len(taken) < count:
            return None
        for place, each in enumerate(taken):
            each.state, each.step, each.place = "drawn", step, place
        return [each.key for each in taken]

    def commit(self, step):
        if step > self.committed:
            for each in self.of("drawn"):
                if each.step <= step:
                    each.state = "committed"
            self.committed = step
            self.let_go()

    def let_go(self):
        for each in self.of("committed"):
            if each.step <= self.committed - KEEP:
                each.has_columns = False

    def rewind(self, step, session):
        if session == self.session:
            return
        self.former.append(self.session)
        self.session, self.committed = session, step
        back = sorted(
            (each for each in self.prompts.values() if each.step > step), key=lambda each: (each.step, each.place)
        )
        for each in self.of("drawn"):
            if each.step <= step:
                each.state = "committed"
        self.front -= len(back)
        for place, each in enumerate(back):
            each.order, each.step, each.place = self.front + place, -1, -1
            if each.has_columns:
                each.state = "ready"
            else:
                self.reset(each)
                each.state = "waiting"
        self.let_go()

    def forget(self, dataset, epoch):
        rows = [each for each in self.prompts.values() if each.key[:2] == (dataset, epoch)]
        if any(each.state not in ("committed", "dropped") and not each.is_evaluation for each in rows):
            return None
        for each in rows:
            del self.prompts[each.key]
        if rows:
            self.forgotten[dataset, epoch] = self.forgotten.get((dataset, epoch), 0) + len(rows)
        return len(rows)


SCHEMA = RowSchema({"tokens": (np.int32, (None,)), "reward": np.float32})
GROUP, AT_LEAST = 3, 2
WORKERS = (b"a" * 16, b"b" * 16)
EPOCHS, VERSIONS, PLACES = st.integers(0, 1), st.integers(0, 6), st.integers(0, GROUP - 1)
PRIORITIES = st.sampled_from([0.0, 1.0])


def columns_of(values):
    return packed(SCHEMA, raw_columns(SCHEMA, values))


def save(table, disk):
    """Apply the unsaved changes of a table to `disk`, a dictionary by kind and key."""
    for kind, key, body in take_changes(table):
        disk.pop((kind, key), None) if body is None else disk.update({(kind, key): body})


def go_on(table, disk, now=0.0):
    """Restore an empty table from `disk` and return its incomplete prompts."""
    table.store.unsaved_changes = {}
    return restore(table, ((kind, key, body) for (kind, key), body in sorted(disk.items())), now)


class HeldLease(NamedTuple):
    """Current or former lease of a worker."""

    key: tuple
    number: int
    worker: bytes


class PromptMachine(RuleBasedStateMachine):
    @initialize(on_stale=st.sampled_from(["drop", "wait"]))
    def begin(self, on_stale):
        self.rules = PromptRules(
            group=GROUP, at_least=AT_LEAST, required_mask=3, max_model_lag=LAG, on_stale=on_stale, lease=LEASE,
            attempts=ATTEMPTS, keep=KEEP,
        )  # fmt: skip
        self.table, self.model = PromptTable(SCHEMA, self.rules), ModelTable(GROUP, AT_LEAST, on_stale)
        self.table.store.unsaved_changes, self.disk = {}, {}
        self.now, self.leases, self.step, self.rewinds = 0.0, [], 0, 0
        self.table.steps.admit_session("s0")
        self.model.session = "s0"
        self.add(range(8), 0, 0.0)
        self.save()

    @rule(indexes=st.lists(st.integers(0, 20), max_size=6), epoch=EPOCHS, priority=PRIORITIES)
    def add(self, indexes, epoch, priority):
        for index in indexes:
            self.add_one(("d", epoch, index), priority, index % 7 == 0)

    def add_one(self, key, priority, is_evaluation):
        if key[:2] in self.model.finished and not is_evaluation:
            return
        new = self.table.add([key], [b"p%d" % key[2]], priority=priority, is_evaluation=is_evaluation)
        assert new == [self.model.add(key, priority, is_evaluation)]

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 3), forgets=st.integers(0, 2))
    def lease(self, worker, count=1, forgets=0):
        """Lease prompts as a worker that lost its newest replies: the table returns the forgotten leases first."""
        having = [each.number for each in self.leases if each.worker == worker]
        having = having[: len(having) - forgets]
        rows, why = self.table.lease(worker, self.now, count=count, having=having)
        assert bool(why) == (len(rows) < count)
        for row in rows:
            model = self.model.lease(worker, self.now, row.lease, having)
            assert (row.key, row.lease) == (model.key, model.lease)
            assert row.missing == self.model.missing(model)
            having.append(row.lease)
            self.leases.append(HeldLease(row.key, row.lease, worker))
        assert len(rows) == count or self.model.lease(worker, self.now, 0, having) is None

    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def renew(self, data, worker):
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases[-8:]))
            until, model = self.table.leases.renew(worker, lease.number, self.now), self.model.prompts.get(lease.key)
            is_its = model is not None and (model.lease, model.worker) == (lease.number, worker)
            assert until == (self.now + LEASE if is_its else 0.0)
            if is_its:
                model.until = until

    @rule(count=st.integers(1, 4), versions=st.lists(VERSIONS, min_size=GROUP, max_size=GROUP), cut=st.booleans())
    def answer_whole_prompts(self, count, versions, cut):
        for _ in range(count):
            before = len(self.leases)
            self.lease(WORKERS[0])
            for lease in self.leases[before:]:
                for index in self.table.book.rows[lease.key].missing:
                    self.answer_one(lease, index, versions[index], True, cut)

    @rule(data=st.data(), index=PLACES, version=VERSIONS, scored=st.booleans(), cut=st.booleans())
    def answer(self, data, index, version, scored, cut):
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases[-8:]))
            if lease.key in self.model.prompts:
                self.answer_one(lease, index, version, scored, cut)

    def take_in(self, row, lease, index, columns, **facts):
        outcome = self.table.answer(row, lease.number, index, columns, **facts)
        if outcome == "taken":
            self.table.update_state(row)
        return outcome

    def answer_one(self, lease, index, version, scored, cut):
        row, model = self.table.book.rows[lease.key], self.model.prompts[lease.key]
        if lease.number < row.answers[index].lease:
            cut = False
        columns = {"tokens": np.arange(index + 3, dtype=np.int32)} | ({"reward": np.float32(1.0)} if scored else {})
        raw = columns_of(columns)
        facts = {"version": version}
        if cut and index in self.model.missing(model):
            first = columns_of({"tokens": columns["tokens"][:2]})
            assert self.take_in(row, lease, index, first, piece=0, is_last=False, **facts) == "taken" or (
                model.state not in ("waiting", "leased")
            )
            raw = columns_of(columns | {"tokens": columns["tokens"][2:]})
            facts["piece"] = 1
        counts = self.model.answer(model, index, version, 1.0 if scored else None)
        assert (self.take_in(row, lease, index, raw, **facts) == "taken") == counts
        if counts and row.has_columns:
            there = self.table.store.columns(row.key, index)
            assert there[0] == columns["tokens"].tobytes()

    @rule(data=st.data(), index=PLACES)
    def amend(self, data, index):
        if self.model.prompts:
            key = data.draw(st.sampled_from(sorted(self.model.prompts)))
            if index not in self.model.prompts[key].answers:
                return
            self.table.amend(self.table.book.rows[key], index, columns_of({"reward": np.float32(0.5)}))
            self.model.amend(self.model.prompts[key], index, 0.5)

    @rule(data=st.data(), index=PLACES, is_again=st.booleans())
    def fail(self, data, index, is_again):
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases[-8:]))
            if lease.key in self.model.prompts:
                self.table.fail(self.table.book.rows[lease.key], lease.number, index, "too long", is_again)
                self.model.fail(self.model.prompts[lease.key], lease.number, index, is_again)

    @rule(data=st.data())
    def release(self, data):
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases[-8:]))
            done = self.table.leases.release(lease.worker, lease.number)
            model = self.model.prompts.get(lease.key)
            assert done == (model is not None and model.lease == lease.number)
            if done:
                model.attempts -= 1
                self.model.end(model)
                model.state = "waiting"

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds
        self.table.expire(self.now)
        self.model.expire(self.now)

    @rule(data=st.data(), priority=PRIORITIES)
    def order(self, data, priority):
        if self.model.prompts:
            key = data.draw(st.sampled_from(sorted(self.model.prompts)))
            self.table.book.prioritise(self.table.book.rows[key], priority)
            self.model.prompts[key].priority = priority

    @rule(data=st.data())
    def cancel(self, data):
        if self.model.prompts:
            key = data.draw(st.sampled_from(sorted(self.model.prompts)))
            model = self.model.prompts[key]
            is_open = model.state not in ("drawn", "committed", "dropped")
            assert self.table.cancel([key]) == is_open
            if is_open:
                self.model.drop(model, "cancelled")

    @rule(version=VERSIONS)
    def see_model(self, version):
        self.table.saw_model(version)
        self.model.newest = max(self.model.newest, version)

    @rule(count=st.integers(1, 3), again=st.booleans())
    def draw(self, count, again):
        self.draw_one(count, again)

    @rule(steps=st.integers(1, 3), count=st.integers(1, 2), commits=st.booleans())
    def train(self, steps, count, commits):
        for _ in range(steps):
            self.draw_one(count, False)
            if commits:
                self.commit(0)

    def draw_one(self, count, again):
        step = max(self.step - again, self.model.committed + 1)
        if step in self.table.steps.steps:
            count = len(self.table.steps.steps[step].keys)
        drawn = self.table.draw(step, count, self.model.session)
        expected = self.model.draw(step, count)
        assert (None if drawn is None else drawn.keys) == expected
        self.step = max(self.step, step + (expected is not None))

    @rule(ahead=st.integers(0, 2))
    def commit(self, ahead):
        step = max(0, self.step - 1 - ahead)
        self.table.commit(step, self.model.session)
        self.model.commit(step)

    @rule(back=st.integers(0, 3))
    def rewind(self, back):
        step = max(-1, self.step - 1 - back)
        former, self.rewinds = self.model.session, self.rewinds + 1
        self.table.rewind(step, f"s{self.rewinds}")
        self.model.rewind(step, f"s{self.rewinds}")
        self.step = step + 1
        with pytest.raises(ProtocolError, match="Stop this trainer"):
            self.table.draw(self.step, 1, former)
        assert self.table.rewind(0, f"s{self.rewinds}") == 0

    @rule(epoch=EPOCHS, luck=st.integers(0, 9))
    def finish(self, epoch, luck):
        if luck:
            return
        self.table.finish("d", epoch)
        self.model.finished.add(("d", epoch))

    @rule(epoch=EPOCHS, luck=st.integers(0, 2))
    def forget(self, epoch, luck):
        if luck:
            return
        expected = self.model.forget("d", epoch)
        if expected is None:
            with pytest.raises(ProtocolError, match="neither committed nor dropped"):
                self.table.forget("d", epoch)
        else:
            assert self.table.forget("d", epoch) == expected

    @rule(epoch=EPOCHS, leases=st.integers(0, 3))
    def end_epoch(self, epoch, leases):
        """Cancel the training prompts of an epoch, and forget the epoch while evaluation prompts are leased."""
        for _ in range(leases):
            self.lease(WORKERS[1])
        self.commit(0)
        for key in [key for key, each in self.model.prompts.items() if key[1] == epoch and not each.is_evaluation]:
            if self.table.cancel([key]):
                self.model.drop(self.model.prompts[key], "cancelled")
        self.forget(epoch, 0)

    @rule()
    def save(self):
        save(self.table, self.disk)
        self.saved = copy.deepcopy((self.model, self.leases, self.step))

    @rule(is_killed=st.booleans())
    def restart(self, is_killed):
        """Restart the table from disk; a killed table loses all changes that were not saved."""
        if is_killed:
            self.model, self.leases, self.step = copy.deepcopy(self.saved)
        else:
            self.save()
        first = next(self.table.book.numbers) + 1000
        self.table = PromptTable(SCHEMA, self.rules, first=first)
        go_on(self.table, self.disk, self.now)
        for model in self.model.of("leased"):
            model.until = self.now + LEASE

    @rule(is_heir=st.booleans())
    def restore_a_snapshot_elsewhere(self, is_heir):
        """Restore a snapshot in another table: prompts, answers, and epochs that were finished or forgotten."""
        table, facts = PromptTable(SCHEMA, self.rules, first=1 << 20), self.table.book.facts
        snapshot.restore_table_state(table, snapshot.table_state_of(self.table), is_heir=is_heir)
        for row in sorted(self.table.book.rows.values(), key=lambda row: row.number):
            assert snapshot.restore_prompt(table, *snapshot.record_of(self.table, row), is_heir=is_heir)
            for index in range(GROUP):
                assert table.store.packed(row.key, index) == self.table.store.packed(row.key, index)
        table.check_invariants()
        assert table.book.facts.finished == facts.finished and table.book.facts.shares == facts.shares
        for dataset, epochs in facts.forgotten.items():
            assert not any(table.add([(dataset, epoch, 0)], [b""])[0] for epoch in epochs)

    @invariant()
    def the_states_are_those_of_the_model(self):
        if not hasattr(self, "table"):
            return
        self.table.check_invariants()
        rows = self.table.book.rows
        assert rows.keys() == self.model.prompts.keys()
        for key, model in self.model.prompts.items():
            row = rows[key]
            assert (row.state.name.lower(), row.reason, row.step) == (model.state, model.reason, model.step), key
            assert (row.attempts, row.lease, row.has_columns) == (model.attempts, model.lease, model.has_columns), key
        counts = counts_of(self.table.book)
        assert sum(counts.values()) == len(rows) + sum(self.model.forgotten.values())
        ready = sum(not each.is_evaluation for each in self.model.of("ready"))
        assert len(self.table.book.ready) == ready
        open_states = ("waiting", "leased", "answered")
        assert self.table.book.pending == sum(not each.is_evaluation for each in self.model.of(*open_states))


class ReplayMachine(RuleBasedStateMachine):
    """Rule-based test of replay: uncommitted steps hold the same groups when the trainer draws them again."""

    def __init__(self):
        super().__init__()
        rules = PromptRules(group=1, at_least=1, required_mask=3, keep=1, replay_limit=3)
        self.rules, self.disk, self.drawn = rules, {}, {}
        self.added, self.rewinds, self.first, self.table = 0, 0, 1, PromptTable(SCHEMA, rules)
        self.table.store.unsaved_changes = {}

    @property
    def newest(self):
        return max(self.drawn, default=self.table.book.facts.committed)

    def seen(self, step):
        """Return the parts of a step that a trainer receives: keys, importance weights and packed columns."""
        drawn = self.table.draw(step, 2, f"s{self.rewinds}", replay=0.5)
        if drawn is None:
            return None
        assert self.table.steps.is_kept(drawn)
        keys = [*drawn.keys, *drawn.replayed]
        return keys, list(drawn.importance), [self.table.store.packed(key, 0).data for key in keys]

    @rule()
    def add(self):
        key = "d", self.added // 8, self.added
        self.added += 1
        if not self.table.add([key], [b"p"])[0]:  # the prompt belongs to a forgotten epoch
            return
        (row,), _ = self.table.lease(WORKERS[0], 0.0)
        come = columns_of({"tokens": np.array([self.added], np.int32), "reward": np.float32(1.0)})
        assert self.table.answer(row, row.lease, 0, come) == "taken"
        self.table.update_state(row)

    @rule(count=st.integers(1, 4))
    def draw(self, count):
        for _ in range(count):
            self.add()
            step = self.newest + 1
            if (seen := self.seen(step)) is not None:
                self.drawn[step] = seen

    @rule(ahead=st.integers(0, 3))
    def commit(self, ahead):
        step = max(-1, self.newest - ahead)
        self.table.commit(step, f"s{self.rewinds}")
        self.drawn = {number: seen for number, seen in self.drawn.items() if number > step}

    @rule(ahead=st.integers(0, 3))
    def rewind(self, ahead):
        step, self.rewinds = max(-1, self.newest - ahead), self.rewinds + 1
        self.table.rewind(step, f"s{self.rewinds}")
        self.drawn = {}

    @rule(epoch=st.integers(0, 2))
    def forget(self, epoch):
        try:
            self.table.forget("d", epoch)
        except ProtocolError as error:
            assert error.code == "busy"

    @rule()
    def restart(self):
        save(self.table, self.disk)
        self.first += 1000
        self.table = PromptTable(SCHEMA, self.rules, first=self.first)
        go_on(self.table, self.disk)

    @invariant()
    def what_is_not_committed_is_the_same_when_it_is_drawn_again(self):
        assert {step: self.seen(step) for step in self.drawn} == self.drawn
        self.table.check_invariants()
        kept = sum(row.has_columns for row in self.table.book.rows.values() if row.state is PromptState.COMMITTED)
        replayed = {key for step in self.table.steps.steps.values() for key in step.replayed}
        own = sum(len(step.keys) for step in self.table.steps.steps.values())
        assert kept <= self.rules.replay_limit + len(replayed) + own


TestPrompts = PromptMachine.TestCase
TestPrompts.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestReplays = ReplayMachine.TestCase
TestReplays.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


RULES = {
    "plain": {},
    "old groups wait": {"max_model_lag": 1, "on_stale": "wait"},
    "pace": {"max_model_lag": 1, "on_stale": "pace"},
    "replay": {"replay_limit": 5},
}


def table_of(rules, disk, first=1):
    """Return a table restored from `disk`, and its incomplete prompts."""
    rules = PromptRules(group=2, at_least=2, required_mask=3, attempts=50, **rules)
    table = PromptTable(SCHEMA, rules, score="column:reward", first=first)
    table.store.joined_bytes = 0  # answers stay in pieces, as long answers do
    return table, go_on(table, disk)


class Trainer:
    """Trainer and worker that make random calls; the worker sends its answers in pieces."""

    def __init__(self, table, dice, sessions):
        self.table, self.dice, self.sessions, self.step, self.added = table, dice, sessions, 0, 0

    def add(self):
        keys = [(self.dice.choice("abc"), 0, self.added + i) for i in range(4)]
        self.added += 4
        self.table.add(keys, [b"p"] * 4, priority=self.dice.choice([0.0, 0.0, 1.0]))

    def share(self):
        self.table.book.set_shares({"a": 0.6, "b": 0.3})

    def lease(self):
        having = [row.lease for row in self.table.leases.held().get(WORKERS[0], ())]
        self.table.lease(WORKERS[0], 0.0, count=self.dice.randint(1, 4), having=having)
        held = sorted(self.table.leases.held().get(WORKERS[0], ()), key=lambda row: row.lease)
        for row in held[: self.dice.randint(0, 6)]:
            score, version = self.dice.random(), self.table.book.facts.newest_model
            if self.dice.random() < 0.2:
                self.table.leases.release(WORKERS[0], row.lease)
                continue
            half = {"tokens": np.arange(3, dtype=np.int32)}
            rest = columns_of(half | {"reward": np.float32(score)})
            for index in range(2):
                self.table.answer(row, row.lease, index, columns_of(half), is_last=False, version=version)
                self.table.answer(row, row.lease, index, rest, piece=1, version=version)
                self.table.update_state(row)

    def model(self):
        self.table.saw_model(self.table.book.facts.newest_model + 1)

    def draw(self):
        count, session = self.dice.randint(1, 4), self.sessions[0]
        step = self.table.draw(self.step, count, session, wanted=count, replay=0.5)
        if step is not None:
            self.table.commit(self.step, session)
            self.step += 1
            scores = {key: self.dice.random() for key in step.keys[:1]}
            self.table.steps.update_scores(scores)

    def rewind(self):
        if self.step > 2 and len(self.sessions) > 1:
            self.sessions = self.sessions[1:]
            self.step -= 2
            self.table.rewind(self.step - 1, self.sessions[0])

    def go_on(self, turns):
        calls = [self.add, self.lease, self.lease, self.lease, self.draw, self.draw, self.model]
        for _ in range(turns):
            self.dice.choice([*calls, *([self.rewind, self.share] if self.dice.random() < 0.1 else [])])()


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(2))
def test_prompts_whose_answers_or_payloads_are_lost_wait_again_or_are_dropped_and_the_table_goes_on(rules, seed):
    dice, disk = random.Random(f"{rules} {seed}"), {}
    table, _ = table_of(RULES[rules], disk)
    trainer = Trainer(table, dice, [f"s{number}" for number in range(9)])
    trainer.add()
    again = dropped = 0
    for turn in range(6):
        trainer.go_on(25)
        if trainer.step > 1:
            table.draw(trainer.step, 1, trainer.sessions[0], replay=0.5)  # an uncommitted draw
        save(table, disk)
        states = {key: row.state for key, row in table.book.rows.items()}
        lost = {name for name in disk if name[0] in (PAYLOAD, COLUMNS) and dice.random() < 0.1}
        there = {name: None if name in lost else body for name, body in disk.items()}
        table, missing = table_of(RULES[rules], there, 10_000 * (turn + 1))
        trainer.table, incomplete = table, {row.key: row for row in missing}
        table.check_invariants()
        assert table.incomplete == len(incomplete)
        assert incomplete.keys() <= {tuple(msgspec.msgpack.decode(key)[:3]) for _, key in lost}
        for key, row in table.book.rows.items():
            lengths = [table.store.packed(key, i).lengths for i, each in enumerate(row.answers) if each.is_whole]
            assert not row.has_columns or all(each[0] == 6 for each in lengths), "no piece is left out in silence"
            if key not in incomplete:
                assert row.state is states[key]
                assert table.store.payload(key) == (b"" if row.reason == NO_PAYLOAD else b"p")
            elif (PAYLOAD, packed_key(*key)) in lost:
                assert (row.state, row.reason) == (PromptState.DROPPED, NO_PAYLOAD)
                dropped += 1
            else:
                over = (PromptState.COMMITTED, PromptState.DROPPED)
                assert row.state is (states[key] if states[key] in over else PromptState.WAITING)
                again += 1
        save(table, disk)
        assert not disk.keys() & lost, "what is lost is lost once"
        assert table_of(RULES[rules], disk)[1] == []
    assert again > 3 and dropped > 3
