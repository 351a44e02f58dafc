"""Verdicts of random clusters, compared with a slow rule that was written from docs/dashboard.md alone."""

import json
import lzma
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memoire.dashboard.collect.actors import OUTDATED_AFTER, NewestModels
from memoire.dashboard.collect.answers import CODES
from memoire.dashboard.collect.cluster import Cluster
from memoire.dashboard.collect.counters import NodeAnswer
from memoire.dashboard.collect.verdict import verdicts
from memoire.dashboard.settings import Settings
from memoire.wire.frames import name_hash
from memoire.wire.rows import ACCOUNT
from pageskit import WELL, inputs_of

few = st.integers(0, 3)
share = st.floats(0.0, 1.0)
names = st.lists(st.sampled_from("abcdef"), max_size=5, unique=True).map(tuple)
ratios = st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.01, 20.0)), max_size=2)
figures = st.lists(st.floats(0.0, 20.0), max_size=2)
inference = st.builds(
    SimpleNamespace, name=st.sampled_from("xyz"), busy=st.none() | share, p99=st.none() | share,
    refused_per_second=st.floats(0.0, 0.3), is_outdated=st.booleans(),
)  # fmt: skip
signs = st.builds(
    SimpleNamespace,
    nodes=st.integers(0, 6), nodes_down=names, unready=names, servers_up=few, finished=st.booleans(), active=few,
    silent=few, idle=few, expected=few, steps_per_second=st.floats(0, 1e6),
    samples_per_second=st.just(0.0) | st.floats(0, 1e6), waiting_share=st.none() | share, skipped_share=share,
    disk_used=st.none() | share, disk_trouble=st.just(""), refused_per_second=st.floats(0.0, 5.0), draws_wait=names,
    inserts_wait=names, is_idle=st.booleans(), left_out=st.none() | share, lost=few, gone=few, proxies_up=few,
    expected_servers=few, expected_proxies=few, is_still=st.booleans(), nothing_arrives=st.booleans(),
    rejected_share=st.floats(0, 0.1), ratios=ratios, early_ratios=ratios, sample_age=st.none() | st.floats(0, 5000.0),
    stale_after=st.floats(1.0, 5000.0), outdated=few, expected_inference=few,
    inference=st.lists(inference, max_size=3), lags=figures, stale=st.lists(share, max_size=2),
    only_rollouts=st.booleans(), feedback=st.none() | st.tuples(st.floats(0.0, 10.0), st.floats(0.1, 20.0)),
)  # fmt: skip


def holding(*findings):
    return {(level, code) for level, code, holds in findings if holds}


