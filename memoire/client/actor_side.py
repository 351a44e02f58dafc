"""What an actor does for the kind of table that it fills: which memory it has, what its writers do, what it pushes.

    WELCOME: storage ──▶ local_memory.side_of ──▶ an ActorSide     an actor loads the side of its own table's kind alone
    writer ──▶ WriterObserver ──▶ Pusher ──▶ the home

One object for each client, made by the first WELCOME: a client's table never stores anything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import ParameterError
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.replay.writers import WriterRegistry

from .pushes import Pusher


class WriterObserver(ABC):
    """Takes a writer's entries and episodes, counts them, and pushes what is due: an `ExactObserver`. What an interrupt
    leaves to do is done at the next call.
    """

    def __init__(self, side: ActorSide) -> None:
        self._pusher = side.pusher
        self._session, self._waiting = side.pusher.session, side.pusher.waiting

    @property
    def is_behind(self) -> bool:
        """Whether something of entries that it took is not done yet."""
        return False

    @abstractmethod
    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Take what was recorded."""

    def take_episode(self, told: deque[tuple[int, int, NDArray[np.float64]]]) -> None:
        """Count the first of these episodes, which were closed: lane, length and return [*R]."""
        self._waiting.check_process()
        _, length, returned = told[0]
        self._pusher.count_episode(length, returned, with_it=lambda: [(told.popleft, ())])

    def pause(self, writer: _core.StepCounter) -> None:
        """Wait for room, where `take_entries` has a writer wait; here it never has."""
        raise NotImplementedError


class ActorSide(ABC):
    """One kind of table, at an actor. Thread-safe.

    Args:
        pusher: Counts and queues.
        memory: Gives the client's memory, which is made when it is first asked for.
    """

    STORED: ClassVar[str]
    """What errors say that such a server stores, and how that is pushed."""
    observer: ClassVar[type[Any]]
    """The `WriterObserver` of its writers: called with this side."""
    waits_for_models: ClassVar[bool] = False
    """Whether a model that is published may give room to record more."""
    leaves_open: ClassVar[bool] = True
    """Whether episodes that are open when the client is closed still leave."""

    def __init__(self, pusher: Pusher, memory: Callable[[], Memory]) -> None:
        self.pusher, self.session, self.memory = pusher, pusher.session, memory

    @abstractmethod
    def make_memory(self, entries: int, *, ragged_bytes: int, live: bool, seed: int | None) -> Memory:
        """An empty memory.

        Args:
            entries: That it has room for.
            ragged_bytes: That ragged columns may take; 0 sets no limit.
            live: Whether entries can be drawn before their episode is closed.
        """

    def usual_bytes(self, schema: Schema, parameters: Parameters) -> int:
        """Size of the payloads that are usually pushed; 0 where that cannot be known."""
        return 0

    def writer_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `WriterRegistry.make` for a writer that was asked for with these. Raises ParameterError."""
        return dict(options)

    def follow(self, writers: WriterRegistry, former: Parameters) -> None:
        """Have writers follow the session's parameters, which were `former`. Raises ParameterError where they do not
        fit; they hold all the same.
        """
        writers.check(self.session.parameters)

    def push_cache(self, patience: float) -> bool:
        """Push what is drawn from the memory: see `Client.push_cache`. Raises ParameterError."""
        raise self._refused("'caches' for push_cache")

    def push_episode(
        self,
        columns: Mapping[str, Any],
        entries: Mapping[str, Any],
        ending: Mapping[str, Any],
        *,
        steps: int | None,
        is_cut: bool,
        patience: float,
    ) -> bool:
        """Push an episode of a caller's arrays: see `Client.push_episode`. Raises ParameterError.

        Args:
            entries: init_w and model_version.
            ending: The arguments of `Memory.close`.
        """
        raise self._refused("'episodes' or 'rollouts' for push_episode")

    def _refused(self, expected: str) -> ParameterError:
        told = self.session.told
        return ParameterError("storage", told.storage, f"{expected}; server {told.home_name!r} stores {self.STORED}")
