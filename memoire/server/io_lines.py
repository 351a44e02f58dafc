"""The file that a server writes its clients' log lines to, if it was asked to."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from memoire.accounting.logbook import LogEntry, format_line
from memoire.storage.rotating_log import LogFile

LOG_FLUSH_INTERVAL = 1.0
"""Seconds after which lines are in the log file at the latest."""


class LineFile:
    """Writes to a file the log lines that a server receives. There is no file before `open`. Any thread may call that.

    Only the requests' thread writes and flushes.
    """

    def __init__(self) -> None:
        self._file: LogFile | None = None
        self._flush_at = float("inf")

    @property
    def path(self) -> str | None:
        """Where lines go; None before `open`."""
        return None if self._file is None else str(self._file.path)

    def open(self, path: str | Path, mode: str) -> None:
        """Write to this file from now on; the former one is closed. See `Server.set_logfile`."""
        former, self._file = self._file, LogFile(path, mode)
        if former is not None:
            former.close()

    def write(self, lines: Iterable[LogEntry]) -> None:
        """Write lines, which are flushed within `LOG_FLUSH_INTERVAL` seconds."""
        if self._file is not None:
            self._file.write([format_line(entry.received, entry.line.label, entry.line.text) for entry in lines])
            self._flush_at = min(self._flush_at, time.monotonic() + LOG_FLUSH_INTERVAL)

    def next_time(self) -> float:
        """When `turn` has something to do."""
        return self._flush_at

    def turn(self, now: float) -> None:
        """Flush what was written long enough ago."""
        if now >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Have all lines in the file."""
        self._flush_at = float("inf")
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            self._file.close()
