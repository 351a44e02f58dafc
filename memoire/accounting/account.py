"""Account of one client at one server, and sums over all accounts of a server.

Store of accounts that are not in memory, and their sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from operator import add, attrgetter
from typing import Annotated, Final

from memoire.figures import counter, gauge, shown
from memoire.wire.messages import Update

REPORT_SUMS = ("episodes", "steps", "skipped", "generated_bytes", "dropped_lines", "applied", "stale", "gone")
"""Cumulative sums in a report; of two reports the greater number holds."""
HOME_SUMS = ("caches", "cache_bytes")
"""Sums in a report that a client counts for each home server separately."""
TABLE_SUMS = ("episodes", "steps", "applied", "stale", "lost_feedback")
"""Sums that a ledger also has for each table."""


FEEDBACK: Final = counter(
    "feedback_samples", "TD errors",
    "TD errors from learners: given = applied + superseded + gone + stale + lost + waiting.", label="outcome",
)  # fmt: skip
DROPPED_CACHES: Final = counter(
    "dropped_caches", "Caches not used",
    "Caches that were not used, by reason: skipped for lack of credit, rejected on arrival, overwritten unused.",
    label="reason",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FeedbackCounts:
    """Outcomes of the TD errors that learners gave for entries of one or several owners.

    At all times given = applied + superseded + gone + stale + lost + waiting.
    """

    # fmt: off
    given: Annotated[int, FEEDBACK("given")] = 0
    applied: Annotated[int, FEEDBACK("applied")] = 0
    """The owner has set the priority and acknowledged it."""
    superseded: Annotated[int, FEEDBACK("superseded")] = 0
    """A newer TD error of the same entry came before the older one was sent."""
    gone: Annotated[int, FEEDBACK("gone")] = 0
    """The entry was overwritten before the TD error was given."""
    stale: Annotated[int, FEEDBACK("stale")] = 0
    """The entry was overwritten while the TD error waited, or the TD error could not be used."""
    lost: Annotated[int, FEEDBACK("lost")] = 0
    """The owner never fetches the TD error: owner or server ended, the owner is unknown, or too many waited."""
    waiting: Annotated[int, gauge("feedback_waiting_samples", "Waiting", "TD errors that clients have not "
        "acknowledged.")] = 0
    """TD errors that were sent but not acknowledged are included."""
    # fmt: on

    def __add__(self, other: FeedbackCounts) -> FeedbackCounts:
        return FeedbackCounts(*map(add, astuple(self), astuple(other)))

    @property
    def is_balanced(self) -> bool:
        """True if each TD error has exactly one outcome."""
        counts: tuple[int, ...] = astuple(self)
        return min(counts) >= 0 and 2 * self.given == sum(counts)


FEEDBACK_OUTCOMES = ("given", "applied", "superseded", "gone", "stale")
"""Fields of `FeedbackCounts` that a packed account keeps beside `lost`: waiting TD errors end with the process."""


@dataclass(slots=True)
class Account:
    """Counts of one client at one server; guarded by the lock of the ledger's owner."""

    client: bytes
    first_seen: float
    last_seen: float
    since: int = 0
    """Ledger's `since` at the opening of the account, an epoch of the home: the client's counts for its home (caches)
    begin then.
    """
    report: Update = field(default_factory=Update)
    """Greatest sums of all reports, and other values of the newest report; without lines and episodes."""
    sequence: int = -1
    """Sequence number of the newest report."""
    lines_through: int = 0
    """Number of the newest stored log line."""
    ended_through: int = 0
    """Number of the newest counted episode."""
    returns_count: int = 0
    returns_sum: float = 0.0
    received_caches: int = 0
    received_bytes: int = 0
    """Payload bytes of all caches that arrived, accepted or rejected."""
    seen_caches: int = 0
    seen_bytes: int = 0
    """Bytes that the client had pushed with the newest cache that arrived; `seen_caches` counts the caches."""
    accepted_caches: int = 0
    accepted_bytes: int = 0
    accepted_samples: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    waiting_feedback: int = 0
    """TD errors that the client has not acknowledged yet; only in memory."""
    lost_feedback: int = 0
    """TD errors that the client never fetched: it ended, or too many waited for it."""
    given_feedback: int = 0
    """TD errors that this server received for the client's entries; `FeedbackCounts` has their outcomes."""
    applied_feedback: int = 0
    superseded_feedback: int = 0
    gone_feedback: int = 0
    stale_feedback: int = 0
    seen_feedback: tuple[int, int] = (0, 0)
    """`applied` and `gone` of the newest report whose feedback was counted; only in memory."""
    last_cache: float = 0.0
    """Arrival time of the newest cache; only in memory."""
    label: int = 0
    """32-bit uuid of the client's log lines."""
    host: str = ""
    """Host of the client, from its HELLO; only in memory."""
    table: int = 0
    """Number of the client's table."""
    newest_models: Mapping[str, int] = field(default_factory=dict)
    """Newest version of each topic at the client's last report; only in memory. Never modified in place."""
    owner: str = ""
    """Role and name of the key that opened the account; no other key may use it. "" if the server requires no keys."""

    def count_arrived_cache(self, byte_count: int, number: int, pushed_bytes: int, now: float) -> None:
        """Count a cache that arrived; `number` and `pushed_bytes` are the client's totals of pushes with this cache."""
        self.received_caches += 1
        self.received_bytes += byte_count
        self.seen_caches = max(self.seen_caches, number)
        self.seen_bytes = max(self.seen_bytes, pushed_bytes)
        self.last_cache = self.last_seen = now

    def copy(self) -> Account:
        """Return a snapshot of the account, which later changes do not affect."""
        copied = Account(*_facts(self))
        copied.rejected = dict(self.rejected)
        return copied

    def check_invariants(self) -> None:
        """Raise AssertionError if the account's numbers disagree."""
        assert not self.report.lines and not self.report.ended
        received = self.accepted_caches + self.rejected_caches
        assert self.received_caches == received
        assert self.pushed_caches == received + self.lost_caches + self.in_flight_caches
        assert self.pushed_bytes == self.received_bytes + self.lost_bytes + self.in_flight
        assert self.received_bytes >= self.accepted_bytes
        assert self.feedback.is_balanced, self.feedback

    @property
    def feedback(self) -> FeedbackCounts:
        """Outcomes of the TD errors that learners gave for the client's entries."""
        return FeedbackCounts(*_feedback(self))

    @property
    def rejected_caches(self) -> int:
        """Caches that arrived and were rejected."""
        return sum(self.rejected.values())

    @property
    def overtaken_caches(self) -> int:
        """Caches that have not arrived although a later cache has."""
        return max(0, self.seen_caches - self.received_caches)

    @property
    def overtaken_bytes(self) -> int:
        """Bytes of the caches that have not arrived although a later cache has."""
        return max(0, self.seen_bytes - self.received_bytes)

    @property
    def lost_caches(self) -> int:
        """Overtaken caches; once the client has left, all caches that have not arrived, since no cache follows."""
        return self.pushed_caches - self.received_caches if self.report.leaving else self.overtaken_caches

    @property
    def lost_bytes(self) -> int:
        """Bytes of the lost caches."""
        return self.pushed_bytes - self.received_bytes if self.report.leaving else self.overtaken_bytes

    @property
    def pushed_caches(self) -> int:
        """Caches that the client has pushed, by the greatest number in its messages: received + lost + in flight."""
        return max(self.report.caches, self.seen_caches, self.received_caches)

    @property
    def pushed_bytes(self) -> int:
        """Bytes of the pushed caches."""
        return max(self.report.cache_bytes, self.seen_bytes, self.received_bytes)

    @property
    def in_flight_caches(self) -> int:
        """Pushed caches that neither arrived nor are lost."""
        return self.pushed_caches - self.received_caches - self.lost_caches

    @property
    def in_flight(self) -> int:
        """Bytes of the pushed caches that neither arrived nor are lost."""
        return self.pushed_bytes - self.received_bytes - self.lost_bytes


