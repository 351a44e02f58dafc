"""Which servers a reader knows, by which address, what holds of the table, and what it shows of itself."""

import pytest

from memoire.errors import SchemaMismatch, UnknownName
from memoire.reader.directory import FORGET_TIMEOUT, Directory
from memoire.reader.reader import DeliveredBatches
from memoire.reader.rounds import RateTracker
from memoire.replay.parameters import Parameters
from memoire.wire.frames import name_hash
from memoire.wire.messages import ServerRate
from readerkit import OTHER, RUN, PoolServer, World, directory_of, learn, welcome

pytestmark = pytest.mark.usefixtures("without_io")

# --- Which servers a reader knows, by which address, and what holds of the table: time and messages are passed in

NEXT = name_hash("next")


def test_a_server_keeps_its_address_while_that_leads_there_and_takes_another_one_then():
    made = Directory(["tcp://a", "tcp://b"], "reader", 0.0)
    learn(made, welcome("a", ["a", "b"]))
    learn(made, welcome("a", ["a", "b"]), address=1)
    assert [server.address.endpoint for server in made.known] == ["tcp://a", "tcp://a"]
    learn(made, welcome("b", ["b"]))
    assert [server.address.endpoint for server in made.known] == ["tcp://b", "tcp://a"]
    assert all(server.is_listed for server in made.known)


def test_a_server_that_is_away_is_reached_by_the_address_that_named_it_last():
    made = Directory(["tcp://a", "tcp://b"], "reader", 0.0)
    learn(made, welcome("a"))
    learn(made, welcome("a"), address=1)
    assert made.servers["a"].address is made.addresses[0]
    made.servers["a"].is_away = True
    learn(made, welcome("a"), address=1)
    assert made.servers["a"].address is made.addresses[1] and made.there == []


def test_a_server_that_nobody_lists_is_forgotten_after_a_while_and_comes_back_as_another():
    made = directory_of("a", "b", now=0.0)
    former = made.servers["b"]
    _, _, dropped = learn(made, welcome("a", ["a"]), now=FORGET_TIMEOUT)
    assert dropped == [] and list(made.servers) == ["a", "b"] and not former.is_listed
    _, _, dropped = learn(made, welcome("a", ["a"]), now=FORGET_TIMEOUT + 0.1)
    assert dropped == [former] and list(made.servers) == ["a"] and former.is_away
    learn(made, welcome("a", ["a", "b"]), now=FORGET_TIMEOUT + 0.2)
    assert made.servers["b"] is not former and not made.servers["b"].is_away


def test_a_server_of_other_columns_is_refused_and_changes_nothing():
    made = directory_of("a")
    with pytest.raises(SchemaMismatch, match="reader"):
        learn(made, welcome("b", ["b"], schema=OTHER))
    assert list(made.servers) == ["a"] and made.addresses[0].servers == ("a",)


def test_a_reader_that_names_no_table_keeps_the_first_one_and_asks_again():
    made = directory_of("a")
    made.due(1.0)
    assert learn(made, welcome("b", ["b"], table_name="another")) is None
    assert list(made.servers) == ["a"] and made.addresses[0].hello.due == 0.0


def test_a_new_run_is_news_once_for_all_and_once_for_the_servers_of_each_address():
    made = Directory(["tcp://a", "tcp://b"], "reader", 0.0)
    assert learn(made, welcome("a"))[1] is None and made.run == RUN
    learn(made, welcome("b"), address=1)
    assert learn(made, welcome("a"))[1] is None
    change = learn(made, welcome("a"), run=NEXT)[1]
    assert change.is_first and change.servers == (made.servers["a"],) and made.run == NEXT
    change = learn(made, welcome("b"), address=1, run=NEXT)[1]
    assert not change.is_first and change.servers == (made.servers["b"],)
    assert learn(made, welcome("b"), address=1, run=NEXT)[1] is None


def test_a_run_is_over_when_all_servers_say_so_and_stays_over():
    made = directory_of("a", "b")
    made.reported(made.servers["a"], True)
    assert not made.is_finished
    made.reported(made.servers["b"], True)
    assert made.is_finished
    made.reported(made.servers["b"], False)
    assert made.is_finished


def test_a_server_with_a_setting_that_this_version_does_not_know_is_refused_by_name():
    told = welcome("a")
    told.parameters["horizon"] = 5
    with pytest.raises(UnknownName, match="takes no 'horizon'.*as 5"):
        learn(Directory(["tcp://a"], "reader", 0.0), told)


# --- How drawing stands beside recording at several servers, message by message

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


# --- What a reader shows of itself, without a thread or a clock


def test_servers_are_shown_how_fresh_a_recent_batch_was_and_how_much_was_drawn():
    made = DeliveredBatches()
    assert made.figures(0) == {"batches": 0.0, "samples": 0.0, "waited": 0.0} and made.newest is None
    (drawn,) = World({"a": PoolServer([1])}).run(1)
    assert made.is_due(10.0) and not made.is_due(10.1), "too soon for another look"
    made.saw(drawn.gathered, drawn.importance, drawn.left_out, 3)
    fresh = made.newest
    made.batches, made.waited = 2, 0.5
    figures = made.figures(64)
    assert (figures["batches"], figures["samples"], figures["waited"]) == (2.0, 64.0, 0.5)
    assert figures["age_max"] == fresh.age_max and "ages" not in figures  # numbers alone
