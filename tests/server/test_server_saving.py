"""When a server's replies leave, and what becomes of a disk that is full or lost: without a disk, and without a socket."""

from types import SimpleNamespace

import pytest

from fake_store import Disk, MemoryStore
from memoire.accounting.unsaved_changes import SavedGroup
from memoire.limits import Limits
from memoire.pool.caches import Pool
from memoire.pool.tables import Table, Tables
from memoire.server.dispatch import Dispatcher
from memoire.server.io_saving import ReplySaver
from memoire.server.reply import Reply
from memoire.wire import messages
from memoire.wire.frames import encode, parse
from netkit import SCHEMA


def header(number):
    """Of an UPDATE of one client."""
    return parse(encode(messages.Update(), client=bytes(15) + b"1", sequence=number)).header


HEADER = header(1)
WAITING = Reply(messages.Published(topic="policy", version=1), until_saved=True)
UPDATED = Reply(messages.Updated(epoch=1, durable=True), until_saved=True)


class Folder(MemoryStore):
    """A state folder that saves when it is told to."""

    is_healthy, trouble = True, "the disk is full"

    def __init__(self):
        super().__init__(Disk())
        self.woken, self.is_saved = 0, True

    def start(self, collect, done, failed):
        self.collect, self.done, self.failed = collect, done, failed

    def save(self):
        self.done(self.collect())

    def wake(self):
        self.woken += 1

    def close(self, timeout):
        self.closed_in = timeout
        return self.is_saved


class Thread:
    """The requests' thread, which runs what was posted when it is told to."""

    def __init__(self):
        self.posted, self.errors = [], 0

    def post(self, function):
        self.posted.append(function)

    def turn(self):
        while self.posted:
            self.posted.pop(0)()


@pytest.fixture
def disk():
    """Saving with a folder that waits for the test, and what was sent."""
    folder, thread, sent = Folder(), Thread(), []
    dispatcher = dispatcher_of(folder)
    saving = ReplySaver(dispatcher, folder, thread)
    saving.start()
    folder.save()  # what a server has to save when it begins
    return SimpleNamespace(folder=folder, thread=thread, sent=sent, dispatcher=dispatcher, saving=saving)


def dispatcher_of(folder=None):
    tables = Tables({"default": Table(SCHEMA)}, lambda name, table: Pool(table.schema, table.parameters, seed=0))
    return Dispatcher(tables=tables, run="one", name="home", limits=Limits(), clock=lambda: 1.0, epoch=1, store=folder)


def test_without_a_folder_every_reply_leaves_at_once():
    sent = []
    dispatcher = dispatcher_of()
    saving = ReplySaver(dispatcher, None, Thread())
    saving.start()
    dispatcher.send(HEADER, WAITING, sent.append)
    saving.close(1.0)
    assert sent == [WAITING] and saving.lost is None


def test_a_reply_that_promises_nothing_leaves_at_once(disk):
    reply = Reply(messages.Taken())
    disk.dispatcher.send(HEADER, reply, disk.sent.append)
    assert disk.sent == [reply]


def test_a_reply_that_promises_something_leaves_when_it_is_saved_and_in_the_requests_thread(disk):
    disk.dispatcher.send(HEADER, WAITING, disk.sent.append)
    assert disk.folder.woken and disk.sent == []
    disk.folder.save()
    assert disk.sent == []
    disk.thread.turn()
    assert disk.sent == [WAITING]


def test_a_group_that_nobody_waits_for_bothers_no_thread(disk):
    disk.folder.done(SavedGroup())
    assert disk.thread.posted == []


def test_a_client_hears_at_once_why_its_counts_are_not_acknowledged(disk):
    disk.folder.is_healthy, disk.folder.trouble = False, "x" * 2000
    disk.dispatcher.send(HEADER, UPDATED, disk.sent.append)
    disk.dispatcher.send(HEADER, WAITING, disk.sent.append)  # whoever asked for anything else waits
    assert disk.sent == [Reply(messages.Refused(code="disk", text="x" * 1000))]


def test_counts_wait_for_a_disk_that_is_well(disk):
    disk.dispatcher.send(HEADER, UPDATED, disk.sent.append)
    assert disk.sent == []


def test_a_reply_that_cannot_be_sent_keeps_no_other_from_leaving(disk):
    disk.dispatcher.send(HEADER, WAITING, lambda reply: 1 / 0)
    disk.dispatcher.send(header(2), WAITING, disk.sent.append)
    disk.folder.save()
    disk.thread.turn()
    assert disk.sent == [WAITING] and disk.thread.errors == 1


def test_a_lost_disk_is_remembered_and_ends_all_draws(disk):
    error = OSError(5, "gone")
    disk.folder.failed(error)
    assert disk.saving.lost is error
    with pytest.raises(Exception, match="closed"):
        disk.dispatcher.tables.first.pool.get(1, timeout=0.0)


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_warning_says_that_not_all_was_saved_at_the_end(disk, caplog, is_saved):
    disk.folder.is_saved = is_saved
    disk.saving.close(3.0)
    assert disk.folder.closed_in == 3.0
    assert ("not everything could be saved" in caplog.text) is not is_saved
