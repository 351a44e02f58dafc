"""Registry of the writers of one memory: it assigns lanes, and limits the open episodes to a part of the capacity."""

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
from .writing import EntryObserver, ExactObserver, WriterState


class _SavedWriter(NamedTuple):
    """Lanes of a writer of a loaded memory; `state` is None if the writer cannot be resumed."""

    first: int
    lanes: int
    state: WriterState | None


class WriterRegistry:
    """The writers of one memory, with disjoint lanes; their open episodes leave room for closed ones.

    Thread-safe.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        """The memory that the writers fill."""
        # The lock guards the attributes below; the memory's lock comes first. A deleted writer appends without a lock.
        self._lock = threading.Lock()
        self._free: deque[tuple[int, int]] = deque()  # (first lane, lanes) of closed and deleted writers
        self._lanes = 0  # number of lanes ever assigned to writers
        self._saved: list[_SavedWriter] = []  # writers of a loaded memory, whose episodes are open
        self._sharing: weakref.WeakSet[Writer] = weakref.WeakSet()  # writers whose `longest` is a share of the capacity
        self._living: weakref.WeakSet[Writer] = weakref.WeakSet()

    @checked_names(called="writer()")
    def make(
        self,
        num_envs: int | None,
        autoreset: Any,
        observer: EntryObserver | ExactObserver | None,
        *,
        longest: int | None = None,
        check: bool = True,
        made_by: type[Writer] = Writer,
        stamp: Callable[[Any], int] | None = None,
        resume: bool = False,
    ) -> Writer:
        """Return a writer with lanes of its own; see `Writer`.

        Args:
            longest: Entries after which an endless episode is cut; None shares half of the capacity among all writers.
            made_by: Class of the writer.
            stamp: Function that returns the version of the model that acted, as for `Writer`.
            resume: True to continue a saved writer of the same kind of environments. With False, open episodes of saved
                writers end.

        Raises:
            ParameterError: the capacity is too small for so many environments, or their episodes would be cut before a
                sample is complete; or no saved writer has as many. Saved episodes stay open.
            SchemaError: `Writer.step` cannot take a value for one of the columns.
        """
        lanes, mode = num_envs or 1, autoreset_mode(autoreset)
        longest = None if longest is None else whole("longest", longest, 1)
        StepConverter(self.memory.schema, num_envs)
        with _core.Held(self._lock):
            resumed = self._claim(num_envs, mode) if resume else None
            is_shared = longest is None and (resumed is None or resumed.is_shared)
            has_lanes = resumed is not None or lanes in self._free_counts()
            total = self._lanes + (0 if has_lanes else lanes)
            if is_shared or self._sharing:
                self._check_share(self.memory.parameters, total)
            most = self.memory.capacity // 2
            if total > most and not has_lanes:
                expected = f"at most {most} together with other writers' members: each needs room for two entries"
                raise ParameterError("num_envs", lanes, expected)
            if resumed is None:
                first = self._end_saved(lanes)
            else:
                self._saved = [each for each in self._saved if each.state is not resumed]
                first = resumed.first_lane
        if resumed is None:
            self._close_episodes(first, lanes)
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
        """Raise if open episodes of writers with a shared length would be cut before a sample is complete.

        Raises:
            ParameterError: `sequence_length`, `multi_step` or `frame_stack` is above that length.
        """
        with _core.Held(self._lock):
            if self._sharing:
                self._check_share(parameters, self._lanes)

    def _share(self, lanes: int) -> int:
        """Return the entries after which open episodes in so many lanes are cut, to fit half of the capacity."""
        return max(1, self.memory.capacity // (2 * lanes))

    def _check_share(self, parameters: Parameters, lanes: int) -> None:
        share = self._share(lanes)
        for name in ("sequence_length", "multi_step", "frame_stack"):
            if (entries := getattr(parameters, name)) > share:
                expected = (
                    f"at most {share}, the length at which open episodes are cut: {lanes} members share half of the "
                    f"capacity of {self.memory.capacity}. Set a capacity of at least {2 * lanes * entries}, fewer "
                    f"members, or longest= of writer()"
                )
                raise ParameterError(name, entries, expected)

    def _claim(self, num_envs: int | None, mode: str) -> WriterState | None:
        """Return the first saved state for environments of this form; None if no saved writer is left to resume."""
        saved = [each.state for each in self._saved if each.state is not None]
        for state in saved:
            if (state.num_envs, state.autoreset) == (num_envs, mode):
                return state
        if saved:
            expected = f"False, or True for environments like those of a saved writer: {', '.join(map(str, saved))}"
            raise ParameterError("resume", True, expected)
        return None

    def _free_counts(self) -> set[int]:
        """Return the numbers of consecutive lanes that closed writers had."""
        return {count for _, count in self._free} | {each.lanes for each in self._saved if each.first < self._lanes}

    def _end_saved(self, lanes: int) -> int:
        """Close the open episodes of saved writers, and return the first of so many lanes for another writer."""
        writers, self._saved = self._saved, []
        for each in writers:
            self._close_episodes(each.first, each.lanes)
            if each.first < self._lanes:
                self._free.append((each.first, each.lanes))
        return self._lane_for(lanes)

    @contextmanager
    def steps_blocked(self) -> Iterator[None]:
        """Block steps of all writers within the context: see `Writer.steps_blocked`."""
        with _core.Held(self._lock):
            living = sorted(self._living, key=lambda writer: int(writer.lanes[0]))
        with ExitStack() as stack:
            for writer in living:
                stack.enter_context(writer.steps_blocked())
            yield

    def state(self, length_of: Callable[[int], int]) -> dict[str, Any]:
        """Return lanes and writers as JSON carries them. Call it within `steps_blocked` and while the memory is held.

        Args:
            length_of: Function that counts the entries of a lane's open episode.
        """
        states = [state for each in self._saved if (state := each.state) is not None]
        for writer in self._living:
            state = writer.state(is_shared=writer in self._sharing)
            if state is not None and state.lengths == [length_of(lane) for lane in writer.lanes.tolist()]:
                states.append(state)
        return {
            "lanes": self._lanes,
            "free": list(self._free),
            "writers": [msgspec.to_builtins(state) for state in sorted(states, key=lambda state: state.first_lane)],
        }

    def adopt(self, saved: Mapping[str, Any] | None, lanes: int, length_of: Callable[[int], int]) -> None:
        """Restore lanes and writers of a loaded memory with so many lanes, from the result of `state`.

        `make(resume=True)` continues the open episodes; any other `make` ends them.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the saved state is invalid.
        """
        taken: set[int] = set()
        if saved is not None:
            states = msgspec.convert(saved["writers"], list[WriterState])
            root = self.memory.schema.states[0].partition(".")[0]
            for state in states:
                state.check(self.memory.schema, root, length_of)
                autoreset_mode(state.autoreset)
                ResetCheck().restore_state(state.starts, state.lanes)
            free = [(int(first), int(count)) for first, count in saved["free"]]
            ranges = [*free, *((state.first_lane, state.lanes) for state in states)]
            self._lanes = int(saved["lanes"])
            if not 0 <= self._lanes <= lanes:
                raise ValueError("more lanes than the memory has")
            for first, count in ranges:
                if not 0 <= first < first + count <= self._lanes or not taken.isdisjoint(range(first, first + count)):
                    raise ValueError("two writers share a lane")
                taken.update(range(first, first + count))
            self._free.extend(free)
            self._saved = [_SavedWriter(state.first_lane, state.lanes, state) for state in states]
        self._saved += [_SavedWriter(lane, 1, None) for lane in range(max(lanes, self._lanes)) if lane not in taken]
        self._saved.sort(key=lambda each: each.first)

    def shorten(self, longest: int) -> None:
        """Cut the episodes of all writers after `longest` entries from now on."""
        with _core.Held(self._lock):
            for writer in self._living:
                writer.longest = longest

    def end(self, closed: str, deadline: float) -> list[str]:
        """Store open episodes of every writer, as `Writer.close` does. Later steps raise that `closed` is closed.

        Args:
            deadline: Time, by time.monotonic(), until which running steps of other threads may end.

        Returns:
            Sentences about episodes that could not be stored, with the reason.
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
                self._close_episodes(first, lanes)
            except MemoireError as error:
                problems.append(f"an open episode: {error}")
        return problems

    def _close_episodes(self, first: int, lanes: int) -> None:
        """Close the open episodes of a deleted writer, without final states."""
        for lane in range(first, first + lanes):
            with suppress(EpisodeError):  # without an open episode or entries
                self.memory.close(lane)
        self.memory.flush(first, lanes)

    def _lane_for(self, lanes: int) -> int:
        """Return the first of so many consecutive lanes that no living writer has."""
        for free in tuple(self._free):
            if free[1] == lanes:
                self._free.remove(free)
                return free[0]
        self._lanes += lanes
        return self._lanes - lanes
