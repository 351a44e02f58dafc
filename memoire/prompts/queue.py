"""Prompts in the order in which they leave: by priority, then by age, and data sets by their shares. Pure.

    shares math 0.7, code 0.3      math 5 taken, code 2 taken      next: math (5+1)/0.7 = 8.6, code (2+1)/0.3 = 10: math

The cost of `pop` grows with the logarithm of what is inside.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from .rows import Key, PromptRow


class PromptQueue:
    """Holds prompts, each once. Entries of those that were taken out stay in the heaps until they come up.

    Args:
        shares: Of each data set, above 0; empty: one order for all data sets.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self.shares: dict[str, float] = dict(shares or {})
        self._taken: dict[str, int] = {}
        self._inside: dict[Key, tuple[float, int, PromptRow]] = {}
        self._heaps: dict[str, list[tuple[float, int, Key]]] = {}

    def __len__(self) -> int:
        return len(self._inside)

    def __contains__(self, row: PromptRow) -> bool:
        return row.key in self._inside

    @property
    def turns(self) -> dict[str, int]:
        """Prompts that were taken of each data set since they have their shares; none if they have no shares."""
        return dict(self._taken) if self.shares else {}

    @turns.setter
    def turns(self, turns: Mapping[str, int]) -> None:
        self._taken = dict(turns)

    def rows(self) -> Iterator[PromptRow]:
        """All that are inside, in no order."""
        return (row for _, _, row in self._inside.values())

    def push(self, row: PromptRow) -> None:
        """Put one in, or to its new place."""
        place = -row.priority, row.order
        self._inside[row.key] = (*place, row)
        heap = self._heaps.setdefault(row.dataset if self.shares else "", [])
        heapq.heappush(heap, (*place, row.key))
        if len(heap) > 64 + 4 * len(self._inside):
            self._rebuild()

    def discard(self, row: PromptRow) -> None:
        """Take one out, if it is inside."""
        self._inside.pop(row.key, None)

    def first(self) -> PromptRow | None:
        """The next one, which stays inside; None if there is none."""
        dataset = self._next_dataset()
        return None if dataset is None else self._inside[self._heaps[dataset][0][2]][2]

    def pop(self) -> PromptRow | None:
        """Take the next one out; None if there is none."""
        dataset = self._next_dataset()
        if dataset is None:
            return None
        _, _, key = heapq.heappop(self._heaps[dataset])
        self._taken[dataset] = self._taken.get(dataset, 0) + 1
        return self._inside.pop(key)[2]

    def _next_dataset(self) -> str | None:
        """The data set whose turn it is; what was taken out before left its heap."""
        found = [(self._turn_of(dataset), dataset) for dataset in self._heaps if self._first(dataset) is not None]
        return min(found)[1] if found else None

    def undo(self, row: PromptRow) -> None:
        """One that was popped does not count in its data set's share."""
        dataset = row.dataset if self.shares else ""
        self._taken[dataset] = max(0, self._taken.get(dataset, 0) - 1)

    def share_out(self, shares: Mapping[str, float]) -> None:
        """Let data sets leave in these shares from now on; a data set without one leaves when the others are empty."""
        self.shares, self._taken = dict(shares), {}
        self._rebuild()

    def _turn_of(self, dataset: str) -> float:
        share = self.shares.get(dataset, 0.0) if self.shares else 1.0
        return (self._taken.get(dataset, 0) + 1) / share if share > 0.0 else float("inf")

    def _first(self, dataset: str) -> Key | None:
        """The next one of a data set; what was taken out before leaves the heap."""
        heap = self._heaps[dataset]
        while heap:
            place, order, key = heap[0]
            inside = self._inside.get(key)
            if inside is not None and inside[:2] == (place, order):
                return key
            heapq.heappop(heap)
        return None

    def _rebuild(self) -> None:
        self._heaps = {}
        for place, order, row in self._inside.values():
            self._heaps.setdefault(row.dataset if self.shares else "", []).append((place, order, row.key))
        for heap in self._heaps.values():
            heapq.heapify(heap)
