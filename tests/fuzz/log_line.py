"""A log line of a client: whatever its text, one line of the file that moves no terminal, and is found again."""

import unicodedata
from string import ascii_lowercase, ascii_uppercase

from memoire.accounting.logbook import LineFilter, LogEntry, escape, format_line
from memoire.client.counts import LineOutbox, cut
from memoire.wire.messages import Line

REACHED = {"taken"}
WORDS = (
    b"\n",
    b"\r\n",
    b"\x1b[2J",
    "\u2028".encode(),
    "\u202e".encode(),
    b"\x00",
    b"\xc2\x85",
    b"\xed\xa0\x80",
    b"\\x1b",
    b",",
)


_UPPER = str.maketrans(ascii_lowercase, ascii_uppercase)


def seeds() -> list[bytes]:
    """Plain lines, and some with everything."""
    return [
        b"a line",
        "zwölf \U0001f600 lines\nand\r\x1b]0;title\x07".encode(),
        b"\xed\xa0\x80 half a pair",
        b"x" * 9000,
    ]


def one(data: bytes) -> str:
    """Escape, cut, write, search."""
    text = data.decode("utf-8", "surrogatepass" if len(data) % 2 else "replace") if _is_text(data) else repr(data)
    safe = escape(text)
    assert len(safe.splitlines()) <= 1 and escape(safe) == safe
    assert not [sign for sign in safe if unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") and sign != "\t"]
    assert not [
        sign for sign in safe if unicodedata.bidirectional(sign) in ("LRE", "RLE", "LRO", "RLO", "LRI", "RLI", "FSI")
    ]
    safe.encode()
    short = cut(text, 100)
    assert len(short.encode()) <= 100
    outbox = LineOutbox(most_lines=10, most_bytes=1 << 20, line_bytes=1 << 13)
    assert outbox.add(text, len(data), 1.0) == 1
    line = format_line(1.7e9, len(data), text)
    assert len(line.splitlines()) == 1 and line.endswith("\n") and line.split(",", 2)[2] == safe + "\n"
    entry = LogEntry(1, b"c" * 16, 1.0, Line(1, 1.0, 7, text))
    assert LineFilter(text=text[:50]).is_met_by(entry) and LineFilter(text=text[:50].translate(_UPPER)).is_met_by(
        entry.escaped
    )
    return "taken"


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True
