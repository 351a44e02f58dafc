"""How what a client records is counted, and what it pushes becomes messages: once the home has granted the entries and
the byte window has room. What is pushed, and when, an `ActorSide` says: which memory a client has, what its writers do.

    WELCOME: storage ──▶ side_of ──▶ an ActorSide     an actor loads the side of its own table's kind alone
    writer ──▶ WriterObserver ──▶ Pusher ──▶ the home

    entries ──▶ grant ──▶ window ──▶ container ──▶ frames ──▶ queue ──▶ the thread with the sockets
                  │          └ full: skipped
                  └ held back: passed steps

`LocalMemory` has the memory of a client and its writers, as the side of its table's kind makes them.

Calls of any thread come here. Waiting is left to `ClientLock`, which has the lock and the clock.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire._core import setting
from memoire.arguments import one_of
from memoire.errors import ParameterError
from memoire.limits import CONTAINER, MiB, Reservation
from memoire.replay.conversion import memory_bytes
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.replay.steps import layout
from memoire.replay.writer import Writer
from memoire.replay.writers import WriterRegistry
from memoire.replay.writing import Changes, putting
from memoire.tables import registry
from memoire.tables.registry import loaded
from memoire.wire import _bytes, messages
from memoire.wire.compression import CompressionChoice
from memoire.wire.frames import encode
from memoire.wire.parts import Payload

from .reports import MemorySums
from .session import Session
from .waiting import ClientLock

HELD_BACK = "held back"
"""Why nothing was pushed while learners are too far behind."""
WINDOW_FULL = "window full"

WhenFull = Literal["skip", "block"]


def check_on_full(on_full: object) -> None:
    """Raise ParameterError for anything but the two words."""
    if on_full not in (choices := ("skip", "block")):
        raise ParameterError("on_full", on_full, one_of(on_full, choices))


class Pusher:
    """Counts what is recorded and queues what is pushed. Thread-safe.

    Args:
        numbers: Sequence numbers of all messages of this client.
        on_full: What a writer does when the window is full.
        block_timeout: Seconds that it then waits, if it is to wait.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        session: Session,
        waiting: ClientLock,
        numbers: Iterator[int],
        *,
        on_full: WhenFull,
        block_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.queue: deque[list[Any]] = deque()
        """Frames of messages for the thread to send; it takes them from the left."""
        self.on_full, self.block_timeout = on_full, block_timeout
        self.waited = 0.0
        """Seconds that calls waited for room in the window. Under the lock, as all below."""
        self.reason = ""
        """Why the newest push did not happen; "" when it did."""
        self.not_pushed: dict[str, int] = {}
        """Pushes that did not happen, by reason."""
        self.session, self.waiting, self._numbers, self.clock = session, waiting, numbers, clock
        self.last_size = 0
        """Bytes of the newest message's payload: a guess for the next one."""
        self._choice = CompressionChoice()
        self._shut_since: float | None = None  # since when messages are skipped because the window is full

    @property
    def patience(self) -> float:
        """Seconds that a writer waits."""
        return self.block_timeout if self.on_full == "block" else 0.0

    # Recorded entries

    def count(self, entries: int) -> None:
        """Count entries that were recorded."""
        with self.waiting.changed:
            _core.at_once(self.session.recording(entries))

    def count_episode(
        self, length: int, returned: Any, kind: int = messages.TRAIN, with_it: Callable[[], Changes] = list
    ) -> None:
        """Count a closed episode, or tell of a test; `returned` is the sum of its rewards, [*R] or a number."""
        with self.waiting.changed:
            _core.at_once([*self._closing_episode(length, returned, kind), *with_it()])

    def _closing_episode(self, length: int, returned: Any, kind: int = messages.TRAIN) -> Changes:
        return self.session.closing_episode(length, float(np.sum(returned)), self.clock(), kind)

    def counting(self, entries: int, returned: Any) -> Changes:
        """The changes that count an episode that was recorded elsewhere; `returned` is None of one that goes on."""
        changes = self.session.recording(entries)
        return changes if returned is None else changes + self._closing_episode(entries, returned)

    def record(self, entries: int, with_it: Changes) -> None:
        """Count entries that a writer recorded: it is decided later whether they are inserts."""
        with self.waiting.changed:
            session = self.session
            _core.at_once([*session.recording(entries), *session.inserts.recording(entries), *with_it])

    def admit(self, entries: Callable[[], int], with_it: Callable[[int], Changes], patience: float) -> bool:
        """Make inserts of recorded entries, as soon as they may be; whether of all in time.

        Args:
            entries: How many there are yet.
            with_it: The changes that go with so many inserts.
        """
        inserts, schedule = self.session.inserts, self.session.schedule

        def are_admitted() -> bool:
            if admitted := inserts.admitted(entries()):
                changes = inserts.settling(admitted, admitted) + setting(schedule, is_dirty=True)
                _core.at_once(changes + with_it(admitted))
            return entries() == 0 or self.session.is_finished

        with self.waiting.changed:
            self._hold_until(are_admitted, self.waiting.now() + patience)
            return entries() == 0

    def is_granted(self, deadline: float) -> bool:
        """Wait until at least one entry may be inserted; False at the deadline, or if the run is over."""
        session = self.session
        with self.waiting.changed:
            self._hold_until(lambda: session.inserts.left > 0 or session.is_finished, deadline)
            return session.inserts.left > 0

    def _hold_until(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Wait for the home to grant more. Under the lock."""
        if is_done():
            return
        inserts, waiting, began = self.session.inserts, self.waiting, self.waiting.now()
        try:
            _core.while_more(inserts, "waiting", waiting.until, is_done, deadline, waiting.check_shipping)
        finally:
            inserts.waited += waiting.now() - began

    # Messages

    def skip(self, reason: str, with_it: Callable[[], Changes] = list) -> bool:
        """Count that nothing was pushed, with the changes that go with it, under the lock; returns False."""
        with self.waiting.changed:
            inserts, counts = self.session.inserts, self.session.counts
            why = inserts.reason or "learners are behind, and the server has not granted more yet"
            changes = setting(self, reason=f"{reason}: {why}" if reason == HELD_BACK else reason)
            changes += putting(self.not_pushed.get(reason, 0) + 1, reason, self.not_pushed)
            changes += setting(counts, skipped=counts.skipped + (reason == WINDOW_FULL))
            changes += setting(self.session.schedule, is_dirty=True) + with_it()
            if reason == HELD_BACK and not inserts.is_short:
                changes += [*setting(inserts, is_short=True), (self.waiting.wake, ())]
            _core.at_once(changes)
        return False

    def codec(self) -> str:
        """How frames are packed now, by what the parameters say and the home can undo."""
        wanted = self.session.parameters.compression
        if wanted == "auto":
            wanted = "lz4" if self._choice.packs else "none"
        return wanted if wanted in (*self.session.told.codecs, "none") else "none"

    def spend(self, began: float, waited: float = 0.0) -> None:
        """Packing, and waiting, has taken the time since then."""
        with self.waiting.changed:
            self._choice.spend(self.waiting.now() - began, waited)

    def has_room(self, size: int, deadline: float) -> bool:
        """Wait until a message of so many payload bytes fits the window; False at the deadline."""
        session, waiting = self.session, self.waiting

        def has_room() -> bool:
            return session.window.has_room(size) and not session.is_between

        with waiting.changed:
            if has_room():
                return True
            began, check = waiting.now(), waiting.check_shipping
            try:
                fits: bool = _core.while_more(session.schedule, "pressed", waiting.until, has_room, deadline, check)
                if not fits and self._shut_since is None:
                    self._shut_since = waiting.now()
                return fits
            finally:
                kept = waiting.now() - began
                self.waited += kept
                self._choice.spend(kept, kept)

    def enqueue(
        self,
        payload: Payload,
        samples: int,
        message: Callable[[int, int, int], messages.Body],
        with_it: Callable[[], Changes],
    ) -> None:
        """Queue a message that there is room for.

        Args:
            samples: Samples or entries in it.
            message: Makes its body: called with since, its number and the bytes that were pushed by then.
            with_it: The changes that go with it, under the lock.
        """
        # In the caller's thread: the one with the sockets has other things to do.
        checksum, size, session = _bytes.checksum(payload), payload.nbytes, self.session
        with self.waiting.changed:
            now, window = self.waiting.now(), session.window
            if self._shut_since is not None:
                self._choice.spend(now - self._shut_since, now - self._shut_since)
                self._shut_since = None
            self._choice.carried(samples)
            frames = encode(
                message(session.told.since, window.pushed_caches + 1, window.pushed_bytes + size),
                client=session.client,
                sequence=next(self._numbers),
                run=session.run,
                home=session.home,
                table=session.table,
                fingerprint=session.fingerprint,
                payload=payload,
                payload_checksum=checksum,
            )
            changes = window.pushing(size, now) + setting(self, last_size=size, reason="") + with_it()
            changes += [*setting(session.schedule, is_dirty=True), (self.queue.append, (frames,))]
            _core.at_once([*changes, (self.waiting.wake, ())])


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
    """One kind of table, at an actor. Thread-safe. One object for each client, made by the first WELCOME: a client's
    table never stores anything else.

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

    def push_episode(self, *episode: Any, **options: Any) -> bool:
        """Push an episode of a caller's arrays: see `EpisodesSide.push_episode`. Raises ParameterError."""
        raise self._refused("'episodes' or 'rollouts' for push_episode")

    def _refused(self, expected: str) -> ParameterError:
        told = self.session.told
        return ParameterError("storage", told.storage, f"{expected}; server {told.home_name!r} stores {self.STORED}")


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
    """

    def __init__(self, session: Session, pusher: Pusher, *, capacity: int | None, live: bool, seed: int | None) -> None:
        self.lock = threading.RLock()
        """Held while the memory is made, replaced or configured, and while it gets a writer."""
        self._session, self._capacity, self._live, self._seed = session, capacity, live, seed
        self._pusher = pusher
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
                    self._pusher.waiting.check_open()
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
