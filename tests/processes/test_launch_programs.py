"""Tests of `memoire launch`: programs that know nothing of a launcher, restarted, and never left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import memoire
from memoire.errors import MemoireTimeout
from memoire.nodes import local
from memoire.nodes.local import LaunchOptions
from netkit import is_alive, program, surroundings, until

LEARNER = """
    import json, os, pathlib, sys
    import memoire
    print("sees", json.dumps({name: text for name, text in os.environ.items() if name.startswith("MEMOIRE_")}), sys.argv[1:])
    schema = memoire.Schema({"obs": memoire.Column("float32", (2,), "state"), "reward": ("float32", ())})
    with memoire.Server(os.environ["MEMOIRE_LISTEN"], schema, name=os.environ["MEMOIRE_NAME"]) as server:
        print("listens at", server.endpoint)
        while not pathlib.Path("enough").exists():
            server.wait_closed(0.1)
        server.finish()
        server.wait_closed(2.0)
"""
ACTOR = """
    import os, sys
    import memoire
    with memoire.connect(os.environ["MEMOIRE_ENDPOINT"], seed=int(os.environ["MEMOIRE_SEED"]), timeout=60) as client:
        assert os.environ["MEMOIRE_NAME"] == "actor-" + os.environ["MEMOIRE_RANK"]
        print("plays as", os.environ["MEMOIRE_RANK"], "of", os.environ["MEMOIRE_COUNT"], os.environ["OMP_NUM_THREADS"], sys.argv[1:])
        while not client.finished:
            client.update(60)
    print("hears that the run is over")
"""
WAITS = """
    import os, subprocess, sys, threading
    inner = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    try:
        print("pids", os.getpid(), inner.pid, flush=True)
        threading.Event().wait()
    finally:
        print("leaves in order", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("learner", LEARNER), ("actor", ACTOR), ("waits", WAITS)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    (tmp_path / "ends.py").write_text("print('is done')")
    (tmp_path / "fails.py").write_text("raise ValueError('a mistake in it')")
    return tmp_path


def launched(folder: Path, *words: str) -> contextlib.AbstractContextManager["subprocess.Popen[str]"]:
    launch = "-m", "memoire", "launch", "--port", "0", "--logs", "logs"
    return program(*launch, *words, cwd=folder, env=surroundings())


def read_until(process: "subprocess.Popen[str]", pattern: str, count: int = 1) -> list["re.Match[str]"]:
    """Return the first `count` matches in a process's lines."""
    matches, output = [], ""
    while len(matches) < count:
        line = process.stdout.readline()
        assert line, f"it ended by itself: {output}"
        output += line
        matches += [match] if (match := re.search(pattern, line)) else []
    return matches


def pid_of(launcher: int, words: str) -> int:
    """Return the process of a launcher with these words in its command line."""
    listed = [file.read_text() for file in Path(f"/proc/{launcher}/task").glob("*/children")]
    (child,) = [pid for pid in " ".join(listed).split() if words in Path(f"/proc/{pid}/cmdline").read_text()]
    return int(child)


def test_a_learner_that_is_the_server_and_its_actors_end_together(folder: Path) -> None:
    with launched(folder, "learner.py --lr 0.1", "actor.py", "--actors", "2", "--seed", "3") as process:
        (sees,) = read_until(process, r"learner +\| sees (\{.*\}) (\[.*\])")
        environment, arguments = json.loads(sees[1]), sees[2]
        plays = read_until(process, r"actor-([01]) +\| plays as ([01]) of 2 1 \[\]", 2)
        assert sorted(match[1] for match in plays) == ["0", "1"] and all(match[1] == match[2] for match in plays)
        (folder / "enough").touch()
        rest, _ = process.communicate(timeout=100)
    assert process.returncode == 0, rest
    assert environment["MEMOIRE_LISTEN"] == environment["MEMOIRE_ENDPOINT"] != "tcp://127.0.0.1:5560"
    assert [environment[f"MEMOIRE_{name}"] for name in ("ROLE", "RANK", "SEED")] == ["learner", "0", "3000"]
    assert "MEMOIRE_TETHER" not in environment and "MEMOIRE_PATH" not in environment
    assert arguments == "['--lr', '0.1']"
    assert len(re.findall(r"actor-[01] +\| hears that the run is over", rest)) == 2
    assert "memoire: the learner has ended; actors end now" in rest
    assert "hears that the run is over" in (folder / "logs" / "actor-1.log").read_text()


def test_servers_run_beside_the_programs_and_an_actor_that_is_killed_comes_back(folder: Path) -> None:
    schema = '{"columns": [["obs", "<f4", [2], "state"], ["reward", "<f4", [], "reward"]]}'
    with launched(folder, "waits.py", "actor.py", "--schema", schema, "--no-dashboard", "--threads", "3") as process:
        read_until(process, r"actor-0 +\| plays as 0 of 1 3 \[\]")
        os.kill(pid_of(process.pid, "actor.py"), signal.SIGKILL)
        read_until(process, r"memoire: actor-0 was killed by signal 9; it restarts in 0.5 s")
        read_until(process, r"actor-0 +\| plays as 0 of 1")
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, rest


def test_what_a_program_has_started_ends_with_it(folder: Path) -> None:
    with launched(folder, "-", "waits.py", "--endpoint", "tcp://127.0.0.1:9") as process:
        first = [int(pid) for pid in read_until(process, r"\| pids (\d+) (\d+)")[0].groups()]
        os.kill(first[0], signal.SIGKILL)
        second = [int(pid) for pid in read_until(process, r"\| pids (\d+) (\d+)")[0].groups()]
        until(lambda: not any(map(is_alive, first)), 60.0)
        assert is_alive(second[1])
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)


