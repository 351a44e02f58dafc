"""State folder of a server: saves its counts, models and log lines on disk before they are acknowledged.

    state/  state.db            all counts, in SQLite: write-ahead log, each transaction synced
            state.db.backup-1   a copy without log lines, made from time to time; -2 is the one before
            lock, committed     the process that writes; the number of transactions that state.db must contain
            log/  models/       text of log lines for people; bodies of models that are too large for the database
            rows/               large bodies of rows that tables save at each change (`table_rows.py`)
            memory.snapshot, snapshots/     contents of the server's tables, if asked for (`snapshots.py`)

One thread writes. While it saves one group of changes, the next group is collected, so that three hundred clients cost
one sync of the disk instead of three hundred; `done` is called when a group is on disk. A full disk delays saving: the
group is tried again until there is room. A failing disk ends it: after an error of a sync the contents of the disk are
unknown, and a second try could acknowledge changes that are lost.

Runs, accounts and log lines are read beside the writer, from any thread; contents that are read often are in memory
(`records.StateContents`).

The thread that saves:

    wake() ──▶ collect() ──▶ save ──▶ done() ──▶ trim        until there is nothing more to collect
                              │ the disk is full, or read-only, or busy: delayed(), and again in 0.5 s
                              └ anything else: failed(), for good
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from memoire._core import Condition
from memoire.accounting.packing import Packed, StoredAccounts
from memoire.accounting.runs import FolderStats, LineFilter, LogEntry, RunFacts, SavedGroup
from memoire.arguments import ClosingContext
from memoire.errors import Closed, StateLost
from memoire.limits import Limits, wall_clock
from memoire.models.model import Model

from . import records
from .database import DatabaseBackups, corrupt_on_bad_values, error_text, is_busy, recoverable_problem
from .files import bytes_in
from .opening import OpenFolder
from .records import LAST, META, SETTING, condition

_log = logging.getLogger(__name__)

DISK_CHECK_INTERVAL: Final = 5.0
"""Seconds between two measurements of the files' sizes."""
REPAIR_INTERVAL: Final = 1.0
"""Seconds between two attempts to complete the log's text."""
_EVERY: Final = LineFilter()

_kept_open: list[object] = []  # a forked child holds the parent's folders and never closes them
_stores: weakref.WeakSet[Store] = weakref.WeakSet()


RETRY_INTERVAL: Final = 0.5
"""Seconds between two attempts to save while nothing can be written."""
SAVE_DELAY: Final = 0.2
"""Most seconds until changes are saved that no call waits for."""


class _RunReader:
    """Reader of the accounts of one run, which may not be saved yet."""

    def __init__(self, store: Store, path: Path, run: str) -> None:
        self._store, self._path, self._run = store, path, run

    def body(self, key: bytes) -> bytes | None:
        """Return the body of the account with this key; None if there is none."""
        return next((body for _, body in self.accounts_after(key, 1, key + b"\0")), None)

    def accounts_after(self, key: bytes, most: int, before: bytes = LAST) -> list[Packed]:
        """Return at most `most` accounts, in the order of keys, from `key` on and below `before`."""
        return self._store.packed_accounts(self._run, key, most, before)

    def add_file_to_errors(self) -> AbstractContextManager[None]:
        """Return a context in which impossible values raise StateCorrupt: see `corrupt_on_bad_values`."""
        return corrupt_on_bad_values(self._path)


def _nothing(point: str) -> None:
    """Do nothing at a named point: the default outside of tests."""


