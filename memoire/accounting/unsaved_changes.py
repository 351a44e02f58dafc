"""What a server has to save: everything that changed since the last group was taken, and the replies that wait for it.

Pure: no file, no thread. The server marks what changes, a writer takes it all as one `SavedGroup`, saves it in one
transaction and says so; then the replies of the group may go. While one group is being saved the next one gathers, so
that three hundred clients cost one sync of the disk and not three hundred.

    server    touch(account) lines(...) wait(reply)  touch(account) wait(reply)
    writer    take() ────── saves ───────▶ done: replies leave  take() ────── saves ──────▶ done
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from memoire.models.model import Model

from .account import Account
from .logbook import LogEntry

MAX_WAITING = 1 << 16
"""Replies that wait for the disk at most; beyond, the oldest are given up, and counted: their clients ask again."""


Ticket = Callable[[], None]
"""What is to be done once a group is saved: a reply that leaves, a notice, lines for a file."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run of a server."""

    name: str
    finished: bool = False
    began: float = 0.0
    """Seconds since 1970."""
    ended: float = 0.0
    """When another run began; 0 while it is the one that is counted."""


@dataclass(slots=True)
class SavedGroup:
    """What one transaction saves; nobody changes what is in it any more. Runs go by their names."""

    accounts: list[tuple[str, Account]] = field(default_factory=list)
    """Copies: each replaces what is stored for this run and client."""
    lines: list[tuple[str, LogEntry]] = field(default_factory=list)
    """New log lines in the order in which they were taken; `index` counts within the run."""
    runs: list[RunFacts] = field(default_factory=list)
    """Each replaces what is stored under its name."""
    models: list[tuple[str, Model]] = field(default_factory=list)
    """At most one of each run and topic, newer than the one stored."""
    inherited: list[tuple[str, bytes]] = field(default_factory=list)
    """Rows of `rows.ACCOUNT`, packed: each replaces what is stored for its run, client and home."""
    settings: dict[str, str] = field(default_factory=dict)
    """Small texts by name, that the server wants to find again."""
    prompts: dict[str, list[tuple[int, bytes, bytes | None]]] = field(default_factory=dict)
    """Changes of tables of prompts, by the table's name: kind, key and body; None takes it out."""
    tickets: list[Ticket] = field(default_factory=list)
    """Replies that wait until this group is on disk; nothing for a store to save."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to save; there may be tickets."""
        return not (
            self.accounts or self.lines or self.runs or self.models or self.inherited or self.settings or self.prompts
        )


class UnsavedChanges:
    """What changed since the last group was taken. Not thread-safe: the owner locks."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, bytes], Account] = {}
        self._saving: set[tuple[str, bytes]] = set()
        self._others: set[str] = set()  # runs of which anything else is being saved
        self._lines: list[tuple[str, Sequence[LogEntry]]] = []
        self._runs: dict[str, RunFacts] = {}
        self._models: dict[tuple[str, str], Model] = {}
        self._inherited: list[tuple[str, bytes]] = []
        self._settings: dict[str, str] = {}
        self._after: list[Ticket] = []
        self._waiting: OrderedDict[Hashable, Ticket] = OrderedDict()
        self.given_up = 0
        """Replies that were dropped because too many waited."""

    def touch(self, run: str, account: Account) -> None:
        """The account has changed."""
        self._accounts[run, account.client] = account

    def lines(self, run: str, entries: Sequence[LogEntry]) -> None:
        """Lines were taken."""
        self._lines.append((run, entries))

    def run(self, facts: RunFacts) -> None:
        """A run began, or changed."""
        self._runs[facts.name] = facts

    def model(self, run: str, model: Model) -> None:
        """A model is new; of each topic the newest is saved."""
        self._models[run, model.topic] = model

    def inherit(self, run: str, rows: bytes) -> None:
        """Rows of another server's ledger are kept here from now on."""
        self._inherited.append((run, rows))

    def setting(self, name: str, text: str) -> None:
        """The server wants to find this again."""
        self._settings[name] = text

    def after(self, ticket: Ticket) -> None:
        """To be done when everything up to now is saved."""
        self._after.append(ticket)

    def wait(self, key: Hashable, ticket: Ticket) -> None:
        """The same for a reply, which may be given up: a later one under the same key replaces it."""
        self._waiting.pop(key, None)
        self._waiting[key] = ticket
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
            self.given_up += 1

    def is_saved(self, run: str, client: bytes) -> bool:
        """Whether nothing of this account waits, or is being saved just now."""
        return (run, client) not in self._accounts and (run, client) not in self._saving

    def has(self, run: str) -> bool:
        """Whether anything of this run waits, or is being saved just now."""
        waiting = (
            *(name for name, _ in (*self._accounts, *self._saving, *self._models)),
            *(name for name, _ in (*self._lines, *self._inherited)),
            *self._runs,
            *self._others,
        )
        return run in waiting

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing to take."""
        return not (self._has_changes or self._after or self._waiting)

    @property
    def _has_changes(self) -> bool:
        return bool(self._accounts or self._lines or self._runs or self._models or self._inherited or self._settings)

    @property
    def tickets(self) -> list[Ticket]:
        """What waits for the next group."""
        return [*self._after, *self._waiting.values()]

    def take(self) -> SavedGroup | None:
        """All that changed, and what waits for it, as one group; None when there is nothing.

        It is being saved from now on, until `saved` is called.
        """
        if self.is_clean:
            return None
        if not self._has_changes:
            group = SavedGroup(tickets=self.tickets)
            self._saving, self._others, self._after, self._waiting = set(), set(), [], OrderedDict()
            return group
        group = SavedGroup(
            accounts=[(run, account.copy()) for (run, _), account in self._accounts.items()],
            lines=[(run, entry) for run, entries in self._lines for entry in entries],
            runs=list(self._runs.values()),
            models=[(run, model) for (run, _), model in self._models.items()],
            inherited=self._inherited,
            settings=self._settings,
            tickets=self.tickets,
        )
        self._saving = set(self._accounts)
        self._others = {run for run, _ in (*self._lines, *self._models, *self._inherited)} | self._runs.keys()
        self._accounts, self._lines, self._runs, self._models, self._inherited = {}, [], {}, {}, []
        self._settings, self._after, self._waiting = {}, [], OrderedDict()
        return group

    def saved(self) -> None:
        """The group taken last is on disk."""
        self._saving, self._others = set(), set()
