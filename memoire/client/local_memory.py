"""The memory of a client and its writers, as the kind of its table has them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from numpy.typing import NDArray

from memoire import _core
from memoire.arguments import one_of
from memoire.errors import ParameterError
from memoire.limits import CONTAINER, MiB, Reservation
from memoire.replay.conversion import memory_bytes
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.steps import layout
from memoire.replay.writer import Writer
from memoire.replay.writers import WriterRegistry
from memoire.tables import registry
from memoire.tables.registry import loaded

from .pushes import ActorSide, Pusher
from .reports import MemorySums
from .session import Session

_log = logging.getLogger(__name__)
DEFAULT_MEMORY_BYTES = 256 * MiB
DEFAULT_MEMORY_ENTRIES = (1_000, 100_000)
"""Fewest and most entries that a memory has room for if nobody says how many."""


def side_of(storage: str) -> type[ActorSide]:
    """What a kind of table is at an actor. Raises ParameterError if no actor can fill it, or it is not known here."""
    kind = registry.find(storage)
    if kind is None or not kind.actor:
        names = [each.name for each in registry.known() if each.actor]
        raise ParameterError("storage", storage, f"{one_of(storage, names)}, of which this version can fill a table")
    side: type[ActorSide] = loaded(kind.actor)
    return side


class LocalMemory:
    """The memory of a client and its writers. Thread-safe.

    Never while holding the lock of `ClientLock`: a caller that holds the memory may be waiting for that.

    Args:
        capacity: Entries that it has room for; None leaves it to the server, or to what fits.
        live: Whether entries can be drawn before their episode is closed.
        check_open: Raises once the client is closed.
    """

    def __init__(
        self,
        session: Session,
        pusher: Pusher,
        *,
        capacity: int | None,
        live: bool,
        seed: int | None,
        check_open: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()
        """Held while the memory is made, replaced or configured, and while it gets a writer."""
        self._session, self._capacity, self._live, self._seed = session, capacity, live, seed
        self._pusher, self._check_open = pusher, check_open
        self._side: ActorSide | None = None  # from the first WELCOME on
        self._memory: Memory | None = None
        self._writers: WriterRegistry | None = None

    @property
    def side(self) -> ActorSide:
        """What this client does for the kind of its table."""
        return self.choose_side(self._session.told.storage)

    def choose_side(self, storage: str) -> ActorSide:
        """The same, before the session has entered its first home. Raises ParameterError: this kind is not known."""
        if self._side is None:
            self._side = side_of(storage)(self._pusher, lambda: self.memory)
        return self._side

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
        # Whoever chose a capacity has thought of how much its entries take.
        ragged_bytes = 0 if capacity or told.max_step else usual
        return self.side.make_memory(entries, ragged_bytes=ragged_bytes, live=self._live, seed=self._seed)

    # Writers

    def writer(
        self,
        envs: Any,
        num_envs: int | None,
        autoreset: str | None,
        stamp: Callable[[Any], int],
        **options: Any,
    ) -> Writer:
        """A writer with lanes of its own; see `Client.writer`."""
        with _core.Held(self.lock):
            if self._writers is None or self._writers.memory is not self.memory:
                self._writers = WriterRegistry(self.memory)
            made, side = self._writers, self.side
            return made.make(
                *layout(envs, num_envs, autoreset), side.observer(side), stamp=stamp, **side.writer_options(options)
            )

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
            if self._writers is not None:
                try:
                    self.side.follow(self._writers, former)
                except ParameterError as error:  # no caller is there to refuse it
                    _log.warning(
                        "the server now sets %s=%s; here it must be %s", error.name, error.value, error.expected
                    )

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
