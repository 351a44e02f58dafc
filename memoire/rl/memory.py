"""A trainer's own memory of samples from workers: rings of columns, drawn uniformly, one gather a column.

    memory = GenericMemory(1_000_000, codec=codec)
    memory.append([(act, obs, rew, done, info), ...])        # as workers send them
    batch = memory.sample(256)                               # last_obs, act, rew, new_obs, terminated, truncated

A sample is what a step led to; an episode begins with the sample of its reset, which is no transition. Each sample is
stored once, and a transition is two samples that follow each other:

    number           0  1  2  3  4  5  6          columns are rings: sample n lies in row n % capacity
    episode starts   0  0  0  3  3  3  3          a transition ends at each number but the starts:
    transitions         1  2     4  5  6          here there are five, and item 2 is the one that ends at 4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.building import ForkedGenerator, whole
from memoire.errors import EntryError, NotEnoughSamples, ParameterError
from memoire.limits import CONTAINER, Container, Reservation

from .codec import NONE, Codec, Structure, assembled, leaves_of, mapped, paths_of, structure_of

Int64Array = NDArray[np.int64]
NO_DONE: Final = "__no_done"
"""The key in `info` of a sample after which the episode was given up, and did not end by itself."""


class Transitions(NamedTuple):
    """B transitions. Observations are nested as the environment's, with arrays [B, *F] as leaves."""

    last_obs: Any
    act: Any
    rew: NDArray[np.float32]
    """[B]"""
    new_obs: Any
    terminated: NDArray[np.bool_]
    """[B]"""
    truncated: NDArray[np.bool_]
    """[B]"""


