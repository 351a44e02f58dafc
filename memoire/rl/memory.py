"""Trainer's memory of samples from workers: rings of columns, drawn uniformly with one gather for each column.

    memory = GenericMemory(1_000_000, codec=codec)
    memory.append([(act, obs, rew, done, info), ...])        # as workers send them
    batch = memory.sample(256)                               # last_obs, act, rew, new_obs, terminated, truncated

A sample is the result of a step or of a reset; an episode begins with the sample of its reset. Each sample is stored
once, and a transition consists of two consecutive samples of an episode:

    number           0  1  2  3  4  5  6          columns are rings: sample n lies in row n % capacity
    episode starts   0  0  0  3  3  3  3          a transition ends at each sample but the first ones:
    transitions         1  2     4  5  6          five transitions; item 2 ends at sample 4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.building import ForkedGenerator, whole
from memoire.errors import EntryError, NotEnoughSamples, ParameterError
from memoire.limits import CONTAINER, MemoryLimits, Reservation

from .codec import NONE, Codec, Structure, assembled, leaves_of, mapped, paths_of, structure_of

Int64Array = NDArray[np.int64]
NO_DONE: Final = "__no_done"
"""Key in `info` of a sample after which the worker cut its episode, which the environment had not ended."""


class Transitions(NamedTuple):
    """Batch of B transitions. Observations are nested as the environment's, with arrays [B, *F] as leaves."""

    last_obs: Any
    act: Any
    rew: NDArray[np.float32]
    """Reward [B] of each transition."""
    new_obs: Any
    terminated: NDArray[np.bool_]
    """True [B] if the transition terminated its episode."""
    truncated: NDArray[np.bool_]
    """True [B] if the transition's episode was truncated after it."""


