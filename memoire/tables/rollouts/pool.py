"""Pool of rollouts of all clients at a server, handed out in order of arrival, each entry once, and its limiter.

    EPISODE ──check──▶ add ──▶ RolloutQueue ──▶ take           a learner in this process

The room of entries is given back when entries leave: at the take, or when the next model is published
(release="publish"), so that clients record no step with a model whose share is complete. The pool calls `on_room`, and
the table's limiter lets clients continue.

Clients may record ahead of the learner as far as the queue has room:

    capacity 4096     8 clients are granted 512 each, and wait when they have recorded them
    take(4096)        room for 4096 more, at once or when the next model is published

Lost room is recovered while a learner waits. After `STALLED_TIMEOUT` without messages from clients, unused grants are
revoked, because their clients may have died, and entries that were counted and never arrived are forgiven.

Pools and limiters have locks of their own, and change no state that the dispatcher's lock guards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np

from memoire._core import at_once, setting
from memoire.errors import NotEnoughSamples, ParameterError, ProtocolError
from memoire.limits import HELD_BYTES, Limits, wall_clock
from memoire.replay.dataset import KeptEpisode
from memoire.replay.limiter import ClusterSurplus, Limiter, ServerSurplus
from memoire.replay.parameters import Parameters
from memoire.replay.rollouts import Fragment, Rollouts
from memoire.replay.schema import Schema
from memoire.replay.writing import Changes
from memoire.tables.base import (
    DEFAULTS,
    MAX_INSPECTED,
    BelongsToRun,
    DeliversOnce,
    PoolStats,
    RecordBody,
    Release,
    RestoreOutcome,
    SavedRecord,
    TakeRequest,
    TakesPushes,
)
from memoire.tables.episodes.memory import CheckedEpisode, checked_episode
from memoire.tables.episodes.saving import pack, put_back
from memoire.tables.inspection import Distribution, Histogram
from memoire.tables.pools import LastingPool
from memoire.tables.registry import Handler, HandlerContext, Reply
from memoire.wire import messages, types
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.frames import MessageHeader
from memoire.wire.parts import Payload
from memoire.wire.receivers import ReplyPage

from . import fragments
from .fragments import RolloutQueue, add_fitting_entries, check_entries, packed

DEFAULT_ENTRIES: Final = 65_536
"""Capacity in entries without the setting `capacity`."""


class RolloutPool(LastingPool, TakesPushes, BelongsToRun, DeliversOnce):
    """Pool of the rollouts of one table. Thread-safe.

    Args:
        schema, parameters: Schema and parameters of the entries; `configure` changes the parameters.
        capacity: Maximum number of entries.
        is_bounded: True: a pool with more than `capacity` entries evicts the oldest fragments. False: only bytes are
            limited, and clients wait.
        byte_limit: Maximum bytes of the entries.
        client_timeout: Seconds of silence after which a client is no longer counted. The client's data stays.
        clock: Monotonic clock in seconds.
        wall: Clock in seconds since 1970, for saved times.

    Raises:
        ParameterError: `capacity` entries do not fit into `byte_limit`.
    """

    parameters: Parameters
    byte_limit: int
    least_bytes: int
    capacity: int

    def __init__(
        self,
        schema: Schema,
        parameters: Parameters | None = None,
        *,
        capacity: int = 0,
        is_bounded: bool = False,
        byte_limit: int = HELD_BYTES,
        client_timeout: float = DEFAULTS.client_timeout,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = wall_clock,
    ) -> None:
        super().__init__(client_timeout, clock)
        self.schema, self.parameters = schema, parameters or Parameters()
        fitting = max(1, byte_limit // max(1, schema.entry_bytes))
        self.capacity = capacity or min(DEFAULT_ENTRIES, fitting)
        self.least_bytes = max(1, schema.entry_bytes) * self.capacity if capacity else max(1, schema.entry_bytes)
        self._check(byte_limit)
        self.byte_limit = byte_limit
        self.on_room: Callable[[int, Changes], None] = lambda entries, changes: at_once(changes)
        """Callback for room that is given back, called under the lock: number of entries, and changes to make with the
        count as one. A negative number counts restored entries, which no client has recorded.
        """
        self._is_bounded, self._wall = is_bounded, wall
        self._free: Callable[[], int] = lambda: 1 << 62
        # Everything below belongs to the waiter's lock.
        self._queue = RolloutQueue(schema)
        self._added = self._misses = 0
        self._put_back: set[tuple[bytes, int]] = set()

    def _check(self, byte_limit: int) -> None:
        if byte_limit < self.least_bytes:
            expected = f"at least {self.least_bytes} for {self.capacity} entries of {self.schema.entry_bytes} bytes"
            raise ParameterError("byte_limit", byte_limit, expected)

    def join_budget(self, budget: ByteBudget, name: str) -> None:
        """Join a byte budget under this name: the pool evicts its oldest fragments if other holders leave no room."""
        queue = self._queue
        budget.add_holder(name, measure=lambda: queue.held_bytes)
        self._free = lambda: budget.free

    # Received messages

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> CheckedEpisode:
        """Check a received fragment completely and return it for `add`.

        Raises:
            ProtocolError: the fragment is invalid. No other error is raised, whatever the bytes.
        """
        fits = self.schema, self.parameters, self.capacity
        checked = checked_episode(body, payload, *fits, limits=limits, checksum=checksum, stays=True)
        fragment = Fragment(b"", 0, checked.episode, checked.age, 0.0)
        check_entries(fragment, self.schema, min(limits.message_bytes, DEFAULTS.message_bytes))
        return checked

    def add(self, client_id: bytes, sequence: int, checked: CheckedEpisode) -> int:
        """Append a checked fragment to the queue; return the number of fragments evicted for room."""
        with self._waiter.lock:
            if self._waiter.is_closed:
                return 0
            self._hear(client_id)
            return self._hold(Fragment(client_id, sequence, checked.episode, checked.age, self._clock()))

    def _give_room(self) -> None:
        """Report room that is given back, also after an interrupted call. Call under the lock."""
        if owed := self._queue.owed:
            self.on_room(owed, setting(self._queue, owed=0))

    def _make_room(self) -> int:
        entries, most = self.capacity if self._is_bounded else 1 << 62, self._queue.held_bytes + self._free()
        return self._queue.make_room(entries, self.byte_limit, most)

    # Changes of parameters and limits

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Apply new parameters and return 0; stale entries are discarded by the next take."""
        with self._waiter.lock:
            self.parameters = parameters
            self._waiter.wake_waiters()
        return 0

    def limit_bytes(self, byte_limit: int) -> int:
        """Set the byte limit; evict the oldest fragments if needed and return their number.

        Raises:
            ParameterError: too few bytes for the requested capacity, or for one entry.
        """
        self._check(byte_limit)
        with self._waiter.lock:
            self.byte_limit = byte_limit
            dropped = self._make_room()
            self._give_room()
            self._waiter.wake_waiters()
        return dropped

    def clear(self) -> int:
        """Discard all fragments, give their room back, and return their number."""
        with self._waiter.lock:
            count = len(self._queue)
            self._queue.clear()
            self._put_back.clear()
            self._give_room()
            self._waiter.wake_waiters()
        return count

    def saw_model(self, version: int) -> None:
        """Record the newest model version, for `Parameters.max_model_lag`. Give back the room of takes that waited for
        it.
        """
        with self._waiter.lock:
            self._queue.saw_model(version)
            self._give_room()
            self._waiter.wake_waiters()

    # Snapshots

    def state(self) -> dict[str, Any]:
        """Return the state of takes beside the held data: fields of a snapshot's `TableRecord`."""
        with self._waiter.lock:
            return {"newest_model": self._queue.newest_model, "until_publish": self._queue.until_publish}

    def restore_state(self, state: Any, *, is_same: bool) -> None:
        """Continue from a value of `state`, before any record is restored."""
        with self._waiter.lock:
            self._queue.saw_model(max(self._queue.newest_model, state.newest_model))
            if is_same:
                self._queue.until_publish = state.until_publish

    @property
    def is_untouched(self) -> bool:
        """True if the pool never received or handed out a fragment."""
        with self._waiter.lock:
            return not (self._added or self._queue.until_publish)

    def walk(self) -> Iterator[KeptEpisode]:
        """Yield each fragment held at the call, the oldest first, as an episode with its client's id and number."""
        with self._waiter.lock:
            held, now, wall = list(self._queue), self._clock(), self._wall()
        for fragment in held:
            count, columns = len(fragment), dict(fragment.episode.columns)
            if self.schema.qvest is not None:
                return_column = self.schema[self.schema.qvest]
                columns[self.schema.qvest] = np.zeros((count, *return_column.shape), return_column.dtype)
            episode = replace(
                fragment.episode,
                columns=columns,
                born=wall - (now - fragment.arrived) - fragment.age.astype(np.float64),
                priority=np.full(count, -1.0, np.float32),
                drawn=np.zeros(count, np.uint32),
            )
            yield KeptEpisode(fragment.client, fragment.number, episode)

    def put_back(self, kept: KeptEpisode) -> tuple[bool, int]:
        """Append a fragment from `walk`, of this pool or another, to the queue.

        Returns:
            True if the pool did not hold the fragment, restored or not, and the number of fragments evicted for room.

        Raises:
            Closed: `close` was called.
        """
        episode, name, wall = kept.episode, (kept.owner, kept.number), self._wall()
        born = np.full(len(episode), wall) if episode.born is None else episode.born
        age = np.maximum(wall - born, 0.0).astype(np.float32)
        fragment = Fragment(kept.owner, kept.number, episode, age, self._clock())
        with self._waiter.lock:
            self._waiter.check_open()
            if name in self._put_back or name in self._queue:
                return False, 0
            dropped = self._hold(fragment, len(fragment))
            self._put_back.add(name)
        return True, dropped

    def records(self) -> Iterator[tuple[RecordBody, bytes]]:
        """Yield body and payload of each fragment."""
        return (pack(kept, self.schema) for kept in self.walk())

    def put_record(self, record: SavedRecord) -> RestoreOutcome:
        """Restore a fragment of a snapshot."""
        return put_back(record, self.schema, self.put_back)

    def _hold(self, fragment: Fragment, taken: int = 0) -> int:
        """Append a fragment to the queue; return the number of fragments evicted for room. Call under the lock."""
        self._queue.add(fragment, taken)
        dropped = self._make_room()
        self._added += 1
        self._give_room()
        self._waiter.wake_waiters()
        return dropped

    # Takes

    def entries(self) -> int:
        """Return the number of held entries."""
        return self.held()[0]

    def held(self) -> tuple[int, int]:
        """Return the number of held entries, and the number of clients that recorded them."""
        with self._waiter.lock:
            return self._queue.entries, self._queue.clients

    def take(self, wanted: TakeRequest, timeout: float = 0.0) -> Rollouts:
        """Take the oldest entries, all that are wanted or nothing. No other learner gets them. See `TableHandle.take`.

        Raises:
            ParameterError: more entries are wanted than the capacity.
            NotEnoughSamples: too few entries arrived in `timeout` seconds; nothing was taken.
            Closed: `close` was called, also from another thread while waiting.
        """
        if wanted.steps > self.capacity:
            expected = f"at most the capacity, {self.capacity} entries"
            raise ParameterError("steps", wanted.steps, expected)
        began = time.monotonic()
        while not (taken := self.take_now(wanted)):
            self._await_more(wanted, began, timeout)
        return Rollouts.from_fragments(self.schema, taken, self._clock(), self.parameters.discount)

    def take_now(self, wanted: TakeRequest) -> list[Fragment]:
        """Return the fragments of a take if enough entries are held, else nothing. Discard stale entries first."""
        with self._waiter.lock:
            self._waiter.check_open()
            self._queue.discard_stale(self.parameters.max_model_lag)
            taken = self._queue.take(wanted)
            self._give_room()
        return taken

    def pack_for_learner(
        self, wanted: TakeRequest, least: int, page: ReplyPage, *, wall: float
    ) -> tuple[list[messages.FragmentRow], Payload | None]:
        """Return rows and payload of a ROLLOUTS message for a remote learner, without waiting. See
        `RolloutQueue.pack_for_learner`.

        Args:
            page: Page of the reply.
            wall: Seconds since 1970.

        Raises:
            ProtocolError: (code "too_large") not one entry fits into a reply to this learner. Nothing was taken.
        """
        with self._waiter.lock:
            self._queue.discard_stale(self.parameters.max_model_lag)
            self._give_room()  # `pack_for_learner` may have raised
            taken = self._queue.pack_for_learner(
                wanted, least, lambda fragment: add_fitting_entries(page, fragment, self.schema)
            )
            self._give_room()
            now = self._clock()
        return packed(taken, self.schema, now=now, wall=wall)

    def _await_more(self, wanted: TakeRequest, began: float, timeout: float) -> None:
        """Wait for the next change, or raise NotEnoughSamples with the reason at the timeout."""
        with self._waiter.lock:
            why = self._queue.wait_reason(wanted)
            if why and not self._waiter.wait(began + timeout):
                self._misses += 1
                facts = self._queue.entries, len(self._queue), len(self._clients)
                raise NotEnoughSamples(wanted.steps, *facts, time.monotonic() - began if timeout else 0.0, why)

    # Inspection

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """Return the distribution of ages and of the actors' weights. Each entry is handed out once."""
        with self._waiter.lock:
            held, entries, now = self._queue.newest(most), self._queue.entries, self._clock()
        nothing = np.empty(0, np.float32)
        weights = np.concatenate([nothing, *(each.episode.init_w for each in held)])[:most]
        ages = np.concatenate([nothing, *(each.age + np.float32(now - each.arrived) for each in held)])[:most]
        return Distribution(
            looked=len(ages),
            held=entries,
            population=float(entries),
            total_weight=float(entries),
            effective=float(entries) if entries else None,
            weights=Histogram.from_values(weights),
            ages=Histogram.from_values(np.maximum(ages, 0.0)),
        )

    def stats(self) -> PoolStats:
        """Return frozen figures of the pool; `caches` counts fragments, and samples are entries."""
        with self._waiter.lock:
            queue, counts = self._queue, self._queue.counts
            return PoolStats(
                clients=len(self._clients),
                caches=len(queue),
                bytes=queue.bytes,
                unused=queue.entries,
                held=queue.entries,
                added=self._added,
                drawn=counts.taken,
                overwritten=counts.overwritten_fragments,
                overwritten_samples=counts.overwritten,
                left=0,
                misses=self._misses,
                passed_over=counts.stale,
                split=counts.split,
            )


