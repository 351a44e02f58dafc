"""Memories with contents, and slow checks that the engine's pages, episodes, rows, weights and sums agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters


class LongWay:
    """Memory of a class that the engine does not know, so that its writer takes the slow path at every step."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


class RecordingObserver(list[Any]):
    """Observer of a writer: a list of all reports, in order."""

    def on_entries(self, count: int) -> None:
        self.append(count)

    def on_episode(self, lane: int, length: int, return_: Any) -> None:
        self.append((lane, length, return_.tolist()))

    @property
    def entries(self) -> int:
        """Number of all reported entries."""
        return sum(each for each in self if isinstance(each, int))

    @property
    def episodes(self) -> list[tuple[int, int, Any]]:
        """(lane, length, return) of each reported episode."""
        return [each for each in self if isinstance(each, tuple)]


def filled(memory, entry, *, episodes=1, length=20, final=None, model_version=0, **closing) -> Memory:
    """Add closed episodes to a memory and return it; entry t of each is `entry(t)`, the final state `final()`."""
    for _ in range(episodes):
        memory.open()
        for step in range(length):
            memory.add(0, entry(step), model_version=model_version)
        memory.close(final_state=None if final is None else final(), **closing)
    return memory


def with_episode(memory: Memory, values: Sequence[Any], init_w: Any = 1.0, **closing: Any) -> Memory:
    """Add one closed episode of these columns, each [T, *F], to a memory and return the memory."""
    memory.open()
    memory.extend(0, values, init_w)
    memory.close(**closing)
    return memory


def check_memory(memory: Memory) -> None:
    """Assert that all parts of a memory agree with each other and with its parameters."""
    with memory.held():
        _check(memory, memory.parameters)


def _check(store: _core.EntryStore, parameters: Parameters) -> None:
    total, positive, least = store._sums()
    inside = store.contents()
    _check_order(inside)
    _check_lanes(inside, store.capacity)
    lengths = _check_episodes(inside, store.capacity)
    held = inside["meta"]["episode"] >= 0
    weights = inside["weights"]
    assert held.sum() == sum(lengths) == store.num_entries <= store.capacity
    assert inside["closed"] == store.num_episodes
    assert not 0 < parameters.max_episode < store.num_episodes
    assert (inside["meta"]["number"] % store.capacity == np.arange(store.capacity)).all()
    assert not weights[~held].any() and (weights >= 0.0).all()
    assert positive == (weights > 0.0).sum()
    _check_limits(store, parameters, inside, weights > 0.0)
    if parameters.prioritization != "proportional":
        rows = np.flatnonzero(weights > 0.0)
        assert (store._ranked() == rows[np.lexsort((rows, -weights[rows]))]).all()
        exponent = parameters.priority_exponent if parameters.prioritization == "rank" else 0.0
        weights = np.arange(1, positive + 1, dtype=np.float64) ** -exponent
    for _, live, room, _, wrong in store._heaps():
        assert not wrong
        assert 0 <= live <= room <= 2 * live + (8 << 20)
    assert math.isclose(total, math.fsum(weights), rel_tol=1e-12)
    assert math.isclose(least, weights[weights > 0.0].min(initial=math.inf), rel_tol=1e-12)


def _check_limits(
    store: _core.EntryStore, limits: Parameters, inside: dict[str, Any], has_weight: NDArray[np.bool_]
) -> None:
    """Assert that the limits' bounds cover all drawable entries, and that entries beyond a limit have no weight."""
    meta = inside["meta"][has_weight]
    if limits.max_times_sampled:
        assert (meta["drawn"] < limits.max_times_sampled).all()
        assert store.draws_left == (limits.max_times_sampled - meta["drawn"].astype(np.int64)).sum()
    if limits.max_model_lag is not None:
        assert (meta["model_version"] >= store.newest_model - limits.max_model_lag).all()
    if limits.max_times_sampled or limits.max_age or limits.max_model_lag is not None:
        pages = np.flatnonzero(has_weight) // inside["page_rows"]
        assert (inside["page_born"][pages] <= meta["born"]).all()
        assert (inside["page_model"][pages] <= meta["model_version"]).all()


def _check_order(inside: dict[str, Any]) -> None:
    """Assert that each takeable page is once in the order, and that each episode's slot is closed, free or open."""
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
    """Assert that a page belongs to at most one lane, and is open exactly if it holds rows of an open episode."""
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
    """Assert that each episode's rows follow each other and hold their positions; return the episodes' lengths."""
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
    """Yield the members of a linked list from `start` on."""
    while start >= 0:
        yield start
        start = int(links[start])
