"""The bytes that a server holds for its peers: asked for before they are allocated, and named by holder."""

import tracemalloc

import pytest

from bytekit import KINDS, PUSHED, frames_of, tables_of
from dispatchkit import cache_of
from memoire.accounting.ledger import ACCOUNT_BYTES
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.server import build
from memoire.server.dispatch import Dispatcher
from memoire.tables.caches.pool import Pool
from memoire.wire import messages
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.containers import unpacked_bytes
from memoire.wire.frames import parse
from netkit import SCHEMA
from serverkit import server_options

CACHES = Parameters(cache_size=64)
CLIENTS, REQUESTS, SMALL_REQUESTS = 4, 40, 600
LIMITS = Limits(message_bytes=1 << 15, held_bytes=1 << 18, model_bytes=1 << 16, expected_clients=CLIENTS)
SMALL = {"smallest_caches", "smallest_rollouts", "newcomers", "td_errors", "models_that_do_not_end", "packed_episodes"}
"""Kinds of which many make the largest use of memory."""


def dispatcher_of(tables, limits=LIMITS):
    made = build.make_tables(server_options(schema=None, tables=tables, limits=limits, byte_limit=limits.held_bytes))
    return Dispatcher(tables=made, run="run", name="home", limits=limits, clock=lambda: 1000.0, epoch=1)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_every_kind_at_their_largest_take_no_more_than_the_budget(kind):
    dispatcher = dispatcher_of(tables_of(kind, LIMITS.message_bytes))
    peers = [KINDS[kind](number, LIMITS.message_bytes) for number in range(CLIENTS)]
    asked = [next(requests) for requests in peers]
    held = peak = 0
    tracemalloc.start()
    try:
        for number in range(SMALL_REQUESTS if kind in SMALL else REQUESTS):
            place = number % CLIENTS
            frames = frames_of(asked[place], 1 + place, number + 1)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            reply = answer(dispatcher, frames)
            now, most = tracemalloc.get_traced_memory()
            peak, held = max(peak, held + most - before), held + now - before
            asked[place] = peers[place].send(reply)
    finally:
        tracemalloc.stop()
    holders = dispatcher.budget.holders()
    on_way = CLIENTS * LIMITS.message_bytes
    assert peak < 1.1 * LIMITS.held_bytes + on_way, (kind, peak, holders)
    assert sum(holders.values()) == dispatcher.budget.used >= 0.8 * held - on_way, (kind, held, holders)


@pytest.mark.parametrize("kind", ["packed_caches", "packed_episodes", "packed_rollouts"])
def test_what_is_pushed_asks_for_its_unpacked_size_before_it_is_copied(kind):
    limits = Limits(message_bytes=1 << 20, held_bytes=1 << 22)
    dispatcher = dispatcher_of(tables_of(kind, limits.message_bytes), limits)
    request = next(KINDS[kind](1, limits.message_bytes))
    packed, unpacked = request[2].nbytes, unpacked_bytes(request[2])
    assert unpacked > 5 * packed
    dispatcher.pushes.add(dispatcher.pushes.room - unpacked + 1)  # what other threads check now
    before = dispatcher.budget.used
    tracemalloc.start()
    assert answer(dispatcher, frames_of(request, 1, 1)) == "busy"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < packed + 100_000
    assert dispatcher.budget.used - before <= ACCOUNT_BYTES  # its client's rejections are counted
    dispatcher.pushes.add(-1)
    assert answer(dispatcher, frames_of(request, 1, 2)) is None


def answer(dispatcher, frames):
    """The body of the reply to a message; the code of the refusal of one that is pushed, or None."""
    message = parse(frames, LIMITS, verify_payload=False)
    if not isinstance(message.body, PUSHED):
        return dispatcher.answer(message).body
    try:
        dispatcher.arrived(message.header, message.body, message.payload)
    except ProtocolError as error:
        return error.code
    return None


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
