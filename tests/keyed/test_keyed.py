"""Tests of keyed rows: merged fields, values in pieces, bounds, replies in parts, resends, and malformed payloads."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit import Asker, made_dispatcher
from memoire import Server, Table
from memoire.errors import ProtocolError
from memoire.keyed import messages as keyed
from memoire.keyed.calls import KeyedCalls
from memoire.keyed.pool import MAX_UPLOADS, UPLOAD_TIMEOUT, KeyedPool
from memoire.limits import Limits
from memoire.reader.calls import RemoteCalls
from memoire.wire.byte_budget import ByteBudget
from serverkit import ME, YOU

LIMIT = 1 << 20
SMALL = Limits.of(request_bytes=8192)


def store_of(limit=LIMIT):
    store = KeyedPool(first=0)
    store.join_budget(ByteBudget(limit), "keyed rows")
    return store


def staged(store, start, size, client=ME, upload=1):
    """Put a row with staged bytes of an upload, and return the row's bytes."""
    change = keyed.PutRow("staged", {}, {}, staged=[keyed.StagedValue("x", start, size)])
    return store.put("p", [change], (client, upload))[0].fields["x"]


def put(store, key, partition="p", **fields):
    return store.put(partition, [keyed.PutRow(key, {}, fields)])[0]


def test_what_does_not_fit_is_refused_and_nothing_of_it_is_written():
    store = store_of(3000)
    put(store, "a", x=bytes(600))
    with pytest.raises(
        ProtocolError, match=r"more bytes of keyed rows have no room: the limit is 3,000 .*: keyed rows 1"
    ) as why:
        store.put("p", [keyed.PutRow("b", {}, {"x": bytes(500)}), keyed.PutRow("c", {}, {"x": bytes(500)})])
    assert store.find("p", ["b", "c"]) == [None, None] and why.value.code == "full"
    store.remove("p", ["a"])
    store.put("p", [keyed.PutRow("b", {}, {"x": bytes(500)})])
    with pytest.raises(ProtocolError, match=r"4,\d+ more bytes of keyed rows") as why:
        store.put("p", [keyed.PutRow("c", {}, {"x": bytes(4000)})])
    assert why.value.code == "too_large"


def test_a_value_comes_in_pieces_and_a_piece_that_is_sent_again_counts_once():
    store = store_of()
    for offset, piece in ((0, b"abc"), (0, b"abc"), (3, b"de"), (3, b"de")):
        store.append_upload_piece(ME, 1, offset, piece, 0.0)
    assert staged(store, 1, 4) == b"bcde"
    for client, start, size in ((YOU, 0, 1), (ME, 0, 6)):
        with pytest.raises(ProtocolError, match=f"bytes {start} to {start + size} were requested of an upload"):
            staged(store, start, size, client)
    with pytest.raises(ProtocolError, match="a piece starts at byte 7 of an upload that has 5 bytes so far"):
        store.append_upload_piece(ME, 1, 7, b"x", 0.0)
    store.discard_upload(ME, 1)
    store.reset()
    assert store.held == (0, 0)


def test_an_upload_beyond_the_bound_waits_and_leaves_those_under_way_alone():
    store = store_of()
    for upload in range(MAX_UPLOADS):
        store.append_upload_piece(ME, upload, 0, bytes(10), float(upload))
    with pytest.raises(ProtocolError, match="64 uploads are under way, which is the limit") as caught:
        store.append_upload_piece(YOU, 1, 0, b"x", 63.0)
    assert caught.value.code == "busy"
    store.append_upload_piece(ME, 0, 10, bytes(10), 63.0)
    assert staged(store, 0, 20, upload=0) == bytes(20)
    store.discard_upload(ME, 5)
    store.append_upload_piece(YOU, 1, 0, b"x", 63.0)


def test_an_upload_that_does_not_go_on_is_given_up_after_a_while():
    store = store_of()
    for upload in (1, 2):
        store.append_upload_piece(ME, upload, 0, bytes(10), 0.0)
    store.append_upload_piece(ME, 1, 10, bytes(10), 1.0)
    store.expire_uploads(UPLOAD_TIMEOUT)
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


class RemoteRows(RemoteCalls):
    def __init__(self, addresses):
        super().__init__(addresses, "keyed", role="actor", limits=SMALL, tune_process=False)
        self.calls = KeyedCalls(self._far, self.urls)
        self._meet(10.0)