def test_programs_that_are_done_are_not_started_again(folder: Path) -> None:
    with launched(folder, "-", "ends.py", "--actors", "2", "--endpoint", "tcp://127.0.0.1:9") as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and output.count("is done") == 2 and "started again" not in output


def test_a_program_that_cannot_start_is_shown_with_its_last_words(folder: Path) -> None:
    with launched(folder, "fails.py", "--endpoint", "tcp://127.0.0.1:9") as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "memoire: learner ended with status 1" in output and "ValueError: a mistake in it" in output


def test_a_learner_that_opens_no_server_is_told_how(
    folder: Path, times: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    times(listen_note=0.0)
    options = LaunchOptions(learner=(str(folder / "waits.py"),), actor=("x",), port=0, quiet=True, ready_timeout=0.4)
    with pytest.raises(MemoireTimeout) as caught:
        local.launch(options)
    words = r"no server at tcp://127\.0\.0\.1:\d+ from the learner within 0\.4 s\. Make the server"
    assert re.match(words, str(caught.value))
    lines = [line for line in capsys.readouterr().err.splitlines() if "actors wait" in line]
    assert len(lines) == 1 and re.fullmatch(
        r"memoire: actors wait until the learner listens at tcp://127\.0\.0\.1:\d+ \(\$MEMOIRE_LISTEN\)", lines[0]
    )


AS_PROCESS_1 = """
    import ctypes, os, sys, time
    from memoire.nodes.launcher import Launcher
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # orphans become children of this process, as of process 1
    os.getpid = lambda: 1
    with Launcher() as launcher:
        child = launcher.start_program("leaves", ["leaves.py"], {})
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            launcher.pump(0.05)
            left = [line for line in child.tail if line.startswith("orphan")]
            if left and not os.path.exists("/proc/" + left[0].split()[1]):
                sys.exit(0)
    sys.exit("the orphan is still there")
"""
LEAVES = """
    import os, subprocess, time
    print("orphan", subprocess.check_output(["sh", "-c", "(setsid sleep 0.2 >/dev/null 2>&1 & echo $!)"], text=True))
    time.sleep(60)
"""


def test_as_process_1_it_waits_for_what_others_have_left_behind(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(textwrap.dedent(LEAVES))
    program = textwrap.dedent(AS_PROCESS_1)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


KEEPS = """
    import os
    import memoire
    schema = memoire.Schema({"obs": memoire.Column("float32", (2,), "state"), "action": "int64", "reward": "float32"})
    with memoire.Server(os.environ["MEMOIRE_LISTEN"], schema, state=os.environ["MEMOIRE_STATE_DIR"]) as server:
        server.wait_closed()
"""
STEPS = """
    import os
    import numpy as np
    import memoire
    obs, made = np.zeros((101, 2), np.float32), 0
    obs[:, 0] = np.arange(101)
    try:
        with memoire.connect(os.environ["MEMOIRE_ENDPOINT"], timeout=60) as client:
            writer = client.writer()
            while True:
                for step in range(100):
                    writer.step(obs[step], step, 1.0, step == 99, False, obs[step + 1])
                    made += 1
                if made == 100:
                    client.update(60)
                    print("has told", made)
    finally:
        print("has made", made)
"""


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_a_step_that_the_end_interrupts_is_counted_or_not_and_nothing_is_said_of_it(
    signals: tuple[signal.Signals, ...], folder: Path
) -> None:
    (folder / "keeps.py").write_text(textwrap.dedent(KEEPS))
    (folder / "steps.py").write_text(textwrap.dedent(STEPS))
    with launched(folder, "keeps.py", "steps.py", "--state-dir", "state", "--no-dashboard") as process:
        read_until(process, r"\| has told 100")
        for number in signals:
            process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signals[0], output
    assert "Traceback" not in output and "cannot close" not in output and "Error" not in output, output
    schema = {"obs": memoire.Column("float32", (2,), "state"), "action": "int64", "reward": "float32"}
    with memoire.Server("tcp://127.0.0.1:*", schema, state=folder / "state") as server:
        steps = server.totals().steps
    assert steps >= 100
    if len(signals) == 1:  # the second signal kills
        (count,) = re.findall(r"has made (\d+)", output)
        assert steps in (int(count), int(count) + 1), output
