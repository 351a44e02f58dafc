"""Readers: learners that draw from several servers' pools, over the network. Pure.

    SUMS, DRAW ──▶ reserve: unused samples are kept for the reader, and it is told of each client what it may draw
    DRAW       ──▶ take: the samples of named clients that the reader chose

What is kept for a reader is free again when it has been silent.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError, ProtocolError
from memoire.wire.receivers import Page
from memoire.wire.rows import CLIENT_SUMS

from ._draw import Picks
from .picked import DistinctRows, most_bytes
from .presence import Presence
from .queues import CacheQueues

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
