"""Tests that each waiting call of docs/errors.md ends at its timeout, at its owner's close, and at KeyboardInterrupt."""

import contextlib
import inspect
import linecache
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zmq

from classic_help import templates
from history.ports import address
from memoire.classic.client import ReplayMemoryClient
from memoire.classic.server import ReplayMemoryServer
from memoire.client.client import Client, connect
from memoire.client.waiting import ModelHandle, Receiver
from memoire.errors import Closed, MemoireTimeout, NotEnoughSamples
from memoire.inference.node import Inference
from memoire.inference.policy import Pending, RemotePolicy
from memoire.limits import Limits
from memoire.proxy.proxy import Proxy
from memoire.reader.reader import Reader
from memoire.replay.parameters import Parameters
from memoire.rl.agent import Agent
from memoire.rl.observer import Observer
from memoire.server.server import Server
from memoire.server.table_handle import TableHandle
from memoire.wire import messages
from netkit import Cluster, FaultyWay, in_thread, record, until

TIMEOUT = 0.2
LATE = 20.0
"""Seconds that a busy machine, and a look at the address for the error's advice, may add to a deadline."""
LONG = 60.0
FEW_LINES = Limits.of(log_lines=3, log_timeout=LONG, credit=1, block_timeout=LONG)
CLASSES = (Client, ModelHandle, Receiver, Reader, Server, TableHandle, Proxy, ReplayMemoryClient, ReplayMemoryServer,
           Inference, RemotePolicy, Pending, Agent, Observer)  # fmt: skip

EPISODE = {"obs": np.zeros((5, 4), np.float32), "action": np.zeros(5, np.int32), "reward": np.zeros(5, np.float32)}


class Alone:
    """A node and a client of each kind that were connected once; no peer answers any more."""

    def __init__(self):
        self.cluster = Cluster()
        stalled = self.cluster.context.socket(zmq.PULL)  # the socket receives a cache and acknowledges none
        port = stalled.bind_to_random_port("tcp://127.0.0.1")
        push = f"tcp://127.0.0.1:{port}"
        self.server = self.cluster.server(limits=FEW_LINES, parameters=Parameters(cache_size=8))
        self.way = self.cluster.way(self.server, drop=0.0, double=0.0)
        here = {"context": self.cluster.context}
        self.client = Client(self.way.endpoint, push=push, limits=FEW_LINES, capacity=1000, **here)
        self.reader = self.cluster.reader([self.way.endpoint])
        self.proxy = self.cluster.proxy([self.way.endpoint])
        record(self.client, length=20)
        assert self.client.push_cache(100.0)  # the window is full from this step on
        self.episodes = self.cluster.server(limits=FEW_LINES, storage="episodes", capacity=1000)
        self.rollouts = self.cluster.server(storage="rollouts", capacity=1000)
        self.taker = self.cluster.reader([self.rollouts])
        self.shipper = self.cluster.keep(Client(self.episodes.endpoint, push=push, limits=FEW_LINES, **here))
        assert self.shipper.push_episode(EPISODE, timeout=100.0)
        classic = {"seed": 1, "limits": FEW_LINES, **here}
        self.classic_server = ReplayMemoryServer(*templates(), 100, "inproc://pub", 4, **classic)
        rows = {"obs": np.float64}
        acting = rows, rows, lambda columns: columns
        self.node = self.cluster.keep(Inference("tcp://127.0.0.1:*", *acting, **here))
        self.policy = self.cluster.keep(RemotePolicy(self.node.endpoint, rows, rows, 100.0, **here))
        entries = {"obs": np.float64, "reward": np.float32}
        self.agent = self.cluster.keep(Agent("tcp://127.0.0.1:*", *acting, entries, **here))
        self.observer = self.cluster.keep(Observer(push, print, **here))
        place = address()
        self.classic_server.server.add_request_worker(place)
        self.classic_way = self.cluster.keep(FaultyWay(self.cluster.context, place, drop=0.0, double=0.0))
        self.classic = ReplayMemoryClient("inproc://pub", self.classic_way.endpoint, push, **classic)
        rem = self.classic.rem
        rem.new_episode()
        for _ in range(20):
            state, action, reward, prob, value, _, info = map(np.ones_like, templates())
            rem.add_entry(state, action, reward, prob, value, info)
        rem.close_episode()
        assert self.classic.push_cache(timeout=100.0) == 0
        for each in (self.client, self.classic):
            each.log("x") if each is self.client else each.write_log("x")
            each.update(100.0) if each is self.client else each.update_counter(timeout=100.0)
        self.way.drop = self.classic_way.drop = 1.0
        for _ in range(3):
            assert self.client.log("kept")
            self.classic.write_log("kept")

    def close(self):
        for each in (self.client, self.classic, self.classic_server):
            each.close(0.0)
        self.cluster.close()


