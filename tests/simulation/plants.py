"""Faults to plant, each in place of a piece of the product: a check that has never failed proves nothing.

Each names the check that finds it, and what a trial needs for it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True)
class Plant:
    """A fault, and how it is found."""

    apply: Callable[[], None]
    found_by: str
    """Beginning of the violation."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of a trial in which it is found."""


PLANTS: dict[str, Plant] = {}


def replace(where: Any, name: str, what: Any) -> Any:
    """Put something in the place of a part of the product; returns what was there."""
    former = getattr(where, name)
    setattr(where, name, what)
    return former


def planted(found_by: str, **settings: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def keep(function: Callable[[], None]) -> Callable[[], None]:
        PLANTS[function.__name__] = Plant(function, found_by, settings)
        return function

    return keep


@planted("counts: ")
def increments() -> None:
    """Clients report what is new since their last message, and servers add it up: what is sent again counts again."""
    from memoire.accounting.ledger import Ledger
    from memoire.client import io

    report_of, report = io.report_of, Ledger.report

    def new_since(session: Any, *arguments: Any) -> Any:
        body = report_of(session, *arguments)
        before = getattr(session, "reported_before", (0, 0))
        session.reported_before = (body.episodes, body.steps)
        return msgspec.structs.replace(body, episodes=body.episodes - before[0], steps=body.steps - before[1])

    def add(self: Any, client: bytes, sequence: int, update: Any, now: float, table: int = 0) -> Any:
        old = self.greet(client, now, table).report
        added = msgspec.structs.replace(update, episodes=old.episodes + update.episodes, steps=old.steps + update.steps)
        return report(self, client, sequence, added, now, table)

    io.report_of, Ledger.report = new_since, add  # type: ignore[method-assign]


def _take_with(change: Callable[[list[Any], int], tuple[list[Any], int]]) -> None:
    """A logbook that takes what `change(lines, through)` returns in place of both."""
    from memoire.accounting.runs import Logbook

    take = Logbook.take

    def wrong(self: Any, client: bytes, lines: Any, through: int, now: float) -> Any:
        return take(self, client, *change(list(lines), through), now)

    Logbook.take = wrong  # type: ignore[method-assign]


@planted("log: ")
def unnumbered_lines() -> None:
    """Servers take every line that comes, also one that they have."""

    _take_with(lambda lines, through: (lines, 0))


@planted("log: ")
def lost_lines() -> None:
    """Servers acknowledge every other line without keeping it, where they get several."""

    _take_with(lambda lines, through: ([line for line in lines if line.number % 2] or lines, through))


@planted("caches: ")
def doubled_caches() -> None:
    """Proxies send each cache twice."""
    from memoire.net.poller import SendQueue

    put = SendQueue.put

    def twice(self: Any, frames: Any, size: int) -> None:
        put(self, frames, size)
        if len(frames) == 2 and len(frames[1]):
            put(self, frames, size)

    SendQueue.put = twice  # type: ignore[method-assign]


@planted("caches: ")
def torn_samples() -> None:
    """Readers mix the samples of a batch: a field comes from its neighbour."""
    from memoire.replay.batch import Batch

    get = Batch.__getitem__

    def shifted(self: Any, name: str) -> Any:
        value = get(self, name)
        return value[::-1] if name == "action" else value

    Batch.__getitem__ = shifted  # type: ignore[method-assign]


@planted("deadlines: ")
def late_answers() -> None:
    """A call of a client takes three seconds longer than it was given, now and then."""
    from memoire.client.client import Client

    push = Client.push_cache

    def late(self: Any, timeout: float | None = None) -> bool:
        if self.stats().pushed_caches % 8 == 7:
            time.sleep(3.0)
        return push(self, timeout)

    Client.push_cache = late  # type: ignore[method-assign]


@planted("models: ")
def older_models() -> None:
    """Clients take an older model in place of a newer one, now and then."""
    from memoire.client.waiting import ModelHandle

    newest, kept = ModelHandle.newest, {}

    def sometimes_old(self: Any) -> Any:
        model = newest(self)
        if model is None:
            return None
        first = kept.setdefault(id(self), model)
        return first if model.version % 3 == 0 else model

    ModelHandle.newest = sometimes_old  # type: ignore[method-assign]


@planted("rollouts: ", storage="rollouts")
def doubled_rollouts() -> None:
    """Servers hand some fragments out twice."""
    from memoire.tables.rollouts.fragments import RolloutQueue

    give = RolloutQueue.give

    def again(self: Any, *arguments: Any) -> Any:
        taken = give(self, *arguments)
        if taken and self.counts.taken % 3 == 0:
            self.add(taken[0])
        return taken

    RolloutQueue.give = again  # type: ignore[method-assign]


@planted("rollouts: ", storage="rollouts")
def forgotten_replies() -> None:
    """Servers that are asked a second time for rollouts hand out the next ones: those of the first answer are lost."""
    from memoire.server.dispatch import GivenReplies

    GivenReplies.find = lambda self, header, now: None  # type: ignore[method-assign]
    GivenReplies.keep = lambda self, header, reply: None  # type: ignore[method-assign]


def _slow_disk(before: float, after: float) -> None:
    """Saving takes as much longer, before anything is on disk and after it."""
    from memoire.server.dispatch import Dispatcher

    collect, saved = Dispatcher.collect, Dispatcher.saved

    def slowly(self: Any) -> Any:
        time.sleep(before)
        return collect(self)

    def slow_to_say(self: Any) -> None:
        time.sleep(after)
        saved(self)

    Dispatcher.collect, Dispatcher.saved = slowly, slow_to_say  # type: ignore[method-assign]


@planted("")
def slow_disk() -> None:
    """No fault: nothing may be found."""
    _slow_disk(0.2, 0.1)


@planted("log: ")
def early_replies() -> None:
    """Servers answer before what they answer for is on disk, and the disk is slow."""
    from memoire.accounting.runs import UnsavedChanges

    def at_once(self: Any, key: Any, ticket: Callable[[], None]) -> None:
        ticket()

    UnsavedChanges.wait = at_once  # type: ignore[method-assign]
    _slow_disk(0.5, 0.0)


@planted("copies: ")
def forgotten_accounts() -> None:
    """Servers that start again do not read what they had counted."""
    from memoire.accounting.account import FoldedSums
    from memoire.accounting.packing import StoredAccounts

    StoredAccounts.find = lambda self, client: None  # type: ignore[method-assign]
    StoredAccounts.sums = lambda self: FoldedSums()  # type: ignore[method-assign]


@planted("log: ")
def forgotten_numbers() -> None:
    """Servers that start again do not read which lines they have."""
    from memoire.accounting.packing import StoredAccounts

    find = StoredAccounts.find

    def without_number(self: Any, client: bytes) -> Any:
        account = find(self, client)
        if account is not None:
            account.lines_through = 0
        return account

    StoredAccounts.find = without_number  # type: ignore[method-assign]
    _slow_disk(0.0, 0.3)


# How messages are sent, answered and believed: a simulated network meets these all the time.


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
    from memoire.prompts.steps import PromptSteps

    replace(PromptSteps, "find", lambda self, step, session: self.enter(session))


@planted("prompts: ", storage="prompts")
def rewinds_that_commit() -> None:
    """A trainer that goes back to a checkpoint does not get what it drew after that."""
    from memoire.prompts.steps import PromptSteps

    replace(PromptSteps, "_take_back", lambda self, rows: None)


# Faults that were found from outside once: what mended them is taken out again.


@planted("endings: ")
def ends_of_those_that_are_there() -> None:
    """A learner that ends a run does not wait for servers that are away."""
    from memoire.reader.admin import ClusterOrders
    from memoire.wire import messages

    def finish(self: Any, timeout: float) -> None:
        def bodies() -> dict[str, Any]:
            return {server.name: messages.Control(finish=True) for server in self._directory.there}

        self._gather(bodies, lambda answer: None, self._monitor.now() + timeout, None)

    replace(ClusterOrders, "finish", finish)


@planted("endings: ")
def locks_that_have_to_be_whole() -> None:
    """A server does not take the lock of a folder that a power failure has torn."""
    from memoire.replay import files as file_lock

    replace(file_lock, "_is_ours", lambda content: not content or content.endswith(b"}"))


@planted("spins: ", storage="jobs")
def leases_renewed_with_nobody() -> None:
    """An observer whose agent is away looks without a pause whether it can renew the lease of its job."""
    from memoire.rl.observer import ObserverThread

    next_time = replace(ObserverThread, "_next_time", None)
    replace(ObserverThread, "_next_time", _with_former_renewals(next_time))


def _with_former_renewals(next_time: Any) -> Any:
    def soonest(self: Any) -> float:
        for job in self._held:
            if math.isinf(job.renew_at):
                job.renew_at = time.monotonic() - 1.0
        return next_time(self)  # type: ignore[no-any-return]

    return soonest
