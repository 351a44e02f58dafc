"""Where the frames of a sample are: windows of a frame stack and several steps, and sequences, as places in a memory.

A *frame code* says where a value of a column is: a row (0 or above), zeros (-1), or row -(code + 2) of the final
states. Rows are overwritten as the memory goes on, so all of this is used while the memory is held. `store` below is
that memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import NoSuchRow, StaleEntry

from .parameters import Parameters
from .ragged import Ragged
from .schema import Schema

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


class DrawnWindows(NamedTuple):
    """Drawn entries as places instead of copies, and the sums they were drawn from, all of one moment.

    Shapes: n samples, K frame_stack.
    """

    numbers: Int64s
    """[n] the entries' numbers."""
    rows: Int64s
    """[n] the rows they are in."""
    prev_codes: Int64s
    """[n, K] frames of the window, oldest first."""
    next_codes: Int64s
    """[n, K] frames of the window's other end."""
    next_rows: Int64s
    """[n] frame code of the newest of these: where the next side's other columns come from."""
    weights: Float64s
    """[n] what sampling was proportional to, before the draw where its entries were used up (`max_times_sampled`)."""
    reward: NDArray[np.float32]
    """[n, *R] sums of the windows' discounted rewards."""
    discount: NDArray[np.float32]
    """[n, *R] gamma ** steps, or 0 where the episode terminated."""
    steps: NDArray[np.int32]
    """[n] entries between both ends."""
    ages: NDArray[np.float32]
    """[n] seconds since the entries were added, never negative."""
    model_versions: Int64s
    """[n] of the models that made them."""
    total_weight: float
    num_positive: int
    min_weight: float


class DrawnSequences(NamedTuple):
    """Drawn sequences as places instead of copies, and the sums they were drawn from, all of one moment.

    Shapes: n sequences of T entries, K frame_stack. Behind an episode's end frame codes are zeros (-1).
    """

    numbers: Int64s
    """[n] the numbers of the first entries."""
    state_codes: Int64s
    """[n, K + T] frames: K - 1 before the first entry, the entries' own, and the state after the last."""
    codes: Int64s
    """[n, T] rows of the entries."""
    weights: Float64s
    """[n] what sampling was proportional to, as in `DrawnWindows`."""
    discount: NDArray[np.float32]
    """[n, T, *R] gamma of each entry; 0 at a terminal one and behind the end."""
    steps: NDArray[np.int32]
    """[n] entries that are there."""
    burn_in: NDArray[np.uint32]
    """[n] entries at the begin that only warm up: 0 where an episode begins."""
    ages: NDArray[np.float32]
    """[n] seconds since the first entries were added, never negative."""
    model_versions: Int64s
    """[n] of the models that made the first entries."""
    total_weight: float
    num_positive: int
    min_weight: float


