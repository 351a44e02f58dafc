"""One topic, call by call: what is asked for and handed out, with the time as a number and no thread."""

import random
import threading

import pytest

from memoire.errors import Closed, MemoireTimeout, ParameterError, ProtocolError, Refused
from memoire.limits import Limits
from memoire.models import fetching as fetcher
from memoire.models import topics as received
from memoire.models.fetching import ChunkRequest, CompleteModel, TopicFetcher
from memoire.models.model import MAX_TOPICS, chunk_of, make
from memoire.models.topics import UNHEARD_TIMEOUT, ReceivedModels, SubscriptionWatch
from memoire.wire import messages
from memoire.wire.frames import encode, parse, reply

LIMITS = Limits(model_chunk=10, model_window=3, model_spread=0.0, model_bytes=10_000)
INF = float("inf")


class Topic:
    """A fetcher, and what its node would answer."""

    def __init__(self, *, receivers=False, limits=LIMITS, found=None):
        self.limits, self.receivers, self.found = limits, receivers, found
        self.fetcher = TopicFetcher(limits, lambda: self.receivers, lambda *_: self.found, random.Random(1))

    def notice(self, model, now=0.0, *, inline=False, home=7, epoch=1, is_kept=False):
        said = messages.Notice(
            topic="t", version=model.version, size=model.size, checksum=model.checksum, text=model.is_text, epoch=epoch
        )
        is_anew = self.fetcher.is_anew(said, home, is_kept=is_kept)
        return is_anew, self.fetcher.noticed(said, model.body if inline else None, now)

    def answer(self, request, model, now=0.0, *, epoch=1, damage=False):
        asked = messages.Fetch(topic="t", version=request.version, offset=request.offset, size=request.size)
        chunk, stretch = chunk_of(model, asked, self.limits, home=7, epoch=epoch)
        payload = bytes(stretch or b"")
        payload = bytes(len(payload)) if damage else payload
        header = parse(encode(messages.Fetch(topic="t"), client=b"c" * 16)).header
        return self.fetcher.answered(request, parse(reply(header, chunk, payload=payload)), now)


def model(version=1, size=25, fill=None):
    return make("t", bytes([version if fill is None else fill]) * size, version)


def test_a_version_that_is_on_its_way_is_not_queued_again():
    topic = Topic(receivers=True)
    topic.fetcher.announced(1, 0.0)
    assert topic.notice(model(1)) == (False, []) and topic.fetcher.announced(1, 0.0) == []
    assert topic.fetcher.next_time == INF, "nothing waits behind it"


def test_the_newest_is_asked_for_once_and_delivered_whole():
    topic = Topic()
    assert topic.fetcher.is_coming(0), "it is about to be asked for"
    (first,) = topic.fetcher.begin(1.0)
    assert (first.version, first.offset, first.size) == (0, 0, 10) and topic.fetcher.begin(1.0) == []
    assert topic.fetcher.is_coming(0) and topic.fetcher.is_coming(9), "the newest may be any"
    second, third = topic.answer(first, model(), 1.0)
    assert [second.offset, third.offset] == [10, 20] and second.version == 1
    assert topic.answer(second, model(), 1.0) == []
    (delivery,) = topic.answer(third, model(), 1.0)
    assert delivery == CompleteModel(model(), False, (7, 1), 0)
    assert topic.fetcher.fetched_bytes == 25 and topic.fetcher.next_time == INF and not topic.fetcher.is_coming(0)


def test_what_was_announced_before_the_newest_is_asked_for_is_fetched():
    topic = Topic()
    (first,) = topic.fetcher.announced(1, 0.0)
    assert topic.fetcher.announced(2, 0.0) == [] and topic.fetcher.begin(0.0) == []
    delivery, request = topic.answer(first, model(1, size=5))
    assert delivery.model.version == 1 and request.version == 2


def test_a_body_in_its_notice_is_delivered_at_once_and_a_damaged_one_refused():
    topic = Topic()
    assert topic.notice(model(3), inline=True) == (False, [CompleteModel(model(3), False, (7, 1), 0)])
    assert topic.notice(model(3), inline=True) == (False, [])
    (delivery,) = topic.notice(model(6), inline=True)[1]
    assert delivery.skipped == 2
    wrong = messages.Notice(topic="t", version=7, size=2, checksum=0)
    with pytest.raises(ProtocolError, match="not the announced one"):
        topic.fetcher.noticed(wrong, b"xx", 0.0)


