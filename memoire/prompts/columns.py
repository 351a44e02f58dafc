"""Columns of answers as raw bytes: what a worker sends, what a table keeps and what a trainer gets.

    schema    tokens int32[any], logprob float32[any], reward float32
    piece     columns 0b101, lengths [3], bytes 16      7 8 9 | 0.5           in the schema's order, without padding

A table keeps the bytes of each column; pieces of a ragged one are put behind each other.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from memoire.errors import EntryError, NoSuchField, ParameterError, ProtocolError
from memoire.replay.columns import ENTRY_BYTES, Column
from memoire.replay.ragged import Ragged
from memoire.replay.schema import Schema
from memoire.replay.value_conversion import exact, finite, is_finite

MAX_COLUMNS = 63
"""Columns that a table of prompts may have: each is a bit of a number."""
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
                value = exact(name, column, value)
            found[place] = (finite(name, column, value) if column.is_finite else value).tobytes()
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
