"""Columns: dtype, shape and role of one value of an entry, and the checks of a schema on them.

Columns are nested: dicts and tuples of columns are split into leaves such as `obs.image`, and put together again.

`columns_of_space` recognizes a Gymnasium space by its class name and attributes, without importing Gymnasium.

`Ragged` holds values of different lengths in one array: those of a ragged column for several entries.

A ragged column's first axis has any length: a set of points, the tokens of a sentence, the nodes of a graph. Ragged
values are stored one after the other, without padding; a batch has them padded with zeros, with their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from memoire.arguments import checked_names, explain_assignment_error, hint
from memoire.errors import ParameterError, SchemaError

ROLES = ("state", "reward", "value", "return", "plain")
ENTRY_BYTES = 64 << 20
"""Largest number of bytes of an entry, and of a value of a ragged column."""
_MAX_AXIS = ENTRY_BYTES  # no array has a longer axis, even beside an axis of 0


def columns_of_space(name: str, space: Any, role: str, keep_float64: bool) -> Any:
    """Return the column of a Gymnasium space, nested as the space is."""
    kinds = {kind.__name__ for kind in type(space).__mro__}
    parts = None if "OneOf" in kinds else getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        _check_keys(name, parts)
        return {key: columns_of_space(f"{name}.{key}", part, role, keep_float64) for key, part in parts.items()}
    if isinstance(parts, tuple | list):
        return tuple(columns_of_space(f"{name}.{i}", part, role, keep_float64) for i, part in enumerate(parts))
    if "Graph" in kinds:
        return _columns_of_graph(name, space, role, keep_float64)
    if "Sequence" in kinds:
        return _columns_of_sequence(name, space, role, keep_float64)
    dtype, shape = getattr(space, "dtype", None), getattr(space, "shape", None)
    if "Text" in kinds or (dtype is not None and np.dtype(dtype).kind == "U" and not shape):  # MiniGrid's missions
        return with_column_in_error(name, lambda: Column(np.uint8, (None,), role))
    if dtype is None or shape is None or np.dtype(dtype).kind not in "biuf":
        raise SchemaError(
            f"column {name!r}: the space {space} has no fixed shape of numbers. Box, Discrete, MultiDiscrete, "
            f"MultiBinary, Sequence, Graph, Text, Dict and Tuple can be stored; wrap the environment to return these."
        )
    if dtype == np.float64 and not keep_float64:
        dtype = np.float32
    return with_column_in_error(name, lambda: Column(dtype, shape, role))


_RENAMED = "str(key).replace('.', '_')"
_RENAMING = {
    "obs": (
        f"TransformObservation(env, lambda obs: {{{_RENAMED}: part for key, part in obs.items()}}, "
        f"gymnasium.spaces.Dict({{{_RENAMED}: part for key, part in env.observation_space.items()}}))"
    ),
    "action": (
        f"TransformAction(env, lambda action, keys=tuple(env.action_space): "
        f"{{key: action[{_RENAMED}] for key in keys}}, "
        f"gymnasium.spaces.Dict({{{_RENAMED}: part for key, part in env.action_space.items()}}))"
    ),
}


def _check_keys(name: str, parts: Mapping[Any, Any]) -> None:
    """Raise SchemaError if a key of a Dict space cannot be a column's name; the message has code that renames it."""
    for key in parts:
        if not isinstance(key, str) or "." in key:
            line = f": env = gymnasium.wrappers.{_RENAMING[name]}" if name in _RENAMING else ""
            raise SchemaError(
                f"column {name!r}: the Dict space has the key {key!r}, but names of columns are text without dots. "
                f"Rename its keys{line}"
            )


def _columns_of_sequence(name: str, space: Any, role: str, keep_float64: bool) -> Any:
    inner = columns_of_space(name, space.feature_space, role, keep_float64)
    if not isinstance(inner, Column) or inner.is_ragged:
        raise SchemaError(
            f"column {name!r}: the space {space} is a sequence of elements without a fixed shape. Sequences of Box, "
            f"Discrete, MultiDiscrete and MultiBinary can be stored; wrap the environment to return these."
        )
    return Column(inner.dtype, (None, *inner.shape), role)


def _columns_of_graph(name: str, space: Any, role: str, keep_float64: bool) -> dict[str, Any]:
    """Return ragged columns for the fields of a GraphInstance: nodes, and edges and edge_links if it has edges."""
    parts = {"nodes": space.node_space} | ({} if space.edge_space is None else {"edges": space.edge_space})
    plain = {part: columns_of_space(f"{name}.{part}", inner, role, keep_float64) for part, inner in parts.items()}
    columns = {part: _ragged(f"{name}.{part}", inner, parts[part]) for part, inner in plain.items()}
    if space.edge_space is not None:
        columns["edge_links"] = Column(np.int32, (None, 2), role)
    return columns


