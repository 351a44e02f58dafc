r"""Runs of one server: the current run, and former runs, which stay readable.

Totals, log lines and models belong to a run; parameters and the schema belong to the server. Reports of a client count
for the former run until the client knows the new run, so that no count of the former run is lost.

Each client numbers its log lines, and the server stores each line once. A line of the log file is
`'%s,%08x,%s\n' % (time, uuid, message)`: the time at which the server received it (ISO 8601 with offset), the client's
32-bit label, and the message on one line.

A server restores its saved state from a `StateStore`; a former run is read at the first access.

Unsaved changes: all changes since the last group was taken, and the replies that wait until they are saved.

Pure: no file, no thread. The server marks changes; a writer takes them as one `SavedGroup`, saves the group in one
transaction and reports it; then the replies of the group are sent. While one group is being saved the next one gathers,
so that three hundred clients cost one sync of the disk and not three hundred.

    server    touch(account) lines(...) wait(reply)  touch(account) wait(reply)
    writer    take() ────── saves ───────▶ done: send replies   take() ────── saves ──────▶ done
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
"""Bytes of memory for a log line, without its text."""
MAX_FOUND_LINES = 10_000
"""Most lines that one search returns."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Log line that the server stored; `index` counts all lines of the logbook from 1."""

    index: int
    client: bytes
    received: float
    line: Line

    @property
    def escaped(self) -> LogEntry:
        """Entry with its text escaped to one line, as in the log file."""
        return replace(self, line=msgspec.structs.replace(self.line, text=escape(self.line.text)))


def timestamp(seconds: float) -> str:
    """Return a time in ISO 8601 with microseconds, in UTC, without a comma: ``2026-01-31T12:00:00.000000+00:00``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def format_line(received: float, uuid: int, text: str, name: str = "") -> str:
    """Return the line of the log file, with its line break. The client's `name` takes the place of its label."""
    return f"{timestamp(received)},{escape(name) or f'{uuid & 0xFFFFFFFF:08x}'},{escape(text)}\n"


_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFilter:
    """Filter of log lines: a line has to meet all conditions that are set."""

    text: str = ""
    """Text that the escaped line contains; letters A to Z in either case."""
    client: bytes | None = None
    """Id of the client that sent the line."""
    label: int | None = None
    """32-bit uuid of the line."""
    since: float | None = None
    """Earliest time of receipt, in seconds since 1970."""
    until: float | None = None
    """Time before which the line was received, in seconds since 1970."""
    after: int = 0
    """Index that the line's index exceeds."""
    before: int | None = None
    """Index that the line's index is below."""

    def is_met_by(self, entry: LogEntry) -> bool:
        """Return True if a line meets all conditions."""
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
    """Numbered log lines of one run, with the newest ones in memory. Not thread-safe: the owner locks.

    Older lines are in the log files, if the server writes any. A client's account has the number of its newest stored
    line (`Account.lines_through`).

    Args:
        keep: Most lines in memory.
        room: Counts the bytes of these lines, which never exceed its `own` bytes; None bounds by `RECENT_LINE_BYTES`.
    """

    def __init__(self, *, keep: int = 2000, room: ByteHolder | None = None) -> None:
        self._recent: deque[LogEntry] = deque()
        self._keep, self._room = keep, room
        self._most = RECENT_LINE_BYTES if room is None else room.own
        self._bytes = 0
        self.count = 0
        """Number of all lines that the run has stored."""

    def take(self, client: bytes, lines: Iterable[Line], through: int, now: float) -> list[LogEntry]:
        """Store the lines of a client that are numbered above `through`, in ascending order, and return them."""
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
        """Add lines to those in memory, and evict the oldest beyond the bounds."""
        before = self._bytes
        for entry in entries:
            self._recent.append(entry)
            self._bytes += _bytes_of(entry)
            while len(self._recent) > self._keep or (self._bytes > self._most and len(self._recent) > 1):
                self._bytes -= _bytes_of(self._recent.popleft())
        if self._room is not None:
            self._room.add(self._bytes - before)

    def clear(self) -> None:
        """Evict all lines from memory."""
        self._recent.clear()
        if self._room is not None:
            self._room.add(-self._bytes)
        self._bytes = 0

    def restore(self, count: int, recent: Iterable[LogEntry]) -> None:
        """Continue a saved logbook in this new one: set its count and newest lines."""
        self.count = count
        self._extend(recent)

    def recent(self, after: int = 0, most: int = 1000) -> list[LogEntry]:
        """Return at most `most` of the newest lines in memory with an index above `after`, oldest first."""
        return [entry for entry in self._recent if entry.index > after][-most:]


MAX_WAITING = 1 << 16
"""Most replies that wait for the disk. Beyond, the oldest are dropped and counted: their clients retry."""

