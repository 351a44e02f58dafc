"""Samples as arrays: what a batch has of each column under some parameters, and the copies that fill it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from memoire import _core

from .batch import GatheredSamples, sequence_mask
from .parameters import Parameters
from .schema import Schema
from .windows import Float64s, FrameCopier, Int64s, WindowCutter, check_stale


class Sample(NamedTuple):
    """Drawn samples and the sums that their chances come from, all of one moment."""

    gathered: GatheredSamples
    weights: Float64s
    """[B] what sampling was proportional to, not rounded: over `total_weight` these are the chances."""
    total_weight: float
    num_positive: int
    min_weight: float
    """Least weight above 0, which costs a little; 0 unless `Parameters.normalize` is "global" and needs it."""


class BatchGatherer:
    """Which arrays a batch is of, and how they are filled from a memory. Unchangeable, as its parameters are.

    `store` in its methods is a memory of this schema that follows these parameters, and it is held.
    """

    def __init__(self, schema: Schema, parameters: Parameters, frames: FrameCopier, cutter: WindowCutter) -> None:
        self._schema, self._parameters, self._frames, self._cutter = schema, parameters, frames, cutter
        names = (
            schema.names if parameters.prev is None else parameters.prev,
            schema.states if parameters.next is None else parameters.next,
        )
        ragged = schema.ragged
        self._sides = tuple([self._row(name) for name in side if name not in ragged] for side in names)
        """For both sides of a batch each column's name, and the shape and dtype of its rows."""
        self._ragged_sides = tuple([name for name in side if name in ragged] for side in names)
        """The columns of both sides whose arrays are made only when lengths are known."""

    def _row(self, name: str) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
        """A column, and what one sample has of it."""
        column, stack = self._schema[name], self._parameters.frame_stack
        return name, (stack, *column.shape) if column.role == "state" else column.shape, column.dtype

    def allocate(self, size: int) -> GatheredSamples:
        """Uninitialised arrays for a batch of so many samples."""
        prev, next_ = self._sides
        if self._parameters.sequence_length:
            return self.allocate_sequences(size, self._parameters.sequence_length, self._parameters.sequence_first)
        return GatheredSamples(
            prev={name: _core.empty((size, *shape), dtype) for name, shape, dtype in prev},
            next={name: _core.empty((size, *shape), dtype) for name, shape, dtype in next_},
            reward=np.empty((size, *self._schema.reward_shape), np.float32),
            discount=np.empty((size, *self._schema.reward_shape), np.float32),
            steps=np.empty(size, np.int32),
            weight=np.empty(size, np.float32),
            ids=np.empty(size, np.int64),
            age=np.empty(size, np.float32),
            model_version=np.empty(size, np.int64),
        )

    def allocate_sequences(self, size: int, length: int, first: tuple[str, ...] = ()) -> GatheredSamples:
        """Arrays for sequences, of which the columns `first` have no time axis."""
        prev, _ = self._sides
        axes = dict.fromkeys(self._schema.states, (size, length + 1)) | dict.fromkeys(first, (size,))
        reward = (size, length, *self._schema.reward_shape)
        return GatheredSamples(
            prev={
                name: _core.empty((*axes.get(name, (size, length)), *shape), dtype)
                for name, shape, dtype in prev
                if name != self._schema.reward
            },
            next={},
            reward=np.zeros(reward, np.float32),
            discount=np.empty(reward, np.float32),
            steps=np.empty(size, np.int32),
            weight=np.empty(size, np.float32),
            ids=np.empty(size, np.int64),
            age=np.empty(size, np.float32),
            model_version=np.empty(size, np.int64),
            mask=np.empty((size, length), np.bool_),
            max_share=self._parameters.sequence_max_share,
        )

    def fill(self, store: _core.EntryStore, numbers: Int64s, made: GatheredSamples) -> GatheredSamples:
        """The samples of these entries in the arrays of `made`. Raises StaleEntry."""
        if made.mask is not None:
            self.fill_sequences(store, numbers, made, self._parameters.sequence_first)
            return made
        made.ids = numbers
        index = self._frames.index
        bad = store._gather(
            numbers,
            [(index[name], array) for name, array in made.prev.items()],
            [(index[name], array) for name, array in made.next.items()],
            made.reward,
            made.discount,
            made.steps,
            made.weight,
            made.age,
            made.model_version,
        )
        check_stale(numbers, bad)
        return self._fill_ragged_windows(store, numbers, made) if self._schema.ragged else made

    def episodes(self, store: _core.EntryStore, rows: Int64s, length: int) -> tuple[GatheredSamples, Int64s]:
        """`Memory.gather_episodes`: whole episodes that begin in these rows, and the rows of their entries."""
        numbers = store.contents()["meta"]["number"]
        made = self.allocate_sequences(len(rows), length)
        codes = self.fill_sequences(store, np.ascontiguousarray(numbers[rows]), made)
        made.ids = np.where(codes >= 0, numbers[codes], -1)
        return made, codes

    def fill_sequences(
        self, store: _core.EntryStore, numbers: Int64s, made: GatheredSamples, first: tuple[str, ...] = ()
    ) -> Int64s:
        """Fill `made`, allocated with the same `first`, with the sequences that begin with these entries; returns their
        rows. Raises StaleEntry.
        """
        frames, codes, burn_in = self._cutter.cut(store, numbers, made.steps, made.discount)
        stack = self._parameters.frame_stack
        stacks = frames if stack == 1 else np.ascontiguousarray(sliding_window_view(frames, stack, axis=1))
        begins = np.ascontiguousarray(codes[:, 0])
        places = dict.fromkeys(self._schema.states, stacks) | dict.fromkeys(first, begins)
        for name, out in made.prev.items():
            store._copy_column(self._frames.index[name], places.get(name, codes), out)
        if self._schema.reward is not None:
            store._copy_column(self._frames.index[self._schema.reward], codes, made.reward)
        weights = np.empty(len(numbers), np.float64)
        store._facts(begins, made.age, made.model_version, weights)
        made.ids, made.weight[:] = numbers, weights
        assert made.mask is not None
        if self._schema.ragged:
            places |= dict.fromkeys(self._schema.states, stacks.reshape(len(numbers), -1, stack))
            self._fill_ragged(store, made, [{name: places.get(name, codes) for name in self._ragged_sides[0]}, {}])
        sequence_mask(burn_in, made.steps, made.mask)
        return codes

    def _fill_ragged_windows(self, store: _core.EntryStore, numbers: Int64s, made: GatheredSamples) -> GatheredSamples:
        """The ragged columns of both ends of these entries' windows."""
        rows = numbers % store.capacity
        prev_codes, next_codes, next_rows = self._cutter.codes(store, rows)
        states = self._schema.states
        ends = ((prev_codes, rows), (next_codes, next_rows))
        return self._fill_ragged(
            store,
            made,
            [
                {name: frames if name in states else newest for name in side}
                for side, (frames, newest) in zip(self._ragged_sides, ends, strict=True)
            ],
        )

    def _fill_ragged(
        self, store: _core.EntryStore, made: GatheredSamples, codes: Sequence[Mapping[str, Int64s]]
    ) -> GatheredSamples:
        """Add the ragged columns of both sides, which have a value for each of these frame codes.

        Both sides are as wide as the longest value among them, and at least 1.
        """
        found = [{name: self._frames.lengths(store, name, where) for name, where in side.items()} for side in codes]
        sides = ((made.prev, made.prev_lengths), (made.next, made.next_lengths))
        for (columns, lengths_of), side, lengths in zip(sides, codes, found, strict=True):
            for name, where in side.items():
                column = self._schema[name]
                longest = max(int(each[name].max(initial=1)) for each in found if name in each)
                out = _core.empty((*where.shape, longest, *column.element), column.dtype)
                store._copy_ragged(self._frames.index[name], where, lengths[name], out, longest)
                columns[name], lengths_of[name] = out, lengths[name]
        return made
