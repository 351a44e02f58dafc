"""Values in the form of a column: converted if nothing of them is lost by it, else refused with what was expected."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import EntryError, NotFinite, ParameterError, WrongType

from .columns import ENTRY_BYTES, Column, dtype_text
from .ragged import Ragged


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
    array = _array(name, lambda: dtype_text(dtype, told), value)
    made = _cast(array, dtype) if array.shape == shape else None
    if made is None:
        is_beyond = array.shape == shape and array.dtype.kind in ("f" if dtype.kind == "f" else "iu")
        expected = dtype_text(dtype, told)
        received = form(value) if isinstance(value, str | int | float | None) else dtype_text(array.dtype, array.shape)
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
    return f"a {type(value).__name__}" if array.dtype == object else dtype_text(array.dtype, array.shape)


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


def _array(name: str, expected: Callable[[], str], value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise EntryError(name, expected(), f"a {type(value).__name__} that is no array: {error}") from error


def _exact_value(name: str, column: Column, value: Any) -> NDArray[Any]:
    """One value of a ragged column: [its length, *F]. Text is UTF-8 where that is what the column can hold."""
    if isinstance(value, str | bytes) and column.dtype == np.uint8 and not column.element:
        value = np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    array = value if type(value) is np.ndarray else _array(name, lambda: str(column), value)
    if array.shape == (0,):  # an empty list says nothing of what it has none of
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
    """Values of a ragged column."""
    if not isinstance(values, Ragged):
        if not isinstance(values, list | tuple):
            values = _array(name, lambda: f"{count} times {column}", values)
            if values.ndim == 0:
                raise EntryError(name, f"{count} times {column}", repr(values.item())[:80])
        values = Ragged.of([_exact_value(name, column, value) for value in values], column.dtype, column.element)
    made = _exact(name, column.dtype, (len(values.values), *column.element), column.shape, values.values)
    if len(values) != count:
        raise EntryError(name, f"{count} times {column}", f"{len(values)} values")
    if (bad := values.lengths[values.lengths * max(1, column.nbytes) > ENTRY_BYTES]).size:
        raise EntryError(name, f"{column} of at most {ENTRY_BYTES} bytes and elements", f"{bad[0]} elements")
    return values if made is values.values else Ragged(made, values.lengths)


def _cast(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """An array in another dtype, or None where its values have no place in it. Floats may be rounded."""
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
        made = np.asarray(array, dtype, order="C")
    if source == "f" and made.itemsize < array.itemsize and not (np.isfinite(array) == np.isfinite(made)).all():
        return None
    return made if made.dtype.num == dtype.num else made.view(dtype)


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


def real_errors(td_errors: Any) -> NDArray[Any]:
    """TD errors as an array of real numbers, in their own shape; of a tensor that requires grad its values.

    Raises:
        ParameterError: they are complex.
        WrongType: they are no numbers.
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
