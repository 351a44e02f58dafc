"""A trainer's samples on disk, as they came: a checkpoint writes only what is new, and any memory is rebuilt of it.

They are records of a `RecordLog`. Files whose samples have left the memory are removed. To rebuild a memory, the
journal gives it buffers as they came: no object of the user's is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from memoire.building import DamagedRecord, Fault, FileKind, RecordLog, at_once, no_fault, salvage_log, setting, whole
from memoire.errors import DataError
from memoire.kinds import pack, unpack

from .trees import Structure, assembled, leaves_of, paths_of, structure_of

KIND: Final = FileKind(b"memojrnl", 3, "a trainer's journal of samples")
VALUES, ARRAYS, SCALARS, NUMBERS = range(4)
"""How a column is stored: a list; rows of one array, which were arrays, numbers of NumPy, or numbers of Python."""
_DTYPES: Final[dict[type, str]] = {bool: "?", int: "<i8", float: "<f8"}
PARTS: Final = 32
"""A file has this share of the memory's samples."""
MAX_PENDING: Final = 4096
"""Samples that wait for a write at most: what a killed process loses."""
SUFFIX: Final = ".samples"


@dataclass
class KeptBuffer:
    """Samples of one worker, as a memory takes them."""

    memory: list[Any]
    starts: list[bool] | None = None
    """For each sample, whether it is a reset's; None if that was not said."""
    continues: bool = False
    """Whether the first one follows the last sample before it."""

    def __len__(self) -> int:
        return len(self.memory)


class SampleJournal:
    """Samples in files of a folder, oldest first. For one process, which has its lock, and one thread.

    Args:
        folder: Is made. What is in it is gone on from.
        capacity: Samples that the memory holds: so many are kept here, and a little more.
        at: Called before each step, so that a test may let it fail: see `RecordLog`.

    Raises:
        DataError: a file of the folder is damaged, missing or another one; nothing was changed.
        StateError: another process has the folder.
        OSError: the folder cannot be made, read or written.
    """

    def __init__(self, folder: str | Path, capacity: int, *, at: Fault = no_fault) -> None:
        self._capacity = whole("capacity", capacity, 1)
        self._part = max(1, capacity // PARTS)
        self._pending: list[KeptBuffer] = []
        self._pending_samples = 0
        self._log = RecordLog(folder, KIND, SUFFIX, at=at)

    def __len__(self) -> int:
        """Samples that are here, those included that wait for a write."""
        return sum(sum(file.tags) for file in self._log.files) + self._pending_samples

    def __enter__(self) -> SampleJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._log.folder

    @property
    def series(self) -> str:
        """Names this journal, in hex: a checkpoint says which one belongs to it."""
        return self._log.series

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._log.files)

    def keep(self, buffer: Any) -> None:
        """Note a buffer: its `memory`, and `starts` and `continues` if it has them. On disk soon, at once by `commit`.

        Raises:
            ParameterError: a sample holds something else than plain values and arrays.
            OSError: it cannot be written. It waits for the next write.
        """
        at_once(self.noting(buffer))
        self.write_if_many()

    def noting(self, buffer: Any) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
        """The calls that note a buffer, for `at_once`; `write_if_many` has to follow."""
        starts = getattr(buffer, "starts", None)
        kept = KeptBuffer(
            list(buffer.memory), None if starts is None else [bool(each) for each in starts],
            bool(getattr(buffer, "continues", False)),
        )  # fmt: skip
        count = setting(self, _pending_samples=self._pending_samples + len(kept))
        return [(self._pending.append, (kept,)), *count]

    def write_if_many(self) -> None:
        """Write what was noted, if it is as much as one record holds. Raises as `keep`."""
        if self._pending_samples >= min(MAX_PENDING, self._part):
            self._write()

    def commit(self) -> None:
        """Have all samples on disk, and remove files that the memory needs no more.

        Raises:
            OSError: it cannot be written. The samples wait for the next commit.
        """
        self._write()
        samples = [sum(file.tags) for file in self._log.files]
        spare = sum(samples) - self._capacity - self._part
        count = 0
        while count < len(samples) - 1 and samples[count] <= spare:
            spare -= samples[count]
            count += 1
        self._log.remove(count)

    def buffers(self) -> Iterator[KeptBuffer]:
        """All buffers, oldest first, one record in memory at a time; those that wait for a write are not among them.

        Raises:
            DataError: a file was changed since the journal was opened.
        """
        for record in self._log.records():
            yield from unpacked_buffers(record.payload)

    @staticmethod
    def salvage(folder: str | Path, missing: list[DataError]) -> Iterator[KeptBuffer]:
        """Read what is left of a damaged journal, oldest first: a program of the user's may keep it in a new one.

        Args:
            folder: Of the journal, which is only read.
            missing: Gets an error for each part that is damaged or not there.
        """
        for record in salvage_log(folder, KIND, SUFFIX, missing):
            if not isinstance(record, DamagedRecord):
                yield from unpacked_buffers(record.payload)

    def close(self) -> None:
        """Let another process have the folder; once is enough. Samples that wait for a write are not written."""
        self._log.close()

    def _write(self) -> None:
        """Append a record of what waits."""
        if self._pending_samples:
            if self._log.files and sum(self._log.files[-1].tags) >= self._part:
                self._log.begin_file()
            written = setting(self, _pending=[], _pending_samples=0)
            self._log.append([(self._pending_samples, packed_buffers(self._pending))], written)


