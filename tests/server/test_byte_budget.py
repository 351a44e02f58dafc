"""The bytes that a server holds for its peers: asked for before they are allocated, and named by holder."""

import tracemalloc

import pytest

from bytekit import ANSWERS, KINDS
from dispatchkit import cache_of
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.pool.caches import Pool
from memoire.pool.prompts import PromptPool
from memoire.pool.tables import Table, Tables
from memoire.replay.parameters import Parameters
from memoire.server.dispatch import Dispatcher
from memoire.wire import messages
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.frames import encode, parse
from memoire.wire.identity import table_number
from netkit import SCHEMA

CACHES = Parameters(cache_size=64)
LIMITS = Limits(message_bytes=1 << 15, held_bytes=1 << 18)
CLIENTS, REQUESTS = 4, 40


def dispatcher_of(limits=LIMITS):
    def pool_of(name, table):
        if name == "prompts":
            return PromptPool(table.schema, table.parameters, table.prompts, byte_limit=limits.held_bytes // 2)
        return Pool(table.schema, table.parameters, byte_limit=limits.held_bytes // 2, seed=0)

    tables = Tables({"prompts": Table(ANSWERS, storage="prompts"), "default": Table(SCHEMA)}, pool_of)
    return Dispatcher(tables=tables, run="run", name="home", limits=limits, clock=lambda: 1000.0, epoch=1)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_every_kind_at_their_largest_take_no_more_than_the_budget(kind):
    dispatcher = dispatcher_of()
    peers = [KINDS[kind](number, LIMITS.message_bytes) for number in range(CLIENTS)]
    asked = [next(requests) for requests in peers]
    held = peak = 0
    tracemalloc.start()
    try:
        for number in range(REQUESTS):
            place = number % CLIENTS
            name, body, payload = asked[place]
            facts = {"client": bytes([1 + place]) * 16, "sequence": number + 1}
            frames = encode(body, table=table_number(name) if name else 0, payload=payload, **facts)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            reply = dispatcher.answer(parse(frames, LIMITS)).body
            now, most = tracemalloc.get_traced_memory()
            peak, held = max(peak, held + most - before), held + now - before
            asked[place] = peers[place].send(reply)
    finally:
        tracemalloc.stop()
    holders = dispatcher.budget.holders()
    on_way = 2 * CLIENTS * LIMITS.message_bytes
    assert peak < 1.1 * LIMITS.held_bytes + on_way, (kind, peak, holders)
    assert sum(holders.values()) == dispatcher.budget.used >= 0.8 * held - on_way, (kind, held, holders)


def test_a_holder_without_room_is_refused_by_name_and_the_oldest_caches_give_way():
    budget = ByteBudget(1000)
    rows, own = budget.holder("rows"), budget.holder("requests", own=100)
    own.take(100)
    rows.take(600)
    with pytest.raises(
        ProtocolError, match=r"401 more bytes of requests have no room: 1,000 .*: rows 600, requests 100"
    ) as why:
        own.take(401)
    assert why.value.code == "busy" and (budget.used, budget.limit, budget.free) == (700, 1100, 400)
    with pytest.raises(ProtocolError) as why, rows.taken(400), rows.taken(1):
        pass
    assert why.value.code == "busy" and rows.bytes == 600
    with pytest.raises(ProtocolError) as why:
        rows.take(1001)
    assert why.value.code == "too_large"


def test_caches_give_way_to_half_of_what_they_may_hold():
    payload = cache_of()
    budget, pool = ByteBudget(20 * payload.nbytes), Pool(SCHEMA, CACHES, byte_limit=20 * payload.nbytes, seed=0)
    pool.join(budget, "table default")
    rows = budget.holder("rows")
    for number in range(40):
        pool.add(bytes(16), number, pool.check(messages.Cache(number=1), payload))
        assert pool.stats().bytes <= budget.holders()["table default"] <= budget.most
    rows.take(5 * payload.nbytes)
    assert 10 * payload.nbytes <= pool.stats().bytes <= 15 * payload.nbytes and budget.free >= 0
    rows.take(5 * payload.nbytes)
    with pytest.raises(ProtocolError, match="table default"):
        rows.take(payload.nbytes)
    pool.add(bytes(16), 99, pool.check(messages.Cache(number=1), payload))
    assert pool.stats().bytes <= 10 * payload.nbytes and budget.free >= 0
