"""Pool of caches from many clients, and draws from all clients' memories in proportion to their weights.

For a batch of B, client c has newest sums S_c (total weight) and N_c (entries of positive weight), u_c unused samples:

    share       pi_c = min(lambda S_c, u_c / D_c), lambda such that they sum to 1. D_c: samples drawn by any learner
                between the client's last two caches, smoothed, at least B. Without the cap, clients that push less than
                learners draw from them run dry, and the batches lack their entries. If the caps together are below 1,
                they rise together, each to u_c / B at most.
    count       systematic sampling with mean B pi_c, never above u_c: one random offset for all clients
    samples     the client's next unused ones, oldest cache first; the batch is shuffled
    importance  (N P(i) N_k / N_c) ** -beta, P(i) = pi_c w_i / S_k, N = sum of N_c over the clients that can serve;
                S_k, N_k are the client's sums at the creation of the drawn cache

Each client counts with N_c entries, represented by those at the creation of the drawn cache. `Pool` applies the rule to
the caches of one server, `draws.plan` and `draws.build_batch` to several remote servers, with the same kernels.

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
from memoire.replay.parameters import Parameters, differing_fields
from memoire.replay.sampling import Annealing
from memoire.replay.schema import Schema
from memoire.tables import base, draws
from memoire.tables.base import RecordBody, RestoreOutcome, SavedRecord
from memoire.tables.draws import MAX_BATCH, PooledBatch, arrays_for, check_count, gathered_from
from memoire.tables.inspection import Distribution, PeekedSample
from memoire.tables.pools import EXPIRY_INTERVAL, PoolLock
from memoire.wire import containers, messages
from memoire.wire._container import HeldCache
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.layout import content_settings_hash, layout_of
from memoire.wire.parts import ContainerKind, Payload
from memoire.wire.receivers import ReplyPage

from . import inspection as cache_inspection
from ._draw import HeldClient, HeldPool, Picks
from .inspection import CacheRecord, ClientRecord, DuplicateDetector, record_of
from .queues import CacheRoom, Demand, Readers


class Pool(
    base.TablePool, base.TakesPushes, base.ReceivesSums, base.BelongsToRun, base.DrawsAtRandom, base.DrawsBatches,
    base.ShowsSamples,
):  # fmt: skip
    """Held caches of all clients of one table. Thread-safe; samples are copied without lock and GIL.

    Args:
        schema, parameters: Schema and parameters of the caches; `configure` changes the parameters.
        byte_limit: Maximum bytes of all held caches. A full pool evicts the oldest cache of the largest client.
        cache_limit: Maximum number of held caches; 0 is no limit.
        client_timeout: Seconds of silence after which a client expires, once its samples are used (with reuse_cache: at
            once).
        clock: Monotonic clock in seconds.
        seed: Seed of the draws; None for a random one.
    """

    parameters: Parameters
    least_bytes = 1

    def __init__(
        self,
        schema: Schema,
        parameters: Parameters | None = None,
        *,
        byte_limit: int = HELD_BYTES,
        cache_limit: int = 0,
        client_timeout: float = base.DEFAULTS.client_timeout,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        if byte_limit < 1 or cache_limit < 0 or not client_timeout > 0.0:
            names, values = "byte_limit, cache_limit and client_timeout", (byte_limit, cache_limit, client_timeout)
            raise ParameterError(names, values, "at least 1, at least 0 and above 0")
        self.schema, self._client_timeout, self._clock = schema, client_timeout, clock
        self._waiter = PoolLock()
        # Everything below belongs to the waiter's lock.
        self._rng = random.Random()
        self.held = HeldPool(self._rng.getrandbits(64) if seed is None else seed & (2**64 - 1))
        """Queues of the clients' caches, with the compiled loops over them."""
        self.clients: dict[bytes, HeldClient] = {}
        self._counts = base.PoolCounts()
        self._room = CacheRoom(self.held, self._counts, byte_limit, cache_limit)
        self._newest_model = 0  # version; 0: no model is known
        self._readers = Readers(self.held, self.clients, client_timeout, self._on_reader_expired)
        self._expired_at = clock()  # time of the last search for silent clients and readers
        self._duplicates = DuplicateDetector()
        self._annealing = Annealing()
        self._demand = Demand()
        self._set_parameters(parameters or Parameters())

    def _set_parameters(self, parameters: Parameters) -> None:
        parameters.check_for(self.schema)
        self.parameters = parameters
        self.held.limit(parameters.max_times_sampled)
        self._is_limited = parameters.max_times_sampled > 0  # an entry's draws are limited
        self.layout = layout_of(self.schema, parameters)
        """Layout that a cache must have: for `containers.check`."""
        self._drawn_layout = layout_of(self.schema, parameters, ContainerKind.DRAWN)
        self._making = content_settings_hash(self.schema, parameters)  # values that samples must be made with

    def join_budget(self, budget: ByteBudget, name: str) -> None:
        """Join a byte budget under this name. If other holders need bytes, the pool evicts its oldest caches."""
        self._room.budget = budget.add_holder(name)
        budget.add_reclaimer(self._release_bytes)

    def _release_bytes(self, size: int) -> None:
        """Release this many bytes for another holder, down to half of the pool's limit."""
        with self._waiter.lock:
            self._room.release_bytes(size)

    @property
    def byte_limit(self) -> int:
        """Maximum bytes of all held caches."""
        return self._room.byte_limit

    # Received messages

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = base.DEFAULTS, checksum: int | None = None
    ) -> HeldCache:
        """Check a received cache completely and return it: see `containers.check`. Raise ProtocolError."""
        if not isinstance(body, messages.Cache):
            raise ProtocolError("unexpected", f"{body.type.name} was pushed; this table holds caches")
        return containers.check(payload, self.layout, limits, checksum=checksum)

    def add(self, client_id: bytes, sequence: int, held: HeldCache) -> int:
        """Store a checked cache, evicting old caches if there is no room. Record the cache's sums if they are newest.

        Args:
            client_id: 16 bytes.
            sequence: Sequence number of the header; of two messages of a client the higher one is newer.
            held: Result of `check` with this pool's `layout`.

        Returns:
            Number of evicted caches.

        Raises:
            ProtocolError: the cache has another layout, because parameters have changed, or is larger than the pool.
        """
        waiter = self._waiter
        with _core.Held(waiter.changed):
            self._check(held)
            if waiter.is_closed:
                return 0
            now = self._now()
            client = self._hear(client_id, now)
            client.hear(sequence, held.total_weight, held.positives, held.minimum, self._is_limited)
            held.arrived = now
            self.held.push(client, held)
            self._counts.added += 1
            evicted = self._room.evict_to_limits()
            waiter.wake_waiters()
            return evicted

    def _check(self, cache: HeldCache) -> None:
        """Raise ProtocolError if a cache is larger than the pool's limit or has another layout."""
        self._room.check(cache.nbytes)
        if cache.layout is not self.layout.core:
            raise ProtocolError("parameters", "the cache was made under parameters that have changed since")
        if cache.making != self._making:
            containers.check_settings_hash(cache, self._making)

    def sums(self, client_id: bytes, sequence: int, total_weight: float, positives: int, minimum: float) -> bool:
        """Record a client's sums from a message without a cache; return True if they are newer than before."""
        with _core.Held(self._waiter.changed):
            if self._waiter.is_closed:
                return False
            client = self._hear(client_id, self._now())
            is_newer = False
            # With limited draws, a client's weight falls to 0 while held caches can still be drawn: the sums must stay.
            if total_weight > 0.0 or not client.caches or not self._is_limited:
                is_newer = client.hear(sequence, total_weight, float(positives), minimum)
            self._waiter.wake_waiters()  # the client may have had no weight before
            return is_newer

    def _hear(self, client_id: bytes, now: float) -> HeldClient:
        """Return the client of this id, registering a new one, and record the time of the message."""
        client = self.clients.get(client_id) or self._register(client_id)
        client.heard = now
        return client

    def _register(self, client_id: bytes) -> HeldClient:
        client = self.clients[client_id] = HeldClient(client_id)
        self.held.enter(client)
        return client

    def room(self, client_id: bytes, stock_bytes: int) -> int | None:
        """Return the number of samples that a client may push now; None without a limit: see `Demand`.

        Args:
            stock_bytes: Bytes of undrawn samples that the pool may hold of the client while learners draw.
        """
        with _core.Held(self._waiter.changed):
            client = self.clients.get(client_id)
            if client is None or not client.held or self.parameters.reuse_cache:
                return None
            sample_bytes, clients = client.nbytes / client.held, len(self.held)
            stock = int(stock_bytes / sample_bytes)
            most = int(self.byte_limit / sample_bytes) // (2 * clients)
            return self._demand.room(client.unused, stock, most, self.parameters.cache_size, clients, self._clock())

    def record_contact(self, client_id: bytes) -> None:
        """Record a sign of life of a client that sent no other data."""
        with self._waiter.lock:
            if (client := self.clients.get(client_id)) is not None:
                client.heard = self._clock()

    def unregister(self, client_id: bytes) -> None:
        """Unregister a client that has ended as soon as its samples are used, before `client_timeout`. With reuse_cache
        samples are never used up: the client then expires like a silent one.
        """
        with self._waiter.lock:
            client = self.clients.get(client_id)
            if client is not None and not self.parameters.reuse_cache:
                client.heard = -math.inf

    def expire(self) -> int:
        """Expire silent clients and readers now and return the number of expired clients.

        Calls of other methods do the same about once a second.
        """
        with self._waiter.lock:
            return self._expire(self._clock())

    def _now(self) -> float:
        """Return the time, after expiring silent clients and readers if the interval is over."""
        now = self._clock()
        if now - self._expired_at > EXPIRY_INTERVAL:
            self._expire(now)
        return now

    def _expire(self, now: float) -> int:
        self._expired_at = now
        self._readers.expire(now)
        silent = self.held.silent(now - self._client_timeout, self.parameters.reuse_cache)
        for client in silent:
            self.held.leave(client)
            del self.clients[client.id]
        self._counts.left += len(silent)
        return len(silent)

    def _on_reader_expired(self, reader: bytes) -> None:
        self._demand.forget(reader)
        self._waiter.wake_waiters()  # the reader's reserved samples are free

    def _discard_stale(self, now: float) -> None:
        """Discard samples that have become too old. Called before each count of drawable samples."""
        most_age, most_lag = self.parameters.max_age, self.parameters.max_model_lag
        if most_age is None and most_lag is None:
            return
        oldest = -math.inf if most_age is None else now - most_age
        model = 0 if most_lag is None else self._newest_model - most_lag
        self._counts.passed_over += self.held.pass_over(oldest, model)

    def check_parameters(self, parameters: Parameters) -> None:
        """Raise ParameterError if the pool holds caches that were made with other values than these."""
        with self._waiter.lock:
            self._check_parameters(parameters)

    def _check_parameters(self, parameters: Parameters) -> None:
        if not self.held.caches:
            return
        for name, (wanted, current) in differing_fields(self.schema, parameters, self.parameters).items():
            expected = (
                f"{current!r} while {self.held.caches} caches are held that were made with this value; wait until they "
                f"are used, or discard them by discard_mismatched=True"
            )
            raise ParameterError(name, wanted, expected)

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Apply new parameters; return the number of evicted caches.

        Args:
            discard_mismatched: Evict held caches made with other values. If False, such caches make the call fail.

        Raises:
            ParameterError: they do not fit the schema or the held caches; nothing was changed.
        """
        with self._waiter.lock:
            if not discard_mismatched:
                self._check_parameters(parameters)
            before = self._making
            self._set_parameters(parameters)
            evicted = 0 if self._making == before else self._clear()
            self._waiter.wake_waiters()  # with reuse_cache enough samples may be available now
            return evicted

    def limit_bytes(self, byte_limit: int) -> int:
        """Set the byte limit; return the number of caches that were evicted."""
        if byte_limit < 1:
            raise ParameterError("byte_limit", byte_limit, "at least 1")
        with self._waiter.lock:
            self._room.byte_limit = byte_limit
            return self._room.evict_to_limits()

    def clear(self) -> int:
        """Discard all held caches and return their number. Clients, readers and waiting calls stay registered."""
        with self._waiter.lock:
            return self._clear()

    def _clear(self) -> int:
        count = self.held.caches
        for client in self.clients.values():
            while client.caches:
                self.held.drop_oldest(client)
        return count

    def saw_model(self, version: int) -> None:
        """Record the newest model version, from which `Parameters.max_model_lag` counts."""
        with self._waiter.lock:
            self._newest_model = max(self._newest_model, version)

    # Snapshots

    def state(self) -> dict[str, Any]:
        """Return the state of drawing beside the held data: fields of a snapshot's `TableRecord`."""
        with self._waiter.lock:
            random, drawn, elsewhere = self.held.state()
            facts = {"random": random.to_bytes(8, "little"), "drawn": drawn, "elsewhere": elsewhere}
            return facts | self._annealing.state() | {"newest_model": self._newest_model}

    def restore_state(self, state: Any, *, is_same: bool) -> None:
        """Continue from a value of `state`, before any record is restored.

        Args:
            is_same: True if this pool continues the saved pool after a restart: counts and generator continue, too.
        """
        with self._waiter.lock:
            self._newest_model = max(self._newest_model, state.newest_model)
            if is_same:
                current = self.held.state()[0]
                random = int.from_bytes(state.random, "little") if len(state.random) == 8 else current
                self.held.go_on_from(random, state.drawn, state.elsewhere)
            if not self._annealing.batches:
                self._annealing.restore_state(state.course, state.batches)

    @property
    def is_untouched(self) -> bool:
        """True if the pool never received or drew anything."""
        with self._waiter.lock:
            return not (self.held.caches or self.held.state()[1] or self._annealing.batches or self._counts.added)

    def reseed(self, seed: int) -> None:
        """Seed the generator as at the pool's creation. Call before the first draw."""
        with self._waiter.lock:
            self.held.go_on_from(seed & (2**64 - 1), *self.held.state()[1:])

    def records(self) -> Iterator[tuple[RecordBody, memoryview | bytes]]:
        """Yield body and payload of each client that has entries, followed by its caches, oldest first.

        The pool stays in use meanwhile, and is locked for one record at a time. Nothing is copied, and only the last
        yielded cache is kept alive. A client is saved as of its turn, with at most the caches of that moment. The
        iteration ends early if the layout of the held caches changes.
        """
        with self._waiter.lock:
            clients, layout = list(self.held), self.layout  # clients in the order of a draw
        for client in clients:
            with self._waiter.lock:
                if self.clients.get(client.id) is not client or not (client.caches or client.positives):
                    continue
                remaining, place = (
                    client.caches,
                    client.pushed - client.caches,
                )  # place among all caches that the client has pushed
                record = ClientRecord.from_state(client, self.held.since(client))
            yield record, b""
            for _ in range(remaining):
                with self._waiter.lock:
                    gone = client.pushed - client.caches  # caches no longer held: the place of the queue's first
                    place = max(place, gone)
                    cache = next(iter(client.queued()[place - gone :]), None)
                    if cache is None or self.layout is not layout:
                        break
                    kept = record_of(cache, self._clock())
                yield kept, cache.payload
                place += 1

    def put_record(self, record: SavedRecord) -> RestoreOutcome:
        """Register a client of a snapshot, with its sums unless newer ones are recorded; or restore one of its caches.

        If `record.stays`, a client known only from the snapshot remains until its samples are used or, with
        reuse_cache, as long as there is room, because a learner may train on a snapshot without any actor. After its
        first message the client expires like any other.
        """
        body, client = record.body, record.heading
        if isinstance(body, ClientRecord):
            with self._waiter.lock:
                self._waiter.check_open()
                self._register_saved(body, self._clock())
                self._waiter.wake_waiters()
            return RestoreOutcome(True)
        if not (isinstance(body, CacheRecord) and isinstance(client, ClientRecord)):
            raise ProtocolError("container", "the record has an unknown kind, or belongs to no client")
        held = containers.check(record.payload, self.layout, record.limits)
        if not 0 <= body.used <= held.samples or len(client.id) != 16 or not 0.0 <= body.age < math.inf:
            raise ProtocolError(
                "container", f"bad cache record: {body.used} of {held.samples} samples used, age {body.age:g} s"
            )
        with self._waiter.lock:
            self._waiter.check_open()
            self._check(held)
            now = self._clock()
            owner = self._register_saved(client, math.inf if record.stays else now)
            is_new, evicted = self._duplicates.is_new(owner, held), 0
            if is_new:
                body.restore_draw_state(held, now)
                self.held.push(owner, held)
                self._duplicates.add_summary(owner, held)
                owner.between = client.between
                self.held.set_since(owner, client.since)
                evicted = self._room.evict_to_limits()
                self._waiter.wake_waiters()
        counts = {"caches": 1, "samples": held.samples, "unused": held.samples - body.used}
        return RestoreOutcome(is_new, evicted, counts, client.id)

    def _register_saved(self, kept: ClientRecord, heard: float) -> HeldClient:
        """Register a saved client with its sums; `heard` is the last message's time for a client that is new."""
        client = self.clients.get(kept.id)
        if client is None:
            client = self._register(kept.id)
            client.heard = heard
        client.hear(kept.sequence, kept.total_weight, kept.positives, kept.minimum, self._is_limited)
        return client

    # Draws

    def entries(self) -> int:
        """Return the number of entries that can be drawn in the clients' memories, by the clients' last reports."""
        with self._waiter.lock:
            return self.held.entries()

    def get(
        self,
        samples: int,
        *,
        timeout: float | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> PooledBatch:
        """Draw a complete batch or nothing.

        Args:
            samples: At least 1.
            timeout: Seconds to wait for enough samples; None does not wait.
            out: The caller's arrays [B, ...], B = `samples`, by their names in a `Batch`; other arrays are allocated.

        Raises:
            ParameterError: an array of `out` does not fit; no sample was taken.
            NotEnoughSamples: too few unused samples, also after `timeout`; no sample was taken.
            Closed: `close` was called, also from another thread while waiting.
        """
        if not 1 <= samples <= MAX_BATCH:
            raise ParameterError("batch_size", samples, f"from 1 to {MAX_BATCH}")
        layout = self.layout
        ready = arrays_for(self.schema, layout, samples, out)
        with self._waiter.lock:
            picks = self._draw(samples, self._now()) or self._wait_for(samples, timeout or 0.0)
            drawn_by, parameters = self.layout, self.parameters
            beta = self._annealing.next(parameters)
        if drawn_by is not layout:  # parameters changed while waiting
            ready = arrays_for(self.schema, drawn_by, samples, out)
        return gathered_from(picks, drawn_by, parameters, beta, ready, self._clock())

    def _draw(self, samples: int, now: float) -> Picks | None:
        self._waiter.check_open()
        self._discard_stale(now)
        picks = self.held.draw(self.layout.core, samples, self.parameters.reuse_cache)
        (self._demand.record_shortage if picks is None else self._demand.record_draw)(samples, now)
        return picks

    def _wait_for(self, samples: int, timeout: float) -> Picks:
        """Draw the samples as soon as there are enough. Hold the lock, except while waiting."""
        began = time.monotonic()
        # Wake up regularly: an expired reader's samples become free, and no call of `wake_waiters` reports that.
        while self._waiter.wait(began + timeout, EXPIRY_INTERVAL):
            picks = self._draw(samples, self._now())
            if picks is not None:
                return picks
        self._counts.misses += 1
        waited = time.monotonic() - began if timeout else 0.0
        # Counts leave out samples reserved for readers, and are 0 with reuse_cache and unlimited draws.
        drawable, caches, clients = (
            max(0, self.held.can_serve(self.parameters.reuse_cache)),
            self.held.caches,
            len(self.clients),
        )
        old = self.parameters.lag_in_words(self._newest_model)
        why = old and f"{drawable} unused samples are held in {caches} caches of {clients} clients{old}"
        raise NotEnoughSamples(samples, drawable, caches, clients, waited, why)

    # Readers: learners that draw from several pools, over the network

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1), wanted: int | None = None
    ) -> NDArray[np.void]:
        """Reserve about `samples` unused samples for a reader; return rows [C] of `rows.CLIENT_SUMS`.

        A reader is named by its client id. A new reservation replaces the former one, and expires after
        `client_timeout` of silence. Each client with a weight has a row; `reserved` 0: the client cannot serve.

        Args:
            samples: Total; a client's part is by weight or by unused samples, whichever is more. If several readers
                draw from the same clients, at most three draws are reserved for a reader that has enough (`wanted` 0).
            elsewhere: Samples that the reader has drawn from other pools so far. The reader's batches are filled from
                all pools, so these draws count between two caches of a client as well.
            part: (i, n): only every n-th client in the order of registration, beginning with the i-th from 0.
            wanted: Samples of a batch that the reader waits for; 0: it has enough. None: unknown; all are reserved.
        """
        with self._waiter.lock:
            now = self._now()
            has_enough = wanted == 0 and len(self._readers) > part[1]  # other readers may share the clients
            keep = self._demand.most_kept(reader, samples) if has_enough else samples
            self._discard_stale(now)
            rows = self._readers.reserve(reader, keep, elsewhere, part, self.parameters.reuse_cache, now)
            self._waiter.wake_waiters()  # the reservation may be smaller than before
            self._demand.record_reserved(reader, int(rows["reserved"].sum()), len(rows), samples, bool(wanted), now)
            return rows

    def draw_counts(
        self,
        reader: bytes,
        counts: NDArray[np.void],
        *,
        now: float = 0.0,
        compression: str = "none",
        page: ReplyPage | None = None,
    ) -> Payload | None:
        """Draw samples of named clients for a reader; return the payload of a DRAWN message, None if it is empty.

        Args:
            counts: Rows [C] of `rows.CLIENT_COUNTS`. An unknown client gives nothing; a short one all its samples.
            now: Unix seconds, written into the container.
            compression: Codec of frames, which the reader must have.
            page: Page of the reply that will hold the samples.

        Raises:
            ProtocolError: more samples than `MAX_DRAWN`, or than the page has room for; no sample was taken.
            Closed: `close` was called.
        """
        check_count(int(counts["count"].sum()))
        with self._waiter.lock:
            self._waiter.check_open()
            now_here = self._clock()
            self._discard_stale(now_here)
            layout, drawn, reuse = self.layout, self._drawn_layout, self.parameters.reuse_cache
            picks, parts = self._readers.take(reader, counts, layout, drawn, reuse=reuse, now=now_here, page=page)
            self._demand.record_draw(picks.size, now_here, reader)
        if not picks.size:
            return None
        facts: dict[str, Any] = {"compression": compression, "page": page, "parts": parts}
        return draws.pack_drawn(picks, layout, drawn, now=now, clock=self._clock(), **facts)

    # Inspection

    def distribution(self, most: int = base.MAX_INSPECTED) -> Distribution:
        """Return the distribution of drawable held samples, from a random part of the clients and caches."""
        with self._waiter.lock:
            chosen = cache_inspection.choose_caches(
                self.held, self.parameters.reuse_cache, self._clock(), self._rng, most
            )
        return cache_inspection.distribution_of(chosen, most)

    def peek(self, of: tuple[bytes, int] | None = None) -> PeekedSample | None:
        """Return a copy of a random held sample, its client chosen by its share of the weight, from any of its caches.
        Or return a copy of the sample of this client's entry.
        """
        with self._waiter.lock:
            chosen = cache_inspection.choose_sample(self.held, self.layout, self._clock(), self._rng, of)
            beta = self.parameters.beta(self._annealing.batches)
        return None if chosen is None else cache_inspection.copied(chosen, beta)

    def stats(self) -> base.PoolStats:
        """Return frozen figures of the pool."""
        with self._waiter.lock:
            held, counts = self.held, asdict(self._counts) | {"drawn": self.held.drawn}
            return base.PoolStats(len(held), held.caches, held.nbytes, held.unused, held.held, **counts)

    def close(self) -> None:
        """Wake all waiting threads, which raise Closed, and release all caches. Closing again does nothing."""
        with self._waiter.lock:
            for client in self.clients.values():
                self.held.leave(client)
            self.clients.clear()
            self._waiter.close()
