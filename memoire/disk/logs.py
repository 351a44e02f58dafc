"""Log lines as text files, for people and their tools: one line each, in the documented form, rotated by size.

The lines are in the database first; these files are a copy. So nothing here is synced, and a file that a crash cut
short is completed from the database. Somebody else may rename, shorten or edit a file (logrotate does): it is left to
them, and the lines go on in a new one.

    log/ant-7.00000001.log      log/ant-7.00000002.log      log/ant-8.00000003.log

`LineFile` is the log of all clients as one file: appended to through a buffer, flushed by its owner. A disk that is
full must not end a server.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np

from memoire._core import Held
from memoire.accounting.runs import LogEntry, format_line
from memoire.errors import ParameterError
from memoire.replay.files import sync

from .files import append, make_folder
from .records import LogSegment

_log = logging.getLogger(__name__)

SEGMENTS = 16
"""Files that the text is cut into: when a new one begins, the oldest may go."""
_NAME = re.compile(r".*\.(\d{8})\.log")


LOG_FLUSH_INTERVAL = 1.0
"""Seconds after which lines are in the log file at the latest."""
MODES = ("a", "w", "x", "a+", "w+", "ab", "wb", "at", "wt")


class LineFile:
    """A text file of the log lines that a server receives. There is no file before `open`. Thread-safe.

    UTF-8, line feeds as they are. What cannot be written is lost: the log of the program says so.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        """Where lines go; None before `open`."""
        self._lock = threading.Lock()  # guards what follows
        self._file: IO[str] | None = None
        self._flush_at = float("inf")

    def open(self, path: str | Path, mode: str) -> None:
        """Write to this file from now on; the former one is closed.

        Args:
            path: Made when it is not there; its folder must be.
            mode: As of fopen: "a" goes on, "w" begins with an empty file, "x" refuses a file that is there.
        """
        if mode not in MODES:
            raise ParameterError("mode", mode, f"one of {', '.join(map(repr, MODES))}")
        whole = Path(path).absolute()
        file = whole.open(mode.replace("b", "").replace("t", ""), encoding="utf-8", newline="", buffering=1 << 16)
        self._replace(file, str(whole))

    def write(self, lines: Iterable[LogEntry]) -> None:
        """Write lines, which are flushed within `LOG_FLUSH_INTERVAL` seconds."""
        with Held(self._lock):
            if self._file is not None:
                self._flush_at = min(self._flush_at, time.monotonic() + LOG_FLUSH_INTERVAL)
                self._try(self._file.writelines, map(_line_of, lines))

    def next_time(self) -> float:
        """When `turn` has something to do."""
        return self._flush_at

    def turn(self, now: float) -> None:
        """Hand to the system what was written long enough ago."""
        with Held(self._lock):
            if now >= self._flush_at and self._file is not None:
                self._flush_at = float("inf")
                self._try(self._file.flush)

    def close(self) -> None:
        """Flush and close the file, if there is one."""
        self._replace(None, self.path)

    def _replace(self, file: IO[str] | None, path: str | None) -> None:
        with Held(self._lock):
            if self._file is not None:
                self._try(self._file.close)
            self.path, self._file, self._flush_at = path, file, float("inf")

    def _try(self, step: Callable[..., object], *args: object) -> None:
        try:
            step(*args)
        except OSError:
            _log.exception("%s could not be written", self.path)


def _line_of(entry: LogEntry) -> str:
    return format_line(entry.received, entry.line.label, entry.line.text)


def text_of(entry: LogEntry) -> bytes:
    """The line as it is in the file."""
    return _line_of(entry).encode()


def _is_what_a_crash_left(found: bytes, expected: bytes) -> bool:
    """Whether this is the beginning of the text, where a power failure may have left zeros in place of some of it."""
    if len(found) > len(expected):
        return not found[len(expected) :].strip(b"\x00") and _is_what_a_crash_left(found[: len(expected)], expected)
    there, wanted = np.frombuffer(found, np.uint8), np.frombuffer(expected, np.uint8, len(found))
    return bool(((there == wanted) | (there == 0)).all())


