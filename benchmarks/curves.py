"""Learning curves of the single-file examples, and the number of seeds that reach the goal.

Each example runs as a program, as a user runs it, with seeds 0 to 4, one run after another. A run ends when the mean
return of its last episodes reaches the goal. Torch is needed: PYTHONPATH=build/torch after `make setup-torch`.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from measure import arguments, cells, head, plot, write_page

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "learning"
SEEDS = range(5)
MAX_SECONDS = 600.0
"""Limit of one run in seconds: an example that takes longer has failed."""


@dataclass(frozen=True)
class Example:
    """Example program, its task, and its goal: the mean return of the last `window` episodes that ends a run."""

    name: str
    task: str
    goal: float
    window: int


TASKS = (
    Example("dqn", "CartPole-v1", 475.0, 20),
    Example("sac", "Pendulum-v1", -200.0, 20),
    Example("apex_dqn", "CartPole-v1, four actors", 475.0, 20),
    Example("r2d2", "CartPole-v1 without speeds", 300.0, 40),
    Example("ppo", "CartPole-v1, two collectors", 475.0, 50),
)


class Run(NamedTuple):
    """Run of an example: its seconds, the mean return of its last episodes, and the curve of (steps, that mean)."""

    seconds: float
    mean: float
    curve: list[tuple[int, float]]


def run(example: Example, seed: int) -> Run:
    """Run an example with a seed. Raise CalledProcessError or TimeoutExpired if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        file, began = Path(folder, "curve.csv"), time.monotonic()
        command = [sys.executable, EXAMPLES / f"{example.name}.py", "--seed", str(seed), "--curve", file]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=MAX_SECONDS).stdout
        seconds, rows = time.monotonic() - began, [line.split(",") for line in file.read_text().splitlines()]
    match = re.search(r"mean return of the last \d+ \w+: (\S+)", output)
    assert match is not None, output
    returns, window = [float(returned) for _, returned in rows], example.window
    means = [sum(returns[last - window : last]) / window for last in range(window, len(rows) + 1)]
    return Run(seconds, float(match[1]), list(zip([int(step) for step, _ in rows[window - 1 :]], means, strict=True)))


def row(example: Example, runs: list[Run]) -> str:
    """Return the example's line of the table."""
    reached = f"{sum(each.mean >= example.goal for each in runs)} of {len(runs)}"
    link = f"[{example.name}.py](../../examples/learning/{example.name}.py)"
    steps, seconds = spread([each.curve[-1][0] for each in runs]), spread([each.seconds for each in runs])
    return cells(link, example.task, f"{example.goal:g}", reached, steps, seconds)


def spread(values: Sequence[float]) -> str:
    """Return the median, the minimum and the maximum as text."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


HEAD = head("example", "task", "goal", "seeds that reach it", "steps until then, median (all)", "seconds", left=2)
NOTES = """\
The machine is that of the newest rows: `--only NAME` measures one example and keeps the rows of the others.

A curve is the mean return of the last episodes, 20 of them, 40 of R2D2, or 50 of PPO, a line for each seed. The dashed
line is the goal."""


def draw(example: Example, runs: list[Run], path: Path) -> None:
    """Draw a plot with a line for each seed."""
    with plot(path, 4, 3.2) as axes:
        for each in runs:
            thinned = each.curve[:: max(1, len(each.curve) // 150)]
            axes.plot(*zip(*thinned, each.curve[-1], strict=True), linewidth=1.2)
        axes.axhline(example.goal, color="gray", linestyle="--", linewidth=0.8)
        axes.set(title=f"{example.name}.py: {example.task}", xlabel="steps")


def write(folder: Path, results: dict[Example, list[Run]]) -> None:
    """Write the page and the plots; keep the page's rows of examples that were not run."""
    page = folder / "curves.md"
    former = page.read_text(encoding="utf-8") if page.exists() else ""
    lines = {line[2]: line[1] for line in re.finditer(r"(?m)^(\| \[(\w+)\.py\].*)$", former)}
    for example, runs in results.items():
        lines[example.name] = row(example, runs)
        draw(example, runs, folder / f"curves_{example.name}.svg")
    table = "\n".join([HEAD, *(lines[each.name] for each in TASKS if each.name in lines)])
    pictures = "\n".join(f"![curves]({path.name})" for path in sorted(folder.glob("curves*.svg")))
    write_page(folder, "curves", __doc__.partition("\n")[0], table, NOTES, pictures)


def main() -> int:
    args = arguments(__doc__)
    results: dict[Example, list[Run]] = {}
    print(HEAD, flush=True)
    for example in TASKS:
        if args.only in ("", example.name):
            results[example] = [run(example, seed) for seed in SEEDS]
            print(row(example, results[example]), flush=True)
    if args.write:
        write(Path(args.write), results)
    return 0 if all(each.mean >= example.goal for example, runs in results.items() for each in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
