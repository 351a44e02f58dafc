"""`python -m memoire.rl`: a pipeline as processes, of which some are killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memoire.rl.up import Accident, Run

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "rl" / "rl_pipeline.py"


def python(*arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memoire.rl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_a_run_reaches_its_goal_although_each_role_is_killed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_TEST_RUNS", str(tmp_path))
    accidents = (Accident("worker-0", 60), Accident("trainer", 130), Accident("server", 200))
    said: list[str] = []
    run = Run(str(FILE), seconds=90.0, accidents=accidents, dashboard=False, say=said.append)
    assert run.run() == 0, "\n".join(said)
    text = "\n".join(said)
    assert text.count("on purpose") == 3 and "goal reached" in text
    tried = python("try", str(FILE), "--episodes", "2")
    assert tried.returncode == 0 and "mean return 20.00 over 2 episodes" in tried.stdout, tried.stderr


def test_a_file_without_a_pipeline_is_refused() -> None:
    found = python("up", __file__)
    assert found.returncode == 2 and "rl.Pipeline" in found.stderr
    found = python("work", "tcp://127.0.0.1:9", os.devnull)
    assert found.returncode == 2 and "pipeline" in found.stderr
