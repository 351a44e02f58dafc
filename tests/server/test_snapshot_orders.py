"""Snapshots that are ordered from far away, message by message: one at a time, and each is carried out once."""

import pytest

from memoire.errors import ProtocolError
from memoire.server.io_snapshots import MAX_ORDERS, MAX_TEXT, SnapshotOrders, failed
from memoire.wire import messages


def order(number, name="a"):
    return messages.TakeSnapshot(name=name, order=number.to_bytes(16, "big"))


def done(body):
    return messages.Snapshot(name=body.name, state="done", path="x")


def test_an_order_is_carried_out_once_however_often_it_is_asked_for():
    orders = SnapshotOrders()
    state, is_new = orders.receive(order(1))
    assert (state.name, state.state, is_new) == ("a", "writing", True)
    assert orders.receive(order(1)) == (state, False)
    orders.finish(order(1), done(order(1)))
    assert orders.receive(order(1)) == (done(order(1)), False)


def test_a_second_order_waits_until_the_first_is_done_or_failed():
    orders = SnapshotOrders()
    orders.receive(order(1))
    with pytest.raises(ProtocolError, match="snapshot 'a' is being written") as refused:
        orders.receive(order(2, "b"))
    assert refused.value.code == "busy"
    orders.finish(order(1), failed(order(1), "the disk is full"))
    assert orders.receive(order(2, "b"))[1]


@pytest.mark.parametrize("name", ["../a", "a/b", ".a", "-a", "a b", "a" * 101])
def test_a_name_is_a_file_in_the_folder_and_nowhere_else(name):
    with pytest.raises(ProtocolError, match="is no name") as refused:
        SnapshotOrders().receive(order(1, name))
    assert refused.value.code == "parameters"


@pytest.mark.parametrize("name", ["a", "_a", "A-1.b_c", "a" * 100])
def test_letters_digits_and_three_signs_are_a_name(name):
    assert SnapshotOrders().receive(order(1, name))[1]


def test_the_newest_orders_are_remembered():
    orders = SnapshotOrders()
    for number in range(MAX_ORDERS + 1):
        orders.receive(order(number))
        orders.finish(order(number), done(order(number)))
    assert not orders.receive(order(1))[1]
    assert orders.receive(order(0))[1]


def test_why_an_order_failed_is_told_in_a_bounded_text():
    told = failed(order(1), "x" * 2 * MAX_TEXT)
    assert (told.state, told.text) == ("failed", "x" * MAX_TEXT)
