"""Checked file of records: a header with kind and form, checksummed records, and an end record with their number.

    head      kind, form, layout, 16 random bytes as id of the file, checksum of the file before it, checksum of these
    record    DATA, tag, size, checksum of the payload, checksum of these │ payload
    ...
    END       number of records; a file of a `RecordLog` has no END, its commit counter has the number

The checksum of a record's header continues that of the record before. Any missing, repeated or moved record is found,
and the last checksum stands for the whole file. A file is read from its first to its last byte before any record of it
is used, and nothing is written before the file is known to be whole. Each size is compared with the bytes of the file
before it is used.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeAlias

from memoire.arguments import ClosingContext
from memoire.errors import DataError
from memoire.limits import MiB
from memoire.replay.files import Fault, OwnedFile, no_fault, replacing
from memoire.wire import _bytes

Payload: TypeAlias = bytes | bytearray | memoryview
_HEAD: Final = struct.Struct("<8sII16sQ")
_RECORD: Final = struct.Struct("<IIQQ")  # DATA or END, tag, bytes of the payload or number of records, its checksum
_SUM: Final = struct.Struct("<Q")
HEAD_BYTES: Final = _HEAD.size + _SUM.size
RECORD_BYTES: Final = _RECORD.size + _SUM.size
"""Bytes of a record in addition to its payload."""
WHOLE: Final = 1
"""Layout of a file with an end record."""
APPENDED: Final = 2
"""Layout of a file that is appended to: a commit counter replaces its end record."""
_DATA, _END = 1, 2
_PIECE: Final = 4 * MiB
_FLUSH_BYTES: Final = 64 * MiB


@dataclass(frozen=True)
class FileKind:
    """Kind and form of a file, which are checked before its records."""

    magic: bytes
    """First 8 bytes of the file."""
    form: int
    """Version of the records' format; files of another form are refused."""
    name: str
    """Name of a file of this kind in errors, such as "a trainer's checkpoint"."""


class Record(NamedTuple):
    """Record that was read: tag and payload."""

    tag: int
    """Number below 2**32 that the caller gives a meaning, such as the record's type."""
    payload: bytes


class DamagedRecord(Record):
    """Record whose payload is damaged, with an empty payload; readers that skip damage get it."""


def write(
    path: str | Path,
    kind: FileKind,
    records: Iterable[tuple[int, Payload]],
    *,
    mode: int | None = None,
    predecessor: int = 0,
    at: Fault = no_fault,
) -> int:
    """Write a file of records, which replaces a former one; returns its checksum, which its successor may name.

    The former file stays until the new one is whole and on disk. `records` may be a generator: one record is in memory
    at a time.

    Args:
        path: Path of the file; a link is followed.
        kind: Kind and form of the file.
        records: (tag, payload) of each record.
        mode: Mode of a new file, such as 0o600.
        predecessor: Checksum of the file before it in a series; 0 if it is the first.
        at: Called before each step, so that a test may let it fail: see `replacing`.

    Raises:
        OSError, and errors of `records`: the former file is unchanged, and no draft is left.
    """
    with writing(path, kind, mode=mode, predecessor=predecessor, at=at) as file:
        for tag, payload in records:
            file.put(tag, payload)
    return file.checksum


@contextmanager
def writing(
    path: str | Path, kind: FileKind, *, mode: int | None = None, predecessor: int = 0, at: Fault = no_fault
) -> Iterator[RecordWriter]:
    """Yield a writer of records; its file replaces a former one at the end of the block. See `write`."""
    with replacing(path, mode=mode, at=at) as file:
        writer = RecordWriter(file, kind, predecessor)
        yield writer
        writer.end()


