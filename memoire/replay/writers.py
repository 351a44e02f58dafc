"""All writers of one memory: lanes of their own, and room for the open episodes of all.

Fragments of rollouts leave at the step that fills them, and a step waits until there is room.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from memoire import _core
from memoire.arguments import checked_names, whole
from memoire.errors import EpisodeError, MemoireError, ParameterError

from .memory import Memory
from .parameters import Parameters
from .steps import ResetCheck, StepConverter, autoreset_mode
from .writer import Writer
from .writing import ExactObserver, Observer, WriterState


class _LeftWriter(NamedTuple):
    """Lanes of a loaded memory that a writer had; `state` is None if nothing is known of that."""

    first: int
    lanes: int
    state: WriterState | None


class WriterRegistry:
    """The writers of one memory: each has lanes that no other living one has, and together they leave it room.

    Thread-safe.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        """Whose they are."""
        # Of the three below, except that a dying writer appends to `_free` at any moment. Taken after the memory's.
        self._lock = threading.Lock()
        self._free: deque[tuple[int, int]] = deque()  # (first lane, lanes) of writers that are gone
        self._lanes = 0  # lanes ever given to a writer
        self._left: list[_LeftWriter] = []  # of a memory that was loaded: their episodes are open
        self._sharing: weakref.WeakSet[Writer] = weakref.WeakSet()  # writers whose `longest` is chosen here
        self._living: weakref.WeakSet[Writer] = weakref.WeakSet()

    @checked_names(called="writer()")
    def make(
        self,
        num_envs: int | None,
        autoreset: Any,
        observer: Observer | ExactObserver | None,
        *,
        longest: int | None = None,
        check: bool = True,
        made_by: type[Writer] = Writer,
        stamp: Callable[[Any], int] | None = None,
        resume: bool = False,
    ) -> Writer:
        """A writer with lanes of its own; see `Writer`.

        Args:
            longest: None leaves half of the capacity to the open episodes of all writers.
            made_by: The class of writer.
            stamp: See `Writer`.
            resume: Go on as a writer of these environments that was saved. Without it open episodes of those end.

        Raises:
            ParameterError: there is no room for so many environments, or only for episodes so short that no sample of
                them would be whole; or none of the saved writers was of as many. What was left goes on.
            SchemaError: `Writer.step` cannot take a value for one of the columns.
        """
        lanes, mode = num_envs or 1, autoreset_mode(autoreset)
        longest = None if longest is None else whole("longest", longest, 1)
        StepConverter(self.memory.schema, num_envs)
        with _core.Held(self._lock):
            resumed = self._claimed(num_envs, mode) if resume else None
            is_shared = longest is None and (resumed is None or resumed.is_shared)
            has_lanes = resumed is not None or lanes in self._given_back()
            total = self._lanes + (0 if has_lanes else lanes)
            if is_shared or self._sharing:
                self._check_share(self.memory.parameters, total)
            most = self.memory.capacity // 2
            if total > most and not has_lanes:
                expected = f"at most {most} with those of other writers: two entries of room for each"
                raise ParameterError("num_envs", lanes, expected)
            if resumed is None:
                first = self._end_left(lanes)
            else:
                self._left = [left for left in self._left if left.state is not resumed]
                first = resumed.first_lane
        if resumed is None:
            self._store_left(first, lanes)
        with _core.Held(self._lock):
            share = self._share(self._lanes)
            if longest is None:
                longest = share if is_shared or resumed is None else resumed.longest
            facts: dict[str, Any] = {"first_lane": first, "longest": longest, "check": check, "stamp": stamp}
            writer = made_by(self.memory, num_envs, mode, observer, **facts, resumed=resumed)
            writer._leave = weakref.finalize(writer, self._free.append, (first, lanes))
            self._living.add(writer)
            for other in self._sharing:
                other.longest = share
            if is_shared:
                self._sharing.add(writer)
            return writer

    def check(self, parameters: Parameters) -> None:
        """Refuse parameters by which no sample of a writer's episodes would be whole, if it is cut off as chosen here.

        Raises:
            ParameterError: `sequence_length`, `multi_step` or `frame_stack` is longer than that.
        """
        with _core.Held(self._lock):
            if self._sharing:
                self._check_share(parameters, self._lanes)

    def _share(self, lanes: int) -> int:
        """Entries after which open episodes are cut if there are so many lanes: half of the capacity is theirs."""
        return max(1, self.memory.capacity // (2 * lanes))

    def _check_share(self, parameters: Parameters, lanes: int) -> None:
        share = self._share(lanes)
        for name in ("sequence_length", "multi_step", "frame_stack"):
            if (entries := getattr(parameters, name)) > share:
                expected = (
                    f"at most {share}: {lanes} members share half of the capacity, {self.memory.capacity}, and open "
                    f"episodes are cut there. Give a capacity of at least {2 * lanes * entries}, have fewer members, "
                    f"or say longest= to writer()"
                )
                raise ParameterError(name, entries, expected)

    def _claimed(self, num_envs: int | None, mode: str) -> WriterState | None:
        """The first saved writer of such environments; None if no writer was saved, or each goes on already."""
        saved = [left.state for left in self._left if left.state is not None]
        for state in saved:
            if (state.num_envs, state.autoreset) == (num_envs, mode):
                return state
        if saved:
            expected = f"False, or used for one of the writers that were saved: {', '.join(map(str, saved))}"
            raise ParameterError("resume", True, expected)
        return None

    def _given_back(self) -> set[int]:
        """How many lanes writers had that are gone, one after the other."""
        return {count for _, count in self._free} | {left.lanes for left in self._left if left.first < self._lanes}

    def _end_left(self, lanes: int) -> int:
        """End what saved writers left open, and give the first of so many lanes for another one."""
        left, self._left = self._left, []
        for each in left:
            self._store_left(each.first, each.lanes)
            if each.first < self._lanes:
                self._free.append((each.first, each.lanes))
        return self._lane_for(lanes)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Within it no writer takes a step: see `Writer.still`."""
        with _core.Held(self._lock):
            living = sorted(self._living, key=lambda writer: int(writer.lanes[0]))
        with ExitStack() as stack:
            for writer in living:
                stack.enter_context(writer.still())
            yield

    def told(self, length_of: Callable[[int], int]) -> dict[str, Any]:
        """Lanes and writers as JSON carries them, within `still` and while the memory is held.

        Args:
            length_of: Entries of the open episode of a lane.
        """
        states = [state for left in self._left if (state := left.state) is not None]
        for writer in self._living:
            state = writer.state(is_shared=writer in self._sharing)
            if state is not None and state.lengths == [length_of(lane) for lane in writer.lanes.tolist()]:
                states.append(state)
        return {
            "lanes": self._lanes,
            "free": list(self._free),
            "writers": [msgspec.to_builtins(state) for state in sorted(states, key=lambda state: state.first_lane)],
        }

    def adopt(self, told: Mapping[str, Any] | None, lanes: int, length_of: Callable[[int], int]) -> None:
        """Go on from what another one `told`, of a loaded memory that has so many lanes. Open episodes go on by
        `make(resume=True)`, and end by another `make`.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it cannot be so.
        """
        taken: set[int] = set()
        if told is not None:
            states = msgspec.convert(told["writers"], list[WriterState])
            root = self.memory.schema.states[0].partition(".")[0]
            for state in states:
                state.check(self.memory.schema, root, length_of)
                autoreset_mode(state.autoreset)
                ResetCheck().go_on_from(state.starts, state.lanes)
            free = [(int(first), int(count)) for first, count in told["free"]]
            ranges = [*free, *((state.first_lane, state.lanes) for state in states)]
            self._lanes = int(told["lanes"])
            if not 0 <= self._lanes <= lanes:
                raise ValueError("more lanes than there can be")
            for first, count in ranges:
                if not 0 <= first < first + count <= self._lanes or not taken.isdisjoint(range(first, first + count)):
                    raise ValueError("a writer in the lanes of another one")
                taken.update(range(first, first + count))
            self._free.extend(free)
            self._left = [_LeftWriter(state.first_lane, state.lanes, state) for state in states]
        self._left += [_LeftWriter(lane, 1, None) for lane in range(max(lanes, self._lanes)) if lane not in taken]
        self._left.sort(key=lambda left: left.first)

    def shorten(self, longest: int) -> None:
        """Have the writers whose length is chosen here, or was set by this, cut after so many entries from now on."""
        with _core.Held(self._lock):
            for writer in self._living:
                writer.longest = longest

    def end(self, closed: str, deadline: float) -> list[str]:
        """Store what is open in every writer, as `Writer.close` does. From now on steps raise that `closed` is closed.

        Args:
            deadline: Until then threads that are inside of a writer may leave it, as time.monotonic() counts.

        Returns:
            What could not be stored, and why: a sentence each.
        """
        with _core.Held(self._lock):
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
        self.memory.flush(first, lanes)

    def _lane_for(self, lanes: int) -> int:
        """The first of so many consecutive lanes that no living writer has."""
        for free in tuple(self._free):
            if free[1] == lanes:
                self._free.remove(free)
                return free[0]
        self._lanes += lanes
        return self._lanes - lanes
