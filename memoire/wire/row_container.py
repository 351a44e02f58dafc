"""Containers of kind ROWS: rows of a schema's columns, as INFER carries them to an inference node and INFERRED back.

row 0   obs [0.1 0.2]   points [1 0 0] [2 0 0]        block PREV of obs      0.1 0.2 | 0.3 0.4
row 1   obs [0.3 0.4]   points (none)                 block PREV of points   [1 0 0] [2 0 0]       no padding
                                                      PREV_LENGTHS           2 0

All containers of one schema and number of rows share a form: their bytes differ in the columns alone.

    head, table │ obs  0.1 0.2 │ padding │ action  3 │ padding
    ── known ── │              │ ─known─ │           │ ─known─

A policy sends the same number of rows again and again. A container of a known form is packed without a layout, and a
received container is compared with the form instead of being checked field by field.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay.columns import Ragged
from memoire.replay.conversion import exact_array, is_finite
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema

from . import containers as unpack
from ._container import RowForm
from .containers import ContainerHead, ContainerWriter
from .layout import ContainerLayout, layout_of
from .parts import HEAD, LENGTH, ROW, ContainerKind, Part, Payload

MAX_BYTES: Final = 1 << 16
"""Largest container whose form is kept: beyond it, copying the bytes costs more than the form saves."""
MAX_FORMS: Final = 256
MAX_AXES: Final = 31
"""Most axes of a value of a column that can have a form."""


def form_of(schema: Schema, rows: int, empty: bytes, columns: Mapping[int, str]) -> RowForm:
    """Return the form of containers of this number of rows.

    Args:
        schema: Schema without ragged columns.
        empty: Container of the form, not compressed, with zeros in its columns.
        columns: Name of the column of each block, by block.
    """
    begins = {name: ROW.unpack_from(empty, HEAD.size + ROW.size * block)[4] for block, name in columns.items()}
    places = [
        (name, begin, schema[name].dtype, (rows, *schema[name].shape), name in schema.finite)
        for name, begin in begins.items()
    ]
    return RowForm(empty, places)


class RowForms:
    """Cache of the `most` newest forms. Lookups are thread-safe."""

    def __init__(self, most: int = MAX_FORMS) -> None:
        self._most = most
        self._forms: dict[tuple[int, int], RowForm] = {}  # forms by fingerprint and number of rows

    def form_of(self, schema: Schema, rows: int) -> RowForm | None:
        """Return the form of containers of this number of rows, or None if it is not in the cache."""
        return self._forms.get((schema.fingerprint, rows))

    def add(self, schema: Schema, rows: int, form: RowForm) -> None:
        """Add a form, and evict the oldest if the cache is full."""
        forms = dict(itertools.islice(self._forms.items(), max(0, len(self._forms) + 1 - self._most), None))
        self._forms = forms | {(schema.fingerprint, rows): form}

    def forget(self) -> None:
        """Evict all forms, for tests."""
        self._forms = {}


FORMS: Final = RowForms()
"""Cache of the forms that this process has packed or unpacked."""


Rows = dict[str, Any]
"""Columns of n rows by name: arrays [n, *F], or `Ragged` for a ragged column."""
_DEFAULTS: Final = Limits()
_PARAMETERS: Final = Parameters()
_ROWS: Final = struct.Struct("<I")  # the first field of the head


def exact_rows(schema: Schema, columns: Mapping[str, Any], rows: int) -> Rows:
    """Return the columns in exactly their dtypes and shapes [rows, *F]; a ragged column may come as a list of arrays.

    Raises:
        EntryError: a value has another dtype or shape.
    """
    return {name: exact_array(name, column, columns[name], (rows,)) for name, column in schema.items()}


def pack_rows(schema: Schema, columns: Rows, rows: int) -> bytes:
    """Pack columns that `exact_rows` returned into a container of kind ROWS."""
    return pack_known(schema, columns, rows) or _pack_slowly(schema, columns, rows)


def pack_known(schema: Schema, columns: Mapping[str, Any], rows: int, first: int = -1) -> bytes | None:
    """Pack columns into a container of a known form. Return None if the form of this number of rows is not known,
    or if a value is not an array of exactly its column's dtype and shape, or not finite although it must be.

    Args:
        columns: Arrays [rows, *F]; or longer arrays, of which the rows from `first` on are packed.
    """
    form = FORMS.form_of(schema, rows)
    return None if form is None or type(columns) is not dict else form.pack(columns, first)


def _pack_slowly(schema: Schema, columns: Rows, rows: int) -> bytes:
    payload = _pack(schema, columns, rows).tobytes()
    if FORMS.form_of(schema, rows) is None:
        _learn_form(schema, rows, len(payload))
    return payload


def _pack(schema: Schema, columns: Rows, rows: int) -> Payload:
    layout = _layout(schema)
    ragged = {name: columns[name] for name in schema.ragged}
    elements = {block: len(ragged[layout.schema.names[layout.blocks[block].column]].values) for block in layout.ragged}
    container = ContainerWriter(layout, ContainerHead(), rows, elements=elements)
    arrays: dict[int, Any] = {}
    for block, part, name in layout.columns:
        if part is Part.PREV_LENGTHS:
            arrays[block] = ragged[name].lengths.astype(LENGTH)
        else:
            arrays[block] = np.ascontiguousarray(ragged[name].values if name in ragged else columns[name])
    container.fill_blocks(arrays)
    return container.payload


def unpacked_size(payload: Any, schema: Schema) -> int:
    """Return the bytes of a received container of kind ROWS and of its blocks after decompression, as its table says.

    Raises:
        ProtocolError: the table does not fit the bytes.
    """
    view = memoryview(payload)
    rows = _ROWS.unpack_from(view)[0] if view.nbytes >= _ROWS.size else 0
    if FORMS.form_of(schema, rows) is not None:
        return view.nbytes
    return view.nbytes + sum(row.raw for row in unpack.table(payload) if row.codec)


def widths_of(columns: Rows) -> tuple[int, ...]:
    """Return the bytes of a row of each ragged column if all rows are padded to the longest value."""
    ragged = [values for values in columns.values() if isinstance(values, Ragged)]
    return tuple(int(each.lengths.max(initial=0)) * (each.values.nbytes // max(1, len(each.values))) for each in ragged)


def unpack_rows(payload: Any, schema: Schema, limits: Limits = _DEFAULTS) -> tuple[Rows, int]:
    """Check a received container of kind ROWS completely; return its columns and number of rows.

    The arrays may lie in the payload.

    Raises:
        ProtocolError: the container is invalid. No bytes raise any other error.
    """
    view = memoryview(payload)
    rows = _ROWS.unpack_from(view)[0] if view.nbytes >= _ROWS.size else 0
    form = FORMS.form_of(schema, rows)
    if form is not None and view.nbytes <= limits.message_bytes:
        columns = form.unpack(view)
        if columns is not None:
            return columns, rows
    return _unpack_slowly(view, schema, limits)


def _unpack_slowly(view: memoryview, schema: Schema, limits: Limits) -> tuple[Rows, int]:
    held = unpack.check(view, _layout(schema), limits)
    columns, _ = unpack.read_columns(held, _layout(schema))
    rows = int(held.samples)
    if FORMS.form_of(schema, rows) is None:
        _learn_form(schema, rows, view.nbytes)
    for name in schema.finite:
        if not is_finite(columns[name]):
            raise ProtocolError("value", f"column {name!r} is not finite; declare it with nan='allow' if it may be")
    return columns, rows


def _learn_form(schema: Schema, rows: int, size: int) -> None:
    """Cache the form of containers of `rows` rows and `size` bytes, unless they are too large or ragged."""
    is_plain = not schema.ragged and all(len(column.shape) <= MAX_AXES for column in schema.values())
    if rows and size <= MAX_BYTES and is_plain:
        empty = {name: np.zeros((rows, *column.shape), column.dtype) for name, column in schema.items()}
        blocks = {block: name for block, _, name in _layout(schema).columns}
        FORMS.add(schema, rows, form_of(schema, rows, _pack(schema, empty, rows).tobytes(), blocks))


def _layout(schema: Schema) -> ContainerLayout:
    return layout_of(schema, _PARAMETERS, ContainerKind.ROWS)


def joined(schema: Schema, parts: list[Rows]) -> Rows:
    """Concatenate the rows of several containers."""
    if len(parts) == 1:
        return parts[0]
    rows: Rows = {}
    for name in schema.names:
        values = [part[name] for part in parts]
        if name in schema.ragged:
            lengths = np.concatenate([each.lengths for each in values])
            rows[name] = Ragged(np.concatenate([each.values for each in values]), lengths)
        else:
            rows[name] = np.concatenate(values)
    return rows


def cut(columns: Rows, begin: int, end: int) -> Rows:
    """Return the rows from `begin` to `end`, without a copy."""
    return {name: values[begin:end] for name, values in columns.items()}
