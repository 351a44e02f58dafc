"""What happens to a run as marks on its curves, and how returns are spread over actors: model and boundaries."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.dashboard.collect.actors import QUANTILES, RECENT_EPISODES, RECENT_SECONDS, RecentReturns
from memoire.dashboard.collect.answers import EpisodeRow
from memoire.dashboard.collect.cluster import EventWatcher
from memoire.dashboard.collect.counters import NodeAnswer, NodeState
from memoire.dashboard.collect.history import stretches_away
from memoire.dashboard.collect.overview import reachable

A = "http://a:1"


class Watched:
    """One node and its watcher: `look` says which kinds of events a moment brings."""

    def __init__(self):
        self.node, self.watcher, self.texts = NodeState(A, 0.0), EventWatcher(), []

    def look(self, now, *, began=None, run="r", finished=False):
        """`began`: when the node's process did; None: it does not answer."""
        stats = {"name": "a", "uptime": now - (began or 0.0)}
        status = {"role": "server", "ready": True, "time": now, "stats": stats}
        error, told = ("", status) if began is not None else ("refused", None)
        self.node.apply(NodeAnswer(A, now, error=error, status=told))
        found = self.watcher.look(now, run, [self.node], finished=finished)
        self.texts = [each.text for each in found]
        return [each.kind for each in found]


def test_a_node_that_goes_and_comes_back_is_told_once_each_time():
    seen = Watched()
    assert seen.look(10.0, began=1.0) == ["run_began"]
    assert seen.look(11.0, began=1.0) == []
    assert seen.look(12.0) == ["node_down"]
    assert seen.look(13.0) == []
    assert seen.look(20.0, began=1.0) == ["node_back"]
    assert seen.texts == ["a answers again, after 8 s."]


def test_another_process_at_the_same_place_is_a_restart_seen_away_or_not():
    seen = Watched()
    seen.look(10.0, began=1.0)
    assert seen.look(12.0, began=11.5) == ["node_restarted"]
    assert seen.look(13.0) == ["node_down"]
    assert seen.look(14.0) == []
    assert seen.look(20.0, began=19.0) == ["node_restarted"]
    assert seen.texts == ["a started again."]


def test_a_clock_that_drifts_is_no_restart():
    seen = Watched()
    seen.look(10.0, began=1.0)
    assert seen.look(11.0, began=2.9) == []


def test_what_was_away_at_first_has_not_happened():
    seen = Watched()
    assert seen.look(10.0, run="") == []
    assert seen.look(11.0, began=10.5, run="") == []


def test_a_run_begins_once_and_is_finished_once_and_so_is_the_next():
    seen = Watched()
    assert seen.look(10.0, began=1.0) == ["run_began"]
    assert seen.look(11.0, began=1.0, finished=True) == ["run_finished"]
    assert seen.look(12.0, began=1.0, finished=True) == []
    assert seen.look(13.0, began=1.0, run="s") == ["run_began"]
    assert seen.look(14.0, began=1.0, run="s", finished=True) == ["run_finished"]


# ------------------------------------------------------------------------------------------------- returns of actors


def ended(client, returned, time=0.0):
    return EpisodeRow(client, time, 1, returned)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-1e6, 1e6)), max_size=120))
def test_quantiles_are_those_of_each_actors_newest_episodes(episodes):
    made = RecentReturns()
    made.add(ended(*each) for each in episodes)
    newest = [[value for who, value in episodes if who == actor][-RECENT_EPISODES:] for actor in "abcd"]
    means = [math.fsum(values) / len(values) for values in newest if values]
    figures = made.figures()
    if len(means) < 2:
        assert figures == {}
    else:
        found = [figures[f"return_p{part}"].mean for part in QUANTILES]
        assert found == pytest.approx(np.percentile(means, QUANTILES).tolist())


def test_an_actor_that_ended_long_ago_counts_no_more():
    made = RecentReturns()
    made.add([ended("old", 100.0, 0.0), ended("a", 1.0, RECENT_SECONDS + 1.0), ended("b", 3.0, RECENT_SECONDS + 2.0)])
    assert made.figures()["return_p90"].mean == pytest.approx(2.8)
    made.clear()
    assert made.figures() == {}


def test_a_return_that_is_no_number_is_left_out():
    made = RecentReturns()
    made.add([ended("a", math.nan), ended("a", 1.0), ended("b", 3.0), ended("b", math.inf)])
    assert made.figures()["return_p50"].mean == 2.0


# ----------------------------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    ("times", "bucket", "found"),
    [
        ([], 1.0, []),
        ([0.0, 1.0, 2.0, 60.0, 61.0], 1.0, [[3.0, 60.0]]),
        ([0.0, 6.0], 1.0, []),
        ([0.0, 6.1], 1.0, [[1.0, 6.1]]),
        ([0.0, 300.0, 900.0], 300.0, [[600.0, 900.0]]),
    ],
)
def test_curves_have_a_gap_where_nobody_looked_for_longer_than_is_usual(times, bucket, found):
    assert stretches_away(times, bucket, 5.0) == found


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("tcp://127.0.0.1:5560", "tcp://127.0.0.1:5560"),
        ("tcp://0.0.0.0:5560", "tcp://server-0:5560"),
        ("tcp://*:5560", "tcp://server-0:5560"),
        ("tcp://[::]:5560", "tcp://server-0:5560"),
        ("ipc:///run/memoire", "ipc:///run/memoire"),
        ("", ""),
    ],
)
def test_an_address_is_shown_as_others_reach_it(endpoint, shown):
    assert reachable(endpoint, "http://server-0:8080") == shown
