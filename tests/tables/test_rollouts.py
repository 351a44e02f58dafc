"""Rollouts at the server: each entry is handed out once, in order, whole or split; room is given back."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from interrupts import everywhere
from memoire._core import at_once
from memoire.errors import NotEnoughSamples, ParameterError, ProtocolError
from memoire.replay.columns import Column
from memoire.replay.limiter import Limiter
from memoire.replay.parameters import Parameters
from memoire.replay.rollouts import Rollouts
from memoire.replay.schema import Schema
from memoire.replay.writing import Changes
from memoire.tables.base import TakeRequest
from memoire.tables.rollouts import fragments
from memoire.tables.rollouts.fragments import check_entries, packed, unpacked
from memoire.tables.rollouts.pool import RolloutPool
from memoire.tables.table import Table
from memoire.wire import _bytes, messages
from memoire.wire.containers import pack_episode
from memoire.wire.frames import encode, parse
from netkit import in_thread
from rolloutkit import SCHEMA, TABLE, TakesServer, fragment
from serverkit import READER

CLIENTS = [bytes([65 + i]) * 16 for i in range(3)]
RELEASES = st.sampled_from(["now", "publish"])


def pushed(
    pool: RolloutPool, client: bytes, numbers: range, *, version: int = 0, sequence: int = 1, **ending: Any
) -> int:
    """Push a fragment with these numbers as observations, as an actor would; the final state is the next number."""
    _, payload = packed([fragment(client, numbers, version=version)], SCHEMA, now=1.0, wall=1.0)
    body = messages.EpisodePush(since=1, number=1, has_final=True, **{"terminated": False} | ending)
    return pool.add(client, sequence, pool.check(body, payload, checksum=_bytes.checksum(payload)))


def take(pool: RolloutPool, steps: int, *, timeout: float = 0.0, **how: Any) -> Rollouts:
    return pool.take(TakeRequest(steps, **how), timeout)


def rollout_pool(capacity: int = 100, **options: Any) -> RolloutPool:
    return RolloutPool(SCHEMA, options.pop("parameters", None), capacity=capacity, **options)


class Rolling(RuleBasedStateMachine):
    """Rule-based test of a queue of rollouts, compared with a list of fragments of single entries."""

    @initialize(lag=st.none() | st.integers(0, 2), is_bounded=st.booleans())
    def begin(self, lag: int | None, is_bounded: bool) -> None:
        self.pool = rollout_pool(20, parameters=Parameters(max_model_lag=lag), is_bounded=is_bounded)
        self.room = 0
        self.pool.on_room = self.given_back
        self.lag, self.is_bounded = lag, is_bounded
        self.next, self.newest = 0, 0
        self.held: list[list[tuple[int, int, bytes]]] = []  # fragments of (number, version, client)
        self.taken: list[int] = []
        self.stale = self.lost = self.waiting = 0

    def given_back(self, entries: int, changes: Changes) -> None:
        self.room += entries
        at_once(changes)

    @rule(count=st.integers(1, 9), client=st.sampled_from(CLIENTS), old=st.integers(0, 3))
    def push(self, count: int, client: bytes, old: int) -> None:
        version = max(0, self.newest - old)
        entries = range(self.next, self.next + count)
        pushed(self.pool, client, entries, version=version, cut=True, sequence=self.next)
        self.next += count
        self.held.append([(number, version, client) for number in entries])
        while self.is_bounded and sum(map(len, self.held)) > 20:
            self.lost += len(self.held.pop(0))

    @rule()
    def publish(self) -> None:
        self.newest += 1
        self.pool.saw_model(self.newest)
        self.waiting = 0

    @rule(steps=st.integers(1, 12), exact=st.booleans(), release=RELEASES, clients=st.integers(0, 2))
    def take(self, steps: int, exact: bool, release: Any, clients: int) -> None:
        if self.lag is not None and self.newest:
            old = [each for each in self.held if min(entry[1] for entry in each) < self.newest - self.lag]
            self.stale += sum(map(len, old))
            self.held = [each for each in self.held if each not in old]
        entries = [entry for each in self.held for entry in each]
        who = {entry[2] for entry in entries}
        if len(entries) < steps or len(who) < clients:
            with pytest.raises(NotEnoughSamples, match="waiting for"):
                take(self.pool, steps, exact=exact, min_clients=clients, release=release)
            return
        rollouts = take(self.pool, steps, exact=exact, min_clients=clients, release=release)
        expected: list[list[tuple[int, int, bytes]]] = []
        missing = steps
        while missing > 0:
            fragment = self.held.pop(0)
            if exact and len(fragment) > missing:
                self.held.insert(0, fragment[missing:])
                fragment = fragment[:missing]
            expected.append(fragment)
            missing -= len(fragment)
        flat = [entry for each in expected for entry in each]
        assert rollouts["obs"].tolist() == [entry[0] for entry in flat]
        assert rollouts.lengths.tolist() == list(map(len, expected))
        assert rollouts.final["obs"].tolist() == [each[-1][0] + 1 for each in expected], "a split one's state is known"
        assert rollouts.model_version.tolist() == [entry[1] for entry in flat]
        assert [bytes(row) for row in rollouts.client] == [each[0][2] for each in expected]
        assert not rollouts.terminated.any() and not rollouts.truncated.any()
        self.taken += rollouts["obs"].tolist()
        self.waiting += len(flat) if release == "publish" else 0

    @precondition(lambda self: self.held)
    @rule()
    def copy_and_put_back(self) -> None:
        """A snapshot has exactly the held entries, and the pool takes no entry a second time."""
        kept = list(self.pool.walk())
        assert [int(n) for each in kept for n in each.episode.columns["obs"]] == [e[0] for f in self.held for e in f]
        for each in kept:
            assert self.pool.put_back(each) == (False, 0)
        other = rollout_pool(10_000)
        for each in kept:
            assert other.put_back(each)[0]
        count = other.entries()
        again = take(other, count, exact=True)
        assert again["obs"].tolist() == [entry[0] for each in self.held for entry in each]
        assert again.final["obs"].tolist() == [each[-1][0] + 1 for each in self.held]

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "held"):
            return
        held = sum(map(len, self.held))
        stats = self.pool.stats()
        drawn, stale, lost = stats.drawn, stats.passed_over, stats.overwritten_samples
        assert len(set(self.taken)) == len(self.taken), "nothing is handed out twice"
        assert (drawn, stale, lost) == (len(self.taken), self.stale, self.lost)
        assert self.next == held + drawn + stale + lost
        assert self.pool.entries() == held == stats.held and stats.caches == len(self.held)
        assert self.room + self.waiting + held == self.next, "room is given back once, and no sooner than it may be"
        assert held <= 20 or not self.is_bounded


Rolling.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRolling = Rolling.TestCase


def test_a_take_waits_for_its_entries_and_gets_all_of_them() -> None:
    pool = rollout_pool()
    pushed(pool, CLIENTS[0], range(4))
    thread, box = in_thread(lambda: take(pool, 6, timeout=20.0))
    pushed(pool, CLIENTS[1], range(10, 14), terminated=True)
    thread.join(20.0)
    rollouts = box["value"]
    assert rollouts["obs"].tolist() == [0, 1, 2, 3, 10, 11]
    assert rollouts.lengths.tolist() == [4, 2]
    assert rollouts.truncated.tolist() == [True, False], "the second one was split: its episode goes on"
    rest = take(pool, 2)
    assert rest["obs"].tolist() == [12, 13] and rest.terminated.tolist() == [True]
    assert rest.bootstrap.tolist() == [0.0] and np.isnan(rollouts.bootstrap).all()


def test_a_shortage_says_what_it_waits_for() -> None:
    pool = rollout_pool(parameters=Parameters(max_model_lag=1))
    pushed(pool, CLIENTS[0], range(4), version=7)
    pool.saw_model(9)
    with pytest.raises(NotEnoughSamples) as caught:
        take(pool, 6)
    assert "waiting for 6 more entries (0 of 6 held, from 0 clients)" in str(caught.value)
    assert "4 stale entries were discarded (max_model_lag), the last of model 7 when model 9 was the newest" in str(
        caught.value
    )
    pushed(pool, CLIENTS[0], range(4, 12), version=9)
    with pytest.raises(NotEnoughSamples, match=r"entries of 1 more clients \(1 of min_clients=2\)"):
        take(pool, 6, min_clients=2)
    assert pool.entries() == 8, "nothing was taken"


def test_wrong_arguments_are_refused_before_anything_waits() -> None:
    pool = rollout_pool(10)
    for arguments, name in (({"steps": 0}, "steps"), ({"steps": 11}, "capacity"), ({"min_clients": -1}, "min_clients")):
        with pytest.raises(ParameterError, match=name):
            take(pool, **{"steps": 1, **arguments})
    with pytest.raises(ParameterError, match="release"):
        take(pool, 1, release="later")


def test_a_fragment_that_has_no_room_at_all_is_refused() -> None:
    with pytest.raises(ProtocolError, match="the table has room for 5"):
        pushed(rollout_pool(5), CLIENTS[0], range(6))


def test_a_byte_limit_drops_the_oldest_and_gives_their_room_back() -> None:
    pool, room = rollout_pool(0, byte_limit=100_000), []
    pool.on_room = lambda entries, changes: at_once([(room.append, (entries,)), *changes])
    for i in range(4):
        pushed(pool, CLIENTS[0], range(10 * i, 10 * i + 10), sequence=i)
    half = pool.stats().bytes // 2
    assert pool.limit_bytes(half) == 2 and room == [20]
    assert take(pool, 20)["obs"].tolist() == list(range(20, 40))


@pytest.mark.parametrize("how", ["taken", "split", "cleared", "passed over", "overwritten"])
def test_what_has_left_can_be_put_back_once(how: str) -> None:
    pool = rollout_pool(6, is_bounded=True, parameters=Parameters(max_model_lag=0))
    pushed(pool, CLIENTS[0], range(4), version=1)
    (kept,) = pool.walk()
    assert pool.put_back(kept) == (False, 0), "it is here"
    if how == "taken":
        take(pool, 4)
    elif how == "split":
        take(pool, 2)
        assert pool.put_back(kept) == (False, 0), "its rest is here"
        take(pool, 2)
    elif how == "cleared":
        pool.clear()
    elif how == "passed over":
        pool.saw_model(2)
        with pytest.raises(NotEnoughSamples, match="from 0 clients"):
            take(pool, 1)
    else:
        pushed(pool, CLIENTS[1], range(4, 8), version=1)
        take(pool, 4)
    assert pool.put_back(kept) == (True, 0) and pool.stats().held == 4
    assert pool.put_back(kept) == (False, 0)


class TestRollouts:
    def rollouts(self) -> Rollouts:
        pool = rollout_pool()
        pushed(pool, CLIENTS[0], range(5))
        pushed(pool, CLIENTS[1], range(10, 13), terminated=True)
        return take(pool, 8)

    def test_each_entry_is_in_one_minibatch_an_epoch(self) -> None:
        parts = list(self.rollouts().minibatches(3, epochs=2, rng=np.random.default_rng(1)))
        assert [len(part) for part in parts] == [3, 3, 2, 3, 3, 2]
        for epoch in (parts[:3], parts[3:]):
            assert sorted(np.concatenate(epoch).tolist()) == list(range(8))

    def test_padded_has_zeros_where_the_mask_says_nothing(self) -> None:
        columns, mask = self.rollouts().padded()
        assert columns["obs"].tolist() == [[0, 1, 2, 3, 4], [10, 11, 12, 0, 0]]
        assert mask.sum(axis=1).tolist() == [5, 3]

    def test_advantages_do_not_look_behind_a_terminal_state(self) -> None:
        rollouts = self.rollouts()
        values = np.zeros(8, np.float32)
        first = rollouts.gae(values, np.array([1.0, 99.0]), lam=1.0)
        again = rollouts.gae(values, np.array([1.0, -99.0]), lam=1.0)
        np.testing.assert_array_equal(first, again)
        assert first[0][4] == pytest.approx(4.0 + 0.99) and first[0][7] == 12.0
        targets, _ = rollouts.vtrace(values, np.array([1.0, 99.0]), np.zeros(8))
        np.testing.assert_allclose(targets, first[1])
        with pytest.raises(ParameterError, match="final_values"):
            rollouts.gae(values, np.zeros(3))

    def test_advantages_take_the_table_s_discount_and_refuse_another_one(self) -> None:
        rollouts = self.rollouts()
        values, ends = np.zeros(8, np.float32), np.zeros(2)
        own = float(rollouts.discount[0])
        np.testing.assert_array_equal(rollouts.gae(values, ends), rollouts.gae(values, ends, own))
        for call in (rollouts.gae, lambda v, e, d: rollouts.vtrace(v, e, np.zeros(8), d)):
            with pytest.raises(
                ParameterError, match=f"discount must be {own}, which the table has, or left out, got 0.9"
            ):
                call(values, ends, 0.9)
        rollouts.discount = None
        with pytest.raises(ParameterError, match="these rollouts come from no table"):
            rollouts.gae(values, ends)
        rollouts.discount = (0.9, 0.5)
        with pytest.raises(ParameterError, match="one number for all reward dimensions"):
            rollouts.gae(values, ends)


def test_ragged_and_nested_columns_are_taken_and_split() -> None:
    schema = Schema({"obs": {"a": np.float32, "b": Column(np.int32, (None,), "state")}, "reward": np.float32})
    pool = RolloutPool(schema, capacity=10)
    values = np.arange(6, dtype=np.int32)
    lengths = np.array([1, 2, 3])

    def fill(name: str, target: Any) -> None:
        target[:] = (values if name == "obs.b" else np.arange(3, dtype=np.float32)).view(np.uint8)

    facts = np.ones(3, np.float32), np.zeros(3, np.float32), np.zeros(3, np.int64)
    final = {"obs.a": np.float32(3), "obs.b": np.array([7, 8], np.int32)}
    payload = pack_episode(schema, fill, *facts, {"obs.b": lengths}, final=final, now=1.0)
    body = messages.EpisodePush(has_final=True, terminated=False)
    pool.add(CLIENTS[0], 1, pool.check(body, payload))
    head, rest = take(pool, 2), take(pool, 1)
    assert [each.tolist() for each in head["obs"]["b"]] == [[0], [1, 2]]
    assert [each.tolist() for each in head.final["obs.b"]] == [[3, 4, 5]]
    assert [each.tolist() for each in rest.final["obs.b"]] == [[7, 8]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_limit": 3}, "capacity limits the number of entries"),
        ({"samples_per_insert_tolerance": 10.0}, "capacity limits how far"),
        ({"min_size": 5}, "take"),
        ({"max_times_sampled": 1}, "handed out once"),
        ({"on_full": "newest"}, "drop_oldest"),
        ({"storage": "episodes", "rollout_length": 5}, "storage='rollouts'"),
        ({"storage": "caches", "on_full": "drop_oldest"}, "storage='rollouts'"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        Table(SCHEMA, **{"storage": "rollouts", **options})


def kept_fragment() -> Any:
    other = rollout_pool()
    pushed(other, CLIENTS[2], range(5), sequence=9)
    return next(iter(other.walk()))


KEPT = kept_fragment()
CALLS: dict[str, Callable[[RolloutPool], Any]] = {
    "take": lambda pool: take(pool, 12),
    "take until the next model": lambda pool: take(pool, 12, release="publish"),
    "saw_model": lambda pool: pool.saw_model(3),
    "limit": lambda pool: pool.limit_bytes(pool.stats().bytes // 2),
    "clear": lambda pool: pool.clear(),
    "put_back": lambda pool: pool.put_back(KEPT),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_room_of_each_entry_is_given_back_once_wherever_a_call_is_interrupted(name: str) -> None:
    for interrupted in everywhere():
        pool = rollout_pool(0, byte_limit=100_000, parameters=Parameters(max_model_lag=1))
        limiter = Limiter(Parameters(), pool.entries)
        pool.on_room = limiter.record_draw
        for i in range(3):
            pushed(pool, CLIENTS[0], range(10 * i, 10 * i + 10), sequence=i, version=i + 1)
        take(pool, 2, release="publish")
        place = interrupted(lambda pool=pool: CALLS[name](pool))
        pool.clear()
        assert limiter.stats().drawn == 30, place


# --- Learners far away take rollouts: each entry once, in order, also if a reply is lost and the request comes again


def test_another_schema_a_wrong_request_and_a_wrong_reply_are_refused():
    served = TakesServer()
    served.push(bytes(16), range(4))
    table = served.tables.numbered(TABLE)
    frames = encode(fragments.Take(steps=4), client=READER, sequence=1, table=TABLE, fingerprint=table.fingerprint + 1)
    assert served.dispatcher.answer(parse(frames)).body.code == "schema" and served.pool.entries() == 4
    assert served.ask(steps=1, release="later").body.code == "value"
    reply = served.ask(steps=4)
    for rows in ([], reply.body.fragments * 2):
        with pytest.raises(ProtocolError, match="but the payload has"):
            unpacked(rows, reply.payload, SCHEMA, now=0.0, limits=served.limits)
    served.ask(steps=0)
    served.numbers[READER] -= 2
    assert served.ask(steps=4).body.code == "missing", "its reply was acknowledged, and is not kept"


def test_a_fragment_is_refused_by_its_largest_entry_however_many_it_has():
    def least(entries):
        """Return the smallest size of a reply, in bytes, that takes a fragment of so many entries."""
        for most in range(1, 2000):
            with contextlib.suppress(ProtocolError):
                check_entries(fragment(READER, range(entries)), SCHEMA, most)
                return most
        raise AssertionError(entries)

    assert [least(entries) for entries in (2, 3, 7)] == [least(1)] * 3
