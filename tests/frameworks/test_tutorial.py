"""Tests of TMRL's tutorial: its unchanged script in three processes, scripts of TMRL 0.7, and torch modules."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from history.ports import held
from memoire.errors import ParameterError
from memoire.rl.actors import TorchActor
from memoire.tmrl.actor import ActorModule
from netkit import until

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).with_name("tutorial.py")
PAGE = SCRIPT.parents[2] / "docs" / "tmrl.md"


def start(role: str, folder: Path, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, "MEMOIRE_TMRL": str(folder), "TUTORIAL_STEP": "0.005", "TUTORIAL_EPOCHS": "2",
        "TUTORIAL_ROUNDS": "2", "TUTORIAL_STEPS": "150", "TUTORIAL_START": "200", "OMP_NUM_THREADS": "1",
        "MEMOIRE_TMRL_PORT_TRAINER": str(port), "MEMOIRE_TMRL_PORT_ROLLOUT": str(port + 1),
    }  # fmt: skip
    command = [sys.executable, "-m", "memoire.tmrl", "run", str(SCRIPT), role]
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def test_the_script_of_the_tutorial_runs_unchanged_in_three_processes(tmp_path: Path) -> None:
    with held(3) as port, contextlib.ExitStack() as stack:
        processes = {}
        for role in ("server", "worker", "trainer"):
            processes[role] = start(role, tmp_path, port)
            stack.callback(processes[role].wait, 20.0)
            stack.callback(processes[role].kill)
        logs = lambda: "\n".join(path.read_text() for path in tmp_path.glob("*.log"))  # noqa: E731
        assert until(lambda: processes["trainer"].poll() is not None, 100.0)
        assert processes["trainer"].returncode == 0, logs()
        assert processes["worker"].poll() is None
        processes["worker"].send_signal(signal.SIGINT)
        assert until(lambda: processes["worker"].poll() is not None, 20.0)
        assert processes["worker"].returncode == 130, logs()
    assert {"tutorial.pth", "tutorial_t.pth"} <= {path.name for path in (tmp_path / "weights").iterdir()}
    lines = (tmp_path / "checkpoints" / "tutorial_t.cpt_metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and {"loss_actor", "loss_critic", "memory_len"} <= json.loads(lines[-1]).keys()
    assert "test episode" in (tmp_path / "worker.log").read_text()


@pytest.mark.parametrize("which", ["ready", "own"])
def test_a_script_of_tmrl_0_7_runs_by_the_substitution_of_the_page_and_unchanged(which: str, tmp_path: Path) -> None:
    script, command = SCRIPT.with_name("tutorial_07.py"), [sys.executable, "-m", "memoire.tmrl", "run"]
    if which == "own":  # the other tutorial runs unchanged
        line = next(each for each in PAGE.read_text().splitlines() if each.startswith("sed "))
        script, command = Path(shutil.copy(script, tmp_path / "my_script.py")), [sys.executable]
        subprocess.run(line, shell=True, cwd=tmp_path, check=True, timeout=20.0)
        assert " tmrl" not in "".join(each for each in script.read_text().splitlines() if "import" in each)
    with held(3) as port:
        environment = {"MEMOIRE_TMRL": str(tmp_path), "MEMOIRE_TMRL_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command += [str(script), which]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=100.0)
    assert done.returncode == 0 and "transitions compared: " in done.stdout, done.stdout + done.stderr
    assert int(done.stdout.rpartition(": ")[2]) > 100
    assert {f"{which}.tmod", f"{which}_t.tmod"} <= {path.name for path in (tmp_path / "weights").iterdir()}
    lines = (tmp_path / "checkpoints" / f"{which}_t.tcpt_metrics.jsonl").read_text().splitlines()
    figures = json.loads(lines[-1])
    assert len(lines) == 2 and {"memory_len", "loss_critic" if which == "ready" else "loss"} <= figures.keys()
    if which == "own":
        assert figures["truncated"] > 0 < figures["terminated"]


class Module(ActorModule):
    def __init__(self, observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        super().__init__(observation_space, action_space)
        self.linear = torch.nn.Linear(3, 2)
        self.seen: list[object] = []

    def act(self, obs: object, test: bool = False) -> object:
        self.seen.append((obs, test))
        with torch.no_grad():
            return self.linear(torch.cat(obs, -1)).squeeze().numpy()


def test_an_actor_module_gets_tensors_with_a_leading_axis_of_one() -> None:
    actor = TorchActor(Module(None, None))
    action = actor.act((np.zeros(1), np.zeros(2, np.float32)), test=True)
    obs, test = actor.module.seen[0]
    assert [each.shape for each in obs] == [(1, 1), (1, 2)] and all(each.dtype == torch.float32 for each in obs)
    assert test is True and action.shape == (2,)


def test_published_weights_are_taken_over_as_a_whole() -> None:
    import memoire.torch

    actor, other = TorchActor(Module(None, None)), Module(None, None)
    actor.adopt(actor.prepare(memoire.torch.body_of(other), 7))
    assert torch.equal(actor.module.linear.weight, other.linear.weight)


def test_a_device_that_is_not_here_is_refused_at_once() -> None:
    with pytest.raises(ParameterError, match="device"):
        TorchActor(Module(None, None), "cuda:7" if not torch.cuda.is_available() else "xyz")
