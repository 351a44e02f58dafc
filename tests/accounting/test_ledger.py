"""Tests of the ledger: its totals, saved accounts and log lines, with messages lost, doubled and late."""

import math
from collections import Counter
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.accounting import merge
from memoire.accounting.ledger import Ledger
from memoire.accounting.packing import MemoryAccounts
from memoire.accounting.runs import MAX_WAITING, Logbook, UnsavedChanges, escape, format_line
from memoire.client.counts import LineOutbox
from memoire.errors import ProtocolError
from memoire.security.roles import TokenBuckets
from memoire.wire.frames import name_hash
from memoire.wire.messages import Ended, Line, Update
from memoire.wire.rows import ACCOUNT, MAX_RETURN

CLIENTS = [bytes([n]) * 16 for n in range(3)]


def kept(ledger):
    """Return the accounts of a ledger as a restarted server reads them."""
    store = MemoryAccounts(7)
    for account in ledger:
        store.store(account)
    return store


steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 50)), max_size=12)


@given(steps, st.randoms(use_true_random=False))
def test_totals_are_what_clients_reported_whatever_is_doubled_lost_or_late(history, rng):
    ledger = Ledger()
    sums = {client: [0, 0] for client in CLIENTS}
    sent = []
    for sequence, (who, episodes, length) in enumerate(history):
        client = CLIENTS[who]
        sums[client][0] += episodes
        sums[client][1] += length
        sent.append((client, sequence, Update(episodes=sums[client][0], steps=sums[client][1], positives=sequence)))
    newest = {client: message for client, _, message in sent}
    delivered = [message for message in sent * 2 if rng.random() < 0.7 or newest[message[0]] is message[2]]
    rng.shuffle(delivered)
    for client, sequence, update in delivered:
        ledger.report(client, sequence, update, now=1.0)
        ledger.check_invariants()
    assert ledger.episodes == sum(episodes for episodes, _ in sums.values())
    assert ledger.steps == sum(length for _, length in sums.values())
    for client, update in newest.items():
        assert ledger.find(client).report.positives == update.positives


def test_the_newest_message_describes_the_memory_and_an_older_one_changes_nothing_but_sums():
    ledger = Ledger()
    ledger.report(CLIENTS[0], 5, Update(total_weight=2.0, scalars={"x": 1.0}), now=1.0)
    ledger.report(CLIENTS[0], 4, Update(total_weight=9.0, scalars={"x": 0.0}, episodes=3), now=2.0)
    report = ledger.find(CLIENTS[0]).report
    assert (report.total_weight, report.scalars, report.episodes) == (2.0, {"x": 1.0}, 3)
    again = kept(ledger).find(CLIENTS[0])
    assert (again.first_seen, again.last_seen) == (1.0, 2.0)


def test_too_many_newcomers_at_once_have_to_wait_and_who_is_known_is_served():
    ledger = Ledger(may_open=TokenBuckets(2, 1.0).take)
    for client in CLIENTS[:2]:
        ledger.report(client, 1, Update(episodes=1), now=1.0)
    with pytest.raises(ProtocolError, match="too many new clients at once") as refused:
        ledger.report(CLIENTS[2], 1, Update(episodes=1), now=1.5)
    assert refused.value.code == "busy"
    with pytest.raises(ProtocolError, match="too many new clients at once"):
        ledger.count_arrived_cache(CLIENTS[2], 100, now=1.5)
    ledger.report(CLIENTS[0], 2, Update(episodes=4), now=1.5)
    assert (ledger.episodes, len(ledger)) == (5, 2)
    ledger.report(CLIENTS[2], 1, Update(episodes=1), now=2.1)
    assert (ledger.episodes, len(ledger)) == (6, 3)
    ledger.check_invariants()


reports = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 9), st.booleans(), st.booleans())


