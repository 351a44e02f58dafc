"""How far drawing and recording may run apart: a band of samples per insert, and a least number of entries.

    surplus = samples_per_insert * inserts - draws         an insert is an entry recorded, a draw a sample handed out

    a draw of n     waits while surplus - n < -tolerance, and while fewer than `min_size` entries can be drawn
    an insert       waits while surplus + samples_per_insert > tolerance

Clients are told how many entries they may record before they have to ask again; what all of them together were granted
and have not reported yet is taken off, so that the band holds however fast they are. It begins when `min_size` entries
are there for the first time, and anew when it is changed. Nobody waits for ever for somebody who waits: where a learner
has waited for `PATIENCE`, as much as its batch needs may be recorded whatever else was granted, and what that brings
beyond the band (samples may have been lost on the way) is forgiven.

`Limiter` counts and says why; it knows neither clients' sockets nor pools. Cassirer et al., Reverb: A Framework for
Experience Replay, 2021, section 3.4, has the band.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from memoire.errors import ParameterError

from .parameters import Parameters

NO_LIMIT = 2**53 - 1
"""Entries that a client may record where nothing holds it back: the most that a message can say."""
MOST_HUNGRY = 1024
"""Readers whose waiting is looked at."""
PATIENCE = 0.25
"""Seconds that a learner waits before what it needs may be recorded beyond what was granted."""
FORGOTTEN = 2.0
"""Seconds after which a learner that does not ask again waits no more."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RateStats:
    """Drawing beside recording, of one table at one moment."""

    surplus: float
    """samples_per_insert * inserts - draws, since the band began: above 0 learners are behind, below 0 ahead."""
    tolerance: float | None
    inserted: int
    """Entries that clients have reported."""
    drawn: int
    """Samples handed out."""
    entries: int
    """Entries that can be drawn."""
    draws_wait: str
    """Why a batch of the size that was asked for last has to wait; "" when it has not."""
    inserts_wait: str
    """Why clients have to wait; "" when they have not."""
    waited: float
    """Seconds that batches waited for entries, in all."""
    forgiven: float
    """Samples that were taken off the surplus, because a learner had waited for what never came."""


@dataclass(slots=True)
class _Client:
    inserted: int
    sequence: int
    """Of the message that said so."""
    through: int = 0
    """How far it was told that it may go."""


def check_size(parameters: Parameters, capacity: int) -> None:
    """Refuse a least number of entries that there is no room for; capacity 0 is not known.

    Raises:
        ParameterError: nothing would ever be drawn.
    """
    if 0 < capacity < parameters.min_size:
        expected = f"at most the capacity, {capacity} entries: nothing would ever be drawn"
        raise ParameterError("min_size", parameters.min_size, expected)


def check_batch(parameters: Parameters, samples: int) -> None:
    """Refuse a batch that would wait for ever, because entries may not be recorded until it could be drawn.

    Raises:
        ParameterError: the tolerance is too small for it.
    """
    tolerance, ratio = parameters.samples_per_insert_tolerance, parameters.samples_per_insert
    if tolerance is not None and samples > 2.0 * tolerance - ratio:
        most = max(0, math.floor(2.0 * tolerance - ratio))
        expected = (
            f"at most {most} with samples_per_insert_tolerance {tolerance:g} and {ratio:g} samples per insert: actors "
            f"would wait before a larger batch could be drawn. Set a tolerance of at least {(samples + ratio) / 2:g}"
        )
        raise ParameterError("batch_size", samples, expected)


