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

from memoire.errors import EmptyMemory, ParameterError
from memoire.replay.episode_store import AfterStep, PausedWriter
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
            self._session.record(entries)

    def count_episode(self, length: int, returned: Any, kind: int = messages.TRAIN) -> None:
        """Count a closed episode, or tell of a test; `returned` is the sum of its rewards, [*R] or a number."""
        total = float(np.sum(returned))
        with self._waiting.changed:
            self._session.close_episode(length, total, self._clock(), kind)

    def insert(self, entries: int, patience: float) -> int:
        """Count entries that a writer recorded, as inserts as soon as they may be; returns how many are in time."""
        inserts, admitted = self._session.inserts, 0
        deadline = self._waiting.now() + patience

        def are_admitted() -> bool:
            nonlocal admitted
            admitted += inserts.admit(entries - admitted)
            self._session.schedule.is_dirty = True
            return admitted == entries or self._session.is_finished

        with self._waiting.changed:
            self._session.record(entries)
            inserts.record(entries)
            if self._session.told.storage == "caches":
                self._hold_until(are_admitted, deadline)
                inserts.settle(entries - admitted, 0)
        return admitted

    def insert_in_order(self, entries: int) -> tuple[bool, bool]:
        """Count recorded entries of rollouts: inserts if there was room for the first of them, else passed steps.
        Returns whether there was, and whether there is room for another one.
        """
        inserts, session = self._session.inserts, self._session
        with self._waiting.changed:
            has_room = inserts.left > 0
            session.record(entries)
            inserts.record(entries)
            inserts.settle(entries, entries if has_room else 0)
            session.schedule.is_dirty = True
            return has_room, inserts.left > 0 or session.is_finished

    def await_room(self) -> None:
        """Wait until another entry may be inserted: `block_timeout` seconds at most, so that a call ends."""
        self._waiting.wake()
        if not self._is_granted(self._waiting.now() + self.block_timeout) and not self._session.is_finished:
            self.skip(HELD_BACK)

    def _settle(self, entries: int, inserted: int) -> None:
        with self._waiting.changed:
            self._session.inserts.settle(entries, inserted)
            self._session.schedule.is_dirty = True

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
        inserts, began = self._session.inserts, self._waiting.now()
        inserts.waiting += 1
        try:
            self._waiting.until(is_done, deadline, self._waiting.check_shipping)
        finally:
            inserts.waiting -= 1
            inserts.waited += self._waiting.now() - began

    # Caches

    def push_cache(self, local: LocalMemory, timeout: float) -> bool:
        """Draw a cache and push it, as soon as an entry may be inserted."""
        deadline = self._waiting.now() + timeout
        if not self._is_granted(deadline):
            return self.skip(HELD_BACK)
        return self.push_granted(local, self._waiting.left(deadline))

    def push_granted(self, local: LocalMemory, patience: float) -> bool:
        """The same for a writer whose entries were granted."""
        instead = "whole episodes: closed ones are pushed, or push_episode pushes one"
        self.check_storage(("caches",), "push_cache", instead)
        deadline, memory = self._waiting.now() + patience, local.memory
        if memory.num_positive == 0:
            return self.skip(NOTHING_TO_DRAW)
        if not self._has_room(self._last_size or 1, deadline):
            return self.skip(WINDOW_FULL)
        try:
            payload = self._build(memory)
        except EmptyMemory:
            return self.skip(NOTHING_TO_DRAW)
        if not self._has_room(payload.nbytes, deadline):
            return self.skip(WINDOW_FULL)
        samples = self._session.parameters.cache_size
        self._enqueue(
            payload,
            samples,
            lambda since, number, pushed: messages.Cache(since=since, number=number, pushed_bytes=pushed),
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

    def ship(self, shipment: Shipment) -> None:
        """Push an episode that a writer closed, or count it as skipped."""
        self._waiting.check_process()
        left = self._waiting.closed_by - self._waiting.now()
        is_counted = self._session.told.storage == "rollouts"
        self.push_episode(shipment, max(0.0, min(self.patience, left)), is_counted=is_counted)

    def push_episode(self, shipment: Shipment, patience: float, *, is_counted: bool = False) -> bool:
        """Push an episode; False, after so many seconds, if there was no room for it.

        Args:
            is_counted: Whether its entries were granted when they were recorded.
        """
        self._waiting.check_shipping()
        size, most_bytes = shipment.payload.nbytes, self._session.most_bytes
        if size > most_bytes:
            expected = f"at most {most_bytes} (limits.message_bytes) in an episode; close it earlier, or cut it"
            raise ParameterError("payload bytes", size, expected)
        deadline = self._waiting.now() + patience
        is_granted = is_counted or self._is_granted(deadline)
        if not (is_granted and self._has_room(size, deadline)):
            self._settle(shipment.entries, 0)
            return self.skip(WINDOW_FULL if is_granted else HELD_BACK)
        self._settle(shipment.entries, shipment.entries)
        self._enqueue(shipment.payload, shipment.entries, shipment.message)
        return True

    # Both

    def check_storage(self, wanted: tuple[str, ...], call: str, instead: str) -> None:
        """Refuse a call that this server has no use for."""
        storage, home = self._session.told.storage, self._session.told.home_name
        if storage not in wanted:
            names = " or ".join(map(repr, wanted))
            raise ParameterError("storage", storage, f"{names} for {call}; server {home!r} stores {instead}")

    def skip(self, reason: str) -> bool:
        """Count that nothing was pushed; returns False."""
        with self._waiting.changed:
            why = self._session.inserts.reason or "learners are behind, and the server has not granted more yet"
            self.reason = f"{reason}: {why}" if reason == HELD_BACK else reason
            self.not_pushed[reason] = self.not_pushed.get(reason, 0) + 1
            if reason == HELD_BACK and not self._session.inserts.is_short:
                self._session.inserts.is_short = True
                self._waiting.wake()
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
            began = waiting.now()
            session.schedule.pressed += 1
            try:
                fits = waiting.until(has_room, deadline, waiting.check_shipping)
                session.counts.skipped += not fits
                if not fits and self._shut_since is None:
                    self._shut_since = waiting.now()
                return fits
            finally:
                session.schedule.pressed -= 1
                kept = waiting.now() - began
                self.waited += kept
                self._choice.spend(kept, kept)

    def _enqueue(self, payload: Payload, samples: int, message: Callable[[int, int, int], messages.Body]) -> None:
        # In the caller's thread: the one with the sockets has other things to do.
        checksum, size, session = _bytes.checksum(payload), payload.nbytes, self._session
        with self._waiting.changed:
            self._last_size = size
            now = self._waiting.now()
            session.window.pushed(size, now)
            if self._shut_since is not None:
                self._choice.spend(now - self._shut_since, now - self._shut_since)
                self._shut_since = None
            self._choice.carried(samples)
            frames = encode(
                message(session.told.since, session.window.pushed_caches, session.window.pushed_bytes),
                client=session.client,
                sequence=next(self._numbers),
                run=session.run,
                home=session.home,
                table=session.table,
                fingerprint=session.fingerprint,
                payload=payload,
                payload_checksum=checksum,
            )
            self.queue.append(frames)
            session.schedule.is_dirty = True
        self._waiting.wake()
        self.reason = ""


class WriterObserver:
    """Hears of a writer's entries and episodes: counts them, and pushes as many samples as the parameters ask for."""

    def __init__(self, session: Session, waiting: ClientLock, pusher: Pusher, local: LocalMemory) -> None:
        self._session, self._waiting, self._pusher, self._local = session, waiting, pusher, local
        self._owed = 0.0  # samples that are to be pushed

    def on_entries(self, count: int) -> AfterStep:
        """Entries were recorded. Rollouts wait if there is no room for more: before these are recorded, so that no step
        is made by a model whose share is there. Entries without room are discarded.
        """
        self._waiting.check_process()
        if self._session.told.storage == "rollouts":
            had_room, has_room = self._pusher.insert_in_order(count)
            if not had_room:
                return "discard"
            return "" if has_room else "wait"
        self._insert(count)
        return ""

    def pause(self, writer: PausedWriter) -> None:
        """Ship what is open, so that a learner has it, and wait for room."""
        writer.cut()
        self._pusher.await_room()

    def _insert(self, count: int) -> None:
        patience = self._pusher.patience
        inserted = self._pusher.insert(count, patience)
        if self._session.told.storage != "caches":
            return
        if inserted < count:
            self._pusher.skip(HELD_BACK)
        parameters = self._session.parameters
        self._owed += inserted * parameters.samples_per_insert
        if self._owed >= parameters.cache_size:
            # One at a time: after a pause, such as a window that was full, old debts are not made good in a burst.
            self._owed = min(self._owed - parameters.cache_size, parameters.cache_size)
            self._pusher.push_granted(self._local, patience)

    def on_episode(self, lane: int, length: int, returned: Any) -> None:
        """An episode was closed."""
        self._waiting.check_process()
        self._pusher.count_episode(length, returned)
