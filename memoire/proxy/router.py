"""Routing: homes behind each address, assignment of new clients, removed addresses, and changes of a WELCOME. Pure.

    listed     tcp://a ── homes a, b          new clients: each name has the same chance, unless away or leaving
               tcp://c ── home c
    retiring   tcp://d ── home d, for 5 s     its clients must leave; then "d" counts as removed

At each address is a server, or another proxy. A WELCOME from a proxy names all servers behind it, and another server
may answer each time.
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
"""Seconds after its start for which a proxy waits for all servers before it assigns clients to the known ones."""
START_GRACE = 60.0
"""Seconds after its start until a proxy treats homes as unknown while servers have not answered. A client that leaves a
home that is only away cannot report its pushes there. An upgrade restarts servers and proxy at the same time.
"""
RETIRE_TIMEOUT = 5.0
"""Seconds for which a removed address still serves its clients, to tell them to leave."""

MAX_PAGES = 4096
"""Maximum number of page addresses in a WELCOME."""
MAX_REMOVED = 4096
"""Maximum number of removed homes that are remembered; a client of an older one must wait for `START_GRACE`."""


B = TypeVar("B", bound="Backend")


class Router(Generic[B]):
    """Addresses of servers, and the home servers behind them. Belongs to the proxy's thread; other threads may read.

    Args:
        now: Start time of the proxy, on the clock of all other times.
    """

    def __init__(self, now: float) -> None:
        self.backs: list[B] = []
        """Addresses on the current list."""
        self.retiring: dict[B, float] = {}
        """Removed addresses, with the time at which each is closed."""
        self.listed_at = now
        """Time of the last change of the list."""
        self.homes: dict[int, B] = {}
        """Address for each home server, by the hash of the server's name."""
        self.pages: tuple[str, ...] = ()
        """Addresses of the proxy's own pages."""
        self._removed: dict[int, None] = {}  # servers behind removed addresses, newest last

    # Known servers

    @property
    def all_addresses(self) -> list[B]:
        """All open addresses, listed and retiring."""
        return [*self.backs, *self.retiring]

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that have answered so far."""
        return tuple(dict.fromkeys(name for back in self.backs for name in back.names))

    @property
    def denial_reasons(self) -> str:
        """Reasons, a sentence each, why all servers deny access to this proxy; "" if a server may accept it."""
        reasons = [back.denial_reason for back in self.backs]
        return " ".join(dict.fromkeys(reasons)) if all(reasons) else ""

    @property
    def is_too_small(self) -> bool:
        """True if a server's WELCOME exceeds this proxy's limits."""
        return any(back.is_too_small for back in self.backs)

    def unanswered_addresses(self) -> list[str]:
        """Return addresses on the lists of this proxy and of proxies behind it at which no server has answered yet."""
        addresses = [back.endpoint[:256] for back in self.backs if not back.names]
        return [*addresses, *(address for back in self.backs for address in back.unmet)]

    def is_ready(self, now: float) -> bool:
        """Return True if new clients can be assigned: all servers are known, or the wait for servers is over."""
        if all(back.names for back in self.backs):
            return True
        return any(back.names for back in self.backs) and now - self.listed_at > SETTLE_INTERVAL

    def ready_at(self) -> float:
        """Return the time at which `is_ready` may become true without a reply; infinity if no server is known."""
        return self.listed_at + SETTLE_INTERVAL if self.homes else float("inf")

    def is_server_absent(self, home: int, now: float) -> bool:
        """Return True if a server without an address is surely not here: every server has answered, `START_GRACE` is
        over, or the home server was removed.
        """
        is_settled = all(back.names for back in self.backs) or now - self.listed_at > START_GRACE
        return is_settled or home in self._removed

    # Routes

    def assign(self, client: bytes) -> B:
        """Return the address of a new client's home, by rendezvous hash among the present servers."""
        known = {name: back for back in self.backs for name in back.names}
        present = {name: back for name, back in known.items() if not back.is_away}
        staying = {name: back for name, back in present.items() if name not in back.leaving}
        choice = staying or present or known
        return choice[rendezvous(client, choice)]

    def receive_answer(self, home: int, back: B) -> None:
        """Record the address of a home server that has answered. A proxy there may know new homes since its WELCOME."""
        self.homes.setdefault(home, back)

    def update_homes(self, back: B) -> None:
        """Update the home servers from an address that has sent a WELCOME."""
        for home in [home for home, former in self.homes.items() if former is back]:
            del self.homes[home]
        # Leaving servers count while the connection is open: such a server may have counted a resent request that is
        # refused, while the server's reply is still on the way.
        for name in (*back.names, *back.leaving):
            home = name_hash(name)
            self.homes.setdefault(home, back)
            self._removed.pop(home, None)

    # Changes of the list

    def relist(self, wanted: Sequence[str], open_back: Callable[[str], B], now: float) -> bool:
        """Replace the list of addresses; return False if the list is unchanged.

        Args:
            open_back: Function that opens a new address.
        """
        former = {back.endpoint: back for back in self.all_addresses}
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
        """Remove and return addresses to close: their time is over, or they do not answer."""
        closing = {back for back, until in self.retiring.items() if now >= until or back.is_away}
        if closing:
            self._forget([home for home, back in self.homes.items() if back in closing])
            self.homes = {home: back for home, back in self.homes.items() if back not in closing}
            for back in closing:
                del self.retiring[back]
            for back in self.backs:
                self.update_homes(back)
        return closing

    def _forget(self, homes: Iterable[int]) -> None:
        """Record homes as removed; keep only the newest `MAX_REMOVED`."""
        self._removed |= dict.fromkeys(homes)
        while len(self._removed) > MAX_REMOVED:
            del self._removed[next(iter(self._removed))]

    # WELCOME for clients

    def welcome(
        self, welcome: messages.Welcome, endpoints: messages.NodeEndpoints, models: Mapping[str, int], limits: Limits
    ) -> messages.Welcome:
        """Return a server's WELCOME as a client of this proxy gets it. The client's WELCOME has the proxy's addresses
        and servers, no limit above the proxy's, and the newest known version of each model.
        """
        newest = {topic: max(version, welcome.models.get(topic, 0)) for topic, version in models.items()}
        retiring = (name for back in self.retiring for name in back.names)
        leaving = dict.fromkeys([*welcome.leaving, *(name for back in self.backs for name in back.leaving), *retiring])
        inference = dict.fromkeys(address for back in self.backs for address in back.inference)
        return msgspec.structs.replace(
            welcome,
            endpoints=endpoints,
            servers=list(self.servers),
            leaving=list(leaving),
            unmet=self.unanswered_addresses(),
            pages=list(dict.fromkeys([*self.pages, *(page for back in self.backs for page in back.pages)]))[:MAX_PAGES],
            inference=list(inference)[: messages.MAX_INFERENCE],
            models={**welcome.models, **newest},
            limits={name: int(min(bytes_, limits.get(name, bytes_))) for name, bytes_ in welcome.limits.items()},
        )


