"""Columns of answers as raw bytes: what a worker sends, what a table keeps and what a trainer gets.

    schema    tokens int32[any], logprob float32[any], reward float32
    piece     columns 0b101, lengths [3], bytes 16      7 8 9 | 0.5           in the schema's order, without padding

A table keeps the bytes of each column; pieces of a ragged one are put behind each other.

The bytes of a table of prompts: payloads and columns of answers, and which of them are to be saved. Pure.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from memoire import Column, Ragged, Schema
from memoire.building import ENTRY_BYTES, conversion, is_finite
from memoire.errors import EntryError, NoSuchField, ParameterError, ProtocolError

MAX_COLUMNS = 63
"""Columns that a table of prompts may have: each is a bit of a number."""
Key: TypeAlias = tuple[str, int, int]
"""Data set, epoch and index: what names a prompt."""
RawColumns: TypeAlias = dict[int, bytes]
"""Bytes of columns, by their places in the schema."""


def check_columns(schema: Schema) -> None:
    """Refuse a schema whose columns cannot be those of answers. Raises ParameterError."""
    if len(schema.names) > MAX_COLUMNS:
        raise ParameterError("schema", f"{len(schema.names)} columns", f"at most {MAX_COLUMNS} with storage='prompts'")
    empty = [name for name in schema.names if not schema[name].nbytes]
    if empty:
        raise ParameterError("schema", str(schema[empty[0]]), f"a column {empty[0]!r} that has bytes")


ANSWER_PART: Final = 0.75
"""Part of a request that columns of answers may take."""


def check_requests(table: str, schema: Schema, request_bytes: int) -> None:
    """Refuse a table with a column of which a worker would find out that no request has room for it.

    Raises:
        ParameterError: a plain column, or one element of a ragged one, is larger.
    """
    for name in schema.names:
        least = math.ceil(schema[name].nbytes / ANSWER_PART)
        if least > request_bytes:
            what = "an element" if schema[name].is_ragged else "a value"
            expected = f"at least {least}: {what} of column {name!r} of table {table!r} travels in one request"
            raise ParameterError("request_bytes", request_bytes, expected)


def mask_of(schema: Schema, names: Iterable[str]) -> int:
    """A bit for each of these columns. Raises NoSuchField."""
    mask = 0
    for name in names:
        if name not in schema:
            raise NoSuchField("columns", repr(name), (), tuple(schema.names))
        mask |= 1 << schema.names.index(name)
    return mask


def mask_of_places(places: Iterable[int]) -> int:
    """A bit for each of these places in the schema."""
    mask = 0
    for place in places:
        mask |= 1 << place
    return mask


def places_of(mask: int) -> list[int]:
    """The places of these bits."""
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def _is_exact(column: Column, value: Any) -> bool:
    """Whether a value of a ragged column is of its form already, as nearly all are: that takes a fifth of `exact`."""
    return (
        column.is_ragged
        and type(value) is np.ndarray
        and value.dtype == column.dtype
        and value.ndim == len(column.shape)
        and value.shape[1:] == column.element
        and value.nbytes <= ENTRY_BYTES
        and len(value) <= ENTRY_BYTES
    )


def raw_columns(schema: Schema, columns: Mapping[str, Any]) -> RawColumns:
    """Columns of one answer as bytes. A plain column has the shape F of the schema, a ragged one [its length, *F].

    Raises:
        NoSuchField, EntryError: a column is not in the schema, or has another dtype or shape.
    """
    found: RawColumns = {}
    for place, name in enumerate(schema.names):
        if name in columns:
            column, value = schema[name], columns[name]
            if not _is_exact(column, value):
                value = conversion.exact(name, column, value)
            found[place] = (conversion.finite(name, column, value) if column.is_finite else value).tobytes()
    if len(found) < len(columns):
        mask_of(schema, columns)  # names the one that is not there
    if not found:
        raise EntryError("columns", f"at least one of {', '.join(schema.names)}", "none")
    return found


class Packed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Columns of one answer as they travel, and as a table keeps them. The collector has nothing to look for in it."""

    columns: int
    """A bit for each column of the schema that is there."""
    lengths: tuple[int, ...]
    """Elements of each ragged one of them, in the schema's order."""
    data: bytes
    """Their bytes, likewise, without padding."""


