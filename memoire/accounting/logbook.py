r"""Log lines of all clients: numbered by their sender, taken once, and written in the documented form.

Pure: `take` returns what is new, the caller writes it. A line of the file is `'%s,%08x,%s\n' % (time, uuid,
message)`: the time when the server received it (ISO 8601 with offset), the sender's 32-bit label, and the message on
one line.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from string import ascii_lowercase, ascii_uppercase

import msgspec

from memoire.wire.messages import Line

# Whatever could start a new line, move a terminal's cursor, or change the direction in which the rest of the line is
# read (Boucher and Anderson, Trojan Source, 2021); a tab may stay.
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff" + "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
LINE_OVERHEAD = 100
"""Bytes that a line takes beside its text, about."""
MOST_FOUND = 10_000
"""Lines that one search finds at most."""
_SHORT = {"\n": "\\n", "\r": "\\r"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A line that was taken: `index` counts all lines of this book from 1."""

    index: int
    client: bytes
    received: float
    line: Line

    @property
    def escaped(self) -> Entry:
        """The same with its text on one line, as the log file has it."""
        return replace(self, line=msgspec.structs.replace(self.line, text=escape(self.line.text)))


def escape(text: str) -> str:
    r"""`text` on one line: line breaks, control characters and marks of direction become escapes: ``\n``, ``\x1b``,
    ``\u202e``.
    """
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def timestamp(seconds: float) -> str:
    """ISO 8601 with microseconds and offset, in UTC: ``2026-01-31T12:00:00.000000+00:00``; it has no comma."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def format_line(received: float, uuid: int, text: str) -> str:
    """The line of the log file, with its line break."""
    return f"{timestamp(received)},{uuid & 0xFFFFFFFF:08x},{escape(text)}\n"


def cut(text: str, byte_limit: int) -> str:
    """`text` cut to `byte_limit` bytes of UTF-8 at a character's end, with "..." where something is missing."""
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= byte_limit:
        return encoded.decode()
    return encoded[: max(0, byte_limit - 3)].decode("utf-8", "ignore") + "..."


_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which lines are asked for: those that fulfil all of it."""

    text: str = ""
    """Somewhere in the line as it is written; letters A to Z in either case."""
    client: bytes | None = None
    """Id of the sender."""
    label: int | None = None
    """The sender's 32-bit uuid."""
    since: float | None = None
    """Received at this time or later, in seconds since 1970."""
    until: float | None = None
    """Received before this time."""
    after: int = 0
    """With a higher index."""
    before: int | None = None
    """With a lower index."""

    def is_met_by(self, entry: Entry) -> bool:
        """Whether this line is one of them."""
        return (
            entry.index > self.after
            and (self.before is None or entry.index < self.before)
            and (self.client is None or entry.client == self.client)
            and (self.label is None or entry.line.label == self.label)
            and (self.since is None or entry.received >= self.since)
            and (self.until is None or entry.received < self.until)
            and escape(self.text).translate(_LOWER) in escape(entry.line.text).translate(_LOWER)
        )


class Logbook:
    """The lines of one run that were taken, numbered, and the newest of them. Not thread-safe: the owner locks.

    Up to which number a client's lines were taken is in its account (`ledger.Account.lines_through`).
    """

    def __init__(self, *, keep: int = 2000) -> None:
        self._recent: deque[Entry] = deque(maxlen=keep)
        self.count = 0
        """Lines taken in all."""

    def take(self, client: bytes, lines: Iterable[Line], through: int, now: float) -> list[Entry]:
        """The lines of a client that are numbered above `through`, in order; those of one message ascend."""
        taken = []
        for line in lines:
            if line.number > through:
                through = line.number
                self.count += 1
                taken.append(Entry(self.count, client, now, line))
        self._recent.extend(taken)
        return taken

    def restore(self, count: int, recent: Iterable[Entry]) -> None:
        """Go on where a saved book ended; this one is new and empty."""
        self.count = count
        self._recent.extend(recent)

    def recent(self, after: int = 0, most: int = 1000) -> list[Entry]:
        """The newest lines still kept with an index above `after`, oldest first, at most `most` of them."""
        return [entry for entry in self._recent if entry.index > after][-most:]


class Outbox:
    """A client's lines until its home has them: numbered, and bounded in number and bytes. What was taken stays.

    Not thread-safe: the owner locks.
    """

    def __init__(self, *, most_lines: int, most_bytes: int, line_bytes: int) -> None:
        self._lines: deque[Line] = deque()
        self._sizes: deque[int] = deque()
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._line_bytes = line_bytes
        self._number = 0
        self.bytes = 0
        """Bytes of the lines that wait."""
        self.dropped = 0
        """Lines that were not taken, because there was no room for them in time."""

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def newest(self) -> int:
        """Number of the newest line ever added; 0 when there is none."""
        return self._number

    @property
    def oldest(self) -> float:
        """Number of the oldest line that still waits; infinity when none does."""
        return self._lines[0].number if self._lines else float("inf")

    @property
    def is_half_full(self) -> bool:
        """Whether it is time to send lines without a pause."""
        return 2 * len(self._lines) >= self._most_lines or 2 * self.bytes >= self._most_bytes

    def add(self, text: str, uuid: int, now: float) -> int:
        """Number the line and keep it until it is acknowledged; returns its number, or 0 when there is no room.

        One line always fits into an empty outbox.
        """
        text = cut(text, self._line_bytes)
        size = len(text.encode()) + LINE_OVERHEAD
        if self._lines and (len(self._lines) >= self._most_lines or self.bytes + size > self._most_bytes):
            return 0
        self._number += 1
        self._lines.append(Line(number=self._number, time=now, label=uuid, text=text))
        self._sizes.append(size)
        self.bytes += size
        return self._number

    def acknowledge(self, through: int) -> None:
        """The home has the lines up to this number."""
        while self._lines and self._lines[0].number <= through:
            self._lines.popleft()
            self.bytes -= self._sizes.popleft()

    def waiting(self, most_lines: int, most_bytes: int, through: int | None = None) -> list[Line]:
        """The oldest lines that fit one message, at least one when there is any; none numbered above `through`."""
        chosen: list[Line] = []
        size = 0
        for line in self._lines:
            size += 4 * len(line.text) + 48  # UTF-8 has at most four bytes a character
            if chosen and (len(chosen) >= most_lines or size > most_bytes):
                break
            if through is not None and line.number > through:
                break
            chosen.append(line)
        return chosen
