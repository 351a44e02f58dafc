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

from memoire.errors import ProtocolError

MAX_UPLOADS = 64
"""Uploads that are not used yet; beyond, a new one has to wait until another one is used, or is given up."""
UPLOAD_TIMEOUT = 60.0
"""Seconds after its newest piece for which an upload is kept: its sender has died."""
ROW_BYTES = 512
"""What a row takes besides its key and values, about."""


@dataclass(slots=True)
class _Upload:
    content: bytearray
    came: float
    """When its newest piece came."""


@dataclass(slots=True)
class KeyedRow:
    """A row: its number, when it was made by its writer's clock, and bytes by name."""

    number: int
    made: int = 0
    tags: dict[str, bytes] = field(default_factory=dict)
    fields: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowChange:
    """What is to be written into the row of a key."""

    key: str
    tags: Mapping[str, bytes]
    fields: Mapping[str, bytes]
    made: int = 0

    @property
    def size(self) -> int:
        """Bytes that it brings."""
        return sum(len(value) for values in (self.tags, self.fields) for value in values.values())


class KeyedStore:
    """The rows of a server.

    Args:
        byte_limit: Bytes of keys, tags, values and uploads that are held at most.
    """

    def __init__(self, byte_limit: int) -> None:
        self._lock = threading.Lock()
        self._byte_limit = byte_limit
        self._partitions: dict[str, dict[str, KeyedRow]] = {}
        self._uploads: OrderedDict[tuple[bytes, int], _Upload] = OrderedDict()  # by their newest piece
        self._newest = 0
        self._rows = self._bytes = 0

    @property
    def held(self) -> tuple[int, int]:
        """Rows, and their bytes with those of uploads."""
        with self._lock:
            return self._rows, self._bytes

    def stage(self, client: bytes, upload: int, offset: int, piece: bytes, now: float) -> None:
        """Append a piece to an upload; one that came before is ignored.

        Raises:
            ProtocolError: pieces before it are not here, or there is no room: for its bytes (code "full"), or for a
                further upload beside those that are under way (code "busy").
        """
        with self._lock:
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
            self._make_room(len(piece))
            content += piece
            self._bytes += len(piece)
            staged.came, self._uploads[key] = now, staged
            self._uploads.move_to_end(key)

    def give_up(self, now: float) -> None:
        """Forget uploads that do not go on."""
        with self._lock:
            while self._uploads:
                key, staged = next(iter(self._uploads.items()))
                if now < staged.came + UPLOAD_TIMEOUT:
                    return
                self._forget(*key)

    def _forget(self, client: bytes, upload: int) -> None:
        staged = self._uploads.pop((client, upload), None)
        self._bytes -= 0 if staged is None else len(staged.content)

    def staged(self, client: bytes, upload: int, start: int, size: int) -> bytes:
        """Bytes of an upload. Raises ProtocolError if they are not here."""
        with self._lock:
            found = self._uploads.get((client, upload))
            staged = b"" if found is None else found.content
            if start + size > len(staged):
                raise ProtocolError("value", f"bytes {start} to {start + size} of an upload of {len(staged)}")
            return bytes(staged[start : start + size])

    def unstage(self, client: bytes, upload: int) -> None:
        """Forget an upload: the rows that it was for are written."""
        with self._lock:
            self._forget(client, upload)

    def put(self, partition: str, changes: Sequence[RowChange]) -> list[KeyedRow]:
        """Write rows, all or none; returns them as they are then, without a copy.

        Raises:
            ProtocolError: there is no room (code "full"): `byte_limit` says how much is held.
        """
        with self._lock:
            self._make_room(sum(change.size for change in changes))
            rows = self._partitions.setdefault(partition, {})
            return [self._write(rows, change) for change in changes]

    def _make_room(self, size: int) -> None:
        if self._bytes + size > self._byte_limit:
            raise ProtocolError(
                "full",
                f"{self._bytes} bytes of keyed rows are held and {size} more came; {self._byte_limit} are the most "
                f"(limits.held_bytes). Clear keys that are not needed any more",
            )

    def _write(self, rows: dict[str, KeyedRow], change: RowChange) -> KeyedRow:
        row = rows.get(change.key)
        if row is None:
            self._newest += 1
            row = rows[change.key] = KeyedRow(self._newest, change.made)
            self._rows += 1
            self._bytes += ROW_BYTES + len(change.key)
        for held, brought in ((row.tags, change.tags), (row.fields, change.fields)):
            for name, value in brought.items():
                self._bytes += len(value) - len(held.get(name, b""))
                held[name] = value
        return row

    def clear(self, partition: str, keys: Sequence[str]) -> int:
        """Take rows away; returns how many were here."""
        with self._lock:
            rows = self._partitions.get(partition, {})
            gone = [row for key in keys if (row := rows.pop(key, None)) is not None and self._left(key, row)]
            return len(gone)

    def _left(self, key: str, row: KeyedRow) -> bool:
        self._rows -= 1
        values = (*row.tags.values(), *row.fields.values())
        self._bytes -= ROW_BYTES + len(key) + sum(len(value) for value in values)
        return True

    def reset(self) -> None:
        """Take all rows away, of all partitions."""
        with self._lock:
            for rows in self._partitions.values():
                for key, row in rows.items():
                    self._left(key, row)
            self._partitions.clear()

    def find(self, partition: str, keys: Sequence[str]) -> list[KeyedRow | None]:
        """Rows by key, without a copy: they may change. None for a key that is not here."""
        with self._lock:
            rows = self._partitions.get(partition, {})
            return [rows.get(key) for key in keys]

    def partitions(self, name: str | None) -> list[str]:
        """Partitions that had a row since the last reset; of this name, or all of them."""
        with self._lock:
            return list(self._partitions) if name is None else [name] if name in self._partitions else []

    def walk(self, partition: str | None, after: int) -> Iterator[tuple[str, str, KeyedRow]]:
        """Partition, key and row of each row above a number, in the order in which they were made; None: of all
        partitions. Those that are here now; others may change while they are read.
        """
        with self._lock:
            names = self._partitions if partition is None else [partition]
            found = [
                (name, key, row)
                for name in names
                for key, row in self._partitions.get(name, {}).items()
                if row.number > after
            ]
        yield from sorted(found, key=lambda each: each[2].number)
