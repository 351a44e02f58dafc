"""Logic of the dashboard: nodes, ledgers of runs, counters, forecasts, actors, and figures merged from many nodes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.accounting.account import Totals
from memoire.dashboard.collect.actors import (
    MAX_RUNS,
    QUANTILES,
    RECENT_EPISODES,
    RECENT_SECONDS,
    ActorList,
    RecentReturns,
    RunLedger,
    RunLedgers,
)
from memoire.dashboard.collect.answers import EpisodeRow, NodeRow, TableRow
from memoire.dashboard.collect.cluster import FULL, Cluster, EventWatcher, Forecasts, seconds_until
from memoire.dashboard.collect.counters import LONG_WINDOW, NOT_ASKED, Counters, NodeAnswer, NodeState, quantile
from memoire.dashboard.collect.history import recording_gaps
from memoire.dashboard.collect.overview import freshness_of, learning_of, open_addresses, reachable
from memoire.dashboard.settings import Settings
from memoire.figures import BOUNDS
from memoire.tables.inspection import SampleFreshness
from memoire.wire.frames import name_hash
from memoire.wire.rows import ACCOUNT

A, B = "http://a:1", "http://b:1"


def settings(**changes):
    return Settings(nodes=(A,), **changes)


def table(**figures):
    """Return a server's figures of a table of caches."""
    plain = dict.fromkeys(
        ("clients", "held_caches", "held_bytes", "byte_limit", "unused_samples", "samples", "batches", "waited",
         "overwritten_caches", "episodes", "steps", "capacity"), 0)  # fmt: skip
    rate = {"draws_wait": "", "inserts_wait": ""}
    return plain | {"storage": "caches", "samples_per_insert": 1.0, "rate": rate, "freshness": None} | figures


def status_of(name, *, tables=None, **stats):
    """Return a server's status, by default with one table."""
    table_figures = {"t": table(samples=stats.get("samples", 0))} if tables is None else tables
    plain = {"name": name, "run": "r", "epoch": 1, "samples": 0, "tables": table_figures}
    return {"role": "server", "ready": True, "stats": plain | stats}


def server(name="a", **stats):
    node = NodeState(A, 0.0)
    node.apply(NodeAnswer(A, 1.0, status=status_of(name, **stats)))
    return node


def rows_of(*clients, home="a", **columns):
    rows = np.zeros(len(clients), ACCOUNT)
    rows["client"] = [(client, client) for client in clients]
    rows["home"], rows["since"], rows["last_seen"] = name_hash(home), 1, 5.0
    for name, value in columns.items():
        rows[name] = value
    return rows


def key(client):
    return client.to_bytes(8, "little") * 2


def test_the_state_of_a_node_begins_when_it_changes_and_not_with_each_answer():
    node = NodeState(A, 1.0, error=NOT_ASKED)
    seen = []
    for time, error, ready in (
        (2.0, "", True),
        (3.0, "", True),
        (4.0, "", False),
        (5.0, "refused", None),
        (6.0, "", True),
    ):
        status = None if ready is None else {"role": "server", "ready": ready, "stats": {"name": "a"}}
        node.apply(NodeAnswer(A, time, took=time / 10, error=error, status=status))
        seen.append((node.state, node.since, node.error, node.is_up))
    assert seen == [
        ("up", 2.0, "", True), ("up", 2.0, "", True), ("unready", 4.0, "", True),
        ("down", 5.0, "refused", False), ("up", 6.0, "", True),
    ]  # fmt: skip
    assert node.took == 0.6


def test_what_a_node_said_once_holds_until_it_says_something_else():
    node = server()
    node.apply(NodeAnswer(A, 2.0, settings={"port": 1}, accounts=[{"runs": ["r", "q"]}]))
    node.apply(NodeAnswer(A, 3.0, error="timed out"))
    assert (node.name, node.settings, node.runs, node.error) == ("a", {"port": 1}, ["r", "q"], "timed out")


def test_only_a_node_that_never_answered_is_said_to_be_silent():
    silent, known = NodeState(A, 0.0, error=NOT_ASKED), server()
    known.apply(NodeAnswer(A, 2.0, error="timed out"))
    for node in (silent, known):
        node.note_silence(2.5)
    assert silent.error == "http://a:1 has not answered for 2.5 s"
    assert known.error == "timed out"


