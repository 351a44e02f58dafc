"""Limits of drawing and recording: kept at any speeds, explained, and without deadlock."""

import itertools
import math
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memoire.errors import EmptyMemory, NoDrawsLeft, NotEnoughSamples, ParameterError
from memoire.limits import NO_LIMIT
from memoire.reader.rounds import RateTracker
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.limiter import (
    FORGET_TIMEOUT,
    GRANT_TIME,
    LEAST_ENTRIES,
    LEAST_PART,
    MAX_WAITING_READERS,
    STARVING_TIMEOUT,
    UNHEARD_TIMEOUT,
    ClusterSurplus,
    Limiter,
)
from memoire.replay.parameters import Parameters, check_batch, check_size
from memoire.replay.sampling import Prioritized
from memoire.replay.schema import Schema
from memoire.tables.rollouts.pool import STALLED_TIMEOUT, RoomLimiter
from memoire.wire.messages import ServerRate
from memory_checks import check_memory
from poolkit import Clock

numbers = itertools.count(1)


def limiter(clock=None, **fields) -> Limiter:
    return Limiter(Parameters(**fields), lambda: 10**6, clock or Clock(0.0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_the_ratio_stays_in_its_band_at_any_speeds_of_both_sides(seed):
    rng = random.Random(seed)
    ratio, batch = rng.choice([0.125, 0.5, 1.0, 8.0]), rng.choice([1, 32, 256])
    tolerance = max(1.0, (batch + ratio) / 2 * rng.choice([1.0, 1.5, 4.0, 20.0]) + ratio)
    band = limiter(samples_per_insert=ratio, samples_per_insert_tolerance=tolerance)
    clients = [bytes([i]) * 16 for i in range(rng.choice([1, 3, 8]))]
    speeds = [rng.choice([0.01, 0.3, 1.0]) for _ in clients]
    learner = rng.choice([0.05, 0.5, 1.0])
    done, through = dict.fromkeys(clients, 0), dict.fromkeys(clients, 0)
    drawn, least, most = 0, 0.0, 0.0
    for client in clients:
        band.register(client, 0, next(numbers))
    for _ in range(4000):
        for client, speed in zip(clients, speeds, strict=True):
            if rng.random() < speed:  # the client reports the granted steps late
                done[client] += rng.randint(0, min(through[client] - done[client], 50))
            if rng.random() < speed:
                band.report_inserts(client, done[client], next(numbers))
                through[client] = band.grant(client, len(clients))[0]
        if rng.random() < learner and not band.why_not_draw(batch):
            band.record_draw(batch)
            drawn += batch
        surplus = ratio * sum(done.values()) - drawn
        least, most = min(least, surplus), max(most, surplus)
    assert -tolerance - 1e-6 <= least and most <= tolerance + 1e-6
    assert drawn > 0 and sum(done.values()) > 0
    assert band.stats().forgiven == 0.0


steps = st.lists(
    st.tuples(st.sampled_from(["report", "grant", "draw", "leave"]), st.integers(0, 3), st.integers(0, 40)),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(steps, st.sampled_from([0.25, 1.0, 3.0]), st.sampled_from([4.0, 10.0, 100.0]))
def test_the_limiter_agrees_with_one_that_adds_everything_up_anew(walk, ratio, tolerance):
    band = limiter(samples_per_insert=ratio, samples_per_insert_tolerance=tolerance)
    reported: dict[int, int] = {}
    through: dict[int, int] = {}
    asked: dict[int, int] = {}
    inserted = drawn = 0
    for what, who, count in walk:
        client, surplus = bytes([who]) * 16, ratio * inserted - drawn
        if what == "report":
            if who not in reported:
                band.register(client, 0, next(numbers))
            before = reported.setdefault(who, 0)
            reported[who] = max(before, before + count - 5)
            inserted += reported[who] - before
            band.report_inserts(client, before + count - 5, next(numbers))
        elif what == "grant":
            others = sum(max(0, through[i] - reported.get(i, 0)) for i in through if i != who)
            room = (tolerance - surplus) / ratio
            now = reported.setdefault(who, 0)
            lasting = (now - asked.get(who, now)) / 1e-3 * GRANT_TIME  # no time passes in the call
            mine = min(room - others, max(1.0, min(room / 2, max(LEAST_ENTRIES, room / LEAST_PART, lasting))))
            expected = max(through.get(who, 0), now + max(0, math.floor(mine + 1e-6)))
            assert band.grant(client, 2)[0] == expected
            asked[who] = now if expected > through.get(who, 0) else asked.get(who, now)
            through[who] = expected
        elif what == "leave":
            band.unregister(client)
            for known in (reported, through, asked):
                known.pop(who, None)
        elif count:
            assert bool(band.why_not_draw(count)) == (surplus - count < -tolerance - 1e-6)
            band.record_draw(count)
            drawn += count
    stats = band.stats()
    assert stats.surplus == pytest.approx(ratio * inserted - drawn)
    assert (stats.inserted, stats.drawn) == (inserted, drawn)


def test_a_slow_client_is_granted_what_lasts_it_a_moment_and_the_others_need_not_wait_for_it():
    clock = Clock(0.0)
    band = limiter(clock=clock, samples_per_insert=1.0, samples_per_insert_tolerance=1600.0)
    names = [bytes([number]) * 16 for number in range(9)]
    first, *others = names
    band.register(first, 0, next(numbers))
    assert band.grant(first) == (100, ""), "a sixteenth, although the other clients are unknown"
    clock.now += 1.0
    band.report_inserts(first, 100, next(numbers))
    assert band.grant(first)[0] == 100 + 1500 // 16, "still a sixteenth: it records 50 in half a second"
    for client in others:
        band.register(client, 0, next(numbers))
        assert band.grant(client, len(names)) == (1500 // 16, "")
    clock.now += 0.1
    band.report_inserts(first, 193, next(numbers))
    assert band.grant(first)[0] == 193 + 465, "it has become quick: 93 in a tenth of a second"


def test_actors_go_on_where_a_learner_waits_for_samples_that_were_lost():
    clock = Clock(0.0)
    band = limiter(clock=clock, samples_per_insert=1.0, samples_per_insert_tolerance=32.0, cache_size=8)
    client = b"d" * 16
    band.report_inserts(client, 0, next(numbers))
    band.report_inserts(client, band.grant(client)[0], next(numbers))
    band.report_wait("learner", 16)
    assert band.grant(client)[1], "the band is full"
    clock.now += 2 * STARVING_TIMEOUT
    band.report_wait("learner", 16)
    through, reason = band.grant(client)
    assert (through, reason) == (32 + 24, "")
    band.report_inserts(client, through, next(numbers))
    assert band.stats().surplus == 32.0 and band.stats().forgiven == 24.0
    band.report_wait("learner", 0)
    assert band.grant(client)[1]


def test_a_batch_of_the_largest_size_is_always_drawn_in_the_end():
    for ratio in (0.3, 1.0, 7.0):
        for tolerance in (max(1.0, ratio), 10.0, 33.3):
            band = limiter(samples_per_insert=ratio, samples_per_insert_tolerance=tolerance)
            largest = math.floor(2 * tolerance - ratio)
            client, done = b"e" * 16, 0
            for _ in range(20 if largest else 0):
                while band.why_not_draw(largest):
                    through, _ = band.grant(client)
                    assert through > done
                    done += 1
                    band.report_inserts(client, done, next(numbers))
                band.record_draw(largest)


def test_another_band_begins_anew_and_another_setting_does_not():
    band = limiter(samples_per_insert=1.0, samples_per_insert_tolerance=50.0)
    band.record_draw(0)
    assert not band.why_not_draw(40)
    band.record_draw(40)
    band.configure(Parameters(samples_per_insert=1.0, samples_per_insert_tolerance=50.0, priority_exponent=0.1))
    assert band.stats().surplus == -40.0
    band.configure(Parameters(samples_per_insert=2.0, samples_per_insert_tolerance=50.0))
    assert band.stats().surplus == 0.0
    band.configure(Parameters())
    assert band.grant(b"f" * 16) == (NO_LIMIT, "") and not band.why_not_draw(10**6)


happenings = st.lists(
    st.tuples(st.sampled_from(["insert", "draw", "hear", "restart"]), st.integers(0, 1), st.integers(1, 40)),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(happenings, st.sampled_from([0.5, 4.0]), st.booleans())
@example([("insert", 0, 9), ("hear", 0, 1), ("insert", 0, 5), ("restart", 0, 1), ("insert", 0, 3)], 4.0, True)
@example([("insert", 0, 9), ("hear", 0, 1), ("restart", 0, 1), ("insert", 0, 30), ("hear", 0, 1)], 4.0, False)
@example([("insert", 0, 9), ("restart", 0, 1), ("insert", 0, 5), ("hear", 0, 1)], 0.5, True)
def test_a_reader_s_balance_goes_on_over_the_lives_of_its_servers(walk, ratio, clock_goes_on):
    """The reader's balance adds up the reports of all lives of all servers, whatever the numbers of their epochs.

    Steps that a life never reported are lost with that life. A restarted server uses its own counts until it receives
    the band of all servers.
    """
    names, balance = ["a", "b"], RateTracker()
    parameters = Parameters(samples_per_insert=ratio, samples_per_insert_tolerance=1e6)
    life = dict.fromkeys(names, 100)
    counts = {name: [0, 0] for name in names}  # entries inserted and drawn in this life
    has_band = dict.fromkeys(names, False)
    known = dict.fromkeys(names, (0, 0))  # entries inserted and drawn that the reader knows
    expected = 0.0

    def hear(name):
        nonlocal expected
        inserted, drawn = counts[name]
        news = (inserted - known[name][0]) * ratio - (drawn - known[name][1])
        expected += news
        known[name] = inserted, drawn
        surplus = expected if has_band[name] else inserted * ratio - drawn
        standing = ServerRate(surplus, has_band[name], inserted, drawn, ratio, 1e6)
        balance.record_report(name, life[name], standing, 50, 3)
        assert balance.why_not_draw(parameters, names, 1, 0) in ("", UNKNOWN)
        band = balance.cluster_rate(name, names)
        has_band[name] = band is not None
        assert band is None or (band.surplus, band.inserted, band.drawn) == (pytest.approx(expected), inserted, drawn)

    for name in names:
        hear(name)
    for what, which, count in walk:
        name = names[which]
        if what == "hear":
            hear(name)
        elif what == "restart":
            life[name] += 1 if clock_goes_on else -1
            counts[name], known[name], has_band[name] = [0, 0], (0, 0), False
        else:
            counts[name][what == "draw"] += count
    for name in names:
        hear(name)


UNKNOWN = "waits until all servers have reported how many entries were recorded"


def test_a_draw_that_waits_goes_on_when_entries_come():
    band = limiter(clock=time.monotonic, samples_per_insert=1.0, samples_per_insert_tolerance=20.0)
    assert band.take(20, 0.0) == ""
    answers: list[str] = []
    waits = threading.Thread(target=lambda: answers.append(band.take(10, 20.0)))
    waits.start()
    band.register(b"a" * 16, 0, next(numbers))
    band.report_inserts(b"a" * 16, 10, next(numbers))
    waits.join(100.0)
    assert answers == [""] and band.stats().surplus == -20.0
    assert "waiting for 1 more entries" in band.take(1, 0.01)


def limited_buffer(**fields):
    schema = Schema({"obs": Column(np.float32, (1,), "state"), "reward": Column(np.float32, (), "reward")})
    return Buffer(schema, 1000, seed=1, **fields)


def fill(buffer, steps, version=0):
    writer = buffer.writer()
    for number in range(steps):
        obs = np.full(1, number, np.float32)
        writer.step(obs, None, 1.0, number == steps - 1, False, obs + 1, {}, model_version=version)
    writer.close()


def test_a_buffer_refuses_batches_until_enough_is_there():
    buffer = limited_buffer(min_size=50)
    fill(buffer, 30)
    with pytest.raises(NotEnoughSamples, match="a batch of 8 has to wait: waiting for 20 more entries .30 of"):
        buffer.sample(8)
    fill(buffer, 20)
    assert len(buffer.sample(8).ids) == 8
    with pytest.raises(ParameterError, match="min_size must be at most the capacity, 1000 entries"):
        buffer.configure(min_size=1001)
    assert buffer.parameters.min_size == 50
    with pytest.raises(ParameterError, match="min_size"):
        limited_buffer(min_size=1001)


def test_a_buffer_refuses_batches_that_are_too_far_ahead():
    buffer = limited_buffer(samples_per_insert=2.0, samples_per_insert_tolerance=40.0)
    fill(buffer, 10)
    for _ in range(6):
        buffer.sample(10)
    assert buffer.rate.surplus == -40.0 and buffer.rate.inserted == 10
    with pytest.raises(
        NotEnoughSamples, match="waiting for 5 more entries: draws are 40 samples ahead of samples_per_insert=2"
    ):
        buffer.sample(10)
    fill(buffer, 5)
    buffer.sample(10)
    with pytest.raises(ParameterError, match="batch_size must be at most 78"):
        buffer.sample(79)
    buffer.configure(samples_per_insert_tolerance=None)
    buffer.sample(500)


def test_no_entry_is_drawn_more_often_than_it_may_be_and_importance_stays_right():
    rng = np.random.default_rng(0)
    buffer = limited_buffer(sampler=Prioritized(1.0, beta=1.0), max_times_sampled=2)
    fill(buffer, 40)
    numbers = buffer.sample(1).ids
    buffer.configure(max_times_sampled=3)
    values = rng.uniform(0.1, 3.0, 40)
    buffer.update_priorities(np.arange(numbers.min(), numbers.min() + 40) % 1000, values)
    counts: dict[int, int] = {}
    for _ in range(11):
        for number in buffer.sample(10).ids.tolist():
            counts[number] = counts.get(number, 0) + 1
    assert max(counts.values()) <= 3 and buffer.memory.draws_left == 40 * 3 - 111
    with pytest.raises(NoDrawsLeft, match="a draw of 10 samples is not possible: each entry is drawn at most 3 times"):
        buffer.sample(10)
    assert len(buffer.sample(9).ids) == 9
    with pytest.raises(EmptyMemory, match="max_times_sampled"):
        buffer.sample(1)


def test_what_is_too_old_weighs_nothing_from_that_moment_on():
    buffer = limited_buffer(max_age=10.0)
    buffer.memory.set_clock(100.0)
    fill(buffer, 20)
    buffer.memory.set_clock(105.0)
    fill(buffer, 10)
    assert buffer.memory.num_positive == 30
    buffer.memory.set_clock(110.0)
    assert buffer.memory.num_positive == 30
    buffer.memory.set_clock(110.5)
    assert buffer.memory.num_positive == 10 and (buffer.sample(50).age <= 10.0).all()
    buffer.memory.set_clock(116.0)
    with pytest.raises(EmptyMemory, match="max_age"):
        buffer.sample(1)
    buffer.configure(max_age=20.0)
    assert buffer.memory.num_positive == 30
    check_memory(buffer.memory)


def test_what_an_older_model_made_weighs_nothing():
    buffer = limited_buffer(max_model_lag=1)
    for version in (1, 2, 3):
        fill(buffer, 10, version)
    assert buffer.memory.num_positive == 20
    assert set(buffer.sample(100).model_version.tolist()) == {2, 3}
    buffer.saw_model(4)
    assert set(buffer.sample(100).model_version.tolist()) == {3}
    buffer.configure(max_model_lag=3)
    assert buffer.memory.num_positive == 30
    buffer.configure(max_model_lag=None)
    assert buffer.memory.num_positive == 30


def test_the_newest_model_is_that_of_the_topic_or_of_all():
    versions = {"policy": 3, "critic": 7}
    assert Parameters().newest_model(versions) == 7 and Parameters(model_topic="policy").newest_model(versions) == 3
    assert Parameters(model_topic="other").newest_model(versions) == 0 and Parameters().newest_model({}) == 0


# --- Decisions of the limiter at times that a test sets

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


class At:
    """Limiter whose time and number of available entries are set by a test."""

    def __init__(self, tolerance: float | None = 50.0, ratio: float = 1.0, **fields) -> None:
        self.now, self.entries = 0.0, 10**6
        parameters = Parameters(samples_per_insert=ratio, samples_per_insert_tolerance=tolerance, **fields)
        self.limiter = Limiter(parameters, lambda: self.entries, lambda: self.now)

    def balance(self) -> tuple[float, float]:
        stats = self.limiter.stats()
        return stats.surplus, stats.forgiven


def test_a_least_size_alone_is_a_limit_of_draws_and_not_of_inserts():
    at = At(None, min_size=5)
    at.entries = 0
    assert at.limiter.is_active and not at.limiter.has_band
    assert "waiting for 5 more entries" in at.limiter.why_not_draw(1)
    assert at.limiter.grant(A) == (NO_LIMIT, "")
    at.entries = 5
    assert at.limiter.why_not_draw(10**6) == ""


def test_a_message_that_is_older_than_what_is_known_changes_nothing():
    limiter = At().limiter
    limiter.register(A, 100, 5)
    limiter.register(A, 0, 5)
    limiter.register(A, 0, 4)
    limiter.report_inserts(A, 110, 6)
    for inserted, sequence in ((150, 6), (110, 7), (90, 8)):  # a repeated message, an equal count, a smaller count
        limiter.report_inserts(A, inserted, sequence)
        assert limiter.stats().inserted == 10


def test_a_client_that_says_hello_again_gives_back_what_it_was_granted():
    limiter = At().limiter
    limiter.register(A, 0, 1)
    assert limiter.grant(A)[0] == 50
    assert limiter.grant(B)[0] == 0
    limiter.register(A, 20, 2)
    assert limiter.grant(B)[0] == 50
    limiter.unregister(C)  # an unknown client
    limiter.unregister(B)
    assert limiter.grant(A)[0] == 70


def test_beyond_the_band_is_forgiven_only_where_nobody_could_help_it():
    at = At(10.0, min_size=100)
    at.limiter.register(A, 0, 1)
    for inserted, entries, balance in (
        (60, 60, (10.0, 0.0)),  # below min_size: no surplus beyond the tolerance counts
        (100, 100, (0.0, 0.0)),  # drawing may begin, and the surplus starts at 0
        (115, 100, (15.0, 0.0)),
        (117, 99, (10.0, 7.0)),  # entries left, so clients record beyond the band
    ):
        at.entries = entries
        at.limiter.report_inserts(A, inserted, inserted)
        assert at.balance() == balance


def test_a_learner_that_waits_is_helped_after_its_patience_and_forgotten_when_it_stops_asking():
    at = At(50.0, cache_size=8)
    limiter = at.limiter
    limiter.register(A, 0, 1)
    limiter.report_inserts(A, limiter.grant(A)[0], 2)
    limiter.report_wait("learner", 16)
    at.now = STARVING_TIMEOUT - 0.01
    assert limiter.grant(A) == (50, limiter.stats().inserts_wait)
    at.now = STARVING_TIMEOUT
    limiter.report_wait("learner", 20)  # the second request: the wait counts from the first
    assert limiter.grant(A) == (50 + 20 + 8, "")
    at.now = STARVING_TIMEOUT + FORGET_TIMEOUT
    assert limiter.grant(B)[0] == 28
    at.now += 0.01
    assert limiter.grant(C)[0] == 0


def test_the_waiting_of_so_many_is_looked_at_and_no_more():
    at = At(50.0, cache_size=8)
    limiter = at.limiter
    limiter.report_inserts(A, 0, 1)
    limiter.report_inserts(A, 50, 2)
    for number in range(MAX_WAITING_READERS):
        limiter.report_wait(number, 5)
    limiter.report_wait("one more", 500)
    at.now = 1.0
    assert limiter.grant(A)[0] == 50 + 5 + 8
    limiter.report_wait(3, 6)  # a known reader stays on the list
    assert limiter.grant(A)[0] == 50 + 6 + 8
    limiter.report_wait(3, 0)
    limiter.report_wait("one more", 500)
    at.now = 1.0 + STARVING_TIMEOUT
    assert limiter.grant(A)[0] == 50 + 500 + 8


def test_a_reader_with_other_parameters_is_not_believed():
    limiter = At().limiter
    limiter.apply_cluster(ClusterSurplus(9.0, 0, 0, 0, 1.0, 2.0, 50.0))
    limiter.apply_cluster(ClusterSurplus(9.0, 0, 0, 0, 1.0, 1.0, 51.0))
    assert limiter.server_surplus().surplus == 0.0 and not limiter.server_surplus().is_cluster_wide
    limiter.record_draw(3)
    limiter.report_inserts(A, 0, 1)
    limiter.report_inserts(A, 10, 2)
    limiter.apply_cluster(ClusterSurplus(9.0, 4, 1, 0, 1.0, 1.0, 50.0))
    assert limiter.server_surplus().surplus == 9.0 + (10 - 4) - (3 - 1)


def test_sizes_that_can_never_be_met_are_refused():
    check_size(Parameters(min_size=10), 10)
    check_size(Parameters(min_size=10), 0)  # capacity unknown
    with pytest.raises(ValueError, match="min_size must be at most the capacity, 9 entries"):
        check_size(Parameters(min_size=10), 9)
    check_batch(Parameters(), 10**9)
    with pytest.raises(ValueError, match="batch_size must be at most 99"):
        check_batch(At().limiter.parameters, 100)


def test_a_limiter_that_goes_on_grants_what_the_former_one_would_have():
    """A client keeps its grants until the client says HELLO again, leaves, or is silent for UNHEARD_TIMEOUT."""
    former = At().limiter
    former.register(A, 0, 1)
    former.register(B, 0, 1)
    assert former.grant(A, 2)[0] == 25
    former.report_inserts(A, 10, 2)

    def heir():
        at = At()
        at.limiter.restore_state(former.state())
        assert at.limiter.state() == former.state()
        return at

    assert heir().limiter.grant(B) == former.grant(B) == (25, "")
    again, late = heir(), heir()
    again.limiter.register(A, 10, 3)
    assert again.limiter.grant(B)[0] == 40
    assert late.limiter.grant(B)[0] == 25
    late.now = UNHEARD_TIMEOUT
    assert late.limiter.grant(B)[0] == 40


# --- Room of a queue: grants never exceed the room, and the grants of a dead client return

CAPACITY = 800


class Room:
    """Limiter of a queue whose learner waits for the whole capacity from second 0 on."""

    def __init__(self):
        self.clock = Clock(0.0)
        self.limiter = RoomLimiter(CAPACITY, lambda: self.entries, self.clock)
        self.limiter.report_wait("learner", CAPACITY)
        self.number, self.entries = 0, 0

    def meet(self, client):
        self.number += 1
        self.limiter.register(client, 0, self.number)

    def grant(self, client, sharers, now):
        self.clock.now = now
        self.limiter.report_wait("learner", CAPACITY)
        return self.limiter.grant(client, sharers)[0]

    def report(self, client, inserted, entries, now):
        self.clock.now = now
        self.number += 1
        self.entries += entries
        self.limiter.report_inserts(client, inserted, self.number)


def test_clients_that_come_while_a_learner_waits_are_granted_no_more_than_there_is_room_for():
    room, now = Room(), 10.0 * STARVING_TIMEOUT
    room.meet(A)
    assert room.grant(A, 1, now) == CAPACITY
    room.meet(B)
    assert (
        room.grant(B, 2, now + 0.5 * STALLED_TIMEOUT) == 0
    )  # the first client has all the room, and may be about to record
    room.report(A, CAPACITY // 2, CAPACITY // 2, now + 0.9 * STALLED_TIMEOUT)
    assert room.grant(B, 2, now + 1.5 * STALLED_TIMEOUT) == 0
    assert room.grant(A, 2, now + 1.5 * STALLED_TIMEOUT) == CAPACITY


def rounds_of(room, clients, sharers, now, steps):
    """Record the grants of each client in turns until the learner can draw; return the time and the counts."""
    inserted = dict.fromkeys(clients, 0) | steps
    while room.entries < CAPACITY:
        assert now < 100.0
        for client in clients:
            granted = room.grant(client, sharers, now)
            if granted > inserted[client]:
                room.report(client, granted, granted - inserted[client], now)
                inserted[client] = granted
        now += 0.01
    room.limiter.record_draw(CAPACITY)
    room.entries = 0
    return now, inserted


def test_a_client_that_dies_with_room_and_open_entries_stalls_a_learner_once():
    room, now = Room(), 10.0 * STARVING_TIMEOUT
    for client in (A, B):
        room.meet(client)
    assert room.grant(A, 2, now) == CAPACITY // 2
    room.report(A, 100, 0, now)  # entries of open episodes never arrive
    began, inserted = now, {}  # A is dead, and counts as a sharer for a minute
    for _ in range(5):
        now, inserted = rounds_of(room, [B], 2, now, inserted)
    assert STALLED_TIMEOUT <= now - began < 3.0 * STALLED_TIMEOUT
    assert room.limiter.stats().surplus == 0.0
