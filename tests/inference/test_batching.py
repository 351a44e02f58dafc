"""Tests of batching with clocks passed in: dead clients, resends, patience, versions and bounds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memoire.errors import ProtocolError
from memoire.inference import batching
from memoire.inference.batching import Batching, InferenceRequest, KeptReply
from memoire.wire.byte_budget import ByteBudget

ALIVE, WAIT = 1.0, 0.005


def client(number):
    return number.to_bytes(16, "little")


def query(who, number, now, rows=1, patience=2.0, min_version=0):
    return InferenceRequest(client(who), number, rows, (who, number), now, now + patience, min_version)


def new_batching(max_batch=64, queue_rows=256):
    return Batching(max_batch, WAIT, ALIVE, queue_rows)


def taken(batch):
    return None if batch is None else (batch.reason, [request.content for request in batch.requests])


def test_a_batch_fires_when_it_is_full():
    batches = new_batching(max_batch=4)
    batches.ask(query(1, 1, 0.0, rows=2))
    batches.ask(query(2, 1, 0.0))
    assert taken(batches.take(0.0, 0)) == ("everyone", [(1, 1), (2, 1)])
    batches.ask(query(1, 2, 0.001, rows=3))
    assert batches.take(0.001, 0) is None
    batches.ask(query(1, 3, 0.001, rows=1))
    assert taken(batches.take(0.001, 0)) == ("full", [(1, 2), (1, 3)])


def test_a_batch_fires_when_everyone_alive_waits_and_not_before():
    batches = new_batching()
    for who in (1, 2):
        batches.ask(query(who, 1, 0.0))
    batches.take(0.0, 0)
    batches.ask(query(1, 2, 0.001))
    assert batches.take(0.001, 0) is None and batches.next_time(0.001, 0) == pytest.approx(0.001 + WAIT)
    batches.ask(query(2, 2, 0.002))
    assert taken(batches.take(0.002, 0)) == ("everyone", [(1, 2), (2, 2)])


def test_a_resend_is_recognised_while_it_waits_while_it_runs_and_after_its_answer():
    batches = new_batching()
    batches.ask(query(1, 1, 0.0))
    assert batches.ask(query(1, 1, 0.001)) is None and batches.rows == 1
    batch = batches.take(0.01, 0)
    assert batches.ask(query(1, 1, 0.02)) is None and batches.rows == 0
    batches.receive_answer(batch.requests[0], KeptReply("reply", 5))
    assert batches.ask(query(1, 1, 0.03)).content == "reply"
    assert batches.resends == 3 and batches.take(1.0, 0) is None


def test_replies_are_kept_for_the_newest_requests_and_for_a_while():
    batches = new_batching()
    for number in range(1, 7):
        batches.ask(query(1, number, 0.0))
        batches.receive_answer(batches.take(0.0, 0).requests[0], KeptReply(number, 10))
    assert batches.ask(query(1, 6, 0.0)).content == 6
    assert batches.ask(query(1, 1, 0.0)) is None and batches.rows == 1
    batches.receive_answer(batches.take(0.0, 0).requests[0], None)
    batches.take(batching.KEPT_TIMEOUT + 1.0, 0)
    assert batches.ask(query(1, 6, 20.0)) is None and batches.rows == 1
    batches = Batching(64, WAIT, ALIVE, 256, kept_bytes=15)
    for who in (2, 3):
        batches.ask(query(who, 1, 20.0))
    for request in batches.take(21.0, 0).requests:
        batches.receive_answer(request, KeptReply(request.content, 10))
    batches.check_invariants()


def test_the_queue_is_bounded_in_all_and_for_each_client():
    batches = new_batching(max_batch=8, queue_rows=32)
    for number in (1, 2):
        batches.ask(query(1, number, 0.0, rows=8))
    with pytest.raises(ProtocolError, match="16 rows of this client wait already; the limit is 16") as caught:
        batches.ask(query(1, 3, 0.0))
    assert caught.value.code == "busy"
    for number in (1, 2):
        batches.ask(query(2, number, 0.0, rows=8))
    with pytest.raises(ProtocolError, match="32 rows of all clients wait already") as caught:
        batches.ask(query(3, 1, 0.0))
    assert caught.value.code == "busy"
    with pytest.raises(ProtocolError, match="the request has 9 rows; at most 8") as caught:
        batches.ask(query(4, 1, 0.0, rows=9))
    assert caught.value.code == "too_large"


def test_requests_for_a_later_version_leave_the_room_of_those_that_can_be_answered_now():
    batches = new_batching(max_batch=8, queue_rows=32)
    for who in (1, 2, 3, 4):
        batches.ask(query(who, 1, 0.0, rows=8, patience=2.0**40, min_version=2**53 - 1), 5)
    with pytest.raises(
        ProtocolError, match="32 rows of all clients wait already for weights after version 5; the limit is 32"
    ):
        batches.ask(query(5, 1, 0.0, min_version=6), 5)
    for who in (1, 2, 3, 4):
        batches.ask(query(who, 2, 0.0, rows=8, min_version=5), 5)
    with pytest.raises(ProtocolError, match="32 rows of all clients wait already; the limit is 32"):
        batches.ask(query(5, 1, 0.0), 5)
    assert taken(batches.take(0.0, 5)) == ("full", [(1, 2)])
    batches.ask(query(5, 1, 0.0), 5)
    for version in (6, 7):  # requests that become answerable make no room for others
        batches.take(0.0, version)
        batches.ask(query(5, version, 0.0, min_version=version), version)
        batches.check_invariants()


class BatchingMachine(RuleBasedStateMachine):
    """Requests compared with a list of waiting ones: each ends once, in a batch or overdue, and none waits too long."""

    def __init__(self):
        super().__init__()
        self.batches, self.now, self.version = new_batching(max_batch=6, queue_rows=16), 0.0, 0
        self.waiting, self.running, self.number = {}, [], 0

    def rows_like(self, request, *, whose=None):
        """Count the rows of waiting requests that are as answerable now as `request`, of one client or of all."""
        is_early = request.min_version > self.version
        own = [each for each in self.waiting.values() if whose in (None, each.client)]
        return sum(each.rows for each in own if (each.min_version > self.version) == is_early)

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.004, 0.3, 1.0, 20.0]))
    def passes(self, seconds):
        self.now += seconds

    @rule(
        who=st.integers(1, 4),
        rows=st.integers(1, 6),
        min_version=st.integers(0, 2),
        patience=st.sampled_from([0.0, 0.01, 2.0]),
    )
    def asks(self, who, rows, min_version, patience):
        self.number += 1
        request = query(who, self.number, self.now, rows, patience, min_version)
        try:
            assert self.batches.ask(request, self.version) is None
        except ProtocolError as error:
            assert error.code == "busy"
            own, in_all = self.rows_like(request, whose=client(who)), self.rows_like(request)
            is_full = len(self.waiting) and sum(each.rows for each in self.waiting.values()) + rows > 16
            assert own + rows > 8 or in_all + rows > 16 or (min_version > self.version and is_full)
        else:
            self.waiting[self.number] = request

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def sends_again(self, data):
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.batches.ask(self.waiting[number], self.version) is None

    @rule(who=st.integers(1, 4))
    def leaves(self, who):
        self.batches.remove_client(client(who))

    @rule()
    def learns(self):
        self.version += 1

    @rule(is_good=st.booleans())
    def takes(self, is_good):
        due = self.batches.next_time(self.now, self.version)
        expired, batch = self.batches.expired, self.batches.take(self.now, self.version)
        gone = [number for number, each in self.waiting.items() if each.expires <= self.now]
        assert self.batches.expired - expired == len(gone)
        for number in gone:
            del self.waiting[number]
        ready = [each for each in self.waiting.values() if each.min_version <= self.version]
        if batch is None:
            assert due > self.now or gone or not ready
            assert all(self.now < each.arrived + WAIT for each in ready)
            return
        assert due <= self.now and 1 <= batch.rows <= 6
        assert [each.number for each in batch.requests] == [each.number for each in ready][: len(batch.requests)]
        for each in batch.requests:
            del self.waiting[each.number]
            self.batches.receive_answer(each, KeptReply(each.number, 1) if is_good else None)

    @invariant()
    def holds(self):
        self.batches.check_invariants()
        assert self.batches.rows == sum(each.rows for each in self.waiting.values())


BatchingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_requests_end_once = BatchingMachine.TestCase


def test_what_waits_takes_bytes_until_it_is_answered_or_given_up():
    room = ByteBudget(1000).add_holder("requests that wait")
    batches = Batching(64, WAIT, ALIVE, 256, room=room)
    batches.ask(query(1, 1, 0.0)._replace(size=600))
    with pytest.raises(ProtocolError, match="401 more bytes of requests that wait have no room") as why:
        batches.ask(query(2, 1, 0.0)._replace(size=401))
    assert why.value.code == "busy" and (room.bytes, batches.rows) == (600, 1)
    batches.ask(query(1, 1, 0.0)._replace(size=600))  # a resend
    batches.ask(query(2, 2, 0.0, patience=0.5)._replace(size=400, min_version=9))
    for request in batches.take(0.001 + WAIT, 0).requests:
        batches.receive_answer(request, None)
    assert room.bytes == 400
    batches.take(1.0, 0)
    assert room.bytes == 0
    batches.check_invariants()


def test_a_long_row_does_not_pad_those_of_others():
    batches = new_batching()
    for who, width in ((1, 10), (2, 12), (3, 1_000_000), (4, 8)):
        batches.ask(query(who, 1, 0.0)._replace(widths=(width,)))
    assert taken(batches.take(WAIT, 0)) == ("wait", [(1, 1), (2, 1), (4, 1)])
    assert taken(batches.take(WAIT, 0)) == ("wait", [(3, 1)])
