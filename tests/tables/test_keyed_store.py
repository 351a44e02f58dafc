"""Rows by key: fields merge, values come in pieces, and nothing is held beyond the limit."""

import contextlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire import Server, Table
from memoire.errors import ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.reader.calls import FarCalls
from memoire.tables.base import HoldsRows
from memoire.tables.keyed.calls import KeyedCalls, Row
from memoire.tables.keyed.pool import MAX_UPLOADS, UPLOAD_TIMEOUT, KeyedPool, RowChange
from memoire.wire.byte_budget import ByteBudget

LIMIT = 1 << 20
SMALL = Limits.of(request_bytes=8192)
ME, YOU = b"a" * 16, b"b" * 16


def store_of(limit=LIMIT):
    store = KeyedPool(first=0)
    store.join(ByteBudget(limit), "keyed rows")
    return store


def staged(store, start, size, client=ME, upload=1):
    """Bytes of an upload, as a row gets them."""
    change = RowChange("staged", {}, {}, staged={"x": (start, size)})
    return store.put("p", [change], (client, upload))[0].fields["x"]


def put(store, key, partition="p", tags=(), **fields):
    return store.put(partition, [RowChange(key, dict(tags), fields)])[0]


def test_what_does_not_fit_is_refused_and_nothing_of_it_is_written():
    store = store_of(3000)
    put(store, "a", x=bytes(600))
    with pytest.raises(
        ProtocolError, match=r"more bytes of keyed rows have no room: 3,000 may be held .*: keyed rows 1"
    ) as why:
        store.put("p", [RowChange("b", {}, {"x": bytes(500)}), RowChange("c", {}, {"x": bytes(500)})])
    assert store.find("p", ["b", "c"]) == [None, None] and why.value.code == "full"
    store.remove("p", ["a"])
    store.put("p", [RowChange("b", {}, {"x": bytes(500)})])
    with pytest.raises(ProtocolError, match=r"4,\d+ more bytes of keyed rows") as why:
        store.put("p", [RowChange("c", {}, {"x": bytes(4000)})])
    assert why.value.code == "too_large"


