"""Reader of saved memories: episodes from a file, checked while they are read in parts. Errors name the damage."""

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
from .dataset import FACTS, Episode, first_nonfinite_column, put
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
    MemoryRestoration,
    RowLayout,
)
from .parameters import Parameters
from .schema import Schema

Source: TypeAlias = str | Path | IO[bytes]
"""A file: its path, or a binary file that is open for reading, at any position."""
_FACTS: Final = {**FACTS, "number": "<i8", "weight": "<f8"}
_STRETCH: Final = 4 * MiB
_MAX_ELEMENTS: Final = 64 * MiB  # elements of a ragged value, as in a schema


@dataclass(frozen=True)
class About:
    """Summary of a saved memory."""

    schema: Schema
    parameters: Parameters
    capacity: int
    """Capacity of the saved memory."""
    episodes: int
    entries: int


def read_summary(path: Source) -> About:
    """Return the summary of a saved file, without reading its entries. Raises as `load`."""
    with _OpenFile(path) as file:
        return file.about


def read_owner_state(path: Source) -> dict[str, Any]:
    """Return the state that a saved memory's owner kept beside it. Raises as `load`."""
    with _OpenFile(path) as file:
        return file.owner


def load(path: Source) -> Iterator[Episode]:
    """Yield the episodes of a saved file, the oldest first.

    Raises:
        DataError: the file is damaged, of a newer form, or not a saved memory; names the problem.
        OSError: the file cannot be read.
    """
    with _OpenFile(path) as file:
        yield from file.episodes()


def fill(memory: Memory, path: Source) -> int:
    """Add the episodes of a saved file to a memory; return the number of episodes.

    Raises:
        DataError: see `load`; episodes read before the damage stay in the memory.
        ParameterError: the file has another schema.
    """
    saved = read_summary(path)
    if saved.schema != memory.schema:
        raise ParameterError.with_text(
            f"{path} has the schema {saved.schema}, but the memory has {memory.schema}. Nothing was changed."
        )
    count = 0
    for episode in load(path):
        put(memory, episode)
        count += 1
    return count


def restore(memory: Memory, path: Source) -> dict[str, Any]:
    """Restore a saved memory into an empty one, with its entries in their places and the state of its draws. Returns
    the state that its owner kept beside it.

    If capacity, page rows or `live` differ from the saved memory's, episodes are added one after the other, under new
    numbers; open ones end.

    Raises:
        DataError: see `load`. The memory is not usable then.
    """
    with _OpenFile(path) as file:
        return file.restore(memory)


