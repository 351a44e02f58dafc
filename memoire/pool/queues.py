"""Held caches, a queue for each client: what comes in, makes room, grows too old, is drawn and leaves.

    add ──▶ client 7: cache, cache, cache ──▶ draw: the oldest first
            client 9: cache               ──▶ make_room: the oldest of the client that holds most bytes
                                          ──▶ expire: all of a client that was silent

Pure: the owner has the lock, and says what time it is.
"""

from __future__ import annotations

import math

from memoire.errors import ParameterError, ProtocolError
from memoire.replay.parameters import Parameters, differing
from memoire.replay.schema import Schema
from memoire.wire._container import HeldCache
from memoire.wire.byte_budget import ByteHolder
from memoire.wire.layout import layout_of, making_of
from memoire.wire.parts import ContainerKind
from memoire.wire.unpack import check_making

from ._draw import HeldClient, HeldPool, Picks
from .stats import PoolCounts

CACHE_BYTES = 512
"""What a cache takes in memory beside its bytes."""
CLAIM_PART = 32
"""The room that is claimed beside what is held, in parts of `byte_limit` at most: not each cache asks the budget."""


class CacheQueues:
    """The caches of all clients of one table, each client's in the order in which they came.

    Args:
        schema, parameters: What the caches are made by.
        byte_limit: Maximum number of bytes of all caches together.
        cache_limit: Maximum number of caches; 0 is no limit.
        seed: For drawing.
    """

    def __init__(self, schema: Schema, parameters: Parameters, *, byte_limit: int, cache_limit: int, seed: int) -> None:
        self.schema, self.byte_limit, self.cache_limit = schema, byte_limit, cache_limit
        self.held = HeldPool(seed)
        """The queues, with the loops over them."""
        self.clients: dict[bytes, HeldClient] = {}
        self.counts = PoolCounts()
        self.newest_model = 0
        """Version of the newest model; 0: there is none."""
        self.room: ByteHolder | None = None
        """The bytes that caches take of a server's budget, a part of `byte_limit` at a time: see `make_room`."""
        self._follow(parameters)

    # Settings

    def _follow(self, parameters: Parameters) -> None:
        parameters.check_for(self.schema)
        self.parameters = parameters
        self.held.limit(parameters.max_times_sampled)
        self.is_limited = parameters.max_times_sampled > 0
        """Whether clients' entries are used up as they are drawn into caches."""
        self.layout = layout_of(self.schema, parameters)
        """What a cache must be like."""
        self.drawn_layout = layout_of(self.schema, parameters, ContainerKind.DRAWN)
        self.making = making_of(self.schema, parameters)
        """What their samples must be made with."""

    def check_parameters(self, parameters: Parameters) -> None:
        """Raise ParameterError if caches are held that were made with other values than these."""
        if not self.held.caches:
            return
        for name, (told, made) in differing(self.schema, parameters, self.parameters).items():
            expected = (
                f"{made!r} while {self.held.caches} caches are held whose samples were made with it; wait until they "
                f"are used, or drop them by discard_mismatched=True"
            )
            raise ParameterError(name, told, expected)

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Follow new parameters; returns how many caches went, since they were made with other values.

        Raises:
            ParameterError: they do not fit the schema or, without `discard_mismatched`, the caches that are held;
                nothing was changed.
        """
        if not discard_mismatched:
            self.check_parameters(parameters)
        before = self.making
        self._follow(parameters)
        return 0 if self.making == before else self.clear()

    def limit(self, byte_limit: int) -> int:
        """Hold at most this many bytes from now on; returns how many caches had to go."""
        self.byte_limit = byte_limit
        return self.make_room()

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts."""
        self.newest_model = max(self.newest_model, version)

    # What comes in

    def check(self, cache: HeldCache) -> None:
        """Refuse a cache that is larger than all that may be held, or of another layout. Raises ProtocolError."""
        if cache.nbytes > self.byte_limit:
            raise ProtocolError(
                "too_large", f"a cache of {cache.nbytes} bytes; the pool holds {self.byte_limit} in all"
            )
        if cache.layout is not self.layout.core:
            raise ProtocolError("parameters", "a cache made under parameters that have changed since")
        if cache.making != self.making:
            check_making(cache, self.making)

    def add(self, client_id: bytes, sequence: int, cache: HeldCache, now: float) -> int:
        """Queue a checked cache; its sums count if they are newest. Returns how many caches were overwritten."""
        client = self._hear(client_id, now)
        client.hear(sequence, cache.total_weight, cache.positives, cache.minimum, self.is_limited)
        cache.arrived = now
        self.held.push(client, cache)
        self.counts.added += 1
        return self.make_room()

    def sums(
        self, client_id: bytes, sequence: int, total_weight: float, positives: int, minimum: float, now: float
    ) -> bool:
        """A client's newest sums, from a message without a cache. Returns whether they were newer than those known."""
        client = self._hear(client_id, now)
        if total_weight <= 0.0 and client.caches and self.is_limited:
            return False  # its entries are used up because they were drawn into the caches that are held
        return client.hear(sequence, total_weight, float(positives), minimum)

    def _hear(self, client_id: bytes, now: float) -> HeldClient:
        """The client of that id, heard now; made when it is new."""
        client = self.clients.get(client_id) or self.enter(client_id)
        client.heard = now
        return client

    def enter(self, client_id: bytes) -> HeldClient:
        """A new client, of which nothing is held yet."""
        client = self.clients[client_id] = HeldClient(client_id)
        self.held.enter(client)
        return client

    @property
    def taken(self) -> int:
        """Bytes that all caches take in memory."""
        return self.held.nbytes + CACHE_BYTES * self.held.caches

    # What leaves

    def make_room(self, most: int | None = None) -> int:
        """Overwrite caches until the limits hold; returns how many.

        Args:
            most: Bytes that caches may take in memory; None: `byte_limit` bytes of caches.
        """
        gone, overhead, held = 0, 0 if most is None else CACHE_BYTES, self.held
        most = self.byte_limit if most is None else most
        wanted = min(held.nbytes, most) + CACHE_BYTES * held.caches
        if self.room is not None and not wanted <= self.room.count <= wanted + self.byte_limit // CLAIM_PART:
            self._claim(self.room, wanted)
        while (
            held.nbytes + overhead * held.caches > most
            or 0 < self.cache_limit < held.caches
            or (self.room is not None and held.caches > 1 and held.nbytes + CACHE_BYTES * held.caches > self.room.count)
        ):
            largest = self.held.largest()
            assert largest is not None, "bytes are held by somebody"
            _, unused = self.held.drop_oldest(largest)
            self.counts.overwritten += 1
            self.counts.overwritten_samples += unused
            gone += 1
        return gone

    def _claim(self, room: ByteHolder, size: int) -> None:
        """Take room for so many bytes and some more, or as much as there is; or give back what is too much."""
        missing = size - room.count
        if not room.try_take(missing + self.byte_limit // CLAIM_PART // 2):
            room.try_take(missing)

    def clear(self) -> int:
        """Let all caches go; clients stay. Returns how many."""
        gone = self.held.caches
        for client in self.clients.values():
            while client.caches:
                self.held.drop_oldest(client)
        return gone

    def heard(self, client_id: bytes, now: float) -> None:
        """A sign of life of a client that is known."""
        client = self.clients.get(client_id)
        if client is not None:
            client.heard = now

    def goodbye(self, client_id: bytes) -> None:
        """A client has ended: it leaves when its samples are used, before it counts as silent. With reuse_cache, where
        they are never used up, it stays as long as one that is silent.
        """
        client = self.clients.get(client_id)
        if client is not None and not self.parameters.reuse_cache:
            client.heard = -math.inf

    def forget(self, client_id: bytes) -> int:
        """Drop a client and all that it holds; returns the unused samples lost."""
        client = self.clients.pop(client_id, None)
        return 0 if client is None else self.held.leave(client)[1]

    def forget_all(self) -> None:
        """Drop all clients and all caches."""
        for client in self.clients.values():
            self.held.leave(client)
        self.clients.clear()

    def expire(self, since: float) -> int:
        """Let clients go that were last heard before `since` and may leave; returns how many."""
        silent = self.held.silent(since, self.parameters.reuse_cache)
        for client in silent:
            self.held.leave(client)
            del self.clients[client.id]
        self.counts.left += len(silent)
        return len(silent)

    def pass_over(self, now: float) -> None:
        """Let samples go that have become too old. Before anybody looks at what there is to draw."""
        most_age, most_lag = self.parameters.max_age, self.parameters.max_model_lag
        if most_age is None and most_lag is None:
            return
        oldest = -math.inf if most_age is None else now - most_age
        model = -(1 << 62) if most_lag is None else self.newest_model - most_lag
        self.counts.passed_over += self.held.pass_over(oldest, model)

    # What goes out

    def draw(self, samples: int, now: float) -> Picks | None:
        """Samples of all clients, taken but not copied; None, and nothing taken, where there are too few."""
        self.pass_over(now)
        return self.held.draw(self.layout.core, samples, self.parameters.reuse_cache)

    def why_few(self) -> str:
        """What a draw lacks, in words, if models are too old for it; else ""."""
        old = self.parameters.lag_in_words(self.newest_model)
        held = f"{self.drawable()} unused samples are held in {self.held.caches} caches of {len(self.clients)} clients"
        return old and held + old

    def drawable(self) -> int:
        """Samples that one draw could take, those kept for readers not among them. With reuse_cache, and any number of
        draws of each, 0.
        """
        return max(0, self.held.can_serve(self.parameters.reuse_cache))
