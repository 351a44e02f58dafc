"""What one client has counted at one server, and what all of them come to.

Accounts that are not in memory: where they are kept, and what they add up to.
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
"""Sums that a report brings; the greater number wins."""
HOME_SUMS = ("caches", "cache_bytes")
"""Those that a client counts for each home anew."""
TABLE_SUMS = ("episodes", "steps", "applied", "stale", "lost_feedback")
"""What is added up for each table, too."""


FEEDBACK: Final = counter(
    "feedback_samples", "TD errors",
    "TD errors from learners: given = applied + superseded + gone + stale + lost + waiting.", label="outcome",
)  # fmt: skip
DROPPED_CACHES: Final = counter(
    "dropped_caches", "Caches not used",
    "Caches that were not used, by reason: skipped for want of credit, rejected on arrival, overwritten unused.",
    label="reason",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FeedbackCounts:
    """What became of the TD errors that learners gave for the entries of one owner, or of several owners.

    At every moment given = applied + superseded + gone + stale + lost + waiting.
    """

    # fmt: off
    given: Annotated[int, FEEDBACK("given")] = 0
    applied: Annotated[int, FEEDBACK("applied")] = 0
    """The owner has set the priority, and said so."""
    superseded: Annotated[int, FEEDBACK("superseded")] = 0
    """A newer TD error of the same entry came before this one was sent."""
    gone: Annotated[int, FEEDBACK("gone")] = 0
    """The entry was gone before the TD error was given."""
    stale: Annotated[int, FEEDBACK("stale")] = 0
    """The entry went while the TD error waited, or could not be used."""
    lost: Annotated[int, FEEDBACK("lost")] = 0
    """The owner will never fetch it: it ended, is not known, or the server ended; or too many waited."""
    waiting: Annotated[int, gauge("feedback_waiting_samples", "Waiting", "TD errors that clients have not "
        "acknowledged.")] = 0
    """Sent ones that the owner has not acknowledged are among them."""
    # fmt: on

    def __add__(self, other: FeedbackCounts) -> FeedbackCounts:
        return FeedbackCounts(*map(add, astuple(self), astuple(other)))

    @property
    def is_balanced(self) -> bool:
        """Whether each TD error is in one place."""
        counts: tuple[int, ...] = astuple(self)
        return min(counts) >= 0 and 2 * self.given == sum(counts)


FEEDBACK_OUTCOMES = ("given", "applied", "superseded", "gone", "stale")
"""What is kept of `FeedbackCounts` beside what is lost: what waits ends with the process."""


@dataclass(slots=True)
class Account:
    """One client at one server; the ledger's owner holds the lock under which it changes."""

    client: bytes
    first_seen: float
    last_seen: float
    since: int = 0
    """The epoch since which the home had forgotten nothing when it was opened: what is per home (the client's caches)
    counts from then.
    """
    report: Update = field(default_factory=Update)
    """Greatest sums, and the state of the client's memory as its newest message says; without lines and episodes."""
    sequence: int = -1
    """Number of that newest message."""
    lines_through: int = 0
    """Number of the newest log line that was taken."""
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
    waiting_feedback: int = 0
    """Priorities that learners have set and that the client has not fetched yet; only in memory."""
    lost_feedback: int = 0
    """Priorities that it never fetched: it ended, or too many waited for it."""
    given_feedback: int = 0
    """What became of all TD errors that this server was given for its entries: see `FeedbackCounts`."""
    applied_feedback: int = 0
    superseded_feedback: int = 0
    gone_feedback: int = 0
    stale_feedback: int = 0
    seen_feedback: tuple[int, int] = (0, 0)
    """`applied` and `gone` of the newest report that was looked at; only in memory."""
    last_cache: float = 0.0
    """When the newest cache arrived; only in memory."""
    label: int = 0
    """Of its log lines."""
    host: str = ""
    """Where it runs, as it says; only in memory."""
    table: int = 0
    """Number of the table that it belongs to."""
    newest_models: Mapping[str, int] = field(default_factory=dict)
    """Newest version of each topic when it reported last; only in memory. Nobody changes it."""
    owner: str = ""
    """Whose key it was opened with, as role and name: nobody else may speak for it. "" where no keys are asked for."""

    def arrived(self, byte_count: int, number: int, pushed_bytes: int, now: float) -> None:
        """A cache of this size came; with it the client had pushed so many caches and bytes."""
        self.received_caches += 1
        self.received_bytes += byte_count
        self.seen_caches = max(self.seen_caches, number)
        self.seen_bytes = max(self.seen_bytes, pushed_bytes)
        self.last_cache = self.last_seen = now

    def copy(self) -> Account:
        """The account as it is now, which nobody changes any more."""
        copied = Account(*_facts(self))
        copied.rejected = dict(self.rejected)
        return copied

    def check_invariants(self) -> None:
        """Raise AssertionError where its numbers disagree."""
        assert not self.report.lines and not self.report.ended
        received = self.accepted_caches + self.rejected_caches
        assert self.received_caches == received
        assert self.pushed_caches == received + self.lost_caches + self.in_flight_caches
        assert self.pushed_bytes == self.received_bytes + self.lost_bytes + self.in_flight
        assert self.received_bytes >= self.accepted_bytes
        assert self.feedback.is_balanced, self.feedback

    @property
    def feedback(self) -> FeedbackCounts:
        """What became of the TD errors that were given for its entries."""
        return FeedbackCounts(*_feedback(self))

    @property
    def rejected_caches(self) -> int:
        """Caches that arrived and were not taken."""
        return sum(self.rejected.values())

    @property
    def overtaken_caches(self) -> int:
        """Caches that a later one overtook and that have not arrived."""
        return max(0, self.seen_caches - self.received_caches)

    @property
    def overtaken_bytes(self) -> int:
        """Their bytes."""
        return max(0, self.seen_bytes - self.received_bytes)

    @property
    def lost_caches(self) -> int:
        """Caches that were overtaken. Once the client has said goodbye, which no later cache follows, all that have not
        arrived.
        """
        return self.pushed_caches - self.received_caches if self.report.leaving else self.overtaken_caches

    @property
    def lost_bytes(self) -> int:
        """Their bytes."""
        return self.pushed_bytes - self.received_bytes if self.report.leaving else self.overtaken_bytes

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
        """Caches that the client pushed and that neither arrived nor are lost."""
        return self.pushed_caches - self.received_caches - self.lost_caches

    @property
    def in_flight(self) -> int:
        """Bytes that the client pushed and that neither arrived nor are lost."""
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
    """Of these clients, those that said goodbye."""
    episodes: Annotated[int, counter("episodes", "Episodes", "Episodes of this run that clients closed.",
        docs="homes.md")] = 0
    steps: Annotated[int, counter("steps", "Steps", "Entries of this run that clients recorded.", docs="homes.md")] = 0
    pushed_caches: Annotated[int, counter("pushed_caches", "Caches pushed", "Caches that clients say they pushed.",
        formula="accepted + rejected + lost + on the way")] = 0
    pushed_bytes: int = 0
    skipped_caches: Annotated[int, DROPPED_CACHES("skipped", "Skipped", formula="skipped ÷ (skipped + pushed)",
        docs="rate.md"), counter("skipped_caches", "Skipped", "Caches that clients did not push, because their credit "
        "was used up: too many of their bytes were on the way. They went on to act instead of waiting.",
        of="cluster")] = 0
    generated_bytes: Annotated[int, counter("generated_bytes", "Recorded", "Bytes of all entries that the clients "
        "recorded, each entry once.", docs="benchmarks/storage.md")] = 0
    received_caches: int = 0
    received_bytes: Annotated[int, counter("received_bytes", "Received", "Bytes of caches or episodes that arrived.",
        docs="benchmarks/storage.md")] = 0
    accepted_caches: Annotated[int, counter("caches", "Caches", "Caches of this run that were accepted: packets of "
        "samples that clients drew from their own memories.", docs="choose.md")] = 0
    accepted_bytes: int = 0
    accepted_samples: int = 0
    rejected_caches: Annotated[int, DROPPED_CACHES("rejected", "Rejected", docs="errors.md"), counter("rejected_caches",
        "Rejected", "Caches that were rejected on arrival, such as those of another schema.", of="cluster")] = 0
    lost_caches: Annotated[int, gauge("missing_caches", "Lost", "Caches that later ones overtook, or whose client left "
        "first; fewer when they arrive after all.", docs="guarantees.md")] = 0
    lost_bytes: int = 0
    dropped_lines: Annotated[int, counter("dropped_log_lines", "Log lines dropped", "Log lines that clients did not "
        "take: too many waited to be sent.", docs="settings.md")] = 0
    returns_count: int = 0
    returns_sum: float = 0.0
    applied: Annotated[int, shown("Priorities set", "TD errors that learners reported and that became priorities.",
        docs="sampling.md")] = 0
    stale: Annotated[int, shown("Too late", "TD errors that learners reported after their entry had made room for "
        "another one. They change nothing.", docs="sampling.md")] = 0
    lost_feedback: Annotated[int, shown("Not fetched", "TD errors that no client fetched: it had ended, or too many "
        "waited for it.")] = 0
    # fmt: on


