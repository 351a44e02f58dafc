"""Opening of a state folder: lock, checks, new epoch, and repair after a crash; its commit counter and stored models.

`StoredModels` holds the newest model of each run and topic: small bodies in the database, large ones in files beside.

The file `committed` (`CommitCounter`) has the number of transactions that the database must contain, so that a removed
write-ahead log of SQLite is noticed.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from memoire.accounting.packing import AccountPacker
from memoire.errors import StateCorrupt, StateForeign, StateUnusable
from memoire.limits import Limits
from memoire.models.model import Model
from memoire.replay.files import remove_abandoned_in, replace_file, sync
from memoire.wire import _bytes
from memoire.wire.frames import name_hash

from . import database
from .database import DatabaseReader, corrupt_on_bad_values, database_open_error
from .files import RESTORE, check_file_system, lock_folder, make_folder, mode_in, restrict_permissions, unusable
from .logs import LineLog
from .records import META, MODEL, Fact, StoredModel, run_key
from .state_file import StateFile
from .table_rows import DiskRows

_log = logging.getLogger(__name__)


INLINE_BYTES: Final = 16 * 1024
"""Most bytes of a model's body that is stored in the database itself."""

_NAME: Final = re.compile(r"[0-9]+-[0-9a-f]{16}-[0-9]+\.model")

Stored: TypeAlias = dict[tuple[int, str], StoredModel]
"""Stored models by number of the run and topic."""


_FORM: Final = struct.Struct("<8sQQ")
_OURS: Final = (
    "state.db*",
    "committed",
    "lock",
    "*.snapshot",
    "log/*.log",
    "models/*.model",
    "rows/*.bodies",
    "snapshots/*",
)


