"""Replay in one process: a memory, a sampler and writers behind one small door."""

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
from .sampling import Annealing, Sampler, chosen
from .saving import Lineage
from .schema import Schema, schema_from
from .steps import layout
from .writer import Writer
from .writers import WriterRegistry
from .writing import Observer

_WRITERS = bytes(16)  # all of a buffer's writers, as one client of its limiter


class Buffer(StrictAttributes):
    """A replay buffer. All methods may be called from several threads.

        buffer = memoire.Buffer(schema, capacity=1_000_000, sampler=memoire.Prioritized(0.6, beta=0.4), multi_step=3)
        writer = buffer.writer(envs)
        writer.step(obs, action, reward, terminated, truncated, next_obs, info)
        batch = buffer.sample(256)
        buffer.update_priorities(batch.ids, td_errors)

    An entry can be drawn as soon as the state `multi_step` later is stored, before its episode ends. When the buffer is
    full, the oldest episodes make room. The same seed and the same calls in the same order give the same batches.

    `copy.copy`, `copy.deepcopy` and `pickle` make a buffer of its own with the same episodes and settings, by way of
    the bytes that `save` writes: a large one should be saved.

    Args:
        schema: The columns of an entry; a mapping is made a `Schema`.
        capacity: Entries there is room for. `schema.entry_bytes` and 112 bytes each must fit the memory limit of the
            process's container, beside its other buffers and servers.
        sampler: How entries are chosen: `Prioritized(exponent, beta=...)`, `RankBased`, `Greedy` or `Uniform`. By
            default Prioritized(0.6, beta=0.4).
        parameters: All settings of sampling at once; the others here change single ones.
        multi_step: Steps between obs and next_obs in a batch; the rewards between are summed. By default 1.
        discount: gamma: a number, or one for each dimension of the reward. By default 0.99.
        frame_stack: Observations in a sample's window. By default 1.
        start: Windows that reach before an episode's first entry: "repeat" its first observation, as by default, put
            in "zero" ones, or "skip" such samples.
        seed: Of the draws; None is different each time.
        ragged_limit: Bytes that values of ragged columns may take; the oldest episodes make room. 0 is any; in a
            container at most half of what its memory limit leaves.
        fields: Any other field of `Parameters`, such as min_size=1000.

    `Server` and `Table` take the same keywords for the same things.

    Raises:
        ParameterError: a parameter is outside its range, does not fit the schema, or makes more memory than the
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
        follows = chosen(parameters, sampler, discount, fields)
        self._memory = Memory(schema_from(schema), capacity, follows, live=True, seed=seed, ragged_limit=ragged_limit)
        check_size(follows, capacity)
        self._annealing = Annealing()  # changes while the memory is held
        memory = self._memory
        self._limiter = Limiter(follows, lambda: memory.num_positive)
        self._limiter.met(_WRITERS, 0, 0)
        self._writers = WriterRegistry(memory)
        self._lineage = Lineage()
        self._guard()

    @property
    def schema(self) -> Schema:
        """The columns of an entry."""
        return self._memory.schema

    @property
    def capacity(self) -> int:
        """Entries there is room for."""
        return self._memory.capacity

    @property
    def parameters(self) -> Parameters:
        """Everything that shapes sampling; `configure` changes it."""
        return self._memory.parameters

    @property
    def client_id(self) -> bytes:
        """16 random bytes that name this buffer: new when it is made, copied or loaded, kept by `load(resume=True)`."""
        return self._lineage.client_id

    @property
    def num_episodes(self) -> int:
        """Episodes that are stored and have ended."""
        return self._memory.num_episodes

    @property
    def memory(self) -> Memory:
        """The engine, for what has no door here."""
        return self._memory

    def __len__(self) -> int:
        """Entries that are stored, those of open episodes included."""
        return self._memory.num_entries

    def __bool__(self) -> bool:
        """True also when it is empty."""
        return True

    @checked_names()
    def writer(
        self,
        envs: Any = None,
        *,
        num_envs: int | None = None,
        autoreset: Any = None,
        observer: Observer | None = None,
        longest: int | None = None,
        check: bool = True,
        resume: bool = False,
    ) -> Writer:
        """A writer for an environment, or for all members of a vector environment; close it when it is done.

        Args:
            envs: The environment. Its size and autoreset mode are read; none of its methods is called.
            num_envs: Members of a vector environment, if `envs` is not given; None is a single environment.
            autoreset: "next_step", "same_step" or "disabled", if `envs` does not say its mode.
            observer: Told of entries and episodes.
            longest: Entries after which an endless episode is cut (see `Writer`). None leaves half of the capacity
                to the open episodes of all writers.
            check: Whether each obs is compared with the next_obs of the step before.
            resume: Go on as a writer of such environments that was open when the buffer was saved, in its open
                episodes: the next obs is that in which its last step ended. If the environments were reset instead,
                call `writer.reset()` first. Several writers go on in the order in which they were made. If no more was
                saved, this is another writer. Without `resume`, the open episodes of saved writers end.

        Raises:
            ParameterError: the autoreset mode is missing or unknown; the mode or `num_envs` contradicts `envs`, or with
                `resume` all writers that were saved; or the members are too many for the capacity.
            SchemaError: `Writer.step` cannot take a value for one of the columns.
        """
        members, mode = layout(envs, num_envs, autoreset)
        with self._memory.held():  # before the lock of all writers, as `configure` and `save` do
            return self._writers.make(members, mode, observer, longest=longest, check=check, resume=resume)

    @checked_names()
    def sample(self, batch_size: int, *, out: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        """Draw a batch, with replacement: P(i) = weight_i / total weight.

        Args:
            batch_size: Samples B, at least 1.
            out: Arrays [B, ...] to fill, under their names in a batch, or an earlier batch; others are made new.

        Returns:
            Batch; its arrays belong to the caller. importance [B] is (N P(i)) ** -beta over its maximum (or, with
            normalize="global", over the largest possible), N the number of entries that could have been drawn.

        Raises:
            EmptyMemory: there is nothing to draw yet, or nothing that may be drawn so often (UsedUp).
            NotEnoughSamples: fewer entries than `min_size` can be drawn, or drawing is further ahead of recording than
                `samples_per_insert_tolerance` allows; `reason` says what it waits for.
            ParameterError: an array of `out` does not fit, or the tolerance is too small for such a batch.

        Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4.
        """
        if self._limiter.is_active:
            self._ask_to_draw(batch_size)
        with self._memory.held():
            gathered, weights, total, population, smallest = self._memory.sample(batch_size, out)
            parameters = self._memory.parameters
            beta = self._annealing.next(parameters)
        self._limiter.drew(batch_size)
        by_largest = parameters.normalize == "global"
        corrections, divisor = _core.importance(weights, total, population, smallest, beta, by_largest)
        batch = Batch(self.schema, gathered, corrections, self.update_priorities, divisor=divisor)
        return batch if out is None else batch.copy_into(out)

    @checked_names()
    def sample_episodes(
        self, count: int, *, group: str | None = None, group_size: int | None = None
    ) -> episodes.EpisodeBatch:
        """Draw whole episodes that have ended, padded to the longest, or whole groups of them.

            batch = buffer.sample_episodes(8, group="prompt", group_size=16)
            returns = (batch.reward * batch.mask).sum(axis=1).reshape(8, 16)
            advantage = (returns - returns.mean(axis=1, keepdims=True)) / (returns.std(axis=1, keepdims=True) + 1e-6)

        An episode's chance is in proportion to the mean weight of its entries, a group's to that of its episodes: with
        `Uniform` all are alike, whatever their length.

        Args:
            count: Episodes; with `group` groups, at least 1. One may be there more than once if it weighs more than
                1 / count of the total.
            group: A plain column that is the same in all entries of an episode: what has equal values belongs together.
            group_size: Episodes of each group: only groups that have as many are drawn, and of these the newest.
                None draws every episode of a group that can be drawn.

        Returns:
            EpisodeBatch: arrays [B, T, ...], `mask`, `steps`, `group`; importance is that of the episode or group.

        Raises:
            EmptyMemory: no episode has ended, no group is complete, or too few may be drawn yet (`max_times_sampled`).
            ParameterError: an argument is out of its range, or the group's column changes within an episode.

        Groups as in Shao et al., DeepSeekMath, 2024, section 4.1 (GRPO). Cost: one pass over all entries' weights.
        """
        return episodes.sample(
            self._memory, count, self._annealing.next, self.update_priorities, group=group, group_size=group_size
        )

    def _ask_to_draw(self, batch_size: int) -> None:
        """Refuse a batch that has to wait for entries; recording never waits here, where one thread may do both."""
        generated = self._memory.generated
        self._limiter.reported(_WRITERS, generated, generated)
        check_batch(self.parameters, batch_size)
        if reason := self._limiter.why_not_draw(batch_size):
            old = self.parameters.lag_in_words(self._memory.newest_model)
            raise NotEnoughSamples(batch_size, self._memory.num_positive, 0, 0, 0.0, reason + old)

    @checked_names()
    def update_priorities(self, ids: ArrayLike, td_errors: ArrayLike) -> PriorityUpdate:
        """Give entries the priority |td error| + `priority_epsilon`, 1e-6 unless it was changed.

        Args:
            ids: [B] a batch's ids.
            td_errors: [B], of any sign; where an id is there twice, the last counts.

        Returns:
            PriorityUpdate: `applied` entries were there, `stale` ones have made room for others since.

        Raises:
            ParameterError: a TD error is not finite, or there are not as many as ids. Nothing was changed.
        """
        return PriorityUpdate(*self._memory.update_priorities(ids, td_errors))

    @checked_names(NAMES)
    def configure(
        self, *, sampler: Sampler | None = None, discount: float | Sequence[float] | None = None, **fields: Any
    ) -> Parameters:
        """Change how everything stored is weighed and cut: a sampler, a discount, or fields of `Parameters` by name.
        Returns what is followed now.

        Beta goes its way by itself with `Prioritized(0.6, beta=Linear(0.4, 1.0, batches))`, from the batch after this
        call on. Alpha is changed here, now and then: weights of all entries follow from it.

        Raises:
            ParameterError: nothing was changed.
        """
        with self._memory.held():
            follows = chosen(self.parameters, sampler, discount, fields)
            check_size(follows, self.capacity)
            self._writers.check(follows)
            self._memory.configure(follows)
        self._limiter.configure(follows)
        return follows

    def save(self, path: str | Path) -> int:
        """Write all episodes, with what is known of their entries, to an .npz file; returns how many.

        The file appears whole or not at all. `numpy.load(path)["obs"]` is a quick look. Other threads wait meanwhile.

        Raises:
            BufferLocked: another one goes on as this buffer, or as the one that is saved there: see `load`.
            NotItsPast: another one went on as this buffer, and was saved there.
            ForkedError: this process was forked from one that had resumed the buffer. Nothing was written.
        """
        self._lineage.before_save(path)
        with self._writers.still():
            return dataset_writing.write_file(self._memory, path, self._beside)

    def close(self) -> None:
        """Let others go on as this buffer, if `load(resume=True)` made it. It can be used all the same."""
        self._lineage.release()

    def _beside(self) -> dict[str, Any]:
        """What a draw follows from beside the memory; while that is held."""
        return {
            "annealing": self._annealing.state(),
            "limiter": self._limiter.state_of(_WRITERS),
            "lineage": self._lineage.next_save(),
            "writers": self._writers.told(self._memory.open_length),
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
        """A buffer that goes on as the saved one: it draws the batches that the other one would have drawn.

            buffer = memoire.Buffer.load(path, resume=True) if path.exists() else memoire.Buffer(...)
            writer = buffer.writer(envs, resume=True)

        Entries lie where they lay, under the same ids. Beta's progress, random numbers, the newest model and what the
        limiter counted are as they were. An episode that was open ends when the first writer is made; how it ended is
        not known then. With `writer(resume=True)` it goes on.

        Args:
            path: Of the file, or the file itself, opened to read bytes.
            capacity: Entries there is room for; as it was, unless it is given. With another one ids are new, and the
                oldest episodes leave if need be.
            seed: Of other draws than those that the saved buffer would have made; None goes on with its own.
            resume: Be the saved buffer, with its client id. No other process or buffer can: its lineage is locked in
                the file's folder, until `close` or the end of the process. Else this is another buffer.
            sampler, discount, fields: What to change, as `configure` takes it.

        Raises:
            DataError: the file is damaged, or none.
            ParameterError: a change is outside its range; or `resume` with another capacity, with a file that is open,
                or with one that `memoire.dataset.save` wrote.
            BufferLocked: another one has resumed the buffer.
        """
        if not resume:
            return cls._loaded(path, None, capacity, seed, sampler, discount, fields)
        if not isinstance(path, str | Path):
            raise ParameterError("resume", resume, "False for a file that is open: a path is locked")
        lineage = Lineage.resume(path)
        try:
            return cls._loaded(path, lineage, capacity, seed, sampler, discount, fields)
        except BaseException:
            lineage.release()
            raise

    @classmethod
    def _loaded(
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
            with open(path, "rb") as file:  # once: another one may take its place meanwhile
                return cls._loaded(file, lineage, capacity, seed, sampler, discount, fields)
        saved = datafile.about(path)
        follows = chosen(saved.parameters, sampler, discount, fields)
        is_same = capacity is None or capacity == saved.capacity
        if lineage is not None and not is_same:
            raise ParameterError("capacity", capacity, f"{saved.capacity}, as it was: with another one ids are new")
        room = saved.capacity if capacity is None else capacity
        check_size(follows, room)
        buffer = cls(saved.schema, room, parameters=saved.parameters if is_same else follows)
        buffer._go_on(datafile.restore(buffer.memory, path), is_same, str(getattr(path, "name", "(in memory)")))
        if lineage is not None:
            buffer._lineage = lineage
        if seed is not None:
            buffer.memory.seed(seed)
        if follows != saved.parameters and is_same:
            buffer.configure(**{name: getattr(follows, name) for name in NAMES})
        return buffer

    def _go_on(self, beside: Mapping[str, Any], is_same: bool, path: str) -> None:
        """Draw as a saved buffer, of which this was beside its memory; nothing, if that was no buffer's."""
        lanes = len(self._memory.contents()["lanes"])
        if not beside:
            return self._writers.adopt(None, lanes, self._memory.open_length)
        try:
            self._writers.adopt(beside["writers"] if is_same else None, lanes, self._memory.open_length)
            self._annealing.go_on_from(**beside["annealing"])
            recorded = int(beside["limiter"]["recorded"]) if is_same else self._memory.generated
            self._limiter.take_over(beside["limiter"], _WRITERS, recorded)
        except (KeyError, TypeError, ValueError, OverflowError, MemoireError) as error:
            raise DataError(path, f"does not say how far draws and writers have come: {error!r}") from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles hold what `save` writes."""
        file = io.BytesIO()
        with self._writers.still():
            dataset_writing.write(self._memory, file, self._beside)
        return _restored, (type(self), file.getvalue())

    @property
    def rate(self) -> RateStats:
        """How drawing stands beside recording, and what a batch would wait for."""
        generated = self._memory.generated
        self._limiter.reported(_WRITERS, generated, generated)
        return self._limiter.stats()

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `max_model_lag` counts, as from the versions of entries.

        Raises:
            ParameterError: it is no whole number of at least 0.
        """
        self._memory.saw_model(version)

    def info(self) -> dict[str, Any]:
        """What is stored and set, as plain numbers and strings."""
        return self._memory.info()

    def __repr__(self) -> str:
        return f"Buffer({len(self)} of {self.capacity} entries, {self.num_episodes} episodes, {self.schema!r})"


def _restored(kind: type[Buffer], content: bytes) -> Buffer:
    """A buffer out of its pickle."""
    return kind.load(io.BytesIO(content))
