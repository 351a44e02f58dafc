"""What a writer needs of others: a memory that takes episodes, and an observer that counts them.

An interrupt comes between two opcodes of Python. So that a step happens or does not, a memory and a writer change by
lists of calls of C functions, which `_core.at_once` makes as one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from operator import setitem
from typing import Any, Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from memoire import _core

from .parameters import Parameters
from .schema import Schema

AfterStep = Literal["", "wait", "discard"]
"""What a writer does after a step: it goes on, waits for room, or first drops the step, for which there was none."""


Changes = list[tuple[Callable[..., object], tuple[Any, ...]]]
"""Functions of C, and the arguments of each: what `_core.at_once` takes."""


def adding(owner: object, **sums: int) -> Changes:
    """The changes that add to an object's attributes."""
    return _core.setting(owner, **{name: getattr(owner, name) + count for name, count in sums.items()})


def putting(value: Any, place: Any, *arrays: Any) -> Changes:
    """The changes that put a value at the same place of several arrays, or dicts."""
    return [(setitem, (array, place, value)) for array in arrays]


class EpisodeStore(Protocol):
    """What a writer needs of a memory; `memory.Memory` is one."""

    @property
    def schema(self) -> Schema:
        """The columns."""

    @property
    def capacity(self) -> int:
        """Entries it has room for."""

    @property
    def parameters(self) -> Parameters:
        """How samples are cut."""

    def held(self) -> AbstractContextManager[object]:
        """A moment in which nothing else changes; a change waits for no lock then."""

    def open(self, lane: int = 0) -> None:
        """Begin an episode, discarding one that was not closed."""

    def opening(self, lane: int) -> Changes:
        """The changes that do so."""

    def checked_version(self, model_version: Any) -> int:
        """The version of the model that made a new entry. Raises ParameterError."""

    def adding_one(self, lane: int, values: tuple[Any, ...], init_w: Any, model_version: int) -> Changes:
        """The changes that add one entry, of exact values [*F]."""

    def adding(self, lanes: NDArray[np.int64], values: tuple[Any, ...], init_w: Any, model_version: int) -> Changes:
        """The changes that add one entry to each of N lanes: `lanes` [N], `values` [N, *F] for each column, `init_w` a
        number or [N].
        """

    def explain(self, refused: _core.NotAdded) -> NoReturn:
        """Raise in words what such a change has raised."""

    def closing(
        self,
        lane: int,
        *,
        final_state: tuple[Any, ...] | None = None,
        terminated: bool | None = None,
        bootstrap_value: Any = None,
        is_cut: bool = False,
    ) -> Changes:
        """The changes that end an open episode, in `final_state` if that is known, and open the next one.

        Args:
            is_cut: It goes on: the entries that follow are of the same one.
        """

    def close(self, lane: int = 0) -> None:
        """End an open episode; how it ended is unknown."""

    @property
    def leaving(self) -> Sized:
        """Ended episodes that `flush` still has to send elsewhere."""

    def flush(self, first_lane: int, lanes: int) -> None:
        """Send those of these lanes."""


class Observer(Protocol):
    """Counts what a writer records: called in the writer's thread, once, after the memory has it."""

    def on_entries(self, count: int) -> AfterStep | None:
        """`count` entries were added. Returns what to do; after "wait" and "discard", `pause` is called at the end of
        the step.
        """

    def pause(self) -> None:
        """Wait inside of a step until more may be recorded; what was open has been cut."""

    def on_episode(self, lane: int, length: int, return_: NDArray[np.float64]) -> None:
        """An episode ended after `length` entries; its undiscounted return, in the shape of one reward."""


class ExactObserver(Protocol):
    """An observer that takes what it is told of from the writer, by the same change that counts it: once, also if it is
    interrupted and called again.
    """

    @property
    def is_behind(self) -> bool:
        """Whether something of entries that it took is not done yet."""

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Take the writer's `_untold` entries, and set its `_answer`; `waits` is whether that may take time."""

    def take_episode(self, told: deque[tuple[int, int, NDArray[np.float64]]]) -> None:
        """Take the first of these episodes: lane, length and return [*R]."""

    def pause(self, writer: _core.StepCounter) -> None:
        """Wait as `Observer.pause` does, and clear the writer's `_answer`."""


class ToldObserver:
    """Calls an `Observer` once for each thing that it is told of."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    is_behind = False
    """See `ExactObserver`."""

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """See `ExactObserver`."""
        writer._tell(self._observer.on_entries)

    def take_episode(self, told: deque[tuple[int, int, NDArray[np.float64]]]) -> None:
        """See `ExactObserver`: the return is [*R]."""
        _core.at_once([(told.popleft, ()), (self._observer.on_episode, told[0])])

    def pause(self, writer: _core.StepCounter) -> None:
        """See `ExactObserver`."""
        self._observer.pause()
        writer._answer = ""
