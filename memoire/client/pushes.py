"""Pusher of an actor's caches and episodes: counts recorded entries, and queues messages once the home has granted the
entries and the byte window has room. An `ActorSide` chooses the memory, and what to push when.

    WELCOME: storage ──▶ side_of ──▶ an ActorSide     an actor loads the side of its own table's kind alone
    writer ──▶ WriterObserver ──▶ Pusher ──▶ the home

    entries ──▶ grant ──▶ window ──▶ container ──▶ frames ──▶ queue ──▶ the thread with the sockets
                  │          └ full: skipped
                  └ held back: passed steps

`LocalMemory` holds the memory and the writers of a client, which the side of its table's kind makes.

All classes are thread-safe. Calls wait in `ClientLock`, which has the lock and the clock.
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
from memoire.replay.writing import Changes, put_changes
from memoire.tables import registry
from memoire.tables.registry import import_object
from memoire.wire import _bytes, messages
from memoire.wire.compression import CompressionChoice
from memoire.wire.frames import encode
from memoire.wire.parts import Payload

from .reports import MemorySums
from .session import Session
from .waiting import ClientLock

HELD_BACK = "held back"
"""Reason for a skipped push: the home server has granted no more entries, since learners are too far behind."""
WINDOW_FULL = "window full"
"""Reason for a skipped push: the byte window had no room."""

WhenFull = Literal["skip", "block"]


def check_on_full(on_full: object) -> None:
    """Raise ParameterError if `on_full` is neither "skip" nor "block"."""
    if on_full not in (choices := ("skip", "block")):
        raise ParameterError("on_full", on_full, one_of(on_full, choices))


class Pusher:
    """Counter of recorded entries and queue of messages to push. Thread-safe.

    Args:
        numbers: Sequence numbers of all messages of this client.
        on_full: What a writer does if the window is full.
        block_timeout: Seconds that a writer waits if the window is full and `on_full` is "block".
        clock: Returns seconds since 1970.
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
        """Frames of each message to send; the client's thread takes messages from the left."""
        self.on_full, self.block_timeout = on_full, block_timeout
        self.waited = 0.0
        """Seconds that calls waited for room in the window. Under the lock, as all below."""
        self.reason = ""
        """Reason why the newest push was skipped; "" if it was not."""
        self.not_pushed: dict[str, int] = {}
        """Number of skipped pushes, by reason."""
        self.session, self.waiting, self._numbers, self.clock = session, waiting, numbers, clock
        self.last_size = 0
        """Bytes of the newest message's payload, an estimate for the next one."""
        self._choice = CompressionChoice()
        self._shut_since: float | None = None  # time since which the window was full and messages were skipped

    @property
    def room_timeout(self) -> float:
        """Seconds that a writer waits for room in the window."""
        return self.block_timeout if self.on_full == "block" else 0.0

    # Recorded entries

    def count(self, entries: int) -> None:
        """Count entries that were recorded without a writer."""
        with self.waiting.condition:
            _core.at_once(self.session.recording_changes(entries))

    def count_episode(
        self, length: int, returned: Any, kind: int = messages.TRAIN, with_it: Callable[[], Changes] = list
    ) -> None:
        """Count a closed episode, or report one of a test; `returned` is the sum of its rewards, [*R] or a number."""
        with self.waiting.condition:
            _core.at_once([*self._closing_episode(length, returned, kind), *with_it()])

    def _closing_episode(self, length: int, returned: Any, kind: int = messages.TRAIN) -> Changes:
        return self.session.episode_changes(length, float(np.sum(returned)), self.clock(), kind)

    def episode_changes(self, entries: int, returned: Any) -> Changes:
        """Return the changes that count an episode of a caller's arrays; `returned` is None if the episode goes on."""
        changes = self.session.recording_changes(entries)
        return changes if returned is None else changes + self._closing_episode(entries, returned)

    def record(self, entries: int, with_it: Changes) -> None:
        """Count entries that a writer recorded, as passed steps until a grant turns these entries into inserts."""
        with self.waiting.condition:
            session = self.session
            _core.at_once([*session.recording_changes(entries), *session.inserts.recording_changes(entries), *with_it])

    def insert_when_granted(
        self, entries: Callable[[], int], with_it: Callable[[int], Changes], patience: float
    ) -> bool:
        """Make inserts of recorded entries as soon as they are granted; True if all were within `patience` seconds.

        Args:
            entries: Returns the number of entries that are left to insert.
            with_it: Returns the changes to make together with that many inserts.
        """
        inserts, schedule = self.session.inserts, self.session.schedule

        def are_admitted() -> bool:
            if admitted := inserts.insertable_count(entries()):
                changes = inserts.insert_changes(admitted, admitted) + setting(schedule, is_dirty=True)
                _core.at_once(changes + with_it(admitted))
            return entries() == 0 or self.session.is_finished

        with self.waiting.condition:
            self._hold_until(are_admitted, self.waiting.now() + patience)
            return entries() == 0

    def wait_for_grant(self, deadline: float) -> bool:
        """Wait until at least one entry may be inserted; False at the deadline, or if the run is over."""
        session = self.session
        with self.waiting.condition:
            self._hold_until(lambda: session.inserts.remaining > 0 or session.is_finished, deadline)
            return session.inserts.remaining > 0

    def _hold_until(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Wait until the home server grants more, `is_done` returns True, or the deadline. Called under the lock."""
        if is_done():
            return
        inserts, waiting, began = self.session.inserts, self.waiting, self.waiting.now()
        try:
            _core.while_more(inserts, "waiting", waiting.wait_until, is_done, deadline, waiting.check_can_push)
        finally:
            inserts.waited += waiting.now() - began

    # Messages

    def skip(self, reason: str, with_it: Callable[[], Changes] = list) -> bool:
        """Count a skipped push together with the changes that `with_it` returns; returns False."""
        with self.waiting.condition:
            inserts, counts = self.session.inserts, self.session.counts
            cause = inserts.reason or "learners are behind, and the server has not granted more entries yet"
            changes = setting(self, reason=f"{reason}: {cause}" if reason == HELD_BACK else reason)
            changes += put_changes(self.not_pushed.get(reason, 0) + 1, reason, self.not_pushed)
            changes += setting(counts, skipped=counts.skipped + (reason == WINDOW_FULL))
            changes += setting(self.session.schedule, is_dirty=True) + with_it()
            if reason == HELD_BACK and not inserts.is_short:
                changes += [*setting(inserts, is_short=True), (self.waiting.wake, ())]
            _core.at_once(changes)
        return False

    def codec(self) -> str:
        """Return the present compression: that of the parameters if the home server can decompress it."""
        wanted = self.session.parameters.compression
        if wanted == "auto":
            wanted = "lz4" if self._choice.packs else "none"
        return wanted if wanted in (*self.session.welcome.codecs, "none") else "none"

    def record_time(self, began: float, waited: float = 0.0) -> None:
        """Record the time since `began` as spent on packing or waiting, for the choice of compression."""
        with self.waiting.condition:
            self._choice.record_time(self.waiting.now() - began, waited)

    def has_room(self, size: int, deadline: float) -> bool:
        """Wait until a message of `size` payload bytes fits the window; False at the deadline."""
        session, waiting = self.session, self.waiting

        def has_room() -> bool:
            return session.window.has_room(size) and not session.is_between

        with waiting.condition:
            if has_room():
                return True
            began, check = waiting.now(), waiting.check_can_push
            try:
                fits: bool = _core.while_more(
                    session.schedule, "pressed", waiting.wait_until, has_room, deadline, check
                )
                if not fits and self._shut_since is None:
                    self._shut_since = waiting.now()
                return fits
            finally:
                elapsed = waiting.now() - began
                self.waited += elapsed
                self._choice.record_time(elapsed, elapsed)

    def enqueue(
        self,
        payload: Payload,
        samples: int,
        message: Callable[[int, int, int], messages.Body],
        with_it: Callable[[], Changes],
    ) -> None:
        """Queue a message that the window has room for.

        Args:
            samples: Number of samples or entries in the payload.
            message: Returns the body, from `since`, the message's number and the bytes pushed including this message.
            with_it: Returns the changes to make together with the push; called under the lock.
        """
        # The caller's thread computes checksums, so that the thread with the sockets spends no time on them.
        checksum, size, session = _bytes.checksum(payload), payload.nbytes, self.session
        with self.waiting.condition:
            now, window = self.waiting.now(), session.window
            if self._shut_since is not None:
                self._choice.record_time(now - self._shut_since, now - self._shut_since)
                self._shut_since = None
            self._choice.record_sent(samples)
            frames = encode(
                message(session.welcome.since, window.pushed_caches + 1, window.pushed_bytes + size),
                client=session.client,
                sequence=next(self._numbers),
                run=session.run,
                home=session.home,
                table=session.table,
                fingerprint=session.fingerprint,
                payload=payload,
                payload_checksum=checksum,
            )
            changes = window.push_changes(size, now) + setting(self, last_size=size, reason="") + with_it()
            changes += [*setting(session.schedule, is_dirty=True), (self.queue.append, (frames,))]
            _core.at_once([*changes, (self.waiting.wake, ())])


class WriterObserver(ABC):
    """Observer that counts a writer's entries and episodes, and pushes what is due: an `ExactObserver`. If an interrupt
    ends a call early, the next call does the rest.
    """

    def __init__(self, side: ActorSide) -> None:
        self._pusher = side.pusher
        self._session, self._waiting = side.pusher.session, side.pusher.waiting

    @property
    def is_behind(self) -> bool:
        """True if work for entries of an earlier call is not done yet."""
        return False

    @abstractmethod
    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Count the writer's new entries, and push what is due; may wait for room if `waits`."""

    def take_episode(self, told: deque[tuple[int, int, NDArray[np.float64]]]) -> None:
        """Count the first of these closed episodes: lane, length and return [*R]."""
        self._waiting.check_process()
        _, length, returned = told[0]
        self._pusher.count_episode(length, returned, with_it=lambda: [(told.popleft, ())])

    def pause(self, writer: _core.StepCounter) -> None:
        """Wait for a grant after `take_entries` has asked the writer to wait; only observers that ask define it."""
        raise NotImplementedError


class ActorSide(ABC):
    """Actor side of one kind of table: the client's memory, and what its writers push. Thread-safe. A client makes one
    at its first WELCOME, since its table's kind never changes.

    Args:
        pusher: Counts entries and queues messages.
        memory: Returns the client's memory, which is made at first use.
    """

    STORED: ClassVar[str]
    """Description in errors of what a server with this kind stores, and how a client pushes that."""
    observer: ClassVar[type[Any]]
    """The `WriterObserver` of the side's writers: called with this side."""
    waits_for_models: ClassVar[bool] = False
    """True if a published model may give room to record more."""
    leaves_open: ClassVar[bool] = True
    """True if episodes that are open when the client is closed are still pushed."""

    def __init__(self, pusher: Pusher, memory: Callable[[], Memory]) -> None:
        self.pusher, self.session, self.memory = pusher, pusher.session, memory

    @abstractmethod
    def make_memory(self, entries: int, *, ragged_bytes: int, live: bool, seed: int | None) -> Memory:
        """Return an empty memory.

        Args:
            entries: Entries that the memory has room for.
            ragged_bytes: Bytes that ragged columns may take; 0 sets no limit.
            live: True if entries can be drawn before their episode is closed.
        """

    def usual_bytes(self, schema: Schema, parameters: Parameters) -> int:
        """Return the usual size of a payload in bytes; 0 if that cannot be known."""
        return 0

    def writer_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of `WriterRegistry.make` from a caller's options of a writer. Raises ParameterError."""
        return dict(options)

    def apply_parameters(self, writers: WriterRegistry, former: Parameters) -> None:
        """Apply the session's parameters, which were `former` before, to the writers. Raises ParameterError if a writer
        does not fit them; the parameters hold all the same.
        """
        writers.check(self.session.parameters)

    def push_cache(self, patience: float) -> bool:
        """Push a cache drawn from the memory: see `Client.push_cache`. Raises ParameterError."""
        raise self._refused("push_cache")

    def push_episode(self, *episode: Any, **options: Any) -> bool:
        """Push an episode of a caller's arrays: see `EpisodesSide.push_episode`. Raises ParameterError."""
        raise self._refused("push_episode")

    def _refused(self, call: str) -> ParameterError:
        server = self.session.welcome.home_name
        return ParameterError.with_text(
            f"{call}() cannot be called: server {server!r} stores {self.STORED}. Nothing was pushed."
        )


_log = logging.getLogger(__name__)
DEFAULT_MEMORY_BYTES = 256 * MiB
DEFAULT_MEMORY_ENTRIES = (1_000, 100_000)
"""Least and most entries of a memory whose capacity neither the table nor the caller sets."""


def side_of(storage: str) -> type[ActorSide]:
    """Return the actor side of a kind of table. Raises ParameterError if no actor can fill it, or it is unknown."""
    kind = registry.find(storage)
    if kind is None or not kind.actor:
        names = [each.name for each in registry.known_kinds() if each.actor]
        raise ParameterError("storage", storage, f"{one_of(storage, names)}, which this version of the client can fill")
    side: type[ActorSide] = import_object(kind.actor)
    return side


class LocalMemory:
    """Memory of a client, with its writers. Thread-safe.

    Never called under the lock of `ClientLock`: a thread that holds the memory's lock may be waiting for that lock.

    Args:
        capacity: Entries that the memory has room for; None takes the table's, or what fits.
        live: True if entries can be drawn before their episode is closed.
    """

    def __init__(self, session: Session, pusher: Pusher, *, capacity: int | None, live: bool, seed: int | None) -> None:
        self.lock = threading.RLock()
        """Lock held while the memory is made, replaced or configured, and while a writer is made."""
        self._session, self._capacity, self._live, self._seed = session, capacity, live, seed
        self._pusher = pusher
        self._side: ActorSide | None = None  # None before the first WELCOME
        self._memory: Memory | None = None
        self._writers: WriterRegistry | None = None

    @property
    def actor_side(self) -> ActorSide:
        """Actor side of the client's table."""
        return self.choose_side(self._session.welcome.storage)

    def choose_side(self, storage: str) -> ActorSide:
        """Return the actor side for a storage, also before the first WELCOME. Raises ParameterError if unknown."""
        if self._side is None:
            self._side = side_of(storage)(self._pusher, lambda: self.memory)
        return self._side

    @property
    def memory(self) -> Memory:
        """Memory of the client, made at first use. Raises Closed or the error that ended the client."""
        if self._memory is None:
            with _core.Held(self.lock):
                if self._memory is None:
                    self._pusher.waiting.check_open()
                    self._memory = self._make(self._capacity)
        return self._memory

    def check_capacity(self, capacity: int | None = None) -> None:
        """Raise ParameterError if the capacity (None: the former one) differs from the table's `client_capacity`."""
        expected, capacity = self._session.welcome.max_step, capacity or self._capacity
        if expected and capacity and capacity != expected:
            raise ParameterError("capacity", capacity, f"{expected}, the client_capacity of the table, or left out")

    def replace_memory(self, capacity: int | None) -> None:
        """Replace the memory by an empty one. Writers of the former memory go on until `end_writers`."""
        with _core.Held(self.lock):
            if self._memory is not None:
                self._memory.unreserve()
            self._memory, self._capacity = self._make(capacity or self._capacity), capacity or self._capacity

    def _make(self, capacity: int | None) -> Memory:
        welcome, schema = self._session.welcome, self._session.schema
        least, most = DEFAULT_MEMORY_ENTRIES
        usual, allowed = (Reservation(CONTAINER).default("capacity", size) for size in (DEFAULT_MEMORY_BYTES, 0))
        fitting = max(least, usual // max(1, schema.entry_bytes))
        if allowed:
            fitting = max(1, min(fitting, allowed // memory_bytes(schema, 1)))
        entries = capacity or welcome.max_step or min(most, fitting)
        # A capacity that was set explicitly limits the bytes: the author knows the size of an entry.
        ragged_bytes = 0 if capacity or welcome.max_step else usual
        return self.actor_side.make_memory(entries, ragged_bytes=ragged_bytes, live=self._live, seed=self._seed)

    # Writers

    def writer(
        self,
        envs: Any,
        num_envs: int | None,
        autoreset: str | None,
        stamp: Callable[[Any], int],
        **options: Any,
    ) -> Writer:
        """Return a writer with its own lanes; see `Client.writer`."""
        with _core.Held(self.lock):
            if self._writers is None or self._writers.memory is not self.memory:
                self._writers = WriterRegistry(self.memory)
            writers, side = self._writers, self.actor_side
            return writers.make(
                *layout(envs, num_envs, autoreset), side.observer(side), stamp=stamp, **side.writer_options(options)
            )

    def end_writers(self, closed: str, deadline: float) -> Iterable[str]:
        """Store the writers' open episodes, and let further steps raise `Closed`, which names `closed`; returns a
        description of each episode that was not stored.
        """
        return () if self._writers is None else self._writers.end(closed, deadline)

    # Changes that the home server sends

    def configure(self, parameters: Parameters, version: int) -> None:
        """Apply the home server's parameters, numbered `version`, to the memory and its writers."""
        session = self._session
        if version == session.parameters_version and parameters == session.parameters:
            return  # compare name and number: another or restarted server may reuse a number
        with _core.Held(self.lock):
            former = session.parameters
            session.parameters, session.parameters_version = parameters, version
            if self._memory is not None:
                self._memory.configure(parameters)
            if self._writers is not None:
                try:
                    self.actor_side.apply_parameters(self._writers, former)
                except ParameterError as error:  # no caller could catch the error
                    _log.warning(
                        "the server now sets %s=%s; writers here need %s", error.name, error.value, error.expected
                    )

    def set_newest_versions(self, models: dict[str, int]) -> None:
        """Take the newest versions of models; entries older than `max_model_lag` allows have weight 0 from now on."""
        self._session.models = models
        if self._memory is not None:
            self._memory.saw_model(self._session.parameters.newest_model(models))

    def update_priorities(self, numbers: NDArray[Any], errors: NDArray[Any], age: float) -> tuple[int, int, int]:
        """Set priorities from learners' TD errors. Returns the number of priorities that were set, the number of
        entries that are gone, and how many of those were surely gone before the first error was reported.

        Args:
            numbers: Numbers of the entries, [N].
            errors: Temporal difference errors, [N].
            age: Seconds since the first of the errors was reported.
        """
        if self._memory is None:
            return 0, len(numbers), len(numbers)
        applied, stale = self._memory.update_priorities(numbers, errors)
        return applied, stale, self._memory.count_replaced(numbers, age) if stale else 0

    def sums(self) -> MemorySums:
        """Return total weight, number and smallest of the positive weights, and number of entries, at one moment."""
        if self._memory is None:
            return MemorySums()
        entries = self._memory.num_entries
        weight, positives, minimum = self._memory.sums()
        return MemorySums(weight, positives, minimum, entries) if positives else MemorySums(entries=entries)
