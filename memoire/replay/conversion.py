"""Conversion of a memory's arguments to exact arrays: entries, weights, and the end of an episode.

The module also prepares the engine's setup: room for each column, and parameters as the numbers that its loops take.

A value takes the form of its column: it is converted if nothing is lost, else rejected with what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire import _core, arguments
from memoire.errors import (
    EntryError,
    EpisodeClosedError,
    EpisodeTooLong,
    ModelUnknown,
    NotFinite,
    ParameterError,
    WrongType,
)

from .columns import ENTRY_BYTES, Column, Ragged, dtype_text
from .parameters import PRIORITIZATIONS, STARTS, Parameters
from .schema import Schema

_POINTER_BYTES = 8  # bytes of each ragged column
ENTRY_OVERHEAD: Final = 112
"""Bytes of an entry beside its columns: number, times and priority, and its place in the trees."""


def memory_bytes(schema: Schema, capacity: int) -> int:
    """Return the bytes of a memory of so many entries, without the values of ragged columns and final states of
    episodes.
    """
    columns = (
        _POINTER_BYTES if column.is_ragged else column.nbytes for column in map(schema.__getitem__, schema.names)
    )
    return capacity * (sum(columns) + ENTRY_OVERHEAD)


def storage_of(column: Column, capacity: int) -> tuple[NDArray[np.uint8], np.dtype[Any], tuple[int, ...], str, bool]:
    """Return room for a column, uint8 [C, S], aligned to a cache line, and the column's facts that the loops need.

    C is the capacity, S the bytes of the column in a row: those of a value, or of a pointer to a ragged value.
    """
    size = _POINTER_BYTES if column.is_ragged else column.nbytes
    room = np.zeros(capacity * size + 64, np.uint8)
    skip = -room.ctypes.data % 64
    data = room[skip : skip + capacity * size].reshape(capacity, size)
    return data, column.dtype, column.shape, column.role, column.is_finite


def checked_page_rows(page_rows: int | None, capacity: int) -> int:
    """Return the number of rows that a lane allocates at once; None chooses. Raises ParameterError."""
    if page_rows is None:
        # Small enough for a thousand lanes to get some, large enough that adding seldom allocates.
        return 1 << min(max(capacity // 4096, 1).bit_length() - 1, 8)
    if page_rows < 1 or page_rows & (page_rows - 1):
        raise ParameterError("page_rows", page_rows, "a power of two")
    return page_rows


def weight_window_settings(parameters: Parameters, dimensions: int) -> dict[str, Any]:
    """Return the settings of weights and windows as keywords of `EntryStore._configure`; rewards have `dimensions`."""
    length = parameters.sequence_length
    return {
        "alpha": parameters.priority_exponent,
        "lambda_": parameters.mix_lambda,
        "frame_stack": parameters.frame_stack,
        "multi_step": length or parameters.multi_step,
        "start": STARTS.index(parameters.start),
        "most_episodes": parameters.max_episode,
        "gamma": _broadcast(parameters.discount, dimensions),
        "coeff": _broadcast(parameters.reward_coeff, dimensions),
        "prioritization": PRIORITIZATIONS.index(parameters.prioritization),
        "stratified": parameters.stratified,
        "stride": length - parameters.sequence_overlap if length else 0,
        "burn_in": parameters.burn_in,
        "max_share": parameters.sequence_max_share,
    }


def limits_of(parameters: Parameters) -> tuple[int, float, int]:
    """Return the largest number of draws, age and model lag of an entry, as `EntryStore._limit` takes them."""
    lag = parameters.max_model_lag
    return parameters.max_times_sampled, parameters.max_age or 0.0, -1 if lag is None else lag


def _broadcast(numbers: tuple[float, ...], size: int) -> list[float]:
    return list(numbers) * size if len(numbers) == 1 else list(numbers)


def exact_array(name: str, column: Column, value: Any, axes: tuple[int, ...] = ()) -> Any:
    """Return `value` as a C-contiguous array [*axes, *F] of exactly the column's dtype, without a copy if it is one.

    Numbers are converted within their kind, or to a wider kind, if they fit; the shape must match. For a ragged column
    `axes` is () for one value, an array [its length, *F], or (n,) for several, returned as `Ragged`: from a `Ragged`, a
    sequence of n arrays, or an array [n, L, *F]. Raises EntryError.
    """
    if column.is_ragged:
        return _exact_values(name, column, value, *axes) if axes else _exact_value(name, column, value)
    return _exact(name, column.dtype, axes + column.shape, axes + column.shape, value)


def _exact(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], shown: tuple[Any, ...], value: Any) -> NDArray[Any]:
    """Return `value` in this dtype and shape; errors show the shape `shown`."""
    if (
        type(value) is np.ndarray
        and value.dtype.num == dtype.num
        and value.shape == shape
        and value.flags.c_contiguous
        and value.dtype.isnative
    ):
        return value
    array = _array(name, lambda: dtype_text(dtype, shown), value)
    converted = _cast(array, dtype) if array.shape == shape else None
    if converted is None:
        is_beyond = array.shape == shape and array.dtype.kind in ("f" if dtype.kind == "f" else "iu")
        expected = dtype_text(dtype, shown)
        received = (
            describe_value(value)
            if isinstance(value, str | int | float | None)
            else dtype_text(array.dtype, array.shape)
        )
        raise EntryError(name, *_beyond(expected, received, array, dtype) if is_beyond else (expected, received))
    return converted


def describe_value(value: Any) -> str:
    """Describe a value for an error: dtype and shape of an array; anything else by its text, or its type."""
    if isinstance(value, int | float | str | None):
        return repr(value)[:80]
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__}" if array.dtype == object else dtype_text(array.dtype, array.shape)


def _beyond(expected: str, received: str, array: NDArray[Any], dtype: np.dtype[Any]) -> tuple[str, str]:
    """Return (expected, received) for values outside a dtype's range, with the first wrong value and its index."""
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    wrong = (
        np.isfinite(array) & (abs(array) > limits.max)
        if dtype.kind == "f"
        else (array < limits.min) | (array > limits.max)
    )
    place = [int(axis) for axis in np.argwhere(wrong)[0]] if wrong.any() else []
    described = f"{received} with {array[tuple(place)]} at {place}" if array.ndim else received
    low, high = (f"{limits.min:.9g}", f"{limits.max:.9g}") if dtype.kind == "f" else (limits.min, limits.max)
    return f"{expected} from {low} to {high}", described


