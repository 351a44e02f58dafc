"""Complete state of a memory in a file: places and weights of entries, and the state that later draws depend on.

`state_of` copies the state, `RowLayout` checks the state from a file, and `MemoryRestoration` restores it in an empty
memory, which then draws what the saved one would have drawn. Facts and values of entries are saved beside it.

The .npz file of a memory's episodes is a ZIP archive of uncompressed arrays:

    obs, action, ...        the columns of each entry, [*F]

    memory..about           JSON: the form's number, the schema, the parameters, the capacity, the state of the memory
    memory..episodes        a row for each episode: `EPISODE_ROW`
    memory..bootstrap_value the value of each episode's final state, [*R]
    memory..init_w, ...     facts of each entry beside its columns: `dataset.FACTS`, number and weight
    memory..final.obs, ...  the final state of each episode that has one, [*F]
    memory..state.pages ... arrays of this module: places of entries, and the state that later draws depend on

A ragged column has its elements one after the other, and `NAME_length` counts those of each value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire import _core

if TYPE_CHECKING:
    from .memory import Memory

FORM: Final = 2
OWN: Final = "memory.."  # no column's name begins with "memory.."
ABOUT: Final = OWN + "about"
EPISODES: Final = OWN + "episodes"
BOOTSTRAP_VALUE: Final = OWN + "bootstrap_value"
FINAL: Final = OWN + "final."
STATE: Final = OWN + "state."
EPISODE_ROW: Final = np.dtype(
    [
        ("length", "<i8"),
        ("multiplier", "<f8"),
        ("final", "<i8"),  # row of the final states; -1: unknown
        ("terminated", "|i1"),  # 1, 0, or -1: unknown
        ("update_value", "|u1"),
        ("update_weight", "|u1"),
        ("is_open", "|u1"),
    ]
)


ARRAYS: Final = {
    "pages": _core.PAGE,
    "lanes": _core.LANE,
    "episodes": _core.EPISODE,
    "bootstraps": np.dtype("<f4"),
    "free_finals": np.dtype("<i8"),
    "final_values": np.dtype("<f4"),
}
"""Arrays of the engine that are saved unchanged."""
_LARGEST: Final = 1 << 62
_HEAVIEST: Final = 1e280  # the engine's largest weight


def state_of(memory: Memory, slots: list[int]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the state of a held memory, whose episodes are saved in the order of these slots.

    Returns:
        (numbers, arrays): plain numbers that JSON carries; and arrays by name, of which `slots` and `left` are int64
        [N]. `left` has the last numbers of rows without an entry.
    """
    inside = memory.contents()
    meta = inside["meta"]
    left = meta["number"][(meta["episode"] < 0) & (meta["number"] >= 0)]
    numbers = {
        "capacity": memory.capacity,
        "page_rows": inside["page_rows"],
        "live": memory.live,
        "ragged_limit": memory.ragged_limit,
        "engine": memory._counters(),
        "generator": memory.generator.bit_generator.state,
    }
    arrays = {name: inside[name] for name in ARRAYS}
    return numbers, arrays | {"slots": np.array(slots, np.int64), "left": left}


class SavedLayout(NamedTuple):
    """State of a memory, with the numbers and weights of its entries, which `MemoryRestoration` needs."""

    numbers: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    """Arrays of `state_of`, and `number` int64 [T] and `weight` float64 [T] of all entries, in the order of rows."""

    def in_order(self) -> SavedLayout:
        """Return the layout with the slots of all episodes in the order of `dataset.walk`."""
        episodes, slot, slots = self.arrays["episodes"], self.numbers["engine"]["oldest"], list[int]()
        newer = episodes["newer"].tolist()
        while slot >= 0:
            slots.append(slot)
            slot = newer[slot]
        opened = np.flatnonzero((episodes["state"] == 1) & (episodes["length"] > 0))
        return SavedLayout(self.numbers, self.arrays | {"slots": np.array([*slots, *opened.tolist()], np.int64)})


