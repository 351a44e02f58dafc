"""The deciding parts of the dashboard, one by one: nodes, ledgers of runs, counters, learners, forecasts, actors."""

import numpy as np
import pytest

from memoire.accounting.account import Totals
from memoire.dashboard.collect.actors import MAX_RUNS, ActorList, KeptRun, RunLedgers
from memoire.dashboard.collect.answers import LearnerRow, NodeRow, TableRow
from memoire.dashboard.collect.cluster import FULL, Cluster, Forecasts, until
from memoire.dashboard.collect.counters import (
    LONG_WINDOW,
    NOT_ASKED,
    WINDOW,
    Counters,
    NodeAnswer,
    NodeState,
    embedded,
    quantile,
    waited,
)
from memoire.dashboard.collect.overview import freshness_of, learning_of, open_addresses, tables_of
from memoire.dashboard.settings import Settings
from memoire.figures import BOUNDS
from memoire.tables.inspection import SampleFreshness
from memoire.wire.frames import name_hash
from memoire.wire.rows import ACCOUNT

A = "http://a:1"


def settings(**changes):
    return Settings(nodes=(A,), **changes)


def server(name="a", **stats):
    made = NodeState(A, 0.0)
    made.apply(
        NodeAnswer(A, 1.0, status={"role": "server", "ready": True, "stats": {"name": name, "run": "r"} | stats})
    )
    return made


def rows_of(*clients, **columns):
    rows = np.zeros(len(clients), ACCOUNT)
    rows["client"] = [(client, client) for client in clients]
    rows["home"], rows["since"], rows["last_seen"] = name_hash("a"), 1, 5.0
    for name, value in columns.items():
        rows[name] = value
    return rows


def key(client):
    return client.to_bytes(8, "little") * 2


# ------------------------------------------------------------------------------------------------------------ nodes


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


# ---------------------------------------------------------------------------------------------------------- ledgers


def test_the_run_that_is_counted_stays_at_hand_however_many_are_asked_for():
    ledgers = RunLedgers(lambda run: b"")
    counted = ledgers.of("counted", "counted")
    former = ledgers.of("former", "counted")
    for number in range(MAX_RUNS):
        ledgers.of(f"r{number}", "counted")
    assert ledgers.of("counted", "counted") is counted
    assert ledgers.of("former", "counted") is not former


# ---------------------------------------------------------------------------------------------- counters and learners


