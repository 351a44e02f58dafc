"""One value of an entry: its dtype, its shape, its role, and what a schema refuses of these.

Columns are nested: dicts and tuples of them are taken apart into leaves such as `obs.image` and put together.

`columns_of_space` knows a Gymnasium space by its looks, so that Gymnasium is not needed.

Values of different lengths as one array: what a ragged column has of several entries.

A ragged column's first axis is free: a set of points, the tokens of a sentence, the nodes of a graph. Its values are
kept one after the other, without padding; a batch hands them out padded with zeros, with their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from memoire.arguments import checked_names, hint, says_instead
from memoire.errors import ParameterError, SchemaError

ROLES = ("state", "reward", "value", "return", "plain")
ENTRY_BYTES = 64 << 20
"""Bytes that an entry may have, and that a value of a ragged column may."""
_MAX_AXIS = ENTRY_BYTES  # also of an axis beside one of 0: an array takes no longer ones


def columns_of_space(name: str, space: Any, role: str, keep_float64: bool) -> Any:
    """The column of a Gymnasium space, nested as the space is."""
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
        return named(name, lambda: Column(np.uint8, (None,), role))
    if dtype is None or shape is None or np.dtype(dtype).kind not in "biuf":
        raise SchemaError(
            f"column {name!r}: the space {space} has no fixed shape of numbers. Box, Discrete, MultiDiscrete, "
            f"MultiBinary, Sequence, Graph, Text, Dict and Tuple can be stored; wrap the environment to give these."
        )
    if dtype == np.float64 and not keep_float64:
        dtype = np.float32
    return named(name, lambda: Column(dtype, shape, role))


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
    """Refuse keys of a Dict space that cannot be names of columns, with the line that renames them."""
    for key in parts:
        if not isinstance(key, str) or "." in key:
            line = f": env = gymnasium.wrappers.{_RENAMING[name]}" if name in _RENAMING else ""
            raise SchemaError(
                f"column {name!r}: the Dict space has the key {key!r}, but names of columns are text without dots. "
                f"Rename its keys{line}"
            )


def _columns_of_sequence(name: str, space: Any, role: str, keep_float64: bool) -> Any:
    """A ragged column for a Sequence of arrays of one shape."""
    inner = columns_of_space(name, space.feature_space, role, keep_float64)
    if not isinstance(inner, Column) or inner.is_ragged:
        raise SchemaError(
            f"column {name!r}: the space {space} is a sequence of something that has no fixed shape. Sequences of Box, "
            f"Discrete, MultiDiscrete and MultiBinary can be stored; wrap the environment to give such."
        )
    return Column(inner.dtype, (None, *inner.shape), role)


def _columns_of_graph(name: str, space: Any, role: str, keep_float64: bool) -> dict[str, Any]:
    """Ragged columns nodes, and edges and edge_links where the space has them: the fields of a GraphInstance."""
    parts = {"nodes": space.node_space} | ({} if space.edge_space is None else {"edges": space.edge_space})
    found = {part: columns_of_space(f"{name}.{part}", inner, role, keep_float64) for part, inner in parts.items()}
    columns = {part: _ragged(f"{name}.{part}", inner, parts[part]) for part, inner in found.items()}
    if space.edge_space is not None:
        columns["edge_links"] = Column(np.int32, (None, 2), role)
    return columns


def _ragged(name: str, columns: Any, space: Any) -> Any:
    """Columns of nodes or edges with a free first axis, nested as they are."""
    if isinstance(columns, Mapping):
        return {key: _ragged(f"{name}.{key}", part, space) for key, part in columns.items()}
    if isinstance(columns, tuple):
        return tuple(_ragged(f"{name}.{place}", part, space) for place, part in enumerate(columns))
    if columns.is_ragged:
        raise SchemaError(
            f"column {name!r}: nodes or edges of the space {space} have no fixed shape. Those of Box, Discrete, "
            f"MultiDiscrete, MultiBinary, and Dict and Tuple of these can be stored; wrap the environment to give such."
        )
    return Column(columns.dtype, (None, *columns.shape), columns.role)


def allowing_nan(template: Any) -> Any:
    """Columns of a space, nested as they are, that allow NaN."""
    if isinstance(template, Mapping):
        return {name: allowing_nan(part) for name, part in template.items()}
    if isinstance(template, tuple):
        return tuple(allowing_nan(part) for part in template)
    return Column(template.dtype, template.shape, template.role, "allow")


def tree_of(names: Iterable[str]) -> dict[str, Any]:
    """For each root its nesting: a column's name, or a dict of these.

    Raises:
        SchemaError: a column lies within another one.
    """
    nested: dict[str, Any] = {}
    for name in names:
        *path, last = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise SchemaError(f"column {name!r} lies within another column. Rename one of them.")
        if last in node:
            raise SchemaError(f"column {name!r} holds other columns. Rename one of them.")
        node[last] = name
    return nested


def with_tuples(tree: Mapping[str, Any], names: Collection[str], tuples: Collection[str]) -> dict[str, Any]:
    """The same nesting of these columns, in which the dicts at the paths `tuples` are tuples.

    Raises:
        SchemaError: there is no such path, or its parts are not numbered.
    """
    for nest in tuples:
        if not any(name.startswith(nest + ".") for name in names):
            raise SchemaError(f"{nest!r} is said to be a tuple, but no column lies within it.")
    return {root: _with_tuples(root, node, tuples) for root, node in tree.items()}


def _with_tuples(path: str, node: Any, tuples: Collection[str]) -> Any:
    if not isinstance(node, dict):
        return node
    parts = {key: _with_tuples(f"{path}.{key}", part, tuples) for key, part in node.items()}
    if path not in tuples:
        return parts
    if list(parts) != [str(i) for i in range(len(parts))]:
        raise SchemaError(f"column {path!r} is a tuple, but its parts are called {', '.join(parts)}.")
    return tuple(parts.values())


def collect(tree: Any, value: Any, found: list[Any]) -> None:
    """Append the leaves of a value to `found`. Raises SchemaError if it is not nested like the tree."""
    if isinstance(tree, str):
        found.append(value)
        return
    if isinstance(tree, dict) and isinstance(value, tuple) and value and all(_is_named(each, tree) for each in value):
        rows: list[list[Any]] = [[] for _ in value]  # of vector environments: one graph for each
        for row, each in zip(rows, value, strict=True):
            collect(tree, each, row)
        found += [list(column) for column in zip(*rows, strict=True)]
        return
    keys: Any = tree if isinstance(tree, dict) else range(len(tree))
    is_named = _is_named(value, tree)
    for key in keys:
        if is_named and getattr(value, key) is None:  # a graph without edges
            found += [()] * _leaves(tree[key])
            continue
        try:
            part = getattr(value, key) if is_named else value[key]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            kind = f"a {type(value).__name__}"
            raise SchemaError(
                f"a nested value should have {key!r} (for {_first(tree[key])!r}), but {kind} without it came."
            ) from error
        collect(tree[key], part, found)


def _is_named(value: Any, tree: Any) -> bool:
    """Whether a value is a graph: a named tuple with these parts."""
    return isinstance(value, tuple) and isinstance(tree, dict) and all(hasattr(value, key) for key in tree)


def _leaves(tree: Any) -> int:
    parts = tree.values() if isinstance(tree, dict) else tree
    return 1 if isinstance(tree, str) else sum(map(_leaves, parts))


def _first(tree: Any) -> str:
    while not isinstance(tree, str):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def build(tree: Any, columns: Mapping[str, Any]) -> Any:
    """The nested value that `collect` takes apart, out of its leaves by name."""
    if isinstance(tree, str):
        return columns[tree]
    if isinstance(tree, tuple):
        return tuple(build(part, columns) for part in tree)
    return {key: build(part, columns) for key, part in tree.items()}


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
    is_ragged: bool = field(init=False, repr=False, compare=False)
    """Whether the first axis is free."""
    element: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The shape without a free axis: of what a ragged column has any number of."""
    nbytes: int = field(init=False, repr=False, compare=False)
    """Bytes of one value, of a ragged column those of one element."""

    @checked_names()
    def __init__(
        self, dtype: Any, shape: int | Sequence[int | None] = (), role: str = "plain", nan: str = "refuse"
    ) -> None:
        try:
            plain = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError, DeprecationWarning) as error:
            raise SchemaError(f"{dtype!r} is no dtype. Give one such as np.float32 or 'uint8'.") from error
        axes = _axes(shape)
        while plain.subdtype is not None:
            plain, inner = plain.subdtype
            axes += inner
        if role not in ROLES:
            raise SchemaError(f"{role!r} is no role of a column. The roles are {', '.join(ROLES)}{hint(role, ROLES)}.")
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
    """How errors write a dtype and a shape: float32[84, 84], uint8[any], int64."""
    axes = ", ".join("any" if axis is None else str(axis) for axis in shape)
    return f"{dtype}[{axes}]" if shape else f"{dtype}"