Ticket = Callable[[], None]
"""Callback that runs once a group is saved: sends a reply or notice, or writes lines to a file."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Name, state and times of one run of a server."""

    name: str
    finished: bool = False
    began: float = 0.0
    """Begin of the run, in seconds since 1970."""
    ended: float = 0.0
    """Begin of the next run; 0 for the current run."""


@dataclass(slots=True)
class SavedGroup:
    """Changes that one transaction saves, which do not change any more. Each names its run."""

    accounts: list[tuple[str, Account]] = field(default_factory=list)
    """Copies of accounts: each replaces the stored account of this run and client."""
    lines: list[tuple[str, LogEntry]] = field(default_factory=list)
    """New log lines in their order; `index` counts within the run."""
    runs: list[RunFacts] = field(default_factory=list)
    """Runs that began or changed: each replaces the stored one of this name."""
    models: list[tuple[str, Model]] = field(default_factory=list)
    """New models, at most one of each run and topic, newer than the stored one."""
    inherited: list[tuple[str, bytes]] = field(default_factory=list)
    """Packed rows of `rows.ACCOUNT`: each replaces the stored row of its run, client and home."""
    settings: dict[str, str] = field(default_factory=dict)
    """Small texts of the server, by name."""
    rows: dict[str, list[tuple[int, bytes, bytes | None]]] = field(default_factory=dict)
    """Changed rows of tables that save each change, by table name: kind, key and body; body None deletes the row."""
    tickets: list[Ticket] = field(default_factory=list)
    """Callbacks for the time when a group of changes is on disk; a store does not save callbacks."""

    @property
    def is_empty(self) -> bool:
        """True if the group has no changes to save; it may have tickets."""
        return not any(getattr(self, name) for name in self.__slots__ if name != "tickets")


