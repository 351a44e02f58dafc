"""Ledger of a server: cumulative totals of every client.

Pure: no clock, no socket. Clients report sums since their start, never increments. If a message is lost, doubled or
late, the totals stay right: the greater number holds.

    client 7 reports  episodes 3     episodes 5     (again) 3      the ledger holds 5
    client 9 reports                 episodes 2                    the ledger holds 2      total 7

A client that has only sent HELLO is a guest: it has no account until it reports counts. The account of a client that
is gone or silent is folded: it moves from memory to the `AccountStore`, and returns to memory before the client's next
message is handled.

    HELLO ──▶ guest ──first report with counts──▶ account ──gone, or silent for long──▶ folded
                                                     ▲──────────── next message ────────────┘
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from operator import attrgetter, setitem
from sys import getsizeof
from typing import Any

import msgspec

from memoire.errors import ProtocolError
from memoire.limits import HELD_BYTES, Limits
from memoire.wire.byte_budget import ByteBudget, ByteHolder, PeerTable
from memoire.wire.messages import TRAIN, Ended, Update
from memoire.wire.rows import MAX_RETURN

from .account import (
    HOME_SUMS,
    REPORT_SUMS,
    TABLE_SUMS,
    Account,
    AccountStore,
    FeedbackCounts,
    Totals,
    counts_of,
    counts_something,
)

MAX_GUESTS = 1 << 14
"""Most guests of a ledger; a new guest then evicts guests that are silent for `SILENCE_TIMEOUT`."""
RECENT_LINE_BYTES = 4 << 20
"""Most bytes of the newest log lines that a logbook keeps in memory."""
ACCOUNT_BYTES = 4096
"""Most bytes of memory for an account or guest, with the client's data in tables and limiters, without the names in its
report.
"""
NAME_BYTES = 128
"""Bytes of memory for a scalar, or the version of a topic, without its name."""
MAX_CODES = 32
SILENCE_TIMEOUT = 12.0
"""Seconds of silence after which a guest may be evicted: more than two heartbeats of a client."""
RECENT_EPISODES = 1000
"""Number of newest closed episodes that are kept. Episodes are numbered, so that a gap shows missed ones."""

_report_sums, _home_sums = attrgetter(*REPORT_SUMS), attrgetter(*HOME_SUMS)


class Ledger:
    """Accounts of all clients of one run at one server. Not thread-safe: the owner locks.

    Args:
        epoch: Current epoch of the server.
        since: Epoch from which on the server has all accounts; new accounts record it. 0: the current epoch.
        store: Store of accounts that are not in memory.
        may_open: Returns True if an account may be opened now for a new client whose key has this owner.
        forget: Called with each client that leaves memory.
        room: Counts the bytes of accounts, guests and their reports in memory; None: they are not counted.
    """

    def __init__(
        self,
        *,
        epoch: int = 0,
        since: int = 0,
        store: AccountStore | None = None,
        may_open: Callable[[str, float], bool] = lambda owner, now: True,
        forget: Callable[[bytes], None] = lambda client: None,
        room: ByteHolder | None = None,
    ) -> None:
        self._room = ByteBudget(1 << 62).add_holder("clients") if room is None else room
        self._name_bytes: dict[bytes, int] = {}  # bytes of the names in a client's report
        self.epoch, self.since = epoch, since or epoch
        self._store = AccountStore() if store is None else store
        self._may_open, self._forget = may_open, forget
        self._accounts: dict[bytes, Account] = {}
        self._guests: PeerTable[bytes, Account] = PeerTable(
            "clients that have reported nothing yet", MAX_GUESTS, SILENCE_TIMEOUT, self._release_guest
        )
        self._folded = self._store.sums()
        self.sums: Counter[str] = Counter()
        """Running sums over all clients, by the names of `Totals`: `TABLE_SUMS`, accepted_caches and gone."""
        self.tables: dict[str, Counter[int]] = {name: Counter(sums) for name, sums in self._folded.tables.items()}
        """`TABLE_SUMS` of each table, by its number."""
        for name in (*TABLE_SUMS, "accepted_caches", "gone"):
            self.sums[name] = self._folded.counts[name]
        self.present: Counter[int] = Counter()
        """Clients in memory that have not left, guests included, by number of their table."""
        self.own_feedback = self.unknown_feedback = FeedbackCounts()
        """TD errors for entries that the server stores itself, and for unknown owners, since the server started."""
        self.misdirected_caches = 0
        """Caches that arrived for accounts of a former life of this server."""
        self.ended_count = 0
        """Closed episodes that were reported since this ledger was created; the newest one has this number."""
        self.ended: deque[tuple[bytes, Ended]] = deque(maxlen=RECENT_EPISODES)
        """Newest closed episodes with the ids of their clients, oldest first."""

    @property
    def episodes(self) -> int:
        """Episodes that all clients closed."""
        return self.sums["episodes"]

    @property
    def steps(self) -> int:
        """Entries that all clients recorded."""
        return self.sums["steps"]

    @property
    def accepted_caches(self) -> int:
        """Caches that the server accepted from all clients."""
        return self.sums["accepted_caches"]

    @property
    def gone(self) -> int:
        """Clients that have left, over all accounts."""
        return self.sums["gone"]

    @property
    def stored_count(self) -> int:
        """Number of accounts that are not in memory."""
        return self._folded.counts["clients"]

    def __len__(self) -> int:
        """Return the number of accounts in memory, without guests."""
        return len(self._accounts)

    def __contains__(self, client: object) -> bool:
        """Return True if the client's account is in memory, or the client is a guest."""
        return client in self._accounts or client in self._guests

    def __iter__(self) -> Iterator[Account]:
        """Iterate over the accounts in memory, without guests."""
        return iter(self._accounts.values())

    @property
    def guests(self) -> list[Account]:
        """Clients that have sent HELLO, but reported no counts."""
        return [guest for _, guest in self._guests.items()]

    def find(self, client: bytes) -> Account | None:
        """Return a client's account, or its record as a guest, or None. A folded account returns to memory."""
        return self._accounts.get(client) or self._guests.get(client) or self._unfold(client)

    def guests_since(self, since: float) -> int:
        """Return the number of guests that were heard at the time `since` or later."""
        return sum(guest.last_seen >= since for guest in self.guests)

    def is_counted(self, account: Account) -> bool:
        """Return True if an account is in memory and not the record of a guest."""
        return account.client in self._accounts

    def register_guest(self, client: bytes, now: float, table: int = 0) -> Account:
        """Handle a client's HELLO: return its account, or register it as a guest if it has none.

        Raises:
            ProtocolError: (code "busy") the table of guests is full, and no guest is silent.
        """
        account = self.find(client)
        if account is None:
            self._room.check(ACCOUNT_BYTES)
            account = Account(client, now, now, self.since, table=table)
            self._guests.put(client, account, now)
            self._room.add(ACCOUNT_BYTES)
            self.present[table] += 1
        return self._mark_heard(account, now)

    def _mark_heard(self, account: Account, now: float) -> Account:
        account.last_seen = now
        if account.client not in self._accounts:
            self._guests.look_up(account.client, now)
        return account

    def remove_guest(self, client: bytes) -> None:
        """Remove a guest from memory."""
        guest = self._guests.pop(client)
        assert guest is not None
        self._release_guest(client, guest)

    def _release_guest(self, client: bytes, guest: Account) -> None:
        self.present[guest.table] -= 1
        self._release_client(client)

    def _release_client(self, client: bytes) -> None:
        """Release the bytes of a client that has left memory, and call `forget`."""
        self._room.add(-ACCOUNT_BYTES - self._name_bytes.pop(client, 0))
        self._forget(client)

    def _get_or_open(self, client: bytes, now: float, table: int) -> Account:
        """Return the client's account; open one if the client has none.

        Raises:
            ProtocolError: (code "busy") too many accounts are opened at once, or a further one has no room.
        """
        account = self.find(client) or Account(client, now, now, self.since, table=table)
        if client not in self._accounts:
            if client not in self._guests:
                self._room.check(ACCOUNT_BYTES)
            if not self._may_open(account.owner, now):
                raise ProtocolError("busy", "too many new clients at once (new_clients); retry in a few seconds")
            self._open(account)
        return self._mark_heard(account, now)

    def _open(self, account: Account) -> None:
        if self._guests.pop(account.client) is not None:
            self.present[account.table] -= 1
        else:
            self._room.add(ACCOUNT_BYTES)
        # The client may repeat lines and episodes here that other servers have stored already.
        account.lines_through, account.ended_through = self._store.numbers_elsewhere(account.client)
        self._accounts[account.client] = account
        self.present[account.table] += 1

    def move(self, account: Account, table: int) -> None:
        """Move a client to another table, with all its counts."""
        counts = counts_of(account)
        for sign in (-1, 1):
            for name, sums in self.tables.items():
                sums[account.table] += sign * counts[name]
            self.present[account.table] += sign * (not account.report.leaving)
            account.table = table

    # Moving accounts from memory to the store, and back

    def store_account(self, account: Account) -> None:
        """Move the account of a gone or silent client to the store. The account's counts stay in all sums."""
        assert not account.waiting_feedback
        del self._accounts[account.client]
        self.present[account.table] -= not account.report.leaving
        self._folded.add(account)
        self._store.store(account)
        self._release_client(account.client)

    def _unfold(self, client: bytes) -> Account | None:
        account = self._store.find(client)
        if account is not None:
            self._accounts[client] = account
            self._count_names(client, _name_bytes(account.report))
            self._room.add(ACCOUNT_BYTES)
            self.present[account.table] += not account.report.leaving
            self._folded.add(account, -1)
        return account

    def expire(self, since: float) -> None:
        """Remove guests that were last heard before `since`."""
        for client, guest in self._guests.items():
            if guest.last_seen < since:
                self.remove_guest(client)

    # Messages of clients

    def report(self, client: bytes, sequence: int, update: Update, now: float, table: int = 0) -> Account:
        """Merge a client's report: each sum by maximum, the state of its memory by the newest sequence number. A guest
        whose report has no counts stays a guest.

        Sums for its home belong to a former account if the report's epoch is below the account's `since` or above this
        ledger's. A server without a state folder may get a lower epoch at a restart, if the clock went back.

        Raises:
            ProtocolError: a scalar or return is not finite, too many accounts are opened at once, too many guests are
                registered, or the report has no room; nothing was changed.
        """
        _check(update)
        account = self._accounts.get(client)
        names = _name_bytes(update)
        missing = names - self._name_bytes.get(client, 0)
        if account is None and client not in self._guests:
            missing += ACCOUNT_BYTES
        if missing > 0:  # without missing bytes, the report takes none
            self._room.check(missing)
        if account is None and counts_something(update):
            account = self._get_or_open(client, now, table)
        account = self._mark_heard(account or self.register_guest(client, now, table), now)
        self._merge(account, sequence, update, names)
        return account

    def _merge(self, account: Account, sequence: int, update: Update, names: int) -> None:
        old, is_mine = account.report, account.since <= update.epoch <= self.epoch
        is_newest = sequence > account.sequence
        account.report = _merged(old, update, is_newest=is_newest, is_mine=is_mine)
        if is_newest:  # an older report leaves the account's names
            self._count_names(account.client, names)
            account.sequence = sequence
        if account.client in self._accounts:
            self._add_increase(account, old)
            self._take_ended(account, update)
        elif account.report.leaving:
            self.remove_guest(account.client)

    def _count_names(self, client: bytes, size: int) -> None:
        """Set the bytes that are counted for the names in a client's report."""
        former = self._name_bytes.get(client, 0)
        if size != former:
            self._room.add(size - former)
            self._name_bytes[client] = size

    def _add_increase(self, account: Account, old: Update) -> None:
        """Add the difference between the account's report and the old one to the running sums."""
        report, table = account.report, account.table
        for name in ("episodes", "steps", "applied", "stale"):
            if news := getattr(report, name) - getattr(old, name):
                self.sums[name] += news
                self.tables[name][table] += news
        self.sums["gone"] += report.leaving - old.leaving
        self.present[table] -= report.leaving - old.leaving

    def _take_ended(self, account: Account, update: Update) -> None:
        for ended in update.ended:
            if ended.number > account.ended_through:
                account.ended_through = ended.number
                if ended.kind == TRAIN:
                    account.returns_count += 1
                    account.returns_sum += ended.returned
                self.ended_count += 1
                self.ended.append((account.client, ended))

    def count_arrived_cache(
        self,
        client: bytes,
        byte_count: int,
        now: float,
        number: int = 0,
        pushed_bytes: int = 0,
        since: int = 0,
        table: int = 0,
    ) -> Account | None:
        """Count a cache that arrived; `number` and `pushed_bytes` are the client's totals of pushes with this cache.

        Return None, and count the cache in `misdirected_caches` alone, if it belongs to a former account (another
        `since`). The client, too, no longer counts a cache of a former account.

        Raises:
            ProtocolError: too many accounts are opened at once; nothing was changed.
        """
        account = self._accounts.get(client)  # fast path: runs for each cache
        if account is None or since not in (0, account.since):
            account = self.find(client)
            if since not in (0, self.since if account is None else account.since):
                self.misdirected_caches += 1
                return None
            account = self._get_or_open(client, now, table)
        account.count_arrived_cache(byte_count, number, pushed_bytes, now)
        return account

    def count_accepted_cache(self, account: Account, byte_count: int, samples: int) -> None:
        """Count the cache that arrived as accepted."""
        account.accepted_caches += 1
        account.accepted_bytes += byte_count
        account.accepted_samples += samples
        self.sums["accepted_caches"] += 1

    def count_rejected_cache(self, account: Account, code: str) -> None:
        """Count the cache that arrived as rejected, by code."""
        if code not in account.rejected and len(account.rejected) >= MAX_CODES:
            code = "other"
        account.rejected[code] = account.rejected.get(code, 0) + 1

    def lost_feedback_calls(
        self, account: Account, samples: int
    ) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
        """Return the calls that count TD errors for `samples` samples as lost, to be made in one step."""
        name, table = "lost_feedback", account.table
        sums, of_tables = self.sums, self.tables["lost_feedback"]
        return [
            (setattr, (account, name, account.lost_feedback + samples)),
            (setitem, (sums, name, sums[name] + samples)),
            (setitem, (of_tables, table, of_tables[table] + samples)),
        ]

    # Queries

    def feedback(self) -> dict[str, FeedbackCounts]:
        """Return the counts of TD errors by owner of their entries: clients, the server, and unknown owners."""
        sums = Counter(self._folded.feedback)
        for account in self:
            sums.update(asdict(account.feedback))
        return {"clients": FeedbackCounts(**sums), "server": self.own_feedback, "unknown": self.unknown_feedback}

    def active(self, since: float) -> list[Account]:
        """Return the clients, guests included, that have not left and were heard at the time `since` or later."""
        clients = (*self, *self.guests)
        return [account for account in clients if account.last_seen >= since and not account.report.leaving]

    def totals(self) -> Totals:
        """Return the sums over all accounts, folded ones included. Cost: O(accounts in memory)."""
        sums = Counter(self._folded.counts)
        for account in self:
            sums.update(counts_of(account))
        returns = math.fsum((self._folded.returns.value, *(account.returns_sum for account in self)))
        return Totals(**sums, returns_sum=returns)

    def check_invariants(self) -> None:
        """Raise AssertionError if running sums and accounts disagree."""
        self._check_sums()
        present = (account for account in (*self, *self.guests) if not account.report.leaving)
        assert +self.present == Counter(account.table for account in present)
        assert not any(guest.client in self._accounts for guest in self.guests)
        for guest in self.guests:
            assert not any(value for name, value in counts_of(guest).items() if name not in ("clients", "gone"))
        for client, account in self._accounts.items():
            assert account.client == client
            account.check_invariants()
        for counts in self.feedback().values():
            assert counts.is_balanced, counts

    def _check_sums(self) -> None:
        totals = self.totals()
        for name, value in self.sums.items():
            assert value == getattr(totals, name), name
        for name, sums in self.tables.items():
            assert sums.total() == getattr(totals, name), name
            for table in {account.table for account in self}:
                mine = sum(counts_of(account)[name] for account in self if account.table == table)
                assert sums[table] == mine + self._folded.tables[name][table], name