@dataclass(frozen=True)
class Waits:
    """A call that waits, with its outcome without an answer and its outcome at a close."""

    call: object
    gives: object = MemoireTimeout
    ended: object = Closed
    owner: str = ""


def first(batches):
    return next(iter(batches), "no batch")


WAITS = {
    (Client, "update"): Waits(lambda at, t: at.client.update(t)),
    (Client, "push_cache"): Waits(lambda at, t: at.client.push_cache(t), gives=False),
    (Client, "push_episode"): Waits(lambda at, t: at.shipper.push_episode(EPISODE, timeout=t), False, owner="shipper"),
    (Client, "sync"): Waits(lambda at, t: at.client.sync(timeout=t)),
    (Client, "log"): Waits(lambda at, t: at.client.log("beyond the limit", t), gives=False),
    (Client, "batches"): Waits(lambda at, t: first(at.client.batches(8, t)), ended="no batch"),
    (Client, "close"): Waits(lambda at, t: at.client.close(t), gives=False, ended=None),
    (ModelHandle, "wait"): Waits(lambda at, t: at.client.model("m").wait(t)),
    (Receiver, "receive"): Waits(lambda at, t: at.client.subscribe("m").receive(t)),
    (Receiver, "receive_model"): Waits(lambda at, t: at.client.subscribe("m").receive_model(t)),
    (Reader, "get_batch"): Waits(lambda at, t: at.reader.get_batch(8, t), gives=(MemoireTimeout, NotEnoughSamples)),
    (Reader, "batches"): Waits(lambda at, t: first(at.reader.batches(8, t)), ended="no batch"),
    (Reader, "take"): Waits(lambda at, t: at.taker.take(8, t), gives=NotEnoughSamples, owner="taker"),
    (Reader, "publish"): Waits(lambda at, t: at.reader.publish("m", b"x", t)),
    (Reader, "configure"): Waits(lambda at, t: at.reader.configure(t, importance_exponent=0.5)),
    (Reader, "finish"): Waits(lambda at, t: at.reader.finish(t)),
    (Reader, "begin_run"): Waits(lambda at, t: at.reader.begin_run("next", t)),
    (Reader, "snapshot"): Waits(lambda at, t: at.reader.snapshot("name", t), gives="inside"),
    (Reader, "tell"): Waits(lambda at, t: at.reader.tell(at.server.name, messages.Sums(), t)),
    (Reader, "ask"): Waits(lambda at, t: at.reader.ask({at.server.name: messages.Sums()}, t), gives="inside"),
    (Reader, "accounts"): Waits(lambda at, t: at.reader.accounts(timeout=t), gives="inside"),
    (Reader, "totals"): Waits(lambda at, t: at.reader.totals(timeout=t), gives="anything"),
    (Reader, "close"): Waits(lambda at, t: at.reader.close(t), gives=True, ended=True),
    (Server, "get_batch"): Waits(lambda at, t: at.server.get_batch(8, t), gives=NotEnoughSamples),
    (Server, "batches"): Waits(lambda at, t: first(at.server.batches(8, t)), ended="no batch"),
    (Server, "sample_episodes"): Waits(
        lambda at, t: at.episodes.sample_episodes(8, t), gives=NotEnoughSamples, owner="episodes"
    ),
    (TableHandle, "sample_episodes"): Waits(
        lambda at, t: at.episodes.table("default").sample_episodes(8, t), gives=NotEnoughSamples, owner="episodes"
    ),
    (TableHandle, "take"): Waits(
        lambda at, t: at.rollouts.table("default").take(8, t), gives=NotEnoughSamples, owner="rollouts"
    ),
    (TableHandle, "get_batch"): Waits(lambda at, t: at.server.table("default").get_batch(8, t), gives=NotEnoughSamples),
    (TableHandle, "batches"): Waits(lambda at, t: first(at.server.table("default").batches(8, t)), ended="no batch"),
    (Server, "wait_closed"): Waits(lambda at, t: at.server.wait_closed(t), gives=False, ended=True),
    (Server, "close"): Waits(lambda at, t: at.server.close(t), gives=None, ended=None),
    (Inference, "wait_version"): Waits(lambda at, t: at.node.wait_version(9, t)),
    (Inference, "wait"): Waits(lambda at, t: at.node.wait(t), gives=False, ended=True),
    (Inference, "close"): Waits(lambda at, t: at.node.close(t), gives=None, ended=None),
    (Pending, "result"): Waits(lambda at, t: at.policy.ask({"obs": [1.0]}, min_version=9).result(t)),
    (RemotePolicy, "close"): Waits(lambda at, t: at.policy.close(t), gives=None, ended=None),
    (Agent, "wait"): Waits(lambda at, t: len(at.agent.wait([at.agent.run_episode()], timeout=t)[0]), gives=0, ended=1),
    (Agent, "collect"): Waits(lambda at, t: at.agent.collect(1, timeout=t)),
    (Agent, "close"): Waits(lambda at, t: at.agent.close(t), gives=None, ended=None),
    (Observer, "run"): Waits(lambda at, t: at.observer.run(timeout=t), gives=0, ended=0),
    (Observer, "close"): Waits(lambda at, t: at.observer.close(t), gives=None, ended=None),
    (Proxy, "wait_closed"): Waits(lambda at, t: at.proxy.wait_closed(t), gives=False, ended=True),
    (Proxy, "close"): Waits(lambda at, t: at.proxy.close(t), gives=None, ended=None),
    (ReplayMemoryClient, "sync_sizes"): Waits(lambda at, t: at.classic.sync_sizes(100, timeout=t)),
    (ReplayMemoryClient, "update_counter"): Waits(lambda at, t: at.classic.update_counter(timeout=t)),
    (ReplayMemoryClient, "push_cache"): Waits(lambda at, t: at.classic.push_cache(timeout=t), gives=-1, ended=-1),
    (ReplayMemoryClient, "write_log"): Waits(lambda at, t: at.classic.write_log("beyond the limit", timeout=t), gives=None),
    (ReplayMemoryClient, "sub_bytes"): Waits(lambda at, t: at.classic.sub_bytes("m", timeout=t)),
    (ReplayMemoryClient, "close"): Waits(lambda at, t: at.classic.close(t), gives=None, ended=None),
    (ReplayMemoryServer, "get_batch"): Waits(lambda at, t: at.classic_server.get_batch(8, timeout=t), NotEnoughSamples),
    (ReplayMemoryServer, "close"): Waits(lambda at, t: at.classic_server.close(t), gives=None, ended=None),
}  # fmt: skip

