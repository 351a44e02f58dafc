"""docs/contract.md names every row and only tests that exist; and what the old README promised is there."""

import ast
import faulthandler
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = ROOT / "docs" / "contract.md"


def rows():
    """Each row's name and the tests it names."""
    for line in CONTRACT.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| ([ABDEFH]\d+) \|", line):
            yield found.group(1), re.findall(r"`(test_\w+)::(test_\w+)`", line.rpartition(" | ")[2])


@cache
def functions_of(file):
    """The names of a file's test functions, its classes' included."""
    path = next((ROOT / "tests").rglob(f"{file}.py"), ROOT / "tests" / f"{file}.py")
    if not path.exists():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def test_every_row_is_there_once_and_names_a_test():
    expected = [f"A{k}" for k in range(1, 74)]
    expected += [f"B{k}" for k in range(1, 30)]
    expected += [f"E{k}" for k in range(1, 37)]
    expected += [f"F{k}" for k in range(1, 10)]
    expected += [f"H{k}" for k in (*range(1, 17), *range(19, 27))]
    expected += [f"D{k}" for k in range(1, 26)]
    found = list(rows())
    assert [name for name, _ in found] == expected
    assert not [name for name, tests in found if not tests]


def test_every_named_test_exists():
    named = re.findall(r"`(test_\w+)::(test_\w+)`", CONTRACT.read_text(encoding="utf-8"))
    assert not [f"{file}::{test}" for file, test in named if test not in functions_of(file)]


def test_links_of_this_page_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", CONTRACT.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert local
    assert not [link for link in local if not (CONTRACT.parent / link).exists()]


def test_the_readme_says_what_it_is_for_and_how_to_see_it_run():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "reinforcement learning" in text[:400]
    assert "make demo" in text


def test_make_has_the_targets_that_the_readme_names():
    named = set(re.findall(r"^ *make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
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
    assert named[0] == named[1] and len(named[0]) > 5  # every colour has one for the dark
    assert "architecture.svg" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def test_documentation_is_complete_and_can_be_found():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name, text = page.relative_to(ROOT / "docs").as_posix(), page.read_text(encoding="utf-8")
        assert name == "README.md" or f"({name})" in index, f"{name} is in no list"
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
    why = SAMPLING[SAMPLING.index("## Why replay") : SAMPLING.index("## One memory")]
    for reason in (
        "strongly correlated",
        "forgets rare events",
        "use a rare event again",
        "fewer environment steps",
        "surprising",
        "random",
        "not\nfully observed",
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
    newest, shares = [6, 2], [0.3, 0.7]  # N_c: the first has three entries more than in its cache
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
    assert faulthandler.is_enabled()  # pytest has it in each of its runs
    seconds = float(request.config.getini("faulthandler_timeout"))
    assert 0.0 < seconds < float(request.config.getini("timeout"))  # the stacks come before the end
