"""Tests of a client's counts by run, and of the byte window of its pushes."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memoire._core import at_once
from memoire.accounting.account import Account
from memoire.client.counts import MAX_HOMES, AccountWindows, LineOutbox, PushWindow, RunCounts
from memoire.wire.rows import MAX_RETURN

pytestmark = pytest.mark.usefixtures("without_io")

steps = st.tuples(st.just("record"), st.integers(1, 50))
ends = st.tuples(st.just("end"), st.just(0))
enters = st.tuples(st.just("enter"), st.integers(1, 3))


@given(st.lists(steps | ends | enters, max_size=40))
def test_each_step_counts_for_the_run_in_which_it_was_recorded(history):
    counts, run, is_over = RunCounts(), 1, False
    counts.enter_run(run)
    expected, later = Counter(), 0  # counts by run; entries recorded after a run's end
    for what, number in history:
        if what == "record":
            at_once(counts.recording_changes(number, 8))
            counts.passed += number // 2
            expected[run] += 0 if is_over else number
            later += number if is_over else 0
        elif what == "end":
            counts.end_run(0, 0)
            is_over = True
        else:
            expected[number] += later
            run, later, is_over = number, 0, False
            counts.enter_run(number)
        assert counts.reported.steps == expected[run]
        assert counts.reported.generated_bytes == 8 * expected[run]
    assert counts.steps == sum(expected.values()) + later
    assert counts.inserted == counts.reported.inserted + (counts.sums - counts.covered_counts).inserted


def test_a_run_is_told_once_its_lines_and_episodes_are_acknowledged():
    counts = RunCounts()
    counts.enter_run(1)
    for _ in range(3):
        at_once(counts.episode_changes(5, 1.0, now=0.0))
    boundary = counts.end_run(line=4, asked=0)
    at_once(counts.episode_changes(5, 1.0, now=0.0))
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
    at_once(counts.episode_changes(5, returned, now=1.0))
    at_once(counts.episode_changes(6, -MAX_RETURN, now=2.0))
    assert (counts.episodes, counts.dropped_returns) == (2, 1)
    (ended,) = counts.oldest_episodes(10)
    assert (ended.number, ended.length, ended.time, ended.returned) == (2, 6, 2.0, -MAX_RETURN)


# --- The byte window of a client: sums agree in spite of faults, at each home server

CLIENT = b"\0" * 16


class WindowMachine(RuleBasedStateMachine):
    """Client that pushes through a lossy line to homes that lose their state, and that it leaves and rejoins."""

    def __init__(self):
        super().__init__()
        self.windows = AccountWindows(1000, lost_after=5.0)
        self.now = 0.0
        self.way = []
        self.home = 1
        self.since = {1: 1, 2: 1, 3: 1}  # start of the client's account, by server
        self.accounts = {home: Account(CLIENT, 0.0, 0.0, 1) for home in self.since}
        self.windows.enter_account(7, 1, 1)
        self.pushed = [0, 0]

    @rule(size=st.integers(1, 400))
    def push(self, size):
        window = self.windows.now
        if window.has_room(size):
            at_once(window.push_changes(size, self.now))
            self.way.append((size, window.pushed_caches, window.pushed_bytes, self.home, self.since[self.home]))
            self.pushed = [self.pushed[0] + 1, self.pushed[1] + size]
        assert window.in_flight_bytes <= max(1000, size)

    @rule(which=st.integers(0, 5), is_accepted=st.booleans())
    def arrive(self, which, is_accepted):
        if self.way:
            size, number, pushed, home, since = self.way.pop(which % len(self.way))
            if since == self.since[home]:
                account = self.accounts[home]
                account.received_caches += 1
                account.received_bytes += size
                account.seen_caches = max(account.seen_caches, number)
                account.seen_bytes = max(account.seen_bytes, pushed)
                account.accepted_caches += is_accepted
                if not is_accepted:
                    account.rejected["size"] = account.rejected.get("size", 0) + 1

    @rule(which=st.integers(0, 5))
    def lose(self, which):
        if self.way:
            self.way.pop(which % len(self.way))

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds):
        self.now += seconds

    @rule(delay=st.floats(0, 4))
    def answer(self, delay):
        account = self.accounts[self.home]
        self.windows.now.receive_answer(
            account.accepted_caches,
            account.received_bytes,
            account.lost_bytes,
            account.rejected,
            self.now - delay,
            lost_caches=account.lost_caches,
        )

    @rule(home=st.integers(1, 3))
    def move(self, home):
        self.home = home
        self.windows.enter_account(7, home, self.since[home])

    @rule(home=st.integers(1, 3))
    def forget(self, home):
        self.since[home] += 1
        self.accounts[home] = Account(CLIENT, 0.0, 0.0, self.since[home])
        if home == self.home:
            self.windows.enter_account(7, home, self.since[home])

    @invariant()
    def identity_holds(self):
        self.windows.check_invariants()
        sums = self.windows.sums()
        assert [sums.pushed_caches, sums.pushed_bytes] == self.pushed
        assert sums.pushed_bytes == sums.received_bytes + sums.lost_bytes + sums.in_flight_bytes
        received = sums.accepted_caches + sum(sums.rejected.values())
        assert sums.pushed_caches == received + sums.lost_caches + sums.in_flight_caches

    def teardown(self):
        # Once the last cache is old enough, the window is empty again.
        self.way.clear()
        self.now += 100.0
        self.answer(0.0)
        assert self.windows.now.in_flight_bytes == self.windows.now.in_flight_caches == 0
        self.identity_holds()


WindowMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_the_windows_account_for_every_byte = pytest.mark.slow(WindowMachine.TestCase)


def test_a_client_that_comes_back_to_a_home_that_knows_it_counts_on():
    windows = AccountWindows(1000)
    windows.enter_account(7, 1, since=5)
    for _ in range(3):
        at_once(windows.now.push_changes(100, now=0.0))
    windows.enter_account(7, 2, since=9)
    assert (windows.now.pushed_caches, windows.sums().lost_bytes) == (0, 300)
    windows.enter_account(7, 1, since=5)
    assert windows.now.pushed_caches == 3
    windows.now.receive_answer(3, 300, 0, {}, asked_at=1.0)  # the caches arrived after all
    assert (windows.sums().accepted_caches, windows.sums().lost_bytes) == (3, 0)
    windows.enter_account(7, 1, since=6)  # the home server lost its state
    assert (windows.now.pushed_caches, windows.sums().accepted_caches) == (0, 3)


def test_homes_left_long_ago_are_kept_as_sums():
    windows = AccountWindows(1000)
    for home in range(MAX_HOMES + 10):
        windows.enter_account(7, home, since=1)
        at_once(windows.now.push_changes(10, now=0.0))
        windows.now.receive_answer(1, 10, 0, {"size": 0}, asked_at=0.0)
    assert len(windows._former) <= MAX_HOMES
    homes = MAX_HOMES + 10
    assert (windows.sums().pushed_bytes, windows.sums().accepted_caches) == (10 * homes, homes)
    windows.check_invariants()


def test_what_arrives_after_it_was_given_up_is_no_longer_lost():
    window = PushWindow(100, lost_after=5.0)
    at_once(window.push_changes(60, now=0.0))
    window.receive_answer(0, 0, 0, {}, asked_at=4.0)
    assert (window.in_flight_bytes, window.lost_bytes) == (60, 0)
    window.receive_answer(0, 0, 0, {}, asked_at=6.0)
    assert (window.in_flight_bytes, window.lost_bytes) == (0, 60)
    window.receive_answer(1, 60, 0, {}, asked_at=7.0)
    assert (window.received_bytes, window.lost_bytes, window.accepted_caches) == (60, 0, 1)


def test_a_client_may_allow_itself_less_than_its_home_grants():
    windows = AccountWindows(1000)
    windows.limit_bytes(300)
    windows.grant(2000)
    assert (windows.now.credit, windows.granted) == (300, 2000)
    windows.enter_account(7, 1, since=5)
    windows.grant(0)  # as before
    assert windows.now.credit == 300
    windows.grant(200)
    assert windows.now.credit == 200
    windows.limit_bytes(0)
    assert windows.now.credit == 200


def test_a_late_answer_takes_nothing_back():
    window = PushWindow(100)
    for _ in range(3):
        at_once(window.push_changes(10, now=0.0))
    window.receive_answer(2, 20, 0, {"size": 1}, asked_at=1.0)
    window.receive_answer(1, 10, 0, {}, asked_at=0.5)
    assert (window.accepted_caches, window.received_caches, window.rejected) == (2, 3, {"size": 1})
    window.check_invariants()


@pytest.mark.parametrize(("text", "sent"), [("12345678", "12345678"), ("123456789", "12345..."), ("ééééé", "éé...")])
def test_a_line_that_is_too_long_is_cut_at_the_end_of_a_character(text, sent):
    outbox = LineOutbox(most_lines=1, most_bytes=1, line_bytes=8)
    assert outbox.add(text, 7, 0.0) == 1
    assert [line.text for line in outbox.next_lines(1, 100)] == [sent]