def _merged(old: Update, update: Update, *, is_newest: bool, is_mine: bool) -> Update:
    """Merge two reports: sums by maximum, sums for the home server only if `is_mine`: they belong to this account."""
    mine = update if is_mine else old
    sums = dict(zip(REPORT_SUMS, map(max, _report_sums(old), _report_sums(update)), strict=True))
    sums |= zip(HOME_SUMS, map(max, _home_sums(old), _home_sums(mine)), strict=True)
    return msgspec.structs.replace(update if is_newest else old, **sums, lines=[], ended=[])


def _name_bytes(report: Update) -> int:
    """Return the bytes of memory that the names in a report and their numbers take."""
    names = (*report.scalars, *report.models)
    return sum(map(getsizeof, names)) + NAME_BYTES * len(names)


def _check(update: Update) -> None:
    """Raise ProtocolError if a scalar or return is not finite, since it would spoil every sum; messages allow it."""
    for name, value in update.scalars.items():
        if not math.isfinite(value):
            raise ProtocolError("value", f"scalar {name!r} is {value}; it must be finite")
    for ended in update.ended:
        if not abs(ended.returned) <= MAX_RETURN:  # the comparison is False for NaN, too
            expected = f"it must be finite, and at most {MAX_RETURN:g}"
            raise ProtocolError("value", f"the return of episode {ended.number} is {ended.returned}; {expected}")


def account_bytes(limits: Limits) -> int:
    """Return the bytes that accounts and clients' reports may take beside `held_bytes`."""
    held = limits.held_bytes or HELD_BYTES
    return max(limits.tuning.expected_clients * ACCOUNT_BYTES, min(limits.new_clients * ACCOUNT_BYTES, held // 4))


def line_bytes(limits: Limits) -> int:
    """Return the bytes that the newest log lines may take beside `held_bytes`."""
    return min(RECENT_LINE_BYTES, (limits.held_bytes or HELD_BYTES) // 16)
