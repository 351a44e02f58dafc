"""Tests of `python -m memoire.rl`: a pipeline as processes, some of which are killed."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import memoire
from memoire import rl
from memoire.rl.__main__ import _parser as command_parser
from memoire.rl.pipeline import PlannedKill, Run, read_file
from netkit import program, until

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "rl" / "rl_pipeline.py"
COLLECTION = FILE.with_name("rl_collection.py")
RL = "-m", "memoire.rl"


def python(*arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *RL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_a_run_reaches_its_goal_although_each_role_is_killed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_TEST_RUNS", str(tmp_path))
    accidents = (PlannedKill("worker-0", 60), PlannedKill("trainer", 130), PlannedKill("server-0", 200))
    lines: list[str] = []
    run = Run(str(FILE), seconds=90.0, accidents=accidents, dashboard=False, say=lines.append)
    assert run.run() == 0, "\n".join(lines)
    text = "\n".join(lines)
    assert text.count("on purpose") == 3 and "goal reached" in text
    tried = python("try", str(FILE), "--episodes", "2")
    assert tried.returncode == 0 and "mean return 20.00 over 2 episodes" in tried.stdout, tried.stderr
    lines.clear()
    assert Run(str(FILE), seconds=60.0, dashboard=False, say=lines.append).run() == 1, "the run is finished"
    assert "goal not reached" in lines[-1] and "start it again with --fresh" in lines[-1]


@pytest.mark.parametrize(
    ("verb", "file", "missing"),
    [
        ("up", COLLECTION, "rl.Pipeline"),
        ("work", os.devnull, "pipeline"),
        ("collect", FILE.with_name("rl_collection.none"), "rl.Collection"),
        ("observe", os.devnull, "run_episode"),
    ],
)
def test_a_file_without_what_is_run_is_refused(verb: str, file: object, missing: str) -> None:
    done = python(verb, *([] if verb == "up" else ["tcp://127.0.0.1:9"]), str(file))
    assert done.returncode == 2 and missing in done.stderr


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command that ends by SIGTERM with status 0."""
    with program(*RL, *arguments, stderr=subprocess.PIPE) as process:
        yield process
        process.terminate()
        _, errors = process.communicate(timeout=30.0)
        assert process.returncode == 0, errors


def test_a_collector_fills_a_learners_table_by_a_node_that_follows_its_models() -> None:
    collection = read_file(COLLECTION, "collection")
    table = memoire.Table(collection.schema(), storage="rollouts", capacity=256, rollout_length=32, max_model_lag=0)
    layer = {"policy.0.weight": np.zeros((2, 4), np.float32), "policy.0.bias": np.zeros(2, np.float32)}
    body = rl.weights.pack(layer)
    with memoire.Server("tcp://127.0.0.1:0", tables={"rollouts": table}) as server:
        with running("infer", server.endpoint, str(COLLECTION), "--endpoint", "tcp://127.0.0.1:0") as node:
            place = node.stdout.readline().split()[-1]
            version = server.publish("policy", body)
            with program(*RL, "collect", server.endpoint, COLLECTION, "--inference", place) as collector:
                for step in range(3):
                    rollouts = server.table("rollouts").take(256, timeout=60.0, release="publish")
                    assert set(rollouts.model_version.tolist()) == {version}
                    if step < 2:  # the last step leaves no room for further steps
                        version = server.publish("policy", body)
                server.finish()
                output, _ = collector.communicate(timeout=60.0)
                assert collector.returncode == 0 and "recorded 768 steps" in output, output


def test_an_observer_runs_the_episodes_of_its_file_and_goes_on_at_another_agent() -> None:
    columns = {"obs": (np.float32, (1,)), "action": np.int64, "reward": np.float32}
    act = lambda rows: {"action": np.zeros(len(rows["obs"]), np.int64)}  # noqa: E731
    facts = {"obs": (np.float32, (1,))}, {"action": np.int64}, act
    agents = [rl.Agent("tcp://127.0.0.1:0", *facts, columns) for _ in range(2)]
    try:
        with running("observe", *(each.endpoint for each in agents), str(COLLECTION)):
            assert until(lambda: any(each.stats().jobs.observers for each in agents), 60.0)
            for first in sorted(agents, key=lambda each: -each.stats().jobs.observers):
                episodes = first.collect(3, steps=4, timeout=60.0)
                assert [len(each) for each in episodes] == [4, 4, 4]
                first.close()
    finally:
        for each in agents:
            each.close()


@pytest.mark.parametrize("verb", ["observe", "train", "work"])
def test_commands_take_as_many_addresses_as_the_classes_that_they_run(verb: str) -> None:
    parse = command_parser().parse_args
    for urls in (["tcp://a:1"], ["tcp://a:1", "tcp://b:1"]):
        for options in ([], ["--keys", "keys/actor"]):
            assert parse([verb, *urls, "run.py", *options]).urls == urls
            assert parse([verb, *options, *urls, "run.py"]).file == "run.py"


def test_a_trainer_begins_anew_if_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_TEST_RUNS", str(tmp_path))
    former = tmp_path / "test" / "checkpoint"
    former.mkdir(parents=True)
    (former / "old").touch()
    refused = python("train", "tcp://127.0.0.1:9", str(FILE), "--fresh")
    assert refused.returncode == 2 and "--yes" in refused.stderr and former.exists()
    with program(*RL, "train", "tcp://127.0.0.1:9", FILE, "--fresh", "--yes"):  # the process waits for a server
        assert until((tmp_path / "test" / "checkpoint.former-1" / "old").exists, 60.0)
        assert not (former / "old").exists()  # the trainer has moved the old folder by now
