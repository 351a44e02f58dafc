"""Runs of contest.py in a soak, one after the other: each side in an environment of its own, with seed 0."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from _kit import CANNOT, ROOT, end, table

sys.path.append(str(ROOT / "benchmarks"))
import contest  # noqa: E402
from contestants.page import agrees  # noqa: E402
from peers import PeerUnavailable  # noqa: E402


def waiting(found: contest.Record) -> list[object]:
    """The last columns of a row: how much of its time the learner waited, and what the dashboard said."""
    waited = f"{found.facts['waited']:.1%}" if "waited" in found.facts else ""
    return [waited, ", ".join(found.facts.get("verdicts", {}))]


def show(
    game: str,
    sides: Iterable[str],
    seconds: float,
    head: Sequence[str],
    row: Callable[[contest.Record], list[object]],
    violations_of: Callable[[contest.Record], list[str]],
) -> int:
    """Let all sides run, and print a row for each. The exit status says whether all that has to hold does; the
    dashboard and the learner of a run have to agree.
    """
    torch = Path(os.environ.get("MEMOIRE_TORCH", ROOT / "build" / "torch"), "torch")
    if not torch.exists():
        print("There is no torch: `make setup-torch` installs it.")
        return CANNOT
    violations, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        for side in sides:
            try:
                found = contest.run(game, side, 0, seconds, Path(folder))
            except PeerUnavailable as error:
                violations.append(str(error))
                continue
            rows.append([*row(found), *waiting(found)])
            violations += violations_of(found)
            if found.side == "memoire" and not agrees(found.facts["waited"], found.facts["verdicts"]):
                violations.append(f"the dashboard and the learner do not agree: {found.facts}")
    print(table([*head, "the learner waited", "verdicts"], rows))
    return end(violations)