NOTHING: Final = Packed(0, (), b"")


class _Form(NamedTuple):
    """How the bytes of some columns follow each other."""

    columns: list[tuple[int, str, Column]]
    """With their places."""
    plain: int
    """Bytes of those that are not ragged."""
    ragged: list[int]
    """Bytes of one element of each ragged one."""
    has_finite: bool
    """Whether some may only have finite numbers."""


@functools.lru_cache(maxsize=256)
def _form(schema: Schema, mask: int) -> _Form:
    """Raises ProtocolError: there are no such columns."""
    names = schema.names
    if mask >> len(names) or mask < 0:
        raise ProtocolError("container", f"columns {mask:#x} of a schema that has {len(names)}")
    columns = [(place, names[place], schema[names[place]]) for place in places_of(mask)]
    plain = sum(column.nbytes for _, _, column in columns if not column.is_ragged)
    ragged = [column.nbytes for _, _, column in columns if column.is_ragged]
    return _Form(columns, plain, ragged, any(column.is_finite for _, _, column in columns))


def packed(schema: Schema, raw: RawColumns) -> Packed:
    """Columns behind each other."""
    mask, lengths = mask_of_places(raw), list[int]()
    for place, _, column in _form(schema, mask).columns:
        if column.is_ragged:
            lengths.append(len(raw[place]) // column.nbytes)
    return Packed(mask, tuple(lengths), b"".join([raw[place] for place in sorted(raw)]))


def unpacked(schema: Schema, made: Packed) -> RawColumns:
    """Each column by itself."""
    found, begin, lengths = RawColumns(), 0, iter(made.lengths)
    for place, _, column in _form(schema, made.columns).columns:
        end = begin + (column.nbytes * next(lengths) if column.is_ragged else column.nbytes)
        found[place] = made.data[begin:end]
        begin = end
    return found


def chosen(schema: Schema, made: Packed, mask: int) -> Packed:
    """Those of these columns that an answer has."""
    if not made.columns & ~mask:
        return made
    return packed(schema, {place: data for place, data in unpacked(schema, made).items() if mask >> place & 1})


def checked(schema: Schema, mask: int, lengths: Sequence[int], data: memoryview) -> Packed:
    """The columns of a received piece, completely checked, as bytes of their own.

    Raises:
        ProtocolError: and nothing else, whatever the bytes.
    """
    form = _form(schema, mask)
    if len(lengths) != len(form.ragged):
        raise ProtocolError("container", f"{len(lengths)} lengths of {len(form.ragged)} ragged columns")
    size = form.plain + sum(map(operator.mul, lengths, form.ragged))
    if size != len(data) or not mask:
        raise ProtocolError("container", f"columns of {size} bytes in {len(data)}")
    made = Packed(mask, tuple(lengths), bytes(data))
    if form.has_finite:
        raw = unpacked(schema, made)
        for place, name, column in form.columns:
            if column.is_finite and not is_finite(np.frombuffer(raw[place], column.dtype)):
                text = f"column {name!r} is not finite; declare it with nan='allow' where it may be"
                raise ProtocolError("value", text)
    return made


def joined(schema: Schema, pieces: Sequence[Packed]) -> RawColumns:
    """Pieces of an answer, one behind the other: of a ragged column all elements, of a plain one the last value."""
    parts: dict[int, list[bytes]] = {}
    for piece in pieces:
        for place, data in unpacked(schema, piece).items():
            if schema[schema.names[place]].is_ragged:
                parts.setdefault(place, []).append(data)
            else:
                parts[place] = [data]
    return {place: b"".join(part) for place, part in parts.items()}


def gathered(schema: Schema, place: int, parts: Sequence[bytes | None]) -> Any:
    """One column of several answers: an array [n, *F], or `Ragged`. None of an answer is zeros, or no elements."""
    column = schema[schema.names[place]]
    if column.is_ragged:
        data = b"".join(part or b"" for part in parts)
        lengths = [len(part or b"") // column.nbytes for part in parts]
        return Ragged(np.frombuffer(data, column.dtype).reshape(-1, *column.element), lengths)
    zeros = bytes(column.nbytes)
    data = b"".join(zeros if part is None else part for part in parts)
    return np.frombuffer(data, column.dtype).reshape(len(parts), *column.shape)


ROW, STEP, PLAN, FACTS, PAYLOAD, COLUMNS = 0, 1, 2, 3, 8, 12
"""Kinds of saved rows: payloads are large, and columns of answers can come again."""


def packed_key(*parts: str | int) -> bytes:
    """A key as it is saved."""
    return msgspec.msgpack.encode(parts)


PIECE_BYTES: Final = 256
"""What a payload or a piece takes beside its bytes, about."""
JOINED_BYTES: Final = 1 << 20
"""Bytes of a whole answer whose pieces are joined: many small ones take more than what is in them."""
AMENDED: Final = -1
"""In place of a piece's number: columns that came from elsewhere, and count for more than those of pieces."""


class PromptBytes:
    """Keeps bytes by prompt, those of an answer as its pieces came: a long one costs its length. Not thread-safe.

    Args:
        schema: Of the answers.
    """

    def __init__(self, schema: Schema) -> None:
        self.bytes = 0
        """Of all that is kept, and of what is to be saved."""
        self.payload_bytes = 0
        """Those of them that payloads take."""
        self.joined_bytes = JOINED_BYTES
        """Bytes of a whole answer up to which its pieces are joined."""
        self._unsaved_bytes = 0
        self._saves: dict[tuple[int, bytes], bytes | None] | None = None
        self._schema = schema
        self._payloads: dict[Key, bytes] = {}
        self._answers: dict[Key, dict[int, dict[int, Packed]]] = {}  # by the answer, and the number of the piece

    @property
    def saves(self) -> dict[tuple[int, bytes], bytes | None] | None:
        """What changed since it was saved last; None: nothing is ever saved."""
        return self._saves

    @saves.setter
    def saves(self, changes: dict[tuple[int, bytes], bytes | None] | None) -> None:
        self._saves = changes
        self.bytes -= self._unsaved_bytes
        self._unsaved_bytes = 0

    def add(self, key: Key, payload: bytes) -> None:
        """Keep the payload of a prompt."""
        self._payloads[key] = payload
        self._count_payload(PIECE_BYTES + len(payload))
        self._save(PAYLOAD, packed_key(*key), payload)

    def _count_payload(self, size: int) -> None:
        self.bytes += size
        self.payload_bytes += size

    def payload(self, key: Key) -> bytes:
        """The payload of a prompt."""
        return self._payloads.get(key, b"")

    def begin(self, key: Key, index: int, come: Packed) -> None:
        """The first piece of an answer came: beside it only what was amended stays."""
        self.begin_again(key, index)
        self._put(key, index, 0, come)

    def begin_again(self, key: Key, index: int) -> None:
        """Of an answer only what was amended stays."""
        for number in [number for number in self._pieces(key, index) if number != AMENDED]:
            self._drop(key, index, number)

    def append(self, key: Key, index: int, come: Packed) -> None:
        """A further piece of an answer came."""
        self._put(key, index, 1 + max(self._pieces(key, index), default=AMENDED), come)

    def amend(self, key: Key, index: int, come: Packed) -> None:
        """Columns of an answer are these from now on, whatever its pieces bring."""
        former = unpacked(self._schema, self._pieces(key, index).get(AMENDED, NOTHING))
        self._put(key, index, AMENDED, packed(self._schema, former | unpacked(self._schema, come)))

    def join(self, key: Key, index: int) -> None:
        """An answer is whole: put its pieces together, unless it is long."""
        pieces = {number: piece for number, piece in self._pieces(key, index).items() if number != AMENDED}
        if len(pieces) > 1 and sum(len(piece.data) for piece in pieces.values()) <= self.joined_bytes:
            whole = packed(self._schema, joined(self._schema, [pieces[number] for number in sorted(pieces)]))
            self.begin(key, index, whole)

    def _pieces(self, key: Key, index: int) -> dict[int, Packed]:
        return self._answers.get(key, {}).get(index, {})

    def _put(self, key: Key, index: int, number: int, made: Packed) -> None:
        pieces = self._answers.setdefault(key, {}).setdefault(index, {})
        former = pieces.get(number)
        self.bytes += len(made.data) - (-PIECE_BYTES if former is None else len(former.data))
        pieces[number] = made
        if self._saves is not None:
            self._save(COLUMNS, packed_key(*key, index, number), msgspec.msgpack.encode(made))

    def _drop(self, key: Key, index: int, number: int) -> None:
        made = self._answers[key][index].pop(number)
        self.bytes -= PIECE_BYTES + len(made.data)
        self._save(COLUMNS, packed_key(*key, index, number), None)

    def packed(self, key: Key, index: int) -> Packed:
        """What is there of an answer."""
        pieces = self._pieces(key, index)
        if len(pieces) == 1:
            return next(iter(pieces.values()))
        return packed(self._schema, self.columns(key, index))

    def columns(self, key: Key, index: int) -> RawColumns:
        """The same, each column by itself."""
        pieces = self._pieces(key, index)
        amended = unpacked(self._schema, pieces.get(AMENDED, NOTHING))
        return joined(self._schema, [pieces[number] for number in sorted(pieces) if number != AMENDED]) | amended

    def let_go(self, key: Key, index: int | None = None) -> None:
        """Keep the columns of an answer, or of all answers to a prompt, no longer."""
        answers = self._answers.get(key, {})
        for each in [index] if index is not None else list(answers):
            for number in list(answers.get(each, {})):
                self._drop(key, each, number)
            answers.pop(each, None)
        if not answers:
            self._answers.pop(key, None)

    def forget(self, key: Key) -> None:
        """A prompt has left the table."""
        self.let_go(key)
        payload = self._payloads.pop(key, None)
        self._count_payload(0 if payload is None else -PIECE_BYTES - len(payload))
        self._save(PAYLOAD, packed_key(*key), None)

    def lose(self, kind: int, key: bytes) -> None:
        """A payload or a piece of an answer that was saved is missing: its row is to go."""
        self._save(kind, key, None)

    def restore(self, kind: int, key: bytes, body: bytes) -> None:
        """Take what was saved of a payload, or of an answer's columns. Raises msgspec's errors."""
        if kind == PAYLOAD:
            dataset, epoch, index = msgspec.msgpack.decode(key, type=tuple[str, int, int])
            self._payloads[dataset, epoch, index] = body
            self._count_payload(PIECE_BYTES + len(body))
        else:
            of = msgspec.msgpack.decode(key, type=tuple[str, int, int, int, int])
            made = msgspec.msgpack.decode(body, type=Packed)
            self._answers.setdefault(of[:3], {}).setdefault(of[3], {})[of[4]] = made
            self.bytes += PIECE_BYTES + len(made.data)

    def _save(self, kind: int, key: bytes, body: bytes | None) -> None:
        if self._saves is not None:
            grown = len(body or b"") - len(self._saves.get((kind, key)) or b"")
            self._unsaved_bytes += grown
            self.bytes += grown
            self._saves[kind, key] = body

    def check_invariants(self) -> None:
        """Raise AssertionError if the bytes are not the sum of what is kept. For tests."""
        pieces = [piece for answers in self._answers.values() for each in answers.values() for piece in each.values()]
        kept = [*self._payloads.values(), *(piece.data for piece in pieces)]
        unsaved = sum(len(body or b"") for body in (self._saves or {}).values() if body is not None)
        assert self.bytes == sum(PIECE_BYTES + len(data) for data in kept) + self._unsaved_bytes
        assert self._unsaved_bytes <= unsaved
