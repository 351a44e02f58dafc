"""Launched processes: ready when they say so, heard when they die, and never left behind."""

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memoire.cluster.launch import Child, Launcher
from memoire.errors import ChildDied, MemoireTimeout

pytestmark = pytest.mark.processes

TESTS = Path(__file__).resolve().parent
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TESTS)]))}


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with Launcher() as made:
        yield made


def start(launcher: Launcher, *actions: str, name: str = "child-0") -> Child:
    return launcher.start(name, "launched_child", *actions, environment=PATH)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has buried yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_end(pids: list[int], seconds: float) -> list[int]:
    """The processes among `pids` that still run after that time."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            watch = os.pidfd_open(pid)
            try:
                select.select([watch], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(watch)
    return [pid for pid in pids if is_alive(pid)]


def test_a_child_is_ready_when_it_says_so_and_says_where(launcher: Launcher) -> None:
    child = start(launcher, "ready", "wait")
    assert child.facts is None
    assert launcher.await_ready([child])
    assert child.facts == {"pid": child.process.pid, "threads": "1"}
    assert child.status is None


def test_the_newest_report_counts(launcher: Launcher) -> None:
    child = start(launcher, "ready", "count")
    assert launcher.wait_for([child], 20.0)
    assert child.reports == {"number": 999}
    assert child.status == 0


def test_a_child_finishes_on_order(launcher: Launcher) -> None:
    child = start(launcher, "ready", "wait")
    launcher.await_ready([child])
    child.order("finish")
    assert launcher.wait_for([child], 20.0)
    assert list(child.tail) == ["finishing"]


def test_the_last_words_of_a_child_that_dies_are_in_the_error(launcher: Launcher) -> None:
    child = start(launcher, "die-early", name="server-3")
    with pytest.raises(ChildDied) as caught:
        launcher.await_ready([child])
    text = str(caught.value)
    assert "server-3 ended with status 3" in text
    assert "I cannot find my feet\n    so I leave" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_a_child_that_dies_later_is_noticed_while_others_run(launcher: Launcher) -> None:
    healthy = start(launcher, "ready", "wait", name="proxy-0")
    doomed = start(launcher, "ready", "abort", name="server-0")
    with pytest.raises(ChildDied, match="server-0 was killed by signal 6") as caught:
        launcher.await_ready([healthy, doomed])
        while launcher.pump(20.0):
            pass
    assert "something is very wrong" in caught.value.last_words
    assert healthy.status is None


def test_a_child_that_never_gets_ready_is_named(launcher: Launcher) -> None:
    child = start(launcher, "wait", name="server-1")
    with pytest.raises(MemoireTimeout, match="no readiness from server-1 within 0.1 s"):
        launcher.await_ready([child], timeout=0.1)


def test_output_is_passed_on_line_by_line_and_never_blocks_the_child() -> None:
    heard: list[tuple[str, str]] = []
    with Launcher(on_output=lambda name, line: heard.append((name, line))) as launcher:
        child = start(launcher, "chatter")
        assert launcher.wait_for([child], 30.0)
    assert len(heard) == 20_000
    assert set(heard) == {("child-0", "x" * 60)}


def test_children_end_with_the_launcher_the_newest_kind_first() -> None:
    with Launcher() as launcher:
        kinds = ["server-0", "server-1", "proxy-0", "actor-0"]
        children = [start(launcher, "ready", "wait", name=name) for name in kinds]
        launcher.await_ready(children)
        ended: list[list[str]] = []
        stop = launcher.stop
        launcher.stop = lambda group, grace=5.0: (ended.append([child.name for child in group]), stop(group, grace))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    assert ended == [["actor-0"], ["proxy-0"], ["server-0", "server-1"]]
    assert [child.status for child in children] == [0, 0, 0, 0]
    assert all(list(child.tail) == ["stopping"] for child in children)


def test_a_child_that_ignores_the_request_to_end_is_killed() -> None:
    launcher = Launcher()
    child = start(launcher, "ready", "hang")
    launcher.await_ready([child])
    launcher.close(grace=0.2)
    assert child.status in (-signal.SIGKILL, 0)
    assert not is_alive(child.process.pid)
    launcher.close()  # again is fine


def test_signals_go_back_to_whoever_had_them() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Launcher():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_pump_at_once(number: signal.Signals, launcher: Launcher) -> None:
    child = start(launcher, "ready", "wait")
    launcher.await_ready([child])
    os.kill(os.getpid(), number)
    while launcher.pump(300.0):
        pass
    assert launcher.stop_signal == number
    assert not launcher.await_ready([start(launcher, "wait")])


PARENT = textwrap.dedent("""
    import json, sys
    from memoire.cluster.launch import Launcher
    with Launcher() as launcher:
        children = [launcher.start(f"child-{n}", "launched_child", "ready", action) for n, action in enumerate(sys.argv[1:])]
        launcher.await_ready(children)
        print(json.dumps([child.process.pid for child in children]), flush=True)
        while launcher.pump(30.0):
            pass
""")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_no_process_is_left_behind_however_the_launcher_ends(number: signal.Signals) -> None:
    actions = ["wait", "wait", "hang"] if number == signal.SIGKILL else ["wait", "wait"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *actions], env={**os.environ, **PATH}, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        assert all(is_alive(pid) for pid in pids)
        parent.send_signal(number)
        parent.wait(100.0)
        assert await_end(pids, 20.0) == []
