"""The band between drawing and recording: kept at any speeds, explained, never a reason to wait for ever."""

import itertools
import math
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memoire.errors import EmptyMemory, NotEnoughSamples, ParameterError, UsedUp
from memoire.limits import NO_LIMIT
from memoire.reader.rounds import RateTracker
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.limiter import (
    GRANT_TIME,
    LEAST_ENTRIES,
    LEAST_PART,
    STARVING_TIMEOUT,
    ClusterSurplus,
    ServerSurplus,
    SharedLimiter,
    check_batch,
)
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Prioritized
from memoire.replay.schema import Schema
from memoire.wire.messages import ClusterRate, ServerRate
from poolkit import Clock

numbers = itertools.count(1)


def limiter(entries: int = 10**6, clock=None, **fields) -> SharedLimiter:
    return SharedLimiter(Parameters(**fields), lambda: entries, clock or Clock(0.0))


def test_a_grant_is_never_more_than_a_message_can_say():
    band = limiter(samples_per_insert=1e-12, samples_per_insert_tolerance=1e6)
    assert band.grant(b"a" * 16) == (NO_LIMIT, "")


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
        band.met(client, 0, next(numbers))
    for _ in range(4000):
        for client, speed in zip(clients, speeds, strict=True):
            if rng.random() < speed:  # so many steps as it may, told late
                done[client] += rng.randint(0, min(through[client] - done[client], 50))
            if rng.random() < speed:
                band.reported(client, done[client], next(numbers))
                through[client] = band.grant(client, len(clients))[0]
        if rng.random() < learner and not band.why_not_draw(batch):
            band.drew(batch)
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
    told: dict[int, int] = {}
    through: dict[int, int] = {}
    asked: dict[int, int] = {}
    inserted = drawn = 0
    for what, who, count in walk:
        client, surplus = bytes([who]) * 16, ratio * inserted - drawn
        if what == "report":
            if who not in told:
                band.met(client, 0, next(numbers))
            before = told.setdefault(who, 0)
            told[who] = max(before, before + count - 5)
            inserted += told[who] - before
            band.reported(client, before + count - 5, next(numbers))
        elif what == "grant":
            others = sum(max(0, through[i] - told.get(i, 0)) for i in through if i != who)
            room = (tolerance - surplus) / ratio
            now = told.setdefault(who, 0)
            lasting = (now - asked.get(who, now)) / 1e-3 * GRANT_TIME  # no time passes
            mine = min(room - others, max(1.0, min(room / 2, max(LEAST_ENTRIES, room / LEAST_PART, lasting))))
            expected = max(through.get(who, 0), now + max(0, math.floor(mine + 1e-6)))
            assert band.grant(client, 2)[0] == expected
            asked[who] = now if expected > through.get(who, 0) else asked.get(who, now)
            through[who] = expected
        elif what == "leave":
            band.left(client)
            for known in (told, through, asked):
                known.pop(who, None)
        elif count:
            assert bool(band.why_not_draw(count)) == (surplus - count < -tolerance - 1e-6)
            band.drew(count)
            drawn += count
    stats = band.stats()
    assert stats.surplus == pytest.approx(ratio * inserted - drawn)
    assert (stats.inserted, stats.drawn) == (inserted, drawn)


