"""The files of a server: what it has counted and taken is on disk before anybody is told so.

    state/  state.db            everything that counts, in SQLite: write-ahead log, each transaction synced
            state.db.backup-1   a copy without log lines, made now and then; -2 is the one before
            lock, committed     which process writes; how many transactions there must be
            log/  models/       text of log lines for people; bodies of models that are too large for the database
            rows/               large bodies of what tables save as it happens (`table_rows.py`)
            memory.snapshot, snapshots/     what the server held, if asked for (`snapshot.py`)

One thread writes. While it saves one group, the next one gathers (`journal`), so that three hundred clients
cost one sync of the disk and not three hundred; `done` is called when a group is on disk. A full disk delays: the group
is tried again until there is room. A disk that fails ends it: after an error of a sync nobody knows what is on disk,
and trying again would say yes to what may be lost.

What it says of its runs, their accounts and their log lines is read beside the writer, from any thread; what is asked
for often is in memory (`records.StateContents`).

The thread that saves: one group after the other, and the next one gathers meanwhile.

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
from .database import DatabaseBackups, as_saved, healing, is_busy, words
from .files import bytes_in
from .opening import OpenFolder
from .records import LAST, META, SETTING, condition

_log = logging.getLogger(__name__)

DISK_CHECK_INTERVAL: Final = 5.0
"""Seconds between two looks at how large the files are."""
REPAIR_INTERVAL: Final = 1.0
"""Seconds between two tries to complete the log's text."""
_EVERY: Final = LineFilter()

_left_alone: list[object] = []  # in a forked child: never closed there
_stores: weakref.WeakSet[Store] = weakref.WeakSet()


RETRY_INTERVAL: Final = 0.5
"""Seconds between two tries while nothing can be written."""
SAVE_DELAY: Final = 0.2
"""Seconds within which something is saved that nobody waits for."""


class _RunReader:
    """Reads the accounts of one run, which may be one that is not saved yet."""

    def __init__(self, store: Store, path: Path, run: str) -> None:
        self._store, self._path, self._run = store, path, run

    def body(self, key: bytes) -> bytes | None:
        """Body of the account with this key."""
        return next((body for _, body in self.after(key, 1, key + b"\0")), None)

    def after(self, key: bytes, most: int, before: bytes = LAST) -> list[Packed]:
        """At most so many accounts from this key on, ascending, whose keys are below `before`."""
        return self._store.packed_accounts(self._run, key, most, before)

    def reading(self) -> AbstractContextManager[None]:
        """Within it, what cannot have been saved is StateCorrupt."""
        return as_saved(self._path)


def _nothing(point: str) -> None:
    """No fault here."""


