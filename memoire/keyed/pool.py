"""Rows by partition and key, for columns that no schema names: what `memoire.tq` keeps in a table.

    put "train", "p7_0_0", fields {"responses": ...}, tags {"status": ...}    new fields and tags replace those of the
    put "train", "p7_0_0", fields {"rm_scores": ...}                          same name, the others stay

A value is bytes, which are neither read nor changed here. One of more than a message's length comes in pieces before
the row that has it.

The pool is the rows and their lock; `handlers` answers the messages about them.
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
    PutBack,
    RecordBody,
    SavedRecord,
    Transport,
)
from memoire.limits import HELD_BYTES

from . import messages as keyed

if TYPE_CHECKING:
    from .calls import KeyedCalls

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


def _change_size(row: keyed.PutRow) -> int:
    """Bytes that a change takes at most."""
    size = ROW_BYTES + getsizeof(row.key) + _values_size(row.tags) + _values_size(row.fields)
    return size + sum(VALUE_BYTES + getsizeof(name) + getsizeof(b"") + n for name, n in row.staged_sizes.items())


def _values_size(values: Mapping[str, bytes]) -> int:
    return sum(VALUE_BYTES + getsizeof(name) + getsizeof(value) for name, value in values.items())


def _row_size(key: str, row: KeyedRow) -> int:
    return ROW_BYTES + getsizeof(key) + _values_size(row.tags) + _values_size(row.fields)


class PartitionRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """A partition, before its rows."""

    kind: ClassVar = 10
    is_heading: ClassVar = True
    name: Name


class KeyedRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """A row of the partition before it; the record's payload is its fields in msgpack."""

    kind: ClassVar = 11
    has_payload: ClassVar = True
    key: keyed.Key
    number: Number
    made: Number = 0
    tags: Annotated[dict[str, bytes], Meta(max_length=keyed.MAX_FIELDS)] = {}

    def counted(self, payload_bytes: int) -> dict[str, int]:
        """One more row."""
        return {"rows": 1, "bytes": payload_bytes}

    def called(self, heading: RecordBody | None) -> str:
        """A row of a partition."""
        where = heading.name if isinstance(heading, PartitionRecord) else ""
        return f"row {self.key!r} of partition {where!r}"


_FIELDS: Final = msgspec.msgpack.Decoder(keyed.Fields)


