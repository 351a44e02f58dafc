"""Queues of held caches, step by step: what comes in, makes room, grows too old and leaves, at a time that is given."""

import math

import pytest

from memoire.errors import ParameterError, ProtocolError
from memoire.replay.parameters import Parameters
from memoire.tables.caches.queues import CacheQueues
from poolkit import PLAIN, SCHEMA, cache_of, name

REUSE = PLAIN.replace(reuse_cache=True)


def queues_of(*counts: int, parameters: Parameters = PLAIN, **limits: int) -> CacheQueues:
    """Client i has a cache of counts[i] samples, which came at 100 + i."""
    made = CacheQueues(SCHEMA, parameters, **{"byte_limit": 1 << 30, "cache_limit": 0, "seed": 1} | limits)
    for i, count in enumerate(counts):
        made.add(name(i), 1, cache_of(count, 100 * i, parameters=parameters), 100.0 + i)
    return made


def held_of(queues: CacheQueues) -> dict[bytes, int]:
    return {client: held.caches for client, held in queues.clients.items()}


def test_a_cache_that_comes_is_its_clients_newest_and_its_client_is_heard() -> None:
    queues = queues_of(5)
    assert queues.add(name(0), 2, cache_of(3, total=20.0), 130.0) == 0
    client = queues.clients[name(0)]
    assert (client.caches, client.unused, client.heard, client.total_weight) == (2, 8, 130.0, 20.0)
    assert [cache.arrived for cache in client.queued()] == [100.0, 130.0]
    queues.add(name(0), 1, cache_of(3, total=30.0), 131.0)
    assert client.total_weight == 20.0, "the sums of an older message do not count"
    assert queues.counts.added == 3


def test_the_oldest_cache_of_the_client_with_most_bytes_makes_room() -> None:
    queues = queues_of(5, 5, 5, cache_limit=3)
    assert queues.add(name(2), 2, cache_of(5), 110.0) == 1
    assert held_of(queues) == {name(0): 1, name(1): 1, name(2): 1}
    assert queues.clients[name(2)].queued()[0].arrived == 110.0
    assert (queues.counts.overwritten, queues.counts.overwritten_samples) == (1, 5)
    size = queues.held.nbytes // 3
    assert queues.limit(size) == 2 and queues.held.caches == 1 and queues.byte_limit == size


def test_a_cache_that_is_too_large_or_of_another_layout_is_refused() -> None:
    with pytest.raises(ProtocolError, match="the pool holds 100 in all"):
        queues_of(byte_limit=100).check(cache_of(50))
    queues = queues_of()
    queues.check(cache_of(5))
    with pytest.raises(ProtocolError, match="parameters that have changed since"):
        queues.check(cache_of(5, parameters=PLAIN.replace(frame_stack=2)))


def test_only_parameters_of_another_layout_empty_the_queues() -> None:
    queues = queues_of(5, 5)
    assert queues.configure(REUSE) == 0 and queues.held.caches == 2
    assert queues.configure(PLAIN.replace(frame_stack=2), discard_mismatched=True) == 2
    assert held_of(queues) == {name(0): 0, name(1): 0}, "clients stay"
    before = queues.parameters
    with pytest.raises(ParameterError):
        queues.configure(PLAIN.replace(discount=(0.5, 0.5)))
    assert queues.parameters is before


def test_sums_alone_make_a_client_known_and_older_ones_change_nothing() -> None:
    queues = queues_of()
    assert queues.sums(name(0), 2, 5.0, 7, 0.5, 100.0)
    assert not queues.sums(name(0), 1, 9.0, 9, 0.5, 101.0)
    client = queues.clients[name(0)]
    assert (client.total_weight, client.positives, client.heard) == (5.0, 7.0, 101.0)


def test_a_client_without_weight_whose_entries_are_used_up_can_be_drawn_from_yet() -> None:
    limited = PLAIN.replace(max_times_sampled=1)
    for parameters, expected in ((PLAIN, False), (limited, True)):
        queues = queues_of(5, parameters=parameters)
        assert queues.sums(name(0), 2, 0.0, 0, 0.0, 101.0) is not expected
        assert (queues.draw(5, 101.0) is not None) is expected


def test_silent_clients_leave_when_their_samples_are_used() -> None:
    queues = queues_of(5, 3)
    assert queues.expire(200.0) == 0, "samples are left"
    assert queues.draw(8, 101.0) is not None
    assert queues.expire(100.5) == 1 and held_of(queues) == {name(1): 0}
    queues.heard(name(1), 300.0)
    queues.heard(name(7), 300.0)  # nobody
    assert queues.expire(200.0) == 0 and queues.counts.left == 1


def test_with_reuse_silent_clients_leave_with_all_they_hold() -> None:
    queues = queues_of(5, 3, parameters=REUSE)
    assert queues.expire(100.5) == 1 and held_of(queues) == {name(1): 1}


@pytest.mark.parametrize("parameters", [PLAIN, REUSE])
def test_a_client_that_ended_is_not_waited_for_unless_its_caches_are_used_again(parameters: Parameters) -> None:
    queues = queues_of(5, parameters=parameters)
    queues.goodbye(name(0))
    queues.goodbye(name(7))
    assert queues.clients[name(0)].heard == (100.0 if parameters.reuse_cache else -math.inf)


def test_a_client_that_is_forgotten_takes_what_it_holds_along() -> None:
    queues = queues_of(5, 3)
    assert queues.forget(name(0)) == 5 and queues.forget(name(0)) == 0
    assert queues.held.unused == 3
    queues.forget_all()
    assert not queues.clients and queues.held.nbytes == 0 and len(queues.held) == 0


def test_a_draw_takes_all_or_nothing() -> None:
    queues = queues_of(5, 3)
    assert queues.draw(9, 100.0) is None and queues.drawable() == 8
    picks = queues.draw(8, 100.0)
    assert picks is not None and picks.size == 8 and queues.drawable() == 0
    assert queues_of(5, parameters=REUSE).drawable() == 0, "any number"


def test_what_has_become_too_old_is_passed_over_before_a_draw() -> None:
    queues = queues_of(5, parameters=PLAIN.replace(max_age=50.0))
    queues.add(name(1), 1, cache_of(3, parameters=queues.parameters), 160.0)
    assert queues.draw(8, 170.0) is None, "client 0's cache came at 100"
    assert queues.counts.passed_over == 5 and queues.held.unused == 3
    assert queues.draw(3, 170.0) is not None


def test_what_a_model_of_long_ago_recorded_is_passed_over() -> None:
    queues = queues_of(5, parameters=PLAIN.replace(max_model_lag=2))
    queues.pass_over(100.0)
    assert queues.counts.passed_over == 0
    queues.saw_model(1_000_000)
    queues.saw_model(3)
    queues.pass_over(100.0)
    assert queues.counts.passed_over == 5, "the newest version never goes back"
