"""Rules of the protocol, each taken out of the product: a search that finds nothing wrong then would prove nothing.

Like the plants of `simulation.plants`, each replaces a piece of the product, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from simulation.plants import replace

from .explore import Search, World
from .worlds import DRAIN


@dataclass(frozen=True)
class Mutation:
    """A rule that is taken out, and where that shows."""

    apply: Callable[[], None]
    world: World


MUTATIONS: Final[dict[str, Mutation]] = {}


def mutation(world: World) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Names the world in which it shows."""

    def keep(function: Callable[[], None]) -> Callable[[], None]:
        MUTATIONS[function.__name__] = Mutation(function, world)
        return function

    return keep


@mutation(World("two reports", works=2, doubles=1))
def newest_report_in_place_of_the_greatest() -> None:
    """A server believes the message that came last, in place of the greatest sums."""
    from memoire.accounting import ledger

    def last(old: Any, update: Any, *, is_newest: bool, is_mine: bool) -> Any:
        return msgspec.structs.replace(update, lines=[], ended=[])

    replace(ledger, "_merged", last)


@mutation(World("a server that forgets", works=0, pushes=1, kills=1, is_durable=False))
def caches_without_since() -> None:
    """A server counts caches that were pushed to an account of its former life."""
    from memoire.accounting.ledger import Ledger

    arrived = Ledger.arrived

    def whatever(self: Any, *given: Any, since: int = 0, **named: Any) -> Any:
        return arrived(self, *given[:5], 0, *given[6:], **named)

    Ledger.arrived = whatever  # type: ignore[method-assign]


@mutation(World("a server that forgets", works=0, pushes=1, kills=1, is_durable=False))
def windows_without_since() -> None:
    """A client goes on with the numbers of an account that its home has forgotten."""
    from memoire.client.counts import AccountWindows

    belong = AccountWindows.belong
    AccountWindows.belong = lambda self, run, home, since: belong(self, run, home, 1)  # type: ignore[method-assign]


@mutation(World("a restart", kills=1))
def answer_before_its_save() -> None:
    """A server answers before what it answers for is on disk."""
    from memoire.server.state import Committer

    Committer.hold = lambda self, header, reply, send: reply  # type: ignore[method-assign]


@mutation(World("a drain", script=DRAIN))
def handed_over_before_the_drain_ends() -> None:
    """A drained server's accounts are copied while clients are still at home there."""
    Search.is_anybody_at = lambda self, server, servers: False  # type: ignore[method-assign]


@mutation(World("a drain", script=DRAIN))
def clients_without_an_account_are_not_waited_for() -> None:
    """A drain waits only for clients that have counted something. That is how it was."""
    from . import explore

    wait = explore.here

    def overlooked(mine: Any, home: int, others: Any) -> bool:
        return wait(mine._replace(guests=0), home, others)

    explore.here = overlooked


@mutation(World("another run", works=2, script=(("run", "alpha", "two"),)))
def run_drawn_on_the_wrong_side() -> None:
    """What a client counts after a run has ended is told to that run, and counted for the next one, too."""
    from memoire.client.counts import RunCounts

    RunCounts.reach = property(lambda self: self.sums)  # type: ignore[assignment,method-assign]
    enter = RunCounts.enter_run

    def from_the_boundary(self: Any, run: int) -> None:
        boundary = self.boundary
        enter(self, run)
        if boundary is not None:
            self._entered = boundary.counts

    RunCounts.enter_run = from_the_boundary  # type: ignore[method-assign]


@mutation(World("a server that forgets", works=0, pushes=1, kills=1, is_durable=False))
def epoch_of_a_report_ignored() -> None:
    """A server takes what a client counts for its former life for what it has counted in this one."""
    from memoire.accounting import ledger

    def always_mine(old: Any, update: Any, *, is_newest: bool, is_mine: bool) -> Any:
        return merged(old, update, is_newest=is_newest, is_mine=True)

    merged = replace(ledger, "_merged", always_mine)


@mutation(World("a server that forgets", works=0, kills=1, is_durable=False))
def epoch_of_an_answer_ignored() -> None:
    """A client does not notice that its home has begun again."""
    from memoire.client.session import Session

    Session.is_same_life = lambda self, said: True  # type: ignore[method-assign]


@mutation(World("two lines", works=2, doubles=1))
def lines_without_numbers() -> None:
    """A server writes every line that comes."""
    from memoire.accounting.runs import Logbook

    take = Logbook.take
    Logbook.take = lambda self, client, lines, through, now: take(self, client, lines, 0, now)  # type: ignore[method-assign]


@mutation(World("a lost answer", losses=1))
def lines_acknowledged_when_sent() -> None:
    """A client forgets lines when it sends them."""
    from memoire.client.counts import LineOutbox

    waiting = LineOutbox.waiting

    def forgotten(self: Any, *given: Any, **named: Any) -> Any:
        chosen = waiting(self, *given, **named)
        if chosen:
            self.acknowledge(chosen[-1].number)
        return chosen

    LineOutbox.waiting = forgotten  # type: ignore[method-assign]
