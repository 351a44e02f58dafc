"""Tests that programs for beginners run unchanged and keep their promises: examples, deploy, README and demo."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from history.ports import block
from memoire.cli import main
from netkit import program, surroundings, until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Texts that the output of an example must contain, one line for each example.
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
# Examples that take minutes or need packages that tests lack, with the command that runs each example.
APART = {
    "double_pendulum.py": "make demo-sac, with MuJoCo",
    "drone.py": "python examples/drone.py, ten minutes under a real clock",
    "door_key.py": "make soak SOAK=door_key, with MiniGrid",
}
# Number of adjacent ports of each example with an address as argument; the argument has the first port.
PORTS = {"client_mt.py": 3, "durable.py": 3}
# Programs that run together, with further arguments and the promised output. The first argument is the first port.
TOGETHER = {
    "actor and learner": [("learner.py", [], "learned ["), ("actor.py", [], "the run is over after")],
    "classic actor and learner": [
        ("classic_learner.py", [], "right of everywhere"),
        *(("classic_actor.py", [number], "episodes played") for number in "12"),
    ],
}
# Programs that learn, with arguments that shorten the runs. docs/development/records/curves.md has full runs.
LEARN = {
    "dqn.py": ["--steps", "1500"],
    "sac.py": ["--steps", "1400"],
    "apex_dqn.py": ["--actors", "2", "--seconds", "3"],
    "r2d2.py": ["--steps", "3000"],
    "ppo.py": ["--goal", "20"],
}


SLOW = re.compile(r"client \w+: server .* (has acknowledged nothing for|is back; steps) .*\n")
"""Message of a client on a machine so busy that its server does not answer for ten seconds."""


def start(program: Path, folder: Path, arguments: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", str(program), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=surroundings(), stdout=pipe, stderr=pipe, text=True)


def keep(*promised: tuple[str, subprocess.Popen[str]]) -> list[str]:
    """Check that programs that run together keep their promises and log nothing else; return the output of each."""
    outputs = []
    try:
        for promise, process in promised:
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
            assert promise in out
            assert not SLOW.sub("", err)
            outputs.append(out)
    finally:
        for _, process in promised:
            process.kill()
            process.communicate()
    return outputs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.torch] if name in NEED_TORCH else []) for name in PROMISES]
)
def test_an_example_runs_and_keeps_its_promise(name: str, tmp_path: Path) -> None:
    arguments = [str(block(PORTS[name]))] if name in PORTS else []
    keep((PROMISES[name], start(EXAMPLES / name, tmp_path, arguments)))
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


@pytest.mark.torch
@pytest.mark.parametrize("name", LEARN)
def test_a_program_that_learns_begins_to(name: str, tmp_path: Path) -> None:
    learner = start(EXAMPLES / "learning" / name, tmp_path, [*LEARN[name], "--curve", "curve.csv"])
    keep(("mean return of the last", learner))
    rows = [line.split(",") for line in (tmp_path / "curve.csv").read_text().splitlines()]
    steps, returns = [int(step) for step, _ in rows], [float(returned) for _, returned in rows]
    assert steps == sorted(steps) and len(rows) >= 1 and np.isfinite(returns).all()


@pytest.mark.parametrize("programs", TOGETHER)
def test_programs_that_belong_together_keep_their_promises(programs: str, tmp_path: Path) -> None:
    port = str(block(3))
    keep(*[(promise, start(EXAMPLES / name, tmp_path, [port, *more])) for name, more, promise in TOGETHER[programs]])
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_every_example_is_run_and_short() -> None:
    together = {name for parts in TOGETHER.values() for name, _, _ in parts}
    for folder, run, most in ((EXAMPLES, together | set(PROMISES), 60), (EXAMPLES / "learning", set(LEARN), 150)):
        programs = {path.name: path for path in folder.glob("*.py")}
        assert programs.keys() - APART.keys() == run
        for name, path in programs.items():
            lines = path.read_text(encoding="utf-8").splitlines()
            assert len(lines) <= (150 if name in APART else most), f"{name} has {len(lines)} lines"
            assert lines[0].startswith('"""'), f"{name} does not say what it shows"
    assert all(any(EXAMPLES.rglob(name)) for name in APART)


DEPLOYED = ROOT / "deploy" / "examples"
ENOUGH = 90.0


@contextlib.contextmanager
def started(folder, *command, **environment):
    """Start a process with its output in a file; kill the process at the end."""
    log = folder / f"{len(list(folder.glob('*.said')))}.said"
    with (
        log.open("w") as file,
        program(*command, cwd=folder, env=surroundings(**environment), stdout=file) as process,
    ):
        try:
            yield process
        except BaseException:
            print(log.read_text())
            raise


def status(port):
    """Return the status page of a node, or counts of 0 until the node answers."""
    facts = {"stats": {"steps": 0, "samples": 0}}
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=100) as answer:
        facts |= json.load(answer)
    return facts


