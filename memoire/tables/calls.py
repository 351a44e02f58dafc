"""Calls of a kind of table: requests to one or many servers, local or remote, with retries and deadlines. No socket.

    a kind's calls ──▶ CalledServers ──▶ Transport     memoire.reader: over the network
                                                       memoire.server: in the server's own process

Pools with calls of their own derive from `HasCalls`.
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
"""Shortest and longest pause in seconds between two requests of a waiting call. The pauses grow."""
LAST_TIMEOUT = 0.5
"""Minimum seconds for the reply to a call's last request, which tells why the call failed."""
DEFAULT_TIMEOUT = 30.0
"""Timeout of a call in seconds, if the caller passes none."""
AT_ONCE = 4
"""Maximum number of simultaneous requests of one call to one server."""
T = TypeVar("T")
K = TypeVar("K")


class Request(NamedTuple):
    """Request to one server."""

    body: Body
    payload: bytes | None = None
    server: str = ""
    """Name or address of the server; "" for the server that the request's key in a mapping names."""


class CallReply(NamedTuple):
    """Body and payload of a server's reply."""

    body: Any
    payload: memoryview


Work: TypeAlias = Generator[Request, CallReply, T]
"""Generator of consecutive requests to one server, each made from the reply to the previous one; returns a result."""


class Transport(Protocol):
    """Connection to the servers of a table. Callable from any thread."""

    limits: Limits

    def table(self, deadline: float) -> tuple[str, Schema]:
        """Return name and schema of the table after the first server's answer. Raise as `memoire.Reader` does."""

    def servers(self) -> Sequence[str]:
        """Return the names of all known servers."""

    def unanswered_addresses(self) -> Sequence[str]:
        """Return the addresses on the list at which no server has answered yet."""
        return ()

    def draining_servers(self) -> Sequence[str]:
        """Return the names of servers that are being drained and accept nothing new."""
        return ()

    def ask(self, requests: Mapping[Any, Request], deadline: float) -> dict[Any, Answer]:
        """Send requests; return the replies or the errors that ended the requests, by the deadline."""

    def addresses_text(self) -> str:
        """Return the addresses for error messages."""

    def problem(self) -> str:
        """Return advice on why servers may not answer, or ""."""
        return ""

    def now(self) -> float:
        """Return the time on the clock of deadlines."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait for this many seconds. Raise Closed if the transport is closed."""


