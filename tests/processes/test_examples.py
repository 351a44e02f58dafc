"""Programs that users begin with run as they are and keep their promises: examples, those of deploy, the README's, the demo."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from history.ports import block
from memoire.cli import main
from memoire.nodes.launcher import ONE_THREAD
from netkit import until

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


DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "examples"
ENOUGH = 90.0


@contextlib.contextmanager
def started(folder, *command, **environment):
    """A process that is killed at the end; what it says goes into a file."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    said = folder / f"{len(list(folder.glob('*.said')))}.said"
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", *map(str, command)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    except BaseException:
        print(said.read_text())
        raise
    finally:
        process.kill()
        process.wait()


def status(port):
    """What a node says of itself; without counts as long as it does not answer, or has nothing to show."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=100) as answer:
            return {"stats": {"steps": 0, "samples": 0}} | json.load(answer)
    except OSError:
        return {"stats": {"steps": 0, "samples": 0}}


@pytest.mark.parametrize("embeds", [True, False], ids=["the learner is the server", "the learner reads"])
def test_an_actor_and_a_learner_to_begin_with_learn_and_end_when_they_are_asked_to(embeds, tmp_path, capsys):
    first, actor_page, learner_page = block(3), block(1), block(1)
    endpoint = f"tcp://127.0.0.1:{first}"
    assert main.main(["schema", "CartPole-v1"]) == 0
    schema = capsys.readouterr().out
    with contextlib.ExitStack() as stack:

        def start(*command, **environment):
            return stack.enter_context(started(tmp_path, *command, **environment))

        said = {"MEMOIRE_STATE_DIR": str(tmp_path / "state"), "MEMOIRE_HTTP": f"127.0.0.1:{learner_page}"}
        if embeds:
            said |= {"MEMOIRE_LISTEN": endpoint, "MEMOIRE_NAME": "learner-0"}
        else:
            start("-m", "memoire", "server", "--endpoint", endpoint, "--schema", schema, "--set", "multi_step=3")
        learner = start(DEPLOYED / "learner" / "learner.py", MEMOIRE_ENDPOINT=endpoint, **said)
        actor = start(
            DEPLOYED / "actor" / "actor.py",
            MEMOIRE_ENDPOINT=endpoint,
            MEMOIRE_HTTP=f"127.0.0.1:{actor_page}",
            JOB_COMPLETION_INDEX="3",
        )
        until(lambda: status(actor_page)["stats"]["steps"] > 500, ENOUGH)
        until(lambda: status(learner_page)["stats"]["samples"] > 2000, ENOUGH)
        assert (status(actor_page)["role"], status(learner_page)["role"]) == (
            "actor",
            "server" if embeds else "learner",
        )
        until(lambda: (tmp_path / "network").exists(), ENOUGH)
        for process in (actor, learner):
            process.send_signal(signal.SIGTERM)
            assert process.wait(ENOUGH) == 0, "it did not end in order"
    assert "with model version" in "".join(path.read_text() for path in tmp_path.glob("*.said"))


ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def script(word: str) -> str:
    """The one example with this in it."""
    (found,) = [block for block in BLOCKS if word in block]
    return str(found)


def started_from(folder: Path, name: str, code: str) -> subprocess.Popen[str]:
    path = folder / name
    path.write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_example_of_one_process_runs(tmp_path: Path) -> None:
    child = started_from(tmp_path, "single.py", script("memoire.Buffer(") + "\nassert batch.obs.shape == (256, 4)\n")
    output, _ = child.communicate(timeout=100)
    assert child.returncode == 0, output


def test_the_examples_of_a_cluster_run_together(tmp_path: Path) -> None:
    port = str(block(3))
    learner = started_from(tmp_path, "learner.py", script("# learner.py").replace("5560", port))
    actors = [started_from(tmp_path, f"actor{n}.py", script("# actor.py").replace("5560", port)) for n in range(2)]
    try:
        for child in (learner, *actors):
            output, _ = child.communicate(timeout=100)
            assert child.returncode == 0, output
            assert child is not learner or re.search(r"[1-9]\d* episodes, [1-9]\d* steps", output), output
    finally:
        for child in (learner, *actors):
            child.kill()
            child.communicate()


@pytest.mark.parametrize("target", re.findall(r"(?:\]\(|`)((?:docs|examples|tests|[A-Z]+\.md)[^)`#: ]*)[)`]", README))
def test_what_is_linked_to_is_there(target: str) -> None:
    assert (ROOT / target).exists()


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
    for seconds in ("3", "25"):  # more on a machine so busy that three of them are over before the first episode
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
