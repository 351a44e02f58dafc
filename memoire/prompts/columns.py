"""Columns of answers as raw bytes: received from workers, kept by tables and fetched by trainers. Pure.

    schema    tokens int32[any], logprob float32[any], reward float32
    piece     columns 0b101, lengths [3], bytes 16      7 8 9 | 0.5           in the schema's order, without padding

A table keeps the bytes of each column; the pieces of a ragged column are concatenated. `PromptBytes` also records which
payloads and columns are to be saved.
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
"""Largest number of columns of a table of prompts: each column is a bit of an integer."""
Key: TypeAlias = tuple[str, int, int]
"""Name of a prompt: data set, epoch and index."""
RawColumns: TypeAlias = dict[int, bytes]
"""Bytes of columns, by their places in the schema."""


def check_columns(schema: Schema) -> None:
    """Raise ParameterError if the columns of a schema cannot be those of answers."""
    if len(schema.names) > MAX_COLUMNS:
        raise ParameterError("schema", f"{len(schema.names)} columns", f"at most {MAX_COLUMNS} with storage='prompts'")
    empty = [name for name in schema.names if not schema[name].nbytes]
    if empty:
        raise ParameterError("schema", str(schema[empty[0]]), f"a schema without empty columns such as {empty[0]!r}")


ANSWER_PART: Final = 0.75
"""Share of a request that columns of answers may take."""


def check_requests(table: str, schema: Schema, request_bytes: int) -> None:
    """Raise ParameterError if a value of a column does not fit into a request.

    A value is all of a plain column, or one element of a ragged one.
    """
    for name in schema.names:
        least = math.ceil(schema[name].nbytes / ANSWER_PART)
        if least > request_bytes:
            what = "an element" if schema[name].is_ragged else "a value"
            expected = f"at least {least}: {what} of column {name!r} of table {table!r} has to fit into one request"
            raise ParameterError("request_bytes", request_bytes, expected)


def mask_of(schema: Schema, names: Iterable[str]) -> int:
    """Return a mask with a bit for each of these columns. Raise NoSuchField for an unknown column."""
    mask = 0
    for name in names:
        if name not in schema:
            raise NoSuchField("columns", repr(name), (), tuple(schema.names))
        mask |= 1 << schema.names.index(name)
    return mask


def mask_of_places(places: Iterable[int]) -> int:
    """Return a mask with a bit for each of these places in the schema."""
    mask = 0
    for place in places:
        mask |= 1 << place
    return mask


def places_of(mask: int) -> list[int]:
    """Return the places of the bits of a mask."""
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def _is_exact(column: Column, value: Any) -> bool:
    """Return True if a value of a ragged column needs no conversion; takes a fifth of the time of `exact_array`."""
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
    """Return the columns of one answer as bytes. A plain column has the schema's shape F, a ragged one [length, *F].

    Raises:
        NoSuchField, EntryError: a column is not in the schema, or has another dtype or shape.
    """
    raw: RawColumns = {}
    for place, name in enumerate(schema.names):
        if name in columns:
            column, value = schema[name], columns[name]
            if not _is_exact(column, value):
                value = conversion.exact_array(name, column, value)
            raw[place] = (conversion.finite(name, column, value) if column.is_finite else value).tobytes()
    if len(raw) < len(columns):
        mask_of(schema, columns)  # raises NoSuchField with the unknown name
    if not raw:
        raise EntryError("columns", f"at least one of {', '.join(schema.names)}", "none")
    return raw


class Packed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Columns of one answer, as messages carry and tables keep them. The garbage collector skips this class."""

    columns: int
    """Mask of the columns, a bit for each column of the schema."""
    lengths: tuple[int, ...]
    """Number of elements of each ragged column, in the schema's order."""
    data: bytes
    """Bytes of the columns, in the schema's order without padding."""


NOTHING: Final = Packed(0, (), b"")


class _Form(NamedTuple):
    """Layout of the bytes of some columns of a schema."""

    columns: list[tuple[int, str, Column]]
    """Place, name and column, in the schema's order."""
    plain: int
    """Bytes of all plain columns together."""
    ragged: list[int]
    """Bytes of one element of each ragged column."""
    has_finite: bool
    """True if a column accepts only finite numbers."""


@functools.lru_cache(maxsize=256)
def _form(schema: Schema, mask: int) -> _Form:
    """Return the layout of a mask of columns. Raise ProtocolError if the schema lacks a column of the mask."""
    names = schema.names
    if mask >> len(names) or mask < 0:
        raise ProtocolError("container", f"columns {mask:#x} of a schema that has {len(names)}")
    columns = [(place, names[place], schema[names[place]]) for place in places_of(mask)]
    plain = sum(column.nbytes for _, _, column in columns if not column.is_ragged)
    ragged = [column.nbytes for _, _, column in columns if column.is_ragged]
    return _Form(columns, plain, ragged, any(column.is_finite for _, _, column in columns))