def why_not_draw(parameters: Parameters, samples: int, entries: int, surplus: float) -> str:
    """Why a batch has to wait for entries; "" when it has not."""
    if entries < parameters.min_size:
        return (
            f"waits for {parameters.min_size - entries} more entries: {entries} can be drawn, and "
            f"{parameters.min_size} are to be there first (min_size)"
        )
    tolerance, ratio = parameters.samples_per_insert_tolerance, parameters.samples_per_insert
    if tolerance is None or surplus - samples >= -tolerance - _ROUNDING:
        return ""
    missing = math.ceil((samples - tolerance - surplus) / ratio - _ROUNDING)
    return (
        f"waits for {missing} more entries: drawing is {-surplus:.0f} samples ahead of {ratio:g} for each entry, and "
        f"may be {tolerance:g} (samples_per_insert_tolerance)"
    )


def band_settings(parameters: Parameters) -> tuple[float, float]:
    """(samples_per_insert, its tolerance), 0 for none."""
    return parameters.samples_per_insert, parameters.samples_per_insert_tolerance or 0.0


class ServerSurplus(NamedTuple):
    """How drawing stands beside recording, as the limiter of one server sees it."""

    surplus: float
    is_told: bool
    """Whether it is that of all servers, as a reader told."""
    inserted: int
    """Entries that were reported here, since it began."""
    drawn: int
    """Samples that were drawn here."""
    ratio: float
    """samples_per_insert, under which this is so."""
    tolerance: float


class ClusterSurplus(NamedTuple):
    """The same for all servers together, as a reader tells each of them."""

    surplus: float
    inserted: int
    """What this limiter had said of its own when the reader knew that surplus."""
    drawn: int
    entries: int
    """That can be drawn at the other servers."""
    share: float
    """Of what may be recorded, for this server's clients."""
    ratio: float
    tolerance: float


