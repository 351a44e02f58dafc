"""What clients push, step by step: checked, held, counted."""

import pytest

from fake_store import Disk
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.server.handlers.clients import IntakeHandler
from memoire.wire import messages
from memoire.wire.frames import NO_CLIENT, table_number
from netkit import SCHEMA
from serverkit import ME, NEXT, NOW, RUN, cache_of, message, save, state_of, store_of

pytestmark = pytest.mark.usefixtures("without_io")

CACHE = cache_of()


@pytest.fixture
def state():
    return state_of()


def pushed(number=1, payload=CACHE, body=None, client=ME, **header):
    facts = {"fingerprint": SCHEMA.fingerprint, "run": RUN} | header
    body = body or messages.Cache(number=number, pushed_bytes=number * payload.nbytes)
    return message(body, client, number=number, payload=payload, **facts)


def code_of(handler, made):
    with pytest.raises(ProtocolError) as caught:
        handler.check(made.header, made.body, made.payload)
    return caught.value.code


def accept(handler, made):
    table, held = handler.check(made.header, made.body, made.payload)
    handler.accept(NOW, made.header, made.body, table, held)
    return held.samples


def test_a_cache_is_held_and_counted(state):
    assert accept(IntakeHandler(state), pushed()) == 8
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
    assert code_of(IntakeHandler(state), pushed(**changed)) == code
    assert len(state.ledger) == 0, "what is checked changes nothing"


def test_a_cache_that_names_no_run_is_of_the_present_one(state):
    assert accept(IntakeHandler(state), pushed(run=0)) == 8


def test_bytes_that_were_changed_on_the_way_are_refused(state):
    broken = CACHE.copy()
    broken[100] ^= 1
    made = message(messages.Cache(), payload=CACHE, fingerprint=SCHEMA.fingerprint)
    with pytest.raises(ProtocolError):
        IntakeHandler(state).check(made.header, made.body, broken)


def test_a_run_that_begins_between_check_and_accept_takes_nothing(state):
    handler, made = IntakeHandler(state), pushed()
    table, held = handler.check(made.header, made.body, made.payload)
    state.runs.begin("next", NOW)
    with pytest.raises(ProtocolError, match="a cache of another run; this server counts 'next'"):
        handler.accept(NOW, made.header, made.body, table, held)
    handler.reject(NOW, made.header, made.body, "run")
    former = state.runs.named("run").ledger
    assert former.find(ME).rejected == {"run": 1} and len(state.ledger) == 0
    assert table.pool.stats().caches == 0
    former.check_invariants()


def test_what_is_refused_is_counted_for_its_client(state):
    handler, made = IntakeHandler(state), pushed()
    handler.reject(NOW, made.header, made.body, "schema")
    account = state.ledger.find(ME)
    assert (account.rejected, account.received_bytes, account.accepted_caches) == ({"schema": 1}, CACHE.nbytes, 0)
    assert account.table == 0
    state.ledger.check_invariants()


def test_nobody_is_counted_who_has_no_id_or_names_a_run_that_never_was(state):
    handler = IntakeHandler(state)
    for made in (pushed(client=NO_CLIENT), pushed(run=NEXT)):
        handler.reject(NOW, made.header, made.body, "client")
    assert len(state.ledger) == 0


def test_a_cache_for_an_account_of_a_former_life_is_held_and_counted_for_nobody(state):
    handler = IntakeHandler(state)
    made = pushed(body=messages.Cache(number=1, pushed_bytes=100, since=3))
    assert accept(handler, made) == 8
    handler.reject(NOW, made.header, made.body, "schema")
    assert len(state.ledger) == 0 and state.ledger.strays == 2 and state.ledger.accepted_caches == 0


def test_too_many_new_clients_are_refused_though_their_cache_is_held():
    state = state_of(limits=Limits(new_clients=1, new_clients_rate=0.001))
    handler = IntakeHandler(state)
    accept(handler, pushed())
    other = pushed(client=b"o" * 16)
    with pytest.raises(ProtocolError, match="too many new clients at once"):
        accept(handler, other)
    with pytest.raises(ProtocolError, match="too many new clients at once"):
        handler.reject(NOW, other.header, other.body, "busy")


def test_what_is_counted_is_saved():
    disk = Disk()
    state = state_of(store=store_of(disk))
    handler = IntakeHandler(state)
    accept(handler, pushed())
    assert not state.committer.is_saved("run", ME)
    save(state, disk)
    made = pushed(2)
    handler.reject(NOW, made.header, made.body, "schema")
    assert not state.committer.is_saved("run", ME)
