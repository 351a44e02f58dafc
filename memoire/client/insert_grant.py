"""How far recording may run ahead of drawing, as a home grants it to one client. Pure.

    granted 1000     recorded 990 ─▶ all are inserts; 20 more ─▶ 10 inserts, and 10 passed steps: counted, never pushed

The home says how many entries may be inserted in all before it is asked again (see `replay.limiter`). What is recorded
beyond is counted and kept in the memory, but brings no pushes. If the server stores episodes, an episode's entries are
inserts as soon as it leaves.
"""

from __future__ import annotations

from memoire._core import setting
from memoire.limits import NO_LIMIT
from memoire.replay.episode_store import Changes

from .counts import RunCounts

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