def _ragged(name: str, columns: Any, space: Any) -> Any:
    """Return columns of nodes or edges as ragged columns, nested as they are."""
    if isinstance(columns, Mapping):
        return {key: _ragged(f"{name}.{key}", part, space) for key, part in columns.items()}
    if isinstance(columns, tuple):
        return tuple(_ragged(f"{name}.{place}", part, space) for place, part in enumerate(columns))
    if columns.is_ragged:
        raise SchemaError(
            f"column {name!r}: nodes or edges of the space {space} have no fixed shape. Those of Box, Discrete, "
            f"MultiDiscrete, MultiBinary, and Dict and Tuple of these can be stored; wrap the environment to fit."
        )
    return Column(columns.dtype, (None, *columns.shape), columns.role)


def allowing_nan(template: Any) -> Any:
    """Return columns of a space, nested as they are, that allow NaN."""
    if isinstance(template, Mapping):
        return {name: allowing_nan(part) for name, part in template.items()}
    if isinstance(template, tuple):
        return tuple(allowing_nan(part) for part in template)
    return Column(template.dtype, template.shape, template.role, "allow")


def tree_of(names: Iterable[str]) -> dict[str, Any]:
    """Return the nesting of each root: a column's name, or a dict of these.

    Raises:
        SchemaError: a column contains another one.
    """
    nested: dict[str, Any] = {}
    for name in names:
        *path, last = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise SchemaError(f"column {name!r} is inside another column. Rename one of them.")
        if last in node:
            raise SchemaError(f"column {name!r} contains other columns. Rename one of them.")
        node[last] = name
    return nested


def with_tuples(tree: Mapping[str, Any], names: Collection[str], tuples: Collection[str]) -> dict[str, Any]:
    """Return the nesting of these columns with tuples in place of the dicts at the paths `tuples`.

    Raises:
        SchemaError: a path does not exist, or its parts are not numbered.
    """
    for nest in tuples:
        if not any(name.startswith(nest + ".") for name in names):
            raise SchemaError(f"{nest!r} is listed as a tuple, but no column is inside it.")
    return {root: _with_tuples(root, node, tuples) for root, node in tree.items()}


def _with_tuples(path: str, node: Any, tuples: Collection[str]) -> Any:
    if not isinstance(node, dict):
        return node
    parts = {key: _with_tuples(f"{path}.{key}", part, tuples) for key, part in node.items()}
    if path not in tuples:
        return parts
    if list(parts) != [str(i) for i in range(len(parts))]:
        raise SchemaError(f"column {path!r} is a tuple, but its parts are named {', '.join(parts)}.")
    return tuple(parts.values())


def collect(tree: Any, value: Any, leaves: list[Any]) -> None:
    """Append the leaves of a value to `found`. Raises SchemaError if it is not nested like the tree."""
    if isinstance(tree, str):
        leaves.append(value)
        return
    if isinstance(tree, dict) and isinstance(value, tuple) and value and all(_is_named(each, tree) for each in value):
        rows: list[list[Any]] = [[] for _ in value]  # a vector environment returns one graph per member
        for row, each in zip(rows, value, strict=True):
            collect(tree, each, row)
        leaves += [list(column) for column in zip(*rows, strict=True)]
        return
    keys: Any = tree if isinstance(tree, dict) else range(len(tree))
    is_named = _is_named(value, tree)
    for key in keys:
        if is_named and getattr(value, key) is None:  # a graph without edges
            leaves += [()] * _leaves(tree[key])
            continue
        try:
            part = getattr(value, key) if is_named else value[key]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            kind = f"a {type(value).__name__}"
            raise SchemaError(
                f"a nested value needs {key!r} (for {_first(tree[key])!r}), but got {kind} without {key!r}."
            ) from error
        collect(tree[key], part, leaves)


def _is_named(value: Any, tree: Any) -> bool:
    """Return True if a value is a graph: a named tuple with these parts."""
    return isinstance(value, tuple) and isinstance(tree, dict) and all(hasattr(value, key) for key in tree)


def _leaves(tree: Any) -> int:
    parts = tree.values() if isinstance(tree, dict) else tree
    return 1 if isinstance(tree, str) else sum(map(_leaves, parts))


