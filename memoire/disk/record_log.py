"""Log of records: checked files in a folder, oldest first, to which records are appended.

    runs/drone/samples/lock                       lock of the process that uses the log
                       committed                  the commit counter: records that are on disk, checksum of the last one
                       000000000000000.samples    the records from 0 on
                       000000000000117.samples    the records from 117 on: it names the checksum of the file before it

An append writes, syncs, updates the commit counter, and then returns. The commit counter may be behind the files, but
never ahead: if counted records are missing, the log is refused. Records beyond the counter were never acknowledged; an
incomplete one among them is cut off.
"""

from __future__ import annotations

import os
import secrets
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from memoire import _core
from memoire.arguments import ClosingContext
from memoire.errors import Closed, DataError
from memoire.replay.files import Fault, OwnedFile, no_fault, remove_abandoned_in, replace_file, replacing, sync
from memoire.wire import _bytes

from .files import lock_folder
from .record_file import (
    APPENDED,
    HEAD_BYTES,
    RECORD_BYTES,
    FileKind,
    Payload,
    Record,
    RecordReader,
    salvage,
    write_head,
    write_record,
)

_SUM: Final = struct.Struct("<Q")
_COUNTER: Final = struct.Struct("<8s8sII")
_COUNTER_MAGIC: Final = b"memocnt2"
_COUNTER_NAME: Final = "committed"


class _Counts(NamedTuple):
    """Contents of the commit counter."""

    first: int = 0
    """Number of the oldest record."""
    predecessor: int = 0
    """Checksum of the file before the oldest one, as the oldest file names it."""
    end: int = 0
    """Number of the next record."""
    chain: int = 0
    """Checksum of all records below `end`."""
    series: int = 0
    """Random number that identifies the log."""

    def pack(self, kind: FileKind) -> bytes:
        """Return the content of the counter's file."""
        facts = _COUNTER.pack(_COUNTER_MAGIC, kind.magic, kind.form, APPENDED) + struct.pack("<5Q", *self)
        return facts + _SUM.pack(_bytes.checksum(facts))

    @classmethod
    def read(cls, path: Path, kind: FileKind) -> _Counts | None:
        """Read a counter's file; None if it is missing. Raises DataError if it is damaged or of another kind."""
        try:
            with path.open("rb") as file:
                content = file.read(4096)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(str(path), f"cannot be read ({error})") from error
        size = _COUNTER.size + 40
        if len(content) != size + _SUM.size or not content.startswith(_COUNTER_MAGIC):
            raise DataError(str(path), f"is not the commit counter of {kind.name}, or it is damaged")
        counts = cls(*struct.unpack("<5Q", content[_COUNTER.size : size]))
        if counts.pack(kind) != content:
            raise DataError(str(path), f"is damaged, or the commit counter of other files than {kind.name}")
        return counts


@dataclass
class LogFile:
    """One file of a log of records."""

    path: Path
    first: int
    """Number of the file's first record."""
    predecessor: int
    """Checksum of the file before this file."""
    chain: int
    """Checksum of all records of the file."""
    size: int
    """Bytes of the file's header and records."""
    tags: list[int] = field(default_factory=list)
    """Tags of the file's records, in order."""

    @property
    def end_number(self) -> int:
        """Number of the record after the file's last one."""
        return self.first + len(self.tags)


