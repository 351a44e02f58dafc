"""One step on each side of bounds that are kept inside: what is sent at once, kept, waited for, forgotten."""

import sqlite3

import numpy as np
import pytest
import zmq

from dispatchkit import Asker, arrive, cache_of, made_dispatcher
from memoire import Buffer, Schema
from memoire.client.counts import LINE_OVERHEAD, LineOutbox
from memoire.disk import database, records
from memoire.errors import ProtocolError, WrongType
from memoire.models import fetching as fetcher
from memoire.net import process
from memoire.net.poller import SendQueue
from memoire.replay.conversion import ID, td_errors_for
from memoire.tables.caches.pool import Pool
from memoire.tables.episodes import saving as episode_records
from memoire.wire import messages
from netkit import FakeSystem
from poolkit import PLAIN, SCHEMA, Clock, held_of, made, name
from statekit import STATES, episodes_of, memory_of
from topickit import LIMITS, following

# ------------------------------------------------------------------------------------------------------- on the way


@pytest.fixture
def told():
    return {"lines": [], "models": []}


@pytest.fixture
def dispatcher(told):
    return made_dispatcher(told)


def test_a_line_that_waits_counts_with_what_it_costs_beside_its_text():
    outbox = LineOutbox(most_lines=10, most_bytes=2 * (5 + LINE_OVERHEAD), line_bytes=100)
    assert [outbox.add("12345", 1, 0.0) for _ in range(3)] == [1, 2, 0]
    assert outbox.bytes == 2 * (5 + LINE_OVERHEAD)


def test_a_window_is_open_at_once_where_few_ask():
    node = following(LIMITS.replace(model_window=4))
    node.publish(200)
    node.answer()
    assert len(node.asked) == 4


def test_a_window_grows_by_one_with_each_quick_answer_and_a_slow_one_makes_it_one():
    node = following(LIMITS.replace(model_window=4))
    body, at_once = node.publish(200), []
    for place in range(6):
        node.now += 1.1 * fetcher.ALONE if place < 3 else 0.0
        node.answer()
        at_once.append(len(node.asked))
    node.now += 2 * fetcher.QUICK
    for place in range(5):
        node.now += 1.1 * fetcher.ALONE if place == 4 else 0.0
        node.answer()  # those that were asked for before are slow, too
        at_once.append(len(node.asked))
    node.answer_all()
    assert at_once == [2, 3, 4, 4, 4, 4, 3, 2, 1, 1, 2] and node.newest.body == body


def changed(body, **changes):
    """A message with some fields changed."""
    return type(body)(**{field: getattr(body, field) for field in body.__struct_fields__} | changes)


class Connection:
    """A socket that takes what it is sent once it is open."""

    def __init__(self):
        self.sent, self.is_open = [], False

    def send(self, frame, flags, copy):
        if not self.is_open:
            raise zmq.Again
        self.sent.append([frame])


def test_a_lane_has_room_again_for_what_was_sent():
    connection = Connection()
    lane = SendQueue(100)
    for number in range(3):
        lane.put([number], 40)
    assert (len(lane), lane.bytes, lane.lost, lane.lost_bytes) == (2, 80, 1, 40)
    assert not lane.send(connection) and not lane.send(None) and lane.bytes == 80
    connection.is_open = True
    assert lane.send(connection) and connection.sent == [[1], [2]] and (len(lane), lane.bytes) == (0, 0)
    lane.put([4], 500)
    assert (len(lane), lane.bytes, lane.lost) == (1, 500, 1)


# ------------------------------------------------------------------------------------------------ readers that leave


def test_a_reader_that_was_forgotten_begins_anew_with_what_it_drew_elsewhere():
    clock = Clock()
    pool, learner = Pool(SCHEMA, PLAIN, seed=0, client_timeout=10.0, clock=clock), b"r" * 16
    pool.add(name(0), 1, made(50))
    pool.reserve(learner, 10, 5000)
    clock.now += 11.0
    pool.expire()
    pool.add(name(0), 2, made(50))
    pool.reserve(learner, 10, 9000)  # all of it of the time before it came here again
    pool.add(name(0), 3, made(50))
    (client,) = held_of(pool)
    assert client.between == 0.0


# ---------------------------------------------------------------------------------------------------- descriptors


class Watched:
    closed = False


