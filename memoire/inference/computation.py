"""One batch: rows of several requests joined, padded, given to the function, and its outputs checked and parted.

obs [2 rows], [1 row], [5 rows] ──▶ [8, ...] ──pad to a size──▶ [32, ...] ──▶ function ──▶ [32, ...] ──▶ [2], [1], [5]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memoire.errors import EntryError, MemoireError, ParameterError, ProtocolError, escape
from memoire.replay.columns import Ragged
from memoire.replay.conversion import is_finite
from memoire.replay.schema import RowSchema
from memoire.wire.row_container import Rows, exact_rows, joined, pack_known, pack_rows, unpack_rows

Function = Callable[..., Mapping[str, Any]]
_MAX_TEXT = 500  # characters of an error that clients are told


@dataclass(frozen=True, slots=True)
class Weights:
    """What the function computes with."""

    value: Any = None
    version: int = 0
    is_there: bool = False
    """Whether there are any: the function gets them as its second argument."""


@dataclass(frozen=True, slots=True)
class Computation:
    """The function, and what it is given and gives back.

    Args:
        sizes: Rows to which batches are filled up with zeros, ascending; empty: they are given as they are.
    """

    function: Function
    inputs: RowSchema
    outputs: RowSchema
    sizes: Sequence[int] = ()

    def run(self, parts: list[Rows], weights: Weights) -> Rows:
        """The outputs of all parts, one behind the other, and perhaps of rows that fill the batch up.

        Args:
            parts: Emptied as soon as they are joined: each row is in memory twice at most.

        Raises:
            ProtocolError: the function raised, or gave something else than the outputs (code "failed").
        """
        rows = sum(_rows_of(part) for part in parts)
        size = next((size for size in self.sizes if size >= rows), rows)
        columns = joined(self.inputs, parts)
        parts.clear()
        columns = padded(self.inputs, columns, size - rows)
        try:
            found = self.function(columns, weights.value) if weights.is_there else self.function(columns)
            return self._checked(found, size)
        except Exception as error:
            raise ProtocolError("failed", _first_line(error)) from error

    def _checked(self, found: Any, rows: int) -> Rows:
        if not isinstance(found, Mapping):
            raise ProtocolError("failed", f"a mapping of arrays was expected, got {type(found).__name__}")
        given = flat_columns(self.outputs, found)
        made = exact_rows(self.outputs, unpadded(self.outputs, given), rows)
        for name in self.outputs.finite:
            if not is_finite(made[name]):
                raise ProtocolError("failed", f"output {name!r} is not finite")
        return made


def _rows_of(part: Rows) -> int:
    return len(next(iter(part.values())))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if isinstance(error, ProtocolError):
        text = error.detail
    elif not isinstance(error, MemoireError):
        text = f"{type(error).__name__}: {text}"
    return escape(f"the function of this inference node failed: {text}")[:_MAX_TEXT]


def flat_columns(schema: RowSchema, given: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of rows by their full names, as a mapping may nest them, with the lengths that it has beside them.

    Raises:
        SchemaError: a nested value is not as the schema.
        ProtocolError: one is missing (code "value").
    """
    names = schema.names
    if not schema.ragged and len(given) == len(names) and all(name in given for name in names):
        return {name: given[name] for name in names}
    found: dict[str, Any] = {}
    for root in schema.roots:
        leaves = schema.leaves(root)
        if root in given:
            found |= dict(zip(leaves, schema.flatten(root, given[root]), strict=True))
        elif all(name in given for name in leaves):
            found |= {name: given[name] for name in leaves}
        else:
            raise ProtocolError(
                "value", f"column {root!r} is missing; there are {', '.join(map(str, given)) or 'none'}"
            )
    return found | {f"{name}_length": given[f"{name}_length"] for name in schema.ragged if f"{name}_length" in given}


def unpadded(schema: RowSchema, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns in which values of ragged ones have just their lengths, if these are told."""
    made = {name: columns[name] for name in schema.names}
    for name in schema.ragged:
        if (lengths := columns.get(f"{name}_length")) is not None:
            made[name] = [np.asarray(value)[: int(length)] for value, length in zip(made[name], lengths, strict=True)]
    return made


def padded(schema: RowSchema, columns: Rows, more: int = 0) -> dict[str, Any]:
    """Columns as arrays [n + more, *F]: values of a ragged one with zeros behind each, and `NAME_length` [n + more].

    Args:
        more: Rows of zeros behind the others.
    """
    made: dict[str, Any] = {}
    for name, values in columns.items():
        if isinstance(values, Ragged):
            made[name], made[f"{name}_length"] = _longer(values.padded(), more), _longer(values.lengths, more)
        else:
            made[name] = _longer(values, more)
    return made


def _longer(values: Any, more: int) -> Any:
    return np.concatenate([values, np.zeros((more, *values.shape[1:]), values.dtype)]) if more else values


def packed_rows(schema: RowSchema, columns: Mapping[str, Any]) -> tuple[int, bytes]:
    """N, how many rows these are, and their container, bytes [size], of arrays [N, *F] or lists of arrays.

    Raises:
        EntryError, ParameterError, SchemaError: a value has another form, is missing, or is not finite.
    """
    first = columns.get(schema.names[0])
    if type(first) is np.ndarray and first.ndim:
        rows = len(first)
        payload = pack_known(schema, columns, rows)
        if payload is not None:
            return rows, payload
    return _packed_slowly(schema, columns)


def _packed_slowly(schema: RowSchema, columns: Mapping[str, Any]) -> tuple[int, bytes]:
    try:
        flat = flat_columns(schema, columns)
    except ValueError as error:
        raise ParameterError("columns", list(columns), str(error)) from None
    values = unpadded(schema, flat)
    first = values[schema.names[0]]
    rows = len(first) if isinstance(first, list | tuple) or np.ndim(first) else 0
    if not rows:
        raise ParameterError("columns", f"{schema.names[0]!r} without rows", "arrays with a leading axis of 1 or more")
    made = exact_rows(schema, values, rows)
    for name in schema.finite:
        if not is_finite(made[name]):
            raise EntryError(name, f"finite values of {schema[name]}, unless it is nan='allow'", "NaN or infinity")
    return rows, pack_rows(schema, made, rows)


def packed_row(schema: RowSchema, columns: Mapping[str, Any]) -> bytes:
    """The container, bytes [size], of one row of columns [*F]. Raises what `packed_rows` raises."""
    ragged = schema.ragged
    rows = {name: [value] if name in ragged else np.asarray(value)[None] for name, value in columns.items()}
    return packed_rows(schema, rows)[1]


def unpacked(payload: Any, schema: RowSchema) -> list[dict[str, Any]]:
    """The rows of a container, each a mapping of columns [*F], as copies. Raises ProtocolError: it is none."""
    rows, count = unpack_rows(payload, schema)
    return [{name: np.array(values[i]) for name, values in rows.items()} for i in range(count)]
