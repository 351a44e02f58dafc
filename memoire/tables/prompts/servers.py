"""The servers of a table of prompts, as those ask them who use it: here, far away, one or many. No socket.

Prompts ──▶ PromptServers ──▶ PromptTransport     memoire.reader: over the network
                                                  memoire.server: in the server's own process

How the groups of a step are shared out: over servers, by what is ready, and over a trainer's ranks, by tokens. Pure.

    servers   a 90 ready, b 30      64 groups      plan {a: 48, b: 16}
    replay    a 1 ready, 9 committed, share 0.75: a can give 4, of which 3 are replayed
    ranks     tokens 9 7 6 5 4 1    2 ranks        0: 9 5 1 = 15     1: 7 6 4 = 17, then 5 and 6 change places: 16, 16

Every rank comes to the same lists, since they follow from the step's groups alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from memoire.errors import MemoireError, MemoireTimeout, Refused
from memoire.limits import Limits
from memoire.replay.schema import Schema
from memoire.wire import _bytes
from memoire.wire.frames import PASSING, Answer, Message

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


MAX_SWAPS: Final = 256
"""Exchanges of two groups that are tried to even out two ranks."""


def most_of(ready: int, replayable: int, replay: float, groups: int) -> int:
    """Groups of a step that a server can give, at most `groups`: those that are ready, and for the share `replay` of
    them groups that may be replayed.
    """
    if not replay:
        return min(ready, groups)
    return bisect.bisect_right(range(1, groups + 1), ready, key=lambda count: needed(count, replayable, replay))


def needed(count: int, replayable: int, replay: float) -> int:
    """Ready groups without which a server cannot give `count` groups."""
    return count - min(round(replay * count), replayable)


def planned(ready: Mapping[str, int], groups: int) -> dict[str, int]:
    """Groups of each server, in proportion to those that it can give; in all `groups`, or all that it can."""
    total = sum(ready.values())
    if total <= groups:
        return {name: count for name, count in ready.items() if count}
    exact = {name: groups * count / total for name, count in ready.items()}
    plan = {name: int(share) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: (plan[name] - exact[name], name))
    for name in by_rest[: groups - sum(plan.values())]:
        plan[name] += 1
    return {name: count for name, count in plan.items() if count}


def revised(plan: Mapping[str, int], fixed: Mapping[str, int], spare: Mapping[str, int]) -> dict[str, int]:
    """A plan in which servers that could give only `fixed` groups give those, and others give more of their `spare`."""
    lacking = sum(plan[name] - count for name, count in fixed.items())
    changed = {**plan, **fixed}
    for name, more in planned({name: count for name, count in spare.items() if name not in fixed}, lacking).items():
        changed[name] = changed.get(name, 0) + more
    return changed


def balanced(tokens: Sequence[int] | NDArray[np.int64], ranks: int) -> list[list[int]]:
    """Places of the groups of each rank: as many each (or one more), and about as many tokens.

    The longest groups go first, each to the rank with the fewest tokens that has room; then groups of the ranks with
    the most and the fewest tokens change places while that brings the two closer.

    Args:
        tokens: [G], of each group.
    """
    sizes = np.asarray(tokens, np.int64)
    room = [len(sizes) // ranks + (rank < len(sizes) % ranks) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for place in np.argsort(-sizes, kind="stable").tolist():
        rank = min(
            (rank for rank in range(ranks) if len(parts[rank]) < room[rank]), key=lambda rank: (sums[rank], rank)
        )
        parts[rank].append(place)
        sums[rank] += int(sizes[place])
    for _ in range(MAX_SWAPS):
        if not _swap(parts, sums, sizes):
            break
    return [sorted(part) for part in parts]


def _swap(parts: list[list[int]], sums: list[int], sizes: NDArray[np.int64]) -> bool:
    """Exchange the two groups of the longest and the shortest rank that bring them closest; False if none do."""
    high, low = max(range(len(sums)), key=sums.__getitem__), min(range(len(sums)), key=sums.__getitem__)
    gap = sums[high] - sums[low]
    if gap <= 1 or not parts[low]:
        return False
    moved = sizes[parts[high]][:, None] - sizes[parts[low]][None, :]  # [groups of high, groups of low]
    after = np.abs(gap - 2 * moved)
    i, j = divmod(int(after.argmin()), after.shape[1])
    if after[i, j] >= gap:
        return False
    sums[high] -= int(moved[i, j])
    sums[low] += int(moved[i, j])
    parts[high][i], parts[low][j] = parts[low][j], parts[high][i]
    return True


def dealt(count: int, ranks: int) -> list[list[int]]:
    """Places of the groups of each rank, one after the other, whatever their lengths."""
    return [list(range(rank, count, ranks)) for rank in range(ranks)]