def test_addresses_are_closed_to_newcomers_near_the_limit_and_open_when_three_times_the_reserve_is_free():
    allowed, watched = 1024, Watched()
    system = FakeSystem(allowed, 4096)
    guard = process.DescriptorGuard(system)
    guard.add(5, watched)
    reserved = guard.reserve()
    assert guard.reserved == reserved == allowed - system.soft > 0 and not guard.is_full

    def turned(free):
        system.open = allowed - free
        guard.turn(guard.look_at)
        return guard.is_full

    begin, end = reserved + process.MIN_RESERVED // 2, 3 * reserved
    assert [turned(free) for free in (begin + 1, begin, end, end + 1)] == [False, True, True, False]
    assert (system.filters, guard.times, guard.reserved) == ([(5, True), (5, False)], 1, reserved)
    assert turned(begin)
    guard.add(6, watched)  # an address that begins to listen meanwhile
    assert system.filters[2:] == [(5, True), (6, True)] and turned(end + 1) is False
    watched.closed = True
    assert not turned(begin) and guard.look_at == float("inf") and system.soft == allowed


# ------------------------------------------------------------------------------------------------------ what is kept


def test_an_episode_of_one_entry_and_one_of_no_weight_are_kept():
    (kept,) = episodes_of(memory_of([1])).walk()
    body, payload = episode_records.pack(kept, STATES)
    assert episode_records.unpack(body, payload, STATES).episode.columns["obs"].shape == (1, 3)
    weightless = changed(body, multiplier=0.0)
    assert episode_records.unpack(weightless, payload, STATES).episode.multiplier == 0.0
    for multiplier in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ProtocolError):
            episode_records.unpack(changed(body, multiplier=multiplier), payload, STATES)
    with pytest.raises(ProtocolError):
        episode_records.unpack(episode_records.EpisodeRecord(owner=b"", number=1, length=0), payload, STATES)


@pytest.mark.parametrize(("code", "is_busy"), [(sqlite3.SQLITE_BUSY, True), (sqlite3.SQLITE_LOCKED, True), (7, False)])
def test_a_file_that_another_program_holds_is_busy(code, is_busy):
    error = sqlite3.OperationalError("words")
    assert not database.is_busy(error)
    error.sqlite_errorcode = code | 2 << 8  # an extended code
    assert database.is_busy(error) is is_busy


@pytest.mark.parametrize(("count", "is_taken"), [(0, True), (5, True), (2**53 - 1, True), (2**53, False)])
def test_a_number_of_lines_is_one_that_can_be(count, is_taken):
    packed = records._COUNT.pack(count)
    if is_taken:
        assert records.count_of(packed) == count
    else:
        with pytest.raises(ValueError, match="lines"):
            records.count_of(packed)


def test_a_reset_of_some_environments_says_nothing_of_where_the_others_are():
    """What reset returns for them is not where their last step led: without a next step their last entry has no end."""
    schema = Schema({"obs": (np.float32, (1,)), "action": np.int64, "reward": np.float32})
    buffer = Buffer(schema, 100, seed=0)
    writer = buffer.writer(num_envs=2, autoreset="disabled")
    for step in range(3):
        obs = np.full((2, 1), step, np.float32)
        writer.step(obs, np.zeros(2, np.int64), np.ones(2), np.zeros(2, bool), np.zeros(2, bool), obs + 1)
    writer.reset(np.full((2, 1), 99, np.float32), mask=np.array([True, False]))
    writer.close()
    assert not (buffer.sample(200).next_obs == 99).any()


@pytest.mark.usefixtures("told")
def test_a_reader_has_no_account_and_a_refused_cache_counts_in_the_first_table(dispatcher):  # noqa: F811
    assert Asker(dispatcher, b"r" * 16).ask(messages.Hello(role="reader", table="default")).body.since == 0
    assert Asker(dispatcher).ask(messages.Hello(role="actor", table="default")).body.since == dispatcher.epoch
    payload = cache_of()
    broken = np.array(payload)
    broken[: len(broken) // 2] = 255
    with pytest.raises(ProtocolError):
        arrive(dispatcher, broken, client=b"n" * 16)
    account = dispatcher.runs.current.ledger.find(b"n" * 16)
    assert account is None or account.table == 0


def test_what_is_no_td_error_is_shown_short():
    with pytest.raises(WrongType) as caught:
        td_errors_for(np.zeros(1, ID), "x" * 1000)
    assert repr("x" * 1000)[:80] in str(caught.value) and repr("x" * 1000)[:81] not in str(caught.value)
