"""Tight limits that make rare branches frequent. The seed of a trial chooses a few limits.

Examples are a queue of one message, a turn of one request and a journal of accounts that forgets at once. A cluster of
this size would reach such branches once a month.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from memoire.accounting import runs as unsaved_changes
from memoire.client import reports
from memoire.disk import opening
from memoire.limits import Limits
from memoire.models import io as feed
from memoire.net import channel, sockets
from memoire.proxy import io as io_front
from memoire.proxy import requests
from memoire.server import io as io_intake
from memoire.server import io_requests

CONSTANTS: Final[dict[tuple[Any, str], float]] = {
    (io_requests, "REQUESTS_PER_TURN"): 1,
    (io_intake, "CACHES_PER_TURN"): 1,
    (io_front, "MESSAGES_PER_TURN"): 1,
    (channel, "MAX_PER_TURN"): 1,
    (feed, "NOTICES_PER_TURN"): 1,
    (reports, "LINES_PER_UPDATE"): 1,
    (reports, "ENDED_PER_UPDATE"): 1,
    (requests, "MAX_PENDING"): 1,
    (unsaved_changes, "MAX_WAITING"): 1,
    (sockets, "REQUEST_MESSAGES"): 2,
    (sockets, "NOTICE_MESSAGES"): 1,
    (sockets, "DATA_MESSAGES"): 1,
    (opening, "INLINE_BYTES"): 0,
    (io_requests, "FOLD_INTERVAL"): 0.5,
}
LIMITS: Final = {"inline_model": 0, "model_chunk": 16, "account_timeout": 5.0, "request_bytes": 1 << 16}
"""Tight values for settings in a server's `Limits`."""
PREEMPTED: Final = 0.3
"""Probability that tasks give way at places where threads rarely change."""


class Rarely:
    """The tight limits of one trial.

    Args:
        share: Probability of each limit.
    """

    def __init__(self, seed: int, share: float) -> None:
        rng = random.Random(f"rarely {seed}")
        self.constants = {place: value for place, value in CONSTANTS.items() if rng.random() < share}
        self._limits = {name: value for name, value in LIMITS.items() if rng.random() < share}
        self.preempt = PREEMPTED if rng.random() < share else 0.0
        self._rng = rng

    @property
    def limits(self) -> Limits:
        return Limits.of(**self._limits)  # type: ignore[arg-type]

    def put(self, put: Callable[[Any, str, Any], None]) -> None:
        for (module, name), value in self.constants.items():
            put(module, name, value)

    def leaves_at_once(self) -> bool:
        """Return True if a client leaves without a last UPDATE."""
        return self._rng.random() < 0.5

    def __str__(self) -> str:
        names = [name for _, name in self.constants] + list(self._limits) + (["preempt"] if self.preempt else [])
        return ", ".join(names) or "none"
