"""Schemas: the columns of an entry (`Schema`) or of a row (`RowSchema`), each with a dtype, a shape and a role.

Memory layout, messages and batches are derived from a schema. Two nodes have the same schema if its fingerprints are
equal. A nested observation becomes one column for each leaf (`obs.image`, `obs.gripper`), so that each is one
contiguous array; structured dtypes are split in the same way.

A row is sent to a function and comes back: it has named columns like an entry, but not its roles. A remote policy
receives observations and returns actions, values and logits: a row needs no state, and its column called value is not
a critic's estimate that requires a reward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from memoire.arguments import checked_names, is_name, no_such_field_error
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
    read_column,
    role_and_nan,
    tree_of,
    with_column_in_error,
    with_tuples,
)

_ROLE_OF_NAME = {"obs": "state", "state": "state", "reward": "reward", "value": "value", "qvest": "return"}
_RESERVED = frozenset({"discount", "importance", "ids", "steps", "age", "model_version", "weight", "init_w"})
_MAX_COLUMNS = 1024
_MAX_NAME = 200
_MAX_DEPTH = 64
_MAX_DIMENSIONS = 8


class Schema(Mapping[str, Column]):
    """Ordered columns of an entry: an immutable mapping from name to `Column`, hashable and picklable.

    Example:
        schema = memoire.Schema({"obs": (np.float32, (4,)), "action": np.int64, "reward": np.float32})

    Args:
        columns: For each name a `Column`; a dtype; (dtype, shape); an array whose dtype and shape serve as template;
            a Gymnasium space; or a dict or tuple of these, which becomes one column for each leaf ("obs.image",
            "obs.0"). Names decide the roles of values that are not a `Column`: obs and state are states; reward,
            value and qvest (the return) have the role of their name; all other values are plain. Names have no dots.
            Names that a batch uses itself (ids, discount, next_*, ...) are rejected.

    A schema has at least one state, and at most one reward, value and return column (float32, of equal shapes). If it
    has a value column but no return column, the return column `qvest` is added at its end.

    Raises:
        SchemaError: names the column, its value, and what is allowed.
    """

    names: tuple[str, ...]
    """All column names, in order."""
    entry_names: tuple[str, ...]
    """Columns of which an added entry has values: all but the return column."""
    states: tuple[str, ...]
    """Columns of role state."""
    roots: tuple[str, ...]
    """Names before the first dot, in order, as declared."""
    reward: str | None
    value: str | None
    qvest: str | None
    """Column of this role, or None; the role of `qvest` is "return"."""
    reward_shape: tuple[int, ...]
    """Shape of one reward; () without a reward column."""
    ragged: tuple[str, ...]
    """Columns whose first axis has any length."""
    finite: tuple[str, ...]
    """Columns of an added entry whose values must be finite."""
    entry_bytes: int
    """Bytes of one entry: the sum over all columns, with one element of each ragged column."""
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
        """Return the schema of an environment: columns obs (obs.* for Dict and Tuple spaces), action, reward, and
        extras.

        Args:
            env: A Gymnasium environment or vector environment, or an object with both spaces; no method is called.
            extra: More columns, as `Schema` takes them, passed to `Writer.step` by name: `{"logp": np.float32}`. A
                column called value is the critic's estimate.
            reward_shape: Shape of a vector reward, stored as float32; () is the usual scalar.
            keep_float64: True to store float64 observations and actions as float64. By default they are stored as
                float32, in half the bytes. Extras keep their declared dtype.
            nan: "allow" to accept NaN and infinity in observations; see `Column`.
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
        """Return the schema that `to_json` wrote, after all checks. The only error raised is `SchemaError`."""
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
            leaves[name] = with_column_in_error(name, partial(read_column, dtype, shape, role, nan))
        schema = cls.__new__(cls)
        schema._settle(leaves, tuples)
        return schema

    def to_json(self) -> str:
        """Return canonical JSON, equal for equal schemas: {"columns": [[name, dtype, shape, role], ...], "tuples":
        [...]}. A column that allows NaN has "allow" after its role.
        """
        return self._json

    def leaves(self, root: str) -> tuple[str, ...]:
        """Return the columns of a declared name: ("obs",), or ("obs.image", "obs.gripper")."""
        self._check_root(root)
        return tuple(name for name in self.names if name == root or name.startswith(root + "."))

    def flatten(self, root: str, value: Any) -> list[Any]:
        """Return the leaves of a nested value (dicts, tuples, structured arrays; with or without a batch axis), in the
        order of `leaves(root)`.

        Raises `SchemaError` if the value is not nested as the schema is.
        """
        self._check_root(root)
        leaves_in_order: list[Any] = []
        collect(self._trees[root], value, leaves_in_order)
        return leaves_in_order

    def nest(self, root: str, columns: Mapping[str, Any]) -> Any:
        """Return the nested value of a declared name from its leaves, as dicts and tuples: the inverse of `flatten`."""
        self._check_root(root)
        return build(self._trees[root], columns)

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except (KeyError, TypeError):  # TypeError: the name is not hashable
            raise no_such_field_error("this schema", name, self._columns) from None

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
        """Check the columns together, add the return column, and derive the attributes."""
        for name, column in leaves.items():
            _check_column(name, column)
        reward, value, qvest = (_only(role, leaves) for role in ("reward", "value", "return"))
        if value is not None and qvest is None:
            if "qvest" in leaves:
                raise SchemaError(
                    "column 'qvest' is plain, but a value column needs a return column of this name. "
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
                f"{leaves[largest]}. Store it in a smaller form, or outside of the memory."
            )
        rows = [[name, column.dtype.str, list(column.shape), *role_and_nan(column)] for name, column in leaves.items()]
        self._json = json.dumps({"columns": rows, "tuples": sorted(tuples)}, sort_keys=True, separators=(",", ":"))
        self.fingerprint = int.from_bytes(hashlib.blake2b(self._json.encode(), digest_size=8).digest(), "little")

    def _check_states(self, leaves: Mapping[str, Column]) -> None:
        if not any(column.role == "state" for column in leaves.values()):
            raise SchemaError(
                f"no column is a state (the columns are {', '.join(leaves) or 'none'}). Call one 'obs' or 'state', or "
                f"declare it as Column(dtype, shape, 'state')."
            )

    def _check_names(self, leaves: Mapping[str, Column], roots: Mapping[str, Any]) -> None:
        if "reward" in leaves and leaves["reward"].role != "reward":
            raise SchemaError(
                "column 'reward' must have role 'reward', because a batch uses this name for it. Rename the column."
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
    """Add the columns of `template` to `leaves`: one, or one for each leaf."""
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
    """Return a `Column`, or a nest of columns, for any other declaration that a schema accepts."""
    if isinstance(template, np.ndarray | np.generic):
        return with_column_in_error(name, lambda: Column(template.dtype, template.shape, role))
    if hasattr(template, "contains") and hasattr(template, "sample"):
        return columns_of_space(name, template, role, keep_float64=True)
    if isinstance(template, tuple):
        return with_column_in_error(name, lambda: Column(template[0], template[1], role))
    if isinstance(template, str | type | np.dtype):
        return with_column_in_error(name, lambda: Column(template, (), role))
    raise SchemaError(
        f"column {name!r} was declared as {template!r}, a value of type {type(template).__name__}. Give a Column, a "
        f"dtype, (dtype, shape) such as (np.float32, (4,)), an array, a Gymnasium space, or a dict or tuple of these."
    )


def _only(role: str, leaves: Mapping[str, Column]) -> str | None:
    """Return the column of a role that at most one column may have, or None."""
    columns = [name for name, column in leaves.items() if column.role == role]
    if len(columns) > 1:
        raise SchemaError(
            f"the columns {', '.join(map(repr, columns))} all have role {role!r}, but only one may have it. "
            f"Make the others plain."
        )
    return columns[0] if columns else None


def _check_roles(leaves: Mapping[str, Column], reward: str | None, value: str | None, qvest: str | None) -> None:
    if len(leaves) > _MAX_COLUMNS:
        raise SchemaError(
            f"{len(leaves)} columns are more than {_MAX_COLUMNS}. Put values of one dtype into one array."
        )
    if (value is not None or qvest is not None) and (reward is None or value is None):
        missing = "reward" if reward is None else "value"
        raise SchemaError(
            f"column {value or qvest!r} needs a {missing} column beside it: a return is made of rewards and values."
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
                f"column '{ragged}_length': a batch uses this name for the lengths of the ragged column {ragged!r}. "
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


def schema_from(schema: Any) -> Schema:
    """Return the argument if it is a schema, else the schema made from a mapping.

    Raises:
        WrongType: the argument is neither a schema nor a mapping.
        SchemaError: the mapping cannot be a schema.
    """
    if isinstance(schema, Schema):
        return schema
    if not isinstance(schema, Mapping):
        advice = "Make one: memoire.Schema({...}), or memoire.Schema.from_env(env)."
        raise WrongType("schema", "a memoire.Schema", type(schema).__name__, advice)
    return Schema(schema)


class RowSchema(Schema):
    """Columns of a row: a schema in which each column is plain or a state.

    Args:
        columns: As `Schema` takes them. Columns called obs and state, and those with role state, are states: their
            values must be finite, unless their `Column` allows NaN. All other columns are plain and not checked,
            whatever their names.

    Raises:
        SchemaError: names the column, its value, and what is allowed.
    """

    @checked_names()
    def __init__(self, columns: Mapping[str, Any]) -> None:
        super().__init__(columns)

    def _settle(self, leaves: dict[str, Column], tuples: set[str]) -> None:
        """Make every column that is not a state plain, then derive the attributes."""
        if not leaves:
            raise SchemaError("The schema of a row has no column. Declare at least one: {'obs': (np.float32, (4,))}.")
        super()._settle({name: _without_role(column) for name, column in leaves.items()}, tuples)

    def _check_states(self, leaves: Mapping[str, Column]) -> None:
        """Accept a row without states."""

    def _check_names(self, leaves: Mapping[str, Column], roots: Mapping[str, Any]) -> None:
        """Accept any name: a row never shares a batch with other columns."""


class NoColumns(RowSchema):
    """Schema without columns, for tables whose items have no column form."""

    def _settle(self, leaves: dict[str, Column], tuples: set[str]) -> None:
        if leaves:
            raise SchemaError(f"this schema has no columns, but got {', '.join(leaves)}. Leave them out.")
        Schema._settle(self, leaves, tuples)


def _without_role(column: Column) -> Column:
    return column if column.role in ("state", "plain") else Column(column.dtype, column.shape)


def row_schema_from(name: str, columns: Any) -> RowSchema:
    """Return the row schema of an argument: a `RowSchema`, a `Schema`, or a mapping from name to column.

    Args:
        name: Name of the argument, for errors.

    Raises:
        WrongType: the argument is none of these.
        SchemaError: the mapping cannot be a schema.
    """
    if isinstance(columns, RowSchema):
        return columns
    if isinstance(columns, Schema):
        return RowSchema.from_json(columns.to_json())
    if not isinstance(columns, Mapping):
        advice = "Give a mapping from name to column: {'obs': (np.float32, (4,))}."
        raise WrongType(name, "a mapping from name to column", type(columns).__name__, advice)
    return RowSchema(columns)
