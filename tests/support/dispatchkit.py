"""Helpers for tests of a server's dispatcher: a client that asks through wire frames, and an arriving cache."""

import functools

import serverkit
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.tables.table import Table
from memoire.wire import messages
from memoire.wire.frames import encode, parse
from netkit import SCHEMA
from serverkit import ME, dispatcher_of, tables_of

CACHES = Parameters(cache_size=64)
cache_of = functools.partial(serverkit.cache_of, parameters=CACHES)


class Asker:
    """Client that sends requests to a dispatcher as wire frames; with `again` a request repeats the last number."""

    def __init__(self, dispatcher, client=ME):
        self.dispatcher, self.client, self.number = dispatcher, client, 0

    def ask(self, body, *, again=False, run=0, payload=None):
        self.number += not again
        frames = encode(body, client=self.client, sequence=self.number, run=run, payload=payload)
        return self.dispatcher.answer(parse(frames))


def made_dispatcher(records=None, table=None, **facts):
    """Return a dispatcher of one table; `records` collects its log lines and models."""
    records = records or {"lines": [], "models": []}
    facts = {"limits": Limits.of(model_chunk=10, model_bytes=1000), "epoch": 1} | facts
    facts |= {"on_lines": records["lines"].extend, "on_model": records["models"].append}
    return dispatcher_of(tables_of(default=table or Table(SCHEMA, parameters=CACHES)), **facts)


def arrive(dispatcher, payload, **changed):
    facts = {"client": ME, "fingerprint": SCHEMA.fingerprint, "sequence": 1} | changed
    message = parse(encode(messages.Cache(number=1, pushed_bytes=payload.nbytes), payload=payload, **facts))
    return dispatcher.accept_push(message.header, message.body, message.payload)
