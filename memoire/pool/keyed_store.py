"""Rows by partition and key, for whoever keeps columns that no schema names: `memoire.tq`. Thread-safe, no I/O.

    put "train", "p7_0_0", fields {"responses": ...}, tags {"status": ...}    new fields and tags replace those of the
    put "train", "p7_0_0", fields {"rm_scores": ...}                          same name, the others stay

A value is bytes, which are neither read nor changed here. One of more than a message's length comes in pieces before
the row that has it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import getsizeof

from memoire import _core
from memoire.errors import ProtocolError
from memoire.wire.byte_budget import ByteHolder
from memoire.wire.frames import Buffer

MAX_UPLOADS = 64
"""Uploads that are not used yet; beyond, a new one has to wait until another one is used, or is given up."""
UPLOAD_TIMEOUT = 60.0
"""Seconds after its newest piece for which an upload is kept: its sender has died."""
ROW_BYTES = 512
"""What a row, or a partition, takes besides its key and values, about."""
VALUE_BYTES = 96
"""What a tag or value takes besides its name and bytes, about."""
UPLOAD_BYTES = 512
"""What an upload takes besides its bytes, about."""


@dataclass(slots=True)
class _Upload:
    content: bytearray
    came: float
    """When its newest piece came."""
    size: int = 0
    """Bytes that were taken for it."""


@dataclass(slots=True)
class KeyedRow:
    """A row as one change has left it: its number, when it was made by its writer's clock, and bytes by name. The next
    change makes another object of it.
    """

    number: int
    made: int = 0
    version: int = 0
    """Number of that change, over all rows."""
    tags: dict[str, bytes] = field(default_factory=dict)
    fields: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowChange:
    """What is to be written into the row of a key."""

    key: str
    tags: Mapping[str, bytes]
    fields: Mapping[str, bytes]
    made: int = 0
    staged: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Fields whose values are bytes of an upload: where each begins there, and its size."""

    @property
    def size(self) -> int:
        """Bytes that it takes at most."""
        size = ROW_BYTES + getsizeof(self.key) + _values_size(self.tags) + _values_size(self.fields)
        return size + sum(VALUE_BYTES + getsizeof(name) + getsizeof(b"") + n for name, (_, n) in self.staged.items())


def _values_size(values: Mapping[str, bytes]) -> int:
    return sum(VALUE_BYTES + getsizeof(name) + getsizeof(value) for name, value in values.items())


def _row_size(key: str, row: KeyedRow) -> int:
    return ROW_BYTES + getsizeof(key) + _values_size(row.tags) + _values_size(row.fields)


