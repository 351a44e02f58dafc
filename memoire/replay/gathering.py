"""Gathering of samples: the places of their frames in a memory, and copies of these frames in a batch's arrays.

Places are those of windows, with a frame stack and several steps, and of sequences.

A *frame code* is the place of a column's value: a row (0 or above), zeros (-1), or row -(code + 2) of the final states.
Rows are overwritten as entries are added, so the memory is held while codes are used. `store` below is that memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from memoire import _core
from memoire.errors import NoSuchRow, StaleEntry

from .batch import GatheredSamples, RowForm, sequence_mask
from .columns import Ragged
from .conversion import check_out, entry_numbers
from .parameters import Parameters
from .schema import Schema

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


class DrawnWindows(NamedTuple):
    """Places of drawn entries, and the sums that they were drawn from, all of one moment.

    Shapes: n samples, K frame_stack.
    """

    numbers: Int64s
    """[n] numbers of the entries."""
    rows: Int64s
    """[n] rows of the entries."""
    prev_codes: Int64s
    """[n, K] frames of the window, oldest first."""
    next_codes: Int64s
    """[n, K] frames of the window's other end."""
    next_rows: Int64s
    """[n] frame codes of the newest frames of `next_codes`: the places of the next side's other columns."""
    weights: Float64s
    """[n] weights that sampling was proportional to; for entries that it used up, the weights before the draw."""
    reward: NDArray[np.float32]
    """[n, *R] sums of the windows' discounted rewards."""
    discount: NDArray[np.float32]
    """[n, *R] gamma ** steps, or 0 where the episode terminated."""
    steps: NDArray[np.int32]
    """[n] entries between both ends."""
    ages: NDArray[np.float32]
    """[n] seconds since the entries were added, never negative."""
    model_versions: Int64s
    """[n] versions of the models that made the entries."""
    total_weight: float
    num_positive: int
    min_weight: float


class DrawnSequences(NamedTuple):
    """Places of drawn sequences, and the sums that they were drawn from, all of one moment.

    Shapes: n sequences of T entries, K frame_stack. Behind an episode's end frame codes are zeros (-1).
    """

    numbers: Int64s
    """[n] numbers of the first entries."""
    state_codes: Int64s
    """[n, K + T] frames: K - 1 before the first entry, the entries' own, and the state after the last."""
    codes: Int64s
    """[n, T] rows of the entries."""
    weights: Float64s
    """[n] weights that sampling was proportional to, as in `DrawnWindows`."""
    discount: NDArray[np.float32]
    """[n, T, *R] gamma of each entry; 0 at a terminal one and behind the end."""
    steps: NDArray[np.int32]
    """[n] real entries of each sequence."""
    burn_in: NDArray[np.uint32]
    """[n] entries at the start that only warm up; 0 at an episode's start."""
    ages: NDArray[np.float32]
    """[n] seconds since the first entries were added, never negative."""
    model_versions: Int64s
    """[n] versions of the models that made the first entries."""
    total_weight: float
    num_positive: int
    min_weight: float


def check_stale(numbers: Int64s, bad: int) -> None:
    """Raise StaleEntry if the entry at index `bad` was evicted; -1 is none."""
    if bad >= 0:
        raise StaleEntry(int(numbers[bad]), bad)


def check_rows(store: _core.EntryStore, rows: Int64s, bad: int) -> None:
    """Raise NoSuchRow if the row at index `bad` holds no entry; -1 is none."""
    if bad >= 0:
        where = f"holds no entry of this memory of {store.capacity}"
        raise NoSuchRow("row", int(rows.flat[bad]), int(bad), where)


