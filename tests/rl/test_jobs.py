"""Jobs, leases and late results, with clocks that are passed in, and against a model."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bytekit import FRAMES, KINDS
from memoire.errors import ObserverLost, ProtocolError
from memoire.replay.schema import Schema
from memoire.rl.observers.jobs import MAX_WORKERS, Jobs, JobService
from memoire.wire import messages
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.containers import unpacked_bytes
from memoire.wire.frames import encode, parse

LEASE = 10.0
A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


def test_whoever_was_slow_has_its_job_back_if_nobody_else_took_it():
    jobs = Jobs(LEASE, attempts=1)
    job = jobs.submit("x", attempts=2)
    jobs.take(A, 0.0)
    jobs.expire(10.0)
    assert jobs.renew(A, job.number, 11.0) and jobs.leased == 1 and jobs.take(B, 11.0) is None
    assert jobs.expire(21.0) == [] and jobs.take(B, 22.0) is job


def test_no_number_of_clients_makes_one_be_forgotten_that_may_still_ask():
    service = JobService(Jobs(LEASE), None, Schema({"obs": np.float32}))
    clients = [number.to_bytes(16, "little") for number in range(1, MAX_WORKERS + 2)]
    for client in clients[:-1]:
        service.hello(client, "")
    for _ in range(2):
        with pytest.raises(ProtocolError, match="4096 clients that ask for jobs are known here") as caught:
            service.hello(clients[-1], "")
        assert caught.value.code == "busy"
    service.hello(clients[0], "the first one")


def test_a_result_asks_for_its_unpacked_size_before_it_is_unpacked():
    part = next(KINDS["packed_episodes"](1, 1 << 20))[2]
    service = JobService(Jobs(LEASE), None, FRAMES)
    service.room = ByteBudget(0).holder("requests", own=2 * unpacked_bytes(part))
    rows = [messages.FragmentRow(A, number, part.nbytes, False, True, False, None) for number in range(3)]
    body = messages.Result(job=1, status="done", fragments=rows)
    frames = encode(body, client=A, sequence=1, fingerprint=FRAMES.fingerprint, payload=np.concatenate([part] * 3))
    with pytest.raises(ProtocolError, match="more bytes of requests have no room"):
        service.result([], parse(frames), body)
    assert 5 * part.nbytes < 2 * unpacked_bytes(part) and service.room.bytes == 0


def test_a_job_without_attempts_is_lost_and_its_future_says_so():
    jobs = Jobs(LEASE, attempts=1)
    job = jobs.submit("x")
    jobs.take(A, 0.0)
    assert jobs.expire(10.0) == [job]
    with pytest.raises(ObserverLost, match=r"job 1 is lost: 01010101 said nothing for 10\.0 s"):
        job.future.result(0)
    assert not jobs.finish(A, job.number, "late") and jobs.counts == {"expired": 1, "lost": 1, "late": 1}


def test_a_job_for_one_worker_waits_for_it():
    jobs = Jobs(LEASE)
    named, by_id, anybody = jobs.submit("x", only="left"), jobs.submit("y", only=B.hex()), jobs.submit("z")
    assert jobs.take(A, 0.0) is anybody
    assert jobs.take(B, 0.0) is by_id and jobs.take(C, 0.0, name="left") is named


def test_a_future_that_was_cancelled_meanwhile_takes_no_result():
    jobs = Jobs(LEASE)
    job = jobs.submit("x")
    jobs.take(A, 0.0)
    job.future.cancel()
    assert jobs.finish(A, job.number, "result") and job.future.cancelled()


class JobsMachine(RuleBasedStateMachine):
    """Every job ends once, by the first result; nobody has a job that another one has; time takes leases away."""

    workers = st.sampled_from([A, B, C])

    def __init__(self):
        super().__init__()
        self.jobs = Jobs(LEASE, attempts=2)
        self.now = 0.0
        self.made = []
        self.holders = {}  # number -> worker that the model lets have it, and until when
        self.had, self.leases = {}, {}
        self.over = {}

    @rule()
    def submit(self):
        self.made.append(self.jobs.submit(len(self.made)))
        self.had[self.made[-1].number] = set()

    @rule(worker=workers)
    def take(self, worker):
        mine = sorted(number for number, held in self.holders.items() if held[0] == worker)
        waiting = [n for n in self.had if n not in self.over and n not in self.holders]
        job = self.jobs.take(worker, self.now)
        assert (job is None) == (not mine and not waiting)
        if job is not None:
            assert job.number == mine[0] if mine else job.number in waiting
            self.holders[job.number] = worker, self.now + LEASE
            if not mine:
                self.had[job.number].add(worker)
                self.leases[job.number] = self.leases.get(job.number, 0) + 1
                assert self.leases[job.number] <= 2

    @precondition(lambda self: self.made)
    @rule(worker=workers, data=st.data())
    def renew(self, worker, data):
        number = data.draw(st.sampled_from(sorted(self.had)))
        holder = self.holders.get(number, (worker,))[0]
        expected = number not in self.over and worker in self.had[number] and holder == worker
        assert self.jobs.renew(worker, number, self.now) == expected
        if expected:
            self.holders[number] = worker, self.now + LEASE

    @precondition(lambda self: self.made)
    @rule(worker=workers, data=st.data())
    def finish(self, worker, data):
        number = data.draw(st.sampled_from(sorted(self.had)))
        if number in self.over or worker in self.had[number]:
            assert self.jobs.finish(worker, number, (worker, number)) == (number not in self.over)
            if self.over.setdefault(number, (worker, number)) == (worker, number):
                self.holders.pop(number, None)
        else:
            with pytest.raises(ProtocolError):
                self.jobs.finish(worker, number)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def cancel(self, data):
        job = data.draw(st.sampled_from(self.made))
        self.jobs.cancel(job)
        self.over.setdefault(job.number, "cancelled")
        self.holders.pop(job.number, None)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def pass_time(self, seconds):
        self.now += seconds
        lost = self.jobs.expire(self.now)
        ended = {number for number, (_, until) in self.holders.items() if until <= self.now}
        assert {job.number for job in lost} == {number for number in ended if self.leases[number] == 2}
        self.over |= {job.number: "lost" for job in lost}
        self.holders = {number: held for number, held in self.holders.items() if number not in ended}

    @invariant()
    def every_job_ends_once_and_as_the_model_says(self):
        self.jobs.check_invariants()
        for job in self.made:
            ended = self.over.get(job.number)
            assert job.future.done() == (ended is not None)
            if isinstance(ended, tuple):
                assert job.future.result(0) == ended
        assert self.jobs.leased == len(self.holders)
        counts = self.jobs.counts
        assert counts["done"] + counts["cancelled"] + counts["lost"] == len(self.over)


TestJobs = JobsMachine.TestCase
TestJobs.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
