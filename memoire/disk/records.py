"""Rows of the state folder's database: keys, bodies, checksums, and the SQL conditions of searches. Pure.

facts      kind, key, body, sum     runs, models, settings, ...: one row for each, replaced when it changes
accounts   part, key, body, sum     counts of each client in a run, packed (`AccountPacker`): there may be millions
table_rows part, key, body, sum     rows that tables save at each change, and places of large bodies (`table_rows`)
lines      run << 40 | index, ...   log lines as the log file has them, oldest first
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from memoire.accounting.merge import merge
from memoire.accounting.packing import AccountPacker, NumberedTexts
from memoire.accounting.runs import LineFilter, LogEntry, RunFacts, SavedGroup
from memoire.errors import escape
from memoire.wire import _bytes
from memoire.wire.messages import Line
from memoire.wire.rows import ACCOUNT

from .files import corrupt

INDEX_BITS: Final = 40
LAST: Final = b"\xff" * 32
"""Upper bound of the keys of accounts."""

SEAL, META, SETTING, RUN, WORD, MODEL, SEGMENT = range(7)

Fact: TypeAlias = tuple[int, bytes, bytes | None]
"""Change of a fact: kind, key, and the new body; None removes the row."""
FactRow: TypeAlias = tuple[int, bytes, bytes, int]
"""Row of `facts`: kind, key, body and checksum."""
PartRow: TypeAlias = tuple[int, bytes, bytes, int]
"""Row of `accounts` or `table_rows`: number of the run, or kind; key, body and checksum."""
PartChanges: TypeAlias = Mapping[tuple[int, bytes], bytes | None]
"""Changes of rows of `accounts` or `table_rows`: new bodies by number or kind, and key; None removes a row."""
LineRow: TypeAlias = tuple[int, bytes, int, float, int, float, str, int]
"""Row of `lines`: run and index in one number, client, the client's number of the line, time of receipt, label, time of
writing, text and checksum.
"""

_COUNT: Final = struct.Struct(">Q")
_LOG_NAME: Final = re.compile(r"[A-Za-z0-9_-]{0,80}\.[0-9]{8,12}\.log")


MAX_TEXT: Final = 4096
"""Most characters of a text to search: SQLite takes patterns of 50000 bytes, and a character may become twelve."""
_LAST_INDEX: Final = (1 << INDEX_BITS) - 1


def condition(run: int, wanted: LineFilter) -> tuple[str, list[Any]] | None:
    """Return the SQL condition of a search in a run's lines, and its values; None if no line can match."""
    if len(wanted.text) > MAX_TEXT or not 0 <= (wanted.label or 0) < 1 << 32:
        return None
    low = max(0, wanted.after) + 1
    high = _LAST_INDEX if wanted.before is None else min(wanted.before - 1, _LAST_INDEX)
    where = ["id BETWEEN ? AND ?"]
    values: list[Any] = [run << INDEX_BITS | min(low, _LAST_INDEX), (run << INDEX_BITS) + max(-1, high)]
    for part, value in (
        ("client = ?", wanted.client),
        ("label = ?", wanted.label),
        ("received >= ?", wanted.since),
        ("received < ?", wanted.until),
        ("text LIKE ? ESCAPE '\\'", _pattern(escape(wanted.text)) if wanted.text else None),
    ):
        if value is not None:
            where.append(part)
            values.append(value)
    return " AND ".join(where), values


