"""Which accounts leave memory, and when."""

import numpy as np
import pytest

from fake_store import Disk
from memoire.limits import Limits
from memoire.server.handlers.accounts import WARN_INTERVAL, AccountFolder
from memoire.wire.frames import NO_CLIENT, ROUNDTRIP, table_number
from serverkit import ME, NOW, YOU, Ends, save, state_of, store_of

pytestmark = pytest.mark.usefixtures("without_io")

LIMITS = Limits(client_timeout=60.0, account_timeout=600.0, new_clients=8, new_clients_rate=1.0)


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def durable(disk):
    return Ends(state_of(store=store_of(disk), limits=LIMITS))


@pytest.fixture
def ends():
    return Ends(state_of(limits=LIMITS))


def folded(ends, now, **limits):
    """Clients in memory after a look at `now`."""
    AccountFolder(ends.state, ends.feedback, **limits).fold(now)
    return {account.client for account in ends.state.ledger}


def test_accounts_of_clients_that_are_gone_leave_before_silent_ones(ends):
    ends.update(steps=1, leaving=True)
    ends.update(YOU, steps=2)
    assert folded(ends, NOW + 60.0) == {ME, YOU}
    assert folded(ends, NOW + 60.5) == {YOU}
    assert folded(ends, NOW + 600.0) == {YOU} and folded(ends, NOW + 600.5) == set()
    assert ends.state.ledger.folded == 2 and ends.state.ledger.steps == 3
    ends.state.ledger.check_invariants()


def test_in_a_crowd_silent_ones_leave_sooner(ends):
    ends.update(steps=1)
    assert folded(ends, NOW + 61.0, crowd=1) == {ME}
    ends.update(YOU, steps=1, now=NOW + 61.0)
    assert folded(ends, NOW + 61.0) == {ME, YOU}
    assert folded(ends, NOW + 61.0, crowd=1) == {YOU}
    assert ends.state.ledger.folded == 1 and ends.state.ledger.steps == 2


def test_guests_are_forgotten(ends):
    ends.hello()
    folded(ends, NOW + 60.0)
    assert len(ends.state.ledger.guests) == 1
    folded(ends, NOW + 61.0)
    assert ends.state.ledger.guests == []


def test_what_is_kept_of_a_client_goes_with_its_account(ends):
    ends.control.finish()
    ends.update(steps=1, finished=True)
    numbers = np.arange(3, dtype=np.int64)
    ends.feedback.apply([(ME, numbers, np.ones(3, np.float32))], NOW)
    assert ends.state.informed == {ME}
    assert folded(ends, NOW + 601.0) == set()
    assert ends.feedback.lost == 3 and ends.state.informed == set() and ends.state.ledger.totals().lost_feedback == 3


def test_an_account_stays_until_it_is_on_disk(durable, disk):
    durable.update(steps=1)
    assert folded(durable, NOW + 601.0) == {ME}
    save(durable.state, disk)
    assert folded(durable, NOW + 601.0) == set() and durable.state.ledger.find(ME).report.steps == 1


def test_a_former_run_leaves_memory_when_nobody_asks_for_it_and_it_is_on_disk(durable, disk):
    durable.update(steps=1)
    durable.control.begin_run("next", NOW)
    for _ in range(2):
        folded(durable, NOW + 601.0)
    assert [run.name for run in durable.state.runs] == ["run", "next"]
    save(durable.state, disk)
    for _ in range(2):
        folded(durable, NOW + 601.0)
    assert [run.name for run in durable.state.runs] == ["next"]
    assert durable.state.runs.named("run").ledger.steps == 1


def test_the_server_says_when_too_many_new_clients_have_come(ends):
    made = AccountFolder(ends.state, ends.feedback)
    for number in range(6):
        assert made.trouble(NOW) == made.warning(NOW) == ""
        ends.update(bytes([number + 1]) * 16, steps=1)
    told = made.trouble(NOW)
    assert told.startswith("clients: 2 new ones of 8 may still come at once with the same key")
    assert [made.warning(NOW), made.warning(NOW)] == [told, ""], "once for a while"
    assert made.trouble(NOW + 10.0) == ""
    ends.state.newcomers.take("", NOW)
    for _ in range(8):
        ends.state.newcomers.take("", NOW + WARN_INTERVAL)
    assert made.warning(NOW + WARN_INTERVAL) == "" and made.trouble(NOW + WARN_INTERVAL) != ""
    assert made.warning(NOW + WARN_INTERVAL + 0.5) != ""


def test_a_client_that_is_folded_in_a_former_run_and_present_in_the_next_keeps_its_grant(ends):
    ends.update(steps=1)
    ends.control.begin_run("next", NOW)
    ends.hello(now=NOW + 600.0)
    left = []
    for table in ends.state.tables:
        table.limiter.left = left.append
    assert folded(ends, NOW + 601.0) == set() and ends.state.runs.named("run").ledger.folded == 1
    assert left == [] and NO_CLIENT not in ends.state.ledger


def test_who_tried_the_way_there_and_back_is_forgotten_when_silent(ends):
    ends.update(table=table_number(ROUNDTRIP), steps=1)
    ends.update(YOU, now=NOW + 50.0, table=table_number(ROUNDTRIP), steps=2)
    folded(ends, NOW + 61.0)
    assert [account.client for account in ends.state.probes] == [YOU]
    assert ends.state.probes.totals().steps == 3