def checked_nan(nan: Any, role: str) -> str:
    """`nan` itself. Raises SchemaError if a column of this role cannot have it."""
    if nan not in ("refuse", "allow"):
        raise SchemaError(f"nan={nan!r} is not possible. Give 'refuse' or 'allow'.")
    if nan == "allow" and role != "state":
        raise SchemaError(
            f"nan='allow' is for states, not for role {role!r}: values of plain columns are never looked at, and "
            f"priorities and returns cannot be made of what is not finite."
        )
    return str(nan)


def _axes(shape: Any) -> tuple[Any, ...]:
    axes = (shape,) if isinstance(shape, int | np.integer) else shape
    if isinstance(axes, tuple | list) and any(isinstance(axis, int) and abs(axis) > _MAX_AXIS for axis in axes):
        raise SchemaError(f"a shape has an axis of more than {_MAX_AXIS}. Store the value smaller, or elsewhere.")
    if not is_shape(axes):
        raise SchemaError(
            f"{shape!r} is no shape. Give whole numbers, 0 or more: () for a scalar, (84, 84) for an image. The first "
            f"may be None: any length."
        )
    return tuple(None if axis is None else int(axis) for axis in axes)


def is_shape(axes: Any) -> bool:
    """Whether these are axes of a column: whole numbers, of which the first may be None."""
    return isinstance(axes, tuple | list) and all(
        (axis is None and i == 0) or (isinstance(axis, int | np.integer) and not isinstance(axis, bool) and axis >= 0)
        for i, axis in enumerate(axes)
    )


