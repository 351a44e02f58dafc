"""Which server a message goes to: the homes behind each address, new clients by rendezvous hash, addresses that were
taken off the list, and what becomes of a WELCOME on its way to a client. Pure: no lock, no socket, no clock.

    listed     tcp://a ── homes a, b          new clients: each name has the same chance, unless away or leaving
               tcp://c ── home c
    retiring   tcp://d ── home d, for 5 s     its clients are told to go elsewhere; then "d" is known to be removed

At each address a server answers, or another proxy: then one WELCOME names all servers behind it, and a different one of
them may answer each time.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, TypeVar

import msgspec

from memoire.errors import Refused
from memoire.limits import Limits
from memoire.models.topics import Topics
from memoire.wire import messages
from memoire.wire.frames import TOO_LARGE, Answer, HelloSchedule, MessageHeader, name_hash

if TYPE_CHECKING:
    from memoire.figures import counter, gauge


SETTLE_INTERVAL = 1.0
"""Seconds after its start for which a proxy waits for all servers before it gives clients to those it knows."""
START_GRACE = 60.0
"""Seconds after its start for which a proxy waits for servers it has not met, before it calls a home unknown: a client
that leaves a home which is only away cannot tell it what it has pushed there. An upgrade replaces both at a time.
"""
RETIRE_TIMEOUT = 5.0
"""Seconds for which an address that was taken off the list still serves its clients, to tell them to go elsewhere."""

MAX_PAGES = 4096
"""Addresses of pages that a WELCOME has room for."""
MAX_REMOVED = 4096
"""Homes that are known to be removed. A client of an older one is told so later, after `START_GRACE`."""


B = TypeVar("B", bound="Backend")


class Router(Generic[B]):
    """The addresses and the homes behind them. Belongs to the proxy's thread; other threads may read.

    Args:
        now: When the proxy began, by the clock of all other times.
    """

    def __init__(self, now: float) -> None:
        self.backs: list[B] = []
        """Those on the list."""
        self.retiring: dict[B, float] = {}
        """Those that were taken off it, and when they are closed."""
        self.listed_at = now
        """When the list was given."""
        self.homes: dict[int, B] = {}
        """By the hash of a server's name, the way to it."""
        self.pages: tuple[str, ...] = ()
        """Where the proxy's own pages are."""
        self._removed: dict[int, None] = {}  # homes behind addresses that were taken off the list, newest last

    # Who is there

    @property
    def all(self) -> list[B]:
        """Every address that is open."""
        return [*self.backs, *self.retiring]

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that answered so far."""
        return tuple(dict.fromkeys(name for back in self.backs for name in back.names))

    @property
    def denied(self) -> str:
        """Why no server lets this proxy in, a sentence each; "" while one may."""
        whys = [back.denied for back in self.backs]
        return " ".join(dict.fromkeys(whys)) if all(whys) else ""

    @property
    def is_too_small(self) -> bool:
        """Whether a server's WELCOME is longer than this proxy's limits allow."""
        return any(back.is_too_small for back in self.backs)

    def unmet(self) -> list[str]:
        """Addresses on this list, and on those of proxies behind it, where nobody has answered since it began."""
        own = [back.endpoint[:256] for back in self.backs if not back.names]
        return [*own, *(address for back in self.backs for address in back.unmet)]

    def is_ready(self, now: float) -> bool:
        """Whether new clients may be shared out: all servers are known, or some are and the others had their time."""
        if all(back.names for back in self.backs):
            return True
        return any(back.names for back in self.backs) and now - self.listed_at > SETTLE_INTERVAL

    def ready_at(self) -> float:
        """When `is_ready` may become true without an answer; infinity while no server is known at all."""
        return self.listed_at + SETTLE_INTERVAL if self.homes else float("inf")

    def is_unknown(self, home: int, now: float) -> bool:
        """Whether a home that nobody leads to is surely not here: every server was met or had its time, or this home
        was removed.
        """
        is_settled = all(back.names for back in self.backs) or now - self.listed_at > START_GRACE
        return is_settled or home in self._removed

    # Which way

    def assign(self, client: bytes) -> B:
        """The way to the home of a new client: its own by rendezvous hash, among the servers that are there."""
        known = {name: back for back in self.backs for name in back.names}
        there = {name: back for name, back in known.items() if not back.is_away}
        staying = {name: back for name, back in there.items() if name not in back.leaving}
        choice = staying or there or known
        return choice[rendezvous(client, choice)]

    def answered(self, home: int, back: B) -> None:
        """A home has answered by this way. A proxy there may have met it since it was asked last."""
        self.homes.setdefault(home, back)

    def learn(self, back: B) -> None:
        """A server, or a proxy with servers, has said who it is."""
        for home in [home for home, former in self.homes.items() if former is back]:
            del self.homes[home]
        # Those that leave, too, while the way there is open: a request that is sent again, and refused, may be one that
        # was counted there and whose answer is late.
        for name in (*back.names, *back.leaving):
            home = name_hash(name)
            self.homes.setdefault(home, back)
            self._removed.pop(home, None)

    # Another list

    def relist(self, wanted: Sequence[str], open_back: Callable[[str], B], now: float) -> bool:
        """From now on these addresses are the list; False if they have been before.

        Args:
            open_back: Opens an address that is new here.
        """
        former = {back.endpoint: back for back in self.all}
        if set(wanted) == {back.endpoint for back in self.backs}:
            return False
        self.listed_at = now
        self.backs = [former.get(endpoint) or open_back(endpoint) for endpoint in wanted]
        for back in former.values():
            if back.endpoint in wanted:
                self.retiring.pop(back, None)
            else:
                self.retiring.setdefault(back, now + RETIRE_TIMEOUT)
        return True

    def retire(self, now: float) -> set[B]:
        """Addresses that are to be closed: their clients had time to hear of it, or nobody is there to tell them."""
        gone = {back for back, until in self.retiring.items() if now >= until or back.is_away}
        if gone:
            self._forget([home for home, back in self.homes.items() if back in gone])
            self.homes = {home: back for home, back in self.homes.items() if back not in gone}
            for back in gone:
                del self.retiring[back]
            for back in self.backs:
                self.learn(back)
        return gone

    def _forget(self, homes: Iterable[int]) -> None:
        """Know these homes to be removed; of very many, only the newest ones."""
        self._removed |= dict.fromkeys(homes)
        while len(self._removed) > MAX_REMOVED:
            del self._removed[next(iter(self._removed))]

    # What clients are told

    def welcome(
        self, told: messages.Welcome, endpoints: messages.Endpoints, models: Mapping[str, int], limits: Limits
    ) -> messages.Welcome:
        """A server's WELCOME as a client behind this proxy gets it: with the proxy's own addresses and list, no limit
        above the proxy's, and the newest version of each model that either of them has.
        """
        newest = {topic: max(version, told.models.get(topic, 0)) for topic, version in models.items()}
        retiring = (name for back in self.retiring for name in back.names)
        leaving = dict.fromkeys([*told.leaving, *(name for back in self.backs for name in back.leaving), *retiring])
        inference = dict.fromkeys(address for back in self.backs for address in back.inference)
        return msgspec.structs.replace(
            told,
            endpoints=endpoints,
            servers=list(self.servers),
            leaving=list(leaving),
            unmet=self.unmet(),
            pages=list(dict.fromkeys([*self.pages, *(page for back in self.backs for page in back.pages)]))[:MAX_PAGES],
            inference=list(inference)[: messages.MAX_INFERENCE],
            models={**told.models, **newest},
            limits={name: int(min(bytes_, limits.get(name, bytes_))) for name, bytes_ in told.limits.items()},
        )


def rendezvous(client: bytes, names: Iterable[str]) -> str:
    """The name that this client belongs to: the same everywhere, and moved by a change of names only where it must be.

    Highest random weight: Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates, 1998.
    """
    return max(names, key=lambda name: hashlib.blake2b(client + name.encode(), digest_size=8).digest())


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


@dataclass
class ProxyCounts:
    """What was counted since the proxy began. The thread counts, and any thread may read."""

    requests: int = 0
    """Forwarded to servers, or answered here."""
    replies: int = 0
    """That came from servers."""
    caches: int = 0
    cache_bytes: int = 0
    homeless: int = 0
    """Messages for a server that is not known here."""
    refused: Counter[str] = field(default_factory=Counter)
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