def test_a_slow_client_is_granted_what_lasts_it_a_moment_and_the_others_need_not_wait_for_it():
    clock = Clock(0.0)
    band = limiter(clock=clock, samples_per_insert=1.0, samples_per_insert_tolerance=1600.0)
    names = [bytes([number]) * 16 for number in range(9)]
    first, *others = names
    band.met(first, 0, next(numbers))
    assert band.grant(first) == (100, ""), "a sixteenth, although nobody else is there"
    clock.now += 1.0
    band.reported(first, 100, next(numbers))
    assert band.grant(first)[0] == 100 + 1500 // 16, "still a sixteenth: it records 50 in half a second"
    for client in others:
        band.met(client, 0, next(numbers))
        assert band.grant(client, len(names)) == (1500 // 16, "")
    clock.now += 0.1
    band.reported(first, 193, next(numbers))
    assert band.grant(first)[0] == 193 + 465, "it has become quick: 93 in a tenth of a second"


def test_both_sides_say_why_they_wait():
    band = limiter(samples_per_insert=2.0, samples_per_insert_tolerance=100.0)
    band.met(b"a" * 16, 0, next(numbers))
    assert not band.why_not_draw(100)
    band.drew(100)
    assert band.why_not_draw(74).startswith(
        "waits for 37 more entries: drawing is 100 samples ahead of 2 for each entry"
    )
    assert "waits for 37 more entries" in band.stats().draws_wait and not band.stats().inserts_wait
    for granted in (LEAST_ENTRIES, 100):
        assert band.grant(b"a" * 16) == (granted, "")
        band.reported(b"a" * 16, granted, next(numbers))
    assert band.grant(b"a" * 16) == (100, band.stats().inserts_wait)
    assert band.stats().inserts_wait.startswith("waits until 2 more samples are drawn: learners are 100 samples behind")


@pytest.mark.parametrize(("recorded", "said"), [(0, "0 samples ahead of"), (15, "30 samples behind")])
def test_a_batch_that_waits_says_on_which_side_drawing_is(recorded, said):
    band = limiter(samples_per_insert=2.0, samples_per_insert_tolerance=100.0)
    band.met(b"a" * 16, 0, next(numbers))
    band.reported(b"a" * 16, recorded, next(numbers))
    assert f"entries: drawing is {said} 2 for each entry" in band.why_not_draw(150)


def test_nothing_is_drawn_before_enough_is_there_and_the_band_begins_then():
    held = [0]
    band = SharedLimiter(
        Parameters(min_size=1000, samples_per_insert=1.0, samples_per_insert_tolerance=20.0),
        lambda: held[0],
        Clock(0.0),
    )
    assert band.why_not_draw(1).startswith(
        "waits for 1000 more entries: 0 can be drawn, and 1000 are to be there first"
    )
    client, done = b"c" * 16, 0
    while held[0] < 1000:
        through, reason = band.grant(client)
        assert through > done and not reason, "nobody else could bring what is missing"
        held[0] = done = through
        band.reported(client, done, next(numbers))
    assert done <= 1020 and not band.why_not_draw(10)
    assert band.stats().surplus <= 20.0


def test_actors_go_on_where_a_learner_waits_for_samples_that_were_lost():
    clock = Clock(0.0)
    band = limiter(clock=clock, samples_per_insert=1.0, samples_per_insert_tolerance=32.0, cache_size=8)
    client = b"d" * 16
    band.reported(client, 0, next(numbers))
    band.reported(client, band.grant(client)[0], next(numbers))
    band.wants("learner", 16)
    assert band.grant(client)[1], "the band is full"
    clock.now += 2 * STARVING_TIMEOUT
    band.wants("learner", 16)
    through, reason = band.grant(client)
    assert (through, reason) == (32 + 24, "")
    band.reported(client, through, next(numbers))
    assert band.stats().surplus == 32.0 and band.stats().forgiven == 24.0
    band.wants("learner", 0)
    assert band.grant(client)[1]


def test_a_client_that_has_ended_gives_back_what_it_was_granted():
    band = limiter(samples_per_insert=1.0, samples_per_insert_tolerance=50.0)
    assert band.grant(b"a" * 16)[0] == 50
    through, reason = band.grant(b"b" * 16)
    assert through == 0 and reason.startswith("waits until 1 more samples are drawn: learners are 0 samples behind")
    band.left(b"a" * 16)
    assert band.grant(b"b" * 16)[0] == 50


def test_a_client_that_comes_from_another_home_brings_no_inserts_along():
    band = limiter(samples_per_insert=1.0, samples_per_insert_tolerance=50.0)
    band.met(b"a" * 16, 10_000, next(numbers))
    band.reported(b"a" * 16, 10_010, next(numbers))
    assert (band.stats().inserted, band.stats().surplus) == (10, 10.0)
    assert band.grant(b"a" * 16)[0] == 10_050


def test_a_batch_that_could_never_be_drawn_is_refused_at_once():
    parameters = Parameters(samples_per_insert=4.0, samples_per_insert_tolerance=100.0)
    check_batch(parameters, 196)
    with pytest.raises(ParameterError, match="batch_size must be at most 196 with") as caught:
        check_batch(parameters, 198)
    assert "Set a tolerance of at least 101" in str(caught.value)


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
                    band.reported(client, done, next(numbers))
                band.drew(largest)


def test_another_band_begins_anew_and_another_setting_does_not():
    band = limiter(samples_per_insert=1.0, samples_per_insert_tolerance=50.0)
    band.drew(0)
    assert not band.why_not_draw(40)
    band.drew(40)
    band.configure(Parameters(samples_per_insert=1.0, samples_per_insert_tolerance=50.0, priority_exponent=0.1))
    assert band.stats().surplus == -40.0
    band.configure(Parameters(samples_per_insert=2.0, samples_per_insert_tolerance=50.0))
    assert band.stats().surplus == 0.0
    band.configure(Parameters())
    assert band.grant(b"f" * 16) == (NO_LIMIT, "") and not band.why_not_draw(10**6)


def test_a_reader_of_several_servers_says_how_it_stands_with_all():
    band = limiter(entries=0, samples_per_insert=1.0, samples_per_insert_tolerance=50.0)
    band.reported(b"a" * 16, 0, next(numbers))
    band.reported(b"a" * 16, 30, next(numbers))
    assert band.standing() == ServerSurplus(
        surplus=30.0, is_told=False, inserted=30, drawn=0, ratio=1.0, tolerance=50.0
    )
    band.reported(b"a" * 16, 35, next(numbers))  # what the reader does not know yet
    band.told(ClusterSurplus(surplus=-45.0, inserted=30, drawn=0, entries=7, share=0.5, ratio=1.0, tolerance=50.0))
    assert (band.standing().surplus, band.standing().is_told) == (-40.0, True) and band.stats().entries == 7
    assert band.why_not_draw(11) and not band.why_not_draw(10)
    assert band.grant(b"a" * 16)[0] == 35 + 45  # half of the room of 90


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
    """What every life of every server told of itself adds up, whatever numbers its epochs have; what a life never told
    is lost with it. A server that begins anew has a band of its own until it is told of that of all.
    """
    names, balance = ["a", "b"], RateTracker()
    parameters = Parameters(samples_per_insert=ratio, samples_per_insert_tolerance=1e6)
    life = dict.fromkeys(names, 100)
    counts = {name: [0, 0] for name in names}  # inserted and drawn in this life
    told = dict.fromkeys(names, False)
    known = dict.fromkeys(names, (0, 0))  # of its life, as the reader has heard
    expected = 0.0

    def hear(name):
        nonlocal expected
        inserted, drawn = counts[name]
        news = (inserted - known[name][0]) * ratio - (drawn - known[name][1])
        expected += news
        known[name] = inserted, drawn
        surplus = expected if told[name] else inserted * ratio - drawn
        standing = ServerRate(surplus, told[name], inserted, drawn, ratio, 1e6)
        balance.heard(name, life[name], standing, 50, 3)
        assert balance.why_not_draw(parameters, names, 1, 0) in ("", UNKNOWN)
        band = balance.band(name, names)
        told[name] = band is not None
        assert band is None or (band.surplus, band.inserted, band.drawn) == (pytest.approx(expected), inserted, drawn)

    for name in names:
        hear(name)
    for what, which, count in walk:
        name = names[which]
        if what == "hear":
            hear(name)
        elif what == "restart":
            life[name] += 1 if clock_goes_on else -1
            counts[name], known[name], told[name] = [0, 0], (0, 0), False
        else:
            counts[name][what == "draw"] += count
    for name in names:
        hear(name)


UNKNOWN = "waits for all servers to say how many entries were recorded"


def test_a_balance_begins_with_what_was_known_of_all():
    """The reader is new, and one server was told of the band of all by a former one; the others speak for themselves."""
    parameters = Parameters(samples_per_insert=2.0, samples_per_insert_tolerance=100.0)
    balance = RateTracker()
    balance.heard("a", 1, ServerRate(30.0, True, 40, 50, 2.0, 100.0), 50, 3)
    assert balance.why_not_draw(parameters, ["a", "b"], 1, 0) == UNKNOWN and balance.band("a", ["a", "b"]) is None
    balance.heard("b", 1, ServerRate(4.0, False, 7, 10, 2.0, 100.0), 20, 1)
    assert balance.why_not_draw(parameters, ["a", "b"], 134, 0) == ""
    assert "drawing is 29 samples behind" in balance.why_not_draw(parameters, ["a", "b"], 130, 5)
    band = balance.band("a", ["a", "b"])
    assert band == ClusterRate(34.0, 40, 50, 20, 4 / 6, 2.0, 100.0)
    balance.heard("c", 9, ServerRate(6.0, False, 3, 0, 2.0, 100.0), 1, 1)  # it comes later
    assert balance.band("b", ["a", "b", "c"]).surplus == 40.0
    balance.heard("d", 9, ServerRate(40.0, True, 3, 0, 2.0, 100.0), 1, 1)  # another reader has told it of all already
    assert balance.band("b", ["a", "b", "c", "d"]).surplus == 40.0
    balance.heard("c", 9, None, 1, 1)
    assert balance.band("c", ["a", "b", "c"]) is None, "nothing is limited there any more"
    balance.reset()
    assert balance.band("a", ["a", "b"]) is None
    told = {"a": ServerRate(30.0, True, 40, 50, 2.0, 100.0), "b": ServerRate(25.0, True, 9, 9, 2.0, 100.0)}
    for name, standing in (told | {"c": ServerRate(4.0, False, 7, 10, 2.0, 100.0)}).items():
        balance.heard(name, 1, standing, 50, 3)
    assert balance.why_not_draw(parameters, ["a", "b", "c"], 1, 0) == ""
    assert balance.band("a", ["a", "b", "c"]).surplus == 34.0, "what two were told is of all, and counts once"


def test_a_draw_that_waits_goes_on_when_entries_come():
    band = limiter(clock=time.monotonic, samples_per_insert=1.0, samples_per_insert_tolerance=20.0)
    assert band.take(20, 0.0) == ""
    said: list[str] = []
    waits = threading.Thread(target=lambda: said.append(band.take(10, 20.0)))
    waits.start()
    band.met(b"a" * 16, 0, next(numbers))
    band.reported(b"a" * 16, 10, next(numbers))
    waits.join(100.0)
    assert said == [""] and band.stats().surplus == -20.0
    assert "waits for 1 more entries" in band.take(1, 0.01)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"samples_per_insert": 1e300}, "samples_per_insert must be at most"),
        ({"samples_per_insert": 1e-300, "samples_per_insert_tolerance": 3.0}, "samples_per_insert must be above 0"),
        ({"samples_per_insert_tolerance": 1e300}, "samples_per_insert_tolerance must be at most"),
        ({"samples_per_insert_tolerance": 0.5}, "samples_per_insert_tolerance must be at least 1"),
        ({"samples_per_insert_tolerance": 3.0, "samples_per_insert": 4.0}, "at least 4"),
        ({"samples_per_insert_tolerance": 3.0, "samples_per_insert": 0.0}, "samples_per_insert must be above 0"),
        (
            {"max_times_sampled": 2, "samples_per_insert": 3.0},
            "samples_per_insert must be at most max_times_sampled, 2",
        ),
        ({"max_age": 0.0}, "max_age must be above 0"),
        ({"max_age": -1.0}, "max_age must be"),
        ({"max_model_lag": -1}, "max_model_lag must be"),
        ({"min_size": -1}, "min_size must be"),
        ({"max_times_sampled": 1.5}, "max_times_sampled must be"),
        ({"model_topic": ""}, "model_topic must be"),
    ],
)
def test_limits_that_cannot_be_met_are_refused(fields, words):
    with pytest.raises(ParameterError, match=words):
        Parameters(**fields)


