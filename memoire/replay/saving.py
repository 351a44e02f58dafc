"""Which saved buffer goes on from which: one goes on at a time, and none writes over steps that it does not have.

    client id    16 random bytes that name a buffer; a copy or a load has another one, `load(resume=True)` the same
    lives        [["9f3c...", 17], ["07aa...", 3]]: each making and each resuming begins a life, which numbers its
                 saves; these lives of a buffer, up to these saves, are its past

A file is a buffer's past if its newest life and save are among these; only then the buffer may take its place. A buffer
that resumes a file locks its lineage in its folder, by a file `.CLIENT_ID.lock`.

Episodes of a memory into a file that appears whole or not at all.
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
from memoire.errors import BufferLocked, DataError, ForkedError, NotItsPast, ParameterError

from . import datafile
from . import files as file_lock
from .columns import Column
from .dataset import FACTS, HeldEpisodes
from .files import Fault, FileLock, Holder, no_fault, replacing
from .memory import Memory
from .memory_state import ABOUT, BOOTSTRAP_VALUE, EPISODE_ROW, EPISODES, FINAL, FORM, OWN, STATE, state_of


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
    return SavedLineage.of(path, datafile.beside(path))


def _folder(path: str | Path) -> Path:
    return Path(os.path.realpath(path)).parent


def _beside(folder: Path, client_id: bytes) -> Path:
    return folder / f".{client_id.hex()}.lock"


def _locked(path: str | Path, holder: Holder) -> BufferLocked:
    return BufferLocked(str(path), holder.pid, holder.host, str(holder))


def save(memory: Memory, path: str | Path) -> int:
    """Write every episode of a memory to an .npz file; returns how many.

    The file appears whole or not at all, and is on disk when this returns. `numpy.load(path)["obs"]` is a quick look:
    one row for each entry, episodes one after the other, oldest first, as long as "memory..episodes" says. A ragged
    column has its elements one after the other, and "obs_length" says how many each entry has. Other threads wait
    meanwhile. Open episodes are written as far as they have come.

    Raises:
        BufferLocked: a buffer that is saved there was resumed, and goes on.
    """
    refuse_if_held(path)
    return write_file(memory, path, dict)


def write_file(
    memory: Memory, path: str | Path, owner: Callable[[], Mapping[str, Any]], *, at: Fault = no_fault
) -> int:
    """The same, unchecked. `owner` gives what the memory's owner keeps beside it, as JSON carries it; it is asked while
    the memory is held.
    """
    with replacing(path, at=at) as file:
        return write(memory, file, owner)


def write(memory: Memory, file: IO[bytes], owner: Callable[[], Mapping[str, Any]] = dict) -> int:
    """The same into a file that is open; returns how many episodes there are."""
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
    every = [part for slot in inside.slots for part in inside.stretches(slot)]
    for name, source in (("number", inside.fact("number")), ("weight", inside.weights)):
        parts_ = (source[part] for part in every)
        _write_array(archive, OWN + name, source.dtype, (sum(part.stop - part.start for part in every),), parts_)
    table = [inside.about(slot) for slot in inside.slots]
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
        parts = (inside.fact(name)[part] for slot in inside.slots for part in inside.stretches(slot))
        _write_array(archive, OWN + name, np.dtype(dtype), (entries,), parts)
    for name, column in schema.items():
        stretches = [part for slot in inside.slots for part in inside.stretches(slot)]
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
