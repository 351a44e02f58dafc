"""Tests of models: versions that never decrease, bodies in chunks, whole or absent, and bounded bytes."""

import json
import random
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memoire.errors import MemoireError, MemoireTimeout, ParameterError, ProtocolError, WrongModel
from memoire.limits import Limits
from memoire.models import fetching as fetcher
from memoire.models import topics as received
from memoire.models.fetching import CompleteModel, TopicFetcher
from memoire.models.model import LEASE, MAX_TOPICS, SMALL_BYTES, ModelAssembly, ModelStore, chunk_of, make, notice_of
from memoire.models.tensors import ITEM_BYTES, MAX_ARRAYS, Array, check_fit, facts_of, pack, unpack, with_facts
from memoire.models.topics import UNHEARD_TIMEOUT, ReceivedModels, SubscriptionWatch
from memoire.wire import _bytes, messages
from memoire.wire.frames import encode, parse, parse_notice, reply
from topickit import LIMITS, following


def test_a_version_that_somebody_fetches_stays_until_nobody_asked_for_a_while():
    now = [0.0]
    store = ModelStore(1 << 30, keep=2, clock=lambda: now[0])
    large = bytes(SMALL_BYTES)
    store.publish("policy", large)
    assert store.serve("policy", 0).version == 1
    for _ in range(5):
        store.publish("policy", large)
        assert store.serve("policy", 1).version == 1
    store.check_invariants()
    assert [model.version for model in store] == [1, 6]
    now[0] += LEASE
    store.publish("policy", large)
    assert [model.version for model in store] == [6, 7] and store.serve("policy", 1) is None
    store.check_invariants()


def test_even_what_is_being_fetched_goes_when_the_bytes_are_used_up():
    store = ModelStore(250)
    for _ in range(3):
        assert store.serve("policy", store.publish("policy", bytes(100)).version)
    assert [model.version for model in store] == [2, 3]
    store.check_invariants()


def test_malformed_topics_and_bodies_and_a_topic_too_many_are_refused():
    store = ModelStore(10)
    for topic in ("", "x" * 256, "a\nb", "a\0"):
        with pytest.raises(ValueError, match="topic"):
            store.publish(topic, b"")
    for topic, body, words in (("policy", {"weights": 1}, "Serialize"), (b"policy", b"", "topic must be a str")):
        with pytest.raises(TypeError, match=words):
            store.publish(topic, body)
    for number in range(256):
        store.publish(f"topic {number}", b"")
    with pytest.raises(ValueError, match="A node keeps at most 256 topics"):
        store.publish("another", b"")


class StoreMachine(RuleBasedStateMachine):
    """Model store under any order of publishing: it holds the newest model of each topic, and older models within its
    bytes.
    """

    def __init__(self):
        super().__init__()
        self.store = ModelStore(100, keep=3)
        self.newest = {}

    @rule(topic=st.sampled_from("abc"), size=st.integers(0, 150))
    def publish(self, topic, size):
        model = self.store.publish(topic, bytes(size))
        assert model.version == self.newest.get(topic, (0, 0))[0] + 1
        self.newest[topic] = (model.version, size)

    @rule(topic=st.sampled_from("abc"), version=st.integers(1, 20), size=st.integers(0, 150))
    def put(self, topic, version, size):
        is_newer = version > self.newest.get(topic, (0, 0))[0]
        assert self.store.put(make(topic, bytes(size), version)) == is_newer
        if is_newer:
            self.newest[topic] = (version, size)

    @invariant()
    def newest_is_there(self):
        self.store.check_invariants()
        assert self.store.versions() == {topic: version for topic, (version, _) in self.newest.items()}
        for topic, (_, size) in self.newest.items():
            assert self.store.newest(topic).size == size


StoreMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
test_the_newest_of_each_topic_is_always_kept = pytest.mark.slow(StoreMachine.TestCase)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_a_body_comes_together_from_chunks_in_order_with_repeats(body, chunk):
    checksum = _bytes.checksum(body)
    assembly = ModelAssembly("t", 3, len(body), checksum, False, byte_limit=200)
    model, offset = None, 0
    while model is None:
        piece = body[offset : offset + chunk]
        model = assembly.add(offset, piece)
        offset += len(piece)
        if model is None:
            assert assembly.add(0, body[:1]) is None
            assert assembly.offset == offset
    assert (model.value, model.version, model.checksum) == (body, 3, checksum)


