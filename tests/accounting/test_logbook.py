"""Lines are taken once, in order, and no message can forge a line of the file."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.accounting.logbook import Logbook, escape, format_line
from memoire.client.counts import LineOutbox
from memoire.wire.messages import Line

ALICE, BOB = b"a" * 16, b"b" * 16


def line(number, text="text"):
    return Line(number=number, time=1.0, label=7, text=text)


def test_a_line_of_the_file_has_the_documented_form():
    written = format_line(1_700_000_000.25, 0xBEEF, "step 3, loss 0.5")
    assert written == "2023-11-14T22:13:20.250000+00:00,0000beef,step 3, loss 0.5\n"
    time, _, rest = written.partition(",")
    assert datetime.fromisoformat(time).timestamp() == 1_700_000_000.25
    assert rest == "0000beef,step 3, loss 0.5\n"


@given(st.text())
def test_every_message_is_one_line(text):
    written = format_line(0.0, 1, text)
    assert len(written.splitlines()) == 1
    assert "\x1b" not in written and "\x00" not in written
    written.encode()


MARKS_OF_DIRECTION = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters=MARKS_OF_DIRECTION)))
def test_a_message_without_control_characters_is_written_as_it_is(text):
    assert escape(text) == text


@pytest.mark.parametrize("mark", MARKS_OF_DIRECTION)
def test_no_mark_of_direction_gets_through(mark):
    assert escape(f"reward {mark}1") == f"reward \\u{ord(mark):04x}1"


@pytest.mark.parametrize(("text", "escaped"), [("a\nb\r", "a\\nb\\r"), ("\x1b[2J", "\\x1b[2J"), ("\u2028", "\\u2028")])
def test_line_breaks_and_control_characters_are_escaped(text, escaped):
    assert escape(text) == escaped


@given(st.lists(st.integers(0, 30), max_size=20))
def test_each_line_is_taken_once_however_often_it_is_sent(acknowledged):
    book, outbox, taken = Logbook(), LineOutbox(most_lines=1000, most_bytes=1 << 20, line_bytes=100), []
    for count, through in enumerate(acknowledged):
        outbox.add(f"line {count}", 7, 0.0)
        newest = taken[-1].line.number if taken else 0
        taken += book.take(ALICE, outbox.waiting(1000, 10_000), newest, now=2.0)
        outbox.acknowledge(min(through, taken[-1].line.number))
    assert [entry.line.number for entry in taken] == list(range(1, len(acknowledged) + 1))
    assert [entry.index for entry in taken] == list(range(1, book.count + 1))


def test_lines_of_all_clients_are_numbered_in_the_order_in_which_they_came():
    book = Logbook()
    book.take(ALICE, [line(1), line(2)], 0, now=1.0)
    taken = book.take(BOB, [line(1)], 0, now=1.0)
    taken += book.take(ALICE, [line(2), line(3)], 2, now=1.0)
    assert [(entry.client, entry.line.number, entry.index) for entry in taken] == [(BOB, 1, 3), (ALICE, 3, 4)]


def test_recent_lines_are_bounded_and_read_from_an_index():
    book = Logbook(keep=3)
    book.take(ALICE, [line(n, str(n)) for n in range(1, 6)], 0, now=1.0)
    assert [entry.line.text for entry in book.recent()] == ["3", "4", "5"]
    assert [entry.line.text for entry in book.recent(after=4)] == ["5"]
    assert [entry.line.text for entry in book.recent(most=2)] == ["4", "5"]
