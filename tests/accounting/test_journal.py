"""What a server has to save is gathered into one group after the other, and replies wait for theirs."""

from memoire.accounting.ledger import Ledger
from memoire.accounting.logbook import Logbook
from memoire.accounting.runs import MAX_WAITING, RunFacts, UnsavedChanges
from memoire.models.model import make
from memoire.wire import messages

ME = b"m" * 16


def test_what_changed_comes_once_and_as_it_was_when_it_was_taken():
    ledger, journal = Ledger(), UnsavedChanges()
    account = ledger.report(ME, 1, messages.Update(episodes=3), 0.0)
    journal.touch("run", account)
    journal.touch("run", account)
    ledger.rejected(account, "schema")
    group = journal.take()
    ledger.report(ME, 2, messages.Update(episodes=5), 0.0)
    ledger.rejected(account, "schema")
    ((run, taken),) = group.accounts
    assert (run, taken.report.episodes, taken.rejected) == ("run", 3, {"schema": 1})
    assert journal.take() is None and not group.is_empty


def test_an_account_is_saved_when_neither_it_nor_a_group_with_it_waits():
    ledger, journal = Ledger(), UnsavedChanges()
    account = ledger.report(ME, 1, messages.Update(steps=1), 0.0)
    assert journal.is_saved("run", ME)
    journal.touch("run", account)
    assert not journal.is_saved("run", ME)
    journal.take()
    assert not journal.is_saved("run", ME) and journal.is_saved("other", ME)
    journal.touch("run", account)
    journal.saved()
    assert not journal.is_saved("run", ME)
    journal.take()
    journal.saved()
    assert journal.is_saved("run", ME)


def test_of_runs_models_and_settings_the_newest_is_saved_and_of_lines_every_one():
    journal, book = UnsavedChanges(), Logbook()
    for number in (1, 2):
        journal.run(RunFacts("run", finished=number == 2))
        journal.model("run", make("topic", b"body", number))
        journal.setting("name", str(number))
        journal.lines("run", book.take(ME, [messages.Line(number=number, time=0.0, label=0, text="x")], 0, 0.0))
        journal.inherit("run", b"row")
    group = journal.take()
    assert group.runs == [RunFacts("run", finished=True)] and group.settings == {"name": "2"}
    assert [model.version for _, model in group.models] == [2]
    assert [entry.index for _, entry in group.lines] == [1, 2] and len(group.inherited) == 2


def test_a_reply_waits_also_when_nothing_else_does_and_a_resend_replaces_it():
    journal = UnsavedChanges()
    journal.wait("a", 1)
    journal.wait("b", 2)
    journal.wait("a", 3)
    group = journal.take()
    assert group.is_empty and group.tickets == [2, 3]


def test_replies_that_wait_are_bounded():
    journal = UnsavedChanges()
    for number in range(MAX_WAITING + 3):
        journal.wait(number, number)
    assert journal.given_up == 3 and journal.take().tickets[0] == 3
