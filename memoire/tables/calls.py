"""Calls of a kind of table: how those who use it ask its servers, here, far away, one or many. No socket.

    a kind's calls ──▶ CalledServers ──▶ Transport     memoire.reader: over the network
                                                       memoire.server: in the server's own process

Tables whose pools have such calls are a `HasCalls`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from memoire.errors import MemoireError, MemoireTimeout, Refused
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.wire import _bytes, messages
from memoire.wire.frames import PASSING, Answer, Message
from memoire.wire.messages import Body

MIN_PAUSE, MAX_PAUSE = 0.002, 0.25
"""Seconds between two questions of a call that waits: more and more."""
LAST_TIMEOUT = 0.5
"""Seconds that the last question of a call has for its answer at least: it says why the call was in vain."""
DEFAULT_TIMEOUT = 30.0
"""Seconds that a call takes at most if nobody gives another number."""
AT_ONCE = 4
"""Requests of one call on their way to one server."""
T = TypeVar("T")
K = TypeVar("K")


class Request(NamedTuple):
    """What one server is asked."""

    body: Body
    payload: bytes | None = None
    server: str = ""
    """Its name, or its own address; "": what the request stands under says it."""


class CallReply(NamedTuple):
    """What it answers."""

    body: Any
    payload: memoryview


Work: TypeAlias = Generator[Request, CallReply, T]
"""Requests to one server, one after the other, made of the replies; returns what is found."""


class Transport(Protocol):
    """How servers are reached. From any thread."""

    limits: Limits

    def table(self, deadline: float) -> tuple[str, Schema]:
        """Name and columns of the table, as soon as a server has said them. Raises as `memoire.Reader` does."""

    def servers(self) -> Sequence[str]:
        """Names of all servers that are known."""

    def unmet(self) -> Sequence[str]:
        """Addresses where a server has to be, and nobody has answered yet."""
        return ()

    def leaving(self) -> Sequence[str]:
        """Those that take nothing new, since they are being drained."""
        return ()

    def ask(self, requests: Mapping[Any, Request], deadline: float) -> dict[Any, Answer]:
        """The answers to these, or the errors that ended them; at the deadline at the latest."""

    def where(self) -> str:
        """The addresses, as errors name them."""

    def trouble(self) -> str:
        """Why servers may not answer and what to do."""
        return ""

    def now(self) -> float:
        """The clock of deadlines."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises Closed."""