class CalledServers:
    """Client of a table's servers that retries, waits and collects replies. Thread-safe.

    Args:
        answer: Body type of the servers' replies.
    """

    def __init__(self, transport: Transport, answer: type[Body]) -> None:
        self.transport, self._answer = transport, answer

    @property
    def names(self) -> list[str]:
        """Names of all servers, sorted."""
        return sorted(self.transport.servers())

    def home_of(self, key: bytes) -> str:
        """Return the server for a new key: the highest rendezvous hash among the servers that are not being drained."""
        leaving = set(self.transport.draining_servers())
        staying = [name for name in self.names if name not in leaving] or self.names
        return max(staying, key=lambda name: (_bytes.checksum(key, _bytes.checksum(name.encode())), name))

    def reply_of(self, name: str, request: Request, deadline: float) -> CallReply:
        """Return the reply of one server. Raise the error that ended the request."""
        return self.replies_by_server({name: request}, deadline)[name]

    def wait_all_answered(self, deadline: float) -> None:
        """Wait until every server has answered once. A change that misses a server could be lost or doubled.

        Raises:
            MemoireTimeout: no server has answered at an address by the deadline.
        """
        began = self.transport.now()
        while missing := sorted(self.transport.unanswered_addresses()):
            remaining = deadline - self.transport.now()
            if remaining <= 0.0:
                advice = "A server there may hold rows of this table. Start the server, or remove the address."
                raise MemoireTimeout("server", ", ".join(missing), self.transport.now() - began, advice)
            self.transport.pause(min(remaining, MAX_PAUSE))

    def replies_to_same(self, body: Any, deadline: float) -> dict[str, CallReply]:
        """Return the replies of all servers to the same request. Raise if one server does not reply."""
        self.wait_all_answered(deadline)
        return self.replies_by_server(dict.fromkeys(self.names, Request(body)), deadline)

    def replies_by_server(
        self, requests: Mapping[K, Request], deadline: float, each: float = math.inf
    ) -> dict[K, CallReply]:
        """Return the replies to requests that are keyed by their servers' names.

        Raises:
            MemoireTimeout: a server did not reply by the deadline; the error names the server.
            Refused: a server refused a request.
        """
        answers = self.replies_or_errors(requests, deadline, each)
        for key, answer in answers.items():
            if isinstance(answer, MemoireTimeout):
                advice = f"{answer.advice} {self.transport.problem()}".strip()
                name = requests[key].server or str(key)
                raise MemoireTimeout(f"answer of server {name!r}", answer.endpoint, answer.seconds, advice)
            if isinstance(answer, MemoireError):
                raise answer
        return {key: answer for key, answer in answers.items() if isinstance(answer, CallReply)}

    def replies_or_errors(
        self, requests: Mapping[K, Request], deadline: float, each: float = math.inf
    ) -> dict[K, CallReply | MemoireError]:
        """Return replies and errors of requests, as `replies_by_server`. Requests that a server refuses for a while are
        sent again.

        Args:
            each: Maximum seconds for a reply, within the deadline.
        """
        replies: dict[K, CallReply | MemoireError] = {}
        asked, pause = dict(requests), MIN_PAUSE
        while asked:
            until = min(deadline, self.transport.now() + each)
            for key, answer in self.transport.ask(asked, until).items():
                is_passing = isinstance(answer, Refused) and answer.code in PASSING
                if is_passing and self.transport.now() + pause < deadline:
                    continue
                replies[key] = self._reply_of(requests[key].server or str(key), answer)
                del asked[key]
            if asked:
                self.transport.pause(pause)
                pause = min(2 * pause, MAX_PAUSE)
        return replies

    def run_generators(self, works: Sequence[tuple[str, Work[T]]], patience: float, each: float) -> list[T]:
        """Run generators of requests, each at the named server; return their results in order.

        At most `AT_ONCE` generators have a request under way at one server.

        Args:
            patience: Seconds for which requests that a server refuses for a while are sent again.
            each: Maximum seconds for a reply.

        Raises:
            MemoireTimeout, Refused: see `replies_by_server`. Changes by other requests remain.
        """
        results: dict[int, T] = {}
        asked: dict[int, Request] = {}
        waiting = list(range(len(works)))[::-1]

        def go_on(place: int, reply: CallReply | None) -> None:
            server, work = works[place]
            try:
                request = next(work) if reply is None else work.send(reply)
            except StopIteration as end:
                results[place] = end.value
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
            for place, reply in self.replies_by_server(asked, self.transport.now() + patience, each).items():
                go_on(place, reply)
        return [results[place] for place in range(len(works))]

    def wait(self, what: str, patience: float, look: Callable[[float], tuple[T | None, str]]) -> T:
        """Call `look` until it returns a result, and return the result.

        Args:
            look: Called with the deadline; returns the result, or None and the reason why the result is missing.

        Raises:
            MemoireTimeout: no result after `patience` seconds; the error has the reason.
        """
        deadline, pause = self.transport.now() + patience, MIN_PAUSE
        while True:
            result, why = look(max(deadline, self.transport.now() + LAST_TIMEOUT))
            if result is not None:
                return result
            remaining = deadline - self.transport.now()
            if remaining <= 0.0:
                raise MemoireTimeout(what, self.transport.addresses_text(), patience, f"{why[:1].upper()}{why[1:]}.")
            self.transport.pause(min(pause, remaining))
            pause = min(2 * pause, MAX_PAUSE)

    def _reply_of(self, name: str, answer: Answer) -> CallReply | MemoireError:
        if isinstance(answer, Message) and isinstance(answer.body, self._answer):
            return CallReply(answer.body, memoryview(answer.payload if answer.payload is not None else b"").cast("B"))
        if isinstance(answer, MemoireError):
            return answer
        return Refused(name, "unexpected", f"answered {type(answer.body).__name__}")


