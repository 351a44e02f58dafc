"""Held caches, a queue for each client: what comes in, makes room, grows too old, is drawn and leaves.

    add ──▶ client 7: cache, cache, cache ──▶ draw: the oldest first
            client 9: cache               ──▶ make_room: the oldest of the client that holds most bytes
                                          ──▶ expire: all of a client that was silent

Pure: the owner has the lock, and says what time it is.

Whether learners want more of a client, or would never draw what it brings: how far actors may run ahead. Pure.

    nobody draws ──────────────────────▶ everything is wanted: the newest caches overwrite the oldest
    a draw found too little ───────────▶ everything is wanted
    learners draw, and a client has
      less than its stock undrawn ─────▶ wanted, up to the stock
      a stock undrawn ─────────────────▶ not wanted until a part of it was drawn

Without this rule, actors that are faster than learners make caches that are overwritten undrawn, or grow old in the
queue. On a machine that they share with servers and learners, that work takes these the processor.

Readers: learners that draw from several servers' pools, over the network. Pure.

    SUMS, DRAW ──▶ reserve: unused samples are kept for the reader, and it is told of each client what it may draw
    DRAW       ──▶ take: the samples of named clients that the reader chose

What is kept for a reader is free again when it has been silent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError, ProtocolError
from memoire.replay.parameters import Parameters, differing
from memoire.replay.schema import Schema
from memoire.tables.base import PoolCounts
from memoire.tables.draws import DistinctRows, most_bytes
from memoire.tables.pools import Presence
from memoire.wire._container import HeldCache
from memoire.wire.byte_budget import ByteHolder
from memoire.wire.containers import check_making
from memoire.wire.layout import layout_of, making_of
from memoire.wire.parts import ContainerKind
from memoire.wire.receivers import Page
from memoire.wire.rows import CLIENT_SUMS

from ._draw import HeldClient, HeldPool, Picks

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


DRAWING_TIMEOUT = 2.0
"""Seconds after a draw for which learners count as drawing."""
SHORTAGE_TIMEOUT = 0.5
"""Seconds after a draw that found too little for which everything is wanted; also those for which a reader may wait
before everything is wanted that it asked for.
"""
MIN_CACHES = 2
"""Caches that a client has in stock at least: one is drawn from, one is ready."""
MIN_DRAWS, SHORT_DRAWS = 4, 2
"""Draws that a reader finds in a full stock, and those below which it is short. Between them lie one that was just
taken, and the part that has to be drawn before more is wanted.
"""
KEPT_DRAWS = 3
"""Draws that are kept for a reader at most where others draw from the same clients, so that it leaves them theirs."""
STOCK_TIME = 0.5
"""Seconds of drawing for which the stocks of all clients together last: as long as one that waits may take to ask."""
PART_TIME = 0.1
"""Seconds of drawing after which one that waits may go on, at most a quarter of its stock and at least a cache."""
RATE_INTERVAL = 0.25
"""Seconds over which the rate of draws is taken."""
HERE = b""
"""Who draws in the pool's own process. Readers have names."""


@dataclass(slots=True)
class _Drawer:
    """Somebody who draws."""

    clients: int = 0
    """That it may draw from here; 0 if nobody has said so, which means all."""
    draw: int = 0
    """Samples of a large draw; a smaller one lets it shrink."""
    drew_at: float = -math.inf


