"""Replay buffer in one process: a memory, a sampler, a limiter and writers behind one class."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from numpy.typing import ArrayLike, NDArray

from memoire import _core
from memoire.arguments import checked_names
from memoire.errors import DataError, MemoireError, NotEnoughSamples, ParameterError

from . import datafile, episodes
from . import saving as dataset_writing
from .batch import Batch, PriorityUpdate
from .limiter import Limiter, RateStats
from .memory import Memory
from .parameters import NAMES, Parameters, Start, StrictAttributes, check_batch, check_size
from .sampling import Annealing, Sampler, resolve_parameters
from .saving import Lineage
from .schema import Schema, schema_from
from .steps import layout
from .writer import Writer
from .writers import WriterRegistry
from .writing import EntryObserver

_WRITERS = bytes(16)  # the limiter counts all writers of a buffer as one client with this id


class Buffer(StrictAttributes):
    """A replay buffer in this process. All methods may be called from several threads.

    Example:
        buffer = memoire.Buffer(schema, capacity=10_000, sampler=memoire.Prioritized(0.6, beta=0.4), multi_step=3)
        writer = buffer.writer()
        for step in range(10):
            writer.step(np.full(4, step), 0, 1.0, step == 9, False, np.full(4, step + 1))
        batch = buffer.sample(4)
        buffer.update_priorities(batch.ids, np.ones(4))

    An entry can be drawn as soon as the state `multi_step` later is stored, before its episode ends. When the buffer is
    full, the oldest episodes make room. The same seed and the same calls in the same order give the same batches.

    `copy.copy`, `copy.deepcopy` and `pickle` make an independent buffer with the same episodes and settings, through
    the bytes that `save` writes. Save a large buffer to a file instead.

    Args:
        schema: The columns of an entry: a `Schema`, or a mapping that one is made from.
        capacity: Number of entries that fit. Each takes `schema.entry_bytes` and 112 bytes, and all must fit the memory
            limit of the process's container, beside its other buffers and servers.
        sampler: Rule that chooses entries: `Prioritized(exponent, beta=...)`, `RankBased`, `Greedy` or `Uniform`. By
            default Prioritized(0.6, beta=0.4).
        parameters: All settings of sampling at once; the other arguments change single ones.
        multi_step: Steps between obs and next_obs in a batch; the rewards between are summed. By default 1.
        discount: gamma: a number, or one for each dimension of the reward. By default 0.99.
        frame_stack: Observations in a sample's window. By default 1.
        start: Windows that begin before an episode's first entry: "repeat" its first observation (the default), pad
            with "zero" observations, or "skip" these samples.
        seed: Seed of the draws; None draws differently each time.
        ragged_limit: Limit in bytes for values of ragged columns; the oldest episodes make room. 0 sets no limit, but
            in a container at most half of what its memory limit leaves.
        fields: Further fields of `Parameters`, such as min_size=1000.

    `Server` and `Table` take the same keywords with the same meaning.

    Raises:
        ParameterError: a parameter is outside its range, does not fit the schema, or needs more memory than the
            container has.
    """

    @checked_names(NAMES)
    def __init__(
        self,
        schema: Schema | Mapping[str, Any],
        capacity: int,
        *,
        sampler: Sampler | None = None,
        parameters: Parameters | None = None,
        multi_step: int | None = None,
        discount: float | Sequence[float] | None = None,
        frame_stack: int | None = None,
        start: Start | None = None,
        seed: int | None = None,
        ragged_limit: int = 0,
        **fields: Any,
    ) -> None:
        fields |= {"multi_step": multi_step, "frame_stack": frame_stack, "start": start}
        follows = resolve_parameters(parameters, sampler, discount, fields)
        self._memory = Memory(schema_from(schema), capacity, follows, live=True, seed=seed, ragged_limit=ragged_limit)
        check_size(follows, capacity)
        self._annealing = Annealing()  # changes while the memory is held
        memory = self._memory
        self._limiter = Limiter(follows, lambda: memory.num_positive)
        self._limiter.register(_WRITERS, 0, 0)
        self._writers = WriterRegistry(memory)
        self._lineage = Lineage()
        self._guard()

    @property
    def schema(self) -> Schema:
        """The columns of an entry."""
        return self._memory.schema

    @property
    def capacity(self) -> int:
        """Number of entries that fit."""
        return self._memory.capacity

    @property
    def parameters(self) -> Parameters:
        """All settings of sampling; `configure` changes them."""
        return self._memory.parameters

    @property
    def client_id(self) -> bytes:
        """16 random bytes that identify this buffer. Copies and loaded buffers get new ones, unless `load` resumes."""
        return self._lineage.client_id

    @property
    def num_episodes(self) -> int:
        """Number of stored episodes that have ended."""
        return self._memory.num_episodes

    @property
    def memory(self) -> Memory:
        """The storage engine, for methods that `Buffer` does not have."""
        return self._memory

    def __len__(self) -> int:
        """Return the number of stored entries, open episodes included."""
        return self._memory.num_entries

    def __bool__(self) -> bool:
        """Return True, also if the buffer is empty."""
        return True

    @checked_names()
    def writer(
        self,
        envs: Any = None,
        *,
        num_envs: int | None = None,
        autoreset: Any = None,
        observer: EntryObserver | None = None,
        longest: int | None = None,
        check: bool = True,
        resume: bool = False,
    ) -> Writer:
        """Return a writer for an environment, or for all members of a vector environment. Close the writer after use.

        Args:
            envs: The environment. The environment's size and autoreset mode are read; no method is called.
            num_envs: Members of a vector environment, if `envs` is not given; None is a single environment.
            autoreset: "next_step", "same_step" or "disabled", if `envs` does not say its mode.
            observer: Object that is notified of entries and episodes.
            longest: Entries after which an endless episode is cut (see `Writer`). None shares half of the capacity
                among the open episodes of all writers.
            check: True to compare each obs with the next_obs of the step before.
            resume: Continue as a writer of the same kind that was open when the buffer was saved, in its open
                episodes: the next obs must be the state in which its last step ended. If the environments were reset
                instead, call `writer.reset()` first. Saved writers resume in the order in which they were made. After
                the last saved writer, a new one is made. Without `resume`, open episodes of saved writers end.

        Raises:
            ParameterError: the autoreset mode is missing or unknown; the mode or `num_envs` contradicts `envs` or, with
                `resume`, every saved writer; or the capacity is too small for the number of members.
            SchemaError: `Writer.step` cannot pass a value for one of the columns.
        """
        members, mode = layout(envs, num_envs, autoreset)
        with self._memory.held():  # `configure` and `save` lock in this order
            return self._writers.make(members, mode, observer, longest=longest, check=check, resume=resume)

    @checked_names()
    def sample(self, batch_size: int, *, out: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        """Draw a batch, with replacement: P(i) = weight_i / total weight.

        Args:
            batch_size: Samples B, at least 1.
            out: Arrays [B, ...] to fill, by their names in a batch, or an earlier batch; missing ones are allocated.

        Returns:
            Batch; its arrays belong to the caller. importance [B] is (N P(i)) ** -beta over its maximum (or, with
            normalize="global", over the largest possible), N the number of entries that can be drawn.

        Raises:
            EmptyMemory: no entry can be drawn yet. NoDrawsLeft (a subclass): they may not be drawn this often again.
            NotEnoughSamples: fewer entries than `min_size` can be drawn, or drawing is further ahead of recording than
                `samples_per_insert_tolerance` allows; `reason` names the missing condition.
            ParameterError: an array of `out` does not fit, or the tolerance is too small for the batch size.

        Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4.
        """
        if self._limiter.is_active:
            self._check_rate(batch_size)
        with self._memory.held():
            gathered, weights, total, population, smallest = self._memory.sample(batch_size, out)
            parameters = self._memory.parameters
            beta = self._annealing.next(parameters)
        self._limiter.record_draw(batch_size)
        by_largest = parameters.normalize == "global"
        corrections, divisor = _core.importance(weights, total, population, smallest, beta, by_largest)
        batch = Batch(self.schema, gathered, corrections, self.update_priorities, divisor=divisor)
        return batch if out is None else batch.copy_into(out)

    @checked_names()
    def sample_episodes(
        self, count: int, *, group: str | None = None, group_size: int | None = None
    ) -> episodes.EpisodeBatch:
        """Draw whole episodes that have ended, padded to the longest, or whole groups of episodes.

            batch = buffer.sample_episodes(8, group="prompt", group_size=16)
            returns = (batch.reward * batch.mask).sum(axis=1).reshape(8, 16)
            advantage = (returns - returns.mean(axis=1, keepdims=True)) / (returns.std(axis=1, keepdims=True) + 1e-6)

        An episode's probability is proportional to the mean weight of its entries, a group's to that of its episodes.
        With `Uniform` all have the same probability, whatever their length.

        Args:
            count: Number of episodes or, with `group`, of groups; at least 1. The same episode or group can appear
                repeatedly if its weight is above 1 / count of the total.
            group: A plain column whose value is the same in all entries of an episode. Equal values form a group.
            group_size: Episodes of each group: only groups with at least as many are drawn, and of these the newest.
                None draws all episodes of a group that can be drawn.

        Returns:
            EpisodeBatch: arrays [B, T, ...], `mask`, `steps`, `group`; importance is that of the episode or group.

        Raises:
            EmptyMemory: no episode has ended, no group is complete, or `max_times_sampled` allows too few draws.
            ParameterError: an argument is out of range, or the group's column changes within an episode.

        Groups as in Shao et al., DeepSeekMath, 2024, section 4.1 (GRPO). Cost: one pass over all entries' weights.
        """
        return episodes.sample(
            self._memory, count, self._annealing.next, self.update_priorities, group=group, group_size=group_size
        )

    def _check_rate(self, batch_size: int) -> None:
        """Raise NotEnoughSamples if a batch has to wait: the same thread may also record, so waiting could hang."""
        generated = self._memory.generated
        self._limiter.report_inserts(_WRITERS, generated, generated)
        check_batch(self.parameters, batch_size)
        if reason := self._limiter.why_not_draw(batch_size):
            old = self.parameters.lag_in_words(self._memory.newest_model)
            raise NotEnoughSamples(batch_size, self._memory.num_positive, 0, 0, 0.0, reason + old, "Add entries first.")

    @checked_names()
    def update_priorities(self, ids: ArrayLike, td_errors: ArrayLike) -> PriorityUpdate:
        """Set the priority of entries to |td error| + `priority_epsilon` (1e-6 by default).

        Args:
            ids: [B] ids of a batch.
            td_errors: [B], of any sign; the last one counts if an id appears twice.

        Returns:
            PriorityUpdate: `applied` entries were updated, `stale` ones have been evicted.

        Raises:
            ParameterError: a TD error is not finite, or the number of errors differs from that of ids. Nothing was
                changed.
        """
        return PriorityUpdate(*self._memory.update_priorities(ids, td_errors))

    @checked_names(NAMES)
    def configure(
        self, *, sampler: Sampler | None = None, discount: float | Sequence[float] | None = None, **fields: Any
    ) -> Parameters:
        """Change the weights and windows of all stored entries: by a sampler, a discount, or fields of `Parameters`.
        Returns the new parameters.

        With `Prioritized(0.6, beta=Linear(0.4, 1.0, batches))` beta grows by itself from the next batch on. Change the
        exponent alpha seldom: the weights of all entries are computed again.

        Raises:
            ParameterError: a setting is invalid. Nothing was changed.
        """
        with self._memory.held():
            follows = resolve_parameters(self.parameters, sampler, discount, fields)
            check_size(follows, self.capacity)
            self._writers.check(follows)
            self._memory.configure(follows)
        self._limiter.configure(follows)
        return follows

    def save(self, path: str | Path) -> int:
        """Write all episodes and their metadata to an .npz file; return the number of episodes.

        The file is replaced as a whole or not at all. `numpy.load(path)["obs"]` reads a column. All other threads wait.

        Raises:
            BufferLocked: another buffer has resumed this buffer, or the buffer saved at `path`: see `load`.
            BufferSaveConflict: another buffer resumed this buffer and was saved at `path` since.
            ForkedError: this process was forked from one that had resumed the buffer. Nothing was written.
        """
        self._lineage.before_save(path)
        with self._writers.steps_blocked():
            return dataset_writing.write_file(self._memory, path, self._owner_state)

    def close(self) -> None:
        """Release the lock of `load(resume=True)`, so that another process can resume. The buffer stays usable."""
        self._lineage.release()

    def _owner_state(self) -> dict[str, Any]:
        """Return the state beside the memory that draws depend on. The caller holds the memory."""
        return {
            "annealing": self._annealing.state(),
            "limiter": self._limiter.state_of(_WRITERS),
            "lineage": self._lineage.next_save(),
            "writers": self._writers.state(self._memory.open_length),
        }

    @classmethod
    @checked_names(NAMES)
    def load(
        cls,
        path: str | Path | IO[bytes],
        capacity: int | None = None,
        *,
        seed: int | None = None,
        resume: bool = False,
        sampler: Sampler | None = None,
        discount: float | Sequence[float] | None = None,
        **fields: Any,
    ) -> Self:
        """Load a saved buffer; it draws the batches that the saved one would have drawn.

            buffer = memoire.Buffer.load(path, resume=True) if path.exists() else memoire.Buffer(...)
            writer = buffer.writer(envs, resume=True)

        Entries keep their places and ids. Beta's progress, the random generator, the newest model and the limiter's
        counts are restored. Making the first writer closes the saved writers' open episodes without a known end;
        `writer(resume=True)` continues them.

        Args:
            path: Path of the file, or a file that is open to read bytes.
            capacity: Number of entries that fit; None keeps the saved one. With another capacity ids are new, and the
                oldest episodes are left out if they do not fit.
            seed: Seed of new draws; None continues the saved buffer's random numbers.
            resume: Take over the saved buffer's client id. Only one process or buffer at a time can: a lock in the
                file's folder is held until `close` or the end of the process. With False the buffer gets a new id.
            sampler, discount, fields: Changes, as `configure` takes them.

        Raises:
            DataError: the file is damaged, or not a saved memory.
            ParameterError: a change is outside its range; or `resume` comes with another capacity, with an open file,
                or with a file that `memoire.dataset.save` wrote.
            BufferLocked: another buffer has resumed the saved one.
        """
        if not resume:
            return cls._load(path, None, capacity, seed, sampler, discount, fields)
        if not isinstance(path, str | Path):
            raise ParameterError.with_text(
                "resume=True needs the path of a file, which is locked; an open file cannot be resumed."
            )
        lineage = Lineage.resume(path)
        try:
            return cls._load(path, lineage, capacity, seed, sampler, discount, fields)
        except BaseException:
            lineage.release()
            raise

    @classmethod
    def _load(
        cls,
        path: str | Path | IO[bytes],
        lineage: Lineage | None,
        capacity: int | None,
        seed: int | None,
        sampler: Sampler | None,
        discount: float | Sequence[float] | None,
        fields: Mapping[str, Any],
    ) -> Self:
        if isinstance(path, str | Path):
            with open(path, "rb") as file:  # open once: another file can replace the path
                return cls._load(file, lineage, capacity, seed, sampler, discount, fields)
        saved = datafile.read_summary(path)
        follows = resolve_parameters(saved.parameters, sampler, discount, fields)
        is_same = capacity is None or capacity == saved.capacity
        if lineage is not None and not is_same:
            raise ParameterError.with_text(
                f"capacity={capacity} cannot be combined with resume=True: the saved capacity is {saved.capacity}, and "
                f"another one would change the ids."
            )
        room = saved.capacity if capacity is None else capacity
        buffer = cls(saved.schema, room, parameters=saved.parameters if is_same else follows)
        buffer._restore_state(datafile.restore(buffer.memory, path), is_same, str(getattr(path, "name", "(in memory)")))
        if lineage is not None:
            buffer._lineage = lineage
        if seed is not None:
            buffer.memory.seed(seed)
        if follows != saved.parameters and is_same:
            buffer.configure(**{name: getattr(follows, name) for name in NAMES})
        return buffer

    def _restore_state(self, beside: Mapping[str, Any], is_same: bool, path: str) -> None:
        """Restore the state of draws and writers from `beside`, which is empty if no buffer saved the memory."""
        lanes = len(self._memory.contents()["lanes"])
        if not beside:
            return self._writers.adopt(None, lanes, self._memory.open_length)
        try:
            self._writers.adopt(beside["writers"] if is_same else None, lanes, self._memory.open_length)
            self._annealing.restore_state(**beside["annealing"])
            recorded = int(beside["limiter"]["recorded"]) if is_same else self._memory.generated
            self._limiter.continue_counts(beside["limiter"], _WRITERS, recorded)
        except (KeyError, TypeError, ValueError, OverflowError, MemoireError) as error:
            raise DataError(path, f"has no valid state of draws and writers: {error!r}") from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the bytes that `save` writes."""
        file = io.BytesIO()
        with self._writers.steps_blocked():
            dataset_writing.write(self._memory, file, self._owner_state)
        return _restored, (type(self), file.getvalue())

    @property
    def rate(self) -> RateStats:
        """Counts of drawing and recording, and the condition that a batch would wait for."""
        generated = self._memory.generated
        self._limiter.report_inserts(_WRITERS, generated, generated)
        return self._limiter.stats()

    def saw_model(self, version: int) -> None:
        """Report the version of an existing model. `max_model_lag` counts from the newest version reported or stored.

        Raises:
            ParameterError: the version is not a whole number of at least 0.
        """
        self._memory.saw_model(version)

    def info(self) -> dict[str, Any]:
        """Return counts and settings as plain numbers and strings."""
        return self._memory.info()

    def __repr__(self) -> str:
        return f"Buffer({len(self)} of {self.capacity} entries, {self.num_episodes} episodes, {self.schema!r})"


def _restored(kind: type[Buffer], content: bytes) -> Buffer:
    """Load a buffer from its pickle."""
    return kind.load(io.BytesIO(content))