class Store(ClosingContext):
    """Open state folder of a server: locked and checked; `start` saves changes in a thread. Thread-safe.

    Args:
        folder: Path of the folder; made if missing, but its parent must exist.
        name: Name of the server; None takes the name stored in the folder, or `default_name` if the folder is new.
        limits: Limits, of which `log_bytes` and `backup_every` are used.
        clock: Returns seconds since 1970.
        at: Called with the name of each point between two steps, so that a test can end the process there.

    Raises:
        StateLocked: another server has the folder open.
        StateUnusable: the folder cannot be written, is not a folder, or is on a network file system.
        StateForeign: the folder belongs to another server, another program or a newer version.
        StateCorrupt: the folder is damaged; the text says what to do. The folder is never reset by itself.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str | None = None,
        *,
        default_name: str = "",
        limits: Limits | None = None,
        clock: Callable[[], float] = wall_clock,
        at: Callable[[str], None] = _nothing,
    ) -> None:
        self.folder = Path(folder).absolute()  # a program may leave the folder that it is in
        limits, self._at, self._pid = limits or Limits(), at, os.getpid()
        self._opened = opened = OpenFolder(self.folder, name, default_name, limits, clock, at)
        self.name, self.epoch = opened.name, opened.epoch
        """Name and epoch of the server. The epoch grows at each start, and is on disk before a client receives it."""
        self.complete_since = opened.since
        """Epoch since which the folder has lost nothing; new accounts carry it as their `since`."""
        self.restored = opened.restored
        """Number of times that a backup was restored in this folder."""
        self.missing = opened.models.missing
        """Models whose files were missing when the folder was opened, a sentence each; they are logged, too."""
        self._file, self._lines, self._models = opened.file, opened.lines, opened.models
        self._rows = opened.rows
        self.rows = opened.rows.rows
        """Function that yields kind, key and body of each saved row of a table, by its name. Call before `start`."""
        self._contents, self._reader = opened.file.contents, opened.reader
        self._backups = DatabaseBackups(
            self.folder, opened.reader, lambda: self._file.seal.generation, every=limits.tuning.backup_every, at=at
        )
        self._wakeup = Condition()
        self._has_wakeup = self._closing = False  # under that lock
        self._give_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._full_since = 0.0
        self._trouble: tuple[str, str] | None = None
        """Problem of the disk while saving waits, and advice; replaced as a whole."""
        self._failure: StateLost | None = None
        self._unsaved = self._closed = False
        """True if a collected group could not be saved; true if the store was closed."""
        self._size = float("-inf"), 0  # time of the newest measurement of the files, and the files' bytes
        self._repair_due = 0.0
        _stores.add(self)

    # ------------------------------------------------------------------------------------------------ reading

    def runs(self) -> list[RunFacts]:
        """Return all runs, in the order in which they began; the present run has not ended."""
        numbers = self._contents.runs
        return sorted(dict(self._contents.facts_of).values(), key=lambda facts: numbers[facts.name])

    def settings(self) -> dict[str, str]:
        """Return saved settings: texts by name."""
        with corrupt_on_bad_values(self._opened.path):
            self._check_open()
            return {key.decode(): body.decode() for key, body in self._reader.facts(SETTING)}

    def accounts(self, run: str) -> StoredAccounts:
        """Return the accounts of a run, those inherited from other servers included; each is read at its first use."""
        return StoredAccounts(self._opened.packing, _RunReader(self, self._opened.path, run))

    def packed_accounts(self, run: str, begin: bytes = b"", most: int = 1 << 62, before: bytes = LAST) -> list[Packed]:
        """Return at most `most` accounts of a run, packed as on disk, with keys from `begin` on and below `before`."""
        self._check_open()
        number = self._contents.runs.get(run)
        return [] if number is None else self._reader.accounts(number, begin, most, before)

    def line_count(self, run: str) -> int:
        """Return the number of lines that a run has ever had, which is the index of the newest one."""
        number = self._contents.runs.get(run)
        return 0 if number is None else self._contents.counts.get(number, 0)

    def search(
        self,
        run: str,
        wanted: LineFilter = _EVERY,
        *,
        most: int = 100,
        newest_first: bool = False,
    ) -> list[LogEntry]:
        """Return log lines of a run that match a filter, at most `most`; [] for an unknown run. Thread-safe, and does
        not wait for the writer.

        Raises:
            StateCorrupt: a returned line is damaged; or any line, if the filter has more than bounds of the index.
        """
        self._check_open()
        number = self._contents.runs.get(run)
        query = None if number is None else condition(number, wanted)
        if query is not None and wanted != LineFilter(after=wanted.after, before=wanted.before):
            self._reader.check_lines()
        return [] if query is None else self._reader.lines(*query, "DESC" if newest_first else "ASC", most)

    def models(self, run: str) -> list[Model]:
        """Return the newest model of each topic of a run, in the order of topics.

        Raises:
            StateCorrupt: a body has another checksum than the published one.
        """
        return self._models.newest_of_run(self._contents.runs.get(run))

    def versions(self) -> dict[str, int]:
        """Return the highest version of each topic over all runs: versions never go back."""
        return self._models.versions()

    # ------------------------------------------------------------------------------------------------ saving

    def start(
        self,
        collect: Callable[[], SavedGroup | None],
        done: Callable[[SavedGroup], None],
        failed: Callable[[StateLost], None],
        delayed: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread that collects and saves changes.

        Args:
            collect: Returns all changes since its last call, or None if there are none.
            done: Called when a group is on disk, or at once for a group that has only tickets.
            failed: Called once, if saving has failed for good.
            delayed: Called each time that saving has to wait for the disk: `trouble` has the reason. Saving goes on
                without a call.
        """
        self._check_open()
        self._collect, self._done, self._failed, self._delayed = collect, done, failed, delayed
        self._thread = threading.Thread(target=self._run, name=f"memoire-store-{self.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Collect and save at once, for a call that waits; else that happens within `SAVE_DELAY`. Thread-safe."""
        with self._wakeup.held():
            self._has_wakeup = True
            self._wakeup.notify_all()

    def save(self, group: SavedGroup) -> None:
        """Save a group in one transaction; it is on disk when this returns. After `start`, only its thread may call it.

        Raises:
            sqlite3.Error, OSError: nothing of the group was saved.
        """
        if group.is_empty and not self._rows.is_sparse:
            return
        file = self._file
        runs = dict(file.contents.runs)
        facts = records.pack_group(group, runs)
        written, model_facts = self._models.write((runs[run], model) for run, model in group.models)
        lines = [(runs[run], entry) for run, entry in group.lines]
        names = {number: run for run, number in runs.items()} if lines else {}
        pieces = self._lines.plan(lines, names.__getitem__)
        facts += [*model_facts, *(piece.segment.row_change for piece in pieces)]
        accounts = records.pack_accounts(group, runs, self._opened.packing, file.account)
        try:
            rows = self._rows.write(group.rows)
            former = file.save(facts, lines, accounts, rows.rows)
        except BaseException:
            self._lines.abandon_append(pieces)
            raise
        self._opened.count_commit()
        self._lines.finish(pieces)
        self._models.replace(written)
        self._rows.remove_replaced_files(rows, former)

    def _trim(self) -> None:
        """Remove the oldest lines, in the database and as text, if the text exceeds its limit."""
        oldest = self._lines.segment_to_remove()
        if oldest is None:
            return
        is_over = self._file.trim(oldest)
        self._opened.count_commit()
        if is_over:
            self._at("before forgetting")
            self._lines.forget(oldest)

    def _maintain(self) -> None:
        """Do work that no call waits for: compact files of rows, complete text that is behind, start a due backup."""
        if self._rows.is_sparse:
            self.save(SavedGroup())
        now = time.monotonic()
        if self._lines.trouble and now >= self._repair_due:
            self._repair_due = now + REPAIR_INTERVAL
            self._lines.complete()
        self._backups.begin_due()

    def back_up(self) -> Path:
        """Write a backup of all but log lines, `state.db.backup-1`, and return its path; the one before becomes `-2`.

        Raises:
            StateCorrupt: the database has become damaged while it was open: the former backups stay.
        """
        return self._backups.make()

    # ------------------------------------------------------------------------------------------------ thread

    def _run(self) -> None:
        try:
            while True:
                closing = self._wait()
                if not self._save_all():
                    self._unsaved = True
                    return
                self._try(self._maintain)
                if closing:
                    return
        except Exception as error:
            _log.exception("%s: the state can no longer be saved", self.folder)
            self._failure = error if isinstance(error, StateLost) else StateLost(str(self.folder), error_text(error))
            self._unsaved = True
            self._failed(self._failure)

    def _wait(self) -> bool:
        """Wait until changes have to be collected; returns True if the store is being closed."""
        with self._wakeup.held():
            if not (self._has_wakeup or self._closing):
                self._wakeup.wait(SAVE_DELAY)
            self._has_wakeup = False
            return self._closing

    def _save_all(self) -> bool:
        """Collect and save groups until there is none; False if the disk had no room until the store was closed."""
        while (group := self._collect()) is not None:
            if not (group.is_empty or self._save(group)):
                return False
            self._acknowledge(group)
            self._try(self._trim)
        return True

    def _try(self, work: Callable[[], None]) -> None:
        """Call a function that may be repeated later; a temporary error of the disk is ignored."""
        try:
            work()
        except sqlite3.Error as error:
            if self._passing_trouble(error) is None:
                raise

    def _acknowledge(self, group: SavedGroup) -> None:
        try:
            self._done(group)
        except Exception:
            _log.exception("%s: saved changes could not be acknowledged; clients will ask again", self.folder)

    def _save(self, group: SavedGroup) -> bool:
        """Save a group, with retries after temporary errors; False if it failed until the store was closed."""
        while True:
            try:
                self.save(group)
            except (sqlite3.Error, OSError) as error:
                if not self._may_heal(error):
                    raise StateLost(str(self.folder), error_text(error)) from error
                if self._give_up.wait(RETRY_INTERVAL):
                    return False
            else:
                if self._trouble is not None:
                    _log.warning("%s: saving goes on", self.folder)
                self._trouble = None
                return True

    def _may_heal(self, error: Exception) -> bool:
        """Return True if saving may be retried after an error; `trouble` then has the reason, which is logged once."""
        trouble = self._passing_trouble(error)
        if trouble is None:
            return False
        is_new = self._trouble is None
        if is_new:
            self._full_since = time.monotonic()
        self._trouble = trouble
        if is_new:
            _log.warning("%s: %s; nothing is acknowledged until saving goes on (%s)", self.folder, trouble[0], error)
            self._delayed()
        return True

    def _passing_trouble(self, error: Exception) -> tuple[str, str] | None:
        """Return problem and advice of a temporary error; None for any other error."""
        if is_busy(error):
            return "another program holds the database", "Close that program"
        trouble = recoverable_problem(self.folder, error)
        return None if trouble is None else (f"the {trouble[0]}", trouble[1])

    # ------------------------------------------------------------------------------------------------ status

    @property
    def is_healthy(self) -> bool:
        """True if changes are saved without delay."""
        return self._failure is None and self._trouble is None and not self._closed

    @property
    def problem(self) -> str:
        """Problem of the disk now, in words; "" if there is none."""
        if self._failure is not None:
            return str(self._failure)
        if (trouble := self._trouble) is not None:
            (cause, advice), seconds = trouble, time.monotonic() - self._full_since
            problem = f"{cause} since {seconds:.0f} s ({self.folder}): nothing is acknowledged until it is saved"
            return f"{problem}. {advice}, and it goes on by itself"
        return self._lines.trouble or self._backups.trouble

    def disk_space(self) -> FolderStats:
        """Return the folder's bytes, measured every few seconds, the disk's free and total bytes, and `trouble`."""
        now, (looked_at, size) = time.monotonic(), self._size
        if now > looked_at + DISK_CHECK_INTERVAL:
            size = bytes_in(self.folder)
            self._size = now, size
        free = os.statvfs(self.folder)
        return FolderStats(size, free.f_bavail * free.f_frsize, free.f_blocks * free.f_frsize, self.problem)

    # ------------------------------------------------------------------------------------------------ closing

    def close(self, timeout: float = 10.0) -> bool:
        """Save the remaining changes, make a backup, and release the folder; True if everything was saved in time.

        Changes that were not saved were not acknowledged either.
        """
        if self._pid != os.getpid() or self._closed:
            return not self._unsaved
        if not self._end(timeout):
            _log.warning("%s: the disk did not answer in time; the folder stays locked", self.folder)
            return False
        self._closed = True
        if not self._unsaved:
            self._finish()
        self._opened.close()
        return not self._unsaved

    def _end(self, timeout: float) -> bool:
        """Let the thread save the rest and end, without retries in the last fifth of the time; False if it has not."""
        deadline = time.monotonic() + timeout
        with self._wakeup.held():
            self._closing = True
            self._wakeup.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(max(0.0, 0.8 * timeout))
        self._give_up.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _finish(self) -> None:
        """Complete the text, mark the folder as clean, and empty the write-ahead log: a start repairs nothing then."""
        try:
            self._lines.complete()
            self._lines.sync_text()
            if self._lines.trouble == "":
                self._file.save([(META, b"clean", b"\x01")], [])
                self._opened.count_commit()
            if self._backups.is_behind:
                self._backups.attempt()
            self._at("before checkpoint")
            self._file.checkpoint()
            self._at("after checkpoint")
        except (sqlite3.Error, OSError) as error:
            _log.warning("%s: everything is saved, but the folder was not closed cleanly: %s", self.folder, error)

    def _forget_in_child(self) -> None:
        _kept_open.append(self._opened)
        self._closed = True
        self._opened.close_lock_in_child()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the state folder {self.folder}")


def _after_fork() -> None:
    for store in list(_stores):
        store._forget_in_child()


os.register_at_fork(after_in_child=_after_fork)
