"""Accounts that leave memory and come back: in any order of folds, returns, drains, restarts and restores, every step
and every line counts once, and what a ledger says of all is what its clients said.
"""

import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dispatchkit import Asker
from fake_store import Disk, MemoryStore
from memoire.accounting.merge import merge, totals_of
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.server.dispatch import Dispatcher
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table, Tables
from memoire.wire import messages
from memoire.wire.frames import encode, name_hash, parse
from memoire.wire.rows import ACCOUNT
from netkit import SCHEMA

LIMITS = Limits(client_timeout=60.0, account_timeout=600.0)
CLIENTS = [bytes([n]) * 16 for n in range(1, 5)]
RUN = "run"


class Home:
    """A server's dispatcher, with a disk or without one, under a clock that a test turns."""

    def __init__(self, name, clock, disk=None, limits=LIMITS, run=RUN):
        self.name, self.clock, self.disk = name, clock, disk
        tables = {"default": Table(SCHEMA, parameters=Parameters())}
        self.lines = []
        self.store = None if disk is None else MemoryStore(disk, name)
        self.dispatcher = Dispatcher(
            tables=Tables(tables, lambda name, table: Pool(table.schema, table.parameters, seed=0)),
            run=run,
            name=name,
            limits=limits,
            store=self.store,
            on_lines=self.lines.extend,
            clock=lambda: clock[0],
            epoch=time.time_ns(),
        )

    def ask(self, client, body, number, run=RUN):
        frames = encode(body, client=client, sequence=number, run=name_hash(run) if run else 0)
        return self.dispatcher.answer(parse(frames)).body

    def save(self):
        """Have all that waits on disk, as a store's thread does."""
        while self.store is not None and (group := self.dispatcher.collect()) is not None:
            self.disk.save(group)
            self.dispatcher.saved()
            for ticket in group.tickets:
                ticket()

    @property
    def ledger(self):
        return self.dispatcher.ledger

    def rows(self):
        return np.concatenate([merge(), *self.dispatcher.pages(self.dispatcher.runs.current)])


class Actor:
    """A client: sums since it was made, and lines until they are acknowledged."""

    def __init__(self, client):
        self.client, self.number = client, 0
        self.steps = self.episodes = self.lines = self.line_through = self.ended_through = 0

    def update(self, **state):
        lines = [messages.Line(n, 0.0, 7, f"line {n}") for n in range(self.line_through + 1, self.lines + 1)]
        ended = [messages.Ended(n, 0.0, 1, 1.0) for n in range(self.ended_through + 1, self.episodes + 1)]
        self.number += 1
        return messages.Update(steps=self.steps, episodes=self.episodes, lines=lines, ended=ended, **state)

    def hear(self, reply):
        self.line_through = max(self.line_through, reply.lines_through)
        self.ended_through = max(self.ended_through, reply.ended_through)


