"""A thread that is stuck is told from one that is slow: by a clock and waits that the tests hold, and by real threads."""

import os
import subprocess
import sys

import pytest

from memoire.net.thread import RUNNABLE_TIMEOUT, SLOW_TIMEOUT, STUCK_TIMEOUT, ProgressMonitor, waited_for_cores


class Machine:
    """A clock, and what the process has waited for cores."""

    def __init__(self):
        self.now, self.waited = 1000.0, 50.0
        self.monitor = ProgressMonitor(clock=lambda: self.now, waited=lambda: self.waited)

    def passes(self, seconds, waiting=0.0):
        self.now += seconds
        self.waited += waiting


@pytest.fixture
def machine():
    return Machine()


def test_a_thread_that_takes_turns_is_never_stuck(machine):
    for _ in range(100):
        machine.passes(STUCK_TIMEOUT)
        assert machine.monitor.silence(machine.now - STUCK_TIMEOUT) == 0.0


def test_a_late_thread_is_stuck_at_the_second_look_if_the_process_could_run(machine):
    turned = machine.now
    machine.passes(STUCK_TIMEOUT + 1.0)
    assert machine.monitor.silence(turned) == 0.0
    machine.passes(RUNNABLE_TIMEOUT - 0.5)
    assert machine.monitor.silence(turned) == 0.0
    machine.passes(0.5)
    assert machine.monitor.silence(turned) == STUCK_TIMEOUT + 1.0 + RUNNABLE_TIMEOUT


@pytest.mark.parametrize("share", [0.9, 1.0, 3.0])
def test_a_late_thread_of_a_process_that_waits_for_cores_is_slow(machine, share):
    """Three threads that all wait have waited three seconds of each."""
    turned = machine.now
    for _ in range(4):
        machine.passes(10.0, waiting=10.0 * share)
        assert machine.monitor.silence(turned) == 0.0


def test_what_the_process_waited_for_before_the_first_look_does_not_count(machine):
    turned = machine.now
    machine.passes(60.0, waiting=60.0)
    assert machine.monitor.silence(turned) == 0.0
    machine.passes(10.0)
    assert machine.monitor.silence(turned) == 70.0


def test_another_turn_begins_another_judgement(machine):
    turned = machine.now
    machine.passes(STUCK_TIMEOUT + 1.0)
    assert machine.monitor.silence(turned) == 0.0
    turned = machine.now
    machine.passes(STUCK_TIMEOUT + 1.0)
    assert machine.monitor.silence(turned) == 0.0


def test_beyond_all_patience_it_is_stuck_however_busy_the_machine_is(machine):
    turned = machine.now
    machine.passes(SLOW_TIMEOUT, waiting=SLOW_TIMEOUT)
    assert machine.monitor.silence(turned) == 0.0
    machine.passes(1.0, waiting=1.0)
    assert machine.monitor.silence(turned) == SLOW_TIMEOUT + 1.0


def test_threads_that_ended_take_what_they_waited_with_them(machine):
    turned = machine.now
    machine.passes(STUCK_TIMEOUT + 1.0)
    machine.monitor.silence(turned)
    machine.passes(RUNNABLE_TIMEOUT - 1.0, waiting=-40.0)
    assert machine.monitor.silence(turned) == 0.0
    machine.passes(1.0)
    assert machine.monitor.silence(turned) > 0.0


def test_without_the_figures_of_the_system_the_clock_alone_counts(tmp_path):
    assert waited_for_cores(str(tmp_path / "nowhere")) == 0.0
    (tmp_path / "17").mkdir()
    assert waited_for_cores(str(tmp_path)) == 0.0  # a kernel that does not count this
    (tmp_path / "17" / "schedstat").write_text("5000000000 3000000000 12\n")
    assert waited_for_cores(str(tmp_path)) == 3.0


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not count waits for cores")
def test_a_process_that_shares_its_core_waits_for_it():
    """Two threads of C on one core: each is ready to run while the other one has the core."""
    code = """
import hashlib, os, threading, time
from memoire.net.thread import waited_for_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before, until = waited_for_cores(), time.monotonic() + 1.0
def work():
    data = bytes(1 << 20)
    while time.monotonic() < until:
        hashlib.sha256(data)
threads = [threading.Thread(target=work) for _ in range(3)]
for each in threads: each.start()
while time.monotonic() < until - 0.2: time.sleep(0.01)
print(waited_for_cores() - before)
for each in threads: each.join()
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=True)
    assert 0.5 < float(said.stdout) < 30.0