LOOPS = {
    (Server, "run_request_proxy"), (Server, "run_pull_proxy"), (ReplayMemoryServer, "rep_proxy_main"),
    (ReplayMemoryServer, "pull_proxy_main"), (ReplayMemoryServer, "rep_worker_main"),
    (ReplayMemoryServer, "pull_worker_main"),
}  # fmt: skip
"""Methods that work until their server is closed; tests/classic/test_contract_cluster.py ends each method."""

NEVER = {
    Client: """batches closed configure_limits finished home inference liveness memory model on_entries on_episode parameters push_reason readiness report room run scalars
        schema stats storage subscribe table writer""",
    ModelHandle: "newest published version",
    Receiver: "close skipped",
    Reader: "closed finished liveness parameters readiness run scalars schema servers servers_at stats table trouble_at update_priorities",
    Server: """account_page accounts epoch episodes_after limits scalars add_pull_worker add_request_worker begin_run clients closed configure configure_limits endpoint episodes
        failure finish finished lines liveness logfile model parameters pub_endpoint publish push_endpoint readiness resume run
        restore runs schema search set_logfile keys snapshot stats table tables total_caches total_episodes total_steps totals
        update_priorities client_name show_pages prompts""",
    TableHandle: "calls configure distribution limit_bytes name parameters peek schema stats update_priorities",
    Inference: "closed endpoint keys liveness readiness show_pages stats update version",
    Pending: "cancel done version",
    RemotePolicy: "act ask closed moved_requests urls",
    Agent: "arrays endpoint keep restore rollouts run_episode stats update version",
    Observer: "closed id urls",
    Proxy: "closed endpoint keys liveness pub_endpoint push_endpoint readiness servers set_servers show_pages stats",
    ReplayMemoryClient: "client rem",
    ReplayMemoryServer: """logfile pub_bytes rem server set_logfile total_caches total_episodes total_steps""",
}
"""Members that wait for no peer: their work is local or runs in the background."""

