"""Replies that wait for a disk, disks that are full or lost, and recovery of a server's former life."""

import typing
from types import SimpleNamespace

import numpy as np
import pytest

from fake_store import Disk, MemoryStore
from memoire.errors import ParameterError, UnknownName
from memoire.keyed import messages as keyed
from memoire.prompts import messages as prompt_messages
from memoire.server.io_requests import ReplySaver
from memoire.server.state import Committer, recover, run_to_count
from memoire.tables.registry import Reply
from memoire.tables.rollouts import fragments
from memoire.tables.table import Table
from memoire.wire import _bytes, messages
from memoire.wire.frames import encode, parse, table_number
from netkit import SCHEMA
from serverkit import ME, PARAMETERS, Ends, dispatcher_of, message, save, state_of, store_of, tables_of

HEADER, NEXT_HEADER = (message(messages.Update(), number=number).header for number in (1, 2))
PROMPTS = Table({"reward": np.float32}, storage="prompts", group=1)
WAITING = Reply(messages.Published(topic="policy", version=1), until_saved=True)


class Folder(MemoryStore):
    """State folder that saves when a test calls `save`."""

    is_healthy, problem = True, "the disk is full"

    def __init__(self):
        super().__init__(Disk())
        self.woken, self.is_saved = 0, True

    def start(self, collect, done, failed, delayed):
        self.collect, self.done, self.failed, self.delayed = collect, done, failed, delayed

    def save(self):
        if (group := self.collect()) is not None:
            self.done(group)

    def wake(self):
        self.woken += 1

    def close(self, timeout):
        self.closed_in = timeout
        return self.is_saved


class Thread:
    """Thread of requests, which runs posted functions when a test calls `tick`."""

    def __init__(self):
        self.posted, self.errors = [], 0

    def post(self, function):
        self.posted.append(function)

    def tick(self):
        while self.posted:
            self.posted.pop(0)()


@pytest.fixture
def disk():
    """Return a reply saver with a folder that the test controls, and the replies that were sent."""
    folder, thread, sent, tables = Folder(), Thread(), [], tables_of(default=Table(SCHEMA), p=PROMPTS)
    tables["p"].pool.keep_changes()
    dispatcher = dispatcher_of(tables, store=folder)
    saving = ReplySaver(dispatcher, folder, thread)
    saving.start()
    folder.save()  # the initial data of a server
    return SimpleNamespace(folder=folder, thread=thread, sent=sent, dispatcher=dispatcher, saving=saving)


def test_a_reply_that_promises_something_leaves_when_it_is_saved_and_in_the_requests_thread(disk):
    disk.dispatcher.send(HEADER, WAITING, disk.sent.append)
    assert disk.folder.woken and disk.sent == []
    disk.folder.save()
    assert disk.sent == []
    disk.thread.tick()
    assert disk.sent == [WAITING]


def test_a_reply_that_cannot_be_sent_keeps_no_other_from_leaving(disk):
    disk.dispatcher.send(HEADER, WAITING, lambda reply: 1 / 0)
    disk.dispatcher.send(NEXT_HEADER, WAITING, disk.sent.append)
    disk.folder.save()
    disk.thread.tick()
    assert disk.sent == [WAITING] and disk.thread.errors == 1


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_warning_says_that_not_all_was_saved_at_the_end(disk, caplog, is_saved):
    disk.folder.is_saved = is_saved
    disk.saving.close(3.0)
    assert disk.folder.closed_in == 3.0
    assert ("not everything could be saved" in caplog.text) is not is_saved


KEY = prompt_messages.PromptKey("d", 0, 0)
REWARD = np.float32(1).tobytes()


def piece(lease=0, failed=""):
    return prompt_messages.AnswerPiece("d", 0, 0, lease, 0, 0, True, 1, 1, [], 4 * (not failed), failed, bool(failed))