class Store(ClosingContext):
    """A state folder, opened, locked, checked and ready to go on. Thread-safe.

    Args:
        folder: Made when it is not there (its parent must be).
        name: The server's. None: the one that the folder has, `default_name` when it is new.
        limits: `log_bytes` and `backup_every`.
        clock: Seconds since 1970.
        at: Called with the name of each point between two steps, so that a test can end the process there.

    Raises:
        StateLocked: another server has it open.
        StateUnusable: it cannot be written, is no folder, or is on a network file system.
        StateForeign: it is of another server, program or a newer version.
        StateCorrupt: it is damaged; the text says what to do. Nothing is ever reset without being asked.
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
        """The server's; its epoch grows at each start, and was on disk before anybody heard of it."""
        self.since = opened.since
        """The epoch since which the folder has forgotten nothing: accounts that are opened in it say that one."""
        self.restored = opened.restored
        """How often a backup was put back into this folder."""
        self.missing = opened.models.missing
        """What was not there, or not whole, when it was opened, a sentence each: the log has them, too."""
        self._file, self._lines, self._models = opened.file, opened.lines, opened.models
        self._rows = opened.rows
        self.rows = opened.rows.rows
        """Kind, key and body of each row that a table has saved, by its name. Before `start`."""
        self._contents, self._reader = opened.file.contents, opened.reader
        self._backups = DatabaseBackups(
            self.folder, opened.reader, lambda: self._file.seal.generation, every=limits.tuning.backup_every, at=at
        )
        self._wanted = Condition()
        self._is_wanted = self._closing = False  # under that lock
        self._give_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._full_since = 0.0
        self._trouble: tuple[str, str] | None = None
        """What is wrong with the disk while saving waits, and what to do; replaced as a whole."""
        self._lost: StateLost | None = None
        self._unsaved = self._closed = False
        """Whether something was collected and could not be saved; whether it was closed."""
        self._size = float("-inf"), 0  # when the files were looked at, and their bytes
        self._mend_due = 0.0
        _stores.add(self)

    # ------------------------------------------------------------------------------------------------ what is there

    def runs(self) -> list[RunFacts]:
        """All runs, in the order in which they began; the one that is counted has not ended."""
        numbers = self._contents.runs
        return sorted(dict(self._contents.facts_of).values(), key=lambda facts: numbers[facts.name])

    def settings(self) -> dict[str, str]:
        """Texts that were saved, by name."""
        with as_saved(self._opened.path):
            self._check_open()
            return {key.decode(): body.decode() for key, body in self._reader.facts(SETTING)}

    def accounts(self, run: str) -> StoredAccounts:
        """The accounts of a run, of other servers too; each is read when it is asked for."""
        return StoredAccounts(self._opened.packing, _RunReader(self, self._opened.path, run))

    def packed_accounts(self, run: str, begin: bytes = b"", most: int = 1 << 62, before: bytes = LAST) -> list[Packed]:
        """At most so many accounts of a run as they are on disk, from the key `begin` on and below `before`."""
        self._check_open()
        number = self._contents.runs.get(run)
        return [] if number is None else self._reader.accounts(number, begin, most, before)

    def line_count(self, run: str) -> int:
        """Lines of a run that were ever taken: the index of the newest one."""
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
        """Log lines of a run, at most so many of those wanted, as the log file has them; beside the writer, from any
        thread. An unknown run has none; the oldest come first unless asked otherwise.

        Raises:
            StateCorrupt: one of them is damaged; or any line is, if more than their index is wanted.
        """
        self._check_open()
        number = self._contents.runs.get(run)
        found = None if number is None else condition(number, wanted)
        if found is not None and wanted != LineFilter(after=wanted.after, before=wanted.before):
            self._reader.check_lines()
        return [] if found is None else self._reader.lines(*found, "DESC" if newest_first else "ASC", most)

    def models(self, run: str) -> list[Model]:
        """The newest model of each topic of a run, in the order of topics.

        Raises:
            StateCorrupt: a body is not what was published.
        """
        return self._models.of(self._contents.runs.get(run))

    def versions(self) -> dict[str, int]:
        """The highest version of each topic over all runs: versions never go back."""
        return self._models.versions()

    # ------------------------------------------------------------------------------------------------ saving

    def start(
        self,
        collect: Callable[[], SavedGroup | None],
        done: Callable[[SavedGroup], None],
        failed: Callable[[StateLost], None],
        delayed: Callable[[], None] = lambda: None,
    ) -> None:
        """Save from now on, in a thread of its own.

        Args:
            collect: Returns all that changed since its last call, or None if nothing did.
            done: Called when a group is on disk, or at once for a group that has only tickets.
            failed: Called once, when nothing can be saved any more.
            delayed: Called each time when saving has to wait for room: `trouble` says why. It goes on by itself.
        """
        self._check_open()
        self._collect, self._done, self._failed, self._delayed = collect, done, failed, delayed
        self._thread = threading.Thread(target=self._run, name=f"memoire-store-{self.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Somebody waits for what changed. What nobody waits for is collected within 0.2 s. From any thread."""
        with self._wanted.held():
            self._is_wanted = True
            self._wanted.notify_all()

    def save(self, group: SavedGroup) -> None:
        """Have a group on disk when this returns, in one transaction. Only its thread calls it once it was started.

        Raises:
            sqlite3.Error, OSError: nothing of it was saved.
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
        facts += [*model_facts, *(piece.segment.fact for piece in pieces)]
        accounts = records.pack_accounts(group, runs, self._opened.packing, file.account)
        try:
            rows = self._rows.write(group.rows)
            former = file.save(facts, lines, accounts, rows.rows)
        except BaseException:
            self._lines.drop(pieces)
            raise
        self._opened.testify()
        self._lines.finish(pieces)
        self._models.replace(written)
        self._rows.replace(rows, former)

    def _trim(self) -> None:
        """Let the oldest text go where there is too much."""
        oldest = self._lines.oldest()
        if oldest is None:
            return
        is_over = self._file.trim(oldest)
        self._opened.testify()
        if is_over:
            self._at("before forgetting")
            self._lines.forget(oldest)

    def _look_after(self) -> None:
        """What nobody waits for: larger files of rows than needed, text that is behind, a backup now and then."""
        if self._rows.is_sparse:
            self.save(SavedGroup())
        now = time.monotonic()
        if self._lines.trouble and now >= self._mend_due:
            self._mend_due = now + REPAIR_INTERVAL
            self._lines.complete()
        self._backups.begin_due()

    def back_up(self) -> Path:
        """Write a backup of everything but log lines, `state.db.backup-1`; the one before becomes `-2`.

        Raises:
            StateCorrupt: the database has become damaged while it was open: the former backups stay.
        """
        return self._backups.make()

    # ------------------------------------------------------------------------------------------------ its thread

    def _run(self) -> None:
        try:
            while True:
                closing = self._wait()
                if not self._save_all():
                    self._unsaved = True
                    return
                self._try(self._look_after)
                if closing:
                    return
        except Exception as error:
            _log.exception("%s: the state cannot be saved any more", self.folder)
            self._lost = error if isinstance(error, StateLost) else StateLost(str(self.folder), words(error))
            self._unsaved = True
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
            _log.exception("%s: what was saved could not be acknowledged; whoever asked asks again", self.folder)

    def _save(self, group: SavedGroup) -> bool:
        """Have the group on disk; False when there was no room until the store was closed."""
        while True:
            try:
                self.save(group)
            except (sqlite3.Error, OSError) as error:
                if not self._may_heal(error):
                    raise StateLost(str(self.folder), words(error)) from error
                if self._give_up.wait(RETRY_INTERVAL):
                    return False
            else:
                if self._trouble is not None:
                    _log.warning("%s: saving goes on", self.folder)
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
            _log.warning("%s: %s; nothing is acknowledged until it can be saved (%s)", self.folder, trouble[0], error)
            self._delayed()
        return True

    def _passing_trouble(self, error: Exception) -> tuple[str, str] | None:
        """What is wrong and what to do about it; None if it does not end by itself."""
        if is_busy(error):
            return "another program holds the database", "Close that program"
        trouble = healing(self.folder, error)
        return None if trouble is None else (f"the {trouble[0]}", trouble[1])

    # ------------------------------------------------------------------------------------------------ its state

    @property
    def is_healthy(self) -> bool:
        """Whether what is given to it is saved without delay."""
        return self._lost is None and self._trouble is None and not self._closed

    @property
    def trouble(self) -> str:
        """What is wrong with the disk now, for people; empty when nothing is."""
        if self._lost is not None:
            return str(self._lost)
        if (trouble := self._trouble) is not None:
            (why, advice), seconds = trouble, time.monotonic() - self._full_since
            found = f"{why} since {seconds:.0f} s ({self.folder}): nothing is acknowledged until it is saved"
            return f"{found}. {advice}, and it goes on by itself"
        return self._lines.trouble or self._backups.trouble

    def space(self) -> FolderStats:
        """What the folder takes, looked at every `DISK_CHECK_INTERVAL` seconds, and what is left."""
        now, (looked_at, size) = time.monotonic(), self._size
        if now > looked_at + DISK_CHECK_INTERVAL:
            size = bytes_in(self.folder)
            self._size = now, size
        free = os.statvfs(self.folder)
        return FolderStats(size, free.f_bavail * free.f_frsize, free.f_blocks * free.f_frsize, self.trouble)

    # ------------------------------------------------------------------------------------------------ closing

    def close(self, timeout: float = 10.0) -> bool:
        """Save what is left, back up, and let go of the folder; True when everything was saved in time.

        Whatever was not saved was not acknowledged either.
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

    def _finish(self) -> None:
        """Leave the folder so that the next start has nothing to mend."""
        try:
            self._lines.complete()
            self._lines.settle()
            if self._lines.trouble == "":
                self._file.save([(META, b"clean", b"\x01")], [])
                self._opened.testify()
            if self._backups.is_behind:
                self._backups.attempt()
            self._at("before checkpoint")
            self._file.checkpoint()
            self._at("after checkpoint")
        except (sqlite3.Error, OSError) as error:
            _log.warning("%s: everything is saved, but the folder was not put in order: %s", self.folder, error)

    def _forget_in_child(self) -> None:
        _left_alone.append(self._opened)
        self._closed = True
        self._opened.forget_in_child()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the state folder {self.folder}")


def _after_fork() -> None:
    for store in list(_stores):
        store._forget_in_child()


os.register_at_fork(after_in_child=_after_fork)
