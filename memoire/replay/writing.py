"""What a writer shares with memories and observers: changes that are made as one, and where it stands in a saved file.

An interrupt comes between two opcodes of Python. So that a step happens or does not, a memory and a writer change by
lists of calls of C functions, which `_core.at_once` makes as one call.

Entries of open episodes are in the memory, and saved with it. A writer knows besides in which observation each one was
left, its return so far, which members are being reset, and what tells of a reset that was forgotten. With that a writer
of another process goes on in these episodes: `Buffer.writer(resume=True)`.
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
"""What a writer does after a step: it goes on, waits for room, or first drops the step, for which there was none."""


Changes = list[tuple[Callable[..., object], tuple[Any, ...]]]
"""Functions of C, and the arguments of each: what `_core.at_once` takes."""


def adding(owner: object, **sums: int) -> Changes:
    """The changes that add to an object's attributes."""
    return _core.setting(owner, **{name: getattr(owner, name) + count for name, count in sums.items()})


def putting(value: Any, place: Any, *arrays: Any) -> Changes:
    """The changes that put a value at the same place of several arrays, or dicts."""
    return [(setitem, (array, place, value)) for array in arrays]


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
        """Whether it still has work to do for entries that it took."""

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


_Whole: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Count: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 62)]


class WriterState(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer of N members knows, as JSON carries it; R the shape of the reward."""

    first_lane: _Whole
    num_envs: _Count | None
    """None: a single environment."""
    autoreset: str
    longest: _Count
    is_shared: bool
    """Whether `longest` is a share of the capacity, and not given."""
    clock: _Whole
    """Steps recorded."""
    began: list[_Whole]
    """[N] clock when the episodes began."""
    opened: list[_Whole]
    """[N] clock when the memory's episodes began: later where a part was cut off."""
    returns: list[Any]
    """[N, *R]"""
    pending: list[bool] | None
    """[N] whose next step is their reset."""
    left: list[list[str] | None]
    """[N] observations in which the last steps ended: the bytes of their leaves. None: unknown."""
    is_apart: bool
    """Whether members step apart."""
    is_owned: bool
    """Whether what the last step returned is an array of its own, which a reset does not write over."""
    env_id: int | None
    starts: dict[str, Any] | None
    """Of `ResetCheck`."""

    @property
    def lanes(self) -> int:
        """N."""
        return len(self.began)

    @property
    def lengths(self) -> list[int]:
        """[N] entries of the memory's open episodes."""
        return [self.clock - opened for opened in self.opened]

    def __str__(self) -> str:
        return "a single environment" if self.num_envs is None else f"num_envs={self.num_envs} in mode {self.autoreset}"

    def observations(self, schema: Schema, root: str) -> list[Any]:
        """[N] the observations of `left`, nested as the schema is."""
        return [None if each is None else _unpacked(schema, root, each) for each in self.left]

    def check(self, schema: Schema, root: str, length_of: Callable[[int], int]) -> None:
        """Compare all with each other, with the schema, and with the lengths of the memory's open episodes by lane.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it cannot be so.
        """
        count = self.num_envs or 1
        sizes = {len(self.began), len(self.opened), len(self.left), len(self.pending or self.began)}
        if sizes != {count} or np.shape(self.returns) != (count, *schema.reward_shape):
            raise ValueError("other members than there are")
        np.array(self.returns, np.float64), self.observations(schema, root)
        if any(not began <= opened <= self.clock for began, opened in zip(self.began, self.opened, strict=True)):
            raise ValueError("episodes that begin later than now")
        if self.lengths != [length_of(self.first_lane + member) for member in range(count)]:
            raise ValueError("other episodes than the open ones")


def packed(schema: Schema, root: str, observation: Any) -> list[str]:
    """The leaves of an observation, as `WriterState.left` has them."""
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
