"""The memory: entries of episodes, their weights, and the samples drawn from them. It has never heard of a socket.

Storage and loops are `_core.EntryStore`'s; here arguments are checked, values converted, refusals explained and batches
laid out. `Buffer`, clients and servers are built on this class.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from memoire import _core
from memoire.errors import (
    EmptyEpisodeError,
    EmptyMemory,
    EntryError,
    EpisodeClosedError,
    EpisodeTooLong,
    NoSuchRow,
    ParameterError,
    StaleEntry,
    UsedUp,
    WrongType,
)

from .batch import Gathered, place, sequence_mask
from .columns import Column
from .guarded import Guarded
from .parameters import PRIORITIZATIONS, STARTS, Parameters, reward_size
from .ragged import Ragged
from .schema import Schema
from .values import exact, finite, form

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

_POINTER_BYTES = 8  # what a row has of a ragged column
MOST_LANES = 1 << 20
MOST_ROWS = (1 << 31) - 256
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Sample(NamedTuple):
    """Drawn samples and the sums that their chances come from, all of one moment."""

    gathered: Gathered
    weights: Float64s
    """[B] what sampling was proportional to, not rounded: over `total_weight` these are the chances."""
    total_weight: float
    num_positive: int
    min_weight: float
    """Least weight above 0, which costs a little; 0 unless `Parameters.normalize` is "global" and needs it."""


class Windows(NamedTuple):
    """Drawn entries as places instead of copies, and the sums they were drawn from, all of one moment.

    Shapes: n samples, K frame_stack. A frame code is a row (0 or above), zeros (-1), or row -(code + 2) of the final
    states. Rows are overwritten as the memory goes on: use them inside one `held()`.
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


class Sequences(NamedTuple):
    """Drawn sequences as places instead of copies, and the sums they were drawn from, all of one moment.

    Shapes: n sequences of T entries, K frame_stack. Frame codes are as in `Windows`; behind an episode's end they are
    zeros (-1).
    """

    numbers: Int64s
    """[n] the numbers of the first entries."""
    state_codes: Int64s
    """[n, K + T] frames: K - 1 before the first entry, the entries' own, and the state after the last."""
    codes: Int64s
    """[n, T] rows of the entries."""
    weights: Float64s
    """[n] what sampling was proportional to, as in `Windows`."""
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


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()
_held_for_fork: list[_core.Moment] = []


def _before_fork() -> None:
    # A child gets a copy of every memory, from a moment in which none was being changed; and no lock that a thread
    # holds which the child does not have.
    for memory in list(_memories):
        moment = memory.held()
        moment.__enter__()
        _held_for_fork.append(moment)


