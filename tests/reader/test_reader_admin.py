"""Orders and questions of a reader to all servers: servers are functions, and each wait advances the clock."""

import numpy as np
import pytest

from memoire.accounting.merge import ServerAccounts
from memoire.errors import Closed, MemoireError, MemoireTimeout, ParameterError, Refused, WrongType
from memoire.limits import Limits
from memoire.reader.admin import SNAPSHOT_INTERVAL, ClusterOrders
from memoire.reader.io import ReaderThread
from memoire.wire import messages
from memoire.wire.frames import name_hash
from memoire.wire.rows import ACCOUNT
from readerkit import directory_of, learn, message, refused, welcome

pytestmark = pytest.mark.usefixtures("without_io")


class Monitor:
    """Monitor without contention, whose waits advance the clock."""

    def __init__(self):
        self.time, self.is_open, self.paused = 100.0, True, []
        self.condition = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def notify_all(self):
        pass

    def now(self):
        return self.time

    def check_open(self):
        if not self.is_open:
            raise Closed("this reader")

    def wait(self, is_done, patience):
        if not is_done():
            self.time += patience
        return is_done()

    def pause(self, seconds):
        self.paused.append(seconds)
        assert len(self.paused) < 100, "it waits without an end"
        self.time += seconds


class Thread:
    """Reader thread that runs each call at once.

    `servers` maps a name to an answer: a body, an error, or a function that returns a body for a request.
    """

    def __init__(self, **servers):
        self.monitor, self.directory, self.servers = Monitor(), directory_of(*servers), servers
        self.sent, self.entered, self.worker = [], [], self

    def post(self, function):
        function()

    gather = ReaderThread.gather

    def ask(self, server, body, finish, deadline, run):
        self.sent.append((server.name, body, deadline, run))
        answer = self.servers[server.name]
        answer = answer(body) if callable(answer) else answer
        if answer is not None:
            finish(answer if isinstance(answer, MemoireError) else message(answer))

    def no_answer_error(self, what, patience):
        return MemoireTimeout(what, "tcp://a", patience, "")

    def enter_run(self, run):
        self.entered.append(run)


class Orders(ClusterOrders):
    def __init__(self, thread):
        self._thread, self._monitor, self._directory = thread, thread.monitor, thread.directory
        self._limits = Limits(request_timeout=10.0)


def cluster(**servers):
    thread = Thread(**servers)
    return thread, Orders(thread)


def silent(name="tcp://a"):
    return MemoireTimeout("reply", name, 10.0, "It was sent 3 times.")


TAKEN = messages.Taken()

# ------------------------------------------------------------------------------------------------------------- orders


def test_parameters_go_to_every_server_as_they_travel_whichever_run_it_counts():
    thread, admin = cluster(a=TAKEN, b=TAKEN)
    thread.directory.servers["b"].is_away, thread.directory.addresses[0].hello.due = True, 200.0
    admin.configure(4.0, discount=(0.5, 0.9), prev=np.array([1, 2]), multi_step=2)
    plain = messages.Control(parameters={"discount": [0.5, 0.9], "prev": [1, 2], "multi_step": 2})
    assert thread.sent == [("a", plain, 104.0, 0), ("b", plain, 104.0, 0)]
    assert thread.directory.next_time() == 0.0  # the next HELLO, which is due at once, reads the result


@pytest.mark.parametrize("order", [lambda admin: admin.configure(None), lambda admin: admin.snapshot("x", None)])
def test_an_order_to_all_waits_until_somebody_answers_at_every_address(order):
    thread, admin = cluster(a=TAKEN)
    thread.directory.addresses[0].unmet = ("tcp://later", "tcp://other")
    with pytest.raises(MemoireTimeout, match="tcp://later, tcp://other.*nothing was changed"):
        order(admin)
    assert thread.sent == [] and thread.monitor.now() == 110.0


def test_an_order_that_a_server_did_not_answer_says_that_the_others_have_it():
    _, admin = cluster(a=TAKEN, b=silent())
    with pytest.raises(MemoireTimeout, match="server 'b'.*It was sent 3 times.*call again when 'b' is back"):
        admin.configure(None)


