"""Sampling rounds from plan to last sample: servers are pools without sockets, time and chance are arguments."""

from copy import copy
from dataclasses import replace
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.errors import MemoireTimeout, ParameterError, Refused
from memoire.reader.directory import NOTHING, Address, RemoteServer, ServerStock
from memoire.reader.io import ReaderThread
from memoire.reader.rounds import (
    CALM_TAKES,
    MAX_AHEAD,
    MAX_AHEAD_BYTES,
    REFUSED_INTERVAL,
    RETRY_INTERVAL,
    BatchQueue,
    checked_partition,
)
from memoire.replay.parameters import NAMES, Parameters
from memoire.tables.calls import LEFT_OUT_TIMEOUT
from memoire.wire import messages
from memoire.wire.messages import Draw, ServerRate, Sums
from memoire.wire.rows import CLIENT_COUNTS, CLIENT_SUMS, unpack_counts
from readerkit import PARAMETERS, SCHEMA, PoolServer, World, learn, message, refused, welcome

pytestmark = pytest.mark.usefixtures("without_io")


LIMITED = Parameters(cache_size=64, samples_per_insert=1.0, samples_per_insert_tolerance=100.0)


def two(**options):
    return World({"a": PoolServer([1, 2]), "b": PoolServer([3, 4], seed=2)}, **options)


def kinds(asks):
    return [(ask.stock.server.name, type(ask.body)) for ask in asks]


def actions(drawn):
    """Return the client number of each sample."""
    return drawn.batch(SCHEMA, None)["action"].tolist()


def test_a_batch_is_planned_when_all_have_said_what_they_have_and_whole_when_all_have_answered():
    world = two()
    first, second = world.begin()
    assert kinds([first, second]) == [("a", Sums), ("b", Sums)] and world.begin() == []
    world.answer(first)
    assert world.begin() == []  # server b has not reported sums
    world.answer(second)
    draws = world.begin()
    assert kinds(draws) == [("a", Draw), ("b", Draw)]
    assert sum(int(unpack_counts(ask.body.counts)["count"].sum()) for ask in draws) == 32
    assert world.answer(draws[1]) == []
    (drawn,) = world.answer(draws[0])
    assert len(actions(drawn)) == 32 and set(actions(drawn)) == {1, 2, 3, 4}
    assert world.prefetch.samples == 32 and world.rounds.short == 0


OTHERS = {
    "priority_exponent": 0.7, "importance_exponent": 0.5, "importance_final": 1.0, "importance_batches": 9,
    "prioritization": "rank", "stratified": True, "priority_epsilon": 0.1, "mix_lambda": 0.5, "frame_stack": 2,
    "multi_step": 2, "sequence_length": 4, "sequence_overlap": 1, "burn_in": 1, "sequence_max_share": 0.5,
    "sequence_first": ("action",), "cache_size": 32, "rollout_length": 5, "max_episode": 3, "reuse_cache": True,
    "discount": 0.5, "reward_coeff": 2.0, "start": "zero", "prev": ("obs",), "next": ("action",),
    "samples_per_insert": 2.0, "samples_per_insert_tolerance": 50.0, "min_size": 1, "max_times_sampled": 2,
    "max_age": 9.0, "max_model_lag": 1, "model_topic": "policy", "normalize": "global", "compression": "zlib",
}  # fmt: skip
"""Parameters that all differ from their defaults."""


def test_no_batch_is_drawn_while_servers_differ_in_any_parameter():
    assert set(OTHERS) == NAMES
    for name, value in OTHERS.items():
        needs = {"sequence_length": 4} if name in ("sequence_overlap", "burn_in") else {}
        world = two(parameters=PARAMETERS.replace(**needs))
        other = world.servers["b"].parameters = PARAMETERS.replace(**needs, **{name: value})
        world.servers["a"].parameters = PARAMETERS.replace(**needs)
        assert world.run(2) == [], name
        world.directory.servers["b"].parameters = other
        with pytest.raises(ParameterError, match=f"^Server b has {name}=.*but other servers of this table have"):
            raise world.directory.parameter_mismatch()
        world.servers["b"].parameters = world.servers["a"].parameters
        world.now += REFUSED_INTERVAL
        world.turn()
        assert world.directory.parameter_mismatch() is None


