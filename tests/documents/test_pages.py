"""Pages say what is there: their links, programs, limits, threats, names and tests."""

import ast
import faulthandler
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from memoire.cli.main import parser
from memoire.security import roles

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "docs/guide.md",
    "docs/one-process.md",
    "docs/cluster.md",
    "docs/tables.md",
    "docs/on-policy.md",
    "docs/language-models.md",
    "docs/remote-policies.md",
    "docs/trainers.md",
    pytest.param("docs/transferqueue.md", marks=pytest.mark.torch),
    pytest.param("docs/data.md", marks=pytest.mark.filterwarnings("ignore::UserWarning:minari")),
)


@cache
def functions_of(file: str) -> frozenset[str]:
    """The names of a file's test functions, its classes' included."""
    path = next((ROOT / "tests").rglob(f"{file}.py"), None)
    if path is None:
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def named_tests(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(test_\w+)::(test_\w+)`", text)


BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_in_order(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setenv("MEMOIRE_TQ", "")  # a page that connects by memoire.tq sets MEMOIRE_TQ
    if page == "docs/transferqueue.md":
        pytest.importorskip("tensordict", reason="tensordict is not installed: memoire.tq gives TensorDicts")
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page} shows no Python"
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(ROOT / page), "exec"), names)  # noqa: S102 - our own pages
    assert capsys.readouterr().out


def test_links_between_pages_lead_somewhere() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs/development").glob("*.md")),
    ]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_hazard_has_its_row() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (Z\d) \| (.*) \| (.*) \|$", text, re.MULTILINE)
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


STABILITY = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `([a-z.0-9]+)` \| (`.*) \|$", STABILITY, re.MULTILINE))
OTHERS = re.findall(r"^\| (`[A-Z_].*?) \| \[([a-z/-]+\.md)\].*\|$", STABILITY, re.MULTILINE)
"""Names that `memoire` has beside the eight, and the page that describes them."""