def of_account(name: str) -> str:
    """Where an account has this count: an attribute of it, or of its newest report."""
    return f"report.{name}" if name in REPORT_SUMS else name


_COUNTED = tuple(n for n in Totals.__slots__ if n not in ("clients", "gone", "skipped_caches", "returns_sum"))
_counted = attrgetter(*map(of_account, _COUNTED))


def counts_of(account: Account) -> dict[str, int]:
    """What an account adds to `Totals`, all but returns_sum."""
    report = account.report
    counts = {"clients": 1, "gone": int(report.leaving), "skipped_caches": report.skipped}
    return counts | dict(zip(_COUNTED, _counted(account), strict=True))


def counts_something(update: Update) -> bool:
    """Whether a report is more than a sign of life."""
    return any(_sums(update)) or bool(update.lines or update.ended)


def sums_of(account: Account | None) -> tuple[int, ...] | None:
    """All that a client's message may add to its account: two of these differ when there is something to save."""
    if account is None:
        return None
    report = account.report
    numbers = account.lines_through, account.ended_through
    return (*_sums(report), report.leaving, *numbers)


class ExactSum:
    """A sum of floats that knows no rounding: what was added and taken off again leaves nothing behind."""

    def __init__(self) -> None:
        self._units = 0  # of 2**-1074, of which every float is a whole number

    def add(self, value: float, sign: int = 1) -> None:
        """Add a finite number, or take it off."""
        numerator, denominator = value.as_integer_ratio()
        self._units += sign * (numerator << (1075 - denominator.bit_length()))

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        return self._units / (1 << 1074)


