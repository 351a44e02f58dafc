"""Held samples that are too old are passed over, used-up ones are drawn no more, and what is left is weighed right."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.errors import NotEnoughSamples
from memoire.tables.caches.pool import Pool
from memoire.tables.draws import finish, plan
from memoire.wire import containers as unpack
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind
from poolkit import PLAIN, SCHEMA, Clock, held, name


def numbers(pool: Pool, count: int) -> list[int]:
    return sorted(pool.get(count).gathered.ids["number"].tolist())


@pytest.mark.parametrize("reuse", [False, True])
def test_held_samples_are_drawn_though_their_client_has_used_up_its_entries(reuse: bool) -> None:
    limited = PLAIN.replace(max_times_sampled=1, reuse_cache=reuse)
    pool = Pool(SCHEMA, limited, seed=1)
    pool.add(name(1), 1, held([0.0] * 5, [0] * 5, limited))
    pool.sums(name(1), 2, 0.0, 0, 0.0)
    assert numbers(pool, 5) == [0, 1, 2, 3, 4]
    with pytest.raises(NotEnoughSamples):
        pool.get(1)


def test_samples_are_passed_over_as_they_become_too_old() -> None:
    clock, parameters = Clock(), PLAIN.replace(max_age=10.0)
    pool = Pool(SCHEMA, parameters, clock=clock, seed=1)
    pool.add(name(1), 1, held([0.0, 4.0, 8.0, 9.9, 12.0], [0] * 5, parameters))
    assert pool.stats().unused == 5
    with pytest.raises(NotEnoughSamples, match="4 are held"):
        pool.get(5)
    assert (pool.stats().unused, pool.stats().passed_over) == (4, 1)
    clock.now += 3.0
    assert numbers(pool, 2) == [0, 1] and pool.stats().passed_over == 3
    assert pool.stats().caches == 0, "what is used up and passed over is held no longer"
    assert (pool.stats().unused, pool.stats().held, pool.stats().bytes) == (0, 0, 0)


def test_samples_of_older_models_are_passed_over() -> None:
    parameters = PLAIN.replace(max_model_lag=2)
    pool = Pool(SCHEMA, parameters, seed=1)
    pool.add(name(1), 1, held([0.0] * 4, [5, 3, 4, 6], parameters))
    pool.saw_model(6)
    assert numbers(pool, 3) == [0, 2, 3] and pool.stats().passed_over == 1
    pool.add(name(1), 2, held([0.0] * 4, [5, 3, 4, 6], parameters, first=10))
    pool.saw_model(8)
    assert numbers(pool, 1) == [13]


def test_a_changed_limit_holds_from_the_next_draw_on() -> None:
    pool = Pool(SCHEMA, PLAIN, seed=1)
    pool.add(name(1), 1, held([0.0, 50.0, 0.0, 50.0], [0] * 4, PLAIN))
    pool.configure(PLAIN.replace(max_age=20.0))
    assert numbers(pool, 2) == [0, 2] and pool.stats().passed_over == 2


def test_what_is_kept_for_a_reader_is_passed_over_too() -> None:
    clock, parameters = Clock(), PLAIN.replace(max_age=10.0)
    pool = Pool(SCHEMA, parameters, clock=clock, seed=1)
    pool.add(name(1), 1, held(np.linspace(0.0, 9.0, 10), [0] * 10, parameters))
    rows = pool.reserve(b"r" * 16, 10)
    assert rows["reserved"].sum() == 10
    clock.now += 5.5
    rows = pool.reserve(b"r" * 16, 10)
    assert rows["reserved"].sum() == 5
    made = plan([rows], 5, 0.3)
    assert made is not None
    layout = layout_of(SCHEMA, parameters, ContainerKind.DRAWN)
    drawn = unpack.check(pool.draw_counts(b"r" * 16, made.counts[0]), layout)
    assert sorted(finish(made, [drawn], layout, parameters, 1, 1.0).gathered.ids["number"].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("order", list(itertools.permutations(["first", "second", "nothing is left"])))
@pytest.mark.parametrize("reuse", [False, True])
def test_what_used_up_a_clients_entries_is_drawn_whatever_comes_first(order: Any, reuse: bool) -> None:
    """Caches and UPDATEs go different ways: that all is used up may be told before the caches come that did it."""
    limited = PLAIN.replace(max_times_sampled=1, reuse_cache=reuse)
    pool = Pool(SCHEMA, limited, seed=1)
    for what in order:
        if what == "first":
            pool.add(name(1), 1, held([0.0] * 3, [0] * 3, limited))
        elif what == "second":
            pool.add(name(1), 2, held([0.0] * 3, [0] * 3, limited, first=3))
        else:
            pool.sums(name(1), 3, 0.0, 0, 0.0)
    made = plan([pool.reserve(b"r" * 16, 3)], 3, 0.5)
    assert made is not None and made.left_out == 0.0
    pool.reserve(b"r" * 16, 0)
    assert sorted(numbers(pool, 6)) == [0, 1, 2, 3, 4, 5]
    pool.sums(name(1), 4, 0.0, 0, 0.0)
    assert pool.entries() == 0, "nothing of it is held, and nothing comes"


def test_with_reuse_no_held_sample_is_drawn_more_often_than_it_may_be() -> None:
    parameters = PLAIN.replace(reuse_cache=True, max_times_sampled=3)
    pool = Pool(SCHEMA, parameters, seed=1)
    for first, count in ((0, 5), (5, 3), (8, 4)):
        pool.add(name(first % 2), first, held([0.0] * count, [0] * count, parameters, first=first))
    seen: list[int] = []
    for _ in range(6):
        seen += numbers(pool, 6)
    assert np.bincount(seen).tolist() == [3] * 12
    with pytest.raises(NotEnoughSamples):
        pool.get(1)
    assert (pool.stats().caches, pool.stats().held, pool.stats().bytes) == (0, 0, 0)


def test_a_limit_of_draws_can_be_set_and_lifted_while_samples_are_held() -> None:
    again = PLAIN.replace(reuse_cache=True)
    pool = Pool(SCHEMA, again, seed=1)
    pool.add(name(1), 1, held([0.0] * 4, [0] * 4, again))
    pool.get(100)
    pool.configure(again.replace(max_times_sampled=2))
    with pytest.raises(NotEnoughSamples, match="8 are held"):
        pool.get(9)
    rows = pool.reserve(b"r" * 16, 100)
    assert (rows["reserved"].sum(), rows["flags"].sum()) == (8, 0)
    assert len(numbers(pool, 5)) == 5
    pool.configure(again.replace(max_times_sampled=1))
    seen = pool.stats().held
    assert seen < 4, "five draws have used up one sample at least"
    pool.configure(again)
    assert pool.stats().held == seen


walks = st.lists(
    st.tuples(
        st.sampled_from(["add", "draw", "wait", "model", "reserve"]),
        st.integers(0, 2),
        st.integers(1, 6),
        st.integers(0, 9),
    ),
    max_size=40,
)


@settings(max_examples=120, deadline=None)
@given(walks, st.sampled_from([None, 6.0]), st.sampled_from([None, 1]), st.sampled_from([0, 2]), st.booleans())
def test_counts_agree_with_a_slow_model(walk: Any, age: Any, lag: Any, times: int, reuse: bool) -> None:
    clock = Clock()
    parameters = PLAIN.replace(max_age=age, max_model_lag=lag, max_times_sampled=times, reuse_cache=reuse)
    pool = Pool(SCHEMA, parameters, clock=clock, seed=3)
    samples: dict[int, list[Any]] = {}  # number -> client, born, model, times drawn
    newest = first = 0
    for sequence, (what, who, count, extra) in enumerate(walk, 1):
        if what == "add":
            ages, models = np.arange(count) * extra / 2, np.maximum(newest - np.arange(count) % 2, 0)
            pool.add(name(who), sequence, held(ages, models, parameters, first=first))
            samples |= {first + i: [who, clock.now - ages[i], models[i], 0] for i in range(count)}
            first += count
        elif what == "wait":
            clock.now += extra
        elif what == "model":
            newest += extra % 2
            pool.saw_model(newest)
        fresh = {
            number: facts
            for number, facts in samples.items()
            if (age is None or facts[1] >= clock.now - age - 1e-4) and (lag is None or facts[2] >= newest - lag)
        }
        limit = times if reuse else 1
        free = sum(limit - facts[3] for facts in fresh.values()) if limit else (10**9 if fresh else 0)
        if what == "draw":
            if free < count:
                with pytest.raises(NotEnoughSamples):
                    pool.get(count)
                continue
            for number in pool.get(count).gathered.ids["number"].tolist():
                assert number in fresh
                samples[number][3] += 1
                assert not limit or samples[number][3] <= limit
        elif what == "reserve":
            pool.reserve(b"r" * 16, 0)
            if limit:
                left = [facts for facts in fresh.values() if facts[3] < limit]
                assert pool.stats().unused == len(left)


def test_what_is_left_of_a_cache_stands_for_the_entries_within_the_limits() -> None:
    """Old entries weigh ten times what new ones do; the mean over the new ones stays unbiased when the old are let go."""
    rng, parameters = np.random.default_rng(2), PLAIN.replace(max_age=10.0)
    weights = np.where(np.arange(100) < 40, 10.0, rng.uniform(0.5, 2.0, 100))  # the first 40 are old
    values = rng.normal(size=100) + np.arange(100) / 50
    other = rng.normal(size=30) + 4.0  # a client whose entries all stay
    total, sums, squares = 0.0, 0.0, []
    for _ in range(300):
        clock = Clock()
        pool = Pool(SCHEMA, parameters, clock=clock, seed=int(rng.integers(1 << 30)))
        drawn = rng.choice(100, 64, p=weights / weights.sum())
        facts = {"total": weights.sum(), "positives": 100, "minimum": weights.min()}
        pool.add(name(1), 1, held(np.where(drawn < 40, 8.0, 0.0), [0] * 64, parameters, weight=weights[drawn], **facts))
        pool.add(name(2), 1, held([0.0] * 64, [0] * 64, parameters, first=64, total=30.0, positives=30, minimum=1.0))
        others = rng.choice(30, 64)
        clock.now += 5.0
        pool.sums(name(1), 2, float(weights[40:].sum()), 60, float(weights[40:].min()))  # its memory is limited as well
        batch = pool.get(16)
        ids = batch.gathered.ids["number"]
        found = np.where(ids < 64, values[drawn[ids % 64]], other[others[ids % 64]])
        importance = batch.importance * batch.divisor
        sums += float(importance.sum())
        total += float((importance * found).sum())
        squares.append(((importance * found).sum(), importance.sum()))
    expected = (values[40:].sum() + other.sum()) / 90
    parts = np.array(squares)
    error = np.std(parts[:, 0] - expected * parts[:, 1]) / np.sqrt(len(parts)) / parts[:, 1].mean()
    assert abs(total / sums - expected) < 4 * error and error < 0.1