class UnsavedChanges:
    """Changes since the last group was taken, by names of runs. Not thread-safe: the owner locks.

    Args:
        is_durable: True if changes are saved; False keeps tickets alone.
    """

    def __init__(self, is_durable: bool = True) -> None:
        self.is_durable = is_durable
        """True if acknowledged changes are on disk."""
        self._accounts: dict[tuple[str, bytes], Account] = {}
        self._saving: set[tuple[str, bytes]] = set()
        self._others: set[str] = set()  # runs whose other changes are being saved
        self._lines: list[tuple[str, Sequence[LogEntry]]] = []
        self._runs: dict[str, RunFacts] = {}
        self._models: dict[tuple[str, str], Model] = {}
        self._inherited: list[tuple[str, bytes]] = []
        self._settings: dict[str, str] = {}
        self._after: list[Ticket] = []
        self._waiting: OrderedDict[Hashable, Ticket] = OrderedDict()
        self.given_up = 0
        """Replies that were dropped because too many waited."""

    def mark_changed(self, run: str, account: Account) -> None:
        """Mark an account as changed."""
        if self.is_durable:
            self._accounts[run, account.client] = account

    def add_lines(self, run: str, entries: Sequence[LogEntry]) -> None:
        """Add log lines of a run to the next group."""
        if self.is_durable:
            self._lines.append((run, entries))

    def add_run(self, facts: RunFacts) -> None:
        """Add a run that began or changed."""
        if self.is_durable:
            self._runs[facts.name] = facts

    def add_model(self, run: str, model: Model) -> None:
        """Add a new model, in place of an unsaved one of the same run and topic."""
        if self.is_durable:
            self._models[run, model.topic] = model

    def add_inherited(self, run: str, rows: Rows) -> None:
        """Add inherited accounts of other servers, rows of `rows.ACCOUNT` [A]."""
        if self.is_durable:
            self._inherited.append((run, rows.tobytes()))

    def add_setting(self, name: str, text: str) -> None:
        """Add a small text, in place of an unsaved one of the same name."""
        if self.is_durable:
            self._settings[name] = text

    def call_after_save(self, ticket: Ticket) -> None:
        """Add a callback that runs once all changes up to now are saved."""
        self._after.append(ticket)

    def wait(self, key: Hashable, ticket: Ticket) -> None:
        """Add a callback that sends a reply, in place of one with the same key. Drops the oldest beyond MAX_WAITING."""
        self._waiting.pop(key, None)
        self._waiting[key] = ticket
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
            self.given_up += 1

    def is_saved(self, run: str, client: bytes) -> bool:
        """Return True if no change of this account is waiting or being saved."""
        return (run, client) not in self._accounts and (run, client) not in self._saving

    def is_run_saved(self, run: str) -> bool:
        """Return True if no change of this run is waiting or being saved."""
        pairs = (*self._accounts, *self._saving, *self._models, *self._lines, *self._inherited)
        return run not in (*(name for name, _ in pairs), *self._runs, *self._others)

    @property
    def is_clean(self) -> bool:
        """True if no change or ticket is waiting."""
        changes = self._accounts, self._lines, self._runs, self._models, self._inherited, self._settings
        return not any((*changes, self._after, self._waiting))

    @property
    def tickets(self) -> list[Ticket]:
        """Callbacks that wait for the next group."""
        return [*self._after, *self._waiting.values()]

    def take(self) -> SavedGroup | None:
        """Return all changes and tickets as one group, or None if nothing has changed and no ticket waits.

        The group counts as being saved until `confirm_saved` is called.
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

    def confirm_saved(self) -> None:
        """Record that the group taken last is on disk."""
        self._saving, self._others = set(), set()


@dataclass(frozen=True, slots=True)
class FolderStats:
    """Sizes of a state folder and its disk, in bytes."""

    # fmt: off
    bytes: Annotated[int, gauge("state_bytes", "State folder", "Bytes of the files in the state folder.")]
    free_bytes: Annotated[int, gauge("state_disk_free_bytes", "Free", "Free bytes for this process on the disk of the "
        "state folder.", adds="min")]
    disk_bytes: Annotated[int, gauge("state_disk_bytes", "Disk", "Size of the disk of the state folder.", adds="min")]
    trouble: Annotated[str, adding("any")]
    """Current trouble with the disk, for people; empty if the disk works."""
    # fmt: on


RECENT_LINES = 1000
"""Newest log lines of a run that a server reads at a restart."""


class StateStore(Protocol):
    """Saved state of a server, and a thread that saves one group after the other. Runs are given by name."""

    @property
    def epoch(self) -> int:
        """Number of this start of the server, greater than those of all former starts."""

    @property
    def complete_since(self) -> int:
        """Epoch from which on the state is complete: that of the first start, or of the start after a backup was
        restored.
        """

    def runs(self) -> Sequence[RunFacts]:
        """Return all saved runs, in the order in which they began."""

    def accounts(self, run: str) -> KeptAccounts:
        """Return the store of a run's accounts, own and inherited ones."""

    def line_count(self, run: str) -> int:
        """Return the number of all log lines of a run."""

    def search(self, run: str, wanted: LineFilter, *, most: int, newest_first: bool = False) -> Sequence[LogEntry]:
        """Return at most `most` log lines of a run that meet a filter."""

    def models(self, run: str) -> Iterable[Model]:
        """Return the newest model of each topic of a run."""

    def versions(self) -> Mapping[str, int]:
        """Return the highest version of each topic, over all runs."""

    def settings(self) -> Mapping[str, str]:
        """Return the small texts that the server has saved, by name."""

    @property
    def name(self) -> str:
        """Name of the server that owns the folder."""

    @property
    def folder(self) -> Path:
        """Path of the state folder."""

    @property
    def restored(self) -> int:
        """Number of times that a backup was restored into the folder."""

    @property
    def missing(self) -> list[str]:
        """Sentences on data that was missing or damaged at the start, one for each. A server may add to them."""

    def start(
        self,
        collect: Callable[[], SavedGroup | None],
        done: Callable[[SavedGroup], None],
        failed: Callable[[Exception], None],
        delayed: Callable[[], None],
    ) -> None:
        """Start the thread that saves, which calls `collect` for a group, `done` once the group is on disk, `failed`
        once if saving has failed for good, and `delayed` each time that saving waits for free space on the disk.
        """

    def rows(self, table: str) -> Iterator[tuple[int, bytes, bytes | None]]:
        """Yield the saved changes of a table in order: kind, key and body of each row."""

    @property
    def problem(self) -> str:
        """Current trouble with the disk, for people; empty if the disk works."""

    @property
    def is_healthy(self) -> bool:
        """True if new groups are saved without delay."""

    def disk_space(self) -> FolderStats:
        """Return the sizes of the folder and its disk."""

    def wake(self) -> None:
        """Save changes now, for a reply that waits. Without a waiting reply, changes are collected within 0.2 s."""

    def close(self, timeout: float) -> bool:
        """Save the remaining changes and release the folder; return False if the time did not suffice."""


