"""Rows by partition and key, for whoever keeps columns that no schema names: `memoire.tq`. Thread-safe, no I/O.

    put "train", "p7_0_0", fields {"responses": ...}, tags {"status": ...}    new fields and tags replace those of the
    put "train", "p7_0_0", fields {"rm_scores": ...}                          same name, the others stay

A value is bytes, which are neither read nor changed here. One of more than a message's length comes in pieces before
the row that has it.

Rows by key, for clients of `memoire.tq`. Pure; the rows have a lock of their own.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any

from memoire import _core
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.tables.desk import Desk, Reply
from memoire.wire import types
from memoire.wire.byte_budget import ByteHolder
from memoire.wire.frames import Buffer, MessageHeader, encoded_bytes
from memoire.wire.receivers import Page

from . import messages as keyed

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


FACTS_PER_REPLY = 8192
MAX_PARTITIONS = 65536
"""Names of one reply."""
HEAD_BYTES = 5
"""What stands in front of a long value."""
DEFAULTS = Limits()
"""Those of clients that say nothing else: what is stored here comes to them."""
UNKNOWN = 1 << 40
"""Stands for the number of a row that is yet to be written."""


class KeyedHandler:
    """Answers FIND_ROWS and CHANGE_ROWS.

    Args:
        facts_per_reply: Rows without values in one reply.
    """

    def __init__(self, desk: Desk, rows: KeyedStore, facts_per_reply: int = FACTS_PER_REPLY) -> None:
        self._desk, self._rows, self._facts_per_reply = desk, rows, facts_per_reply

    def find(self, _: float, header: MessageHeader, body: keyed.FindRows, payload: Any) -> Reply:
        """Say what rows there are, or what some of them hold."""
        page = self._page(header.client)
        if body.call == "tags":
            return self._list(body, page)
        with self._desk.requests.taken(keyed.unpacked_size(payload)):
            keys = keyed.unpack_keys(payload)
            found, answer = self._rows.find(body.partition, keys), self._find if body.call == "facts" else self._values
            return answer(body, keys, found, page)

    def _page(self, client: bytes) -> Page:
        return self._desk.page(client, types.KEYED_ROWS)

    def _list(self, body: keyed.FindRows, page: Page) -> Reply:
        of = None if body.is_everywhere else body.partition
        partitions, names = self._rows.partitions(of), list[str]()
        known = partitions if body.known is None else partitions[body.known :]
        for name in known[:MAX_PARTITIONS]:
            if body.known is not None and not page.takes(f"partition {name!r}", name):
                break
            names.append(name)
        is_whole, after, rows = len(names) == len(known), body.after, list[keyed.RowFacts]()
        for partition, key, row in self._rows.walk(of, body.after):
            facts = _facts(partition, key, row)
            if len(rows) == self._facts_per_reply or not page.takes(f"row {key!r}", payload=encoded_bytes(facts)):
                is_whole = False
                break
            rows.append(facts)
            after = facts.number
        return self._reply(rows, after=after, is_whole=is_whole, partitions=names)

    def _find(self, body: keyed.FindRows, keys: Sequence[str], found: list[KeyedRow | None], page: Page) -> Reply:
        rows = list[keyed.RowFacts]()
        for place in range(body.after, len(keys)):
            key, row = keys[place], found[place]
            facts = None if row is None else _facts(body.partition, key, row)
            if facts is not None and not page.takes(f"row {key!r}", payload=encoded_bytes(facts)):
                if body.known is None:
                    raise page.refused(f"{len(keys)} rows without values", encoded_bytes(facts))
                return self._reply(rows, after=place, is_whole=False)
            if facts is not None:
                rows.append(facts)
        return self._reply(rows)

    def _values(self, body: keyed.FindRows, keys: Sequence[str], found: list[KeyedRow | None], page: Page) -> Reply:
        rows, first = list[keyed.RowValues](), found[body.after] if body.after < len(found) else None
        version = 0 if first is None else first.version
        known = body.known or 0 if version == body.version else 0
        for key, row in itertools.islice(zip(keys, found, strict=True), body.after, None):
            fields = dict(itertools.islice(_chosen(row, body.fields).items(), known, None))
            values = keyed.RowValues(row is not None, list(row.fields) if row else [], fields)
            size = _size_of(values)
            if body.known is not None and page.is_empty and size > page.most_payload:
                part = _part_of(key, values, page)
                known += len(part.fields)
                return self._reply([part], after=body.after, known=known, version=version, is_whole=False)
            if not page.takes(f"row {key!r}", payload=size):
                return self._reply(rows, after=body.after + len(rows), version=version, is_whole=False)
            rows.append(values)
            known = 0
        return self._reply(rows, version=version)

    def change(self, now: float, header: MessageHeader, body: keyed.ChangeRows, payload: Any) -> Reply:
        """Write rows, or take them away."""
        self._rows.give_up(now)
        if body.call == "stage":
            piece = memoryview(b"" if payload is None else payload).cast("B")
            self._rows.stage(header.client, body.upload, body.offset, piece, now)
            return self._reply([])
        if body.call == "reset":
            self._rows.reset()
            return self._reply([])
        with self._desk.requests.taken(keyed.unpacked_size(payload)):
            if body.call == "clear":
                self._rows.clear(body.partition, keyed.unpack_keys(payload))
                return self._reply([])
            return self._put(header.client, body, keyed.unpack_puts(payload))

    def _put(self, client: bytes, body: keyed.ChangeRows, rows: list[keyed.PutRow]) -> Reply:
        changes = [
            RowChange(
                row.key, row.tags, row.fields, row.made, {each.field: (each.start, each.bytes) for each in row.staged}
            )
            for row in rows
        ]
        self._check(client, body.partition, changes)
        written = self._rows.put(body.partition, changes, (client, body.upload))
        if body.upload:
            self._rows.unstage(client, body.upload)
        return self._reply([_facts(body.partition, row.key, made) for row, made in zip(rows, written, strict=True)])

    def _check(self, client: bytes, partition: str, changes: Sequence[RowChange]) -> None:
        """Refuse rows that no reply could tell of, before one of them is written.

        Raises:
            ProtocolError: (code "too_large") a row would have more fields or tags than a message has room for, or a
                value is larger than a message, or the reply to this request would be.
        """
        page, most = self._page(client), min(self._desk.limits.message_bytes, DEFAULTS.message_bytes)
        for change, row in zip(changes, self._rows.find(partition, [each.key for each in changes]), strict=True):
            tags = {**(row.tags if row else {}), **change.tags}
            fields = dict.fromkeys([*(row.fields if row else ()), *change.fields, *change.staged])
            if max(len(tags), len(fields)) > keyed.MAX_FIELDS:
                count = max(len(tags), len(fields))
                text = f"row {change.key!r} would have {count} fields or tags; {keyed.MAX_FIELDS} are allowed"
                raise ProtocolError("too_large", text)
            sizes = {name: len(value) for name, value in change.fields.items()}
            for name, length in (sizes | {name: size for name, (_, size) in change.staged.items()}).items():
                size = length + encoded_bytes([list(fields), name]) + HEAD_BYTES
                if size > most:
                    text = f"field {name!r} of row {change.key!r} makes a reply of {size} bytes; {most} are allowed "
                    raise ProtocolError("too_large", f"{text}(message_bytes of this server). Store it in parts")
            facts = keyed.RowFacts(partition, change.key, UNKNOWN, tags, list(fields), change.made)
            if (size := encoded_bytes(facts) + HEAD_BYTES) > most:
                text = f"tags and names of row {change.key!r} make a reply of {size} bytes; {most} are allowed"
                raise ProtocolError("too_large", f"{text} (message_bytes)")
            if not page.takes(f"row {change.key!r}", payload=encoded_bytes(facts)):
                raise page.refused(f"the {len(changes)} rows that are written", encoded_bytes(facts))

    def _reply(self, rows: list[Any], *, is_whole: bool = True, partitions: Sequence[str] = (), **cursor: int) -> Reply:
        held, size = self._rows.held
        facts: dict[str, Any] = {"partitions": list(partitions), "rows": held, "bytes": size, **cursor}
        said = keyed.KeyedRows(epoch=self._desk.epoch, is_whole=is_whole, **facts)
        return Reply(said, keyed.pack(rows) if rows else None)


def _size_of(values: keyed.RowValues) -> int:
    """Bytes of values on their way, at most."""
    size = (1 + len(values.fields)) * HEAD_BYTES + sum(map(len, values.fields.values()))
    return size + encoded_bytes([values.names, list(values.fields)])


def _part_of(key: str, values: keyed.RowValues, page: Page) -> keyed.RowValues:
    """As many of a row's values as a page has room for, at least one. Raises ProtocolError if none ever has."""
    part = keyed.RowValues(values.is_there, values.names, {})
    for name, value in values.fields.items():
        more = keyed.RowValues(values.is_there, values.names, part.fields | {name: value})
        if part.fields and _size_of(more) > page.payload_room:
            break
        part = more
    page.takes(f"field {next(iter(part.fields), '')!r} of row {key!r}", payload=_size_of(part))
    return part


def _chosen(row: KeyedRow | None, names: list[str]) -> dict[str, bytes]:
    if row is None:
        return {}
    held = dict(row.fields)
    return {name: held[name] for name in names if name in held} if names else held


def _facts(partition: str, key: str, row: KeyedRow) -> keyed.RowFacts:
    return keyed.RowFacts(partition, key, row.number, dict(row.tags), list(row.fields), row.made)
