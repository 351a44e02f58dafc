"""A notice is said once with its body, and again without it: to who has joined, together, and to all every few seconds."""

from memoire.limits import Limits
from memoire.models.model import GATHER_INTERVAL, REPEAT_INTERVAL, ModelStore, Notices, newest_of, notice_of
from memoire.wire.frames import parse_notice, topic_frame


def store():
    models = ModelStore(1000)
    for topic in ("a", "ab"):
        models.publish(topic, b"old")
        models.publish(topic, b"new " + topic.encode())
    return models


def named(models):
    return [(model.topic, model.version) for model in models]


def test_the_newest_of_each_topic_is_announced_again_every_few_seconds():
    notices, models = Notices(100.0), store()
    assert notices.due(models, 100.0 + REPEAT_INTERVAL / 2) == []
    assert notices.next_time() == 100.0 + REPEAT_INTERVAL
    assert named(notices.due(models, 100.0 + REPEAT_INTERVAL)) == [("a", 2), ("ab", 2)]
    assert notices.due(models, 100.0 + REPEAT_INTERVAL) == []
    assert notices.next_time() == 100.0 + 2 * REPEAT_INTERVAL


def test_a_thousand_that_join_together_cost_one_notice():
    notices, models = Notices(100.0), store()
    for number in range(1000):
        notices.subscribed([topic_frame("a"), b"unknown %d" % number], models, 100.0 + number * 1e-6)
    assert notices.due(models, 100.0) == []
    assert named(notices.due(models, 100.0 + GATHER_INTERVAL)) == [("a", 2)]
    assert notices.next_time() == 100.0 + REPEAT_INTERVAL
    notices.subscribed([b"strange"], models, 101.0)
    assert notices.next_time() == 100.0 + REPEAT_INTERVAL


def test_an_empty_subscription_is_to_every_topic():
    assert named(newest_of(store(), [b""])) == [("a", 2), ("ab", 2)]
    assert named(newest_of(store(), [topic_frame("ab"), topic_frame("none")])) == [("ab", 2)]


def test_a_small_body_is_in_its_notice_and_not_in_the_repetitions():
    model = store().newest("a")
    first = parse_notice(notice_of(model, Limits(), home=6, epoch=5, run=7))
    again = parse_notice(notice_of(model, Limits(), epoch=5, run=7, again=True))
    assert bytes(first.payload) == b"new a" and again.payload is None
    assert first.body == again.body and (first.body.epoch, first.header.run, first.header.home) == (5, 7, 6)
    large = parse_notice(notice_of(model, Limits(inline_model=2), epoch=5, run=7))
    assert large.payload is None