class CalledServers:
    """Asks servers, and waits. Thread-safe.

    Args:
        answer: What they answer.
    """

    def __init__(self, transport: Transport, answer: type[Body]) -> None:
        self.transport, self._answer = transport, answer

    @property
    def names(self) -> list[str]:
        """All servers, always in the same order."""
        return sorted(self.transport.servers())

    def home_of(self, key: bytes) -> str:
        """The server at which something new is kept: the one with the highest rendezvous hash among those that stay."""
        leaving = set(self.transport.leaving())
        staying = [name for name in self.names if name not in leaving] or self.names
        return max(staying, key=lambda name: (_bytes.checksum(key, _bytes.checksum(name.encode())), name))

    def one(self, name: str, request: Request, deadline: float) -> CallReply:
        """The answer of one server. Raises what ended the request."""
        return self.all({name: request}, deadline)[name]

    def complete(self, deadline: float) -> None:
        """Wait until every server has been met: what one of them does not hear of would be lost or doubled there.

        Raises:
            MemoireTimeout: nobody has answered at an address until the deadline.
        """
        began = self.transport.now()
        while missing := sorted(self.transport.unmet()):
            left = deadline - self.transport.now()
            if left <= 0.0:
                advice = "A server there may hold something of this table. Start it, or take it off the list."
                raise MemoireTimeout("server", ", ".join(missing), self.transport.now() - began, advice)
            self.transport.pause(min(left, MAX_PAUSE))

    def every(self, body: Any, deadline: float) -> dict[str, CallReply]:
        """The answers of all servers to the same question. Raises if one of them does not answer."""
        self.complete(deadline)
        return self.all(dict.fromkeys(self.names, Request(body)), deadline)

    def all(self, requests: Mapping[K, Request], deadline: float, each: float = math.inf) -> dict[K, CallReply]:
        """The answers to these requests, which stand under their servers' names.

        Raises:
            MemoireTimeout: one of them did not come until the deadline; it says of which server.
            Refused: a server declined.
        """
        answers = self.some(requests, deadline, each)
        for key, answer in answers.items():
            if isinstance(answer, MemoireTimeout):
                said = f"{answer.advice} {self.transport.trouble()}".strip()
                name = requests[key].server or str(key)
                raise MemoireTimeout(f"answer of server {name!r}", answer.endpoint, answer.seconds, said)
            if isinstance(answer, MemoireError):
                raise answer
        return {key: answer for key, answer in answers.items() if isinstance(answer, CallReply)}

    def some(
        self, requests: Mapping[K, Request], deadline: float, each: float = math.inf
    ) -> dict[K, CallReply | MemoireError]:
        """The same, with the errors of those that did not answer. What a server declines for a while is asked again.

        Args:
            each: Seconds that an answer may take, before the deadline.
        """
        told: dict[K, CallReply | MemoireError] = {}
        asked, pause = dict(requests), MIN_PAUSE
        while asked:
            until = min(deadline, self.transport.now() + each)
            for key, answer in self.transport.ask(asked, until).items():
                is_passing = isinstance(answer, Refused) and answer.code in PASSING
                if is_passing and self.transport.now() + pause < deadline:
                    continue
                told[key] = self._reply_of(requests[key].server or str(key), answer)
                del asked[key]
            if asked:
                self.transport.pause(pause)
                pause = min(2 * pause, MAX_PAUSE)
        return told

    def done(self, works: Sequence[tuple[str, Work[T]]], patience: float, each: float) -> list[T]:
        """What these find, each at the server of this name: several at once, `AT_ONCE` of them at one server.

        Args:
            patience: Seconds for which a request is sent again that a server declines for a while.
            each: Seconds that an answer may take.

        Raises:
            MemoireTimeout, Refused: see `all`. What other requests have changed stays changed.
        """
        found: dict[int, T] = {}
        asked: dict[int, Request] = {}
        waiting = list(range(len(works)))[::-1]

        def go_on(place: int, reply: CallReply | None) -> None:
            server, work = works[place]
            try:
                request = next(work) if reply is None else work.send(reply)
            except StopIteration as end:
                found[place] = end.value
                asked.pop(place, None)
            else:
                asked[place] = request._replace(server=server)

        while waiting or asked:
            busy, later = Counter(works[place][0] for place in asked), list[int]()
            while waiting:
                place = waiting.pop()
                if busy[works[place][0]] < AT_ONCE:
                    go_on(place, None)
                    busy[works[place][0]] += place in asked
                else:
                    later.append(place)
            waiting = later[::-1]
            for place, reply in self.all(asked, self.transport.now() + patience, each).items():
                go_on(place, reply)
        return [found[place] for place in range(len(works))]

    def wait(self, what: str, patience: float, look: Callable[[float], tuple[T | None, str]]) -> T:
        """What `look` finds, called until then.

        Args:
            look: Called with the deadline; returns what is waited for, or None and why it is not there.

        Raises:
            MemoireTimeout: it was not there after so many seconds; says why.
        """
        deadline, pause = self.transport.now() + patience, MIN_PAUSE
        while True:
            found, why = look(max(deadline, self.transport.now() + LAST_TIMEOUT))
            if found is not None:
                return found
            left = deadline - self.transport.now()
            if left <= 0.0:
                raise MemoireTimeout(what, self.transport.where(), patience, f"{why[:1].upper()}{why[1:]}.")
            self.transport.pause(min(pause, left))
            pause = min(2 * pause, MAX_PAUSE)

    def _reply_of(self, name: str, answer: Answer) -> CallReply | MemoireError:
        if isinstance(answer, Message) and isinstance(answer.body, self._answer):
            return CallReply(answer.body, memoryview(answer.payload if answer.payload is not None else b"").cast("B"))
        if isinstance(answer, MemoireError):
            return answer
        return Refused(name, "unexpected", f"answered {type(answer.body).__name__}")


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
    """A remote learner's side of a kind of table: the requests it sends, and what it makes of the answers. No I/O; the
    owner holds its lock around every method but `late` and `read`.
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
