"""What is in a table of rollouts, and which of it a policy is given and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from memoire.errors import SchemaError
from memoire.replay.row_schema import RowSchema
from memoire.replay.schema import Schema

DISCOUNTED: Final = "discounted"
"""Column for the discounted sum of an episode's rewards so far: rewards are scaled by its spread."""
VERSION: Final = "version"
"""What policies call the version of the model that acted."""
KNOWN: Final = ("obs", "reward", "terminated", "truncated")
"""Columns of what the environment returns."""
MEMORY: Final = "memory"
"""Column for what a recurrent policy remembers before an entry: zeros where an episode begins."""


def rollout_schema(env: Any, extra: Mapping[str, Any] | None = None, *, discounted: bool = False) -> Schema:
    """The schema of a table that a `Collector` fills: what the environment has, and logp [] beside it.

    Args:
        env: An environment or vector environment, or anything with its two spaces.
        extra: More columns that the policy returns; one called memory is what a recurrent policy remembers.
        discounted: Whether to store the discounted sums by which rewards are scaled.

    Raises:
        SchemaError: one of the columns has a name that policies return something else by.
    """
    columns: dict[str, Any] = {"logp": np.float32} | dict(extra or {})
    schema = Schema.from_env(env, columns | ({DISCOUNTED: np.float32} if discounted else {}))
    made_by_policies(schema)
    return schema


def made_by_policies(schema: Schema) -> list[str]:
    """Names of what neither the environment nor the collector knows: action, logp and others.

    Raises:
        SchemaError: one of them is what a policy returns beside its columns.
    """
    if VERSION in schema.roots:
        raise SchemaError(f"column {VERSION!r}: policies return their model's version by this name. Choose another.")
    return [root for root in schema.roots if root not in (*KNOWN, schema.qvest, DISCOUNTED)]


def policy_rows(schema: Schema) -> tuple[RowSchema, RowSchema]:
    """Rows that a policy is given and returns, an inference node for instance, for each entry of such a table.

    It is given the observation, and what a recurrent policy remembers. The memory that it returns is the next one.
    """
    given = [root for root in ("obs", MEMORY) if root in schema.roots]
    return _rows(schema, given), _rows(schema, made_by_policies(schema))


def observations_of(inputs: RowSchema, columns: Mapping[str, Any]) -> Any:
    """The observations [B, *F] of rows that a policy is given, nested as the environment has them."""
    return inputs.nest("obs", {leaf: columns[leaf] for leaf in inputs.leaves("obs")})


def _rows(schema: Schema, roots: Sequence[str]) -> RowSchema:
    return RowSchema({root: schema.nest(root, {leaf: schema[leaf] for leaf in schema.leaves(root)}) for root in roots})
