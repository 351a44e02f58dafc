"""How many steps and updates a second does each side make with the pictures of Pong, and with how much memory?

Double DQN with the usual network and four frames of 84 x 84 in an observation, prioritized where a side knows that:
memoire beside Stable-Baselines3, TorchRL and RLlib, each in an environment of its own, one after the other, for a
minute each. Nobody learns Pong in that time on a few cores: rates are of the second half of the time with updates.
docs/benchmarks/contest.md says more of each side. What has to hold is that every side makes updates, that memoire makes
one for four steps as the others do, and that the dashboard's verdict says that the learner waits if, and only if, it
waited for more than 30 % of its time.
"""

import sys

from _contest import contest, show

GAME, SECONDS = "pong", 60.0
UPDATE_INTERVAL, TOLERANCE = 4, 0.25
"""Steps for each update, and by which part of it the second half of a run may differ: steps come in lumps."""
HEAD = ["side", "steps a second", "updates a second", "memory, MiB", "steps"]


def row(found: contest.Record) -> list[object]:
    """Of the table."""
    steps, updates = found.rates()
    memory = f"{found.facts['memory'] / 2**20:,.0f}"
    return [found.side, f"{steps:.0f}", f"{updates:.1f}", memory, f"{found.curve[-1][1]:,}"]


def violations_of(found: contest.Record) -> list[str]:
    """What does not hold of a run."""
    steps, updates = found.rates()
    if not updates:
        return [f"{found.side} made no update in the second half of its {found.limit:g} s"]
    if abs(steps / updates / UPDATE_INTERVAL - 1.0) > TOLERANCE:
        return [f"{found.side} made an update each {steps / updates:.1f} steps in place of {UPDATE_INTERVAL}"]
    return []


if __name__ == "__main__":
    sides = contest.sides_of(GAME, "memoire,sb3,torchrl,rllib")
    sys.exit(show(GAME, sides, SECONDS, HEAD, row, violations_of))
