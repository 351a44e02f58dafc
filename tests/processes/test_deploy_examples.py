"""The programs that users begin theirs with, deploy/examples/actor and learner: they run under the variables that the
chart gives them, in both ways that it knows.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from history.ports import block
from memoire.cli import main
from netkit import until

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
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
        learner = start(EXAMPLES / "learner" / "learner.py", MEMOIRE_ENDPOINT=endpoint, **said)
        actor = start(
            EXAMPLES / "actor" / "actor.py",
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
