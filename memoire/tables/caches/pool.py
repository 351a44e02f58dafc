"""Held caches of many clients, and the draw over them: as if from all clients' memories at once.

For a batch of B, client c has newest sums S_c (total weight) and N_c (entries of positive weight), u_c unused samples:

    share       pi_c = min(lambda S_c, u_c / D_c), lambda such that they sum to 1. D_c: samples that anyone drew between
                the client's last two caches, smoothed, at least B. Without the cap, clients that push less than they
                are drawn run dry, and what they held is missing from then on. Where the caps together are below 1 they
                rise together, each to u_c / B at most.
    count       systematic sampling with mean B pi_c, never above u_c: one random offset for all clients
    samples     the client's next unused ones, oldest cache first; the batch is shuffled
    importance  (N P(i) N_k / N_c) ** -beta, P(i) = pi_c w_i / S_k, N = sum of N_c over the clients that can serve;
                S_k, N_k are those of the moment at which the drawn cache was made

So each client counts with its newest N_c, represented by what it held when the drawn cache was made. `Pool` does this
over the caches of one server, `draw.plan` and `draw.finish` over several servers' from far away, with the same kernels.

Importance sampling of replayed entries: Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import NotEnoughSamples, ParameterError, ProtocolError
from memoire.limits import HELD_BYTES, Limits
from memoire.replay.batch import GatheredSamples, place
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Annealing
from memoire.replay.schema import Schema
from memoire.tables import draws
from memoire.tables.base import (
    DEFAULTS,
    MAX_INSPECTED,
    BelongsToRun,
    DrawsAtRandom,
    DrawsBatches,
    HearsSums,
    PoolStats,
    ShowsSamples,
    TablePool,
    TakesPushes,
)
from memoire.tables.draws import MAX_BATCH, PooledBatch, gathered_from
from memoire.tables.inspection import Distribution, PeekedSample
from memoire.tables.pools import EXPIRY_INTERVAL, PoolLock
from memoire.tables.saved import PutBack, RecordBody, SavedRecord
from memoire.wire import containers, messages
from memoire.wire._container import HeldCache
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.layout import ContainerLayout
from memoire.wire.parts import Payload
from memoire.wire.receivers import Page

from . import inspection as cache_inspection
from ._draw import Picks
from .inspection import (
    CacheRecord,
    CacheRestore,
    CacheWalk,
    ClientRecord,
    KeptCache,
    KeptClient,
    LeftSamples,
    record_of,
)
from .queues import CacheQueues, Demand, Readers, check_count


class Pool(TablePool, TakesPushes, HearsSums, BelongsToRun, DrawsAtRandom, DrawsBatches, ShowsSamples):
    """Held caches of all clients of one table. Thread-safe; samples are copied without lock and GIL.

    Args:
        schema, parameters: Of the caches; `configure` changes the parameters.
        byte_limit: Bytes that held caches may have together; the oldest of the client that holds most makes room.
        cache_limit: Caches that may be held; 0 is no limit.
        client_timeout: Seconds of silence after which a client leaves, once its samples are used (with reuse_cache: at
            once).
        clock: Seconds that only grow.
        seed: Of the draw; None is a random one.
    """

    def __init__(
        self,
        schema: Schema,
        parameters: Parameters | None = None,
        *,
        byte_limit: int = HELD_BYTES,
        cache_limit: int = 0,
        client_timeout: float = DEFAULTS.client_timeout,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        if byte_limit < 1 or cache_limit < 0 or not client_timeout > 0.0:
            given = (byte_limit, cache_limit, client_timeout)
            expected = "at least 1, at least 0 and above 0"
            raise ParameterError("byte_limit, cache_limit and client_timeout", given, expected)
        self._clock = clock
        self._waiter = PoolLock()
        self._client_timeout = client_timeout
        # Everything below belongs to the waiter's lock.
        self._rng = random.Random()
        seed = self._rng.getrandbits(64) if seed is None else seed & (2**64 - 1)
        limits = {"byte_limit": byte_limit, "cache_limit": cache_limit}
        self._queues = CacheQueues(schema, parameters or Parameters(), **limits, seed=seed)
        self._readers = Readers(self._queues, client_timeout, clock())
        self._restore = CacheRestore(self._queues)
        self._annealing = Annealing()
        self._demand = Demand()

    @property
    def schema(self) -> Schema:
        """What an entry is."""
        return self._queues.schema

    @property
    def layout(self) -> ContainerLayout:
        """What a cache must be like: for `container.check`."""
        return self._queues.layout

    @property
    def parameters(self) -> Parameters:
        """Those that draws follow now."""
        return self._queues.parameters

    @property
    def byte_limit(self) -> int:
        """Bytes that held caches may have together."""
        return self._queues.byte_limit

    @property
    def least_bytes(self) -> int:
        """Bytes that it can be limited to at least: any number."""
        return 1

    def join(self, budget: ByteBudget, name: str) -> None:
        """Be a holder of that name from now on: the oldest cache leaves if others leave no room, or ask for some."""
        self._queues.room = budget.holder(name)
        budget.add_reclaimer(self._give_way)

    def _give_way(self, size: int) -> None:
        """Give so many bytes to somebody else, down to half of what may be held."""
        queues = self._queues
        with self._waiter.lock:
            assert queues.room is not None
            most = max(queues.byte_limit // 2, queues.room.count - size)
            queues.make_room(most)
            queues.room.try_take(min(0, max(most, queues.taken) - queues.room.count))

    # What comes in

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> HeldCache:
        """A received cache, completely checked: see `unpack.check`. Raises ProtocolError."""
        if not isinstance(body, messages.Cache):
            raise ProtocolError("unexpected", f"{body.type.name} was pushed; this table holds caches")
        return containers.check(payload, self._queues.layout, limits, checksum=checksum)

    def add(self, client_id: bytes, sequence: int, held: HeldCache) -> int:
        """Hold a checked cache, overwriting old ones where there is no room; its sums count if they are newest.

        Args:
            client_id: 16 bytes.
            sequence: The header's: of two messages of a client the higher one is newer.
            held: From `unpack.check` with this pool's `layout`.

        Returns:
            How many caches were overwritten.

        Raises:
            ProtocolError: the cache is of another layout (parameters changed meanwhile), or larger than the pool.
        """
        queues, waiter = self._queues, self._waiter
        with _core.Held(waiter.told):
            queues.check(held)
            if waiter.is_closed:
                return 0
            gone = queues.add(client_id, sequence, held, self._now())
            waiter.tell()
            return gone

    def sums(self, client_id: bytes, sequence: int, total_weight: float, positives: int, minimum: float) -> bool:
        """A client's newest sums, from a message without a cache. Returns whether they were newer than those known."""
        with _core.Held(self._waiter.told):
            if self._waiter.is_closed:
                return False
            now = self._now()
            is_newer = self._queues.sums(client_id, sequence, total_weight, positives, minimum, now)
            self._waiter.tell()  # it may have had no weight before
            return is_newer

    def room(self, client_id: bytes, stock_bytes: int) -> int | None:
        """Samples that a client is to bring now; None where nothing holds it back: see `Demand`.

        Args:
            stock_bytes: That it may hold undrawn while learners draw.
        """
        queues = self._queues
        with _core.Held(self._waiter.told):
            client = queues.clients.get(client_id)
            if client is None or not client.held or queues.parameters.reuse_cache:
                return None
            sample_bytes, clients = client.nbytes / client.held, len(queues.held)
            stock = int(stock_bytes / sample_bytes)
            most = int(queues.byte_limit / sample_bytes) // (2 * clients)
            size = queues.parameters.cache_size
            return self._demand.room(client.unused, stock, most, size, clients, self._clock())

    def heard(self, client_id: bytes) -> None:
        """A sign of life without news."""
        with self._waiter.lock:
            self._queues.heard(client_id, self._clock())

    def goodbye(self, client_id: bytes) -> None:
        """A client has ended: it leaves when its samples are used, before `client_timeout`. With reuse_cache, where
        they are never used up, it stays as long as one that is silent.
        """
        with self._waiter.lock:
            self._queues.goodbye(client_id)

    def forget(self, client_id: bytes) -> int:
        """Drop a client and all that it holds; returns the unused samples lost."""
        with self._waiter.lock:
            return self._queues.forget(client_id)

    def expire(self) -> int:
        """Let silent clients and readers go now, as all that comes in or out does about once a second.

        Returns how many clients left.
        """
        with self._waiter.lock:
            return self._expire(self._clock())

    def _now(self) -> float:
        """The time, after silent clients and readers were let go if that is due."""
        now = self._clock()
        if self._readers.present.is_due(now):
            self._expire(now)
        return now

    def _expire(self, now: float) -> int:
        for reader in self._readers.expire(now):
            self._demand.forget(reader)
            self._waiter.tell()  # what was kept for it is free
        return self._queues.expire(now - self._client_timeout)

    def check_parameters(self, parameters: Parameters) -> None:
        """Raise ParameterError if caches are held that were made with other values than these."""
        with self._waiter.lock:
            self._queues.check_parameters(parameters)

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Follow new parameters; returns how many caches went.

        Args:
            discard_mismatched: Let held caches go that were made with other values; else they are a reason to refuse.

        Raises:
            ParameterError: they do not fit the schema, or the caches that are held; nothing was changed.
        """
        with self._waiter.lock:
            gone = self._queues.configure(parameters, discard_mismatched=discard_mismatched)
            self._waiter.tell()  # with reuse_cache there may be enough now
            return gone

    def limit(self, byte_limit: int) -> int:
        """Hold at most this many bytes from now on; returns how many caches had to go."""
        if byte_limit < 1:
            raise ParameterError("byte_limit", byte_limit, "at least 1")
        with self._waiter.lock:
            return self._queues.limit(byte_limit)

    def clear(self) -> int:
        """Let all held caches go; clients, readers and those who wait stay. Returns how many."""
        with self._waiter.lock:
            return self._queues.clear()

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts."""
        with self._waiter.lock:
            self._queues.saw_model(version)

    # Snapshots

    def walk(self) -> Iterator[KeptClient | KeptCache]:
        """Each client that holds something, followed by its caches: see `CacheWalk`. The pool goes on meanwhile, and is
        locked for one step at a time.
        """
        with self._waiter.lock:
            walk = CacheWalk(self._queues)
        while not walk.is_over:
            with self._waiter.lock:
                kept = walk.step(self._clock())
            if kept is not None:
                yield kept

    def state(self) -> dict[str, Any]:
        """Return the state of drawing beside the held data: fields of a snapshot's `TableRecord`."""
        with self._waiter.lock:
            random, drawn, elsewhere = self._queues.held.state()
            facts = {"random": random.to_bytes(8, "little"), "drawn": drawn, "elsewhere": elsewhere}
            return facts | self._annealing.state() | {"newest_model": self._queues.newest_model}

    def go_on_from(self, state: Any, *, is_same: bool) -> None:
        """Take up what `state` said; before anything is put back.

        Args:
            is_same: Whether this is the pool that it was: then counts, and a generator that `state` has, go on, too.
        """
        with self._waiter.lock:
            self._queues.saw_model(state.newest_model)
            if is_same:
                own = self._queues.held.state()[0]
                random = int.from_bytes(state.random, "little") if len(state.random) == 8 else own
                self._queues.held.go_on_from(random, state.drawn, state.elsewhere)
            if not self._annealing.batches:
                self._annealing.go_on_from(state.course, state.batches)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing ever came in or was drawn."""
        with self._waiter.lock:
            held = self._queues.held
            return not (held.caches or held.state()[1] or self._annealing.batches or self._queues.counts.added)

    def reseed(self, seed: int) -> None:
        """Draw as a pool that was made with this seed; before the first draw."""
        with self._waiter.lock:
            self._queues.held.go_on_from(seed & (2**64 - 1), *self._queues.held.state()[1:])

    def put_client(self, kept: KeptClient) -> None:
        """Count the entries of a client of which nothing is held any more, until it was silent for `client_timeout`."""
        with self._waiter.lock:
            self._waiter.check_open()
            self._restore.put_client(kept, self._clock())
            self._waiter.tell()

    def put_back(
        self,
        kept: KeptClient,
        held: HeldCache,
        *,
        age: float = 0.0,
        stays: bool = True,
        left: LeftSamples | None = None,
    ) -> tuple[bool, int]:
        """Hold a checked cache of a client that was walked over, here or elsewhere; its newest sums count unless newer
        ones are known.

        Args:
            age: Seconds since the cache came to whom it came to first.
            stays: Whether a client that is known by this alone stays until its samples are used or, with reuse_cache,
                as long as there is room: a learner that trains on what was kept has no actor that could be heard. Once
                it was heard, it is like any other. False: it counts as heard now.
            left: What is left of the cache, if that is not all behind the samples that were used.

        Returns:
            Whether it was not held already, and how many were overwritten to make room.

        Raises:
            ProtocolError: it is of another layout, or larger than the pool.
            Closed: `close` was called.
        """
        with self._waiter.lock:
            self._waiter.check_open()
            self._queues.check(held)
            is_new, gone = self._restore.put_back(kept, held, age=age, stays=stays, now=self._clock(), left=left)
            if is_new:
                self._waiter.tell()
            return is_new, gone

    def records(self) -> Iterator[tuple[RecordBody, memoryview | bytes]]:
        """Body and payload of each client and cache."""
        return map(record_of, self.walk())

    def put_record(self, record: SavedRecord) -> PutBack:
        """Know a client of a snapshot, or hold one of its caches."""
        body, client = record.body, record.heading
        if isinstance(body, ClientRecord):
            self.put_client(body.kept())
            return PutBack(True)
        if not (isinstance(body, CacheRecord) and isinstance(client, ClientRecord)):
            raise ProtocolError("container", "a record that belongs to no client, or of a kind that is not known")
        held = containers.check(record.payload, self.layout, record.limits)
        if not 0 <= body.used <= held.samples or len(client.id) != 16 or not 0.0 <= body.age < math.inf:
            raise ProtocolError("container", f"{body.used} of {held.samples} samples drawn, {body.age:g} s old")
        if (left := body.left_samples()) is None:
            held.go_on_at(body.used)
        is_new, gone = self.put_back(client.kept(), held, age=body.age, stays=record.stays, left=left)
        counts = {"caches": 1, "samples": held.samples, "unused": held.samples - body.used}
        return PutBack(is_new, gone, counts, client.id)

    # What goes out

    def entries(self) -> int:
        """Entries of the clients' memories that can be drawn there, as they said last."""
        with self._waiter.lock:
            return self._queues.held.entries()

    def get(
        self,
        samples: int,
        *,
        timeout: float | None = None,
        out: GatheredSamples | Mapping[str, NDArray[Any]] | None = None,
    ) -> PooledBatch:
        """Draw a batch: all of it or nothing.

        Args:
            samples: At least 1.
            timeout: Seconds to wait for enough samples; None does not wait.
            out: The caller's arrays [B, ...], B = `samples`: all of them, or by the names they have in a `Batch`
                (others are made new).

        Raises:
            ParameterError: an array of `out` does not fit; no sample was taken.
            NotEnoughSamples: too few unused samples, also after `timeout`; none was taken.
            Closed: `close` was called, also from another thread while waiting.
        """
        if not 1 <= samples <= MAX_BATCH:
            raise ParameterError("batch_size", samples, f"from 1 to {MAX_BATCH}")
        queues, layout = self._queues, self._queues.layout
        ready = self._ready(layout, samples, out)
        with self._waiter.lock:
            picks = self._draw(samples, self._now()) or self._await(samples, timeout or 0.0)
            drawn_by, parameters = queues.layout, queues.parameters
            beta = self._annealing.next(parameters)
        if drawn_by is not layout:  # parameters changed while waiting
            ready = self._ready(drawn_by, samples, out)
        return gathered_from(picks, drawn_by, parameters, beta, ready, self._clock())

    def _ready(
        self, layout: ContainerLayout, samples: int, out: GatheredSamples | Mapping[str, NDArray[Any]] | None
    ) -> GatheredSamples:
        """Arrays for a batch: the caller's, or new ones."""
        if isinstance(out, GatheredSamples):
            layout.check_out(out, samples)
            return out
        made = layout.allocate(samples)
        if out is not None:
            place(self.schema, made, out)
        return made

    def _draw(self, samples: int, now: float) -> Picks | None:
        self._waiter.check_open()
        picks = self._queues.draw(samples, now)
        (self._demand.was_short if picks is None else self._demand.drew)(samples, now)
        return picks

    def _await(self, samples: int, timeout: float) -> Picks:
        """The samples as soon as there are enough. The lock is held, and given up while waiting."""
        began = time.monotonic()
        # In stretches: a reader that went away gives back what was kept for it, and nobody tells of that.
        while self._waiter.wait(began + timeout, EXPIRY_INTERVAL):
            picks = self._draw(samples, self._now())
            if picks is not None:
                return picks
        queues = self._queues
        queues.counts.misses += 1
        waited = time.monotonic() - began if timeout else 0.0
        facts = samples, queues.drawable(), queues.held.caches, len(queues.clients)
        raise NotEnoughSamples(*facts, waited, queues.why_few())

    # Readers: learners that draw from several pools, over the network

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1), wanted: int | None = None
    ) -> NDArray[np.void]:
        """Keep about `samples` unused samples for a reader; returns what it may draw: rows [C] of `rows.CLIENT_SUMS`.

        A reader is named by its client id. What it asks for replaces what it had; when it is silent for
        `client_timeout`, all is free again. One row for each client with a weight; `reserved` 0: it cannot serve.

        Args:
            samples: How many; of each client its part by weight or by unused samples, whichever is more. Where several
                readers draw from the same clients, at most three draws are kept for one that has enough (`wanted` 0).
            elsewhere: Samples that the reader has drawn from other pools so far. Its batches are filled from all of
                them, so these count between two caches of a client as well.
            part: (i, n): only of every n-th client in the order in which they came, beginning with the i-th from 0, as
                if there were no others.
            wanted: Samples of a batch for which it waits; 0: it has enough. None does not say; all asked for is kept.
        """
        with self._waiter.lock:
            now = self._now()
            has_enough = wanted == 0 and len(self._readers.present) > part[1]  # and others share its clients
            keep = self._demand.most_kept(reader, samples) if has_enough else samples
            rows = self._readers.reserve(reader, keep, elsewhere, part, now)
            self._waiter.tell()  # it may keep fewer than before
            self._demand.kept(reader, int(rows["reserved"].sum()), len(rows), samples, bool(wanted), now)
            return rows

    def draw_counts(
        self,
        reader: bytes,
        counts: NDArray[np.void],
        *,
        now: float = 0.0,
        compression: str = "none",
        page: Page | None = None,
    ) -> Payload | None:
        """Take samples of named clients for a reader: the payload of a DRAWN message, or None where there were none.

        Args:
            counts: Rows [C] of `rows.CLIENT_COUNTS`. A client that is not here, or has fewer, gives what there is.
            now: Unix seconds, written into the container.
            compression: Of frames, which the reader must have.
            page: Of the reply that is to have them.

        Raises:
            ProtocolError: more than `MAX_DRAWN` samples were asked for, or than the page has room for; none was taken.
            Closed: `close` was called.
        """
        check_count(int(counts["count"].sum()))
        with self._waiter.lock:
            self._waiter.check_open()
            now_here = self._clock()
            picks, parts = self._readers.take(reader, counts, now_here, page)
            self._demand.drew(picks.size, now_here, reader)
            layout, drawn = self.layout, self._queues.drawn_layout
        if not picks.size:
            return None
        facts: dict[str, Any] = {"compression": compression, "page": page, "parts": parts}
        return draws.pack_drawn(picks, layout, drawn, now=now, clock=self._clock(), **facts)

    # Inspection

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """How held samples are spread: of some clients, and of some of their caches, those that can be drawn yet."""
        with self._waiter.lock:
            chosen = cache_inspection.choose_caches(self._queues, self._clock(), self._rng, most)
        return cache_inspection.distribution_of(chosen, most)

    def peek(self, of: tuple[bytes, int] | None = None) -> PeekedSample | None:
        """A copy of a random held sample: of a client by its share of the weight, out of any of its caches. Or of the
        sample of this client's entry.
        """
        with self._waiter.lock:
            chosen = cache_inspection.choose_sample(self._queues, self._clock(), self._rng, of)
            beta = self.parameters.beta(self._annealing.batches)
        return None if chosen is None else cache_inspection.copied(chosen, beta)

    def stats(self) -> PoolStats:
        """A frozen picture of the pool."""
        with self._waiter.lock:
            held, counted = self._queues.held, asdict(self._queues.counts)
            return PoolStats(
                clients=len(held),
                caches=held.caches,
                bytes=held.nbytes,
                unused=held.unused,
                held=held.held,
                **counted | {"drawn": held.drawn},
            )

    def close(self) -> None:
        """Wake everyone who waits (they raise Closed) and let all caches go. Closing again does nothing."""
        with self._waiter.lock:
            self._queues.forget_all()
            self._waiter.close()
