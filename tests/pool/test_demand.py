"""How far actors may run ahead of learners: no clock, no pool, but those of the last tests."""

import math

import numpy as np
import pytest

from memoire.pool.caches import Pool
from memoire.pool.demand import DRAWING_TIMEOUT, RATE_INTERVAL, SHORTAGE_TIMEOUT, STOCK_TIME, Demand
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.wire import pack, unpack
from readerkit import PARAMETERS, READER, SCHEMA

CLIENT = b"c" * 16


def room(demand, unused, *, stock=1000, most=10_000, cache_size=64, clients=4, now=10.0):
    return demand.room(unused, stock, most, cache_size, clients, now)


def drawing(samples=100, now=10.0):
    demand = Demand()
    demand.drew(samples, now)
    return demand


def test_everything_is_wanted_while_nobody_draws():
    assert room(Demand(), 10**6) is None
    demand = drawing()
    assert room(demand, 10**6, now=10.0 + DRAWING_TIMEOUT) == 0
    assert room(demand, 10**6, now=10.1 + DRAWING_TIMEOUT) is None


def test_a_client_is_wanted_up_to_its_stock_and_again_once_a_part_of_it_was_drawn():
    demand = drawing()
    assert room(demand, 0) == 1000 and room(demand, 936) == 64
    assert room(demand, 937) == 0 and room(demand, 5000) == 0
    assert room(demand, 750, cache_size=300) == 250 and room(demand, 751, cache_size=300) == 0, "at most a quarter"
    fast = Demand()
    for turn in range(1, 9):
        fast.drew(int(8000 * RATE_INTERVAL), turn * RATE_INTERVAL)
    assert room(fast, 800, now=2.0) == 200 and room(fast, 801, now=2.0) == 0, "a tenth of a second"


def test_a_draw_that_found_too_little_lifts_the_rule_at_once():
    demand = drawing()
    demand.was_short(100, 10.0)
    assert room(demand, 10**6) is None
    assert room(demand, 10**6, now=10.0 + SHORTAGE_TIMEOUT) == 0


def test_a_stock_has_two_caches_at_least_and_a_part_of_two_large_draws():
    assert room(drawing(), 0, stock=1) == 128
    assert room(drawing(1000), 0, stock=1) == 500, "two draws, from four clients"
    demand = drawing(1000)
    for _ in range(1000):
        demand.drew(10, 10.0)
    assert room(demand, 0, stock=1) == 128, "a large one is forgotten"


def test_where_learners_draw_fast_a_stock_lasts_for_a_while_as_far_as_there_is_room():
    demand = Demand()
    for turn in range(1, 9):
        demand.drew(int(40_000 * RATE_INTERVAL), turn * RATE_INTERVAL)
    now = 8 * RATE_INTERVAL
    assert room(demand, 0, now=now) == 40_000 * STOCK_TIME / 4
    assert room(demand, 0, most=3000, clients=1, now=now) == 2 * 10_000, "never less than two draws"
    assert room(demand, 0, most=3000, clients=100, now=now) == 1000


# ------------------------------------------------------------------------------------------------- pools


class Now:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def pushed(pool, caches, number=0):
    memory = Memory(SCHEMA, 50, pool.parameters, seed=1)
    memory.open(0)
    for step in range(50):
        memory.add(0, (np.full(3, step, np.float32), 1, 1.0))
    memory.close(0)
    for place in range(caches):
        pool.add(CLIENT, number + place + 1, unpack.check(pack.build(memory, 64, now=0.0), pool.layout))


def pool_of(parameters=PARAMETERS):
    clock = Now()
    return Pool(SCHEMA, parameters, seed=1, clock=clock), clock


def draw_here(pool):
    pool.get(16)


def draw_far(pool):
    rows = pool.reserve(READER, 16)
    counts = np.zeros(1, [("client", "<u8", (2,)), ("count", "<u4"), ("zero", "<u4")])
    counts["client"], counts["count"] = rows["client"], 16
    assert pool.draw_counts(READER, counts) is not None


@pytest.mark.parametrize("draw", [draw_here, draw_far])
def test_a_pool_holds_a_client_back_whose_samples_are_not_drawn(draw):
    pool, clock = pool_of()
    assert pool.room(CLIENT, 1) is None, "nobody knows it"
    pushed(pool, 20)
    assert pool.room(CLIENT, 1) is None, "nobody draws"
    draw(pool)
    assert pool.room(CLIENT, 1) == 0
    assert pool.room(CLIENT, 1 << 30) > 20 * 64
    clock.now += DRAWING_TIMEOUT + 0.1
    assert pool.room(CLIENT, 1) is None


def test_a_pool_wants_everything_that_a_waiting_draw_is_short_of():
    pool, _ = pool_of()
    pushed(pool, 20)
    draw_here(pool)
    assert pool.room(CLIENT, 1) == 0
    with pytest.raises(RuntimeError):
        pool.get(10_000)
    assert pool.room(CLIENT, 1) is None


def test_a_pool_wants_everything_that_a_reader_waits_for_which_cannot_draw_as_much_as_it_wants_now():
    pool, clock = pool_of()
    pushed(pool, 20)
    draw_far(pool)
    pool.reserve(READER, 1 << 20)
    assert pool.room(CLIENT, 1) == 0, "it may have drawn the rest elsewhere"
    clock.now += SHORTAGE_TIMEOUT
    pool.reserve(READER, 1 << 20)
    assert pool.room(CLIENT, 1) is None


def test_a_pool_that_has_two_draws_for_a_reader_of_several_servers_is_not_short():
    demand = drawing(100)
    demand.kept(200, 1280, 0.0, 10.0)
    assert room(demand, 10**6) == 0
    demand.kept(640, 1280, math.inf, 10.0)
    assert room(demand, 10**6) == 0, "half of what it asked for"
    demand.kept(199, 1280, 0.0, 10.0)
    assert room(demand, 10**6) is None
    demand = drawing(100)
    demand.kept(639, 1280, SHORTAGE_TIMEOUT, 10.0)
    assert room(demand, 10**6) is None, "it waits"


def test_held_samples_that_are_drawn_again_and_again_are_replaced_by_newer_ones():
    pool, _ = pool_of(PARAMETERS.replace(reuse_cache=True))
    pushed(pool, 20)
    draw_here(pool)
    assert pool.room(CLIENT, 1) is None


@pytest.mark.parametrize("ratio", [1.0, 0.25, 8.0])
def test_a_free_actor_and_a_slow_learner_keep_each_others_pace(ratio):
    """A simulation: the actor brings whatever it may, the learner draws 1,000 samples a second."""
    pool, clock = pool_of(Parameters(cache_size=64, samples_per_insert=ratio))
    pushed(pool, 4)
    number = brought = 4
    for _ in range(200):
        clock.now += 0.064
        draw_here(pool)
        for _ in range(3):
            draw_here(pool)
        wanted = pool.room(CLIENT, 1)
        coming = 64 if wanted is None else min(64, math.ceil(wanted / 64))
        pushed(pool, coming, number)
        number, brought = number + coming, brought + coming
        assert pool.stats().unused >= 64
    assert 190 <= brought <= 200 + 40 and pool.stats().unused < 20 * 64