@pytest.mark.parametrize("length", [4, 2])
def test_a_chunk_that_changed_on_its_way_is_refused(length):
    checksum = _bytes.checksum(b"good")
    assembly = ModelAssembly("t", 1, 4, checksum, False, byte_limit=10)
    with pytest.raises(ProtocolError, match="changed on the way"):
        assembly.add(0, b"evil"[:length], _bytes.checksum(b"good"[:length]))
    assert assembly.offset == 0


def test_a_body_with_another_sum_or_size_is_refused():
    checksum = _bytes.checksum(b"good")
    for chunk in (4, 2):
        assembly = ModelAssembly("t", 1, 4, checksum, False, byte_limit=10)
        with pytest.raises(ProtocolError, match="another XXH3"):
            for offset in range(0, 4, chunk):
                assembly.add(offset, b"evil"[offset : offset + chunk])
    with pytest.raises(ProtocolError, match="does not follow"):
        ModelAssembly("t", 1, 4, checksum, False, byte_limit=10).add(0, b"good!")
    with pytest.raises(ProtocolError, match="does not follow"):
        ModelAssembly("t", 1, 4, checksum, False, byte_limit=10, early=1).add(2, b"od!")
    with pytest.raises(ProtocolError, match="does not follow"):
        ModelAssembly("t", 1, 4, checksum, False, byte_limit=10).add(1, b"ood")
    with pytest.raises(ProtocolError, match="empty chunk"):
        ModelAssembly("t", 1, 4, checksum, False, byte_limit=10).add(0, b"")
    with pytest.raises(ProtocolError, match="the limit is 10"):
        ModelAssembly("t", 1, 11, checksum, False, byte_limit=10)
    with pytest.raises(ProtocolError, match="not UTF-8"):
        ModelAssembly("t", 1, 1, _bytes.checksum(b"\xff"), True, byte_limit=10).add(0, b"\xff")


# --- A notice carries its body once; newcomers get repetitions without the body, and all clients every few seconds


def test_a_small_body_is_in_its_notice_and_not_in_the_repetitions():
    model = ModelStore(1000).publish("a", b"new a")
    first = parse_notice(notice_of(model, Limits(), home=6, epoch=5, run=7))
    again = parse_notice(notice_of(model, Limits(), epoch=5, run=7, again=True))
    assert bytes(first.payload) == b"new a" and again.payload is None
    assert first.body == again.body and (first.body.epoch, first.header.run, first.header.home) == (5, 7, 6)
    large = parse_notice(notice_of(model, Limits.of(inline_model=2), epoch=5, run=7))
    assert large.payload is None


# --- Named arrays as a body: arrays come back unchanged, and damaged bodies are refused


def array(dtype="F32", shape=(2, 3), fill=1):
    bits = int(re.search("[0-9]+", f"{dtype} 8")[0])  # BOOL, which names no number, has 8
    size = int(np.prod(shape)) * bits // 8
    return Array(dtype, shape, memoryview(bytes([fill]) * size))


def body(**facts):
    """Return a body whose header holds these facts, over 24 bytes of data."""
    header = json.dumps(facts).encode()
    return len(header).to_bytes(8, "little") + header + bytes(24)


def fact(dtype="F32", shape=(2, 3), data_offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets)}


arrays = st.dictionaries(
    st.text(min_size=1).filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.builds(array, st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 1)),
    min_size=1,
    max_size=6,
)  # fmt: skip


@settings(max_examples=60)
@given(arrays)
def test_what_goes_in_comes_out_in_its_order(named):
    unpacked = unpack(pack(named))
    assert list(unpacked) == list(named)
    assert {name: (a.dtype, a.shape, bytes(a.data)) for name, a in unpacked.items()} == {
        name: (a.dtype, a.shape, bytes(a.data)) for name, a in named.items()
    }


