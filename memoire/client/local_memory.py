"""Which memory a client has: recent episodes to draw caches from, or only open ones if the server stores episodes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from memoire import _core
from memoire.arguments import whole
from memoire.errors import ParameterError
from memoire.limits import CONTAINER, MiB, Reservation
from memoire.replay.autoreset import layout
from memoire.replay.engine_setup import memory_bytes
from memoire.replay.episode_store import Changes, ExactObserver
from memoire.replay.memory import MAX_ROWS, Memory
from memoire.replay.parameters import Parameters
from memoire.replay.writer import Writer
from memoire.replay.writers import WriterRegistry
from memoire.wire.layout import episode_bytes, most_fitting
from memoire.wire.parts import Payload

from .episodes import OpenEpisodes, Shipment
from .reports import MemorySums
from .session import Session

_log = logging.getLogger(__name__)
DEFAULT_MEMORY_BYTES = 256 * MiB
DEFAULT_MEMORY_ENTRIES = (1_000, 100_000)
"""Fewest and most entries that a memory has room for if nobody says how many."""


class LocalMemory:
    """The memory of a client and its writers. Thread-safe.

    Never while holding the lock of `ClientLock`: a caller that holds the memory may be waiting for that.

    Args:
        capacity: Entries that it has room for; None leaves it to the server, or to what fits.
        live: Whether entries can be drawn before their episode is closed.
        pack, ship: Of episodes that leave, see `OpenEpisodes`.
        check_open: Raises once the client is closed.
    """

    def __init__(
        self,
        session: Session,
        *,
        capacity: int | None,
        live: bool,
        seed: int | None,
        pack: Callable[..., Payload],
        ship: Callable[[Shipment, Changes], None],
        check_open: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()
        """Held while the memory is made, replaced or configured, and while it gets a writer."""
        self._session, self._capacity, self._live, self._seed = session, capacity, live, seed
        self._pack, self._ship, self._check_open = pack, ship, check_open
        self._memory: Memory | None = None
        self._writers: WriterRegistry | None = None
        self._fitting = MAX_ROWS  # entries of an episode that fit a message; of caches, no episode is sent

    @property
    def memory(self) -> Memory:
        """Made when it is first asked for."""
        if self._memory is None:
            with _core.Held(self.lock):
                if self._memory is None:
                    self._check_open()
                    self._memory = self._make(self._capacity)
        return self._memory

    def check_told(self, capacity: int | None = None) -> None:
        """Refuse another capacity, this one or that of before, than the table says. Raises ParameterError."""
        said, capacity = self._session.told.max_step, capacity or self._capacity
        if said and capacity and capacity != said:
            raise ParameterError("capacity", capacity, f"{said}, the client_capacity of the table, or left out")

    def begin_again(self, capacity: int | None) -> None:
        """Replace it by an empty one. Its writers go on until `end_writers`."""
        with _core.Held(self.lock):
            if self._memory is not None:
                self._memory.unreserve()
            self._memory, self._capacity = self._make(capacity or self._capacity), capacity or self._capacity

    def _make(self, capacity: int | None) -> Memory:
        told, schema = self._session.told, self._session.schema
        least, most = DEFAULT_MEMORY_ENTRIES
        usual, allowed = (Reservation(CONTAINER).default("capacity", size) for size in (DEFAULT_MEMORY_BYTES, 0))
        fitting = max(least, usual // max(1, schema.entry_bytes))
        if allowed:
            fitting = max(1, min(fitting, allowed // memory_bytes(schema, 1)))
        entries = capacity or told.max_step or min(most, fitting)
        if told.storage == "caches":
            # Whoever chose a capacity has thought of how much its entries take.
            return self._make_recent(entries, 0 if capacity or told.max_step else usual)
        return self._make_open(entries)

    def _make_recent(self, entries: int, ragged_bytes: int) -> Memory:
        schema, parameters = self._session.schema, self._session.parameters
        memory = Memory(schema, entries, parameters, live=self._live, seed=self._seed)
        memory.limit_ragged(ragged_bytes if schema.ragged else 0)
        memory.saw_model(parameters.newest_model(self._session.models))
        return memory

    def _make_open(self, entries: int) -> OpenEpisodes:
        # A writer cuts an endless episode when it fills half of this: what it cuts must fit a message and the server.
        schema, most_bytes = self._session.schema, self._session.most_bytes
        ragged = Reservation(CONTAINER).default("capacity", most_bytes // 2) if schema.ragged else 0
        self._fitting = max(1, most_fitting(partial(episode_bytes, schema), most_bytes - ragged))
        largest = min(self._session.told.limits.get("episode_entries", entries), self._fitting)
        room = entries if self._session.told.storage == "rollouts" else min(entries, 2 * largest)
        episodes = OpenEpisodes(schema, room, self._session.parameters, pack=self._pack, ship=self._ship)
        episodes.limit_ragged(ragged)
        return episodes

    # Writers

    def writer(
        self,
        envs: Any,
        num_envs: int | None,
        autoreset: str | None,
        observer: ExactObserver,
        stamp: Callable[[Any], int],
        **options: Any,
    ) -> Writer:
        """A writer with lanes of its own; see `Client.writer`."""
        with _core.Held(self.lock):
            if self._writers is None or self._writers.memory is not self.memory:
                self._writers = WriterRegistry(self.memory)
            longest = options.get("longest")
            if longest is not None and whole("longest", longest, 1) > self._fitting:
                expected = f"at most {self._fitting}: more make a message above limits.message_bytes"
                raise ParameterError("longest", longest, f"{expected} ({self._session.most_bytes})")
            if self._session.told.storage == "rollouts":
                length = self._session.parameters.rollout_length
                if longest is not None and length and longest != length:
                    expected = f"{length}, the length of the table's rollouts, or left out"
                    raise ParameterError("longest", longest, expected)
                options |= {"cuts_at_once": True, "longest": self._longest(longest)}
            return self._writers.make(*layout(envs, num_envs, autoreset), observer, stamp=stamp, **options)

    def _longest(self, given: int | None = None) -> int:
        """Entries of a rollout: as its writer's maker says, or the table; no more than fit there and into a message."""
        most = self._session.told.limits.get("episode_entries", self.memory.capacity)
        return min(given or self._session.parameters.rollout_length or most, most, self._fitting)

    def end_writers(self, closed: str, deadline: float) -> Iterable[str]:
        """Store what is open in writers, and have them refuse further steps, because `closed` is closed; returns what
        was not stored.
        """
        return () if self._writers is None else self._writers.end(closed, deadline)

    # What the home says of it

    def configure(self, parameters: Parameters, version: int) -> None:
        """Parameters that hold from now on."""
        session = self._session
        if version == session.parameters_version and parameters == session.parameters:
            return  # another home, or another life of it, may call other parameters by the same number
        with _core.Held(self.lock):
            former = session.parameters
            session.parameters, session.parameters_version = parameters, version
            if self._memory is not None:
                self._memory.configure(parameters)
            if self._writers is not None and session.told.storage != "rollouts":
                try:
                    self._writers.check(parameters)
                except ParameterError as error:  # no caller is there to refuse it
                    _log.warning(
                        "the server now sets %s=%s; here it must be %s", error.name, error.value, error.expected
                    )
            if self._writers is not None and former.rollout_length != parameters.rollout_length:
                self._writers.shorten(self._longest())

    def saw_models(self, models: dict[str, int]) -> None:
        """The newest versions: what is older than `max_model_lag` allows weighs nothing from now on."""
        self._session.models = models
        if self._memory is not None:
            self._memory.saw_model(self._session.parameters.newest_model(models))

    def update_priorities(self, numbers: NDArray[Any], errors: NDArray[Any], age: float) -> tuple[int, int, int]:
        """Learners have said this of its samples; returns how many priorities were set, how many entries are gone, and
        how many of these had surely gone before any of it was said.

        Args:
            numbers: Of the entries, [N].
            errors: Temporal difference errors, [N].
            age: Seconds since the first of them was said.
        """
        if self._memory is None:
            return 0, len(numbers), len(numbers)
        applied, stale = self._memory.update_priorities(numbers, errors)
        return applied, stale, self._memory.count_replaced(numbers, age) if stale else 0

    def sums(self) -> MemorySums:
        """Total weight, number of positive weights and the smallest of them, from one moment."""
        if self._memory is None:
            return MemorySums()
        entries = self._memory.num_entries
        weight, positives, minimum = self._memory.sums()
        return MemorySums(weight, positives, minimum, entries) if positives else MemorySums(entries=entries)
