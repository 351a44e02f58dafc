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

import math
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.arguments import whole
from memoire.errors import (
    Closed,
    EmptyMemory,
    EpisodeTooLong,
    MemoireError,
    NotEnoughSamples,
    ParameterError,
    ProtocolError,
    StaleEntry,
    UsedUp,
    WrongType,
)
from memoire.limits import Limits
from memoire.replay import dataset
from memoire.replay.batch import ID, Gathered
from memoire.replay.dataset import KeptEpisode
from memoire.replay.episodes import EpisodeBatch, sample
from memoire.replay.memory import MOST_ROWS, Memory
from memoire.replay.parameters import Parameters, reward_size
from memoire.replay.sampling import Annealing
from memoire.replay.schema import Schema, is_finite
from memoire.wire import _bytes, messages, pack, unpack
from memoire.wire.layout import layout_of
from memoire.wire.parts import Kind, Payload
from memoire.wire.rows import CLIENT_SUMS

from .draw import MOST_BATCH, Pooled
from .inspection import MOST_LOOKED, Distribution, Histogram, Peeked
from .interface import DEFAULTS
from .readers import check_count
from .stats import PoolStats

T = TypeVar("T")
ENTRY_OVERHEAD: Final = 112
"""Bytes that an entry takes beside its columns: number, times and priority, and its place in the trees."""
MOST_UNASKED: Final = 1_000_000
"""Entries that a pool has room for at most where nobody said a number: their bookkeeping takes memory at once."""
LOOK_EVERY: Final = 1.0
"""Seconds between two looks for silent clients."""
ANY_NUMBER: Final = 1
"""Flag of a row of `rows.CLIENT_SUMS`: any number of samples can be drawn."""


@dataclass(frozen=True, slots=True)
class CheckedEpisode:
    """A received episode that fits; its arrays may lie in the received buffer."""

    episode: dataset.Episode
    age: NDArray[np.float32]
    """[T] seconds since the entries were recorded."""
    samples: int
    """Entries."""


