"""The servers of a table of prompts, and how the groups of a step are shared out: over servers, by what is ready, and
over a trainer's ranks, by tokens. Pure.

    servers   a 90 ready, b 30      64 groups      plan {a: 48, b: 16}
    replay    a 1 ready, 9 committed, share 0.75: a can give 4, of which 3 are replayed
    ranks     tokens 9 7 6 5 4 1    2 ranks        0: 9 5 1 = 15     1: 7 6 4 = 17, then 5 and 6 change places: 16, 16

Every rank comes to the same lists, since they follow from the step's groups alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memoire.kinds import CalledServers

from . import messages


class PromptServers(CalledServers):
    """Those of a table of prompts."""

    ANSWER = messages.Prompted


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
