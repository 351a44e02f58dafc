"""Backups of a state folder: a copy of the database without log lines, now and then, and the one before it."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from memoire.errors import StateError
from memoire.replay.episode_store import Held
from memoire.replay.replacement import drafting

from . import private_files
from .database_reader import DatabaseReader
from .disk_errors import words

_log = logging.getLogger(__name__)


class DatabaseBackups:
    """`state.db.backup-1` and `-2` of a folder. Thread-safe: one backup is made at a time.

    Args:
        folder: Where they are.
        reader: Of the database.
        generation: Transactions that the database has had; while there are no more than at the last backup, none is
            made.
        every: Seconds between two of them.
        at: Called at named points, so that a test may end the process there.
    """

    def __init__(
        self,
        folder: Path,
        reader: DatabaseReader,
        generation: Callable[[], int],
        *,
        every: float,
        at: Callable[[str], None],
    ) -> None:
        self._folder, self._reader, self._generation = folder, reader, generation
        self._every, self._at = every, at
        self._making = threading.Lock()
        self._due = time.monotonic() + every
        self._backed_up = generation()  # of the newest backup, or when the folder was opened
        self.trouble = ""
        """Why the last one could not be made; empty when it was."""

    @property
    def is_behind(self) -> bool:
        """Whether something was saved since the last backup."""
        return self._backed_up != self._generation()

    def begin_due(self) -> None:
        """Make one in a thread of its own, if it is time and something was saved."""
        now = time.monotonic()
        if not self.is_behind or now < self._due or self._making.locked():
            return
        self._due = now + self._every
        threading.Thread(target=self.attempt, name="memoire-backup", daemon=True).start()

    def attempt(self) -> None:
        """Make one, or say in the log and in `trouble` why not."""
        try:
            self.make()
        except StateError as error:
            self.trouble = str(error)
            _log.error("%s: no backup was made, the former ones stay: %s", self._folder, error)
        except (OSError, sqlite3.Error, ValueError) as error:
            self.trouble = f"no backup could be made: {words(error)}"
            _log.warning("%s: %s", self._folder, self.trouble)

    def make(self) -> Path:
        """Make one, `state.db.backup-1`; the one before becomes `-2`.

        Raises:
            StateCorrupt: the database has become damaged while it was open: the former backups stay.
        """
        with Held(self._making):
            generation = self._generation()
            first, second = (self._folder / f"state.db.backup-{number}" for number in (1, 2))
            with drafting(first, mode=private_files.mode_in(self._folder)) as draft:
                self._reader.copy_to(draft)
                self._at("before backups")
                if first.exists():
                    first.replace(second)
                self._at("between backups")
            self._at("after backups")
            self._backed_up, self.trouble = generation, ""
            return first
