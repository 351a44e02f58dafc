"""What the engine is set up with: room for each column, and parameters as the numbers that its loops take."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError

from .columns import Column
from .parameters import PRIORITIZATIONS, STARTS, Parameters
from .schema import Schema

_POINTER_BYTES = 8  # what a row has of a ragged column
ENTRY_OVERHEAD: Final = 112
"""Bytes that an entry takes beside its columns: number, times and priority, and its place in the trees."""


def memory_bytes(schema: Schema, capacity: int) -> int:
    """Bytes that a memory of so many entries fills. Values of ragged columns come on top, and the states in which
    episodes ended.
    """
    columns = (
        _POINTER_BYTES if column.is_ragged else column.nbytes for column in map(schema.__getitem__, schema.names)
    )
    return capacity * (sum(columns) + ENTRY_OVERHEAD)


def storage_of(column: Column, capacity: int) -> tuple[NDArray[np.uint8], np.dtype[Any], tuple[int, ...], str, bool]:
    """Room for a column, uint8 [C, S], that begins with a cache line; with what the loops must know.

    C is the capacity, S the bytes that a row has of the column: those of a value, or of a pointer to a ragged one.
    """
    size = _POINTER_BYTES if column.is_ragged else column.nbytes
    room = np.zeros(capacity * size + 64, np.uint8)
    skip = -room.ctypes.data % 64
    data = room[skip : skip + capacity * size].reshape(capacity, size)
    return data, column.dtype, column.shape, column.role, column.is_finite


def checked_page_rows(page_rows: int | None, capacity: int) -> int:
    """Rows that a lane takes at once; None chooses. Raises ParameterError."""
    if page_rows is None:
        # Small enough that a thousand lanes each find some, large enough that adding seldom takes one.
        return 1 << min(max(capacity // 4096, 1).bit_length() - 1, 8)
    if page_rows < 1 or page_rows & (page_rows - 1):
        raise ParameterError("page_rows", page_rows, "a power of two")
    return page_rows


def cutting_of(parameters: Parameters, dimensions: int) -> dict[str, Any]:
    """How samples are weighed and cut, as `EntryStore._configure` takes it by name; rewards have `dimensions`."""
    length = parameters.sequence_length
    return {
        "alpha": parameters.priority_exponent,
        "lambda_": parameters.mix_lambda,
        "frame_stack": parameters.frame_stack,
        "multi_step": length or parameters.multi_step,
        "start": STARTS.index(parameters.start),
        "most_episodes": parameters.max_episode,
        "gamma": _broadcast(parameters.discount_factor, dimensions),
        "coeff": _broadcast(parameters.reward_coeff, dimensions),
        "prioritization": PRIORITIZATIONS.index(parameters.prioritization),
        "stratified": parameters.stratified,
        "stride": length - parameters.sequence_overlap if length else 0,
        "burn_in": parameters.burn_in,
        "max_share": parameters.sequence_max_share,
    }


def limits_of(parameters: Parameters) -> tuple[int, float, int]:
    """How often, how long and over how many models an entry may be drawn, as `EntryStore._limit` takes it."""
    lag = parameters.max_model_lag
    return parameters.max_times_sampled, parameters.max_age or 0.0, -1 if lag is None else lag


def _broadcast(numbers: tuple[float, ...], size: int) -> list[float]:
    return list(numbers) * size if len(numbers) == 1 else list(numbers)
