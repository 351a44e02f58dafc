"""Text files of log lines, for people and their tools: a line for each entry, in the documented form, rotated by size.

The lines are in the database first; the files are copies. The files are not synced at each write, and a file that a
crash has cut short is completed from the database. If another program renames, shortens or edits a file (logrotate
does), the file stays as it is, and later lines go to a new one.

    log/ant-7.00000001.log      log/ant-7.00000002.log      log/ant-8.00000003.log

`LineFile` is one file with the lines of all clients, written through a buffer that its owner flushes. A full disk loses
lines, but does not end the server.
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
"""Number of files that the text is split into: when a new one begins, the oldest may be removed."""
_NAME = re.compile(r".*\.(\d{8})\.log")


LOG_FLUSH_INTERVAL = 1.0
"""Most seconds until a written line is in the log file."""
MODES = ("a", "w", "x", "a+", "w+", "ab", "wb", "at", "wt")


class LineFile:
    """Text file of the log lines that a server receives; `open` names it. Thread-safe.

    UTF-8, line feeds unchanged. Lines that cannot be written are lost; the program's log reports the error.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        """Path of the file; None before `open`."""
        self._lock = threading.Lock()  # guards the attributes below
        self._file: IO[str] | None = None
        self._flush_at = float("inf")

    def open(self, path: str | Path, mode: str) -> None:
        """Open a file for all later lines; the former file is closed.

        Args:
            path: Path of the file, whose folder must exist.
            mode: Mode of fopen: "a" appends, "w" empties the file, "x" raises FileExistsError if the file exists.

        Raises:
            ParameterError: the mode is unknown.
            OSError: the file cannot be opened.
        """
        if mode not in MODES:
            raise ParameterError("mode", mode, f"one of {', '.join(map(repr, MODES))}")
        full_path = Path(path).absolute()
        file = full_path.open(mode.replace("b", "").replace("t", ""), encoding="utf-8", newline="", buffering=1 << 16)
        self._replace(file, str(full_path))

    def write(self, lines: Iterable[LogEntry]) -> None:
        """Write lines, which are flushed within `LOG_FLUSH_INTERVAL` seconds."""
        with Held(self._lock):
            if self._file is not None:
                self._flush_at = min(self._flush_at, time.monotonic() + LOG_FLUSH_INTERVAL)
                self._try(self._file.writelines, map(_line_of, lines))

    def next_time(self) -> float:
        """Return the time when `tick` has something to do."""
        return self._flush_at

    def tick(self, now: float) -> None:
        """Flush the buffer if its oldest line is `LOG_FLUSH_INTERVAL` seconds old."""
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
    """Return the bytes of a line in the file."""
    return _line_of(entry).encode()


def _is_torn_copy(content: bytes, expected: bytes) -> bool:
    """Return True if the content is a prefix of the expected text, with zeros in places after a power failure."""
    if len(content) > len(expected):
        return not content[len(expected) :].strip(b"\x00") and _is_torn_copy(content[: len(expected)], expected)
    actual, wanted = np.frombuffer(content, np.uint8), np.frombuffer(expected, np.uint8, len(content))
    return bool(((actual == wanted) | (actual == 0)).all())


def _common_prefix(content: bytes, expected: bytes) -> int:
    most = min(len(content), len(expected))
    differs = np.frombuffer(content, np.uint8, most) != np.frombuffer(expected, np.uint8, most)
    return int(differs.argmax()) if differs.any() else most


@dataclass(slots=True)
class _AppendedLines:
    """Text to append to one file, which is opened before the database has the lines, so that no rename matters."""

    opened: int
    """File descriptor; -1 if the file cannot be written now, and is completed later."""
    segment: LogSegment
    text: bytes


