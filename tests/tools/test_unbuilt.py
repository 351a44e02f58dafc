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
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
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


def test_it_is_an_import_error_to_whoever_can_do_without() -> None:
    error = NotBuilt("/a/memoire")
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