LEFT_OUT_TIMEOUT = 3.0
"""Seconds that a call waits for a server before the server is skipped."""
RETRY_INTERVAL = 0.02
"""Maximum seconds before servers that held too little are asked again."""
REFUSED_INTERVAL = 0.5
"""Seconds before a server that refused is asked again; meanwhile a HELLO fetches the server's current state."""


@dataclass(frozen=True, slots=True)
class TableTerms:
    """Facts that servers reported about the table. Replaced as a whole, so that any thread may read them."""

    schema: Schema
    parameters: Parameters
    parameters_version: int
    table: str
    storage: str = "caches"


class TableServer(Protocol):
    """Remote server of a table, as `LearnerSide` sees it."""

    is_away: bool
    """True if the server did not answer in time and is skipped."""
    is_finished: bool
    """True if the server reported that the run is over."""
    fingerprint: int
    """Fingerprint of the parameters that the server draws by; 0 before the server has reported them."""

    @property
    def name(self) -> str:
        """Name of the server."""

    @property
    def address(self) -> Any:
        """Address for requests to the server."""

    @property
    def home(self) -> int:
        """Number of the server in message headers."""


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """Request to a server. The request's reply or error goes to `LearnerSide.receive_answer`."""

    server: TableServer
    body: messages.Body


class LearnerSide(Protocol):
    """Remote learner's state machine for a kind of table: makes requests and processes replies. No I/O. The owner holds
    its lock around every method except `late_servers` and `read`.
    """

    CALLED: ClassVar[str]
    """Noun in error messages for the object that a call waits for."""
    taken: int
    """Number of entries that calls returned."""

    @property
    def held_entries(self) -> int:
        """Number of received entries that no call has returned yet."""

    @property
    def discarded_entries(self) -> int:
        """Number of received entries that were discarded because their model had become too old."""

    def next_time(self, now: float) -> float:
        """Return the next time at which `late_servers` or `due_requests` has work; infinity if only a reply can cause
        work.
        """

    def due_requests(self, now: float) -> Sequence[ServerRequest]:
        """Return the requests to send now."""

    def read(self, answer: Answer, now: float) -> Any:
        """Decode a reply; the result is empty for an error or a message outside the protocol."""

    def receive_answer(self, request: ServerRequest, answer: Answer, came: Any, now: float) -> None:
        """Process the end of a request: a reply, decoded to `came` by `read`, or an error."""

    def late_servers(self, now: float, down: Collection[object]) -> Sequence[TableServer]:
        """Return servers that calls stop waiting for; `down` are addresses that certainly have no connection."""

    def leave_out(self, server: TableServer) -> None:
        """Skip a server that did not answer in time: calls continue without the server."""

    def forget(self, server: TableServer) -> None:
        """Remove a server that is no longer on any list."""

    def clear(self) -> None:
        """Discard received entries, because another run is counted now."""

    def set_request(self, wanted: Any) -> None:
        """Set the request that a call waits for; None after the call has ended."""

    def take(self, versions: Mapping[str, int]) -> Sequence[Any]:
        """Return the wanted entries if all have arrived, else nothing. `versions` has each topic's newest version."""

    def describe_shortage(self) -> tuple[int, int, int, str]:
        """Return available (entries, parts, clients) for the waiting call, and a text on the missing ones."""


class TableServers(Protocol):
    """Registry of the servers of one table."""

    @property
    def terms(self) -> TableTerms | None:
        """Facts that the servers reported about the table; None before the first answer."""

    @property
    def known_servers(self) -> Sequence[TableServer]:
        """All servers of the table."""

    @property
    def present_servers(self) -> Sequence[TableServer]:
        """Servers that are not skipped."""

    @property
    def discovery_deadline(self) -> float:
        """Deadline for the first answer of an address."""

    def is_discovering(self, now: float) -> bool:
        """Return True if an address has not answered yet and its deadline is not reached."""

    def differing_servers(self) -> Sequence[TableServer]:
        """Return servers that draw by other parameters than those of `terms`."""

    def ask_soon(self) -> None:
        """Query the current state of every address at once, because the state may have changed."""

    def record_finished(self, server: TableServer, is_finished: bool) -> None:
        """Record a server's report of whether the run is over."""
