"""Readers of a pool, request by request: what is kept for each, what it takes, and when it is forgotten."""

from collections.abc import Iterable

import numpy as np
import pytest

from memoire.errors import ParameterError, ProtocolError
from memoire.replay.parameters import Parameters
from memoire.tables.caches import queues as readers
from memoire.tables.caches.queues import MAX_READERS, CacheQueues, Readers
from memoire.wire.rows import CLIENT_COUNTS
from poolkit import PLAIN, SCHEMA, cache_of, name

ONE, OTHER = b"1" * 16, b"2" * 16
WHOLE = (0, 1)


def made(*counts: int, parameters: Parameters = PLAIN) -> tuple[CacheQueues, Readers]:
    """Client i has a cache of counts[i] samples; readers are silent after 10 s."""
    queues = CacheQueues(SCHEMA, parameters, byte_limit=1 << 30, cache_limit=0, seed=1)
    for i, count in enumerate(counts):
        queues.add(name(i), 1, cache_of(count, 100 * i, parameters=parameters), 100.0)
    return queues, Readers(queues, 10.0, 100.0)


def counts_of(*wanted: tuple[int, int]) -> np.ndarray:
    rows = np.zeros(len(wanted), CLIENT_COUNTS)
    for row, (client, count) in zip(rows, wanted, strict=True):
        row["client"], row["count"] = np.frombuffer(name(client), "<u8"), count
    return rows


def reserved(rows: Iterable[np.void]) -> list[int]:
    return [int(row["reserved"]) for row in rows]


def test_what_is_kept_for_a_reader_is_nobody_elses_until_it_asks_for_less() -> None:
    queues, each = made(20, 20)
    assert sum(reserved(each.reserve(ONE, 30, 0, WHOLE, 100.0))) >= 30
    free = queues.drawable()
    assert free <= 10 and sum(reserved(each.reserve(OTHER, 100, 0, WHOLE, 100.0))) == free
    assert reserved(each.reserve(ONE, 0, 0, WHOLE, 100.0)) == [0, 0]
    assert queues.drawable() == 40 - free


def test_each_part_of_the_clients_is_a_readers_own() -> None:
    _, each = made(5, 6, 7)
    rows = each.reserve(ONE, 100, 0, (1, 2), 100.0)
    assert [bytes(row["client"].tobytes()) for row in rows] == [name(1)] and reserved(rows) == [6]


def test_samples_below_zero_are_refused() -> None:
    with pytest.raises(ParameterError, match="samples must be at least 0"):
        made(5)[1].reserve(ONE, -1, 0, WHOLE, 100.0)


def test_a_reader_takes_what_there_is_of_the_clients_that_it_names() -> None:
    queues, each = made(5, 6)
    picks, _ = each.take(ONE, counts_of((1, 4), (7, 9), (0, 50)), 100.0)
    assert picks.size == 9 and queues.held.unused == 2, "client 7 is not here, and client 0 has 5"
    assert each.take(ONE, counts_of(), 100.0)[0].size == 0


def test_a_reader_does_not_take_what_is_kept_for_another() -> None:
    _, each = made(10)
    each.reserve(ONE, 10, 0, WHOLE, 100.0)
    assert each.take(OTHER, counts_of((0, 10)), 100.0)[0].size == 0
    assert each.take(ONE, counts_of((0, 10)), 100.0)[0].size == 10


def test_what_is_kept_for_a_silent_reader_is_free_again() -> None:
    queues, each = made(10)
    each.reserve(ONE, 10, 0, WHOLE, 100.0)
    each.take(OTHER, counts_of(), 105.0)
    assert not each.present.is_due(101.0) and each.present.is_due(101.5)
    assert not each.expire(110.0) and queues.drawable() == 0
    assert each.expire(110.5) and queues.drawable() == 10
    assert not each.expire(111.0), "the other one was heard at 105"
    assert each.expire(115.5)


def test_draws_from_other_pools_count_between_two_caches_of_a_client() -> None:
    queues, each = made(10)
    for told in (500, 600, 550, 900):  # 500 were drawn before it came here; an older message says 550
        each.reserve(ONE, 0, told, WHOLE, 100.0)
    queues.add(name(0), 2, cache_of(5), 101.0)
    assert queues.clients[name(0)].between == 400.0
    each.expire(200.0)
    each.reserve(ONE, 0, 5000, WHOLE, 200.0)
    queues.add(name(0), 3, cache_of(5), 201.0)
    assert queues.clients[name(0)].between == 300.0, "what a forgotten reader drew meanwhile counts for nobody"


def test_there_is_a_limit_of_readers_and_those_that_are_known_may_go_on() -> None:
    _, each = made(10)
    for reader in (ONE, *(number.to_bytes(16, "little") for number in range(1, MAX_READERS))):
        each.reserve(reader, int(reader == ONE), 0, WHOLE, 100.0)
    for ask in (lambda: each.reserve(OTHER, 1, 0, WHOLE, 100.0), lambda: each.take(OTHER, counts_of((0, 1)), 100.0)):
        with pytest.raises(ProtocolError, match="1024 readers draw from this server already"):
            ask()
    assert each.take(ONE, counts_of((0, 1)), 109.0)[0].size == 1
    each.expire(119.5)
    assert each.take(OTHER, counts_of((0, 1)), 120.0)[0].size == 1


def test_samples_that_have_become_too_old_are_neither_kept_nor_taken() -> None:
    queues, each = made(10, parameters=PLAIN.replace(max_age=50.0))
    assert reserved(each.reserve(ONE, 10, 0, WHOLE, 120.0)) == [10]
    assert each.take(ONE, counts_of((0, 10)), 1000.0)[0].size == 0
    assert reserved(each.reserve(ONE, 10, 0, WHOLE, 1000.0)) == [0] and queues.counts.passed_over == 10


def test_more_samples_at_once_than_a_message_may_ask_for_are_refused() -> None:
    readers.check_count(readers.MAX_DRAWN)
    with pytest.raises(ProtocolError, match=r"1048577 samples at once; 1048576 are allowed. Draw smaller batches"):
        readers.check_count(readers.MAX_DRAWN + 1)
