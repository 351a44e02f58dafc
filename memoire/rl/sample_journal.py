"""A trainer's samples on disk, as they came: a checkpoint writes only what is new, and any memory is rebuilt of it.

They are records of a `RecordLog`. Files whose samples have left the memory are removed. To rebuild a memory, the
journal gives it buffers as they came: no object of the user's is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memoire import _core
from memoire.arguments import whole
from memoire.disk.record_file import DamagedRecord, FileKind, Record
from memoire.disk.record_log import RecordLog, salvage_log
from memoire.errors import DataError
from memoire.replay.files import Fault, no_fault

from .sample_records import UNREADABLE, packed, unpacked

KIND: Final = FileKind(b"memojrnl", 2, "a trainer's journal of samples")
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
        _core.at_once(self.noting(buffer))
        self.write_if_many()

    def noting(self, buffer: Any) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
        """The calls that note a buffer, for `at_once`; `write_if_many` has to follow."""
        starts = getattr(buffer, "starts", None)
        kept = KeptBuffer(
            list(buffer.memory), None if starts is None else [bool(each) for each in starts],
            bool(getattr(buffer, "continues", False)),
        )  # fmt: skip
        count = _core.setting(self, _pending_samples=self._pending_samples + len(kept))
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
            yield from _unpacked(record)

    @staticmethod
    def salvage(folder: str | Path, missing: list[DataError]) -> Iterator[KeptBuffer]:
        """Read what is left of a damaged journal, oldest first: a program of the user's may keep it in a new one.

        Args:
            folder: Of the journal, which is only read.
            missing: Gets an error for each part that is damaged or not there.
        """
        for record in salvage_log(folder, KIND, SUFFIX, missing):
            if not isinstance(record, DamagedRecord):
                yield from _unpacked(record)

    def close(self) -> None:
        """Let another process have the folder; once is enough. Samples that wait for a write are not written."""
        self._log.close()

    def _write(self) -> None:
        """Append a record of what waits."""
        if self._pending_samples:
            if self._log.files and sum(self._log.files[-1].tags) >= self._part:
                self._log.begin_file()
            written = _core.setting(self, _pending=[], _pending_samples=0)
            self._log.append([(self._pending_samples, packed_buffers(self._pending))], written)


def _unpacked(record: Record) -> Iterator[KeptBuffer]:
    return unpacked_buffers(bytearray(record.payload))


def packed_buffers(buffers: list[KeptBuffer]) -> bytes:
    """Buffers as the body of a record. Raises ParameterError: a sample holds something else than plain values."""
    counts = [len(each) for each in buffers]
    facts = [(each.continues, each.starts is not None) for each in buffers]
    starts = [start for each in buffers for start in each.starts or [False] * len(each)]
    samples = packed([sample for each in buffers for sample in each.memory])
    about = packed([(counts, [int(a) + 2 * int(b) for a, b in facts], bytes(starts))])
    return len(about).to_bytes(4, "little") + about + samples


def unpacked_buffers(body: bytearray) -> Iterator[KeptBuffer]:
    """The buffers of a record's body. Raises DataError: these are other bytes."""
    size = int.from_bytes(body[:4], "little")
    told, samples = unpacked(body[4 : 4 + size]), unpacked(body[4 + size :])
    try:
        ((counts, facts, starts),) = told
        rows = [(int(count), int(fact)) for count, fact in zip(counts, facts, strict=True)]
        starts = bytes(memoryview(starts))
    except UNREADABLE as error:
        raise DataError("a record of samples", f"does not say whose they are: {error}") from error
    if any(count < 0 for count, _ in rows) or not sum(count for count, _ in rows) == len(samples) == len(starts):
        raise DataError("a record of samples", "has another number of samples than it says")
    begin = 0
    for count, fact in rows:
        end = begin + count
        yield KeptBuffer(samples[begin:end], [*map(bool, starts[begin:end])] if fact & 2 else None, bool(fact & 1))
        begin = end