class RecordWriter:
    """Writer of the records of one file, in order."""

    def __init__(self, file: BinaryIO, kind: FileKind, predecessor: int) -> None:
        self._file = file
        self.checksum = write_head(file, kind, WHOLE, predecessor)
        """Checksum of the records so far; after `end`, that of the whole file."""
        self._count = self._unflushed = 0

    def put(self, tag: int, payload: Payload) -> None:
        """Write a record; flushed to disk after each `_FLUSH_BYTES`."""
        self.checksum = write_record(self._file, tag, payload, self.checksum)
        self._count, self._unflushed = self._count + 1, self._unflushed + memoryview(payload).nbytes
        if self._unflushed > _FLUSH_BYTES:
            self._unflushed = 0
            _flush(self._file)

    def end(self) -> None:
        """Write the end record with the number of records."""
        facts = _RECORD.pack(_END, 0, self._count, 0)
        self.checksum = _bytes.checksum(facts, self.checksum)
        self._file.write(facts + _SUM.pack(self.checksum))


def write_head(file: BinaryIO, kind: FileKind, layout: int, predecessor: int) -> int:
    """Write a file's header; returns its checksum."""
    head = _HEAD.pack(kind.magic, kind.form, layout, secrets.token_bytes(16), predecessor)
    chain = _bytes.checksum(head)
    file.write(head + _SUM.pack(chain))
    return chain


def write_record(file: BinaryIO | OwnedFile, tag: int, payload: Payload, chain: int) -> int:
    """Write a record after those with the checksum `chain`; returns the checksum including the record."""
    view = memoryview(payload).cast("B")
    facts = _RECORD.pack(_DATA, tag, len(view), _payload_sum(view))
    chain = _bytes.checksum(facts, chain)
    file.write(facts + _SUM.pack(chain))
    file.write(view)
    return chain


def _payload_sum(view: memoryview) -> int:
    total = 0
    for start in range(0, len(view), _PIECE):
        total = _bytes.checksum(view[start : start + _PIECE], total)
    return total


