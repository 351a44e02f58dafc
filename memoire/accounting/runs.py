r"""The runs of one server: the one that is counted now, and former ones, which stay readable.

Totals, log lines and models belong to a run; parameters and the schema belong to the server. A client that still speaks
of a former run is counted there until it has heard of the new one, so that a new run loses nothing of the old.

Log lines of all clients are numbered by their sender, taken once, and written in the documented form. A line of the
file is `'%s,%08x,%s\n' % (time, uuid, message)`: the time when the server received it (ISO 8601 with offset), the
sender's 32-bit label, and the message on one line.

What a server had saved comes back through `StateStore`; a former run is read from there when first asked for.

What a server has to save: everything that changed since the last group was taken, and the replies that wait for it.

Pure: no file, no thread. The server marks what changes, a writer takes it all as one `SavedGroup`, saves it in one
transaction and says so; then the replies of the group may go. While one group is being saved the next one gathers, so
that three hundred clients cost one sync of the disk and not three hundred.

    server    touch(account) lines(...) wait(reply)  touch(account) wait(reply)
    writer    take() ────── saves ───────▶ done: replies leave  take() ────── saves ──────▶ done
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from sys import getsizeof
from typing import Annotated, Any, Protocol

import msgspec

from memoire.errors import escape
from memoire.figures import adding, gauge
from memoire.models.model import Model
from memoire.wire.byte_budget import ByteHolder
from memoire.wire.frames import name_hash
from memoire.wire.messages import Line

from .account import Account
from .ledger import RECENT_LINE_BYTES, Ledger
from .merge import PAGE_ROWS, Rows, key_of, merge, page, row_of, rows_of
from .packing import KeptAccounts, MemoryAccounts

ENTRY_BYTES = 256
"""Of a line in memory, beside its text."""
MAX_FOUND_LINES = 10_000
"""Lines that one search finds at most."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line that was taken: `index` counts all lines of this book from 1."""

    index: int
    client: bytes
    received: float
    line: Line

    @property
    def escaped(self) -> LogEntry:
        """The same with its text on one line, as the log file has it."""
        return replace(self, line=msgspec.structs.replace(self.line, text=escape(self.line.text)))


def timestamp(seconds: float) -> str:
    """ISO 8601 with microseconds and offset, in UTC: ``2026-01-31T12:00:00.000000+00:00``; it has no comma."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def format_line(received: float, uuid: int, text: str, name: str = "") -> str:
    """The line of the log file, with its line break. `name` is that of the client, in place of its label."""
    return f"{timestamp(received)},{escape(name) or f'{uuid & 0xFFFFFFFF:08x}'},{escape(text)}\n"


_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFilter:
    """Which lines are asked for: those that fulfil all of it."""

    text: str = ""
    """Somewhere in the line as it is written; letters A to Z in either case."""
    client: bytes | None = None
    """Id of the sender."""
    label: int | None = None
    """The sender's 32-bit uuid."""
    since: float | None = None
    """Received at this time or later, in seconds since 1970."""
    until: float | None = None
    """Received before this time."""
    after: int = 0
    """With a higher index."""
    before: int | None = None
    """With a lower index."""

    def is_met_by(self, entry: LogEntry) -> bool:
        """Whether this line is one of them."""
        return (
            entry.index > self.after
            and (self.before is None or entry.index < self.before)
            and (self.client is None or entry.client == self.client)
            and (self.label is None or entry.line.label == self.label)
            and (self.since is None or entry.received >= self.since)
            and (self.until is None or entry.received < self.until)
            and escape(self.text).translate(_LOWER) in escape(entry.line.text).translate(_LOWER)
        )


def _bytes_of(entry: LogEntry) -> int:
    return ENTRY_BYTES + getsizeof(entry.line.text)


