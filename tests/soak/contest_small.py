"""Does a contest of five minutes run from end to end: MinAtar Breakout by memoire and by Stable-Baselines3, one seed?

The smaller run of `make contest` that anybody can repeat. Each side learns for 100 seconds in an environment of its
own, then one evaluator plays 20 greedy episodes with each network that it left. One seed says little about who is
faster: docs/benchmarks/contest.md has more. What has to hold is that both learn, and that the dashboard's verdict says
that the learner waits if, and only if, it waited for more than 30 % of its time.
"""

import sys

from _contest import contest, show

GAME, SECONDS, LEAST = "breakout", 100.0, 4.0
"""At the end each side's network returns so much at least; one that acts at random returns half a point."""
HEAD = ["side", "return at 33 s", "at 66 s", "at 100 s", "steps", "updates"]


def row(found: contest.Record) -> list[object]:
    """Of the table: where the curve was at a third and at two thirds of the time, and at its end."""
    at = [max((point for point in found.curve if point[0] <= part * SECONDS), default=None) for part in (0.33, 0.66, 1)]
    returns = [f"{point[2]:.1f}" if point else "" for point in at]
    return [found.side, *returns, f"{found.curve[-1][1]:,}", found.facts["updates"]]


def violations_of(found: contest.Record) -> list[str]:
    """What does not hold of a run."""
    returned = found.curve[-1][2]
    if returned >= LEAST:
        return []
    return [f"{found.side} returns {returned} after {SECONDS:g} s, and has to return {LEAST:g}"]


if __name__ == "__main__":
    sys.exit(show(GAME, ("memoire", "sb3"), SECONDS, HEAD, row, violations_of))
