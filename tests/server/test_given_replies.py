"""Requests that are granted once, however often they come."""

import pytest

from memoire.errors import ProtocolError
from memoire.server.once import MAX_READERS, GivenReplies
from memoire.server.reply import Reply
from memoire.wire import messages
from serverkit import ME, YOU, message


def header(number, client=ME, body=None, **facts):
    return message(body or messages.Draw(), client, number=number, **facts).header


def reply(number):
    return Reply(messages.Taken(samples=number))


def give(given, number, most=2, **facts):
    assert given.find(header(number, **facts), most) is None
    given.keep(header(number, **facts), reply(number), most)


def test_a_request_that_comes_again_gets_the_reply_of_the_first_time():
    given = GivenReplies()
    give(given, 1)
    give(given, 2)
    assert given.find(header(1), 2) == reply(1) and given.find(header(2), 2) == reply(2)


def test_one_that_is_older_than_all_that_are_kept_is_refused():
    given = GivenReplies()
    for number in (5, 6, 7):
        give(given, number)
    with pytest.raises(ProtocolError, match="request 5 was overtaken by 6") as caught:
        given.find(header(5), 2)
    assert caught.value.code == "missing" and given.find(header(6), 2) == reply(6)


def test_requests_may_come_in_another_order_while_there_is_room():
    given = GivenReplies()
    for number in (9, 3):
        give(given, number)
    assert given.find(header(3), 2) == reply(3) and given.find(header(9), 2) == reply(9)


def test_one_that_was_refused_by_its_handler_may_be_granted_later():
    given = GivenReplies()
    assert given.find(header(1), 2) is None
    give(given, 1)


def test_clients_tables_and_types_have_numbers_of_their_own():
    given = GivenReplies()
    give(given, 1)
    give(given, 1, client=YOU)
    give(given, 1, table=5)
    give(given, 1, body=messages.Control())
    assert given.find(header(1), 2) == reply(1)


def test_the_row_that_is_idle_for_longest_gives_way():
    given = GivenReplies()
    clients = [bytes([number + 1]) * 16 for number in range(MAX_READERS)]
    for client in clients:
        give(given, 1, client=client)
    assert given.find(header(1, client=clients[0]), 2) == reply(1)  # it is not idle
    give(given, 1, client=bytes(15) + b"x")
    assert given.find(header(1, client=clients[0]), 2) == reply(1)
    assert given.find(header(1, client=clients[2]), 2) == reply(1)
    assert given.find(header(1, client=clients[1]), 2) is None