class FoldingMachine(RuleBasedStateMachine):
    """Clients at two servers, one with a disk; replies may be lost, accounts fold, servers restart, drain and restore."""

    def __init__(self):
        super().__init__()
        self.clock = [1000.0]
        self.actors = [Actor(client) for client in CLIENTS]
        self.told = dict.fromkeys(CLIENTS, (0, 0))  # what any server was told
        self.logged = []  # (client, number) of every line that a server took
        self.homes = []

    @initialize(durable=st.booleans())
    def begin(self, durable):
        self.homes = [Home("a", self.clock, Disk() if durable else None), Home("b", self.clock, Disk())]
        self.place = dict.fromkeys(CLIENTS, 0)

    def _lines(self, home):
        self.logged += [(entry.client, entry.line.number) for entry in home.lines]
        home.lines.clear()

    @rule(who=st.integers(0, 3), steps=st.integers(0, 9), episodes=st.integers(0, 2), lines=st.integers(0, 2),
          is_heard=st.booleans(), is_leaving=st.booleans())  # fmt: skip
    def work(self, who, steps, episodes, lines, is_heard, is_leaving):
        actor, home = self.actors[who], self.homes[self.place[CLIENTS[who]]]
        actor.steps, actor.episodes, actor.lines = actor.steps + steps, actor.episodes + episodes, actor.lines + lines
        if is_leaving:
            home.ask(actor.client, messages.Hello(label=who), actor.number)
        reply = home.ask(actor.client, actor.update(leaving=is_leaving), actor.number)
        assert isinstance(reply, messages.Updated), reply
        assert (reply.steps, reply.episodes) == (actor.steps, actor.episodes)
        home.save()
        self._lines(home)
        self.told[actor.client] = (actor.steps, actor.episodes)
        if is_heard:
            actor.hear(reply)

    @rule(who=st.integers(0, 3))
    def arrive(self, who):
        """A cache of a client comes, whether its account is in memory or not; its run's schema is another: refused."""
        home = self.homes[self.place[CLIENTS[who]]]
        header = parse(encode(messages.Cache(), client=CLIENTS[who], payload=b"x")).header
        with pytest.raises(ProtocolError):
            home.dispatcher.arrived(header, messages.Cache(), b"x")
        home.save()

    @rule(which=st.integers(0, 1), seconds=st.sampled_from([1.0, 61.0, 700.0, 2.6e6]))
    def fold(self, which, seconds):
        self.clock[0] += seconds
        self.homes[which].dispatcher.fold()
        self.homes[which].save()
        self.homes[which].dispatcher.fold()

    @rule(which=st.integers(0, 1))
    def restart(self, which):
        home = self.homes[which]
        if home.disk is not None:
            home.save()
            self._lines(home)
            self.homes[which] = Home(home.name, self.clock, home.disk)

    @rule(which=st.integers(0, 1), packed=st.booleans())
    def drain(self, which, packed):
        """All clients go to the other server, once they have heard everything; it keeps what this one has counted."""
        for actor in self.actors:
            if self.place[actor.client] == which and (actor.steps or actor.episodes or actor.lines):
                actor.hear(self.homes[which].ask(actor.client, actor.update(), actor.number))
                self.told[actor.client] = (actor.steps, actor.episodes)
        self.homes[which].save()
        self._lines(self.homes[which])
        heir = self.homes[1 - which]
        rows = self.homes[which].rows()
        heir.dispatcher.inherit(RUN, False, merge(rows))
        if packed:
            heir.save()
        for client, place in self.place.items():
            self.place[client] = 1 - which if place == which else place

    @rule(which=st.integers(0, 1))
    def lose_and_restore(self, which):
        """A server whose disk was lost gets its rows back from a snapshot, as accounts of a former life."""
        rows = self.homes[which].rows()
        self._lines(self.homes[which])
        disk = None if self.homes[which].disk is None else Disk(epoch=self.homes[which].disk.epoch)
        self.homes[which] = Home(self.homes[which].name, self.clock, disk)
        self.homes[which].dispatcher.inherit(RUN, False, merge(rows))
        self.homes[which].save()

    @invariant()
    def everything_counts_once(self):
        for home in self.homes:
            home.ledger.check_invariants()
        totals = totals_of(merge(*(home.rows() for home in self.homes)))
        assert totals.steps == sum(steps for steps, _ in self.told.values())
        assert totals.episodes == sum(episodes for _, episodes in self.told.values())
        assert totals.returns_count == sum(episodes for _, episodes in self.told.values())
        assert len(set(self.logged)) == len(self.logged)


FoldingMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestFolding = pytest.mark.slow(FoldingMachine.TestCase)


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture(params=["in memory", "on disk"])
def home(request, clock):
    return Home("home", clock, Disk() if request.param == "on disk" else None)


def test_a_hello_makes_no_account_and_the_first_report_that_counts_does(home, clock):
    me = Asker(home.dispatcher)
    since = me.ask(messages.Hello(label=7)).body.since
    assert since == home.dispatcher.epoch
    me.ask(messages.Update(scalars={"x": 1.0}))  # a sign of life
    home.save()
    assert (len(home.ledger), len(home.ledger.guests), home.ledger.totals().clients) == (0, 1, 0)
    assert len(home.rows()) == 0 and home.ledger.present[0] == 1
    assert me.ask(messages.Update(steps=1)).body.steps == 1
    home.save()
    assert (len(home.ledger), len(home.ledger.guests), home.ledger.totals().clients) == (1, 0, 1)
    assert home.ledger.find(me.client).label == 7 and me.ask(messages.Hello(label=7)).body.since == since


def test_guests_are_forgotten_when_they_are_silent(home, clock):
    askers = [Asker(home.dispatcher, bytes([number]) * 16) for number in range(1, 6)]
    for asker in askers:
        asker.ask(messages.Hello())
    clock[0] += 50.0
    askers[3].ask(messages.Update())
    clock[0] += 20.0
    home.dispatcher.fold()
    assert [guest.client[0] for guest in home.ledger.guests] == [4] and home.ledger.present[0] == 1
    askers[3].ask(messages.Update(leaving=True))
    assert not home.ledger.guests and not +home.ledger.present


@pytest.mark.parametrize(("leaving", "after"), [(True, 60.0), (False, 600.0)])
def test_an_account_leaves_memory_when_its_client_is_gone_or_long_silent(home, clock, leaving, after):
    me = Asker(home.dispatcher)
    me.ask(messages.Update(steps=5, episodes=2, leaving=leaving))
    home.save()
    clock[0] += after - 1.0
    home.dispatcher.fold()
    assert (len(home.ledger), home.ledger.folded) == (1, 0)
    before = home.ledger.totals()
    clock[0] += 2.0
    home.dispatcher.fold()
    assert (len(home.ledger), home.ledger.folded) == (0, 1)
    assert home.ledger.totals() == before and totals_of(home.rows()) == before
    home.ledger.check_invariants()


def test_an_account_stays_in_memory_until_it_is_on_disk(clock):
    home = Home("home", clock, Disk())
    Asker(home.dispatcher).ask(messages.Update(steps=5))
    clock[0] += 1e6
    home.dispatcher.fold()
    assert home.ledger.folded == 0
    home.save()
    home.dispatcher.fold()
    assert home.ledger.folded == 1