class Logbook:
    """The lines of one run that were taken, numbered, and the newest of them. Older ones are in the files, if there are
    any; their numbers show that they were there. Not thread-safe: the owner locks.

    Up to which number a client's lines were taken is in its account (`ledger.Account.lines_through`).

    Args:
        keep: The newest lines that are kept.
        room: Counts what they take, which is no more than it has of its own; None is `RECENT_LINE_BYTES`.
    """

    def __init__(self, *, keep: int = 2000, room: ByteHolder | None = None) -> None:
        self._recent: deque[LogEntry] = deque()
        self._keep, self._room = keep, room
        self._most = RECENT_LINE_BYTES if room is None else room.own
        self._bytes = 0
        self.count = 0
        """Lines taken in all."""

    def take(self, client: bytes, lines: Iterable[Line], through: int, now: float) -> list[LogEntry]:
        """The lines of a client that are numbered above `through`, in order; those of one message ascend."""
        taken = []
        for line in lines:
            if line.number > through:
                through = line.number
                self.count += 1
                taken.append(LogEntry(self.count, client, now, line))
        if taken:
            self._extend(taken)
        return taken

    def _extend(self, entries: Iterable[LogEntry]) -> None:
        """Keep these lines, too, and the newest of all, as many as may be."""
        before = self._bytes
        for entry in entries:
            self._recent.append(entry)
            self._bytes += _bytes_of(entry)
            while len(self._recent) > self._keep or (self._bytes > self._most and len(self._recent) > 1):
                self._bytes -= _bytes_of(self._recent.popleft())
        if self._room is not None:
            self._room.add(self._bytes - before)

    def clear(self) -> None:
        """Keep no lines in memory any more."""
        self._recent.clear()
        if self._room is not None:
            self._room.add(-self._bytes)
        self._bytes = 0

    def restore(self, count: int, recent: Iterable[LogEntry]) -> None:
        """Go on where a saved book ended; this one is new and empty."""
        self.count = count
        self._extend(recent)

    def recent(self, after: int = 0, most: int = 1000) -> list[LogEntry]:
        """The newest lines still kept with an index above `after`, oldest first, at most `most` of them."""
        return [entry for entry in self._recent if entry.index > after][-most:]


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
    rows: dict[str, list[tuple[int, bytes, bytes | None]]] = field(default_factory=dict)
    """Rows of tables that save each change, by the table's name: kind, key and body; None takes it out."""
    tickets: list[Ticket] = field(default_factory=list)
    """Replies that wait until this group is on disk; nothing for a store to save."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to save; there may be tickets."""
        return not any(getattr(self, name) for name in self.__slots__ if name != "tickets")


