"""Room for held caches, the demand of learners, and reservations of readers. Pure: the owner locks and passes the time.

    add ──▶ client 7: cache, cache, cache ──▶ draw: the oldest first
            client 9: cache               ──▶ room: the oldest of the client that holds most bytes
                                          ──▶ expire: all of a client that was silent

Demand limits how far actors may run ahead of learners. A client pushes only samples that a learner may draw:

    no learner draws ──────────────────▶ everything is wanted: the newest caches overwrite the oldest
    a draw had too few samples ────────▶ everything is wanted
    learners draw, and a client has
      less than its stock undrawn ─────▶ wanted, up to the stock
      a stock undrawn ─────────────────▶ not wanted until a part of the stock was drawn

Without this rule, actors that are faster than learners make caches that are overwritten undrawn or become old in the
queue. If actors share a machine with servers and learners, that work takes processor time from them.

Readers are learners that draw from several servers' pools, over the network.

    SUMS, DRAW ──▶ reserve: unused samples are reserved, and the reader receives the drawable sums of each client
    DRAW       ──▶ take: the samples of named clients that the reader chose

A reservation ends when its reader has been silent for the timeout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError, ProtocolError
from memoire.tables.base import PoolCounts
from memoire.tables.draws import DistinctRows, most_bytes
from memoire.wire.byte_budget import ByteHolder, PeerTable
from memoire.wire.layout import ContainerLayout
from memoire.wire.receivers import ReplyPage
from memoire.wire.rows import CLIENT_SUMS

from ._draw import HeldClient, HeldPool, Picks

CACHE_BYTES = 512
"""Memory overhead of a cache in bytes."""
CLAIM_PART = 32
"""Part of `byte_limit`, as a divisor, that the budget claim may exceed the held bytes, so that claims are rare."""


class CacheRoom:
    """Room for caches: enforces the limits by evicting the oldest cache of the client that holds most bytes.

    Args:
        held: Queues of the clients.
        counts: Counters of the pool, updated by evictions.
        byte_limit: Maximum bytes of all held caches.
        cache_limit: Maximum number of held caches; 0 is no limit.
    """

    def __init__(self, held: HeldPool, counts: PoolCounts, byte_limit: int, cache_limit: int) -> None:
        self._held, self._counts, self.byte_limit, self._cache_limit = held, counts, byte_limit, cache_limit
        self.budget: ByteHolder | None = None
        """Holder of the caches' bytes in the server's budget; claims a part of `byte_limit` at a time."""

    def _memory_bytes(self) -> int:
        return self._held.nbytes + CACHE_BYTES * self._held.caches

    def check(self, size: int) -> None:
        """Raise ProtocolError for a cache that is larger than the whole pool."""
        if size > self.byte_limit:
            raise ProtocolError("too_large", f"the cache has {size} bytes; the table holds at most {self.byte_limit}")

    def evict_to_limits(self, most: int | None = None) -> int:
        """Evict caches until the limits hold; return the number of evicted caches.

        Args:
            most: Maximum bytes of caches with their memory overhead; None: `byte_limit` bytes without overhead.
        """
        evicted, overhead, held, budget = 0, 0 if most is None else CACHE_BYTES, self._held, self.budget
        most = self.byte_limit if most is None else most
        wanted = min(held.nbytes, most) + CACHE_BYTES * held.caches
        if budget is not None and not wanted <= budget.count <= wanted + self.byte_limit // CLAIM_PART:
            missing = wanted - budget.count  # the queue adds a reserve; a surplus is given back
            if not budget.try_take(missing + self.byte_limit // CLAIM_PART // 2):
                budget.try_take(missing)
        while (
            held.nbytes + overhead * held.caches > most
            or 0 < self._cache_limit < held.caches
            or (budget is not None and held.caches > 1 and held.nbytes + CACHE_BYTES * held.caches > budget.count)
        ):
            largest = held.largest()
            assert largest is not None, "a client holds the bytes"
            _, unused = held.drop_oldest(largest)
            self._counts.overwritten += 1
            self._counts.overwritten_samples += unused
            evicted += 1
        return evicted

    def release_bytes(self, size: int) -> None:
        """Release this many bytes of the budget for another holder, down to half of `byte_limit`."""
        assert self.budget is not None
        most = max(self.byte_limit // 2, self.budget.count - size)
        self.evict_to_limits(most)
        self.budget.try_take(min(0, max(most, self._memory_bytes()) - self.budget.count))


DRAWING_TIMEOUT = 2.0
"""Seconds after a draw during which learners count as drawing."""
SHORTAGE_TIMEOUT = 0.5
"""Seconds after a failed draw during which everything is wanted. After as many seconds of waiting, a reader that got
too few samples makes everything wanted.
"""
MIN_CACHES = 2
"""Minimum stock of a client, in caches: one that is being drawn from and one that is ready."""
MIN_DRAWS, SHORT_DRAWS = 4, 2
"""Draws that a full stock serves to a reader, and the number below which a reader is short. The difference covers a
draw that was just made, and the part that must be drawn before more is wanted.
"""
KEPT_DRAWS = 3
"""Maximum number of draws reserved for a reader that shares clients with other readers."""
STOCK_TIME = 0.5
"""Seconds of drawing that all stocks together must last: the longest time until a waiting client asks again."""
PART_TIME = 0.1
"""Seconds of drawing after which a waiting client may continue: at most a quarter of its stock, at least a cache."""
RATE_INTERVAL = 0.25
"""Seconds over which the rate of draws is measured."""
HERE = b""
"""Name of the drawer in the pool's own process. Readers have other names."""


