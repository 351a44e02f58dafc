"""What a learner far away asks for and takes: by slow models of the plan, and of what is kept for each reader."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memoire.errors import NotEnoughSamples
from memoire.replay.parameters import Parameters
from memoire.tables.caches import _draw
from memoire.tables.caches.pool import Pool
from memoire.tables.draws import finish, plan
from memoire.tables.episodes.pool import EpisodePool
from memoire.wire import containers as unpack
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind
from memoire.wire.rows import CLIENT_COUNTS, CLIENT_SUMS
from poolkit import PLAIN, SCHEMA, Clock, held, made, name

READERS = [b"r" * 16, b"s" * 16]

row = st.fixed_dictionaries(
    {
        "client": st.integers(0, 5),
        "sequence": st.integers(0, 3),
        "total_weight": st.sampled_from([0.0, 1.0, 2.5, 40.0]),
        "positives": st.sampled_from([0, 1, 7, 50]),
        "minimum": st.sampled_from([0.0, 0.25, 1.0]),
        "drawn_between": st.sampled_from([0.0, 90.0]),
        "reserved": st.sampled_from([0, 1, 9, 40]),
        "flags": st.sampled_from([0, 0, 1]),
    }
)
tables = st.lists(st.lists(row, max_size=5, unique_by=lambda said: said["client"]), min_size=1, max_size=3)


def packed(said: list[dict[str, Any]]) -> Any:
    rows = np.zeros(len(said), CLIENT_SUMS)
    for at, each in enumerate(said):
        rows[at]["client"] = np.frombuffer(name(each["client"]), "<u8")
        for field in each.keys() - {"client"}:
            rows[at][field] = each[field]
    return rows


def client(number: int, **facts: Any) -> dict[str, Any]:
    usual = {"sequence": 1, "total_weight": 2.5, "positives": 7, "minimum": 0.25, "drawn_between": 0.0}
    return usual | {"client": number, "reserved": 40, "flags": 0} | facts


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(tables, st.integers(1, 30), st.floats(0.0, 1.0, exclude_max=True))
@example([[client(0), client(1, total_weight=0.0)]], 8, 0.5)  # nothing that could be drawn
@example([[client(0), client(1, positives=0)]], 8, 0.5)
@example([[client(0), client(1, reserved=0, positives=50, minimum=1.0)]], 8, 0.5)  # it has run dry
@example([[client(0, sequence=1), client(1)], [client(0, sequence=3, total_weight=40.0, positives=50)]], 8, 0.5)
def test_a_plan_is_the_slow_one(said, samples, fraction):
    """Each client by its newest word, with what all servers keep of it; who has no weight, no entries or no samples
    left serves nobody, and is neither in N nor in the rarest chance, but its weight is left out.
    """
    newest: dict[int, dict[str, Any]] = {}
    kept: dict[int, float] = {}
    between: dict[int, float] = {}
    for each in (each for table in said for each in table):
        who = each["client"]
        if who not in newest or each["sequence"] > newest[who]["sequence"]:
            newest[who] = each
        able = float("inf") if each["flags"] and each["reserved"] else float(each["reserved"])
        kept[who] = kept.get(who, 0.0) + able
        between[who] = between.get(who, 0.0) + each["drawn_between"]
    serving = [who for who in newest if newest[who]["total_weight"] and newest[who]["positives"] and kept[who]]
    chosen = plan([packed(table) for table in said], samples, fraction)
    if sum(kept[who] for who in serving) < samples:
        assert chosen is None
        return
    assert chosen is not None
    weight, unused, drawn = (
        np.array([float(each[who]) for who in serving])
        for each in ({who: newest[who]["total_weight"] for who in newest}, kept, between)
    )
    shares = _draw.shares(weight / max(each["total_weight"] for each in newest.values()), unused, drawn, float(samples))
    share = dict(zip(map(name, serving), shares, strict=True))
    assert {who: pi for who, (pi, _) in chosen.asked.items()} == pytest.approx(
        {who: share[who] for who in chosen.asked}
    )
    population = {name(who): float(newest[who]["positives"]) for who in newest}
    assert {who: n for who, (_, n) in chosen.asked.items()} == {who: population[who] for who in chosen.asked}
    assert chosen.population == sum(newest[who]["positives"] for who in serving)
    whole = sum(each["total_weight"] for each in newest.values())
    assert chosen.left_out == pytest.approx(1.0 - weight.sum() / whole, abs=1e-9)
    chances = [
        share * newest[who]["minimum"] / newest[who]["total_weight"]
        for who, share in zip(serving, shares, strict=True)
        if newest[who]["minimum"]
    ]
    assert chosen.rarest == pytest.approx(chosen.population * min(chances, default=float("inf")))
    asked: dict[bytes, int] = {}
    for table, counts in zip(said, chosen.counts, strict=True):
        there = {name(each["client"]): each for each in table}
        for who, count in zip(counts["client"], counts["count"].tolist(), strict=True):
            assert count > 0 and (there[who.tobytes()]["flags"] or count <= there[who.tobytes()]["reserved"])
            asked[who.tobytes()] = asked.get(who.tobytes(), 0) + count
    assert sum(asked.values()) == samples and asked.keys() == chosen.asked.keys()
    for who, pi in share.items():
        assert abs(asked.get(who, 0) - samples * pi) <= 1.0 + 1e-6


def test_a_plan_takes_rows_of_sums_and_nothing_else():
    table = packed([client(0), client(1)])
    for wrong in (np.zeros(2, CLIENT_COUNTS), np.zeros((2, 2), CLIENT_SUMS)[:, 0], [b"x" * 64]):
        with pytest.raises(ValueError, match="rows"):
            plan([wrong], 8, 0.5)
    for samples, fraction in ((0, 0.5), (8, 1.0)):
        with pytest.raises(ValueError, match="at least 1 sample"):
            plan([table], samples, fraction)
    table.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        _draw.take_counts(table, np.zeros(1, CLIENT_COUNTS))


def taken(pool: Pool, reader: bytes, wanted: dict[bytes, int]) -> Any:
    counts = np.zeros(len(wanted), CLIENT_COUNTS)
    for at, (who, count) in enumerate(wanted.items()):
        counts[at]["client"], counts[at]["count"] = np.frombuffer(who, "<u8"), count
    payload = pool.draw_counts(reader, counts, now=1.0)
    return None if payload is None else unpack.check(payload, layout_of(SCHEMA, pool.parameters, ContainerKind.DRAWN))


walks = st.lists(
    st.tuples(
        st.sampled_from(["push", "reserve", "take", "draw"]), st.integers(0, 1), st.integers(0, 2), st.integers(1, 30)
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(walks)
@example([("push", 0, 0, 20), ("reserve", 0, 0, 15), ("take", 1, 0, 30), ("draw", 0, 0, 5), ("take", 0, 0, 30)])
@example([("push", 0, 0, 20), ("reserve", 0, 0, 9), ("reserve", 1, 0, 30), ("draw", 0, 0, 9)])
def test_nobody_takes_what_is_kept_for_another_reader(walk):
    """A walk of two readers and the server's own learner over three clients: who takes leaves what is others'."""
    pool = Pool(SCHEMA, PLAIN, seed=1)
    unused = dict.fromkeys(map(name, range(3)), 0)
    kept = {reader: dict.fromkeys(unused, 0) for reader in READERS}
    for turn, (what, which, who, count) in enumerate(walk):
        reader, other = READERS[which], READERS[1 - which]
        if what == "push":
            pool.add(name(who), turn, made(count, total=10.0 * (who + 1)))
            unused[name(who)] += count
        elif what == "reserve":
            rows = pool.reserve(reader, count)
            kept[reader] = dict.fromkeys(unused, 0) | {each["client"].tobytes(): int(each["reserved"]) for each in rows}
            assert all(kept[reader][who] + kept[other][who] <= unused[who] for who in unused)
            free = sum(unused.values()) - sum(kept[other].values())
            assert sum(kept[reader].values()) >= min(count, free)
        elif what == "take":
            drawn = taken(pool, reader, {name(who): count})
            got = 0 if drawn is None else drawn.samples
            assert got == min(count, unused[name(who)] - kept[other][name(who)])
            unused[name(who)] -= got
            kept[reader][name(who)] = max(0, kept[reader][name(who)] - got)
        else:
            free = {who: unused[who] - sum(each[who] for each in kept.values()) for who in unused}
            if sum(free.values()) < count:
                with pytest.raises(NotEnoughSamples, match=f"but {sum(free.values())} are held"):
                    pool.get(count)
                continue
            owners = [who.tobytes() for who in pool.get(count).gathered.ids["client"]]
            for who in unused:
                assert owners.count(who) <= free[who]
                unused[who] -= owners.count(who)
        assert pool.stats().unused == sum(unused.values())


def test_a_batch_from_far_away_says_what_was_left_out():
    pool = Pool(SCHEMA, PLAIN, seed=1)
    for number, total in ((0, 30.0), (1, 10.0)):
        pool.add(name(number), 1, made(20, total=total))
    pool.sums(name(2), 1, 60.0, 5, 0.5)  # it has pushed nothing yet
    rows = pool.reserve(READERS[0], 100)
    chosen = plan([rows], 10, 0.5)
    assert chosen is not None
    layout = layout_of(SCHEMA, PLAIN, ContainerKind.DRAWN)
    counts = {who["client"].tobytes(): int(who["count"]) for who in chosen.counts[0]}
    far = finish(chosen, [taken(pool, READERS[0], counts)], layout, PLAIN, 1, 1.0)
    pool.reserve(READERS[0], 0)
    assert far.left_out == pytest.approx(0.6) == pool.get(10).left_out


@pytest.mark.parametrize("kind", ["caches", "episodes"])
def test_the_newest_model_that_was_seen_never_goes_back(kind):
    """Models are shown in any order: a server that is told of an older one lets no older sample be drawn for that."""
    parameters = Parameters(max_model_lag=2, cache_size=8)
    pool: Any = (Pool if kind == "caches" else EpisodePool)(SCHEMA, parameters, clock=Clock(), seed=1)
    for version in (4, 9, 3, 0):
        pool.saw_model(version)
    if kind == "episodes":
        memory = pool.memory
        memory.open()
        for version in (5, 8):
            memory.add(0, (np.zeros(3, np.float32), np.int32(0), np.float32(0)), model_version=version)
        memory.close(terminated=True)
        assert memory.newest_model == 9 and memory.num_positive == 1
        pool.limit(pool.byte_limit // 2)
        pool.clear()
        assert pool.memory.newest_model == 9, "another memory in its place has seen it as well"
        return
    pool.add(name(1), 1, held([0.0] * 2, [5, 8], parameters))
    assert pool.reserve(READERS[0], 4)["reserved"].tolist() == [1]