@pytest.mark.parametrize("servers", [0, 1, 2], ids=["near", "far", "two servers"])
def test_rows_are_written_read_and_cleared_by_the_same_calls_near_and_far(servers):
    """Values may be longer than a message, and rows more than a request holds."""
    tables = {"online": Table({"obs": "u1"}), "rows": Table(storage="keyed")}
    with contextlib.ExitStack() as opened:
        nodes = [
            opened.enter_context(Server("tcp://127.0.0.1:*" if servers else None, tables=tables, limits=SMALL))
            for _ in range(servers or 1)
        ]
        far = opened.enter_context(RemoteRows([each.endpoint for each in nodes])) if servers else None
        calls = nodes[0].table("rows").calls() if far is None else far.calls
        rows = [
            keyed.PutRow(f"k{i}", {"t": bytes([i])}, {"x": bytes([i]) * (20_000 if i == 7 else 300)}) for i in range(40)
        ]
        assert [row.key for row in calls.put("p", rows)] == [row.key for row in rows]
        stored = calls.values("p", ["k7", "none", "k3"])
        assert [each.fields.get("x") for each in stored] == [rows[7].fields["x"], None, rows[3].fields["x"]]
        assert [row.key for row in calls.facts("p", ["k5", "none", "k1"])] == ["k5", "k1"]
        assert {row.key: row.made for row in calls.rows()["p"]}.keys() == {row.key for row in rows}
        assert sum(each.stats().tables["rows"].held_caches for each in nodes) == 40
        calls.clear("p", [f"k{i}" for i in range(39)])
        assert [row.key for row in calls.rows("p")["p"]] == ["k39"]
        calls.reset()
        assert calls.rows() == {}


@pytest.fixture
def asker():
    return Asker(made_dispatcher(table=Table(storage="keyed")))


def sent(asker, *rows, **options):
    body = keyed.ChangeRows(call="put", partition="p", **options)
    return asker.ask(body, payload=keyed.pack(list(rows)))


def row(key, **fields):
    return keyed.PutRow(key, {}, fields, [])


def values(asker, keys, **options):
    body = keyed.FindRows(call="values", partition="p", **options)
    return asker.ask(body, payload=keyed.pack(keys))


def test_a_write_that_is_sent_again_does_not_undo_a_later_one(asker):
    other = Asker(asker.dispatcher, YOU)
    sent(asker, row("k", x=b"old"))
    sent(other, row("k", x=b"new"))
    body = keyed.ChangeRows(call="put", partition="p")
    asker.ask(body, payload=keyed.pack([row("k", x=b"old")]), again=True)
    (stored,) = keyed.unpack_values(values(asker, ["k"]).payload)
    assert stored.fields == {"x": b"new"}


def test_fields_that_are_named_come_alone_and_all_names_are_said(asker):
    sent(asker, row("k", x=b"1", y=b"2"))
    (stored,) = keyed.unpack_values(values(asker, ["k"], fields=["y", "none"]).payload)
    assert (stored.fields, stored.names) == ({"y": b"2"}, ["x", "y"])


def test_a_long_value_is_part_of_an_upload_of_the_same_client(asker):
    for offset, piece in ((0, b"abc"), (3, b"def")):
        asker.ask(keyed.ChangeRows(call="stage", upload=1, offset=offset), payload=piece)
    staged = keyed.PutRow("k", {}, {}, [keyed.StagedValue("x", 1, 4)])
    assert sent(Asker(asker.dispatcher, YOU), staged, upload=1).body.code == "value"
    sent(asker, staged, upload=1)
    (stored,) = keyed.unpack_values(values(asker, ["k"]).payload)
    assert stored.fields == {"x": b"bcde"}
    assert sent(asker, staged, upload=1).body.code == "value", "an upload is used once"


def test_rows_take_of_what_their_table_may_hold_and_of_what_all_tables_hold_once(asker):
    small = Asker(made_dispatcher(table=Table(storage="keyed", byte_limit=3000)))
    small.dispatcher.tables.first.pool.limit_bytes(3000)
    sent(small, row("k", x=bytes(1000)))
    size = small.dispatcher.tables.first.pool.stats().bytes
    assert small.dispatcher.budget.holders()["table default"] == size and size < 3000
    refused = sent(small, row("l", x=bytes(2000))).body
    assert (
        refused.code == "full" and "2,000" not in refused.text and "3,000 may be held (its byte_limit" in refused.text
    )
    assert sent(small, row("l", x=bytes(4000))).body.code == "too_large"
    assert small.dispatcher.tables.first.pool.stats().caches == 1
    small.dispatcher.budget.set_limit(size + 100)
    assert "held_bytes" in sent(small, row("l", x=bytes(1000))).body.text
    assert sent(asker, row("l", x=bytes(4000))).body.rows == 1


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
