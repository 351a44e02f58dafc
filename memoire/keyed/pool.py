"""Pool of rows by partition and key, without a schema: the storage of `memoire.tq`.

    put "train", "p7_0_0", fields {"responses": ...}, tags {"status": ...}    new fields and tags replace those of the
    put "train", "p7_0_0", fields {"rm_scores": ...}                          same name, the others stay

Values are bytes that the pool neither reads nor changes. A value larger than a message is uploaded in pieces before its
row.

The pool holds the rows and their lock; `handlers` answers the messages about rows.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
from msgspec import Meta

from memoire import Parameters, Schema
from memoire.errors import ProtocolError
from memoire.kinds import (
    DEFAULTS,
    MAX_INSPECTED,
    Buffer,
    ByteBudget,
    Distribution,
    HasCalls,
    Histogram,
    LastingPool,
    Name,
    Number,
    PoolStats,
    RecordBody,
    RestoreOutcome,
    SavedRecord,
    Transport,
)
from memoire.limits import HELD_BYTES

from . import messages as keyed

if TYPE_CHECKING:
    from .calls import KeyedCalls

MAX_UPLOADS = 64
"""Maximum number of unfinished uploads; a new upload beyond is refused until another is used or expires."""
UPLOAD_TIMEOUT = 60.0
"""Seconds after the newest piece until an unfinished upload expires."""
ROW_BYTES = 512
"""Approximate memory overhead of a row or a partition, in bytes."""
VALUE_BYTES = 96
"""Approximate memory overhead of a tag or value, in bytes."""
UPLOAD_BYTES = 512
"""Approximate memory overhead of an upload, in bytes."""


@dataclass(slots=True)
class _Upload:
    content: bytearray
    came: float
    """Arrival time of the newest piece."""
    size: int = 0
    """Bytes reserved for the upload."""


@dataclass(slots=True)
class KeyedRow:
    """Version of a row after one change: its number, creation time by its writer's clock, and bytes by name. The next
    change makes a new object.
    """

    number: int
    made: int = 0
    version: int = 0
    """Number of the change, counted over all rows."""
    tags: dict[str, bytes] = field(default_factory=dict)
    fields: dict[str, bytes] = field(default_factory=dict)


def _change_size(row: keyed.PutRow) -> int:
    """Return the maximum memory of a change, in bytes."""
    size = ROW_BYTES + getsizeof(row.key) + _values_size(row.tags) + _values_size(row.fields)
    return size + sum(VALUE_BYTES + getsizeof(name) + getsizeof(b"") + n for name, n in row.staged_sizes.items())


def _values_size(values: Mapping[str, bytes]) -> int:
    return sum(VALUE_BYTES + getsizeof(name) + getsizeof(value) for name, value in values.items())


def _row_size(key: str, row: KeyedRow) -> int:
    return ROW_BYTES + getsizeof(key) + _values_size(row.tags) + _values_size(row.fields)


class PartitionRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Snapshot record of a partition; its rows follow."""

    kind: ClassVar = 10
    is_heading: ClassVar = True
    name: Name


class KeyedRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Snapshot record of a row of the partition before it; the payload has the row's fields in msgpack."""

    kind: ClassVar = 11
    has_payload: ClassVar = True
    key: keyed.Key
    number: Number
    made: Number = 0
    tags: Annotated[dict[str, bytes], Meta(max_length=keyed.MAX_FIELDS)] = {}

    def count_contribution(self, payload_bytes: int) -> dict[str, int]:
        """Return the row's contribution to the file's counts."""
        return {"rows": 1, "bytes": payload_bytes}

    def description(self, heading: RecordBody | None) -> str:
        """Return the description of the row for error messages."""
        partition = heading.name if isinstance(heading, PartitionRecord) else ""
        return f"row {self.key!r} of partition {partition!r}"


_FIELDS: Final = msgspec.msgpack.Decoder(keyed.Fields)