class WindowCutter:
    """Finds the frames of windows and of sequences, as some parameters cut them. Unchangeable, as these are."""

    def __init__(self, schema: Schema, parameters: Parameters) -> None:
        self._reward_shape, self._parameters = schema.reward_shape, parameters

    def windows(
        self, store: _core.EntryStore, numbers: Int64s, weights: Float64s, sums: tuple[float, int, float]
    ) -> DrawnWindows:
        """Where the samples of entries that were drawn are; `weights` and `sums` are of the draw."""
        count, rows, stack = len(numbers), numbers % store.capacity, self._parameters.frame_stack
        prev, next_ = np.empty((count, stack), np.int64), np.empty((count, stack), np.int64)
        next_rows = np.empty(count, np.int64)
        shape = (count, *self._reward_shape)
        returns = np.empty(shape, np.float32), np.empty(shape, np.float32)
        steps, ages, versions = np.empty(count, np.int32), np.empty(count, np.float32), np.empty(count, np.int64)
        store._windows(rows, prev, next_, next_rows, steps, *returns)
        store._facts(rows, ages, versions, None)
        facts = (*returns, steps, ages, versions)
        return DrawnWindows(numbers, rows, prev, next_, next_rows, weights, *facts, *sums)

    def codes(self, store: _core.EntryStore, rows: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """`prev_codes`, `next_codes` and `next_rows` of the `DrawnWindows` of these rows."""
        stack = self._parameters.frame_stack
        prev, next_ = np.empty((len(rows), stack), np.int64), np.empty((len(rows), stack), np.int64)
        next_rows = np.empty(len(rows), np.int64)
        store._windows(rows, prev, next_, next_rows, None, None, None)
        return prev, next_, next_rows

    def sequences(
        self, store: _core.EntryStore, numbers: Int64s, weights: Float64s, sums: tuple[float, int, float]
    ) -> DrawnSequences:
        """Where the sequences are that begin with entries that were drawn; `weights` and `sums` are of the draw."""
        count = len(numbers)
        steps = np.empty(count, np.int32)
        discount = np.empty((count, self._parameters.sequence_length, *self._reward_shape), np.float32)
        frames, codes, burn_in = self.cut(store, numbers, steps, discount)
        ages, versions = np.empty(count, np.float32), np.empty(count, np.int64)
        store._facts(codes[:, 0].copy(), ages, versions, None)
        return DrawnSequences(numbers, frames, codes, weights, discount, steps, burn_in, ages, versions, *sums)

    def cut(
        self, store: _core.EntryStore, numbers: Int64s, steps: NDArray[np.int32], discount: NDArray[np.float32]
    ) -> tuple[Int64s, Int64s, NDArray[np.uint32]]:
        """`state_codes`, `codes` and `burn_in` of the `DrawnSequences` that begin with these entries; fills the others,
        whose shape says how long they are. Raises StaleEntry.
        """
        length, stack = discount.shape[1], self._parameters.frame_stack
        frames = np.empty((len(numbers), stack + length), np.int64)
        codes, positions = np.empty((len(numbers), length), np.int64), np.empty(len(numbers), np.int64)
        check_stale(numbers, store._sequences(numbers, length, frames, codes, steps, discount, positions))
        return frames, codes, np.where(positions > 0, self._parameters.burn_in, 0).astype(np.uint32)


def check_stale(numbers: Int64s, bad: int) -> None:
    """Raise StaleEntry if one of the entries, at place `bad`, has left the memory; -1 is none."""
    if bad >= 0:
        raise StaleEntry(int(numbers[bad]), bad)


def check_rows(store: _core.EntryStore, rows: Int64s, bad: int) -> None:
    """Raise NoSuchRow if one of the rows, at place `bad`, holds no entry; -1 is none."""
    if bad >= 0:
        where = f"holds no entry of this memory of {store.capacity}"
        raise NoSuchRow("row", int(rows.flat[bad]), int(bad), where)


class FrameCopier:
    """Copies values of a schema's columns by frame code. Raises NoSuchRow for a code that cannot be."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.index = {name: i for i, name in enumerate(schema.names)}
        """Number of each column in the store."""

    def lengths(self, store: _core.EntryStore, name: str, codes: Int64s) -> NDArray[np.int32]:
        """How many elements a ragged column's values have, in the shape of the codes."""
        lengths = np.empty(codes.shape, np.int32)
        self._check(name, codes, store._copy_ragged(self.index[name], codes, lengths, None, -1))
        return lengths

    def copy(self, store: _core.EntryStore, name: str, codes: Int64s, out: NDArray[Any]) -> None:
        """Copy the values of N codes, of any shape, into `out`, contiguous and of just their bytes.

        These are [N, *F]; those of a ragged column stand one after the other.
        """
        if name in self.schema.ragged:
            bad = store._copy_ragged(self.index[name], codes, np.empty(codes.shape, np.int32), out, -1)
        else:
            bad = store._copy_column(self.index[name], codes, out)
        self._check(name, codes, bad)

    def ragged(self, store: _core.EntryStore, name: str, codes: Int64s) -> Ragged:
        """Values of a ragged column in the order of the codes, [n]."""
        column = self.schema[name]
        lengths = self.lengths(store, name, codes)
        made = np.empty((int(lengths.sum(dtype=np.int64)), *column.element), column.dtype)
        self.copy(store, name, codes, made)
        return Ragged(made, lengths)

    def _check(self, name: str, codes: Int64s, bad: int) -> None:
        if bad >= 0:
            raise NoSuchRow("frame code", int(codes.flat[bad]), int(bad), f"of column {name!r} is no row")
