"""Tests of accounts that are packed into a few bytes and folded, in any order of drains and restarts."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dispatchkit import Asker
from fake_store import Disk, MemoryStore
from memoire.accounting.account import FEEDBACK_OUTCOMES, Account, FeedbackCounts, FoldedSums, counts_of
from memoire.accounting.merge import key_of, merge, row_of, rows_of, totals_of
from memoire.accounting.packing import AccountPacker, MemoryAccounts, NumberedTexts
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.tables.table import Table
from memoire.wire import _bytes, messages
from memoire.wire.frames import encode, name_hash, parse
from memoire.wire.messages import Update
from memoire.wire.rows import ACCOUNT, unpack_accounts
from netkit import SCHEMA
from serverkit import dispatcher_of, tables_of

LIMITS = Limits.of(client_timeout=60.0, account_timeout=600.0)
CLIENTS = [bytes([n]) * 16 for n in range(1, 5)]
RUN = "run"


class Home:
    """A server's dispatcher, with or without a disk, on a clock that the test sets."""

    def __init__(self, name, clock, disk=None, limits=LIMITS):
        self.name, self.clock, self.disk, self.lines = name, clock, disk, []
        self.store = None if disk is None else MemoryStore(disk, name)
        facts = {"name": name, "limits": limits, "store": self.store, "epoch": time.time_ns()}
        facts |= {"on_lines": self.lines.extend, "clock": lambda: clock[0]}
        self.dispatcher = dispatcher_of(tables_of(default=Table(SCHEMA)), **facts)

    def ask(self, client, body, number):
        frames = encode(body, client=client, sequence=number, run=name_hash(RUN))
        return self.dispatcher.answer(parse(frames)).body

    def save(self):
        """Write all waiting groups to the disk, as the thread of a store does."""
        while self.store is not None and (group := self.dispatcher.collect()) is not None:
            self.disk.save(group)
            self.dispatcher.mark_saved()
            for ticket in group.tickets:
                ticket()

    @property
    def ledger(self):
        return self.dispatcher.ledger

    def rows(self):
        return np.concatenate([merge(), *self.dispatcher.pages(self.dispatcher.runs.current)])


class Actor:
    """A client that keeps sums from its start, and lines until a server acknowledges them."""

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
    """Clients of two servers: replies get lost, accounts fold, and servers restart, drain and restore."""

    def __init__(self):
        super().__init__()
        self.clock = [1000.0]
        self.actors = [Actor(client) for client in CLIENTS]
        self.reported = dict.fromkeys(CLIENTS, (0, 0))  # (steps, episodes) that some server received
        self.logged = []  # (client, number) of each line that a server accepted
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
        self.reported[actor.client] = (actor.steps, actor.episodes)
        if is_heard:
            actor.hear(reply)

    @rule(who=st.integers(0, 3))
    def arrive(self, who):
        """Send a cache of another schema: the server refuses it, whether the client's account is in memory or folded."""
        home = self.homes[self.place[CLIENTS[who]]]
        header = parse(encode(messages.Cache(), client=CLIENTS[who], payload=b"x")).header
        with pytest.raises(ProtocolError):
            home.dispatcher.accept_push(header, messages.Cache(), b"x")
        home.save()

    @rule(which=st.integers(0, 1), seconds=st.sampled_from([1.0, 61.0, 700.0, 2.6e6]))
    def fold(self, which, seconds):
        self.clock[0] += seconds
        self.homes[which].dispatcher.store_gone_accounts()
        self.homes[which].save()
        self.homes[which].dispatcher.store_gone_accounts()

    @rule(which=st.integers(0, 1))
    def restart(self, which):
        home = self.homes[which]
        if home.disk is not None:
            home.save()
            self._lines(home)
            self.homes[which] = Home(home.name, self.clock, home.disk)

    @rule(which=st.integers(0, 1), packed=st.booleans())
    def drain(self, which, packed):
        """Move all clients of a server to the other server, which takes over the account rows."""
        for actor in self.actors:
            if self.place[actor.client] == which and (actor.steps or actor.episodes or actor.lines):
                actor.hear(self.homes[which].ask(actor.client, actor.update(), actor.number))
                self.reported[actor.client] = (actor.steps, actor.episodes)
        self.homes[which].save()
        self._lines(self.homes[which])
        heir = self.homes[1 - which]
        rows = self.homes[which].rows()
        heir.dispatcher.store_inherited(RUN, False, merge(rows))
        if packed:
            heir.save()
        for client, place in self.place.items():
            self.place[client] = 1 - which if place == which else place

    @rule(which=st.integers(0, 1))
    def lose_and_restore(self, which):
        """Replace a server that lost its disk, and restore its account rows as from a snapshot."""
        rows = self.homes[which].rows()
        self._lines(self.homes[which])
        disk = None if self.homes[which].disk is None else Disk(epoch=self.homes[which].disk.epoch)
        self.homes[which] = Home(self.homes[which].name, self.clock, disk)
        self.homes[which].dispatcher.store_inherited(RUN, False, merge(rows))
        self.homes[which].save()

    @invariant()
    def everything_counts_once(self):
        for home in self.homes:
            home.ledger.check_invariants()
        totals = totals_of(merge(*(home.rows() for home in self.homes)))
        assert totals.steps == sum(steps for steps, _ in self.reported.values())
        assert totals.episodes == sum(episodes for _, episodes in self.reported.values())
        assert totals.returns_count == sum(episodes for _, episodes in self.reported.values())
        assert len(set(self.logged)) == len(self.logged)


FoldingMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestFolding = pytest.mark.slow(FoldingMachine.TestCase)


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture(params=["in memory", "on disk"])
def home(request, clock):
    return Home("home", clock, Disk() if request.param == "on disk" else None)


def test_guests_are_forgotten_when_they_are_silent(home, clock):
    askers = [Asker(home.dispatcher, bytes([number]) * 16) for number in range(1, 6)]
    for asker in askers:
        asker.ask(messages.Hello())
    clock[0] += 50.0
    askers[3].ask(messages.Update())
    clock[0] += 20.0
    home.dispatcher.store_gone_accounts()
    assert [guest.client[0] for guest in home.ledger.guests] == [4] and home.ledger.present[0] == 1
    askers[3].ask(messages.Update(leaving=True))
    assert not home.ledger.guests and not +home.ledger.present


def test_a_client_that_was_folded_is_known_before_it_says_anything(home, clock):
    me = Asker(home.dispatcher)
    line = messages.Line(1, 0.0, 7, "once")
    ended = messages.Ended(1, 0.0, 5, 2.0)
    first = me.ask(messages.Update(steps=5, episodes=1, lines=[line], ended=[ended])).body
    home.save()
    clock[0] += 2.6e6  # a month
    home.dispatcher.store_gone_accounts()
    assert home.ledger.stored_count == 1
    assert me.ask(messages.Hello()).body.since == home.dispatcher.epoch
    again = me.ask(messages.Update(epoch=first.epoch, steps=6, episodes=1, lines=[line], ended=[ended])).body
    assert (again.steps, again.lines_through, again.ended_through) == (6, 1, 1)
    home.save()
    assert len(home.lines) == 1 and home.ledger.totals().returns_count == 1 and home.ledger.stored_count == 0


def test_a_former_run_leaves_memory_when_nobody_asks_for_it_and_comes_back_whole(clock):
    home = Home("home", clock, Disk())
    me = Asker(home.dispatcher)
    me.ask(messages.Update(steps=5, lines=[messages.Line(1, 0.0, 7, "x")]))
    home.dispatcher.begin_run("next")
    clock[0] += 1e6
    for _ in range(3):
        home.dispatcher.store_gone_accounts()
    assert [run.name for run in home.dispatcher.runs] == [RUN, "next"], "it is not on disk yet"
    home.save()
    for _ in range(3):
        home.dispatcher.store_gone_accounts()
    assert [run.name for run in home.dispatcher.runs] == ["next"]
    former = home.dispatcher.runs.named(RUN)
    assert former.ledger.totals().steps == 5 and former.logbook.count == 1
    late = messages.Update(steps=7, lines=[messages.Line(1, 0.0, 7, "x")])  # the client has not learned of the next run
    late = home.ask(me.client, late, 9)
    assert (late.steps, late.lines_through, late.run_name) == (7, 1, "next")
    home.save()
    assert former.logbook.count == 1 and Home("home", clock, home.disk).dispatcher.runs.named(RUN).ledger.steps == 7


def test_the_server_warns_and_is_not_ready_before_newcomers_have_to_wait(clock, caplog):
    home = Home("home", clock, limits=Limits.of(new_clients=8, new_clients_rate=1.0))
    for number in range(1, 7):
        assert home.ask(bytes([number]) * 16, messages.Update(steps=1), 1).steps == 1
        home.dispatcher.store_gone_accounts()
        assert bool(home.dispatcher.problem()) == (number == 6)
    assert "2 of 8 new clients with the same key may still register at once" in home.dispatcher.problem()
    assert [record.message for record in caplog.records if "new clients" in record.message] == [
        f"server home: {home.dispatcher.problem()}"
    ]
    replies = [home.ask(bytes([number]) * 16, messages.Update(steps=1), 1) for number in range(7, 10)]
    assert [getattr(reply, "code", "taken") for reply in replies] == ["taken", "taken", "busy"]
    assert home.ask(bytes([9]) * 16, messages.Hello(), 2).since  # HELLO succeeds, and the client retries its update
    clock[0] += 1.0
    assert home.ask(bytes([9]) * 16, messages.Update(steps=1), 3).steps == 1
    clock[0] += 100.0
    assert home.dispatcher.problem() == ""