def plain(s):
    """Return the (level, code) of each finding, by one condition after the other."""
    findings = holding(
        ("bad", "no_server", s.servers_up == 0),
        ("bad", "node_down", s.nodes_down),
        ("notice", "node_unready", s.unready),
    )
    if s.nodes_down and not s.unready and s.nodes == 0:
        findings = {("bad", "no_node")}
    findings |= holding(
        ("bad", "disk_full", (s.disk_used or 0.0) > 0.95), ("notice", "refused", s.refused_per_second > 1.0)
    )
    if s.finished:
        return findings | {("good", "finished")}
    findings |= holding(
        ("bad", "servers_missing", s.servers_up < s.expected_servers),
        ("notice" if s.proxies_up else "bad", "proxies_missing", s.proxies_up < s.expected_proxies),
        ("notice" if s.inference else "bad", "inference_missing", len(s.inference) < s.expected_inference),
        ("notice", "actors_idle", s.idle),
        ("notice", "actors_silent", s.silent),
    )
    if s.active == 0:
        if s.servers_up == 0:
            return findings
        away = s.silent + s.lost
        code = "no_actors" if away else "actors_gone" if s.gone else "waiting_for_actors"
        return findings | {("bad" if away else "notice", code)}
    findings |= holding(
        ("notice", "actors_missing", s.active < s.expected and s.servers_up),
        ("notice", "left_out", (s.left_out or 0.0) > 0.2),
        ("notice", "samples_old", (s.sample_age or 0.0) > s.stale_after and not s.is_idle),
        ("notice", "models_behind", s.outdated > 0),
        ("notice", "inference_behind", any(node.is_outdated for node in s.inference)),
        ("notice", "inference_refuses", any(node.refused_per_second > 0.1 for node in s.inference)),
        ("notice", "lag", any(lag > 8.0 for lag in s.lags) and not s.is_idle),
        ("notice", "learner_skips_stale", any(part > 0.1 for part in s.stale)),
        ("notice", "feedback_late", s.feedback is not None and s.feedback[0] > s.feedback[1] / 2),
        ("notice", "caches_rejected", s.rejected_share > 0.01),
    )
    held = len(s.inserts_wait) > 0
    slow = [node for node in s.inference if (node.busy or 0.0) > 0.9 or (node.p99 or 0.0) > 0.25]
    order = [
        ("no_inserts", "bad", s.is_still and not held and s.active - s.idle > 0),
        ("no_caches", "bad", s.nothing_arrives),
        ("inserts_limited", "notice", held and not (s.only_rollouts and (s.waiting_share or 0.0) > 0.3)),
        ("waits_for_inference", "notice", (s.waiting_share or 0.0) > 0.3 and len(slow) > 0),
        ("draws_limited", "notice", len(s.draws_wait) > 0 and s.waiting_share not in (None, 0.0)),
        ("learner_waits", "notice", s.waiting_share is not None and s.waiting_share > 0.3),
        ("actors_ahead", "notice", s.skipped_share > 0.1),
        ("no_learner", "notice", s.is_idle or (s.waiting_share is None and s.samples_per_second == 0.0)),
        ("learner_behind", "notice", any(drawn < asked / 2 for drawn, asked in s.ratios)),
        ("settling", "good", any(drawn < asked / 2 for drawn, asked in s.early_ratios)),
        ("balanced", "good", True),
    ]
    code, level, _ = next(each for each in order if each[2])
    return findings | {(level, code)}


@pytest.mark.slow
@given(signs)
@settings(max_examples=500)
@example(WELL)
def test_verdicts_are_those_of_the_plain_rule_the_worst_first(s):
    findings = verdicts(inputs_of(s))
    assert {(each.level, each.code) for each in findings} == plain(s) and len({each.code for each in findings}) == len(
        findings
    )
    ranks = [("bad", "notice", "good").index(each.level) for each in findings]
    assert ranks == sorted(ranks)
    for each in findings:
        assert each.code in CODES and (each.knob in each.text) and (each.level == "good") == (each.knob == "")
        assert each.text.endswith(".") and "  " not in each.text
        assert max(len(sentence.split()) for sentence in re.split(r"[.:;] ", each.text)) <= 36, each.text


def live(seconds, *, steps=100.0, samples=100.0, caches=(1.0, 1.0)):
    """Return the overview of a server, an actor and a learner after so many seconds at these rates. The target is one
    sample a step.
    """
    cluster = Cluster(Settings(nodes=("http://s:1",)))
    cluster.set_addresses(["http://s:1"], 1000.0)
    for now in range(0, int(seconds) + 1, 5):
        row = np.zeros(1, ACCOUNT)
        row["client"], row["home"], row["since"], row["last_seen"] = (1, 1), name_hash("s"), 1, 1000.0 + now
        row["steps"], row["pushed_caches"], row["accepted_caches"] = (int(each * now) for each in (steps, *caches))
        drawn = {"batches": int(samples * now), "samples": int(samples * now)}
        table = {"storage": "caches", "samples_per_insert_target": 1.0, "steps": int(steps * now), "freshness": None,
                 "rate": {"draws_wait": "", "inserts_wait": ""}} | drawn  # fmt: skip
        stats = {"name": "s", "run": "r", "epoch": 1, "waited": 0.0, "tables": {"t": table}, "guests": 0} | drawn
        accounts = {"run": "r", "row_bytes": ACCOUNT.itemsize, "rows": row.tobytes(), "runs": ["r"]}
        status = {"role": "server", "ready": True, "stats": stats}
        cluster.apply(NodeAnswer("http://s:1", 1000.0 + now, status=status, accounts=[accounts]))
        overview, _ = cluster.refresh(1000.0 + now)
    return overview


