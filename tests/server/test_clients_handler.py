"""Reports and pushes of clients, the replies to them, and the owners of client ids, message by message."""

import numpy as np
import pytest

from fake_store import Disk
from memoire.errors import ProtocolError
from memoire.limits import NO_LIMIT, Limits
from memoire.replay.parameters import Parameters
from memoire.server.handlers.clients import IntakeHandler
from memoire.server.state import STOCK_PART, UNDRAWN, ClientOwners, Credits
from memoire.tables.table import Table
from memoire.wire import containers, messages
from memoire.wire.frames import NO_CLIENT, ROUNDTRIP, table_number
from netkit import SCHEMA
from serverkit import ME, NEXT, NOW, READER, RUN, YOU, Ends, cache_of, message, save, state_of, store_of, tables_of

pytestmark = pytest.mark.usefixtures("without_io")


BAND = Parameters(cache_size=8, samples_per_insert=1.0, samples_per_insert_tolerance=30.0, min_size=0)
WHOLE = table_number("whole")
PROBE = table_number(ROUNDTRIP)
LINE = messages.Line(number=1, time=0.0, label=7, text="x")


@pytest.fixture
def ends():
    return Ends(state_of())


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def durable(disk):
    return Ends(state_of(store=store_of(disk)))


def banded(**facts):
    return Ends(state_of(tables_of(default=Table(SCHEMA, parameters=BAND)), **facts))


def feed(ends, client=ME, samples=3):
    """Let priorities wait for a client; return the number of lost priorities."""
    numbers = np.arange(samples, dtype=np.int64)
    return ends.feedback.apply([(client, numbers, np.ones(samples, np.float32))], NOW).lost


# ------------------------------------------------------------------------------------------------------------ HELLO


def test_hello_says_all_that_a_client_needs(ends):
    reply = ends.hello(label=7, host="gpu-1", codecs=["zlib", "unheard of"])
    body = reply.body
    assert (body.run_name, body.home_name, body.servers, body.codecs) == ("run", "home", ["home"], ["zlib"])
    assert (body.table, body.table_name, body.storage, body.epoch, body.since) == (0, "default", "caches", 7, 7)
    assert body.endpoints.request == "tcp://home" and body.limits["model_bytes"] == 1000
    assert "episode_entries" not in body.limits and (body.durable, body.finished, body.leaving) == (False, False, [])
    assert body.granted_steps == NO_LIMIT and body.credit == 1 << 20 and not reply.until_saved
    assert reply.changed == {"run": RUN, "home": ends.state.home, "fingerprint": SCHEMA.fingerprint, "table": 0}
    account = ends.state.ledger.find(ME)
    assert (account.label, account.host) == (7, "gpu-1") and not ends.state.ledger.is_counted(account)


def test_a_table_of_episodes_says_how_many_entries_one_may_have(ends):
    reply = ends.hello(table="whole")
    assert (reply.body.storage, reply.body.limits["episode_entries"]) == ("episodes", 64)
    assert reply.changed["table"] == WHOLE
    with pytest.raises(ProtocolError, match="no table 'none'"):
        ends.hello(table="none")


def test_a_reader_has_no_account_and_is_granted_everything():
    ends = banded()
    welcome = ends.hello(READER, role="reader", codecs=["lz4"]).body
    assert (welcome.since, welcome.granted_steps) == (0, NO_LIMIT) and READER not in ends.state.ledger
    assert (
        ends.state.learners.supports_compression(READER, "lz4")
        and ends.state.learners.active_learners(NOW)[0].table == "default"
    )
    assert ends.hello(YOU, role="publisher").body.since == 0
    assert YOU not in ends.state.ledger and len(ends.state.learners.active_learners(NOW)) == 1


def test_an_actor_is_granted_its_part_of_what_may_be_recorded():
    ends = banded()
    assert ends.hello(inserted=100).body.granted_steps == 130, "what it had recorded before is none of this band's"
    assert ends.update(steps=100).body.granted_steps == 130


def test_a_welcome_waits_while_the_clients_account_is_unsaved(durable, disk):
    assert not durable.hello().until_saved, "a guest has nothing that could be lost"
    durable.update(steps=1)
    assert durable.hello().until_saved and durable.hello().body.durable
    save(durable.state, disk)
    assert not durable.hello().until_saved
    assert durable.hello(label=9).until_saved, "another label is saved, too"


def test_a_client_that_moves_to_another_table_takes_its_counts_along(durable, disk):
    durable.hello(YOU)
    durable.hello(YOU, table="whole")
    durable.update(steps=5)
    save(durable.state, disk)
    assert durable.hello(table="whole").until_saved
    ledger = durable.state.ledger
    assert (ledger.find(ME).table, ledger.tables["steps"][WHOLE], ledger.present[WHOLE]) == (WHOLE, 5, 2)
    ledger.check_invariants()