def test_a_body_is_what_safetensors_describes():
    packed = pack({"w": array(fill=7), "b": array("BF16", (2,), 3)})
    size = int.from_bytes(packed[:8], "little")
    assert json.loads(packed[8 : 8 + size]) == {"w": fact(), "b": fact("BF16", (2,), (24, 28))}
    assert (8 + size) % 64 == 0 and packed[8 + size :] == b"\7" * 24 + b"\3" * 4
    assert list(unpack(pack({dtype: array(dtype) for dtype in ITEM_BYTES}))) == list(ITEM_BYTES)


def test_facts_lie_beside_the_arrays_and_come_back():
    packed, facts = pack({"w": array(fill=7)}), {"made by": "a test"}
    assert facts_of(packed) == {} and facts_of(with_facts(packed, facts)) == facts
    assert bytes(unpack(with_facts(packed, facts))["w"].data) == b"\7" * 24


@settings(max_examples=60)
@given(arrays, st.data())
def test_a_body_that_is_cut_or_changed_is_refused_or_says_the_same_names(named, data):
    packed = pack(named)
    with pytest.raises(WrongModel):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(WrongModel):
        unpack(packed + b"x")
    place, value = data.draw(st.integers(0, len(packed) - 1)), data.draw(st.integers(0, 255))
    changed = packed[:place] + bytes([value]) + packed[place + 1 :]
    try:
        unpacked = unpack(changed)
    except MemoireError:
        return
    assert sum(a.data.nbytes for a in unpacked.values()) == sum(a.data.nbytes for a in named.values())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "holds no named arrays"),
        (b"\x80\x02}q\x00.", "holds no named arrays"),
        (bytes(100), "holds no named arrays"),
        ((1 << 40).to_bytes(8, "little") + b"{" + bytes(99), "holds no named arrays"),
        ((20).to_bytes(8, "little") + b"{" + bytes(99), "its header cannot be read"),
        (body(), "it has 0 arrays"),
        (body(__metadata__={"format": "pt"}), "it has 0 arrays"),
        (body(w=fact("F31")), "dtype 'F31', which is not one of F64"),
        (body(w=fact(shape=(2, -3))), "the invalid shape"),
        (body(w=fact(shape=[1] * 33)), "the invalid shape"),
        (body(w=fact(shape=(2**62, 2**62))), "do not fit its shape or the data"),
        (body(w=fact(data_offsets=(0, 20))), "do not fit its shape or the data"),
        (body(w=fact(data_offsets=(8, 32))), "do not fit its shape or the data"),
        (body(w=fact(shape=(1, 3), data_offsets=(0, 12))), "12 bytes at the end belong to no array"),
        (body(w=fact(), v=fact()), "do not fit its shape or the data"),
        (body(w=fact() | {"more": 1}), "its header cannot be read"),
        (body(w={"dtype": "F32"}), "its header cannot be read"),
        (body(w=fact("BOOL", (24,)))[:-1] + b"\2", "neither 0 nor 1"),
    ],
)  # fmt: skip
def test_a_body_that_is_none_says_so(content, text):
    with pytest.raises(WrongModel, match=f"model 'policy' version 3 .*{text}.*Nothing was loaded. Publish it"):
        unpack(content, "model 'policy' version 3")


def test_what_cannot_be_packed_is_refused():
    for wrong, text in (
        ({}, "a model has 1 to 65536"),
        (dict.fromkeys(map(str, range(MAX_ARRAYS + 1)), array()), "a model has 1 to 65536"),
        ({"__metadata__": array()}, "names are text"),
        ({3: array()}, "names are text"),
        ({"x" * (1 << 24): array()}, "arrays take [0-9]+ bytes; the limit is 16777216"),
    ):
        with pytest.raises(ParameterError, match=text):
            pack(wrong)


