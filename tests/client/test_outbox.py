"""A client's log lines until its home has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.client.counts import LineOutbox, cut

pytestmark = pytest.mark.usefixtures("without_io")


@given(st.text(), st.integers(0, 40))
def test_cutting_respects_the_limit_and_characters(text, limit):
    shorter = cut(text, limit)
    assert len(shorter.encode()) <= max(limit, 3)
    if len(text.encode("utf-8", "backslashreplace")) <= limit:
        assert shorter == text.encode("utf-8", "backslashreplace").decode()


def test_a_full_outbox_takes_no_line_until_older_ones_were_acknowledged():
    outbox = LineOutbox(most_lines=3, most_bytes=1 << 20, line_bytes=10)
    assert [outbox.add("x" * 20, 1, 0.0) for _ in range(5)] == [1, 2, 3, 0, 0]
    outbox.acknowledge(1)
    assert outbox.add("y", 1, 0.0) == 4  # numbers have no gaps
    assert [waiting.number for waiting in outbox.waiting(10, 10_000)] == [2, 3, 4]
    assert all(len(waiting.text) <= 10 for waiting in outbox.waiting(10, 10_000))


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), max_size=50), st.integers(1, 1000))
def test_an_outbox_is_bounded_in_bytes_and_holds_one_line_of_any_size(steps, most_bytes):
    outbox = LineOutbox(most_lines=1000, most_bytes=most_bytes, line_bytes=200)
    for length, acknowledged in steps:
        was_empty = not len(outbox)
        assert outbox.add("é" * length, 1, 0.0) or not was_empty
        assert outbox.bytes <= most_bytes or len(outbox) == 1
        outbox.acknowledge(int(min(outbox.oldest, outbox.newest)) + acknowledged - 1)
    outbox.acknowledge(outbox.newest)
    assert outbox.bytes == len(outbox) == 0


def test_a_message_takes_as_many_lines_as_fit_and_at_least_one():
    outbox = LineOutbox(most_lines=100, most_bytes=1 << 20, line_bytes=1000)
    for _ in range(10):
        outbox.add("x" * 100, 1, 0.0)
    assert len(outbox.waiting(100, 1)) == 1
    assert len(outbox.waiting(4, 10_000)) == 4
    assert len(outbox.waiting(100, 1000)) == 2


def test_lines_of_a_run_that_is_over_are_told_apart():
    outbox = LineOutbox(most_lines=100, most_bytes=1 << 20, line_bytes=1000)
    for number in range(6):
        outbox.add(f"{number}", 1, 0.0)
    assert [line.number for line in outbox.waiting(10, 10_000, through=4)] == [1, 2, 3, 4]
    outbox.acknowledge(4)
    assert outbox.waiting(10, 10_000, through=4) == [] and outbox.oldest == 5


@pytest.mark.parametrize("most", [{"most_lines": 4}, {"most_bytes": 4 * 110}])
def test_an_outbox_says_when_it_is_half_full(most):
    outbox = LineOutbox(**{"most_lines": 100, "most_bytes": 1 << 20} | most, line_bytes=10)
    outbox.add("x" * 10, 1, 0.0)
    assert not outbox.is_half_full
    outbox.add("x" * 10, 1, 0.0)
    assert outbox.is_half_full
