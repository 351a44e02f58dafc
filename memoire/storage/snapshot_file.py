"""The file of a snapshot: what a server holds, record after record, so that neither end ever has more than one of them
in memory.

    head      magic, form, 16 random bytes that name this snapshot, checksum of these
    record    kind, table, sizes, two checksums │ body, msgpack │ payload         ABOUT first, then CLIENT, CACHE, ...
    ...
    END       how many of what there are
    tail      where END begins, checksum of that

A record has a checksum for what says how long it is and one for its payload: where only a payload is damaged, the next
record is still found. Written beside the former file and renamed, so that there is always a whole one.
"""

from __future__ import annotations

import enum
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from memoire.errors import DataError
from memoire.limits import MiB
from memoire.prompts.snapshot import TableOrder
from memoire.replay.row_schema import RowSchema
from memoire.replay.schema import Schema
from memoire.wire import _bytes

from . import private_files
from .file_system import sync

FORM: Final = 4
_MAGIC: Final = b"memosnap"
_HEAD: Final = struct.Struct("<8sI16s")
_RECORD: Final = struct.Struct("<IIQQQ")  # kind, table, bytes of body and payload, checksum of the payload
_SUM: Final = struct.Struct("<Q")
_TAIL: Final = struct.Struct("<Q")
_MAX_BODY: Final = 16 * MiB
_FLUSH_BYTES: Final = 64 * MiB

Buffer: TypeAlias = bytes | bytearray | memoryview

# A file may be anybody's: what could spoil a server's sums or numbers is refused where it is read.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Word: TypeAlias = Annotated[int, Meta(ge=0)]  # msgpack has none beyond 64 bits
Moment: TypeAlias = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
Weight: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.7976931348623157e308)]
Identity: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Topic: TypeAlias = Annotated[str, Meta(max_length=256)]


class RecordKind(enum.IntEnum):
    """What a record is."""

    ABOUT = 1
    CLIENT = 2
    CACHE = 3
    EPISODE = 4
    ACCOUNTS = 5
    END = 6
    PROMPT = 7
    TABLE = 8
    TABLE_END = 9


class RecordBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A msgpack map of the fields that differ from their defaults; unknown ones are ignored."""

    kind: ClassVar[RecordKind]


class TableAbout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One table of the server that was saved."""

    name: str
    storage: str
    schema: str
    """As JSON."""
    parameters: dict[str, Any]
    parameters_version: Count = 0
    making: dict[str, Any] = {}
    """Settings beside the parameters that what it holds was made with: of prompts, those of groups and scores."""

    def read_schema(self) -> Schema:
        """Its columns. Raises SchemaError."""
        return (RowSchema if self.storage == "prompts" else Schema).from_json(self.schema)


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


class ClientRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """A client with its newest sums, whose caches follow."""

    kind: ClassVar = RecordKind.CLIENT
    id: Identity
    sequence: Word = 0
    total_weight: Weight = 0.0
    positives: Annotated[float, Meta(ge=0.0, le=2.0**53)] = 0.0
    minimum: Weight = 0.0
    between: Weight = 0.0
    """Samples that were drawn between two of its caches."""
    since: Word = 0
    """And since its newest one came."""
    has_caches: bool = True
    """Whether caches of it follow; else only its sums are known."""


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
    where entries lie (see `packed_episodes`).
    """

    kind: ClassVar = RecordKind.TABLE
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
    prompts: TableOrder | None = None
    max_priority: Weight = 0.0
    """The largest so far."""
    memory: str = ""
    """Numbers of a memory's state, in JSON."""
    arrays: dict[str, Count] = {}
    """Bytes of each array of that state, in the order of the payload."""


class TableEndRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Behind a table's other records, if its entries were as its `TableRecord` says until then."""

    kind: ClassVar = RecordKind.TABLE_END


class CacheRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """A cache of the client before; the payload is as it came."""

    kind: ClassVar = RecordKind.CACHE
    samples: Count
    used: Count = 0
    """Samples of it that can be drawn no more."""
    age: Weight = 0.0
    """Seconds since it came to the server."""
    left: bytes | None = None
    """uint32: places of the samples that are left; None: all but the first `used` ones."""
    times: bytes = b""
    """uint32: how often each sample was drawn; empty if that is not counted."""
    eldest: Moment | None = None
    """Seconds since the eldest entry of those that are left was recorded; None is not known."""
    least_model: Annotated[int, Meta(ge=1 - 2**63)] = 1 - 2**63
    positives: Weight = 1.0
    """Entries that those that are left stand for."""


class EpisodeRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """An episode; the payload is its arrays, one after the other (see `snapshot`)."""

    kind: ClassVar = RecordKind.EPISODE
    owner: Identity
    number: Number
    """Of its first entry under that owner: the two name it."""
    length: Count
    closed: Moment = 0.0
    """When its last entry was made, in seconds since 1970: what brings episodes of several files into one order."""
    multiplier: Weight = 1.0
    terminated: bool | None = None
    cut: bool = False
    """Of rollouts: the episode goes on in another fragment."""
    has_final: bool = False
    has_bootstrap: bool = False
    update_value: bool = True
    update_weight: bool = True


class PromptRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt; the record's payload is the prompt's, followed by the columns of its answers."""

    kind: ClassVar = RecordKind.PROMPT
    name: Annotated[bytes, Meta(max_length=2048)]
    """What decides to which of several servers it belongs."""
    row: bytes
    """Where it stands, in msgpack."""
    columns: Count = 0
    """Bytes of the columns."""


class AccountsRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """What its clients had done in a run; the payload is rows of `rows.ACCOUNT`."""

    kind: ClassVar = RecordKind.ACCOUNTS
    run: str
    finished: bool = False


class Counts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a file has of one table."""

    clients: int = 0
    caches: int = 0
    samples: int = 0
    unused: int = 0
    """Samples never drawn."""
    episodes: int = 0
    entries: int = 0
    prompts: int = 0
    bytes: int = 0
    """Of caches, episodes or prompts."""
    is_still: bool = False
    """Whether entries of episodes lay, while they were saved, as the file says."""


class EndRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """What the file has; the last record."""

    kind: ClassVar = RecordKind.END
    tables: list[Counts]
    accounts: int = 0
    """Rows of accounts."""
    complete: bool = True
    """Whether all that was held is in it: a server that has to end may not have had the time."""


_BODIES: Final[dict[RecordKind, type[RecordBody]]] = {
    body.kind: body
    for body in (
        SnapshotHeader, ClientRecord, CacheRecord, EpisodeRecord, AccountsRecord, EndRecord, PromptRecord, TableRecord,
        TableEndRecord,
    )
}  # fmt: skip
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = {kind: msgspec.msgpack.Decoder(body).decode for kind, body in _BODIES.items()}


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
    at: Callable[[str], None] = lambda point: None,
    is_complete: Callable[[], bool] = lambda: True,
) -> EndRecord:
    """Save records under this path; returns what was saved. The former file stays until the new one is whole, and the
    new one is on disk when this returns.

    Args:
        at: Called with the name of each point between two steps, so that a test may end the process there.
        is_complete: Asked at the end whether the records were all that there was.

    Raises:
        OSError: it cannot be written; whatever `records` raises. The former file is as it was.
    """
    made = path.with_name(path.name + ".new")
    try:
        with open(private_files.replace(made), "wb", buffering=1 << 20) as file:
            tally = _RecordCounts(len(about.tables))
            head = _HEAD.pack(_MAGIC, FORM, secrets.token_bytes(16))
            file.write(head + _SUM.pack(_bytes.checksum(head)))
            _put(file, Record(about))
            flushed = 0
            for record in records:
                tally.count(record)
                _put(file, record)
                at("within snapshot")
                if tally.bytes - flushed > _FLUSH_BYTES:
                    flushed = tally.bytes
                    _flush(file)
            place = _TAIL.pack(file.tell())
            end = tally.end(is_complete())
            _put(file, Record(end))
            file.write(place + _SUM.pack(_bytes.checksum(place)))
        sync(made)
        at("before snapshot")
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    sync(path.parent)
    at("after snapshot")
    return end


def _put(file: BinaryIO, record: Record) -> None:
    body, payload = _ENCODE(record.body), memoryview(record.payload or b"").cast("B")
    facts = _RECORD.pack(record.body.kind, record.table, len(body), len(payload), _bytes.checksum(payload))
    file.write(facts + _SUM.pack(_bytes.checksum(body, _bytes.checksum(facts))) + body)
    file.write(payload)


