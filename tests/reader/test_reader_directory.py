"""Which servers a reader knows, by which address, what holds of the table, and which models and TD errors go to them."""

import numpy as np
import pytest

from memoire.errors import MemoireTimeout, SchemaMismatch
from memoire.models.model import make
from memoire.reader.directory import FORGET_TIMEOUT, Directory, FeedbackRouter, RunChange, clients_of
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

# --- Which servers a reader knows, by which address, and what holds of the table: time and messages are passed in

NEXT = name_hash("next")


def test_a_server_keeps_its_address_while_that_leads_there_and_takes_another_one_then():
    made = Directory(["tcp://a", "tcp://b"], "reader", 0.0)
    learn(made, welcome("a", ["a", "b"]))
    learn(made, welcome("a", ["a", "b"]), address=1)
    assert [server.address.endpoint for server in made.known] == ["tcp://a", "tcp://a"]
    learn(made, welcome("b", ["b"]))
    assert [server.address.endpoint for server in made.known] == ["tcp://b", "tcp://a"]
    assert all(server.is_listed for server in made.known)


def test_a_server_that_is_away_is_reached_by_the_address_that_named_it_last():
    made = Directory(["tcp://a", "tcp://b"], "reader", 0.0)
    learn(made, welcome("a"))
    learn(made, welcome("a"), address=1)
    assert made.servers["a"].address is made.addresses[0]
    made.servers["a"].is_away = True
    learn(made, welcome("a"), address=1)
    assert made.servers["a"].address is made.addresses[1] and made.there == []


def test_a_server_that_nobody_lists_is_forgotten_after_a_while_and_comes_back_as_another():
    made = directory_of("a", "b", now=0.0)
    former = made.servers["b"]
    _, _, dropped = learn(made, welcome("a", ["a"]), now=FORGET_TIMEOUT)
    assert dropped == [] and list(made.servers) == ["a", "b"] and not former.is_listed
    _, _, dropped = learn(made, welcome("a", ["a"]), now=FORGET_TIMEOUT + 0.1)
    assert dropped == [former] and list(made.servers) == ["a"] and former.is_away
    learn(made, welcome("a", ["a", "b"]), now=FORGET_TIMEOUT + 0.2)
    assert made.servers["b"] is not former and not made.servers["b"].is_away


def test_a_server_of_other_columns_is_refused_and_changes_nothing():
    made = directory_of("a")
    with pytest.raises(SchemaMismatch, match="reader"):
        learn(made, welcome("b", ["b"], schema=OTHER))
    assert list(made.servers) == ["a"] and made.addresses[0].servers == ("a",)


def test_a_reader_that_names_no_table_keeps_the_first_one_and_asks_again():
    made = directory_of("a")
    made.due(1.0)
    assert learn(made, welcome("b", ["b"], table_name="another")) is None
    assert list(made.servers) == ["a"] and made.addresses[0].hello.due == 0.0


def test_a_new_run_is_news_once_for_all_and_once_for_the_servers_of_each_address():
    made = Directory(["tcp://a", "tcp://b"], "reader", 0.0)
    assert learn(made, welcome("a"))[1] is None and made.run == RUN
    learn(made, welcome("b"), address=1)
    assert learn(made, welcome("a"))[1] is None
    change = learn(made, welcome("a"), run=NEXT)[1]
    assert change.is_first and change.servers == (made.servers["a"],) and made.run == NEXT
    change = learn(made, welcome("b"), address=1, run=NEXT)[1]
    assert not change.is_first and change.servers == (made.servers["b"],)
    assert learn(made, welcome("b"), address=1, run=NEXT)[1] is None


def test_a_run_is_over_when_all_servers_say_so_and_stays_over():
    made = directory_of("a", "b")
    made.reported(made.servers["a"], True)
    assert not made.is_finished
    made.reported(made.servers["b"], True)
    assert made.is_finished
    made.reported(made.servers["b"], False)
    assert made.is_finished


# --- How drawing stands beside recording at several servers, message by message

BAND = Parameters(samples_per_insert=2.0, samples_per_insert_tolerance=100.0)


def rate(inserted, drawn, *, surplus=None, is_told=False):
    """What a server with that many inserts and draws says of itself."""
    return ServerRate(2.0 * inserted - drawn if surplus is None else surplus, is_told, inserted, drawn, 2.0, 100.0)


