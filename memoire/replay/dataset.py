"""Episodes: copies of whole episodes from a memory, with all facts of their entries, to put into another one.

    episodes(memory)          Episode after Episode, oldest first ──▶ put(other, episode)

`saving` writes them to files, and `datafile` reads these.
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
"""Facts of each entry beside its columns, with their dtypes in a file."""


@dataclass(frozen=True)
class Episode:
    """Copy of an episode of a memory, with T entries; F is a column's shape, R the reward's."""

    columns: dict[str, Any]
    """Each column [T, *F], the return column included; a ragged column as `Ragged`."""
    init_w: NDArray[np.float32]
    """[T] factors of the weights."""
    priority: NDArray[np.float32] | None
    """[T] priorities; below 0: none yet. None, or NaN in one entry, leaves those that closing the episode computes."""
    learned: NDArray[np.bool_]
    """[T] True if a learner reported the priority."""
    born: NDArray[np.float64] | None
    """[T] Unix seconds at which the entries were added. None takes the time of `put`."""
    model_version: NDArray[np.int64]
    """[T] versions of the models that acted."""
    drawn: NDArray[np.uint32] | None = None
    """[T] number of draws of each entry; None: never drawn."""
    multiplier: float = 1.0
    terminated: bool | None = None
    """True: the episode terminated. False: it was cut off. None: unknown."""
    final_state: dict[str, NDArray[Any]] | None = None
    """State after the last entry, each state column [*F]."""
    bootstrap_value: NDArray[np.float32] | None = None
    """[*R] value of the final state."""
    update_value: bool = True
    update_weight: bool = True
    is_cut: bool = False
    """True if the writer cut the episode here, and continues it in its next one."""
    is_open: bool = False
    """True if the episode was open in its memory; `put` closes it without a known end."""

    def __len__(self) -> int:
        return len(self.init_w)

    @property
    def close_arguments(self) -> dict[str, Any]:
        """The end of the episode, as keywords of `Memory.close`."""
        return {
            "multiplier": self.multiplier,
            "update_value": self.update_value,
            "update_weight": self.update_weight,
            "final_state": self.final_state,
            "terminated": self.terminated,
            "bootstrap_value": self.bootstrap_value,
        }


def first_nonfinite_column(schema: Schema, columns: Mapping[str, Any], final: Mapping[str, Any] | None) -> str:
    """Return the first column of an episode that must be finite and is not; "" if all are."""
    for name in filter(None, (*schema.finite, schema.qvest)):
        values = [columns[name]] if final is None or name not in schema.states else [columns[name], final[name]]
        if not all(map(is_finite, values)):
            return name
    return ""


class KeptEpisode(NamedTuple):
    """An episode with its permanent id: the memory that holds it, and the number of its first entry there."""

    owner: bytes
    number: int
    episode: Episode


def episodes(memory: Memory) -> Iterator[Episode]:
    """Yield the episodes of a memory, the oldest first, then the open ones. The memory is held until the end."""
    with memory.held():
        inside = HeldEpisodes(memory)
        for slot in inside.slots:
            yield inside.episode(slot)


def walk(memory: Memory) -> Iterator[tuple[int, Episode]]:
    """Yield the closed episodes of a memory that is in use, oldest first, with the number of their first entry.

    The memory is held while one episode is copied, and free in between: each copy is of its own moment, and episodes
    that were evicted meanwhile are left out. At most as many are yielded as the memory had at the start.
    """
    slot = number = -1
    for _ in range(memory.num_episodes):
        with memory.held():
            inside = HeldEpisodes(memory)
            slot = inside.slot_after(slot, number)
            if slot < 0:
                return
            number, episode = inside.first_number(slot), inside.episode(slot)
        del inside
        yield number, episode
        del episode


def put(memory: Memory, episode: Episode, lane: int = 0) -> NDArray[np.int64]:
    """Add an episode to a memory of the same schema, with all facts of its entries; return their new numbers, int64
    [T].

    An open episode in this lane is removed; the oldest episodes are evicted if there is no room.

    Raises:
        EntryError: a column does not fit.
        ParameterError: a version, priority or time is invalid.
        EpisodeTooLong: the episode is longer than the memory. Nothing was added.
    """
    schema = memory.schema
    _check_facts(episode)
    columns = ", ".join(schema.names)
    for name in [name for name in schema.entry_names if name not in episode.columns]:
        raise EntryError.with_text(
            f"Column {name!r} is missing; an episode has the columns {columns}. The episode was not added."
        )
    for name in [name for name in episode.columns if name not in schema]:
        raise EntryError.with_text(
            f"There is no column {name!r}; the columns are {columns}. The episode was not added."
        )
    with memory.held():
        memory.open(lane)
        numbers = np.empty(len(episode), np.int64)
        values = [episode.columns[name] for name in schema.entry_names]
        try:
            for start, stop in _same_model(episode.model_version):
                rows = slice(start, stop)
                part = [value[rows] for value in values]
                numbers[rows] = memory._extend_any(lane, part, episode.init_w[rows], int(episode.model_version[start]))
        except MemoireError:
            memory.open(lane)
            raise
        memory.close(lane, **episode.close_arguments)
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
    """Raise ParameterError for versions, priorities and times that no entry can have."""
    for version in (episode.model_version.min(initial=0), episode.model_version.max(initial=0)):
        model_version(int(version), "model_version")
    if episode.priority is not None and np.isinf(episode.priority).any():
        raise ParameterError("priority", episode.priority, "finite, or NaN to compute it when the episode is closed")
    if episode.born is not None and not np.isfinite(episode.born).all():
        raise ParameterError("born", episode.born, "None or finite Unix seconds")


def _same_model(versions: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Return (start, stop) of each run of entries with one model version."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return itertools.pairwise(edges)


class HeldEpisodes:
    """Episodes of a memory that the caller holds, read from its arrays."""

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
        """Slots of all episodes, the oldest first, then the open ones."""
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

    def slot_after(self, slot: int, number: int) -> int:
        """Return the slot of the closed episode after the one in `slot`, whose first entry has this number. If that
        episode was evicted, and so all before it, return the oldest; -1 at the end.
        """
        episode = self._inside["episodes"][slot]
        is_there = slot >= 0 and episode["state"] == 2 and self.first_number(slot) == number
        return int(episode["newer"] if is_there else self._inside["oldest"])

    def first_number(self, slot: int) -> int:
        """Return the number of an episode's first entry, which identifies the episode permanently."""
        return int(self._inside["meta"]["number"][self._inside["episodes"]["first_row"][slot]])

    def row_slices(self, slot: int) -> Iterator[slice]:
        """Yield the rows of an episode in order, as slices."""
        episode, size = self._inside["episodes"][slot], self._inside["page_rows"]
        row, remaining = int(episode["first_row"]), int(episode["length"])
        while remaining:
            page = row // size
            count = min(remaining, min((page + 1) * size, self._capacity) - row)
            yield slice(row, row + count)
            remaining -= count
            if remaining:
                row = int(self._inside["pages"]["after"][page]) * size

    def rows(self, slot: int, source: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of the rows of an episode with T entries: [T, ...] from `source` [C, ...], C the capacity."""
        return np.concatenate([source[part] for part in self.row_slices(slot)])

    def fact_column(self, name: str) -> NDArray[Any]:
        """Return a view of a fact of all rows, [C], C the capacity: a field of `_core.META` in its dtype."""
        meta: NDArray[Any] = self._inside["meta"]
        return meta[name]

    @property
    def weights(self) -> NDArray[np.float64]:
        """Weights of all rows as a view, [C], C the capacity."""
        weights: NDArray[np.float64] = self._inside["weights"]
        return weights

    def column(self, name: str) -> NDArray[Any]:
        """Return a view of a column of all rows, [C, *F], C the capacity; not for ragged columns."""
        return self._columns[name]

    def values(self, name: str, rows: slice) -> Ragged:
        """Return a ragged column of some rows."""
        return self._memory.ragged(name, np.arange(rows.start, rows.stop))

    def lengths(self, name: str, rows: slice) -> NDArray[np.int64]:
        """Return the element counts of a ragged column in N rows, [N]."""
        return self._memory.lengths(name, np.arange(rows.start, rows.stop)).astype("<i8")

    def final(self, name: str, row: int) -> NDArray[Any]:
        """Return a copy of a final state's column, [*F]."""
        if name in self.schema.ragged:
            return self._memory.ragged(name, np.array([-(row + 2)])).values
        state: NDArray[Any] = self._finals[name][row].copy()
        return state

    def _of_episode(self, name: str, slot: int) -> Any:
        if name not in self.schema.ragged:
            return self.rows(slot, self._columns[name])
        return self._memory.ragged(name, np.concatenate([np.r_[part] for part in self.row_slices(slot)]))

    def episode_facts(self, slot: int) -> dict[str, Any]:
        """Return the facts of an episode as a whole, by name."""
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
        """Return the value of an episode's final state, [*R]."""
        table = self._inside["bootstraps"]
        size = len(table) // len(self._inside["episodes"])
        value: NDArray[np.float32] = table[slot * size : (slot + 1) * size].reshape(self._shape).copy()
        return value

    def episode(self, slot: int) -> Episode:
        """Return a copy of the episode in a slot."""
        about = self.episode_facts(slot)
        final = about.pop("final")
        del about["length"]
        facts: dict[str, Any] = {name: self.rows(slot, self.fact_column(name)) for name in FACTS}
        facts["learned"] = facts["learned"].astype(np.bool_)
        return Episode(
            columns={name: self._of_episode(name, slot) for name in self.schema.names},
            **facts,
            final_state=None if final < 0 else {name: self.final(name, final) for name in self.schema.states},
            bootstrap_value=None if about["is_open"] else self.bootstrap(slot),
            **about,
        )
