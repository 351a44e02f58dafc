"""What a state file's rows are, without a file: sums that are sealed, what is kept of them, and searches."""

import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.accounting.logbook import LineFilter, LogEntry
from memoire.accounting.runs import RunFacts, SavedGroup
from memoire.disk import records
from memoire.disk.database import NONE, SUMS, RowsChecksum
from memoire.disk.records import MAX_TEXT, META, MODEL, RUN, SEGMENT, WORD, LogSegment, StateContents, condition
from memoire.errors import StateCorrupt
from memoire.wire.messages import Line

PATH = Path("/nowhere/state.db")
sums = st.dictionaries(st.integers(0, 5), st.integers(0, (1 << 63) - 1), max_size=6)


@given(st.lists(sums, max_size=5), st.sampled_from(["facts", "lines", "accounts", "prompts"]))
def test_a_seal_that_follows_every_change_is_the_sum_of_what_is_there(changes, what):
    place = ["facts", "lines", "accounts", "prompts"].index(what)
    seal, there = RowsChecksum(), {}
    for changed in changes:
        former = [there[key] for key in changed if key in there]
        seal = seal.next(*[NONE] * place, (former, list(changed.values())))
        there |= changed
        assert (getattr(seal, what), getattr(seal, f"{what}_sum")) == (len(there), sum(there.values()) & SUMS)
    seal = seal.next(*[NONE] * place, (list(there.values()), ()))
    assert seal == RowsChecksum(generation=len(changes) + 1)


def test_a_seal_comes_back_from_its_row():
    seal = RowsChecksum(1, 2, SUMS, 4, 5, 6, 7, 8, 9)
    assert RowsChecksum.unpack(seal.pack()) == seal
    assert seal.without_lines() == RowsChecksum(1, 2, SUMS, 0, 0, 6, 7, 8, 9)
    with pytest.raises(struct.error):
        RowsChecksum.unpack(b"short")


def segment(number=3, name="ant-7.00000003.log"):
    return LogSegment(number, 2, name, 10, 19, 400)


def test_what_is_asked_for_often_follows_the_rows():
    contents = StateContents(PATH)
    contents.apply(RUN, records.run_key(2), msgspec.msgpack.encode(RunFacts("ant/7", began=5.0)))
    contents.apply(META, b"count" + records.run_key(2), struct.pack(">Q", 19))
    contents.apply(META, b"epoch", b"\x01")
    contents.apply(MODEL, b"any", b"body")
    contents.apply(WORD, b"\x01", b"schema")
    _, key, body = segment().fact
    contents.apply(SEGMENT, key, body)
    assert contents.runs == {"ant/7": 2} and contents.facts_of == {"ant/7": RunFacts("ant/7", began=5.0)}
    assert contents.counts == {2: 19} and contents.segments == {3: segment()} and len(contents.words) == 1
    contents.remove(META, key)
    assert contents.segments
    contents.remove(SEGMENT, key)
    contents.remove(SEGMENT, key)
    assert not contents.segments


@pytest.mark.parametrize("name", ["../../x.00000001.log", "/x.00000001.log", "x.log", "x.0000001.log"])
def test_no_row_has_a_file_elsewhere_written(name):
    with pytest.raises(StateCorrupt, match="cannot be called"):
        StateContents(PATH).apply(*segment(name=name).fact)


def test_words_are_numbered_without_a_gap():
    with pytest.raises(StateCorrupt, match="a word is missing"):
        StateContents(PATH).apply(WORD, b"\x02", b"schema")


def test_new_runs_get_the_next_number_and_lines_say_how_many_there_are():
    runs = {"former": 4}
    lines = [("new", LogEntry(n, b"c" * 16, 1.0, Line(n, 0.0, 0, "text"))) for n in (1, 2)]
    facts = records.pack_group(SavedGroup(runs=[RunFacts("new")], lines=lines, settings={"a": "b"}), runs)
    assert runs == {"former": 4, "new": 5}
    assert [kind for kind, _, _ in facts] == [RUN, META, records.SETTING]
    assert records.count_of(facts[1][2]) == 2
    assert records.last_of_each([(1, b"k", b"1"), (1, b"k", None), (2, b"k", b"2")]) == [
        (1, b"k", None),
        (2, b"k", b"2"),
    ]


def test_a_row_of_another_checksum_is_damage():
    entry = LogEntry(7, b"c" * 16, 1.5, Line(3, 0.5, 2, "text"))
    row = records.line_row(2, entry)
    assert records.entry_of(row, PATH) == entry and row[0] == 2 << records.INDEX_BITS | 7
    with pytest.raises(StateCorrupt, match="log line 7 has a wrong checksum"):
        records.entry_of((*row[:-1], row[-1] + 1), PATH)
    fact = (RUN, b"k", b"body", records.add_up(RUN, b"k", b"body"))
    assert records.checked_fact(fact, PATH) == fact
    with pytest.raises(StateCorrupt, match="a row of kind 3 has a wrong checksum"):
        records.checked_fact((RUN, b"k", b"bodY", fact[3]), PATH)
    account = (1, b"k", b"body", records.part_sum(1, b"k", b"body"))
    assert list(records.checked_parts([account], PATH, "accounts")) == [account]
    with pytest.raises(StateCorrupt, match="a row of accounts has a wrong checksum"):
        list(records.checked_parts([(2, *account[1:])], PATH, "accounts"))


def test_a_search_is_a_condition_of_all_that_is_wanted():
    base, last = 3 << records.INDEX_BITS, (1 << records.INDEX_BITS) - 1
    assert condition(3, LineFilter()) == ("id BETWEEN ? AND ?", [base | 1, base + last])
    assert condition(3, LineFilter(after=5, before=9))[1] == [base | 6, base + 8]
    assert condition(3, LineFilter(before=-7))[1] == [base | 1, base - 1], "below every line of the run"
    where, values = condition(3, LineFilter(client=b"c", label=0, since=1.0, until=2.0, text="50%_\\"))
    assert where.split(" AND ")[2:] == [
        "client = ?", "label = ?", "received >= ?", "received < ?", "text LIKE ? ESCAPE '\\'",
    ]  # fmt: skip
    assert values[2:6] == [b"c", 0, 1.0, 2.0] and values[6].startswith("%50\\%\\_\\\\")
    for never in (LineFilter(text="x" * (MAX_TEXT + 1)), LineFilter(label=1 << 32), LineFilter(label=-1)):
        assert condition(3, never) is None
    assert condition(3, LineFilter(text="x" * MAX_TEXT, label=(1 << 32) - 1)) is not None
