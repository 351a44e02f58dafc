"""The thread that saves: one group after the other, and the next one gathers meanwhile.

wake() ──▶ collect() ──▶ save ──▶ done() ──▶ trim        until there is nothing more to collect
│ the disk is full, or read-only, or busy: delayed(), and again in 0.5 s
└ anything else: failed(), for good

`DatabaseBackups` keeps a copy of the database without log lines, made now and then, and the one before it.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from memoire._core import Condition, Held
from memoire.accounting.runs import SavedGroup
from memoire.errors import StateError, StateLost
from memoire.replay.files import drafting

from .database import DatabaseReader, healing, is_busy, words
from .files import mode_in

_log = logging.getLogger(__name__)

RETRY_INTERVAL: Final = 0.5
"""Seconds between two tries while nothing can be written."""
SAVE_DELAY: Final = 0.2
"""Seconds within which something is saved that nobody waits for."""


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
            with drafting(first, mode=mode_in(self._folder)) as draft:
                self._reader.copy_to(draft)
                self._at("before backups")
                if first.exists():
                    first.replace(second)
                self._at("between backups")
            self._at("after backups")
            self._backed_up, self.trouble = generation, ""
            return first


class Saver:
    """Saves what `collect` gives it, in a thread of its own.

    Args:
        folder: Named in errors, and tried when SQLite does not say what is wrong.
        save: Has a group on disk when it returns. What it raises of SQLite's and OSError is tried again if it may heal.
        trim: Called after each group; the same.
        look_after: Called when all is saved, at least every `SAVE_DELAY` seconds: for what nobody waits for.
    """

    def __init__(
        self,
        folder: Path,
        save: Callable[[SavedGroup], None],
        trim: Callable[[], None],
        look_after: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._save_group, self._trim, self._look_after = save, trim, look_after
        self._wanted = Condition()
        self._is_wanted = self._closing = False  # under that lock
        self._give_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._full_since = 0.0
        self._trouble: tuple[str, str] | None = None
        """What is wrong with the disk while saving waits, and what to do; replaced as a whole."""
        self._lost: StateLost | None = None
        self.unsaved = False
        """Whether something was collected and could not be saved."""

    def start(
        self,
        name: str,
        collect: Callable[[], SavedGroup | None],
        done: Callable[[SavedGroup], None],
        failed: Callable[[StateLost], None],
        delayed: Callable[[], None],
    ) -> None:
        """Begin, in a thread of this name; see `Store.start`."""
        self._collect, self._done, self._failed, self._delayed = collect, done, failed, delayed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Somebody waits for what changed. From any thread."""
        with self._wanted.held():
            self._is_wanted = True
            self._wanted.notify_all()

    @property
    def is_healthy(self) -> bool:
        """Whether what is collected is saved without delay."""
        return self._lost is None and self._trouble is None

    @property
    def trouble(self) -> str:
        """Why nothing is saved now, for people; empty while it is."""
        if self._lost is not None:
            return str(self._lost)
        if (trouble := self._trouble) is not None:
            (why, advice), seconds = trouble, time.monotonic() - self._full_since
            found = f"{why} since {seconds:.0f} s ({self._folder}): nothing is acknowledged until it is saved"
            return f"{found}. {advice}, and it goes on by itself"
        return ""

    def close(self, timeout: float) -> bool:
        """Save what is left; False when the thread has not ended in time. The last fifth of it is without new tries."""
        deadline = time.monotonic() + timeout
        with self._wanted.held():
            self._closing = True
            self._wanted.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(max(0.0, 0.8 * timeout))
        self._give_up.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    # Inside of the thread

    def _run(self) -> None:
        try:
            while True:
                closing = self._wait()
                if not self._save_all():
                    self.unsaved = True
                    return
                self._try(self._look_after)
                if closing:
                    return
        except Exception as error:
            _log.exception("%s: the state cannot be saved any more", self._folder)
            self._lost = error if isinstance(error, StateLost) else StateLost(str(self._folder), words(error))
            self.unsaved = True
            self._failed(self._lost)

    def _wait(self) -> bool:
        """Wait until something is to be saved; True when the store is being closed."""
        with self._wanted.held():
            if not (self._is_wanted or self._closing):
                self._wanted.wait(SAVE_DELAY)
            self._is_wanted = False
            return self._closing

    def _save_all(self) -> bool:
        """Save until nothing more is to be collected; False when there was no room until the store was closed."""
        while (group := self._collect()) is not None:
            if not (group.is_empty or self._save(group)):
                return False
            self._acknowledge(group)
            self._try(self._trim)
        return True

    def _try(self, work: Callable[[], None]) -> None:
        """Do what can wait: while the disk is full it is tried again the next time."""
        try:
            work()
        except sqlite3.Error as error:
            if self._passing_trouble(error) is None:
                raise

    def _acknowledge(self, group: SavedGroup) -> None:
        try:
            self._done(group)
        except Exception:
            _log.exception("%s: what was saved could not be acknowledged; whoever asked asks again", self._folder)

    def _save(self, group: SavedGroup) -> bool:
        """Have the group on disk; False when there was no room until the store was closed."""
        while True:
            try:
                self._save_group(group)
            except (sqlite3.Error, OSError) as error:
                if not self._may_heal(error):
                    raise StateLost(str(self._folder), words(error)) from error
                if self._give_up.wait(RETRY_INTERVAL):
                    return False
            else:
                if self._trouble is not None:
                    _log.warning("%s: saving goes on", self._folder)
                self._trouble = None
                return True

    def _may_heal(self, error: Exception) -> bool:
        """Whether it is tried again. Says what is wrong from then on."""
        trouble = self._passing_trouble(error)
        if trouble is None:
            return False
        is_new = self._trouble is None
        if is_new:
            self._full_since = time.monotonic()
        self._trouble = trouble
        if is_new:
            _log.warning("%s: %s; nothing is acknowledged until it can be saved (%s)", self._folder, trouble[0], error)
            self._delayed()
        return True

    def _passing_trouble(self, error: Exception) -> tuple[str, str] | None:
        """What is wrong and what to do about it; None if it does not end by itself."""
        if is_busy(error):
            return "another program holds the database", "Close that program"
        trouble = healing(self._folder, error)
        return None if trouble is None else (f"the {trouble[0]}", trouble[1])
