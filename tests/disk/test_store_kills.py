"""SIGKILL at every point between two steps of the store, and at any time: nothing acknowledged is lost, nothing is half."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import powerkit
from killkit import check_state
from memoire.disk.state_folder import Store
from memoire.limits import Limits
from statekit import folder_in_memory
from store_child import HITS, STEPS

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
POINTS = [
    "before create",
    "after create",
    "before epoch",
    "before begin",
    "before commit",
    "after commit",
    "before text",
    "after text",
    "before model",
    "after model",
    "before backups",
    "between backups",
    "after backups",
    "before forgetting",
    "before checkpoint",
    "after checkpoint",
]
OF_FILES = ["write", "sync", "replace", "sync folder"]
"""Of whatever is replaced; here snapshots."""


@pytest.fixture
def in_memory():
    with folder_in_memory() as folder:
        yield folder


def child(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "support")])}
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "store_child.py"), *map(str, arguments)],
        env=environment, timeout=100, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def check(folder):
    """What is in the folder is a whole number of steps, all those acknowledged among them; returns how many."""
    return check_state(folder / "state", (folder / "acks").stat().st_size)


@pytest.mark.parametrize(
    "points", [POINTS[::3], POINTS[1::3], [*POINTS[2::3], *OF_FILES]], ids=["some", "others", "the rest"]
)
def test_a_kill_at_any_point_loses_nothing_that_was_acknowledged(in_memory, points):
    child("points", in_memory, *points)
    folders = sorted(in_memory.iterdir())
    assert len(folders) == len(points) * len(HITS)
    killed = {folder.name.rpartition("-")[0] for folder in folders if (folder / "status").read_text() == "-9"}
    assert killed == {point.replace(" ", "_") for point in points}, "a point was never reached"
    for folder in folders:
        assert (folder / "status").read_text() in ("-9", "0"), folder.name
        step = check(folder)
        assert step == STEPS or (folder / "status").read_text() == "-9"


def test_every_point_of_the_store_is_tried():
    others = ("replay/files.py", "tq/interface.py")  # test_every_file.py kills at each of their points
    package = TESTS.parent / "memoire"
    paths = [path for path in package.rglob("*.py") if path.relative_to(package).as_posix() not in others]
    sources = "".join(path.read_text() for path in paths)
    assert set(re.findall(r'\b_?at\("([^"]+)"\)', sources)) == set(POINTS)


def test_kills_at_any_time_lose_nothing_that_was_acknowledged(in_memory):
    words = child("times", in_memory, 1, 15)
    assert check_all(in_memory, 15) > 5, words


def check_all(folder, kills):
    """As `check`, where each kill may have left one step that is stored and was not acknowledged."""
    acknowledged = (folder / "acks").stat().st_size
    with Store(folder / "state", "home", limits=Limits(log_bytes=600)) as store:
        step = int(store.settings().get("step", "0"))
    assert acknowledged <= step <= acknowledged + kills
    with (folder / "acks").open("ab") as file:
        file.write(b"." * (step - acknowledged))
    return check(folder)


def test_a_power_failure_at_any_moment_loses_nothing_that_was_acknowledged(in_memory, tmp_path):
    """What was written and not synced is lost, in part or as a whole, and in any order."""
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("no C compiler to make a failing disk with")
    recorded = powerkit.record(in_memory, tmp_path, TESTS / "support" / "store_child.py", "steps", in_memory, 3)
    assert len(recorded) > 250
    found = [
        check_state(in_memory / "after" / "state", acknowledged)
        for _, acknowledged in powerkit.failures(recorded, in_memory, in_memory / "after", 40, seed=1)
    ]
    assert found == sorted(found) and found[-1] >= 5
