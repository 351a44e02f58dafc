"""Verdicts on random clusters, beside a slow rule that was written from docs/dashboard.md alone."""

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
from memoire.errors import ParameterError
from memoire.wire.frames import name_hash
from memoire.wire.rows import ACCOUNT
from pageskit import WELL, signs_of

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


def plain(s):
    """(level, code) of each finding, one question after the other."""
    said = set()
    if s.nodes_down and not s.unready and s.nodes == 0:
        said.add(("bad", "no_node"))
    else:
        said |= {("bad", "no_server")} if s.servers_up == 0 else set()
        said |= {("bad", "node_down")} if s.nodes_down else set()
        said |= {("notice", "node_unready")} if s.unready else set()
    if s.disk_used is not None and s.disk_used > 0.95:
        said.add(("bad", "disk_full"))
    if s.refused_per_second > 1.0:
        said.add(("notice", "refused"))
    if s.finished:
        return said | {("good", "finished")}
    if s.servers_up < s.expected_servers:
        said.add(("bad", "servers_missing"))
    if s.proxies_up < s.expected_proxies:
        said.add(("notice" if s.proxies_up else "bad", "proxies_missing"))
    if len(s.inference) < s.expected_inference:
        said.add(("notice" if s.inference else "bad", "inference_missing"))
    if s.idle:
        said.add(("notice", "actors_idle"))
    if s.silent:
        said.add(("notice", "actors_silent"))
    if s.active == 0:
        if s.servers_up == 0:
            return said
        away = s.silent + s.lost
        code = "no_actors" if away else "actors_gone" if s.gone else "waiting_for_actors"
        return said | {("bad" if away else "notice", code)}
    if s.active < s.expected and s.servers_up:
        said.add(("notice", "actors_missing"))
    if s.left_out is not None and s.left_out > 0.2:
        said.add(("notice", "left_out"))
    if s.sample_age is not None and s.sample_age > s.stale_after and not s.is_idle:
        said.add(("notice", "samples_old"))
    if s.outdated > 0:
        said.add(("notice", "models_behind"))
    if [node for node in s.inference if node.is_outdated]:
        said.add(("notice", "inference_behind"))
    if [node for node in s.inference if node.refused_per_second > 0.1]:
        said.add(("notice", "inference_refuses"))
    if [lag for lag in s.lags if lag > 8.0] and not s.is_idle:
        said.add(("notice", "lag"))
    if [part for part in s.stale if part > 0.1]:
        said.add(("notice", "learner_skips_stale"))
    if s.feedback is not None and s.feedback[0] > s.feedback[1] / 2:
        said.add(("notice", "feedback_late"))
    if s.rejected_share > 0.01:
        said.add(("notice", "caches_rejected"))
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
    return said | {(level, code)}


@pytest.mark.slow
@given(signs)
@settings(max_examples=500)
@example(WELL)
def test_verdicts_are_those_of_the_plain_rule_the_worst_first(s):
    found = verdicts(signs_of(s))
    assert {(each.level, each.code) for each in found} == plain(s) and len({each.code for each in found}) == len(found)
    ranks = [("bad", "notice", "good").index(each.level) for each in found]
    assert ranks == sorted(ranks)
    for each in found:
        assert each.code in CODES and (each.knob in each.text) and (each.level == "good") == (each.knob == "")
        assert each.text.endswith(".") and "  " not in each.text
        assert max(len(sentence.split()) for sentence in re.split(r"[.:;] ", each.text)) <= 36, each.text


# ------------------------------------------------------------------------------------ from what nodes say to a verdict


def table(steps, samples, asked):
    return {
        "storage": "caches", "samples_per_insert_target": asked, "steps": steps, "samples": samples, "batches": samples,
        "rate": {"draws_wait": "", "inserts_wait": ""}, "freshness": None,
    }  # fmt: skip


def rows_of(home, actors, now):
    rows = np.zeros(len(actors), ACCOUNT)
    for row, (number, steps, caches, silence, is_gone) in zip(rows, actors, strict=True):
        row["client"], row["home"], row["since"] = (number, number), name_hash(home), 1
        row["steps"], row["pushed_caches"], row["accepted_caches"] = steps, caches[0], caches[1]
        row["last_seen"], row["flags"] = now - silence, is_gone
    return {"run": "r", "row_bytes": ACCOUNT.itemsize, "rows": rows.tobytes(), "runs": ["r"]}


