"""Pages say what is there: their links, programs, limits, threats, names and tests."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from dockit import ROOT, functions_of, named_tests
from memoire.cli.main import parser
from memoire.security import roles

PAGES = (
    "docs/guide.md",
    "docs/choose.md",
    "docs/rate.md",
    "docs/on-policy.md",
    "docs/language-models.md",
    "docs/inference.md",
    "docs/observers.md",
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_in_order(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page} shows no Python"
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(ROOT / page), "exec"), names)  # noqa: S102 - our own pages
    assert capsys.readouterr().out


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


def test_every_hazard_has_its_row() -> None:
    rows = re.findall(r"^\| (Z\d) \| (.*) \| (.*) \|$", GUARANTEES, re.MULTILINE)
    assert [row[0] for row in rows] == [f"Z{number}" for number in range(1, 10)]


PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
POLICY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
THREATS = re.findall(r"^\| (T\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)


def test_threats_are_numbered_and_whole():
    assert [row[0] for row in THREATS] == [f"T{number}" for number in range(1, len(THREATS) + 1)]
    assert len(THREATS) == len(re.findall(r"^\| T\d+", PAGE, re.MULTILINE)) >= 13


def test_every_role_has_its_row():
    described = PAGE.partition("## Keys")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| (\w+) \| ", described, re.MULTILINE)) - {"role"} == set(roles.ROLES)


@pytest.mark.parametrize("page", [PAGE, POLICY], ids=["docs/security.md", "SECURITY.md"])
def test_options_that_are_named_exist(page):
    lines = parser().format_help() + "".join(
        each.format_help() for action in parser()._actions if action.choices for each in action.choices.values()
    )
    assert not [option for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) if option not in lines]


def test_the_policy_says_how_to_report_and_invents_no_address():
    assert "private advisory" in POLICY and "docs/security.md" in POLICY
    assert not re.findall(r"\S+@\S+\.\S+", POLICY + PAGE)


FOLDER = Path(__file__).resolve().parents[2] / "docs"
STABILITY = (FOLDER / "stability.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `([a-z.0-9]+)` \| (`.*) \|$", STABILITY, re.MULTILINE))
OTHERS = re.findall(r"^\| (`[A-Z_].*?) \| \[([a-z-]+\.md)\].*\|$", STABILITY, re.MULTILINE)
"""Names that `memoire` has beside the eight, and the page that describes them."""


def names_of(row: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", row))


def test_the_front_door_gives_what_the_page_says() -> None:
    import memoire

    assert memoire.__all__ == re.findall(r"`(\w+)`", ROWS["memoire"])
    assert {name for name in dir(memoire) if not name.startswith("__")} == set(memoire.__all__)
    assert inspect.getdoc(memoire.Schema) and all(name in str(memoire.__doc__) for name in memoire.__all__)


def test_the_other_names_are_importable_and_each_is_described_on_its_page() -> None:
    import memoire
    from memoire.building import imports_of

    listed = [name for row in OTHERS for name in re.findall(r"`(\w+)`", row[0])]
    assert {*listed} - {"__version__"} == set(imports_of("memoire")) - set(memoire.__all__)
    assert len(listed) == len(set(listed)) and all(hasattr(memoire, name) for name in listed)
    assert all(name in str(memoire.__doc__) for name in listed if name != "__version__")
    for names, page in OTHERS:
        text = (FOLDER / page).read_text(encoding="utf-8")
        missing = [name for name in re.findall(r"`(\w+)`", names) if name not in text]
        assert not missing, f"{page} says nothing of {missing}"


@pytest.mark.parametrize("module", sorted(set(ROWS) - {"memoire"}))
def test_every_public_name_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert names_of(ROWS[module]) <= set(vars(found))
    assert names_of(ROWS[module]) == set(getattr(found, "__all__", names_of(ROWS[module])))


ROWS_OF_TMRL = {f"C{number}" for number in range(1, 89)} | {"H17"}


def rows() -> list[tuple[set[str], str, str]]:
    """Of each line of the table: the rows that it is about, how they are here, and its tests."""
    _, _, text = (ROOT / "docs" / "tmrl.md").read_text(encoding="utf-8").partition("## Row by row")
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and re.match(r"[CH]\d", cells[0]):
            names = set(re.findall(r"\b[CH]\d+", cells[0]))
            for first, last in re.findall(r"C(\d+) to C(\d+)", cells[0]):
                names |= {f"C{number}" for number in range(int(first), int(last) + 1)}
            found.append((names, cells[1], cells[2]))
    return found


def test_every_row_has_its_place_once() -> None:
    named = [name for names, *_ in rows() for name in names]
    assert sorted(named) == sorted(ROWS_OF_TMRL)
    assert all(how for _, how, _ in rows())


def test_every_row_names_tests_that_are_there() -> None:
    for names, _, tests in rows():
        files = re.findall(r"`([\w/]+\.py)`", tests)
        assert files, f"{names} name no test"
        for file in files:
            assert "def test_" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{names}: {file}"


DOCS = ROOT / "docs"
PAGE_OF_TESTS = (DOCS / "tests.md").read_text(encoding="utf-8")
OF_TESTS = {"tests.md", "contract.md", "soak.md", "mutants.md"}
"""Pages that are tables of tests, or what commands printed about them."""


def section(text: str, heading: str, below: str) -> str:
    return text.partition(f"{heading}\n")[2].partition(f"\n{below}")[0]


def headings(text: str) -> list[str]:
    return re.findall(r"(?m)^### (.*)$", text)


def last_cells(text: str, letter: str) -> dict[str, str]:
    """The last cell of each row that is numbered with this letter."""
    return {row: cells.rpartition(" | ")[2] for row, cells in re.findall(rf"(?m)^\| ({letter}\d+) \| (.*) \|$", text)}


def test_every_named_test_exists() -> None:
    assert not [f"{file}::{test}" for file, test in named_tests(PAGE_OF_TESTS) if test not in functions_of(file)]


def test_every_named_file_exists() -> None:
    named = re.findall(r"`((?:tests|examples|docs)/[^`]*)`", PAGE_OF_TESTS)
    assert len(named) > 60
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_promise_names_tests() -> None:
    promises = headings(section((DOCS / "guarantees.md").read_text(encoding="utf-8"), "## The promises", "## "))
    shown = section(PAGE_OF_TESTS, "## What is promised", "## ")
    assert len(promises) >= 7 and headings(shown)[: len(promises)] == promises
    for promise in promises:
        assert len(named_tests(section(shown + "\n", f"### {promise}", "### "))) >= 3, promise


@pytest.mark.parametrize(
    ("page", "letter", "heading"),
    [("guarantees.md", "Z", "## Known hazards of ZeroMQ"), ("security.md", "T", "## Threats")],
)
def test_every_numbered_row_of_a_page_names_tests(page: str, letter: str, heading: str) -> None:
    there = last_cells((DOCS / page).read_text(encoding="utf-8"), letter)
    shown = last_cells(section(PAGE_OF_TESTS, heading, "## "), letter)
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
