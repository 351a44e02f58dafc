"""Time limits of tests: they end and name a hang, and do not measure the speed of a machine."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
LONGER = ("kubernetes", "soak", "mutants", "fuzz")
"""Folders that `make test` does not run."""
MOST = 120.0
"""Longest limit of a test in seconds, also for busy machines; trials on whole clusters have other limits."""
NAMES = {"timeout", "patience", "seconds"}


def limits(source: str) -> list[float]:
    """Return the numbers that calls in a file give as limits: timeout=, patience=, seconds=, pytest.mark.timeout()."""
    numbers = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            values = [word.value for word in node.keywords if word.arg in NAMES]
            if isinstance(node.func, ast.Attribute) and node.func.attr == "timeout":
                values += node.args
            numbers += [value.value for value in values if isinstance(value, ast.Constant)]
    return [float(value) for value in numbers if isinstance(value, int | float)]


def test_no_limit_is_above_two_minutes():
    files = [path for path in TESTS.rglob("*.py") if path.parent.name not in LONGER]
    largest = {path.name: max(limits(path.read_text(encoding="utf-8")), default=0.0) for path in files}
    assert max(largest.values()) >= 100.0, "nothing was found: has the name of limits changed?"
    assert {name: limit for name, limit in largest.items() if limit > MOST} == {}


@pytest.fixture
def root(pytestconfig):
    """Return the plugin of `tests/conftest.py`, since other folders have files of the same name."""
    return pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


def test_times_that_tests_change_exist(root):
    for place in (each for places in root.TIMES.values() for each in places):
        module, _, constant = place.rpartition(".")
        seconds = getattr(pytest.importorskip(module), constant)
        assert type(seconds) is float and seconds > 0.0


def test_an_endless_hang_is_ended_and_named(tmp_path):
    (tmp_path / "test_planted.py").write_text("import threading\n\ndef test_hangs():\n    threading.Event().wait()\n")
    settings = ["-c", TESTS.parent / "pyproject.toml", "--rootdir", tmp_path]
    settings += ["-o", "timeout=2", "-o", "faulthandler_timeout=1"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *settings, tmp_path / "test_planted.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "_ test_hangs _" in done.stdout and "Timeout (>2.0s) from pytest-timeout" in done.stdout
    assert "threading.Event().wait()" in done.stdout, "the line where it hung"
    assert "test_planted.py" in done.stderr, "all threads' lines, a moment before"


def test_quick_tests_do_not_read_slow_folders(root):
    def config_of(marks, *paths):
        return SimpleNamespace(option=SimpleNamespace(markexpr=marks), args=[*paths])

    for folder, is_left_out in (("integration", True), ("browser", True), ("wire", None)):
        assert root.pytest_ignore_collect(TESTS / folder, config_of("not slow", str(TESTS))) is is_left_out
    for whole in (config_of(""), config_of("slow"), config_of("not slow", "tests/integration/test_moves.py")):
        assert root.pytest_ignore_collect(TESTS / "integration", whole) is None
