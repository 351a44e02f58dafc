"""Keyed rows by messages: replies come in parts, a resend changes nothing, and what is malformed is refused."""

import functools
from types import SimpleNamespace

import pytest

from dispatchkit import ME, YOU, Asker, made_dispatcher
from memoire.limits import Limits
from memoire.tables.keyed import messages as keyed
from memoire.tables.keyed.handlers import KeyedHandler
from memoire.tables.keyed.pool import KeyedPool
from memoire.tables.table import Table
from memoire.wire import types
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.receivers import Page, Receiver


@pytest.fixture
def asker():
    return Asker(made_dispatcher({"lines": [], "models": []}, table=Table(storage="keyed")))


def put(asker, *rows, **options):
    body = keyed.ChangeRows(call="put", partition="p", **options)
    return asker.ask(body, payload=keyed.pack(list(rows)))


def row(key, **fields):
    return keyed.PutRow(key, {}, fields, [])


def values(asker, keys, **options):
    body = keyed.FindRows(call="values", partition="p", **options)
    return asker.ask(body, payload=keyed.pack(keys))


class Rows:
    """A handler of its own, whose replies are short."""

    def __init__(self):
        budget = ByteBudget(1 << 20)
        page = functools.partial(Page, Receiver(), payload_bytes=170)
        pool = KeyedPool()
        pool.join(budget, "keyed rows")
        desk = SimpleNamespace(
            table=lambda header: SimpleNamespace(asked=lambda capability, what: pool),
            limits=Limits(message_bytes=680),
            epoch=1,
            requests=budget.holder("requests"),
            page=lambda client, kind: page(kind, client),
        )
        self.handler = KeyedHandler(desk, facts_per_reply=2)
        self.header = SimpleNamespace(client=ME, type=types.FIND_ROWS)

    def put(self, *rows):
        body = keyed.ChangeRows(call="put", partition="p")
        self.handler.change(0.0, self.header, body, keyed.pack(list(rows)))

    def all_of(self, unpack, keys=(), **call):
        """What each reply brings, until there are no more."""
        found, after, is_whole = [], 0, False
        while not is_whole:
            body = keyed.FindRows(partition="p", after=after, **call)
            reply = self.handler.find(0.0, self.header, body, keyed.pack(list(keys)))
            found.append(unpack(reply.payload))
            after, is_whole = reply.body.after, reply.body.is_whole
        return found


def test_values_of_many_keys_come_in_parts_in_the_order_that_was_asked_for():
    rows = Rows()
    rows.put(*(row(f"k{i}", x=bytes([i]) * 60) for i in range(5)))
    parts = rows.all_of(keyed.unpack_values, ["k4", "none", "k0", "k2"], call="values")
    found = [each for part in parts for each in part]
    assert [each.fields.get("x", b"")[:1] for each in found] == [b"\4", b"", b"\0", b"\2"]
    assert [each.is_there for each in found] == [True, False, True, True]
    assert [len(part) for part in parts] == [3, 1]


def test_rows_are_listed_in_parts_without_their_values():
    rows = Rows()
    rows.put(*(row(f"k{i}", x=b"1") for i in range(5)))
    parts = rows.all_of(keyed.unpack_facts, call="tags")
    assert [[each.key for each in part] for part in parts] == [["k0", "k1"], ["k2", "k3"], ["k4"]]


def test_a_write_that_is_sent_again_does_not_undo_a_later_one(asker):
    other = Asker(asker.dispatcher, YOU)
    put(asker, row("k", x=b"old"))
    put(other, row("k", x=b"new"))
    body = keyed.ChangeRows(call="put", partition="p")
    asker.ask(body, payload=keyed.pack([row("k", x=b"old")]), again=True)
    (found,) = keyed.unpack_values(values(asker, ["k"]).payload)
    assert found.fields == {"x": b"new"}


def test_fields_that_are_named_come_alone_and_all_names_are_said(asker):
    put(asker, row("k", x=b"1", y=b"2"))
    (found,) = keyed.unpack_values(values(asker, ["k"], fields=["y", "none"]).payload)
    assert (found.fields, found.names) == ({"y": b"2"}, ["x", "y"])


def test_a_long_value_is_part_of_an_upload_of_the_same_client(asker):
    for offset, piece in ((0, b"abc"), (3, b"def")):
        asker.ask(keyed.ChangeRows(call="stage", upload=1, offset=offset), payload=piece)
    staged = keyed.PutRow("k", {}, {}, [keyed.StagedValue("x", 1, 4)])
    assert put(Asker(asker.dispatcher, YOU), staged, upload=1).body.code == "value"
    put(asker, staged, upload=1)
    (found,) = keyed.unpack_values(values(asker, ["k"]).payload)
    assert found.fields == {"x": b"bcde"}
    assert put(asker, staged, upload=1).body.code == "value", "an upload is used once"


@pytest.mark.parametrize("call", ["values", "facts"])
def test_malformed_keys_are_refused(asker, call):
    assert asker.ask(keyed.FindRows(call=call), payload=b"\xc1").body.code == "payload"


def test_rows_take_of_what_their_table_may_hold_and_of_what_all_tables_hold_once(asker):
    told = {"lines": [], "models": []}
    small = Asker(made_dispatcher(told, table=Table(storage="keyed", byte_limit=3000)))
    small.dispatcher.tables.first.pool.limit(3000)
    put(small, row("k", x=bytes(1000)))
    size = small.dispatcher.tables.first.pool.stats().bytes
    assert small.dispatcher.budget.holders()["table default"] == size and size < 3000
    refused = put(small, row("l", x=bytes(2000))).body
    assert refused.code == "full" and "2,000" not in refused.text and "3,000 may be held there" in refused.text
    assert put(small, row("l", x=bytes(4000))).body.code == "too_large"
    assert small.dispatcher.tables.first.pool.stats().caches == 1
    small.dispatcher.budget.set_limit(size + 100)
    assert "held_bytes" in put(small, row("l", x=bytes(1000))).body.text
    assert put(asker, row("l", x=bytes(4000))).body.rows == 1


def test_rows_are_refused_where_the_table_keeps_something_else():
    asker = Asker(made_dispatcher({"lines": [], "models": []}))
    for body in (keyed.FindRows(call="tags"), keyed.ChangeRows(call="reset")):
        refused = asker.ask(body).body
        assert refused.code == "table" and f"{body.type.name} is for keyed" in refused.text


def test_reset_takes_everything_away_and_clear_only_its_keys(asker):
    put(asker, row("a", x=b"1"), row("b", x=b"2"))
    asker.ask(keyed.ChangeRows(call="clear", partition="p"), payload=keyed.pack(["a", "none"]))
    said = asker.ask(keyed.FindRows(call="tags", is_everywhere=True))
    assert [each.key for each in keyed.unpack_facts(said.payload)] == ["b"]
    assert asker.ask(keyed.ChangeRows(call="reset")).body.rows == 0
    assert asker.dispatcher.tables.first.pool.held == (0, 0) and ME != YOU