@given(st.lists(reports, max_size=15))
def test_each_table_counts_its_own_clients_wherever_they_move_and_after_a_restart(history):
    ledger = Ledger()
    for sequence, (who, table, count, is_leaving, is_moving) in enumerate(history):
        update = Update(episodes=count, steps=10 * count, leaving=is_leaving)
        account = ledger.report(CLIENTS[who], sequence, update, 1.0, table)
        if is_moving:
            ledger.move(account, table)
        ledger.check_invariants()
    again = Ledger(store=kept(ledger))
    again.check_invariants()
    assert {name: +sums for name, sums in again.tables.items()} == {name: +sums for name, sums in ledger.tables.items()}
    for account in ledger:
        again.find(account.client)
    again.check_invariants()
    assert +again.present == +ledger.present - Counter(guest.table for guest in ledger.guests)


def test_guests_expire_that_were_last_heard_before_a_moment_and_no_others():
    ledger = Ledger()
    for client, seen in zip(CLIENTS, (1.0, 2.0, 3.0), strict=True):
        ledger.register_guest(client, seen)
    ledger.expire(2.0)
    assert [guest.client for guest in ledger.guests] == CLIENTS[1:]
    ledger.check_invariants()


def test_a_cache_that_a_later_one_overtook_is_lost_until_it_arrives():
    ledger = Ledger()
    account = ledger.count_arrived_cache(CLIENTS[0], 100, 1.0, number=1, pushed_bytes=100)
    ledger.count_accepted_cache(account, 100, 10)
    account = ledger.count_arrived_cache(CLIENTS[0], 100, 1.0, number=3, pushed_bytes=300)
    ledger.count_rejected_cache(account, "schema")
    assert (account.lost_caches, account.lost_bytes, account.rejected) == (1, 100, {"schema": 1})
    ledger.count_accepted_cache(ledger.count_arrived_cache(CLIENTS[0], 100, 1.0, number=2, pushed_bytes=200), 100, 10)
    assert (account.lost_caches, account.lost_bytes) == (0, 0)
    totals = ledger.totals()
    assert (totals.accepted_caches, totals.rejected_caches, totals.accepted_samples) == (2, 1, 20)
    ledger.check_invariants()


def test_what_is_on_the_way_of_a_client_that_said_goodbye_is_lost_until_it_arrives():
    ledger = Ledger()
    ledger.count_accepted_cache(ledger.count_arrived_cache(CLIENTS[0], 100, 1.0, number=1, pushed_bytes=100), 100, 10)
    account = ledger.report(CLIENTS[0], 1, Update(caches=3, cache_bytes=300), now=1.0)
    assert (account.lost_caches, account.in_flight_caches, account.in_flight) == (0, 2, 200)
    ledger.report(CLIENTS[0], 2, Update(caches=4, cache_bytes=400, leaving=True), now=1.0)
    assert (account.lost_caches, account.lost_bytes, account.in_flight_caches, account.in_flight) == (3, 300, 0, 0)
    assert (account.overtaken_caches, account.overtaken_bytes) == (0, 0)  # no later cache overtook caches
    ledger.count_accepted_cache(ledger.count_arrived_cache(CLIENTS[0], 100, 1.0, number=2, pushed_bytes=200), 100, 10)
    assert (account.lost_caches, account.lost_bytes, account.in_flight_caches, account.in_flight) == (2, 200, 0, 0)
    ledger.check_invariants()
    assert Ledger(store=kept(ledger)).totals() == ledger.totals()


def test_codes_of_rejection_are_bounded():
    ledger = Ledger()
    for number in range(100):
        ledger.count_rejected_cache(ledger.count_arrived_cache(CLIENTS[0], 1, 1.0), f"code{number}")
    rejected = ledger.find(CLIENTS[0]).rejected
    assert len(rejected) <= 33 and sum(rejected.values()) == 100
    ledger.check_invariants()


