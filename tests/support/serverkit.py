"""Helpers for tests of a server's handlers: its state without a dispatcher, and messages as wire frames."""

import inspect

from fake_store import Disk, MemoryStore
from memoire.limits import Limits
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.server.build import ServerOptions
from memoire.server.dispatch import Dispatcher
from memoire.server.handlers.accounts import FeedbackHandler
from memoire.server.handlers.clients import ClientsHandler
from memoire.server.handlers.control import ControlHandler, ModelsHandler
from memoire.server.settings import Endpoints, Process, State
from memoire.server.state import ClientOwners, Committer, Credits, ServerState
from memoire.tables.registry import PoolPlace
from memoire.tables.table import Table, Tables
from memoire.wire import containers, messages
from memoire.wire.frames import encode, name_hash, parse
from netkit import SCHEMA, entry

NOW = 1000.0
ME, YOU, READER = b"m" * 16, b"y" * 16, b"r" * 16
PARAMETERS = Parameters(cache_size=8)
RUN = name_hash("run")
NEXT = name_hash("next")


def tables_of(**settings):
    """Return tables with their own pools: by default caches in "default" and episodes in "whole"."""
    whole = Table(SCHEMA, parameters=PARAMETERS, storage="episodes", capacity=64)
    settings = settings or {"default": Table(SCHEMA, parameters=PARAMETERS), "whole": whole}
    return Tables(settings, lambda name, each: each.kind.make_pool(each, PoolPlace(name, 1 << 20, Limits(), seed=0)))


def dispatcher_of(tables=None, **facts):
    """Return a dispatcher of a server "home" in run "run", under a clock that stands still."""
    usual = {"run": "run", "name": "home", "limits": Limits(), "clock": lambda: NOW, "epoch": 7}
    return Dispatcher(tables=tables or tables_of(), **usual | facts)


def state_of(tables=None, *, store=None, limits=None, run="run", epoch=7):
    """Return the state of a server "home" in run "run"."""
    limits = limits or Limits.of(model_chunk=10, model_bytes=1000)
    facts = {"name": "home", "run": run, "now": NOW, "epoch": epoch if store is None else store.epoch}
    return ServerState(tables=tables or tables_of(), limits=limits, committer=Committer(store), past=store, **facts)


def store_of(disk=None):
    """Return a state store in memory; `save` saves into its disk."""
    return MemoryStore(disk or Disk())


def save(state, disk):
    """Save all changes to the disk, and call the tickets that wait; return the number of groups."""
    count = 0
    while (group := state.committer.collect(state.runs)) is not None:
        disk.save(group)
        state.committer.mark_saved(state.runs)
        for ticket in group.tickets:
            ticket()
        count += 1
    return count


class Ends:
    """Handlers of one server's state that clients reach, and records of their callbacks."""

    def __init__(self, state):
        self.state, self.lines, self.shown, self.news = state, [], [], []
        self.credits, self.owners, self.feedback = Credits(state), ClientOwners(state), FeedbackHandler(state)
        self.models = ModelsHandler(state, on_model=self.shown.append, after=state.committer.call_after_save)
        self.control = ControlHandler(state, self.models, self.feedback, lambda: self.news.append(1))
        ways = {"endpoints": lambda: messages.NodeEndpoints(request="tcp://home"), "on_lines": self.lines.append}
        self.clients = ClientsHandler(state, self.credits, self.owners, self.feedback, **ways)
        self._number = 0

    def hello(self, client=ME, now=NOW, **facts):
        return self._ask(self.clients.hello, messages.Hello(**facts), client, now)

    def update(self, client=ME, now=NOW, run=0, table=0, **facts):
        return self._ask(self.clients.update, messages.Update(**facts), client, now, run=run, table=table)

    def _ask(self, handler, body, client, now, **header):
        self._number += 1
        return ask(handler, body, client, now=now, number=self._number, **header)


def message(body, client=ME, *, number=1, payload=None, **header):
    return parse(encode(body, client=client, sequence=number, payload=payload, **header))


def ask(handler, body, client=ME, *, now=NOW, number=1, payload=None, **header):
    parsed = message(body, client, number=number, payload=payload, **header)
    return handler(now, parsed.header, parsed.body, parsed.payload)


def cache_of(entries=20, parameters=PARAMETERS):
    memory = Memory(SCHEMA, 100, parameters, seed=0)
    memory.open()
    for step in range(entries):
        memory.add(0, entry(SCHEMA, step))
    memory.close(terminated=True)
    return containers.build(memory, now=0.0)


def server_options(kind=ServerOptions, **changes):
    """Return a server's options: `changes`, and the defaults of all other options."""
    own = set(inspect.signature(ServerOptions).parameters)
    options = dict.fromkeys(own) | {"schema": SCHEMA, "limits": Limits(), "inference": ()} | changes
    options |= {"endpoint": Endpoints.from_setting(options["endpoint"]), "state": State.from_setting(options["state"])}
    options["process"] = options["process"] or Process()
    table = {name: options.pop(name) for name in changes if name not in own}
    return kind(**options | {"table": table})