def test_arrays_that_do_not_fit_are_listed():
    wanted = {"w": ("F32", (2, 3)), "b": ("F32", (2,))}
    check_fit("x", {"w": array(), "b": array(shape=(2,))}, wanted)
    check_fit("x", {"w": array("BF16"), "b": array("F64", (2,))}, wanted, free_dtypes=True)
    for named, free, text in (
        ({"w": array()}, False, "lacks 'b'"),
        ({"w": array(), "b": array(shape=(2,)), "c": array()}, False, "has 'c', which the network lacks"),
        (
            {"w": array("BF16"), "b": array(shape=(2,))},
            False,
            r"has 'w' as BF16\[2, 3\], but the network has F32\[2, 3\]",
        ),
        ({"w": array(shape=(3, 2)), "b": array(shape=(2,))}, True, r"has 'w' as F32\[3, 2\]"),
        ({"w": array("I32"), "b": array(shape=(2,))}, True, "has 'w' as I32"),
        (dict.fromkeys("cdefg", array()), False, "has 'c', .* and 4 more"),
    ):
        with pytest.raises(WrongModel, match=text):
            check_fit("x", named, wanted, free_dtypes=free)


# --- Bodies come in chunks, in any order, from nodes that forget and restart: whole or absent, and never older


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
    node.limits = Limits.of(model_chunk=4)  # another node sends the remaining chunks
    node.answer_all()
    assert node.newest.body == body


def test_what_was_missing_or_damaged_is_fetched_again_when_it_is_announced_again():
    node = following()
    body = node.publish()
    kept, node.store = node.store, ModelStore(100)
    node.answer_all()
    assert node.newest is None and not node.asked
    node.store = kept
    node.topics.receive_versions({"t": 1})
    for _ in range(10):
        node.answer(damage=True)
    assert node.newest is None and node.topics.rejected_bodies == {"payload": 2} and not node.asked
    node.topics.receive_versions({"t": 1})
    node.answer_all()
    assert node.newest.body == body
    node.topics.receive_versions({"t": 1})
    assert not node.asked


def test_a_slow_client_ends_with_the_newest_and_skips():
    node = following()
    node.publish()
    node.answer()
    bodies = [node.publish() for _ in range(20)]
    node.answer_all()
    assert node.newest.body == bodies[-1]
    assert [version for version, _ in node.got] == [1, 21]  # a client finishes an old transfer in progress
    assert node.topics.skipped == 19


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
    node.topics.tick()
    assert len(node.asked) == 1 and node.topics.next_time() == float("inf")  # the fetch waits for a newer version
    late = node.asked.pop()
    body = node.publish()
    node.topics.tick()
    node.answer()
    waiting = [asked.version for asked, _ in node.asked]
    node.asked.append(late)
    node.answer(-1)  # the answer comes in the middle of the newer transfer
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
    assert node.topics.fetched_bytes - before <= LIMITS.tuning.model_chunk
    assert node.got == [(1, False)]
    node.publish()
    node.answer_all()
    assert node.got == [(1, False), (2, False)]


def test_a_server_that_keeps_its_models_and_missed_some_sets_nobody_back():
    node = following()
    node.topics.is_kept = True
    for _ in range(5):
        node.publish()
        node.answer_all()
    node.store, node.epoch = ModelStore(1000), 2
    node.publish(fill=99)  # the client has version 5 from another server
    node.topics.receive_versions(node.store.versions())
    node.answer_all()
    assert node.newest.version == 5
    node.store.publish("t", b"next", 6)
    node.notice(node.store.newest("t"))
    node.answer_all()
    assert node.newest.body == b"next"


def test_what_a_neighbour_has_is_not_fetched():
    other = ModelStore(1000)
    node = following(find=lambda topic, version, checksum: other.get(topic, version))
    other.publish("t", bytes([1]) * 45)
    node.publish()
    assert not node.asked and node.got == [(1, False)]


def test_a_topic_whose_notices_do_not_come_is_subscribed_to_again():
    node = following()
    node.publish(notice=False)
    node.topics.receive_versions({"t": 1})
    node.answer_all()
    node.topics.tick()
    assert node.heard == [("t", True)] and node.topics.resubscribed == 0
    node.now = node.topics.next_time()
    node.topics.tick()
    assert node.heard == [("t", True), ("t", False), ("t", True)] and node.topics.resubscribed == 1
    node.publish()
    node.topics.receive_versions({"t": 2})
    node.topics.tick()
    assert node.topics.resubscribed == 1


