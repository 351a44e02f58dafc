"""What an entry is: named columns, each with a dtype, a shape and a role.

Everything else is derived from a schema: how memory is laid out, what travels, what a batch holds. Two nodes agree on
a schema when their fingerprints are equal. A nested observation becomes one column for each leaf (`obs.image`,
`obs.gripper`), so that each is one contiguous array; structured dtypes are taken apart in the same way.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.arguments import is_name
from memoire.errors import EntryError, NotFinite, SchemaError
from memoire.frozen import says_instead
from memoire.limits import MiB
from memoire.suggestions import checked_names, hint, no_field

from .ragged import Ragged

ROLES = ("state", "reward", "value", "return", "plain")
_ROLE_OF_NAME = {"obs": "state", "state": "state", "reward": "reward", "value": "value", "qvest": "return"}
_RESERVED = frozenset({"discount", "importance", "ids", "steps", "age", "model_version", "weight", "init_w"})
_ENTRY_BYTES = 64 * MiB
_MOST_COLUMNS = 1024
_MOST_NAME = 200
_MOST_DIMENSIONS = 8
_MOST_DEPTH = 64
_MOST_AXIS = _ENTRY_BYTES  # also of an axis beside one of 0: an array takes no longer ones


@says_instead("Make another one: Column(..., NAME=...).")
@dataclass(frozen=True)
class Column:
    """One value of an entry.

    Args:
        dtype: Anything `np.dtype` takes: booleans, integers and floats of up to 8 bytes, or a structured dtype of
            them, which the schema takes apart. Stored little-endian.
        shape: The value's own shape, without a time or batch axis; () is a scalar, an axis of 0 is allowed. The first
            axis may be None: a *ragged* column, whose values are of any length along it. They are stored and sent
            without padding, and handed out padded with zeros, with their lengths. Not for reward, value and return.
        role: "state" (stacked, stored once, the next one comes with a sample), "reward", "value" (the critic's
            estimate, in the shape of the reward), "return" (computed by the memory when an episode closes, never
            given), or "plain".
        nan: "refuse" or "allow". Values of states must be finite, as rewards must, unless their column says "allow":
            where NaN or infinity mean something to who learns from them. Plain columns are not looked at.
    """

    dtype: np.dtype[Any]
    shape: tuple[Any, ...] = ()
    role: str = "plain"
    nan: str = "refuse"
    is_finite: bool = field(init=False, repr=False, compare=False)
    """Whether values that are not finite are refused."""

    @checked_names()
    def __init__(
        self, dtype: Any, shape: int | Sequence[int | None] = (), role: str = "plain", nan: str = "refuse"
    ) -> None:
        try:
            plain = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError, DeprecationWarning) as error:
            raise SchemaError(f"{dtype!r} is no dtype. Give one such as np.float32 or 'uint8'.") from error
        shape = _shape(shape)
        while plain.subdtype is not None:
            plain, inner = plain.subdtype
            shape += inner
        if role not in ROLES:
            raise SchemaError(f"{role!r} is no role of a column. The roles are {', '.join(ROLES)}{hint(role, ROLES)}.")
        object.__setattr__(self, "dtype", plain if plain.names else np.dtype(plain.newbyteorder("<").str))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "nan", _nan(nan, role))
        object.__setattr__(self, "is_finite", role != "plain" and nan == "refuse" and plain.kind == "f")

    @property
    def is_ragged(self) -> bool:
        """Whether the first axis is free."""
        return self.shape[:1] == (None,)

    @property
    def element(self) -> tuple[int, ...]:
        """The shape without a free axis: of what a ragged column has any number of."""
        return self.shape[1:] if self.is_ragged else self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of one value, of a ragged column those of one element."""
        return self.dtype.itemsize * prod(self.element)

    def __str__(self) -> str:
        return _text(self.dtype, self.shape)


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
    ragged: tuple[str, ...]
    """The columns whose first axis is free."""
    finite: tuple[str, ...]
    """The columns that an entry is given with and whose values must be finite."""
    entry_bytes: int
    """Bytes of one entry: the sum over all columns, with one element of each ragged one."""
    fingerprint: int
    """64 bits, equal for equal schemas in every process and version: blake2b of `to_json()`."""

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
            columns[name] = _columns_of_space(name, space, role, keep_float64)
        if _nan(nan, "state") == "allow":
            columns["obs"] = _allowing(columns["obs"])
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
            leaves[name] = _column(name, partial(_read_column, dtype, shape, role, nan))
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
        _collect(self._trees[root], value, found)
        return found

    def nest(self, root: str, columns: Mapping[str, Any]) -> Any:
        """The value of a declared name out of its leaves: what `flatten` took apart, as dicts and tuples."""
        self._check_root(root)
        return _build(self._trees[root], columns)

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
            f"{name}: {column}" + ("" if column.role == "plain" else f" ({', '.join(_said(column))})")
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
        _check_roles(leaves, reward, value, qvest)
        self._columns = leaves
        self._trees = _trees(leaves, tuples)
        self.names = tuple(leaves)
        self.entry_names = tuple(name for name in leaves if name != qvest)
        self.states = tuple(name for name, column in leaves.items() if column.role == "state")
        self.ragged = tuple(name for name, column in leaves.items() if column.is_ragged)
        self.finite = tuple(name for name, column in leaves.items() if column.is_finite and name != qvest)
        self.roots = tuple(self._trees)
        self.reward, self.value, self.qvest = reward, value, qvest
        self.entry_bytes = sum(column.nbytes for column in leaves.values())
        if self.entry_bytes > _ENTRY_BYTES:
            largest = max(leaves, key=lambda name: leaves[name].nbytes)
            raise SchemaError(
                f"an entry has {self.entry_bytes} bytes, more than {_ENTRY_BYTES}. The largest column is {largest!r}, "
                f"{leaves[largest]}: store it smaller, or elsewhere."
            )
        rows = [[name, column.dtype.str, list(column.shape), *_said(column)] for name, column in leaves.items()]
        self._json = json.dumps({"columns": rows, "tuples": sorted(tuples)}, sort_keys=True, separators=(",", ":"))
        self.fingerprint = int.from_bytes(hashlib.blake2b(self._json.encode(), digest_size=8).digest(), "little")

    def _check_root(self, root: str) -> None:
        if root not in self._trees:
            raise SchemaError(f"{root!r} is not in the schema, which has {', '.join(self.roots)}.")