class LineLog:
    """Text files of the log lines in a folder. One thread writes.

    Args:
        folder: Folder of the files; made if missing.
        segments: Segments that the database has, by number.
        byte_limit: Most bytes of all files together.
        lines_of: Returns the lines of a segment, from the database.
        at: Called at named points, so that a test may end the process there.
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
        self._open: dict[int, LogSegment] = {}  # newest segment of each run, which further lines go to
        self._behind: set[int] = set()  # numbers of segments whose text is missing in part or completely
        self._touched: set[int] = set()  # numbers of segments that were appended to
        self.trouble = ""
        """Reason why the text is behind the database; "" if it is not."""
        make_folder(folder)
        numbers = [int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        self._next = max([0, *numbers, *segments]) + 1

    def recover(self, *, was_clean: bool) -> None:
        """Remove files whose lines have left the database, and plan to complete files after a crash."""
        known = {segment.name for segment in self._segments.values()}
        oldest = min(self._segments, default=self._next)
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.name not in known and int(match[1]) < oldest:
                path.unlink(missing_ok=True)  # the run's lines have left the database
        for segment in sorted(self._segments.values(), key=lambda segment: segment.number):
            self._open[segment.run] = segment
        if not was_clean:
            self._behind = {segment.number for segment in self._open.values()}

    # ------------------------------------------------------------------------------------------------ appending

    def plan(self, lines: list[tuple[int, LogEntry]], name_of: Callable[[int], str]) -> list[_AppendedLines]:
        """Open the files for new lines (number of the run, entry), and return the text to append with new segments.

        The caller saves the segments, and then calls `finish`, or `abandon_append` after a failure.
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
        """Sync a file that is complete: only the newest file of a run is completed after a crash."""
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
        """Return a descriptor at the end of the segment's file; -1 if it cannot be written, None if it was changed."""
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
        """Append the missing text to the segment's file; False (and no change) if its content is not the segment's."""
        expected = b"".join(text_of(entry) for entry in self._lines_of(segment))
        path = self.folder / segment.name
        content = path.read_bytes() if path.exists() else b""
        if not _is_torn_copy(content, expected) or len(expected) != segment.bytes:
            _log.warning("%s was changed by another program: the log goes on in a new file", path)
            self._behind.discard(segment.number)
            return False
        make_folder(self.folder)
        same = _common_prefix(content, expected)
        self._touched.add(segment.number)
        with open(append(path), "ab") as file:
            file.truncate(same)
            file.write(expected[same:])
        self._behind.discard(segment.number)
        return True

    def finish(self, pieces: list[_AppendedLines]) -> None:
        """Append the text, after the database has the lines. Text that cannot be written is completed later."""
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
            raise OSError("the file cannot be opened")
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

    def abandon_append(self, pieces: Iterable[_AppendedLines]) -> None:
        """Close the files of a plan, after the database could not save the lines."""
        for piece in pieces:
            if piece.opened >= 0:
                os.close(piece.opened)
            if piece.segment.number not in self._segments:
                (self.folder / piece.segment.name).unlink(missing_ok=True)
                self._next = min(self._next, piece.segment.number)

    # ------------------------------------------------------------------------------------------------ repair, limit

    def complete(self) -> None:
        """Append missing text to all files that are behind the database."""
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

    def sync_text(self) -> None:
        """Sync all text, so that the next start has nothing to complete."""
        for segment in self._open.values():
            if segment.number in self._touched:
                self._settle(segment)

    def segment_to_remove(self) -> LogSegment | None:
        """Return the oldest segment if it has to be removed, since all together exceed the limit; else None."""
        if sum(segment.bytes for segment in self._segments.values()) <= self._byte_limit:
            return None
        if len(self._segments) < 2:
            return None
        oldest = self._segments[min(self._segments)]
        if self._open.get(oldest.run, oldest).number == oldest.number:
            self._open.pop(oldest.run, None)  # later lines of the run go to a new file
        return oldest

    def forget(self, segment: LogSegment) -> None:
        """Remove a segment's file, after its lines have left the database."""
        self._behind.discard(segment.number)
        (self.folder / segment.name).unlink(missing_ok=True)
