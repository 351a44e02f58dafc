"""Room of a queue: nobody is granted more than there is, and what a dead client was granted is found again."""

from memoire.replay.limiter import STARVING_TIMEOUT
from memoire.replay.parameters import Parameters
from memoire.tables.rollouts.queue import STALLED_TIMEOUT, RoomLimiter

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


def rounds_of(room, clients, sharers, now, steps):
    """Have each of these clients record all that it is granted, turn by turn, until a learner could take; the time."""
    inserted = dict.fromkeys(clients, 0) | steps
    while room.entries < CAPACITY:
        assert now < 100.0
        for client in clients:
            granted = room.grant(client, sharers, now)
            if granted > inserted[client]:
                room.report(client, granted, granted - inserted[client], now)
                inserted[client] = granted
        now += 0.01
    room.limiter.drew(CAPACITY)
    room.entries = 0
    return now, inserted


def test_a_client_that_dies_with_room_and_open_entries_stalls_a_learner_once():
    room, now = Room(), 10.0 * STARVING_TIMEOUT
    for client in (A, B):
        room.meet(client)
    assert room.grant(A, 2, now) == CAPACITY // 2
    room.report(A, 100, 0, now)  # of episodes that are open, and never come
    began, inserted = now, {}  # A is dead, and is counted as a sharer for a minute
    for _ in range(5):
        now, inserted = rounds_of(room, [B], 2, now, inserted)
    assert STALLED_TIMEOUT <= now - began < 3.0 * STALLED_TIMEOUT
    assert room.limiter.stats(0, 0.0).surplus == 0.0
