"""The log of all clients as a file: appended to through a buffer, flushed by whoever owns it.

A disk that is full or a file that cannot be opened must not end a server: lines that could not be written are counted.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import IO

from memoire.errors import ParameterError
from memoire.replay.episode_store import Held

_log = logging.getLogger(__name__)

MODES = ("a", "w", "x", "a+", "w+", "ab", "wb", "at", "wt")


class LogFile:
    """A text file of lines. Thread-safe.

    Args:
        path: Made when it is not there; its folder must be.
        mode: As of fopen: "a" goes on, "w" begins anew, "x" refuses a file that is there. UTF-8, line feeds as they
        are.
    """

    def __init__(self, path: str | Path, mode: str = "a") -> None:
        if mode not in MODES:
            raise ParameterError("mode", mode, f"one of {', '.join(map(repr, MODES))}")
        self.path = Path(path).absolute()
        self.failed = 0
        """Lines that could not be written."""
        self._lock = threading.Lock()
        opened = mode.replace("b", "").replace("t", "")
        self._file: IO[str] | None = self.path.open(opened, encoding="utf-8", newline="", buffering=1 << 16)
        self._is_dirty = False

    def write(self, lines: list[str]) -> None:
        """Append lines, each with its line break; they are on disk after `flush`."""
        with Held(self._lock):
            if self._file is None:
                self.failed += len(lines)
                return
            try:
                self._file.writelines(lines)
                self._is_dirty = True
            except OSError:
                self.failed += len(lines)
                _log.exception("%d lines could not be written to %s", len(lines), self.path)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        with Held(self._lock):
            if self._file is not None and self._is_dirty:
                self._is_dirty = False
                try:
                    self._file.flush()
                except OSError:
                    _log.exception("%s could not be flushed", self.path)

    def close(self) -> None:
        """Flush and close; later lines are counted as failed."""
        self.flush()
        with Held(self._lock):
            file, self._file = self._file, None
            if file is not None:
                try:
                    file.close()
                except OSError:
                    _log.exception("%s could not be closed", self.path)
