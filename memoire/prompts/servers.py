"""Servers of a table of prompts for one process, and the division of a step's groups. No socket.

Ready groups divide a step over servers; tokens divide it over a trainer's ranks:

    servers   a 90 ready, b 30      64 groups      plan {a: 48, b: 16}
    replay    a 1 ready, 9 committed, share 0.75: a can give 4, of which 3 are replayed
    ranks     tokens 9 7 6 5 4 1    2 ranks        0: 9 5 1 = 15     1: 7 6 4 = 17, then 5 and 6 change places: 16, 16

Every rank computes the same lists, because they depend only on the step's groups.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire import Schema
from memoire.building import Held, mapping, seconds, text, whole
from memoire.errors import MemoireError, MemoireTimeout, ParameterError, Refused
from memoire.kinds import CalledServers, CallReply, Request, Transport

from . import messages
from .columns import Key


def keys_of(keys: Iterable[tuple[str, int, int]]) -> list[messages.PromptKey]:
    """Return names of prompts in the form of messages."""
    return [messages.PromptKey(*key) for key in keys]


MAX_RANKS = 65_536
"""Largest number of ranks of one trainer."""


class TableCalls:
    """Calls of one process on a table of prompts.

    Args:
        rank: (rank, number of ranks) of a trainer.
        timeout: Default seconds of a call.
        session: See `memoire.Prompts`.
    """

    def __init__(self, transport: Transport, rank: tuple[int, int], timeout: float, session: str) -> None:
        self._transport, self._timeout = transport, timeout
        self._servers = CalledServers(transport, messages.Prompted)
        self._lock = threading.Lock()  # guards facts about prompts and leases
        self._homes: dict[Key, str] = {}  # servers of prompts that were leased or listed

    @property
    def schema(self) -> Schema:
        """Schema of an answer's columns, as the servers report it."""
        return self._transport.table(self._transport.now() + self._timeout)[1]

    @property
    def table(self) -> str:
        """Name of the table at the servers."""
        return self._transport.table(self._transport.now() + self._timeout)[0]

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the known servers."""
        return tuple(self._servers.names)

    def _patience(self, timeout: float | None) -> float:
        """Return the seconds that a call may take, after the table is known."""
        patience = seconds(timeout, self._timeout)
        self._transport.table(self._transport.now() + patience)
        return patience

    def _deadline(self, timeout: float | None) -> float:
        patience = self._patience(timeout)
        return self._transport.now() + patience

    def _sum(self, body: messages.Groups, deadline: float) -> int:
        """Send a request to all servers. Return the sum of their `done` counts."""
        return sum(each.body.done for each in self._servers.replies_to_same(body, deadline).values())

    def _learn(self, keys: Iterable[Key], server: str) -> None:
        """Remember the server of these prompts."""
        with Held(self._lock):
            if len(self._homes) > 1 << 18:
                self._homes.clear()  # if a prompt's server is not known, each server is asked
            self._homes.update((key, server) for key in keys)

    def _ask_home(self, key: Key, request: Request, deadline: float) -> CallReply:
        """Send a request to the server of a prompt, or to each server if the prompt's server is not known."""
        with Held(self._lock):
            home = self._homes.get(key, "")
        if home in self._servers.names:
            answer = self._servers.replies_or_errors({home: request}, deadline)[home]
            if isinstance(answer, CallReply):
                return answer
            if not (isinstance(answer, Refused) and answer.code == "missing"):
                raise answer
        answers = self._servers.replies_or_errors(dict.fromkeys(self._servers.names, request), deadline)
        for name, answer in answers.items():
            if isinstance(answer, CallReply):
                self._learn([key], name)
                return answer
        errors = [answer for answer in answers.values() if isinstance(answer, MemoireError)]
        raise next((each for each in errors if isinstance(each, MemoireTimeout)), errors[0])


def checked_dataset(name: Any) -> str:
    """Return the name of a data set. Raise ParameterError if it is no text, or too long."""
    if not isinstance(name, str) or len(name) > 200:
        raise ParameterError("dataset", name, "a text of at most 200 characters")
    return text("dataset", name)


