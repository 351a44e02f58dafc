"""Table of the aims of speed and of the measured ratios: renders docs/results.md from the figures there."""

import json
import textwrap
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
    quartiles, rows = measured(folder), []
    bounds: dict[str, list[str]] = {}
    for key, aim in read().items():
        low, middle, high = quartiles.get(key, [float("nan")] * 3)
        page = folder / f"{aim.shown_by}.md"
        link = f"[{middle:.3g}](development/records/{page.name})" if page.exists() else f"{middle:.3g}"
        figure = f"{link} ({low:.3g} to {high:.3g})" if key in quartiles else "not measured"
        missed = key in quartiles and not aim.is_reached(middle)
        rows.append(f"| {aim.what} | {aim.against} | {aim} | {figure}{', **missed**' * missed} |")
        if missed and aim.bounded_by:
            bounds.setdefault(aim.bounded_by.strip(), []).append(f"*{aim.what}, against {aim.against}*")
    heading = "\n## Why aims are missed\n\n" if bounds else ""
    reasons = "\n".join(item(f"* {' and '.join(names)}: {text}") for text, names in bounds.items())
    parts = {"rows": "\n".join(rows), "contests": contests(folder), "bounds": heading + reasons}
    parts["once"] = "\n".join(item(text) for text in loaded()["once"]["text"].strip().split("\n\n"))
    return PAGE.format(**parts).rstrip() + "\n"


def item(text: str) -> str:
    """Return an item of a list, wrapped at 100 columns."""
    return textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def contests(folder: Path) -> str:
    """Return the section with the existing plots of contest.py: return of each side over seconds, or steps."""
    pictures = sorted(folder.glob("contest-*.svg"))
    lines = [f"![{path.stem}](development/records/{path.name})" for path in pictures]
    return "\n\n".join([CONTESTS, *lines]) + "\n" if lines else ""


def write(folder: Path = PAGES) -> None:
    """Write the page: for the records in docs/ to docs/results.md, for other records beside them."""
    place = DOCS if folder.resolve() == PAGES else folder
    (place / "results.md").write_text(render(folder), encoding="utf-8")


PAGE = """# How fast memoire is, and how well it learns

For people who compare replay memories. Each row is a ratio of two sides that took turns in one run:
the median, with quartiles. Above 1 memoire is faster; if the aim is "at most", smaller is better.
The link of a median leads to the record with rates, shapes and machine. W1 has states of 64
float32, actions of 8 and n-step 1. W2 has frames of 84 x 84 uint8, stack 4 and n-step 3; a sample
is two stacks of 56 kB. `make bench` and `make bench-peers` rewrite this page.

| operation | against | aim | median ratio |
| --- | --- | ---: | --- |
{rows}
{contests}{bounds}

## What was measured once

Commit 294c2516 has the scripts of these measurements, all on two cores. Memoire loses some of them.

{once}

Next: [sampling.md](sampling.md) has the probability of each draw."""

CONTESTS = """
## How long until a task is learned

Median and quartiles over seeds, one side at a time on two cores. [The
record](development/records/contest.md) describes the sides, and [another
one](development/records/curves.md) has the curves of the examples."""


if __name__ == "__main__":
    write()
    print(render())
