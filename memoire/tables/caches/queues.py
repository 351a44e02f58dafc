"""Room for held caches, how much of them learners want, and readers. Pure: the owner locks, and says what time it is.

    add ──▶ client 7: cache, cache, cache ──▶ draw: the oldest first
            client 9: cache               ──▶ room: the oldest of the client that holds most bytes
                                          ──▶ expire: all of a client that was silent

Whether learners want more of a client, or would never draw what it brings: how far actors may run ahead.

    nobody draws ──────────────────────▶ everything is wanted: the newest caches overwrite the oldest
    a draw found too little ───────────▶ everything is wanted
    learners draw, and a client has
      less than its stock undrawn ─────▶ wanted, up to the stock
      a stock undrawn ─────────────────▶ not wanted until a part of it was drawn

Without this rule, actors that are faster than learners make caches that are overwritten undrawn, or grow old in the
queue. On a machine that they share with servers and learners, that work takes these the processor.

Readers: learners that draw from several servers' pools, over the network.

    SUMS, DRAW ──▶ reserve: unused samples are kept for the reader, and it is told of each client what it may draw
    DRAW       ──▶ take: the samples of named clients that the reader chose

What is kept for a reader is free again when it has been silent.
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
from memoire.wire.receivers import Page
from memoire.wire.rows import CLIENT_SUMS

from ._draw import HeldClient, HeldPool, Picks

CACHE_BYTES = 512
"""What a cache takes in memory beside its bytes."""
CLAIM_PART = 32
"""The room that is claimed beside what is held, in parts of `byte_limit` at most: not each cache asks the budget."""


class CacheRoom:
    """The room that caches take: where there is no more, the oldest of the client that holds most bytes leaves.

    Args:
        held: The clients' queues.
        counts: Counts what leaves.
        byte_limit: Bytes that held caches may have together.
        cache_limit: Caches that may be held; 0 is no limit.
    """

    def __init__(self, held: HeldPool, counts: PoolCounts, byte_limit: int, cache_limit: int) -> None:
        self._held, self._counts, self.byte_limit, self._cache_limit = held, counts, byte_limit, cache_limit
        self.budget: ByteHolder | None = None
        """The bytes that caches take of a server's budget, a part of `byte_limit` at a time."""

    def _taken(self) -> int:
        """Bytes that all caches take in memory."""
        return self._held.nbytes + CACHE_BYTES * self._held.caches

    def check(self, size: int) -> None:
        """Refuse a cache that is larger than all that may be held. Raises ProtocolError."""
        if size > self.byte_limit:
            raise ProtocolError("too_large", f"a cache of {size} bytes; the pool holds {self.byte_limit} in all")

    def make(self, most: int | None = None) -> int:
        """Overwrite caches until the limits hold; returns how many.

        Args:
            most: Bytes that caches may take in memory; None: `byte_limit` bytes of caches.
        """
        gone, overhead, held, budget = 0, 0 if most is None else CACHE_BYTES, self._held, self.budget
        most = self.byte_limit if most is None else most
        wanted = min(held.nbytes, most) + CACHE_BYTES * held.caches
        if budget is not None and not wanted <= budget.count <= wanted + self.byte_limit // CLAIM_PART:
            missing = wanted - budget.count  # and some more, or as much as there is; what is too much is given back
            if not budget.try_take(missing + self.byte_limit // CLAIM_PART // 2):
                budget.try_take(missing)
        while (
            held.nbytes + overhead * held.caches > most
            or 0 < self._cache_limit < held.caches
            or (budget is not None and held.caches > 1 and held.nbytes + CACHE_BYTES * held.caches > budget.count)
        ):
            largest = held.largest()
            assert largest is not None, "bytes are held by somebody"
            _, unused = held.drop_oldest(largest)
            self._counts.overwritten += 1
            self._counts.overwritten_samples += unused
            gone += 1
        return gone

    def give_way(self, size: int) -> None:
        """Give so many bytes of the budget to another holder, down to half of what may be held."""
        assert self.budget is not None
        most = max(self.byte_limit // 2, self.budget.count - size)
        self.make(most)
        self.budget.try_take(min(0, max(most, self._taken()) - self.budget.count))


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


MAX_READERS: Final = 1024
"""Readers that are known at a time; one that is silent for `client_timeout` is forgotten."""


class Readers:
    """What is kept for each reader in the queues of clients, and what it takes.

    Args:
        held, clients: What they draw from.
        timeout: Seconds of silence after which a reader is forgotten.
        left: Called with each reader that is forgotten.
    """

    def __init__(
        self,
        held: HeldPool,
        clients: Mapping[bytes, HeldClient],
        timeout: float,
        left: Callable[[bytes], object],
    ) -> None:
        self._held, self._clients, self._left = held, clients, left
        # Samples that each said it drew from other pools. Names that somebody makes up cannot fill the memory.
        self._elsewhere: PeerTable[bytes, int | None] = PeerTable(
            "readers that draw from this server", MAX_READERS, timeout, self._leave
        )

    def __len__(self) -> int:
        return len(self._elsewhere)

    def expire(self, now: float) -> None:
        """Forget silent readers, so that what was kept for them is free."""
        self._elsewhere.expire(now)

    def _leave(self, reader: bytes, _: int | None) -> None:
        self._held.reserve(reader, 0)
        self._left(reader)

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int, part: tuple[int, int], reuse: bool, now: float
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
        page: Page | None = None,
    ) -> tuple[Picks, DistinctRows | None]:
        """Take samples of named clients, by rows [C] of `rows.CLIENT_COUNTS`: a client that is not here, or has
        fewer, gives what there is. They are in the order of the rows, and not copied. Returns also what they share, if
        their exact size had to be found.

        Args:
            layout, drawn: Those of caches and of drawn containers.
            page: Of the reply that is to have them.

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
            page.takes(f"{picks.size} samples", payload=parts.nbytes)
        except ProtocolError:
            held.restore(saved)
            raise
        return picks, parts
