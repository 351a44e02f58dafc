"""Dispatch of messages: their handlers, refusals, requests that are granted once, and bytes that requests take."""

import sys
import threading
import tracemalloc

import numpy as np
import pytest

from bytekit import KINDS, PUSHED, frames_of
from bytekit import tables_of as largest_tables
from dispatchkit import CACHES, Asker, made_dispatcher
from fake_store import Disk
from memoire.accounting.ledger import ACCOUNT_BYTES
from memoire.errors import ProtocolError
from memoire.keyed import messages as keyed
from memoire.limits import Limits
from memoire.prompts import messages as prompt_messages
from memoire.replay.batch import ID
from memoire.server import build
from memoire.server.dispatch import IDLE_TIMEOUT, KEPT_ROWS, MAX_ROWS, ReplyCache
from memoire.server.handlers.accounts import FEEDBACK_SAMPLES
from memoire.tables.caches.pool import Pool
from memoire.tables.registry import BUILT_IN, Reply
from memoire.tables.rollouts import fragments
from memoire.tables.table import Table
from memoire.wire import messages
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.containers import unpacked_bytes
from memoire.wire.frames import NO_CLIENT, parse
from netkit import SCHEMA
from serverkit import ME, PARAMETERS, READER, RUN, YOU, cache_of, dispatcher_of, message, server_options, store_of

# --- Handlers of messages, refusals, and work with the lock held

MAX_CALLS = 26
"""Maximum calls of memoire's Python functions for one accepted cache."""


@pytest.fixture
def dispatcher():
    return dispatcher_of()


def is_free(lock):
    """Return True if another thread can take the lock now."""
    entered = []

    def look():
        with lock:
            entered.append(True)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(0.1)
    return bool(entered)