class _OpenFile:
    """Open saved file. Each array has its own stream, so that an episode's rows are read from all arrays together."""

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
            text = self._whole(ABOUT if is_ours else "about", np.dtype(np.uint8))  # older forms named the text "about"
            try:
                facts = json.loads(text.tobytes())
                if facts["form"] != FORM:
                    advice = "load it with the version that wrote it, and copy its episodes (memoire.dataset.episodes)"
                    raise self._wrong(f"has form {facts['form']}, this version of memoire reads form {FORM}: {advice}")
                schema, parameters = Schema.from_json(facts["schema"]), Parameters.from_wire(facts["parameters"])
                capacity = int(facts["capacity"])
                self._state, self.owner = dict(facts["memory"]), dict(facts["owner"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if isinstance(error, DataError):
                    raise
                raise self._wrong(f"has an invalid summary of its content: {error}") from error
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
                raise self._wrong(f"has a compressed part {member.filename!r}; memoire writes uncompressed ones")

    def _stream(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> IO[bytes]:
        """Return a stream of an array of exactly this form."""
        file, actual = self._begin(name, dtype)
        if actual != shape:
            raise self._wrong(f"has {name!r} in shape {list(actual)}, expected {list(shape)}")
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
        """Return a small array of one axis; its size must match that of the stored part."""
        file, shape = self._begin(name, dtype)
        stored = self._archive.getinfo(name + ".npy").file_size
        if len(shape) != 1 or not 0 <= shape[0] * dtype.itemsize <= min(stored, self._bytes):
            raise self._wrong(f"has {name!r} with shape {list(shape)}, but holds {stored} bytes of it")
        return self._rows(file, name, shape[0], dtype, ())

    def _rows(
        self, file: IO[bytes], name: str, count: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> NDArray[Any]:
        size = count * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        parts = bytearray()
        while len(parts) < size:  # allocate as data comes, since a header can claim any size
            part = file.read(min(_STRETCH, size - len(parts)))
            if not part:
                raise self._wrong(f"ends in the middle of {name!r}")
            parts += part
        return np.frombuffer(parts, dtype).reshape(count, *shape)

    def episodes(self) -> Iterator[Episode]:
        """Yield every episode, checked."""
        for _, episode in self._each():
            yield episode

    def restore(self, memory: Memory) -> dict[str, Any]:
        """Restore the content in a memory, as the function `restore` does."""
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
            taking = MemoryRestoration(memory, layout, self._state, arrays)
            for place, (rows, episode) in enumerate(self._each()):
                if not taking.put(place, rows, episode.final_state):
                    raise self._wrong("has an invalid number or weight of an entry")
            taking.finish()
            return self.owner

    def _state_array(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        content = self._whole(STATE + name, np.dtype(np.uint8))
        if len(content) % dtype.itemsize:
            raise self._wrong(f"has {len(content)} bytes of {name!r}, which has {dtype.itemsize} per item")
        return content.view(dtype)

    def _each(self) -> Iterator[tuple[Mapping[str, Any], Episode]]:
        """Yield every episode, checked, with the rows of its entries by name: facts, columns, `number` and `weight`."""
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
                if file.read(1):  # at the end of the file, the reader compares the checksum
                    raise self._wrong(f"has more rows of {name!r} than its episodes have")

    def _ragged_streams(self, name: str, column: Column, rows: int) -> dict[str, IO[bytes]]:
        lengths = self._stream(f"{name}_length", np.dtype("<i8"), (rows,))
        values, shape = self._begin(name, column.dtype)
        if shape[1:] != column.element:
            raise self._wrong(f"has {name!r} in shape {list(shape)}, expected [any, *{list(column.element)}]")
        return {f"{name}_length": lengths, name: values}

    def _values(self, streams: Mapping[str, IO[bytes]], name: str, column: Column, count: int) -> Ragged:
        """Return the next values of a ragged column."""
        key = f"{name}_length"
        lengths = self._rows(streams[key], key, count, np.dtype("<i8"), ())
        if (lengths < 0).any() or (lengths > _MAX_ELEMENTS).any():
            raise self._wrong(f"has an invalid length of {name!r}")
        return Ragged(self._rows(streams[name], name, int(lengths.sum()), column.dtype, column.element), lengths)

    def _final(self, streams: Mapping[str, IO[bytes]], name: str, column: Column) -> NDArray[Any]:
        """Return the next final state of a column."""
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
        fields = {name: rows[OWN + name] for name in FACTS}
        weights, priorities, versions = fields["init_w"], fields["priority"], fields["model_version"]
        sound = np.isfinite(weights).all() and (weights >= 0).all() and np.isfinite(priorities).all()
        sound = sound and np.isfinite(fields["born"]).all() and np.isfinite(boot).all() and 0.0 <= multiplier < np.inf
        sound = sound and (versions >= 0).all() and (versions >> 53 == 0).all()
        if not sound or terminated not in (-1, 0, 1):
            raise self._wrong("has an invalid weight, priority, time, model version or end")
        schema, is_open = self.about.schema, bool(facts["is_open"])
        if name := first_nonfinite_column(schema, rows, final):
            raise self._wrong(f"has a {name} that is not finite")
        return Episode(
            columns={name: rows[name] for name in schema.names},
            init_w=weights,
            priority=priorities,
            learned=fields["learned"] != 0,
            born=fields["born"],
            model_version=fields["model_version"],
            drawn=fields["drawn"],
            multiplier=multiplier,
            terminated=None if terminated < 0 else bool(terminated),
            final_state=final,
            bootstrap_value=None if is_open or terminated == 1 else boot,
            update_value=bool(facts["update_value"]),
            update_weight=bool(facts["update_weight"]),
            is_open=is_open,
        )


def _size(archive: zipfile.ZipFile) -> int:
    """Return the size in bytes of the file that contains an archive."""
    assert archive.fp is not None
    return archive.fp.seek(0, 2)


class _NamesTheFile:
    """Context that turns the many errors of NumPy's and Python's readers into a DataError with the file's path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, MemoireError) or not isinstance(error, Exception):
            return
        if not isinstance(error, OSError) or error.errno == errno.EINVAL:  # EINVAL: a position outside of the file
            raise DataError(str(self._path), f"cannot be read: {error}") from error
