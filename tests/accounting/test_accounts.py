"""Merged totals against a slow model: whatever rows come, from whomever, how often and how old."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.accounting import merge
from memoire.accounting.account import Account
from memoire.accounting.ledger import Ledger
from memoire.wire.frames import name_hash
from memoire.wire.messages import Ended, Update
from memoire.wire.rows import ACCOUNT

CLIENTS = [bytes([n]) * 15 + b"\0" for n in range(4)]
HOMES = [name_hash(name) for name in ("a", "b", "c")]
moves = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 5), st.integers(0, 90), st.booleans()), max_size=25
)


class Model:
    """Clients that do things and move between servers, counted twice: truly, and by each server's ledger."""

    def __init__(self):
        self.ledgers = {home: Ledger(epoch=1) for home in HOMES}
        self.sums = {client: [0, 0] for client in CLIENTS}
        self.caches = dict.fromkeys(HOMES, 0)
        self.pushed = {}
        self.sequence = 0
        self.tables = []

    def step(self, who, where, episodes, steps, is_kept):
        client, home = CLIENTS[who], HOMES[where]
        ledger = self.ledgers[home]
        self.sequence += 1
        sums = self.sums[client]
        sums[0] += episodes
        sums[1] += steps
        caches = self.pushed[client, home] = self.pushed.get((client, home), 0) + 1
        ended = [Ended(sums[0], 0.0, steps, float(steps))] if episodes else []
        update = Update(epoch=1, episodes=sums[0], steps=sums[1], caches=caches, cache_bytes=100 * caches, ended=ended)
        account = ledger.report(client, self.sequence, update, now=float(self.sequence))
        ledger.accepted(ledger.arrived(client, 100, 1.0, caches, 100 * caches), 100, 10)
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
    tables = [*model.tables, *model.tables, *map(model.table, HOMES)]  # old ones, doubled, and the present ones
    rng.shuffle(tables)
    rows = merge.merge(*tables)
    totals = merge.totals_of(rows)
    heard = {CLIENTS[who] for who, *_ in history}
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


def test_one_server_alone_has_the_totals_of_its_ledger():
    ledger = Ledger(epoch=1)
    for number, client in enumerate(CLIENTS):
        update = Update(epoch=1, episodes=number, steps=9, generated_bytes=7, skipped=1, dropped_lines=2, leaving=True)
        ledger.report(client, 1, update, now=1.0)
        account = ledger.arrived(client, 10, 1.0, 3, 30)
        ledger.accepted(account, 10, 5)
        ledger.rejected(ledger.arrived(client, 10, 1.0, 5, 50), "size")
    rows = merge.rows_of(merge.row_of(account, HOMES[0]) for account in ledger)
    assert merge.totals_of(rows) == ledger.totals()


def test_no_rows_are_no_totals():
    assert merge.totals_of(merge.merge()) == Ledger().totals()
    assert merge.page(merge.merge(), b"") == (pytest.approx([]), False)


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


def test_huge_counts_add_up_exactly():
    table = np.zeros(3000, ACCOUNT)
    table["client"][:, 0] = range(3000)
    table["steps"] = 2**53 - 1
    assert merge.totals_of(table).steps == 3000 * (2**53 - 1)


def test_an_account_that_says_goodbye_anywhere_is_gone():
    gone = Account(CLIENTS[0], 0.0, 0.0, report=Update(leaving=True))
    table = merge.rows_of([merge.row_of(gone, HOMES[0]), merge.row_of(Account(CLIENTS[0], 1.0, 2.0), 7)])
    assert (merge.totals_of(table).clients, merge.totals_of(table).gone) == (1, 1)
