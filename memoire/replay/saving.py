"""Saving of a memory to a file, and the lineage of saved buffers, which protects saved steps.

One buffer at a time resumes a saved buffer, and none overwrites steps that it does not have:

    client id    16 random bytes that identify a buffer; a copy or a load gets others, `load(resume=True)` the same
    lives        [["9f3c...", 17], ["07aa...", 3]]: each constructor and each resume begins a life, which numbers its
                 saves; the past of a buffer is its lives, up to these saves

A file is part of a buffer's past if the file's newest life and save are in it; only then the buffer may replace the
file. A buffer that resumes a file locks its lineage in its folder, by a file `.CLIENT_ID.lock`.

A file with a memory's episodes is replaced as a whole or not at all.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import weakref
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import BufferLocked, BufferSaveConflict, DataError, ForkedError, ParameterError

from . import datafile
from . import files as file_lock
from .columns import Column
from .dataset import FACTS, HeldEpisodes
from .files import Fault, FileLock, Holder, no_fault, replacing
from .memory import Memory
from .memory_state import ABOUT, BOOTSTRAP_VALUE, EPISODE_ROW, EPISODES, FINAL, FORM, OWN, STATE, state_of


class SavedLineage(NamedTuple):
    """Identity and past of a buffer, as its file has them."""

    client_id: bytes
    lives: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, path: str | Path, beside: Mapping[str, Any]) -> SavedLineage | None:
        """Parse the lineage from the state beside a saved memory; None if no buffer saved it. Raises DataError."""
        if not beside:
            return None
        try:
            fields = beside["lineage"]
            lives = tuple((str(life), int(saves)) for life, saves in fields["lives"])
            saved = cls(bytes.fromhex(fields["client_id"]), lives)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(str(path), f"does not identify the buffer that saved it: {error!r}") from error
        if len(saved.client_id) != 16 or not lives:
            raise DataError(str(path), "does not identify the buffer that saved it")
        return saved


class Lineage:
    """Client id of a buffer, its lives and its locks. Methods may be called from several threads."""

    def __init__(self, resumed: SavedLineage | None = None) -> None:
        self._locks: dict[Path, FileLock] = {}  # by folder
        self._resumed_by = 0  # in a forked process, the id of the parent with the locks
        self._begin(resumed)

    def _begin(self, resumed: SavedLineage | None = None) -> None:
        self._process, self._life = os.getpid(), secrets.token_hex(8)
        self._locking = threading.Lock()  # a fork makes a new lock: a lost thread may hold the old one
        self._client_id = secrets.token_bytes(16) if resumed is None else resumed.client_id
        self._lives = {**({} if resumed is None else dict(resumed.lives)), self._life: 0}

    @property
    def client_id(self) -> bytes:
        """16 bytes; a forked process gets new ones."""
        if self._process != os.getpid():
            if self._locks:
                self._resumed_by = self._process
                self._locks.clear()
            self._begin()
        return self._client_id

    def next_save(self) -> dict[str, Any]:
        """Count a save, and return the lineage for its file, which `SavedLineage` reads."""
        client_id = self.client_id
        self._lives[self._life] += 1
        return {"client_id": client_id.hex(), "lives": list(self._lives.items())}

    @classmethod
    def resume(cls, path: str | Path) -> Lineage:
        """Take over the buffer in a file, and lock its lineage against other processes and buffers.

        Raises:
            BufferLocked: another process or buffer has resumed it.
            ParameterError: the file holds a memory that no buffer saved.
            OSError: the lock cannot be made.
        """
        while True:
            saved = _read_lineage(path)
            if saved is None:
                raise ParameterError.with_text(
                    f"{path} holds a memory that no buffer saved, so it cannot be resumed: load it without resume=True."
                )
            lineage = cls(saved)
            lineage._lock(Path(path))
            if _read_lineage(path) == saved:
                return lineage
            lineage.release()  # another buffer was saved to this path

    def _lock(self, path: Path) -> None:
        folder = _folder(path)
        with _core.Held(self._locking):
            if folder in self._locks:
                return
            lock = FileLock(
                _lock_path(folder, self._client_id),
                held=lambda holder: _locked(path, holder),
                foreign=lambda what: ParameterError(
                    "resume", True, f"False while {_lock_path(folder, self._client_id)} is {what}"
                ),
            )
            weakref.finalize(self, lock.release)
            self._locks[folder] = lock

    def release(self) -> None:
        """Release all locks, so that another process can resume the buffer."""
        while self._locks:
            self._locks.popitem()[1].release()

    def before_save(self, path: str | Path) -> None:
        """Raise if a save would overwrite steps that this buffer does not have, or a file that another buffer resumed.

        Raises:
            BufferLocked: another buffer has resumed this buffer, or the buffer saved at `path`.
            BufferSaveConflict: another buffer resumed this buffer, and was saved at `path`.
            ForkedError: this process was forked from one that had resumed the buffer.
        """
        client_id = self.client_id
        if self._resumed_by:
            raise ForkedError(f"the resumed buffer that was to be saved to {path}", self._resumed_by, os.getpid())
        saved = refuse_if_held(path, client_id)
        if saved is not None and saved.client_id == client_id:
            life, saves = saved.lives[-1]
            if self._lives.get(life, -1) < saves:
                raise BufferSaveConflict(str(path))
        if self._locks:
            self._lock(Path(path))
        elif owner := file_lock.holder(_lock_path(_folder(path), client_id)):
            raise _locked(path, owner)


def refuse_if_held(path: str | Path, mine: bytes = b"") -> SavedLineage | None:
    """Raise if a file holds a buffer that another one has resumed. Returns the file's lineage, or None.

    Raises:
        BufferLocked: another buffer has resumed it.
    """
    try:
        saved = _read_lineage(path)
    except (DataError, OSError):
        return None  # no buffer can resume from such a file
    if saved is None or saved.client_id == mine:
        return saved
    if owner := file_lock.holder(_lock_path(_folder(path), saved.client_id)):
        raise _locked(path, owner)
    return saved


def _read_lineage(path: str | Path) -> SavedLineage | None:
    return SavedLineage.parse(path, datafile.read_owner_state(path))


def _folder(path: str | Path) -> Path:
    return Path(os.path.realpath(path)).parent


def _lock_path(folder: Path, client_id: bytes) -> Path:
    return folder / f".{client_id.hex()}.lock"


def _locked(path: str | Path, holder: Holder) -> BufferLocked:
    return BufferLocked(str(path), holder.pid, holder.host, str(holder))


def save(memory: Memory, path: str | Path) -> int:
    """Write every episode of a memory to an .npz file; return the number of episodes.

    The file is replaced as a whole or not at all, and is on disk when this returns. `numpy.load(path)["obs"]` reads a
    column: one row for each entry, episodes one after the other, oldest first, with lengths in "memory..episodes". A
    ragged column has its elements one after the other, and "obs_length" their number in each entry. All other threads
    wait meanwhile. Open episodes are written with their entries so far.

    Raises:
        BufferLocked: another buffer has resumed the one saved at `path`.
    """
    refuse_if_held(path)
    return write_file(memory, path, dict)


def write_file(
    memory: Memory, path: str | Path, owner: Callable[[], Mapping[str, Any]], *, at: Fault = no_fault
) -> int:
    """Write a memory to a file as `save` does, without the check. `owner` returns state of the memory's owner, as JSON
    carries it; it is called while the memory is held.
    """
    with replacing(path, at=at) as file:
        return write(memory, file, owner)


def write(memory: Memory, file: IO[bytes], owner: Callable[[], Mapping[str, Any]] = dict) -> int:
    """Write a memory to an open file; return the number of episodes."""
    with memory.held():
        inside = HeldEpisodes(memory)
        with zipfile.ZipFile(file, "w") as archive:
            _write(archive, inside, memory, owner())
    return len(inside.slots)


def _write(archive: zipfile.ZipFile, inside: HeldEpisodes, memory: Memory, owner: Mapping[str, Any]) -> None:
    schema = memory.schema
    about = {"form": FORM, "schema": json.loads(schema.to_json()), "parameters": memory.parameters.to_wire()}
    state, arrays = state_of(memory, inside.slots)
    about |= {"capacity": memory.capacity, "memory": state, "owner": owner}
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    _write_array(archive, ABOUT, text.dtype, text.shape, [text])
    for name, array in arrays.items():
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        _write_array(archive, STATE + name, content.dtype, content.shape, [content])
    every = [part for slot in inside.slots for part in inside.row_slices(slot)]
    for name, source in (("number", inside.fact_column("number")), ("weight", inside.weights)):
        parts_ = (source[part] for part in every)
        _write_array(archive, OWN + name, source.dtype, (sum(part.stop - part.start for part in every),), parts_)
    table = [inside.episode_facts(slot) for slot in inside.slots]
    rows = np.zeros(len(table), EPISODE_ROW)
    finals = 0
    for row, facts in zip(rows, table, strict=True):
        for name, value in facts.items():
            row[name] = -1 if value is None else value
        if facts["final"] >= 0:
            row["final"], finals = finals, finals + 1
    entries = int(rows["length"].sum())
    _write_array(archive, EPISODES, EPISODE_ROW, rows.shape, [rows])
    boots = [inside.bootstrap(slot)[None] for slot in inside.slots]
    _write_array(archive, BOOTSTRAP_VALUE, np.dtype("<f4"), (len(boots), *schema.reward_shape), boots)
    for name, dtype in FACTS.items():
        parts = (inside.fact_column(name)[part] for slot in inside.slots for part in inside.row_slices(slot))
        _write_array(archive, OWN + name, np.dtype(dtype), (entries,), parts)
    for name, column in schema.items():
        stretches = [part for slot in inside.slots for part in inside.row_slices(slot)]
        if column.is_ragged:
            lengths = [inside.lengths(name, part) for part in stretches]
            _write_ragged(archive, name, column, lengths, (inside.values(name, part).values for part in stretches))
        else:
            parts = (inside.column(name)[part] for part in stretches)
            _write_array(archive, name, column.dtype, (entries, *column.shape), parts)
    ends = [facts["final"] for facts in table if facts["final"] >= 0]
    for name in schema.states:
        column = schema[name]
        if column.is_ragged:
            lengths = [np.array([len(inside.final(name, row))], "<i8") for row in ends]
            _write_ragged(archive, FINAL + name, column, lengths, (inside.final(name, row) for row in ends))
        else:
            states = (inside.final(name, row)[None] for row in ends)
            _write_array(archive, FINAL + name, column.dtype, (finals, *column.shape), states)


def _write_ragged(
    archive: zipfile.ZipFile, name: str, column: Column, lengths: list[NDArray[np.int64]], parts: Any
) -> None:
    rows, total = sum(map(len, lengths)), sum(int(part.sum()) for part in lengths)
    _write_array(archive, f"{name}_length", np.dtype("<i8"), (rows,), lengths)
    _write_array(archive, name, column.dtype, (total, *column.element), parts)


def _write_array(archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], parts: Any) -> None:
    with archive.open(name + ".npy", "w", force_zip64=True) as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype).tobytes())
