"""HELLO is said one at a time, and only a WELCOME answers it."""

import pytest

from memoire.errors import Closed, MemoireTimeout, Refused
from memoire.wire import messages
from memoire.wire.frames import HelloSchedule, encode, parse, welcome_of

pytestmark = pytest.mark.usefixtures("without_io")


def test_one_hello_is_open_at_a_time_and_the_next_one_is_due_after_a_while():
    hello = HelloSchedule()
    assert hello.is_due(0.0) and hello.next_time() == 0.0
    hello.begin(12.0)
    assert not hello.is_due(99.0) and hello.next_time() == float("inf") and hello.due == 12.0
    hello.answered()
    assert not hello.is_due(11.9) and hello.is_due(12.0) and hello.next_time() == 12.0


def test_a_hello_in_a_hurry_waits_for_the_answer_to_the_one_before():
    hello = HelloSchedule()
    hello.begin(12.0)
    hello.hurry()
    assert not hello.is_due(1.0)
    hello.answered()
    assert hello.is_due(1.0)


def test_a_hello_that_nothing_makes_due_is_said_by_nobody():
    hello = HelloSchedule(due=float("inf"))
    assert not hello.is_due(1e9)
    hello.begin()
    hello.answered()
    assert not hello.is_due(1e9)
    hello.due = 5.0
    assert hello.is_due(5.0) and not hello.is_due(4.9)


def answered(body):
    return parse(encode(body, client=b"c" * 16, home=7, run=8))


def test_a_welcome_is_handed_on_with_its_header():
    told = messages.Welcome(schema="{}", home_name="a", epoch=3)
    header, found = welcome_of(answered(told), "tcp://a")
    assert (header.home, header.run, found) == (7, 8, told)


def test_whatever_else_answers_a_hello_is_an_error():
    for error in (Refused("tcp://a", "busy", "not now"), Closed("this reader"), MemoireTimeout("reply", "a", 1.0, "")):
        with pytest.raises(type(error)) as raised:
            welcome_of(error, "tcp://a")
        assert raised.value is error
    with pytest.raises(Refused, match=r"HELLO was answered by UPDATED") as raised:
        welcome_of(answered(messages.Updated()), "tcp://a")
    assert raised.value.code == "unexpected" and "tcp://a" in str(raised.value)
