"""Client ids belong to the key that uses them first."""

import pytest

from fake_store import Disk
from memoire.errors import ProtocolError
from memoire.server.state import ClientOwners
from memoire.wire import messages
from memoire.wire.frames import NO_CLIENT
from serverkit import ME, NOW, READER, YOU, save, state_of, store_of

pytestmark = pytest.mark.usefixtures("without_io")


@pytest.fixture
def state():
    return state_of()


def refused(owner, client, principal):
    with pytest.raises(ProtocolError) as caught:
        owner.check(client, principal, NOW)
    assert caught.value.code == "owner"
    return caught.value.detail


def test_nobody_owns_anything_where_no_keys_are_asked_for(state):
    owner = ClientOwners(state)
    owner.check(ME, "", NOW)
    owner.check(NO_CLIENT, "actor/a", NOW)
    owner.check(NO_CLIENT, "actor/b", NOW)
    owner.check(ME, "actor/a", NOW)


def test_an_id_without_an_account_belongs_to_whoever_uses_it_first(state):
    owner = ClientOwners(state)
    owner.check(READER, "reader/a", NOW)
    owner.check(READER, "reader/a", NOW)
    detail = refused(owner, READER, "reader/b")
    assert detail == f"client {READER.hex()[:8]} belongs to the key reader/a, not reader/b"
    owner.check(YOU, "reader/b", NOW)


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
    account = state.ledger.greet(ME, NOW)
    owner.move_to(account)
    assert account.owner == "actor/a"
    owner.move_to(account)
    assert account.owner == "actor/a"
    refused(owner, ME, "actor/b")
