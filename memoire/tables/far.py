"""What a learner far away may know of the servers that it asks, whatever it asks them for. Pure: no lock, no socket, no
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema

LEFT_OUT_TIMEOUT = 3.0
"""Seconds that a call waits for a server before it is left out."""
RETRY_INTERVAL = 0.02
"""Seconds before servers that had too little are asked again, at most."""
REFUSED_INTERVAL = 0.5
"""Seconds before a server that refused is asked again: a HELLO finds out what is true there meanwhile."""


@dataclass(frozen=True, slots=True)
class TableTerms:
    """What servers say of the table. Replaced as a whole, so that any thread may read it."""

    schema: Schema
    parameters: Parameters
    parameters_version: int
    table: str
    storage: str = "caches"


class FarServer(Protocol):
    """One server."""

    is_away: bool
    """It did not answer in time, and is left out."""
    is_finished: bool
    """It says that the run is over."""
    fingerprint: int
    """Of the parameters that it draws by; 0 until it has said so."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def address(self) -> Any:
        """The address that it is reached by."""

    @property
    def home(self) -> int:
        """Its number, as headers say it."""


class FarServers(Protocol):
    """The servers of one table."""

    @property
    def terms(self) -> TableTerms | None:
        """What they say of the table; None until one has answered."""

    @property
    def known(self) -> Sequence[FarServer]:
        """All of them."""

    @property
    def there(self) -> Sequence[FarServer]:
        """Those that are not left out."""

    @property
    def meets_until(self) -> float:
        """Until when an address that has not answered has its time."""

    def is_meeting(self, now: float) -> bool:
        """Whether one has not answered yet, and still has its time."""

    def differing(self) -> Sequence[FarServer]:
        """Those that draw by other parameters than those of `terms`."""

    def ask_soon(self) -> None:
        """Have every address say at once what is true there: something may have changed."""

    def reported(self, server: FarServer, is_finished: bool) -> None:
        """A server says whether the run is over."""
