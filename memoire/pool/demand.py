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
from dataclasses import dataclass

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
