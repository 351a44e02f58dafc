"""The servers of a table of prompts, as those ask them who use it: here, far away, one or many. No socket.

Prompts ──▶ PromptServers ──▶ PromptTransport     memoire.reader: over the network
                                                  memoire.server: in the server's own process
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from memoire.errors import MemoireError, MemoireTimeout, Refused
from memoire.limits import Limits
from memoire.replay.schema import Schema
from memoire.wire import _bytes
from memoire.wire.frames import Answer, Message
from memoire.wire.refusals import PASSING

from . import messages

MIN_PAUSE, MAX_PAUSE = 0.002, 0.25
"""Seconds between two questions of a call that waits: more and more."""
LAST_TIMEOUT = 0.5
"""Seconds that the last question of a call has for its answer at least: it says why the call was in vain."""
T = TypeVar("T")


class PromptRequest(NamedTuple):
    """What one server is asked."""

    body: messages.Prompts | messages.Answers | messages.Groups
    payload: bytes | None = None


class PromptReply(NamedTuple):
    """What it answers."""

    body: messages.Prompted
    payload: memoryview


class PromptTransport(Protocol):
    """How servers are reached. From any thread."""

    limits: Limits

    def table(self, deadline: float) -> tuple[str, Schema]:
        """Name and columns of the table, as soon as a server has said them. Raises as `memoire.Reader` does."""

    def servers(self) -> Sequence[str]:
        """Names of all servers that are known."""

    def unmet(self) -> Sequence[str]:
        """Addresses where a server has to be, and nobody has answered yet."""

    def leaving(self) -> Sequence[str]:
        """Those that take no new prompts, since they are being drained."""

    def ask(self, requests: Mapping[str, PromptRequest], deadline: float) -> dict[str, Answer]:
        """The answers of these servers, or the errors that ended the requests; at the deadline at the latest."""

    def where(self) -> str:
        """The addresses, as errors name them."""

    def trouble(self) -> str:
        """Why servers may not answer and what to do."""

    def now(self) -> float:
        """The clock of deadlines."""

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises Closed."""


class PromptServers:
    """Asks servers, and waits. Thread-safe."""

    def __init__(self, transport: PromptTransport) -> None:
        self.transport = transport

    @property
    def names(self) -> list[str]:
        """All servers, always in the same order."""
        return sorted(self.transport.servers())

    def home_of(self, key: bytes) -> str:
        """The server at which a new prompt is kept: the one with the highest rendezvous hash among those that stay."""
        leaving = set(self.transport.leaving())
        staying = [name for name in self.names if name not in leaving] or self.names
        return max(staying, key=lambda name: (_bytes.checksum(key, _bytes.checksum(name.encode())), name))

    def one(self, name: str, request: PromptRequest, deadline: float) -> PromptReply:
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
                advice = "A server there may hold prompts of this table. Start it, or take it off the list."
                raise MemoireTimeout("server", ", ".join(missing), self.transport.now() - began, advice)
            self.transport.pause(min(left, MAX_PAUSE))

    def every(self, body: Any, deadline: float) -> dict[str, PromptReply]:
        """The answers of all servers to the same question. Raises if one of them does not answer."""
        self.complete(deadline)
        return self.all(dict.fromkeys(self.names, PromptRequest(body)), deadline)

    def all(self, requests: Mapping[str, PromptRequest], deadline: float) -> dict[str, PromptReply]:
        """The answers of these servers.

        Raises:
            MemoireTimeout: one of them did not answer until the deadline; it says which.
            Refused: one of them declined.
        """
        answers = self.some(requests, deadline)
        for name, answer in answers.items():
            if isinstance(answer, MemoireTimeout):
                said = f"{answer.advice} {self.transport.trouble()}".strip()
                raise MemoireTimeout(f"answer of server {name!r}", answer.endpoint, answer.seconds, said)
            if isinstance(answer, MemoireError):
                raise answer
        return {name: answer for name, answer in answers.items() if isinstance(answer, PromptReply)}

    def some(self, requests: Mapping[str, PromptRequest], deadline: float) -> dict[str, PromptReply | MemoireError]:
        """The same, with the errors of those that did not answer. What a server declines for a while is asked again."""
        told: dict[str, PromptReply | MemoireError] = {}
        asked, pause = dict(requests), MIN_PAUSE
        while asked:
            for name, answer in self.transport.ask(asked, deadline).items():
                is_passing = isinstance(answer, Refused) and answer.code in PASSING
                if is_passing and self.transport.now() + pause < deadline:
                    continue
                told[name] = _reply_of(name, answer)
                del asked[name]
            if asked:
                self.transport.pause(pause)
                pause = min(2 * pause, MAX_PAUSE)
        return told

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


def _reply_of(name: str, answer: Answer) -> PromptReply | MemoireError:
    if isinstance(answer, Message) and isinstance(answer.body, messages.Prompted):
        return PromptReply(answer.body, memoryview(answer.payload if answer.payload is not None else b"").cast("B"))
    if isinstance(answer, MemoireError):
        return answer
    return Refused(name, "unexpected", f"answered {type(answer.body).__name__}")


def keys_of(keys: Iterable[tuple[str, int, int]]) -> list[messages.PromptKey]:
    """Names of prompts as they travel."""
    return [messages.PromptKey(*key) for key in keys]
