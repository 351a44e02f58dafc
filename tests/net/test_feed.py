"""The feed of one node: what is published reaches its owner whole, and what is damaged is counted."""

import time

import pytest
import zmq

from memoire.limits import Limits
from memoire.models import model
from memoire.models import model as notices
from memoire.models.io import NOTICES_PER_TURN, Feed
from memoire.net import sockets
from memoire.net.poller import Poller
from memoire.wire import messages
from memoire.wire.frames import NEWS_FRAME, encode, topic_frame
from netkit import KeepingContext, until

LIMITS = Limits()
NEWS = [NEWS_FRAME, *encode(messages.News())]


class Asked:
    """A channel that keeps what is asked."""

    def __init__(self):
        self.calls = []

    def ask(self, body, finish, *, patience):
        self.calls.append((body, finish, patience))


class Heard:
    """A feed, a node that publishes, and what came of it."""

    def __init__(self, context):
        self.publisher = context.socket(zmq.XPUB)
        self.publisher.linger = 0
        self.endpoint = sockets.bind(self.publisher, "tcp://127.0.0.1:0")
        self.doors, self.asked = Poller(), Asked()
        self.feed = Feed(self.doors, self.asked, context=context, limits=LIMITS, keys=None)
        self.messages, self.frames, self.refused = [], [], []

    def take(self, message, frames):
        self.messages.append(message)
        self.frames.append([bytes(frame) for frame in frames])

    def turn(self):
        self.feed.turn(self.doors.wait(time.monotonic() + 0.01), self.take, self.refused.append)

    def until(self, condition):
        def turned():
            self.turn()
            return condition()

        until(turned)

    def subscriptions(self):
        found = []
        while self.publisher.poll(200):
            found.append(self.publisher.recv())
        return found


@pytest.fixture
def heard():
    with KeepingContext() as context:
        made = Heard(context)
        yield made
        made.doors.close(0.0)


def notice(topic="policy", body=b"weights"):
    return notices.notice_of(model.make(topic, body, 1), LIMITS, epoch=1, run=2)


def test_news_is_heard_at_once_and_a_topic_once_it_is_subscribed_to(heard):
    assert not heard.feed.is_open and not heard.feed.subscribe(b"", True)
    heard.turn()
    heard.feed.open(heard.endpoint)
    assert heard.feed.is_open and heard.feed.subscribe(topic_frame("policy"), True)
    subscribed = [b"\1" + NEWS_FRAME, b"\1" + topic_frame("policy")]
    assert sorted(heard.subscriptions()) == sorted(subscribed)
    for frames in (NEWS, notice("other"), notice()):
        heard.publisher.send_multipart(frames)
    heard.until(lambda: len(heard.messages) == 2)
    assert [type(message.body) for message in heard.messages] == [messages.News, messages.Notice]
    assert bytes(heard.messages[1].payload) == b"weights"
    assert heard.frames[0] == [bytes(frame) for frame in NEWS] and not heard.refused
    heard.feed.subscribe(topic_frame("policy"), False)
    assert heard.subscriptions() == [b"\0" + topic_frame("policy")]


def test_what_is_damaged_is_counted_and_the_rest_comes(heard):
    heard.feed.open(heard.endpoint)
    heard.feed.subscribe(b"", True)
    assert len(heard.subscriptions()) == 2
    for frames in ([b"x"], notice()[:1], [b"tother", *notice()[1:]], notice()):
        heard.publisher.send_multipart(frames)
    heard.until(lambda: heard.messages)
    assert len(heard.messages) == 1 and heard.refused == ["frames", "frames", "topic"]


def test_a_flood_does_not_keep_the_thread(heard):
    flood = 2 * NOTICES_PER_TURN + 1
    heard.feed.open(heard.endpoint)
    assert heard.subscriptions()
    for _ in range(flood):
        heard.publisher.send_multipart(NEWS)
    counts = []

    def turned():
        before = len(heard.messages)
        heard.turn()
        counts.append(len(heard.messages) - before)
        return len(heard.messages) == flood

    until(turned)
    assert max(counts) <= NOTICES_PER_TURN


def test_a_feed_that_is_opened_elsewhere_hears_nothing_of_the_former_node(heard):
    heard.feed.open(heard.endpoint)
    assert heard.subscriptions() == [b"\1" + NEWS_FRAME]
    other = Heard(heard.publisher.context)
    heard.feed.open(other.endpoint)
    assert other.subscriptions() == [b"\1" + NEWS_FRAME]
    heard.doors.wait(time.monotonic() + 0.01)
    assert heard.subscriptions() == [b"\0" + NEWS_FRAME]
    heard.feed.close()
    assert not heard.feed.is_open
    heard.feed.close()
    other.doors.close(0.0)


def test_bodies_are_fetched_by_the_channel_and_patiently(heard):
    finish = object()
    heard.feed.fetch("policy", 3, 100, 50, finish)
    asked = messages.Fetch(topic="policy", version=3, offset=100, size=50)
    assert heard.asked.calls == [(asked, finish, 5.0 * LIMITS.resend_after)]
