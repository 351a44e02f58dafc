r"""Log lines of all clients: numbered by their sender, taken once, and written in the documented form.

Pure: `take` returns what is new, the caller writes it. A line of the file is `'%s,%08x,%s\n' % (time, uuid,
message)`: the time when the server received it (ISO 8601 with offset), the sender's 32-bit label, and the message on
one line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from string import ascii_lowercase, ascii_uppercase
from sys import getsizeof

import msgspec

from memoire.errors import escape
from memoire.limits import HELD_BYTES, Limits
from memoire.wire.byte_budget import ByteHolder
from memoire.wire.messages import Line

RECENT_LINE_BYTES = 4 << 20
"""Bytes of the newest lines that a book keeps in memory."""
ENTRY_BYTES = 256
"""Of a line in memory, beside its text."""
MAX_FOUND_LINES = 10_000
"""Lines that one search finds at most."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line that was taken: `index` counts all lines of this book from 1."""

    index: int
    client: bytes
    received: float
    line: Line

    @property
    def escaped(self) -> LogEntry:
        """The same with its text on one line, as the log file has it."""
        return replace(self, line=msgspec.structs.replace(self.line, text=escape(self.line.text)))


def timestamp(seconds: float) -> str:
    """ISO 8601 with microseconds and offset, in UTC: ``2026-01-31T12:00:00.000000+00:00``; it has no comma."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def format_line(received: float, uuid: int, text: str, name: str = "") -> str:
    """The line of the log file, with its line break. `name` is that of the client, in place of its label."""
    return f"{timestamp(received)},{escape(name) or f'{uuid & 0xFFFFFFFF:08x}'},{escape(text)}\n"


_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFilter:
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

    def is_met_by(self, entry: LogEntry) -> bool:
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


def _bytes_of(entry: LogEntry) -> int:
    return ENTRY_BYTES + getsizeof(entry.line.text)


class Logbook:
    """The lines of one run that were taken, numbered, and the newest of them. Older ones are in the files, if there are
    any; their numbers show that they were there. Not thread-safe: the owner locks.

    Up to which number a client's lines were taken is in its account (`ledger.Account.lines_through`).

    Args:
        keep: The newest lines that are kept.
        room: Counts what they take, which is no more than it has of its own; None is `RECENT_LINE_BYTES`.
    """

    def __init__(self, *, keep: int = 2000, room: ByteHolder | None = None) -> None:
        self._recent: deque[LogEntry] = deque()
        self._keep, self._room = keep, room
        self._most = RECENT_LINE_BYTES if room is None else room.own
        self._bytes = 0
        self.count = 0
        """Lines taken in all."""

    def take(self, client: bytes, lines: Iterable[Line], through: int, now: float) -> list[LogEntry]:
        """The lines of a client that are numbered above `through`, in order; those of one message ascend."""
        taken = []
        for line in lines:
            if line.number > through:
                through = line.number
                self.count += 1
                taken.append(LogEntry(self.count, client, now, line))
        if taken:
            self._extend(taken)
        return taken

    def _extend(self, entries: Iterable[LogEntry]) -> None:
        """Keep these lines, too, and the newest of all, as many as may be."""
        before = self._bytes
        for entry in entries:
            self._recent.append(entry)
            self._bytes += _bytes_of(entry)
            while len(self._recent) > self._keep or (self._bytes > self._most and len(self._recent) > 1):
                self._bytes -= _bytes_of(self._recent.popleft())
        if self._room is not None:
            self._room.add(self._bytes - before)

    def clear(self) -> None:
        """Keep no lines in memory any more."""
        self._recent.clear()
        if self._room is not None:
            self._room.add(-self._bytes)
        self._bytes = 0

    def restore(self, count: int, recent: Iterable[LogEntry]) -> None:
        """Go on where a saved book ended; this one is new and empty."""
        self.count = count
        self._extend(recent)

    def recent(self, after: int = 0, most: int = 1000) -> list[LogEntry]:
        """The newest lines still kept with an index above `after`, oldest first, at most `most` of them."""
        return [entry for entry in self._recent if entry.index > after][-most:]


def line_bytes(limits: Limits) -> int:
    """Bytes that the newest log lines may take beside `held_bytes`."""
    return min(RECENT_LINE_BYTES, (limits.held_bytes or HELD_BYTES) // 16)
