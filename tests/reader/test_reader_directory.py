"""Servers that a reader knows: their addresses and sampling rates, and deliveries of models and TD errors."""

import numpy as np
import pytest

from memoire.errors import MemoireTimeout, SchemaMismatch
from memoire.models.model import make
from memoire.reader.directory import FORGET_TIMEOUT, Directory, FeedbackRouter, RunChange, comparable_client_ids
from memoire.reader.publishing import Publishing
from memoire.reader.reader import DeliveredBatches
from memoire.reader.rounds import RateTracker
from memoire.replay.batch import ID
from memoire.replay.parameters import Parameters
from memoire.tables.calls import LEFT_OUT_TIMEOUT
from memoire.wire import messages
from memoire.wire.frames import name_hash
from memoire.wire.messages import ServerRate
from readerkit import OTHER, RUN, SCHEMA, PoolServer, World, directory_of, learn, message, refused, welcome

pytestmark = pytest.mark.usefixtures("without_io")

# --- Known servers, and the servers' addresses

NEXT = name_hash("next")


def test_a_server_keeps_its_address_while_that_leads_there_and_takes_another_one_then():
    directory = Directory(["tcp://a", "tcp://b"], "reader", 0.0)
    learn(directory, welcome("a", ["a", "b"]))
    learn(directory, welcome("a", ["a", "b"]), address=1)
    assert [server.address.endpoint for server in directory.known_servers] == ["tcp://a", "tcp://a"]
    learn(directory, welcome("b", ["b"]))
    assert [server.address.endpoint for server in directory.known_servers] == ["tcp://b", "tcp://a"]
    assert all(server.is_listed for server in directory.known_servers)


def test_a_server_that_is_away_is_reached_by_the_address_that_named_it_last():
    directory = Directory(["tcp://a", "tcp://b"], "reader", 0.0)
    learn(directory, welcome("a"))
    learn(directory, welcome("a"), address=1)
    assert directory.servers["a"].address is directory.addresses[0]
    directory.servers["a"].is_away = True
    learn(directory, welcome("a"), address=1)
    assert directory.servers["a"].address is directory.addresses[1] and directory.present_servers == []


def test_a_server_that_nobody_lists_is_forgotten_after_a_while_and_comes_back_as_another():
    directory = directory_of("a", "b", now=0.0)
    former = directory.servers["b"]
    _, _, dropped = learn(directory, welcome("a", ["a"]), now=FORGET_TIMEOUT)
    assert dropped == [] and list(directory.servers) == ["a", "b"] and not former.is_listed
    _, _, dropped = learn(directory, welcome("a", ["a"]), now=FORGET_TIMEOUT + 0.1)
    assert dropped == [former] and list(directory.servers) == ["a"] and former.is_away
    learn(directory, welcome("a", ["a", "b"]), now=FORGET_TIMEOUT + 0.2)
    assert directory.servers["b"] is not former and not directory.servers["b"].is_away


def test_a_server_of_other_columns_is_refused_and_changes_nothing():
    directory = directory_of("a")
    with pytest.raises(SchemaMismatch, match="reader"):
        learn(directory, welcome("b", ["b"], schema=OTHER))
    assert list(directory.servers) == ["a"] and directory.addresses[0].servers == ("a",)


def test_a_reader_that_names_no_table_keeps_the_first_one_and_asks_again():
    directory = directory_of("a")
    directory.due_addresses(1.0)
    assert learn(directory, welcome("b", ["b"], table_name="another")) is None
    assert list(directory.servers) == ["a"] and directory.addresses[0].hello.due == 0.0


def test_a_new_run_is_news_once_for_all_and_once_for_the_servers_of_each_address():
    directory = Directory(["tcp://a", "tcp://b"], "reader", 0.0)
    assert learn(directory, welcome("a"))[1] is None and directory.run == RUN
    learn(directory, welcome("b"), address=1)
    assert learn(directory, welcome("a"))[1] is None
    change = learn(directory, welcome("a"), run=NEXT)[1]
    assert change.is_first and change.servers == (directory.servers["a"],) and directory.run == NEXT
    change = learn(directory, welcome("b"), address=1, run=NEXT)[1]
    assert not change.is_first and change.servers == (directory.servers["b"],)
    assert learn(directory, welcome("b"), address=1, run=NEXT)[1] is None


