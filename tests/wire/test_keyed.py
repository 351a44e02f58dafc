"""Payloads about keyed rows: what was packed is read, and of anything else only ProtocolError comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.errors import ProtocolError
from memoire.tables.keyed import messages as keyed

PUTS = [keyed.PutRow("k", {"s": b"1"}, {"x": b"2"}, [keyed.StagedValue("y", 0, 9)])]
FACTS = [keyed.RowFacts("p", "k", 3, {"s": b"1"}, ["x"])]
VALUES = [keyed.RowValues(True, ["x"], {"x": b"2"})]
KINDS = [
    (keyed.unpack_puts, PUTS),
    (keyed.unpack_facts, FACTS),
    (keyed.unpack_values, VALUES),
    (keyed.unpack_keys, ["a", "b"]),
]


@pytest.mark.parametrize(("unpack", "rows"), KINDS, ids=lambda each: getattr(each, "__name__", ""))
def test_what_was_packed_is_read_and_without_a_payload_there_is_nothing(unpack, rows):
    assert unpack(keyed.pack(rows)) == rows
    assert unpack(None) == []


@pytest.mark.parametrize(("unpack", "rows"), KINDS, ids=lambda each: getattr(each, "__name__", ""))
@given(data=st.data())
def test_damaged_payloads_are_refused(unpack, rows, data):
    whole = keyed.pack(rows)
    cut = data.draw(st.integers(1, len(whole) - 1))
    for damaged in (whole[:cut], whole + b"\0", data.draw(st.binary(min_size=1, max_size=40))):
        try:
            unpack(damaged)
        except ProtocolError as error:
            assert error.code == "payload"
        else:
            assert damaged not in (whole[:cut], whole + b"\0")


def test_a_key_of_more_than_1024_characters_is_refused():
    with pytest.raises(ProtocolError, match="its rows cannot be read"):
        keyed.unpack_keys(keyed.pack(["k" * 1025]))
