"""What is known of one address behind a proxy, and what each of its WELCOMEs changes. Pure: no socket, no clock.

A server answers there, or another proxy: then one WELCOME names all servers behind it, and a different one of them may
answer each time.

What a proxy has counted, and the addresses behind it at one moment. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from memoire.errors import Refused
from memoire.models.topics import Topics
from memoire.wire import messages
from memoire.wire.frames import TOO_LARGE, Answer, HelloSchedule, MessageHeader, name_hash

if TYPE_CHECKING:
    from memoire.figures import counter, gauge

MAX_SERVERS = 4096
"""Servers behind one address whose epochs are kept: as many as a WELCOME can name."""
NOT_LET_IN = ("denied", "version", *TOO_LARGE)
"""Codes of refusals of HELLO that last until somebody changes something: whoever asks this proxy is told."""


class BackendChange(NamedTuple):
    """What a WELCOME has changed."""

    has_moved: bool
    """Whether caches and notices have other addresses there, or this is the first WELCOME."""
    has_restarted: bool
    """Whether the server that answered began again: it may have forgotten something."""
    is_new_run: bool
    """Whether another run is counted there."""


class Backend(ABC):
    """One address behind a proxy. Belongs to the proxy's thread; other threads may read."""

    topics: Topics
    """Models that were published there."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.names: tuple[str, ...] = ()
        """Servers that are reached there; none until it has answered."""
        self.leaving: tuple[str, ...] = ()
        """Those that take no new clients; a proxy's list may be without them already."""
        self.unmet: tuple[str, ...] = ()
        """Addresses behind it, if that is a proxy, at which nobody has answered yet."""
        self.run = 0
        """Hash of the run that is counted there."""
        self.endpoints = messages.Endpoints()
        """Where it takes caches and publishes, as it says."""
        self.pages: tuple[str, ...] = ()
        """Where it, and what is behind it, shows pages."""
        self.inference: tuple[str, ...] = ()
        """Addresses of inference nodes that act for clients of the servers there."""
        self.hello = HelloSchedule()
        self.refusal = ""
        """Why this proxy, or the one that is there, is not let in; "" while nobody says so."""
        self.is_too_small = False
        """Whether that is because WELCOME is longer than the proxy's own limits allow."""
        self._epoch = 0  # of the newest WELCOME
        self._epochs: OrderedDict[str, int] = OrderedDict()  # by the server that answered; the one heard last is last

    @property
    @abstractmethod
    def is_away(self) -> bool:
        """Whether it has not answered for a while."""

    @property
    @abstractmethod
    def denied(self) -> str:
        """Why this proxy is not let in there, or the one that is there further on; "" while nobody says so."""

    def answered(self, answer: Answer) -> None:
        """HELLO has its answer; what a WELCOME says is for `learn`."""
        self.hello.answered()
        refusal = answer if isinstance(answer, Refused) and answer.code in NOT_LET_IN else None
        self.refusal = "" if refusal is None else refusal.text
        self.is_too_small = refusal is not None and refusal.code in TOO_LARGE

    def learn(self, header: MessageHeader, told: messages.Welcome) -> BackendChange:
        """Take what a WELCOME says."""
        # Behind another proxy a different server may answer each time: only the same one can have begun again.
        has_restarted = self._epochs.get(told.home_name, told.epoch) != told.epoch
        has_moved = not self.names or told.endpoints != self.endpoints
        change = BackendChange(has_moved, has_restarted, self.run not in (0, header.run))
        self._keep_epoch(told.home_name, told.epoch)
        self.run, self.endpoints = header.run, told.endpoints
        self.names = tuple(told.servers or [told.home_name])
        self.leaving, self.unmet = tuple(told.leaving), tuple(told.unmet)
        return change

    def _keep_epoch(self, name: str, epoch: int) -> None:
        """Keep a server's epoch. Behind a proxy whose servers get other names each time, the oldest are forgotten."""
        self._epochs[name] = self._epoch = epoch
        self._epochs.move_to_end(name)
        while len(self._epochs) > MAX_SERVERS:
            self._epochs.popitem(last=False)

    def heard_news(self) -> None:
        """NEWS came from there. It may be about more than clients: another run, or a server that leaves."""
        self.hello.hurry()

    def hears(self, header: MessageHeader) -> bool:
        """Whether a notice is about the run that is counted there; if not, HELLO asks which run that is now."""
        is_same = header.run in (0, self.run)
        if not is_same:
            self.hello.hurry()
        return is_same

    def publisher(self, noticed: tuple[int, int]) -> tuple[int, int]:
        """Hash of the name and epoch of the server that has published a model here.

        Args:
            noticed: The same as the model's notice says, zeros if there was none.
        """
        if len(self.names) != 1:
            return noticed
        # An epoch is the time at which a server began, or one more than the one before (with a state folder), so the
        # larger one is of the later life. If a clock was set back, the model gets the epoch of the former life: then
        # those who follow this proxy hear of the restart by their own HELLO, which compares for equality.
        return name_hash(self.names[0]), max(noticed[1], self._epoch)


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

    # fmt: off
    endpoint: str
    servers: tuple[str, ...]
    """Names of the servers reached there; empty until it has answered."""
    leaving: tuple[str, ...]
    """Those of them that are being drained."""
    is_away: bool
    queued_bytes: Annotated[int, gauge("proxy_queue_bytes", "Queued", "Bytes that wait for the address behind the "
        "proxy.")]
    lost_requests: Annotated[int, counter("proxy_lost_requests", "Requests lost", "Requests lost because the queue was "
        "full; clients ask again.")]
    lost_caches: Annotated[int, counter("proxy_lost_caches", "Caches lost", "Caches lost because the queue was full.")]
    lost_bytes: Annotated[int, counter("proxy_lost_bytes", "Bytes lost", "Bytes of these caches.")]
    # fmt: on

    @property
    def is_up(
        self,
    ) -> Annotated[bool, gauge("proxy_back_up", "Up", "1 where the address behind the proxy answers, 0 where not.")]:
        """Whether it answers."""
        return not self.is_away
