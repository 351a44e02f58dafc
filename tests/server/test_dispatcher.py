"""Which message goes to which handler, what is refused, and what is done with the lock held."""

import sys
import threading

import numpy as np
import pytest

from fake_store import Disk
from memoire.errors import ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.replay.batch import ID
from memoire.server.dispatch import Dispatcher
from memoire.tables.desk import Reply
from memoire.wire import messages
from memoire.wire.frames import NO_CLIENT
from memoire.wire.rows import ACCOUNT
from netkit import SCHEMA
from serverkit import ME, NOW, PARAMETERS, READER, RUN, YOU, cache_of, message, store_of, tables_of

MAX_CALLS = 26
"""Of memoire's Python functions, for a cache that is taken."""


def dispatcher_of(*, store=None, run="run", clock=lambda: NOW, **facts):
    return Dispatcher(
        tables=tables_of(), run=run, name="home", limits=Limits(), store=store, clock=clock, epoch=7, **facts
    )


@pytest.fixture
def dispatcher():
    return dispatcher_of()


def is_free(lock):
    """Whether another thread could take the lock now."""
    found = []

    def look():
        with lock:
            found.append(True)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(0.1)
    return bool(found)


def watched(dispatcher, handlers, kind):
    """Whether the lock is free when a request of this kind is handled: a list that grows."""
    handler, seen = handlers[kind], []

    def watch(*request):
        seen.append(is_free(dispatcher.lock))
        return handler(*request)

    handlers[kind] = watch
    return seen


# ------------------------------------------------------------------------------------------------------ what is asked


