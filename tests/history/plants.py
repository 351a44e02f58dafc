"""Faults to plant: each replaces a piece of the product by a wrong one, in every process of a trial.

The environment variable HISTORY_PLANT names one; only the wrappers in this folder read it. A check that has never
failed proves nothing: each of these must make one fail, the one that is named with it.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

VARIABLE = "HISTORY_PLANT"
SHORT = {"servers": 1, "actors": 1, "seconds": 3.0, "rate": 20.0, "seed": 3, "pace": 2.0, "kills": 0, "stops": 3}
"""A trial that is long enough to find most of them."""


@dataclass(frozen=True)
class Plant:
    """A fault, and how it is found."""

    apply: Callable[[], None]
    found_by: str
    """Beginning of the violation."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of a short trial in which it is found."""


PLANTS: dict[str, Plant] = {}


def replace(where: Any, name: str, what: Any) -> Any:
    """Put something in the place of a part of the product; returns what was there."""
    former = getattr(where, name)
    setattr(where, name, what)
    return former


def plant() -> None:
    """Plant what the environment names; nothing by default."""
    name = os.environ.get(VARIABLE, "")
    if name:
        PLANTS[name].apply()


def planted(found_by: str, **settings: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def keep(function: Callable[[], None]) -> Callable[[], None]:
        PLANTS[function.__name__] = Plant(function, found_by, {**SHORT, "spared": ("actor",), **settings})
        return function

    return keep


@planted("counts: ")
def increments() -> None:
    """Clients report what is new since their last message, and servers add it up: what is sent again counts again."""
    import msgspec

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
    from memoire.accounting.logbook import Logbook

    take = Logbook.take

    def wrong(self: Any, client: bytes, lines: Any, through: int, now: float) -> Any:
        return take(self, client, *change(list(lines), through), now)

    Logbook.take = wrong  # type: ignore[method-assign]


@planted("log: ")
def unnumbered_lines() -> None:
    """Servers take every line that comes, also one that they have."""

    _take_with(lambda lines, through: (lines, 0))


@planted("log: ", stops=0)
def lost_lines() -> None:
    """Servers acknowledge every other line without keeping it, where they get several."""

    _take_with(lambda lines, through: ([line for line in lines if line.number % 2] or lines, through))


@planted("caches: ", stops=0)
def doubled_caches() -> None:
    """Proxies send each cache twice."""
    from memoire.net.poller import SendQueue

    put = SendQueue.put

    def twice(self: Any, frames: Any, size: int) -> None:
        put(self, frames, size)
        if len(frames) == 2 and len(frames[1]):
            put(self, frames, size)

    SendQueue.put = twice  # type: ignore[method-assign]


@planted("caches: ", stops=0)
def torn_samples() -> None:
    """Readers mix the samples of a batch: a field comes from its neighbour."""
    from memoire.replay.batch import Batch

    get = Batch.__getitem__

    def shifted(self: Any, name: str) -> Any:
        value = get(self, name)
        return value[::-1] if name == "action" else value

    Batch.__getitem__ = shifted  # type: ignore[method-assign]


@planted("deadlines: ", stops=0)
def late_answers() -> None:
    """A call of a client takes three seconds longer than it was given, now and then."""
    from memoire.client.client import Client

    push = Client.push_cache

    def late(self: Any, timeout: float | None = None) -> bool:
        if self.stats().pushed_caches % 8 == 7:
            time.sleep(3.0)
        return push(self, timeout)

    Client.push_cache = late  # type: ignore[method-assign]


@planted("models: ", stops=0)
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


@planted("rollouts: ", storage="rollouts", stops=0)
def doubled_rollouts() -> None:
    """Servers hand some fragments out twice."""
    from memoire.tables.rollouts.queue import RolloutQueue

    give = RolloutQueue.give

    def again(self: Any, *arguments: Any) -> Any:
        taken = give(self, *arguments)
        if taken and self.counts.taken % 3 == 0:
            self.add(taken[0])
        return taken

    RolloutQueue.give = again  # type: ignore[method-assign]


@planted("rollouts: ", storage="rollouts", seconds=6.0, stops=6)
def forgotten_replies() -> None:
    """Servers that are asked a second time for rollouts hand out the next ones: those of the first answer are lost."""
    from memoire.server.dispatch import GivenReplies

    GivenReplies.find = lambda self, header, now: None  # type: ignore[method-assign]
    GivenReplies.keep = lambda self, header, reply: None  # type: ignore[method-assign]


# What follows is about state folders: servers are killed.

KILLED = {"kills": 5, "stops": 0, "seconds": 6.0, "spared": ("proxy",), "pace": 4.0, "actors": 2}


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


@planted("", **KILLED)
def slow_disk() -> None:
    """No fault: nothing may be found."""
    _slow_disk(0.2, 0.1)


@planted("log: ", **{**KILLED, "kills": 3, "seconds": 4.0, "spared": ("proxy", "actor"), "actors": 1})
def early_replies() -> None:
    """Servers answer before what they answer for is on disk, and the disk is slow."""
    from memoire.accounting.runs import UnsavedChanges

    def at_once(self: Any, key: Any, ticket: Callable[[], None]) -> None:
        ticket()

    UnsavedChanges.wait = at_once  # type: ignore[method-assign]
    _slow_disk(0.5, 0.0)


@planted("copies: ", **KILLED)
def forgotten_accounts() -> None:
    """Servers that start again do not read what they had counted."""
    from memoire.accounting.account import FoldedSums
    from memoire.accounting.packing import StoredAccounts

    StoredAccounts.find = lambda self, client: None  # type: ignore[method-assign]
    StoredAccounts.sums = lambda self: FoldedSums()  # type: ignore[method-assign]


@planted("log: ", **KILLED)
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