def test_feedback_that_waits_for_a_client_that_is_folded_is_lost_and_counted(home, clock):
    me = Asker(home.dispatcher)
    me.ask(messages.Update(steps=5))
    ids = np.zeros(3, [("client", "<u8", (2,)), ("number", "<i8")])
    ids["client"] = np.frombuffer(me.client, "<u8")
    assert home.dispatcher.hand_on(ids, np.ones(3)).applied == 0
    home.save()
    clock[0] += 1e6
    home.dispatcher.fold()
    home.save()
    home.dispatcher.fold()
    assert home.ledger.folded == 1 and home.dispatcher.feedback_lost == 3
    assert totals_of(home.rows()).lost_feedback == home.ledger.totals().lost_feedback == 3


def test_a_client_that_was_folded_is_known_before_it_says_anything(home, clock):
    me = Asker(home.dispatcher)
    line = messages.Line(1, 0.0, 7, "once")
    ended = messages.Ended(1, 0.0, 5, 2.0)
    first = me.ask(messages.Update(steps=5, episodes=1, lines=[line], ended=[ended])).body
    home.save()
    clock[0] += 2.6e6  # a month
    home.dispatcher.fold()
    assert home.ledger.folded == 1
    assert me.ask(messages.Hello()).body.since == home.dispatcher.epoch
    again = me.ask(messages.Update(epoch=first.epoch, steps=6, episodes=1, lines=[line], ended=[ended])).body
    assert (again.steps, again.lines_through, again.ended_through) == (6, 1, 1)
    home.save()
    assert len(home.lines) == 1 and home.ledger.totals().returns_count == 1 and home.ledger.folded == 0


def test_a_former_run_leaves_memory_when_nobody_asks_for_it_and_comes_back_whole(clock):
    home = Home("home", clock, Disk())
    me = Asker(home.dispatcher)
    me.ask(messages.Update(steps=5, lines=[messages.Line(1, 0.0, 7, "x")]))
    home.dispatcher.begin_run("next")
    clock[0] += 1e6
    for _ in range(3):
        home.dispatcher.fold()
    assert [run.name for run in home.dispatcher.runs] == [RUN, "next"], "it is not on disk yet"
    home.save()
    for _ in range(3):
        home.dispatcher.fold()
    assert [run.name for run in home.dispatcher.runs] == ["next"]
    found = home.dispatcher.runs.named(RUN)
    assert found.ledger.totals().steps == 5 and found.logbook.count == 1
    late = home.ask(
        me.client, messages.Update(steps=7, lines=[messages.Line(1, 0.0, 7, "x")]), 9
    )  # it had not heard of it
    assert (late.steps, late.lines_through, late.run_name) == (7, 1, "next")
    home.save()
    assert found.logbook.count == 1 and Home("home", clock, home.disk).dispatcher.runs.named(RUN).ledger.steps == 7


def test_the_server_warns_and_is_not_ready_before_newcomers_have_to_wait(clock, caplog):
    home = Home("home", clock, limits=Limits(new_clients=8, new_clients_rate=1.0))
    for number in range(1, 7):
        assert home.ask(bytes([number]) * 16, messages.Update(steps=1), 1).steps == 1
        home.dispatcher.fold()
        assert bool(home.dispatcher.trouble()) == (number == 6)
    assert "2 new ones of 8 may still come at once" in home.dispatcher.trouble()
    assert [record.message for record in caplog.records if "new ones" in record.message] == [
        f"server home: {home.dispatcher.trouble()}"
    ]
    replies = [home.ask(bytes([number]) * 16, messages.Update(steps=1), 1) for number in range(7, 10)]
    assert [getattr(reply, "code", "taken") for reply in replies] == ["taken", "taken", "busy"]
    assert home.ask(bytes([9]) * 16, messages.Hello(), 2).since  # it may come, and goes on telling
    clock[0] += 1.0
    assert home.ask(bytes([9]) * 16, messages.Update(steps=1), 3).steps == 1
    clock[0] += 100.0
    assert home.dispatcher.trouble() == ""


def test_what_other_servers_counted_is_not_taken_once_more(home):
    rows = np.zeros(1, ACCOUNT)
    me = Asker(home.dispatcher)
    rows["client"], rows["home"], rows["since"] = np.frombuffer(me.client, "<u8"), 7, 3
    rows["steps"], rows["lines_through"], rows["ended_through"], rows["returns_count"] = 50, 2, 1, 1
    home.dispatcher.inherit(RUN, False, merge(rows))
    lines = [messages.Line(number, 0.0, 7, str(number)) for number in (2, 3)]
    ended = [messages.Ended(number, 0.0, 1, 1.0) for number in (1, 2)]
    reply = me.ask(messages.Update(steps=60, episodes=2, lines=lines, ended=ended)).body
    home.save()
    assert (reply.lines_through, reply.ended_through) == (3, 2)
    assert [entry.line.number for entry in home.lines] == [3]
    totals = totals_of(home.rows())
    assert (totals.steps, totals.returns_count, totals.clients) == (60, 2, 1)
