"""The runs of one server: the one that is counted now, and former ones, which stay readable.

Totals, log lines and models belong to a run; parameters and the schema belong to the server. A client that still speaks
of a former run is counted there until it has heard of the new one, so that a new run loses nothing of the old.

What a server had saved comes back through `Past`; a former run is read from there when somebody first asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from . import wire
from .accounts import Rows, merge
from .journal import Group, RunFacts
from .ledger import Account, Ledger
from .logbook import Entry, Logbook, Wanted
from .models import Model

RECENT_LINES = 1000
"""Newest lines of a run that are shown again after a restart."""


class Past(Protocol):
    """What a server saved in its former lives: a store, opened. Runs go by their names."""

    @property
    def epoch(self) -> int:
        """Greater than in every former life."""

    def runs(self) -> Sequence[RunFacts]:
        """All that there were, in the order in which they began."""

    def accounts(self, run: str) -> Iterable[Account]:
        """Its clients' accounts."""

    def lines_through(self, run: str) -> Mapping[bytes, int]:
        """Number of the newest line of each client."""

    def line_count(self, run: str) -> int:
        """Lines taken in all."""

    def search(self, run: str, wanted: Wanted, *, most: int, newest_first: bool = False) -> Sequence[Entry]:
        """Lines of the run, at most so many of those wanted."""

    def models(self, run: str) -> Iterable[Model]:
        """The newest of each topic."""

    def inherited(self, run: str) -> bytes:
        """Rows of other servers' ledgers that were kept here: `wire.ACCOUNT`, packed."""

    def settings(self) -> Mapping[str, str]:
        """The small texts that the server wanted to find again."""


@dataclass(frozen=True, slots=True)
class FolderStats:
    """What a state folder takes, in bytes."""

    bytes: int
    """Of its files."""
    free_bytes: int
    """That its disk has left for this process."""
    disk_bytes: int
    trouble: str
    """What is wrong with the disk now; empty when nothing is."""


class Keeper(Past, Protocol):
    """A store as a server uses it: what it reads at the start, and a thread that saves one group after the other."""

    @property
    def name(self) -> str:
        """Of the server whose folder it is."""

    @property
    def folder(self) -> Path:
        """Where its files are."""

    @property
    def restored(self) -> int:
        """How often a backup was put back into the folder."""

    def start(
        self,
        collect: Callable[[], Group | None],
        done: Callable[[Group], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Begin to save. The three are called on the thread: for what is to be saved, when it is on disk, and once when
        nothing can be saved any more, ever.
        """

    @property
    def trouble(self) -> str:
        """What is wrong with the disk now, for people; empty when nothing is."""

    @property
    def is_healthy(self) -> bool:
        """Whether what is given to it is saved without delay."""

    def space(self) -> FolderStats:
        """What the folder takes, and what is left."""

    def wake(self) -> None:
        """Somebody waits for what changed. What nobody waits for is collected within 0.2 s."""

    def close(self, timeout: float) -> bool:
        """Save what is left, and let go of the folder; False when not all of it could be saved in time."""


@dataclass(slots=True)
class Run:
    """One run as it is counted here; the desk's lock guards it."""

    name: str
    began: float
    ended: float = 0.0
    """When another run began; 0 while this one is counted."""
    finished: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    logbook: Logbook = field(default_factory=Logbook)
    inherited: Rows = field(default_factory=merge)
    """Accounts that servers which were drained have brought here."""
    number: int = field(init=False)
    """What headers say for it."""

    def __post_init__(self) -> None:
        self.number = wire.name_hash(self.name)

    @property
    def facts(self) -> RunFacts:
        """What is saved of it beside its accounts and lines."""
        return RunFacts(self.name, self.finished, self.began, self.ended)


class Runs:
    """All runs of a server. Not thread-safe: the owner locks.

    Args:
        name: Of the run that is counted.
        past: Where former ones are read from.
        epoch: Of the server as it runs now.
    """

    def __init__(self, name: str, now: float, past: Past | None = None, *, epoch: int = 0) -> None:
        self._past, self._epoch = past, epoch
        known = past.runs() if past else ()
        self._saved = {
            facts.name: facts if facts.ended or facts.name == name else replace(facts, ended=now) for facts in known
        }
        self._numbers = {wire.name_hash(saved): saved for saved in self._saved}
        self._order = list(self._saved)
        self._open: dict[str, Run] = {}
        self.current = self._enter(name, now)

    def find(self, number: int) -> Run | None:
        """The run of this number; None where there never was one here."""
        if number in (0, self.current.number):
            return self.current
        name = self._numbers.get(number)
        return None if name is None else self.named(name)

    def named(self, name: str) -> Run | None:
        """The run of this name; None where there never was one here."""
        if name not in self._open and name in self._saved:
            self._open[name] = self._read(self._saved[name])
        return self._open.get(name)

    def begin(self, name: str, now: float) -> Run:
        """Count this run from now on: a new one, or one that goes on; returns the run that was counted before."""
        former = self.current
        if name != former.name:
            former.ended = now
            self.current = self._enter(name, now)
        return former

    def keep(self, name: str, finished: bool, now: float) -> Run:
        """A run that was counted at another server, and is kept here as a former one."""
        self._order.insert(0, name)
        run = self._open[name] = Run(name, now, now, finished, Ledger(epoch=self._epoch))
        self._numbers[run.number] = name
        return run

    def _enter(self, name: str, now: float) -> Run:
        run = self.named(name)
        if run is None:
            run = self._open[name] = Run(name, now, ledger=Ledger(epoch=self._epoch))
            self._numbers[run.number] = name
        run.ended = 0.0
        self._order = [known for known in self._order if known != name] + [name]
        return run

    def _read(self, facts: RunFacts) -> Run:
        assert self._past is not None
        name = facts.name
        run = Run(name, facts.began, facts.ended, facts.finished, Ledger(epoch=self._epoch))
        for account in self._past.accounts(name):
            run.ledger.restore(account)
        run.inherited = merge(np.frombuffer(self._past.inherited(name), wire.ACCOUNT))
        newest = self._past.search(name, Wanted(), most=RECENT_LINES, newest_first=True)
        run.logbook.restore(self._past.lines_through(name), self._past.line_count(name), reversed(newest))
        return run

    def facts(self) -> list[RunFacts]:
        """All runs, the one that began last at the end."""
        return [self._open[name].facts if name in self._open else self._saved[name] for name in self._order]