def _array(name: str, expected: Callable[[], str], value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise EntryError(name, expected(), f"a {type(value).__name__} that is not an array: {error}") from error


def _exact_value(name: str, column: Column, value: Any) -> NDArray[Any]:
    """Return one value of a ragged column: [its length, *F]. A column of bytes takes text as UTF-8."""
    if isinstance(value, str | bytes) and column.dtype == np.uint8 and not column.element:
        value = np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    array = value if type(value) is np.ndarray else _array(name, lambda: str(column), value)
    if array.shape == (0,):  # an empty list has no element whose shape could differ
        return np.empty((0, *column.element), column.dtype)
    length = array.shape[0] if array.ndim else 0
    if array.ndim and max(length, length * column.nbytes) > ENTRY_BYTES:
        raise EntryError(name, f"{column} of at most {ENTRY_BYTES} bytes and elements", f"{length} elements")
    if array.shape != (length, *column.element):
        raise EntryError(
            name, str(column), repr(value)[:80] if array.ndim == 0 else dtype_text(array.dtype, array.shape)
        )
    return _exact(name, column.dtype, array.shape, column.shape, array)


def _exact_values(name: str, column: Column, values: Any, count: int) -> Ragged:
    if not isinstance(values, Ragged):
        if not isinstance(values, list | tuple):
            values = _array(name, lambda: f"{count} times {column}", values)
            if values.ndim == 0:
                raise EntryError(name, f"{count} times {column}", repr(values.item())[:80])
        values = Ragged.from_arrays(
            [_exact_value(name, column, value) for value in values], column.dtype, column.element
        )
    elements = _exact(name, column.dtype, (len(values.values), *column.element), column.shape, values.values)
    if len(values) != count:
        raise EntryError(name, f"{count} times {column}", f"{len(values)} values")
    if (bad := values.lengths[values.lengths * max(1, column.nbytes) > ENTRY_BYTES]).size:
        raise EntryError(name, f"{column} of at most {ENTRY_BYTES} bytes and elements", f"{bad[0]} elements")
    return values if elements is values.values else Ragged(elements, values.lengths)


def _cast(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return an array in another dtype, or None if its values do not fit. Floats may be rounded."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
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
        cast = np.asarray(array, dtype, order="C")
    if source == "f" and cast.itemsize < array.itemsize and not (np.isfinite(array) == np.isfinite(cast)).all():
        return None
    return cast if cast.dtype.num == dtype.num else cast.view(dtype)


def is_finite(value: Any) -> bool:
    """Return True if all numbers of an exact value are finite."""
    return _core.is_finite(_numbers(value))


def _numbers(value: Any) -> NDArray[Any]:
    """Return the numbers of an exact value, which is an array, a NumPy scalar or a `Ragged`."""
    return value.values if isinstance(value, Ragged) else np.asarray(value)


def finite(name: str, column: Column, value: Any) -> Any:
    """Return an exact value. Raises NotFinite if it is not finite and its column does not allow that."""
    if column.is_finite and not is_finite(value):
        numbers = _numbers(value)
        number = numbers[~np.isfinite(numbers)].flat[0]
        raise NotFinite(name, f"finite {column}", f"{number}", column.role == "state")
    return value


def real_errors(td_errors: Any) -> NDArray[Any]:
    """Return TD errors as an array of real numbers, in their own shape; detach a tensor that requires grad.

    Raises:
        ParameterError: the errors are complex.
        WrongType: the errors are not numbers.
    """
    errors: NDArray[Any] = td_errors
    if type(errors) is not np.ndarray:
        detach = getattr(td_errors, "detach", None)
        try:
            errors = np.asarray(detach() if callable(detach) else td_errors)
        except (TypeError, ValueError, OverflowError):
            raise WrongType("td_errors", "numbers", repr(td_errors)[:80]) from None
    kind = errors.dtype.kind
    if kind == "c":
        raise ParameterError("td_errors", f"{errors.dtype}{list(errors.shape)}", "real numbers, such as abs(td_errors)")
    if kind not in "biuf":
        raise WrongType("td_errors", "numbers", repr(td_errors)[:80])
    return errors


ID = np.dtype([("client", "<u8", (2,)), ("number", "<i8")])
"""Id of an entry in a cluster: the owner's client id as two little-endian words, and the owner's entry number."""


def td_errors_for(ids: NDArray[Any], td_errors: Any) -> NDArray[np.float32]:
    """Copy a learner's TD errors to float32 [B], as many as `ids`, so that the learner can reuse its array.

    Raises:
        ParameterError: the number of errors differs from that of ids, or an error is not finite or complex.
        WrongType: the errors are not numbers.
    """
    errors = np.array(real_errors(td_errors), np.float32, order="C")
    if ids.dtype != ID:
        raise WrongType("ids", "the ids of a batch", f"{ids.dtype}{list(ids.shape)}")
    if ids.ndim != 1 or errors.shape != ids.shape:
        raise ParameterError("td_errors", errors.shape, f"as many TD errors as ids, {list(ids.shape)} in one dimension")
    if not np.isfinite(errors).all():
        raise ParameterError("td_errors", f"{(~np.isfinite(errors)).sum()} of {len(errors)} not finite", "finite")
    return errors


FLOAT32_MAX = float(np.finfo(np.float32).max)
LEAST_WEIGHT = float(np.finfo(np.float32).tiny)
WEIGHT = f"a finite number of at least 0: 0, or from {LEAST_WEIGHT:.3g} to {FLOAT32_MAX:.3g}, which float32 holds"


def exact_columns(schema: Schema, values: Any, axes: tuple[int, ...]) -> list[NDArray[Any]]:
    """Return a value for each column but the return column, as arrays [*axes, *F] of exactly its dtype."""
    names = schema.entry_names
    if isinstance(values, Mapping) or not isinstance(values, Sequence) or len(values) != len(names):
        received = f"{len(values)} values" if isinstance(values, Sequence) else f"a {type(values).__name__}"
        raise EntryError("*", f"a tuple of {len(names)} values ({', '.join(names)})", received)
    return [exact_array(name, schema[name], value, axes) for name, value in zip(names, values, strict=True)]


def init_weights(init_w: Any, count: int) -> NDArray[np.float32]:
    """Return `init_w` of N = `count` entries, a number or [N], as float32 [N]. Raises ParameterError."""
    if isinstance(init_w, float) and LEAST_WEIGHT <= init_w <= FLOAT32_MAX:
        return np.full(count, init_w, np.float32)
    with np.errstate(over="ignore"):
        weights = np.asarray(init_w, np.float32)
    if weights.shape not in ((), (count,)):
        raise ParameterError("init_w", f"shape {weights.shape}", f"a number or {count} of them")
    numbers = np.asarray(init_w)
    if not np.where(numbers == 0, True, (numbers >= LEAST_WEIGHT) & (numbers <= FLOAT32_MAX)).all():
        raise ParameterError("init_w", init_w, WEIGHT)
    return np.ascontiguousarray(weights if weights.ndim else np.full(count, weights))


def version_of(model_version: Any, max_model_lag: int | None) -> int:
    """Return the version of the model that acted for a new entry; 0 is unknown.

    Raises:
        ParameterError: the version is invalid. ModelUnknown (a subclass): it is 0 while `max_model_lag` is set.
    """
    version = arguments.model_version(model_version)
    if version == 0 and max_model_lag is not None:
        raise ModelUnknown(f"max_model_lag={max_model_lag} requires the version of an entry's model")
    return version


def refuse(
    store: _core.EntryStore, schema: Schema, lane: int, status: int, values: Sequence[Any], ragged_limit: int
) -> NoReturn:
    """Raise the error for the engine's `status` after it rejected these exact values."""
    if status == _core.NOT_OPEN:
        raise EpisodeClosedError("add an entry", lane)
    if status == _core.TOO_LONG:
        raise EpisodeTooLong(lane, store._open_length(lane), store.capacity)
    if status == _core.TOO_MANY_BYTES:
        raise EpisodeTooLong(lane, store._open_length(lane), store.capacity, ragged_limit)
    if status == _core.NO_MEMORY:
        raise MemoryError(f"not enough memory for the values of {', '.join(schema.ragged)}")
    for name, value in zip(schema.entry_names, values, strict=True):
        finite(name, schema[name], value)
    raise AssertionError(f"the engine rejected an exact entry: status {status}")


def count_of(values: Any) -> int:
    """Return the length of the first axis; 0 if there is none."""
    try:
        return len(values)
    except TypeError:
        return 0


def entry_numbers(numbers: ArrayLike, called: str = "numbers") -> NDArray[np.int64]:
    """Return entry numbers [N] as contiguous int64 [N]; errors name the argument `called`."""
    array = np.asarray(numbers)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size > 0):
        raise ParameterError(called, describe_value(array), "whole numbers in one dimension, like a batch's ids")
    return np.ascontiguousarray(array, np.int64)


def exact_fractions(fractions: ArrayLike, count: int) -> NDArray[np.float64]:
    """Return positions in the cumulative weights, [count] in [0, 1), as float64. Raises ParameterError."""
    exact = np.ascontiguousarray(fractions, np.float64)
    if exact.shape != (count,) or not ((exact >= 0.0) & (exact < 1.0)).all():
        raise ParameterError("fractions", exact, f"{count} numbers in [0, 1)")
    return exact


def check_close(
    schema: Schema, multiplier: float, final_state: Any, terminated: bool | None, bootstrap_value: ArrayLike | None
) -> tuple[float, NDArray[np.float32], list[NDArray[Any]] | None]:
    """Check arguments of `Memory.close`; return the multiplier, the final state's value and exact states.

    The value is float32 [D], D the numbers in a reward. States are [*F] each, in the order of `schema.states`.
    """
    multiplier = _finite("multiplier", multiplier)
    if terminated is not None and not isinstance(terminated, (bool, np.bool_)):
        raise ParameterError("terminated", terminated, "True, False or None")
    bootstrap = _bootstrap(schema.reward_shape, bootstrap_value)
    if terminated and bootstrap.any():
        raise ParameterError("bootstrap_value", bootstrap_value, "0 or None if the episode terminated")
    return multiplier, bootstrap, None if final_state is None else _final_states(schema, final_state)


def _final_states(schema: Schema, state: Any) -> list[NDArray[Any]]:
    """Return a final state as exact arrays in the order of `schema.states`."""
    states = schema.states
    if isinstance(state, Mapping):
        if not all(name in state for name in states):
            state = _by_leaf(schema, state)
        missing = [name for name in states if name not in state]
        if missing:
            raise EntryError.with_text(
                f"final_state lacks {missing[0]!r}: it needs a state of each of {', '.join(states)}."
            )
        state = tuple(state[name] for name in states)
    elif not isinstance(state, tuple):
        state = (state,)
    if len(state) != len(states):
        raise EntryError.with_text(
            f"final_state has {len(state)} values; it needs {len(states)} ({', '.join(states)})."
        )
    columns = [(name, schema[name]) for name in states]
    return [
        finite(name, column, exact_array(name, column, value, ()))
        for (name, column), value in zip(columns, state, strict=True)
    ]


def _by_leaf(schema: Schema, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested final state by column, from declared names, or from the value of the only one."""
    roots = list(dict.fromkeys(name.split(".")[0] for name in schema.states))
    is_only = len(roots) == 1 and roots[0] not in state and roots[0] not in schema.states
    nested = {roots[0]: state} if is_only else state
    by_leaf: dict[str, Any] = {}
    for root in roots:
        if root in nested:
            by_leaf.update(zip(schema.leaves(root), schema.flatten(root, nested[root]), strict=True))
    return by_leaf


def _bootstrap(shape: tuple[int, ...], estimate: ArrayLike | None) -> NDArray[np.float32]:
    if estimate is None:
        return np.zeros(math.prod(shape), np.float32)
    value = np.asarray(estimate)
    expected = f"a finite number, or {shape} of them"
    if value.dtype.kind not in "iuf" or value.shape not in ((), shape):
        raise ParameterError("bootstrap_value", estimate, expected)
    with np.errstate(over="ignore"):
        exact = np.ascontiguousarray(np.broadcast_to(value, shape), np.float32).reshape(-1)
    if not np.isfinite(exact).all():
        raise ParameterError("bootstrap_value", estimate, expected)
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