class KeyedPool(LastingPool, HasCalls):
    """The rows of one table. Thread-safe.

    Args:
        schema: Has no column: rows have the fields that their writers name.
        parameters: Nothing of them is followed.
        byte_limit: What rows, their keys and names, and uploads take at most.
        client_timeout: Seconds of silence after which a client is not counted any more.
        clock: Seconds that only grow.
        first: Numbers of rows and of changes are above this one, and so above those of each former life.
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
        self._room = ByteBudget(byte_limit).holder("rows", code="full")
        # Belongs to the waiter's lock.
        self._partitions: dict[str, dict[str, KeyedRow]] = {}
        self._uploads: OrderedDict[tuple[bytes, int], _Upload] = OrderedDict()  # by their newest piece
        self._newest = self._changes = time.time_ns() // 1000 if first is None else first
        self._rows = self._added = 0
        self._is_heir = False  # whether what is put back keeps its numbers

    def rows(self, client: bytes) -> KeyedPool:
        """Its rows; a sign of life of who asks for them. Raises Closed."""
        with self._waiter.lock:
            self._waiter.check_open()
            self._hear(client)
        return self

    def calls(self, transport: Transport) -> KeyedCalls:
        """Those of rows by key: all of them are at one server."""
        from .calls import KeyedCalls

        return KeyedCalls(transport, transport.servers())

    def join(self, budget: ByteBudget, name: str) -> None:
        """Be a holder of that name from now on: rows that have no room beside what others hold are refused."""
        self._room = budget.holder(name, code="full")

    def _take(self, size: int) -> None:
        """Have so many bytes more. Raises ProtocolError (code "full" or "too_large"), and takes nothing then."""
        held = self._room.bytes
        if size > 0 and held + size > self.byte_limit:
            text = (
                f"{size:,} more bytes of {self._room.name} have no room: {self.byte_limit:,} may be held there "
                f"(its byte_limit, or its share of held_bytes), and {held:,} are. Clear what is no longer needed, or "
                "set a larger one"
            )
            raise ProtocolError("too_large" if size > self.byte_limit else "full", text)
        self._room.take(size)

    @property
    def held(self) -> tuple[int, int]:
        """Rows, and the bytes of all that is kept."""
        with self._waiter.lock:
            return self._rows, self._room.bytes

    def stage(self, client: bytes, upload: int, offset: int, piece: Buffer, now: float) -> None:
        """Append a piece to an upload; one that came before is ignored.

        Raises:
            ProtocolError: pieces before it are not here, or there is no room: for its bytes (code "full"), or for a
                further upload beside those that are under way (code "busy").
        """
        with self._waiter.lock:
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
            self._take(max(0, size - staged.size))
            content += piece
            staged.size = max(size, staged.size)
            staged.came, self._uploads[key] = now, staged
            self._uploads.move_to_end(key)

    def give_up(self, now: float) -> None:
        """Forget uploads that do not go on."""
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
        """The bytes of an upload, of which these changes name some. Raises ProtocolError if they are not all here."""
        found = self._uploads.get(upload)
        staged = b"" if found is None else found.content
        for part in (part for change in changes for part in change.staged):
            end = part.start + part.bytes
            if end > len(staged):
                raise ProtocolError("value", f"bytes {part.start} to {end} of an upload of {len(staged)}")
        return staged

    def unstage(self, client: bytes, upload: int) -> None:
        """Forget an upload: the rows that it was for are written."""
        with self._waiter.lock:
            self._forget(client, upload)

    def put(
        self, partition: str, changes: Sequence[keyed.PutRow], upload: tuple[bytes, int] = (b"", 0)
    ) -> list[KeyedRow]:
        """Write rows, all or none; returns them as they are then.

        Args:
            upload: Client and number of the upload that staged values are bytes of.

        Raises:
            ProtocolError: there is no room (code "full"), or bytes of the upload are not here.
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
        """Write a change for which its whole size was taken; what it did not need is given back."""
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
        for held, brought in ((row.tags, change.tags), (row.fields, change.fields), (row.fields, fields)):
            for name, value in brought.items():
                if name in held:
                    self._take(-VALUE_BYTES - getsizeof(name) - getsizeof(held[name]))
                held[name] = value
        return row

    def remove(self, partition: str, keys: Sequence[str]) -> int:
        """Take rows away; returns how many were here."""
        with self._waiter.lock:
            rows = self._partitions.get(partition, {})
            gone = [row for key in keys if (row := rows.pop(key, None)) is not None and self._left(key, row)]
            return len(gone)

    def _left(self, key: str, row: KeyedRow) -> bool:
        self._rows -= 1
        self._take(-_row_size(key, row))
        return True

    def reset(self) -> None:
        """Take all rows away, of all partitions."""
        with self._waiter.lock:
            for name, rows in self._partitions.items():
                self._take(-ROW_BYTES - getsizeof(name))
                for key, row in rows.items():
                    self._left(key, row)
            self._partitions.clear()

    def find(self, partition: str, keys: Sequence[str]) -> list[KeyedRow | None]:
        """Rows by key, as they are now; None for a key that is not here."""
        with self._waiter.lock:
            rows = self._partitions.get(partition, {})
            return [rows.get(key) for key in keys]

    def partitions(self, name: str | None) -> list[str]:
        """Partitions that had a row since the last reset; of this name, or all of them."""
        with self._waiter.lock:
            return list(self._partitions) if name is None else [name] if name in self._partitions else []

    def walk(self, partition: str | None, after: int) -> Iterator[tuple[str, str, KeyedRow]]:
        """Partition, key and row of each row above a number, in the order in which they were made; None: of all
        partitions. Those that are here now, as they are now.
        """
        with self._waiter.lock:
            names = self._partitions if partition is None else [partition]
            found = [
                (name, key, row)
                for name in names
                for key, row in self._partitions.get(name, {}).items()
                if row.number > after
            ]
        yield from sorted(found, key=lambda each: each[2].number)

    # What every pool does

    def limit(self, byte_limit: int) -> int:
        """Hold at most this many bytes from now on. What is held stays; returns 0."""
        self.byte_limit = byte_limit
        return 0

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Nothing follows parameters; returns 0."""
        self.parameters = parameters
        return 0

    def entries(self) -> int:
        """Rows."""
        return self._rows

    @property
    def unfinished(self) -> int:
        """Rows that somebody has yet to read and clear."""
        return self._rows

    def stats(self) -> PoolStats:
        """A frozen picture; what is called caches elsewhere are rows here."""
        with self._waiter.lock:
            return PoolStats(
                clients=len(self._clients), caches=self._rows, bytes=self._room.bytes, unused=self._rows,
                held=self._rows, added=self._added, drawn=0, overwritten=0, overwritten_samples=0, left=0, misses=0,
            )  # fmt: skip

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """How many bytes rows have."""
        with self._waiter.lock:
            rows = ((key, row) for rows in self._partitions.values() for key, row in rows.items())
            sizes = [_row_size(key, row) for key, row in itertools.islice(rows, most)]
            count = self._rows
        spread, ages = Histogram.of(np.array(sizes, np.float64)), Histogram.of(np.empty(0))
        return Distribution(len(sizes), count, float(count), float(count), None, spread, ages)

    def go_on_from(self, state: Any, *, is_same: bool) -> None:
        """Rows that are put back keep their numbers in the next life of their table."""
        self._is_heir = is_same

    @property
    def is_untouched(self) -> bool:
        """Whether no row was ever written."""
        return not (self._partitions or self._added)

    def records(self) -> Iterator[tuple[RecordBody, Any]]:
        """Each partition, and behind it its rows in the order in which they were made, as they are by then."""
        for partition in self.partitions(None):
            yield PartitionRecord(name=partition), b""
            for _, key, row in self.walk(partition, 0):
                fields = msgspec.msgpack.encode(row.fields)
                yield KeyedRecord(key=key, number=row.number, made=row.made, tags=row.tags), fields

    def put_record(self, record: SavedRecord) -> PutBack:
        """Hold a partition or a row of a snapshot; a row that is here stays as it is."""
        body = record.body
        if isinstance(body, PartitionRecord):
            with self._waiter.lock:
                self._waiter.check_open()
                if body.name not in self._partitions:
                    self._take(ROW_BYTES + getsizeof(body.name))
                    self._partitions[body.name] = {}
            return PutBack(True)
        if not isinstance(body, KeyedRecord) or not isinstance(record.heading, PartitionRecord):
            raise ProtocolError("container", "a record of a kind that is not known here")
        try:
            fields = _FIELDS.decode(record.payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError("payload", f"its fields cannot be read: {error}") from None
        with self._waiter.lock:
            self._waiter.check_open()
            return self._put_back(record.heading.name, body, fields)

    def _put_back(self, partition: str, body: KeyedRecord, fields: dict[str, bytes]) -> PutBack:
        rows = self._partitions.get(partition, {})
        if body.key in rows:
            return PutBack(False)
        change = keyed.PutRow(body.key, body.tags, fields, made=body.made)
        self._take(_change_size(change))
        self._partitions[partition] = rows
        row = self._write(rows, change, memoryview(b""))
        if self._is_heir:
            row.number, self._newest = body.number, max(body.number, self._newest)
        return PutBack(True, 0, {"rows": 1})
