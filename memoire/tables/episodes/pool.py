"""Whole episodes of all clients of a table, in one memory at the server: drawn from here and by readers far away.

    EPISODE ──check──▶ add ──▶ Memory ──▶ get           a batch, as a Buffer would draw it
                                 ▲   └──▶ draw_counts   samples for a reader, who draws from several servers
                  TD errors ── apply

Every frame comes once, and is drawn as often as somebody likes. The engine that computes returns, priorities and
windows is an actor's own, so that the same entries give the same samples.

Ids are (owner, number): `owner` is 16 random bytes that name this memory, as a client's id names a client's. Numbers
never come again under one owner, and a memory that begins anew has another one: old ids are stale, never wrong.
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
    PutBack,
    RecordBody,
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
from memoire.wire.receivers import Page

from . import memory as episode_inspection
from .memory import (
    ByteRoom,
    CheckedEpisode,
    NamedMemory,
    checked_episode,
    drawn_for,
    has,
    move_episodes,
    name_of,
    sampled,
    seed_of,
    sums_of,
    why_nothing,
)
from .saving import TakenTable, pack, pack_layout, put_back

T = TypeVar("T")


class EpisodePool(
    LastingPool, TakesPushes, HasRoom, BelongsToRun, DrawsAtRandom, DrawsBatches, DrawsEpisodes, TakesPriorities,
    ShowsSamples, KeepsLayout,
):  # fmt: skip
    """The episodes of one table. Thread-safe; samples are copied without the GIL.

    Args:
        schema, parameters: Of the entries; `configure` changes the parameters.
        capacity: Entries there is room for; 0: as many as `byte_limit` has room for, `MAX_DEFAULT_ENTRIES` at most.
        byte_limit: Bytes that entries may take, `schema.entry_bytes` and `ENTRY_OVERHEAD` each; what is left of it is
            for the values of ragged columns, half of it where no capacity is asked for. The state in which an
            episode ended comes on top.
        client_timeout: Seconds of silence after which a client is not counted any more. What it sent stays.
        clock: Seconds that only grow.
        seed: Of the draw; None is a random one.

    Raises:
        ParameterError: not one entry fits, or `capacity` does not.
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
        self._rng = random.Random()  # of looks; any thread may draw a number
        self._changing = threading.Lock()  # one at a time of those who add, or replace the memory
        self._seed, self._made = seed, 0
        self.now = self._make(self._room.entries(byte_limit), byte_limit, parameters)
        """The memory of this moment. Another number of entries is another one, with another name."""
        self._put_back: dict[int, int] = {}  # checksum of the name of each episode that came from a file: its number
        # Everything below belongs to the waiter's lock.
        self._annealing = Annealing()
        self._counts = PoolCounts()
        self._sequence = 0  # of the newest sums that a reader was given

    def _make(self, entries: int, byte_limit: int, parameters: Parameters | None) -> NamedMemory:
        limit, seed = self._room.value_bytes(entries, byte_limit), seed_of(self._seed, self._made)
        made = Memory(self.schema, entries, parameters, seed=seed, ragged_limit=limit, container=None)
        self._made += 1
        return NamedMemory(made, secrets.token_bytes(16))

    def _replace(self, fresh: NamedMemory) -> None:
        fresh.memory.saw_model(self.memory.newest_model)
        self.now = fresh

    @property
    def memory(self) -> Memory:
        """The engine, as it is now: `limit` and `clear` replace it."""
        return self.now.memory

    @property
    def owner(self) -> bytes:
        """What ids of this memory's entries call it, 16 bytes; changes when numbers begin anew."""
        return self.now.owner

    @property
    def parameters(self) -> Parameters:
        """Those that draws follow now."""
        return self.memory.parameters

    @property
    def capacity(self) -> int:
        """Entries there is room for."""
        return self.memory.capacity

    @property
    def least_bytes(self) -> int:
        """Bytes that it can be limited to at least: for the capacity that was asked for, or one entry."""
        return self._room.least_bytes

    def join(self, budget: ByteBudget, name: str) -> None:
        """Be a holder of that name from now on, of all bytes that its entries may take: room for them is made once."""
        budget.holder(name, measure=self._reserved)

    def _reserved(self) -> int:
        entries = self.capacity
        return entries * self._room.entry_bytes + self._room.value_bytes(entries, self.byte_limit)

    # What comes in

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> CheckedEpisode:
        """A received episode, completely checked, ready for `add`; see `unpack.check`.

        Raises:
            ProtocolError: and nothing else, whatever the bytes.
        """
        memory = self.memory
        fits = memory.schema, memory.parameters, memory.capacity
        return checked_episode(body, payload, *fits, limits=limits, checksum=checksum)

    def add(self, client_id: bytes, sequence: int, checked: CheckedEpisode) -> int:
        """Store a checked episode; the oldest make room. Returns how many left.

        Raises:
            ProtocolError: the memory has become too small for it meanwhile.
        """
        with _core.Held(self._changing):
            if self._waiter.is_closed:
                return 0
            memory, episode = self.memory, checked.episode
            values = [episode.columns[name] for name in self.schema.entry_names]
            with memory.held():
                episodes, entries = memory.num_episodes, memory.num_entries
                try:
                    memory.insert(values, episode.init_w, episode.model_version, checked.age, **episode.end)
                except MemoireError as error:
                    raise ProtocolError("too_large", str(error)) from error
                gone = episodes + 1 - memory.num_episodes
                lost = entries + checked.samples - memory.num_entries
            with self._waiter.lock:
                self._counts.add(gone, lost)
                self._hear(client_id)
                self._waiter.tell()
            return gone

    # What is changed

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Weigh and cut everything stored by new parameters; nothing goes but what `max_episode` says. Returns how many
        episodes did.
        """

        def configured() -> int:
            memory = self.memory
            with memory.held():
                before = memory.num_episodes
                memory.configure(parameters)
                return before - memory.num_episodes

        return self._changed(configured)

    def limit(self, byte_limit: int) -> int:
        """Have room for this many bytes from now on; returns how many episodes had to go, the oldest first.

        Another number of entries is another memory: episodes move one by one, the memory is there twice until the last
        one has moved, what comes in waits, and ids drawn before are stale.

        Raises:
            ParameterError: too few for one entry, or for the capacity that was asked for. Nothing was changed.
        """

        def limited() -> int:
            entries, old = self._room.entries(byte_limit), self.memory
            before, fresh = old.num_episodes, old
            if entries == old.capacity:
                old.limit_ragged(self._room.value_bytes(entries, byte_limit))
            else:
                made = self._make(entries, byte_limit, old.parameters)
                fresh, numbers = made.memory, move_episodes(old, made.memory)
                self._put_back = {name: numbers[was] for name, was in self._put_back.items() if was in numbers}
                self._replace(made)
            self.byte_limit = byte_limit
            return before - fresh.num_episodes

        return self._changed(limited)

    def clear(self) -> int:
        """Let all episodes go; returns how many."""

        def cleared() -> int:
            old = self.memory
            self._put_back.clear()
            self._replace(self._make(old.capacity, self.byte_limit, old.parameters))
            return old.num_episodes

        return self._changed(cleared)

    def _changed(self, change: Callable[[], int]) -> int:
        """What a change of the memory returns; those who wait look again."""
        with _core.Held(self._changing):
            gone = change()
            with self._waiter.lock:
                self._waiter.tell()
            return gone

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts."""
        self.memory.saw_model(version)

    def apply(self, owner: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32]) -> tuple[int, int] | None:
        """Set the priorities of entries by a learner's TD errors, `numbers` and `td_errors` [N]: (applied, stale).

        None where `owner` is not, or no more, this memory.
        """
        memory, name = self.now
        if owner != name:
            return None
        applied, stale = memory.update_priorities(numbers, td_errors)
        with self._waiter.lock:
            self._counts.applied += applied
            self._counts.stale += stale
            self._waiter.tell()  # there may have been nothing of a weight before
        return applied, stale

    # Snapshots

    def state(self) -> dict[str, Any]:
        """Return the state of drawing beside the held data: fields of a snapshot's `TableRecord`."""
        with self._waiter.lock:
            memory = self.memory
            figures = {"newest_model": memory.newest_model, "max_priority": memory.max_priority}
            return self._annealing.state() | figures

    def go_on_from(self, state: Any, *, is_same: bool) -> None:
        """Take up what `state` said; before anything is put back. The generator is part of the memory's layout."""
        with _core.Held(self._changing):
            self.memory.saw_model(state.newest_model)
            self.memory._go_on(state.max_priority)
        with self._waiter.lock:
            if not self._annealing.batches:
                self._annealing.go_on_from(state.course, state.batches)

    @property
    def is_untouched(self) -> bool:
        """Whether no episode ever came in, and nothing was drawn."""
        with self._waiter.lock:
            return not (self.memory.generated or self._annealing.batches)

    def saved_layout(self) -> tuple[dict[str, Any], bytes, int]:
        """Where entries lie and what each weighs, as a `TableRecord` has it; and a checksum of all of it."""
        memory = self.memory
        with memory.held():
            layout, facts = layout_of(memory), _bytes.checksum(memory.contents()["meta"].view(np.uint8))
        return *pack_layout(layout.in_order()), facts

    def heir(
        self,
        body: HasLayout,
        payload: bytes,
        parameters: Parameters,
        *,
        keeps_generator: bool,
        wrong: Callable[[str], Exception],
    ) -> TakenTable:
        """Return what is to become what a memory was that was saved: each episode comes where it lay.

        Args:
            body, payload: What the file says of where its entries lie.
            parameters: Of that memory.
            keeps_generator: Whether draws follow from the generator of this pool.
            wrong: Makes the error to raise, of what is wrong in the file.
        """

        def heir(layout: SavedLayout) -> tuple[Memory, SavedLayout] | None:
            old, numbers = self.memory, layout.numbers
            mine = old._counters()["random"], old.generator.bit_generator.state
            form = {"capacity": old.capacity, "page_rows": old.contents()["page_rows"], "live": old.live}
            if any(numbers[name] != value for name, value in form.items()):
                return None
            numbers = numbers | {"ragged_limit": old.ragged_limit}
            if keeps_generator:
                numbers |= {"engine": numbers["engine"] | {"random": mine[0]}, "generator": mine[1]}
            return Memory(self.schema, old.capacity, parameters, container=None), SavedLayout(numbers, layout.arrays)

        return TakenTable(heir, self.schema, body, payload, wrong)

    def take_over(self, memory: Memory, names: Mapping[int, tuple[bytes, int]]) -> bool:
        """Go on with an heir that has taken over what another memory was. False if something came in meanwhile: then
        nothing was changed.

        Args:
            names: The former name of each episode, owner and number, by the number of its first entry.
        """
        with _core.Held(self._changing):
            self._waiter.check_open()
            if not self.is_untouched:
                return False
            memory.limit_ragged(self.memory.ragged_limit)
            self._replace(NamedMemory(memory, secrets.token_bytes(16)))
            self._put_back = {name_of(*name): number for number, name in names.items()}
            with self._waiter.lock:
                self._counts.added += len(names)
                self._waiter.tell()
            return True

    def reseed(self, seed: int) -> None:
        """Draw as a pool that was made with this seed; before the first episode."""
        with _core.Held(self._changing):
            self._seed, self._made = seed, 0
            old = self.memory
            self._replace(self._make(old.capacity, self.byte_limit, old.parameters))

    def walk(self) -> Iterator[KeptEpisode]:
        """Every episode with all that is known of its entries, the oldest first; see `dataset.walk`."""
        memory, owner = self.now
        for number, episode in dataset.walk(memory):
            yield KeptEpisode(owner, number, episode)

    def put_back(self, kept: KeptEpisode) -> tuple[bool, int]:
        """Store an episode that was walked over, here or elsewhere, with its priorities and ages. Ids are new.

        Returns:
            Whether it was not here already (also if it was put back before); and how many left to make room.

        Raises:
            MemoireError: it does not fit.
            Closed: `close` was called.
        """
        with _core.Held(self._changing):
            self._waiter.check_open()
            name, (memory, owner) = name_of(kept.owner, kept.number), self.now
            number = kept.number if kept.owner == owner else self._put_back.get(name)
            if number is not None and has(memory, number):
                return False, 0
            with memory.held():
                before = memory.num_episodes
                number = int(dataset.put(memory, kept.episode)[0])
                gone = before + 1 - memory.num_episodes
            self._put_back[name] = number
            if len(self._put_back) > 2 * memory.num_episodes + 100:  # most of them have left since
                self._put_back = {name: number for name, number in self._put_back.items() if has(memory, number)}
            with self._waiter.lock:
                self._counts.added += 1
                self._counts.overwritten += gone
                self._waiter.tell()
            return True, gone

    def records(self) -> Iterator[tuple[RecordBody, bytes]]:
        """Body and payload of each."""
        return (pack(kept, self.schema) for kept in self.walk())

    def put_record(self, record: SavedRecord) -> PutBack:
        """Hold an episode of a snapshot."""
        return put_back(record, self.schema, self.put_back)

    # What goes out

    def entries(self) -> int:
        """Entries that can be drawn."""
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
            timeout: Seconds to wait until there is anything to draw; None does not wait.
            out: The caller's arrays [B, ...], B = `samples`, by the names they have in a `Batch`; others are made new.

        Raises:
            ParameterError: an array of `out` does not fit.
            NotEnoughSamples: there is nothing to draw, also after `timeout`.
            Closed: `close` was called, also from another thread while waiting.
        """
        samples = whole("batch_size", samples, 1, MAX_BATCH)
        places = None if out is None else {name: out[name] for name in out if name != "ids"}  # made here
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
        """Draw whole episodes, or groups of them, as `Buffer.sample_episodes` does.

        Args:
            update: What the batch's `update_priorities` calls with ids and errors of N entries, both [N].
            timeout: Seconds to wait until there are any; None does not wait.

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
        """What `draw` returns of the memory, as soon as there is anything to draw."""
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
        """Wait until something has changed since `changes`, or say what is missing."""
        with self._waiter.lock:
            while self._waiter.changes == changes:
                if not self._waiter.wait(began + timeout):
                    self._counts.misses += 1
                    waited, stored = time.monotonic() - began if timeout else 0.0, self.memory.num_episodes
                    what = why_nothing(error, stored, len(self._clients))
                    what += self.memory.parameters.lag_in_words(self.memory.newest_model)
                    raise NotEnoughSamples(samples, 0, stored, len(self._clients), waited, what)

    # Readers: learners that draw from several pools, over the network

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1), wanted: int | None = None
    ) -> NDArray[np.void]:
        """What a reader may draw: a row of `rows.CLIENT_SUMS` for all episodes, [1]; [0] while nothing can be drawn.

        Nothing is kept for anybody, since entries can be drawn any number of times, or `max_times_sampled` by those who
        come first. Learners that part the clients among them (`part`) all draw from the whole memory.
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
        page: Page | None = None,
    ) -> Payload | None:
        """Draw for a reader: the payload of a DRAWN message, or None where there is nothing, or nothing of this memory
        was asked for.

        Args:
            counts: Rows [C] of `rows.CLIENT_COUNTS`, one for each client.
            now: Unix seconds, written into the container.
            compression: Of frames, which the reader must have.
            page: Of the reply that is to have them.

        Raises:
            ProtocolError: more than `MAX_DRAWN` samples were asked for, or than the page has room for; none counts as
                drawn.
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
        """How entries are spread: all of them, or evenly spaced ones."""
        return episode_inspection.distribution_of(self.memory, self._rng, most)

    def peek(self, of: tuple[bytes, int] | None = None) -> PeekedSample | None:
        """A copy of a random entry's sample, by weight among evenly spaced ones, or of this owner's entry."""
        with self._waiter.lock:
            now = self.now
            beta = now.memory.parameters.beta(self._annealing.batches)
        if of is not None and of[0] != now.owner:
            return None
        return episode_inspection.copied(now, beta, self._rng, None if of is None else of[1])

    def stats(self) -> PoolStats:
        """A frozen picture; what is called caches elsewhere are episodes here."""
        memory = self.memory
        with memory.held():
            entries, episodes, positives = memory.num_entries, memory.num_episodes, memory.num_positive
        held_bytes = entries * self._room.entry_bytes + memory.ragged_bytes
        held = {"caches": episodes, "bytes": held_bytes, "unused": positives, "held": entries}
        with self._waiter.lock:
            return PoolStats(clients=len(self._clients), **held, **asdict(self._counts))
