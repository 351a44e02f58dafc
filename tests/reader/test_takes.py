"""Rollouts that a reader takes: servers are dispatchers without sockets, and time is an argument."""

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.errors import MemoireTimeout, ParameterError
from memoire.limits import Limits
from memoire.net.thread import NodeLock
from memoire.reader.directory import Directory
from memoire.reader.io import TableKindCalls
from memoire.replay.parameters import Parameters
from memoire.tables.base import DeliversOnce, TakeRequest
from memoire.tables.calls import LEFT_OUT_TIMEOUT, REFUSED_INTERVAL, RETRY_INTERVAL
from memoire.tables.rollouts.far import RolloutTaker, shares
from readerkit import learn, message, refused, welcome
from rolloutkit import SCHEMA, TakesServer

pytestmark = pytest.mark.usefixtures("without_io")


class TakesWorld:
    """Takes of a reader from several servers, which answer when the test calls `answer`."""

    def __init__(self, *names, capacity=1000, limits=None, **facts):
        self.servers = {name: TakesServer(capacity) for name in names}
        self.now, self.limits = 10.0, limits or Limits()
        self.directory = Directory(["tcp://a"], "reader", 0.0)
        welcome_facts = {"schema": SCHEMA, "storage": "rollouts", "table_name": "rollouts"} | facts
        learn(self.directory, welcome(names[0], names, **welcome_facts))
        self.takes = RolloutTaker(self.directory, self.limits)
        self.open, self.versions = [], {"policy": 3}

    def push(self, name, numbers, client=b"c" * 16, **how):
        self.servers[name].push(client, numbers, **how)

    def begin(self):
        asks = self.takes.due_requests(self.now)
        self.open += asks
        return [(ask.server.name, ask.body.steps) for ask in asks]

    def answer(self, *names, by=None):
        """Answer the open requests to these servers, or to all servers."""
        for ask in [ask for ask in self.open if not names or ask.server.name in names]:
            self.open.remove(ask)
            answer = by or self._reply(ask)
            came = self.takes.read(answer, self.now)
            self.takes.receive_answer(ask, answer, came, self.now)

    def _reply(self, ask):
        fields = {name: getattr(ask.body, name) for name in ask.body.__struct_fields__}
        server = self.servers[ask.server.name]
        reply = server.ask(**fields)
        assert server.ask(again=True, **fields) is reply, "a request that comes again takes nothing more"
        return message(reply.body, payload=reply.payload)

    def turn(self):
        self.begin()
        self.answer()

    def want(self, steps, **options):
        self.takes.set_request(TakeRequest(steps, **options))

    def take(self, steps, turns=6, **options):
        """Return the numbers of the entries that a call gets within `turns` turns, or [] if too few came."""
        self.want(steps, **options)
        entries = []
        for _ in range(turns):
            self.turn()
            self.now += RETRY_INTERVAL
            if entries := self.takes.take(self.versions):
                break
        self.takes.set_request(None)
        return [number for each in entries for number in each.episode.columns["obs"].tolist()]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_shares_are_whole_in_proportion_and_never_more_than_is_held(held, data):
    missing = data.draw(st.integers(0, sum(held)))
    parts = shares(missing, held) if sum(held) else [0]
    assert sum(parts) == missing
    for share, there in zip(parts, held, strict=False):
        assert 0 <= share <= there and abs(share - missing * there / max(1, sum(held))) < 1.0


def test_too_little_is_asked_for_again_after_a_pause_and_nothing_is_taken():
    world = TakesWorld("a", "b")
    world.push("a", range(5))
    world.want(20)
    world.turn()
    assert world.begin() == [] and world.takes.next_time(world.now) == world.now + RETRY_INTERVAL
    entries, fragments, clients, why = world.takes.describe_shortage()
    assert (entries, fragments, clients) == (5, 0, 1)
    assert why == "waiting for 15 more entries (5 of 20 held, from 1 clients at 2 servers)"
    world.now += RETRY_INTERVAL
    assert world.begin() == [("a", 0), ("b", 0)]
    assert world.servers["a"].pool.held() == (5, 1)
    limiter = world.servers["a"].tables.numbered(world.servers["a"].tables.first.number).limiter
    assert limiter is not None


def test_entries_of_enough_clients_have_to_be_held():
    world = TakesWorld("a")
    world.push("a", range(10), client=b"c" * 16)
    assert world.take(4, min_clients=2) == []
    world.want(4, min_clients=2)
    assert "waiting for entries of 1 more clients (1 of min_clients=2)" in world.takes.describe_shortage()[3]
    world.push("a", range(20, 30), client=b"d" * 16)
    assert world.take(4, min_clients=2) == [0, 1, 2, 3]


