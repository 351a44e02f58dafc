"""How far drawing and recording may run apart: a band of samples per insert, and a least number of entries.

    surplus = samples_per_insert * inserts - draws         an insert is an entry recorded, a draw a sample handed out

    a draw of n     waits while surplus - n < -tolerance, and while fewer than `min_size` entries can be drawn
    an insert       waits while surplus + samples_per_insert > tolerance

Clients are told how many entries they may record before they have to ask again; what all of them together were granted
and have not reported yet is taken off, so that the band holds however fast they are. Others wait for what one client
was granted, so that it is no more than it records in `GRANT_TIME`. The band begins when `min_size` entries are there
for the first time, and again when it is changed. No deadlock: if a learner has waited for `STARVING_TIMEOUT`, as much
as its batch needs may be recorded whatever else was granted, and what that brings beyond the band (samples may have
been lost on the way) is forgiven.

Cassirer et al., Reverb: A Framework for Experience Replay, 2021, section 3.4, has the band.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from memoire import _core
from memoire._core import at_once, setting
from memoire.figures import adding, counter, gauge
from memoire.limits import NO_LIMIT

from .parameters import Parameters, check_batch
from .writing import Changes

MAX_WAITING_READERS = 1024
"""Readers whose waiting is looked at."""
STARVING_TIMEOUT = 0.25
"""Seconds that a learner waits before what it needs may be recorded beyond what was granted."""
GRANT_TIME = 0.5
"""Seconds that a grant lasts, at the pace at which its client has used the last one."""
LEAST_PART, LEAST_ENTRIES = 16, 64
"""Such a part of the room, or so many entries, a client is granted however slow it was: it may have just begun."""
UNHEARD_TIMEOUT = 60.0
"""Seconds for which a client of the former life that says nothing keeps what it was granted."""
FORGET_TIMEOUT = 2.0
"""Seconds after which a learner that does not ask again waits no more."""
ENTRIES_INTERVAL = 0.05
"""Seconds after which a draw that waits counts the entries again, since no message reports those of a pool."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RateStats:
    """Drawing beside recording, of one table at one moment."""

    # fmt: off
    surplus: Annotated[float, gauge("samples_surplus", "Surplus", "samples_per_insert * inserts - draws since the band "
        "began: above 0 learners are behind, below 0 ahead.")]
    tolerance: float | None
    inserted: Annotated[int, adding("sum")]
    """Entries that clients have reported."""
    drawn: Annotated[int, adding("sum")]
    """Samples handed out."""
    entries: Annotated[int, gauge("table_entries", "Entries", "Entries that can be drawn.")]
    draws_wait: Annotated[str, gauge("draws_limited", "Draws wait", "1 while a batch has to wait for entries, 0 "
        "otherwise.", adds="any")]
    """Why a batch of the size that was asked for last has to wait; "" when it has not."""
    inserts_wait: Annotated[str, gauge("inserts_limited", "Inserts wait", "1 while clients have to wait for draws, 0 "
        "otherwise.", adds="any")]
    """Why clients have to wait; "" when they have not."""
    waited: Annotated[float, counter("limited_seconds", "Draws waited", "Seconds that batches waited for entries.")]
    forgiven: Annotated[float, adding("sum")]
    """Samples that were taken off the surplus, because a learner had waited for what never came."""
    # fmt: on


