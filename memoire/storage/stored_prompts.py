"""Tables of prompts in a state folder: their rows are in the database, payloads and answers in files beside it.

    state.db, table prompts            a row for each prompt, step and plan; and where each payload and answer is
    prompts/0123456789abcdef.bodies    the payloads, or the answers, of one group that was saved (`checked_file.py`)

Payloads and answers are large, and come and go: in the database each would be written twice, and copied by each backup.
A file of its own for each would cost a sync, an inode and a block of the disk: of a million prompts 4 GB. So those of a
group that is saved share a file, and those of a small group are in their rows: a file would cost more than it spares.
A file's name is the checksum of what is in it. It is on disk before the database names it, and leaves when no row
names it any more.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from memoire.errors import DataError
from memoire.limits import KiB
from memoire.prompts.bytes import COLUMNS, FACTS, PAYLOAD, Saved
from memoire.replay.replacement import OwnedFile, sync
from memoire.wire import _bytes

from . import private_files
from .checked_file import DamagedRecord, FileKind, RecordWriter, salvage
from .disk_errors import corrupt
from .state_file import StateFile

_log = logging.getLogger(__name__)

KIND: Final = FileKind(b"memobody", 1, "a file of payloads or answers of prompts")
_FILED: Final = (PAYLOAD, COLUMNS)
"""Kinds of rows whose bodies are in files."""
INLINE_BYTES: Final = 64 * KiB
"""Bytes of the payloads, or of the answers, of a group that are stored in the rows themselves."""
_INLINE, _PLACED = b"\0", b"\1"  # the first byte of such a row: the body follows, or where it is
_PLACE: Final = struct.Struct(">cQIQ")  # _PLACED, the file's checksum, the record's place in it, the record's checksum
_NAME: Final = re.compile(r"[0-9a-f]{16}\.bodies")


class PlannedPrompts(NamedTuple):
    """Changes whose files are on disk."""

    rows: dict[tuple[int, bytes], bytes | None]
    """The rows that the database gets; None takes one out."""
    named: Counter[int]
    """How often they name each file."""


class StoredPrompts:
    """The tables of prompts of a state folder. Nothing is written before `tidy`; then one thread writes.

    Args:
        folder: Of the files; made when the first one is written.
        file: The database.
        at: Called before each step of writing a file, so that a test may let it fail.

    Raises:
        StateCorrupt: a row is damaged or missing; or a payload is, unless the database is a backup that was put back.
    """

    def __init__(self, folder: Path, file: StateFile, at: Callable[[str], None]) -> None:
        self._folder, self._file, self._at = folder, file, at
        self._named: Counter[int] = Counter()  # rows that name each file
        rows = 0
        for kind in range(FACTS + 1):
            for _, body in file.prompts(kind):
                rows += 1
                self._named.update(_named_by(body))
        if rows != file.seal.prompts:
            raise corrupt(file.path, "rows of prompts are out of order")  # whoever looks for them would not find them
        if not file.was_backup:
            self._check_payloads()

    def _check_payloads(self) -> None:
        for path, bodies in self._read(PAYLOAD):
            if lost := sum(body is None for _, body in bodies):
                raise corrupt(path, f"it is missing or damaged, and has the payloads of {lost} prompts")

    def tidy(self) -> None:
        """Remove files that no row names: a transaction was not committed, or a backup was put back."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if _NAME.fullmatch(path.name) and int(path.stem, 16) not in self._named:
                    path.unlink(missing_ok=True)

    def _path(self, name: int) -> Path:
        return self._folder / f"{name:016x}.bodies"

    # Reading

    def rows(self, owner: str) -> Iterator[Saved]:
        """Kind, key and body of all that is saved of a table; None for a payload or answer that is missing or damaged.

        Raises:
            StateCorrupt: a row is damaged.
        """
        prefix = _prefix(owner)
        for kind in range(FACTS + 1):
            for key, body in self._file.prompts(kind, *prefix):
                if kind not in _FILED:
                    yield kind, key[len(prefix[0]) :], body
                elif body.startswith(_INLINE):
                    yield kind, key[len(prefix[0]) :], body[1:]
        for kind in _FILED:
            for path, bodies in self._read(kind, *prefix):
                for key, stored in bodies:
                    yield kind, key[len(prefix[0]) :], stored
                if lost := sum(stored is None for _, stored in bodies):
                    what = "payloads" if kind == PAYLOAD else "answers"
                    _log.warning("%s is missing or damaged: table %r has lost %d %s", path, owner, lost, what)

    def _read(self, kind: int, *prefix: bytes) -> Iterator[tuple[Path, list[tuple[bytes, bytes | None]]]]:
        """Keys and bodies by file; None for one that is missing or damaged. One file is in memory at a time."""
        found = self._file.prompts(kind, *prefix, order="body")
        places = ((*_PLACE.unpack(body), key) for key, body in found if body.startswith(_PLACED))
        for name, rows in groupby(places, key=lambda each: each[1]):
            records = enumerate(salvage(self._path(name), KIND, list[DataError]()))
            place, record, bodies = -1, None, list[tuple[bytes, bytes | None]]()
            for _, _, wanted, check, key in rows:
                while place < wanted and (following := next(records, None)) is not None:
                    place, record = following
                is_there = place == wanted and record is not None and not isinstance(record, DamagedRecord)
                body = record.payload if is_there and record is not None else None
                bodies.append((key, body if body is not None and _bytes.checksum(body) == check else None))
            yield self._path(name), bodies

    # Writing

    def write(self, changes: Mapping[str, Sequence[Saved]]) -> PlannedPrompts:
        """Have payloads and answers on disk when this returns, before the database names them.

        Returns:
            What is to be handed to `replace` once its rows are in the database. If they do not come there, the files
            stay until the next start: after an error of a sync nobody knows whether they are named.

        Raises:
            OSError: a file could not be written, and is not there.
        """
        new = dict[tuple[int, bytes], bytes | None]()
        for owner, each in changes.items():
            prefix, _ = _prefix(owner)
            new |= {(kind, prefix + key): body for kind, key, body in each}
        planned = PlannedPrompts(new, Counter())
        for kind in _FILED:
            filed = {name: body for name, body in new.items() if name[0] == kind and body is not None}
            if sum(map(len, filed.values())) <= INLINE_BYTES:
                new |= {name: _INLINE + body for name, body in filed.items()}
                continue
            checks = [_bytes.checksum(body) for body in filed.values()]
            file = _bytes.checksum(struct.pack(f">{len(checks)}Q", *checks))
            planned.named[file] += len(checks)
            if file not in self._named:
                self._write_file(self._path(file), kind, filed.values())
            new |= {name: _PLACE.pack(_PLACED, file, place, checks[place]) for place, name in enumerate(filed)}
        return planned

    def _write_file(self, path: Path, kind: int, bodies: Iterable[bytes]) -> None:
        if not self._folder.exists():
            private_files.make_folder(self._folder)
            sync(self._folder.parent)
        raw = OwnedFile(private_files.replace(path), str(path), self._at)
        file = io.BufferedWriter(raw, 1 << 20)
        try:
            writer = RecordWriter(file, KIND, 0)
            for body in bodies:
                writer.put(kind, body)
            writer.end()
            file.flush()
            raw.step("sync")
            os.fsync(raw.fileno())
            raw.step("sync folder")
            sync(self._folder)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            with contextlib.suppress(OSError):  # what could not be written cannot be written now
                file.close()
            raw.close()

    def replace(self, planned: PlannedPrompts, former: Iterable[bytes]) -> None:
        """The database has these changes, in the place of rows with the bodies `former`: files that no row names any
        more go.
        """
        self._named.update(planned.named)
        gone = Counter(name for body in former for name in _named_by(body))
        self._named.subtract(gone)
        for name in gone:
            if self._named[name] <= 0:
                del self._named[name]
                self._path(name).unlink(missing_ok=True)


def _named_by(body: bytes) -> tuple[int, ...]:
    """The file that a row names. Other rows begin with another byte: msgpack of an array or a map, or `_INLINE`."""
    return (_PLACE.unpack(body)[1],) if body.startswith(_PLACED) else ()


def _prefix(owner: str) -> tuple[bytes, bytes]:
    """What the keys of a table begin with, and what is above all of them."""
    return owner.encode() + b"\0", owner.encode() + b"\1"
