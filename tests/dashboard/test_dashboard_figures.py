"""How figures of many nodes become one, and what is told as an event."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.dashboard.collect.actors import QUANTILES, RECENT_EPISODES, RECENT_SECONDS, RecentReturns
from memoire.dashboard.collect.answers import EpisodeRow
from memoire.dashboard.collect.cluster import Cluster, EventWatcher
from memoire.dashboard.collect.counters import NodeAnswer, NodeState
from memoire.dashboard.collect.history import stretches_away
from memoire.dashboard.collect.overview import reachable
from memoire.dashboard.settings import Settings
from memoire.figures import BOUNDS
from memoire.wire.frames import name_hash
from memoire.wire.rows import ACCOUNT

A, B = "http://a:1", "http://b:1"
FRESH = {"age_median": 1.0, "age_p90": 5.0, "age_max": 9.0, "lag_mean": 2.0, "lag_max": 7.0, "left_out": 0.3, "effective": 0.9}  # fmt: skip
FAR = {"age_median": 4.0, "age_p90": 4.5, "age_max": 5.0, "lag_mean": 3.0, "lag_max": 3.5, "left_out": 0.1, "effective": 0.4}  # fmt: skip


def account(client, home, **counts):
    row = np.zeros(1, ACCOUNT)
    row["client"], row["home"], row["since"] = (client, client), name_hash(home), 1
    for name, value in counts.items():
        row[name] = value
    return row


def table(**figures):
    plain = dict.fromkeys(
        ("clients", "held_caches", "held_bytes", "byte_limit", "unused_samples", "samples", "batches", "waited",
         "overwritten_caches", "episodes", "steps", "capacity"), 0)  # fmt: skip
    rate = {"draws_wait": "", "inserts_wait": ""}
    return plain | {"storage": "caches", "samples_per_insert": 1.0, "rate": rate, "freshness": None} | figures


def server(name, *, epoch=1, samples=0, tables=None, **figures):
    stats = {"name": name, "run": "r", "epoch": epoch, "samples": samples}
    stats["tables"] = {"t": table(samples=samples, **(tables or {}))}
    return {"role": "server", "ready": True, "stats": stats | figures}


def reader(learner, *, seen, waited, batches=0.0, **figures):
    figures |= {"batches": batches, "samples": 0.0, "waited": waited}
    return {"learner": learner, "host": "gpu", "last_seen": seen, "figures": figures, "scalars": {}}


class Watched:
    """Two servers, asked one after the other at the same moment."""

    def __init__(self):
        self.cluster = Cluster(Settings(nodes=(A, B), silent_after=1e9))
        self.cluster.listed([A, B], 0.0)

    def look(self, now, a, b, *rows):
        for url, status in ((A, a), (B, b)):
            packed = np.concatenate(rows).tobytes() if rows and url == A else b""
            told = {"run": "r", "runs": ["r"], "row_bytes": ACCOUNT.itemsize, "rows": packed}
            self.cluster.apply(NodeAnswer(url, now, status=status, accounts=[told]))
        return self.cluster.look(now)[0]


def request_counts(place, count):
    return {"HELLO": {"counts": [count if each == place else 0 for each in range(len(BOUNDS) + 1)]}}


def test_shares_of_actors_that_skip_are_of_all_their_caches_together():
    watched = Watched()
    one = {"pushed_caches": 1000, "skipped": 500}
    watched.look(0.0, server("a"), server("b"), account(1, "a", **one), account(2, "b", pushed_caches=10, skipped=90))
    rows = account(1, "a", pushed_caches=1030, skipped=510), account(2, "b", pushed_caches=20, skipped=140)
    found = watched.look(10.0, server("a"), server("b"), *rows)
    assert found.rates.skipped_share == pytest.approx(60 / 100)  # in these ten seconds, and no mean of 25 % and 83 %
    assert (found.totals.pushed_caches, found.totals.skipped_caches) == (1050, 650)


def test_of_learners_the_one_that_waits_most_is_told_and_of_freshness_the_worst():
    watched = Watched()

    def status(now):
        far = reader("r1", seen=now, waited=50.0 + 0.7 * now, batches=5.0 * now, **FAR)
        former = reader("r1", seen=now - 9.0, waited=0.0)  # as another server knew it before
        figures = {"batches": int(10 + 3 * now), "waited": 100.0 + 0.1 * now, "learners": [former]}
        return server("a", tables={"freshness": FRESH}, **figures), server("b", learners=[far])

    for now in (0.0, 10.0, 20.0):  # shares are of the looks before
        found = watched.look(now, *status(now))
    shares = {row.learner: row.waiting_share for row in found.learners}
    assert shares == {"server:a": pytest.approx(0.1), "r1": pytest.approx(0.7)}
    assert found.rates.waiting_share == pytest.approx(0.7) and found.rates.batches == pytest.approx(8.0)
    worst = {name: getattr(found.freshness, name) for name in FRESH}
    assert worst == {name: max(FRESH[name], FAR[name]) for name in FRESH} | {"effective": 0.4}
    assert found.freshness.effective == 0.4  # the least: the only figure of which more is better


def test_means_are_over_all_episodes_and_clients_and_not_over_servers():
    def status(name, count, mean, least, most, length, scalar):
        recent = {"count": count, "return_mean": mean, "return_min": least, "return_max": most, "length_mean": length}
        return server(name, recent=recent, scalars={"loss": scalar}, learner_scalars={f"of {name}": mean})

    a = status("a", 30, 10.0, -5.0, 20.0, 100.0, {"count": 1, "mean": 8.0})
    b = status("b", 10, 50.0, 40.0, 60.0, 20.0, {"count": 3, "mean": 4.0})
    found = Watched().look(0.0, a, b).learning
    assert (found.return_mean, found.return_min, found.return_max, found.length_mean) == (20.0, -5.0, 60.0, 80.0)
    assert found.client_scalars == {"loss": 5.0} and found.learner_scalars == {"of a": 10.0, "of b": 50.0}
    empty = server("b", recent={"count": 0, "return_mean": None})
    assert Watched().look(0.0, a, empty).learning.return_mean == 10.0


def counted(name, epoch, number):
    """A server that has counted so much of everything in this life of it."""
    refused, requests = {"schema": number, "missing": 7 * number}, request_counts(2, number)
    made = server(name, epoch=epoch, samples=number, refused=refused, requests=requests, log_lines=number)
    made["stats"] |= {"batches": number, "waited": number / 1000}
    return made


def test_what_a_server_counted_before_it_began_anew_is_kept_also_where_the_new_count_overtook():
    watched = Watched()
    quiet = server("b", samples=1_000_000)
    watched.look(0.0, counted("a", 1, 100), quiet)
    watched.look(5.0, counted("a", 1, 200), quiet)
    found = watched.look(10.0, counted("a", 2, 900), quiet)  # 100 in its first life, 900 in the next
    rates = found.rates
    assert (rates.samples, rates.log_lines, rates.refused, rates.batches) == (100.0, 100.0, 100.0, 100.0)
    (row,) = watched.look(15.0, counted("a", 2, 900), quiet).learners  # shares are of the looks before
    assert row.waiting_share == pytest.approx(0.1)  # a second of the ten, not 0.8 of one


def test_tables_add_up_and_what_holds_them_up_is_told_of_any_server():
    one = {"clients": 1, "held_caches": 2, "held_bytes": 30, "byte_limit": 100, "unused_samples": 5, "batches": 6,
           "waited": 7.0, "overwritten_caches": 8, "episodes": 9, "steps": 10, "capacity": 4}  # fmt: skip
    two = {name: 10 * value for name, value in one.items()} | {"rate": {"draws_wait": "more", "inserts_wait": "less"}}
    (row,) = Watched().look(0.0, server("a", samples=3, tables=one), server("b", samples=30, tables=two)).tables
    assert {name: getattr(row, name) for name in one} == {name: 11 * value for name, value in one.items()}
    assert (row.samples, row.rate.draws_wait, row.rate.inserts_wait, row.full) == (33, "more", "less", 22 / 44)
    assert row.facts.keys() == {"a", "b"}


def test_latency_is_of_all_requests_and_a_disk_is_the_first_to_be_full():
    watched = Watched()

    def status(now):
        a = server("a", requests=request_counts(2, 9 * now), folder={"free_bytes": 5000 - 10 * now, "disk_bytes": 8000})
        b = server("b", requests=request_counts(9, 1 * now), folder={"free_bytes": 900 - 5 * now, "disk_bytes": 1000})
        return a, b

    for now in range(0, 100, 10):
        found = watched.look(float(now), *status(now))
    assert BOUNDS[1] < found.latency.p50 <= BOUNDS[2] and BOUNDS[8] < found.latency.p99 <= BOUNDS[9]
    assert found.forecast.disk_full == pytest.approx((900 - 5 * 90) / 5)  # of b, at half the rate of a


EVENTS_A = "http://a:1"


class Look:
    """One node and its watcher: `look` says which kinds of events a moment brings."""

    def __init__(self):
        self.node, self.watcher, self.texts = NodeState(EVENTS_A, 0.0), EventWatcher(), []

    def look(self, now, *, began=None, run="r", finished=False):
        """`began`: when the node's process did; None: it does not answer."""
        stats = {"name": "a", "uptime": now - (began or 0.0)}
        status = {"role": "server", "ready": True, "time": now, "stats": stats}
        error, told = ("", status) if began is not None else ("refused", None)
        self.node.apply(NodeAnswer(EVENTS_A, now, error=error, status=told))
        found = self.watcher.look(now, run, [self.node], finished=finished)
        self.texts = [each.text for each in found]
        return [each.kind for each in found]


