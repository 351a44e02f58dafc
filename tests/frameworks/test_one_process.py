"""The program of docs/one-process.md learns, saves the whole run, and continues from its own checkpoint."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import memoire

pytestmark = pytest.mark.torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "one-process.md"


@pytest.fixture
def program(tmp_path):
    """Return a function that runs the page's program for a number of steps and returns what it printed."""
    (code,) = re.findall(r"^```python torch\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "run.py").write_text(code, encoding="utf-8")

    def run(steps):
        command = [sys.executable, "run.py", "--steps", str(steps)]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_the_program_of_the_page_prints_its_figures_and_continues_where_it_was(program, tmp_path):
    shown = re.findall(r"(\w+)=(\S+)", program(1100).partition("\n")[0])
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name, _ in shown] == re.findall(r"(?m)^\| `(\w+)`: ", page)
    assert np.isfinite([float(number) for _, number in shown]).all()
    assert "continues at step 1100 with 1100 entries" in program(1150)
    assert len(memoire.Buffer.load(tmp_path / "run" / "replay.npz")) == 1150
    assert torch.load(tmp_path / "run" / "learner.pt", weights_only=True)["step"] == 1150


def test_a_start_after_the_last_step_and_one_without_the_learners_file_continue(program, tmp_path):
    program(40)
    learner = tmp_path / "run" / "learner.pt"
    assert "continues at step 40 with 40 entries" in program(40)  # all steps are done
    assert torch.load(learner, weights_only=True)["step"] == 40
    learner.unlink()  # as after a kill within the first checkpoint
    assert "continues at step 0 with 40 entries" in program(30)
    assert torch.load(learner, weights_only=True)["step"] == 30
    assert len(memoire.Buffer.load(tmp_path / "run" / "replay.npz")) == 70
    (tmp_path / "run" / "replay.npz").unlink()
    assert "continues" not in program(35)
    assert torch.load(learner, weights_only=True)["step"] == 35
