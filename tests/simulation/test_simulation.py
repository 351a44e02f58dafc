"""Trials in a simulated world: a seed gives the same trial everywhere, and only planted faults are detected.

`make simulate` runs any number of seeds. Each trial here runs in a process of its own, since the world replaces the
clocks and threads of its process.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from netkit import DEADLINE
from simulation.plants import PLANTS
from simulation.run import REMEMBERED, remembered
from simulation.trial import Settings

TESTS = Path(__file__).resolve().parent.parent
NOTHING_ENDS = "kills=0 terms=0 eio=0 power=0 resets=0"


def python(*words: str, tests: Path = TESTS, **more: str) -> subprocess.CompletedProcess[str]:
    folders = [str(tests.parent), str(tests), str(tests / "support")]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path, **more}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)


def digests(output: str) -> list[str]:
    return re.findall(r"turns, ([0-9a-f]{16})", output)


def older_processor() -> dict[str, str]:
    """Return environment variables that keep NumPy and libc from using optional processor features."""
    features = np.show_config("dicts")["SIMD Extensions"].get("found", [])
    assert features or platform.machine() != "x86_64"
    lacks = ",".join(f"-{name}" for name in ("AVX512F", "AVX512VL", "AVX512BW", "AVX2", "AVX", "FMA", "BMI2", "ERMS"))
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(features), "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={lacks}"}


def test_the_same_seed_is_the_same_trial_in_every_process(tmp_path: Path) -> None:
    """The second trial differs in folder, environment, cores, processor features and position in its process."""
    elsewhere = tmp_path / "a folder with a longer name"
    for part in ("memoire", "dashboard", "tests/history", "tests/simulation", "tests/support"):
        shutil.copytree(TESTS.parent / part, elsewhere / part, ignore=shutil.ignore_patterns("__pycache__"))
    (elsewhere / "tmp").mkdir()
    strange = {"TMPDIR": str(elsewhere / "tmp"), "HOME": "/", "LC_ALL": "C", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    strange |= older_processor()
    words = ["simulation.run", "--first", "2", "--seeds", "2", "--workers", "1", "--digests", "seconds=30"]
    here = python("simulation.trial", "3", "seconds=30", PYTHONHASHSEED="1")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        there = python(*words, tests=elsewhere / "tests", **strange)
    finally:
        os.sched_setaffinity(0, cores)
    (first,), (second, third) = digests(here.stdout), digests(there.stdout)
    assert first == third != second


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("storage=caches", id="caches"),
        pytest.param("storage=caches runs=2", id="another run"),
        pytest.param("storage=rollouts", id="rollouts"),
        pytest.param("storage=prompts", id="prompts"),
        pytest.param("storage=jobs", id="jobs"),
        pytest.param("seconds=40 kills=0 power=6", id="power failures"),
        pytest.param("seconds=40 kills=0 terms=0 full=4 eio=3", id="full and broken disks"),
        # No server loses entries in this trial, so every accepted entry of a rollout must arrive, even if nodes stop.
        pytest.param("storage=rollouts seconds=40 stops=8 slow=6 pause=0.5 rate=2 " + NOTHING_ENDS, id="stops"),
    ],
)
def test_nothing_is_lost_or_counted_twice(words: str) -> None:
    done = python("simulation.run", "--seeds", "1", "--workers", "1", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 1 seeds failed" in done.stdout


def test_seeds_that_failed_once_are_remembered_with_their_settings() -> None:
    first, second = remembered("# none\n\n7  # lost a line\n12 storage=rollouts runs=2\n")
    assert (first, second) == (Settings(7), Settings(12, storage="rollouts", runs=2))
    assert all(isinstance(each, Settings) for each in remembered(REMEMBERED.read_text(encoding="utf-8")))


@pytest.mark.parametrize("plant", ["lost_lines", "added_answers", "increments", "endless_runs", "forgotten_accounts",
                                   "unnumbered_lines", "early_replies", "feedback_dropped_when_sent"])  # fmt: skip
def test_a_planted_fault_is_found(plant: str) -> None:
    words = ["--seeds", "30", "--stop-after", "1", "--workers", "1", "--plant", plant, "--whole"]
    done = python("simulation.run", *words, "seconds=40")
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith(PLANTS[plant].found_by) for line in done.stdout.splitlines()), done.stdout


def test_a_schedule_that_fails_is_made_short() -> None:
    """The trial begins with nineteen faults."""
    words = ["--first", "3", "--seeds", "1", "--workers", "1", "--plant", "increments"]
    done = python("simulation.run", *words, "seconds=30")
    schedule = done.stdout.partition("The shortest schedule that fails so:\n")[2]
    faults = [line for line in schedule.splitlines() if re.match(r" *[0-9.]+ s \w+ ", line)]
    assert len(faults) <= 8 and "To see it again: python -m simulation.trial 3" in schedule, done.stdout
