"""What a reader shows of itself, without a thread or a clock."""

import pytest

from memoire.reader.reader import DeliveredBatches, summed
from readerkit import PoolServer, World

pytestmark = pytest.mark.usefixtures("without_io")


def test_counts_add_up_by_code():
    assert summed([{"a": 1}, {"a": 2, "b": 3}, {}]) == {"a": 3, "b": 3} and summed([]) == {}


def test_servers_are_shown_how_fresh_a_recent_batch_was_and_how_much_was_drawn():
    made = DeliveredBatches()
    assert made.figures(0) == {"batches": 0.0, "samples": 0.0, "waited": 0.0} and made.freshness is None
    first, second = World({"a": PoolServer([1])}).run(2)
    made.look(first, 3, 10.0)
    fresh = made.freshness
    made.look(second, 0, 10.1)  # too soon for another look
    assert made.freshness is fresh
    made.batches, made.waited = 2, 0.5
    figures = made.figures(64)
    assert (figures["batches"], figures["samples"], figures["waited"]) == (2.0, 64.0, 0.5)
    assert figures["age_max"] == fresh.age_max and "ages" not in figures  # numbers alone
