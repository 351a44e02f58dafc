"""Messages about keyed rows: bodies and payloads in msgpack, with all limits in the types. Pure.

Only clients understand the bytes of values; a server merges rows by the names of their fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from memoire.errors import ProtocolError
from memoire.kinds import Body, Buffer, Count, Name, Small, TailRow, Word, body, count_values, types

Key: TypeAlias = Annotated[str, Meta(max_length=1024)]
MAX_FIELDS: Final = 1024
"""Maximum number of fields, and of tags, of a row."""
Fields: TypeAlias = Annotated[dict[Name, bytes], Meta(max_length=MAX_FIELDS)]
Keys: TypeAlias = Annotated[list[Key], Meta(max_length=2**20)]


@body(types.FIND_ROWS)
class FindRows(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request for keyed rows, or for their tags; the payload has the keys. Answered by KEYED_ROWS."""

    call: Literal["tags", "facts", "values"]
    partition: Name = ""
    is_everywhere: bool = False  # tags of all partitions
    after: Word = 0  # tags: number of the last received row; otherwise number of answered keys
    known: Small | None = None  # tags: received partitions; null: no reply to tags or facts is partial.
    # values: received fields of the first key; null: no row comes in parts
    version: Word = 0  # values: of the row whose fields were received; a row of another version restarts
    fields: Annotated[list[Name], Meta(max_length=1024)] = []  # request only values of these fields


@body(types.CHANGE_ROWS)
class ChangeRows(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request to write or delete keyed rows; the payload has the rows or keys. Answered by KEYED_ROWS."""

    call: Literal["put", "stage", "clear", "reset"]
    partition: Name = ""
    upload: Word = 0  # number of the upload of this piece, or of the staged values
    offset: Count = 0  # position of the piece in the upload


@body(types.KEYED_ROWS)
class KeyedRows(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Reply to FIND_ROWS and CHANGE_ROWS; the payload has the requested rows."""

    epoch: Word = 0  # number of the server's start
    after: Word = 0  # `after` of the next request
    known: Small = 0  # values: `known` of the next request, the received fields of its first key
    version: Word = 0  # values: version of the row at `after`, new after each change; 0: no row
    is_whole: bool = True  # True: the answer is complete
    partitions: Annotated[list[Name], Meta(max_length=65536)] = []  # existing partitions, also empty ones
    rows: Count = 0  # number of rows at this server
    bytes: Count = 0


class StagedValue(TailRow, frozen=True, array_like=True):
    """Reference to a value whose bytes were uploaded in pieces."""

    field: Name
    start: Count
    bytes: Count


class PutRow(TailRow, frozen=True, array_like=True):
    """Row to write; its existing fields and tags stay, except those named here."""

    key: Key
    tags: Fields = {}
    fields: Fields = {}
    staged: Annotated[list[StagedValue], Meta(max_length=1024)] = []
    made: Word = 0  # microseconds of the writer's clock, used for a new row

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each value, by field."""
        return {name: len(value) for name, value in self.fields.items()} | self.staged_sizes

    @property
    def staged_sizes(self) -> dict[str, int]:
        """Bytes of each uploaded value, by field."""
        return {each.field: each.bytes for each in self.staged}


class RowFacts(TailRow, frozen=True, array_like=True):
    """Facts of a row, without its values."""

    partition: Name
    key: Key
    number: Word
    tags: Fields
    fields: Annotated[list[Name], Meta(max_length=1024)]
    made: Word = 0


class RowValues(TailRow, frozen=True, array_like=True):
    """Values of a row, all or the requested ones."""

    is_there: bool  # True if the key has a row
    names: Annotated[list[Name], Meta(max_length=1024)]  # names of all fields of the row, also of fields not requested
    fields: Fields


_ENCODER: Final = msgspec.msgpack.Encoder()
_PUT: Final = msgspec.msgpack.Decoder(Annotated[list[PutRow], Meta(max_length=2**20)])
_KEYS: Final = msgspec.msgpack.Decoder(Keys)
_FACTS: Final = msgspec.msgpack.Decoder(Annotated[list[RowFacts], Meta(max_length=2**24)])
_VALUES: Final = msgspec.msgpack.Decoder(Annotated[list[RowValues], Meta(max_length=2**20)])


def pack(rows: Sequence[Any]) -> bytes:
    """Return the bytes of keys, or of rows of one kind."""
    return _ENCODER.encode(rows)


VALUE_BYTES: Final = 80
"""Approximate memory overhead of an unpacked value, in bytes."""


def unpacked_size(payload: Buffer | None) -> int:
    """Return the approximate memory of rows or keys after unpacking, in bytes; 0 for a malformed payload."""
    if payload is None:
        return 0
    values: int = count_values(payload)
    return values and values * VALUE_BYTES + memoryview(payload).nbytes


def unpack_puts(payload: Buffer | None) -> list[PutRow]:
    """Return the rows to write. Raise only ProtocolError."""
    rows: list[PutRow] = _unpacked(_PUT, payload)
    return rows


def unpack_keys(payload: Buffer | None) -> list[str]:
    """Return the keys. Raise only ProtocolError."""
    keys: list[str] = _unpacked(_KEYS, payload)
    return keys


def unpack_facts(payload: Buffer | None) -> list[RowFacts]:
    """Return the rows without values. Raise only ProtocolError."""
    rows: list[RowFacts] = _unpacked(_FACTS, payload)
    return rows


def unpack_values(payload: Buffer | None) -> list[RowValues]:
    """Return the rows' values. Raise only ProtocolError."""
    rows: list[RowValues] = _unpacked(_VALUES, payload)
    return rows


MAX_BEGUN: Final = 16
"""Maximum number of restarts of a read because the row was written meanwhile."""


class ValuesReading:
    """Reader of the values of some keys over several replies; all parts of a row are of one version.

    field 1 of version 7 ──▶ the row is written ──▶ field 1 of version 8, field 2 of version 8    restarted

    Args:
        fields: Requested fields; all if empty.
    """

    def __init__(self, partition: str, fields: Sequence[str] = ()) -> None:
        self.is_whole = False
        """True if all values have been received."""
        self._asks = FindRows(call="values", partition=partition, fields=list(fields), known=0)
        self._part: dict[str, bytes] = {}  # received fields of a partial row
        self._begun = 0

    @property
    def request(self) -> FindRows:
        """Next request; its payload is the keys."""
        return self._asks

    def take(self, reply: KeyedRows, payload: Buffer | None) -> list[RowValues]:
        """Return the rows that a reply completes.

        Raises:
            ProtocolError: the rows cannot be read, or (code "busy") a row is written faster than it can be read.
        """
        rows = unpack_values(payload)
        if self._part and reply.version != self._asks.version:
            self._begun += 1
            if self._begun > MAX_BEGUN:
                text = f"a row of partition {self._asks.partition!r} was written {self._begun} times while it was read"
                raise ProtocolError("busy", f"{text} in parts. Retry when the row is written less often")
        elif rows and self._part:
            rows[0] = RowValues(rows[0].is_there, rows[0].names, self._part | rows[0].fields)
        self._part = rows.pop().fields if reply.known and rows else {}
        version = reply.version if reply.known else 0
        self._asks = msgspec.structs.replace(self._asks, after=reply.after, known=reply.known, version=version)
        self.is_whole = reply.is_whole
        return rows


def _unpacked(decoder: Any, payload: Buffer | None) -> Any:
    if payload is None:
        return []
    try:
        return decoder.decode(memoryview(payload))
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError("payload", f"its rows cannot be read: {error}") from None