def role_and_nan(column: Column) -> list[str]:
    """A column's role, and whether it allows NaN: only then, so that other schemas are what they always were."""
    return [column.role, "allow"] if column.nan == "allow" else [column.role]


def read_column(dtype: str, shape: tuple[Any, ...], role: str, nan: tuple[str, ...]) -> Column:
    """What `Schema.to_json` says of a column."""
    if nan not in ((), ("allow",)):
        raise SchemaError(f"{nan!r} stands behind the role, where only 'allow' may.")
    return Column(dtype, shape, role, *nan)


def fields_of(column: Column) -> dict[str, Column]:
    """A structured column taken apart; axes around the structure stay in front."""
    assert column.dtype.fields is not None
    return {
        name: Column(field[0], column.shape, column.role, column.nan) for name, field in column.dtype.fields.items()
    }


def named(name: str, make: Callable[[], Column]) -> Column:
    """What `make()` returns; an error of it gets the column's name."""
    try:
        return make()
    except SchemaError as error:
        raise SchemaError(f"column {name!r}: {error}") from error


class Ragged:
    """n values, each an array [its length, *F]: `ragged[i]` is one of them, without a copy. Unchangeable.

    Args:
        values: All elements, one value after the other: [sum of lengths, *F].
        lengths: How many elements each value has: int64 [n].

    Raises:
        ParameterError: the lengths are not those of the values.
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
            found = f"{len(self.lengths)} lengths that add up to {total}, for {np.shape(values)}"
            expected = "one for each value, at least 0, that add up to the elements there are"
            raise ParameterError("lengths", found, expected)

    @classmethod
    def of(cls, values: Iterable[NDArray[Any]], dtype: Any = None, element: tuple[int, ...] = ()) -> Ragged:
        """Arrays [L, *F], each of its own L, copied together; `dtype` and `element` (F) are those if there is none."""
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
        """One value [its length, *F], or those of a slice, of integers or of a mask [n] as `Ragged`."""
        if isinstance(index, int | np.integer):
            end = int(self._ends[index])
            return self.values[end - int(self.lengths[index]) : end]
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            ends = np.concatenate([[0], self._ends])
            return Ragged(self.values[ends[start] : ends[max(start, stop)]], self.lengths[start:stop])
        chosen = np.arange(len(self))[index]
        return Ragged.of((self[i] for i in chosen), self.values.dtype, self.values.shape[1:])

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.values.shape[1:]))
        return f"Ragged({len(self)} values of {self.values.dtype}[any{', ' * bool(shape)}{shape}])"

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.values.nbytes

    def padded(self, longest: int | None = None) -> NDArray[Any]:
        """The N values side by side, zeros behind each: [N, L, *F].

        L is `longest`; None is the longest there is, at least 1.
        """
        width = max(1, int(self.lengths.max(initial=0))) if longest is None else longest
        made = np.zeros((len(self), width, *self.values.shape[1:]), self.values.dtype)
        made[np.arange(width) < self.lengths[:, None]] = self.values
        return made
