"""Pages of accounts, and those that drained servers bring."""

import numpy as np
import pytest

from fake_store import Disk
from memoire.accounting.ledger import SILENCE_TIMEOUT
from memoire.accounting.merge import key_of
from memoire.errors import ProtocolError
from memoire.server.handlers.accounts import MAX_ACCOUNT_READINGS, AccountsHandler
from memoire.wire import messages
from memoire.wire.rows import ACCOUNT, unpack_accounts
from serverkit import NOW, READER, YOU, Ends, ask, save, state_of, store_of

pytestmark = pytest.mark.usefixtures("without_io")


@pytest.fixture
def state():
    return state_of()


def count(state, clients, steps=1):
    for number in range(clients):
        state.ledger.report(bytes([number + 1]) * 16, 1, messages.Update(steps=steps), NOW)


def page(handler, reader=READER, **facts):
    return ask(handler.page, messages.Ledger(**facts), reader).body


def rows_of(number, steps=5):
    rows = np.zeros(number, ACCOUNT)
    rows["client"][:, 0], rows["home"], rows["steps"] = range(number), 7, steps
    return rows


def bring(handler, rows, name="run", finished=False):
    body = messages.Inherit(run_name=name, accounts=rows.tobytes(), finished=finished)
    return ask(handler.bring, body, YOU, now=NOW)


def test_a_page_says_what_there_is_to_say_of_the_run(state):
    count(state, 2, steps=3)
    told = page(AccountsHandler(state))
    rows = unpack_accounts(told.accounts)
    assert (told.run_name, told.epoch, told.finished, told.durable, told.time) == ("run", 7, False, False, NOW)
    assert (told.runs, told.more, rows["steps"].tolist()) == (["run"], False, [3, 3])
    assert page(AccountsHandler(state), run="run").accounts == told.accounts
    with pytest.raises(ProtocolError, match="knows no run 'never'") as caught:
        page(AccountsHandler(state), run="never")
    assert caught.value.code == "run"


def test_priorities_that_pools_applied_belong_to_the_run_that_is_counted(state):
    whole = state.tables["whole"].pool
    whole.apply(whole.owner, np.arange(3), np.ones(3, np.float32))
    assert page(AccountsHandler(state)).stale == 3
    state.runs.begin("next", NOW)
    told = page(AccountsHandler(state), run="run")
    assert (told.stale, told.runs) == (0, ["run", "next"])


def test_the_newest_runs_are_named(state):
    for name in ("two", "three"):
        state.runs.begin(name, NOW)
    assert page(AccountsHandler(state, max_runs=2)).runs == ["two", "three"]


def test_pages_show_the_accounts_as_they_were_with_the_first_one(state):
    handler = AccountsHandler(state, page_rows=2)
    count(state, 5, steps=1)
    found, told = [], page(handler)
    count(state, 6, steps=9)
    while True:
        rows = unpack_accounts(told.accounts)
        found += rows["steps"].tolist()
        if not told.more:
            break
        told = page(handler, after=key_of(rows[-1:]))
    assert found == [1] * 5
    assert unpack_accounts(page(handler).accounts)["steps"].tolist() == [9, 9], "read anew"


def test_readings_are_bounded_and_the_oldest_is_read_anew(state):
    handler = AccountsHandler(state, page_rows=2)
    count(state, 3, steps=1)
    first = unpack_accounts(page(handler).accounts)
    for number in range(MAX_ACCOUNT_READINGS):
        page(handler, bytes([number + 1]) * 16)
    count(state, 3, steps=9)
    after = key_of(first[-1:])
    assert unpack_accounts(page(handler, after=after).accounts)["steps"].tolist() == [9]
    other = page(handler, bytes([2]) * 16, after=after)
    assert unpack_accounts(other.accounts)["steps"].tolist() == [1]


def test_accounts_of_a_drained_server_are_kept_once(state):
    handler = AccountsHandler(state)
    for _ in range(2):
        reply = bring(handler, rows_of(10))
        assert (reply.body.samples, reply.body.finished, reply.until_saved) == (10, False, True)
    count(state, 1, steps=3)
    rows = unpack_accounts(page(handler).accounts)
    assert (len(rows), rows["steps"].sum()) == (11, 53)


def test_a_run_that_was_counted_elsewhere_is_kept_as_a_former_one():
    disk = Disk()
    state = state_of(store=store_of(disk))
    handler = AccountsHandler(state)
    assert bring(handler, rows_of(2), "elsewhere", finished=True).body.finished
    assert page(handler, run="elsewhere").finished and page(handler).runs == ["elsewhere", "run"]
    save(state, disk)
    assert disk.runs["elsewhere"].ended == NOW and disk.saved[0].inherited[0][0] == "elsewhere"


def test_runs_of_other_servers_are_bounded_and_have_names(state):
    handler = AccountsHandler(state, max_former_runs=2)
    bring(handler, rows_of(1), "one")
    bring(handler, rows_of(1), "one")
    for name, code in (("two", "busy"), ("\n", "parameters")):
        with pytest.raises(ProtocolError) as caught:
            bring(handler, rows_of(1), name)
        assert caught.value.code == code


def test_closed_episodes_are_shown_from_a_number_on(state):
    handler = AccountsHandler(state)
    assert handler.ended(0, 5) == ("run", 1, [])
    ended = [messages.Ended(number=number, time=0.0, length=1, returned=float(number)) for number in range(1, 8)]
    state.ledger.report(READER, 1, messages.Update(episodes=7, ended=ended), NOW)
    run, first, found = handler.ended(2, 3)
    assert (run, first, [each.number for _, each in found]) == ("run", 3, [3, 4, 5])
    assert [handler.ended(after, 1)[1] for after in (7, 8)] == [8, 1], "a number of another life says nothing"
    state.ledger.ended = type(state.ledger.ended)(list(state.ledger.ended)[-2:])
    run, first, found = handler.ended(0, 5)
    assert (first, [each.number for _, each in found]) == (6, [6, 7])


def test_a_page_says_how_many_clients_have_counted_nothing_and_may_still_count_here(state):
    handler, ends = AccountsHandler(state), Ends(state)
    ends.hello()
    state.ledger.greet(b"silent" + bytes(10), NOW - SILENCE_TIMEOUT - 1.0)
    assert page(handler).guests == 1
    assert not ends.update().body.leaving
    assert page(handler).guests == 1
    state.leaving = True
    assert ends.update().body.leaving
    assert page(handler).guests == 0  # it was told to go elsewhere
    assert ends.update(steps=1).body.leaving
    assert len(unpack_accounts(page(handler).accounts)) == 1  # what it counts here is counted all the same