def _flush(file: BinaryIO) -> None:
    """Sync the bytes so far: a single sync of a large file would delay all threads that wait for the disk."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):  # the file is not read soon: free the page cache for other files
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class RecordReader(ClosingContext):
    """Reader of a file of records, with its position; opening checks the header and kind."""

    def __init__(self, path: str | Path, kind: FileKind, layout: int | None) -> None:
        self.path, self.kind = Path(path), kind
        try:
            self._file = self.path.open("rb", buffering=_PIECE)
        except (OSError, ValueError) as error:  # a zero byte in a path is a ValueError
            raise self._wrong(f"cannot be read ({error})") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            """Size of the file in bytes."""
            self.chain = self.place = 0
            """Checksum of all records read so far, and the position after them in bytes."""
            self.id, self.predecessor = self._read_head(layout)
            """Id of the file, 16 bytes; and the checksum of the file before it in a series, or 0."""
        except OSError as error:
            self._file.close()
            raise self._wrong(f"cannot be read ({error})") from error
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; later calls do nothing."""
        self._file.close()

    def _wrong(self, problem: str) -> DataError:
        return DataError(str(self.path), problem)

    def _read_head(self, expected: int | None) -> tuple[bytes, int]:
        self._file.seek(0)
        head, check = self._file.read(_HEAD.size), self._file.read(_SUM.size)
        if len(head) < 12 or not head.startswith(self.kind.magic):
            raise self._wrong(f"is not {self.kind.name}")
        form = int.from_bytes(head[8:12], "little")
        if form != self.kind.form:  # another form may compute another checksum
            readable = f"this version of memoire reads form {self.kind.form}"
            raise self._wrong(f"is {self.kind.name} of form {form}, or it is damaged; {readable}")
        chain = _bytes.checksum(head)
        if len(head) < _HEAD.size or _SUM.pack(chain) != check:
            raise self._wrong("is damaged at its beginning")
        _, _, self.layout, identity, predecessor = _HEAD.unpack(head)
        if self.layout not in (WHOLE, APPENDED) or expected not in (None, self.layout):
            raise self._wrong(f"has layout {self.layout}, but must have layout {expected or WHOLE}")
        self.chain, self.place = chain, HEAD_BYTES
        return bytes(identity), int(predecessor)

    def rewind(self) -> None:
        """Let `scan` begin again with the first record. Raises DataError if the file was changed."""
        if self._read_head(self.layout)[0] != self.id:
            raise self._wrong("was changed while it was read")

    def last(self, size: int) -> bytes | None:
        """Return the last payload, of `size` bytes; None if it is damaged or has another size. Call `rewind` next."""
        place = self.size - 2 * RECORD_BYTES - size
        self._file.seek(max(0, place))
        facts, _, payload = self._file.read(_RECORD.size), self._file.read(_SUM.size), self._file.read(size)
        is_whole = place >= HEAD_BYTES and _RECORD.unpack(facts)[2:] == (size, _payload_sum(memoryview(payload)))
        return payload if is_whole else None

    def scan(self, *, keep: bool, damage: list[DataError] | None = None) -> Iterator[Record]:
        """Yield the records from the position on. With `damage` nothing is raised: the list gets the error of each
        damaged record, which is yielded without payload; a record with a damaged header ends the iteration.
        """
        try:
            yield from self._scan(keep, damage)
        except DataError as error:
            if damage is None:
                raise
            damage.append(error)

    def _scan(self, keep: bool, damage: list[DataError] | None) -> Iterator[Record]:
        count = 0
        while self.place < self.size or self.layout == WHOLE:
            kind, tag, size, check = self._read_facts()
            begin = self.place + RECORD_BYTES
            if kind == _END and self.layout == WHOLE:
                if size != count or begin != self.size:
                    raise self._wrong(f"has {count} records and {self.size} bytes, but its end says otherwise")
                return
            if kind != _DATA or size > self.size - begin:
                raise self._wrong(f"has an impossible record at byte {begin}")
            payload, total = self._read_payload(size, keep=keep)
            if total != check:
                error = self._wrong(f"is damaged within the {size} bytes from byte {begin} on")
                if damage is None:
                    raise error
                damage.append(error)
            count, self.place = count + 1, begin + size
            yield Record(tag, payload) if total == check else DamagedRecord(tag, b"")

    def _read_facts(self) -> tuple[int, int, int, int]:
        facts, check = self._file.read(_RECORD.size), self._file.read(_SUM.size)
        if len(check) < _SUM.size:
            raise self._wrong(f"is cut off at byte {self.size}: its end is missing")
        chain = _bytes.checksum(facts, self.chain)
        if _SUM.pack(chain) != check:
            raise self._wrong(f"is damaged at byte {self.place}")
        self.chain = chain
        return _RECORD.unpack(facts)

    def _read_payload(self, size: int, *, keep: bool) -> tuple[bytes, int]:
        """Return the next `size` bytes (b"" unless `keep`) and their checksum; -1 if the file is shorter."""
        total = 0
        if keep:
            payload = self._file.read(size)
            return payload, _payload_sum(memoryview(payload)) if len(payload) == size else -1
        for start in range(0, size, _PIECE):
            total = _bytes.checksum(self._file.read(min(_PIECE, size - start)), total)
        return b"", total


class CheckedFile(RecordReader):
    """File of records that was read completely and found whole when it was opened. Several readers may open one file.

    Raises:
        DataError: the file cannot be read, is of another kind or form, cut off or damaged. The file is never changed.
    """

    def __init__(self, path: str | Path, kind: FileKind) -> None:
        super().__init__(path, kind, WHOLE)
        try:
            self.num_records = sum(1 for _ in self.scan(keep=False))
            self.checksum = self.chain
            """Checksum of the whole file, which its successor names."""
        except OSError as error:
            self.close()
            raise self._wrong(f"cannot be read ({error})") from error
        except BaseException:
            self.close()
            raise

    def records(self) -> Iterator[Record]:
        """Yield every record, in the order of writing; a payload is new bytes. Checksums are compared again.

        Raises:
            DataError: the file was changed since it was opened.
        """
        self.rewind()
        yield from self.scan(keep=True)


def salvage(path: str | Path, kind: FileKind, missing: list[DataError]) -> Iterator[Record]:
    """Yield the readable records of a damaged file.

    Args:
        path: Path of the file, which is only read.
        kind: Kind and form of the file.
        missing: List that gets an error for each part that cannot be read.
    """
    try:
        with RecordReader(path, kind, None) as reader:
            yield from reader.scan(keep=True, damage=missing)
    except DataError as error:
        missing.append(error)