def rendezvous(client: bytes, names: Iterable[str]) -> str:
    """Return the name that this client belongs to, equal at every node. A change of names moves few clients.

    Highest random weight: Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates, 1998.
    """
    return max(names, key=lambda name: hashlib.blake2b(client + name.encode(), digest_size=8).digest())


MAX_SERVERS = 4096
"""Maximum number of servers behind one address whose epochs are kept, as many as a WELCOME can name."""
NOT_LET_IN = ("denied", "version", *TOO_LARGE)
"""Codes of refusals of a HELLO that last until a person changes a setting; the proxy passes them on to clients."""


class BackendChange(NamedTuple):
    """Changes that a WELCOME reports."""

    has_moved: bool
    """True if the addresses for caches and notices are new, also at the first WELCOME."""
    has_restarted: bool
    """True if the answering server has restarted, and may have lost state."""
    is_new_run: bool
    """True if the server counts another run."""


class Backend(ABC):
    """Address behind a proxy, and the servers that answer there. Belongs to the proxy's thread; any thread may read."""

    topics: Topics
    """Models that were published at this address."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.names: tuple[str, ...] = ()
        """Names of the servers reached at this address; empty before the first answer."""
        self.leaving: tuple[str, ...] = ()
        """Names of servers that accept no new clients. A proxy may already omit them from its list."""
        self.unmet: tuple[str, ...] = ()
        """Addresses behind a proxy at this address at which no server has answered yet."""
        self.run = 0
        """Hash of the run that the servers count."""
        self.endpoints = messages.NodeEndpoints()
        """Reported addresses for caches and notices."""
        self.pages: tuple[str, ...] = ()
        """Addresses of pages about the nodes at this address and behind it."""
        self.inference: tuple[str, ...] = ()
        """Addresses of inference nodes for clients of these servers."""
        self.hello = HelloSchedule()
        self.refusal = ""
        """Reason why this proxy, or a proxy at this address, is denied access; "" if it is not."""
        self.is_too_small = False
        """True if the WELCOME exceeds the proxy's own limits."""
        self._epoch = 0  # epoch in the newest WELCOME
        self._epochs: OrderedDict[str, int] = OrderedDict()  # epochs by server name, in the order of the last WELCOME

    @property
    @abstractmethod
    def is_away(self) -> bool:
        """True if the address has not answered for a while."""

    @property
    @abstractmethod
    def denial_reason(self) -> str:
        """Reason why this proxy, or a proxy further on, is denied access; "" if it is not."""

    def receive_answer(self, answer: Answer) -> None:
        """Record the reply to a HELLO or its refusal; `apply_welcome` processes a WELCOME."""
        self.hello.receive_answer()
        refusal = answer if isinstance(answer, Refused) and answer.code in NOT_LET_IN else None
        self.refusal = "" if refusal is None else refusal.text
        self.is_too_small = refusal is not None and refusal.code in TOO_LARGE

    def apply_welcome(self, header: MessageHeader, welcome: messages.Welcome) -> BackendChange:
        """Record the content of a WELCOME and return the changes."""
        # Behind another proxy a different server may answer each time: compare epochs of the same server only.
        has_restarted = self._epochs.get(welcome.home_name, welcome.epoch) != welcome.epoch
        has_moved = not self.names or welcome.endpoints != self.endpoints
        change = BackendChange(has_moved, has_restarted, self.run not in (0, header.run))
        self._keep_epoch(welcome.home_name, welcome.epoch)
        self.run, self.endpoints = header.run, welcome.endpoints
        self.names = tuple(welcome.servers or [welcome.home_name])
        self.leaving, self.unmet = tuple(welcome.leaving), tuple(welcome.unmet)
        return change

    def _keep_epoch(self, name: str, epoch: int) -> None:
        """Record a server's epoch. The limit bounds memory if servers behind a proxy change their names."""
        self._epochs[name] = self._epoch = epoch
        self._epochs.move_to_end(name)
        while len(self._epochs) > MAX_SERVERS:
            self._epochs.popitem(last=False)

    def schedule_hello(self) -> None:
        """Schedule a HELLO after NEWS from this address: the run may be new, or a server may be leaving."""
        self.hello.make_due()

    def is_notice_current(self, header: MessageHeader) -> bool:
        """Return True if a notice is about the current run; otherwise schedule a HELLO to learn the run."""
        is_same = header.run in (0, self.run)
        if not is_same:
            self.hello.make_due()
        return is_same

    def publisher(self, noticed: tuple[int, int]) -> tuple[int, int]:
        """Return name hash and epoch of the server that published a model at this address.

        Args:
            noticed: Name hash and epoch in the model's notice, zeros without a notice.
        """
        if len(self.names) != 1:
            return noticed
        # An epoch is the start time of a server, or with a state folder the former epoch plus one, so that the larger
        # epoch is the later one. If a clock was set back, the model gets the former epoch. Nodes in front of this
        # proxy detect the restart by HELLO, which compares epochs for equality.
        return name_hash(self.names[0]), max(noticed[1], self._epoch)