_facts = attrgetter(*Account.__slots__)
_feedback = attrgetter(*(f"{name}_feedback" for name in FeedbackCounts.__slots__))
_sums = attrgetter(*REPORT_SUMS, *HOME_SUMS)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all clients of a ledger."""

    # fmt: off
    clients: int = 0
    gone: int = 0
    """Number of clients that have left."""
    episodes: Annotated[int, counter("episodes", "Episodes", "Episodes of this run that clients closed.",
        docs="guarantees.md")] = 0
    steps: Annotated[int, counter("steps", "Steps", "Entries of this run that clients recorded.",
        docs="guarantees.md")] = 0
    pushed_caches: Annotated[int, counter("pushed_caches", "Caches pushed", "Pushed caches, as clients report.",
        formula="accepted + rejected + lost + on the way")] = 0
    pushed_bytes: int = 0
    skipped_caches: Annotated[int, DROPPED_CACHES("skipped", "Skipped", formula="skipped ÷ (skipped + pushed)",
        docs="cluster.md"), counter("skipped_caches", "Skipped", "Caches that clients did not push, because their "
        "credit was used up: too many of their bytes were on the way. They went on to act instead of waiting.",
        of="cluster")] = 0
    generated_bytes: Annotated[int, counter("generated_bytes", "Recorded", "Bytes of all entries that the clients "
        "recorded, each entry once.", docs="development/records/storage.md")] = 0
    received_caches: int = 0
    received_bytes: Annotated[int, counter("received_bytes", "Received", "Bytes of caches or episodes that arrived.",
        docs="development/records/storage.md")] = 0
    accepted_caches: Annotated[int, counter("caches", "Caches", "Caches of this run that were accepted: packets of "
        "samples that clients drew from their own memories.", docs="tables.md")] = 0
    accepted_bytes: int = 0
    accepted_samples: int = 0
    rejected_caches: Annotated[int, DROPPED_CACHES("rejected", "Rejected", docs="errors.md"), counter("rejected_caches",
        "Rejected", "Caches that were rejected on arrival, such as those of another schema.", of="cluster")] = 0
    lost_caches: Annotated[int, gauge("missing_caches", "Lost", "Caches that a later one overtook, or whose client "
        "left first. The figure falls if they arrive later.", docs="guarantees.md")] = 0
    lost_bytes: int = 0
    dropped_lines: Annotated[int, counter("dropped_log_lines", "Log lines dropped", "Log lines that clients dropped "
        "because too many waited to be sent.", docs="settings.md")] = 0
    returns_count: int = 0
    returns_sum: float = 0.0
    applied: Annotated[int, shown("Priorities set", "TD errors that learners reported and that became priorities.",
        docs="sampling.md")] = 0
    stale: Annotated[int, shown("Too late", "TD errors that arrived after their entry was overwritten. They change "
        "nothing.", docs="sampling.md")] = 0
    lost_feedback: Annotated[int, shown("Not fetched", "TD errors that were not fetched, because the client had ended "
        "or too many waited for it.")] = 0
    # fmt: on


def attribute_path(name: str) -> str:
    """Return the path of a count's attribute in an `Account`: of the account, or of its report."""
    return f"report.{name}" if name in REPORT_SUMS else name


