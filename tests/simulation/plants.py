"""Faults to plant in how messages are sent, answered and believed: a simulated network meets them all the time.

Like those of `history.plants`, each replaces a piece of the product, and names the check that finds it.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import msgspec

from history.plants import planted, replace


@planted("")
def never_sent_again() -> None:
    """A request whose answer is lost is not sent again."""
    from memoire.net.channel import PendingRequests

    sent = PendingRequests.sent

    def once(self: Any, call: Any, now: float) -> None:
        sent(self, call, now)
        call.next_send = math.inf

    PendingRequests.sent, PendingRequests.lost = once, lambda self, before, now: None  # type: ignore[method-assign]


@planted("caches: ")
def added_answers() -> None:
    """A client adds what its home has received to what the last answer said, in place of taking the greater one."""
    from memoire.client.counts import PushWindow

    answered = PushWindow.answered

    def added(self: Any, accepted: int, received: int, *given: Any, **named: Any) -> None:
        before = self.received_bytes
        answered(self, accepted, received, *given, **named)
        self.received_bytes += before if received > before else 0

    PushWindow.answered = added  # type: ignore[method-assign]


@planted("counts: ")
def early_goodbyes() -> None:
    """A client that leaves says that everything is delivered, and does not wait for the answer."""
    from memoire.client.io import Connection

    replace(Connection, "told_everything", lambda self, deadline: True)


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


@planted("log: ")
def acknowledged_too_far() -> None:
    """A client takes every answer for one about all of its lines, also those that it has logged since it asked."""
    from memoire.client.session import Session

    updated = Session.updated

    def all_of_them(self: Any, said: Any, *given: Any) -> Any:
        self.outbox.acknowledge(self.outbox.newest)
        return updated(self, said, *given)

    Session.updated = all_of_them  # type: ignore[method-assign]


@planted("")
def requests_to_anyone() -> None:
    """A proxy sends a request to any server, in place of the home that it names."""
    from memoire.proxy.requests import ForwardRequest, Requests

    chance = random.Random(7)

    def anyone(self: Any, request: Any, header: Any, now: float) -> Any:
        found = route(self, request, header, now)
        there = [back for back in self._router.backs if not back.is_away]
        return found if found is None or not there else ForwardRequest(chance.choice(there), found.request)

    route = replace(Requests, "_route", anyone)


@planted("")
def answers_by_order() -> None:
    """A client takes each answer for that of its oldest request, whatever its number says."""
    from memoire.net.channel import PendingRequests

    take = PendingRequests.take

    def oldest(self: Any, number: int) -> Any:
        return take(self, min(self._calls, default=number))

    PendingRequests.take = oldest  # type: ignore[method-assign]


@planted("endings: ", runs=2)
def endless_boundaries() -> None:
    """A client never takes its former run for told, and stays in it."""
    from memoire.client.counts import RunCounts

    RunCounts.acknowledge_run = lambda self, boundary, oldest_line: None  # type: ignore[method-assign]


@planted("")
def caches_sent_again() -> None:
    """A client sends its newest cache again when a connection comes back."""
    from memoire.client.io import DataSockets

    open_, send = DataSockets.open, DataSockets.send

    def remembering(self: Any, queue: Any) -> Any:
        self.newest = queue[-1] if queue else getattr(self, "newest", None)
        if getattr(self, "is_again", False) and self.newest is not None:
            queue.append(self.newest)
            self.is_again = False
        return send(self, queue)

    def opened(self: Any, *given: Any) -> Any:
        self.is_again = True
        return open_(self, *given)

    DataSockets.send, DataSockets.open = remembering, opened  # type: ignore[method-assign]


@planted("log: ")
def lines_out_of_order() -> None:
    """A client sends its newest lines first."""
    from memoire.client.counts import LineOutbox

    waiting = LineOutbox.waiting
    replace(LineOutbox, "waiting", lambda self, *given, **named: waiting(self, *given, **named)[::-1])


@planted("feedback: ")
def feedback_dropped_when_sent() -> None:
    """A server gives up what it has sent to a client when more waits, though the client may have applied it."""
    from memoire.server.handlers.accounts import FeedbackHandler

    def dropped(self: Any, table: Any, account: Any, *given: Any) -> Any:
        waiting = self._waiting.get(account.client)
        if waiting is not None and waiting.sent is not None and waiting.pieces:
            self._lose(self._state.run, account, len(waiting.sent), [])
        return fetch(self, table, account, *given)

    fetch = replace(FeedbackHandler, "fetch", dropped)


@planted("spins: ", terms=6)
def polls_for_what_it_never_takes() -> None:
    """A server that ends waits for requests that it does not take."""
    from memoire.server.io_requests import RequestThread

    replace(RequestThread, "_stop_reading", lambda self: self._sockets.clear())


# Faults of tables of prompts.


@planted("prompts: ", storage="prompts")
def steps_drawn_anew() -> None:
    """A trainer that draws a step again gets other groups: the first ones are trained on by nobody."""
    from memoire.tables.prompts.steps import PromptSteps

    replace(PromptSteps, "find", lambda self, step, session: self.enter(session))


@planted("prompts: ", storage="prompts")
def rewinds_that_commit() -> None:
    """A trainer that goes back to a checkpoint does not get what it drew after that."""
    from memoire.tables.prompts.steps import PromptSteps

    replace(PromptSteps, "_take_back", lambda self, rows: None)


# Faults that were found from outside once: what mended them is taken out again.


@planted("endings: ")
def ends_of_those_that_are_there() -> None:
    """A learner that ends a run does not wait for servers that are away."""
    from memoire.reader.admin import ClusterAdmin
    from memoire.wire import messages

    def finish(self: Any, timeout: float) -> None:
        def bodies() -> dict[str, Any]:
            return {server.name: messages.Control(finish=True) for server in self._directory.there}

        self._gather(bodies, lambda answer: None, self._monitor.now() + timeout, None)

    replace(ClusterAdmin, "finish", finish)


@planted("endings: ")
def locks_that_have_to_be_whole() -> None:
    """A server does not take the lock of a folder that a power failure has torn."""
    from memoire.replay import files as file_lock

    replace(file_lock, "_is_ours", lambda content: not content or content.endswith(b"}"))


@planted("spins: ", storage="jobs")
def leases_renewed_with_nobody() -> None:
    """An observer whose agent is away looks without a pause whether it can renew the lease of its job."""
    from memoire.rl.observers.observer import ObserverThread

    next_time = replace(ObserverThread, "_next_time", None)
    replace(ObserverThread, "_next_time", _with_former_renewals(next_time))


def _with_former_renewals(next_time: Any) -> Any:
    def soonest(self: Any) -> float:
        for job in self._held:
            if math.isinf(job.renew_at):
                job.renew_at = time.monotonic() - 1.0
        return next_time(self)  # type: ignore[no-any-return]

    return soonest