class GenericMemory:
    """Keeps the newest samples, and draws transitions of them that never cross the end of an episode.

    For one thread. The nesting, shapes and dtypes of the first sample are those of all.

    Args:
        capacity: Samples.
        codec: By which samples come compressed; None takes them as they are.
        folder: Where columns are files that are mapped into memory; None keeps them in memory.
        keeps_info: Whether `info` of samples is kept, for `transition`.
        seed: Of the draws; None takes entropy from the system.
        container: That whose memory limit has to allow columns in memory; None is no limit. Their sizes are known, and
            checked, when the first sample comes.
    """

    def __init__(
        self,
        capacity: int = 1_000_000,
        *,
        codec: Codec | None = None,
        folder: str | Path | None = None,
        keeps_info: bool = False,
        seed: int | None = None,
        container: Container | None = CONTAINER,
    ) -> None:
        self.capacity = whole("capacity", capacity, 2)
        self.codec = codec or NONE
        self.random = ForkedGenerator(seed)
        """Draws."""
        self._folder = None if folder is None else Path(folder).absolute()
        self._structures: tuple[Structure, Structure] | None = None  # of act and obs; None before the first sample
        self._columns: list[_Ring] = []  # of the leaves of act, then of obs
        self._n_act = 0  # how many of them are act's
        self._reward = np.zeros(self.capacity, np.float32)
        self._ends = np.zeros((2, self.capacity), np.bool_)  # terminated, truncated
        self._infos = np.empty(self.capacity, object) if keeps_info else None
        self._reserved = Reservation(container)  # for the columns, once the first sample shows their sizes
        self._first = np.zeros(self.capacity, np.int64)  # number of the first sample of each one's episode
        self._boundary = _Boundary(self.capacity)
        history = self.codec.history
        self._history = 0 if history is None else history.length

    def __len__(self) -> int:
        """Transitions that can be drawn."""
        return len(self._boundary)

    @property
    def appended(self) -> int:
        """Samples that came, those included that have left since."""
        return self._boundary.appended

    @property
    def held(self) -> int:
        """Samples that are here."""
        return min(self.appended, self.capacity)

    # -------------------------------------------------------------------------------------------------- samples

    def append(self, samples: Sequence[Any], starts: Sequence[bool] | None = None, *, continues: bool = False) -> None:
        """Take samples of one worker, in order; the oldest leave.

        Args:
            samples: (act, obs, rew, done, info), or (act, obs, rew, terminated, truncated, info), as the codec made
                them.
            starts: For each sample, whether it is that of a reset. By default the first one is, and those behind the
                end of an episode.
            continues: Whether the first one follows the last one that came, so that its episode goes on.

        Raises:
            CodecMismatch: a worker has another codec; or none, if `starts` says which samples are of a reset.
            EntryError: a sample is nested otherwise than the first one, or has another shape. Nothing was taken.
            ParameterError: after the first sample, the capacity makes more than the container has.
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
        """What is to be written to each column: an array [n, *F], or a list."""
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
            raise ParameterError("history", "actions that are bytes", "left out, or actions in arrays")
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
        """Write at most `capacity` samples into rows of the rings."""
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
        """Samples of its episode that a transition needs before its end: behind a reset, and behind another cut."""
        whole_history = max(1, self._history)
        is_padded = self.codec.history is None or self.codec.history.start == "repeat"
        return (1 if is_padded else whole_history), whole_history

    # ---------------------------------------------------------------------------------------------------- draws

    def sample(self, batch_size: int) -> Transitions:
        """A batch of transitions, drawn uniformly with replacement; arrays [B, ...] belong to the caller.

        Raises:
            NotEnoughSamples: there is no transition.
        """
        if not len(self):
            raise NotEnoughSamples(batch_size, 0, 0, 0, reason="no transition is there yet")
        return self.transitions(self.random.integers(len(self), size=whole("batch_size", batch_size, 1)))

    def transitions(self, items: Any) -> Transitions:
        """The transitions with these numbers [B], each in [0, len(self)); arrays [B, ...] belong to the caller.

        Raises:
            ParameterError: a number is outside.
        """
        chosen = np.asarray(items, np.int64)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise ParameterError("items", items, f"whole numbers from 0 to {len(self) - 1}")
        numbers = self._boundary.numbers(chosen)
        now = numbers % self.capacity
        if self.codec.restores_whole_samples:
            last, new, act = self._restored(numbers)
        else:
            last, new, act = self._gathered(numbers)
        if self._history:
            last, new = self._with_history(last, new, numbers)
        return Transitions(last, act, self._reward[now], new, self._ends[0][now], self._ends[1][now])

    def transition(self, item: int) -> tuple[Any, ...]:
        """(last_obs, act, rew, new_obs, terminated, truncated, info) of one transition, as the environment gave it.

        info is {} unless it is kept.
        """
        found = self.transitions([item])
        row = [mapped(lambda leaf: leaf[0], part) for part in found]
        number = int(self._boundary.numbers(np.array([item]))[0])
        info = {} if self._infos is None else self._infos[number % self.capacity]
        return (*row[:2], row[2], row[3], bool(row[4]), bool(row[5]), info)

    def _gathered(self, numbers: Int64Array) -> tuple[Any, Any, Any]:
        """(last_obs, new_obs, act): one gather for each column."""
        assert self._structures is not None
        size, now = len(numbers), numbers % self.capacity
        both = np.concatenate([(numbers - 1) % self.capacity, now])
        functions = self.codec.functions("sample")
        act, observations = self._columns[: self._n_act], self._columns[self._n_act :]
        acts = [_take(column, now, functions.get(column.name)) for column in act]
        pairs = [_take(column, both, functions.get(column.name)) for column in observations]
        return (
            assembled(self._structures[1], [pair[:size] for pair in pairs]),
            assembled(self._structures[1], [pair[size:] for pair in pairs]),
            assembled(self._structures[0], acts),
        )

    def _restored(self, numbers: Int64Array) -> tuple[Any, Any, Any]:
        """The same where a function restores samples, one by one."""
        last = [self._restored_sample(int(number) - 1) for number in numbers]
        new = [self._restored_sample(int(number)) for number in numbers]
        return stacked([obs for _, obs in last]), stacked([obs for _, obs in new]), stacked([act for act, _ in new])

    def _restored_sample(self, number: int) -> tuple[Any, Any]:
        assert self._structures is not None
        place = number % self.capacity
        leaves = [column.rows[place] for column in self._columns]
        act = assembled(self._structures[0], leaves[: self._n_act])
        obs = assembled(self._structures[1], leaves[self._n_act :])
        info = {} if self._infos is None else self._infos[place]
        five = (act, obs, self._reward[place], bool(self._ends[0][place]), info)
        restored = self.codec.restored(five, "sample")
        return restored[0], restored[1]

    def _with_history(self, last: Any, new: Any, numbers: Int64Array) -> tuple[Any, Any]:
        """Observations with the last actions at their end; before the first sample of an episode is that sample."""
        assert self._structures is not None
        earlier = numbers[:, None] - np.arange(self._history, -1, -1)
        places = np.maximum(earlier, self._first[numbers % self.capacity][:, None]) % self.capacity
        functions = self.codec.functions("sample")
        windows = [
            _take(column, places.reshape(-1), functions.get(column.name)) for column in self._columns[: self._n_act]
        ]
        steps = [
            assembled(self._structures[0], [each.reshape(*places.shape, *each.shape[1:])[:, step] for each in windows])
            for step in range(self._history + 1)
        ]
        return (*last, *steps[:-1]), (*new, *steps[1:])


class _Boundary:
    """Which samples end a transition: numbers in order, in a ring. Samples leave at its front, and come at its back.

    Args:
        capacity: Samples.
    """

    def __init__(self, capacity: int) -> None:
        self.appended = 0
        """Samples that came."""
        self.is_closed = True
        """Whether the last sample ended its episode."""
        self._capacity = capacity
        self._ring = np.zeros(capacity, np.int64)
        self._head = self._tail = 0  # counts of transitions that left, and that came
        self._start = self._need = 0  # of the episode that is open: its first sample, and what its transitions need

    def __len__(self) -> int:
        return self._tail - self._head

    def numbers(self, items: Int64Array) -> Int64Array:
        """Numbers [B] of the samples that end these transitions."""
        found: Int64Array = self._ring[(self._head + items) % self._capacity]
        return found

    def add(self, is_start: NDArray[np.bool_], reach: tuple[int, int], continues: bool, is_closed: bool) -> Int64Array:
        """Note samples [n], at most `capacity`; the first number of each one's episode [n].

        Args:
            is_start: [n] Whether each is a reset's.
            reach: Samples that a transition needs before its end: behind a reset, and behind another cut.
            continues: Whether the first of them follows the last sample.
            is_closed: Whether the last of them ends its episode.
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
        self._forget(self.appended - self._capacity, reach[1], size)
        if self.appended > self._capacity:
            ending = ending[ending - reach[1] >= self.appended - self._capacity]
        self._ring[(self._tail + np.arange(len(ending))) % self._capacity] = ending
        self._tail += len(ending)
        self._start, self._need, self.is_closed = int(firsts[-1]), int(needs[-1]), is_closed
        return firsts

    def _forget(self, oldest: int, reach: int, came: int) -> None:
        """Let go of transitions that need samples which have left."""
        # Numbers differ, so that at most as many leave as samples came since the last time.
        front = self.numbers(np.arange(min(len(self), came + reach)))
        self._head += int(np.searchsorted(front, oldest + reach)) if oldest > 0 else 0


