"""Queues of held caches: readers, waits, walks, limits, and the lead of actors over learners."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.errors import NotEnoughSamples, ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.tables.base import SavedRecord
from memoire.tables.caches.inspection import CacheRecord, ClientRecord
from memoire.tables.caches.pool import Pool
from memoire.tables.caches.queues import DRAWING_TIMEOUT, MAX_READERS, SHORTAGE_TIMEOUT, STOCK_TIME, Demand
from memoire.wire import containers
from memoire.wire.layout import layout_of
from memoire.wire.rows import CLIENT_COUNTS
from poolkit import PLAIN, SCHEMA, Clock, cache_of, counts_of, held, name, pool_of
from readerkit import PARAMETERS, READER, push_caches
from readerkit import SCHEMA as SCHEMA_DEMAND

# --- Readers of a pool, request by request: kept samples, draws, and forgotten readers

ONE, OTHER = b"1" * 16, b"2" * 16


def test_samples_below_zero_are_refused() -> None:
    with pytest.raises(ParameterError, match="samples must be at least 0"):
        pool_of([5]).reserve(ONE, -1)


def test_draws_from_other_pools_count_between_two_caches_of_a_client() -> None:
    clock = Clock()
    pool = pool_of([5], clock=clock)
    for drawn in (500, 600, 550, 900):  # the reader drew 500 elsewhere before; 550 is an older message
        pool.reserve(ONE, 0, drawn)
    pool.add(name(0), 20, cache_of(5))
    assert pool.clients[name(0)].between == 400.0
    clock.now += 100.0
    pool.reserve(ONE, 0, 5000)
    pool.add(name(0), 21, cache_of(5))
    assert pool.clients[name(0)].between == 300.0, "draws of a forgotten reader count for no client"


def test_there_is_a_limit_of_readers_and_those_that_are_known_may_go_on() -> None:
    clock = Clock()
    pool = pool_of([10], clock=clock, client_timeout=10.0)
    for reader in (ONE, *(number.to_bytes(16, "little") for number in range(1, MAX_READERS))):
        pool.reserve(reader, int(reader == ONE))
    for ask in (lambda: pool.reserve(OTHER, 1), lambda: pool.draw_counts(OTHER, counts_of({name(0): 1}))):
        with pytest.raises(ProtocolError, match="1024 readers that draw from this server are known here"):
            ask()
    clock.now += 9.0
    assert pool.draw_counts(ONE, counts_of({name(0): 1})) is not None
    clock.now += 10.5
    pool.expire()
    pool.add(name(0), 20, cache_of(5))
    assert pool.draw_counts(OTHER, counts_of({name(0): 1})) is not None


# --- Walks over held caches, and restored caches, while caches come and go between two steps


def walked(*counts: int) -> tuple[Pool, Clock]:
    """Return a pool and its clock at 110: client i has counts[i] caches of 4 samples; cache n came at 100 + n."""
    clock = Clock()
    pool = Pool(SCHEMA, PLAIN, clock=clock, seed=1)
    for i, count in enumerate(counts):
        pool.sums(name(i), 1, 10.0, 50, 0.5)
        for number in range(count):
            clock.now = 100.0 + number
            pool.add(name(i), 2 + number, cache_of(4, 100 * i + 10 * number))
    clock.now = 110.0
    return pool, clock


def test_caches_that_leave_between_two_steps_are_passed_by_and_newcomers_do_not_lengthen_the_walk() -> None:
    pool, _ = walked(4)
    walk = pool.records()
    next(walk), next(walk)
    for _ in range(2):  # the cache in hand and the next cache
        pool.held.drop_oldest(pool.clients[name(0)])
    for sequence in (20, 21):
        pool.add(name(0), sequence, cache_of(4))
    assert [body.age for body, _ in walk] == [8.0, 7.0, 0.0], "four caches of this client at most"


def test_a_client_that_has_left_before_its_turn_does_not_come() -> None:
    pool, clock = walked(1, 1)
    walk = pool.records()
    next(walk)
    clock.now += 1000.0
    pool.get(8)
    assert pool.expire() == 2
    pool.add(name(1), 1, cache_of(4))
    assert list(walk) == []


def saved_record(cache: Any, client: ClientRecord, *, stays: bool = True) -> SavedRecord:
    return SavedRecord(CacheRecord(samples=cache.samples), bytes(cache.payload), client, stays, False, Limits())


def test_a_cache_that_only_looks_like_a_held_one_is_another() -> None:
    pool, _ = walked(1)
    client = ClientRecord(id=name(0), sequence=1, total_weight=10.0, positives=50.0, minimum=0.5, between=7.0)
    for seed, expected in ((0, False), (1, True), (1, False)):
        assert pool.put_record(saved_record(cache_of(4, seed=seed), client)).is_new is expected
    assert pool.clients[name(0)].between == 7.0
    pool.add(name(0), 9, cache_of(4, total=11.0))  # the queue changed without a record
    assert not pool.put_record(saved_record(cache_of(4, total=11.0), client)).is_new


def test_a_client_known_from_a_snapshot_alone_stays_or_counts_as_heard_now() -> None:
    (client, _), (_, payload) = walked(1)[0].records()
    cache, clock = containers.check(payload, layout_of(SCHEMA, PLAIN)), Clock(50.0)
    for stays, heard in ((True, math.inf), (False, 50.0)):
        again = Pool(SCHEMA, PLAIN, clock=clock)
        again.put_record(saved_record(cache, client, stays=stays))
        assert not again.is_untouched
        assert again.clients[name(0)].heard == heard
    clock.now = 60.0
    again.record_contact(name(0))
    again.put_record(saved_record(cache, client))
    assert again.clients[name(0)].heard == 60.0, "an actor of its own was heard"


@pytest.mark.parametrize("facts", [{"left": b"abc"}, {"left": b"\4\0\0\0"}, {"times": bytes(4)}, {"positives": 0.5}])
def test_a_saved_cache_whose_remaining_samples_cannot_be_is_refused(facts: dict[str, Any]) -> None:
    (client, _), (_, payload) = walked(1)[0].records()
    body, pool = CacheRecord(samples=4, **({"left": bytes(4)} | facts)), Pool(SCHEMA, PLAIN)
    with pytest.raises(ProtocolError) as caught:
        pool.put_record(SavedRecord(body, bytes(payload), client, True, False, Limits()))
    assert caught.value.code == "container" and pool.stats().caches == 0


# --- The queues never draw samples that are too old or used up, and weight other samples correctly


@pytest.mark.parametrize("reuse", [False, True])
def test_held_samples_are_drawn_though_their_client_has_used_up_its_entries(reuse: bool) -> None:
    limited = PLAIN.replace(max_times_sampled=1, reuse_cache=reuse)
    pool = Pool(SCHEMA, limited, seed=1)
    pool.add(name(1), 1, held([0.0] * 5, [0] * 5, limited))
    pool.sums(name(1), 2, 0.0, 0, 0.0)
    assert sorted(pool.get(5).gathered.ids["number"].tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(NotEnoughSamples):
        pool.get(1)


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
    """Old entries weigh ten times as much as new ones; without them, the mean over the new ones stays unbiased."""
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
        pool.sums(name(1), 2, float(weights[40:].sum()), 60, float(weights[40:].min()))  # the memory has the same limit
        batch = pool.get(16)
        ids = batch.gathered.ids["number"]
        sampled = np.where(ids < 64, values[drawn[ids % 64]], other[others[ids % 64]])
        importance = batch.importance * batch.divisor
        sums += float(importance.sum())
        total += float((importance * sampled).sum())
        squares.append(((importance * sampled).sum(), importance.sum()))
    expected = (values[40:].sum() + other.sum()) / 90
    parts = np.array(squares)
    error = np.std(parts[:, 0] - expected * parts[:, 1]) / np.sqrt(len(parts)) / parts[:, 1].mean()
    assert abs(total / sums - expected) < 4 * error and error < 0.1


# --- Lead of actors over learners, without a clock; only the last tests have a pool

CLIENT, OTHER_DEMAND = b"c" * 16, b"o" * 16


def room(demand, unused, *, stock=1000, most=10_000, cache_size=64, clients=4, now=10.0):
    return demand.room(unused, stock, most, cache_size, clients, now)


def drawing(samples=100, now=10.0):
    demand = Demand()
    demand.record_draw(samples, now)
    return demand


def test_a_stock_has_two_caches_at_least_and_a_part_of_four_large_draws():
    assert room(drawing(), 0, stock=1) == 128
    assert room(drawing(1000), 0, stock=1) == 1000, "four draws, from four clients"
    demand = drawing(1000)
    for _ in range(1000):
        demand.record_draw(10, 10.0)
    assert room(demand, 0, stock=1) == 128, "a large one is forgotten"


def test_a_stock_lasts_half_a_second_as_soon_as_draws_have_been_fast_for_a_third_of_one():
    demand = drawing(10)
    for number in range(1, 31):
        demand.record_draw(200, 10.0 + number / 100)
    assert room(demand, 0, stock=1, now=10.3) == pytest.approx(20_000 * STOCK_TIME / 4, rel=0.1)


def demand_pool(parameters=PARAMETERS):
    clock = Clock()
    return Pool(SCHEMA_DEMAND, parameters, seed=1, clock=clock), clock


def draw_here(pool):
    pool.get(16)


def draw_far(pool, reader=READER):
    pool.reserve(reader, 16)
    assert pool.draw_counts(reader, counts_of({CLIENT: 16})) is not None


@pytest.mark.parametrize("draw", [draw_here, draw_far])
def test_a_pool_holds_a_client_back_whose_samples_are_not_drawn(draw):
    pool, clock = demand_pool()
    assert pool.room(CLIENT, 1) is None, "the client is unknown"
    push_caches(pool, CLIENT[0], 20)
    assert pool.room(CLIENT, 1) is None, "no reader draws"
    draw(pool)
    assert pool.room(CLIENT, 1) == 0
    assert pool.room(CLIENT, 1 << 30) > 20 * 64
    clock.now += DRAWING_TIMEOUT + 0.1
    assert pool.room(CLIENT, 1) is None


def test_a_pool_wants_everything_that_a_reader_waits_for_which_cannot_draw_as_much_as_it_wants_now():
    pool, clock = demand_pool()
    push_caches(pool, CLIENT[0], 20)
    draw_far(pool)
    pool.reserve(READER, 1 << 20, wanted=1 << 19)
    assert pool.room(CLIENT, 1) == 0, "it may have drawn the rest elsewhere"
    clock.now += SHORTAGE_TIMEOUT
    pool.reserve(READER, 1 << 20, wanted=1 << 19)
    assert pool.room(CLIENT, 1) is None


def reading(draw=100, now=10.0, clients=4, readers=(READER,)):
    """Return the demand of readers that have each drawn this number of samples, from this number of clients."""
    demand = Demand()
    for reader in readers:
        demand.record_draw(draw, now, reader)
        demand.record_reserved(reader, 10**6, clients, 0, False, now)
    return demand


def test_a_stock_has_four_draws_of_each_reader_that_shares_the_clients_or_of_the_one_that_has_a_client_for_itself():
    four = [bytes([number]) * 16 for number in range(4)]
    assert room(reading(1000), 0, stock=1) == 1000
    assert room(reading(1000, readers=four), 0, stock=1) == 4 * 1000, "all of them draw from each client"
    assert room(reading(1000, clients=1, readers=four), 0, stock=1) == 4000, "one of them draws from each client"
    assert room(reading(1000, clients=2), 0, stock=1) == 2000, "the other parts' readers are not there"
    demand = reading(1000, readers=four)
    demand.forget(four[0])
    assert room(demand, 0, stock=1) == 3 * 1000


def test_a_reader_leaves_samples_to_others_that_draw_from_the_same_clients_unless_it_waits():
    pool, _ = demand_pool()
    push_caches(pool, CLIENT[0], 20)

    def kept(reader, wanted=0, **more):
        return int(pool.reserve(reader, 1000, wanted=wanted, **more)["reserved"].sum())

    draw_far(pool)
    assert kept(READER) >= 1000, "it is alone"
    pool.reserve(READER, 0)
    draw_far(pool, OTHER_DEMAND)
    assert 48 <= kept(READER) <= 49 and 48 <= kept(OTHER_DEMAND) <= 49, "three draws each"
    assert kept(READER, part=(0, 2)) >= 1000, "they divide the clients"
    assert kept(READER) <= 49
    assert kept(OTHER_DEMAND, wanted=500) >= 1000
    pool.reserve(OTHER_DEMAND, 0)
    assert kept(bytes(16)) >= 1000, "its draws are not known yet"


@pytest.mark.slow
@pytest.mark.parametrize("is_parted", [False, True])
def test_free_actors_keep_the_pace_of_slow_readers_of_several_servers_with_large_batches(is_parted):
    """Simulation: four actors push all that they may, and two readers draw 1,024 samples each every 1.5 s.

    The readers ask for many more samples, since they cannot know from which server they will draw.
    """
    pool, clock = demand_pool()
    readers, clients = (READER, OTHER_DEMAND), [bytes([number]) * 16 for number in range(4)]
    numbers = dict.fromkeys(clients, 0)

    def bring(caches):
        for client in clients:
            wanted = pool.room(client, 1)
            coming = caches if wanted is None else min(caches, wanted // 64)
            push_caches(pool, client[0], coming, numbers[client])
            numbers[client] += coming

    def draw(place):
        part = (place, 2) if is_parted else (0, 1)
        rows = pool.reserve(readers[place], 8192, part=part, wanted=0)
        counts = np.zeros(len(rows), CLIENT_COUNTS)
        counts["client"], counts["count"] = rows["client"], np.minimum(rows["reserved"], 1024 // len(rows))
        pool.draw_counts(readers[place], counts)
        pool.reserve(readers[place], 8192, part=part, wanted=0)
        return counts["count"].sum()

    bring(20)
    for turn in range(30):
        clock.now += 0.75
        assert draw(turn % 2) == 1024 or turn < 8, "none waits once it is known what each draws"
        for _ in range(5):
            bring(4)
    assert pool.stats().unused <= 2 * 4 * 1024 + 4 * 64
