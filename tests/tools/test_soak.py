"""`make soak`: each script asks a question, and the page keeps what was not run anew."""

import ast
import re
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[1] / "soak"
SCRIPTS = sorted(path for path in SOAK.glob("*.py") if not path.name.startswith("_"))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SOAK))
    import _run

    return _run


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_begins_with_its_question(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring and docstring.partition("\n")[0].endswith("?")
    assert not set(sys.stdlib_module_names | {"history"}) & {path.stem}, "it would hide the module of that name"


def test_a_page_keeps_the_sections_of_scripts_that_were_not_run(runner) -> None:
    one, two = SCRIPTS[:2]
    first = runner.section(one, 0, "| a |\n| --- |", 61.7)
    assert first.startswith("## ") and first.endswith(f"`{one.stem}.py`, 62 s: held.\n\n| a |\n| --- |")
    page = runner.page("", {one.stem: first})
    assert page.startswith("# Soak\n") and "cores" in page
    both = runner.page(page, {two.stem: runner.section(two, 1, "words", 5.0)})
    assert first in both
    assert f"`{two.stem}.py`, 5 s: **VIOLATED** (exit status 1).\n\nwords\n" in both
    assert runner.page(both, {two.stem: runner.section(two, 77, "No namespaces.", 0.1)}).count("<!-- ") == 2
    assert "gone" not in runner.page("<!-- gone -->\n## Gone?\n", {})


def test_a_script_that_hangs_is_ended_and_said(runner, tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text('"""Does it?"""\nimport time\ntime.sleep(1000)\n')
    assert runner.run(script, longest=0.5) == (-9, "Did not end within 0.5 s.", 0.5)


def test_no_script_of_the_page_needs_more_than_half_of_its_time(runner) -> None:
    text = (SOAK.parents[1] / "docs" / "soak.md").read_text(encoding="utf-8")
    seconds = [int(number) for number in re.findall(r"^`\w+\.py`, (\d+) s: ", text, re.MULTILINE)]
    assert len(seconds) >= 30 and max(seconds) <= runner.LONGEST / 2


def test_a_script_that_fails_is_heard(runner, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text('"""Does it?"""\nprint("some words")\nraise SystemExit(3)\n')
    status, output, seconds = runner.run(script)
    assert (status, output) == (3, "some words")
    assert 0 < seconds < 10
