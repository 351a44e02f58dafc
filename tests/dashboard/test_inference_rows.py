"""Rows of inference nodes, models, start states and prompts."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.dashboard.collect.actors import acting_versions, versions_behind
from memoire.dashboard.collect.answers import StartsRow
from memoire.dashboard.collect.cluster import Cluster
from memoire.dashboard.collect.counters import NodeAnswer, NodeState
from memoire.dashboard.collect.overview import MAX_LINEAGE, kind_specific_figures, starts_of
from memoire.dashboard.settings import Settings
from memoire.figures import BOUNDS

NODE, SERVER = "http://i:1", "http://s:1"


def timing(seconds, place, count):
    return {"seconds": seconds, "counts": [count if each == place else 0 for each in range(len(BOUNDS) + 1)]}


def inference(now, *, version=3, pid=1, **changes):
    """Return the status of a node with 100 requests of 8 rows a second in batches of 16, mostly 4 ms, and 2 refused."""
    answered = {"full": timing(0.2 * now, 5, 90 * now), "wait": timing(0.6 * now, 9, 10 * now)}
    answered["everyone"] = timing(0, 0, 0)
    stats = {
        "name": "i-0", "topic": "policy", "version": version, "clients": 5, "queue_rows": 7, "rows": 800 * now,
        "batched_rows": 800 * now, "computed_seconds": 0.25 * now, "refused": {"busy": 2 * now, "failed": 0},
        "batches": {"full": 40 * now, "everyone": 0, "wait": 10 * now}, "failures": 1, "weights_failures": 2, "expired": 3,
        "waits": answered, "durations": answered, "requests": 100 * now,
    }  # fmt: skip
    return {"role": "inference", "ready": True, "process": {"pid": pid, "host": "h"}, "stats": stats | changes}


def rollouts(now, *, stale=0, taken=100, **changes):
    rate = {"draws_wait": "", "inserts_wait": ""}
    fresh = {"lag_mean": 1.5, "lag_max": 4.0, "age_median": 1.0, "age_p90": 2.0, "age_max": 3.0, "left_out": 0.0, "effective": 1.0}  # fmt: skip
    table = {
        "storage": "rollouts", "samples_per_insert_target": 0.0, "steps": 200 * now, "samples": taken * now, "batches": now,
        "passed_over_samples": stale * now, "rate": rate, "freshness": fresh,
    }  # fmt: skip
    stats = {"name": "s", "run": "r", "epoch": 1, "tables": {"rollouts": table}, "models": {"policy": 5}}
    return {"role": "server", "ready": True, "stats": stats | changes}


def watched(seconds, node=inference, server=rollouts, settings=None, **changes):
    """Return the overview of a server and an inference node after so many seconds, and the figures for the history."""
    cluster = Cluster(Settings(nodes=(SERVER, NODE), **changes))
    cluster.set_addresses([SERVER, NODE], 1000.0)
    for now in range(0, seconds + 1, 5):
        cluster.apply(NodeAnswer(SERVER, 1000.0 + now, status=server(now), settings=settings))
        cluster.apply(NodeAnswer(NODE, 1000.0 + now, status=node(now)))
        result = cluster.refresh(1000.0 + now)
    return result


def test_a_node_that_was_started_again_counts_from_nothing_and_one_that_is_away_is_not_shown():
    overview, _ = watched(30, lambda now: inference(now if now < 20 else now - 20, pid=1 + (now >= 20)))
    assert overview.inference[0].rows_per_second == 800.0  # the rate never falls below 0
    cluster = Cluster(Settings(nodes=(NODE,)))
    cluster.set_addresses([NODE], 0.0)
    cluster.apply(NodeAnswer(NODE, 0.0, status=inference(0)))
    cluster.apply(NodeAnswer(NODE, 1.0, error="refused"))
    assert cluster.refresh(1.0)[0].inference == []


@pytest.mark.parametrize(
    ("version", "topic", "is_outdated"), [(5, "policy", False), (4, "policy", True), (4, "", False)]
)
def test_a_node_with_a_model_that_was_replaced_a_minute_ago_is_named(version, topic, is_outdated):
    overview, _ = watched(100, lambda now: inference(now, version=version, topic=topic))
    assert overview.inference[0].is_outdated is is_outdated
    assert overview.inference[0].behind == (5 - version if topic else None)


def test_what_is_too_old_is_a_share_of_what_left_the_table_in_the_newest_minute():
    limit = {"tables": {"rollouts": {"parameters": {"max_model_lag": 2}}}}
    overview, figures = watched(90, server=lambda now: rollouts(now, stale=25, taken=75), settings=limit)
    (table,) = overview.tables
    assert (table.stale_share, table.lag_mean, table.lag_max, table.max_model_lag) == (0.25, 1.5, 4.0, 2)
    assert figures["table.rollouts.stale_share"].mean == 0.25


def test_missing_nodes_of_each_kind_are_counted():
    overview, _ = watched(10, expected_servers=4, expected_proxies=1, expected_inference=3)
    assert {each.role: each.missing for each in overview.roles if each.expected} == {
        "server": 3,
        "proxy": 1,
        "inference": 2,
    }
    codes = {each.code for each in overview.verdicts}
    assert {f"{kind}_missing" for kind in ("servers", "proxies", "inference")} <= codes


@pytest.mark.parametrize(
    ("models", "scalars", "newest", "expected"),
    [
        ({"policy": 3}, {}, {"policy": 5}, (3, 2)),
        ({"policy": 6}, {}, {"policy": 5}, (6, 0)),  # the actor has the model before the server's report
        ({"a": 9, "b": 1}, {}, {"a": 9, "b": 4}, (1, 3)),
        ({}, {"model_version": 4.0}, {"policy": 5}, (4, 1)),  # the version comes from an inference node
        ({"policy": 1}, {"model_version": 4.0}, {"policy": 5}, (4, 1)),
        ({}, {"model_version": 4.0}, {"a": 5, "b": 5}, (None, None)),  # the topic is ambiguous
        ({"policy": 3}, {}, {}, (3, None)),
        ({}, {}, {"policy": 5}, (None, None)),
    ],
)
def test_an_actor_is_behind_the_model_that_was_the_newest_when_it_reported(models, scalars, newest, expected):
    facts = {"models": models, "scalars": scalars, "newest_models": newest}
    assert versions_behind(facts) == expected
    assert versions_behind({}) == (None, None) and acting_versions({}, ["policy"]) == {}


STARTS = {"name": "circuits", "kept": 3, "draws": 40, "best": 41.0, "first": 60.0, "lineage": [[60.0, 0], [41.0, 7]]}
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*STARTS, "x"]), inner, max_size=4),
    max_leaves=12,
)


def node_with(starts, state="up"):
    status = {"role": "agent", "stats": {"name": "a", "starts": starts}}
    return NodeState("http://a:1", 0.0, state, status=status, name="a")


def test_archives_of_start_states_are_read_from_any_node_that_answers():
    wanted = StartsRow("circuits", "a", 3, 40, 41.0, 60.0, [(60.0, 0), (41.0, 7)])
    nodes = [node_with(STARTS), node_with([STARTS, STARTS]), node_with(STARTS, "down"), node_with(None)]
    assert starts_of(nodes) == [wanted] * 3
    assert starts_of([node_with({})]) == [StartsRow("a", "a", 0, 0, None, None, [])]
    long = node_with(STARTS | {"lineage": [[float(-n), n] for n in range(5 * MAX_LINEAGE)]})
    assert [step for _, step in starts_of([long])[0].lineage] == list(range(4 * MAX_LINEAGE, 5 * MAX_LINEAGE))


@given(json)
def test_nothing_that_a_user_s_program_says_of_start_states_breaks_the_overview(starts):
    for row in starts_of([node_with(starts)]):
        numbers = [row.kept, row.draws, *(each for each in (row.best, row.first) if each is not None)]
        assert all(map(math.isfinite, numbers)) and isinstance(row.name, str)
        assert all(math.isfinite(cost) and isinstance(step, int) for cost, step in dataclasses.asdict(row)["lineage"])


def test_ranks_and_holders_of_several_servers_are_added_up():
    def node(name, state="up", **changed):
        figures = {"given": 0, "oldest_lease": 0.0, "lag": 0} | changed
        tables = {"math": {"storage": "prompts", "own": figures}, "other": {"storage": "caches", "own": None}}
        return NodeState(f"http://{name}", 0.0, state=state, name=name, status={"stats": {"tables": tables}})

    holder = {"worker": "ab", "leases": 2, "oldest": 9.0, "left": 1.0}
    held = {"ready": 3, "given": 3, "oldest_lease": 9.0, "lag": 2, "holders": [holder]}
    one = node("a", rank_tokens=[5, 7], reasons={"full": 1}, **held)
    two = node("b", ready=1, given=2, leased=1, oldest_lease=4.0, lag=5, rank_tokens=[1], reasons={"full": 2})
    ((row,),) = kind_specific_figures([one, two, node("c", "down", ready=50, given=50)]).values()
    figures = row.figures
    assert (row.table, row.servers, figures.given, figures.ready, figures.leased) == ("math", 2, 5, 4, 1)
    assert (figures.oldest_lease, figures.lag, figures.rank_tokens, figures.reasons) == (9.0, 5, (6, 7), {"full": 3})
    assert [(each["worker"], each["server"]) for each in figures.holders] == [("ab", "a")]
    assert kind_specific_figures([node("c", "down")]) == {}
