"""How the benchmarks measure: the sides of a comparison take turns in one run, and the ratio is what counts.

A shared machine is noisy, so that a figure alone says little; two figures taken a moment apart share the noise. Each
side is called often enough to fill a time slice, the slices of both alternate, and the ratio is taken in each round.
"""

import argparse
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles

import numpy as np

Side = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of what was measured."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4)
        return cls(low, median(values), high)


@dataclass(frozen=True)
class Result:
    """One row: what was done, how fast on both sides, and how they compare (above 1: memoire is faster)."""

    what: str
    unit: str
    ours: Spread
    theirs: Spread
    ratio: Spread
    baseline: str
    floor: float | None = None
    aim: float | None = None
    floor_rate: float | None = None

    @property
    def is_below(self) -> bool:
        """Whether it is slower than it has to be at least."""
        return self.ratio.middle < (self.floor or 0) or self.ours.middle < (self.floor_rate or 0)


@dataclass
class Report:
    """The rows of one file, printed as they come and written as a page at the end."""

    question: str
    facts: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.results.append(result)
        print(line(result), flush=True)

    def heading(self) -> None:
        print(f"{self.question}\n{machine()}\n\n{HEAD}\n{RULE}", flush=True)

    def finish(self, folder: str | None, name: str) -> None:
        below = [result.what for result in self.results if result.is_below]
        print("\nbelow the floor: " + ", ".join(below) if below else "\nall at or above their floors")
        if folder:
            path = Path(folder) / f"{name}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = "\n".join(line(result) for result in self.results)
            path.write_text(
                PAGE.format(name=name, question=self.question, machine=machine(), rows=rows), encoding="utf-8"
            )
            print(f"written to {path}")


HEAD = "| what | memoire | baseline | ratio (quartiles) | floor | aim | baseline is |"
RULE = "| --- | ---: | ---: | --- | ---: | ---: | --- |"
PAGE = f"""# benchmarks/{{name}}.py

{{question}}

{{machine}}

Medians; the sides took turns in one run, and the ratio was taken in each round: above 1, memoire is faster.

{HEAD}
{RULE}
{{rows}}
"""


def line(result: Result) -> str:
    """A row of the table."""
    ratio = f"{result.ratio.middle:.2f} ({result.ratio.low:.2f} to {result.ratio.high:.2f})"
    floor = f"{result.floor:g}" if result.floor else ""
    if result.floor_rate:
        floor = f"{amount(result.floor_rate)}{result.unit}"
    aim = f"{result.aim:g}" if result.aim else ""
    ours, theirs = (f"{amount(side.middle)}{result.unit}" for side in (result.ours, result.theirs))
    return f"| {result.what} | {ours} | {theirs} | {ratio} | {floor} | {aim} | {result.baseline} |"


def amount(value: float) -> str:
    """1234567.0 -> '1.23 M'."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g} "


def machine() -> str:
    """What this ran on."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((text.split(":", 1)[1].strip() for text in file if text.startswith("model name")), model)
    libraries = ", ".join(f"{name} {installed(name)}" for name in ("numpy", "pyzmq", "msgspec", "memoire-rl"))
    load = os.getloadavg()[0]
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, load {load:.1f}, {system}, {libraries}"


def installed(name: str) -> str:
    """The version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "from source"


def calls_per_slice(side: Side, seconds: float) -> int:
    """How often to call `side` to fill about `seconds`, or `side.most` times where it says that there is no more."""
    most = getattr(side, "most", None)
    if most is not None:
        return int(most)
    side()
    count = 1
    while True:
        taken = clock(side, count)
        if taken >= seconds / 4:
            return max(1, round(count * seconds / taken))
        count *= 4


def clock(side: Side, count: int) -> float:
    """Seconds for `count` calls."""
    began = time.perf_counter()
    for _ in range(count):
        side()
    return time.perf_counter() - began


def race(
    what: str,
    ours: Side,
    theirs: Side,
    *,
    baseline: str,
    unit: str = "/s",
    per_call: float = 1.0,
    rounds: int = 15,
    seconds: float = 0.05,
    floor: float | None = None,
    aim: float | None = None,
    floor_rate: float | None = None,
) -> Result:
    """Let two sides take turns.

    Args:
        what: What a row is called: workload, shapes, dtypes.
        ours: Does the thing once with memoire. It may have `prepare()`, called before each turn, and `most`, the calls
            of a turn.
        theirs: Does the same with the baseline.
        baseline: What `theirs` is, in words.
        unit: What is counted per second.
        per_call: How many of them one call does.
        rounds: How often each side has its turn.
        seconds: About how long one turn takes.
        floor: The ratio below which something is wrong.
        aim: The ratio that the design aims at.
        floor_rate: The rate below which something is wrong.
    """
    sides = (ours, theirs)
    counts = [calls_per_slice(side, seconds) for side in sides]
    prepare = [getattr(side, "prepare", lambda: None) for side in sides]
    rates: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for index in (0, 1) if turn % 2 else (1, 0):
                prepare[index]()
                rates[index].append(counts[index] * per_call / clock(sides[index], counts[index]))
    finally:
        gc.enable()
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    return Result(
        what, unit, Spread.of(rates[0]), Spread.of(rates[1]), Spread.of(ratios), baseline, floor, aim, floor_rate
    )


def arguments(description: str) -> argparse.Namespace:
    """The flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", metavar="FOLDER", help="also write the table as a page there")
    parser.add_argument("--only", default="", metavar="WORD", help="only the rows with this word in their name")
    parser.add_argument("--quick", action="store_true", help="small memories and few rounds: to see that it runs")
    return parser.parse_args()


def distinct(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values that no compression or page sharing can make smaller."""
    if np.dtype(dtype).kind == "f":
        return random.standard_normal(shape, dtype="float32").astype(dtype, copy=False)
    return random.integers(0, np.iinfo(dtype).max, shape, dtype=dtype)