# In one process


def buffer(**fields):
    schema = Schema({"obs": Column(np.float32, (1,), "state"), "reward": Column(np.float32, (), "reward")})
    return Buffer(schema, 1000, seed=1, **fields)


def fill(made, steps, version=0):
    writer = made.writer()
    for number in range(steps):
        obs = np.full(1, number, np.float32)
        writer.step(obs, None, 1.0, number == steps - 1, False, obs + 1, {}, model_version=version)
    writer.close()


def test_a_buffer_refuses_batches_until_enough_is_there():
    made = buffer(min_size=50)
    fill(made, 30)
    with pytest.raises(NotEnoughSamples, match="a batch of 8 has to wait: waits for 20 more entries: 30 can be drawn"):
        made.sample(8)
    fill(made, 20)
    assert len(made.sample(8).ids) == 8
    with pytest.raises(ParameterError, match="min_size must be at most the capacity, 1000 entries"):
        made.configure(min_size=1001)
    assert made.parameters.min_size == 50
    with pytest.raises(ParameterError, match="min_size"):
        buffer(min_size=1001)


def test_a_buffer_refuses_batches_that_are_too_far_ahead():
    made = buffer(samples_per_insert=2.0, samples_per_insert_tolerance=40.0)
    fill(made, 10)
    for _ in range(6):
        made.sample(10)
    assert made.rate.surplus == -40.0 and made.rate.inserted == 10
    with pytest.raises(NotEnoughSamples, match="waits for 5 more entries: drawing is 40 samples ahead of 2 for each"):
        made.sample(10)
    fill(made, 5)
    made.sample(10)
    with pytest.raises(ParameterError, match="batch_size must be at most 78"):
        made.sample(79)
    made.configure(samples_per_insert_tolerance=None)
    made.sample(500)


