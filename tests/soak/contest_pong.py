"""How many steps and updates a second does each side make with the pictures of Pong, and with how much memory?

Double DQN with the usual network and four frames of 84 x 84 in an observation, prioritized where a side knows that:
memoire beside Stable-Baselines3, TorchRL and RLlib, each in an environment of its own, one after the other, for a
minute each. Nobody learns Pong in that time on a few cores: rates are of the second half of each run.
docs/benchmarks/contest.md says more of each side. What has to hold is that every side makes updates, that memoire makes
one for four steps as the others do, and that the dashboard's verdict says that the learner waits if, and only if, it
waited for more than 30 % of its time.
"""

import os
import sys
import tempfile
from pathlib import Path

from _kit import CANNOT, ROOT, end, table

sys.path.append(str(ROOT / "benchmarks"))
import contest  # noqa: E402
from contestants.page import agrees  # noqa: E402
from peers import PeerUnavailable  # noqa: E402

GAME, SECONDS = "pong", 60.0
UPDATE_INTERVAL, TOLERANCE = 4, 0.25
"""Steps for each update, and by which part of it the second half of a run may differ: steps come in lumps."""


def row(found: contest.Record) -> list[object]:
    """Of the table."""
    steps, updates = found.rates()
    waited = f"{found.facts['waited']:.1%}" if "waited" in found.facts else ""
    memory = f"{found.facts['memory'] / 2**20:,.0f}"
    said = ", ".join(found.facts.get("verdicts", {}))
    return [found.side, f"{steps:.0f}", f"{updates:.1f}", memory, f"{found.curve[-1][1]:,}", waited, said]


def violations_of(found: contest.Record) -> list[str]:
    """What does not hold of a run."""
    steps, updates = found.rates()
    if not updates:
        return [f"{found.side} made no update in the second half of its {found.limit:g} s"]
    said = []
    if abs(steps / updates / UPDATE_INTERVAL - 1.0) > TOLERANCE:
        said.append(f"{found.side} made an update each {steps / updates:.1f} steps in place of {UPDATE_INTERVAL}")
    if "waited" in found.facts and not agrees(found.facts["waited"], found.facts["verdicts"]):
        said.append(f"the dashboard and the learner do not agree: {found.facts}")
    return said


def main() -> int:
    torch = Path(os.environ.get("MEMOIRE_TORCH", ROOT / "build" / "torch"), "torch")
    if not torch.exists():
        print("There is no torch: `make setup-torch` installs it.")
        return CANNOT
    violations, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        for side in contest.sides_of(GAME, "memoire,sb3,torchrl,rllib"):
            try:
                found = contest.run(GAME, side, 0, SECONDS, Path(folder))
            except PeerUnavailable as error:
                violations.append(str(error))
                continue
            rows.append(row(found))
            violations += violations_of(found)
    head = ["side", "steps a second", "updates a second", "memory, MiB", "steps", "the learner waited", "verdicts"]
    print(table(head, rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