class RecordLog(ClosingContext):
    """Log of records in files of a folder, oldest first. For one thread of one process: the folder is locked, and a
    forked child cannot write. Records that `append` has written stay; if they are lost, opening refuses the log.

    Args:
        folder: Folder of the log; made if missing.
        kind: Kind and form of the files.
        suffix: End of the files' names, such as ".samples"; other files in this folder must not end so.
        at: Called before each step, so that a test may let it fail: "write", "sync", "count", "sync counter", "cut",
            "remove", and those of `replacing`.

    Raises:
        DataError: a file is damaged, missing or replaced by another; nothing was changed.
        StateError: the folder is in use, or cannot be locked.
        OSError: the folder cannot be made, read or written.
    """

    def __init__(self, folder: str | Path, kind: FileKind, suffix: str, *, at: Fault = no_fault) -> None:
        self.folder = Path(os.path.abspath(folder))
        self._kind, self._suffix, self._at = kind, suffix, at
        self.files: list[LogFile] = []
        """Files of the log, oldest first. A new file is made with its first record."""
        self._is_ended = self._is_torn = False
        self._newest: OwnedFile | None = None
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync(self.folder.parent)
        self._lock = lock_folder(self.folder, f"the folder of {kind.name},", "process")
        self._unlock = weakref.finalize(self, self._lock.release)
        try:
            abandoned, self._counts = self._read()
            path = self.folder / _COUNTER_NAME
            self._counter = OwnedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC), str(path), at)
            self._go_on(abandoned)
        except BaseException:
            self._unlock()
            raise

    @property
    def series(self) -> str:
        """Unique id of this log, in hex."""
        return f"{self._counts.series:016x}"

    def close(self) -> None:
        """Close the files and release the lock; later calls do nothing. Appended records are on disk already."""
        for file in (self._newest, self._counter):
            if file is not None:
                file.close()
        self._unlock()

    # ------------------------------------------------------------------------------------------------ appending

    def append(
        self, records: Iterable[tuple[int, Payload]], then: Iterable[tuple[Callable[..., object], tuple[Any, ...]]] = ()
    ) -> None:
        """Append (tag, payload) of each record; they are on disk when this returns. If the process is killed meanwhile,
        the first records may be stored. After an interrupt either none or all are appended.

        Args:
            then: Calls to make together with a successful append, for `at_once`.

        Raises:
            OSError, and errors of `records`: nothing was appended. The call may be repeated.
            ForkedError: this process was forked from the log's.
            Closed: the log was closed.
        """
        self._begin_step()
        if not self.files or (self._is_ended and self.files[-1].tags):
            self._begin_file()
        self._is_ended = False
        assert self._newest is not None
        file, tags = self.files[-1], []
        chain, size = file.chain, file.size
        self._is_torn = True
        try:
            for tag, payload in records:
                chain = write_record(self._newest, tag, payload, chain)
                tags.append(tag)
                size += RECORD_BYTES + memoryview(payload).nbytes
            self._newest.step("sync")
            os.fsync(self._newest.fileno())
            counts = self._counts._replace(end=file.end_number + len(tags), chain=chain)
            self._count(counts)
        except BaseException:
            with suppress(OSError):
                self._cut_back()
            raise
        is_there = _core.setting(self, _is_torn=False, _counts=counts)
        _core.at_once([*is_there, (file.tags.extend, (tags,)), *_core.setting(file, chain=chain, size=size), *then])

    def begin_file(self) -> None:
        """Let the next append begin a new file."""
        self._is_ended = True

    def remove(self, count: int) -> None:
        """Remove the oldest `count` files. The newest one stays.

        Raises:
            OSError: a file could not be removed; opening the log again removes it.
        """
        self._begin_step()
        count = min(count, len(self.files) - 1)
        if count > 0:
            removed, remaining = self.files[:count], self.files[count:]
            counts = self._counts._replace(first=remaining[0].first, predecessor=remaining[0].predecessor)
            self._count(counts)
            _core.at_once(_core.setting(self, _counts=counts, files=remaining))
            self._remove([each.path for each in removed])

    def _begin_step(self) -> None:
        if self._counter.closed:
            raise Closed(f"the log {self.folder}")
        self._counter.check_owner()
        if self._is_torn:
            self._cut_back()

    def _begin_file(self) -> None:
        first, predecessor = self._counts.end, self._counts.chain
        path = self.folder / f"{first:015d}{self._suffix}"
        with replacing(path, at=self._at) as file:
            chain = write_head(file, self._kind, APPENDED, predecessor)
        self._open(path)
        self.files.append(LogFile(path, first, predecessor, chain, HEAD_BYTES))

    def _open(self, newest: Path) -> OwnedFile:
        opened = OwnedFile(os.open(newest, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), str(newest), self._at)
        if self._newest is not None:
            self._newest.close()
        self._newest = opened
        return opened

    def _count(self, counts: _Counts) -> None:
        self._counter.step("count")
        os.pwrite(self._counter.fileno(), counts.pack(self._kind), 0)
        self._counter.step("sync counter")
        os.fsync(self._counter.fileno())

    def _cut_back(self) -> None:
        """Remove the bytes of a failed append: first from the counter, which must never be ahead of the files."""
        assert self._newest is not None
        self._count(self._counts)
        self._newest.step("cut")
        os.ftruncate(self._newest.fileno(), self.files[-1].size)
        os.fsync(self._newest.fileno())
        self._is_torn = False

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._counter.step("remove")
            path.unlink(missing_ok=True)
        sync(self.folder)

    # ------------------------------------------------------------------------------------------------ reading

    def records(self) -> Iterator[Record]:
        """Yield every record, oldest first; a payload is new bytes. Checksums are compared again.

        Raises:
            DataError: a file was changed since the log was opened.
        """
        for file in list(self.files):
            with RecordReader(file.path, self._kind, APPENDED) as reader:
                records = reader.scan(keep=True)
                for _, record in zip(file.tags[:], records, strict=False):
                    yield record
                if (reader.place, reader.chain) != (file.size, file.chain):
                    raise DataError(str(file.path), "was changed while it was in use")

    def _read(self) -> tuple[list[Path], _Counts]:
        """Read and check all files; returns the files that an interrupted `remove` has left, and the commit counter."""
        paths = _paths_of(self.folder, self._suffix, self._kind)
        counter = self.folder / _COUNTER_NAME
        counts = _Counts.read(counter, self._kind)
        if counts is None:
            for path in paths:
                RecordReader(path, self._kind, APPENDED).close()
            if paths:
                raise DataError(str(counter), f"is missing: the number of records in {paths[0].name} cannot be checked")
            counts = _Counts(series=secrets.randbits(64))
            replace_file(counter, counts.pack(self._kind), at=self._at)
        abandoned = [path for path in paths if int(path.stem) < counts.first]
        for path in abandoned:
            RecordReader(path, self._kind, APPENDED).close()
        end, chain = counts.first, counts.predecessor
        for path in paths[len(abandoned) :]:
            if int(path.stem) != end:
                raise DataError(
                    str(path), f"begins with record {int(path.stem)}: the records from {end} on are missing"
                )
            file, damage = self._read_file(path, chain, counts)
            if damage and (path != paths[-1] or file.end_number < counts.end):
                raise damage[0]
            self.files.append(file)
            end, chain = file.end_number, file.chain
        if end < counts.end:
            raise DataError(
                str(self.folder), f"has the records from {counts.first} to {end}, but should have {counts.end}: "
                "a file is missing or cut off"
            )  # fmt: skip
        return abandoned, counts

    def _read_file(self, path: Path, predecessor: int, counts: _Counts) -> tuple[LogFile, list[DataError]]:
        """Read a file up to its first damage; returns the whole part, and the error of the damage if there is any."""
        damage: list[DataError] = []
        with RecordReader(path, self._kind, APPENDED) as reader:
            if reader.predecessor != predecessor:
                raise DataError(str(path), "does not follow the file before it: one of the two was replaced")
            file = LogFile(path, int(path.stem), predecessor, reader.chain, reader.place)
            for record in reader.scan(keep=False, damage=damage):
                if damage:
                    break
                file.tags.append(record.tag)
                file.chain, file.size = reader.chain, reader.place
                if file.end_number == counts.end and file.chain != counts.chain:
                    raise DataError(str(path), f"holds other records than {_COUNTER_NAME} counts: one of them is old")
        return file, damage

    def _go_on(self, abandoned: list[Path]) -> None:
        """Finish the interrupted work of a former process, after all files were checked."""
        for name in (_COUNTER_NAME, self._suffix):
            remove_abandoned_in(self.folder, name)
        if abandoned:
            self._remove(abandoned)
        if not self.files:
            return
        last = self.files[-1]
        newest = self._open(last.path)
        if last.path.stat().st_size > last.size:
            newest.step("cut")
            os.ftruncate(newest.fileno(), last.size)
            os.fsync(newest.fileno())
        if last.end_number > self._counts.end:
            newest.step("sync")
            os.fsync(newest.fileno())
            counts = self._counts._replace(end=last.end_number, chain=last.chain)
            self._count(counts)
            self._counts = counts