def test_no_entry_is_drawn_more_often_than_it_may_be_and_importance_stays_right():
    rng = np.random.default_rng(0)
    made = buffer(sampler=Prioritized(1.0, beta=1.0), max_times_sampled=2)
    fill(made, 40)
    numbers = made.sample(1).ids
    made.configure(max_times_sampled=3)
    values = rng.uniform(0.1, 3.0, 40)
    made.update_priorities(np.arange(numbers.min(), numbers.min() + 40) % 1000, values)
    counts: dict[int, int] = {}
    for _ in range(11):
        for number in made.sample(10).ids.tolist():
            counts[number] = counts.get(number, 0) + 1
    assert max(counts.values()) <= 3 and made.memory.draws_left == 40 * 3 - 111
    with pytest.raises(UsedUp, match="a draw of 10 samples is not possible: an entry is drawn 3 times at most"):
        made.sample(10)
    assert len(made.sample(9).ids) == 9
    with pytest.raises(EmptyMemory, match="max_times_sampled"):
        made.sample(1)


def test_weighted_means_are_plain_means_of_what_is_left_before_each_sample():
    weights, sums, draws = np.array([1.0, 2.0, 5.0, 0.5]), np.zeros(4), 1200
    for seed in range(draws):
        schema = Schema({"obs": Column(np.float32, (1,), "state")})
        memory = Memory(schema, 4, Parameters(priority_exponent=1.0, max_times_sampled=1), seed=seed)
        memory.open()
        for number in range(4):
            memory.add(0, (np.full(1, number, np.float32),), weights[number])
        memory.close(terminated=True)
        drawn = memory.sample(4)
        assert sorted(drawn.gathered.ids.tolist()) == [0, 1, 2, 3]
        # (N P)^-1, with N and P of the moment of each sample: its mean over entry i's chance is 1 / N of those left.
        importance = 1.0 / (drawn.num_positive * drawn.weights / drawn.total_weight)
        sums[0] += importance[0] * drawn.gathered.ids[0]
        sums[1] += importance[1] * drawn.gathered.ids[1]
        left = [number for number in range(4) if number != drawn.gathered.ids[0]]
        sums[2] += np.mean(left)
    assert abs(sums[0] / draws - 1.5) < 0.15
    assert abs(sums[1] / draws - sums[2] / draws) < 0.2


