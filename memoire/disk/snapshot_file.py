"""The file of a snapshot: what a server holds, record after record, so that neither end ever has more than one of them
in memory.

A `checked_file`, whose tags are kind and table. ABOUT is first, then come TABLE, CLIENT, CACHE, ..., and END says how
many of what there are. Bodies are msgpack. A cache, an episode, a prompt and accounts have their payload in a record
behind them: if only that is damaged, the next one is still found.
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
    """One table of the server that was saved."""

    name: str
    storage: str
    schema: str
    """As JSON."""
    parameters: dict[str, Any]
    parameters_version: Count = 0
    making: dict[str, Any] = {}
    """Settings beside the parameters that what it holds was made with."""

    def read_schema(self) -> Schema:
        """Its columns. Raises SchemaError."""
        kind = registry.find(self.storage)
        return (Schema if kind is None else kind.schema_class()).from_json(self.schema)


class SnapshotHeader(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Whose memory it is, and of when."""

    kind: ClassVar = RecordKind.ABOUT
    server: str
    run: str
    finished: bool = False
    taken: Weight = 0.0
    """Seconds since 1970."""
    software: str = ""
    models: dict[Topic, Count] = {}
    """Newest version of each topic."""
    tables: list[TableAbout]
    """A record's table is a place in this list."""


class LimiterState(msgspec.Struct, frozen=True, kw_only=True):
    """What a limiter has counted."""

    surplus: Moment
    begun: bool
    inserted: Word
    drawn: Annotated[int, Meta(ge=-(2**62), le=2**62)]
    forgiven: Moment
    told: tuple[Moment, Word, int, Word, Moment, Moment, Moment] | None
    """`limiter.ClusterSurplus`, as a reader of several servers told it."""
    clients: list[tuple[Identity, Word, int, Word]]
    """Each client's entries, the message that said so, and how far it was told that it may go."""


class TableRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """What draws of a table go on from beside what it holds. Before its other records; of episodes the payload says
    where entries lie (see `pool.episode_records`).
    """

    kind: ClassVar = RecordKind.TABLE
    has_payload: ClassVar = True
    batches: Count = 0
    """That were drawn on this course of beta."""
    course: tuple[Weight, Weight | None, Count] | None = None
    """How beta goes: its beginning, its end, and after how many batches."""
    newest_model: Number = 0
    random: Annotated[bytes, Meta(max_length=4096)] = b""
    """The generator."""
    drawn: Word = 0
    elsewhere: Word = 0
    """Samples that readers drew from other servers."""
    until_publish: Count = 0
    """Entries of rollouts that were taken, and whose room is given back with the next model."""
    limiter: LimiterState | None = None
    own: bytes = b""
    """What only its kind's pool says, in msgpack."""
    max_priority: Weight = 0.0
    """The largest so far."""
    memory: str = ""
    """Numbers of a memory's state, in JSON."""
    arrays: dict[str, Count] = {}
    """Bytes of each array of that state, in the order of the payload."""


class TableEndRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Behind a table's other records, if its entries were as its `TableRecord` says until then."""

    kind: ClassVar = RecordKind.TABLE_END


class AccountsRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """What its clients had done in a run; the payload is rows of `rows.ACCOUNT`."""

    kind: ClassVar = RecordKind.ACCOUNTS
    has_payload: ClassVar = True
    run: str
    finished: bool = False


