"""Numbered requests until they are answered: when to send each again, and when to give it up. Pure: time is passed in.

A request may be sent any number of times, since each one is idempotent; its number finds it again when a reply comes.
The pause before a resend doubles and is drawn at random from its upper half, so that a thousand clients of a node
that comes back do not ask in the same instant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class PendingRequest:
    """One request on its way; belongs to the thread that owns the socket."""

    number: int
    frames: Sequence[Any]
    deadline: float
    """When to give up; infinity for what must never be given up."""
    finish: Callable[[Any], None]
    """Called once, with the reply or an exception."""
    next_send: float
    started: float
    patience: float = 0.0
    """Least seconds before it is sent again, other than after a lost connection."""
    sends: int = 0
    sent_at: float = float("-inf")


class PendingRequests:
    """The requests of one channel that have no reply yet."""

    def __init__(self, resend_after: float, resend_most: float, rng: random.Random) -> None:
        self._calls: dict[int, PendingRequest] = {}
        self._resend_after = resend_after
        self._resend_most = resend_most
        self._rng = rng
        self.resends = 0

    def __len__(self) -> int:
        return len(self._calls)

    def start(
        self,
        number: int,
        frames: Sequence[Any],
        deadline: float,
        finish: Callable[[Any], None],
        now: float,
        patience: float = 0.0,
    ) -> PendingRequest:
        """Keep a request until it is answered; it is due at once."""
        call = self._calls[number] = PendingRequest(number, frames, deadline, finish, now, now, patience)
        return call

    def due(self, now: float) -> list[PendingRequest]:
        """Those to send now, in the order of their numbers."""
        return [call for call in self._calls.values() if call.next_send <= now < call.deadline]

    def sent(self, call: PendingRequest, now: float) -> None:
        """The socket took it; sets when it is sent again."""
        pause = min(self._resend_most, self._resend_after * 2.0 ** min(call.sends, 30))
        call.next_send = now + max(call.patience, pause if call.sends == 0 else pause * self._rng.uniform(0.5, 1.0))
        self.resends += call.sends > 0
        call.sends += 1
        call.sent_at = now

    def lost(self, before: float, now: float) -> None:
        """Have everything sent again now that was sent until `before`: the connection was lost then, and is back."""
        for call in self._calls.values():
            if call.sent_at <= before:
                call.next_send = min(call.next_send, now)

    def take(self, number: int) -> PendingRequest | None:
        """The call that this reply answers, which is over now; None when it has been answered or given up."""
        return self._calls.pop(number, None)

    def expired(self, now: float) -> list[PendingRequest]:
        """Those whose deadline has passed; they are over."""
        if not self._calls:
            return []
        gone = [call for call in self._calls.values() if now >= call.deadline]
        for call in gone:
            del self._calls[call.number]
        return gone

    def all(self) -> list[PendingRequest]:
        """Every open call; they are over (the channel closes)."""
        gone = list(self._calls.values())
        self._calls.clear()
        return gone

    def next_time(self) -> float:
        """When something is due or expires next; infinity when nothing is open."""
        if not self._calls:
            return float("inf")
        return min([min(call.next_send, call.deadline) for call in self._calls.values()])

    def next_deadline(self) -> float:
        """When the next one expires; infinity when none does."""
        return min((call.deadline for call in self._calls.values()), default=float("inf"))
