"""Who counted what: cumulative totals of every client at a server.

Pure: no clock, no socket. Totals travel as sums since the client began, never as increments, so that a message may be
lost, doubled or late without changing what is counted: the greater number wins.

    client 7 says     episodes 3     episodes 5     (again) 3      the ledger holds 5
    client 9 says                    episodes 2                    the ledger holds 2      total 7

A client that has only said hello is a guest: it has no account until it reports something that counts. An account
whose client is gone or silent is folded: it leaves memory, its `AccountStore` keeps it, and it comes back before the
client's next message is looked at.

    hello ──▶ guest ──first report that counts──▶ account ──gone, or silent for long──▶ folded
                                                     ▲──────────── speaks again ────────────┘
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
"""Clients without an account that a ledger remembers; beyond, those leave that are silent for `SILENCE_TIMEOUT`."""
RECENT_LINE_BYTES = 4 << 20
"""Bytes of the newest lines that a book keeps in memory."""
ACCOUNT_BYTES = 4096
"""What an account or a guest takes at most, with what tables and limiters keep of a client, beside the names in its
report.
"""
NAME_BYTES = 128
"""What a scalar, or the version of a topic, takes beside its name."""
MAX_CODES = 32
SILENCE_TIMEOUT = 12.0
"""Seconds after which a client that was not heard will not come again by itself: more than twice its heartbeat."""
RECENT_EPISODES = 1000
"""Newest closed episodes that are kept. They are numbered, so that a reader sees which ones it has missed."""

_report_sums, _home_sums = attrgetter(*REPORT_SUMS), attrgetter(*HOME_SUMS)


class Ledger:
    """Accounts of all clients of one run at one server. Not thread-safe: the owner locks.

    Args:
        epoch: Of the server as it runs now.
        since: The epoch since which the server has forgotten nothing, which accounts that it opens say; 0: this one.
        store: Where accounts are that are not in memory.
        may_open: Whether an account may be opened for a newcomer whose key is this owner's, now.
        forget: Called with each client that leaves memory.
        room: Counts what accounts, guests and their reports take in memory; None: they are not counted.
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
        self._room = ByteBudget(1 << 62).holder("clients") if room is None else room
        self._name_bytes: dict[bytes, int] = {}  # of the clients whose reports have names
        self.epoch, self.since = epoch, since or epoch
        self._store = AccountStore() if store is None else store
        self._may_open, self._forget = may_open, forget
        self._accounts: dict[bytes, Account] = {}
        self._guests: PeerTable[bytes, Account] = PeerTable(
            "clients that have reported nothing yet", MAX_GUESTS, SILENCE_TIMEOUT, self._guest_left
        )
        self._folded = self._store.sums()
        self.sums: Counter[str] = Counter()
        """Running sums over all clients, by the names of `Totals`: those of `TABLE_SUMS`, accepted_caches and gone."""
        self.tables: dict[str, Counter[int]] = {name: Counter(sums) for name, sums in self._folded.tables.items()}
        """`TABLE_SUMS` of each table, by its number."""
        for name in (*TABLE_SUMS, "accepted_caches", "gone"):
            self.sums[name] = self._folded.counts[name]
        self.present: Counter[int] = Counter()
        """Clients in memory that have not said goodbye, of each table; guests are among them."""
        self.own_feedback = self.unknown_feedback = FeedbackCounts()
        """Of entries that the server stores itself, and of owners that it does not know, since it was started."""
        self.strays = 0
        """Caches that came for accounts of a former life of this server."""
        self.ended_count = 0
        """Closed episodes that were told to this ledger as it is in memory; the newest one has this number."""
        self.ended: deque[tuple[bytes, Ended]] = deque(maxlen=RECENT_EPISODES)
        """The newest closed episodes with who closed them, oldest first."""

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
        """Caches that were accepted."""
        return self.sums["accepted_caches"]

    @property
    def gone(self) -> int:
        """Clients that said goodbye."""
        return self.sums["gone"]

    @property
    def folded(self) -> int:
        """Accounts that are not in memory."""
        return self._folded.counts["clients"]

    def __len__(self) -> int:
        """Accounts in memory."""
        return len(self._accounts)

    def __contains__(self, client: object) -> bool:
        """Whether this client is here now: its account is in memory, or it is a guest."""
        return client in self._accounts or client in self._guests

    def __iter__(self) -> Iterator[Account]:
        """Accounts in memory."""
        return iter(self._accounts.values())

    @property
    def guests(self) -> list[Account]:
        """Clients that have said hello and reported nothing that counts."""
        return [guest for _, guest in self._guests.items()]

    def find(self, client: bytes) -> Account | None:
        """What is known of a client: its account, brought back where it was folded, or what it said as a guest."""
        return self._accounts.get(client) or self._guests.get(client) or self._unfold(client)

    def guests_since(self, since: float) -> int:
        """Guests that were heard since then."""
        return sum(guest.last_seen >= since for guest in self.guests)

    def is_counted(self, account: Account) -> bool:
        """Whether this is an account, and not a guest's."""
        return account.client in self._accounts

    def greet(self, client: bytes, now: float, table: int = 0) -> Account:
        """A client says hello: its account where it has one, or else it is a guest from now on.

        Raises:
            ProtocolError: (code "busy") too many guests are here, and none is silent.
        """
        account = self.find(client)
        if account is None:
            self._room.check(ACCOUNT_BYTES)
            account = Account(client, now, now, self.since, table=table)
            self._guests.put(client, account, now)
            self._room.add(ACCOUNT_BYTES)
            self.present[table] += 1
        return self._heard(account, now)

    def _heard(self, account: Account, now: float) -> Account:
        account.last_seen = now
        if account.client not in self._accounts:
            self._guests.hear(account.client, now)
        return account

    def dismiss(self, client: bytes) -> None:
        """Forget a guest."""
        guest = self._guests.pop(client)
        assert guest is not None
        self._guest_left(client, guest)

    def _guest_left(self, client: bytes, guest: Account) -> None:
        self.present[guest.table] -= 1
        self._left(client)

    def _left(self, client: bytes) -> None:
        """A client is not in memory any more."""
        self._room.add(-ACCOUNT_BYTES - self._name_bytes.pop(client, 0))
        self._forget(client)

    def _opened(self, client: bytes, now: float, table: int) -> Account:
        """The client's account, opened if it has none.

        Raises:
            ProtocolError: (code "busy") too many are opened at once, or there is no room for one more.
        """
        account = self.find(client) or Account(client, now, now, self.since, table=table)
        if client not in self._accounts:
            if client not in self._guests:
                self._room.check(ACCOUNT_BYTES)
            if not self._may_open(account.owner, now):
                raise ProtocolError("busy", "too many new clients at once (new_clients); this one may come again soon")
            self._open(account)
        return self._heard(account, now)

    def _open(self, account: Account) -> None:
        if self._guests.pop(account.client) is not None:
            self.present[account.table] -= 1
        else:
            self._room.add(ACCOUNT_BYTES)
        # What other servers have taken of this client it may still say once more, here.
        account.lines_through, account.ended_through = self._store.numbers_elsewhere(account.client)
        self._accounts[account.client] = account
        self.present[account.table] += 1

    def move(self, account: Account, table: int) -> None:
        """The client belongs to this table from now on, with all that it has counted."""
        counts = counts_of(account)
        for sign in (-1, 1):
            for name, sums in self.tables.items():
                sums[account.table] += sign * counts[name]
            self.present[account.table] += sign * (not account.report.leaving)
            account.table = table

    # Accounts that leave memory, and come back

    def fold(self, account: Account) -> None:
        """Take an account out of memory: its client is gone, or silent. What it has counted stays in all sums."""
        assert not account.waiting_feedback
        del self._accounts[account.client]
        self.present[account.table] -= not account.report.leaving
        self._folded.add(account)
        self._store.keep(account)
        self._left(account.client)

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
        """Forget guests that were not heard since then."""
        for client, guest in self._guests.items():
            if guest.last_seen < since:
                self.dismiss(client)

    # What clients say

    def report(self, client: bytes, sequence: int, update: Update, now: float, table: int = 0) -> Account:
        """Merge what a client says: each sum by maximum, the state of its memory by the newest sequence. A guest that
        reports nothing that counts stays one.

        What it counts per home is about a former account where its epoch is below this one's `since`, and where it is
        above this ledger's: of two lives without a state folder, the later has the lower epoch if the clock went back.

        Raises:
            ProtocolError: a scalar or return is not finite, too many accounts are opened at once, too many guests are
                here, or there is no room for what it says; nothing was changed.
        """
        _check(update)
        account = self._accounts.get(client)
        names = _name_bytes(update)
        missing = names - self._name_bytes.get(client, 0)
        if account is None and client not in self._guests:
            missing += ACCOUNT_BYTES
        if missing > 0:  # else there is room for what it says already
            self._room.check(missing)
        if account is None and counts_something(update):
            account = self._opened(client, now, table)
        account = self._heard(account or self.greet(client, now, table), now)
        self._merge(account, sequence, update, names)
        return account

    def _merge(self, account: Account, sequence: int, update: Update, names: int) -> None:
        old, is_mine = account.report, account.since <= update.epoch <= self.epoch
        is_newest = sequence > account.sequence
        account.report = _merged(old, update, is_newest=is_newest, is_mine=is_mine)
        if is_newest:  # else its names are those of the former one
            self._count_names(account.client, names)
            account.sequence = sequence
        if account.client in self._accounts:
            self._add_news(account, old)
            self._take_ended(account, update)
        elif account.report.leaving:
            self.dismiss(account.client)

    def _count_names(self, client: bytes, size: int) -> None:
        """Count what the names in a report take: so many bytes."""
        former = self._name_bytes.get(client, 0)
        if size != former:
            self._room.add(size - former)
            self._name_bytes[client] = size

    def _add_news(self, account: Account, old: Update) -> None:
        """Add what a report has brought to the running sums."""
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

    def arrived(
        self,
        client: bytes,
        byte_count: int,
        now: float,
        number: int = 0,
        pushed_bytes: int = 0,
        since: int = 0,
        table: int = 0,
    ) -> Account | None:
        """A cache of this size came; `number` and `pushed_bytes` are what it says the client has pushed with it.

        None, and only `strays` counts it, when it was pushed to an account that this ledger has no more (`since` is
        not this one's): its client has given it up.

        Raises:
            ProtocolError: too many accounts are opened at once; nothing was changed.
        """
        account = self._accounts.get(client)  # nearly always there: this is asked for each cache
        if account is None or since not in (0, account.since):
            account = self.find(client)
            if since not in (0, self.since if account is None else account.since):
                self.strays += 1
                return None
            account = self._opened(client, now, table)
        account.arrived(byte_count, number, pushed_bytes, now)
        return account

    def accepted(self, account: Account, byte_count: int, samples: int) -> None:
        """The cache that arrived is held."""
        account.accepted_caches += 1
        account.accepted_bytes += byte_count
        account.accepted_samples += samples
        self.sums["accepted_caches"] += 1

    def rejected(self, account: Account, code: str) -> None:
        """The cache that arrived was not taken, for the reason `code`."""
        if code not in account.rejected and len(account.rejected) >= MAX_CODES:
            code = "other"
        account.rejected[code] = account.rejected.get(code, 0) + 1

    def losing_feedback(self, account: Account, samples: int) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
        """The changes by which so many priorities are never fetched by a client."""
        name, table = "lost_feedback", account.table
        sums, of_tables = self.sums, self.tables["lost_feedback"]
        return [
            (setattr, (account, name, account.lost_feedback + samples)),
            (setitem, (sums, name, sums[name] + samples)),
            (setitem, (of_tables, table, of_tables[table] + samples)),
        ]

    # What is asked

    def feedback(self) -> dict[str, FeedbackCounts]:
        """Return the counts of TD errors by owner of their entries: clients, the server, and unknown owners."""
        sums = Counter(self._folded.feedback)
        for account in self:
            sums.update(asdict(account.feedback))
        return {"clients": FeedbackCounts(**sums), "server": self.own_feedback, "unknown": self.unknown_feedback}

    def active(self, since: float) -> list[Account]:
        """Clients that have not said goodbye and were heard from `since` then, guests among them."""
        everybody = (*self, *self.guests)
        return [account for account in everybody if account.last_seen >= since and not account.report.leaving]

    def totals(self) -> Totals:
        """Sums over all accounts, those that are not in memory included; the cost grows with those that are."""
        sums = Counter(self._folded.counts)
        for account in self:
            sums.update(counts_of(account))
        returns = math.fsum((self._folded.returns.value, *(account.returns_sum for account in self)))
        return Totals(**sums, returns_sum=returns)

    def check_invariants(self) -> None:
        """Raise AssertionError where running sums and accounts disagree."""
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
    """A report with another one: sums by maximum, those per home only if they are about this account."""
    mine = update if is_mine else old
    sums = dict(zip(REPORT_SUMS, map(max, _report_sums(old), _report_sums(update)), strict=True))
    sums |= zip(HOME_SUMS, map(max, _home_sums(old), _home_sums(mine)), strict=True)
    return msgspec.structs.replace(update if is_newest else old, **sums, lines=[], ended=[])