CALLS = {
    "configure": lambda admin, timeout: admin.configure(timeout),
    "begin_run": lambda admin, timeout: admin.begin_run("next", timeout),
    "finish": lambda admin, timeout: admin.finish(timeout),
    "tell": lambda admin, timeout: admin.tell("b", messages.Control(drain=True), timeout),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_server_whose_disk_is_full_is_asked_again_until_there_is_room_or_the_time_is_over(call):
    refusals = [refused("disk"), refused("disk")]
    thread, admin = cluster(a=TAKEN, b=lambda _: refusals.pop() if refusals else TAKEN)
    CALLS[call](admin, 4.0)
    asked = [name for name, *_ in thread.sent]
    assert asked.count("b") == 3 and asked.count("a") <= 1, "the others have the order"
    assert {deadline for _, _, deadline, _ in thread.sent} == {104.0}
    thread.servers["b"] = lambda _: refused("disk") if thread.monitor.now() < began + 3.0 else silent()
    began = thread.monitor.now()
    with pytest.raises(Refused, match="no") as raised:  # the error is the refusal, not the later silence
        CALLS[call](admin, 4.0)
    assert raised.value.code == "disk" and 3.0 <= thread.monitor.now() - began <= 4.0


def test_a_run_that_is_begun_is_entered_when_all_servers_count_it():
    thread, admin = cluster(a=TAKEN)
    admin.begin_run("next", None)
    assert thread.sent[0][1] == messages.Control(run="next") and thread.entered == [name_hash("next")]
    thread.servers["a"] = refused("run")
    with pytest.raises(Refused):
        admin.begin_run("other", None)
    assert len(thread.entered) == 1
    with pytest.raises(TypeError):
        admin.begin_run(3, None)


def test_the_end_is_told_to_all_and_awaited_of_those_that_are_away_too(caplog):
    thread, admin = cluster(a=messages.Taken(finished=True), b=messages.Taken(finished=True))
    thread.directory.servers["b"].is_away = True
    admin.finish(None)
    assert [(name, run) for name, _, _, run in thread.sent] == [("a", None), ("b", None)]
    assert thread.directory.is_finished and not caplog.records
    thread.servers["b"] = silent()
    admin.finish(3.0)
    assert "did not answer within 3.0 s: 'b'" in caplog.text
    thread.servers["b"] = None
    with pytest.raises(MemoireTimeout, match="answer"):
        admin.finish(3.0)  # without a wait, the clients of server b missed the end of the run


def test_the_end_is_told_to_servers_that_are_met_meanwhile(caplog):
    thread, admin = cluster(a=TAKEN)
    (address,) = thread.directory.addresses
    address.unmet = ("tcp://b",)
    admin.finish(3.0)
    assert "did not answer within 3.0 s: 'tcp://b'" in caplog.text and [name for name, *_ in thread.sent] == ["a"]
    assert thread.monitor.now() == 103.0
    caplog.clear()

    def met(is_done, patience):
        if address.unmet:
            learn(thread.directory, welcome("a", ("a", "b")), thread.monitor.now())
            thread.servers["b"] = TAKEN
        return is_done()

    thread.monitor.wait = met
    admin.finish(3.0)
    assert [name for name, *_ in thread.sent][1:] in (["a", "a", "b"], ["a", "b"]) and not caplog.records


@pytest.mark.parametrize("call", ["finish", "begin_run", "configure", "snapshot"])
def test_a_reader_that_is_closed_orders_nothing(call):
    thread, admin = cluster(a=TAKEN)
    thread.monitor.is_open = False
    args = {"finish": (None,), "begin_run": ("one", None), "configure": (None,), "snapshot": ("one", None)}[call]
    with pytest.raises(Closed):
        getattr(admin, call)(*args)
    assert thread.sent == []


# ---------------------------------------------------------------------------------------------------------- questions


def test_what_cannot_be_asked_is_refused_before_anything_is_sent():
    thread, admin = cluster(a=TAKEN, b=TAKEN)
    with pytest.raises(ParameterError, match="one of a, b"):
        admin.ask({"a": messages.LedgerRequest(), "c": messages.LedgerRequest()}, None)
    with pytest.raises(WrongType, match="a request of memoire.wire.messages"):
        admin.ask({"a": "ledger"}, None)
    assert thread.sent == []


def test_a_server_that_is_forgotten_while_it_is_asked_is_said_to_be():
    thread, admin = cluster(a=TAKEN)
    thread.post = lambda function: (thread.directory.servers.clear(), function())
    assert isinstance(admin.ask({"a": messages.LedgerRequest()}, None)["a"], ParameterError)


def test_one_server_is_told_something_and_has_to_say_that_it_took_it():
    thread, admin = cluster(a=TAKEN)
    assert admin.tell("a", messages.Control(), None) == TAKEN
    thread.servers["a"] = refused("role")
    with pytest.raises(Refused):
        admin.tell("a", messages.Control(), None)
    thread.servers["a"] = messages.Accounts(run_name="one")
    with pytest.raises(Refused, match="answered Accounts"):
        admin.tell("a", messages.Control(), None)


# ---------------------------------------------------------------------------------------------------------- snapshots


def test_a_snapshot_is_asked_for_until_every_server_has_written_it():
    states = iter(
        [messages.SnapshotReply(name="x", state="writing"), messages.SnapshotReply(name="x", state="done", bytes=7)]
    )
    failed = messages.SnapshotReply(name="x", state="failed", text="disk full")
    thread, admin = cluster(a=lambda _: next(states), b=failed, c=TAKEN, d=silent())
    answers = admin.snapshot("x", None)
    assert answers["a"].bytes == 7 and thread.monitor.paused == [SNAPSHOT_INTERVAL, 0.0]
    assert (
        answers["b"].code == "failed" and answers["c"].code == "unexpected" and isinstance(answers["d"], MemoireTimeout)
    )
    orders = {body.order for _, body, _, _ in thread.sent}
    assert len(orders) == 1 and len(thread.sent) == 5  # one order: each server writes one file


def test_a_snapshot_that_takes_longer_than_the_call_goes_on():
    thread, admin = cluster(a=messages.SnapshotReply(name="x", state="writing"))
    answers = admin.snapshot("x", 1.0)
    assert isinstance(answers["a"], MemoireTimeout) and "The server is still writing" in str(answers["a"])
    assert thread.monitor.now() == pytest.approx(101.0, abs=2 * SNAPSHOT_INTERVAL)


def rows_of(*steps):
    """Return accounts of clients 1, 2 ... with these numbers of steps."""
    rows = np.zeros(len(steps), ACCOUNT)
    rows["client"][:, 0], rows["steps"] = np.arange(1, len(steps) + 1), steps
    return rows


def accounts(run="one", rows=(), **facts):
    return messages.Accounts(run_name=run, accounts=rows_of(*rows).tobytes(), runs=facts.pop("runs", [run]), **facts)


def test_totals_count_each_client_once_over_all_servers():
    finished = {"finished": True, "durable": True}
    thread, admin = cluster(
        a=accounts(rows=(50, 7), applied=3, stale=1, **finished), b=accounts(rows=(80,), applied=4, **finished)
    )
    report = admin.totals(None, None)
    assert (report.run, report.totals.steps, report.totals.applied, report.totals.stale) == ("one", 87, 7, 1)
    assert report.finished and report.durable and report.servers == ("a", "b") and report.missing == ()
    thread.servers["b"] = accounts(rows=(80,))
    assert not admin.totals(None, None).finished and not admin.totals(None, None).durable


def test_totals_that_nobody_answers_say_why():
    thread, admin = cluster(a=silent(), b=refused("missing"))
    with pytest.raises(MemoireTimeout, match="It was sent 3 times"):
        admin.totals(None, None)
    thread.directory.servers.clear()
    with pytest.raises(MemoireTimeout, match="No server has answered yet"):
        admin.totals("one", 2.0)


def test_servers_that_count_another_run_are_asked_for_the_one_that_most_of_them_count():
    def answer(own, rows):
        return lambda body: accounts(body.run or own, rows if (body.run or own) == "new" else (), runs=["old", "new"])

    thread, admin = cluster(a=answer("new", (5,)), b=answer("old", (6,)), c=answer("new", (7,)))
    report = admin.totals(None, None)
    assert (report.run, report.totals.steps, report.runs) == ("new", 7, ("old", "new"))
    assert [name for name, body, _, _ in thread.sent if body.run == "new"] == ["b"]


def test_accounts_come_in_pages_and_each_page_begins_after_the_last_one():
    pages = [rows_of(1, 2, 3, 4, 5)[i : i + 2] for i in (0, 2, 4)]

    def answer(body):
        page = pages[len([each for each in thread.sent if each[0] == "a"]) - 1]
        return messages.Accounts(run_name="one", accounts=page.tobytes(), more=len(page) == 2)

    thread, admin = cluster(a=answer, b=accounts(rows=(9,)))
    answers = admin.accounts("one", None)
    assert isinstance(answers["a"], ServerAccounts) and answers["a"].rows["steps"].tolist() == [1, 2, 3, 4, 5]
    asked = [body for name, body, _, _ in thread.sent if name == "a"]
    assert [bool(body.after) for body in asked] == [False, True, True] and {body.run for body in asked} == {"one"}
    assert len([name for name, *_ in thread.sent if name == "b"]) == 1
    assert list(admin.accounts(None, None, ["b"])) == ["b"] and admin.accounts(None, None, []) == {}