def packed(schema: Schema, raw: RawColumns) -> Packed:
    """Concatenate columns in the schema's order."""
    mask, lengths = mask_of_places(raw), list[int]()
    for place, _, column in _form(schema, mask).columns:
        if column.is_ragged:
            lengths.append(len(raw[place]) // column.nbytes)
    return Packed(mask, tuple(lengths), b"".join([raw[place] for place in sorted(raw)]))


def unpacked(schema: Schema, packed: Packed) -> RawColumns:
    """Split packed columns into the bytes of each."""
    raw, begin, lengths = RawColumns(), 0, iter(packed.lengths)
    for place, _, column in _form(schema, packed.columns).columns:
        end = begin + (column.nbytes * next(lengths) if column.is_ragged else column.nbytes)
        raw[place] = packed.data[begin:end]
        begin = end
    return raw


def select_columns(schema: Schema, answer: Packed, mask: int) -> Packed:
    """Return only those columns of an answer that are in the mask."""
    if not answer.columns & ~mask:
        return answer
    return packed(schema, {place: data for place, data in unpacked(schema, answer).items() if mask >> place & 1})


def checked(schema: Schema, mask: int, lengths: Sequence[int], data: memoryview) -> Packed:
    """Check the columns of a received piece completely, and return them with a copy of their bytes.

    Raises:
        ProtocolError: the only error for any bytes.
    """
    form = _form(schema, mask)
    if len(lengths) != len(form.ragged):
        raise ProtocolError("container", f"{len(lengths)} lengths of {len(form.ragged)} ragged columns")
    size = form.plain + sum(map(operator.mul, lengths, form.ragged))
    if size != len(data) or not mask:
        raise ProtocolError("container", f"columns of {size} bytes in {len(data)}")
    piece = Packed(mask, tuple(lengths), bytes(data))
    if form.has_finite:
        raw = unpacked(schema, piece)
        for place, name, column in form.columns:
            if column.is_finite and not is_finite(np.frombuffer(raw[place], column.dtype)):
                text = f"column {name!r} is not finite; declare it with nan='allow' if it may hold NaN"
                raise ProtocolError("value", text)
    return piece


def joined_pieces(schema: Schema, pieces: Sequence[Packed]) -> RawColumns:
    """Join the pieces of an answer: concatenate the elements of a ragged column, keep the last value of a plain one."""
    parts: dict[int, list[bytes]] = {}
    for piece in pieces:
        for place, data in unpacked(schema, piece).items():
            if schema[schema.names[place]].is_ragged:
                parts.setdefault(place, []).append(data)
            else:
                parts[place] = [data]
    return {place: b"".join(part) for place, part in parts.items()}


def gather_column(schema: Schema, place: int, parts: Sequence[bytes | None]) -> Any:
    """Return one column of several answers as an array [n, *F] or `Ragged`; missing values are zeros, or empty."""
    column = schema[schema.names[place]]
    if column.is_ragged:
        data = b"".join(part or b"" for part in parts)
        lengths = [len(part or b"") // column.nbytes for part in parts]
        return Ragged(np.frombuffer(data, column.dtype).reshape(-1, *column.element), lengths)
    zeros = bytes(column.nbytes)
    data = b"".join(zeros if part is None else part for part in parts)
    return np.frombuffer(data, column.dtype).reshape(len(parts), *column.shape)


ROW, STEP, PLAN, FACTS, PAYLOAD, COLUMNS = 0, 1, 2, 3, 8, 12
"""Kinds of saved rows: payloads are large, and columns of an answer may be sent again."""


def packed_key(*parts: str | int) -> bytes:
    """Return the key of a saved row."""
    return msgspec.msgpack.encode(parts)


PIECE_BYTES: Final = 256
"""Approximate bytes that a payload or a piece takes in memory beside its data."""
JOINED_BYTES: Final = 1 << 20
"""Bytes of an answer up to which its pieces are joined; many small pieces take more memory than their data."""
AMENDED: Final = -1
"""Number of the piece with amended columns, which replace those of other pieces."""


class PromptBytes:
    """Payloads and columns of answers by prompt. Not thread-safe.

    An answer stays in pieces as they were received, so that a long answer costs only its length.

    Args:
        schema: Schema of the answers.
    """

    def __init__(self, schema: Schema) -> None:
        self.bytes = 0
        """Bytes of all payloads and pieces, and of unsaved changes."""
        self.payload_bytes = 0
        """Bytes of the payloads alone."""
        self.joined_bytes = JOINED_BYTES
        """Bytes of a whole answer up to which its pieces are joined."""
        self._unsaved_bytes = 0
        self._saves: dict[tuple[int, bytes], bytes | None] | None = None
        self._schema = schema
        self._payloads: dict[Key, bytes] = {}
        self._answers: dict[Key, dict[int, dict[int, Packed]]] = {}  # pieces by place of the answer and number

    @property
    def is_durable(self) -> bool:
        """True if changes are saved to disk."""
        return self._saves is not None

    @property
    def unsaved_changes(self) -> dict[tuple[int, bytes], bytes | None] | None:
        """Changes since the last save, by kind and key; None if nothing is ever saved."""
        return self._saves

    @unsaved_changes.setter
    def unsaved_changes(self, changes: dict[tuple[int, bytes], bytes | None] | None) -> None:
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
        """Return the payload of a prompt, b"" if it is unknown."""
        return self._payloads.get(key, b"")

    def put_first_piece(self, key: Key, index: int, piece: Packed) -> None:
        """Keep the first piece of an answer, and drop all other pieces but amended columns."""
        self.drop_pieces(key, index)
        self._put(key, index, 0, piece)

    def drop_pieces(self, key: Key, index: int) -> None:
        """Drop the pieces of an answer but amended columns."""
        for number in [number for number in self._pieces(key, index) if number != AMENDED]:
            self._drop(key, index, number)

    def append(self, key: Key, index: int, piece: Packed) -> None:
        """Keep a further piece of an answer."""
        self._put(key, index, 1 + max(self._pieces(key, index), default=AMENDED), piece)

    def amend(self, key: Key, index: int, piece: Packed) -> None:
        """Replace columns of an answer, also those of later pieces."""
        former = unpacked(self._schema, self._pieces(key, index).get(AMENDED, NOTHING))
        self._put(key, index, AMENDED, packed(self._schema, former | unpacked(self._schema, piece)))

    def join_pieces(self, key: Key, index: int) -> None:
        """Join the pieces of a whole answer unless it is long."""
        pieces = {number: piece for number, piece in self._pieces(key, index).items() if number != AMENDED}
        if len(pieces) > 1 and sum(len(piece.data) for piece in pieces.values()) <= self.joined_bytes:
            whole = packed(self._schema, joined_pieces(self._schema, [pieces[number] for number in sorted(pieces)]))
            self.put_first_piece(key, index, whole)

    def _pieces(self, key: Key, index: int) -> dict[int, Packed]:
        return self._answers.get(key, {}).get(index, {})

    def _put(self, key: Key, index: int, number: int, piece: Packed) -> None:
        pieces = self._answers.setdefault(key, {}).setdefault(index, {})
        former = pieces.get(number)
        self.bytes += len(piece.data) - (-PIECE_BYTES if former is None else len(former.data))
        pieces[number] = piece
        if self._saves is not None:
            self._save(COLUMNS, packed_key(*key, index, number), msgspec.msgpack.encode(piece))

    def _drop(self, key: Key, index: int, number: int) -> None:
        piece = self._answers[key][index].pop(number)
        self.bytes -= PIECE_BYTES + len(piece.data)
        self._save(COLUMNS, packed_key(*key, index, number), None)

    def packed(self, key: Key, index: int) -> Packed:
        """Return all columns of an answer so far."""
        pieces = self._pieces(key, index)
        if len(pieces) == 1:
            return next(iter(pieces.values()))
        return packed(self._schema, self.columns(key, index))

    def columns(self, key: Key, index: int) -> RawColumns:
        """Return all columns of an answer so far, as separate bytes."""
        pieces = self._pieces(key, index)
        amended = unpacked(self._schema, pieces.get(AMENDED, NOTHING))
        return joined_pieces(self._schema, [pieces[number] for number in sorted(pieces) if number != AMENDED]) | amended

    def release(self, key: Key, index: int | None = None) -> None:
        """Drop the columns of an answer, or of all answers to a prompt."""
        answers = self._answers.get(key, {})
        for each in [index] if index is not None else list(answers):
            for number in list(answers.get(each, {})):
                self._drop(key, each, number)
            answers.pop(each, None)
        if not answers:
            self._answers.pop(key, None)

    def forget(self, key: Key) -> None:
        """Drop the payload and the answers of a prompt that left the table."""
        self.release(key)
        payload = self._payloads.pop(key, None)
        self._count_payload(0 if payload is None else -PIECE_BYTES - len(payload))
        self._save(PAYLOAD, packed_key(*key), None)

    def delete_damaged(self, kind: int, key: bytes) -> None:
        """Delete the saved row of a payload or a piece whose content is missing."""
        self._save(kind, key, None)

    def restore(self, kind: int, key: bytes, body: bytes) -> None:
        """Keep a saved payload, or a saved piece of an answer. Raise msgspec's errors if it cannot be decoded."""
        if kind == PAYLOAD:
            dataset, epoch, index = msgspec.msgpack.decode(key, type=tuple[str, int, int])
            self._payloads[dataset, epoch, index] = body
            self._count_payload(PIECE_BYTES + len(body))
        else:
            place = msgspec.msgpack.decode(key, type=tuple[str, int, int, int, int])
            piece = msgspec.msgpack.decode(body, type=Packed)
            self._answers.setdefault(place[:3], {}).setdefault(place[3], {})[place[4]] = piece
            self.bytes += PIECE_BYTES + len(piece.data)

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