def test_who_receives_every_version_gets_those_in_between():
    topic = Topic(receivers=True)
    topic.notice(model(1), inline=True)
    (request,) = topic.fetcher.announced(4, 0.0)
    assert request.version == 2 and topic.fetcher.is_coming(3) and topic.fetcher.is_coming(4)
    *_, last = topic.answer(request, model(2, size=5))
    assert last.version == 3
    topic = Topic()
    topic.notice(model(1), inline=True)
    (request,) = topic.fetcher.announced(4, 0.0)
    assert request.version == 4 and topic.fetcher.announced(4, 0.0) == []


def test_a_fetch_that_stalls_makes_way_for_what_came_after_it():
    topic = Topic()
    (former,) = topic.fetcher.announced(1, 5.0)
    assert topic.fetcher.next_time == INF
    topic.fetcher.announced(2, 6.0)
    assert topic.fetcher.next_time == 5.0 + fetcher.STALL_TIMEOUT and topic.fetcher.turn(14.9) == []
    (request,) = topic.fetcher.turn(15.0)
    assert request.version == 2
    assert topic.answer(former, model(1), 16.0) == [], "it was given up"


def test_the_rest_of_a_large_body_waits_for_a_random_pause_if_many_ask():
    size = fetcher.LARGE_BODY_BYTES
    topic = Topic(limits=Limits(model_chunk=1 << 20, model_window=2, model_spread=8.0))
    large = model(size=size)
    (first,) = topic.fetcher.announced(1, 100.0 - 2 * fetcher.ALONE)
    assert topic.answer(first, large, 100.0) == []
    assert 100.0 < topic.fetcher.next_time < 108.0
    assert topic.fetcher.turn(100.0) == []
    assert [request.offset for request in topic.fetcher.turn(108.0)] == [1 << 20, 2 << 20]


def test_nobody_pauses_where_the_first_chunk_comes_at_once():
    topic = Topic(limits=Limits(model_chunk=1 << 20, model_window=2, model_spread=8.0))
    (first,) = topic.fetcher.announced(1, 100.0)
    steps = topic.answer(first, model(size=fetcher.LARGE_BODY_BYTES), 100.0 + 0.9 * fetcher.ALONE)
    assert [request.offset for request in steps] == [1 << 20, 2 << 20]


def test_a_slow_way_gets_one_chunk_at_a_time():
    topic = Topic()
    (first,) = topic.fetcher.announced(1, 0.0)
    assert [step.offset for step in topic.answer(first, model(), fetcher.QUICK)] == [10]


def test_what_is_missing_or_damaged_is_replaced_by_the_newest_once():
    topic = Topic()
    (request,) = topic.fetcher.announced(5, 0.0)
    (newest,) = topic.fetcher.answered(request, Refused("node", "unknown_model", "gone"), 0.0)
    assert newest.version == 0
    assert topic.fetcher.answered(newest, Refused("node", "unknown_model", "gone"), 0.0) == []
    (again,) = topic.fetcher.announced(5, 0.0)
    assert again.version == 5, "the next announcement asks again"
    (newest,) = topic.answer(again, model(5, size=5), 0.0, damage=True)
    assert newest.version == 0 and topic.fetcher.refused == {"payload": 1}
    assert topic.fetcher.answered(newest, Closed("the client"), 0.0) == []


@pytest.mark.parametrize("size", [5, 25])
def test_a_chunk_that_changed_on_its_way_is_refused_and_the_newest_is_asked_for(size):
    topic = Topic()
    (request,) = topic.fetcher.announced(5, 0.0)
    asked = messages.Fetch(topic="t", version=5, size=10)
    chunk, stretch = chunk_of(model(5, size=size), asked, LIMITS)
    header = parse(encode(asked, client=b"c" * 16)).header
    frames = [reply(header, chunk, payload=stretch)[0], bytes(len(stretch))]
    (newest,) = topic.fetcher.answered(request, parse(frames, verify_payload=False), 0.0)
    assert newest.version == 0 and topic.fetcher.refused == {"payload": 1}


def test_chunks_of_another_model_are_refused():
    topic = Topic()
    (first,) = topic.fetcher.announced(1, 0.0)
    second, _ = topic.answer(first, model(), 0.0)
    (newest,) = topic.answer(second, model(1, fill=9), 0.0)
    assert newest.version == 0 and topic.fetcher.refused == {"unexpected": 1}


def test_a_neighbour_s_model_is_not_fetched():
    topic = Topic(found=model(2))
    assert topic.notice(model(2))[1] == [CompleteModel(model(2), False, (7, 1), 0)]
    assert topic.notice(model(2))[1] == []