def requests(lease):
    """Yield requests of each kind, in an order in which a server grants them, with their payloads."""
    yield messages.Hello(role="actor"), None
    yield messages.Update(epoch=2, episodes=1), None
    yield messages.Hello(role="reader"), None
    yield messages.Hello(role="doctor"), None
    yield prompt_messages.Groups(call="add", dataset="d", new=[prompt_messages.NewPrompt(0, 1)]), b"x"
    yield prompt_messages.Groups(call="known", keys=[KEY]), None
    yield prompt_messages.Groups(call="prioritise", keys=[KEY], priority=2.0), None
    yield prompt_messages.Groups(call="shares", shares={"d": 1.0}), None
    yield prompt_messages.Groups(call="model", version=1), None
    yield prompt_messages.Answers(call="lease", seconds=100.0), None
    yield prompt_messages.Answers(call="renew", leases=[lease()]), None
    yield prompt_messages.Answers(call="fail", pieces=[piece(lease(), "again")]), None
    yield prompt_messages.Answers(call="lease", seconds=100.0), None
    yield prompt_messages.Answers(call="release", leases=[lease()]), None
    yield prompt_messages.Answers(call="lease", seconds=100.0), None
    yield prompt_messages.Answers(call="answer", pieces=[piece(lease())]), REWARD
    yield prompt_messages.Answers(call="amend", pieces=[piece()]), REWARD
    yield prompt_messages.Groups(call="score", keys=[KEY], values=[1.0]), None
    yield prompt_messages.Groups(call="draw", session="one", count=1, wanted=1), None
    yield prompt_messages.Groups(call="rewind", session="one", is_before_first=True), None
    yield prompt_messages.Groups(call="commit", session="one"), None
    yield prompt_messages.Groups(call="cancel", keys=[KEY]), None
    yield prompt_messages.Groups(call="finish", dataset="d"), None
    yield prompt_messages.Groups(call="forget", dataset="d"), None
    for call in ("counts", "list", "fetch", "payloads", "forget"):
        yield prompt_messages.PromptsRequest(call=call), None
    yield messages.Publish(topic="t", size=1, checksum=_bytes.checksum(b"m")), b"m"
    yield messages.Fetch(topic="t"), None
    yield messages.Control(finish=True), None
    yield messages.LedgerRequest(), None
    yield messages.Inherit(run_name="former"), None
    yield messages.Sums(), None
    yield messages.Draw(), None
    yield fragments.Take(), None
    yield messages.Feedback(), b"x"
    yield keyed.FindRows(call="tags"), None
    yield keyed.ChangeRows(call="reset"), None


def answered_by(dispatcher):
    """Yield each request that a server answers, by type and call; rows of `memoire.tq` are in memory alone."""
    for body in {*dispatcher.handlers, *dispatcher.unlocked} - {keyed.FindRows, keyed.ChangeRows}:
        calls = typing.get_type_hints(body).get("call")
        yield from ((body, call) for call in (typing.get_args(calls) or ("",)))


class Scenario:
    """Client that sends one request after the other, each under its own number."""

    def __init__(self, disk):
        self.disk, self.lease, self.number = disk, 0, 0
        self.sent = []

    def __iter__(self):
        for number, (body, payload) in enumerate(requests(lambda: self.lease), 1):
            self.number = number
            yield body, payload

    def ask(self, body, payload):
        """Return the reply that is sent at once, or None if the reply waits."""
        of_prompts = (prompt_messages.PromptsRequest, prompt_messages.Answers, prompt_messages.Groups)
        table = (
            0 if isinstance(body, messages.Hello) else table_number("p" if isinstance(body, of_prompts) else "default")
        )
        facts = {"client": ME, "sequence": self.number, "table": table, "payload": payload}
        asked, sent = parse(encode(body, **facts)), []
        self.disk.dispatcher.send(asked.header, self.disk.dispatcher.answer(asked), sent.append)
        for reply in sent:
            for leased in getattr(reply.body, "leases", ()):
                self.lease = leased.lease
        return sent[0] if sent else None


def test_each_request_that_a_server_answers_is_tried_with_a_full_disk(disk):
    tried = {(type(body), getattr(body, "call", "")) for body, _ in requests(lambda: 0)}
    assert set(answered_by(disk.dispatcher)) <= tried