def test_the_run_that_is_counted_stays_at_hand_however_many_are_asked_for():
    ledgers = RunLedgers(lambda run: rows_of(1, steps=5).tobytes())
    counted = ledgers.ledger_of("counted", "counted")
    assert counted.totals().steps == 5, "as it was kept"
    former = ledgers.ledger_of("former", "counted")
    for number in range(MAX_RUNS):
        ledgers.ledger_of(f"r{number}", "counted")
    assert ledgers.ledger_of("counted", "counted") is counted
    assert ledgers.ledger_of("former", "counted") is not former


def test_what_a_server_has_forgotten_and_what_another_one_inherited_counts_once_however_late_it_comes():
    ledger, first = RunLedger(), rows_of(1, steps=50, accepted_caches=3)
    later = rows_of(1, since=2, steps=80, accepted_caches=2), rows_of(1, home="b", steps=70, accepted_caches=4)
    for rows in (first, *later, first):
        ledger.take(rows)
    assert (ledger.totals().steps, ledger.totals().accepted_caches, len(ledger.clients())) == (80, 9, 1)


def test_how_late_td_errors_are_is_compared_with_the_seconds_of_steps_that_actors_hold():
    """The base of `feedback_late`: 10 TD errors took 20 s in both lives of the server, and 100 steps took 10 s."""
    counters = Counters()
    assert counters.feedback(500) is None, "nothing is known yet"
    for now, epoch, number in ((0.0, 1, 4), (5.0, 1, 8), (10.0, 2, 6)):
        delay = {"seconds": 2.0 * number, "counts": [0, number // 2, number // 2]}
        counters.count(server(epoch=epoch, feedback_delay=delay))
        counters.count(server("of a former version"))  # a report without this figure
        counters.remember(now, Totals(steps=round(10 * now)), [], [])
    assert counters.growth("feedback", 60.0) == (10, 10.0)
    assert counters.feedback(500) == (2.0, 50.0)
    assert counters.feedback(0) is None, "actors say no memory: they store episodes"


def test_a_minute_without_draws_is_idle_and_half_of_one_says_nothing():
    counters = Counters()
    idle = []
    for now in (0.0, LONG_WINDOW / 2, LONG_WINDOW / 2 + 1.0):
        counters.count(server(tables={"t": {"samples": 5}}))
        counters.remember(now, Totals(), [], [])
        idle.append(counters.is_idle)
    assert idle == [False, False, True]
    counters.count(server(tables={"t": {"samples": 6}}))
    counters.remember(60.0, Totals(), [], [])
    assert not counters.is_idle


def test_nothing_has_no_quantile_and_the_last_bucket_no_end():
    counts = [0.0] * len(BOUNDS)
    assert quantile([*counts, 0.0], 0.5) is None
    assert quantile([*counts, 3.0], 0.5) == BOUNDS[-1]


def filled(held, limit, full):
    fields = dict.fromkeys(TableRow.__dataclass_fields__, 0)
    return TableRow(**fields | {"held_bytes": held, "byte_limit": limit, "full": full})


def watched(forecasts, *nodes, every=60.0):
    """Add the state of a cluster at each look, `every` seconds apart, to forecasts. Return the servers."""
    for number, (steps, held, free) in enumerate(nodes):
        folder = {"free_bytes": free} if free is not None else None
        up = [server(held_bytes=held, folder=folder)]
        forecasts.remember(every * number, Totals(steps=steps), up)
    return up


def test_what_grows_reaches_its_end_at_the_rate_that_it_grows_at():
    forecasts = Forecasts(settings(goal_steps=1000))
    up = watched(forecasts, (0, 100, 900), (60, 160, 840), (120, 220, 780))
    forecast = forecasts.forecast(Totals(steps=120), [filled(220, 420, 220 / 420)], up)
    assert (forecast.memory_full, forecast.disk_full, forecast.goal) == (200.0, 780.0, 880.0)
    forecasts.clear()
    forecast = forecasts.forecast(Totals(steps=120), [filled(220, 420, 220 / 420)], up)
    assert (forecast.memory_full, forecast.disk_full, forecast.goal) == (None, None, None)


def test_what_goes_up_and_down_fills_nothing_and_what_is_full_is_full_now():
    forecasts = Forecasts(settings(goal_episodes=10))
    up = watched(forecasts, (0, 100, None), (0, 300, None), (0, 200, None))
    forecast = forecasts.forecast(Totals(episodes=10), [filled(200, 400, 0.5)], up)
    assert (forecast.memory_full, forecast.disk_full, forecast.goal) == (None, None, 0.0)
    assert forecasts.forecast(Totals(), [filled(200, 400, FULL)], up).memory_full == 0.0
    assert forecasts.forecast(Totals(), [filled(200, 0, None)], up).memory_full is None


@pytest.mark.parametrize(
    ("left", "rate", "seconds"),
    [(0.0, 1.0, 0.0), (-5.0, 0.0, 0.0), (6.0, 3.0, 2.0), (1.0, 0.0, None), (4e7, 1.0, None), (math.inf, 1.0, None),
     (100.0, -1.0, None), (0.0, 0.0, 0.0)],
)  # fmt: skip
def test_what_does_not_grow_and_more_than_a_year_is_never(left, rate, seconds):
    assert seconds_until(left, rate) == seconds and 0.9 < FULL < 1.0


def test_actors_are_active_silent_lost_gone_or_idle():
    actors = ActorList(settings(silent_after=10.0, lost_after=15.0, expected_actors=9))
    last_seen = [20.0, 10.0, 9.0, 20.0, 5.0, 4.0]
    ledger = RunLedger(rows_of(*range(1, 7), last_seen=last_seen, flags=[0, 0, 0, 1, 0, 0]))
    gone = server(guests=50)
    gone.apply(NodeAnswer(A, 2.0, error="down"))
    presence = actors.state_counts(ledger, [server(guests=3), server(), gone], 20.0)
    assert (presence.active, presence.silent, presence.gone, presence.idle, presence.missing) == (5, 2, 1, 3, 4)
    assert presence.lost == 1
    states = {row.client: row.state for row in actors.rows(ledger, 20.0)}
    expected = ("active", "active", "silent", "gone", "silent", "lost")
    assert states == {key(n).hex(): state for n, state in enumerate(expected, 1)}


def test_the_list_of_actors_is_made_once_a_second_unless_accounts_change():
    actors, ledger = ActorList(settings(silent_after=1e9)), RunLedger(rows_of(1, steps=1))
    first = actors.rows(ledger, 5.2)
    assert actors.rows(ledger, 5.9) is first
    assert actors.rows(ledger, 6.0) is not first
    ledger.take(rows_of(1, 2, steps=2))
    assert len(actors.rows(ledger, 6.1)) == 2


def test_without_episodes_and_batches_there_is_no_mean_and_nothing_fresh():
    up = [server(scalars={"loss": {"mean": 0.0, "count": 0}}, recent={"count": 0}, tables={"t": table()})]
    learning = learning_of(up)
    assert (learning.return_mean, learning.client_scalars, freshness_of(up)) == (None, {}, SampleFreshness())


def test_what_is_open_is_listed_with_its_node_and_the_dashboard_last():
    rows = [NodeRow(name, A, "", "up", 0.0, [], "", None, None, None, None, 0, 0.0, open=("x",)) for name in ("a", "")]
    assert open_addresses(rows, settings()) == ["a x", f"{A} x"]
    opened = settings(listen="0.0.0.0:1", insecure=True)
    assert open_addresses(rows, opened)[2:] == ["dashboard http://0.0.0.0:1"]


def feed(cluster, url=A, run="r", *, time=1.0, status=None, rows=(), row_bytes=ACCOUNT.itemsize, **more):
    """Feed a server's answer with accounts of this run to the cluster."""
    packed = np.concatenate(rows).tobytes() if rows else b""
    accounts = {"run": run, "runs": [run], "row_bytes": row_bytes, "rows": packed}
    cluster.apply(NodeAnswer(url, time, status=status or status_of(url[7], run=run), accounts=[accounts], **more))


def cluster_of(*urls):
    cluster = Cluster(settings(silent_after=1e9))
    cluster.set_addresses(urls, 0.0)
    return cluster


def test_what_unknown_nodes_and_other_versions_say_is_left_out():
    cluster = cluster_of(A)
    feed(cluster, B, rows=[rows_of(1, steps=5)])
    assert cluster.refresh(1.0)[0].totals.steps == 0 and list(cluster.nodes) == [A]
    feed(cluster, A, rows=[rows_of(1, steps=5)], row_bytes=8)
    assert cluster.refresh(2.0)[0].totals.steps == 0


def test_nodes_that_are_listed_no_more_are_forgotten_with_what_they_said_of_actors():
    cluster = cluster_of(A, B)
    for url, seen in ((A, 2.0), (B, 1.0)):
        feed(cluster, url, rows=[rows_of(1)], clients=[{"client": key(1).hex(), "host": url, "last_seen": seen}])
    cluster.refresh(1.0)
    assert cluster.actor(key(1).hex()).facts["host"] == A
    cluster.set_addresses([B, "http://c:1"], 2.0)
    cluster.note_unanswered(A, 5.0)
    cluster.note_unanswered("http://c:1", 5.0)
    assert cluster.actor(key(1).hex()).facts["host"] == B
    overview = cluster.refresh(2.0)[0]
    assert [node.url for node in overview.nodes] == [B, "http://c:1"] and overview.missing == ["http://c:1"]
    assert overview.nodes[1].reasons == ["http://c:1 has not answered for 5.0 s"]


def test_actors_have_accounts_and_homes_of_the_run_that_is_counted():
    cluster = cluster_of(A)
    feed(cluster, rows=[rows_of(1, 2, steps=5)])
    assert cluster.refresh(1.0)[0].actors.active == 2
    assert [row.home for row in cluster.actors()] == ["a", "a"]
    assert [row["steps"] for row in cluster.actor(key(2).hex()).homes] == [5]
    feed(cluster, run="q", rows=[rows_of(3, steps=5)])
    cluster.refresh(2.0)
    assert [row.client for row in cluster.actors()] == [key(3).hex()] and cluster.actor(key(2).hex()) is None


FRESH = {"age_median": 1.0, "age_p90": 5.0, "age_max": 9.0, "lag_mean": 2.0, "lag_max": 7.0, "left_out": 0.3, "effective": 0.9}  # fmt: skip
FAR = {"age_median": 4.0, "age_p90": 4.5, "age_max": 5.0, "lag_mean": 3.0, "lag_max": 3.5, "left_out": 0.1, "effective": 0.4}  # fmt: skip


def reader(learner, *, seen, waited, batches=0.0, **figures):
    figures |= {"batches": batches, "samples": 0.0, "waited": waited}
    return {"learner": learner, "host": "gpu", "last_seen": seen, "figures": figures, "scalars": {}}


class Watched:
    """Two servers that answer one after the other at the same moment."""

    def __init__(self):
        self.cluster = cluster_of(A, B)

    def look(self, now, a, b, *rows):
        feed(self.cluster, A, time=now, status=a, rows=rows)
        feed(self.cluster, B, time=now, status=b)
        return self.cluster.refresh(now)[0]


def request_counts(place, count):
    return {"HELLO": {"counts": [count if each == place else 0 for each in range(len(BOUNDS) + 1)]}}


def test_shares_of_actors_that_skip_are_of_all_their_caches_together():
    watched = Watched()
    one = {"pushed_caches": 1000, "skipped": 500}
    watched.look(
        0.0, status_of("a"), status_of("b"), rows_of(1, **one), rows_of(2, home="b", pushed_caches=10, skipped=90)
    )
    rows = rows_of(1, pushed_caches=1030, skipped=510), rows_of(2, home="b", pushed_caches=20, skipped=140)
    overview = watched.look(10.0, status_of("a"), status_of("b"), *rows)
    assert overview.rates.skipped_share == pytest.approx(60 / 100)  # share of ten seconds, no mean of 25 % and 83 %
    assert (overview.totals.pushed_caches, overview.totals.skipped_caches) == (1050, 650)


def test_of_learners_the_one_that_waits_most_is_told_and_of_freshness_the_worst():
    watched = Watched()

    def status(now):
        far = reader("r1", seen=now, waited=50.0 + 0.7 * now, batches=5.0 * now, **FAR)
        former = reader("r1", seen=now - 9.0, waited=0.0)  # another server sent an older report
        figures = {"batches": int(10 + 3 * now), "waited": 100.0 + 0.1 * now, "learners": [former]}
        return status_of("a", tables={"t": table(freshness=FRESH)}, **figures), status_of("b", learners=[far])

    for now in (0.0, 10.0, 20.0):  # shares describe the earlier looks
        overview = watched.look(now, *status(now))
    shares = {row.learner: row.waiting_share for row in overview.learners}
    assert shares == {"server:a": pytest.approx(0.1), "r1": pytest.approx(0.7)}
    assert overview.rates.waiting_share == pytest.approx(0.7) and overview.rates.batches == pytest.approx(8.0)
    worst = {name: getattr(overview.freshness, name) for name in FRESH}
    assert worst == {name: max(FRESH[name], FAR[name]) for name in FRESH} | {"effective": 0.4}
    assert overview.freshness.effective == 0.4  # the least: of this figure, more is better


def test_means_are_over_all_episodes_and_clients_and_not_over_servers():
    def status(name, count, mean, least, most, length, scalar):
        recent = {"count": count, "return_mean": mean, "return_min": least, "return_max": most, "length_mean": length}
        return status_of(name, recent=recent, scalars={"loss": scalar}, learner_scalars={f"of {name}": mean})

    a = status("a", 30, 10.0, -5.0, 20.0, 100.0, {"count": 1, "mean": 8.0})
    b = status("b", 10, 50.0, 40.0, 60.0, 20.0, {"count": 3, "mean": 4.0})
    recent = Watched().look(0.0, a, b).learning
    assert (recent.return_mean, recent.return_min, recent.return_max, recent.length_mean) == (20.0, -5.0, 60.0, 80.0)
    assert recent.client_scalars == {"loss": 5.0} and recent.learner_scalars == {"of a": 10.0, "of b": 50.0}
    empty = status_of("b", recent={"count": 0, "return_mean": None})
    assert Watched().look(0.0, a, empty).learning.return_mean == 10.0


def counted(name, epoch, number):
    """Return the status of a server with this number for all counters in this life."""
    refused, requests = {"schema": number, "missing": 7 * number}, request_counts(2, number)
    status = status_of(name, epoch=epoch, samples=number, refused=refused, requests=requests, log_lines=number)
    status["stats"] |= {"batches": number, "waited": number / 1000}
    return status


def test_what_a_server_counted_before_it_began_anew_is_kept_also_where_the_new_count_overtook():
    watched = Watched()
    quiet = status_of("b", samples=1_000_000)
    watched.look(0.0, counted("a", 1, 100), quiet)
    watched.look(5.0, counted("a", 1, 200), quiet)
    overview = watched.look(10.0, counted("a", 2, 900), quiet)  # 100 entries in its first life, 900 in the next
    rates = overview.rates
    assert (rates.samples, rates.log_lines, rates.refused, rates.batches) == (100.0, 100.0, 100.0, 100.0)
    (row,) = watched.look(15.0, counted("a", 2, 900), quiet).learners  # shares describe the earlier looks
    assert row.waiting_share == pytest.approx(0.1)  # the learner waited a second of the ten


def test_tables_add_up_and_what_holds_them_up_is_told_of_any_server():
    one = {"clients": 1, "held_caches": 2, "held_bytes": 30, "byte_limit": 100, "unused_samples": 5, "batches": 6,
           "waited": 7.0, "overwritten_caches": 8, "episodes": 9, "steps": 10, "capacity": 4}  # fmt: skip
    two = {name: 10 * value for name, value in one.items()} | {"rate": {"draws_wait": "more", "inserts_wait": "less"}}
    by_bytes = table(held_bytes=90, byte_limit=100, held_caches=1, capacity=4)
    a = status_of("a", tables={"t": table(samples=3, **one)})
    b = status_of("b", tables={"t": table(samples=30, **two), "u": by_bytes, "v": table()})
    row, other, unbounded = Watched().look(0.0, a, b).tables
    assert {name: getattr(row, name) for name in one} == {name: 11 * value for name, value in one.items()}
    assert (row.samples, row.rate.draws_wait, row.rate.inserts_wait, row.full) == (33, "more", "less", 22 / 44)
    assert row.facts.keys() == {"a", "b"} and (other.full, unbounded.full) == (0.9, None)


def test_latency_is_of_all_requests_and_a_disk_is_the_first_to_be_full():
    watched = Watched()

    def status(now):
        a = status_of(
            "a", requests=request_counts(2, 9 * now), folder={"free_bytes": 5000 - 10 * now, "disk_bytes": 8000}
        )
        b = status_of(
            "b", requests=request_counts(9, 1 * now), folder={"free_bytes": 900 - 5 * now, "disk_bytes": 1000}
        )
        return a, b

    for now in range(0, 100, 10):
        overview = watched.look(float(now), *status(now))
    assert BOUNDS[1] < overview.latency.p50 <= BOUNDS[2] and BOUNDS[8] < overview.latency.p99 <= BOUNDS[9]
    assert overview.forecast.disk_full == pytest.approx((900 - 5 * 90) / 5)  # the disk of b fills at half the rate of a


class Look:
    """One node and its watcher of events."""

    def __init__(self):
        self.node, self.watcher, self.text = NodeState(A, 0.0), EventWatcher(), ""

    def look(self, now, began, *, run="r", finished=False):
        """Return the kinds of events at a moment. `began`: start of the node's process, or None without an answer."""
        status = {"role": "server", "ready": True, "time": now, "stats": {"name": "a", "uptime": now - (began or 0.0)}}
        error, answer = ("", status) if began is not None else ("refused", None)
        self.node.apply(NodeAnswer(A, now, error=error, status=answer))
        events = self.watcher.new_events(now, run, [self.node], finished=finished)
        self.text = events[-1].text if events else ""
        return [each.kind for each in events]


HAPPENS = {
    "a node that comes back": ([1.0, 1.0, None, None, 1.0], ["run_began", "", "node_down", "", "node_back"], "a answers again, after 2 s."),
    "another process": ([1.0, 10.9, None, None, 14.0], ["run_began", "node_restarted", "node_down", "", "node_restarted"], "a was restarted."),
    "a clock that drifts": ([1.0, 2.9], ["run_began", ""], ""),
    "what was away at first": ([None, 10.5], ["run_began", ""], ""),
}  # fmt: skip
"""Starts of the node's process at 10, 11, 12 s .. (None: no answer); kinds of events; text of the last event."""


@pytest.mark.parametrize(("began", "kinds", "text"), HAPPENS.values(), ids=HAPPENS)
def test_each_thing_that_happens_to_a_node_is_told_once(began, kinds, text):
    seen = Look()
    assert [seen.look(10.0 + n, each) for n, each in enumerate(began)] == [[kind] if kind else [] for kind in kinds]
    assert seen.text == text


def test_a_run_begins_once_and_is_finished_once_and_so_is_the_next():
    seen, kinds = Look(), []
    for run, finished in (("", False), ("r", False), ("r", True), ("r", True), ("s", False), ("s", True)):
        kinds += seen.look(10.0 + len(kinds), 1.0, run=run, finished=finished)
    assert kinds == ["run_began", "run_finished"] * 2


def ended(client, returned, time=0.0):
    return EpisodeRow(client, time, 1, returned)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-1e6, 1e6)), max_size=120))
