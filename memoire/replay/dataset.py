"""Whole episodes out of a memory and back into another: files that `numpy.load` reads too, and other libraries' data.

    episodes(memory)          Episode after Episode, oldest first ──▶ put(other, episode)
    save(memory, path)        an .npz: a row for each entry in "obs", "action", ...; episodes and facts beside them
    load(path)                the same episodes again, in a memory of any capacity and other parameters

Nothing is pickled; a file is checked while it is read, and one that is damaged or not ours is refused by name. Neither
way holds more than a stretch of it in memory.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.errors import DataError, MemoireError, ParameterError
from memoire.limits import MiB

from .columns import Column
from .memory import Memory
from .parameters import Parameters
from .ragged import Ragged
from .schema import Schema
from .values import is_finite

FORM: Final = 1
_STRETCH: Final = 4 * MiB
_MOST_ELEMENTS: Final = 64 * MiB  # of a ragged value, as in a schema
_ABOUT: Final = "about"
_EPISODES: Final = "episodes"
_FACTS: Final = {
    "init_w": ("init_w", "<f4"),
    "priority": ("priority", "<f4"),
    "learned": ("learned", "|u1"),
    "born": ("born", "<f8"),
    "drawn": ("drawn", "<u4"),
    "model_version": ("model_version", "<i8"),
}
FACTS: Final = {name: dtype for name, (_, dtype) in _FACTS.items()}
"""Of each entry: what is known of it beside its columns, and the type in which that is saved."""
_EPISODE: Final = np.dtype(
    [
        ("length", "<i8"),
        ("multiplier", "<f8"),
        ("final", "<i8"),  # row of the final states; -1: nobody said
        ("terminated", "|i1"),  # 1, 0, or -1: nobody said how it ended
        ("update_value", "|u1"),
        ("update_weight", "|u1"),
        ("is_open", "|u1"),
    ]
)


@dataclass(frozen=True)
class Episode:
    """An episode as a memory holds it; arrays are copies. T entries, F a column's shape, R the reward's."""

    columns: dict[str, Any]
    """Each column [T, *F], the return column too; a ragged one as `Ragged`."""
    init_w: NDArray[np.float32]
    """[T] factors of the weights."""
    priority: NDArray[np.float32] | None
    """[T] priorities; below 0: none yet. None: those that follow from closing it."""
    learned: NDArray[np.bool_]
    """[T] whether a learner reported the priority."""
    born: NDArray[np.float64] | None
    """[T] Unix seconds at which the entries were added. None: as they are put somewhere."""
    model_version: NDArray[np.int64]
    """[T] of the models that acted."""
    drawn: NDArray[np.uint32] | None = None
    """[T] how often the entries were drawn; None: never."""
    multiplier: float = 1.0
    terminated: bool | None = None
    """None: nobody said how it ended."""
    final_state: dict[str, NDArray[Any]] | None = None
    """The state after the last entry, each state column [*F]."""
    bootstrap_value: NDArray[np.float32] | None = None
    """[*R] value of that state."""
    update_value: bool = True
    update_weight: bool = True
    is_open: bool = False
    """Whether it goes on where it came from; put elsewhere, it ends there and nobody knows how."""

    def __len__(self) -> int:
        return len(self.init_w)


class KeptEpisode(NamedTuple):
    """An episode with what names it for ever: the memory that holds it, and the number of its first entry there."""

    owner: bytes
    number: int
    episode: Episode


def episodes(memory: Memory) -> Iterator[Episode]:
    """The episodes of a memory, the oldest first, then the open ones. The memory is held until the iterator ends."""
    with memory.held():
        inside = _Inside(memory)
        for slot in inside.slots:
            yield inside.episode(slot)


def walk(memory: Memory) -> Iterator[tuple[int, Episode]]:
    """The closed episodes of a memory that goes on meanwhile, oldest first, each with the number of its first entry.

    The memory is held while one of them is copied, and not in between: each is as it is when its turn comes, and those
    that have left by then are not there. As many as there were at the beginning at most.
    """
    slot = number = -1
    for _ in range(memory.num_episodes):
        with memory.held():
            inside = _Inside(memory)
            slot = inside.after(slot, number)
            if slot < 0:
                return
            number, episode = inside.number(slot), inside.episode(slot)
        del inside
        yield number, episode
        del episode


def put(memory: Memory, episode: Episode, lane: int = 0, *, age: NDArray[Any] | None = None) -> NDArray[np.int64]:
    """Add an episode to a memory of the same schema, with all that is known of its entries; returns their new numbers,
    int64 [T].

    What is open in this lane is cleared; the oldest episodes leave where there is no room. With `age`, seconds [T], an
    entry was added so long before its `born`.

    Raises:
        EntryError: a column does not fit.
        EpisodeTooLong: it is longer than the memory. Nothing was added.
    """
    schema = memory.schema
    with memory.held():
        memory.open(lane)
        numbers = np.empty(len(episode), np.int64)
        values = [episode.columns[name] for name in schema.entry_names]
        try:
            for start, stop in _same_model(episode.model_version):
                rows = slice(start, stop)
                part = [value[rows] for value in values]
                numbers[rows] = memory.extend(lane, part, episode.init_w[rows], int(episode.model_version[start]))
        except MemoireError:
            memory.open(lane)
            raise
        memory.close(
            lane,
            multiplier=episode.multiplier,
            update_value=episode.update_value,
            update_weight=episode.update_weight,
            final_state=episode.final_state,
            terminated=episode.terminated,
            bootstrap_value=episode.bootstrap_value,
        )
        drawn = np.zeros(len(episode), np.uint32) if episode.drawn is None else episode.drawn
        found = memory._inside()["meta"][numbers % memory.capacity]
        priority = found["priority"] if episode.priority is None else episode.priority
        born = found["born"] if episode.born is None else episode.born
        facts = (priority, episode.learned.view(np.uint8), born if age is None else born - age, drawn)
        memory._set_facts(numbers, *map(np.ascontiguousarray, facts))
    return numbers


def _same_model(versions: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Stretches in which one model acted."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return itertools.pairwise(edges)


def open_rows(memory: Memory, lane: int) -> NDArray[np.int64]:
    """The rows of a lane's open episode, in order: int64 [T]. The memory is held."""
    inside = _Inside(memory)
    parts = inside.stretches(int(memory._inside()["lanes"]["episode"][lane]))
    return np.concatenate([np.arange(part.start, part.stop, dtype=np.int64) for part in parts])


