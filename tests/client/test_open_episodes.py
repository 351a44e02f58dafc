"""Tests of open episodes: a client that ends, or a step that is interrupted, stores and counts entries once."""

import gc
import itertools
import logging
import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from interrupts import Call, check_whole
from memoire.client.pushes import LocalMemory, Pusher, side_of
from memoire.client.session import Session
from memoire.client.waiting import ClientLock
from memoire.errors import Closed, MemoireError, ParameterError
from memoire.limits import Limits
from memoire.replay.columns import Column
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.replay.writer import Writer
from memoire.wire import messages
from memoire.wire.frames import parse
from netkit import CLIENT, DEADLINE, QUICK, in_thread, reply, until

STORAGES = ["caches", "episodes"]


def step(writer, t, *, terminated=False, environments=None):
    lead = () if environments is None else (environments,)
    obs, after = (np.full((*lead, 4), value, np.float32) for value in (t, t + 1))
    ended, going = np.full(lead, terminated)[()], np.zeros(lead, np.bool_)[()]
    writer.step(obs, np.zeros(lead, np.int32)[()], np.ones(lead)[()], ended, going, after)


def held(server):
    stats = server.stats().tables["default"]
    return stats.held_caches, stats.held_samples


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("environments", [None, 3])
def test_open_episodes_are_stored_at_close_and_later_steps_are_refused(cluster, storage, environments):
    server = cluster.server(storage=storage, limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writers = [client.writer(num_envs=environments, autoreset="disabled") for _ in range(2)]
    count = 2 * (environments or 1)
    for t in range(5):
        for writer in writers:
            step(writer, t, environments=environments)
    memory = client.memory
    assert client.close(DEADLINE)
    assert (server.total_steps, server.total_episodes) == (5 * count, 0)  # returns are incomplete, as after `reset`
    if storage == "episodes":
        until(lambda: held(server) == (count, 5 * count))
        assert set(server.get_batch(100).next_obs[:, 0].tolist()) == {1.0, 2.0, 3.0, 4.0, 5.0}
    else:
        assert (memory.num_episodes, memory.num_entries) == (count, 5 * count)
    for writer in writers:
        for call in (lambda each: step(each, 5, environments=environments), lambda each: each.reset()):
            with pytest.raises(Closed, match="this client is closed"):
                call(writer)
        writer.close()  # the end of a with statement calls close
    for count_it in (lambda: client.on_entries(1), lambda: client.on_episode(0, 1, 1.0)):
        with pytest.raises(Closed):
            count_it()
    assert client.stats().steps == 5 * count


@pytest.mark.slow
def test_an_episode_whose_writer_is_gone_is_stored_too(cluster):
    server = cluster.server(storage="episodes", limits=QUICK)
    client = cluster.client(server, limits=QUICK)

    def play():
        writer = client.writer()
        for t in range(4):
            step(writer, t)

    play()
    gc.collect()
    play()  # the new writer reuses the first writer's lane and must not discard the episode
    until(lambda: held(server) == (1, 4))
    gc.collect()
    assert client.close(DEADLINE)
    until(lambda: held(server) == (2, 8))


@pytest.mark.slow
def test_an_episode_that_waits_for_room_leaves_when_its_client_is_closed(cluster):
    server = cluster.server(storage="episodes", limits=Limits(credit=1))
    way = cluster.way(server, drop=0.0, double=0.0)
    client = cluster.client(way.endpoint, limits=QUICK, on_full="block")
    client.configure_limits(block_timeout=DEADLINE)
    writer = client.writer()
    way.drop = 1.0
    step(writer, 0, terminated=True)
    waiting, box = in_thread(lambda: step(writer, 1, terminated=True))
    until(lambda: client._session.schedule.pressed)
    closing, closed = in_thread(client.close, DEADLINE)
    until(lambda: client.closed)
    way.drop = 0.0
    for thread in (waiting, closing):
        thread.join(DEADLINE)
    assert (box, closed) == ({"value": None}, {"value": True})
    until(lambda: (server.total_steps, held(server)) == (2, (2, 2)))
    with pytest.raises(Closed):
        step(writer, 2)


@pytest.mark.slow
def test_a_client_that_cannot_store_what_is_open_says_so(cluster, caplog):
    server = cluster.server(storage="episodes", limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writer = client.writer()
    step(writer, 0)
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with writer._inside:
            entered.set()
            leave.wait(DEADLINE)

    inside, _ = in_thread(stay)
    assert entered.wait(DEADLINE)
    with caplog.at_level(logging.WARNING, "memoire.client.client"):
        client.close(0.1)
    leave.set()
    inside.join(DEADLINE)
    assert "does not store 1 entries: a thread is still inside of their writer" in caplog.text
    with pytest.raises(Closed, match="this client"):
        step(writer, 1)


@pytest.mark.slow
def test_a_client_whose_thread_does_not_end_in_time_says_so(cluster, times, caplog):
    times(client_end=0.05)
    client, go_on = cluster.client(cluster.server()), threading.Event()
    client._io.worker.post(lambda: go_on.wait(DEADLINE))
    is_delivered = client.close(0.05)
    go_on.set()
    assert not is_delivered and "its thread did not end in time" in caplog.text


@pytest.mark.slow
def test_a_kind_of_table_that_actors_cannot_fill_is_refused_by_name():
    with pytest.raises(
        ParameterError, match=r"storage must be one of 'caches', 'episodes', 'rollouts'.* got 'prompts'"
    ):
        side_of("prompts")
    for kind in ("caches", "episodes", "rollouts"):
        assert side_of(kind).STORED


# --- An interrupted step is counted and pushed once or never, and no lock stays held

SCHEMA = Schema({"obs": Column("float32", (2,), "state"), "action": np.int64, "reward": np.float32})
SINGLE = np.arange(40, dtype=np.float32).reshape(20, 2)
VECTOR = np.arange(120, dtype=np.float32).reshape(20, 3, 2)
NO, SECOND = np.zeros(3, np.bool_), np.array([False, True, False])


def one(at: int, terminated: bool = False, truncated: bool = False) -> Call:
    obs, after = SINGLE[at], SINGLE[at + 1]
    return lambda writer: writer.step(obs, at, float(at), terminated, truncated, after, {})


def many(at: int, terminated: Any = NO) -> Call:
    obs, after, rewards, actions = VECTOR[at], VECTOR[at + 1], np.arange(3.0), np.full(3, at)
    return lambda writer: writer.step(obs, actions, rewards, terminated, NO, after, {})


def reset(obs: Any) -> Call:
    return lambda writer: writer.reset(obs)


def end(writer: Writer) -> None:
    """Stand for `Client.close`, which ends all writers and names the entries that it cannot store."""


@dataclass
class Case:
    """An interrupted call with the calls before and after, and the settings that the home grants."""

    storage: str
    call: Call
    before: tuple[Call, ...] = ()
    then: tuple[Call, ...] = ()
    num_envs: int | None = None
    granted: int = 1 << 40
    credit: int = 1 << 20
    on_full: Any = "skip"
    longest: int | None = None


class Actor:
    """A client without its thread; its messages wait in a queue."""

    def __init__(self, case: Case) -> None:
        parameters = Parameters(cache_size=3, samples_per_insert=2.0, multi_step=2)
        self.session = Session(CLIENT, "tcp://there", table="", label=9, limits=Limits(), rng=random.Random(1), now=0.0)
        self.session.hello("host", 1)
        body = messages.Welcome(
            schema=SCHEMA.to_json(), run_name="run", home_name="one", epoch=7, since=7, table=3, table_name="default",
            storage=case.storage, parameters=parameters.to_wire(), granted_steps=case.granted, credit=case.credit,
        )  # fmt: skip
        welcomed = self.session.parse_welcome(reply(body, run=1, home=2, fingerprint=5), 0.0)
        assert welcomed is not None
        self.session.enter_home(welcomed, 0.0)
        self.waiting = ClientLock(1.0)
        rest: Any = {"on_full": case.on_full, "block_timeout": 0.001, "clock": lambda: 1.0}
        self.pusher = Pusher(self.session, self.waiting, itertools.count(1), **rest)
        self.local = LocalMemory(self.session, self.pusher, capacity=40, live=True, seed=1)
        self.local.memory.set_clock(1.0)
        autoreset = None if case.num_envs is None else "next_step"
        options: Any = {} if case.longest is None else {"longest": case.longest}
        self.writer = self.local.writer(None, case.num_envs, autoreset, lambda version: version, **options)
        self.refused: list[str] = []
        self.go_on(case.before)

    def go_on(self, calls: tuple[Call, ...]) -> "Actor":
        for call in calls:
            try:
                if call is end:
                    self.refused += self.local.end_writers("this client", time.monotonic() + 10.0)
                else:
                    call(self.writer)
            except MemoireError as error:
                self.refused.append(str(error))
        return self

    def locks(self) -> list[Any]:
        return [self.waiting.condition, self.local.memory.held(), self.writer.steps_blocked()]

    def outcome(self) -> dict[str, Any]:
        """Return all observable state but the draws of caches, since an interrupted draw is repeated."""
        session, sent = self.session, [parse(frames) for frames in self.pusher.queue]
        is_cache = session.welcome.storage == "caches"
        return {
            "refused": self.refused,
            "counts": session.counts.sums,
            "episodes": [(row.length, row.returned) for row in session.counts.oldest_episodes(100)],
            "dropped": session.counts.dropped_returns,
            "left": (session.inserts.remaining, session.inserts._undecided),
            "is short": session.inserts.is_short,
            "not pushed": (self.pusher.not_pushed, self.pusher.reason),
            "busy": (session.inserts.waiting, session.schedule.pressed, session.schedule.is_dirty),
            "window": (session.window.pushed_caches, session.window.pushed_bytes * (not is_cache)),
            "bodies": [(type(each.body), each.body.number) for each in sent]
            if is_cache
            else [each.body for each in sent],
            "sent": [] if is_cache else [bytes(each.payload) for each in sent],
            "open": [self.local.memory.open_length(lane) for lane in range(3)],
            "memory": (self.local.memory.num_entries, self.local.memory.num_episodes),
        }


EPISODE = (one(0), one(1))
CASES = {
    "caches, a step": Case("caches", one(2), EPISODE, (one(3),)),
    "caches, a step that pushes": Case("caches", one(4), (*EPISODE, one(2), one(3)), (one(5), one(6))),
    "caches, an end": Case("caches", one(2, True), EPISODE, (one(5),)),
    "caches, vector": Case("caches", many(2, SECOND), (many(0), many(1)), (many(3), many(4)), 3),
    "caches, held back": Case("caches", one(2), EPISODE, (one(3),), granted=2, on_full="block"),
    "caches, window full": Case("caches", one(6), (*EPISODE, *map(one, range(2, 6))), (one(7),), credit=1),
    "episodes, a step": Case("episodes", one(2), EPISODE, (one(3),)),
    "episodes, an end": Case("episodes", one(2, True), EPISODE, (one(5), one(6, True))),
    "episodes, truncated": Case("episodes", one(2, truncated=True), EPISODE, (one(5),)),
    "episodes, vector": Case("episodes", many(2, SECOND), (many(0), many(1)), (many(3), many(4)), 3),
    "episodes, that cuts": Case("episodes", one(3, True), (*EPISODE, one(2)), (one(6),), longest=3),
    "episodes, held back": Case("episodes", one(2, True), EPISODE, (one(5),), granted=0, on_full="block"),
    "episodes, window full": Case(
        "episodes", one(7, True), (*EPISODE, one(2, True), one(6)), (one(9),), credit=1, on_full="block"
    ),
    "episodes, reset": Case("episodes", reset(VECTOR[7]), (many(0), many(1)), (many(7),), 3),
    "episodes, cut": Case("episodes", lambda writer: writer.cut(), EPISODE, (one(2, True),)),
    "episodes, close": Case("episodes", lambda writer: writer.close(), (many(0), many(1)), (many(2),), 3),
    "rollouts, a step": Case("rollouts", one(2), EPISODE, (one(3),), longest=4),
    "rollouts, a full fragment": Case("rollouts", one(2), EPISODE, (one(3),), longest=3),
    "rollouts, an end": Case("rollouts", one(2, True), EPISODE, (one(5),), longest=4),
    "rollouts, that waits": Case("rollouts", one(2), EPISODE, (one(3),), granted=3, longest=5),
    "rollouts, that waits and ends": Case("rollouts", one(2, True), EPISODE, (one(3),), granted=3, longest=5),
    "rollouts, discarded": Case("rollouts", one(2), EPISODE, (one(3), one(4, True)), granted=2, longest=5),
    "rollouts, vector": Case("rollouts", many(2, SECOND), (many(0), many(1)), (many(3),), 3, longest=3),
    "rollouts, vector discarded": Case(
        "rollouts", many(2), (many(0), many(1)), (many(3), many(4, SECOND)), 3, granted=5, longest=5
    ),
    "rollouts, reset": Case("rollouts", reset(SINGLE[9]), EPISODE, (one(9),), longest=4),
}


def ways_on(case: Case) -> list[tuple[Call, ...]]:
    """Return a user's possible calls after an interrupt; interrupted places take turns."""
    obs, again = (SINGLE[12], one(12)) if case.num_envs is None else (VECTOR[12], many(12))
    return [(reset(obs), again, end), (case.call, *case.then, end), (*case.then, end), (end,)]


def check(case: Case, opcodes: bool, every: int = 1) -> None:
    waits = "not pushed", "is short"
    check_whole(lambda: Actor(case), case.call, ways_on(case), opcodes=opcodes, waits=waits, every=every)


LONG = ("full", "held", "waits", "discarded", "cuts", "reset", "close", "vector", "truncated", "end")
"""Words in the names of cases that have many lines or that wait."""


LINES = 1 if "INTERRUPTED_OPCODES" in os.environ else 5
"""Stride of the interrupted lines in long cases, to finish in time."""


def is_long(name: str) -> bool:
    return any(word in name for word in LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_interrupted_at_a_line_is_counted_and_pushed_once_or_never(name: str) -> None:
    check(CASES[name], opcodes=False, every=LINES if is_long(name) else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_interrupted_at_an_opcode_is_counted_and_pushed_once_or_never(name: str) -> None:
    check(CASES[name], opcodes=True)