def _pattern(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def fact_checksum(kind: int, key: bytes, body: bytes) -> int:
    """Return the checksum of a row of facts, in 63 bits, since SQLite's integers have a sign."""
    return _bytes.checksum(b"%c%c%b%b" % (kind, len(key) & 255, key, body)) >> 1


def part_sum(part: int, key: bytes, body: bytes) -> int:
    """Return the checksum of a row of `accounts` or `table_rows`, in 31 bits, since there are many rows."""
    return _bytes.checksum(b"%d %b%b" % (part, key, body)) >> 33


def run_key(run: int, rest: bytes = b"") -> bytes:
    """Return the key of a row that belongs to a run."""
    return struct.pack(">I", run) + rest


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Newest model of a topic as the database stores it; a large body is in a file instead (`body` None)."""

    version: int
    size: int
    checksum: int
    text: bool
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class LogSegment:
    """Text file of log lines, with the run and range of its lines."""

    number: int
    run: int
    name: str
    """Name of the file, without its folder."""
    first: int
    """Index of the file's first line within the run."""
    last: int
    bytes: int

    @property
    def ids(self) -> tuple[int, int]:
        """Ids in the database of the file's first and last line."""
        return self.run << INDEX_BITS | self.first, self.run << INDEX_BITS | self.last

    @property
    def row_change(self) -> Fact:
        """Change that saves the segment's row."""
        return SEGMENT, segment_key(self), msgspec.msgpack.encode(self)


def segment_key(segment: LogSegment) -> bytes:
    """Return the key of a segment's row."""
    return struct.pack(">I", segment.number)


class StateContents:
    """Contents of a state file that are read often, kept in memory: runs, counts of lines, segments and texts.

    Args:
        path: Path of the file, for errors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.runs: dict[str, int] = {}
        """Number of each run, by name."""
        self.facts_of: dict[str, RunFacts] = {}
        self.counts: dict[int, int] = {}
        """Index of the newest line of each run, by the run's number."""
        self.segments: dict[int, LogSegment] = {}
        self.words = NumberedTexts()
        """Texts that packed accounts refer to, by number."""

    def apply(self, kind: int, key: bytes, body: bytes) -> None:
        """Take a row that was read or saved.

        Raises:
            StateCorrupt: memoire cannot have written the row. Further errors are those of `database.is_damage`.
        """
        if kind == RUN:
            facts = msgspec.msgpack.decode(body, type=RunFacts)
            self.runs[facts.name], self.facts_of[facts.name] = struct.unpack(">I", key)[0], facts
        elif kind == SEGMENT:
            segment = msgspec.msgpack.decode(body, type=LogSegment)
            if not _LOG_NAME.fullmatch(segment.name):  # a forged name would let another file be written, or removed
                raise corrupt(self._path, f"{segment.name[:80]!r} is not a valid name of a file of log lines")
            self.segments[segment.number] = segment
        elif kind == WORD:
            if self.words.number_of(body.decode()) != int.from_bytes(key, "big"):
                raise corrupt(self._path, "a word is missing")
        elif kind == META and key.startswith(b"count"):
            self.counts[struct.unpack(">I", key[5:])[0]] = count_of(body)

    def remove(self, kind: int, key: bytes) -> None:
        """Forget a row that was removed."""
        if kind == SEGMENT:
            self.segments.pop(struct.unpack(">I", key)[0], None)


# ---------------------------------------------------------------------------------------------------- groups


def last_of_each(facts: Iterable[Fact]) -> list[Fact]:
    """Return the last change of each kind and key."""
    last = {(kind, key): body for kind, key, body in facts}
    return [(kind, key, body) for (kind, key), body in last.items()]


def pack_group(group: SavedGroup, runs: dict[str, int]) -> list[Fact]:
    """Return the facts of a group, without its models and segments; new runs get the next number in `runs`."""
    facts: list[Fact] = []
    if not (group.runs or group.lines or group.settings):
        return facts
    for run in group.runs:
        number = runs.setdefault(run.name, max(runs.values(), default=0) + 1)
        facts.append((RUN, run_key(number), msgspec.msgpack.encode(run)))
    counts = {runs[name]: entry.index for name, entry in group.lines}
    facts += [(META, b"count" + run_key(number), _COUNT.pack(count)) for number, count in counts.items()]
    facts += [(SETTING, name.encode(), text.encode()) for name, text in group.settings.items()]
    return facts


def count_of(body: bytes) -> int:
    """Return the number of lines in a row's body. Raises ValueError or struct.error if it is damaged."""
    (count,) = _COUNT.unpack(body)
    if count >> 53:
        raise ValueError(f"{count} lines are too many")
    return int(count)


def pack_accounts(
    group: SavedGroup, runs: Mapping[str, int], packing: AccountPacker, stored: Callable[[int, bytes], bytes | None]
) -> dict[tuple[int, bytes], bytes]:
    """Return the packed bodies of a group's accounts, by number of the run and key. Accounts from other servers are
    merged with their `stored` bodies.
    """
    bodies = {(runs[name], account.client): packing.pack(account) for name, account in group.accounts}
    for name, packed in group.inherited:
        run = runs[name]
        rows = np.frombuffer(packed, ACCOUNT)
        keys = [packing.pack_row(row)[0] for row in rows]
        former = [(key, bodies.get((run, key)) or stored(run, key)) for key in keys]
        known = packing.rows([(key, body) for key, body in former if body is not None])
        bodies |= {(run, key): body for key, body in map(packing.pack_row, merge(known, rows))}
    return bodies


# ---------------------------------------------------------------------------------------------------- checks


def line_row(run: int, entry: LogEntry) -> LineRow:
    """Return the row of a log line, with its checksum."""
    line = entry.line
    number, text = run << INDEX_BITS | entry.index, escape(line.text)
    facts = number, entry.client, line.number, entry.received, line.label, line.time, text
    return (*facts, _line_sum(facts))


def _line_sum(row: tuple[Any, ...]) -> int:
    number, client, count, received, label, written, text = row[:7]
    return _bytes.checksum(struct.pack(">qqdqd", number, count, received, label, written) + client + text.encode()) >> 1


def entry_of(row: tuple[Any, ...], path: Path) -> LogEntry:
    """Return the log line of a row. Raises StateCorrupt if its checksum is wrong, TypeError if a value's type is."""
    number, client, count, received, label, written, text, check = row
    index = number & (1 << INDEX_BITS) - 1
    if _line_sum(row) != check:
        raise corrupt(path, f"log line {index} has a wrong checksum")
    return LogEntry(index, client, received, Line(count, written, label, text))


def checked_fact(row: FactRow, path: Path) -> FactRow:
    """Return the row unchanged. Raises StateCorrupt if its checksum is wrong."""
    if fact_checksum(*row[:3]) != row[3]:
        raise corrupt(path, f"a row of kind {row[0]} has a wrong checksum")
    return row


def checked_parts(rows: Iterable[PartRow], path: Path, table: str) -> Iterator[PartRow]:
    """Yield the rows of `accounts` or `table_rows` unchanged. Raises StateCorrupt if a checksum is wrong."""
    for part, key, body, check in rows:
        if part_sum(part, key, body) != check:
            raise corrupt(path, f"a row of {table} has a wrong checksum")
        yield part, key, body, check
