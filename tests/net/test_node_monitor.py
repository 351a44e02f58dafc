"""A call that waits for a node's thread ends by the condition, the deadline, or what the node has come to."""

import threading

import pytest

from memoire.errors import Closed, Refused
from memoire.net.thread import NodeLock

DEADLINE = 60.0


@pytest.fixture
def monitor():
    return NodeLock("this node")


def waits(monitor, change, **options):
    """What `until` gives while a thread changes something, once the caller has given up the lock."""
    seen = []

    def run():
        with monitor.changed:
            change()
            seen.append("changed")
            monitor.changed.notify_all()

    thread = threading.Thread(target=run)
    try:
        with monitor.changed:
            thread.start()
            return monitor.until(lambda: bool(seen), monitor.now() + DEADLINE, **options)
    finally:
        thread.join(DEADLINE)


def test_a_wait_ends_when_the_condition_has_come_true(monitor):
    assert waits(monitor, lambda: None)


def test_what_is_true_already_is_not_waited_for(monitor):
    monitor.wake = lambda: pytest.fail("nobody has to wake anybody")
    with monitor.changed:
        assert monitor.until(lambda: True, 0.0)


def test_a_wait_ends_at_its_deadline(monitor):
    with monitor.changed:
        assert not monitor.until(lambda: False, monitor.now() - 1.0)
        assert not monitor.until(lambda: False, monitor.now() + 0.01)
    assert not monitor.wait(lambda: False, 0.01)
    assert monitor.left(monitor.now() - 1.0) == 0.0 and 0.0 < monitor.left(monitor.now() + 9.0) <= 9.0


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
    with pytest.raises(Closed):  # that is said first
        monitor.check_open()


def test_the_caller_may_say_what_ends_a_wait_and_what_is_done_before(monitor):
    done = []
    monitor.wake = lambda: done.append("wake")
    assert waits(monitor, lambda: setattr(monitor, "is_closing", True), check=lambda: done.append("check"))
    assert done == ["wake", "check"]
    assert waits(monitor, lambda: None, check=lambda: None, before=lambda: done.append("before"))
    assert done == ["wake", "check", "before"]


def test_a_condition_that_is_a_time_is_asked_again_without_a_word(monitor):
    asked = []
    assert monitor.wait(lambda: asked.append(0) or len(asked) > 2, DEADLINE, interval=0.001)


def test_a_pause_ends_when_its_time_is_over(monitor):
    monitor.pause(0.01)