class CommitCounter:
    """Commit counter of a state folder, the file `committed`; read-only before `begin`, which makes it if missing.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._opened = folder / "committed", -1
        self.stored: int | None = 0
        """Number of transactions in the file when it was opened: 0 if it was missing, None if it is damaged."""
        if not self._path.exists():
            return
        self._open()
        try:
            content = os.pread(self._opened, 100, 0)
        except BaseException:
            self.close()
            raise
        generation = _FORM.unpack(content)[1] if len(content) == _FORM.size else 0
        self.stored = int(generation) if content == _counter_bytes(generation) else None

    def _open(self) -> None:
        self._opened = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def begin(self, generation: int) -> None:
        """Write the whole file, which may have been damaged or missing."""
        if self._opened < 0:
            replace_file(self._path, _counter_bytes(generation), mode=mode_in(self._path.parent))
            self._open()
        os.ftruncate(self._opened, _FORM.size)
        self.write(generation)

    def write(self, generation: int) -> None:
        """Write the number of transactions."""
        # The counter is never synced: after a power failure the counter may be behind the database, but never ahead.
        os.pwrite(self._opened, _counter_bytes(generation), 0)

    def close(self) -> None:
        """Close the file; later calls do nothing."""
        if self._opened >= 0:
            os.close(self._opened)
        self._opened = -1


def _counter_bytes(generation: int) -> bytes:
    facts = struct.pack("<8sQ", b"memowits", generation)
    return facts + struct.pack("<Q", _bytes.checksum(facts))


class StoredModels:
    """Newest models of a state folder, by run and topic. One thread writes; any may read.

    Args:
        folder: Folder of the models' files; made if missing.
        at: Called at named points, so that a test may end the process there.
    """

    def __init__(self, folder: Path, at: Callable[[str], None]) -> None:
        self._folder, self._at = folder, at
        self._stored: Stored = {}
        self.missing: list[str] = []
        """Models whose file is missing, a sentence each."""
        make_folder(folder)

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the database's rows of models, by key; removes files that no row names."""
        for key, body in rows:
            run, topic = struct.unpack(">I", key[:4])[0], key[4:].decode()
            model = self._stored[run, topic] = msgspec.msgpack.decode(body, type=StoredModel)
            if model.body is None and not (path := self._path(run, topic, model.version)).exists():
                self.missing.append(f"{path} is gone: topic {topic!r} has no model until the next one is published")
                _log.warning("%s", self.missing[-1])
        named = {self._path(run, topic, model.version) for (run, topic), model in self._stored.items()}
        remove_abandoned_in(self._folder, ".model")
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name) and path not in named:
                path.unlink(missing_ok=True)

    def _path(self, run: int, topic: str, version: int) -> Path:
        return self._folder / f"{run}-{_bytes.checksum(topic.encode()):016x}-{version}.model"

    def newest_of_run(self, run: int | None) -> list[Model]:
        """Return the newest model of each topic of a run, in the order of topics.

        Raises:
            StateCorrupt: a body has another checksum than the published one.
        """
        stored = sorted(self._stored.copy().items())
        models = [self._read(owner, topic, model) for (owner, topic), model in stored if owner == run]
        return [model for model in models if model is not None]

    def versions(self) -> dict[str, int]:
        """Return the highest version of each topic over all runs: versions never go back."""
        versions: dict[str, int] = {}
        for (_, topic), model in self._stored.copy().items():
            versions[topic] = max(model.version, versions.get(topic, 0))
        return versions

    def _read(self, run: int, topic: str, stored: StoredModel) -> Model | None:
        path = self._path(run, topic, stored.version)
        if stored.body is None and not path.exists():
            return None  # the file was removed; the version stays known
        body = stored.body if stored.body is not None else path.read_bytes()
        if _bytes.checksum(body) != stored.checksum:
            raise StateCorrupt(
                str(path),
                f"model {topic!r} version {stored.version} has another XXH3 than the published one",
                "Restore it from your own backup, or remove the file: the topic then has no model until the next "
                "one is published.",
            )
        return Model(topic, stored.version, body, stored.text, stored.checksum)

    def write(self, models: Iterable[tuple[int, Model]]) -> tuple[Stored, list[Fact]]:
        """Write bodies that are too large for the database; they are on disk when this returns.

        Returns:
            The argument of `replace`, which is to be called after the second value, facts, is in the database.
        """
        written: Stored = {}
        facts: list[Fact] = []
        for run, model in models:
            is_small = model.size <= INLINE_BYTES
            body = model.body if is_small else None
            stored = StoredModel(model.version, model.size, model.checksum, model.is_text, body)
            written[run, model.topic] = stored
            facts.append((MODEL, run_key(run, model.topic.encode()), msgspec.msgpack.encode(stored)))
            if not is_small:
                self._write_file(self._path(run, model.topic, model.version), model.body)
        return written, facts

    def _write_file(self, path: Path, body: bytes) -> None:
        def at(step: str) -> None:
            if step == "replace":
                self._at("before model")

        replace_file(path, body, mode=mode_in(self._folder), at=at)
        self._at("after model")

    def replace(self, written: Stored) -> None:
        """Remove the files of former models, after the database names the new ones."""
        for key, stored in written.items():
            former = self._stored.get(key)
            self._stored[key] = stored
            if former is not None and former.body is None and former.version != stored.version:
                self._path(*key, former.version).unlink(missing_ok=True)


