"""How columns are nested: dicts and tuples of them, taken apart into leaves such as `obs.image` and put together."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from memoire.errors import SchemaError


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
