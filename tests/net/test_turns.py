"""A worker that lends its turns: one thread at a time takes one, and nobody waits for something that nobody does."""

import threading
import time

import pytest

from memoire.inference.io_asking import TURN_INTERVAL, LentWorker

PATIENCE = 20.0


class Turned:
    """A worker whose turns count, and see whether another one runs at the same time."""

    def __init__(self, *soon):
        self.turns, self.at_once, self.most, self.ended = [], 0, 0, False
        self.next_time = float("inf")
        self.worker = LentWorker("memoire-turns", self.turn, lambda: self.next_time, self.end, *soon)

    def turn(self, ready):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.turns.append(threading.current_thread().name)
        self.at_once -= 1

    def end(self):
        self.ended = True

    def until(self, condition):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def turned():
    made = Turned()
    made.worker.start()
    yield made
    assert made.worker.stop(PATIENCE)


def in_thread(function, *given):
    thread = threading.Thread(target=function, args=given, daemon=True)
    thread.start()
    return thread


def test_a_caller_that_waits_takes_the_turns_itself(turned):
    done = []
    turned.worker.run(lambda: done.append(threading.current_thread()))
    turned.until(lambda: done)
    turned.next_time = 0.0  # a turn is always due
    before = len(turned.turns)
    assert turned.worker.wait_for(lambda: len(turned.turns) >= before + 50, time.monotonic() + PATIENCE)
    assert threading.current_thread().name in turned.turns[before:]
    assert turned.most == 1


def test_what_is_done_needs_no_turn_and_what_is_not_ends_at_the_deadline(turned):
    assert turned.worker.wait_for(lambda: True, 0.0)
    began = time.monotonic()
    assert not turned.worker.wait_for(lambda: False, began + 0.05)
    assert time.monotonic() >= began + 0.05


def test_the_thread_takes_turns_again_once_no_caller_does(turned):
    turned.worker.wait_for(lambda: False, time.monotonic() + 0.01)
    turned.next_time, before = 0.0, len(turned.turns)
    turned.until(lambda: "memoire-turns" in turned.turns[before:])


def test_what_is_posted_runs_while_a_caller_waits_and_after_it(turned):
    done, seen = threading.Event(), []
    waiting = in_thread(lambda: seen.append(turned.worker.wait_for(done.is_set, time.monotonic() + PATIENCE)))
    turned.worker.post(done.set)
    waiting.join(PATIENCE)
    assert seen == [True]
    later = threading.Event()
    turned.worker.post(later.set)  # the thread stands aside at this moment, and nobody waits
    assert later.wait(PATIENCE)


def test_several_callers_get_what_each_waits_for(turned):
    flags, found = [threading.Event() for _ in range(6)], []

    def ask(flag):
        for _ in range(50):
            flag.clear()
            turned.worker.run(flag.set) if flag is flags[0] else turned.worker.post(flag.set)
            found.append(turned.worker.wait_for(flag.is_set, time.monotonic() + PATIENCE))

    threads = [in_thread(ask, flag) for flag in flags]
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == 300 and all(found)
    assert turned.most == 1


@pytest.mark.parametrize("callers", [1, 3])
def test_a_stop_ends_those_who_wait(callers):
    turned, found = Turned(), []
    turned.worker.start()
    wait = lambda: found.append(turned.worker.wait_for(lambda: turned.ended, time.monotonic() + PATIENCE))  # noqa: E731
    threads = [in_thread(wait) for _ in range(callers)]
    began = time.monotonic()
    assert turned.worker.stop(PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [True] * callers
    assert time.monotonic() - began < PATIENCE / 2


def test_a_fault_in_a_turn_of_a_caller_is_counted_and_the_caller_waits_on(turned):
    def fail():
        raise ValueError("on purpose")

    done = threading.Event()
    waiting = in_thread(turned.worker.wait_for, done.is_set, time.monotonic() + PATIENCE)
    turned.worker.post(fail)
    turned.until(lambda: turned.worker.errors == 1)
    turned.worker.post(done.set)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_what_comes_soon_needs_no_turn_and_turns_are_still_taken_now_and_then():
    looks, answers = [], []

    def soon(deadline):
        looks.append(deadline)
        answers.append(len(answers))
        return True

    turned = Turned(soon)
    turned.worker.start()
    began, waited, without = time.monotonic(), 0, 0
    while time.monotonic() < began + 4 * TURN_INTERVAL:  # a caller that is back at once each time
        wanted, turns = len(answers) + 3, len(turned.turns)
        assert turned.worker.wait_for(
            lambda wanted=wanted, turns=turns: len(answers) >= wanted or len(turned.turns) > turns, began + PATIENCE
        )
        waited += 1
        without += len(turned.turns) == turns
    assert set(looks) == {began + PATIENCE}
    assert without > waited / 2
    assert 2 <= len(turned.turns) < waited
    assert turned.worker.stop(PATIENCE)


def test_a_caller_goes_on_by_turns_if_nothing_comes_soon_or_looking_fails():
    asked = []

    def soon(deadline):
        asked.append(deadline)
        if len(asked) == 1:
            raise ValueError("on purpose")
        return False

    turned = Turned(soon)
    turned.next_time = 0.0
    turned.worker.start()
    for _ in range(2):
        before = len(turned.turns)
        assert turned.worker.wait_for(lambda before=before: len(turned.turns) > before + 2, time.monotonic() + PATIENCE)
    assert len(asked) == 2 and turned.worker.errors == 1
    assert turned.worker.stop(PATIENCE)


def test_who_asks_and_looks_takes_in_what_comes_soon_and_a_fault_there_is_counted():
    asked, looks = [], []

    def soon(deadline):
        looks.append(deadline)
        if len(looks) == 3:
            raise ValueError("on purpose")
        return len(looks) < 3

    turned = Turned(soon)
    turned.next_time = 0.0  # so that the newest turn is never long ago
    turned.worker.start()
    deadline, calls = time.monotonic() + PATIENCE, 0
    while not turned.worker.errors:
        assert time.monotonic() < deadline
        turned.worker.run_and_look(asked.append, calls, lambda: False, deadline)
        calls += 1
    assert set(looks) == {deadline} and len(looks) == 3
    turned.until(lambda: len(asked) == calls)
    assert sorted(asked) == list(range(calls)) and turned.worker.errors == 1
    assert turned.worker.stop(PATIENCE)
