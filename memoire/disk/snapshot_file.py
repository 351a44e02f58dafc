"""Snapshot file: the contents of a server's tables, record by record, so that writer and reader hold one in memory.

The file is a `record_file` whose tags are kind and table. ABOUT comes first, then TABLE, CLIENT, CACHE, ..., and END
with the counts of each table. Bodies are msgpack. A cache, an episode, a prompt and accounts have their payload in a
second record: if only the payload is damaged, the next record is still found.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from memoire.errors import DataError
from memoire.replay.files import Fault, no_fault
from memoire.replay.schema import Schema
from memoire.tables import registry
from memoire.tables.base import Count, Identity, Moment, Number, RecordBody, RecordKind, Topic, Weight, Word

from . import record_file as checked_file
from .files import mode_in
from .record_file import WHOLE, DamagedRecord, FileKind, RecordReader

KIND: Final = FileKind(b"memosnap", 7, "a snapshot of a server")
_PAYLOAD: Final = 255
_KINDS: Final = 256  # tags are kind + _KINDS * table

Buffer: TypeAlias = bytes | bytearray | memoryview


class TableAbout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Description of one saved table."""

    name: str
    storage: str
    schema: str
    """Schema of the table in JSON."""
    parameters: dict[str, Any]
    parameters_version: Count = 0
    making: dict[str, Any] = {}
    """Settings, other than parameters, that the table's contents were made with."""

    def read_schema(self) -> Schema:
        """Return the table's schema. Raises SchemaError."""
        kind = registry.find(self.storage)
        return (Schema if kind is None else kind.schema_class()).from_json(self.schema)


