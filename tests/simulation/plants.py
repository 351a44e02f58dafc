"""Faults to plant in how messages are sent, answered and believed: a simulated network meets them all the time.

Like those of `history.plants`, each replaces a piece of the product, and names the check that finds it.
"""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec

from history.plants import planted


@planted("caches: ", kills=4)
def answers_of_former_lives() -> None:
    """A client takes an answer of a home that has begun again for one about what it has pushed to the former life."""
    from memoire.client.session import Session

    Session.is_same_life = lambda self, said: True  # type: ignore[method-assign]


@planted("log: ")
def acknowledged_when_sent() -> None:
    """A client forgets lines when they are sent, and not when they are acknowledged."""
    from memoire.client.line_outbox import LineOutbox

    waiting = LineOutbox.waiting

    def forgotten(self: Any, *given: Any, **named: Any) -> Any:
        chosen = waiting(self, *given, **named)
        if chosen:
            self.acknowledge(chosen[-1].number)
        return chosen

    LineOutbox.waiting = forgotten  # type: ignore[method-assign]


@planted("")
def never_sent_again() -> None:
    """A request whose answer is lost is not sent again."""
    from memoire.net.pending_requests import PendingRequests

    sent = PendingRequests.sent

    def once(self: Any, call: Any, now: float) -> None:
        sent(self, call, now)
        call.next_send = math.inf

    PendingRequests.sent, PendingRequests.lost = once, lambda self, before, now: None  # type: ignore[method-assign]


@planted("caches: ")
def added_answers() -> None:
    """A client adds what its home has received to what the last answer said, in place of taking the greater one."""
    from memoire.client.push_window import PushWindow

    answered = PushWindow.answered

    def added(self: Any, accepted: int, received: int, *given: Any, **named: Any) -> None:
        before = self.received_bytes
        answered(self, accepted, received, *given, **named)
        self.received_bytes += before if received > before else 0

    PushWindow.answered = added  # type: ignore[method-assign]


@planted("caches: ")
def uncounted_losses() -> None:
    """A server counts caches as they come, in place of believing their numbers: those that were lost are missing."""
    from memoire.accounting.account import Account

    arrived = Account.arrived

    def counted(self: Any, byte_count: int, number: int, pushed_bytes: int, now: float) -> None:
        arrived(self, byte_count, 0, 0, now)

    Account.arrived = counted  # type: ignore[method-assign]


@planted("counts: ")
def early_goodbyes() -> None:
    """A client that leaves says that everything is delivered, and does not wait for the answer."""
    from memoire.client.io import Connection

    Connection.told_everything = lambda self, deadline: True  # type: ignore[method-assign]


@planted("")
def homes_by_chance() -> None:
    """A proxy gives a client that asks again to any server, in place of the one that its id names."""
    from memoire.proxy.router import Router

    chance = random.Random(7)

    def anyone(self: Any, client: bytes) -> Any:
        return chance.choice([back for back in self.backs if not back.is_away] or self.backs)

    Router.assign = anyone  # type: ignore[method-assign]


@planted("counts: ", runs=2)
def runs_that_flow_together() -> None:
    """A client counts what it did in the former run in the new one, too."""
    from memoire.client.counts import RunCounts

    def enter(self: Any, run: int) -> None:
        self.boundary = None

    RunCounts.enter_run = enter  # type: ignore[method-assign]


@planted("endings: ")
def endless_runs() -> None:
    """A client does not hear that the run is over."""
    from memoire.client.session import Session

    updated = Session.updated

    def deaf(self: Any, said: Any, *given: Any) -> Any:
        return updated(self, msgspec.structs.replace(said, finished=False), *given)

    Session.updated = deaf  # type: ignore[method-assign]


@planted("")
def homes_given_away() -> None:
    """A proxy that has just begun gives clients of a server that it has not met yet to another one."""
    from memoire.proxy.router import Router

    Router.is_unknown = lambda self, home, now: True  # type: ignore[method-assign]
