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
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.errors import Closed, NotEnoughSamples, ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.replay.batch import Gathered, place
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Annealing
from memoire.replay.schema import Schema
from memoire.wire import _bytes, messages, unpack
from memoire.wire._container import HeldCache
from memoire.wire.messages import CLIENT_SUMS

from . import picked
from ._draw import HeldClient, HeldPool, Picks
from .draw import MOST_BATCH, Pooled, gathered_from
from .inspection import MOST_LOOKED, Distribution, Histogram, Peeked
from .interface import DEFAULTS, PoolStats

_EVERY: Final = 1.0  # seconds between two looks for silent clients and readers
MOST_DRAWN: Final = 1 << 20
"""Samples that a reader may take at once."""
MOST_READERS: Final = 1024
"""Readers that are known at a time; one that is silent for `client_timeout` is forgotten."""
MOST_CLIENTS: Final = 512
"""Clients whose caches are looked at for a histogram."""


class KeptClient(NamedTuple):
    """A client of which something is held, as a snapshot keeps it."""

    id: bytes
    sequence: int
    """Of the message that its newest sums came with."""
    total_weight: float
    positives: float
    minimum: float
    between: float
    """D_c: samples that anyone drew between two of its caches."""


class KeptCache(NamedTuple):
    """A held cache, as a snapshot keeps it."""

    samples: int
    used: int
    """Samples that were drawn."""
    age: float
    """Seconds since it came."""
    payload: memoryview


