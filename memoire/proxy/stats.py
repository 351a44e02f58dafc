"""What a proxy has counted, and the addresses behind it at one moment. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


class ProxyCounts:
    """What was counted since the proxy began. The thread counts, and any thread may read."""

    def __init__(self) -> None:
        self.requests = 0
        """Forwarded to servers, or answered here."""
        self.replies = 0
        """That came from servers."""
        self.caches = 0
        self.cache_bytes = 0
        self.homeless = 0
        """Messages for a server that is not known here."""
        self.refused: Counter[str] = Counter()
        """Messages that were refused, by code."""

    def refuse(self, code: str) -> None:
        """Count a message that was refused."""
        self.refused[code] += 1


@dataclass(frozen=True, slots=True)
class BackStats:
    """One address behind a proxy."""

    endpoint: str
    servers: tuple[str, ...]
    """Names of the servers reached there; empty until it has answered."""
    leaving: tuple[str, ...]
    """Those of them that are being drained."""
    is_away: bool
    queued_bytes: int
    lost_requests: int
    lost_caches: int
    lost_bytes: int
