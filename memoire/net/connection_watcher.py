"""What looks after one socket's connections inside of a `Poller`."""

from __future__ import annotations

from typing import Protocol

from .context import Socket


class ConnectionWatcher(Protocol):
    """What a `Poller` needs of a `link.Link`, or of what watches a socket that listens."""

    @property
    def look_at(self) -> float:
        """When `turn` has something to do."""

    @property
    def monitor(self) -> Socket | None:
        """What ZeroMQ tells about the connection through."""

    def turn(self, now: float) -> None:
        """Do what is due."""

    def heard(self) -> None:
        """Take what the monitor has."""

    def leave(self, made: Socket) -> None:
        """Forget a socket that is about to be closed."""

    def close(self) -> None:
        """Give the monitor back."""
