"""The memory: entries of episodes, their weights, and the samples drawn from them. It has never heard of a socket.

Storage and loops are `_core.EntryStore`'s. `conversion` converts what is given and refuses what does not fit;
`gathering` says where samples are, and copies them. `Buffer`, clients and servers are built on this class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire import _core, arguments
from memoire.errors import EmptyEpisodeError, EmptyMemory, EpisodeClosedError, ParameterError, UsedUp, WrongType
from memoire.limits import CONTAINER, Container, Reservation

from .batch import GatheredSamples, place
from .conversion import (
    WEIGHT,
    checked_page_rows,
    count_of,
    cutting_of,
    ending,
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
)
from .gathering import (
    BatchGatherer,
    DrawnSequences,
    DrawnWindows,
    Float64s,
    Int64s,
    Sample,
    StoredRows,
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


class Memory(StoredRows, StrictAttributes):
    """Room for exactly `capacity` entries; whole episodes leave, oldest first, when their rows are needed.

    One open episode for each lane; entries can be drawn once their episode is closed, or with `live` as soon as their
    window is complete. Every method may be called from several threads, and loops run without the GIL. A process forked
    from this one has a copy that goes its own way, and draws other entries (see `sampling`).

    Args:
        schema: The columns of an entry.
        capacity: Entries that fit, 1 or more.
        parameters: How entries are weighed and samples cut; changed by `configure`.
        live: Whether entries of open episodes can be drawn.
        seed: Of the draws; None is different each time.
        page_rows: Rows that a lane takes at once, a power of two; None chooses.
        ragged_limit: Bytes that values of ragged columns may take (`ragged_bytes`): the oldest closed episodes make
            room, and what does not fit beside the open ones is refused. 0 is any; in a container half of what its
            memory limit leaves.
        container: That in which its memory is reserved (see `memory_bytes`); None reserves none.

    Raises:
        ParameterError: an argument is outside its range, does not fit the schema, or makes more than the container
            has.
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
        container: Container | None = CONTAINER,
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
        """Random numbers for draws that are not the loops', while the memory is held."""
        self._setup(columns, int(capacity), page_rows, self._dimensions, live, [0] * 4)
        seed_here(self, seed)
        self._parameters = parameters
        self._apply(parameters)
        self.limit_ragged(ragged_limit)
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

    @property
    def ragged_limit(self) -> int:
        """Bytes that values of ragged columns may take, as it was set; 0 is any, or what the container leaves."""
        return self._ragged_limit

    def seed(self, seed: int) -> None:
        """Draw from now on as a memory that was made with this seed."""
        arguments.whole("seed", seed, 0, 1 << 256)
        seed_here(self, int(seed))

    def sums(self) -> tuple[float, int, float]:
        """(total_weight, num_positive, min_weight) of one moment."""
        total, positive, least = self._sums()
        return total, positive, least if positive else 0.0

    def info(self) -> dict[str, Any]:
        """What is stored and set, as plain numbers and strings."""
        sums = dict(zip(("total_weight", "num_positive", "min_weight"), self.sums(), strict=True))
        figures = {name: getattr(self, name) for name in _FIGURES} | sums
        return figures | {"entry_bytes": self.schema.entry_bytes, **self._parameters.to_wire()}

    def __repr__(self) -> str:
        return f"Memory({self.num_entries} of {self.capacity} entries, {self.num_episodes} episodes, {self.schema!r})"

    def limit_ragged(self, ragged_limit: int) -> None:
        """Allow values of ragged columns so many bytes from now on, 0 is as when it is made; the oldest closed episodes
        make room.
        """
        arguments.whole("ragged_limit", ragged_limit, 0, 1 << 62)
        most = int(ragged_limit)
        if self.schema.ragged:
            most = most or self._ragged_reserved.default("ragged_limit", 0)
            self._ragged_reserved.reserve("ragged_limit", ragged_limit, most)
        self._ragged_limit, self._ragged_most = int(ragged_limit), most
        self._limit_ragged(most)

    def unreserve(self) -> None:
        """Leave the container's memory that is reserved for this one to another one, which takes its place."""
        self._reserved.release()
        self._ragged_reserved.release()

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Draw from now on by these seeds."""
        beside = np.random.SeedSequence(seeds.entropy, spawn_key=(*seeds.spawn_key, 1))
        with self.held():
            self._seed(seeds.generate_state(4, np.uint64).tolist())
            self.generator.bit_generator.state = np.random.PCG64(beside).state

    # Episodes

    def open(self, lane: int = 0) -> None:
        """Open an episode in a lane; the entries of an unclosed one there are cleared and their room is given back."""
        arguments.whole("lane", lane, 0, MAX_LANES - 1)
        self._open(lane)

    def opening(self, lane: int) -> Changes:
        """The changes, for `_core.at_once`, that open an episode in a lane as `open` does."""
        return [(self._open, (lane,))]

    def open_length(self, lane: int = 0) -> int:
        """Entries in a lane's open episode; -1 where none is open."""
        return self._open_length(lane)

    def open_return(self, lane: int = 0) -> Float64s:
        """Sum of the rewards in a lane's open episode so far, not discounted: [*R]; 0 where nothing is open."""
        total = np.empty(self._dimensions, np.float64)
        with self.held():
            self._open_return(lane, total)
        return total.reshape(self.schema.reward_shape)

    def checked_version(self, model_version: Any) -> int:
        """The version of the model that made a new entry.

        Raises:
            ParameterError: it is no whole number from 0 to 2**53 - 1; or 0, unknown, while `max_model_lag` is set.
        """
        return version_of(model_version, self._parameters.max_model_lag)

    def add_many(
        self, lanes: ArrayLike, values: Sequence[Any], init_w: ArrayLike = 1.0, model_version: int = 0
    ) -> Int64s:
        """Add one entry to each of several lanes' open episodes, all or none, and return their numbers.

        Args:
            lanes: Different lanes, int64 [N].
            values: A value for each column but the return column, in the schema's order: [N, *F].
            init_w: As in `add`: a number, or float32 [N].
            model_version: As in `add`.

        Raises: as `add`, naming the lane.
        """
        where = np.ascontiguousarray(lanes, np.int64)
        if where.ndim != 1:
            raise ParameterError("lanes", where.shape, "of one dimension")
        ((add, given),) = self.adding(where, values, init_w, model_version)
        try:
            add(*given)
        except _core.NotAdded as refused:
            self.explain(refused)
        numbers: Int64s = given[3]
        return numbers

    def adding(self, lanes: Int64s, values: Sequence[Any], init_w: ArrayLike, model_version: int) -> Changes:
        """The changes, for `_core.at_once`, that do what `add_many` does: `lanes` [N], `values` [N, *F], `init_w` a
        number or [N].
        """
        count, version = len(lanes), self.checked_version(model_version)
        arrays = exact_columns(self.schema, values, (count,))
        given = (lanes, arrays, init_weights(init_w, count), np.empty(count, np.int64), version)
        return [(self._add_many, given)]

    def adding_one(self, lane: int, values: tuple[Any, ...], init_w: Any, model_version: int) -> Changes:
        """The changes that add one entry of exact values [*F]."""
        version, weight = self.checked_version(model_version), float(init_weights(init_w, 1)[0])
        return [(self._add_one, (lane, values, weight, version))]

    def explain(self, refused: _core.NotAdded) -> NoReturn:
        """Raise in words why entries were not added."""
        status, lane, values = refused.args
        if status == _core.REPEATED:
            raise ParameterError("lanes", lane, "each at most once in a call") from None
        refuse(self, self.schema, lane, status, values, self._ragged_most)

    def extend(self, lane: int, values: Sequence[Any], init_w: ArrayLike = 1.0, model_version: int = 0) -> Int64s:
        """Add T consecutive entries to a lane's open episode, all or none, and return their numbers.

        Args:
            lane: Which open episode.
            values: A value for each column but the return column, in the schema's order: [T, *F].
            init_w: As in `add`: a number, or float32 [T].
            model_version: As in `add`.

        Raises: as `add`.
        """
        return self._extended(lane, values, init_w, self.checked_version(model_version))

    def _extended(self, lane: int, values: Sequence[Any], init_w: ArrayLike, version: int) -> Int64s:
        """`extend`, also with the unknown version of entries that were written before `max_model_lag` was set."""
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
            values: For each column but the return column exact arrays [T, *F] whose values are known to fit.
            init_w: [T] Finite, and at least 0.
            model_version: [T]
            age: [T] Seconds since each entry was recorded.

        Raises:
            EpisodeTooLong: There is no room. Nothing was added.
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
        multiplier, bootstrap, states = ending(self.schema, multiplier, final_state, terminated, bootstrap_value)
        ended = states is not None or bool(terminated)
        with self.held():
            length = self._open_length(lane)
            if length < 0:
                raise EpisodeClosedError("close the episode", lane)
            if length == 0:
                raise EmptyEpisodeError(lane)
            self._close(lane, multiplier, update_value, update_weight, ended, bool(terminated), states, bootstrap)

    def closing(
        self,
        lane: int,
        *,
        final_state: Any = None,
        terminated: bool | None = None,
        bootstrap_value: ArrayLike | None = None,
        is_cut: bool = False,
    ) -> Changes:
        """The changes, for `_core.at_once`, that close an open episode with entries as `close` does, and open the next.

        States of `final_state` are [*F]; `bootstrap_value` is a number or [*R].

        Args:
            is_cut: It goes on: it is stored as truncated.
        """
        multiplier, bootstrap, states = ending(self.schema, 1.0, final_state, terminated, bootstrap_value)
        ended = states is not None or bool(terminated)
        close = (lane, multiplier, True, True, ended, bool(terminated), states, bootstrap)
        return [(self._close, close), *self.opening(lane)]

    leaving: Sized = ()
    """Closed episodes that have to be sent elsewhere."""

    def flush(self, first_lane: int, lanes: int) -> None:
        """Send them. There are none here."""

    @contextmanager
    def cut_for_now(self, states: Mapping[int, Any]) -> Iterator[None]:
        """Let open episodes count as cut off in these states while they are drawn from: their newest entries can be
        drawn, too, by windows that are shorter. Others wait meanwhile; the caller adds nothing.

        Args:
            states: For each lane whose episode has entries the state that follows them, as `close` takes it.

        Raises:
            EntryError: a state does not fit.
        """
        ends = {lane: ending(self.schema, 1.0, state, False, None) for lane, state in states.items()}
        with self.held(), ExitStack() as going_on:
            for lane, (_, bootstrap, final) in ends.items():
                if self.live and self.open_length(lane) > 0 and final is not None:
                    self._end_for_now(lane, final, bootstrap)
                    going_on.callback(self._end_no_more, lane)
            yield

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
        super().saw_model(arguments.model_version(version, "version"))

    def _apply(self, new: Parameters) -> None:
        are_limits_new = self._limit(*limits_of(new))
        self._configure(**cutting_of(new, self._dimensions), are_limits_new=are_limits_new)
        self._gathering = BatchGatherer(self.schema, new)

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
        arguments.whole("count", count, 1, MAX_ROWS)
        return self._drawn(count, fractions, None)

    def _drawn(self, count: int, fractions: ArrayLike | None, weights: Float64s | None) -> Int64s:
        """`draw`, with what the chances were proportional to in `weights`."""
        if fractions is not None:
            fractions = exact_fractions(fractions, count)
        with self.held():
            numbers = self._draw(count, fractions, weights)
            if numbers is None:
                if (left := self.draws_left) > 0:
                    raise UsedUp(count, left, self._parameters.max_times_sampled)
                raise EmptyMemory(self.num_entries)
            return numbers

    def take_back(self, numbers: Int64s) -> None:
        """Undo a draw whose numbers nobody got, int64 [count]: nothing has left since. The generator goes on."""
        self._count_draws(numbers, is_back=True)

    def weights(self, numbers: ArrayLike) -> Float64s:
        """Weights float64 [B] of entries by number. Raises StaleEntry where one has left."""
        wanted = entry_numbers(numbers)
        weights = np.empty(len(wanted), np.float64)
        check_stale(wanted, self._weights(wanted, weights))
        return weights

    def gather(self, numbers: ArrayLike) -> GatheredSamples:
        """Copies of samples of entries by number, int64 [B]: both ends of their windows and discounted rewards between.

        Raises StaleEntry where an entry has left the memory since it was drawn; `sample` cannot meet that.
        """
        wanted = entry_numbers(numbers)
        with self.held():
            return self._gathering.fill(self, wanted, self._gathering.allocate(len(wanted)))

    def sample(self, batch_size: int, out: Mapping[str, NDArray[Any]] | None = None) -> Sample:
        """Draw and gather as one moment: nothing leaves in between.

        Args:
            batch_size: How many, B, at least 1.
            out: Arrays [B, ...] of the caller to gather into, by the names they have in a `Batch`; others are made new.
                Those that are not C-contiguous, and the ids, are left to `Batch.copy_into`.

        Raises:
            EmptyMemory: no entry has a weight above 0.
            ParameterError: an array of `out` does not fit.
        """
        arguments.whole("batch_size", batch_size, 1, MAX_ROWS)
        with self.held():
            made = self._gathering.allocate(batch_size)
            if out is not None:
                place(self.schema, made, out)
            weights, sums = np.empty(batch_size, np.float64), self._sums(self._parameters.normalize == "global")
            filled = self._gathering.fill(self, self._drawn(batch_size, None, weights), made)
            if self._parameters.max_times_sampled:
                filled.weight[:] = weights  # some weigh nothing any more
            return Sample(filled, weights, *sums)

    def gather_episodes(self, rows: Int64s, length: int) -> tuple[GatheredSamples, Int64s]:
        """Copies of the whole episodes that begin in these rows, as sequences of `length` entries.

        Returns:
            (gathered, rows): ids are int64 [B, length] here, with -1 behind an episode's end, as in the rows
            [B, length] of the entries.
        """
        with self.held():
            return self._gathering.episodes(self, rows, length)

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
        wanted = entry_numbers(numbers, "ids")
        errors = np.ascontiguousarray(real_errors(td_errors), np.float64)
        if wanted.shape != errors.shape:
            raise ParameterError("td_errors", f"shape {errors.shape}", f"as many as the ids, shape {wanted.shape}")
        applied, stale = self._update_priorities(wanted, errors, self._parameters.priority_epsilon)
        if applied < 0:
            raise ParameterError(f"td_errors[{stale}]", float(errors[stale]), "finite")
        return applied, stale

    def count_replaced(self, numbers: ArrayLike, seconds: float) -> int:
        """How many of these entries, int64 [B], have left, and another one took their place more than so many seconds
        ago.
        """
        return self._count_replaced(entry_numbers(numbers, "ids"), seconds)

    # What caches are built of

    def draw_windows(self, count: int) -> DrawnWindows:
        """Draw, and say where the samples' frames are instead of copying them. Raises EmptyMemory."""
        arguments.whole("count", count, 1, MAX_ROWS)
        with self.held():
            weights, sums = np.empty(count, np.float64), self.sums()
            return self.windows_of(self._drawn(count, None, weights), weights, sums)

    def draw_sequences(self, count: int) -> DrawnSequences:
        """Draw, and say where the sequences' frames and entries are instead of copying them. Raises EmptyMemory."""
        arguments.whole("count", count, 1, MAX_ROWS)
        with self.held():
            weights, sums = np.empty(count, np.float64), self.sums()
            return self.sequences_of(self._drawn(count, None, weights), weights, sums)

    def _add_slowly(self, lane: int, values: Any, init_w: float, model_version: Any) -> int:
        """`add` where the quick way would not do: wait for the other thread, convert, or say what is wrong."""
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
