"""When a process that died is started again: after longer and longer pauses, and not if it cannot start at all.

Decides only; `launch` starts and ends processes.
"""

MIN_PAUSE = 0.5
"""Seconds between a death and the next start; each further death in a row doubles them."""
MAX_PAUSE = 30.0
MIN_UPTIME = 60.0
"""Seconds of work after which former deaths are forgotten."""
MAX_FAILED_STARTS = 5
"""Starts in a row that come to nothing before a process that has worked is given up."""


class Restarts:
    """The deaths of one process, and when it is to be started next.

    Args:
        most: Deaths in a row, each less than `MIN_UPTIME` seconds after it began to work, that are followed by another
            start; None sets no limit.

    Attributes:
        due: When it is to be started again; None while it runs, or is given up.
        count: How often that was decided.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.due: float | None = None
        self.count = 0
        self._has_worked = False
        self._ready_since: float | None = None
        self._deaths = 0  # in a row
        self._failed_starts = 0  # in a row

    def started(self) -> None:
        """It was started."""
        self.due = None

    def ready(self, now: float) -> None:
        """It does its work."""
        if self._ready_since is None:
            self._has_worked, self._ready_since, self._failed_starts = True, now, 0

    def died(self, now: float, *, is_killed: bool = False) -> float | None:
        """Take in a death; seconds until it is to be started again, None where that is of no use.

        Args:
            is_killed: A signal ended it: that says nothing about whether it can start.
        """
        if self._ready_since is None:
            self._failed_starts += 1
        elif now - self._ready_since >= MIN_UPTIME:
            self._deaths = 0
        self._ready_since = None
        cannot_start = not (self._has_worked or is_killed) or self._failed_starts >= MAX_FAILED_STARTS
        if cannot_start or (self._most is not None and self._deaths >= self._most):
            return None
        pause = min(MAX_PAUSE, MIN_PAUSE * 2.0**self._deaths)
        self._deaths += 1
        self.count += 1
        self.due = now + pause
        return pause

    def is_due(self, now: float) -> bool:
        """Whether to start it now."""
        return self.due is not None and now >= self.due
