"""What a client has counted, and for which run. Pure: time is passed in.

                        another run has begun
    run "one" ─── 100 steps ──│── 20 steps ───▶ run "two"       UPDATE says 100 to "one" until all of that is told,
                              boundary                          then HELLO, then UPDATE says 20 to "two"

Counts only grow, from the moment the client was made. A run's own counts are the difference between two moments, plus
what was counted for it before the client was in another run.

How far recording may run ahead of drawing, as a home grants it to one client. Pure.

    granted 1000     recorded 990 ─▶ all are inserts; 20 more ─▶ 10 inserts, and 10 passed steps: counted, never pushed

The home says how many entries may be inserted in all before it is asked again (see `replay.limiter`). What is recorded
beyond is counted and kept in the memory, but brings no pushes. If the server stores episodes, an episode's entries are
inserts as soon as it leaves.

Log lines of a client until its home has them. Pure: time is passed in.

How many bytes a client may have on the way, and what became of those that it has pushed. Pure: time is passed in.
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
"""Closed episodes that wait until their home has them; beyond, the return of the oldest is given up."""


@dataclass(frozen=True, slots=True)
class ClientCounts:
    """Everything that is counted for a run."""

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
        """Steps whose samples are pushed."""
        return self.steps - self.passed

    def __add__(self, other: ClientCounts) -> ClientCounts:
        return ClientCounts(*map(operator.add, _numbers(self), _numbers(other)))

    def __sub__(self, other: ClientCounts) -> ClientCounts:
        return ClientCounts(*map(operator.sub, _numbers(self), _numbers(other)))


_numbers = operator.attrgetter(*ClientCounts.__slots__)
"""All of them, in their order; `RunCounts` has attributes of the same names."""


@dataclass(slots=True)
class RunBoundary:
    """The end of a run as this client met it: what came before belongs to the run that is over."""

    counts: ClientCounts
    line: int
    """Number of the newest log line then."""
    ended: int
    """Number of the newest closed episode then."""
    asked: int
    """Calls of update() until then."""
    is_told: bool = False
    """Whether the former run has all of it, or is not known any more."""


class RunCounts(EntryCounts):
    """Counts of a client since it was made, and which of them belong to the run that is told. The owner locks."""

    def __init__(self) -> None:
        self.episodes = 0
        self.skipped = 0
        """Caches or episodes that were not pushed, because the byte window was full."""
        self.dropped_lines = 0
        self.applied = self.stale = self.gone = 0
        """Priorities that were set, those whose entries were gone, and those of these that were gone when they were
        given.
        """
        self.dropped_returns = 0
        """Episodes that count, but whose return is not told."""
        self.acknowledged = ClientCounts()
        """What of it a home has acknowledged."""
        self.boundary: RunBoundary | None = None
        """While another run has begun and the one before has not been told everything."""
        self._run: int | None = None  # hash of the present run's name; None before the first WELCOME
        self._entered = ClientCounts()  # when the present run was met
        self._already = ClientCounts()  # counted for the present run when it was met before
        self._former: dict[int, ClientCounts] = {}  # counted for each run that was left
        self._ended: deque[messages.Ended] = deque(maxlen=MAX_ENDED)  # closed episodes that no home has acknowledged
        self._ended_number = 0

    def recording(self, entries: int, entry_bytes: int) -> Changes:
        """The changes by which so many entries were recorded, of `entry_bytes` each."""
        steps, size = self.steps + entries, self.generated_bytes + entries * entry_bytes
        return [(setattr, (self, "steps", steps)), (setattr, (self, "generated_bytes", size))]  # a list: see `setting`

    def closing_episode(self, length: int, returned: float, now: float, kind: int = messages.TRAIN) -> Changes:
        """The changes by which an episode of `length` entries was closed at `now`, in seconds since 1970. One of a test
        is only told.
        """
        number, is_told = self._ended_number + 1, abs(returned) <= MAX_RETURN  # and no NaN
        dropped = self.dropped_returns + (not is_told or len(self._ended) == MAX_ENDED)
        episodes = self.episodes + (kind == messages.TRAIN)
        changes = setting(self, episodes=episodes, _ended_number=number, dropped_returns=dropped)
        if is_told:
            row = messages.Ended(number=number, time=now, length=length, returned=returned, kind=kind)
            changes.append((self._ended.append, (row,)))
        return changes

    @property
    def sums(self) -> ClientCounts:
        """Everything since the client was made."""
        return ClientCounts(*_numbers(self))

    @property
    def missing(self) -> ClientCounts:
        """What no home has acknowledged."""
        return self.sums - self.acknowledged

    @property
    def told(self) -> ClientCounts:
        """What UPDATE says: all that counts for its run, up to the boundary if there is one."""
        return self._already + self.reach - self._entered

    @property
    def reach(self) -> ClientCounts:
        """The sums that UPDATE covers, since the client was made."""
        return self.sums if self.boundary is None else self.boundary.counts

    # Closed episodes

    @property
    def waiting_episodes(self) -> int:
        """Closed episodes that no home has acknowledged."""
        return len(self._ended)

    def oldest_episodes(self, most: int) -> list[messages.Ended]:
        """Those that wait, in order, `most` of them; none from beyond the boundary."""
        last = self._ended_number if self.boundary is None else self.boundary.ended
        return [ended for ended in itertools.islice(self._ended, most) if ended.number <= last]

    def acknowledge_episodes(self, through: int) -> None:
        """The home has the closed episodes up to this number."""
        while self._ended and self._ended[0].number <= through:
            self._ended.popleft()

    # Runs

    def end_run(self, line: int, asked: int) -> RunBoundary:
        """Another run has begun: the boundary, made now unless there is one.

        Args:
            line: Number of the newest log line.
            asked: Calls of update() until now.
        """
        if self.boundary is None:
            self.boundary = RunBoundary(self.sums, line, self._ended_number, asked)
        return self.boundary

    def acknowledge_run(self, boundary: RunBoundary, oldest_line: float) -> None:
        """An UPDATE up to this boundary was answered; `oldest_line` is the oldest log line that still waits."""
        has_episodes = bool(self._ended) and self._ended[0].number <= boundary.ended
        boundary.is_told = oldest_line > boundary.line and not has_episodes

    def resume_run(self) -> None:
        """The run that had ended goes on, and nothing was counted for another one."""
        self.boundary = None

    def enter_run(self, run: int) -> None:
        """Count for this run from now on, or from the boundary on."""
        if self._run is not None and run != self._run:
            self._former[self._run] = self.told
            self._count_from(self._former.pop(run, ClientCounts()))
        self._run, self.boundary = run, None

    def enter_unknown_run(self) -> None:
        """Count from the boundary on for a run that nobody has named yet."""
        self._count_from(ClientCounts())
        self.boundary = None

    def _count_from(self, already: ClientCounts) -> None:
        self._already, self._entered = already, self.reach
        self._elsewhere = self._entered.inserted - already.inserted


MIN_PAUSE = 0.01
"""Seconds until a home that granted more is asked again; doubled each time that it grants nothing."""


class InsertGrant:
    """What the present home grants, and how much of it is used. The owner locks.

    Args:
        counts: Says how many entries were inserted, and holds the passed steps.
        longest_pause: Seconds between two requests for more, at most.
    """

    def __init__(self, counts: RunCounts, longest_pause: float) -> None:
        self.reason = ""
        """Why the home grants no more, as it says."""
        self.waiting = 0
        """Calls that wait for more now."""
        self.is_short = False
        """Whether something was left out for want of a grant since the home answered last."""
        self.waited = 0.0
        """Seconds that calls waited for more, in all."""
        self.pause = MIN_PAUSE
        """Seconds until the home is asked again while calls wait, or leave something out."""
        self._counts, self._longest_pause = counts, longest_pause
        counts.granted = NO_LIMIT
        self._size = 0  # how much was granted last
        self._undecided = 0  # passed steps that may become inserts

    @property
    def left(self) -> int:
        """Entries that may be inserted before the home is asked again; negative if there are more already."""
        counts = self._counts
        return NO_LIMIT if counts.granted == NO_LIMIT else counts.granted - counts.inserted

    @property
    def held_back(self) -> str:
        """Why nothing may be inserted now; "" if something may."""
        return self.reason if self.left <= 0 else ""

    @property
    def is_half_used(self) -> bool:
        """Whether to ask for more before all is used up."""
        return self._counts.granted < NO_LIMIT and 0 < 2 * self.left < self._size

    def grant(self, granted: int, reason: str) -> None:
        """The home says how many entries of this run may be inserted in all, and why not more."""
        is_more, was_free = granted > self._counts.granted, self._counts.granted == NO_LIMIT
        was_asked, self.is_short = self.is_short or self.waiting > 0, False
        self._counts.granted, self.reason = granted, reason
        in_vain = was_asked and not is_more and self.left <= 0
        self.pause = min(max(2 * self.pause, MIN_PAUSE), self._longest_pause) if in_vain else MIN_PAUSE
        self._size = self.left if is_more or was_free else self._size

    def expect(self) -> None:
        """The home has told of what gives room: whoever waits asks it at once."""
        self.pause = 0.0

    def recording(self, entries: int) -> Changes:
        """The changes by which a writer recorded so many: passed steps, until it is decided that they are inserts."""
        passed = setting(self._counts, passed=self._counts.passed + entries)
        return passed + setting(self, _undecided=self._undecided + entries)

    def admitted(self, entries: int) -> int:
        """Of so many recorded entries, how many the home lets be inserts now."""
        return max(0, min(entries, self.left))

    def settling(self, entries: int, inserted: int) -> Changes:
        """The changes by which it is decided on so many recorded entries: `inserted` of them are inserts, the others
        stay passed steps.
        """
        waited = min(entries, self._undecided)
        passed = setting(self._counts, passed=self._counts.passed - min(waited, inserted))
        return passed + setting(self, _undecided=self._undecided - waited)


LINE_OVERHEAD = 100
"""Bytes that a line takes beside its text, about."""


def cut(text: str, byte_limit: int) -> str:
    """`text` cut to `byte_limit` bytes of UTF-8 at a character's end, with "..." where something is missing."""
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= byte_limit:
        return encoded.decode()
    return encoded[: max(0, byte_limit - 3)].decode("utf-8", "ignore") + "..."