class UnsavedChanges:
    """What changed since the last group was taken. Runs go by their names. Not thread-safe: the owner locks.

    Args:
        is_durable: Whether anything is ever saved; else nothing is kept here.
    """

    def __init__(self, is_durable: bool = True) -> None:
        self.is_durable = is_durable
        """Whether what is acknowledged is on disk."""
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
        if self.is_durable:
            self._accounts[run, account.client] = account

    def add_lines(self, run: str, entries: Sequence[LogEntry]) -> None:
        """Lines were taken."""
        if self.is_durable:
            self._lines.append((run, entries))

    def add_run(self, facts: RunFacts) -> None:
        """A run began, or changed."""
        if self.is_durable:
            self._runs[facts.name] = facts

    def add_model(self, run: str, model: Model) -> None:
        """A model is new; of each topic the newest is saved."""
        if self.is_durable:
            self._models[run, model.topic] = model

    def add_inherited(self, run: str, rows: Rows) -> None:
        """Accounts of other servers are kept here from now on: [C] rows of `rows.ACCOUNT`."""
        if self.is_durable:
            self._inherited.append((run, rows.tobytes()))

    def add_setting(self, name: str, text: str) -> None:
        """The server wants to find this text again."""
        if self.is_durable:
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

    def is_run_saved(self, run: str) -> bool:
        """Whether nothing of this run waits, or is being saved just now."""
        pairs = (*self._accounts, *self._saving, *self._models, *self._lines, *self._inherited)
        return run not in (*(name for name, _ in pairs), *self._runs, *self._others)

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing to take."""
        changes = self._accounts, self._lines, self._runs, self._models, self._inherited, self._settings
        return not any((*changes, self._after, self._waiting))

    @property
    def tickets(self) -> list[Ticket]:
        """What waits for the next group."""
        return [*self._after, *self._waiting.values()]

    def take(self) -> SavedGroup | None:
        """All that changed, and what waits for it, as one group; None when there is nothing.

        It is being saved from now on, until `settle` is called.
        """
        if self.is_clean:
            return None
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

    def settle(self) -> None:
        """The group taken last is on disk."""
        self._saving, self._others = set(), set()


@dataclass(frozen=True, slots=True)
class FolderStats:
    """What a state folder takes, in bytes."""

    # fmt: off
    bytes: Annotated[int, gauge("state_bytes", "State folder", "Bytes of the files in the state folder.")]
    free_bytes: Annotated[int, gauge("state_disk_free_bytes", "Free", "Bytes that the disk of the state folder has "
        "left for this process.", adds="min")]
    disk_bytes: Annotated[int, gauge("state_disk_bytes", "Disk", "Size of the disk of the state folder.", adds="min")]
    trouble: Annotated[str, adding("any")]
    """What is wrong with the disk now; empty when nothing is."""
    # fmt: on


RECENT_LINES = 1000
"""Newest lines of a run that are shown again after a restart."""


class StateStore(Protocol):
    """What a server saved in its former lives, and a thread that saves one group after the other. Runs go by names."""

    @property
    def epoch(self) -> int:
        """Greater than in every former life."""

    @property
    def since(self) -> int:
        """The epoch since which nothing was forgotten: that of the first life, or of the one after a backup was put
        back.
        """

    def runs(self) -> Sequence[RunFacts]:
        """All that there were, in the order in which they began."""

    def accounts(self, run: str) -> KeptAccounts:
        """Its clients' accounts, and those of other servers that were kept here."""

    def line_count(self, run: str) -> int:
        """Lines taken in all."""

    def search(self, run: str, wanted: LineFilter, *, most: int, newest_first: bool = False) -> Sequence[LogEntry]:
        """Lines of the run, at most so many of those wanted."""

    def models(self, run: str) -> Iterable[Model]:
        """The newest of each topic."""

    def versions(self) -> Mapping[str, int]:
        """The highest version of each topic, over all runs."""

    def settings(self) -> Mapping[str, str]:
        """The small texts that the server wanted to find again."""

    @property
    def name(self) -> str:
        """Of the server whose folder it is."""

    @property
    def folder(self) -> Path:
        """Where its files are."""

    @property
    def restored(self) -> int:
        """How often a backup was put back into the folder."""

    @property
    def missing(self) -> list[str]:
        """Sentences, each of which names what was missing or damaged at the start. A server may add to them."""

    def start(
        self,
        collect: Callable[[], SavedGroup | None],
        done: Callable[[SavedGroup], None],
        failed: Callable[[Exception], None],
        delayed: Callable[[], None],
    ) -> None:
        """Begin to save. The four are called on the thread: for what is to be saved, when it is on disk, once when
        nothing can be saved any more, ever, and each time when saving has to wait until the disk has room again.
        """

    def rows(self, table: str) -> Iterator[tuple[int, bytes, bytes | None]]:
        """What a table has saved as it happened: kind, key and body of each row."""

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
    """One run as it is counted here; the dispatcher's lock guards it."""

    name: str
    began: float
    kept: KeptAccounts
    """Accounts that are not in memory, and those that servers which were drained have brought here."""
    ledger: Ledger
    ended: float = 0.0
    """When another run began; 0 while this one is counted."""
    finished: bool = False
    logbook: Logbook = field(default_factory=Logbook)
    is_used: bool = True
    """Whether somebody has asked for it since it was looked at last; see `Runs.rest`."""
    inherited: int = 0
    """How often accounts of other servers came here, since this process began."""
    number: int = field(init=False)
    """What headers say for it."""

    def __post_init__(self) -> None:
        self.number = name_hash(self.name)

    @property
    def facts(self) -> RunFacts:
        """What is saved of it beside its accounts and lines."""
        return RunFacts(self.name, self.finished, self.began, self.ended)

    def live(self, home: int) -> Rows:
        """Rows of the accounts that are in memory now, in order."""
        return merge(rows_of(row_of(account, home) for account in self.ledger))

    def pages(self, live: Rows) -> Iterator[Rows]:
        """Every account that is here, in pages that follow each other; see `page`."""
        after, more = b"", True
        while more:
            rows, more = self.page(live, after)
            yield rows
            after = key_of(rows[-1:]) if len(rows) else b""

    def inherit(self, rows: Rows) -> None:
        """Keep accounts of other servers, as `accounts.merge` gives them."""
        self.kept.inherit(rows)
        self.inherited += 1

    def page(self, live: Rows, after: bytes, most: int = PAGE_ROWS) -> tuple[Rows, bool]:
        """A page of every account that is here, and whether there are more.

        Args:
            live: Rows of the accounts that were in memory when the first page was read, in order.
            after: Key of the last row of the page before.
        """
        mine, has_more = page(live, after, most)
        rows = merge(mine, self.kept.rows(after, most + 1))
        return rows[:most], has_more or len(rows) > most


