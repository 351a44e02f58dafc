"""What a client counts, run by run, against a table of who was told what."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire._core import at_once
from memoire.client.counts import MAX_ENDED, ClientCounts, RunCounts
from memoire.wire.rows import MAX_RETURN

pytestmark = pytest.mark.usefixtures("without_io")

steps = st.tuples(st.just("record"), st.integers(1, 50))
ends = st.tuples(st.just("end"), st.just(0))
enters = st.tuples(st.just("enter"), st.integers(1, 3))


@given(st.lists(steps | ends | enters, max_size=40))
def test_each_step_counts_for_the_run_in_which_it_was_recorded(history):
    counts, run, is_over = RunCounts(), 1, False
    counts.enter_run(run)
    told, later = Counter(), 0  # by run; and what was recorded beyond the boundary
    for what, number in history:
        if what == "record":
            at_once(counts.recording(number, 8))
            counts.passed += number // 2
            told[run] += 0 if is_over else number
            later += number if is_over else 0
        elif what == "end":
            counts.end_run(0, 0)
            is_over = True
        else:
            told[number] += later
            run, later, is_over = number, 0, False
            counts.enter_run(number)
        assert counts.told.steps == told[run]
        assert counts.told.generated_bytes == 8 * told[run]
    assert counts.steps == sum(told.values()) + later
    assert counts.inserted == counts.told.inserted + (counts.sums - counts.reach).inserted


def test_a_boundary_stays_where_it_was_made_first():
    counts = RunCounts()
    counts.enter_run(1)
    at_once(counts.recording(10, 1))
    boundary = counts.end_run(line=3, asked=2)
    at_once(counts.recording(5, 1))
    assert counts.end_run(line=9, asked=9) is boundary
    assert (boundary.counts.steps, boundary.line, boundary.asked, counts.reach.steps) == (10, 3, 2, 10)
    counts.enter_run(1)  # it was the same run after all
    assert counts.boundary is None and counts.told.steps == 15


def test_what_is_counted_before_the_first_run_belongs_to_it():
    counts = RunCounts()
    at_once(counts.recording(7, 1))
    counts.enter_run(4)
    assert counts.told.steps == 7


def test_a_client_that_ends_between_two_runs_leaves_the_rest_to_whichever_comes():
    counts = RunCounts()
    counts.enter_run(1)
    at_once(counts.recording(10, 1))
    counts.end_run(0, 0)
    at_once(counts.recording(3, 1))
    assert counts.told.steps == 10
    counts.enter_unknown_run()
    assert (counts.told.steps, counts.boundary) == (3, None)


def test_a_run_is_told_once_its_lines_and_episodes_are_acknowledged():
    counts = RunCounts()
    counts.enter_run(1)
    for _ in range(3):
        at_once(counts.closing_episode(5, 1.0, now=0.0))
    boundary = counts.end_run(line=4, asked=0)
    at_once(counts.closing_episode(5, 1.0, now=0.0))
    assert [ended.number for ended in counts.oldest_episodes(10)] == [1, 2, 3]
    assert [ended.number for ended in counts.oldest_episodes(2)] == [1, 2]
    for episodes, oldest_line, is_told in ((2, 5, False), (3, 4, False), (3, 5, True)):
        counts.acknowledge_episodes(episodes)
        counts.acknowledge_run(boundary, oldest_line)
        assert boundary.is_told is is_told
    counts.enter_run(2)
    assert [ended.number for ended in counts.oldest_episodes(10)] == [4]
    counts.acknowledge_episodes(4)
    boundary = counts.end_run(line=4, asked=0)
    counts.acknowledge_run(boundary, math.inf)
    assert boundary.is_told and counts.waiting_episodes == 0


@pytest.mark.parametrize("returned", [math.nan, math.inf, -math.inf, 1.01 * MAX_RETURN])
def test_an_episode_whose_return_cannot_be_told_counts_without_it(returned):
    counts = RunCounts()
    at_once(counts.closing_episode(5, returned, now=1.0))
    at_once(counts.closing_episode(6, -MAX_RETURN, now=2.0))
    assert (counts.episodes, counts.dropped_returns) == (2, 1)
    (ended,) = counts.oldest_episodes(10)
    assert (ended.number, ended.length, ended.time, ended.returned) == (2, 6, 2.0, -MAX_RETURN)


def test_the_oldest_returns_are_given_up_when_too_many_wait():
    counts = RunCounts()
    for _ in range(MAX_ENDED + 3):
        at_once(counts.closing_episode(1, 0.0, now=0.0))
    assert (counts.dropped_returns, counts.waiting_episodes) == (3, MAX_ENDED)
    assert counts.oldest_episodes(1)[0].number == 4


def test_what_no_home_has_acknowledged_is_missing():
    counts = RunCounts()
    at_once(counts.recording(10, 1))
    counts.acknowledged = counts.reach
    at_once(counts.recording(5, 1))
    assert counts.missing == ClientCounts(steps=5, generated_bytes=5)
