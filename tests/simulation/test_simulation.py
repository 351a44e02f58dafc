"""Trials in a simulated world: the same seed is the same trial everywhere, planted faults are found, and nothing else is.

`make simulate` runs as many seeds as one likes. Each trial here runs in processes of its own, whose clocks and threads are
the world's.
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
from simulation.run import REMEMBERED, remembered
from simulation.trial import Settings

TESTS = Path(__file__).resolve().parent.parent


def python(*words: str, tests: Path = TESTS, **more: str) -> subprocess.CompletedProcess[str]:
    folders = [str(tests.parent), str(tests), str(tests / "support")]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path, **more}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)


def digest_of(output: str) -> str:
    found = re.search(r"turns, ([0-9a-f]{16})", output)
    assert found is not None, output
    return found[1]


def older_processor() -> dict[str, str]:
    """Have NumPy and libc compute as on a processor without whatever this one has beyond what they ask for."""
    found = np.show_config("dicts")["SIMD Extensions"].get("found", [])
    assert found or platform.machine() != "x86_64"
    lacks = ",".join(f"-{name}" for name in ("AVX512F", "AVX512VL", "AVX512BW", "AVX2", "AVX", "FMA", "BMI2", "ERMS"))
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(found), "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={lacks}"}


def test_the_same_seed_is_the_same_trial_in_every_process(tmp_path: Path) -> None:
    """Elsewhere: another folder and environment, one core, an older processor, the second trial of its process."""
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
    second, third = re.findall(r"turns, ([0-9a-f]{16})", there.stdout)
    assert digest_of(here.stdout) == third != second


def test_what_a_power_failure_leaves_is_enough_to_go_on_from() -> None:
    words = ["seconds=40", "kills=0", "power=6"]
    done = python("simulation.run", "--seeds", "2", "--workers", "1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 2 seeds failed" in done.stdout


@pytest.mark.parametrize(
    ("storage", "runs"), [("caches", 1), ("caches", 2), ("rollouts", 1), ("prompts", 1), ("jobs", 1)]
)
def test_nothing_is_lost_or_counted_twice(storage: str, runs: int) -> None:
    done = python("simulation.run", "--seeds", "3", "--workers", "1", f"storage={storage}", f"runs={runs}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 3 seeds failed" in done.stdout


def test_each_entry_of_rollouts_is_handed_out_once_and_none_is_lost_while_nodes_are_stopped() -> None:
    """Nothing ends here, so that all that was accepted has to come."""
    calm = [f"{name}=0" for name in ("kills", "terms", "eio", "power", "resets")]
    words = ["storage=rollouts", "seconds=40", "stops=8", "slow=6", "pause=0.5", "rate=2", *calm]
    done = python("simulation.run", "--seeds", "2", "--workers", "1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 2 seeds failed" in done.stdout


def test_disks_that_are_full_or_break_lose_nothing_that_was_acknowledged() -> None:
    words = ["seconds=40", "kills=0", "terms=0", "full=4", "eio=3"]
    done = python("simulation.run", "--seeds", "2", "--workers", "1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 2 seeds failed" in done.stdout


def test_seeds_that_failed_once_are_remembered_with_their_settings() -> None:
    first, second = remembered("# none\n\n7  # lost a line\n12 storage=rollouts runs=2\n")
    assert (first, second) == (Settings(7), Settings(12, storage="rollouts", runs=2))
    assert all(isinstance(each, Settings) for each in remembered(REMEMBERED.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        ("lost_lines", "log: "),
        ("added_answers", "caches: "),
        ("increments", "counts: "),
        ("endless_runs", "endings: "),
        ("forgotten_accounts", "copies: "),
        ("unnumbered_lines", "log: "),
        ("early_replies", "log: "),
        ("feedback_dropped_when_sent", "feedback: "),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(plant: str, found: str) -> None:
    words = ["--seeds", "30", "--stop-after", "1", "--workers", "1", "--plant", plant, "--whole"]
    done = python("simulation.run", *words, "seconds=40")
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith(found) for line in done.stdout.splitlines()), done.stdout


def test_a_schedule_that_fails_is_made_short() -> None:
    """The trial begins with nineteen faults."""
    words = ["--first", "3", "--seeds", "1", "--workers", "1", "--plant", "increments"]
    done = python("simulation.run", *words, "seconds=30")
    schedule = done.stdout.partition("The shortest schedule that fails so:\n")[2]
    faults = [line for line in schedule.splitlines() if re.match(r" *[0-9.]+ s \w+ ", line)]
    assert len(faults) <= 8 and "To see it again: python -m simulation.trial 3" in schedule, done.stdout