class KeyedPool(LastingPool, HasCalls):
    """Pool of the rows of one table. Thread-safe.

    Args:
        schema: Ignored; rows have the fields that their writers name.
        parameters: Stored, but without effect.
        byte_limit: Maximum bytes of rows with keys and names, and of uploads.
        client_timeout: Seconds of silence after which a client is no longer counted.
        clock: Monotonic clock in seconds.
        first: Numbers of rows and changes are above `first`, and so above the numbers before any restart.
    """

    parameters: Parameters
    byte_limit: int
    least_bytes: int

    def __init__(
        self,
        schema: Schema | None = None,
        parameters: Parameters | None = None,
        *,
        byte_limit: int = HELD_BYTES,
        client_timeout: float = DEFAULTS.client_timeout,
        clock: Callable[[], float] = time.monotonic,
        first: int | None = None,
    ) -> None:
        super().__init__(client_timeout, clock)
        self.parameters, self.byte_limit, self.least_bytes = parameters or Parameters(), byte_limit, 1
        self._room = ByteBudget(byte_limit).add_holder("rows", code="full")
        # Belongs to the waiter's lock.
        self._partitions: dict[str, dict[str, KeyedRow]] = {}
        self._uploads: OrderedDict[tuple[bytes, int], _Upload] = OrderedDict()  # ordered by the newest piece
        self._newest = self._changes = time.time_ns() // 1000 if first is None else first
        self._rows = self._added = 0
        self._is_heir = False  # True: the pool's restored rows keep their numbers

    def pool_for_client(self, client: bytes) -> KeyedPool:
        """Return this pool, and record a sign of life of the client. Raise Closed."""
        with self._waiter.lock:
            self._waiter.check_open()
            self._hear(client)
        return self

    def calls(self, transport: Transport) -> KeyedCalls:
        """Return calls for rows by key. The keys are distributed over the servers."""
        from .calls import KeyedCalls

        return KeyedCalls(transport, transport.servers())

    def join_budget(self, budget: ByteBudget, name: str) -> None:
        """Join a byte budget under this name. Rows without room beside the other holders are refused."""
        self._room = budget.add_holder(name, code="full")

    def _take(self, size: int) -> None:
        """Reserve bytes, or release them if negative. Raise ProtocolError (code "full" or "too_large") without room."""
        held = self._room.bytes
        if size > 0 and held + size > self.byte_limit:
            text = (
                f"{size:,} more bytes of {self._room.name} have no room: {self.byte_limit:,} may be held "
                f"(its byte_limit, or its share of held_bytes), and {held:,} are. Clear rows that are no longer "
                "needed, or set a larger limit"
            )
            raise ProtocolError("too_large" if size > self.byte_limit else "full", text)
        self._room.take(size)

    @property
    def held(self) -> tuple[int, int]:
        """Number of rows, and bytes of rows and uploads."""
        with self._waiter.lock:
            return self._rows, self._room.bytes

    def append_upload_piece(self, client: bytes, upload: int, offset: int, piece: Buffer, now: float) -> None:
        """Append a piece to an upload; ignore a piece that was received before.

        Raises:
            ProtocolError: earlier pieces are missing; or no room is left for the bytes (code "full"), or for a further
                upload (code "busy").
        """
        with self._waiter.lock:
            key = client, upload
            staged = self._uploads.get(key) or _Upload(bytearray(), now)
            content = staged.content
            if offset > len(content):
                raise ProtocolError(
                    "value", f"a piece starts at byte {offset} of an upload that has {len(content)} bytes so far"
                )
            if offset < len(content):
                return
            if key not in self._uploads and len(self._uploads) >= MAX_UPLOADS:
                text = f"{len(self._uploads)} uploads are under way, which is the limit. Retry when an upload has ended"
                raise ProtocolError("busy", text)
            longer = len(content) + len(piece)
            size = UPLOAD_BYTES + longer + (longer >> 3)  # a bytearray overallocates by an eighth
            self._take(max(0, size - staged.size))
            content += piece
            staged.size = max(size, staged.size)
            staged.came, self._uploads[key] = now, staged
            self._uploads.move_to_end(key)

    def expire_uploads(self, now: float) -> None:
        """Expire uploads that have got no piece for `UPLOAD_TIMEOUT`."""
        with self._waiter.lock:
            while self._uploads:
                key, staged = next(iter(self._uploads.items()))
                if now < staged.came + UPLOAD_TIMEOUT:
                    return
                self._forget(*key)

    def _forget(self, client: bytes, upload: int) -> None:
        staged = self._uploads.pop((client, upload), None)
        self._take(0 if staged is None else -staged.size)

    def _staged(self, upload: tuple[bytes, int], changes: Sequence[keyed.PutRow]) -> bytes | bytearray:
        """Return an upload's bytes. Raise ProtocolError if bytes that a change refers to are missing."""
        known = self._uploads.get(upload)
        staged = b"" if known is None else known.content
        for part in (part for change in changes for part in change.staged):
            end = part.start + part.bytes
            if end > len(staged):
                raise ProtocolError(
                    "value", f"bytes {part.start} to {end} were requested of an upload of {len(staged)} bytes"
                )
        return staged

    def discard_upload(self, client: bytes, upload: int) -> None:
        """Discard an upload after its rows are written."""
        with self._waiter.lock:
            self._forget(client, upload)

    def put(
        self, partition: str, changes: Sequence[keyed.PutRow], upload: tuple[bytes, int] = (b"", 0)
    ) -> list[KeyedRow]:
        """Write all of the rows or nothing; return their new versions.

        Args:
            upload: Client and number of the upload that has the bytes of staged values.

        Raises:
            ProtocolError: there is no room (code "full"), or bytes of the upload are missing.
        """
        with self._waiter.lock:
            staged = self._staged(upload, changes)
            size = sum(map(_change_size, changes))
            if partition not in self._partitions:
                size += ROW_BYTES + getsizeof(partition)
            self._take(size)
            rows = self._partitions.setdefault(partition, {})
            with memoryview(staged) as view:
                return [self._write(rows, change, view) for change in changes]

    def _write(self, rows: dict[str, KeyedRow], change: keyed.PutRow, staged: memoryview) -> KeyedRow:
        """Write a change, and release the part of the reserved bytes that the change does not need."""
        former = rows.get(change.key)
        self._changes += 1
        if former is None:
            self._newest += 1
            row = KeyedRow(self._newest, change.made, self._changes)
            self._rows, self._added = self._rows + 1, self._added + 1
        else:
            row = KeyedRow(former.number, former.made, self._changes, dict(former.tags), dict(former.fields))
            self._take(-ROW_BYTES - getsizeof(change.key))
        rows[change.key] = row
        fields = {each.field: bytes(staged[each.start : each.start + each.bytes]) for each in change.staged}
        for held, values in ((row.tags, change.tags), (row.fields, change.fields), (row.fields, fields)):
            for name, value in values.items():
                if name in held:
                    self._take(-VALUE_BYTES - getsizeof(name) - getsizeof(held[name]))
                held[name] = value
        return row

    def remove(self, partition: str, keys: Sequence[str]) -> int:
        """Delete rows; return the number of deleted rows."""
        with self._waiter.lock:
            rows = self._partitions.get(partition, {})
            gone = [row for key in keys if (row := rows.pop(key, None)) is not None and self._uncount(key, row)]
            return len(gone)

    def _uncount(self, key: str, row: KeyedRow) -> bool:
        self._rows -= 1
        self._take(-_row_size(key, row))
        return True

    def reset(self) -> None:
        """Delete all rows of all partitions."""
        with self._waiter.lock:
            for name, rows in self._partitions.items():
                self._take(-ROW_BYTES - getsizeof(name))
                for key, row in rows.items():
                    self._uncount(key, row)
            self._partitions.clear()

    def find(self, partition: str, keys: Sequence[str]) -> list[KeyedRow | None]:
        """Return the current rows of these keys; None for a key without a row."""
        with self._waiter.lock:
            rows = self._partitions.get(partition, {})
            return [rows.get(key) for key in keys]

    def partitions(self, name: str | None) -> list[str]:
        """Return the partitions that had a row since the last reset: `name`, or all partitions for None."""
        with self._waiter.lock:
            return list(self._partitions) if name is None else [name] if name in self._partitions else []

    def walk(self, partition: str | None, after: int) -> Iterator[tuple[str, str, KeyedRow]]:
        """Yield partition, key and row for each current row above a number, ordered by number; None: all partitions."""
        with self._waiter.lock:
            names = self._partitions if partition is None else [partition]
            rows = [
                (name, key, row)
                for name in names
                for key, row in self._partitions.get(name, {}).items()
                if row.number > after
            ]
        yield from sorted(rows, key=lambda each: each[2].number)

    # Methods of every pool

    def limit_bytes(self, byte_limit: int) -> int:
        """Set the byte limit and return 0. Held rows stay."""
        self.byte_limit = byte_limit
        return 0

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Store the parameters, which have no effect, and return 0."""
        self.parameters = parameters
        return 0

    def entries(self) -> int:
        """Return the number of rows."""
        return self._rows

    @property
    def unfinished(self) -> int:
        """Number of rows that clients have yet to read and clear."""
        return self._rows

    def stats(self) -> PoolStats:
        """Return frozen figures of the pool; `caches` counts rows."""
        with self._waiter.lock:
            return PoolStats(
                clients=len(self._clients), caches=self._rows, bytes=self._room.bytes, unused=self._rows,
                held=self._rows, added=self._added, drawn=0, overwritten=0, overwritten_samples=0, left=0, misses=0,
            )  # fmt: skip

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """Return the distribution of the rows' bytes."""
        with self._waiter.lock:
            rows = ((key, row) for rows in self._partitions.values() for key, row in rows.items())
            sizes = [_row_size(key, row) for key, row in itertools.islice(rows, most)]
            count = self._rows
        spread, ages = Histogram.from_values(np.array(sizes, np.float64)), Histogram.from_values(np.empty(0))
        return Distribution(len(sizes), count, float(count), float(count), None, spread, ages)

    def restore_state(self, state: Any, *, is_same: bool) -> None:
        """Keep the numbers of restored rows if `is_same`, that is after a restart."""
        self._is_heir = is_same

    @property
    def is_untouched(self) -> bool:
        """True if no row was ever written."""
        return not (self._partitions or self._added)

    def records(self) -> Iterator[tuple[RecordBody, Any]]:
        """Yield each partition, followed by its current rows in the order of their creation."""
        for partition in self.partitions(None):
            yield PartitionRecord(name=partition), b""
            for _, key, row in self.walk(partition, 0):
                fields = msgspec.msgpack.encode(row.fields)
                yield KeyedRecord(key=key, number=row.number, made=row.made, tags=row.tags), fields

    def put_record(self, record: SavedRecord) -> RestoreOutcome:
        """Restore a partition or a row of a snapshot; a row that exists stays unchanged."""
        body = record.body
        if isinstance(body, PartitionRecord):
            with self._waiter.lock:
                self._waiter.check_open()
                if body.name not in self._partitions:
                    self._take(ROW_BYTES + getsizeof(body.name))
                    self._partitions[body.name] = {}
            return RestoreOutcome(True)
        if not isinstance(body, KeyedRecord) or not isinstance(record.heading, PartitionRecord):
            raise ProtocolError("container", "the record is of no partition or row")
        try:
            fields = _FIELDS.decode(record.payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError("payload", f"the fields of row {body.key!r} cannot be read: {error}") from None
        with self._waiter.lock:
            self._waiter.check_open()
            return self._put_back(record.heading.name, body, fields)

    def _put_back(self, partition: str, body: KeyedRecord, fields: dict[str, bytes]) -> RestoreOutcome:
        rows = self._partitions.get(partition, {})
        if body.key in rows:
            return RestoreOutcome(False)
        change = keyed.PutRow(body.key, body.tags, fields, made=body.made)
        self._take(_change_size(change))
        self._partitions[partition] = rows
        row = self._write(rows, change, memoryview(b""))
        if self._is_heir:
            row.number, self._newest = body.number, max(body.number, self._newest)
        return RestoreOutcome(True, 0, {"rows": 1})
