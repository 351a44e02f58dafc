"""Rows of tables that save each change (`SavesRows`), in a state folder: small ones are in the database, and large ones
are in files beside it.

    state.db, table table_rows      each small row, such as one of a prompt; and where each large one is
    rows/0123456789abcdef.bodies    the large ones of a kind, such as answers, of one group that was saved

Large rows come and go: in the database each would be written twice, and copied by each backup. A file of its own for
each would cost a sync, an inode and a block of the disk: of a million rows 4 GB. So those of a group that is saved
share a file, and those of a small group are in the database, too: a file would cost more than it spares.
A file's name is the checksum of what is in it; its first record has the keys of the rows. It is on disk before the
database names it, and leaves when no row names it any more. Of a file that is less than half named, what is named is
written again, with a group that is saved: so all files take at most twice what is named, and `SPARSE_BYTES`.
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
"""Bytes of the large rows of a kind, of a group, that are stored in the database itself."""
SPARSE_BYTES: Final = 4 * MiB
"""Bytes of files that are less than half named; with more of them some are written again, at most so many at once."""
_INLINE, _PLACED = b"\0", b"\1"  # the first byte of such a row: the body follows, or where it is
_PLACE: Final = struct.Struct(">cQIQQ")  # _PLACED, the file's checksum; the record's place in it, checksum and bytes
_RECORD_BYTES: Final = 64  # of a record beside its body, about
_NAME: Final = re.compile(r"[0-9a-f]{16}\.bodies")


class PlannedRows(NamedTuple):
    """Changes whose files are on disk."""

    rows: dict[tuple[int, bytes], bytes | None]
    """The rows that the database gets; None takes one out."""
    named: dict[int, int]
    """How many bytes of each file they name."""


class StoredRows:
    """The rows of all tables of a state folder. Nothing is written before `tidy`; then one thread writes.

    Args:
        folder: Of the files; made when the first one is written.
        file: The database.
        at: Called before each step of writing a file, so that a test may let it fail.

    Raises:
        StateCorrupt: a row of the database is damaged or missing; or one of `LARGE_ROWS` is, unless the database is a
            backup that was put back.
    """

    def __init__(self, folder: Path, file: StateFile, at: Callable[[str], None]) -> None:
        self._folder, self._file, self._at = folder, file, at
        self._named: Counter[int] = Counter()  # bytes that rows name of each file
        self._sizes = dict[int, int]()  # all bytes of each file
        self._sparse = set[int]()  # files that are less than half named
        self._is_saved = True  # whether what was written last is in the database
        rows = 0
        for kind in (*SMALL_ROWS, *_FILED):
            for _, body in file.table_rows(kind):
                rows += 1
                self._named.update(_named_by(body))
        if rows != file.seal.table_rows:
            raise corrupt(file.path, "rows of tables are out of order")  # whoever looks for them would not find them
        if not file.was_backup:
            self._check_large()

    def _check_large(self) -> None:
        for path, bodies in itertools.chain.from_iterable(map(self._read, LARGE_ROWS)):
            if lost := sum(body is None for _, body in bodies):
                raise corrupt(path, f"it is missing or damaged, and has {lost} rows that the tables cannot do without")

    def tidy(self) -> None:
        """Remove files that no row names: a transaction was not committed, or a backup was put back."""
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
        """Kind, key and body of all that is saved of a table; None for one whose file is missing or damaged.

        Raises:
            StateCorrupt: a row is damaged.
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
        """Keys and bodies by file; None for one that is missing or damaged. One file is in memory at a time."""
        found = self._file.table_rows(kind, *prefix, order="body")
        places = ((*_PLACE.unpack(body), key) for key, body in found if body.startswith(_PLACED))
        for name, rows in itertools.groupby(places, key=lambda each: each[1]):
            records = enumerate(salvage(self._path(name), KIND, list[DataError]()), -1)  # keys are first
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
        """Have large rows on disk when this returns, before the database names them.

        Returns:
            What is to be handed to `replace` once its rows are in the database. If they do not come there, the files
            stay until the next start: after an error of a sync nobody knows whether they are named.

        Raises:
            OSError: a file could not be written, and is not there.
        """
        new = dict[tuple[int, bytes], bytes | None]()
        for owner, each in changes.items():
            prefix, _ = _prefix(owner)
            for kind, key, body in each:
                new[kind, prefix + key] = body
        moved = self._rows_to_move() if self.is_sparse else {}
        self._is_saved = False  # until `replace`: a write that is tried again needs no more room than it has to
        try:
            return self._plan(moved | new if moved else new)
        except OSError:
            if not moved:
                raise
            return self._plan(new)

    def _plan(self, rows: dict[tuple[int, bytes], bytes | None]) -> PlannedRows:
        """Have the files of these rows on disk."""
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
        """Whether the next write makes files smaller, also one that changes nothing."""
        return bool(self._sparse) and self._is_saved and sum(map(self._sizes.__getitem__, self._sparse)) > SPARSE_BYTES

    def _rows_to_move(self) -> dict[tuple[int, bytes], bytes | None]:
        """Rows that files which are less than half named have, with their bodies: of those with the fewest first."""
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
        """The rows that name a file, as far as the file is whole."""
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
        """Write a file of these records; returns its bytes."""
        if not self._folder.exists():
            make_folder(self._folder)
            sync(self._folder.parent)
        records = ((kind, payload) for payload in payloads)
        record_file.write(path, KIND, records, mode=mode_in(self._folder), at=self._at)
        return path.stat().st_size

    def replace(self, planned: PlannedRows, former: Iterable[bytes]) -> None:
        """The database has these changes, in the place of rows with the bodies `former`: files that no row names any
        more go.
        """
        self._is_saved = True
        if planned.named:
            self._named.update(planned.named)
        placed = [body for body in former if body.startswith(_PLACED)]
        if not placed:
            return
        gone = Counter[int]()
        for body in placed:
            gone.update(_named_by(body))
        self._named.subtract(gone)
        for name in gone:
            if self._named[name] <= 0:
                del self._named[name]
                self._sizes.pop(name, None)
                self._sparse.discard(name)
                self._path(name).unlink(missing_ok=True)
        self._note_sparse(gone)


def _named_by(body: bytes) -> dict[int, int]:
    """The file that a row names, and how many bytes of it. Other rows begin with another byte: msgpack of an array or a
    map, or `_INLINE`.
    """
    if not body.startswith(_PLACED):
        return {}
    _, file, _, _, size = _PLACE.unpack(body)
    return {file: _RECORD_BYTES + size}


def _prefix(owner: str) -> tuple[bytes, bytes]:
    """What the keys of a table begin with, and what is above all of them."""
    return owner.encode() + b"\0", owner.encode() + b"\1"
