"""Whole episodes out of a memory and into another one, with all that is known of their entries.

    episodes(memory)          Episode after Episode, oldest first ──▶ put(other, episode)

`dataset_writing` and `dataset_reading` have the files that they are saved in.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.arguments import model_version
from memoire.errors import EntryError, MemoireError, ParameterError

from .columns import Ragged
from .conversion import is_finite
from .schema import Schema

if TYPE_CHECKING:
    from .memory import Memory

FACTS: Final = {
    "init_w": "<f4",
    "priority": "<f4",
    "learned": "|u1",
    "born": "<f8",
    "drawn": "<u4",
    "model_version": "<i8",
}
"""Of each entry: what is known of it beside its columns, and the type in which that is saved."""


@dataclass(frozen=True)
class Episode:
    """An episode as a memory holds it; arrays are copies. T entries, F a column's shape, R the reward's."""

    columns: dict[str, Any]
    """Each column [T, *F], the return column too; a ragged one as `Ragged`."""
    init_w: NDArray[np.float32]
    """[T] factors of the weights."""
    priority: NDArray[np.float32] | None
    """[T] priorities; below 0: none yet. None, and NaN of one: those that follow from closing it."""
    learned: NDArray[np.bool_]
    """[T] whether a learner reported the priority."""
    born: NDArray[np.float64] | None
    """[T] Unix seconds at which the entries were added. None: as they are put somewhere."""
    model_version: NDArray[np.int64]
    """[T] of the models that acted."""
    drawn: NDArray[np.uint32] | None = None
    """[T] how often the entries were drawn; None: never."""
    multiplier: float = 1.0
    terminated: bool | None = None
    """None: nobody said how it ended."""
    final_state: dict[str, NDArray[Any]] | None = None
    """The state after the last entry, each state column [*F]."""
    bootstrap_value: NDArray[np.float32] | None = None
    """[*R] value of that state."""
    update_value: bool = True
    update_weight: bool = True
    is_cut: bool = False
    """Whether its writer cut it off here: the episode goes on in the writer's next one."""
    is_open: bool = False
    """Whether it goes on where it came from; put elsewhere, it ends there and nobody knows how."""

    def __len__(self) -> int:
        return len(self.init_w)

    @property
    def end(self) -> dict[str, Any]:
        """How it ended, as `Memory.close` takes it."""
        return {
            "multiplier": self.multiplier,
            "update_value": self.update_value,
            "update_weight": self.update_weight,
            "final_state": self.final_state,
            "terminated": self.terminated,
            "bootstrap_value": self.bootstrap_value,
        }


def not_finite(schema: Schema, columns: Mapping[str, Any], final: Mapping[str, Any] | None) -> str:
    """The first column of an episode that has to be finite and is not; "" if there is none."""
    for name in filter(None, (*schema.finite, schema.qvest)):
        values = [columns[name]] if final is None or name not in schema.states else [columns[name], final[name]]
        if not all(map(is_finite, values)):
            return name
    return ""


class KeptEpisode(NamedTuple):
    """An episode with what names it for ever: the memory that holds it, and the number of its first entry there."""

    owner: bytes
    number: int
    episode: Episode


def episodes(memory: Memory) -> Iterator[Episode]:
    """The episodes of a memory, the oldest first, then the open ones. The memory is held until the iterator ends."""
    with memory.held():
        inside = HeldEpisodes(memory)
        for slot in inside.slots:
            yield inside.episode(slot)


def walk(memory: Memory) -> Iterator[tuple[int, Episode]]:
    """The closed episodes of a memory that goes on meanwhile, oldest first, each with the number of its first entry.

    The memory is held while one of them is copied, and not in between: each is as it is when its turn comes, and those
    that have left by then are not there. As many as there were at the beginning at most.
    """
    slot = number = -1
    for _ in range(memory.num_episodes):
        with memory.held():
            inside = HeldEpisodes(memory)
            slot = inside.after(slot, number)
            if slot < 0:
                return
            number, episode = inside.number(slot), inside.episode(slot)
        del inside
        yield number, episode
        del episode