def test_another_run_begins_without_models_and_goes_on_counting():
    node = following()
    subscription = node.topics.subscribe("t")
    for _ in range(3):
        node.publish()
        node.answer_all()
    node.store.renew()
    node.topics.begin_run()
    assert node.newest is None and not subscription.models and node.topics.versions() == {}
    node.topics.receive_versions(node.store.versions())
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
            node.topics.receive_versions(node.store.versions())
        elif step in ("answer", "damage") and node.asked:
            node.answer(rng.randrange(len(node.asked)), damage=step == "damage")
        elif step == "lose" and node.asked:
            rng.shuffle(node.asked)  # a lost request or reply leads to a resend later
        elif step == "restart":
            node.restart()
        elif step == "forget":
            node.store.renew()
        elif step == "turn":
            node.topics.tick()
        if node.newest is not None:
            assert node.newest.body in bodies[node.newest.version]
    for _ in range(3):
        body = node.publish(fill=7)
        node.answer_all()
        node.topics.receive_versions(node.store.versions())
        node.answer_all()
    assert node.newest.version == node.store.version("t") and node.newest.body == body
    if subscription is not None:
        assert subscription.models[-1].body == body


# --- One topic, call by call, with the time as a number and without threads

LIMITS_TOPIC_FETCHER = Limits.of(model_chunk=10, model_window=3, model_spread=0.0, model_bytes=10_000)
INF = float("inf")


class Topic:
    """A fetcher of one topic, and the answers of its node."""

    def __init__(self, *, receivers=False, limits=LIMITS_TOPIC_FETCHER, neighbour=None):
        self.limits, self.receivers, self.neighbour = limits, receivers, neighbour
        self.fetcher = TopicFetcher(limits, lambda: self.receivers, lambda *_: self.neighbour, random.Random(1))

    def notice(self, model, now=0.0, *, inline=False, home=7, epoch=1, is_kept=False):
        notice = messages.Notice(
            topic="t", version=model.version, size=model.size, checksum=model.checksum, text=model.is_text, epoch=epoch
        )
        is_anew = self.fetcher.is_publisher_restart(notice, home, is_kept=is_kept)
        return is_anew, self.fetcher.receive_notice(notice, model.body if inline else None, now)

    def answer(self, request, model, now=0.0, *, epoch=1, damage=False):
        asked = messages.Fetch(topic="t", version=request.version, offset=request.offset, size=request.size)
        chunk, stretch = chunk_of(model, asked, self.limits, home=7, epoch=epoch)
        payload = bytes(stretch or b"")
        payload = bytes(len(payload)) if damage else payload
        header = parse(encode(messages.Fetch(topic="t"), client=b"c" * 16)).header
        return self.fetcher.receive_answer(request, parse(reply(header, chunk, payload=payload)), now)


def model(version=1, size=25, fill=None):
    return make("t", bytes([version if fill is None else fill]) * size, version)


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


def test_a_body_in_its_notice_is_delivered_at_once_and_a_damaged_one_refused():
    topic = Topic()
    assert topic.notice(model(3), inline=True) == (False, [CompleteModel(model(3), False, (7, 1), 0)])
    assert topic.notice(model(3), inline=True) == (False, [])
    (delivery,) = topic.notice(model(6), inline=True)[1]
    assert delivery.skipped == 2
    wrong = messages.Notice(topic="t", version=7, size=2, checksum=0)
    with pytest.raises(ProtocolError, match="differs from its notice"):
        topic.fetcher.receive_notice(wrong, b"xx", 0.0)


def test_who_receives_every_version_gets_those_in_between():
    topic = Topic(receivers=True)
    topic.notice(model(1), inline=True)
    (request,) = topic.fetcher.receive_versions(4, 0.0)
    assert request.version == 2 and topic.fetcher.is_coming(3) and topic.fetcher.is_coming(4)
    *_, last = topic.answer(request, model(2, size=5))
    assert last.version == 3
    topic = Topic()
    topic.notice(model(1), inline=True)
    (request,) = topic.fetcher.receive_versions(4, 0.0)
    assert request.version == 4 and topic.fetcher.receive_versions(4, 0.0) == []