@pytest.mark.parametrize(
    ("body", "facts", "code"),
    [
        (messages.Taken(), {}, "unexpected"),
        (messages.Cache(), {"payload": b"x"}, "unexpected"),
        (messages.TakeSnapshot(name="a", order=bytes(16)), {}, "unexpected"),
        (messages.Ledger(), {"client": NO_CLIENT}, "client"),
        (messages.Ledger(), {"run": 5}, "run"),
        (messages.Update(), {"run": 5}, "run"),
        (messages.Update(), {"table": 5}, "table"),
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


def test_requests_of_one_kind_may_be_answered_elsewhere(dispatcher):
    asked = []

    def order(header, body, payload):
        asked.append((header.client, body.name, is_free(dispatcher.lock)))
        if len(asked) == 2:
            raise ProtocolError("busy", "not now")
        return Reply(messages.Snapshot(name=body.name, state="writing"))

    dispatcher.answer_with(messages.TakeSnapshot, order)
    made = message(messages.TakeSnapshot(name="a", order=bytes(16)))
    assert dispatcher.answer(made).body.name == "a" and dispatcher.answer(made).body.code == "busy"
    assert asked == [(ME, "a", True)] * 2


def test_what_would_change_something_twice_is_granted_once(dispatcher):
    handler, granted = dispatcher.handlers[messages.Control], []

    def control(*request):
        granted.append(is_free(dispatcher._granting))
        return handler(*request)

    dispatcher.handlers[messages.Control] = control
    first, again = (dispatcher.answer(message(messages.Control(finish=True), number=4)) for _ in range(2))
    assert first is again and granted == [False]
    dispatcher.answer(message(messages.Control(finish=True), number=5))
    dispatcher.answer(message(messages.Control(finish=True), YOU, number=4))
    assert granted == [False] * 3
    assert dispatcher.answer(message(messages.Control(run="\n"), number=6)).body.code == "parameters"
    assert dispatcher.answer(message(messages.Control(), number=6)).body.finished, "it was refused, not granted"


def test_reports_are_counted_each_time_they_come(dispatcher):
    first, again = (dispatcher.answer(message(messages.Update(steps=1))) for _ in range(2))
    assert first == again and first is not again


# -------------------------------------------------------------------------------------------------------- the lock


@pytest.mark.parametrize(
    "body",
    [
        messages.Hello(),
        messages.Update(),
        messages.Fetch(topic="t"),
        messages.Publish(topic="t", size=1, checksum=0),
        messages.Control(),
        messages.Ledger(),
        messages.Inherit(run_name="run"),
    ],
)
def test_handlers_are_called_with_the_lock(dispatcher, body):
    seen = watched(dispatcher, dispatcher.handlers, type(body))
    dispatcher.answer(message(body, payload=b"x" if isinstance(body, messages.Publish) else None))
    assert seen == [False] and is_free(dispatcher.lock)


@pytest.mark.parametrize("body", [messages.Sums(), messages.Draw()])
def test_draws_are_made_without_the_lock(dispatcher, body):
    """Caches go on coming in meanwhile."""
    seen = watched(dispatcher, dispatcher.unlocked, type(body))
    dispatcher.answer(message(body, READER))
    assert seen == [True]


def test_a_cache_is_checked_without_the_lock_and_held_with_it(dispatcher):
    pool, seen = dispatcher.tables.first.pool, []
    check, add = pool.check, pool.add
    pool.check = lambda *found, **facts: seen.append(is_free(dispatcher.lock)) or check(*found, **facts)
    pool.add = lambda *found: seen.append(is_free(dispatcher.lock)) or add(*found)
    made = message(messages.Cache(number=1), payload=cache_of(), fingerprint=SCHEMA.fingerprint, run=RUN)
    assert dispatcher.arrived(made.header, made.body, made.payload) == 8
    assert seen == [True, False]


def test_a_cache_takes_few_calls_of_python(dispatcher):
    """A quarter of what a server spends on caches of W1 is the interpreter: this number follows it on any machine."""
    made = message(messages.Cache(number=1), payload=cache_of(), fingerprint=SCHEMA.fingerprint, run=RUN)
    dispatcher.arrived(made.header, made.body, made.payload)
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_globals["__name__"].startswith("memoire."):
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        dispatcher.arrived(made.header, made.body, made.payload)
    finally:
        sys.setprofile(None)
    assert len(called) <= MAX_CALLS, called


def test_a_cache_that_is_refused_is_counted_by_its_code(dispatcher):
    made = message(messages.Cache(number=1), payload=cache_of(), fingerprint=1)
    with pytest.raises(ProtocolError) as caught:
        dispatcher.arrived(made.header, made.body, made.payload)
    assert caught.value.code == "schema" and dispatcher.refused == {"schema": 1}
    assert dispatcher.ledger.find(ME).rejected == {"schema": 1}


def test_a_reader_is_known_by_what_it_said(dispatcher):
    dispatcher.answer(message(messages.Hello(role="reader", codecs=["lz4"]), READER))
    assert dispatcher._can_undo(READER, "lz4") and not dispatcher._can_undo(ME, "lz4")


# ------------------------------------------------------------------------------------------------------ being saved


def saved(dispatcher, disk):
    while (group := dispatcher.collect()) is not None:
        disk.save(group)
        dispatcher.saved()
        for ticket in group.tickets:
            ticket()


def test_a_reply_that_promises_something_is_sent_when_it_is_on_disk():
    disk, sent = Disk(), []
    dispatcher = dispatcher_of(store=store_of(disk))
    made = message(messages.Update(steps=1))
    dispatcher.send(made.header, dispatcher.answer(made), sent.append)
    assert sent == []
    saved(dispatcher, disk)
    assert [reply.body.steps for reply in sent] == [1]
    again = message(messages.Update(steps=1), number=2)
    dispatcher.send(again.header, dispatcher.answer(again), sent.append)
    assert len(sent) == 2 and is_free(dispatcher.lock)


def test_without_a_folder_every_reply_goes_at_once(dispatcher):
    sent, made = [], message(messages.Control())
    dispatcher.send(made.header, dispatcher.answer(made), lambda reply: sent.append(is_free(dispatcher.lock)))
    assert sent == [True] and not dispatcher.is_durable
    dispatcher.start_saving(pytest.fail, pytest.fail)


def test_a_store_hands_out_what_waited_for_a_group():
    store, disk = store_of(Disk()), Disk()
    handed, failed, started = [], [], []
    dispatcher = dispatcher_of(store=store)
    store.start = lambda *hooks: started.append(hooks)
    dispatcher.start_saving(handed.append, failed.append)
    ((collect, done, fail, _),) = started
    assert store.woken.is_set()
    fail(OSError(5, "gone"))
    assert [error.errno for error in failed] == [5]
    while (group := collect()) is not None:
        disk.save(group)
        done(group)
    assert handed == [], "nobody waited for what was new of this life"
    dispatcher.finish()
    group = collect()
    disk.save(group)
    done(group)
    assert handed == [group.tickets] and len(group.tickets) == 1


def test_a_model_is_shown_with_the_lock_once_it_is_on_disk():
    disk, shown = Disk(), []
    dispatcher = dispatcher_of(store=store_of(disk), on_model=lambda model: shown.append(is_free(dispatcher.lock)))
    assert dispatcher.publish("t", b"x").version == 1 and shown == []
    saved(dispatcher, disk)
    dispatcher.publish("t", b"x")
    saved(dispatcher, disk)
    assert shown == [False, False] and dispatcher.models.versions() == {"t": 2}


def test_a_life_that_follows_has_the_number_that_its_folder_says():
    disk = Disk()
    assert [dispatcher_of(store=store_of(disk)).epoch for _ in range(2)] == [1, 2]
    assert dispatcher_of().epoch == 7


# ------------------------------------------------------------------------------------------- said in this process


def test_names_of_runs_are_checked_before_anything_is_made():
    with pytest.raises(ParameterError, match="run"):
        dispatcher_of(run="")
    assert dispatcher_of(run=None).run_name == "default"


def test_what_a_server_says_of_itself():
    now = [NOW]
    dispatcher = dispatcher_of(clock=lambda: now[0])
    assert (dispatcher.run_name, dispatcher.run, dispatcher.finished, dispatcher.leaving) == ("run", RUN, False, False)
    assert (dispatcher.now, dispatcher.logbook.count) == (NOW, 0)
    dispatcher.finish()
    dispatcher.drain()
    assert dispatcher.finished and dispatcher.leaving
    dispatcher.resume()
    dispatcher.begin_run("next")
    assert not dispatcher.finished and dispatcher.run_name == "next"
    now[0] = -5.0
    assert dispatcher.now == 0.0


def test_credit_is_news_for_everyone():
    news = []
    dispatcher = dispatcher_of(on_news=lambda: news.append(1))
    before = dispatcher.credit(dispatcher.tables.first)
    dispatcher.grant(None)
    assert dispatcher.credit(dispatcher.tables.first) == before
    dispatcher.grant(1000)
    assert dispatcher.credit(dispatcher.tables.first) == 1000 and news == [1, 1]
    assert dispatcher.configure(dispatcher.tables.first, {"cache_size": 4}) == PARAMETERS.replace(cache_size=4)
    assert len(news) == 3


def test_priorities_of_unknown_clients_are_lost(dispatcher):
    dispatcher.answer(message(messages.Update(steps=3)))
    ids = np.zeros(3, ID)
    ids["client"][:2] = np.frombuffer(ME, "<u8")
    assert dispatcher.hand_on(ids, np.ones(3)).lost == 1
    assert (dispatcher.feedback_given, dispatcher.feedback_lost) == (3, 1)


def test_accounts_are_read_page_by_page_and_folded(caplog):
    now = [NOW]
    dispatcher = dispatcher_of(clock=lambda: now[0])
    dispatcher.answer(message(messages.Update(steps=3)))
    dispatcher.inherit("run", False, np.zeros(0, ACCOUNT))
    assert [rows["steps"].tolist() for rows in dispatcher.pages(dispatcher.runs.current)] == [[3]]
    assert dispatcher.ended(0, 5) == ("run", 1, []) and dispatcher.untold(2.0) == 0
    now[0] += 10_000.0
    dispatcher.fold()
    assert len(dispatcher.ledger) == 0 and dispatcher.trouble() == "" and caplog.text == ""


def test_too_many_new_clients_are_logged_once_for_a_while(caplog):
    limits = Limits(new_clients=2, new_clients_rate=0.001)
    dispatcher = Dispatcher(tables=tables_of(), run="run", name="home", limits=limits, clock=lambda: NOW, epoch=7)
    for client in (ME, YOU):
        dispatcher.answer(message(messages.Update(steps=1), client))
    for _ in range(2):
        dispatcher.fold()
    assert [record.getMessage() for record in caplog.records] == [f"server home: {dispatcher.trouble()}"]


def test_a_client_id_belongs_to_a_key(dispatcher):
    dispatcher.own(ME, "actor/a")
    with pytest.raises(ProtocolError) as caught:
        dispatcher.own(ME, "actor/b")
    assert caught.value.code == "owner"