class EpisodePool:
    """The episodes of one table. Thread-safe; samples are copied without the GIL.

    Args:
        schema, parameters: Of the entries; `configure` changes the parameters.
        capacity: Entries there is room for; 0: as many as `byte_limit` has room for, `MOST_UNASKED` at most.
        byte_limit: Bytes that entries may take, `schema.entry_bytes` and `ENTRY_OVERHEAD` each; what is left of it is
            for the values of ragged columns, half of it where no capacity is asked for. The state in which an
            episode ended comes on top.
        client_timeout: Seconds of silence after which a client is not counted any more. What it sent stays.
        clock: Seconds that only grow.
        seed: Of the draw; None is a random one.

    Raises:
        ParameterError: not one entry fits, or `capacity` does not.
    """

    def __init__(
        self,
        schema: Schema,
        parameters: Parameters | None = None,
        *,
        capacity: int = 0,
        byte_limit: int = DEFAULTS.held_bytes,
        client_timeout: float = DEFAULTS.client_timeout,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self.schema, self.client_timeout = schema, client_timeout
        self._clock = clock
        self._entry_bytes = schema.entry_bytes + ENTRY_OVERHEAD
        self._wanted = whole("capacity", capacity, 0, MOST_ROWS)
        self._seed = seed
        self._changing = threading.Lock()  # one at a time of those who add, or replace the memory
        self._filled = threading.Condition()  # guards all below
        self.byte_limit = byte_limit
        self._memory = self._make(self._fitting(byte_limit), byte_limit, parameters)
        self._owner = secrets.token_bytes(16)
        self._put_back: dict[int, int] = {}  # checksum of the name of each episode that came from a file: its number
        self._changes = 0  # whatever may have brought something to draw
        self._sequence = 0
        self._clients: dict[bytes, float] = {}  # when each was last heard
        self._looked = clock()
        self._annealing = Annealing()
        self._closed = False
        self._added = self._overwritten = self._overwritten_entries = self._misses = 0
        self._drawn = self._applied = self._stale = 0

    def _fitting(self, byte_limit: int) -> int:
        """Entries there is room for."""
        most = min(byte_limit // self._entry_bytes, MOST_ROWS)
        if byte_limit < self.least_bytes:
            expected = f"at least {self.least_bytes} for {max(1, self._wanted)} entries of {self._entry_bytes} bytes"
            raise ParameterError("byte_limit", byte_limit, expected)
        if self.schema.ragged:
            most = max(1, most // 2)
        return self._wanted or min(most, MOST_UNASKED)

    def _for_values(self, capacity: int, byte_limit: int) -> int:
        """Bytes that values of ragged columns may take; 0 where there are none."""
        return max(1, byte_limit - capacity * self._entry_bytes) if self.schema.ragged else 0

    def _make(self, capacity: int, byte_limit: int, parameters: Parameters | None) -> Memory:
        limit = self._for_values(capacity, byte_limit)
        return Memory(self.schema, capacity, parameters, seed=self._seed, ragged_limit=limit)

    # What there is

    @property
    def least_bytes(self) -> int:
        """Bytes that it can be limited to at least: for the capacity that was asked for, or one entry."""
        return self._entry_bytes * max(1, self._wanted)

    @property
    def memory(self) -> Memory:
        """The engine, as it is now: `limit` and `clear` replace it."""
        return self._memory

    @property
    def owner(self) -> bytes:
        """What ids of this memory's entries call it, 16 bytes; changes when numbers begin anew."""
        return self._owner

    @property
    def capacity(self) -> int:
        """Entries there is room for."""
        return self._memory.capacity

    @property
    def parameters(self) -> Parameters:
        """Those that draws follow now."""
        return self._memory.parameters

    def entries(self) -> int:
        """Entries that can be drawn."""
        return self._memory.num_positive

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts."""
        self._memory.saw_model(version)

    def stats(self) -> PoolStats:
        """A frozen picture; what is called caches elsewhere are episodes here."""
        memory = self._memory
        with memory.held():
            entries, episodes, positives = memory.num_entries, memory.num_episodes, memory.num_positive
        with self._filled:
            return PoolStats(
                clients=len(self._clients),
                caches=episodes,
                bytes=entries * self._entry_bytes + memory.ragged_bytes,
                unused=positives,
                held=entries,
                added=self._added,
                drawn=self._drawn,
                overwritten=self._overwritten,
                overwritten_samples=self._overwritten_entries,
                left=0,
                misses=self._misses,
                applied=self._applied,
                stale=self._stale,
            )

    # What comes in

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> CheckedEpisode:
        """A received episode, completely checked, ready for `add`; see `unpack.check`.

        Raises:
            ProtocolError: and nothing else, whatever the bytes.
        """
        if not isinstance(body, messages.Episode):
            raise ProtocolError("unexpected", f"{body.type.name} was pushed; this table stores whole episodes")
        layout = layout_of(self.schema, self.parameters, Kind.EPISODE, final=body.has_final)
        held = unpack.check(payload, layout, limits, checksum=checksum)
        entries, capacity = int(held.samples), self.capacity
        if entries > capacity:
            raise ProtocolError("too_large", f"an episode of {entries} entries; there is room for {capacity} in all")
        rows = unpack.read_episode(held, layout)
        for name in self.schema.finite:
            for values in (rows.columns[name], None if rows.final is None else rows.final.get(name)):
                if values is not None and not is_finite(values):
                    raise ProtocolError("value", f"column {name!r} is not finite")
        episode = dataset.Episode(
            columns=rows.columns,
            init_w=rows.init_w,
            priority=None,
            learned=np.zeros(entries, np.bool_),
            born=None,
            model_version=rows.model_version,
            multiplier=body.multiplier,
            terminated=body.terminated,
            final_state=rows.final,
            bootstrap_value=self._bootstrap(body),
            update_value=body.update_value,
            update_weight=body.update_weight,
        )
        return CheckedEpisode(episode, rows.age, entries)

    def _bootstrap(self, body: messages.Episode) -> NDArray[np.float32] | None:
        if body.bootstrap is None:
            return None
        shape = () if self.schema.reward is None else self.schema[self.schema.reward].shape
        with np.errstate(over="ignore"):
            value = np.array(body.bootstrap, np.float32)
        if value.size != reward_size(self.schema) or not np.isfinite(value).all():
            raise ProtocolError(
                "value", f"the value of the final state is not {reward_size(self.schema)} finite numbers"
            )
        if body.terminated and value.any():
            raise ProtocolError("value", "the value of a state after which nothing comes is not 0")
        return value.reshape(shape)

    def add(self, client_id: bytes, sequence: int, checked: CheckedEpisode) -> int:
        """Store a checked episode; the oldest make room. Returns how many left.

        Raises:
            ProtocolError: the memory has become too small for it meanwhile.
        """
        with self._changing:
            if self._closed:
                return 0
            memory = self._memory
            with memory.held():
                before = memory.num_episodes, memory.num_entries
                try:
                    dataset.put(memory, checked.episode, age=checked.age)
                except MemoireError as error:
                    raise ProtocolError("too_large", str(error)) from error
                gone = before[0] + 1 - memory.num_episodes
                lost = before[1] + checked.samples - memory.num_entries
            with self._filled:
                self._added += 1
                self._overwritten += gone
                self._overwritten_entries += lost
                self._hear(client_id)
                self._tell()
            return gone

    def walk(self) -> Iterator[KeptEpisode]:
        """Every episode with all that is known of its entries, the oldest first; see `dataset.walk`."""
        with self._filled:
            memory, owner = self._memory, self._owner
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
        with self._changing:
            if self._closed:
                raise Closed("the pool")
            name, memory = _bytes.checksum(kept.owner + kept.number.to_bytes(8, "little", signed=True)), self._memory
            number = kept.number if kept.owner == self._owner else self._put_back.get(name)
            if number is not None and _has(memory, number):
                return False, 0
            with memory.held():
                before = memory.num_episodes
                number = int(dataset.put(memory, kept.episode)[0])
                gone = before + 1 - memory.num_episodes
            with self._filled:
                self._put_back[name] = number
                if len(self._put_back) > 2 * memory.num_episodes + 100:  # most of them have left since
                    self._put_back = {name: number for name, number in self._put_back.items() if _has(memory, number)}
                self._added += 1
                self._overwritten += gone
                self._tell()
            return True, gone

    def sums(self, client_id: bytes, sequence: int, total_weight: float, positives: int, minimum: float) -> bool:
        """A sign of life: what a client still holds is nobody's to draw from."""
        self.heard(client_id)
        return False

    def heard(self, client_id: bytes) -> None:
        """A sign of life."""
        with self._filled:
            self._hear(client_id)

    def _hear(self, client_id: bytes) -> None:
        now = self._clients[client_id] = self._clock()
        if now > self._looked + LOOK_EVERY:
            self._expire()

    def goodbye(self, client_id: bytes) -> None:
        """A client has ended; its episodes stay."""
        self.forget(client_id)

    def forget(self, client_id: bytes) -> int:
        """Do not count a client any more; its episodes stay."""
        with self._filled:
            self._clients.pop(client_id, None)
        return 0

    def expire(self) -> int:
        """Do not count silent clients any more; returns how many these were."""
        with self._filled:
            return self._expire()

    def _expire(self) -> int:
        self._looked = self._clock()
        since = self._looked - self.client_timeout
        silent = [client for client, heard in self._clients.items() if heard < since]
        for client in silent:
            del self._clients[client]
        return len(silent)

    # What is changed

    def configure(self, parameters: Parameters) -> int:
        """Weigh and cut everything stored by new parameters; nothing goes but what `max_episode` says. Returns how many
        episodes did.
        """
        with self._changing:
            memory = self._memory
            with memory.held():
                before = memory.num_episodes
                memory.configure(parameters)
                gone = before - memory.num_episodes
            with self._filled:
                self._tell()
            return gone

    def limit(self, byte_limit: int) -> int:
        """Have room for this many bytes from now on; returns how many episodes had to go, the oldest first.

        Another number of entries is another memory: episodes move one by one, the memory is there twice until the last
        one has moved, what comes in waits, and ids drawn before are stale.

        Raises:
            ParameterError: too few for one entry, or for the capacity that was asked for. Nothing was changed.
        """
        with self._changing:
            capacity = self._fitting(byte_limit)
            old, gone = self._memory, 0
            if capacity != old.capacity:
                fresh, moved = self._make(capacity, byte_limit, self.parameters), {}
                with old.held():
                    for number, episode in dataset.walk(old):
                        if len(episode) <= capacity:
                            with suppress(EpisodeTooLong):  # its ragged values have no room
                                moved[number] = int(dataset.put(fresh, episode)[0])
                gone = old.num_episodes - fresh.num_episodes
                self._put_back = {name: moved[was] for name, was in self._put_back.items() if was in moved}
                self._replace(fresh)
            else:
                before = old.num_episodes
                old.limit_ragged(self._for_values(capacity, byte_limit))
                gone = before - old.num_episodes
            self.byte_limit = byte_limit
            return gone

    def clear(self) -> int:
        """Let all episodes go; returns how many."""
        with self._changing:
            old = self._memory
            self._put_back.clear()
            self._replace(self._make(old.capacity, self.byte_limit, self.parameters))
            return old.num_episodes

    def _replace(self, memory: Memory) -> None:
        with self._filled:
            memory.saw_model(self._memory.newest_model)
            self._memory, self._owner = memory, secrets.token_bytes(16)
            self._tell()

    def _tell(self) -> None:
        """Have those who wait look again."""
        self._changes += 1
        self._filled.notify_all()

    def apply(self, owner: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32]) -> tuple[int, int] | None:
        """Set the priorities of entries by a learner's TD errors: (applied, stale), or None where `owner` is not, or no
        more, this memory.
        """
        with self._filled:
            if owner != self._owner:
                return None
            memory = self._memory
        applied, stale = memory.update_priorities(numbers, td_errors)
        with self._filled:
            self._applied += applied
            self._stale += stale
            self._tell()  # there may have been nothing of a weight before
        return applied, stale

    def close(self) -> None:
        """Wake everyone who waits (they raise Closed). Closing again does nothing."""
        with self._filled:
            self._closed = True
            self._tell()

    # What goes out

    def get(
        self, samples: int, *, timeout: float | None = None, out: Gathered | Mapping[str, NDArray[Any]] | None = None
    ) -> Pooled:
        """Draw a batch, with replacement, as `Buffer.sample` does.

        Args:
            samples: At least 1.
            timeout: Seconds to wait until there is anything to draw; None does not wait.
            out: The caller's arrays by the names they have in a `Batch`; others are made new.

        Raises:
            ParameterError: an array of `out` does not fit.
            NotEnoughSamples: there is nothing to draw, also after `timeout`.
            Closed: `close` was called, also from another thread while waiting.
        """
        samples = whole("batch_size", samples, 1, MOST_BATCH)
        if isinstance(out, Gathered):
            raise WrongType("out", "arrays by their names in a batch", "Gathered")
        places = None if out is None else {name: out[name] for name in out if name != "ids"}  # made here
        return self._when_there(samples, timeout, lambda memory, owner: self._pooled(memory, owner, samples, places))

    def _when_there(self, samples: int, timeout: float | None, draw: Callable[[Memory, bytes], T]) -> T:
        """What `draw` returns of the memory and its owner, as soon as there is anything to draw."""
        began = time.monotonic()
        while True:
            with self._filled:
                if self._closed:
                    raise Closed("the pool")
                memory, owner, changes = self._memory, self._owner, self._changes
            try:
                return draw(memory, owner)
            except EmptyMemory as error:
                self._wait(samples, changes, began, timeout or 0.0, error)

    def _pooled(self, memory: Memory, owner: bytes, samples: int, places: Mapping[str, NDArray[Any]] | None) -> Pooled:
        with memory.held():
            gathered, weights, total, population, smallest = memory.sample(samples, places)
            parameters = memory.parameters
        with self._filled:
            beta = self._annealing.next(parameters)
            self._drawn += samples
        by_largest = parameters.normalize == "global"
        importance, divisor = _core.importance(weights, total, population, smallest, beta, by_largest)
        ids = np.empty(samples, ID)
        ids["client"], ids["number"] = np.frombuffer(owner, "<u8"), gathered.ids
        gathered.ids = ids
        return Pooled(gathered, importance, divisor, 0.0)

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
            update: What the batch's `update_priorities` calls with ids and errors of entries.
            timeout: Seconds to wait until there are any; None does not wait.

        Raises: as `get`, and ParameterError as `Buffer.sample_episodes`.
        """

        def draw(memory: Memory, owner: bytes) -> EpisodeBatch:
            return sample(memory, count, self._beta, update, group=group, group_size=group_size, owner=owner)

        batch = self._when_there(count, timeout, draw)
        with self._filled:
            self._drawn += int(batch["mask"].sum())
        return batch

    def _beta(self, parameters: Parameters) -> float:
        with self._filled:
            return self._annealing.next(parameters)

    def _wait(self, samples: int, changes: int, began: float, timeout: float, error: EmptyMemory) -> None:
        """Wait until something has changed since `changes`, or say what is missing."""
        with self._filled:
            while self._changes == changes:
                left = began + timeout - time.monotonic()
                if left <= 0.0:
                    self._misses += 1
                    waited, stored = time.monotonic() - began if timeout else 0.0, self._memory.num_episodes
                    what = _missing(error, stored, len(self._clients))
                    raise NotEnoughSamples(samples, 0, stored, len(self._clients), waited, what)
                self._filled.wait(left)

    # Whoever looks

    def distribution(self) -> Distribution:
        """How entries are spread: all of them, or evenly spaced ones."""
        memory = self._memory
        with memory.held():
            seen = _Seen.of(memory)
            total, positives, _ = memory.sums()
            entries = memory.num_entries
        is_known = len(seen.rows) > 0 and 0.0 < total < math.inf
        squares = float(np.square(seen.weights / total).mean()) * entries if is_known else 0.0
        return Distribution(
            looked=len(seen.rows),
            held=entries,
            population=float(positives),
            total_weight=min(total, sys.float_info.max),
            effective=1.0 / squares if squares > 0.0 else None,
            weights=Histogram.of(seen.weights),
            ages=Histogram.of(seen.ages),
        )

    def peek(self) -> Peeked | None:
        """A copy of a random entry's sample, by weight among evenly spaced ones."""
        with self._filled:
            memory, owner = self._memory, self._owner
            beta = memory.parameters.beta(self._annealing.batches)
        with memory.held():
            seen = _Seen.of(memory)
            total, positives, _ = memory.sums()
            most = float(seen.weights.max(initial=0.0))
            if not most > 0.0:
                return None
            at = random.choices(range(len(seen.rows)), (seen.weights / most).tolist())[0]
            inside, row = memory._inside(), seen.rows[at]
            number = int(inside["meta"]["number"][row])
            length = int(inside["episodes"]["length"][inside["meta"]["episode"][row]])
            gathered = memory.gather([number])
            del inside
        gathered.ids = np.empty(1, ID)
        gathered.ids["client"], gathered.ids["number"] = np.frombuffer(owner, "<u8"), number
        return Peeked(gathered, float(seen.weights[at]) / total, float(positives), beta, length)

    # Readers: learners that draw from several pools, over the network

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1)
    ) -> NDArray[np.void]:
        """What a reader may draw: a row of `rows.CLIENT_SUMS` for all episodes; none while nothing can be drawn.

        Nothing is kept for anybody, since entries can be drawn any number of times, or `max_times_sampled` by whoever
        comes first. Learners that part the clients among them (`part`) all draw from the whole memory.
        """
        with self._filled:
            memory, owner = self._memory, self._owner
            self._sequence += 1
            sequence = self._sequence
        total, positives, minimum = memory.sums()
        rows = np.zeros(1 if positives and total > 0.0 and math.isfinite(total) else 0, CLIENT_SUMS)
        for row in rows:
            row["client"], row["sequence"] = np.frombuffer(owner, "<u8"), sequence
            row["total_weight"], row["positives"], row["minimum"] = total, positives, minimum
            row["reserved"], row["flags"] = min(positives, (1 << 32) - 1), ANY_NUMBER
            if memory.parameters.max_times_sampled:
                row["reserved"], row["flags"] = min(memory.draws_left, (1 << 32) - 1), 0
        return rows

    def draw_counts(
        self, reader: bytes, counts: NDArray[np.void], *, now: float = 0.0, compression: str = "none"
    ) -> Payload | None:
        """Draw for a reader: the payload of a DRAWN message, or None where there is nothing, or nothing of this memory
        was asked for.

        Args:
            counts: Rows of `rows.CLIENT_COUNTS`.
            now: Unix seconds, written into the container.
            compression: Of frames, which the reader must have.

        Raises:
            ProtocolError: more than `MOST_DRAWN` samples were asked for.
            Closed: `close` was called.
        """
        with self._filled:
            if self._closed:
                raise Closed("the pool")
            memory, owner = self._memory, self._owner
        mine = (counts["client"] == np.frombuffer(owner, "<u8")).all(axis=1)
        wanted = int(counts["count"][mine].sum())
        check_count(wanted)
        with memory.held():
            if memory.parameters.max_times_sampled:
                wanted = min(wanted, memory.draws_left)
            if not (wanted and memory.num_positive):
                return None
            try:
                payload = pack.build_drawn(memory, owner, wanted, now=now, compression=compression)
            except EmptyMemory:  # entries have become too old since
                return None
        with self._filled:
            self._drawn += wanted
        return payload


class _Seen(NamedTuple):
    """Entries of a memory that is held, every n-th row: `MOST_LOOKED` or fewer."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    ages: NDArray[np.float32]

    @classmethod
    def of(cls, memory: Memory) -> _Seen:
        every = -(-memory.capacity // MOST_LOOKED)
        rows = np.arange(random.randrange(every), memory.capacity, every)
        rows = rows[memory._inside()["meta"]["episode"][rows] >= 0]
        ages, weights = np.empty(len(rows), np.float32), np.empty(len(rows), np.float64)
        memory._facts(rows, ages, None, weights)
        return cls(rows, weights, ages)


def _has(memory: Memory, number: int) -> bool:
    """Whether an entry is still there."""
    try:
        memory.weights([number])
    except StaleEntry:
        return False
    return True


def _missing(error: EmptyMemory, episodes: int, clients: int) -> str:
    """Why a draw has to wait, in words."""
    if isinstance(error, UsedUp):
        return f"entries are drawn {error.times} times at most (max_times_sampled), and {error.left} times yet in all"
    if error.reason:
        return f"{error.reason}. Wait for actors to ship more"
    return f"of {error.entries} entries in {episodes} episodes of {clients} clients none can be drawn"