class _Inside:
    """The arrays of a memory that is held, read as episodes."""

    def __init__(self, memory: Memory) -> None:
        self.schema = memory.schema
        self._memory = memory
        self._inside = memory._inside()
        self._capacity, self._shape = memory.capacity, memory._reward_shape
        self._columns = {
            name: self._typed(name, data, memory.capacity)
            for name, data in zip(memory.schema.names, self._inside["columns"], strict=True)
            if name not in memory.schema.ragged
        }
        self._finals = {
            name: self._typed(name, data, self._inside["final_rows"])
            for name, data in zip(memory.schema.names, self._inside["finals"], strict=True)
            if data is not None and name not in memory.schema.ragged
        }

    @functools.cached_property
    def slots(self) -> list[int]:
        """Of all episodes, the oldest first, open ones at the end."""
        table = self._inside["episodes"]
        opened = np.flatnonzero((table["state"] == 1) & (table["length"] > 0))
        return [*self._closed(), *opened.tolist()]

    def _typed(self, name: str, data: NDArray[np.uint8], rows: int) -> NDArray[Any]:
        column = self.schema[name]
        return data.reshape(-1).view(column.dtype).reshape(rows, *column.shape)

    def _closed(self) -> Iterator[int]:
        slot = int(self._inside["oldest"])
        while slot >= 0:
            yield slot
            slot = int(self._inside["episodes"]["newer"][slot])

    def after(self, slot: int, number: int) -> int:
        """Slot of the closed episode that is next after the one in `slot`, whose first entry has this number; the
        oldest where that one has left, as all before it have then; -1 at the end.
        """
        episode = self._inside["episodes"][slot]
        is_there = slot >= 0 and episode["state"] == 2 and self.number(slot) == number
        return int(episode["newer"] if is_there else self._inside["oldest"])

    def number(self, slot: int) -> int:
        """Number of an episode's first entry, which names it for ever."""
        return int(self._inside["meta"]["number"][self._inside["episodes"]["first_row"][slot]])

    def stretches(self, slot: int) -> Iterator[slice]:
        """The rows of an episode in order, as slices."""
        episode, size = self._inside["episodes"][slot], self._inside["page_rows"]
        row, left = int(episode["first_row"]), int(episode["length"])
        while left:
            page = row // size
            count = min(left, min((page + 1) * size, self._capacity) - row)
            yield slice(row, row + count)
            left -= count
            if left:
                row = int(self._inside["pages"]["after"][page]) * size

    def rows(self, slot: int, source: NDArray[Any]) -> NDArray[Any]:
        """Rows of an episode, copied together."""
        return np.concatenate([source[part] for part in self.stretches(slot)])

    def fact(self, name: str) -> NDArray[Any]:
        """A fact of all rows."""
        meta: NDArray[Any] = self._inside["meta"]
        return meta[_FACTS[name][0]]

    def column(self, name: str) -> NDArray[Any]:
        """A column of all rows; not a ragged one."""
        return self._columns[name]

    def values(self, name: str, rows: slice) -> Ragged:
        """A ragged column of some rows."""
        return self._memory.ragged(name, np.arange(rows.start, rows.stop))

    def lengths(self, name: str, rows: slice) -> NDArray[np.int64]:
        """How many elements a ragged column has in some rows."""
        return self._memory.lengths(name, np.arange(rows.start, rows.stop)).astype("<i8")

    def final(self, name: str, row: int) -> NDArray[Any]:
        """A final state of a column, [*F]."""
        if name in self.schema.ragged:
            return self._memory.ragged(name, np.array([-(row + 2)])).values
        state: NDArray[Any] = self._finals[name][row].copy()
        return state

    def _of_episode(self, name: str, slot: int) -> Any:
        if name not in self.schema.ragged:
            return self.rows(slot, self._columns[name])
        return self._memory.ragged(name, np.concatenate([np.r_[part] for part in self.stretches(slot)]))

    def about(self, slot: int) -> dict[str, Any]:
        """What is known of an episode as a whole."""
        facts = self._inside["episodes"][slot]
        is_open = bool(facts["state"] == 1)
        is_known = bool(facts["ended"]) and not is_open
        return {
            "length": int(facts["length"]),
            "multiplier": float(facts["multiplier"]),
            "final": -1 if is_open else int(facts["final"]),
            "terminated": bool(facts["terminated"]) if is_known else None,
            "update_value": True if is_open else bool(facts["update_value"]),
            "update_weight": True if is_open else bool(facts["update_weight"]),
            "is_open": is_open,
        }

    def bootstrap(self, slot: int) -> NDArray[np.float32]:
        """The value of an episode's final state, [*R]."""
        table = self._inside["bootstraps"]
        size = len(table) // len(self._inside["episodes"])
        value: NDArray[np.float32] = table[slot * size : (slot + 1) * size].reshape(self._shape).copy()
        return value

    def episode(self, slot: int) -> Episode:
        about = self.about(slot)
        final = about.pop("final")
        del about["length"]
        facts: dict[str, Any] = {name: self.rows(slot, self.fact(name)) for name in _FACTS}
        facts["learned"] = facts["learned"].astype(np.bool_)
        return Episode(
            columns={name: self._of_episode(name, slot) for name in self.schema.names},
            **facts,
            final_state=None if final < 0 else {name: self.final(name, final) for name in self.schema.states},
            bootstrap_value=None if about["is_open"] else self.bootstrap(slot),
            **about,
        )


