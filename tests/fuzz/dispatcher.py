"""Requests to a server: each row of valid messages is answered or refused, and leaves the server consistent.

The bytes are decisions (see `choices`): up to twelve messages of a few clients, with any values in their fields.
"""

import math
import random

import numpy as np

import make_vectors
from fuzz.choices import Choices
from memoire.accounting.merge import merge
from memoire.accounting.runs import format_line
from memoire.errors import NotEnoughSamples, ProtocolError
from memoire.limits import Limits
from memoire.replay.batch import ID
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.server.dispatch import Dispatcher
from memoire.tables.caches.pool import Pool
from memoire.tables.episodes.pool import EpisodePool
from memoire.tables.table import Table, Tables
from memoire.wire import _bytes, containers, messages
from memoire.wire.frames import CODES, NO_CLIENT, encode, name_hash, parse, table_number
from memoire.wire.frames import reply as encode_reply
from memoire.wire.rows import ACCOUNT, CLIENT_COUNTS, unpack_accounts

REACHED = {"both"}
LIMITS = Limits.of(model_chunk=50, model_bytes=10_000, message_bytes=1 << 20)
SCHEMA = make_vectors.SCHEMA
WINDOWS = Parameters(frame_stack=2, multi_step=2)
MODEL = b"a model of some bytes, in one piece or in two"
NAMES = tuple(Parameters().to_wire())
ROLES = ("actor", "actor", "reader", "publisher", "king")
CLIENTS = (b"a" * 16, b"b" * 16, b"c" * 16)
REQUESTS = (
    messages.Hello, messages.Update, messages.Update, messages.Fetch, messages.Publish, messages.Sums, messages.Draw, messages.Feedback, messages.Control,
    messages.LedgerRequest, messages.Inherit, messages.Cache, messages.EpisodePush, messages.Cache, messages.TakeSnapshot, messages.Welcome,
)  # fmt: skip


def seeds() -> list[bytes]:
    rng = random.Random(0)
    return [rng.randbytes(1000) for _ in range(32)]


def _cache() -> bytes:
    memory = Memory(SCHEMA, 50, WINDOWS.replace(cache_size=16), seed=0)
    memory.open()
    for step in range(20):
        memory.add(0, (np.full(2, step, np.uint8), np.int32(0), np.float32(1)))
    memory.close(terminated=True)
    return containers.build(memory, now=0.0).tobytes()


def _episode() -> bytes:
    columns = {"obs": np.zeros((5, 2), np.uint8), "action": np.zeros(5, np.int32), "reward": np.ones(5, np.float32)}

    def fill(name, target):
        target[:] = columns[name].reshape(-1).view(np.uint8)

    ones = np.ones(5, np.float32)
    return containers.pack_episode(SCHEMA, fill, ones, ones, np.ones(5, np.int64), now=0.0).tobytes()


def _feedback() -> bytes:
    ids = np.zeros(4, ID)
    ids["client"][:2] = np.frombuffer(CLIENTS[0], "<u8")
    ids["client"][2:] = np.frombuffer(CLIENTS[1], "<u8")
    return containers.pack_feedback(SCHEMA, ids, np.ones(4, np.float32)).tobytes()


CACHE, EPISODE, FEEDBACK = _cache(), _episode(), _feedback()


def _hostile_cache(choices: Choices) -> bytes:
    """Return a cache whose head has any sums that a server accepts."""
    cache = bytearray(CACHE)
    np.frombuffer(cache, "<f8", 1, 8)[:] = choices.pick((1.7e308, 5e-300, 20.0, 1e16))
    np.frombuffer(cache, "<u8", 1, 16)[:] = choices.integer(1, 2**53 - 1)
    np.frombuffer(cache, "<f8", 1, 24)[:] = choices.pick((5e-324, 1e-300, 1.0))
    return bytes(cache)


def _payload(kind: type[messages.Body], choices: Choices) -> bytes | None:
    if kind is messages.Cache:
        return CACHE if choices.below(2) else _hostile_cache(choices)
    if kind is messages.EpisodePush:
        return EPISODE
    if kind is messages.Feedback:
        return FEEDBACK
    if kind is messages.Publish:
        return choices.pick((MODEL, MODEL[:30], MODEL[30:]))
    return None


