"""A checked file of records: what it is, its records one after the other, and an end that says how many there are.

    head      kind, form, layout, 16 random bytes that name this file, checksum of the file before it, checksum of these
    record    DATA, tag, size, checksum of the payload, checksum of these │ payload
    ...
    END       how many records there are; a file of a `RecordLog` has none, its commit counter says so

The checksum of a record's facts begins with that of the record before: a record that was left out, doubled or moved is
missed, and the last of these sums stands for the whole file. A file is read from its first to its last byte before any
record of it is used, and only read as long as it is not known to be whole. No size is believed before it was compared
with the bytes that the file has.
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
"""Of a record, beside its payload."""
WHOLE: Final = 1
"""Layout of a file that has an end."""
APPENDED: Final = 2
"""Layout of a file that is appended to: a commit counter stands for its end."""
_DATA, _END = 1, 2
_PIECE: Final = 4 * MiB
_FLUSH_BYTES: Final = 64 * MiB


@dataclass(frozen=True)
class FileKind:
    """What a file is, and in which form: both are checked before anything else of it."""

    magic: bytes
    """8 bytes with which the file begins."""
    form: int
    """Number of the records' form; files of another one are refused."""
    name: str
    """What errors call it, such as "a trainer's checkpoint"."""


class Record(NamedTuple):
    """A record that was read: a number that says what it is, and its bytes."""

    tag: int
    """Below 2**32; its meaning is the caller's."""
    payload: bytes


class DamagedRecord(Record):
    """Where damage is skipped: a record whose payload is damaged, and is empty here."""


def write(
    path: str | Path,
    kind: FileKind,
    records: Iterable[tuple[int, Payload]],
    *,
    mode: int | None = None,
    predecessor: int = 0,
    at: Fault = no_fault,
) -> int:
    """Write a file of records in the place of the former one; returns its checksum, which its successor may name.

    The former file stays until the new one is whole and on disk. `records` may be a generator: one record is in memory
    at a time.

    Args:
        path: Where; a link is followed.
        kind: What it is.
        records: (tag, payload) of each.
        mode: Of a file that is new, such as 0o600.
        predecessor: Checksum of the file before it in a series; 0 if there is none.
        at: Called before each step, so that a test may let it fail: see `replacing`.

    Raises:
        OSError, and what `records` raises: the former file is as it was, and there is no draft.
    """
    with writing(path, kind, mode=mode, predecessor=predecessor, at=at) as file:
        for tag, payload in records:
            file.put(tag, payload)
    return file.checksum


@contextmanager
def writing(
    path: str | Path, kind: FileKind, *, mode: int | None = None, predecessor: int = 0, at: Fault = no_fault
) -> Iterator[RecordWriter]:
    """Open what puts records into a file, which takes the place of the former one when the block ends. See `write`."""
    with replacing(path, mode=mode, at=at) as file:
        writer = RecordWriter(file, kind, predecessor)
        yield writer
        writer.end()


class RecordWriter:
    """Puts records into a file, one after the other."""

    def __init__(self, file: BinaryIO, kind: FileKind, predecessor: int) -> None:
        self._file = file
        self.checksum = write_head(file, kind, WHOLE, predecessor)
        """Checksum of the records so far; at the end that of the whole file."""
        self._count = self._unflushed = 0

    def put(self, tag: int, payload: Payload) -> None:
        """Write a record."""
        self.checksum = write_record(self._file, tag, payload, self.checksum)
        self._count, self._unflushed = self._count + 1, self._unflushed + memoryview(payload).nbytes
        if self._unflushed > _FLUSH_BYTES:
            self._unflushed = 0
            _flush(self._file)

    def end(self) -> None:
        """Write the end."""
        facts = _RECORD.pack(_END, 0, self._count, 0)
        self.checksum = _bytes.checksum(facts, self.checksum)
        self._file.write(facts + _SUM.pack(self.checksum))


def write_head(file: BinaryIO, kind: FileKind, layout: int, predecessor: int) -> int:
    """Begin a file of this layout; returns the checksum so far."""
    head = _HEAD.pack(kind.magic, kind.form, layout, secrets.token_bytes(16), predecessor)
    chain = _bytes.checksum(head)
    file.write(head + _SUM.pack(chain))
    return chain


