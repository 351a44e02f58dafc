"""Named arrays as a body: what goes in comes out, and nothing that is damaged does."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.errors import MemoireError, ParameterError, WrongModel
from memoire.models.tensors import ITEM_BYTES, MAX_ARRAYS, Array, check_fit, pack, unpack


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
