"""Who is there: clients or readers that were heard lately. Pure."""

from __future__ import annotations

from typing import Final

EXPIRY_INTERVAL: Final = 1.0
"""Seconds between two looks for silent clients and readers."""


class Presence:
    """When each was last heard, until it has been silent for `timeout` seconds.

    Args:
        timeout: Seconds of silence after which one is gone.
        now: Seconds of the clock that all other times are of.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout = timeout
        self._expired = now  # when silent ones were last let go
        self._heard: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def __contains__(self, who: bytes) -> bool:
        return who in self._heard

    def heard(self, who: bytes, now: float) -> None:
        """A sign of life."""
        self._heard[who] = now

    def forget(self, who: bytes) -> None:
        """One has ended, if it was there."""
        self._heard.pop(who, None)

    def is_due(self, now: float) -> bool:
        """Whether to `expire` again: once in `EXPIRY_INTERVAL`."""
        return now - self._expired > EXPIRY_INTERVAL

    def expire(self, now: float) -> list[bytes]:
        """Let silent ones go; returns which."""
        self._expired = now
        silent = [who for who, heard in self._heard.items() if heard < now - self.timeout]
        for who in silent:
            del self._heard[who]
        return silent
