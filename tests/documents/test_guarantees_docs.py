"""docs/guarantees.md names only tests that exist, every limit with its default, and every known hazard."""

import dataclasses
import re
from pathlib import Path

import pytest

from dockit import ROOT, functions_of, named_tests
from memoire.limits import GiB, KiB, Limits, MiB

PAGES = [ROOT / "docs" / name for name in ("guarantees.md", "operations.md")]
GUARANTEES = PAGES[0].read_text(encoding="utf-8")
UNITS = {"KiB": KiB, "MiB": MiB, "GiB": GiB, "": 1}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_test_exists(page: Path) -> None:
    named = named_tests(page.read_text(encoding="utf-8"))
    assert not [f"{file}::{test}" for file, test in named if test not in functions_of(file)]


def test_every_promise_names_tests() -> None:
    promises = GUARANTEES.partition("## The promises\n")[2].partition("\n## ")[0].split("\n### ")[1:]
    assert len(promises) >= 7
    for promise in promises:
        assert len(named_tests(promise)) >= 3, promise.splitlines()[0]


def test_every_limit_is_there_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+)(?: (\w+))? \|", GUARANTEES, re.MULTILINE)
    said = {name: float(number) * UNITS[unit] for name, number, unit in rows}
    defaults = {field.name: getattr(Limits(), field.name) for field in dataclasses.fields(Limits)}
    assert said == defaults, "docs/guarantees.md: a row | `name` | default | meaning | for each field of Limits"


def test_every_hazard_has_its_row_and_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| (Z\d) \| (.*) \| (.*) \| (.*) \|$", GUARANTEES, re.MULTILINE)
    assert [row[0] for row in rows] == [f"Z{number}" for number in range(1, 10)]
    for row in rows:
        assert named_tests(row[3]) or row[3].startswith("not tested: "), row[0]
