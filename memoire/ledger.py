"""Who counted what: cumulative totals of every client at a server, and a client's byte window towards its server.

Pure: no clock, no socket. Totals travel as sums since the client began, never as increments, so that a message may be
lost, doubled or late without changing what is counted: the greater number wins.

    client 7 says     episodes 3     episodes 5     (again) 3      the ledger holds 5
    client 9 says                    episodes 2                    the ledger holds 2      total 7
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from .errors import ProtocolError
from .wire import MOST_RETURN, Ended, Update

MOST_CLIENTS = 1 << 16
"""Clients that one ledger keeps; a stranger who makes up names cannot fill the memory."""
MOST_CODES = 32
MOST_HOMES = 32
"""Accounts that a client remembers of homes it has left, should it come back."""
RECENT_EPISODES = 1000

_SUMS = ("episodes", "steps", "skipped", "generated_bytes", "dropped_lines", "applied", "stale")
_HOME_SUMS = ("caches", "cache_bytes", "shipped_episodes")


@dataclass(slots=True)
class Account:
    """One client at one server; the ledger's owner holds the lock under which it changes."""

    client: bytes
    first_seen: float
    last_seen: float
    since: int = 0
    """The home's epoch when it was opened: what is per home (the client's caches) counts from then."""
    report: Update = field(default_factory=Update)
    """Greatest sums, and the state of the client's memory as its newest message says; without lines and episodes."""
    sequence: int = -1
    """Number of that newest message."""
    ended_through: int = 0
    """Number of the newest closed episode that was taken."""
    returns_count: int = 0
    returns_sum: float = 0.0
    received_caches: int = 0
    received_bytes: int = 0
    """Of all caches that arrived, accepted or rejected."""
    seen_caches: int = 0
    seen_bytes: int = 0
    """What the client had pushed when it pushed the newest cache that arrived: received, or lost on the way."""
    accepted_caches: int = 0
    accepted_bytes: int = 0
    accepted_samples: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    last_cache: float = 0.0
    label: int = 0
    """Of its log lines."""
    host: str = ""
    """Where it runs, as it says."""
    table: int = 0
    """Number of the table that it belongs to."""
    owner: str = ""
    """Whose key it was opened with, as role and name: nobody else may speak for it. "" where no keys are asked for."""

    def copy(self) -> Account:
        """The account as it is now, which nobody changes any more."""
        return replace(self, rejected=dict(self.rejected))

    @property
    def lost_caches(self) -> int:
        """Caches that a later one overtook and that have not arrived."""
        return max(0, self.seen_caches - self.received_caches)

    @property
    def lost_bytes(self) -> int:
        """Their bytes."""
        return max(0, self.seen_bytes - self.received_bytes)

    @property
    def pushed_caches(self) -> int:
        """Caches that the client has pushed, as far as anything that arrived says: always those received (accepted or
        rejected), lost and in flight together.
        """
        return max(self.report.caches, self.seen_caches, self.received_caches)

    @property
    def pushed_bytes(self) -> int:
        """Their bytes."""
        return max(self.report.cache_bytes, self.seen_bytes, self.received_bytes)

    @property
    def in_flight_caches(self) -> int:
        """Caches that the client pushed and that neither arrived nor were overtaken by a later one that did."""
        return self.pushed_caches - max(self.seen_caches, self.received_caches)

    @property
    def in_flight(self) -> int:
        """Bytes that the client pushed and that neither arrived nor were overtaken by a later one that did."""
        return max(0, self.report.cache_bytes - max(self.seen_bytes, self.received_bytes))


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all clients of a ledger."""

    clients: int = 0
    gone: int = 0
    """Of these clients, those that said goodbye."""
    episodes: int = 0
    steps: int = 0
    pushed_caches: int = 0
    pushed_bytes: int = 0
    skipped_caches: int = 0
    generated_bytes: int = 0
    received_caches: int = 0
    received_bytes: int = 0
    accepted_caches: int = 0
    accepted_bytes: int = 0
    accepted_samples: int = 0
    rejected_caches: int = 0
    lost_caches: int = 0
    lost_bytes: int = 0
    dropped_lines: int = 0
    returns_count: int = 0
    returns_sum: float = 0.0
    applied: int = 0
    stale: int = 0


class Ledger:
    """Accounts of all clients of one run at one server. Not thread-safe: the owner locks.

    Args:
        epoch: Of the server as it runs now; accounts that it opens say that they began in it.
    """

    def __init__(self, *, epoch: int = 0, most_clients: int = MOST_CLIENTS) -> None:
        self.epoch = epoch
        self._accounts: dict[bytes, Account] = {}
        self._most_clients = most_clients
        self.episodes = 0
        """Episodes that all clients closed; a running sum, so that reading it costs nothing."""
        self.steps = 0
        self.accepted_caches = 0
        self.gone = 0
        """Clients that said goodbye."""
        self.present: Counter[int] = Counter()
        """The others, of each table by its number."""
        self.table_episodes: Counter[int] = Counter()
        """Episodes of each table, and below its steps."""
        self.table_steps: Counter[int] = Counter()
        self.strays = 0
        """Caches that came for accounts of a former life of this server."""
        self.ended_count = 0
        """Closed episodes that were told to this ledger as it is in memory; the newest one has this number."""
        self.ended: deque[tuple[bytes, Ended]] = deque(maxlen=RECENT_EPISODES)
        """The newest closed episodes with who closed them, oldest first."""

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, client: object) -> bool:
        return client in self._accounts

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def account(self, client: bytes, now: float, table: int = 0) -> Account:
        """The client's account, opened for a table when it is new.

        Raises:
            ProtocolError: (code "busy") the ledger is full.
        """
        account = self._accounts.get(client)
        if account is None:
            if len(self._accounts) >= self._most_clients:
                raise ProtocolError("busy", f"this server already counts {self._most_clients} clients")
            account = self._accounts[client] = Account(client, now, now, self.epoch, table=table)
            self.present[table] += 1
        account.last_seen = now
        return account

    def restore(self, account: Account) -> None:
        """Keep an account that was opened before, whole: it comes from a file. Not for a client that has one here."""
        assert account.client not in self._accounts
        self._accounts[account.client] = account
        self.episodes += account.report.episodes
        self.steps += account.report.steps
        self.accepted_caches += account.accepted_caches
        self.gone += account.report.leaving
        self._enter(account, 1)

    def move(self, account: Account, table: int) -> None:
        """The client belongs to this table from now on, with all that it has counted."""
        self._enter(account, -1)
        account.table = table
        self._enter(account, 1)

    def _enter(self, account: Account, sign: int) -> None:
        """Add an account to the sums of its table, or take it off."""
        self.present[account.table] += sign * (not account.report.leaving)
        self.table_episodes[account.table] += sign * account.report.episodes
        self.table_steps[account.table] += sign * account.report.steps

    def find(self, client: bytes) -> Account | None:
        """The client's account, when it has one."""
        return self._accounts.get(client)

    def report(self, client: bytes, sequence: int, update: Update, now: float, table: int = 0) -> Account:
        """Merge what a client says: each sum by maximum, the state of its memory by the newest sequence.

        What it counts per home is not taken from before this account was opened: it is about a former one.

        Raises:
            ProtocolError: a scalar or return is not finite, or the ledger is full; nothing was changed.
        """
        _check(update)
        account = self.account(client, now, table)
        old = account.report
        said = update if sequence > account.sequence else old
        mine = update if update.epoch >= account.since else old
        sums = {name: max(getattr(old, name), getattr(update, name)) for name in _SUMS}
        sums |= {name: max(getattr(old, name), getattr(mine, name)) for name in _HOME_SUMS}
        account.report = msgspec.structs.replace(said, **sums, lines=[], ended=[])
        account.sequence = max(account.sequence, sequence)
        self.episodes += account.report.episodes - old.episodes
        self.steps += account.report.steps - old.steps
        self.gone += account.report.leaving - old.leaving
        self.present[account.table] -= account.report.leaving - old.leaving
        self.table_episodes[account.table] += account.report.episodes - old.episodes
        self.table_steps[account.table] += account.report.steps - old.steps
        self._take_ended(account, update)
        return account

    def _take_ended(self, account: Account, update: Update) -> None:
        for ended in update.ended:
            if ended.number > account.ended_through:
                account.ended_through = ended.number
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
        """
        account = self.account(client, now, table)
        if since not in (0, account.since):
            self.strays += 1
            return None
        account.received_caches += 1
        account.received_bytes += byte_count
        account.seen_caches = max(account.seen_caches, number)
        account.seen_bytes = max(account.seen_bytes, pushed_bytes)
        account.last_cache = now
        return account

    def accepted(self, account: Account, byte_count: int, samples: int) -> None:
        """The cache that arrived is held."""
        account.accepted_caches += 1
        account.accepted_bytes += byte_count
        account.accepted_samples += samples
        self.accepted_caches += 1

    def rejected(self, account: Account, code: str) -> None:
        """The cache that arrived was not taken, for the reason `code`."""
        if code not in account.rejected and len(account.rejected) >= MOST_CODES:
            code = "other"
        account.rejected[code] = account.rejected.get(code, 0) + 1

    def active(self, since: float) -> list[Account]:
        """Accounts of clients that have not said goodbye, and were heard from `since` then."""
        return [account for account in self if account.last_seen >= since and not account.report.leaving]

    def totals(self) -> Totals:
        """Sums over all accounts; the cost grows with their number."""
        accounts = list(self)
        reports = [account.report for account in accounts]
        return Totals(
            clients=len(accounts),
            gone=self.gone,
            episodes=self.episodes,
            steps=self.steps,
            pushed_caches=sum(account.pushed_caches for account in accounts),
            pushed_bytes=sum(account.pushed_bytes for account in accounts),
            skipped_caches=sum(report.skipped for report in reports),
            generated_bytes=sum(report.generated_bytes for report in reports),
            received_caches=sum(account.received_caches for account in accounts),
            received_bytes=sum(account.received_bytes for account in accounts),
            accepted_caches=self.accepted_caches,
            accepted_bytes=sum(account.accepted_bytes for account in accounts),
            accepted_samples=sum(account.accepted_samples for account in accounts),
            rejected_caches=sum(sum(account.rejected.values()) for account in accounts),
            lost_caches=sum(account.lost_caches for account in accounts),
            lost_bytes=sum(account.lost_bytes for account in accounts),
            dropped_lines=sum(report.dropped_lines for report in reports),
            returns_count=sum(account.returns_count for account in accounts),
            returns_sum=math.fsum(account.returns_sum for account in accounts),
            applied=sum(report.applied for report in reports),
            stale=sum(report.stale for report in reports),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where running sums and accounts disagree."""
        assert self.episodes == sum(account.report.episodes for account in self)
        assert self.steps == sum(account.report.steps for account in self)
        assert self.accepted_caches == sum(account.accepted_caches for account in self)
        assert self.gone == sum(account.report.leaving for account in self)
        for sums, name in ((self.table_episodes, "episodes"), (self.table_steps, "steps")):
            assert sums.total() == getattr(self, name)
            for table in {account.table for account in self}:
                assert sums[table] == sum(getattr(a.report, name) for a in self if a.table == table)
        assert +self.present == Counter(account.table for account in self if not account.report.leaving)
        for client, account in self._accounts.items():
            assert account.client == client
            assert not account.report.lines and not account.report.ended
            received = account.accepted_caches + sum(account.rejected.values())
            assert account.received_caches == received
            assert account.pushed_caches == received + account.lost_caches + account.in_flight_caches
            assert account.pushed_bytes == account.received_bytes + account.lost_bytes + account.in_flight
            assert account.received_bytes >= account.accepted_bytes


