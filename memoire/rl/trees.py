"""Nested values taken apart into leaves with paths, and put together again: tuples, lists, dictionaries.

{"image": a, "pose": (b, c)}     leaves a, b, c    paths ['image'], ['pose'][0], ['pose'][1]

Batches on the device where an agent learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

LEAF: Final = None
"""How a leaf stands in a structure."""
Structure = Any
"""Nested tuples that can be compared: LEAF, or (kind, names or None, parts)."""


def structure_of(value: Any) -> Structure:
    """How a value is nested."""
    if type(value) is tuple or type(value) is list:
        return type(value).__name__, None, tuple([structure_of(part) for part in value])
    if type(value) is dict:
        return "dict", tuple(value), tuple([structure_of(part) for part in value.values()])
    return LEAF


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a value, in order."""
    found: list[Any] = []
    _collect(value, found)
    return found


def paths_of(structure: Structure, root: str = "") -> list[str]:
    """The path of each leaf, in order."""
    return list(_paths(structure, root))


def assembled(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The value with these leaves."""
    rest = iter(leaves)
    return _assembled(structure, rest)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with a function's results in place of its leaves."""
    return assembled(structure_of(value), [function(leaf) for leaf in leaves_of(value)])


def copied(value: Any) -> Any:
    """The value with arrays of its own."""
    return mapped(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


def _collect(value: Any, found: list[Any]) -> None:
    if type(value) is tuple or type(value) is list:
        for part in value:
            _collect(part, found)
    elif type(value) is dict:
        for part in value.values():
            _collect(part, found)
    else:
        found.append(value)


def _paths(structure: Structure, root: str) -> Iterator[str]:
    if structure is LEAF:
        yield root
        return
    _, names, parts = structure
    for place, part in enumerate(parts):
        yield from _paths(part, f"{root}[{place if names is None else names[place]!r}]")


def _assembled(structure: Structure, rest: Iterator[Any]) -> Any:
    if structure is LEAF:
        return next(rest)
    kind, names, parts = structure
    made = [_assembled(part, rest) for part in parts]
    if kind == "dict":
        return dict(zip(names, made, strict=True))
    return tuple(made) if kind == "tuple" else made


FUSED: Final = ("cpu", "cuda")
"""Kinds of devices on which Adam makes a step of all parameters at once; small networks learn a fifth faster by it."""


def on_device(value: Any, device: Any) -> Any:
    """A nested value with its arrays as tensors on a device of torch; as it is if the device is None.

    On the CPU tensors share the arrays' memory. On the way to a GPU they are pinned, so that the copy goes on beside
    everything else.

    Raises:
        ParameterError: torch has no such device here, or no dtype like an array's.
    """
    if device is None:
        return value
    from memoire import torch

    place = torch.device_of(device)
    leaves = [torch.as_tensor(np.ascontiguousarray(leaf)) for leaf in leaves_of(value)]
    if place.type == "cuda":
        leaves = [leaf.pin_memory().to(place, non_blocking=True) for leaf in leaves]
    elif place.type != "cpu":
        leaves = [leaf.to(place) for leaf in leaves]
    return assembled(structure_of(value), leaves)
