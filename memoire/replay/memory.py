"""Memory of episodes' entries: storage, weights, and samples drawn from them, without any networking.

Storage and loops are in `_core.EntryStore`. `conversion` converts values and rejects invalid ones; `gathering`
locates samples and copies them. `Buffer`, clients and servers build on `Memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire import _core, arguments
from memoire.errors import EmptyEpisodeError, EmptyMemory, EpisodeClosedError, NoDrawsLeft, ParameterError, WrongType
from memoire.limits import CONTAINER, MemoryLimits, Reservation

from .batch import GatheredSamples, use_output_arrays
from .conversion import (
    WEIGHT,
    check_close,
    checked_page_rows,
    count_of,
    entry_numbers,
    exact_columns,
    exact_fractions,
    init_weights,
    limits_of,
    memory_bytes,
    real_errors,
    refuse,
    storage_of,
    version_of,
    weight_window_settings,
)
from .gathering import (
    BatchGatherer,
    DrawnSamples,
    DrawnSequences,
    DrawnWindows,
    Float64s,
    Int64s,
    RowGatherer,
    check_stale,
)
from .parameters import Parameters, StrictAttributes, reward_size
from .sampling import seed_here
from .schema import Schema
from .writing import Changes

MAX_LANES = 1 << 20
MAX_ROWS = (1 << 31) - 256
_FIGURES = (
    "capacity", "num_entries", "num_episodes", "generated", "max_priority", "newest_model", "ragged_bytes", "live",
)  # fmt: skip


class Memory(RowGatherer, StrictAttributes):
    """Store of exactly `capacity` entries; whole episodes are evicted, oldest first, when their rows are needed.

    Each lane has one open episode. Entries can be drawn once their episode is closed or, with `live`, as soon as their
    window is complete. Every method may be called from several threads, and loops run without the GIL. A forked process
    has an independent copy, and draws other entries (see `sampling`).

    Example:
        memory = memoire.Memory(schema, capacity=1000)
        memory.open()
        memory.add(0, (np.zeros(4, np.float32), 0, 1.0))
        memory.close(0, terminated=True)

    Args:
        schema: The columns of an entry.
        capacity: Number of entries that fit, at least 1.
        parameters: Settings of weights and samples; `configure` changes them.
        live: True if entries of open episodes can be drawn.
        seed: Seed of the draws; None draws differently each time.
        page_rows: Rows that a lane allocates at once, a power of two; None chooses.
        ragged_limit: Limit in bytes for values of ragged columns (`ragged_bytes`). The oldest closed episodes make
            room; an entry that does not fit beside the open ones is rejected. 0 sets no limit, but in a container
            half of what its memory limit leaves.
        container: Container whose memory is reserved (see `memory_bytes`); None reserves none.

    Raises:
        ParameterError: an argument is outside its range, does not fit the schema, or needs more memory than the
            container has.
    """

    _COPY = "Write memoire.dataset.save(memory, path), and fill another one with memoire.dataset.fill(memory, path)."

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
        container: MemoryLimits | None = CONTAINER,
    ) -> None:
        parameters = Parameters() if parameters is None else parameters
        if not isinstance(schema, Schema):
            raise WrongType(
                "schema",
                "a memoire.Schema",
                type(schema).__name__,
                "Make one: memoire.Schema({...}), or memoire.Schema.from_env(env).",
            )
        if not isinstance(parameters, Parameters):
            raise WrongType("parameters", "memoire.Parameters or None", type(parameters).__name__)
        if seed is not None:
            arguments.whole("seed", seed, 0, 1 << 256)
        arguments.whole("capacity", capacity, 1, MAX_ROWS)
        page_rows = checked_page_rows(page_rows, int(capacity))
        parameters.check_for(schema)
        self._reserved, self._ragged_reserved = Reservation(container), Reservation(container)
        self._reserved.reserve("capacity", capacity, memory_bytes(schema, int(capacity)))
        self.schema = schema
        self.live = live
        self._dimensions = reward_size(schema)
        columns = [storage_of(schema[name], int(capacity)) for name in schema.names]
        self.generator = np.random.default_rng(0)
        """Generator of draws that do not run in `_core`; use it while the memory is held."""
        self._setup(columns, int(capacity), page_rows, self._dimensions, live, [0] * 4)
        seed_here(self, seed)
        self._parameters = parameters
        self._apply(parameters)
        self.limit_ragged(ragged_limit)
        self._guard()

    # State

    @property
    def parameters(self) -> Parameters:
        """Current settings of weights and samples."""
        return self._parameters

    @property
    def total_weight(self) -> float:
        """Sum of all weights; an entry's probability is its weight divided by this sum."""
        return self._sums()[0]

    @property
    def num_positive(self) -> int:
        """Number of entries that can be drawn."""
        return self._sums()[1]

    @property
    def min_weight(self) -> float:
        """Smallest weight above 0; 0 if no weight is."""
        return self.sums()[2]

    @property
    def ragged_limit(self) -> int:
        """Limit in bytes for values of ragged columns, as set; 0 is no limit, or the container's share."""
        return self._ragged_limit

    def seed(self, seed: int) -> None:
        """Restart the random numbers of draws from a seed, as in a memory made with this seed."""
        arguments.whole("seed", seed, 0, 1 << 256)
        seed_here(self, int(seed))

    def sums(self) -> tuple[float, int, float]:
        """Return (total_weight, num_positive, min_weight) at one moment."""
        total, positive, least = self._sums()
        return total, positive, least if positive else 0.0

    def info(self) -> dict[str, Any]:
        """Return counts and settings as plain numbers and strings."""
        sums = dict(zip(("total_weight", "num_positive", "min_weight"), self.sums(), strict=True))
        figures = {name: getattr(self, name) for name in _FIGURES} | sums
        return figures | {"entry_bytes": self.schema.entry_bytes, **self._parameters.to_wire()}

    def __repr__(self) -> str:
        return f"Memory({self.num_entries} of {self.capacity} entries, {self.num_episodes} episodes, {self.schema!r})"

    def limit_ragged(self, ragged_limit: int) -> None:
        """Set the limit in bytes for values of ragged columns; 0 as in the constructor. The oldest closed episodes make
        room.
        """
        arguments.whole("ragged_limit", ragged_limit, 0, 1 << 62)
        most = int(ragged_limit)
        if self.schema.ragged:
            most = most or self._ragged_reserved.default("ragged_limit", 0)
            self._ragged_reserved.reserve("ragged_limit", ragged_limit, most)
        self._ragged_limit, self._ragged_most = int(ragged_limit), most
        self._limit_ragged(most)

    def unreserve(self) -> None:
        """Release this memory's reservation in the container, so that a memory that replaces it can reserve."""
        self._reserved.release()
        self._ragged_reserved.release()

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Restart the random numbers of draws from a seed sequence."""
        beside = np.random.SeedSequence(seeds.entropy, spawn_key=(*seeds.spawn_key, 1))
        with self.held():
            self._seed(seeds.generate_state(4, np.uint64).tolist())
            self.generator.bit_generator.state = np.random.PCG64(beside).state

    # Episodes

    def open(self, lane: int = 0) -> None:
        """Open an episode in a lane. Entries of an unclosed episode there are removed, and their rows freed."""
        arguments.whole("lane", lane, 0, MAX_LANES - 1)
        self._open(lane)

    def opening_changes(self, lane: int) -> Changes:
        """Return the changes, for `_core.at_once`, that open an episode in a lane as `open` does."""
        return [(self._open, (lane,))]

    def open_length(self, lane: int = 0) -> int:
        """Return the number of entries in a lane's open episode; -1 if none is open."""
        return self._open_length(lane)

    def open_return(self, lane: int = 0) -> Float64s:
        """Return the undiscounted sum of rewards in a lane's open episode: [*R]; 0 if none is open."""
        total = np.empty(self._dimensions, np.float64)
        with self.held():
            self._open_return(lane, total)
        return total.reshape(self.schema.reward_shape)

    def checked_version(self, model_version: Any) -> int:
        """Return the version of the model that acted for a new entry, checked.

        Raises:
            ParameterError: it is not a whole number from 0 to 2**53 - 1; or 0, unknown, while `max_model_lag` is set.
        """
        return version_of(model_version, self._parameters.max_model_lag)

    def add_many(
        self, lanes: ArrayLike, values: Sequence[Any], init_w: ArrayLike = 1.0, model_version: int = 0
    ) -> Int64s:
        """Add one entry to the open episode of each of several lanes, all or nothing, and return their numbers.

        Args:
            lanes: Distinct lanes, int64 [N].
            values: A value for each column but the return column, in the schema's order: [N, *F].
            init_w: As in `add`: a number, or float32 [N].
            model_version: As in `add`.

        Raises: as `add`, naming the lane.
        """
        lane_array = np.ascontiguousarray(lanes, np.int64)
        if lane_array.ndim != 1:
            raise ParameterError("lanes", lane_array.shape, "of one dimension")
        ((add, args),) = self.add_many_changes(lane_array, values, init_w, model_version)
        try:
            add(*args)
        except _core.NotAdded as refused:
            self.explain(refused)
        numbers: Int64s = args[3]
        return numbers

    def add_many_changes(self, lanes: Int64s, values: Sequence[Any], init_w: ArrayLike, model_version: int) -> Changes:
        """Return the changes, for `_core.at_once`, that add entries as `add_many` does: `lanes` [N], `values` [N, *F],
        `init_w` a number or [N].
        """
        count, version = len(lanes), self.checked_version(model_version)
        arrays = exact_columns(self.schema, values, (count,))
        args = (lanes, arrays, init_weights(init_w, count), np.empty(count, np.int64), version)
        return [(self._add_many, args)]

    def add_entry_changes(self, lane: int, values: tuple[Any, ...], init_w: Any, model_version: int) -> Changes:
        """Return the changes, for `_core.at_once`, that add one entry of exact values [*F]."""
        version, weight = self.checked_version(model_version), float(init_weights(init_w, 1)[0])
        return [(self._add_one, (lane, values, weight, version))]

    def explain(self, refused: _core.NotAdded) -> NoReturn:
        """Raise the error that explains why entries were not added."""
        status, lane, values = refused.args
        if status == _core.REPEATED:
            raise ParameterError("lanes", lane, "each at most once in a call") from None
        refuse(self, self.schema, lane, status, values, self._ragged_most)

    def extend(self, lane: int, values: Sequence[Any], init_w: ArrayLike = 1.0, model_version: int = 0) -> Int64s:
        """Add T consecutive entries to a lane's open episode, all or nothing, and return their numbers.

        Args:
            lane: Lane of the open episode.
            values: A value for each column but the return column, in the schema's order: [T, *F].
            init_w: As in `add`: a number, or float32 [T].
            model_version: As in `add`.

        Raises: as `add`.
        """
        return self._extend_any(lane, values, init_w, self.checked_version(model_version))

    def _extend_any(self, lane: int, values: Sequence[Any], init_w: ArrayLike, version: int) -> Int64s:
        """Extend as `extend` does, but accept version 0 of entries recorded before `max_model_lag` was set."""
        if len(values) == 0:
            raise ParameterError("values", values, f"one for each of the columns {', '.join(self.schema.entry_names)}")
        count = count_of(values[0])
        arrays = exact_columns(self.schema, values, (count,))
        numbers = np.empty(count, np.int64)
        status = self._extend(lane, arrays, init_weights(init_w, count), numbers, version)
        if status < 0:
            refuse(self, self.schema, lane, status, arrays, self._ragged_most)
        return numbers

    def insert(
        self,
        values: list[Any],
        init_w: NDArray[np.float32],
        model_version: Int64s,
        age: NDArray[np.float32],
        **end: Any,
    ) -> None:
        """Add a whole episode of T entries, recorded elsewhere, in lane 0, and close it as `close(**end)` does.

        Args:
            values: For each column but the return column, exact arrays [T, *F] that are already checked.
            init_w: [T] finite, at least 0.
            model_version: [T] version of the model that acted.
            age: [T] seconds since each entry was recorded.

        Raises:
            EpisodeTooLong: the episode does not fit. Nothing was added.
        """
        with self.held():
            self._open(0)
            numbers = np.empty(len(init_w), np.int64)
            status = self._extend(0, values, init_w, numbers, int(model_version[0]), is_checked=True)
            if status < 0:
                refuse(self, self.schema, 0, status, values, self._ragged_most)
            self._tell(0, model_version, age)
            self.close(**end)

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

        With lambda `mix_lambda` and gamma `discount`, per reward dimension, for the last entry T and before:

            q_T = r_T + gamma * bootstrap_value
            q_t = r_t + gamma * (lambda * q_{t+1} + (1 - lambda) * v_{t+1})
            priority = sum_j reward_coeff_j * |q_j - v_j|         without a value column: the largest so far, 1 at first
            weight = init_w * multiplier * priority ** priority_exponent

        Weights are 0 for the first frame_stack - 1 entries (start="skip") and, unless the end is known, for the last
        multi_step. With a final state or terminated=True the end is known: the last windows are shorter and reach it.

        Args:
            lane: Lane of the open episode.
            multiplier: Factor of the weights of all its entries; finite and at least 0.
            update_value: True to compute the return column; else it stays 0.
            update_weight: True if priorities count; else weight = init_w * multiplier, until a learner reports one.
            final_state: State after the last action: an array for one state column, a tuple in the order of
                `schema.states`, or a mapping by name.
            terminated: True: the episode terminated, and `discount` is 0 at its end. False: it was cut off, and
                learners bootstrap from the final state. None is False with a final state, else unknown.
            bootstrap_value: Value of the final state, a number or of the reward's shape; None is 0.

        Raises:
            EpisodeClosedError, EmptyEpisodeError: no episode is open, or it has no entries.
            ParameterError, EntryError: an argument does not fit. The episode stays open.
        """
        multiplier, bootstrap, states = check_close(self.schema, multiplier, final_state, terminated, bootstrap_value)
        ended = states is not None or bool(terminated)
        with self.held():
            length = self._open_length(lane)
            if length < 0:
                raise EpisodeClosedError("close the episode", lane)
            if length == 0:
                raise EmptyEpisodeError(lane)
            self._close(lane, multiplier, update_value, update_weight, ended, bool(terminated), states, bootstrap)

    def closing_changes(
        self,
        lane: int,
        *,
        final_state: Any = None,
        terminated: bool | None = None,
        bootstrap_value: ArrayLike | None = None,
        is_cut: bool = False,
    ) -> Changes:
        """Return the changes, for `_core.at_once`, that close an open episode as `close` does, and open the next.

        States of `final_state` are [*F]; `bootstrap_value` is a number or [*R].

        Args:
            is_cut: True if the episode continues; it is stored as truncated.
        """
        multiplier, bootstrap, states = check_close(self.schema, 1.0, final_state, terminated, bootstrap_value)
        ended = states is not None or bool(terminated)
        close = (lane, multiplier, True, True, ended, bool(terminated), states, bootstrap)
        return [(self._close, close), *self.opening_changes(lane)]

    leaving: Sized = ()
    """Closed episodes that wait to be sent; empty in a memory that sends none."""

    def flush(self, first_lane: int, lanes: int) -> None:
        """Send the closed episodes in `leaving`. The base class has no episodes in `leaving`."""

    @contextmanager
    def cut_for_now(self, states: Mapping[int, Any]) -> Iterator[None]:
        """Treat open episodes as cut off in these states within the block, so that shorter windows reach their newest
        entries. All other threads wait; the caller must not add entries.

        Args:
            states: State after the newest entry, by lane, as `close` takes it; for lanes whose episode has entries.

        Raises:
            EntryError: a state does not fit.
        """
        ends = {lane: check_close(self.schema, 1.0, state, False, None) for lane, state in states.items()}
        with self.held(), ExitStack() as going_on:
            for lane, (_, bootstrap, final) in ends.items():
                if self.live and self.open_length(lane) > 0 and final is not None:
                    self._end_for_now(lane, final, bootstrap)
                    going_on.callback(self._end_no_more, lane)
            yield

    def configure(self, parameters: Parameters | None = None, **changes: Any) -> None:
        """Apply other parameters, and compute the weights and windows of all stored entries again.

        The memory keeps some values: weights of episodes closed without update_weight, returns of those closed without
        update_value, and priorities that a learner reported. Incomplete windows get weight 0. A lower `max_episode`
        evicts the oldest episodes.

        Raises:
            ParameterError: a setting is invalid. Nothing was changed.
        Cost: one pass over all entries if weights or windows change; other threads wait for it.
        """
        with self.held():
            new = (self._parameters if parameters is None else parameters).replace(**changes)
            new.check_for(self.schema)
            self._apply(new)
            self._parameters = new

    def saw_model(self, version: int) -> None:
        """Report the version of an existing model. `Parameters.max_model_lag` counts from the newest version, reported
        or stored; older ones change nothing.

        Raises:
            ParameterError: the version is not a whole number from 0 to 2**53 - 1.
        """
        super().saw_model(arguments.model_version(version, "version"))

    def _apply(self, new: Parameters) -> None:
        are_limits_new = self._limit(*limits_of(new))
        self._configure(**weight_window_settings(new, self._dimensions), are_limits_new=are_limits_new)
        self._gathering = BatchGatherer(self.schema, new)

    # Drawing

    def draw(self, count: int, fractions: ArrayLike | None = None) -> Int64s:
        """Draw entries with replacement, and return their numbers, int64 [count]: P = weight / total_weight. With
        `max_times_sampled` draws are sequential: an entry drawn that often weighs 0 at once, also within the call.

        Args:
            count: Number of entries, at least 1.
            fractions: Positions in the cumulative weights, [count] in [0, 1); None draws at random.

        Raises:
            EmptyMemory: no entry has a weight above 0. NoDrawsLeft, a subclass: all have fewer than `count` draws left.
        """
        arguments.whole("count", count, 1, MAX_ROWS)
        return self._draw_numbers(count, fractions, None)

    def _draw_numbers(self, count: int, fractions: ArrayLike | None, weights: Float64s | None) -> Int64s:
        """Draw as `draw` does, and write the weights that the probabilities were proportional to into `weights`."""
        if fractions is not None:
            fractions = exact_fractions(fractions, count)
        with self.held():
            numbers = self._draw(count, fractions, weights)
            if numbers is None:
                if (draws := self.draws_left) > 0:
                    raise NoDrawsLeft(count, draws, self._parameters.max_times_sampled)
                raise EmptyMemory(self.num_entries)
            return numbers

    def take_back(self, numbers: Int64s) -> None:
        """Undo a draw that was not delivered, int64 [count], before any eviction. The generator is not reset."""
        self._count_draws(numbers, is_back=True)

    def weights(self, numbers: ArrayLike) -> Float64s:
        """Return weights float64 [B] of entries by number. Raises StaleEntry if an entry was evicted."""
        wanted = entry_numbers(numbers)
        weights = np.empty(len(wanted), np.float64)
        check_stale(wanted, self._weights(wanted, weights))
        return weights

    def gather(self, numbers: ArrayLike) -> GatheredSamples:
        """Return samples of entries by number, int64 [B], as copies: both ends of their windows and discounted rewards.

        Raises StaleEntry if an entry was evicted since it was drawn; `sample` never does.
        """
        wanted = entry_numbers(numbers)
        with self.held():
            return self._gathering.fill(self, wanted, self._gathering.allocate(len(wanted)))

    def sample(self, batch_size: int, out: Mapping[str, NDArray[Any]] | None = None) -> DrawnSamples:
        """Draw and gather as one step: nothing is evicted in between.

        Args:
            batch_size: Number of samples B, at least 1.
            out: Arrays [B, ...] of the caller to gather into, by their names in a `Batch`; missing ones are allocated.
                `Batch.copy_into` fills those that are not C-contiguous, and the ids.

        Raises:
            EmptyMemory: no entry has a weight above 0.
            ParameterError: an array of `out` does not fit.
        """
        arguments.whole("batch_size", batch_size, 1, MAX_ROWS)
        with self.held():
            gathered = self._gathering.allocate(batch_size)
            if out is not None:
                use_output_arrays(self.schema, gathered, out)
            weights, sums = np.empty(batch_size, np.float64), self._sums(self._parameters.normalize == "global")
            filled = self._gathering.fill(self, self._draw_numbers(batch_size, None, weights), gathered)
            if self._parameters.max_times_sampled:
                filled.weight[:] = weights  # gathered after the draw, an entry that is used up weighs 0
            return DrawnSamples(filled, weights, *sums)

    def gather_episodes(self, rows: Int64s, length: int) -> tuple[GatheredSamples, Int64s]:
        """Return copies of the whole episodes that begin in these rows, as sequences of `length` entries.

        Returns:
            (gathered, rows): ids and the entries' rows are int64 [B, length], with -1 behind an episode's end.
        """
        with self.held():
            return self._gathering.episodes(self, rows, length)

    def update_priorities(self, numbers: ArrayLike, td_errors: ArrayLike) -> tuple[int, int]:
        """Set the priority of entries to |td error| + `priority_epsilon`, and their weights; the last of duplicates
        counts.

        Args:
            numbers: int64 [B].
            td_errors: [B], of any sign.

        Returns:
            (applied, stale): entries that were updated, and entries that were evicted before.

        Raises:
            ParameterError: a TD error is not finite, or the lengths differ. Nothing was changed.
        """
        wanted = entry_numbers(numbers, "ids")
        errors = np.ascontiguousarray(real_errors(td_errors), np.float64)
        if wanted.shape != errors.shape:
            raise ParameterError("td_errors", f"shape {errors.shape}", f"as many as the ids, shape {wanted.shape}")
        applied, stale = self._update_priorities(wanted, errors, self._parameters.priority_epsilon)
        if applied < 0:
            raise ParameterError(f"td_errors[{stale}]", float(errors[stale]), "finite")
        return applied, stale

    def count_replaced(self, numbers: ArrayLike, seconds: float) -> int:
        """Return the number of these entries, int64 [B], that were evicted and overwritten more than `seconds` ago."""
        return self._count_replaced(entry_numbers(numbers, "ids"), seconds)

    # Drawing for caches

    def draw_windows(self, count: int) -> DrawnWindows:
        """Draw, and return the places of the samples' frames instead of copies. Raises EmptyMemory."""
        arguments.whole("count", count, 1, MAX_ROWS)
        with self.held():
            weights, sums = np.empty(count, np.float64), self.sums()
            return self.windows_of(self._draw_numbers(count, None, weights), weights, sums)

    def draw_sequences(self, count: int) -> DrawnSequences:
        """Draw, and return the places of the sequences' frames and entries instead of copies. Raises EmptyMemory."""
        arguments.whole("count", count, 1, MAX_ROWS)
        with self.held():
            weights, sums = np.empty(count, np.float64), self.sums()
            return self.sequences_of(self._draw_numbers(count, None, weights), weights, sums)

    def _add_slowly(self, lane: int, values: Any, init_w: float, model_version: Any) -> int:
        """Add as `add` does if its fast path fails: wait for another thread, convert, or raise an error."""
        exact: Sequence[Any] = values
        with self.held():
            version = self.checked_version(model_version)
            status = self._add_status(lane, values, init_w, version) if type(values) is tuple else _core.NOT_EXACT
            if status in (_core.NOT_EXACT, _core.NOT_FINITE):
                exact = exact_columns(self.schema, values, ())
                status = self._add_status(lane, tuple(exact), init_w, version)
        if status == _core.BAD_WEIGHT:
            raise ParameterError("init_w", init_w, WEIGHT)
        if status < 0:
            refuse(self, self.schema, lane, status, exact, self._ragged_most)
        return status
