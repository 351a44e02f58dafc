"""How much a client may have on the way: its part of what all together may have."""

import pytest

from memoire.limits import Limits
from memoire.pool.tables import Table
from memoire.replay.limiter import NO_LIMIT
from memoire.replay.parameters import Parameters
from memoire.server.credit import Credits
from memoire.wire import messages
from memoire.wire.identity import table_number
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
    assert credits.grant(state.tables.first, ME, NOW) == (10, "")
    assert credits.grant(state.tables.first, YOU, NOW) == (10, "")
    assert credits.grant(state.tables["free"], ME, NOW) == (NO_LIMIT, "")
