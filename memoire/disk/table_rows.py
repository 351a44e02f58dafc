"""Saved rows of tables that save each change (`SavesRows`): small rows in the database, large ones in files beside it.

    state.db, table table_rows      each small row, such as one of a prompt; and the place of each large one
    rows/0123456789abcdef.bodies    the large rows of a kind, such as answers, of one saved group

Large rows come and go: in the database each would be written twice, and copied by each backup. One file for each row
would cost a sync, an inode and a block of the disk: 4 GB for a million rows. The large rows of a saved group therefore
share a file. Large rows of a small group are in the database, too, since a file would cost more than it saves.

A file's name is the checksum of its contents; its first record has the keys of the rows. The file is on disk before the
database names it, and is removed when no row names it any more. If rows name less than half of a file, they are written
again with a later group. All files together take at most twice the bytes of the named rows, and `SPARSE_BYTES`.
"""

from __future__ import annotations

import itertools
import logging
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from memoire.errors import DataError
from memoire.limits import KiB, MiB
from memoire.replay.files import remove_abandoned_in, sync
from memoire.tables.base import LARGE_ROWS, LOSABLE_ROWS, SMALL_ROWS, SavedRow
from memoire.wire import _bytes

from . import record_file
from .files import corrupt, make_folder, mode_in
from .record_file import DamagedRecord, FileKind, salvage

if TYPE_CHECKING:
    from .state_file import StateFile

_log = logging.getLogger(__name__)

KIND: Final = FileKind(b"memobody", 1, "a file of rows of tables")
_FILED: Final = (*LARGE_ROWS, *LOSABLE_ROWS)
"""Kinds of rows whose bodies are in files."""
INLINE_BYTES: Final = 64 * KiB
"""Most bytes of the large rows of one kind, in one group, that are stored in the database itself."""
SPARSE_BYTES: Final = 4 * MiB
"""Bytes of sparse files (less than half named) beyond which some are written again; also the most rewritten at once."""
_INLINE, _PLACED = b"\0", b"\1"  # first byte of a large row in the database: a body or its place follows
_PLACE: Final = struct.Struct(">cQIQQ")  # _PLACED, the file's checksum; the record's index in it, checksum and bytes
_RECORD_BYTES: Final = 64  # bytes of a record in addition to its body, approximately
_NAME: Final = re.compile(r"[0-9a-f]{16}\.bodies")


class PlannedRows(NamedTuple):
    """Planned changes of rows, whose files are on disk already."""

    rows: dict[tuple[int, bytes], bytes | None]
    """New bodies of the database's rows, by kind and key; None removes a row."""
    named: dict[int, int]
    """Bytes of each file that the rows name, by the file's checksum."""


