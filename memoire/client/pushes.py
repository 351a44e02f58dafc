"""How caches and episodes become messages, once the home has granted their entries and the byte window has room.

    entries ──▶ grant ──▶ window ──▶ container ──▶ frames ──▶ queue ──▶ the thread with the sockets
                  │          └ full: skipped
                  └ held back: passed steps

Calls of any thread come here. Waiting is left to `ClientLock`, which has the lock and the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire._core import setting
from memoire.errors import EmptyMemory, ParameterError
from memoire.replay.episode_store import AfterStep, Changes, putting
from memoire.replay.memory import Memory
from memoire.suggestions import one_of
from memoire.wire import _bytes, messages, pack
from memoire.wire.compression_choice import CompressionChoice
from memoire.wire.frames import encode
from memoire.wire.parts import Payload

from .episodes import Shipment
from .io_client_lock import ClientLock
from .local_memory import LocalMemory
from .session import Session

HELD_BACK = "held back"
"""Why nothing was pushed while learners are too far behind."""
WINDOW_FULL = "window full"
NOTHING_TO_DRAW = "nothing to draw"

WhenFull = Literal["skip", "block"]


def check_when_full(when_full: object) -> None:
    """Raise ParameterError for anything but the two words."""
    if when_full not in (choices := ("skip", "block")):
        raise ParameterError("when_full", when_full, one_of(when_full, choices))


class Pusher:
    """Counts what is recorded and queues what is pushed. Thread-safe.

    Args:
        numbers: Sequence numbers of all messages of this client.
        when_full: What a writer does when the window is full.
        block_timeout: Seconds that it then waits, if it is to wait.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        session: Session,
        waiting: ClientLock,
        numbers: Iterator[int],
        *,
        when_full: WhenFull,
        block_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.queue: deque[list[Any]] = deque()
        """Frames of messages for the thread to send; it takes them from the left."""
        self.when_full, self.block_timeout = when_full, block_timeout
        self.waited = 0.0
        """Seconds that calls waited for room in the window. Under the lock, as all below."""
        self.reason = ""
        """Why the newest push did not happen; "" when it did."""
        self.not_pushed: dict[str, int] = {}
        """Pushes that did not happen, by reason."""
        self._session, self._waiting, self._numbers, self._clock = session, waiting, numbers, clock
        self._last_size = 0  # of the newest message, a guess for the next one
        self._choice = CompressionChoice()
        self._shut_since: float | None = None  # since when messages are skipped because the window is full

    @property
    def patience(self) -> float:
        """Seconds that a writer waits."""
        return self.block_timeout if self.when_full == "block" else 0.0

    # Recorded entries

    def count(self, entries: int) -> None:
        """Count entries that were recorded."""
        with self._waiting.changed:
            _core.at_once(self._session.recording(entries))

    def count_episode(
        self, length: int, returned: Any, kind: int = messages.TRAIN, with_it: Callable[[], Changes] = list
    ) -> None:
        """Count a closed episode, or tell of a test; `returned` is the sum of its rewards, [*R] or a number."""
        with self._waiting.changed:
            _core.at_once([*self._closing_episode(length, returned, kind), *with_it()])

    def _closing_episode(self, length: int, returned: Any, kind: int = messages.TRAIN) -> Changes:
        return self._session.closing_episode(length, float(np.sum(returned)), self._clock(), kind)

    def counting(self, entries: int, returned: Any) -> Changes:
        """The changes that count an episode that was recorded elsewhere; `returned` is None of one that goes on."""
        changes = self._session.recording(entries)
        return changes if returned is None else changes + self._closing_episode(entries, returned)

    def record(self, entries: int, with_it: Changes) -> None:
        """Count entries that a writer recorded: it is decided later whether they are inserts."""
        with self._waiting.changed:
            session = self._session
            _core.at_once([*session.recording(entries), *session.inserts.recording(entries), *with_it])

    def record_in_order(self, entries: int, with_it: Callable[[AfterStep], Changes]) -> None:
        """Count recorded entries of rollouts: inserts if there was room for the first of them, else passed steps.

        Args:
            with_it: The changes that go with it, for what the writer is to do.
        """
        inserts, counts, session = self._session.inserts, self._session.counts, self._session
        with self._waiting.changed:
            has_room, is_enough = inserts.left > 0, inserts.left > entries or session.is_finished
            changes = session.recording(entries) + setting(counts, passed=counts.passed + entries * (not has_room))
            _core.at_once(changes + with_it("discard" if not has_room else "" if is_enough else "wait"))

    def admit(self, entries: Callable[[], int], with_it: Callable[[int], Changes], patience: float) -> bool:
        """Make inserts of recorded entries, as soon as they may be; whether of all in time.

        Args:
            entries: How many there are yet.
            with_it: The changes that go with so many inserts.
        """
        inserts, schedule = self._session.inserts, self._session.schedule

        def are_admitted() -> bool:
            if admitted := inserts.admitted(entries()):
                changes = inserts.settling(admitted, admitted) + setting(schedule, is_dirty=True)
                _core.at_once(changes + with_it(admitted))
            return entries() == 0 or self._session.is_finished

        with self._waiting.changed:
            self._hold_until(are_admitted, self._waiting.now() + patience)
            return entries() == 0

    def await_room(self, with_it: Changes) -> None:
        """Wait until another entry may be inserted: `block_timeout` seconds at most, so that a call ends. Then change
        `with_it`.
        """
        self._waiting.wake()
        if not self._is_granted(self._waiting.now() + self.block_timeout) and not self._session.is_finished:
            self.skip(HELD_BACK, lambda: with_it)
        else:
            _core.at_once(with_it)

    def _is_granted(self, deadline: float) -> bool:
        """Wait until at least one entry may be inserted; False at the deadline, or if the run is over."""
        session = self._session
        with self._waiting.changed:
            self._hold_until(lambda: session.inserts.left > 0 or session.is_finished, deadline)
            return session.inserts.left > 0

    def _hold_until(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Wait for the home to grant more. Under the lock."""
        if is_done():
            return
        inserts, waiting, began = self._session.inserts, self._waiting, self._waiting.now()
        try:
            _core.while_more(inserts, "waiting", waiting.until, is_done, deadline, waiting.check_shipping)
        finally:
            inserts.waited += waiting.now() - began

    # Caches

    def push_cache(self, local: LocalMemory, timeout: float) -> bool:
        """Draw a cache and push it, as soon as an entry may be inserted."""
        deadline = self._waiting.now() + timeout
        if not self._is_granted(deadline):
            return self.skip(HELD_BACK)
        return self.push_granted(local, self._waiting.left(deadline))

    def push_granted(self, local: LocalMemory, patience: float, with_it: Callable[[], Changes] = list) -> bool:
        """The same for a writer whose entries were granted; `with_it` is changed together with what comes of it."""
        instead = "whole episodes: closed ones are pushed, or push_episode pushes one"
        self.check_storage(("caches",), "push_cache", instead)
        deadline, memory = self._waiting.now() + patience, local.memory
        if memory.num_positive == 0:
            return self.skip(NOTHING_TO_DRAW, with_it)
        if not self._has_room(self._last_size or 1, deadline):
            return self.skip(WINDOW_FULL, with_it)
        try:
            payload = self._build(memory)
        except EmptyMemory:
            return self.skip(NOTHING_TO_DRAW, with_it)
        if not self._has_room(payload.nbytes, deadline):
            return self.skip(WINDOW_FULL, with_it)
        samples = self._session.parameters.cache_size
        self._enqueue(
            payload,
            samples,
            lambda since, number, pushed: messages.Cache(since=since, number=number, pushed_bytes=pushed),
            with_it,
        )
        return True

    def _build(self, memory: Memory) -> Payload:
        session, began = self._session, self._waiting.now()
        payload = pack.build(memory, now=self._clock(), compression=self.codec())
        self._spend(began)
        if payload.nbytes > session.most_bytes:
            fitting = f"fits into {session.most_bytes} (limits.message_bytes)"
            expected = f"such that a cache of {payload.nbytes} bytes {fitting}"
            raise ParameterError("cache_size", session.parameters.cache_size, expected)
        return payload

    # Episodes

    def pack(self, *episode: Any) -> Payload:
        """The container of an episode, as of this moment; see `episodes.OpenEpisodes`."""
        began, (*columns, final) = self._waiting.now(), episode
        payload = pack.pack_episode(
            self._session.schema,
            *columns,
            final=final,
            now=self._clock(),
            compression=self.codec(),
        )
        self._spend(began)
        return payload

    def ship(self, shipment: Shipment, with_it: Changes) -> None:
        """Push an episode that a writer closed, or count it as skipped; `with_it` is changed together with that."""
        self._waiting.check_process()
        left = self._waiting.closed_by - self._waiting.now()
        is_counted = self._session.told.storage == "rollouts"
        patience = max(0.0, min(self.patience, left))
        self.push_episode(shipment, patience, lambda is_pushed: with_it, is_counted=is_counted)

    def push_episode(
        self,
        shipment: Shipment,
        patience: float,
        with_it: Callable[[bool], Changes],
        *,
        is_counted: bool = False,
    ) -> bool:
        """Push an episode; False, after so many seconds, if there was no room for it.

        Args:
            with_it: The changes that go with it, under the lock; from whether it was pushed.
            is_counted: Whether its entries were granted when they were recorded.
        """
        entries, inserts = shipment.entries, self._session.inserts
        self._waiting.check_shipping()
        size, most_bytes = shipment.payload.nbytes, self._session.most_bytes
        if size > most_bytes:
            expected = f"at most {most_bytes} (limits.message_bytes) in an episode; close it earlier, or cut it"
            raise ParameterError("payload bytes", size, expected)
        deadline = self._waiting.now() + patience
        is_granted = is_counted or self._is_granted(deadline)
        if not (is_granted and self._has_room(size, deadline)):
            reason = WINDOW_FULL if is_granted else HELD_BACK
            return self.skip(reason, lambda: inserts.settling(entries, 0) + with_it(False))
        more = lambda: inserts.settling(entries, entries) + with_it(True)  # noqa: E731
        self._enqueue(shipment.payload, entries, shipment.message, more)
        return True

    # Both

    def check_storage(self, wanted: tuple[str, ...], call: str, instead: str) -> None:
        """Refuse a call that this server has no use for."""
        storage, home = self._session.told.storage, self._session.told.home_name
        if storage not in wanted:
            names = " or ".join(map(repr, wanted))
            raise ParameterError("storage", storage, f"{names} for {call}; server {home!r} stores {instead}")

    def skip(self, reason: str, with_it: Callable[[], Changes] = list) -> bool:
        """Count that nothing was pushed, with the changes that go with it, under the lock; returns False."""
        with self._waiting.changed:
            inserts, counts = self._session.inserts, self._session.counts
            why = inserts.reason or "learners are behind, and the server has not granted more yet"
            changes = setting(self, reason=f"{reason}: {why}" if reason == HELD_BACK else reason)
            changes += putting(self.not_pushed.get(reason, 0) + 1, reason, self.not_pushed)
            changes += setting(counts, skipped=counts.skipped + (reason == WINDOW_FULL))
            changes += setting(self._session.schedule, is_dirty=True) + with_it()
            if reason == HELD_BACK and not inserts.is_short:
                changes += [*setting(inserts, is_short=True), (self._waiting.wake, ())]
            _core.at_once(changes)
        return False

    def codec(self) -> str:
        """How frames are packed now, by what the parameters say and the home can undo."""
        wanted = self._session.parameters.compression
        if wanted == "auto":
            wanted = "lz4" if self._choice.packs else "none"
        return wanted if wanted in (*self._session.told.codecs, "none") else "none"

    def _spend(self, began: float, waited: float = 0.0) -> None:
        """Packing, and waiting, has taken the time since then."""
        with self._waiting.changed:
            self._choice.spend(self._waiting.now() - began, waited)

    def _has_room(self, size: int, deadline: float) -> bool:
        """Wait until a message of so many payload bytes fits the window; False at the deadline."""
        session, waiting = self._session, self._waiting

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

    def _enqueue(
        self,
        payload: Payload,
        samples: int,
        message: Callable[[int, int, int], messages.Body],
        with_it: Callable[[], Changes],
    ) -> None:
        # In the caller's thread: the one with the sockets has other things to do.
        checksum, size, session = _bytes.checksum(payload), payload.nbytes, self._session
        with self._waiting.changed:
            now, window = self._waiting.now(), session.window
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
            changes = window.pushing(size, now) + setting(self, _last_size=size, reason="") + with_it()
            changes += [*setting(session.schedule, is_dirty=True), (self.queue.append, (frames,))]
            _core.at_once([*changes, (self._waiting.wake, ())])


class WriterObserver(_core.SampleDebt):
    """Takes a writer's entries and episodes: counts them, and pushes as many samples as the parameters ask for. What an
    interrupt leaves to do is done at the next call.
    """

    def __init__(self, session: Session, waiting: ClientLock, pusher: Pusher, local: LocalMemory) -> None:
        self._session, self._waiting, self._pusher, self._local = session, waiting, pusher, local
        self._held, self._counts, self._schedule = waiting.changed, session.counts, session.schedule
        self._storage, self._entry_bytes = session.told.storage, session.schema.entry_bytes  # for good

    @property
    def is_behind(self) -> bool:
        """Whether something of entries that it took is not done yet."""
        return self._is_due or self._asked > 0

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Take what was recorded. Rollouts wait if there is no room for more: before these are recorded, so that no
        step is made by a model whose share is there. Entries without room are discarded.
        """
        self._waiting.check_process()
        count, storage = writer._untold, self._storage
        if storage == "rollouts":
            self._pusher.record_in_order(count, lambda answer: setting(writer, _untold=0, _answer=answer))
            return
        if storage != "caches":
            self._pusher.record(count, setting(writer, _untold=0))
            return
        parameters = self._session.parameters
        if not self._take_granted(writer, parameters.samples_per_insert, self._entry_bytes):
            self._pusher.record(count, setting(writer, _untold=0) + setting(self, _asked=self._asked + count))
            self._insert(self._pusher.patience if waits else 0.0)
        if self._is_due or self._owed >= parameters.cache_size:
            self._push(self._pusher.patience if waits else 0.0)

    def _insert(self, patience: float) -> None:
        """Make inserts of the entries that wait for that, or let them stay passed steps."""
        pusher, parameters = self._pusher, self._session.parameters

        def admitting(count: int) -> Changes:
            owed = self._owed + count * parameters.samples_per_insert
            return setting(self, _asked=self._asked - count, _owed=owed)

        if not pusher.admit(lambda: self._asked, admitting, patience):
            inserts = self._session.inserts
            pusher.skip(HELD_BACK, lambda: inserts.settling(self._asked, 0) + setting(self, _asked=0))

    def _push(self, patience: float) -> None:
        """Push the cache that is due."""
        if not self._is_due:
            # One at a time: after a pause, such as a window that was full, old debts are not made good in a burst.
            size = self._session.parameters.cache_size
            _core.at_once(setting(self, _owed=min(self._owed - size, size), _is_due=True))
        try:
            self._pusher.push_granted(self._local, patience, lambda: setting(self, _is_due=False))
        except Exception:
            self._is_due = False
            raise

    def pause(self, writer: _core.StepCounter) -> None:
        """Wait for room; a learner has what was open."""
        self._pusher.await_room(setting(writer, _answer=""))

    def take_episode(self, told: deque[tuple[int, int, NDArray[np.float64]]]) -> None:
        """Count the first of these episodes, which were closed: lane, length and return [*R]."""
        self._waiting.check_process()
        _, length, returned = told[0]
        self._pusher.count_episode(length, returned, with_it=lambda: [(told.popleft, ())])