@dataclass(slots=True)
class RunState:
    """State of one run at a server; guarded by the dispatcher's lock."""

    name: str
    began: float
    kept: KeptAccounts
    """Store of accounts that are not in memory, and of accounts inherited from drained servers."""
    ledger: Ledger
    ended: float = 0.0
    """Begin of the next run; 0 for the current run."""
    finished: bool = False
    logbook: Logbook = field(default_factory=Logbook)
    is_used: bool = True
    """True if the run was accessed since the last call of `Runs.evict_saved`."""
    inherited: int = 0
    """Number of times that accounts of other servers arrived, since this process started."""
    number: int = field(init=False)
    """Number of the run in headers."""

    def __post_init__(self) -> None:
        self.number = name_hash(self.name)

    @property
    def facts(self) -> RunFacts:
        """Facts of the run for saving, without accounts and lines."""
        return RunFacts(self.name, self.finished, self.began, self.ended)

    def rows_in_memory(self, home: int) -> Rows:
        """Return rows of the accounts that are in memory now, in order."""
        return merge(rows_of(row_of(account, home) for account in self.ledger))

    def pages(self, live: Rows) -> Iterator[Rows]:
        """Yield all accounts of the run in consecutive pages; see `page`."""
        after, more = b"", True
        while more:
            rows, more = self.page(live, after)
            yield rows
            after = key_of(rows[-1:]) if len(rows) else b""

    def store_inherited(self, rows: Rows) -> None:
        """Store accounts of other servers, rows of `merge`."""
        self.kept.store_inherited(rows)
        self.inherited += 1

    def page(self, live: Rows, after: bytes, most: int = PAGE_ROWS) -> tuple[Rows, bool]:
        """Return a page of the run's accounts, and True if more accounts follow.

        Args:
            live: Rows of the accounts that were in memory when the first page was read, in order.
            after: Key of the last row of the former page.
        """
        mine, has_more = page(live, after, most)
        rows = merge(mine, self.kept.rows(after, most + 1))
        return rows[:most], has_more or len(rows) > most


class Runs:
    """Current and former runs of a server. Not thread-safe: the owner locks.

    Args:
        name: Name of the current run.
        past: Store that former runs are read from.
        epoch: Current epoch of the server.
        home: `frames.name_hash` of the server's name.
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
        self._open: dict[str, RunState] = {}
        self.current = self._activate(name, now)

    def __iter__(self) -> Iterator[RunState]:
        """Iterate over the runs that are in memory."""
        return iter(list(self._open.values()))

    def find(self, number: int) -> RunState | None:
        """Return the run with this number, or None if the server never had it; 0 is the current run."""
        if number in (0, self.current.number):
            return self.current
        name = self._numbers.get(number)
        return None if name is None else self.named(name)

    def named(self, name: str) -> RunState | None:
        """Return the run with this name, or None if the server never had it."""
        if name not in self._open and name in self._saved:
            self._open[name] = self._load(self._saved[name])
        run = self._open.get(name)
        if run is not None:
            run.is_used = True
        return run

    def begin(self, name: str, now: float) -> RunState:
        """Make a new or former run the current one; return the run that was current before."""
        former = self.current
        if name != former.name:
            former.ended = now
            self.current = self._activate(name, now)
        return former

    def add_former_run(self, name: str, finished: bool, now: float) -> RunState:
        """Add a run of another server as a former run, and return it."""
        self._order.insert(0, name)
        run = self._open[name] = self._create(RunFacts(name, finished, now, now))
        self._numbers[run.number] = name
        return run

    def evict_saved(self, is_saved: Callable[[RunState], bool]) -> None:
        """Evict former runs that are saved, and that were not accessed since the last call, from memory."""
        if self._past is None:
            return
        for run in self:
            if run is not self.current and not run.is_used and not len(run.ledger) and is_saved(run):
                del self._open[run.name]
                run.logbook.clear()
                self._saved[run.name] = run.facts
            run.is_used = False

    def _activate(self, name: str, now: float) -> RunState:
        run = self.named(name)
        if run is None:
            run = self._open[name] = self._create(RunFacts(name, began=now))
            self._numbers[run.number] = name
        run.ended = 0.0
        self._order = [known for known in self._order if known != name] + [name]
        return run

    def _create(self, facts: RunFacts) -> RunState:
        kept = MemoryAccounts(self._home) if self._past is None else self._past.accounts(facts.name)
        since = 0 if self._past is None else self._past.complete_since
        may: dict[str, Any] = {"may_open": self._may_open, "forget": self._forget, "room": self._room}
        ledger = Ledger(epoch=self._epoch, since=since, store=kept, **may)
        log = Logbook(room=self._line_room)
        return RunState(facts.name, facts.began, kept, ledger, facts.ended, facts.finished, log)

    def _load(self, facts: RunFacts) -> RunState:
        assert self._past is not None
        run = self._create(facts)
        newest = self._past.search(facts.name, LineFilter(), most=RECENT_LINES, newest_first=True)
        run.logbook.restore(self._past.line_count(facts.name), reversed(newest))
        return run

    def facts(self) -> list[RunFacts]:
        """Return the facts of all runs, the one that began last at the end."""
        return [self._open[name].facts if name in self._open else self._saved[name] for name in self._order]
