"""One `Limiter` for all threads of a process: the lock around it, the clock that it is told, and the waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from memoire import _core
from memoire.limits import NO_LIMIT

from .episode_store import Changes
from .limiter import ClusterSurplus, Limiter, RateStats, ServerSurplus, check_batch
from .parameters import Parameters

ENTRIES_INTERVAL = 0.05
"""Seconds after which a draw that waits counts the entries again, since nobody reports those of a pool."""


class SharedLimiter:
    """A `Limiter` that any thread may ask, and that a draw can wait for. Its methods are those of `Limiter`.

    Args:
        parameters: What to follow at first, or the limiter itself.
        entries: How many entries can be drawn here now. It may take locks of its own: it is never called with the lock
            of this one held.
        clock: Seconds that only grow.
    """

    def __init__(
        self, parameters: Parameters | Limiter, entries: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries, self._clock = entries, clock
        self._condition = _core.Condition()
        self._limiter = parameters if isinstance(parameters, Limiter) else Limiter(parameters)
        self._waited = 0.0

    @property
    def _changed(self) -> _core.Held:
        """The lock of what was counted, let go of wherever an interrupt comes. Whoever waits is woken by all that may
        let a draw go on.
        """
        return _core.Held(self._condition)

    @property
    def is_active(self) -> bool:
        """Whether anything is limited. Takes no lock."""
        return self._limiter.is_active

    def configure(self, parameters: Parameters) -> None:
        """Follow other parameters from now on; another band begins from nothing."""
        with self._changed:
            self._limiter.configure(parameters)
            self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """What was counted: `Limiter.state`."""
        with self._changed:
            return self._limiter.state()

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Take up what another life had counted: `Limiter.go_on_from`."""
        with self._changed:
            self._limiter.go_on_from(state)
            self._changed.notify_all()

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was counted yet: `Limiter.is_untouched`."""
        with self._changed:
            return self._limiter.is_untouched

    def reset(self) -> None:
        """Another run begins: forget what was counted."""
        with self._changed:
            self._limiter.reset()
            self._changed.notify_all()

    def state_of(self, client: bytes) -> dict[str, Any]:
        """What was counted of the only client, as JSON carries it, and how many entries it has recorded."""
        with self._changed:
            state = {name: value for name, value in self._limiter.state().items() if name not in ("clients", "told")}
            return state | {"recorded": self._limiter.recorded(client)}

    def take_over(self, state: Mapping[str, Any], client: bytes, inserted: int) -> None:
        """Go on counting from where another one was; its only client has recorded so many entries now."""
        self.go_on_from({**state, "told": None, "clients": [(client, inserted, inserted, inserted)]})

    def met(self, client: bytes, inserted: int, sequence: int) -> None:
        """A client is here: `Limiter.met`."""
        with self._changed:
            self._limiter.met(client, inserted, sequence)

    def reported(self, client: bytes, inserted: int, sequence: int) -> None:
        """A client has recorded so many entries in all: `Limiter.reported`."""
        entries = self._entries() if self.is_active else 0
        with self._changed:
            if self._limiter.reported(client, inserted, sequence, entries, self._clock()):
                self._changed.notify_all()

    def left(self, client: bytes) -> None:
        """A client has ended: `Limiter.left`."""
        with self._changed:
            self._limiter.left(client)

    def grant(self, client: bytes, sharers: int = 1) -> tuple[int, str]:
        """How many entries a client may have recorded in all, and why not more: `Limiter.grant`."""
        if not self._limiter.has_band:
            return NO_LIMIT, ""
        entries = self._entries()
        with self._changed:
            return self._limiter.grant(client, sharers, entries, self._clock())

    def why_not_draw(self, samples: int) -> str:
        """Why a batch has to wait for entries; "" when it has not."""
        if not self.is_active:
            return ""
        entries = self._entries()
        with self._changed:
            return self._limiter.why_not_draw(samples, entries, self._clock())

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
                check_batch(self._limiter.parameters, samples)
                entries = self._entries()
                with self._changed:
                    now = self._clock()
                    reason, left = self._limiter.why_not_draw(samples, entries, now), began + timeout - now
                    if not reason:
                        self.drew(samples)
                    if not reason or left <= 0.0:
                        return reason
                    self._limiter.wants(who, samples, now)
                    self._changed.wait(min(left, ENTRIES_INTERVAL))
        finally:
            with self._changed:
                now = self._clock()
                self._limiter.wants(who, 0, now)
                self._waited += now - began

    def drew(self, samples: int, also: Changes | tuple[()] = (), *, has_band: bool = True) -> None:
        """Samples were handed out; below 0, some that `take` had counted were not: `Limiter.drew`."""
        with self._changed:
            self._limiter.drew(samples, also, has_band=has_band)
            self._changed.notify_all()

    def wants(self, who: Hashable, samples: int) -> None:
        """Somebody waits for a batch of so many samples; 0: no more."""
        with self._changed:
            self._limiter.wants(who, samples, self._clock())

    def told(self, cluster: ClusterSurplus) -> None:
        """How it stands with all servers, from a reader of all: `Limiter.told`."""
        with self._changed:
            if self._limiter.told(cluster):
                self._changed.notify_all()

    def standing(self) -> ServerSurplus | None:
        """What a reader is told of this server; None where nothing is limited."""
        with self._changed:
            return self._limiter.standing()

    def stats(self) -> RateStats:
        """All figures at this moment."""
        entries = self._entries()
        with self._changed:
            return self._limiter.stats(entries, self._waited)
