"""The files of a server: what it has counted and taken is on disk before anybody is told so.

    state/  state.db            everything that counts, in SQLite: write-ahead log, each transaction synced
            state.db.backup-1   a copy without log lines, made now and then; -2 is the one before
            lock, committed     which process writes; how many transactions there must be
            log/  models/       text of log lines for people; bodies of models that are too large for the database
            memory.snapshot, snapshots/     what the server held, if asked for (`archive.py`)

One thread writes. While it saves one group, the next one gathers (`journal.py`), so that three hundred clients cost one
sync of the disk and not three hundred; `done` is called when a group is on disk. A full disk delays: the group is tried
again until there is room. A disk that fails ends it: after an error of a sync nobody knows what is on disk, and trying
again would say yes to what may be lost.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import sqlite3
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import msgspec

from memoire.accounting.journal import Group, RunFacts
from memoire.accounting.kept_accounts import Packed, StoredAccounts
from memoire.accounting.logbook import Entry, Wanted, escape
from memoire.accounting.packing import Packing
from memoire.accounting.runs import FolderStats
from memoire.clock import wall_clock
from memoire.errors import Closed, StateCorrupt, StateError, StateForeign, StateLocked, StateLost, StateUnusable
from memoire.limits import Limits
from memoire.models.model import Model
from memoire.wire import _bytes
from memoire.wire.identity import name_hash

from . import database, private_files
from .database import INDEX_BITS, LAST, META, MODEL, SETTING, Reader, StateFile, StoredModel, as_saved, run_key
from .rotating_log import LineLog

_log = logging.getLogger(__name__)

LOOK_AT_DISK: Final = 5.0
"""Seconds between two looks at how large the files are."""
AGAIN: Final = 0.5
"""Seconds between two tries while the disk is full."""
SOON: Final = 0.2
"""Seconds within which something is saved that nobody waits for."""
MEND: Final = 1.0
"""Seconds between two tries to complete the log's text."""
_EVERY: Final = Wanted()
_LONGEST_TEXT: Final = 4096  # of a search; SQLite takes patterns of 50000 bytes, and a character may become twelve
_INLINE: Final = 16 * 1024  # bytes of a model's body that are stored in the database itself
_WITNESS: Final = struct.Struct("<8sQQ")
_REMOTE: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gfs2", "ocfs2", "glusterfs"}
_LOCAL_FUSE: Final = {"fuseblk", "fuse.fuse-overlayfs"}

_left_alone: list[object] = []  # in a forked child: never closed there
_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _nothing(point: str) -> None:
    """No fault here."""


