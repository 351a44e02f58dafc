"""How far actors may run ahead of learners: no clock, no pool, but those of the last tests."""

import math

import numpy as np
import pytest

from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.tables.caches.pool import Pool
from memoire.tables.caches.queues import DRAWING_TIMEOUT, SHORTAGE_TIMEOUT, STOCK_TIME, Demand
from memoire.wire import containers as pack
from memoire.wire import containers as unpack
from memoire.wire.rows import CLIENT_COUNTS
from readerkit import PARAMETERS, READER, SCHEMA

CLIENT, OTHER = b"c" * 16, b"o" * 16


def room(demand, unused, *, stock=1000, most=10_000, cache_size=64, clients=4, now=10.0):
    return demand.room(unused, stock, most, cache_size, clients, now)


def drawing(samples=100, now=10.0):
    demand = Demand()
    demand.drew(samples, now)
    return demand


def drawing_fast(rate):
    """So many samples a second until 2 s, in small draws."""
    demand, draws = Demand(), 64
    for draw in range(1, 2 * draws + 1):
        demand.drew(rate // draws, draw / draws)
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
    fast = drawing_fast(8000)
    assert room(fast, 800, now=2.0) == 200 and room(fast, 801, now=2.0) == 0, "a tenth of a second"


def test_a_draw_that_found_too_little_lifts_the_rule_at_once():
    demand = drawing()
    demand.was_short(100, 10.0)
    assert room(demand, 10**6) is None
    assert room(demand, 10**6, now=10.0 + SHORTAGE_TIMEOUT) == 0


def test_a_stock_has_two_caches_at_least_and_a_part_of_four_large_draws():
    assert room(drawing(), 0, stock=1) == 128
    assert room(drawing(1000), 0, stock=1) == 1000, "four draws, from four clients"
    demand = drawing(1000)
    for _ in range(1000):
        demand.drew(10, 10.0)
    assert room(demand, 0, stock=1) == 128, "a large one is forgotten"


def test_where_learners_draw_fast_a_stock_lasts_for_a_while_as_far_as_there_is_room():
    demand = drawing_fast(40_000)
    assert room(demand, 0, now=2.0) == 40_000 * STOCK_TIME / 4
    assert room(demand, 0, most=3000, now=2.0) == 3000
    assert room(demand, 0, most=3000, clients=100, now=2.0) == 1000
    demand.drew(10_000, 2.0)
    assert room(demand, 0, most=3000, now=2.0) == 4 * 10_000 / 4, "never less than four draws"


# ------------------------------------------------------------------------------------------------- pools


class Now:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def pushed(pool, caches, number=0, client=CLIENT):
    memory = Memory(SCHEMA, 50, pool.parameters, seed=1)
    memory.open(0)
    for step in range(50):
        memory.add(0, (np.full(3, step, np.float32), 1, 1.0))
    memory.close(0)
    for place in range(caches):
        pool.add(client, number + place + 1, unpack.check(pack.build(memory, 64, now=0.0), pool.layout))


def pool_of(parameters=PARAMETERS):
    clock = Now()
    return Pool(SCHEMA, parameters, seed=1, clock=clock), clock


def draw_here(pool):
    pool.get(16)


def draw_far(pool, reader=READER):
    rows = pool.reserve(reader, 16)
    counts = np.zeros(1, CLIENT_COUNTS)
    counts["client"], counts["count"] = rows["client"], 16
    assert pool.draw_counts(reader, counts) is not None


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
    pool.reserve(READER, 1 << 20, wanted=1 << 19)
    assert pool.room(CLIENT, 1) == 0, "it may have drawn the rest elsewhere"
    clock.now += SHORTAGE_TIMEOUT
    pool.reserve(READER, 1 << 20, wanted=1 << 19)
    assert pool.room(CLIENT, 1) is None


def reading(draw=100, now=10.0, clients=4, readers=(READER,)):
    """Readers that each have drawn so much from so many clients of theirs."""
    demand = Demand()
    for reader in readers:
        demand.drew(draw, now, reader)
        demand.kept(reader, 10**6, clients, 0, False, now)
    return demand


def test_a_pool_that_has_two_draws_for_a_reader_of_several_servers_is_not_short():
    demand = reading(100)
    demand.kept(READER, 200, 4, 1280, True, 10.0)
    assert room(demand, 10**6) == 0
    demand.kept(b"another", 640, 4, 1280, True, 10.0)
    assert room(demand, 10**6) == 0, "half of what it asked for, though it has never drawn"
    demand.kept(READER, 199, 4, 1280, False, 10.0)
    assert room(demand, 10**6) is None


def test_a_reader_that_draws_seldom_does_not_wait_unless_it_says_so():
    demand, later = reading(100), 10.0 + SHORTAGE_TIMEOUT
    demand.kept(READER, 639, 4, 1280, False, later)
    assert room(demand, 10**6, now=later) == 0
    demand.kept(READER, 639, 4, 1280, True, later)
    assert room(demand, 10**6, now=later) is None


def test_a_reader_to_whom_no_client_belongs_wants_nothing_of_the_others():
    demand = drawing()
    demand.kept(READER, 0, 0, 1280, True, 10.0)
    assert room(demand, 10**6) == 0


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
    pool, _ = pool_of()
    pushed(pool, 20)

    def kept(reader, wanted=0, **more):
        return int(pool.reserve(reader, 1000, wanted=wanted, **more)["reserved"].sum())

    draw_far(pool)
    assert kept(READER) >= 1000, "it is alone"
    pool.reserve(READER, 0)
    draw_far(pool, OTHER)
    assert 48 <= kept(READER) <= 49 and 48 <= kept(OTHER) <= 49, "three draws each"
    assert kept(READER, part=(0, 2)) >= 1000, "they divide the clients"
    assert kept(READER) <= 49
    assert kept(OTHER, wanted=500) >= 1000
    pool.reserve(OTHER, 0)
    assert kept(bytes(16)) >= 1000, "nobody knows yet what it draws"


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


@pytest.mark.parametrize("is_parted", [False, True])
def test_free_actors_keep_the_pace_of_slow_readers_of_several_servers_with_large_batches(is_parted):
    """A simulation: four actors bring whatever they may, and two readers draw 1,024 samples each every 1.5 s. They ask
    for many more, since they cannot know which server they will draw from.
    """
    pool, clock = pool_of()
    readers, clients = (READER, OTHER), [bytes([number]) * 16 for number in range(4)]
    numbers = dict.fromkeys(clients, 0)

    def bring(caches):
        for client in clients:
            wanted = pool.room(client, 1)
            coming = caches if wanted is None else min(caches, wanted // 64)
            pushed(pool, coming, numbers[client], client)
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
    for turn in range(60):
        clock.now += 0.75
        assert draw(turn % 2) == 1024 or turn < 8, "none waits once it is known what each draws"
        for _ in range(5):
            bring(4)
    assert pool.stats().unused <= 2 * 4 * 1024 + 4 * 64
