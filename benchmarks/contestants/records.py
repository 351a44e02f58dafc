"""What a run of a contest leaves: its curve, and when it reached a score. Reads nothing but records."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One run: what a side has learned with one seed."""

    game: str
    side: str
    seed: int
    limit: float
    """Seconds that it had."""
    curve: tuple[tuple[float, int, float], ...]
    """Seconds since the program was started, steps, mean return of 20 greedy episodes; where only rates are compared,
    updates in place of a return.
    """
    facts: dict[str, Any]

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Record":
        """One that was JSON."""
        return cls(**row | {"curve": tuple((point[0], point[1], point[2]) for point in row["curve"])})

    @property
    def key(self) -> tuple[str, str, int]:
        return self.game, self.side, self.seed

    def reached(self, score: float) -> tuple[float, int] | None:
        """Seconds and steps of the first network that returns so much; None if there is none."""
        return next(((seconds, steps) for seconds, steps, returned in self.curve if returned >= score), None)

    def counted(self, score: float) -> tuple[float, int]:
        """The same; a run that never gets there counts its limit, and all of its steps."""
        return self.reached(score) or (self.limit, self.curve[-1][1] if self.curve else 0)

    def later_return(self) -> float:
        """Mean of the returns in the second half of the run: how well it plays when it has learned for a while."""
        later = [returned for seconds, _, returned in self.curve if seconds >= self.limit / 2]
        return sum(later) / len(later) if later else float("nan")

    def rates(self) -> tuple[float, float]:
        """Steps and updates a second of a game without a score, in the second half of the time from its first updates
        on; nan for a run that hardly got so far.
        """
        learned = [point for point in self.curve if point[2] > 0]
        later = [point for point in learned if point[0] >= (learned[0][0] + learned[-1][0]) / 2]
        if len(later) < 2:
            return float("nan"), float("nan")
        (began, steps, updates), (ended, more_steps, more_updates) = later[0], later[-1]
        return (more_steps - steps) / (ended - began), (more_updates - updates) / (ended - began)


class Records:
    """A folder with a record for each run that is over.

    Args:
        folder: Where they are; it is made when the first one comes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, game: str, side: str, seed: int) -> Path:
        return self.folder / game / f"{side}-{seed}.json"

    def keep(self, record: Record) -> None:
        """Write one, which is there as a whole or not at all."""
        path = self.path(*record.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(asdict(record)), encoding="utf-8")
        draft.replace(path)

    def all(self) -> list[Record]:
        return [Record.of(json.loads(path.read_text("utf-8"))) for path in sorted(self.folder.glob("*/*-*.json"))]

    def missing(
        self, game: str, sides: Sequence[str], seeds: int, is_enough: Callable[[Record], bool] = lambda _: True
    ) -> list[tuple[int, str]]:
        """Seeds and sides that have no record, or one that is not enough, in the order of their turns: every other seed
        the other way round, so that nobody is always first.
        """
        turns = [(seed, side) for seed in range(seeds) for side in sides[:: -1 if seed % 2 else 1]]
        known = {each.key for each in self.all() if is_enough(each)}
        return [(seed, side) for seed, side in turns if (game, side, seed) not in known]


def merged(known: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """All of them, in the order of their keys; of one run that is in both, the new one."""
    found = {each.key: each for each in (*known, *new)}
    return [found[key] for key in sorted(found)]


def paired(ours: Sequence[Record], theirs: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Runs of the same seed."""
    by_seed = {each.seed: each for each in theirs}
    return [(each, by_seed[each.seed]) for each in ours if each.seed in by_seed]


def memory_of(pid: int, processes: Path = Path("/proc")) -> int:
    """Bytes of a process and of all that come from it. What n of them share counts in each as an n-th."""
    children = defaultdict(list)
    for folder in processes.glob("[0-9]*"):
        children[parent_of(folder)].append(folder.name)
    found, total = [str(pid)], 0
    for each in found:
        found += children[each]
        total += proportional(processes / each)
    return total


def parent_of(folder: Path) -> str:
    """The number of the process that started this one; "" if it is gone."""
    try:
        return (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1]
    except OSError:
        return ""


def proportional(folder: Path) -> int:
    """Its proportional set size in bytes; 0 if it is gone."""
    try:
        lines = (folder / "smaps_rollup").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