class LineOutbox:
    """A client's lines until its home has them: numbered, and bounded in number and bytes. What was taken stays.

    Not thread-safe: the owner locks.
    """

    def __init__(self, *, most_lines: int, most_bytes: int, line_bytes: int) -> None:
        self._lines: deque[Line] = deque()
        self._sizes: deque[int] = deque()
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._line_bytes = line_bytes
        self._number = 0
        self.bytes = 0
        """Bytes of the lines that wait."""

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def newest(self) -> int:
        """Number of the newest line ever added; 0 when there is none."""
        return self._number

    @property
    def oldest(self) -> float:
        """Number of the oldest line that still waits; infinity when none does."""
        return self._lines[0].number if self._lines else float("inf")

    @property
    def is_half_full(self) -> bool:
        """Whether it is time to send lines without a pause."""
        return 2 * len(self._lines) >= self._most_lines or 2 * self.bytes >= self._most_bytes

    def add(self, text: str, uuid: int, now: float) -> int:
        """Number the line and keep it until it is acknowledged; returns its number, or 0 when there is no room.

        One line always fits into an empty outbox.
        """
        text = cut(text, self._line_bytes)
        size = len(text.encode()) + LINE_OVERHEAD
        if self._lines and (len(self._lines) >= self._most_lines or self.bytes + size > self._most_bytes):
            return 0
        self._number += 1
        self._lines.append(Line(number=self._number, time=now, label=uuid, text=text))
        self._sizes.append(size)
        self.bytes += size
        return self._number

    def acknowledge(self, through: int) -> None:
        """The home has the lines up to this number."""
        while self._lines and self._lines[0].number <= through:
            self._lines.popleft()
            self.bytes -= self._sizes.popleft()

    def waiting(self, most_lines: int, most_bytes: int, through: int | None = None) -> list[Line]:
        """The oldest lines that fit one message, at least one when there is any; none numbered above `through`."""
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
"""Accounts that a client remembers of homes it has left, should it come back: as many servers as a WELCOME can name."""