def _common(found: bytes, expected: bytes) -> int:
    """Bytes from the beginning that are the same."""
    most = min(len(found), len(expected))
    differs = np.frombuffer(found, np.uint8, most) != np.frombuffer(expected, np.uint8, most)
    return int(differs.argmax()) if differs.any() else most


@dataclass(slots=True)
class _AppendedLines:
    """What is appended to one file; it is open before the database knows of the lines, so that they cannot go astray
    when it is renamed meanwhile.
    """

    opened: int
    """File descriptor; -1 where the file cannot be written just now and is completed later."""
    segment: LogSegment
    text: bytes


class LineLog:
    """The text files of a folder. One thread writes.

    Args:
        folder: Made when it is not there.
        segments: Those that the database knows, by number.
        byte_limit: Of all of them together.
        lines_of: The lines of a segment, from the database.
    """

    def __init__(
        self,
        folder: Path,
        segments: dict[int, LogSegment],
        *,
        byte_limit: int,
        lines_of: Callable[[LogSegment], Iterator[LogEntry]],
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.folder = folder
        self._segments = segments
        self._byte_limit = byte_limit
        self._lines_of = lines_of
        self._at = at
        self._open: dict[int, LogSegment] = {}  # the segment of each run that goes on
        self._behind: set[int] = set()  # numbers of those whose text could not be written, or not completely
        self._touched: set[int] = set()  # numbers of those that were appended to
        self.trouble = ""
        """Why the text is behind the database; empty when it is not."""
        make_folder(folder)
        found = [int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        self._next = max([0, *found, *segments]) + 1

    def recover(self, *, was_clean: bool) -> None:
        """Complete what a crash cut short, and go on where the files end."""
        known = {segment.name for segment in self._segments.values()}
        oldest = min(self._segments, default=self._next)
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.name not in known and int(match[1]) < oldest:
                path.unlink(missing_ok=True)  # its lines have left the database already
        for segment in sorted(self._segments.values(), key=lambda segment: segment.number):
            self._open[segment.run] = segment
        if not was_clean:
            self._behind = {segment.number for segment in self._open.values()}

    # ------------------------------------------------------------------------------------------------ appending

    def plan(self, lines: list[tuple[int, LogEntry]], name_of: Callable[[int], str]) -> list[_AppendedLines]:
        """Open the files that new lines (number of the run, entry) go to: `segments` says what the database is told.

        `finish` or `drop` follows.
        """
        by_run: dict[int, list[LogEntry]] = {}
        for run, entry in lines:
            by_run.setdefault(run, []).append(entry)
        return [self._piece(run, entries, name_of) for run, entries in by_run.items()]

    def _piece(self, run: int, entries: list[LogEntry], name_of: Callable[[int], str]) -> _AppendedLines:
        text = b"".join(map(text_of, entries))
        segment = self._open.get(run)
        if segment is not None and self._has_room(segment):
            opened = self._reopen(segment)
            if opened is not None:
                longer = replace(segment, last=entries[-1].index, bytes=segment.bytes + len(text))
                return _AppendedLines(opened, longer, text)
        if segment is not None:
            self._settle(segment)
        name = re.sub(r"[^A-Za-z0-9_-]", "_", name_of(run))[:80]
        number, self._next = self._next, self._next + 1
        segment = LogSegment(number, run, f"{name}.{number:08d}.log", entries[0].index, entries[-1].index, len(text))
        return _AppendedLines(self._create(segment.name), segment, text)

    def _has_room(self, segment: LogSegment) -> bool:
        return segment.bytes < max(1, self._byte_limit // SEGMENTS)

    def _settle(self, segment: LogSegment) -> None:
        """Have a file on disk that nothing is appended to any more: only the newest is completed after a crash."""
        self._touched.discard(segment.number)
        try:
            sync(self.folder / segment.name)
            sync(self.folder)
        except OSError as error:
            _log.warning("%s may be cut short by a power failure: %s", segment.name, error)

    def _create(self, name: str) -> int:
        try:
            make_folder(self.folder)
            return append(self.folder / name)
        except OSError:
            return -1

    def _reopen(self, segment: LogSegment) -> int | None:
        """The segment's file, open at its end; -1 where it cannot be written now, None where it is not as it was
        left.
        """
        try:
            if segment.number in self._behind and not self._complete(segment):
                return None
            opened = os.open(self.folder / segment.name, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError:
            self._behind.add(segment.number)
            return -1
        if os.fstat(opened).st_size == segment.bytes:
            return opened
        os.close(opened)
        return None

    def _complete(self, segment: LogSegment) -> bool:
        """Write what the file lacks of its lines; False (and nothing done) where it has something else in it."""
        expected = b"".join(text_of(entry) for entry in self._lines_of(segment))
        path = self.folder / segment.name
        found = path.read_bytes() if path.exists() else b""
        if not _is_what_a_crash_left(found, expected) or len(expected) != segment.bytes:
            _log.warning("%s was changed by somebody else: the log goes on in a new file", path)
            self._behind.discard(segment.number)
            return False
        make_folder(self.folder)
        same = _common(found, expected)
        self._touched.add(segment.number)
        with open(append(path), "ab") as file:
            file.truncate(same)
            file.write(expected[same:])
        self._behind.discard(segment.number)
        return True

    def finish(self, pieces: list[_AppendedLines]) -> None:
        """Append the text: the database has the lines. What cannot be written is completed later."""
        for piece in pieces:
            self._open[piece.segment.run] = piece.segment
            self._touched.add(piece.segment.number)
            self._at("before text")
            try:
                self._append(piece)
                self.trouble = ""
            except OSError as error:
                self._lag(piece.segment, error)
        self._at("after text")

    def _append(self, piece: _AppendedLines) -> None:
        if piece.opened < 0:
            raise OSError("it cannot be opened")
        try:
            written = os.write(piece.opened, piece.text)
        finally:
            os.close(piece.opened)
        if written != len(piece.text):
            raise OSError(f"{written} of {len(piece.text)} bytes were written")

    def _lag(self, segment: LogSegment, error: OSError) -> None:
        self._behind.add(segment.number)
        if not self.trouble:
            _log.warning("%s could not be written and is completed later: %s", segment.name, error)
        self.trouble = f"{self.folder / segment.name} cannot be written: {error}"

    def drop(self, pieces: Iterable[_AppendedLines]) -> None:
        """The database could not take the lines: forget the plan."""
        for piece in pieces:
            if piece.opened >= 0:
                os.close(piece.opened)
            if piece.segment.number not in self._segments:
                (self.folder / piece.segment.name).unlink(missing_ok=True)
                self._next = min(self._next, piece.segment.number)

    # ------------------------------------------------------------------------------------------------ its bound

    def complete(self) -> None:
        """Write what the files lack, those that nobody appends to now included."""
        for number in list(self._behind):
            segment = self._segments.get(number)
            if segment is None:
                self._behind.discard(number)
                continue
            try:
                if not self._complete(segment) and self._open.get(segment.run) == segment:
                    del self._open[segment.run]
                self.trouble = ""
            except OSError as error:
                self._lag(segment, error)

    def settle(self) -> None:
        """Have all text on disk, so that nothing has to be completed at the next start."""
        for segment in self._open.values():
            if segment.number in self._touched:
                self._settle(segment)

    def oldest(self) -> LogSegment | None:
        """The segment that has to go, when all together are more than they may be."""
        if sum(segment.bytes for segment in self._segments.values()) <= self._byte_limit:
            return None
        if len(self._segments) < 2:
            return None
        oldest = self._segments[min(self._segments)]
        if self._open.get(oldest.run, oldest).number == oldest.number:
            self._open.pop(oldest.run, None)  # nothing is appended to it any more
        return oldest

    def forget(self, segment: LogSegment) -> None:
        """The database has none of its lines any more: remove the file."""
        self._behind.discard(segment.number)
        (self.folder / segment.name).unlink(missing_ok=True)
