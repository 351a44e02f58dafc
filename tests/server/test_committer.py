"""What a server saves, and what waits for it, with a store that saves when the test says so."""

import numpy as np
import pytest

from fake_store import Disk
from memoire.accounting.logbook import LogEntry
from memoire.accounting.runs import RunFacts
from memoire.models.model import make
from memoire.server.durability import Committer
from memoire.tables.desk import Reply
from memoire.wire import messages
from memoire.wire.rows import ACCOUNT
from serverkit import ME, YOU, message, save, state_of, store_of

pytestmark = pytest.mark.usefixtures("without_io")

HEADER = message(messages.Update()).header
OTHER = message(messages.Update(), YOU).header
PROMISE = Reply(messages.Taken(), until_saved=True)


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def state(disk):
    return state_of(store=store_of(disk))


def touched(state, client=ME, steps=1):
    account = state.ledger.report(client, 1, messages.Update(steps=steps), 1000.0)
    state.committer.touch("run", account)
    return account


def test_without_a_folder_nothing_is_kept_and_nothing_waits():
    committer, called, sent = Committer(None), [], []
    state = state_of()
    committer.touch("run", touched(state))
    committer.add_lines("run", [])
    committer.add_run(RunFacts("run"))
    committer.add_model("run", make("t", b"x", 1))
    committer.add_inherited("run", np.zeros(1, ACCOUNT))
    committer.add_setting("a", "b")
    committer.after(lambda: called.append(1))
    assert called == [1] and not committer.is_durable
    assert committer.is_saved("run", ME) and committer.is_run_saved("run")
    assert committer.hold(HEADER, PROMISE, sent.append) is PROMISE and sent == []


def test_an_account_is_unsaved_until_the_group_that_has_it_is_on_disk(state):
    committer = state.committer
    touched(state)
    assert committer.is_durable and not committer.is_saved("run", ME) and committer.is_saved("run", YOU)
    assert committer.is_saved("other", ME) and not committer.is_run_saved("run")
    group = committer.collect(state.runs)
    assert [(run, account.client) for run, account in group.accounts] == [("run", ME)]
    assert not committer.is_saved("run", ME), "it is being saved"
    committer.saved(state.runs)
    assert committer.is_saved("run", ME) and committer.is_run_saved("run")
    assert committer.collect(state.runs) is None


def test_everything_that_changed_is_saved_in_one_group(state):
    committer = state.committer
    account = touched(state)
    line = LogEntry(1, 1000.0, ME, messages.Line(number=1, time=0.0, label=7, text="x"))
    model = make("t", b"x", 1)
    committer.add_lines("run", [line])
    committer.add_run(RunFacts("run", began=5.0))
    committer.add_model("run", model)
    committer.add_inherited("run", np.zeros(2, ACCOUNT))
    committer.add_setting("a", "b")
    group = committer.collect(state.runs)
    assert [each.report.steps for _, each in group.accounts] == [account.report.steps]
    assert (group.lines, group.runs, group.models) == ([("run", line)], [RunFacts("run", began=5.0)], [("run", model)])
    assert [(run, len(rows)) for run, rows in group.inherited] == [("run", 2 * ACCOUNT.itemsize)]
    assert group.settings == {"a": "b"}


def test_what_waits_is_called_once_when_its_group_is_on_disk(state, disk):
    called = []
    state.committer.after(lambda: called.append("first"))
    group = state.committer.collect(state.runs)
    state.committer.after(lambda: called.append("second"))
    assert called == [] and len(group.tickets) == 1
    for ticket in group.tickets:
        ticket()
    state.committer.saved(state.runs)
    assert called == ["first"]
    assert save(state, disk) == 1 and called == ["first", "second"]


def test_whatever_waits_wakes_the_store(state):
    store = state.committer._store
    touched(state)
    assert not store.woken.is_set(), "nobody waits for that"
    state.committer.after(lambda: None)
    assert store.woken.is_set()
    store.woken.clear()
    state.committer.hold(HEADER, PROMISE, lambda reply: None)
    assert store.woken.is_set()


def test_a_reply_that_promises_nothing_goes_at_once(state):
    reply = Reply(messages.Taken())
    assert state.committer.hold(HEADER, reply, pytest.fail) is reply
    assert state.committer.collect(state.runs) is None


def test_a_reply_that_promises_something_waits_for_the_disk(state, disk):
    sent = []
    assert state.committer.hold(HEADER, PROMISE, sent.append) is None and sent == []
    assert save(state, disk) == 1 and sent == [PROMISE]


def test_of_two_replies_to_the_same_request_the_later_one_is_sent(state, disk):
    sent, later = [], Reply(messages.Taken(samples=2), until_saved=True)
    state.committer.hold(HEADER, PROMISE, sent.append)
    state.committer.hold(OTHER, PROMISE, sent.append)
    state.committer.hold(HEADER, later, sent.append)
    state.committer.hold(message(messages.Update(), number=2).header, PROMISE, sent.append)
    save(state, disk)
    assert sent == [PROMISE, later, PROMISE]


def test_a_client_hears_why_nothing_is_acknowledged_while_the_disk_is_full(state, disk):
    disk.is_full = True
    updated = Reply(messages.Updated(), until_saved=True)
    told = state.committer.hold(HEADER, updated, pytest.fail)
    assert (told.body.code, told.body.text, told.until_saved) == ("disk", "the disk is full", False)
    assert state.committer.hold(OTHER, PROMISE, pytest.fail).body == told.body
    assert state.committer.collect(state.runs) is None, "no reply waits: the client says all of it again"


def test_accounts_of_a_folded_client_are_read_as_they_are_on_disk_once_they_are_saved(state, disk):
    account = touched(state, steps=5)
    save(state, disk)
    state.ledger.fold(account)
    assert ME not in state.ledger and state.ledger.find(ME).report.steps == 5


def test_accounts_of_other_servers_are_kept_in_memory_until_they_are_on_disk(state):
    rows, kept = np.zeros(2, ACCOUNT), state.run.kept
    rows["client"][:, 0], rows["home"], rows["steps"] = range(2), 7, 5
    state.run.inherit(rows)
    state.committer.add_inherited("run", rows)
    state.committer.collect(state.runs)
    assert kept.rows(b"", 9)["steps"].tolist() == [5, 5], "nothing is on disk yet"
    state.committer.saved(state.runs)
    assert len(kept.rows(b"", 9)) == 0, "from here on they are read from the disk, which has none in this test"
