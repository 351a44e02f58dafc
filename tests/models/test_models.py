"""Versions never go back, bytes are bounded, a body is whole or nobody sees it, also one of named arrays."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memoire.errors import MemoireError, ParameterError, ProtocolError, WrongModel
from memoire.limits import Limits
from memoire.models.model import (
    LEASE,
    SMALL_BYTES,
    ModelAssembly,
    ModelStore,
    make,
    notice_of,
)
from memoire.models.tensors import ITEM_BYTES, MAX_ARRAYS, Array, check_fit, pack, unpack
from memoire.wire import _bytes
from memoire.wire.frames import parse_notice

# --- Versions never go back, bytes are bounded, and a body is whole or nobody sees it


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


# --- A notice is said once with its body, and again without it: to who has joined, together, and to all every few seconds


def store():
    models = ModelStore(1000)
    for topic in ("a", "ab"):
        models.publish(topic, b"old")
        models.publish(topic, b"new " + topic.encode())
    return models


def named(models):
    return [(model.topic, model.version) for model in models]


def test_a_small_body_is_in_its_notice_and_not_in_the_repetitions():
    model = store().newest("a")
    first = parse_notice(notice_of(model, Limits(), home=6, epoch=5, run=7))
    again = parse_notice(notice_of(model, Limits(), epoch=5, run=7, again=True))
    assert bytes(first.payload) == b"new a" and again.payload is None
    assert first.body == again.body and (first.body.epoch, first.header.run, first.header.home) == (5, 7, 6)
    large = parse_notice(notice_of(model, Limits.of(inline_model=2), epoch=5, run=7))
    assert large.payload is None


# --- Named arrays as a body: what goes in comes out, and nothing that is damaged does


def array(dtype="F32", shape=(2, 3), fill=1):
    size = int(np.prod(shape)) * ITEM_BYTES[dtype]
    return Array(dtype, shape, memoryview(bytes([fill]) * size))


def body(**facts):
    """A body whose header says this, over 24 bytes of data."""
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
def test_what_goes_in_comes_out_in_its_order(given):
    found = unpack(pack(given))
    assert list(found) == list(given)
    assert {name: (a.dtype, a.shape, bytes(a.data)) for name, a in found.items()} == {
        name: (a.dtype, a.shape, bytes(a.data)) for name, a in given.items()
    }


def test_a_body_is_what_safetensors_describes():
    made = pack({"w": array(fill=7), "b": array("BF16", (2,), 3)})
    size = int.from_bytes(made[:8], "little")
    assert json.loads(made[8 : 8 + size]) == {"w": fact(), "b": fact("BF16", (2,), (24, 28))}
    assert (8 + size) % 64 == 0 and made[8 + size :] == b"\7" * 24 + b"\3" * 4


@settings(max_examples=60)
@given(arrays, st.data())
def test_a_body_that_is_cut_or_changed_is_refused_or_says_the_same_names(given, data):
    made = pack(given)
    with pytest.raises(WrongModel):
        unpack(made[: data.draw(st.integers(0, len(made) - 1))])
    with pytest.raises(WrongModel):
        unpack(made + b"x")
    place, value = data.draw(st.integers(0, len(made) - 1)), data.draw(st.integers(0, 255))
    changed = made[:place] + bytes([value]) + made[place + 1 :]
    try:
        found = unpack(changed)
    except MemoireError:
        return
    assert sum(a.data.nbytes for a in found.values()) == sum(a.data.nbytes for a in given.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"", "holds no named arrays"),
        (b"\x80\x02}q\x00.", "holds no named arrays"),
        (bytes(100), "holds no named arrays"),
        ((1 << 40).to_bytes(8, "little") + b"{" + bytes(99), "holds no named arrays"),
        ((20).to_bytes(8, "little") + b"{" + bytes(99), "its header cannot be read"),
        (body(), "it has 0 arrays"),
        (body(__metadata__={"format": "pt"}), "it has 0 arrays"),
        (body(w=fact("F31")), "'F31', which is none of F64"),
        (body(w=fact(shape=(2, -3))), "a shape that cannot be"),
        (body(w=fact(shape=[1] * 33)), "a shape that cannot be"),
        (body(w=fact(shape=(2**62, 2**62))), "not where its header says"),
        (body(w=fact(data_offsets=(0, 20))), "not where its header says"),
        (body(w=fact(data_offsets=(8, 32))), "not where its header says"),
        (body(w=fact(shape=(1, 3), data_offsets=(0, 12))), "12 bytes belong to no array"),
        (body(w=fact(), v=fact()), "not where its header says"),
        (body(w=fact() | {"more": 1}), "its header cannot be read"),
        (body(w={"dtype": "F32"}), "its header cannot be read"),
        (body(w=fact("BOOL", (24,)))[:-1] + b"\2", "neither 0 nor 1"),
    ],
)  # fmt: skip
def test_a_body_that_is_none_says_so(given, said):
    with pytest.raises(WrongModel, match=f"model 'policy' version 3 .*{said}.*Nothing was loaded. Publish it"):
        unpack(given, "model 'policy' version 3")


def test_what_cannot_be_packed_is_refused():
    for wrong, said in (
        ({}, "1 to 65536 arrays"),
        (dict.fromkeys(map(str, range(MAX_ARRAYS + 1)), array()), "1 to 65536 arrays"),
        ({"__metadata__": array()}, "names are text"),
        ({3: array()}, "names are text"),
        ({"x" * (1 << 24): array()}, "names of 16777216 bytes"),
    ):
        with pytest.raises(ParameterError, match=said):
            pack(wrong)


def test_arrays_that_do_not_fit_are_listed():
    wanted = {"w": ("F32", (2, 3)), "b": ("F32", (2,))}
    check_fit("x", {"w": array(), "b": array(shape=(2,))}, wanted)
    check_fit("x", {"w": array("BF16"), "b": array("F64", (2,))}, wanted, free_dtypes=True)
    for found, free, said in (
        ({"w": array()}, False, "lacks 'b'"),
        ({"w": array(), "b": array(shape=(2,)), "c": array()}, False, "has 'c', which the network has not"),
        (
            {"w": array("BF16"), "b": array(shape=(2,))},
            False,
            r"has 'w' as BF16\[2, 3\], where the network has F32\[2, 3\]",
        ),
        ({"w": array(shape=(3, 2)), "b": array(shape=(2,))}, True, r"has 'w' as F32\[3, 2\]"),
        ({"w": array("I32"), "b": array(shape=(2,))}, True, "has 'w' as I32"),
        (dict.fromkeys("cdefg", array()), False, "has 'c', .* and 4 more"),
    ):
        with pytest.raises(WrongModel, match=said):
            check_fit("x", found, wanted, free_dtypes=free)
