"""Learners far away take rollouts: each entry once, in order, also if a reply is lost and the request comes again."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.server.dispatch import Dispatcher
from memoire.tables.rollouts import transport as rollout_transport
from memoire.tables.rollouts.transport import check_entries, unpacked
from memoire.wire.frames import encode, parse
from rolloutkit import SCHEMA, TABLE, TakesServer, fragment
from serverkit import NOW, READER, YOU, tables_of


@given(st.lists(st.tuples(st.sampled_from("aab"), st.integers(1, 9), st.integers(0, 2), st.booleans()), max_size=40))
def test_each_entry_is_handed_out_once_and_in_order_where_replies_are_lost(moves):
    served, pushed, got = TakesServer(), 0, {READER: [], YOU: []}
    for who, count, lost, exact in moves:
        if who == "b":
            served.push(bytes(16), range(pushed, pushed + count))
            pushed += count
            continue
        reader = READER if count % 2 else YOU
        reply = served.ask(reader, steps=count, exact=exact)
        for _ in range(lost):
            assert served.ask(reader, again=True, steps=count, exact=exact) is reply
        parts = served.got(reply)
        assert not exact or sum(map(len, parts)) <= count
        for each in parts:
            obs = each.episode.columns["obs"].tolist()
            assert int(each.episode.final_state["obs"]) == obs[-1] + 1
            got[reader] += obs
        assert reply.body.held == served.pool.entries() == pushed - sum(map(len, got.values()))
    for numbers in got.values():
        assert numbers == sorted(numbers)
    rest = served.got(served.ask(steps=1000))
    everything = sorted([*got[READER], *got[YOU], *(int(n) for each in rest for n in each.episode.columns["obs"])])
    assert everything == list(range(pushed))


def test_nothing_is_taken_below_the_least_and_what_is_held_is_said():
    served = TakesServer(capacity=50)
    served.push(bytes(16), range(10), terminated=True)
    for reply in (served.ask(steps=20, least=11), served.ask(steps=0)):
        assert (reply.payload, reply.body.fragments, reply.body.held, reply.body.capacity) == (None, [], 10, 50)
    served.now = 4.0
    (only,) = served.got(served.ask(steps=20, least=10))
    assert (only.client, only.number, only.episode.terminated, only.episode.is_cut) == (bytes(16), 0, True, False)
    assert only.age.tolist() == [3.5] * 10 and only.episode.model_version.tolist() == [3] * 10


def test_another_table_and_another_schema_are_refused():
    served = TakesServer()
    served.push(bytes(16), range(4))
    table = served.tables.numbered(TABLE)
    frames = encode(
        rollout_transport.Take(steps=4), client=READER, sequence=1, table=TABLE, fingerprint=table.fingerprint + 1
    )
    assert served.dispatcher.answer(parse(frames)).body.code == "schema" and served.pool.entries() == 4
    tables = tables_of()
    dispatcher = Dispatcher(tables=tables, run="run", name="home", limits=Limits(), clock=lambda: NOW, epoch=7)
    frames = encode(rollout_transport.Take(steps=4), client=READER, sequence=1, table=tables.first.number)
    refused = dispatcher.answer(parse(frames)).body
    assert refused.code == "table" and "stores caches; TAKE is for rollouts" in refused.text


def test_a_wrong_request_and_a_wrong_reply_are_refused():
    served = TakesServer()
    served.push(bytes(16), range(4))
    assert served.ask(steps=1, release="later").body.code == "value"
    reply = served.ask(steps=4)
    for rows in ([], reply.body.fragments * 2):
        with pytest.raises(ProtocolError, match="in a payload of"):
            unpacked(rows, reply.payload, SCHEMA, now=0.0, limits=served.limits)
    served.ask(steps=0)
    served.numbers[READER] -= 2
    assert served.ask(steps=4).body.code == "missing", "its reply was acknowledged, and is not kept"


def test_a_fragment_is_refused_by_its_largest_entry_however_many_it_has():
    def least(entries):
        """Bytes of a reply from which on it is taken."""
        for most in range(1, 2000):
            with contextlib.suppress(ProtocolError):
                check_entries(fragment(READER, range(entries)), SCHEMA, most)
                return most
        raise AssertionError(entries)

    assert [least(entries) for entries in (2, 3, 7)] == [least(1)] * 3
