"""The form of containers of as many rows of one schema: all their bytes but the columns' own are the same.

    head, table │ obs  0.1 0.2 │ padding │ action  3 │ padding
    ── known ── │              │ ─known─ │           │ ─known─

A policy asks for the same number of rows again and again. A container of a known form is filled in without a layout,
and one that came is compared with it instead of being checked field by field.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from memoire.replay.schema import Schema

from ._container import RowForm
from .parts import HEAD, ROW

MAX_BYTES: Final = 1 << 16
"""Of containers whose form is kept: for larger ones, their bytes cost more than what a form saves."""
MAX_FORMS: Final = 256
MAX_AXES: Final = 31
"""Of a column's values."""


def form_of(schema: Schema, rows: int, empty: bytes, columns: Mapping[int, str]) -> RowForm:
    """The form of containers of so many rows.

    Args:
        schema: Without ragged columns.
        empty: One of them, not compressed, with zeros in its columns.
        columns: Of each block the column's name.
    """
    begins = {name: ROW.unpack_from(empty, HEAD.size + ROW.size * block)[4] for block, name in columns.items()}
    places = [
        (name, begin, schema[name].dtype, (rows, *schema[name].shape), name in schema.finite)
        for name, begin in begins.items()
    ]
    return RowForm(empty, places)


class RowForms:
    """The newest forms. Any thread may ask."""

    def __init__(self, most: int = MAX_FORMS) -> None:
        self._most = most
        self._forms: dict[tuple[int, int], RowForm] = {}  # by the schema's fingerprint, and the number of rows

    def of(self, schema: Schema, rows: int) -> RowForm | None:
        """The form of containers of so many rows, if it is known."""
        return self._forms.get((schema.fingerprint, rows))

    def learn(self, schema: Schema, rows: int, form: RowForm) -> None:
        """Keep a form; the oldest leaves if there are too many."""
        forms = dict(itertools.islice(self._forms.items(), max(0, len(self._forms) + 1 - self._most), None))
        self._forms = forms | {(schema.fingerprint, rows): form}

    def forget(self) -> None:
        """Forget all: for tests."""
        self._forms = {}


FORMS: Final = RowForms()
"""Of this process."""
