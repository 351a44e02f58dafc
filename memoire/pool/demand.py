"""Whether learners want more of a client, or would never draw what it brings: how far actors may run ahead. Pure.

    nobody draws ──────────────────────▶ everything is wanted: the newest caches overwrite the oldest
    a draw found too little ───────────▶ everything is wanted
    learners draw, and a client has
      less than its stock undrawn ─────▶ wanted, up to the stock
      a stock undrawn ─────────────────▶ not wanted until a part of it was drawn

Without this rule, actors that are faster than learners make caches that are overwritten undrawn, or grow old in the
queue. On a machine that they share with servers and learners, that work takes these the processor.
"""

from __future__ import annotations

import math

DRAWING_TIMEOUT = 2.0
"""Seconds after a draw for which learners count as drawing."""
SHORTAGE_TIMEOUT = 0.5
"""Seconds after a draw that found too little for which everything is wanted; also those after which a reader that draws
nothing is taken to wait.
"""
MIN_CACHES = 2
"""Caches that a client has in stock at least: one is drawn from, one is ready."""
STOCK_TIME = 0.5
"""Seconds of drawing for which the stocks of all clients together last: as long as one that waits may take to ask."""
PART_TIME = 0.1
"""Seconds of drawing after which one that waits may go on, at most a quarter of its stock and at least a cache."""
RATE_INTERVAL = 0.25
"""Seconds over which the rate of draws is taken."""


class Demand:
    """What was drawn and what was missing lately. The owner locks, and says what time it is."""

    def __init__(self) -> None:
        self._drew_at = self._short_at = -math.inf
        self._largest = 0  # samples of a large draw; a smaller one lets it shrink
        self._rate = 0.0  # samples a second
        self._count, self._counted_at = 0, -math.inf  # drawn since

    def drew(self, samples: int, now: float) -> None:
        """A draw took so many samples."""
        self._drew_at, self._largest = now, max(samples, self._largest - self._largest // 64)
        self._count += samples
        if (passed := now - self._counted_at) >= RATE_INTERVAL:
            self._rate = self._count / passed
            self._count, self._counted_at = 0, now

    def was_short(self, samples: int, now: float) -> None:
        """A draw of so many samples found too few."""
        self._short_at, self._largest = now, max(samples, self._largest)

    def kept(self, samples: int, asked: int, idle: float, now: float) -> None:
        """So many samples are kept for a reader that asked for more. They are too few if neither half of that is there
        nor two draws, or if it has drawn nothing for a while.

        A reader of several servers asks each of them for all that it may need, and draws a part of it.

        Args:
            idle: Seconds since the reader drew; infinity before it did.
        """
        if 2 * samples < asked and (samples < 2 * self._largest or idle >= SHORTAGE_TIMEOUT):
            self._short_at = now

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
        fast = min(most, int(self._rate * STOCK_TIME) // max(1, clients))
        stock = max(stock, fast, MIN_CACHES * cache_size, 2 * self._largest // max(1, clients))
        part = min(stock // 4, max(cache_size, int(self._rate * PART_TIME) // max(1, clients)))
        room = stock - unused
        return room if room >= part else 0