def test_quantiles_are_those_of_each_actors_newest_episodes(episodes):
    returns = RecentReturns()
    returns.add(ended(*each) for each in episodes)
    newest = [[value for who, value in episodes if who == actor][-RECENT_EPISODES:] for actor in "abcd"]
    means = [math.fsum(values) / len(values) for values in newest if values]
    figures = returns.figures()
    if len(means) < 2:
        assert figures == {}
    else:
        quantiles = [figures[f"return_p{part}"].mean for part in QUANTILES]
        assert quantiles == pytest.approx(np.percentile(means, QUANTILES).tolist())


def test_an_actor_that_ended_long_ago_and_a_return_that_is_no_number_do_not_count():
    returns = RecentReturns()
    returns.add(
        [ended("old", 100.0, 0.0), ended("a", 1.0, RECENT_SECONDS + 1.0), ended("b", 3.0, RECENT_SECONDS + 2.0)]
    )
    assert returns.figures()["return_p90"].mean == pytest.approx(2.8)
    returns.clear()
    assert returns.figures() == {}
    returns.add([ended("a", math.nan), ended("a", 1.0), ended("b", 3.0), ended("b", math.inf)])
    assert returns.figures()["return_p50"].mean == 2.0
    assert [returns.mean_of(client) for client in "abc"] == [1.0, 3.0, None]


@pytest.mark.parametrize(
    ("times", "bucket", "stretches"),
    [
        ([], 1.0, []),
        ([0.0, 1.0, 2.0, 60.0, 61.0], 1.0, [[3.0, 60.0]]),
        ([0.0, 6.0], 1.0, []),
        ([0.0, 6.1], 1.0, [[1.0, 6.1]]),
        ([0.0, 300.0, 900.0], 300.0, [[600.0, 900.0]]),
    ],
)
def test_curves_have_a_gap_where_nobody_looked_for_longer_than_is_usual(times, bucket, stretches):
    assert recording_gaps(times, bucket, 5.0) == stretches


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
