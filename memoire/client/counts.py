"""Client counters: totals of each run, the insert grant, queued log lines and bytes in flight. Pure: time is passed in.

Totals of a run:

                        another run has begun
    run "one" ─── 100 steps ──│── 20 steps ───▶ run "two"       UPDATE reports 100 to "one" until that is acknowledged,
                              boundary                          then HELLO, then UPDATE reports 20 to "two"

Counts only grow, from the moment the client was made. A run's own counts are the difference between two moments, plus
earlier counts for the same run, if the client was in another run in between.

Insert grant: the limit of a home server on how far one client's recording may run ahead of drawing.

    granted 1000     recorded 990 ─▶ all are inserts; 20 more ─▶ 10 inserts, and 10 passed steps: counted, never pushed

The home grants a total number of entries that may be inserted before the client asks again (see `replay.limiter`).
Entries recorded beyond the grant are counted and kept in the memory, but bring no pushes. If the server stores
episodes, an episode's entries become inserts when the episode is pushed.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memoire._core import EntryCounts, setting
from memoire.limits import NO_LIMIT
from memoire.replay.writing import Changes
from memoire.wire import messages
from memoire.wire.messages import Line
from memoire.wire.rows import MAX_RETURN

MAX_ENDED = 4096
"""Most closed episodes that wait for an acknowledgement; beyond, the oldest one's return is not reported."""


@dataclass(frozen=True, slots=True)
class ClientCounts:
    """Counts of one client for one run, or differences of such counts."""

    episodes: int = 0
    steps: int = 0
    generated_bytes: int = 0
    skipped: int = 0
    dropped_lines: int = 0
    applied: int = 0
    stale: int = 0
    gone: int = 0
    passed: int = 0

    @property
    def inserted(self) -> int:
        """Number of steps that are inserts: their samples or episodes may be pushed."""
        return self.steps - self.passed

    def __add__(self, other: ClientCounts) -> ClientCounts:
        return ClientCounts(*map(operator.add, _numbers(self), _numbers(other)))

    def __sub__(self, other: ClientCounts) -> ClientCounts:
        return ClientCounts(*map(operator.sub, _numbers(self), _numbers(other)))


_numbers = operator.attrgetter(*ClientCounts.__slots__)
"""Getter of all counts in the order of the fields; `RunCounts` has attributes of the same names."""


@dataclass(slots=True)
class RunBoundary:
    """End of a run in a client's counts: counts before the boundary belong to the former run."""

    counts: ClientCounts
    line: int
    """Number of the newest log line at the boundary."""
    ended: int
    """Number of the newest closed episode at the boundary."""
    asked: int
    """Calls of update() until the boundary."""
    is_told: bool = False
    """True if the home server has acknowledged everything of the former run, or no longer knows that run."""