# ----------------------------------------------------------------------------------------------------------- UPDATE


def test_an_update_that_comes_again_changes_nothing(ends):
    first = ends.update(episodes=3, steps=30, lines=[LINE])
    again = ends.update(episodes=3, steps=30, lines=[LINE])
    assert first == again and (first.body.episodes, first.body.steps, first.body.lines_through) == (3, 30, 1)
    assert [[entry.line.text for entry in lines] for lines in ends.lines] == [["x"]]
    ends.state.ledger.check_invariants()


def test_parameters_are_sent_to_those_that_have_others(ends):
    assert ends.update(parameters_version=1).body.parameters is None
    ends.control.configure(ends.state.tables.first, {"cache_size": 4})
    updated = ends.update(parameters_version=1).body
    assert (updated.parameters_version, updated.parameters["cache_size"]) == (2, 4)
    assert ends.update(parameters_version=2).body.parameters is None


def test_sums_and_inserts_are_told_to_pool_and_limiter():
    ends = banded()
    ends.hello()
    updated = ends.update(steps=25, passed_steps=5, total_weight=2.0, positives=2, minimum=1.0).body
    limiter = ends.state.tables.first.limiter
    assert (limiter.stats().inserted, limiter.stats().surplus) == (20, 20.0)
    assert (updated.granted_steps, updated.wait) == (30, "")
    rows = ends.state.tables.first.pool.reserve(READER, 10)
    assert [row["client"].tobytes() for row in rows] == [ME]
    full = ends.update(steps=35, passed_steps=5).body
    assert full.granted_steps == 30 and full.wait.startswith("waiting until learners draw 1 more samples")


def test_a_client_that_leaves_is_dropped_by_pool_and_limiter():
    ends = banded()
    ends.hello()
    ends.update(steps=1, total_weight=2.0, positives=2, minimum=1.0)
    feed(ends, samples=3)
    updated = ends.update(steps=1, leaving=True).body
    assert ends.feedback.lost == 3, "it fetches them no more"
    assert updated.granted_steps == messages.Updated().granted_steps, "it records no more"
    assert len(ends.state.tables.first.pool.reserve(READER, 10)) == 0
    assert ends.hello(YOU).body.granted_steps == 29, "what it was granted and did not use is free"


def test_a_client_of_a_former_run_is_counted_there_and_told_of_the_present_one():
    ends = banded()
    ends.hello()
    ends.update(steps=3)
    feed(ends)
    ends.control.begin_run("next", NOW)
    reply = ends.update(run=RUN, steps=5, total_weight=2.0, positives=2, minimum=1.0)
    assert (reply.body.run_name, reply.body.steps, reply.payload) == ("next", 5, None)
    assert reply.body.granted_steps == messages.Updated().granted_steps
    assert ends.state.runs.named("run").ledger.steps == 5 and ends.state.ledger.steps == 0
    assert len(ends.state.tables.first.pool.reserve(READER, 10)) == 0
    assert ends.update(run=NEXT, steps=1).body.granted_steps == 31, "it said no HELLO: what it has is counted from here"
    with pytest.raises(ProtocolError, match="this server counts run 'next'; send HELLO again") as caught:
        ends.update(run=5, steps=1)
    assert caught.value.code == "run"


def test_priorities_are_given_until_they_are_applied(ends):
    ends.update(steps=5)
    assert feed(ends, samples=5) == 0
    for _ in range(2):
        reply = ends.update(steps=5)
        numbers, errors = containers.read_feedback(reply.payload, SCHEMA)[ME]
        assert numbers.tolist() == [0, 1, 2, 3, 4] and errors.tolist() == [1.0] * 5
        assert reply.body.feedback_through == 1
    assert ends.update(steps=5, epoch=6, feedback_through=1).payload is not None, "that was piece 1 of a former life"
    done = ends.update(steps=5, epoch=7, feedback_through=1, applied=5)
    assert (done.payload, done.body.feedback_through) == (None, 0)
    assert ends.state.ledger.find(ME).waiting_feedback == 0


def test_a_client_knows_that_the_run_is_over_when_it_says_so(ends):
    ends.hello()
    ends.hello(YOU)
    assert ends.clients.unconfirmed_clients(2.0, NOW) == 0
    ends.update(finished=True)
    ends.control.finish()
    assert ends.clients.unconfirmed_clients(2.0, NOW) == 2, "what it said before was about nothing"
    assert ends.hello(READER, role="reader").body.finished
    ends.update(episodes=1)
    assert ends.clients.unconfirmed_clients(2.0, NOW) == 2
    ends.update(episodes=1, finished=True)
    assert ends.clients.unconfirmed_clients(2.0, NOW) == 1
    assert ends.clients.unconfirmed_clients(2.0, NOW + 3.0) == 0, "silent ones are not waited for"
    ends.update(YOU, leaving=True)
    assert ends.clients.unconfirmed_clients(2.0, NOW) == 0
    ends.control.finish(False)
    ends.control.finish()
    assert ends.clients.unconfirmed_clients(2.0, NOW) == 1, "that was another end"


