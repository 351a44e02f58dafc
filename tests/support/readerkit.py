"""Helpers for tests of a reader's decisions: addresses, messages of servers, and servers made of a pool alone."""

import itertools
import random

import numpy as np

from memoire.errors import Refused
from memoire.limits import Limits
from memoire.reader.directory import Directory
from memoire.reader.rounds import BatchQueue, Rounds
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.caches.pool import Pool
from memoire.wire import containers, messages
from memoire.wire.frames import Message, MessageHeader, name_hash
from memoire.wire.rows import unpack_counts

SCHEMA = Schema({"obs": (np.float32, (3,)), "action": np.int32, "reward": np.float32})
OTHER = Schema({"obs": (np.float32, (4,)), "action": np.int32})
PARAMETERS = Parameters(cache_size=64, importance_exponent=1.0)
RUN = name_hash("one")
READER = b"r" * 16


def message(body, run=RUN, payload=None):
    header = MessageHeader(body.type, 0, READER, run, 0, 1, 0, 0, 0)
    return Message(header, body, payload)


def welcome(name="a", servers=(), schema=SCHEMA, parameters=PARAMETERS, **facts):
    """Return a server's WELCOME, with facts about its table."""
    fields = {
        "home_name": name,
        "servers": list(servers),
        "schema": schema.to_json(),
        "parameters": parameters.to_wire(),
    }
    return messages.Welcome(**fields | facts)


def learn(directory, body, now=0.0, address=0, run=RUN):
    """Have a directory take a WELCOME, as the reader's thread does."""
    news = directory.apply_welcome(directory.addresses[address], message(body, run).header, body, now)
    if news is not None:
        directory.set_terms(news[0])
    return news


def directory_of(*names, now=0.0):
    """Return a directory of one address with these servers behind it."""
    directory = Directory(["tcp://a"], "reader", now)
    learn(directory, welcome(names[0], names), now)
    return directory


def refused(code):
    return Refused("tcp://a", code, "no")


def push_caches(pool, client, caches=1, number=0):
    """Push caches of 50 entries, each of which holds the client's number."""
    memory = Memory(SCHEMA, 50, pool.parameters, seed=client)
    memory.open(0)
    for step in range(50):
        memory.add(0, (np.full(3, step, np.float32), client, 1.0))
    memory.close(0)
    for place in range(caches):
        held = containers.check(containers.build(memory, 64, now=0.0), pool.layout)
        pool.add(bytes([client]) * 16, number + place + 1, held)


class PoolServer:
    """Server that is only its pool; answers SUMS and DRAW."""

    def __init__(self, clients, caches=4, seed=1, parameters=PARAMETERS):
        self.parameters, self.pool = parameters, Pool(SCHEMA, parameters, seed=seed)
        for client in clients:
            self.push(client, caches)
        self.epoch, self.finished, self.standing = 1, False, None
        self.asked, self.given = [], 0

    def push(self, client, caches=1):
        push_caches(self.pool, client, caches)

    def answer(self, body):
        self.asked.append(body)
        payload = None
        if isinstance(body, messages.Draw):
            payload = self.pool.draw_counts(READER, unpack_counts(body.counts))
            self.given += 0 if payload is None else containers.samples_of(payload)
        table = self.pool.reserve(READER, body.reserve, body.elsewhere, (body.part, body.of), body.wanted)
        facts = {"epoch": self.epoch, "clients": table.tobytes(), "finished": self.finished, "standing": self.standing}
        facts["parameters"] = self.parameters.fingerprint
        reply_type = messages.Drawn if isinstance(body, messages.Draw) else messages.Summed
        return message(reply_type(**facts), payload=payload)


class World:
    """Rounds over servers that are pools; `answer` delivers the replies."""

    def __init__(self, servers, *, ahead=1, batch_size=32, partition=(0, 1), seed=3, parameters=PARAMETERS):
        self.servers, self.now = dict(servers), 10.0
        self.directory = Directory(["tcp://a"], "reader", 0.0)
        names = list(self.servers)
        learn(self.directory, welcome(names[0], names, parameters=parameters))
        self.prefetch = BatchQueue(ahead)
        self.prefetch.resize(batch_size)
        facts = {"limits": Limits(), "numbers": itertools.count(1), "rng": random.Random(seed)}
        self.rounds = Rounds(self.directory, self.prefetch, partition, **facts)
        self.open = []

    def begin(self):
        """Begin rounds as needed; return the requests to send."""
        asks = self.rounds.begin(self.now)
        self.open += asks
        return asks

    def answer(self, *asks, by=None):
        """Answer these open requests, by default all, by their servers or with `by`; return the finished rounds."""
        for ask in asks or list(self.open):
            self.open.remove(ask)
            self.rounds.receive_answer(ask, by or self.servers[ask.stock.server.name].answer(ask.body), self.now)
        rounds = self.rounds.finished()
        for drawn in rounds:
            self.prefetch.put(drawn)
        return rounds

    def turn(self):
        self.begin()
        return self.answer()

    def run(self, batches):
        drawn = []
        for _ in range(40 * batches):
            if len(drawn) == batches:
                break
            self.turn()
            self.now += 0.06
            while len(self.prefetch):
                drawn.append(self.prefetch.first())
                self.prefetch.take()
        return drawn