class _Ring:
    """One leaf of all samples, in an array: bytes and text of any length are objects in it."""

    def __init__(self, name: str, capacity: int, leaf: Any, file: Path | None) -> None:
        self.name, self.has_objects = name, isinstance(leaf, bytes | str)
        first = np.asarray(leaf)
        if first.dtype == object:
            raise EntryError(name, "numbers or arrays", "an object", "Have a compressor drop it.")
        self.shape = () if self.has_objects else first.shape
        shape, dtype = (capacity, *self.shape), np.dtype(object) if self.has_objects else first.dtype
        # Pages of zeros take no memory before they are written.
        self.rows: NDArray[Any] = (
            np.zeros(shape, dtype)
            if file is None or self.has_objects
            else np.lib.format.open_memmap(file, "w+", dtype, shape)
        )

    def checked(self, values: list[Any]) -> NDArray[Any]:
        """Values [n, *F] to be put."""
        if self.has_objects:
            return np.fromiter(values, object, len(values))
        try:
            found = np.asarray(values)
        except ValueError:  # of different shapes
            found = np.zeros(0)
        if found.shape[1:] != self.shape or not np.can_cast(found.dtype, self.rows.dtype, "same_kind"):
            wrong = next((each for each in map(np.asarray, values) if not self._fits(each)), found)
            raise EntryError(self.name, _shown(self.rows.dtype, self.shape), _shown(wrong.dtype, wrong.shape))
        return found

    def _fits(self, value: NDArray[Any]) -> bool:
        return value.shape == self.shape and np.can_cast(value.dtype, self.rows.dtype, "same_kind")


def stacked(values: Sequence[Any]) -> Any:
    """Values of one nesting as one value, with arrays [B, *F] as leaves."""
    structure = structure_of(values[0])
    columns = zip(*(leaves_of(value) for value in values), strict=True)
    return assembled(structure, [np.stack([np.asarray(each) for each in column]) for column in columns])


def on_device(value: Any, device: Any) -> Any:
    """A nested value with its arrays as tensors on a device of torch; as it is if the device is None.

    On the CPU tensors share the arrays' memory. On the way to a GPU they are pinned, so that the copy goes on beside
    everything else.

    Raises:
        ParameterError: torch has no such device here, or no dtype like an array's.
    """
    if device is None:
        return value
    from memoire import torch

    place = torch.device_of(device)

    def moved(leaf: Any) -> Any:
        tensor = torch.as_tensor(np.ascontiguousarray(leaf))
        if place.type == "cuda":
            return tensor.pin_memory().to(place, non_blocking=True)
        return tensor.to(place)

    return mapped(moved, value)


def _take(column: _Ring, places: Int64Array, function: Callable[[Any], Any] | None) -> Any:
    """Rows [B, *F] of a column, decompressed."""
    if function is None:
        return column.rows.take(places, 0)
    return np.stack([np.asarray(function(column.rows[place])) for place in places.tolist()])


def six_parts(sample: Any) -> tuple[Any, ...]:
    """A sample of five or six parts as (act, obs, rew, terminated, truncated, info).

    Raises:
        EntryError: it has another number of parts.
    """
    if len(sample) == 5:
        act, obs, rew, done, info = sample
        return act, obs, rew, done, NO_DONE in info, info
    if len(sample) == 6:
        return tuple(sample)
    raise EntryError("sample", "(act, obs, rew, done, info), or one with terminated, truncated", f"{len(sample)} parts")


def _shown(dtype: Any, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}" if shape else str(dtype)
