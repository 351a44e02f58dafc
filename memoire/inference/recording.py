"""What an observer records: the entries that its function yields become a fragment, as rollouts are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.errors import EntryError, ParameterError
from memoire.replay.dataset import Episode
from memoire.replay.rollouts import Fragment
from memoire.replay.schema import Schema
from memoire.replay.value_conversion import is_finite
from memoire.wire.row_container import exact_rows


def fragment_of(
    schema: Schema,
    entries: Sequence[Mapping[str, Any]],
    versions: Sequence[int],
    final: Mapping[str, Any] | None = None,
    *,
    terminated: bool = False,
    client: bytes = bytes(16),
    number: int = 0,
) -> Fragment:
    """Entries as an observer yields them, checked.

    Args:
        entries: Of each entry its columns [*F], by their full names.
        versions: Of the weights that acted.
        final: State columns [*F] after the last entry.

    Raises:
        EntryError: a value does not fit its column, is missing or is not finite.
    """
    columns = exact_rows(_checked(schema, entries), _listed(schema, entries), len(entries))
    last = None
    if final is not None:
        states = {name: np.asarray(_of(final, name), schema[name].dtype) for name in schema.states}
        last = {name: _exact_one(schema, name, value) for name, value in states.items()}
    for name in schema.finite:
        for values in (columns[name], None if last is None else last.get(name)):
            if values is not None and not is_finite(values):
                raise EntryError(name, f"finite values of {schema[name]}", "NaN or infinity")
    count = len(entries)
    episode = Episode(
        columns=columns,
        init_w=np.ones(count, np.float32),
        priority=None,
        learned=np.zeros(count, np.bool_),
        born=None,
        model_version=np.asarray(versions, np.int64),
        terminated=terminated,
        final_state=last,
    )
    return Fragment(client, number, episode, np.zeros(count, np.float32), 0.0)


def _checked(schema: Schema, entries: Sequence[Mapping[str, Any]]) -> Schema:
    if not entries:
        raise ParameterError("entries", "none", "at least one: an episode has a step")
    if schema.qvest is not None:
        raise ParameterError("entries", schema.qvest, "columns without a return: it follows from rewards")
    return schema


def _listed(schema: Schema, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each column's values in a list; those of one shape as an array [T, *F]."""
    made: dict[str, Any] = {}
    for name in schema.entry_names:
        values = [np.asarray(_of(entry, name)) for entry in entries]
        if name not in schema.ragged and any(value.shape != schema[name].shape for value in values):
            found = next(value.shape for value in values if value.shape != schema[name].shape)
            raise EntryError(name, str(schema[name]), f"shape {found}")
        made[name] = values if name in schema.ragged else _stacked(schema, name, values)
    return made


def _stacked(schema: Schema, name: str, values: list[NDArray[Any]]) -> NDArray[Any]:
    """Values [T, *F] in the column's dtype, which plain Python numbers do not have."""
    made = np.stack(values)
    try:
        return made.astype(schema[name].dtype, casting="same_kind")
    except TypeError:
        raise EntryError(name, str(schema[name]), str(made.dtype)) from None


def _exact_one(schema: Schema, name: str, value: NDArray[Any]) -> NDArray[Any]:
    column = schema[name]
    shape = value.shape[1:] if column.is_ragged and value.ndim else value.shape
    if shape != (column.element if column.is_ragged else column.shape):
        raise EntryError(name, str(column), f"shape {value.shape}, in the final state")
    return value


def _of(entry: Mapping[str, Any], name: str) -> Any:
    if name not in entry:
        raise EntryError(name, "a value in each entry and in the final state", f"only {', '.join(map(str, entry))}")
    return entry[name]
