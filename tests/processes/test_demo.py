"""The demo learns, its counts add up, and it leaves nothing behind."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memoire.nodes.launcher import ONE_THREAD

# ------------------------------------------------------------------------------------------------- without a network


@pytest.mark.slow
def test_the_demo_s_learner_solves_cartpole_from_a_plain_buffer_too() -> None:
    """The same goal, the same learner and player, without any network between them."""
    script = Path(__file__).parents[1] / "support" / "learn_alone.py"
    one_thread = {**os.environ, **dict.fromkeys(ONE_THREAD, "1")}
    done = subprocess.run(
        [sys.executable, script, "0"], env=one_thread, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.split()[1]) > 195.0


# --------------------------------------------------------------------------------------------- the demo, as it runs


@contextlib.contextmanager
def running(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`memoire demo` as a process; killed at the end, and its children with it."""
    command = [sys.executable, "-u", "-m", "memoire", "demo", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(*arguments: str, timeout: float) -> tuple[int, str]:
    """Exit status and output of a demo that ends by itself."""
    with running(*arguments) as process:
        said, _ = process.communicate(timeout=timeout)
    return process.returncode, said


SUMMARY = re.compile(r"solved CartPole-v1 in ([0-9.]+) s: the last 20 episodes returned ([0-9.]+) on average")


@pytest.mark.slow
def test_the_demo_learns_to_balance_the_pole() -> None:
    status, said = finish("--seed", "0", "--seconds", "100", timeout=115)
    assert status == 0, said
    found = SUMMARY.search(said)
    assert found is not None, said
    assert float(found[2]) > 195.0
    assert "what the actors counted is what the servers counted, and sums to the cluster's totals" in said
    totals = [line.split() for line in said.splitlines() if re.match(r"  ([0-9a-f]{32}|cluster) ", line)]
    columns = np.array([[int(number.replace(",", "")) for number in row[1:]] for row in totals])
    assert len(columns) == 3, "two actors, and the sum"
    np.testing.assert_array_equal(columns[:-1].sum(axis=0), columns[-1])
    assert (columns > 0).all()


@pytest.mark.slow
def test_several_servers_and_proxies_make_one_cluster() -> None:
    arguments = ("--servers", "2", "--proxies", "2", "--actors", "3", "--num-envs", "2", "--goal", "30", "--seed", "3")
    status, said = finish(*arguments, "--seconds", "100", timeout=115)
    assert status == 0, said
    assert "solved CartPole-v1" in said
    assert "what the actors counted is what the servers counted, and sums to the cluster's totals" in said


@pytest.mark.slow
def test_a_goal_that_is_not_reached_in_time_is_admitted() -> None:
    for seconds in ("6", "25"):  # more on a machine so busy that six of them are over before the first episode
        status, said = finish("--seconds", seconds, "--goal", "1000", "--actors", "1", timeout=100)
        assert status == 1, said
        if re.search(r"episodes [1-9]", said):
            break
    assert "not solved: after" in said
    assert "the goal is 1000" in said
    assert "what the actors counted is what the servers counted" in said


def children(parent: int) -> dict[int, str]:
    """Process ids and command lines of a process' children."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found