def put(memory: Memory, episode: Episode, lane: int = 0) -> NDArray[np.int64]:
    """Add an episode to a memory of the same schema, with all that is known of its entries; returns their new numbers,
    int64 [T].

    What is open in this lane is cleared; the oldest episodes leave where there is no room.

    Raises:
        EntryError: a column does not fit.
        ParameterError: a version, priority or time cannot be.
        EpisodeTooLong: it is longer than the memory. Nothing was added.
    """
    schema = memory.schema
    _check_facts(episode)
    columns = ", ".join(schema.names)
    for name in [name for name in schema.entry_names if name not in episode.columns]:
        raise EntryError(name, f"a value for each of the columns {columns}", "none")
    for name in [name for name in episode.columns if name not in schema]:
        raise EntryError(name, f"nothing: the columns are {columns}", f"{name}=...")
    with memory.held():
        memory.open(lane)
        numbers = np.empty(len(episode), np.int64)
        values = [episode.columns[name] for name in schema.entry_names]
        try:
            for start, stop in _same_model(episode.model_version):
                rows = slice(start, stop)
                part = [value[rows] for value in values]
                numbers[rows] = memory._extended(lane, part, episode.init_w[rows], int(episode.model_version[start]))
        except MemoireError:
            memory.open(lane)
            raise
        memory.close(lane, **episode.end)
        drawn = np.zeros(len(episode), np.uint32) if episode.drawn is None else episode.drawn
        # Field by field, since NumPy copies whole records slowly.
        meta, places = memory.contents()["meta"], numbers % memory.capacity
        priority = meta["priority"][places]
        if episode.priority is not None:
            priority = np.where(np.isnan(episode.priority), priority, episode.priority)
        born = meta["born"][places] if episode.born is None else episode.born
        facts = (priority, episode.learned.view(np.uint8), born, drawn)
        memory._set_facts(numbers, *map(np.ascontiguousarray, facts))
    return numbers


def _check_facts(episode: Episode) -> None:
    """Refuse versions, priorities and times that no entry can have. Raises ParameterError."""
    for version in (episode.model_version.min(initial=0), episode.model_version.max(initial=0)):
        model_version(int(version), "model_version")
    if episode.priority is not None and np.isinf(episode.priority).any():
        raise ParameterError("priority", episode.priority, "finite, or NaN where it follows from closing the episode")
    if episode.born is not None and not np.isfinite(episode.born).all():
        raise ParameterError("born", episode.born, "finite Unix seconds, or None")