def test_a_run_is_over_when_all_servers_say_so_and_stays_over():
    directory = directory_of("a", "b")
    directory.record_finished(directory.servers["a"], True)
    assert not directory.is_finished
    directory.record_finished(directory.servers["b"], True)
    assert directory.is_finished
    directory.record_finished(directory.servers["b"], False)
    assert directory.is_finished


def test_a_server_that_restarts_is_new_once_and_one_that_reports_no_parameters_differs_in_none():
    directory = directory_of("a")
    server = directory.servers["a"]
    assert [directory.record_epoch(server, epoch) for epoch in (5, 5, 6)] == [True, False, True]
    server.fingerprint = 1
    assert directory.differing_servers() == [server] and directory.parameter_mismatch() is None


# --- Sampling rates of several servers, message by message

BAND = Parameters(samples_per_insert=2.0, samples_per_insert_tolerance=100.0)


def rate(inserted, drawn, *, surplus=None, is_told=False):
    """Return a server's report of these numbers of inserts and draws."""
    return ServerRate(2.0 * inserted - drawn if surplus is None else surplus, is_told, inserted, drawn, 2.0, 100.0)


def begun(*servers):
    """Return a tracker that has 10 inserts of each server and has begun to draw."""
    tracker = RateTracker()
    for server in servers:
        tracker.record_report(server, 1, rate(10, 0), 10, 1)
    assert tracker.why_not_draw(BAND, list(servers), 1, 0) == ""
    return tracker


def test_samples_that_were_asked_for_before_there_was_a_band_are_waited_for():
    tracker = RateTracker()
    tracker.record_report("a", 1, rate(10, 0), 10, 1)
    assert "before the band began" in tracker.why_not_draw(BAND, ["a"], 1, on_way=5)
    assert tracker.cluster_rate("a", ["a"]) is None


def test_a_server_that_comes_later_brings_its_surplus_unless_it_was_told_of_all():
    tracker = begun("a")
    tracker.record_report("a", 1, rate(12, 4), 12, 1)
    tracker.record_report("b", 1, rate(30, 0), 30, 1)
    assert tracker.cluster_rate("a", ["a", "b"]).surplus == 20.0 + 60.0
    tracker.record_report("c", 1, rate(5, 0, surplus=80.0, is_told=True), 5, 1)
    assert tracker.cluster_rate("a", ["a", "b", "c"]).surplus == 80.0


# --- Figures of delivered batches, without a thread or a clock


def test_servers_are_shown_how_fresh_a_recent_batch_was_and_how_much_was_drawn():
    delivered = DeliveredBatches()
    assert delivered.figures(0) == {"batches": 0.0, "samples": 0.0, "waited": 0.0} and delivered.newest is None
    (drawn,) = World({"a": PoolServer([1])}).run(1)
    assert delivered.is_due(10.0) and not delivered.is_due(10.1), "too soon for another look"
    delivered.record_batch(drawn.gathered, drawn.importance, drawn.left_out, 3)
    fresh = delivered.newest
    delivered.batches, delivered.waited = 2, 0.5
    figures = delivered.figures(64)
    assert (figures["batches"], figures["samples"], figures["waited"]) == (2.0, 64.0, 0.5)
    assert figures["age_max"] == fresh.age_max and "ages" not in figures  # figures are numbers, not arrays


# --- Models to all servers: version at each server, next chunk, and calls that wait

CHUNK = 4


