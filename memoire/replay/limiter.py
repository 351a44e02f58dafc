"""Rate limiter between drawing and recording: a band of samples per insert, and a minimum number of entries.

    surplus = samples_per_insert * inserts - draws         an insert is an entry recorded, a draw a sample handed out

    a draw of n     waits while surplus - n < -tolerance, and while fewer than `min_size` entries can be drawn
    an insert       waits while surplus + samples_per_insert > tolerance

A client is granted a number of entries that it may record before it asks again. Grants that are not yet reported are
subtracted, so that the band holds at any speed. A grant blocks other clients, so it covers only the entries that a
client records in `GRANT_TIME`. The band begins when `min_size` entries exist for the first time, and again when it is
changed. No deadlock: once a learner has waited for `STARVING_TIMEOUT`, clients may record the entries of its batch
whatever else was granted. Surplus beyond the band (samples may have been lost on the way) is forgiven.

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
"""Largest number of waiting readers that are tracked."""
STARVING_TIMEOUT = 0.25
"""Seconds that a learner waits before clients may record its batch beyond the grants."""
GRANT_TIME = 0.5
"""Seconds that a grant lasts, at the pace at which its client used the last one."""
LEAST_PART, LEAST_ENTRIES = 16, 64
"""Smallest grant of a slow client, which may have just begun: the larger of room / LEAST_PART and LEAST_ENTRIES."""
UNHEARD_TIMEOUT = 60.0
"""Seconds for which a client known before a restart keeps its grant without a message."""
FORGET_TIMEOUT = 2.0
"""Seconds after which a learner that does not ask again no longer waits."""
ENTRIES_INTERVAL = 0.05
"""Seconds between counts of the entries while a draw waits, since no message reports those of a pool."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RateStats:
    """Figures of drawing and recording of one table at one moment."""

    # fmt: off
    surplus: Annotated[float, gauge("samples_surplus", "Surplus", "samples_per_insert * inserts - draws since the band "
        "began: above 0 learners are behind, below 0 ahead.")]
    tolerance: float | None
    inserted: Annotated[int, adding("sum")]
    """Entries that clients have reported."""
    drawn: Annotated[int, adding("sum")]
    """Samples handed out to learners."""
    entries: Annotated[int, gauge("table_entries", "Entries", "Entries that can be drawn.")]
    draws_wait: Annotated[str, gauge("draws_limited", "Draws wait", "1 while batches wait for entries, else 0.",
        adds="any")]
    """Reason for which a batch of the size last asked for has to wait; "" if it does not."""
    inserts_wait: Annotated[str, gauge("inserts_limited", "Inserts wait", "1 while clients wait for draws, else 0.",
        adds="any")]
    """Reason for which clients have to wait; "" if they do not."""
    waited: Annotated[float, counter("limited_seconds", "Draws waited", "Seconds that batches waited for entries.")]
    forgiven: Annotated[float, adding("sum")]
    """Samples subtracted from the surplus, because a learner had waited for entries that never came."""
    # fmt: on


@dataclass(slots=True)
class _Client:
    inserted: int
    sequence: int
    """Sequence number of the message that reported `inserted`."""
    through: int = 0
    """Total of entries that the client may have recorded, by its last grant."""
    asked: tuple[float, int] | None = None
    """Time of the last larger grant, and the client's entries at that time."""

    def entries_per_grant(self, now: float) -> float:
        """Return the entries that the client records in `GRANT_TIME` at its pace since the last grant."""
        if self.asked is None:
            return 0.0
        since, inserted = self.asked
        return GRANT_TIME * (self.inserted - inserted) / max(now - since, 1e-3)

    @property
    def outstanding(self) -> int:
        """Entries that were granted to the client and are not reported yet."""
        return max(0, self.through - self.inserted)


def why_not_draw(parameters: Parameters, samples: int, entries: int, surplus: float) -> str:
    """Return the reason for which a batch has to wait for entries; "" if it does not."""
    if entries < parameters.min_size:
        return (
            f"waiting for {parameters.min_size - entries} more entries ({entries} of min_size={parameters.min_size} "
            f"available)"
        )
    tolerance, ratio = parameters.samples_per_insert_tolerance, parameters.samples_per_insert
    if tolerance is None or surplus - samples >= -tolerance - _ROUNDING:
        return ""
    missing = math.ceil((samples - tolerance - surplus) / ratio - _ROUNDING)
    ahead = round(-surplus)
    where = f"{ahead} samples ahead of" if ahead >= 0 else f"{-ahead} samples behind"
    return (
        f"waiting for {missing} more entries: draws are {where} samples_per_insert={ratio:g}, and with this batch of "
        f"{samples} may be {tolerance:g} ahead (samples_per_insert_tolerance)"
    )


