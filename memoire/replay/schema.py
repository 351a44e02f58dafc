"""What an entry is: named columns, each with a dtype, a shape and a role.

Everything else is derived from a schema: how memory is laid out, what travels, what a batch holds. Two nodes agree on
a schema when their fingerprints are equal. A nested observation becomes one column for each leaf (`obs.image`,
`obs.gripper`), so that each is one contiguous array; structured dtypes are taken apart in the same way.

What a row is that goes to a function and comes back: named columns, like an entry's, but without its roles.

A policy far away is given observations, and returns actions, values, logits: none of them has to be a state, and a
column called value is no critic's estimate that needs a reward beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from memoire.arguments import checked_names, is_name, no_field
from memoire.errors import SchemaError, WrongType

from .columns import (
    ENTRY_BYTES,
    Column,
    allowing_nan,
    build,
    checked_nan,
    collect,
    columns_of_space,
    fields_of,
    is_shape,
    named,
    read_column,
    role_and_nan,
    tree_of,
    with_tuples,
)

_ROLE_OF_NAME = {"obs": "state", "state": "state", "reward": "reward", "value": "value", "qvest": "return"}
_RESERVED = frozenset({"discount", "importance", "ids", "steps", "age", "model_version", "weight", "init_w"})
_MAX_COLUMNS = 1024
_MAX_NAME = 200
_MAX_DEPTH = 64
_MAX_DIMENSIONS = 8


class Schema(Mapping[str, Column]):
    """The ordered columns of an entry: a mapping from name to `Column`, unchangeable, hashable and picklable.

    Args:
        columns: For each name a `Column`; a dtype; (dtype, shape); an array whose dtype and shape serve as template;
            a Gymnasium space; or a dict or tuple of these, which becomes one column for each leaf ("obs.image",
            "obs.0"). Without a `Column` that says otherwise, the names decide the roles: obs and state are states,
            reward, value and qvest (the return) are what they say, all others are plain. Names have no dots; some
            that a batch uses itself (ids, discount, next_*, ...) are refused.

    A schema has a state, at most one reward, value and return column (float32, of equal shapes). One with a value
    column and no return column gets the return column `qvest` at its end.

    Raises:
        SchemaError: says which column, what was found, and what is allowed.
    """

    names: tuple[str, ...]
    """All columns, in order."""
    entry_names: tuple[str, ...]
    """The columns that an entry is given with: all but the return column."""
    states: tuple[str, ...]
    """The columns of role state."""
    roots: tuple[str, ...]
    """The names before the first dot, in order: what the schema was declared with."""
    reward: str | None
    value: str | None
    qvest: str | None
    """The columns of these roles ("return" for `qvest`), or None."""
    reward_shape: tuple[int, ...]
    """The shape of one reward; () without a reward column."""
    ragged: tuple[str, ...]
    """The columns whose first axis is free."""
    finite: tuple[str, ...]
    """The columns that an entry is given with and whose values must be finite."""
    entry_bytes: int
    """Bytes of one entry: the sum over all columns, with one element of each ragged one."""
    fingerprint: int
    """64 bits, equal for equal schemas in every process and version: blake2b of `to_json()`."""

    @checked_names()
    def __init__(self, columns: Mapping[str, Any]) -> None:
        if not isinstance(columns, Mapping):
            raise SchemaError(f"a schema is made of a mapping from name to column, got {type(columns).__name__}.")
        leaves: dict[str, Column] = {}
        tuples: set[str] = set()
        for name, template in columns.items():
            _check_name(name, "")
            _take_apart(name, template, _ROLE_OF_NAME.get(name, "plain"), leaves, tuples)
        self._settle(leaves, tuples)

    @classmethod
    @checked_names()
    def from_env(
        cls,
        env: Any,
        extra: Mapping[str, Any] | None = None,
        *,
        reward_shape: Sequence[int] = (),
        keep_float64: bool = False,
        nan: str = "refuse",
    ) -> Self:
        """The schema of an environment: columns obs (obs.* for Dict and Tuple spaces), action, reward, and extras.

        Args:
            env: A Gymnasium environment or vector environment, or anything with the two spaces; nothing is called.
            extra: More columns, as `Schema` takes them, given to `Writer.step` by name: `{"logp": np.float32}`. A
                column called value is the critic's estimate.
            reward_shape: The shape of a vector reward; () is the usual scalar. Stored as float32.
            keep_float64: Observations and actions that the spaces give as float64 are stored as float32 unless this
                is set: twice the bytes buy nothing that a network of float32 can see. Extras are stored as they are
                declared.
            nan: "allow" where NaN or infinity in observations mean something; see `Column`.
        """
        columns: dict[str, Any] = {}
        for name, space_name, role in (("obs", "observation_space", "state"), ("action", "action_space", "plain")):
            space = getattr(env, f"single_{space_name}", None) or getattr(env, space_name, None)
            if space is None:
                example = f": gymnasium.make({env!r})" if isinstance(env, str) else ""
                shown = f"text ({env[:80]!r})" if isinstance(env, str) else type(env).__name__
                raise SchemaError(f"{shown} has no {space_name}. Give a Gymnasium environment{example}.")
            columns[name] = columns_of_space(name, space, role, keep_float64)
        if checked_nan(nan, "state") == "allow":
            columns["obs"] = allowing_nan(columns["obs"])
        columns["reward"] = Column(np.float32, reward_shape, "reward")
        for name, template in (extra or {}).items():
            if name in columns:
                raise SchemaError(
                    f"extra column {name!r}: the environment has one of this name already. Choose another."
                )
            columns[name] = template
        return cls(columns)

    @classmethod
    def from_json(cls, text: str | bytes | Mapping[str, Any]) -> Self:
        """The schema that `to_json` wrote; everything is checked again, and only `SchemaError` comes out."""
        try:
            data = json.loads(text) if isinstance(text, str | bytes) else text
            rows = [
                (str(name), str(dtype), tuple(shape), str(role), tuple(map(str, nan)))
                for name, dtype, shape, role, *nan in data["columns"]
            ]
            tuples = {str(path) for path in data.get("tuples", ())}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SchemaError(f"this is not the JSON form of a schema: {error!r}.") from error
        leaves: dict[str, Column] = {}
        for name, dtype, shape, role, nan in rows:
            for part in name.split("."):
                _check_name(part, name)
            if name in leaves:
                raise SchemaError(f"column {name!r} is there twice.")
            leaves[name] = named(name, partial(read_column, dtype, shape, role, nan))
        schema = cls.__new__(cls)
        schema._settle(leaves, tuples)
        return schema

    def to_json(self) -> str:
        """Canonical JSON, equal for equal schemas: {"columns": [[name, dtype, shape, role], ...], "tuples": [...]}.
        A column that allows NaN has "allow" behind its role.
        """
        return self._json

    def leaves(self, root: str) -> tuple[str, ...]:
        """The columns of a declared name: ("obs",), or ("obs.image", "obs.gripper")."""
        self._check_root(root)
        return tuple(name for name in self.names if name == root or name.startswith(root + "."))

    def flatten(self, root: str, value: Any) -> list[Any]:
        """The leaves of a nested value (dicts, tuples, structured arrays; with or without a batch axis), as
        `leaves(root)` names them.

        Raises `SchemaError` where the value is not nested as the schema is.
        """
        self._check_root(root)
        found: list[Any] = []
        collect(self._trees[root], value, found)
        return found

    def nest(self, root: str, columns: Mapping[str, Any]) -> Any:
        """The value of a declared name out of its leaves: what `flatten` took apart, as dicts and tuples."""
        self._check_root(root)
        return build(self._trees[root], columns)

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except (KeyError, TypeError):  # the latter: it is no name at all
            raise no_field("this schema", name, self._columns) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __eq__(self, other: object) -> bool:
        return self._json == other._json if isinstance(other, Schema) else NotImplemented

    def __hash__(self) -> int:
        return self.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_json, (self._json,)

    def __repr__(self) -> str:
        rows = (
            f"{name}: {column}" + ("" if column.role == "plain" else f" ({', '.join(role_and_nan(column))})")
            for name, column in self.items()
        )
        return f"Schema({', '.join(rows)})"

    def _settle(self, leaves: dict[str, Column], tuples: set[str]) -> None:
        """Check the columns together, add the return column, and derive everything that is read often."""
        for name, column in leaves.items():
            _check_column(name, column)
        reward, value, qvest = (_only(role, leaves) for role in ("reward", "value", "return"))
        if value is not None and qvest is None:
            if "qvest" in leaves:
                raise SchemaError(
                    "column 'qvest' is plain, but the return column that a value column needs is called so. "
                    "Rename it, or give it role 'return'."
                )
            qvest = "qvest"
            leaves = {**leaves, qvest: Column(np.float32, leaves[value].shape, "return")}
        self._check_states(leaves)
        _check_ragged(leaves)
        self._columns = leaves
        tree = tree_of(leaves)
        self._check_names(leaves, tree)
        _check_roles(leaves, reward, value, qvest)
        self._trees = with_tuples(tree, leaves, tuples)
        self.names = tuple(leaves)
        self.entry_names = tuple(name for name in leaves if name != qvest)
        self.states = tuple(name for name, column in leaves.items() if column.role == "state")
        self.ragged = tuple(name for name, column in leaves.items() if column.is_ragged)
        self.finite = tuple(name for name, column in leaves.items() if column.is_finite and name != qvest)
        self.roots = tuple(self._trees)
        self.reward, self.value, self.qvest = reward, value, qvest
        self.reward_shape = () if reward is None else leaves[reward].shape
        self.entry_bytes = sum(column.nbytes for column in leaves.values())
        if self.entry_bytes > ENTRY_BYTES:
            largest = max(leaves, key=lambda name: leaves[name].nbytes)
            raise SchemaError(
                f"an entry has {self.entry_bytes} bytes, more than {ENTRY_BYTES}. The largest column is {largest!r}, "
                f"{leaves[largest]}: store it smaller, or elsewhere."
            )
        rows = [[name, column.dtype.str, list(column.shape), *role_and_nan(column)] for name, column in leaves.items()]
        self._json = json.dumps({"columns": rows, "tuples": sorted(tuples)}, sort_keys=True, separators=(",", ":"))
        self.fingerprint = int.from_bytes(hashlib.blake2b(self._json.encode(), digest_size=8).digest(), "little")

    def _check_states(self, leaves: Mapping[str, Column]) -> None:
        if not any(column.role == "state" for column in leaves.values()):
            raise SchemaError(
                f"no column is a state (there are {', '.join(leaves) or 'none'}). Call one 'obs' or 'state', or "
                f"declare it as Column(dtype, shape, 'state')."
            )

    def _check_names(self, leaves: Mapping[str, Column], roots: Mapping[str, Any]) -> None:
        if "reward" in leaves and leaves["reward"].role != "reward":
            raise SchemaError(
                "column 'reward' is not the reward. Give it role 'reward', or rename it: a batch's key is that."
            )
        _check_roots(roots)

    def _check_root(self, root: str) -> None:
        if root not in self._trees:
            raise SchemaError(f"{root!r} is not in the schema, which has {', '.join(self.roots)}.")


def _check_name(name: Any, within: str) -> None:
    where = f" (in {within!r})" if within else ""
    if not isinstance(name, str):
        raise SchemaError(f"column names are strings, got {name!r}{where}. Write {str(name)!r}.")
    if "." in name and is_name(name.replace(".", "_"), _MAX_NAME):
        nested = "..."
        for part in reversed(name.split(".")):
            nested = f"{{{part!r}: {nested}}}"
        flat = name.replace(".", "_")
        raise SchemaError(f"column {name!r}{where}: dots separate nested names. Write {nested}, or rename it {flat!r}.")
    if not is_name(name, _MAX_NAME):
        raise SchemaError(
            f"column {name[:_MAX_NAME]!r}{where}: a name is 1 to {_MAX_NAME} printable characters without a dot "
            f"(dots separate nested names). Rename it."
        )


def _take_apart(name: str, template: Any, role: str, leaves: dict[str, Column], tuples: set[str]) -> None:
    """Put the column, or the columns of every leaf, of `template` into `leaves`."""
    if isinstance(template, Column):
        if template.dtype.names is None:
            leaves[name] = template
            return
        role = template.role
        parts: Mapping[Any, Any] = fields_of(template)
    elif isinstance(template, Mapping) and not hasattr(template, "contains"):
        parts = template
    elif isinstance(template, tuple) and not (len(template) == 2 and _is_shape_or_int(template[1])):
        tuples.add(name)
        parts = {str(i): part for i, part in enumerate(template)}
    else:
        _take_apart(name, _template(name, template, role), role, leaves, tuples)
        return
    if not parts:
        raise SchemaError(f"column {name!r} is nested but has nothing in it. Leave it out.")
    for key, part in parts.items():
        _check_name(key, name)
        _take_apart(f"{name}.{key}", part, role, leaves, tuples)


def _template(name: str, template: Any, role: str) -> Any:
    """A `Column`, or a nesting of them, for anything a schema accepts that is not one yet."""
    if isinstance(template, np.ndarray | np.generic):
        return named(name, lambda: Column(template.dtype, template.shape, role))
    if hasattr(template, "contains") and hasattr(template, "sample"):
        return columns_of_space(name, template, role, keep_float64=True)
    if isinstance(template, tuple):
        return named(name, lambda: Column(template[0], template[1], role))
    if isinstance(template, str | type | np.dtype):
        return named(name, lambda: Column(template, (), role))
    raise SchemaError(
        f"column {name!r} was declared as {template!r}, a value of type {type(template).__name__}. Give a Column, a "
        f"dtype, (dtype, shape) such as (np.float32, (4,)), an array, a Gymnasium space, or a dict or tuple of these."
    )


def _only(role: str, leaves: Mapping[str, Column]) -> str | None:
    """The one column of a role that a schema has once at most."""
    found = [name for name, column in leaves.items() if column.role == role]
    if len(found) > 1:
        raise SchemaError(
            f"the columns {', '.join(map(repr, found))} all have role {role!r}, but there can be one. "
            f"Make the others plain."
        )
    return found[0] if found else None


def _check_roles(leaves: Mapping[str, Column], reward: str | None, value: str | None, qvest: str | None) -> None:
    if len(leaves) > _MAX_COLUMNS:
        raise SchemaError(
            f"{len(leaves)} columns are more than {_MAX_COLUMNS}. Put values of one dtype into one array."
        )
    if (value is not None or qvest is not None) and (reward is None or value is None):
        missing = "reward" if reward is None else "value"
        raise SchemaError(
            f"column {value or qvest!r} needs a {missing} column beside it: returns are made of rewards and values."
        )
    for name in (reward, value, qvest):
        if name is None:
            continue
        column = leaves[name]
        if "." in name:
            raise SchemaError(
                f"column {name!r} has role {column.role!r}, so it cannot be nested. Declare it by itself."
            )
        if column.is_ragged:
            raise SchemaError(
                f"column {name!r} has role {column.role!r}, so it cannot be ragged. Give it a fixed shape."
            )
        if column.dtype != np.float32:
            raise SchemaError(
                f"column {name!r} has role {column.role!r} and dtype {column.dtype}, but must be float32. "
                f"Declare it so, or as plain."
            )
        if reward is not None and column.shape != leaves[reward].shape:
            raise SchemaError(
                f"column {name!r} has shape {column.shape}, but the reward {reward!r} has {leaves[reward].shape}: "
                f"reward, value and return have one shape."
            )


def _check_ragged(leaves: Mapping[str, Column]) -> None:
    for ragged in (name for name, column in leaves.items() if column.is_ragged):
        if f"{ragged}_length" in leaves:
            raise SchemaError(
                f"column '{ragged}_length': a batch has the lengths of the ragged column {ragged!r} under this name. "
                f"Choose another."
            )


def _is_shape_or_int(value: Any) -> bool:
    return is_shape(value) or (isinstance(value, int | np.integer) and not isinstance(value, bool))


def _check_column(name: str, column: Column) -> None:
    if name.count(".") >= _MAX_DEPTH:
        raise SchemaError(
            f"column {name[:_MAX_NAME]!r}... lies {name.count('.')} levels deep, more than {_MAX_DEPTH}. Nest less."
        )
    if column.dtype.kind not in "biuf" or column.dtype.itemsize > 8:
        raise SchemaError(
            f"column {name!r} has dtype {column.dtype}, but only booleans, integers and floats of up to 8 bytes can be "
            f"stored. Encode the value as numbers, or leave the column out."
        )
    if column.is_ragged and column.nbytes == 0:
        raise SchemaError(f"column {name!r} is ragged, but its elements have no bytes: {column}. Leave it out.")
    if len(column.shape) > _MAX_DIMENSIONS:
        raise SchemaError(f"column {name!r} has {len(column.shape)} axes, more than {_MAX_DIMENSIONS}. Reshape it.")


def _check_roots(roots: Iterable[str]) -> None:
    for root in roots:
        if root in _RESERVED or root.startswith("next_"):
            raise SchemaError(f"column {root!r}: a batch uses this name itself. Choose another, such as 'my_{root}'.")


def schema_from(given: Any) -> Schema:
    """A schema, as callers give one: itself, or a mapping that it is made of.

    Raises:
        WrongType: it is neither.
        SchemaError: the mapping cannot be a schema.
    """
    if isinstance(given, Schema):
        return given
    if not isinstance(given, Mapping):
        advice = "Make one: memoire.Schema({...}), or memoire.Schema.from_env(env)."
        raise WrongType("schema", "a memoire.Schema", type(given).__name__, advice)
    return Schema(given)


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


class NoColumns(RowSchema):
    """No column at all: what is kept has no form that a schema could name."""

    def _settle(self, leaves: dict[str, Column], tuples: set[str]) -> None:
        if leaves:
            raise SchemaError(f"columns are named ({', '.join(leaves)}) where there are none. Leave them out.")
        Schema._settle(self, leaves, tuples)


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