def test_what_is_too_old_weighs_nothing_from_that_moment_on():
    made = buffer(max_age=10.0)
    made.memory.set_clock(100.0)
    fill(made, 20)
    made.memory.set_clock(105.0)
    fill(made, 10)
    assert made.memory.num_positive == 30
    made.memory.set_clock(110.0)
    assert made.memory.num_positive == 30
    made.memory.set_clock(110.5)
    assert made.memory.num_positive == 10 and (made.sample(50).age <= 10.0).all()
    made.memory.set_clock(116.0)
    with pytest.raises(EmptyMemory, match="max_age"):
        made.sample(1)
    made.configure(max_age=20.0)
    assert made.memory.num_positive == 30
    made.memory.check_invariants()


def test_what_an_older_model_made_weighs_nothing():
    made = buffer(max_model_lag=1)
    for version in (1, 2, 3):
        fill(made, 10, version)
    assert made.memory.num_positive == 20
    assert set(made.sample(100).model_version.tolist()) == {2, 3}
    made.saw_model(4)
    assert set(made.sample(100).model_version.tolist()) == {3}
    made.configure(max_model_lag=3)
    assert made.memory.num_positive == 30
    made.configure(max_model_lag=None)
    assert made.memory.num_positive == 30


def test_the_newest_model_is_that_of_the_topic_or_of_all():
    versions = {"policy": 3, "critic": 7}
    assert Parameters().newest_model(versions) == 7 and Parameters(model_topic="policy").newest_model(versions) == 3
    assert Parameters(model_topic="other").newest_model(versions) == 0 and Parameters().newest_model({}) == 0
