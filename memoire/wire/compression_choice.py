"""Whether compressing frames pays, found by trying (`Parameters(compression="auto")`). Pure: others measure seconds.

    plain ──▶ somebody waits for the network ──▶ packed, on trial ──▶ less time for a sample ──▶ packed for a while
      ▲                                                └─▶ not less ──▶ plain for a while ──┐              │
      └─────────────────────────────────────────────────────────────────────────────────────┴──────────────┘

What is compared is what a caller has of it: the seconds for which it was kept, over the samples that went. So the link,
the data and the processor count as they are, and nothing is estimated. The first messages after a change are not
counted: what the other way has put on the link delays them.
"""

from __future__ import annotations

from typing import Final

TRIAL: Final = 8
"""Messages that are counted before anything is decided."""
WHILE: Final = 1024
"""Messages for which a decision holds."""
LEAST_WAITING: Final = 0.1
"""Share of the seconds that were spent waiting, below which there is nothing to win: the link carries all."""
LEAST_GAIN: Final = 0.9
"""Packed messages have to take less than this share of the plain ones' seconds: they cost others a processor, too."""


class CompressionChoice:
    """Of one sender, or of one reader that has servers pack for it. Not thread-safe: the owner locks."""

    def __init__(self) -> None:
        self.packs = False
        """Whether to pack the next message."""
        self._plain = 0.0  # seconds that a sample took before the trial
        self._on_trial = False
        self._rest(0)

    def spend(self, seconds: float, waited: float = 0.0) -> None:
        """A caller was kept for so long, by packing and waiting; of it, it waited for the network."""
        self._seconds += seconds
        self._waited += waited

    def carried(self, samples: int) -> None:
        """With that, a message of so many samples went."""
        if self._skipped:
            self._skipped -= 1
            self._seconds = self._waited = 0.0
            return
        self._messages += 1
        self._samples += samples
        if self._messages == TRIAL:
            self._decide()

    def _decide(self) -> None:
        """So many messages went this way."""
        cost = self._seconds / max(1, self._samples)
        if self._on_trial:
            self._on_trial, self.packs = False, cost < LEAST_GAIN * self._plain
            self._rest(WHILE)
        elif self.packs:  # for long enough: is it still slow without?
            self.packs = False
            self._rest(TRIAL)
        elif self._waited >= LEAST_WAITING * self._seconds > 0.0:
            self._plain, self._on_trial, self.packs = cost, True, True
            self._rest(TRIAL)
        else:
            self._rest(0)

    def _rest(self, messages: int) -> None:
        """Count from so many messages on."""
        self._skipped = messages
        self._messages = self._samples = 0
        self._seconds = self._waited = 0.0
