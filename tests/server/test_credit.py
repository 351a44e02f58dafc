"""How much a client may have on the way: its part of what all together may have."""

import pytest

from memoire.limits import NO_LIMIT, Limits
from memoire.replay.parameters import Parameters
from memoire.server.state import STOCK_PART, UNDRAWN, Credits
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table
from memoire.wire import messages
from memoire.wire.frames import table_number
from netkit import SCHEMA
from serverkit import ME, NOW, YOU, state_of, tables_of

pytestmark = pytest.mark.usefixtures("without_io")

LIMITS = Limits(credit=1000, on_way_bytes=100_000, client_timeout=60.0)
BAND = Parameters(cache_size=8, samples_per_insert=1.0, samples_per_insert_tolerance=30.0, min_size=0)


@pytest.fixture
def state():
    made = state_of(limits=LIMITS)
    made.tables.first.pool.limit(5000)
    return made


def greet(state, count, now=NOW, table=0):
    for number in range(count):
        state.ledger.greet(bytes([number + 1]) * 16, now, table)


def test_a_client_has_its_limit_while_there_is_enough_for_all(state):
    credits = Credits(state)
    assert credits.of(state.tables.first, NOW) == 1000
    greet(state, 5)
    assert credits.of(state.tables.first, NOW) == 1000
    credits.limit(700)
    credits.limit(None)
    assert credits.of(state.tables.first, NOW) == 700


def test_clients_share_what_their_table_holds(state):
    greet(state, 10)
    assert Credits(state).of(state.tables.first, NOW) == 500
    assert Credits(state).of(state.tables["whole"], NOW) == 1000, "that has none of them"


def test_all_clients_share_what_may_be_on_the_way():
    state = state_of(limits=Limits(credit=10_000, on_way_bytes=20_000))
    greet(state, 10, table=table_number("whole"))
    assert Credits(state).of(state.tables.first, NOW) == 2000


def test_whatever_is_shared_a_client_may_have_a_byte_on_the_way(state):
    credits = Credits(state)
    state.tables.first.pool.limit(1)
    greet(state, 10)
    assert credits.of(state.tables.first, NOW) == 1


def test_clients_that_are_gone_share_no_more_and_silent_ones_are_counted_once_a_second(state):
    credits = Credits(state)
    greet(state, 10)
    assert credits.of(state.tables.first, NOW) == 500
    state.ledger.report(bytes([1]) * 16, 1, messages.Update(leaving=True), NOW)
    assert credits.of(state.tables.first, NOW) == 5000 // 9
    state.ledger.report(bytes([10]) * 16, 1, messages.Update(steps=1, leaving=True), NOW)
    late = NOW + 61.0
    for number in range(1, 8):
        state.ledger.greet(bytes([number + 1]) * 16, late)
    assert credits.of(state.tables.first, late) == 5000 // 7
    state.ledger.greet(bytes([9]) * 16, late)
    assert credits.of(state.tables.first, late + 0.9) == 5000 // 7
    assert credits.of(state.tables.first, late + 1.0) == 5000 // 8


def test_a_clock_that_goes_back_has_clients_counted_again(state):
    credits = Credits(state)
    greet(state, 10, now=NOW - 100.0)
    assert credits.of(state.tables.first, NOW) == 1000, "all are silent"
    assert credits.of(state.tables.first, NOW - 50.0) == 500


def test_another_run_has_its_own_clients(state):
    credits = Credits(state)
    greet(state, 10, now=NOW - 100.0)
    assert credits.of(state.tables.first, NOW) == 1000
    state.runs.begin("next", NOW)
    greet(state, 10)
    assert credits.of(state.tables.first, NOW) == 500


def test_entries_are_granted_to_each_client_of_a_table():
    state = state_of(tables_of(default=Table(SCHEMA, parameters=BAND), free=Table(SCHEMA)))
    credits = Credits(state)
    greet(state, 3)
    assert credits.grant(state.tables.first, ME, 0, NOW) == (10, "")
    assert credits.grant(state.tables.first, YOU, 0, NOW) == (10, "")
    assert credits.grant(state.tables["free"], ME, 0, NOW) == (NO_LIMIT, "")


class Stocked(Pool):
    """A pool that says how many samples it wants of a client, and keeps what it was asked with."""

    def room(self, client_id, stock_bytes):
        self.asked = client_id, stock_bytes
        return self.wanted


@pytest.fixture
def stocked():
    parameters = BAND.replace(samples_per_insert=0.5, samples_per_insert_tolerance=None)
    made = state_of(tables_of(default=Table(SCHEMA, parameters=parameters)), limits=LIMITS)
    table = made.tables.first
    table.pool = table.sums = Stocked(SCHEMA, table.parameters)
    return table, Credits(made)


def test_a_client_whose_samples_are_not_drawn_is_granted_no_more_than_learners_want(stocked):
    table, credits = stocked
    table.pool.wanted = 5
    assert credits.grant(table, ME, 100, NOW) == (110, "") and table.pool.asked == (ME, 1000 // STOCK_PART)
    table.pool.wanted = 0
    assert credits.grant(table, ME, 110, NOW) == (110, UNDRAWN)


def test_the_smaller_of_two_grants_holds(stocked):
    table, credits = stocked
    table.limiter.configure(table.parameters.replace(samples_per_insert_tolerance=30.0))
    table.limiter.met(ME, 1000, 1)
    table.pool.wanted = 5
    assert credits.grant(table, ME, 1000, NOW) == (1010, "")
    table.pool.wanted = 500
    assert credits.grant(table, ME, 1000, NOW) == (1060, ""), "30 samples, half of one for each entry"
    table.pool.wanted = None
    assert credits.grant(table, ME, 1000, NOW) == (1060, "")
