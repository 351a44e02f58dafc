"""Records of a contest's runs, and the page, figures and plots that are rendered from them."""

import ast
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import Spread, cells, family_of, head, plot

from contestants.settings import DESCRIPTIONS, GAMES, PONG_CAPACITY, Game

HERE = Path(__file__).resolve().parent
TITLES = {
    "memoire": "memoire",
    "sb3": "Stable-Baselines3",
    "torchrl": "TorchRL",
    "rllib": "RLlib",
    "plain": "a plain loop",
    "uniform": "memoire, uniform draws",
    "inference": "memoire, actions by the learner",
}
"""Title of each side, in the order of the tables."""
HEAD = head(
    "side", "reach it", "seconds, median (quartiles)", "steps", "return later", "updates a second", "by memoire's"
)
RATES_HEAD = head("side", "steps a second", "updates a second", "by memoire's", "memory, MiB", "steps in it")
PAGE = """# benchmarks/contest.py

Seconds until a task is learned, with memoire, with other libraries and with a plain loop, on the same machine.

Sides take turns, one run at a time, each in an environment of its own with the same Gymnasium, MuJoCo, MinAtar and
torch ({versions}). All have the same network, optimiser, ratio of updates to steps, rule for targets and schedule of
exploration: `benchmarks/contestants/settings.py` has the numbers. Each side is one program of that folder. Seconds
count from the start of a program, imports and processes included. Every three seconds a side writes its network. When
its run is over, one evaluator plays 20 greedy episodes with each network, the same episodes for all sides. A run that
never reaches the score counts its limit and all of its steps. "Return later" is the mean over the second half of a run.
"By memoire's" is the ratio for each seed: above 1, memoire is faster.

{sections}
{sides}
`make contest PART=A GAME=breakout CONTEST_ARGS="--seeds 5"` adds missing runs and rewrites this page;
`build/contest` has a record of each run. Next: [curves.md](curves.md) runs the examples that are one file each.
"""
SIDES = """## What each side is

{lines}

If a side has a choice, the fastest option on this machine is used: eight environments in one process for
Stable-Baselines3 and the plain loop, whose acting is then a small part of their time; one thread for torch, since two
threads wait for each other. For double DQN, memoire and the plain loop share the same update, whose weights are one
array. memoire's learner computes the target's values of next states on a thread of its own (`memoire.prefetch`), while
it learns from the previous batches.
"""
RATES = """## {title}: rates

{machine}, {versions}. Each run has {limit}, and rates are of the second half of the time
in which it made updates.

{settings}

{table}

Median and quartiles. "By memoire's" is memoire's updates a second divided by the side's: above 1, memoire is faster.
Memory is the maximum of all processes of a side together; shared memory counts once. The quality of play is not
measured. memoire's actors send each frame once, in pieces of episodes, and the server stacks frames when drawing. The
first three steps of a piece are not drawn: they lack a whole stack.

![Steps over seconds: median and quartiles of each side](contest-{name}.svg)

{waiting}"""
SECTION = """## {title}: a score of {score:g}

{machine}. Each run has {limit}.

{settings}

{table}

![Return over seconds: median and quartiles of each side](contest-{name}.svg)

{waiting}"""


@dataclass(frozen=True)
class Record:
    """Record of a run: the learning curve of a side with a seed."""

    game: str
    side: str
    seed: int
    limit: float
    """Seconds that the run was allowed."""
    curve: tuple[tuple[float, int, float], ...]
    """Points of seconds since the program's start, steps, and mean return of 20 greedy episodes; in games in which only
    rates are compared, updates in place of a return.
    """
    facts: dict[str, Any]

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Record":
        """Return a record from its row of JSON."""
        return cls(**row | {"curve": tuple(map(tuple, row["curve"]))})

    @property
    def key(self) -> tuple[str, str, int]:
        return self.game, self.side, self.seed

    def reached(self, score: float) -> tuple[float, int] | None:
        """Return the seconds and steps of the first network with this score; None if no network reaches the score."""
        return next(((seconds, steps) for seconds, steps, returned in self.curve if returned >= score), None)

    def counted(self, score: float) -> tuple[float, int]:
        """Return the result of `reached`, or the limit and all steps of a run that never reaches the score."""
        return self.reached(score) or (self.limit, self.curve[-1][1] if self.curve else 0)

    def later_return(self) -> float:
        """Return the mean of the returns in the second half of the run."""
        later = [returned for seconds, _, returned in self.curve if seconds >= self.limit / 2]
        return sum(later) / len(later) if later else float("nan")

    def rates(self) -> tuple[float, float]:
        """Return the steps and updates a second in the second half of the time from the first updates on.

        The rates are nan if that half has fewer than two points.
        """
        learned = [point for point in self.curve if point[2] > 0]
        later = [point for point in learned if point[0] >= (learned[0][0] + learned[-1][0]) / 2]
        if len(later) < 2:
            return float("nan"), float("nan")
        (began, steps, updates), (ended, more_steps, more_updates) = later[0], later[-1]
        return (more_steps - steps) / (ended - began), (more_updates - updates) / (ended - began)