def test_what_other_servers_counted_is_not_taken_once_more(home):
    me = Asker(home.dispatcher)
    rows = elsewhere(me.client, 7, steps=50, lines_through=2, ended_through=1, returns_count=1)
    home.dispatcher.store_inherited(RUN, False, merge(rows))
    lines = [messages.Line(number, 0.0, 7, str(number)) for number in (2, 3)]
    ended = [messages.Ended(number, 0.0, 1, 1.0) for number in (1, 2)]
    reply = me.ask(messages.Update(steps=60, episodes=2, lines=lines, ended=ended)).body
    home.save()
    assert (reply.lines_through, reply.ended_through) == (3, 2)
    assert [entry.line.number for entry in home.lines] == [3]
    totals = totals_of(home.rows())
    assert (totals.steps, totals.returns_count, totals.clients) == (60, 2, 1)


# --- Packing: an account comes back unchanged; a damaged body is an error or another valid account

HOME = name_hash("home")
counts = st.integers(0, 2**53 - 1) | st.integers(0, 200)
moments = st.integers(0, 2**41).map(lambda milliseconds: milliseconds / 1000.0)


@st.composite
def accounts(draw, client=CLIENTS[0]):
    """Draw an account of a server: no more caches received than pushed."""
    rejected = draw(st.dictionaries(st.sampled_from(["size", "schema", "run"]), st.integers(1, 10**6), max_size=3))
    accepted, lost, flying = (draw(st.integers(0, 10**9)) for _ in range(3))
    received = accepted + sum(rejected.values())
    report = Update(
        **{name: draw(counts) for name in ("episodes", "steps", "skipped", "generated_bytes", "applied", "stale")},
        dropped_lines=draw(counts),
        caches=received + lost + flying,
        cache_bytes=10 * (received + lost + flying),
        leaving=draw(st.booleans()),
    )
    feedback = draw(st.lists(st.integers(0, 2**50), min_size=5, max_size=5))
    facts = {name: draw(moments) for name in ("first_seen", "last_seen")}
    facts |= {name: draw(counts) for name in ("lines_through", "ended_through", "returns_count", "accepted_samples")}
    facts |= {name: draw(st.integers(0, 2**32 - 1)) for name in ("label", "table")}
    facts |= {f"{name}_feedback": count for name, count in zip(FEEDBACK_OUTCOMES[1:], feedback, strict=False)}
    caches = {"received": received, "seen": received + lost, "accepted": accepted}
    facts |= {f"{name}_caches": count for name, count in caches.items()}
    facts |= {f"{name}_bytes": 10 * count for name, count in caches.items()}
    return Account(
        client=client,
        since=draw(st.integers(0, 2**63 - 1)),
        report=report,
        sequence=draw(st.integers(-1, 2**53)),
        returns_sum=draw(st.floats(-1e300, 1e300)),
        rejected=rejected,
        lost_feedback=feedback[4],
        given_feedback=sum(feedback),
        owner=draw(st.sampled_from(["", "actor/me", "actor/a.b-c d"])),
        **facts,
    )


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), max_size=64), st.binary(max_size=5))
@example([127, 128, 2**14 - 1, 2**14, 2**63, 2**64 - 1], b"")  # around the ends of encoded lengths
def test_counts_come_back_as_they_were_whatever_follows_them(numbers, rest):
    packed = _bytes.pack_counts(numbers)
    assert _bytes.unpack_counts(packed + rest, len(numbers)) == (numbers, len(packed))
    assert len(packed) <= 8 + 10 * len(numbers)


@given(st.binary(max_size=40), st.integers(0, 64))
@example(b"\x01\x00", 1)  # marked as above 0, but 0
@example(b"\x01" + b"\xff" * 9 + b"\x02", 1)  # a number of 65 bits
def test_bytes_that_nobody_packed_are_refused_or_pack_to_the_same(packed, number):
    try:
        numbers, used = _bytes.unpack_counts(packed, number)
    except ValueError as error:
        assert "truncated" in str(error)
    else:
        assert _bytes.unpack_counts(_bytes.pack_counts(numbers), number)[0] == numbers and used <= len(packed)


@pytest.mark.parametrize("number", [-1, 65])
def test_more_counts_than_there_is_room_for_are_refused(number):
    with pytest.raises(ValueError, match="at most 64"):
        _bytes.unpack_counts(b"", number)
    with pytest.raises(ValueError, match="at most 64"):
        _bytes.pack_counts([0] * 65)