def test_a_draw_by_other_parameters_than_planned_is_dropped_and_counted():
    world = two()
    world.turn()
    world.begin()
    world.servers["b"].parameters = PARAMETERS.replace(discount=0.5)
    assert world.answer() == [] and world.rounds.refused == {"parameters": 1}


def test_batches_are_drawn_until_there_are_enough_and_none_before_somebody_asks():
    world = two(batch_size=0)
    assert world.begin() == [] and not world.rounds.wants_round
    world.prefetch.resize(8)
    world.turn()
    world.turn()
    assert len(world.prefetch) == 1 and not world.rounds.wants_round and world.begin() == []
    world.prefetch.take()
    assert world.rounds.wants_round


def test_no_batch_is_planned_while_an_address_has_its_time_to_answer():
    world = two()
    world.directory.addresses[0].servers = ()
    world.now = LEFT_OUT_TIMEOUT - 0.1
    assert world.begin() == [] and world.rounds.next_time(world.now) == LEFT_OUT_TIMEOUT
    world.now = LEFT_OUT_TIMEOUT
    assert len(world.begin()) == 2


def test_pauses_between_two_questions_grow_until_a_batch_is_drawn():
    """A reader asks again soon after a batch, and less and less often while samples are too few."""
    server = PoolServer([1], caches=0)
    world, pauses = World({"a": server}, batch_size=48), []

    def pause():
        world.turn()
        assert world.begin() == []
        pauses.append(world.rounds.next_time(world.now) - world.now)
        world.now += pauses[-1]

    for _ in range(4):
        pause()
    server.push(1)
    assert len(world.run(1)) == 1
    pause()
    assert pauses == pytest.approx([0.005, 0.01, 0.02, 0.02, 0.005])


def wanted_of(ask):
    return int(unpack_counts(ask.body.counts)["count"].sum())


def given_by(world):
    """Return the number of samples that the servers have delivered."""
    return sum(server.given for server in world.servers.values())


def drawn_of(world, name, payload=None):
    clients = world.servers[name].pool.reserve(b"r" * 16, 0).tobytes()
    return message(messages.Drawn(clients=clients), payload=payload)


NO_ANSWER = MemoireTimeout("reply", "tcp://a", 1.0, "")
PARTS = {
    "refused": lambda world, name: refused("too_large"),
    "away": lambda world, name: NO_ANSWER,
    "nothing": drawn_of,
    "damaged": lambda world, name: drawn_of(world, name, np.zeros(8, np.uint8)),
}
"""Answers of one of two servers to its part of a round."""


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("batch_size", [32, 8])
def test_samples_of_a_round_that_another_server_makes_short_are_given_in_the_next_batches(part, batch_size):
    """No delivered sample is lost, also if the caller changes to smaller batches."""
    world = two()
    world.turn()
    ours, theirs = world.begin()
    world.answer(ours)
    assert world.answer(theirs, by=PARTS[part](world, "b")) == []
    assert given_by(world) == wanted_of(ours) > 0 and world.rounds.short == wanted_of(theirs) > 0
    assert sum(world.rounds.refused.values()) == (part == "damaged")
    if part == "refused":
        with pytest.raises(Refused):
            world.prefetch.check()
    world.prefetch.resize(batch_size)
    world.now += REFUSED_INTERVAL
    world.answer()  # delivered samples make smaller batches
    batches = world.run(4)
    assert {len(drawn.importance) for drawn in batches} == {batch_size}
    assert {float(drawn.importance.max()) for drawn in batches} == {1.0}
    assert given_by(world) == world.prefetch.samples, "each is in a batch"


