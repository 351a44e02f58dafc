"""Priorities that learners set: applied here, or kept for their owners, and counted if they are lost."""

import numpy as np
import pytest

from fake_store import Disk
from memoire.errors import ParameterError
from memoire.replay.batch import ID
from memoire.server.handlers.feedback import FEEDBACK_PER_REPLY, FEEDBACK_SAMPLES, FeedbackHandler, by_client
from memoire.wire import messages, pack, unpack
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


def fetched(handler, state, through=0, client=ME):
    """(number, entry numbers) of what waits for a client."""
    found = handler.fetch(state.tables.first, state.ledger.find(client), through, NOW)
    if found is None:
        return None
    number, payload = found
    return number, unpack.read_feedback(payload, SCHEMA)[client][0].tolist()


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


def test_priorities_wait_for_their_owner_until_it_has_applied_them(state):
    handler = FeedbackHandler(state)
    assert fetched(handler, state) is None
    assert handler.apply([piece(), piece(first=3, samples=1)]) == (0, 0, 4, 0)
    assert fetched(handler, state) == fetched(handler, state) == (2, [0, 1, 2, 3])
    assert state.ledger.find(ME).waiting_feedback == 4
    handler.apply([piece(first=7, samples=1)])
    assert fetched(handler, state, through=2) == (3, [7])
    assert fetched(handler, state, through=3) is None and state.ledger.find(ME).waiting_feedback == 0
    assert (handler.given, handler.lost) == (5, 0)


def test_those_of_clients_that_are_not_here_are_lost(state):
    handler = FeedbackHandler(state)
    state.ledger.greet(YOU, NOW)
    assert handler.apply([piece(YOU), piece(READER, 1)]) == (0, 0, 0, 4), "a guest has recorded nothing"
    state.ledger.report(ME, 2, messages.Update(steps=5, leaving=True), NOW)
    assert handler.apply([piece()]) == (0, 0, 0, 3)
    assert (handler.given, handler.lost) == (7, 7) and state.ledger.totals().lost_feedback == 0


def test_the_oldest_that_nobody_fetches_are_lost_and_counted(state):
    handler = FeedbackHandler(state)
    part, large = FEEDBACK_SAMPLES // 2, FEEDBACK_SAMPLES + 100
    assert [handler.apply([piece(samples=part)]).lost for _ in range(4)] == [0, 0, part, part]
    assert handler.apply([piece(samples=large)]).lost == 2 * part, "the newest piece stays, however large"
    assert state.ledger.find(ME).waiting_feedback == large and handler.lost == 4 * part
    assert state.ledger.totals().lost_feedback == 4 * part
    state.ledger.check_invariants()


def test_one_reply_brings_a_bounded_number(state):
    handler = FeedbackHandler(state)
    half = FEEDBACK_PER_REPLY // 2
    handler.apply([piece(samples=half), piece(samples=half), piece(samples=1)])
    number, numbers = fetched(handler, state)
    assert (number, len(numbers)) == (2, 2 * half)
    assert fetched(handler, state, through=2) == (3, [0])
    handler.apply([piece(samples=2 * FEEDBACK_PER_REPLY)])
    assert len(fetched(handler, state, through=3)[1]) == 2 * FEEDBACK_PER_REPLY, "a piece is never cut"


def test_what_is_given_up_is_counted_for_its_client_and_saved():
    disk = Disk()
    state = state_of(store=store_of(disk))
    for client in (ME, YOU):
        state.ledger.report(client, 1, messages.Update(steps=5), NOW)
    save(state, disk)
    handler = FeedbackHandler(state)
    handler.apply([piece(), piece(YOU, 2)])
    assert state.committer.is_saved("run", ME), "what waits is in memory alone"
    handler.give_up(state.run, ME)
    handler.give_up(state.run, ME)
    assert handler.lost == 3 and not state.committer.is_saved("run", ME) and state.committer.is_saved("run", YOU)
    handler.give_up_all(state.run)
    assert handler.lost == 5 and state.ledger.totals().lost_feedback == 5
    state.ledger.check_invariants()


def test_nothing_is_lost_with_a_client_that_has_applied_everything(state):
    handler = FeedbackHandler(state)
    handler.apply([piece()])
    assert fetched(handler, state, through=1) is None
    handler.give_up(state.run, ME)
    assert handler.lost == 0


def test_a_client_that_no_ledger_knows_any_more_has_nothing_to_count(state):
    handler = FeedbackHandler(state)
    handler.apply([piece()])
    state.runs.begin("next", NOW)
    handler.give_up(state.run, ME)
    assert handler.lost == 0


def test_entries_of_the_server_itself_are_set_in_its_pool(state):
    handler, pool = FeedbackHandler(state), state.tables["whole"].pool
    assert handler.apply([piece(pool.owner)]) == (0, 3, 0, 0)
    assert pool.stats().stale == 3, "it has no such entries"


def test_priorities_come_from_far_away_too(state):
    handler = FeedbackHandler(state)
    payload = pack.pack_feedback(SCHEMA, ids_of(ME, ME, YOU), np.ones(3, np.float32))
    told = ask(handler.feedback, messages.Feedback(), READER, payload=payload).body
    assert (told.samples, told.lost, told.parameters_version) == (2, 1, 1)
    assert fetched(handler, state) == (1, [0, 1]) and handler.given == 3