def exact(name: str, column: Column, value: Any, axes: tuple[int, ...] = ()) -> Any:
    """`value` as a C-contiguous array [*axes, *F] of exactly the column's dtype; itself where it is one already.

    Numbers become others of their kind, or of a wider kind, if they fit; shapes must be right as they are. Of a ragged
    column `axes` is () for one value, an array [its length, *F], or (n,) for several, which come back as `Ragged`: they
    may be one, a sequence of n arrays, or an array [n, L, *F]. Raises EntryError.
    """
    if column.is_ragged:
        return _exact_values(name, column, value, *axes) if axes else _exact_value(name, column, value)
    return _exact(name, column.dtype, axes + column.shape, axes + column.shape, value)


def _exact(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], told: tuple[Any, ...], value: Any) -> NDArray[Any]:
    """`value` in this dtype and shape; errors speak of the shape `told`."""
    if (
        type(value) is np.ndarray
        and value.dtype.num == dtype.num
        and value.shape == shape
        and value.flags.c_contiguous
        and value.dtype.isnative
    ):
        return value
    array = _array(name, _text(dtype, told), value)
    made = _cast(array, dtype) if array.shape == shape else None
    if made is None:
        is_beyond = array.shape == shape and array.dtype.kind in ("f" if dtype.kind == "f" else "iu")
        expected = _text(dtype, told)
        received = form(value) if isinstance(value, str | int | float | None) else _text(array.dtype, array.shape)
        raise EntryError(name, *_beyond(expected, received, array, dtype) if is_beyond else (expected, received))
    return made


def form(value: Any) -> str:
    """What a value is, in an error: dtype and shape of an array; anything else as it is, or its type."""
    if isinstance(value, int | float | str | None):
        return repr(value)[:80]
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__}" if array.dtype == object else _text(array.dtype, array.shape)