class Counts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file has of one table."""

    clients: int = 0
    caches: int = 0
    samples: int = 0
    unused: int = 0
    """Samples never drawn."""
    episodes: int = 0
    entries: int = 0
    rows: int = 0
    """Of other kinds: prompts, or rows by key."""
    bytes: int = 0
    """Of caches, episodes or rows."""
    is_still: bool = False
    """Whether no entry of an episode moved while the table was saved, so that the layout in the file holds."""


_COUNTED: Final = Counts.__struct_fields__[:-1]


class EndRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """What the file has; the last record. Its size follows from the number of tables: it is found from the end."""

    kind: ClassVar = RecordKind.END
    tables: list[Counts]
    accounts: int = 0
    """Rows of accounts."""
    complete: bool = True
    """Whether all that was held is in it: a server that has to end may not have had the time."""

    def pack(self) -> bytes:
        """All of it, in 64 bits each."""
        numbers = [number for counts in self.tables for number in msgspec.structs.astuple(counts)]
        return struct.pack(f"<{len(numbers) + 2}Q", *numbers, self.accounts, self.complete)

    @staticmethod
    def size(tables: int) -> int:
        """Bytes of `pack` for so many tables."""
        return 8 * (len(Counts.__struct_fields__) * tables + 2)

    @classmethod
    def unpack(cls, body: bytes) -> EndRecord:
        """Raises ValueError, struct.error."""
        width = len(Counts.__struct_fields__)
        *numbers, accounts, complete = struct.unpack(f"<{len(body) // 8}Q", body)
        rows = [numbers[place : place + width] for place in range(0, len(numbers), width)]
        tables = [Counts(**dict(zip(_COUNTED, row, strict=False)), is_still=bool(row[-1])) for row in rows]
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
    """What reads records of a table of this kind."""
    kind = registry.find(storage)
    return _DECODE | {
        body.kind: msgspec.msgpack.Decoder(body).decode for body in (kind.record_bodies() if kind else ())
    }


class Record(NamedTuple):
    """A record as it is written, or as it was read."""

    body: RecordBody
    table: int = 0
    payload: Buffer | None = b""
    """None: it is damaged."""


def write(
    path: Path,
    about: SnapshotHeader,
    records: Iterable[Record],
    *,
    at: Fault = no_fault,
    is_complete: Callable[[], bool] = lambda: True,
) -> EndRecord:
    """Save records under this path; returns what was saved. The former file stays until the new one is whole and on
    disk.

    Args:
        at: Called before each step, so that a test may end the process there: see `replacing`.
        is_complete: Asked at the end whether the records were all that there was.

    Raises:
        OSError: it cannot be written; and what `records` raises. The former file is as it was.
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
    """What was written, or read, so far."""

    def __init__(self, tables: int) -> None:
        self._tables: list[dict[str, int]] = [dict.fromkeys(_COUNTED, 0) for _ in range(tables)]
        self._accounts = 0
        self._still: set[int] = set()
        self.is_complete = True

    def count(self, record: Record) -> None:
        body, size = record.body, len(record.payload or b"")
        if isinstance(body, AccountsRecord):
            self._accounts += 1
        elif isinstance(body, TableEndRecord):
            self._still.add(record.table)
        else:
            counts = self._tables[record.table]
            for name, count in body.counted(size).items():
                counts[name] += count

    def end(self) -> EndRecord:
        tables = [Counts(**counts, is_still=place in self._still) for place, counts in enumerate(self._tables)]
        return EndRecord(tables=tables, accounts=self._accounts, complete=self.is_complete)


class SnapshotFile:
    """A saved file while it is read; several may read it, each with one of these.

    Raises:
        DataError: it cannot be read, is no snapshot, of another form, or its beginning is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = RecordReader(path, KIND, WHOLE)
        self.size, self.id = self._file.size, self._file.id
        try:
            first = next(self._file.scan(keep=True), None)
            about = None if first is None else _decoded(first)
            if not isinstance(about, SnapshotHeader):
                raise DataError(str(path), f"does not say what it holds: {about or 'it is cut off'}")
            self.about = about
            last = self._file.last(EndRecord.size(len(about.tables)))
            self.end = None if last is None else EndRecord.unpack(last)
            """What it says that it has; None where that is damaged or cut off."""
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def is_empty(self, table: int) -> bool:
        """Whether the file says that it has nothing of what this table held."""
        counts = None if self.end is None else self.end.tables[table]
        return counts is not None and not (counts.caches or counts.episodes or counts.rows)

    def records(self, damage: FileDamage | None = None) -> Iterator[Record]:
        """All records but the first and the last; those with a damaged payload have None there. What is missing is in
        `damage` when the iterator has ended.
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
                    damage.why = "does not have what it says"
                continue
            if isinstance(body, str) or is_ended or table >= len(self.about.tables):
                damage.why = body if isinstance(body, str) else "is mixed up"
                break
            payload: bytes | None = b""
            if body.has_payload:
                second = next(stream, None)
                if second is None:
                    break
                if second.tag != _PAYLOAD + _KINDS * table:
                    damage.why = "is mixed up"
                    break
                payload = None if isinstance(second, DamagedRecord) else second.payload
            record = Record(body, table, payload)
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
        """Read it all and compare every checksum."""
        damage = FileDamage()
        for _ in self.records(damage):
            pass
        return damage


class FileDamage:
    """What of a file could not be read."""

    def __init__(self) -> None:
        self.records = 0
        """Records whose place is known and whose content is damaged."""
        self.why = ""
        """Why the rest could not be read; empty where it could."""
        self.unread: int | None = 0
        """Caches and episodes in that rest; None where the end of the file is gone, too."""

    def __bool__(self) -> bool:
        return bool(self.records or self.why)

    def __str__(self) -> str:
        words = [f"{self.records} damaged records"] if self.records else []
        if self.why:
            rest = "nobody knows how many" if self.unread is None else str(self.unread)
            words.append(f"{rest} caches and episodes that cannot be read, because it {self.why}")
        return " and ".join(words) or "no damage"


def _decoded(record: checked_file.Record, storage: str = "") -> RecordBody | str:
    """The body of a record, of a table of this kind; or why there is none."""
    kind = record.tag % _KINDS
    if isinstance(record, DamagedRecord):
        return f"has a damaged record of kind {kind}"
    try:
        return _decoders(storage)[kind](record.payload)
    except (KeyError, ValueError, struct.error, msgspec.MsgspecError, RecursionError) as error:
        return f"has a record that cannot be read: {error}"


def _difference(said: EndRecord | None, found: EndRecord) -> int | None:
    """Caches and episodes that should be there and were not found."""
    if said is None:
        return None
    return sum(each.caches + each.episodes for each in said.tables) - sum(
        each.caches + each.episodes for each in found.tables
    )
