"""docs/guarantees.md has every limit with its default, and every known hazard."""

import dataclasses
import re

from dockit import ROOT
from memoire.limits import HELD_BYTES, MODEL_BYTES, GiB, KiB, Limits, MiB

GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
UNITS = {"KiB": KiB, "MiB": MiB, "GiB": GiB, "": 1}


def test_every_limit_is_there_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+)(?: (\w+))? \|", GUARANTEES, re.MULTILINE)
    said = {name: float(number) * UNITS[unit] for name, number, unit in rows}
    limits = Limits(held_bytes=HELD_BYTES, model_bytes=MODEL_BYTES)  # where no container allows less
    defaults = {field.name: getattr(limits, field.name) for field in dataclasses.fields(Limits)}
    assert said == defaults, "docs/guarantees.md: a row | `name` | default | meaning | for each field of Limits"


def test_every_hazard_has_its_row() -> None:
    rows = re.findall(r"^\| (Z\d) \| (.*) \| (.*) \|$", GUARANTEES, re.MULTILINE)
    assert [row[0] for row in rows] == [f"Z{number}" for number in range(1, 10)]
