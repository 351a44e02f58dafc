"""Rollouts of all clients of a table at the server: handed out in order of arrival, each entry once.

    EPISODE ──check──▶ add ──▶ RolloutQueue ──▶ take           a learner in this process

Room is given back where entries leave: at the take, or when the next model is published (release="publish"), so that
clients make no step with a model whose share is there already. `on_room` is told, and the table's limiter lets clients
go on.

How far clients may record ahead of a queue whose entries are handed out once: as far as it has room.

    capacity 4096     8 clients are granted 512 each, and wait when they have recorded them
    take(4096)        room for 4096 more, at once or when the next model is published

Room that is lost is found again while a learner waits: after `STALLED_TIMEOUT` without any news, what was granted and
not used is taken back, since whoever had it may have died, and entries that were counted and never came are forgiven.

Nothing here changes what the dispatcher's lock guards: pools and limiters have locks of their own.
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
    HandsOutOnce,
    PoolStats,
    PutBack,
    RecordBody,
    Release,
    SavedRecord,
    TakeRequest,
    TakesPushes,
)
from memoire.tables.episodes.memory import CheckedEpisode, checked_episode
from memoire.tables.episodes.saving import pack, put_back
from memoire.tables.inspection import Distribution, Histogram
from memoire.tables.pools import LastingPool
from memoire.tables.registry import Desk, Handler, Reply
from memoire.wire import messages, types
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.frames import MessageHeader
from memoire.wire.parts import Payload
from memoire.wire.receivers import Page

from . import fragments
from .fragments import RolloutQueue, check_entries, fitting, packed

DEFAULT_ENTRIES: Final = 65_536
"""Entries there is room for where nobody said a number."""


class RolloutPool(LastingPool, TakesPushes, BelongsToRun, HandsOutOnce):
    """The rollouts of one table. Thread-safe.

    Args:
        schema, parameters: Of the entries; `configure` changes the parameters.
        capacity: Entries there is room for.
        is_bounded: Whether the oldest leave where more than `capacity` entries are held; else only bytes are limited,
            and clients wait.
        byte_limit: Bytes that entries may take.
        client_timeout: Seconds of silence after which a client is not counted any more. What it sent stays.
        clock: Seconds that only grow.
        wall: Seconds since 1970, for what is saved.

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
        self.on_room: Callable[[int, Changes], None] = lambda entries, told: at_once(told)
        """Told how many entries' room is given back; below 0: so many came by another way than a client. It counts them
        and makes the changes as one, by which they are told. Called under the lock."""
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

    def join(self, budget: ByteBudget, name: str) -> None:
        """Be a holder of that name from now on: the oldest fragments leave if others leave no room."""
        queue = self._queue
        budget.holder(name, measure=lambda: queue.taken)
        self._free = lambda: budget.free

    # What comes in

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> CheckedEpisode:
        """A received fragment, completely checked, ready for `add`.

        Raises:
            ProtocolError: and nothing else, whatever the bytes.
        """
        fits = self.schema, self.parameters, self.capacity
        checked = checked_episode(body, payload, *fits, limits=limits, checksum=checksum, stays=True)
        fragment = Fragment(b"", 0, checked.episode, checked.age, 0.0)
        check_entries(fragment, self.schema, min(limits.message_bytes, DEFAULTS.message_bytes))
        return checked

    def add(self, client_id: bytes, sequence: int, checked: CheckedEpisode) -> int:
        """Hold a checked fragment behind all others; returns how many of the oldest made room."""
        with self._waiter.lock:
            if self._waiter.is_closed:
                return 0
            self._hear(client_id)
            return self._hold(Fragment(client_id, sequence, checked.episode, checked.age, self._clock()))

    def _give_room(self) -> None:
        """Tell of room that is given back, of that included of which an interrupted call did not. Under the lock."""
        if owed := self._queue.owed:
            self.on_room(owed, setting(self._queue, owed=0))

    def _make_room(self) -> int:
        entries, most = self.capacity if self._is_bounded else 1 << 62, self._queue.taken + self._free()
        return self._queue.make_room(entries, self.byte_limit, most)

    # What is changed

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Follow new parameters from now on; nothing goes until a take passes it over."""
        with self._waiter.lock:
            self.parameters = parameters
            self._waiter.tell()
        return 0

    def limit(self, byte_limit: int) -> int:
        """Hold at most this many bytes from now on; returns how many fragments had to go, the oldest first.

        Raises:
            ParameterError: too few for the capacity that was asked for, or for one entry.
        """
        self._check(byte_limit)
        with self._waiter.lock:
            self.byte_limit = byte_limit
            dropped = self._make_room()
            self._give_room()
            self._waiter.tell()
        return dropped

    def clear(self) -> int:
        """Let everything go that is held, and give its room back; returns the fragments."""
        with self._waiter.lock:
            gone = len(self._queue)
            self._queue.clear()
            self._put_back.clear()
            self._give_room()
            self._waiter.tell()
        return gone

    def saw_model(self, version: int) -> None:
        """There is a model of this version: `Parameters.max_model_lag` counts from it, and takes that waited for the
        next one give their room back.
        """
        with self._waiter.lock:
            self._queue.saw_model(version)
            self._give_room()
            self._waiter.tell()

    # Snapshots

    def state(self) -> dict[str, Any]:
        """Return the state of takes beside the held data: fields of a snapshot's `TableRecord`."""
        with self._waiter.lock:
            return {"newest_model": self._queue.newest_model, "until_publish": self._queue.until_publish}

    def go_on_from(self, state: Any, *, is_same: bool) -> None:
        """Take up what `state` said; before anything is put back."""
        with self._waiter.lock:
            self._queue.saw_model(max(self._queue.newest_model, state.newest_model))
            if is_same:
                self._queue.until_publish = state.until_publish

    @property
    def is_untouched(self) -> bool:
        """Whether nothing ever came in or was taken."""
        with self._waiter.lock:
            return not (self._added or self._queue.until_publish)

    def walk(self) -> Iterator[KeptEpisode]:
        """Every fragment that is held at the beginning, the oldest first: each an episode that its client names."""
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
        """Hold a fragment that was walked over, here or elsewhere, behind all others.

        Returns:
            Whether it was not here already, or put back before; and how many left to make room.

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
        """Body and payload of each."""
        return (pack(kept, self.schema) for kept in self.walk())

    def put_record(self, record: SavedRecord) -> PutBack:
        """Hold an episode of a snapshot."""
        return put_back(record, self.schema, self.put_back)

    def _hold(self, fragment: Fragment, taken: int = 0) -> int:
        """Put a fragment behind all others; returns the fragments that made room. Under the lock."""
        self._queue.add(fragment, taken)
        dropped = self._make_room()
        self._added += 1
        self._give_room()
        self._waiter.tell()
        return dropped

    # What goes out

    def entries(self) -> int:
        """Entries that are held."""
        return self.held()[0]

    def held(self) -> tuple[int, int]:
        """Entries that are held, and the clients that recorded them."""
        with self._waiter.lock:
            return self._queue.entries, self._queue.clients

    def take(self, wanted: TakeRequest, timeout: float = 0.0) -> Rollouts:
        """The oldest entries, which nobody else gets; all of them or none. See `TableHandle.take`.

        Raises:
            ParameterError: more are wanted than there is room for.
            NotEnoughSamples: fewer came in `timeout` seconds; nothing was taken.
            Closed: `close` was called, also from another thread while waiting.
        """
        if wanted.steps > self.capacity:
            expected = f"at most the capacity, {self.capacity} entries: more are never there"
            raise ParameterError("steps", wanted.steps, expected)
        began = time.monotonic()
        while not (taken := self.take_now(wanted)):
            self._await_more(wanted, began, timeout)
        return Rollouts.of(self.schema, taken, self._clock(), self.parameters.discount)

    def take_now(self, wanted: TakeRequest) -> list[Fragment]:
        """The fragments of a take, if they are there; else none. What is too old leaves first."""
        with self._waiter.lock:
            self._waiter.check_open()
            self._queue.pass_over(self.parameters.max_model_lag)
            taken = self._queue.take(wanted)
            self._give_room()
        return taken

    def give(
        self, wanted: TakeRequest, least: int, page: Page, *, wall: float
    ) -> tuple[list[messages.FragmentRow], Payload | None]:
        """What a learner far away gets at once: rows and payload of a ROLLOUTS message. See `RolloutQueue.give`.

        Args:
            page: Of the reply.
            wall: Seconds since 1970.

        Raises:
            ProtocolError: (code "too_large") not one entry fits into a reply to this learner. Nothing was taken.
        """
        with self._waiter.lock:
            self._queue.pass_over(self.parameters.max_model_lag)
            self._give_room()  # also if the rest is refused
            taken = self._queue.give(wanted, least, lambda fragment: fitting(page, fragment, self.schema))
            self._give_room()
            now = self._clock()
        return packed(taken, self.schema, now=now, wall=wall)

    def _await_more(self, wanted: TakeRequest, began: float, timeout: float) -> None:
        """Wait until something has come, or say what is missing."""
        with self._waiter.lock:
            why = self._queue.why_not(wanted)
            if why and not self._waiter.wait(began + timeout):
                self._misses += 1
                facts = self._queue.entries, len(self._queue), len(self._clients)
                raise NotEnoughSamples(wanted.steps, *facts, time.monotonic() - began if timeout else 0.0, why)

    # Inspection

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """How old what is held is; each entry has the weight that its writer gave it, and is handed out once."""
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
            weights=Histogram.of(weights),
            ages=Histogram.of(np.maximum(ages, 0.0)),
        )

    def stats(self) -> PoolStats:
        """A frozen picture; what is called caches elsewhere are fragments here, and samples are entries."""
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


def answers(desk: Desk) -> dict[type[messages.Body], Handler]:
    """What answers readers of tables of rollouts."""

    def take(now: float, header: MessageHeader, body: fragments.Take, _: Any) -> Reply:
        """Hand out the oldest entries, and say what is held then."""
        table = desk.table(header)
        pool = table.asked(HandsOutOnce, header.type.name)
        page = desk.page(header.client, types.ROLLOUTS)
        rows, payload = pool.give(_request_of(body), body.least, page, wall=now) if body.steps else ([], None)
        entries, clients = pool.held()
        table.limiter.wants(header.client, 0 if rows else body.wanted)
        said = fragments.Rollouts(
            epoch=desk.epoch,
            fragments=rows,
            held=entries,
            clients=clients,
            capacity=pool.capacity,
            finished=desk.finished,
        )
        return Reply(said, payload)

    return {fragments.Take: take}


def _request_of(body: fragments.Take) -> TakeRequest:
    try:
        return TakeRequest(body.steps, body.exact, 0, cast(Release, body.release))
    except ParameterError as error:
        raise ProtocolError("value", str(error)) from None


STALLED_TIMEOUT = 1.0
"""Seconds without news from any client after which there is room for all entries that a learner misses."""


class RoomLimiter(Limiter):
    """A `Limiter` of a table of rollouts: `surplus` is the entries that were recorded and whose room is not given back.

    Args:
        capacity: Entries there is room for; 0: no client ever waits, and the oldest entries leave.
        entries, clock: As of `Limiter`.
    """

    def __init__(self, capacity: int, entries: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        tolerance = float(capacity) if capacity else None
        super().__init__(Parameters(samples_per_insert=1.0, samples_per_insert_tolerance=tolerance), entries, clock)
        self._begun = True

    def configure(self, parameters: Parameters) -> None:
        """Nothing: the capacity does not change."""

    def _begin_again(self) -> None:
        super()._begin_again()
        self._begun = True

    def _grant(self, client: bytes, sharers: int, entries: int, now: float) -> tuple[int, str]:
        """A client that has just been granted room may use it: none is stalled meanwhile."""
        if missing := self._missing(entries, now):
            self._find_room(missing)
        outstanding = self._outstanding
        found = super()._grant(client, sharers, entries, now)
        if self._outstanding > outstanding:
            self._news_at = now
        return found

    def _find_room(self, missing: int) -> None:
        """Have room for so many entries: of those who have used none of theirs for long, and beyond the capacity."""
        for known in self._clients.values():
            known.through = known.inserted
        self._outstanding = 0
        lost = self._surplus + missing - (self.parameters.samples_per_insert_tolerance or 0.0)
        if lost > 0.0:
            self._forgiven += lost
            self._surplus -= lost

    def _settle(self, entries: int, now: float) -> None:
        """Nothing: what is beyond the capacity is forgiven later, when a client asks for room."""

    def _share(self, room: float, sharers: int, lasting: float) -> float:
        """An equal part: fragments want all of it."""
        return room / max(1, sharers)

    def _needed(self, now: float) -> int:
        """Nothing beyond a client's share of the room: there is enough, since it was found."""
        return 0

    def _missing(self, entries: int, now: float) -> int:
        """Entries that a learner has waited for although no client moves; 0 where there is nobody like that."""
        if now - self._news_at < STALLED_TIMEOUT:
            return 0
        wanted = self._starving(now) - self.parameters.cache_size  # nothing comes in caches here
        return max(0, wanted - entries)

    def _why_not_record(self) -> str:
        capacity = self.parameters.samples_per_insert_tolerance or 0.0
        return (
            f"waiting until a learner takes entries: {self._surplus:.0f} are recorded and not taken, or their room is "
            f"given back with the next model (capacity={capacity:.0f}, on_full='wait')"
        )

    def told(self, cluster: ClusterSurplus) -> None:
        """Nothing: each server has room of its own."""

    def standing(self) -> ServerSurplus | None:
        """None: a take has nothing to wait for but entries."""
        return None
