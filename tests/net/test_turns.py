"""Tests of a node's thread: lent turns, waits, and the difference between a stuck and a slow thread."""

import os
import threading
import time
from unittest.mock import Mock

import pytest

from memoire import Client, Inference, Prompts, Proxy, Reader, Server
from memoire.errors import Closed, ForkedError, Refused
from memoire.inference.io_asking import TURN_INTERVAL, LentWorker
from memoire.inference.policy import RemotePolicy
from memoire.net import process
from memoire.net.thread import (
    EXIT_TIMEOUT,
    RUNNABLE_TIMEOUT,
    SLOW_TIMEOUT,
    STUCK_TIMEOUT,
    TOTAL_EXIT_TIMEOUT,
    Forked,
    NodeLock,
    ProgressMonitor,
    close_nodes,
    waited_for_cores,
)
from netkit import in_thread, until
from poolkit import Clock

PATIENCE = 20.0


class Turned:
    """A worker that records its turns, and the most turns at the same time."""

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


@pytest.fixture
def turned():
    owner = Turned()
    owner.worker.start()
    yield owner
    assert owner.worker.stop(PATIENCE)


def test_a_caller_that_waits_takes_the_turns_itself(turned):
    done = []
    turned.worker.run(lambda: done.append(threading.current_thread()))
    until(lambda: done)
    turned.next_time = 0.0  # a turn of the loop is always due
    before = len(turned.turns)
    assert turned.worker.wait_for(lambda: len(turned.turns) >= before + 50, time.monotonic() + PATIENCE)
    assert threading.current_thread().name in turned.turns[before:]
    assert turned.most == 1


@pytest.mark.slow
def test_several_callers_get_what_each_waits_for(turned):
    flags, results = [threading.Event() for _ in range(6)], []

    def ask(flag):
        for _ in range(10):
            flag.clear()
            turned.worker.run(flag.set) if flag is flags[0] else turned.worker.post(flag.set)
            results.append(turned.worker.wait_for(flag.is_set, time.monotonic() + PATIENCE))

    threads = [in_thread(ask, flag) for flag in flags]
    for thread, _ in threads:
        thread.join(PATIENCE)
    assert len(results) == 60 and all(results)
    assert turned.most == 1


@pytest.mark.parametrize("callers", [1, 3])
def test_a_stop_ends_those_who_wait(callers):
    turned, results = Turned(), []
    turned.worker.start()
    wait = lambda: results.append(turned.worker.wait_for(lambda: turned.ended, time.monotonic() + PATIENCE))  # noqa: E731
    threads = [in_thread(wait) for _ in range(callers)]
    began = time.monotonic()
    assert turned.worker.stop(PATIENCE)
    for thread, _ in threads:
        thread.join(PATIENCE)
    assert results == [True] * callers
    assert time.monotonic() - began < PATIENCE / 2


@pytest.mark.slow
def test_a_fault_in_a_turn_of_a_caller_is_counted_and_the_caller_waits_on(turned):
    def fail():
        raise ValueError("on purpose")

    done = threading.Event()
    waiting, _ = in_thread(turned.worker.wait_for, done.is_set, time.monotonic() + PATIENCE)
    turned.worker.post(fail)
    until(lambda: turned.worker.errors == 1)
    turned.worker.post(done.set)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


@pytest.mark.slow
def test_what_comes_soon_needs_no_turn_and_turns_are_still_taken_now_and_then():
    looks, answers = [], []

    def soon(deadline):
        looks.append(deadline)
        answers.append(len(answers))
        return True

    turned = Turned(soon)
    turned.worker.start()
    began, waited, without = time.monotonic(), 0, 0
    while time.monotonic() < began + 4 * TURN_INTERVAL:  # the caller comes back at once each time
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
    turned.next_time = 0.0  # the newest turn of the loop is never long ago
    turned.worker.start()
    deadline, calls = time.monotonic() + PATIENCE, 0
    while not turned.worker.errors:
        assert time.monotonic() < deadline
        turned.worker.run_and_look(asked.append, calls, lambda: False, deadline)
        calls += 1
    assert set(looks) == {deadline} and len(looks) == 3
    until(lambda: len(asked) == calls)
    assert sorted(asked) == list(range(calls)) and turned.worker.errors == 1
    assert turned.worker.stop(PATIENCE)


