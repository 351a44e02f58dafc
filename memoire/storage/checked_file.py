"""A checked file of records: what it is, its records one after the other, and an end that says how many there are.

    head      kind, form, layout, 16 random bytes that name this file, checksum of the file before it, checksum of these
    record    DATA, tag, size, checksum of the payload, checksum of these │ payload
    ...
    END       how many records there are

The checksum of a record's facts begins with that of the record before: a record that was left out, doubled or moved is
missed, and the last of these sums stands for the whole file. A file is read from its first to its last byte before any
record of it is used. No size is believed before it was compared with the bytes that the file has.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeAlias

from memoire.errors import DataError
from memoire.limits import MiB
from memoire.replay.replacement import Fault, no_fault, replacing
from memoire.wire import _bytes

Payload: TypeAlias = bytes | bytearray | memoryview
_HEAD: Final = struct.Struct("<8sII16sQ")
_RECORD: Final = struct.Struct("<IIQQ")  # DATA or END, tag, bytes of the payload or number of records, its checksum
_SUM: Final = struct.Struct("<Q")
_LAYOUT: Final = 1
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
    """A record: a number that says what it is, and its bytes."""

    tag: int
    """Below 2**32; its meaning is the caller's."""
    payload: Payload


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
    with replacing(path, mode=mode, at=at) as file:
        chain = _write_head(file, kind, predecessor)
        count = unflushed = 0
        for tag, payload in records:
            chain = _write_record(file, tag, payload, chain)
            count, unflushed = count + 1, unflushed + memoryview(payload).nbytes
            if unflushed > _FLUSH_BYTES:
                unflushed = 0
                _flush(file)
        facts = _RECORD.pack(_END, 0, count, 0)
        chain = _bytes.checksum(facts, chain)
        file.write(facts + _SUM.pack(chain))
    return chain


def _write_head(file: BinaryIO, kind: FileKind, predecessor: int) -> int:
    head = _HEAD.pack(kind.magic, kind.form, _LAYOUT, secrets.token_bytes(16), predecessor)
    chain = _bytes.checksum(head)
    file.write(head + _SUM.pack(chain))
    return chain


def _write_record(file: BinaryIO, tag: int, payload: Payload, chain: int) -> int:
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


class CheckedFile:
    """A file of records that was read and found whole when it was opened. Several may read it, each with one of these.

    Raises:
        DataError: it cannot be read, is no such file, of another form, cut off or damaged. It is only read.
    """

    def __init__(self, path: str | Path, kind: FileKind) -> None:
        self.path, self.kind = Path(path), kind
        try:
            self._file = self.path.open("rb", buffering=_PIECE)
        except (OSError, ValueError) as error:  # a zero byte in a path is a ValueError
            raise self._wrong(f"cannot be read ({error})") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            """Bytes that the file has."""
            self.id, self.predecessor = self._read_head()
            """16 bytes that name this file, and the checksum of the file before it in a series, or 0."""
            self.num_records = sum(1 for _ in self._scan(keep=False))
            self.checksum = self._chain
            """Of the whole file: what its successor names."""
        except OSError as error:
            self._file.close()
            raise self._wrong(f"cannot be read ({error})") from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; once is enough."""
        self._file.close()

    def records(self) -> Iterator[Record]:
        """Every record, in the order of writing; a payload is new bytes. What is read is compared once more.

        Raises:
            DataError: the file was changed since it was opened.
        """
        self._file.seek(0)
        if self._read_head()[0] != self.id:
            raise self._wrong("was changed while it was read")
        yield from self._scan(keep=True)

    def _wrong(self, problem: str) -> DataError:
        return DataError(str(self.path), problem)

    def _read_head(self) -> tuple[bytes, int]:
        head, check = self._file.read(_HEAD.size), self._file.read(_SUM.size)
        if len(head) < 12 or not head.startswith(self.kind.magic):
            raise self._wrong(f"is not {self.kind.name}")
        form = int.from_bytes(head[8:12], "little")
        if form != self.kind.form:  # before the checksum, which another form may compute in another way
            expected = f"this version of memoire reads form {self.kind.form}"
            raise self._wrong(f"is {self.kind.name} of form {form}, or it is damaged; {expected}")
        self._chain = _bytes.checksum(head)
        if len(head) < _HEAD.size or _SUM.pack(self._chain) != check:
            raise self._wrong("is damaged at its beginning")
        _, _, layout, identity, predecessor = _HEAD.unpack(head)
        if layout != _LAYOUT:
            raise self._wrong(f"has layout {layout}, this version of memoire reads layout {_LAYOUT}")
        return bytes(identity), int(predecessor)

    def _scan(self, *, keep: bool) -> Iterator[Record]:
        count, place = 0, _HEAD.size + _SUM.size
        while True:
            kind, tag, size, check = self._read_facts(place)
            place += _RECORD.size + _SUM.size
            if kind == _END:
                if size != count or place != self.size:
                    raise self._wrong(f"has {count} records and {self.size} bytes; its end says otherwise")
                return
            if kind != _DATA or size > self.size - place:
                raise self._wrong(f"has a record at byte {place} that cannot be")
            payload, total = self._read_payload(size, keep=keep)
            if total != check:
                raise self._wrong(f"is damaged within the {size} bytes from byte {place} on")
            count, place = count + 1, place + size
            yield Record(tag, payload)

    def _read_facts(self, place: int) -> tuple[int, int, int, int]:
        facts, check = self._file.read(_RECORD.size), self._file.read(_SUM.size)
        if len(check) < _SUM.size:
            raise self._wrong(f"is cut off at byte {self.size}: its end is missing")
        self._chain = _bytes.checksum(facts, self._chain)
        if _SUM.pack(self._chain) != check:
            raise self._wrong(f"is damaged at byte {place}")
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