@pytest.mark.parametrize("embeds", [True, False], ids=["the learner is the server", "the learner reads"])
def test_an_actor_and_a_learner_to_begin_with_learn_and_end_when_they_are_asked_to(embeds, tmp_path, capsys):
    first, actor_page, learner_page = block(3), block(1), block(1)
    endpoint = f"tcp://127.0.0.1:{first}"
    assert main.main(["schema", "CartPole-v1"]) == 0
    schema = capsys.readouterr().out
    with contextlib.ExitStack() as stack:

        def start(*command, **environment):
            return stack.enter_context(started(tmp_path, *command, **environment))

        variables = {"MEMOIRE_STATE_DIR": str(tmp_path / "state"), "MEMOIRE_HTTP": f"127.0.0.1:{learner_page}"}
        if embeds:
            variables |= {"MEMOIRE_LISTEN": endpoint, "MEMOIRE_NAME": "learner-0"}
        else:
            start("-m", "memoire", "server", "--endpoint", endpoint, "--schema", schema, "--set", "multi_step=3")
        learner = start(DEPLOYED / "learner" / "learner.py", MEMOIRE_ENDPOINT=endpoint, **variables)
        plays = {"MEMOIRE_ENDPOINT": endpoint, "MEMOIRE_HTTP": f"127.0.0.1:{actor_page}", "JOB_COMPLETION_INDEX": "3"}
        actor = start(DEPLOYED / "actor" / "actor.py", **plays)
        until(lambda: status(actor_page)["stats"]["steps"] > 500, ENOUGH)
        until(lambda: status(learner_page)["stats"]["samples"] > 2000, ENOUGH)
        roles = [status(page)["role"] for page in (actor_page, learner_page)]
        assert roles == ["actor", "server" if embeds else "learner"]
        until(lambda: (tmp_path / "network").exists(), ENOUGH)
        for process in (actor, learner):
            process.send_signal(signal.SIGTERM)
            assert process.wait(ENOUGH) == 0, "it did not end in order"
    assert "with model version" in "".join(path.read_text() for path in tmp_path.glob("*.said"))


README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def script(word: str) -> str:
    """Return the one example that contains `word`."""
    (example,) = [block for block in BLOCKS if word in block]
    return str(example)


def test_the_example_of_one_process_runs(tmp_path: Path) -> None:
    path = tmp_path / "single.py"
    path.write_text(script("memoire.Buffer("), encoding="utf-8")
    (output,) = keep(("", start(path, tmp_path)))
    assert output == "value of the start: 0.95 learned, 0.95 exact\n"


def test_the_examples_of_a_cluster_run_together(tmp_path: Path) -> None:
    port, programs = str(block(3)), [tmp_path / name for name in ("learner.py", "actor.py")]
    for path in programs:
        path.write_text(script(f"# {path.name}").replace("5560", port), encoding="utf-8")
    learner, *_ = keep(*[("", start(path, tmp_path)) for path in (*programs, programs[1])])
    assert re.search(r"[1-9]\d* episodes, [1-9]\d* steps", learner), learner


@pytest.mark.parametrize("target", re.findall(r"(?:\]\(|`)((?:docs|examples|tests|[A-Z]+\.md)[^)`#: ]*)[)`]", README))
def test_what_is_linked_to_is_there(target: str) -> None:
    assert (ROOT / target).exists()


def demo(*arguments: str, timeout: float) -> tuple[int, str]:
    """Return exit status and output of a `memoire demo` that ends by itself."""
    command = [sys.executable, "-u", "-m", "memoire", "demo", *arguments]
    pipe = subprocess.PIPE
    done = subprocess.run(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)
    return done.returncode, done.stdout


SUMMARY = re.compile(r"solved CartPole-v1 in ([0-9.]+) s: the last 20 episodes returned ([0-9.]+) on average")


@pytest.mark.slow
def test_the_demo_learns_to_balance_the_pole() -> None:
    status, output = demo("--seed", "0", "--seconds", "100", timeout=115)
    assert status == 0, output
    summary = SUMMARY.search(output)
    assert summary is not None, output
    assert float(summary[2]) > 195.0
    assert "dashboard ended" not in output
    assert "the counts of the actors equal those of the servers, and sum to the cluster's totals" in output
    totals = [line.split() for line in output.splitlines() if re.match(r"  ([0-9a-f]{32}|cluster) ", line)]
    columns = np.array([[int(number.replace(",", "")) for number in row[1:]] for row in totals])
    assert len(columns) == 3, "two actors, and the sum"
    np.testing.assert_array_equal(columns[:-1].sum(axis=0), columns[-1])
    assert (columns > 0).all()


@pytest.mark.slow
def test_several_servers_and_proxies_make_one_cluster() -> None:
    arguments = ("--servers", "2", "--proxies", "2", "--actors", "3", "--num-envs", "2", "--goal", "30", "--seed", "3")
    status, output = demo(*arguments, "--seconds", "100", timeout=115)
    assert status == 0, output
    assert "solved CartPole-v1" in output
    assert "the counts of the actors equal those of the servers, and sum to the cluster's totals" in output


@pytest.mark.slow
def test_a_goal_that_is_not_reached_in_time_is_admitted() -> None:
    for seconds in ("3", "25"):  # 25 s if a busy machine takes 3 s before the first episode
        status, output = demo("--seconds", seconds, "--goal", "1000", "--actors", "1", timeout=100)
        assert status == 1, output
        if re.search(r"episodes [1-9]", output):
            break
    assert "not solved: after" in output
    assert "the goal is 1000" in output
    assert "the counts of the actors equal those of the servers" in output
