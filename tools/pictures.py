"""Generator of the README's bar chart, from the record of a benchmark.

    python tools/pictures.py            docs/pictures/speed.svg, from docs/development/records/learner.json
    python tools/pictures.py --check    fail if a picture is out of date

The drawings follow the browser's theme, light or dark, and need no font and no library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS, PICTURES = ROOT / "docs" / "development" / "records", ROOT / "docs" / "pictures"
STYLE = """<style>
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 }
  .faint { fill: #57606a }
  .a { stroke: #0969da; fill: #0969da } .b { stroke: #bc4c00; fill: #bc4c00 }
  .bar { stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .faint { fill: #9198a1 }
    .a { stroke: #4493f8; fill: #4493f8 } .b { stroke: #f0883e; fill: #f0883e }
  }
</style>"""
COMPARED = "draw + gather 256, W1"
"""The row of docs/development/records/learner.json that the bars show."""
PEERS = {
    "Stable-Baselines3": "Stable-Baselines3 (uniform)",
    "cpprb": "cpprb",
    "TorchRL": "TorchRL",
    "Reverb": "Reverb",
    "NumPy,": "NumPy, indexing alone",
}
"""Label of each baseline's bar, by the first word of the baseline's name."""


def picture(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """Return a complete SVG; `label` is a sentence that describes the drawing."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<title>{label}</title>", STYLE, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return an SVG text element."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def ratios(record: dict[str, Any]) -> list[tuple[str, float]]:
    """Return each baseline's label and its time as a multiple of memoire's time, the largest first."""
    rows = [(baseline.split()[0], ratio) for what, baseline, ratio in record["rows"] if what == COMPARED]
    return sorted(((PEERS[word], ratio) for word, ratio in rows), key=lambda row: -row[1])


def speed(record: dict[str, Any]) -> str:
    """Return a chart with a bar for each library: its time per batch as a multiple of memoire's."""
    rows = [*ratios(record), ("memoire", 1.0)]
    rows.sort(key=lambda row: row[1])
    width, left, top, step = 760, 200, 40, 28
    height = top + step * len(rows) + 12
    scale = (width - left - 70) / rows[-1][1]
    parts = [text(10, 22, "Time to draw a batch of 256 samples, in times of memoire's (shorter is better)", "title")]
    for number, (name, ratio) in enumerate(rows):
        y = top + step * number
        color = "a" if name == "memoire" else "b"
        parts.append(text(left - 10, y + 17, name, "" if name == "memoire" else "faint", "end"))
        bar = f'x="{left}" y="{y + 4}" width="{max(2.0, ratio * scale):.1f}" height="18" rx="2"'
        parts.append(f'<rect class="{color} bar" {bar}/>')
        parts.append(text(left + max(2.0, ratio * scale) + 8, y + 17, f"{ratio:.3g}"))
    return picture(width, height, "memoire draws a batch faster than other replay memories", parts)


def drawn() -> dict[Path, str]:
    """Return the text of each picture, drawn from its record."""
    records = {name: json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8")) for name in WHAT}
    return {PICTURES / f"{name}.svg": draw(records[source]) for source, (name, draw) in WHAT.items()}


WHAT = {"learner": ("speed", speed)}


def stale(pictures: Mapping[Path, str]) -> dict[Path, str]:
    """Return the pictures whose file is missing or out of date."""
    texts = {file: file.read_text(encoding="utf-8") for file in pictures if file.exists()}
    return {file: body for file, body in pictures.items() if texts.get(file) != body}


def main(arguments: list[str]) -> int:
    """Write the pictures, or with any argument only report those out of date; return the exit status."""
    outdated = stale(drawn())
    for file, body in outdated.items():
        how = "out of date: run `make pictures`" if arguments else "drawn"
        print(f"{file.relative_to(ROOT)} is {how}")
        if not arguments:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(body, encoding="utf-8")
    return int(bool(arguments and outdated))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