class RunCounts(EntryCounts):
    """Counts of a client since its creation, and the reported run's part of these counts. The owner locks."""

    def __init__(self) -> None:
        self.episodes = 0
        self.skipped = 0
        """Number of caches or episodes that were not pushed, because the byte window was full."""
        self.dropped_lines = 0
        self.applied = self.stale = self.gone = 0
        """Number of priorities that were set (`applied`); that came too late for their entry (`stale`); and of stale
        ones whose entry was gone before the learner reported them (`gone`).
        """
        self.dropped_returns = 0
        """Number of episodes that count, but whose return is not reported."""
        self.acknowledged = ClientCounts()
        """Counts that a home server has acknowledged, since the client was made."""
        self.boundary: RunBoundary | None = None
        """Boundary to the next run, while the former run's counts are not all acknowledged; else None."""
        self._run: int | None = None  # hash of the present run's name; None before the first WELCOME
        self._entered = ClientCounts()  # sums at the moment the present run was entered
        self._already = ClientCounts()  # counted for the present run before the client left the run
        self._former: dict[int, ClientCounts] = {}  # counts of each former run, by the hash of its name
        self._ended: deque[messages.Ended] = deque(maxlen=MAX_ENDED)  # closed episodes without acknowledgement
        self._ended_number = 0

    def recording_changes(self, entries: int, entry_bytes: int) -> Changes:
        """Return the changes that count `entries` recorded entries of `entry_bytes` each."""
        steps, size = self.steps + entries, self.generated_bytes + entries * entry_bytes
        return [
            (setattr, (self, "steps", steps)),
            (setattr, (self, "generated_bytes", size)),
        ]  # a list, as `setting` returns

    def episode_changes(self, length: int, returned: float, now: float, kind: int = messages.TRAIN) -> Changes:
        """Return the changes that count an episode of `length` entries, closed at `now` in seconds since 1970. A test
        episode is reported but not counted.
        """
        number, is_told = self._ended_number + 1, abs(returned) <= MAX_RETURN  # False for NaN
        dropped = self.dropped_returns + (not is_told or len(self._ended) == MAX_ENDED)
        episodes = self.episodes + (kind == messages.TRAIN)
        changes = setting(self, episodes=episodes, _ended_number=number, dropped_returns=dropped)
        if is_told:
            row = messages.Ended(number=number, time=now, length=length, returned=returned, kind=kind)
            changes.append((self._ended.append, (row,)))
        return changes

    @property
    def sums(self) -> ClientCounts:
        """Counts since the client was made."""
        return ClientCounts(*_numbers(self))

    @property
    def unacknowledged_counts(self) -> ClientCounts:
        """Counts that no home server has acknowledged."""
        return self.sums - self.acknowledged

    @property
    def reported(self) -> ClientCounts:
        """Counts that UPDATE reports: those of its run, up to the boundary if there is one."""
        return self._already + self.covered_counts - self._entered

    @property
    def covered_counts(self) -> ClientCounts:
        """Counts since the client was made that UPDATE covers: up to the boundary if there is one."""
        return self.sums if self.boundary is None else self.boundary.counts

    # Closed episodes

    @property
    def waiting_episodes(self) -> int:
        """Number of closed episodes that no home server has acknowledged."""
        return len(self._ended)

    def oldest_episodes(self, most: int) -> list[messages.Ended]:
        """Return the oldest unacknowledged episodes, `most` at most, up to the boundary if there is one."""
        last = self._ended_number if self.boundary is None else self.boundary.ended
        return [ended for ended in itertools.islice(self._ended, most) if ended.number <= last]

    def acknowledge_episodes(self, through: int) -> None:
        """Drop the closed episodes up to this number, which the home server has acknowledged."""
        while self._ended and self._ended[0].number <= through:
            self._ended.popleft()

    # Runs

    def end_run(self, line: int, asked: int) -> RunBoundary:
        """Return the boundary to a run that has begun; it is made now unless there is one.

        Args:
            line: Number of the newest log line.
            asked: Calls of update() until now.
        """
        if self.boundary is None:
            self.boundary = RunBoundary(self.sums, line, self._ended_number, asked)
        return self.boundary

    def acknowledge_run(self, boundary: RunBoundary, oldest_line: float) -> None:
        """Mark the former run as told if the answered UPDATE left none of its lines and episodes unacknowledged.

        Args:
            oldest_line: Number of the oldest log line that still waits; infinity if no line does.
        """
        has_episodes = bool(self._ended) and self._ended[0].number <= boundary.ended
        boundary.is_told = oldest_line > boundary.line and not has_episodes

    def resume_run(self) -> None:
        """Remove the boundary: the former run goes on, and nothing was counted for another run."""
        self.boundary = None

    def enter_run(self, run: int) -> None:
        """Count for the run with this hash from now on, or from the boundary on."""
        if self._run is not None and run != self._run:
            self._former[self._run] = self.reported
            self._count_from(self._former.pop(run, ClientCounts()))
        self._run, self.boundary = run, None

    def enter_unknown_run(self) -> None:
        """Count from the boundary on for a run whose name is not known yet."""
        self._count_from(ClientCounts())
        self.boundary = None

    def _count_from(self, already: ClientCounts) -> None:
        self._already, self._entered = already, self.covered_counts
        self._elsewhere = self._entered.inserted - already.inserted


MIN_PAUSE = 0.01
"""Seconds until a home server that granted more is asked again; doubled after each answer that grants no more."""