def _flush(file: BinaryIO) -> None:
    """Have the disk take it little by little: one sync of it all would hold up whoever else waits for the disk."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):  # nobody reads it soon: other files have more use for the page cache
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


_COUNTED: Final = [name for name in Counts.__struct_fields__ if name != "is_still"]


class _RecordCounts:
    """What was written, or read, so far."""

    def __init__(self, tables: int) -> None:
        self._tables: list[dict[str, int]] = [dict.fromkeys(_COUNTED, 0) for _ in range(tables)]
        self._accounts = 0
        self._still: set[int] = set()
        self.bytes = 0

    def count(self, record: Record) -> None:
        body, size = record.body, len(record.payload or b"")
        self.bytes += size
        if isinstance(body, AccountsRecord):
            self._accounts += 1
            return
        counts = self._tables[record.table]
        if isinstance(body, ClientRecord):
            counts["clients"] += 1
        elif isinstance(body, CacheRecord):
            counts["caches"] += 1
            counts["samples"] += body.samples
            counts["unused"] += body.samples - body.used
            counts["bytes"] += size
        elif isinstance(body, EpisodeRecord):
            counts["episodes"] += 1
            counts["entries"] += body.length
            counts["bytes"] += size
        elif isinstance(body, PromptRecord):
            counts["prompts"] += 1
            counts["bytes"] += size
        elif isinstance(body, TableEndRecord):
            self._still.add(record.table)

    def end(self, complete: bool = True) -> EndRecord:
        tables = [Counts(**counts, is_still=place in self._still) for place, counts in enumerate(self._tables)]
        return EndRecord(tables=tables, accounts=self._accounts, complete=complete)


class SnapshotFile:
    """A saved file while it is read; several may read it, each with one of these.

    Raises:
        DataError: it cannot be read, is no snapshot, of another form, or its beginning is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("rb", buffering=1 << 20)
        except (OSError, ValueError) as error:  # a zero byte in a path is a ValueError
            raise self._wrong(f"cannot be read ({error})") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.id = self._read_head()
            about = self._next()
            if not isinstance(about, Record) or not isinstance(about.body, SnapshotHeader):
                raise self._wrong(f"does not say what it holds: {about}" if isinstance(about, str) else "is mixed up")
            self.about = about.body
            self._begin = self._file.tell()
            self.end = self._read_end()
            """What it says that it has; None where that is damaged or cut off."""
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _wrong(self, problem: str) -> DataError:
        return DataError(str(self.path), problem)

    def _read_head(self) -> bytes:
        head = self._file.read(_HEAD.size)
        check = self._file.read(_SUM.size)
        if len(check) < _SUM.size or not head.startswith(_MAGIC):
            raise self._wrong("is no snapshot of a server")
        _, form, identity = _HEAD.unpack(head)
        if form != FORM:  # before the checksum, which another form may compute in another way
            raise self._wrong(f"has form {form}, this version of memoire reads form {FORM}")
        if _SUM.pack(_bytes.checksum(head)) != check:
            raise self._wrong("is damaged at its beginning")
        return bytes(identity)

    def _read_end(self) -> EndRecord | None:
        span = _TAIL.size + _SUM.size
        if self.size < self._begin + span:
            return None
        self._file.seek(self.size - span)
        place, check = self._file.read(_TAIL.size), self._file.read(_SUM.size)
        if _SUM.pack(_bytes.checksum(place)) != check or not self._begin <= _TAIL.unpack(place)[0] < self.size - span:
            return None
        self._file.seek(_TAIL.unpack(place)[0])
        found = self._next()
        if not isinstance(found, Record) or not isinstance(found.body, EndRecord):
            return None
        return found.body if len(found.body.tables) == len(self.about.tables) else None

    def is_empty(self, table: int) -> bool:
        """Whether the file says that it has nothing of what this table held."""
        counts = None if self.end is None else self.end.tables[table]
        return counts is not None and not (counts.caches or counts.episodes or counts.prompts)

    def _next(self) -> Record | str:
        """The record that begins here; or, where what follows cannot be found, why."""
        place = self._file.tell()
        facts, check = self._file.read(_RECORD.size), self._file.read(_SUM.size)
        if len(check) < _SUM.size:
            return f"it ends at byte {self.size}, in the middle of a record"
        number, table, size, payload_size, payload_sum = _RECORD.unpack(facts)
        if size > _MAX_BODY or place + len(facts) + len(check) + size + payload_size > self.size:
            return f"the record at byte {place} is damaged, and with it where the next one begins"
        body = self._file.read(size)
        if _SUM.pack(_bytes.checksum(body, _bytes.checksum(facts))) != check:
            return f"the record at byte {place} is damaged, and with it where the next one begins"
        try:
            made = _DECODE[number](body)
        except (KeyError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            return f"the record at byte {place} cannot be read: {error}"
        payload = self._file.read(payload_size)
        is_whole = len(payload) == payload_size and _bytes.checksum(payload) == payload_sum
        return Record(made, table, payload if is_whole else None)

    def records(self, damage: FileDamage | None = None) -> Iterator[Record]:
        """All records but the first and the last; those with a damaged payload have None there. What is missing is in
        `damage` when the iterator has ended.
        """
        damage = FileDamage() if damage is None else damage
        tally = _RecordCounts(len(self.about.tables))
        self._file.seek(self._begin)
        while True:
            record = self._next()
            if isinstance(record, str):
                damage.why = record
                break
            if isinstance(record.body, EndRecord):
                if record.body != tally.end(record.body.complete):
                    damage.why = "it does not have what it says"
                break
            if not 0 <= record.table < len(self.about.tables):
                damage.why = "a record belongs to no table"
                break
            tally.count(record)
            if record.payload is None:
                damage.records += 1
            yield record
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
            words.append(f"{rest} caches and episodes that cannot be read, because {self.why}")
        return " and ".join(words) or "no damage"


def _difference(said: EndRecord | None, found: EndRecord) -> int | None:
    """Caches and episodes that should be there and were not found."""
    if said is None:
        return None
    return sum(each.caches + each.episodes for each in said.tables) - sum(
        each.caches + each.episodes for each in found.tables
    )