def test_samples_that_come_after_their_server_was_left_out_are_given_too():
    world = two()
    world.turn()
    ours, theirs = world.begin()
    world.answer(ours)
    world.rounds.leave_out(theirs.stock.server)
    assert world.answer(theirs) and world.rounds.short == 0
    assert given_by(world) == world.prefetch.samples == 32


def test_a_refusal_of_a_size_that_nobody_asks_for_any_more_ends_no_call():
    world = two(ahead=2)
    world.turn()
    first, *others = world.begin()
    world.answer(first, by=refused("too_large"))
    with pytest.raises(Refused):
        world.prefetch.check()
    world.prefetch.resize(8)
    for ask in others:
        world.answer(ask, by=refused("too_large"))
    world.prefetch.check()
    world.now += REFUSED_INTERVAL
    assert len(world.run(2)) == 2


def test_a_call_that_waits_for_a_batch_hears_of_its_error_at_once():
    world, thread = two(), Mock()
    thread.rounds, thread.prefetch, thread.monitor.condition = world.rounds, world.prefetch, MagicMock()
    thread.monitor.now.return_value = world.now
    world.turn()
    ReaderThread._answered(thread, world.begin()[0], refused("too_large"))
    assert thread.monitor.condition.notify_all.called


def test_batches_of_a_former_size_and_those_on_their_way_make_others():
    world = two(ahead=2)
    world.turn()
    draws = world.begin()
    world.answer(*draws[:2])
    assert len(world.prefetch) == 1 and world.prefetch.resize(12) and not world.prefetch.resize(12)
    world.answer()
    assert [len(world.prefetch), world.prefetch.samples, given_by(world)] == [5, 60, 64]
    world.prefetch.clear()
    world.run(1)
    assert given_by(world) - world.prefetch.samples == 0, "4 fewer were asked for"


def test_the_band_between_drawing_and_recording_holds_a_batch_up_and_says_why():
    servers = {"a": PoolServer([1], parameters=LIMITED)}
    world = World(servers, batch_size=64, parameters=LIMITED)
    servers["a"].standing = ServerRate(-200.0, False, 0, 200, 1.0, 100.0)
    world.turn()
    assert world.begin() == [] and world.rounds.waits_for
    servers["a"].standing = ServerRate(0.0, False, 200, 200, 1.0, 100.0)
    world.now += RETRY_INTERVAL
    (ask,) = world.begin()
    assert ask.body.wanted == 64 and ask.body.band.surplus == -200.0
    world.answer()
    (draw,) = world.begin()
    assert isinstance(draw.body, Draw) and world.rounds.waits_for == "" and draw.body.wanted == 0


@pytest.mark.parametrize("value", [1, (1,), (0, 1, 2), ("0", 1), (0, True), (-1, 2), (2, 2), (0, 1 << 32)])
def test_what_is_no_partition_is_refused(value):
    with pytest.raises(ParameterError, match="partition"):
        checked_partition(value)


def test_a_batch_goes_on_without_a_server_that_does_not_answer_and_with_it_when_it_does():
    world = two()
    ours, theirs = world.begin()
    world.answer(ours)
    assert world.rounds.next_time(world.now) == world.now + LEFT_OUT_TIMEOUT
    assert world.rounds.late_servers(world.now + LEFT_OUT_TIMEOUT - 0.1, []) == []
    world.now += LEFT_OUT_TIMEOUT
    (late,) = world.rounds.late_servers(world.now, [])
    assert late.name == "b"
    world.rounds.leave_out(late)
    assert late.is_away and world.rounds.late_servers(world.now, []) == []
    world.begin()  # the sums of server a are too old
    world.answer(*[ask for ask in world.open if ask is not theirs])
    assert kinds(world.begin()) == [("a", Draw)]
    world.answer()
    assert not late.is_away and len(world.prefetch) == 1


