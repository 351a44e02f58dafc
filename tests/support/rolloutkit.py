"""Helpers for tests of rollouts that remote readers take: fragments, and a server without sockets."""

import numpy as np

from memoire.limits import Limits
from memoire.replay.dataset import Episode
from memoire.replay.rollouts import Fragment
from memoire.replay.schema import Schema
from memoire.server.dispatch import Dispatcher
from memoire.tables.episodes.memory import CheckedEpisode
from memoire.tables.rollouts import fragments
from memoire.tables.rollouts.fragments import unpacked
from memoire.tables.rollouts.pool import RolloutPool
from memoire.tables.table import Table, Tables
from memoire.wire.frames import encode, parse, table_number
from serverkit import NOW, READER

SCHEMA = Schema({"obs": np.int64, "reward": np.float32})
TABLE = table_number("rollouts")


def fragment(client, numbers, *, terminated=False, version=3):
    obs = np.arange(numbers.start, numbers.stop)
    count = len(obs)
    columns = {"obs": obs, "reward": obs.astype(np.float32)}
    of_entries = {"init_w": np.ones(count, np.float32), "learned": np.zeros(count, np.bool_)}
    of_entries |= {"model_version": np.full(count, version, np.int64), "priority": None, "born": None}
    end = {"terminated": terminated, "is_cut": not terminated, "final_state": {"obs": np.int64(numbers.stop)}}
    end |= {"bootstrap_value": None if terminated else np.float32(0.5)}
    episode = Episode(columns=columns, multiplier=1.0, **of_entries, **end)
    return Fragment(client, numbers.start, episode, np.full(count, 1.5, np.float32), 0.0)


class TakesServer:
    """Dispatcher of a server with one table of rollouts, and requests of its readers."""

    def __init__(self, capacity=1000, **limits):
        self.now = 2.0
        settings = {"rollouts": Table(SCHEMA, storage="rollouts", capacity=capacity)}
        self.tables = Tables(settings, lambda _, table: RolloutPool(SCHEMA, capacity=capacity, clock=lambda: self.now))
        self.limits = Limits.of(**limits)
        facts = {"run": "run", "name": "home", "clock": lambda: NOW, "epoch": 7}
        self.dispatcher = Dispatcher(tables=self.tables, limits=self.limits, **facts)
        self.pool = self.tables.numbered(TABLE).pool
        self.numbers = {}

    def push(self, client, numbers, **how):
        piece = fragment(client, numbers, **how)
        self.pool.add(client, piece.number, CheckedEpisode(piece.episode, piece.age, len(piece)))

    def ask(self, reader=READER, *, again=False, **what):
        self.numbers[reader] = self.numbers.get(reader, 0) + (not again)
        frames = encode(fragments.Take(**what), client=reader, sequence=self.numbers[reader], table=TABLE)
        return self.dispatcher.answer(parse(frames))

    def got(self, reply):
        assert isinstance(reply.body, fragments.RolloutsReply), reply.body
        return unpacked(reply.body.fragments, reply.payload, SCHEMA, now=5.0, limits=self.limits)
