"""All writers of one memory: lanes of their own, and room for the open episodes of all."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from memoire.errors import EpisodeError, MemoireError, ParameterError
from memoire.suggestions import checked_names

from .episode_store import EpisodeStore, Observer
from .rollout_writer import RolloutWriter
from .writer import Writer


class WriterRegistry:
    """The writers of one memory: each has lanes that no other living one has, and together they leave it room.

    Thread-safe.
    """

    def __init__(self, memory: EpisodeStore) -> None:
        self.memory = memory
        """Whose they are."""
        self._lock = threading.Lock()  # of the three below, except that a dying writer appends to `_free` at any moment
        self._free: deque[tuple[int, int]] = deque()  # (first lane, lanes) of writers that are gone
        self._lanes = 0  # lanes ever given to a writer
        self._left = 0  # lanes of a memory that was loaded, whose open episodes end when the first writer is made
        self._sharing: weakref.WeakSet[Writer] = weakref.WeakSet()  # writers whose `longest` is chosen here
        self._living: weakref.WeakSet[Writer] = weakref.WeakSet()

    @checked_names(called="writer()")
    def make(
        self,
        num_envs: int | None,
        autoreset: Any,
        observer: Observer | None,
        *,
        longest: int | None = None,
        check: bool = True,
        cuts_at_once: bool = False,
        stamp: Callable[[Any], int] | None = None,
    ) -> Writer:
        """A writer with lanes of its own; see `Writer`.

        Args:
            longest: None leaves half of the capacity to the open episodes of all writers.
            cuts_at_once: Whether what has so many entries is stored at that step, and not before the next one.
            stamp: See `Writer`.

        Raises:
            ParameterError: there is no room for so many environments.
        """
        lanes = num_envs or 1
        with self._lock:
            left, self._left = self._left, 0
            first = self._lane_for(lanes)
        self._store_left(0, left)
        self._store_left(first, lanes)
        with self._lock:
            share = max(1, self.memory.capacity // (2 * self._lanes))
            most = share if longest is None else longest
            kind = RolloutWriter if cuts_at_once else Writer
            facts: dict[str, Any] = {"first_lane": first, "longest": most, "check": check, "stamp": stamp}
            writer = kind(self.memory, num_envs, autoreset, observer, **facts)
            weakref.finalize(writer, self._free.append, (first, lanes))
            self._living.add(writer)
            for other in self._sharing:
                other.longest = share
            if longest is None:
                self._sharing.add(writer)
            return writer

    def adopt(self, lanes: int) -> None:
        """Have the episodes that are open in these lanes of a loaded memory end when the first writer is made."""
        self._left = lanes

    def shorten(self, longest: int) -> None:
        """Have the writers whose length is chosen here, or was set by this, cut after so many entries from now on."""
        with self._lock:
            for writer in self._living:
                writer.longest = longest

    def end(self, closed: str, deadline: float) -> list[str]:
        """Store what is open in every writer, as `Writer.close` does. From now on steps raise that `closed` is closed.

        Args:
            deadline: Until then threads that are inside of a writer may leave it, as time.monotonic() counts.

        Returns:
            What could not be stored, and why: a sentence each.
        """
        with self._lock:
            living, free = list(self._living), list(self._free)
        problems = []
        for writer in living:
            try:
                if entries := writer.end(closed, max(0.0, deadline - time.monotonic())):
                    problems.append(f"{entries} entries: a thread is still inside of their writer")
            except MemoireError as error:
                problems.append(f"an open episode: {error}")
        for first, lanes in free:
            try:
                self._store_left(first, lanes)
            except MemoireError as error:
                problems.append(f"an open episode: {error}")
        return problems

    def _store_left(self, first: int, lanes: int) -> None:
        """Close the open episodes of a writer that is gone: nobody knows in which states they ended."""
        for lane in range(first, first + lanes):
            with suppress(EpisodeError):  # none is open, or without entries
                self.memory.close(lane)

    def _lane_for(self, lanes: int) -> int:
        """The first of so many consecutive lanes that no living writer has."""
        for free in tuple(self._free):
            if free[1] == lanes:
                self._free.remove(free)
                return free[0]
        most = self.memory.capacity // 2
        if self._lanes + lanes > most:
            expected = f"at most {most} with those of other writers: two entries of room for each"
            raise ParameterError("num_envs", lanes, expected)
        self._lanes += lanes
        return self._lanes - lanes