def test_who_only_tries_the_way_there_and_back_is_in_no_total(ends):
    state = ends.state
    assert ends.hello(table=ROUNDTRIP).body.table_name == ROUNDTRIP
    ends.update(table=PROBE, steps=3, caches=2)
    assert state.ledger.find(ME) is None and state.ledger.totals().clients == 0
    assert (state.probes.find(ME).report.steps, state.probes.totals().clients) == (3, 1)
    for facts in ({"lines": [LINE]}, {"ended": [messages.Ended(number=1, time=0.0, length=3, returned=1.0)]}):
        with pytest.raises(ProtocolError, match="is for round trips: it keeps no log or episodes"):
            ends.update(table=PROBE, steps=9, **facts)
    assert state.probes.find(ME).report.steps == 3


# --- A client id belongs to the key that uses the id first


@pytest.fixture
def state():
    return state_of()


def refused(owner, client, principal):
    with pytest.raises(ProtocolError) as caught:
        owner.check(client, principal, NOW)
    assert caught.value.code == "owner"
    return caught.value.detail


def test_an_account_knows_its_owner_and_has_it_saved():
    disk = Disk()
    state = state_of(store=store_of(disk))
    account = state.ledger.report(ME, 1, messages.Update(steps=1), NOW)
    save(state, disk)
    owner = ClientOwners(state)
    owner.check(ME, "actor/a", NOW)
    assert account.owner == "actor/a" and not state.committer.is_saved("run", ME)
    assert "actor/a" in refused(owner, ME, "actor/b")


def test_an_id_keeps_its_owner_when_it_gets_an_account(state):
    owner = ClientOwners(state)
    owner.check(ME, "actor/a", NOW)
    account = state.ledger.register_guest(ME, NOW)
    owner.move_to(account)
    assert account.owner == "actor/a"
    owner.move_to(account)
    assert account.owner == "actor/a"
    refused(owner, ME, "actor/b")


# --- Credit of a client: the client's part of the bytes that all clients may have on the way

LIMITS = Limits(credit=1000, on_way_bytes=100_000, client_timeout=60.0)


@pytest.fixture
def state_of_credit():
    server_state = state_of(limits=LIMITS)
    server_state.tables.first.pool.limit_bytes(5000)
    return server_state


def greet(state, count, now=NOW, table=0):
    for number in range(count):
        state.ledger.register_guest(bytes([number + 1]) * 16, now, table)


def test_a_client_has_its_limit_while_there_is_enough_for_all(state_of_credit):
    credits = Credits(state_of_credit)
    assert credits.bytes_by_client(state_of_credit.tables.first, NOW) == 1000
    greet(state_of_credit, 5)
    assert credits.bytes_by_client(state_of_credit.tables.first, NOW) == 1000
    credits.limit_bytes(700)
    credits.limit_bytes(None)
    assert credits.bytes_by_client(state_of_credit.tables.first, NOW) == 700


def test_clients_of_all_tables_share_what_may_be_on_the_way():
    state = state_of(limits=Limits(credit=10_000, on_way_bytes=20_000))
    greet(state, 10, table=WHOLE)
    assert Credits(state).bytes_by_client(state.tables.first, NOW) == 2000


def test_clients_share_what_their_table_holds_gone_ones_no_more_and_silent_ones_are_counted_once_a_second(
    state_of_credit,
):
    credits = Credits(state_of_credit)
    greet(state_of_credit, 10)
    assert credits.bytes_by_client(state_of_credit.tables.first, NOW) == 500
    assert credits.bytes_by_client(state_of_credit.tables["whole"], NOW) == 1000, "that has none of them"
    state_of_credit.ledger.report(bytes([1]) * 16, 1, messages.Update(leaving=True), NOW)
    assert credits.bytes_by_client(state_of_credit.tables.first, NOW) == 5000 // 9
    state_of_credit.ledger.report(bytes([10]) * 16, 1, messages.Update(steps=1, leaving=True), NOW)
    late = NOW + 61.0
    for number in range(1, 8):
        state_of_credit.ledger.register_guest(bytes([number + 1]) * 16, late)
    assert credits.bytes_by_client(state_of_credit.tables.first, late) == 5000 // 7
    state_of_credit.ledger.register_guest(bytes([9]) * 16, late)
    assert credits.bytes_by_client(state_of_credit.tables.first, late + 0.9) == 5000 // 7
    assert credits.bytes_by_client(state_of_credit.tables.first, late + 1.0) == 5000 // 8


