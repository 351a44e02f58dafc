"""What a learner far away may know of the servers that it asks, whatever it asks them for. Pure: no lock, no socket, no
clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.wire import messages
from memoire.wire.frames import Answer

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


@dataclass(frozen=True, slots=True)
class FarRequest:
    """A request to send to a server; what ends it goes to `FarSide.answered`."""

    server: FarServer
    body: messages.Body


class FarSide(Protocol):
    """What a learner far away asks of tables of one kind, and what it makes of the answers. Pure. The owner locks all
    but `late` and `read`.
    """

    CALLED: ClassVar[str]
    """What a call waits for, in errors."""
    taken: int
    """Entries that calls got."""

    @property
    def kept(self) -> int:
        """Entries that came, and that no call has got yet."""

    @property
    def stale(self) -> int:
        """Entries that came, and were passed over here: their model was too old by then."""

    def next_time(self, now: float) -> float:
        """When `late` or `begin` has something to do; infinity while only an answer can bring that about."""

    def begin(self, now: float) -> Sequence[FarRequest]:
        """The requests to send now."""

    def read(self, answer: Answer, now: float) -> Any:
        """What an answer brings; nothing where it is an error, or is not of this protocol."""

    def answered(self, request: FarRequest, answer: Answer, came: Any, now: float) -> None:
        """A request has ended by a reply, of which `came` was read, or by an error."""

    def late(self, now: float, down: Collection[object]) -> Sequence[FarServer]:
        """Servers that no call waits for any longer; `down` are addresses that surely have no connection."""

    def leave_out(self, server: FarServer) -> None:
        """It did not answer in time: calls go on without it."""

    def forget(self, server: FarServer) -> None:
        """It is on no list any more."""

    def clear(self) -> None:
        """Another run is counted."""

    def want(self, wanted: Any) -> None:
        """A call waits for this from now on; None: it has ended."""

    def take(self, versions: Mapping[str, int]) -> Sequence[Any]:
        """What is wanted, if all of it is here; else nothing. `versions` are the newest of each topic."""

    def why_not(self) -> tuple[int, int, int, str]:
        """What there is for the call that waits (entries, parts that are here, clients), and what it waits for."""


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