class Publishers:
    """Published models, and servers that answer when the test calls `answer`; `sends` holds unanswered chunks."""

    def __init__(self, *names):
        self.directory = directory_of(*names)
        self.publishing, self.sends, self.received = Publishing(self.directory, CHUNK), [], {}

    def publish(self, body=b"12345678", topic="policy", now=0.0):
        order, sends = self.publishing.publish(make(topic, body, 0), now)
        self.sends += sends
        return order

    def met(self, name, has_restarted=False):
        self.sends += self.publishing.missing_chunks(self.directory.servers[name], has_restarted)

    def answer(self, name, answer=None):
        """Answer the oldest chunk on its way to a server; by default, the server takes the chunk."""
        send = next(send for send in self.sends if send.server.name == name)
        self.sends.remove(send)
        self.sends += self.publishing.receive_answer(send, answer or self.taken(send))

    def taken(self, send):
        received = send.offset + len(send.payload or b"")
        is_whole = received == send.body.size
        topic = send.body.topic
        self.received.setdefault((send.server.name, topic), []).append(bytes(send.payload or b""))
        return message(messages.Published(topic=topic, received=received, version=send.body.version if is_whole else 0))

    def answer_all(self):
        while self.sends:
            self.answer(self.sends[0].server.name)


def test_a_call_does_not_wait_for_a_server_that_said_nothing_while_another_one_has_it():
    world = Publishers("a", "b")
    order = world.publish(now=10.0)
    late = 10.0 + LEFT_OUT_TIMEOUT
    assert not world.publishing.is_taken(order, late)  # no server has the model
    world.answer("a")
    world.answer("a")
    assert not world.publishing.is_taken(order, late - 0.1) and world.publishing.is_taken(order, late)
    assert [
        server.name for server in world.publishing.silent_servers(world.publishing.undecided_servers(order), "policy")
    ] == ["b"]
    world.answer("b")  # server b has begun to answer, so the call waits for b
    assert not world.publishing.is_taken(order, late) and world.publishing.silent_servers(order.there, "policy") == []


def test_a_call_that_finds_nobody_waits_for_the_first_server_that_comes():
    world = Publishers("a")
    world.directory.servers["a"].is_away = True
    order = world.publish()
    assert order.there == () and not world.publishing.is_taken(order, 99.0)
    world.answer("a", refused("denied"))
    assert world.publishing.is_taken(order, 0.0) and world.publishing.refusal(order).code == "denied"


def test_a_server_that_comes_later_gets_the_newest_and_one_that_restarted_gets_it_again():
    world = Publishers("a")
    world.publish()
    world.answer_all()
    learn(world.directory, welcome("a", ["a", "b"]))
    world.met("b")
    world.met("a")
    assert [send.server.name for send in world.sends] == ["b"]
    world.answer_all()
    world.met("a", has_restarted=True)
    world.answer_all()
    assert world.received["a", "policy"] == [b"1234", b"5678"] * 2 and world.received["b", "policy"] == [
        b"1234",
        b"5678",
    ]


def test_a_server_that_forgot_the_beginning_is_sent_all_of_it_again():
    world = Publishers("a")
    order = world.publish()
    world.answer("a")
    world.answer("a", refused("missing"))
    assert [send.offset for send in world.sends] == [0]
    world.answer_all()
    assert world.publishing.is_taken(order, 0.0)


@pytest.mark.parametrize("code", ["run", "client", "closed"])
def test_a_server_that_cannot_take_it_now_is_greeted_at_once_and_offered_it_then(code):
    world = Publishers("a")
    order = world.publish()
    world.directory.addresses[0].hello.due = 5.0
    world.answer("a", refused(code))
    assert world.sends == [] and world.directory.next_time() == 0.0
    assert world.publishing.undecided_servers(order) == list(order.there) and world.publishing.refusal(order) is None
    world.met("a")
    world.answer_all()
    assert world.publishing.is_taken(order, 0.0)


@pytest.mark.parametrize("code", ["busy", "disk"])
def test_a_server_that_lacks_room_is_offered_it_after_its_next_hello_and_says_why_until_then(code):
    world = Publishers("a", "b")
    order = world.publish()
    world.directory.addresses[0].hello.due = 5.0
    world.answer("a", refused(code))
    world.answer("b")
    assert [send.server.name for send in world.sends] == ["b"] and world.directory.next_time() == 5.0
    missing = world.publishing.undecided_servers(order)
    assert missing == list(order.there) and world.publishing.refusal(order) is None
    assert world.publishing.postponement_reasons(missing, "policy") == [
        f"Server 'a' refused the model for now ({code}): no."
    ]
    world.met("a")
    world.answer_all()
    assert world.publishing.is_taken(order, 0.0) and not world.publishing.postponement_reasons(order.there, "policy")


