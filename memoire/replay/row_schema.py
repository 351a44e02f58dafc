"""What a row is that goes to a function and comes back: named columns, like an entry's, but without its roles.

A policy far away is given observations, and returns actions, values, logits: none of them has to be a state, and a
column called value is no critic's estimate that needs a reward beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memoire.errors import SchemaError, WrongType
from memoire.suggestions import checked_names

from .columns import Column
from .schema import Schema


class RowSchema(Schema):
    """The columns of a row: a schema in which each column is plain, or a state.

    Args:
        columns: As `Schema` takes them. Columns called obs and state, and those with this role, are states: their
            values must be finite, unless their `Column` says otherwise. All others are plain and not looked at,
            whatever their names.

    Raises:
        SchemaError: says which column, what was found, and what is allowed.
    """

    @checked_names()
    def __init__(self, columns: Mapping[str, Any]) -> None:
        super().__init__(columns)

    def _settle(self, leaves: dict[str, Column], tuples: set[str]) -> None:
        """Derive everything, after each other role was taken off its column."""
        if not leaves:
            raise SchemaError("a row has no column. Name at least one: {'obs': (np.float32, (4,))}.")
        super()._settle({name: _without_role(column) for name, column in leaves.items()}, tuples)

    def _check_states(self, leaves: Mapping[str, Column]) -> None:
        """A row needs none."""

    def _check_names(self, leaves: Mapping[str, Column], roots: Mapping[str, Any]) -> None:
        """No batch of samples has these columns beside its own."""


def _without_role(column: Column) -> Column:
    return column if column.role in ("state", "plain") else Column(column.dtype, column.shape)


def row_schema_from(name: str, given: Any) -> RowSchema:
    """The columns of rows, as callers give them: a `RowSchema`, a `Schema`, or a mapping that one is made of.

    Args:
        name: Of the argument, for errors.

    Raises:
        WrongType: it is none of these.
        SchemaError: the mapping cannot be a schema.
    """
    if isinstance(given, RowSchema):
        return given
    if isinstance(given, Schema):
        return RowSchema.from_json(given.to_json())
    if not isinstance(given, Mapping):
        advice = "Give a mapping from name to column: {'obs': (np.float32, (4,))}."
        raise WrongType(name, "a mapping from name to column", type(given).__name__, advice)
    return RowSchema(given)
