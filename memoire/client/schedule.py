"""When a client sends its next UPDATE. Pure: time and chance are passed in."""

from __future__ import annotations

import random

from .insert_grant import InsertGrant
from .line_outbox import LineOutbox
from .push_window import PushWindow

HEARTBEAT_INTERVAL = 5.0
"""Seconds between two UPDATE messages of a client that has no news."""
PRESSED_INTERVAL = 0.01
"""Seconds between two UPDATE messages while the byte window is half used, or TD errors wait at the home."""
REPORT_DELAY = 0.3
"""Seconds within which NEWS is answered by UPDATE, at random: a thousand clients hear of it in the same instant."""


class UpdateSchedule:
    """When the next UPDATE is due, from what has happened since the newest one. The owner locks.

    Args:
        interval: Seconds between two UPDATE messages of a client that has news.
    """

    def __init__(self, interval: float, rng: random.Random) -> None:
        self.is_open = False
        """Whether an UPDATE is on its way that has no answer yet."""
        self.is_dirty = False
        """Whether there is something to say."""
        self.asked = 0
        """Calls of update() until now; the number of one is its ticket."""
        self.answered = 0
        """The newest of these calls that an answer covers."""
        self.asked_line = 0
        """Newest log line that somebody waits for."""
        self.pressed = 0
        """Calls that wait for room in the byte window."""
        self.has_feedback = False
        """Whether TD errors were applied that the home does not know of."""
        self.awaits_feedback = False
        """Whether more of them wait at the home than one reply brings."""
        self._interval, self._rng = interval, rng
        self._sent_at = 0.0
        self._news_at = float("inf")  # when to answer NEWS

    def ask(self, line: int) -> int:
        """Somebody waits until everything is acknowledged, log lines up to `line` too; returns the ticket."""
        self.asked, self.asked_line = self.asked + 1, line
        return self.asked

    def hurry(self) -> None:
        """Send one at once, whatever there is to say."""
        self._news_at = 0.0

    def hear_news(self, now: float) -> None:
        """The home has sent NEWS: an UPDATE is due at a random time within `REPORT_DELAY` seconds. Its reply has the
        news.
        """
        self._news_at = min(self._news_at, now + self._rng.uniform(0.0, REPORT_DELAY))

    def begin(self, now: float) -> None:
        """One is sent."""
        self.is_open, self._sent_at, self._news_at = True, now, float("inf")
        self.has_feedback = self.awaits_feedback = False

    def put_off(self, until: float) -> None:
        """The newest one was refused: send none before."""
        self.is_dirty, self._sent_at = True, until

    @property
    def soonest(self) -> float:
        """When to send the next one to whoever waits for it: at once, unless the newest one was refused."""
        return self._sent_at

    def due(self, outbox: LineOutbox, window: PushWindow, inserts: InsertGrant) -> float:
        """When the next one is due, provided that none is open."""
        # Lines wait that somebody waits for and that did not fit the last one, or so many that log() soon waits.
        has_backlog = outbox.oldest <= self.asked_line or outbox.is_half_full
        if self.asked > self.answered or has_backlog:
            return self._sent_at
        if inserts.waiting or inserts.is_short:
            return self._sent_at + inserts.pause
        if self.pressed or window.is_half_used or inserts.is_half_used or self.awaits_feedback:
            return self._sent_at + PRESSED_INTERVAL
        if self.has_feedback:  # a learner is at work: what it says next is fetched soon, too
            return min(self._news_at, self._sent_at + self._interval / 2)
        return min(self._news_at, self._sent_at + (self._interval if self.is_dirty else HEARTBEAT_INTERVAL))