def test_the_rest_of_a_large_body_waits_for_a_random_pause_if_many_ask():
    size = fetcher.LARGE_BODY_BYTES
    topic = Topic(limits=Limits.of(model_chunk=1 << 20, model_window=2, model_spread=8.0))
    large = model(size=size)
    (first,) = topic.fetcher.receive_versions(1, 100.0 - 2 * fetcher.ALONE_TIME)
    assert topic.answer(first, large, 100.0) == []
    assert 100.0 < topic.fetcher.next_time < 108.0
    assert topic.fetcher.tick(100.0) == []
    assert [request.offset for request in topic.fetcher.tick(108.0)] == [1 << 20, 2 << 20]


def test_chunks_of_another_model_are_refused():
    topic = Topic()
    (first,) = topic.fetcher.receive_versions(1, 0.0)
    second, _ = topic.answer(first, model(), 0.0)
    (newest,) = topic.answer(second, model(1, fill=9), 0.0)
    assert newest.version == 0 and topic.fetcher.refused == {"unexpected": 1}


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
    assert topic.fetcher.receive_versions(1, 0.0)[0].version == 1, "another run"


def test_of_many_servers_the_epochs_are_bounded():
    topic = Topic()
    for home in range(fetcher.MAX_HOMES + 5):
        topic.notice(model(1), home=home)
    assert len(topic.fetcher._epochs) == fetcher.MAX_HOMES


def test_a_subscription_is_lost_when_a_version_is_named_that_no_notice_brings():
    watch = SubscriptionWatch()
    assert watch.next_time == INF and not watch.is_lost(1e9)
    watch.receive_notice(3)
    watch.receive_reply_version(3, 10.0)
    assert watch.next_time == INF
    watch.receive_reply_version(4, 10.0)
    watch.receive_reply_version(5, 11.0)
    assert watch.next_time == 10.0 + UNHEARD_TIMEOUT and not watch.is_lost(10.0)
    assert watch.is_lost(10.0 + UNHEARD_TIMEOUT) and not watch.is_lost(10.0 + UNHEARD_TIMEOUT)
    watch.receive_reply_version(5, 50.0)
    watch.receive_notice(4)
    assert watch.next_time < INF
    watch.receive_notice(5)
    assert watch.next_time == INF
    watch.reset()
    watch.receive_reply_version(1, 60.0)
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
    with pytest.raises(ParameterError, match="A client follows at most 256 topics"):
        models.follow("another")


def test_a_wait_ends_with_a_newer_model_or_says_what_the_server_has():
    models = ReceivedModels()
    models.follow("policy")
    subscription = models.subscribe("policy")
    checks = []
    with pytest.raises(MemoireTimeout, match="The server has no model of this topic, or cannot be reached"):
        models.wait("policy", 0, 0.0, lambda: checks.append(1), "tcp://a:1")
    models.named = ("police",)
    with pytest.raises(MemoireTimeout, match="It has models of 'police'"):
        models.receive(subscription, 0.0, lambda: checks.append(1), "tcp://a:1")
    models.named = ("policy",)
    with pytest.raises(MemoireTimeout, match="newer than version 3.*published no newer model"):
        models.wait("policy", 3, 0.0, lambda: checks.append(1), "tcp://a:1")
    assert len(checks) == 3
    later = threading.Timer(0.01, lambda: models.put("policy", model(4), is_renewed=False))
    later.start()
    assert models.wait("policy", 3, 100.0, lambda: None, "tcp://a:1").version == 4
    assert models.receive(subscription, None, lambda: None, "tcp://a:1").version == 4
    later.join()
    models.close()


def test_a_slow_way_gets_one_chunk_at_a_time():
    topic = Topic()
    (first,) = topic.fetcher.receive_versions(1, 0.0)
    assert [step.offset for step in topic.answer(first, model(), fetcher.QUICK_TIME)] == [10]