def request_handlers(context: HandlerContext) -> dict[type[messages.Body], Handler]:
    """Return the handler for requests of readers of rollouts."""

    def take(now: float, header: MessageHeader, body: fragments.Take, _: Any) -> Reply:
        """Hand out the oldest entries, and report the remaining ones."""
        table = context.table(header)
        pool = table.require_for(DeliversOnce, header.type.name)
        page = context.empty_page(header.client, types.ROLLOUTS)
        rows, payload = (
            pool.pack_for_learner(_request_of(body), body.least, page, wall=now) if body.steps else ([], None)
        )
        entries, clients = pool.held()
        table.limiter.report_wait(header.client, 0 if rows else body.wanted)
        rollouts = fragments.RolloutsReply(
            epoch=context.epoch,
            fragments=rows,
            held=entries,
            clients=clients,
            capacity=pool.capacity,
            finished=context.finished,
        )
        return Reply(rollouts, payload)

    return {fragments.Take: take}


def _request_of(body: fragments.Take) -> TakeRequest:
    try:
        return TakeRequest(body.steps, body.exact, 0, cast(Release, body.release))
    except ParameterError as error:
        raise ProtocolError("value", str(error)) from None


STALLED_TIMEOUT = 1.0
"""Seconds without messages from clients after which lost room is recovered for a waiting learner."""