def test_a_client_whose_samples_are_not_drawn_is_granted_no_more_than_learners_want():
    parameters = BAND.replace(samples_per_insert=0.5, samples_per_insert_tolerance=None)
    state = state_of(tables_of(default=Table(SCHEMA, parameters=parameters)), limits=LIMITS)
    table, credits, asked = state.tables.first, Credits(state), []
    for wanted, granted in ((5, (110, "")), (0, (100, UNDRAWN))):
        table.pool.room = lambda *stock, wanted=wanted: asked.append(stock) or wanted
        assert credits.grant(table, ME, 100, NOW) == granted
    assert asked == [(ME, 1000 // STOCK_PART)] * 2


# --- Pushes of clients step by step: checked, held, counted

CACHE = cache_of()


def pushed(number=1, payload=CACHE, body=None, client=ME, **header):
    facts = {"fingerprint": SCHEMA.fingerprint, "run": RUN} | header
    body = body or messages.Cache(number=number, pushed_bytes=number * payload.nbytes)
    return message(body, client, number=number, payload=payload, **facts)


def accept(handler, push):
    table, held = handler.check(push.header, push.body, push.payload)
    handler.accept(NOW, push.header, push.body, table, held)
    return held.samples


def test_a_cache_is_held_and_counted_and_one_that_was_changed_on_the_way_is_refused(state):
    handler, broken, push = IntakeHandler(state), CACHE.copy(), pushed()
    broken[100] ^= 1
    with pytest.raises(ProtocolError):
        handler.check(push.header, push.body, broken)
    assert accept(handler, push) == 8
    account = state.ledger.find(ME)
    assert (account.accepted_caches, account.received_bytes, account.accepted_samples) == (1, CACHE.nbytes, 8)
    assert account.last_cache == NOW and state.tables.first.pool.stats().caches == 1
    state.ledger.check_invariants()


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"client": NO_CLIENT}, "client"),
        ({"run": NEXT}, "run"),
        ({"table": 5}, "table"),
        ({"fingerprint": 1}, "schema"),
        ({"table": table_number("whole")}, "unexpected"),
    ],
)
def test_a_cache_from_elsewhere_is_refused_by_code(state, changed, code):
    push = pushed(**changed)
    with pytest.raises(ProtocolError) as caught:
        IntakeHandler(state).check(push.header, push.body, push.payload)
    assert caught.value.code == code and len(state.ledger) == 0, "what is checked changes nothing"


def test_a_run_that_begins_between_check_and_accept_takes_nothing(state):
    handler, push = IntakeHandler(state), pushed()
    table, held = handler.check(push.header, push.body, push.payload)
    state.runs.begin("next", NOW)
    with pytest.raises(ProtocolError, match="the push belongs to another run; this server counts run 'next'"):
        handler.accept(NOW, push.header, push.body, table, held)
    handler.reject(NOW, push.header, push.body, "run")
    former = state.runs.named("run").ledger
    assert former.find(ME).rejected == {"run": 1} and len(state.ledger) == 0
    assert table.pool.stats().caches == 0
    former.check_invariants()


def test_nobody_is_counted_who_has_no_id_or_names_a_run_that_never_was(state):
    handler = IntakeHandler(state)
    for push in (pushed(client=NO_CLIENT), pushed(run=NEXT)):
        handler.reject(NOW, push.header, push.body, "client")
    assert len(state.ledger) == 0
    handler.reject(NOW, pushed(table=5).header, push.body, "table")
    assert state.ledger.present == {0: 1}, "a client that has named no table of the server counts in the first one"


def test_a_cache_for_an_account_of_a_former_life_is_held_and_counted_for_nobody(state):
    handler = IntakeHandler(state)
    push = pushed(body=messages.Cache(number=1, pushed_bytes=100, since=3))
    assert accept(handler, push) == 8
    handler.reject(NOW, push.header, push.body, "schema")
    assert len(state.ledger) == 0 and state.ledger.misdirected_caches == 2 and state.ledger.accepted_caches == 0


def test_too_many_new_clients_are_refused_though_their_cache_is_held():
    state = state_of(limits=Limits.of(new_clients=1, new_clients_rate=0.001))
    handler = IntakeHandler(state)
    accept(handler, pushed())
    other = pushed(client=b"o" * 16)
    with pytest.raises(ProtocolError, match="too many new clients at once"):
        accept(handler, other)
    with pytest.raises(ProtocolError, match="too many new clients at once"):
        handler.reject(NOW, other.header, other.body, "busy")