@dataclass(slots=True)
class _Drawer:
    """Draw statistics of the local learner or of a reader."""

    clients: int = 0
    """Number of clients that the drawer may draw from; 0: unknown, counts as all."""
    draw: int = 0
    """Samples of a large draw; smaller draws let the number shrink slowly."""
    drew_at: float = -math.inf


class Demand:
    """Recent draws and shortages, which determine the samples that clients may push. The owner locks and passes the
    time.

    A drawer is `HERE`, or a reader's name.
    """

    def __init__(self) -> None:
        self._drawers: dict[bytes, _Drawer] = {HERE: _Drawer()}
        self._drew_at = self._short_at = -math.inf
        self._rate = 0.0  # samples per second
        self._count, self._counted_at = 0, -math.inf  # samples drawn since `_counted_at`

    def record_draw(self, samples: int, now: float, who: bytes = HERE) -> None:
        """Record a draw of this many samples."""
        drawer = self._drawers.setdefault(who, _Drawer())
        drawer.drew_at, drawer.draw = now, max(samples, drawer.draw - drawer.draw // 64)
        self._drew_at = now
        self._count += samples
        if (passed := now - self._counted_at) >= RATE_INTERVAL:
            self._rate = self._count / passed
            self._count, self._counted_at = 0, now

    def record_shortage(self, samples: int, now: float) -> None:
        """Record a local draw that failed because fewer than this many samples were available."""
        drawer = self._drawers[HERE]
        self._short_at, drawer.draw = now, max(samples, drawer.draw)

    def record_reserved(self, reader: bytes, samples: int, clients: int, asked: int, waits: bool, now: float) -> None:
        """Record how many samples of how many clients are reserved for a reader that asked for `asked`.

        The reader is short of samples if it got less than half, and that is below `SHORT_DRAWS` draws, or the reader
        waits and has drawn nothing for a while. A reader without clients of its own is never short. A reader of several
        servers asks each server for its whole need, and draws a part there.
        """
        drawer = self._drawers.setdefault(reader, _Drawer())
        drawer.clients = clients
        is_late = waits and now - drawer.drew_at >= SHORTAGE_TIMEOUT
        if clients and 2 * samples < asked and (samples < SHORT_DRAWS * drawer.draw or is_late):
            self._short_at = now

    def most_kept(self, reader: bytes, asked: int) -> int:
        """Return how many of the requested samples to reserve for a reader that shares clients with other readers."""
        drawer = self._drawers.get(reader)
        return min(asked, KEPT_DRAWS * drawer.draw) if drawer and drawer.draw else asked

    def forget(self, reader: bytes) -> None:
        """Remove a reader that draws no more."""
        self._drawers.pop(reader, None)

    def _stock_of_draws(self, clients: int) -> int:
        """Return the samples per client that give every drawer `MIN_DRAWS` draws: all drawers from all clients, and
        each alone from its own clients.
        """
        together = sum(each.draw for each in self._drawers.values()) / clients
        alone = max(each.draw / (each.clients or clients) for each in self._drawers.values())
        return math.ceil(MIN_DRAWS * max(together, alone))

    def room(self, unused: int, stock: int, most: int, cache_size: int, clients: int, now: float) -> int | None:
        """Return the number of samples that a client may push now; None for no limit.

        Args:
            unused: Held samples of the client that were never drawn.
            stock: Undrawn samples that a client may have; more if learners draw fast.
            most: Upper limit of the stock.
            cache_size: Samples of a cache.
            clients: Number of clients in the pool.
        """
        if now - self._drew_at > DRAWING_TIMEOUT or now - self._short_at < SHORTAGE_TIMEOUT:
            return None
        clients = max(1, clients)
        fast = min(most, int(self._rate * STOCK_TIME) // clients)
        stock = max(stock, fast, MIN_CACHES * cache_size, self._stock_of_draws(clients))
        part = min(stock // 4, max(cache_size, int(self._rate * PART_TIME) // clients))
        room = stock - unused
        return room if room >= part else 0


MAX_READERS: Final = 1024
"""Maximum number of known readers; a reader expires after `client_timeout` of silence."""


class Readers:
    """Reservations of readers in the clients' queues, and draws from them.

    Args:
        held, clients: Queues and clients that the readers draw from.
        timeout: Seconds of silence after which a reader expires.
        left: Callback, called with each reader that expires.
    """

    def __init__(
        self,
        held: HeldPool,
        clients: Mapping[bytes, HeldClient],
        timeout: float,
        left: Callable[[bytes], object],
    ) -> None:
        self._held, self._clients, self._left = held, clients, left
        # Samples that each reader reported as drawn from other pools. The limit bounds memory against invented names.
        self._elsewhere: PeerTable[bytes, int | None] = PeerTable(
            "readers that draw from this server", MAX_READERS, timeout, self._leave
        )

    def __len__(self) -> int:
        return len(self._elsewhere)

    def expire(self, now: float) -> None:
        """Expire silent readers, so that their reserved samples become free."""
        self._elsewhere.expire(now)

    def _leave(self, reader: bytes, _: int | None) -> None:
        self._held.reserve(reader, 0)
        self._left(reader)

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int, part: tuple[int, int], reuse: bool, now: float
    ) -> NDArray[np.void]:
        """Reserve about `samples` unused samples for a reader, replacing its reservation: see `Pool.reserve`.

        Returns:
            Rows [C] of `rows.CLIENT_SUMS`, read-only, one for each client.

        Raises:
            ParameterError: samples is below 0.
            ProtocolError: there are too many readers.
        """
        if samples < 0:
            raise ParameterError("samples", samples, "at least 0")
        held, before = self._held, self._elsewhere.get(reader)
        before = elsewhere if before is None else before
        self._elsewhere.put(reader, max(before, elsewhere), now)
        if elsewhere > before:
            held.draw_elsewhere(elsewhere - before)
        held.reserve(reader, samples, *part)
        return np.frombuffer(held.sums(reader, reuse, *part), CLIENT_SUMS)

    def take(
        self,
        reader: bytes,
        counts: NDArray[np.void],
        layout: ContainerLayout,
        drawn: ContainerLayout,
        *,
        reuse: bool,
        now: float,
        page: ReplyPage | None = None,
    ) -> tuple[Picks, DistinctRows | None]:
        """Draw samples of named clients by rows [C] of `rows.CLIENT_COUNTS`, in the order of the rows, without copying.
        An unknown client gives nothing; a short one all its samples. Returns also the distinct rows, if they were
        needed to compute the exact size.

        Args:
            layout, drawn: Layouts of caches and of drawn containers.
            page: Page of the reply that will hold the samples.

        Raises:
            ProtocolError: there are too many readers, or (code "too_large") the page has no room; nothing was taken.
        """
        self._elsewhere.put(reader, self._elsewhere.get(reader), now)
        held, names = self._held, counts["client"].tobytes()
        wanted = [
            (client, int(count))
            for i, count in enumerate(counts["count"])
            if (client := self._clients.get(names[16 * i : 16 * i + 16])) is not None
        ]
        if page is None or most_bytes(drawn, sum(count for _, count in wanted)) <= page.payload_room:
            return held.take(layout.core, reader, wanted, reuse), None
        saved = held.save(wanted, reuse)
        picks = held.take(layout.core, reader, wanted, reuse)
        parts = DistinctRows(picks, layout, drawn)
        try:
            page.count_row(f"{picks.size} samples", payload=parts.nbytes)
        except ProtocolError:
            held.restore(saved)
            raise
        return picks, parts
