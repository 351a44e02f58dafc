"""Versions never go back, bytes are bounded, and a body is whole or nobody sees it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memoire.errors import ProtocolError
from memoire.models.model import LEASE, SMALL_BYTES, ModelAssembly, ModelStore, StaleVersion, make
from memoire.wire import _bytes


def test_a_topic_counts_its_versions_and_keeps_the_published_type():
    store = ModelStore(1000)
    assert [store.publish("policy", b"one").version, store.publish("policy", "zwei").version] == [1, 2]
    assert store.publish("other", bytearray(b"x")).version == 1
    assert store.newest("policy").value == "zwei" and store.get("policy", 1).value == b"one"
    assert store.versions() == {"policy": 2, "other": 1}
    assert store.get("policy", 9) is None and store.newest("nobody") is None and store.version("nobody") == 0


def test_a_version_never_goes_back():
    store = ModelStore(1000)
    store.publish("policy", b"", version=7)
    with pytest.raises(StaleVersion, match="7 is out already"):
        store.publish("policy", b"", version=7)
    assert not store.put(make("policy", b"late", 3))
    assert store.newest("policy").version == 7


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


def test_a_version_that_is_given_as_a_whole_need_not_stay():
    store = ModelStore(1 << 30, keep=2)
    large = bytes(SMALL_BYTES)
    for _ in range(4):
        assert store.serve("policy", store.publish("policy", large).version, SMALL_BYTES).size == SMALL_BYTES
    assert [model.version for model in store] == [3, 4]
    assert store.serve("policy", 3, SMALL_BYTES - 1).version == 3, "a chunk does not hold it"
    for _ in range(3):
        store.publish("policy", large)
    assert [model.version for model in store] == [3, 7]


def test_even_what_is_being_fetched_goes_when_the_bytes_are_used_up():
    store = ModelStore(250)
    for _ in range(3):
        assert store.serve("policy", store.publish("policy", bytes(100)).version)
    assert [model.version for model in store] == [2, 3]
    store.check_invariants()


def test_another_run_has_no_models_and_goes_on_counting():
    store = ModelStore(1000)
    store.publish("policy", b"abc", version=7)
    store.renew()
    assert store.versions() == {} and store.newest("policy") is None and store.bytes == 0
    assert not store.put(make("policy", b"late", 7))
    assert store.publish("policy", b"x").version == 8
    store.renew()
    store.renew()
    assert store.publish("policy", b"x").version == 9
    store.check_invariants()


def test_a_topic_that_was_forgotten_begins_anew():
    store = ModelStore(1000)
    store.publish("policy", b"abc", version=7)
    store.forget("policy")
    store.forget("policy")
    assert store.publish("policy", b"x").version == 1 and store.bytes == 1


@pytest.mark.parametrize("topic", ["", "x" * 256, "a\nb", "a\0"])
def test_a_malformed_topic_is_refused(topic):
    with pytest.raises(ValueError, match="topic"):
        ModelStore(10).publish(topic, b"")


def test_only_bytes_and_text_are_models():
    with pytest.raises(TypeError, match="serialize"):
        ModelStore(10).publish("policy", {"weights": 1})
    with pytest.raises(TypeError, match="topic must be a str"):
        ModelStore(10).publish(b"policy", b"")


def test_there_is_a_bound_on_topics():
    store = ModelStore(10)
    for number in range(256):
        store.publish(f"topic {number}", b"")
    with pytest.raises(ValueError, match="one too many"):
        store.publish("another", b"")


class StoreMachine(RuleBasedStateMachine):
    """Any order of publishing: the newest is always there, the rest within the bytes."""

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
    with pytest.raises(ProtocolError, match="allowed are 10"):
        ModelAssembly("t", 1, 11, checksum, False, byte_limit=10)
    with pytest.raises(ProtocolError, match="not UTF-8"):
        ModelAssembly("t", 1, 1, _bytes.checksum(b"\xff"), True, byte_limit=10).add(0, b"\xff")