@pytest.mark.parametrize(
    ("what", "value"),
    [(what, value) for what in ("return", "scalar") for value in (math.nan, math.inf, -math.inf)]
    + [("return", sign * 1.01 * MAX_RETURN) for sign in (1.0, -1.0)],
)
def test_a_report_with_a_number_that_would_spoil_a_sum_changes_nothing(what, value):
    ledger = Ledger(epoch=1)
    ledger.report(CLIENTS[0], 1, Update(epoch=1, episodes=1, steps=5, ended=[Ended(1, 1.0, 5, 2.0)]), now=1.0)
    before = ledger.totals()
    ended = [Ended(2, 1.0, 5, 1.0), Ended(3, 1.0, 5, value if what == "return" else 1.0)]
    scalars = {"loss": value} if what == "scalar" else {}
    with pytest.raises(ProtocolError, match="finite") as problem:
        ledger.report(CLIENTS[0], 2, Update(epoch=1, episodes=3, steps=15, ended=ended, scalars=scalars), now=1.0)
    assert problem.value.code == "value" and ledger.totals() == before and len(ledger.ended) == 1
    for sign in (1.0, -1.0):  # the largest return that the ledger accepts
        number = 2 + (sign < 0)
        update = Update(epoch=1, episodes=number, ended=[Ended(number, 1.0, 5, sign * MAX_RETURN)])
        ledger.report(CLIENTS[0], 2 + number, update, now=1.0)
    assert ledger.totals().returns_count == 3 and math.isfinite(ledger.totals().returns_sum)


# --- Merged totals against a slow model: rows from any server, repeated and in any order

CLIENTS_ACCOUNTS = [bytes([n]) * 15 + b"\0" for n in range(4)]
HOMES = [name_hash(name) for name in ("a", "b", "c")]
moves = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 5), st.integers(0, 90), st.booleans()), max_size=25
)


class Model:
    """Clients that move between servers, counted twice: exactly, and in each server's ledger."""

    def __init__(self):
        self.ledgers = {home: Ledger(epoch=1) for home in HOMES}
        self.sums = {client: [0, 0] for client in CLIENTS_ACCOUNTS}
        self.caches = dict.fromkeys(HOMES, 0)
        self.pushed = {}
        self.sequence = 0
        self.tables = []

    def step(self, who, where, episodes, steps, is_kept):
        client, home = CLIENTS_ACCOUNTS[who], HOMES[where]
        ledger = self.ledgers[home]
        self.sequence += 1
        sums = self.sums[client]
        sums[0] += episodes
        sums[1] += steps
        caches = self.pushed[client, home] = self.pushed.get((client, home), 0) + 1
        ended = [Ended(sums[0], 0.0, steps, float(steps))] if episodes else []
        update = Update(epoch=1, episodes=sums[0], steps=sums[1], caches=caches, cache_bytes=100 * caches, ended=ended)
        account = ledger.report(client, self.sequence, update, now=float(self.sequence))
        ledger.count_accepted_cache(ledger.count_arrived_cache(client, 100, 1.0, caches, 100 * caches), 100, 10)
        if is_kept:
            self.tables.append(self.table(home))
        return account

    def table(self, home):
        return merge.merge(merge.rows_of(merge.row_of(account, home) for account in self.ledgers[home]))


@settings(max_examples=50)
@given(moves, st.randoms(use_true_random=False))
def test_merged_totals_are_what_clients_did_wherever_and_however_often_it_was_counted(history, rng):
    model = Model()
    for step in history:
        model.step(*step)
    tables = [*model.tables, *model.tables, *map(model.table, HOMES)]  # old tables twice, and the present tables
    rng.shuffle(tables)
    rows = merge.merge(*tables)
    totals = merge.totals_of(rows)
    heard = {CLIENTS_ACCOUNTS[who] for who, *_ in history}
    assert totals.clients == len(heard)
    assert totals.episodes == sum(model.sums[client][0] for client in heard)
    assert totals.steps == sum(model.sums[client][1] for client in heard)
    assert totals.pushed_caches == totals.accepted_caches == sum(model.pushed.values())
    assert totals.returns_count == sum(len(ledger.ended) for ledger in model.ledgers.values())
    assert totals.returns_sum == sum(ended.returned for ledger in model.ledgers.values() for _, ended in ledger.ended)
    again = merge.merge(rows, rows, *tables[:3])
    np.testing.assert_array_equal(again, rows)
    assert [merge.key_of(row) for row in rows] == sorted(merge.key_of(row) for row in rows)
    clients = merge.by_client(rows)
    assert {row["client"].tobytes(): (row["episodes"], row["steps"]) for row in clients} == {
        client: tuple(model.sums[client]) for client in heard
    }


