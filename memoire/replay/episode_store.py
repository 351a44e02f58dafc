"""What a writer needs of others: a memory that takes episodes, and an observer that counts them."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .parameters import Parameters
from .schema import Schema

AfterStep = Literal["", "wait", "discard"]
"""What a writer does after a step: it goes on, waits for room, or first drops the step, for which there was none."""


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

    def open(self, lane: int = 0) -> None:
        """Begin an episode, discarding one that was not closed."""

    def checked_version(self, model_version: Any) -> int:
        """The version of the model that made a new entry. Raises ParameterError."""

    def add(self, lane: int, values: tuple[Any, ...], init_w: float = 1.0, model_version: int = 0) -> Any:
        """Add one entry."""

    def add_many(
        self, lanes: NDArray[np.int64], values: tuple[Any, ...], init_w: Any = 1.0, model_version: int = 0
    ) -> Any:
        """Add one entry to each of N lanes: `lanes` [N], `values` [N, *F] for each column, `init_w` a number or [N]."""

    def close(
        self,
        lane: int = 0,
        *,
        final_state: tuple[Any, ...] | None = None,
        terminated: bool | None = None,
        bootstrap_value: Any = None,
    ) -> Any:
        """End an episode, in `final_state` if that is known."""

    def cut(self, lane: int, *, final_state: tuple[Any, ...], bootstrap_value: Any = None) -> Any:
        """End it in this state although it goes on: the entries that follow are of the next one."""


class PausedWriter(Protocol):
    """What an observer may do to a writer between two steps."""

    def cut(self) -> int:
        """Ship what is open."""


class Observer(Protocol):
    """Who counts what a writer records: called in the writer's thread, after the memory has it."""

    def on_entries(self, count: int) -> AfterStep | None:
        """`count` entries were added. Returns what to do; after "wait" and "discard", `pause` is called at the end of
        the step.
        """

    def pause(self, writer: PausedWriter) -> None:
        """Wait inside of a step until more may be recorded, after `writer.cut`."""

    def on_episode(self, lane: int, length: int, return_: NDArray[np.float64]) -> None:
        """An episode ended after `length` entries; its undiscounted return, in the shape of one reward."""