def test_a_server_that_was_forgotten_and_answers_late_is_not_planned_with():
    world = two()
    _, theirs = world.begin()
    world.rounds.forget(world.directory.servers.pop("b"))
    world.answer()
    assert kinds(world.begin()) == [("a", Draw)]
    learn(world.directory, welcome("a", ["a", "b"]))
    assert kinds(world.begin()) == []  # enough samples are on their way
    world.answer()
    world.prefetch.take()
    assert ("b", Sums) in kinds(world.begin())


@pytest.mark.parametrize("answer", [refused("run"), NO_ANSWER, message(messages.Taken())])
def test_a_server_that_refuses_is_greeted_at_once_and_asked_again_after_a_pause(answer):
    world = World({"a": PoolServer([1])})
    world.directory.due_addresses(world.now)
    world.directory.addresses[0].hello.receive_answer()
    (ask,) = world.begin()
    world.answer(ask, by=answer)
    assert world.directory.next_time() == 0.0
    assert world.begin() == [] and world.rounds.next_time(world.now) == world.now + REFUSED_INTERVAL
    world.now += REFUSED_INTERVAL
    assert kinds(world.begin()) == [("a", Sums)]


def test_batches_on_their_way_are_given_up_when_parameters_change():
    world = two()
    world.turn()
    draws = world.begin()
    world.rounds.drop_rounds()
    assert world.answer(*draws) == [] and world.rounds.short == 0


def waiting(world):
    """Return the batches of twenty rounds of a learner that never finds a batch ready."""
    rounds = []
    for _ in range(20):
        world.prefetch.record_empty_queue()
        rounds.append(world.turn())
        while len(world.prefetch):
            world.prefetch.take()
    return rounds


def plenty(**options):
    servers = {"a": PoolServer([1, 2], caches=40), "b": PoolServer([3, 4], caches=40, seed=2)}
    return World(servers, **options)


def test_a_learner_that_waits_is_given_several_batches_in_a_round_until_it_waits_no_more():
    world = plenty(batch_size=8)
    rounds = [len(batches) for batches in waiting(world)]
    assert (
        max(rounds) > 1
        and world.prefetch.depth == MAX_AHEAD
        and world.prefetch.samples_to_reserve == 8 * (MAX_AHEAD + 1)
    )
    for _ in range(40 * CALM_TAKES):
        world.turn()
        if len(world.prefetch) > 1:
            world.prefetch.take()
    assert world.prefetch.depth < MAX_AHEAD