class Nodes:
    """Servers and proxies that never were, which answer a cluster every five seconds."""

    def __init__(self, servers, proxies=0, **given):
        self.servers = [f"http://s{n}:1" for n in range(servers)]
        self.proxies = [f"http://p{n}:1" for n in range(proxies)]
        self.cluster = Cluster(Settings(nodes=("http://s0:1",), **given))

    def live(self, seconds, *, steps=100.0, samples=100.0, asked=1.0, caches=(1.0, 1.0), actors=(), models=(), uses=()):
        """Let time pass; rates are of each server. `actors`: how long each has been silent at the end, None: goodbye."""
        for now in np.arange(0.0, seconds + 1.0, 5.0):
            self.cluster.listed([*self.servers, *self.proxies], 1000.0 + now)
            for place, url in enumerate(self.servers):
                self.cluster.apply(
                    self.answer(place, url, float(now), seconds, steps, samples, asked, caches, actors, models, uses)
                )
            for url in self.proxies:
                self.cluster.apply(NodeAnswer(url, 1000.0 + now, status={"role": "proxy", "ready": True, "stats": {}}))
            overview, _ = self.cluster.look(1000.0 + now)
        return overview

    def answer(self, place, url, now, seconds, steps, samples, asked, caches, actors, models, uses):
        name = f"s{place}"
        mine = [
            (16 * place + n + 1, int(steps * now / max(1, len(actors))), tuple(int(each * now) for each in caches),
             0.0 if silence is None else max(0.0, silence - (seconds - now)), silence is None)
            for n, silence in enumerate(actors)
        ]  # fmt: skip
        stats = {
            "name": name, "run": "r", "epoch": 1, "batches": samples * now, "samples": samples * now, "waited": 0.0,
            "tables": {"t": table(int(steps * now), int(samples * now), asked)}, "models": dict(models), "guests": 0,
        }  # fmt: skip
        clients = [{"client": np.array((n, n), "<u8").tobytes().hex(), "models": dict(uses), "name": f"actor-{n}",
                    "last_seen": 1000.0 + now} for n, *_ in mine]  # fmt: skip
        return NodeAnswer(
            url, 1000.0 + now, status={"role": "server", "ready": True, "stats": stats},
            accounts=[rows_of(name, mine, 1000.0 + now)], clients=clients,
        )  # fmt: skip


def codes(overview):
    return [each.code for each in overview.verdicts]


@pytest.mark.slow
@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 2),
    st.integers(0, 3),
    st.lists(st.none() | st.sampled_from([0.0, 5.0, 40.0, 290.0, 310.0, 5000.0]), min_size=1, max_size=4),
    st.sampled_from([0.0, 10.0, 1000.0]),
    st.sampled_from([0.0, 4.0, 10.0, 990.0]),
)
@settings(max_examples=60, deadline=None)
@example(1, 0, 0, 0, [0.0], 1000.0, 90.0)
def test_a_random_cluster_gets_what_the_plain_rule_says_of_it(
    servers, expected, proxies, awaited, silences, steps, samples
):
    made = Nodes(servers, proxies, expected_servers=expected, expected_proxies=awaited)
    overview = made.live(65.0, steps=steps, samples=samples, actors=silences)
    active = servers * sum(each is not None and each <= 20.0 for each in silences)
    silent = servers * sum(each is not None and 20.0 < each <= 300.0 for each in silences)
    lost = servers * sum(each is not None and each > 300.0 for each in silences)
    gone = servers * len(silences) - active - silent - lost
    counts = overview.actors
    assert (counts.active, counts.silent, counts.lost, counts.gone) == (active, silent, lost, gone)
    said = set(codes(overview))
    assert ("servers_missing" in said) == (servers < expected)
    assert ("proxies_missing" in said) == (proxies < awaited)
    assert ("actors_silent" in said) == (silent > 0)
    assert ("no_actors" in said) == (active == 0 and silent + lost > 0)
    assert ("no_inserts" in said) == (active > 0 and steps == 0.0)
    if active and steps:
        assert ("no_learner" in said) == (samples == 0.0)
        assert ("learner_behind" in said) == (0.0 < samples < steps / 2)
        assert ("balanced" in said) == (samples >= steps / 2)
    missing = {each.role: (each.expected, each.missing) for each in overview.roles if each.expected}
    wanted = {"server": (expected, max(0, expected - servers)), "proxy": (awaited, max(0, awaited - proxies))}
    assert missing == {role: each for role, each in wanted.items() if each[0]}