class Runs:
    """All runs of a server. Not thread-safe: the owner locks.

    Args:
        name: Of the run that is counted.
        past: Where former ones are read from.
        epoch: Of the server as it runs now.
        home: `identity.name_hash` of the server's name.
        may_open, forget, room: See `Ledger`.
        line_room: See `Logbook`.
    """

    def __init__(
        self,
        name: str,
        now: float,
        past: StateStore | None = None,
        *,
        epoch: int = 0,
        home: int = 0,
        may_open: Callable[[str, float], bool] = lambda owner, now: True,
        forget: Callable[[bytes], None] = lambda client: None,
        room: ByteHolder | None = None,
        line_room: ByteHolder | None = None,
    ) -> None:
        self._room, self._line_room = room, line_room
        self._past, self._epoch, self._home = past, epoch, home
        self._may_open, self._forget = may_open, forget
        known = past.runs() if past else ()
        self._saved = {
            facts.name: facts if facts.ended or facts.name == name else replace(facts, ended=now) for facts in known
        }
        self._numbers = {name_hash(saved): saved for saved in self._saved}
        self._order = list(self._saved)
        self._open: dict[str, Run] = {}
        self.current = self._enter(name, now)

    def __iter__(self) -> Iterator[Run]:
        """Those that are in memory."""
        return iter(list(self._open.values()))

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
        run = self._open.get(name)
        if run is not None:
            run.is_used = True
        return run

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
        run = self._open[name] = self._make(RunFacts(name, finished, now, now))
        self._numbers[run.number] = name
        return run

    def rest(self, is_saved: Callable[[Run], bool]) -> None:
        """Let former runs leave memory that nobody has asked for since the last call, and that are all on disk."""
        if self._past is None:
            return
        for run in self:
            if run is not self.current and not run.is_used and not len(run.ledger) and is_saved(run):
                del self._open[run.name]
                run.logbook.clear()
                self._saved[run.name] = run.facts
            run.is_used = False

    def _enter(self, name: str, now: float) -> Run:
        run = self.named(name)
        if run is None:
            run = self._open[name] = self._make(RunFacts(name, began=now))
            self._numbers[run.number] = name
        run.ended = 0.0
        self._order = [known for known in self._order if known != name] + [name]
        return run

    def _make(self, facts: RunFacts) -> Run:
        kept = MemoryAccounts(self._home) if self._past is None else self._past.accounts(facts.name)
        since = 0 if self._past is None else self._past.since
        may: dict[str, Any] = {"may_open": self._may_open, "forget": self._forget, "room": self._room}
        ledger = Ledger(epoch=self._epoch, since=since, store=kept, **may)
        return Run(facts.name, facts.began, kept, ledger, facts.ended, facts.finished, Logbook(room=self._line_room))

    def _read(self, facts: RunFacts) -> Run:
        assert self._past is not None
        run = self._make(facts)
        newest = self._past.search(facts.name, LineFilter(), most=RECENT_LINES, newest_first=True)
        run.logbook.restore(self._past.line_count(facts.name), reversed(newest))
        return run

    def facts(self) -> list[RunFacts]:
        """All runs, the one that began last at the end."""
        return [self._open[name].facts if name in self._open else self._saved[name] for name in self._order]