@pytest.mark.slow
@given(accounts())
@settings(max_examples=200)
def test_an_account_comes_back_as_it_was(account):
    packing = AccountPacker(HOME, NumberedTexts())
    unpacked = packing.unpack(account.client, packing.pack(account))
    assert row_of(unpacked, HOME)[1:] == row_of(account, HOME)[1:]
    if account.report.leaving:  # nothing remains in flight
        account.seen_caches, account.seen_bytes = account.pushed_caches, account.pushed_bytes
    assert unpacked == account


@given(accounts())
def test_feedback_that_waits_in_memory_is_lost_with_it(account):
    account.given_feedback += 7 - account.lost_feedback
    account.lost_feedback, account.waiting_feedback = 3, 4
    packing = AccountPacker(HOME, NumberedTexts())
    unpacked = packing.unpack(account.client, packing.pack(account))
    assert unpacked.lost_feedback == 7 and unpacked.feedback == dataclasses.replace(account.feedback, lost=7, waiting=0)
    sums = FoldedSums()
    packing.add_up(sums, [packing.pack(account)] * 2)
    assert FeedbackCounts(**sums.feedback) == unpacked.feedback + unpacked.feedback


@given(accounts(), st.data())
def test_a_body_that_was_changed_is_an_error_or_another_account_and_nothing_else(account, data):
    packing = AccountPacker(HOME, NumberedTexts(["5 0 actor/me", "6 7 "]))
    body = bytearray(packing.pack(account))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpacked = packing.unpack(account.client, bytes(body[: data.draw(st.integers(0, len(body)))]))
    except ValueError:
        return
    assert unpack_accounts(rows_of([row_of(unpacked, HOME)]).tobytes()) is not None


@pytest.mark.slow
@given(st.lists(accounts(), min_size=1, max_size=5))
def test_what_accounts_add_up_to_is_the_same_packed_or_not(all_accounts):
    packing, packed, plain = AccountPacker(HOME, NumberedTexts()), FoldedSums(), FoldedSums()
    packing.add_up(packed, [packing.pack(account) for account in all_accounts])
    for account in all_accounts:
        plain.add(account)
    assert +packed.counts == +plain.counts and packed.returns.value == plain.returns.value
    assert {name: +sums for name, sums in packed.tables.items()} == {n: +sums for n, sums in plain.tables.items()}
    for account in all_accounts:
        plain.add(account, -1)
    assert not +plain.counts and plain.returns.value == 0.0
    assert packed.counts["clients"] == sum(counts_of(account)["clients"] for account in all_accounts)


def elsewhere(client, home, since=3, **facts):
    """Return an account row of another server."""
    row = np.zeros(1, ACCOUNT)
    row["client"], row["home"], row["since"] = np.frombuffer(client, "<u8"), home, since
    for name, value in facts.items():
        row[name] = value
    return row


@given(
    st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(0, 4), st.integers(0, 99)), max_size=30),
    st.integers(1, 7),
)
def test_pages_of_kept_accounts_have_each_once_in_order(steps, most):
    kept, expected = MemoryAccounts(HOME), []
    for client, home, episodes in steps:
        if home == 0:
            account = Account(client, 1.0, 2.0, report=Update(episodes=episodes))
            kept.store(account)
            expected = [row for row in expected if key_of(row[0]) != key_of(rows_of([row_of(account, HOME)])[0])]
            expected.append(rows_of([row_of(account, HOME)]))
        else:
            kept.store_inherited(elsewhere(client, home, episodes=episodes, returns_sum=0.5, last_seen=1.25))
            expected.append(elsewhere(client, home, episodes=episodes, returns_sum=0.5, last_seen=1.25))
    after, pages = b"", []
    while len(rows := kept.rows(after, most)):
        pages.append(rows)
        after = key_of(rows[-1])
        assert len(rows) <= most
    assert np.concatenate([merge(), *pages]).tobytes() == merge(*expected).tobytes()
    assert kept.has_others == any(home for _, home, _ in steps)


def test_what_another_server_brings_is_there_before_it_is_on_disk_and_while_it_is_saved():
    stored = MemoryStore(Disk()).accounts(RUN)
    stored.store_inherited(elsewhere(CLIENTS[0], 7, episodes=3, lines_through=5))
    stored.mark_saving()
    stored.store_inherited(elsewhere(CLIENTS[0], 8, episodes=2, ended_through=4))
    assert [stored.numbers_elsewhere(client) for client in CLIENTS[:2]] == [(5, 4), (0, 0)]
    assert stored.rows(b"", 10)["episodes"].tolist() == [3, 2] and stored.has_others
    stored.mark_saved()
    assert stored.rows(b"", 10)["episodes"].tolist() == [2]