# ---------------------------------------------------------------------------------------------------------- files


def save(memory: Memory, path: str | Path) -> int:
    """Write every episode of a memory to an .npz file; returns how many.

    The file appears whole or not at all, and is on disk when this returns. `numpy.load(path)["obs"]` is a quick look:
    one row for each entry, episodes one after the other, oldest first, as long as "episodes" says. A ragged column has
    its elements one after the other, and "obs_length" says how many each entry has. Other threads wait meanwhile. Open
    episodes are written as far as they have come.
    """
    path = Path(path)
    made = path.with_name(path.name + ".new")
    with memory.held():
        inside = _Inside(memory)
        with zipfile.ZipFile(made, "w") as archive:
            _write(archive, inside, memory)
    with made.open("rb") as file:
        os.fsync(file.fileno())
    made.replace(path)
    return len(inside.slots)


def _write(archive: zipfile.ZipFile, inside: _Inside, memory: Memory) -> None:
    schema = memory.schema
    about = {"form": FORM, "schema": json.loads(schema.to_json()), "parameters": memory.parameters.to_wire()}
    text = np.frombuffer(json.dumps(about | {"capacity": memory.capacity}).encode(), np.uint8)
    _write_array(archive, _ABOUT, text.dtype, text.shape, [text])
    table = [inside.about(slot) for slot in inside.slots]
    rows = np.zeros(len(table), _EPISODE)
    finals = 0
    for row, facts in zip(rows, table, strict=True):
        for name, value in facts.items():
            row[name] = -1 if value is None else value
        if facts["final"] >= 0:
            row["final"], finals = finals, finals + 1
    entries = int(rows["length"].sum())
    _write_array(archive, _EPISODES, _EPISODE, rows.shape, [rows])
    boots = [inside.bootstrap(slot)[None] for slot in inside.slots]
    _write_array(archive, "bootstrap_value", np.dtype("<f4"), (len(boots), *memory._reward_shape), boots)
    for name, (_, dtype) in _FACTS.items():
        parts = (inside.fact(name)[part] for slot in inside.slots for part in inside.stretches(slot))
        _write_array(archive, name, np.dtype(dtype), (entries,), parts)
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
            _write_ragged(archive, f"final.{name}", column, lengths, (inside.final(name, row) for row in ends))
        else:
            states = (inside.final(name, row)[None] for row in ends)
            _write_array(archive, f"final.{name}", column.dtype, (finals, *column.shape), states)


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


