"""Does a contest of five minutes run from end to end: MinAtar Breakout by memoire and by Stable-Baselines3, one seed?

The smaller run of `make contest` that anybody can repeat. Each side learns for 100 seconds in an environment of its
own, then one evaluator plays 20 greedy episodes with each network that it left. One seed says little about who is
faster: docs/benchmarks/contest.md has more. What has to hold is that both learn, and that the dashboard's verdict says
that the learner waits if, and only if, it waited for more than 30 % of its time.
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

GAME, SECONDS, LEAST = "breakout", 100.0, 4.0
"""At the end each side's network returns so much at least; one that acts at random returns half a point."""


def row(found: contest.Record) -> list[object]:
    """Of the table: where the curve was at a third and at two thirds of the time, and at its end."""
    at = [max((point for point in found.curve if point[0] <= part * SECONDS), default=None) for part in (0.33, 0.66, 1)]
    waited = f"{found.facts['waited']:.1%}" if "waited" in found.facts else ""
    returns = [f"{point[2]:.1f}" if point else "" for point in at]
    said = ", ".join(found.facts.get("verdicts", {}))
    return [found.side, *returns, f"{found.curve[-1][1]:,}", found.facts["updates"], waited, said]


def main() -> int:
    torch = Path(os.environ.get("MEMOIRE_TORCH", ROOT / "build" / "torch"), "torch")
    if not torch.exists():
        print("There is no torch: `make setup-torch` installs it.")
        return CANNOT
    violations, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        for side in ("memoire", "sb3"):
            try:
                found = contest.run(GAME, side, 0, SECONDS, Path(folder))
            except PeerUnavailable as error:
                violations.append(str(error))
                continue
            rows.append(row(found))
            if found.curve[-1][2] < LEAST:
                violations.append(
                    f"{side} returns {found.curve[-1][2]} after {SECONDS:g} s, and has to return {LEAST:g}"
                )
            if side == "memoire" and not agrees(found.facts["waited"], found.facts["verdicts"]):
                violations.append(f"the dashboard and the learner do not agree: {found.facts}")
    head = ["side", "return at 33 s", "at 66 s", "at 100 s", "steps", "updates", "the learner waited", "verdicts"]
    print(table(head, rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
