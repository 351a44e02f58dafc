"""docs/contract.md names every row and only tests that exist; and what the old README promised is there."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ROOT / "docs" / "contract.md"


def rows():
    """Each row's name and the tests it names."""
    for line in CONTRACT.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| ([ABEFH]\d+) \|", line):
            yield found.group(1), re.findall(r"`(test_\w+)::(test_\w+)`", line.rpartition(" | ")[2])


@cache
def functions_of(file):
    """The names of a file's test functions, its classes' included."""
    path = ROOT / "tests" / f"{file}.py"
    if not path.exists():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def test_every_row_is_there_once_and_names_a_test():
    expected = [f"A{k}" for k in range(1, 74)]
    expected += [f"B{k}" for k in (1, 2, 3, *range(7, 17), *range(18, 30))]
    expected += [f"E{k}" for k in range(1, 37)]
    expected += [f"F{k}" for k in range(1, 10)]
    expected += [f"H{k}" for k in (*range(1, 17), *range(19, 27))]
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


def test_the_diagram_is_a_vector_drawing_for_light_and_dark():
    drawing = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert "<svg" in drawing
    assert "prefers-color-scheme" in drawing
    assert "architecture.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_vignette_derives_the_draw_and_cites_the_papers():
    text = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    for paper in ("1511.05952", "1710.02298", "1803.00933"):
        assert paper in text


def test_a_crash_in_the_core_leaves_a_trace():
    script = "import faulthandler, ctypes, memoire._core; faulthandler.enable(); ctypes.string_at(0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "Segmentation fault" in done.stderr and "most recent call first" in done.stderr
