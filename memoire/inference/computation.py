"""Computation of one batch: requests' rows are joined and padded, and the function's outputs checked and split.

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
_MAX_TEXT = 500  # maximum characters of an error for clients


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the function, with their version."""

    value: Any = None
    version: int = 0
    is_there: bool = False
    """True if there are weights: the function gets `value` as its second argument."""


@dataclass(frozen=True, slots=True)
class Computation:
    """The function, with the schemas of its inputs and outputs.

    Args:
        sizes: Row counts to which batches are padded with zeros, ascending; if empty, batches are not padded.
    """

    function: Function
    inputs: RowSchema
    outputs: RowSchema
    sizes: Sequence[int] = ()

    def run(self, parts: list[Rows], weights: Weights) -> Rows:
        """Return the outputs of all parts, one after another, perhaps followed by those of padding rows.

        Args:
            parts: Rows of each request; cleared after the join, so that each row is in memory at most twice.

        Raises:
            ProtocolError: the function raised, or returned other columns than the outputs (code "failed").
        """
        rows = sum(_rows_of(part) for part in parts)
        size = next((size for size in self.sizes if size >= rows), rows)
        columns = joined(self.inputs, parts)
        parts.clear()
        columns = padded(self.inputs, columns, size - rows)
        try:
            outputs = self.function(columns, weights.value) if weights.is_there else self.function(columns)
            return self._checked(outputs, size)
        except Exception as error:
            raise ProtocolError("failed", _first_line(error)) from error

    def _checked(self, outputs: Any, rows: int) -> Rows:
        if not isinstance(outputs, Mapping):
            raise ProtocolError("failed", f"expected a mapping of arrays, got {type(outputs).__name__}")
        columns = flat_columns(self.outputs, outputs)
        rows_by_name = exact_rows(self.outputs, unpadded(self.outputs, columns), rows)
        for name in self.outputs.finite:
            if not is_finite(rows_by_name[name]):
                raise ProtocolError("failed", f"output {name!r} is not finite")
        return rows_by_name


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


def flat_columns(schema: RowSchema, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns by their full names from a mapping that may nest them; lengths beside ragged columns stay.

    Raises:
        SchemaError: a nested value does not fit the schema.
        ProtocolError: a column is missing (code "value").
    """
    names = schema.names
    if not schema.ragged and len(tree) == len(names) and all(name in tree for name in names):
        return {name: tree[name] for name in names}
    columns: dict[str, Any] = {}
    for root in schema.roots:
        leaves = schema.leaves(root)
        if root in tree:
            columns |= dict(zip(leaves, schema.flatten(root, tree[root]), strict=True))
        elif all(name in tree for name in leaves):
            columns |= {name: tree[name] for name in leaves}
        else:
            raise ProtocolError("value", f"column {root!r} is missing; got {', '.join(map(str, tree)) or 'no columns'}")
    return columns | {f"{name}_length": tree[f"{name}_length"] for name in schema.ragged if f"{name}_length" in tree}


def unpadded(schema: RowSchema, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns whose ragged values are cut to their lengths, if the lengths are given."""
    values = {name: columns[name] for name in schema.names}
    for name in schema.ragged:
        if (lengths := columns.get(f"{name}_length")) is not None:
            values[name] = [np.asarray(row)[: int(length)] for row, length in zip(values[name], lengths, strict=True)]
    return values


def padded(schema: RowSchema, columns: Rows, more: int = 0) -> dict[str, Any]:
    """Return columns as arrays [n + more, *F]: ragged values padded with zeros, and `NAME_length` [n + more].

    Args:
        more: Rows of zeros to append.
    """
    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        if isinstance(values, Ragged):
            arrays[name], arrays[f"{name}_length"] = _extended(values.padded(), more), _extended(values.lengths, more)
        else:
            arrays[name] = _extended(values, more)
    return arrays


def _extended(values: Any, more: int) -> Any:
    return np.concatenate([values, np.zeros((more, *values.shape[1:]), values.dtype)]) if more else values


def packed_rows(schema: RowSchema, columns: Mapping[str, Any]) -> tuple[int, bytes]:
    """Return the number of rows N and their container, bytes [size], from arrays [N, *F] or lists of arrays.

    Raises:
        EntryError, ParameterError, SchemaError: a value is missing, not finite, or does not fit the schema.
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
    except ProtocolError as error:
        raise ParameterError.with_text(f"columns do not fit the schema: {error.detail}. Nothing was sent.") from None
    values = unpadded(schema, flat)
    first = values[schema.names[0]]
    rows = len(first) if isinstance(first, list | tuple) or np.ndim(first) else 0
    if not rows:
        raise ParameterError.with_text(
            f"columns[{schema.names[0]!r}] has no rows; each array has a leading axis of 1 or more."
        )
    checked = exact_rows(schema, values, rows)
    for name in schema.finite:
        if not is_finite(checked[name]):
            raise EntryError(name, f"finite values of {schema[name]}, unless nan='allow'", "NaN or infinity")
    return rows, pack_rows(schema, checked, rows)


def packed_row(schema: RowSchema, columns: Mapping[str, Any]) -> bytes:
    """Return the container, bytes [size], of one row of columns [*F]. Raises the errors of `packed_rows`."""
    ragged = schema.ragged
    rows = {name: [value] if name in ragged else np.asarray(value)[None] for name, value in columns.items()}
    return packed_rows(schema, rows)[1]


def unpacked(payload: Any, schema: RowSchema) -> list[dict[str, Any]]:
    """Return the rows of a container as copies, each a mapping of columns [*F]. Raises ProtocolError if malformed."""
    rows, count = unpack_rows(payload, schema)
    return [{name: np.array(values[i]) for name, values in rows.items()} for i in range(count)]
