"""Requests that are granted once, however often they come."""

import pytest

from memoire.errors import ProtocolError
from memoire.server.dispatch import IDLE_TIMEOUT, KEPT_ROWS, MAX_ROWS, GivenReplies
from memoire.tables.registry import Reply
from memoire.wire import messages
from serverkit import ME, YOU, message


def header(number, client=ME, body=None, **facts):
    return message(body or messages.Draw(), client, number=number, **facts).header


def reply(number):
    return Reply(messages.Taken(samples=number))


def find(given, number, now=0.0, **facts):
    return given.find(header(number, **facts), now)


def give(given, number, now=0.0, **facts):
    assert find(given, number, now, **facts) is None
    given.keep(header(number, **facts), reply(number))


def test_one_that_is_older_than_all_that_are_kept_is_refused():
    given = GivenReplies()
    for number in (5, 6, 7):
        give(given, number)
    with pytest.raises(ProtocolError, match="request 5 was overtaken by 6") as caught:
        find(given, 5)
    assert caught.value.code == "missing" and find(given, 6) == reply(6)


def test_requests_may_come_in_another_order_while_there_is_room():
    given = GivenReplies()
    for number in (9, 3):
        give(given, number)
    assert find(given, 3) == reply(3) and find(given, 9) == reply(9)


def test_clients_tables_and_types_have_numbers_of_their_own():
    given = GivenReplies()
    give(given, 1)
    give(given, 1, client=YOU)
    give(given, 1, table=5)
    give(given, 1, body=messages.Control())
    assert find(given, 1) == reply(1)


def client_of(number):
    return (number + 1).to_bytes(16, "little")


def test_no_number_of_readers_makes_a_reply_go_that_may_still_be_asked_for():
    given = GivenReplies()
    for number in range(MAX_ROWS):
        give(given, 1, client=client_of(number))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="1024 rows of requests are answered here already") as caught:
            find(given, 1, client=client_of(MAX_ROWS))
        assert caught.value.code == "busy"
    assert all(find(given, 1, client=client_of(number)) == reply(1) for number in range(MAX_ROWS))


def test_rows_that_are_idle_for_long_give_way_but_for_the_last_ones():
    given = GivenReplies()
    for number in range(KEPT_ROWS + 10):
        give(given, 1, client=client_of(number), now=0.5 * number)
    assert find(given, 1, client=client_of(0), now=50.0) == reply(1)
    give(given, 1, client=client_of(999), now=2.0 + IDLE_TIMEOUT)
    gone = [number for number in range(KEPT_ROWS + 10) if find(given, 1, client=client_of(number)) is None]
    assert gone == [1, 2, 3, 4]