class GenericMemory:
    """Memory of the newest samples, from which transitions within one episode are drawn.

    For one thread. The first sample determines nesting, shapes and dtypes of all samples.

    Args:
        capacity: Number of samples.
        codec: Codec of the workers' samples; None for uncompressed samples.
        folder: Folder for columns as memory-mapped files; None keeps columns in memory.
        keeps_info: True keeps the `info` of samples, for `transition`.
        seed: Seed of the draws; None takes entropy from the system.
        container: Container whose memory limit columns in memory have to fit; None sets no limit. The columns' sizes
            are known, and checked, when the first sample arrives.
    """

    def __init__(
        self,
        capacity: int = 1_000_000,
        *,
        codec: Codec | None = None,
        folder: str | Path | None = None,
        keeps_info: bool = False,
        seed: int | None = None,
        container: MemoryLimits | None = CONTAINER,
    ) -> None:
        self.capacity = whole("capacity", capacity, 2)
        self.codec = codec or NONE
        self.random = ForkedGenerator(seed)
        """Random generator of the draws."""
        self._folder = None if folder is None else Path(folder).absolute()
        self._structures: tuple[Structure, Structure] | None = None  # structures of act and obs
        self._columns: list[_Ring] = []  # columns of the leaves of act, then obs
        self._n_act = 0  # number of columns of act
        self._reward = np.zeros(self.capacity, np.float32)
        self._ends = np.zeros((2, self.capacity), np.bool_)  # terminated, truncated
        self._infos = np.empty(self.capacity, object) if keeps_info else None
        self._reserved = Reservation(container)  # room of the columns; set by the first sample
        self._first = np.zeros(self.capacity, np.int64)  # number of the first sample of each sample's episode
        self._boundary = _Boundary(self.capacity)
        history = self.codec.history
        self._history = 0 if history is None else history.length

    def __len__(self) -> int:
        """Return the number of transitions that can be drawn."""
        return len(self._boundary)

    @property
    def appended(self) -> int:
        """Number of samples appended so far, with evicted ones."""
        return self._boundary.appended

    @property
    def held(self) -> int:
        """Number of samples in the memory."""
        return min(self.appended, self.capacity)

    # -------------------------------------------------------------------------------------------------- samples

    def append(self, samples: Sequence[Any], starts: Sequence[bool] | None = None, *, continues: bool = False) -> None:
        """Append samples of one worker, in order; the oldest samples are evicted.

        Args:
            samples: (act, obs, rew, done, info), or (act, obs, rew, terminated, truncated, info), as the codec returned
                them.
            starts: True for each sample of a reset. By default these are the first one, and those after the end of an
                episode.
            continues: True if the first sample follows the last appended one in the same episode.

        Raises:
            CodecMismatch: a worker has another codec; or, if `starts` is given, no codec.
            EntryError: a sample has another nesting, shape or dtype than the first one. No sample was appended.
            ParameterError: the columns for `capacity` samples exceed the container's memory.
        """
        if not samples:
            return
        rows = [six_parts(each) for each in samples]
        if starts is not None and len(starts) != len(rows):
            raise ParameterError("starts", f"{len(starts)} values", f"one for each of {len(rows)} samples")
        for row, is_reset in zip(rows, starts or [False] * len(rows), strict=True):
            self.codec.check_mark(row[5], "a worker", is_reset=is_reset)
        if self.codec is not NONE:
            rows = [self._decompressed(row) for row in rows]
        columns = self._columns_of(rows)
        ends = np.array([(bool(row[3]), bool(row[4]) or NO_DONE in row[5]) for row in rows]).T
        if starts is None:
            is_first = not continues or self._boundary.is_closed
            is_start = np.concatenate([[is_first], (ends[0] | ends[1])[:-1]])
        else:
            is_start = np.array(starts, np.bool_)
        for begin in range(0, len(rows), self.capacity):
            self._write(rows[begin : begin + self.capacity], columns, is_start, ends, begin, continues or begin > 0)

    def _decompressed(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        act, obs, rew, terminated, truncated, info = row
        act, obs, rew, terminated, info = self.codec.restored((act, obs, rew, terminated, info), "append")
        return act, obs, rew, terminated, truncated, info

    def _columns_of(self, rows: list[tuple[Any, ...]]) -> list[Any]:
        """Return the values for each column as an array [n, *F]; create the columns for the first sample."""
        if self._structures is None:
            self._make_columns(rows[0])
        leaves = []
        for row in rows:
            if (structure_of(row[0]), structure_of(row[1])) != self._structures:
                raise EntryError("sample", "act and obs nested as those of the first one", "another nesting")
            leaves.append(leaves_of(row[0]) + leaves_of(row[1]))
        return [column.checked([row[place] for row in leaves]) for place, column in enumerate(self._columns)]

    def _make_columns(self, row: tuple[Any, ...]) -> None:
        act, obs = structure_of(row[0]), structure_of(row[1])
        acts, observations = leaves_of(row[0]), leaves_of(row[1])
        names = paths_of(act, "act") + paths_of(obs, "obs")
        leaves = enumerate(zip(names, acts + observations, strict=True))
        columns = [_Ring(name, self.capacity, leaf, self._file(place)) for place, (name, leaf) in leaves]
        if self._history and any(each.has_objects for each in columns[: len(acts)]):
            raise ParameterError("history", "actions that are bytes", "left out, or combined with actions in arrays")
        if self._folder is None:
            size = sum(each.rows.nbytes for each in columns if not each.has_objects)
            self._reserved.reserve("capacity", self.capacity, size)
        self._structures, self._columns, self._n_act = (act, obs), columns, len(acts)

    def _file(self, place: int) -> Path | None:
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"column-{place}.npy"

    def _write(
        self, rows: list[Any], columns: list[Any], is_start: Any, ends: Any, begin: int, continues: bool
    ) -> None:
        end = begin + len(rows)
        numbers = self._boundary.appended + np.arange(len(rows))
        places = numbers % self.capacity
        for column, values in zip(self._columns, columns, strict=True):
            column.rows[places] = values[begin:end]
        self._reward[places] = [row[2] for row in rows]
        self._ends[:, places] = ends[:, begin:end]
        if self._infos is not None:
            self._infos[places] = [row[5] for row in rows]
        is_closed = bool(ends[:, end - 1].any())
        self._first[places] = self._boundary.add(is_start[begin:end], self._reach(), continues, is_closed)

    def _reach(self) -> tuple[int, int]:
        """Return numbers of samples that a transition needs before its end: after a reset, and after another cut."""
        whole_history = max(1, self._history)
        is_padded = self.codec.history is None or self.codec.history.start == "repeat"
        return (1 if is_padded else whole_history), whole_history

    # ---------------------------------------------------------------------------------------------------- draws

    def sample(self, batch_size: int) -> Transitions:
        """Draw a batch of transitions uniformly with replacement; arrays [B, ...] belong to the caller.

        Raises:
            NotEnoughSamples: the memory has no transition.
        """
        if not len(self):
            raise NotEnoughSamples(batch_size, 0, 0, 0, 0.0, "the memory has no transition yet", "Add samples first.")
        return self.transitions(self.random.integers(len(self), size=whole("batch_size", batch_size, 1)))

    def transitions(self, items: Any) -> Transitions:
        """Return the transitions with these numbers [B], each in [0, len(self)); arrays [B, ...] belong to the caller.

        Raises:
            ParameterError: a number is outside of this range.
        """
        indices = np.asarray(items, np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise ParameterError("items", items, f"whole numbers from 0 to {len(self) - 1}")
        numbers = self._boundary.numbers(indices)
        now = numbers % self.capacity
        if self.codec.restores_whole_samples:
            last, new, act = self._restore_samples(numbers)
        else:
            last, new, act = self._gather(numbers)
        if self._history:
            last, new = self._add_history(last, new, numbers)
        return Transitions(last, act, self._reward[now], new, self._ends[0][now], self._ends[1][now])

    def transition(self, item: int) -> tuple[Any, ...]:
        """Return one transition: (last_obs, act, rew, new_obs, terminated, truncated, info).

        info is {} without `keeps_info`.
        """
        batch = self.transitions([item])
        row = [mapped(lambda leaf: leaf[0], part) for part in batch]
        number = int(self._boundary.numbers(np.array([item]))[0])
        info = {} if self._infos is None else self._infos[number % self.capacity]
        return (*row[:2], row[2], row[3], bool(row[4]), bool(row[5]), info)

    def _gather(self, numbers: Int64Array) -> tuple[Any, Any, Any]:
        assert self._structures is not None
        size, now = len(numbers), numbers % self.capacity
        both = np.concatenate([(numbers - 1) % self.capacity, now])
        functions = self.codec.decompressors("sample")
        act, observations = self._columns[: self._n_act], self._columns[self._n_act :]
        acts = [_take(column, now, functions.get(column.name)) for column in act]
        pairs = [_take(column, both, functions.get(column.name)) for column in observations]
        return (
            assembled(self._structures[1], [pair[:size] for pair in pairs]),
            assembled(self._structures[1], [pair[size:] for pair in pairs]),
            assembled(self._structures[0], acts),
        )

    def _restore_samples(self, numbers: Int64Array) -> tuple[Any, Any, Any]:
        """Return (last_obs, new_obs, act) of transitions [B] whose samples a function restores one by one."""
        last = [self._restore_sample(int(number) - 1) for number in numbers]
        new = [self._restore_sample(int(number)) for number in numbers]
        return stacked([obs for _, obs in last]), stacked([obs for _, obs in new]), stacked([act for act, _ in new])

    def _restore_sample(self, number: int) -> tuple[Any, Any]:
        assert self._structures is not None
        place = number % self.capacity
        leaves = [column.rows[place] for column in self._columns]
        act = assembled(self._structures[0], leaves[: self._n_act])
        obs = assembled(self._structures[1], leaves[self._n_act :])
        info = {} if self._infos is None else self._infos[place]
        five = (act, obs, self._reward[place], bool(self._ends[0][place]), info)
        restored = self.codec.restored(five, "sample")
        return restored[0], restored[1]

    def _add_history(self, last: Any, new: Any, numbers: Int64Array) -> tuple[Any, Any]:
        """Append the last actions to observations; the action of an episode's first sample stands for earlier ones."""
        assert self._structures is not None
        earlier = numbers[:, None] - np.arange(self._history, -1, -1)
        places = np.maximum(earlier, self._first[numbers % self.capacity][:, None]) % self.capacity
        functions = self.codec.decompressors("sample")
        windows = [
            _take(column, places.reshape(-1), functions.get(column.name)) for column in self._columns[: self._n_act]
        ]
        steps = [
            assembled(self._structures[0], [each.reshape(*places.shape, *each.shape[1:])[:, step] for each in windows])
            for step in range(self._history + 1)
        ]
        return (*last, *steps[:-1]), (*new, *steps[1:])


class _Boundary:
    """Ring of the numbers of samples that end a transition, in order: evicted at the front, appended at the back.

    Args:
        capacity: Number of samples.
    """

    def __init__(self, capacity: int) -> None:
        self.appended = 0
        """Number of samples appended so far."""
        self.is_closed = True
        """True if the last sample ended its episode."""
        self._capacity = capacity
        self._ring = np.zeros(capacity, np.int64)
        self._head = self._tail = 0  # numbers of evicted and of appended transitions
        self._start = self._need = 0  # first sample of the open episode, and samples before a transition

    def __len__(self) -> int:
        return self._tail - self._head

    def numbers(self, items: Int64Array) -> Int64Array:
        """Return the numbers [B] of the samples that end these transitions."""
        numbers: Int64Array = self._ring[(self._head + items) % self._capacity]
        return numbers

    def add(self, is_start: NDArray[np.bool_], reach: tuple[int, int], continues: bool, is_closed: bool) -> Int64Array:
        """Append samples [n], at most `capacity`; return the number [n] of the first sample of each one's episode.

        Args:
            is_start: [n] True for samples of a reset.
            reach: Numbers of samples that a transition needs before its end: after a reset, and after another cut.
            continues: True if the first new sample follows the last stored sample in the same episode.
            is_closed: True if the last new sample ends its episode.
        """
        size = len(is_start)
        numbers = self.appended + np.arange(size)
        is_first = is_start.copy()
        if not continues or not self.appended:
            is_first[0] = True
        carried = np.where(is_first, numbers, -1)
        if not is_first[0]:
            carried[0] = self._start
        firsts = np.maximum.accumulate(carried)
        needs = np.where(is_start, reach[0], reach[1])[np.maximum(firsts - self.appended, 0)]
        needs = np.where(firsts < self.appended, self._need, needs)
        ending = numbers[numbers - firsts >= needs]
        self.appended += size
        self._evict(self.appended - self._capacity, reach[1], size)
        if self.appended > self._capacity:
            ending = ending[ending - reach[1] >= self.appended - self._capacity]
        self._ring[(self._tail + np.arange(len(ending))) % self._capacity] = ending
        self._tail += len(ending)
        self._start, self._need, self.is_closed = int(firsts[-1]), int(needs[-1]), is_closed
        return firsts

    def _evict(self, oldest: int, reach: int, count: int) -> None:
        """Remove transitions that need evicted samples, after `count` samples were appended."""
        # Numbers differ, so that at most count + reach transitions have to be checked.
        front = self.numbers(np.arange(min(len(self), count + reach)))
        self._head += int(np.searchsorted(front, oldest + reach)) if oldest > 0 else 0


class _Ring:
    """Column of one leaf of all samples; bytes and text are stored as Python objects."""

    def __init__(self, name: str, capacity: int, leaf: Any, file: Path | None) -> None:
        self.name, self.has_objects = name, isinstance(leaf, bytes | str)
        first = np.asarray(leaf)
        if first.dtype == object:
            raise EntryError(name, "numbers or arrays", "an object", "Drop this leaf in a compressor.")
        self.shape = () if self.has_objects else first.shape
        shape, dtype = (capacity, *self.shape), np.dtype(object) if self.has_objects else first.dtype
        # A page of zeros takes no memory before a write to the page.
        self.rows: NDArray[Any] = (
            np.zeros(shape, dtype)
            if file is None or self.has_objects
            else np.lib.format.open_memmap(file, "w+", dtype, shape)
        )

    def checked(self, values: list[Any]) -> NDArray[Any]:
        """Return values as an array [n, *F]; raise EntryError if a value does not fit the column."""
        if self.has_objects:
            return np.fromiter(values, object, len(values))
        try:
            array = np.asarray(values)
        except ValueError:  # values of different shapes
            array = np.zeros(0)
        if array.shape[1:] != self.shape or not np.can_cast(array.dtype, self.rows.dtype, "same_kind"):
            wrong = next((each for each in map(np.asarray, values) if not self._fits(each)), array)
            raise EntryError(self.name, _describe(self.rows.dtype, self.shape), _describe(wrong.dtype, wrong.shape))
        return array

    def _fits(self, value: NDArray[Any]) -> bool:
        return value.shape == self.shape and np.can_cast(value.dtype, self.rows.dtype, "same_kind")


def stacked(values: Sequence[Any]) -> Any:
    """Return values of the same nesting as one value, with arrays [B, *F] as leaves."""
    structure = structure_of(values[0])
    columns = zip(*(leaves_of(value) for value in values), strict=True)
    return assembled(structure, [np.stack([np.asarray(each) for each in column]) for column in columns])


def on_device(value: Any, device: Any) -> Any:
    """Return a nested value with its arrays as tensors on a torch device; unchanged if `device` is None.

    Tensors on the CPU share the arrays' memory. Tensors for a GPU are pinned, so that the copy runs asynchronously.

    Raises:
        ParameterError: torch has no such device on this machine, or no dtype like an array's.
    """
    if device is None:
        return value
    from memoire import torch

    target = torch.device_of(device)

    def to_tensor(leaf: Any) -> Any:
        tensor = torch.as_tensor(np.ascontiguousarray(leaf))
        if target.type == "cuda":
            return tensor.pin_memory().to(target, non_blocking=True)
        return tensor.to(target)

    return mapped(to_tensor, value)


def _take(column: _Ring, places: Int64Array, function: Callable[[Any], Any] | None) -> Any:
    if function is None:
        return column.rows.take(places, 0)
    return np.stack([np.asarray(function(column.rows[place])) for place in places.tolist()])


def six_parts(sample: Any) -> tuple[Any, ...]:
    """Return a sample of five or six parts as (act, obs, rew, terminated, truncated, info).

    Raises:
        EntryError: the sample has another number of parts.
    """
    if len(sample) == 5:
        act, obs, rew, done, info = sample
        return act, obs, rew, done, NO_DONE in info, info
    if len(sample) == 6:
        return tuple(sample)
    expected = "(act, obs, rew, done, info) or (act, obs, rew, terminated, truncated, info)"
    raise EntryError("sample", expected, f"{len(sample)} parts")


def _describe(dtype: Any, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}" if shape else str(dtype)
