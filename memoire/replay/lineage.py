"""Which saved buffer goes on from which: one goes on at a time, and none writes over steps that it does not have.

    client id    16 random bytes that name a buffer; a copy or a load has another one, `load(resume=True)` the same
    lives        [["9f3c...", 17], ["07aa...", 3]]: each making and each resuming begins a life, which numbers its
                 saves; these lives of a buffer, up to these saves, are its past

A file is a buffer's past if its newest life and save are among these; only then the buffer may take its place. A buffer
that resumes a file locks its lineage in its folder, by a file `.CLIENT_ID.lock`.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from memoire import _core
from memoire.errors import BufferLocked, DataError, ForkedError, NotItsPast, ParameterError

from . import dataset_reading, file_lock
from .file_lock import FileLock, Holder


class SavedLineage(NamedTuple):
    """What a file says of the buffer that it holds."""

    client_id: bytes
    lives: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, path: str | Path, beside: Mapping[str, Any]) -> SavedLineage | None:
        """Out of what a file holds beside the memory; None if that was no buffer's. Raises DataError."""
        if not beside:
            return None
        try:
            told = beside["lineage"]
            lives = tuple((str(life), int(saves)) for life, saves in told["lives"])
            made = cls(bytes.fromhex(told["client_id"]), lives)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(str(path), f"does not say which buffer it holds: {error!r}") from error
        if len(made.client_id) != 16 or not lives:
            raise DataError(str(path), "does not say which buffer it holds")
        return made


class Lineage:
    """Client id of a buffer, and what it was saved as. Methods may be called from several threads."""

    def __init__(self, resumed: SavedLineage | None = None) -> None:
        self._locks: dict[Path, FileLock] = {}  # by folder
        self._resumed_by = 0  # the process that has the locks, in one that was forked from it
        self._begin(resumed)

    def _begin(self, resumed: SavedLineage | None = None) -> None:
        self._process, self._life = os.getpid(), secrets.token_hex(8)
        self._locking = threading.Lock()  # another one in a fork, where a thread that is gone may have held it
        self._client_id = secrets.token_bytes(16) if resumed is None else resumed.client_id
        self._lives = {**({} if resumed is None else dict(resumed.lives)), self._life: 0}

    @property
    def client_id(self) -> bytes:
        """16 bytes; others in a forked process."""
        if self._process != os.getpid():
            if self._locks:
                self._resumed_by = self._process
                self._locks.clear()
            self._begin()
        return self._client_id

    def next_save(self) -> dict[str, Any]:
        """What the next file says, which `SavedLineage` reads."""
        client_id = self.client_id
        self._lives[self._life] += 1
        return {"client_id": client_id.hex(), "lives": list(self._lives.items())}

    @classmethod
    def resume(cls, path: str | Path) -> Lineage:
        """Go on as the buffer in a file. From now on no other process or buffer can.

        Raises:
            BufferLocked: another one does.
            ParameterError: no buffer was saved there.
            OSError: the lock cannot be made.
        """
        while True:
            told = _told(path)
            if told is None:
                raise ParameterError("resume", True, f"None for {path}, which holds a memory and not a buffer")
            lineage = cls(told)
            lineage._lock(Path(path))
            if _told(path) == told:
                return lineage
            lineage.release()  # another one was saved there meanwhile

    def _lock(self, path: Path) -> None:
        folder = _folder(path)
        with _core.Held(self._locking):
            if folder in self._locks:
                return
            lock = FileLock(
                _beside(folder, self._client_id),
                held=lambda holder: _locked(path, holder),
                foreign=lambda what: ParameterError(
                    "resume", True, f"None while {_beside(folder, self._client_id)} is {what}"
                ),
            )
            weakref.finalize(self, lock.release)
            self._locks[folder] = lock

    def release(self) -> None:
        """Let others go on."""
        while self._locks:
            self._locks.popitem()[1].release()

    def before_save(self, path: str | Path) -> None:
        """Refuse to write over what this buffer does not have, or what another one goes on from.

        Raises:
            BufferLocked: another one goes on as this buffer, or as the one that is saved there.
            NotItsPast: another one went on as this buffer, and was saved there.
            ForkedError: the buffer was resumed by the process that this one was forked from.
        """
        client_id = self.client_id
        if self._resumed_by:
            raise ForkedError(f"the resumed buffer that was to be saved to {path}", self._resumed_by, os.getpid())
        told = refuse_if_held(path, client_id)
        if told is not None and told.client_id == client_id:
            life, saves = told.lives[-1]
            if self._lives.get(life, -1) < saves:
                raise NotItsPast(str(path))
        if self._locks:
            self._lock(Path(path))
        elif found := file_lock.holder(_beside(_folder(path), client_id)):
            raise _locked(path, found)


def refuse_if_held(path: str | Path, mine: bytes = b"") -> SavedLineage | None:
    """Refuse to write over a file that another buffer goes on from. Returns what the file says, if a buffer saved it.

    Raises:
        BufferLocked: somebody does.
    """
    try:
        told = _told(path)
    except (DataError, OSError):
        return None  # no buffer can go on from that
    if told is None or told.client_id == mine:
        return told
    if found := file_lock.holder(_beside(_folder(path), told.client_id)):
        raise _locked(path, found)
    return told


def _told(path: str | Path) -> SavedLineage | None:
    return SavedLineage.of(path, dataset_reading.beside(path))


def _folder(path: str | Path) -> Path:
    return Path(os.path.realpath(path)).parent


def _beside(folder: Path, client_id: bytes) -> Path:
    return folder / f".{client_id.hex()}.lock"


def _locked(path: str | Path, holder: Holder) -> BufferLocked:
    return BufferLocked(str(path), holder.pid, holder.host, str(holder))