class Store:
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
        self.folder = Path(folder)
        self._limits = limits or Limits()
        self._clock, self._at = clock, at
        self._pid = os.getpid()
        self._path = self.folder / "state.db"
        _make_folder(self.folder)
        check_file_system(self.folder)
        self._lock_file = _lock(self.folder)
        _tighten(self.folder)
        self._witness = -1
        try:
            self._open(name, default_name)
        except BaseException:
            self._unlock()
            raise
        self._wanted = threading.Condition()
        self._is_wanted = self._closing = False  # under that lock
        self._give_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._unsaved = False
        self._size = float("-inf"), 0  # when the files were looked at, and their bytes
        self._full_since = 0.0
        self._trouble = ""
        self._lost: StateLost | None = None
        self._backing_up = threading.Lock()
        self._backup_due = time.monotonic() + self._limits.backup_every
        self._mend_due = 0.0
        self._backup_trouble = ""
        self._backed_up = self._file.seal.generation
        self.saved_groups = 0
        """Groups that were saved since this store was opened."""
        _stores.add(self)

    # ------------------------------------------------------------------------------------------------ opening

    def _open(self, name: str | None, default_name: str) -> None:
        try:
            if not self._path.exists():
                self._check_empty()
                StateFile.create(self._path, name or default_name, self._at)
            witnessed = self._open_witness()
            self._file = StateFile(self._path, witnessed, at=self._at)
            try:
                with as_saved(self._path):
                    self.name = self._check_name(name, default_name)
                    self._begin(witnessed)
            except BaseException:
                self._file.close()
                raise
        except sqlite3.Error as error:
            raise _translated(error, self.folder, self._path) from error
        except OSError as error:
            raise _unusable(self.folder, error) from error

    def _check_empty(self) -> None:
        """Where there is no database, nothing else of a state folder may be: it has not just been begun."""
        left = sorted(
            path.name
            for path in self.folder.iterdir()
            if path.name.startswith(("state.db.backup-", "committed")) or path.name in ("log", "models")
        )
        if left:
            raise StateCorrupt(
                str(self._path), f"it is missing, while {', '.join(left)} are there", f"{database.RESTORE}."
            )

    def _begin(self, witnessed: int | None) -> None:
        file = self._file
        was_clean = bool(file.number(META, b"clean")) and not file.was_backup
        file.go_live((witnessed or 0) + 1)
        self.restored = file.number(META, b"restored")
        """How often a backup was put back into this folder."""
        if file.was_backup:
            _log.warning("%s: a backup was put back; clients that still run bring their totals up to date", self.folder)
        former = file.number(META, b"epoch")
        self.epoch = max(former + 1, int(self._clock() * 1e9))
        """Grows at each start; on disk before anybody hears of it."""
        self._at("before epoch")
        file.save(
            [
                (META, b"epoch", self.epoch.to_bytes(8, "big")),
                (META, b"clean", b"\x00"),
                (META, b"name", self.name.encode()),
            ],
            [],
        )
        os.ftruncate(self._witness, _WITNESS.size)
        self._write_witness()
        self._lines = LineLog(
            self.folder / "log",
            file.segments,
            byte_limit=self._limits.log_bytes,
            lines_of=file.lines_of,
            at=self._at,
        )
        self._models = self.folder / "models"
        private_files.make_folder(self._models)
        database.sync(self.folder)
        self._lines.recover(was_clean=was_clean)
        self._lines.complete()
        self._stored = self._check_models()
        self._packing = Packing(name_hash(self.name), file.words)
        self._reader = Reader(self._path)

    def _check_name(self, name: str | None, default_name: str) -> str:
        known = (self._file.find(META, b"name") or b"").decode()
        if name is not None and known and name != known:
            raise StateForeign(
                str(self.folder),
                f"is the state of server {known!r}, not of {name!r}",
                f"Start this server as {known!r} (clients belong to a server by its name), or give it another folder.",
            )
        return known or name or default_name

    def _open_witness(self) -> int | None:
        """How many transactions the database must have: 0 where the witness is missing, None where it is damaged."""
        path = self.folder / "committed"
        if not path.exists():
            made = path.with_suffix(".new")
            private_files.write(made, _testimony(0))
            made.replace(path)
        self._witness = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        content = os.pread(self._witness, 100, 0)
        generation = _WITNESS.unpack(content)[1] if len(content) == _WITNESS.size else 0
        return int(generation) if content == _testimony(generation) else None

    def _write_witness(self) -> None:
        # Never synced: after a power failure it may be behind the database, which is right, but never ahead of it.
        os.pwrite(self._witness, _testimony(self._file.seal.generation), 0)

    def _check_models(self) -> dict[tuple[int, str], StoredModel]:
        """What is stored of each run and topic; files that nobody names go."""
        stored: dict[tuple[int, str], StoredModel] = {}
        for key, body in self._file.rows(MODEL):
            run, topic = struct.unpack(">I", key[:4])[0], key[4:].decode()
            model = stored[run, topic] = msgspec.msgpack.decode(body, type=StoredModel)
            if model.body is None and not (path := self._model_path(run, topic, model.version)).exists():
                _log.warning("%s is missing: topic %r has no model until the next one is published", path, topic)
        named = {self._model_path(run, topic, model.version) for (run, topic), model in stored.items()}
        for path in self._models.iterdir():
            if path.suffix in (".model", ".new") and path not in named:
                path.unlink(missing_ok=True)
        return stored

    def _model_path(self, run: int, topic: str, version: int) -> Path:
        return self._models / f"{run}-{_bytes.checksum(topic.encode()):016x}-{version}.model"

    # ------------------------------------------------------------------------------------------------ what is there

    def runs(self) -> list[RunFacts]:
        """All runs, in the order in which they began; the one that is counted has not ended."""
        return sorted(dict(self._file.facts_of).values(), key=lambda facts: self._file.runs[facts.name])

    def settings(self) -> dict[str, str]:
        """Texts that were saved, by name."""
        with as_saved(self._path):
            return {key.decode(): body.decode() for key, body in self._facts(SETTING)}

    def accounts(self, run: str) -> StoredAccounts:
        """The accounts of a run, of other servers too; each is read when it is asked for."""
        return StoredAccounts(self._packing, _RunReader(self, run))

    def packed_accounts(self, run: str, begin: bytes = b"", most: int = 1 << 62, before: bytes = LAST) -> list[Packed]:
        """At most so many accounts of a run as they are on disk, from the key `begin` on and below `before`."""
        self._check_open()
        number = self._file.runs.get(run)
        return [] if number is None else self._reader.accounts(number, begin, most, before)

    def line_count(self, run: str) -> int:
        """Lines of a run that were ever taken: the index of the newest one."""
        number = self._file.runs.get(run)
        return 0 if number is None else self._file.counts.get(number, 0)

    def models(self, run: str) -> list[Model]:
        """The newest model of each topic of a run, in the order of topics.

        Raises:
            StateCorrupt: a body is not what was published.
        """
        number = self._file.runs.get(run)
        stored = sorted(self._stored.copy().items())
        found = [self._read_model(owner, topic, model) for (owner, topic), model in stored if owner == number]
        return [model for model in found if model is not None]

    def versions(self) -> dict[str, int]:
        """The highest version of each topic over all runs: versions never go back."""
        versions: dict[str, int] = {}
        for (_, topic), model in self._stored.copy().items():
            versions[topic] = max(model.version, versions.get(topic, 0))
        return versions

    def _read_model(self, run: int, topic: str, stored: StoredModel) -> Model | None:
        path = self._model_path(run, topic, stored.version)
        if stored.body is None and not path.exists():
            return None  # somebody took it away; its version stays
        body = stored.body if stored.body is not None else path.read_bytes()
        if hashlib.sha256(body).digest() != stored.sha256:
            raise StateCorrupt(
                str(path),
                f"model {topic!r} version {stored.version} has another SHA-256 than what was published",
                "Bring it back from a backup of yours, or remove the file: the topic then has no model until the next "
                "one is published.",
            )
        return Model(topic, stored.version, body, stored.text, stored.sha256)

    def _facts(self, kind: int, prefix: bytes = b"") -> list[tuple[bytes, bytes]]:
        self._check_open()
        return self._reader.facts(kind, prefix)

    def search(
        self,
        run: str,
        wanted: Wanted = _EVERY,
        *,
        most: int = 100,
        newest_first: bool = False,
    ) -> list[Entry]:
        """Log lines of a run, at most so many of those wanted, as the log file has them; beside the writer, from any
        thread. An unknown run has none; the oldest come first unless asked otherwise.
        """
        self._check_open()
        number = self._file.runs.get(run)
        if number is None or len(wanted.text) > _LONGEST_TEXT or not 0 <= (wanted.label or 0) < 1 << 32:
            return []
        top = (1 << INDEX_BITS) - 1
        low, high = max(0, wanted.after) + 1, top if wanted.before is None else min(wanted.before - 1, top)
        where: list[str] = ["id BETWEEN ? AND ?"]
        values: list[Any] = [number << INDEX_BITS | min(low, top), (number << INDEX_BITS) + max(-1, high)]
        for condition, value in (
            ("client = ?", wanted.client),
            ("label = ?", wanted.label),
            ("received >= ?", wanted.since),
            ("received < ?", wanted.until),
            ("text LIKE ? ESCAPE '\\'", _pattern(escape(wanted.text)) if wanted.text else None),
        ):
            if value is not None:
                where.append(condition)
                values.append(value)
        return self._reader.lines(" AND ".join(where), values, "DESC" if newest_first else "ASC", most)

    # ------------------------------------------------------------------------------------------------ saving

    def start(
        self,
        collect: Callable[[], Group | None],
        done: Callable[[Group], None],
        failed: Callable[[StateLost], None],
    ) -> None:
        """Save from now on, in a thread of its own.

        Args:
            collect: All that changed since its last call; None when there is nothing.
            done: The group is on disk (or had nothing but tickets).
            failed: Called once, when nothing can be saved any more.
        """
        self._check_open()
        self._collect, self._done, self._failed = collect, done, failed
        self._thread = threading.Thread(target=self._run, name=f"memoire-store-{self.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Somebody waits for what changed. What nobody waits for is collected within 0.2 s."""
        with self._wanted:
            self._is_wanted = True
            self._wanted.notify()

    def _run(self) -> None:
        try:
            while True:
                closing = self._wait()
                while (group := self._collect()) is not None:
                    if not self._save(group):
                        self._unsaved = True
                        return
                    self._tell(group)
                    self._trim()
                self._look_after()
                if closing:
                    return
        except Exception as error:
            _log.exception("%s: the state cannot be saved any more", self.folder)
            self._lost = error if isinstance(error, StateLost) else StateLost(str(self.folder), _words(error))
            self._unsaved = True
            self._failed(self._lost)

    def _wait(self) -> bool:
        """Wait until something is to be saved; True when the store is being closed."""
        with self._wanted:
            if not (self._is_wanted or self._closing):
                self._wanted.wait(SOON)
            self._is_wanted = False
            return self._closing

    def _tell(self, group: Group) -> None:
        try:
            self._done(group)
        except Exception:
            _log.exception("%s: what was saved could not be acknowledged; whoever asked asks again", self.folder)

    def _save(self, group: Group) -> bool:
        """Have the group on disk; False when there was no room until the store was closed."""
        if group.is_empty:
            return True
        while True:
            try:
                self._save_now(group)
            except (sqlite3.Error, OSError) as error:
                if not self._may_heal(error):
                    raise StateLost(str(self.folder), _words(error)) from error
                if self._give_up.wait(AGAIN):
                    return False
            else:
                if self._full_since:
                    _log.warning("%s: saving goes on", self.folder)
                self._full_since, self._trouble = 0.0, ""
                self.saved_groups += 1
                return True

    def _may_heal(self, error: Exception) -> bool:
        if database.is_busy(error):
            why = "another program holds the database"
        elif _is_full(self.folder, error):
            why = "the disk is full"
        else:
            return False
        if not self._full_since:
            self._full_since = time.monotonic()
            _log.warning("%s: %s; nothing is acknowledged until it can be saved (%s)", self.folder, why, error)
        self._trouble = why
        return True

    def _save_now(self, group: Group) -> None:
        file = self._file
        runs = dict(file.runs)
        facts = database.pack_group(group, runs)
        models = self._write_models(group, runs, facts)
        names = {number: run for run, number in runs.items()}
        lines = [(runs[run], entry) for run, entry in group.lines]
        pieces = self._lines.plan(lines, names.__getitem__)
        facts += [
            (database.SEGMENT, database.segment_key(piece.segment), msgspec.msgpack.encode(piece.segment))
            for piece in pieces
        ]
        accounts = database.pack_accounts(group, runs, self._packing, file.account)
        try:
            file.save(facts, lines, accounts)
        except BaseException:
            self._lines.drop(pieces)
            raise
        self._write_witness()
        self._lines.finish(pieces)
        for key, stored in models.items():
            former = self._stored.get(key)
            self._stored[key] = stored
            if former is not None and former.body is None and former.version != stored.version:
                self._model_path(*key, former.version).unlink(missing_ok=True)

    def _write_models(
        self, group: Group, runs: dict[str, int], facts: list[tuple[int, bytes, bytes | None]]
    ) -> dict[tuple[int, str], StoredModel]:
        """Bodies that are too large for the database become files before it names them."""
        models: dict[tuple[int, str], StoredModel] = {}
        for run, model in group.models:
            number = runs[run]
            is_small = model.size <= _INLINE
            body = model.body if is_small else None
            stored = StoredModel(model.version, model.size, model.digest, model.is_text, body)
            models[number, model.topic] = stored
            facts.append((MODEL, run_key(number, model.topic.encode()), msgspec.msgpack.encode(stored)))
            if not is_small:
                path = self._model_path(number, model.topic, model.version)
                made = path.with_suffix(".new")
                private_files.write(made, model.body)
                self._at("before model")
                made.replace(path)
                database.sync(self._models)
                self._at("after model")
        return models

    def _trim(self) -> None:
        """Let the oldest text go where there is too much."""
        oldest = self._lines.oldest()
        if oldest is None:
            return
        try:
            is_over = self._file.trim(oldest)
            self._write_witness()
        except sqlite3.Error as error:
            if not self._may_heal(error):
                raise
            return
        if is_over:
            self._at("before forgetting")
            self._lines.forget(oldest)

    # ------------------------------------------------------------------------------------------------ backups

    def _look_after(self) -> None:
        """What nobody waits for: text that is behind, and a backup now and then."""
        now = time.monotonic()
        if self._lines.trouble and now >= self._mend_due:
            self._mend_due = now + MEND
            self._lines.complete()
        if self._backed_up == self._file.seal.generation or now < self._backup_due or self._backing_up.locked():
            return
        self._backup_due = now + self._limits.backup_every
        threading.Thread(target=self._try_back_up, name="memoire-backup", daemon=True).start()

    def _try_back_up(self) -> None:
        try:
            self.back_up()
        except StateError as error:
            self._backup_trouble = str(error)
            _log.error("%s: no backup was made, the former ones stay: %s", self.folder, error)
        except (OSError, sqlite3.Error, ValueError) as error:
            self._backup_trouble = f"no backup could be made: {_words(error)}"
            _log.warning("%s: %s", self.folder, self._backup_trouble)

    def back_up(self) -> Path:
        """Write a backup of everything but log lines, `state.db.backup-1`; the one before becomes `-2`.

        Raises:
            StateCorrupt: the database has become damaged while it was open: the former backups stay.
        """
        with self._backing_up:
            generation = self._file.seal.generation
            first, second = (self.folder / f"state.db.backup-{number}" for number in (1, 2))
            fresh = self.folder / "state.db.new-backup"
            self._reader.copy_to(fresh)
            self._at("before backups")
            if first.exists():
                first.replace(second)
            self._at("between backups")
            fresh.replace(first)
            database.sync(self.folder)
            self._at("after backups")
            self._backed_up, self._backup_trouble = generation, ""
            return first

    # ------------------------------------------------------------------------------------------------ its state

    @property
    def is_healthy(self) -> bool:
        """Whether what is given to it is saved without delay."""
        return self._lost is None and not self._trouble and not self._closed

    def space(self) -> FolderStats:
        """What the folder takes, looked at every `LOOK_AT_DISK` seconds, and what is left."""
        now, (looked_at, size) = time.monotonic(), self._size
        if now > looked_at + LOOK_AT_DISK:
            size = _bytes_in(self.folder)
            self._size = now, size
        free = os.statvfs(self.folder)
        return FolderStats(size, free.f_bavail * free.f_frsize, free.f_blocks * free.f_frsize, self.trouble)

    @property
    def trouble(self) -> str:
        """What is wrong with the disk now, for people; empty when nothing is."""
        if self._lost is not None:
            return str(self._lost)
        if self._trouble:
            seconds = time.monotonic() - self._full_since
            return f"{self._trouble} since {seconds:.0f} s ({self.folder}): nothing is acknowledged until it is saved"
        return self._lines.trouble or self._backup_trouble

    def close(self, timeout: float = 10.0) -> bool:
        """Save what is left, back up, and let go of the folder; True when everything was saved in time.

        Whatever was not saved was not acknowledged either.
        """
        if self._pid != os.getpid() or self._closed:
            return not self._unsaved
        deadline = time.monotonic() + timeout
        with self._wanted:
            self._closing = True
            self._wanted.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, 0.8 * timeout))
            self._give_up.set()
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                _log.warning("%s: the disk did not answer in time; the folder stays locked", self.folder)
                return False
        self._closed = True
        if not self._unsaved:
            self._finish()
        self._reader.close()
        self._file.close()
        self._unlock()
        return not self._unsaved

    def _finish(self) -> None:
        """Leave the folder so that the next start has nothing to mend."""
        try:
            self._lines.complete()
            self._lines.settle()
            if self._lines.trouble == "":
                self._file.save([(META, b"clean", b"\x01")], [])
                self._write_witness()
            if self._backed_up != self._file.seal.generation:
                self._try_back_up()
            self._at("before checkpoint")
            self._file.checkpoint()
            self._at("after checkpoint")
        except (sqlite3.Error, OSError) as error:
            _log.warning("%s: everything is saved, but the folder was not put in order: %s", self.folder, error)

    def _unlock(self) -> None:
        fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # at once: a child forked this moment has not yet closed its own
        self._let_go()

    def _let_go(self) -> None:
        for opened in (self._witness, self._lock_file):
            if opened >= 0:
                os.close(opened)
        self._witness = self._lock_file = -1

    def _forget_in_child(self) -> None:
        """A forked child must not hold the lock when its parent ends, nor close what SQLite has open: that is the
        parent's.
        """
        _left_alone.append((self._file, self._reader))
        self._closed = True
        self._let_go()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the state folder {self.folder}")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _RunReader:
    """Reads the accounts of one run, which may be one that is not saved yet."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run

    def body(self, key: bytes) -> bytes | None:
        """Body of the account with this key."""
        return next((body for _, body in self.after(key, 1, key + b"\0")), None)

    def after(self, key: bytes, most: int, before: bytes = LAST) -> list[Packed]:
        """At most so many accounts from this key on, ascending, whose keys are below `before`."""
        return self._store.packed_accounts(self._run, key, most, before)

    def reading(self) -> AbstractContextManager[None]:
        """Within it, what cannot have been saved is StateCorrupt."""
        return as_saved(self._store.folder / "state.db")


def _bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except OSError:
            pass  # it has just gone
    return size


def _after_fork() -> None:
    for store in list(_stores):
        store._forget_in_child()


os.register_at_fork(after_in_child=_after_fork)


def _testimony(generation: int) -> bytes:
    facts = struct.pack("<8sQ", b"memowits", generation)
    return facts + struct.pack("<Q", _bytes.checksum(facts))


def _pattern(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _words(error: BaseException) -> str:
    name = getattr(error, "sqlite_errorname", "")
    return f"{error} ({name})" if name else str(error)


def _is_full(folder: Path, error: Exception) -> bool:
    """Whether the disk is full, also where SQLite is vague: when the index of its log in shared memory cannot grow it
    says "disk I/O error". An error of a sync is never forgiven.
    """
    vague = (sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP, sqlite3.SQLITE_IOERR_WRITE)
    if database.is_full(error) or getattr(error, "sqlite_errorcode", 0) not in (*vague, sqlite3.SQLITE_CANTOPEN):
        return database.is_full(error)
    probe = folder / "state.db.probe"
    try:
        private_files.write(probe, bytes(1 << 16))
    except OSError as found:
        return database.is_full(found)
    finally:
        probe.unlink(missing_ok=True)
    return False


def _translated(error: sqlite3.Error, folder: Path, path: Path) -> StateError:
    code = getattr(error, "sqlite_errorcode", 0) & 255
    if _is_full(folder, error):
        return StateUnusable(str(folder), "its disk is full", "Make room, and start again: nothing is lost.")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StateUnusable(str(folder), _words(error), "Make it writable for this user.")
    if database.is_busy(error):
        return StateUnusable(str(folder), "another program has state.db open", "Close it, and start again.")
    if code == sqlite3.SQLITE_IOERR:
        return StateUnusable(str(folder), _words(error), "Check the disk.")
    return StateCorrupt(str(path), f"SQLite says {_words(error)}", f"{database.RESTORE}.")


def _unusable(folder: Path, error: OSError) -> StateUnusable:
    advice = {
        errno.EROFS: "It is on a read-only file system: mount it writable.",
        errno.EACCES: f"User {os.getuid()} may not write it: change its owner or mode.",
        errno.EPERM: f"User {os.getuid()} may not write it: change its owner or mode.",
        errno.ENOENT: "Make its parent folder first.",
        errno.ENOTDIR: "Name a folder, not a file.",
    }
    if database.is_full(error):
        return StateUnusable(str(folder), "its disk is full", "Make room, and start again: nothing is lost.")
    return StateUnusable(str(folder), error.strerror or str(error), advice.get(error.errno or 0, "Check the disk."))


def _make_folder(folder: Path) -> None:
    try:
        if not folder.exists():
            private_files.make_folder(folder)
            database.sync(folder.absolute().parent)
    except OSError as error:
        raise _unusable(folder, error) from error
    if not folder.is_dir():
        raise StateUnusable(str(folder), "it is not a folder", "Name a folder, not a file.")


def check_file_system(folder: Path, mounts: str | None = None) -> None:
    """Refuse file systems on which SQLite's write-ahead log is not safe.

    Args:
        folder: What is asked about.
        mounts: Content of /proc/self/mountinfo; None reads it (and allows everything where there is none).
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
    kind, where = "", ""
    here = folder.resolve()
    for line in mounts.splitlines():
        mount, _, facts = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 5 or not facts:
            continue
        point = fields[4].encode().decode("unicode_escape")
        if here.is_relative_to(point) and len(point) >= len(where):
            kind, where = facts.split()[0], point
    if kind in _REMOTE or (kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        raise StateUnusable(
            str(folder),
            f"{where} is a network or user-space file system ({kind}), on which locks and shared memory between "
            f"processes cannot be trusted",
            "Use a local disk or a block volume (in Kubernetes: a ReadWriteOncePod volume).",
        )


def _lock(folder: Path) -> int:
    """The lock file, held: while this process lives nobody else gets it."""
    try:
        opened = private_files.append(folder / "lock")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _no_lock(folder, "a symbolic link") from error
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StateLocked(str(folder), *_holder(opened)) from error
    except OSError as error:
        raise StateUnusable(str(folder), f"it cannot be locked ({error.strerror})", "Use a local disk.") from error
    _check_lock(folder, opened)
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    try:
        os.ftruncate(opened, 0)
        os.write(opened, holder)
    except OSError as error:
        os.close(opened)
        raise _unusable(folder, error) from error
    return opened


def _check_lock(folder: Path, opened: int) -> None:
    """Refuse a file that is no lock of a former life: what is in it would be overwritten."""
    facts = os.fstat(opened)
    if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and (not facts.st_size or _held_by(opened)[0]):
        return
    os.close(opened)
    raise _no_lock(folder, "another program's file")


def _no_lock(folder: Path, what: str) -> StateForeign:
    return StateForeign(
        str(folder / "lock"),
        f"is {what}, not the lock of a state folder",
        "Give the server a folder of its own, or remove that if nobody needs it.",
    )


def _tighten(folder: Path) -> None:
    """Give files of a former version, which everybody could read, the mode that they are made with today."""
    for pattern in ("state.db*", "committed", "lock", "*.snapshot", "log/*.log", "models/*.model", "snapshots/*"):
        for path in folder.glob(pattern):
            private_files.tighten(path)


def _holder(opened: int) -> tuple[int, str]:
    """Who holds the lock; closes it."""
    try:
        return _held_by(opened)
    finally:
        os.close(opened)


def _held_by(opened: int) -> tuple[int, str]:
    try:
        facts = json.loads(os.pread(opened, 4096, 0))
        return int(facts["pid"]), str(facts["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""