def test_a_full_disk_refuses_at_once_what_would_wait_for_it_and_has_half_of_nothing_done(disk):
    """Requests that need no disk are answered, and each refused request is granted when the disk has room."""
    disk.folder.problem = "the disk is full since 3 s (/state)"
    scenario = Scenario(disk)
    for body, payload in scenario:
        disk.folder.save()
        assert disk.folder.collect() is None
        disk.folder.is_healthy = False
        reply = scenario.ask(body, payload)
        is_refused = isinstance(reply.body, messages.Refusal) and reply.body.code == "disk"
        if body.is_saved_first:
            assert is_refused and reply.body.text == disk.folder.problem, body
            assert disk.folder.collect() is None, f"{body} has changed something"
        disk.folder.is_healthy = True
        if is_refused:
            reply = scenario.ask(body, payload)
            assert reply is None or body.role == "doctor", f"{body} does not wait for the disk: {reply}"


def test_replies_that_wait_when_the_disk_becomes_full_are_refused_then_and_sent_once(disk):
    scenario = Scenario(disk)
    waiting = [body for body, payload in scenario if scenario.ask(body, payload) is None]
    assert waiting
    disk.dispatcher.send(HEADER, WAITING, disk.sent.append)
    group = disk.folder.collect()
    disk.dispatcher.send(NEXT_HEADER, WAITING, disk.sent.append)
    disk.folder.is_healthy, disk.folder.problem = False, "the disk is full since 3 s " + 2000 * "x"
    disk.folder.delayed()
    disk.thread.tick()
    assert disk.sent == 2 * [Reply(messages.Refusal(code="disk", text=disk.folder.problem[:1000]))]
    disk.folder.is_healthy = True
    disk.folder.done(group)
    disk.folder.save()
    disk.thread.tick()
    assert len(disk.sent) == 2 and not disk.thread.errors


# --- Recovery of a server's former life


@pytest.fixture
def disk_of_recovery():
    return Disk()


def begin(disk, parameters=PARAMETERS):
    """Begin a life of a server on a disk, save everything, and return the handlers."""
    store = store_of(disk)
    committer = Committer(store)
    state = state_of(
        tables_of(default=Table(SCHEMA, parameters=parameters), other=Table(SCHEMA, parameters=PARAMETERS)),
        store=store,
        run=run_to_count(store, None, committer),
    )
    state.committer = committer
    recover(state, store)
    save(state, disk)
    return Ends(state)


def test_parameters_that_are_given_differently_replace_them(disk_of_recovery):
    ends = begin(disk_of_recovery)
    ends.control.configure(ends.state.tables.first, {"cache_size": 4})
    save(ends.state, disk_of_recovery)
    table = begin(disk_of_recovery, parameters=PARAMETERS.replace(cache_size=16)).state.tables.first
    assert (table.parameters.cache_size, table.parameters_version) == (16, 3)
    table = begin(disk_of_recovery, parameters=PARAMETERS.replace(cache_size=16)).state.tables.first
    assert (table.parameters.cache_size, table.parameters_version) == (16, 3)


NO_PARAMETERS = ParameterError, "parameters that a server has saved for a table"
RENAMED = UnknownName, "size_of_caches"


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda text: "", NO_PARAMETERS),
        (lambda text: "[]", NO_PARAMETERS),
        (lambda text: '{"given": {}}', NO_PARAMETERS),
        (lambda text: '{"given": 1, "now": {}, "version": 1}', NO_PARAMETERS),
        (lambda text: "[" * 100_000, NO_PARAMETERS),
        (lambda text: text.replace("cache_size", "size_of_caches", 1), RENAMED),  # parameters at the start
        (lambda text: "size_of_caches".join(text.rsplit("cache_size", 1)), RENAMED),  # parameters that hold now
        (lambda text: '"cache_size":-1'.join(text.rsplit('"cache_size":8', 1)), (ParameterError, "cache_size")),
    ],
)
def test_saved_parameters_that_are_none_or_fit_no_more_are_refused_by_name_and_stay(disk_of_recovery, change, refused):
    begin(disk_of_recovery)
    disk_of_recovery.texts["parameters"] = text = change(disk_of_recovery.texts["parameters"])
    with pytest.raises(refused[0], match=refused[1]):
        begin(disk_of_recovery)
    assert disk_of_recovery.texts["parameters"] == text
