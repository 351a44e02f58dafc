"""Pages of accounts, accounts that leave memory, and priorities that wait for their owners."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_store import Disk
from interrupts import everywhere
from memoire.accounting.account import FeedbackCounts
from memoire.accounting.ledger import SILENCE_TIMEOUT
from memoire.accounting.merge import key_of
from memoire.errors import ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.replay.batch import ID
from memoire.server.handlers.accounts import (
    ERROR,
    FEEDBACK_SAMPLES,
    MAX_ACCOUNT_READINGS,
    MERGED_SAMPLES,
    AccountsHandler,
    FeedbackHandler,
    Merge,
    by_client,
)
from memoire.wire import containers, messages
from memoire.wire.frames import NO_CLIENT, ROUNDTRIP, table_number
from memoire.wire.rows import ACCOUNT, unpack_accounts
from netkit import SCHEMA
from serverkit import ME, NOW, READER, YOU, Ends, ask, message, save, state_of, store_of

pytestmark = pytest.mark.usefixtures("without_io")

# --- Pages of accounts, and accounts that drained servers bring


@pytest.fixture
def state():
    return state_of()


def count(state, clients, steps=1):
    for number in range(clients):
        state.ledger.report(bytes([number + 1]) * 16, 1, messages.Update(steps=steps), NOW)


def page(handler, reader=READER, **facts):
    return ask(handler.page, messages.LedgerRequest(**facts), reader).body


def rows_of(number, steps=5):
    rows = np.zeros(number, ACCOUNT)
    rows["client"][:, 0], rows["home"], rows["steps"] = range(number), 7, steps
    return rows


def bring(handler, rows, name="run", finished=False):
    body = messages.Inherit(run_name=name, accounts=rows.tobytes(), finished=finished)
    return ask(handler.store_drained_accounts, body, YOU, now=NOW)


def test_a_page_says_what_there_is_to_say_of_the_run(state):
    count(state, 2, steps=3)
    body = page(AccountsHandler(state))
    rows = unpack_accounts(body.accounts)
    assert (body.run_name, body.epoch, body.finished, body.durable, body.time) == ("run", 7, False, False, NOW)
    assert (body.runs, body.more, rows["steps"].tolist()) == (["run"], False, [3, 3])
    assert page(AccountsHandler(state), run="run").accounts == body.accounts
    with pytest.raises(ProtocolError, match="knows no run 'never'") as caught:
        page(AccountsHandler(state), run="never")
    assert caught.value.code == "run"


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
    for brought, name, code in ((0, "\n", "parameters"), (2, "two", "busy"), (0, "\n", "parameters")):
        for _ in range(brought):
            bring(handler, rows_of(1), "one")
        with pytest.raises(ProtocolError) as caught:
            bring(handler, rows_of(1), name)
        assert caught.value.code == code


def test_a_page_says_how_many_clients_have_counted_nothing_and_may_still_count_here(state):
    handler, ends = AccountsHandler(state), Ends(state)
    ends.hello()
    state.ledger.register_guest(b"silent" + bytes(10), NOW - SILENCE_TIMEOUT - 1.0)
    assert page(handler).guests == 1
    assert not ends.update().body.leaving
    assert page(handler).guests == 1
    state.leaving = True
    assert ends.update().body.leaving
    assert page(handler).guests == 0  # the client was told to leave
    assert ends.update(steps=1).body.leaving
    assert len(unpack_accounts(page(handler).accounts)) == 1  # the handler keeps steps that the client counts here


# --- Accounts that leave memory

LIMITS = Limits.of(client_timeout=60.0, account_timeout=600.0, new_clients=8, new_clients_rate=1.0)


@pytest.fixture
def ends():
    return Ends(state_of(limits=LIMITS))


def folded(ends, now, **limits):
    """Return the clients that stay in memory after a fold at `now`."""
    AccountsHandler(ends.state, **limits).store_gone_accounts(now, ends.feedback)
    return {account.client for account in ends.state.ledger}


def test_what_is_kept_of_a_client_goes_with_its_account(ends):
    ends.control.finish()
    ends.update(steps=1, finished=True)
    numbers = np.arange(3, dtype=np.int64)
    ends.feedback.apply([(ME, numbers, np.ones(3, np.float32))], NOW)
    assert ends.state.informed == {ME}
    assert folded(ends, NOW + 601.0) == set()
    assert ends.feedback.lost == 3 and ends.state.informed == set() and ends.state.ledger.totals().lost_feedback == 3


def test_a_client_that_is_folded_in_a_former_run_and_present_in_the_next_keeps_its_grant(ends):
    ends.update(steps=1)
    ends.control.begin_run("next", NOW)
    ends.hello(now=NOW + 600.0)
    left = []
    for table in ends.state.tables:
        table.limiter.unregister = left.append
    assert folded(ends, NOW + 601.0) == set() and ends.state.runs.named("run").ledger.stored_count == 1
    assert left == [] and NO_CLIENT not in ends.state.ledger


def test_who_tried_the_way_there_and_back_is_forgotten_when_silent(ends):
    ends.update(table=table_number(ROUNDTRIP), steps=1)
    ends.update(YOU, now=NOW + 50.0, table=table_number(ROUNDTRIP), steps=2)
    folded(ends, NOW + 61.0)
    assert [account.client for account in ends.state.probes] == [YOU]
    assert ends.state.probes.totals().steps == 3


# --- Priorities that learners set: applied by this server, kept for owners, or counted if the priorities are lost


@pytest.fixture
def reported():
    server_state = state_of()
    server_state.ledger.report(ME, 1, messages.Update(steps=5), NOW)
    return server_state


def ids_of(*clients):
    ids = np.zeros(len(clients), ID)
    for number, client in enumerate(clients):
        ids[number]["client"], ids[number]["number"] = np.frombuffer(client, "<u8"), number
    return ids


def piece(client=ME, samples=3, first=0):
    return client, np.arange(first, first + samples, dtype=np.int64), np.full(samples, 0.5, np.float32)


def feedback_of(state, client=ME):
    return state.ledger.find(client).feedback


def merged(handler):
    for merge in handler.due_merges():
        merge.compute()
        handler.apply_merge(merge)


def fetched(handler, state, through=0, client=ME):
    """Return (number, entry numbers) of the feedback that waits for a client, or None."""
    feedback = handler.fetch(state.tables.first, state.ledger.find(client), through, NOW)
    if feedback is None:
        return None
    return feedback.number, containers.read_feedback(feedback.payload, SCHEMA)[client][0].tolist()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=120))
def test_priorities_are_sorted_by_the_client_that_owns_the_entry_and_else_stay_as_they_came(words):
    ids = np.zeros(len(words), ID)
    for number, client in enumerate(words):
        ids[number]["client"], ids[number]["number"] = client, number
    groups = [
        (client, numbers.tolist(), errors.tolist()) for client, numbers, errors in by_client(ids, 0.5 * ids["number"])
    ]
    numbers = {client: [number for number, each in enumerate(words) if each == client] for client in sorted(set(words))}
    expected = [(np.array(client, "<u8").tobytes(), mine, [0.5 * n for n in mine]) for client, mine in numbers.items()]
    assert groups == expected


@pytest.mark.parametrize("wrong", [[1.0], [1.0, np.nan]])
def test_td_errors_that_do_not_fit_their_ids_are_refused(wrong):
    with pytest.raises(ParameterError):
        by_client(ids_of(ME, YOU), wrong)


def test_priorities_wait_for_their_owner_until_it_has_applied_them(reported):
    handler = FeedbackHandler(reported)
    assert fetched(handler, reported) is None
    assert handler.apply([piece(), piece(first=3, samples=1)], NOW) == (0, 0, 4, 0)
    assert fetched(handler, reported) == fetched(handler, reported) == (1, [0, 1, 2, 3])
    handler.apply([piece(first=7, samples=1)], NOW)
    assert fetched(handler, reported) == (1, [0, 1, 2, 3]), "what was sent is sent again as it was"
    assert feedback_of(reported) == FeedbackCounts(given=5, waiting=5)
    reported.ledger.report(ME, 2, messages.Update(steps=5, applied=1, stale=3, gone=2), NOW)
    assert fetched(handler, reported, through=1) == (2, [7])
    assert feedback_of(reported) == FeedbackCounts(given=5, applied=1, gone=2, stale=1, waiting=1)
    assert fetched(handler, reported, through=2) is None and feedback_of(reported).stale == 2, "it could not be used"
    assert (handler.given, handler.lost) == (5, 0)


def test_those_of_clients_that_are_not_here_are_lost(reported):
    handler = FeedbackHandler(reported)
    reported.ledger.register_guest(YOU, NOW)
    assert handler.apply([piece(YOU), piece(READER, 1)], NOW) == (0, 0, 0, 4), "a guest has recorded nothing"
    reported.ledger.report(ME, 2, messages.Update(steps=5, leaving=True), NOW)
    assert handler.apply([piece()], NOW) == (0, 0, 0, 3)
    assert (handler.given, handler.lost) == (7, 7) and reported.ledger.totals().lost_feedback == 3
    assert reported.ledger.unknown_feedback == FeedbackCounts(given=4, lost=4)
    reported.ledger.check_invariants()


def test_the_newest_of_an_entry_stays_and_what_was_sent_is_not_dropped(reported):
    handler, half = FeedbackHandler(reported), MERGED_SAMPLES // 2
    handler.apply([(ME, np.arange(half), np.zeros(half, np.float32))], NOW)
    assert fetched(handler, reported)[0] == 1
    for value in (1.0, 2.0, 3.0):
        handler.apply([(ME, np.arange(half), np.full(half, value, np.float32))], NOW)
    merged(handler)
    assert feedback_of(reported) == FeedbackCounts(given=4 * half, superseded=2 * half, waiting=2 * half)
    assert fetched(handler, reported) == (1, [*range(half)])
    feedback = handler.fetch(reported.tables.first, reported.ledger.find(ME), 1, NOW + 2.5)
    numbers, errors = containers.read_feedback(feedback.payload, SCHEMA)[ME]
    assert (feedback.number, feedback.age, feedback.waiting) == (2, 2.5, 0)
    assert numbers.tolist() == [*range(half)] and set(errors.tolist()) == {3.0}
    reported.ledger.check_invariants()


def test_what_was_sent_while_it_was_merged_is_left_alone(reported):
    handler, few = FeedbackHandler(reported), MERGED_SAMPLES // 2 + 1
    for _ in range(2):
        handler.apply([piece(samples=few)], NOW)
    [merge] = handler.due_merges()
    merge.compute()
    assert fetched(handler, reported)[0] == 1
    handler.apply_merge(merge)
    assert feedback_of(reported) == FeedbackCounts(given=2 * few, waiting=2 * few)


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(5, 15), max_size=9), min_size=1, max_size=5))
def test_of_each_entry_the_newest_stays_in_the_place_of_the_oldest(numbers):
    count = sum(map(len, numbers))
    errors = np.arange(count, dtype=np.float32)
    pieces, expected, at = [], {}, 0  # a dictionary keeps the place of a key whose value changes
    for piece in filter(None, numbers):
        mine = errors[at : at + len(piece)]
        pieces.append(np.array([*zip(piece, mine, mine, strict=True)], ERROR))
        expected |= dict(zip(piece, mine.tolist(), strict=True))
        at += len(piece)
    if pieces:
        (merge := Merge(ME, pieces)).compute()
        newest = dict(zip(merge.result["number"].tolist(), merge.result["error"].tolist(), strict=True))
        assert list(newest.items()) == list(expected.items()) and len(merge.result) == len(expected)
        assert merge.result["given"].tolist() == list(expected.values())


def test_that_a_client_does_not_keep_up_is_one_warning_a_minute(reported):
    handler, times = FeedbackHandler(reported), []
    for second in range(0, 190, 10):
        handler.apply([piece(samples=FEEDBACK_SAMPLES // 2, first=second * FEEDBACK_SAMPLES)], NOW + second)
        merged(handler)
        if text := handler.warning(NOW + second):
            times.append((second, int(text.partition(" ")[0])))
    assert [second for second, _ in times] == [20, 90, 160]
    rest = int(handler.warning(NOW + 300).partition(" ")[0])
    assert sum(count for _, count in times) + rest == handler.overflowed == feedback_of(reported).lost
    assert not handler.warning(NOW + 1000), "nothing was dropped since"


@pytest.mark.parametrize("is_known", [True, False])
def test_nothing_is_lost_with_a_client_that_has_applied_everything_or_that_no_ledger_knows(reported, is_known):
    handler = FeedbackHandler(reported)
    handler.apply([piece()], NOW)
    if is_known:
        assert fetched(handler, reported)[0] == 1
        assert fetched(handler, reported, through=1) is None
    else:
        reported.runs.begin("next", NOW)
    handler.give_up(reported.run, ME)
    assert handler.lost == 0


def test_entries_of_the_server_itself_are_set_in_its_pool(reported):
    handler, pool = FeedbackHandler(reported), reported.tables["whole"].pool
    assert handler.apply([piece(pool.owner)], NOW) == (0, 3, 0, 0)
    assert pool.stats().stale == 3, "it has no such entries"


def test_td_errors_come_from_far_away_too_and_the_answer_says_how_many_are_lost(reported):
    handler = FeedbackHandler(reported)
    payload = containers.pack_feedback(SCHEMA, ids_of(ME, ME, YOU), np.ones(3, np.float32))
    header = message(messages.Feedback(), READER, payload=payload).header
    outcome = handler.feedback_reply(header, handler.apply(handler.read(header, payload), NOW)).body
    assert (outcome.samples, outcome.lost, outcome.parameters_version) == (2, 1, 1)
    assert fetched(handler, reported) == (1, [0, 1]) and handler.given == 3


MANY = FEEDBACK_SAMPLES // 4 + 1
CALLS = {
    "a client that fetches": lambda handler, state: handler.apply([piece()], NOW),
    "too many": lambda handler, state: (handler.apply([piece(samples=2 * MANY, first=2 * MANY)], NOW), merged(handler)),
    "merged": lambda handler, state: merged(handler),
    "unknown": lambda handler, state: handler.apply([piece(YOU)], NOW),
    "leaving": lambda handler, state: (
        state.ledger.report(ME, 2, messages.Update(steps=5, leaving=True), NOW),
        handler.apply([piece()], NOW),
    ),
    "another run": lambda handler, state: handler.give_up_all(state.run),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_td_errors_are_counted_once_wherever_a_call_is_interrupted(name):
    for interrupted in everywhere(every={"unknown": 7, "merged": 2, "too many": 5}.get(name, 1)):
        state = state_of()
        state.ledger.report(ME, 1, messages.Update(steps=5), NOW)
        handler = FeedbackHandler(state)
        samples = MANY if name in ("too many", "merged") else 5
        for first in (0, MANY if name == "too many" else 0):
            handler.apply([piece(samples=samples, first=first)], NOW)
        place = interrupted(functools.partial(CALLS[name], handler, state))
        counts = state.ledger.feedback()
        assert all(each.is_balanced for each in counts.values()), place
        assert handler.given == sum(each.given for each in counts.values()), place
        assert handler.lost == sum(each.lost for each in counts.values()), place
        waiting = counts["clients"].waiting
        through = 0
        while (part := fetched(handler, state, through)) is not None:
            through, waiting = part[0], waiting - len(part[1])
        assert waiting == 0, place