class Pool:
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
        byte_limit: int = DEFAULTS.held_bytes,
        cache_limit: int = 0,
        client_timeout: float = DEFAULTS.client_timeout,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        if byte_limit < 1 or cache_limit < 0 or not client_timeout > 0.0:
            given = (byte_limit, cache_limit, client_timeout)
            expected = "at least 1, at least 0 and above 0"
            raise ParameterError("byte_limit, cache_limit and client_timeout", given, expected)
        self.schema = schema
        self.byte_limit, self.cache_limit, self.client_timeout = byte_limit, cache_limit, client_timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        # Everything below belongs to the lock.
        self._held = HeldPool(random.SystemRandom().getrandbits(64) if seed is None else seed & (2**64 - 1))
        self._clients: dict[bytes, HeldClient] = {}
        self._readers: dict[bytes, float] = {}  # when each was last heard
        self._elsewhere: dict[bytes, int] = {}  # what each said of its draws from other pools
        self._looked = clock()
        self._closed = False
        self._annealing = Annealing()
        self._newest_model = 0
        self._passed_over = 0
        self._waiting = 0
        self._seen: set[tuple[float, ...]] = set()  # what caches of one client look like, for `put_back`
        self._seen_of: tuple[HeldClient | None, int] = None, 0  # which client's, when it had pushed so many
        self._added = self._overwritten = self._overwritten_samples = self._left = self._misses = 0
        self._take_parameters(parameters or Parameters())

    # What comes in

    @property
    def owner(self) -> bytes:
        """Nobody: the clients own what they have pushed."""
        return b""

    @property
    def layout(self) -> Layout:
        """What a cache must be like: for `unpack.check`."""
        return self._layout

    @property
    def parameters(self) -> Parameters:
        """Those that draws follow now."""
        return self._parameters

    def configure(self, parameters: Parameters) -> int:
        """Follow new parameters. Caches of another layout fit no batch with new ones and go; returns how many."""
        with self._lock:
            before = self._layout
            self._take_parameters(parameters)
            self._tell()  # with reuse_cache there may be enough now
            if self._layout is before:
                return 0
            return self._drop_all()

    def limit(self, byte_limit: int) -> int:
        """Hold at most this many bytes from now on; returns how many caches had to go."""
        if byte_limit < 1:
            raise ParameterError("byte_limit", byte_limit, "at least 1")
        with self._lock:
            self.byte_limit = byte_limit
            return self._make_room()

    def clear(self) -> int:
        """Let all held caches go; clients, readers and whoever waits stay. Returns how many."""
        with self._lock:
            return self._drop_all()

    def _drop_all(self) -> int:
        gone = self._held.caches
        for client in self._clients.values():
            while client.caches:
                self._held.drop_oldest(client)
        return gone

    def _tell(self) -> None:
        """Have those who wait look again: something else may be drawn than before."""
        if self._waiting:
            self._filled.notify_all()

    def _take_parameters(self, parameters: Parameters) -> None:
        parameters.check_for(self.schema)
        self._parameters = parameters
        self._held.limit(parameters.max_times_sampled)
        self._layout = layout_of(self.schema, parameters)
        self._drawn_layout = layout_of(self.schema, parameters, Kind.DRAWN)

    @property
    def capacity(self) -> int:
        """0: no entries are held here, but samples."""
        return 0

    @property
    def least_bytes(self) -> int:
        """Bytes that it can be limited to at least: any number."""
        return 1

    def entries(self) -> int:
        """Entries of the clients' memories that can be drawn there, as they said last."""
        with self._lock:
            return int(self._held.entries())

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts."""
        with self._lock:
            self._newest_model = max(self._newest_model, version)

    def _pass_over(self) -> None:
        """Let samples go that have become too old. Under the lock, before anybody looks at what there is."""
        most_age, most_lag = self._parameters.max_age, self._parameters.max_model_lag
        if most_age is None and most_lag is None:
            return
        oldest = -math.inf if most_age is None else self._clock() - most_age
        model = -(1 << 62) if most_lag is None else self._newest_model - most_lag
        self._passed_over += self._held.pass_over(oldest, model)

    def apply(self, owner: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32]) -> tuple[int, int] | None:
        """None: priorities of entries are their clients' to set."""
        return None

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> HeldCache:
        """A received cache, completely checked: see `unpack.check`. Raises ProtocolError."""
        if not isinstance(body, messages.Cache):
            raise ProtocolError("unexpected", f"{body.type.name} was pushed; this table holds caches")
        return unpack.check(payload, self._layout, limits, checksum=checksum)

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
        self._check_fits(held)
        with self._lock:
            self._check_layout(held)
            if self._closed:
                return 0
            client = self._client(client_id)
            client.hear(sequence, held.total_weight, held.positives, held.minimum, self._is_limited)
            held.arrived = client.heard
            self._held.push(client, held)
            self._added += 1
            gone = self._make_room()
            self._tell()
            return gone

    @property
    def _is_limited(self) -> bool:
        """Whether clients' entries are used up as they are drawn into caches."""
        return self._parameters.max_times_sampled > 0

    def _check_fits(self, held: HeldCache) -> None:
        if held.nbytes > self.byte_limit:
            raise ProtocolError("too_large", f"a cache of {held.nbytes} bytes; the pool holds {self.byte_limit} in all")

    def _check_layout(self, held: HeldCache) -> None:
        if held.layout is not self._layout.core:
            raise ProtocolError("parameters", "a cache made under parameters that have changed since")

    # Snapshots

    def walk(self) -> Iterator[KeptClient | KeptCache]:
        """Each client that holds something, followed by its caches, oldest first.

        The pool goes on meanwhile, is locked for one step at a time, and lets go of what it would without the walk:
        nothing is copied, and no cache lives longer for it but the one that was given last. So each client is as it is
        when its turn comes; of its caches there are as many as it had then at most. It ends early where caches of
        another form than at its beginning are held.
        """
        with self._lock:
            clients, layout = list(self._clients.values()), self._layout
        for client in clients:
            with self._lock:
                left = client.caches
                place = client.pushed - left
                kept = KeptClient(
                    client.id, client.sequence, client.total_weight, client.positives, client.minimum, client.between
                )
            if left:
                yield kept
            for _ in range(left):
                with self._lock:
                    gone = (
                        client.pushed - client.caches
                    )  # caches that it has had: the first in its queue has this place
                    place = max(place, gone)
                    queue = client.queued()[place - gone :]
                    if not queue or self._layout is not layout:
                        break
                    held, place = queue[0], place + 1
                    kept_cache = KeptCache(held.samples, held.drawn, self._clock() - held.arrived, held.payload)
                del held, queue
                yield kept_cache

    def put_back(self, kept: KeptClient, held: HeldCache, *, age: float = 0.0, stays: bool = True) -> tuple[bool, int]:
        """Hold a checked cache of a client that was walked over, here or elsewhere; its newest sums count unless newer
        ones are known.

        Args:
            age: Seconds since the cache came to whom it came to first.
            stays: Whether a client that is known by this alone stays until its samples are used or, with reuse_cache,
                as long as there is room: who trains on what was kept has no actor who could be heard. Once it was
                heard, it is like any other. False: it counts as heard now.

        Returns:
            Whether it was not held already, and how many were overwritten to make room.

        Raises:
            ProtocolError: it is of another layout, or larger than the pool.
            Closed: `close` was called.
        """
        self._check_fits(held)
        with self._lock:
            if self._closed:
                raise Closed("the pool")
            self._check_layout(held)
            client = self._clients.get(kept.id)
            if client is None:
                client = self._enter(kept.id)
                client.heard = math.inf if stays else self._clock()
            client.hear(kept.sequence, kept.total_weight, kept.positives, kept.minimum, self._is_limited)
            if self._is_held(client, held):
                return False, 0
            held.arrived = self._clock() - age
            self._held.push(client, held)
            self._seen.add(_looks_of(held))
            self._seen_of = client, client.pushed
            client.between = kept.between
            gone = self._make_room()
            self._tell()
            return True, gone

    def _is_held(self, client: HeldClient, held: HeldCache) -> bool:
        """Whether a client's cache is held already. Its caches come one after the other: what they look like is noted,
        and only one that looks like another is compared.
        """
        if self._seen_of != (client, client.pushed):
            self._seen = set(map(_looks_of, client.queued()))
            self._seen_of = client, client.pushed
        return _looks_of(held) in self._seen and any(_is_same(held, other) for other in client.queued())

    def _make_room(self) -> int:
        gone = 0
        while self._held.nbytes > self.byte_limit or 0 < self.cache_limit < self._held.caches:
            largest = self._held.largest()
            assert largest is not None, "bytes are held by somebody"
            _, unused = self._held.drop_oldest(largest)
            self._overwritten += 1
            self._overwritten_samples += unused
            gone += 1
        return gone

    def sums(self, client_id: bytes, sequence: int, total_weight: float, positives: int, minimum: float) -> bool:
        """A client's newest sums, from a message without a cache. Returns whether they were newer than those known."""
        with self._lock:
            if self._closed:
                return False
            client = self._client(client_id)
            if total_weight <= 0.0 and client.caches and self._is_limited:
                return False  # its entries are used up because they were drawn into the caches that are held
            is_newer = client.hear(sequence, total_weight, float(positives), minimum)
            self._tell()  # it may have had no weight before
            return is_newer

    def heard(self, client_id: bytes) -> None:
        """A sign of life without news."""
        with self._lock:
            client = self._clients.get(client_id)
            if client is not None:
                client.heard = self._clock()

    def goodbye(self, client_id: bytes) -> None:
        """A client has ended: it leaves when its samples are used, before `client_timeout`. With reuse_cache, where
        they are never used up, it stays as long as one that is silent.
        """
        with self._lock:
            client = self._clients.get(client_id)
            if client is not None and not self._parameters.reuse_cache:
                client.heard = -math.inf

    def forget(self, client_id: bytes) -> int:
        """Drop a client and all that it holds; returns the unused samples lost."""
        with self._lock:
            client = self._clients.pop(client_id, None)
            return 0 if client is None else self._held.leave(client)[1]

    def _client(self, client_id: bytes) -> HeldClient:
        """The client of that id, heard now; made when it is new."""
        now = self._clock()
        self._look(now)
        client = self._clients.get(client_id) or self._enter(client_id)
        client.heard = now
        return client

    def _enter(self, client_id: bytes) -> HeldClient:
        client = self._clients[client_id] = HeldClient(client_id)
        self._held.enter(client)
        return client

    def expire(self) -> int:
        """Let silent clients and readers go now, as all that comes in or out does about once a second.

        Returns how many clients left.
        """
        with self._lock:
            return self._expire()

    def _look(self, now: float) -> None:
        if now - self._looked > _EVERY:
            self._expire()

    def _expire(self) -> int:
        now = self._looked = self._clock()
        for reader in [reader for reader, heard in self._readers.items() if heard < now - self.client_timeout]:
            self._held.reserve(reader, 0)
            del self._readers[reader]
            self._elsewhere.pop(reader, None)
            self._tell()
        silent = self._held.silent(now - self.client_timeout, self._parameters.reuse_cache)
        for client in silent:
            self._held.leave(client)
            del self._clients[client.id]
        self._left += len(silent)
        return len(silent)

    # What goes out

    def get(
        self, samples: int, *, timeout: float | None = None, out: Gathered | Mapping[str, NDArray[Any]] | None = None
    ) -> Pooled:
        """Draw a batch: all of it or nothing.

        Args:
            samples: At least 1.
            timeout: Seconds to wait for enough samples; None does not wait.
            out: The caller's arrays: all of them, or by the names they have in a `Batch` (others are made new).

        Raises:
            ParameterError: an array of `out` does not fit; no sample was taken.
            NotEnoughSamples: too few unused samples, also after `timeout`; none was taken.
            Closed: `close` was called, also from another thread while waiting.
        """
        if not 1 <= samples <= MOST_BATCH:
            raise ParameterError("batch_size", samples, f"from 1 to {MOST_BATCH}")
        layout = self._layout
        ready = self._ready(layout, samples, out)
        picks, drawn_by, parameters, beta = self._draw(samples, timeout)
        if drawn_by is not layout:  # parameters changed while waiting
            ready = self._ready(drawn_by, samples, out)
        return gathered_from(picks, drawn_by, parameters, beta, ready, self._clock())

    def _ready(self, layout: Layout, samples: int, out: Gathered | Mapping[str, NDArray[Any]] | None) -> Gathered:
        """Arrays for a batch: the caller's, or new ones."""
        if isinstance(out, Gathered):
            layout.check_out(out, samples)
            return out
        made = layout.allocate(samples)
        if out is not None:
            place(self.schema, made, out)
        return made

    def _draw(self, samples: int, timeout: float | None) -> tuple[Picks, Layout, Parameters, float]:
        """The samples of a batch, taken but not copied, and what they were drawn under, beta last."""
        with self._lock:
            self._look(self._clock())
            picks = self._try(samples)
            if picks is None:
                picks = self._wait(samples, timeout or 0.0)
            return picks, self._layout, self._parameters, self._annealing.next(self._parameters)

    def _try(self, samples: int) -> Picks | None:
        if self._closed:
            raise Closed("the pool")
        self._pass_over()
        return self._held.draw(self._layout.core, samples, self._parameters.reuse_cache)

    def _wait(self, samples: int, timeout: float) -> Picks:
        """The samples as soon as there are enough. The lock is held, and given up while waiting."""
        begin = time.monotonic()
        self._waiting += 1
        try:
            while (left := begin + timeout - time.monotonic()) > 0.0:
                self._filled.wait(min(left, _EVERY))
                self._look(self._clock())  # a reader that went away gives back what was kept for it
                picks = self._try(samples)
                if picks is not None:
                    return picks
        finally:
            self._waiting -= 1
        self._misses += 1
        free, held = max(0, self._held.can_serve(self._parameters.reuse_cache)), self._held
        raise NotEnoughSamples(samples, free, held.caches, len(held), time.monotonic() - begin if timeout else 0.0)

    # Whoever looks

    def distribution(self) -> Distribution:
        """How held samples are spread: of some clients, and of some of their caches, those that can be drawn yet."""
        with self._lock:
            held, unused, population = self._held.held, self._held.unused, float(self._held.entries())
            most = max((client.total_weight for client in self._clients.values()), default=0.0)
            parts = math.fsum(client.total_weight / most for client in self._clients.values()) if most > 0.0 else 0.0
            reuse, clock = self._parameters.reuse_cache, self._clock()
            chosen = self._some_caches()
        each = MOST_LOOKED // max(1, len(chosen))
        looked = [(client, _looked_at(caches, reuse, clock, each)) for client, caches in chosen]
        # Over the largest first: sums of what clients say could overflow.
        shares = [(client.total_weight / most / parts, found) for client, found in looked if len(found.chances)]
        whole = math.fsum(share for share, _ in shares)
        twice = math.fsum(share * share * float(found.chances.mean()) for share, found in shares)
        weights = np.concatenate([np.empty(0), *(found.weights for _, found in looked)])
        return Distribution(
            looked=len(weights),
            held=held if reuse else unused,
            population=population,
            total_weight=min(most * parts, sys.float_info.max),
            effective=whole / twice if twice > 0.0 else None,
            weights=Histogram.of(weights),
            ages=Histogram.of(np.concatenate([np.empty(0), *(found.ages for _, found in looked)])),
        )

    def _some_caches(self) -> list[tuple[HeldClient, list[HeldCache]]]:
        """Caches of clients that can be drawn from, of all or of some at random, for `MOST_LOOKED` samples together."""
        able = [client for client in self._clients.values() if client.caches and client.total_weight > 0.0]
        able = random.sample(able, min(len(able), MOST_CLIENTS))
        chosen = []
        for client in able:
            caches = client.queued()
            wanted = -(-MOST_LOOKED // (len(able) * max(1, caches[0].samples)))
            chosen.append((client, random.sample(caches, min(len(caches), wanted))))
        return chosen

    def peek(self) -> Peeked | None:
        """A copy of a random held sample: of a client by its share of the weight, out of any of its caches."""
        with self._lock:
            clients = [client for client in self._clients.values() if client.caches and client.total_weight > 0.0]
            if not clients:
                return None
            most = max(client.total_weight for client in clients)
            parts = [client.total_weight / most for client in clients]  # sums of what clients say could overflow
            client = random.choices(clients, parts)[0]
            held = random.choice(client.queued())
            share, population = client.total_weight / most / math.fsum(parts), float(self._held.entries())
            layout, beta, clock = self._layout, self._parameters.beta(self._annealing.batches), self._clock()
            sums = client.sequence, client.total_weight, float(client.positives), client.minimum
        # A pool of its own, with a cache of its own out of the same bytes: nothing is taken from this one.
        copy = unpack.copy_of(held, layout)
        alone, owner = HeldPool(random.getrandbits(64)), HeldClient(client.id)
        owner.hear(*sums)
        alone.enter(owner)
        alone.push(owner, copy)
        picks = alone.draw(layout.core, 1, True)
        assert picks is not None, "a held cache has a sample"
        gathered = layout.allocate(1)
        layout.gather(picks, gathered)
        gathered.age += picked.waits_of(picks, clock)
        chance = share * min(1.0, float(gathered.weight[0]) / held.total_weight)
        newest = max(1.0, sums[2])
        return Peeked(gathered, chance, population * held.positives / newest, beta)

    def stats(self) -> PoolStats:
        """A frozen picture of the pool."""
        with self._lock:
            held = self._held
            return PoolStats(
                clients=len(held),
                caches=held.caches,
                bytes=held.nbytes,
                unused=held.unused,
                held=held.held,
                added=self._added,
                drawn=held.drawn,
                overwritten=self._overwritten,
                overwritten_samples=self._overwritten_samples,
                left=self._left,
                misses=self._misses,
                passed_over=self._passed_over,
            )

    def close(self) -> None:
        """Wake everyone who waits (they raise Closed) and let all caches go. Closing again does nothing."""
        with self._lock:
            self._closed = True
            for client in self._clients.values():
                self._held.leave(client)
            self._clients.clear()
            self._filled.notify_all()

    # Readers: learners that draw from several pools, over the network

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1)
    ) -> NDArray[np.void]:
        """Keep about `samples` unused samples for a reader; returns what it may draw: rows of `rows.CLIENT_SUMS`.

        A reader is named by its client id. What it asks for replaces what it had; when it is silent for
        `client_timeout`, all of it is free again. One row for each client with a weight; `reserved` 0 says that it
        cannot serve.

        Args:
            samples: How many; of each client its part by weight or by unused samples, whichever is more.
            elsewhere: Samples that the reader has drawn from other pools so far. Its batches are filled from all of
                them, so these count between two caches of a client as well.
            part: (i, n): only of every n-th client in the order in which they came, beginning with the i-th from 0, as
                if there were no others.
        """
        if samples < 0:
            raise ParameterError("samples", samples, "at least 0")
        with self._lock:
            self._look(self._clock())
            self._hear_reader(reader)
            self._pass_over()
            before = self._elsewhere.setdefault(reader, elsewhere)
            if elsewhere > before:
                self._held.draw_elsewhere(elsewhere - before)
                self._elsewhere[reader] = elsewhere
            self._held.reserve(reader, samples, *part)
            self._tell()  # it may keep fewer than before
            return np.frombuffer(self._held.sums(reader, self._parameters.reuse_cache, *part), CLIENT_SUMS)

    def _hear_reader(self, reader: bytes) -> None:
        """A sign of life. Whoever makes names up cannot fill the memory with them. Raises ProtocolError."""
        if reader not in self._readers and len(self._readers) >= MOST_READERS:
            raise ProtocolError("busy", f"{MOST_READERS} readers draw from this server already")
        self._readers[reader] = self._clock()

    def draw_counts(
        self, reader: bytes, counts: NDArray[np.void], *, now: float = 0.0, compression: str = "none"
    ) -> Payload | None:
        """Take samples of named clients for a reader: the payload of a DRAWN message, or None where there were none.

        Args:
            counts: Rows of `rows.CLIENT_COUNTS`. A client that is not here, or has fewer, gives what there is.
            now: Unix seconds, written into the container.
            compression: Of frames, which the reader must have.

        Raises:
            ProtocolError: more than `MOST_DRAWN` samples were asked for; none was taken.
            Closed: `close` was called.
        """
        if (total := int(counts["count"].sum())) > MOST_DRAWN:
            raise ProtocolError("too_large", f"{total} samples at once; {MOST_DRAWN} are allowed. Draw smaller batches")
        names = counts["client"].tobytes()
        with self._lock:
            if self._closed:
                raise Closed("the pool")
            self._hear_reader(reader)
            wanted = [
                (client, int(count))
                for i, count in enumerate(counts["count"])
                if (client := self._clients.get(names[16 * i : 16 * i + 16])) is not None
            ]
            self._pass_over()
            picks = self._held.take(self._layout.core, reader, wanted, self._parameters.reuse_cache)
            layout, drawn = self._layout, self._drawn_layout
        if not picks.size:
            return None
        return picked.pack_drawn(picks, layout, drawn, now=now, clock=self._clock(), compression=compression)


