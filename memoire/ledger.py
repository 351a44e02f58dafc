"""Who counted what: cumulative totals of every client at a server, and a client's byte window towards its server.

Pure: no clock, no socket. Totals travel as sums since the client began, never as increments, so that a message may be
lost, doubled or late without changing what is counted: the greater number wins.

    client 7 says     episodes 3     episodes 5     (again) 3      the ledger holds 5
    client 9 says                    episodes 2                    the ledger holds 2      total 7
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from .errors import ProtocolError
from .wire import Ended, Update

MOST_CLIENTS = 1 << 16
"""Clients that one ledger keeps; a stranger who makes up names cannot fill the memory."""
MOST_CODES = 32
RECENT_EPISODES = 1000

_SUMS = (
    "episodes",
    "steps",
    "caches",
    "cache_bytes",
    "shipped_episodes",
    "skipped",
    "generated_bytes",
    "dropped_lines",
    "applied",
    "stale",
    "feedback_through",
)


@dataclass(slots=True)
class Account:
    """One client at one server; the ledger's owner holds the lock under which it changes."""

    client: bytes
    first_seen: float
    last_seen: float
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
    def in_flight(self) -> int:
        """Bytes that the client pushed and that neither arrived nor were overtaken by a later one that did."""
        return max(0, self.report.cache_bytes - max(self.seen_bytes, self.received_bytes))


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all clients of a ledger."""

    clients: int = 0
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
    """Accounts of all clients of one run at one server. Not thread-safe: the owner locks."""

    def __init__(self, *, most_clients: int = MOST_CLIENTS) -> None:
        self._accounts: dict[bytes, Account] = {}
        self._most_clients = most_clients
        self.episodes = 0
        """Episodes that all clients closed; a running sum, so that reading it costs nothing."""
        self.steps = 0
        self.accepted_caches = 0
        self.ended: deque[tuple[bytes, Ended]] = deque(maxlen=RECENT_EPISODES)
        """The newest closed episodes with who closed them, oldest first."""

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, client: object) -> bool:
        return client in self._accounts

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def account(self, client: bytes, now: float) -> Account:
        """The client's account, opened when it is new.

        Raises:
            ProtocolError: (code "busy") the ledger is full.
        """
        account = self._accounts.get(client)
        if account is None:
            if len(self._accounts) >= self._most_clients:
                raise ProtocolError("busy", f"this server already counts {self._most_clients} clients")
            account = self._accounts[client] = Account(client, now, now)
        account.last_seen = now
        return account

    def find(self, client: bytes) -> Account | None:
        """The client's account, when it has one."""
        return self._accounts.get(client)

    def report(self, client: bytes, sequence: int, update: Update, now: float) -> Account:
        """Merge what a client says: each sum by maximum, the state of its memory by the newest sequence.

        Raises:
            ProtocolError: a scalar or return is not finite, or the ledger is full; nothing was changed.
        """
        _check(update)
        account = self.account(client, now)
        old = account.report
        said = update if sequence > account.sequence else old
        sums = {name: max(getattr(old, name), getattr(update, name)) for name in _SUMS}
        account.report = msgspec.structs.replace(said, **sums, lines=[], ended=[])
        account.sequence = max(account.sequence, sequence)
        self.episodes += account.report.episodes - old.episodes
        self.steps += account.report.steps - old.steps
        self._take_ended(account, update)
        return account

    def _take_ended(self, account: Account, update: Update) -> None:
        for ended in update.ended:
            if ended.number > account.ended_through:
                account.ended_through = ended.number
                account.returns_count += 1
                account.returns_sum += ended.returned
                self.ended.append((account.client, ended))

    def arrived(self, client: bytes, byte_count: int, now: float, number: int = 0, pushed_bytes: int = 0) -> Account:
        """A cache of this size came; `number` and `pushed_bytes` are what it says the client has pushed with it."""
        account = self.account(client, now)
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

    def totals(self) -> Totals:
        """Sums over all accounts; the cost grows with their number."""
        accounts = list(self)
        reports = [account.report for account in accounts]
        return Totals(
            clients=len(accounts),
            episodes=self.episodes,
            steps=self.steps,
            pushed_caches=sum(report.caches for report in reports),
            pushed_bytes=sum(report.cache_bytes for report in reports),
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
        for client, account in self._accounts.items():
            assert account.client == client
            assert not account.report.lines and not account.report.ended
            assert account.received_caches >= account.accepted_caches + sum(account.rejected.values())
            assert account.received_bytes >= account.accepted_bytes


def _check(update: Update) -> None:
    """What the wire's bounds leave open: numbers that are not finite would spoil every sum they enter."""
    for name, value in update.scalars.items():
        if not math.isfinite(value):
            raise ProtocolError("value", f"scalar {name!r} is {value}; only finite numbers are kept")
    for ended in update.ended:
        if not math.isfinite(ended.returned):
            raise ProtocolError("value", f"the return of episode {ended.number} is {ended.returned}; it must be finite")


class Window:
    """A client's side of the account: how many bytes may be on the way to its server, and what became of each.

    Always: pushed == received + lost + in flight. Lost is what a later cache has overtaken (the server says so), and
    what was pushed long before an answered request and had not arrived by then; when it arrives after all,
    `lost_bytes` goes down again. A server that starts anew counts from zero: what the former one received stays
    received (`_before`).

    Not thread-safe: the owner locks.
    """

    def __init__(self, credit: int, *, lost_after: float = 15.0) -> None:
        self.credit = credit
        """Bytes that may be in flight; one cache may always go when nothing is."""
        self.pushed_caches = 0
        self.pushed_bytes = 0
        self.accepted_caches = 0
        self.received_bytes = 0
        self.rejected: dict[str, int] = {}
        self._lost_after = lost_after
        self._through = 0  # a position in pushed_bytes: what lies before it was received or is lost
        self._waiting: deque[tuple[float, int]] = deque()  # (time, pushed_bytes then) of pushes beyond it
        self._pushed_before = (0, 0)  # caches, bytes pushed before the server as it is now began
        self._accepted_before = 0
        self._received_before = 0

    @property
    def _known(self) -> int:
        lost_before = self._pushed_before[1] - self._received_before
        return max(self._through, lost_before + self.received_bytes)

    @property
    def lost_bytes(self) -> int:
        """Bytes that were pushed and are given up."""
        return self._known - self.received_bytes

    @property
    def in_flight(self) -> int:
        """Bytes of which nobody knows yet."""
        return self.pushed_bytes - self._known

    @property
    def pushed_here(self) -> tuple[int, int]:
        """Caches and bytes pushed to the server as it is now: what it is told."""
        return self.pushed_caches - self._pushed_before[0], self.pushed_bytes - self._pushed_before[1]

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
        self._waiting.append((now, self.pushed_bytes))

    def answered(self, accepted: int, received: int, lost: int, rejected: Mapping[str, int], asked_at: float) -> None:
        """The server's sums since it began, in answer to a request that was first sent at `asked_at`."""
        # Never more than was pushed to it: what was on the way to the former server is lost, wherever it was delivered.
        received = min(received, self.pushed_here[1])
        self.accepted_caches = max(self.accepted_caches, self._accepted_before + accepted)
        self.received_bytes = max(self.received_bytes, self._received_before + received)
        self.rejected = dict(rejected)
        if lost:
            self._through = max(self._through, min(self.pushed_bytes, self._pushed_before[1] + received + lost))
        while self._waiting and (
            self._waiting[0][1] <= self._known or self._waiting[0][0] <= asked_at - self._lost_after
        ):
            self._through = max(self._through, self._waiting.popleft()[1])

    def restarted(self) -> None:
        """The server began anew and counts from zero; what was on the way is given up."""
        self._pushed_before = (self.pushed_caches, self.pushed_bytes)
        self._accepted_before = self.accepted_caches
        self._received_before = self.received_bytes
        self._through = self.pushed_bytes
        self._waiting.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError where bytes are not accounted for."""
        assert self.in_flight >= 0 and self.lost_bytes >= 0 and self.received_bytes >= 0
        assert self.pushed_bytes == self.received_bytes + self.lost_bytes + self.in_flight