@dataclass(frozen=True)
class About:
    """What a file holds."""

    schema: Schema
    parameters: Parameters
    capacity: int
    """Of the memory that was saved."""
    episodes: int
    entries: int


def about(path: str | Path) -> About:
    """What a saved file holds, without reading its entries. Raises as `load`."""
    with _Opened(Path(path)) as file:
        return file.about


def load(path: str | Path) -> Iterator[Episode]:
    """The episodes of a saved file, one by one, the oldest first.

    Raises:
        DataError: the file is not one, is damaged, or of a newer form; says what was found.
        OSError: it cannot be read.
    """
    with _Opened(Path(path)) as file:
        yield from file.episodes()


class _Opened:
    """A saved file while it is read: every array has a stream of its own, so that episodes come together row by row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as opening, self._explained():
            self._stack = opening
            self._archive = opening.enter_context(zipfile.ZipFile(path))
            self._check_members()
            text = self._whole(_ABOUT, np.dtype(np.uint8))
            try:
                told = json.loads(text.tobytes())
                if told["form"] != FORM:
                    raise self._wrong(f"has form {told['form']}, this version of memoire reads form {FORM}")
                schema, parameters = Schema.from_json(told["schema"]), Parameters.from_wire(told["parameters"])
                capacity = int(told["capacity"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if isinstance(error, DataError):
                    raise
                raise self._wrong(f"does not say what it holds: {error}") from error
            self._table = self._whole(_EPISODES, _EPISODE)
            lengths = self._table["length"]
            if (lengths < 1).any():
                raise self._wrong("has an episode without entries")
            self.about = About(schema, parameters, capacity, len(lengths), int(lengths.sum()))
            self._stack = opening.pop_all()

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _wrong(self, problem: str) -> DataError:
        return DataError(str(self._path), problem)

    def _explained(self) -> _Explained:
        return _Explained(self._path)

    def _check_members(self) -> None:
        for member in self._archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise self._wrong(f"has a compressed part {member.filename!r}; memoire writes none")

    def _stream(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> IO[bytes]:
        """An array of exactly this form, ready to be read."""
        file, found = self._begin(name, dtype)
        if found != shape:
            raise self._wrong(f"has {name!r} in shape {list(found)}, expected {list(shape)}")
        return file

    def _begin(self, name: str, dtype: np.dtype[Any]) -> tuple[IO[bytes], tuple[int, ...]]:
        file = self._stack.enter_context(self._archive.open(name + ".npy"))
        version = np.lib.format.read_magic(file)
        if version != (2, 0):
            raise self._wrong(f"has {name!r} in version {version} of NumPy's format, expected 2.0")
        shape, fortran, descr = np.lib.format.read_array_header_2_0(file, max_header_size=10_000)
        if descr != dtype or fortran:
            raise self._wrong(f"has {name!r} as {descr}, expected {dtype}")
        return file, tuple(shape)

    def _whole(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A small array. Its size is that of the part, which lies in the file as it is."""
        file, shape = self._begin(name, dtype)
        stored = self._archive.getinfo(name + ".npy").file_size
        if len(shape) != 1 or not 0 <= shape[0] * dtype.itemsize <= min(stored, self._path.stat().st_size):
            raise self._wrong(f"says that {name!r} has shape {list(shape)}, and holds {stored} bytes of it")
        return self._rows(file, name, shape[0], dtype, ())

    def _rows(
        self, file: IO[bytes], name: str, count: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> NDArray[Any]:
        size = count * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        parts = bytearray()
        while len(parts) < size:  # what a header claims is allocated as it comes
            part = file.read(min(_STRETCH, size - len(parts)))
            if not part:
                raise self._wrong(f"ends in the middle of {name!r}")
            parts += part
        return np.frombuffer(parts, dtype).reshape(count, *shape)

    def episodes(self) -> Iterator[Episode]:
        """Every episode, checked."""
        with self._explained():
            schema, entries = self.about.schema, self.about.entries
            reward = schema[schema.reward].shape if schema.reward is not None else ()
            forms: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
            forms = {name: (np.dtype(dtype), ()) for name, (_, dtype) in _FACTS.items()}
            forms |= {name: (c.dtype, c.shape) for name, c in schema.items() if not c.is_ragged}
            streams = {name: self._stream(name, dtype, (entries, *shape)) for name, (dtype, shape) in forms.items()}
            finals = int((self._table["final"] >= 0).sum())
            states = {f"final.{name}": schema[name] for name in schema.states}
            fixed = {name: column for name, column in states.items() if not column.is_ragged}
            streams |= {name: self._stream(name, c.dtype, (finals, *c.shape)) for name, c in fixed.items()}
            ragged = [(name, schema[name], entries) for name in schema.ragged]
            ragged += [(name, column, finals) for name, column in states.items() if column.is_ragged]
            for name, column, rows_ in ragged:
                streams |= self._ragged_streams(name, column, rows_)
            boots = self._stream("bootstrap_value", np.dtype("<f4"), (len(self._table), *reward))
            for facts in self._table:
                length = int(facts["length"])
                rows: dict[str, Any] = {
                    name: self._rows(streams[name], name, length, *form) for name, form in forms.items()
                }
                rows |= {name: self._values(streams, name, schema[name], length) for name in schema.ragged}
                boot = self._rows(boots, "bootstrap_value", 1, np.dtype("<f4"), reward)[0]
                final = None
                if facts["final"] >= 0:
                    final = {name: self._final(streams, name, schema[name]) for name in schema.states}
                yield self._episode(facts, rows, final, boot)
            for name, file in streams.items():
                if file.read(1):  # reading to the end also compares the checksum
                    raise self._wrong(f"has more of {name!r} than its episodes need")

    def _ragged_streams(self, name: str, column: Column, rows: int) -> dict[str, IO[bytes]]:
        lengths = self._stream(f"{name}_length", np.dtype("<i8"), (rows,))
        values, found = self._begin(name, column.dtype)
        if found[1:] != column.element:
            raise self._wrong(f"has {name!r} in shape {list(found)}, expected [any, *{list(column.element)}]")
        return {f"{name}_length": lengths, name: values}

    def _values(self, streams: Mapping[str, IO[bytes]], name: str, column: Column, count: int) -> Ragged:
        """The next values of a ragged column."""
        key = f"{name}_length"
        lengths = self._rows(streams[key], key, count, np.dtype("<i8"), ())
        if (lengths < 0).any() or (lengths > _MOST_ELEMENTS).any():
            raise self._wrong(f"has a length of {name!r} that cannot be")
        return Ragged(self._rows(streams[name], name, int(lengths.sum()), column.dtype, column.element), lengths)

    def _final(self, streams: Mapping[str, IO[bytes]], name: str, column: Column) -> NDArray[Any]:
        """The next final state of a column."""
        key = f"final.{name}"
        if column.is_ragged:
            return self._values(streams, key, column, 1).values
        state: NDArray[Any] = self._rows(streams[key], key, 1, column.dtype, column.shape)[0]
        return state

    def _episode(
        self,
        facts: np.void,
        rows: Mapping[str, Any],
        final: dict[str, NDArray[Any]] | None,
        boot: NDArray[np.float32],
    ) -> Episode:
        multiplier, terminated = float(facts["multiplier"]), int(facts["terminated"])
        weights, priorities = rows["init_w"], rows["priority"]
        sound = np.isfinite(weights).all() and (weights >= 0).all() and np.isfinite(priorities).all()
        sound = sound and np.isfinite(rows["born"]).all() and np.isfinite(boot).all() and 0.0 <= multiplier < np.inf
        if not sound or terminated not in (-1, 0, 1):
            raise self._wrong("has a weight, priority, time or end that cannot be")
        schema, is_open = self.about.schema, bool(facts["is_open"])
        for name in (*schema.finite, schema.qvest):
            given = [rows[name]] if name is not None else []
            if name in schema.states and final is not None:
                given.append(final[name])
            if not all(map(is_finite, given)):
                raise self._wrong(f"has a {name} that is not finite")
        return Episode(
            columns={name: rows[name] for name in schema.names},
            init_w=weights,
            priority=priorities,
            learned=rows["learned"] != 0,
            born=rows["born"],
            model_version=rows["model_version"],
            drawn=rows["drawn"],
            multiplier=multiplier,
            terminated=None if terminated < 0 else bool(terminated),
            final_state=final,
            bootstrap_value=None if is_open or terminated == 1 else boot,
            update_value=bool(facts["update_value"]),
            update_weight=bool(facts["update_weight"]),
            is_open=is_open,
        )


class _Explained:
    """Says of whatever goes wrong inside which file it was. NumPy's and Python's readers raise many things."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, MemoireError) or not isinstance(error, Exception):
            return
        if not isinstance(error, OSError) or error.errno == errno.EINVAL:  # a place outside of the file
            raise DataError(str(self._path), f"cannot be read: {error}") from error


def fill(memory: Memory, path: str | Path) -> int:
    """Add the episodes of a saved file to a memory; returns how many.

    Raises:
        DataError: see `load`; episodes read before the fault was met are in the memory.
        ParameterError: the file is of another schema.
    """
    saved = about(path)
    if saved.schema != memory.schema:
        raise ParameterError("path", str(path), f"a file of {memory.schema}, not of {saved.schema}")
    count = 0
    for episode in load(path):
        put(memory, episode)
        count += 1
    return count
