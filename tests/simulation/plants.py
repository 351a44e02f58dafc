"""Planted faults, each in place of a piece of the product, to show that the checks detect them.

Each fault names the check that detects it, and the settings of its trial.
"""

from __future__ import annotations

import importlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import msgspec


@dataclass(frozen=True)
class Plant:
    """A fault, and the check that detects it."""

    apply: Callable[[], None]
    found_by: str
    """First characters of the violation."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of a trial that makes the fault likely."""


PLANTS: dict[str, Plant] = {}


def replace(where: str, wrong: Callable[..., Any]) -> None:
    """Replace "module:Class.name" by a function that receives the original before the other arguments."""
    module, _, path = where.partition(":")
    *holders, name = path.split(".")
    home = reduce(getattr, holders, importlib.import_module(module))
    former = getattr(home, name)
    setattr(home, name, lambda *args, **named: wrong(former, *args, **named))


def in_place(where: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Return a function that plants the fault: the function itself, or its installation at `where`."""
    return partial(replace, where, function) if where else function


def planted(found_by: str, where: str = "", **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a fault: the function replaces `where`, or, without `where`, is called."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        PLANTS[function.__name__] = Plant(in_place(where, function), found_by, settings)
        return function

    return keep


@planted("counts: ")
def increments() -> None:
    """Clients report counts since their last message, and servers add them up: repeated messages count twice."""

    def new_since(report_of: Any, session: Any, *arguments: Any) -> Any:
        body = report_of(session, *arguments)
        before = getattr(session, "reported_before", (0, 0))
        session.reported_before = (body.episodes, body.steps)
        return msgspec.structs.replace(body, episodes=body.episodes - before[0], steps=body.steps - before[1])

    def add(report: Any, self: Any, client: bytes, sequence: int, update: Any, now: float, table: int = 0) -> Any:
        old = self.register_guest(client, now, table).report
        added = msgspec.structs.replace(update, episodes=old.episodes + update.episodes, steps=old.steps + update.steps)
        return report(self, client, sequence, added, now, table)

    replace("memoire.client.io:report_of", new_since)
    replace("memoire.accounting.ledger:Ledger.report", add)


@planted("log: ", "memoire.accounting.runs:Logbook.take")
def unnumbered_lines(take: Any, self: Any, client: bytes, lines: Any, through: int, now: float) -> Any:
    """Servers keep every line that arrives, also repeated ones."""
    return take(self, client, lines, 0, now)


@planted("log: ", "memoire.accounting.runs:Logbook.take")
def lost_lines(take: Any, self: Any, client: bytes, lines: Any, through: int, now: float) -> Any:
    """Servers acknowledge several lines, but keep only every other one."""
    return take(self, client, [line for line in lines if line.number % 2] or lines, through, now)


@planted("caches: ", "memoire.net.poller:SendQueue.put")
def doubled_caches(put: Any, self: Any, frames: Any, size: int) -> None:
    for _ in range(2 if len(frames) == 2 and len(frames[1]) else 1):
        put(self, frames, size)


@planted("caches: ", "memoire.replay.batch:Batch.__getitem__")
def torn_samples(get: Any, self: Any, name: str) -> Any:
    """Readers mix the samples of a batch: a field comes from its neighbour."""
    value = get(self, name)
    return value[::-1] if name == "action" else value


@planted("deadlines: ", "memoire.client.client:Client.push_cache")
def late_answers(push: Any, self: Any, timeout: float | None = None) -> bool:
    """Every eighth call of a client takes three seconds longer than its timeout."""
    if self.stats().pushed_caches % 8 == 7:
        time.sleep(3.0)
    return push(self, timeout)


FIRST_MODELS: dict[int, Any] = {}
"""The first model that each handle has seen."""


@planted("models: ", "memoire.client.waiting:ModelHandle.newest")
def older_models(newest: Any, self: Any) -> Any:
    """Clients now and then return an older model instead of a newer one."""
    model = newest(self)
    if model is None:
        return None
    first = FIRST_MODELS.setdefault(id(self), model)
    return first if model.version % 3 == 0 else model


@planted("rollouts: ", "memoire.tables.rollouts.fragments:RolloutQueue.pack_for_learner", storage="rollouts")
def doubled_rollouts(give: Any, self: Any, *arguments: Any) -> Any:
    """Servers hand some fragments out twice."""
    taken = give(self, *arguments)
    if taken and self.counts.taken % 3 == 0:
        self.add(taken[0])
    return taken


# Entries that are lost with a connection or a server are no fault, and would hide the planted fault. A server is only
# stopped, and the server's clients ask again.
CALM = dict.fromkeys(("kills", "terms", "eio", "power", "resets"), 0)


@planted("rollouts: ", storage="rollouts", **CALM, stops=30, slow=30, pause=0.3, rate=2.0)
def forgotten_replies() -> None:
    """Servers answer a repeated request for rollouts with the next ones; those of the first answer are lost."""
    for name in ("find", "keep"):
        replace(f"memoire.server.dispatch:ReplyCache.{name}", lambda *args: None)


def _slow_disk(before: float, after: float) -> None:
    """Delay saving by these seconds, before and after the data are on disk."""

    def slowly(collect: Any, self: Any) -> Any:
        time.sleep(before)
        return collect(self)

    def slow_to_say(saved: Any, self: Any) -> None:
        time.sleep(after)
        saved(self)

    replace("memoire.server.dispatch:Dispatcher.collect", slowly)
    replace("memoire.server.dispatch:Dispatcher.mark_saved", slow_to_say)


@planted("")
def slow_disk() -> None:
    """No fault: the checks must find no violation."""
    _slow_disk(0.2, 0.1)


@planted("log: ")
def early_replies() -> None:
    """Servers answer before the acknowledged data are on disk, and the disk is slow."""
    replace("memoire.accounting.runs:UnsavedChanges.wait", lambda wait, self, key, ticket: ticket())
    _slow_disk(0.5, 0.0)


@planted("copies: ")
def forgotten_accounts() -> None:
    """Servers that start again do not read their accounts."""
    from memoire.accounting.account import FoldedSums

    replace("memoire.accounting.packing:StoredAccounts.find", lambda find, self, client: None)
    replace("memoire.accounting.packing:StoredAccounts.sums", lambda sums, self: FoldedSums())


@planted("log: ")
def forgotten_numbers() -> None:
    """Servers that start again do not read the numbers of their lines."""

    def without_number(find: Any, self: Any, client: bytes) -> Any:
        account = find(self, client)
        if account is not None:
            account.lines_through = 0
        return account

    replace("memoire.accounting.packing:StoredAccounts.find", without_number)
    _slow_disk(0.0, 0.3)


# Faults in sending, answering and accepting messages, which a simulated network exposes all the time.


@planted("")
def never_sent_again() -> None:
    """A request whose answer is lost is not sent again."""

    def once(sent: Any, self: Any, call: Any, now: float) -> None:
        sent(self, call, now)
        call.next_send = math.inf

    replace("memoire.net.channel:PendingRequests.sent", once)
    replace("memoire.net.channel:PendingRequests.resend_lost", lambda lost, self, before, now: None)


@planted("caches: ", "memoire.client.counts:PushWindow.receive_answer")
def added_answers(answered: Any, self: Any, accepted: int, received: int, *args: Any, **named: Any) -> None:
    """A client adds the received bytes of an answer to those of the last answer, instead of taking the greater."""
    before = self.received_bytes
    answered(self, accepted, received, *args, **named)
    self.received_bytes += before if received > before else 0


@planted("counts: ", "memoire.client.io:Connection.deliver_everything")
def early_goodbyes(delivered: Any, self: Any, deadline: float) -> bool:
    """A client that leaves does not wait for the answer to its last report."""
    return True


@planted("counts: ", "memoire.client.counts:RunCounts.enter_run", runs=2)
def runs_that_flow_together(enter: Any, self: Any, run: int) -> None:
    """A client counts the steps of the former run in the new one, too."""
    self.boundary = None


@planted("endings: ", "memoire.client.session:Session.apply_acknowledgement")
def endless_runs(updated: Any, self: Any, answer: Any, *args: Any) -> Any:
    """A client ignores that the run is over."""
    return updated(self, msgspec.structs.replace(answer, finished=False), *args)


@planted("log: ", "memoire.client.session:Session.apply_acknowledgement")
def acknowledged_too_far(updated: Any, self: Any, answer: Any, *args: Any) -> Any:
    """A client takes every answer as an acknowledgement of all its lines, also of later ones."""
    self.outbox.acknowledge(self.outbox.newest)
    return updated(self, answer, *args)


@planted("")
def requests_to_anyone() -> None:
    """A proxy sends a request to any server, not to the request's home."""
    from memoire.proxy.requests import ForwardRequest

    chance = random.Random(7)

    def anyone(route: Any, self: Any, request: Any, header: Any, now: float) -> Any:
        forward = route(self, request, header, now)
        there = [back for back in self._router.backs if not back.is_away]
        return forward if forward is None or not there else ForwardRequest(chance.choice(there), forward.request)

    replace("memoire.proxy.requests:Requests._route", anyone)


@planted("", "memoire.net.channel:PendingRequests.take")
def answers_by_order(take: Any, self: Any, number: int) -> Any:
    """A client takes each answer for that of its oldest request, whatever its number."""
    return take(self, min(self._calls, default=number))


@planted("endings: ", "memoire.client.counts:RunCounts.acknowledge_run", runs=2)
def endless_boundaries(acknowledge: Any, self: Any, boundary: Any, oldest_line: float) -> None:
    """A client never finishes its former run."""


@planted("")
def caches_sent_again() -> None:
    """A client sends its newest cache again when a connection comes back."""

    def remembering(send: Any, self: Any, queue: Any) -> Any:
        self.newest = queue[-1] if queue else getattr(self, "newest", None)
        if getattr(self, "is_again", False) and self.newest is not None:
            queue.append(self.newest)
            self.is_again = False
        return send(self, queue)

    def opened(open_: Any, self: Any, *args: Any) -> Any:
        self.is_again = True
        return open_(self, *args)

    replace("memoire.client.io:DataSockets.send", remembering)
    replace("memoire.client.io:DataSockets.reconnect", opened)


@planted("log: ", "memoire.client.counts:LineOutbox.next_lines")
def lines_out_of_order(waiting: Any, self: Any, *args: Any, **named: Any) -> Any:
    """A client sends its newest lines first."""
    return waiting(self, *args, **named)[::-1]


@planted("feedback: ", "memoire.server.handlers.accounts:FeedbackHandler.fetch")
def feedback_dropped_when_sent(fetch: Any, self: Any, table: Any, account: Any, *args: Any) -> Any:
    """A server drops sent feedback when more waits, though the client may have applied it."""
    waiting = self._waiting.get(account.client)
    if waiting is not None and waiting.sent is not None and waiting.pieces:
        self._lose(self._state.run, account, len(waiting.sent), [])
    return fetch(self, table, account, *args)


@planted("spins: ", "memoire.server.io_requests:RequestThread._stop_reading", terms=12, rate=4.0)
def polls_for_what_it_never_takes(stop: Any, self: Any) -> None:
    """A server that ends polls for requests that it does not take."""
    self._sockets.clear()


# Faults of tables of prompts.


@planted("prompts: ", "memoire.prompts.steps:PromptSteps.find", storage="prompts")
def steps_drawn_anew(find: Any, self: Any, step: int, session: Any) -> Any:
    """A trainer that repeats a step draws other groups, and the first ones are never trained on."""
    return self.enter(session)


@planted("prompts: ", "memoire.prompts.steps:PromptSteps._return_drawn", storage="prompts")
def rewinds_that_commit(take_back: Any, self: Any, rows: Any) -> None:
    """A trainer that returns to a checkpoint does not get its later draws again."""


# Faults that were real once: each plant removes the fix.


@planted("endings: ", "memoire.reader.admin:ClusterOrders.finish", seconds=20, kills=8, cuts=6, pause=0.5)
def ends_of_those_that_are_there(finish: Any, self: Any, timeout: float) -> None:
    """A learner that ends a run does not wait for servers that are away."""
    from memoire.wire import messages

    def bodies() -> dict[str, Any]:
        return {server.name: messages.Control(finish=True) for server in self._directory.present_servers}

    self._gather(bodies, lambda answer: None, self._monitor.now() + timeout, None)


@planted("endings: ", "memoire.replay.files:_is_ours", power=8)
def locks_that_have_to_be_whole(is_ours: Any, content: bytes) -> bool:
    """A server refuses the lock of a folder that a power failure has torn."""
    return not content or content.endswith(b"}")


@planted("spins: ", "memoire.rl.observer:ObserverThread._next_time", storage="jobs")
def leases_renewed_with_nobody(next_time: Any, self: Any) -> float:
    """An observer whose agent is away tries without a pause to renew the lease of its job."""
    for job in self._held:
        if math.isinf(job.renew_at):
            job.renew_at = time.monotonic() - 1.0
    return next_time(self)
