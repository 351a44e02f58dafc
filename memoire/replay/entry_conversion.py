"""What a memory is given, as exact arrays: entries, their weights, and how an episode ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire import _core, arguments
from memoire.errors import EntryError, EpisodeClosedError, EpisodeTooLong, ModelUnknown, ParameterError

from .schema import Schema
from .value_conversion import exact, finite, form

FLOAT32_MAX = float(np.finfo(np.float32).max)
LEAST_WEIGHT = float(np.finfo(np.float32).tiny)
WEIGHT = f"a finite number of at least 0: 0, or from {LEAST_WEIGHT:.3g} to {FLOAT32_MAX:.3g}, which float32 holds"


def exact_columns(schema: Schema, values: Any, axes: tuple[int, ...]) -> list[NDArray[Any]]:
    """A value for each column but the return column, as arrays [*axes, *F] of exactly its dtype."""
    names = schema.entry_names
    if isinstance(values, Mapping) or not isinstance(values, Sequence) or len(values) != len(names):
        received = f"{len(values)} values" if isinstance(values, Sequence) else f"a {type(values).__name__}"
        raise EntryError("*", f"a tuple of {len(names)} values ({', '.join(names)})", received)
    return [exact(name, schema[name], value, axes) for name, value in zip(names, values, strict=True)]


def init_weights(init_w: Any, count: int) -> NDArray[np.float32]:
    """`init_w` of N = `count` entries, a number or [N], as float32 [N]. Raises ParameterError."""
    if isinstance(init_w, float) and LEAST_WEIGHT <= init_w <= FLOAT32_MAX:
        return np.full(count, init_w, np.float32)
    with np.errstate(over="ignore"):
        weights = np.asarray(init_w, np.float32)
    if weights.shape not in ((), (count,)):
        raise ParameterError("init_w", f"shape {weights.shape}", f"a number or {count} of them")
    given = np.asarray(init_w)
    if not np.where(given == 0, True, (given >= LEAST_WEIGHT) & (given <= FLOAT32_MAX)).all():
        raise ParameterError("init_w", init_w, WEIGHT)
    return np.ascontiguousarray(weights if weights.ndim else np.full(count, weights))


def version_of(model_version: Any, max_model_lag: int | None) -> int:
    """The version of the model that made a new entry; 0 is unknown.

    Raises:
        ParameterError: it is no version. ModelUnknown, one of these: it is 0, and `max_model_lag` counts versions.
    """
    version = arguments.model_version(model_version)
    if version == 0 and max_model_lag is not None:
        raise ModelUnknown(f"max_model_lag={max_model_lag} needs to know how old the model of an entry is")
    return version


def refuse(
    store: _core.EntryStore, schema: Schema, lane: int, status: int, values: Sequence[Any], ragged_limit: int
) -> NoReturn:
    """Say why the engine has not added these exact values: `status` is what it answered."""
    if status == _core.NOT_OPEN:
        raise EpisodeClosedError("add an entry", lane)
    if status == _core.TOO_LONG:
        raise EpisodeTooLong(lane, store._open_length(lane), store.capacity)
    if status == _core.TOO_MANY_BYTES:
        raise EpisodeTooLong(lane, store._open_length(lane), store.capacity, ragged_limit)
    if status == _core.NO_MEMORY:
        raise MemoryError(f"no memory for the values of {', '.join(schema.ragged)}")
    for name, value in zip(schema.entry_names, values, strict=True):
        finite(name, schema[name], value)
    raise AssertionError(f"an exact entry was refused: {status}")


def count_of(values: Any) -> int:
    """The length of a first axis."""
    try:
        return len(values)
    except TypeError:
        return 0


def entry_numbers(numbers: ArrayLike, called: str = "numbers") -> NDArray[np.int64]:
    """Entry numbers [N] as contiguous int64 [N]; errors call them `called`."""
    array = np.asarray(numbers)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size > 0):
        raise ParameterError(called, form(array), "whole numbers of one dimension, as a batch's ids are")
    return np.ascontiguousarray(array, np.int64)


def exact_fractions(fractions: ArrayLike, count: int) -> NDArray[np.float64]:
    """Where to draw in the cumulative weights, [count] in [0, 1). Raises ParameterError."""
    exact = np.ascontiguousarray(fractions, np.float64)
    if exact.shape != (count,) or not ((exact >= 0.0) & (exact < 1.0)).all():
        raise ParameterError("fractions", exact, f"{count} numbers in [0, 1)")
    return exact


def ending(
    schema: Schema, multiplier: float, final_state: Any, terminated: bool | None, bootstrap_value: ArrayLike | None
) -> tuple[float, NDArray[np.float32], list[NDArray[Any]] | None]:
    """Arguments of `Memory.close`, checked: the multiplier, the final state's value, exact states.

    The value is float32 [D], D the numbers in a reward. States are [*F] each, in the order of `schema.states`.
    """
    multiplier = _finite("multiplier", multiplier)
    if terminated is not None and not isinstance(terminated, (bool, np.bool_)):
        raise ParameterError("terminated", terminated, "True, False or None")
    bootstrap = _bootstrap(schema.reward_shape, bootstrap_value)
    if terminated and bootstrap.any():
        raise ParameterError("bootstrap_value", bootstrap_value, "0 or None where the episode terminated")
    return multiplier, bootstrap, None if final_state is None else _final_states(schema, final_state)


def _final_states(schema: Schema, given: Any) -> list[NDArray[Any]]:
    """A final state as exact arrays in the order of `schema.states`."""
    states = schema.states
    if isinstance(given, Mapping):
        if not all(name in given for name in states):
            given = _by_leaf(schema, given)
        missing = [name for name in states if name not in given]
        if missing:
            raise EntryError(missing[0], "a final state for each state column", f"only {', '.join(given)}")
        given = tuple(given[name] for name in states)
    elif not isinstance(given, tuple):
        given = (given,)
    if len(given) != len(states):
        raise EntryError(states[0], f"{len(states)} final states ({', '.join(states)})", f"{len(given)}")
    columns = [(name, schema[name]) for name in states]
    return [
        finite(name, column, exact(name, column, value, ()))
        for (name, column), value in zip(columns, given, strict=True)
    ]


def _by_leaf(schema: Schema, given: Mapping[str, Any]) -> dict[str, Any]:
    """A nested final state by column: keyed by the declared names, or the nesting of the only one."""
    roots = list(dict.fromkeys(name.split(".")[0] for name in schema.states))
    is_only = len(roots) == 1 and roots[0] not in given and roots[0] not in schema.states
    nested = {roots[0]: given} if is_only else given
    found: dict[str, Any] = {}
    for root in roots:
        if root in nested:
            found.update(zip(schema.leaves(root), schema.flatten(root, nested[root]), strict=True))
    return found


def _bootstrap(shape: tuple[int, ...], given: ArrayLike | None) -> NDArray[np.float32]:
    if given is None:
        return np.zeros(math.prod(shape), np.float32)
    value = np.asarray(given)
    expected = f"a finite number, or {shape} of them"
    if value.dtype.kind not in "iuf" or value.shape not in ((), shape):
        raise ParameterError("bootstrap_value", given, expected)
    with np.errstate(over="ignore"):
        exact = np.ascontiguousarray(np.broadcast_to(value, shape), np.float32).reshape(-1)
    if not np.isfinite(exact).all():
        raise ParameterError("bootstrap_value", given, expected)
    return exact


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ParameterError(name, value, "a finite number of at least 0")
    number = float(value)
    if not 0.0 <= number < math.inf:
        raise ParameterError(name, value, "a finite number of at least 0")
    return number


def check_out(out: Any, dtype: Any, size: int) -> None:
    """Raise ParameterError unless `out` is a writable contiguous array of this dtype with `size` elements."""
    if not isinstance(out, np.ndarray) or out.dtype != dtype or out.size != size or not out.flags.carray:
        raise ParameterError(
            "out", getattr(out, "shape", out), f"a contiguous {np.dtype(dtype)} array of {size} numbers"
        )