LAYOUT: Final = ARRAYS | {
    **dict.fromkeys(("slots", "left", "number"), np.dtype("<i8")),
    "weight": np.dtype("<f8"),
}
"""Dtypes of the arrays of a `SavedLayout`, each of one dimension."""


def layout_of(memory: Memory) -> SavedLayout:
    """Return a copy of a held memory's state; `in_order` completes it after the memory is free."""
    inside = memory.contents()
    numbers, arrays = state_of(memory, [])
    has_entry = inside["meta"]["episode"] >= 0
    arrays |= {"number": inside["meta"]["number"][has_entry], "weight": inside["weights"][has_entry]}
    # Copy bytes, so that copies of equal states are also equal in the padding of records.
    return SavedLayout(numbers, {name: each.view(np.uint8).copy().view(each.dtype) for name, each in arrays.items()})


class RowLayout:
    """Rows of the entries of saved episodes, checked: each row has at most one entry, and all linked lists are valid.

    Args:
        numbers, arrays: The result of `state_of`.
        lengths: [E] entries of each saved episode.
        dimensions: Number of dimensions of the reward.
        wrong: Function that makes the error to raise from a description of the problem.
    """

    def __init__(
        self,
        numbers: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]],
        lengths: NDArray[np.int64],
        dimensions: int,
        wrong: Callable[[str], Exception],
    ) -> None:
        self._wrong, self._arrays, self._engine = wrong, arrays, numbers["engine"]
        self.capacity, self._page_rows = int(numbers["capacity"]), int(numbers["page_rows"])
        pages, lanes, episodes = (arrays[name] for name in ("pages", "lanes", "episodes"))
        self.slots = arrays["slots"]
        self._require(len(pages) == -(-self.capacity // self._page_rows))
        self._require(len(arrays["bootstraps"]) == len(episodes) * dimensions)
        finals = int(self._engine["final_rows"])
        self._require(len(arrays["free_finals"]) == finals and len(arrays["final_values"]) == finals * dimensions)
        self._within(pages, len(pages), "before", "after", "older", "newer")
        self._within(pages, len(lanes), "lane")
        self._within(lanes, len(episodes), "episode")
        self._within(lanes, len(pages), "page")
        self._within(lanes, self._page_rows + 1, "offset", "first_offset", lowest=0)
        self._within(lanes, self.capacity, "ripe")
        self._within(episodes, self.capacity + 1, "length")
        self._within(episodes, len(episodes), "older", "newer")
        states = episodes["state"]
        self._within(episodes[states == 2], finals, "final")
        self._require(np.isin(states, (0, 1, 2)).all() and (episodes["length"] >= 0).all())
        for name in ("ended", "terminated", "update_value", "update_weight"):
            self._require(np.isin(episodes[name], (0, 1)).all())
        self._require(np.isin(pages["is_open"], (0, 1)).all() and np.isin(lanes["wrapped"], (0, 1)).all())
        self._require(np.isfinite(arrays["final_values"]).all() and np.isfinite(arrays["bootstraps"]).all())
        used = np.flatnonzero((states > 0) & (episodes["length"] > 0))
        self._within(episodes[used], self.capacity, "first_row", "last_row", lowest=0)
        self._within(episodes[states > 0], len(lanes), "lane", lowest=0)
        multipliers = episodes["multiplier"][states > 0]
        self._require(np.isfinite(multipliers).all() and (multipliers >= 0).all())
        self._check_counters()
        self._check_lists(finals)
        self._require(np.array_equal(np.sort(self.slots), used) and len(lengths) == len(used))
        self._require(np.array_equal(episodes["length"][self.slots], lengths))
        self.rows = [self._rows_of(slot) for slot in self.slots.tolist()]
        """Rows of the entries of each saved episode, int64 [T]."""
        self._check_rows()

    def _require(self, is_right: Any) -> None:
        if not is_right:
            raise self._wrong("has an invalid layout of its entries")

    def _within(self, table: NDArray[Any], size: int, *names: str, lowest: int = -1) -> None:
        for name in names:
            self._require(((table[name] >= lowest) & (table[name] < size)).all())

    def _check_counters(self) -> None:
        engine, episodes = self._engine, len(self._arrays["episodes"])
        for name, size in (
            ("oldest", episodes), ("newest", episodes), ("free_episode", episodes),
            ("first_page", len(self._arrays["pages"])), ("last_page", len(self._arrays["pages"])),
        ):  # fmt: skip
            self._require(type(engine[name]) is int and -1 <= engine[name] < size)
        for name in ("generated", "free_final_count", "final_rows"):
            self._require(type(engine[name]) is int and 0 <= engine[name] < _LARGEST)
        self._require(type(engine["newest_model"]) is int and 0 <= engine["newest_model"] < _LARGEST)
        self._require(type(engine["oldest_model"]) is int and -(1 << 63) < engine["oldest_model"] <= _LARGEST)  # any
        self._require(type(engine["oldest_born"]) is float and engine["oldest_born"] < np.inf)
        self._require(type(engine["max_priority"]) is float and 0.0 <= engine["max_priority"] < np.inf)
        random = engine["random"]
        self._require(len(random) == 4 and all(type(word) is int and 0 <= word < 1 << 64 for word in random))

    def _check_lists(self, finals: int) -> None:
        """Check that each list has its members, in both directions, and no cycle."""
        pages, lanes, episodes = (self._arrays[name] for name in ("pages", "lanes", "episodes"))
        engine, states = self._engine, episodes["state"]
        takeable = self._follow(pages["newer"], engine["first_page"])
        self._require(takeable == self._follow(pages["older"], engine["last_page"])[::-1])
        self._require(sorted(takeable) == np.flatnonzero(pages["is_open"] == 0).tolist())
        closed = self._follow(episodes["newer"], engine["oldest"])
        self._require(closed == self._follow(episodes["older"], engine["newest"])[::-1])
        self._require(sorted(closed) == np.flatnonzero(states == 2).tolist())
        free = self._follow(episodes["older"], engine["free_episode"])
        self._require(sorted(free) == np.flatnonzero(states == 0).tolist())
        opened = lanes["episode"][lanes["episode"] >= 0]
        self._require(np.array_equal(np.sort(opened), np.flatnonzero(states == 1)))
        self._require((episodes["lane"][opened] == np.flatnonzero(lanes["episode"] >= 0)).all())
        having = np.flatnonzero(lanes["page"] >= 0)
        self._require((pages["lane"][lanes["page"][having]] == having).all())
        free_finals = self._arrays["free_finals"][: engine["free_final_count"]]
        used = episodes["final"][states == 2]
        all_finals = np.sort(np.concatenate([free_finals, used[used >= 0]]))
        self._require(np.array_equal(all_finals, np.arange(finals)))

    def _follow(self, links: NDArray[Any], start: int) -> list[int]:
        members: list[int] = []
        while start >= 0:
            self._require(len(members) < len(links))
            members.append(start)
            start = int(links[start])
        return members

    def _rows_of(self, slot: int) -> NDArray[np.int64]:
        episode, after = self._arrays["episodes"][slot], self._arrays["pages"]["after"]
        row, remaining, parts = int(episode["first_row"]), int(episode["length"]), []
        while remaining:
            page = row // self._page_rows
            count = min(remaining, min((page + 1) * self._page_rows, self.capacity) - row)
            parts.append(np.arange(row, row + count))
            remaining -= count
            if remaining:
                self._require(after[page] >= 0)
                row = int(after[page]) * self._page_rows
        rows = np.concatenate(parts)
        self._require(rows[-1] == episode["last_row"])
        return rows

    def _check_rows(self) -> None:
        """Check that no row has two entries, and that open pages and ripe entries belong to open episodes."""
        taken = np.concatenate([*self.rows, self._arrays["left"] % self.capacity])
        self._require(len(np.unique(taken)) == len(taken))
        self._require(((self._arrays["left"] >= 0) & (self._arrays["left"] < _LARGEST)).all())
        states = self._arrays["episodes"]["state"][self.slots]
        opened = [rows for rows, state in zip(self.rows, states, strict=True) if state == 1]
        pages = np.unique(np.concatenate([np.empty(0, np.int64), *opened]) // self._page_rows)
        self._require(np.array_equal(pages, np.flatnonzero(self._arrays["pages"]["is_open"])))
        lanes, episodes = self._arrays["lanes"], self._arrays["episodes"]
        place = dict(zip(self.slots.tolist(), self.rows, strict=True))
        for lane in lanes[lanes["episode"] >= 0]:
            rows = place.get(int(lane["episode"]), np.empty(0, np.int64))
            self._require(lane["ripe"] < 0 or lane["ripe"] in rows)
            if len(rows):
                self._require(lane["page"] == rows[-1] // self._page_rows)
                self._require(lane["offset"] == rows[-1] % self._page_rows + 1)
                self._require(lane["first_offset"] == rows[0] % self._page_rows)
                self._require(episodes["length"][lane["episode"]] == len(rows))


class MemoryRestoration:
    """Restoration of a memory's state in an empty memory: `put` adds each episode's facts and values, `finish` ends it.

    The memory has the capacity, the parameters and the page rows of the saved one.
    """

    def __init__(
        self, memory: Memory, layout: RowLayout, numbers: Mapping[str, Any], arrays: Mapping[str, Any]
    ) -> None:
        self._memory, self._layout = memory, layout
        episodes = arrays["episodes"]
        closed, entries = int((episodes["state"] == 2).sum()), sum(map(len, layout.rows))
        memory.generator.bit_generator.state = numbers["generator"]
        memory.limit_ragged(numbers["ragged_limit"])
        memory._take_over({name: arrays[name] for name in ARRAYS}, numbers["engine"], entries, closed)
        inside = memory.contents()
        self._meta, self._weights = inside["meta"], np.zeros(memory.capacity)
        left = arrays["left"]
        self._meta["number"][left % memory.capacity] = left
        self._columns, self._finals = inside["columns"], inside["finals"]
        self._final_rows = episodes["final"][layout.slots]

    def put(self, place: int, rows: Mapping[str, Any], final: Mapping[str, Any] | None) -> bool:
        """Add the entries of the saved episode at this index: columns [T, ...], and facts [T] under `OWN`.

        Returns False if numbers or weights are invalid, or exceed limits.
        """
        where = self._layout.rows[place]
        number, weight = rows[OWN + "number"], rows[OWN + "weight"]
        capacity = self._memory.capacity
        if not ((number >= 0) & (number < _LARGEST) & (number % capacity == where)).all():
            return False
        if not ((weight >= 0.0) & (weight <= _HEAVIEST)).all():
            return False
        limits = self._memory.parameters
        if limits.max_times_sampled and (rows[OWN + "drawn"][weight > 0.0] >= limits.max_times_sampled).any():
            return False
        if 0 < limits.max_episode < self._memory.num_episodes:
            return False
        meta = self._meta
        for name in ("number", "born", "model_version", "init_w", "priority", "learned", "drawn"):
            meta[name][where] = rows[OWN + name]
        meta["position"][where] = np.arange(len(where))
        meta["episode"][where] = self._layout.slots[place]
        self._weights[where] = weight
        schema = self._memory.schema
        for index, name in enumerate(schema.names):
            if name in schema.ragged:
                values = rows[name]
                self._memory._put_values(index, where, values.lengths.astype(np.int64), values.values)
            else:
                self._columns[index][where] = _as_bytes(rows[name], len(where))
        if final is not None:
            row = int(self._final_rows[place])
            for index, name in enumerate(schema.names):
                if name in schema.ragged and name in final:
                    lengths = np.array([len(final[name])], np.int64)
                    self._memory._put_values(index, np.array([-(row + 2)]), lengths, final[name])
                elif name in final:
                    size = self._columns[index].shape[1]
                    self._finals[index][row * size : (row + 1) * size] = _as_bytes(final[name], 1)[0]
        return True

    def finish(self) -> None:
        """Set the weights, so that the entries can be drawn."""
        self._memory._set_weights(self._weights)


def _as_bytes(values: Any, count: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(count, -1)