def test_how_late_td_errors_are_is_compared_with_the_seconds_of_steps_that_actors_hold():
    """`feedback_late` is said of this; 10 TD errors took 20 s in both lives of the server, and 100 steps took 10 s."""
    counters = Counters()
    assert counters.feedback(500) is None, "nothing is known yet"
    for now, epoch, number in ((0.0, 1, 4), (5.0, 1, 8), (10.0, 2, 6)):
        delay = {"seconds": 2.0 * number, "counts": [0, number // 2, number // 2]}
        counters.count(server(epoch=epoch, feedback_delay=delay))
        counters.count(server("of a former version"))  # which says none
        counters.remember(now, Totals(steps=round(10 * now)), [], [])
    assert counters.gained("feedback", 60.0) == (10, 10.0)
    assert counters.feedback(500) == (2.0, 50.0)
    assert counters.feedback(0) is None, "actors say no memory: they store episodes"


def test_a_minute_without_draws_is_idle_and_half_of_one_says_nothing():
    counters = Counters()
    found = []
    for now in (0.0, LONG_WINDOW / 2, LONG_WINDOW / 2 + 1.0):
        counters.count(server(tables={"t": {"samples": 5}}))
        counters.remember(now, Totals(), [], [])
        found.append(counters.is_idle)
    assert found == [False, False, True]
    counters.count(server(tables={"t": {"samples": 6}}))
    counters.remember(60.0, Totals(), [], [])
    assert not counters.is_idle


def test_nothing_has_no_quantile_and_the_last_bucket_no_end():
    counts = [0.0] * len(BOUNDS)
    assert quantile([*counts, 0.0], 0.5) is None
    assert quantile([*counts, 3.0], 0.5) == BOUNDS[-1]


def learner(name, batches, seconds, share=None):
    return LearnerRow(name, "gpu", 0.0, batches, 0.0, seconds, share, {})


def test_the_waiting_share_is_of_the_learner_that_waits_most():
    rows = [learner("a", 0.0, 0.0, 0.2), learner("b", 0.0, 0.0, 0.7), learner("c", 0.0, 0.0)]
    assert Counters().rates(rows).waiting_share == 0.7
    assert Counters().rates(rows[2:]).waiting_share is None


def test_a_learner_in_a_server_that_began_anew_has_waited_since_then_alone():
    counters = Counters()
    name = embedded(server())
    for now, epoch, batches, seconds in ((0.0, 1, 50.0, 30.0), (10.0, 2, 20.0, 4.0)):
        counters.remember(now, Totals(), [server(epoch=epoch)], [learner(name, batches, seconds)])
    assert counters.gained(waited(name), WINDOW) == (4.0, 10.0)
    assert counters.rates([]).batches == 2.0


# -------------------------------------------------------------------------------------------------------- forecasts


def table(held, limit, full):
    made = dict.fromkeys(TableRow.__dataclass_fields__, 0)
    return TableRow(**made | {"held_bytes": held, "byte_limit": limit, "full": full})


def watched(made, *nodes, every=60.0):
    """What a cluster does at each look, `every` seconds apart."""
    for number, (steps, held, free) in enumerate(nodes):
        folder = {"free_bytes": free} if free is not None else None
        up = [server(held_bytes=held, folder=folder)]
        made.remember(every * number, Totals(steps=steps), up)
    return up


def test_what_grows_reaches_its_end_at_the_rate_that_it_grows_at():
    made = Forecasts(settings(goal_steps=1000))
    up = watched(made, (0, 100, 900), (60, 160, 840), (120, 220, 780))
    found = made.forecast(Totals(steps=120), [table(220, 420, 220 / 420)], up)
    assert (found.memory_full, found.disk_full, found.goal) == (200.0, 780.0, 880.0)
    made.clear()
    found = made.forecast(Totals(steps=120), [table(220, 420, 220 / 420)], up)
    assert (found.memory_full, found.disk_full, found.goal) == (None, None, None)


def test_what_goes_up_and_down_fills_nothing_and_what_is_full_is_full_now():
    made = Forecasts(settings(goal_episodes=10))
    up = watched(made, (0, 100, None), (0, 300, None), (0, 200, None))
    found = made.forecast(Totals(episodes=10), [table(200, 400, 0.5)], up)
    assert (found.memory_full, found.disk_full, found.goal) == (None, None, 0.0)
    assert made.forecast(Totals(), [table(200, 400, FULL)], up).memory_full == 0.0
    assert made.forecast(Totals(), [table(200, 0, None)], up).memory_full is None


@pytest.mark.parametrize(
    ("left", "rate", "seconds"),
    [(0.0, 1.0, 0.0), (-5.0, 0.0, 0.0), (6.0, 3.0, 2.0), (1.0, 0.0, None), (4e7, 1.0, None)],
)
def test_more_than_a_year_is_never(left, rate, seconds):
    assert until(left, rate) == seconds


# ----------------------------------------------------------------------------------------------------------- actors


def test_actors_are_active_silent_gone_or_idle():
    made = ActorList(settings(silent_after=10.0, expected_actors=9))
    kept = KeptRun(rows_of(1, 2, 3, 4, last_seen=[20.0, 10.0, 9.0, 20.0], flags=[0, 0, 0, 1]))
    gone = server(guests=50)
    gone.apply(NodeAnswer(A, 2.0, error="down"))
    found = made.presence(kept, [server(guests=3), server(), gone], 20.0)
    assert (found.active, found.silent, found.gone, found.idle, found.missing) == (5, 1, 1, 3, 4)
    states = {row.client: row.state for row in made.rows(kept, 20.0)}
    assert states == {key(n).hex(): state for n, state in ((1, "active"), (2, "active"), (3, "silent"), (4, "gone"))}


def test_the_list_of_actors_is_made_once_a_second_unless_accounts_change():
    made, kept = ActorList(settings(silent_after=1e9)), KeptRun(rows_of(1, steps=1))
    first = made.rows(kept, 5.2)
    assert made.rows(kept, 5.9) is first
    assert made.rows(kept, 6.0) is not first
    kept.take(rows_of(1, 2, steps=2))
    assert len(made.rows(kept, 6.1)) == 2


# --------------------------------------------------------------------------------------------------------- overview


def of_table(**figures):
    rate = {"draws_wait": "", "inserts_wait": ""}
    return {"storage": "caches", "samples_per_insert_target": 2.0, "rate": rate, "freshness": None} | figures


def test_a_table_is_the_sum_of_its_servers_and_as_full_as_its_fuller_limit():
    a = of_table(held_bytes=10, byte_limit=100, held_caches=3, capacity=4, rate={"draws_wait": "", "inserts_wait": "x"})
    b = of_table(held_bytes=30, byte_limit=100, held_caches=1, capacity=4, clients=2)
    (found, other) = tables_of(
        [server("a", tables={"t": a}), server("b", tables={"t": b, "u": of_table()}), server("c")]
    )
    assert (found.held_bytes, found.byte_limit, found.clients, found.samples) == (40, 200, 2, 0)
    assert (found.full, found.rate.inserts_wait, found.rate.draws_wait, sorted(found.facts)) == (
        0.5,
        "x",
        "",
        ["a", "b"],
    )
    assert (other.name, other.full) == ("u", None)


def test_without_episodes_and_batches_there_is_no_mean_and_nothing_fresh():
    up = [server(scalars={"loss": {"mean": 0.0, "count": 0}}, recent={"count": 0}, tables={"t": of_table()})]
    found = learning_of(up)
    assert (found.return_mean, found.client_scalars, freshness_of(up)) == (None, {}, SampleFreshness())


def test_what_is_open_is_listed_with_its_node_and_the_dashboard_last():
    rows = [NodeRow(name, A, "", "up", 0.0, [], "", None, None, None, None, 0, 0.0, open=("x",)) for name in ("a", "")]
    assert open_addresses(rows, settings()) == ["a x", f"{A} x"]
    opened = settings(listen="0.0.0.0:1", insecure=True)
    assert open_addresses(rows, opened)[2:] == ["dashboard http://0.0.0.0:1"]


# ---------------------------------------------------------------------------------------------------------- cluster

B = "http://b:1"


def asked(cluster, url=A, run="r", *, time=1.0, rows=(), row_bytes=ACCOUNT.itemsize, **more):
    """The cluster hears what a server says that counts this run."""
    status = {"role": "server", "ready": True, "stats": {"name": url[7], "run": run, "tables": {}}}
    packed = np.concatenate(rows).tobytes() if rows else b""
    told = {"run": run, "runs": [run], "row_bytes": row_bytes, "rows": packed}
    cluster.apply(NodeAnswer(url, time, status=status, accounts=[told], **more))


def cluster_of(*urls):
    made = Cluster(settings(silent_after=1e9))
    made.listed(urls, 0.0)
    return made


def test_what_unknown_nodes_and_other_versions_say_is_left_out():
    cluster = cluster_of(A)
    asked(cluster, B, rows=[rows_of(1, steps=5)])
    assert cluster.look(1.0)[0].totals.steps == 0 and list(cluster.nodes) == [A]
    asked(cluster, A, rows=[rows_of(1, steps=5)], row_bytes=8)
    assert cluster.look(2.0)[0].totals.steps == 0


def test_nodes_that_are_listed_no_more_are_forgotten_with_what_they_said_of_actors():
    cluster = cluster_of(A, B)
    for url, seen in ((A, 2.0), (B, 1.0)):
        asked(cluster, url, rows=[rows_of(1)], clients=[{"client": key(1).hex(), "host": url, "last_seen": seen}])
    cluster.look(1.0)
    assert cluster.actor(key(1).hex()).facts["host"] == A
    cluster.listed([B, "http://c:1"], 2.0)
    cluster.waits_for(A, 5.0)
    cluster.waits_for("http://c:1", 5.0)
    assert cluster.actor(key(1).hex()).facts["host"] == B
    found = cluster.look(2.0)[0]
    assert [node.url for node in found.nodes] == [B, "http://c:1"] and found.missing == ["http://c:1"]
    assert found.nodes[1].reasons == ["http://c:1 has not answered for 5.0 s"]


def test_actors_have_accounts_and_homes_of_the_run_that_is_counted():
    cluster = cluster_of(A)
    asked(cluster, rows=[rows_of(1, 2, steps=5)])
    assert cluster.look(1.0)[0].actors.active == 2
    assert [row.home for row in cluster.actors()] == ["a", "a"]
    assert [row["steps"] for row in cluster.actor(key(2).hex()).homes] == [5]
    asked(cluster, run="q", rows=[rows_of(3, steps=5)])
    cluster.look(2.0)
    assert [row.client for row in cluster.actors()] == [key(3).hex()] and cluster.actor(key(2).hex()) is None
