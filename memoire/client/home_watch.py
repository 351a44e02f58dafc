"""Whether a client's home answers: when to say that it does not, and when to say that it does again. Pure."""

from __future__ import annotations

from typing import Literal

AWAY_TIMEOUT = 10.0
"""Seconds without an acknowledgement after which a home is said to be away: two heartbeats of a client."""

Change = Literal["away", "back", ""]


class HomeWatch:
    """One word when a home has been away for `AWAY_TIMEOUT`, and one when it is back.

        acknowledged     10 s later: away                 acknowledged: back
    ───────●────────────────────●─────────────────────────────●──────────────▶
    """

    def __init__(self, now: float) -> None:
        self.acknowledged_at = now
        """When the home acknowledged something last."""
        self.is_away = False

    @property
    def due(self) -> float:
        """When `look` has something to say, unless an acknowledgement comes before."""
        return float("inf") if self.is_away else self.acknowledged_at + AWAY_TIMEOUT

    def acknowledged(self, now: float) -> Change:
        """The home has acknowledged something; "back" where it was said to be away."""
        self.acknowledged_at = now
        was_away, self.is_away = self.is_away, False
        return "back" if was_away else ""

    def look(self, now: float) -> Change:
        """Once, as soon as it is due: "away"."""
        if now < self.due:
            return ""
        self.is_away = True
        return "away"