class InsertGrant:
    """Entries that the present home server lets the client insert, and the number of used ones. The owner locks.

    Args:
        counts: Counts of inserted entries and passed steps.
        longest_pause: Most seconds between two requests for a larger grant.
    """

    def __init__(self, counts: RunCounts, longest_pause: float) -> None:
        self.reason = ""
        """Reason that the home server gives for granting no more."""
        self.waiting = 0
        """Number of calls that wait for a larger grant now."""
        self.is_short = False
        """True if a push was skipped for lack of a grant since the home server's newest answer."""
        self.waited = 0.0
        """Seconds that calls waited for a larger grant, in all."""
        self.pause = MIN_PAUSE
        """Seconds until the home server is asked again while calls wait, or skip pushes."""
        self._counts, self._longest_pause = counts, longest_pause
        counts.granted = NO_LIMIT
        self._size = 0  # entries that were left when the grant was last raised
        self._undecided = 0  # passed steps that may become inserts

    @property
    def remaining(self) -> int:
        """Entries that the client may insert before it asks the home server again; negative after too many inserts."""
        counts = self._counts
        return NO_LIMIT if counts.granted == NO_LIMIT else counts.granted - counts.inserted

    @property
    def block_reason(self) -> str:
        """Reason why no entry may be inserted now; "" if one may."""
        return self.reason if self.remaining <= 0 else ""

    @property
    def is_half_used(self) -> bool:
        """True if half of the grant is used: the client asks for more before it has used all of the grant."""
        return self._counts.granted < NO_LIMIT and 0 < 2 * self.remaining < self._size

    def grant(self, granted: int, reason: str) -> None:
        """Set the total number of entries that this run may insert, and the home server's reason for no more."""
        is_more, was_free = granted > self._counts.granted, self._counts.granted == NO_LIMIT
        was_asked, self.is_short = self.is_short or self.waiting > 0, False
        self._counts.granted, self.reason = granted, reason
        is_refused = was_asked and not is_more and self.remaining <= 0
        self.pause = min(max(2 * self.pause, MIN_PAUSE), self._longest_pause) if is_refused else MIN_PAUSE
        self._size = self.remaining if is_more or was_free else self._size

    def end_pause(self) -> None:
        """End the pause: the home server has announced a model, which may give room, so waiting calls ask at once."""
        self.pause = 0.0

    def recording_changes(self, entries: int) -> Changes:
        """Return the changes that count a writer's entries as passed steps, until `insert_changes` counts them as
        inserts.
        """
        passed = setting(self._counts, passed=self._counts.passed + entries)
        return passed + setting(self, _undecided=self._undecided + entries)

    def insertable_count(self, entries: int) -> int:
        """Return how many of `entries` recorded entries the home server lets be inserts now."""
        return max(0, min(entries, self.remaining))

    def insert_changes(self, entries: int, inserted: int) -> Changes:
        """Return the changes that make inserts of `inserted` among `entries` recorded entries; others stay passed."""
        waited = min(entries, self._undecided)
        passed = setting(self._counts, passed=self._counts.passed - min(waited, inserted))
        return passed + setting(self, _undecided=self._undecided - waited)


LINE_OVERHEAD = 100
"""Bytes that a queued line takes in addition to its text, approximately."""


def truncate_text(text: str, byte_limit: int) -> str:
    """Return `text` cut to `byte_limit` bytes of UTF-8 at a character's end; a text that was cut ends with "..."."""
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= byte_limit:
        return encoded.decode()
    return encoded[: max(0, byte_limit - 3)].decode("utf-8", "ignore") + "..."


class LineOutbox:
    """Queue of a client's log lines until its home server acknowledges them: numbered, and bounded in number and bytes.

    A line is never dropped after it was queued. Not thread-safe: the owner locks.
    """

    def __init__(self, *, most_lines: int, most_bytes: int, line_bytes: int) -> None:
        self._lines: deque[Line] = deque()
        self._sizes: deque[int] = deque()
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._line_bytes = line_bytes
        self._number = 0
        self.bytes = 0
        """Bytes of the queued lines, `LINE_OVERHEAD` for each included."""

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def newest(self) -> int:
        """Number of the newest line ever added; 0 before the first."""
        return self._number

    @property
    def oldest(self) -> float:
        """Number of the oldest queued line; infinity if the queue is empty."""
        return self._lines[0].number if self._lines else float("inf")

    @property
    def is_half_full(self) -> bool:
        """True if the queue is half full in lines or bytes: lines are then sent without a pause."""
        return 2 * len(self._lines) >= self._most_lines or 2 * self.bytes >= self._most_bytes

    def add(self, text: str, uuid: int, now: float) -> int:
        """Queue a line until it is acknowledged; returns its number, or 0 if there is no room.

        One line always fits into an empty outbox.
        """
        text = truncate_text(text, self._line_bytes)
        size = len(text.encode()) + LINE_OVERHEAD
        if self._lines and (len(self._lines) >= self._most_lines or self.bytes + size > self._most_bytes):
            return 0
        self._number += 1
        self._lines.append(Line(number=self._number, time=now, label=uuid, text=text))
        self._sizes.append(size)
        self.bytes += size
        return self._number

    def acknowledge(self, through: int) -> None:
        """Drop the lines up to this number, which the home server has acknowledged."""
        while self._lines and self._lines[0].number <= through:
            self._lines.popleft()
            self.bytes -= self._sizes.popleft()

    def next_lines(self, most_lines: int, most_bytes: int, through: int | None = None) -> list[Line]:
        """Return the oldest lines that fit one message, at least one if any is queued, numbered up to `through`."""
        chosen: list[Line] = []
        size = 0
        for line in self._lines:
            size += 4 * len(line.text) + 48  # UTF-8 has at most four bytes a character
            if chosen and (len(chosen) >= most_lines or size > most_bytes):
                break
            if through is not None and line.number > through:
                break
            chosen.append(line)
        return chosen


