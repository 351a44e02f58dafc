"""A trainer's samples on disk, as they came: a checkpoint writes only what is new, and any memory is rebuilt of it.

    checkpoint/journal/000000000000000.samples     records of samples, by the number of the first one
                       000000000031250.samples     the newest: records are added at its end

A record is added as a whole, or cut off at the next start. Files whose samples have left the memory are removed. To
rebuild a memory, the journal gives it buffers as they came: no object of the user's is ever stored.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from memoire.arguments import whole
from memoire.errors import DataError
from memoire.wire._bytes import checksum

from .sample_records import packed, unpacked

MAGIC: Final = b"mSJ1"
HEAD: Final = struct.Struct("<4sIQQ")
"""Of a record: its mark, samples, bytes that follow, checksum of all three."""
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


class Files:
    """What a journal does to its folder."""

    def append(self, path: Path, data: bytes) -> None:
        """Add bytes at the end of a file."""
        with path.open("ab") as file:
            file.write(data)

    def sync(self, path: Path) -> None:
        """Have a file, or the names in a folder, on disk."""
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

    def cut(self, path: Path, size: int) -> None:
        """Take what is behind this size off a file."""
        os.truncate(path, size)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink(missing_ok=True)


@dataclass
class _Segment:
    """One file."""

    path: Path
    samples: int = 0
    size: int = 0
    is_synced: bool = field(default=True)


class SampleJournal:
    """Samples in files of a folder, oldest first. For one process and one thread.

    Args:
        folder: Is made. What is in it is gone on from; a record that was not written as a whole is cut off.
        capacity: Samples that the memory holds: so many are kept here, and a little more.
        files: How files are written.

    Raises:
        DataError: a file of the folder is damaged before its end.
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: str | Path, capacity: int, *, files: Files | None = None) -> None:
        self.folder = Path(folder)
        self._capacity = whole("capacity", capacity, 1)
        self._part = max(1, capacity // PARTS)
        self._files = files or Files()
        self._pending: list[KeptBuffer] = []
        self._pending_samples = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self._segments = [self._opened(path) for path in sorted(self.folder.glob(f"*{SUFFIX}"))]
        self._repair()

    def __len__(self) -> int:
        """Samples that are here, those included that wait for a write."""
        return sum(each.samples for each in self._segments) + self._pending_samples

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self._segments)

    def keep(self, buffer: Any) -> None:
        """Note a buffer: its `memory`, and `starts` and `continues` if it has them. Written soon, on disk by `commit`.

        Raises:
            ParameterError: a sample holds something else than plain values and arrays.
            OSError: it cannot be written.
        """
        starts = getattr(buffer, "starts", None)
        kept = KeptBuffer(
            list(buffer.memory), None if starts is None else [bool(each) for each in starts],
            bool(getattr(buffer, "continues", False)),
        )  # fmt: skip
        self._pending.append(kept)
        self._pending_samples += len(kept)
        if self._pending_samples >= min(MAX_PENDING, self._part):
            self._write()

    def commit(self) -> None:
        """Have all samples on disk, and remove files that the memory needs no more.

        Raises:
            OSError: it cannot be written.
        """
        self._write()
        for each in self._segments:
            if not each.is_synced:
                self._files.sync(each.path)
                each.is_synced = True
        self._files.sync(self.folder)
        while (
            len(self._segments) > 1 and sum(each.samples for each in self._segments[1:]) >= self._capacity + self._part
        ):
            self._files.remove(self._segments[0].path)
            del self._segments[0]

    def buffers(self) -> Iterator[KeptBuffer]:
        """All buffers, oldest first, one record in memory at a time; those that wait for a write are not among them.

        Raises:
            DataError: a record is damaged.
        """
        for each in list(self._segments):
            for at, _, body in _records(each.path):
                if body is None:
                    raise DataError(f"{each.path}, byte {at}", "is damaged: its checksum is wrong")
                yield from unpacked_buffers(body)

    def _write(self) -> None:
        """Add a record of what waits."""
        if not self._pending_samples:
            return
        body = packed_buffers(self._pending)
        if not self._segments or self._segments[-1].samples >= self._part:
            self._segments.append(_Segment(self.folder / f"{self._next():015d}{SUFFIX}"))
        segment, samples = self._segments[-1], self._pending_samples
        record = HEAD.pack(MAGIC, samples, len(body), _sum(samples, body)) + body
        self._files.append(segment.path, record)
        segment.samples += samples
        segment.size += len(record)
        segment.is_synced = False
        self._pending, self._pending_samples = [], 0

    def _next(self) -> int:
        """The number of the next sample: behind all that there ever were."""
        if not self._segments:
            return 0
        return int(self._segments[-1].path.stem) + self._segments[-1].samples

    def _opened(self, path: Path) -> _Segment:
        if not path.stem.isdigit():
            raise DataError(str(path), "is no file of a journal of samples: its name is no number")
        found = _Segment(path, size=path.stat().st_size)
        with path.open("rb") as file:
            while head := _head(file.read(HEAD.size)):
                found.samples += head[0]
                file.seek(head[1], os.SEEK_CUR)
        return found

    def _repair(self) -> None:
        """Cut off what a write left unfinished: the last file is read as a whole, and ends before what is damaged."""
        if not self._segments:
            return
        last, size, samples = self._segments[-1], 0, 0
        for at, count, body in _records(last.path):
            if body is None:
                break
            size, samples = at + HEAD.size + len(body), samples + count
        if size < last.size:
            self._files.cut(last.path, size)
        last.size, last.samples = size, samples


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
    (about, *_), samples = unpacked(body[4 : 4 + size]), unpacked(body[4 + size :])
    counts, facts, starts = about
    if not len(counts) == len(facts) or not sum(counts) == len(samples) == len(starts):
        raise DataError("a record of samples", "has another number of samples than it says")
    begin = 0
    for count, fact in zip(counts, facts, strict=True):
        end = begin + count
        yield KeptBuffer(samples[begin:end], [*map(bool, starts[begin:end])] if fact & 2 else None, bool(fact & 1))
        begin = end


def _records(path: Path) -> Iterator[tuple[int, int, bytearray | None]]:
    """(offset, samples, body) of each record of a file; a body of None is the last: it is damaged, or not whole."""
    with path.open("rb") as file:
        left = path.stat().st_size
        while left:
            at, head = file.tell(), _head(file.read(HEAD.size))
            body = bytearray(file.read(head[1])) if head and head[1] <= left - HEAD.size else None
            if head is None or body is None or _sum(head[0], body) != head[2]:
                yield at, 0, None
                return
            yield at, head[0], body
            left -= HEAD.size + len(body)


def _head(data: bytes) -> tuple[int, int, int] | None:
    """(samples, bytes, checksum) of a record that begins so; None if none does."""
    if len(data) < HEAD.size or not data.startswith(MAGIC):
        return None
    _, samples, size, found = HEAD.unpack(data)
    return samples, size, found


def _sum(samples: int, body: bytes | bytearray) -> int:
    return checksum(body, checksum(samples.to_bytes(8, "little")))