class RowGatherer(_core.EntryStore):
    """Base class of `Memory` that copies rows by their place, for caches and for single entries."""

    schema: Schema
    _parameters: Parameters
    _dimensions: int
    """Number of dimensions of a reward."""

    # Values by frame code

    def lengths(self, name: str, codes: Int64s) -> NDArray[np.int32]:
        """Return the element counts of a ragged column's values, by frame code and in the shape of the codes.

        Raises NoSuchRow for an invalid code.
        """
        lengths = np.empty(codes.shape, np.int32)
        self._check_codes(name, codes, self._copy_ragged(self.schema.names.index(name), codes, lengths, None, -1))
        return lengths

    def copy_frames(self, name: str, sources: Int64s, out: NDArray[Any]) -> None:
        """Copy a column's rows by frame code, int64 [N], into `out`, contiguous and exactly as large: [N, *F], or the
        values of a ragged column one after the other.

        Code -1 gives zeros. A final state's code gives the state in state columns, the bootstrap value in a value
        column, and zeros in other columns. Raises NoSuchRow for an invalid code.
        """
        codes, index = np.ascontiguousarray(sources, np.int64), self.schema.names.index(name)
        if name in self.schema.ragged:
            bad = self._copy_ragged(index, codes, np.empty(codes.shape, np.int32), out, -1)
        else:
            bad = self._copy_column(index, codes, out)
        self._check_codes(name, codes, bad)

    copy_rows = copy_frames

    def ragged(self, name: str, codes: Int64s) -> Ragged:
        """Return values of a ragged column by frame code, as `copy_frames` takes them, in the order of the codes.

        Raises NoSuchRow for an invalid code.
        """
        flat_codes, column = np.ascontiguousarray(codes, np.int64).reshape(-1), self.schema[name]
        with self.held():
            lengths = self.lengths(name, flat_codes)
            values = np.empty((int(lengths.sum(dtype=np.int64)), *column.element), column.dtype)
            self.copy_frames(name, flat_codes, values)
        return Ragged(values, lengths)

    def _check_codes(self, name: str, codes: Int64s, bad: int) -> None:
        if bad >= 0:
            raise NoSuchRow("frame code", int(codes.flat[bad]), int(bad), f"of column {name!r} is not a row")

    def unique_frames(
        self, prev_codes: Int64s | None, next_codes: Int64s | None, ordered: bool
    ) -> tuple[Int64s, NDArray[np.uint32], NDArray[np.uint32]]:
        """Return each distinct frame, int64 [U], and its index for each frame of the windows, uint32 in their shape."""
        return _core.unique_frames(prev_codes, next_codes, ordered)

    # Facts of rows

    def returns(
        self,
        rows: Int64s,
        out_reward: NDArray[np.float32],
        out_discount: NDArray[np.float32],
        out_steps: NDArray[np.int32],
    ) -> None:
        """Fill discounted rewards and discounts float32 [N, *R], and steps int32 [N], of the windows of rows [N]."""
        where = np.ascontiguousarray(rows, np.int64)
        places = ((out_reward, np.float32, self._dimensions), (out_discount, np.float32, self._dimensions))
        for out, dtype, width in (*places, (out_steps, np.int32, 1)):
            check_out(out, dtype, where.size * width)
        check_rows(self, where, self._windows(where, None, None, None, out_steps, out_reward, out_discount))

    def fill_ages(self, rows: Int64s, out: NDArray[np.float32]) -> None:
        """Fill the seconds since the entries of rows [N] were added, float32 [N]."""
        where = np.ascontiguousarray(rows, np.int64)
        check_out(out, np.float32, where.size)
        check_rows(self, where, self._facts(where, out, None, None))

    def model_versions(self, rows: Int64s, out: Int64s) -> None:
        """Fill the versions of the models that made the entries of rows [N], int64 [N]."""
        where = np.ascontiguousarray(rows, np.int64)
        check_out(out, np.int64, where.size)
        check_rows(self, where, self._facts(where, None, out, None))

    def rewards(self, numbers: ArrayLike, length: int) -> NDArray[np.float32]:
        """Return rewards of `length` entries from each entry on, by number [B]: [B, length, *R]; 0 behind an episode's
        end.

        Raises StaleEntry if an entry was evicted.
        """
        wanted = entry_numbers(numbers)
        values = np.zeros((len(wanted), length, *self.schema.reward_shape), np.float32)
        if self.schema.reward is not None:
            with self.held():
                _, codes, _ = self.cut_sequences(wanted, np.empty(len(wanted), np.int32), np.empty_like(values))
                self.copy_frames(self.schema.reward, codes, values)
        return values

    # Places of samples, while the memory is held

    def windows_of(self, numbers: Int64s, weights: Float64s, sums: tuple[float, int, float]) -> DrawnWindows:
        """Return the places of the samples of drawn entries; `weights` and `sums` are those of the draw."""
        rows, shape = numbers % self.capacity, (len(numbers), *self.schema.reward_shape)
        facts = np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(len(numbers), np.int32)
        codes = self.window_codes(rows, *facts)
        ages, versions = self._ages_and_versions(rows)
        return DrawnWindows(numbers, rows, *codes, weights, *facts, ages, versions, *sums)

    def window_codes(
        self,
        rows: Int64s,
        reward: NDArray[np.float32] | None = None,
        discount: NDArray[np.float32] | None = None,
        steps: NDArray[np.int32] | None = None,
    ) -> tuple[Int64s, Int64s, Int64s]:
        """Return `prev_codes`, `next_codes` [N, K] and `next_rows` [N] of rows [N]; fill the arrays that are passed."""
        shape = len(rows), self._parameters.frame_stack
        prev, next_, next_rows = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(len(rows), np.int64)
        self._windows(rows, prev, next_, next_rows, steps, reward, discount)
        return prev, next_, next_rows

    def sequences_of(self, numbers: Int64s, weights: Float64s, sums: tuple[float, int, float]) -> DrawnSequences:
        """Return the places of sequences that begin with drawn entries; `weights` and `sums` are those of the draw."""
        shape = len(numbers), self._parameters.sequence_length, *self.schema.reward_shape
        steps, discount = np.empty(len(numbers), np.int32), np.empty(shape, np.float32)
        frames, codes, burn_in = self.cut_sequences(numbers, steps, discount)
        facts = steps, burn_in, *self._ages_and_versions(codes[:, 0].copy())
        return DrawnSequences(numbers, frames, codes, weights, discount, *facts, *sums)

    def cut_sequences(
        self, numbers: Int64s, steps: NDArray[np.int32], discount: NDArray[np.float32]
    ) -> tuple[Int64s, Int64s, NDArray[np.uint32]]:
        """Return `state_codes`, `codes` and `burn_in` of the `DrawnSequences` that begin with these entries; fill
        `steps` and `discount`, whose shape defines the length. Raises StaleEntry.
        """
        length, stack = discount.shape[1], self._parameters.frame_stack
        frames = np.empty((len(numbers), stack + length), np.int64)
        codes, positions = np.empty((len(numbers), length), np.int64), np.empty(len(numbers), np.int64)
        check_stale(numbers, self._sequences(numbers, length, frames, codes, steps, discount, positions))
        return frames, codes, np.where(positions > 0, self._parameters.burn_in, 0).astype(np.uint32)

    def _ages_and_versions(self, rows: Int64s) -> tuple[NDArray[np.float32], Int64s]:
        ages, versions = np.empty(len(rows), np.float32), np.empty(len(rows), np.int64)
        self._facts(rows, ages, versions, None)
        return ages, versions


