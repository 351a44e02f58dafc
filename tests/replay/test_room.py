"""Room of a queue: nobody is granted more than there is, and what a dead client was granted is found again."""

from memoire.replay.limiter import STARVING_TIMEOUT
from memoire.replay.parameters import Parameters
from memoire.replay.room import STALLED_TIMEOUT, RoomLimiter

CAPACITY = 800
A, B = b"a", b"b"


class Room:
    """A limiter of a queue, whose learner waits for all of its capacity from second 0 on."""

    def __init__(self):
        self.limiter = RoomLimiter(Parameters(), CAPACITY)
        self.limiter.wants("learner", CAPACITY, 0.0)
        self.number, self.entries = 0, 0

    def meet(self, client):
        self.number += 1
        self.limiter.met(client, 0, self.number)

    def grant(self, client, sharers, now):
        self.limiter.wants("learner", CAPACITY, now)
        return self.limiter.grant(client, sharers, self.entries, now)[0]

    def report(self, client, inserted, entries, now):
        self.number += 1
        self.entries += entries
        self.limiter.reported(client, inserted, self.number, self.entries, now)


def test_clients_that_come_while_a_learner_waits_are_granted_no_more_than_there_is_room_for():
    room, now = Room(), 10.0 * STARVING_TIMEOUT
    room.meet(A)
    assert room.grant(A, 1, now) == CAPACITY
    room.meet(B)
    assert room.grant(B, 2, now + 0.5 * STALLED_TIMEOUT) == 0  # the first one has all of it, and may be about to begin
    room.report(A, CAPACITY // 2, CAPACITY // 2, now + 0.9 * STALLED_TIMEOUT)
    assert room.grant(B, 2, now + 1.5 * STALLED_TIMEOUT) == 0
    assert room.grant(A, 2, now + 1.5 * STALLED_TIMEOUT) == CAPACITY


def test_room_of_a_client_that_never_reports_is_granted_to_others_while_a_learner_waits():
    room, now = Room(), 10.0 * STARVING_TIMEOUT
    room.meet(A)
    assert room.grant(A, 1, now) == CAPACITY
    room.meet(B)
    granted, reported = 0, 0
    while room.entries < CAPACITY:
        assert now < 100.0
        granted = room.grant(B, 2, now)
        if granted > reported:
            room.report(B, granted, granted - reported, now)
            reported = granted
        now += 0.5 * STALLED_TIMEOUT
    assert room.entries == CAPACITY