@pytest.mark.parametrize(
    ("body", "facts", "code"),
    [
        (messages.Taken(), {}, "unexpected"),
        (messages.Cache(), {"payload": b"x"}, "unexpected"),
        (messages.TakeSnapshot(name="a", order=bytes(16)), {}, "unexpected"),
        (messages.LedgerRequest(), {"client": NO_CLIENT}, "client"),
        (messages.LedgerRequest(), {"run": 5}, "run"),
        (messages.Update(), {"run": 5}, "run"),
        (messages.Update(), {"table": 5}, "table"),
        (messages.Sums(), {"table": 5}, "table"),
        (messages.Sums(), {"fingerprint": 1}, "schema"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_counted(dispatcher, body, facts, code):
    reply = dispatcher.answer(message(body, **facts))
    assert reply.body.code == code and dispatcher.refused == {code: 1} and not reply.until_saved


def test_hello_is_answered_whatever_run_it_names(dispatcher):
    assert dispatcher.answer(message(messages.Hello(), run=5)).body.run_name == "run"


def test_a_code_that_no_peer_knows_is_counted_as_another(dispatcher):
    reply = dispatcher.refuse(ProtocolError("unheard of", "x" * 2000))
    assert reply.body.code == "unheard of" and len(reply.body.text) == 1000 and dispatcher.refused == {"other": 1}


def test_what_would_change_something_twice_is_granted_once(dispatcher):
    handler, granted = dispatcher.handlers[messages.Control], []

    def control(*request):
        granted.append(is_free(dispatcher._grant_lock))
        return handler(*request)

    dispatcher.handlers[messages.Control] = control
    first, again = (dispatcher.answer(message(messages.Control(finish=True), number=4)) for _ in range(2))
    assert first is again and granted == [False]
    dispatcher.answer(message(messages.Control(finish=True), number=5))
    dispatcher.answer(message(messages.Control(finish=True), YOU, number=4))
    assert granted == [False] * 3
    assert dispatcher.answer(message(messages.Control(run="\n"), number=6)).body.code == "parameters"
    assert dispatcher.answer(message(messages.Control(), number=6)).body.finished, "it was refused, not granted"


@pytest.mark.parametrize(
    "body",
    [
        messages.Hello(),
        messages.Update(),
        messages.Fetch(topic="t"),
        messages.Publish(topic="t", size=1, checksum=0),
        messages.Control(),
        messages.LedgerRequest(),
        messages.Inherit(run_name="run"),
        messages.Sums(),
        messages.Draw(),
    ],
)
def test_handlers_are_called_with_the_lock_and_draws_are_made_without_it(dispatcher, body):
    """Caches can arrive while samples are drawn."""
    is_draw = isinstance(body, (messages.Sums, messages.Draw))
    handlers, seen = dispatcher.unlocked if is_draw else dispatcher.handlers, []
    handler = handlers[type(body)]
    handlers[type(body)] = lambda *request: seen.append(is_free(dispatcher.lock)) or handler(*request)
    dispatcher.answer(message(body, READER, payload=b"x" if isinstance(body, messages.Publish) else None))
    assert seen == [is_draw] and is_free(dispatcher.lock)


OF_KINDS = [
    (messages.Sums(), "caches and episodes"),
    (messages.Draw(), "caches and episodes"),
    (fragments.Take(steps=4), "rollouts"),
    (prompt_messages.PromptsRequest(call="counts"), "prompts"),
    (keyed.FindRows(call="tags"), "keyed"),
    (keyed.ChangeRows(call="reset"), "keyed"),
]
"""Requests, and the kinds of tables that answer them."""


@pytest.mark.parametrize("storage", BUILT_IN)
def test_a_request_that_is_for_tables_of_other_kinds_says_so(storage):
    columns = {"answer": np.float32} if storage == "prompts" else None if storage == "keyed" else SCHEMA
    asker = Asker(made_dispatcher(table=Table(columns, storage=storage)))
    for body, kinds in OF_KINDS:
        if storage not in kinds:
            refused = asker.ask(body).body
            text = f"table 'default' has storage={storage!r}; {body.type.name} is for {kinds}"
            assert (refused.code, refused.text) == ("table", text)


def test_a_cache_is_checked_without_the_lock_and_held_with_it(dispatcher):
    pool, seen = dispatcher.tables.first.pool, []
    check, add = pool.check, pool.add
    pool.check = lambda *args, **facts: seen.append(is_free(dispatcher.lock)) or check(*args, **facts)
    pool.add = lambda *args: seen.append(is_free(dispatcher.lock)) or add(*args)
    push = message(messages.Cache(number=1), payload=cache_of(), fingerprint=SCHEMA.fingerprint, run=RUN)
    assert dispatcher.accept_push(push.header, push.body, push.payload) == 8
    assert seen == [True, False]


def test_a_cache_takes_few_calls_of_python(dispatcher):
    """The interpreter takes a quarter of the time for caches of W1; the number of calls shows this on any machine."""
    push = message(messages.Cache(number=1), payload=cache_of(), fingerprint=SCHEMA.fingerprint, run=RUN)
    dispatcher.accept_push(push.header, push.body, push.payload)
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_globals["__name__"].startswith("memoire."):
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        dispatcher.accept_push(push.header, push.body, push.payload)
    finally:
        sys.setprofile(None)
    assert len(called) <= MAX_CALLS, called


def saved(dispatcher, disk):
    while (group := dispatcher.collect()) is not None:
        disk.save(group)
        dispatcher.mark_saved()
        for ticket in group.tickets:
            ticket()


def test_a_model_is_shown_with_the_lock_once_it_is_on_disk():
    disk, shown = Disk(), []
    dispatcher = dispatcher_of(store=store_of(disk), on_model=lambda model: shown.append(is_free(dispatcher.lock)))
    assert dispatcher.publish("t", b"x").version == 1 and shown == []
    saved(dispatcher, disk)
    dispatcher.publish("t", b"x")
    saved(dispatcher, disk)
    assert shown == [False, False] and dispatcher.models.versions() == {"t": 2}


def test_no_time_is_before_1970():
    assert dispatcher_of(clock=lambda: -5.0).now == 0.0


def test_credit_is_news_for_everyone():
    news = []
    dispatcher = dispatcher_of(on_news=lambda: news.append(1))
    before = dispatcher.bytes_per_client(dispatcher.tables.first)
    dispatcher.set_client_byte_limit(None)
    assert dispatcher.bytes_per_client(dispatcher.tables.first) == before
    dispatcher.set_client_byte_limit(1000)
    assert dispatcher.bytes_per_client(dispatcher.tables.first) == 1000 and news == [1, 1]
    assert dispatcher.configure(dispatcher.tables.first, {"cache_size": 4}) == PARAMETERS.replace(cache_size=4)
    assert len(news) == 3


# --- Replies of a server without a socket: each request may arrive several times


def test_a_server_without_a_folder_that_begins_before_its_former_life_takes_none_of_its_caches():
    lives = []
    for epoch in (5_000, 2_000, 9_000):
        me = Asker(made_dispatcher(epoch=epoch))
        welcome = me.ask(messages.Hello()).body
        assert welcome.epoch == epoch
        for former in lives:
            me.ask(messages.Update(epoch=former, episodes=1, steps=9, caches=7, cache_bytes=700))
        me.ask(messages.Update(epoch=welcome.epoch, episodes=2, steps=20, caches=1, cache_bytes=100))
        account = me.dispatcher.ledger.find(ME)
        assert (account.report.steps, account.pushed_caches, account.pushed_bytes) == (20, 1, 100)
        me.dispatcher.ledger.check_invariants()
        lives.append(epoch)


def test_feedback_that_nobody_fetches_is_bounded_and_counted(caplog):
    served = made_dispatcher()
    Asker(served).ask(messages.Update(steps=5))
    ids = np.zeros(FEEDBACK_SAMPLES // 4, ID)
    ids["client"] = np.frombuffer(ME, "<u8")
    for number in range(6):
        ids["number"] = np.arange(len(ids)) + number * len(ids)
        assert served.apply_td_errors(ids, np.ones(len(ids))).lost == 0
    assert served.ledger.find(ME).waiting_feedback == FEEDBACK_SAMPLES
    assert served.feedback.lost == served.feedback.overflowed == 2 * len(ids)
    for _ in range(2):
        served.store_gone_accounts()
    assert [record.getMessage() for record in caplog.records] == [
        f"server home: {2 * len(ids)} TD errors were dropped: more than {FEEDBACK_SAMPLES} waited for one actor, which "
        "fetches them with its UPDATE messages, or held_bytes had no room. Use more actors, draw fewer samples, or "
        "store episodes, whose priorities the server sets itself"
    ]
    served.ledger.check_invariants()


# --- Bytes that a server holds for its peers: reserved before the allocation, and named by holder

CLIENTS, REQUESTS, SMALL_REQUESTS = 4, 40, 600
LIMITS = Limits.of(message_bytes=1 << 15, held_bytes=1 << 18, model_bytes=1 << 16, expected_clients=CLIENTS)
SMALL = {"smallest_caches", "smallest_rollouts", "newcomers", "td_errors", "models_that_do_not_end", "packed_episodes"}
"""Kinds of requests that take the most memory in large numbers."""


def largest_dispatcher(kind, limits=LIMITS):
    options = server_options(schema=None, tables=largest_tables(kind, limits.message_bytes), limits=limits)
    return dispatcher_of(build.make_tables(options), limits=limits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_every_kind_at_their_largest_take_no_more_than_the_budget(kind):
    dispatcher = largest_dispatcher(kind)
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
    dispatcher = largest_dispatcher(kind, limits)
    request = next(KINDS[kind](1, limits.message_bytes))
    packed, unpacked = request[2].nbytes, unpacked_bytes(request[2])
    assert unpacked > 5 * packed
    dispatcher.pushes.add(dispatcher.pushes.room - unpacked + 1)  # pushes that other threads check now
    before = dispatcher.budget.used
    tracemalloc.start()
    assert answer(dispatcher, frames_of(request, 1, 1)) == "busy"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < packed + 100_000
    assert dispatcher.budget.used - before <= ACCOUNT_BYTES  # bytes of the account that counts the rejection
    dispatcher.pushes.add(-1)
    assert answer(dispatcher, frames_of(request, 1, 2)) is None


def answer(dispatcher, frames):
    """Return the body of the reply to a message; for a pushed message, the code of its refusal or None."""
    message = parse(frames, LIMITS, verify_payload=False)
    if not isinstance(message.body, PUSHED):
        return dispatcher.answer(message).body
    try:
        dispatcher.accept_push(message.header, message.body, message.payload)
    except ProtocolError as error:
        return error.code
    return None


def test_a_holder_without_room_is_refused_by_name_and_the_oldest_caches_give_way():
    budget = ByteBudget(1000)
    rows, own = budget.add_holder("rows"), budget.add_holder("requests", own=100)
    own.take(100)
    rows.take(600)
    with pytest.raises(
        ProtocolError, match=r"401 more bytes of requests have no room: the limit is 1,000 .*: rows 600, requests 100"
    ) as why:
        own.take(401)
    assert why.value.code == "busy" and (budget.used, budget.limit, budget.free) == (700, 1100, 400)
    with pytest.raises(ProtocolError) as why, rows.reserved(400), rows.reserved(1):
        pass
    assert why.value.code == "busy" and rows.bytes == 600
    with pytest.raises(ProtocolError) as why:
        rows.take(1001)
    assert why.value.code == "too_large"


def test_caches_give_way_to_half_of_what_they_may_hold():
    payload = cache_of(parameters=CACHES)
    budget, pool = ByteBudget(20 * payload.nbytes), Pool(SCHEMA, CACHES, byte_limit=20 * payload.nbytes, seed=0)
    pool.join_budget(budget, "table default")
    rows = budget.add_holder("rows")
    for number in range(40):
        pool.add(bytes(16), number, pool.check(messages.Cache(number=1), payload))
        assert pool.stats().bytes <= budget.holders()["table default"] <= budget.max_bytes
    rows.take(5 * payload.nbytes)
    assert 10 * payload.nbytes <= pool.stats().bytes <= 15 * payload.nbytes and budget.free >= 0
    rows.take(5 * payload.nbytes)
    with pytest.raises(ProtocolError, match="table default"):
        rows.take(payload.nbytes)
    pool.add(bytes(16), 99, pool.check(messages.Cache(number=1), payload))
    assert pool.stats().bytes <= 10 * payload.nbytes and budget.free >= 0


# --- Requests that a server grants once, however often a request arrives


def header(number, client=ME, body=None, **facts):
    return message(body or messages.Draw(), client, number=number, **facts).header


def reply(number):
    return Reply(messages.Taken(samples=number))


def find(replies, number, now=0.0, **facts):
    return replies.find(header(number, **facts), now)


def give(replies, number, now=0.0, **facts):
    assert find(replies, number, now, **facts) is None
    replies.keep(header(number, **facts), reply(number))


def test_one_that_is_older_than_all_that_are_kept_is_refused():
    replies = ReplyCache()
    for number in (5, 6, 7):
        give(replies, number)
    with pytest.raises(ProtocolError, match="request 5 is older than all kept replies, from 6 on") as caught:
        find(replies, 5)
    assert caught.value.code == "missing" and find(replies, 6) == reply(6)


def test_requests_may_come_in_another_order_while_there_is_room():
    replies = ReplyCache()
    for number in (9, 3):
        give(replies, number)
    assert find(replies, 3) == reply(3) and find(replies, 9) == reply(9)


def test_clients_tables_and_types_have_numbers_of_their_own():
    replies = ReplyCache()
    give(replies, 1)
    give(replies, 1, client=YOU)
    give(replies, 1, table=5)
    give(replies, 1, body=messages.Control())
    assert find(replies, 1) == reply(1)


def client_of(number):
    return (number + 1).to_bytes(16, "little")


def test_no_number_of_readers_makes_a_reply_go_that_may_still_be_asked_for():
    replies = ReplyCache()
    for number in range(MAX_ROWS):
        give(replies, 1, client=client_of(number))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="this server keeps replies to at most 1024 clients") as caught:
            find(replies, 1, client=client_of(MAX_ROWS))
        assert caught.value.code == "busy"
    assert all(find(replies, 1, client=client_of(number)) == reply(1) for number in range(MAX_ROWS))


def test_rows_that_are_idle_for_long_give_way_but_for_the_last_ones():
    replies = ReplyCache()
    for number in range(KEPT_ROWS + 10):
        give(replies, 1, client=client_of(number), now=0.5 * number)
    assert find(replies, 1, client=client_of(0), now=50.0) == reply(1)
    give(replies, 1, client=client_of(999), now=2.0 + IDLE_TIMEOUT)
    gone = [number for number in range(KEPT_ROWS + 10) if find(replies, 1, client=client_of(number)) is None]
    assert gone == [1, 2, 3, 4]
