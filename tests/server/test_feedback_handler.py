"""Priorities that learners set: applied here, or kept for their owners, and counted if they are lost."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_store import Disk
from interrupts import everywhere
from memoire.accounting.account import FeedbackCounts
from memoire.errors import ParameterError
from memoire.replay.batch import ID
from memoire.server.handlers.accounts import (
    FEEDBACK_SAMPLES,
    MERGED_SAMPLES,
    FeedbackHandler,
    Merge,
    _Errors,
    by_client,
)
from memoire.wire import containers as pack
from memoire.wire import containers as unpack
from memoire.wire import messages
from netkit import SCHEMA
from serverkit import ME, NOW, READER, YOU, ask, save, state_of, store_of

pytestmark = pytest.mark.usefixtures("without_io")


@pytest.fixture
def state():
    made = state_of()
    made.ledger.report(ME, 1, messages.Update(steps=5), NOW)
    return made


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
    for merge in handler.merges():
        merge.work()
        handler.merged(merge)


def fetched(handler, state, through=0, client=ME):
    """(number, entry numbers) of what waits for a client."""
    found = handler.fetch(state.tables.first, state.ledger.find(client), through, NOW)
    if found is None:
        return None
    return found.number, unpack.read_feedback(found.payload, SCHEMA)[client][0].tolist()


def test_priorities_are_sorted_by_the_client_that_owns_the_entry():
    found = by_client(ids_of(YOU, ME, YOU, ME), [1.0, 2.0, 3.0, 4.0])
    told = {client: (numbers.tolist(), errors.tolist()) for client, numbers, errors in found}
    assert told == {ME: ([1, 3], [2.0, 4.0]), YOU: ([0, 2], [1.0, 3.0])}
    assert by_client(ids_of(), []) == []
    [(client, numbers, errors)] = by_client(ids_of(ME, ME, ME), [3.0, 1.0, 2.0])  # of one client, as they came
    assert (client, numbers.tolist(), errors.tolist()) == (ME, [0, 1, 2], [3.0, 1.0, 2.0])
    for wrong in ([1.0], [1.0, np.nan]):
        with pytest.raises(ParameterError):
            by_client(ids_of(ME, YOU), wrong)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=120))
def test_clients_come_in_the_order_of_their_ids_however_many_there_are(words):
    ids = np.zeros(len(words), ID)
    for number, client in enumerate(words):
        ids[number]["client"], ids[number]["number"] = client, number
    expected = [[number for number, each in enumerate(words) if each == client] for client in sorted(set(words))]
    assert [numbers.tolist() for _, numbers, _ in by_client(ids, np.zeros(len(ids)))] == expected
    assert [client for client, _, _ in by_client(ids, np.zeros(len(ids)))] == [
        np.array(client, "<u8").tobytes() for client in sorted(set(words))
    ]


def test_priorities_wait_for_their_owner_until_it_has_applied_them(state):
    handler = FeedbackHandler(state)
    assert fetched(handler, state) is None
    assert handler.apply([piece(), piece(first=3, samples=1)], NOW) == (0, 0, 4, 0)
    assert fetched(handler, state) == fetched(handler, state) == (1, [0, 1, 2, 3])
    handler.apply([piece(first=7, samples=1)], NOW)
    assert fetched(handler, state) == (1, [0, 1, 2, 3]), "what was sent is sent again as it was"
    assert feedback_of(state) == FeedbackCounts(given=5, waiting=5)
    state.ledger.report(ME, 2, messages.Update(steps=5, applied=1, stale=3, gone=2), NOW)
    assert fetched(handler, state, through=1) == (2, [7])
    assert feedback_of(state) == FeedbackCounts(given=5, applied=1, gone=2, stale=1, waiting=1)
    assert fetched(handler, state, through=2) is None and feedback_of(state).stale == 2, "it could not be used"
    assert (handler.given, handler.lost) == (5, 0)


def test_those_of_clients_that_are_not_here_are_lost(state):
    handler = FeedbackHandler(state)
    state.ledger.greet(YOU, NOW)
    assert handler.apply([piece(YOU), piece(READER, 1)], NOW) == (0, 0, 0, 4), "a guest has recorded nothing"
    state.ledger.report(ME, 2, messages.Update(steps=5, leaving=True), NOW)
    assert handler.apply([piece()], NOW) == (0, 0, 0, 3)
    assert (handler.given, handler.lost) == (7, 7) and state.ledger.totals().lost_feedback == 3
    assert state.ledger.unknown_feedback == FeedbackCounts(given=4, lost=4)
    state.ledger.check_invariants()


def test_the_newest_of_an_entry_stays_and_what_was_sent_is_not_dropped(state):
    handler, half = FeedbackHandler(state), MERGED_SAMPLES // 2
    handler.apply([(ME, np.arange(half), np.zeros(half, np.float32))], NOW)
    assert fetched(handler, state)[0] == 1
    for value in (1.0, 2.0, 3.0):
        handler.apply([(ME, np.arange(half), np.full(half, value, np.float32))], NOW)
    merged(handler)
    assert feedback_of(state) == FeedbackCounts(given=4 * half, superseded=2 * half, waiting=2 * half)
    assert fetched(handler, state) == (1, [*range(half)])
    found = handler.fetch(state.tables.first, state.ledger.find(ME), 1, NOW + 2.5)
    numbers, errors = unpack.read_feedback(found.payload, SCHEMA)[ME]
    assert (found.number, found.age, found.waiting) == (2, 2.5, 0)
    assert numbers.tolist() == [*range(half)] and set(errors.tolist()) == {3.0}
    state.ledger.check_invariants()


def test_what_was_sent_while_it_was_merged_is_left_alone(state):
    handler, few = FeedbackHandler(state), MERGED_SAMPLES // 2 + 1
    for _ in range(2):
        handler.apply([piece(samples=few)], NOW)
    [merge] = handler.merges()
    merge.work()
    assert fetched(handler, state)[0] == 1
    handler.merged(merge)
    assert feedback_of(state) == FeedbackCounts(given=2 * few, waiting=2 * few)


def test_those_that_wait_longest_are_lost_where_too_many_wait(state):
    handler = FeedbackHandler(state)
    handler.apply([piece(samples=FEEDBACK_SAMPLES), piece(first=FEEDBACK_SAMPLES, samples=100)], NOW)
    merged(handler)
    assert feedback_of(state) == FeedbackCounts(given=FEEDBACK_SAMPLES + 100, lost=100, waiting=FEEDBACK_SAMPLES)
    assert handler.overflowed == handler.lost == 100 and fetched(handler, state)[1][0] == 100
    state.ledger.check_invariants()


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(5, 15), max_size=9), min_size=1, max_size=5))
def test_of_each_entry_the_newest_stays_in_the_place_of_the_oldest(numbers):
    count = sum(map(len, numbers))
    errors = np.arange(count, dtype=np.float32)
    pieces, expected, at = [], {}, 0  # a dictionary keeps the place of a key whose value changes
    for piece in filter(None, numbers):
        mine = errors[at : at + len(piece)]
        pieces.append(_Errors(np.array(piece, np.int64), mine, mine.astype(np.float64)))
        expected |= dict(zip(piece, mine.tolist(), strict=True))
        at += len(piece)
    if pieces:
        (merge := Merge(ME, pieces)).work()
        found = dict(zip(merge.result.numbers.tolist(), merge.result.errors.tolist(), strict=True))
        assert list(found.items()) == list(expected.items()) and len(merge.result) == len(expected)
        assert merge.result.given.tolist() == list(expected.values())


@pytest.mark.parametrize("entries", [10**7, 2 * MERGED_SAMPLES])
def test_never_more_wait_than_may_whether_entries_come_again_or_not(state, entries):
    """Those of entries that come again are superseded; then none is lost."""
    handler, size, given = FeedbackHandler(state), MERGED_SAMPLES // 3, 0
    while given < 3 * FEEDBACK_SAMPLES:
        handler.apply([(ME, np.arange(given, given + size) % entries, np.zeros(size, np.float32))], NOW)
        merged(handler)
        given += size
        assert feedback_of(state).waiting <= min(FEEDBACK_SAMPLES, 3 * entries)
    counts = feedback_of(state)
    assert counts.is_balanced and (counts.lost > 0) == (counts.superseded == 0) == (entries > FEEDBACK_SAMPLES)
    assert handler.overflowed == counts.lost == handler.lost


def test_that_a_client_does_not_keep_up_is_one_warning_a_minute(state):
    handler, times = FeedbackHandler(state), []
    for second in range(0, 190, 10):
        handler.apply([piece(samples=FEEDBACK_SAMPLES // 2, first=second * FEEDBACK_SAMPLES)], NOW + second)
        merged(handler)
        if said := handler.warning(NOW + second):
            times.append((second, int(said.partition(" ")[0])))
    assert [second for second, _ in times] == [20, 90, 160]
    rest = int(handler.warning(NOW + 300).partition(" ")[0])
    assert sum(count for _, count in times) + rest == handler.overflowed == feedback_of(state).lost
    assert not handler.warning(NOW + 1000), "nothing was dropped since"


def test_a_reply_brings_half_of_the_longest_request_and_says_how_much_is_left(state):
    handler, most = FeedbackHandler(state), state.limits.request_bytes // 2
    handler.apply([piece(samples=100_000)], NOW)
    through = left = 0
    while (found := handler.fetch(state.tables.first, state.ledger.find(ME), through, NOW)) is not None:
        size = found.payload.nbytes
        assert size <= most and (not found.waiting or size > most * 0.9)
        through, left = found.number, found.waiting
    assert left == 0 and through == 4 and feedback_of(state).waiting == 0


def test_what_is_given_up_is_counted_for_its_client_and_saved():
    disk = Disk()
    state = state_of(store=store_of(disk))
    for client in (ME, YOU):
        state.ledger.report(client, 1, messages.Update(steps=5), NOW)
    save(state, disk)
    handler = FeedbackHandler(state)
    handler.apply([piece(), piece(YOU, 2)], NOW)
    save(state, disk)
    handler.give_up(state.run, ME)
    handler.give_up(state.run, ME)
    assert handler.lost == 3 and not state.committer.is_saved("run", ME) and state.committer.is_saved("run", YOU)
    handler.give_up_all(state.run)
    assert handler.lost == 5 and state.ledger.totals().lost_feedback == 5
    state.ledger.check_invariants()


def test_nothing_is_lost_with_a_client_that_has_applied_everything(state):
    handler = FeedbackHandler(state)
    handler.apply([piece()], NOW)
    assert fetched(handler, state)[0] == 1
    assert fetched(handler, state, through=1) is None
    handler.give_up(state.run, ME)
    assert handler.lost == 0


def test_a_client_that_no_ledger_knows_any_more_has_nothing_to_count(state):
    handler = FeedbackHandler(state)
    handler.apply([piece()], NOW)
    state.runs.begin("next", NOW)
    handler.give_up(state.run, ME)
    assert handler.lost == 0


def test_entries_of_the_server_itself_are_set_in_its_pool(state):
    handler, pool = FeedbackHandler(state), state.tables["whole"].pool
    assert handler.apply([piece(pool.owner)], NOW) == (0, 3, 0, 0)
    assert pool.stats().stale == 3, "it has no such entries"


def test_priorities_come_from_far_away_too(state):
    handler = FeedbackHandler(state)
    payload = pack.pack_feedback(SCHEMA, ids_of(ME, ME, YOU), np.ones(3, np.float32))
    told = ask(handler.feedback, messages.Feedback(), READER, payload=payload).body
    assert (told.samples, told.lost, told.parameters_version) == (2, 1, 1)
    assert fetched(handler, state) == (1, [0, 1]) and handler.given == 3


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
        while (found := fetched(handler, state, through)) is not None:
            through, waiting = found[0], waiting - len(found[1])
        assert waiting == 0, place