def _after_fork() -> None:
    while _held_for_fork:
        _held_for_fork.pop().__exit__(None, None, None)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class Memory(_core.EntryStore, Guarded):
    """Room for exactly `capacity` entries; whole episodes leave, oldest first, when their rows are needed.

    One open episode for each lane; entries can be drawn once their episode is closed, or with `live` as soon as their
    window is complete. Every method may be called from several threads, and loops run without the GIL. A process forked
    from this one has a copy that goes its own way.

    Args:
        schema: The columns of an entry.
        capacity: Entries that fit, 1 or more.
        parameters: How entries are weighed and samples cut; changed by `configure`.
        live: Whether entries of open episodes can be drawn.
        seed: Of the draws; None is different each time.
        page_rows: Rows that a lane takes at once, a power of two; None chooses.
        ragged_limit: Bytes that values of ragged columns may take (`ragged_bytes`): the oldest closed episodes make
            room, and what does not fit beside the open ones is refused. 0 is any.

    Raises:
        ParameterError: an argument is outside its range, or does not fit the schema.
    """

    def __init__(
        self,
        schema: Schema,
        capacity: int,
        parameters: Parameters | None = None,
        *,
        live: bool = False,
        seed: int | None = None,
        page_rows: int | None = None,
        ragged_limit: int = 0,
    ) -> None:
        parameters = Parameters() if parameters is None else parameters
        if not isinstance(schema, Schema):
            raise WrongType("schema", "a memoire.Schema", type(schema).__name__, _MAKE_ONE)
        if not isinstance(parameters, Parameters):
            raise WrongType("parameters", "memoire.Parameters or None", type(parameters).__name__)
        if seed is not None:
            _check_whole("seed", seed, 0, 1 << 256)
        _check_whole("capacity", capacity, 1, MOST_ROWS)
        if page_rows is None:
            # Small enough that a thousand lanes each find some, large enough that adding seldom takes one.
            page_rows = 1 << min(max(int(capacity) // 4096, 1).bit_length() - 1, 8)
        if page_rows < 1 or page_rows & (page_rows - 1):
            raise ParameterError("page_rows", page_rows, "a power of two")
        parameters.check_for(schema)
        self.schema = schema
        self.live = live
        self._dimensions = reward_size(schema)
        self._reward_shape = schema[schema.reward].shape if schema.reward is not None else ()
        self._index = {name: i for i, name in enumerate(schema.names)}
        columns = [_storage(schema[name], int(capacity)) for name in schema.names]
        seeds = np.random.SeedSequence(seed).generate_state(4, np.uint64).tolist()
        self.generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
        """Random numbers for draws that are not the loops', while the memory is held."""
        self._setup(columns, int(capacity), page_rows, self._dimensions, live, seeds)
        self._parameters = parameters
        self._apply(parameters)
        self.limit_ragged(ragged_limit)
        _memories.add(self)
        self._guard()

    # What there is

    @property
    def parameters(self) -> Parameters:
        """How entries are weighed and samples cut, now."""
        return self._parameters

    @property
    def total_weight(self) -> float:
        """Sum of all weights: an entry's chance is its weight over this."""
        return self._sums()[0]

    @property
    def num_positive(self) -> int:
        """Entries that can be drawn."""
        return self._sums()[1]

    @property
    def min_weight(self) -> float:
        """Least weight above 0; 0 where there is none."""
        return self.sums()[2]

    def sums(self) -> tuple[float, int, float]:
        """(total_weight, num_positive, min_weight) of one moment."""
        total, positive, least = self._sums()
        return total, positive, least if positive else 0.0

    def info(self) -> dict[str, Any]:
        """What is stored and set, as plain numbers and strings."""
        total, positive, least = self.sums()
        return {
            "capacity": self.capacity,
            "num_entries": self.num_entries,
            "num_episodes": self.num_episodes,
            "generated": self.generated,
            "total_weight": total,
            "num_positive": positive,
            "min_weight": least,
            "max_priority": self.max_priority,
            "newest_model": self.newest_model,
            "entry_bytes": self.schema.entry_bytes,
            "ragged_bytes": self.ragged_bytes,
            "live": self.live,
            **self._parameters.to_wire(),
        }

    def __repr__(self) -> str:
        return f"Memory({self.num_entries} of {self.capacity} entries, {self.num_episodes} episodes, {self.schema!r})"

    def limit_ragged(self, ragged_limit: int) -> None:
        """Allow values of ragged columns so many bytes from now on, 0 is any; the oldest closed episodes make room."""
        _check_whole("ragged_limit", ragged_limit, 0, 1 << 62)
        self._ragged_limit = int(ragged_limit)
        self._limit_ragged(self._ragged_limit)

    # Episodes

    def open(self, lane: int = 0) -> None:
        """Open an episode in a lane; the entries of an unclosed one there are cleared and their room is given back."""
        _check_whole("lane", lane, 0, MOST_LANES - 1)
        self._open(lane)

    def open_length(self, lane: int = 0) -> int:
        """Entries in a lane's open episode; -1 where none is open."""
        return self._open_length(lane)

    def open_return(self, lane: int = 0) -> Float64s:
        """Sum of the rewards in a lane's open episode so far, not discounted: [*R]; 0 where nothing is open."""
        total = np.empty(self._dimensions, np.float64)
        with self.held():
            self._open_return(lane, total)
        return total.reshape(self._reward_shape)

    def add_many(
        self, lanes: ArrayLike, values: Sequence[Any], init_w: ArrayLike = 1.0, model_version: int = 0
    ) -> Int64s:
        """Add one entry to each of several lanes' open episodes, all or none, and return their numbers.

        Args:
            lanes: Different lanes, int64 [n].
            values: A value for each column but the return column, in the schema's order: [n, *F].
            init_w: As in `add`: a number, or float32 [n].
            model_version: As in `add`.

        Raises: as `add`, naming the lane.
        """
        where = np.ascontiguousarray(lanes, np.int64)
        if where.ndim != 1:
            raise ParameterError("lanes", where.shape, "of one dimension")
        numbers = np.empty(len(where), np.int64)
        arrays = self._exact_columns(values, (len(where),))
        weights = init_weights(init_w, len(where))
        status, lane = self._add_many(where, arrays, weights, numbers, model_version)
        if status == _core.REPEATED:
            raise ParameterError("lanes", lane, "each at most once in a call")
        if status < 0:
            self._refuse(status, lane, arrays)
        return numbers

    def extend(self, lane: int, values: Sequence[Any], init_w: ArrayLike = 1.0, model_version: int = 0) -> Int64s:
        """Add T consecutive entries to a lane's open episode, all or none, and return their numbers.

        Args:
            lane: Which open episode.
            values: A value for each column but the return column, in the schema's order: [T, *F].
            init_w: As in `add`: a number, or float32 [T].
            model_version: As in `add`.

        Raises: as `add`.
        """
        if len(values) == 0:
            raise ParameterError("values", values, f"one for each of the columns {', '.join(self.schema.entry_names)}")
        count = _count_of(values[0])
        arrays = self._exact_columns(values, (count,))
        numbers = np.empty(count, np.int64)
        status = self._extend(lane, arrays, init_weights(init_w, count), numbers, model_version)
        if status < 0:
            self._refuse(status, lane, arrays)
        return numbers

    def close(
        self,
        lane: int = 0,
        *,
        multiplier: float = 1.0,
        update_value: bool = True,
        update_weight: bool = True,
        final_state: Any = None,
        terminated: bool | None = None,
        bootstrap_value: ArrayLike | None = None,
    ) -> None:
        """Close a lane's open episode: compute returns, priorities and weights.

        With lambda `mix_lambda` and gamma `discount_factor`, per reward dimension, for the last entry T and before:

            q_T = r_T + gamma * bootstrap_value
            q_t = r_t + gamma * (lambda * q_{t+1} + (1 - lambda) * v_{t+1})
            priority = sum_j reward_coeff_j * |q_j - v_j|         without a value column: the largest so far, 1 at first
            weight = init_w * multiplier * priority ** priority_exponent

        Weights are 0 for the first frame_stack - 1 entries (start="skip") and, unless the end is known, for the last
        multi_step. A final state or terminated=True make it known: then windows at the end are shorter and reach it.

        Args:
            lane: Which open episode.
            multiplier: Scales the weights of all its entries; finite and at least 0.
            update_value: Whether the return column is computed; else it stays 0.
            update_weight: Whether priorities count; else weight = init_w * multiplier, until a learner reports one.
            final_state: The state after the last action: an array for one state column, a tuple in the order of
                `schema.states`, or a mapping by name.
            terminated: True: nothing comes after, `discount` is 0 there; False: cut off, learners bootstrap from
                the final state. None is False where there is a final state, else unknown.
            bootstrap_value: Value of the final state, a number or of the reward's shape; None is 0.

        Raises:
            EpisodeClosedError, EmptyEpisodeError: there is nothing to close.
            ParameterError, EntryError: an argument does not fit. The episode stays open.
        """
        multiplier, bootstrap, states = self._ending(multiplier, final_state, terminated, bootstrap_value)
        ended = states is not None or bool(terminated)
        with self.held():
            length = self._open_length(lane)
            if length < 0:
                raise EpisodeClosedError("close the episode", lane)
            if length == 0:
                raise EmptyEpisodeError(lane)
            self._close(lane, multiplier, update_value, update_weight, ended, bool(terminated), states, bootstrap)

    def _ending(
        self, multiplier: float, final_state: Any, terminated: bool | None, bootstrap_value: ArrayLike | None
    ) -> tuple[float, NDArray[np.float32], list[NDArray[Any]] | None]:
        """Arguments of `close`, checked: the multiplier, the final state's value float32 [size], and exact states."""
        multiplier = _finite("multiplier", multiplier)
        if terminated is not None and not isinstance(terminated, (bool, np.bool_)):
            raise ParameterError("terminated", terminated, "True, False or None")
        bootstrap = self._bootstrap(bootstrap_value)
        if terminated and bootstrap.any():
            raise ParameterError("bootstrap_value", bootstrap_value, "0 or None where the episode terminated")
        return multiplier, bootstrap, None if final_state is None else self._final_states(final_state)

    def configure(self, parameters: Parameters | None = None, **changes: Any) -> None:
        """Take other parameters, and weigh and cut everything stored by them.

        Episodes closed without update_weight keep their weights, those closed without update_value their returns, and
        entries that a learner has reported on their priorities. Windows that are no longer complete weigh 0. A lower
        `max_episode` lets the oldest leave.

        Raises:
            ParameterError: nothing was changed.
        Cost: one pass over all entries where weights or windows change; other threads wait for it.
        """
        with self.held():
            new = (self._parameters if parameters is None else parameters).replace(**changes)
            new.check_for(self.schema)
            self._apply(new)
            self._parameters = new

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts, as from the versions of
        entries; older ones change nothing.

        Raises:
            ParameterError: that is no version.
        """
        _check_whole("version", version, 0, (1 << 62))
        super().saw_model(int(version))

    def _apply(self, new: Parameters) -> None:
        gamma, coeff = (_broadcast(each, self._dimensions) for each in (new.discount_factor, new.reward_coeff))
        start = STARTS.index(new.start)
        windows = (new.frame_stack, new.sequence_length or new.multi_step, start, new.max_episode)
        stride = new.sequence_length - new.sequence_overlap if new.sequence_length else 0
        chances = (PRIORITIZATIONS.index(new.prioritization), new.stratified)
        self._configure(
            new.priority_exponent,
            new.mix_lambda,
            *windows,
            gamma,
            coeff,
            *chances,
            stride,
            new.burn_in,
            new.sequence_max_share,
            self._limit(
                new.max_times_sampled, new.max_age or 0.0, -1 if new.max_model_lag is None else new.max_model_lag
            ),
        )
        names = (
            self.schema.names if new.prev is None else new.prev,
            self.schema.states if new.next is None else new.next,
        )
        ragged = self.schema.ragged
        self._sides = tuple([self._row(name, new.frame_stack) for name in side if name not in ragged] for side in names)
        """For both sides of a batch, under the lock: each column's name, and the shape and dtype of its rows."""
        self._ragged_sides = tuple([name for name in side if name in ragged] for side in names)
        """The columns of both sides whose arrays are made only when lengths are known."""

    # Drawing

    def draw(self, count: int, fractions: ArrayLike | None = None) -> Int64s:
        """Numbers int64 [count] of entries, drawn with replacement: P = weight / total_weight. With `max_times_sampled`
        one after the other: an entry that was drawn so often weighs 0 from then on, also within this draw.

        Args:
            count: How many, at least 1.
            fractions: Where in the cumulative weights to draw, [count] in [0, 1); None draws at random.

        Raises:
            EmptyMemory: no entry has a weight above 0. UsedUp, one of these: all together may not be drawn so often.
        """
        _check_whole("count", count, 1, MOST_ROWS)
        return self._drawn(count, fractions, None)

    def _drawn(self, count: int, fractions: ArrayLike | None, weights: Float64s | None) -> Int64s:
        """`draw`, with what the chances were proportional to in `weights`."""
        if fractions is not None:
            fractions = np.ascontiguousarray(fractions, np.float64)
            if fractions.shape != (count,) or not ((fractions >= 0.0) & (fractions < 1.0)).all():
                raise ParameterError("fractions", fractions, f"{count} numbers in [0, 1)")
        with self.held():
            numbers = self._draw(count, fractions, weights)
            if numbers is None:
                left = self.draws_left
                raise (
                    UsedUp(count, left, self._parameters.max_times_sampled)
                    if left > 0
                    else EmptyMemory(self.num_entries)
                )
            return numbers

    def weights(self, numbers: ArrayLike) -> Float64s:
        """Weights float64 [B] of entries by number. Raises StaleEntry where one has left."""
        wanted = _numbers(numbers)
        weights = np.empty(len(wanted), np.float64)
        self._refuse_stale(wanted, self._weights(wanted, weights))
        return weights

    def gather(self, numbers: ArrayLike) -> Gathered:
        """Copies of the samples of entries by number: both ends of their windows and the discounted rewards between.

        Raises StaleEntry where an entry has left the memory since it was drawn; `sample` cannot meet that.
        """
        wanted = _numbers(numbers)
        with self.held():
            return self._filled(wanted, self._allocate(len(wanted)))

    def ragged(self, name: str, codes: Int64s) -> Ragged:
        """Values of a ragged column by frame code, as `copy_frames` takes them, in the order of the codes.

        Raises NoSuchRow for a code that cannot be.
        """
        where = np.ascontiguousarray(codes, np.int64).reshape(-1)
        column = self.schema[name]
        with self.held():
            lengths = self.lengths(name, where)
            made = np.empty((int(lengths.sum(dtype=np.int64)), *column.element), column.dtype)
            self.copy_frames(name, where, made)
        return Ragged(made, lengths)

    def lengths(self, name: str, codes: Int64s) -> NDArray[np.int32]:
        """How many elements a ragged column's values have, by frame code and in the shape of the codes."""
        lengths = np.empty(codes.shape, np.int32)
        bad = self._copy_ragged(self._index[name], codes, lengths, None, -1)
        if bad >= 0:
            raise NoSuchRow("frame code", int(codes.flat[bad]), int(bad), f"of column {name!r} is no row")
        return lengths

    def _fill_ragged(self, made: Gathered, codes: Sequence[Mapping[str, Int64s]]) -> Gathered:
        """Add the ragged columns of both sides, which have a value for each of these frame codes.

        Both sides are as wide as the longest value among them, and at least 1.
        """
        found = [{name: self.lengths(name, where) for name, where in side.items()} for side in codes]
        sides = ((made.prev, made.prev_lengths), (made.next, made.next_lengths))
        for (columns, lengths_of), side, lengths in zip(sides, codes, found, strict=True):
            for name, where in side.items():
                column = self.schema[name]
                longest = max(int(each[name].max(initial=1)) for each in found if name in each)
                out = _core.empty((*where.shape, longest, *column.element), column.dtype)
                self._copy_ragged(self._index[name], where, lengths[name], out, longest)
                columns[name], lengths_of[name] = out, lengths[name]
        return made

    def _fill_ragged_windows(self, numbers: Int64s, made: Gathered) -> Gathered:
        """The ragged columns of both ends of these entries' windows."""
        rows, stack = numbers % self.capacity, self._parameters.frame_stack
        prev_codes, next_codes = np.empty((len(rows), stack), np.int64), np.empty((len(rows), stack), np.int64)
        next_rows = np.empty(len(rows), np.int64)
        self._windows(rows, prev_codes, next_codes, next_rows, None, None, None)
        states = self.schema.states
        ends = ((prev_codes, rows), (next_codes, next_rows))
        return self._fill_ragged(
            made,
            [
                {name: frames if name in states else newest for name in side}
                for side, (frames, newest) in zip(self._ragged_sides, ends, strict=True)
            ],
        )

    def sample(self, batch_size: int, out: Mapping[str, NDArray[Any]] | None = None) -> Sample:
        """Draw and gather as one moment: nothing leaves in between.

        Args:
            batch_size: How many, at least 1.
            out: Arrays of the caller to gather into, by the names they have in a `Batch`; others are made new. Those
                that are not C-contiguous, and the ids, are left to `Batch.copy_into`.

        Raises:
            EmptyMemory: no entry has a weight above 0.
            ParameterError: an array of `out` does not fit.
        """
        _check_whole("batch_size", batch_size, 1, MOST_ROWS)
        with self.held():
            made = self._allocate(batch_size)
            if out is not None:
                place(self.schema, made, out)
            weights = np.empty(batch_size, np.float64)
            sums = self._sums(self._parameters.normalize == "global")
            numbers = self._drawn(batch_size, None, weights)
            filled = self._filled(numbers, made)
            if self._parameters.max_times_sampled:
                filled.weight[:] = weights  # some weigh nothing any more
            return Sample(filled, weights, *sums)

    def _allocate(self, size: int) -> Gathered:
        """Uninitialised arrays for a batch; under the lock, since parameters say what they are like."""
        prev, next_ = self._sides
        if self._parameters.sequence_length:
            return self._allocate_sequences(size, self._parameters.sequence_length, self._parameters.sequence_first)
        return Gathered(
            prev={name: _core.empty((size, *shape), dtype) for name, shape, dtype in prev},
            next={name: _core.empty((size, *shape), dtype) for name, shape, dtype in next_},
            reward=np.empty((size, *self._reward_shape), np.float32),
            discount=np.empty((size, *self._reward_shape), np.float32),
            steps=np.empty(size, np.int32),
            weight=np.empty(size, np.float32),
            ids=np.empty(size, np.int64),
            age=np.empty(size, np.float32),
            model_version=np.empty(size, np.int64),
        )

    def _allocate_sequences(self, size: int, length: int, first: tuple[str, ...] = ()) -> Gathered:
        """Arrays for sequences, of which the columns `first` have no time axis."""
        prev, _ = self._sides
        axes = dict.fromkeys(self.schema.states, (size, length + 1)) | dict.fromkeys(first, (size,))
        reward = (size, length, *self._reward_shape)
        return Gathered(
            prev={
                name: _core.empty((*axes.get(name, (size, length)), *shape), dtype)
                for name, shape, dtype in prev
                if name != self.schema.reward
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

    def gather_episodes(self, rows: Int64s, length: int) -> tuple[Gathered, Int64s]:
        """Copies of the whole episodes that begin in these rows, as sequences of `length` entries.

        Returns:
            (gathered, rows): ids are int64 [B, length] here, with -1 behind an episode's end, as in the rows
            [B, length] of the entries.
        """
        with self.held():
            numbers = self._inside()["meta"]["number"]
            made = self._allocate_sequences(len(rows), length)
            codes = self._fill_sequences(np.ascontiguousarray(numbers[rows]), made)
            made.ids = np.where(codes >= 0, numbers[codes], -1)
            return made, codes

    def _fill_sequences(self, numbers: Int64s, made: Gathered, first: tuple[str, ...] = ()) -> Int64s:
        """Fill `made`, allocated with the same `first`, with the sequences that begin with these entries; returns their
        rows. Raises StaleEntry.
        """
        frames, codes, burn_in = self._cut(numbers, made.steps, made.discount)
        stack = self._parameters.frame_stack
        stacks = frames if stack == 1 else np.ascontiguousarray(sliding_window_view(frames, stack, axis=1))
        begins = np.ascontiguousarray(codes[:, 0])
        places = dict.fromkeys(self.schema.states, stacks) | dict.fromkeys(first, begins)
        for name, out in made.prev.items():
            self._copy_column(self._index[name], places.get(name, codes), out)
        if self.schema.reward is not None:
            self._copy_column(self._index[self.schema.reward], codes, made.reward)
        weights = np.empty(len(numbers), np.float64)
        self._facts(begins, made.age, made.model_version, weights)
        made.ids, made.weight[:] = numbers, weights
        assert made.mask is not None
        if self.schema.ragged:
            places |= dict.fromkeys(self.schema.states, stacks.reshape(len(numbers), -1, stack))
            self._fill_ragged(made, [{name: places.get(name, codes) for name in self._ragged_sides[0]}, {}])
        sequence_mask(burn_in, made.steps, made.mask)
        return codes

    def _cut(
        self, numbers: Int64s, steps: NDArray[np.int32], discount: NDArray[np.float32]
    ) -> tuple[Int64s, Int64s, NDArray[np.uint32]]:
        """`state_codes`, `codes` and `burn_in` of the `Sequences` that begin with these entries; fills the others,
        whose shape says how long they are.
        """
        length, stack = discount.shape[1], self._parameters.frame_stack
        frames = np.empty((len(numbers), stack + length), np.int64)
        codes, positions = np.empty((len(numbers), length), np.int64), np.empty(len(numbers), np.int64)
        self._refuse_stale(numbers, self._sequences(numbers, length, frames, codes, steps, discount, positions))
        return frames, codes, np.where(positions > 0, self._parameters.burn_in, 0).astype(np.uint32)

    def _filled(self, numbers: Int64s, made: Gathered) -> Gathered:
        """The samples of these entries in the arrays of `made`. Raises StaleEntry."""
        if made.mask is not None:
            self._fill_sequences(numbers, made, self._parameters.sequence_first)
            return made
        made.ids = numbers
        index = self._index
        bad = self._gather(
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
        self._refuse_stale(numbers, bad)
        return self._fill_ragged_windows(numbers, made) if self.schema.ragged else made

    def update_priorities(self, numbers: ArrayLike, td_errors: ArrayLike) -> tuple[int, int]:
        """Give entries the priority |td error| + 1e-6, and weights by it; of duplicates the last counts.

        Args:
            numbers: int64 [B].
            td_errors: [B], of any sign.

        Returns:
            (applied, stale): how many were there, and how many have left the memory and were passed over.

        Raises:
            ParameterError: a TD error is not finite, or the lengths differ. Nothing was changed.
        """
        wanted = _numbers(numbers, "ids")
        errors = np.ascontiguousarray(td_errors, np.float64)
        if wanted.shape != errors.shape:
            raise ParameterError("td_errors", f"shape {errors.shape}", f"as many as the ids, shape {wanted.shape}")
        applied, stale = self._update_priorities(wanted, errors, self._parameters.priority_epsilon)
        if applied < 0:
            raise ParameterError(f"td_errors[{stale}]", float(errors[stale]), "finite")
        return applied, stale

    # What caches are built of

    def draw_windows(self, count: int) -> Windows:
        """Draw, and say where the samples' frames are instead of copying them. Raises EmptyMemory."""
        _check_whole("count", count, 1, MOST_ROWS)
        with self.held():
            weights, sums = np.empty(count, np.float64), self.sums()
            numbers = self._drawn(count, None, weights)
            rows = numbers % self.capacity
            stack = self._parameters.frame_stack
            prev, next_ = np.empty((count, stack), np.int64), np.empty((count, stack), np.int64)
            next_rows = np.empty(count, np.int64)
            shape = (count, *self._reward_shape)
            returns = np.empty(shape, np.float32), np.empty(shape, np.float32)
            steps, ages, versions = np.empty(count, np.int32), np.empty(count, np.float32), np.empty(count, np.int64)
            self._windows(rows, prev, next_, next_rows, steps, *returns)
            self._facts(rows, ages, versions, None)
            told = (*returns, steps, ages, versions)
            return Windows(numbers, rows, prev, next_, next_rows, weights, *told, *sums)

    def draw_sequences(self, count: int) -> Sequences:
        """Draw, and say where the sequences' frames and entries are instead of copying them. Raises EmptyMemory."""
        _check_whole("count", count, 1, MOST_ROWS)
        with self.held():
            weights, sums = np.empty(count, np.float64), self.sums()
            numbers = self._drawn(count, None, weights)
            steps = np.empty(count, np.int32)
            discount = np.empty((count, self._parameters.sequence_length, *self._reward_shape), np.float32)
            frames, codes, burn_in = self._cut(numbers, steps, discount)
            ages, versions = np.empty(count, np.float32), np.empty(count, np.int64)
            self._facts(codes[:, 0].copy(), ages, versions, None)
            told = (weights, discount, steps, burn_in, ages, versions)
            return Sequences(numbers, frames, codes, *told, *sums)

    def unique_frames(
        self, prev_codes: Int64s | None, next_codes: Int64s | None, ordered: bool
    ) -> tuple[Int64s, NDArray[np.uint32], NDArray[np.uint32]]:
        """`_core.unique_frames`: each frame once, and where the windows have theirs."""
        return _core.unique_frames(prev_codes, next_codes, ordered)

    def copy_frames(self, name: str, sources: Int64s, out: NDArray[Any]) -> None:
        """Copy a column's rows by frame code into `out`, contiguous and of just their bytes: the values of
        a ragged column one after the other.

        -1 is zeros; a final state is there for state columns; a value column has its bootstrap value there, and other
        columns zeros. Raises NoSuchRow for a code that cannot be.
        """
        codes = np.ascontiguousarray(sources, np.int64)
        if name in self.schema.ragged:
            bad = self._copy_ragged(self._index[name], codes, np.empty(codes.shape, np.int32), out, -1)
        else:
            bad = self._copy_column(self._index[name], codes, out)
        if bad >= 0:
            raise NoSuchRow("frame code", int(codes.flat[bad]), int(bad), f"of column {name!r} is no row")

    copy_rows = copy_frames

    def returns(
        self,
        rows: Int64s,
        out_reward: NDArray[np.float32],
        out_discount: NDArray[np.float32],
        out_steps: NDArray[np.int32],
    ) -> None:
        """Discounted rewards and discounts float32 [n, *R], and steps int32 [n], of rows' windows."""
        where = np.ascontiguousarray(rows, np.int64)
        places = ((out_reward, np.float32, self._dimensions), (out_discount, np.float32, self._dimensions))
        for out, dtype, width in (*places, (out_steps, np.int32, 1)):
            _check_out(out, dtype, where.size * width)
        self._refuse_row(where, self._windows(where, None, None, None, out_steps, out_reward, out_discount))

    def ages(self, rows: Int64s, out: NDArray[np.float32]) -> None:
        """Seconds since the rows' entries were added, float32 [n]."""
        where = np.ascontiguousarray(rows, np.int64)
        _check_out(out, np.float32, where.size)
        self._refuse_row(where, self._facts(where, out, None, None))

    def model_versions(self, rows: Int64s, out: Int64s) -> None:
        """Versions of the models that made the rows' entries, int64 [n]."""
        where = np.ascontiguousarray(rows, np.int64)
        _check_out(out, np.int64, where.size)
        self._refuse_row(where, self._facts(where, None, out, None))

    # Checking

    def check_invariants(self) -> None:
        """Assert that pages, episodes, rows, weights and sums agree. For tests: slow, Python per entry."""
        with self.held():
            total, positive, least = self._sums()
            inside = self._inside()
            _check_order(inside)
            _check_lanes(inside, self.capacity)
            lengths = _check_episodes(inside, self.capacity)
            held = inside["meta"]["episode"] >= 0
            weights = inside["weights"]
            assert held.sum() == sum(lengths) == self.num_entries <= self.capacity
            assert inside["closed"] == self.num_episodes
            assert not 0 < self._parameters.max_episode < self.num_episodes
            assert (inside["meta"]["number"] % self.capacity == np.arange(self.capacity)).all()
            assert not weights[~held].any() and (weights >= 0.0).all()
            assert positive == (weights > 0.0).sum()
            self._check_limits(inside, weights > 0.0)
            if self._parameters.prioritization != "proportional":
                rows = np.flatnonzero(weights > 0.0)
                assert (self._ranked() == rows[np.lexsort((rows, -weights[rows]))]).all()
                exponent = self._parameters.priority_exponent if self._parameters.prioritization == "rank" else 0.0
                weights = np.arange(1, positive + 1, dtype=np.float64) ** -exponent
            for _, live, room, _, wrong in self._heaps():
                assert not wrong
                assert 0 <= live <= room <= 2 * live + (8 << 20)
            assert math.isclose(total, math.fsum(weights), rel_tol=1e-12)
            assert math.isclose(least, weights[weights > 0.0].min(initial=math.inf), rel_tol=1e-12)

    def _check_limits(self, inside: dict[str, Any], has_weight: NDArray[np.bool_]) -> None:
        """What is watched for limits bounds what there is, and nothing beyond them has a weight."""
        limits, meta = self._parameters, inside["meta"][has_weight]
        if limits.max_times_sampled:
            assert (meta["drawn"] < limits.max_times_sampled).all()
            assert self.draws_left == (limits.max_times_sampled - meta["drawn"].astype(np.int64)).sum()
        if limits.max_model_lag is not None:
            assert (meta["model_version"] >= self.newest_model - limits.max_model_lag).all()
        if limits.max_times_sampled or limits.max_age or limits.max_model_lag is not None:
            pages = np.flatnonzero(has_weight) // inside["page_rows"]
            assert (inside["page_born"][pages] <= meta["born"]).all()
            assert (inside["page_model"][pages] <= meta["model_version"]).all()

    # Converting and explaining

    def _add_slowly(self, lane: int, values: Any, init_w: float, model_version: int) -> int:
        """`add` where the quick way would not do: wait for the other thread, convert, or say what is wrong."""
        with self.held():
            status = self._add_status(lane, values, init_w, model_version) if type(values) is tuple else _core.NOT_EXACT
            exact: Sequence[Any] = values
            if status in (_core.NOT_EXACT, _core.NOT_FINITE):
                exact = self._exact_columns(values, ())
                status = self._add_status(lane, tuple(exact), init_w, model_version)
        if status == _core.BAD_WEIGHT:
            raise ParameterError("init_w", init_w, "a finite number of at least 0")
        if status < 0:
            self._refuse(status, lane, exact)
        return status

    def _refuse(self, status: int, lane: int, values: Sequence[Any]) -> NoReturn:
        if status == _core.NOT_OPEN:
            raise EpisodeClosedError("add an entry", lane)
        if status == _core.TOO_LONG:
            raise EpisodeTooLong(lane, self._open_length(lane), self.capacity)
        if status == _core.TOO_MANY_BYTES:
            raise EpisodeTooLong(lane, self._open_length(lane), self.capacity, self._ragged_limit)
        if status == _core.NO_MEMORY:
            raise MemoryError(f"no memory for the values of {', '.join(self.schema.ragged)}")
        for name, value in zip(self.schema.entry_names, values, strict=True):
            finite(name, self.schema[name], value)
        raise AssertionError(f"an exact entry was refused: {status}")

    def _exact_columns(self, values: Any, axes: tuple[int, ...]) -> list[NDArray[Any]]:
        """A value for each column but the return column, as arrays [*axes, *F] of exactly its dtype."""
        names = self.schema.entry_names
        if isinstance(values, Mapping) or not isinstance(values, Sequence) or len(values) != len(names):
            received = f"{len(values)} values" if isinstance(values, Sequence) else f"a {type(values).__name__}"
            raise EntryError("*", f"a tuple of {len(names)} values ({', '.join(names)})", received)
        return [exact(name, self.schema[name], value, axes) for name, value in zip(names, values, strict=True)]

    def _final_states(self, given: Any) -> list[NDArray[Any]]:
        """A final state as exact arrays in the order of `schema.states`."""
        schema, states = self.schema, self.schema.states
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

    def _bootstrap(self, given: ArrayLike | None) -> NDArray[np.float32]:
        value = np.zeros((), np.float32) if given is None else np.asarray(given)
        expected = f"a finite number, or {self._reward_shape} of them"
        if value.dtype.kind not in "iuf" or value.shape not in ((), self._reward_shape):
            raise ParameterError("bootstrap_value", given, expected)
        with np.errstate(over="ignore"):
            exact = np.ascontiguousarray(np.broadcast_to(value, self._reward_shape), np.float32).reshape(-1)
        if not np.isfinite(exact).all():
            raise ParameterError("bootstrap_value", given, expected)
        return exact

    def _row(self, name: str, stack: int) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
        """A column, and what one sample has of it."""
        column = self.schema[name]
        shape = (stack, *column.shape) if column.role == "state" else column.shape
        return name, shape, column.dtype

    def _refuse_stale(self, numbers: Int64s, bad: int) -> None:
        if bad >= 0:
            raise StaleEntry(int(numbers[bad]), bad)

    def _refuse_row(self, rows: Int64s, bad: int) -> None:
        if bad >= 0:
            where = f"holds no entry of this memory of {self.capacity}"
            raise NoSuchRow("row", int(rows.flat[bad]), int(bad), where)


def _check_order(inside: dict[str, Any]) -> None:
    """Pages to be taken are once in their order; the lists of closed and free episodes hold every slot but the open."""
    pages, episodes = inside["pages"], inside["episodes"]
    order = list(_follow(pages["newer"], inside["first_page"]))
    assert sorted(order) == list(np.flatnonzero(pages["is_open"] == 0))
    assert (order or [-1])[-1] == inside["last_page"]
    assert list(_follow(pages["older"], inside["last_page"])) == order[::-1]
    closed = list(_follow(episodes["newer"], inside["oldest"]))
    assert list(_follow(episodes["older"], inside["newest"])) == closed[::-1]
    free = list(_follow(episodes["older"], inside["free_episode"]))
    assert len(closed) == inside["closed"]
    assert (episodes["state"][closed] == 2).all() and (episodes["state"][free] == 0).all()
    assert len(closed) + len(free) + (episodes["state"] == 1).sum() == len(episodes)
    finals = sorted([*episodes["final"][closed], *inside["free_finals"][: inside["free_final_count"]]])
    assert [row for row in finals if row >= 0] == list(range(inside["final_rows"]))


def _check_lanes(inside: dict[str, Any], capacity: int) -> None:
    """A page belongs to one lane at most, and is open just where it holds rows of an open episode."""
    pages, meta, size = inside["pages"], inside["meta"], inside["page_rows"]
    for index, lane in enumerate(inside["lanes"]):
        assert lane["page"] < 0 or pages["lane"][lane["page"]] == index
        assert lane["episode"] < 0 or inside["episodes"]["state"][lane["episode"]] == 1
    is_open = np.isin(meta["episode"], np.flatnonzero(inside["episodes"]["state"] == 1))
    open_pages = np.unique(np.flatnonzero(is_open) // size)
    assert set(open_pages) == set(np.flatnonzero(pages["is_open"]))
    assert inside["takeable_pages"] == len(pages) - len(open_pages)
    assert inside["takeable_rows"] == capacity - sum(min(size, capacity - page * size) for page in open_pages)


def _check_episodes(inside: dict[str, Any], capacity: int) -> list[int]:
    """Each episode's rows are found one after the other from its first, and hold its positions; returns the lengths."""
    meta, pages, size = inside["meta"], inside["pages"], inside["page_rows"]
    lengths = []
    for slot in np.flatnonzero(inside["episodes"]["state"] > 0):
        episode = inside["episodes"][slot]
        row, rows = int(episode["first_row"]), []
        for _ in range(episode["length"]):
            rows.append(row)
            row += 1
            if row % size == 0 or row == capacity:
                row = int(pages["after"][(row - 1) // size]) * size
        assert len(set(rows)) == len(rows)
        assert not rows or rows[-1] == episode["last_row"]
        assert (meta["episode"][rows] == slot).all()
        assert (meta["position"][rows] == np.arange(len(rows))).all()
        lengths.append(len(rows))
    return lengths


def _follow(links: NDArray[Any], start: int) -> Iterator[int]:
    """The members of a linked list from `start` on."""
    while start >= 0:
        yield start
        start = int(links[start])


def _storage(column: Column, capacity: int) -> tuple[NDArray[np.uint8], np.dtype[Any], tuple[int, ...], str, bool]:
    """Room for a column, uint8 [capacity, bytes], that begins with a cache line; with what the loops must know."""
    size = _POINTER_BYTES if column.is_ragged else column.nbytes
    room = np.zeros(capacity * size + 64, np.uint8)
    skip = -room.ctypes.data % 64
    data = room[skip : skip + capacity * size].reshape(capacity, size)
    return data, column.dtype, column.shape, column.role, column.is_finite


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


def _count_of(values: Any) -> int:
    """The length of a first axis."""
    try:
        return len(values)
    except TypeError:
        return 0


_MAKE_ONE = "Make one: memoire.Schema({...}), or memoire.Schema.from_env(env)."


def _numbers(numbers: ArrayLike, called: str = "numbers") -> Int64s:
    """Entry numbers as a contiguous int64 vector; errors call them so."""
    array = np.asarray(numbers)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size > 0):
        raise ParameterError(called, form(array), "whole numbers of one dimension, as a batch's ids are")
    return np.ascontiguousarray(array, np.int64)


def init_weights(init_w: Any, count: int) -> NDArray[np.float32]:
    """`init_w` of `count` entries, float32 [count]. Raises ParameterError."""
    if isinstance(init_w, float) and 0.0 <= init_w < FLOAT32_MAX:
        return np.full(count, init_w, np.float32)
    weights = np.asarray(init_w, np.float32)
    if weights.shape not in ((), (count,)):
        raise ParameterError("init_w", f"shape {weights.shape}", f"a number or {count} of them")
    if not (weights >= 0.0).all() or not np.isfinite(weights).all():
        raise ParameterError("init_w", init_w, "finite and at least 0")
    return np.ascontiguousarray(np.broadcast_to(weights, (count,)))


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ParameterError(name, value, "a finite number of at least 0")
    number = float(value)
    if not 0.0 <= number < math.inf:
        raise ParameterError(name, value, "a finite number of at least 0")
    return number


def _check_whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ParameterError(name, value, f"a whole number from {low} to {high}")


def _broadcast(numbers: tuple[float, ...], size: int) -> list[float]:
    return list(numbers) * size if len(numbers) == 1 else list(numbers)


def _check_out(out: Any, dtype: Any, size: int) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != dtype or out.size != size or not out.flags.carray:
        raise ParameterError(
            "out", getattr(out, "shape", out), f"a contiguous {np.dtype(dtype)} array of {size} numbers"
        )