_COUNTED = tuple(n for n in Totals.__slots__ if n not in ("clients", "gone", "skipped_caches", "returns_sum"))
_counted = attrgetter(*map(attribute_path, _COUNTED))


def counts_of(account: Account) -> dict[str, int]:
    """Return the counts that an account adds to `Totals`, without returns_sum."""
    report = account.report
    counts = {"clients": 1, "gone": int(report.leaving), "skipped_caches": report.skipped}
    return counts | dict(zip(_COUNTED, _counted(account), strict=True))


def counts_something(update: Update) -> bool:
    """Return True if a report contains counts, lines or episodes, and is more than a heartbeat."""
    return any(_sums(update)) or bool(update.lines or update.ended)


def sums_of(account: Account | None) -> tuple[int, ...] | None:
    """Return the numbers of an account that a report may change; a difference means that there is something to save."""
    if account is None:
        return None
    report = account.report
    return (*_sums(report), report.leaving, account.lines_through, account.ended_through)


class ExactSum:
    """Sum of floats without rounding: adding and then subtracting a number restores the sum exactly."""

    def __init__(self) -> None:
        self._units = 0  # units of 2**-1074; every float is a whole number of units

    def add(self, value: float, sign: int = 1) -> None:
        """Add a finite number, or subtract it if sign is -1."""
        numerator, denominator = value.as_integer_ratio()
        self._units += sign * (numerator << (1075 - denominator.bit_length()))

    @property
    def value(self) -> float:
        """Sum as a float, rounded once."""
        return self._units / (1 << 1074)


class FoldedSums:
    """Sums over accounts that are not in memory."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Sums by the names of `Totals`, without returns_sum."""
        self.returns = ExactSum()
        self.tables: dict[str, Counter[int]] = {name: Counter() for name in TABLE_SUMS}
        """`TABLE_SUMS` of each table, by its number."""
        self.feedback: Counter[str] = Counter()
        """Sums of outcomes of TD errors, by the names of `FeedbackCounts`."""

    def add(self, account: Account, sign: int = 1) -> None:
        """Add an account, or subtract it if sign is -1."""
        counts = counts_of(account)
        for name, value in counts.items():
            self.counts[name] += sign * value
        for name, value in asdict(account.feedback).items():
            self.feedback[name] += sign * value
        self.returns.add(account.returns_sum, sign)
        for name, sums in self.tables.items():
            sums[account.table] += sign * counts[name]


class AccountStore:
    """Store of one run's accounts that are not in memory (see `KeptAccounts`). The base class keeps no accounts, for a
    ledger that never folds accounts.
    """

    def find(self, client: bytes) -> Account | None:
        """Return the newest version of a client's own account, or None."""
        return None

    def numbers_elsewhere(self, client: bytes) -> tuple[int, int]:
        """Return the numbers of the newest line and episode in the client's accounts from other servers, or zeros."""
        return 0, 0

    def store(self, account: Account) -> None:
        """Store an account that leaves memory; it does not change any more."""
        assert account is None, "a ledger that folds needs a store"

    def sums(self) -> FoldedSums:
        """Return the sums over all stored accounts, without those of other servers."""
        return FoldedSums()


class SumsOnlyStore(AccountStore):
    """An `AccountStore` that discards accounts: only their sums stay, in the ledger."""

    def store(self, account: Account) -> None:
        """Discard the account: the ledger has added it to its sums."""
