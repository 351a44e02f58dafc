"""When a request is sent again and when it is given up, with time held still."""

import random

from hypothesis import given
from hypothesis import strategies as st

from memoire.net.channel import PendingRequests


def started(deadline=100.0, first=1.0, most=8.0, seed=0):
    calls, answers = PendingRequests(first, most, random.Random(seed)), []
    return calls, calls.start(1, [b"frame"], deadline, answers.append, now=0.0), answers


@given(st.integers(0, 1000))
def test_the_pause_before_a_resend_doubles_up_to_the_most(seed):
    calls, call, _ = started(seed=seed, deadline=float("inf"))
    now, pauses = 0.0, []
    for _ in range(8):
        assert calls.due(now) == [call]
        calls.sent(call, now)
        assert not calls.due(now)
        pauses.append(call.next_send - now)
        now = calls.next_time()
    assert pauses[0] == 1.0
    for pause, bound in zip(pauses, [1, 2, 4, 8, 8, 8, 8, 8], strict=True):
        assert bound / 2 <= pause <= bound
    assert calls.resends == 7


def test_a_reply_is_taken_once():
    calls, call, _ = started()
    assert calls.take(1) is call
    assert calls.take(1) is None and calls.take(2) is None
    assert calls.next_time() == float("inf")


def test_a_call_expires_at_its_deadline_and_is_not_sent_after_it():
    calls, call, _ = started(deadline=0.5)
    calls.sent(call, 0.0)
    assert calls.next_time() == 0.5
    assert not calls.expired(0.4)
    assert calls.expired(0.5) == [call]
    assert len(calls) == 0 and not calls.due(10.0)


def test_closing_ends_every_call():
    calls, call, _ = started()
    assert calls.all() == [call] and len(calls) == 0


def test_what_was_sent_on_a_connection_that_was_lost_is_due_at_once_and_nothing_else():
    calls, before, _ = started(first=50.0)
    calls.sent(before, 1.0)
    after = calls.start(2, [b"frame"], 100.0, lambda answer: None, now=2.0)
    calls.sent(after, 2.5)
    calls.lost(2.0, now=3.0)
    assert calls.due(3.0) == [before]