def test_what_is_too_old_when_it_is_handed_out_is_passed_over_here_too():
    world = TakesWorld("a", parameters=Parameters(max_model_lag=0))
    world.push("a", range(4), version=3)
    world.want(6)
    world.begin()
    world.servers["a"].push(b"c" * 16, range(4, 10), version=4)
    world.answer()
    world.takes.set_request(None)
    assert world.takes.held_entries == 6
    world.versions = {"policy": 4}
    assert world.take(6) == list(range(4, 10)) and (world.takes.discarded_entries, world.takes.held_entries) == (4, 0)
    assert "4 stale entries were discarded here" in world.takes.describe_shortage()[3]


def test_a_server_that_does_not_answer_is_late_until_it_is_left_out():
    world = TakesWorld("a")
    world.want(1)
    world.begin()
    world.now += LEFT_OUT_TIMEOUT
    (late,) = world.takes.late_servers(world.now, [])
    world.takes.leave_out(late)
    assert world.takes.late_servers(world.now, []) == []


def test_more_than_there_is_ever_room_for_and_another_storage_are_refused():
    world = TakesWorld("a", "b", capacity=10)
    with pytest.raises(ParameterError, match="capacity of all servers, 20 entries"):
        world.take(21)
    other = TakesWorld("a", storage="caches", table_name="plain")
    with pytest.raises(ParameterError, match=r"table 'plain' has storage='caches': call get_batch"):
        other.take(1)


@pytest.mark.parametrize("answer", [refused("table"), MemoireTimeout("x", "y", 1.0, "z")])
def test_a_server_that_refuses_is_greeted_at_once_and_asked_again_after_a_pause(answer):
    world = TakesWorld("a")
    world.want(4)
    world.begin()
    world.answer(by=answer)
    assert world.begin() == [] and world.takes.next_time(world.now) == world.now + REFUSED_INTERVAL
    assert world.directory.next_time() == 0.0
    world.now += REFUSED_INTERVAL
    assert world.begin() == [("a", 4)]


def test_a_damaged_reply_is_counted_and_ends_nothing():
    world = TakesWorld("a")
    world.push("a", range(8))
    world.want(4)
    world.begin()
    reply = world._reply(world.open[0])
    world.answer(by=message(reply.body, payload=reply.payload[:-1]))
    assert (world.takes.refused, world.takes.held_entries) == (1, 0)
    assert world.take(4) == [4, 5, 6, 7]


def test_another_run_begins_without_what_came_before():
    world = TakesWorld("a")
    world.push("a", range(8))
    world.want(4)
    world.turn()
    world.takes.clear()
    assert world.take(4) == [4, 5, 6, 7]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_entry_comes_once_and_in_its_servers_order_whatever_is_late_or_sent_again(data):
    world, pushed, got = TakesWorld("a", "b", "c"), Counter(), []
    for _ in range(data.draw(st.integers(1, 25))):
        move = data.draw(st.sampled_from(["push", "push", "take", "late", "exact"]))
        name = data.draw(st.sampled_from("abc"))
        count = data.draw(st.integers(1, 12))
        if move == "push":
            first = 1000 * "abc".index(name) + pushed[name]
            world.push(name, range(first, first + count), client=name.encode() * 16)
            pushed[name] += count
        elif move == "late":  # the call gives up while some entries are on their way
            world.want(count)
            world.turn()
            world.begin()
            world.answer(name)
            world.takes.set_request(None)
            world.now += data.draw(st.sampled_from([0.0, RETRY_INTERVAL]))
        else:
            took = world.take(count, exact=move == "exact")
            assert not took or len(took) == count or (move == "take" and len(took) > count)
            got += took
    world.answer()
    held = sum(server.pool.entries() for server in world.servers.values())
    assert len(got) + world.takes.held_entries + held == sum(pushed.values()), (
        "nothing is lost, and nothing comes twice"
    )
    for rest in range(200):
        left = world.takes.held_entries + sum(server.pool.entries() for server in world.servers.values())
        if not left:
            break
        assert rest < 199
        got += world.take(left)
    everything = [1000 * "abc".index(name) + number for name in "abc" for number in range(pushed[name])]
    assert sorted(got) == everything
    for name in "abc":
        mine = [number for number in got if number // 1000 == "abc".index(name)]
        assert mine == sorted(mine)


def test_a_call_wakes_the_thread_that_asks_for_it():
    class SleepingWorker:
        turns = 0

        def wake(self):
            self.turns += 1
            world.begin()
            world.answer("a")

    world, worker = TakesWorld("a"), SleepingWorker()
    world.push("a", range(20))
    thread = SimpleNamespace(worker=worker, publishing=SimpleNamespace(versions={}))
    thread.monitor, thread.directory, thread.limits = NodeLock("this reader"), world.directory, world.limits
    side = world.takes = (sides := TableKindCalls(thread)).side_with_capability(DeliversOnce)
    assert isinstance(side, RolloutTaker)
    assert sum(map(len, sides.take(side, TakeRequest(20), 0.0))) == 20 and worker.turns == 1