def _name_bytes(report: Update) -> int:
    """What the names in a report take in memory, with their numbers."""
    names = (*report.scalars, *report.models)
    return sum(map(getsizeof, names)) + NAME_BYTES * len(names)


def _check(update: Update) -> None:
    """What the wire's bounds leave open: numbers that are not finite would spoil every sum they enter."""
    for name, value in update.scalars.items():
        if not math.isfinite(value):
            raise ProtocolError("value", f"scalar {name!r} is {value}; only finite numbers are kept")
    for ended in update.ended:
        if not abs(ended.returned) <= MAX_RETURN:  # NaN is not, either
            expected = f"it must be finite, and at most {MAX_RETURN:g}"
            raise ProtocolError("value", f"the return of episode {ended.number} is {ended.returned}; {expected}")


def account_bytes(limits: Limits) -> int:
    """Bytes that accounts and what clients say of themselves may take beside `held_bytes`."""
    held = limits.held_bytes or HELD_BYTES
    return max(limits.tuning.expected_clients * ACCOUNT_BYTES, min(limits.new_clients * ACCOUNT_BYTES, held // 4))


def line_bytes(limits: Limits) -> int:
    """Bytes that the newest log lines may take beside `held_bytes`."""
    return min(RECENT_LINE_BYTES, (limits.held_bytes or HELD_BYTES) // 16)
