"""Episodes out of a file: checked while they are read, a stretch at a time. Damage is refused by name."""

from __future__ import annotations

import errno
import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from memoire.errors import DataError, MemoireError, ParameterError
from memoire.limits import MiB

from .columns import Column, Ragged
from .dataset import FACTS, Episode, not_finite, put
from .memory import Memory
from .memory_state import (
    ABOUT,
    ARRAYS,
    BOOTSTRAP_VALUE,
    EPISODE_ROW,
    EPISODES,
    FINAL,
    FORM,
    OWN,
    STATE,
    RowLayout,
    TakingOver,
)
from .parameters import Parameters
from .schema import Schema

Source: TypeAlias = str | Path | IO[bytes]
"""A file by its path, or open to read bytes, at any place."""
_FACTS: Final = {**FACTS, "number": "<i8", "weight": "<f8"}
_STRETCH: Final = 4 * MiB
_MAX_ELEMENTS: Final = 64 * MiB  # of a ragged value, as in a schema


@dataclass(frozen=True)
class About:
    """What a file holds."""

    schema: Schema
    parameters: Parameters
    capacity: int
    """Of the memory that was saved."""
    episodes: int
    entries: int


def about(path: Source) -> About:
    """What a saved file holds, without reading its entries. Raises as `load`."""
    with _OpenFile(path) as file:
        return file.about


def beside(path: Source) -> dict[str, Any]:
    """What the owner of a saved memory kept beside it. Raises as `load`."""
    with _OpenFile(path) as file:
        return file.owner


def load(path: Source) -> Iterator[Episode]:
    """The episodes of a saved file, one by one, the oldest first.

    Raises:
        DataError: the file is not one, is damaged, or of a newer form; says what was found.
        OSError: it cannot be read.
    """
    with _OpenFile(path) as file:
        yield from file.episodes()


def fill(memory: Memory, path: Source) -> int:
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


def restore(memory: Memory, path: Source) -> dict[str, Any]:
    """Have an empty memory go on as the one that was saved: with its entries where they lay, and all that its draws
    follow from. Returns what its owner kept beside it.

    If it has another capacity or form of rows than the saved one, or is not live as that was, its episodes are put in
    one after the other, under new numbers; open ones end.

    Raises:
        DataError: see `load`. The memory cannot be used then.
    """
    with _OpenFile(path) as file:
        return file.restore(memory)


