"""Samples of any pipeline as bytes, and through a server."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from memoire import Reader, Server, connect
from memoire.errors import DataError, ParameterError
from memoire.rl import samples as envelope
from memoire.rl.samples import Sample, columns_of, following, samples_of, samples_table
from memoire.wire.values import MAX_DEPTH, pack, unpack

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8),
    st.binary(max_size=8),
    arrays.arrays(st.sampled_from([np.float32, np.int64, np.uint8, np.bool_]), arrays.array_shapes(min_dims=0)),
    st.floats(width=32, allow_nan=False).map(np.float32),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(values)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    assert same(unpack(pack(value)), value)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_and_run_nothing(body: bytes) -> None:
    with contextlib.suppress(DataError):
        unpack(body)


def test_a_value_that_does_not_travel_is_named_with_its_place() -> None:
    with pytest.raises(ParameterError, match=r"sample\['device'\].*object"):
        pack({"device": object()})
    with pytest.raises(ParameterError, match="an array of object"):
        pack(np.array([object()]))
    with pytest.raises(ParameterError, match="keys that are text"):
        pack({(1, 2): 3})


def test_containers_within_each_other_have_an_end() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(ParameterError, match="containers within each other"):
        pack(value)


def episode(length: int, number: int = 1) -> list[Sample]:
    first = Sample(np.zeros(2, np.float32), (np.float32(1.0), 2.0), 0.0, False, False, {"a": 1}, True, number, 0)
    rest = [
        Sample(np.full(2, step, np.float32), (np.float32(step), 0.5), 1.5, step == length, False, {}, False, number,
               step, 1.5)
        for step in range(1, length + 1)
    ]  # fmt: skip
    return [first, *rest]


def test_samples_pass_a_server_unchanged_and_in_order_and_the_reset_is_no_step() -> None:
    with Server("tcp://127.0.0.1:0", tables={envelope.TABLE: samples_table()}) as server:
        sent = episode(5) + episode(3, 2)
        with connect(server.endpoint) as client:
            for part in (sent[:3], sent[3:6], sent[6:]):
                steps = sum(not each.is_reset for each in part)
                assert client.push_episode(columns_of(part), steps=steps, is_cut=part is not sent[6:])
            client.update()
            assert client.stats().steps == 8 and client.stats().episodes == 0
        with Reader([server.endpoint]) as reader:
            found = samples_of(reader.take(10, timeout=10.0))
        assert [tuple(each) for each in map(comparable, found)] == [tuple(each) for each in map(comparable, sent)]
        assert len({each.client for each in found}) == 1 and len(found[0].client) == 16


def comparable(sample: Sample) -> tuple[Any, ...]:
    return (pack(tuple(sample[:6])), *sample[6:-1])


def test_arrays_of_samples_that_were_read_are_the_callers_own() -> None:
    body = pack((np.zeros(2, np.float32), {}))
    first, second = unpack(body), unpack(body)
    second[0][:], second[1]["a"] = 7.0, 1
    assert first[0].tolist() == [0.0, 0.0] and first[1] == {} and unpack(pack(second))[0].tolist() == [7.0, 7.0]


def test_buffers_are_of_one_worker_and_end_where_a_sample_is_missing() -> None:
    one, other = ([each._replace(client=client) for each in episode(4)] for client in (b"1" * 16, b"2" * 16))
    mixed = [*one[:2], *other[2:4], *one[2:4], *other[:1], *other[3:]]
    found = [[(each.client[:1], each.step) for each in buffer] for buffer in following(mixed)]
    assert found == [[(b"1", 0), (b"1", 1)], [(b"2", 2), (b"2", 3)], [(b"1", 2), (b"1", 3)], [(b"2", 0)],
                     [(b"2", 3), (b"2", 4)]]  # fmt: skip
    assert len(following([*one, *one])) == 1, "a reset begins an episode, and no buffer"