def write_record(file: BinaryIO | OwnedFile, tag: int, payload: Payload, chain: int) -> int:
    """Write a record behind those of checksum `chain`; returns the checksum with it."""
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
    """Have the disk take it little by little: one sync of it all would hold up all others that wait for the disk."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):  # it is not read soon: other files have more use for the page cache
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class RecordReader(ClosingContext):
    """A file of records while it is read, and how far; its head was found to be of this kind."""

    def __init__(self, path: str | Path, kind: FileKind, layout: int | None) -> None:
        self.path, self.kind = Path(path), kind
        try:
            self._file = self.path.open("rb", buffering=_PIECE)
        except (OSError, ValueError) as error:  # a zero byte in a path is a ValueError
            raise self._wrong(f"cannot be read ({error})") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            """Bytes that the file has."""
            self.chain = self.place = 0
            """The checksum of all records that were read, and the bytes that they take."""
            self.id, self.predecessor = self._read_head(layout)
            """16 bytes that name this file, and the checksum of the file before it in a series, or 0."""
        except OSError as error:
            self._file.close()
            raise self._wrong(f"cannot be read ({error})") from error
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; once is enough."""
        self._file.close()

    def _wrong(self, problem: str) -> DataError:
        return DataError(str(self.path), problem)

    def _read_head(self, expected: int | None) -> tuple[bytes, int]:
        self._file.seek(0)
        head, check = self._file.read(_HEAD.size), self._file.read(_SUM.size)
        if len(head) < 12 or not head.startswith(self.kind.magic):
            raise self._wrong(f"is not {self.kind.name}")
        form = int.from_bytes(head[8:12], "little")
        if form != self.kind.form:  # before the checksum, which another form may compute in another way
            readable = f"this version of memoire reads form {self.kind.form}"
            raise self._wrong(f"is {self.kind.name} of form {form}, or it is damaged; {readable}")
        chain = _bytes.checksum(head)
        if len(head) < _HEAD.size or _SUM.pack(chain) != check:
            raise self._wrong("is damaged at its beginning")
        _, _, self.layout, identity, predecessor = _HEAD.unpack(head)
        if self.layout not in (WHOLE, APPENDED) or expected not in (None, self.layout):
            raise self._wrong(f"has layout {self.layout}; layout {expected or WHOLE} is read here")
        self.chain, self.place = chain, HEAD_BYTES
        return bytes(identity), int(predecessor)

    def rewind(self) -> None:
        """Have `scan` begin again with the first record. Raises DataError: the file was changed."""
        if self._read_head(self.layout)[0] != self.id:
            raise self._wrong("was changed while it was read")

    def last(self, size: int) -> bytes | None:
        """The last payload of a whole file, if it has so many bytes; None if that is damaged. `rewind` is next."""
        place = self.size - 2 * RECORD_BYTES - size
        self._file.seek(max(0, place))
        facts, _, payload = self._file.read(_RECORD.size), self._file.read(_SUM.size), self._file.read(size)
        is_whole = place >= HEAD_BYTES and _RECORD.unpack(facts)[2:] == (size, _payload_sum(memoryview(payload)))
        return payload if is_whole else None

    def scan(self, *, keep: bool, damage: list[DataError] | None = None) -> Iterator[Record]:
        """The records that follow. With `damage` nothing is raised: it gets the error of each record that is damaged,
        which has no payload here; after one whose size is damaged, no record is found.
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
                    raise self._wrong(f"has {count} records and {self.size} bytes; its end says otherwise")
                return
            if kind != _DATA or size > self.size - begin:
                raise self._wrong(f"has a record at byte {begin} that cannot be")
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
        """The next bytes, or none if they are only compared, and their checksum."""
        total = 0
        if keep:
            whole = self._file.read(size)
            return whole, _payload_sum(memoryview(whole)) if len(whole) == size else -1
        for start in range(0, size, _PIECE):
            total = _bytes.checksum(self._file.read(min(_PIECE, size - start)), total)
        return b"", total


class CheckedFile(RecordReader):
    """A file of records that was read and found whole when it was opened. Several may read it, each with one of these.

    Raises:
        DataError: it cannot be read, is no such file, of another form, cut off or damaged. It is only read.
    """

    def __init__(self, path: str | Path, kind: FileKind) -> None:
        super().__init__(path, kind, WHOLE)
        try:
            self.num_records = sum(1 for _ in self.scan(keep=False))
            self.checksum = self.chain
            """Of the whole file: what its successor names."""
        except OSError as error:
            self.close()
            raise self._wrong(f"cannot be read ({error})") from error
        except BaseException:
            self.close()
            raise

    def records(self) -> Iterator[Record]:
        """Every record, in the order of writing; a payload is new bytes. What is read is compared once more.

        Raises:
            DataError: the file was changed since it was opened.
        """
        self.rewind()
        yield from self.scan(keep=True)


def salvage(path: str | Path, kind: FileKind, missing: list[DataError]) -> Iterator[Record]:
    """Read what is left of a damaged file.

    Args:
        path: Of the file, which is only read.
        kind: What it is.
        missing: Gets an error for each part that cannot be read.
    """
    try:
        with RecordReader(path, kind, None) as reader:
            yield from reader.scan(keep=True, damage=missing)
    except DataError as error:
        missing.append(error)