class Demand:
    """What was drawn and what was missing lately. The owner locks, and says what time it is.

    Who draws is `HERE`, or a reader's name.
    """

    def __init__(self) -> None:
        self._drawers: dict[bytes, _Drawer] = {HERE: _Drawer()}
        self._drew_at = self._short_at = -math.inf
        self._rate = 0.0  # samples a second
        self._count, self._counted_at = 0, -math.inf  # drawn since

    def drew(self, samples: int, now: float, who: bytes = HERE) -> None:
        """A draw took so many samples."""
        drawer = self._drawers.setdefault(who, _Drawer())
        drawer.drew_at, drawer.draw = now, max(samples, drawer.draw - drawer.draw // 64)
        self._drew_at = now
        self._count += samples
        if (passed := now - self._counted_at) >= RATE_INTERVAL:
            self._rate = self._count / passed
            self._count, self._counted_at = 0, now

    def was_short(self, samples: int, now: float) -> None:
        """A draw of so many samples, here, found too few."""
        drawer = self._drawers[HERE]
        self._short_at, drawer.draw = now, max(samples, drawer.draw)

    def kept(self, reader: bytes, samples: int, clients: int, asked: int, waits: bool, now: float) -> None:
        """So many samples, of so many clients, are kept for a reader that asked for more. They are too few if neither
        half of that is there nor `SHORT_DRAWS`, or if it says that it waits, and has drawn nothing for a while. A
        reader to whom no client belongs waits for nobody who is here.

        A reader of several servers asks each of them for all that it may need, and draws a part of it.
        """
        drawer = self._drawers.setdefault(reader, _Drawer())
        drawer.clients = clients
        is_late = waits and now - drawer.drew_at >= SHORTAGE_TIMEOUT
        if clients and 2 * samples < asked and (samples < SHORT_DRAWS * drawer.draw or is_late):
            self._short_at = now

    def most_kept(self, reader: bytes, asked: int) -> int:
        """How much of what a reader asks for to keep for it, where others draw from the same clients."""
        drawer = self._drawers.get(reader)
        return min(asked, KEPT_DRAWS * drawer.draw) if drawer and drawer.draw else asked

    def forget(self, reader: bytes) -> None:
        """It draws no more."""
        self._drawers.pop(reader, None)

    def _stock_of_draws(self, clients: int) -> int:
        """Samples of each client with which everybody finds `MIN_DRAWS`: of so many clients, all drawers together, or
        one alone of those that belong to it.
        """
        together = sum(each.draw for each in self._drawers.values()) / clients
        alone = max(each.draw / (each.clients or clients) for each in self._drawers.values())
        return math.ceil(MIN_DRAWS * max(together, alone))

    def room(self, unused: int, stock: int, most: int, cache_size: int, clients: int, now: float) -> int | None:
        """Samples that a client may bring now; None where nothing holds it back.

        Args:
            unused: Samples of the client that are held and were never drawn.
            stock: Samples that a client may have undrawn; it may have more if learners draw fast.
            most: And at most that many then.
            cache_size: Samples of a cache.
            clients: That the pool knows.
        """
        if now - self._drew_at > DRAWING_TIMEOUT or now - self._short_at < SHORTAGE_TIMEOUT:
            return None
        clients = max(1, clients)
        fast = min(most, int(self._rate * STOCK_TIME) // clients)
        stock = max(stock, fast, MIN_CACHES * cache_size, self._stock_of_draws(clients))
        part = min(stock // 4, max(cache_size, int(self._rate * PART_TIME) // clients))
        room = stock - unused
        return room if room >= part else 0


MAX_DRAWN: Final = 1 << 20
"""Samples that a reader may take at once."""
MAX_READERS: Final = 1024
"""Readers that are known at a time; one that is silent for `client_timeout` is forgotten."""


def check_count(samples: int) -> None:
    """Refuse to draw more than `MAX_DRAWN` samples at once. Raises ProtocolError."""
    if samples > MAX_DRAWN:
        raise ProtocolError("too_large", f"{samples} samples at once; {MAX_DRAWN} are allowed. Draw smaller batches")


class Readers:
    """What is kept for each reader in the queues of clients, and what it takes.

    Args:
        queues: What they draw from.
        timeout: Seconds of silence after which a reader is forgotten.
        now: Seconds of the clock that all other times are of.
    """

    def __init__(self, queues: CacheQueues, timeout: float, now: float) -> None:
        self._queues = queues
        self.present = Presence(timeout, now)
        """When each was heard; it says when to `expire` again."""
        self._elsewhere: dict[bytes, int] = {}  # samples that each said it drew from other pools

    def expire(self, now: float) -> list[bytes]:
        """Forget silent readers, so that what was kept for them is free; returns them."""
        silent = self.present.expire(now)
        for reader in silent:
            self._queues.held.reserve(reader, 0)
            self._elsewhere.pop(reader, None)
        return silent

    def _hear(self, reader: bytes, now: float) -> None:
        """A sign of life. Somebody who makes names up cannot fill the memory with them. Raises ProtocolError."""
        if reader not in self.present and len(self.present) >= MAX_READERS:
            raise ProtocolError("busy", f"{MAX_READERS} readers draw from this server already")
        self.present.heard(reader, now)

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int, part: tuple[int, int], now: float
    ) -> NDArray[np.void]:
        """Keep about `samples` unused samples for a reader, in place of what it had: see `Pool.reserve`.

        Returns:
            Rows [C] of `rows.CLIENT_SUMS`, read-only, one for each client.

        Raises:
            ParameterError: samples is below 0.
            ProtocolError: there are too many readers.
        """
        if samples < 0:
            raise ParameterError("samples", samples, "at least 0")
        self._hear(reader, now)
        queues = self._queues
        queues.pass_over(now)
        before = self._elsewhere.setdefault(reader, elsewhere)
        if elsewhere > before:
            queues.held.draw_elsewhere(elsewhere - before)
            self._elsewhere[reader] = elsewhere
        queues.held.reserve(reader, samples, *part)
        return np.frombuffer(queues.held.sums(reader, queues.parameters.reuse_cache, *part), CLIENT_SUMS)

    def take(
        self, reader: bytes, counts: NDArray[np.void], now: float, page: Page | None = None
    ) -> tuple[Picks, DistinctRows | None]:
        """Take samples of named clients, by rows [C] of `rows.CLIENT_COUNTS`: a client that is not here, or has
        fewer, gives what there is. They are in the order of the rows, and not copied. Returns also what they share, if
        their exact size had to be found.

        Args:
            page: Of the reply that is to have them.

        Raises:
            ProtocolError: there are too many readers, or (code "too_large") the page has no room; nothing was taken.
        """
        self._hear(reader, now)
        queues, names = self._queues, counts["client"].tobytes()
        wanted = [
            (client, int(count))
            for i, count in enumerate(counts["count"])
            if (client := queues.clients.get(names[16 * i : 16 * i + 16])) is not None
        ]
        queues.pass_over(now)
        held, layout, drawn, reuse = queues.held, queues.layout, queues.drawn_layout, queues.parameters.reuse_cache
        if page is None or most_bytes(drawn, sum(count for _, count in wanted)) <= page.payload_room:
            return held.take(layout.core, reader, wanted, reuse), None
        saved = held.save(wanted, reuse)
        picks = held.take(layout.core, reader, wanted, reuse)
        parts = DistinctRows(picks, layout, drawn)
        try:
            page.takes(f"{picks.size} samples", payload=parts.nbytes)
        except ProtocolError:
            held.restore(saved)
            raise
        return picks, parts