def salvage_log(folder: str | Path, kind: FileKind, suffix: str, missing: list[DataError]) -> Iterator[Record]:
    """Yield the readable records of a damaged log, oldest first.

    Args:
        folder: Folder of the log, which is only read.
        kind, suffix: As for `RecordLog`.
        missing: List that gets an error for each part that cannot be read, and for missing records.
    """
    counts, end = None, None
    try:
        counts = _Counts.read(Path(folder) / _COUNTER_NAME, kind)
    except DataError as error:
        missing.append(error)
    if counts is not None:
        end = counts.first
    for path in _paths_of(Path(folder), suffix, kind):
        first = int(path.stem)
        if end is not None and first > end:
            missing.append(DataError(str(path), f"begins with record {first}: those from {end} on are missing"))
        end = first
        for record in salvage(path, kind, missing):
            end += 1
            yield record
    if counts is not None and (end or 0) < counts.end:
        missing.append(DataError(str(folder), f"lacks the records from {end or 0} to {counts.end}"))


def _paths_of(folder: Path, suffix: str, kind: FileKind) -> list[Path]:
    """Return the files of a log, oldest first. Raises DataError if a name is not a record number."""
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(suffix) and not path.name.startswith("."))
    for path in paths:
        stem = path.name.removesuffix(suffix)
        if len(stem) != 15 or not (stem.isascii() and stem.isdigit()):
            raise DataError(str(path), f"is not {kind.name}: its name is not the number of a record")
    return paths