class _LookedAt(NamedTuple):
    """What is seen of some caches of a client: of each sample, [n]."""

    weights: NDArray[np.float64]
    chances: NDArray[np.float64]
    """In the client's memory: w / S_k."""
    ages: NDArray[np.float64]


def _looked_at(caches: Sequence[HeldCache], reuse: bool, clock: float, most: int) -> _LookedAt:
    """Of these caches of one client, `most` samples: those of a cache lie in random order, so any will do."""
    found = []
    for held in caches:
        left = slice(0 if reuse else held.drawn, None)
        weights = np.frombuffer(held.part(Part.WEIGHT), "<f8")[left]
        ages = np.frombuffer(held.part(Part.AGE), "<f4")[left] + max(0.0, clock - held.arrived)
        found.append((weights, weights / held.total_weight, ages))
    return _LookedAt(*(np.concatenate([np.empty(0), *parts])[:most] for parts in zip(*found, strict=True)))


def _looks_of(held: HeldCache) -> tuple[float, ...]:
    return held.made_at, held.samples, held.total_weight, held.nbytes


def _is_same(one: HeldCache, other: HeldCache) -> bool:
    """Whether two caches came as the same bytes."""
    return _looks_of(one) == _looks_of(other) and _bytes.checksum(one.payload) == _bytes.checksum(other.payload)
