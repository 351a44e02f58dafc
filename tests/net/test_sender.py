"""A socket that is sent by is watched for room while something waits, and only then."""

from collections import deque

import pytest

from memoire.net.poller import Sender

pytestmark = pytest.mark.usefixtures("without_io")


class Poller:
    """What a sender asks of the thread's sockets, in order."""

    def __init__(self):
        self.asked = []

    def add(self, made, *, reading):
        self.asked.append(("add", made, reading))
        return made

    def watch(self, made, *, reading, writing):
        self.asked.append(("watch", made, reading, writing))

    def drop(self, made, linger):
        self.asked.append(("drop", made, linger))

    def taken(self):
        """What was asked since the last call."""
        found, self.asked = self.asked, []
        return found


class Socket:
    """Takes as many messages as it has room for."""

    def __init__(self, room):
        self.room, self.took = room, []

    def send_all(self, queue):
        while queue and self.room:
            self.room -= 1
            self.took.append(queue.popleft())
        return not queue


@pytest.mark.parametrize("is_reading", [True, False])
def test_room_is_awaited_while_something_waits(is_reading):
    doors, made, queue = Poller(), Socket(room=2), deque([1, 2, 3])
    sender = Sender(doors, is_reading=is_reading)
    sender.use(made)
    assert doors.taken() == [("add", made, is_reading)]
    assert not sender.turn(lambda made: made.send_all(queue))
    assert doors.taken() == [("watch", made, is_reading, True)]
    assert not sender.turn(lambda made: made.send_all(queue)) and doors.taken() == []
    made.room = 1
    assert sender.turn(lambda made: made.send_all(queue)) and made.took == [1, 2, 3]
    assert doors.taken() == [("watch", made, is_reading, False)]
    assert sender.turn(lambda made: made.send_all(queue)) and doors.taken() == []


def test_nothing_goes_before_there_is_a_socket_and_after_it_was_dropped():
    doors, sent = Poller(), []
    sender = Sender(doors, is_reading=False)
    assert not sender.turn(sent.append)
    sender.drop(1.0)
    assert doors.taken() == [] and not sent
    made = Socket(room=0)
    sender.use(made)
    sender.drop(1.0)
    assert doors.taken()[-1] == ("drop", made, 1.0) and sender.socket is None
    assert not sender.turn(sent.append) and not sent


def test_a_socket_that_is_made_again_is_not_believed_to_have_no_room():
    doors, queue = Poller(), deque([1])
    sender = Sender(doors, is_reading=False)
    sender.use(Socket(room=0))
    assert not sender.turn(lambda made: made.send_all(queue))
    sender.drop(0.0)
    again = Socket(room=0)
    sender.use(again)
    doors.taken()
    assert not sender.turn(lambda made: made.send_all(queue))
    assert doors.taken() == [("watch", again, False, True)]
