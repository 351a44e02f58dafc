"""The thread of an observer: requests to one of several agents, and word that a job goes on while it is done.

observer ──WORK, INFER, RESULT──▶ its agent by rendezvous hash    down or silent: the next one, until it returns
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memoire.errors import Closed, MemoireError, MemoireTimeout
from memoire.limits import Limits
from memoire.net.channel import Channel, open_channels
from memoire.net.context import Context
from memoire.net.turns import LentWorker
from memoire.security.keyfolder import Keys
from memoire.wire import messages
from memoire.wire.frames import Answer

from .choice import PROBE_INTERVAL, NodeChoice

GRACE = 0.5
"""Seconds after a deadline in which the thread still says how a request has ended."""
RENEWALS = 3
"""Times that an agent hears of a job during one lease."""


@dataclass(eq=False)
class _Call:
    """One request until it is answered."""

    url: str
    number: int = 0
    is_watched: bool = False
    """Whether there was a connection when it was sent: the request ends with it."""
    answer: Answer | None = None


@dataclass(eq=False)
class HeldJob:
    """A job that an observer is at. `is_over` is set by the thread."""

    url: str
    number: int
    lease: float
    renew_at: float = 0.0
    is_over: bool = False
    """Whether its agent does not want it any more, or is gone."""


class ObserverThread:
    """Owns the channels.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.
    """

    def __init__(
        self, urls: Sequence[str], *, client: bytes, limits: Limits, keys: Keys | None, context: Context
    ) -> None:
        self.choice = NodeChoice(client, urls)
        self.worker = LentWorker("memoire-observer", self._turn, self._next_time, self._at_end)
        self._open: set[_Call] = set()
        self._held: set[HeldJob] = set()
        self._channels: dict[str, Channel] = {}
        facts: dict[str, Any] = {"client": client, "limits": limits, "keys": keys}
        open_channels(self._channels, self.choice.order, self.worker, context, **facts)

    # From any thread

    def pick(self) -> str:
        """The agent to ask now."""
        return self.choice.pick(lambda url: self._channels[url].is_down)

    def silent(self, url: str) -> None:
        """An agent did not answer: ask others until it does."""
        self.worker.post(lambda: self.choice.silent(url, time.monotonic()))

    def connections(self, url: str) -> int:
        """How often a connection to this agent came about: after a new one it may be another process."""
        return self._channels[url].connections

    def denied(self, url: str) -> MemoireError | None:
        """Why this process is not let in there, once that has been so for a while."""
        return self._channels[url].denied_for_good

    def request(
        self, url: str, body: messages.Body, seconds: float, *, payload: Any = None, fingerprint: int = 0
    ) -> Answer:
        """Ask, and wait for the answer: these seconds at most, and no longer than the connection lasts.

        Returns:
            The reply, or `Refused`, `MemoireTimeout`, `Closed`.
        """
        call, began = _Call(url), time.monotonic()
        facts: dict[str, Any] = {"payload": payload}
        if isinstance(body, messages.Work):  # which is answered late
            facts["patience"] = body.patience

        def begin() -> None:
            channel = self._channels[url]
            channel.fingerprint, call.is_watched = fingerprint, not channel.is_down
            self._open.add(call)
            call.number = channel.ask(body, lambda answer: self._end(call, answer), began + seconds, **facts)

        self.worker.run(begin)
        self.worker.wait_for(lambda: call.answer is not None, began + seconds + GRACE)
        took = time.monotonic() - began
        return call.answer or MemoireTimeout("answer", url, took, self._channels[url].trouble(probe=False))

    def hold(self, job: HeldJob) -> None:
        """Tell its agent from time to time that this job goes on."""
        job.renew_at = time.monotonic() + job.lease / RENEWALS
        self.worker.post(lambda: self._held.add(job))

    def release(self, job: HeldJob) -> None:
        """A job is done, or given up."""
        self.worker.post(lambda: self._held.discard(job))

    # ------------------------------------------------------------------------- from here on: inside of the thread

    def _next_time(self) -> float:
        channels = (channel.next_time() for channel in self._channels.values())
        return min(self.choice.next_time(), *channels, *(job.renew_at for job in self._held))

    def _turn(self, ready: dict[object, int]) -> None:
        for channel in self._channels.values():
            channel.turn(ready)
        now = time.monotonic()
        for url in self.choice.probes(now):
            self._probe(url, now)
        down = {url for url, channel in self._channels.items() if channel.is_down}
        for call in [call for call in self._open if call.is_watched and call.url in down]:
            self._channels[call.url].drop(call.number)
            why = self._channels[call.url].trouble(probe=False)
            self._end(call, MemoireTimeout("answer", call.url, 0.0, why))
        for job in self._held:
            if job.url in down:  # nobody is told that it goes on: nothing is due for it any more
                job.is_over, job.renew_at = True, math.inf
            elif now >= job.renew_at:
                self._renew(job, now)

    def _renew(self, job: HeldJob, now: float) -> None:
        def heard(answer: Answer) -> None:
            if not isinstance(answer, MemoireError) and isinstance(answer.body, messages.Job):
                job.is_over = job.is_over or answer.body.cancelled

        job.renew_at = now + job.lease / RENEWALS
        self._channels[job.url].ask(messages.Work(patience=0.0, job=job.number), heard, now + job.lease)

    def _probe(self, url: str, now: float) -> None:
        def heard(answer: Answer) -> None:
            if not isinstance(answer, MemoireError):
                self.choice.answered(url)

        self._channels[url].ask(messages.Hello(role="actor"), heard, now + PROBE_INTERVAL)

    def _end(self, call: _Call, answer: Answer) -> None:
        self._open.discard(call)
        call.answer = answer

    def _at_end(self) -> None:
        for call in list(self._open):
            self._end(call, Closed("this observer"))
        for job in self._held:
            job.is_over = True