class DiskRows:
    """Saved rows of all tables of a state folder. Nothing is written before `remove_unused_files`; then one thread
    writes.

    Args:
        folder: Folder of the files; made with the first file.
        file: The database.
        at: Called before each step of writing a file, so that a test may let it fail.

    Raises:
        StateCorrupt: a row of the database is damaged or missing; or one of `LARGE_ROWS` is, unless the database is a
            restored backup.
    """

    def __init__(self, folder: Path, file: StateFile, at: Callable[[str], None]) -> None:
        self._folder, self._file, self._at = folder, file, at
        self._named: Counter[int] = Counter()  # bytes of each file that rows name
        self._sizes = dict[int, int]()  # all bytes of each file
        self._sparse = set[int]()  # files of which rows name less than half
        self._is_saved = True  # the newest planned rows are in the database
        rows = 0
        for kind in (*SMALL_ROWS, *_FILED):
            for _, body in file.table_rows(kind):
                rows += 1
                self._named.update(_named_by(body))
        if rows != file.seal.table_rows:
            raise corrupt(file.path, "rows of tables are out of order")  # a search by key would miss the rows
        if not file.was_backup:
            self._check_large()

    def _check_large(self) -> None:
        for path, bodies in itertools.chain.from_iterable(map(self._read, LARGE_ROWS)):
            if lost := sum(body is None for _, body in bodies):
                raise corrupt(path, f"it is missing or damaged, and has {lost} rows that the tables need")

    def remove_unused_files(self) -> None:
        """Remove files that no row names, left by a transaction that was not committed, or by a restored backup."""
        if self._folder.is_dir():
            remove_abandoned_in(self._folder, ".bodies")
            for path in self._folder.iterdir():
                if not _NAME.fullmatch(path.name):
                    continue
                if (name := int(path.stem, 16)) in self._named:
                    self._sizes[name] = path.stat().st_size
                else:
                    path.unlink(missing_ok=True)
        self._note_sparse(self._sizes)

    def _note_sparse(self, names: Iterable[int]) -> None:
        self._sparse.update(name for name in names if 2 * self._named[name] < self._sizes.get(name, 0))

    def _path(self, name: int) -> Path:
        return self._folder / f"{name:016x}.bodies"

    # Reading

    def rows(self, owner: str) -> Iterator[SavedRow]:
        """Yield kind, key and body of all saved rows of a table; the body is None if its file is missing or damaged.

        Raises:
            StateCorrupt: a row of the database is damaged.
        """
        prefix = _prefix(owner)
        for kind in (*SMALL_ROWS, *_FILED):
            for key, body in self._file.table_rows(kind, *prefix):
                if kind not in _FILED:
                    yield kind, key[len(prefix[0]) :], body
                elif body.startswith(_INLINE):
                    yield kind, key[len(prefix[0]) :], body[1:]
        for kind in _FILED:
            for path, bodies in self._read(kind, *prefix):
                for key, stored in bodies:
                    yield kind, key[len(prefix[0]) :], stored
                if lost := sum(stored is None for _, stored in bodies):
                    _log.warning("%s is missing or damaged: table %r has lost %d rows", path, owner, lost)

    def _read(self, kind: int, *prefix: bytes) -> Iterator[tuple[Path, list[tuple[bytes, bytes | None]]]]:
        """Yield path, keys and bodies of each file; a damaged body is None. One file at a time is in memory."""
        stored = self._file.table_rows(kind, *prefix, order="body")
        places = ((*_PLACE.unpack(body), key) for key, body in stored if body.startswith(_PLACED))
        for name, rows in itertools.groupby(places, key=lambda each: each[1]):
            records = enumerate(salvage(self._path(name), KIND, list[DataError]()), -1)  # the first record has the keys
            place, record, bodies = -1, None, list[tuple[bytes, bytes | None]]()
            for _, _, wanted, check, _, key in rows:
                while place < wanted and (following := next(records, None)) is not None:
                    place, record = following
                is_there = place == wanted and record is not None and not isinstance(record, DamagedRecord)
                body = record.payload if is_there and record is not None else None
                bodies.append((key, body if body is not None and _bytes.checksum(body) == check else None))
            yield self._path(name), bodies

    # Writing

    def write(self, changes: Mapping[str, Sequence[SavedRow]]) -> PlannedRows:
        """Write the large rows of a group to files; they are on disk when this returns.

        Returns:
            The argument of `remove_replaced_files`, which is to be called after its rows are in the database. If they
            are not saved,
            the files stay until the next start: after an error of a sync it is unknown if the database names them.

        Raises:
            OSError: a file could not be written; none is left.
        """
        new = dict[tuple[int, bytes], bytes | None]()
        for owner, each in changes.items():
            prefix, _ = _prefix(owner)
            for kind, key, body in each:
                new[kind, prefix + key] = body
        moved = self._rows_to_move() if self.is_sparse else {}
        self._is_saved = False  # before `remove_replaced_files`, a repeated write moves no rows, to need no more room
        try:
            return self._plan(moved | new if moved else new)
        except OSError:
            if not moved:
                raise
            return self._plan(new)

    def _plan(self, rows: dict[tuple[int, bytes], bytes | None]) -> PlannedRows:
        """Write the files of these rows; returns the changes for the database."""
        planned = PlannedRows({}, {})
        filed_of: dict[int, dict[tuple[int, bytes], bytes]] = {kind: {} for kind in _FILED}
        for name, body in rows.items():
            if body is None or name[0] not in filed_of:
                planned.rows[name] = body
            else:
                filed_of[name[0]][name] = body
        for kind, filed in filed_of.items():
            if sum(map(len, filed.values())) <= INLINE_BYTES:
                planned.rows.update((name, _INLINE + body) for name, body in filed.items())
                continue
            keys = msgspec.msgpack.encode([key for _, key in filed])
            checks = [_bytes.checksum(body) for body in filed.values()]
            file = _bytes.checksum(keys + struct.pack(f">{len(checks)}Q", *checks))
            if file not in self._named:
                self._sizes[file] = self._write_file(self._path(file), kind, (keys, *filed.values()))
            for place, ((name, body), check) in enumerate(zip(filed.items(), checks, strict=True)):
                planned.rows[name] = _PLACE.pack(_PLACED, file, place, check, len(body))
            planned.named[file] = sum(_RECORD_BYTES + len(body) for body in filed.values())
        return planned

    @property
    def is_sparse(self) -> bool:
        """True if the next write rewrites sparse files, even a write without changes."""
        return bool(self._sparse) and self._is_saved and sum(map(self._sizes.__getitem__, self._sparse)) > SPARSE_BYTES

    def _rows_to_move(self) -> dict[tuple[int, bytes], bytes | None]:
        """Return the named rows of sparse files, with their bodies: those with the fewest named bytes first."""
        moved, size = dict[tuple[int, bytes], bytes | None](), 0
        for name in sorted(self._sparse, key=self._named.__getitem__):
            size += self._named[name]
            if moved and size > SPARSE_BYTES:
                break
            rows = self._rows_in(name)
            if sum(_RECORD_BYTES + len(body) for body in rows.values()) == self._named[name]:
                moved |= rows
            else:
                self._sparse.discard(name)
                _log.warning("%s is missing or damaged, and stays as it is", self._path(name))
        return moved

    def _rows_in(self, name: int) -> dict[tuple[int, bytes], bytes]:
        """Return the rows that name a file, with their bodies, as far as the file is whole."""
        records = salvage(self._path(name), KIND, list[DataError]())
        first = next(records, None)
        if first is None or isinstance(first, DamagedRecord):
            return {}
        rows = dict[tuple[int, bytes], bytes]()
        for place, (key, record) in enumerate(
            zip(msgspec.msgpack.decode(first.payload, type=list[bytes]), records, strict=False)
        ):
            expected = _PLACE.pack(_PLACED, name, place, _bytes.checksum(record.payload), len(record.payload))
            if [expected] == [body for _, body in self._file.table_rows(first.tag, key, key + b"\0")]:
                rows[first.tag, key] = record.payload
        return rows

    def _write_file(self, path: Path, kind: int, payloads: Iterable[bytes]) -> int:
        """Write a file of these records; returns its size in bytes."""
        if not self._folder.exists():
            make_folder(self._folder)
            sync(self._folder.parent)
        records = ((kind, payload) for payload in payloads)
        record_file.write(path, KIND, records, mode=mode_in(self._folder), at=self._at)
        return path.stat().st_size

    def remove_replaced_files(self, planned: PlannedRows, former: Iterable[bytes]) -> None:
        """Remove files that no row names any more, after the database has the planned changes.

        Args:
            former: Bodies of the rows that were replaced or removed.
        """
        self._is_saved = True
        if planned.named:
            self._named.update(planned.named)
        placed = [body for body in former if body.startswith(_PLACED)]
        if not placed:
            return
        freed = Counter[int]()
        for body in placed:
            freed.update(_named_by(body))
        self._named.subtract(freed)
        for name in freed:
            if self._named[name] <= 0:
                del self._named[name]
                self._sizes.pop(name, None)
                self._sparse.discard(name)
                self._path(name).unlink(missing_ok=True)
        self._note_sparse(freed)


def _named_by(body: bytes) -> dict[int, int]:
    """Return the file that a row names, with the bytes of its record; {} if the row names none. Rows that name no file
    begin with another byte: msgpack of an array or a map, or `_INLINE`.
    """
    if not body.startswith(_PLACED):
        return {}
    _, file, _, _, size = _PLACE.unpack(body)
    return {file: _RECORD_BYTES + size}


def _prefix(owner: str) -> tuple[bytes, bytes]:
    """Return the prefix of a table's keys, and an upper bound of the keys."""
    return owner.encode() + b"\0", owner.encode() + b"\1"