MAX_HOMES = 4096
"""Most accounts that a client keeps at former home servers: as many servers as a WELCOME can name."""


class PushWindow:
    """Byte window of a client at one home: bytes that may be in flight, and caches received, lost and in flight.

    Always: pushed == received + lost + in flight, in caches and in bytes. A cache is lost if the server reports it as
    overtaken by a later one, or if it was pushed long before an answered request and had not arrived by then. A lost
    cache that arrives after all counts as received.

    Not thread-safe: the owner locks.
    """

    def __init__(self, credit: int, *, lost_after: float = 15.0) -> None:
        self.credit = credit
        """Bytes that may be in flight; a single cache may exceed them if no other is in flight."""
        self.pushed_caches = 0
        self.pushed_bytes = 0
        self.accepted_caches = 0
        self.received_caches = 0
        """Number of caches that the home server has accepted or rejected."""
        self.received_bytes = 0
        self.rejected: dict[str, int] = {}
        self._lost_after = lost_after
        self._through = (0, 0)  # caches and bytes pushed before here are received or lost
        self._waiting: deque[tuple[float, tuple[int, int]]] = deque()  # (time of a push, position after the push)

    @property
    def lost_caches(self) -> int:
        """Number of caches that were pushed and are given up as lost."""
        return max(0, self._through[0] - self.received_caches)

    @property
    def lost_bytes(self) -> int:
        """Bytes that were pushed and are given up as lost."""
        return max(0, self._through[1] - self.received_bytes)

    @property
    def in_flight_caches(self) -> int:
        """Number of pushed caches that the home server has neither acknowledged nor reported as lost."""
        return self.pushed_caches - self.received_caches - self.lost_caches

    @property
    def in_flight_bytes(self) -> int:
        """Pushed bytes that the home server has neither acknowledged nor reported as lost."""
        return self.pushed_bytes - self.received_bytes - self.lost_bytes

    def has_room(self, byte_count: int) -> bool:
        """Return True if a cache of `byte_count` bytes may be pushed now."""
        return self.in_flight_bytes == 0 or self.in_flight_bytes + byte_count <= self.credit

    @property
    def is_half_used(self) -> bool:
        """True if half of the credit is in flight: the client then asks the server what arrived."""
        return 2 * self.in_flight_bytes >= self.credit

    def push_changes(self, byte_count: int, now: float) -> Changes:
        """Return the changes that count a cache of `byte_count` bytes as pushed at `now`."""
        caches, pushed = self.pushed_caches + 1, self.pushed_bytes + byte_count
        waits: Changes = [(self._waiting.append, ((now, (caches, pushed)),))]
        return setting(self, pushed_caches=caches, pushed_bytes=pushed) + waits

    def receive_answer(
        self,
        accepted: int,
        received: int,
        lost: int,
        rejected: Mapping[str, int],
        asked_at: float,
        *,
        lost_caches: int = 0,
    ) -> None:
        """Take the home server's sums of this account, the answer to a request that was first sent at `asked_at`.

        Args:
            accepted: Caches accepted.
            received, lost: Bytes received, and lost before them.
            rejected: Caches rejected, by code.
        """
        # The sums are never above the pushed bytes, even if another process uses this client's id.
        received, accepted = min(received, self.pushed_bytes), min(accepted, self.pushed_caches)
        arrived = min(accepted + sum(rejected.values()), self.pushed_caches)
        # Smaller sums are ignored: the answer is late, or the server was killed and has lost its newest caches.
        if arrived >= self.received_caches:
            self.accepted_caches, self.received_caches, self.rejected = accepted, arrived, dict(rejected)
        self.received_bytes = max(self.received_bytes, received)
        if lost or lost_caches:
            self._reach(min(self.pushed_caches, arrived + lost_caches), min(self.pushed_bytes, received + lost))
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

    def mark_in_flight_lost(self) -> None:
        """Count all caches in flight as lost, since the client leaves this server; a later answer can correct that."""
        self._through = self.pushed_caches, self.pushed_bytes
        self._waiting.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if bytes or caches are not accounted for."""
        assert min(self.in_flight_bytes, self.lost_bytes, self.in_flight_caches, self.lost_caches) >= 0
        assert self.pushed_bytes == self.received_bytes + self.lost_bytes + self.in_flight_bytes
        assert self.pushed_caches == self.received_caches + self.lost_caches + self.in_flight_caches
        assert self.received_caches == min(self.pushed_caches, self.accepted_caches + sum(self.rejected.values()))


@dataclass(slots=True)
class PushSums:
    """Sums of a client's byte windows at all of its homes."""

    pushed_caches: int = 0
    pushed_bytes: int = 0
    accepted_caches: int = 0
    received_bytes: int = 0
    lost_caches: int = 0
    lost_bytes: int = 0
    in_flight_caches: int = 0
    in_flight_bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    def add(self, window: PushWindow) -> None:
        """Add the counts of one account's window."""
        for name in self.__slots__:
            if name != "rejected":
                setattr(self, name, getattr(self, name) + getattr(window, name))
        for code, count in window.rejected.items():
            self.rejected[code] = self.rejected.get(code, 0) + count