class PushWindow:
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
    def in_flight_bytes(self) -> int:
        """Bytes of which nobody knows yet."""
        return self.pushed_bytes - self.received_bytes - self.lost_bytes

    def has_room(self, byte_count: int) -> bool:
        """Whether a cache of this size may go now."""
        return self.in_flight_bytes == 0 or self.in_flight_bytes + byte_count <= self.credit

    @property
    def is_half_used(self) -> bool:
        """Whether it is time to ask the server what arrived."""
        return 2 * self.in_flight_bytes >= self.credit

    def pushing(self, byte_count: int, now: float) -> Changes:
        """The changes by which a cache of this size was handed to the socket."""
        caches, pushed = self.pushed_caches + 1, self.pushed_bytes + byte_count
        waits: Changes = [(self._waiting.append, ((now, (caches, pushed)),))]
        return setting(self, pushed_caches=caches, pushed_bytes=pushed) + waits

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
        assert min(self.in_flight_bytes, self.lost_bytes, self.in_flight_caches, self.lost_caches) >= 0
        assert self.pushed_bytes == self.received_bytes + self.lost_bytes + self.in_flight_bytes
        assert self.pushed_caches == self.received_caches + self.lost_caches + self.in_flight_caches
        assert self.received_caches == min(self.pushed_caches, self.accepted_caches + sum(self.rejected.values()))


