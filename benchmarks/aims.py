"""Table of the aims of speed and of the measured ratios: renders docs/results.md from the figures there."""

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
PAGES = DOCS / "development" / "records"


@dataclass(frozen=True)
class Aim:
    """Row of aims.toml: a measured operation, its baseline, and the bound of the ratio's median."""

    what: str
    against: str
    shown_by: str
    """Name of the benchmark, and so of the page, that shows the ratio."""
    least: float | None = None
    most: float | None = None
    bounded_by: str = ""
    """Reason that the page gives if the aim is not reached."""

    def __str__(self) -> str:
        return f"{self.least:g}" if self.least is not None else f"at most {self.most:g}"

    def is_reached(self, ratio: float) -> bool:
        return ratio >= (self.least or 0.0) and (self.most is None or ratio <= self.most)


@cache
def loaded() -> dict[str, Any]:
    return tomllib.loads((HERE / "aims.toml").read_text(encoding="utf-8"))


def read() -> dict[str, Aim]:
    """Return the rows of aims.toml by key, in the order of the file."""
    return {key: Aim(**row) for key, row in loaded().items() if key != "once"}


def measured(folder: Path) -> dict[str, list[float]]:
    """Map the key of each measured row to the quartiles that its benchmark wrote."""
    quartiles: dict[str, list[float]] = {}
    for key, aim in read().items():
        path = folder / f"{aim.shown_by}.json"
        if path.exists():
            figures = json.loads(path.read_text(encoding="utf-8"))["aims"]
            if key in figures:
                quartiles[key] = figures[key]
    return quartiles


def render(folder: Path = PAGES) -> str:
    """Return the page: a row for each aim, then the reason for each aim that is not reached."""
    quartiles, rows, bounds = measured(folder), [], []
    for key, aim in read().items():
        low, middle, high = quartiles.get(key, [float("nan")] * 3)
        reached = "not measured" if key not in quartiles else "yes" if aim.is_reached(middle) else "**no**"
        figure = f"{middle:.3g} ({low:.3g} to {high:.3g})" if key in quartiles else ""
        page = (
            f"[{aim.shown_by}](development/records/{aim.shown_by}.md)"
            if (folder / f"{aim.shown_by}.md").exists()
            else aim.shown_by
        )
        rows.append(f"| {aim.what} | {aim.against} | {aim} | {figure} | {reached} | {page} |")
        if key in quartiles and not aim.is_reached(middle) and aim.bounded_by:
            bounds.append(f"* *{aim.what}, against {aim.against}* ({middle:.3g} of {aim}): {aim.bounded_by.strip()}")
    heading = "\n## What bounds those that are not reached\n\n" if bounds else ""
    parts = {"rows": "\n".join(rows), "contests": contests(folder), "bounds": heading + "\n".join(bounds)}
    parts["once"] = loaded()["once"]["text"].strip()
    return PAGE.format(**parts).rstrip() + "\n"


def contests(folder: Path) -> str:
    """Return the section with the existing plots of contest.py: return of each side over seconds, or steps."""
    pictures = sorted(folder.glob("contest-*.svg"))
    lines = [f"![Return over seconds, or steps, of each side](development/records/{path.name})" for path in pictures]
    return "\n\n".join([CONTESTS, *lines]) + "\n" if lines else ""


def write(folder: Path = PAGES) -> None:
    """Write the page: for the records in docs/ to docs/results.md, for others beside them."""
    place = DOCS if folder.resolve() == PAGES else folder
    (place / "results.md").write_text(render(folder), encoding="utf-8")


PAGE = """# What was aimed at, and what was measured

Ratios of one run in which the sides took turns: median and quartiles. Above 1 memoire is faster; if the aim is "at
most", smaller is better. Ratios and shares hardly depend on the machine; the rates, on the pages of each benchmark, do.
W1: states of 64 float32, actions of 8, n-step 1. W2: frames of 84 x 84 uint8, stack 4, n-step 3; a sample is both
stacks, 56 kB. `make bench` and `make bench-peers` rewrite this page; its rows are in `benchmarks/aims.toml`.

| what | against | aim | measured | reached | shown by |
| --- | --- | ---: | --- | --- | --- |
{rows}
{contests}{bounds}

## What was tried and left out

Each of these was built, timed beside the present code, and was slower or no faster:

* streaming stores for gathering batches and for copying caches below 1 MiB (larger caches use them)
* gathering drawn samples in the order of their rows
* socket buffers larger than the system's default
* a single arena of the C library
* choosing a tree's child by halves
* a pause of 0.2 ms for the thread that receives caches, so that it wakes once for several caches

Beyond the processor's caches, the speed of memory bounds gathering, checksums and copying. A second thread for a large
batch was not built: a thread of its own prefetches a learner's batches ([waiting](development/records/waiting.md)), and
in a server a second thread would take a core from the intake of the next caches.

## What was measured once

Commit 294c2516 has the scripts of all these measurements. Memoire loses some of them. All ran on two cores.

{once}"""

CONTESTS = """
## How long until a task is learned

Median and quartiles over seeds, one side at a time on the same two cores. [The page](development/records/contest.md)
describes the sides."""


if __name__ == "__main__":
    write()
    print(render())
