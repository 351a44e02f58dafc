"""How far clients may record ahead of a queue whose entries are handed out once: as far as it has room.

    capacity 4096     8 clients are granted 512 each, and wait when they have recorded them
    take(4096)        room for 4096 more, at once or when the next model is published

Room that is lost is found again while a learner waits: after `STALLED_TIMEOUT` without any news, what was granted and
not used is taken back, since whoever had it may have died, and entries that were counted and never came are forgiven.
"""

from __future__ import annotations

import math

from .limiter import ClusterSurplus, Limiter, ServerSurplus
from .parameters import Parameters

STALLED_TIMEOUT = 1.0
"""Seconds without news from any client after which there is room for all entries that a learner misses."""


class RoomLimiter(Limiter):
    """A `Limiter` of a table of rollouts: `surplus` is the entries that were recorded and whose room is not given back.

    Args:
        parameters: Of the table; those that limit samples mean nothing here.
        capacity: Entries there is room for; 0: nobody ever waits, and the oldest entries leave.
    """

    def __init__(self, parameters: Parameters, capacity: int) -> None:
        tolerance = float(capacity) if capacity else None
        super().__init__(Parameters(samples_per_insert=1.0, samples_per_insert_tolerance=tolerance))
        self._begun = True
        self._news_at = -math.inf  # when a client reported more than before, or was granted more

    def configure(self, parameters: Parameters) -> None:
        """Nothing: the capacity does not change."""

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._begun = True

    def reported(self, client: bytes, inserted: int, sequence: int, entries: int, now: float) -> bool:
        """A client has recorded so many entries in all: `Limiter.reported`."""
        is_news = super().reported(client, inserted, sequence, entries, now)
        if is_news:
            self._news_at = now
        return is_news

    def grant(self, client: bytes, sharers: int, entries: int, now: float) -> tuple[int, str]:
        """`Limiter.grant`. A client that has just been granted room may use it: nobody is stalled meanwhile."""
        if self.has_band and (missing := self._missing(entries, now)):
            self._find_room(missing)
        outstanding = self._outstanding
        found = super().grant(client, sharers, entries, now)
        if self._outstanding > outstanding:
            self._news_at = now
        return found

    def _find_room(self, missing: int) -> None:
        """Have room for so many entries: of those who have used none of theirs for long, and beyond the capacity."""
        for known in self._clients.values():
            known.through = known.inserted
        self._outstanding = 0
        lost = self._surplus + missing - (self.parameters.samples_per_insert_tolerance or 0.0)
        if lost > 0.0:
            self._forgiven += lost
            self._surplus -= lost

    def _settle(self, entries: int, now: float) -> None:
        """Nothing: what is beyond the capacity is forgiven when somebody asks for room."""

    def _share(self, room: float, sharers: int, lasting: float) -> float:
        """An equal part: fragments want all of it."""
        return room / max(1, sharers)

    def _needed(self, entries: int, sharers: int, now: float) -> int:
        """Nothing beyond a client's share of the room: there is enough, since it was found."""
        return 0

    def _missing(self, entries: int, now: float) -> int:
        """Entries that a learner has waited for although no client moves; 0 where there is nobody like that."""
        if now - self._news_at < STALLED_TIMEOUT:
            return 0
        wanted = self._starving(now) - self.parameters.cache_size  # nothing comes in caches here
        return max(0, wanted - entries)

    def _why_not_record(self) -> str:
        capacity = self.parameters.samples_per_insert_tolerance or 0.0
        return (
            f"waiting until a learner takes entries: {self._surplus:.0f} are recorded and not taken, or their room is "
            f"given back with the next model (capacity={capacity:.0f}, full='wait')"
        )

    def told(self, cluster: ClusterSurplus) -> bool:
        """False: each server has room of its own."""
        return False

    def standing(self) -> ServerSurplus | None:
        """None: a take has nothing to wait for but entries."""
        return None
