"""The wait of those who draw, and who counts as present: with a clock that stands still, or a deadline in the past."""

import threading
import time

import pytest

from memoire.errors import Closed
from memoire.tables.base import EXPIRY_INTERVAL, PoolLock, Presence


def test_a_wait_whose_deadline_has_passed_ends_at_once_and_counts_nobody() -> None:
    waiter = PoolLock()
    with waiter.lock:
        assert not waiter.wait(time.monotonic() - 1.0)
        assert waiter.wait(time.monotonic() + 60.0, at_most=0.0), "time is left, so the caller looks again"
        assert waiter.waiting == 0


def test_what_is_told_ends_a_wait_and_is_counted_also_where_nobody_waits() -> None:
    waiter, ended = PoolLock(), []

    def wait() -> None:
        with waiter.lock:
            before = waiter.changes
            while waiter.changes == before:
                waiter.wait(time.monotonic() + 60.0)
            ended.append(waiter.changes)

    with waiter.lock:
        waiter.tell()
    thread = threading.Thread(target=wait)
    thread.start()
    while not waiter.waiting:
        pass
    with waiter.lock:
        waiter.tell()
    thread.join(60.0)
    assert ended == [2] and waiter.waiting == 0


def test_a_closed_pool_says_so_to_those_who_ask_and_wakes_those_who_wait() -> None:
    waiter = PoolLock()
    with waiter.lock:
        waiter.check_open()
        waiter.close()
        assert waiter.changes == 1
        with pytest.raises(Closed, match="the pool"):
            waiter.check_open()


def test_who_is_silent_for_longer_than_the_timeout_is_gone() -> None:
    present = Presence(10.0, now=100.0)
    present.heard(b"a", 100.0)
    present.heard(b"b", 105.0)
    assert present.expire(110.0) == [], "not silent for longer than 10 s yet"
    present.heard(b"a", 111.0)
    assert present.expire(116.0) == [b"b"] and b"a" in present and b"b" not in present and len(present) == 1
    present.forget(b"a")
    present.forget(b"a")
    assert len(present) == 0


def test_silent_ones_are_looked_for_about_once_a_second() -> None:
    present = Presence(10.0, now=100.0)
    assert not present.is_due(100.0 + EXPIRY_INTERVAL) and present.is_due(100.1 + EXPIRY_INTERVAL)
    present.expire(105.0)
    assert not present.is_due(105.9) and present.is_due(106.1)