def test_a_node_that_goes_and_comes_back_is_told_once_each_time():
    seen = Look()
    assert seen.look(10.0, began=1.0) == ["run_began"]
    assert seen.look(11.0, began=1.0) == []
    assert seen.look(12.0) == ["node_down"]
    assert seen.look(13.0) == []
    assert seen.look(20.0, began=1.0) == ["node_back"]
    assert seen.texts == ["a answers again, after 8 s."]


def test_another_process_at_the_same_place_is_a_restart_seen_away_or_not():
    seen = Look()
    seen.look(10.0, began=1.0)
    assert seen.look(12.0, began=11.5) == ["node_restarted"]
    assert seen.look(13.0) == ["node_down"]
    assert seen.look(14.0) == []
    assert seen.look(20.0, began=19.0) == ["node_restarted"]
    assert seen.texts == ["a started again."]


def test_a_clock_that_drifts_is_no_restart():
    seen = Look()
    seen.look(10.0, began=1.0)
    assert seen.look(11.0, began=2.9) == []


def test_what_was_away_at_first_has_not_happened():
    seen = Look()
    assert seen.look(10.0, run="") == []
    assert seen.look(11.0, began=10.5, run="") == []


def test_a_run_begins_once_and_is_finished_once_and_so_is_the_next():
    seen = Look()
    assert seen.look(10.0, began=1.0) == ["run_began"]
    assert seen.look(11.0, began=1.0, finished=True) == ["run_finished"]
    assert seen.look(12.0, began=1.0, finished=True) == []
    assert seen.look(13.0, began=1.0, run="s") == ["run_began"]
    assert seen.look(14.0, began=1.0, run="s", finished=True) == ["run_finished"]


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