def begun(*servers):
    """A tracker that has heard 10 inserts of each server, and has begun to draw."""
    tracker = RateTracker()
    for server in servers:
        tracker.heard(server, 1, rate(10, 0), 10, 1)
    assert tracker.why_not_draw(BAND, list(servers), 1, 0) == ""
    return tracker


def test_samples_that_were_asked_for_before_there_was_a_band_are_waited_for():
    tracker = RateTracker()
    tracker.heard("a", 1, rate(10, 0), 10, 1)
    assert "before the band began" in tracker.why_not_draw(BAND, ["a"], 1, on_way=5)
    assert tracker.band("a", ["a"]) is None


def test_a_server_that_comes_later_brings_its_surplus_unless_it_was_told_of_all():
    tracker = begun("a")
    tracker.heard("b", 1, rate(30, 0), 30, 1)
    assert tracker.band("a", ["a", "b"]).surplus == 20.0 + 60.0
    tracker.heard("c", 1, rate(5, 0, surplus=80.0, is_told=True), 5, 1)
    assert tracker.band("a", ["a", "b", "c"]).surplus == 80.0


# --- What a reader shows of itself, without a thread or a clock


def test_servers_are_shown_how_fresh_a_recent_batch_was_and_how_much_was_drawn():
    made = DeliveredBatches()
    assert made.figures(0) == {"batches": 0.0, "samples": 0.0, "waited": 0.0} and made.newest is None
    (drawn,) = World({"a": PoolServer([1])}).run(1)
    assert made.is_due(10.0) and not made.is_due(10.1), "too soon for another look"
    made.saw(drawn.gathered, drawn.importance, drawn.left_out, 3)
    fresh = made.newest
    made.batches, made.waited = 2, 0.5
    figures = made.figures(64)
    assert (figures["batches"], figures["samples"], figures["waited"]) == (2.0, 64.0, 0.5)
    assert figures["age_max"] == fresh.age_max and "ages" not in figures  # numbers alone


# --- Models to all servers: which server has which, what is sent next, and for whom a call waits

STRETCH = 4


class Publishers:
    """What is published to servers that answer as a test says; `sends` are those that are not answered yet."""

    def __init__(self, *names):
        self.directory = directory_of(*names)
        self.made, self.sends, self.received = Publishing(self.directory, STRETCH), [], {}

    def publish(self, body=b"12345678", topic="policy", now=0.0):
        order, sends = self.made.publish(make(topic, body, 0), now)
        self.sends += sends
        return order

    def met(self, name, has_restarted=False):
        self.sends += self.made.met(self.directory.servers[name], has_restarted)

    def answer(self, name, answer=None):
        """Have the oldest stretch on its way to a server answered: taken, if nothing else is said."""
        send = next(send for send in self.sends if send.server.name == name)
        self.sends.remove(send)
        self.sends += self.made.answered(send, answer or self.taken(send))

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
    assert not world.made.is_taken(order, late)  # nobody has it
    world.answer("a")
    world.answer("a")
    assert not world.made.is_taken(order, late - 0.1) and world.made.is_taken(order, late)
    assert [server.name for server in world.made.silent(world.made.missing(order), "policy")] == ["b"]
    world.answer("b")  # it has begun to answer: it is waited for
    assert not world.made.is_taken(order, late) and world.made.silent(order.there, "policy") == []


def test_a_call_that_finds_nobody_waits_for_the_first_server_that_comes():
    world = Publishers("a")
    world.directory.servers["a"].is_away = True
    order = world.publish()
    assert order.there == () and not world.made.is_taken(order, 99.0)
    world.answer("a", refused("denied"))
    assert world.made.is_taken(order, 0.0) and world.made.refusal(order).code == "denied"


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
    assert world.made.is_taken(order, 0.0)


@pytest.mark.parametrize("code", ["run", "client", "closed"])
def test_a_server_that_cannot_take_it_now_is_greeted_at_once_and_offered_it_then(code):
    world = Publishers("a")
    order = world.publish()
    world.directory.addresses[0].hello.due = 5.0
    world.answer("a", refused(code))
    assert world.sends == [] and world.directory.next_time() == 0.0
    assert world.made.missing(order) == list(order.there) and world.made.refusal(order) is None
    world.met("a")
    world.answer_all()
    assert world.made.is_taken(order, 0.0)