class AccountWindows:
    """Byte windows of a client, one for each account at a home server. Not thread-safe: the owner locks.

    home a ──▶ home b ──▶ home a      back at a with the same `since`, the account's numbers go on; a home that has
                                      lost the account answers with a later `since`: the numbers begin at zero

    Caches in flight count as lost when a client moves, unless the client returns and the server reports their arrival.
    """

    def __init__(self, credit: int, *, lost_after: float = 15.0) -> None:
        self.now = PushWindow(credit, lost_after=lost_after)
        """Window of the present home server's account."""
        self.granted = credit
        """Bytes that the home server grants."""
        self._own_limit = 0  # the client's own limit in bytes; 0: the home server's grant
        self._lost_after = lost_after
        self._key = (0, 0, 0)  # run, server and since of `now`; zeros before the first WELCOME
        self._former: OrderedDict[tuple[int, int, int], PushWindow] = OrderedDict()  # former accounts, newest last
        self._forgotten = PushSums()  # sums of the oldest accounts, whose windows were dropped

    def grant(self, granted: int) -> None:
        """Set the bytes that the home server grants; 0 keeps the former grant."""
        self.granted = granted or self.granted
        self.now.credit = min(self.granted, self._own_limit or self.granted)

    def limit_bytes(self, credit: int) -> None:
        """Set the client's own limit in bytes, which caps the home server's grant; 0 removes it."""
        self._own_limit = credit
        self.grant(0)

    def enter_account(self, run: int, home: int, since: int) -> None:
        """Make the window of this account the present one; its counts go on if the client was there before."""
        key = (run, home, since)
        if key == self._key:
            return
        self.now.mark_in_flight_lost()
        self._former[self._key] = self.now
        credit = self.now.credit
        self.now = self._former.pop(key) if key in self._former else PushWindow(credit, lost_after=self._lost_after)
        self.now.credit, self._key = credit, key
        while len(self._former) > MAX_HOMES:
            self._forgotten.add(self._former.popitem(last=False)[1])

    def sums(self) -> PushSums:
        """Return the sums over the windows of all accounts."""
        sums = replace(self._forgotten, rejected=dict(self._forgotten.rejected))
        for window in (*self._former.values(), self.now):
            sums.add(window)
        return sums

    def check_invariants(self) -> None:
        """Raise AssertionError if bytes or caches of any account are not accounted for."""
        for window in (*self._former.values(), self.now):
            window.check_invariants()
        assert not any(window.in_flight_bytes or window.in_flight_caches for window in self._former.values())
