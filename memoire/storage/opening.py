"""Opens a state folder: it is locked, checked, given a new epoch, and put in order after a crash."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

from memoire.accounting.packing import AccountPacker
from memoire.errors import StateCorrupt, StateForeign
from memoire.limits import Limits
from memoire.replay.replacement import sync
from memoire.wire.identity import name_hash

from . import database
from .database_reader import DatabaseReader
from .disk_errors import RESTORE, as_saved, translated, unusable
from .file_system import check_file_system, make_folder, tighten
from .folder_lock import lock_folder
from .records import META, MODEL
from .rotating_log import LineLog
from .state_file import StateFile
from .stored_models import StoredModels
from .stored_prompts import StoredPrompts
from .witness import Witness

_log = logging.getLogger(__name__)


class OpenFolder:
    """The files of a state folder while they are open: `Store` says what each argument is, and what is raised."""

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
        make_folder(folder)
        check_file_system(folder)
        self._lock = lock_folder(folder)
        tighten(folder)
        self._witness: Witness | None = None
        try:
            self._open(name, default_name)
        except BaseException:
            self._unlock()
            raise

    def _open(self, name: str | None, default_name: str) -> None:
        try:
            if not self.path.exists():
                self._check_empty()
                database.create(self.path, name or default_name, self._at)
            self._witness = Witness(self.folder)
            self.file = StateFile(self.path, self._witness.found, at=self._at)
            try:
                with as_saved(self.path):
                    self.name = self._check_name(name, default_name)
                    self.prompts = StoredPrompts(self.folder / "prompts", self.file, self._at)
                    self._begin(self._witness)
            except BaseException:
                self.file.close()
                raise
        except sqlite3.Error as error:
            raise translated(error, self.folder, self.path) from error
        except OSError as error:
            raise unusable(self.folder, error) from error

    def _check_empty(self) -> None:
        """Where there is no database, nothing else of a state folder may be: it has not just been begun."""
        left = sorted(
            path.name
            for path in self.folder.iterdir()
            if path.name.startswith(("state.db.backup-", "committed"))
            or path.name in ("log", "models", "prompts", "prompts.db")
        )
        if left:
            raise StateCorrupt(str(self.path), f"it is missing, while {', '.join(left)} are there", f"{RESTORE}.")

    def _check_name(self, name: str | None, default_name: str) -> str:
        known = (self.file.find(META, b"name") or b"").decode()
        if name is not None and known and name != known:
            raise StateForeign(
                str(self.folder),
                f"is the state of server {known!r}, not of {name!r}",
                f"Start this server as {known!r} (clients belong to a server by its name), or give it another folder.",
            )
        return known or name or default_name

    def _begin(self, witness: Witness) -> None:
        """Begin a new life of the server: its epoch is on disk, and what a crash has cut short is completed."""
        file = self.file
        was_clean = bool(file.number(META, b"clean")) and not file.was_backup
        file.go_live((witness.found or 0) + 1)
        self.restored = file.number(META, b"restored")
        """How often a backup was put back into this folder."""
        if file.was_backup:
            _log.warning("%s: a backup was put back; clients that still run bring their totals up to date", self.folder)
        former = file.number(META, b"epoch")
        self.epoch = max(former + 1, int(self._clock() * 1e9))
        """Grows at each start; on disk before anybody hears of it."""
        self.since = self._unbroken_since(former)
        """The epoch since which the folder has forgotten nothing."""
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
        witness.begin(file.seal.generation)
        self._open_files(was_clean)

    def _unbroken_since(self, former: int) -> int:
        """As it is written, beside the epoch of the life that wrote it. In another life, which is the former one then,
        a program had the folder that does not write it: each of its lives opened accounts since its own epoch.
        """
        since, written_in = divmod(self.file.number(META, b"since"), 1 << 64)
        if self.file.was_backup or not former:
            return self.epoch
        return since if written_in == former else former

    def _open_files(self, was_clean: bool) -> None:
        """Open what lies beside the database, and put it in order."""
        file = self.file
        self.lines = LineLog(
            self.folder / "log",
            file.contents.segments,
            byte_limit=self._limits.log_bytes,
            lines_of=file.lines_of,
            at=self._at,
        )
        self.models = StoredModels(self.folder / "models", self._at)
        sync(self.folder)
        self.lines.recover(was_clean=was_clean)
        self.lines.complete()
        self.models.load(file.rows(MODEL))
        self.prompts.tidy()
        self.packing = AccountPacker(name_hash(self.name), file.contents.words)
        self.reader = DatabaseReader(self.path)

    def testify(self) -> None:
        """Note how many transactions there must be from now on."""
        assert self._witness is not None
        self._witness.write(self.file.seal.generation)

    def close(self) -> None:
        """Close everything, and let another process have the folder."""
        self.reader.close()
        self.file.close()
        self._unlock()

    def _unlock(self) -> None:
        self._lock.release()
        if self._witness is not None:
            self._witness.close()

    def forget_in_child(self) -> None:
        """A forked child must not hold the lock when its parent ends, nor close what SQLite has open: that is the
        parent's.
        """
        if self._witness is not None:
            self._witness.close()
        self._lock.close()
