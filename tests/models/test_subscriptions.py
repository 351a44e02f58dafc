"""Bodies come in chunks, in any order, from nodes that forget and begin anew: whole or not at all, and never backwards."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.limits import Limits
from memoire.models import fetching as fetcher
from memoire.models.model import ModelStore
from topickit import LIMITS, following


def test_a_few_chunks_are_asked_for_at_a_time_and_each_byte_once():
    node = following()
    body = node.publish(size=95)
    assert [asked.offset for asked, _ in node.asked] == [0]
    most = 0
    while node.asked:
        most = max(most, len(node.asked))
        node.answer()
    assert most == 3 and node.newest.body == body
    assert node.topics.fetched_bytes == 95


def test_where_chunks_are_slow_one_is_asked_for_at_a_time():
    """Many fetch at once: what waits at the node for all of them would take longer than their patience."""
    node = following()
    body = node.publish(size=95)
    node.answer()
    node.answer()
    assert len(node.asked) == 3
    while node.asked:
        node.now += fetcher.QUICK
        node.answer()
        assert len(node.asked) <= 2
    assert node.newest.body == body


@settings(max_examples=50)
@given(st.integers(0, 120), st.randoms(use_true_random=False))
def test_chunks_may_come_in_any_order(size, rng):
    node = following()
    body = node.publish(size)
    while node.asked:
        node.answer(rng.randrange(len(node.asked)))
    assert node.newest.body == body and node.got == [(1, False)]


def test_a_node_may_send_less_than_was_asked_for():
    node = following()
    body = node.publish(size=95)
    node.answer()
    node.limits = Limits(model_chunk=4)  # the rest comes from another node
    node.answer_all()
    assert node.newest.body == body


def test_what_was_missing_or_damaged_is_fetched_again_when_it_is_announced_again():
    node = following()
    body = node.publish()
    kept, node.store = node.store, ModelStore(100)
    node.answer_all()
    assert node.newest is None and not node.asked
    node.store = kept
    node.topics.announced({"t": 1})
    for _ in range(10):
        node.answer(damage=True)
    assert node.newest is None and node.topics.refused == {"payload": 2} and not node.asked
    node.topics.announced({"t": 1})
    node.answer_all()
    assert node.newest.body == body
    node.topics.announced({"t": 1})
    assert not node.asked


def test_instead_of_a_version_that_is_gone_the_newest_is_fetched():
    node = following()
    node.publish()
    for _ in range(5):
        newest = node.publish(notice=False)
    node.store.forget("t")
    node.store.publish("t", newest, 6)
    node.answer_all()
    assert node.newest.body == newest and node.newest.version == 6


def test_a_slow_client_ends_with_the_newest_and_skips():
    node = following()
    node.publish()
    node.answer()
    bodies = [node.publish() for _ in range(20)]
    node.answer_all()
    assert node.newest.body == bodies[-1]
    assert [version for version, _ in node.got] == [1, 21]  # what was on its way is finished, though it is old
    assert node.topics.skipped == 19


def test_who_receives_every_version_gets_them_in_order():
    node = following()
    subscription = node.topics.subscribe("t")
    node.publish()
    node.answer()
    for size in (45, 5, 45, 5):
        node.publish(size, inline=size == 5)
    node.answer_all()
    assert [model.version for model in subscription.models] == [1, 2, 3, 4, 5]
    assert subscription.skipped == 0


def test_the_queue_of_a_topic_is_bounded():
    node = following()
    node.topics.subscribe("t")
    node.publish()
    for _ in range(1000):
        node.publish(5, inline=True)
    assert len(node.topics._topics["t"].fetcher._queue) == fetcher.MAX_QUEUED
    node.answer_all()
    assert node.newest.version == 1001


def test_a_version_that_never_comes_gives_way_to_a_newer_one():
    node = following()
    node.publish()
    node.now += fetcher.STALL_TIMEOUT
    node.topics.turn()
    assert len(node.asked) == 1 and node.topics.next_time() == float("inf")  # nothing newer: it goes on waiting
    late = node.asked.pop()
    body = node.publish()
    node.topics.turn()
    node.answer()
    waiting = [asked.version for asked, _ in node.asked]
    node.asked.append(late)
    node.answer(-1)  # in the middle of the other
    assert [asked.version for asked, _ in node.asked] == waiting and set(waiting) == {2}
    node.answer_all()
    assert node.newest.body == body and node.got == [(2, False)]


def test_the_same_body_from_a_server_that_began_anew_is_not_fetched_again():
    node = following()
    body = node.publish(size=95)
    node.answer_all()
    node.restart([body])
    before = node.topics.fetched_bytes
    node.answer_all()
    assert node.topics.fetched_bytes - before <= LIMITS.model_chunk
    assert node.got == [(1, False)]
    node.publish()
    node.answer_all()
    assert node.got == [(1, False), (2, False)]


def test_versions_of_a_server_that_began_anew_count_from_there():
    node = following()
    for _ in range(5):
        node.publish()
        node.answer_all()
    node.restart([b"other"])
    node.answer_all()
    assert (node.newest.body, node.got[-1]) == (b"other", (1, True))
    node.topics.announced({"t": 5})  # an old message that comes late asks for what is not there any more
    node.answer_all()
    assert node.newest.body == b"other"
    body = node.publish()
    node.answer_all()
    assert (node.newest.body, node.got[-1]) == (body, (2, False))


def test_what_was_on_its_way_from_a_server_that_began_anew_is_not_taken_for_its_new_models():
    node = following()
    for _ in range(3):
        node.publish(10)
    late = node.asked.pop()
    kept = node.store
    node.restart([b"other"])
    node.answer_all()
    node.store, new = kept, node.store
    node.asked.append(late)
    node.answer_all()
    node.store = new
    assert node.newest.body == b"other" and node.got == [(1, True)]


def test_a_newer_epoch_in_a_notice_says_the_same():
    node = following()
    for _ in range(5):
        node.publish()
        node.answer_all()
    node.store, node.epoch = ModelStore(1000), 2
    body = node.publish(fill=99)
    node.answer_all()
    assert (node.newest.version, node.newest.body) == (1, body)


def test_a_publisher_that_begins_anew_is_known_again_where_its_models_were_only_fetched():
    """A client may have heard of a model before its proxy did: the notice comes after the body, or never."""
    node = following()
    for _ in range(3):
        node.publish(notice=False)
    node.topics.announced(node.store.versions())
    node.answer_all()
    assert node.newest.version == 3
    node.store, node.epoch = ModelStore(1000), 2
    body = node.publish(fill=99)
    node.answer_all()
    assert (node.newest.version, node.newest.body) == (1, body)


def test_a_server_that_keeps_its_models_and_missed_some_sets_nobody_back():
    node = following()
    node.topics.is_kept = True
    for _ in range(5):
        node.publish()
        node.answer_all()
    node.store, node.epoch = ModelStore(1000), 2
    node.publish(fill=99)  # its version 1 is of before: this client has 5 from another server
    node.topics.announced(node.store.versions())
    node.answer_all()
    assert node.newest.version == 5
    node.store.publish("t", b"next", 6)
    node.notice(node.store.newest("t"))
    node.answer_all()
    assert node.newest.body == b"next"


def test_a_younger_server_that_has_an_older_version_takes_nobody_back():
    """A learner publishes to two servers; of their notices the older one may come last, or again."""
    node = following()
    older = node.store.publish("t", b"older")
    node.notice(older, home=1)
    node.answer_all()
    body = node.publish(notice=False)
    node.notice(node.store.newest("t"), home=1)
    node.epoch = 2
    node.notice(node.store.newest("t"), home=2)  # in the middle of the transfer
    node.answer_all()
    node.epoch = 3
    node.notice(older, home=3)
    node.epoch = 2
    node.notice(older, home=2)
    node.answer_all()
    assert node.newest.body == body and node.got == [(1, False), (2, False)]


def test_what_a_neighbour_has_is_not_fetched():
    other = ModelStore(1000)
    node = following(find=lambda topic, version, checksum: other.get(topic, version))
    other.publish("t", bytes([1]) * 45)
    node.publish()
    assert not node.asked and node.got == [(1, False)]


def test_a_topic_whose_notices_do_not_come_is_subscribed_to_again():
    node = following()
    node.publish(notice=False)
    node.topics.announced({"t": 1})
    node.answer_all()
    node.topics.turn()
    assert node.heard == [("t", True)] and node.topics.resubscribed == 0
    node.now = node.topics.next_time()
    node.topics.turn()
    assert node.heard == [("t", True), ("t", False), ("t", True)] and node.topics.resubscribed == 1
    node.publish()
    node.topics.announced({"t": 2})
    node.topics.turn()
    assert node.topics.resubscribed == 1


def test_clients_begin_with_a_large_body_at_random_moments():
    limits = Limits(model_chunk=10, model_spread=100.0, model_bytes=1 << 30)
    times = []
    for seed in range(20):
        node = following(limits, rng=random.Random(seed))
        body = node.publish(size=45)
        node.now += 2 * fetcher.ALONE
        node.answer()
        assert not node.asked
        times.append(node.topics.next_time())
        node.now = node.topics.next_time()
        node.topics.turn()
        node.answer_all()
        assert node.newest.body == body
    assert len({round(moment, 9) for moment in times}) == 20


def test_another_run_begins_without_models_and_goes_on_counting():
    node = following()
    subscription = node.topics.subscribe("t")
    for _ in range(3):
        node.publish()
        node.answer_all()
    node.store.renew()
    node.topics.begin_run()
    assert node.newest is None and not subscription.models and node.topics.versions() == {}
    node.topics.announced(node.store.versions())
    assert not node.asked
    node.publish()
    node.answer_all()
    assert [model.version for model in subscription.models] == [4]


steps = st.lists(
    st.sampled_from(["publish", "notice", "announce", "answer", "damage", "lose", "restart", "forget", "turn"]),
    max_size=60,
)


@settings(max_examples=150)
@given(steps, st.randoms(use_true_random=False), st.booleans())
def test_whatever_is_lost_a_body_is_right_or_absent_and_the_newest_comes_at_last(steps, rng, receives):
    node = following()
    subscription = node.topics.subscribe("t") if receives else None
    bodies = {}
    for step in steps:
        if step == "publish":
            body = node.publish(rng.choice([0, 5, 45, 70]), notice=rng.random() < 0.7, fill=rng.randrange(256))
            bodies.setdefault(node.store.version("t"), set()).add(body)
        elif step == "notice" and (model := node.store.newest("t")):
            node.notice(model)
        elif step == "announce":
            node.topics.announced(node.store.versions())
        elif step in ("answer", "damage") and node.asked:
            node.answer(rng.randrange(len(node.asked)), damage=step == "damage")
        elif step == "lose" and node.asked:
            rng.shuffle(node.asked)  # a lost request or reply is a resend, later
        elif step == "restart":
            node.restart()
        elif step == "forget":
            node.store.renew()
        elif step == "turn":
            node.topics.turn()
        if node.newest is not None:
            assert node.newest.body in bodies[node.newest.version]
    for _ in range(3):
        body = node.publish(fill=7)
        node.answer_all()
        node.topics.announced(node.store.versions())
        node.answer_all()
    assert node.newest.version == node.store.version("t") and node.newest.body == body
    if subscription is not None:
        assert subscription.models[-1].body == body
