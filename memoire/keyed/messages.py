"""What messages about keyed rows say and carry: msgpack, with all bounds in the types. Pure.

Values are bytes that only clients understand: a server merges rows by the names of their fields.
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
"""Fields, and tags, of a row."""
Fields: TypeAlias = Annotated[dict[Name, bytes], Meta(max_length=MAX_FIELDS)]
Keys: TypeAlias = Annotated[list[Key], Meta(max_length=2**20)]


@body(types.FIND_ROWS)
class FindRows(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for keyed rows, or for their tags: the payload names the keys. Answered by KEYED_ROWS."""

    call: Literal["tags", "facts", "values"]
    partition: Name = ""
    is_everywhere: bool = False  # tags of all partitions
    after: Word = 0  # tags: number of the last row that is known; else how many of the keys are known
    known: Small | None = None  # tags: partitions that came; null: no reply to tags or facts leaves any out.
    # values: fields of the first key that came; null: no row comes in parts
    version: Word = 0  # values: of the row whose fields came; another one is begun again
    fields: Annotated[list[Name], Meta(max_length=1024)] = []  # values of these alone


@body(types.CHANGE_ROWS)
class ChangeRows(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Writes keyed rows, or takes them away: the payload has them. Answered by KEYED_ROWS."""

    call: Literal["put", "stage", "clear", "reset"]
    partition: Name = ""
    upload: Word = 0  # staged bytes that values of this request refer to, or that this piece belongs to
    offset: Count = 0  # of the piece


@body(types.KEYED_ROWS)
class KeyedRows(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answers FIND_ROWS and CHANGE_ROWS; the payload has the rows that were asked for."""

    epoch: Word = 0  # of the server: its rows are new if it is
    after: Word = 0  # what to ask with next
    known: Small = 0  # values: likewise; fields of the next key that came
    version: Word = 0  # values: of the first row in the payload, which each change makes another one; 0: it is not here
    is_whole: bool = True  # whether nothing is left to ask for
    partitions: Annotated[list[Name], Meta(max_length=65536)] = []  # that exist, also those without rows
    rows: Count = 0  # that this server holds now
    bytes: Count = 0


class StagedValue(TailRow, frozen=True, array_like=True):
    """A value whose bytes came before, in pieces."""

    field: Name
    start: Count
    bytes: Count


class PutRow(TailRow, frozen=True, array_like=True):
    """A row to be written: fields and tags that it has stay, unless they are named here."""

    key: Key
    tags: Fields = {}
    fields: Fields = {}
    staged: Annotated[list[StagedValue], Meta(max_length=1024)] = []
    made: Word = 0  # microseconds of the writer's clock, which count if the row is new

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each value, by its field."""
        return {name: len(value) for name, value in self.fields.items()} | self.staged_sizes

    @property
    def staged_sizes(self) -> dict[str, int]:
        """Bytes of those that come in pieces."""
        return {each.field: each.bytes for each in self.staged}


class RowFacts(TailRow, frozen=True, array_like=True):
    """A row without its values."""

    partition: Name
    key: Key
    number: Word
    tags: Fields
    fields: Annotated[list[Name], Meta(max_length=1024)]
    made: Word = 0


class RowValues(TailRow, frozen=True, array_like=True):
    """A row's values."""

    is_there: bool  # whether there is a row of this key
    names: Annotated[list[Name], Meta(max_length=1024)]  # of all its fields, also those that were not asked for
    fields: Fields


_ENCODER: Final = msgspec.msgpack.Encoder()
_PUT: Final = msgspec.msgpack.Decoder(Annotated[list[PutRow], Meta(max_length=2**20)])
_KEYS: Final = msgspec.msgpack.Decoder(Keys)
_FACTS: Final = msgspec.msgpack.Decoder(Annotated[list[RowFacts], Meta(max_length=2**24)])
_VALUES: Final = msgspec.msgpack.Decoder(Annotated[list[RowValues], Meta(max_length=2**20)])


def pack(rows: Sequence[Any]) -> bytes:
    """The bytes of keys, or of rows of one kind."""
    return _ENCODER.encode(rows)


VALUE_BYTES: Final = 80
"""What each value takes in memory beside its bytes once it is unpacked, about."""


def unpacked_size(payload: Buffer | None) -> int:
    """Bytes that rows or keys take when they are unpacked, about: to be asked for before that. 0: it is malformed."""
    if payload is None:
        return 0
    values: int = count_values(payload)
    return values and values * VALUE_BYTES + memoryview(payload).nbytes


def unpack_puts(payload: Buffer | None) -> list[PutRow]:
    """Rows to be written. Raises ProtocolError, and nothing else."""
    rows: list[PutRow] = _unpacked(_PUT, payload)
    return rows


def unpack_keys(payload: Buffer | None) -> list[str]:
    """Keys. Raises ProtocolError, and nothing else."""
    keys: list[str] = _unpacked(_KEYS, payload)
    return keys


def unpack_facts(payload: Buffer | None) -> list[RowFacts]:
    """Rows without their values. Raises ProtocolError, and nothing else."""
    rows: list[RowFacts] = _unpacked(_FACTS, payload)
    return rows


def unpack_values(payload: Buffer | None) -> list[RowValues]:
    """Rows' values. Raises ProtocolError, and nothing else."""
    rows: list[RowValues] = _unpacked(_VALUES, payload)
    return rows


MAX_BEGUN: Final = 16
"""Times that the values of some keys are begun again because a row is written meanwhile."""


class ValuesReading:
    """Reads the values of some keys, which come in several replies; all parts of a row are of one version.

    field 1 of version 7 ──▶ the row is written ──▶ field 1 of version 8, field 2 of version 8    begun again

    Args:
        fields: Those that are asked for; none: all.
    """

    def __init__(self, partition: str, fields: Sequence[str] = ()) -> None:
        self.is_whole = False
        """Whether all have come."""
        self._asks = FindRows(call="values", partition=partition, fields=list(fields), known=0)
        self._part: dict[str, bytes] = {}  # of the row that has come in part
        self._begun = 0

    @property
    def request(self) -> FindRows:
        """What to ask for next; its payload is the keys."""
        return self._asks

    def take(self, said: KeyedRows, payload: Buffer | None) -> list[RowValues]:
        """The rows that are whole by this reply.

        Raises:
            ProtocolError: they cannot be read, or (code "busy") a row is written faster than it can be read in parts.
        """
        rows = unpack_values(payload)
        if self._part and said.version != self._asks.version:
            self._begun += 1
            if self._begun > MAX_BEGUN:
                text = f"a row of partition {self._asks.partition!r} was written {self._begun} times while it was read"
                raise ProtocolError("busy", f"{text} in parts. Read it again when it is written less often")
        elif rows and self._part:
            rows[0] = RowValues(rows[0].is_there, rows[0].names, self._part | rows[0].fields)
        self._part = rows.pop().fields if said.known and rows else {}
        version = said.version if said.known else 0
        self._asks = msgspec.structs.replace(self._asks, after=said.after, known=said.known, version=version)
        self.is_whole = said.is_whole
        return rows


def _unpacked(decoder: Any, payload: Buffer | None) -> Any:
    if payload is None:
        return []
    try:
        return decoder.decode(memoryview(payload))
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError("payload", f"its rows cannot be read: {error}") from None