@pytest.mark.parametrize(("code", "is_taken"), [("disk", True), ("busy", False)])
def test_a_server_whose_disk_is_full_holds_nobody_up_for_long_where_another_one_has_the_model(code, is_taken):
    world = Publishers("a", "b")
    order = world.publish()
    world.answer("a", refused(code))
    while world.sends:
        world.answer("b")
    assert not world.publishing.is_taken(order, 0.0)
    assert world.publishing.is_taken(order, LEFT_OUT_TIMEOUT) is is_taken


def test_nothing_of_a_former_run_is_sent_in_the_next_one():
    world = Publishers("a", "b")
    order = world.publish()
    servers = tuple(world.directory.known_servers)
    world.publishing.enter_run(RunChange(True, servers[:1]))
    world.answer("a")
    assert [send.server.name for send in world.sends] == ["b"] and not world.publishing.has_published
    world.publishing.enter_run(RunChange(False, servers[1:]))
    world.answer("b")
    assert world.sends == [] and world.publishing.undecided_servers(order) == list(servers)
    world.met("a")
    assert world.sends == []


def test_a_server_that_takes_shorter_requests_gets_shorter_stretches_until_they_are_short_enough():
    body = bytes(range(256)) * 2000
    world = Publishers("a")
    world.publishing = Publishing(world.directory, 1 << 20)
    order = world.publish(body)
    most = 100_000  # the server's limit in bytes
    while world.sends:
        world.answer("a", refused("too_large") if len(world.sends[0].payload) > most else None)
    pieces = world.received["a", "policy"]
    assert (
        b"".join(pieces) == body and world.publishing.is_taken(order, 0.0) and world.publishing.refusal(order) is None
    )
    assert max(map(len, pieces)) == len(body) // 8


# --- TD errors to the servers of the sampled clients: sizes of messages, and counts of lost samples


def ids_of(*clients):
    ids = np.zeros(len(clients), ID)
    ids["client"][:, 0], ids["number"] = clients, np.arange(len(clients))
    return ids


def route(router, ids, **has):
    """Return the messages that are sent if `has` maps each server to its clients."""
    servers = directory_of(*has).servers
    clients = [(servers[name], comparable_client_ids(ids_of(*numbers))) for name, numbers in has.items()]
    return router.route(ids, np.arange(len(ids), dtype=np.float32), SCHEMA, clients)


def test_samples_of_clients_that_nobody_has_are_lost():
    router = FeedbackRouter()
    assert len(route(router, ids_of(1, 7, 2), a=[7], b=[3])) == 1 and router.lost == 2
    assert router.route(ids_of(1), np.zeros(1, np.float32), None, []) == [] and router.lost == 3


def test_what_a_server_lost_or_did_not_answer_is_counted():
    router = FeedbackRouter()
    (piece,) = route(router, ids_of(7, 7, 7), a=[7])
    router.receive_answer(piece, message(messages.Taken(samples=2, lost=1)))
    assert router.lost == 1
    router.receive_answer(piece, MemoireTimeout("reply", "tcp://a", 1.0, ""))
    assert router.lost == 4
    router.receive_answer(piece, message(messages.Summed()))
    assert router.lost == 7


def test_a_refusal_is_an_answer_until_the_next_model_of_this_topic():
    world = Publishers("a", "b")
    order = world.publish()
    world.directory.addresses[0].hello.due = 5.0
    world.answer("a", refused("stale"))
    assert world.directory.next_time() == 0.0  # HELLO is due at once, to read the server's version
    world.answer_all()
    assert world.publishing.is_taken(order, 0.0) and world.publishing.refusal(order).code == "stale"
    order = world.publish()
    world.answer_all()
    assert world.publishing.refusal(order) is None and world.publishing.is_taken(order, 0.0)