NAMES = [f"{kind.__name__}.{name}" for kind, name in WAITS]


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_") and not name.isupper()}


@pytest.fixture
def alone():
    nodes = Alone()
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def long_alone():
    """Yield nodes for calls that change no state of their owner."""
    nodes = Alone()
    yield nodes
    nodes.close()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_of_every_public_method_it_is_known_whether_it_waits(kind):
    waiting = {name for owner, name in [*WAITS, *LOOPS] if owner is kind}
    assert public(kind) - waiting - set(NEVER[kind].split()) == set(), "say above whether these wait"
    assert waiting <= public(kind)


def test_every_call_that_waits_takes_a_timeout():
    for kind, name in WAITS:
        assert "timeout" in inspect.signature(getattr(kind, name)).parameters, (kind, name)
    for kind in (Client, Reader, ReplayMemoryClient):
        assert "timeout" in inspect.signature(kind).parameters


def test_the_documented_table_has_every_call_that_waits():
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    table = page.partition("## Every call that waits")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([A-Z]\w+\.\w+)\(\)", table))
    assert named == {*NAMES, *(f"{kind.__name__}.{name}" for kind, name in LOOPS)}


def says_enough(error, seconds):
    """Return True if an error names the awaited reply, the seconds, the address and advice."""
    if isinstance(error, NotEnoughSamples):
        return error.wanted == 8 and abs(error.waited - seconds) < LATE and "Wait for actors" in str(error)
    says_all = error.waited_for and len(error.advice) > 20 and error.endpoint in str(error)
    return says_all and abs(error.seconds - seconds) < LATE and re.search(r"within \d+\.\d s\. \S+ \S+", str(error))


def inside(value):
    """Return the errors in an answer that has a value for each server."""
    failures = [each for each in value.values() if isinstance(each, Exception)]
    assert failures
    return failures


@pytest.mark.parametrize("which", WAITS, ids=NAMES)
def test_a_call_that_nobody_answers_returns_within_its_timeout(request, which):
    at, case = request.getfixturevalue("alone" if which[1] == "close" else "long_alone"), WAITS[which]
    began = time.monotonic()
    try:
        outcome = case.call(at, TIMEOUT)
    except (MemoireTimeout, NotEnoughSamples) as error:
        outcome = error
    took = time.monotonic() - began
    assert took < TIMEOUT + LATE
    if case.gives == "inside":
        for error in inside(outcome):
            assert says_enough(error, TIMEOUT), error
    elif case.gives == "anything":
        return
    elif isinstance(case.gives, (type, tuple)):
        assert isinstance(outcome, case.gives) and says_enough(outcome, TIMEOUT), outcome
    else:
        assert outcome == case.gives


HOLDERS = {
    Client: "client", ModelHandle: "client", Receiver: "client", Reader: "reader", Server: "server",
    TableHandle: "server", Inference: "node", Pending: "policy", RemotePolicy: "policy", Agent: "agent",
    Observer: "observer", Proxy: "proxy", ReplayMemoryClient: "classic", ReplayMemoryServer: "classic_server",
}  # fmt: skip
CLOSING = [which for which in WAITS if which[1] != "close"]


def holder_of(which):
    """Return the attribute of `Alone` whose close ends this call."""
    return WAITS[which].owner or HOLDERS[which[0]]


