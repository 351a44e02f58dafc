"""Rules of the protocol, each taken out of the product to show that the search detects its absence.

Like the faults of `simulation.plants`, each mutation replaces a piece of the product, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from simulation.plants import in_place, replace

from .explore import World
from .worlds import DRAIN

MUTATIONS: Final[dict[str, tuple[Callable[[], None], World]]] = {}
"""Each mutation's function, and a world in which it does harm."""
FORGETS: Final = World("a server that forgets", works=0, pushes=1, kills=1, is_durable=False)


def mutation(world: World, where: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a mutation: the function replaces `where`, or, without `where`, is called."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        MUTATIONS[function.__name__] = in_place(where, function), world
        return function

    return keep


@mutation(World("two reports", works=2, doubles=1), "memoire.accounting.ledger:_merged")
def newest_report_in_place_of_the_greatest(merged: Any, old: Any, update: Any, **named: Any) -> Any:
    """A server keeps the newest report instead of the greatest sums."""
    return msgspec.structs.replace(update, lines=[], ended=[])


@mutation(FORGETS, "memoire.accounting.ledger:Ledger.count_arrived_cache")
def caches_without_since(arrived: Any, self: Any, *args: Any, since: int = 0, **named: Any) -> Any:
    """A server counts caches that were pushed to an account of its former life."""
    return arrived(self, *args[:5], 0, *args[6:], **named)


@mutation(FORGETS, "memoire.client.counts:AccountWindows.enter_account")
def windows_without_since(belong: Any, self: Any, run: int, home: int, since: int) -> Any:
    """A client continues the numbers of an account that its home has forgotten."""
    return belong(self, run, home, 1)


@mutation(World("a restart", kills=1), "memoire.server.state:Committer.hold_until_saved")
def answer_before_its_save(hold: Any, self: Any, header: Any, reply: Any, send: Any) -> Any:
    """A server answers before the acknowledged data are on disk."""
    return reply


@mutation(World("a drain", script=DRAIN), "protocol.explore:here")
def handed_over_before_the_drain_ends(here: Any, mine: Any, home: int, others: Any) -> bool:
    """A drained server's accounts are copied while clients are still at home there."""
    return False


@mutation(World("a drain", script=DRAIN), "protocol.explore:here")
def clients_without_an_account_are_not_waited_for(here: Any, mine: Any, home: int, others: Any) -> bool:
    """A drain waits only for clients with counts, as in an earlier version."""
    return here(mine._replace(guests=0), home, others)


@mutation(World("another run", works=2, script=(("run", "alpha", "two"),)))
def run_drawn_on_the_wrong_side() -> None:
    """A client reports counts after the end of a run to both the former and the next run."""
    from memoire.client.counts import RunCounts

    def from_the_boundary(enter: Any, self: Any, run: int) -> None:
        boundary = self.boundary
        enter(self, run)
        if boundary is not None:
            self._entered = boundary.counts

    RunCounts.covered_counts = property(lambda self: self.sums)  # type: ignore[assignment,method-assign]
    replace("memoire.client.counts:RunCounts.enter_run", from_the_boundary)


@mutation(FORGETS, "memoire.accounting.ledger:_merged")
def epoch_of_a_report_ignored(merged: Any, old: Any, update: Any, *, is_newest: bool, is_mine: bool) -> Any:
    """A server adds a client's counts of the former life to those of the present life."""
    return merged(old, update, is_newest=is_newest, is_mine=True)


@mutation(
    World("a server that forgets", works=0, kills=1, is_durable=False), "memoire.client.session:Session.is_same_life"
)
def epoch_of_an_answer_ignored(is_same_life: Any, self: Any, answer: Any) -> bool:
    """A client ignores that its home has begun again."""
    return True


@mutation(World("two lines", works=2, doubles=1), "memoire.accounting.runs:Logbook.take")
def lines_without_numbers(take: Any, self: Any, client: bytes, lines: Any, through: int, now: float) -> Any:
    """A server writes every line that arrives."""
    return take(self, client, lines, 0, now)


@mutation(World("a lost answer", losses=1), "memoire.client.counts:LineOutbox.next_lines")
def lines_acknowledged_when_sent(waiting: Any, self: Any, *args: Any, **named: Any) -> Any:
    """A client forgets lines when it sends them."""
    chosen = waiting(self, *args, **named)
    if chosen:
        self.acknowledge(chosen[-1].number)
    return chosen