class DrawnSamples(NamedTuple):
    """Drawn samples, and the sums that their probabilities are computed from, all of one moment."""

    gathered: GatheredSamples
    weights: Float64s
    """[B] weights that sampling was proportional to, as float64; divided by `total_weight` they are probabilities."""
    total_weight: float
    num_positive: int
    min_weight: float
    """Smallest weight above 0; 0 unless `Parameters.normalize` is "global", since computing it has a cost."""


class BatchGatherer:
    """Layout of a batch's arrays for one schema and parameters, and the code that fills them. Immutable.

    `store` in its methods is a memory of this schema with these parameters, held by the caller.
    """

    def __init__(self, schema: Schema, parameters: Parameters) -> None:
        self._schema, self._parameters = schema, parameters
        self._index = {name: i for i, name in enumerate(schema.names)}
        names = (
            schema.names if parameters.prev is None else parameters.prev,
            schema.states if parameters.next is None else parameters.next,
        )
        ragged = schema.ragged
        self._sides = tuple([self._row(name) for name in side if name not in ragged] for side in names)
        """Name, row shape and row dtype of each column at both ends of a window."""
        self._ragged_sides = tuple([name for name in side if name in ragged] for side in names)
        """Ragged columns at both ends, whose arrays are made once lengths are known."""

    def _row(self, name: str) -> RowForm:
        """Return a column's name, and shape and dtype per sample."""
        column, stack = self._schema[name], self._parameters.frame_stack
        return name, (stack, *column.shape) if column.role == "state" else column.shape, column.dtype

    def allocate(self, size: int) -> GatheredSamples:
        """Return uninitialised arrays for a batch of so many samples."""
        if self._parameters.sequence_length:
            return self.allocate_sequences(size, self._parameters.sequence_length, self._parameters.sequence_first)
        return GatheredSamples.empty(size, self._sides, self._schema.reward_shape)

    def allocate_sequences(self, size: int, length: int, first: tuple[str, ...] = ()) -> GatheredSamples:
        """Return arrays for sequences; the columns `first` have no time axis."""
        schema = self._schema
        axes = dict.fromkeys(schema.states, (length + 1,)) | dict.fromkeys(first, ())
        prev = [(name, axes.get(name, (length,)) + shape, dtype) for name, shape, dtype in self._sides[0]]
        prev = [form for form in prev if form[0] != schema.reward]
        samples = GatheredSamples.empty(size, (prev, ()), schema.reward_shape, length=length)
        samples.max_share = self._parameters.sequence_max_share
        return samples

    def fill(self, store: RowGatherer, numbers: Int64s, samples: GatheredSamples) -> GatheredSamples:
        """Fill `samples` with the samples of these entries, and return it. Raises StaleEntry."""
        if samples.mask is not None:
            self.fill_sequences(store, numbers, samples, self._parameters.sequence_first)
            return samples
        samples.ids = numbers
        index = self._index
        bad = store._gather(
            numbers,
            [(index[name], array) for name, array in samples.prev.items()],
            [(index[name], array) for name, array in samples.next.items()],
            samples.reward,
            samples.discount,
            samples.steps,
            samples.weight,
            samples.age,
            samples.model_version,
        )
        check_stale(numbers, bad)
        return self._fill_ragged_windows(store, numbers, samples) if self._schema.ragged else samples

    def episodes(self, store: RowGatherer, rows: Int64s, length: int) -> tuple[GatheredSamples, Int64s]:
        """Return (gathered, rows) of whole episodes that begin in these rows, as `Memory.gather_episodes` does."""
        numbers = store.contents()["meta"]["number"]
        samples = self.allocate_sequences(len(rows), length)
        codes = self.fill_sequences(store, np.ascontiguousarray(numbers[rows]), samples)
        samples.ids = np.where(codes >= 0, numbers[codes], -1)
        return samples, codes

    def fill_sequences(
        self, store: RowGatherer, numbers: Int64s, samples: GatheredSamples, first: tuple[str, ...] = ()
    ) -> Int64s:
        """Fill `samples`, allocated with the same `first`, with the sequences that begin with these entries. Returns
        their rows. Raises StaleEntry.
        """
        frames, codes, burn_in = store.cut_sequences(numbers, samples.steps, samples.discount)
        stack = self._parameters.frame_stack
        stacks = frames if stack == 1 else np.ascontiguousarray(sliding_window_view(frames, stack, axis=1))
        begins = np.ascontiguousarray(codes[:, 0])
        places = dict.fromkeys(self._schema.states, stacks) | dict.fromkeys(first, begins)
        for name, out in samples.prev.items():
            store._copy_column(self._index[name], places.get(name, codes), out)
        if self._schema.reward is not None:
            store._copy_column(self._index[self._schema.reward], codes, samples.reward)
        weights = np.empty(len(numbers), np.float64)
        store._facts(begins, samples.age, samples.model_version, weights)
        samples.ids, samples.weight[:] = numbers, weights
        assert samples.mask is not None
        if self._schema.ragged:
            places |= dict.fromkeys(self._schema.states, stacks.reshape(len(numbers), -1, stack))
            self._fill_ragged(store, samples, [{name: places.get(name, codes) for name in self._ragged_sides[0]}, {}])
        sequence_mask(burn_in, samples.steps, samples.mask)
        return codes

    def _fill_ragged_windows(self, store: RowGatherer, numbers: Int64s, samples: GatheredSamples) -> GatheredSamples:
        """Add the ragged columns of both ends of these entries' windows."""
        rows = numbers % store.capacity
        prev_codes, next_codes, next_rows = store.window_codes(rows)
        states = self._schema.states
        ends = ((prev_codes, rows), (next_codes, next_rows))
        return self._fill_ragged(
            store,
            samples,
            [
                {name: frames if name in states else newest for name in side}
                for side, (frames, newest) in zip(self._ragged_sides, ends, strict=True)
            ],
        )

    def _fill_ragged(
        self, store: RowGatherer, samples: GatheredSamples, codes: Sequence[Mapping[str, Int64s]]
    ) -> GatheredSamples:
        """Add the ragged columns of both sides, with the values of these frame codes.

        Columns of both sides are as wide as the longest value of either side, and at least 1.
        """
        lengths_by_side = [{name: store.lengths(name, where) for name, where in side.items()} for side in codes]
        sides = ((samples.prev, samples.prev_lengths), (samples.next, samples.next_lengths))
        for (columns, lengths_of), side, lengths in zip(sides, codes, lengths_by_side, strict=True):
            for name, where in side.items():
                column = self._schema[name]
                longest = max(int(each[name].max(initial=1)) for each in lengths_by_side if name in each)
                out = _core.empty((*where.shape, longest, *column.element), column.dtype)
                store._copy_ragged(self._index[name], where, lengths[name], out, longest)
                columns[name], lengths_of[name] = out, lengths[name]
        return samples