@dataclass(slots=True)
class PushSums:
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

    def add(self, window: PushWindow) -> None:
        """Add those of one account."""
        for name in self.__slots__:
            if name != "rejected":
                setattr(self, name, getattr(self, name) + getattr(window, name))
        for code, count in window.rejected.items():
            self.rejected[code] = self.rejected.get(code, 0) + count


class AccountWindows:
    """A client's windows, one for each account that a home has opened for it. Not thread-safe: the owner locks.

    home a ──▶ home b ──▶ home a      back at a, its numbers go on, since a says that it knows this client `since` then
                                      as before; an a that has forgotten everything says a later `since`: from zero

    What is on the way when a client moves is lost, unless it comes back and hears otherwise.
    """

    def __init__(self, credit: int, *, lost_after: float = 15.0) -> None:
        self.now = PushWindow(credit, lost_after=lost_after)
        """The one towards the present home."""
        self.granted = credit
        """Bytes that the home grants."""
        self._own = 0  # bytes that the client allows itself; 0: as much as is granted
        self._lost_after = lost_after
        self._key = (0, 0, 0)  # run, home and since of `now`; zeros before the first WELCOME
        self._left: OrderedDict[tuple[int, int, int], PushWindow] = OrderedDict()  # the newest last
        self._forgotten = PushSums()  # of accounts that were left so long ago that only their sums are kept

    def grant(self, granted: int) -> None:
        """The home grants so many bytes; 0: as before."""
        self.granted = granted or self.granted
        self.now.credit = min(self.granted, self._own or self.granted)

    def limit(self, credit: int) -> None:
        """The client allows itself no more than this, whatever is granted; 0: as much as that."""
        self._own = credit
        self.grant(0)

    def belong(self, run: int, home: int, since: int) -> None:
        """From now on caches go to this account."""
        key = (run, home, since)
        if key == self._key:
            return
        self.now.give_up()
        self._left[self._key] = self.now
        credit = self.now.credit
        self.now = self._left.pop(key) if key in self._left else PushWindow(credit, lost_after=self._lost_after)
        self.now.credit, self._key = credit, key
        while len(self._left) > MAX_HOMES:
            self._forgotten.add(self._left.popitem(last=False)[1])

    def sums(self) -> PushSums:
        """Over all accounts."""
        sums = replace(self._forgotten, rejected=dict(self._forgotten.rejected))
        for window in (*self._left.values(), self.now):
            sums.add(window)
        return sums

    def check_invariants(self) -> None:
        """Raise AssertionError where bytes or caches are not accounted for."""
        for window in (*self._left.values(), self.now):
            window.check_invariants()
        assert not any(window.in_flight_bytes or window.in_flight_caches for window in self._left.values())