class _OpenFile:
    """A saved file while it is read: every array has a stream of its own, so that episodes come together row by row."""

    def __init__(self, source: Source) -> None:
        self._path = (
            Path(source) if isinstance(source, str | Path) else Path(str(getattr(source, "name", "(in memory)")))
        )
        with ExitStack() as opening, self._explained():
            self._stack = opening
            self._archive = opening.enter_context(zipfile.ZipFile(source))
            self._bytes = _size(self._archive)
            self._check_members()
            is_ours = ABOUT + ".npy" in self._archive.namelist()
            text = self._whole(ABOUT if is_ours else "about", np.dtype(np.uint8))  # of a former form
            try:
                told = json.loads(text.tobytes())
                if told["form"] != FORM:
                    advice = "load it with the version that wrote it, and copy its episodes (memoire.dataset.episodes)"
                    raise self._wrong(f"has form {told['form']}, this version of memoire reads form {FORM}: {advice}")
                schema, parameters = Schema.from_json(told["schema"]), Parameters.from_wire(told["parameters"])
                capacity = int(told["capacity"])
                self._state, self.owner = dict(told["memory"]), dict(told["owner"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if isinstance(error, DataError):
                    raise
                raise self._wrong(f"does not say what it holds: {error}") from error
            self._table = self._whole(EPISODES, EPISODE_ROW)
            lengths = self._table["length"]
            if (lengths < 1).any():
                raise self._wrong("has an episode without entries")
            self.about = About(schema, parameters, capacity, len(lengths), int(lengths.sum()))
            self._stack = opening.pop_all()

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _wrong(self, problem: str) -> DataError:
        return DataError(str(self._path), problem)

    def _explained(self) -> _NamesTheFile:
        return _NamesTheFile(self._path)

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
        if len(shape) != 1 or not 0 <= shape[0] * dtype.itemsize <= min(stored, self._bytes):
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
        for _, episode in self._each():
            yield episode

    def restore(self, memory: Memory) -> dict[str, Any]:
        """See `restore`."""
        with self._explained():
            mine = (memory.capacity, memory.contents()["page_rows"], memory.live)
            if mine != tuple(self._state[name] for name in ("capacity", "page_rows", "live")):
                for _, episode in self._each():
                    put(memory, episode)
                memory.limit_ragged(self._state["ragged_limit"])
                memory.saw_model(self._state["engine"]["newest_model"])
                memory._go_on(float(self._state["engine"]["max_priority"]))
                return self.owner
            arrays = {name: self._state_array(name, dtype) for name, dtype in ARRAYS.items()}
            arrays |= {name: self._state_array(name, np.dtype("<i8")) for name in ("slots", "left")}
            size = math.prod(memory.schema.reward_shape)
            layout = RowLayout(self._state, arrays, self._table["length"], size, self._wrong)
            taking = TakingOver(memory, layout, self._state, arrays)
            for place, (rows, episode) in enumerate(self._each()):
                if not taking.put(place, rows, episode.final_state):
                    raise self._wrong("has a number or weight of an entry that cannot be")
            taking.finish()
            return self.owner

    def _state_array(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        content = self._whole(STATE + name, np.dtype(np.uint8))
        if len(content) % dtype.itemsize:
            raise self._wrong(f"has {len(content)} bytes of {name!r}, of which each takes {dtype.itemsize}")
        return content.view(dtype)

    def _each(self) -> Iterator[tuple[Mapping[str, Any], Episode]]:
        """Every episode, checked, with the rows of its entries by name: facts, columns, `number` and `weight`."""
        with self._explained():
            schema, entries = self.about.schema, self.about.entries
            forms: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
            forms = {OWN + name: (np.dtype(dtype), ()) for name, dtype in _FACTS.items()}
            forms |= {name: (c.dtype, c.shape) for name, c in schema.items() if not c.is_ragged}
            streams = {name: self._stream(name, dtype, (entries, *shape)) for name, (dtype, shape) in forms.items()}
            finals = int((self._table["final"] >= 0).sum())
            states = {FINAL + name: schema[name] for name in schema.states}
            fixed = {name: column for name, column in states.items() if not column.is_ragged}
            streams |= {name: self._stream(name, c.dtype, (finals, *c.shape)) for name, c in fixed.items()}
            ragged = [(name, schema[name], entries) for name in schema.ragged]
            ragged += [(name, column, finals) for name, column in states.items() if column.is_ragged]
            for name, column, rows_ in ragged:
                streams |= self._ragged_streams(name, column, rows_)
            boots = self._stream(BOOTSTRAP_VALUE, np.dtype("<f4"), (len(self._table), *schema.reward_shape))
            for facts in self._table:
                length = int(facts["length"])
                rows: dict[str, Any] = {
                    name: self._rows(streams[name], name, length, *form) for name, form in forms.items()
                }
                rows |= {name: self._values(streams, name, schema[name], length) for name in schema.ragged}
                boot = self._rows(boots, BOOTSTRAP_VALUE, 1, np.dtype("<f4"), schema.reward_shape)[0]
                final = None
                if facts["final"] >= 0:
                    final = {name: self._final(streams, name, schema[name]) for name in schema.states}
                yield rows, self._episode(facts, rows, final, boot)
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
        if (lengths < 0).any() or (lengths > _MAX_ELEMENTS).any():
            raise self._wrong(f"has a length of {name!r} that cannot be")
        return Ragged(self._rows(streams[name], name, int(lengths.sum()), column.dtype, column.element), lengths)

    def _final(self, streams: Mapping[str, IO[bytes]], name: str, column: Column) -> NDArray[Any]:
        """The next final state of a column."""
        key = FINAL + name
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
        told = {name: rows[OWN + name] for name in FACTS}
        weights, priorities, versions = told["init_w"], told["priority"], told["model_version"]
        sound = np.isfinite(weights).all() and (weights >= 0).all() and np.isfinite(priorities).all()
        sound = sound and np.isfinite(told["born"]).all() and np.isfinite(boot).all() and 0.0 <= multiplier < np.inf
        sound = sound and (versions >= 0).all() and (versions >> 53 == 0).all()
        if not sound or terminated not in (-1, 0, 1):
            raise self._wrong("has a weight, priority, time, model's version or end that cannot be")
        schema, is_open = self.about.schema, bool(facts["is_open"])
        if name := not_finite(schema, rows, final):
            raise self._wrong(f"has a {name} that is not finite")
        return Episode(
            columns={name: rows[name] for name in schema.names},
            init_w=weights,
            priority=priorities,
            learned=told["learned"] != 0,
            born=told["born"],
            model_version=told["model_version"],
            drawn=told["drawn"],
            multiplier=multiplier,
            terminated=None if terminated < 0 else bool(terminated),
            final_state=final,
            bootstrap_value=None if is_open or terminated == 1 else boot,
            update_value=bool(facts["update_value"]),
            update_weight=bool(facts["update_weight"]),
            is_open=is_open,
        )


def _size(archive: zipfile.ZipFile) -> int:
    """Bytes of the file that an archive lies in."""
    assert archive.fp is not None
    return archive.fp.seek(0, 2)


class _NamesTheFile:
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
