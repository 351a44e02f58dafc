"""What a server has for a reader, less what is on its way to it; one list is driven beside it as the slow truth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.reader.directory import NOTHING, Address, RemoteServer, ServerStock, clients_of
from memoire.tables.far import LEFT_OUT_TIMEOUT
from memoire.wire.rows import CLIENT_COUNTS, CLIENT_SUMS

pytestmark = pytest.mark.usefixtures("without_io")


def table_of(reserved, flags=None):
    """Rows of CLIENT_SUMS of clients 7, 8, 9 ..."""
    table = np.zeros(len(reserved), CLIENT_SUMS)
    table["client"][:, 0], table["reserved"] = np.arange(7, 7 + len(reserved)), reserved
    table["flags"], table["positives"] = flags or 0, 10
    return table


def counts_of(counts):
    """Rows of CLIENT_COUNTS, by client."""
    rows = np.zeros(len(counts), CLIENT_COUNTS)
    rows["client"][:, 0], rows["count"] = list(counts), list(counts.values())
    return rows


def stock():
    return ServerStock(RemoteServer("a", Address("tcp://a"), 0.0))


def test_samples_of_a_draw_that_is_on_its_way_are_not_there_for_the_next_one():
    """A server says what it has before it has seen the newest draws; with reuse_cache these take nothing away."""
    table, made = table_of([20, 20, 4], [0, 1, 0]), stock()
    made.ask(1, counts_of({9: 6, 7: 5}), 0.0)
    made.ask(2, counts_of({7: 5}), 0.0)
    assert made.on_way == 16 and made.open == {1, 2}
    assert made.report(table, 0.0) == 30
    assert made.table["reserved"].tolist() == [10, 20, 0] and table["reserved"].tolist() == [20, 20, 4]
    made.answered(1, 0.0)
    made.answered(2, 0.0)
    made.ask(3, counts_of({8: 3}), 0.0)
    made.report(table, 0.0)
    assert made.table["reserved"].tolist() == [20, 20, 4] and made.clients.tolist() == [7, 8, 9]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=5),
    st.dictionaries(st.integers(5, 13), st.integers(0, 40), max_size=6),
)
def test_taking_samples_agrees_with_counting_them_one_client_after_the_other(reserved, counts):
    made = stock()
    made.report(table_of(reserved), 0.0)
    made.take(counts_of(counts))
    expected = [max(0, there - counts.get(7 + place, 0)) for place, there in enumerate(reserved)]
    assert made.table["reserved"].tolist() == expected


def test_nothing_is_taken_where_nothing_is_known():
    made = stock()
    made.take(counts_of({7: 3}))
    assert made.table is None and made.is_older(1.0, 0.0)
    made.report(table_of([3]), 5.0)
    made.take(NOTHING)
    assert made.table["reserved"].tolist() == [3]
    assert not made.is_older(1.0, 6.0) and made.is_older(1.0, 6.1)


def test_an_answer_is_late_when_it_was_awaited_for_so_long_since_the_last_one():
    made = stock()
    assert made.late_at == float("inf") and not made.is_asked
    made.ask(1, NOTHING, 10.0)
    made.ask(2, NOTHING, 11.0)  # behind it: the server is busy with the first
    assert made.late_at == 10.0 + LEFT_OUT_TIMEOUT and made.is_asked
    made.answered(1, 12.0)
    assert made.late_at == 12.0 + LEFT_OUT_TIMEOUT
    made.server.is_away = True
    assert made.late_at == float("inf")  # it is left out already
    made.server.is_away = False
    made.answered(2, 13.0)
    made.answered(2, 13.0)  # once more, by a resend
    assert made.late_at == float("inf")


def test_clients_are_told_apart_by_half_of_their_ids():
    rows = table_of([1, 1, 1])
    assert clients_of(rows).tolist() == [7, 8, 9] and clients_of(rows[:0]).tolist() == []
