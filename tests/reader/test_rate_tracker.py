"""How drawing stands beside recording at several servers, message by message."""

import pytest

from memoire.reader.rounds import RateTracker
from memoire.replay.parameters import Parameters
from memoire.wire.messages import ServerRate

pytestmark = pytest.mark.usefixtures("without_io")

BAND = Parameters(samples_per_insert=2.0, samples_per_insert_tolerance=100.0)


def rate(inserted, drawn, *, surplus=None, is_told=False):
    """What a server with that many inserts and draws says of itself."""
    return ServerRate(2.0 * inserted - drawn if surplus is None else surplus, is_told, inserted, drawn, 2.0, 100.0)


def begun(*servers):
    """A tracker that has heard 10 inserts of each server, and has begun to draw."""
    tracker = RateTracker()
    for server in servers:
        tracker.heard(server, 1, rate(10, 0), 10, 1)
    assert tracker.why_not_draw(BAND, list(servers), 1, 0) == ""
    return tracker


def test_nothing_is_drawn_before_all_servers_have_said_how_much_was_recorded():
    tracker = RateTracker()
    tracker.heard("a", 1, rate(10, 0), 10, 1)
    waits = tracker.why_not_draw(BAND, ["a", "b"], 1, 0)
    assert waits == "waits for all servers to say how many entries were recorded"
    assert tracker.why_not_draw(Parameters(), ["a", "b"], 1, 0) == ""


def test_samples_that_were_asked_for_before_there_was_a_band_are_waited_for():
    tracker = RateTracker()
    tracker.heard("a", 1, rate(10, 0), 10, 1)
    assert "before the band began" in tracker.why_not_draw(BAND, ["a"], 1, on_way=5)
    assert tracker.band("a", ["a"]) is None


def test_a_server_that_comes_later_brings_its_surplus_unless_it_was_told_of_all():
    tracker = begun("a")
    tracker.heard("b", 1, rate(30, 0), 30, 1)
    assert tracker.band("a", ["a", "b"]).surplus == 20.0 + 60.0
    tracker.heard("c", 1, rate(5, 0, surplus=80.0, is_told=True), 5, 1)
    assert tracker.band("a", ["a", "b", "c"]).surplus == 80.0


def test_a_new_life_of_a_server_is_counted_from_its_beginning():
    tracker = begun("a")
    tracker.heard("a", 1, rate(15, 4), 15, 1)
    assert tracker.band("a", ["a"]).surplus == 20.0 + 5 * 2.0 - 4
    tracker.heard("a", 2, rate(3, 1), 3, 1)
    assert tracker.band("a", ["a"]).surplus == 26.0 + 3 * 2.0 - 1


def test_a_server_without_a_band_is_told_of_none():
    tracker = begun("a", "b")
    tracker.heard("b", 1, None, 10, 1)
    assert tracker.band("b", ["a", "b"]) is None
    assert tracker.band("a", ["a", "b"]).entries == 10


def test_a_server_is_told_its_share_of_clients_and_the_entries_of_the_others():
    tracker = begun("a", "b")
    tracker.heard("b", 1, rate(10, 0), 40, 2)
    told = tracker.band("a", ["a", "b"])
    assert (told.entries, told.share) == (40, 2 / 5)
