"""How far recording may run ahead of drawing, as a client keeps to it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire._core import at_once
from memoire.client.counts import MIN_PAUSE, InsertGrant, LineOutbox, PushWindow, RunCounts
from memoire.client.session import UpdateSchedule
from memoire.limits import NO_LIMIT

pytestmark = pytest.mark.usefixtures("without_io")


def recorded(inserts, counts, entries):
    at_once(counts.recording(entries, 1))
    at_once(inserts.recording(entries))


def admit(inserts, entries):
    admitted = inserts.admitted(entries)
    at_once(inserts.settling(admitted, admitted))
    return admitted


def slow_client():
    """What is granted and when to report, of a client that reports once a minute; and what says when it is due."""
    outbox, window = LineOutbox(most_lines=10, most_bytes=1000, line_bytes=100), PushWindow(1000)
    inserts, schedule = InsertGrant(RunCounts(), 60.0), UpdateSchedule(60.0, random.Random(1))
    return inserts, schedule, lambda: schedule.due(outbox, window, inserts)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=30))
def test_no_more_is_inserted_than_was_granted_and_the_rest_is_passed(history):
    counts = RunCounts()
    inserts = InsertGrant(counts, 1.0)
    granted = inserted = total = 0
    inserts.grant(0, "learners are behind")
    for entries, more, is_settled in history:
        recorded(inserts, counts, entries)
        total += entries
        granted += more
        inserts.grant(granted, "")
        admitted = admit(inserts, entries)
        assert admitted == min(entries, granted - inserted)
        inserted += admitted
        if is_settled:
            at_once(inserts.settling(entries - admitted, 0))
        assert (counts.inserted, counts.passed) == (inserted, total - inserted)
        assert inserts.left == granted - inserted >= 0


def test_nothing_is_held_back_until_a_home_says_so():
    counts = RunCounts()
    inserts = InsertGrant(counts, 1.0)
    recorded(inserts, counts, 1000)
    assert admit(inserts, 1000) == 1000 and counts.passed == 0
    assert (inserts.left, inserts.held_back, inserts.is_half_used) == (NO_LIMIT, "", False)
    inserts.grant(900, "learners are behind")
    assert (inserts.left, inserts.held_back) == (-100, "learners are behind")
    recorded(inserts, counts, 5)
    assert admit(inserts, 5) == 0 and counts.passed == 5


def test_more_is_asked_for_once_half_of_the_newest_grant_is_used():
    counts = RunCounts()
    inserts = InsertGrant(counts, 1.0)
    inserts.grant(0, "wait")
    inserts.grant(100, "")
    for entries, is_half_used in ((50, False), (1, True), (48, True), (1, False)):  # nothing left: whoever waits asks
        recorded(inserts, counts, entries)
        assert admit(inserts, entries) == entries
        assert inserts.is_half_used is is_half_used


def test_a_home_that_grants_nothing_is_asked_ever_more_rarely():
    counts = RunCounts()
    inserts = InsertGrant(counts, 5 * MIN_PAUSE)
    recorded(inserts, counts, 10)
    at_once(inserts.settling(10, 10))
    pauses = []
    for granted, waiting, is_short in (
        (10, 0, True), (10, 1, False), (10, 0, True), (10, 1, True), (10, 0, False), (10, 1, False), (9, 0, True),
        (11, 1, True), (11, 1, True),
    ):  # fmt: skip
        inserts.waiting, inserts.is_short = waiting, is_short
        inserts.grant(granted, "wait")
        pauses.append(round(inserts.pause / MIN_PAUSE))
        assert not inserts.is_short, "until something is left out again"
    # Asked in vain it waits twice as long; nobody wanted more at the fifth; the last two have one entry left.
    assert pauses == [2, 4, 5, 5, 1, 2, 4, 1, 1]


def test_a_home_that_has_told_of_room_is_asked_at_once_and_then_as_before():
    inserts, schedule, due = slow_client()
    inserts.waiting = 1
    for _ in range(3):
        inserts.grant(0, "wait")
    schedule.begin(5.0)
    assert due() == 5.0 + 8 * MIN_PAUSE
    inserts.expect()
    assert due() == 5.0
    inserts.grant(0, "wait")  # in vain: it never asks without a pause
    assert due() == 5.0 + MIN_PAUSE


def test_a_client_that_leaves_something_out_reports_as_soon_as_one_that_waits():
    inserts, schedule, due = slow_client()
    schedule.begin(5.0)
    schedule.is_dirty = True
    assert due() == 65.0
    inserts.is_short = True
    assert due() == 5.0 + MIN_PAUSE


def test_an_episode_that_was_open_before_a_limit_leaves_without_any_debt():
    counts = RunCounts()
    inserts = InsertGrant(counts, 1.0)
    recorded(inserts, counts, 10)
    at_once(inserts.settling(10, 10))
    at_once(inserts.settling(10, 10))  # push_episode's entries were never undecided
    assert counts.passed == 0
    recorded(inserts, counts, 10)
    at_once(inserts.settling(10, 0))
    assert counts.passed == 10 and counts.inserted == 10


def test_a_first_grant_after_none_was_needed_is_half_used_by_its_own_size():
    """As if it were one of all entries, a client would ask again after each step."""
    counts = RunCounts()
    inserts = InsertGrant(counts, 0.5)
    inserts.grant(NO_LIMIT, "")
    inserts.grant(100, "")
    assert not inserts.is_half_used
    recorded(inserts, counts, 51)
    assert admit(inserts, 51) == 51 and inserts.is_half_used