# --- A stuck thread differs from a slow thread: by a clock and waits that tests set, and with real threads


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            [(STUCK_TIMEOUT + 1.0, 0.0, False), (RUNNABLE_TIMEOUT - 0.5, 0.0, False), (0.5, 0.0, True)],
            id="stuck at the second look if the process could run",
        ),
        pytest.param([(10.0, 9.0, False)] * 4, id="slow if the process waits for cores"),
        pytest.param([(10.0, 30.0, False)] * 4, id="slow if three threads wait"),
        pytest.param(
            [(SLOW_TIMEOUT, SLOW_TIMEOUT, False), (1.0, 1.0, True)],
            id="stuck beyond all patience, however busy the machine is",
        ),
        pytest.param(
            [(STUCK_TIMEOUT + 1.0, 0.0, False), (RUNNABLE_TIMEOUT - 1.0, -40.0, False), (1.0, 0.0, True)],
            id="threads that ended take what they waited with them",
        ),
    ],
)
def test_a_thread_that_takes_no_turn_is_stuck_or_slow(looks):
    """`looks` has the seconds before each look, the part of these spent waiting for cores, and the verdict."""
    turned, now, waited = 1000.0, 1000.0, 50.0
    monitor = ProgressMonitor(clock=lambda: now, waited=lambda: waited)
    for seconds, waiting, is_stuck in looks:
        now, waited = now + seconds, waited + waiting
        assert monitor.silence(turned) == (now - turned if is_stuck else 0.0)
        assert monitor.silence(now - STUCK_TIMEOUT) == 0.0, "one that takes turns"


def test_without_the_figures_of_the_system_the_clock_alone_counts(tmp_path):
    assert waited_for_cores(str(tmp_path / "nowhere")) == 0.0
    (tmp_path / "17").mkdir()
    assert waited_for_cores(str(tmp_path)) == 0.0  # the kernel does not count waiting times
    (tmp_path / "17" / "schedstat").write_text("5000000000 3000000000 12\n")
    assert waited_for_cores(str(tmp_path)) == 3.0
    assert waited_for_cores() > 0.0 or not os.path.exists("/proc/self/schedstat")


# --- A wait for a node's thread ends by the condition, the deadline, or the node's state

DEADLINE = 60.0


@pytest.fixture
def monitor():
    return NodeLock("this node")


def waits(monitor, change, **options):
    """Return the result of `until` while a thread applies a change, once the caller has released the lock."""
    seen = []

    def run():
        with monitor.condition:
            change()
            seen.append("changed")
            monitor.condition.notify_all()

    thread = threading.Thread(target=run)
    try:
        with monitor.condition:
            thread.start()
            return monitor.wait_until(lambda: bool(seen), monitor.now() + DEADLINE, **options)
    finally:
        thread.join(DEADLINE)


def test_a_wait_ends_with_the_node(monitor):
    with pytest.raises(Closed, match="this node"):
        waits(monitor, lambda: setattr(monitor, "is_closing", True))
    for call in (monitor.check_open, lambda: monitor.wait(lambda: True, 1.0), lambda: monitor.pause(DEADLINE)):
        with pytest.raises(Closed):
            call()


def test_a_wait_ends_with_what_the_node_failed_of(monitor):
    with pytest.raises(Refused, match="no"):
        waits(monitor, lambda: setattr(monitor, "failed", Refused("tcp://a", "client", "no")))
    monitor.is_closing = True
    with pytest.raises(Closed):  # closing comes first
        monitor.check_open()


def test_a_pause_ends_when_its_time_is_over(monitor):
    monitor.pause(0.01)


class Beside:
    """Class of a user that precedes memoire's class among the bases."""


class Both(Beside, Reader):
    """Class with the layout of a plain Python object, as `Prompts` has."""


@pytest.mark.parametrize("kind", [Client, Inference, Prompts, Proxy, Reader, RemotePolicy, Server, Both])
def test_a_node_of_any_class_is_left_to_the_parent(kind):
    node = type(kind.__name__, (kind,), {"__init__": lambda self: None})()
    node._pid = os.getpid() - 1
    process.disable_in_child([node], Forked)
    assert isinstance(node, kind) and node.closed and not node.close() and "forked from process" in repr(node)
    with pytest.raises(ForkedError, match=kind.CALLED):
        node.stats()


def test_any_number_of_nodes_that_hang_lets_a_program_end_within_two_seconds():
    clock, timeouts = Clock(), []

    def hang(timeout):
        clock.now += timeout
        timeouts.append(timeout)

    close_nodes([Mock(CLOSED_AT_EXIT=0, close=hang) for _ in range(100)], clock)
    assert len(timeouts) == 100 and sum(timeouts) == TOTAL_EXIT_TIMEOUT and max(timeouts) <= EXIT_TIMEOUT