@settings(max_examples=20)
@given(st.integers(0, 2500), st.integers(0, 2500))
def test_pages_have_every_row_once_in_order(rows, start):
    table = np.zeros(rows, ACCOUNT)
    table["client"][:, 0] = np.random.default_rng(1).permutation(rows)
    table["home"] = 5
    table = merge.merge(table)
    after, got = b"", []
    while True:
        part, more = merge.page(table, after)
        got.extend(part["client"][:, 0].tolist())
        assert len(part.tobytes()) <= 2**18
        if not more:
            break
        after = merge.key_of(part[-1])
    assert got == table["client"][:, 0].tolist()
    middle, _ = merge.page(table, merge.key_of(table[start]) if start < rows else b"\xff" * 32)
    assert len(middle) == max(0, min(merge.PAGE_ROWS, rows - start - 1))


# --- Changes are saved in groups, and each reply waits until its own group is saved


def test_replies_that_wait_are_bounded():
    journal = UnsavedChanges()
    for number in range(MAX_WAITING + 3):
        journal.wait(number, number)
    assert journal.given_up == 3 and journal.take().tickets[0] == 3


# --- Lines are accepted once, in order, and no message forges a line of the file

ALICE, BOB = b"a" * 16, b"b" * 16


def line(number, text="text"):
    return Line(number=number, time=1.0, label=7, text=text)


def test_a_line_of_the_file_has_the_documented_form():
    written = format_line(1_700_000_000.25, 0xBEEF, "step 3, loss 0.5")
    assert written == "2023-11-14T22:13:20.250000+00:00,0000beef,step 3, loss 0.5\n"
    time, _, rest = written.partition(",")
    assert datetime.fromisoformat(time).timestamp() == 1_700_000_000.25
    assert rest == "0000beef,step 3, loss 0.5\n"


@given(st.text())
def test_every_message_is_one_line(text):
    written = format_line(0.0, 1, text)
    assert len(written.splitlines()) == 1
    assert "\x1b" not in written and "\x00" not in written
    written.encode()


@pytest.mark.parametrize(("text", "escaped"), [("a\nb\r", "a\\nb\\r"), ("\x1b[2J", "\\x1b[2J"), ("\u2028", "\\u2028")])
def test_line_breaks_and_control_characters_are_escaped(text, escaped):
    assert escape(text) == escaped


@given(st.lists(st.integers(0, 30), max_size=20))
def test_each_line_is_taken_once_however_often_it_is_sent(acknowledged):
    book, outbox, taken = Logbook(), LineOutbox(most_lines=1000, most_bytes=1 << 20, line_bytes=100), []
    for count, through in enumerate(acknowledged):
        outbox.add(f"line {count}", 7, 0.0)
        newest = taken[-1].line.number if taken else 0
        taken += book.take(ALICE, outbox.next_lines(1000, 10_000), newest, now=2.0)
        outbox.acknowledge(min(through, taken[-1].line.number))
    assert [entry.line.number for entry in taken] == list(range(1, len(acknowledged) + 1))
    assert [entry.index for entry in taken] == list(range(1, book.count + 1))


def test_lines_of_all_clients_are_numbered_in_the_order_in_which_they_came():
    book = Logbook()
    book.take(ALICE, [line(1), line(2)], 0, now=1.0)
    taken = book.take(BOB, [line(1)], 0, now=1.0)
    taken += book.take(ALICE, [line(2), line(3)], 2, now=1.0)
    assert [(entry.client, entry.line.number, entry.index) for entry in taken] == [(BOB, 1, 3), (ALICE, 3, 4)]


def test_recent_lines_are_bounded_and_read_from_an_index():
    book = Logbook(keep=3)
    book.take(ALICE, [line(n, str(n)) for n in range(1, 6)], 0, now=1.0)
    assert [entry.line.text for entry in book.recent()] == ["3", "4", "5"]
    assert [entry.line.text for entry in book.recent(after=4)] == ["5"]
    assert [entry.line.text for entry in book.recent(most=2)] == ["4", "5"]


def test_a_reply_waits_also_when_nothing_else_does_and_a_resend_replaces_it():
    journal = UnsavedChanges()
    journal.wait("a", 1)
    journal.wait("b", 2)
    journal.wait("a", 3)
    group = journal.take()
    assert group.is_empty and group.tickets == [2, 3]