def sums_of(account: Account | None) -> tuple[int, ...] | None:
    """All that a client's message may add to its account: two of these differ when there is something to save."""
    if account is None:
        return None
    report = account.report
    return (*(getattr(report, name) for name in (*_SUMS, *_HOME_SUMS)), report.leaving, account.ended_through)


def _check(update: Update) -> None:
    """What the wire's bounds leave open: numbers that are not finite would spoil every sum they enter."""
    for name, value in update.scalars.items():
        if not math.isfinite(value):
            raise ProtocolError("value", f"scalar {name!r} is {value}; only finite numbers are kept")
    for ended in update.ended:
        if not abs(ended.returned) <= MOST_RETURN:  # NaN is not, either
            expected = f"it must be finite, and at most {MOST_RETURN:g}"
            raise ProtocolError("value", f"the return of episode {ended.number} is {ended.returned}; {expected}")


class Window:
    """A client's side of its account at one home: how many bytes may be on the way there, and what became of each.

    Always: pushed == received + lost + in flight, in caches and in bytes. Lost is what a later cache has overtaken (the
    server says so), and what was pushed long before an answered request and had not arrived by then; when it arrives
    after all, it is no longer lost.

    Not thread-safe: the owner locks.
    """

    def __init__(self, credit: int, *, lost_after: float = 15.0) -> None:
        self.credit = credit
        """Bytes that may be in flight; one cache may always go when nothing is."""
        self.pushed_caches = 0
        self.pushed_bytes = 0
        self.accepted_caches = 0
        self.received_caches = 0
        """Accepted and rejected ones."""
        self.received_bytes = 0
        self.rejected: dict[str, int] = {}
        self._lost_after = lost_after
        self._through = (0, 0)  # caches and bytes pushed: what lies before was received or is lost
        self._waiting: deque[tuple[float, tuple[int, int]]] = deque()  # (time, caches and bytes then) beyond it

    @property
    def lost_caches(self) -> int:
        """Caches that were pushed and are given up."""
        return max(0, self._through[0] - self.received_caches)

    @property
    def lost_bytes(self) -> int:
        """Bytes that were pushed and are given up."""
        return max(0, self._through[1] - self.received_bytes)

    @property
    def in_flight_caches(self) -> int:
        """Caches of which nobody knows yet."""
        return self.pushed_caches - self.received_caches - self.lost_caches

    @property
    def in_flight(self) -> int:
        """Bytes of which nobody knows yet."""
        return self.pushed_bytes - self.received_bytes - self.lost_bytes

    def has_room(self, byte_count: int) -> bool:
        """Whether a cache of this size may go now."""
        return self.in_flight == 0 or self.in_flight + byte_count <= self.credit

    @property
    def is_half_used(self) -> bool:
        """Whether it is time to ask the server what arrived."""
        return 2 * self.in_flight >= self.credit

    def pushed(self, byte_count: int, now: float) -> None:
        """A cache of this size was handed to the socket."""
        self.pushed_caches += 1
        self.pushed_bytes += byte_count
        self._waiting.append((now, (self.pushed_caches, self.pushed_bytes)))

    def answered(
        self,
        accepted: int,
        received: int,
        lost: int,
        rejected: Mapping[str, int],
        asked_at: float,
        *,
        lost_caches: int = 0,
    ) -> None:
        """The account's sums, in answer to a request that was first sent at `asked_at`; `received`, `lost` in bytes."""
        # Never more than was pushed, though somebody may use this client's id.
        received, accepted = min(received, self.pushed_bytes), min(accepted, self.pushed_caches)
        came = min(accepted + sum(rejected.values()), self.pushed_caches)
        # An answer may be late, and a server that was killed may have forgotten its newest caches: those are lost.
        if came >= self.received_caches:
            self.accepted_caches, self.received_caches, self.rejected = accepted, came, dict(rejected)
        self.received_bytes = max(self.received_bytes, received)
        if lost or lost_caches:
            self._reach(min(self.pushed_caches, came + lost_caches), min(self.pushed_bytes, received + lost))
        while self._waiting:
            pushed_at, (caches, byte_count) = self._waiting[0]
            is_known = caches <= max(self._through[0], self.received_caches) and byte_count <= max(
                self._through[1], self.received_bytes
            )
            if not is_known and pushed_at > asked_at - self._lost_after:
                break
            self._waiting.popleft()
            if not is_known:
                self._reach(caches, byte_count)

    def _reach(self, caches: int, byte_count: int) -> None:
        self._through = max(self._through[0], caches), max(self._through[1], byte_count)

    def give_up(self) -> None:
        """Nobody will say any more what became of what is on the way: it is lost, unless the home is asked again."""
        self._through = self.pushed_caches, self.pushed_bytes
        self._waiting.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError where bytes or caches are not accounted for."""
        assert min(self.in_flight, self.lost_bytes, self.in_flight_caches, self.lost_caches) >= 0
        assert self.pushed_bytes == self.received_bytes + self.lost_bytes + self.in_flight
        assert self.pushed_caches == self.received_caches + self.lost_caches + self.in_flight_caches
        assert self.received_caches == min(self.pushed_caches, self.accepted_caches + sum(self.rejected.values()))


@dataclass(slots=True)
class Pushes:
    """What became of the caches that a client pushed, to all of its homes."""

    pushed_caches: int = 0
    pushed_bytes: int = 0
    accepted_caches: int = 0
    received_bytes: int = 0
    lost_caches: int = 0
    lost_bytes: int = 0
    in_flight_caches: int = 0
    in_flight_bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    def add(self, window: Window) -> None:
        """Add those of one account."""
        self.pushed_caches += window.pushed_caches
        self.pushed_bytes += window.pushed_bytes
        self.accepted_caches += window.accepted_caches
        self.received_bytes += window.received_bytes
        self.lost_caches += window.lost_caches
        self.lost_bytes += window.lost_bytes
        self.in_flight_caches += window.in_flight_caches
        self.in_flight_bytes += window.in_flight
        for code, count in window.rejected.items():
            self.rejected[code] = self.rejected.get(code, 0) + count


class Windows:
    """A client's windows, one for each account that a home has opened for it. Not thread-safe: the owner locks.

    home a ──▶ home b ──▶ home a      back at a, its numbers go on, since a says that it knows this client `since` then
                                      as before; an a that has forgotten everything says a later `since`: from zero

    What is on the way when a client moves is lost, unless it comes back and hears otherwise.
    """

    def __init__(self, credit: int, *, lost_after: float = 15.0) -> None:
        self.now = Window(credit, lost_after=lost_after)
        """The one towards the present home."""
        self._lost_after = lost_after
        self._key = (0, 0, 0)  # run, home and since of `now`; zeros before the first WELCOME
        self._left: OrderedDict[tuple[int, int, int], Window] = OrderedDict()  # the newest last
        self._forgotten = Pushes()  # of accounts that were left so long ago that only their sums are kept

    def belong(self, run: int, home: int, since: int) -> None:
        """From now on caches go to this account."""
        key = (run, home, since)
        if key == self._key:
            return
        self.now.give_up()
        self._left[self._key] = self.now
        credit = self.now.credit
        self.now = self._left.pop(key) if key in self._left else Window(credit, lost_after=self._lost_after)
        self.now.credit, self._key = credit, key
        while len(self._left) > MOST_HOMES:
            self._forgotten.add(self._left.popitem(last=False)[1])

    def sums(self) -> Pushes:
        """Over all accounts."""
        sums = replace(self._forgotten, rejected=dict(self._forgotten.rejected))
        for window in (*self._left.values(), self.now):
            sums.add(window)
        return sums

    def check_invariants(self) -> None:
        """Raise AssertionError where bytes or caches are not accounted for."""
        for window in (*self._left.values(), self.now):
            window.check_invariants()
        assert not any(window.in_flight or window.in_flight_caches for window in self._left.values())