def band_settings(parameters: Parameters) -> tuple[float, float]:
    """Return (samples_per_insert, samples_per_insert_tolerance); a tolerance of None is 0."""
    return parameters.samples_per_insert, parameters.samples_per_insert_tolerance or 0.0


class ServerSurplus(NamedTuple):
    """Counts of drawing and recording by the limiter of one server."""

    surplus: float
    is_cluster_wide: bool
    """True if `surplus` is that of all servers, as a reader reported it."""
    inserted: int
    """Entries reported to this server, since its limiter began."""
    drawn: int
    """Samples drawn at this server."""
    ratio: float
    """The samples_per_insert of this surplus."""
    tolerance: float


class ClusterSurplus(NamedTuple):
    """Counts of drawing and recording of all servers together, as a reader reports them to each server."""

    surplus: float
    inserted: int
    """The server's own count of inserts that is part of `surplus`; `drawn` likewise."""
    drawn: int
    entries: int
    """Entries that can be drawn at the other servers."""
    share: float
    """This server's clients' share of the entries that may be recorded."""
    ratio: float
    tolerance: float


_BAND = ("samples_per_insert", "samples_per_insert_tolerance", "min_size")


class Limiter:
    """Gate between drawing and recording: it decides which side may proceed, and gives the reason if not. Thread-safe;
    a draw can wait.

    Args:
        parameters: Settings with samples_per_insert, samples_per_insert_tolerance, min_size and cache_size.
        entries: Function that counts the entries that can be drawn at this server; the limiter adds those of other
            servers. The function may take locks: it is never called while the limiter's lock is held.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self, parameters: Parameters, entries: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.parameters = parameters
        """Current parameters; `configure` changes them."""
        self._entries_here, self._clock = entries, clock
        self._condition = _core.Condition()  # guards all attributes below; reentrant
        self._surplus, self._begun = 0.0, False
        self._inserted = self._drawn = 0
        self._clients: dict[bytes, _Client] = {}
        self._outstanding = 0  # granted and not reported, over all clients
        self._cluster: ClusterSurplus | None = None
        self._unheard: set[bytes] = set()  # clients known before a restart that have sent no message since
        self._unheard_until: float | None = None
        self._news_at = -math.inf  # when a client reported more than before
        self._waiting: dict[Hashable, tuple[int, float, float]] = {}  # readers: samples, waiting since, asked last
        self._last_size = 1
        self._forgiven = self._waited = 0.0

    @property
    def _changed(self) -> _core.Held:
        """Lock of the counts as a context, released also on an interrupt. Every change that may let a waiting draw
        proceed notifies it.
        """
        return _core.Held(self._condition)

    @property
    def is_active(self) -> bool:
        """True if drawing or recording is limited. Takes no lock."""
        return self.has_band or self.parameters.min_size > 0

    @property
    def has_band(self) -> bool:
        """True if the distance between drawing and recording is limited. Takes no lock."""
        return self.parameters.samples_per_insert_tolerance is not None

    def state(self) -> dict[str, Any]:
        """Return the counts as plain values, for `restore_state`."""
        with self._changed:
            clients = [(name, each.inserted, each.sequence, each.through) for name, each in self._clients.items()]
            facts = {"surplus": self._surplus, "begun": self._begun, "inserted": self._inserted, "drawn": self._drawn}
            cluster = None if self._cluster is None else list(self._cluster)
            return facts | {"forgiven": self._forgiven, "told": cluster, "clients": clients}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore the counts from before a restart, under the same band. Unused grants are kept, for `UNHEARD_TIMEOUT`
        if the client sends no message.
        """
        with self._changed:
            self._surplus, self._begun = float(state["surplus"]), bool(state["begun"])
            self._inserted, self._drawn = int(state["inserted"]), int(state["drawn"])
            self._forgiven, cluster = float(state["forgiven"]), state["told"]
            self._cluster = None if cluster is None else ClusterSurplus(*cluster)
            self._clients = {name: _Client(*counts) for name, *counts in state["clients"]}
            self._outstanding = sum(known.outstanding for known in self._clients.values())
            self._unheard, self._unheard_until = set(self._clients), None
            self._changed.notify_all()

    def state_of(self, client: bytes) -> dict[str, Any]:
        """Return the counts, as JSON carries them, and the entries that the only client has recorded."""
        with self._changed:
            state = {name: value for name, value in self.state().items() if name not in ("clients", "told")}
            return state | {"recorded": self._clients[client].inserted if client in self._clients else 0}

    def continue_counts(self, state: Mapping[str, Any], client: bytes, inserted: int) -> None:
        """Continue the counts of another limiter, whose only client has now recorded `inserted` entries."""
        self.restore_state({**state, "told": None, "clients": [(client, inserted, inserted, inserted)]})

    def _forget_unheard(self, client: bytes, now: float) -> None:
        """Record a message of a client, and drop clients of before a restart that stay silent too long."""
        self._unheard.discard(client)
        if not self._unheard:
            return
        if self._unheard_until is None:
            self._unheard_until = now + UNHEARD_TIMEOUT
        elif now >= self._unheard_until:
            for each in list(self._unheard):
                self.unregister(each)

    @property
    def is_untouched(self) -> bool:
        """True if no client is known and all counts are 0."""
        with self._changed:
            return not (self._clients or self._inserted or self._drawn or self._cluster)

    def configure(self, parameters: Parameters) -> None:
        """Apply other parameters; a changed band restarts from zero."""
        with self._changed:
            former, self.parameters = self.parameters, parameters
            if any(getattr(former, name) != getattr(parameters, name) for name in _BAND):
                self._begin_again()
            self._changed.notify_all()

    def reset(self) -> None:
        """Forget all counts, for a new run."""
        with self._changed:
            self._clients.clear()
            self._outstanding = 0
            self._unheard.clear()
            self._begin_again()
            self._changed.notify_all()

    def _begin_again(self) -> None:
        self._surplus, self._begun, self._cluster = 0.0, False, None

    # Recording

    def register(self, client: bytes, inserted: int, sequence: int) -> None:
        """Register a client; entries that it recorded before do not count in the band.

        Args:
            sequence: Sequence number of the message's header; an older message of the client changes nothing.
        """
        with self._changed:
            known = self._clients.get(client)
            self._unheard.discard(client)
            if known is not None and sequence <= known.sequence:
                return
            if known is not None:
                self._outstanding -= known.outstanding
            self._clients[client] = _Client(inserted, sequence)

    def report_inserts(self, client: bytes, inserted: int, sequence: int) -> None:
        """Add the new entries of a client that reports `inserted` entries in all, in message number `sequence`."""
        entries = self._entries_here() if self.is_active else 0
        with self._changed:
            known = self._clients.get(client)
            self._unheard.discard(client)
            if known is None:  # the client sent HELLO before a restart
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
        """Begin the band once enough entries can be drawn, and forgive surplus beyond the band that neither side
        caused. Called after new entries were reported.
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

    def unregister(self, client: bytes) -> None:
        """Unregister a client that has ended, and release its unused grant to the other clients."""
        with self._changed:
            known = self._clients.pop(client, None)
            self._unheard.discard(client)
            if known is not None:
                self._outstanding -= known.outstanding

    def grant(self, client: bytes, sharers: int = 1) -> tuple[int, str]:
        """Return (total, reason): the entries that a client may have recorded in all before it asks again, and the
        reason for which it gets no more. The total is NO_LIMIT if nothing is limited.

        Args:
            sharers: Number of clients that record.
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
        share = 1.0 if self._cluster is None else self._cluster.share
        room = (tolerance - self._surplus) / ratio * share
        missing = self.parameters.min_size - self._entries(entries)
        if not self._begun or missing > 0:
            room = max(room, float(missing))
        mine = min(room - others, max(1.0, self._share(room, sharers, known.entries_per_grant(now))))
        mine = max(mine, self._needed(now))
        through = max(known.through, known.inserted + max(0, math.floor(mine + _ROUNDING)))
        if through > known.through:
            known.asked = now, known.inserted
        known.through = min(through, NO_LIMIT)  # a tiny ratio allows more than a message can carry
        self._outstanding = others + known.outstanding
        return known.through, "" if known.through > known.inserted else self._why_not_record()

    def _why_not_record(self) -> str:
        ratio, tolerance = band_settings(self.parameters)
        missing = max(1, math.ceil(self._surplus + (self._outstanding + 1) * ratio - tolerance - _ROUNDING))
        return (
            f"waiting until learners draw {missing} more samples: draws are {self._surplus:.0f} samples behind "
            f"samples_per_insert={ratio:g}, and may be {tolerance:g} behind (samples_per_insert_tolerance)"
        )

    # Drawing

    def why_not_draw(self, samples: int) -> str:
        """Return the reason for which a batch has to wait for entries; "" if it does not."""
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
        """Count a batch as drawn as soon as it may be; return "", or after `timeout` seconds the reason to wait.

        Raises:
            ParameterError: the tolerance is too small for `samples`, also after a change during the wait.
        """
        if not self.is_active:
            self.record_draw(samples)
            return ""
        began, reader = self._clock(), object()
        try:
            while True:
                check_batch(self.parameters, samples)
                entries = self._entries_here()
                with self._changed:
                    now = self._clock()
                    reason, remaining = self._why_not_draw(samples, entries, now), began + timeout - now
                    if not reason:
                        self.record_draw(samples)
                    if not reason or remaining <= 0.0:
                        return reason
                    self.report_wait(reader, samples)
                    self._changed.wait(min(remaining, ENTRIES_INTERVAL))
        finally:
            with self._changed:
                self.report_wait(reader, 0)
                self._waited += self._clock() - began

    def record_draw(self, samples: int, also: Changes | tuple[()] = (), *, has_band: bool = True) -> None:
        """Record that samples were handed out; a negative number takes back samples that `take` has counted.

        Args:
            also: Changes to make together with the count.
            has_band: False if the reader knew of no band; actors need not record for its samples.
        """
        with self._changed:
            surplus = self._surplus - samples if self._begun and has_band else self._surplus
            at_once([*setting(self, _drawn=self._drawn + samples, _surplus=surplus), *also])
            self._changed.notify_all()

    def report_wait(self, reader: Hashable, samples: int) -> None:
        """Record that a learner waits for a batch of so many samples; 0 ends its wait."""
        with self._changed:
            now = self._clock()
            if samples and (reader in self._waiting or len(self._waiting) < MAX_WAITING_READERS):
                self._waiting[reader] = (samples, self._waiting.get(reader, (0, now, now))[1], now)
            elif not samples:
                self._waiting.pop(reader, None)

    def _starving(self, now: float) -> int:
        """Return the entries that the largest batch of starving learners needs; 0 if no learner starves."""
        ratio = self.parameters.samples_per_insert
        for reader in [reader for reader, (_, _, asked) in self._waiting.items() if asked < now - FORGET_TIMEOUT]:
            del self._waiting[reader]
        waiting = [samples for samples, since, _ in self._waiting.values() if now - since >= STARVING_TIMEOUT]
        return math.ceil((max(waiting) + self.parameters.cache_size) / ratio) if waiting and ratio else 0

    def _share(self, room: float, sharers: int, lasting: float) -> float:
        """Return a client's part of the room, if `lasting` entries last it for `GRANT_TIME`."""
        return min(room / max(1, sharers), max(LEAST_ENTRIES, room / LEAST_PART, lasting))

    def _needed(self, now: float) -> int:
        """Return the entries that a client may record whatever else was granted, because a learner starves."""
        return self._starving(now)

    # Several servers

    def apply_cluster(self, cluster: ClusterSurplus) -> None:
        """Apply the surplus of all servers as a reader reports it, plus the counts of this server since.

        A reader that does not know the current parameters reports another band, and changes nothing.
        """
        with self._changed:
            if (cluster.ratio, cluster.tolerance) != band_settings(self.parameters):
                return
            self._cluster, self._begun = cluster, True
            inserted, drawn = self._inserted - cluster.inserted, self._drawn - cluster.drawn
            self._surplus = cluster.surplus + (inserted * self.parameters.samples_per_insert - drawn)
            self._changed.notify_all()

    def server_surplus(self) -> ServerSurplus | None:
        """Return this server's counts for a reader; None if nothing is limited."""
        with self._changed:
            if not self.is_active:
                return None
            settings = band_settings(self.parameters)
            return ServerSurplus(self._surplus, self._cluster is not None, self._inserted, self._drawn, *settings)

    def _entries(self, here: int) -> int:
        """Return the number of entries that can be drawn at all servers."""
        return here if self._cluster is None else here + self._cluster.entries

    def stats(self) -> RateStats:
        """Return all figures at this moment."""
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
