"""docs/tests.md names only tests that exist, for every promise, hazard and threat; no other page names tests in its text."""

import re
from pathlib import Path

import pytest

from dockit import ROOT, functions_of, named_tests

DOCS = ROOT / "docs"
PAGE = (DOCS / "tests.md").read_text(encoding="utf-8")
OF_TESTS = {"tests.md", "contract.md", "soak.md", "mutants.md"}
"""Pages that are tables of tests, or what commands printed about them."""


def section(text: str, heading: str, below: str) -> str:
    return text.partition(f"{heading}\n")[2].partition(f"\n{below}")[0]


def headings(text: str) -> list[str]:
    return re.findall(r"(?m)^### (.*)$", text)


def rows(text: str, letter: str) -> dict[str, str]:
    """The last cell of each row that is numbered with this letter."""
    return {row: cells.rpartition(" | ")[2] for row, cells in re.findall(rf"(?m)^\| ({letter}\d+) \| (.*) \|$", text)}


def test_every_named_test_exists() -> None:
    assert not [f"{file}::{test}" for file, test in named_tests(PAGE) if test not in functions_of(file)]


def test_every_named_file_exists() -> None:
    named = re.findall(r"`((?:tests|examples|docs)/[^`]*)`", PAGE)
    assert len(named) > 60
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_promise_names_tests() -> None:
    promises = headings(section((DOCS / "guarantees.md").read_text(encoding="utf-8"), "## The promises", "## "))
    shown = section(PAGE, "## What is promised", "## ")
    assert len(promises) >= 7 and headings(shown)[: len(promises)] == promises
    for promise in promises:
        assert len(named_tests(section(shown + "\n", f"### {promise}", "### "))) >= 3, promise


@pytest.mark.parametrize(
    ("page", "letter", "heading"),
    [("guarantees.md", "Z", "## Known hazards of ZeroMQ"), ("security.md", "T", "## Threats")],
)
def test_every_numbered_row_of_a_page_names_tests(page: str, letter: str, heading: str) -> None:
    there = rows((DOCS / page).read_text(encoding="utf-8"), letter)
    shown = rows(section(PAGE, heading, "## "), letter)
    assert list(shown) == list(there) and len(there) >= 9
    for row, cell in shown.items():
        assert named_tests(cell) or cell.startswith("not tested: "), row
        assert not re.sub(r"`test_\w+::test_\w+`", "", cell).strip() or cell.startswith("not tested: "), row


@pytest.mark.parametrize("page", sorted(set(DOCS.glob("*.md")) | {ROOT / "README.md"}), ids=lambda page: page.name)
def test_running_text_names_no_tests(page: Path) -> None:
    if page.name not in OF_TESTS:
        assert not re.findall(r"test_\w+::\w+|tests/\w+/\w+\.py", page.read_text(encoding="utf-8")), (
            "docs/tests.md does"
        )
