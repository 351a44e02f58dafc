"""Types that writers share with memories and observers: atomic changes, observers, and the saved state of a writer.

An interrupt comes between two opcodes of Python. A memory and a writer change by lists of calls of C functions, which
`_core.at_once` makes as one call. A step takes effect as a whole or not at all.

Entries of open episodes are saved with the memory. The state of a writer adds each episode's last observation, its
return so far, the members that are being reset, and the state of `ResetCheck`. A writer of another process continues
these episodes from that state: `Buffer.writer(resume=True)`.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable
from math import prod
from operator import setitem
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from memoire import _core

from .schema import Schema

AfterStep = Literal["", "wait", "discard"]
"""Action of a writer after a step: "" continues, "wait" waits for room, "discard" first drops the step's entries."""


Changes = list[tuple[Callable[..., object], tuple[Any, ...]]]
"""Functions of C with their arguments, for `_core.at_once`."""


def adding_changes(owner: object, **sums: int) -> Changes:
    """Return the changes that add to an object's attributes."""
    return _core.setting(owner, **{name: getattr(owner, name) + count for name, count in sums.items()})


def put_changes(value: Any, place: Any, *arrays: Any) -> Changes:
    """Return the changes that put a value at the same index of several arrays or dicts."""
    return [(setitem, (array, place, value)) for array in arrays]


class EntryObserver(Protocol):
    """Protocol of counters of recorded entries: called once in the writer's thread, after the memory stores them."""

    def on_entries(self, count: int) -> AfterStep | None:
        """Count added entries, and return the writer's next action; after "wait" and "discard", the writer calls
        `pause` at the end of the step.
        """

    def pause(self) -> None:
        """Wait inside of a step until more may be recorded; open episodes have been cut before."""

    def on_episode(self, lane: int, length: int, return_: NDArray[np.float64]) -> None:
        """Count an episode of `length` entries; `return_` is its undiscounted return, in the shape of one reward."""


class ExactObserver(Protocol):
    """Protocol of observers that take entries and episodes from the writer in the same change that counts them: exactly
    once, also after an interrupt.
    """

    @property
    def is_behind(self) -> bool:
        """True if work is left for entries that were taken."""

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Take the writer's `_untold` entries, and set its `_answer`; `waits` is True if the call may block."""

    def take_episode(self, episodes: deque[tuple[int, int, NDArray[np.float64]]]) -> None:
        """Take the first of these episodes: lane, length and return [*R]."""

    def pause(self, writer: _core.StepCounter) -> None:
        """Wait as `Observer.pause` does, and clear the writer's `_answer`."""


class OnceObserver:
    """Adapter that calls an `Observer` exactly once for each count of entries and each episode."""

    def __init__(self, observer: EntryObserver) -> None:
        self._observer = observer

    is_behind = False
    """Always False: no work is left after `take_entries`."""

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Pass the writer's untold entries to `on_entries`."""
        writer._tell(self._observer.on_entries)

    def take_episode(self, episodes: deque[tuple[int, int, NDArray[np.float64]]]) -> None:
        """Pass the first episode, with its return [*R], to `on_episode`."""
        _core.at_once([(episodes.popleft, ()), (self._observer.on_episode, episodes[0])])

    def pause(self, writer: _core.StepCounter) -> None:
        """Call `pause` of the observer, and clear the writer's `_answer`."""
        self._observer.pause()
        writer._answer = ""


_Whole: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Count: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 62)]


class WriterState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a writer of N members, as JSON carries it; R is the shape of the reward."""

    first_lane: _Whole
    num_envs: _Count | None
    """Members of the vector environment; None for a single environment."""
    autoreset: str
    longest: _Count
    is_shared: bool
    """True if `longest` is a share of the capacity rather than set by the caller."""
    clock: _Whole
    """Number of steps recorded so far."""
    began: list[_Whole]
    """[N] clock when the episodes began."""
    opened: list[_Whole]
    """[N] clock when the memory's episodes began: later where a part was cut off."""
    returns: list[Any]
    """[N, *R] undiscounted returns of the open episodes so far."""
    pending: list[bool] | None
    """[N] True for members whose next step is their reset."""
    left: list[list[str] | None]
    """[N] observations after the last steps, as the bytes of their leaves; None if unknown."""
    is_apart: bool
    """True if some steps are made by a part of the members."""
    is_owned: bool
    """True if the environment returns a new array at each step, which a reset does not overwrite."""
    env_id: int | None
    starts: dict[str, Any] | None
    """State of the writer's `ResetCheck`."""

    @property
    def lanes(self) -> int:
        """Number of members, N."""
        return len(self.began)

    @property
    def lengths(self) -> list[int]:
        """[N] entries of the memory's open episodes."""
        return [self.clock - opened for opened in self.opened]

    def __str__(self) -> str:
        return "a single environment" if self.num_envs is None else f"num_envs={self.num_envs} in mode {self.autoreset}"

    def observations(self, schema: Schema, root: str) -> list[Any]:
        """Return the observations of `left` [N], nested as the schema is."""
        return [None if each is None else _unpacked(schema, root, each) for each in self.left]

    def check(self, schema: Schema, root: str, length_of: Callable[[int], int]) -> None:
        """Check the fields against each other, the schema, and the lengths of the memory's open episodes by lane.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the state is invalid.
        """
        count = self.num_envs or 1
        sizes = {len(self.began), len(self.opened), len(self.left), len(self.pending or self.began)}
        if sizes != {count} or np.shape(self.returns) != (count, *schema.reward_shape):
            raise ValueError("fields for another number of members")
        np.array(self.returns, np.float64), self.observations(schema, root)
        if any(not began <= opened <= self.clock for began, opened in zip(self.began, self.opened, strict=True)):
            raise ValueError("episodes that begin after the current step")
        if self.lengths != [length_of(self.first_lane + member) for member in range(count)]:
            raise ValueError("lengths of episodes that differ from the open ones")


def packed(schema: Schema, root: str, observation: Any) -> list[str]:
    """Return the leaves of an observation as base64 text, for `WriterState.left`."""
    leaves = schema.flatten(root, observation)
    return [base64.b64encode(np.ascontiguousarray(leaf).tobytes()).decode() for leaf in leaves]


def _unpacked(schema: Schema, root: str, parts: list[str]) -> Any:
    leaves = {}
    for name, part in zip(schema.leaves(root), parts, strict=True):
        column = schema[name]
        flat = np.frombuffer(base64.b64decode(part, validate=True), column.dtype)
        rows = len(flat) // max(1, prod(column.element)) if column.is_ragged else 0
        leaves[name] = flat.reshape((rows, *column.element) if column.is_ragged else column.shape).copy()
    return schema.nest(root, leaves)
