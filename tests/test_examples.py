"""The examples run as they are, end by themselves, and print what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# One line for each example: what its output must have in it.
PROMISES = {
    "single_process.py": "return of the greedy policy: 1.0",
    "vector_env.py": "upright ",
    "dict_observation.py": "(64, 4, 16, 16) float32",
    "classic_single_process.py": "the way right is known:",
}


@pytest.mark.parametrize("name", PROMISES)
def test_an_example_runs_and_keeps_its_promise(name: str, tmp_path: Path) -> None:
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout
    assert not done.stderr
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_every_example_is_run_and_short() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES)
    for path in EXAMPLES.glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 60, f"{path.name} has {len(lines)} lines"
        assert lines[0].startswith('"""'), f"{path.name} does not say what it shows"
