"""What a client has counted, and for which run. Pure: time is passed in.

                        another run has begun
    run "one" ─── 100 steps ──│── 20 steps ───▶ run "two"       UPDATE says 100 to "one" until all of that is told,
                              boundary                          then HELLO, then UPDATE says 20 to "two"

Counts only grow, from the moment the client was made. A run's own counts are the difference between two moments, plus
what was counted for it before the client was in another run.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from dataclasses import dataclass

from memoire._core import EntryCounts, setting
from memoire.replay.episode_store import Changes
from memoire.wire import messages
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