class KeyedStore:
    """The rows of a server.

    Args:
        room: What rows, their keys and names, and uploads take.
    """

    def __init__(self, room: ByteHolder) -> None:
        self._lock = threading.Lock()
        self._room = room
        self._partitions: dict[str, dict[str, KeyedRow]] = {}
        self._uploads: OrderedDict[tuple[bytes, int], _Upload] = OrderedDict()  # by their newest piece
        self._newest = self._changes = 0
        self._rows = 0

    @property
    def held(self) -> tuple[int, int]:
        """Rows, and the bytes of all that is kept."""
        with _core.Held(self._lock):
            return self._rows, self._room.bytes

    def stage(self, client: bytes, upload: int, offset: int, piece: Buffer, now: float) -> None:
        """Append a piece to an upload; one that came before is ignored.

        Raises:
            ProtocolError: pieces before it are not here, or there is no room: for its bytes (code "full"), or for a
                further upload beside those that are under way (code "busy").
        """
        with _core.Held(self._lock):
            key = client, upload
            staged = self._uploads.get(key) or _Upload(bytearray(), now)
            content = staged.content
            if offset > len(content):
                raise ProtocolError("value", f"a piece at {offset} of an upload of which {len(content)} bytes came")
            if offset < len(content):
                return
            if key not in self._uploads and len(self._uploads) >= MAX_UPLOADS:
                text = (
                    f"{len(self._uploads)} uploads are under way, as many as may be. Send it again when one has ended"
                )
                raise ProtocolError("busy", text)
            longer = len(content) + len(piece)
            size = UPLOAD_BYTES + longer + (longer >> 3)  # a bytearray grows by an eighth more than is asked for
            self._room.take(max(0, size - staged.size))
            content += piece
            staged.size = max(size, staged.size)
            staged.came, self._uploads[key] = now, staged
            self._uploads.move_to_end(key)

    def give_up(self, now: float) -> None:
        """Forget uploads that do not go on."""
        with _core.Held(self._lock):
            while self._uploads:
                key, staged = next(iter(self._uploads.items()))
                if now < staged.came + UPLOAD_TIMEOUT:
                    return
                self._forget(*key)

    def _forget(self, client: bytes, upload: int) -> None:
        staged = self._uploads.pop((client, upload), None)
        self._room.take(0 if staged is None else -staged.size)

    def _staged(self, upload: tuple[bytes, int], changes: Sequence[RowChange]) -> bytes | bytearray:
        """The bytes of an upload, of which these changes name some. Raises ProtocolError if they are not all here."""
        found = self._uploads.get(upload)
        staged = b"" if found is None else found.content
        for start, size in (part for change in changes for part in change.staged.values()):
            if start + size > len(staged):
                raise ProtocolError("value", f"bytes {start} to {start + size} of an upload of {len(staged)}")
        return staged

    def unstage(self, client: bytes, upload: int) -> None:
        """Forget an upload: the rows that it was for are written."""
        with _core.Held(self._lock):
            self._forget(client, upload)

    def put(self, partition: str, changes: Sequence[RowChange], upload: tuple[bytes, int] = (b"", 0)) -> list[KeyedRow]:
        """Write rows, all or none; returns them as they are then.

        Args:
            upload: Client and number of the upload that staged values are bytes of.

        Raises:
            ProtocolError: there is no room (code "full"), or bytes of the upload are not here.
        """
        with _core.Held(self._lock):
            staged = self._staged(upload, changes)
            size = sum(change.size for change in changes)
            if partition not in self._partitions:
                size += ROW_BYTES + getsizeof(partition)
            self._room.take(size)
            rows = self._partitions.setdefault(partition, {})
            with memoryview(staged) as view:
                return [self._write(rows, change, view) for change in changes]

    def _write(self, rows: dict[str, KeyedRow], change: RowChange, staged: memoryview) -> KeyedRow:
        """Write a change for which its whole size was taken; what it did not need is given back."""
        former = rows.get(change.key)
        self._changes += 1
        if former is None:
            self._newest += 1
            row = KeyedRow(self._newest, change.made, self._changes)
            self._rows += 1
        else:
            row = KeyedRow(former.number, former.made, self._changes, dict(former.tags), dict(former.fields))
            self._room.take(-ROW_BYTES - getsizeof(change.key))
        rows[change.key] = row
        fields = {name: bytes(staged[start : start + size]) for name, (start, size) in change.staged.items()}
        for held, brought in ((row.tags, change.tags), (row.fields, change.fields), (row.fields, fields)):
            for name, value in brought.items():
                if name in held:
                    self._room.take(-VALUE_BYTES - getsizeof(name) - getsizeof(held[name]))
                held[name] = value
        return row

    def clear(self, partition: str, keys: Sequence[str]) -> int:
        """Take rows away; returns how many were here."""
        with _core.Held(self._lock):
            rows = self._partitions.get(partition, {})
            gone = [row for key in keys if (row := rows.pop(key, None)) is not None and self._left(key, row)]
            return len(gone)

    def _left(self, key: str, row: KeyedRow) -> bool:
        self._rows -= 1
        self._room.take(-_row_size(key, row))
        return True

    def reset(self) -> None:
        """Take all rows away, of all partitions."""
        with _core.Held(self._lock):
            for name, rows in self._partitions.items():
                self._room.take(-ROW_BYTES - getsizeof(name))
                for key, row in rows.items():
                    self._left(key, row)
            self._partitions.clear()

    def find(self, partition: str, keys: Sequence[str]) -> list[KeyedRow | None]:
        """Rows by key, as they are now; None for a key that is not here."""
        with _core.Held(self._lock):
            rows = self._partitions.get(partition, {})
            return [rows.get(key) for key in keys]

    def partitions(self, name: str | None) -> list[str]:
        """Partitions that had a row since the last reset; of this name, or all of them."""
        with _core.Held(self._lock):
            return list(self._partitions) if name is None else [name] if name in self._partitions else []

    def walk(self, partition: str | None, after: int) -> Iterator[tuple[str, str, KeyedRow]]:
        """Partition, key and row of each row above a number, in the order in which they were made; None: of all
        partitions. Those that are here now, as they are now.
        """
        with _core.Held(self._lock):
            names = self._partitions if partition is None else [partition]
            found = [
                (name, key, row)
                for name in names
                for key, row in self._partitions.get(name, {}).items()
                if row.number > after
            ]
        yield from sorted(found, key=lambda each: each[2].number)
