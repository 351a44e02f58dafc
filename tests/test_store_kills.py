"""SIGKILL at every point between two steps of the store, and at any time: nothing acknowledged is lost, nothing is half."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import powerkit
from memoire.limits import Limits
from memoire.storage.rotating_log import text_of
from memoire.storage.snapshot_file import Counts, End, SnapshotFile
from memoire.storage.state_folder import Store
from statekit import CLIENTS, RUN, folder_in_memory, lines_through, own_accounts, text_of_log
from store_child import HITS, STEPS

TESTS = Path(__file__).resolve().parent
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
    "within snapshot",
    "before snapshot",
    "after snapshot",
    "before checkpoint",
    "after checkpoint",
]


@pytest.fixture
def in_memory():
    with folder_in_memory() as folder:
        yield folder


def child(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run(
        [sys.executable, str(TESTS / "store_child.py"), *map(str, arguments)],
        env=environment, timeout=100, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def check(folder):
    """What is in the folder is a whole number of steps, all those acknowledged among them; returns how many."""
    return check_state(folder / "state", (folder / "acks").stat().st_size)


def check_state(folder, acknowledged):
    if (kept := folder / "memory.snapshot").exists():
        with SnapshotFile(kept) as file:
            assert not file.verify() and file.end == End(tables=[Counts(clients=1)])
    with Store(folder, "home", limits=Limits(log_bytes=600)) as store:
        step = int(store.settings().get("step", "0"))
        assert acknowledged <= step <= acknowledged + 1
        assert store.line_count(RUN) == 2 * step
        names = [facts.name for facts in store.runs()]
        assert names in ([], [RUN], [RUN, *(f"run {n}" for n in range(1, step + 1))])
        if step:
            accounts = {one.client: one.report for one in own_accounts(store)}
            for client in CLIENTS[1:]:
                newest = max([n for n in range(1, step + 1) if CLIENTS[n % 8] == client], default=None)
                assert newest is None or (accounts[client].episodes, accounts[client].steps) == (newest, newest**2)
            assert accounts[CLIENTS[0]].episodes == step
            assert lines_through(store) == {CLIENTS[0]: 2 * step}
            big, small = store.models(RUN)
            assert (big.version, big.value, small.value) == (step, bytes([step % 256]) * 20_000, f"{step}")
        found = store.search(RUN, most=10_000)
        assert [entry.line.number for entry in found] == list(range(2 * step - len(found) + 1, 2 * step + 1))
        assert text_of_log(folder).endswith(b"".join(map(text_of, found)))
    return step


@pytest.mark.parametrize("points", [POINTS[::3], POINTS[1::3], POINTS[2::3]], ids=["some", "others", "the rest"])
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
    sources = "".join(path.read_text() for path in (TESTS.parent / "memoire").rglob("*.py"))
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
    recorded = powerkit.record(in_memory, tmp_path, TESTS / "store_child.py", "steps", in_memory, 3)
    assert len(recorded) > 250
    found = [
        check_state(in_memory / "after" / "state", acknowledged)
        for _, acknowledged in powerkit.failures(recorded, in_memory, in_memory / "after", 40, seed=1)
    ]
    assert found == sorted(found) and found[-1] >= 5