def codes(overview):
    return [each.code for each in overview.verdicts]


@pytest.mark.parametrize(
    ("seconds", "rates", "code"),
    [
        (5.0, {"samples": 40.0}, "settling"), (29.0, {"samples": 40.0}, "settling"), (35.0, {"samples": 40.0}, "learner_behind"),
        (29.0, {"samples": 60.0}, "balanced"), (35.0, {"samples": 60.0}, "balanced"), (65.0, {"samples": 0.0}, "no_learner"),
        (65.0, {"steps": 0.0}, "no_inserts"), (65.0, {"caches": (1.0, 0.0)}, "no_caches"),
        (65.0, {"caches": (0.02, 0.0)}, "balanced"), (65.0, {"caches": (0.0, 0.0)}, "balanced"),
    ],
)  # fmt: skip
def test_rates_become_a_verdict_when_they_have_lasted_and_one_cache_on_its_way_is_none_that_is_lost(
    seconds, rates, code
):
    overview = live(seconds, **rates)
    assert codes(overview) == [code]
    assert ("0.4 samples for each step" in overview.verdicts[0].text) == (rates.get("samples") == 40.0)


def test_a_model_is_awaited_once_it_was_there_for_a_while_and_not_when_its_numbers_begin_anew():
    newest, replaced = NewestModels(), []
    for now, version in ((0.0, 5), (10.0, 6), (OUTDATED_AFTER + 5.0, 7), (OUTDATED_AFTER + 10.0, 8), (200.0, 2)):
        replaced.append(newest.update_expected_versions(now, {"p": version}))
    assert replaced == [{}, {}, {"p": 5}, {"p": 6}, {"p": 2}]
    assert newest.update_expected_versions(201.0, {"q": 1}) == {}


RECORDINGS = Path(__file__).parents[1] / "recordings"
CASES = json.loads((RECORDINGS / "verdicts.json").read_text(encoding="utf-8"))


def replayed(name):
    """Return the overviews of a recorded cluster by second."""
    inputs = msgspec.msgpack.decode(lzma.decompress((RECORDINGS / f"{name}.xz").read_bytes()))["told"]
    cluster, began, seen = Cluster(Settings(nodes=("http://a:1",), **CASES[name]["settings"])), None, {}
    for what, argument, now in inputs:
        if what == "listed":
            cluster.set_addresses(argument, now)
        elif what == "apply":
            cluster.apply(NodeAnswer(**argument))
        else:
            began = now if began is None else began
            seen[now - began], _ = cluster.refresh(now)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_cluster_has_the_verdicts_that_a_person_wrote_down_first(name):
    seen = replayed(name)
    for moment, wanted in CASES[name]["verdicts"].items():
        second = min(seen, key=lambda each: abs(each - float(moment)))  # noqa: B023  asked at once
        assert abs(second - float(moment)) < 5.0
        assert set(codes(seen[second])) == set(wanted), (second, seen[second].verdicts)
    assert all(path.stat().st_size < 40_000 for path in RECORDINGS.glob("*.xz"))


def test_a_killed_actor_leaves_the_headline_and_keeps_its_name():
    seen = replayed("killed")
    counts = [(each.actors.active, each.actors.silent, each.actors.lost) for each in seen.values()]
    assert counts[4] == (3, 0, 0) and (2, 1, 0) in counts and counts[-1] == (2, 0, 1)