def _body(kind: type[messages.Body], choices: Choices) -> messages.Body:
    """Return a body with any values in it; packed rows are complete."""
    if kind in (messages.Sums, messages.Draw):
        of = choices.integer(1, 2**32 - 1)
        fixed = {"of": of, "part": choices.integer(0, of - 1)}
        if kind is messages.Draw:
            counts = np.zeros(choices.below(4), CLIENT_COUNTS)
            for i in range(len(counts)):
                counts[i]["client"] = np.frombuffer(CLIENTS[i], "<u8")
                counts[i]["count"] = choices.below(30) or choices.integer(0, 2**32 - 1)
            fixed["counts"] = counts.tobytes()
        return choices.struct(kind, **fixed)
    if kind in (messages.Inherit, messages.Accounts):
        rows = np.zeros(choices.below(4), ACCOUNT)
        for row in rows:
            row["client"] = np.frombuffer(choices.pick(CLIENTS), "<u8")
            for name in ("home", "episodes", "steps", "pushed_caches", "received_bytes"):
                row[name] = choices.integer(0, 2**53 - 1)
            row["returns_sum"] = choices.pick((0.0, 1.7e308, -1.7e308))
        return choices.struct(kind, accounts=rows.tobytes())
    if kind is messages.Hello:
        return choices.struct(kind, table=choices.pick(("", "default", "whole", "none")), role=choices.pick(ROLES))
    if kind is messages.Publish:
        size = choices.pick((len(MODEL), len(MODEL), 0, 2**53 - 1))
        topic, checksum = choices.pick(("policy", "p" * 255, "\n")), _bytes.checksum(MODEL)
        return choices.struct(
            kind, topic=topic, size=size, checksum=checksum, offset=choices.pick((0, 0, 30, 2**53 - 1))
        )
    if kind is messages.Control:
        return choices.struct(
            kind, parameters={choices.pick(NAMES): _setting(choices) for _ in range(choices.below(3))}
        )
    return choices.struct(kind)


def _setting(choices: Choices) -> object:
    integer = choices.integer(0, 2**63 - 1)
    return choices.pick((choices.real(), integer, bool(choices.below(2)), choices.text(), None, [0.5], ["obs"], []))


def dispatcher_of(parameters: Parameters) -> Dispatcher:
    settings = {
        "default": Table(SCHEMA, parameters=parameters),
        "whole": Table(SCHEMA, storage="episodes", capacity=64, byte_limit=1 << 16),
    }

    def pool(name: str, table: Table) -> Pool | EpisodePool:
        if table.storage == "episodes":
            return EpisodePool(SCHEMA, table.parameters, capacity=64, byte_limit=1 << 16, seed=0)
        return Pool(SCHEMA, table.parameters, seed=0, byte_limit=1 << 20)

    return Dispatcher(tables=Tables(settings, pool), run="run", name="home", limits=LIMITS, clock=lambda: 1e9, epoch=1)


def _tell(dispatcher: Dispatcher, choices: Choices) -> str:
    """Send one message as wire frames; return "answered" or "refused"."""
    kind = choices.pick(REQUESTS)
    table = "whole" if kind is messages.EpisodePush or not choices.below(4) else "default"
    facts = {
        "client": choices.pick(CLIENTS) if choices.below(8) else NO_CLIENT,
        "sequence": choices.integer(0, 2**64 - 1),
        "run": choices.pick((0, 0, dispatcher.run, dispatcher.run, name_hash("other"))),
        "table": table_number(table),
        "fingerprint": SCHEMA.fingerprint if choices.below(8) else 0,
    }
    try:
        body, payload = _body(kind, choices), _payload(kind, choices)
        message = parse(encode(body, payload=payload, **facts), LIMITS)
    except ProtocolError:
        return "refused"
    except ValueError:  # no message of this kind
        return "refused"
    if isinstance(message.body, messages.Cache | messages.EpisodePush):
        try:
            dispatcher.accept_push(message.header, message.body, message.payload)
        except ProtocolError as error:
            dispatcher.refuse(error)
            return "refused"
        return "answered"
    reply = dispatcher.answer(message)
    parse(encode_reply(message.header, reply.body, payload=reply.payload, **reply.changed))
    return "refused" if isinstance(reply.body, messages.Refusal) else "answered"


def _check(dispatcher: Dispatcher) -> None:
    """Make the queries that clients may make at any time; assert that the server is consistent."""
    for facts in dispatcher.runs.facts():
        run = dispatcher.runs.named(facts.name)
        assert run is not None
        run.ledger.check_invariants()
        totals = run.ledger.totals()
        assert math.isfinite(totals.returns_sum)
        rows = np.concatenate([merge(), *dispatcher.pages(run)])
        unpack_accounts(rows.tobytes())
        merge(rows, rows)
        for entry in run.logbook.recent():
            assert len(format_line(entry.received, entry.line.label, entry.line.text).splitlines()) == 1
    dispatcher.models.check_invariants()
    dispatcher.learners.active_learners(1e9)
    assert set(dispatcher.refused) <= {*CODES, "other"}
    for table in dispatcher.tables:
        table.pool.stats()
        table.pool.entries()
        try:
            pooled = table.pool.get(4)
        except NotEnoughSamples:
            continue
        assert np.isfinite(pooled.importance).all() and np.isfinite(pooled.gathered.weight).all()
        assert 0.0 <= pooled.left_out <= 1.0


def one(data: bytes) -> str:
    """Send up to twelve messages, then check the server."""
    choices = Choices(data)
    dispatcher = dispatcher_of(
        choices.pick((WINDOWS, WINDOWS.replace(reuse_cache=True), WINDOWS.replace(max_times_sampled=3)))
    )
    verdicts = set()
    for _ in range(12):
        if choices:
            verdicts.add(_tell(dispatcher, choices))
    _check(dispatcher)
    return "both" if len(verdicts) == 2 else next(iter(verdicts), "nothing")