class SnapshotHeader(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Header of a snapshot: server, run, time, models and tables."""

    kind: ClassVar = RecordKind.ABOUT
    server: str
    run: str
    finished: bool = False
    taken: Weight = 0.0
    """Time of the snapshot, in seconds since 1970."""
    software: str = ""
    models: dict[Topic, Count] = {}
    """Newest version of each topic."""
    tables: list[TableAbout]
    """Saved tables; a record names its table by the index in this list."""


class LimiterState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a table's rate limiter."""

    surplus: Moment
    begun: bool
    inserted: Word
    drawn: Annotated[int, Meta(ge=-(2**62), le=2**62)]
    forgiven: Moment
    told: tuple[Moment, Word, int, Word, Moment, Moment, Moment] | None
    """`limiter.ClusterSurplus` that a reader of several servers reported; None if none has."""
    clients: list[tuple[Identity, Word, int, Word]]
    """Id of each client, its entries, the number of the message that reported them, and its grant."""


class TableRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """State of a table that its draws go on from, before the table's other records. For episodes the payload is the
    layout of the entries (see `pool.episode_records`).
    """

    kind: ClassVar = RecordKind.TABLE
    has_payload: ClassVar = True
    batches: Count = 0
    """Number of batches drawn on the present course of beta."""
    course: tuple[Weight, Weight | None, Count] | None = None
    """Course of beta: first value, last value, and the number of batches between them."""
    newest_model: Number = 0
    random: Annotated[bytes, Meta(max_length=4096)] = b""
    """State of the random generator."""
    drawn: Word = 0
    elsewhere: Word = 0
    """Number of samples that readers drew from other servers."""
    until_publish: Count = 0
    """Number of taken entries of rollouts whose room is freed by the next model."""
    limiter: LimiterState | None = None
    own: bytes = b""
    """State that only pools of this kind have, in msgpack."""
    max_priority: Weight = 0.0
    """Largest priority that any entry had."""
    memory: str = ""
    """Numbers of a memory's state, in JSON."""
    arrays: dict[str, Count] = {}
    """Bytes of each array of a memory's state, in the order of the payload."""


class TableEndRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Mark after a table's other records, if the layout of its `TableRecord` held until then."""

    kind: ClassVar = RecordKind.TABLE_END


class AccountsRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Accounts of clients in a run; the payload is rows of `rows.ACCOUNT`."""

    kind: ClassVar = RecordKind.ACCOUNTS
    has_payload: ClassVar = True
    run: str
    finished: bool = False


class ContentCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of one table's contents in a file."""

    clients: int = 0
    caches: int = 0
    samples: int = 0
    unused: int = 0
    """Number of samples that were never drawn."""
    episodes: int = 0
    entries: int = 0
    rows: int = 0
    """Number of rows of other kinds of tables: prompts, or rows by key."""
    bytes: int = 0
    """Bytes of caches, episodes or rows."""
    is_still: bool = False
    """True if no entry of an episode moved while the table was saved, so that the layout in the file holds."""


_COUNTED: Final = ContentCounts.__struct_fields__[:-1]


class EndRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Last record: counts of the file's contents. The size of the record depends only on the number of tables, so that
    a reader finds it from the end of the file.
    """

    kind: ClassVar = RecordKind.END
    tables: list[ContentCounts]
    accounts: int = 0
    """Number of `AccountsRecord` in the file."""
    complete: bool = True
    """True if the file has all that the server held; a server that ends may lack the time to save everything."""

    def pack(self) -> bytes:
        """Return the record's body: all counts, in 64 bits each."""
        numbers = [number for counts in self.tables for number in msgspec.structs.astuple(counts)]
        return struct.pack(f"<{len(numbers) + 2}Q", *numbers, self.accounts, self.complete)

    @staticmethod
    def size(tables: int) -> int:
        """Return the bytes of `pack` for a number of tables."""
        return 8 * (len(ContentCounts.__struct_fields__) * tables + 2)

    @classmethod
    def unpack(cls, body: bytes) -> EndRecord:
        """Return the record of a body. Raises ValueError or struct.error if it is malformed."""
        width = len(ContentCounts.__struct_fields__)
        *numbers, accounts, complete = struct.unpack(f"<{len(body) // 8}Q", body)
        rows = [numbers[place : place + width] for place in range(0, len(numbers), width)]
        tables = [ContentCounts(**dict(zip(_COUNTED, row, strict=False)), is_still=bool(row[-1])) for row in rows]
        return cls(tables=tables, accounts=accounts, complete=bool(complete))


_OWN: Final[list[type[RecordBody]]] = [SnapshotHeader, AccountsRecord, TableRecord, TableEndRecord]
_BODIES: Final = [*_OWN, *(body for kind in registry.built_in() for body in kind.record_bodies())]
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final[dict[int, Callable[[bytes], RecordBody]]] = {
    **{body.kind: msgspec.msgpack.Decoder(body).decode for body in _BODIES},
    RecordKind.END: EndRecord.unpack,
}


@lru_cache(256)
def _decoders(storage: str) -> Mapping[int, Callable[[bytes], RecordBody]]:
    """Return the decoders of records of a table with this storage, by kind of record."""
    kind = registry.find(storage)
    return _DECODE | {
        body.kind: msgspec.msgpack.Decoder(body).decode for body in (kind.record_bodies() if kind else ())
    }


class SnapshotRecord(NamedTuple):
    """Record of a snapshot: body, index of the table, and payload."""

    body: RecordBody
    table: int = 0
    payload: Buffer | None = b""
    """Payload of the record; None if it is damaged."""


def write(
    path: Path,
    about: SnapshotHeader,
    records: Iterable[SnapshotRecord],
    *,
    at: Fault = no_fault,
    is_complete: Callable[[], bool] = lambda: True,
) -> EndRecord:
    """Write a snapshot file; returns the counts of its contents. A former file stays until the new one is whole and on
    disk.

    Args:
        about: Header of the file.
        at: Called before each step, so that a test may end the process there: see `replacing`.
        is_complete: Called at the end; returns True if the records were all that the server held.

    Raises:
        OSError, and errors of `records`: the former file is unchanged.
    """
    tally = _RecordCounts(len(about.tables))

    def packed() -> Iterator[tuple[int, Buffer]]:
        yield RecordKind.ABOUT, _ENCODE(about)
        for record in records:
            tally.count(record)
            yield record.body.kind + _KINDS * record.table, _ENCODE(record.body)
            if record.body.has_payload:
                yield _PAYLOAD + _KINDS * record.table, record.payload or b""
        tally.is_complete = is_complete()
        yield RecordKind.END, tally.end().pack()

    checked_file.write(path, KIND, packed(), mode=mode_in(path.parent), at=at)
    return tally.end()


class _RecordCounts:
    """Counts of the records that were written, or read, so far."""

    def __init__(self, tables: int) -> None:
        self._tables: list[dict[str, int]] = [dict.fromkeys(_COUNTED, 0) for _ in range(tables)]
        self._accounts = 0
        self._still: set[int] = set()
        self.is_complete = True

    def count(self, record: SnapshotRecord) -> None:
        body, size = record.body, len(record.payload or b"")
        if isinstance(body, AccountsRecord):
            self._accounts += 1
        elif isinstance(body, TableEndRecord):
            self._still.add(record.table)
        else:
            counts = self._tables[record.table]
            for name, count in body.count_contribution(size).items():
                counts[name] += count

    def end(self) -> EndRecord:
        tables = [ContentCounts(**counts, is_still=place in self._still) for place, counts in enumerate(self._tables)]
        return EndRecord(tables=tables, accounts=self._accounts, complete=self.is_complete)


class SnapshotFile:
    """Reader of a snapshot file. Several readers may open the same file.

    Raises:
        DataError: the file cannot be read, is not a snapshot, of another form, or its beginning is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = RecordReader(path, KIND, WHOLE)
        self.size, self.id = self._file.size, self._file.id
        try:
            first = next(self._file.scan(keep=True), None)
            about = None if first is None else _decoded(first)
            if not isinstance(about, SnapshotHeader):
                raise DataError(str(path), f"has no valid header: it {about or 'is cut off'}")
            self.about = about
            last = self._file.last(EndRecord.size(len(about.tables)))
            self.end = None if last is None else EndRecord.unpack(last)
            """Counts of the file's contents; None if the last record is damaged or cut off."""
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def is_empty(self, table: int) -> bool:
        """Return True if the file has no caches, episodes or rows of the table with this index."""
        counts = None if self.end is None else self.end.tables[table]
        return counts is not None and not (counts.caches or counts.episodes or counts.rows)

    def records(self, damage: FileDamage | None = None) -> Iterator[SnapshotRecord]:
        """Yield all records but the first and the last; a damaged payload is None. `damage` describes what is missing
        after the iterator has ended.
        """
        damage = FileDamage() if damage is None else damage
        tally, problems = _RecordCounts(len(self.about.tables)), list[DataError]()
        self._file.rewind()
        stream = self._file.scan(keep=True, damage=problems)
        next(stream, None)
        is_ended = False
        for first in stream:
            table = first.tag // _KINDS
            body = _decoded(first, self.about.tables[table].storage if table < len(self.about.tables) else "")
            if isinstance(body, EndRecord) and not is_ended:
                tally.is_complete, is_ended = body.complete, True
                if body != tally.end():
                    damage.why = "has other contents than its end counts"
                continue
            if isinstance(body, str) or is_ended or table >= len(self.about.tables):
                damage.why = body if isinstance(body, str) else "has a record of another table"
                break
            payload: bytes | None = b""
            if body.has_payload:
                second = next(stream, None)
                if second is None:
                    break
                if second.tag != _PAYLOAD + _KINDS * table:
                    damage.why = "has a record without its payload"
                    break
                payload = None if isinstance(second, DamagedRecord) else second.payload
            record = SnapshotRecord(body, table, payload)
            tally.count(record)
            damage.records += payload is None
            yield record
        if not damage.why and len(problems) > damage.records:
            damage.why = problems[-1].problem
        elif not damage.why and not is_ended:
            damage.why = "has no end"
        if damage.why:
            damage.unread = _difference(self.end, tally.end())

    def verify(self) -> FileDamage:
        """Read the whole file, compare every checksum, and return the damage."""
        damage = FileDamage()
        for _ in self.records(damage):
            pass
        return damage


class FileDamage:
    """Damage of a snapshot file: damaged records, and a part that could not be read. False if there is none."""

    def __init__(self) -> None:
        self.records = 0
        """Number of records with a damaged payload."""
        self.why = ""
        """Reason why the rest of the file could not be read; "" if it could."""
        self.unread: int | None = 0
        """Number of caches and episodes in the unread rest; None if the end of the file is missing, too."""

    def __bool__(self) -> bool:
        return bool(self.records or self.why)

    def __str__(self) -> str:
        words = [f"{self.records} damaged records"] if self.records else []
        if self.why:
            rest = "an unknown number of" if self.unread is None else str(self.unread)
            words.append(f"{rest} caches and episodes that cannot be read, because it {self.why}")
        return " and ".join(words) or "no damage"


def _decoded(record: checked_file.Record, storage: str = "") -> RecordBody | str:
    """Return the body of a record of a table with this storage; or a phrase that says why it cannot be decoded."""
    kind = record.tag % _KINDS
    if isinstance(record, DamagedRecord):
        return f"has a damaged record of kind {kind}"
    try:
        return _decoders(storage)[kind](record.payload)
    except (KeyError, ValueError, struct.error, msgspec.MsgspecError, RecursionError) as error:
        return f"has a record that cannot be read: {error}"


def _difference(expected: EndRecord | None, actual: EndRecord) -> int | None:
    """Return the number of caches and episodes that are missing; None if the expected number is unknown."""
    if expected is None:
        return None
    return sum(each.caches + each.episodes for each in expected.tables) - sum(
        each.caches + each.episodes for each in actual.tables
    )
