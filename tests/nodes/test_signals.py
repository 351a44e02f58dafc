"""Signals that ask a process to end: taken over, heard by whoever waits, given back."""

import os
import select
import signal
import threading

import pytest

from memoire.nodes.supervision import SignalWatch


def test_the_first_signal_is_kept_and_wakes_whoever_waits():
    watch = SignalWatch((signal.SIGTERM, signal.SIGHUP))
    try:
        assert watch.first is None and not select.select([watch], [], [], 0.0)[0]
        os.kill(os.getpid(), signal.SIGHUP)
        assert select.select([watch], [], [], 60.0)[0]
        watch.drain()
        assert not select.select([watch], [], [], 0.0)[0]
        os.kill(os.getpid(), signal.SIGTERM)  # at once: somebody signals a group and its leader
        assert (watch.first, watch.is_urgent) == (signal.SIGHUP, False)
        watch.forget()
        assert watch.first is None
    finally:
        watch.close()


def test_another_signal_later_is_urgent():
    again = []
    watch = SignalWatch((signal.SIGTERM,), on_repeat=again.append, repeat_after=-1.0)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (watch.is_urgent, again) == (False, [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert (watch.is_urgent, again) == (True, [signal.SIGTERM])
    finally:
        watch.close()


def test_a_signal_that_only_wakes_asks_for_nothing():
    watch = SignalWatch((), wakes=(signal.SIGUSR1,))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert select.select([watch], [], [], 60.0)[0] and watch.first is None
    finally:
        watch.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_go_back_to_whoever_had_them(number):
    before, wakeup = signal.getsignal(number), signal.set_wakeup_fd(-1)
    watch = SignalWatch((signal.SIGTERM,), wakes=(signal.SIGUSR1,))
    assert signal.getsignal(number) is not before
    threading.Thread(target=watch.wake).start()
    assert select.select([watch], [], [], 60.0)[0]
    watch.close()
    watch.wake()  # nobody waits any more
    assert signal.getsignal(number) is before and signal.set_wakeup_fd(wakeup) == -1
