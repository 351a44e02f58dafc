"""Start states and jobs of observers: kept, drawn and leased ones, and late results."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import memoire
from bytekit import FRAMES, KINDS
from memoire.errors import DataError, NoActionAllowed, NoSuchField, ObserverLost, ParameterError, ProtocolError
from memoire.inference.batching import StartsStats
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from memoire.rl import StartStates, sample_masked
from memoire.rl.jobs import MAX_WORKERS, Jobs, JobService
from memoire.wire import messages
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.containers import unpacked_bytes
from memoire.wire.frames import encode, parse
from memoire.wire.values import pack

# --- Start states: kept and drawn ones, lineages, exchange between ranks, and draws behind a mask

SCHEMA = {"path": Column(np.int32, (None,)), "sum": np.int32}


def state(*path):
    return {"path": np.array(path, np.int32), "sum": np.int32(sum(path))}


def cost(columns):
    return float(columns["sum"])


def starts_of(keep=100, first=(9,), **options):
    return StartStates("numbers", SCHEMA, state(*first), cost, keep, **options)


def test_equal_states_are_kept_once_and_have_the_same_id_everywhere():
    starts, others = starts_of(), starts_of()
    one = starts.add(state(3, 1), starts.first)
    assert starts.add(state(3, 1)) == one == others.id_of(state(3, 1)) and len(starts) == 2
    assert starts.add(state(1, 3)) != one and starts[one].columns["path"].tolist() == [3, 1]
    assert one in starts and 5 not in starts
    with pytest.raises(NoSuchField, match="'?5'?"):
        starts[5]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=40), st.integers(1, 6))
def test_stats_walk_from_the_first_state_to_the_best_by_ancestors_that_are_still_kept(steps, keep):
    starts = starts_of(keep=keep, first=(99,))
    ids, costs, parents = [starts.first], {starts.first: 99.0}, {}
    for number, back in steps:
        parent = ids[-min(back, len(ids))]
        if starts.id_of(state(number)) in costs or parent not in starts:
            continue
        ids.append(starts.add(state(number), parent))
        costs[ids[-1]], parents[ids[-1]] = float(number), parent
    best = min(ids, key=costs.get)
    path = [best]
    while path[-1] in parents:
        path.append(parents[path[-1]])
    lineage = [(costs[each], step) for step, each in enumerate(path[::-1]) if each in starts or each == best]
    assert starts.stats() == StartsStats("numbers", len(starts), 0, costs[best], 99.0, tuple(lineage))


def test_draws_follow_the_cost():
    starts = starts_of(first=(0,), temperature=1.0, seed=1)
    starts.add(state(1)), starts.add(state(3))
    drawn = np.bincount([int(starts.sample().cost) for _ in range(4000)], minlength=4) / 4000
    expected = np.exp(-np.array([0.0, 1, 3]))
    np.testing.assert_allclose(drawn[[0, 1, 3]], expected / expected.sum(), atol=0.03)
    only_best = starts_of(first=(5,), temperature=0.0)
    only_best.add(state(2))
    assert {only_best.sample().cost for _ in range(50)} == {2}
    any_of = starts_of(first=(500,), temperature=float("inf"))
    any_of.add(state(2))
    assert {any_of.sample().cost for _ in range(200)} == {2, 500}


def test_ranks_tell_each_other_of_the_best_states_and_their_lineages():
    mine, yours = starts_of(), starts_of()
    one = mine.add(state(4), mine.first, {"step": 1})
    two = mine.add(state(2), one, {"step": 2})
    yours.add(state(3), yours.first)
    assert mine.topic == "starts/numbers" and yours.merge(mine.body(most=1)) == 1
    assert yours.best.id == two and one not in yours
    assert yours.lineage() == mine.lineage() == [(mine.first, {}), (one, {"step": 1}), (two, {"step": 2})]
    assert yours.merge(mine.body()) == 1 and yours.merge(mine.body()) == 0 and len(yours) == 4
    assert mine.merge(yours.body()) == 1


def test_best_states_travel_as_a_model_of_their_topic():
    mine, yours = starts_of(), starts_of()
    best = mine.add(state(2), mine.first, {"step": 1})
    schema = memoire.Schema({"obs": np.float32, "reward": np.float32})
    with memoire.Server("tcp://127.0.0.1:*", schema) as server, memoire.connect(server.endpoint) as client:
        server.publish(mine.topic, mine.body())
        assert yours.merge(client.model(yours.topic).wait(20.0).body) == 1
    assert yours.best.id == best and yours.lineage() == mine.lineage()


def test_start_states_go_on_as_told_and_another_seed_is_refused(caplog):
    saved = starts_of(seed=3).arrays()
    other = starts_of(seed=3, keep=7, temperature=0.25, action=("step", "jump"))
    with caplog.at_level(logging.WARNING):
        other.restore(saved)
    assert other.keep == 7 and len(caplog.messages) == 3
    settings = "keep = 7", "temperature = 0.25", "action = ['step', 'jump']"
    for setting, line in zip(settings, caplog.messages, strict=True):
        assert f"going on with {setting}, as set on this StartStates 'numbers'; the checkpoint has" in line
    with pytest.raises(ParameterError, match="^seed must be 3, as in the checkpoint, or left out, got 4"):
        starts_of(seed=4).restore(saved)


def text_of(tree):
    return np.frombuffer(pack(tree), np.uint8)


def damaged(**changed):
    return starts_of().arrays() | changed


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({}, "holds no states"),
        (starts_of(first=(1,)).arrays(), "another first state"),
        (damaged(states=np.zeros(7, np.uint8)), "holds no states"),
        (damaged(links=np.frombuffer(b"[1]", np.uint8)), "holds no states"),
        (damaged(settings=text_of([7])), "holds no states"),
        (damaged(settings=text_of(starts_of().settings | {"depth": 3})), "seed, depth; expected keep, temperature"),
        (damaged(settings=text_of({"keep": 5, "seed": None})), "has the settings keep, seed; expected"),
    ],
)
def test_states_of_something_else_are_refused(arrays, text):
    starts = starts_of()
    with pytest.raises(DataError, match=text):
        starts.restore(arrays)
    assert len(starts) == 1


def test_a_lineage_that_runs_in_a_circle_is_refused():
    starts, other = starts_of(), starts_of()
    one = other.add(state(4), other.first)
    links = [[one, one + 1, {}], [one + 1, one, {}], [other.first, 0, {}]]
    arrays = other.arrays() | {"links": np.frombuffer(pack(links), np.uint8)}
    with pytest.raises(DataError, match="a cycle"):
        starts.restore(arrays)


def test_a_cost_that_is_no_number_is_refused():
    with pytest.raises(ParameterError, match="key"):
        StartStates("x", SCHEMA, state(1), lambda columns: float("nan"))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=40), st.integers(1, 6))
def test_the_best_states_stay_by_cost_and_id_and_the_first_one(added, keep):
    """Compare with a list of all states that were ever added."""
    starts = starts_of(keep=keep, first=(50,))
    seen = {starts.first: 50.0}
    ids = [starts.first]
    for number, parent in added:
        ids.append(starts.add(state(number), ids[parent % len(ids)]))
        seen[ids[-1]] = float(number)
    ranked = sorted((each for each in seen if each != starts.first), key=lambda each: (seen[each], each))
    assert {each for each in seen if each in starts} == {starts.first, *ranked[: keep - 1]}
    assert starts.best.cost == min(seen.values())
    for each in (*filter(starts.__contains__, seen), starts.best.id):
        path = [step for step, _ in starts.lineage(each)]
        assert path[-1] == each and len(set(path)) == len(path)


def test_masked_draws_follow_the_softmax_of_what_is_allowed():
    rng = np.random.default_rng(0)
    logits, mask = np.float32([[1.0, 5.0, 2.0, 0.0]] * 5000), np.array([[True, False, True, True]] * 5000)
    choice, logp = sample_masked(logits, mask, rng)
    allowed = np.exp([1.0, 2.0, 0.0]) / np.exp([1.0, 2.0, 0.0]).sum()
    np.testing.assert_allclose(np.bincount(choice, minlength=4)[[0, 2, 3]] / 5000, allowed, atol=0.03)
    np.testing.assert_allclose(np.exp(logp), allowed[np.searchsorted([0, 2, 3], choice)], rtol=1e-5)
    assert choice.dtype == np.int64 and logp.dtype == np.float32 and 1 not in choice


@pytest.mark.parametrize(
    ("logits", "mask", "error", "text"),
    [
        (np.zeros((3, 2)), [[1, 1], [0, 0], [1, 0]], NoActionAllowed, r"row \[1\] allows none of its 2 actions"),
        (np.zeros(2), [0, 0], NoActionAllowed, "the only row allows none"),
        (np.zeros(2), [[1, 1]], ParameterError, "mask"),
        ([np.nan, 0.0], [1, 1], ParameterError, "finite"),
    ],
)
def test_masks_that_do_not_fit_are_errors_that_say_where(logits, mask, error, text):
    with pytest.raises(error, match=text):
        sample_masked(logits, np.array(mask, bool), np.random.default_rng(0))


# --- Jobs, leases and late results, with a manual clock, and compared with a model

LEASE = 10.0
A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


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
    service.room = ByteBudget(0).add_holder("requests", own=2 * unpacked_bytes(part))
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
    with pytest.raises(ObserverLost, match=r"job 1 is lost: 01010101 sent nothing for 10\.0 s"):
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
    """Rule-based test of jobs: each ends once, by its first result; one worker holds a job; leases expire."""

    workers = st.sampled_from([A, B, C])

    def __init__(self):
        super().__init__()
        self.jobs = Jobs(LEASE, attempts=2)
        self.now = 0.0
        self.submitted = []
        self.holders = {}  # number -> (worker with the job in the model, end of the lease)
        self.had, self.leases = {}, {}
        self.over = {}

    @rule()
    def submit(self):
        self.submitted.append(self.jobs.submit(len(self.submitted)))
        self.had[self.submitted[-1].number] = set()

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

    @precondition(lambda self: self.submitted)
    @rule(worker=workers, data=st.data())
    def renew(self, worker, data):
        number = data.draw(st.sampled_from(sorted(self.had)))
        holder = self.holders.get(number, (worker,))[0]
        expected = number not in self.over and worker in self.had[number] and holder == worker
        assert self.jobs.renew(worker, number, self.now) == expected
        if expected:
            self.holders[number] = worker, self.now + LEASE

    @precondition(lambda self: self.submitted)
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

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data):
        job = data.draw(st.sampled_from(self.submitted))
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
        for job in self.submitted:
            ended = self.over.get(job.number)
            assert job.future.done() == (ended is not None)
            if isinstance(ended, tuple):
                assert job.future.result(0) == ended
        assert self.jobs.leased == len(self.holders)
        counts = self.jobs.counts
        assert counts["done"] + counts["cancelled"] + counts["lost"] == len(self.over)


TestJobs = JobsMachine.TestCase
TestJobs.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
