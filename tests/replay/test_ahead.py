"""Batches drawn ahead come in order, end with the run, and leave nobody behind who draws."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import memoire
from memoire.errors import EmptyMemory, ParameterError
from memoire.replay.mixing import MAX_PREFETCH, drawn_ahead
from memories import filled
from netkit import until

SCHEMA = memoire.Schema({"state": (np.float32, (2,)), "reward": np.float32})


class Numbers:
    """0, 1, 2, ...: as many as there are, and how many were taken."""

    def __init__(self, most: int = 1000) -> None:
        self.most, self.taken, self.is_over, self.is_ended = most, 0, False, False
        self.threads: set[int] = set()

    def make(self, is_over: Callable[[], bool]) -> Iterator[int]:
        try:
            while self.taken < self.most and not is_over():
                self.threads.add(threading.get_ident())
                self.taken += 1
                yield self.taken - 1
        finally:
            self.is_ended = True

    def ahead(self, count: int) -> Iterator[int]:
        return drawn_ahead(self.make, lambda: self.is_over, count)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_values_come_in_order_up_to_the_end(ahead: int) -> None:
    assert list(Numbers(10).ahead(ahead)) == list(range(10))


def test_as_many_as_were_asked_for_are_drawn_before_they_are_taken() -> None:
    numbers = Numbers()
    drawn = numbers.ahead(3)
    assert numbers.taken == 0  # nothing before the first is asked for
    assert next(drawn) == 0
    until(lambda: numbers.taken == 4)
    assert next(drawn) == 1
    until(lambda: numbers.taken == 5)
    assert threading.get_ident() not in numbers.threads


def test_none_ahead_is_drawn_in_the_callers_thread() -> None:
    numbers = Numbers()
    assert next(numbers.ahead(0)) == 0
    assert (numbers.taken, numbers.threads) == (1, {threading.get_ident()})


def test_whoever_stops_early_leaves_nobody_who_draws() -> None:
    numbers = Numbers()
    for value in numbers.ahead(2):
        if value == 5:
            break
    del value
    until(lambda: numbers.is_ended, 30)
    assert numbers.taken <= 9


def test_nothing_is_given_after_the_end() -> None:
    numbers = Numbers()
    drawn = numbers.ahead(2)
    assert next(drawn) == 0
    until(lambda: numbers.taken == 3)
    numbers.is_over = True
    assert list(drawn) == []
    until(lambda: numbers.is_ended, 30)


def test_an_error_comes_in_its_turn() -> None:
    def make(_: Callable[[], bool]) -> Iterator[int]:
        yield 1
        yield 2
        raise EmptyMemory

    drawn = drawn_ahead(make, lambda: False, 8)
    assert [next(drawn), next(drawn)] == [1, 2]
    with pytest.raises(EmptyMemory):
        next(drawn)
    assert list(drawn) == []


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_whatever_is_made_of_values_is_made_ahead_of_the_calls(ahead: int) -> None:
    numbers, threads = Numbers(10), set[int]()

    def squared(number: int) -> int:
        threads.add(threading.get_ident())
        return number * number

    made = memoire.prefetch(map(squared, numbers.make(lambda: False)), ahead)
    assert numbers.taken == 0
    assert next(made) == 0
    until(lambda: numbers.taken == 1 + ahead)
    assert (threading.get_ident() in threads) == (ahead == 0)
    assert list(made) == [number * number for number in range(1, 10)]


def test_what_cannot_be_made_fails_in_its_turn() -> None:
    made = memoire.prefetch((1 / (3 - number) for number in range(5)), ahead=4)
    assert [next(made) for _ in range(3)] == [1 / 3, 1 / 2, 1]
    with pytest.raises(ZeroDivisionError):
        next(made)


@pytest.mark.parametrize("ahead", [-1, MAX_PREFETCH + 1, 1.0, True, None])
def test_a_number_that_is_none_is_refused_at_once(ahead: object) -> None:
    with memoire.Server(None, SCHEMA) as server, pytest.raises(ParameterError, match="ahead"):
        server.batches(4, ahead=ahead)  # type: ignore[call-overload]
    with pytest.raises(ParameterError, match="ahead"):
        memoire.prefetch([1], ahead)  # type: ignore[arg-type]


def entry(number: int) -> tuple[Any, ...]:
    return np.full(2, number, np.float32), np.float32(1)


def play(client: memoire.Client) -> None:
    filled(client.memory, entry, length=64, final=lambda: (np.zeros(2, np.float32),), terminated=True)


def test_a_server_draws_ahead_until_the_run_is_over() -> None:
    with (
        memoire.Server("tcp://127.0.0.1:0", SCHEMA, seed=1) as server,
        memoire.connect(server.endpoint, seed=2) as client,
    ):
        play(client)
        for _ in range(4):
            assert client.push_cache(timeout=100)
        until(lambda: server.total_caches == 4)
        batches = server.batches(32, timeout=100, ahead=2)
        first = next(batches)
        assert first.state.shape == (32, 2)
        until(lambda: server.stats().batches == 3)  # the one that was taken, and two that wait
        first.update_priorities(np.ones(32))
        server.finish()
        assert list(batches) == []


def test_mixed_batches_are_drawn_ahead_too() -> None:
    tables = {"one": memoire.Table(SCHEMA), "two": memoire.Table(SCHEMA)}
    with memoire.Server("tcp://127.0.0.1:0", tables=tables, seed=1) as server:
        for name in tables:
            with memoire.connect(server.endpoint, table=name, seed=2) as client:
                play(client)
                assert client.push_cache(timeout=100)
        until(lambda: server.total_caches == 2)
        batch = next(server.batches({"one": 8, "two": 4}, timeout=100, ahead=1))
        assert {name: len(part.ids) for name, part in batch.items()} == {"one": 8, "two": 4}


def test_a_server_that_closes_ends_what_is_drawn_ahead() -> None:
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA) as server:
        batches = server.batches(8, timeout=100, ahead=1)
        ended = threading.Event()
        thread = threading.Thread(target=lambda: (list(batches), ended.set()))
        thread.start()
        until(lambda: any(each.name == "memoire-ahead" for each in threading.enumerate()))
    assert ended.wait(100)
    thread.join(100)
    assert not thread.is_alive()
