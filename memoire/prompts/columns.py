"""Columns of answers as raw bytes: what a worker sends, what a table keeps and what a trainer gets.

    schema    tokens int32[any], logprob float32[any], reward float32
    piece     columns 0b101, lengths [3], bytes 16      7 8 9 | 0.5           in the schema's order, without padding

A table keeps the bytes of each column; pieces of a ragged one are put behind each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from memoire.errors import EntryError, NoSuchField, ParameterError, ProtocolError
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


def mask_of(schema: Schema, names: Iterable[str]) -> int:
    """A bit for each of these columns. Raises NoSuchField."""
    mask = 0
    for name in names:
        if name not in schema:
            raise NoSuchField("columns", repr(name), (), tuple(schema.names))
        mask |= 1 << schema.names.index(name)
    return mask


def names_of(schema: Schema, mask: int) -> list[str]:
    """The columns of these bits."""
    return [name for place, name in enumerate(schema.names) if mask >> place & 1]


def places_of(mask: int) -> list[int]:
    """The places of these bits."""
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def raw_columns(schema: Schema, columns: Mapping[str, Any]) -> RawColumns:
    """Columns of one answer as bytes. A plain column has the shape F of the schema, a ragged one [its length, *F].

    Raises:
        NoSuchField, EntryError: a column is not in the schema, or has another dtype or shape.
    """
    mask_of(schema, columns)
    found: RawColumns = {}
    for place, name in enumerate(schema.names):
        if name in columns:
            value = finite(name, schema[name], exact(name, schema[name], columns[name]))
            found[place] = np.ascontiguousarray(value).tobytes()
    if not found:
        raise EntryError("columns", f"at least one of {', '.join(schema.names)}", "none")
    return found


def lengths_of(schema: Schema, raw: Mapping[int, bytes]) -> list[int]:
    """Elements of each ragged one of these columns, in the schema's order."""
    columns = [(schema[schema.names[place]], data) for place, data in sorted(raw.items())]
    return [len(data) // column.nbytes for column, data in columns if column.is_ragged]


def joined(raw: Mapping[int, bytes]) -> bytes:
    """The bytes of all these columns, in the schema's order."""
    return b"".join(data for _, data in sorted(raw.items()))


def checked(schema: Schema, mask: int, lengths: Sequence[int], data: memoryview) -> RawColumns:
    """The columns of a received piece, completely checked, as bytes of their own.

    Raises:
        ProtocolError: and nothing else, whatever the bytes.
    """
    if mask >> len(schema.names) or not mask:
        raise ProtocolError("container", f"columns {mask:#x} of a schema that has {len(schema.names)}")
    found, begin, ragged = RawColumns(), 0, iter(lengths)
    for place in places_of(mask):
        name = schema.names[place]
        column = schema[name]
        size = column.nbytes
        if column.is_ragged:
            length = next(ragged, None)
            if length is None or length * size > len(data):
                raise ProtocolError("container", f"column {name!r} of {length} elements in {len(data)} bytes")
            size *= length
        found[place] = bytes(data[begin : begin + size])
        begin += size
        if column.is_finite and not is_finite(np.frombuffer(found[place], column.dtype)):
            raise ProtocolError("value", f"column {name!r} is not finite; declare it with nan='allow' where it may be")
    if begin != len(data) or next(ragged, None) is not None:
        raise ProtocolError("container", f"columns of {begin} bytes in {len(data)}")
    return found


def append(schema: Schema, kept: RawColumns, come: RawColumns, amended: int) -> None:
    """Put a piece behind those before it: ragged columns grow, plain ones are replaced, amended ones stay."""
    for place, data in come.items():
        if amended >> place & 1:
            continue
        is_ragged = schema[schema.names[place]].is_ragged
        kept[place] = kept[place] + data if is_ragged and place in kept else data


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