@pytest.mark.parametrize(
    ("seconds", "samples", "code"),
    [
        (5.0, 40.0, "settling"), (29.0, 40.0, "settling"), (35.0, 40.0, "learner_behind"), (29.0, 60.0, "balanced"),
        (35.0, 60.0, "balanced"),
    ],
)  # fmt: skip
def test_a_learner_that_is_behind_is_called_well_at_no_time(seconds, samples, code):
    overview = Nodes(1).live(seconds, steps=100.0, samples=samples, actors=[0.0])
    assert codes(overview) == [code]
    assert ("0.4 samples for each step" in overview.verdicts[0].text) == (samples == 40.0)


@pytest.mark.parametrize(
    ("caches", "code"),
    [((1.0, 1.0), "balanced"), ((1.0, 0.0), "no_caches"), ((0.02, 0.0), "balanced"), ((0.0, 0.0), "balanced")],
)
def test_caches_that_do_not_arrive_are_named_and_one_on_its_way_is_not(caches, code):
    assert codes(Nodes(1).live(65.0, caches=caches, actors=[0.0])) == [code]


def test_a_model_is_awaited_once_it_was_there_for_a_while_and_not_when_its_numbers_begin_anew():
    newest, found = NewestModels(), []
    for now, version in ((0.0, 5), (10.0, 6), (OUTDATED_AFTER + 5.0, 7), (OUTDATED_AFTER + 10.0, 8), (200.0, 2)):
        found.append(newest.replaced(now, {"p": version}))
    assert found == [{}, {}, {"p": 5}, {"p": 6}, {"p": 2}]
    assert newest.replaced(201.0, {"q": 1}) == {}


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ({"lost_after": 0.0}, "lost_after"),
        ({"stale_after": 0.0}, "stale_after"),
        ({"expected_servers": -1}, "expected_servers"),
    ],
)
def test_settings_that_cannot_be_are_refused(given_, named):
    with pytest.raises(ParameterError, match=named):
        Settings(nodes=("http://a:1",), **given_)


# ------------------------------------------------------------------------------------------------- recorded clusters

RECORDINGS = Path(__file__).parents[1] / "recordings"
SAID = json.loads((RECORDINGS / "verdicts.json").read_text(encoding="utf-8"))


def replayed(name):
    """Second by second what the dashboard says of a recorded cluster."""
    told = msgspec.msgpack.decode(lzma.decompress((RECORDINGS / f"{name}.xz").read_bytes()))["told"]
    cluster, began, seen = Cluster(Settings(nodes=("http://a:1",), **SAID[name]["settings"])), None, {}
    for what, given_, now in told:
        if what == "listed":
            cluster.listed(given_, now)
        elif what == "apply":
            cluster.apply(NodeAnswer(**given_))
        else:
            began = now if began is None else began
            seen[now - began], _ = cluster.look(now)
    return seen


@pytest.mark.parametrize("name", SAID)
def test_a_recorded_cluster_has_the_verdicts_that_a_person_wrote_down_first(name):
    seen = replayed(name)
    for moment, wanted in SAID[name]["verdicts"].items():
        second = min(seen, key=lambda each: abs(each - float(moment)))  # noqa: B023  it is asked at once
        assert abs(second - float(moment)) < 5.0
        assert set(codes(seen[second])) == set(wanted), (second, seen[second].verdicts)
    assert all(path.stat().st_size < 40_000 for path in RECORDINGS.glob("*.xz"))


def test_a_killed_actor_leaves_the_headline_and_keeps_its_name():
    seen = replayed("killed")
    counts = [(each.actors.active, each.actors.silent, each.actors.lost) for each in seen.values()]
    assert counts[4] == (3, 0, 0) and (2, 1, 0) in counts and counts[-1] == (2, 0, 1)