class Records:
    """Folder with a record for each finished run; the first record creates the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, record: Record) -> None:
        """Write the record of a run atomically."""
        path = self.folder / record.game / f"{record.side}-{record.seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(asdict(record)), encoding="utf-8")
        draft.replace(path)

    def all(self) -> list[Record]:
        return [Record.of(json.loads(path.read_text("utf-8"))) for path in sorted(self.folder.glob("*/*-*.json"))]

    def missing(
        self, game: str, sides: Sequence[str], seeds: int, is_enough: Callable[[Record], bool] = lambda _: True
    ) -> list[tuple[int, str]]:
        """Return the seeds and sides without a sufficient record, in the order of their turns.

        Sides run in reverse order for every other seed.
        """
        turns = [(seed, side) for seed in range(seeds) for side in sides[:: -1 if seed % 2 else 1]]
        known = {each.key for each in self.all() if is_enough(each)}
        return [(seed, side) for seed, side in turns if (game, side, seed) not in known]


def merged(known: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Return all records in the order of their keys; a new record replaces a known record of the same run."""
    by_key = {each.key: each for each in (*known, *new)}
    return [by_key[key] for key in sorted(by_key)]


def paired(ours: Sequence[Record], theirs: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the pairs of runs that have the same seed."""
    return [(mine, each) for mine in ours for each in theirs if mine.seed == each.seed]


def memory_of(pid: int) -> int:
    """Return the bytes of a process and its descendants. Memory that n processes share counts 1/n in each process."""
    total = 0
    for each in family_of(pid):
        with suppress(OSError):  # the process has ended
            lines = Path(f"/proc/{each}/smaps_rollup").read_text("utf-8").splitlines()
            total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def of(records: Sequence[Record], game: str, side: str) -> list[Record]:
    return [each for each in records if (each.game, each.side) == (game, side)]


def spread_of(values: Sequence[float]) -> Spread:
    """Return median and quartiles, which lie between the minimum and the maximum even for two or three runs."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return Spread(float(low), float(middle), float(high))


def cell(values: Sequence[float], form: str = ",.0f") -> str:
    spread = spread_of(values)
    return f"{spread.middle:{form}} ({spread.low:{form}} to {spread.high:{form}})"


def ratios(ours: Sequence[Record], theirs: Sequence[Record], score: float, which: int = 0) -> list[float]:
    """Return for each seed their seconds divided by ours, or the steps if `which` is 1."""
    return [b.counted(score)[which] / a.counted(score)[which] for a, b in paired(ours, theirs)]


def table(records: Sequence[Record], name: str, game: Game) -> str:
    """Return the table of a game, with a row for each side."""
    rows, ours = [RATES_HEAD if game.score is None else HEAD], of(records, name, "memoire")
    for side, title in TITLES.items():
        if theirs := of(records, name, side):
            if game.score is None:
                ratio = [a.rates()[1] / b.rates()[1] for a, b in paired(ours, theirs)]
            else:
                ratio = ratios(ours, theirs, game.score)
            compared = cell(ratio, ".2f") if ratio and side != "memoire" else ""
            shown = rates_of(theirs, compared) if game.score is None else scores_of(theirs, game, compared)
            rows.append(cells(f"{title} {theirs[0].facts.get('version', '')}".strip(), *shown))
    return "\n".join(rows)


def scores_of(runs: Sequence[Record], game: Game, compared: str) -> list[str]:
    """Return the cells of a side in a game with a score."""
    counted = [each.counted(game.score) for each in runs]
    reached = sum(each.reached(game.score) is not None for each in runs)
    updates = [each.facts["updates"] / each.limit for each in runs if "updates" in each.facts]
    return [
        f"{reached} of {len(runs)}",
        cell([seconds for seconds, _ in counted]),
        cell([steps for _, steps in counted]),
        cell([each.later_return() for each in runs], ",.1f" if game.score < 100.0 else ",.0f"),
        f"{np.median(updates):,.0f}" if updates and game.algorithm != "ppo" else "",
        compared,
    ]


def rates_of(runs: Sequence[Record], compared: str) -> list[str]:
    """Return the cells of a side in a game without a score."""
    rates = [each.rates() for each in runs]
    return [
        cell([steps for steps, _ in rates]),
        cell([updates for _, updates in rates], ".1f"),
        compared,
        f"{np.median([each.facts['memory'] for each in runs]) / 2**20:,.0f}",
        f"{min(PONG_CAPACITY, int(np.median([each.curve[-1][1] for each in runs]))):,}",
    ]


def waiting(records: Sequence[Record]) -> str:
    """Return a sentence with the shares of time that memoire's learner waited, or ""."""
    shares = [f"{each.facts['waited']:.1%}" for each in records if "waited" in each.facts]
    return f"Of its time, memoire's learner waited {', '.join(shares)}: a share for each seed.\n" if shares else ""


def aims(records: Sequence[Record]) -> dict[str, Spread]:
    """Return the measured ratios, by the keys of their rows of aims.toml."""
    spreads = {}
    for name, game in GAMES.items():
        ours = of(records, name, "memoire") if game.score is not None else []
        for side in TITLES:
            theirs = of(records, name, side)
            if side != "memoire" and (seconds := ratios(ours, theirs, game.score)):
                spreads[f"contest-{name}-{side}"] = spread_of(seconds)
            if side == "uniform" and (steps := ratios(theirs, ours, game.score, 1)):
                spreads[f"contest-{name}-steps"] = spread_of(steps)
    return spreads


def limits(runs: Sequence[Record]) -> str:
    """Return the time limits of the runs of a game, in words."""
    most, *less = sorted({each.limit for each in runs}, reverse=True)
    return f"{most:g} s" + "".join(f", or {each:g} s if it reached the score by then" for each in less)


def draw(records: Sequence[Record], name: str, game: Game, path: Path) -> None:
    """Draw the return over seconds, or the steps of a game without a score: medians and a band of quartiles."""
    with plot(path, 7, 3.6) as axes:
        for place, (side, title) in enumerate(TITLES.items()):
            runs = [each for each in of(records, name, side) if each.curve]
            if not runs:
                continue
            grid = np.arange(0.0, min(each.limit for each in runs) + 0.5, 3.0)
            rows = np.array([held(each, grid, 1 if game.score is None else 2) for each in runs])
            low, middle, high = np.nanquantile(rows, (0.25, 0.5, 0.75), axis=0)
            axes.plot(grid, middle, color=f"C{place}", label=title, linewidth=1.4)
            if len(runs) > 1:
                axes.fill_between(grid, low, high, color=f"C{place}", alpha=0.15, linewidth=0)
        if game.score is not None:
            axes.axhline(game.score, color="gray", linestyle="--", linewidth=0.8)
        shown = "steps" if game.score is None else "mean return of 20 greedy episodes"
        axes.set(title=game.title, xlabel="seconds", ylabel=shown)
        axes.legend(fontsize="small", frameon=False)


def held(record: Record, grid: np.ndarray, column: int = 2) -> np.ndarray:
    """Return the value of the newest point at each time of the grid.

    Before the first point, that is the return of the first network, or 0 steps.
    """
    points = record.curve if column == 2 else [(0.0, 0, 0), *record.curve]
    seconds, values = (np.array([point[place] for point in points]) for place in (0, column))
    return values[np.maximum(np.searchsorted(seconds, grid, side="right") - 1, 0)]


def write(folder: Path, records: Sequence[Record], record_aims: Callable[[dict[str, Spread]], None]) -> None:
    """Write the page, its plots, and all records."""
    sections = []
    for name, game in GAMES.items():
        runs = [each for each in records if each.game == name]
        if runs:
            draw(records, name, game, folder / f"contest-{name}.svg")
            facts = {"machine": str(runs[0].facts.get("machine", "")), "limit": limits(runs)}
            facts |= {
                "settings": DESCRIPTIONS.get(name, DESCRIPTIONS[game.algorithm]),
                "versions": runs[0].facts.get("packages", ""),
            }
            parts = {"table": table(records, name, game), "waiting": waiting(of(records, name, "memoire"))}
            form = RATES if game.score is None else SECTION
            sections.append(form.format(title=game.title, score=game.score, name=name, **facts, **parts))
    versions = next((str(each.facts["shared"]) for each in records if "shared" in each.facts), "")
    page = PAGE.format(versions=versions, sections="\n".join(sections), sides=SIDES.format(lines=described()))
    (folder / "contest.md").write_text(wrapped(page), encoding="utf-8")
    record_aims(aims(records))
    path = folder / "contest.json"
    figures = json.loads(path.read_text(encoding="utf-8")) | {"rows": [asdict(each) for each in records]}
    path.write_text(json.dumps(figures) + "\n", encoding="utf-8")


def described() -> str:
    """Return a list of the sides' functions, each with the first line of its docstring."""
    played, link = dict.fromkeys(game.algorithm for game in GAMES.values()), "../../benchmarks/contestants"
    lines = []
    for path in sorted(HERE.glob("*_side.py")):
        for part in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(part, ast.FunctionDef) and part.name in played:
                text = (ast.get_docstring(part) or "").split("\n")[0]
                lines.append(f"* [{path.name}]({link}/{path.name}), `{part.name}`: {text}")
    return "\n".join(lines)


def wrapped(page: str) -> str:
    """Return the page with paragraphs wrapped at 100 columns; tables, headings and pictures are unchanged."""
    parts = []
    for part in filter(None, map(str.strip, page.split("\n\n"))):
        bullets = part.startswith("* ")
        wrapper = textwrap.TextWrapper(100, subsequent_indent="  " * bullets, break_on_hyphens=False)
        lines = part.split("\n") if bullets else [part]
        parts.append(part if part.startswith(("|", "#", "!")) else "\n".join(map(wrapper.fill, lines)))
    return "\n\n".join(parts) + "\n"


def read(folder: Path) -> list[Record]:
    """Return the records from which a page was written; an empty list if there is no page."""
    path = folder / "contest.json"
    return [Record.of(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.exists() else []