class Limiter:
    """Says who may go on, drawing or recording, and why not. Thread-safe.

    Args:
        parameters: Their samples_per_insert, samples_per_insert_tolerance, min_size and cache_size.
        entries: How many entries can be drawn now; called without a lock of this one's callers.
        clock: Seconds that only grow.
    """

    def __init__(
        self, parameters: Parameters, entries: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries_here, self._clock = entries, clock
        self._changed = threading.Condition()
        # Everything below belongs to the lock.
        self._parameters = parameters
        self._surplus, self._begun = 0.0, False
        self._inserted = self._drawn = 0
        self._clients: dict[bytes, _Client] = {}
        self._outstanding = 0  # granted and not reported, over all clients
        self._told: ClusterSurplus | None = None
        self._hungry: dict[Hashable, tuple[int, float, float]] = {}  # who waits: samples, since when, asked last
        self._last_size = 1
        self._waited = self._forgiven = 0.0

    @property
    def is_active(self) -> bool:
        """Whether anything is limited."""
        return self._parameters.samples_per_insert_tolerance is not None or self._parameters.min_size > 0

    def configure(self, parameters: Parameters) -> None:
        """Follow other parameters from now on; another band begins anew."""
        with self._changed:
            former, self._parameters = self._parameters, parameters
            if any(getattr(former, name) != getattr(parameters, name) for name in _BAND):
                self._begin_anew()
            self._changed.notify_all()

    def reset(self) -> None:
        """Another run begins: forget what was counted."""
        with self._changed:
            self._clients.clear()
            self._outstanding = 0
            self._begin_anew()
            self._changed.notify_all()

    def _begin_anew(self) -> None:
        self._surplus, self._begun, self._told = 0.0, False, None

    # Recording

    def met(self, client: bytes, inserted: int, sequence: int) -> None:
        """A client is here; what it has recorded until now is none of this band's.

        Args:
            sequence: The header's: of two messages of a client the higher one is newer; an older one changes nothing.
        """
        with self._changed:
            known = self._clients.get(client)
            if known is not None and sequence <= known.sequence:
                return
            if known is not None:
                self._outstanding -= max(0, known.through - known.inserted)
            self._clients[client] = _Client(inserted, sequence)

    def reported(self, client: bytes, inserted: int, sequence: int) -> None:
        """A client has recorded so many entries in all."""
        entries = self._entries() if self.is_active else 0
        with self._changed:
            known = self._clients.get(client)
            if known is None:  # it said HELLO to a former life
                self._clients[client] = _Client(inserted, sequence)
                return
            news = inserted - known.inserted
            if sequence <= known.sequence or news <= 0:
                return
            known.sequence = sequence
            self._settle(known, inserted)
            self._inserted += news
            self._surplus += news * self._parameters.samples_per_insert
            self._look(entries)
            self._changed.notify_all()

    def _settle(self, client: _Client, inserted: int) -> None:
        self._outstanding -= max(0, client.through - client.inserted)
        client.inserted = inserted
        self._outstanding += max(0, client.through - inserted)

    def _look(self, entries: int) -> None:
        """Begin the band where enough is there; forgive what is beyond it where nobody could have helped it."""
        tolerance = self._parameters.samples_per_insert_tolerance
        if not self._begun and entries >= self._parameters.min_size:
            self._begun = True
            if self._parameters.min_size:
                self._surplus = 0.0
        if tolerance is None or self._surplus <= tolerance:
            return
        if not self._begun:
            self._surplus = tolerance
        elif entries < self._parameters.min_size or self._starving():
            self._forgiven += self._surplus - tolerance
            self._surplus = tolerance

    def left(self, client: bytes) -> None:
        """A client has ended: what it was granted and did not use is the others'."""
        with self._changed:
            known = self._clients.pop(client, None)
            if known is not None:
                self._outstanding -= max(0, known.through - known.inserted)

    def grant(self, client: bytes, sharers: int = 1) -> tuple[int, str]:
        """How many entries a client may have recorded in all before it has to ask again, and why not more; NO_LIMIT
        where nothing is limited.

        Args:
            sharers: Clients that record.
        """
        tolerance, ratio = self._parameters.samples_per_insert_tolerance, self._parameters.samples_per_insert
        if tolerance is None:
            return NO_LIMIT, ""
        entries = self._entries()
        with self._changed:
            known = self._clients.setdefault(client, _Client(0, -1))
            others = self._outstanding - max(0, known.through - known.inserted)
            share = 1.0 if self._told is None else self._told.share
            room = (tolerance - self._surplus) / ratio * share
            if not self._begun or entries < self._parameters.min_size:
                room = max(room, float(self._parameters.min_size - entries))
            mine = min(room - others, max(1.0, room / max(1, sharers)))
            if needed := self._starving():
                mine = max(mine, needed)
            through = max(known.through, known.inserted + max(0, math.floor(mine + _ROUNDING)))
            through = min(through, NO_LIMIT)  # a tiny ratio has room for more than a message can say
            self._outstanding += max(0, through - known.inserted) - max(0, known.through - known.inserted)
            known.through = through
            return through, "" if through > known.inserted else self._why_not_record()

    def _why_not_record(self) -> str:
        ratio, tolerance = self._parameters.samples_per_insert, self._parameters.samples_per_insert_tolerance or 0.0
        missing = max(1, math.ceil(self._surplus + (self._outstanding + 1) * ratio - tolerance - _ROUNDING))
        return (
            f"waits until {missing} more samples are drawn: learners are {self._surplus:.0f} samples behind "
            f"{ratio:g} for each entry, and may be {tolerance:g} (samples_per_insert_tolerance)"
        )

    # Drawing

    def why_not_draw(self, samples: int) -> str:
        """Why a batch has to wait for entries; "" when it has not."""
        if not self.is_active:
            return ""
        entries = self._entries()
        with self._changed:
            self._look(entries)
            return self._why_not(samples, entries)

    def _why_not(self, samples: int, entries: int) -> str:
        self._last_size = samples
        return why_not_draw(self._parameters, samples, entries, self._surplus)

    def take(self, samples: int, timeout: float) -> str:
        """Count a batch as drawn as soon as it may be; "" then, or why it may not be after `timeout` seconds."""
        if not self.is_active:
            self.drew(samples)
            return ""
        began, who = time.monotonic(), object()
        try:
            while True:
                check_batch(self._parameters, samples)  # they may become others meanwhile
                entries = self._entries()
                with self._changed:
                    self._look(entries)
                    reason = self._why_not(samples, entries)
                    left = began + timeout - time.monotonic()
                    if not reason:
                        self._draw(samples)
                    if not reason or left <= 0.0:
                        return reason
                    self._wants(who, samples)
                    self._changed.wait(min(left, 0.05))  # entries come without a word
        finally:
            with self._changed:
                self._hungry.pop(who, None)
                self._waited += time.monotonic() - began

    def drew(self, samples: int, *, has_band: bool = True) -> None:
        """Samples were handed out; below 0, some that `take` had counted were not.

        Args:
            has_band: Whether whoever drew them knew of a band; what others draw is not for actors to make good.
        """
        with self._changed:
            self._draw(samples, has_band)

    def _draw(self, samples: int, has_band: bool = True) -> None:
        self._drawn += samples
        if self._begun and has_band:
            self._surplus -= samples
        self._changed.notify_all()

    def wants(self, who: Hashable, samples: int) -> None:
        """Somebody waits for a batch of so many samples; 0: no more."""
        with self._changed:
            self._wants(who, samples)

    def _wants(self, who: Hashable, samples: int) -> None:
        now = self._clock()
        if samples and (who in self._hungry or len(self._hungry) < MOST_HUNGRY):
            self._hungry[who] = (samples, self._hungry.get(who, (0, now, now))[1], now)
        elif not samples:
            self._hungry.pop(who, None)

    def _starving(self) -> int:
        """Entries without which somebody who has waited too long waits on; 0 where nobody does."""
        now, ratio = self._clock(), self._parameters.samples_per_insert
        for who in [who for who, (_, _, asked) in self._hungry.items() if asked < now - FORGOTTEN]:
            del self._hungry[who]
        waiting = [samples for samples, since, _ in self._hungry.values() if now - since >= PATIENCE]
        return math.ceil((max(waiting) + self._parameters.cache_size) / ratio) if waiting and ratio else 0

    # Several servers

    def told(self, cluster: ClusterSurplus) -> None:
        """How it stands with all servers, from a reader of all; what happened here since is added."""
        with self._changed:
            ratio = self._parameters.samples_per_insert
            if (cluster.ratio, cluster.tolerance) != band_settings(self._parameters):
                return  # the reader has not heard of other parameters yet
            self._told, self._begun = cluster, True
            news = (self._inserted - cluster.inserted) * ratio - (self._drawn - cluster.drawn)
            self._surplus = cluster.surplus + news
            self._changed.notify_all()

    def standing(self) -> ServerSurplus | None:
        """What a reader is told of this server; None where nothing is limited."""
        with self._changed:
            if not self.is_active:
                return None
            settings = band_settings(self._parameters)
            return ServerSurplus(self._surplus, self._told is not None, self._inserted, self._drawn, *settings)

    def _entries(self) -> int:
        told = self._told
        return self._entries_here() + (0 if told is None else told.entries)

    def stats(self) -> RateStats:
        """All figures at this moment."""
        entries = self._entries()
        with self._changed:
            tolerance = self._parameters.samples_per_insert_tolerance
            is_full = (
                tolerance is not None
                and entries >= self._parameters.min_size
                and self._surplus + self._parameters.samples_per_insert > tolerance + _ROUNDING
            )
            return RateStats(
                surplus=self._surplus,
                tolerance=tolerance,
                inserted=self._inserted,
                drawn=self._drawn,
                entries=entries,
                draws_wait=self._why_not(self._last_size, entries),
                inserts_wait=self._why_not_record() if is_full else "",
                waited=self._waited,
                forgiven=self._forgiven,
            )


_BAND = ("samples_per_insert", "samples_per_insert_tolerance", "min_size")