def _same_model(versions: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Stretches in which one model acted."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return itertools.pairwise(edges)


class HeldEpisodes:
    """The arrays of a memory that is held, read as episodes."""

    def __init__(self, memory: Memory) -> None:
        self.schema = memory.schema
        self._memory = memory
        self._inside = memory.contents()
        self._capacity, self._shape = memory.capacity, memory.schema.reward_shape
        self._columns = {
            name: self._typed(name, data, memory.capacity)
            for name, data in zip(memory.schema.names, self._inside["columns"], strict=True)
            if name not in memory.schema.ragged
        }
        self._finals = {
            name: self._typed(name, data, self._inside["final_rows"])
            for name, data in zip(memory.schema.names, self._inside["finals"], strict=True)
            if data is not None and name not in memory.schema.ragged
        }

    @functools.cached_property
    def slots(self) -> list[int]:
        """Of all episodes, the oldest first, open ones at the end."""
        table = self._inside["episodes"]
        opened = np.flatnonzero((table["state"] == 1) & (table["length"] > 0))
        return [*self._closed(), *opened.tolist()]

    def _typed(self, name: str, data: NDArray[np.uint8], rows: int) -> NDArray[Any]:
        column = self.schema[name]
        return data.reshape(-1).view(column.dtype).reshape(rows, *column.shape)

    def _closed(self) -> Iterator[int]:
        slot = int(self._inside["oldest"])
        while slot >= 0:
            yield slot
            slot = int(self._inside["episodes"]["newer"][slot])

    def after(self, slot: int, number: int) -> int:
        """Slot of the closed episode that is next after the one in `slot`, whose first entry has this number; the
        oldest where that one has left, as all before it have then; -1 at the end.
        """
        episode = self._inside["episodes"][slot]
        is_there = slot >= 0 and episode["state"] == 2 and self.number(slot) == number
        return int(episode["newer"] if is_there else self._inside["oldest"])

    def number(self, slot: int) -> int:
        """Number of an episode's first entry, which names it for ever."""
        return int(self._inside["meta"]["number"][self._inside["episodes"]["first_row"][slot]])

    def stretches(self, slot: int) -> Iterator[slice]:
        """The rows of an episode in order, as slices."""
        episode, size = self._inside["episodes"][slot], self._inside["page_rows"]
        row, left = int(episode["first_row"]), int(episode["length"])
        while left:
            page = row // size
            count = min(left, min((page + 1) * size, self._capacity) - row)
            yield slice(row, row + count)
            left -= count
            if left:
                row = int(self._inside["pages"]["after"][page]) * size

    def rows(self, slot: int, source: NDArray[Any]) -> NDArray[Any]:
        """Rows of an episode of T entries, copied together: [T, ...] out of `source` [C, ...], C the capacity."""
        return np.concatenate([source[part] for part in self.stretches(slot)])

    def fact(self, name: str) -> NDArray[Any]:
        """A fact of all rows, [C], C the capacity: a field of `_core.META` in its dtype, a view."""
        meta: NDArray[Any] = self._inside["meta"]
        return meta[name]

    @property
    def weights(self) -> NDArray[np.float64]:
        """The weights of all rows, [C], C the capacity. A view."""
        weights: NDArray[np.float64] = self._inside["weights"]
        return weights

    def column(self, name: str) -> NDArray[Any]:
        """A column of all rows, [C, *F], C the capacity; not a ragged one. A view."""
        return self._columns[name]

    def values(self, name: str, rows: slice) -> Ragged:
        """A ragged column of some rows."""
        return self._memory.ragged(name, np.arange(rows.start, rows.stop))

    def lengths(self, name: str, rows: slice) -> NDArray[np.int64]:
        """How many elements a ragged column has in each of N rows, [N]."""
        return self._memory.lengths(name, np.arange(rows.start, rows.stop)).astype("<i8")

    def final(self, name: str, row: int) -> NDArray[Any]:
        """A final state of a column, [*F]."""
        if name in self.schema.ragged:
            return self._memory.ragged(name, np.array([-(row + 2)])).values
        state: NDArray[Any] = self._finals[name][row].copy()
        return state

    def _of_episode(self, name: str, slot: int) -> Any:
        if name not in self.schema.ragged:
            return self.rows(slot, self._columns[name])
        return self._memory.ragged(name, np.concatenate([np.r_[part] for part in self.stretches(slot)]))

    def about(self, slot: int) -> dict[str, Any]:
        """What is known of an episode as a whole."""
        facts = self._inside["episodes"][slot]
        is_open = bool(facts["state"] == 1)
        is_known = bool(facts["ended"]) and not is_open
        return {
            "length": int(facts["length"]),
            "multiplier": float(facts["multiplier"]),
            "final": -1 if is_open else int(facts["final"]),
            "terminated": bool(facts["terminated"]) if is_known else None,
            "update_value": True if is_open else bool(facts["update_value"]),
            "update_weight": True if is_open else bool(facts["update_weight"]),
            "is_open": is_open,
        }

    def bootstrap(self, slot: int) -> NDArray[np.float32]:
        """The value of an episode's final state, [*R]."""
        table = self._inside["bootstraps"]
        size = len(table) // len(self._inside["episodes"])
        value: NDArray[np.float32] = table[slot * size : (slot + 1) * size].reshape(self._shape).copy()
        return value

    def episode(self, slot: int) -> Episode:
        """A copy of the episode in a slot."""
        about = self.about(slot)
        final = about.pop("final")
        del about["length"]
        facts: dict[str, Any] = {name: self.rows(slot, self.fact(name)) for name in FACTS}
        facts["learned"] = facts["learned"].astype(np.bool_)
        return Episode(
            columns={name: self._of_episode(name, slot) for name in self.schema.names},
            **facts,
            final_state=None if final < 0 else {name: self.final(name, final) for name in self.schema.states},
            bootstrap_value=None if about["is_open"] else self.bootstrap(slot),
            **about,
        )