@dataclass
class ProxyCounts:
    """Counters since the proxy's start. The proxy's thread writes, and any thread may read."""

    requests: int = 0
    """Requests forwarded to servers, or answered by the proxy."""
    replies: int = 0
    caches: int = 0
    cache_bytes: int = 0
    homeless: int = 0
    """Messages for a server that the proxy does not know."""
    refused: Counter[str] = field(default_factory=Counter)
    """Numbers of refused messages by code."""

    def refuse(self, code: str) -> None:
        """Count a message that was refused with this code."""
        self.refused[code] += 1


@dataclass(frozen=True, slots=True)
class BackStats:
    """Frozen figures of one address behind a proxy."""

    # fmt: off
    endpoint: str
    servers: tuple[str, ...]
    """Names of the servers reached at the address; empty before the first answer."""
    leaving: tuple[str, ...]
    """Names of servers that are being drained."""
    is_away: bool
    queued_bytes: Annotated[int, gauge("proxy_queue_bytes", "Queued", "Bytes that wait for the address behind the "
        "proxy.")]
    lost_requests: Annotated[int, counter("proxy_lost_requests", "Requests lost", "Requests lost because the queue was "
        "full; clients retry.")]
    lost_caches: Annotated[int, counter("proxy_lost_caches", "Caches lost", "Caches lost because the queue was full.")]
    lost_bytes: Annotated[int, counter("proxy_lost_bytes", "Bytes lost", "Bytes of these caches.")]
    # fmt: on

    @property
    def is_up(
        self,
    ) -> Annotated[bool, gauge("proxy_back_up", "Up", "1 if the address behind the proxy answers, else 0.")]:
        """True if the address answers."""
        return not self.is_away
