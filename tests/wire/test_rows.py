"""Rows to and from an inference node: no padding travels, and only rows that fit the schema come out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.errors import ProtocolError, SchemaError, WrongType
from memoire.replay.columns import Column, Ragged
from memoire.replay.schema import RowSchema, Schema, row_schema_from
from memoire.wire._container import RowForm
from memoire.wire.parts import ALIGNMENT
from memoire.wire.row_container import FORMS, cut, exact_rows, joined, pack_known, pack_rows, unpack_rows

GRAPH = RowSchema(
    {
        "obs": {"speed": (np.float32, (2,)), "image": np.uint8},
        "nodes": Column(np.int32, (None, 3)),
        "value": np.float64,
        "nothing": (np.float32, (0,)),
    }
)


def rows_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    n = len(lengths)
    return {
        "obs.speed": rng.normal(size=(n, 2)).astype(np.float32),
        "obs.image": rng.integers(0, 256, n).astype(np.uint8),
        "nodes": [rng.integers(-9, 9, (length, 3)).astype(np.int32) for length in lengths],
        "value": rng.normal(size=n),
        "nothing": np.zeros((n, 0), np.float32),
    }


def equal(columns, other):
    assert list(columns) == list(other)
    for name, values in columns.items():
        one, two = (each.values if isinstance(each, Ragged) else each for each in (values, other[name]))
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
        if isinstance(values, Ragged):
            np.testing.assert_array_equal(values.lengths, other[name].lengths)


lengths = st.lists(st.integers(0, 5), min_size=1, max_size=7)


@given(lengths, st.integers(0, 9))
def test_what_is_packed_is_what_comes_out_and_no_padding_travels(sizes, seed):
    given_rows = exact_rows(GRAPH, rows_of(sizes, seed), len(sizes))
    payload = pack_rows(GRAPH, given_rows, len(sizes))
    unpacked, rows = unpack_rows(payload, GRAPH)
    assert rows == len(sizes)
    equal(unpacked, given_rows)
    raw = len(sizes) * (8 + 1 + 4 + 8) + 12 * sum(sizes)
    head, table, blocks = 64, 32 * (len(GRAPH) + 1), len(GRAPH) + 1
    assert len(payload) <= head + table + raw + ALIGNMENT * blocks


@given(st.lists(lengths, min_size=1, max_size=4))
def test_rows_that_are_joined_and_cut_again_are_the_same(parts):
    given_rows = [exact_rows(GRAPH, rows_of(sizes, i), len(sizes)) for i, sizes in enumerate(parts)]
    whole, begin = joined(GRAPH, given_rows), 0
    for sizes, each in zip(parts, given_rows, strict=True):
        equal(cut(whole, begin, begin + len(sizes)), each)
        begin += len(sizes)


def test_a_state_that_is_not_finite_is_refused_unless_its_column_allows_it():
    columns = rows_of([1, 2])
    columns["obs.speed"][1, 0] = np.nan
    payload = pack_rows(GRAPH, exact_rows(GRAPH, columns, 2), 2)
    with pytest.raises(ProtocolError, match=r"column 'obs\.speed' is not finite") as caught:
        unpack_rows(payload, GRAPH)
    assert caught.value.code == "value"
    tolerant = RowSchema({"obs": Column(np.float32, (2,), "state", "allow")})
    unpacked, _ = unpack_rows(pack_rows(tolerant, {"obs": columns["obs.speed"]}, 2), tolerant)
    assert np.isnan(unpacked["obs"][1, 0])


def test_a_schema_of_a_server_can_be_given_for_rows():
    schema = Schema({"obs": np.float32, "reward": np.float32, "value": np.float32})
    assert row_schema_from("inputs", schema).names == ("obs", "reward", "value", "qvest")
    assert row_schema_from("inputs", {"obs": np.float32}) == RowSchema({"obs": np.float32})
    with pytest.raises(WrongType, match="inputs"):
        row_schema_from("inputs", np.float32)
    with pytest.raises(SchemaError, match="no column"):
        RowSchema({})


PLAIN = RowSchema({"obs": (np.float32, (3,)), "flag": np.bool_, "nothing": (np.float32, (0,)), "value": np.float64})


def plain_rows(rows, seed):
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.normal(size=(rows, 3)).astype(np.float32),
        "flag": rng.integers(0, 2, rows).astype(np.bool_),
        "nothing": np.zeros((rows, 0), np.float32),
        "value": rng.normal(size=rows),
    }


@given(st.integers(1, 40), st.integers(0, 9))
def test_a_container_of_a_known_form_has_the_bytes_of_one_that_is_made_block_by_block(rows, seed):
    columns = plain_rows(rows, seed)
    FORMS.forget()
    first, again = (pack_rows(PLAIN, columns, rows) for _ in range(2))
    assert FORMS.form_of(PLAIN, rows) is not None and first == again
    for payload in (first, b"\0" + first):  # the second payload lies at an odd address
        unpacked, count = unpack_rows(memoryview(payload)[len(payload) - len(first) :], PLAIN)
        assert count == rows
        equal(unpacked, columns)
        assert all(values.flags.aligned for values in unpacked.values())


@given(st.integers(0, 10**6), st.integers(1, 255), st.integers(1, 5))
def test_one_wrong_byte_is_treated_alike_whether_the_form_is_known_or_not(place, change, rows):
    payload = bytearray(pack_rows(PLAIN, plain_rows(rows, 0), rows))
    payload[place % len(payload)] ^= change

    def outcome():
        try:
            unpacked, count = unpack_rows(bytes(payload), PLAIN)
        except ProtocolError as error:
            return error.code, error.detail
        return count, {name: values.tobytes() for name, values in unpacked.items()}

    known = outcome()
    FORMS.forget()
    assert outcome() == known


WRONG = {
    "another dtype": lambda columns: columns | {"value": columns["value"].astype(np.float32)},
    "another byte order": lambda columns: columns | {"value": columns["value"].astype(">f8")},
    "another shape": lambda columns: columns | {"obs": columns["obs"].T},
    "one row less": lambda columns: columns | {"flag": columns["flag"][1:]},
    "gaps between the rows": lambda columns: columns | {"value": np.repeat(columns["value"], 2)[::2]},
    "a list": lambda columns: columns | {"value": columns["value"].tolist()},
    "a column less": lambda columns: {"obs": columns["obs"]},
    "another name": lambda columns: {**{name: columns[name] for name in list(columns)[1:]}, "seen": columns["obs"]},
    "NaN in a state": lambda columns: columns | {"obs": np.full_like(columns["obs"], np.nan)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_known_form_takes_only_arrays_that_are_exactly_its_own(wrong):
    columns = plain_rows(4, 1)
    pack_rows(PLAIN, columns, 4)
    assert pack_known(PLAIN, columns, 4) is not None
    assert pack_known(PLAIN, wrong(columns), 4) is None
    assert pack_known(PLAIN, columns, 5) is None


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))
def test_rows_out_of_many_are_packed_as_if_they_were_alone(rows, before, behind):
    many = plain_rows(before + rows + behind, 2)
    alone = cut(many, before, before + rows)
    expected = pack_rows(PLAIN, alone, rows)
    assert pack_known(PLAIN, many, rows, before) == expected
    assert pack_known(PLAIN, many, rows, before + behind + 1) is None  # the rows reach beyond the end


@pytest.mark.parametrize(
    ("begin", "dtype", "shape"),
    [
        (-1, "<f4", (1,)),
        (13, "<f4", (1,)),
        (0, "<f4", ()),
        (0, "<f4", (0,)),
        (0, ">f4", (1,)),
        (0, "S4", (1,)),
        (0, "<f4", (1,) * 33),
    ],
)
def test_a_form_refuses_columns_that_it_could_not_compare(begin, dtype, shape):
    with pytest.raises(ValueError, match="column 'obs'"):
        RowForm(bytes(16), [("obs", begin, np.dtype(dtype), shape, True)])


@pytest.mark.parametrize("place", range(16))
def test_a_form_takes_containers_that_differ_in_the_values_alone(place):
    form = RowForm(bytes(16), [("obs", 4, np.dtype("<u2"), (2,), True)])
    assert form.unpack(bytes(16))["obs"].tolist() == [0, 0]
    payload = bytes(place) + b"\1" + bytes(15 - place)
    assert (form.unpack(payload) is not None) == (4 <= place < 8)