@pytest.mark.parametrize("code", ["busy", "disk"])
def test_a_server_that_lacks_room_is_offered_it_after_its_next_hello_and_says_why_until_then(code):
    world = Publishers("a", "b")
    order = world.publish()
    world.directory.addresses[0].hello.due = 5.0
    world.answer("a", refused(code))
    world.answer("b")
    assert [send.server.name for send in world.sends] == ["b"] and world.directory.next_time() == 5.0
    missing = world.made.missing(order)
    assert missing == list(order.there) and world.made.refusal(order) is None
    assert world.made.put_off(missing, "policy") == [f"Server 'a' refused the model for now ({code}): no."]
    world.met("a")
    world.answer_all()
    assert world.made.is_taken(order, 0.0) and not world.made.put_off(order.there, "policy")


@pytest.mark.parametrize(("code", "is_taken"), [("disk", True), ("busy", False)])
def test_a_server_whose_disk_is_full_holds_nobody_up_for_long_where_another_one_has_the_model(code, is_taken):
    world = Publishers("a", "b")
    order = world.publish()
    world.answer("a", refused(code))
    while world.sends:
        world.answer("b")
    assert not world.made.is_taken(order, 0.0)
    assert world.made.is_taken(order, LEFT_OUT_TIMEOUT) is is_taken


def test_nothing_of_a_former_run_is_sent_in_the_next_one():
    world = Publishers("a", "b")
    order = world.publish()
    servers = tuple(world.directory.known)
    world.made.enter(RunChange(True, servers[:1]))
    world.answer("a")
    assert [send.server.name for send in world.sends] == ["b"] and not world.made.is_used
    world.made.enter(RunChange(False, servers[1:]))
    world.answer("b")
    assert world.sends == [] and world.made.missing(order) == list(servers)
    world.met("a")
    assert world.sends == []


def test_a_server_that_takes_shorter_requests_gets_shorter_stretches_until_they_are_short_enough():
    body = bytes(range(256)) * 2000
    world = Publishers("a")
    world.made = Publishing(world.directory, 1 << 20)
    order = world.publish(body)
    most = 100_000  # of the server
    while world.sends:
        world.answer("a", refused("too_large") if len(world.sends[0].payload) > most else None)
    pieces = world.received["a", "policy"]
    assert b"".join(pieces) == body and world.made.is_taken(order, 0.0) and world.made.refusal(order) is None
    assert max(map(len, pieces)) == len(body) // 8


# --- TD errors go to the servers that have their clients, in messages that are not too long; what is lost is counted


def ids_of(*clients):
    ids = np.zeros(len(clients), ID)
    ids["client"][:, 0], ids["number"] = clients, np.arange(len(clients))
    return ids


def route(made, ids, **has):
    """What is sent, where each server has some clients."""
    servers = directory_of(*has).servers
    clients = [(servers[name], clients_of(ids_of(*numbers))) for name, numbers in has.items()]
    return made.route(ids, np.arange(len(ids), dtype=np.float32), SCHEMA, clients)


def test_samples_of_clients_that_nobody_has_are_lost():
    made = FeedbackRouter()
    assert len(route(made, ids_of(1, 7, 2), a=[7], b=[3])) == 1 and made.lost == 2
    assert made.route(ids_of(1), np.zeros(1, np.float32), None, []) == [] and made.lost == 3


def test_what_a_server_lost_or_did_not_answer_is_counted():
    made = FeedbackRouter()
    (piece,) = route(made, ids_of(7, 7, 7), a=[7])
    made.answered(piece, message(messages.Taken(samples=2, lost=1)))
    assert made.lost == 1
    made.answered(piece, MemoireTimeout("reply", "tcp://a", 1.0, ""))
    assert made.lost == 4
    made.answered(piece, message(messages.Summed()))
    assert made.lost == 7


def test_a_refusal_is_an_answer_until_the_next_model_of_this_topic():
    world = Publishers("a", "b")
    order = world.publish()
    world.directory.addresses[0].hello.due = 5.0
    world.answer("a", refused("stale"))
    assert world.directory.next_time() == 0.0  # at its version
    world.answer_all()
    assert world.made.is_taken(order, 0.0) and world.made.refusal(order).code == "stale"
    order = world.publish()
    world.answer_all()
    assert world.made.refusal(order) is None and world.made.is_taken(order, 0.0)
