"""Setup of a checkout, and a checkout that is not built."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

import memoire

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "setup_venv.py"


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_venv", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_python_too_old_is_told_which_is_needed(setup: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"python3 is 3\.\d+\.\d+, and 3\.99 or newer is needed"):
        setup.check_python((3, 99), [])


def put_programs(folder: Path, **lines: str) -> None:
    """Write shell programs of one line each, by name ("python3_99" is python3.99)."""
    for name, line in lines.items():
        path = folder / name.replace("_", ".")
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)


SHIM = "echo 'pyenv: python: command not found' >&2; exit 127"


@pytest.mark.parametrize("is_chosen", [False, True], ids=["the default", "chosen by the user"])
def test_make_passes_over_a_python3_that_does_not_run_unless_it_was_chosen(is_chosen: bool, tmp_path: Path) -> None:
    put_programs(tmp_path, python3=SHIM, python3_13="[ $1 = -c ] || echo set up with $0")
    makefile = SCRIPT.parents[1] / "Makefile"
    chosen = [f"PYTHON={tmp_path / 'python3'}"] if is_chosen else []
    done = subprocess.run(
        ["make", "-s", "-f", str(makefile), "setup", *chosen],
        cwd=tmp_path, env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | {"MAKEFLAGS": ""},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if is_chosen:
        assert done.returncode and f"'{tmp_path / 'python3'}' does not run here" in done.stderr
    else:
        assert done.stdout.startswith("set up with") and not done.returncode


def test_a_missing_venv_module_names_the_package(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit, match=r"no venv module[^$]*python3-venv|no venv module[^$]*Install it"):
        setup.check_venv()


def test_a_missing_compiler_names_the_package(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(SystemExit, match=r"there is no C compiler \(no-such-compiler\)[^$]*gcc"):
        setup.check_compiler()


def test_missing_python_headers_name_the_package(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = {**sysconfig.get_paths(), "include": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    with pytest.raises(SystemExit, match=r"Python's headers are missing[^$]*dev"):
        setup.check_compiler()


def test_a_failing_step_shows_what_it_printed(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="a step failed: counting"):
        setup.call("counting", sys.executable, "-c", "print('one, two'); raise SystemExit(3)")
    assert "one, two" in capsys.readouterr().out


def test_a_step_is_done_once_until_what_it_depends_on_changes(setup: ModuleType, tmp_path: Path) -> None:
    setup.STAMPS = str(tmp_path / "stamps")  # the test has its own copy of the module
    assert not setup.is_done("build", "a")
    setup.done("build", "a")
    assert setup.is_done("build", "a")
    assert not setup.is_done("build", "b")


SOURCE = Path(memoire.__file__).resolve().parent
PLAIN = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]  # finds what is built
sys.path.insert(0, sys.argv[1])
import memoire
"""


def fails(folder: Path, program: str, *arguments: Path) -> str:
    """Run a program that imports memoire and must fail; return the last line of its errors."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "circular" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.processes
@pytest.mark.parametrize("absent", ["*.so", "_draw*.so"])
def test_a_checkout_of_which_not_all_is_built_says_what_to_do(absent: str, tmp_path: Path) -> None:
    copy = tmp_path / "memoire"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns(absent, "__pycache__", "static"))
    last = fails(tmp_path, PLAIN, tmp_path)
    assert last.startswith(f"memoire.errors.NotBuilt: memoire in {copy} is not built")
    assert "`make setup`" in last


@pytest.mark.processes
def test_a_clone_that_was_installed_says_to_leave_its_folder(tmp_path: Path) -> None:
    source, installed = tmp_path / "clone" / "memoire", tmp_path / "site" / "memoire"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("*.so", "__pycache__", "static"))
    installed.parent.mkdir()
    installed.symlink_to(SOURCE)
    program = PLAIN.replace("sys.argv[1])", "sys.argv[1]); sys.path.append(sys.argv[2])")
    last = fails(tmp_path, program, source.parent, installed.parent)
    assert "memoire is installed in" in last and "Start Python from another folder" in last
    assert "make setup" not in last
