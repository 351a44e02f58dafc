"""Episodes of a memory into a file that appears whole or not at all."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .columns import Column
from .dataset import FACTS, HeldEpisodes
from .dataset_format import ABOUT, BOOTSTRAP_VALUE, EPISODE_ROW, EPISODES, FINAL, FORM, OWN, STATE
from .lineage import refuse_if_held
from .memory import Memory
from .memory_state import state_of
from .replacement import Fault, no_fault, replacing


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