@dataclass(slots=True)
class _Client:
    inserted: int
    sequence: int
    """Of the message that said so."""
    through: int = 0
    """How far it was told that it may go."""
    asked: tuple[float, int] | None = None
    """When it was granted more for the last time, and what it had recorded by then."""

    def lasting(self, now: float) -> float:
        """Entries that it records in `GRANT_TIME` as it did since it asked before."""
        if self.asked is None:
            return 0.0
        since, inserted = self.asked
        return GRANT_TIME * (self.inserted - inserted) / max(now - since, 1e-3)

    @property
    def outstanding(self) -> int:
        """Entries that it was granted and has not reported."""
        return max(0, self.through - self.inserted)


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
    ahead = round(-surplus)
    where = f"{ahead} samples ahead of" if ahead >= 0 else f"{-ahead} samples behind"
    return (
        f"waits for {missing} more entries: drawing is {where} {ratio:g} for each entry, and may be "
        f"{tolerance:g} ahead with this batch of {samples} (samples_per_insert_tolerance)"
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


_BAND = ("samples_per_insert", "samples_per_insert_tolerance", "min_size")


class Limiter:
    """Says which side may go on, drawing or recording, and why not. Any thread may ask, and a draw can wait.

    `entries` are how many entries can be drawn here; those that can be drawn at other servers are added to them.

    Args:
        parameters: Their samples_per_insert, samples_per_insert_tolerance, min_size and cache_size.
        entries: How many entries can be drawn here now. It may take locks of its own: it is never called with the lock
            of this one held.
        clock: Seconds that only grow.
    """

    def __init__(
        self, parameters: Parameters, entries: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.parameters = parameters
        """What is followed now; changed by `configure`."""
        self._entries_here, self._clock = entries, clock
        self._condition = _core.Condition()  # of all below; reentrant
        self._surplus, self._begun = 0.0, False
        self._inserted = self._drawn = 0
        self._clients: dict[bytes, _Client] = {}
        self._outstanding = 0  # granted and not reported, over all clients
        self._told: ClusterSurplus | None = None
        self._unheard: set[bytes] = set()  # clients of the former life that have said nothing in this one
        self._unheard_until: float | None = None
        self._news_at = -math.inf  # when a client reported more than before
        self._hungry: dict[Hashable, tuple[int, float, float]] = {}  # who waits: samples, since when, asked last
        self._last_size = 1
        self._forgiven = self._waited = 0.0

    @property
    def _changed(self) -> _core.Held:
        """The lock of what was counted, let go of wherever an interrupt comes. A waiting draw is woken by all that may
        let it go on.
        """
        return _core.Held(self._condition)

    @property
    def is_active(self) -> bool:
        """Whether anything is limited. Takes no lock."""
        return self.has_band or self.parameters.min_size > 0

    @property
    def has_band(self) -> bool:
        """Whether drawing and recording may only run so far apart. Takes no lock."""
        return self.parameters.samples_per_insert_tolerance is not None

    def state(self) -> dict[str, Any]:
        """What was counted: plain values, for `go_on_from`."""
        with self._changed:
            clients = [(name, each.inserted, each.sequence, each.through) for name, each in self._clients.items()]
            facts = {"surplus": self._surplus, "begun": self._begun, "inserted": self._inserted, "drawn": self._drawn}
            told = None if self._told is None else list(self._told)
            return facts | {"forgiven": self._forgiven, "told": told, "clients": clients}

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Take up what another life had counted under the same band. What a client was granted and did not use is kept
        for it, for `UNHEARD_TIMEOUT` if it says nothing.
        """
        with self._changed:
            self._surplus, self._begun = float(state["surplus"]), bool(state["begun"])
            self._inserted, self._drawn = int(state["inserted"]), int(state["drawn"])
            self._forgiven, told = float(state["forgiven"]), state["told"]
            self._told = None if told is None else ClusterSurplus(*told)
            self._clients = {name: _Client(*counts) for name, *counts in state["clients"]}
            self._outstanding = sum(known.outstanding for known in self._clients.values())
            self._unheard, self._unheard_until = set(self._clients), None
            self._changed.notify_all()

    def state_of(self, client: bytes) -> dict[str, Any]:
        """What was counted of the only client, as JSON carries it, and how many entries it has recorded."""
        with self._changed:
            state = {name: value for name, value in self.state().items() if name not in ("clients", "told")}
            return state | {"recorded": self._clients[client].inserted if client in self._clients else 0}

    def take_over(self, state: Mapping[str, Any], client: bytes, inserted: int) -> None:
        """Go on counting from where another one was; its only client has recorded so many entries now."""
        self.go_on_from({**state, "told": None, "clients": [(client, inserted, inserted, inserted)]})

    def _forget_unheard(self, client: bytes, now: float) -> None:
        """A client asks. After a time, those of the former life that say nothing are no more."""
        self._unheard.discard(client)
        if not self._unheard:
            return
        if self._unheard_until is None:
            self._unheard_until = now + UNHEARD_TIMEOUT
        elif now >= self._unheard_until:
            for each in list(self._unheard):
                self.left(each)

    @property
    def is_untouched(self) -> bool:
        """Whether no client is known, and nothing was counted."""
        with self._changed:
            return not (self._clients or self._inserted or self._drawn or self._told)

    def configure(self, parameters: Parameters) -> None:
        """Follow other parameters from now on; another band begins from nothing."""
        with self._changed:
            former, self.parameters = self.parameters, parameters
            if any(getattr(former, name) != getattr(parameters, name) for name in _BAND):
                self._begin_again()
            self._changed.notify_all()

    def reset(self) -> None:
        """Another run begins: forget what was counted."""
        with self._changed:
            self._clients.clear()
            self._outstanding = 0
            self._unheard.clear()
            self._begin_again()
            self._changed.notify_all()

    def _begin_again(self) -> None:
        self._surplus, self._begun, self._told = 0.0, False, None

    # Recording

    def met(self, client: bytes, inserted: int, sequence: int) -> None:
        """A client is here; what it has recorded until now is none of this band's.

        Args:
            sequence: The header's: of two messages of a client the higher one is newer; an older one changes nothing.
        """
        with self._changed:
            known = self._clients.get(client)
            self._unheard.discard(client)
            if known is not None and sequence <= known.sequence:
                return
            if known is not None:
                self._outstanding -= known.outstanding
            self._clients[client] = _Client(inserted, sequence)

    def reported(self, client: bytes, inserted: int, sequence: int) -> None:
        """A client says that it has recorded `inserted` entries in all, in its message number `sequence`."""
        entries = self._entries_here() if self.is_active else 0
        with self._changed:
            known = self._clients.get(client)
            self._unheard.discard(client)
            if known is None:  # it said HELLO to a former life
                self._clients[client] = _Client(inserted, sequence)
                return
            news = inserted - known.inserted
            if sequence <= known.sequence or news <= 0:
                return
            self._outstanding -= known.outstanding
            known.inserted, known.sequence = inserted, sequence
            self._outstanding += known.outstanding
            self._inserted += news
            self._surplus += news * self.parameters.samples_per_insert
            self._news_at = self._clock()
            self._settle(self._entries(entries), self._news_at)
            self._changed.notify_all()

    def _settle(self, entries: int, now: float) -> None:
        """New entries were reported, and so many can be drawn. Begin the band if that is enough; forgive what is beyond
        the band if no side could have helped it.
        """
        tolerance = self.parameters.samples_per_insert_tolerance
        if not self._begun and entries >= self.parameters.min_size:
            self._begun = True
            if self.parameters.min_size:
                self._surplus = 0.0
        if tolerance is None or self._surplus <= tolerance:
            return
        if not self._begun:
            self._surplus = tolerance
        elif entries < self.parameters.min_size or self._starving(now):
            self._forgiven += self._surplus - tolerance
            self._surplus = tolerance

    def left(self, client: bytes) -> None:
        """A client has ended: what it was granted and did not use is the others'."""
        with self._changed:
            known = self._clients.pop(client, None)
            self._unheard.discard(client)
            if known is not None:
                self._outstanding -= known.outstanding

    def grant(self, client: bytes, sharers: int = 1) -> tuple[int, str]:
        """How many entries a client may have recorded in all before it has to ask again, and why not more; NO_LIMIT
        if nothing is limited.

        Args:
            sharers: Clients that record.
        """
        if not self.has_band:
            return NO_LIMIT, ""
        entries = self._entries_here()
        with self._changed:
            return self._grant(client, sharers, entries, self._clock())

    def _grant(self, client: bytes, sharers: int, entries: int, now: float) -> tuple[int, str]:
        ratio, tolerance = band_settings(self.parameters)
        self._forget_unheard(client, now)
        known = self._clients.setdefault(client, _Client(0, -1))
        others = self._outstanding - known.outstanding
        share = 1.0 if self._told is None else self._told.share
        room = (tolerance - self._surplus) / ratio * share
        missing = self.parameters.min_size - self._entries(entries)
        if not self._begun or missing > 0:
            room = max(room, float(missing))
        mine = min(room - others, max(1.0, self._share(room, sharers, known.lasting(now))))
        mine = max(mine, self._needed(now))
        through = max(known.through, known.inserted + max(0, math.floor(mine + _ROUNDING)))
        if through > known.through:
            known.asked = now, known.inserted
        known.through = min(through, NO_LIMIT)  # a tiny ratio has room for more than a message can say
        self._outstanding = others + known.outstanding
        return known.through, "" if known.through > known.inserted else self._why_not_record()

    def _why_not_record(self) -> str:
        ratio, tolerance = band_settings(self.parameters)
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
        entries = self._entries_here()
        with self._changed:
            return self._why_not_draw(samples, entries, self._clock())

    def _why_not_draw(self, samples: int, entries: int, now: float) -> str:
        available = self._entries(entries)
        self._settle(available, now)
        self._last_size = samples
        return why_not_draw(self.parameters, samples, available, self._surplus)

    def take(self, samples: int, timeout: float) -> str:
        """Count a batch as drawn as soon as it may be; "" then, or why it may not be after `timeout` seconds.

        Raises:
            ParameterError: the tolerance is too small for such a batch, also if that is changed meanwhile.
        """
        if not self.is_active:
            self.drew(samples)
            return ""
        began, who = self._clock(), object()
        try:
            while True:
                check_batch(self.parameters, samples)
                entries = self._entries_here()
                with self._changed:
                    now = self._clock()
                    reason, left = self._why_not_draw(samples, entries, now), began + timeout - now
                    if not reason:
                        self.drew(samples)
                    if not reason or left <= 0.0:
                        return reason
                    self.wants(who, samples)
                    self._changed.wait(min(left, ENTRIES_INTERVAL))
        finally:
            with self._changed:
                self.wants(who, 0)
                self._waited += self._clock() - began

    def drew(self, samples: int, also: Changes | tuple[()] = (), *, has_band: bool = True) -> None:
        """Samples were handed out; below 0, some that were counted (by `take`) were not.

        Args:
            also: Made with it, as one change.
            has_band: Whether their reader knew of a band; what others draw is not for actors to make good.
        """
        with self._changed:
            surplus = self._surplus - samples if self._begun and has_band else self._surplus
            at_once([*setting(self, _drawn=self._drawn + samples, _surplus=surplus), *also])
            self._changed.notify_all()

    def wants(self, who: Hashable, samples: int) -> None:
        """A learner waits for a batch of so many samples; 0: no more."""
        with self._changed:
            now = self._clock()
            if samples and (who in self._hungry or len(self._hungry) < MAX_WAITING_READERS):
                self._hungry[who] = (samples, self._hungry.get(who, (0, now, now))[1], now)
            elif not samples:
                self._hungry.pop(who, None)

    def _starving(self, now: float) -> int:
        """Entries without which a learner that has waited too long waits on; 0 if there is no such learner."""
        ratio = self.parameters.samples_per_insert
        for who in [who for who, (_, _, asked) in self._hungry.items() if asked < now - FORGET_TIMEOUT]:
            del self._hungry[who]
        waiting = [samples for samples, since, _ in self._hungry.values() if now - since >= STARVING_TIMEOUT]
        return math.ceil((max(waiting) + self.parameters.cache_size) / ratio) if waiting and ratio else 0

    def _share(self, room: float, sharers: int, lasting: float) -> float:
        """A client's part of all the room, where so many entries would last it for `GRANT_TIME`."""
        return min(room / max(1, sharers), max(LEAST_ENTRIES, room / LEAST_PART, lasting))

    def _needed(self, now: float) -> int:
        """Entries that a client may record whatever else was granted, since a learner has waited too long for them."""
        return self._starving(now)

    # Several servers

    def told(self, cluster: ClusterSurplus) -> None:
        """How it stands with all servers, from a reader of all; what happened here since is added.

        A reader that has not heard of other parameters yet speaks of another band, and changes nothing.
        """
        with self._changed:
            if (cluster.ratio, cluster.tolerance) != band_settings(self.parameters):
                return
            self._told, self._begun = cluster, True
            inserted, drawn = self._inserted - cluster.inserted, self._drawn - cluster.drawn
            self._surplus = cluster.surplus + (inserted * self.parameters.samples_per_insert - drawn)
            self._changed.notify_all()

    def standing(self) -> ServerSurplus | None:
        """What a reader is told of this server; None where nothing is limited."""
        with self._changed:
            if not self.is_active:
                return None
            settings = band_settings(self.parameters)
            return ServerSurplus(self._surplus, self._told is not None, self._inserted, self._drawn, *settings)

    def _entries(self, here: int) -> int:
        """Entries that can be drawn at all servers."""
        return here if self._told is None else here + self._told.entries

    def stats(self) -> RateStats:
        """All figures at this moment."""
        entries = self._entries_here()
        with self._changed:
            available, tolerance = self._entries(entries), self.parameters.samples_per_insert_tolerance
            is_full = (
                tolerance is not None
                and available >= self.parameters.min_size
                and self._surplus + self.parameters.samples_per_insert > tolerance + _ROUNDING
            )
            return RateStats(
                surplus=self._surplus,
                tolerance=tolerance,
                inserted=self._inserted,
                drawn=self._drawn,
                entries=available,
                draws_wait=why_not_draw(self.parameters, self._last_size, available, self._surplus),
                inserts_wait=self._why_not_record() if is_full else "",
                waited=self._waited,
                forgiven=self._forgiven,
            )