class OpenFolder:
    """Open files of a state folder. Arguments and errors are those of `Store`."""

    def __init__(
        self,
        folder: Path,
        name: str | None,
        default_name: str,
        limits: Limits,
        clock: Callable[[], float],
        at: Callable[[str], None],
    ) -> None:
        self.folder, self.path = folder, folder / "state.db"
        self._limits, self._clock, self._at = limits, clock, at
        self._make_folder()
        check_file_system(folder)
        self._lock = lock_folder(folder)
        for path in (path for pattern in _OURS for path in folder.glob(pattern)):
            restrict_permissions(path)  # a former version made files for all users
        self._counter: CommitCounter | None = None
        try:
            self._open(name, default_name)
        except BaseException:
            self._unlock()
            raise

    def _make_folder(self) -> None:
        try:
            if not self.folder.exists():
                make_folder(self.folder)
                sync(self.folder.absolute().parent)
        except OSError as error:
            raise unusable(self.folder, error) from error
        if not self.folder.is_dir():
            raise StateUnusable(str(self.folder), "it is not a folder", "Name a folder, not a file.")

    def _open(self, name: str | None, default_name: str) -> None:
        try:
            if not self.path.exists():
                self._check_empty()
                database.create(self.path, name or default_name, self._at)
            self._counter = CommitCounter(self.folder)
            self.file = StateFile(self.path, self._counter.stored, at=self._at)
            try:
                with corrupt_on_bad_values(self.path):
                    self.name = self._check_name(name, default_name)
                    self.rows = DiskRows(self.folder / "rows", self.file, self._at)
                    self._begin(self._counter)
            except BaseException:
                self.file.close()
                raise
        except sqlite3.Error as error:
            raise database_open_error(error, self.folder, self.path) from error
        except OSError as error:
            raise unusable(self.folder, error) from error

    def _check_empty(self) -> None:
        """Raise StateCorrupt if the database is missing but other files of a state folder exist."""
        others = sorted(
            path.name
            for path in self.folder.iterdir()
            if path.name.startswith(("state.db.backup-", "committed")) or path.name in ("log", "models", "rows")
        )
        if others:
            raise StateCorrupt(str(self.path), f"it is missing, but {', '.join(others)} exist", f"{RESTORE}.")

    def _check_name(self, name: str | None, default_name: str) -> str:
        known = (self.file.find(META, b"name") or b"").decode()
        if name is not None and known and name != known:
            raise StateForeign(
                str(self.folder),
                f"is the state of server {known!r}, not of {name!r}",
                f"Start this server as {known!r} (clients belong to a server by its name), or give it another folder.",
            )
        return known or name or default_name

    def _begin(self, counter: CommitCounter) -> None:
        """Save a new epoch of the server, and complete what a crash has cut short."""
        file = self.file
        was_clean = bool(file.read_number(META, b"clean")) and not file.was_backup
        file.open_for_writing((counter.stored or 0) + 1)
        self.restored = file.read_number(META, b"restored")
        """Number of times that a backup was restored in this folder."""
        if file.was_backup:
            _log.warning("%s: a backup was restored; clients that still run bring their totals up to date", self.folder)
        former = file.read_number(META, b"epoch")
        self.epoch = max(former + 1, int(self._clock() * 1e9))
        """Epoch of the server, which grows at each start; on disk before a client receives it."""
        self.since = self._unbroken_since(former)
        """Epoch since which the folder has lost nothing."""
        self._at("before epoch")
        file.save(
            [
                (META, b"epoch", self.epoch.to_bytes(8, "big")),
                (META, b"since", self.since.to_bytes(8, "big") + self.epoch.to_bytes(8, "big")),
                (META, b"clean", b"\x00"),
                (META, b"name", self.name.encode()),
            ],
            [],
        )
        counter.begin(file.seal.generation)
        self._open_files(was_clean)

    def _unbroken_since(self, former: int) -> int:
        """Return the stored epoch since which nothing was lost. The epoch is stored with the epoch of the start that
        wrote it. If the latter is not the former epoch, an older program, which does not write it, used the folder in
        between. Each start of the older program opened accounts with its own epoch.
        """
        since, written_in = divmod(self.file.read_number(META, b"since"), 1 << 64)
        if self.file.was_backup or not former:
            return self.epoch
        return since if written_in == former else former

    def _open_files(self, was_clean: bool) -> None:
        file = self.file
        self.lines = LineLog(
            self.folder / "log",
            file.contents.segments,
            byte_limit=self._limits.tuning.log_bytes,
            lines_of=file.lines_of,
            at=self._at,
        )
        self.models = StoredModels(self.folder / "models", self._at)
        sync(self.folder)
        self.lines.recover(was_clean=was_clean)
        self.lines.complete()
        self.models.load(file.rows(MODEL))
        self.rows.remove_unused_files()
        self.packing = AccountPacker(name_hash(self.name), file.contents.words)
        self.reader = DatabaseReader(self.path)

    def count_commit(self) -> None:
        """Write the present number of transactions to the commit counter."""
        assert self._counter is not None
        self._counter.write(self.file.seal.generation)

    def close(self) -> None:
        """Close all files, and release the lock."""
        self.reader.close()
        self.file.close()
        self._unlock()

    def _unlock(self) -> None:
        self._lock.release()
        if self._counter is not None:
            self._counter.close()

    def close_lock_in_child(self) -> None:
        """Close the lock and the commit counter in a forked child, which must not keep the lock when its parent ends.
        SQLite's files stay open, since they belong to the parent.
        """
        if self._counter is not None:
            self._counter.close()
        self._lock.close()
