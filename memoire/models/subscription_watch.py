"""Whether notices of a topic still come: a version that a reply named, and that no notice did, shows that they do not.

Pure: no clock, no socket.
"""

from __future__ import annotations

UNHEARD_TIMEOUT = 12.0
"""Seconds after which a version that a reply named, and no notice did, shows that the subscription was lost: notices
are repeated more often.
"""


class SubscriptionWatch:
    """Watches over the subscription of one topic."""

    def __init__(self) -> None:
        self._noticed = 0  # newest version that a notice named
        self._named: tuple[int, float] | None = None  # a version that a reply named before any notice, and when

    def named(self, version: int, now: float) -> None:
        """A reply has named the newest version."""
        if self._named is None and version > self._noticed:
            self._named = (version, now)

    def noticed(self, version: int) -> None:
        """A notice has named a version."""
        self._noticed = max(self._noticed, version)
        if self._named is not None and self._named[0] <= self._noticed:
            self._named = None

    def reset(self) -> None:
        """Versions count from the beginning again."""
        self._noticed, self._named = 0, None

    @property
    def next_time(self) -> float:
        """When the subscription is lost unless a notice comes."""
        return float("inf") if self._named is None else self._named[1] + UNHEARD_TIMEOUT

    def is_lost(self, now: float) -> bool:
        """Whether to subscribe again. It is said once."""
        if now < self.next_time:
            return False
        self._named = None
        return True