def test_values_that_are_named_often_are_asked_for_before_they_are_copied():
    store = store_of()
    store.stage(ME, 1, 0, bytes(LIMIT // 2), 0.0)
    held = store.held
    changes = [RowChange(f"{row}", {}, {}, staged={"x": (0, LIMIT // 2)}) for row in range(1000)]
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="have no room"):
        store.put("p", changes, (ME, 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < LIMIT // 4 and store.held == held
    store.stage(ME, 1, LIMIT // 2, b"x", 0.0)


def test_a_value_comes_in_pieces_and_a_piece_that_is_sent_again_counts_once():
    store = store_of()
    for offset, piece in ((0, b"abc"), (0, b"abc"), (3, b"de"), (3, b"de")):
        store.stage(ME, 1, offset, piece, 0.0)
    assert staged(store, 1, 4) == b"bcde"
    for client, start, size in ((YOU, 0, 1), (ME, 0, 6)):
        with pytest.raises(ProtocolError, match=f"bytes {start} to {start + size} of an upload"):
            staged(store, start, size, client)
    with pytest.raises(ProtocolError, match="a piece at 7 of an upload of which 5 bytes came"):
        store.stage(ME, 1, 7, b"x", 0.0)
    store.unstage(ME, 1)
    store.reset()
    assert store.held == (0, 0)


def test_an_upload_beyond_the_bound_waits_and_leaves_those_under_way_alone():
    store = store_of()
    for upload in range(MAX_UPLOADS):
        store.stage(ME, upload, 0, bytes(10), float(upload))
    with pytest.raises(ProtocolError, match="64 uploads are under way, as many as may be") as caught:
        store.stage(YOU, 1, 0, b"x", 63.0)
    assert caught.value.code == "busy"
    store.stage(ME, 0, 10, bytes(10), 63.0)
    assert staged(store, 0, 20, upload=0) == bytes(20)
    store.unstage(ME, 5)
    store.stage(YOU, 1, 0, b"x", 63.0)


def test_an_upload_that_does_not_go_on_is_given_up_after_a_while():
    store = store_of()
    for upload in (1, 2):
        store.stage(ME, upload, 0, bytes(10), 0.0)
    store.stage(ME, 1, 10, bytes(10), 1.0)
    store.give_up(UPLOAD_TIMEOUT)
    assert staged(store, 0, 20) == bytes(20)
    with pytest.raises(ProtocolError, match="of an upload of 0"):
        staged(store, 0, 1, upload=2)


KEYS, NAMES = st.sampled_from("abc"), st.sampled_from("xyz")
CHANGES = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("pq"), KEYS, st.dictionaries(NAMES, st.binary(max_size=9))),
    st.tuples(st.just("clear"), st.sampled_from("pq"), KEYS, st.just({})),
    st.tuples(st.just("reset"), st.just("p"), st.just("a"), st.just({})),
)


@given(st.lists(CHANGES, max_size=30))
def test_it_holds_what_plain_dictionaries_hold_and_knows_its_bytes(changes):
    store, model = store_of(), {}
    for call, partition, key, fields in changes:
        if call == "put":
            put(store, key, partition, **fields)
            model[partition, key] = {**model.get((partition, key), {}), **fields}
        elif call == "clear":
            assert store.remove(partition, [key]) == (model.pop((partition, key), None) is not None)
        else:
            store.reset()
            model.clear()
    assert {(name, key): row.fields for name, key, row in store.walk(None, 0)} == model
    store.reset()
    assert store.held == (0, 0)


class FarRows(FarCalls):
    def __init__(self, addresses):
        super().__init__(addresses, "keyed", HoldsRows, role="actor", limits=SMALL, tune_process=False)
        self.calls = KeyedCalls(self._far, self.urls)
        self._meet(10.0)


@pytest.mark.parametrize("servers", [0, 1, 2], ids=["near", "far", "two servers"])
def test_rows_are_written_read_and_cleared_by_the_same_calls_near_and_far(servers):
    """Also values longer than a message, and more rows than a request has room for."""
    tables = {"online": Table({"obs": "u1"}), "rows": Table(storage="keyed")}
    with contextlib.ExitStack() as opened:
        made = [
            opened.enter_context(Server("tcp://127.0.0.1:*" if servers else None, tables=tables, limits=SMALL))
            for _ in range(servers or 1)
        ]
        far = opened.enter_context(FarRows([each.endpoint for each in made])) if servers else None
        calls = made[0].table("rows").calls() if far is None else far.calls
        rows = [Row(f"k{i}", {"t": bytes([i])}, {"x": bytes([i]) * (20_000 if i == 7 else 300)}) for i in range(40)]
        assert [row.key for row in calls.put("p", rows)] == [row.key for row in rows]
        found = calls.values("p", ["k7", "none", "k3"])
        assert [each.fields.get("x") for each in found] == [rows[7].fields["x"], None, rows[3].fields["x"]]
        assert [row.key for row in calls.facts("p", ["k5", "none", "k1"])] == ["k5", "k1"]
        assert {row.key: row.made for row in calls.rows()["p"]}.keys() == {row.key for row in rows}
        assert sum(each.stats().tables["rows"].held_caches for each in made) == 40
        calls.clear("p", [f"k{i}" for i in range(39)])
        assert [row.key for row in calls.rows("p")["p"]] == ["k39"]
        calls.reset()
        assert calls.rows() == {}


def test_a_table_without_calls_of_its_own_says_which_kinds_have_them():
    with Server(None, {"obs": "u1"}) as server, pytest.raises(ParameterError, match="'prompts' or 'keyed' for calls"):
        server.table("default").calls()
