"""One value of an entry: its dtype, its shape, its role, and what a schema refuses of these."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from memoire.errors import SchemaError
from memoire.frozen import says_instead
from memoire.limits import MiB
from memoire.suggestions import checked_names, hint

ROLES = ("state", "reward", "value", "return", "plain")
ENTRY_BYTES = 64 * MiB
"""Bytes that an entry may have, and that a value of a ragged column may."""
_MAX_AXIS = ENTRY_BYTES  # also of an axis beside one of 0: an array takes no longer ones


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
