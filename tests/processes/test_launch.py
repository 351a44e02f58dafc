"""Tests of launched processes: ready when they report so, named when they die, and never left behind."""

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import memoire
from memoire.errors import ChildDied, MemoireTimeout
from memoire.nodes.launcher import MAX_FAILED_STARTS, Child, Launcher
from memoire.nodes.supervision import ABANDONED, LINE
from netkit import is_alive, program, until

TESTS = Path(__file__).resolve().parents[1]
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TESTS), str(TESTS / "support")]))}


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with Launcher() as running:
        yield running


def start(launcher: Launcher, *actions: str, name: str = "child-0") -> Child:
    return launcher.start(name, "launched_child", *actions, environment=PATH)


def test_a_child_is_ready_when_it_says_so_says_where_and_finishes_on_order(launcher: Launcher) -> None:
    child = start(launcher, "ready", "wait")
    assert child.facts is None
    assert launcher.await_ready([child])
    assert child.facts == {"pid": child.process.pid, "threads": "1"}
    assert child.status is None
    child.send_order("finish")
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


def test_a_supervised_child_that_is_killed_is_started_again_and_that_is_said_in_one_line() -> None:
    lines: list[str] = []
    with Launcher(say=lines.append) as launcher:
        child, other = start(launcher, "ready", "wait"), start(launcher, "ready", "wait", name="child-1")
        launcher.await_ready([child, other])
        launcher.supervise([child], lambda facts: (f"first-was-{facts['pid']}",))
        first = child.process.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: launcher.pump(1.0) and child.process.pid != first and child.facts, 60.0)
        assert child.facts is not None and child.facts["pid"] != first
        assert lines == ["child-0 was killed by signal 9; it restarts in 0.5 s"]
        command = Path(f"/proc/{child.process.pid}/cmdline").read_bytes().split(b"\0")
        assert f"first-was-{first}".encode() in command
        assert other.status is None
        os.kill(other.process.pid, signal.SIGKILL)  # not supervised
        with pytest.raises(ChildDied, match="child-1"):
            while launcher.pump(60.0):
                pass
    assert child.status == 0


def test_a_supervised_child_that_cannot_start_any_more_ends_the_others(times: Callable[..., None]) -> None:
    times(restart_pause=0.01)
    lines: list[str] = []
    with Launcher(say=lines.append) as launcher:
        child = start(launcher, "ready", "wait")
        launcher.await_ready([child])
        launcher.supervise([child], lambda facts: (f"first-was-{facts['pid']}",))
        child.command = ("launched_child", "die-early")
        os.kill(child.process.pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="child-0 ended with status 3"):
            while launcher.pump(60.0):
                pass
    assert len(lines) == MAX_FAILED_STARTS
    assert child.next_command[-1].startswith("first-was-")
    assert lines[1].endswith("(its last output: so I leave)")


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
    launcher.close()  # a second close changes nothing


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_pump_at_once(number: signal.Signals, launcher: Launcher) -> None:
    child = start(launcher, "ready", "wait")
    launcher.await_ready([child])
    os.kill(os.getpid(), number)
    while launcher.pump(300.0):
        pass
    assert launcher.stop_signal == number
    assert not launcher.await_ready([start(launcher, "wait")])


def test_a_child_finds_what_its_launcher_found_whatever_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    """`python -m` looks in the working directory first, in which `./memoire` is a package."""
    (tmp_path / "memoire").mkdir()
    (tmp_path / "memoire" / "__init__.py").write_text("raise SystemExit('this is not the memoire that was asked')")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "only_here.py").write_text("print('found'); import memoire; print(memoire.__file__)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "extra")
    child = launcher.start("child-0", "only_here")
    launcher.wait_for([child], 60.0)
    assert list(child.tail) == ["found", memoire.__file__]


def test_a_program_of_the_package_sees_the_arguments_that_it_was_given(launcher: Launcher) -> None:
    child = launcher.start("child-0", "memoire", "--version")
    assert launcher.wait_for([child], 60.0)
    assert list(child.tail) == [f"memoire {memoire.__version__}"]


PARENT = textwrap.dedent("""
    import json, sys
    from memoire.nodes.launcher import Launcher
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
        pids = json.loads(parent.stdout.readline())
        assert all(is_alive(pid) for pid in pids)
        parent.send_signal(number)
        parent.wait(100.0)
        until(lambda: not any(map(is_alive, pids)), 20.0)


@contextlib.contextmanager
def tied(*words: str) -> Iterator[tuple["subprocess.Popen[str]", socket.socket]]:
    """Yield a child and this end of their line, which is never read; kill the child at the end."""
    ours, theirs = socket.socketpair()
    line = {**os.environ, **PATH, "OMP_NUM_THREADS": "1", LINE: str(theirs.fileno())}
    with ours, theirs, program(*words, pass_fds=[theirs.fileno()], env=line) as process:
        theirs.close()
        yield process, ours


@pytest.mark.parametrize(("action", "status"), [("wait", 0), ("hang", ABANDONED)])
@pytest.mark.timeout(90)
def test_a_line_that_ends_with_a_report_unread_is_the_end_of_the_child(action: str, status: int) -> None:
    """Linux resets a Unix stream with unread data, in place of ending it."""
    with tied("-m", "launched_child", "ready", action) as (process, line):
        assert select.select([line], [], [], 60.0)[0], "the child says that it is ready"
        line.close()
        assert process.wait(60.0) == status


def test_a_report_that_is_not_accepted_ends_the_child() -> None:
    with tied("-m", "launched_child", "ready", "report") as (process, line):
        line.shutdown(socket.SHUT_RD)  # orders may still come
        assert process.wait(60.0) == 0
        assert process.stdout.read() == "stopping\n"


def test_an_order_that_is_none_is_the_end_of_the_line() -> None:
    with tied("-m", "launched_child", "ready", "wait") as (process, line):
        line.sendall(b"Finish!\n")
        assert process.wait(60.0) == 0
        assert "stopping" in process.stdout.read()


def test_a_guarded_program_that_gets_sigterm_ends_with_the_status_of_that_signal() -> None:
    code = "import signal; from memoire.nodes.supervision import end_with_launcher; end_with_launcher(); print('ready', flush=True)"
    with program("-c", f"{code}; signal.pause()") as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(60.0) == 128 + signal.SIGTERM


HOLDER = textwrap.dedent("""
    import os, signal, time
    from memoire.nodes.launcher import Launcher
    launcher = Launcher()
    child = launcher.start("child-0", "launched_child", "ready", "wait")
    launcher.await_ready([child])
    copy = os.fork()
    if copy == 0:
        while True:
            signal.pause()
    print(child.process.pid, copy, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_child_ends_with_its_launcher_where_a_copy_of_that_holds_the_line() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, env={**os.environ, **PATH}, stdout=subprocess.PIPE, text=True) as parent:
        child, copy = map(int, parent.stdout.readline().split())
        try:
            parent.wait(60.0)
            until(lambda: not is_alive(child), 60.0)
        finally:
            os.kill(copy, signal.SIGKILL)


MOVED = "import os; pids = iter([7, 1]); os.getppid = lambda: next(pids); import launched_child; launched_child.main()"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_launcher_that_died_before_the_kernel_was_asked_is_noticed() -> None:
    with tied("-c", MOVED, "ready", "wait") as (process, _):
        assert process.wait(60.0) == 0