class RoomLimiter(Limiter):
    """Limiter of a table of rollouts: `surplus` is the number of recorded entries whose room is not given back.

    Args:
        capacity: Maximum number of entries; 0: no client ever waits, and the oldest entries are evicted.
        entries, clock: As in `Limiter`.
    """

    def __init__(self, capacity: int, entries: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        tolerance = float(capacity) if capacity else None
        super().__init__(Parameters(samples_per_insert=1.0, samples_per_insert_tolerance=tolerance), entries, clock)
        self._begun = True

    def configure(self, parameters: Parameters) -> None:
        """Ignore parameters, because the capacity does not change."""

    def _begin_again(self) -> None:
        super()._begin_again()
        self._begun = True

    def _grant(self, client: bytes, sharers: int, entries: int, now: float) -> tuple[int, str]:
        """Grant room, after recovering lost room. A new grant restarts `STALLED_TIMEOUT`."""
        if missing := self._missing(entries, now):
            self._recover_room(missing)
        outstanding = self._outstanding
        grant = super()._grant(client, sharers, entries, now)
        if self._outstanding > outstanding:
            self._news_at = now
        return grant

    def _recover_room(self, missing: int) -> None:
        """Make room for this many entries: revoke unused grants, and forgive entries beyond the capacity."""
        for grants in self._clients.values():
            grants.through = grants.inserted
        self._outstanding = 0
        lost = self._surplus + missing - (self.parameters.samples_per_insert_tolerance or 0.0)
        if lost > 0.0:
            self._forgiven += lost
            self._surplus -= lost

    def _settle(self, entries: int, now: float) -> None:
        """Do nothing: entries beyond the capacity are forgiven when a client asks for room."""

    def _share(self, room: float, sharers: int, lasting: float) -> float:
        """Return an equal part of the room, because clients use all of it."""
        return room / max(1, sharers)

    def _needed(self, now: float) -> int:
        """Return 0, because a client's share of the recovered room suffices."""
        return 0

    def _missing(self, entries: int, now: float) -> int:
        """Return the entries that a learner waits for while no client sends messages; 0 if no learner waits."""
        if now - self._news_at < STALLED_TIMEOUT:
            return 0
        wanted = self._starving(now) - self.parameters.cache_size  # rollouts have no caches
        return max(0, wanted - entries)

    def _why_not_record(self) -> str:
        capacity = self.parameters.samples_per_insert_tolerance or 0.0
        return (
            f"waiting until a learner takes entries: {self._surplus:.0f} entries are not taken yet, or keep their room "
            f"until the next model (capacity={capacity:.0f}, on_full='block')"
        )

    def apply_cluster(self, cluster: ClusterSurplus) -> None:
        """Ignore the cluster's surplus, because each server has room of its own."""

    def server_surplus(self) -> ServerSurplus | None:
        """Return None, because takes wait for entries only."""
        return None