def checked_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    """Return tags as text by name. Raise WrongType or ParameterError."""
    return {text("tags", name): text("tags", word) for name, word in mapping("tags", tags or {}).items()}


def checked_keys(keys: Iterable[Any]) -> list[Key]:
    """Return names of prompts as a list. Raise ParameterError for a malformed one."""
    checked: list[Key] = []
    for key in keys:
        if not isinstance(key, tuple) or len(key) != 3:
            raise ParameterError("keys", key, "tuples of data set, epoch and index")
        checked.append((checked_dataset(key[0]), whole("epoch", key[1], 0), whole("index", key[2], 0)))
    return checked


def checked_rank(rank: tuple[int, int], session: str) -> tuple[int, int]:
    """Return (rank, number of ranks); several ranks need a session. Raise WrongType or ParameterError."""
    try:
        own_rank, ranks = rank
    except (TypeError, ValueError):
        raise ParameterError("rank", rank, "two numbers: the rank and the number of ranks") from None
    text("session", session)
    ranks = whole("rank", ranks, 1, MAX_RANKS)
    own_rank = whole("rank", own_rank, 0, ranks - 1)
    if ranks > 1 and not session:
        expected = "a text that all ranks share and that is new at each start of the trainer; several ranks need one"
        raise ParameterError("session", session, expected)
    return own_rank, ranks


MAX_SWAPS: Final = 256
"""Largest number of exchanges of two groups to balance the ranks' tokens."""


def max_step_groups(ready: int, replayable: int, replay: float, groups: int) -> int:
    """Return the groups of a step that a server can give, at most `groups`. A share `replay` of the groups may be
    replayed; the rest must be ready.
    """
    if not replay:
        return min(ready, groups)
    return bisect.bisect_right(
        range(1, groups + 1), ready, key=lambda count: needed_ready_groups(count, replayable, replay)
    )


def needed_ready_groups(count: int, replayable: int, replay: float) -> int:
    """Return the ready groups that a server needs to give `count` groups."""
    return count - min(round(replay * count), replayable)


def plan_groups(ready: Mapping[str, int], groups: int) -> dict[str, int]:
    """Return the groups of each server in proportion to `ready`; in all `groups`, or all that are ready."""
    total = sum(ready.values())
    if total <= groups:
        return {name: count for name, count in ready.items() if count}
    exact = {name: groups * count / total for name, count in ready.items()}
    plan = {name: int(share) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: (plan[name] - exact[name], name))
    for name in by_rest[: groups - sum(plan.values())]:
        plan[name] += 1
    return {name: count for name, count in plan.items() if count}


def revise_plan(plan: Mapping[str, int], fixed: Mapping[str, int], spare: Mapping[str, int]) -> dict[str, int]:
    """Return a plan in which the servers in `fixed` give only fixed groups, and others give more of their `spare`."""
    lacking = sum(plan[name] - count for name, count in fixed.items())
    changed = {**plan, **fixed}
    for name, added in plan_groups(
        {name: count for name, count in spare.items() if name not in fixed}, lacking
    ).items():
        changed[name] = changed.get(name, 0) + added
    return changed


def balance_groups(tokens: Sequence[int] | NDArray[np.int64], ranks: int) -> list[list[int]]:
    """Return the places of the groups of each rank: equal numbers (or one more), and about equal tokens.

    The longest groups go first, each to the rank with the fewest tokens that has room. Afterwards groups of the ranks
    with the most and the fewest tokens change places while that brings these ranks closer.

    Args:
        tokens: [G], tokens of each group.
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
    """Exchange the pair of groups that best balances the longest and the shortest rank. Return False if none does."""
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


def deal_groups(count: int, ranks: int) -> list[list[int]]:
    """Return the places of the groups of each rank, dealt in turn, whatever their lengths."""
    return [list(range(rank, count, ranks)) for rank in range(ranks)]