def packed_buffers(buffers: list[KeptBuffer]) -> bytes:
    """Buffers as the body of a record: a plain value (`wire.values`). Samples that follow each other and are nested
    alike are a run: each of their leaves is one column, and a column whose values are all the same is stored once.

    Raises:
        ParameterError: a sample holds something else than plain values; says where.
    """
    about = [(len(each), each.continues, None if each.starts is None else bytes(each.starts)) for each in buffers]
    runs = []
    for structure, rows in _runs(sample for each in buffers for sample in each.memory):
        columns = [
            _column([row[place] for row in rows], f"sample{path}") for place, path in enumerate(paths_of(structure))
        ]
        runs.append((len(rows), assembled(structure, [None] * len(columns)), columns))
    return pack((about, runs))


def _runs(samples: Iterable[Any]) -> Iterator[tuple[Structure, list[list[Any]]]]:
    """(structure, leaves of each) of samples that follow each other and are alike in all but values."""
    forms = ((structure_of(sample), leaves_of(sample)) for sample in samples)
    for (structure, _), rows in groupby(forms, lambda each: (each[0], [_form(leaf) for leaf in each[1]])):
        yield structure, [leaves for _, leaves in rows]


def _form(leaf: Any) -> Any:
    """What leaves of one column have in common."""
    return (type(leaf), leaf.dtype, leaf.shape) if isinstance(leaf, np.ndarray | np.generic) else type(leaf)


def _column(values: list[Any], path: str) -> tuple[int, bytes]:
    """How values are stored, and that as bytes."""
    kind, rows = VALUES, cast(Any, values)
    with suppress(OverflowError):  # a whole number beyond 64 bits
        if isinstance(values[0], np.ndarray):
            # Many small arrays are put together three times as fast by `concatenate` as by `stack`.
            rows = np.concatenate(values) if values[0].ndim else np.stack(values)
            kind, rows = ARRAYS, rows.reshape(len(values), *values[0].shape)
        elif isinstance(values[0], np.generic):
            kind, rows = SCALARS, np.array(values)
        elif type(values[0]) in _DTYPES:
            kind, rows = NUMBERS, np.array(values, _DTYPES[type(values[0])])
    is_same = rows == rows[:1] * len(rows) if kind == VALUES else rows.tobytes() == rows[:1].tobytes() * len(rows)
    return kind, pack(rows[:1] if is_same else rows, path)


def unpacked_buffers(body: bytes) -> Iterator[KeptBuffer]:
    """The buffers of a record's body; arrays are views of larger ones. Raises DataError: these are other bytes."""
    try:
        about, runs = unpack(body, "a record of samples")
        samples = [sample for count, template, columns in runs for sample in _samples(count, template, columns)]
        found, begin = [], 0
        for count, continues, starts in about:
            is_start = None if starts is None else [*map(bool, starts)]
            kept = KeptBuffer(samples[begin : begin + count], is_start, continues)
            if count < 0 or len(kept) != count or len(kept.starts or kept.memory) != count:
                raise ValueError("a buffer has another number of samples than it says")
            found.append(kept)
            begin += count
        if begin != len(samples):
            raise ValueError(f"{len(samples) - begin} samples belong to no buffer")
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError, StopIteration) as error:
        if isinstance(error, DataError):
            raise
        raise DataError("a record of samples", f"cannot be read: {error}") from error
    yield from found


def _samples(count: int, template: Any, columns: list[tuple[int, bytes]]) -> list[Any]:
    structure, leaves = structure_of(template), []
    for kind, data in columns:
        rows = unpack(data, "a record of samples")
        if len(rows) not in (1, count):
            raise ValueError("a column has another length than its run")
        if kind == ARRAYS:
            # With "...", one of no dimension stays an array.
            found = list(rows) if rows.ndim > 1 else [rows[place, ...] for place in range(len(rows))]
            leaves.append([found[0].copy() for _ in range(count)] if len(rows) < count else found)
        else:
            found = rows.tolist() if kind == NUMBERS else list(rows)
            leaves.append(found * count if len(rows) < count else found)
    if len(leaves) != len(leaves_of(template)):
        raise ValueError("samples have other leaves than columns")
    return [assembled(structure, row) for row in (zip(*leaves, strict=True) if leaves else [()] * count)]
