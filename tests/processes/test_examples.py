"""The examples run as they are, end by themselves, and print what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from history.ports import block

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# One line for each example: what its output must have in it.
PROMISES = {
    "single_process.py": "return of the greedy policy: 1.0",
    "vector_env.py": "upright ",
    "dict_observation.py": "(64, 4, 16, 16) float32",
    "set_states.py": " now: learned",
    "classic_single_process.py": "the way right is known",
    "client_mt.py": "100 episodes, 4000 steps",
    "publish_subscribe.py": "late: version 2",
    "logs.py": "6 lines",
    "durable.py": "after: 10 episodes, 100 steps, 1 lines",
    "sb3_dqn.py": "mean return of the last 10 episodes",
    "sb3_cluster.py": "800 steps of DQN and ",
    "recurrent_torch.py": ", the way is remembered",
    "ppo.py": "the last 50 episodes returned ",
    "demonstrations.py": "steps to the reward; 145 steps were shown",
    "multi_agent.py": "100% of the numbers are understood",
    "proxy_and_relay.py": "from 6 actors, 600 steps counted",
}
NEED_TORCH = ("sb3_dqn.py", "sb3_cluster.py", "recurrent_torch.py", "ppo.py")
# Those that take minutes, or packages that tests do not have; each has who runs it.
APART = {
    "double_pendulum.py": "make demo-sac, with MuJoCo",
    "drone.py": "python examples/drone.py, ten minutes under a real clock",
    "door_key.py": "make soak SOAK=door_key, with MiniGrid",
}
# Those that take an address of their own: how many ports in a row, of which the first is their argument.
PORTS = {"client_mt.py": 3, "durable.py": 3}
# Programs that belong together: how many ports, then each with its further arguments and promise.
TOGETHER = {
    "actor and learner": (
        3,
        [("learner.py", [], "learned ["), ("actor.py", [], "the run is over after")],
    ),
    "classic actor and learner": (
        3,
        [
            ("classic_learner.py", [], "right of everywhere"),
            ("classic_actor.py", ["1"], "episodes played"),
            ("classic_actor.py", ["2"], "episodes played"),
        ],
    ),
}


# Programs that learn, each in one file: how to make them short. docs/benchmarks/curves.md has them whole.
LEARN = {
    "dqn.py": ["--steps", "1500"],
    "sac.py": ["--steps", "1400"],
    "apex_dqn.py": ["--actors", "2", "--seconds", "3"],
    "r2d2.py": ["--steps", "3000"],
    "ppo.py": ["--goal", "20"],
}


def start(name: str, arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SLOW = re.compile(r"client \w+: server .* (has acknowledged nothing for|is back; what was) .*\n")
"""What a client says on a machine so busy that its server does not answer for ten seconds."""


def keeps(promise: str, process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert promise in out
    assert not SLOW.sub("", err)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.torch] if name in NEED_TORCH else []) for name in PROMISES]
)
def test_an_example_runs_and_keeps_its_promise(name: str, tmp_path: Path) -> None:
    arguments = [str(block(PORTS[name]))] if name in PORTS else []
    with start(name, arguments, tmp_path) as process:
        try:
            keeps(PROMISES[name], process)
        finally:
            process.kill()
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


@pytest.mark.torch
@pytest.mark.parametrize("name", LEARN)
def test_a_program_that_learns_begins_to(name: str, tmp_path: Path) -> None:
    with start(f"learning/{name}", [*LEARN[name], "--curve", "curve.csv"], tmp_path) as process:
        try:
            keeps("mean return of the last", process)
        finally:
            process.kill()
    rows = [line.split(",") for line in (tmp_path / "curve.csv").read_text().splitlines()]
    steps, returns = [int(step) for step, _ in rows], [float(returned) for _, returned in rows]
    assert steps == sorted(steps) and len(rows) >= 1 and np.isfinite(returns).all()


@pytest.mark.parametrize("programs", TOGETHER)
def test_programs_that_belong_together_keep_their_promises(programs: str, tmp_path: Path) -> None:
    ports, parts = TOGETHER[programs]
    port = str(block(ports))
    running = [(promise, start(name, [port, *arguments], tmp_path)) for name, arguments, promise in parts]
    try:
        for promise, process in running:
            keeps(promise, process)
    finally:
        for _, process in running:
            process.kill()
            process.communicate()
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_every_example_is_run_and_short() -> None:
    run = {name for _, parts in TOGETHER.values() for name, _, _ in parts} | set(PROMISES)
    there = {path.name for path in (*EXAMPLES.glob("*.py"), *(EXAMPLES / "learning").glob("*.py"))}
    assert {path.name for path in EXAMPLES.glob("*.py")} - set(APART) == run
    assert set(APART) <= there
    for path in EXAMPLES.glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= (150 if path.name in APART else 60), f"{path.name} has {len(lines)} lines"
        assert lines[0].startswith('"""'), f"{path.name} does not say what it shows"


def test_every_program_that_learns_is_run_and_stands_alone() -> None:
    programs = sorted((EXAMPLES / "learning").glob("*.py"))
    assert {path.name for path in programs} - set(APART) == set(LEARN)
    for path in programs:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 150, f"{path.name} has {len(lines)} lines"
        assert lines[0].startswith('"""'), f"{path.name} does not say what it shows"