class FoldedSums:
    """What the accounts add up to that are not in memory."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """By the names of `Totals`, all but returns_sum."""
        self.returns = ExactSum()
        self.tables: dict[str, Counter[int]] = {name: Counter() for name in TABLE_SUMS}
        """`TABLE_SUMS` of each table, by its number."""
        self.feedback: Counter[str] = Counter()
        """By the names of `FeedbackCounts`."""

    def add(self, account: Account, sign: int = 1) -> None:
        """Add an account, or take it off."""
        counts = counts_of(account)
        for name, value in counts.items():
            self.counts[name] += sign * value
        for name, value in asdict(account.feedback).items():
            self.feedback[name] += sign * value
        self.returns.add(account.returns_sum, sign)
        for name, sums in self.tables.items():
            sums[account.table] += sign * counts[name]


class AccountStore:
    """Where the accounts of one run are that are not in memory (see `KeptAccounts`). This one has nothing and keeps
    nothing: of a ledger that never folds.
    """

    def find(self, client: bytes) -> Account | None:
        """The client's own account as it was kept last."""
        return None

    def numbers_elsewhere(self, client: bytes) -> tuple[int, int]:
        """Numbers of the newest line and closed episode that other accounts of this client have, those of servers that
        were drained among them; 0 where there are none.
        """
        return 0, 0

    def keep(self, account: Account) -> None:
        """Keep an account that leaves memory; it is not changed any more."""
        assert account is None, "a ledger that folds needs a store"

    def sums(self) -> FoldedSums:
        """What all accounts that are kept add up to, without those of other servers."""
        return FoldedSums()


class SumsOnlyStore(AccountStore):
    """An `AccountStore` that forgets accounts: of their ledger's totals only the sums are left."""

    def keep(self, account: Account) -> None:
        """Do nothing: the ledger has added the account to its sums."""