def test_a_publisher_that_began_anew_may_go_back():
    topic = Topic()
    topic.notice(model(9), inline=True)
    is_anew, steps = topic.notice(model(1), inline=True, epoch=2)
    assert is_anew and steps == [CompleteModel(model(1), True, (7, 2), 0)]
    assert not topic.notice(model(1), inline=True, epoch=2, home=8)[0], "another server is only younger"
    topic.notice(model(4), inline=True, epoch=2)
    assert topic.notice(model(3), inline=True, epoch=3, is_kept=True) == (False, []), (
        "it was published while it was away"
    )
    topic.fetcher.renew()
    assert topic.notice(model(4), epoch=3)[1] == [], "the same model again is not fetched"
    topic.fetcher.forget()
    assert topic.fetcher.announced(1, 0.0)[0].version == 1, "another run"


def test_of_many_servers_the_epochs_are_bounded():
    topic = Topic()
    for home in range(fetcher.MAX_HOMES + 5):
        topic.notice(model(1), home=home)
    assert len(topic.fetcher._epochs) == fetcher.MAX_HOMES


def test_a_subscription_is_lost_when_a_version_is_named_that_no_notice_brings():
    watch = SubscriptionWatch()
    assert watch.next_time == INF and not watch.is_lost(1e9)
    watch.noticed(3)
    watch.named(3, 10.0)
    assert watch.next_time == INF
    watch.named(4, 10.0)
    watch.named(5, 11.0)
    assert watch.next_time == 10.0 + UNHEARD_TIMEOUT and not watch.is_lost(10.0)
    assert watch.is_lost(10.0 + UNHEARD_TIMEOUT) and not watch.is_lost(10.0 + UNHEARD_TIMEOUT)
    watch.named(5, 50.0)
    watch.noticed(4)
    assert watch.next_time < INF
    watch.noticed(5)
    assert watch.next_time == INF
    watch.reset()
    watch.named(1, 60.0)
    assert watch.next_time == 60.0 + UNHEARD_TIMEOUT


def test_receivers_get_what_came_since_and_count_what_they_skip():
    models = ReceivedModels()
    assert models.follow("t") and not models.follow("t")
    early = models.subscribe("t")
    assert models.has_receivers("t") and not models.has_receivers("u") and models.versions() == {}
    models.put("t", model(1), is_renewed=False)
    models.put("t", model(3), is_renewed=False)
    models.put("t", model(3), is_renewed=False)
    late = models.subscribe("t")
    assert [each.version for each in early.models] == [1, 3] and early.skipped == 1
    assert [each.version for each in late.models] == [3]
    models.put("t", model(3, fill=9), is_renewed=True)
    assert len(late.models) == 2 and models.versions() == {"t": 3}
    for version in range(4, received.MAX_WAITING_MODELS + 10):
        models.put("t", model(version), is_renewed=False)
    assert len(early.models) == received.MAX_WAITING_MODELS
    models.unsubscribe(late)
    models.unsubscribe(late)
    models.clear()
    assert models.newest("t") is None and not early.models


def test_too_many_topics_are_refused():
    models = ReceivedModels()
    for n in range(MAX_TOPICS):
        models.follow(f"t{n}")
    with pytest.raises(ParameterError, match="one too many"):
        models.follow("another")


def test_a_wait_ends_with_a_newer_model_or_says_what_the_server_has():
    models = ReceivedModels()
    models.follow("policy")
    subscription = models.subscribe("policy")
    checks = []
    with pytest.raises(MemoireTimeout, match="Nobody published this topic there yet. Or it"):
        models.wait("policy", 0, 0.0, lambda: checks.append(1), "tcp://a:1")
    models.published = ("police",)
    with pytest.raises(MemoireTimeout, match="It has models of 'police'"):
        models.receive(subscription, 0.0, lambda: checks.append(1), "tcp://a:1")
    models.published = ("policy",)
    with pytest.raises(MemoireTimeout, match="newer than version 3.*published no newer one"):
        models.wait("policy", 3, 0.0, lambda: checks.append(1), "tcp://a:1")
    assert len(checks) == 3
    later = threading.Timer(0.01, lambda: models.put("policy", model(4), is_renewed=False))
    later.start()
    assert models.wait("policy", 3, 100.0, lambda: None, "tcp://a:1").version == 4
    assert models.receive(subscription, None, lambda: None, "tcp://a:1").version == 4
    later.join()
    models.close()


def test_a_request_says_when_it_was_made():
    (request,) = Topic().fetcher.begin(3.5)
    assert isinstance(request, ChunkRequest) and request.asked_at == 3.5