def _beyond(expected: str, received: str, array: NDArray[Any], dtype: np.dtype[Any]) -> tuple[str, str]:
    """What a dtype holds, and the first value of an array that it does not hold, with its place."""
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    wrong = (
        np.isfinite(array) & (abs(array) > limits.max)
        if dtype.kind == "f"
        else (array < limits.min) | (array > limits.max)
    )
    place = [int(axis) for axis in np.argwhere(wrong)[0]] if wrong.any() else []
    found = f"{received} with {array[tuple(place)]} at {place}" if array.ndim else received
    low, high = (f"{limits.min:.9g}", f"{limits.max:.9g}") if dtype.kind == "f" else (limits.min, limits.max)
    return f"{expected} from {low} to {high}", found


def _array(name: str, expected: str, value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise EntryError(name, expected, f"a {type(value).__name__} that is no array: {error}") from error


def _exact_value(name: str, column: Column, value: Any) -> NDArray[Any]:
    """One value of a ragged column: [its length, *F]. Text is UTF-8 where that is what the column can hold."""
    if isinstance(value, str | bytes) and column.dtype == np.uint8 and not column.element:
        value = np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    array = value if type(value) is np.ndarray else _array(name, str(column), value)
    if array.shape == (0,):  # an empty list says nothing of what it has none of
        return np.empty((0, *column.element), column.dtype)
    length = array.shape[0] if array.ndim else 0
    if array.ndim and max(length, length * column.nbytes) > _ENTRY_BYTES:
        raise EntryError(name, f"{column} of at most {_ENTRY_BYTES} bytes and elements", f"{length} elements")
    if array.shape != (length, *column.element):
        raise EntryError(name, str(column), repr(value)[:80] if array.ndim == 0 else _text(array.dtype, array.shape))
    return _exact(name, column.dtype, array.shape, column.shape, array)


def _exact_values(name: str, column: Column, values: Any, count: int) -> Ragged:
    """Values of a ragged column."""
    if not isinstance(values, Ragged):
        if not isinstance(values, list | tuple):
            values = _array(name, f"{count} times {column}", values)
            if values.ndim == 0:
                raise EntryError(name, f"{count} times {column}", repr(values.item())[:80])
        values = Ragged.of([_exact_value(name, column, value) for value in values], column.dtype, column.element)
    made = _exact(name, column.dtype, (len(values.values), *column.element), column.shape, values.values)
    if len(values) != count:
        raise EntryError(name, f"{count} times {column}", f"{len(values)} values")
    if (bad := values.lengths[values.lengths * max(1, column.nbytes) > _ENTRY_BYTES]).size:
        raise EntryError(name, f"{column} of at most {_ENTRY_BYTES} bytes and elements", f"{bad[0]} elements")
    return values if made is values.values else Ragged(made, values.lengths)


def _cast(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """An array in another dtype, or None where its values have no place in it. Floats may be rounded."""
    source = array.dtype.kind
    if source not in "biuf":
        return None
    if source in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            return None
    elif not np.can_cast(array.dtype, dtype, "same_kind"):
        return None
    with np.errstate(over="ignore"):
        made = np.asarray(array, dtype, order="C")
    if source == "f" and made.itemsize < array.itemsize and not (np.isfinite(array) == np.isfinite(made)).all():
        return None
    return made if made.dtype.num == dtype.num else made.view(dtype)


def _text(dtype: np.dtype[Any], shape: tuple[Any, ...]) -> str:
    axes = ", ".join("any" if axis is None else str(axis) for axis in shape)
    return f"{dtype}[{axes}]" if shape else f"{dtype}"


def _said(column: Column) -> list[str]:
    """A column's role, and whether it allows NaN: only then, so that other schemas are what they always were."""
    return [column.role, "allow"] if column.nan == "allow" else [column.role]


def _read_column(dtype: str, shape: tuple[Any, ...], role: str, nan: tuple[str, ...]) -> Column:
    """What `Schema.to_json` says of a column."""
    if nan not in ((), ("allow",)):
        raise SchemaError(f"{nan!r} stands behind the role, where only 'allow' may.")
    return Column(dtype, shape, role, *nan)


def _nan(nan: Any, role: str) -> str:
    if nan not in ("refuse", "allow"):
        raise SchemaError(f"nan={nan!r} is not possible. Give 'refuse' or 'allow'.")
    if nan == "allow" and role != "state":
        raise SchemaError(
            f"nan='allow' is for states, not for role {role!r}: values of plain columns are never looked at, and "
            f"priorities and returns cannot be made of what is not finite."
        )
    return str(nan)


def _allowing(template: Any) -> Any:
    """Columns of a space, nested as they are, that allow NaN."""
    if isinstance(template, Mapping):
        return {name: _allowing(part) for name, part in template.items()}
    if isinstance(template, tuple):
        return tuple(_allowing(part) for part in template)
    return Column(template.dtype, template.shape, template.role, "allow")


def is_finite(value: Any) -> bool:
    """Whether all numbers of an exact value are finite."""
    return _core.is_finite(_numbers(value))


def _numbers(value: Any) -> NDArray[Any]:
    """The numbers of an exact value, which may be an array, a NumPy scalar or `Ragged`."""
    return value.values if isinstance(value, Ragged) else np.asarray(value)


def finite(name: str, column: Column, value: Any) -> Any:
    """An exact value itself. Raises NotFinite where it is not finite and its column does not allow that."""
    if column.is_finite and not is_finite(value):
        numbers = _numbers(value)
        found = numbers[~np.isfinite(numbers)].flat[0]
        raise NotFinite(name, f"finite {column}", f"{found}", column.role == "state")
    return value


def _shape(shape: Any) -> tuple[Any, ...]:
    axes = (shape,) if isinstance(shape, int | np.integer) else shape
    if isinstance(axes, tuple | list) and any(isinstance(axis, int) and abs(axis) > _MOST_AXIS for axis in axes):
        raise SchemaError(f"a shape has an axis of more than {_MOST_AXIS}. Store the value smaller, or elsewhere.")
    if not _is_shape(axes):
        raise SchemaError(
            f"{shape!r} is no shape. Give whole numbers, 0 or more: () for a scalar, (84, 84) for an image. The first "
            f"may be None: any length."
        )
    return tuple(None if axis is None else int(axis) for axis in axes)


def _is_shape(axes: Any) -> bool:
    return isinstance(axes, tuple | list) and all(
        (axis is None and i == 0) or (isinstance(axis, int | np.integer) and not isinstance(axis, bool) and axis >= 0)
        for i, axis in enumerate(axes)
    )


def _check_name(name: Any, within: str) -> None:
    where = f" (in {within!r})" if within else ""
    if not isinstance(name, str):
        raise SchemaError(f"column names are strings, got {name!r}{where}.")
    if "." in name or not is_name(name, _MOST_NAME):
        raise SchemaError(
            f"column {name[:_MOST_NAME]!r}{where}: a name is 1 to {_MOST_NAME} printable characters without a dot "
            f"(dots separate nested names). Rename it."
        )


def _column(name: str, make: Any) -> Column:
    """What `make()` returns; an error of it gets the column's name."""
    try:
        column: Column = make()
    except SchemaError as error:
        raise SchemaError(f"column {name!r}: {error}") from error
    return column


def _take_apart(name: str, template: Any, role: str, leaves: dict[str, Column], tuples: set[str]) -> None:
    """Put the column, or the columns of every leaf, of `template` into `leaves`."""
    if isinstance(template, Column):
        if template.dtype.names is None:
            leaves[name] = template
            return
        role = template.role
        parts: Mapping[Any, Any] = _fields(template)
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


def _is_shape_or_int(value: Any) -> bool:
    return _is_shape(value) or (isinstance(value, int | np.integer) and not isinstance(value, bool))


def _fields(column: Column) -> dict[str, Column]:
    """A structured column taken apart; axes around the structure stay in front."""
    assert column.dtype.fields is not None
    return {
        name: Column(field[0], column.shape, column.role, column.nan) for name, field in column.dtype.fields.items()
    }


def _template(name: str, template: Any, role: str) -> Any:
    """A `Column`, or a nesting of them, for anything a schema accepts that is not one yet."""
    if isinstance(template, np.ndarray | np.generic):
        return _column(name, lambda: Column(template.dtype, template.shape, role))
    if hasattr(template, "contains") and hasattr(template, "sample"):
        return _columns_of_space(name, template, role, keep_float64=True)
    if isinstance(template, tuple):
        return _column(name, lambda: Column(template[0], template[1], role))
    if isinstance(template, str | type | np.dtype):
        return _column(name, lambda: Column(template, (), role))
    raise SchemaError(
        f"column {name!r} was declared as {template!r}, a value of type {type(template).__name__}. Give a Column, a "
        f"dtype, (dtype, shape) such as (np.float32, (4,)), an array, a Gymnasium space, or a dict or tuple of these."
    )


def _columns_of_space(name: str, space: Any, role: str, keep_float64: bool) -> Any:
    """The column of a Gymnasium space, nested as the space is; known by its looks, so that Gymnasium is not needed."""
    kinds = {kind.__name__ for kind in type(space).__mro__}
    parts = None if "OneOf" in kinds else getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        return {key: _columns_of_space(f"{name}.{key}", part, role, keep_float64) for key, part in parts.items()}
    if isinstance(parts, tuple | list):
        return tuple(_columns_of_space(f"{name}.{i}", part, role, keep_float64) for i, part in enumerate(parts))
    if "Graph" in kinds:
        return _columns_of_graph(name, space, role, keep_float64)
    if "Sequence" in kinds:
        return _columns_of_sequence(name, space, role, keep_float64)
    if "Text" in kinds:
        return _column(name, lambda: Column(np.uint8, (None,), role))
    dtype, shape = getattr(space, "dtype", None), getattr(space, "shape", None)
    if dtype is None or shape is None or np.dtype(dtype).kind not in "biuf":
        raise SchemaError(
            f"column {name!r}: the space {space} has no fixed shape of numbers. Box, Discrete, MultiDiscrete, "
            f"MultiBinary, Sequence, Graph, Text, Dict and Tuple can be stored; wrap the environment to give these."
        )
    if dtype == np.float64 and not keep_float64:
        dtype = np.float32
    return _column(name, lambda: Column(dtype, shape, role))


def _columns_of_sequence(name: str, space: Any, role: str, keep_float64: bool) -> Any:
    """A ragged column for a Sequence of arrays of one shape."""
    inner = _columns_of_space(name, space.feature_space, role, keep_float64)
    if not isinstance(inner, Column) or inner.is_ragged:
        raise SchemaError(
            f"column {name!r}: the space {space} is a sequence of something that has no fixed shape. Sequences of Box, "
            f"Discrete, MultiDiscrete and MultiBinary can be stored; wrap the environment to give such."
        )
    return Column(inner.dtype, (None, *inner.shape), role)


def _columns_of_graph(name: str, space: Any, role: str, keep_float64: bool) -> dict[str, Any]:
    """Ragged columns nodes, and edges and edge_links where the space has them: the fields of a GraphInstance."""
    parts = {"nodes": space.node_space} | ({} if space.edge_space is None else {"edges": space.edge_space})
    found = {part: _columns_of_space(f"{name}.{part}", inner, role, keep_float64) for part, inner in parts.items()}
    columns = {part: Column(inner.dtype, (None, *inner.shape), role) for part, inner in found.items()}
    if space.edge_space is not None:
        columns["edge_links"] = Column(np.int32, (None, 2), role)
    return columns


def _check_column(name: str, column: Column) -> None:
    if name.count(".") >= _MOST_DEPTH:
        raise SchemaError(
            f"column {name[:_MOST_NAME]!r}... lies {name.count('.')} levels deep, more than {_MOST_DEPTH}. Nest less."
        )
    if column.dtype.kind not in "biuf" or column.dtype.itemsize > 8:
        raise SchemaError(
            f"column {name!r} has dtype {column.dtype}, but only booleans, integers and floats of up to 8 bytes can be "
            f"stored. Encode the value as numbers, or leave the column out."
        )
    if column.is_ragged and column.nbytes == 0:
        raise SchemaError(f"column {name!r} is ragged, but its elements have no bytes: {column}. Leave it out.")
    if len(column.shape) > _MOST_DIMENSIONS:
        raise SchemaError(f"column {name!r} has {len(column.shape)} axes, more than {_MOST_DIMENSIONS}. Reshape it.")


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
    if len(leaves) > _MOST_COLUMNS:
        raise SchemaError(
            f"{len(leaves)} columns are more than {_MOST_COLUMNS}. Put values of one dtype into one array."
        )
    if not any(column.role == "state" for column in leaves.values()):
        raise SchemaError(
            f"no column is a state (there are {', '.join(leaves) or 'none'}). Call one 'obs' or 'state', or declare "
            f"it as Column(dtype, shape, 'state')."
        )
    if reward != "reward" and "reward" in leaves:
        raise SchemaError(
            "column 'reward' is not the reward. Give it role 'reward', or rename it: a batch's key is that."
        )
    if (value is not None or qvest is not None) and (reward is None or value is None):
        missing = "reward" if reward is None else "value"
        raise SchemaError(
            f"column {value or qvest!r} needs a {missing} column beside it: returns are made of rewards and values."
        )
    for ragged in (name for name, column in leaves.items() if column.is_ragged):
        if f"{ragged}_length" in leaves:
            raise SchemaError(
                f"column '{ragged}_length': a batch has the lengths of the ragged column {ragged!r} under this name. "
                f"Choose another."
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


def _trees(leaves: Mapping[str, Column], tuples: set[str]) -> dict[str, Any]:
    """For each root its nesting: a column's name, or a dict or tuple of these."""
    nested: dict[str, Any] = {}
    for name in leaves:
        *path, last = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise SchemaError(f"column {name!r} lies within another column. Rename one of them.")
        if last in node:
            raise SchemaError(f"column {name!r} holds other columns. Rename one of them.")
        node[last] = name
    for root in nested:
        if root in _RESERVED or root.startswith("next_"):
            raise SchemaError(f"column {root!r}: a batch uses this name itself. Choose another, such as 'my_{root}'.")
    for nest in tuples:
        if not any(name.startswith(nest + ".") for name in leaves):
            raise SchemaError(f"{nest!r} is said to be a tuple, but no column lies within it.")
    return {root: _with_tuples(root, node, tuples) for root, node in nested.items()}


def _with_tuples(path: str, node: Any, tuples: set[str]) -> Any:
    if not isinstance(node, dict):
        return node
    parts = {key: _with_tuples(f"{path}.{key}", part, tuples) for key, part in node.items()}
    if path not in tuples:
        return parts
    if list(parts) != [str(i) for i in range(len(parts))]:
        raise SchemaError(f"column {path!r} is a tuple, but its parts are called {', '.join(parts)}.")
    return tuple(parts.values())


def _collect(tree: Any, value: Any, found: list[Any]) -> None:
    if isinstance(tree, str):
        found.append(value)
        return
    keys: Any = tree if isinstance(tree, dict) else range(len(tree))
    for key in keys:
        try:
            # A graph is a named tuple, with None where it has no edges.
            is_named = isinstance(value, tuple) and isinstance(key, str) and hasattr(value, key)
            part = value[key] if not is_named else () if getattr(value, key) is None else getattr(value, key)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            kind = f"a {type(value).__name__}"
            raise SchemaError(
                f"a nested value should have {key!r} (for {_first(tree[key])!r}), but {kind} without it came."
            ) from error
        _collect(tree[key], part, found)


def _first(tree: Any) -> str:
    while not isinstance(tree, str):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def _build(tree: Any, columns: Mapping[str, Any]) -> Any:
    if isinstance(tree, str):
        return columns[tree]
    if isinstance(tree, tuple):
        return tuple(_build(part, columns) for part in tree)
    return {key: _build(part, columns) for key, part in tree.items()}
