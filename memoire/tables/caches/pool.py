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
from memoire.replay.parameters import Parameters, differing
from memoire.replay.sampling import Annealing
from memoire.replay.schema import Schema
from memoire.tables import base, draws
from memoire.tables.base import PutBack, RecordBody, SavedRecord
from memoire.tables.draws import MAX_BATCH, PooledBatch, arrays_for, check_count, gathered_from
from memoire.tables.inspection import Distribution, PeekedSample
from memoire.tables.pools import EXPIRY_INTERVAL, PoolLock
from memoire.wire import containers, messages
from memoire.wire._container import HeldCache
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.layout import layout_of, making_of
from memoire.wire.parts import ContainerKind, Payload
from memoire.wire.receivers import Page

from . import inspection as cache_inspection
from ._draw import HeldClient, HeldPool, Picks
from .inspection import CacheRecord, ClientRecord, HeldOnce, record_of
from .queues import CacheRoom, Demand, Readers


class Pool(
    base.TablePool, base.TakesPushes, base.HearsSums, base.BelongsToRun, base.DrawsAtRandom, base.DrawsBatches,
    base.ShowsSamples,
):  # fmt: skip
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
            names, given = "byte_limit, cache_limit and client_timeout", (byte_limit, cache_limit, client_timeout)
            raise ParameterError(names, given, "at least 1, at least 0 and above 0")
        self.schema, self._client_timeout, self._clock = schema, client_timeout, clock
        self._waiter = PoolLock()
        # Everything below belongs to the waiter's lock.
        self._rng = random.Random()
        self.held = HeldPool(self._rng.getrandbits(64) if seed is None else seed & (2**64 - 1))
        """The clients' queues of caches, with the loops over them."""
        self.clients: dict[bytes, HeldClient] = {}
        self._counts = base.PoolCounts()
        self._room = CacheRoom(self.held, self._counts, byte_limit, cache_limit)
        self._newest_model = 0  # its version; 0: there is none
        self._readers = Readers(self.held, self.clients, client_timeout, self._reader_left)
        self._expired_at = clock()  # when silent clients and readers were let go
        self._same = HeldOnce()
        self._annealing = Annealing()
        self._demand = Demand()
        self._follow(parameters or Parameters())

    def _follow(self, parameters: Parameters) -> None:
        parameters.check_for(self.schema)
        self.parameters = parameters
        self.held.limit(parameters.max_times_sampled)
        self._is_limited = parameters.max_times_sampled > 0  # clients' entries are used up as they come into caches
        self.layout = layout_of(self.schema, parameters)
        """What a cache must be like: for `containers.check`."""
        self._drawn_layout = layout_of(self.schema, parameters, ContainerKind.DRAWN)
        self._making = making_of(self.schema, parameters)  # what their samples must be made with

    def join(self, budget: ByteBudget, name: str) -> None:
        """Be a holder of that name from now on: the oldest cache leaves if others leave no room, or ask for some."""
        self._room.budget = budget.holder(name)
        budget.add_reclaimer(self._give_way)

    def _give_way(self, size: int) -> None:
        """Give so many bytes to somebody else, down to half of what may be held."""
        with self._waiter.lock:
            self._room.give_way(size)

    @property
    def byte_limit(self) -> int:
        """Bytes that held caches may have together."""
        return self._room.byte_limit

    # What comes in

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = base.DEFAULTS, checksum: int | None = None
    ) -> HeldCache:
        """A received cache, completely checked: see `unpack.check`. Raises ProtocolError."""
        if not isinstance(body, messages.Cache):
            raise ProtocolError("unexpected", f"{body.type.name} was pushed; this table holds caches")
        return containers.check(payload, self.layout, limits, checksum=checksum)

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
        waiter = self._waiter
        with _core.Held(waiter.told):
            self._check(held)
            if waiter.is_closed:
                return 0
            now = self._now()
            client = self._hear(client_id, now)
            client.hear(sequence, held.total_weight, held.positives, held.minimum, self._is_limited)
            held.arrived = now
            self.held.push(client, held)
            self._counts.added += 1
            gone = self._room.make()
            waiter.tell()
            return gone

    def _check(self, cache: HeldCache) -> None:
        """Refuse a cache that is larger than all that may be held, or of another layout. Raises ProtocolError."""
        self._room.check(cache.nbytes)
        if cache.layout is not self.layout.core:
            raise ProtocolError("parameters", "a cache made under parameters that have changed since")
        if cache.making != self._making:
            containers.check_making(cache, self._making)

    def sums(self, client_id: bytes, sequence: int, total_weight: float, positives: int, minimum: float) -> bool:
        """A client's newest sums, from a message without a cache. Returns whether they were newer than those known."""
        with _core.Held(self._waiter.told):
            if self._waiter.is_closed:
                return False
            client = self._hear(client_id, self._now())
            is_newer = False
            # No weight is left, since its entries are used up as they come into the caches that are held: stay.
            if total_weight > 0.0 or not client.caches or not self._is_limited:
                is_newer = client.hear(sequence, total_weight, float(positives), minimum)
            self._waiter.tell()  # it may have had no weight before
            return is_newer

    def _hear(self, client_id: bytes, now: float) -> HeldClient:
        """The client of that id, heard now; made when it is new."""
        client = self.clients.get(client_id) or self._enter(client_id)
        client.heard = now
        return client

    def _enter(self, client_id: bytes) -> HeldClient:
        """A new client, of which nothing is held yet."""
        client = self.clients[client_id] = HeldClient(client_id)
        self.held.enter(client)
        return client

    def room(self, client_id: bytes, stock_bytes: int) -> int | None:
        """Samples that a client is to bring now; None where nothing holds it back: see `Demand`.

        Args:
            stock_bytes: That it may hold undrawn while learners draw.
        """
        with _core.Held(self._waiter.told):
            client = self.clients.get(client_id)
            if client is None or not client.held or self.parameters.reuse_cache:
                return None
            sample_bytes, clients = client.nbytes / client.held, len(self.held)
            stock = int(stock_bytes / sample_bytes)
            most = int(self.byte_limit / sample_bytes) // (2 * clients)
            return self._demand.room(client.unused, stock, most, self.parameters.cache_size, clients, self._clock())

    def heard(self, client_id: bytes) -> None:
        """A sign of life without news."""
        with self._waiter.lock:
            if (client := self.clients.get(client_id)) is not None:
                client.heard = self._clock()

    def goodbye(self, client_id: bytes) -> None:
        """A client has ended: it leaves when its samples are used, before `client_timeout`. With reuse_cache, where
        they are never used up, it stays as long as one that is silent.
        """
        with self._waiter.lock:
            client = self.clients.get(client_id)
            if client is not None and not self.parameters.reuse_cache:
                client.heard = -math.inf

    def expire(self) -> int:
        """Let silent clients and readers go now, as all that comes in or out does about once a second.

        Returns how many clients left.
        """
        with self._waiter.lock:
            return self._expire(self._clock())

    def _now(self) -> float:
        """The time, after silent clients and readers were let go if that is due."""
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

    def _reader_left(self, reader: bytes) -> None:
        self._demand.forget(reader)
        self._waiter.tell()  # what was kept for it is free

    def _pass_over(self, now: float) -> None:
        """Let samples go that have become too old. Before anybody looks at what there is to draw."""
        most_age, most_lag = self.parameters.max_age, self.parameters.max_model_lag
        if most_age is None and most_lag is None:
            return
        oldest = -math.inf if most_age is None else now - most_age
        model = -(1 << 62) if most_lag is None else self._newest_model - most_lag
        self._counts.passed_over += self.held.pass_over(oldest, model)

    def check_parameters(self, parameters: Parameters) -> None:
        """Raise ParameterError if caches are held that were made with other values than these."""
        with self._waiter.lock:
            self._check_parameters(parameters)

    def _check_parameters(self, parameters: Parameters) -> None:
        if not self.held.caches:
            return
        for name, (told, made) in differing(self.schema, parameters, self.parameters).items():
            expected = (
                f"{made!r} while {self.held.caches} caches are held whose samples were made with it; wait until they "
                f"are used, or drop them by discard_mismatched=True"
            )
            raise ParameterError(name, told, expected)

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Follow new parameters; returns how many caches went.

        Args:
            discard_mismatched: Let held caches go that were made with other values; else they are a reason to refuse.

        Raises:
            ParameterError: they do not fit the schema, or the caches that are held; nothing was changed.
        """
        with self._waiter.lock:
            if not discard_mismatched:
                self._check_parameters(parameters)
            before = self._making
            self._follow(parameters)
            gone = 0 if self._making == before else self._clear()
            self._waiter.tell()  # with reuse_cache there may be enough now
            return gone

    def limit(self, byte_limit: int) -> int:
        """Hold at most this many bytes from now on; returns how many caches had to go."""
        if byte_limit < 1:
            raise ParameterError("byte_limit", byte_limit, "at least 1")
        with self._waiter.lock:
            self._room.byte_limit = byte_limit
            return self._room.make()

    def clear(self) -> int:
        """Let all held caches go; clients, readers and those who wait stay. Returns how many."""
        with self._waiter.lock:
            return self._clear()

    def _clear(self) -> int:
        gone = self.held.caches
        for client in self.clients.values():
            while client.caches:
                self.held.drop_oldest(client)
        return gone

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts."""
        with self._waiter.lock:
            self._newest_model = max(self._newest_model, version)

    # Snapshots

    def state(self) -> dict[str, Any]:
        """Return the state of drawing beside the held data: fields of a snapshot's `TableRecord`."""
        with self._waiter.lock:
            random, drawn, elsewhere = self.held.state()
            facts = {"random": random.to_bytes(8, "little"), "drawn": drawn, "elsewhere": elsewhere}
            return facts | self._annealing.state() | {"newest_model": self._newest_model}

    def go_on_from(self, state: Any, *, is_same: bool) -> None:
        """Take up what `state` said; before anything is put back.

        Args:
            is_same: Whether this is the pool that it was: then counts, and a generator that `state` has, go on, too.
        """
        with self._waiter.lock:
            self._newest_model = max(self._newest_model, state.newest_model)
            if is_same:
                own = self.held.state()[0]
                random = int.from_bytes(state.random, "little") if len(state.random) == 8 else own
                self.held.go_on_from(random, state.drawn, state.elsewhere)
            if not self._annealing.batches:
                self._annealing.go_on_from(state.course, state.batches)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing ever came in or was drawn."""
        with self._waiter.lock:
            return not (self.held.caches or self.held.state()[1] or self._annealing.batches or self._counts.added)

    def reseed(self, seed: int) -> None:
        """Draw as a pool that was made with this seed; before the first draw."""
        with self._waiter.lock:
            self.held.go_on_from(seed & (2**64 - 1), *self.held.state()[1:])

    def records(self) -> Iterator[tuple[RecordBody, memoryview | bytes]]:
        """Body and payload of each client that has entries, followed by its caches, oldest first.

        The pool goes on meanwhile, and is locked for one record at a time. Nothing is copied, and no cache lives longer
        for this but the one that was given last. So each client is as it is when its turn comes; of its caches there
        are as many as it had then at most. It ends early where caches of another form than at its beginning are held.
        """
        with self._waiter.lock:
            clients, layout = list(self.held), self.layout  # in the order in which a draw goes through them
        for client in clients:
            with self._waiter.lock:
                if self.clients.get(client.id) is not client or not (client.caches or client.positives):
                    continue
                left, place = client.caches, client.pushed - client.caches  # place: among all that it ever pushed
                record = ClientRecord.of(client, self.held.since(client))
            yield record, b""
            for _ in range(left):
                with self._waiter.lock:
                    gone = client.pushed - client.caches  # so many has it had: the first in its queue has this place
                    place = max(place, gone)
                    cache = next(iter(client.queued()[place - gone :]), None)
                    if cache is None or self.layout is not layout:
                        break
                    kept = record_of(cache, self._clock())
                yield kept, cache.payload
                place += 1

    def put_record(self, record: SavedRecord) -> PutBack:
        """Know a client of a snapshot, with its newest sums unless newer ones are known; or hold one of its caches.

        A client that is known by this alone stays until its samples are used or, with reuse_cache, as long as there is
        room, if `record.stays`: a learner that trains on what was kept has no actor that could be heard. Once it was
        heard, it is like any other.
        """
        body, client = record.body, record.heading
        if isinstance(body, ClientRecord):
            with self._waiter.lock:
                self._waiter.check_open()
                self._know(body, self._clock())
                self._waiter.tell()
            return PutBack(True)
        if not (isinstance(body, CacheRecord) and isinstance(client, ClientRecord)):
            raise ProtocolError("container", "a record that belongs to no client, or of a kind that is not known")
        held = containers.check(record.payload, self.layout, record.limits)
        if not 0 <= body.used <= held.samples or len(client.id) != 16 or not 0.0 <= body.age < math.inf:
            raise ProtocolError("container", f"{body.used} of {held.samples} samples drawn, {body.age:g} s old")
        with self._waiter.lock:
            self._waiter.check_open()
            self._check(held)
            now = self._clock()
            owner = self._know(client, math.inf if record.stays else now)
            is_new, gone = self._same.is_new(owner, held), 0
            if is_new:
                body.go_on(held, now)
                self.held.push(owner, held)
                self._same.pushed(owner, held)
                owner.between = client.between
                self.held.set_since(owner, client.since)
                gone = self._room.make()
                self._waiter.tell()
        counts = {"caches": 1, "samples": held.samples, "unused": held.samples - body.used}
        return PutBack(is_new, gone, counts, client.id)

    def _know(self, kept: ClientRecord, heard: float) -> HeldClient:
        """The client of a file, with its sums, which was heard then if it is new here."""
        client = self.clients.get(kept.id)
        if client is None:
            client = self._enter(kept.id)
            client.heard = heard
        client.hear(kept.sequence, kept.total_weight, kept.positives, kept.minimum, self._is_limited)
        return client

    # What goes out

    def entries(self) -> int:
        """Entries of the clients' memories that can be drawn there, as they said last."""
        with self._waiter.lock:
            return self.held.entries()

    def get(
        self,
        samples: int,
        *,
        timeout: float | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> PooledBatch:
        """Draw a batch: all of it or nothing.

        Args:
            samples: At least 1.
            timeout: Seconds to wait for enough samples; None does not wait.
            out: The caller's arrays [B, ...], B = `samples`, by the names they have in a `Batch`; others are made new.

        Raises:
            ParameterError: an array of `out` does not fit; no sample was taken.
            NotEnoughSamples: too few unused samples, also after `timeout`; none was taken.
            Closed: `close` was called, also from another thread while waiting.
        """
        if not 1 <= samples <= MAX_BATCH:
            raise ParameterError("batch_size", samples, f"from 1 to {MAX_BATCH}")
        layout = self.layout
        ready = arrays_for(self.schema, layout, samples, out)
        with self._waiter.lock:
            picks = self._draw(samples, self._now()) or self._await(samples, timeout or 0.0)
            drawn_by, parameters = self.layout, self.parameters
            beta = self._annealing.next(parameters)
        if drawn_by is not layout:  # parameters changed while waiting
            ready = arrays_for(self.schema, drawn_by, samples, out)
        return gathered_from(picks, drawn_by, parameters, beta, ready, self._clock())

    def _draw(self, samples: int, now: float) -> Picks | None:
        self._waiter.check_open()
        self._pass_over(now)
        picks = self.held.draw(self.layout.core, samples, self.parameters.reuse_cache)
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
        self._counts.misses += 1
        waited = time.monotonic() - began if timeout else 0.0
        # Those kept for readers are not among them; with reuse_cache, and any number of draws of each, there are 0.
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
            has_enough = wanted == 0 and len(self._readers) > part[1]  # and others share its clients
            keep = self._demand.most_kept(reader, samples) if has_enough else samples
            self._pass_over(now)
            rows = self._readers.reserve(reader, keep, elsewhere, part, self.parameters.reuse_cache, now)
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
            self._pass_over(now_here)
            layout, drawn, reuse = self.layout, self._drawn_layout, self.parameters.reuse_cache
            picks, parts = self._readers.take(reader, counts, layout, drawn, reuse=reuse, now=now_here, page=page)
            self._demand.drew(picks.size, now_here, reader)
        if not picks.size:
            return None
        facts: dict[str, Any] = {"compression": compression, "page": page, "parts": parts}
        return draws.pack_drawn(picks, layout, drawn, now=now, clock=self._clock(), **facts)

    # Inspection

    def distribution(self, most: int = base.MAX_INSPECTED) -> Distribution:
        """How held samples are spread: of some clients, and of some of their caches, those that can be drawn yet."""
        with self._waiter.lock:
            chosen = cache_inspection.choose_caches(
                self.held, self.parameters.reuse_cache, self._clock(), self._rng, most
            )
        return cache_inspection.distribution_of(chosen, most)

    def peek(self, of: tuple[bytes, int] | None = None) -> PeekedSample | None:
        """A copy of a random held sample: of a client by its share of the weight, out of any of its caches. Or of the
        sample of this client's entry.
        """
        with self._waiter.lock:
            chosen = cache_inspection.choose_sample(self.held, self.layout, self._clock(), self._rng, of)
            beta = self.parameters.beta(self._annealing.batches)
        return None if chosen is None else cache_inspection.copied(chosen, beta)

    def stats(self) -> base.PoolStats:
        """A frozen picture of the pool."""
        with self._waiter.lock:
            held, counts = self.held, asdict(self._counts) | {"drawn": self.held.drawn}
            return base.PoolStats(len(held), held.caches, held.nbytes, held.unused, held.held, **counts)

    def close(self) -> None:
        """Wake everyone who waits (they raise Closed) and let all caches go. Closing again does nothing."""
        with self._waiter.lock:
            for client in self.clients.values():
                self.held.leave(client)
            self.clients.clear()
            self._waiter.close()
