"""Pool of whole episodes of all clients, in one memory at the server, for local draws and remote readers.

    EPISODE ──check──▶ add ──▶ Memory ──▶ get           a batch, as a Buffer would draw it
                                 ▲   └──▶ draw_counts   samples for a reader that draws from several servers
                  TD errors ── apply

Each frame is sent once, and can be drawn any number of times. The server computes returns, priorities and windows with
the same engine as an actor, so that the same entries give the same samples.

Ids are (owner, number): `owner` is 16 random bytes that name this memory, as a client's id names a client's memory.
Numbers are never reused under one owner, and a new memory has a new owner: an old id is stale, and never refers to
another entry.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.arguments import whole
from memoire.errors import EmptyMemory, MemoireError, NotEnoughSamples, ProtocolError
from memoire.limits import HELD_BYTES, Limits
from memoire.replay import dataset
from memoire.replay.dataset import KeptEpisode
from memoire.replay.episodes import EpisodeBatch, sample
from memoire.replay.memory import MAX_ROWS, Memory
from memoire.replay.memory_state import SavedLayout, layout_of
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Annealing
from memoire.replay.schema import Schema
from memoire.tables.base import (
    DEFAULTS,
    MAX_INSPECTED,
    BelongsToRun,
    DrawsAtRandom,
    DrawsBatches,
    DrawsEpisodes,
    HasLayout,
    HasRoom,
    KeepsLayout,
    PoolCounts,
    PoolStats,
    RecordBody,
    RestoreOutcome,
    SavedRecord,
    ShowsSamples,
    TakesPriorities,
    TakesPushes,
)
from memoire.tables.draws import MAX_BATCH, PooledBatch
from memoire.tables.inspection import Distribution, PeekedSample
from memoire.tables.pools import LastingPool
from memoire.wire import _bytes, messages
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.parts import Payload
from memoire.wire.receivers import ReplyPage

from . import memory as episode_inspection
from .memory import (
    ByteRoom,
    CheckedEpisode,
    NamedMemory,
    checked_episode,
    drawn_for,
    episode_checksum,
    holds,
    move_episodes,
    sampled,
    seed_of,
    sums_of,
    wait_reason,
)
from .saving import RestoredEpisodes, pack, pack_layout, put_back

T = TypeVar("T")


class EpisodePool(
    LastingPool, TakesPushes, HasRoom, BelongsToRun, DrawsAtRandom, DrawsBatches, DrawsEpisodes, TakesPriorities,
    ShowsSamples, KeepsLayout,
):  # fmt: skip
    """Pool of the episodes of one table. Thread-safe; samples are copied without the GIL.

    Args:
        schema, parameters: Schema and parameters of the entries; `configure` changes the parameters.
        capacity: Maximum number of entries; 0: as many as fit into `byte_limit`, at most `MAX_DEFAULT_ENTRIES`.
        byte_limit: Bytes for entries, `schema.entry_bytes` and `ENTRY_OVERHEAD` each. The rest is for values of ragged
            columns, or half of the bytes if `capacity` is 0. Final states of episodes are not counted.
        client_timeout: Seconds of silence after which a client is no longer counted. The client's data stays.
        clock: Monotonic clock in seconds.
        seed: Seed of the draws; None for a random one.

    Raises:
        ParameterError: no entry fits, or `capacity` entries do not fit.
    """

    byte_limit: int

    def __init__(
        self,
        schema: Schema,
        parameters: Parameters | None = None,
        *,
        capacity: int = 0,
        byte_limit: int = HELD_BYTES,
        client_timeout: float = DEFAULTS.client_timeout,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        super().__init__(client_timeout, clock)
        self.schema, self.byte_limit = schema, byte_limit
        self._room = ByteRoom(schema, whole("capacity", capacity, 0, MAX_ROWS))
        self._rng = random.Random()  # generator for inspection, which any thread may use
        self._changing = threading.Lock()  # held by calls that add episodes or replace the memory
        self._seed, self._made = seed, 0
        self.now = self._make(self._room.entries(byte_limit), byte_limit, parameters)
        """Current memory and owner id. A change of the number of entries makes a new memory with a new owner id."""
        self._put_back: dict[int, int] = {}  # restored episodes' numbers by `episode_checksum`
        # Everything below belongs to the waiter's lock.
        self._annealing = Annealing()
        self._counts = PoolCounts()
        self._sequence = 0  # number of the newest sums sent to a reader

    def _make(self, entries: int, byte_limit: int, parameters: Parameters | None) -> NamedMemory:
        limit, seed = self._room.value_bytes(entries, byte_limit), seed_of(self._seed, self._made)
        memory = Memory(self.schema, entries, parameters, seed=seed, ragged_limit=limit, container=None)
        self._made += 1
        return NamedMemory(memory, secrets.token_bytes(16))

    def _replace(self, fresh: NamedMemory) -> None:
        fresh.memory.saw_model(self.memory.newest_model)
        self.now = fresh

    @property
    def memory(self) -> Memory:
        """Current memory; `limit` and `clear` replace it."""
        return self.now.memory

    @property
    def owner(self) -> bytes:
        """Owner part of the ids of this memory's entries, 16 bytes. A new memory has a new owner."""
        return self.now.owner

    @property
    def parameters(self) -> Parameters:
        """Parameters of the current draws."""
        return self.memory.parameters

    @property
    def capacity(self) -> int:
        """Maximum number of entries in the memory."""
        return self.memory.capacity

    @property
    def least_bytes(self) -> int:
        """Smallest byte limit: for the requested capacity, or for one entry."""
        return self._room.least_bytes

    def join_budget(self, budget: ByteBudget, name: str) -> None:
        """Join a byte budget under this name with all bytes that entries may take, because memory is allocated once."""
        budget.add_holder(name, measure=self._reserved)

    def _reserved(self) -> int:
        entries = self.capacity
        return entries * self._room.entry_bytes + self._room.value_bytes(entries, self.byte_limit)

    # Received messages

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> CheckedEpisode:
        """Check a received episode completely and return it for `add`; see `containers.check`.

        Raises:
            ProtocolError: the episode is invalid. No other error is raised, whatever the bytes.
        """
        memory = self.memory
        fits = memory.schema, memory.parameters, memory.capacity
        return checked_episode(body, payload, *fits, limits=limits, checksum=checksum)

    def add(self, client_id: bytes, sequence: int, checked: CheckedEpisode) -> int:
        """Store a checked episode, evicting the oldest ones for room; return the number of evicted episodes.

        Raises:
            ProtocolError: the memory has meanwhile become too small for the episode.
        """
        with _core.Held(self._changing):
            if self._waiter.is_closed:
                return 0
            memory, episode = self.memory, checked.episode
            values = [episode.columns[name] for name in self.schema.entry_names]
            with memory.held():
                episodes, entries = memory.num_episodes, memory.num_entries
                try:
                    memory.insert(values, episode.init_w, episode.model_version, checked.age, **episode.close_arguments)
                except MemoireError as error:
                    raise ProtocolError("too_large", str(error)) from error
                evicted = episodes + 1 - memory.num_episodes
                lost = entries + checked.samples - memory.num_entries
            with self._waiter.lock:
                self._counts.add(evicted, lost)
                self._hear(client_id)
                self._waiter.wake_waiters()
            return evicted

    # Changes of parameters and limits

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Compute weights and windows of all entries by new parameters. Only a lower `max_episode` evicts episodes.
        Return the number of evicted episodes.
        """

        def configured() -> int:
            memory = self.memory
            with memory.held():
                before = memory.num_episodes
                memory.configure(parameters)
                return before - memory.num_episodes

        return self._changed(configured)

    def limit_bytes(self, byte_limit: int) -> int:
        """Set the byte limit; evict the oldest episodes if needed and return their number.

        Another number of entries needs a new memory. The pool copies the episodes one by one, holds both memories until
        the copy is complete, and delays received episodes meanwhile. Ids drawn before become stale.

        Raises:
            ParameterError: too few bytes for one entry or the requested capacity; nothing was changed.
        """

        def limited() -> int:
            entries, old = self._room.entries(byte_limit), self.memory
            before, fresh = old.num_episodes, old
            if entries == old.capacity:
                old.limit_ragged(self._room.value_bytes(entries, byte_limit))
            else:
                named = self._make(entries, byte_limit, old.parameters)
                fresh, numbers = named.memory, move_episodes(old, named.memory)
                self._put_back = {name: numbers[was] for name, was in self._put_back.items() if was in numbers}
                self._replace(named)
            self.byte_limit = byte_limit
            return before - fresh.num_episodes

        return self._changed(limited)

    def clear(self) -> int:
        """Discard all episodes and return their number."""

        def cleared() -> int:
            old = self.memory
            self._put_back.clear()
            self._replace(self._make(old.capacity, self.byte_limit, old.parameters))
            return old.num_episodes

        return self._changed(cleared)

    def _changed(self, change: Callable[[], int]) -> int:
        """Apply a change of the memory, wake waiting draws, and return the result of `change`."""
        with _core.Held(self._changing):
            result = change()
            with self._waiter.lock:
                self._waiter.wake_waiters()
            return result

    def saw_model(self, version: int) -> None:
        """Record the newest model version, from which `Parameters.max_model_lag` counts."""
        self.memory.saw_model(version)

    def apply(self, owner: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32]) -> tuple[int, int] | None:
        """Set priorities from a learner's TD errors, `numbers` and `td_errors` [N]; return (applied, stale).

        Return None if `owner` is not the current memory's.
        """
        memory, name = self.now
        if owner != name:
            return None
        applied, stale = memory.update_priorities(numbers, td_errors)
        with self._waiter.lock:
            self._counts.applied += applied
            self._counts.stale += stale
            self._waiter.wake_waiters()  # updates may give entries their first weight
        return applied, stale

    # Snapshots

    def state(self) -> dict[str, Any]:
        """Return the state of drawing beside the held data: fields of a snapshot's `TableRecord`."""
        with self._waiter.lock:
            memory = self.memory
            figures = {"newest_model": memory.newest_model, "max_priority": memory.max_priority}
            return self._annealing.state() | figures

    def restore_state(self, state: Any, *, is_same: bool) -> None:
        """Continue from a value of `state`, before any record is restored. The saved layout has the generator."""
        with _core.Held(self._changing):
            self.memory.saw_model(state.newest_model)
            self.memory._go_on(state.max_priority)
        with self._waiter.lock:
            if not self._annealing.batches:
                self._annealing.restore_state(state.course, state.batches)

    @property
    def is_untouched(self) -> bool:
        """True if the pool never received an episode or drew a batch."""
        with self._waiter.lock:
            return not (self.memory.generated or self._annealing.batches)

    def saved_layout(self) -> tuple[dict[str, Any], bytes, int]:
        """Return places and weights of entries for a `TableRecord`, with a checksum of their facts."""
        memory = self.memory
        with memory.held():
            layout, facts = layout_of(memory), _bytes.checksum(memory.contents()["meta"].view(np.uint8))
        return *pack_layout(layout.in_order()), facts

    def empty_copy(
        self,
        body: HasLayout,
        payload: bytes,
        parameters: Parameters,
        *,
        keeps_generator: bool,
        wrong: Callable[[str], Exception],
    ) -> RestoredEpisodes:
        """Return an empty copy of a saved memory, to be filled by `put` with each episode in its former place.

        Args:
            body, payload: Saved layout of the entries.
            parameters: Parameters of the saved memory.
            keeps_generator: True if draws continue with the generator of this pool.
            wrong: Function that makes the exception to raise from a description of the damage.
        """

        def empty_copy(layout: SavedLayout) -> tuple[Memory, SavedLayout] | None:
            old, numbers = self.memory, layout.numbers
            mine = old._counters()["random"], old.generator.bit_generator.state
            form = {"capacity": old.capacity, "page_rows": old.contents()["page_rows"], "live": old.live}
            if any(numbers[name] != value for name, value in form.items()):
                return None
            numbers = numbers | {"ragged_limit": old.ragged_limit}
            if keeps_generator:
                numbers |= {"engine": numbers["engine"] | {"random": mine[0]}, "generator": mine[1]}
            return Memory(self.schema, old.capacity, parameters, container=None), SavedLayout(numbers, layout.arrays)

        return RestoredEpisodes(empty_copy, self.schema, body, payload, wrong)

    def replace_memory(self, memory: Memory, names: Mapping[int, tuple[bytes, int]]) -> bool:
        """Replace the pool's memory by a restored one. Return False, changing nothing, if data arrived meanwhile.

        Args:
            names: Former owner and number of each episode, by the number of the episode's first entry.
        """
        with _core.Held(self._changing):
            self._waiter.check_open()
            if not self.is_untouched:
                return False
            memory.limit_ragged(self.memory.ragged_limit)
            self._replace(NamedMemory(memory, secrets.token_bytes(16)))
            self._put_back = {episode_checksum(*name): number for number, name in names.items()}
            with self._waiter.lock:
                self._counts.added += len(names)
                self._waiter.wake_waiters()
            return True

    def reseed(self, seed: int) -> None:
        """Seed the draws as at the pool's creation. Call before the first episode."""
        with _core.Held(self._changing):
            self._seed, self._made = seed, 0
            old = self.memory
            self._replace(self._make(old.capacity, self.byte_limit, old.parameters))

    def walk(self) -> Iterator[KeptEpisode]:
        """Yield every episode with all facts of its entries, the oldest first; see `dataset.walk`."""
        memory, owner = self.now
        for number, episode in dataset.walk(memory):
            yield KeptEpisode(owner, number, episode)

    def put_back(self, kept: KeptEpisode) -> tuple[bool, int]:
        """Store an episode from `walk`, of this pool or another, with its priorities and ages, under new ids.

        Returns:
            True if the pool did not hold the episode, restored or not, and the number of episodes evicted for room.

        Raises:
            MemoireError: the episode does not fit.
            Closed: `close` was called.
        """
        with _core.Held(self._changing):
            self._waiter.check_open()
            name, (memory, owner) = episode_checksum(kept.owner, kept.number), self.now
            number = kept.number if kept.owner == owner else self._put_back.get(name)
            if number is not None and holds(memory, number):
                return False, 0
            with memory.held():
                before = memory.num_episodes
                number = int(dataset.put(memory, kept.episode)[0])
                evicted = before + 1 - memory.num_episodes
            self._put_back[name] = number
            if len(self._put_back) > 2 * memory.num_episodes + 100:  # most are evicted by now
                self._put_back = {name: number for name, number in self._put_back.items() if holds(memory, number)}
            with self._waiter.lock:
                self._counts.added += 1
                self._counts.overwritten += evicted
                self._waiter.wake_waiters()
            return True, evicted

    def records(self) -> Iterator[tuple[RecordBody, bytes]]:
        """Yield body and payload of each episode."""
        return (pack(kept, self.schema) for kept in self.walk())

    def put_record(self, record: SavedRecord) -> RestoreOutcome:
        """Restore an episode of a snapshot."""
        return put_back(record, self.schema, self.put_back)

    # Draws

    def entries(self) -> int:
        """Return the number of entries that can be drawn."""
        return self.memory.num_positive

    def get(
        self,
        samples: int,
        *,
        timeout: float | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> PooledBatch:
        """Draw a batch, with replacement, as `Buffer.sample` does.

        Args:
            samples: At least 1.
            timeout: Seconds to wait until an entry can be drawn; None does not wait.
            out: The caller's arrays [B, ...], B = `samples`, by their names in a `Batch`; other arrays are allocated.

        Raises:
            ParameterError: an array of `out` does not fit.
            NotEnoughSamples: no entry can be drawn, also after `timeout`.
            Closed: `close` was called, also from another thread while waiting.
        """
        samples = whole("batch_size", samples, 1, MAX_BATCH)
        places = None if out is None else {name: out[name] for name in out if name != "ids"}  # ids are computed
        return self._when_there(samples, timeout, lambda now: self._pooled(now, samples, places))

    def _pooled(self, now: NamedMemory, samples: int, places: Mapping[str, NDArray[Any]] | None) -> PooledBatch:
        drawn = sampled(now, samples, places)
        with self._waiter.lock:
            beta = self._annealing.next(drawn.parameters)
            self._counts.drawn += samples
        return drawn.pooled(beta)

    def sample_episodes(
        self,
        count: int,
        update: Callable[[NDArray[Any], Any], Any],
        *,
        group: str | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
    ) -> EpisodeBatch:
        """Draw whole episodes, or groups of episodes, as `Buffer.sample_episodes` does.

        Args:
            update: Function that the batch's `update_priorities` calls with ids and errors of N entries, both [N].
            timeout: Seconds to wait until episodes can be drawn; None does not wait.

        Raises: as `get`, and ParameterError as `Buffer.sample_episodes`.
        """

        def draw(now: NamedMemory) -> EpisodeBatch:
            return sample(now.memory, count, self._beta, update, group=group, group_size=group_size, owner=now.owner)

        batch = self._when_there(count, timeout, draw)
        with self._waiter.lock:
            self._counts.drawn += int(batch["mask"].sum())
        return batch

    def _beta(self, parameters: Parameters) -> float:
        with self._waiter.lock:
            return self._annealing.next(parameters)

    def _when_there(self, samples: int, timeout: float | None, draw: Callable[[NamedMemory], T]) -> T:
        """Return the result of `draw` on the current memory, as soon as something can be drawn."""
        began = time.monotonic()
        while True:
            with self._waiter.lock:
                self._waiter.check_open()
                changes, now = self._waiter.changes, self.now
            try:
                return draw(now)
            except EmptyMemory as error:
                self._await_change(samples, changes, began, timeout or 0.0, error)

    def _await_change(self, samples: int, changes: int, began: float, timeout: float, error: EmptyMemory) -> None:
        """Wait for a change after `changes`, or raise NotEnoughSamples with the reason at the timeout."""
        with self._waiter.lock:
            while self._waiter.changes == changes:
                if not self._waiter.wait(began + timeout):
                    self._counts.misses += 1
                    waited, stored = time.monotonic() - began if timeout else 0.0, self.memory.num_episodes
                    reason = wait_reason(error, stored, len(self._clients))
                    reason += self.memory.parameters.lag_in_words(self.memory.newest_model)
                    raise NotEnoughSamples(samples, 0, stored, len(self._clients), waited, reason)

    # Readers: learners that draw from several pools, over the network

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1), wanted: int | None = None
    ) -> NDArray[np.void]:
        """Return a row of `rows.CLIENT_SUMS` for all episodes, [1], or no row, [0], if nothing can be drawn.

        Nothing is reserved, because entries can be drawn any number of times, or `max_times_sampled` times by the first
        readers. Readers that divide the clients (`part`) all draw from the whole memory.
        """
        with self._waiter.lock:
            now = self.now
            self._sequence += 1
            sequence = self._sequence
        return sums_of(now, sequence)

    def draw_counts(
        self,
        reader: bytes,
        counts: NDArray[np.void],
        *,
        now: float = 0.0,
        compression: str = "none",
        page: ReplyPage | None = None,
    ) -> Payload | None:
        """Draw for a reader; return a DRAWN payload, or None if nothing can be drawn or the rows name another memory.

        Args:
            counts: Rows [C] of `rows.CLIENT_COUNTS`, one for each client.
            now: Unix seconds, written into the container.
            compression: Codec of frames, which the reader must have.
            page: Page of the reply that will hold the samples.

        Raises:
            ProtocolError: more samples than `MAX_DRAWN`, or than the page has room for; no draw is counted.
            Closed: `close` was called.
        """
        with self._waiter.lock:
            self._waiter.check_open()
        payload, drawn = drawn_for(self.now, counts, now=now, compression=compression, page=page)
        with self._waiter.lock:
            self._counts.drawn += drawn
        return payload

    # Inspection

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """Return the distribution of all entries, or of evenly spaced ones."""
        return episode_inspection.distribution_of(self.memory, self._rng, most)

    def peek(self, of: tuple[bytes, int] | None = None) -> PeekedSample | None:
        """Return a copy of a random entry's sample, by weight among evenly spaced entries, or of this owner's entry."""
        with self._waiter.lock:
            now = self.now
            beta = now.memory.parameters.beta(self._annealing.batches)
        if of is not None and of[0] != now.owner:
            return None
        return episode_inspection.copied(now, beta, self._rng, None if of is None else of[1])

    def stats(self) -> PoolStats:
        """Return frozen figures of the pool; `caches` counts episodes."""
        memory = self.memory
        with memory.held():
            entries, episodes, positives = memory.num_entries, memory.num_episodes, memory.num_positive
        held_bytes = entries * self._room.entry_bytes + memory.ragged_bytes
        held = {"caches": episodes, "bytes": held_bytes, "unused": positives, "held": entries}
        with self._waiter.lock:
            return PoolStats(clients=len(self._clients), **held, **asdict(self._counts))