@pytest.mark.parametrize(
    ("size", "most", "depth", "rounds"),
    [
        (MAX_AHEAD_BYTES + 1, MAX_AHEAD_BYTES, 3, 1),
        (MAX_AHEAD_BYTES // 4 - 4096, MAX_AHEAD_BYTES, 4, 2),
        (MAX_AHEAD_BYTES // 4 - 4096, MAX_AHEAD_BYTES // 2, 3, 1),
        (MAX_AHEAD_BYTES // 4 - 4096, 4 * MAX_AHEAD_BYTES, 4, 2),
    ],
)
def test_large_batches_come_together_as_far_as_their_bytes_allow(size, most, depth, rounds):
    world = plenty(batch_size=8)
    one = next(batches for batches in waiting(world) if batches)[0]
    big = replace(one, gathered=copy(one.gathered))
    big.gathered.weight = np.zeros(size, np.int8)
    queue = BatchQueue(3, most_bytes=most)
    queue.resize(8)
    for _ in range(4):
        queue.put(big)
        queue.take()
        queue.record_empty_queue()
        queue.begin(1 << 20)
    assert (queue.depth, queue.round_batches) == (depth, rounds)
    assert (queue.begin(8), queue.begin(16)) == (1, rounds), "no more than there are samples for"


@pytest.mark.parametrize("parameters", [LIMITED, LIMITED.replace(samples_per_insert_tolerance=300.0)])
def test_a_band_counts_each_batch_by_itself(parameters):
    world = plenty(batch_size=8, parameters=parameters)
    assert max(len(batches) for batches in waiting(world)) <= 1


@pytest.mark.parametrize("is_global", [False, True])
def test_a_round_is_parted_into_batches_whose_undivided_importance_stays(is_global):
    (drawn,) = two(batch_size=32).run(1)
    importance = np.linspace(0.1, 1.0, 32, dtype=np.float32)
    whole = replace(drawn, importance=importance, divisor=3.0)
    parts = list(whole.split(10, is_global))
    assert [len(part.importance) for part in parts] == [10, 10, 10], "the rest fills no batch"
    undivided = np.concatenate([part.importance * part.divisor for part in parts])
    np.testing.assert_allclose(undivided, importance[:30] * 3.0, rtol=1e-6)
    largest = [float(part.importance.max()) for part in parts]
    assert largest == ([float(each) for each in importance[9:30:10]] if is_global else [1.0] * 3)
    ids = np.concatenate([part.gathered.ids["number"] for part in parts])
    assert ids.tolist() == drawn.gathered.ids["number"][:30].tolist()


def test_rows_of_a_ragged_batch_are_as_wide_as_their_longest_value():
    (drawn,) = two(batch_size=8).run(1)
    lengths = np.array([1, 2, 0, 1, 5, 4, 3, 5], np.int32)
    gathered = copy(drawn.gathered)
    gathered.prev, gathered.next = {"x": np.ones((8, 5), np.int8)}, {"x": np.ones((8, 5), np.int8)}
    gathered.prev_lengths, gathered.next_lengths = {"x": lengths}, {"x": lengths[::-1]}
    parts = list(replace(drawn, gathered=gathered).split(4, is_global=False))
    assert [(part.gathered.prev["x"].shape, part.gathered.next["x"].shape) for part in parts] == [((4, 5), (4, 5))] * 2
    gathered.next_lengths = {}
    first, second = replace(drawn, gathered=gathered).split(4, is_global=False)
    assert (first.gathered.prev["x"].shape, second.gathered.prev["x"].shape) == ((4, 2), (4, 5))
    again = second.joined(first, is_global=False).gathered
    assert again.prev["x"].shape == (8, 5) and again.prev_lengths["x"].tolist() == [*lengths[4:], *lengths[:4]]


# --- Samples that a server holds for a reader, without samples on the way, compared with a simple count


def table_of(reserved, flags=None):
    """Return rows of CLIENT_SUMS for clients 7, 8, 9 ..."""
    table = np.zeros(len(reserved), CLIENT_SUMS)
    table["client"][:, 0], table["reserved"] = np.arange(7, 7 + len(reserved)), reserved
    table["flags"], table["positives"] = flags or 0, 10
    return table


def counts_of(counts):
    """Return rows of CLIENT_COUNTS by client."""
    rows = np.zeros(len(counts), CLIENT_COUNTS)
    rows["client"][:, 0], rows["count"] = list(counts), list(counts.values())
    return rows


def stock():
    return ServerStock(RemoteServer("a", Address("tcp://a"), 0.0))


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=5),
    st.dictionaries(st.integers(5, 13), st.integers(0, 40), max_size=6),
)
def test_taking_samples_agrees_with_counting_them_one_client_after_the_other(reserved, counts):
    held = stock()
    held.report(table_of(reserved), 0.0)
    held.subtract_requested(counts_of(counts))
    expected = [max(0, there - counts.get(7 + place, 0)) for place, there in enumerate(reserved)]
    assert held.table["reserved"].tolist() == expected


def test_nothing_is_taken_where_nothing_is_known():
    held = stock()
    held.subtract_requested(counts_of({7: 3}))
    assert held.table is None and held.is_older(1.0, 0.0)
    held.report(table_of([3]), 5.0)
    held.subtract_requested(NOTHING)
    assert held.table["reserved"].tolist() == [3]
    assert not held.is_older(1.0, 6.0) and held.is_older(1.0, 6.1)