def _first(tree: Any) -> str:
    while not isinstance(tree, str):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def build(tree: Any, columns: Mapping[str, Any]) -> Any:
    """Return a nested value from its leaves by name: the inverse of `collect`."""
    if isinstance(tree, str):
        return columns[tree]
    if isinstance(tree, tuple):
        return tuple(build(part, columns) for part in tree)
    return {key: build(part, columns) for key, part in tree.items()}


@explain_assignment_error("Make another one: Column(..., NAME=...).")
@dataclass(frozen=True)
class Column:
    """Declaration of one value of an entry.

    Example:
        frames = memoire.Column(np.uint8, (84, 84), "state")
        schema = memoire.Schema({"obs": frames, "action": np.int64, "reward": np.float32})

    Args:
        dtype: Argument of `np.dtype`: booleans, integers and floats of up to 8 bytes, or a structured dtype of such
            fields, which the schema splits into columns. Stored little-endian.
        shape: The value's own shape, without a time or batch axis; () is a scalar, an axis of 0 is allowed. The first
            axis may be None for a *ragged* column, whose values have any length along it. Values are stored and sent
            without padding; batches have them padded with zeros, with their lengths. Not for reward, value and return.
        role: "state" (stacked, stored once, the next state is part of a sample), "reward", "value" (the critic's
            estimate, in the shape of the reward), "return" (computed by the memory when an episode closes, never
            passed), or "plain".
        nan: "refuse" or "allow". Values of states and rewards must be finite; a state's column may be "allow" if NaN
            or infinity mean something to the learner. Plain columns are not checked.
    """

    dtype: np.dtype[Any]
    shape: tuple[Any, ...] = ()
    role: str = "plain"
    nan: str = "refuse"
    is_finite: bool = field(init=False, repr=False, compare=False)
    """True if values that are not finite are rejected."""
    is_ragged: bool = field(init=False, repr=False, compare=False)
    """True if the first axis has any length."""
    element: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Shape without the free axis: the shape of one element of a ragged value."""
    nbytes: int = field(init=False, repr=False, compare=False)
    """Bytes of one value; for a ragged column, of one element."""

    @checked_names()
    def __init__(
        self, dtype: Any, shape: int | Sequence[int | None] = (), role: str = "plain", nan: str = "refuse"
    ) -> None:
        try:
            plain = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError, DeprecationWarning) as error:
            raise SchemaError(f"{dtype!r} is not a dtype. Give one such as np.float32 or 'uint8'.") from error
        axes = _axes(shape)
        while plain.subdtype is not None:
            plain, inner = plain.subdtype
            axes += inner
        if role not in ROLES:
            raise SchemaError(
                f"{role!r} is not a role of a column. The roles are {', '.join(ROLES)}{hint(role, ROLES)}."
            )
        object.__setattr__(self, "dtype", plain if plain.names else np.dtype(plain.newbyteorder("<").str))
        object.__setattr__(self, "shape", axes)
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "nan", checked_nan(nan, role))
        is_ragged = axes[:1] == (None,)
        element = axes[1:] if is_ragged else axes
        object.__setattr__(self, "is_finite", role != "plain" and nan == "refuse" and plain.kind == "f")
        object.__setattr__(self, "is_ragged", is_ragged)
        object.__setattr__(self, "element", element)
        object.__setattr__(self, "nbytes", self.dtype.itemsize * prod(element))

    def __str__(self) -> str:
        return dtype_text(self.dtype, self.shape)


def dtype_text(dtype: np.dtype[Any], shape: tuple[Any, ...]) -> str:
    """Return a dtype and a shape as errors show them: float32[84, 84], uint8[any], int64."""
    axes = ", ".join("any" if axis is None else str(axis) for axis in shape)
    return f"{dtype}[{axes}]" if shape else f"{dtype}"


def checked_nan(nan: Any, role: str) -> str:
    """Return `nan`. Raises SchemaError if a column of this role cannot have it."""
    if nan not in ("refuse", "allow"):
        raise SchemaError(f"nan={nan!r} is unknown. Set 'refuse' or 'allow'.")
    if nan == "allow" and role != "state":
        raise SchemaError(
            f"nan='allow' is for states, not for role {role!r}: values of plain columns are never checked, and "
            f"priorities and returns cannot be computed from NaN or infinity."
        )
    return str(nan)


def _axes(shape: Any) -> tuple[Any, ...]:
    axes = (shape,) if isinstance(shape, int | np.integer) else shape
    if isinstance(axes, tuple | list) and any(isinstance(axis, int) and abs(axis) > _MAX_AXIS for axis in axes):
        raise SchemaError(f"a shape has an axis of more than {_MAX_AXIS}. Store the value in smaller parts.")
    if not is_shape(axes):
        raise SchemaError(
            f"{shape!r} is not a shape. Give whole numbers of at least 0: () for a scalar, (84, 84) for an image. The "
            f"first may be None: any length."
        )
    return tuple(None if axis is None else int(axis) for axis in axes)


def is_shape(axes: Any) -> bool:
    """Return True for axes of a column: whole numbers, of which the first may be None."""
    return isinstance(axes, tuple | list) and all(
        (axis is None and i == 0) or (isinstance(axis, int | np.integer) and not isinstance(axis, bool) and axis >= 0)
        for i, axis in enumerate(axes)
    )


def role_and_nan(column: Column) -> list[str]:
    """Return [role], or [role, "allow"] if NaN is allowed; else JSON and fingerprint equal those of older versions."""
    return [column.role, "allow"] if column.nan == "allow" else [column.role]


def read_column(dtype: str, shape: tuple[Any, ...], role: str, nan: tuple[str, ...]) -> Column:
    """Return the column of an item of `Schema.to_json`."""
    if nan not in ((), ("allow",)):
        raise SchemaError(f"The JSON form of a column has {nan!r} after the role; only 'allow' may stand there.")
    return Column(dtype, shape, role, *nan)


def fields_of(column: Column) -> dict[str, Column]:
    """Split a structured column into its fields; axes around the structure stay in front."""
    assert column.dtype.fields is not None
    return {
        name: Column(field[0], column.shape, column.role, column.nan) for name, field in column.dtype.fields.items()
    }


def with_column_in_error(name: str, make: Callable[[], Column]) -> Column:
    """Return the result of `make()`; its SchemaError gets the column's name."""
    try:
        return make()
    except SchemaError as error:
        raise SchemaError(f"column {name!r}: {error}") from error


