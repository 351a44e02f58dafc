"""The columns of Gymnasium spaces. A space is known by its looks, so that Gymnasium is not needed."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memoire.errors import SchemaError

from .columns import Column, named


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
