"""What the tests of a server's decisions share: who asks as a client would, and a cache that arrives."""

import numpy as np

from memoire.limits import HELD_BYTES, Limits
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.server.dispatch import Dispatcher
from memoire.tables.registry import PoolPlace
from memoire.tables.table import Table, Tables
from memoire.wire import containers, messages
from memoire.wire.frames import encode, parse
from netkit import SCHEMA

ME, YOU = b"m" * 16, b"y" * 16


class Asker:
    """Asks a dispatcher as a client would: through the wire's own frames, and again where it is told to."""

    def __init__(self, dispatcher, client=ME):
        self.dispatcher, self.client, self.number = dispatcher, client, 0

    def ask(self, body, *, again=False, run=0, payload=None):
        self.number += not again
        frames = encode(body, client=self.client, sequence=self.number, run=run, payload=payload)
        return self.dispatcher.answer(parse(frames))


def made_dispatcher(told, clock=lambda: 1000.0, table=None):
    """A dispatcher that tells its lines and models, of one table."""
    settings = {"default": table or Table(SCHEMA, parameters=Parameters(cache_size=64))}
    tables = Tables(settings, lambda name, each: each.kind.make_pool(each, PoolPlace(name, HELD_BYTES, Limits(), 0)))
    return Dispatcher(
        tables=tables,
        run="run",
        name="home",
        limits=Limits.of(model_chunk=10, model_bytes=1000),
        on_lines=told["lines"].extend,
        on_model=told["models"].append,
        clock=clock,
        epoch=1,
    )


def cache_of(entries=20):
    memory = Memory(SCHEMA, 100, Parameters(cache_size=64), seed=0)
    memory.open()
    for step in range(entries):
        memory.add(0, (np.full(4, step, np.float32), np.int32(0), np.float32(1)))
    memory.close(terminated=True)
    return containers.build(memory, now=0.0)


def arrive(dispatcher, payload, **changed):
    facts = {"client": ME, "fingerprint": SCHEMA.fingerprint, "sequence": 1} | changed
    message = parse(encode(messages.Cache(number=1, pushed_bytes=payload.nbytes), payload=payload, **facts))
    return dispatcher.arrived(message.header, message.body, message.payload)