@pytest.mark.parametrize("holder", sorted({holder_of(which) for which in CLOSING}))
def test_a_close_by_another_thread_ends_every_call_that_waits(alone, holder):
    calls = {which: in_thread(WAITS[which].call, alone, LONG) for which in CLOSING if holder_of(which) == holder}
    next(iter(calls.values()))[0].join(0.1)
    assert all(thread.is_alive() for thread, _ in calls.values()), calls
    closing, _ = in_thread(getattr(alone, holder).close, 1.0)
    began = time.monotonic()
    for which, (thread, box) in calls.items():
        thread.join(LONG / 2)
        assert time.monotonic() - began < LATE, which  # also while the close still reports to the server
        outcome, ended = box.get("error", box.get("value")), WAITS[which].ended
        assert isinstance(outcome, ended) if isinstance(ended, type) else outcome == ended, (which, box)
    closing.join(LONG / 2)
    assert not closing.is_alive()


WAITING = re.compile(r"\.(condition|_?changed|told)\.wait(_for)?\(")


def is_waiting(frame):
    """Return True if a function of ours waits in a frame for another thread or a socket, in Python or in compiled
    `wait`.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if frame.f_globals["__name__"].startswith("memoire.") and WAITING.search(line):
        return True
    while frame is not None and frame.f_globals["__name__"] in ("threading", "zmq.sugar.poll"):
        frame = frame.f_back
        if frame is not None and frame.f_globals["__name__"].startswith("memoire."):
            return True
    return False


@contextlib.contextmanager
def interrupted(every=0.1):
    """Send SIGINT to this thread repeatedly, until one arrives while a call of ours waits."""
    ended = threading.Event()

    def interrupt(number, frame):
        if is_waiting(frame) and not ended.is_set():
            ended.set()
            raise KeyboardInterrupt

    def send():
        while not ended.wait(every):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    former, sender = signal.signal(signal.SIGINT, interrupt), threading.Thread(target=send, daemon=True)
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        ended.set()
        sender.join()
        signal.signal(signal.SIGINT, former)


def test_a_keyboard_interrupt_leaves_every_call_that_waits(alone):
    for which in CLOSING:
        began = time.monotonic()
        with interrupted():
            WAITS[which].call(alone, LONG)
        assert time.monotonic() - began < 0.1 + LATE, which
    for holder in dict.fromkeys(map(HOLDERS.get, CLASSES)):
        owner = getattr(alone, holder)
        owner.close(0.1)  # the owner can still be closed
        assert not hasattr(owner, "closed") or owner.closed


@pytest.mark.parametrize(
    "make",
    [
        connect,
        lambda at, **how: Reader([at], **how),
        lambda at, **how: ReplayMemoryClient("inproc://p", at, "inproc://c", **how),
    ],
    ids=["connect", "Reader", "ReplayMemoryClient"],
)
def test_a_connection_to_nobody_is_an_error_within_its_timeout(make, cluster):
    at, began = address(), time.monotonic()
    with pytest.raises(MemoireTimeout) as caught:
        make(at, timeout=TIMEOUT, context=cluster.context)
    assert time.monotonic() - began < TIMEOUT + LATE
    assert says_enough(caught.value, TIMEOUT) and caught.value.endpoint == at
    with interrupted():
        make(at, timeout=LONG, context=cluster.context)


def test_a_close_waits_no_longer_than_it_may_for_another_close(alone):
    assert alone.client.log("unsent", 0.0) is False
    first_close, box = in_thread(alone.client.close, LONG)
    until(lambda: alone.client.closed)
    assert alone.client.close(0.1) is False
    assert first_close.is_alive() and not box
    alone.way.drop = 0.0
    first_close.join(LONG)
    assert box == {"value": True}


def test_a_server_waits_for_clients_that_have_not_heard_of_the_end_no_longer_than_it_may(cluster, times):
    times(unreported=LONG)
    server = cluster.server()
    way = cluster.way(server, drop=0.0, double=0.0)
    cluster.client(way.endpoint)
    way.drop = 1.0
    server.finish()
    closing, _ = in_thread(server.close, TIMEOUT)
    closing.join(LATE)
    assert not closing.is_alive()