def names_of(row: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", row))


def test_memoire_has_the_public_names_of_the_page() -> None:
    import memoire

    assert memoire.__all__ == re.findall(r"`(\w+)`", ROWS["memoire"])
    assert {name for name in dir(memoire) if not name.startswith("__")} == set(memoire.__all__)
    assert inspect.getdoc(memoire.Schema) and all(name in str(memoire.__doc__) for name in memoire.__all__)


def test_the_other_names_are_importable_and_each_is_described_on_its_page() -> None:
    import memoire
    from memoire.version import imports_of

    listed = [name for row in OTHERS for name in re.findall(r"`(\w+)`", row[0])]
    assert {*listed} - {"__version__"} == set(imports_of("memoire")) - set(memoire.__all__)
    assert len(listed) == len(set(listed)) and all(hasattr(memoire, name) for name in listed)
    assert all(name in str(memoire.__doc__) for name in listed if name != "__version__")
    for names, page in OTHERS:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        missing = [name for name in re.findall(r"`(\w+)`", names) if name not in text]
        assert not missing, f"{page} says nothing of {missing}"


@pytest.mark.parametrize("module", sorted(set(ROWS) - {"memoire"}))
def test_every_public_name_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert names_of(ROWS[module]) <= set(vars(found))
    assert names_of(ROWS[module]) == set(getattr(found, "__all__", names_of(ROWS[module])))


CONTRACT = ROOT / "docs" / "development" / "contract.md"


def rows() -> list[tuple[set[str], str, str]]:
    """Of each line of the table: the rows that it is about, how they are here, and its tests."""
    _, _, text = CONTRACT.read_text(encoding="utf-8").partition("## TMRL, row by row")
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
    assert sorted(named) == sorted([*(f"C{number}" for number in range(1, 89)), "H17"])
    assert all(how for _, how, _ in rows())


def test_every_row_names_tests_that_are_there() -> None:
    for names, _, tests in rows():
        files = re.findall(r"`([\w/]+\.py)`", tests)
        assert files, f"{names} name no test"
        for file in files:
            assert "def test_" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{names}: {file}"


DOCS = ROOT / "docs"
DEVELOPMENT = DOCS / "development"
PAGE_OF_TESTS = (DEVELOPMENT / "tests.md").read_text(encoding="utf-8")


def section(text: str, heading: str, below: str) -> str:
    return text.partition(f"{heading}\n")[2].partition(f"\n{below}")[0]


def headings(text: str) -> list[str]:
    return re.findall(r"(?m)^### (.*)$", text)


def last_cells(text: str, letter: str) -> dict[str, str]:
    """The last cell of each row that is numbered with this letter."""
    return {row: cells.rpartition(" | ")[2] for row, cells in re.findall(rf"(?m)^\| ({letter}\d+) \| (.*) \|$", text)}


@pytest.mark.parametrize("page", ["tests.md", "contract.md"])
def test_every_named_test_exists(page: str) -> None:
    named = named_tests((DEVELOPMENT / page).read_text(encoding="utf-8"))
    assert not [f"{file}::{test}" for file, test in named if test not in functions_of(file)]


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


@pytest.mark.parametrize(
    "page", sorted({*DOCS.glob("*.md"), *DEVELOPMENT.glob("*.md"), ROOT / "README.md"}), ids=lambda page: page.name
)
def test_running_text_names_no_tests(page: Path) -> None:
    if page.name not in ("tests.md", "contract.md"):  # tables of tests
        assert not re.findall(r"test_\w+::\w+|tests/\w+/\w+\.py", page.read_text(encoding="utf-8")), (
            "docs/development/tests.md does"
        )


# --- The contract, and promises of the old README


def rows_of_contract():
    """Each row's name and the tests it names."""
    for line in CONTRACT.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| ([ABDEFH]\d+) \|", line):
            yield found.group(1), named_tests(line.rpartition(" | ")[2])


def test_every_row_is_there_once_and_names_a_test():
    expected = [f"A{k}" for k in range(1, 74)]
    expected += [f"B{k}" for k in range(1, 30)]
    expected += [f"E{k}" for k in range(1, 37)]
    expected += [f"F{k}" for k in range(1, 10)]
    expected += [f"H{k}" for k in (*range(1, 17), *range(19, 27))]
    expected += [f"D{k}" for k in range(1, 26)]
    found = list(rows_of_contract())
    assert [name for name, _ in found] == expected
    assert not [name for name, tests in found if not tests]


def test_the_readme_says_what_it_is_for_and_make_has_the_targets_that_it_names():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "reinforcement learning" in text[:400]
    assert "make demo" in text
    named = set(re.findall(r"^ *make (\w+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named and named <= targets


SVG = "{http://www.w3.org/2000/svg}"


def test_the_diagram_is_a_vector_drawing_for_light_and_dark_that_shows_every_part():
    drawing = ElementTree.parse(ROOT / "docs" / "architecture.svg").getroot()
    assert drawing.tag == f"{SVG}svg" and drawing.find(f".//{SVG}image") is None
    words = " ".join(text for each in drawing.iter(f"{SVG}text") for text in each.itertext())
    for part in ("actor", "relay", "proxies", "server", "learner", "cache", "batch", "model"):
        assert part in words, part
    light, dark = "".join(drawing.find(f"{SVG}style").itertext()).split("@media (prefers-color-scheme: dark)")
    coloured = re.compile(r"([.\w][^{}]*?)\{ (?=[^{}]*#[0-9a-f]{6})")
    named = [{name.strip() for found in coloured.findall(half) for name in found.split(",")} for half in (light, dark)]
    assert named[0] == named[1] and len(named[0]) > 5  # every colour has a dark counterpart
    assert "architecture.svg" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def test_documentation_is_complete_and_can_be_found():
    for page in sorted((ROOT / "docs").rglob("*.md")):  # another test checks that the site's menu has each page
        name, text = page.relative_to(ROOT / "docs").as_posix(), page.read_text(encoding="utf-8")
        assert (
            text.startswith("# ") and len(text) > 500 and not re.search(r"\bTODO\b|\bFIXME\b|see the source", text)
        ), name


def slug(heading):
    """What a heading is called in links."""
    plain = re.sub(r"`|\*|\[|\]\([^)]*\)", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def test_links_to_headings_lead_to_one():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target, heading in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            text = (page.parent / target if target else page).read_text(encoding="utf-8")
            assert heading in {slug(each) for each in re.findall(r"(?m)^#+ (.*)", text)}, (page.name, target, heading)


SAMPLING = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")


def test_the_vignette_says_why_and_cites_the_papers():
    why = " ".join(SAMPLING[SAMPLING.index("## Why replay") : SAMPLING.index("## One memory")].split())
    for reason in (
        "strongly correlated",
        "forgets rare events",
        "use a rare event again",
        "fewer environment steps",
        "surprising",
        "random",
        "not fully observed",
    ):
        assert reason in why, reason
    for paper in ("1511.05952", "1710.02298", "1803.00933"):
        assert paper in SAMPLING
    for test in re.findall(r"`(tests/\w+/\w+\.py)`", SAMPLING):
        assert (ROOT / test).exists(), test


def formulas(name):
    """What the vignette says that a name is, as Python."""
    return [
        compile(found, "sampling.md", "eval")
        for found in re.findall(rf"(?m)^ +{name} += (.+?)(?:, {{2,}}.*)?$", SAMPLING)
    ]


def test_the_vignettes_formulas_make_the_corrected_mean_that_of_all_entries():
    """Evaluated as they are written, over every entry of two clients, one of which grew after its cache was drawn."""
    (alone, together), (chance,) = formulas("importance_i"), formulas(r"P\(i\)")
    weights, values = (
        [np.array([1.0, 2.0, 5.0]), np.array([0.5, 4.0])],
        [np.array([3.0, -1.0, 2.0]), np.array([7.0, 9.0])],
    )
    newest, shares = [6, 2], [0.3, 0.7]  # N_c: the first client has three entries more than its cache
    mean = 0.0
    for w, f, now, share in zip(weights, values, newest, shares, strict=True):
        p = eval(chance, {"pi_c": share, "w_i": w, "S_k": w.sum()})
        facts = {"N": sum(newest), "P": lambda i, p=p: p, "i": 0, "N_k": len(w), "N_c": now, "beta": 1.0}
        mean += (p * eval(together, facts) * f).sum()
    assert mean == pytest.approx((6 * values[0].mean() + 2 * values[1].mean()) / 8)
    w, f = weights[0], values[0]
    facts = {"N": 3, "P": lambda i: w / w.sum(), "i": 0, "beta": 1.0}
    assert (w / w.sum() * eval(alone, facts) * f).sum() == pytest.approx(f.mean())


def test_a_crash_in_the_core_leaves_a_trace():
    script = "import faulthandler, ctypes, memoire._core; faulthandler.enable(); ctypes.string_at(0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "Segmentation fault" in done.stderr and "most recent call first" in done.stderr


def test_every_test_run_would_tell_of_a_crash_or_a_hang(request):
    assert faulthandler.is_enabled()  # pytest enables faulthandler in each run
    seconds = float(request.config.getini("faulthandler_timeout"))
    assert 0.0 < seconds < float(request.config.getini("timeout"))  # the stacks come before the end