class Ragged:
    """Immutable sequence of n arrays [its length, *F]: `ragged[i]` is one array, without a copy.

    Example:
        words = memoire.Ragged(np.array([7, 8, 9]), np.array([1, 2]))
        print(words[1])  # [8 9]

    Args:
        values: All elements, one value after the other: [sum of lengths, *F].
        lengths: Number of elements of each value: int64 [n].

    Raises:
        ParameterError: the lengths do not add up to the elements.
    """

    __slots__ = ("_ends", "lengths", "values")

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    def __init__(self, values: NDArray[Any], lengths: Any) -> None:
        self.values = values
        self.lengths = np.ascontiguousarray(lengths, np.int64)
        self._ends = np.cumsum(self.lengths)
        total = int(self._ends[-1]) if len(self._ends) else 0
        if self.lengths.ndim != 1 or (self.lengths < 0).any() or values.ndim < 1 or total != len(values):
            received = f"{len(self.lengths)} lengths that add up to {total}, for {np.shape(values)}"
            expected = "one for each value, at least 0, and add up to the number of elements"
            raise ParameterError("lengths", received, expected)

    @classmethod
    def from_arrays(cls, values: Iterable[NDArray[Any]], dtype: Any = None, element: tuple[int, ...] = ()) -> Ragged:
        """Copy arrays [L, *F], each of its own L; without arrays, `dtype` and `element` (F) define the result."""
        parts = list(values)
        lengths = [len(part) for part in parts]
        return cls(np.concatenate([np.empty((0, *element), dtype), *parts], dtype=dtype), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int | np.integer) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any]) -> Ragged: ...
    def __getitem__(self, index: Any) -> Any:
        """Return one value [its length, *F], or the values of a slice, of integers or of a mask [n] as `Ragged`."""
        if isinstance(index, int | np.integer):
            end = int(self._ends[index])
            return self.values[end - int(self.lengths[index]) : end]
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            ends = np.concatenate([[0], self._ends])
            return Ragged(self.values[ends[start] : ends[max(start, stop)]], self.lengths[start:stop])
        chosen = np.arange(len(self))[index]
        return Ragged.from_arrays((self[i] for i in chosen), self.values.dtype, self.values.shape[1:])

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.values.shape[1:]))
        return f"Ragged({len(self)} values of {self.values.dtype}[any{', ' * bool(shape)}{shape}])"

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.values.nbytes

    def padded(self, longest: int | None = None) -> NDArray[Any]:
        """Return the N values as one array, padded with zeros: [N, L, *F].

        L is `longest`; None is the longest value's length, at least 1.
        """
        width = max(1, int(self.lengths.max(initial=0))) if longest is None else longest
        array = np.zeros((len(self), width, *self.values.shape[1:]), self.values.dtype)
        array[np.arange(width) < self.lengths[:, None]] = self.values
        return array
