"""A checkout that was never built says so, and what to do."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memoire
from memoire.errors import NotBuilt

SOURCE = Path(memoire.__file__).resolve().parent
PLAIN = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]  # finds what is built
sys.path.insert(0, sys.argv[1])
import memoire
"""


@pytest.mark.processes
@pytest.mark.parametrize("absent", ["*.so", "_draw*.so"])
def test_a_checkout_of_which_not_all_is_built_says_what_to_do(absent: str, tmp_path: Path) -> None:
    copy = tmp_path / "memoire"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns(absent, "__pycache__", "static"))
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"memoire.errors.NotBuilt: memoire in {copy} is not built")
    assert "`make setup`" in last
    assert "circular" not in done.stderr


@pytest.mark.processes
def test_a_clone_that_was_installed_says_to_leave_its_folder(tmp_path: Path) -> None:
    source, installed = tmp_path / "clone" / "memoire", tmp_path / "site" / "memoire"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("*.so", "__pycache__", "static"))
    installed.parent.mkdir()
    installed.symlink_to(SOURCE)
    program = PLAIN.replace("sys.argv[1])", "sys.argv[1]); sys.path.append(sys.argv[2])")
    done = subprocess.run(
        [sys.executable, "-c", program, str(source.parent), str(installed.parent)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert "memoire is installed in" in last and "Start Python from another folder" in last
    assert "make setup" not in last


def test_it_is_an_import_error_to_whoever_can_do_without() -> None:
    error = NotBuilt("/a/memoire", None)
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
