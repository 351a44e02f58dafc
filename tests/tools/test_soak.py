"""`make soak`: each trial asks a question, and the page keeps what was not run again."""

import re
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[1] / "soak"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SOAK))
    import _run

    return _run


def test_every_program_has_trials_and_hides_no_module(runner) -> None:
    programs = {path.stem for path in SOAK.glob("*.py") if not path.name.startswith("_")}
    trials = runner.trials([])
    assert {trial.path.stem for trial in trials} == programs and len({trial.name for trial in trials}) == len(trials)
    assert not programs & (sys.stdlib_module_names | {"history", "dashboard"})


def test_a_page_keeps_the_sections_of_trials_that_were_not_run(runner) -> None:
    one, two = runner.trials([])[:2]
    first = runner.section(one, 0, "| a |\n| --- |", 61.7)
    assert first.startswith("## ") and first.endswith(f"`{one.path.name} {one.name}`, 62 s: held.\n\n| a |\n| --- |")
    page = runner.page("", {one.name: first})
    assert page.startswith("# Soak\n") and "cores" in page
    both = runner.page(page, {two.name: runner.section(two, 1, "words", 5.0)})
    assert first in both
    assert f"`{two.path.name} {two.name}`, 5 s: **VIOLATED** (exit status 1).\n\nwords\n" in both
    assert runner.page(both, {two.name: runner.section(two, 77, "No namespaces.", 0.1)}).count("<!-- ") == 2
    assert "gone" not in runner.page("<!-- gone -->\n## Gone?\n", {})


def test_a_program_that_hangs_is_ended_and_said(runner, tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text('"""Does it?"""\nimport time\ntime.sleep(1000)\n')
    assert runner.run(script, longest=0.5) == (-9, "Did not end within 0.5 s.", 0.5)


def test_no_trial_of_the_page_needs_more_than_half_of_its_time(runner) -> None:
    text = (SOAK.parents[1] / "docs" / "development" / "records" / "soak.md").read_text(encoding="utf-8")
    seconds = [int(number) for number in re.findall(r"^`\w+\.py \w+`, (\d+) s: ", text, re.MULTILINE)]
    assert len(seconds) >= 15 and max(seconds) <= runner.LONGEST / 2


def test_the_named_trial_of_a_program_runs_and_one_that_fails_is_heard(runner, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    says = 'import sys\ndef fails() -> int:\n    """Does it?"""\n    print("some words")\n    return 3\n'
    script.write_text(f"{says}sys.path.insert(0, {str(SOAK)!r})\nfrom _kit import run_named\nrun_named(globals())\n")
    status, output, seconds = runner.run(script, "fails")
    assert (status, output) == (3, "some words")
    assert 0 < seconds < 10
    assert runner.run(script, "other")[:2] == (1, "")
