"""The form of containers of as many rows of one schema: all their bytes but the columns' own are the same.

    head, table │ obs  0.1 0.2 │ padding │ action  3 │ padding
    ── known ── │              │ ─known─ │           │ ─known─

A policy asks for the same number of rows again and again. A container of a known form is filled in without a layout,
and one that came is compared with it instead of being checked field by field.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from memoire.replay.schema import Schema

from .parts import HEAD, ROW, Payload

MAX_BYTES: Final = 1 << 16
"""Of containers whose form is kept: for larger ones, their bytes cost more than what a form saves."""
MAX_FORMS: Final = 256


class RowForm:
    """Containers of one schema without ragged columns, and of one number of rows.

    Args:
        empty: One of them, uint8 [size], not compressed, with zeros in its columns.
        columns: Of each block the column's name.
    """

    def __init__(self, schema: Schema, rows: int, empty: Payload, columns: Mapping[int, str]) -> None:
        self._empty = empty
        self._columns: list[tuple[str, int, int, np.dtype[Any], tuple[int, ...]]] = []
        for block, name in columns.items():
            begin, stored = ROW.unpack_from(self._empty.data, HEAD.size + ROW.size * block)[4:6]
            column = schema[name]
            self._columns.append((name, begin, begin + stored, column.dtype, (rows, *column.shape)))
        ends = [0, *(end for _, _, end, *_ in self._columns)]
        begins = [*(begin for _, begin, *_ in self._columns), len(self._empty)]
        known = ((begin, end) for begin, end in zip(ends, begins, strict=True) if begin < end)
        self._known = [(begin, end, self._empty[begin:end].tobytes()) for begin, end in known]

    def pack(self, columns: Mapping[str, Any]) -> Payload:
        """The container, uint8 [size], of columns [rows, *F] in just their dtypes."""
        made = self._empty.copy()
        for name, begin, end, dtype, shape in self._columns:
            if begin < end:
                made[begin:end].view(dtype).reshape(shape)[...] = columns[name]
        return made

    def unpack(self, payload: memoryview) -> dict[str, Any] | None:
        """The columns [rows, *F] of a container of this form; None if it has another one. They may lie in it."""
        if payload.nbytes != len(self._empty):
            return None
        for begin, end, content in self._known:
            if payload[begin:end] != content:
                return None
        found: dict[str, Any] = {}
        for name, begin, end, dtype, shape in self._columns:
            array = np.frombuffer(payload[begin:end], dtype).reshape(shape)
            found[name] = array if array.flags.aligned else array.copy()
        return found


class RowForms:
    """The newest forms. Any thread may ask."""

    def __init__(self, most: int = MAX_FORMS) -> None:
        self._most = most
        self._forms: dict[tuple[Schema, int], RowForm] = {}

    def of(self, schema: Schema, rows: int) -> RowForm | None:
        """The form of containers of so many rows, if it is known."""
        return self._forms.get((schema, rows))

    def learn(self, schema: Schema, rows: int, form: RowForm) -> None:
        """Keep a form; the oldest leaves if there are too many."""
        forms = dict(itertools.islice(self._forms.items(), max(0, len(self._forms) + 1 - self._most), None))
        self._forms = forms | {(schema, rows): form}

    def forget(self) -> None:
        """Forget all: for tests."""
        self._forms = {}


FORMS: Final = RowForms()
"""Of this process."""
